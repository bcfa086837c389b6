//! INET sockets of a snapshot: in the images each becomes a file `/socket:[INODE]` that the restore inherits.
//!
//! CRIU has no way to inherit an INET socket, but it looks up every regular file's name among the inherited
//! descriptors before it opens it. So the live socket, held elsewhere, goes back to the program as it was, with its
//! queues, and nothing of TCP is ever rebuilt. Crash in the middle: an image is replaced by rename, and turning an
//! image that is turned already changes nothing.

use crate::image::{Image, ImageError, numbered};
use crate::wire::{Message, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// `fd_types` of CRIU's fdinfo images.
const REG: u64 = 1;
const INETSK: u64 = 4;

/// An INET socket of the tree, as CRIU saw it at the freeze.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    /// Inode in sockfs, its identity while it lives.
    pub inode: u32,
}

/// The key under which the restore inherits the socket.
pub fn inherit_key(inode: u32) -> String {
    format!("socket:[{inode}]")
}

/// Turns every INET socket of the images into a file to inherit; returns the sockets.
pub fn turn_into_files(images: &Path) -> Result<Vec<Socket>, ImageError> {
    let path = images.join("files.img");
    let mut files = Image::read(&path)?;
    let damaged = |source| ImageError::Damaged { path: path.clone(), source };
    let mut sockets = Vec::new();
    let mut ids = BTreeSet::new();
    for file in &mut files.entries {
        if file.number(1) != INETSK {
            continue;
        }
        let Some(socket) = file.message(4).map_err(damaged)? else { continue };
        let found = Socket { inode: socket.number(2) as u32 };
        ids.insert(file.number(2));
        *file = as_file(file.number(2), &found, &socket);
        if !sockets.contains(&found) {
            sockets.push(found);
        }
    }
    if ids.is_empty() {
        return Ok(sockets);
    }
    files.write()?;
    for (_, path) in numbered(images, "fdinfo")? {
        let mut descriptors = Image::read(&path)?;
        let mut changed = false;
        for entry in &mut descriptors.entries {
            if entry.number(3) == INETSK && ids.contains(&entry.number(1)) {
                entry.set_varint(3, REG);
                changed = true;
            }
        }
        if changed {
            descriptors.write()?;
        }
    }
    Ok(sockets)
}

fn as_file(id: u64, socket: &Socket, entry: &Message) -> Message {
    let name = format!("/{}", inherit_key(socket.inode));
    let file = Message(vec![
        (1, Value::Varint(id)),
        (2, Value::Varint(entry.number(9))),
        (3, Value::Varint(0)),
        (5, Value::Bytes(entry.bytes(13).unwrap_or_default().to_vec())),
        (6, Value::Bytes(name.into_bytes())),
    ]);
    Message(vec![(1, Value::Varint(REG)), (2, Value::Varint(id)), (3, Value::Bytes(file.encode()))])
}

/// Paths (as seen inside) of the regular files that the images name: open ones and mapped ones.
pub fn file_paths(images: &Path) -> Result<Vec<String>, ImageError> {
    let path = images.join("files.img");
    let mut paths = Vec::new();
    for file in Image::read(&path)?.entries {
        let reg = file.message(3).map_err(|source| ImageError::Damaged { path: path.clone(), source })?;
        if let Some(name) = reg.and_then(|r| r.string(6))
            && !name.starts_with("/socket:[")
        {
            paths.push(name);
        }
    }
    paths.sort();
    paths.dedup();
    Ok(paths)
}
