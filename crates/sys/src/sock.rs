//! Socket options and ioctls that rustix lacks: socket(7), tcp(7), netdevice(7).
//!
//! Each function is one getsockopt, setsockopt or ioctl.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `ioctl` that yields the network namespace of a socket (linux/sockios.h).
const SIOCGSKNS: libc::c_ulong = 0x894C;
/// `TCP_REPAIR` value that leaves repair mode without sending a window probe (linux/tcp.h, kernel
/// 4.19).
const TCP_REPAIR_OFF_NO_WP: libc::c_int = -1;
/// `SO_BUF_LOCK` (asm-generic/socket.h, kernel 5.14).
const SO_BUF_LOCK: libc::c_int = 72;

/// An option whose value is an `int`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntOption {
    /// `SO_REUSEADDR`.
    ReuseAddr,
    /// `SO_RCVBUF`: reads give the kernel's value, in bytes, which is twice what was asked for.
    RcvBuf,
    /// `SO_RCVBUFFORCE`: sets half of what reads of `RcvBuf` give, beyond `net.core.rmem_max`;
    /// needs `CAP_NET_ADMIN`.
    RcvBufForce,
    /// `SO_BUF_LOCK`: bit 0 set when the send buffer's size was chosen by the program, bit 1 for
    /// the receive buffer.
    BufLock,
    /// `SO_KEEPALIVE`.
    KeepAlive,
    /// `TCP_KEEPIDLE`, seconds.
    KeepIdle,
    /// `TCP_KEEPINTVL`, seconds.
    KeepInterval,
    /// `TCP_KEEPCNT`.
    KeepCount,
    /// `TCP_DEFER_ACCEPT`, seconds; the kernel rounds it up to a number of retransmissions.
    DeferAccept,
    /// `SO_TYPE`, read only.
    Type,
    /// `SO_DOMAIN`, read only.
    Domain,
    /// `SO_PROTOCOL`, read only.
    Protocol,
    /// `SO_ACCEPTCONN`, read only.
    AcceptConn,
    /// `SO_REUSEPORT`.
    ReusePort,
    /// `SO_BROADCAST`.
    Broadcast,
    /// `IPV6_V6ONLY`.
    V6Only,
    /// `IP_FREEBIND`.
    FreeBind,
    /// `IP_TOS`.
    Tos,
    /// `IP_PKTINFO`.
    PacketInfo,
    /// `IPV6_RECVPKTINFO`.
    PacketInfo6,
    /// `TCP_NODELAY`.
    NoDelay,
    /// `TCP_FASTOPEN`: of a listener, connections that wait with data in their first packet.
    FastOpen,
    /// `TCP_USER_TIMEOUT`, milliseconds.
    UserTimeout,
    /// `SO_MARK`, by which rules know its packets; needs `CAP_NET_ADMIN`.
    Mark,
}

impl IntOption {
    fn level_and_name(self) -> (libc::c_int, libc::c_int) {
        match self {
            IntOption::ReuseAddr => (libc::SOL_SOCKET, libc::SO_REUSEADDR),
            IntOption::RcvBuf => (libc::SOL_SOCKET, libc::SO_RCVBUF),
            IntOption::RcvBufForce => (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE),
            IntOption::BufLock => (libc::SOL_SOCKET, SO_BUF_LOCK),
            IntOption::KeepAlive => (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
            IntOption::KeepIdle => (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
            IntOption::KeepInterval => (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
            IntOption::KeepCount => (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
            IntOption::DeferAccept => (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
            IntOption::Type => (libc::SOL_SOCKET, libc::SO_TYPE),
            IntOption::Domain => (libc::SOL_SOCKET, libc::SO_DOMAIN),
            IntOption::Protocol => (libc::SOL_SOCKET, libc::SO_PROTOCOL),
            IntOption::AcceptConn => (libc::SOL_SOCKET, libc::SO_ACCEPTCONN),
            IntOption::ReusePort => (libc::SOL_SOCKET, libc::SO_REUSEPORT),
            IntOption::Broadcast => (libc::SOL_SOCKET, libc::SO_BROADCAST),
            IntOption::V6Only => (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
            IntOption::FreeBind => (libc::IPPROTO_IP, libc::IP_FREEBIND),
            IntOption::Tos => (libc::IPPROTO_IP, libc::IP_TOS),
            IntOption::PacketInfo => (libc::IPPROTO_IP, libc::IP_PKTINFO),
            IntOption::PacketInfo6 => (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
            IntOption::NoDelay => (libc::IPPROTO_TCP, libc::TCP_NODELAY),
            IntOption::FastOpen => (libc::IPPROTO_TCP, libc::TCP_FASTOPEN),
            IntOption::UserTimeout => (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
            IntOption::Mark => (libc::SOL_SOCKET, libc::SO_MARK),
        }
    }
}

/// getsockopt(2) of an `int`.
pub fn get_int(fd: BorrowedFd<'_>, option: IntOption) -> io::Result<i32> {
    let (level, name) = option.level_and_name();
    let mut value: libc::c_int = 0;
    let mut len = mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` and `len` are live locals of the sizes the kernel is told, written only
    // during the call.
    let rc = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len) };
    if rc == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// setsockopt(2) of an `int`.
pub fn set_int(fd: BorrowedFd<'_>, option: IntOption, value: i32) -> io::Result<()> {
    let (level, name) = option.level_and_name();
    set_raw(fd, level, name, value)
}

/// Takes a TCP socket out of repair mode without sending a window probe; a socket that is not in it
/// stays as it is, except for `SO_REUSEADDR`, which the kernel clears. Needs `CAP_NET_ADMIN` over
/// the socket's network namespace. Kernel 4.19.
pub fn leave_tcp_repair(fd: BorrowedFd<'_>) -> io::Result<()> {
    // The queue that was looked at last stays chosen, where a program can see it (TCP_QUEUE_SEQ).
    // Refused out of repair.
    let _ = set_raw(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, 0);
    set_raw(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, TCP_REPAIR_OFF_NO_WP)
}

/// Puts a TCP socket into repair mode, as a checkpoint does. Needs `CAP_NET_ADMIN` over its network
/// namespace.
pub fn enter_tcp_repair(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_raw(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, 1)
}

/// Lets a socket send and receive by one interface only: `SO_BINDTODEVICE`, unprivileged since
/// kernel 5.7.
pub fn bind_to_device(fd: BorrowedFd<'_>, interface: &str) -> io::Result<()> {
    let len = interface.len() as libc::socklen_t;
    // SAFETY: the name is a live slice of the length the kernel is told, only read during the call.
    let rc = unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_BINDTODEVICE, interface.as_ptr().cast(), len)
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set_raw(fd: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let len = mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` is a live local of the size the kernel is told, only read during the call.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What `TCP_INFO` tells of a socket. For a listener the kernel reuses two fields for its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// The state, numbered as in net/tcp_states.h (1 established, 10 listen).
    pub state: u8,
    /// For a listener: connections that wait to be accepted.
    pub accept_queue: u32,
    /// For a listener: the backlog in force.
    pub backlog: u32,
}

/// getsockopt(2) `TCP_INFO`.
pub fn tcp_info(fd: BorrowedFd<'_>) -> io::Result<TcpInfo> {
    // SAFETY: tcp_info is plain integers, for which all zeros is a value.
    let mut info: libc::tcp_info = unsafe { mem::zeroed() };
    let mut len = mem::size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` and `len` are live locals of the sizes the kernel is told, written only during
    // the call.
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len)
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(TcpInfo { state: info.tcpi_state, accept_queue: info.tcpi_unacked, backlog: info.tcpi_sacked })
}

/// Bytes that wait to be read: ioctl `FIONREAD`, tcp(7), udp(7) (there: of the next datagram). Not
/// for listeners.
pub fn unread_bytes(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: `bytes` is a live local int, which is what this ioctl writes, only during the call.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if rc == 0 { Ok(bytes.max(0) as u32) } else { Err(io::Error::last_os_error()) }
}

/// Memory that received and unread packets of a socket take, bytes, bookkeeping included:
/// getsockopt(2) `SO_MEMINFO`, kernel 4.12.
pub fn receive_memory(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = [0u32; 9];
    let mut len = mem::size_of_val(&info) as libc::socklen_t;
    // SAFETY: `info` and `len` are live locals of the sizes the kernel is told, written only during
    // the call.
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO, info.as_mut_ptr().cast(), &raw mut len)
    };
    if rc == 0 { Ok(info[0]) } else { Err(io::Error::last_os_error()) }
}

/// The network namespace a socket lives in: ioctl `SIOCGSKNS`, kernel 4.10. Needs `CAP_NET_ADMIN`
/// over it.
pub fn netns_of(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: this ioctl takes no argument and touches no memory of ours.
    let raw = unsafe { libc::ioctl(fd.as_raw_fd(), SIOCGSKNS) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn reads_back_what_it_sets() {
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        set_int(udp.as_fd(), IntOption::ReuseAddr, 1).unwrap();
        assert_eq!(get_int(udp.as_fd(), IntOption::ReuseAddr).unwrap(), 1);
        set_int(udp.as_fd(), IntOption::RcvBuf, 40_000).unwrap();
        assert_eq!(get_int(udp.as_fd(), IntOption::RcvBuf).unwrap(), 80_000);
        assert_eq!(get_int(udp.as_fd(), IntOption::BufLock).unwrap(), 2);
        assert_eq!(get_int(udp.as_fd(), IntOption::KeepIdle).unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    }

    #[test]
    fn reports_a_listeners_queue() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let info = tcp_info(listener.as_fd()).unwrap();
        assert_eq!((info.state, info.accept_queue, info.backlog), (10, 1, 128));
    }

    #[test]
    fn names_the_namespace_of_a_socket() {
        use std::os::linux::fs::MetadataExt;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let ns = std::fs::File::from(netns_of(listener.as_fd()).unwrap()).metadata().unwrap();
        let ours = std::fs::metadata("/proc/thread-self/ns/net").unwrap();
        assert_eq!(ns.st_ino(), ours.st_ino());
    }
}
