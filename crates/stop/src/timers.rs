//! What is left of a stopped process's POSIX and interval timers: no other process can ask for
//! that, so the process asks for us.
//!
//! Sources: proc_pid_timers(5), timer_gettime(2), getitimer(2).

use crate::limits::{self, Lifted};
use crate::scratch::{Scratch, call};
use crate::stopped::{StopError, StoppedProcess, ended, stop};
use kip_sys::inject::Hand;
use kip_sys::process::read_memory;
use kip_sys::status::is_init;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::time::Instant;

/// Bytes of memory that the calls need: a page.
const SCRATCH: u64 = 4096;

/// A timer that is armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timer {
    /// setitimer(2), otherwise timer_create(2).
    pub interval_timer: bool,
    /// Nanoseconds until it fires.
    pub left_ns: i64,
    /// How often it fires, nanoseconds; 0 for once.
    pub every_ns: i64,
}

/// All armed timers by real time of a process; `alarmed`: the signal of its interval timer waited
/// before it was stopped.
///
/// # Errors
/// Those of the injection; a timer that is gone meanwhile is left out.
pub fn left(pid: u32, alarmed: bool, hand: &Hand, scratch: &Scratch) -> io::Result<Vec<Timer>> {
    const REAL: u64 = 0;
    let mut found = Vec::new();
    hand.call(call::GETITIMER, &[REAL, scratch.at])?;
    // With nothing left and an interval its signal waits to be taken, and the timer does not run
    // until that is done. It is due now if the signal has just come. A program that has let it wait
    // since before is not woken by it.
    let (left_ns, every_ns) = read(pid, scratch.at, 1_000)?;
    if left_ns > 0 || every_ns > 0 && !alarmed {
        found.push(Timer { interval_timer: true, left_ns: left_ns.max(1), every_ns });
    }
    for id in ids(&std::fs::read_to_string(format!("/proc/{pid}/timers")).unwrap_or_default()) {
        if hand.call(call::TIMER_GETTIME, &[id, scratch.at]).is_ok() {
            let (left_ns, every_ns) = read(pid, scratch.at, 1)?;
            if left_ns > 0 {
                found.push(Timer { interval_timer: false, left_ns, every_ns });
            }
        }
    }
    Ok(found)
}

/// All armed timers by real time of a stopped process whose memory stays. The sandbox's pid 1 has
/// none, and is not asked; nor is one that has just been killed, or runs 32-bit code, whose timers
/// are late. `lifted`: where the next pager finds the limits that are lifted meanwhile.
///
/// # Errors
/// As [`left`], and those of taking a thread.
pub fn ask(process: &StoppedProcess, lifted: Option<&Path>) -> io::Result<Vec<Timer>> {
    let pid = process.pid;
    if is_init(pid) {
        return Ok(Vec::new());
    }
    let hand = match process.hand() {
        Ok(hand) => hand,
        Err(e) if e.kind() == io::ErrorKind::Unsupported || ended(&e) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let limits = Lifted::of(pid, lifted)?;
    let scratch = Scratch::map(&hand, SCRATCH).map_err(|e| limits::name(pid, e))?;
    drop(limits);
    let found = left(pid, process.alarmed, &hand, &scratch);
    scratch.unmap(&hand)?;
    hand.give_back()?;
    found
}

/// All armed timers by real time of running processes, which are stopped for a moment. Faults must
/// be served by other threads. A process that cannot be asked is left out. `lifted` as in [`ask`].
///
/// # Errors
/// They do not stop by `until`; all run on.
pub fn of_running(pids: &[u32], until: Instant, lifted: Option<&Path>) -> Result<Vec<Timer>, StopError> {
    let stopped = stop(|| Ok(pids.to_vec()), until)?;
    let timers = stopped.processes.values().filter_map(|process| ask(process, lifted).ok()).flatten().collect();
    stopped.go();
    Ok(timers)
}

/// Ids of timers, but for those that count CPU time.
fn ids(text: &str) -> Vec<u64> {
    let mut ids = Vec::new();
    for line in text.lines() {
        if let Some(id) = line.strip_prefix("ID: ") {
            ids.extend(id.trim().parse::<u64>());
        } else if let Some(clock) = line.strip_prefix("ClockID: ")
            // Negative ids and 2, 3 are clocks of processes and threads.
            && clock.trim().parse::<i64>().is_ok_and(|clock| clock < 0 || clock == 2 || clock == 3)
        {
            ids.pop();
        }
    }
    ids
}

/// Interval and value of struct itimerval (`unit` 1000) or itimerspec (1), as (left, every).
fn read(pid: u32, at: u64, unit: i64) -> io::Result<(i64, i64)> {
    let mut bytes = [0u8; 32];
    read_memory(pid, at, &mut bytes)?;
    let word = |index: usize| i64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("8 bytes"));
    let ns = |index: usize| word(index).saturating_mul(1_000_000_000).saturating_add(word(index + 1) * unit);
    Ok((ns(2), ns(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_of_cpu_time_are_left_out() {
        let text = "ID: 0\nsignal: 34/00\nnotify: signal/pid.7\nClockID: 1\nID: 3\nsignal: 14/0\nnotify: none/pid.7\nClockID: 2\nID: 4\nClockID: -6\nID: 5\nClockID: 0\n";
        assert_eq!(ids(text), [0, 5]);
        assert_eq!(ids(""), Vec::<u64>::new());
    }
}
