//! Procs that tick: how they sleep without being late.
//!
//! A program that ticks, one of whose waits is shorter than `--tick`, is hibernated and ticks
//! there, on time, from the few pages that its ticks need. It is parked only if that may suspend it
//! (its owner's word or its profile), or late by at most ten seconds where memory is short; else it
//! stays hibernated, and is asked again later. Where it cannot be hibernated it stays hot.

use super::*;
use kip_engine::blocking::blocking;
use kip_engine::hibernate::{self, KnownTicks};
use kip_engine::suspend;
use kip_pressure::Relieved;
use kip_records::due::Ticks;
use kip_types::spec::Clock;
use kip_types::suspend::SuspendedBy;

/// Pages that a tick may touch while its proc is hibernated, until one has needed more: an
/// interpreter of Python needs 80 for its select and the way back.
const PATIENCE: usize = 512;
/// However often a tick has needed more.
const MOST_PATIENCE: usize = 4096;
/// Between samples of a hibernated proc that ticks.
const SAMPLE_TICKS_EVERY: Duration = Duration::from_secs(60);

/// The counters of a running proc now.
pub(super) fn sample(proc: &Proc, init: u32) -> Sample<Traffic> {
    let (cpu_ns, traffic) = proc.sample_meter(init);
    Sample { at: Instant::now(), cpu: Duration::from_nanos(cpu_ns.unwrap_or(0)), traffic }
}

/// Why a proc that ticks is not parked by itself, and what parks it; `ticker`: the thread that
/// ticks, in words.
pub fn would_be_late(proc: &Proc, ticker: Option<&str>) -> String {
    let tick = Duration::from_millis(proc.spec().timing.tick_ms).as_secs_f64();
    let name = &proc.name;
    let ticker = ticker.map(|thread| format!(" ({thread})")).unwrap_or_default();
    format!(
        "a thread waits less than --tick ({tick} s) at a time{ticker}; parked, the proc would be late. `kip sleep {name}` or \
         --clock suspend parks it"
    )
}

impl Task {
    /// What has woken it says how much its ticks touch; what clients have sent since then says
    /// nothing of it.
    pub(super) fn note_ticks(&mut self) {
        if self.phase.running().is_some_and(|running| matches!(running.woke, Woke::Touch { by_a_tick: true, .. })) {
            self.patience = (self.patience.max(PATIENCE) * 4).min(MOST_PATIENCE);
        }
    }

    /// What is known of its ticks before it is hibernated.
    pub(super) fn known_ticks(&self) -> KnownTicks {
        KnownTicks { patience: self.patience.max(PATIENCE), hidden: self.hidden_ticks || self.patience > 0 }
    }

    /// What becomes of its ticks if it is parked now by that word; late ones are for want of memory
    /// only.
    pub(super) async fn ticks_if_parked(&mut self, by: By) -> (bool, Ticks) {
        if matches!(by, By::Owner(_)) {
            // For this one sleep ticks may be gathered, whatever there is of them.
            return (false, Ticks::Gathered);
        }
        let clock = self.proc.spec().timing.clock;
        // The first touch of one that does not tick is its wake, so it is not looked at.
        let asleep = self.phase.hibernated().is_some_and(|h| h.ticks.is_none());
        let ticks = !asleep && self.ticks().await;
        let suspended = match clock {
            Clock::Suspend => true,
            Clock::Continue => false,
            Clock::Auto => ticks && self.has_profile().await,
        };
        (ticks, if suspended { Ticks::Gathered } else { Ticks::OnTime })
    }

    /// Whether a profile lets it be suspended.
    async fn has_profile(&mut self) -> bool {
        let proc = Arc::clone(&self.proc);
        blocking(move || suspend::suspends(&proc).is_some()).await
    }

    /// Whether it ticks; it runs.
    async fn ticks(&mut self) -> bool {
        let proc = Arc::clone(&self.proc);
        let ticked = self.phase.hibernated().is_some();
        self.hidden_ticks || blocking(move || hibernate::ticks(&proc, ticked)).await
    }

    /// From hot straight to parked: it is not to be hibernated, or cannot be, or was woken for
    /// gathered ticks.
    pub(super) async fn park_from_hot(&mut self) -> Result<(), Refusal> {
        let back =
            self.phase.running().is_some_and(|r| r.woke == Woke::ForTicks) && self.record.ticks == Ticks::Gathered;
        if back {
            // The sleep goes on, by the word that it began with.
            let word = self.record.last_sleep.as_ref().and_then(|sleep| sleep.suspended.as_ref());
            let by = match word {
                None => By::Owner(Some(Clock::Continue)),
                Some(SuspendedBy::Once) => By::Owner(Some(Clock::Suspend)),
                Some(_) => By::Kip,
            };
            return self.park_by(Ticks::Gathered, by).await;
        }
        let (ticks, how) = self.ticks_if_parked(By::Kip).await;
        if !ticks || how == Ticks::Gathered {
            return self.park(how).await;
        }
        let never = self.phase.running().is_some_and(|r| r.no_hibernation);
        if self.proc.spec().timing.hibernate != Hibernate::Off && !never {
            return self.hibernate().await;
        }
        let name = &self.proc.name;
        let cause = format!("it is not hibernated, and {}", would_be_late(&self.proc, None));
        let message = format!("{name} stays awake: {cause}");
        self.cannot_sleep(vec![cause]);
        Err(Refusal::new(Code::CannotSleep, message))
    }

    /// From hibernated to parked, if that makes nothing late.
    pub(super) async fn sink_from_hibernated(&mut self) -> Result<(), Refusal> {
        let State::Hibernated { init, .. } = self.record.state else { return Ok(()) };
        let timing = self.proc.spec().timing;
        let (now, sample) = (Instant::now(), sample(&self.proc, init));
        let in_use = self.tickets.load(Ordering::SeqCst) > 0;
        let Some(hibernating) = self.phase.hibernated_mut() else { return Ok(()) };
        if in_use {
            hibernating.parks_at = Some(now + SAMPLE_EVERY);
            return Ok(());
        }
        let park_after = Duration::from_millis(timing.park_after_ms);
        let Some(idle) = &mut hibernating.ticks else {
            let (_, how) = self.ticks_if_parked(By::Kip).await;
            return self.park(how).await;
        };
        idle.sample(sample, kip_net::activity::activity_between);
        let quiet = idle.quiet(now);
        // What it did since it fell asleep, within pages that had come back, is as good as being
        // awake.
        hibernating.parks_at = Some(now + park_after.saturating_sub(quiet).max(SAMPLE_EVERY));
        if quiet < park_after {
            return Ok(());
        }
        let (ticks, how) = self.ticks_if_parked(By::Kip).await;
        if ticks && how == Ticks::OnTime {
            if let Some(hibernating) = self.phase.hibernated_mut() {
                hibernating.parks_at = Some(now + park_after.clamp(SAMPLE_EVERY, SAMPLE_TICKS_EVERY));
            }
            return Ok(());
        }
        self.park(how).await
    }

    /// Memory is short: a proc that ticks and may not be suspended is parked too, and its ticks are
    /// late; an event says so. `known`: what becomes of its ticks, if that was just found.
    pub(super) async fn park_for_room(&mut self, known: Option<(bool, Ticks)>) -> Result<Relieved, Refusal> {
        let (ticks, how) = match known {
            Some(known) => known,
            None => self.ticks_if_parked(By::Kip).await,
        };
        let how = if ticks && how == Ticks::OnTime { Ticks::Late } else { how };
        self.park(how).await?;
        if how == Ticks::Late {
            let line = "memory is short: its timers below --tick are up to 10 s late while it is parked";
            self.proc.shared.events.emit(Some(&self.proc.name), EventKind::TicksLate, line.to_owned());
        }
        Ok(Relieved::Asleep)
    }

    /// Whether a proc that runs is found to tick only now that it is to be parked: procs that do
    /// not are parked before it, if there are any.
    pub(super) fn goes_last(&mut self, found: (bool, Ticks)) -> bool {
        let late = found == (true, Ticks::OnTime);
        let Some(running) = self.phase.running_mut().filter(|running| late && !running.ticks) else { return false };
        running.ticks = true;
        self.publish();
        true
    }
}
