//! What the kernel knows of the sockets of a namespace: sock_diag(7).
//!
//! Only reads, and never touches a socket itself, so it cannot be held up by a program that is
//! stuck in a system call with its socket locked. The messages are read by hand: the packet crate
//! for them needs another version of its core than the rtnetlink one, and all we want is one fixed
//! structure (`struct inet_diag_msg`).

mod unix;

pub use unix::UnixInfo;

use kip_types::Protocol;
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Sizes of struct nlmsghdr, inet_diag_req_v2 and inet_diag_msg.
const HEADER: usize = 16;
const REQUEST: usize = 56;
const ANSWER: usize = 72;

/// Sockets could not be listed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} the sockets of a network namespace")]
pub struct DiagError {
    doing: &'static str,
    #[source]
    source: io::Error,
}

/// States of TCP sockets, numbered as in net/tcp_states.h. A UDP socket is `Established` when
/// connected, else `Closed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TcpState {
    /// Both ways open.
    Established = 1,
    /// Connecting.
    SynSent = 2,
    /// Being connected to.
    SynReceived = 3,
    /// We have closed.
    FinWait1 = 4,
    /// And the peer knows.
    FinWait2 = 5,
    /// Both have closed; waiting for stragglers.
    TimeWait = 6,
    /// Nothing.
    Closed = 7,
    /// The peer has closed.
    CloseWait = 8,
    /// And so have we.
    LastAck = 9,
    /// Waits for connections.
    Listen = 10,
    /// Both closed at once.
    Closing = 11,
    /// A request without a socket yet.
    NewSynReceived = 12,
    /// Bound, neither listening nor connected. Only asked for by [`Diag::by_port`]; kernel 6.8.
    BoundInactive = 13,
}

impl TcpState {
    fn from_number(number: u8) -> Option<TcpState> {
        use TcpState::*;
        [
            Established,
            SynSent,
            SynReceived,
            FinWait1,
            FinWait2,
            TimeWait,
            Closed,
            CloseWait,
            LastAck,
            Listen,
            Closing,
            NewSynReceived,
            BoundInactive,
        ]
        .into_iter()
        .find(|s| *s as u8 == number)
    }
}

/// One socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketInfo {
    /// TCP or UDP.
    pub proto: Protocol,
    /// Its state.
    pub state: TcpState,
    /// Its own address.
    pub local: SocketAddr,
    /// The other side's, all zeros if none.
    pub peer: SocketAddr,
    /// Its inode, as in `socket:[INODE]`; 0 for one that no descriptor refers to.
    pub inode: u64,
    /// Bytes unread; for a listener, connections not yet accepted.
    pub receive_queue: u32,
    /// Bytes not yet sent or acknowledged; for a listener, its backlog.
    pub send_queue: u32,
}

/// What waits to be accepted at a listener.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unaccepted {
    /// Connections with bytes to read.
    pub with_bytes: usize,
    /// Open connections that have brought none yet.
    pub silent: usize,
}

/// A connection to the kernel that sees one namespace.
pub struct Diag {
    socket: Socket,
}

impl Diag {
    /// For the namespace of the calling thread.
    pub fn open() -> Result<Diag, DiagError> {
        let wrong = |source| DiagError { doing: "ask for", source };
        let mut socket = Socket::new(NETLINK_SOCK_DIAG).map_err(wrong)?;
        socket.bind_auto().map_err(wrong)?;
        Ok(Diag { socket })
    }

    /// For another namespace: a thread of its own enters it for a moment.
    pub fn open_in(namespace: BorrowedFd<'_>) -> Result<Diag, DiagError> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("kip-diag".to_owned()).spawn_scoped(scope, || {
                kip_sys::netns::enter_net(namespace).map_err(|source| DiagError { doing: "enter", source })?;
                Diag::open()
            });
            let thread = thread.map_err(|source| DiagError { doing: "start a thread for", source })?;
            thread.join().expect("a thread that makes two system calls does not panic")
        })
    }

    /// For the namespace a socket lives in.
    pub fn open_at(socket: BorrowedFd<'_>) -> Result<Diag, DiagError> {
        let namespace = kip_sys::sock::netns_of(socket).map_err(|source| DiagError { doing: "find", source })?;
        Diag::open_in(namespace.as_fd())
    }

    /// Listening TCP sockets.
    pub fn listeners(&self) -> Result<Vec<SocketInfo>, DiagError> {
        self.list(Protocol::Tcp, &[TcpState::Listen], None)
    }

    /// TCP connections that a descriptor refers to and that can still bring or take data.
    pub fn connections(&self) -> Result<Vec<SocketInfo>, DiagError> {
        use TcpState::*;
        let mut all = self.list(Protocol::Tcp, &[Established, CloseWait, FinWait1, FinWait2, SynSent], None)?;
        all.retain(|s| s.inode != 0);
        Ok(all)
    }

    /// UDP sockets.
    pub fn udp(&self) -> Result<Vec<SocketInfo>, DiagError> {
        self.list(Protocol::Udp, &[TcpState::Established, TcpState::Closed], None)
    }

    /// Whatever is bound to a port, listeners first.
    pub fn by_port(&self, proto: Protocol, port: u16) -> Result<Vec<SocketInfo>, DiagError> {
        use TcpState::*;
        let states = match proto {
            Protocol::Tcp => &[Listen, BoundInactive, Established, CloseWait, SynSent, FinWait1, FinWait2][..],
            Protocol::Udp => &[Established, Closed][..],
        };
        let mut found = self.list(proto, states, Some(port))?;
        found.retain(|s| s.local.port() == port);
        found.sort_by_key(|s| s.state != Listen);
        Ok(found)
    }

    /// What waits to be accepted at a listener with this address. A socket that the program has not
    /// accepted has no inode, and no other open socket lacks one. A peer's FIN counts as one byte
    /// of the queue, which is not data; a peer that closed without having sent any data is not
    /// counted at all.
    pub fn unaccepted(&self, listener: SocketAddr) -> Result<Unaccepted, DiagError> {
        let mut found = Unaccepted::default();
        for s in self.list(Protocol::Tcp, &[TcpState::Established, TcpState::CloseWait], Some(listener.port()))? {
            let same = s.local.port() == listener.port()
                && (listener.ip().is_unspecified() || plain(s.local.ip()) == plain(listener.ip()));
            if !same || s.inode != 0 {
                continue;
            }
            match (s.state, s.receive_queue) {
                (TcpState::Established, 0) => found.silent += 1,
                (TcpState::Established, _) | (_, 2..) => found.with_bytes += 1,
                _ => {}
            }
        }
        Ok(found)
    }

    fn list(&self, proto: Protocol, states: &[TcpState], port: Option<u16>) -> Result<Vec<SocketInfo>, DiagError> {
        let mask = states.iter().fold(0, |mask, s| mask | 1u32 << *s as u8);
        let mut found = Vec::new();
        for family in [AF_INET, AF_INET6] {
            self.dump(family, proto, mask, port, &mut found).map_err(|source| DiagError { doing: "list", source })?;
        }
        Ok(found)
    }

    fn dump(
        &self,
        family: u8,
        proto: Protocol,
        mask: u32,
        port: Option<u16>,
        found: &mut Vec<SocketInfo>,
    ) -> io::Result<()> {
        let mut request = Vec::with_capacity(REQUEST);
        request.extend([family, if proto == Protocol::Tcp { 6 } else { 17 }, 0, 0]);
        request.extend(mask.to_ne_bytes());
        // struct inet_diag_sockid begins with the local port; zero means any.
        request.extend(port.unwrap_or(0).to_be_bytes());
        request.resize(REQUEST, 0);
        self.ask(&request, |body| found.extend(parse(body, proto)))
    }

    /// Sends a request of one family and hands each answer over.
    fn ask(&self, request: &[u8], mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let mut message = Vec::with_capacity(HEADER + request.len());
        message.extend(((HEADER + request.len()) as u32).to_ne_bytes());
        message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        message.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
        message.extend([0; 8]);
        message.extend(request);
        self.socket.send(&message, 0)?;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let mut rest = &bytes[..];
            while rest.len() >= HEADER {
                let length = (u32_at(rest, 0) as usize).clamp(HEADER, rest.len());
                let (message, body) = (&rest[..HEADER], &rest[HEADER..length]);
                match u16::from_ne_bytes([message[4], message[5]]) {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR if body.len() >= 4 => {
                        return Err(io::Error::from_raw_os_error(-(u32_at(body, 0) as i32)));
                    }
                    SOCK_DIAG_BY_FAMILY => each(body),
                    _ => {}
                }
                rest = &rest[length.next_multiple_of(4).min(rest.len())..];
            }
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn parse(body: &[u8], proto: Protocol) -> Option<SocketInfo> {
    if body.len() < ANSWER {
        return None;
    }
    let address = |port_at: usize, ip_at: usize| {
        let port = u16::from_be_bytes([body[port_at], body[port_at + 1]]);
        let ip: [u8; 16] = body[ip_at..ip_at + 16].try_into().ok()?;
        let ip = if body[0] == AF_INET {
            IpAddr::V4(Ipv4Addr::new(ip[0], ip[1], ip[2], ip[3]))
        } else {
            IpAddr::V6(Ipv6Addr::from(ip))
        };
        Some(SocketAddr::new(ip, port))
    };
    Some(SocketInfo {
        proto,
        state: TcpState::from_number(body[1])?,
        local: address(4, 8)?,
        peer: address(6, 24)?,
        inode: u64::from(u32_at(body, 68)),
        receive_queue: u32_at(body, 56),
        send_queue: u32_at(body, 60),
    })
}

fn plain(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}
