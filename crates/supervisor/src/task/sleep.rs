//! Down and up: the transitions to and from parked.

use super::archive::FETCH_AGAIN;
use super::phase::{Parked, Phase, Running, Woke};
use super::still::{Copied, CopyRunning, StepsOf};
use super::{AFTER_TICKS, By, Task};
use kip_checkpoint::dump::DumpError;
use kip_clocks::tree::Tree;
use kip_clocks::{Due, Source};
use kip_engine::blocking::blocking;
use kip_engine::cause::WakeCause;
use kip_engine::hibernate;
use kip_engine::host::Proc;
use kip_engine::park::{self, ParkError};
use kip_engine::plans::{plan_parked, take_custody};
use kip_engine::volumes::sleep as volumes;
use kip_engine::wake::{self, Steps, WakeError};
use kip_journal::metrics::RefusalCause;
use kip_records::body::Body;
use kip_records::due::{self, Ticks};
use kip_records::record;
use kip_records::state::Record;
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_sys::smaps::MemoryUse;
use kip_types::api::{Code, EventKind, Refusal, SleepView, WakeView};
use kip_types::chain;
use kip_types::lifecycle::Input;
use kip_types::{Generation, Hibernate, State, Tier};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between the first and the second try of a wake.
pub(super) const SECOND_TRY_AFTER: Duration = Duration::from_millis(200);

/// How often a park is tried again because a process was about to end when it was to be frozen.
const TRIES_AT_AN_END: usize = 5;

/// How a park ended that has not failed.
enum Ended {
    Parked(Box<(park::ParkDone, MemoryUse)>),
    Copied(park::CopyDone),
}

/// What was done with one that stood still.
enum Done {
    Parked(Box<park::ParkDone>),
    Copied(park::CopyDone),
}

/// What is to be done about a wake that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// It waits for what the store does not give, or not yet.
    Store,
    /// What the store has is not what was stored.
    Damage,
    /// It may succeed at once, or never.
    Other,
}

/// A wake that failed.
#[derive(Debug)]
pub(super) struct Unwoken {
    pub(super) refusal: Refusal,
    pub(super) why: Why,
}

impl From<Refusal> for Unwoken {
    fn from(refusal: Refusal) -> Unwoken {
        Unwoken { refusal, why: Why::Other }
    }
}

impl From<Unwoken> for Refusal {
    fn from(unwoken: Unwoken) -> Refusal {
        unwoken.refusal
    }
}

impl Task {
    pub(super) async fn park_on_request(&mut self, by: By) -> Result<bool, Refusal> {
        // A client may have woken it a moment ago: that wake is counted and reported before.
        self.inspect_pager(WakeCause::Touch).await;
        if matches!(self.record.state, State::Parked { .. }) {
            return Ok(true);
        }
        self.refuse_if_in_use(Tier::Parked).await?;
        let (_, ticks) = self.ticks_if_parked(by).await;
        self.park_by(ticks, by).await.map(|()| false)
    }

    /// Parks it by Kip's own word.
    pub(super) async fn park(&mut self, ticks: Ticks) -> Result<(), Refusal> {
        self.park_by(ticks, By::Kip).await
    }

    pub(super) async fn park_by(&mut self, ticks: Ticks, by: By) -> Result<(), Refusal> {
        self.park_or_copy(ticks, by, None).await.map(drop)
    }

    /// Parks it; or, with `copy`, has that done with it while it stands still and runs on. None if
    /// it was parked, or cannot be copied so.
    pub(super) async fn park_or_copy(
        &mut self,
        ticks: Ticks,
        by: By,
        mut copy: Option<CopyRunning>,
    ) -> Result<Option<Copied>, Refusal> {
        let once = match by {
            By::Owner(clock) => Some(clock),
            By::Kip => None,
        };
        self.before_sleep(Tier::Parked).await?;
        let machine = Arc::clone(&self.proc.shared);
        let _it_stays = machine.pager_stays.read().await;
        let begin = Instant::now();
        if let State::Hot { init, .. } | State::Hibernated { init, .. } = self.record.state {
            self.proc.sample_meter(init);
        }
        self.proc.meter.engine_at_work();
        self.record.ticks = ticks;
        self.advance(Input::Park, record::Durability::Rename)?;
        // Its sets are at the pager until it is parked.
        self.leave_hibernation();
        if copy.is_none() {
            self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Parking, "");
        }
        fault::reach("park-intent");
        let State::Parking { init, generation, .. } = self.record.state else { unreachable!("just recorded") };
        let parked = self.record.after(Input::Recorded).expect("Parking is followed by Parked");
        let proc = Arc::clone(&self.proc);
        let next = parked.clone();
        let result = blocking(move || -> Result<_, ParkError> {
            // What is out stays out: it is taken over from where it lies.
            let out = proc.shared.pager.prepare_parking(proc.key.as_str())?;
            let pids = || proc.cgroup.pids().map_err(|e| ParkError::Tree(std::io::Error::other(e)));
            // Of one that is copied nothing says how much it takes asleep.
            let counted = || pids().map(|pids| kip_sys::smaps::memory(&Tree::read(&pids).pids));
            let mut memory = if copy.is_none() { counted()? } else { MemoryUse::default() };
            let mut record = || proc.write_record(&next, record::Durability::Fsync);
            let mut attempt = |there: &[u32], out| match &mut copy {
                None => park::park(&proc, there, generation, out, once, &mut record).map(Box::new).map(Done::Parked),
                Some(copy) => {
                    let mut steps = StepsOf { copy, record: &next };
                    park::copy(&proc, there, generation, out, &mut steps).map(Done::Copied)
                }
            };
            let mut there = pids()?;
            let mut done = attempt(&there, out);
            for _ in 0..TRIES_AT_AN_END {
                let now = pids()?;
                let one_ended = there.iter().any(|pid| !now.contains(pid));
                if !done.as_ref().is_err_and(|e| e.is_about_an_end(one_ended)) {
                    break;
                }
                there = now;
                done = attempt(&there, out);
            }
            if let Err(e) = &done
                && e.is_about_paged_out()
            {
                tracing::info!(proc = %proc.name, error = chain(e), "all its memory is brought back before it is parked");
                proc.shared.pager.restore(proc.key.as_str())?;
                done = attempt(&pids()?, false);
            }
            let done = match done? {
                Done::Parked(done) => done,
                Done::Copied(done) => return Ok(Ended::Copied(done)),
            };
            // Of one that was hibernated most is out.
            memory.proportional = memory.proportional.max(done.image_bytes);
            memory.own = memory.own.max(done.image_bytes);
            Ok(Ended::Parked(Box::new((*done, memory))))
        })
        .await;
        match result {
            Ok(Ended::Parked(parked_with)) => {
                fault::reach("park-killed");
                self.record = parked;
                let (done, memory) = *parked_with;
                self.finish_park(done, memory, begin).await;
                Ok(None)
            }
            Ok(Ended::Copied(copied)) => {
                self.runs_on(init);
                Ok(Some(Copied { record: parked, still: copied.still, runs: None }))
            }
            Err(error @ (ParkError::Hold(_) | ParkError::Held(_))) => {
                self.runs_on(init);
                tracing::info!(proc = %self.proc.name, error = chain(&error), "it stands still to be copied");
                Ok(None)
            }
            Err(e @ ParkError::Copy(_)) => {
                self.runs_on(init);
                Err(Refusal::new(Code::Failed, format!("{} cannot be copied: {}", self.proc.name, chain(&e))))
            }
            Err(e) => {
                let causes = causes_of(&e);
                self.proc.shared.metrics.refused(Tier::Parked, cause_of(&e));
                self.cannot_sleep(causes.clone());
                self.runs_on(init);
                let message = format!("{} cannot sleep: {}", self.proc.name, causes.join("; "));
                self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refused, message.clone());
                Err(Refusal::new(Code::CannotSleep, message))
            }
        }
    }

    /// It was not parked.
    fn runs_on(&mut self, init: u32) {
        self.record_outcome(Input::ParkRefused);
        if self.phase.running().is_none() {
            self.begin_running(init, Tier::Hot, Woke::Called);
        }
    }

    /// Keeps what stood in the way of a sleep, until the next.
    pub(super) fn cannot_sleep(&mut self, causes: Vec<String>) {
        self.record.cannot_sleep = causes;
        self.record.refused_at_ms = Some(now_ms());
    }

    async fn finish_park(&mut self, done: park::ParkDone, memory: MemoryUse, begin: Instant) {
        let proc = Arc::clone(&self.proc);
        let generation = self.record.generation();
        self.phase = Phase::Down;
        let mut done = blocking(move || {
            take_custody(&proc, &done.body);
            fault::reach("park-custody");
            plan_parked(&proc, generation, &done.images, &done.pages, &done.body);
            let gone = proc.wait_until_empty(Duration::from_secs(5));
            if gone {
                hibernate::forget(&proc);
                proc.forget_cached_files();
            } else {
                tracing::warn!(proc = %proc.name, "processes of a parked proc are still there after 5 s");
            }
            if let Err(e) = kip_snapshot::sweep(&proc.dir, Some(generation)) {
                tracing::warn!(proc = %proc.name, error = chain(&e), "an old generation is left on disk");
            }
            proc.sample_cpu();
            proc.meter.level(kip_snapshot::bytes_of(&kip_snapshot::path_of(&proc.dir, generation)));
            done
        })
        .await;
        done.body
            .inotify
            .iter_mut()
            .for_each(|instance| kip_engine::inotify::ignore_end_of_processes(instance, &self.proc));
        let view = SleepView {
            to: Tier::Parked,
            frozen_us: done.frozen_us,
            total_us: begin.elapsed().as_micros() as u64,
            bytes_written: done.bytes,
            memory_bytes: Some(memory.proportional),
            own_bytes: Some(memory.own),
            left_bytes: BTreeMap::new(),
            held: false,
            suspended: done.body.suspended.clone(),
            cause: self.pressed.sleep_cause.take(),
            at_ms: now_ms(),
        };
        self.proc.shared.metrics.slept(Tier::Parked, view.total_us);
        let detail = format!("frozen {} us, {} bytes", view.frozen_us, view.bytes_written);
        let next =
            Record { last_sleep: Some(view), cannot_sleep: Vec::new(), stays_parked: None, ..self.record.clone() };
        self.keep(next);
        self.hidden_ticks |= has_hidden_ticks(&done.body, self.proc.spec().timing.tick_ms);
        self.begin_sleeping(&done.body);
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Parked, detail);
    }

    /// Wakes it by request; whether it slept.
    ///
    /// # Errors
    /// It cannot be woken.
    pub async fn wake_on_request(&mut self, cause: WakeCause) -> Result<bool, Refusal> {
        self.refuse_if_elsewhere()?;
        match self.record.state {
            State::Hot { .. } => {
                if let Some(running) = self.phase.running_mut() {
                    running.idle.touch(Instant::now());
                    if running.woke == Woke::ForTicks {
                        running.woke = Woke::Called;
                    }
                }
                Ok(true)
            }
            State::Hibernated { .. } => self.rouse(cause, Instant::now(), false).await.map(|()| false),
            State::Parked { .. } => {
                let at = Instant::now();
                match self.wake(cause, at, false).await {
                    Err(_) if self.drop_damaged_copy().await => {
                        self.fetch().await?;
                        self.wake(cause, at, false).await?;
                    }
                    woken => woken?,
                }
                Ok(false)
            }
            State::Archived { .. } => {
                let at = Instant::now();
                self.fetch().await?;
                self.wake(cause, at, false).await?;
                Ok(false)
            }
            _ => Err(Refusal::new(
                Code::State,
                format!("{} cannot be woken: it is {}", self.proc.name, self.record.state.name()),
            )),
        }
    }

    /// The same generation again after a failure, then a cold start on the newest files
    /// (ARCHITECTURE.md, Invariants). Of a store that does not give what is needed it only waits:
    /// its generation is as good as it was.
    pub(super) async fn wake_retrying(&mut self, cause: WakeCause, at: Instant, tick: bool) {
        match self.wake(cause, at, tick).await {
            Ok(()) | Err(Unwoken { why: Why::Store, .. }) => return,
            Err(_) => {}
        }
        if self.drop_damaged_copy().await {
            if !self.fetch_or_fall_back().await {
                return;
            }
        } else {
            // What was missing for a moment, a helper or the launcher, may be there again.
            tokio::time::sleep(SECOND_TRY_AFTER).await;
        }
        let Unwoken { refusal, why } = match self.wake(cause, at, tick).await {
            Ok(()) | Err(Unwoken { why: Why::Store, .. }) => return,
            Err(unwoken) => unwoken,
        };
        // What is not in a store that is not there may be in it.
        let waits = why == Why::Damage && !self.is_in_store().await;
        if waits || lacks_volumes(Arc::clone(&self.proc), self.record.generation()).await {
            // Volumes it would lack as well if it began anew.
            return self.listen_later();
        }
        if kip_copy::fill::is_unfinished(&self.proc.dir) {
            // A clone that does not go on from its source is none, which its command says.
            return self.listen_later();
        }
        self.fall_back(&refusal.message).await;
    }

    /// A page that it waits for is damaged in its snapshot: it cannot go on.
    pub(super) async fn on_damaged(&mut self, message: String) {
        if matches!(self.record.state, State::Hot { .. } | State::Hibernated { .. }) {
            self.fall_back(&message).await;
        }
    }

    pub(super) async fn wake(&mut self, cause: WakeCause, at: Instant, tick: bool) -> Result<(), Unwoken> {
        let mut steps = Steps::since(at);
        if self.pressed.grant.as_ref().is_some_and(|g| g.was_queued) {
            steps.done("queue");
        }
        let fetched = self.phase.parked().is_some_and(|parked| parked.fetched);
        if fetched {
            steps.done("fetch");
        }
        self.begin_waking()?;
        let trigger = cause.with_thread(self.phase.parked().and_then(|parked| parked.at_work.as_ref()));
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Waking, trigger.clone());
        fault::reach("wake-intent");
        self.overtake_storing();
        kip_engine::watches::unwatch_sockets(&self.proc);
        let State::Waking { generation } = self.record.state else { unreachable!("just recorded") };
        let slept = std::mem::take(self.phase.parked_mut());
        steps.done("decide");
        if let Some(archive) = self.proc.shared.archive.as_ref().filter(|_| fetched) {
            archive.fetch_alongside(kip_snapshot::path_of(&self.proc.dir, generation));
        }
        let proc = Arc::clone(&self.proc);
        let machine = Arc::clone(&proc.shared);
        let it_stays = machine.pager_stays.read().await;
        let (result, steps) = blocking(move || {
            let result = wake::wake(&proc, generation, cause, &mut steps);
            (result, steps)
        })
        .await;
        drop(it_stays);
        match result {
            Ok(init) => {
                let (total_us, steps) = steps.finish();
                let init_started = kip_sys::process::start_time(init).unwrap_or(0);
                let mut next = self.record.after(Input::Woken { init, init_started }).expect("Waking");
                let from = if fetched { Tier::Archived } else { Tier::Parked };
                let view = WakeView { trigger: trigger.clone(), from, total_us, steps, at_ms: now_ms(), fetched: None };
                self.count_wake(cause, &view);
                next.last_wake = Some(view);
                next.tick_wakes = if tick { next.tick_wakes.saturating_add(1) } else { 0 };
                next.wakes += 1;
                (next.wakes_again, next.stays_parked) = (false, None);
                self.keep(next);
                fault::reach("wake-recorded");
                if let Some(archive) = self.proc.shared.archive.as_ref().filter(|_| fetched) {
                    archive.fetch_in_background(kip_snapshot::path_of(&self.proc.dir, generation));
                }
                self.begin_running(init, Tier::Parked, if tick { Woke::ForTicks } else { Woke::Called });
                self.proc.shared.events.emit(
                    Some(&self.proc.name),
                    EventKind::Woken,
                    format!("{trigger}, {total_us} us"),
                );
                self.after_wake(if fetched { Tier::Archived } else { Tier::Parked }, cause);
                Ok(())
            }
            Err(e) => {
                self.record_outcome(Input::WakeFailed);
                self.phase = Phase::Parked(Parked { fetched: false, listens_again: None, ..slept });
                let message = self.wake_failure(&e);
                self.count_failed_wake(if fetched { Tier::Archived } else { Tier::Parked }, &message);
                self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refused, message.clone());
                let manifest = kip_snapshot::open::<Body>(&kip_snapshot::path_of(&self.proc.dir, generation));
                match manifest {
                    Ok(manifest) if !e.is_the_stores() && !cause.is_files() => {
                        kip_engine::watches::watch_sockets(&self.proc, &manifest.body)
                    }
                    // A client that waits for the proc is not to cause one try after the other
                    // without a pause.
                    _ => self.phase.parked_mut().wait_until(Instant::now() + FETCH_AGAIN),
                }
                self.proc.fd_store.pack();
                let why = match &e {
                    e if e.is_the_stores() => Why::Store,
                    WakeError::Fetch(e) if e.is_missing() => Why::Damage,
                    _ => Why::Other,
                };
                Err(Unwoken { refusal: Refusal::new(Code::Failed, message), why })
            }
        }
    }

    /// In memory only, for the record says enough: the next daemon finds the processes of a parked
    /// proc as it finds those of one that was being woken. To write it would make every wake wait
    /// for the disk, for where the file system allocates late a rename over a file writes that out.
    fn begin_waking(&mut self) -> Result<(), Refusal> {
        self.record = self.record.after(Input::Wake).map_err(|e| self.unfit(&e))?;
        self.publish();
        Ok(())
    }

    /// Its sockets and timers have to wait a moment.
    pub(super) fn listen_later(&mut self) {
        kip_engine::watches::unwatch_sockets(&self.proc);
        self.phase.parked_mut().wait_until(Instant::now() + FETCH_AGAIN);
    }

    /// Its sockets and timers may wake it again.
    pub(super) fn listen_again(&mut self) {
        self.phase.parked_mut().listens_again = None;
        match self.record.state {
            State::Archived { .. } => self.resume_archived(),
            State::Parked { generation } => {
                match kip_snapshot::open::<Body>(&kip_snapshot::path_of(&self.proc.dir, generation)) {
                    Ok(manifest) => self.begin_sleeping(&manifest.body),
                    // The owner may put the generation right.
                    Err(_) => self.phase.parked_mut().wait_until(Instant::now() + FETCH_AGAIN),
                }
            }
            _ => {}
        }
    }

    fn wake_failure(&self, e: &WakeError) -> String {
        let name = &self.proc.name;
        if e.is_the_stores() {
            return format!("{name} cannot be woken: {}; it stays parked", chain(e));
        }
        format!(
            "{name} cannot be woken: {}; its snapshot is kept, `kip stop {name}` and `kip start {name}` start it cold on its newest files",
            chain(e)
        )
    }
}

/// Whether it ticks by timers that cannot be seen while it runs, only in images.
fn has_hidden_ticks(body: &Body, tick_ms: u64) -> bool {
    let hidden = |due: &&Due| matches!(due.source, Source::Posix | Source::Interval);
    let dues: Vec<Due> = body.clocks.dues.iter().filter(hidden).copied().collect();
    due::ticks(&dues, body.clocks.frozen_ns, tick_ms)
}

/// Whether a volume of a parked proc is not there.
async fn lacks_volumes(proc: Arc<Proc>, generation: Generation) -> bool {
    blocking(move || {
        let manifest = kip_snapshot::open::<Body>(&kip_snapshot::path_of(&proc.dir, generation));
        let mounted = manifest.map(|manifest| volumes::for_wake(&proc, generation, &manifest.body.volumes));
        mounted.is_ok_and(|mounted| mounted.is_err_and(|e| e.is_absence()))
    })
    .await
}

/// Where a running proc goes next, and how long it must be quiet for that.
pub(super) fn sinks(proc: &Proc, running: &Running, ticks: Ticks) -> (Tier, Duration) {
    let timing = &proc.spec().timing;
    let for_ticks = running.woke == Woke::ForTicks;
    let back = for_ticks && running.from == Tier::Parked && ticks == Ticks::Gathered;
    let hibernates = timing.hibernate != Hibernate::Off && timing.park_after_ms > 0 && !running.no_hibernation;
    // Its threads run while it ticks in place, and a connection that brings nothing has touched it:
    // no more of that.
    let touched = matches!(running.woke, Woke::Touch { without_data: true, .. }) && hibernate::wakes_on_data(proc);
    let (to, after) = if hibernates && !back && !touched {
        (Tier::Hibernated, timing.idle_ms)
    } else {
        (Tier::Parked, timing.idle_ms.saturating_add(timing.park_after_ms))
    };
    let after = Duration::from_millis(after);
    (to, if for_ticks { after.min(AFTER_TICKS) } else { after })
}

fn cause_of(e: &ParkError) -> RefusalCause {
    match e {
        // Otherwise not the proc stands in the way.
        ParkError::Dump(DumpError::Refused { no_room: false, .. }) => RefusalCause::Criu,
        ParkError::WithoutFirstThread { .. } | ParkError::NoWayBack { .. } => RefusalCause::Criu,
        _ => RefusalCause::Snapshot,
    }
}

fn causes_of(e: &ParkError) -> Vec<String> {
    match e {
        ParkError::Dump(DumpError::Refused { causes, .. }) => causes.clone(),
        other => vec![chain(other)],
    }
}
