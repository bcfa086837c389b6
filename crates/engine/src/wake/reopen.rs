//! Opens a held file without a name once more, on a mount that the next snapshot knows: the one
//! that it was opened on is gone.
//!
//! What the holders of an open file share goes along: flags, position and, for a FIFO, whether a
//! reader has been told that the last writer is gone. Only the lock of flock(2) does not: the
//! restorer takes it.

use kip_remake::KEPT_FLAGS;
use kip_sandbox::rootfs::Mounts;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, FlockOperation, OFlags, SeekFrom};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Opens it on that mount of `mounts` which is of its file system.
pub(super) fn open_again(held: BorrowedFd<'_>, mounts: &Mounts) -> io::Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(held)? & KEPT_FLAGS;
    let status = rustix::fs::fstat(held)?;
    for mount in [&mounts.root, &mounts.usr] {
        if rustix::fs::fstat(mount)?.st_dev != status.st_dev {
            continue;
        }
        let open = |flags: OFlags| kip_sys::mount::open_again(held, mount.as_fd(), flags | OFlags::CLOEXEC);
        let again = if FileType::from_raw_mode(status.st_mode) == FileType::Fifo {
            open_fifo(held, flags, &open)?
        } else {
            let again = open(flags)?;
            rustix::fs::seek(&again, SeekFrom::Start(rustix::fs::tell(held)?))?;
            again
        };
        // The lock that it has is taken again by the restorer.
        rustix::fs::flock(held, FlockOperation::Unlock)?;
        return Ok(again);
    }
    Err(Errno::XDEV.into())
}

/// An end of a FIFO, without waiting for the other one, fifo(7). A reader that is opened while
/// there is no writer is not told of the end before a writer has come; so one that has been told is
/// opened while there is a writer.
fn open_fifo(held: BorrowedFd<'_>, flags: OFlags, open: &dyn Fn(OFlags) -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
    let needs_other = match flags & OFlags::ACCMODE {
        OFlags::RDONLY => is_hung_up(held)?,
        OFlags::WRONLY => true,
        _ => false,
    };
    let _other = if needs_other { Some(open(OFlags::RDWR)?) } else { None };
    let again = open(flags | OFlags::NONBLOCK)?;
    rustix::fs::fcntl_setfl(&again, flags)?;
    Ok(again)
}

fn is_hung_up(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
    poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(fds[0].revents().contains(PollFlags::HUP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode};
    use rustix::mount::{OpenTreeFlags, open_tree};
    use std::fs;

    fn mounts() -> Mounts {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = || open_tree(CWD, "/tmp", flags).expect("the tests run as root");
        Mounts { root: tree(), usr: tree(), terminals: None, volumes: Vec::new() }
    }

    /// Both ends of a FIFO that has no name any more.
    fn fifo() -> (OwnedFd, OwnedFd) {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let open = |flags| rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let reader = open(OFlags::RDONLY | OFlags::NONBLOCK);
        let writer = open(OFlags::WRONLY);
        fs::remove_file(&path).unwrap();
        (reader, writer)
    }

    #[test]
    fn both_ends_of_a_fifo_with_what_is_in_it() {
        let mounts = mounts();
        let (reader, writer) = fifo();
        rustix::io::write(&writer, b"left").unwrap();
        let reader = open_again(reader.as_fd(), &mounts).unwrap();
        let writer = open_again(writer.as_fd(), &mounts).unwrap();
        assert!(rustix::fs::fcntl_getfl(&reader).unwrap().contains(OFlags::NONBLOCK));
        assert!(!rustix::fs::fcntl_getfl(&writer).unwrap().contains(OFlags::NONBLOCK));
        rustix::io::write(&writer, b" there").unwrap();
        let mut text = [0; 20];
        assert_eq!(rustix::io::read(&reader, &mut text).unwrap(), 10);
        assert_eq!(&text[..10], b"left there");
    }

    #[test]
    fn a_reader_knows_of_the_end_or_does_not() {
        let mounts = mounts();
        let (reader, writer) = fifo();
        drop(writer);
        let told = open_again(reader.as_fd(), &mounts).unwrap();
        assert!(is_hung_up(told.as_fd()).unwrap(), "the writer is gone");
        drop(reader);
        let fresh = kip_sys::mount::open_again(told.as_fd(), mounts.root.as_fd(), OFlags::RDONLY | OFlags::NONBLOCK);
        let again = open_again(fresh.unwrap().as_fd(), &mounts).unwrap();
        assert!(!is_hung_up(again.as_fd()).unwrap(), "nobody has written yet");
        let (reader, writer) = fifo();
        drop(reader);
        let writer = open_again(writer.as_fd(), &mounts).unwrap();
        assert_eq!(rustix::io::write(&writer, b"x").unwrap_err(), Errno::PIPE, "nobody reads");
    }
}
