//! When a thread was last on a CPU.
//!
//! The scheduler stamps `se.exec_start` (proc_pid_sched(5)) by a clock that each CPU has of its
//! own, because it leaves out what interrupts and the hypervisor took from that CPU. So the clock's
//! distance from CLOCK_MONOTONIC is measured on the CPU in question, by a short visit. The distance
//! grows by whatever is taken from the CPU while a thread waits, which makes the thread look as if
//! it had waited less; never more. Where [`watch`] runs, the distance is that of the first visit
//! after the stamp: the wait looks shorter by what was taken between those two at most.

use crate::kernel_file;
use parking_lot::Mutex;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::Duration;

/// Added to when a thread last ran, for what the measurement may miss, nanoseconds.
const SAFETY_NS: i64 = 500_000;

/// Between looks at how much was taken from each CPU.
const WATCH_EVERY: Duration = Duration::from_millis(200);
/// Visits of one CPU that are remembered, 128 KiB of them: those of half an hour if something is
/// taken from it all the time.
const MOST_VISITS: usize = 1 << 13;

/// When a CPU was visited, and how far its clock was behind then, nanoseconds.
type Visit = (i64, i64);

/// The visits of each CPU, the oldest first.
static VISITS: Mutex<BTreeMap<usize, VecDeque<Visit>>> = Mutex::new(BTreeMap::new());

/// Visits each CPU whenever something was taken from it, on a thread of its own, for as long as the
/// process lives.
///
/// # Errors
/// There can be no other thread.
pub fn watch() -> io::Result<()> {
    let watch = || {
        let mut seen = BTreeMap::new();
        loop {
            for (cpu, taken) in taken(&kernel_file::read_to_string("/proc/stat").unwrap_or_default()) {
                if seen.insert(cpu, taken) != Some(taken) {
                    visit(cpu);
                }
            }
            std::thread::sleep(WATCH_EVERY);
        }
    };
    std::thread::Builder::new().name("kip-cpu-clocks".to_owned()).spawn(watch).map(drop)
}

/// What interrupts and the hypervisor took from each CPU, ticks: irq, softirq and steal of
/// proc_stat(5).
fn taken(text: &str) -> Vec<(usize, u64)> {
    let of = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split(' ');
        let cpu = words.next()?.parse().ok()?;
        Some((cpu, words.skip(5).take(3).filter_map(|word| word.parse::<u64>().ok()).sum()))
    };
    text.lines().filter_map(of).collect()
}

/// Remembers a visit.
fn note(visits: &mut VecDeque<Visit>, visit: Visit) {
    if visits.len() == MOST_VISITS {
        visits.pop_front();
    }
    visits.push_back(visit);
}

/// When the clock of a CPU that was visited so often showed `stamp`, or a little later, nanoseconds
/// of CLOCK_MONOTONIC.
fn when(stamp: i64, visits: &VecDeque<Visit>) -> Option<i64> {
    let first = visits.partition_point(|(at, behind)| at - behind < stamp);
    visits.get(first).or(visits.back()).map(|(_, behind)| stamp + behind)
}

/// Distances of the CPUs' clocks, each measured when it is first needed.
#[derive(Debug, Default)]
pub struct CpuClocks(BTreeMap<usize, Option<()>>);

impl CpuClocks {
    /// When the thread was last on a CPU, nanoseconds of CLOCK_MONOTONIC; never too early. None if
    /// that cannot be told.
    pub fn last_ran(&mut self, tid: u32) -> Option<i64> {
        let stamp = stable_stamp(|| kernel_file::read_to_string(format!("/proc/{tid}/sched")).ok())?;
        let cpu = last_cpu(&kernel_file::read_to_string(format!("/proc/{tid}/stat")).ok()?)?;
        (*self.0.entry(cpu).or_insert_with(|| visit(cpu)))?;
        let visits = VISITS.lock();
        Some(when(stamp, visits.get(&cpu)?)? + SAFETY_NS)
    }
}

/// Finds out how far the scheduler's clock of that CPU is behind CLOCK_MONOTONIC; none if that
/// cannot be told.
fn visit(cpu: usize) -> Option<()> {
    if cpu >= CpuSet::MAX_CPU {
        return None;
    }
    let home = sched_getaffinity(None).ok()?;
    let mut there = CpuSet::new();
    there.set(cpu);
    sched_setaffinity(None, &there).ok()?;
    // Yielding stamps this thread; the clock is read after that, so that the distance is not too
    // short.
    std::thread::yield_now();
    let stamp = kernel_file::read_to_string("/proc/thread-self/sched").ok().and_then(|text| exec_start(&text));
    let now = monotonic_ns();
    // It was allowed a moment ago; if not any more, the thread goes on from where it is.
    let _ = sched_setaffinity(None, &home);
    let behind = now - stamp?;
    let mut visits = VISITS.lock();
    note(visits.entry(cpu).or_default(), (now, behind));
    Some(())
}

/// CLOCK_MONOTONIC, nanoseconds.
pub fn monotonic_ns() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// The stamp of a thread, once it has one: the scheduler takes it away from a thread that it moves
/// to another CPU, until the thread runs there. Taken for a time it would be the machine's start,
/// and a time-out of any length would have passed.
fn stable_stamp(read: impl Fn() -> Option<String>) -> Option<i64> {
    const READS: u32 = 50;
    const BETWEEN: Duration = Duration::from_millis(1);
    for _ in 0..READS {
        match exec_start(&read()?)? {
            0 => std::thread::sleep(BETWEEN),
            stamp => return Some(stamp),
        }
    }
    None
}

/// Whether a thread has no stamp, though it sleeps. That of one that is moved while it is about to
/// sleep, but is still counted with those that run, is gone until it runs again, however long it
/// sleeps: Linux 6.12 and later.
pub fn is_undated(tid: u32) -> bool {
    let read = |name: &str| kernel_file::read_to_string(format!("/proc/{tid}/{name}")).unwrap_or_default();
    exec_start(&read("sched")) == Some(0) && read("status").contains("\nState:\tS")
}

fn exec_start(text: &str) -> Option<i64> {
    let value = text.lines().find(|l| l.starts_with("se.exec_start"))?.split(':').nth(1)?.trim();
    let (ms, ns) = value.split_once('.')?;
    Some(ms.parse::<i64>().ok()? * 1_000_000 + ns.parse::<i64>().ok()?)
}

/// Field 39 of proc_pid_stat(5), counted behind the program's name, which may hold anything.
fn last_cpu(stat: &str) -> Option<usize> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(39 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn reads_the_kernel_s_words() {
        let text = "cat (1, #threads: 1)\n----\nse.exec_start      :       1736492.599866\n";
        assert_eq!(exec_start(text), Some(1_736_492_599_866));
        let (moved, reads) = ("se.exec_start      :             0.000000\n", std::cell::Cell::new(0));
        let read = |until: u32| {
            reads.set(reads.get() + 1);
            Some(if reads.get() < until { moved } else { text }.to_owned())
        };
        assert_eq!(stable_stamp(|| read(3)), Some(1_736_492_599_866), "it has run there");
        assert_eq!(stable_stamp(|| read(1_000)), None, "it is moved for good");
        let fields: Vec<String> = (4..=52).map(|n| n.to_string()).collect();
        assert_eq!(last_cpu(&format!("7 (a) b) S {}", fields.join(" "))), Some(39));
    }

    // promise waking: since when a thread waits is known although time is taken from its processor
    //   meanwhile
    // held by: this, `kip_sys::ran::tests::reads_what_was_taken_from_each_cpu`
    #[test]
    fn what_is_taken_after_a_visit_does_not_count() {
        let mut visits = VecDeque::from([(1_000, 100), (2_000, 150), (3_000, 450)]);
        // Up to 900, 1850 and 2550 by the CPU's clock.
        assert_eq!(when(800, &visits), Some(900));
        assert_eq!(when(900, &visits), Some(1_000));
        assert_eq!(when(901, &visits), Some(1_051));
        assert_eq!(when(2_000, &visits), Some(2_450), "at most what was taken until the next visit");
        assert_eq!(when(9_000, &visits), Some(9_450));
        assert_eq!(when(1, &VecDeque::new()), None);
        visits.extend((0..MOST_VISITS as i64 - 3).map(|n| (4_000 + n, 450)));
        note(&mut visits, (1_000_000, 500));
        assert_eq!((visits.len(), visits[0]), (MOST_VISITS, (2_000, 150)));
    }

    #[test]
    fn reads_what_was_taken_from_each_cpu() {
        let text = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\ncpu11 1 2 3 4 5 0 0 1 0 0\nintr 5\n";
        assert_eq!(taken(text), [(0, 21), (11, 1)]);
    }

    /// A thread that has slept for 50 ms on each CPU was last there about then, and not before.
    #[test]
    fn a_sleeper_s_time_is_known_on_every_cpu() {
        let home = sched_getaffinity(None).unwrap();
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| home.is_set(*cpu)) {
            let (sender, receiver) = std::sync::mpsc::channel();
            let (go, wait) = std::sync::mpsc::channel::<()>();
            let sleeper = std::thread::spawn(move || {
                let mut there = CpuSet::new();
                there.set(cpu);
                sched_setaffinity(None, &there).unwrap();
                sender.send((rustix::thread::gettid().as_raw_nonzero().get() as u32, monotonic_ns())).unwrap();
                wait.recv().unwrap();
            });
            let (tid, slept_at) = receiver.recv().unwrap();
            std::thread::sleep(Duration::from_millis(50));
            let ran = CpuClocks::default().last_ran(tid).unwrap();
            go.send(()).unwrap();
            sleeper.join().unwrap();
            assert!((0..30_000_000).contains(&(ran - slept_at)), "CPU {cpu}: {} ns off", ran - slept_at);
        }
        assert_eq!(sched_getaffinity(None).unwrap(), home, "back where it was");
    }
}
