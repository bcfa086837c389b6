//! `kip why`: what keeps a proc awake now, or what will wake it.
//!
//! Reads, and wakes and touches no proc. It waits for a park or wake under way, two seconds at
//! most, and never for the program: [`crate::beside`].

mod flows;
mod inspect;

pub(crate) use inspect::{plain, state_of};

use crate::beside;
use inspect::Subject;
use kip_clocks::Now;
use kip_clocks::tree::Tree;
use kip_engine::blocking::blocking;
use kip_engine::fd_store::key;
use kip_engine::host::Proc;
use kip_engine::suspend;
use kip_engine::volumes;
use kip_records::due::source_word;
use kip_supervisor::idle::Activity;
use kip_supervisor::task::{Handle, ProcStatus, would_be_late};
use kip_types::State;
use kip_types::api::{
    ActivityKind, NextWakeView, ProgramView, RefusedCallView, SeenView, SocketState, SocketView, ThreadView, WhyView,
};
use kip_types::chain;
use kip_types::suspend::SuspendedBy;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An inspection takes one second, plus what reading takes.
const INSPECT_WITHIN: Duration = Duration::from_secs(4);
/// Sockets and threads in lines for people.
const MOST_LINES: usize = 5;

/// Why it is in the tier that it is in.
pub async fn why(handle: &Handle) -> WhyView {
    let running = matches!(handle.status.borrow().record.state, State::Hot { .. });
    let seen = if running { Some(inspect_within(&handle.proc).await) } else { None };
    // After the inspection: it may have fallen asleep meanwhile.
    let status = handle.status.borrow().clone();
    let seen = seen.filter(|_| matches!(status.record.state, State::Hot { .. }));
    let running = seen.is_some();
    let quiet_ms = quiet_ms(&status);
    let parks_after_ms = parks_after_ms(&handle.proc);
    let record = &status.record;
    let mut awake_because = Vec::new();
    let mut clock =
        record.last_sleep.as_ref().and_then(|sleep| sleep.suspended.clone()).filter(|_| is_parked(&record.state));
    let seen = match seen {
        Some(Ok((seen, word))) => {
            clock = word;
            awake_because = reasons(&handle.proc, &status, Some(&seen));
            Some(seen)
        }
        Some(Err(why)) => {
            awake_because = reasons(&handle.proc, &status, None);
            awake_because.push(format!("threads and sockets could not be inspected: {why}"));
            None
        }
        None => None,
    };
    // Of one that is parked: what keeps it from going further.
    let stays = record.stays_parked.clone().filter(|_| matches!(record.state, State::Parked { .. }));
    let mut cannot_sleep = stays.map_or_else(|| record.cannot_sleep.clone(), |why| vec![why]);
    let refused = !cannot_sleep.is_empty();
    if status.ticks && matches!(record.state, State::Hibernated { .. }) {
        cannot_sleep.push(would_be_late(&handle.proc, status.ticker.as_deref()));
    }
    WhyView {
        name: handle.proc.name.clone(),
        state: record.state.name(),
        awake_because,
        activity: running.then(|| kind_of(status.seen)),
        quiet_ms: running.then_some(quiet_ms),
        parks_after_ms: parks_after_ms.filter(|_| running),
        seen,
        cannot_sleep,
        cannot_sleep_at_ms: record.refused_at_ms.filter(|_| refused),
        next_wake: next_wake(&status),
        clock: clock.map(|word| format!("the proc's CLOCK_MONOTONIC stands still while it is parked ({word})")),
        last_sleep: record.last_sleep.clone(),
        last_wake: record.last_wake.clone(),
        taken_over_by: record.taken_over_by.clone(),
        fell_back: record.fell_back.clone(),
        clone: None,
        pinned_by: volumes::lines(&handle.proc.shared.data, &handle.proc.spec()),
        egress_refused: refused_calls(&handle.proc).await,
    }
}

async fn refused_calls(proc: &Arc<Proc>) -> Vec<RefusedCallView> {
    if proc.egress.is_limited() {
        let machine = Arc::clone(&proc.shared);
        blocking(move || machine.note_refused_calls()).await;
    }
    proc.egress.refused()
}

fn kind_of(seen: Option<Activity>) -> ActivityKind {
    match seen {
        Some(Activity::Traffic) => ActivityKind::Traffic,
        Some(Activity::Cpu(_)) => ActivityKind::Cpu,
        None => ActivityKind::Called,
    }
}

fn quiet_ms(status: &ProcStatus) -> u64 {
    status.quiet_since.map_or(0, |s| Instant::now().saturating_duration_since(s).as_millis() as u64)
}

fn parks_after_ms(proc: &Proc) -> Option<u64> {
    let timing = &proc.spec().timing;
    (!timing.never).then(|| timing.idle_ms.saturating_add(timing.park_after_ms))
}

fn next_wake(status: &ProcStatus) -> Option<NextWakeView> {
    let next = status.next?;
    let now_ns = Now::read().monotonic_ns;
    let ms = |at_ns: i64| ((at_ns - now_ns).max(0) / 1_000_000) as u64;
    let kind = source_word(next.source).to_owned();
    Some(NextWakeView { kind, due_ms: ms(next.due_ns), begins_ms: ms(next.at_ns), gathered: next.tick })
}

fn is_parked(state: &State) -> bool {
    matches!(state, State::Parked { .. } | State::Archived { .. })
}

/// What it does, and by which word its clock would stand if it were parked now.
async fn inspect_within(proc: &Arc<Proc>) -> Result<(SeenView, Option<SuspendedBy>), String> {
    let proc = Arc::clone(proc);
    let inspect = move || {
        let seen = subject(&proc).and_then(|s| inspect::inspect(&s).map_err(|e| chain(&e)))?;
        Ok((seen, suspend::suspends(&proc)))
    };
    beside::run(INSPECT_WITHIN, inspect).await?
}

fn subject(proc: &Proc) -> Result<Subject, String> {
    let pids = Tree::read(&proc.cgroup.pids().map_err(|e| chain(&e))?).pids;
    let held = || proc.fd_store.get(key::NET).and_then(|fd| fd.try_clone().ok());
    let of_init = pids.first().and_then(|pid| File::open(format!("/proc/{pid}/ns/net")).ok());
    let netns = of_init.map(OwnedFd::from).or_else(held);
    let addresses = kip_net::addr::Addresses::of(proc.shared.instance, proc.slot);
    Ok(Subject { pids, netns, addresses: [addresses.v4.into(), addresses.v6.into()] })
}

fn seconds(ms: u64) -> String {
    format!("{:.1} s", ms as f64 / 1000.0)
}

fn program(view: &ProgramView) -> String {
    format!("{} (pid {})", view.name, view.pid)
}

/// Lines for people, the strongest reason first.
fn reasons(proc: &Proc, status: &ProcStatus, seen: Option<&SeenView>) -> Vec<String> {
    let mut lines = Vec::new();
    let timing = &proc.spec().timing;
    if timing.never {
        lines.push("the proc was run with --never-sleep".to_owned());
    }
    if let Some(dry) = status.dry_run {
        let now = Instant::now();
        let (asleep, awake) = (dry.asleep(now), dry.tried(now));
        let share = asleep.as_secs_f64() * 100.0 / awake.as_secs_f64().max(0.001);
        lines.push(format!(
            "idle dry run: the proc would have slept {} times since its start or last wake, {} of {} ({share:.0}%)",
            dry.sleeps,
            seconds(asleep.as_millis() as u64),
            seconds(awake.as_millis() as u64)
        ));
    }
    if status.execs > 0 {
        let names = seen.map(|s| s.execs.iter().map(program).collect::<Vec<_>>().join(", "));
        let names = names.filter(|n| !n.is_empty()).map(|n| format!(": {n}")).unwrap_or_default();
        lines.push(format!("{} program(s) run in it by `kip exec`{names}", status.execs));
    }
    let (quiet, needed) = (quiet_ms(status), parks_after_ms(proc).unwrap_or(u64::MAX));
    let parks = |without: &str| match (timing.never, timing.dry_run) {
        (true, _) => String::new(),
        (_, true) => format!("; it would park after {} {without}", seconds(needed)),
        _ => format!("; it parks after {} {without}", seconds(needed)),
    };
    if quiet < needed {
        lines.push(match status.seen {
            Some(Activity::Traffic) => {
                format!("the proc received or sent data {} ago{}", seconds(quiet), parks("without"))
            }
            Some(Activity::Cpu(thousandths)) => format!(
                "the proc used {:.1}% of a core {} ago, more than 1% counts as work{}",
                f64::from(thousandths) / 10.0,
                seconds(quiet),
                parks("of less")
            ),
            None => format!(
                "the proc started, woke or answered a command {} ago{}",
                seconds(quiet),
                parks("without activity")
            ),
        });
    }
    if let Some(seen) = seen {
        lines.extend(culprits(seen, needed, matches!(status.seen, Some(Activity::Traffic))));
    }
    if !status.record.cannot_sleep.is_empty() {
        let now_ms = kip_sys::clock::now_ms();
        let ago = status.record.refused_at_ms.map(|at| format!(" {} ago", seconds(now_ms.saturating_sub(at))));
        let causes = status.record.cannot_sleep.join("; ");
        lines.push(format!("its last sleep was refused{}: {causes}", ago.unwrap_or_default()));
    }
    lines
}

/// Threads that work, and, if traffic was the newest activity, sockets that had packets within the
/// time that counts.
fn culprits(seen: &SeenView, needed_ms: u64, traffic: bool) -> Vec<String> {
    /// Less than this share of the time is not work.
    const WORK: u64 = 100;
    let mut lines: Vec<String> = Vec::new();
    let busy: Vec<&ThreadView> = seen.threads.iter().filter(|t| t.cpu_us * WORK > seen.watched_us).collect();
    lines.extend(busy.iter().take(MOST_LINES).map(|t| thread_line(t, seen.watched_us)));
    let queued = |s: &&SocketView| s.unread > 0 || s.unsent > 0;
    let recent = |s: &&SocketView| traffic && s.packet_ms.is_none_or(|ms| ms <= needed_ms.saturating_add(1000));
    let active: Vec<&SocketView> = seen.sockets.iter().filter(|s| recent(s) || queued(s)).collect();
    lines.extend(active.iter().take(MOST_LINES).map(|s| socket_line(s)));
    let more = active.len().saturating_sub(MOST_LINES);
    if more > 0 {
        lines.push(format!("and {more} more sockets"));
    }
    lines
}

fn thread_line(thread: &ThreadView, watched_us: u64) -> String {
    format!(
        "thread {} (tid {}) of {} used {:.1}% of a core in the last second",
        thread.name,
        thread.tid,
        program(&thread.program),
        thread.cpu_us as f64 * 100.0 / watched_us.max(1) as f64
    )
}

fn socket_line(socket: &SocketView) -> String {
    if socket.state == SocketState::Listen {
        return format!("{} {} has {} connections not accepted", socket.proto, socket.local, socket.unread);
    }
    let mut line = format!("{} {}", socket.proto, socket.local);
    if let Some(peer) = socket.peer {
        line.push_str(&format!(" with {peer}"));
    }
    if let Some(client) = socket.client.filter(|c| socket.peer != Some(*c)) {
        line.push_str(&format!(", outside {client}"));
    }
    line.push_str(&format!(", {}: {} bytes unread, {} unsent", socket.state, socket.unread, socket.unsent));
    if let Some(ms) = socket.packet_ms {
        line.push_str(&format!(", newest packet at most {} s ago", ms / 1000));
    }
    if let Some(first) = socket.programs.first() {
        line.push_str(&format!(", open in {}", program(first)));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::Protocol;

    fn socket(packet_ms: Option<u64>, unread: u32) -> SocketView {
        SocketView {
            proto: Protocol::Tcp,
            state: SocketState::Established,
            local: "10.213.0.1:80".parse().unwrap(),
            peer: "10.213.0.255:5000".parse().ok(),
            client: "127.0.0.1:4000".parse().ok(),
            unread,
            unsent: 0,
            packet_ms,
            programs: vec![ProgramView { name: "web".to_owned(), pid: 2 }],
        }
    }

    fn seen(sockets: Vec<SocketView>) -> SeenView {
        let worker = ThreadView {
            name: "worker".to_owned(),
            tid: 9,
            program: ProgramView { name: "web".to_owned(), pid: 2 },
            cpu_us: 500_000,
        };
        let idle = ThreadView { cpu_us: 5_000, ..worker.clone() };
        let (threads, timers, execs, watched_us) = (vec![worker, idle], Vec::new(), Vec::new(), 1_000_000);
        SeenView { watched_us, threads, sockets_in_all: sockets.len(), sockets, timers, execs }
    }

    #[test]
    fn who_works_and_who_talks_is_named() {
        let lines = culprits(&seen(vec![socket(Some(2000), 7), socket(Some(90_000), 0)]), 20_000, true);
        let expected = [
            "thread worker (tid 9) of web (pid 2) used 50.0% of a core in the last second",
            "tcp 10.213.0.1:80 with 10.213.0.255:5000, outside 127.0.0.1:4000, established: 7 bytes unread, 0 unsent, \
             newest packet at most 2 s ago, open in web (pid 2)",
        ];
        assert_eq!(lines, expected);
        assert_eq!(culprits(&seen(vec![socket(Some(2000), 0)]), 20_000, false).len(), 1, "no traffic was seen");
        let many = culprits(&seen(vec![socket(None, 0); 7]), 20_000, true);
        assert_eq!((many.len(), many[6].as_str()), (7, "and 2 more sockets"));
    }
}
