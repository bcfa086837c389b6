//! Watching the sockets of all parked procs for the event that wakes them.
//!
//! One epoll instance holds everything, so that ten thousand sleepers cost no thread and no tick.
//! It is itself a descriptor that becomes readable when there is something to do ([`AsFd`]), for a
//! thread or for an event loop; either then calls [`WakePoll::wait`].
//!
//! Registrations are edge-triggered: a socket is looked at when something arrives, and wakes its
//! proc only if it now has more to offer than when the program was frozen
//! ([`Seen`](crate::custody::Seen)). A program that slept with bytes it did not care to read is not
//! woken by them.
//!
//! A listener that wakes on data is given `TCP_DEFER_ACCEPT` (tcp(7)): it becomes readable only
//! when a connection has brought data or its end, and sock_diag tells which. A connection that is
//! there without either (from before, or by a SYN cookie) cannot be watched, because the program
//! has not accepted it and no descriptor refers to it; as long as it stays, it is looked at again
//! after 1, 2, 4 .. 500 ms.
//!
//! A proc's first event is its only one until [`WakePoll::rearm`]. Nothing here is durable: after a
//! crash everything is added again, and whatever arrived meanwhile is found because it is more than
//! was seen.

use crate::custody::{self, HeldSocket, SocketKind};
use crate::diag::Diag;
use kip_types::WakeOn;
use parking_lot::Mutex;
use rustix::event::{Timespec, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

const TIMER: u64 = 0;
const FIRST_RECHECK: Duration = Duration::from_millis(1);
const LAST_RECHECK: Duration = Duration::from_millis(500);
/// Events taken from the kernel at once.
const BATCH: usize = 256;

/// Why a proc is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Trigger {
    /// A connection.
    Connection,
    /// Bytes, on a connection known to the program or on one it has yet to accept.
    Data,
    /// A datagram.
    Datagram,
    /// The peer closed, or the connection broke.
    Closed,
    /// Room to write, which there was not.
    Writable,
    /// Something happened to files that the program watches.
    Changed,
    /// So many connections without data that soon no others could come.
    BacklogFull,
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Trigger::Connection => "connection",
            Trigger::Data => "data",
            Trigger::Datagram => "datagram",
            Trigger::Closed => "closed by the peer",
            Trigger::Writable => "room to write",
            Trigger::Changed => "changed",
            Trigger::BacklogFull => "backlog full",
        })
    }
}

/// What woke a proc. Displayed as `tcp 0.0.0.0:80 (connection)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WakeEvent<K> {
    /// Which proc.
    pub key: K,
    /// Which socket.
    pub socket: SocketKind,
    /// Why.
    pub trigger: Trigger,
}

impl<K> fmt::Display for WakeEvent<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.socket, self.trigger)
    }
}

/// Watching failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing}")]
pub struct WatchError {
    doing: &'static str,
    #[source]
    source: io::Error,
}

/// The watch over all parked procs, which are known by keys of the caller's choice.
pub struct WakePoll<K> {
    epoll: OwnedFd,
    timer: OwnedFd,
    inner: Mutex<Inner<K>>,
}

struct Inner<K> {
    next: u64,
    watched: HashMap<u64, Watched<K>>,
    procs: HashMap<K, Proc>,
    rechecks: HashMap<u64, Recheck>,
}

#[derive(Default)]
struct Proc {
    tokens: Vec<u64>,
    fired: bool,
}

struct Watched<K> {
    key: K,
    held: HeldSocket,
    wake_on: WakeOn,
}

/// A listener with connections that may yet bring data.
struct Recheck {
    at: Instant,
    delay: Duration,
    diag: Diag,
}

impl<K: Clone + Eq + Hash> WakePoll<K> {
    /// An empty watch.
    pub fn new() -> Result<WakePoll<K>, WatchError> {
        let wrong = |e: rustix::io::Errno| WatchError { doing: "make the watch", source: e.into() };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(wrong)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(wrong)?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN).map_err(wrong)?;
        let inner = Inner { next: TIMER + 1, watched: HashMap::new(), procs: HashMap::new(), rechecks: HashMap::new() };
        Ok(WakePoll { epoll, timer, inner: Mutex::new(inner) })
    }

    /// Watches a socket of a proc. `wake_on` matters for listeners only. The duplicate is kept
    /// until [`Self::remove`].
    pub fn add(&self, key: K, held: HeldSocket, wake_on: WakeOn) -> Result<(), WatchError> {
        if wake_on == WakeOn::Data && matches!(held.saved.kind, SocketKind::Listener { .. }) {
            custody::defer_accept(&held).map_err(|source| WatchError { doing: "defer connections", source })?;
        }
        if custody::is_dead(&held) {
            return Ok(());
        }
        let mut inner = self.inner.lock();
        let token = inner.next;
        inner.next += 1;
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, held.fd.as_fd(), data, interest(&held))
            .map_err(|e| WatchError { doing: "watch a socket", source: e.into() })?;
        inner.procs.entry(key.clone()).or_default().tokens.push(token);
        inner.watched.insert(token, Watched { key, held, wake_on });
        Ok(())
    }

    /// Ends the watch over a proc and drops its duplicates. One that is not watched is fine.
    pub fn remove(&self, key: &K) {
        let mut inner = self.inner.lock();
        let Some(proc) = inner.procs.remove(key) else { return };
        for token in proc.tokens {
            inner.rechecks.remove(&token);
            if let Some(watched) = inner.watched.remove(&token) {
                // Closing would not do: the registration belongs to the open file, which others
                // hold as well.
                if let Err(error) = epoll::delete(&self.epoll, watched.held.fd.as_fd()) {
                    tracing::error!(%error, socket = %watched.held.saved.kind, "cannot end the watch over a socket");
                }
            }
        }
    }

    /// Watches again a proc whose wake came to nothing. What is there already is reported again.
    pub fn rearm(&self, key: &K) -> Result<(), WatchError> {
        let mut inner = self.inner.lock();
        let Some(proc) = inner.procs.get_mut(key) else { return Ok(()) };
        proc.fired = false;
        for token in proc.tokens.clone() {
            let Some(watched) = inner.watched.get(&token) else { continue };
            let data = epoll::EventData::new_u64(token);
            epoll::modify(&self.epoll, watched.held.fd.as_fd(), data, interest(&watched.held))
                .map_err(|e| WatchError { doing: "watch a socket again", source: e.into() })?;
        }
        Ok(())
    }

    /// How many procs are watched.
    pub fn len(&self) -> usize {
        self.inner.lock().procs.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until procs have to be woken, at most this long (for ever if None), and names them.
    /// May return none earlier.
    pub fn wait(&self, patience: Option<Duration>) -> Result<Vec<WakeEvent<K>>, WatchError> {
        let mut events = Vec::with_capacity(BATCH);
        let patience = patience
            .map(|p| Timespec { tv_sec: p.as_secs().min(i64::MAX as u64) as i64, tv_nsec: p.subsec_nanos().into() });
        let buffer = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.epoll, buffer, patience.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(WatchError { doing: "wait for events", source: e.into() }),
        }
        let mut inner = self.inner.lock();
        let mut found = Vec::new();
        for event in &events {
            let token = event.data.u64();
            if token == TIMER {
                let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
                let now = Instant::now();
                let due: Vec<_> = inner.rechecks.iter().filter(|(_, r)| r.at <= now).map(|(t, _)| *t).collect();
                found.extend(due.into_iter().filter_map(|token| inner.check(token)));
            } else {
                found.extend(inner.check(token));
            }
        }
        self.set_timer(&inner)?;
        Ok(found)
    }

    /// Arms the timer for the earliest recheck, or disarms it when nothing is pending.
    fn set_timer(&self, inner: &Inner<K>) -> Result<(), WatchError> {
        let earliest = inner.rechecks.values().map(|r| r.at).min();
        let value = match earliest {
            None => Timespec { tv_sec: 0, tv_nsec: 0 },
            Some(at) => {
                let left = at.saturating_duration_since(Instant::now()).max(Duration::from_micros(1));
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
            }
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)
            .map(drop)
            .map_err(|e| WatchError { doing: "set the timer", source: e.into() })
    }
}

impl<K> AsFd for WakePoll<K> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl<K: Clone + Eq + Hash> Inner<K> {
    /// Whether a socket has more to offer than the program has seen; at most one event per proc.
    fn check(&mut self, token: u64) -> Option<WakeEvent<K>> {
        let watched = self.watched.get(&token)?;
        let proc = self.procs.get_mut(&watched.key)?;
        let mut recheck = self.rechecks.remove(&token);
        if proc.fired {
            return None;
        }
        let Some(trigger) = watched.trigger(&mut recheck) else {
            self.rechecks.extend(recheck.map(|r| (token, r)));
            return None;
        };
        proc.fired = true;
        Some(WakeEvent { key: watched.key.clone(), socket: watched.held.saved.kind, trigger })
    }
}

impl<K> Watched<K> {
    fn trigger(&self, recheck: &mut Option<Recheck>) -> Option<Trigger> {
        let saved = &self.held.saved;
        let now = match custody::seen(self.held.fd.as_fd(), &saved.kind) {
            Ok(now) => now,
            Err(error) => {
                // Waking for nothing is better than sleeping through something.
                tracing::warn!(%error, socket = %saved.kind, "cannot look at a socket in custody");
                return Some(Trigger::Closed);
            }
        };
        let more = now.queued > saved.seen.queued;
        match saved.kind {
            SocketKind::Listener { .. } if !more => {
                *recheck = None;
                None
            }
            SocketKind::Listener { .. } if self.wake_on == WakeOn::Connect => Some(Trigger::Connection),
            SocketKind::Listener { .. } if now.queued > custody::BACKLOG as u32 / 4 * 3 => Some(Trigger::BacklogFull),
            SocketKind::Listener { local, .. } => data_at(local, self.held.fd.as_fd(), recheck),
            SocketKind::Udp { .. } => more.then_some(Trigger::Datagram),
            SocketKind::Stream { .. } | SocketKind::Runtime if more => Some(Trigger::Data),
            SocketKind::Stream { .. } | SocketKind::Runtime if now.ended && !saved.seen.ended => Some(Trigger::Closed),
            SocketKind::Stream { .. } | SocketKind::Runtime => {
                (saved.seen.full && !now.full).then_some(Trigger::Writable)
            }
            SocketKind::Inotify => more.then_some(Trigger::Changed),
            SocketKind::Other if saved.seen.full => (!now.full).then_some(Trigger::Writable),
            SocketKind::Other => Some(Trigger::Data),
        }
    }
}

/// Whether a connection that the program has not accepted has brought data; if one still may, when
/// to look again.
fn data_at(local: SocketAddr, fd: BorrowedFd<'_>, recheck: &mut Option<Recheck>) -> Option<Trigger> {
    let (diag, delay) = match recheck.take() {
        Some(r) if r.at <= Instant::now() => (Ok(r.diag), r.delay.saturating_mul(2).min(LAST_RECHECK)),
        Some(r) => (Ok(r.diag), FIRST_RECHECK),
        None => (Diag::open_at(fd), FIRST_RECHECK),
    };
    let unaccepted = diag.and_then(|diag| Ok((diag.unaccepted(local)?, diag)));
    match unaccepted {
        Ok((waiting, _)) if waiting.with_bytes > 0 => Some(Trigger::Data),
        Ok((waiting, diag)) => {
            let again = || Recheck { at: Instant::now() + delay, delay, diag };
            *recheck = (waiting.silent > 0).then(again);
            None
        }
        Err(error) => {
            let error = kip_types::chain(&error);
            tracing::warn!(%error, listener = %local, "cannot tell whether data has come; taking the connection for it");
            Some(Trigger::Connection)
        }
    }
}

fn interest(held: &HeldSocket) -> epoll::EventFlags {
    use epoll::EventFlags as E;
    let common = E::IN | E::ET | E::RDHUP;
    if held.saved.seen.full { common | E::OUT } else { common }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::Arc;

    #[test]
    fn a_socket_of_which_nothing_can_come_wakes_nobody() {
        let plane = WakePoll::new().unwrap();
        let watch = |fd: std::os::fd::OwnedFd| {
            let saved = custody::snapshot_options(fd.as_fd()).unwrap();
            plane.add(7, HeldSocket { fd: Arc::new(fd), saved }, WakeOn::Connect).unwrap();
        };
        let (family, kind) = (rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM);
        watch(rustix::net::socket(family, kind, None).unwrap());
        assert!(plane.wait(Some(Duration::from_millis(50))).unwrap().is_empty(), "it is connected to nobody");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        watch(listener.into());
        let _client = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(plane.wait(Some(Duration::from_secs(5))).unwrap().len(), 1);
        plane.remove(&7);
    }
}
