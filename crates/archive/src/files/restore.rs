//! A [`FileTree`] into an empty directory: names first, then contents in order of need, then
//! owners, modes and times.
//!
//! Owns the order. Safe against any tree: it is checked before anything is made
//! ([`FileTree::fault`], [`super::rules`], [`TreeLimits`]), and whatever is opened is opened below
//! the directory and through no link.
//!
//! The directory is a staging one, on the file system of the place where the files are to be: no
//! other process looks into it, and the caller syncs it (syncfs(2)) and renames it into its place
//! when all of its roots have come. A crash, or an error, leaves a staging directory with a part of
//! the tree, which the caller removes, and nothing in the place itself.

use super::beneath;
use super::rules::{self, Ids, Stray, Strays};
use super::tree::{Attributes, Entry, Extent, FileTree, Node};
use crate::pack::BlockRef;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Ids from `from` on become those from `to` on: a proc has another block of user ids on another
/// machine. There are no others in its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdShift {
    /// First of the block that it had.
    pub from: u32,
    /// First of the block that it has.
    pub to: u32,
    /// How many.
    pub count: u32,
}

impl IdShift {
    pub(crate) fn own(&self) -> Ids {
        Ids { first: self.from, count: self.count }
    }

    /// Of an id that is one of its own.
    pub(crate) fn id(&self, id: u32) -> u32 {
        self.to + (id - self.from)
    }

    /// Ids are also in file capabilities and in access control lists.
    pub(crate) fn xattr(&self, name: &[u8], value: &[u8]) -> Vec<u8> {
        let mut shifted = value.to_vec();
        for at in rules::id_places(name, value).unwrap_or_default() {
            let id = u32::from_le_bytes(value[at..at + 4].try_into().expect("4 bytes"));
            if self.own().has(id) {
                shifted[at..at + 4].copy_from_slice(&self.id(id).to_le_bytes());
            }
        }
        shifted
    }
}

/// How much of a machine a tree may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeLimits {
    /// Bytes of contents, attributes and link targets; holes are none.
    pub bytes: u64,
    /// Names.
    pub entries: u64,
}

/// What a restore may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The proc's ids. A file of any other owner is refused.
    pub ids: IdShift,
    /// What happens to devices that no proc has.
    pub strays: Strays,
    /// For this tree; a caller that restores several subtracts what the earlier trees took.
    pub limits: TreeLimits,
}

/// What was restored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestoredTree {
    /// Devices that were left out, with all their names.
    pub skipped: Vec<PathBuf>,
    /// As [`TreeLimits::bytes`].
    pub bytes: u64,
    /// As [`TreeLimits::entries`].
    pub entries: u64,
}

/// A tree cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum TreeRestoreError {
    /// It is not one that a Kip makes.
    #[error("the list of files is refused: an entry has a wrong {0}")]
    Fault(&'static str),
    /// What a proc's files may not be.
    #[error("file {path} {what}")]
    Stray {
        /// Which, below the directory.
        path: PathBuf,
        /// What it is.
        what: Stray,
    },
    /// More than the caller allows.
    #[error("the files are {found} {what}, {most} are allowed: nothing was written")]
    TooMuch {
        /// `bytes` or `names`.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// How many there may be.
        most: u64,
    },
    /// Not a block of ids.
    #[error("ids {to} and the {count} from there on are no block of ids")]
    Ids {
        /// The first.
        to: u32,
        /// How many.
        count: u32,
    },
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

fn path_of(tree: &FileTree, index: u32) -> PathBuf {
    tree.path(index).into_iter().map(OsStr::from_bytes).collect()
}

/// Whether all of a tree may be made, before anything is; says what will be.
fn check(tree: &FileTree, rules: &Rules) -> Result<(RestoredTree, HashSet<u32>), TreeRestoreError> {
    if let Some(fault) = tree.fault() {
        return Err(TreeRestoreError::Fault(fault));
    }
    let IdShift { to, count, .. } = rules.ids;
    // The last id of all is none: chown(2) takes it for "as it is".
    if to.checked_add(count).is_none() {
        return Err(TreeRestoreError::Ids { to, count });
    }
    let too_much =
        |what, found, most| if found > most { Err(TreeRestoreError::TooMuch { what, found, most }) } else { Ok(()) };
    let mut done = RestoredTree { entries: tree.entries.len() as u64, ..RestoredTree::default() };
    too_much("names", done.entries, rules.limits.entries)?;
    let mut skipped = HashSet::new();
    for (index, entry) in (0..).zip(&tree.entries) {
        let stray = |what| TreeRestoreError::Stray { path: path_of(tree, index), what };
        let is_skipped = match &entry.node {
            Node::Link(to) => skipped.contains(to),
            node => match (rules::check_device(node), rules.strays) {
                (Err(what), Strays::Refuse) => return Err(stray(what)),
                (Err(_), Strays::Skip) => true,
                (Ok(()), _) => false,
            },
        };
        if is_skipped {
            skipped.insert(index);
            done.skipped.push(path_of(tree, index));
            continue;
        }
        if !matches!(entry.node, Node::Link(_)) {
            rules::check(entry, rules.ids.own()).map_err(stray)?;
        }
        let content = match &entry.node {
            Node::File { extents, .. } => extents.iter().map(|extent| u64::from(extent.length)).sum(),
            Node::Symlink(target) => target.len() as u64,
            _ => 0,
        };
        let attributes = entry.attributes.xattrs.iter().map(|(name, value)| (name.len() + value.len()) as u64);
        done.bytes = attributes.fold(done.bytes.saturating_add(content), u64::saturating_add);
    }
    too_much("bytes", done.bytes, rules.limits.bytes)?;
    Ok((done, skipped))
}

/// Makes what `tree` says in the empty directory `dir`. `fetch` gives the opened bytes of a block;
/// it is asked once for contents that follow each other in one.
///
/// # Errors
/// The tree is refused, before anything is made; a block does not come; the file system's.
pub fn restore(
    tree: &FileTree,
    dir: &Path,
    rules: &Rules,
    mut fetch: impl FnMut(&BlockRef) -> io::Result<Vec<u8>>,
) -> Result<RestoredTree, TreeRestoreError> {
    let (done, skipped) = check(tree, rules)?;
    if tree.entries.is_empty() {
        return Ok(done);
    }
    let at_dir = |source| TreeRestoreError::Io { path: dir.to_owned(), source };
    if std::fs::read_dir(dir).map_err(at_dir)?.next().is_some() {
        return Err(TreeRestoreError::NotEmpty(dir.to_owned()));
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| at_dir(e.into()))?;
    let root = root.as_fd();
    let failed = |index: u32| move |source: io::Error| TreeRestoreError::Io { path: path_of(tree, index), source };
    let mut parent: Option<(u32, OwnedFd)> = None;
    for (index, entry) in (0..).zip(&tree.entries).skip(1) {
        if skipped.contains(&index) {
            continue;
        }
        if parent.as_ref().is_none_or(|(known, _)| *known != entry.parent) {
            let fd = open_directory(root, tree, entry.parent).map_err(failed(entry.parent))?;
            parent = Some((entry.parent, fd));
        }
        let (_, fd) = parent.as_ref().expect("just opened");
        make(root, tree, fd, entry).map_err(failed(index))?;
    }
    let mut last: Option<(u32, Vec<u8>)> = None;
    let first: HashSet<u32> = tree.order.iter().copied().collect();
    let rest = (0..tree.entries.len() as u32).filter(|index| !first.contains(index));
    for index in tree.order.iter().copied().chain(rest) {
        if let Node::File { extents, .. } = &tree.entries[index as usize].node {
            fill(root, tree, index, extents, &mut last, &mut fetch)?;
        }
    }
    // Children before parents, whose times they would change.
    for index in (0..tree.entries.len() as u32).rev() {
        if !matches!(tree.entries[index as usize].node, Node::Link(_)) && !skipped.contains(&index) {
            attributes(root, tree, index, rules.ids).map_err(failed(index))?;
        }
    }
    Ok(done)
}

fn open_directory(root: BorrowedFd<'_>, tree: &FileTree, index: u32) -> io::Result<OwnedFd> {
    beneath::open(root, &tree.path(index), OFlags::PATH | OFlags::DIRECTORY)
}

/// Makes a name in its directory. No other user may open it until it has its attributes.
fn make(root: BorrowedFd<'_>, tree: &FileTree, parent: &OwnedFd, entry: &Entry) -> io::Result<()> {
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
    tree: &FileTree,
    index: u32,
    extents: &[Extent],
    last: &mut Option<(u32, Vec<u8>)>,
    fetch: &mut impl FnMut(&BlockRef) -> io::Result<Vec<u8>>,
) -> Result<(), TreeRestoreError> {
    if extents.is_empty() {
        return Ok(());
    }
    let path = || path_of(tree, index);
    let failed = |source: io::Error| TreeRestoreError::Io { path: path(), source };
    let fd = beneath::open(root, &tree.path(index), OFlags::WRONLY).map_err(failed)?;
    for extent in extents {
        if last.as_ref().is_none_or(|(block, _)| *block != extent.block) {
            let bytes = fetch(&tree.blocks[extent.block as usize]);
            *last = Some((extent.block, bytes.map_err(|source| TreeRestoreError::Fetch { path: path(), source })?));
        }
        let (_, block) = last.as_ref().expect("just fetched");
        let short = || TreeRestoreError::Fetch { path: path(), source: io::ErrorKind::UnexpectedEof.into() };
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
fn attributes(root: BorrowedFd<'_>, tree: &FileTree, index: u32, shift: IdShift) -> io::Result<()> {
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
