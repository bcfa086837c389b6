//! The list of what a directory holds, and its bytes (docs/design/2026-11-22-archive.md).
//!
//! A tree has no paths: an entry has a name of one component and its parent's place, which is
//! before its own. So what was read and found sound can neither lead out of a directory nor through
//! a link.

use crate::pack::{self, BlockRef, PackRef};
use crate::wire::{self, Reader};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Longest name, in bytes (limits.h, NAME_MAX).
const NAME_MAX: usize = 255;

/// A part of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where in the file, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub length: u32,
    /// Which of [`FileTree::blocks`].
    pub block: u32,
    /// Its first byte there.
    pub at: u32,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A directory.
    Directory,
    /// A regular file; what is in no extent is a hole.
    File {
        /// Bytes.
        size: u64,
        /// By offset, none over another.
        extents: Vec<Extent>,
    },
    /// A symbolic link and its text.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// A bound unix socket's file.
    Socket,
    /// A character device; an overlay's whiteout is 0, 0.
    Char {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A block device.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// Another name of an earlier entry.
    Link(u32),
}

/// What an inode has besides content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions with setuid, setgid and sticky bit.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time: seconds since the epoch, nanoseconds.
    pub mtime: (i64, u32),
    /// Extended attributes: name, value.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// One name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The place of the directory it is in; of the first entry, which is the root, 0.
    pub parent: u32,
    /// Its name; of the root, nothing.
    pub name: Vec<u8>,
    /// Of a link those of what it links to count.
    pub attributes: Attributes,
    /// What it is.
    pub node: Node,
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileTree {
    /// The blocks of all contents.
    pub blocks: Vec<BlockRef>,
    /// The root, then what is below; parents before children. Empty: no directory at all.
    pub entries: Vec<Entry>,
    /// The files whose contents are needed first, in that order.
    pub order: Vec<u32>,
}

impl FileTree {
    /// The packs that it leads to.
    pub fn packs(&self) -> BTreeSet<PackRef> {
        self.blocks.iter().map(|block| block.pack).collect()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        let size = |entry: &Entry| if let Node::File { size, .. } = entry.node { size } else { 0 };
        self.entries.iter().map(size).sum()
    }

    /// The names from the root to an entry.
    pub fn path(&self, index: u32) -> Vec<&[u8]> {
        let mut names = Vec::new();
        let mut at = index;
        while at != 0 {
            let entry = &self.entries[at as usize];
            names.push(&entry.name[..]);
            at = entry.parent;
        }
        names.reverse();
        names
    }

    /// What is wrong with the tree, if anything: if this is none, a tree from any source may be
    /// restored.
    pub fn fault(&self) -> Option<&'static str> {
        let mut names = HashSet::new();
        for (index, entry) in self.entries.iter().enumerate() {
            let fault = match index {
                0 => (entry.parent != 0 || !entry.name.is_empty() || entry.node != Node::Directory).then_some("root"),
                _ => self.fault_of_name(index, entry, &mut names),
            };
            if let Some(fault) = fault.or_else(|| self.fault_of_node(index, entry)) {
                return Some(fault);
            }
        }
        if self.blocks.iter().any(|block| !block.is_sound()) {
            return Some("block");
        }
        let is_file =
            |index: &u32| matches!(self.entries.get(*index as usize).map(|entry| &entry.node), Some(Node::File { .. }));
        (!self.order.iter().all(is_file)).then_some("order")
    }

    fn fault_of_name<'a>(
        &self,
        index: usize,
        entry: &'a Entry,
        names: &mut HashSet<(u32, &'a [u8])>,
    ) -> Option<&'static str> {
        let name = &entry.name[..];
        if !is_name(name) {
            return Some("name");
        }
        if entry.parent as usize >= index || self.entries[entry.parent as usize].node != Node::Directory {
            return Some("parent");
        }
        (!names.insert((entry.parent, name))).then_some("name that is there twice")
    }

    fn fault_of_node(&self, index: usize, entry: &Entry) -> Option<&'static str> {
        let Attributes { mode, uid, gid, mtime, xattrs } = &entry.attributes;
        if *mode > 0o7777
            || [*uid, *gid].contains(&u32::MAX)
            || mtime.1 >= 1_000_000_000
            || xattrs.iter().any(|(name, _)| name.is_empty() || name.contains(&0))
        {
            return Some("attribute");
        }
        match &entry.node {
            Node::File { size, extents } => {
                let mut end = 0;
                for extent in extents {
                    let plain = self.blocks.get(extent.block as usize).map_or(0, |block| block.plain);
                    let fits = extent.at.checked_add(extent.length).is_some_and(|behind| behind <= plain);
                    if extent.offset < end || extent.length == 0 || !fits {
                        return Some("extent");
                    }
                    end = extent.offset.saturating_add(extent.length.into());
                }
                (end > *size || *size > i64::MAX as u64).then_some("size")
            }
            Node::Symlink(target) => (target.is_empty() || target.contains(&0)).then_some("link target"),
            Node::Link(to) => {
                let to_what = self.entries[..index].get(*to as usize).map(|entry| &entry.node);
                matches!(to_what, None | Some(Node::Directory | Node::Link(_))).then_some("link")
            }
            _ => None,
        }
    }

    pub(crate) fn encode(&self, packs: &[PackRef]) -> Vec<u8> {
        let mut out = Vec::new();
        pack::put_blocks(&mut out, &self.blocks, packs);
        wire::put(&mut out, self.entries.len() as u64);
        for entry in &self.entries {
            wire::put(&mut out, entry.parent.into());
            wire::put_bytes(&mut out, &entry.name);
            put_node(&mut out, &entry.node);
            if !matches!(entry.node, Node::Link(_)) {
                put_attributes(&mut out, &entry.attributes);
            }
        }
        wire::put(&mut out, self.order.len() as u64);
        for index in &self.order {
            wire::put(&mut out, (*index).into());
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8], packs: &[PackRef]) -> Option<FileTree> {
        let mut reader = Reader(bytes);
        let mut tree = FileTree { blocks: pack::take_blocks(&mut reader, packs)?, ..FileTree::default() };
        for _ in 0..reader.count()? {
            let (parent, name) = (reader.small()?, reader.bytes()?.to_vec());
            let node = take_node(&mut reader)?;
            let attributes = match node {
                Node::Link(_) => Attributes::default(),
                _ => take_attributes(&mut reader)?,
            };
            tree.entries.push(Entry { parent, name, attributes, node });
        }
        for _ in 0..reader.count()? {
            tree.order.push(reader.small()?);
        }
        reader.end()?;
        tree.fault().is_none().then_some(tree)
    }
}

/// The trees of a proc, by name: its own files (`upper`), layers, pinned base files. Each is walked
/// and restored by itself; no link leads from one into another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// The roots. A name is one component of a path, as an entry's.
    pub roots: BTreeMap<String, FileTree>,
}

impl Files {
    /// What is wrong with them, if anything: the root, and what of it ([`FileTree::fault`]).
    pub fn fault(&self) -> Option<(&str, &'static str)> {
        let fault = |(name, tree): (&'_ String, &FileTree)| {
            if is_name(name.as_bytes()) { tree.fault() } else { Some("name of a root") }
        };
        self.roots.iter().find_map(|(name, tree)| fault((name, tree)).map(|fault| (&name[..], fault)))
    }

    /// The packs that they lead to.
    pub fn packs(&self) -> BTreeSet<PackRef> {
        self.roots.values().flat_map(FileTree::packs).collect()
    }

    /// Their section. They have no fault, and `packs` lists all of their packs.
    pub(crate) fn encode(&self, packs: &[PackRef]) -> Vec<u8> {
        let mut out = Vec::new();
        wire::put(&mut out, self.roots.len() as u64);
        for (name, tree) in &self.roots {
            wire::put_bytes(&mut out, name.as_bytes());
            wire::put_bytes(&mut out, &tree.encode(packs));
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8], packs: &[PackRef]) -> Option<Files> {
        let mut reader = Reader(bytes);
        let mut files = Files::default();
        for _ in 0..reader.count()? {
            let name = reader.text()?;
            if files.roots.insert(name, FileTree::decode(reader.bytes()?, packs)?).is_some() {
                return None;
            }
        }
        reader.end()?;
        files.fault().is_none().then_some(files)
    }
}

/// One component of a path, and nothing that leads elsewhere.
pub(crate) fn is_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= NAME_MAX
        && ![&b"."[..], b".."].contains(&name)
        && !name.iter().any(|byte| [0, b'/'].contains(byte))
}

fn put_node(out: &mut Vec<u8>, node: &Node) {
    let device = |out: &mut Vec<u8>, kind, major: u32, minor: u32| {
        for number in [kind, major, minor] {
            wire::put(out, number.into());
        }
    };
    match node {
        Node::Directory => wire::put(out, 0),
        Node::File { size, extents } => {
            for number in [1, *size, extents.len() as u64] {
                wire::put(out, number);
            }
            let mut end = 0;
            for extent in extents {
                for number in [extent.offset - end, extent.length.into(), extent.block.into(), extent.at.into()] {
                    wire::put(out, number);
                }
                end = extent.offset + u64::from(extent.length);
            }
        }
        Node::Symlink(target) => {
            wire::put(out, 2);
            wire::put_bytes(out, target);
        }
        Node::Fifo => wire::put(out, 3),
        Node::Socket => wire::put(out, 4),
        Node::Char { major, minor } => device(out, 5, *major, *minor),
        Node::Block { major, minor } => device(out, 6, *major, *minor),
        Node::Link(to) => {
            wire::put(out, 7);
            wire::put(out, (*to).into());
        }
    }
}

fn take_node(reader: &mut Reader<'_>) -> Option<Node> {
    Some(match reader.number()? {
        0 => Node::Directory,
        1 => {
            let size = reader.number()?;
            let mut extents = Vec::new();
            let mut end = 0u64;
            for _ in 0..reader.count()? {
                let offset = end.checked_add(reader.number()?)?;
                let extent = Extent { offset, length: reader.small()?, block: reader.small()?, at: reader.small()? };
                end = offset.checked_add(extent.length.into())?;
                extents.push(extent);
            }
            Node::File { size, extents }
        }
        2 => Node::Symlink(reader.bytes()?.to_vec()),
        3 => Node::Fifo,
        4 => Node::Socket,
        5 => Node::Char { major: reader.small()?, minor: reader.small()? },
        6 => Node::Block { major: reader.small()?, minor: reader.small()? },
        7 => Node::Link(reader.small()?),
        _ => return None,
    })
}

fn put_attributes(out: &mut Vec<u8>, attributes: &Attributes) {
    for number in [attributes.mode, attributes.uid, attributes.gid] {
        wire::put(out, number.into());
    }
    wire::put_signed(out, attributes.mtime.0);
    wire::put(out, attributes.mtime.1.into());
    wire::put(out, attributes.xattrs.len() as u64);
    for (name, value) in &attributes.xattrs {
        wire::put_bytes(out, name);
        wire::put_bytes(out, value);
    }
}

fn take_attributes(reader: &mut Reader<'_>) -> Option<Attributes> {
    let (mode, uid, gid) = (reader.small()?, reader.small()?, reader.small()?);
    let mtime = (reader.signed()?, reader.small()?);
    let mut xattrs = Vec::new();
    for _ in 0..reader.count()? {
        xattrs.push((reader.bytes()?.to_vec(), reader.bytes()?.to_vec()));
    }
    Some(Attributes { mode, uid, gid, mtime, xattrs })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(parent: u32, name: &[u8], node: Node) -> Entry {
        Entry { parent, name: name.to_vec(), attributes: Attributes::default(), node }
    }

    fn tree(entries: Vec<Entry>) -> FileTree {
        let root = entry(0, b"", Node::Directory);
        FileTree { entries: [vec![root], entries].concat(), ..FileTree::default() }
    }

    fn fault(entries: Vec<Entry>) -> Option<&'static str> {
        let tree = tree(entries);
        let fault = tree.fault();
        assert_eq!(FileTree::decode(&tree.encode(&[]), &[]).is_none(), fault.is_some());
        fault
    }

    #[test]
    fn a_hostile_tree_is_not_understood() {
        assert_eq!(fault(vec![entry(0, b"a", Node::Directory), entry(1, b"b", Node::Fifo)]), None);
        for name in [&b""[..], b".", b"..", b"a/b", b"/etc", b"a\0", &[b'x'; 256]] {
            assert_eq!(fault(vec![entry(0, name, Node::Fifo)]), Some("name"));
        }
        let link = || entry(0, b"a", Node::Symlink(b"/etc".to_vec()));
        assert_eq!(fault(vec![link(), entry(1, b"b", Node::Fifo)]), Some("parent"), "through a link");
        assert_eq!(fault(vec![entry(1, b"b", Node::Directory)]), Some("parent"), "in itself");
        assert_eq!(fault(vec![link(), entry(0, b"a", Node::Directory)]), Some("name that is there twice"));
        assert_eq!(fault(vec![entry(0, b"a", Node::Link(0))]), Some("link"), "to a directory");
        assert_eq!(fault(vec![entry(0, b"a", Node::Link(9))]), Some("link"));
        assert_eq!(fault(vec![entry(0, b"a", Node::Symlink(vec![]))]), Some("link target"));
        let extent = Extent { offset: 0, length: 1, block: 0, at: 0 };
        assert_eq!(fault(vec![entry(0, b"a", Node::File { size: 1, extents: vec![extent] })]), Some("extent"));
        assert_eq!(FileTree { order: vec![0], ..tree(vec![]) }.fault(), Some("order"));
        let mut odd = entry(0, b"a", Node::Fifo);
        odd.attributes.mode = 0o10000;
        assert_eq!(fault(vec![odd]), Some("attribute"));
    }

    #[test]
    fn several_roots_come_back_and_their_names_lead_nowhere() {
        let file = |name: &[u8]| tree(vec![entry(0, name, Node::Fifo)]);
        let of = |roots: &[(&str, FileTree)]| Files {
            roots: roots.iter().map(|(name, tree)| ((*name).to_owned(), tree.clone())).collect(),
        };
        let files = of(&[("upper", file(b"a")), ("pins", file(b"b")), ("layer", FileTree::default())]);
        assert_eq!(Files::decode(&files.encode(&[]), &[]), Some(files.clone()));
        assert_eq!((files.fault(), Files::default().fault()), (None, None));
        for name in ["", "..", "a/b", "/", "a\0"] {
            let bad = of(&[(name, file(b"a"))]);
            assert_eq!(bad.fault(), Some((name, "name of a root")));
            assert_eq!(Files::decode(&bad.encode(&[]), &[]), None);
        }
        assert_eq!(of(&[("upper", file(b".."))]).fault(), Some(("upper", "name")));
        let mut twice = files.encode(&[]);
        twice.splice(0..1, [4]);
        let (mut name, inner) = (Vec::new(), file(b"b").encode(&[]));
        wire::put_bytes(&mut name, b"upper");
        wire::put_bytes(&mut name, &inner);
        twice.extend(name);
        assert_eq!(Files::decode(&twice, &[]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes: Vec<u8>) {
            let _ = FileTree::decode(&bytes, &[]);
        }

        #[test]
        fn attributes_come_back(mode in 0u32..0o10000, uid in 0..u32::MAX, gid in 0..u32::MAX, seconds: i64, nanos in 0u32..1_000_000_000, value: Vec<u8>) {
            let xattrs = vec![(b"user.x".to_vec(), value)];
            let attributes = Attributes { mode, uid, gid, mtime: (seconds, nanos), xattrs };
            let tree = tree(vec![Entry { attributes, ..entry(0, b"a", Node::Char { major: 1, minor: 3 }) }]);
            prop_assert_eq!(FileTree::decode(&tree.encode(&[]), &[]), Some(tree));
        }
    }
}
