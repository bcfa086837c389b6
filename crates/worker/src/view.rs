//! What people and programs see of a proc: `inspect`, `ps` and `why`. Reads, never changes anything.

use crate::idle::Activity;
use crate::proc::Proc;
use crate::task::{Handle, Status};
use crate::tree::{self, Tree};
use kip_checkpoint::clocks::Now;
use kip_types::api::{MemoryView, ProcView, WhyView};
use kip_types::{State, Tier};
use std::time::Instant;

/// The proc as it is now.
pub(crate) fn proc_view(handle: &Handle) -> ProcView {
    let status = handle.status.borrow().clone();
    let proc = &handle.proc;
    let record = &status.record;
    let (pids, memory) = measure(proc, record.state.tier());
    let next_timer_ms = status.next.map(|n| ((n.due_ns - Now::read().monotonic_ns).max(0) / 1_000_000) as u64);
    ProcView {
        name: proc.name.clone(),
        realm: proc.spec.realm.clone(),
        state: record.state.word().to_owned(),
        tier: record.state.tier(),
        worker: proc.shared.name.clone(),
        generation: record.generation(),
        ports: record.ports.clone(),
        pids,
        memory,
        last_sleep: record.last_sleep.clone(),
        last_wake: record.last_wake.clone(),
        exit: match &record.state {
            State::Stopped { exit } => exit.map(|e| e.to_string()),
            _ => None,
        },
        idle_ms: status.quiet_since.map(|since| since.elapsed().as_millis() as u64),
        next_timer_ms,
        spec: proc.spec.clone(),
    }
}

fn measure(proc: &Proc, tier: Option<Tier>) -> (Vec<u32>, MemoryView) {
    if tier != Some(Tier::Hot) {
        return (Vec::new(), MemoryView::default());
    }
    let pids = Tree::read(&proc.cgroup.pids().unwrap_or_default()).pids;
    let (rss_bytes, pss_bytes, swap_bytes) = tree::memory(&pids);
    let kernel_bytes = proc.cgroup.usage().map_or(0, |u| u.kernel_bytes);
    (pids, MemoryView { rss_bytes, pss_bytes, kernel_bytes, swap_bytes, working_set_pages: 0 })
}

/// Why it is in the tier that it is in.
pub(crate) fn why(handle: &Handle) -> WhyView {
    let status = handle.status.borrow().clone();
    let awake_because = match &status.record.state {
        State::Hot { .. } => reasons(&handle.proc, &status),
        _ => Vec::new(),
    };
    WhyView {
        name: handle.proc.name.clone(),
        state: status.record.state.word().to_owned(),
        awake_because,
        cannot_sleep: status.record.cannot_sleep.clone(),
        last_wake: status.record.last_wake.clone(),
    }
}

fn reasons(proc: &Proc, status: &Status) -> Vec<String> {
    let mut reasons = Vec::new();
    let timing = &proc.spec.timing;
    if timing.never {
        reasons.push("it was run with --never-sleep".to_owned());
    }
    if status.execs > 0 {
        reasons.push(format!("{} program(s) run in it by `kip exec`", status.execs));
    }
    let quiet = status.quiet_since.map_or(0, |s| Instant::now().saturating_duration_since(s).as_millis() as u64);
    let needed = timing.idle_ms.saturating_add(timing.park_after_ms);
    let seconds = |ms: u64| ms as f64 / 1000.0;
    match status.seen {
        _ if timing.never => {}
        Some(Activity::Traffic) if quiet < needed => reasons.push(format!(
            "it received or sent data {:.1} s ago; it parks after {:.1} s without",
            seconds(quiet),
            seconds(needed)
        )),
        Some(Activity::Cpu(thousandths)) if quiet < needed => reasons.push(format!(
            "it used {:.1}% of a core {:.1} s ago, more than 1% counts as work; it parks after {:.1} s of less",
            f64::from(thousandths) / 10.0,
            seconds(quiet),
            seconds(needed)
        )),
        _ if quiet < needed => reasons.push(format!(
            "it started, woke or was called {:.1} s ago; it parks after {:.1} s without activity",
            seconds(quiet),
            seconds(needed)
        )),
        _ => {}
    }
    if !status.record.cannot_sleep.is_empty() {
        reasons.push(format!("its last sleep was refused: {}", status.record.cannot_sleep.join("; ")));
    }
    reasons
}
