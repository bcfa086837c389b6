//! What the processes of a proc have sent to each other, and not received yet.

use crate::tree::{Tree, descriptors};
use kip_sys::process::{pidfd_getfd, pidfd_open};
use kip_sys::sock::{self, IntOption};
use rustix::fs::{OFlags, fcntl_getfl};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

impl Tree {
    /// Whether a pipe, a unix socket or an eventfd of the program has something in it for a reader
    /// of the program: pipe(7), unix(7), eventfd(2). Of what cannot be looked at that is not known.
    pub fn has_unread(&self) -> bool {
        let mut known = BTreeSet::new();
        self.pids.iter().any(|&pid| {
            let Ok(pidfd) = pidfd_open(pid) else { return false };
            let take = |number| pidfd_getfd(pidfd.as_fd(), number);
            descriptors(pid).unwrap_or_default().into_iter().any(|(number, target)| {
                if target == "anon_inode:[eventfd]" {
                    return is_raised(pid, number);
                }
                let is_pipe = target.starts_with("pipe:[");
                if !is_pipe && !target.starts_with("socket:[") || known.contains(&target) {
                    return false;
                }
                let waits = take(number).and_then(|fd| unread(&fd, is_pipe)).unwrap_or_default();
                // The other descriptors of a pipe write to it.
                waits.is_some_and(|bytes| known.insert(target) && bytes > 0)
            })
        })
    }
}

/// Bytes that can be read from a pipe or a unix socket; none of a descriptor that only writes, or
/// of another socket.
fn unread(fd: &OwnedFd, is_pipe: bool) -> io::Result<Option<u32>> {
    const UNIX: i32 = 1;
    let reads = if is_pipe {
        fcntl_getfl(fd)? & OFlags::ACCMODE != OFlags::WRONLY
    } else {
        sock::get_int(fd.as_fd(), IntOption::Domain)? == UNIX
    };
    reads.then(|| sock::unread_bytes(fd.as_fd())).transpose()
}

/// Whether an eventfd has a count: proc_pid_fdinfo(5).
fn is_raised(pid: u32, number: i32) -> bool {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
    let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:")).map(str::trim);
    count.is_some_and(|count| !count.trim_start_matches('0').is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{read, write};
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::collections::BTreeMap;
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Command};

    /// A program with these descriptors; ended when it is dropped.
    struct Program(Child, Tree);

    impl Program {
        fn with(stdin: &OwnedFd, stdout: &OwnedFd) -> Program {
            let [stdin, stdout] = [stdin, stdout].map(|fd| fd.try_clone().unwrap());
            let child = Command::new("/bin/sleep").arg("1000").stdin(stdin).stdout(stdout).spawn().unwrap();
            let tree = Tree { pids: vec![child.id()], threads: BTreeMap::new() };
            Program(child, tree)
        }

        fn end(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    impl Drop for Program {
        fn drop(&mut self) {
            self.end();
        }
    }

    // promise waking: what one thread has sent to another, which has not run since, is found
    #[test]
    fn what_is_sent_and_not_received_is_found() {
        let (here, there) = UnixStream::pair().unwrap();
        let (pair, (ours, theirs)) =
            ((OwnedFd::from(here), OwnedFd::from(there)), pipe_with(PipeFlags::CLOEXEC).unwrap());
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for (from, to) in [(&pair.0, &pair.1), (&theirs, &ours), (&event, &event)] {
            let mut program = Program::with(to, to);
            assert!(!program.1.has_unread());
            write(from, &1u64.to_ne_bytes()).unwrap();
            assert!(program.1.has_unread());
            read(to, &mut [0u8; 8]).unwrap();
            assert!(!program.1.has_unread());
            program.end();
            assert!(!program.1.has_unread(), "it has ended");
        }
        // What another program is to read, as a log, is not the business of this one.
        let program = Program::with(&pair.0, &theirs);
        write(&theirs, b"a line").unwrap();
        assert!(!program.1.has_unread());
    }
}
