//! A [`Tree`] into an empty directory: names first, then contents in order of need, then owners, modes and times.
//!
//! Owns the order. Safe against any tree: it is checked before anything is made ([`Tree::fault`]), and whatever is
//! opened is opened below the directory and through no link. A crash, or an error, leaves a directory with a part of
//! it, which the caller removes; the caller syncs.

use super::beneath;
use super::tree::{Attributes, Entry, Extent, Node, Tree};
use crate::pack::BlockRef;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Ids from `from` on become those from `to` on: a proc has another block of user ids on another machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdShift {
    /// First of the block that it had.
    pub from: u32,
    /// First of the block that it has.
    pub to: u32,
    /// How many; others stay.
    pub count: u32,
}

impl IdShift {
    /// All stay.
    pub const NONE: IdShift = IdShift { from: 0, to: 0, count: 0 };

    fn id(&self, id: u32) -> u32 {
        match id.checked_sub(self.from) {
            Some(index) if index < self.count => self.to.wrapping_add(index),
            _ => id,
        }
    }

    /// Ids are also in file capabilities (linux/capability.h, vfs_ns_cap_data) and in access control lists
    /// (linux/posix_acl_xattr.h).
    fn xattr(&self, name: &[u8], value: &[u8]) -> Vec<u8> {
        let mut value = value.to_vec();
        let shift = |bytes: &mut [u8]| {
            let id = u32::from_le_bytes((&*bytes).try_into().expect("4 bytes"));
            bytes.copy_from_slice(&self.id(id).to_le_bytes());
        };
        const REVISION_3: u8 = 3;
        const NAMED: [u16; 2] = [0x02, 0x08];
        if name == b"security.capability" && value.len() == 24 && value[3] == REVISION_3 {
            shift(&mut value[20..24]);
        } else if name.starts_with(b"system.posix_acl_") && value.len() >= 4 {
            for entry in value[4..].chunks_exact_mut(8) {
                if NAMED.contains(&u16::from_le_bytes([entry[0], entry[1]])) {
                    shift(&mut entry[4..8]);
                }
            }
        }
        value
    }
}

/// A tree cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// It is not one that a Kip makes.
    #[error("the list of files is refused: an entry has a wrong {0}")]
    Fault(&'static str),
    /// Something is in the way.
    #[error("directory {0} is not empty")]
    NotEmpty(PathBuf),
    /// The file system's word.
    #[error("file {path} cannot be restored")]
    Io {
        /// Which, below the directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A block did not come, or is not what it should be.
    #[error("the content of file {path} is not to be had")]
    Fetch {
        /// Whose content.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Makes what `tree` says in the empty directory `dir`. `fetch` gives the opened bytes of a block; it is asked once for
/// contents that follow each other in one.
///
/// # Errors
/// The tree is refused, a block does not come, the file system's.
pub fn restore(
    tree: &Tree,
    dir: &Path,
    shift: IdShift,
    mut fetch: impl FnMut(&BlockRef) -> io::Result<Vec<u8>>,
) -> Result<(), RestoreError> {
    if let Some(fault) = tree.fault() {
        return Err(RestoreError::Fault(fault));
    }
    if tree.entries.is_empty() {
        return Ok(());
    }
    let at_dir = |source| RestoreError::Io { path: dir.to_owned(), source };
    if std::fs::read_dir(dir).map_err(at_dir)?.next().is_some() {
        return Err(RestoreError::NotEmpty(dir.to_owned()));
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| at_dir(e.into()))?;
    let root = root.as_fd();
    let failed = |index: u32| {
        move |source: io::Error| {
            let path = tree.path(index).into_iter().map(OsStr::from_bytes).collect();
            RestoreError::Io { path, source }
        }
    };
    let mut parent: Option<(u32, OwnedFd)> = None;
    for (index, entry) in (0..).zip(&tree.entries).skip(1) {
        if parent.as_ref().is_none_or(|(known, _)| *known != entry.parent) {
            let fd = open_directory(root, tree, entry.parent).map_err(failed(entry.parent))?;
            parent = Some((entry.parent, fd));
        }
        let (_, fd) = parent.as_ref().expect("just opened");
        make(root, tree, fd, entry).map_err(failed(index))?;
    }
    let mut last: Option<(u32, Vec<u8>)> = None;
    let first: std::collections::HashSet<u32> = tree.order.iter().copied().collect();
    let rest = (0..tree.entries.len() as u32).filter(|index| !first.contains(index));
    for index in tree.order.iter().copied().chain(rest) {
        if let Node::File { extents, .. } = &tree.entries[index as usize].node {
            fill(root, tree, index, extents, &mut last, &mut fetch)?;
        }
    }
    // Children before parents, whose times they would change.
    for index in (0..tree.entries.len() as u32).rev() {
        if !matches!(tree.entries[index as usize].node, Node::Link(_)) {
            attributes(root, tree, index, shift).map_err(failed(index))?;
        }
    }
    Ok(())
}

fn open_directory(root: BorrowedFd<'_>, tree: &Tree, index: u32) -> io::Result<OwnedFd> {
    beneath::open(root, &tree.path(index), OFlags::PATH | OFlags::DIRECTORY)
}

/// Makes a name in its directory. All of it is nobody else's until it has its attributes.
fn make(root: BorrowedFd<'_>, tree: &Tree, parent: &OwnedFd, entry: &Entry) -> io::Result<()> {
    let name = OsStr::from_bytes(&entry.name);
    let private = Mode::from_raw_mode(0o600);
    let node = |kind, device| rustix::fs::mknodat(parent, name, kind, private, device);
    match &entry.node {
        Node::Directory => rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700))?,
        Node::File { size, .. } => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::openat(parent, name, flags, private)?;
            rustix::fs::ftruncate(&fd, *size)?;
        }
        Node::Symlink(target) => rustix::fs::symlinkat(OsStr::from_bytes(target), parent, name)?,
        Node::Fifo => node(FileType::Fifo, 0)?,
        Node::Socket => node(FileType::Socket, 0)?,
        Node::Char { major, minor } => node(FileType::CharacterDevice, rustix::fs::makedev(*major, *minor))?,
        Node::Block { major, minor } => node(FileType::BlockDevice, rustix::fs::makedev(*major, *minor))?,
        Node::Link(to) => {
            let to = &tree.entries[*to as usize];
            let dir = open_directory(root, tree, to.parent)?;
            rustix::fs::linkat(&dir, OsStr::from_bytes(&to.name), parent, name, AtFlags::empty())?;
        }
    }
    Ok(())
}

/// Writes a file's content; what is in no extent stays a hole.
fn fill(
    root: BorrowedFd<'_>,
    tree: &Tree,
    index: u32,
    extents: &[Extent],
    last: &mut Option<(u32, Vec<u8>)>,
    fetch: &mut impl FnMut(&BlockRef) -> io::Result<Vec<u8>>,
) -> Result<(), RestoreError> {
    if extents.is_empty() {
        return Ok(());
    }
    let path = || tree.path(index).into_iter().map(OsStr::from_bytes).collect();
    let failed = |source: io::Error| RestoreError::Io { path: path(), source };
    let fd = beneath::open(root, &tree.path(index), OFlags::WRONLY).map_err(failed)?;
    for extent in extents {
        if last.as_ref().is_none_or(|(block, _)| *block != extent.block) {
            let bytes = fetch(&tree.blocks[extent.block as usize]);
            *last = Some((extent.block, bytes.map_err(|source| RestoreError::Fetch { path: path(), source })?));
        }
        let (_, block) = last.as_ref().expect("just fetched");
        let short = || RestoreError::Fetch { path: path(), source: io::ErrorKind::UnexpectedEof.into() };
        let at = extent.at as usize;
        let mut bytes = block.get(at..at + extent.length as usize).ok_or_else(short)?;
        let mut offset = extent.offset;
        while !bytes.is_empty() {
            let written = rustix::io::pwrite(&fd, bytes, offset).map_err(|e| failed(e.into()))?;
            bytes = &bytes[written..];
            offset += written as u64;
        }
    }
    Ok(())
}

/// Owner, then attributes and mode, both of which a change of owner would take from, then times.
fn attributes(root: BorrowedFd<'_>, tree: &Tree, index: u32, shift: IdShift) -> io::Result<()> {
    let entry = &tree.entries[index as usize];
    let Attributes { mode, uid, gid, mtime, xattrs } = &entry.attributes;
    let fd = beneath::open(root, &tree.path(index), OFlags::PATH)?;
    let (uid, gid) = (Uid::from_raw(shift.id(*uid)), Gid::from_raw(shift.id(*gid)));
    rustix::fs::chownat(&fd, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
    let path = beneath::by_descriptor(&fd);
    if !matches!(entry.node, Node::Symlink(_)) {
        rustix::fs::chmod(path.as_str(), Mode::from_raw_mode(*mode))?;
    }
    for (name, value) in xattrs {
        rustix::fs::setxattr(path.as_str(), &name[..], &shift.xattr(name, value), XattrFlags::empty())?;
    }
    let last_modification = Timespec { tv_sec: mtime.0, tv_nsec: mtime.1.into() };
    let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let times = Timestamps { last_access, last_modification };
    if index == 0 {
        rustix::fs::utimensat(root, c".", &times, AtFlags::SYMLINK_NOFOLLOW)?;
    } else {
        let parent = open_directory(root, tree, entry.parent)?;
        rustix::fs::utimensat(&parent, OsStr::from_bytes(&entry.name), &times, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}
