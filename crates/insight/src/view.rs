//! What people and programs see of a proc: `inspect`, `ps`, `top`. Reads, never changes anything.

use kip_clocks::Now;
use kip_clocks::tree;
use kip_engine::hibernate;
use kip_engine::host::Proc;
use kip_engine::host::measured::Measure;
use kip_records::state::Record;
use kip_supervisor::probe;
use kip_supervisor::task::{Handle, ProcStatus};
use kip_sys::clock::now_ms;
use kip_types::api::{FetchedView, MemoryView, MeterView, ProcView, WakeView};
use kip_types::lifecycle::Exit;
use kip_types::{Spec, State, StateName, Tier};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A measurement of a proc takes at most so long where all are asked for. One that takes longer
/// goes on by itself, and the proc is said not to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// The same where that proc alone is asked for.
const ALONE_WITHIN: Duration = Duration::from_secs(15);
/// Most threads that measure for one question.
const MOST_THREADS: usize = 256;
/// If no measurement has ended for so long more threads begin with those that are left.
const STUCK_AFTER: Duration = Duration::from_millis(100);

/// One proc.
#[derive(Debug)]
pub struct ProcNow {
    /// What it has used.
    pub meter: MeterView,
    /// What it would take more if it ran, bytes; 0 unless asleep.
    pub saved_bytes: u64,
    /// Its last sleep was refused, and it runs.
    pub refused: bool,
    /// Its wake waits for leave.
    pub waits: bool,
    /// What its files take and may take, bytes, where that is limited.
    pub disk: Option<(u64, u64)>,
}

/// What came from the store for its last wake.
fn fetched(proc: &Proc, wake: &WakeView) -> Option<FetchedView> {
    let archive = proc.shared.archive.as_ref().filter(|_| wake.from == Tier::Archived)?;
    archive.fetched(&proc.dir)
}

/// Measures all of them, each by whichever thread is free; none for one that does not answer.
fn measure_all(procs: Vec<(Arc<Proc>, Record)>, within: Duration) -> Vec<Option<Measure>> {
    let mut found = vec![None; procs.len()];
    let (sender, receiver) = channel();
    let left: Arc<Mutex<VecDeque<_>>> = Arc::new(Mutex::new(procs.into_iter().enumerate().collect()));
    let begin = || {
        let (left, sender) = (Arc::clone(&left), sender.clone());
        let next = move || left.lock().pop_front();
        let measure_next = move || {
            while let Some((index, (proc, record))) = next() {
                let measure = proc.measured.sample(within, || measure(&proc, &record));
                if sender.send((index, measure)).is_err() {
                    return;
                }
            }
        };
        // Without another thread those that are there do it, or what is left is said not to answer.
        if let Err(error) = std::thread::Builder::new().name("measure".to_owned()).spawn(measure_next) {
            tracing::warn!(%error, "no thread to measure procs");
        }
    };
    let mut threads = std::thread::available_parallelism().map_or(1, usize::from).min(found.len());
    (0..threads).for_each(|_| begin());
    let (mut missing, mut since) = (found.len(), Instant::now());
    while missing > 0 {
        match receiver.recv_timeout(STUCK_AFTER) {
            Ok((index, measure)) => {
                found[index] = measure;
                (missing, since) = (missing - 1, Instant::now());
            }
            Err(RecvTimeoutError::Timeout) if threads < MOST_THREADS && !left.lock().is_empty() => {
                // Twice as many each time, for each of them may be stuck.
                let more = threads.min(MOST_THREADS - threads).min(left.lock().len());
                (0..more).for_each(|_| begin());
                threads += more;
            }
            Err(_) if since.elapsed() > within => break,
            Err(_) => {}
        }
    }
    found
}

/// The proc as it is now.
pub fn proc_view(handle: &Handle) -> ProcView {
    let status = handle.status.borrow().clone();
    let found = measure_all(vec![(Arc::clone(&handle.proc), status.record.clone())], ALONE_WITHIN).pop().flatten();
    view_after(handle, status, found)
}

/// All of them as they are now, but that a hibernated one is not measured again in the same sleep.
pub fn proc_views(handles: &[Handle]) -> Vec<ProcView> {
    let mut wanted = Vec::new();
    let known: Vec<(ProcStatus, Option<Measure>)> = handles
        .iter()
        .map(|handle| {
            let status = handle.status.borrow().clone();
            let record = &status.record;
            let known = handle.proc.measured.in_sleep(record).or_else(|| (!has_memory(record)).then(Measure::default));
            if known.is_none() {
                wanted.push((Arc::clone(&handle.proc), record.clone()));
            }
            (status, known)
        })
        .collect();
    let mut found = measure_all(wanted, ANSWERS_WITHIN).into_iter();
    let view = |(handle, (status, known)): (&Handle, (ProcStatus, Option<Measure>))| match known {
        Some(measure) => view_of(handle, status, measure),
        None => view_after(handle, status, found.next().flatten()),
    };
    handles.iter().zip(known).map(view).collect()
}

/// After a measurement; none: it does not answer.
fn view_after(handle: &Handle, status: ProcStatus, found: Option<Measure>) -> ProcView {
    let measured = &handle.proc.measured;
    if let Some(measure) = &found {
        measured.keep(&status.record, measure);
    }
    let does_not_answer = found.is_none();
    ProcView { does_not_answer, ..view_of(handle, status, found.unwrap_or_else(|| measured.last())) }
}

fn view_of(handle: &Handle, status: ProcStatus, measure: Measure) -> ProcView {
    let Measure { pids, memory, cpu_us } = measure;
    let proc = &handle.proc;
    let record = &status.record;
    let next_timer_ms = status.next.map(|n| ((n.due_ns - Now::read().monotonic_ns).max(0) / 1_000_000) as u64);
    ProcView {
        name: proc.name.clone(),
        realm: proc.spec().realm.clone(),
        state: if status.starting { StateName::Starting } else { record.state.name() },
        tier: record.state.tier(),
        worker: proc.shared.name.clone(),
        generation: record.generation(),
        ports: record.ports.clone(),
        pids,
        memory,
        saved_bytes: saved_bytes(record, || meter_now(proc, record).held_bytes),
        does_not_answer: false,
        disk_bytes: proc.files.limited_bytes(),
        last_sleep: record.last_sleep.clone(),
        last_wake: record.last_wake.clone().map(|wake| WakeView { fetched: fetched(proc, &wake), ..wake }),
        exit: record.exit_words(),
        exit_code: record.exit().and_then(Exit::known_code),
        out_of_memory: record.exit().is_some() && record.out_of_memory,
        idle_ms: status.quiet_since.map(|since| since.elapsed().as_millis() as u64),
        next_timer_ms,
        cpu_us,
        wakes: record.wakes,
        restarts: record.restarts,
        started_at_ms: Some(record.started_at_ms).filter(|at_ms| *at_ms > 0),
        ready: record.ready,
        probes: probe::views(&proc.spec().probes, record),
        next_start_ms: match &record.state {
            State::Restarting { at_ms, .. } => Some(at_ms.saturating_sub(now_ms())),
            _ => None,
        },
        spec: Spec::clone(&proc.spec()),
    }
}

/// What it would take more if it ran; none unless it sleeps. `held` is what it holds in its tier.
fn saved_bytes(record: &Record, held: impl FnOnce() -> u64) -> Option<u64> {
    let had = || record.last_sleep.as_ref().and_then(|sleep| sleep.own_bytes);
    match record.state.tier()? {
        Tier::Hot => None,
        Tier::Hibernated => had().map(|had| had.saturating_sub(held())),
        Tier::Parked | Tier::Archived => had(),
    }
}

/// What it has used to this moment; a running one is measured.
pub fn meter_view(handle: &Handle, since_ms: Option<u64>) -> MeterView {
    let status = handle.status.borrow().clone();
    if let State::Hot { init, .. } = status.record.state {
        handle.proc.sample_meter(init);
    }
    handle.proc.meter.view_since(&handle.proc.name, &handle.proc.dir, status.record.state.name(), since_ms)
}

fn meter_now(proc: &Proc, record: &Record) -> MeterView {
    proc.meter.view_since(&proc.name, &proc.dir, record.state.name(), None)
}

/// What metrics tell of it, from memory alone.
pub fn proc_now(handle: &Handle) -> ProcNow {
    let status = handle.status.borrow();
    let record = &status.record;
    let meter = meter_now(&handle.proc, record);
    ProcNow {
        saved_bytes: saved_bytes(record, || meter.held_bytes).unwrap_or(0),
        meter,
        refused: matches!(record.state, State::Hot { .. }) && !record.cannot_sleep.is_empty(),
        waits: status.waits,
        disk: handle.proc.files.limited_bytes().zip(handle.proc.spec().limits.disk_bytes),
    }
}

fn has_memory(record: &Record) -> bool {
    matches!(record.state.tier(), Some(Tier::Hot | Tier::Hibernated))
}

fn measure(proc: &Proc, record: &Record) -> Measure {
    if !has_memory(record) {
        return Measure::default();
    }
    let pids = tree::inside(&proc.cgroup.pids().unwrap_or_default());
    let found = kip_sys::smaps::memory(&pids);
    let usage = proc.cgroup.usage().ok();
    let kernel_bytes = usage.as_ref().map_or(0, |u| u.kernel_bytes);
    let status = hibernate::memory_status(proc);
    let back = status.installed + status.faults;
    let memory = MemoryView {
        rss_bytes: found.resident,
        pss_bytes: found.proportional,
        kernel_bytes,
        swap_bytes: found.swapped + status.swap_bytes,
        working_set_pages: status.set_pages,
        working_set_installed: status.installed,
        working_set_misses: status.faults,
        working_set_hit_percent: (!status.asleep && back > 0).then(|| status.installed as f64 * 100.0 / back as f64),
    };
    Measure { pids, memory, cpu_us: usage.map(|u| u.cpu_ns / 1000) }
}
