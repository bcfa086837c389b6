//! What the images do not say: what was noted of held objects, and what is there already.

use kip_checkpoint::HeldObject;
use kip_criu_images::codes::kind;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// What images have no place for of an object that is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectNote {
    /// Its file id in the images.
    pub id: u64,
    /// Of a pipe: user and group that may open it anew, as numbered inside; root if there are none.
    pub owner: (u32, u32),
    /// Of an eventfd: a read takes one of its count, EFD_SEMAPHORE.
    pub semaphore: bool,
}

impl ObjectNote {
    /// Of a held object, whose proc's ids begin at `first`; none if nothing is to be noted. Only
    /// what its kind may have is looked at, for the program stands still.
    ///
    /// # Errors
    /// Those of fstat(2); proc(5) cannot be read.
    pub fn of(object: HeldObject, fd: &OwnedFd, first: u32) -> io::Result<Option<ObjectNote>> {
        let plain = ObjectNote { id: object.id, ..ObjectNote::default() };
        let note = match object.kind {
            kind::PIPE => {
                let found = rustix::fs::fstat(fd)?;
                let inside = |id: u32| id.saturating_sub(first);
                ObjectNote { owner: (inside(found.st_uid), inside(found.st_gid)), ..plain }
            }
            kind::EVENTFD => {
                let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
                let semaphore = info.lines().any(|line| line.split_whitespace().eq(["eventfd-semaphore:", "1"]));
                ObjectNote { semaphore, ..plain }
            }
            _ => plain,
        };
        Ok((note != plain).then_some(note))
    }
}

/// What the caller has made already.
pub trait MadeAlready {
    /// The pipe that takes the place of one from outside, by CRIU's number of that.
    fn pipe(&self, id: u64) -> Option<Arc<OwnedFd>>;
    /// A socket by the inode that it had.
    fn socket(&self, inode: u32) -> Option<Arc<OwnedFd>>;
    /// Host id of the user that is root inside.
    fn root(&self) -> u32;
    /// What the images do not say of the file with that id.
    fn noted(&self, id: u64) -> ObjectNote;
    /// The proc's network namespace.
    fn network(&self) -> Option<Arc<OwnedFd>>;
    /// The proc's `/`, in which unix sockets have their paths.
    ///
    /// # Errors
    /// The file system cannot be mounted.
    fn files(&self) -> io::Result<OwnedFd>;
}
