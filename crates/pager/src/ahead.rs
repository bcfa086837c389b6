//! Reading ahead: faults that follow each other bring more and more pages, as the kernel's own
//! read-ahead does, so that a program that goes through much memory waits for few faults. Pure.

use crate::swap::PAGE;
use std::ops::Range;

/// The most pages that one fault fetches: beyond that the disk is busy anyway, and others wait for
/// their faults.
pub(crate) const MOST: usize = 256;

/// A program may read one thing and write another at the same time.
const STREAMS: usize = 4;

/// A fault so near to a stream, in pages, belongs to it: a program may need every second page only.
const NEAR: u64 = 2;

const PAGE64: u64 = PAGE as u64;

/// Pages that faults which follow each other have fetched, and how many the last one was to fetch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Stream {
    fetched: Range<u64>,
    window: usize,
    /// One fault has followed it: it may be chance.
    followed: bool,
}

/// The last streams of faults of one address space, the newest first.
#[derive(Debug, Default)]
pub(crate) struct Streams([Stream; STREAMS]);

impl Streams {
    /// How many pages a fault is to fetch, its own included, and whether they lie before it and not
    /// behind it: `least`, or from the third that follow each other on twice as many as the one
    /// before.
    pub(crate) fn window(&mut self, address: u64, least: usize) -> (usize, bool) {
        let ahead = |stream: &Stream| (stream.fetched.end..stream.fetched.end + NEAR * PAGE64).contains(&address);
        let below = |stream: &Stream| {
            (stream.fetched.start.saturating_sub(NEAR * PAGE64)..stream.fetched.start).contains(&address)
        };
        let known = self.0.iter().position(|stream| stream.window > 0 && (ahead(stream) || below(stream)));
        let (window, down) = known.map_or((least, false), |known| {
            let stream = &self.0[known];
            let more = if stream.followed { 2 * stream.window } else { stream.window };
            (more.clamp(least, MOST.max(least)), stream.followed && below(stream))
        });
        self.0[..=known.unwrap_or(STREAMS - 1)].rotate_right(1);
        if known.is_none() {
            self.0[0].fetched = address..address + PAGE64;
        }
        (self.0[0].window, self.0[0].followed) = (window, known.is_some());
        (window, down)
    }

    /// The fault that was asked for last has fetched these pages.
    pub(crate) fn went(&mut self, pages: Range<u64>) {
        let stream = &mut self.0[0];
        stream.fetched = pages.start.min(stream.fetched.start)..pages.end.max(stream.fetched.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise hibernation: faults that follow each other, up or down, bring more and more pages
    // held by: this,
    //   `kip_pager::slots::tests::pages_before_one_are_those_whose_slots_follow_each_other`
    #[test]
    fn faults_that_follow_each_other_fetch_more_and_others_do_not() {
        let mut streams = Streams::default();
        // Up by every page, down by every second one, at the same time.
        let (mut up, mut down) = (PAGE64, 1 << 30);
        for (turn, expected) in [8, 8, 16, 32, 64, 128, 256, 256].into_iter().enumerate() {
            let pages = expected as u64 * PAGE64;
            assert_eq!(streams.window(up, 8), (expected, false));
            streams.went(up..up + pages);
            up += pages;
            assert_eq!(streams.window(down, 8), (expected, turn > 1));
            let range = if turn > 1 { down + PAGE64 - pages..down + PAGE64 } else { down..down + pages };
            down = range.start - 2 * PAGE64;
            streams.went(range);
            assert_eq!(streams.window((turn as u64 + 1) << 40, 8), (8, false), "from anywhere");
        }
    }

    #[test]
    fn a_run_that_ends_early_does_not_end_the_stream() {
        let mut streams = Streams::default();
        assert_eq!(streams.window(PAGE64, 8), (8, false));
        streams.went(PAGE64..3 * PAGE64);
        assert_eq!(streams.window(3 * PAGE64, 8), (8, false));
        streams.went(3 * PAGE64..4 * PAGE64);
        assert_eq!(streams.window(4 * PAGE64, 8), (16, false));
        streams.went(4 * PAGE64..5 * PAGE64);
        assert_eq!(streams.window(5 * PAGE64, 32), (32, false));
        assert_eq!(streams.window(99 * PAGE64, 32), (32, false), "another one");
    }
}
