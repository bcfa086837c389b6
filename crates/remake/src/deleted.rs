//! Deleted files that are open, made anew: a file with what the old one had, opened as often as
//! that was, at the path that it had, and deleted.

use crate::failure::{RemakeError, errno, system};
use crate::note::MadeAlready;
use crate::place::{inside, is_in_root};
use kip_criu_images::GhostFile;
use kip_criu_images::codes::{kind, remap};
use kip_criu_images::fields::{file_entry, fown_entry, reg_file_entry, remap_file_path_entry};
use kip_criu_images::{Images, Message};
use rustix::fs::{CWD, Gid, Mode, OFlags, SeekFrom, Uid};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

/// A longer image is CRIU's to read.
const MOST_BYTES: u64 = 64 << 20;
/// Flags of open(2) that an open file keeps.
pub const KEPT_FLAGS: OFlags = OFlags::ACCMODE
    .union(OFlags::APPEND)
    .union(OFlags::NONBLOCK)
    .union(OFlags::SYNC)
    .union(OFlags::DSYNC)
    .union(OFlags::DIRECT)
    .union(OFlags::NOATIME);

/// How one of the open files was open.
struct Open {
    id: u64,
    flags: OFlags,
    position: u64,
}

/// A deleted file.
struct Deleted {
    path: String,
    file: GhostFile,
    opens: Vec<Open>,
}

/// Makes those of the files with these ids that are deleted regular files.
///
/// # Errors
/// See [`RemakeError`]; what was made is closed again.
pub(crate) fn files(
    images: &Images,
    files: &BTreeMap<u64, Message>,
    wanted: &[u64],
    around: &impl MadeAlready,
) -> Result<Vec<(u64, OwnedFd)>, RemakeError> {
    let mut found: BTreeMap<u64, Deleted> = BTreeMap::new();
    let mut numbers = None;
    for id in wanted {
        let Some(file) = files.get(id).filter(|file| file.number(file_entry::TYPE) == kind::REG) else { continue };
        let entry = file.message(file_entry::REG)?.unwrap_or_default();
        let numbers = match &numbers {
            Some(numbers) => numbers,
            None => numbers.insert(ghosts(images)?),
        };
        let number = numbers.get(id).ok_or(RemakeError::Unsupported("a file that is not deleted"))?;
        let open = open_of(images, *id, &entry)?;
        if !found.contains_key(number) {
            let file = images.ghost(*number, MOST_BYTES)?;
            let file = file.ok_or(RemakeError::Unsupported("a deleted file that is long or no regular one"))?;
            let path = entry.string(reg_file_entry::NAME).unwrap_or_default();
            found.insert(*number, Deleted { path, file, opens: Vec::new() });
        }
        found.get_mut(number).expect("just made").opens.push(open);
    }
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let root = around.files().map_err(system("the proc's files"))?;
    let contents = found.values().map(|deleted| contents(images, &deleted.file)).collect::<Result<Vec<_>, _>>()?;
    let first = around.root();
    inside(None, Some(root.as_fd()), || {
        let mut made = Vec::new();
        for (deleted, contents) in found.values().zip(&contents) {
            made.extend(make(deleted, contents, first)?);
        }
        Ok(made)
    })
}

/// The numbers of the images of deleted files, by the ids of the open files.
fn ghosts(images: &Images) -> Result<BTreeMap<u64, u64>, RemakeError> {
    let entries = images.entries_if_any("remap-fpath.img")?;
    let ghosts = entries.iter().filter(|entry| entry.number(remap_file_path_entry::REMAP_TYPE) == remap::GHOST);
    let ids =
        |entry: &Message| (entry.number(remap_file_path_entry::ORIG_ID), entry.number(remap_file_path_entry::REMAP_ID));
    Ok(ghosts.map(ids).collect())
}

fn open_of(images: &Images, id: u64, entry: &Message) -> Result<Open, RemakeError> {
    if entry.message(reg_file_entry::FOWN)?.unwrap_or_default().number(fown_entry::PID) != 0 {
        return Err(RemakeError::Unsupported("an open file with an owner"));
    }
    let path = entry.bytes(reg_file_entry::NAME).unwrap_or_default();
    if !is_in_root(images, path, entry.varint(reg_file_entry::MNT_ID))? {
        return Err(RemakeError::Unsupported("a deleted file that was not in /"));
    }
    let flags = OFlags::from_bits_retain(entry.number(reg_file_entry::FLAGS) as u32) & KEPT_FLAGS;
    Ok(Open { id, flags, position: entry.number(reg_file_entry::POS) })
}

/// The pieces of a deleted file, each with its place.
fn contents(images: &Images, file: &GhostFile) -> Result<Vec<(u64, Vec<u8>)>, RemakeError> {
    let image = File::open(images.directory().join(&file.image)).map_err(system("a deleted file"))?;
    let read = |(at, offset, length): &(u64, u64, u64)| {
        let mut bytes = vec![0; *length as usize];
        image.read_exact_at(&mut bytes, *at).map_err(system("what was in a deleted file"))?;
        Ok((*offset, bytes))
    };
    file.pieces.iter().map(read).collect()
}

/// Makes one and opens it; it is deleted again whatever fails.
fn make(deleted: &Deleted, contents: &[(u64, Vec<u8>)], first: u32) -> Result<Vec<(u64, OwnedFd)>, RemakeError> {
    let what = errno("a deleted file");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let path = deleted.path.as_str();
    let made = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(&what)?);
    let opened = fill(&made, deleted, contents, first).and_then(|()| {
        let open = |open: &Open| {
            let fd = rustix::fs::open(path, open.flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
            rustix::fs::seek(&fd, SeekFrom::Start(open.position))?;
            Ok((open.id, fd))
        };
        deleted.opens.iter().map(open).collect::<Result<Vec<_>, _>>().map_err(&what)
    });
    rustix::fs::unlinkat(CWD, path, rustix::fs::AtFlags::empty()).map_err(&what)?;
    opened
}

fn fill(made: &File, deleted: &Deleted, contents: &[(u64, Vec<u8>)], first: u32) -> Result<(), RemakeError> {
    let what = system("what was in a deleted file");
    for (offset, bytes) in contents {
        made.write_all_at(bytes, *offset).map_err(&what)?;
    }
    made.set_len(deleted.file.size).map_err(&what)?;
    let (user, group) = deleted.file.owner;
    let (user, group) = (Uid::from_raw(first + user), Gid::from_raw(first + group));
    let owned = rustix::fs::fchown(made, Some(user), Some(group));
    owned
        .and_then(|()| rustix::fs::fchmod(made, Mode::from_raw_mode(deleted.file.mode & 0o7777)))
        .map_err(errno("the owner of a deleted file"))
}
