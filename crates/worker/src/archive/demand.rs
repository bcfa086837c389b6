//! Pages that come from the store when they are needed, into remote page files ([`kip_snapshot::remote`]).
//!
//! Owns which blocks are on their way, so that none is fetched twice, and how far is read ahead: the more, the longer what is
//! asked for lies behind what came last, as of a file that is read from its beginning. What comes with the front anyway
//! ([`super::stream`]) is waited for, as long as it comes. What came stays on the local disk as long as the generation does.
//! Nothing here is durable.

use super::{Archive, FetchError};
use kip_archive::front::{Sets, left_out};
use kip_archive::names::ObjectName;
use kip_archive::pack::{BlockRef, PackReader};
use kip_archive::seal::OpenError;
use kip_archive::table::{Home, PageTable, Remote, Space};
use kip_snapshot::SnapshotError;
use kip_snapshot::pages::{PAGE, PageFile, PageMap};
use kip_snapshot::remote::{RemoteFile, TABLE};
use kip_store::GetError;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The most sealed bytes of one request: as long as its first byte takes on a link of 100 MB/s.
const REQUEST_BYTES: u64 = 2 << 20;
/// Requests at once of one proc.
const REQUESTS: usize = 8;
/// Blocks that are read ahead at most.
const AHEAD: u32 = 128;
/// What is missing is fetched behind a wake if it is no more than this, bytes.
const BEHIND: u64 = 8 << 20;
/// That pages do not come is told no more often.
const TOLD_EVERY: Duration = Duration::from_secs(30);

/// Pages do not come; whoever needs them waits.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemandError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("{path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is damaged: it says where pages are fetched from")]
    Table { path: PathBuf },
    #[error(transparent)]
    Get(#[from] GetError),
    #[error("{object} cannot be opened")]
    Open {
        object: String,
        #[source]
        source: OpenError,
    },
    #[error(transparent)]
    Front(Box<FetchError>),
    #[error("pages of {path} are in a front of which nothing is known here any more")]
    NoFront { path: PathBuf },
}

impl DemandError {
    /// The store does not give what it has, or not yet.
    pub(crate) fn is_the_stores(&self) -> bool {
        match self {
            DemandError::Get(_) => true,
            DemandError::Front(e) => matches!(**e, FetchError::Get(_)),
            _ => false,
        }
    }

    /// What the store has is not what was stored.
    fn is_damage(&self) -> bool {
        match self {
            DemandError::Open { .. } => true,
            DemandError::Front(e) => matches!(**e, FetchError::Open { .. }),
            _ => false,
        }
    }
}

/// How it went to bring pages that a running proc waits for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Brought {
    /// They are here.
    All,
    /// Not yet: the store does not give them. Told now and then.
    Later { tell: Option<String> },
    /// They cannot be had: what the store has is not what was stored.
    Damaged(String),
}

/// The remote page files that pages are fetched for, by device and inode.
pub(super) type Open = Mutex<HashMap<(u64, u64), Arc<Filling>>>;

/// A remote page file that is filled.
pub(super) struct Filling {
    pub(super) path: PathBuf,
    pub(super) file: RemoteFile,
    table: PageTable,
    /// All runs by space and address: whose, start, pages, first page.
    places: Vec<(Space, u64, u32, u32)>,
    /// Runs of pages that are in the front only, by page: first page, pages.
    in_front: Vec<(u32, u32)>,
    /// Runs of pages that lie in blocks, by page: first page, pages, block, first page in the block.
    runs: Vec<(u32, u32, u32, u32)>,
    /// Places in `runs`, by block.
    of_blocks: Vec<(u32, u32)>,
    /// Blocks by pack and offset, and of each block its place there.
    in_packs: Vec<u32>,
    ranks: Vec<u32>,
    state: Mutex<Coming>,
    /// Some have come, or will not.
    came: Notify,
}

#[derive(Default)]
struct Coming {
    blocks: HashSet<u32>,
    /// Pages that come with the front, as long as that comes.
    front: Option<HashSet<u32>>,
    /// Behind the last block that was asked for, by rank, and how many are fetched next time.
    next: u32,
    ahead: u32,
    told: Option<Instant>,
    /// That it is damaged has been told: whoever waited for it is ended once.
    damaged: bool,
}

impl Filling {
    pub(super) fn new(path: PathBuf, file: RemoteFile, table: PageTable) -> Filling {
        let remote = Remote::new(&table, 0);
        let places = remote.runs().map(|(first, of, run)| (of, run.start, run.pages, first)).collect();
        let in_front = remote.runs().filter(|(.., run)| run.home == Home::Front);
        let in_front = in_front.map(|(first, _, run)| (first, run.pages)).collect();
        let in_block = |(first, _, run): (u32, _, &kip_archive::table::TableRun)| match run.home {
            Home::Block { block, first: at } => Some((first, run.pages, block, at)),
            Home::Front | Home::Zeros => None,
        };
        let runs: Vec<_> = remote.runs().filter_map(in_block).collect();
        let mut of_blocks: Vec<(u32, u32)> = (0..).zip(&runs).map(|(place, run)| (run.2, place)).collect();
        of_blocks.sort_unstable();
        let mut in_packs: Vec<u32> = (0..table.blocks.len() as u32).collect();
        in_packs.sort_unstable_by_key(|number| {
            let block = &table.blocks[*number as usize];
            (block.pack, block.offset)
        });
        let mut ranks = vec![0; in_packs.len()];
        (0..).zip(&in_packs).for_each(|(rank, number)| ranks[*number as usize] = rank);
        let (state, came) = (Mutex::default(), Notify::new());
        Filling { path, file, table, places, in_front, runs, of_blocks, in_packs, ranks, state, came }
    }

    /// The number of a page.
    fn number(&self, space: Space, address: u64) -> Option<u32> {
        let next = self.places.partition_point(|(of, start, ..)| (*of, *start) <= (space, address));
        let (of, start, pages, first) = *self.places.get(next.checked_sub(1)?)?;
        let index = (address - start) / PAGE as u64;
        (of == space && index < u64::from(pages)).then(|| first + index as u32)
    }

    /// Puts pages there by whose they are.
    pub(super) fn put_pages(&self, space: Space, pages: &[(u64, Vec<u8>)]) -> io::Result<()> {
        let mut numbered: Vec<(u32, &[u8])> =
            pages.iter().filter_map(|(address, bytes)| Some((self.number(space, *address)?, &bytes[..]))).collect();
        numbered.sort_unstable_by_key(|(number, _)| *number);
        for run in numbered.chunk_by(|(one, _), (next, _)| one + 1 == *next) {
            let bytes: Vec<u8> = run.iter().flat_map(|(_, bytes)| *bytes).copied().collect();
            self.file.put(run[0].0, &bytes)?;
        }
        Ok(())
    }

    /// From now on what the sets have comes with the front; what does not is waited for until that has come. Not if it comes
    /// already.
    pub(super) fn front_begins(&self, sets: &Sets) -> io::Result<bool> {
        let mut awaited = HashSet::new();
        for (process, sets) in sets {
            let left = left_out(sets);
            let pages = sets.iter().flat_map(|set| &set.pages).filter(|page| !left.contains(&page.address));
            awaited.extend(pages.filter_map(|page| self.number(Space::Process(*process), page.address)));
        }
        for (first, pages) in &self.in_front {
            awaited.extend(*first..first + pages);
        }
        let here = self.file.here(0, self.file.pages())?;
        awaited.retain(|page: &u32| !here[*page as usize]);
        let mut state = self.state();
        let begins = state.front.is_none();
        state.front.get_or_insert(awaited);
        Ok(begins)
    }

    /// It has come, or does not come any more.
    pub(super) fn front_ended(&self) {
        self.state().front = None;
        self.came.notify_waiters();
    }

    /// Waits until it comes no more.
    pub(super) async fn front_came(&self) {
        loop {
            let came = self.came.notified();
            tokio::pin!(came);
            came.as_mut().enable();
            if self.state().front.is_none() {
                return;
            }
            came.await;
        }
    }

    /// Whether it has some of these pages, and nothing else does.
    pub(super) fn front_lacks(&self, pages: &Range<u32>) -> io::Result<bool> {
        let from = self.in_front.partition_point(|(first, count)| first + count <= pages.start);
        for (first, count) in self.in_front[from..].iter().take_while(|(first, _)| *first < pages.end) {
            let (start, end) = (pages.start.max(*first), pages.end.min(first + count));
            if !self.file.here(start, end - start)?.iter().all(|here| *here) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn state(&self) -> MutexGuard<'_, Coming> {
        self.state.lock().expect("nobody panics with it")
    }

    fn runs_of(&self, block: u32) -> impl Iterator<Item = (u32, u32, u32, u32)> + '_ {
        let from = self.of_blocks.partition_point(|(of, _)| *of < block);
        let places = self.of_blocks[from..].iter().take_while(move |(of, _)| *of == block);
        places.map(|(_, place)| self.runs[*place as usize])
    }

    /// The blocks of pages which are not here, and do not come with the front. Tells whether some do.
    fn blocks_of(&self, pages: Range<u32>, into: &mut BTreeSet<u32>) -> io::Result<bool> {
        let from = self.runs.partition_point(|(first, count, ..)| first + count <= pages.start);
        let mut come = self.front_lacks(&pages)?;
        for (first, count, block, _) in self.runs[from..].iter().take_while(|(first, ..)| *first < pages.end) {
            let (start, end) = (pages.start.max(*first), pages.end.min(first + count));
            let here = self.file.here(start, end - start)?;
            let state = self.state();
            let comes = |page: &u32| state.front.as_ref().is_some_and(|front| front.contains(page));
            let mut away = (start..end).zip(here).filter(|(_, here)| !here).map(|(page, _)| page).peekable();
            if away.peek().is_some() {
                if away.all(|page| comes(&page)) {
                    come = true;
                } else {
                    into.insert(*block);
                }
            }
        }
        Ok(come)
    }

    /// The blocks of pages of sets which are not here, as many as are fetched behind a wake.
    fn blocks_of_sets(&self, map: &PageMap) -> Result<BTreeSet<u32>, DemandError> {
        let mut blocks = BTreeSet::new();
        let mut bytes = 0;
        for (process, of) in &map.processes {
            for page in of.sets.iter().flat_map(|set| &set.pages) {
                let Some(number) = self.number(Space::Process(*process), page.address) else { continue };
                let mut own = BTreeSet::new();
                let found = self.blocks_of(number..number + 1, &mut own);
                found.map_err(|source| DemandError::Io { path: self.path.clone(), source })?;
                for block in own {
                    if bytes < BEHIND && blocks.insert(block) {
                        bytes += u64::from(self.block(block).sealed);
                    }
                }
            }
        }
        Ok(blocks)
    }

    /// Whether some page of a block is not here.
    fn lacks(&self, block: u32) -> io::Result<bool> {
        for (first, pages, ..) in self.runs_of(block) {
            if !self.file.here(first, pages)?.iter().all(|here| *here) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// With those behind them that are probably needed next.
    fn with_ahead(&self, blocks: &mut BTreeSet<u32>) -> io::Result<()> {
        let ranks = || blocks.iter().map(|block| self.ranks[*block as usize]);
        let (Some(first), Some(last)) = (ranks().min(), ranks().max()) else { return Ok(()) };
        let mut state = self.state();
        let follows = state.next > 0 && first >= state.next.saturating_sub(1) && first <= state.next + 1;
        state.ahead = if follows { (state.ahead * 2).clamp(1, AHEAD) } else { 0 };
        let end = (last + 1 + state.ahead).min(self.in_packs.len() as u32);
        state.next = end;
        drop(state);
        for rank in last + 1..end {
            let block = self.in_packs[rank as usize];
            if self.lacks(block)? {
                blocks.insert(block);
            }
        }
        Ok(())
    }

    /// Puts the pages of a block where they belong.
    fn put(&self, block: u32, bytes: &[u8]) -> Result<(), DemandError> {
        for (first, pages, _, at) in self.runs_of(block) {
            let bytes = &bytes[at as usize * PAGE..(at + pages) as usize * PAGE];
            let put = self.file.put(first, bytes);
            put.map_err(|source| DemandError::Io { path: self.path.clone(), source })?;
        }
        Ok(())
    }

    /// Blocks as ranges of packs, each one request.
    fn requests(&self, blocks: &[u32]) -> Vec<Vec<u32>> {
        let mut ranks: Vec<u32> = blocks.iter().map(|block| self.ranks[*block as usize]).collect();
        ranks.sort_unstable();
        let mut requests: Vec<Vec<u32>> = Vec::new();
        for number in ranks.into_iter().map(|rank| self.in_packs[rank as usize]) {
            let block = self.block(number);
            if let Some(request) = requests.last_mut() {
                let (first, last) = (self.block(request[0]), self.block(request[request.len() - 1]));
                let goes_on = block.pack == last.pack && block.range().start == last.range().end;
                if goes_on && block.range().end - first.range().start <= REQUEST_BYTES {
                    request.push(number);
                    continue;
                }
            }
            requests.push(vec![number]);
        }
        requests
    }

    fn block(&self, number: u32) -> &BlockRef {
        &self.table.blocks[number as usize]
    }
}

/// Takes blocks off the list of those that come, whatever becomes of them.
struct Claim<'a> {
    filling: &'a Filling,
    blocks: Vec<u32>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Who has claimed nothing waits for others, and is not to wake itself.
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
        let open = self.fetched.lock().expect("nobody panics with it");
        Ok(open.get(&(found.dev(), found.ino())).cloned())
    }

    fn filling(&self, directory: &Path, file: &PageFile) -> Result<Arc<Filling>, DemandError> {
        let path = directory.join(&file.name);
        if let Some(known) = self.known_filling(&path)? {
            return Ok(known);
        }
        let found = fs::metadata(&path).map_err(|source| DemandError::Io { path: path.clone(), source })?;
        let key = (found.dev(), found.ino());
        let mut open = self.fetched.lock().expect("nobody panics with it");
        // Those whose files are gone, or whose numbers are another's by now.
        open.retain(|key, filling| fs::metadata(&filling.path).is_ok_and(|found| (found.dev(), found.ino()) == *key));
        let remote = RemoteFile::open(directory, file)?;
        let loaded = self.table_of(directory, file)?;
        let filling = open.entry(key).or_insert_with(|| Arc::new(Filling::new(path, remote, loaded)));
        Ok(Arc::clone(filling))
    }

    /// Whether the remote page files of a generation are all there, whatever of them has come.
    pub(crate) fn can_be_filled(&self, directory: &Path) -> bool {
        let files = PageMap::load(directory).map(|map| map.files).unwrap_or_default();
        let mut remote = files.iter().filter(|file| file.remote.is_some());
        remote.all(|file| RemoteFile::open(directory, file).is_ok() && self.table_of(directory, file).is_ok())
    }

    /// Makes known what fills a file that is there under its path.
    pub(super) fn fills(&self, filling: &Arc<Filling>) {
        if let Ok(found) = fs::metadata(&filling.path) {
            let mut open = self.fetched.lock().expect("nobody panics with it");
            open.insert((found.dev(), found.ino()), Arc::clone(filling));
        }
    }

    /// The page table of a remote page file.
    pub(super) fn table_of(&self, directory: &Path, file: &PageFile) -> Result<PageTable, DemandError> {
        let path = directory.join(format!("{}{TABLE}", file.name));
        let bytes = fs::read(&path).map_err(|source| DemandError::Io { path: path.clone(), source })?;
        PageTable::load(&bytes, &self.realm).ok_or(DemandError::Table { path })
    }

    /// Fetches blocks, or waits for those that come already. All of them are here if it succeeds.
    async fn fill(&self, filling: &Arc<Filling>, mut blocks: BTreeSet<u32>) -> Result<(), DemandError> {
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
            let requests = filling.requests(&claim.blocks).into_iter().map(|request| self.request(filling, request));
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

    /// One range of a pack; once more if what came cannot be opened, for it may have been damaged on its way.
    async fn request(&self, filling: &Arc<Filling>, blocks: Vec<u32>) -> Result<(), DemandError> {
        match self.request_once(filling, blocks.clone()).await {
            Err(DemandError::Open { .. }) => self.request_once(filling, blocks).await,
            done => done,
        }
    }

    async fn request_once(&self, filling: &Arc<Filling>, blocks: Vec<u32>) -> Result<(), DemandError> {
        let (first, last) = (filling.block(blocks[0]), filling.block(blocks[blocks.len() - 1]));
        let range = first.range().start..last.range().end;
        let name = ObjectName::Pack { realm: self.realm.clone(), pack: first.pack.id };
        let bytes = self.store.get_range(&Archive::key(&name), range.clone()).await?;
        let (filling, keys) = (Arc::clone(filling), self.keys());
        let put = move || {
            let mut reader = PackReader::new(&keys);
            for number in blocks {
                let block = filling.block(number);
                let own = block.range();
                let sealed = &bytes[(own.start - range.start) as usize..(own.end - range.start) as usize];
                let opened = reader.open_block(block, sealed);
                let opened = opened.map_err(|source| DemandError::Open { object: name.to_string(), source })?;
                filling.put(number, &opened)?;
            }
            Ok(())
        };
        tokio::task::spawn_blocking(put).await.expect("opening does not panic")
    }

    /// Brings pages of a generation: those of `which`, as number of the file, first page and pages, or all. Blocking; not on a thread of the runtime.
    pub(crate) fn bring(&self, directory: &Path, which: Option<&[(u32, u32, u32)]>) -> Result<(), DemandError> {
        let map = PageMap::load(directory)?;
        for (number, file) in (0..).zip(&map.files) {
            let Some(pages) = file.remote else { continue };
            let filling = self.filling(directory, file)?;
            let all = [(number, 0, pages)];
            let of_file = which.unwrap_or(&all).iter().filter(|(file, ..)| *file == number);
            let ranges: Vec<Range<u32>> = of_file.map(|(_, first, pages)| *first..first + pages).collect();
            self.runtime.block_on(self.bring_ranges(&filling, directory, &ranges))?;
        }
        Ok(())
    }

    /// Brings pages of one file, wherever they are.
    async fn bring_ranges(
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
        self.fill(filling, blocks).await?;
        if !come {
            return Ok(());
        }
        // What comes with the front may have come meanwhile, or not at all.
        filling.front_came().await;
        let (blocks, of_front) = lacking()?;
        self.fill(filling, blocks).await?;
        if of_front { self.front_again(filling, directory).await } else { Ok(()) }
    }

    /// After a wake: fetches what is missing, if that is little, or if nothing is known of what is needed first; else what of the sets
    /// did not come with the front.
    pub(crate) fn bring_behind(self: &Arc<Self>, directory: PathBuf) {
        let archive = Arc::clone(self);
        let begin = move || -> Result<_, DemandError> {
            let map = PageMap::load(&directory)?;
            let unknown = map.processes.values().all(|process| process.sets.iter().all(|set| set.pages.is_empty()));
            let mut all = Vec::new();
            for file in &map.files {
                let Some(pages) = file.remote else { continue };
                let filling = archive.filling(&directory, file)?;
                let mut blocks = BTreeSet::new();
                let found = filling.blocks_of(0..pages, &mut blocks);
                found.map_err(|source| DemandError::Io { path: filling.path.clone(), source })?;
                let bytes: u64 = blocks.iter().map(|block| u64::from(filling.block(*block).sealed)).sum();
                if !unknown && bytes > BEHIND {
                    blocks = filling.blocks_of_sets(&map)?;
                }
                all.push((filling, blocks));
            }
            Ok((archive, all))
        };
        self.runtime.spawn(async move {
            let result = match tokio::task::spawn_blocking(begin).await.expect("reading a page map does not panic") {
                Ok((archive, all)) => {
                    let mut result = Ok(());
                    for (filling, blocks) in all {
                        result = archive.fill(&filling, blocks).await.and(result);
                    }
                    result
                }
                Err(e) => Err(e),
            };
            // Whoever needs them asks for them.
            if let Err(e) = result {
                tracing::debug!(error = crate::task::chain(&e), "not all pages were fetched behind a wake");
            }
        });
    }

    /// A proc waits for pages of a remote page file. What does not come is asked for again by who waits.
    pub(crate) async fn bring_missing(&self, directory: &Path, name: &str, pages: Range<u32>) -> Brought {
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
            Ok(None) => return Brought::All,
            Err(e) => return Brought::Later { tell: Some(crate::task::chain(&e)) },
        };
        let mut blocks = BTreeSet::new();
        let found = filling.blocks_of(pages.clone(), &mut blocks);
        let result = match found.and_then(|come| filling.with_ahead(&mut blocks).map(|()| come)) {
            Ok(false) => self.fill(&filling, blocks).await,
            Ok(true) => match self.fill(&filling, blocks).await {
                Ok(()) => self.bring_ranges(&filling, directory, &[pages]).await,
                failed => failed,
            },
            Err(source) => Err(DemandError::Io { path: filling.path.clone(), source }),
        };
        let mut state = filling.state();
        match result {
            Ok(()) => {
                state.told = None;
                Brought::All
            }
            Err(e) if e.is_damage() && state.damaged => Brought::Later { tell: None },
            Err(e) if e.is_damage() => {
                state.damaged = true;
                Brought::Damaged(crate::task::chain(&e))
            }
            Err(_) if state.told.is_some_and(|at| at.elapsed() < TOLD_EVERY) => Brought::Later { tell: None },
            Err(e) => {
                state.told = Some(Instant::now());
                Brought::Later { tell: Some(crate::task::chain(&e)) }
            }
        }
    }
}
