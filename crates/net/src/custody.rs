//! Sockets while their program does not exist.
//!
//! A parked proc's sockets stay alive as duplicates that we hold. In between they have to bear more
//! than the program asked for: every client that comes while the program sleeps, and peers that
//! would be forgotten by a network on the way. What is changed for that, and what the checkpoint
//! itself changes (`SO_REUSEADDR`, TCP repair), is put back to the value at the end exactly as it
//! was.
//!
//! ```text
//! program frozen --snapshot_options--> dump --hold--> no program --release--> program again
//! ```
//!
//! [`SavedOptions`] is all that is needed for the way back and belongs into the proc's durable
//! record. Calls can be repeated; a crash in the middle leaves sockets that the next [`hold`] or
//! [`release`] brings to the same values. Listeners keep their receive buffer and keepalive,
//! because a connection inherits those from its listener when it is made, and would keep ours.

use kip_sys::sock::{self, IntOption};
use kip_types::runtime;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketAddrUnix, getpeername, getsockname};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Backlog in custody; the namespace's `somaxconn` is the same.
pub const BACKLOG: i32 = 4096;
/// Receive buffer in custody, bytes.
pub const RECEIVE_BUFFER: i32 = 4 << 20;
/// Seconds without traffic until a peer is probed: below the 350 s after which some networks forget
/// a connection.
pub const KEEPALIVE_S: i32 = 120;
/// Seconds for which a listener that wakes on data keeps silent connections to itself.
const DEFER_ACCEPT_S: i32 = 3600;
const STATE_SYN_SENT: u8 = 2;
const STATE_CLOSED: u8 = 7;
const STATE_CLOSE_WAIT: u8 = 8;
const STATE_LAST_ACK: u8 = 9;
const STATE_LISTEN: u8 = 10;
const STATE_CLOSING: u8 = 11;
const LOCKED_RECEIVE_BUFFER: i32 = 2;

/// What a socket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum SocketKind {
    /// A TCP listener.
    Listener {
        /// Where.
        local: SocketAddr,
        /// Its backlog, connections.
        backlog: u32,
    },
    /// A TCP connection, open or half closed.
    Stream {
        /// Our side.
        local: SocketAddr,
        /// The other.
        peer: SocketAddr,
    },
    /// A UDP socket.
    Udp {
        /// Where.
        local: SocketAddr,
    },
    /// A connection of the program to Kip: the runtime socket. It is held and watched, and nothing
    /// is changed.
    Runtime,
    /// No socket: an inotify instance, which reports what happens to files. It is held and watched,
    /// and nothing is changed.
    Inotify,
    /// Anything else, a TCP socket that is not connected among them. It is held and watched, and
    /// nothing is changed.
    Other,
}

/// What the program had in front of it when it was frozen. Only what is more than that wakes it: it
/// has been idle with the rest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Connections to accept, bytes to read (of inotify, of events) or, for UDP, bytes of memory of
    /// unread datagrams.
    pub queued: u32,
    /// The peer has closed.
    pub ended: bool,
    /// There was no room to write, or its connection was not there yet.
    pub full: bool,
}

/// A socket's options before the dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedOptions {
    /// What it is.
    #[serde(flatten)]
    pub kind: SocketKind,
    /// What it had to offer.
    pub seen: Seen,
    reuse_addr: i32,
    defer_accept_s: i32,
    receive_buffer: i32,
    buffer_lock: i32,
    keepalive: i32,
    keep_idle_s: i32,
    keep_interval_s: i32,
    keep_count: i32,
}

/// A socket in custody.
#[derive(Debug, Clone)]
pub struct HeldSocket {
    /// The duplicate. Every clone must be dropped before the program runs again, or its close would
    /// not be one.
    pub fd: Arc<OwnedFd>,
    /// How it was.
    pub saved: SavedOptions,
}

/// An option could not be read or set.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} of the socket {socket}")]
pub struct CustodyError {
    doing: &'static str,
    socket: String,
    #[source]
    source: io::Error,
}

/// Notes everything that custody or the dump will change. To be called while the program is frozen
/// and before the dump.
pub fn snapshot_options(fd: BorrowedFd<'_>) -> Result<SavedOptions, CustodyError> {
    let wrong = |doing| move |source| CustodyError { doing, socket: "to be held".to_owned(), source };
    let kind = kind_of(fd).map_err(wrong("learn the kind"))?;
    let get = |option| sock::get_int(fd, option).map_err(wrong("read options"));
    let tcp = |option| if matches!(kind, SocketKind::Stream { .. }) { get(option) } else { Ok(0) };
    Ok(SavedOptions {
        kind,
        seen: seen(fd, &kind).map_err(wrong("read the queue"))?,
        reuse_addr: get(IntOption::ReuseAddr)?,
        defer_accept_s: if matches!(kind, SocketKind::Listener { .. }) { get(IntOption::DeferAccept)? } else { 0 },
        receive_buffer: get(IntOption::RcvBuf)?,
        buffer_lock: get(IntOption::BufLock)?,
        keepalive: get(IntOption::KeepAlive)?,
        keep_idle_s: tcp(IntOption::KeepIdle)?,
        keep_interval_s: tcp(IntOption::KeepInterval)?,
        keep_count: tcp(IntOption::KeepCount)?,
    })
}

/// An inotify instance, which has no options. `queued`: as many bytes of events does the program
/// know of.
pub fn inotify(queued: u32) -> SavedOptions {
    SavedOptions {
        kind: SocketKind::Inotify,
        seen: Seen { queued, ..Seen::default() },
        reuse_addr: 0,
        defer_accept_s: 0,
        receive_buffer: 0,
        buffer_lock: 0,
        keepalive: 0,
        keep_idle_s: 0,
        keep_interval_s: 0,
        keep_count: 0,
    }
}

/// Bytes of the events that wait in an inotify instance.
pub fn queued_events(inotify: BorrowedFd<'_>) -> io::Result<u32> {
    sock::unread_bytes(inotify)
}

/// Makes a socket fit for custody: out of repair without a sound, its address reusable as before,
/// room for the clients that come.
pub fn hold(fd: OwnedFd, saved: &SavedOptions) -> Result<HeldSocket, CustodyError> {
    fit(fd.as_fd(), saved)?;
    Ok(HeldSocket { fd: Arc::new(fd), saved: *saved })
}

/// Puts every option back. To be called before the program runs again; the duplicate is dropped
/// after that.
pub fn release(fd: BorrowedFd<'_>, saved: &SavedOptions) -> Result<(), CustodyError> {
    let set = Setter { fd, saved };
    match saved.kind {
        SocketKind::Listener { backlog, .. } => {
            set.int("set the deferred accept", IntOption::DeferAccept, saved.defer_accept_s)?;
            set.listen(backlog.min(i32::MAX as u32) as i32)?;
        }
        SocketKind::Udp { .. } => set.buffer_back()?,
        SocketKind::Stream { .. } => {
            set.buffer_back()?;
            set.int("set the keepalive times", IntOption::KeepIdle, saved.keep_idle_s)?;
            set.int("set the keepalive times", IntOption::KeepInterval, saved.keep_interval_s)?;
            set.int("set the keepalive times", IntOption::KeepCount, saved.keep_count)?;
            set.int("set the keepalive", IntOption::KeepAlive, saved.keepalive)?;
        }
        SocketKind::Inotify | SocketKind::Runtime => return Ok(()),
        SocketKind::Other => {}
    }
    set.int("set the reuse of the address", IntOption::ReuseAddr, saved.reuse_addr)
}

/// Lets a listener announce connections only once they have brought something: their data, or their
/// end.
pub(crate) fn defer_accept(held: &HeldSocket) -> io::Result<()> {
    sock::set_int(held.fd.as_fd(), IntOption::DeferAccept, DEFER_ACCEPT_S.max(held.saved.defer_accept_s))
}

/// Whether nothing will ever come of a socket that the program has not seen: a TCP socket that had
/// no peer when it was frozen, and has none still. A poll would find it ready for ever.
pub(crate) fn is_dead(held: &HeldSocket) -> bool {
    let closed = || sock::tcp_info(held.fd.as_fd()).is_ok_and(|info| info.state == STATE_CLOSED);
    held.saved.kind == SocketKind::Other && !held.saved.seen.full && closed()
}

/// What a socket has to offer now.
///
/// # Errors
/// Those of getsockopt(2) and ioctl(2).
pub fn seen(fd: BorrowedFd<'_>, kind: &SocketKind) -> io::Result<Seen> {
    match kind {
        SocketKind::Listener { .. } => Ok(Seen { queued: sock::tcp_info(fd)?.accept_queue, ..Seen::default() }),
        SocketKind::Stream { .. } => {
            let state = sock::tcp_info(fd)?.state;
            let ended = [STATE_CLOSED, STATE_CLOSE_WAIT, STATE_LAST_ACK, STATE_CLOSING].contains(&state);
            Ok(Seen { queued: sock::unread_bytes(fd)?, ended, full: !writable(fd)? })
        }
        SocketKind::Udp { .. } => Ok(Seen { queued: sock::receive_memory(fd)?, ..Seen::default() }),
        SocketKind::Inotify => Ok(Seen { queued: queued_events(fd)?, ..Seen::default() }),
        SocketKind::Runtime => {
            let ready = ready(fd, PollFlags::OUT | PollFlags::RDHUP)?;
            let ended = ready.intersects(PollFlags::RDHUP | PollFlags::HUP);
            Ok(Seen { queued: sock::unread_bytes(fd)?, ended, full: !ready.contains(PollFlags::OUT) })
        }
        // Nothing can be written before its connection is there.
        SocketKind::Other => Ok(Seen { full: is_connecting(fd)?, ..Seen::default() }),
    }
}

fn is_connecting(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(is_tcp(fd)? && sock::tcp_info(fd)?.state == STATE_SYN_SENT)
}

fn fit(fd: BorrowedFd<'_>, saved: &SavedOptions) -> Result<(), CustodyError> {
    let set = Setter { fd, saved };
    match saved.kind {
        SocketKind::Listener { backlog, .. } => set.listen(BACKLOG.max(backlog.min(i32::MAX as u32) as i32))?,
        SocketKind::Udp { .. } => set.buffer_up()?,
        SocketKind::Stream { .. } => {
            set.out_of_repair()?;
            set.buffer_up()?;
            set.int("set the keepalive times", IntOption::KeepIdle, KEEPALIVE_S)?;
            set.int("set the keepalive times", IntOption::KeepInterval, KEEPALIVE_S)?;
            set.int("set the keepalive", IntOption::KeepAlive, 1)?;
        }
        SocketKind::Inotify | SocketKind::Runtime => return Ok(()),
        // A socket that was connected, and has been closed by both sides or reset, may have bytes
        // that the program has not read yet.
        SocketKind::Other => set.out_of_repair()?,
    }
    set.int("set the reuse of the address", IntOption::ReuseAddr, saved.reuse_addr)
}

/// A stream of AF_INET or AF_INET6 with IPPROTO_TCP.
fn is_tcp(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let get = |option| sock::get_int(fd, option);
    Ok(is_inet(fd)? && get(IntOption::Protocol)? == 6 && get(IntOption::Type)? == 1)
}

fn is_inet(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok([2, 10].contains(&sock::get_int(fd, IntOption::Domain)?))
}

fn kind_of(fd: BorrowedFd<'_>) -> io::Result<SocketKind> {
    let is = |option, value| Ok::<_, io::Error>(sock::get_int(fd, option)? == value);
    let inet = is_inet(fd)?;
    let local = || getsockname(fd).ok().and_then(|a| SocketAddr::try_from(a).ok());
    let peer = || getpeername(fd).ok().flatten().and_then(|a| SocketAddr::try_from(a).ok());
    if !inet {
        return Ok(if is_to_kip(fd) { SocketKind::Runtime } else { SocketKind::Other });
    }
    if is(IntOption::Protocol, 17)? {
        return Ok(local().map_or(SocketKind::Other, |local| SocketKind::Udp { local }));
    }
    if !is_tcp(fd)? {
        return Ok(SocketKind::Other);
    }
    let info = sock::tcp_info(fd)?;
    Ok(match (info.state, local(), peer()) {
        (STATE_LISTEN, Some(local), _) => SocketKind::Listener { local, backlog: info.backlog },
        (STATE_CLOSED, ..) => SocketKind::Other,
        (_, Some(local), Some(peer)) => SocketKind::Stream { local, peer },
        _ => SocketKind::Other,
    })
}

fn writable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(ready(fd, PollFlags::OUT)?.contains(PollFlags::OUT))
}

fn ready(fd: BorrowedFd<'_>, wanted: PollFlags) -> io::Result<PollFlags> {
    let mut fds = [PollFd::from_borrowed_fd(fd, wanted)];
    poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(fds[0].revents())
}

/// Whether a socket is a program's end of a connection to Kip: its peer has the address of the
/// runtime socket, and is a process of the machine's root, as no process of a proc is.
pub fn is_to_kip(fd: BorrowedFd<'_>) -> bool {
    let Ok(Some(peer)) = getpeername(fd).map(|peer| peer.and_then(|peer| SocketAddrUnix::try_from(peer).ok())) else {
        return false;
    };
    let has_address = peer.path_bytes().is_some_and(|path| path.ends_with(format!("/{}", runtime::SOCKET).as_bytes()));
    has_address && socket_peercred(fd).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

struct Setter<'a> {
    fd: BorrowedFd<'a>,
    saved: &'a SavedOptions,
}

impl Setter<'_> {
    fn wrong(&self, doing: &'static str, source: io::Error) -> CustodyError {
        CustodyError { doing, socket: self.saved.kind.to_string(), source }
    }

    fn int(&self, doing: &'static str, option: IntOption, value: i32) -> Result<(), CustodyError> {
        sock::set_int(self.fd, option, value).map_err(|source| self.wrong(doing, source))
    }

    /// The checkpoint puts every TCP socket that has a peer's address into repair, in whatever
    /// state it is, and only a TCP socket knows of it. In repair reads fail with EPERM.
    fn out_of_repair(&self) -> Result<(), CustodyError> {
        if is_tcp(self.fd).map_err(|source| self.wrong("learn the kind", source))? {
            sock::leave_tcp_repair(self.fd).map_err(|source| self.wrong("end the repair", source))?;
        }
        Ok(())
    }

    fn listen(&self, backlog: i32) -> Result<(), CustodyError> {
        rustix::net::listen(self.fd, backlog).map_err(|e| self.wrong("set the backlog", e.into()))
    }

    fn buffer_up(&self) -> Result<(), CustodyError> {
        let bytes = RECEIVE_BUFFER.max(self.saved.receive_buffer);
        self.int("raise the receive buffer", IntOption::RcvBufForce, bytes / 2)
    }

    /// Setting the size marks it as chosen by the program, so the mark is set after it.
    fn buffer_back(&self) -> Result<(), CustodyError> {
        self.int("restore the receive buffer", IntOption::RcvBufForce, self.saved.receive_buffer / 2)?;
        let lock = self.saved.buffer_lock & (LOCKED_RECEIVE_BUFFER | 1);
        self.int("restore the receive buffer", IntOption::BufLock, lock)
    }
}

impl fmt::Display for SocketKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketKind::Listener { local, .. } => write!(f, "tcp {local}"),
            SocketKind::Stream { local, peer } => write!(f, "tcp {local} from {peer}"),
            SocketKind::Udp { local } => write!(f, "udp {local}"),
            SocketKind::Runtime => f.write_str("runtime socket"),
            SocketKind::Inotify => f.write_str("watched files"),
            SocketKind::Other => f.write_str("of another kind"),
        }
    }
}
