//! What /proc says of threads and processes: which there are, whether they sleep, and how often they have.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;

/// The threads of a process.
///
/// # Errors
/// `NotFound` when it has ended.
pub(crate) fn threads(pid: u32) -> io::Result<Vec<u32>> {
    let ids = fs::read_dir(format!("/proc/{pid}/task"))?;
    Ok(ids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// Threads that sleep or are stopped by a signal, and how often each has left a processor; and which of them are stopped.
pub(crate) fn sleepers(pids: &[u32]) -> (HashMap<u32, u64>, HashSet<u32>) {
    let (mut slept, mut halted) = (HashMap::new(), HashSet::new());
    for tid in pids.iter().flat_map(|pid| threads(*pid).unwrap_or_default()) {
        let status = fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
        let Some(left) = left_processor(&status) else { continue };
        if status.contains(HALTED) {
            halted.insert(tid);
        }
        if status.contains(HALTED) || status.contains("\nState:\tS") {
            slept.insert(tid, left);
        }
    }
    (slept, halted)
}

/// How a thread that a signal has stopped is shown: proc_pid_status(5).
const HALTED: &str = "\nState:\tT";

/// Whether a signal has stopped a thread: it is not about to do anything, wherever it stands.
pub(crate) fn is_halted(tid: u32) -> bool {
    fs::read_to_string(format!("/proc/{tid}/status")).is_ok_and(|status| status.contains(HALTED))
}

/// Whether a thread runs, or would if a processor had time for it.
pub(crate) fn is_runnable(tid: u32) -> bool {
    fs::read_to_string(format!("/proc/{tid}/status")).is_ok_and(|status| status.contains("\nState:\tR"))
}

/// How often a thread has left a processor: proc_pid_status(5).
fn left_processor(status: &str) -> Option<u64> {
    let count = |name: &str| status.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok();
    Some(count("voluntary_ctxt_switches:")? + count("nonvoluntary_ctxt_switches:")?)
}

/// Whether a stopped thread that slept before has run for nothing but to stop.
pub(crate) fn slept_through(slept: &HashMap<u32, u64>, tid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
    slept.get(&tid).is_some_and(|before| left_processor(&status).is_some_and(|now| now <= before + 1))
}

/// How often a thread has left a processor to wait; that one was taken away from it does not count.
pub(crate) fn waits(tid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse().ok()
}

/// Whether a stopped thread that had waited so often before has waited for nothing since but in its stop. On a busy machine the
/// processor may have been taken away from it on the way.
pub(crate) fn waited_no_more(tid: u32, before: u64) -> bool {
    waits(tid).is_some_and(|now| now <= before + 1)
}

/// Pid 1 of a pid namespace: NSpid in proc_pid_status(5).
pub(crate) fn is_init(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let inside = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    inside.is_some_and(|ids| ids.split_whitespace().next_back() == Some("1"))
}

/// Whether a thread is gone, is a leader that has called pthread_exit, or belongs to a process that its parent has yet to wait for.
pub(crate) fn has_ended(pid: u32, tid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")) else { return true };
    stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z") || rest.starts_with(" X"))
}

/// Whether the signal of a process's interval timer waits: SIGALRM in proc_pid_status(5).
pub(crate) fn is_alarmed(pid: u32) -> bool {
    const ALARM: u64 = 1 << 13;
    signals(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default(), "ShdPnd:") & ALARM != 0
}

/// A mask of signals in proc_pid_status(5): signal N as bit N - 1.
fn signals(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|value| u64::from_str_radix(value.trim(), 16).ok()).unwrap_or(0)
}
