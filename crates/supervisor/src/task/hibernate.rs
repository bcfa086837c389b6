//! Down and up between running and hibernated.

use super::phase::{Phase, Woke};
use super::ticks::sample;
use super::{Task, Traffic, watched};
use crate::idle::{Idle, Sample};
use kip_clocks::Now;
use kip_engine::blocking::blocking;
use kip_engine::cause::WakeCause;
use kip_engine::hibernate::{self, Done};
use kip_engine::page_out;
use kip_engine::wake::Steps;
use kip_journal::metrics::RefusalCause;
use kip_pager::client::PagerError;
use kip_pager::protocol::Woken;
use kip_pressure::{Grant, SetsInMemory};
use kip_records::due::{self, NextWake, Ticks};
use kip_records::state::Record;
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::{Code, EventKind, Refusal, SleepView, StepView, WakeView};
use kip_types::chain;
use kip_types::lifecycle::Input;
use kip_types::{State, Tier};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;

/// The machine is the program's for so long after a wake by the pager.
const AFTER_WAKE: Duration = Duration::from_millis(2);
/// Bytes of a page.
const PAGE: u64 = 4096;
/// A use that is over has ended after this.
const LET_GO_WITHIN: Duration = Duration::from_millis(300);
/// A wake from hibernation is taken to need this long ahead of a timer.
const LEAD: Duration = Duration::from_millis(3);

/// A sleep that begins less than this before a wait ends may be in its way: the program stands
/// still for most of it, longer on a busy machine.
pub(super) const BEFORE_DUE: Duration = Duration::from_secs(2);
/// After the end of the wait the program is awake, unless nothing came of it.
pub(super) const AFTER_DUE: Duration = Duration::from_secs(1);

/// After how long a proc is parked that is to be parked after `park_in`, and whose first wait ends
/// after `due_in`.
fn not_just_before(due_in: Option<Duration>, park_in: Duration) -> Duration {
    match due_in {
        Some(due_in) if (park_in..park_in + BEFORE_DUE).contains(&due_in) => due_in + AFTER_DUE,
        _ => park_in,
    }
}

/// Memory that a hibernated proc takes, bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Asleep {
    /// What is left of its own.
    pub there_bytes: u64,
    /// Its working sets at the pager.
    pub set_bytes: u64,
}

/// A hibernated proc.
#[derive(Debug)]
pub(super) struct Hibernating {
    /// None if it has ended already.
    pub(super) pidfd: Option<AsyncFd<OwnedFd>>,
    /// The next timer that it has to be woken for; only if it is held.
    pub(super) next: Option<NextWake>,
    /// When it is parked.
    pub(super) parks_at: Option<Instant>,
    /// What is left of its memory, bytes.
    there_bytes: u64,
    /// What the pager keeps in memory.
    sets: SetsInMemory,
    /// Taken up by a new daemon: its threads are held.
    held: bool,
    /// It ticks in place: what it has been doing meanwhile.
    pub(super) ticks: Option<Idle<Traffic>>,
    /// The thread that ticked when it fell asleep.
    pub(super) ticker: Option<String>,
    /// What the pager watches for one that is held.
    at_pager: Vec<WakeCause>,
    /// Its counters when it fell asleep.
    before: Sample<Traffic>,
    /// Held, it is being woken for this, with leave.
    pub(super) roused: Option<(WakeCause, Grant)>,
}

impl Task {
    pub(super) async fn hibernate_on_request(&mut self) -> Result<bool, Refusal> {
        // It may have woken a moment ago, of which we are still to hear.
        self.inspect_pager(WakeCause::Touch).await;
        if matches!(self.record.state, State::Hibernated { .. }) {
            return Ok(true);
        }
        self.refuse_if_in_use(Tier::Hibernated).await?;
        if !matches!(self.record.state, State::Hot { .. }) {
            return Err(Refusal::new(
                Code::State,
                format!("{} cannot hibernate: it is {}", self.proc.name, self.record.state.name()),
            ));
        }
        self.hibernate().await.map(|()| false)
    }

    pub(super) async fn hibernate(&mut self) -> Result<(), Refusal> {
        self.before_sleep(Tier::Hibernated).await?;
        let machine = Arc::clone(&self.proc.shared);
        let _it_stays = machine.pager_stays.read().await;
        let begin = Instant::now();
        let State::Hot { init, .. } = self.record.state else {
            return Err(Refusal::new(Code::State, format!("{} is {}", self.proc.name, self.record.state.name())));
        };
        self.note_ticks();
        let before = sample(&self.proc, init);
        fault::reach("hibernate-begin");
        let proc = Arc::clone(&self.proc);
        let (turn, known) = (now_ms(), self.known_ticks());
        let done = blocking(move || hibernate::hibernate(&proc, turn, known)).await;
        fault::reach("hibernate-out");
        match done {
            Ok(done) => {
                self.turn = Some(turn);
                let finished = self.finish_hibernate(done, init, before, begin);
                // A task that waits for the pager to be free looks which procs are hibernated.
                self.publish();
                finished
            }
            Err(e) => {
                let mut cause = chain(&e);
                let kind = if matches!(e, PagerError::Refused(_)) { RefusalCause::Memory } else { RefusalCause::Pager };
                self.proc.shared.metrics.refused(Tier::Hibernated, kind);
                if let PagerError::Refused(_) = e {
                    let proc = Arc::clone(&self.proc);
                    let paged_out = blocking(move || page_out::page_out(&proc.cgroup.pids().unwrap_or_default())).await;
                    cause = format!("{cause}; {paged_out}");
                }
                let message = format!("{} cannot hibernate: {cause}", self.proc.name);
                self.cannot_sleep(vec![cause]);
                self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refused, message.clone());
                if let Some(running) = self.phase.running_mut() {
                    running.no_hibernation = true;
                }
                Err(Refusal::new(Code::CannotSleep, message))
            }
        }
    }

    fn finish_hibernate(
        &mut self,
        done: Done,
        init: u32,
        before: Sample<Traffic>,
        begin: Instant,
    ) -> Result<(), Refusal> {
        let Done { report, memory, there_bytes, held, ticks, ticker, first_due_ns } = done;
        let view = SleepView {
            to: Tier::Hibernated,
            frozen_us: report.frozen_us,
            total_us: begin.elapsed().as_micros() as u64,
            bytes_written: report.written_bytes,
            memory_bytes: Some(memory.proportional),
            own_bytes: Some(memory.own),
            left_bytes: report.left.clone(),
            held: held.is_some(),
            suspended: None,
            cause: self.pressed.sleep_cause.take(),
            at_ms: now_ms(),
        };
        self.proc.shared.metrics.slept(Tier::Hibernated, view.total_us);
        let detail = format!("frozen {} us, {} bytes written", view.frozen_us, view.bytes_written);
        let next = self.record.after(Input::Hibernated).map_err(|e| self.unfit(&e))?;
        self.keep(Record { last_sleep: Some(view), cannot_sleep: Vec::new(), ..next });
        self.proc.meter.level(there_bytes.saturating_add(report.set_bytes));
        fault::reach("hibernate-recorded");
        let timing = &self.proc.spec().timing;
        let mut next = None;
        if let Some(held) = &held {
            next = due::next_wake(&held.clocks, timing.tick_ms, Ticks::OnTime, 0, LEAD.as_nanos() as i64);
            kip_engine::watches::watch_held(&self.proc, &held.sockets);
        }
        let seen_due = self.phase.running_mut().and_then(|running| running.first_due);
        self.begin_hibernating(init, next, Asleep { there_bytes, set_bytes: report.set_bytes }, ticks, before);
        if let Some(hibernating) = self.phase.hibernated_mut() {
            hibernating.ticker = ticker;
            hibernating.at_pager = held.map(|held| held.at_pager).unwrap_or_default();
            let now_ns = Now::read().monotonic_ns;
            let due_in = first_due_ns.map(|ns| Duration::from_nanos(ns.saturating_sub(now_ns).max(0) as u64));
            let now = Instant::now();
            let seen_in = seen_due.filter(|at| *at > now).map(|at| at.saturating_duration_since(now));
            let due_in = due_in.into_iter().chain(seen_in).min();
            hibernating.parks_at =
                hibernating.parks_at.map(|at| now + not_just_before(due_in, at.saturating_duration_since(now)));
        }
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Hibernated, detail);
        Ok(())
    }

    /// As it is found: blocked.
    fn begin_hibernated(&mut self, init: u32) {
        // What the pager keeps for it is told when it is asked.
        let asleep = Asleep { there_bytes: self.proc.cgroup.held_bytes(), set_bytes: 0 };
        let before = sample(&self.proc, init);
        self.begin_hibernating(init, None, asleep, false, before);
    }

    fn begin_hibernating(
        &mut self,
        init: u32,
        next: Option<NextWake>,
        asleep: Asleep,
        ticks: bool,
        before: Sample<Traffic>,
    ) {
        let pidfd = kip_sys::process::pidfd_open(init).and_then(watched).ok();
        let timing = &self.proc.spec().timing;
        let parks_at = (!timing.stays_awake()).then(|| Instant::now() + Duration::from_millis(timing.park_after_ms));
        let sets = self.proc.shared.pressure.keep_sets(asleep.set_bytes);
        let there_bytes = asleep.there_bytes;
        let idle = ticks.then(|| Idle::asleep(Instant::now(), before.clone()));
        self.phase = Phase::Hibernated(Box::new(Hibernating {
            pidfd,
            next,
            parks_at,
            there_bytes,
            sets,
            held: false,
            ticks: idle,
            ticker: None,
            at_pager: Vec::new(),
            before,
            roused: None,
        }));
    }

    /// What it takes while it is hibernated.
    pub(super) fn asleep(&self) -> Asleep {
        let takes = |h: &Hibernating| Asleep { there_bytes: h.there_bytes, set_bytes: h.sets.bytes };
        self.phase.hibernated().map(takes).unwrap_or_default()
    }

    /// Nothing is watched for it any more; it is about to run, or to end.
    pub(super) fn leave_hibernation(&mut self) -> Option<Box<Hibernating>> {
        if !matches!(self.phase, Phase::Hibernated(_)) {
            return None;
        }
        kip_engine::watches::unwatch_sockets(&self.proc);
        match std::mem::take(&mut self.phase) {
            Phase::Hibernated(left) => Some(left),
            _ => unreachable!("just seen"),
        }
    }

    /// Wakes a hibernated proc.
    pub(super) async fn rouse(&mut self, cause: WakeCause, at: Instant, tick: bool) -> Result<(), Refusal> {
        let mut steps = Steps::since(at);
        if self.pressed.grant.as_ref().is_some_and(|g| g.was_queued) {
            steps.done("queue");
        }
        let left = self.leave_hibernation();
        let woke = if tick { Woke::ForTicks } else { Woke::Called };
        steps.done("decide");
        let proc = Arc::clone(&self.proc);
        let woken = blocking(move || proc.shared.pager.wake(proc.key.as_str(), cause.purpose())).await;
        match woken {
            Ok(woken) => {
                steps.done_with("install", woken.install_us);
                steps.done("resume");
                self.finish_rouse(cause, steps, woke);
                Ok(())
            }
            // It is not known there: nothing is out.
            Err(PagerError::Refused(_)) => {
                self.finish_rouse(cause, steps, woke);
                Ok(())
            }
            Err(e) => {
                // The task that replaces the pager looks after this proc.
                self.phase = left.map_or(Phase::Down, Phase::Hibernated);
                let message = format!("{} cannot be woken: {}", self.proc.name, chain(&e));
                self.count_failed_wake(Tier::Hibernated, &message);
                Err(Refusal::new(Code::Failed, message))
            }
        }
    }

    fn finish_rouse(&mut self, cause: WakeCause, steps: Steps, woke: Woke) {
        let (total_us, steps) = steps.finish();
        self.awake(cause, total_us, steps, woke);
    }

    /// It runs again, with part of its memory.
    fn awake(&mut self, cause: WakeCause, total_us: u64, steps: Vec<StepView>, woke: Woke) {
        let State::Hibernated { init, init_started, .. } = self.record.state else { return };
        // One that has ended by now was still hibernated, and its end is found as that of any
        // other.
        let Ok(pidfd) = kip_sys::process::pidfd_open(init).and_then(watched) else {
            return self.begin_hibernated(init);
        };
        let Ok(mut next) = self.record.after(Input::Woken { init, init_started }) else { return };
        let at_ms = now_ms();
        let from = Tier::Hibernated;
        self.proc.sample_cpu();
        self.proc.meter.enter(Some(Tier::Hot));
        let view = WakeView { trigger: cause.to_string(), from, total_us, steps, at_ms, fetched: None };
        self.count_wake(cause, &view);
        next.last_wake = Some(view);
        next.tick_wakes = if woke == Woke::ForTicks { next.tick_wakes.saturating_add(1) } else { 0 };
        next.wakes += 1;
        self.leave_hibernation();
        // A client may have its answer already: what others see comes before what is on disk.
        self.record = next.clone();
        self.run_on(pidfd, Tier::Hibernated, woke);
        self.keep(next);
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Woken, format!("{cause}, {total_us} us"));
        self.after_wake(Tier::Hibernated, cause);
    }

    /// The pager says that a blocked proc has touched what was out, or that a held one runs: for
    /// one of its sockets that the pager watches (`by`), or roused by the wake plane.
    pub(super) async fn on_awake(&mut self, turn: u64, woken: Woken, by: Option<usize>) {
        let State::Hibernated { init, .. } = self.record.state else { return };
        if self.turn.is_some_and(|own| own != turn) {
            return;
        }
        let step = |name: &str, us| StepView { name: name.to_owned(), us };
        let install = step("install", woken.install_us);
        let left = self.leave_hibernation();
        let before = left.as_ref().map(|h| (h.before.clone(), h.ticks.is_some()));
        let by = by.map(|place| {
            let known = left.as_ref().and_then(|h| h.at_pager.get(place));
            known.copied().unwrap_or(WakeCause::SomeDescriptor)
        });
        let (roused, _leave) = left.and_then(|h| h.roused).unzip();
        if roused.is_none() {
            self.proc.shared.pressure.count(woken.pages.saturating_mul(PAGE));
        }
        let cause = by.or(roused).unwrap_or(WakeCause::Touch);
        let by_itself = cause == WakeCause::Touch;
        let resume = step("resume", woken.total_us.saturating_sub(woken.install_us));
        // It serves its client now; what others see of it and what is on disk can wait, for both
        // ask the pager in doubt.
        tokio::time::sleep(AFTER_WAKE).await;
        let steps = if by_itself { vec![install] } else { vec![install, resume] };
        // What touched it may have been a packet's.
        let now = sample(&self.proc, init).traffic;
        let packets = before.as_ref().and_then(|(before, _)| Some((before.traffic?, now?)));
        let for_data = packets.is_some_and(|(before, now)| kip_net::activity::activity_between(&before, &now));
        let for_a_packet = packets.is_some_and(|(before, now)| now.has_received_since(&before));
        let ticked = before.is_some_and(|(_, ticked)| ticked);
        let woke = match by_itself {
            true => {
                let by_a_tick = if ticked { woken.long_tick } else { !for_a_packet };
                Woke::Touch { without_data: !for_data, by_a_tick }
            }
            false => Woke::Called,
        };
        self.awake(cause, woken.total_us, steps, woke);
    }

    /// Taken up by a new daemon. What was watched for one that is held is not known any more: it is
    /// parked at once, which does not wake it, and then its sockets and timers are.
    pub(super) async fn resume_hibernated(&mut self, init: u32) {
        self.begin_hibernated(init);
        self.inspect_pager(WakeCause::PagerReplaced).await;
        if let Some(hibernating) = self.phase.hibernated_mut().filter(|hibernating| hibernating.held) {
            hibernating.parks_at = Some(Instant::now());
        }
    }

    /// The pager was replaced, or has not been heard for a while: is the proc still asleep? If not,
    /// and no part of the daemon has roused it, `cause` did.
    pub(super) async fn inspect_pager(&mut self, cause: WakeCause) {
        if !matches!(self.record.state, State::Hibernated { .. }) {
            return;
        }
        let proc = Arc::clone(&self.proc);
        let Ok(status) = blocking(move || proc.shared.pager.inspect(proc.key.as_str())).await else { return };
        let Some(hibernating) = self.phase.hibernated_mut() else { return };
        if status.asleep {
            hibernating.sets = self.proc.shared.pressure.keep_sets(status.set_bytes);
            hibernating.held = status.held;
            if status.ticks && hibernating.ticks.is_none() {
                hibernating.ticks = Some(Idle::new(Instant::now()));
            }
            self.proc.meter.level(hibernating.there_bytes.saturating_add(status.set_bytes));
        } else {
            let roused = hibernating.roused.take().map(|(cause, _)| cause);
            self.awake(roused.unwrap_or(cause), 0, Vec::new(), Woke::Called);
        }
    }

    pub(super) async fn refuse_if_in_use(&mut self, to: Tier) -> Result<(), Refusal> {
        // What a client has just typed, or a program of `kip exec` that has just ended for its
        // client, lets go in a moment.
        let began = Instant::now();
        while self.tickets.load(Ordering::SeqCst) > 0 && self.starting.is_none() && began.elapsed() < LET_GO_WITHIN {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let tickets = self.tickets.load(Ordering::SeqCst);
        if tickets == 0 {
            return Ok(());
        }
        let (cause, why) = if self.starting.is_some() {
            (RefusalCause::Starting, "it is not ready yet; `kip wait --ready` waits for that")
        } else if self.hooking.load(Ordering::SeqCst) >= tickets {
            (RefusalCause::Hook, "its own command after the wake still runs")
        } else {
            (RefusalCause::Exec, "a program runs in it by `kip exec`; end it first")
        };
        self.proc.shared.metrics.refused(to, cause);
        Err(Refusal::new(Code::CannotSleep, format!("{} cannot sleep: {why}", self.proc.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_park_is_not_in_the_way_of_a_wait_that_ends() {
        let seconds = Duration::from_secs;
        assert_eq!(not_just_before(None, seconds(60)), seconds(60));
        assert_eq!(not_just_before(Some(seconds(61)), seconds(60)), seconds(62), "after it");
        assert_eq!(not_just_before(Some(seconds(60)), seconds(60)), seconds(61));
        assert_eq!(not_just_before(Some(seconds(62)), seconds(60)), seconds(60), "there is time for it");
        assert_eq!(not_just_before(Some(seconds(59)), seconds(60)), seconds(60), "it will be awake by then");
    }
}
