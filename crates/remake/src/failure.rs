//! Why something is not made, and what all that is made has.

use kip_criu_images::{CheckpointImageError, Malformed};
use rustix::fs::OFlags;
use std::io;
use std::os::fd::OwnedFd;

/// What fcntl(2) changes of an open file.
const STATUS: OFlags = OFlags::NONBLOCK.union(OFlags::DIRECT).union(OFlags::from_bits_retain(O_ASYNC));

/// The kernel sends the file's owner, which is set later, a signal when there is something to read,
/// open(2).
const O_ASYNC: u32 = 0o20000;

/// Not all of it can be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum RemakeError {
    #[error("{0} is made by CRIU alone")]
    Unsupported(&'static str),
    #[error(transparent)]
    Image(#[from] CheckpointImageError),
    #[error("an image is damaged")]
    Damaged(#[from] Malformed),
    #[error("the kernel does not make {0}")]
    System(&'static str, #[source] io::Error),
}

pub(crate) fn system(what: &'static str) -> impl Fn(io::Error) -> RemakeError {
    move |source| RemakeError::System(what, source)
}

pub(crate) fn errno(what: &'static str) -> impl Fn(rustix::io::Errno) -> RemakeError {
    move |source| RemakeError::System(what, source.into())
}

/// With the flags that fcntl(2) can change as they were.
pub(crate) fn with_status(fd: OwnedFd, flags: u64) -> Result<OwnedFd, RemakeError> {
    let flags = OFlags::from_bits_retain(flags as u32);
    let wanted = flags & STATUS;
    let now = rustix::fs::fcntl_getfl(&fd).map_err(errno("an open file"))?;
    rustix::fs::fcntl_setfl(&fd, (now - STATUS) | wanted).map_err(errno("an open file with its flags"))?;
    Ok(fd)
}
