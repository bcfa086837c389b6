//! When a sleeper has to be woken for its own timers.
//!
//! A timer that fires once, or rarely, wakes the proc a little ahead of time, so that it fires on time. Ticks
//! (anything that comes more often than `tick_ms`) are gathered: they are served at a wake of their own [`FIRST_GATHER`]
//! times `tick_ms` after the sleep began, then twice as late each time nothing but ticks had woken it, up to an hour. In a suspended
//! sleep whatever is on CLOCK_MONOTONIC stands, and is gathered.

use kip_checkpoint::clocks::{Clocks, Due, Source};

/// For how many `tick_ms` ticks are gathered at first: ten minutes, as a rule. To wake and park again takes some 30 ms of
/// CPU; a hundred procs that tick shall take less than 0.5% of a core.
const FIRST_GATHER: i64 = 10;
/// The longest that ticks are gathered, nanoseconds.
const LONGEST_GATHER_NS: i64 = 3_600 * 1_000_000_000;

/// The next wake for a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NextWake {
    /// When to begin, nanoseconds of CLOCK_MONOTONIC.
    pub(crate) at_ns: i64,
    /// When the timer is due, on the same clock.
    pub(crate) due_ns: i64,
    /// For what.
    pub(crate) source: Source,
    /// Only gathered ticks: nothing that must be on time.
    pub(crate) tick: bool,
}

/// Whether a timer is a tick.
fn is_tick(due: &Due, clocks: &Clocks, tick_ns: i64) -> bool {
    clocks.stands && due.monotonic || due.every_ns.is_some_and(|every| every < tick_ns)
}

/// The next wake, `lead_ns` ahead of the timer that needs it.
pub(crate) fn next_wake(clocks: &Clocks, tick_ms: u64, tick_wakes: u32, lead_ns: i64) -> Option<NextWake> {
    let tick_ns = (tick_ms as i64).saturating_mul(1_000_000);
    let on_time = clocks.dues.iter().filter(|d| !is_tick(d, clocks, tick_ns)).min_by_key(|d| d.at_ns);
    let on_time =
        on_time.map(|d| NextWake { at_ns: d.at_ns - lead_ns, due_ns: d.at_ns, source: d.source, tick: false });
    let gather = tick_ns.saturating_mul(FIRST_GATHER << tick_wakes.min(20)).min(LONGEST_GATHER_NS.max(tick_ns));
    let ticks = clocks.dues.iter().filter(|d| is_tick(d, clocks, tick_ns)).min_by_key(|d| d.at_ns);
    let ticks = ticks.map(|d| {
        let at_ns = d.at_ns.max(clocks.frozen_ns.saturating_add(gather));
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
    fn single_timers_are_on_time_and_ticks_are_gathered() {
        assert_eq!(next_wake(&clocks(&[]), 60_000, 0, 0), None);
        let one = next_wake(&clocks(&[(105, None)]), 60_000, 0, SECOND).unwrap();
        assert_eq!((one.at_ns, one.tick), (104 * SECOND, false));
        let tick = next_wake(&clocks(&[(101, Some(1))]), 60_000, 0, SECOND).unwrap();
        assert_eq!((tick.at_ns, tick.tick), (700 * SECOND, true));
        let later = next_wake(&clocks(&[(101, Some(1))]), 60_000, 2, SECOND).unwrap();
        assert_eq!(later.at_ns, 2_500 * SECOND);
        let hour = next_wake(&clocks(&[(101, Some(1))]), 60_000, 99, SECOND).unwrap();
        assert_eq!(hour.at_ns, 3_700 * SECOND);
        // A slow period is on time, and a timer that is on time comes before gathered ticks.
        let slow = next_wake(&clocks(&[(150, Some(90)), (101, Some(1))]), 60_000, 0, 0).unwrap();
        assert_eq!((slow.at_ns, slow.tick), (150 * SECOND, false));
        // With a tick of 0 everything is on time.
        let exact = next_wake(&clocks(&[(101, Some(1))]), 0, 5, 0).unwrap();
        assert_eq!((exact.at_ns, exact.tick), (101 * SECOND, false));
    }
}
