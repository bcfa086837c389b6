//! Decides which faults of a hibernated program are its ticks, and which are a wake.
//!
//! A program that ticks (a timer or a time-out of less than `kip run --tick`) goes on ticking in
//! place while it is hibernated: its threads run, every timer is on time, and the pages that a tick
//! touches come back one by one and stay. After a few ticks the program touches nothing that is out
//! any more and a tick costs what it costs a hot program. Faults are a wake when packets have come
//! since the last burst of faults, when a burst is longer than a tick of this program may be, or
//! when more pages came back than ticks can need.
//!
//! What the ticks of one sleep touched stays where it is in the next ([`Touched`]), so that already
//! the first tick of that is on time.
//!
//! Owns counters and addresses only. A crash loses nothing that is needed: the next pager takes the
//! program for awake.

use crate::swap::PAGE;
use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Faults that follow each other within this time belong to one burst.
const BURST: Duration = Duration::from_millis(20);
/// Pages that ticks may fetch back in one sleep at least, before the program counts as awake.
const LEAST: usize = 1024;
/// Of what is out, ticks may fetch back this part at most.
const SHARE: usize = 4;

/// One address space of a program that ticks while it is hibernated.
#[derive(Debug)]
pub struct Ticking {
    pid: u32,
    patience: usize,
    left: usize,
    burst: usize,
    last: Option<Instant>,
    came: Option<u64>,
    is_long: bool,
}

impl Ticking {
    /// A process whose ticks may fetch back `patience` pages in one burst, of `out` pages that are
    /// out. `came` is what [`packets`] said before the process was stopped.
    pub fn new(pid: u32, patience: usize, out: usize, came: Option<u64>) -> Ticking {
        Ticking { pid, patience, left: LEAST.max(out / SHARE), burst: 0, last: None, came, is_long: false }
    }

    /// Whether a fault at `page` that comes now belongs to a tick, which `touched` notes; otherwise
    /// it is the wake.
    pub fn is_tick(&mut self, page: u64, touched: &mut Touched) -> bool {
        let pid = self.pid;
        let tick = self.judge(Instant::now(), || packets(pid));
        touched.saw(page, tick, self.burst <= 1);
        tick
    }

    /// Whether a burst begins with the fault that was judged last.
    pub fn begins(&self) -> bool {
        self.burst == 1
    }

    /// Whether the fault that was taken for the wake was a tick all the same, which needed more
    /// than it may: no packet has come.
    pub fn is_long(&self) -> bool {
        self.is_long
    }

    /// A fault that was judged has been answered: what follows it now follows it at once, however
    /// long the disk took.
    pub fn answered(&mut self) {
        self.last = self.last.map(|_| Instant::now());
    }

    fn judge(&mut self, now: Instant, packets: impl Fn() -> Option<u64>) -> bool {
        let begins = self.last.replace(now).is_none_or(|last| now.saturating_duration_since(last) > BURST);
        if begins {
            self.burst = 0;
            let came = packets();
            if std::mem::replace(&mut self.came, came) != came {
                return false;
            }
        }
        self.burst += 1;
        if self.burst > self.patience || self.left == 0 {
            // A packet may have come since the burst began.
            self.is_long = begins || packets() == self.came;
            return false;
        }
        self.left -= 1;
        true
    }
}

/// Pages that the ticks of a program touch.
#[derive(Debug, Default)]
pub struct Touched {
    pages: BTreeSet<u64>,
    /// Those of the burst that goes on, which may turn out to be the wake.
    burst: Vec<u64>,
    turn: u64,
}

impl Touched {
    /// The most that are known, 4 MiB: what ticks may fetch back at least, they may keep.
    const MOST: usize = LEAST;
    /// A page is taken out in one of so many sleeps, so that one that is touched no more does not
    /// stay for good.
    const TAKEN_OUT_ONCE_IN: u64 = 32;

    /// Notes a fault: of a tick or of the wake, and whether a burst begins with it.
    fn saw(&mut self, page: u64, tick: bool, begins: bool) {
        if !tick {
            self.burst.clear();
            return;
        }
        if begins {
            self.end_burst();
        }
        self.burst.push(page);
    }

    fn end_burst(&mut self) {
        let room = Self::MOST.saturating_sub(self.pages.len());
        self.pages.extend(self.burst.drain(..).take(room));
    }

    /// The pages that stay in the sleep that begins.
    pub fn stay(&mut self) -> BTreeSet<u64> {
        self.end_burst();
        self.turn += 1;
        let turn = self.turn % Self::TAKEN_OUT_ONCE_IN;
        let mixed = |page: u64| (page / PAGE as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.pages.retain(|page| mixed(*page) % Self::TAKEN_OUT_ONCE_IN != turn);
        self.pages.clone()
    }
}

/// A range without some pages.
pub(crate) fn without(range: Range<u64>, pages: &BTreeSet<u64>) -> Vec<Range<u64>> {
    let (mut parts, mut start) = (Vec::new(), range.start);
    for page in pages.range(range.clone()) {
        parts.push(start..*page);
        start = page + PAGE as u64;
    }
    parts.push(start..range.end);
    parts.retain(|part| part.start < part.end);
    parts
}

/// How many TCP segments and UDP datagrams have come into the network namespace of a process:
/// proc_net(5).
pub fn packets(pid: u32) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/net/{name}")).ok();
    Some(counted(&read("snmp")?, &read("snmp6").unwrap_or_default()))
}

fn counted(snmp: &str, snmp6: &str) -> u64 {
    let field = |protocol: &str, name: &str| {
        let mut lines = snmp.lines().filter_map(|line| line.strip_prefix(protocol));
        let place = lines.next()?.split_ascii_whitespace().position(|word| word == name)?;
        lines.next()?.split_ascii_whitespace().nth(place)?.parse::<u64>().ok()
    };
    let six = snmp6.lines().find_map(|line| line.strip_prefix("Udp6InDatagrams")?.trim().parse::<u64>().ok());
    [field("Tcp:", "InSegs"), field("Udp:", "InDatagrams"), six].into_iter().flatten().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_long_burst_is_a_wake_and_ticks_apart_are_not() {
        let start = Instant::now();
        let mut ticking = Ticking::new(1, 64, 0, Some(7));
        for tick in 0..10 {
            let at = start + MS * 100 * tick;
            assert!((0..60).all(|n| ticking.judge(at + MS * n / 10, || Some(7))), "tick {tick}");
        }
        // What it touches more is a wake by a tick, or by a packet that came meanwhile.
        for (after_s, came) in [(5, 7), (6, 8)] {
            let at = start + MS * 1000 * after_s;
            let ticks = (0..65).filter(|n| ticking.judge(at + MS * *n / 10, || Some(if *n < 64 { 7 } else { came })));
            assert_eq!(ticks.count(), 64);
            assert_eq!(ticking.is_long(), came == 7);
        }
    }

    #[test]
    fn what_packets_have_come_for_is_a_wake_at_its_first_touch() {
        let start = Instant::now();
        let mut ticking = Ticking::new(1, 64, 0, Some(7));
        assert!(ticking.judge(start, || Some(7)));
        assert!(ticking.judge(start + MS, || panic!("it is asked once a burst")));
        assert!(!ticking.judge(start + MS * 50, || Some(8)));
        assert!(!Ticking::new(1, 64, 0, Some(7)).judge(start, || Some(9)), "while it was stopped");
        assert!(Ticking::new(1, 64, 0, None).judge(start, || None), "what cannot be read says nothing");
    }

    #[test]
    fn what_all_ticks_fetch_back_is_limited_by_what_is_out() {
        let start = Instant::now();
        let count = |out| {
            let mut ticking = Ticking::new(1, 64, out, None);
            (0..20_000u32).take_while(|n| ticking.judge(start + MS * 30 * *n, || None)).count()
        };
        assert_eq!((count(0), count(100), count(40_000)), (LEAST, LEAST, 10_000));
    }

    #[test]
    fn what_ticks_touch_stays_and_what_a_wake_touches_does_not() {
        let page = |n: u64| n * PAGE as u64;
        let mut touched = Touched::default();
        assert!(touched.pages.is_empty() && touched.burst.is_empty());
        // Two ticks, and a wake that looked like one at first.
        [(1, true, true), (2, true, false), (3, true, true), (4, true, true), (5, true, false), (6, false, false)]
            .into_iter()
            .for_each(|(n, tick, begins)| touched.saw(page(n), tick, begins));
        let stay = touched.stay();
        assert!(stay.len() >= 2 && stay.is_subset(&BTreeSet::from([1, 2, 3].map(page))), "{stay:?}");
        // A page that no tick touches any more falls out, and as many as there is room for stay.
        (0..Touched::TAKEN_OUT_ONCE_IN).for_each(|_| drop(touched.stay()));
        assert!(touched.stay().is_empty());
        (0..5000).for_each(|n| touched.saw(page(n), true, n % 50 == 0));
        let stay = touched.stay().len();
        assert!((Touched::MOST * 9 / 10..=Touched::MOST).contains(&stay), "{stay}");
    }

    #[test]
    fn ranges_are_cut_at_what_stays() {
        let page = |n: u64| n * PAGE as u64;
        let stay = BTreeSet::from([1, 4, 5, 9].map(page));
        let cut =
            |from, to| without(page(from)..page(to), &stay).into_iter().map(|r| r.start / page(1)..r.end / page(1));
        assert_eq!(cut(0, 8).collect::<Vec<_>>(), [0..1, 2..4, 6..8]);
        assert_eq!(cut(4, 6).count(), 0);
        assert_eq!(cut(6, 9).next(), Some(6..9));
    }

    #[test]
    fn reads_counters_by_their_names() {
        let snmp = "Tcp: RtoMin InSegs OutSegs\nTcp: 200 41 9\nUdp: InDatagrams NoPorts\nUdp: 5 1\n";
        assert_eq!(counted(snmp, "Ip6InReceives 3\nUdp6InDatagrams        \t2\n"), 48);
        assert_eq!(counted("", ""), 0);
        assert!(packets(std::process::id()).is_some());
    }
}
