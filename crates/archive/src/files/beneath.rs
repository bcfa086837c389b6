//! Opening what lies below a directory without ever leaving it: never through a link, never onto
//! another file system.
//!
//! Owns nothing but the flags. A path is a list of names, so that it may be longer than the kernel
//! takes at once.

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

/// Names at once: of 255 bytes each, they stay below PATH_MAX.
const AT_ONCE: usize = 15;

/// Opens one file of any kind, as the flags say, which must not make it.
pub(super) fn open(root: BorrowedFd<'_>, names: &[&[u8]], flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve =
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    let (last, before) = match names.len() {
        0 => (&[][..], &[][..]),
        length => {
            let at = (length - 1) / AT_ONCE * AT_ONCE;
            (&names[at..], &names[..at])
        }
    };
    let mut dir: Option<OwnedFd> = None;
    for part in before.chunks(AT_ONCE) {
        let path = part.join(&b'/');
        let at = dir.as_ref().map_or(root, |dir| dir.as_fd());
        dir = Some(openat2(
            at,
            OsStr::from_bytes(&path),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
            resolve,
        )?);
    }
    let at = dir.as_ref().map_or(root, |dir| dir.as_fd());
    let path = if last.is_empty() { b".".to_vec() } else { last.join(&b'/') };
    Ok(openat2(at, OsStr::from_bytes(&path), flags, Mode::empty(), resolve)?)
}

/// The name of an open file that system calls take which want a path, and follow to it and no
/// further: a magic link.
pub(super) fn by_descriptor(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd as _;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
