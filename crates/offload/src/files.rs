//! A proc's own files, into a generation and back: its overlay's difference, its unpacked tarball,
//! its pins.
//!
//! Owns which directories those are and whose ids their files have. A difference belongs to the
//! proc's block of ids, which moves with it; layers and pins belong to ids from 0 on everywhere,
//! for they are mounted with a mapping. What files may be is `kip-archive`'s. They are archived
//! while no process runs, so they are those of the freeze: a walk that is overtaken by a wake ends,
//! and nothing of it is published. What is known of unchanged files is kept beside the proc's
//! record; it may be lost.
//!
//! Back: everything into one staging directory, synced, then each root renamed to its place. A
//! crash leaves a staging directory, or some of the roots, which [`Archive::restore_files`]
//! replaces when it is called again.

use crate::errors::FetchError;
use crate::stream::FrontStream;
use crate::{Archive, PROCS};
use kip_archive::files::restore::{IdShift, Rules, TreeLimits, restore};
use kip_archive::files::rules::{Ids, Strays};
use kip_archive::files::tree::{FileTree, Files, Node};
use kip_archive::files::walk::{self, SeenContents, Walk, WalkError};
use kip_archive::front::FrontManifest;
use kip_archive::ids::ProcId;
use kip_archive::keys::Keyring;
use kip_archive::names::FrontRef;
use kip_archive::pack::{BlockRef, PackReader};
use kip_archive::packing::Packing;
use kip_records::instance::IDS_PER_BLOCK;
use kip_sandbox::quota::OwnFilesPlace;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Roots of a generation's files: name there, path in the proc's directory, whether their files
/// belong to the proc's block of ids.
const ROOTS: [(&str, &str, bool); 5] = [
    ("root", "upper/root", true),
    ("usr", "upper/usr", true),
    ("layer", "layer", false),
    ("pins-root", "pins/root", false),
    ("pins-usr", "pins/usr", false),
];
/// What a proc's files may be at most.
const MOST: TreeLimits = TreeLimits { bytes: 64 << 30, entries: 4 << 20 };
/// What is known of the page files of a proc, in its directory.
pub(crate) const KNOWN: &str = "archive-known";
/// What is known of them, in the proc's directory; the root's name follows.
const SEEN: &str = "archive-seen-";
const STAGING: &str = "files.new";
/// Blocks that are fetched in one go, at most 1 MiB each.
const AHEAD: usize = 16;

/// The files of a proc that sleeps.
#[derive(Debug, Clone)]
pub struct Own {
    /// The proc's directory.
    pub dir: PathBuf,
    /// Where its own files are.
    pub place: OwnFilesPlace,
    /// First host id of its block.
    pub first_id: u32,
    /// Paths inside of the files that its processes have mapped or open: a wake needs those first.
    pub first: Vec<PathBuf>,
    /// Set when it wakes: its files are not those of the freeze any more.
    pub woke: Arc<AtomicBool>,
}

/// Its files cannot be archived.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum ArchiveFilesError {
    #[error("{path} of its own files cannot be archived")]
    Walk {
        path: PathBuf,
        #[source]
        source: Box<WalkError>,
    },
    #[error("{} of its own files cannot be written to the disk", path.display())]
    Sync {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("its own files are {found} {what}, {most} are the most that are archived")]
    TooMuch { what: &'static str, found: u64, most: u64 },
    #[error("it woke meanwhile")]
    Woke,
}

/// What is known of them now; to be kept once their packs are stored.
#[derive(Debug, Default)]
pub(crate) struct KnownFiles(Vec<(PathBuf, SeenContents)>);

fn extents(tree: &FileTree) -> u64 {
    let bytes = |node: &Node| {
        if let Node::File { extents, .. } = node { extents.iter().map(|e| u64::from(e.length)).sum() } else { 0 }
    };
    tree.entries.iter().map(|entry| bytes(&entry.node)).sum()
}

/// Where files would be in one of the roots; the walk ignores a path that is not there.
fn below<'a>(root: &str, inside: &'a [PathBuf]) -> Vec<&'a Path> {
    let top = if matches!(root, "usr" | "pins-usr") { "/usr" } else { "/" };
    inside.iter().filter_map(|path| path.strip_prefix(top).ok()).collect()
}

impl Own {
    /// Packs what is not stored already; unchanged files are not read.
    pub(crate) fn pack(
        &self,
        archive: &Archive,
        packing: &mut Packing<'_>,
    ) -> Result<(Files, KnownFiles), ArchiveFilesError> {
        let mut files = Files::default();
        let mut known = KnownFiles::default();
        for (name, path, own) in ROOTS {
            let root = if own { self.place.path() } else { &self.dir }.join(path);
            if !root.is_dir() {
                continue;
            }
            let ids = Ids { first: if own { self.first_id } else { 0 }, count: IDS_PER_BLOCK };
            // Pins are the host's files.
            let linked_elsewhere = name.starts_with("pins-");
            let first = below(name, &self.first);
            let walk = Walk { first: &first, ids, strays: Strays::Refuse, linked_elsewhere, cancel: &self.woke };
            let cache = self.dir.join(format!("{SEEN}{name}"));
            let seen =
                fs::read(&cache).ok().and_then(|bytes| SeenContents::load(&bytes, &archive.realm)).unwrap_or_default();
            let done = walk::archive(&root, &walk, &seen, packing);
            let done = done.map_err(|source| ArchiveFilesError::Walk { path: path.into(), source: Box::new(source) });
            let done = self.unless_woke(done)?;
            known.0.push((cache, done.seen));
            files.roots.insert(name.to_owned(), done.tree);
        }
        // A wake here takes them as they are on the disk, after a power cut too, with a memory that
        // knows what it has written.
        let place = self.place.path();
        let synced = fs::File::open(place).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
        synced.map_err(|source| ArchiveFilesError::Sync { path: place.to_owned(), source })?;
        self.unless_woke(Ok(()))?;
        let entries = files.roots.values().map(|tree| tree.entries.len() as u64).sum();
        for (what, found, most) in
            [("bytes", files.roots.values().map(extents).sum(), MOST.bytes), ("names", entries, MOST.entries)]
        {
            if found > most {
                return Err(ArchiveFilesError::TooMuch { what, found, most });
            }
        }
        Ok((files, known))
    }

    fn unless_woke<T>(&self, done: Result<T, ArchiveFilesError>) -> Result<T, ArchiveFilesError> {
        if self.woke.load(Ordering::SeqCst) { Err(ArchiveFilesError::Woke) } else { done }
    }
}

/// Forgets what is known of the page files of a proc, whose directory is `dir`: they are gone, or
/// what is known is wrong.
pub fn forget_page_files(dir: &Path) {
    let known = dir.join(KNOWN);
    if let Err(error) = fs::remove_file(&known)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %known.display(), %error, "what is known of page files cannot be forgotten");
    }
}

impl KnownFiles {
    pub(crate) fn keep(&self, archive: &Archive) {
        for (path, seen) in &self.0 {
            // A cache.
            if let Err(error) = fs::write(path, seen.save(&archive.realm)) {
                tracing::debug!(path = %path.display(), %error, "what is known of files is not remembered");
            }
        }
    }
}

impl Archive {
    /// What comes first in a stored generation's front; from the cache if that has it, and what it
    /// has can be opened.
    async fn first_of<T>(
        &self,
        proc: ProcId,
        front: FrontRef,
        take: impl AsyncFn(&mut FrontStream) -> Result<T, FetchError>,
    ) -> Result<T, FetchError> {
        loop {
            let mut stream = self.front_to_inspect(proc, front).await?;
            match take(&mut stream).await {
                // It is the cache's no more.
                Err(FetchError::Open { .. }) if stream.is_from_cache() => {}
                read => return read,
            }
        }
    }

    /// What a stored generation is. Blocking; not on a thread of the runtime.
    pub fn manifest_of(&self, proc: ProcId, front: FrontRef) -> Result<FrontManifest, FetchError> {
        self.runtime.block_on(self.first_of(proc, front, FrontStream::manifest))
    }

    /// Forgets what is known of what is stored, for that is not what was stored: nothing new refers
    /// to it. `dir`: of the proc whose generation is damaged.
    pub fn distrust(&self, dir: &Path) {
        self.distrusted.fetch_add(1, Ordering::SeqCst);
        *self.index.lock() = Default::default();
        self.save_index();
        // Which other generations have what is damaged is not known.
        let procs = fs::read_dir(self.directory.with_file_name(PROCS)).into_iter().flatten().flatten();
        procs.map(|proc| proc.path()).chain([dir.to_owned()]).for_each(|dir| forget_page_files(&dir));
        for (name, ..) in ROOTS {
            // It may never have been there.
            let _ = fs::remove_file(dir.join(format!("{SEEN}{name}")));
        }
    }

    /// Puts the files of a stored generation into the directory of a proc that has not run in it,
    /// its own to `place`; what is there of such files is replaced. `ids`: the first of the block
    /// of ids that the proc had, and of the one that it has. Blocking; not on a thread of the
    /// runtime.
    pub fn restore_files(
        &self,
        proc: ProcId,
        front: FrontRef,
        dir: &Path,
        place: &OwnFilesPlace,
        ids: (u32, u32),
    ) -> Result<(), FetchError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| FetchError::Io { path, source }
        };
        let files = self.runtime.block_on(self.first_of(proc, front, FrontStream::files))?;
        if let Some(name) = files.roots.keys().find(|name| !ROOTS.iter().any(|(known, ..)| known == name)) {
            return Err(FetchError::Files { name: name.clone() });
        }
        // Beside where each comes to lie, which may be another file system.
        let where_to = |own: bool| if own { place.path() } else { dir };
        for path in ["upper", "work", "layer", "pins", STAGING] {
            for path in [true, false].map(|own| where_to(own).join(path)) {
                match fs::remove_dir_all(&path) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(at(&path)(e)),
                    _ => {}
                }
            }
        }
        let staging = |own: bool| where_to(own).join(STAGING);
        for staging in [true, false].map(staging) {
            fs::create_dir_all(&staging).map_err(at(&staging))?;
        }
        let mut limits = MOST;
        for (name, path, own) in ROOTS {
            let Some(tree) = files.roots.get(name).filter(|tree| !tree.entries.is_empty()) else { continue };
            let to = staging(own).join(name);
            fs::create_dir(&to).map_err(at(&to))?;
            let (from, to_id) = if own { ids } else { (0, 0) };
            let rules =
                Rules { ids: IdShift { from, to: to_id, count: IDS_PER_BLOCK }, strays: Strays::Refuse, limits };
            let ring = self.keys();
            let mut blocks = Blocks::new(self, tree, &ring);
            let done = restore(tree, &to, &rules, |block| blocks.take(block));
            let done = done.map_err(|source| FetchError::Restore { path: path.into(), source: Box::new(source) })?;
            limits.bytes -= done.bytes;
            limits.entries -= done.entries;
        }
        for staging in [true, false].map(staging) {
            let synced = fs::File::open(&staging).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
            synced.map_err(at(&staging))?;
        }
        for (name, path, own) in ROOTS {
            let (from, to) = (staging(own).join(name), where_to(own).join(path));
            if from.is_dir() {
                fs::create_dir_all(to.parent().expect("it is in the proc's directory")).map_err(at(&to))?;
                fs::rename(&from, &to).map_err(at(&to))?;
            }
        }
        for own in [true, false] {
            match fs::remove_dir(staging(own)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(at(&staging(own))(e)),
                _ => fs::File::open(where_to(own)).and_then(|dir| dir.sync_all()).map_err(at(where_to(own)))?,
            }
        }
        Ok(())
    }
}

/// The blocks of a tree, some ahead of the one that is asked for.
struct Blocks<'a> {
    archive: &'a Archive,
    tree: &'a FileTree,
    numbers: HashMap<(kip_archive::ids::PackId, u32), usize>,
    come: BTreeMap<usize, Vec<u8>>,
    reader: PackReader<'a>,
}

impl<'a> Blocks<'a> {
    fn new(archive: &'a Archive, tree: &'a FileTree, ring: &'a Keyring) -> Blocks<'a> {
        let numbers = tree.blocks.iter().enumerate().map(|(n, block)| ((block.pack.id, block.offset), n)).collect();
        Blocks { archive, tree, numbers, come: BTreeMap::new(), reader: PackReader::new(ring) }
    }

    fn take(&mut self, block: &BlockRef) -> io::Result<Vec<u8>> {
        let number = self.numbers[&(block.pack.id, block.offset)];
        if let Some(bytes) = self.come.remove(&number) {
            return Ok(bytes);
        }
        let next: Vec<(usize, &BlockRef)> = self.tree.blocks.iter().enumerate().skip(number).collect();
        let same = next.into_iter().take_while(|(_, other)| other.pack == block.pack).take(AHEAD);
        let wanted: Vec<_> = same.collect();
        let ranges: Vec<_> = wanted.iter().map(|(_, block)| block.range()).collect();
        let key = self.archive.pack_key(block.pack.id);
        let fetched = self.archive.runtime.block_on(self.archive.store.get_ranges(&key, &ranges));
        self.come.clear();
        for ((number, block), bytes) in wanted.into_iter().zip(fetched.map_err(io::Error::other)?) {
            self.come.insert(number, self.reader.open_block(block, &bytes).map_err(io::Error::other)?);
        }
        Ok(self.come.remove(&number).expect("it was asked for"))
    }
}
