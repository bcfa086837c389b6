//! A generation directory into objects.

use crate::blocking;
use crate::collect::CollectError;
use crate::files::{ArchiveFilesError, KNOWN, Own};
use crate::{Archive, DemandError, HeadFailure, processor};
use bytes::Bytes;
use kip_archive::files::tree::FileTree;
use kip_archive::front::read::{FrontEvent, FrontReader};
use kip_archive::front::write::{FrontError, FrontWriter};
use kip_archive::front::{FrontManifest, MetadataFile, Sizes, read, sets_of};
use kip_archive::gc::{GRACE_MS, Writing};
use kip_archive::ids::{KeyId, PackId, ProcId};
use kip_archive::index::{FileKey, Known};
use kip_archive::keys::{Keyring, NoKey};
use kip_archive::memory::{self, Areas, MemoryError, Pages};
use kip_archive::names::FrontRef;
use kip_archive::pack::{BlockRef, Finished, PackReader};
use kip_archive::packing::{PackError, Packing};
use kip_archive::seal;
use kip_archive::table::{RemotePages, Space};
use kip_checkpoint::plan::{self, PlanError, Wish};
use kip_clocks::Clocks;
use kip_criu_images::Images;
use kip_snapshot::SnapshotError;
use kip_snapshot::pages::{PAGE, PAGES, PageMap};
use kip_snapshot::remote::OpenPages;
use kip_store::{CheckSwapsError, GetError, Key, PutError, Version};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::{Generation, ProcName};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::JoinSet;

/// A process with as many pages, 8 MiB, is small.
const SMALL: u32 = 2048;
/// A collection of another data directory is waited for as long before a generation is stored a
/// second time.
const LEASED_WITHIN: Duration = Duration::from_secs(30);

/// What an upload was.
#[derive(Debug, Clone)]
pub struct Uploaded {
    /// What the proc wakes from.
    pub front: FrontRef,
    /// Of packs.
    pub pack_bytes: u64,
    /// Of the front.
    pub front_bytes: u64,
    /// What it takes in the store: its front, and all blocks that this leads to.
    pub held_bytes: u64,
    /// The keys without which it cannot be woken: the front's and those of its packs.
    pub keys: BTreeSet<KeyId>,
    /// The ring that all of it was sealed with.
    pub ring: Arc<Keyring>,
}

/// A generation is not in the store; the local one is as it was.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error(transparent)]
    Unfit(#[from] CheckSwapsError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Files(#[from] ArchiveFilesError),
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error(transparent)]
    Key(#[from] NoKey),
    #[error("cannot read {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Front(#[from] FrontError),
    #[error(transparent)]
    List(#[from] kip_store::StoreFailure),
    #[error(transparent)]
    Put(#[from] PutError),
    #[error("what was just stored cannot be read back")]
    ReadBack(#[source] GetError),
    #[error("what was just stored is not what is there: {object}")]
    Damaged {
        object: String,
        #[source]
        source: seal::UnsealError,
    },
    #[error(transparent)]
    Head(#[from] HeadFailure),
    #[error("some of its memory is in the store and does not come")]
    Fetch(#[from] DemandError),
    #[error(transparent)]
    Noted(#[from] CollectError),
    #[error("{object} was collected while this generation was stored: try again")]
    Collected { object: String },
    #[error("another data directory collects the store without the usual wait: try again when it has ended")]
    Hurried,
}

/// What a generation that is stored now may refer to, and of which version of what collectors have
/// noted that is.
pub(crate) struct Begun {
    pub(crate) writing: Writing,
    version: Option<Version>,
}

impl UploadError {
    /// A collection has taken what was stored, or could have.
    fn is_by_a_collection(&self) -> bool {
        use UploadError::{Collected, Head, Hurried, ReadBack};
        matches!(self, Collected { .. } | Hurried | Head(HeadFailure::TooLate(_)) | ReadBack(GetError::Missing { .. }))
    }

    /// What the proc has in the store was sealed by a key that is destroyed, and nothing can follow
    /// it.
    pub fn is_of_destroyed_key(&self) -> bool {
        match self {
            UploadError::Head(e) => e.is_of_destroyed_key(),
            UploadError::Damaged { source, .. } => matches!(source, seal::UnsealError::Key(NoKey::Destroyed { .. })),
            _ => false,
        }
    }
}

/// A generation that is to be stored.
struct SealedGeneration<'a> {
    proc: ProcId,
    directory: &'a Path,
    local: &'a kip_snapshot::Manifest<serde_json::Value>,
    map: &'a PageMap,
    spec: &'a serde_json::Value,
    /// The generation before it in the store.
    parent: Option<Generation>,
}

/// A generation whose packs are stored; its front is not yet.
struct PackedGeneration {
    front: FrontRef,
    /// The front.
    bytes: Vec<u8>,
    /// What was stored in packs.
    pack_bytes: u64,
}

impl Archive {
    /// Stores a generation and makes it the proc's newest. Blocking; not on a thread of the
    /// runtime. If another data directory's collection has undone that, no data directory collects
    /// while this one stores the generation once more.
    pub fn store(
        &self,
        proc: ProcId,
        name: &ProcName,
        directory: &Path,
        spec: serde_json::Value,
        own: &Own,
    ) -> Result<Uploaded, UploadError> {
        let store = || self.store_beside_collections(proc, name, directory, &spec, own);
        let first = store();
        if !first.as_ref().is_err_and(UploadError::is_by_a_collection) {
            return first;
        }
        // Before the lock that each try takes: a collection here takes both in this order.
        let _no_collection_here = self.runtime.block_on(self.collecting.lock());
        let (leased, version) = self.runtime.block_on(self.lease_within(LEASED_WITHIN, GRACE_MS, now_ms))?;
        let second = store();
        // If that fails the lease ends by itself.
        let _ = self.runtime.block_on(self.note(&leased.end(now_ms()), Some(&version)));
        second
    }

    fn store_beside_collections(
        &self,
        proc: ProcId,
        name: &ProcName,
        directory: &Path,
        spec: &serde_json::Value,
        own: &Own,
    ) -> Result<Uploaded, UploadError> {
        self.runtime.block_on(self.fit.get_or_try_init(|| self.store.check_swaps()))?;
        let local: kip_snapshot::Manifest<serde_json::Value> = kip_snapshot::open(directory)?;
        let map = PageMap::load(directory)?;
        let _no_short_collection = self.runtime.block_on(self.storing.read());
        // What the one finds is not needed for the other, and each is a request or two.
        let (last, begun) = self.runtime.block_on(async { tokio::join!(self.head(proc), self.begin_writing()) });
        let (last, begun) = (last?, begun?);
        let newest = last.as_ref().filter(|(head, _)| head.owner.id == self.owner).and_then(|(head, _)| head.current);
        let ring = self.keys();
        // A daemon that died has stored it and could not record that. Sealed generations do not
        // change.
        if let Some(front) = newest.filter(|front| front.generation == local.generation) {
            let (keys, held_bytes) = self.runtime.block_on(self.read_front_back(&ring, proc, front))?;
            return Ok(Uploaded { front, pack_bytes: 0, front_bytes: 0, held_bytes, keys, ring });
        }
        let sealed = SealedGeneration {
            proc,
            directory,
            local: &local,
            map: &map,
            spec,
            parent: newest.map(|front| front.generation),
        };
        let packed = match self.pack(&sealed, &begun.writing, own, &ring) {
            Err(UploadError::Memory(MemoryError::NotHere { .. })) => {
                self.fetch_pages(directory, None)?;
                self.pack(&sealed, &begun.writing, own, &ring)?
            }
            packed => packed?,
        };
        let PackedGeneration { front, bytes, pack_bytes } = packed;
        let front_bytes = bytes.len() as u64;
        let summary = read::summary(&ring, Some(proc), Some(front), &bytes);
        let written = summary.ok().flatten().expect("it was just written");
        let packs: Vec<PackId> = written.packs.iter().map(|pack| pack.id).collect();
        let bytes = Bytes::from(bytes);
        let (keys, held_bytes) = self.runtime.block_on(async {
            let key = self.front_key(proc, front);
            self.store.put(&key, bytes.clone()).await?;
            fault::reach("archive-front");
            let (keys, writing) =
                tokio::join!(self.read_front_back(&ring, proc, front), self.still_there(begun, &key, &packs));
            let (keys, writing) = (keys?, writing?);
            fault::reach("archive-front-read");
            let held = self.hold_keys().await;
            held.still_open(&ring).map_err(HeadFailure::KeyGone)?;
            self.publish(proc, name, front, last, || writing.may_publish(crate::boot_ms())).await?;
            fault::reach("archive-head");
            Ok::<_, UploadError>(keys)
        })?;
        if let Some(cache) = &self.cache {
            // The next wake begins with it, and those before it are over.
            self.uncache_fronts(proc, Some(front));
            cache.keep_whole(self.front_key(proc, front).as_str(), &bytes);
        }
        Ok(Uploaded { front, pack_bytes, front_bytes, held_bytes, keys, ring })
    }

    /// What a generation that is stored now may refer to: the candidates are read, then the list of
    /// packs.
    pub(crate) async fn begin_writing(&self) -> Result<Begun, UploadError> {
        let now = crate::boot_ms();
        let (noted, version) = self.collection().await?;
        let mut writing = Writing::begin(now, noted.candidates.clone(), noted.grace_for(self.owner, now_ms()));
        writing.saw(self.packs_there().await?);
        Ok(Begun { writing, version })
    }

    /// Until when the head may be published. What was noted as a candidate since the upload began
    /// stays for the usual wait; if a collector has not waited, or is about not to, that is found
    /// here.
    pub(crate) async fn still_there(
        &self,
        mut begun: Begun,
        front: &Key,
        packs: &[PackId],
    ) -> Result<Writing, UploadError> {
        for _ in 0..crate::TRIES {
            let (noted, version) = self.collection().await?;
            if version == begun.version {
                return Ok(begun.writing);
            }
            if noted.grace_for(self.owner, now_ms()) < GRACE_MS {
                return Err(UploadError::Hurried);
            }
            let there = self.packs_there().await?;
            if let Some(gone) = packs.iter().find(|pack| !there.contains(pack)) {
                return Err(UploadError::Collected { object: self.pack_key(*gone).as_str().to_owned() });
            }
            match self.store.size(front).await {
                Ok(_) => {}
                Err(GetError::Missing { .. }) => {
                    return Err(UploadError::Collected { object: front.as_str().to_owned() });
                }
                Err(e) => return Err(UploadError::ReadBack(e)),
            }
            begun.version = version;
        }
        Err(UploadError::Hurried)
    }

    /// Packs what is new, stores it and reads it back; gives the front.
    fn pack(
        &self,
        sealed: &SealedGeneration<'_>,
        writing: &Writing,
        own: &Own,
        ring: &Arc<Keyring>,
    ) -> Result<PackedGeneration, UploadError> {
        let SealedGeneration { proc, directory, local, map, spec, parent } = *sealed;
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| UploadError::Io { path, source }
        };
        let opened = map.files.iter().map(|file| OpenPages::open(directory, file));
        let files: Vec<OpenPages> = opened.collect::<Result<_, _>>()?;
        let key = |file: &OpenPages| match file {
            OpenPages::Here(file) => FileKey::of(file).ok().flatten(),
            OpenPages::Remote(_) => None,
        };
        let keys: Vec<Option<FileKey>> = files.iter().map(key).collect();
        let mut read = |file: u32, first: u32, bytes: &mut [u8]| files[file as usize].read(first, bytes);
        let number = map.files.iter().position(|file| file.remote.is_some());
        let table = number.map(|number| self.table_of(directory, &map.files[number])).transpose()?;
        let here = |page: u32| number.is_some_and(|number| files[number].has(page));
        let remote =
            number.zip(table.as_ref()).map(|(number, table)| RemotePages::new(table, number as u32).with(&here));
        let distrusted = self.distrusted.load(Ordering::SeqCst);
        let index = Arc::clone(&self.index.lock());
        let known_file = own.dir.join(KNOWN);
        let known = fs::read(&known_file).ok().and_then(|bytes| Known::load(&bytes, &self.realm)).unwrap_or_default();
        let usable = |pack: &PackId| writing.may_use(pack);
        let mut uploads = JoinSet::new();
        // One that stores much would else put all others out of the cache.
        let mut room = self.cached().map_or(0, |(_, limit)| limit / 4);
        let mut sink = |finished: Finished| {
            let (store, key, keys) = (self.store.clone(), self.pack_key(finished.pack.id), Arc::clone(ring));
            let left = room.checked_sub(finished.bytes.len() as u64);
            room = left.unwrap_or(0);
            let cache = self.cache.clone().filter(|_| left.is_some());
            let stored = async move {
                let bytes = store_pack(store, key.clone(), keys, finished).await?;
                if let Some(cache) = cache {
                    let keep = move || cache.keep(key.as_str(), 0, &bytes);
                    blocking(keep).await;
                }
                Ok::<_, UploadError>(())
            };
            uploads.spawn_on(stored, &self.runtime);
            Ok(())
        };
        let mut packing = Packing::new(ring, &index, &usable, &mut sink)?;
        let (shared, areas) = (BTreeMap::new(), areas(directory, map));
        let remote = remote.as_ref();
        let mut pages = Pages { map, shared: &shared, areas: &areas, keys: &keys, remote, read: &mut read };
        let archived = memory::archive(&mut pages, &known, &mut packing)?;
        let (own_files, known_files) = own.pack(self, &mut packing)?;
        let packed = packing.finish()?;
        self.runtime.block_on(async {
            while let Some(done) = uploads.join_next().await {
                done.expect("an upload does not panic")?;
            }
            Ok::<_, UploadError>(())
        })?;
        let page_files: BTreeSet<&str> = map.files.iter().map(|file| file.name.as_str()).collect();
        let metadata: Vec<&kip_snapshot::Part> =
            local.parts.iter().filter(|part| part.name != PAGES && !page_files.contains(part.name.as_str())).collect();
        let manifest = FrontManifest {
            generation: local.generation,
            parent,
            frozen_at_ms: sealed_at_ms(directory),
            engine: local.engine.clone(),
            kernel: local.kernel.clone(),
            cpu_features: processor::features(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            spec: spec.clone(),
            body: local.body.clone(),
            metadata: metadata.iter().map(|p| MetadataFile { name: p.name.clone(), size: p.size }).collect(),
            packs: packed.refers.keys().copied().collect(),
            sizes: Sizes {
                memory_bytes: archived.table.pages() * PAGE as u64,
                file_bytes: own_files.roots.values().map(FileTree::bytes).sum(),
                ..Sizes::default()
            },
        };
        let mut front = FrontWriter::begin(ring, proc, &manifest)?;
        front.sets(&sets_of(&map.processes))?;
        front.page_table(&archived.table)?;
        front.files(&own_files)?;
        for part in metadata {
            let path = directory.join(&part.name);
            front.metadata(&fs::read(&path).map_err(at(&path))?)?;
        }
        front.pages_of(&archived, &mut pages)?;
        let (front, bytes) = (front.front(), front.end()?);
        // What was stored with another key than that of the moment is not used again.
        let trusted = self.distrusted.load(Ordering::SeqCst) == distrusted;
        if trusted && ring.current() == self.keys().current() {
            drop(index);
            Arc::make_mut(&mut self.index.lock()).merge(&packed.added);
            // A cache.
            if let Err(error) = fs::write(&known_file, archived.known.save(&self.realm)) {
                tracing::debug!(path = %known_file.display(), %error, "what is known of page files is not remembered");
            }
            known_files.keep(self);
            self.save_index();
        }
        Ok(PackedGeneration { front, bytes, pack_bytes: packed.bytes })
    }

    /// Reads all of it; gives the keys that it needs.
    pub async fn read_front_back(
        &self,
        ring: &Arc<Keyring>,
        proc: ProcId,
        front: FrontRef,
    ) -> Result<(BTreeSet<KeyId>, u64), UploadError> {
        use futures_util::StreamExt as _;
        let key = self.front_key(proc, front);
        let damaged = |source| UploadError::Damaged { object: key.as_str().to_owned(), source };
        let mut object = self.store.get(&key).await.map_err(UploadError::ReadBack)?;
        let mut reader = FrontReader::new(Arc::clone(ring), proc, front);
        let (mut keys, mut held_bytes) = (BTreeSet::new(), 0);
        let sealed = |blocks: &[BlockRef]| blocks.iter().map(|block| u64::from(block.sealed)).sum::<u64>();
        while let Some(bytes) = object.next().await {
            let bytes = bytes.map_err(UploadError::ReadBack)?;
            held_bytes += bytes.len() as u64;
            for event in reader.push(&bytes).map_err(&damaged)? {
                match event {
                    FrontEvent::Manifest(manifest) => keys.extend(manifest.packs.iter().map(|pack| pack.key)),
                    FrontEvent::PageTable(table) => held_bytes += sealed(&table.blocks),
                    FrontEvent::Files(files) => {
                        held_bytes += files.roots.values().map(|tree| sealed(&tree.blocks)).sum::<u64>()
                    }
                    _ => {}
                }
            }
        }
        reader.finish().map_err(damaged)?;
        keys.extend(reader.header().map(|header| header.key));
        Ok((keys, held_bytes))
    }
}

/// What of the memory cannot wait for a fault, as a plan of the wake has it; nothing if there
/// cannot be one, for CRIU waits for all of it. And all of a small process if it is not known what
/// it needs first: its faults would cost a request each.
fn areas(directory: &Path, map: &PageMap) -> Areas {
    let mut areas = Areas::default();
    for (number, process) in &map.processes {
        let pages: u32 = process.runs.iter().map(|run| run.pages).sum();
        if pages <= SMALL && process.sets.iter().all(|set| set.pages.is_empty()) {
            process.runs.iter().for_each(|run| areas.eager.add(Space::Process(*number), run.start..run.end()));
        }
    }
    let (clocks, init) = (&Clocks::default(), kip_sandbox::init::PATH);
    let wish = Wish { clocks, unreported: &[], terminals: &[], pages: map, lazy_from: 1, init, program: 0 };
    let compiled = Images::read(directory).map_err(PlanError::from).and_then(|images| plan::compile(&images, &wish));
    let Ok(plan) = compiled else { return areas };
    let eager: Vec<_> = plan.eager.iter().map(|(file, first, pages)| (*file, *first..first + pages)).collect();
    for (number, process) in &map.processes {
        for run in &process.runs {
            for (_, pages) in eager.iter().filter(|(file, _)| *file == run.file) {
                let (from, to) = (pages.start.max(run.first), pages.end.min(run.first + run.pages));
                let at = |page: u32| run.start + u64::from(page - run.first) * PAGE as u64;
                if from < to {
                    areas.eager.add(Space::Process(*number), at(from)..at(to));
                }
            }
        }
    }
    areas
}

/// Stores a pack and reads it back: its bytes.
pub(crate) async fn store_pack(
    store: kip_store::Store,
    key: kip_store::Key,
    keys: Arc<Keyring>,
    finished: Finished,
) -> Result<Vec<u8>, UploadError> {
    use futures_util::TryStreamExt as _;
    let id = finished.pack.id;
    store.put(&key, Bytes::from(finished.bytes)).await?;
    fault::reach("archive-pack");
    let parts: Vec<Bytes> =
        store.get(&key).await.map_err(UploadError::ReadBack)?.try_collect().await.map_err(UploadError::ReadBack)?;
    let bytes = parts.concat();
    let damaged = |source| UploadError::Damaged { object: key.as_str().to_owned(), source };
    PackReader::new(&keys).check(id, &bytes, |_, _| {}).map_err(damaged)?;
    fault::reach("archive-pack-read");
    Ok(bytes)
}

/// When a generation was sealed, some milliseconds after its processes were frozen: Unix time in
/// milliseconds.
pub(crate) fn sealed_at_ms(directory: &Path) -> u64 {
    let made = fs::metadata(directory).and_then(|found| found.modified());
    let since = made.ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_millis() as u64)
}
