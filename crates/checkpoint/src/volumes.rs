//! Files of volumes in a snapshot: open and mapped files that lie outside of the proc's own, where
//! others may write meanwhile.
//!
//! CRIU, and a plan made of its images, restore a file only if it has the size that it had. What
//! happens to a volume while its proc sleeps happens as if the proc ran and did nothing, so these
//! sizes are taken out of the images; the caller that wakes the proc decides itself whether the
//! files are still those that the proc had.

use kip_criu_images::codes::kind;
use kip_criu_images::fields::{file_entry, reg_file_entry, remap_file_path_entry};
use kip_criu_images::{CheckpointImageError, Images};
use std::collections::BTreeSet;

/// open(2) flags.
const ACCESS: u64 = 3;
const APPEND: u64 = 0o2000;

/// A file below a mount point that the tree has open or mapped.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct VolumeFile {
    /// Inside.
    pub path: String,
    /// The tree may change what is in it already.
    pub rewrites: bool,
}

/// Whether a path is at `point` or below it.
pub fn is_below(path: &str, point: &str) -> bool {
    path.strip_prefix(point).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The files below `points`, without their sizes in the images from now on. Those that have no name
/// any more, and are restored in another way, are not among them.
///
/// # Errors
/// An image is missing or damaged.
pub fn release_volume_files(images: &mut Images, points: &[&str]) -> Result<Vec<VolumeFile>, CheckpointImageError> {
    if points.is_empty() {
        return Ok(Vec::new());
    }
    let nameless = nameless(images)?;
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    let (mut found, mut changed) = (BTreeSet::new(), false);
    for file in &mut files.entries {
        if file.number(file_entry::TYPE) != kind::REG {
            continue;
        }
        let Some(mut reg) = file.message(file_entry::REG).map_err(&damaged)? else { continue };
        let Some(name) =
            reg.string(reg_file_entry::NAME).filter(|name| points.iter().any(|point| is_below(name, point)))
        else {
            continue;
        };
        if reg.varint(reg_file_entry::SIZE).is_some() {
            reg.remove(reg_file_entry::SIZE);
            file.set_bytes(file_entry::REG, reg.encode());
            changed = true;
        }
        if !nameless.contains(&file.number(file_entry::ID)) {
            let flags = reg.number(reg_file_entry::FLAGS);
            found.insert(VolumeFile { path: name, rewrites: flags & ACCESS != 0 && flags & APPEND == 0 });
        }
    }
    if changed {
        images.put(&files);
    }
    Ok(found.into_iter().collect())
}

/// Ids of files that were deleted while they were open.
fn nameless(images: &Images) -> Result<BTreeSet<u64>, CheckpointImageError> {
    let remapped = images.entries_if_any("remap-fpath.img")?;
    Ok(remapped.iter().map(|entry| entry.number(remap_file_path_entry::ORIG_ID)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_criu_images::{FieldValue, Message};

    fn file(id: u64, path: &str, flags: u64) -> Message {
        let reg = Message(vec![
            (reg_file_entry::ID, FieldValue::Varint(id)),
            (reg_file_entry::FLAGS, FieldValue::Varint(flags)),
            (reg_file_entry::NAME, FieldValue::Bytes(path.as_bytes().to_vec())),
            (reg_file_entry::SIZE, FieldValue::Varint(7)),
        ]);
        Message(vec![
            (file_entry::TYPE, FieldValue::Varint(kind::REG)),
            (file_entry::ID, FieldValue::Varint(id)),
            (file_entry::REG, FieldValue::Bytes(reg.encode())),
        ])
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
        images.put_entries("files.img", &files);
        let remap = Message(vec![(remap_file_path_entry::ORIG_ID, FieldValue::Varint(4))]);
        images.put_entries("remap-fpath.img", &[remap]);
        let open = |path: &str, rewrites| VolumeFile { path: path.into(), rewrites };
        let expected = [open("/data/db", true), open("/data/log", false), open("/data/text", false)];
        assert_eq!(release_volume_files(&mut images, &["/data", "/x"]).unwrap(), expected);
        assert_eq!(release_volume_files(&mut images, &["/data"]).unwrap(), expected, "once more changes nothing");
        let sizes: Vec<bool> = images
            .entries("files.img")
            .unwrap()
            .iter()
            .map(|f| f.message(file_entry::REG).unwrap().unwrap().varint(reg_file_entry::SIZE).is_some())
            .collect();
        assert_eq!(sizes, [false, false, true, false, false]);
    }
}
