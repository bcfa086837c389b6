//! How much memory may be used, and the marks below that. Immutable once the daemon runs.

use super::size;
use std::fs;

/// Idle procs are put to sleep above this share, percent.
pub const USUAL_HIGH: u8 = 90;
/// Until no more than this share is used, percent.
pub const USUAL_LOW: u8 = 80;
/// A wake that has waited may fill memory up to this share, percent.
const LAST_RESORT: u8 = 98;
/// Of the machine's memory, what is left to others at least, bytes.
const LEAST_RESERVE: u64 = 256 << 20;
/// The same as a part of it.
const RESERVE_PART: u64 = 20;
/// What working sets may take in memory, as a part of the limit: a hibernated proc is to take less
/// than one that runs.
const SET_PART: u64 = 8;
/// However much there is, bytes.
const MOST_SETS: u64 = 256 << 20;
/// Nothing runs in less, bytes.
const LEAST_LIMIT: u64 = 4 << 20;

/// Marks that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadMarks {
    /// No room for anything.
    #[error("--memory {} is too little for any proc: give at least {}", size(*.0), size(LEAST_LIMIT))]
    TooLittle(u64),
    /// It could never be reached, so nothing would be held against it.
    #[error("--memory {} is more than this machine has: give at most {}", size(*asked), size(*there))]
    TooMuch {
        /// What was asked for, bytes.
        asked: u64,
        /// Memory and swap of the machine, bytes.
        there: u64,
    },
    /// Not from 1 to 100.
    #[error("{flag} {percent} is not a share of memory: give 1 to 100 percent")]
    NoShare {
        /// Which mark.
        flag: &'static str,
        /// What was given.
        percent: u8,
    },
    /// Relief would never end, or never begin.
    #[error("--memory-low {low} must be below --memory-high {high}: leave some percent between them")]
    Crossed {
        /// Low mark, percent.
        low: u8,
        /// High mark, percent.
        high: u8,
    },
    /// /proc/meminfo, proc(5).
    #[error("/proc/meminfo does not say how much memory there is: give `kip up` --memory SIZE")]
    Unknown,
}

/// The machine's memory, proc_meminfo(5), bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Meminfo {
    total: u64,
    available: u64,
    swap: u64,
}

impl Meminfo {
    fn read() -> Meminfo {
        Meminfo::parse(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
    }

    fn parse(text: &str) -> Meminfo {
        let field = |key: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            let kib = value.and_then(|v| v.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
            kib.unwrap_or(0) * 1024
        };
        Meminfo { total: field("MemTotal"), available: field("MemAvailable"), swap: field("SwapTotal") }
    }
}

/// The limit and its marks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryMarks {
    /// All that may be used, bytes.
    pub limit_bytes: u64,
    /// Above this, idle procs are put to sleep and new ones refused; percent of the limit.
    pub high_percent: u8,
    /// Until no more than this is used, percent of the limit.
    pub low_percent: u8,
    /// Without a limit of its own the daemon minds what all of the machine uses.
    pub whole_machine: bool,
}

impl MemoryMarks {
    /// From the command line; `memory` in bytes, `high` and `low` in percent. Without `memory` the
    /// limit is the machine's memory but for a twentieth, at least 256 MiB.
    ///
    /// # Errors
    /// [`BadMarks`] names the flag.
    pub fn new(memory: Option<u64>, high: Option<u8>, low: Option<u8>) -> Result<MemoryMarks, BadMarks> {
        MemoryMarks::of(Meminfo::read(), memory, high.unwrap_or(USUAL_HIGH), low)
    }

    /// A low mark that is not given is as far below the high one as usual.
    fn of(machine: Meminfo, memory: Option<u64>, high: u8, low: Option<u8>) -> Result<MemoryMarks, BadMarks> {
        let low = low.unwrap_or_else(|| high.saturating_sub(USUAL_HIGH - USUAL_LOW).max(1));
        for (flag, percent) in [("--memory-high", high), ("--memory-low", low)] {
            if !(1..=100).contains(&percent) {
                return Err(BadMarks::NoShare { flag, percent });
            }
        }
        if low >= high {
            return Err(BadMarks::Crossed { low, high });
        }
        let there = machine.total + machine.swap;
        let limit_bytes = match memory {
            Some(asked) if asked < LEAST_LIMIT => return Err(BadMarks::TooLittle(asked)),
            Some(asked) if there > 0 && asked > there => return Err(BadMarks::TooMuch { asked, there }),
            Some(asked) => asked,
            None if machine.total == 0 => return Err(BadMarks::Unknown),
            None => {
                let reserve = (machine.total / RESERVE_PART).max(LEAST_RESERVE);
                machine.total.saturating_sub(reserve).max(machine.total / 2)
            }
        };
        Ok(MemoryMarks { limit_bytes, high_percent: high, low_percent: low, whole_machine: memory.is_none() })
    }

    fn share(&self, percent: u8) -> u64 {
        (u128::from(self.limit_bytes) * u128::from(percent) / 100) as u64
    }

    /// Idle procs are put to sleep above this, bytes.
    pub fn high_bytes(&self) -> u64 {
        self.share(self.high_percent)
    }

    /// Until no more than this is used, bytes.
    pub fn low_bytes(&self) -> u64 {
        self.share(self.low_percent)
    }

    /// What working sets may take of that memory unless `Host::set_memory` gives another figure,
    /// bytes.
    pub fn set_bytes(&self) -> u64 {
        (self.limit_bytes / SET_PART).min(MOST_SETS)
    }

    /// A wake that found no room below the high mark may use up to this, bytes.
    pub fn last_resort_bytes(&self) -> u64 {
        self.share(self.last_resort_percent())
    }

    /// The same in percent of the limit.
    pub fn last_resort_percent(&self) -> u8 {
        LAST_RESORT.max(self.high_percent)
    }

    /// What is used, bytes, if this daemon's procs use `procs`.
    pub fn used(&self, procs: u64) -> u64 {
        if !self.whole_machine {
            return procs;
        }
        let machine = Meminfo::read();
        procs.max(machine.total.saturating_sub(machine.available))
    }

    /// Whose use it is.
    pub fn who(&self) -> &'static str {
        if self.whole_machine { "this machine uses" } else { "procs use" }
    }

    /// The limit, and where it comes from.
    pub fn limit_words(&self) -> String {
        let limit = size(self.limit_bytes);
        match self.whole_machine {
            true => format!("{limit}, this machine's memory less a reserve"),
            false => format!("--memory {limit}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Meminfo = Meminfo { total: 20 << 30, available: 15 << 30, swap: 1 << 30 };

    #[test]
    fn the_machine_is_read() {
        let text = "MemTotal:       20971520 kB\nMemFree: 7 kB\nMemAvailable:   15728640 kB\nSwapTotal: 1048576 kB\n";
        assert_eq!(Meminfo::parse(text), MACHINE);
        assert!(Meminfo::read().available > 0);
        assert!(MemoryMarks::new(None, None, None).unwrap().whole_machine);
    }

    // promise pressure: without `--memory` the limit is the machine's memory less a reserve
    #[test]
    fn a_part_is_left_to_others() {
        let marks = MemoryMarks::of(MACHINE, None, 90, None).unwrap();
        assert_eq!((marks.limit_bytes, marks.low_percent), (19 << 30, 80));
        let small = Meminfo { total: 400 << 20, ..MACHINE };
        assert_eq!(MemoryMarks::of(small, None, 90, None).unwrap().limit_bytes, 200 << 20);
        assert_eq!(MemoryMarks::of(Meminfo::default(), None, 90, None), Err(BadMarks::Unknown));
    }

    #[test]
    fn marks_are_shares_of_the_limit() {
        let marks = MemoryMarks::of(MACHINE, Some(100 << 20), 90, Some(50)).unwrap();
        assert_eq!([marks.high_bytes(), marks.low_bytes()], [90 << 20, 50 << 20]);
        assert_eq!((marks.last_resort_bytes(), marks.set_bytes()), (98 << 20, 100 << 17));
        assert_eq!(MemoryMarks::of(MACHINE, None, 90, None).unwrap().set_bytes(), 256 << 20);
        assert_eq!(MemoryMarks { high_percent: 100, ..marks.clone() }.last_resort_bytes(), 100 << 20);
        assert_eq!(marks.used(7), 7);
        assert_eq!(MemoryMarks::of(MACHINE, Some(100 << 20), 5, None).unwrap().low_percent, 1);
    }

    #[test]
    fn bad_marks_are_named() {
        let bad = |memory, high, low| MemoryMarks::of(MACHINE, memory, high, low).unwrap_err().to_string();
        for (text, word) in [
            (bad(Some(0), 90, Some(80)), "at least 4.0M"),
            (bad(Some(64 << 30), 90, Some(80)), "--memory 64.0G is more than this machine has: give at most 21.0G"),
            (bad(None, 101, Some(80)), "--memory-high 101"),
            (bad(None, 90, Some(0)), "--memory-low 0"),
            (bad(None, 80, Some(80)), "--memory-low 80 must be below --memory-high 80"),
            (bad(None, 80, Some(90)), "--memory-low 90 must be below"),
            (bad(None, 1, None), "--memory-low 1 must be below --memory-high 1"),
        ] {
            assert!(text.contains(word), "{text}");
        }
    }
}
