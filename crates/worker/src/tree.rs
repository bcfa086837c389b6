//! The processes of a running proc, seen from the host: host ids by ids inside, descriptors, since when each thread waits.
//!
//! Reads /proc only. A process that ends while it is looked at is left out.

use kip_checkpoint::clocks::{Since, Waiting};
use std::collections::BTreeMap;
use std::fs;
use std::io;

/// Host ids of the proc's threads by their ids inside.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tree {
    /// Host process ids, pid 1 first.
    pub(crate) pids: Vec<u32>,
    /// Host thread id by id inside.
    pub(crate) threads: BTreeMap<u32, u32>,
}

impl Tree {
    /// All processes in `pids` (of the proc's cgroup) that live in a pid namespace of their own below ours.
    pub(crate) fn read(pids: &[u32]) -> Tree {
        let mut tree = Tree::default();
        for &pid in pids {
            let Some((inside, _)) = inner_id(&format!("/proc/{pid}/status")) else { continue };
            if inside == 1 {
                tree.pids.insert(0, pid);
            } else {
                tree.pids.push(pid);
            }
            let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
            for task in tasks.flatten() {
                let Some(tid) = task.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
                if let Some((inner, _)) = inner_id(&format!("/proc/{pid}/task/{tid}/status")) {
                    tree.threads.insert(inner, tid);
                }
            }
        }
        tree
    }

    /// The host pid of the sandbox's pid 1, if it is among them.
    pub(crate) fn init(&self) -> Option<u32> {
        self.pids.first().copied().filter(|pid| inner_id(&format!("/proc/{pid}/status")).is_some_and(|(i, _)| i == 1))
    }

    /// Whether any process has a System V shared memory segment mapped, shmat(2).
    pub(crate) fn maps_system_v(&self) -> bool {
        let maps = |pid| fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        self.pids.iter().any(|pid| maps(*pid).contains(" /SYSV"))
    }

    /// In which call, and since when, each thread (by id inside) waits. Threads that run are left out. To be read just
    /// before a freeze, which counts as running.
    pub(crate) fn waiting(&self) -> Since {
        let Some(offset) = scheduler_offset() else { return Since::new() };
        let look = |(inside, tid): (&u32, &u32)| {
            // The call first: a thread that goes on between the two is then found in another one, or later in the same.
            let call = call_of(&fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?)?;
            Some((*inside, Waiting { since_ns: last_ran(*tid)? + offset, call }))
        };
        self.threads.iter().filter_map(look).collect()
    }
}

/// (id in the innermost pid namespace, depth) from NSpid of a status file, for a process below our own namespace.
fn inner_id(status: &str) -> Option<(u32, usize)> {
    let text = fs::read_to_string(status).ok()?;
    let ids: Vec<u32> = text
        .lines()
        .find_map(|l| l.strip_prefix("NSpid:"))?
        .split_whitespace()
        .filter_map(|n| n.parse().ok())
        .collect();
    (ids.len() > 1).then(|| (ids[ids.len() - 1], ids.len()))
}

/// Number, arguments and stack pointer of proc_pid_syscall(5); none for a thread that runs.
fn call_of(text: &str) -> Option<[u64; 8]> {
    let mut words = text.split_whitespace();
    let mut call = [words.next()?.parse().ok()?; 8];
    for word in &mut call[1..] {
        *word = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some(call)
}

/// When the thread was last on a CPU, nanoseconds of the scheduler's clock: `se.exec_start` in proc_pid_sched.
fn last_ran(tid: u32) -> Option<i64> {
    exec_start(&fs::read_to_string(format!("/proc/{tid}/sched")).ok()?)
}

fn exec_start(text: &str) -> Option<i64> {
    let value = text.lines().find(|l| l.starts_with("se.exec_start"))?.split(':').nth(1)?.trim();
    let (ms, ns) = value.split_once('.')?;
    Some(ms.parse::<i64>().ok()? * 1_000_000 + ns.parse::<i64>().ok()?)
}

/// CLOCK_MONOTONIC minus the scheduler's clock, nanoseconds, to about 0.1 ms: this thread yields, which stamps it.
fn scheduler_offset() -> Option<i64> {
    std::thread::yield_now();
    let now = kip_checkpoint::clocks::Now::read().monotonic_ns;
    let own = exec_start(&fs::read_to_string("/proc/thread-self/sched").ok()?)?;
    Some(now - own)
}

/// What the tree's descriptors refer to: target of the /proc link, by (host pid, descriptor number).
pub(crate) fn descriptors(pid: u32) -> io::Result<Vec<(i32, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
        if let Ok(target) = fs::read_link(entry.path()) {
            found.push((number, target.to_string_lossy().into_owned()));
        }
    }
    Ok(found)
}

/// Inode of a `socket:[123]` link.
pub(crate) fn socket_inode(target: &str) -> Option<u32> {
    target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Memory of the processes, bytes: resident, proportional, swapped.
pub(crate) fn memory(pids: &[u32]) -> (u64, u64, u64) {
    let mut sum = (0, 0, 0);
    for pid in pids {
        let Ok(text) = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) else { continue };
        let field = |name: &str| -> u64 {
            let line = text.lines().find(|l| l.starts_with(name));
            line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0) * 1024
        };
        sum = (sum.0 + field("Rss:"), sum.1 + field("Pss:"), sum.2 + field("Swap:"));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_scheduler_s_time() {
        let text = "cat (1, #threads: 1)\n----\nse.exec_start      :       1736492.599866\n";
        assert_eq!(exec_start(text), Some(1_736_492_599_866));
        // A thread that has slept for 50 ms was last on a CPU about then.
        let (tell, told) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            wait.recv().unwrap();
        });
        let tid = told.recv().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        let since = last_ran(tid).unwrap() + scheduler_offset().unwrap();
        let waited = kip_checkpoint::clocks::Now::read().monotonic_ns - since;
        go.send(()).unwrap();
        sleeper.join().unwrap();
        assert!((45_000_000..80_000_000).contains(&waited), "{waited}");
    }

    #[test]
    fn reads_calls() {
        let text = "232 0x5 0x7ffe 0x40 0xffffffffffffffff 0x0 0x8 0x7ffe1000 0x7f00\n";
        assert_eq!(call_of(text), Some([232, 5, 0x7ffe, 0x40, u64::MAX, 0, 8, 0x7ffe_1000]));
        assert_eq!(call_of("running\n"), None);
        assert_eq!(call_of("-1 0x7ffe 0x7f00\n"), None);
    }

    #[test]
    fn reads_socket_links() {
        assert_eq!(socket_inode("socket:[42]"), Some(42));
        assert_eq!(socket_inode("pipe:[42]"), None);
    }
}
