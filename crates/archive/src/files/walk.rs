//! A directory into a [`FileTree`] and blocks: looks at every name without following any, and reads
//! only the files that are not known.
//!
//! Owns the rules of what of files is stored where. The directory must not change meanwhile: its
//! proc is frozen, and what changes all the same is an error. A file is known by device, inode,
//! size and both times; one whose times are so young that a later change could have the same ones
//! is not taken for known.

use super::beneath;
use super::rules::{self, Ids, Stray, Strays};
use super::tree::{Attributes, Entry, Extent, FileTree, Node};
use crate::index::{self, Blocks, ContentHash, ContentPlace};
use crate::packing::{PackError, Packing};
use crate::wire;
use kip_types::Realm;
use rustix::fs::{Dir, FileType, Mode, OFlags, SeekFrom, Stat};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Largest piece of a file's content, in bytes; also where pieces begin.
const PIECE: u64 = 1 << 20;
/// Pieces below this share a block.
const SMALL: usize = 64 << 10;
/// Bytes at which a shared block is full.
const SHARED: usize = 256 << 10;
/// How old the times of a file must be for it to be known by them, in ns: the kernel's clock for
/// files ticks every 10 ms at most.
const STABLE_NS: i128 = 20_000_000;
const SEEN: [u8; 8] = *b"KIPSEEN1";

/// A directory cannot be archived.
#[derive(Debug, thiserror::Error)]
pub enum WalkError {
    /// The file system's word.
    #[error("file {path} cannot be archived")]
    Io {
        /// Which, below the directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A process writes to the file.
    #[error("file {path} changed while it was read")]
    Changed {
        /// Which, below the directory.
        path: PathBuf,
    },
    /// What a proc's files may not be: it could not be restored.
    #[error("file {path} {what}")]
    Stray {
        /// Which, below the directory.
        path: PathBuf,
        /// What it is.
        what: Stray,
    },
    /// The caller wants no more of it.
    #[error("the archiving of files was called off")]
    Cancelled,
    /// It cannot be stored.
    #[error(transparent)]
    Pack(#[from] PackError),
}

/// What a file is known by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Identity {
    dev: u64,
    ino: u64,
    size: u64,
    mtime_ns: i128,
    ctime_ns: i128,
}

impl Identity {
    fn of(stat: &Stat, linked_elsewhere: bool) -> Identity {
        let ns = |seconds: i128, ns: i128| seconds * 1_000_000_000 + ns;
        Identity {
            dev: stat.st_dev,
            ino: stat.st_ino,
            size: stat.st_size as u64,
            mtime_ns: ns(stat.st_mtime.into(), stat.st_mtime_nsec.into()),
            ctime_ns: if linked_elsewhere { 0 } else { ns(stat.st_ctime.into(), stat.st_ctime_nsec.into()) },
        }
    }
}

/// A part of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part<P> {
    offset: u64,
    length: u32,
    place: P,
}

/// The contents of one proc's files, by what the files are known by. A local cache, as
/// [`index::Known`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SeenContents {
    files: BTreeMap<Identity, Vec<Part<ContentPlace>>>,
}

impl SeenContents {
    /// Its bytes, for a local file.
    pub fn save(&self, realm: &Realm) -> Vec<u8> {
        let mut blocks = Blocks::default();
        let mut body = Vec::new();
        wire::put(&mut body, self.files.len() as u64);
        for (id, parts) in &self.files {
            for number in [id.dev, id.ino, id.size] {
                wire::put(&mut body, number);
            }
            body.extend_from_slice(&id.mtime_ns.to_le_bytes());
            body.extend_from_slice(&id.ctime_ns.to_le_bytes());
            wire::put(&mut body, parts.len() as u64);
            for Part { offset, length, place } in parts {
                for number in [*offset, (*length).into(), blocks.number(place.block).into(), place.at.into()] {
                    wire::put(&mut body, number);
                }
            }
        }
        let mut out = index::begin(SEEN, realm);
        index::put_places(&mut out, &blocks.list);
        out.extend_from_slice(&body);
        index::end(out)
    }

    /// Reads it back. What is damaged or another realm's is as good as lost: `None`.
    pub fn load(bytes: &[u8], realm: &Realm) -> Option<SeenContents> {
        let mut reader = index::open(bytes, SEEN, realm)?;
        let list = index::take_places(&mut reader)?;
        let mut seen = SeenContents::default();
        for _ in 0..reader.count()? {
            let (dev, ino, size) = (reader.number()?, reader.number()?, reader.number()?);
            let (mtime_ns, ctime_ns) = (i128::from_le_bytes(reader.array()?), i128::from_le_bytes(reader.array()?));
            let mut parts = Vec::new();
            for _ in 0..reader.count()? {
                let (offset, length) = (reader.number()?, reader.small()?);
                let block = *list.get(reader.small()? as usize)?;
                parts.push(Part { offset, length, place: ContentPlace { block, at: reader.small()? } });
            }
            seen.files.insert(Identity { dev, ino, size, mtime_ns, ctime_ns }, parts);
        }
        reader.end()?;
        Some(seen)
    }
}

/// A directory that is archived.
#[derive(Debug, Default)]
pub struct Archived {
    /// What it holds.
    pub tree: FileTree,
    /// For the next generation of the proc, once all packs are stored.
    pub seen: SeenContents,
    /// Files whose contents were read.
    pub read: u64,
    /// Devices that were left out, with all their names.
    pub skipped: Vec<PathBuf>,
}

/// How a directory is archived.
#[derive(Debug, Clone, Copy)]
pub struct Walk<'a> {
    /// Paths below it of the files that are needed first, in that order; what is not there does not
    /// matter.
    pub first: &'a [&'a Path],
    /// The proc's ids here. A file of any other owner is refused.
    pub ids: Ids,
    /// What happens to devices that no proc has.
    pub strays: Strays,
    /// Its files have names elsewhere, which come and go and change the files' ctime: the files are
    /// known by all but the ctime, and no process may write to them.
    pub linked_elsewhere: bool,
    /// Looked at before each name and each megabyte that is read: true calls it off.
    pub cancel: &'a AtomicBool,
}

impl Walk<'_> {
    fn goes_on(&self) -> Result<(), WalkError> {
        if self.cancel.load(Ordering::Relaxed) { Err(WalkError::Cancelled) } else { Ok(()) }
    }
}

/// Archives what is below `root`. Attributes that an overlay makes anew on each machine are left
/// out.
///
/// # Errors
/// A file cannot be read or stored, changes, or is what no proc's may be; it was called off.
pub fn archive(
    root: &Path,
    walk: &Walk<'_>,
    seen: &SeenContents,
    packing: &mut Packing<'_>,
) -> Result<Archived, WalkError> {
    let at_root = |source: rustix::io::Errno| WalkError::Io { path: root.to_owned(), source: source.into() };
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::open(root, flags, Mode::empty()).map_err(at_root)?;
    let (tree, ids, links, strays, skipped) = Default::default();
    let mut listing = Listing { walk, root: dir.as_fd(), tree, ids, links, strays, skipped };
    listing.all()?;
    let Listing { mut tree, ids, skipped, .. } = listing;
    let by_path: HashMap<Vec<&[u8]>, u32> = ids.keys().map(|index| (tree.path(*index), *index)).collect();
    let names = |path: &Path| -> Vec<Vec<u8>> { path.iter().map(|name| name.as_bytes().to_vec()).collect() };
    let place = |path: &&Path| by_path.get(&names(path).iter().map(|n| &n[..]).collect::<Vec<_>>()).copied();
    let mut order: Vec<u32> = Vec::new();
    for index in walk.first.iter().filter_map(place) {
        if !order.contains(&index) {
            order.push(index);
        }
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i128);
    let mut contents = Contents::default();
    let rest: Vec<u32> = (0..tree.entries.len() as u32).filter(|i| ids.contains_key(i) && !order.contains(i)).collect();
    let mut read = 0;
    for index in order.iter().copied().chain(rest) {
        let id = ids[&index];
        let known = seen.files.get(&id).filter(|parts| parts.iter().all(|part| packing.may_use(&part.place)));
        match known {
            Some(parts) => contents.known(index, parts),
            None if id.size == 0 => {}
            None => {
                read += 1;
                contents.file(dir.as_fd(), &tree, index, id, walk, packing)?;
            }
        }
    }
    contents.flush(packing)?;
    tree.order = order;
    let seen = contents.finalize(&mut tree, &ids, now);
    tree.blocks.iter().for_each(|block| packing.refer(block));
    debug_assert_eq!(tree.fault(), None);
    Ok(Archived { tree, seen, read, skipped })
}

/// The names, before any content is read.
struct Listing<'a> {
    walk: &'a Walk<'a>,
    root: BorrowedFd<'a>,
    tree: FileTree,
    /// Regular files.
    ids: HashMap<u32, Identity>,
    /// Inodes with several names, by device and number.
    links: HashMap<(u64, u64), u32>,
    /// Devices that are left out.
    strays: HashSet<(u64, u64)>,
    skipped: Vec<PathBuf>,
}

impl Listing<'_> {
    fn failed(&self, index: u32) -> impl Fn(io::Error) -> WalkError + use<> {
        let path = path_of(&self.tree, index);
        move |source| WalkError::Io { path: path.clone(), source }
    }

    fn all(&mut self) -> Result<(), WalkError> {
        self.tree.entries.push(Entry {
            parent: 0,
            name: Vec::new(),
            attributes: Attributes::default(),
            node: Node::Directory,
        });
        self.read_entry(0)?;
        let mut left = vec![0];
        while let Some(index) = left.pop() {
            let from = self.tree.entries.len();
            self.directory(index)?;
            let is_directory = |i: &u32| self.tree.entries[*i as usize].node == Node::Directory;
            left.extend((from as u32..self.tree.entries.len() as u32).rev().filter(is_directory));
        }
        Ok(())
    }

    fn directory(&mut self, index: u32) -> Result<(), WalkError> {
        let failed = self.failed(index);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let fd = beneath::open(self.root, &self.tree.path(index), flags).map_err(&failed)?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&fd).map_err(|e| failed(e.into()))? {
            let name = entry.map_err(|e| failed(e.into()))?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        names.sort();
        for name in names {
            let new = self.tree.entries.len() as u32;
            let attributes = Attributes::default();
            self.tree.entries.push(Entry { parent: index, name, attributes, node: Node::Directory });
            if !self.read_entry(new)? {
                self.skipped.push(path_of(&self.tree, new));
                self.tree.entries.pop();
            }
        }
        Ok(())
    }

    /// Fills in what an entry is; false if it is to be left out.
    fn read_entry(&mut self, index: u32) -> Result<bool, WalkError> {
        self.walk.goes_on()?;
        let failed = self.failed(index);
        let fd = beneath::open(self.root, &self.tree.path(index), OFlags::PATH).map_err(&failed)?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| failed(e.into()))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let inode = (stat.st_dev, stat.st_ino);
        if self.strays.contains(&inode) {
            return Ok(false);
        }
        if kind != FileType::Directory && stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&inode) {
                self.tree.entries[index as usize].node = Node::Link(*first);
                return Ok(true);
            }
            self.links.insert(inode, index);
        }
        let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        let node = match kind {
            FileType::Directory => Node::Directory,
            FileType::RegularFile => {
                self.ids.insert(index, Identity::of(&stat, self.walk.linked_elsewhere));
                Node::File { size: stat.st_size as u64, extents: Vec::new() }
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&fd, c"", Vec::new()).map_err(|e| failed(e.into()))?;
                Node::Symlink(target.into_bytes())
            }
            FileType::Fifo => Node::Fifo,
            FileType::Socket => Node::Socket,
            FileType::CharacterDevice => Node::Char { major, minor },
            FileType::BlockDevice => Node::Block { major, minor },
            _ => return Err(failed(io::ErrorKind::Unsupported.into())),
        };
        let stray = |what| WalkError::Stray { path: path_of(&self.tree, index), what };
        match (rules::check_device(&node), self.walk.strays) {
            (Err(what), Strays::Refuse) => return Err(stray(what)),
            (Err(_), Strays::Skip) => {
                self.strays.insert(inode);
                return Ok(false);
            }
            (Ok(()), _) => {}
        }
        let xattrs = xattrs(&fd).map_err(&failed)?;
        let entry = &mut self.tree.entries[index as usize];
        let mtime = (stat.st_mtime as i64, stat.st_mtime_nsec as u32);
        // A whiteout is the overlay's own, and its owner does not matter: the kernel makes it as
        // the machine's root.
        let is_whiteout = node == Node::Char { major: 0, minor: 0 };
        let owner = |id| if is_whiteout && !self.walk.ids.has(id) { self.walk.ids.first } else { id };
        let (uid, gid) = (owner(stat.st_uid), owner(stat.st_gid));
        entry.attributes = Attributes { mode: stat.st_mode & 0o7777, uid, gid, mtime, xattrs };
        entry.node = node;
        let checked = rules::check(entry, self.walk.ids);
        checked.map_err(|what| WalkError::Stray { path: path_of(&self.tree, index), what })?;
        Ok(true)
    }
}

fn path_of(tree: &FileTree, index: u32) -> PathBuf {
    if index == 0 { PathBuf::from(".") } else { tree.path(index).into_iter().map(OsStr::from_bytes).collect() }
}

/// All extended attributes that are kept, by name.
fn xattrs(fd: &OwnedFd) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let path = beneath::by_descriptor(fd);
    let length = match rustix::fs::listxattr_query(path.as_str()) {
        Err(rustix::io::Errno::NOTSUP) => return Ok(Vec::new()),
        length => length?,
    };
    let mut list = vec![0u8; length];
    if length > 0 {
        let length = rustix::fs::listxattr(path.as_str(), &mut list[..])?;
        list.truncate(length);
    }
    let mut found = Vec::new();
    for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty() && !rules::is_bound_to_machine(name)) {
        let length = rustix::fs::getxattr_query(path.as_str(), name)?;
        let mut value = vec![0u8; length];
        if length > 0 {
            let length = rustix::fs::getxattr(path.as_str(), name, &mut value[..])?;
            value.truncate(length);
        }
        found.push((name.to_vec(), value));
    }
    found.sort();
    Ok(found)
}

/// Where a part of a file's content will be.
#[derive(Debug, Clone, Copy)]
enum Spot {
    Placed(ContentPlace),
    /// In the shared block with this number, from this byte on.
    Shared(usize, u32),
}

/// The contents of files on their way into blocks.
#[derive(Debug, Default)]
struct Contents {
    parts: BTreeMap<u32, Vec<Part<Spot>>>,
    /// The shared block that is being filled, and what is in it.
    shared: Vec<u8>,
    coming: HashMap<ContentHash, u32>,
    /// Those that were written.
    written: Vec<ContentPlace>,
}

impl Contents {
    fn known(&mut self, index: u32, parts: &[Part<ContentPlace>]) {
        let parts =
            parts.iter().map(|part| Part { offset: part.offset, length: part.length, place: Spot::Placed(part.place) });
        self.parts.insert(index, parts.collect());
    }

    /// Reads a file, segment by segment.
    fn file(
        &mut self,
        root: BorrowedFd<'_>,
        tree: &FileTree,
        index: u32,
        id: Identity,
        walk: &Walk<'_>,
        packing: &mut Packing<'_>,
    ) -> Result<(), WalkError> {
        let path = path_of(tree, index);
        let failed = |source: io::Error| WalkError::Io { path: path.clone(), source };
        let fd = beneath::open(root, &tree.path(index), OFlags::RDONLY | OFlags::NONBLOCK).map_err(failed)?;
        let is_same = || rustix::fs::fstat(&fd).is_ok_and(|stat| Identity::of(&stat, walk.linked_elsewhere) == id);
        let changed = || WalkError::Changed { path: path.clone() };
        if !is_same() {
            return Err(changed());
        }
        let mut buffer = Vec::new();
        let mut parts = Vec::new();
        let mut at = 0;
        while let Some((data, end)) = segment(&fd, at, id.size).map_err(failed)? {
            at = data;
            while at < end {
                walk.goes_on()?;
                let length = (PIECE - at % PIECE).min(end - at);
                buffer.resize(length as usize, 0);
                if !read_all(&fd, &mut buffer, at).map_err(failed)? {
                    return Err(changed());
                }
                let place = self.piece(&buffer, packing)?;
                parts.push(Part { offset: at, length: length as u32, place });
                at += length;
            }
        }
        if !is_same() {
            return Err(changed());
        }
        self.parts.insert(index, parts);
        Ok(())
    }

    fn piece(&mut self, bytes: &[u8], packing: &mut Packing<'_>) -> Result<Spot, WalkError> {
        let hash = packing.hasher.piece(bytes);
        if let Some(place) = packing.find(&hash) {
            return Ok(Spot::Placed(place));
        }
        if bytes.len() >= SMALL {
            let place = ContentPlace { block: packing.push(bytes)?, at: 0 };
            packing.add(hash, place);
            return Ok(Spot::Placed(place));
        }
        if self.shared.len() >= SHARED {
            self.flush(packing)?;
        }
        let next = self.shared.len() as u32;
        let at = *self.coming.entry(hash).or_insert(next);
        if at == next {
            self.shared.extend_from_slice(bytes);
        }
        Ok(Spot::Shared(self.written.len(), at))
    }

    fn flush(&mut self, packing: &mut Packing<'_>) -> Result<(), WalkError> {
        if self.shared.is_empty() {
            return Ok(());
        }
        let block = packing.push(&self.shared)?;
        for (hash, at) in self.coming.drain() {
            packing.add(hash, ContentPlace { block, at });
        }
        self.shared.clear();
        self.written.push(ContentPlace { block, at: 0 });
        Ok(())
    }

    /// Writes extents into the tree, now that every place is known.
    fn finalize(self, tree: &mut FileTree, ids: &HashMap<u32, Identity>, now_ns: i128) -> SeenContents {
        let mut blocks = Blocks::default();
        let mut seen = SeenContents::default();
        for (index, parts) in self.parts {
            let place = |spot| match spot {
                Spot::Placed(place) => place,
                Spot::Shared(block, at) => ContentPlace { at, ..self.written[block] },
            };
            let placed = |part: Part<Spot>| Part { offset: part.offset, length: part.length, place: place(part.place) };
            let parts: Vec<Part<ContentPlace>> = parts.into_iter().map(placed).collect();
            let extent = |part: &Part<ContentPlace>| Extent {
                offset: part.offset,
                length: part.length,
                block: blocks.number(part.place.block),
                at: part.place.at,
            };
            if let Node::File { extents, .. } = &mut tree.entries[index as usize].node {
                *extents = parts.iter().map(extent).collect();
            }
            let id = ids[&index];
            if now_ns - id.ctime_ns.max(id.mtime_ns) > STABLE_NS {
                seen.files.insert(id, parts);
            }
        }
        tree.blocks = blocks.list;
        seen
    }
}

/// The next part of a file that is no hole, from `at` on.
fn segment(fd: &OwnedFd, at: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= size {
        return Ok(None);
    }
    let data = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        // A file system that does not know holes.
        Err(rustix::io::Errno::INVAL) => return Ok(Some((at, size))),
        data => data?,
    };
    let end = rustix::fs::seek(fd, SeekFrom::Hole(data))?.min(size);
    Ok((data < end).then_some((data, end)))
}

/// Fills the buffer; false if the file ends before.
fn read_all(fd: &OwnedFd, mut buffer: &mut [u8], mut at: u64) -> io::Result<bool> {
    while !buffer.is_empty() {
        match rustix::io::pread(fd, &mut *buffer, at) {
            Ok(0) => return Ok(false),
            Ok(n) => {
                buffer = &mut buffer[n..];
                at += n as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}
