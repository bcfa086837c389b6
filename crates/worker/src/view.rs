//! What people and programs see of a proc: `inspect`, `ps`, `top`. Reads, never changes anything.

use crate::events::now_ms;
use crate::hibernate;
use crate::metrics::ProcNow;
use crate::probe;
use crate::proc::Proc;
use crate::state::Record;
use crate::task::{Handle, Status};
use crate::tree;
use kip_checkpoint::clocks::Now;
use kip_types::api::{FetchedView, MemoryView, MeterView, ProcView, SleepView, WakeView};
use kip_types::{State, Tier};
use std::sync::Mutex;

/// What came from the store for its last wake.
fn fetched(proc: &Proc, wake: &WakeView) -> Option<FetchedView> {
    let archive = proc.shared.archive.as_ref().filter(|_| wake.from == Tier::Archived)?;
    archive.fetched(&proc.dir)
}

/// What a hibernated proc was measured to have, and in which sleep. Its threads stand still: but for what the kernel or the pager moves to
/// disk meanwhile, that does not change before it wakes.
#[derive(Debug, Default)]
pub(crate) struct Measured(Mutex<Option<(SleepView, Measure)>>);

/// Host pids, memory, microseconds of CPU time.
type Measure = (Vec<u32>, MemoryView, Option<u64>);

impl Measured {
    fn in_sleep(&self, record: &Record) -> Option<Measure> {
        let known = self.0.lock().expect("nobody panics with it");
        let (sleep, measure) = known.as_ref()?;
        let same = matches!(record.state, State::Hibernated { .. }) && record.last_sleep.as_ref() == Some(sleep);
        same.then(|| measure.clone())
    }

    fn keep(&self, record: &Record, measure: &Measure) {
        let sleep = record.last_sleep.clone().filter(|_| matches!(record.state, State::Hibernated { .. }));
        *self.0.lock().expect("nobody panics with it") = sleep.map(|sleep| (sleep, measure.clone()));
    }
}

/// The proc as it is now.
pub(crate) fn proc_view(handle: &Handle) -> ProcView {
    let status = handle.status.borrow().clone();
    let measure = measure(&handle.proc, &status.record);
    handle.proc.measured.keep(&status.record, &measure);
    view_of(handle, status, measure)
}

/// All of them as they are now, but that a hibernated one is not measured again in the same sleep.
pub(crate) fn proc_views(handles: &[Handle]) -> Vec<ProcView> {
    let view = |handle: &Handle| {
        let status = handle.status.borrow().clone();
        match handle.proc.measured.in_sleep(&status.record) {
            Some(measure) => view_of(handle, status, measure),
            None => proc_view(handle),
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = handles.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let shares: Vec<_> =
            handles.chunks(share).map(|some| scope.spawn(move || some.iter().map(view).collect::<Vec<_>>())).collect();
        shares.into_iter().flat_map(|share| share.join().expect("looking does not panic")).collect()
    })
}

fn view_of(handle: &Handle, status: Status, (pids, memory, cpu_us): Measure) -> ProcView {
    let proc = &handle.proc;
    let record = &status.record;
    let next_timer_ms = status.next.map(|n| ((n.due_ns - Now::read().monotonic_ns).max(0) / 1_000_000) as u64);
    ProcView {
        name: proc.name.clone(),
        realm: proc.spec.realm.clone(),
        state: if status.starting { "starting" } else { record.state.word() }.to_owned(),
        tier: record.state.tier(),
        worker: proc.shared.name.clone(),
        generation: record.generation(),
        ports: record.ports.clone(),
        pids,
        memory,
        disk_bytes: proc.files.limited_bytes(),
        last_sleep: record.last_sleep.clone(),
        last_wake: record.last_wake.clone().map(|wake| WakeView { fetched: fetched(proc, &wake), ..wake }),
        exit: match &record.state {
            State::Stopped { exit } | State::Restarting { exit, .. } => exit.map(|e| e.to_string()),
            _ => None,
        },
        idle_ms: status.quiet_since.map(|since| since.elapsed().as_millis() as u64),
        next_timer_ms,
        cpu_us,
        wakes: record.wakes,
        restarts: record.restarts,
        ready: record.ready,
        probes: probe::views(&proc.spec.probes, record),
        next_start_ms: match &record.state {
            State::Restarting { at_ms, .. } => Some(at_ms.saturating_sub(now_ms())),
            _ => None,
        },
        spec: proc.spec.clone(),
    }
}

/// What it has used to this moment; a running one is looked at.
pub(crate) fn meter_view(handle: &Handle, since_ms: Option<u64>) -> MeterView {
    let status = handle.status.borrow().clone();
    if let State::Hot { init, .. } = status.record.state {
        handle.proc.look_for_meter(init);
    }
    handle.proc.meter.view_since(&handle.proc, status.record.state.word(), since_ms)
}

/// What metrics tell of it, from memory alone.
pub(crate) fn proc_now(handle: &Handle) -> ProcNow {
    let status = handle.status.borrow();
    let record = &status.record;
    let sleeps = matches!(record.state.tier(), Some(Tier::Hibernated | Tier::Parked | Tier::Archived));
    let had_bytes = record.last_sleep.as_ref().filter(|_| sleeps).and_then(|sleep| sleep.memory_bytes).unwrap_or(0);
    ProcNow {
        meter: handle.proc.meter.view_since(&handle.proc, record.state.word(), None),
        had_bytes,
        refused: matches!(record.state, State::Hot { .. }) && !record.cannot_sleep.is_empty(),
        waits: status.waits,
        disk: handle.proc.files.limited_bytes().zip(handle.proc.spec.limits.disk_bytes),
    }
}

fn measure(proc: &Proc, record: &Record) -> Measure {
    if !matches!(record.state.tier(), Some(Tier::Hot | Tier::Hibernated)) {
        return (Vec::new(), MemoryView::default(), None);
    }
    let pids = tree::inside(&proc.cgroup.pids().unwrap_or_default());
    let (rss_bytes, pss_bytes, kernel_swap) = tree::memory(&pids);
    let usage = proc.cgroup.usage().ok();
    let kernel_bytes = usage.as_ref().map_or(0, |u| u.kernel_bytes);
    let look = hibernate::look(proc);
    let back = look.installed + look.faults;
    let memory = MemoryView {
        rss_bytes,
        pss_bytes,
        kernel_bytes,
        swap_bytes: kernel_swap + look.swap_bytes,
        working_set_pages: look.set_pages,
        working_set_installed: look.installed,
        working_set_misses: look.faults,
        working_set_hit_percent: (!look.asleep && back > 0).then(|| look.installed as f64 * 100.0 / back as f64),
    };
    (pids, memory, usage.map(|u| u.cpu_ns / 1000))
}
