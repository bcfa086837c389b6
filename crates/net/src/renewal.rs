//! Sockets made anew where those that were held are gone: after a reboot, or in another data
//! directory.
//!
//! A [`Recipe`] is noted when a program is frozen, beside [`SavedOptions`]. [`make`] makes of it: a
//! listener that listens where it did, a UDP socket that is bound and connected as before, and for
//! a TCP connection, which cannot come back, one that its peer has reset, so that a program that
//! reads or writes it gets the error at once. What was queued is lost. Addresses of the namespace
//! that a socket was in become those of its new one.
//!
//! Not made anew: memberships of multicast groups, attached filters and options that are in no list
//! here. A crash leaves nothing: sockets that no process holds are gone.

use crate::addr::Addresses;
use crate::custody::{BACKLOG, SavedOptions, SocketKind};
use kip_sys::netns::enter_net;
use kip_sys::sock::{self, IntOption};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, OFlags, Uid};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, getpeername, socket_with};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Options that are kept, by the names they have in a recipe.
const KEPT: [(&str, IntOption); 11] = [
    ("v6only", IntOption::V6Only),
    ("reuseport", IntOption::ReusePort),
    ("freebind", IntOption::FreeBind),
    ("broadcast", IntOption::Broadcast),
    ("keepalive", IntOption::KeepAlive),
    ("tos", IntOption::Tos),
    ("pktinfo", IntOption::PacketInfo),
    ("pktinfo6", IntOption::PacketInfo6),
    ("nodelay", IntOption::NoDelay),
    ("fastopen", IntOption::FastOpen),
    ("user-timeout", IntOption::UserTimeout),
];
/// How long a reset over the loopback interface may take.
const RESET_WITHIN: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// All that [`SavedOptions`] does not say of a socket and that is needed to make it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// `SO_DOMAIN`, `SO_TYPE`, `SO_PROTOCOL`.
    domain: u16,
    kind: u32,
    protocol: u32,
    /// Its status flag O_NONBLOCK.
    nonblocking: bool,
    /// The user and group that made it: host ids.
    owner: (u32, u32),
    /// Where a UDP socket that is connected sends to.
    peer: Option<SocketAddr>,
    options: BTreeMap<String, i32>,
    /// SO_RCVTIMEO and SO_SNDTIMEO, nanoseconds; 0 is none.
    timeouts_ns: (u64, u64),
}

/// Where sockets are made.
#[derive(Debug, Clone, Copy)]
pub struct RenewalPlace<'a> {
    /// The network namespace.
    pub namespace: BorrowedFd<'a>,
    /// Its own addresses.
    pub addresses: Addresses,
    /// First host id of the block of ids that their owners had, and of the one that they have.
    pub ids: (u32, u32),
}

/// A socket cannot be made anew.
#[derive(Debug, thiserror::Error)]
#[error("the socket {socket} cannot be made anew: {doing}")]
pub struct RenewalError {
    socket: String,
    doing: &'static str,
    #[source]
    source: io::Error,
}

/// Notes what a socket was made with. To be called while its program is frozen.
///
/// # Errors
/// It is no socket, or its kind cannot be read.
pub fn recipe(fd: BorrowedFd<'_>) -> io::Result<Recipe> {
    let get = |option| sock::get_int(fd, option);
    let (domain, kind, protocol) = (get(IntOption::Domain)?, get(IntOption::Type)?, get(IntOption::Protocol)?);
    let stat = rustix::fs::fstat(fd)?;
    let is_udp = protocol == 17;
    let peer = getpeername(fd).ok().flatten().and_then(|a| SocketAddr::try_from(a).ok()).filter(|_| is_udp);
    let timeout = |which| {
        let found = sockopt::socket_timeout(fd, which).ok().flatten().unwrap_or_default();
        found.as_nanos() as u64
    };
    Ok(Recipe {
        domain: domain as u16,
        kind: kind as u32,
        protocol: protocol as u32,
        nonblocking: rustix::fs::fcntl_getfl(fd)?.contains(OFlags::NONBLOCK),
        owner: (stat.st_uid, stat.st_gid),
        peer,
        options: KEPT.iter().filter_map(|(name, option)| Some(((*name).to_owned(), get(*option).ok()?))).collect(),
        timeouts_ns: (timeout(Timeout::Recv), timeout(Timeout::Send)),
    })
}

/// Makes the sockets, in their order. Each is ready for [`crate::custody::hold`].
///
/// # Errors
/// One of them cannot be made; those that were are gone again.
pub fn make(sockets: &[(&Recipe, &SavedOptions)], place: &RenewalPlace<'_>) -> Result<Vec<OwnedFd>, RenewalError> {
    // A thread of its own, which ends in the namespace.
    std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            let entered = enter_net(place.namespace);
            entered.map_err(|source| RenewalError {
                socket: "of a sleeper".to_owned(),
                doing: "its network namespace cannot be entered",
                source,
            })?;
            sockets.iter().map(|(recipe, saved)| one(recipe, saved, place)).collect()
        });
        made.join().expect("making sockets does not panic")
    })
}

fn one(recipe: &Recipe, saved: &SavedOptions, place: &RenewalPlace<'_>) -> Result<OwnedFd, RenewalError> {
    let failed = |doing| {
        let socket = saved.kind.to_string();
        move |source: io::Error| RenewalError { socket, doing, source }
    };
    let made = match saved.kind {
        SocketKind::Stream { .. } => reset_connection(recipe).map_err(failed("a connection that was reset"))?,
        SocketKind::Runtime => ended_connection().map_err(failed("a connection that has ended"))?,
        _ => open(recipe).map_err(failed("socket(2)"))?,
    };
    let fd = made.as_fd();
    for (name, option) in KEPT {
        if let Some(value) = recipe.options.get(name) {
            // As they were read; what the kernel does not take where nothing was asked for is the
            // default anyway.
            let set = sock::set_int(fd, option, *value);
            set.or_else(|e| if *value == 0 { Ok(()) } else { Err(e) }).map_err(failed("its options"))?;
        }
    }
    for (which, ns) in [(Timeout::Recv, recipe.timeouts_ns.0), (Timeout::Send, recipe.timeouts_ns.1)] {
        let timeout = Some(Duration::from_nanos(ns)).filter(|t| !t.is_zero());
        sockopt::set_socket_timeout(fd, which, timeout).map_err(|e| failed("its time-outs")(e.into()))?;
    }
    // What is bound anew had its place before; its own setting comes back with custody.
    sock::set_int(fd, IntOption::ReuseAddr, 1).map_err(failed("its options"))?;
    let bind = |local: SocketAddr| {
        let local = moved(local, &place.addresses);
        rustix::net::bind(fd, &local).map_err(|e| failed("bind(2)")(e.into()))
    };
    match saved.kind {
        SocketKind::Listener { local, .. } => {
            bind(local)?;
            rustix::net::listen(fd, BACKLOG).map_err(|e| failed("listen(2)")(e.into()))?;
        }
        SocketKind::Udp { local } => {
            if local.port() != 0 {
                bind(local)?;
            }
            if let Some(peer) = recipe.peer {
                // A peer that cannot be reached now is one that does not answer.
                let _ = rustix::net::connect(fd, &peer);
            }
        }
        SocketKind::Stream { .. } | SocketKind::Runtime | SocketKind::Inotify | SocketKind::Other => {}
    }
    let owner =
        |id: u32| id.checked_sub(place.ids.0).filter(|inside| *inside < 1 << 16).map(|inside| place.ids.1 + inside);
    let (uid, gid) = (owner(recipe.owner.0).map(Uid::from_raw), owner(recipe.owner.1).map(Gid::from_raw));
    rustix::fs::fchown(fd, uid, gid).map_err(|e| failed("its owner")(e.into()))?;
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|e| failed("its flags")(e.into()))?;
    let flags = if recipe.nonblocking { flags | OFlags::NONBLOCK } else { flags - OFlags::NONBLOCK };
    rustix::fs::fcntl_setfl(fd, flags).map_err(|e| failed("its flags")(e.into()))?;
    Ok(made)
}

fn open(recipe: &Recipe) -> io::Result<OwnedFd> {
    let protocol = NonZeroU32::new(recipe.protocol).map(Protocol::from_raw);
    let (family, kind) = (AddressFamily::from_raw(recipe.domain), SocketType::from_raw(recipe.kind));
    Ok(socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?)
}

/// A connection of which the peer has just said that it knows nothing.
fn reset_connection(recipe: &Recipe) -> io::Result<OwnedFd> {
    let v6 = recipe.domain == AddressFamily::INET6.as_raw();
    let listener = match v6 {
        true => TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?,
        false => TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?,
    };
    let target = match listener.local_addr()? {
        SocketAddr::V4(at) if v6 => SocketAddr::new(at.ip().to_ipv6_mapped().into(), at.port()),
        at => at,
    };
    let made = open(recipe)?;
    rustix::net::connect(&made, &target)?;
    let (peer, _) = listener.accept()?;
    sockopt::set_socket_linger(&peer, Some(Duration::ZERO))?;
    drop(peer);
    let mut fds = [PollFd::new(&made, PollFlags::HUP)];
    match poll(&mut fds, Some(&RESET_WITHIN))? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(made),
    }
}

/// A connection to Kip that Kip has closed.
fn ended_connection() -> io::Result<OwnedFd> {
    Ok(std::os::unix::net::UnixStream::pair()?.0.into())
}

/// An address of a namespace that is no more is the new one's; all others are what they were.
fn moved(address: SocketAddr, own: &Addresses) -> SocketAddr {
    let v4 = |ip: Ipv4Addr| matches!(ip.octets(), [10, 213, ..]).then_some(own.v4);
    let ip = match address.ip() {
        IpAddr::V4(ip) => v4(ip).map(IpAddr::V4),
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(mapped) => v4(mapped).map(|ip| IpAddr::V6(ip.to_ipv6_mapped())),
            None => matches!(ip.segments(), [0xfd6b, 0x6970, 0, ..]).then_some(IpAddr::V6(own.v6)),
        },
    };
    SocketAddr::new(ip.unwrap_or(address.ip()), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::custody::{self, snapshot_options};
    use crate::{Instance, Slot};
    use std::io::{Read, Write};
    use std::net::{TcpStream, UdpSocket};

    fn addresses() -> Addresses {
        Addresses::of(Instance::new(2).unwrap(), Slot::new(9).unwrap())
    }

    /// The same socket again, in this namespace; the old one is gone first.
    fn again(old: OwnedFd) -> (OwnedFd, SavedOptions) {
        let (recipe, saved) = (recipe(old.as_fd()).unwrap(), snapshot_options(old.as_fd()).unwrap());
        let recipe: Recipe = serde_json::from_str(&serde_json::to_string(&recipe).unwrap()).unwrap();
        drop(old);
        let namespace = kip_sys::netns::current_net().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let place = RenewalPlace { namespace: namespace.as_fd(), addresses: addresses(), ids: (own, own) };
        let made = make(&[(&recipe, &saved)], &place).unwrap().remove(0);
        (made, saved)
    }

    // promise recovery: listeners and UDP sockets are made anew with their options and addresses
    // held by: this, `kip_net::renewal::tests::datagrams_come_and_go_as_before`,
    //   `kip_net::renewal::tests::own_addresses_move_and_no_others`
    #[test]
    fn a_listener_listens_where_it_did_with_its_options() {
        for at in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(old) = TcpListener::bind(at) else { continue };
            let at = old.local_addr().unwrap();
            old.set_nonblocking(true).unwrap();
            sock::set_int(old.as_fd(), IntOption::ReusePort, 1).unwrap();
            let (made, saved) = again(old.into());
            assert_eq!(sock::get_int(made.as_fd(), IntOption::ReusePort).unwrap(), 1);
            custody::release(made.as_fd(), &saved).unwrap();
            let made = TcpListener::from(made);
            assert_eq!(made.local_addr().unwrap(), at);
            assert_eq!(made.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
            let target =
                SocketAddr::new(if at.ip().is_unspecified() { Ipv6Addr::LOCALHOST.into() } else { at.ip() }, at.port());
            let _client = TcpStream::connect(target).unwrap();
            made.accept().unwrap();
        }
    }

    #[test]
    fn a_connection_comes_back_as_one_that_was_reset() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(at) else { continue };
            let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (made, saved) = again(listener.accept().unwrap().0.into());
            custody::hold(made.try_clone().unwrap(), &saved).unwrap();
            assert!(custody::seen(made.as_fd(), &saved.kind).unwrap().ended, "its end wakes who sleeps");
            custody::release(made.as_fd(), &saved).unwrap();
            let mut made = TcpStream::from(made);
            assert_eq!(made.read(&mut [0; 1]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
            assert_eq!(made.write(&[0; 1]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        }
    }

    #[test]
    fn datagrams_come_and_go_as_before() {
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        let old = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = old.local_addr().unwrap();
        old.connect(other.local_addr().unwrap()).unwrap();
        old.set_read_timeout(Some(Duration::from_secs(7))).unwrap();
        let (made, _) = again(old.into());
        let made = UdpSocket::from(made);
        assert_eq!(made.read_timeout().unwrap(), Some(Duration::from_secs(7)));
        made.send(b"to").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(other.recv_from(&mut buffer).unwrap(), (2, at));
        other.send_to(b"fro", at).unwrap();
        assert_eq!(made.recv(&mut buffer).unwrap(), 3);
        // One that is not connected to anything, and not bound.
        let (domain, stream) = (AddressFamily::INET, SocketType::STREAM);
        let (made, _) = again(socket_with(domain, stream, SocketFlags::CLOEXEC, None).unwrap());
        assert_eq!(sock::get_int(made.as_fd(), IntOption::Protocol).unwrap(), 6);
    }

    #[test]
    fn own_addresses_move_and_no_others() {
        let own = addresses();
        let cases = [
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("10.213.8.5:80", "10.213.16.9:80"),
            ("[::ffff:10.213.8.5]:80", "[::ffff:10.213.16.9]:80"),
            ("[fd6b:6970:0:1::5]:80", "[fd6b:6970:0:2::9]:80"),
            ("[fd6b:6971:0:1::5]:80", "[fd6b:6971:0:1::5]:80"),
            ("10.214.0.1:80", "10.214.0.1:80"),
        ];
        for (from, to) in cases {
            assert_eq!(moved(from.parse().unwrap(), &own), to.parse().unwrap(), "{from}");
        }
    }
}
