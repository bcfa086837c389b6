//! The processes of a running proc, seen from the host: host ids by ids inside, descriptors, since
//! when each thread waits.
//!
//! Only reads /proc; what that does not say the pager finds out. A process that
//! ends while it is looked at is left out.

use crate::{Pending, Waiting, WaitingThreads};
use kip_sys::kernel_file;
use kip_sys::ran::{CpuClocks, is_undated};
use kip_sys::status::{Status, threads};
use kip_sys::timens;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::time::{Duration, Instant};

/// Host ids of the proc's threads by their ids inside.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    /// Host process ids, in the order of the ids inside: pid 1 first. Their own order is another
    /// one where the machine's pids have begun anew.
    pub pids: Vec<u32>,
    /// Host thread id by id inside.
    pub threads: BTreeMap<u32, u32>,
}

impl Tree {
    /// All processes in `pids` (of the proc's cgroup) that live in a pid namespace of their own
    /// below ours.
    pub fn read(pids: &[u32]) -> Tree {
        let mut tree = Tree { pids: inside(pids), threads: BTreeMap::new() };
        for pid in &tree.pids {
            let inner = |tid| Some((inner_id(tid)?, tid));
            tree.threads.extend(threads(*pid).unwrap_or_default().into_iter().filter_map(inner));
        }
        tree
    }

    /// The same, as soon as no process of it is about to end: the first thread of one that ends by
    /// exit(3) may be gone a moment before its others are.
    ///
    /// # Errors
    /// As [`Tree::without_first_thread`], of a process that is so after `within`, too.
    pub fn read_whole(pids: &[u32], within: Duration) -> Result<Tree, (u32, String)> {
        let until = Instant::now() + within;
        loop {
            let tree = Tree::read(pids);
            match tree.without_first_thread() {
                None => return Ok(tree),
                Some(process) if Instant::now() >= until => return Err(process),
                Some(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// The host pid of the sandbox's pid 1, if it is among them.
    pub fn init(&self) -> Option<u32> {
        self.pids.first().copied().filter(|pid| inner_id(*pid) == Some(1))
    }

    /// How far the program's CLOCK_MONOTONIC is ahead of the machine's, nanoseconds: all processes
    /// share one.
    pub fn ahead_ns(&self) -> i64 {
        // One that has ended has no time that could be wrong.
        self.pids.first().and_then(|pid| timens::monotonic_ahead_of(*pid).ok()).unwrap_or(0)
    }

    /// Whether any process has a System V shared memory segment mapped, shmat(2).
    pub fn maps_system_v(&self) -> bool {
        let maps = |pid| fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        self.pids.iter().any(|pid| maps(*pid).contains(" /SYSV"))
    }

    /// A process whose first thread has ended while others of it go on: its number inside, and its
    /// name.
    pub fn without_first_thread(&self) -> Option<(u32, String)> {
        self.pids.iter().find_map(|pid| {
            let status = Status::read(*pid).ok()?;
            let (inside, _) = status.inner_id()?;
            let name = || status.field("Name:").unwrap_or_default().to_owned();
            (status.number("Threads:")? > 1 && status.is_zombie()).then(|| (inside, name()))
        })
    }

    /// In which call, and since when, each thread (by id inside) waits. Threads that run are left
    /// out. To be read just before a freeze, which counts as running.
    pub fn waiting(&self) -> WaitingThreads {
        let mut clocks = CpuClocks::default();
        let wait = |(inside, tid): (&u32, &u32)| {
            // The call first: a thread that goes on between the two is then found in another one,
            // or later in the same.
            let call = call_of(&kernel_file::read_to_string(format!("/proc/{tid}/syscall")).ok()?)?;
            Some((*inside, Waiting { since_ns: clocks.last_ran(*tid)?, call }))
        };
        self.threads.iter().filter_map(wait).collect()
    }

    /// Whether the kernel does not say of some thread since when it waits.
    pub fn has_undated(&self) -> bool {
        self.threads.values().any(|tid| is_undated(*tid))
    }

    /// Whether a thread waits of which `since` does not know since when: its processor is being
    /// changed.
    pub fn has_unknown(&self, since: &WaitingThreads) -> bool {
        self.threads.iter().any(|(inside, tid)| !since.contains_key(inside) && waits_in(*tid).is_some())
    }

    /// Stopped processes (by id inside) of which their parents have not learned.
    pub fn unreported(&self) -> Vec<u32> {
        let is_it = |(_, host): &(&u32, &u32)| self.pids.contains(*host) && is_stopped(**host) && is_unreported(**host);
        self.threads.iter().filter(is_it).map(|(inside, _)| *inside).collect()
    }

    /// A stopped process (by id inside) that has more than one thread.
    pub fn stopped_with_threads(&self) -> Option<u32> {
        let has_threads = |pid: u32| threads(pid).is_ok_and(|threads| threads.len() > 1);
        let is_it = |host: u32| self.pids.contains(&host) && is_stopped(host) && has_threads(host);
        self.threads.iter().find(|(_, host)| is_it(**host)).map(|(inside, _)| *inside)
    }

    /// Signals that wait for each thread (by id inside) and its process.
    pub fn pending(&self) -> BTreeMap<u32, Pending> {
        let signals = |(inside, tid): (&u32, &u32)| Some((*inside, pending(&Status::read(*tid).ok()?)));
        self.threads.iter().filter_map(signals).collect()
    }

    /// Only these threads (by id inside) of it; its processes are all there.
    pub fn only(&self, threads: &BTreeSet<u32>) -> Tree {
        let them = threads.iter().filter_map(|inside| Some((*inside, *self.threads.get(inside)?)));
        Tree { pids: self.pids.clone(), threads: them.collect() }
    }

    /// How often each thread (by id inside) that sleeps or is stopped has left a CPU.
    pub fn switches(&self) -> BTreeMap<u32, u64> {
        let of = |(inside, tid): (&u32, &u32)| Some((*inside, switches(&Status::read(*tid).ok()?)?));
        self.threads.iter().filter_map(of).collect()
    }

    /// How often each thread (by id inside) has left a CPU; none unless all of them sleep in calls
    /// of theirs, or are stopped, signal(7): a thread blocked on a page from the pager counts as
    /// running. If two calls give the same, every thread has slept from the one to the other.
    pub fn asleep(&self) -> Option<BTreeMap<u32, u64>> {
        let switches_of = |(inside, tid): (&u32, &u32)| {
            let status = Status::read(*tid).ok()?;
            let times = (*inside, switches(&status)?);
            if status.is_halted() {
                return Some(times);
            }
            // In a call, too, whose result the kernel puts there.
            let faults = fs::read_to_string(format!("/proc/{tid}/wchan")).is_ok_and(|at| at == "handle_userfault");
            waits_in(*tid).filter(|_| !faults).map(|_| times)
        };
        self.threads.iter().map(switches_of).collect()
    }
}

/// Whether a signal has stopped a thread, by its host id.
pub fn is_stopped(tid: u32) -> bool {
    Status::read(tid).is_ok_and(|status| status.is_halted())
}

/// Whether the parent of a stopped process has yet to learn of that by wait(2): the last field of
/// proc_pid_stat(5).
fn is_unreported(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.trim_end().rsplit(' ').next().is_some_and(|code| code != "0")
}

/// Those of `pids` (of the proc's cgroup) that live in a pid namespace of their own below ours, in
/// the order of their ids inside.
pub fn inside(pids: &[u32]) -> Vec<u32> {
    let id = |pid| Status::read(pid).ok()?.inner_id().filter(|(_, depth)| *depth > 1);
    let mut found: Vec<_> = pids.iter().filter_map(|&pid| Some((id(pid)?, pid))).collect();
    // Where the program has namespaces of its own: the sandbox's pid 1 before theirs.
    found.sort_unstable();
    found.into_iter().map(|(_, pid)| pid).collect()
}

/// The call in which a thread waits: number, arguments and stack pointer of proc_pid_syscall(5);
/// none for one that runs.
pub fn waits_in(tid: u32) -> Option<[u64; 8]> {
    call_of(&fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?)
}

/// When a thread was last on a CPU, nanoseconds of CLOCK_MONOTONIC. Visits that CPU.
pub fn last_ran(tid: u32) -> Option<i64> {
    CpuClocks::default().last_ran(tid)
}

/// Signals that wait for a thread and for its process.
fn pending(status: &Status) -> Pending {
    Pending { own: status.signals("SigPnd:"), shared: status.signals("ShdPnd:") }
}

/// Context switches of a sleeping or stopped thread; none of another one.
fn switches(status: &Status) -> Option<u64> {
    status.switches().filter(|_| status.is_asleep() || status.is_halted())
}

/// The id inside of a process or thread, if that is below our own pid namespace.
pub fn inner_id(id: u32) -> Option<u32> {
    Status::read(id).ok()?.inner_id().filter(|(_, depth)| *depth > 1).map(|(inside, _)| inside)
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

/// What the tree's descriptors refer to: target of the /proc link, by (host pid, descriptor
/// number).
pub fn descriptors(pid: u32) -> io::Result<Vec<(i32, String)>> {
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
pub fn socket_inode(target: &str) -> Option<u32> {
    target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn reads_calls() {
        let text = "232 0x5 0x7ffe 0x40 0xffffffffffffffff 0x0 0x8 0x7ffe1000 0x7f00\n";
        assert_eq!(call_of(text), Some([232, 5, 0x7ffe, 0x40, u64::MAX, 0, 8, 0x7ffe_1000]));
        assert_eq!(call_of("running\n"), None);
        assert_eq!(call_of("-1 0x7ffe 0x7f00\n"), None);
    }

    #[test]
    fn only_sleepers_are_asleep() {
        let status = "Name:\tcat\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t2\n";
        assert_eq!(switches(&status.into()), Some(9));
        let both = pending(&"SigPnd:\t0000000000000200\nShdPnd:\t0000000000000001\nSigBlk:\t0\n".into());
        assert_eq!(both, Pending { own: 0x200, shared: 1 });
        assert_eq!(switches(&status.replace("S (sleeping)", "R (running)").as_str().into()), None);
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let running = Tree { pids: Vec::new(), threads: BTreeMap::from([(1, own)]) };
        assert_eq!(running.asleep(), None);
    }

    // promise hibernation: a thread that waits for one of its pages is at work; only a thread
    //   that waits in a call of its own is quiescent
    #[test]
    fn who_waits_for_a_page_is_at_work() {
        use kip_sys::uffd::{self, Catch, Features};
        use std::io::Read as _;
        use std::sync::mpsc::channel;

        let device = uffd::open_device().expect("root");
        let faults = uffd::create(device.as_fd()).unwrap();
        uffd::api(faults.as_fd(), Features::THREAD_ID).unwrap();
        // None of its pages has been touched: so much is always a mapping of its own, mallopt(3).
        let memory = vec![0u8; 64 << 20];
        let begin = (memory.as_ptr() as u64).next_multiple_of(1 << 20);
        uffd::register(faults.as_fd(), begin..begin + 8192, Catch::Missing).unwrap();
        let place = (begin - memory.as_ptr() as u64) as usize;
        let (sender, receiver) = channel();
        let (go, gone) = channel();
        let thread = std::thread::spawn(move || {
            let mut memory = memory;
            sender.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            let byte = std::hint::black_box(&memory)[place];
            // The kernel fills the second one.
            let mut zeros = fs::File::open("/dev/zero").unwrap();
            zeros.read_exact(&mut memory[place + 4096..place + 4097]).unwrap();
            gone.recv().map(|()| byte)
        });
        let tid = receiver.recv().unwrap();
        let tree = Tree { pids: Vec::new(), threads: BTreeMap::from([(1, tid)]) };
        let until = Instant::now() + Duration::from_secs(10);
        let status = || Status::read(tid).unwrap();
        for (page, calls) in [(begin, false), (begin + 4096, true)] {
            while switches(&status()).is_none() || waits_in(tid).is_some() != calls {
                assert!(Instant::now() < until, "it does not wait");
            }
            std::thread::sleep(Duration::from_millis(20));
            assert!(switches(&status()).is_some(), "it sleeps, by its state");
            assert_eq!(tree.asleep(), None);
            assert_eq!(uffd::zero(faults.as_fd(), page..page + 4096, true).unwrap(), 4096);
        }
        while tree.asleep().is_none() {
            assert!(Instant::now() < until, "it does not come to its call");
        }
        go.send(()).unwrap();
        assert_eq!(thread.join().unwrap(), Ok(0));
    }

    #[test]
    fn reads_socket_links() {
        assert_eq!(socket_inode("socket:[42]"), Some(42));
        assert_eq!(socket_inode("pipe:[42]"), None);
    }
}
