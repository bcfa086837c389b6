//! System V IPC in images, sysvipc(7): shared memory segments, semaphores and message queues, and
//! how much of them there may be.
//!
//! Owns what of an IPC namespace is in the images; what segments contain is in
//! `pagemap-shmem-ID.img`, as other shared memory is. Times and numbers of processes that the
//! kernel notes of objects are not there, nor what a process is to undo at its end (SEM_UNDO of
//! semop(2)): no interface gives it.

use crate::codes::status;
use crate::fields::{
    ipc_desc_entry, ipc_msg, ipc_msg_entry, ipc_sem_entry, ipc_shm_entry, ipc_var_entry as var, vma_entry,
};
use crate::{CheckpointImageError, Images, Malformed, Message, Mixed};
use std::collections::BTreeMap;

/// `mode` of a segment that goes with its last attachment, and of one that is locked in memory,
/// shmctl(2).
const SHM_DEST: u64 = 0o1000;
const SHM_LOCKED: u64 = 0o2000;
/// Contents in an image fill up to a multiple of that, bytes.
const ALIGNED: usize = 8;
/// Bytes.
const PAGE: u64 = 4096;
/// What the kernel allows in a new namespace, by the file below /proc/sys/kernel: SHMMAX, SHMALL of
/// linux/shm.h, and their like in linux/sem.h and linux/msg.h.
const SETTINGS: [(&str, u32, &[u64]); 8] = [
    ("sem", var::SEM_CTLS, &[32_000, 1_024_000_000, 500, 32_000]),
    ("msgmax", var::MSG_CTLMAX, &[8192]),
    ("msgmnb", var::MSG_CTLMNB, &[16_384]),
    ("msgmni", var::MSG_CTLMNI, &[32_000]),
    ("shmmax", var::SHM_CTLMAX, &[u64::MAX - (1 << 24)]),
    ("shmall", var::SHM_CTLALL, &[u64::MAX - (1 << 24)]),
    ("shmmni", var::SHM_CTLMNI, &[4096]),
    ("shm_rmid_forced", var::SHM_RMID_FORCED, &[0]),
];

/// A shared memory segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its number.
    pub id: u64,
    /// Bytes.
    pub size: u64,
    /// It goes with its last attachment.
    pub removed: bool,
    /// It is locked in memory, SHM_LOCK.
    pub locked: bool,
    /// It has no pagemap: it is of huge pages, or an older CRIU has written it.
    pub unusual: bool,
}

/// What an object is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SystemVKind {
    /// Shared memory.
    Segment(Segment),
    /// Values.
    Semaphores(Vec<u16>),
    /// A message queue.
    Queue {
        /// Bytes that it may have.
        most: u64,
        /// Types and texts.
        messages: Vec<(u64, Vec<u8>)>,
    },
}

/// One of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemVObject {
    /// Its number.
    pub id: u64,
    /// Its key; 0: it has none.
    pub key: u64,
    /// Permissions.
    pub mode: u64,
    /// User and group that own it, as numbered inside.
    pub owner: (u64, u64),
    /// User and group that made it.
    pub creator: (u64, u64),
    /// The rest.
    pub kind: SystemVKind,
}

/// An IPC namespace.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SystemV {
    /// Files below /proc/sys/kernel that are otherwise than in a new namespace, and what they say.
    pub settings: Vec<(&'static str, String)>,
    /// All that is there.
    pub objects: Vec<SystemVObject>,
}

impl SystemV {
    /// What is in the images; nothing where the namespace is not in them.
    ///
    /// # Errors
    /// An image is damaged.
    pub fn read(images: &Images) -> Result<SystemV, CheckpointImageError> {
        let (mut settings, mut objects) = (Vec::new(), Vec::new());
        each(images, "ipcns-var", &mut |entry, _| {
            settings = changed(entry)?;
            Ok(())
        })?;
        each(images, "ipcns-shm", &mut |entry, _| {
            objects.push(segment(entry)?);
            Ok(())
        })?;
        each(images, "ipcns-sem", &mut |entry, mixed| {
            let values = padded(mixed, entry.number(ipc_sem_entry::NSEMS).saturating_mul(2))?;
            let values = values.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]])).collect();
            objects.push(SystemVObject::of(entry, ipc_sem_entry::DESC, SystemVKind::Semaphores(values))?);
            Ok(())
        })?;
        each(images, "ipcns-msg", &mut |entry, mixed| {
            let mut messages = Vec::new();
            for _ in 0..entry.number(ipc_msg_entry::QNUM) {
                let head = mixed.entry()?.ok_or(Malformed { at: 0 })?;
                let text = padded(mixed, head.number(ipc_msg::MSIZE))?;
                messages.push((head.number(ipc_msg::MTYPE), text.to_vec()));
            }
            let most = entry.number(ipc_msg_entry::QBYTES);
            objects.push(SystemVObject::of(entry, ipc_msg_entry::DESC, SystemVKind::Queue { most, messages })?);
            Ok(())
        })?;
        Ok(SystemV { settings, objects })
    }

    /// Its shared memory.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + '_ {
        self.objects.iter().filter_map(|object| match object.kind {
            SystemVKind::Segment(segment) => Some(segment),
            _ => None,
        })
    }

    /// Whether a process has a segment attached of which it has unmapped, or moved, a part. Its
    /// mappings are those of `mm_entry`, in the order of their addresses.
    pub(crate) fn is_attached_in_part(&self, mappings: &[Message]) -> bool {
        // Of each that has begun: where its next piece has to be, and how much of it there is.
        let mut begun: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for vma in mappings.iter().filter(|vma| vma.number(vma_entry::STATUS) & status::SYSVIPC != 0) {
            let [id, start, end, offset] =
                [vma_entry::SHMID, vma_entry::START, vma_entry::END, vma_entry::PGOFF].map(|field| vma.number(field));
            if begun.remove(&id).map_or(offset, |(next, done)| u64::from((start, offset) != (next, done))) != 0 {
                return true;
            }
            let done = offset.saturating_add(end.saturating_sub(start));
            if self.segments().any(|segment| segment.id == id && done < segment.size.next_multiple_of(PAGE)) {
                begun.insert(id, (end, done));
            }
        }
        !begun.is_empty()
    }
}

impl SystemVObject {
    /// `field`: where the entry has its description.
    fn of(entry: &Message, field: u32, kind: SystemVKind) -> Result<SystemVObject, Malformed> {
        let desc = entry.message(field)?.unwrap_or_default();
        let number = |field| desc.number(field);
        Ok(SystemVObject {
            id: number(ipc_desc_entry::ID),
            key: number(ipc_desc_entry::KEY),
            mode: number(ipc_desc_entry::MODE) & 0o777,
            owner: (number(ipc_desc_entry::UID), number(ipc_desc_entry::GID)),
            creator: (number(ipc_desc_entry::CUID), number(ipc_desc_entry::CGID)),
            kind,
        })
    }
}

fn segment(entry: &Message) -> Result<SystemVObject, Malformed> {
    let desc = entry.message(ipc_shm_entry::DESC)?.unwrap_or_default();
    let mode = desc.number(ipc_desc_entry::MODE);
    let segment = Segment {
        id: desc.number(ipc_desc_entry::ID),
        size: entry.number(ipc_shm_entry::SIZE),
        removed: mode & SHM_DEST != 0,
        locked: mode & SHM_LOCKED != 0,
        unusual: entry.number(ipc_shm_entry::IN_PAGEMAPS) == 0 || entry.number(ipc_shm_entry::HUGETLB_FLAG) != 0,
    };
    SystemVObject::of(entry, ipc_shm_entry::DESC, SystemVKind::Segment(segment))
}

/// What is otherwise than in a new namespace.
fn changed(entry: &Message) -> Result<Vec<(&'static str, String)>, Malformed> {
    let mut found = Vec::new();
    for (name, field, usual) in SETTINGS {
        let values = entry.varints(field)?;
        if !values.is_empty() && values != usual {
            found.push((name, values.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")));
        }
    }
    Ok(found)
}

/// So many bytes, and what fills them up.
fn padded<'a>(mixed: &mut Mixed<'a>, length: u64) -> Result<&'a [u8], Malformed> {
    let length = usize::try_from(length).map_err(|_| Malformed { at: 0 })?;
    let whole = length.checked_next_multiple_of(ALIGNED).ok_or(Malformed { at: 0 })?;
    Ok(&mixed.contents(whole)?[..length])
}

/// Each entry of the images of such a name; what `take` reads of the bytes behind it belongs to it.
fn each(
    images: &Images,
    prefix: &str,
    take: &mut dyn FnMut(&Message, &mut Mixed<'_>) -> Result<(), Malformed>,
) -> Result<(), CheckpointImageError> {
    for (_, name) in images.numbered(prefix) {
        let Some(mut mixed) = images.mixed(&name)? else { continue };
        let mut all = || {
            while let Some(entry) = mixed.entry()? {
                take(&entry, &mut mixed)?;
            }
            Ok(())
        };
        all().map_err(images.damaged(&name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FieldValue;

    fn message(fields: &[(u32, u64)]) -> Message {
        Message(fields.iter().map(|(field, value)| (*field, FieldValue::Varint(*value))).collect())
    }

    fn described(id: u64, key: u64, mode: u64, fields: &[(u32, u64)]) -> Message {
        let desc = message(&[
            (ipc_desc_entry::KEY, key),
            (ipc_desc_entry::UID, 7),
            (ipc_desc_entry::GID, 8),
            (ipc_desc_entry::CUID, 5),
            (ipc_desc_entry::CGID, 6),
            (ipc_desc_entry::MODE, mode),
            (ipc_desc_entry::ID, id),
        ]);
        let mut entry = Message::default();
        entry.set_bytes(1, desc.encode());
        entry.0.extend(message(fields).0);
        entry
    }

    /// An image of entries and the bytes behind each.
    fn image(parts: &[(Message, &[u8])]) -> Vec<u8> {
        let mut bytes = [0x5456_4319u32.to_le_bytes(), 1u32.to_le_bytes()].concat();
        for (entry, contents) in parts {
            let encoded = entry.encode();
            bytes.extend((encoded.len() as u32).to_le_bytes());
            bytes.extend(encoded);
            bytes.extend(*contents);
        }
        bytes
    }

    fn read(files: &[(&str, Vec<u8>)]) -> Result<SystemV, CheckpointImageError> {
        let files: BTreeMap<_, _> = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect();
        SystemV::read(&Images::of_files(files).unwrap())
    }

    fn segment(mode: u64, more: (u32, u64)) -> Vec<u8> {
        let fields = [(ipc_shm_entry::SIZE, 5000), (ipc_shm_entry::IN_PAGEMAPS, 1), more];
        image(&[(described(3, 9, mode, &fields), &[])])
    }

    #[test]
    fn what_is_in_the_images_is_read() {
        let sems = described(32_770, 4, 0o600, &[(ipc_sem_entry::NSEMS, 3)]);
        let queue = described(1, 0, 0o640, &[(ipc_msg_entry::QBYTES, 12_345), (ipc_msg_entry::QNUM, 2)]);
        let text = |kind, size| message(&[(ipc_msg::MTYPE, kind), (ipc_msg::MSIZE, size)]);
        let usual = message(&[(var::MSG_CTLMAX, 8192), (var::SHM_CTLMNI, 5000), (var::SHM_RMID_FORCED, 0)]);
        let files = [
            ("ipcns-shm-9.img", segment(0o1660, (ipc_shm_entry::HUGETLB_FLAG, 0))),
            ("ipcns-sem-9.img", image(&[(sems, &[1, 0, 2, 1, 255, 127, 0, 0])])),
            ("ipcns-msg-9.img", image(&[(queue, &[]), (text(4, 0), &[]), (text(3, 9), b"nine char\0\0\0\0\0\0\0")])),
            ("ipcns-var-9.img", image(&[(usual, &[])])),
        ];
        let found = read(&files).unwrap();
        let shared = Segment { id: 3, size: 5000, removed: true, locked: false, unusual: false };
        assert_eq!(found.segments().collect::<Vec<_>>(), [shared]);
        assert_eq!(found.settings, [("shmmni", "5000".to_owned())]);
        let object = |id, key, mode, kind| SystemVObject { id, key, mode, owner: (7, 8), creator: (5, 6), kind };
        let messages = vec![(4, Vec::new()), (3, b"nine char".to_vec())];
        assert_eq!(
            found.objects,
            [
                object(3, 9, 0o660, SystemVKind::Segment(shared)),
                object(32_770, 4, 0o600, SystemVKind::Semaphores(vec![1, 258, 32_767])),
                object(1, 0, 0o640, SystemVKind::Queue { most: 12_345, messages }),
            ]
        );
        for cut in 1..16 {
            let mut short = files.clone();
            short[2].1.truncate(files[2].1.len() - cut);
            assert!(read(&short).is_err(), "{cut} bytes are missing");
        }
        // A namespace that is held is not in the images.
        assert_eq!(read(&[]).unwrap(), SystemV::default());
    }

    #[test]
    fn what_is_unusual_of_a_segment_is_known() {
        let found = |mode, more| {
            let one = read(&[("ipcns-shm-9.img", segment(mode, more))]).unwrap().segments().next().unwrap();
            (one.removed, one.locked, one.unusual)
        };
        assert_eq!(found(0o600, (ipc_shm_entry::HUGETLB_FLAG, 0)), (false, false, false));
        assert_eq!(found(0o600, (ipc_shm_entry::HUGETLB_FLAG, 2048)), (false, false, true));
        assert_eq!(found(0o600, (ipc_shm_entry::IN_PAGEMAPS, 0)), (false, false, true));
        assert_eq!(found(0o3600, (ipc_shm_entry::HUGETLB_FLAG, 0)), (true, true, false));
    }

    #[test]
    fn a_segment_is_attached_whole_or_in_part() {
        let one = |id, size| {
            let segment = Segment { id, size, removed: false, locked: false, unusual: false };
            SystemVObject { id, key: 0, mode: 0, owner: (0, 0), creator: (0, 0), kind: SystemVKind::Segment(segment) }
        };
        let there = SystemV { settings: vec![], objects: vec![one(0, 3 * PAGE - 9), one(7, PAGE)] };
        let in_part = |pieces: &[(u64, u64, u64, u64)]| {
            let vma = |(id, start, end, offset): &(u64, u64, u64, u64)| {
                message(&[
                    (vma_entry::SHMID, *id),
                    (vma_entry::START, start * PAGE),
                    (vma_entry::END, end * PAGE),
                    (vma_entry::PGOFF, offset * PAGE),
                    (vma_entry::STATUS, status::SYSVIPC | status::ANON_SHARED),
                ])
            };
            there.is_attached_in_part(&pieces.iter().map(vma).collect::<Vec<_>>())
        };
        assert!(!in_part(&[]) && !in_part(&[(0, 10, 13, 0), (7, 13, 14, 0), (0, 14, 17, 0)]));
        assert!(!in_part(&[(0, 10, 11, 0), (0, 11, 13, 1), (7, 20, 21, 0), (7, 21, 22, 0)]), "split, and twice");
        assert!(in_part(&[(0, 10, 12, 0)]), "without its end");
        assert!(in_part(&[(0, 11, 13, 1)]), "without its beginning");
        assert!(in_part(&[(0, 10, 11, 0), (0, 12, 13, 2)]), "with a hole");
        assert!(in_part(&[(0, 10, 11, 0), (0, 12, 14, 1)]), "moved apart");
    }
}
