//! When a parked proc has to be woken for its own timers, and whether a program ticks.
//!
//! By default every timer is on time: the proc is woken a little ahead of the first that is due. A
//! program that ticks (its next wait is shorter than `--tick`) is therefore not parked by itself;
//! it ticks in place while it is hibernated. Only where its owner or its profile lets it be
//! suspended, or memory is short, does such a program park, and then its ticks are gathered
//! ([`Ticks`]); in a suspended sleep so is whatever waits on CLOCK_MONOTONIC, which stands.

use kip_clocks::{Clocks, Due, Source};
use serde::{Deserialize, Serialize};

/// For how many `tick_ms` the ticks of a suspended proc are gathered at first: ten minutes, as a
/// rule.
const FIRST_GATHER: i64 = 10;
/// The longest that ticks of a suspended proc are gathered, nanoseconds. Its own clock goes on for
/// the moment only that a round takes, however often it has one.
const LONGEST_GATHER_NS: i64 = 24 * 3_600 * 1_000_000_000;
/// The longest that ticks are late where memory is short, nanoseconds.
const LATE_NS: i64 = 10 * 1_000_000_000;
/// So much of that is for the wake, for which others may have to be put to sleep first,
/// nanoseconds.
const MAKES_ROOM_NS: i64 = 2 * 1_000_000_000;

/// What becomes of a proc's ticks while it is parked. All other timers are on time in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ticks {
    /// The proc is woken for each of them.
    #[default]
    OnTime,
    /// Memory was short and the proc may not be suspended: it is woken at least every ten seconds.
    Late,
    /// The proc is suspended: its ticks are served at wakes of their own, [`FIRST_GATHER`] times
    /// `tick_ms` after the sleep began, then twice as late each time nothing but ticks had woken
    /// it, up to a day.
    Gathered,
}

impl Ticks {
    /// How long after the freeze the first tick is served at the soonest, nanoseconds.
    fn gather_ns(self, tick_ns: i64, tick_wakes: u32) -> i64 {
        match self {
            Ticks::OnTime => 0,
            Ticks::Late => LATE_NS - MAKES_ROOM_NS,
            Ticks::Gathered => {
                tick_ns.saturating_mul(FIRST_GATHER << tick_wakes.min(20)).min(LONGEST_GATHER_NS.max(tick_ns))
            }
        }
    }
}

/// The next wake for a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextWake {
    /// When to begin, nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: i64,
    /// When the timer is due, on the same clock.
    pub due_ns: i64,
    /// For what.
    pub source: Source,
    /// Only gathered ticks: nothing that must be on time.
    pub tick: bool,
}

/// What a timer is called in words.
pub fn source_word(source: Source) -> &'static str {
    match source {
        Source::Timerfd => "timerfd",
        Source::Posix => "POSIX timer",
        Source::Interval => "interval timer",
        Source::Call => "time-out of a call",
        Source::Work => "it was at work",
    }
}

/// `--tick` in nanoseconds.
fn tick_ns(tick_ms: u64) -> i64 {
    (tick_ms as i64).saturating_mul(1_000_000)
}

/// Whether a timer is a tick: by its period or by the whole length of the wait, never by what is
/// left of it. Of a timer that fires once only what is left at `now_ns` is known.
fn is_tick(due: &Due, now_ns: i64, tick_ns: i64) -> bool {
    due.every_ns.unwrap_or(due.at_ns.saturating_sub(now_ns)) < tick_ns
}

/// Whether a program with these timers ticks: one of its waits is shorter than `tick_ms`.
pub fn ticks(dues: &[Due], now_ns: i64, tick_ms: u64) -> bool {
    dues.iter().any(|due| is_tick(due, now_ns, tick_ns(tick_ms)))
}

/// The next wake, `lead_ns` ahead of the timer that needs it.
pub fn next_wake(clocks: &Clocks, tick_ms: u64, how: Ticks, tick_wakes: u32, lead_ns: i64) -> Option<NextWake> {
    let tick_ns = tick_ns(tick_ms);
    let how = if clocks.stands { Ticks::Gathered } else { how };
    let gathers = |due: &&Due| {
        let short = due.every_ns.is_some_and(|every| every < tick_ns);
        clocks.stands && due.monotonic || how != Ticks::OnTime && short
    };
    let on_time = clocks.dues.iter().filter(|d| !gathers(d)).min_by_key(|d| d.at_ns);
    let on_time =
        on_time.map(|d| NextWake { at_ns: d.at_ns - lead_ns, due_ns: d.at_ns, source: d.source, tick: false });
    let served = clocks.frozen_ns.saturating_add(how.gather_ns(tick_ns, tick_wakes));
    let ticks = clocks.dues.iter().filter(gathers).min_by_key(|d| d.at_ns);
    let ticks = ticks.map(|d| {
        let at_ns = d.at_ns.max(served);
        NextWake { at_ns, due_ns: at_ns, source: d.source, tick: true }
    });
    match (on_time, ticks) {
        (Some(a), Some(b)) => Some(if b.at_ns < a.at_ns { b } else { a }),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    fn clocks(dues: &[(i64, Option<i64>)]) -> Clocks {
        let dues = dues
            .iter()
            .map(|(at, every)| Due {
                source: Source::Timerfd,
                at_ns: at * SECOND,
                every_ns: every.map(|e| e * SECOND),
                monotonic: true,
            })
            .collect();
        Clocks { frozen_ns: 100 * SECOND, dues, ..Clocks::default() }
    }

    #[test]
    fn by_default_every_timer_is_on_time() {
        let next = |dues: &[(i64, Option<i64>)], lead| next_wake(&clocks(dues), 60_000, Ticks::OnTime, 7, lead);
        assert_eq!(next(&[], 0), None);
        let one = next(&[(105, None)], SECOND).unwrap();
        assert_eq!((one.at_ns, one.due_ns, one.tick), (104 * SECOND, 105 * SECOND, false));
        let tick = next(&[(150, Some(90)), (101, Some(1))], 0).unwrap();
        assert_eq!((tick.at_ns, tick.tick), (101 * SECOND, false));
    }

    #[test]
    fn ticks_of_a_suspended_proc_are_gathered() {
        let next = |dues: &[(i64, Option<i64>)], tick_ms, wakes, lead| {
            next_wake(&clocks(dues), tick_ms, Ticks::Gathered, wakes, lead).unwrap()
        };
        let one = next(&[(105, None)], 60_000, 0, SECOND);
        assert_eq!((one.at_ns, one.tick), (104 * SECOND, false));
        let tick = next(&[(101, Some(1))], 60_000, 0, SECOND);
        assert_eq!((tick.at_ns, tick.tick), (700 * SECOND, true));
        assert_eq!(next(&[(101, Some(1))], 60_000, 2, SECOND).at_ns, 2_500 * SECOND);
        assert_eq!(next(&[(101, Some(1))], 60_000, 99, SECOND).at_ns, 86_500 * SECOND);
        // A slow period is on time, and a timer that is on time comes before gathered ticks.
        let slow = next(&[(150, Some(90)), (101, Some(1))], 60_000, 0, 0);
        assert_eq!((slow.at_ns, slow.tick), (150 * SECOND, false));
        // With a tick of 0 everything is on time.
        let exact = next(&[(101, Some(1))], 0, 5, 0);
        assert_eq!((exact.at_ns, exact.tick), (101 * SECOND, false));
    }

    // promise waking: where memory is short ticks are at most ten seconds late, procs that tick are
    //   parked last
    // held by: this, `kip_supervisor::relief::choice::tests::a_proc_that_ticks_goes_last`
    #[test]
    fn where_memory_is_short_ticks_are_at_most_ten_seconds_late() {
        let late = next_wake(&clocks(&[(101, Some(1))]), 60_000, Ticks::Late, 9, SECOND).unwrap();
        assert_eq!((late.at_ns, late.tick), (108 * SECOND, true), "room for it takes time");
        let later = next_wake(&clocks(&[(130, Some(45))]), 60_000, Ticks::Late, 9, SECOND).unwrap();
        assert_eq!(later.at_ns, 130 * SECOND);
    }

    #[test]
    fn a_timer_is_a_tick_by_its_period_and_never_by_what_is_left_of_it() {
        let ticks = |at: i64, every: Option<i64>| super::ticks(&clocks(&[(at, every)]).dues, 100 * SECOND, 60_000);
        assert!(ticks(101, Some(1)) && ticks(159, Some(59)));
        assert!(!ticks(101, Some(70)), "the last second of a wait of 70 s");
        assert!(ticks(130, None) && !ticks(400, None), "of one that fires once only the rest is known");
        assert!(!super::ticks(&clocks(&[(101, Some(1))]).dues, 100 * SECOND, 0), "--tick 0s");
    }
}
