//! INET sockets of a snapshot, and unix sockets that are connected to Kip: in the images each
//! becomes a file `/socket:[INODE]` that the restore inherits.
//!
//! CRIU has no way to inherit an INET socket, but it looks up every regular file's name among the
//! inherited descriptors before it opens it. So the live socket, held elsewhere, goes back to the
//! program as it was, with its queues, and nothing of TCP is ever rebuilt. Turning an image that is
//! turned already changes nothing.

use kip_criu_images::codes::kind;
use kip_criu_images::fields::{fdinfo_entry, file_entry, inet_sk_entry, mnt_entry, reg_file_entry};
use kip_criu_images::fields::{task_kobj_ids_entry, unix_sk_entry};
use kip_criu_images::{CheckpointImageError, FieldValue, Images, Malformed, Message};
use std::collections::{BTreeMap, BTreeSet};

/// An INET socket of the tree, or one to Kip, as CRIU saw it at the freeze.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    /// Inode in sockfs, its identity while it lives.
    pub inode: u32,
}

/// The key under which the restore inherits the socket.
pub fn inherit_key(inode: u32) -> String {
    format!("socket:[{inode}]")
}

/// CRIU's flag of a unix socket that is none of the tree's, USK_EXTERN.
const EXTERN: u64 = 1;

/// CRIU's word for a unix socket with that inode whose other side is not of the tree.
pub fn external(inode: u32) -> String {
    format!("unix[{inode}]")
}

/// Turns every INET socket of the images, and the unix sockets with these inodes, into a file to
/// inherit; returns the sockets. What CRIU notes of the other sides of those is left out.
pub fn turn_into_files(images: &mut Images, to_kip: &BTreeSet<u32>) -> Result<Vec<Socket>, CheckpointImageError> {
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    let mut sockets = Vec::new();
    let mut turned: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    let mut peers = BTreeSet::new();
    for file in &mut files.entries {
        let kind = file.number(file_entry::TYPE);
        let (described, numbers) = match kind {
            kind::INETSK => (file_entry::ISK, (inet_sk_entry::INO, inet_sk_entry::FLAGS, inet_sk_entry::FOWN)),
            kind::UNIXSK => (file_entry::USK, (unix_sk_entry::INO, unix_sk_entry::FLAGS, unix_sk_entry::FOWN)),
            _ => continue,
        };
        let Some(socket) = file.message(described).map_err(&damaged)? else { continue };
        let found = Socket { inode: socket.number(numbers.0) as u32 };
        if kind == kind::UNIXSK && !to_kip.contains(&found.inode) {
            continue;
        }
        if kind == kind::UNIXSK {
            peers.insert(socket.number(unix_sk_entry::PEER));
        }
        let id = file.number(file_entry::ID);
        turned.entry(kind).or_default().insert(id);
        let owner = socket.bytes(numbers.2).unwrap_or_default().to_vec();
        *file = as_file(id, &inherit_key(found.inode), socket.number(numbers.1), owner);
        if !sockets.contains(&found) {
            sockets.push(found);
        }
    }
    if turned.is_empty() {
        return Ok(sockets);
    }
    if !peers.is_empty() {
        let is_peer = |file: &Message| {
            let socket = file.message(file_entry::USK).ok().flatten();
            socket.is_some_and(|socket| {
                socket.number(unix_sk_entry::UFLAGS) & EXTERN != 0 && peers.contains(&socket.number(unix_sk_entry::INO))
            })
        };
        files.entries.retain(|file| !is_peer(file));
    }
    images.put(&files);
    for (kind, ids) in &turned {
        turn_descriptors(images, *kind, ids)?;
    }
    Ok(sockets)
}

/// Says of all descriptors of these files, which are of that kind, that they are of regular files.
pub(crate) fn turn_descriptors(
    images: &mut Images,
    kind: u64,
    ids: &BTreeSet<u64>,
) -> Result<(), CheckpointImageError> {
    for (_, name) in images.numbered("fdinfo") {
        let mut descriptors = images.image(&name)?;
        let mut changed = false;
        for entry in &mut descriptors.entries {
            if entry.number(fdinfo_entry::TYPE) == kind && ids.contains(&entry.number(fdinfo_entry::ID)) {
                entry.set_varint(fdinfo_entry::TYPE, kind::REG);
                changed = true;
            }
        }
        if changed {
            images.put(&descriptors);
        }
    }
    Ok(())
}

/// A file that is inherited by that key. `owner`: the message about signals, fcntl(2) F_SETOWN.
pub(crate) fn as_file(id: u64, key: &str, flags: u64, owner: Vec<u8>) -> Message {
    let file = Message(vec![
        (reg_file_entry::ID, FieldValue::Varint(id)),
        (reg_file_entry::FLAGS, FieldValue::Varint(flags)),
        (reg_file_entry::POS, FieldValue::Varint(0)),
        (reg_file_entry::FOWN, FieldValue::Bytes(owner)),
        (reg_file_entry::NAME, FieldValue::Bytes(format!("/{key}").into_bytes())),
    ]);
    Message(vec![
        (file_entry::TYPE, FieldValue::Varint(kind::REG)),
        (file_entry::ID, FieldValue::Varint(id)),
        (file_entry::REG, FieldValue::Bytes(file.encode())),
    ])
}

/// Paths (as seen inside) of the regular files that the images name: open ones and mapped ones.
pub fn file_paths(images: &Images) -> Result<Vec<String>, CheckpointImageError> {
    let damaged = images.damaged("files.img");
    let mut paths = Vec::new();
    for file in images.entries("files.img")? {
        let reg = file.message(file_entry::REG).map_err(&damaged)?;
        if let Some(name) = reg.and_then(|r| r.string(reg_file_entry::NAME))
            && !name.starts_with("/socket:[")
        {
            paths.push(name);
        }
    }
    paths.sort();
    paths.dedup();
    Ok(paths)
}

/// Puts connected pairs of unix sockets into an order that CRIU can restore; the first step after a
/// dump.
///
/// CRIU makes a pair in the task that it calls the master of the end it meets first, and expects
/// that task to be the other end's master too. The master is the task with the lowest pid that has
/// the end open. Where the other end is open in that task but also in one with a lower pid, CRIU
/// 4.2 stops with an assertion. Of the two orders one is always good: if each end's lowest pid had
/// the other end open as well, the two would be equal. CRIU meets the ends in the reverse order of
/// the image.
///
/// A connection that the program has not accepted yet has the listener as its peer, but the
/// listener does not have the connection as its own: CRIU finds such a peer only when the peer
/// comes first.
pub fn order_unix_pairs(images: &mut Images) -> Result<(), CheckpointImageError> {
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    const LISTENS: u64 = 10;
    let mut listeners = BTreeSet::new();
    // (place in the image, id, peer's inode) by inode.
    let mut ends: BTreeMap<u64, (usize, u64, u64)> = BTreeMap::new();
    for (place, file) in files.entries.iter().enumerate() {
        if file.number(file_entry::TYPE) == kind::UNIXSK
            && let Some(socket) = file.message(file_entry::USK).map_err(&damaged)?
        {
            let inode = socket.number(unix_sk_entry::INO);
            ends.insert(inode, (place, file.number(file_entry::ID), socket.number(unix_sk_entry::PEER)));
            if socket.number(unix_sk_entry::STATE) == LISTENS {
                listeners.insert(inode);
            }
        }
    }
    let owners = owners(images)?;
    let none = BTreeSet::new();
    let tasks = |id: u64| owners.get(&id).unwrap_or(&none);
    let mut swaps = Vec::new();
    for (inode, (place, id, peer)) in &ends {
        let Some((peer_place, peer_id, back)) = ends.get(peer) else { continue };
        // Each pair once, seen from the end that CRIU meets first.
        if back != inode || place <= peer_place {
            continue;
        }
        let (here, there) = (tasks(*id), tasks(*peer_id));
        let bad = here.first() != there.first() && here.first().is_some_and(|master| there.contains(master));
        if bad {
            swaps.push((*place, *peer_place));
        }
    }
    for listener in &listeners {
        let place = ends[listener].0;
        let first = ends.values().filter(|(_, _, peer)| peer == listener).map(|(waiting, ..)| *waiting).min();
        swaps.extend(first.filter(|waiting| *waiting < place).map(|waiting| (waiting, place)));
    }
    if swaps.is_empty() {
        return Ok(());
    }
    for (a, b) in swaps {
        files.entries.swap(a, b);
    }
    images.put(&files);
    Ok(())
}

/// Where each of the tree's mounts is, by CRIU's number of it.
pub fn mounts(images: &Images) -> Result<BTreeMap<u64, String>, CheckpointImageError> {
    let mut mounts = BTreeMap::new();
    for (_, name) in images.numbered("mountpoints") {
        let entries = images.entries(&name)?;
        let place = |mount: &Message| mount.string(mnt_entry::MOUNTPOINT).unwrap_or_default();
        mounts.extend(entries.iter().map(|mount| (mount.number(mnt_entry::MNT_ID), place(mount))));
    }
    Ok(mounts)
}

/// Says of unix sockets that have a path that they have it in the tree's root, where the images
/// name a mount that is not the tree's any more: that of an earlier run in which they were bound,
/// and from which they were held. Only CRIU reads it.
pub fn mend_mounts(images: &mut Images) -> Result<(), CheckpointImageError> {
    let mounts = mounts(images)?;
    let root = mounts.iter().find(|(_, place)| place.as_str() == "/").map(|(id, _)| *id);
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    let mut changed = false;
    for file in &mut files.entries {
        file.edit_messages::<Malformed>(file_entry::USK, |socket| {
            // A signed number, in zigzag.
            if let (Some(id), Some(root)) = (socket.varint(unix_sk_entry::MNT_ID), root)
                && id != 1
                && !mounts.contains_key(&(id >> 1))
            {
                socket.set_varint(unix_sk_entry::MNT_ID, root << 1);
                changed = true;
            }
            Ok(())
        })
        .map_err(&damaged)?;
    }
    if changed {
        images.put(&files);
    }
    Ok(())
}

/// Pids (inside) of the tasks that have each file open, by the file's id.
fn owners(images: &Images) -> Result<BTreeMap<u64, BTreeSet<u32>>, CheckpointImageError> {
    let mut tables: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (pid, name) in images.numbered("ids") {
        for ids in images.entries(&name)? {
            tables.entry(ids.number(task_kobj_ids_entry::FILES_ID)).or_default().push(pid);
        }
    }
    let mut owners: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
    for (table, name) in images.numbered("fdinfo") {
        let pids = tables.get(&u64::from(table)).cloned().unwrap_or_default();
        for descriptor in images.entries(&name)? {
            owners.entry(descriptor.number(fdinfo_entry::ID)).or_default().extend(&pids);
        }
    }
    Ok(owners)
}
