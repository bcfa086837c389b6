//! The one task that looks at memory and asks procs to sleep.
//!
//! It asks a victim's own task, which looks once more and may decline; it waits for none in
//! particular, and counts what is on its way out as gone. A proc that cannot sleep is left alone
//! for a while, longer each time.

mod choice;

use crate::registry::Registry;
use crate::task::{Handle, TaskCommand};
use choice::{Candidate, Hysteresis, Turn};
use kip_engine::blocking::blocking;
use kip_net::Slot;
use kip_pressure::ROOM_WITHIN;
use kip_pressure::{Pass, Pressure, Relieved, size};
use kip_sys::clock::now_ms;
use kip_types::api::{EventKind, Refusal};
use kip_types::spec::{Hibernate, Timing};
use kip_types::{State, Tier};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Procs that are put to sleep at the same time.
const AT_ONCE: usize = 2;
/// Between samples while there is room.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// Between samples above the low mark.
const SAMPLE_SOON: Duration = Duration::from_millis(250);
/// Between samples at least, however many ask.
const SAMPLE_LEAST: Duration = Duration::from_millis(20);
/// A proc that declined, for instance because it had just been busy, is asked again after this.
const DECLINED: Duration = Duration::from_millis(500);
/// A proc that could not sleep is asked again after this, then after twice that, and so on.
const REFUSED: Duration = Duration::from_secs(15);
/// A proc that has just been hibernated is not parked before this: others that have not been quiet
/// for long enough can be hibernated by then, which gives back more.
const STEP_AFTER: Duration = Duration::from_secs(3);
/// However often it refused.
const REFUSED_LONGEST: Duration = Duration::from_secs(600);

/// Steps down, the cheapest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// Its memory goes to a swap file and its working set stays at hand: it is back within a
    /// millisecond or two.
    Hibernate,
    Park,
}

impl Step {
    /// The one that a running proc takes first.
    fn of(timing: &Timing) -> Step {
        match timing.hibernate != Hibernate::Off && timing.park_after_ms > 0 {
            true => Step::Hibernate,
            false => Step::Park,
        }
    }

    fn to(self) -> Tier {
        match self {
            Step::Hibernate => Tier::Hibernated,
            Step::Park => Tier::Parked,
        }
    }
}

/// Not to be asked for a while.
#[derive(Debug, Clone, Copy)]
struct Rest {
    until: Instant,
    /// How long the last rest after a refusal was.
    last: Duration,
}

impl Rest {
    fn after_refusal(before: Option<Rest>, now: Instant) -> Rest {
        let last = before.map_or(REFUSED, |r| (r.last * 2).clamp(REFUSED, REFUSED_LONGEST));
        Rest { until: now + last, last }
    }

    fn after_declining(before: Option<Rest>, now: Instant) -> Rest {
        Rest { until: now + DECLINED, last: before.map_or(Duration::ZERO, |r| r.last) }
    }

    fn left(&self, now: Instant) -> Duration {
        self.until.saturating_duration_since(now)
    }
}

/// It has its processes and is not about to be stopped.
fn is_there(state: &State) -> bool {
    matches!(state, State::Hot { .. } | State::Hibernated { .. } | State::Parking { .. })
}

/// What its sleep would give back, bytes.
fn gives_back(candidate: &Candidate<Handle, Step>) -> u64 {
    let sets = candidate.key.status.borrow().asleep.set_bytes;
    candidate.key.proc.cgroup.held_bytes().saturating_add(sets)
}

/// A proc was asked to give memory back.
struct Ended {
    slot: Slot,
    /// None if it went another way meanwhile.
    answer: Option<Result<Relieved, Refusal>>,
}

struct Relief {
    pressure: Arc<Pressure>,
    machine: Weak<Registry>,
    hysteresis: Hysteresis,
    /// Those on their way down, with what they give back, bytes.
    leaving: HashMap<Slot, u64>,
    asked: JoinSet<Ended>,
    rests: HashMap<Slot, Rest>,
    /// Asked to sleep since relief began.
    chosen: usize,
    /// An event has told that no proc can be put to sleep.
    reported_stuck: bool,
}

/// Starts the task. It ends with the machine.
pub fn relieve(pressure: &Arc<Pressure>, machine: &Arc<Registry>) {
    let relief = Relief {
        pressure: Arc::clone(pressure),
        machine: Arc::downgrade(machine),
        hysteresis: Hysteresis::default(),
        leaving: HashMap::new(),
        asked: JoinSet::new(),
        rests: HashMap::new(),
        chosen: 0,
        reported_stuck: false,
    };
    tokio::spawn(relief.run());
}

impl Relief {
    async fn run(mut self) {
        loop {
            let Some(machine) = self.machine.upgrade() else { return };
            if machine.host.is_closing() {
                return;
            }
            let used = self.sample(&machine).await;
            drop(machine);
            let pause = if used > self.pressure.marks.low_bytes() { SAMPLE_SOON } else { SAMPLE_EVERY };
            tokio::time::sleep(SAMPLE_LEAST).await;
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.pressure.asked.notified() => {}
                Some(ended) = self.asked.join_next() => self.note(ended.expect("asking does not panic")),
            }
            while let Some(ended) = self.asked.try_join_next() {
                self.note(ended.expect("asking does not panic"));
            }
        }
    }

    /// One sample, and what follows from it. Returns what is used, bytes.
    async fn sample(&mut self, machine: &Arc<Registry>) -> u64 {
        let measured = Arc::clone(&self.pressure);
        let used = blocking(move || measured.measure()).await;
        let marks = self.pressure.marks.clone();
        let [wanted, first] = [&self.pressure.wanted, &self.pressure.first].map(|n| n.load(Ordering::SeqCst));
        let room = used <= marks.low_bytes() && wanted == 0;
        let candidates = if room { Vec::new() } else { self.candidates(machine) };
        // A wake may go up to the last resort, a new proc finds its room below the high mark.
        let most = if first > 0 { marks.last_resort_bytes() } else { marks.high_bytes() };
        let lacking = used.saturating_add(first).saturating_sub(most);
        let reachable = choice::reachable(&candidates, ROOM_WITHIN, lacking, gives_back);
        let hopeless = !room && self.leaving.is_empty() && !reachable;
        // No proc is sent to sleep for a wake that would not find room even then.
        let wanted = if hopeless { 0 } else { wanted };
        // Procs that were woken just now are left alone between the marks.
        let any = choice::Goal { free: u64::MAX, most: 1, fresh_too: false };
        let exhausted = self.leaving.is_empty() && choice::victims(&candidates, any, gives_back).is_empty();
        let turn = self.hysteresis.update(used, &marks, exhausted);
        self.report(machine, turn, used, hopeless);
        let leaving: u64 = self.leaving.values().sum();
        let most = AT_ONCE.saturating_sub(self.leaving.len());
        if let Some(goal) = self.hysteresis.goal(used, leaving, wanted, most, &marks) {
            let chosen = choice::victims(&candidates, goal, gives_back);
            for (n, gives_back) in chosen {
                self.ask(&candidates[n], gives_back, used);
            }
        }
        self.pressure.passes.send_modify(|p| *p = Pass { number: p.number + 1, used, hopeless });
        used
    }

    fn candidates(&mut self, machine: &Registry) -> Vec<Candidate<Handle, Step>> {
        let handles: Vec<Handle> = machine.all_handles();
        self.rests.retain(|slot, _| handles.iter().any(|h| h.proc.slot == *slot));
        let now = Instant::now();
        handles.iter().filter_map(|h| self.candidate(h, now)).collect()
    }

    fn candidate(&self, handle: &Handle, now: Instant) -> Option<Candidate<Handle, Step>> {
        let status = handle.status.borrow();
        let proc = &handle.proc;
        let ago = |at_ms: u64| Duration::from_millis(now_ms().saturating_sub(at_ms));
        let quiet = status.quiet_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let (step, quiet, moving) = match status.record.state {
            State::Hot { .. } => (Step::of(&proc.spec().timing), quiet, false),
            State::Hibernated { .. } => {
                let asleep = status.record.last_sleep.as_ref().map_or(STEP_AFTER, |s| ago(s.at_ms));
                (Step::Park, asleep, asleep < STEP_AFTER)
            }
            State::Parking { .. } | State::Waking { .. } => (Step::Park, Duration::ZERO, true),
            _ => return None,
        };
        Some(Candidate {
            key: handle.clone(),
            step,
            quiet,
            awake: status.record.last_wake.as_ref().map(|w| ago(w.at_ms)),
            held_awake: proc.spec().timing.stays_awake() || handle.is_kept_awake() || status.execs > 0,
            late: step == Step::Park && status.ticks,
            moving: moving || self.leaving.contains_key(&proc.slot),
            rests: self.rests.get(&proc.slot).map_or(Duration::ZERO, |r| r.left(now)),
        })
    }

    fn ask(&mut self, victim: &Candidate<Handle, Step>, gives_back: u64, used: u64) {
        let (to, quiet, victim) = (victim.step.to(), victim.quiet, victim.key.clone());
        self.leaving.insert(victim.proc.slot, gives_back);
        self.chosen += 1;
        let cause = format!(
            "memory pressure: {}; it was idle for {:.1} s and held {}",
            self.pressure.state(used),
            quiet.as_secs_f64(),
            size(gives_back)
        );
        self.asked.spawn(async move {
            let slot = victim.proc.slot;
            let mut status = victim.status.clone();
            let gone_on = status.wait_for(|s| !is_there(&s.record.state));
            // A proc that went another way meanwhile may have work that waits for us: it is not
            // waited for.
            let answer = tokio::select! {
                biased;
                answer = victim.ask(|reply| TaskCommand::Relieve { to, cause, reply }) => Some(answer),
                _ = gone_on => None,
            };
            Ended { slot, answer }
        });
    }

    fn note(&mut self, ended: Ended) {
        let Ended { slot, answer } = ended;
        self.leaving.remove(&slot);
        let (now, before) = (Instant::now(), self.rests.get(&slot).copied());
        match answer {
            Some(Ok(Relieved::Declined)) => drop(self.rests.insert(slot, Rest::after_declining(before, now))),
            Some(Err(_)) => drop(self.rests.insert(slot, Rest::after_refusal(before, now))),
            Some(Ok(Relieved::Asleep)) => {
                self.rests.remove(&slot);
            }
            None => {}
        }
    }

    fn report(&mut self, machine: &Registry, turn: Option<Turn>, used: u64, hopeless: bool) {
        let pressure = &self.pressure;
        match turn {
            Some(Turn::Begins) => {
                self.chosen = 0;
                let line = format!("{}: idle procs are put to sleep", pressure.above_high(used));
                machine.host.events.emit(None, EventKind::Pressure, line);
            }
            Some(Turn::Ends) => {
                let chosen = self.chosen;
                machine.host.events.emit(
                    None,
                    EventKind::Pressure,
                    format!("{}; procs asked to sleep: {chosen}", pressure.state(used)),
                );
            }
            None => {}
        }
        let stuck = hopeless && used > pressure.marks.high_bytes();
        if stuck && !self.reported_stuck {
            let line = format!(
                "{}: the procs that may sleep do not hold enough memory to get below the mark",
                pressure.above_high(used)
            );
            machine.host.events.emit(None, EventKind::Pressure, line);
        }
        self.reported_stuck = stuck;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise pressure: a proc that cannot sleep is asked less and less
    #[test]
    fn who_refuses_is_asked_less_and_less() {
        let now = Instant::now();
        let mut rest = Rest::after_refusal(None, now);
        assert_eq!([rest.left(now), rest.left(now + REFUSED)], [REFUSED, Duration::ZERO]);
        rest = Rest::after_refusal(Some(rest), now);
        assert_eq!(rest.until, now + REFUSED * 2);
        let declined = Rest::after_declining(Some(rest), now);
        assert_eq!(declined.until, now + DECLINED);
        assert_eq!(Rest::after_refusal(Some(declined), now).until, now + REFUSED * 4);
        for _ in 0..20 {
            rest = Rest::after_refusal(Some(rest), now);
        }
        assert_eq!(rest.until, now + REFUSED_LONGEST);
        assert_eq!(Rest::after_refusal(Some(Rest::after_declining(None, now)), now).until, now + REFUSED);
    }
}
