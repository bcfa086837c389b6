//! What a store did: requests by kind, bytes, second tries, and how long first bytes took.
//!
//! Every handle counts for itself and for the one it came from, so that a wake can say how many
//! requests it made while others use the same store.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// First bytes that are remembered for the median.
const REMEMBERED: usize = 64;
/// Upper bounds of [`FirstByte::buckets`], seconds.
pub const FIRST_BYTE_BOUNDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
/// A median of fewer says nothing.
const ENOUGH: usize = 4;

/// Counts since the handle was made. Requests are those that were sent, failed ones and second ones
/// included; requests for credentials are not in it. Of a directory store each operation counts as
/// one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads of objects or parts of them.
    pub gets: u64,
    /// Questions for an object's size.
    pub heads: u64,
    /// Whole objects and references written.
    pub puts: u64,
    /// Parts of large objects written.
    pub parts: u64,
    /// Uploads in parts begun, completed and aborted: three kinds of request, one number.
    pub uploads: u64,
    /// Pages of listings.
    pub lists: u64,
    /// Deletions.
    pub deletes: u64,
    /// Bytes of objects that came.
    pub bytes_read: u64,
    /// Bytes of objects that were sent, those of failed tries included.
    pub bytes_written: u64,
    /// Requests to a bucket that failed in a way that may pass.
    pub failures: u64,
    /// Requests sent again because one failed.
    pub retries: u64,
    /// Streams that broke and went on with a further request; each is a retry too.
    pub resumes: u64,
    /// Second requests because a first byte was slow.
    pub hedges: u64,
    /// Those of them that answered first.
    pub hedges_won: u64,
    /// How long first bytes took.
    pub first_byte: FirstByte,
}

impl Counters {
    /// All requests together.
    pub fn requests(&self) -> u64 {
        self.gets + self.heads + self.puts + self.parts + self.uploads + self.lists + self.deletes
    }
}

/// From sending a read to its first byte. Of a read that was sent twice, the one that answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FirstByte {
    /// How many were measured.
    pub count: u64,
    /// All together.
    pub sum: Duration,
    /// How many took no longer than each of [`FIRST_BYTE_BOUNDS`] and longer than the one before.
    pub buckets: [u64; FIRST_BYTE_BOUNDS.len()],
    /// Median of the last 64.
    pub median: Option<Duration>,
    /// Longest of the last 64.
    pub longest: Option<Duration>,
}

/// What is counted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Count {
    Get,
    Head,
    Put,
    Part,
    Upload,
    List,
    Delete,
    BytesRead,
    BytesWritten,
    Failure,
    Retry,
    Resume,
    Hedge,
    HedgeWon,
    FirstByte,
}

const KINDS: usize = Count::FirstByte as usize + 1;

/// The numbers of one handle.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    numbers: [AtomicU64; KINDS],
    first_byte_us: AtomicU64,
    first_bytes: [AtomicU64; FIRST_BYTE_BOUNDS.len()],
    recent: Mutex<VecDeque<Duration>>,
    above: Option<Arc<Tally>>,
}

impl Tally {
    /// One that counts for `above` too.
    pub(crate) fn below(above: &Arc<Tally>) -> Arc<Tally> {
        Arc::new(Tally { above: Some(above.clone()), ..Tally::default() })
    }

    pub(crate) fn add(&self, what: Count, by: u64) {
        self.numbers[what as usize].fetch_add(by, Ordering::Relaxed);
        if let Some(above) = &self.above {
            above.add(what, by);
        }
    }

    pub(crate) fn one(&self, what: Count) {
        self.add(what, 1);
    }

    pub(crate) fn first_byte(&self, took: Duration) {
        self.one(Count::FirstByte);
        self.remember(took);
    }

    fn remember(&self, took: Duration) {
        self.first_byte_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
        if let Some(bucket) = FIRST_BYTE_BOUNDS.iter().position(|bound| took.as_secs_f64() <= *bound) {
            self.first_bytes[bucket].fetch_add(1, Ordering::Relaxed);
        }
        {
            let mut recent = self.recent.lock();
            if recent.len() == REMEMBERED {
                recent.pop_front();
            }
            recent.push_back(took);
        }
        if let Some(above) = &self.above {
            above.remember(took);
        }
    }

    /// The median of what the whole store saw lately, if that is enough to go by.
    pub(crate) fn usual_first_byte(&self) -> Option<Duration> {
        match &self.above {
            Some(above) => above.usual_first_byte(),
            None => {
                let sorted = self.sorted();
                (sorted.len() >= ENOUGH).then(|| sorted[sorted.len() / 2])
            }
        }
    }

    fn sorted(&self) -> Vec<Duration> {
        let mut recent: Vec<_> = self.recent.lock().iter().copied().collect();
        recent.sort_unstable();
        recent
    }

    pub(crate) fn read(&self) -> Counters {
        let number = |what: Count| self.numbers[what as usize].load(Ordering::Relaxed);
        let sorted = self.sorted();
        Counters {
            gets: number(Count::Get),
            heads: number(Count::Head),
            puts: number(Count::Put),
            parts: number(Count::Part),
            uploads: number(Count::Upload),
            lists: number(Count::List),
            deletes: number(Count::Delete),
            bytes_read: number(Count::BytesRead),
            bytes_written: number(Count::BytesWritten),
            failures: number(Count::Failure),
            retries: number(Count::Retry),
            resumes: number(Count::Resume),
            hedges: number(Count::Hedge),
            hedges_won: number(Count::HedgeWon),
            first_byte: FirstByte {
                count: number(Count::FirstByte),
                sum: Duration::from_micros(self.first_byte_us.load(Ordering::Relaxed)),
                buckets: std::array::from_fn(|n| self.first_bytes[n].load(Ordering::Relaxed)),
                median: sorted.get(sorted.len() / 2).copied(),
                longest: sorted.last().copied(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_counts_for_itself_and_for_the_one_above() {
        let above = Arc::new(Tally::default());
        let below = Tally::below(&above);
        above.one(Count::Get);
        below.add(Count::BytesRead, 5);
        below.one(Count::Get);
        assert_eq!((above.read().gets, above.read().bytes_read), (2, 5));
        assert_eq!((below.read().gets, below.read().bytes_read), (1, 5));
        assert_eq!(above.read().requests(), 2);
    }

    #[test]
    fn the_median_is_that_of_the_whole_store_and_of_late() {
        let above = Arc::new(Tally::default());
        let below = Tally::below(&above);
        assert_eq!(below.usual_first_byte(), None);
        assert_eq!(below.read().first_byte, FirstByte::default());
        for ms in [1, 9, 5, 7] {
            below.first_byte(Duration::from_millis(ms));
        }
        assert_eq!(below.usual_first_byte(), Some(Duration::from_millis(7)));
        for _ in 0..REMEMBERED {
            above.first_byte(Duration::from_millis(30));
        }
        assert_eq!(below.usual_first_byte(), Some(Duration::from_millis(30)));
        assert_eq!(below.read().first_byte.median, Some(Duration::from_millis(7)));
        assert_eq!(above.read().first_byte.count, 4 + REMEMBERED as u64);
        let all = above.read().first_byte;
        assert_eq!((all.buckets[0], all.buckets[2], all.buckets[3], all.buckets[5]), (1, 1, 2, 64));
        assert_eq!(all.sum, Duration::from_millis(22 + 30 * 64));
        assert_eq!(above.read().first_byte.longest, Some(Duration::from_millis(30)));
    }
}
