//! Files that have a name, and are open or mapped by another one that is gone: sem_open(3) of glibc
//! makes a semaphore by a name of its own, links it to the one that was asked for, and removes its
//! own.
//!
//! CRIU makes a hard link to each, `link_remap.N` in the same directory, and its restore removes
//! that. Here such a file gets the name that it has, so that both engines open it by that.

use crate::procfs::rename;
use crate::volumes::is_below;
use kip_criu_images::codes::remap;
use kip_criu_images::fields::{file_entry, reg_file_entry, remap_file_path_entry};
use kip_criu_images::{CheckpointImageError, Images};
use rustix::fs::{AtFlags, Dir, FileType, OFlags, ResolveFlags, Stat, statat, unlinkat};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// So many entries of a directory are looked at for another name.
const MOST_ENTRIES: usize = 10_000;

/// Changes the images of a frozen tree, of which `init` is the host pid of the first process. Files
/// below mount points in `volumes` keep CRIU's links: other programs may remove their names.
///
/// # Errors
/// An image is damaged. A file of which no name is found keeps CRIU's link.
pub fn use_other_names(images: &mut Images, init: u32, volumes: &[&str]) -> Result<(), CheckpointImageError> {
    let linked: BTreeMap<u64, u64> = images
        .entries_if_any("remap-fpath.img")?
        .iter()
        .filter(|entry| entry.number(remap_file_path_entry::REMAP_TYPE) == remap::LINKED)
        .map(|entry| (entry.number(remap_file_path_entry::ORIG_ID), entry.number(remap_file_path_entry::REMAP_ID)))
        .collect();
    if linked.is_empty() {
        return Ok(());
    }
    let Ok(root) = File::open(format!("/proc/{init}/root")) else { return Ok(()) };
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    let mut names: BTreeMap<u64, String> = BTreeMap::new();
    for file in &files.entries {
        let reg = file.message(file_entry::REG).map_err(&damaged)?;
        names.extend(reg.and_then(|r| Some((file.number(file_entry::ID), r.string(reg_file_entry::NAME)?))));
    }
    let mut renamed = BTreeMap::new();
    for (id, link) in &linked {
        let Some((directory, link)) = names.get(link).and_then(|path| path.rsplit_once('/')) else { continue };
        if volumes.iter().any(|point| is_below(directory, point)) {
            continue;
        }
        let found =
            open_directory(root.as_fd(), directory).ok().and_then(|open| Some((other_name(open.as_fd(), link)?, open)));
        if let Some((name, open)) = found {
            renamed.insert(*id, format!("{directory}/{name}"));
            if let Err(error) = unlinkat(&open, link, AtFlags::empty()) {
                tracing::warn!(directory, link, %error, "a link of CRIU's stays");
            }
        }
    }
    for file in files.entries.iter_mut() {
        let Some(name) = renamed.get(&file.number(file_entry::ID)) else { continue };
        rename(file, name).map_err(&damaged)?;
    }
    let gone: Vec<u64> = renamed.keys().map(|id| linked[id]).collect();
    files.entries.retain(|file| !gone.contains(&file.number(file_entry::ID)));
    images.put(&files);
    let mut remapped = images.image("remap-fpath.img")?;
    remapped.entries.retain(|entry| !renamed.contains_key(&entry.number(remap_file_path_entry::ORIG_ID)));
    images.put(&remapped);
    Ok(())
}

fn open_directory(root: BorrowedFd<'_>, path: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let path = if path.is_empty() { "/" } else { path };
    kip_sys::within::open(root, path, flags, ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)
}

/// Another name of a file in its directory.
fn other_name(directory: BorrowedFd<'_>, link: &str) -> Option<String> {
    let look = |name: &str| statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok();
    let wanted = look(link).filter(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile)?;
    let is_it = |found: Stat| (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino);
    let entries = Dir::read_from(directory).ok()?.flatten().take(MOST_ENTRIES);
    let names = entries.filter(|entry| entry.ino() == wanted.st_ino).filter_map(|entry| {
        let name = entry.file_name().to_str().ok()?;
        (name != link && !name.starts_with("link_remap.")).then(|| name.to_owned())
    });
    names.into_iter().find(|name| look(name).is_some_and(is_it))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_name_of_a_file_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("link_remap.5"), "a semaphore").unwrap();
        std::fs::write(at("another"), "another file").unwrap();
        let open = File::open(dir.path()).unwrap();
        let find = || other_name(open.as_fd(), "link_remap.5");
        assert_eq!(find(), None, "it has no other");
        std::fs::hard_link(at("link_remap.5"), at("link_remap.6")).unwrap();
        assert_eq!(find(), None, "another link of CRIU's goes as well");
        std::fs::hard_link(at("link_remap.5"), at("sem.mp-1")).unwrap();
        assert_eq!(find().as_deref(), Some("sem.mp-1"));
        std::fs::remove_file(at("link_remap.5")).unwrap();
        assert_eq!(find(), None, "the link is not there");
    }
}
