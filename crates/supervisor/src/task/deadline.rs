//! What a task does by itself when its time has come: looks at a running proc, puts an idle one to
//! sleep, wakes for a timer, sinks.

use super::hibernate::{AFTER_DUE, BEFORE_DUE};
use super::ticks::sample;
use super::*;
use kip_engine::blocking::blocking;
use kip_journal::meter::WRITE_EVERY;
use tokio::sync::oneshot::error::TryRecvError;

/// After a wake a proc's memory is looked at once it has run for this long.
const FIRST_LEVEL: Duration = Duration::from_millis(50);

/// When to look at the memory alone of a running proc, beside the looks at all of it: after a wake
/// it comes back at once, and hardly changes then. Each time the proc has run twice as long.
#[derive(Debug)]
pub(super) struct Levels {
    since: Instant,
    next: Option<Instant>,
}

impl Levels {
    /// Of one that runs since then.
    pub(super) fn since(since: Instant) -> Levels {
        Levels { since, next: Some(since + FIRST_LEVEL) }
    }

    fn are_due(&mut self, now: Instant) -> bool {
        let due = self.next.is_some_and(|at| now >= at);
        if due {
            let ran = now - self.since;
            self.next = (ran < SAMPLE_EVERY).then(|| now + ran);
        }
        due
    }
}

fn seen_word(seen: Option<Activity>) -> String {
    match seen {
        Some(Activity::Traffic) => "data that it received or sent".to_owned(),
        Some(Activity::Cpu(thousandths)) => format!("work, {:.1}% of a core", f64::from(thousandths) / 10.0),
        None => "a call".to_owned(),
    }
}

impl Task {
    pub(super) fn deadline(&self) -> Option<Instant> {
        if let Some(running) = self.phase.running() {
            return running.levels.next.into_iter().chain([running.next_sample]).min();
        }
        if let Some(at) = self.restarts_at() {
            return Some(at);
        }
        if self.pressed.waits() {
            return None;
        }
        let timer = self.phase.next_timer().map(|next| {
            let left = next.at_ns - Now::read().monotonic_ns;
            Instant::now() + Duration::from_nanos(left.max(0) as u64)
        });
        let listens_again = self.phase.parked().and_then(|parked| parked.listens_again);
        let parks_at = self.phase.hibernated().and_then(|h| h.parks_at);
        timer.into_iter().chain(parks_at).chain(self.archives_at()).chain(listens_again).min()
    }

    pub(super) fn sample(&mut self) {
        let State::Hot { init, .. } = self.record.state else { return };
        let Some(running) = self.phase.running_mut() else { return };
        let now = Instant::now();
        let check = self.checking.as_mut().map(|over| over.try_recv());
        if check == Some(Err(TryRecvError::Empty)) {
            // Its end brings the next sample.
            running.next_sample = now + SAMPLE_EVERY;
            return;
        }
        let sample = sample(&self.proc, init);
        match self.checking.take() {
            Some(_) => running.idle.skip(sample),
            None => running.idle.sample(sample, kip_net::activity::activity_between),
        }
        if self.tickets.load(Ordering::SeqCst) > 0 {
            running.idle.touch(now);
        }
        let (_, allowed) = sleep::sinks(&self.proc, running, self.record.ticks);
        let quiet = running.idle.quiet(now);
        if let Some(dry) = running.dry_run.as_mut().filter(|_| quiet < allowed)
            && let Some(slept) = dry.wake(now - quiet)
        {
            let detail = format!("after {:.1} s, for {}", slept.as_secs_f64(), seen_word(running.idle.seen()));
            self.proc.shared.events.emit(Some(&self.proc.name), EventKind::WouldWake, detail);
        }
        let left = allowed.saturating_sub(quiet);
        // One that may sleep and is still here cannot or must not.
        running.next_sample =
            now + if left.is_zero() { SAMPLE_EVERY } else { left.min(SAMPLE_EVERY).max(SOONEST_SAMPLE) };
    }

    /// Samples its memory and nothing else, if it is time for that only.
    fn sample_level(&mut self) -> bool {
        let now = Instant::now();
        let Some(running) = self.phase.running_mut().filter(|r| now < r.next_sample) else { return false };
        if running.levels.are_due(now) {
            self.proc.meter.level_of_running(self.proc.cgroup.held_bytes());
        }
        true
    }

    /// Puts the sleep off until after the first wait of the program that is about to end. Not twice
    /// while it is quiet: a program with one such wait after the other would never sleep.
    async fn puts_off(&mut self, quiet_since: Instant) -> bool {
        let was_put_off = |running: &Running| running.put_off.is_some_and(|at| at >= quiet_since);
        if self.phase.running().is_none_or(was_put_off) {
            return false;
        }
        let proc = Arc::clone(&self.proc);
        let due_in = blocking(move || kip_engine::hibernate::first_due_in(&proc)).await;
        let now = Instant::now();
        if let Some(running) = self.phase.running_mut() {
            running.first_due = due_in.map(|due_in| now + due_in);
        }
        let Some(due_in) = due_in.filter(|due_in| *due_in < BEFORE_DUE) else { return false };
        if let Some(running) = self.phase.running_mut() {
            running.put_off = Some(now);
            running.not_before = now + due_in + AFTER_DUE;
        }
        true
    }

    /// So that a daemon that is killed leaves it with no more than a minute missing.
    fn write_meter(&mut self) {
        if self.written.elapsed() >= WRITE_EVERY {
            self.keep(self.record.clone());
        }
    }

    pub(super) async fn on_deadline(&mut self) {
        if self.phase.running().is_some() {
            if self.sample_level() {
                return;
            }
            self.sample();
            self.write_meter();
            let now = Instant::now();
            let Some(running) = self.phase.running_mut() else { return };
            let (to, allowed) = sleep::sinks(&self.proc, running, self.record.ticks);
            let quiet = running.idle.quiet(now);
            let sleepy = quiet >= allowed && now >= running.not_before && self.checking.is_none();
            if let Some(dry) = running.dry_run.as_mut().filter(|dry| sleepy && !dry.is_asleep()) {
                dry.sleep(now);
                let detail = format!("{to}, idle {:.1} s", quiet.as_secs_f64());
                self.proc.shared.events.emit(Some(&self.proc.name), EventKind::WouldSleep, detail);
            }
            let stays = self.proc.spec().timing.stays_awake() || self.kept_awake.load(Ordering::SeqCst);
            if !sleepy || stays || self.tickets.load(Ordering::SeqCst) > 0 {
                return;
            }
            if self.puts_off(now - quiet).await {
                return;
            }
            let slept = if to == Tier::Hibernated { self.hibernate().await } else { self.park_from_hot().await };
            if let Err(refusal) = slept {
                tracing::info!(proc = %self.proc.name, reason = refusal.message, "cannot sleep");
                if let Some(running) = self.phase.running_mut()
                    && to == Tier::Parked
                {
                    running.not_before = now + RETRY_SLEEP;
                }
            }
        } else if matches!(self.record.state, State::Restarting { .. }) {
            self.restart().await;
        } else if let Some(next) = self.phase.next_timer()
            && Now::read().monotonic_ns >= next.at_ns
        {
            // Begun a little ahead, or late, if no daemon was there.
            let (now, late_ns) = (Instant::now(), Now::read().monotonic_ns - next.due_ns);
            let by = Duration::from_nanos(late_ns.unsigned_abs());
            let due = if late_ns < 0 { now.checked_add(by) } else { now.checked_sub(by) };
            self.wake_in_turn(WakeCause::Timer(next.source), now, due.unwrap_or(now), next.tick).await;
        } else if self.phase.parked().and_then(|parked| parked.listens_again).is_some_and(|at| Instant::now() >= at) {
            self.listen_again();
        } else if self.archives_at().is_some_and(|at| Instant::now() >= at) {
            self.archive_by_itself();
        } else if self.phase.hibernated().and_then(|h| h.parks_at).is_some_and(|at| Instant::now() >= at)
            && let Err(refusal) = self.sink_from_hibernated().await
        {
            tracing::info!(proc = %self.proc.name, reason = refusal.message, "cannot be parked");
            if let Some(running) = self.phase.running_mut() {
                running.not_before = Instant::now() + RETRY_SLEEP;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_sampled_the_more_rarely_the_longer_it_runs() {
        let begun = Instant::now();
        let mut levels = Levels::since(begun);
        let due = (0..5000).filter(|ms| levels.are_due(begun + Duration::from_millis(*ms)));
        assert_eq!(due.collect::<Vec<_>>(), [50, 100, 200, 400, 800, 1600]);
    }
}
