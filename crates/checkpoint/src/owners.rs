//! Owners of open files: the process, group or thread to which the kernel sends SIGIO or SIGURG for it, fcntl(2) F_SETOWN_EX and
//! F_SETSIG.
//!
//! A file that is held through the sleep keeps an owner that has ended. CRIU sets owners while threads are yet to be made, and
//! fails for one of these. So they are taken out of the images, and the wake sets them when all of the program is there.

use crate::image::{Image, ImageError};
use crate::sockets::places;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The number of the message about the owner in each kind of file, by the kind's number in CRIU's `file_entry`.
const OWNERS: [(u32, u32); 18] = [
    (3, 5),
    (4, 13),
    (6, 6),
    (7, 11),
    (8, 3),
    (9, 3),
    (10, 3),
    (12, 3),
    (13, 3),
    (14, 4),
    (15, 5),
    (16, 9),
    (17, 4),
    (18, 4),
    (19, 4),
    (20, 4),
    (21, 4),
    (22, 5),
];

/// Which of the program is told, as numbered inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Owner {
    /// A thread.
    Thread(u32),
    /// A process.
    Process(u32),
    /// A process group.
    Group(u32),
}

/// An open file with an owner, or with a signal of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// A process that has it open, as numbered inside.
    pub pid: u32,
    /// Its number there.
    pub fd: i32,
    /// Its owner, if it has one.
    pub owner: Option<Owner>,
    /// The signal; 0 is SIGIO.
    pub signal: i32,
}

/// Takes all owners out of the images.
///
/// # Errors
/// An image cannot be read, understood or written.
pub fn take(images: &Path) -> Result<Vec<Owned>, ImageError> {
    let path = images.join("files.img");
    let mut files = Image::read(&path)?;
    let damaged = |source| ImageError::Damaged { path: path.clone(), source };
    let mut found = Vec::new();
    for file in &mut files.entries {
        let id = file.number(2);
        for (kind, number) in OWNERS {
            file.edit_messages(kind, |entry| {
                entry.edit_messages(number, |owner| {
                    let of = match (owner.number(5), owner.number(4)) {
                        (0, _) => None,
                        (thread, 0) => Some(Owner::Thread(thread as u32)),
                        (group, 2) => Some(Owner::Group(group as u32)),
                        (process, _) => Some(Owner::Process(process as u32)),
                    };
                    let signal = owner.number(3) as i32;
                    if of.is_some() || signal != 0 {
                        found.push((id, of, signal));
                        owner.set_varint(3, 0);
                        owner.set_varint(4, 0);
                        owner.set_varint(5, 0);
                    }
                    Ok(())
                })
            })
            .map_err(damaged)?;
        }
    }
    if found.is_empty() {
        return Ok(Vec::new());
    }
    files.write()?;
    let places = places(images)?;
    let owned = |(id, owner, signal)| places.get(&id).map(|&(pid, fd)| Owned { pid, fd, owner, signal });
    Ok(found.into_iter().filter_map(owned).collect())
}
