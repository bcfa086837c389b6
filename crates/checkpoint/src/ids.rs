//! Another block of user and group ids for the processes of a snapshot.
//!
//! In the images all ids are those that the program sees, but for the mapping of its user
//! namespace, which leads to the block of the machine's ids that the proc had. A proc that comes to
//! another data directory has another block there.

use kip_criu_images::fields::{uid_gid_extent, userns_entry};
use kip_criu_images::{CheckpointImageError, FieldValue, Images, Malformed};

/// Lets the user namespaces of the images map to the block that begins at `now` where they map to
/// the one that began at `then`.
///
/// # Errors
/// An image is damaged.
pub fn move_id_block(images: &mut Images, then: u32, now: u32) -> Result<(), CheckpointImageError> {
    for (_, name) in images.numbered("userns") {
        let mut image = images.image(&name)?;
        let damaged = image.damaged();
        for entry in &mut image.entries {
            for field in [userns_entry::UID_MAP, userns_entry::GID_MAP] {
                let edited = entry.edit_messages::<Malformed>(field, |extent| {
                    for (number, value) in &mut extent.0 {
                        if *number == uid_gid_extent::LOWER_FIRST && *value == FieldValue::Varint(then.into()) {
                            *value = FieldValue::Varint(now.into());
                        }
                    }
                    Ok(())
                });
                edited.map_err(&damaged)?;
            }
        }
        images.put(&image);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_criu_images::Message;

    fn extent(first: u64, outside: u64) -> FieldValue {
        let fields =
            [(uid_gid_extent::FIRST, first), (uid_gid_extent::LOWER_FIRST, outside), (uid_gid_extent::COUNT, 65_536)];
        FieldValue::Bytes(Message(fields.map(|(field, value)| (field, FieldValue::Varint(value))).to_vec()).encode())
    }

    #[test]
    fn only_the_mapping_of_the_block_moves() {
        let entry = |outside| {
            let groups = [extent(0, outside), extent(7, 12)].map(|extent| (userns_entry::GID_MAP, extent));
            Message([(userns_entry::UID_MAP, extent(0, outside))].into_iter().chain(groups).collect())
        };
        let mut images = Images::default();
        images.put_entries("userns-9.img", &[entry(1000)]);
        move_id_block(&mut images, 1000, 2000).unwrap();
        assert_eq!(images.entries("userns-9.img").unwrap(), [entry(2000)]);
        move_id_block(&mut images, 1000, 3000).unwrap();
        assert_eq!(images.entries("userns-9.img").unwrap(), [entry(2000)]);
    }
}
