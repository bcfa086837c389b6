//! When a thread was last on a CPU.
//!
//! The scheduler stamps `se.exec_start` (proc_pid_sched(5)) by a clock that each CPU has of its own, because it leaves
//! out what interrupts and the hypervisor took from that CPU. So the clock's distance from CLOCK_MONOTONIC is measured
//! on the CPU in question, by a short visit. What is stolen while a thread waits makes it look as if it had waited
//! less; never more.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::fs;

/// Added to when a thread last ran, for what the measurement may miss, nanoseconds.
const SAFETY_NS: i64 = 500_000;

/// Distances of the CPUs' clocks, each measured when it is first needed.
#[derive(Debug, Default)]
pub struct CpuClocks(BTreeMap<usize, Option<i64>>);

impl CpuClocks {
    /// When the thread was last on a CPU, nanoseconds of CLOCK_MONOTONIC; never too early. None if that cannot be told.
    pub fn last_ran(&mut self, tid: u32) -> Option<i64> {
        let stamp = exec_start(&fs::read_to_string(format!("/proc/{tid}/sched")).ok()?)?;
        let cpu = last_cpu(&fs::read_to_string(format!("/proc/{tid}/stat")).ok()?)?;
        let offset = *self.0.entry(cpu).or_insert_with(|| visit(cpu));
        Some(stamp + offset? + SAFETY_NS)
    }
}

/// CLOCK_MONOTONIC minus the scheduler's clock of that CPU, nanoseconds.
fn visit(cpu: usize) -> Option<i64> {
    if cpu >= CpuSet::MAX_CPU {
        return None;
    }
    let home = sched_getaffinity(None).ok()?;
    let mut there = CpuSet::new();
    there.set(cpu);
    sched_setaffinity(None, &there).ok()?;
    // Yielding stamps this thread; the clock is read after that, so that the distance is not too short.
    std::thread::yield_now();
    let stamp = fs::read_to_string("/proc/thread-self/sched").ok().and_then(|text| exec_start(&text));
    let now = monotonic_ns();
    // It was allowed a moment ago; if not any more, the thread goes on from where it is.
    let _ = sched_setaffinity(None, &home);
    Some(now - stamp?)
}

/// CLOCK_MONOTONIC, nanoseconds.
pub fn monotonic_ns() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
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
        let fields: Vec<String> = (4..=52).map(|n| n.to_string()).collect();
        assert_eq!(last_cpu(&format!("7 (a) b) S {}", fields.join(" "))), Some(39));
    }

    /// A thread that has slept for 50 ms on each CPU was last there about then, and not before.
    #[test]
    fn a_sleeper_s_time_is_known_on_every_cpu() {
        let home = sched_getaffinity(None).unwrap();
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| home.is_set(*cpu)) {
            let (tell, told) = std::sync::mpsc::channel();
            let (go, wait) = std::sync::mpsc::channel::<()>();
            let sleeper = std::thread::spawn(move || {
                let mut there = CpuSet::new();
                there.set(cpu);
                sched_setaffinity(None, &there).unwrap();
                tell.send((rustix::thread::gettid().as_raw_nonzero().get() as u32, monotonic_ns())).unwrap();
                wait.recv().unwrap();
            });
            let (tid, slept_at) = told.recv().unwrap();
            std::thread::sleep(Duration::from_millis(50));
            let ran = CpuClocks::default().last_ran(tid).unwrap();
            go.send(()).unwrap();
            sleeper.join().unwrap();
            assert!((0..30_000_000).contains(&(ran - slept_at)), "CPU {cpu}: {} ns off", ran - slept_at);
        }
        assert_eq!(sched_getaffinity(None).unwrap(), home, "back where it was");
    }
}
