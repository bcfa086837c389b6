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
    /// What is known of objects of System V, if a thread waits for one.
    system_v: Option<SystemV>,
    /// When this was read, seconds of the clock.
    read_at: u64,
    /// How many threads there are.
    threads: usize,
}

/// Semaphores and message queues of an IPC namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SystemV {
    /// As proc_sysvipc(5) lists them: messages are counted there, values of semaphores are not.
    lists: String,
    /// When a semaphore was last operated on, seconds of the clock, if a thread waits for one.
    operated_at: Option<u64>,
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
                Some(Wait::ForSystemV { semaphore }) => {
                    let known = sent.system_v.take().map_or_else(|| SystemV::read(tid), Ok);
                    sent.system_v = known.ok().map(|known| known.waited_for(semaphore));
                }
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
            || self.system_v.as_ref().is_some_and(|now| now.is_more_than(before))
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
    /// An object of System V: a semaphore, or a message or room for one.
    ForSystemV {
        semaphore: bool,
    },
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
        // semop, semtimedop; msgsnd, msgrcv
        65 | 220 => return Some(Wait::ForSystemV { semaphore: true }),
        69 | 70 => return Some(Wait::ForSystemV { semaphore: false }),
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

impl SystemV {
    /// Of the IPC namespace of a thread.
    fn read(tid: u32) -> io::Result<SystemV> {
        let namespace = File::open(format!("/proc/{tid}/ns/ipc"))?;
        let look = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::InterProcessCommunication))?;
            let [semaphores, queues] = ["sem", "msg"].map(|list| fs::read_to_string(format!("/proc/sysvipc/{list}")));
            Ok(SystemV { lists: semaphores? + &queues?, operated_at: None })
        };
        // A thread's namespaces are its own, and this one ends in it.
        thread::scope(|scope| scope.spawn(look).join()).expect("looking does not panic")
    }

    fn waited_for(mut self, semaphore: bool) -> SystemV {
        if semaphore && self.operated_at.is_none() {
            self.operated_at = Some(operated_at(&self.lists));
        }
        self
    }

    /// Whether something was done to one since. An operation on a semaphore leaves nothing but its
    /// second: what was done earlier in that cannot be told from what was done since.
    fn is_more_than(&self, before: &Unreceived) -> bool {
        let Some(then) = &before.system_v else { return true };
        self.lists != then.lists || self.operated_at.is_some_and(|at| at >= before.read_at)
    }
}

/// When the semaphores of a list were last operated on: the last column but one. Queues have
/// columns of their own.
fn operated_at(lists: &str) -> u64 {
    let semaphores = lists.lines().skip(1).take_while(|line| !line.contains("msqid"));
    let times = semaphores.filter_map(|line| line.split_whitespace().rev().nth(1)?.parse().ok());
    times.max().unwrap_or(0)
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
        let of = |lists: &str, semaphore| SystemV { lists: lists.to_owned(), operated_at: None }.waited_for(semaphore);
        let sent = |system_v| Unreceived { system_v, read_at: 100, ..Unreceived::default() };
        let lists = |otime| {
            format!("key semid otime ctime\n 0 0 {otime} 150\n key msqid qnum stime rtime ctime\n 0 0 1 120 0 150\n")
        };
        let then = sent(Some(of(&lists(99), true)));
        assert!(!then.is_more_than(&then), "nothing was done since");
        assert!(sent(Some(of(&lists(100), true))).is_more_than(&then), "another time");
        let now = sent(Some(of(&lists(100), true)));
        assert!(now.is_more_than(&now), "perhaps once more in that second");
        let queue = sent(Some(of(&lists(100), false)));
        assert!(!queue.is_more_than(&queue), "messages are counted");
        assert!(queue.is_more_than(&sent(None)) && !sent(None).is_more_than(&queue), "it waits since then only");
    }
}
