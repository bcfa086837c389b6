//! What people and programs see of a proc: `inspect`, `ps`, `top`. Reads, never changes anything.

use crate::proc::Proc;
use crate::task::Handle;
use crate::tree::{self, Tree};
use kip_checkpoint::clocks::Now;
use kip_types::api::{MemoryView, ProcView};
use kip_types::{State, Tier};

/// The proc as it is now.
pub(crate) fn proc_view(handle: &Handle) -> ProcView {
    let status = handle.status.borrow().clone();
    let proc = &handle.proc;
    let record = &status.record;
    let (pids, memory, cpu_us) = measure(proc, record.state.tier());
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
        cpu_us,
        wakes: wakes(&record.state),
        spec: proc.spec.clone(),
    }
}

fn measure(proc: &Proc, tier: Option<Tier>) -> (Vec<u32>, MemoryView, Option<u64>) {
    if tier != Some(Tier::Hot) {
        return (Vec::new(), MemoryView::default(), None);
    }
    let pids = Tree::read(&proc.cgroup.pids().unwrap_or_default()).pids;
    let (rss_bytes, pss_bytes, swap_bytes) = tree::memory(&pids);
    let usage = proc.cgroup.usage().ok();
    let kernel_bytes = usage.as_ref().map_or(0, |u| u.kernel_bytes);
    let memory = MemoryView { rss_bytes, pss_bytes, kernel_bytes, swap_bytes, working_set_pages: 0 };
    (pids, memory, usage.map(|u| u.cpu_ns / 1000))
}

/// Each sleep makes a generation, so there were as many wakes, but for the sleep that it is in.
fn wakes(state: &State) -> u64 {
    let asleep = matches!(state, State::Parked { .. } | State::Waking { .. });
    state.generation().0.saturating_sub(u64::from(asleep))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::Generation;

    #[test]
    fn wakes_are_sleeps_that_ended() {
        let hot = |generation| State::Hot { init: 7, init_started: 1, generation: Generation(generation) };
        assert_eq!([wakes(&hot(0)), wakes(&hot(3))], [0, 3]);
        assert_eq!(wakes(&State::Parked { generation: Generation(3) }), 2);
        let parking = State::Parking { init: 7, init_started: 1, generation: Generation(4) };
        assert_eq!(wakes(&parking), 3);
        assert_eq!(wakes(&State::Stopped { exit: None }), 0);
    }
}
