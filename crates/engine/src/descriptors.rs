//! Open files of a proc's processes: where they are, duplicates of them, and the keys by which CRIU
//! knows them.

use kip_clocks::tree::{self, Tree};
pub use kip_logs::pty::watched;
use kip_net::custody;
use kip_sys::process::{pidfd_getfd, pidfd_open};
use kip_sys::status::Status;
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Where each socket of the tree is open: (host pid, descriptor) by inode.
pub fn places(tree: &Tree) -> BTreeMap<u32, (u32, i32)> {
    let mut places = BTreeMap::new();
    for &pid in &tree.pids {
        for (number, target) in tree::descriptors(pid).unwrap_or_default() {
            if let Some(inode) = tree::socket_inode(&target) {
                places.entry(inode).or_insert((pid, number));
            }
        }
    }
    places
}

/// A duplicate of a descriptor of a process.
pub fn duplicate(pid: u32, number: i32) -> io::Result<OwnedFd> {
    let pidfd = pidfd_open(pid)?;
    pidfd_getfd(pidfd.as_fd(), number)
}

/// What the program has seen of a socket, of which it was offered `before` while it ran and
/// `frozen` since it cannot run any more.
pub fn seen(before: custody::Seen, frozen: custody::Seen) -> custody::Seen {
    custody::Seen {
        // If there is less it has taken some, and what is left may be new.
        queued: if frozen.queued < before.queued { 0 } else { before.queued },
        ended: before.ended,
        full: before.full || frozen.full,
    }
}

/// Duplicates a descriptor of a thread's process.
pub fn take(tid: u32, number: i32) -> io::Result<OwnedFd> {
    let process = Status::read(tid)?.process().ok_or(io::ErrorKind::InvalidData)?;
    pidfd_getfd(pidfd_open(process)?.as_fd(), number)
}

/// The same pipe opened once more.
pub fn reopen(pipe: &OwnedFd, flags: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
}

/// The key under which a pipe is inherited.
pub fn pipe_key(fd: &OwnedFd) -> io::Result<String> {
    let inode = rustix::fs::fstat(fd)?.st_ino;
    debug_assert!(fd.as_raw_fd() >= 0);
    Ok(format!("pipe:[{inode}]"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_net::custody::Seen;

    #[test]
    fn what_a_program_may_not_have_seen_wakes_it() {
        let queued = |queued| Seen { queued, ..Seen::default() };
        assert_eq!(seen(queued(7), queued(7)), queued(7));
        assert_eq!(seen(queued(7), queued(12)), queued(7));
        assert_eq!(seen(queued(7), queued(3)), queued(0), "it has read, and 3 came after that");
        let full = Seen { full: true, ..Seen::default() };
        assert_eq!(seen(Seen::default(), full), full, "it waits for room");
        assert_eq!(seen(Seen::default(), Seen { ended: true, ..full }), full, "the end is news");
    }
}
