//! Threads of a process that was let go, on their way back into the calls in which they stood:
//! which faults are those of a program at work.

use crate::swap::PAGE;
use kip_sys::status::{Status, threads};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// A process that was let go, whose threads are on their way back into the calls in which they
/// stood.
#[derive(Debug)]
pub struct Resuming {
    pid: u32,
    /// The threads by their ids in their own pid namespace, once they were needed.
    threads: Option<HashMap<u32, u32>>,
}

/// How a thread stands to a page.
enum Stands {
    /// It has come out of its call, and touches the page by itself.
    AtWork,
    /// It waits for what the kernel reads for a call that begins anew, or for `page` because the
    /// instruction that makes the call is there; or a signal or a tracer has stopped it.
    InCall,
    /// It runs on a processor.
    Runs,
}

impl Resuming {
    /// A thread that was woken because its page had come with another thread's fault is back in its
    /// call, or at the next page, within this time on a processor.
    const SLEEPS_WITHIN: Duration = Duration::from_millis(2);
    /// The same for one that others keep from the processor, in all.
    const RUNS_WITHIN: Duration = Duration::from_millis(100);

    /// Of a process.
    pub(crate) fn of(pid: u32) -> Resuming {
        Resuming { pid, threads: None }
    }

    /// Whether a fault at `page` by `thread` (in its own pid namespace) is more than the way back
    /// into a call: proc_pid_syscall(5). A thread of which that cannot be told is at work; ours,
    /// which reads what a thread needs for its call while all of them stand still, is not.
    pub(crate) fn is_at_work(&mut self, page: u64, thread: u32) -> bool {
        let pid = self.pid;
        if self.threads.as_ref().is_none_or(|known| !known.contains_key(&thread)) {
            self.threads = Some(by_inner_id(pid));
        }
        let Some(tid) = self.threads.as_ref().and_then(|known| known.get(&thread)) else {
            if Path::new(&format!("/proc/self/task/{thread}")).exists() {
                return false;
            }
            let mut all = threads(pid).unwrap_or_default().into_iter();
            return all.any(|tid| matches!(stands(pid, tid, page), Stands::AtWork));
        };
        let (began, ran_before) = (Instant::now(), ran(pid, *tid));
        loop {
            match stands(pid, *tid, page) {
                Stands::AtWork => return true,
                Stands::InCall => return false,
                Stands::Runs if began.elapsed() > Resuming::RUNS_WITHIN => return true,
                Stands::Runs if ran(pid, *tid) > ran_before + Resuming::SLEEPS_WITHIN => return true,
                Stands::Runs => std::thread::yield_now(),
            }
        }
    }
}

/// How long a thread has run on a processor: /proc/PID/schedstat.
fn ran(pid: u32, tid: u32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

/// Threads of a process by their ids in their own pid namespace.
fn by_inner_id(pid: u32) -> HashMap<u32, u32> {
    let inner = |tid: u32| -> Option<(u32, u32)> { Some((Status::read(tid).ok()?.inner_id()?.0, tid)) };
    threads(pid).unwrap_or_default().into_iter().filter_map(inner).collect()
}

fn stands(pid: u32, tid: u32, page: u64) -> Stands {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")).unwrap_or_default();
    let mut words = text.split_ascii_whitespace();
    match words.next() {
        Some("-1") => {}
        Some("running") => return Stands::Runs,
        _ => return Stands::InCall,
    }
    let at = words.nth(1).and_then(|at| u64::from_str_radix(at.trim_start_matches("0x"), 16).ok());
    let elsewhere = at.is_some_and(|at| at & !(PAGE as u64 - 1) != page);
    let stands = || Status::read(tid).is_ok_and(|status| status.is_halted() || status.is_traced());
    if elsewhere && !stands() { Stands::AtWork } else { Stands::InCall }
}
