//! Time in the restored processes, in the last moment before they run: time-outs, timerfds, missed
//! signals.

use crate::descriptors::take;
use crate::host::Proc;
use kip_clocks::tree::Tree;
use kip_clocks::{Form, Missed, Now};
use kip_sys::ends::{self, End};
use kip_sys::process::{Signal, pidfd_open, pidfd_send_signal, read_memory, write_memory};
use kip_sys::shortened::{self, Shortened, Wait};
use kip_sys::{timed, timer};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// What the very first wake is believed to take at least until timers are armed, nanoseconds.
const FIRST_LEAD_NS: i64 = 10_000_000;
/// A restore that takes longer than this is not waited for, nanoseconds.
const LONGEST_LEAD_NS: i64 = 500_000_000;

/// POSIX and interval timers are stored as what is left when CRIU arms them. The images are made
/// for a moment that is a little sooner than the last restore was ready for it; if this one is
/// faster, it waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimerPlan {
    begin: Now,
    lead_ns: i64,
}

impl TimerPlan {
    /// Begins now.
    pub(super) fn new(proc: &Proc, clocks: &kip_clocks::Clocks) -> TimerPlan {
        let leads = proc.shared.leads();
        // Before its first wake: the fastest of the others.
        let last = leads.get(&proc.slot).or_else(|| leads.values().min()).copied();
        drop(leads);
        let lead_ns = last.map_or(FIRST_LEAD_NS, |last| (last / 8 * 7).min(LONGEST_LEAD_NS));
        TimerPlan { begin: Now::read(), lead_ns: if clocks.are_in_images() { lead_ns } else { 0 } }
    }

    /// The moment that timers are moved to.
    pub(super) fn armed_at(&self) -> Now {
        self.begin.later(self.lead_ns)
    }

    /// Waits for that moment, and learns for the next time.
    pub(super) fn wait(&self, proc: &Proc, clocks: &kip_clocks::Clocks) {
        if !clocks.are_in_images() {
            return;
        }
        let took = Now::read().monotonic_ns - self.begin.monotonic_ns;
        proc.shared.leads().insert(proc.slot, took);
        let early = self.lead_ns - took;
        if early > 0 {
            std::thread::sleep(Duration::from_nanos(early as u64));
        }
    }
}

/// Sets everything about time in the restored processes, which must be stopped; if they are
/// `traced` by this thread, waits for events whose time-out has passed end by it. `waits` are the
/// clocks as time-outs of calls are to know them. What cannot be set is logged.
pub(super) fn set(
    proc: &Proc,
    clocks: &kip_clocks::Clocks,
    waits: &kip_clocks::Clocks,
    missed: &[Missed],
    traced: bool,
) -> Vec<Shortened> {
    let nothing =
        clocks.patches.is_empty() && clocks.timerfds.is_empty() && clocks.sockets.is_empty() && clocks.words.is_empty();
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
        let after_packet = kip_clocks::after_packet(timerfd, clocks, Now::read());
        if let Err(e) = set.and_then(|fd| kip_clocks::set_timerfd(fd.as_fd(), &after_packet)) {
            complain("a timerfd could not be set", timerfd.pid, &e);
        }
    }
    for signal in missed {
        let (Missed::Interval { pid: whose } | Missed::Posix { pid: whose, .. }) = *signal;
        let sent = on_host(signal, &tree).and_then(|signal| match signal {
            Missed::Interval { pid } => alarm(pid),
            Missed::Posix { pid, thread, signal } => timer::send_timer_signal(pid, thread, signal),
        });
        if let Err(e) = sent {
            complain("the signal of a timer could not be sent", whose, &e);
        }
    }
    // CRIU's images have the others already.
    for patch in clocks.patches.iter().filter(|patch| traced || patch.form != Form::Millis) {
        // Anew for each: what comes between makes the wait longer.
        let now = Now::read();
        let over = traced && kip_clocks::is_over(patch, waits, now);
        let fill = |tid| {
            // A thread of a stopped process is not ours.
            let ended = over && matches!(timed::end_wait(tid), Ok(true));
            kip_clocks::fill(tid, patch, waits, now, ended)
        };
        if let Err(e) = host(patch.thread).and_then(fill) {
            complain("a time-out could not be filled in", patch.thread, &e);
        }
    }
    for (thread, address) in &clocks.words {
        if let Err(e) = host(*thread).and_then(|tid| read_memory(tid, *address, &mut [0; 4])) {
            complain("the word of a lock could not be brought", *thread, &e);
        }
    }
    // Threads that wait on one socket share its option: the longest of what is left, so that none
    // is early.
    let mut shortened: BTreeMap<(u64, bool), Shortened> = BTreeMap::new();
    let mut patches = clocks.sockets.clone();
    patches.sort_by_key(|p| p.left_ns);
    let now = Now::read();
    for patch in patches {
        let left = (patch.left_ns - (now.monotonic_ns - clocks.frozen_ns)).max(0) as u64;
        let end = End { at_ns: clocks.frozen_ns + patch.left_ns, whole_ns: patch.whole_ns };
        let shorten = |tid| {
            let wait = Wait { tid, call: patch.call, fd: patch.fd, sending: patch.sending };
            let whole = Duration::from_nanos(patch.whole_ns.max(0) as u64);
            let done = Shortened::shorten(wait, whole, Duration::from_nanos(left))?;
            match patch.record {
                Some(place) => write_memory(tid, place, &ends::encode(left as i64, end, place)).map(|()| done),
                None => Ok(done),
            }
        };
        match host(patch.thread).and_then(shorten) {
            Ok(done) => drop(shortened.insert(done.shares(), done)),
            Err(e) => complain("the time-out of a socket could not be set", patch.thread, &e),
        }
    }
    shortened.into_values().collect()
}

/// Sends signals of timers that came due after the packet which the program was woken for, when the
/// program has had time to take that, `taken_within`. Those of a timer that is gone by
/// then, or that would end a program which takes them no more, are not sent.
pub(super) fn send_later(proc: &Proc, signals: &[Missed], taken_within: Duration) {
    if signals.is_empty() {
        return;
    }
    let tree = Tree::read(&proc.cgroup.pids().unwrap_or_default());
    let signals: Vec<Missed> = signals.iter().filter_map(|signal| on_host(signal, &tree).ok()).collect();
    let send = move || {
        std::thread::sleep(taken_within);
        for signal in signals {
            // What has ended meanwhile misses nothing.
            let _ = match signal {
                Missed::Interval { pid } if bears(pid, Signal::ALARM.as_raw()) => alarm(pid),
                Missed::Posix { pid, thread, signal } if bears(pid, signal.signal) && has_timer(pid, signal.timer) => {
                    timer::send_timer_signal(pid, thread, signal)
                }
                _ => Ok(()),
            };
        }
    };
    if let Err(e) = std::thread::Builder::new().name("kip-signals".to_owned()).spawn(send) {
        tracing::warn!(proc = %proc.name, error = %e, "signals of periodic timers are not sent, the next expirations are");
    }
}

/// The same signal with the numbers that process and thread have on the host.
fn on_host(signal: &Missed, tree: &Tree) -> io::Result<Missed> {
    let host = |inside: u32| tree.threads.get(&inside).copied().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
    Ok(match *signal {
        Missed::Interval { pid } => Missed::Interval { pid: host(pid)? },
        Missed::Posix { pid, thread, signal } => {
            Missed::Posix { pid: host(pid)?, thread: thread.map(host).transpose()?, signal }
        }
    })
}

/// Whether a process catches, blocks or ignores a signal: proc_pid_status(5).
fn bears(pid: u32, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let sets = ["SigBlk:", "SigIgn:", "SigCgt:"].map(|name| {
        let set = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix(name)?.trim(), 16).ok());
        set.unwrap_or(0)
    });
    sets.iter().fold(0, |all, set| all | set) >> (signal - 1) & 1 == 1
}

/// Whether a process has a timer of that id: proc_pid_timers(5). Where the kernel does not say, it
/// has.
fn has_timer(pid: u32, id: i32) -> bool {
    let is_it = |line: &str| line.strip_prefix("ID: ").is_some_and(|known| known.trim() == id.to_string());
    fs::read_to_string(format!("/proc/{pid}/timers")).map_or(true, |text| text.lines().any(is_it))
}

/// Gives sockets their own time-outs back.
pub(super) fn give_back(shortened: Vec<Shortened>) {
    let complain = |e: &io::Error| tracing::warn!(error = %e, "a socket keeps a time-out that was meant for one call");
    drop(shortened::give_back(shortened, complain));
}

fn alarm(pid: u32) -> io::Result<()> {
    pidfd_send_signal(pidfd_open(pid)?.as_fd(), Signal::ALARM)
}
