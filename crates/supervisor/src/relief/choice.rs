//! Which procs to put to sleep when memory is short, in which order, and when to stop. Pure.
//!
//! A candidate may go one step down. Steps are ordered by what they cost clients that come back:
//! all candidates of a cheaper step go first, so a proc that can be hibernated goes before one that
//! can only be parked.

use kip_pressure::{MemoryMarks, QUIET};
use std::time::Duration;

/// A proc that was woken less than this ago goes last.
const FRESH: Duration = Duration::from_secs(10);

/// A proc that could go a step down.
#[derive(Debug, Clone)]
pub(super) struct Candidate<K, S> {
    /// Which.
    pub(super) key: K,
    /// The step down; lesser ones are taken first.
    pub(super) step: S,
    /// Nothing has happened to it for this long.
    pub(super) quiet: Duration,
    /// Since it was last woken; none if it never was.
    pub(super) awake: Option<Duration>,
    /// Its owner wants it awake, or a program under exec does.
    pub(super) held_awake: bool,
    /// It is on its way down or up.
    pub(super) moving: bool,
    /// It ticks, and would be late once it has gone down: it goes last.
    pub(super) late: bool,
    /// It refused or declined lately and is not asked for this much longer.
    pub(super) rests: Duration,
}

impl<K, S> Candidate<K, S> {
    fn fresh(&self) -> bool {
        self.awake.is_some_and(|awake| awake < FRESH)
    }
}

/// What is to be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Goal {
    /// Bytes to be given back.
    pub(super) free: u64,
    /// Procs that may go down now, at most.
    pub(super) most: usize,
    /// Take procs that have just been woken, too, if there are no others.
    pub(super) fresh_too: bool,
}

/// The procs that go down: the cheapest step first, those that were woken just now last, the
/// longest quiet first among equals, until the goal is reached; none that gives nothing back.
/// `gives_back` is asked only for candidates that may be chosen.
pub(super) fn victims<K, S: Ord + Copy>(
    all: &[Candidate<K, S>],
    goal: Goal,
    mut gives_back: impl FnMut(&Candidate<K, S>) -> u64,
) -> Vec<(usize, u64)> {
    let may = |c: &Candidate<K, S>| {
        let still = !c.moving && c.rests.is_zero() && c.quiet >= QUIET;
        still && !c.held_awake && (goal.fresh_too || !c.fresh())
    };
    let mut order: Vec<usize> = (0..all.len()).filter(|n| may(&all[*n])).collect();
    order.sort_by_key(|n| (all[*n].late, all[*n].fresh(), all[*n].step, std::cmp::Reverse(all[*n].quiet)));
    let mut chosen = Vec::new();
    let mut freed = 0u64;
    for n in order {
        if freed >= goal.free || chosen.len() >= goal.most {
            break;
        }
        let bytes = gives_back(&all[n]);
        if bytes == 0 {
            continue;
        }
        freed = freed.saturating_add(bytes);
        chosen.push((n, bytes));
    }
    chosen
}

/// Whether `lacking` bytes would be given back if all procs went down that may `within` this time;
/// there has to be one at least.
pub(super) fn reachable<K, S>(
    all: &[Candidate<K, S>],
    within: Duration,
    lacking: u64,
    mut gives_back: impl FnMut(&Candidate<K, S>) -> u64,
) -> bool {
    let mut free = 0u64;
    // No more are asked than needed: it costs a look at each.
    all.iter().filter(|c| !c.held_awake && c.rests <= within).any(|c| {
        free = free.saturating_add(gives_back(c));
        free >= lacking
    })
}

/// Between the marks nothing begins: relief begins above the high one and ends at the low one.
#[derive(Debug, Default)]
pub(super) struct Hysteresis {
    relieving: bool,
}

/// What a look has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Begins,
    Ends,
}

impl Hysteresis {
    /// `used` bytes are used. `exhausted`: no proc could go down but those that were woken just
    /// now; between the marks they are left alone, and relief ends.
    pub(super) fn update(&mut self, used: u64, marks: &MemoryMarks, exhausted: bool) -> Option<Turn> {
        let above = used > marks.high_bytes();
        let enough = used <= marks.low_bytes() || (exhausted && !above);
        match (self.relieving, above, enough) {
            (false, true, _) => {
                self.relieving = true;
                Some(Turn::Begins)
            }
            (true, _, true) => {
                self.relieving = false;
                Some(Turn::Ends)
            }
            _ => None,
        }
    }

    /// What to reach: `leaving` bytes are on their way out, wakes that wait need `wanted`; at most
    /// `most` procs may go down now. None if there is nothing to do.
    pub(super) fn goal(&self, used: u64, leaving: u64, wanted: u64, most: usize, marks: &MemoryMarks) -> Option<Goal> {
        let left = used.saturating_sub(leaving);
        let for_marks = if self.relieving { left.saturating_sub(marks.low_bytes()) } else { 0 };
        let for_wake = if wanted > 0 { left.saturating_add(wanted).saturating_sub(marks.high_bytes()) } else { 0 };
        let free = for_marks.max(for_wake);
        let fresh_too = left > marks.high_bytes() || for_wake > 0;
        (free > 0 && most > 0).then_some(Goal { free, most, fresh_too })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    enum Step {
        Hibernate,
        Park,
    }

    fn proc(key: &'static str, quiet_s: u64) -> Candidate<&'static str, Step> {
        Candidate {
            key,
            step: Step::Park,
            quiet: Duration::from_secs(quiet_s),
            awake: None,
            held_awake: false,
            moving: false,
            late: false,
            rests: Duration::ZERO,
        }
    }

    fn fresh(key: &'static str, quiet_s: u64, awake_s: u64) -> Candidate<&'static str, Step> {
        Candidate { awake: Some(Duration::from_secs(awake_s)), ..proc(key, quiet_s) }
    }

    fn chosen(all: &[Candidate<&'static str, Step>], free: u64, fresh_too: bool) -> Vec<&'static str> {
        let goal = Goal { free, most: 9, fresh_too };
        victims(all, goal, |_| 10).into_iter().map(|(n, _)| all[n].key).collect()
    }

    const ALL: u64 = u64::MAX;

    #[test]
    fn a_proc_that_ticks_goes_last() {
        let ticks = Candidate { late: true, ..proc("ticks", 900) };
        let all = [ticks, proc("quiet", 30), fresh("fresh", 20, 5)];
        assert_eq!(chosen(&all, ALL, true), ["quiet", "fresh", "ticks"]);
    }

    #[test]
    fn the_longest_quiet_goes_first_and_no_more_than_needed() {
        let all = [proc("b", 20), proc("a", 50), proc("c", 3)];
        assert_eq!(chosen(&all, ALL, false), ["a", "b", "c"]);
        assert_eq!(chosen(&all, 10, false), ["a"]);
        assert_eq!(chosen(&all, 11, false), ["a", "b"]);
        assert!(chosen(&all, 0, false).is_empty());
        let one = Goal { free: ALL, most: 1, fresh_too: false };
        assert_eq!(victims(&all, one, |_| 10), [(1, 10)]);
        let but_a = |c: &Candidate<&str, Step>| if c.key == "a" { 0 } else { 10 };
        assert_eq!(victims(&all, one, but_a), [(0, 10)], "nobody sleeps for nothing");
    }

    #[test]
    fn who_is_wanted_awake_stays() {
        let held = Candidate { held_awake: true, ..proc("held", 90) };
        let resting = Candidate { rests: Duration::from_secs(9), ..proc("resting", 80) };
        let moving = Candidate { moving: true, ..proc("moving", 70) };
        let busy = Candidate { quiet: Duration::from_millis(999), ..proc("busy", 0) };
        let all = [held.clone(), resting.clone(), moving.clone(), busy.clone(), proc("a", 1)];
        assert_eq!(chosen(&all, ALL, true), ["a"]);
        let soon = Duration::from_secs(2);
        let reaches = |all: &[_], lacking| reachable(all, soon, lacking, |_| 10);
        assert!(!reaches(&[held.clone(), resting.clone()], 1));
        assert!(reachable(&[resting], Duration::from_secs(9), 1, |_| 10), "it will be asked again");
        assert!(reaches(&[held.clone(), busy.clone()], 10), "it may be quiet soon");
        assert!(reaches(&[held, moving.clone()], 10), "it may be there soon");
        assert!(!reaches(&[busy.clone(), moving.clone()], 21) && reaches(&[busy, moving], 20));
        assert!(!reaches(&[], 0));
    }

    // promise pressure: a proc that was woken just now sleeps last; cheaper steps down go first
    // held by: this, `kip_supervisor::relief::choice::tests::cheaper_steps_go_first`
    #[test]
    fn who_was_woken_just_now_goes_last() {
        let all = [fresh("new", 9, 9), fresh("older", 2, 60), proc("never-slept", 5)];
        assert_eq!(chosen(&all, ALL, true), ["never-slept", "older", "new"]);
        assert_eq!(chosen(&all, ALL, false), ["never-slept", "older"]);
    }

    #[test]
    fn cheaper_steps_go_first() {
        let hot = |key, quiet| Candidate { step: Step::Hibernate, ..proc(key, quiet) };
        let all = [proc("hibernated-long", 500), proc("hibernated", 100), hot("hot", 5), hot("hot-longer", 50)];
        assert_eq!(chosen(&all, ALL, false), ["hot-longer", "hot", "hibernated-long", "hibernated"]);
        assert_eq!(chosen(&all, 15, false), ["hot-longer", "hot"]);
    }

    fn marks() -> MemoryMarks {
        MemoryMarks { limit_bytes: 100, high_percent: 90, low_percent: 80, whole_machine: false }
    }

    #[test]
    fn between_the_marks_nothing_begins() {
        let marks = marks();
        let mut state = Hysteresis::default();
        for used in [0, 79, 85, 90] {
            assert_eq!(state.update(used, &marks, false), None);
            assert_eq!(state.goal(used, 0, 0, 2, &marks), None);
        }
        assert_eq!(state.update(91, &marks, false), Some(Turn::Begins));
        assert_eq!(state.goal(91, 0, 0, 2, &marks), Some(Goal { free: 11, most: 2, fresh_too: true }));
        assert_eq!(state.update(89, &marks, false), None);
        let below = Goal { free: 9, most: 2, fresh_too: false };
        assert_eq!(state.goal(89, 0, 0, 2, &marks), Some(below), "those just woken are left alone between the marks");
        assert_eq!(state.goal(89, 9, 0, 2, &marks), None, "enough is on its way out");
        assert_eq!(state.update(80, &marks, false), Some(Turn::Ends));
        assert_eq!(state.goal(80, 0, 0, 2, &marks), None);
    }

    #[test]
    fn relief_ends_between_the_marks_when_nobody_is_left() {
        let marks = marks();
        let mut state = Hysteresis::default();
        assert_eq!(state.update(95, &marks, true), Some(Turn::Begins));
        assert_eq!(state.update(95, &marks, true), None, "above the high mark it goes on looking");
        assert_eq!(state.update(85, &marks, true), Some(Turn::Ends));
        assert_eq!(state.update(85, &marks, false), None);
    }

    #[test]
    fn a_wake_that_waits_gets_what_it_needs_and_no_more() {
        let marks = marks();
        let state = Hysteresis::default();
        assert_eq!(state.goal(85, 0, 3, 2, &marks), None, "it fits");
        assert_eq!(state.goal(85, 0, 20, 2, &marks), Some(Goal { free: 15, most: 2, fresh_too: true }));
        assert_eq!(state.goal(85, 15, 20, 2, &marks), None);
        assert_eq!(state.goal(85, 0, 20, 0, &marks), None, "enough are on their way");
    }
}
