//! The machine's clocks at one moment, and in one boot.

use serde::{Deserialize, Serialize};
use std::io;

/// Nanoseconds in a second.
pub(crate) const SECOND: i64 = 1_000_000_000;

/// The clocks at one moment, nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// CLOCK_MONOTONIC.
    pub monotonic_ns: i64,
    /// CLOCK_REALTIME.
    pub realtime_ns: i64,
    /// CLOCK_BOOTTIME.
    pub boottime_ns: i64,
}

impl Now {
    /// Reads the clocks.
    pub fn read() -> Now {
        use rustix::time::{ClockId, clock_gettime};
        let ns = |clock| {
            let t = clock_gettime(clock);
            t.tv_sec * SECOND + t.tv_nsec
        };
        Now {
            monotonic_ns: ns(ClockId::Monotonic),
            realtime_ns: ns(ClockId::Realtime),
            boottime_ns: ns(ClockId::Boottime),
        }
    }

    /// All clocks `ns` nanoseconds later.
    pub fn later(&self, ns: i64) -> Now {
        Now {
            monotonic_ns: self.monotonic_ns + ns,
            realtime_ns: self.realtime_ns + ns,
            boottime_ns: self.boottime_ns + ns,
        }
    }

    /// The clocks as a program sees them whose CLOCK_MONOTONIC is that far ahead.
    pub fn inside(&self, ahead_ns: i64) -> Now {
        Now { monotonic_ns: self.monotonic_ns + ahead_ns, ..*self }
    }

    /// What of an absolute time on that clock (clock_gettime(2) numbers) is left; none for clocks
    /// of CPU time.
    pub(crate) fn left(&self, clock: u64, at_ns: i64) -> Option<i64> {
        matches!(clock, 0 | 1 | 4..=9 | 11).then(|| at_ns.saturating_sub(self.on(clock)))
    }

    /// The time on that clock.
    pub(crate) fn on(&self, clock: u64) -> i64 {
        match clock {
            0 | 5 | 8 | 11 => self.realtime_ns,
            7 | 9 => self.boottime_ns,
            _ => self.monotonic_ns,
        }
    }
}

/// Which boot of a machine clocks belong to, and where they stood in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// /proc/sys/kernel/random/boot_id.
    pub id: String,
    /// CLOCK_REALTIME less CLOCK_MONOTONIC, nanoseconds.
    pub realtime_ahead_ns: i64,
    /// CLOCK_REALTIME less CLOCK_BOOTTIME, nanoseconds.
    pub realtime_ahead_of_boottime_ns: i64,
}

impl Boot {
    /// This one, now.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn read() -> io::Result<Boot> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        let now = Now::read();
        let realtime_ahead_of_boottime_ns = now.realtime_ns - now.boottime_ns;
        Ok(Boot { id, realtime_ahead_ns: now.realtime_ns - now.monotonic_ns, realtime_ahead_of_boottime_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_is_the_same_as_long_as_it_lasts() {
        let (one, two) = (Boot::read().unwrap(), Boot::read().unwrap());
        assert!(one.id == two.id && one.id.len() == 36, "{one:?}");
        assert!((one.realtime_ahead_ns - two.realtime_ahead_ns).abs() < SECOND);
    }
}
