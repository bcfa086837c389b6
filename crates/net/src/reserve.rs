//! Reservation of host ports.
//!
//! Packets to a published port are translated before any socket sees them, so nothing would keep a
//! service of the host from listening on the same port and never hearing of any client. A socket
//! that is bound (and never listens) takes the port as far as bind(2) is concerned. The reservation
//! lasts as long as a process holds the descriptor.

use crate::diag::{Diag, SocketInfo, TcpState};
use kip_types::api::{Code, Refusal};
use kip_types::{ProcName, Protocol, chain};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

/// Ports are chosen from here, below the usual ephemeral range (32768 to 60999), so that outgoing
/// connections do not take them meanwhile.
const CHOICE: std::ops::RangeInclusive<u16> = 20_000..=32_767;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// The port of the discard protocol (RFC 863): any port does for a look at an address.
const DISCARD: u16 = 9;

/// At which addresses of the host a port is reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// All, of IPv4 and IPv6.
    All,
    /// This one, which the machine has.
    Only(IpAddr),
    /// This one, which the machine may get later: after a boot, links come up when they do.
    Expected(IpAddr),
}

/// A port of the host that no other socket can bind.
#[derive(Debug)]
pub struct Reservation {
    /// The bound socket.
    pub fd: OwnedFd,
    /// Its port.
    pub port: u16,
    /// Its protocol.
    pub proto: Protocol,
}

/// A port could not be reserved.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// A process has it.
    #[error("port {port}/{proto} is taken by {by}")]
    Taken {
        /// The port.
        port: u16,
        /// Its protocol.
        proto: Protocol,
        /// Which process, for example `lighttpd (pid 123)`.
        by: String,
    },
    /// The address is another machine's.
    #[error("this machine has no address {0}")]
    NoAddress(IpAddr),
    /// The address is that of all machines of a network.
    #[error("{0} is the broadcast address of one of this machine's networks, at which no port can be published")]
    Broadcast(IpAddr),
    /// None is left.
    #[error("no {proto} port from {} to {} is free", CHOICE.start(), CHOICE.end())]
    NoneLeft {
        /// The protocol.
        proto: Protocol,
    },
    /// Anything else.
    #[error("cannot reserve port {port}/{proto}")]
    Failed {
        /// The port.
        port: u16,
        /// Its protocol.
        proto: Protocol,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl ReserveError {
    /// Which proc has a port that `name` asked for, if one has, and what to do.
    pub fn refusal(&self, name: &ProcName, owner: Option<ProcName>, proto: Protocol, port: u16) -> Refusal {
        let by = owner.map_or_else(|| chain(self), |owner| format!("{proto} port {port} is taken by proc {owner}"));
        let of_address = matches!(self, ReserveError::NoAddress(_) | ReserveError::Broadcast(_));
        let other = if of_address { "address" } else { "host port" };
        Refusal::new(Code::Taken, format!("{name} cannot start: {by}; choose another {other}"))
    }
}

/// Reserves a port, or one of the choice if none is given.
pub fn reserve(proto: Protocol, at: At, port: Option<u16>) -> Result<Reservation, ReserveError> {
    if let At::Only(addr) = at
        && is_broadcast(addr)
    {
        return Err(ReserveError::Broadcast(addr));
    }
    let failed = |port, e| match (e, at) {
        (Errno::ADDRNOTAVAIL, At::Only(addr)) => ReserveError::NoAddress(addr),
        _ => ReserveError::Failed { port, proto, source: e.into() },
    };
    if let Some(port) = port {
        return match bind_to(proto, at, port, false) {
            Ok(reservation) => Ok(reservation),
            Err(Errno::ADDRINUSE) => Err(ReserveError::Taken { port, proto, by: holder(proto, port) }),
            Err(e) => Err(failed(port, e)),
        };
    }
    let ephemeral = ephemeral_range();
    let count = CHOICE.end() - CHOICE.start() + 1;
    // Started anywhere, so that neither old clients of a removed proc nor other instances meet at
    // one port.
    let start = (RandomState::new().hash_one(std::process::id()) % u64::from(count)) as u16;
    let candidates = (0..count).map(|i| CHOICE.start() + (start + i) % count);
    let outside = candidates.clone().filter(|p| !ephemeral.contains(p));
    for port in outside.chain(candidates.filter(|p| ephemeral.contains(p))) {
        match bind_to(proto, at, port, false) {
            Ok(reservation) => return Ok(reservation),
            Err(Errno::ADDRINUSE) => {}
            Err(e) => return Err(failed(port, e)),
        }
    }
    Err(ReserveError::NoneLeft { proto })
}

/// The port of a socket that is bound at this address and no other, or without one at all, if it is
/// the one that is wanted.
pub fn port_at(socket: impl AsFd, only_at: Option<IpAddr>, wanted: Option<u16>) -> Option<u16> {
    let bound = SocketAddr::try_from(getsockname(socket).ok()?).ok()?;
    let addr = Some(bound.ip().to_canonical()).filter(|addr| !addr.is_unspecified());
    (addr == only_at && wanted.is_none_or(|port| port == bound.port())).then(|| bound.port())
}

/// The process that has a port at other addresses than `these`, and so would keep it from being
/// reserved at all addresses.
pub fn taken_but_at(proto: Protocol, port: u16, these: &[IpAddr]) -> Option<ReserveError> {
    let mut others = match Diag::open().and_then(|d| d.by_port(proto, port)) {
        Ok(sockets) => sockets,
        Err(e) => return Some(ReserveError::Failed { port, proto, source: io::Error::other(e) }),
    };
    // Connections that were accepted are their listener's.
    let binds =
        |s: &SocketInfo| proto == Protocol::Udp || matches!(s.state, TcpState::Listen | TcpState::BoundInactive);
    others.retain(|s| binds(s) && !these.contains(&s.local.ip().to_canonical()));
    (!others.is_empty()).then(|| ReserveError::Taken { port, proto, by: one_of(&others) })
}

/// Listens for TCP on a port of the host, for IPv4 and IPv6 at once. No process can reserve it
/// meanwhile.
pub fn listen(port: u16) -> Result<TcpListener, ReserveError> {
    let proto = Protocol::Tcp;
    let listening = bind_to(proto, At::All, port, true).and_then(|bound| {
        rustix::net::listen(&bound.fd, BACKLOG)?;
        Ok(TcpListener::from(bound.fd))
    });
    listening.map_err(|e| match e {
        Errno::ADDRINUSE => ReserveError::Taken { port, proto, by: holder(proto, port) },
        e => ReserveError::Failed { port, proto, source: e.into() },
    })
}

/// With `again` also where connections of an earlier listener have not timed out yet.
fn bind_to(proto: Protocol, at: At, port: u16, again: bool) -> Result<Reservation, Errno> {
    let kind = match proto {
        Protocol::Tcp => SocketType::STREAM,
        Protocol::Udp => SocketType::DGRAM,
    };
    let open = |family| {
        let fd = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_reuseaddr(&fd, again)?;
        Ok::<_, Errno>(fd)
    };
    let both = || {
        let fd = open(AddressFamily::INET6)?;
        sockopt::set_ipv6_v6only(&fd, false)?;
        bind(&fd, &SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
        Ok(fd)
    };
    let one = |addr: IpAddr, expected: bool| {
        let fd = open(if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 })?;
        match addr {
            IpAddr::V4(_) => sockopt::set_ip_freebind(&fd, expected)?,
            IpAddr::V6(_) => sockopt::set_ipv6_freebind(&fd, expected)?,
        }
        bind(&fd, &SocketAddr::from((addr, port)))?;
        Ok(fd)
    };
    let fd = match at {
        At::Only(addr) => one(addr, false)?,
        At::Expected(addr) => one(addr, true)?,
        At::All => match both() {
            // A machine without IPv6.
            Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => one(Ipv4Addr::UNSPECIFIED.into(), false)?,
            other => other?,
        },
    };
    let port = SocketAddr::try_from(getsockname(&fd)?).map_or(port, |a| a.port());
    Ok(Reservation { fd, port, proto })
}

/// Whether the kernel takes an address for a network's broadcast address, to which bind(2) binds
/// as to any other. A UDP socket is connected to one only if it may broadcast (ip(7)); nothing is
/// sent.
fn is_broadcast(addr: IpAddr) -> bool {
    let Ok(socket) = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)) else { return false };
    let refused = |e: io::Error| e.raw_os_error() == Some(Errno::ACCESS.raw_os_error());
    addr.is_ipv4()
        && socket.connect((addr, DISCARD)).is_err_and(refused)
        // A route may prohibit it all the same.
        && socket.set_broadcast(true).and_then(|()| socket.connect((addr, DISCARD))).is_ok()
}

fn ephemeral_range() -> std::ops::RangeInclusive<u16> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut numbers = text.split_whitespace().filter_map(|n| n.parse().ok());
    numbers.next().unwrap_or(32_768)..=numbers.next().unwrap_or(60_999)
}

/// The process that has a port, as far as it can be found.
fn holder(proto: Protocol, port: u16) -> String {
    match Diag::open().and_then(|d| d.by_port(proto, port)) {
        Ok(sockets) => one_of(&sockets),
        Err(e) => format!("an unknown process ({})", kip_types::chain(&e)),
    }
}

fn one_of(sockets: &[SocketInfo]) -> String {
    for socket in sockets {
        if socket.inode != 0
            && let Some((pid, name)) = process_with(socket.inode)
        {
            return format!("{name} (pid {pid})");
        }
    }
    match sockets.first() {
        Some(socket) => format!("a process that is not visible here (socket {})", socket.inode),
        None => "an unknown process".to_owned(),
    }
}

/// The process that has a socket open: the one with the lowest pid, which is a server's first.
fn process_with(inode: u64) -> Option<(u32, String)> {
    let wanted = format!("socket:[{inode}]");
    let mut pids: Vec<u32> =
        fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids.into_iter().find_map(|pid| {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let has = open.flatten().any(|e| fs::read_link(e.path()).is_ok_and(|l| l.as_os_str() == wanted.as_str()));
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        has.then(|| (pid, name.trim().to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn a_reserved_port_cannot_be_bound_and_the_holder_is_named() {
        for proto in [Protocol::Tcp, Protocol::Udp] {
            let taken = |port| match proto {
                Protocol::Tcp => TcpListener::bind(("127.0.0.1", port)).is_err(),
                Protocol::Udp => UdpSocket::bind(("127.0.0.1", port)).is_err(),
            };
            let reservation = reserve(proto, At::All, None).unwrap();
            assert!(CHOICE.contains(&reservation.port));
            assert!(taken(reservation.port));
            let error = reserve(proto, At::All, Some(reservation.port)).unwrap_err().to_string();
            assert!(error.contains(&format!("(pid {})", std::process::id())), "{error}");
            let port = reservation.port;
            drop(reservation);
            assert!(!taken(port));
        }
    }

    #[test]
    fn a_socket_is_at_one_address_or_at_all() {
        let (one, other): (IpAddr, IpAddr) = ("127.0.0.1".parse().unwrap(), "127.0.0.2".parse().unwrap());
        for at in [At::All, At::Only(one)] {
            let Reservation { fd, port, .. } = reserve(Protocol::Tcp, at, None).unwrap();
            let found = [None, Some(one), Some(other)].map(|addr| port_at(&fd, addr, Some(port)));
            let all = at == At::All;
            assert_eq!(found, [all.then_some(port), (!all).then_some(port), None], "{at:?}");
            assert_eq!([None, Some(one)].map(|addr| port_at(&fd, addr, Some(port ^ 1))), [None, None], "{at:?}");
        }
    }

    #[test]
    fn who_listens_again_has_the_port_to_itself() {
        let reservation = reserve(Protocol::Tcp, At::All, None).unwrap();
        let port = reservation.port;
        assert!(matches!(listen(port), Err(ReserveError::Taken { .. })));
        drop(reservation);
        let listener = listen(port).unwrap();
        assert!(matches!(listen(port), Err(ReserveError::Taken { .. })));
        assert!(matches!(reserve(Protocol::Tcp, At::All, Some(port)), Err(ReserveError::Taken { .. })));
        // The one that closes first has to wait before its end of the connection is gone.
        let _client = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        drop(listener.accept().unwrap());
        drop(listener);
        listen(port).unwrap();
    }

    #[test]
    fn one_address_is_reserved_and_the_others_are_not() {
        let [one, other] = [[127, 0, 0, 1], [127, 0, 0, 2]].map(IpAddr::from);
        let first = reserve(Protocol::Tcp, At::Only(one), None).unwrap();
        let port = first.port;
        assert!(TcpListener::bind((one, port)).is_err());
        assert!(matches!(reserve(Protocol::Tcp, At::Only(one), Some(port)), Err(ReserveError::Taken { .. })));
        assert!(matches!(reserve(Protocol::Tcp, At::All, Some(port)), Err(ReserveError::Taken { .. })));
        let second = reserve(Protocol::Tcp, At::Only(other), Some(port)).unwrap();
        assert_eq!(second.port, port);
        let error = reserve(Protocol::Tcp, At::Only(IpAddr::from([127, 255, 255, 255])), None).unwrap_err().to_string();
        assert!(error.starts_with("127.255.255.255 is the broadcast address"), "{error}");
        // Of TEST-NET-2, which no machine has.
        for absent in ["198.51.100.255", "2001:db8:5:ffff::ffff"].map(|a| a.parse().unwrap()) {
            let error = reserve(Protocol::Udp, At::Only(absent), None).unwrap_err().to_string();
            assert_eq!(error, format!("this machine has no address {absent}"));
            reserve(Protocol::Udp, At::Expected(absent), None).unwrap();
        }
    }

    #[test]
    fn who_is_at_other_addresses_is_found() {
        let [one, other] = [[127, 0, 0, 1], [127, 0, 0, 2]].map(IpAddr::from);
        for proto in [Protocol::Tcp, Protocol::Udp] {
            let first = reserve(proto, At::Only(one), None).unwrap();
            assert!(taken_but_at(proto, first.port, &[one]).is_none());
            let at_other = (other, first.port);
            let service: Box<dyn std::any::Any> = match proto {
                Protocol::Tcp => Box::new(TcpListener::bind(at_other).unwrap()),
                Protocol::Udp => Box::new(UdpSocket::bind(at_other).unwrap()),
            };
            let by = taken_but_at(proto, first.port, &[one]).unwrap().to_string();
            assert!(by.ends_with(&format!("(pid {})", std::process::id())), "{by}");
            drop(service);
            assert!(taken_but_at(proto, first.port, &[one]).is_none());
        }
    }

    #[test]
    fn a_listening_service_is_named() {
        let service = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = service.local_addr().unwrap().port();
        match reserve(Protocol::Tcp, At::All, Some(port)) {
            Err(ReserveError::Taken { by, .. }) => {
                assert!(by.ends_with(&format!("(pid {})", std::process::id())), "{by}")
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(reserve(Protocol::Udp, At::All, Some(port)).unwrap().port, port);
    }
}
