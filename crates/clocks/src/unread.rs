//! What the threads of a program have sent or left to each other and not taken yet.
//!
//! Known are pipes, FIFOs, unix sockets, terminals, eventfds, futexes, locks of files, System V's
//! semaphores and message queues, and threads that have ended.

use crate::tree::{Tree, descriptors, waits_in};
use kip_sys::clock::now_ms;
use kip_sys::process::{self, pidfd_getfd, pidfd_open};
use kip_sys::sock::{self, IntOption};
use kip_sys::status::Status;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::thread;

/// What waits to be taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unreceived {
    /// At each descriptor (host pid and number).
    at: BTreeMap<(u32, i32), Waits>,
    /// Threads (by host id) that wait in a call which would not wait if it began now.
    met: BTreeSet<u32>,
    /// When something was last done to an object of System V, seconds of the clock, if a thread
    /// waits for one.
    system_v_at: Option<u64>,
    /// When this was read, in the same seconds.
    read_at: u64,
    /// How many threads there are.
    threads: usize,
}

/// What a descriptor offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Waits {
    /// Bytes to read, or the count of an eventfd.
    amount: u64,
    /// What poll(2) says.
    ready: PollFlags,
}

impl Unreceived {
    /// Reads it of a program all of which sleeps or stands still. What cannot be looked at is left
    /// out.
    pub fn read(tree: &Tree) -> Unreceived {
        let read_at = now_ms() / 1000;
        let mut sent = Unreceived { threads: tree.threads.len(), read_at, ..Unreceived::default() };
        for &pid in &tree.pids {
            // One that has ended has nothing to take.
            let _ = sent.read_descriptors(pid);
        }
        for &tid in tree.threads.values() {
            match wait_of(tid) {
                Some(Wait::Over) => _ = sent.met.insert(tid),
                Some(Wait::ForSystemV) if sent.system_v_at.is_none() => sent.system_v_at = changed_at(tid).ok(),
                _ => {}
            }
        }
        sent
    }

    /// Whether something was sent or left that had not been `before`, or a thread has begun or
    /// ended.
    pub fn is_more_than(&self, before: &Unreceived) -> bool {
        let nothing = Waits { amount: 0, ready: PollFlags::OUT };
        let more = |(place, now): (&(u32, i32), &Waits)| {
            let then = before.at.get(place).unwrap_or(&nothing);
            now.amount > then.amount || !(now.ready - then.ready).is_empty()
        };
        self.threads != before.threads
            || self.at.iter().any(more)
            || !self.met.is_subset(&before.met)
            // What was done earlier in the same second cannot be told from what was done since.
            || self.system_v_at.is_some_and(|at| at >= before.read_at)
    }

    fn read_descriptors(&mut self, pid: u32) -> io::Result<()> {
        let pidfd = pidfd_open(pid)?;
        for (number, target) in descriptors(pid)? {
            let waits = if target == "anon_inode:[eventfd]" {
                Some(Waits { amount: count_of(pid, number), ready: PollFlags::empty() })
            } else if ["pipe:[", "socket:[", "/"].iter().any(|start| target.starts_with(start)) {
                let path = || format!("/proc/{pid}/fd/{number}");
                let is_file = || fs::metadata(path()).is_ok_and(|file| file.is_file() || file.is_dir());
                let take = || pidfd_getfd(pidfd.as_fd(), number);
                if target.starts_with('/') && is_file() {
                    None
                } else {
                    take().and_then(|fd| waits(&fd)).ok().flatten()
                }
            } else {
                None
            };
            self.at.extend(waits.map(|waits| ((pid, number), waits)));
        }
        Ok(())
    }
}

/// What a pipe, a FIFO, a unix socket or a terminal offers; none of anything else: sockets of the
/// network are looked at when they are taken over.
fn waits(fd: &OwnedFd) -> io::Result<Option<Waits>> {
    const UNIX: i32 = 1;
    let reads = fcntl_getfl(fd)? & OFlags::ACCMODE != OFlags::WRONLY;
    let known = match FileType::from_raw_mode(fstat(fd)?.st_mode) {
        FileType::Fifo => true,
        FileType::Socket => sock::get_int(fd.as_fd(), IntOption::Domain)? == UNIX,
        FileType::CharacterDevice => fd.is_terminal(),
        _ => false,
    };
    if !known {
        return Ok(None);
    }
    let mut polled = [PollFd::new(fd, PollFlags::IN | PollFlags::OUT)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    // Of a listener there are none.
    let amount = if reads { sock::unread_bytes(fd.as_fd()).unwrap_or(0) } else { 0 };
    Ok(Some(Waits { amount: amount.into(), ready: polled[0].revents() }))
}

/// The count of an eventfd: proc_pid_fdinfo(5).
fn count_of(pid: u32, number: i32) -> u64 {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
    let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:")).map(str::trim);
    count.and_then(|count| u64::from_str_radix(count, 16).ok()).unwrap_or(0)
}

/// What a thread waits for in its call.
#[derive(Debug, PartialEq, Eq)]
enum Wait {
    /// Something that is there: the call, begun anew, would not wait for it.
    Over,
    /// An object of System V.
    ForSystemV,
    Other,
}

/// None if it runs, is stopped by a signal, or cannot be looked at.
fn wait_of(tid: u32) -> Option<Wait> {
    /// As the lower half of an argument says it.
    fn op(argument: u64) -> u32 {
        argument as u32 & 0x7f
    }
    let [call, first, second, third, ..] = waits_in(tid)?;
    if Status::read(tid).map_or(true, |status| status.is_halted()) {
        return None;
    }
    let over = match call {
        // semop, semtimedop, msgsnd, msgrcv
        65 | 220 | 69 | 70 => return Some(Wait::ForSystemV),
        // futex(2): FUTEX_WAIT and FUTEX_WAIT_BITSET; FUTEX_LOCK_PI and FUTEX_LOCK_PI2.
        202 if matches!(op(second), 0 | 9) => word(tid, first)? != third as u32,
        202 if matches!(op(second), 6 | 13) => word(tid, first)? & FUTEX_TID_MASK == 0,
        // futex_wait
        455 => u64::from(word(tid, first)?) != second,
        // flock; fcntl with F_SETLKW and F_OFD_SETLKW
        73 => is_unlocked(tid, first)?,
        72 if matches!(second as u32, 7 | 38) => is_unlocked(tid, first)?,
        _ => false,
    };
    Some(if over { Wait::Over } else { Wait::Other })
}

/// Which thread has a lock, in its word: futex(2).
const FUTEX_TID_MASK: u32 = 0x3fff_ffff;

/// The kernel has read the word for the call, so that it is there.
fn word(tid: u32, address: u64) -> Option<u32> {
    let mut word = [0; 4];
    process::read_memory(tid, address, &mut word).ok()?;
    Some(u32::from_le_bytes(word))
}

/// Whether no process has a lock of a file that a thread has open, but for the thread's own:
/// proc_locks(5).
fn is_unlocked(tid: u32, fd: u64) -> Option<bool> {
    let inode = fs::metadata(format!("/proc/{tid}/fd/{}", fd as u32)).ok()?.ino().to_string();
    let own = Status::read(tid).ok()?.process()?.to_string();
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let is_of_another = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // One that is waited for has an arrow.
        let [_, kind, _, _, pid, file, ..] = words[..] else { return false };
        // Of a process are only those of fcntl(2) that are not of an open file.
        kind != "->" && file.rsplit(':').next() == Some(&inode) && !(kind == "POSIX" && pid == own)
    };
    Some(!locks.lines().any(is_of_another))
}

/// When something was last done to a semaphore or a queue in the IPC namespace of a thread, seconds
/// of the clock.
fn changed_at(tid: u32) -> io::Result<u64> {
    let namespace = File::open(format!("/proc/{tid}/ns/ipc"))?;
    let look = || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::InterProcessCommunication))?;
        // Their last columns: when it was operated on or changed.
        let newest = |list: &str, times: usize| -> io::Result<u64> {
            let list = fs::read_to_string(format!("/proc/sysvipc/{list}"))?;
            let times = list.lines().flat_map(|line| line.split_whitespace().rev().take(times));
            Ok(times.filter_map(|time| time.parse().ok()).max().unwrap_or(0))
        };
        Ok(newest("sem", 2)?.max(newest("msg", 3)?))
    };
    // A thread's namespaces are its own, and this one ends in it.
    thread::scope(|scope| scope.spawn(look).join()).expect("looking does not panic")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{read, write};
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Command};

    /// A program with these descriptors; ended when it is dropped.
    struct Program(Child);

    impl Program {
        fn with(stdin: &OwnedFd, stdout: &OwnedFd) -> Program {
            let [stdin, stdout] = [stdin, stdout].map(|fd| fd.try_clone().unwrap());
            Program(Command::new("/bin/sleep").arg("1000").stdin(stdin).stdout(stdout).spawn().unwrap())
        }

        fn sent(&self) -> Unreceived {
            Unreceived::read(&Tree { pids: vec![self.0.id()], threads: BTreeMap::new() })
        }
    }

    impl Drop for Program {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    // promise waking: what one thread has sent to another, which has not run since, is found, and
    //   what has waited all the while is nothing new
    #[test]
    fn what_is_sent_and_not_taken_is_found() {
        let (here, there) = UnixStream::pair().unwrap();
        let (pair, (ours, theirs)) =
            ((OwnedFd::from(here), OwnedFd::from(there)), pipe_with(PipeFlags::CLOEXEC).unwrap());
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for (from, to) in [(&pair.0, &pair.1), (&theirs, &ours), (&event, &event)] {
            let program = Program::with(to, to);
            let nothing = program.sent();
            write(from, &1u64.to_ne_bytes()).unwrap();
            let one = program.sent();
            assert!(one.is_more_than(&nothing) && !nothing.is_more_than(&one));
            assert!(!program.sent().is_more_than(&one), "it has waited all the while");
            write(from, &1u64.to_ne_bytes()).unwrap();
            assert!(program.sent().is_more_than(&one));
            while program.sent().is_more_than(&nothing) {
                read(to, &mut [0u8; 8]).unwrap();
            }
        }
        // Room in a pipe that was full, and its end.
        let program = Program::with(&ours, &theirs);
        while program.sent().at[&(program.0.id(), 1)].ready.contains(PollFlags::OUT) {
            write(&theirs, &[0; 4096]).unwrap();
        }
        let full = program.sent();
        read(&ours, &mut [0u8; 65536]).unwrap();
        assert!(program.sent().is_more_than(&full));
        drop(program);
        let program = Program::with(&ours, &event);
        let open = program.sent();
        drop(theirs);
        assert!(program.sent().is_more_than(&open));
    }

    #[test]
    fn a_wait_that_is_over_is_something_new_once() {
        let sent = |met: &[u32]| Unreceived { met: met.iter().copied().collect(), ..Unreceived::default() };
        assert!(sent(&[7]).is_more_than(&sent(&[])) && sent(&[7, 8]).is_more_than(&sent(&[7])));
        assert!(!sent(&[7]).is_more_than(&sent(&[7])), "it has been so all the while");
        assert!(!sent(&[]).is_more_than(&sent(&[7])));
        let then = Unreceived { read_at: 100, ..Unreceived::default() };
        let now = |at| Unreceived { system_v_at: at, ..Unreceived::default() };
        assert!(now(Some(100)).is_more_than(&then) && !now(Some(99)).is_more_than(&then));
        assert!(!now(None).is_more_than(&then), "no thread waits for one");
    }
}
