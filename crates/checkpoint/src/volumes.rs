//! Files of volumes in a snapshot: open and mapped files that lie outside of the proc's own, where others may write meanwhile.
//!
//! CRIU, and a plan made of its images, restore a file only if it has the size that it had. What
//! happens to a volume while its proc sleeps happens as if the proc ran and did nothing, so these sizes
//! are taken out of the images; the caller that wakes the proc decides itself whether the files are
//! still those that the proc had.

use crate::image::ImageError;
use crate::images::Images;
use std::collections::BTreeSet;

/// `fd_types` of regular files, and the field of a regular file's size.
const REG: u64 = 1;
const SIZE: u32 = 8;
/// open(2) flags.
const ACCESS: u64 = 3;
const APPEND: u64 = 0o2000;

/// A file below a mount point that the tree has open or mapped.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpenFile {
    /// Inside.
    pub path: String,
    /// The tree may change what is in it already.
    pub rewrites: bool,
}

/// Whether a path is at `point` or below it.
pub fn is_below(path: &str, point: &str) -> bool {
    path.strip_prefix(point).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The files below `points`, without their sizes in the images from now on. Those that have no name any more, and are
/// restored in another way, are not among them.
///
/// # Errors
/// An image is missing or damaged.
pub fn release(images: &mut Images, points: &[&str]) -> Result<Vec<OpenFile>, ImageError> {
    if points.is_empty() {
        return Ok(Vec::new());
    }
    let nameless = nameless(images)?;
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    let (mut found, mut changed) = (BTreeSet::new(), false);
    for file in &mut files.entries {
        if file.number(1) != REG {
            continue;
        }
        let Some(mut reg) = file.message(3).map_err(&damaged)? else { continue };
        let Some(name) = reg.string(6).filter(|name| points.iter().any(|point| is_below(name, point))) else {
            continue;
        };
        if reg.varint(SIZE).is_some() {
            reg.remove(SIZE);
            file.set_bytes(3, reg.encode());
            changed = true;
        }
        if !nameless.contains(&file.number(2)) {
            let flags = reg.number(2);
            found.insert(OpenFile { path: name, rewrites: flags & ACCESS != 0 && flags & APPEND == 0 });
        }
    }
    if changed {
        images.put(&files);
    }
    Ok(found.into_iter().collect())
}

/// Ids of files that were deleted while they were open.
fn nameless(images: &Images) -> Result<BTreeSet<u64>, ImageError> {
    Ok(images.entries_if_any("remap-fpath.img")?.iter().map(|entry| entry.number(1)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::testing::add;
    use crate::wire::{Message, Value};

    fn file(id: u64, path: &str, flags: u64) -> Message {
        let reg = Message(vec![
            (1, Value::Varint(id)),
            (2, Value::Varint(flags)),
            (6, Value::Bytes(path.as_bytes().to_vec())),
            (8, Value::Varint(7)),
        ]);
        Message(vec![(1, Value::Varint(REG)), (2, Value::Varint(id)), (3, Value::Bytes(reg.encode()))])
    }

    #[test]
    fn only_files_of_volumes_lose_their_size() {
        let mut images = Images::default();
        let files = [
            file(1, "/data/db", 2),
            file(2, "/data/log", 0o2001),
            file(3, "/database", 2),
            file(4, "/data/gone", 2),
            file(5, "/data/text", 0),
        ];
        add(&mut images, "files.img", &files);
        add(&mut images, "remap-fpath.img", &[Message(vec![(1, Value::Varint(4))])]);
        let open = |path: &str, rewrites| OpenFile { path: path.into(), rewrites };
        let expected = [open("/data/db", true), open("/data/log", false), open("/data/text", false)];
        assert_eq!(release(&mut images, &["/data", "/x"]).unwrap(), expected);
        assert_eq!(release(&mut images, &["/data"]).unwrap(), expected, "once more changes nothing");
        let sizes: Vec<bool> = images
            .entries("files.img")
            .unwrap()
            .iter()
            .map(|f| f.message(3).unwrap().unwrap().varint(SIZE).is_some())
            .collect();
        assert_eq!(sizes, [false, false, true, false, false]);
    }
}
