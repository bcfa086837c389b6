//! What the threads of a program have sent to each other, by descriptors and by futexes, and not
//! taken yet.
//!
//! Known are pipes, FIFOs, unix sockets, terminals, eventfds, and the words of futexes that are
//! waited for; not what a lock, a message queue or a child that has ended hands over.

use crate::tree::{Tree, descriptors, waits_in};
use kip_sys::process::{self, pidfd_getfd, pidfd_open};
use kip_sys::sock::{self, IntOption};
use kip_sys::status::Status;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd as _, OwnedFd};

/// What waits to be taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unreceived {
    /// At each descriptor (host pid and number).
    at: BTreeMap<(u32, i32), Waits>,
    /// Address and contents of the word that each thread (by host id) waits to change.
    words: BTreeMap<u32, (u64, u32)>,
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
        let mut sent = Unreceived { threads: tree.threads.len(), ..Unreceived::default() };
        for &pid in &tree.pids {
            // One that has ended has nothing to take.
            let _ = sent.read_descriptors(pid);
        }
        sent.words = tree.threads.values().filter_map(|tid| Some((*tid, awaited_word(*tid)?))).collect();
        sent
    }

    /// Whether something was sent that had not been `before`, or a thread has begun or ended.
    /// Threads that have gone on to another call have taken what they waited for.
    pub fn is_more_than(&self, before: &Unreceived) -> bool {
        let nothing = Waits { amount: 0, ready: PollFlags::OUT };
        let more = |(place, now): (&(u32, i32), &Waits)| {
            let then = before.at.get(place).unwrap_or(&nothing);
            now.amount > then.amount || !(now.ready - then.ready).is_empty()
        };
        let changed = |(tid, now): (&u32, &(u64, u32))| {
            before.words.get(tid).is_some_and(|then| then.0 == now.0 && then.1 != now.1)
        };
        self.threads != before.threads || self.at.iter().any(more) || self.words.iter().any(changed)
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

/// Address and contents of the word for whose change a thread waits: futex(2), FUTEX_WAIT and
/// FUTEX_WAIT_BITSET. The kernel has read it for the call, so that it is there.
fn awaited_word(tid: u32) -> Option<(u64, u32)> {
    let [202, address, op, ..] = waits_in(tid)? else { return None };
    let mut word = [0; 4];
    let is_halted = || Status::read(tid).map_or(true, |status| status.is_halted());
    if !matches!(op & 0x7f, 0 | 9) || is_halted() || process::read_memory(tid, address, &mut word).is_err() {
        return None;
    }
    Some((address, u32::from_le_bytes(word)))
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

    /// As a thread that is woken from a futex and has not run since.
    #[test]
    fn a_word_that_has_changed_is_found() {
        let sent = |word| Unreceived { words: BTreeMap::from([(7, (0x8000, word))]), ..Unreceived::default() };
        assert!(sent(1).is_more_than(&sent(2)) && !sent(1).is_more_than(&sent(1)));
        assert!(!sent(1).is_more_than(&Unreceived::default()), "it waits since then only");
        let other = Unreceived { words: BTreeMap::from([(7, (0x9000, 2))]), ..Unreceived::default() };
        assert!(!sent(1).is_more_than(&other), "another wait");
    }
}
