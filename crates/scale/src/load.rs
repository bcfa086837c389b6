//! What procs do, from two looks at what they have used.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

/// What a proc has used by one moment, and what waits for it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadCounters {
    /// CPU time of all its processes, those that have ended included, nanoseconds.
    pub cpu_ns: u64,
    /// Of each thread, by its id, nanoseconds.
    pub threads: HashMap<u32, u64>,
    /// Connections that it has not accepted.
    pub queued: u32,
}

/// What a proc did lately.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Of what it can do, 0 to 1: its CPU time of what it may use, or its busiest thread's of one
    /// processor, whichever is more, for many servers have one thread that works.
    pub busy: f64,
    /// Connections that it has not accepted.
    pub queued: u32,
}

impl LoadCounters {
    /// What processes have used: proc_pid_schedstat(5). `cpu_ns` is that of their control group,
    /// `queued` that of their listening sockets.
    pub fn read(pids: &[u32], cpu_ns: u64, queued: u32) -> LoadCounters {
        let mut used = LoadCounters { cpu_ns, queued, ..LoadCounters::default() };
        for pid in pids {
            let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
            for tid in tasks.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
                let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).unwrap_or_default();
                let ran = text.split(' ').next().and_then(|ns| ns.parse().ok());
                used.threads.extend(ran.map(|ns| (tid, ns)));
            }
        }
        used
    }

    /// What was done from an earlier look on. `cpus` is how much CPU time there is for it a second.
    pub fn since(&self, before: &LoadCounters, passed: Duration, cpus: f64) -> Load {
        let seconds = passed.as_secs_f64().max(1e-3);
        let share = |ns: u64, cpus: f64| ns as f64 / 1e9 / seconds / cpus.max(0.01);
        let of_all = share(self.cpu_ns.saturating_sub(before.cpu_ns), cpus);
        let ran = |(tid, ns): (&u32, &u64)| ns.saturating_sub(before.threads.get(tid).copied().unwrap_or(*ns));
        let busiest = self.threads.iter().map(ran).max().unwrap_or(0);
        Load { busy: of_all.max(share(busiest, cpus.min(1.0))).min(1.0), queued: self.queued }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise scaling: load is the CPU time against the limit, or the busiest thread's against a
    //   processor
    #[test]
    fn the_busiest_thread_counts_where_there_is_one() {
        let (second, before) = (Duration::from_secs(1), LoadCounters { cpu_ns: 5, ..LoadCounters::default() });
        let after = |cpu_ms: u64, thread_ms: u64| LoadCounters {
            cpu_ns: 5 + cpu_ms * 1_000_000,
            threads: HashMap::from([(1, 7 + thread_ms * 1_000_000), (2, 900_000_000)]),
            ..LoadCounters::default()
        };
        let before = LoadCounters { threads: HashMap::from([(1, 7)]), ..before };
        let busy = |after: LoadCounters, cpus: f64| (after.since(&before, second, cpus).busy * 1000.0).round() as u64;
        assert_eq!(busy(after(500, 0), 2.0), 250, "a thread that is new says nothing yet");
        assert_eq!(busy(after(500, 500), 2.0), 500);
        assert_eq!(busy(after(100, 100), 0.1), 1000, "that is all that it may");
        assert_eq!(busy(after(5000, 0), 2.0), 1000);
    }

    #[test]
    fn threads_are_counted_one_by_one() {
        let used = LoadCounters::read(&[std::process::id()], 1, 2);
        assert!(used.threads.values().any(|ns| *ns > 0), "{used:?}");
        assert_eq!(LoadCounters::read(&[], 1, 2), LoadCounters { cpu_ns: 1, queued: 2, ..LoadCounters::default() });
    }
}
