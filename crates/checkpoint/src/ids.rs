//! Another block of user and group ids for the processes of a snapshot.
//!
//! In the images all ids are those that the program sees, but for the mapping of its user namespace, which leads to the block
//! of the machine's ids that the proc had. A proc that comes to another data directory has another block there.

use crate::image::{Image, ImageError, numbered};
use crate::wire::{Malformed, Value};
use std::path::Path;

/// Lets the user namespaces of the images in `to` map to the block that begins at `now` where they map to the one that began at
/// `then`. The changed images replace those of the same name in `to`; a link there is not written through.
///
/// # Errors
/// An image cannot be read or written, or is damaged.
pub fn move_block(to: &Path, then: u32, now: u32) -> Result<(), ImageError> {
    /// Fields of a `userns_entry`: the mappings of users and groups.
    const MAPPINGS: [u32; 2] = [1, 2];
    /// Field of a `uid_gid_extent`: the first id outside.
    const OUTSIDE: u32 = 2;
    for (_, path) in numbered(to, "userns")? {
        let mut image = Image::read(&path)?;
        for entry in &mut image.entries {
            for field in MAPPINGS {
                let edited = entry.edit_messages::<Malformed>(field, |extent| {
                    for (number, value) in &mut extent.0 {
                        if *number == OUTSIDE && *value == Value::Varint(then.into()) {
                            *value = Value::Varint(now.into());
                        }
                    }
                    Ok(())
                });
                edited.map_err(|source| ImageError::Damaged { path: path.clone(), source })?;
            }
        }
        image.write()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Message;
    use std::fs;

    fn extent(first: u64, outside: u64) -> Value {
        let fields = vec![(1, Value::Varint(first)), (2, Value::Varint(outside)), (3, Value::Varint(65_536))];
        Value::Bytes(Message(fields).encode())
    }

    #[test]
    fn the_mapping_moves_and_what_it_is_linked_to_stays() {
        let dir = tempfile::tempdir().unwrap();
        let image = |outside| {
            let entry = Message(vec![(1, extent(0, outside)), (2, extent(0, outside)), (2, extent(7, 12))]).encode();
            [&[0x19, 0x43, 0x56, 0x54, 1, 2, 3, 4][..], &(entry.len() as u32).to_le_bytes(), &entry].concat()
        };
        let (sealed, moved) = (dir.path().join("sealed"), dir.path().join("userns-9.img"));
        fs::write(&sealed, image(1000)).unwrap();
        fs::hard_link(&sealed, &moved).unwrap();
        move_block(dir.path(), 1000, 2000).unwrap();
        assert_eq!(fs::read(&moved).unwrap(), image(2000));
        assert_eq!(fs::read(&sealed).unwrap(), image(1000));
    }
}
