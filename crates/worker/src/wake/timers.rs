//! Time in the restored processes, in the last moment before they run: time-outs, timerfds, missed signals.

use crate::proc::Proc;
use crate::tree::{Tree, waits_of};
use kip_checkpoint::clocks::{self, Missed, Now, SocketPatch};
use kip_sys::process::{Signal, pidfd_getfd, pidfd_open, pidfd_send_signal, start_time, write_memory};
use kip_sys::{timed, timer};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_timeout};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The least that a socket's time-out is set to: 0 would be for ever.
const LEAST_SOCKET_TIMEOUT: Duration = Duration::from_millis(1);
/// A socket gets its own time-out back when its thread is in the call again, or after this.
const BACK_WITHIN: Duration = Duration::from_secs(1);
/// Between looks at the thread.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A thread that goes on from its stop straight into its call gives up the CPU this often.
const WAITS_INTO_CALL: u64 = 1;
/// What the very first wake is believed to take at least until timers are armed, nanoseconds.
const FIRST_LEAD_NS: i64 = 10_000_000;
/// A restore that takes longer than this is not waited for, nanoseconds.
const LONGEST_LEAD_NS: i64 = 500_000_000;

/// How long the last wake of each proc took from moving its timers in the images until they were armed, nanoseconds.
static LEADS: Mutex<BTreeMap<String, i64>> = Mutex::new(BTreeMap::new());

/// Of a proc that is removed.
pub(crate) fn forget(name: &str) {
    LEADS.lock().expect("no holder of this lock panics").remove(name);
}

/// POSIX and interval timers are stored as what is left when CRIU arms them. The images are made for a moment that is
/// a little sooner than the last restore was ready for it; if this one is faster, it waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    begin: Now,
    lead_ns: i64,
}

impl Plan {
    /// Begins now.
    pub(super) fn new(proc: &Proc, clocks: &clocks::Clocks) -> Plan {
        let leads = LEADS.lock().expect("no holder of this lock panics");
        // Before its first wake: the fastest of the others.
        let last = leads.get(proc.name.as_str()).or_else(|| leads.values().min()).copied();
        drop(leads);
        let lead_ns = last.map_or(FIRST_LEAD_NS, |last| (last / 8 * 7).min(LONGEST_LEAD_NS));
        Plan { begin: Now::read(), lead_ns: if clocks.read_ns.is_empty() { 0 } else { lead_ns } }
    }

    /// The moment that timers are moved to.
    pub(super) fn armed_at(&self) -> Now {
        self.begin.later(self.lead_ns)
    }

    /// Waits for that moment, and learns for the next time.
    pub(super) fn wait(&self, proc: &Proc, clocks: &clocks::Clocks) {
        if clocks.read_ns.is_empty() {
            return;
        }
        let took = Now::read().monotonic_ns - self.begin.monotonic_ns;
        LEADS.lock().expect("no holder of this lock panics").insert(proc.name.as_str().to_owned(), took);
        let early = self.lead_ns - took;
        if early > 0 {
            std::thread::sleep(Duration::from_nanos(early as u64));
        }
    }
}

/// Sets everything about time in the restored processes, which must be stopped; if they are `traced` by this thread, waits for
/// events whose time-out has passed end by it. What cannot be set is logged.
pub(super) fn set(proc: &Proc, clocks: &clocks::Clocks, missed: &[Missed], traced: bool) -> Vec<Shortened> {
    let nothing = clocks.patches.is_empty() && clocks.timerfds.is_empty() && clocks.sockets.is_empty();
    if nothing && missed.is_empty() {
        return Vec::new();
    }
    let tree = Tree::read(&proc.cgroup.pids().unwrap_or_default());
    let host = |thread: u32| tree.threads.get(&thread).copied().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
    let complain = |what: &str, whose: u32, e: &io::Error| {
        tracing::warn!(proc = %proc.name, task = whose, error = %e, "{what}");
    };
    for timerfd in &clocks.timerfds {
        let set = host(timerfd.pid).and_then(|pid| take(pid, timerfd.fd));
        if let Err(e) = set.and_then(|fd| clocks::set_timerfd(fd.as_fd(), timerfd)) {
            complain("a timerfd could not be set", timerfd.pid, &e);
        }
    }
    for signal in missed {
        let (whose, sent) = match signal {
            Missed::Interval { pid } => (*pid, host(*pid).and_then(alarm)),
            Missed::Posix { pid, thread, signal } => {
                let thread = thread.map(host).transpose();
                let sent = host(*pid).and_then(|pid| timer::send_timer_signal(pid, thread?, *signal));
                (*pid, sent)
            }
        };
        if let Err(e) = sent {
            complain("the signal of a timer could not be sent", whose, &e);
        }
    }
    let now = Now::read();
    for patch in &clocks.patches {
        let bytes = clocks::patch_bytes(patch, clocks, now);
        let over = clocks::is_over(patch, clocks, now);
        let fill = |tid| {
            if over && traced && timed::end_wait(tid)? {
                return Ok(());
            }
            write_memory(tid, patch.address, &bytes)?;
            remember(tid, clocks.frozen_ns + patch.left_ns)
        };
        if let Err(e) = host(patch.thread).and_then(fill) {
            complain("a time-out could not be filled in", patch.thread, &e);
        }
    }
    // Threads that wait on one socket share its option: the longest of what is left, so that none is early.
    let mut shortened: BTreeMap<(u64, bool), Shortened> = BTreeMap::new();
    let mut patches = clocks.sockets.clone();
    patches.sort_by_key(|p| p.left_ns);
    for patch in patches {
        let left = (patch.left_ns - (now.monotonic_ns - clocks.frozen_ns)).max(0) as u64;
        let due_ns = clocks.frozen_ns + patch.left_ns;
        let shorten = |tid| {
            let done = Shortened::shorten(tid, patch, Duration::from_nanos(left))?;
            remember(tid, due_ns)?;
            Ok(done)
        };
        match host(patch.thread).and_then(shorten) {
            Ok(done) => drop(shortened.insert((done.inode, patch.sending), done)),
            Err(e) => complain("the time-out of a socket could not be set", patch.thread, &e),
        }
    }
    shortened.into_values().collect()
}

/// A thread that goes on waiting in a call whose time-out has become another one.
#[derive(Debug, Clone, Copy)]
struct Resumed {
    /// Of its process, for the thread's id may be used again.
    started: u64,
    /// How often it had given up a CPU before it was let go.
    waits: u64,
    due_ns: i64,
}

/// By host thread id.
static RESUMED: Mutex<BTreeMap<u32, Resumed>> = Mutex::new(BTreeMap::new());

fn remember(tid: u32, due_ns: i64) -> io::Result<()> {
    let waits = waits_of(tid).ok_or(io::ErrorKind::NotFound)?;
    let resumed = Resumed { started: start_time(process_of(tid)?)?, waits, due_ns };
    RESUMED.lock().expect("no holder of this lock panics").insert(tid, resumed);
    Ok(())
}

/// When the time-out of a thread ends that waits on in the very call that the last wake resumed. A thread that has done
/// anything since has waited more often; that a busy machine took the CPU away from it on its way says nothing. None after
/// the daemon was started anew: the time-out is then what can be told from outside, which may be late.
pub(crate) fn resumed_due(tid: u32) -> Option<i64> {
    let resumed = RESUMED.lock().expect("no holder of this lock panics").remove(&tid)?;
    let same = process_of(tid).and_then(start_time).is_ok_and(|s| s == resumed.started);
    (same && waits_of(tid)? == resumed.waits + WAITS_INTO_CALL).then_some(resumed.due_ns)
}

/// Gives sockets their own time-outs back, on a thread of its own.
pub(super) fn give_back(shortened: Vec<Shortened>) {
    if shortened.is_empty() {
        return;
    }
    let begin = Instant::now();
    let spawned = std::thread::Builder::new().name("kip-timeouts".to_owned()).spawn(move || {
        let mut left = shortened;
        while !left.is_empty() {
            let late = begin.elapsed() > BACK_WITHIN;
            left.retain(|s| {
                let over = late || s.entered();
                if over {
                    s.give_back();
                }
                !over
            });
            std::thread::sleep(LOOK_EVERY);
        }
    });
    if let Err(e) = spawned {
        tracing::warn!(error = %e, "sockets keep time-outs that were meant for one call");
    }
}

/// Duplicates a descriptor of a thread's process.
pub(crate) fn take(tid: u32, number: i32) -> io::Result<OwnedFd> {
    pidfd_getfd(pidfd_open(process_of(tid)?)?.as_fd(), number)
}

fn process_of(tid: u32) -> io::Result<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status"))?;
    let id = status.lines().find_map(|l| l.strip_prefix("Tgid:")?.trim().parse().ok());
    id.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn alarm(pid: u32) -> io::Result<()> {
    pidfd_send_signal(pidfd_open(pid)?.as_fd(), Signal::ALARM)
}

/// A socket whose time-out is, for one call, what is left of it.
#[derive(Debug)]
pub(super) struct Shortened {
    /// Host process, thread.
    process: OwnedFd,
    tid: u32,
    patch: SocketPatch,
    inode: u64,
    /// What the option was set to, as the kernel rounds it.
    set_to: Option<Duration>,
}

impl Shortened {
    fn shorten(tid: u32, patch: SocketPatch, left: Duration) -> io::Result<Shortened> {
        let process = pidfd_open(process_of(tid)?)?;
        let socket = pidfd_getfd(process.as_fd(), patch.fd)?;
        let option = which(&patch);
        set_socket_timeout(&socket, option, Some(left.max(LEAST_SOCKET_TIMEOUT)))?;
        let inode = rustix::fs::fstat(&socket)?.st_ino;
        Ok(Shortened { process, tid, patch, inode, set_to: socket_timeout(&socket, option)? })
    }

    /// Whether the thread waits in its call again.
    fn entered(&self) -> bool {
        let text = fs::read_to_string(format!("/proc/{}/syscall", self.tid)).unwrap_or_default();
        text.split_whitespace().next().and_then(|n| n.parse().ok()) == Some(self.patch.call)
    }

    /// Unless the program has set it itself, or has another file there by now.
    fn give_back(&self) {
        let Ok(socket) = pidfd_getfd(self.process.as_fd(), self.patch.fd) else { return };
        let option = which(&self.patch);
        let same = rustix::fs::fstat(&socket).is_ok_and(|s| s.st_ino == self.inode)
            && socket_timeout(&socket, option).is_ok_and(|t| t == self.set_to);
        let whole = Duration::from_nanos(self.patch.whole_ns as u64);
        if same && let Err(e) = set_socket_timeout(&socket, option, Some(whole)) {
            tracing::warn!(error = %e, "a socket keeps a time-out that was meant for one call");
        }
    }
}

fn which(patch: &SocketPatch) -> Timeout {
    if patch.sending { Timeout::Send } else { Timeout::Recv }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn a_socket_s_time_out_is_short_for_one_call() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let whole = Duration::from_secs(20);
        socket.set_read_timeout(Some(whole)).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let receiver = socket.try_clone().unwrap();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            wait.recv().unwrap();
            let begin = Instant::now();
            assert_eq!(receiver.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            begin.elapsed()
        });
        let tid = told.recv().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
        let patch =
            SocketPatch { thread: 1, call: 45, fd, sending: false, whole_ns: whole.as_nanos() as i64, left_ns: 0 };
        let done = Shortened::shorten(tid, patch, Duration::from_millis(400)).unwrap();
        assert!(socket.read_timeout().unwrap().unwrap() < Duration::from_millis(450));
        assert!(!done.entered());
        go.send(()).unwrap();
        give_back(vec![done]);
        let waited = thread.join().unwrap();
        assert!((Duration::from_millis(400)..Duration::from_secs(2)).contains(&waited), "{waited:?}");
        assert_eq!(socket.read_timeout().unwrap(), Some(whole));
    }
}
