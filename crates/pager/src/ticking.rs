//! Decides which faults of a hibernated program are its ticks, and which are a wake.
//!
//! A program that ticks (a timer or a time-out of less than `kip run --tick`) goes on ticking in place
//! while it is hibernated: its threads run, every timer is on time, and the pages that a tick touches
//! come back one by one and stay. After a few ticks the program touches nothing that is out any more
//! and a tick costs what it costs a hot program. Faults are a wake when packets have come since the
//! last burst of faults, when a burst is longer than a tick of this program may be, or when more pages
//! came back than ticks can need.
//!
//! Owns counters only. A crash loses nothing: the next pager takes the program for awake.

use std::fs;
use std::time::{Duration, Instant};

/// Faults that follow each other within this time belong to one burst.
const BURST: Duration = Duration::from_millis(20);
/// Pages that ticks may bring back in one sleep at least, before the program counts as awake.
const LEAST: usize = 1024;
/// Of what is out, ticks may bring back this part at most.
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
}

impl Ticking {
    /// A process whose ticks may bring back `patience` pages in one burst, of `out` pages that are out.
    /// `came` is what [`packets`] said before the process was stopped.
    pub fn new(pid: u32, patience: usize, out: usize, came: Option<u64>) -> Ticking {
        Ticking { pid, patience, left: LEAST.max(out / SHARE), burst: 0, last: None, came }
    }

    /// Whether a fault that comes now belongs to a tick; otherwise it is the wake.
    pub fn is_tick(&mut self) -> bool {
        let pid = self.pid;
        self.judge(Instant::now(), || packets(pid))
    }

    fn judge(&mut self, now: Instant, packets: impl FnOnce() -> Option<u64>) -> bool {
        if self.last.replace(now).is_none_or(|last| now.saturating_duration_since(last) > BURST) {
            self.burst = 0;
            let came = packets();
            if std::mem::replace(&mut self.came, came) != came {
                return false;
            }
        }
        self.burst += 1;
        if self.burst > self.patience || self.left == 0 {
            return false;
        }
        self.left -= 1;
        true
    }
}

/// How many TCP segments and UDP datagrams have come into the network namespace of a process: proc_net(5).
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
        let at = start + MS * 5000;
        assert_eq!((0..80).filter(|n| ticking.judge(at + MS * *n / 10, || Some(7))).count(), 64);
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
    fn what_all_ticks_bring_back_is_limited_by_what_is_out() {
        let start = Instant::now();
        let count = |out| {
            let mut ticking = Ticking::new(1, 64, out, None);
            (0..20_000u32).take_while(|n| ticking.judge(start + MS * 30 * *n, || None)).count()
        };
        assert_eq!((count(0), count(100), count(40_000)), (LEAST, LEAST, 10_000));
    }

    #[test]
    fn reads_counters_by_their_names() {
        let snmp = "Tcp: RtoMin InSegs OutSegs\nTcp: 200 41 9\nUdp: InDatagrams NoPorts\nUdp: 5 1\n";
        assert_eq!(counted(snmp, "Ip6InReceives 3\nUdp6InDatagrams        \t2\n"), 48);
        assert_eq!(counted("", ""), 0);
        assert!(packets(std::process::id()).is_some());
    }
}
