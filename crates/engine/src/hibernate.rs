//! Hibernates a running proc: what is looked up before its threads stand still, and the order to
//! the pager.
//!
//! Two ways (`kip run --hibernate`). Blocked: the threads wait in their own system calls, and the
//! first page that one of them touches is the wake; nothing has to be watched. A program that ticks
//! goes on ticking: the pager tells what its ticks touch from a wake. Held: the threads are
//! stopped; the daemon holds duplicates of its sockets and knows its timers. The duplicates are
//! gone before the program runs again, so that its close is a close.

use crate::cause::WakeCause;
use crate::host::Proc;
use crate::host::proc::PAGER_DIRECTORY;
use crate::inotify;
use crate::survey;
use kip_clocks::tree::{self, Tree};
use kip_clocks::{Clocks, Due, Now, Source, Waiting, live_due};
use kip_net::custody::{self, HeldSocket, SavedOptions, SocketKind};
use kip_net::wake::Trigger;
use kip_pager::client::{MOST_WATCHED, PagerError};
use kip_pager::protocol::{Hibernated, MemoryStatus, Order, Sleeper, Timer};
use kip_records::due;
use kip_types::{Hibernate, WakeOn};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A hibernated proc, as its task needs to know it.
#[derive(Debug)]
pub struct Done {
    /// What the pager did.
    pub report: Hibernated,
    /// Its memory before.
    pub memory: kip_sys::smaps::MemoryUse,
    /// What of its memory is still there, bytes.
    pub there_bytes: u64,
    /// None: blocked.
    pub held: Option<Watched>,
    /// It ticks in place.
    pub ticks: bool,
    /// The thread that ticks most often, if one shows that it does, in words.
    pub ticker: Option<String>,
    /// When the first wait ends that a park must not be in the way of, nanoseconds of
    /// CLOCK_MONOTONIC.
    pub first_due_ns: Option<i64>,
}

/// A wait that comes at least as seldom as this can have a park put off for it each time.
const SELDOM_NS: i64 = 10_000_000_000;

/// What is known of a program's ticks before its hibernation.
#[derive(Debug, Clone, Copy)]
pub struct KnownTicks {
    /// Pages that one of its ticks may touch.
    pub patience: usize,
    /// It ticks, although no wait of its threads shows that.
    pub hidden: bool,
}

/// What is watched of a held proc.
#[derive(Debug)]
pub struct Watched {
    /// Its timers.
    pub clocks: Clocks,
    /// Its sockets.
    pub sockets: Vec<HeldSocket>,
    /// What the pager watches, in the order of [`Order::watch`].
    pub at_pager: Vec<WakeCause>,
}

/// Takes the memory of a running proc out.
pub fn hibernate(proc: &Proc, turn: u64, known: KnownTicks) -> Result<Done, PagerError> {
    let pids = proc.cgroup.pids().map_err(|e| PagerError::Refused(kip_types::chain(&e)))?;
    let tree = Tree::read(&pids);
    survey::find_ends(proc, &tree);
    let memory = kip_sys::smaps::memory(&tree.pids);
    let Waits { ticks, mut dues, slept } = find_ticks(proc, &tree, false);
    let ticks = ticks || known.hidden;
    let ticker = if ticks { ticker(proc, &tree) } else { None };
    let first_due_ns = first_seldom(&dues);
    let hold = match proc.spec().timing.hibernate {
        Hibernate::Held => true,
        Hibernate::Blocked | Hibernate::Off => false,
        Hibernate::Auto => wakes_on_data(proc) && !ticks,
    };
    let sockets = if hold { sockets_before(&tree) } else { Vec::new() };
    // The pager itself watches those that have nothing to offer yet, which is the fastest way; we
    // have the others.
    let quiet = |(_, saved): &(OwnedFd, SavedOptions)| {
        saved.seen == custody::Seen::default() && crate::watches::wakes_at_once(proc, &saved.kind)
    };
    let (mut quiet, mut sockets): (Vec<_>, Vec<_>) = sockets.into_iter().partition(quiet);
    if quiet.len() > MOST_WATCHED {
        sockets.extend(quiet.split_off(MOST_WATCHED));
    }
    let (quiet, causes): (Vec<OwnedFd>, Vec<WakeCause>) =
        quiet.into_iter().map(|(fd, saved)| (fd, first_event(saved.kind))).unzip();
    let order = Order {
        name: proc.key.to_string(),
        number: proc.slot.number().into(),
        directory: proc.dir.join(PAGER_DIRECTORY),
        processes: proc.cgroup.processes_file(),
        turn,
        hold,
        slept: if hold { slept } else { Vec::new() },
        patience: if ticks { known.patience } else { 0 },
        prefetch: proc.spec().timing.prefetch,
        drop_files: !proc.spec().timing.keep_files,
        watch: causes.iter().map(WakeCause::purpose).collect(),
    };
    let watch: Vec<_> = quiet.iter().map(|fd| fd.as_fd()).collect();
    let report = proc.shared.pager.hibernate(order, &watch);
    drop(quiet);
    let report = report?;
    let held = report.held.then(|| {
        let now = Now::read();
        dues.extend(report.timers.iter().map(|timer| due_of(timer, now)));
        let clocks = Clocks { frozen_ns: now.monotonic_ns, dues, ..Clocks::default() };
        let still = |(fd, before): (OwnedFd, SavedOptions)| {
            let frozen = match before.kind {
                SocketKind::Inotify => custody::inotify(custody::queued_events(fd.as_fd()).ok()?),
                _ => custody::snapshot_options(fd.as_fd()).ok()?,
            };
            let mut saved = frozen;
            saved.seen = crate::descriptors::seen(before.seen, frozen.seen);
            Some(HeldSocket { fd: Arc::new(fd), saved })
        };
        Watched { clocks, sockets: sockets.into_iter().filter_map(still).collect(), at_pager: causes }
    });
    let ticks = ticks && held.is_none();
    Ok(Done { report, memory, there_bytes: proc.cgroup.held_bytes(), held, ticks, ticker, first_due_ns })
}

/// When a timer that has just been asked for is due.
fn due_of(timer: &Timer, now: Now) -> Due {
    Due {
        source: if timer.interval_timer { Source::Interval } else { Source::Posix },
        at_ns: now.monotonic_ns + timer.left_ns,
        every_ns: (timer.every_ns > 0).then_some(timer.every_ns),
        // Nothing asks here: hibernated, no clock stands.
        monotonic: timer.interval_timer,
    }
}

/// The end of the first wait that a sleep can be put off for each time.
fn first_seldom(dues: &[Due]) -> Option<i64> {
    dues.iter().filter(|due| due.every_ns.is_none_or(|ns| ns >= SELDOM_NS)).map(|due| due.at_ns).min()
}

/// After how long the first wait of a running program ends that a sleep can be put off for, or its
/// first timer is due. Its threads are stopped for a moment, for no other process can ask for POSIX
/// and interval timers.
pub fn first_due_in(proc: &Proc) -> Option<Duration> {
    let tree = Tree::read(&proc.cgroup.pids().ok()?);
    // First, for while threads are on their way back into their calls they show no waits.
    let mut all = dues(proc, &tree, Now::read());
    let (timers, now) = (survey::timers(proc), Now::read());
    all.extend(timers.iter().map(|timer| due_of(timer, now)));
    let at_ns = first_seldom(&all)?;
    Some(Duration::from_nanos((at_ns - now.monotonic_ns).max(0) as u64))
}

/// Whether a program ticks, as far as its threads' waits and its timerfds show. Reads the memory of
/// the program: not to be asked of one whose first touch is its wake. `ticked`: see [`find_ticks`].
pub fn ticks(proc: &Proc, ticked: bool) -> bool {
    let Ok(pids) = proc.cgroup.pids() else { return true };
    find_ticks(proc, &Tree::read(&pids), ticked).ticks
}

/// What the waits of a program's threads show.
struct Waits {
    /// It ticks.
    ticks: bool,
    /// When they end.
    dues: Vec<Due>,
    /// All of its threads as they were before the look; empty if one of them ran meanwhile.
    slept: Vec<Sleeper>,
}

/// Whether a program ticks, and what its threads wait for. A thread that runs shows no wait, so it
/// is looked at until all sleep; a program whose threads never do all at once is taken to tick.
/// `ticked`: the program is known to have ticked; a wait that goes on since then shows no time-out
/// once a stop has interrupted it, and is taken for a tick as well.
fn find_ticks(proc: &Proc, tree: &Tree, ticked: bool) -> Waits {
    /// restart_syscall(2), on x86-64.
    const RESTARTED: u64 = 219;
    const SAMPLES: u32 = 10;
    const BETWEEN: Duration = Duration::from_millis(2);
    /// One sample of a program of many threads takes long enough.
    const WITHIN: Duration = Duration::from_millis(100);
    let (began, tick_ms) = (Instant::now(), proc.spec().timing.tick_ms);
    for sample in 1.. {
        let (before, now) = (tree.asleep(), Now::read());
        let dues = dues(proc, tree, now);
        let restarted = || tree.waiting().values().any(|waiting| waiting.call[0] == RESTARTED);
        let ticks = due::ticks(&dues, now.monotonic_ns, tick_ms) || ticked && tick_ms > 0 && restarted();
        let quiescent = before.is_some() && before == tree.asleep();
        if ticks || quiescent || sample == SAMPLES || began.elapsed() > WITHIN {
            let of = |(inside, switches)| Some(Sleeper { tid: *tree.threads.get(&inside)?, switches });
            let slept = before.filter(|_| quiescent).unwrap_or_default().into_iter().filter_map(of).collect();
            return Waits { ticks: ticks || !quiescent, dues, slept };
        }
        std::thread::sleep(BETWEEN);
    }
    unreachable!("the last sample returns")
}

/// What an event of such a descriptor, which has nothing to offer yet, will be.
fn first_event(kind: SocketKind) -> WakeCause {
    let trigger = match kind {
        SocketKind::Listener { .. } => Trigger::Connection,
        SocketKind::Udp { .. } => Trigger::Datagram,
        SocketKind::Inotify => Trigger::Changed,
        SocketKind::Stream { .. } | SocketKind::Runtime | SocketKind::Other => Trigger::Data,
    };
    WakeCause::Descriptor(kind, trigger)
}

/// Lets the pager know what a dead one had out of this proc. Returns whether the proc sleeps and is
/// held.
pub fn take_up(proc: &Proc) -> MemoryStatus {
    let directory = proc.dir.join(PAGER_DIRECTORY);
    if !directory.exists() {
        return MemoryStatus::default();
    }
    let name = proc.key.as_str();
    let pager = &proc.shared.pager;
    let taken = pager.adopt(name, proc.slot.number().into(), &directory).and_then(|()| pager.inspect(name));
    taken.unwrap_or_else(|e| {
        tracing::error!(proc = %proc.name, error = kip_types::chain(&e), "the proc's paged-out memory cannot be adopted yet; the proc waits");
        MemoryStatus::default()
    })
}

/// What the pager has of a proc's memory.
pub fn memory_status(proc: &Proc) -> MemoryStatus {
    if !proc.dir.join(PAGER_DIRECTORY).exists() {
        return MemoryStatus::default();
    }
    proc.shared.pager.inspect(proc.key.as_str()).unwrap_or_default()
}

/// Gives up what is kept of a proc whose processes have ended.
pub fn forget(proc: &Proc) {
    let directory = proc.dir.join(PAGER_DIRECTORY);
    if directory.exists()
        && let Err(e) = proc.shared.pager.forget(proc.key.as_str())
    {
        tracing::warn!(proc = %proc.name, error = kip_types::chain(&e), "the pager does not forget it");
        // Then it is dead, and the next one takes up only what is there.
        let _ = fs::remove_dir_all(directory);
    }
}

/// Whether it has a port at which a connection alone is to wake nothing.
pub fn wakes_on_data(proc: &Proc) -> bool {
    proc.spec().ports.iter().any(|port| port.wake_on == WakeOn::Data)
}

/// The thread whose waits are the shortest, if one waits less than `--tick` at a time: its number
/// inside, its name, the call.
fn ticker(proc: &Proc, tree: &Tree) -> Option<String> {
    let (now, ahead_ns, absolute) = (Now::read(), tree.ahead_ns(), proc.absolute_waits.lock().clone());
    let tick_ms = proc.spec().timing.tick_ms;
    let tick = |(inside, waiting): (&u32, &Waiting)| {
        let tid = *tree.threads.get(inside)?;
        let read = |address: u64, buffer: &mut [u8]| kip_sys::process::read_memory(tid, address, buffer).is_ok();
        let due = live_due(*inside, waiting, now, ahead_ns, &mut absolute.clone(), &read)?;
        Some((due.every_ns.filter(|_| due::ticks(&[due], now.monotonic_ns, tick_ms))?, *inside, tid, waiting.call[0]))
    };
    let (every_ns, inside, tid, call) = tree.waiting().iter().filter_map(tick).min()?;
    let name = fs::read_to_string(format!("/proc/{tid}/comm")).ok()?;
    let call = kip_clocks::call_name(call).unwrap_or("a call");
    Some(format!("thread {inside}, {}: {} s in {call}", name.trim_end().escape_debug(), every_ns as f64 / 1e9))
}

/// Time-outs of calls, and timerfds.
fn dues(proc: &Proc, tree: &Tree, now: Now) -> Vec<Due> {
    let mut found = Vec::new();
    let mut absolute = proc.absolute_waits.lock();
    absolute.keep(|inside| tree.threads.contains_key(&inside));
    let ahead_ns = tree.ahead_ns();
    for (inside, waiting) in tree.waiting() {
        let Some(tid) = tree.threads.get(&inside) else { continue };
        if tree::is_stopped(*tid) {
            continue;
        }
        let read = |address: u64, buffer: &mut [u8]| kip_sys::process::read_memory(*tid, address, buffer).is_ok();
        found.extend(live_due(inside, &waiting, now, ahead_ns, &mut absolute, &read));
    }
    for pid in &tree.pids {
        for (number, target) in tree::descriptors(*pid).unwrap_or_default() {
            if target == "anon_inode:[timerfd]"
                && let Ok(text) = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))
            {
                found.extend(timerfd(&text, now));
            }
        }
    }
    found
}

/// A timerfd that is armed: proc_pid_fdinfo(5).
fn timerfd(text: &str, now: Now) -> Option<Due> {
    let time = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?.trim();
        let (seconds, ns) = value.strip_prefix('(')?.strip_suffix(')')?.split_once(',')?;
        let seconds: i64 = seconds.trim().parse().ok()?;
        Some(seconds.saturating_mul(1_000_000_000).saturating_add(ns.trim().parse::<i64>().ok()?))
    };
    let (left, every) = (time("it_value:")?, time("it_interval:")?);
    let at_ns = now.monotonic_ns.saturating_add(left);
    let monotonic = text.lines().any(|line| line.strip_prefix("clockid:").is_some_and(|id| id.trim() == "1"));
    let every_ns = (every > 0).then_some(every);
    (left > 0).then_some(Due { source: Source::Timerfd, at_ns, every_ns, monotonic })
}

/// The INET sockets and inotify instances of a proc, with what it has been offered on each so far.
/// That counts as seen only if every thread slept all the while: one that runs may be about to
/// look, and will not have done so when it is stopped.
fn sockets_before(tree: &Tree) -> Vec<(OwnedFd, SavedOptions)> {
    let asleep = tree.asleep();
    let take = |(pid, number)| {
        let fd = crate::descriptors::duplicate(pid, number).ok()?;
        let options = custody::snapshot_options(fd.as_fd()).ok()?;
        (options.kind != SocketKind::Other).then_some((fd, options))
    };
    let take_inotify = |(pid, number)| {
        let fd = crate::descriptors::duplicate(pid, number).ok()?;
        let queued = custody::queued_events(fd.as_fd()).ok()?;
        Some((fd, custody::inotify(queued)))
    };
    let sockets = crate::descriptors::places(tree).into_values().filter_map(take);
    let mut sockets: Vec<_> = sockets.chain(inotify::places(tree).into_iter().filter_map(take_inotify)).collect();
    if asleep.is_none() || asleep != tree.asleep() {
        for (_, saved) in &mut sockets {
            saved.seen = custody::Seen { full: saved.seen.full, ..custody::Seen::default() };
        }
    }
    sockets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_timerfds() {
        let now = Now { monotonic_ns: 1_000, realtime_ns: 0, boottime_ns: 0 };
        let text = |value: &str, every: &str| {
            format!("pos:\t0\nclockid: 1\nticks: 0\nsettime flags: 01\nit_value: {value}\nit_interval: {every}\n")
        };
        let due = timerfd(&text("(0, 500)", "(1, 5)"), now).unwrap();
        assert_eq!((due.at_ns, due.every_ns), (1_500, Some(1_000_000_005)));
        assert_eq!(timerfd(&text("(2, 0)", "(0, 0)"), now).unwrap().every_ns, None);
        assert_eq!(timerfd(&text("(0, 0)", "(0, 0)"), now), None, "not armed");
        assert_eq!(timerfd("pos:\t0\n", now), None);
    }
}
