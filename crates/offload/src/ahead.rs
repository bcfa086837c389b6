//! How far is read ahead of what a proc waits for. Pure.
//!
//! Blocks are numbered in the order in which they lie in memory. Misses that follow each other
//! there are a stream, up or down, and bring more and more, as the kernel's own read-ahead does, as
//! long as what was brought is used: which of it was, the pager says by marks in the remote page
//! file. How much of all that was read ahead of a proc was of use decides how much there may be of
//! it, and whether a miss that no stream expected brings some already. That is known from one wake
//! to the next ([`Benefit`]), as long as the daemon lives.

use std::ops::Range;

/// Blocks that are read ahead at most, 4 MiB: two requests, while what they bring is read the next
/// are on their way.
const MOST: u32 = 32;
/// A program may go through several things at a time.
const STREAMS: usize = 4;
/// Blocks by which something is known.
const ENOUGH: u32 = 16;
/// What was longer ago than so many blocks counts half.
const REMEMBERED: u32 = 512;

/// What became of what was read ahead of a proc, blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Benefit {
    pub(crate) used: u32,
    pub(crate) unused: u32,
}

impl Benefit {
    fn add(&mut self, used: u32, unused: u32) {
        (self.used, self.unused) = (self.used + used, self.unused + unused);
        while self.used + self.unused > REMEMBERED {
            (self.used, self.unused) = (self.used / 2, self.unused / 2);
        }
    }

    /// In percent.
    fn share(self) -> Option<u32> {
        let all = self.used + self.unused;
        (all >= ENOUGH).then(|| self.used * 100 / all)
    }

    fn most(self) -> u32 {
        match self.share() {
            None | Some(50..) => MOST,
            Some(25..) => 8,
            Some(_) => 1,
        }
    }

    /// Behind a miss that no stream expected.
    fn first(self) -> u32 {
        match self.share() {
            Some(90..) => 4,
            Some(75..) => 1,
            _ => 0,
        }
    }
}

/// Misses that follow each other.
#[derive(Debug, Clone, Default)]
struct Stream {
    /// Blocks that were brought last beyond those that were waited for, and the ones before them.
    last: Range<u32>,
    before: Range<u32>,
    /// Not known before the second miss.
    down: Option<bool>,
    window: u32,
    /// Blocks that were read ahead, and of which it is not known yet whether they were used.
    ahead: Vec<u32>,
}

impl Stream {
    /// Whether a miss goes on with it, and if so, whether down. A miss within what was brought last
    /// is of a reader that has caught up with what comes.
    fn followed_by(&self, missed: &Range<u32>) -> Option<bool> {
        if self.before.is_empty() {
            return None;
        }
        let below = if self.down.is_some() { self.last.clone() } else { self.before.start..self.before.start };
        let up = missed.start >= self.last.start && missed.start <= self.last.end + 1;
        let down = missed.end <= below.end && missed.end + 1 >= below.start;
        match self.down {
            None if up => Some(false),
            None => down.then_some(true),
            Some(goes_down) => (if goes_down { down } else { up }).then_some(goes_down),
        }
    }

    /// They come already, with those before the last.
    fn covers(&self, missed: &Range<u32>) -> bool {
        self.before.start <= missed.start && missed.end <= self.before.end
    }

    /// Judges the blocks that the reader has passed by now: how many were used, and how many not.
    fn judge(&mut self, passed: impl Fn(u32) -> bool, used: &impl Fn(u32) -> bool) -> (u32, u32) {
        let (judged, left): (Vec<u32>, Vec<u32>) = self.ahead.iter().copied().partition(|block| passed(*block));
        self.ahead = left;
        let good = judged.iter().filter(|block| used(**block)).count() as u32;
        (good, judged.len() as u32 - good)
    }
}

/// The last streams of a proc, the newest first.
#[derive(Debug, Default)]
pub(crate) struct Streams([Stream; STREAMS]);

impl Streams {
    /// What is to be read ahead, now that `missed` is waited for. `total`: how many blocks there
    /// are. `used` says whether a block that is here was used.
    pub(crate) fn miss(
        &mut self,
        missed: Range<u32>,
        total: u32,
        benefit: &mut Benefit,
        used: impl Fn(u32) -> bool,
    ) -> Range<u32> {
        if self.0.iter().any(|stream| stream.covers(&missed)) {
            return missed.end..missed.end;
        }
        let found = self.0.iter().enumerate().find_map(|(at, s)| s.followed_by(&missed).map(|down| (at, down)));
        let Some((at, down)) = found else {
            let (good, bad) = self.0[STREAMS - 1].judge(|_| true, &used);
            benefit.add(good, bad);
            self.0.rotate_right(1);
            let window = benefit.first();
            let last = missed.end..(missed.end + window).min(total);
            self.0[0] =
                Stream { last: last.clone(), before: missed, window, ahead: last.clone().collect(), down: None };
            return last;
        };
        self.0[..=at].rotate_right(1);
        let stream = &mut self.0[0];
        let (good, bad) = stream.judge(|block| if down { block >= missed.end } else { block < missed.start }, &used);
        benefit.add(good, bad);
        let window = match good {
            good if good >= 3 * bad => stream.window * 2,
            good if good >= bad => stream.window,
            _ => stream.window / 2,
        };
        stream.window = window.clamp(1, MOST).min(benefit.most());
        let ahead = if down {
            let last = if stream.down.is_some() { &stream.last } else { &stream.before };
            let end = missed.start.min(last.start);
            stream.before = end..last.end;
            end.saturating_sub(stream.window)..end
        } else {
            let start = missed.end.max(stream.last.end);
            stream.before = stream.last.start.min(missed.start)..start;
            start.min(total)..(start + stream.window).min(total)
        };
        (stream.last, stream.down) = (ahead.clone(), Some(down));
        stream.ahead.extend(ahead.clone());
        ahead
    }

    /// At the end: what was not used by now was not of use.
    pub(crate) fn end(&mut self, benefit: &mut Benefit, used: impl Fn(u32) -> bool) {
        for stream in &mut self.0 {
            let (good, bad) = stream.judge(|_| true, &used);
            benefit.add(good, bad);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A proc that needs these blocks in this order: what was fetched, by how many misses, and what
    /// is known then.
    fn read(order: impl IntoIterator<Item = u32>, total: u32, benefit: &mut Benefit) -> (BTreeSet<u32>, u32) {
        let (mut streams, mut here, mut touched, mut misses) =
            (Streams::default(), BTreeSet::new(), BTreeSet::new(), 0);
        for block in order {
            if here.insert(block) {
                misses += 1;
                here.extend(streams.miss(block..block + 1, total, benefit, |block| touched.contains(&block)));
            }
            touched.insert(block);
        }
        streams.end(benefit, |block| touched.contains(&block));
        (here, misses)
    }

    /// Without two that are equal or near each other too often.
    fn scattered(count: u32, total: u32) -> Vec<u32> {
        (0..count).map(|n| (u64::from(n) * 0x9e37_79b1 % u64::from(total)) as u32).collect()
    }

    #[test]
    fn what_is_read_through_comes_in_few_goes_and_not_much_beyond() {
        for order in [(0..1000).collect::<Vec<u32>>(), (0..1000).rev().collect()] {
            let mut benefit = Benefit::default();
            let (here, misses) = read(order.clone(), 1200, &mut benefit);
            assert!(here.len() < 1070 && misses <= 40, "{} blocks by {misses} misses", here.len());
            assert!(benefit.share() > Some(70), "{benefit:?}");
            // The next time it is known that it is of use.
            let (_, again) = read(order, 1200, &mut benefit);
            assert!(again <= misses, "{again} and {misses}");
        }
    }

    #[test]
    fn what_is_needed_here_and_there_comes_alone() {
        let mut benefit = Benefit::default();
        let order = scattered(300, 100_000);
        let (here, _) = read(order, 100_000, &mut benefit);
        assert!(here.len() <= 310, "{} blocks for 300", here.len());
    }

    /// Pairs of neighbours, here and there: each looks as if more would follow, and none does.
    #[test]
    fn what_was_of_no_use_is_given_up_and_for_the_next_wake_too() {
        let mut benefit = Benefit::default();
        let order: Vec<u32> = scattered(300, 50_000).into_iter().flat_map(|n| [2 * n, 2 * n + 1]).collect();
        let (here, _) = read(order.clone(), 100_000, &mut benefit);
        assert!(here.len() <= 950, "{} blocks for 600", here.len());
        assert!(benefit.share() < Some(10), "{benefit:?}");
        let mut known = Benefit { used: 500, unused: 12 };
        let (here, _) = read(order, 100_000, &mut known);
        assert!(here.len() <= 1200, "what was of use is tried for a while: {} blocks for 600", here.len());
        // Down to the one that belongs to each.
        assert_eq!((known.first(), Benefit { used: 500, unused: 12 }.first()), (1, 4));
    }

    #[test]
    fn several_are_gone_through_at_the_same_time() {
        let mut benefit = Benefit::default();
        let order = (0..300).flat_map(|n| [n, 2000 + n, 5000 - n]);
        let (here, misses) = read(order, 10_000, &mut benefit);
        assert!(here.len() < 1000 && misses < 50, "{} blocks by {misses} misses", here.len());
    }

    /// A reader that has caught up with what is on its way has the next block brought, once.
    #[test]
    fn what_comes_already_is_not_asked_for_again() {
        let (mut streams, mut benefit) = (Streams::default(), Benefit::default());
        let mut miss = |block: u32| streams.miss(block..block + 1, 1000, &mut benefit, |_| true);
        assert_eq!([miss(7), miss(7), miss(8)], [8..8, 8..8, 9..10]);
        assert_eq!([miss(9), miss(10), miss(10)], [10..12, 12..16, 11..11]);
        assert_eq!([miss(11), miss(12), miss(14)], [12..12, 16..24, 15..15]);
        assert_eq!(miss(995), 996..996);
        assert_eq!([miss(996), miss(998), miss(999)], [997..998, 999..1000, 1000..1000]);
    }
}
