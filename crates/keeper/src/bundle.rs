//! Several descriptors for the price of one: they wait in a socket that is never read, as
//! SCM_RIGHTS, and what they refer to lives as long as that socket. A look at the message
//! (MSG_PEEK) gives duplicates of all of them and leaves it where it is. unix(7).
//!
//! The kernel counts descriptors on their way by the sender's real user id, and refuses more than
//! RLIMIT_NOFILE of them to a process without privileges. These are counted for an id that no other
//! process has ([`HOLDER`]): thousands of root's would be in the way of root's other programs.

use kip_sys::fdpass::{self, MAX_FDS};
use kip_sys::process::as_real_user;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// User id by which the kernel counts what waits. Ids of procs end far below.
const HOLDER: u32 = 0xffff_fff0;

/// Descriptors that wait, in order.
#[derive(Debug)]
pub struct Bundle {
    /// Each has one message, of [`MAX_FDS`] descriptors, the last of the rest.
    sockets: Vec<OwnedFd>,
    count: usize,
}

impl Bundle {
    /// Duplicates of these, which are the caller's to close.
    ///
    /// # Errors
    /// EMFILE; ETOOMANYREFS without CAP_SYS_RESOURCE and CAP_SYS_ADMIN where RLIMIT_NOFILE of them
    /// wait.
    pub fn pack(fds: &[BorrowedFd<'_>]) -> io::Result<Bundle> {
        let pack = |part: &[BorrowedFd<'_>]| {
            let (ours, theirs) = fdpass::seqpacket_pair()?;
            as_real_user(HOLDER, || fdpass::send(theirs.as_fd(), &[0], part))?;
            // What was sent stays when the sender's end is closed.
            Ok(ours)
        };
        let sockets: io::Result<Vec<OwnedFd>> = fds.chunks(MAX_FDS).map(pack).collect();
        Ok(Bundle { sockets: sockets?, count: fds.len() })
    }

    /// New duplicates of all of them, close-on-exec; they stay.
    ///
    /// # Errors
    /// EMFILE, as an error for which [`fdpass::lost_descriptors`] holds.
    pub fn unpack(&self) -> io::Result<Vec<OwnedFd>> {
        let mut all = Vec::with_capacity(self.count);
        for socket in &self.sockets {
            all.extend(fdpass::peek(socket.as_fd(), 1)?.1);
        }
        Ok(all)
    }

    /// As [`Bundle::unpack`], those of one message: from number `message` times [`MAX_FDS`] on.
    ///
    /// # Errors
    /// As [`Bundle::unpack`].
    pub fn message(&self, message: usize) -> io::Result<Vec<OwnedFd>> {
        Ok(fdpass::peek(self.sockets[message].as_fd(), 1)?.1)
    }

    /// A new duplicate of the one of that number.
    ///
    /// # Errors
    /// As [`Bundle::unpack`].
    pub fn get(&self, number: usize) -> io::Result<OwnedFd> {
        Ok(self.message(number / MAX_FDS)?.swap_remove(number % MAX_FDS))
    }

    /// How many wait.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many descriptors of this process that takes.
    pub fn takes(&self) -> usize {
        self.sockets.len()
    }
}

/// Named descriptors on their way from one keeper to the next.
#[derive(Debug)]
pub struct BundlePart {
    /// A name for each; equal names have several.
    pub names: Vec<String>,
    /// The descriptors.
    pub bundle: Bundle,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read as _, Write as _};

    #[test]
    fn what_waits_lives_and_is_given_again_and_again() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let null = File::open("/dev/null").unwrap();
        let many: Vec<BorrowedFd<'_>> =
            std::iter::repeat_n(null.as_fd(), MAX_FDS).chain([writer.as_fd(), null.as_fd()]).collect();
        let bundle = Bundle::pack(&many).unwrap();
        assert_eq!((bundle.count(), bundle.takes()), (MAX_FDS + 2, 2));
        drop((writer, null));
        drop(bundle.get(MAX_FDS + 1).unwrap());
        for _ in 0..3 {
            let mut fds = bundle.unpack().unwrap();
            assert_eq!(fds.len(), MAX_FDS + 2);
            let writer = fds.swap_remove(MAX_FDS);
            assert!(rustix::io::fcntl_getfd(&writer).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
            File::from(writer).write_all(b"x").unwrap();
        }
        drop(bundle);
        let mut text = String::new();
        File::from(reader).read_to_string(&mut text).unwrap();
        assert_eq!(text, "xxx", "and no copy of the write end is left");
    }

    #[test]
    fn nothing_is_a_bundle_too() {
        let bundle = Bundle::pack(&[]).unwrap();
        assert_eq!((bundle.takes(), bundle.unpack().unwrap().len()), (0, 0));
    }
}
