//! Limits of processes in images (getrlimit(2)), where they were lifted for the dump: what they
//! really are.

use kip_criu_images::fields::{core_entry, rlimit_entry, task_core_entry, task_rlimits_entry};
use kip_criu_images::{CheckpointImageError, Images, Malformed};

/// Sets limits of a process: number, soft and hard limit; `u64::MAX`: none.
///
/// # Errors
/// The image's.
pub fn set_limits(images: &mut Images, pid: u32, limits: &[(u32, u64, u64)]) -> Result<(), CheckpointImageError> {
    let mut image = images.image(&format!("core-{pid}.img"))?;
    let damaged = image.damaged();
    for core in &mut image.entries {
        let edited = core.edit_messages::<Malformed>(core_entry::TC, |task| {
            task.edit_messages::<Malformed>(task_core_entry::RLIMITS, |all| {
                let mut number = 0;
                all.edit_messages::<Malformed>(task_rlimits_entry::RLIMITS, |limit| {
                    if let Some((_, soft, hard)) = limits.iter().find(|(which, ..)| *which == number) {
                        limit.set_varint(rlimit_entry::CUR, *soft);
                        limit.set_varint(rlimit_entry::MAX, *hard);
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
    use kip_criu_images::{FieldValue, Message};

    #[test]
    fn only_what_was_lifted_is_set() {
        let limit = |soft, hard| {
            Message(vec![(rlimit_entry::CUR, FieldValue::Varint(soft)), (rlimit_entry::MAX, FieldValue::Varint(hard))])
                .encode()
        };
        let each = (0..16).map(|n| (task_rlimits_entry::RLIMITS, FieldValue::Bytes(limit(n, 100 + n))));
        let all = Message(each.collect());
        let task = Message(vec![(task_core_entry::RLIMITS, FieldValue::Bytes(all.encode()))]);
        let core = vec![(core_entry::MTYPE, FieldValue::Varint(2)), (core_entry::TC, FieldValue::Bytes(task.encode()))];
        let core = Message(core);
        let mut images = Images::default();
        images.put_entries("core-7.img", &[core]);
        set_limits(&mut images, 7, &[(7, 4, u64::MAX)]).unwrap();
        let core = images.entries("core-7.img").unwrap().remove(0);
        let task = core.message(core_entry::TC).unwrap().unwrap();
        let all = task.message(task_core_entry::RLIMITS).unwrap().unwrap();
        let limits = all.messages(task_rlimits_entry::RLIMITS).unwrap();
        let pairs: Vec<_> = limits.iter().map(|l| (l.number(rlimit_entry::CUR), l.number(rlimit_entry::MAX))).collect();
        assert_eq!((pairs.len(), pairs[6], pairs[7], pairs[8]), (16, (6, 106), (4, u64::MAX), (8, 108)));
        assert_eq!(core.number(core_entry::MTYPE), 2);
    }
}
