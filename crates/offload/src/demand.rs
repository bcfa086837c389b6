//! Pages that come from the store when they are needed, into remote page files
//! ([`kip_snapshot::remote`]).
//!
//! Owns the order of requests: none for what is on its way already, none for what the cache has,
//! and what is waited for goes before what is read ahead ([`crate::ahead`] says how far). What
//! comes with the front anyway ([`crate::stream`]) is waited for, as long as it comes. What came
//! stays on the local disk as long as the generation does. Nothing here is durable.

use crate::Archive;
use crate::blocking;
use crate::errors::DemandError;
use crate::filling::{BEHIND, Filling};
use kip_archive::pack::BlockRef;
use kip_archive::table::PageTable;
use kip_snapshot::pages::{PageFile, PageMap};
use kip_snapshot::remote::{RemoteFile, TABLE};
use kip_store::{Key, Store};
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests at once of one proc.
const REQUESTS: usize = 8;
/// Requests at once for blocks that no thread waits for: those on their way are not to fill the
/// link for long.
const BEHIND_REQUESTS: usize = 4;
/// That pages do not come is told no more often.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// Outcome of fetching pages that a running proc waits for.
#[derive(Debug, PartialEq, Eq)]
pub enum Fetched {
    /// They are here.
    All,
    /// Not yet: the store does not give them. Reported now and then.
    Later {
        /// Why, where it is time to report it.
        report: Option<String>,
    },
    /// They cannot be had: what the store has is not what was stored.
    Damaged(String),
}

/// The remote page files that pages are fetched for, by device and inode.
pub(crate) type Open = Mutex<HashMap<(u64, u64), Arc<Filling>>>;

fn is_at(path: &Path, file: (u64, u64)) -> bool {
    fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == file)
}

/// Takes blocks off the list of those that come, whatever becomes of them.
struct Claim<'a> {
    filling: &'a Filling,
    blocks: Vec<u32>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // A caller that has claimed no blocks waits for others' claims, and is not to wake itself.
        if self.blocks.is_empty() {
            return;
        }
        let mut state = self.filling.state();
        state.blocks.retain(|block| !self.blocks.contains(block));
        drop(state);
        self.filling.came.notify_waiters();
    }
}

impl Archive {
    /// The remote page file at a path, if it is filled already, maybe under another.
    fn known_filling(&self, path: &Path) -> Result<Option<Arc<Filling>>, DemandError> {
        let found = fs::metadata(path).map_err(|source| DemandError::Io { path: path.to_owned(), source })?;
        let open = self.fetched.lock();
        Ok(open.get(&(found.dev(), found.ino())).cloned())
    }

    pub(crate) fn filling(&self, directory: &Path, file: &PageFile) -> Result<Arc<Filling>, DemandError> {
        let path = directory.join(&file.name);
        if let Some(known) = self.known_filling(&path)? {
            return Ok(known);
        }
        let found = fs::metadata(&path).map_err(|source| DemandError::Io { path: path.clone(), source })?;
        let key = (found.dev(), found.ino());
        let account = self.account_of(directory);
        let mut open = self.fetched.lock();
        self.let_go(&mut open);
        let remote = RemoteFile::open(directory, file)?;
        let loaded = self.table_of(directory, file)?;
        let filling = open.entry(key).or_insert_with(|| Arc::new(Filling::new(path, remote, loaded, account)));
        Ok(Arc::clone(filling))
    }

    /// Whether the remote page files of a generation are all there, whatever of them has come.
    pub fn can_be_filled(&self, directory: &Path) -> bool {
        let files = PageMap::load(directory).map(|map| map.files).unwrap_or_default();
        let mut remote = files.iter().filter(|file| file.remote.is_some());
        remote.all(|file| RemoteFile::open(directory, file).is_ok() && self.table_of(directory, file).is_ok())
    }

    /// Forgets those whose files are gone.
    pub fn forget_gone(&self) {
        self.let_go(&mut self.fetched.lock());
    }

    /// Forgets those whose files are gone, or whose numbers are another's by now. Closing the last
    /// descriptor of a deleted file frees its blocks on the disk, which can take half a second; the
    /// caller does not wait for that.
    fn let_go(&self, open: &mut HashMap<(u64, u64), Arc<Filling>>) {
        let gone: Vec<_> = open.extract_if(|key, filling| !is_at(&filling.path, *key)).collect();
        gone.iter().for_each(|(_, filling)| filling.end());
        if !gone.is_empty() {
            self.runtime.spawn_blocking(move || drop(gone));
        }
    }

    /// Makes known what fills a file that is there under its path.
    pub(crate) fn fills(&self, filling: &Arc<Filling>) {
        if let Ok(found) = fs::metadata(&filling.path) {
            let mut open = self.fetched.lock();
            open.insert((found.dev(), found.ino()), Arc::clone(filling));
        }
    }

    /// The page table of a remote page file.
    pub(crate) fn table_of(&self, directory: &Path, file: &PageFile) -> Result<PageTable, DemandError> {
        let path = directory.join(format!("{}{TABLE}", file.name));
        let bytes = fs::read(&path).map_err(|source| DemandError::Io { path: path.clone(), source })?;
        PageTable::load(&bytes, &self.realm).ok_or(DemandError::Table { path })
    }

    /// Fetches blocks, or waits for those that come already. All of them are here if it succeeds.
    async fn fill(&self, filling: &Arc<Filling>, mut blocks: BTreeSet<u32>, store: &Store) -> Result<(), DemandError> {
        use futures_util::{StreamExt as _, TryStreamExt as _};
        let io_at = |source| DemandError::Io { path: filling.path.clone(), source };
        loop {
            let came = filling.came.notified();
            tokio::pin!(came);
            came.as_mut().enable();
            let claimed: Vec<u32> = {
                let mut state = filling.state();
                blocks.iter().copied().filter(|block| state.blocks.insert(*block)).collect()
            };
            let coming = claimed.len() < blocks.len();
            let claim = Claim { filling, blocks: claimed };
            let away = self.take_from_cache(filling, &claim.blocks).await?;
            let requests = filling.requests(&away).into_iter().map(|request| self.request(filling, request, store));
            futures_util::stream::iter(requests).buffer_unordered(REQUESTS).try_collect::<()>().await?;
            drop(claim);
            if coming {
                came.await;
            }
            let mut left = BTreeSet::new();
            for block in blocks {
                if filling.lacks(block).map_err(io_at)? {
                    left.insert(block);
                }
            }
            if left.is_empty() {
                return Ok(());
            }
            blocks = left;
        }
    }

    /// Fetches blocks that no thread waits for, range by range: a thread that comes to wait for one
    /// of them meanwhile waits for its range only.
    async fn fill_in_background(&self, filling: &Arc<Filling>, blocks: Vec<u32>) -> Result<(), DemandError> {
        use futures_util::{StreamExt as _, TryStreamExt as _};
        let store = filling.account.store.in_background();
        let ranges = filling.requests(&blocks).into_iter().map(|range| {
            let store = &store;
            async move {
                let mut left = BTreeSet::new();
                for block in range {
                    if filling.lacks(block).map_err(|source| DemandError::Io { path: filling.path.clone(), source })? {
                        left.insert(block);
                    }
                }
                self.fill(filling, left, store).await
            }
        });
        futures_util::stream::iter(ranges).buffer_unordered(BEHIND_REQUESTS).try_collect().await
    }

    /// Takes out of the cache what it has of some blocks; gives the others. What it has and cannot
    /// be opened counts as one that it has not.
    async fn take_from_cache(&self, filling: &Arc<Filling>, blocks: &[u32]) -> Result<Vec<u32>, DemandError> {
        let Some(cache) = self.cache.clone() else { return Ok(blocks.to_vec()) };
        let object_of = |block: &BlockRef| self.pack_key(block.pack.id);
        let has = |number: &u32| {
            let block = filling.block(*number);
            cache.has(object_of(block).as_str(), &block.range())
        };
        let (here, mut away): (Vec<u32>, Vec<u32>) = blocks.iter().partition(|number| has(number));
        let requests: Vec<(Key, Vec<u32>)> =
            filling.requests(&here).into_iter().map(|all| (object_of(filling.block(all[0])), all)).collect();
        let (filling, keys) = (Arc::clone(filling), self.keys());
        let take = move || {
            let mut lost = Vec::new();
            for (object, blocks) in requests {
                let range = filling.range(&blocks);
                let Some(bytes) = cache.read(object.as_str(), &range) else {
                    lost.extend(blocks);
                    continue;
                };
                match filling.open(&keys, &blocks, &bytes) {
                    Ok(()) => filling.account.cached(bytes.len() as u64),
                    Err(DemandError::Open { .. }) => {
                        cache.damaged(object.as_str(), &range);
                        lost.extend(blocks);
                    }
                    Err(e) => return Err(e),
                }
            }
            Ok(lost)
        };
        if !here.is_empty() {
            away.extend(blocking(take).await?);
        }
        Ok(away)
    }

    /// One range of a pack; once more if what came cannot be opened, for it may have been damaged
    /// on its way.
    async fn request(&self, filling: &Arc<Filling>, blocks: Vec<u32>, store: &Store) -> Result<(), DemandError> {
        match self.request_once(filling, blocks.clone(), store).await {
            Err(DemandError::Open { .. }) => self.request_once(filling, blocks, store).await,
            done => done,
        }
    }

    async fn request_once(&self, filling: &Arc<Filling>, blocks: Vec<u32>, store: &Store) -> Result<(), DemandError> {
        let range = filling.range(&blocks);
        let object = self.pack_key(filling.block(blocks[0]).pack.id);
        let bytes = store.get_range(&object, range.clone()).await?;
        let (filling, keys, cache) = (Arc::clone(filling), self.keys(), self.cache.clone());
        let put = move || {
            filling.open(&keys, &blocks, &bytes)?;
            if let Some(cache) = cache {
                cache.keep(object.as_str(), range.start, &bytes);
            }
            Ok(())
        };
        blocking(put).await
    }

    /// Fetches pages of a generation: those of `which`, as number of the file, first page and
    /// pages, or all. Blocking; not on a thread of the runtime.
    pub fn fetch_pages(&self, directory: &Path, which: Option<&[(u32, u32, u32)]>) -> Result<(), DemandError> {
        let map = PageMap::load(directory)?;
        for (number, file) in (0..).zip(&map.files) {
            let Some(pages) = file.remote else { continue };
            let filling = self.filling(directory, file)?;
            let all = [(number, 0, pages)];
            let of_file = which.unwrap_or(&all).iter().filter(|(file, ..)| *file == number);
            let ranges: Vec<Range<u32>> = of_file.map(|(_, first, pages)| *first..first + pages).collect();
            self.runtime.block_on(self.fetch_ranges(&filling, directory, &ranges))?;
        }
        Ok(())
    }

    /// Fetches pages of one file, wherever they are.
    async fn fetch_ranges(
        &self,
        filling: &Arc<Filling>,
        directory: &Path,
        ranges: &[Range<u32>],
    ) -> Result<(), DemandError> {
        let io_at = |source| DemandError::Io { path: filling.path.clone(), source };
        let lacking = || -> Result<(BTreeSet<u32>, bool), DemandError> {
            let (mut blocks, mut come) = (BTreeSet::new(), false);
            for range in ranges {
                come |= filling.blocks_of(range.clone(), &mut blocks).map_err(io_at)?;
            }
            Ok((blocks, come))
        };
        let (blocks, come) = lacking()?;
        self.fill(filling, blocks, &filling.account.store).await?;
        if !come {
            return Ok(());
        }
        // What comes with the front may have come meanwhile, or not at all.
        filling.front_came().await;
        let (blocks, of_front) = lacking()?;
        self.fill(filling, blocks, &filling.account.store).await?;
        if of_front { self.front_again(filling, directory).await } else { Ok(()) }
    }

    /// After a wake: fetches what is missing, if that is little, if nothing is known of what is
    /// needed first, or if so much was needed the last time that this was best; else what of the
    /// sets did not come with the front.
    pub fn fetch_in_background(self: &Arc<Self>, directory: PathBuf) {
        let archive = Arc::clone(self);
        let begin = move || -> Result<_, DemandError> {
            let map = PageMap::load(&directory)?;
            let unknown = map.processes.values().all(|process| process.sets.iter().all(|set| set.pages.is_empty()));
            let mut all = Vec::new();
            for file in map.files.iter().filter(|file| file.remote.is_some()) {
                let filling = archive.filling(&directory, file)?;
                let found = filling.lacking();
                let (mut blocks, bytes) =
                    found.map_err(|source| DemandError::Io { path: filling.path.clone(), source })?;
                if filling.account.miss().is_some() && filling.has_room().unwrap_or(false) {
                    if !filling.comes_whole(bytes) {
                        continue;
                    }
                } else if !unknown && bytes > BEHIND {
                    blocks = filling.blocks_of_sets(&map)?.into_iter().collect();
                }
                all.push((filling, blocks));
            }
            Ok((archive, all))
        };
        self.runtime.spawn(async move {
            match blocking(begin).await {
                Ok((archive, all)) => {
                    all.into_iter().for_each(|(filling, blocks)| archive.spawn_fill(filling, blocks));
                }
                Err(e) => tracing::debug!(error = kip_types::chain(&e), "prefetch from the store failed to start"),
            }
        });
    }

    /// Before a wake: what will be needed whole comes while the processes are made.
    pub fn fetch_alongside(self: &Arc<Self>, directory: PathBuf) {
        if self.account_of(&directory).miss().is_some() {
            self.fetch_in_background(directory);
        }
    }

    /// Fetches blocks that no thread waits for.
    fn spawn_fill(self: &Arc<Self>, filling: Arc<Filling>, blocks: Vec<u32>) {
        let archive = Arc::clone(self);
        self.runtime.spawn(async move {
            // A thread that needs a missing one asks for it.
            if let Err(e) = archive.fill_in_background(&filling, blocks).await {
                tracing::debug!(error = kip_types::chain(&e), "prefetch from the store ended before all pages came");
            }
        });
    }

    /// A proc waits for pages of a remote page file. The pager asks again for what does not come.
    pub async fn fetch_missing(self: &Arc<Self>, directory: &Path, name: &str, pages: Range<u32>) -> Fetched {
        let opened = (|| {
            if let Some(known) = self.known_filling(&directory.join(name))? {
                return Ok(Some(known));
            }
            let map = PageMap::load(directory)?;
            let file = map.files.iter().find(|file| file.name == name && file.remote.is_some());
            file.map(|file| self.filling(directory, file)).transpose()
        })();
        let filling = match opened {
            Ok(Some(filling)) => filling,
            // The proc was parked or has ended meanwhile.
            Ok(None) => return Fetched::All,
            Err(e) => return Fetched::Later { report: Some(kip_types::chain(&e)) },
        };
        let mut blocks = BTreeSet::new();
        let found = filling.blocks_of(pages.clone(), &mut blocks);
        let missed = blocks.len();
        let found = found.and_then(|come| Ok((come, filling.ahead(&mut blocks)?)));
        // One that is followed by what is read ahead is of a stream, which needs no more.
        let alone = missed > 0 && blocks.len() == missed && found.as_ref().is_ok_and(|(_, ahead)| ahead.is_empty());
        let waits = alone.then(|| filling.waits()).transpose();
        let found = found.and_then(|(come, ahead)| Ok((come, ahead, waits?)));
        let result = match found {
            Ok((come, ahead, waits)) => {
                let (waits, whole) = waits.unzip();
                if let Some(whole) = whole.filter(|whole| !whole.is_empty()) {
                    self.spawn_fill(Arc::clone(&filling), whole);
                }
                let store = &filling.account.store;
                let waited_for = async {
                    self.fill(&filling, blocks, store).await?;
                    drop(waits);
                    if come { self.fetch_ranges(&filling, directory, &[pages]).await } else { Ok(()) }
                };
                let background = store.in_background();
                // No thread waits for the blocks ahead: one that comes to need them asks for them.
                tokio::join!(waited_for, self.fill(&filling, ahead, &background)).0
            }
            Err(source) => Err(DemandError::Io { path: filling.path.clone(), source }),
        };
        let mut state = filling.state();
        match result {
            Ok(()) => {
                state.told = None;
                Fetched::All
            }
            Err(e) if e.is_damage() && state.damaged => Fetched::Later { report: None },
            Err(e) if e.is_damage() => {
                state.damaged = true;
                Fetched::Damaged(kip_types::chain(&e))
            }
            Err(_) if state.told.is_some_and(|at| at.elapsed() < REPORT_EVERY) => Fetched::Later { report: None },
            Err(e) => {
                state.told = Some(Instant::now());
                Fetched::Later { report: Some(kip_types::chain(&e)) }
            }
        }
    }
}
