//! Limits of processes in images (getrlimit(2)), where they were lifted for the dump: what they really are.

use crate::image::ImageError;
use crate::images::Images;
use crate::wire::Malformed;

/// TaskCoreEntry in a core image, its limits, and the list of them by number.
const TASK: u32 = 3;
const LIMITS: u32 = 8;
const EACH: u32 = 1;

/// Sets limits of a process: number, soft and hard limit; `u64::MAX`: none.
///
/// # Errors
/// The image's.
pub fn set(images: &mut Images, pid: u32, limits: &[(u32, u64, u64)]) -> Result<(), ImageError> {
    let mut image = images.image(&format!("core-{pid}.img"))?;
    let damaged = image.damaged();
    for core in &mut image.entries {
        let edited = core.edit_messages::<Malformed>(TASK, |task| {
            task.edit_messages::<Malformed>(LIMITS, |all| {
                let mut number = 0;
                all.edit_messages::<Malformed>(EACH, |limit| {
                    if let Some((_, soft, hard)) = limits.iter().find(|(which, ..)| *which == number) {
                        limit.set_varint(1, *soft);
                        limit.set_varint(2, *hard);
                    }
                    number += 1;
                    Ok(())
                })
            })
        });
        edited.map_err(&damaged)?;
    }
    images.put(&image);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::testing::add;
    use crate::wire::{Message, Value};

    #[test]
    fn only_what_was_lifted_is_set() {
        let limit = |soft, hard| Message(vec![(1, Value::Varint(soft)), (2, Value::Varint(hard))]).encode();
        let all = Message((0..16).map(|n| (1, Value::Bytes(limit(n, 100 + n)))).collect());
        let task = Message(vec![(8, Value::Bytes(all.encode()))]);
        let core = Message(vec![(1, Value::Varint(2)), (3, Value::Bytes(task.encode()))]);
        let mut images = Images::default();
        add(&mut images, "core-7.img", &[core]);
        set(&mut images, 7, &[(7, 4, u64::MAX)]).unwrap();
        let core = images.entries("core-7.img").unwrap().remove(0);
        let limits = core.message(3).unwrap().unwrap().message(8).unwrap().unwrap().messages(1).unwrap();
        let pairs: Vec<_> = limits.iter().map(|l| (l.number(1), l.number(2))).collect();
        assert_eq!((pairs.len(), pairs[6], pairs[7], pairs[8]), (16, (6, 106), (4, u64::MAX), (8, 108)));
        assert_eq!(core.number(1), 2);
    }
}
