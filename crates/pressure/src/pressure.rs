//! Memory: how much may be used, how much is, and when a wake may begin. What sleeps for lack of
//! it: `kip_supervisor::relief`.
//!
//! | part | owns |
//! | --- | --- |
//! | [`marks`] | the limit and the marks below it, from the command line and the machine |
//! | [`ledger`] | what was measured, and what wakes under way have been promised |
//! | [`admission`] | when wakes begin; the refusal of new procs |
//! | [`line`] | the order in which they do |
//!
//! Knows of no state of a proc but what it publishes, and changes none: a victim's own task puts it
//! to sleep, if it still agrees. No task that waits here for room holds anything that relief needs,
//! for relief waits for no wake. Nothing is written down: a daemon that starts measures anew, and a
//! wake that waited is asked for again by its socket.
//!
//! What the pager keeps in memory for hibernated procs counts with what procs hold. A proc that
//! touches a page that is out, or has a connection that the pager watches, is awake before the
//! daemon hears of it: such a wake is counted when the pager tells of it, and relief makes the room
//! afterwards.
//!
//! ```text
//! wake: one of 2 x cores --> its turn --> fits below high? --yes--> reserved, begins
//!                                          | no
//!                                          +--> relief, at most 2 s --> below the last resort? --no--> refused
//! ```
//!
//! A wake from hibernation needs none of the places as long as there is room.

pub mod admission;
mod ledger;
mod line;
mod marks;

pub use admission::{Grant, Need, Short, Work};
pub use marks::{BadMarks, MemoryMarks};

use kip_sandbox::cgroup::Cgroup;
use kip_types::api::RoomView;
use ledger::Ledger;
use line::Line;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// What a proc that was asked to sleep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relieved {
    /// It sleeps.
    Asleep,
    /// It is wanted awake now.
    Declined,
}

/// A proc that has been quiet for less is not put to sleep for others.
pub const QUIET: Duration = Duration::from_secs(1);
/// So often at most is measured for one figure: in a storm wakes end all the time.
const MEASURES: u32 = 3;
/// What procs use may be behind by this part of the limit; were it by more, each proc's own figure
/// is read instead.
const LAG_PART: u64 = 64;

/// What relief found at its last look.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pass {
    /// Counted from 1.
    pub number: u64,
    /// What is used, bytes.
    pub used: u64,
    /// Even if all procs that may sleep did, there would not be the room that is asked for.
    pub hopeless: bool,
}

/// What was promised, and whose memory shows how much of it has arrived: the rest of what was there
/// before.
#[derive(Debug, Default)]
struct Books {
    ledger: Ledger,
    waking: HashMap<u64, (Cgroup, u64)>,
}

/// Working sets of a hibernated proc, which the pager has in memory. They count until this is
/// dropped.
#[derive(Debug)]
pub struct SetsInMemory {
    pressure: Arc<Pressure>,
    /// So many.
    pub bytes: u64,
}

impl Drop for SetsInMemory {
    fn drop(&mut self) {
        self.pressure.sets.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// Memory of one data directory.
#[derive(Debug)]
pub struct Pressure {
    /// How much procs may use.
    pub marks: MemoryMarks,
    /// Of all procs together.
    procs: Cgroup,
    /// Working sets that the pager has in memory, bytes.
    sets: AtomicU64,
    books: Mutex<Books>,
    /// One measures at a time, so that no older figure replaces a newer one.
    measuring: Mutex<()>,
    /// Wakes under way at the same time.
    at_once: Arc<Line>,
    /// The wake that has its one place is the next to be given room.
    turn: Arc<Line>,
    /// What the wakes that wait need together, bytes.
    pub wanted: AtomicU64,
    /// What the one whose turn it is needs, bytes; 0 if it has room.
    pub first: AtomicU64,
    /// Relief is to look at once.
    pub asked: Notify,
    /// The newest look of relief.
    pub passes: watch::Sender<Pass>,
    /// For which there was no room.
    refused_starts: AtomicU64,
    refused_wakes: AtomicU64,
}

impl Pressure {
    /// `procs` is the group of all procs; it need not exist yet.
    pub fn new(marks: MemoryMarks, procs: Cgroup) -> Arc<Pressure> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Pressure {
            marks,
            procs,
            sets: AtomicU64::new(0),
            books: Mutex::default(),
            measuring: Mutex::default(),
            at_once: Line::new(admission::WAKES_PER_CORE * cores),
            turn: Line::new(1),
            wanted: AtomicU64::new(0),
            first: AtomicU64::new(0),
            asked: Notify::new(),
            passes: watch::Sender::new(Pass::default()),
            refused_starts: AtomicU64::new(0),
            refused_wakes: AtomicU64::new(0),
        })
    }

    /// How many starts and how many wakes, each try counted, had no room so far.
    pub fn refused(&self) -> (u64, u64) {
        (self.refused_starts.load(Ordering::Relaxed), self.refused_wakes.load(Ordering::Relaxed))
    }

    /// Counts what the pager keeps for a hibernated proc.
    pub fn keep_sets(self: &Arc<Pressure>, bytes: u64) -> SetsInMemory {
        self.sets.fetch_add(bytes, Ordering::SeqCst);
        SetsInMemory { pressure: Arc::clone(self), bytes }
    }

    /// Counts what has come with a wake that began without a grant. Relief looks at once if that
    /// may be too much.
    pub fn count(&self, bytes: u64) {
        let mut books = self.books();
        books.ledger.took(bytes, Instant::now());
        if books.ledger.expected() > self.marks.high_bytes() {
            self.asked.notify_one();
        }
    }

    fn books(&self) -> parking_lot::MutexGuard<'_, Books> {
        self.books.lock()
    }

    /// Measures; returns what is used and what wakes under way will use beyond that, bytes. Takes
    /// well below a millisecond.
    pub fn measure(&self) -> u64 {
        self.measure_by(|| self.procs.held_within(self.lag_bytes()))
    }

    /// By how much the figures may be behind, bytes.
    fn lag_bytes(&self) -> u64 {
        self.marks.limit_bytes / LAG_PART
    }

    /// What `held` reads may or may not have what a wake took that ended meanwhile, which is then
    /// counted beside it. That is seldom; it is measured anew.
    fn measure_by(&self, held: impl Fn() -> u64) -> u64 {
        let _alone = self.measuring.lock();
        let mut tries = 1;
        loop {
            let (ended, waking) = {
                let books = self.books();
                (books.ledger.ended(Instant::now()), books.waking.clone())
            };
            // Before the sum: what arrives in between is counted twice for a moment rather than not
            // at all.
            let came = |(group, there): &(Cgroup, u64)| group.held_bytes().saturating_sub(*there);
            let arrived: HashMap<u64, u64> = waking.iter().map(|(id, waking)| (*id, came(waking))).collect();
            let used = self.marks.used(held() + self.sets.load(Ordering::SeqCst));
            let mut books = self.books();
            books.ledger.measured(used, &arrived, &ended);
            ended.iter().for_each(|id| drop(books.waking.remove(id)));
            if tries == MEASURES || books.ledger.ended(Instant::now()).is_empty() {
                return books.ledger.expected();
            }
            tries += 1;
        }
    }

    /// As [`Pressure::measure`], but so near to the high mark that it matters it is not deceived by
    /// figures that lag.
    fn measure_for_new(&self) -> u64 {
        let (used, high) = (self.measure(), self.marks.high_bytes());
        let near = used <= high && high - used < self.lag_bytes();
        if near { self.measure_by(|| self.procs.held_within(high - used)) } else { used }
    }

    /// What the wakes that wait need together, bytes.
    pub fn wanted_bytes(&self) -> u64 {
        self.wanted.load(Ordering::SeqCst)
    }

    /// For people.
    pub fn view(&self) -> RoomView {
        let marks = &self.marks;
        RoomView {
            used_bytes: self.measure(),
            limit_bytes: marks.limit_bytes,
            high_bytes: marks.high_bytes(),
            low_bytes: marks.low_bytes(),
            set_bytes: self.sets.load(Ordering::SeqCst),
        }
    }

    /// How much of what is used, in words.
    pub fn state(&self, used: u64) -> String {
        let marks = &self.marks;
        format!(
            "{} {} of {}, marks {}% and {}%",
            marks.who(),
            size(used),
            size(marks.limit_bytes),
            marks.low_percent,
            marks.high_percent
        )
    }

    /// How much the machine or its procs use, and the mark that this is above.
    pub fn above_high(&self, used: u64) -> String {
        let marks = &self.marks;
        format!(
            "{} {}, the high mark is {} ({}% of {})",
            marks.who(),
            size(used),
            size(marks.high_bytes()),
            marks.high_percent,
            marks.limit_words()
        )
    }
}

/// `12.3M`, powers of 1024.
pub fn size(bytes: u64) -> String {
    if bytes < 1024 {
        return bytes.to_string();
    }
    let mut value = bytes as f64 / 1024.0;
    for unit in ["K", "M"] {
        if value < 999.95 {
            return format!("{value:.1}{unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1}G")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_sandbox::cgroup::Cgroups;
    use std::cell::Cell;

    #[test]
    fn what_comes_while_it_is_measured_counts_once() {
        let marks = MemoryMarks { limit_bytes: 1000, high_percent: 90, low_percent: 80, whole_machine: false };
        let pressure = Pressure::new(marks, Cgroups::detect().unwrap().open("kip-test-of-measures"));
        let reads = Cell::new(0);
        let held = || {
            reads.set(reads.get() + 1);
            if reads.get() == 1 {
                pressure.count(70);
            }
            100
        };
        assert_eq!((pressure.measure_by(held), reads.get()), (100, 2));
        let storm = || {
            reads.set(reads.get() + 1);
            pressure.count(10);
            100
        };
        assert_eq!((pressure.measure_by(storm), reads.get()), (110, 2 + MEASURES), "it does not go on for ever");
    }
}
