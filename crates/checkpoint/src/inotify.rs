//! inotify instances of a snapshot. Their queue is in no image, and changes of files that no
//! instance watches are lost: so they are held open through the sleep, as sockets are, watches and
//! queue with them, and either engine gives them back.
//!
//! A watch holds an inode, not a mount. It lives as long as the file system: that of `/` and of
//! `/usr` by the mounts that are held, that of a volume anyway. /proc ends with the tree, so an
//! instance that watches something there is CRIU's to make anew. For CRIU an instance that is held
//! becomes a file `/inotify:[ID]`, in copies of the images: see [`crate::sockets`].

pub mod names;

use crate::objects::HeldObject;
use crate::sockets::{self, as_file};
use kip_criu_images::codes::kind;
use kip_criu_images::fields::{file_entry, inotify_file_entry, inotify_wd_entry, mnt_entry};
use kip_criu_images::processes::places;
use kip_criu_images::{CheckpointImageError, Images, Malformed, Message};
use std::collections::BTreeSet;

/// IN_ACCESS, IN_CLOSE_WRITE, IN_CLOSE_NOWRITE, IN_OPEN: what the end of the tree and a wake do
/// themselves to files that the program has open.
const BY_SLEEP: u64 = 0x1 | 0x8 | 0x10 | 0x20;

/// An instance that is to be held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InotifyInstance {
    /// Where it is.
    pub object: HeldObject,
    /// The sleep itself may be an event for it.
    pub sees_sleep: bool,
}

/// The key under which the restore inherits the instance.
pub fn inherit_key(id: u64) -> String {
    format!("inotify:[{id}]")
}

/// The instances that can be held.
pub fn instances(images: &Images) -> Result<Vec<InotifyInstance>, CheckpointImageError> {
    let damaged = images.damaged("files.img");
    let files = images.entries("files.img")?;
    let mut found = Vec::new();
    let inotify = files.iter().filter(|file| file.number(file_entry::TYPE) == kind::INOTIFY);
    let (proc, places) = (proc_device(images)?, places(images)?);
    for file in inotify {
        let Some(&(pid, fd)) = places.get(&file.number(file_entry::ID)) else { continue };
        if !watches_device(file, proc).map_err(&damaged)? {
            let watches = watches(file).map_err(&damaged)?;
            let sees_sleep = watches.iter().any(|watch| watch.number(inotify_wd_entry::MASK) & BY_SLEEP != 0);
            found.push(InotifyInstance {
                object: HeldObject { id: file.number(file_entry::ID), kind: kind::INOTIFY, pid, fd },
                sees_sleep,
            });
        }
    }
    Ok(found)
}

/// Makes files to inherit of these instances, which are held. `images` are those of one wake.
pub fn turn_into_files(images: &mut Images, ids: &BTreeSet<u64>) -> Result<(), CheckpointImageError> {
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    for file in &mut files.entries {
        let id = file.number(file_entry::ID);
        if file.number(file_entry::TYPE) == kind::INOTIFY && ids.contains(&id) {
            let part = file.message(file_entry::IFY).map_err(&damaged)?;
            let part = part.unwrap_or_default();
            let owner = part.bytes(inotify_file_entry::FOWN).unwrap_or_default().to_vec();
            *file = as_file(id, &inherit_key(id), part.number(inotify_file_entry::FLAGS), owner);
        }
    }
    images.put(&files);
    sockets::turn_descriptors(images, kind::INOTIFY, ids)
}

/// The device of the tree's /proc.
pub(crate) fn proc_device(images: &Images) -> Result<Option<u64>, CheckpointImageError> {
    for (_, name) in images.numbered("mountpoints") {
        let entries = images.entries(&name)?;
        let mut mounts = entries.iter();
        if let Some(mount) = mounts.find(|mount| mount.string(mnt_entry::MOUNTPOINT).as_deref() == Some("/proc")) {
            return Ok(Some(mount.number(mnt_entry::ROOT_DEV)));
        }
    }
    Ok(None)
}

/// Whether an instance watches something there.
pub(crate) fn watches_device(file: &Message, device: Option<u64>) -> Result<bool, Malformed> {
    Ok(device.is_some() && watches(file)?.iter().any(|watch| watch.varint(inotify_wd_entry::S_DEV) == device))
}

/// The devices of which something is watched, as the kernel counts them.
pub fn watched(images: &Images) -> Result<BTreeSet<u64>, CheckpointImageError> {
    let damaged = images.damaged("files.img");
    let mut devices = BTreeSet::new();
    for file in images.entries("files.img")?.iter().filter(|file| file.number(file_entry::TYPE) == kind::INOTIFY) {
        let watches = watches(file).map_err(&damaged)?;
        devices.extend(watches.iter().filter_map(|watch| watch.varint(inotify_wd_entry::S_DEV)));
    }
    Ok(devices)
}

fn watches(file: &Message) -> Result<Vec<Message>, Malformed> {
    file.message(file_entry::IFY)?.unwrap_or_default().messages(inotify_file_entry::WD)
}
