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
    /// Pages that were read again after they had been pushed out of memory.
    pub refaults: u64,
}

/// What a proc did lately.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Of what it can do, 0 to 1: its CPU time of what it may use, or its busiest thread's of one
    /// processor, whichever is more, for many servers have one thread that works.
    pub busy: f64,
    /// Connections that it has not accepted.
    pub queued: u32,
    /// Pages that it had to read again, a second.
    pub refaults: f64,
}

impl LoadCounters {
    /// What processes have used, and what waits at their listening sockets: proc_pid_stat(5),
    /// proc_pid_net(5). `cpu_ns` and `refaults` are those of their control group.
    pub fn read(pids: &[u32], cpu_ns: u64, refaults: u64) -> LoadCounters {
        let mut usage = LoadCounters { cpu_ns, refaults, ..LoadCounters::default() };
        for pid in pids {
            let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
            for tid in tasks.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
                let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).unwrap_or_default();
                let ran = text.split(' ').next().and_then(|ns| ns.parse().ok());
                usage.threads.extend(ran.map(|ns| (tid, ns)));
            }
        }
        // All are in one network namespace.
        for pid in pids {
            let tables = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")));
            if let [Ok(v4), Ok(v6)] = tables {
                usage.queued = queued(&v4) + queued(&v6);
                break;
            }
        }
        usage
    }

    /// What was done from an earlier look on. `cpus` is how much CPU time there is for it a second.
    pub fn since(&self, before: &LoadCounters, passed: Duration, cpus: f64) -> Load {
        let seconds = passed.as_secs_f64().max(1e-3);
        let share = |ns: u64, cpus: f64| ns as f64 / 1e9 / seconds / cpus.max(0.01);
        let of_all = share(self.cpu_ns.saturating_sub(before.cpu_ns), cpus);
        let ran = |(tid, ns): (&u32, &u64)| ns.saturating_sub(before.threads.get(tid).copied().unwrap_or(*ns));
        let busiest = self.threads.iter().map(ran).max().unwrap_or(0);
        Load {
            busy: of_all.max(share(busiest, cpus.min(1.0))).min(1.0),
            queued: self.queued,
            refaults: self.refaults.saturating_sub(before.refaults) as f64 / seconds,
        }
    }
}

/// Connections that wait at listening sockets: of those, the queue of received bytes is the one of
/// connections.
fn queued(table: &str) -> u32 {
    const LISTENS: &str = "0A";
    let of_line = |line: &str| {
        let mut words = line.split_ascii_whitespace().skip(3);
        let (state, queues) = (words.next()?, words.next()?);
        let waiting = u32::from_str_radix(queues.split_once(':')?.1, 16).ok()?;
        (state == LISTENS).then_some(waiting)
    };
    table.lines().skip(1).filter_map(of_line).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};

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
    fn what_is_not_accepted_is_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let me = [std::process::id()];
        let before = LoadCounters::read(&me, 0, 0);
        let clients: Vec<_> = (0..3).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
        (&clients[0]).write_all(b"hello").unwrap();
        let after = LoadCounters::read(&me, 0, 0);
        assert_eq!(after.queued, before.queued + 3);
        assert!(!after.threads.is_empty());
        assert_eq!(LoadCounters::read(&[], 1, 2), LoadCounters { cpu_ns: 1, refaults: 2, ..LoadCounters::default() });
    }
}
