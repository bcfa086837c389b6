//! A remote page file that is filled ([`kip_snapshot::remote`]): where its pages lie in the store,
//! what of it is on its way, and how far is read ahead. Asks no store.

use crate::account::Account;
use crate::ahead::Streams;
use crate::cache::free;
use crate::errors::DemandError;
use kip_archive::front::WorkingSets;
use kip_archive::keys::Keyring;
use kip_archive::memory::left_out;
use kip_archive::names::ObjectName;
use kip_archive::pack::{BlockRef, PackReader};
use kip_archive::table::{Home, PageTable, RemotePages, RemoteRun, Space};
use kip_snapshot::pages::{PAGE, PageMap};
use kip_snapshot::remote::RemoteFile;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeSet, HashSet};
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// What is missing is fetched behind a wake if it is no more than this, bytes.
pub(crate) const BEHIND: u64 = 8 << 20;
/// The most sealed bytes of one request: as long as its first byte takes on a link of 100 MB/s.
const REQUEST_BYTES: u64 = 2 << 20;
/// After so many misses it is judged whether they cost too much.
const JUDGE_EVERY: u32 = 8;
/// Misses that are further apart do not add up.
const APART: Duration = Duration::from_secs(1);
/// So many blocks read ahead come in one go with what is waited for, which is hardly later for
/// that.
const TOGETHER: u32 = 4;

/// A remote page file that is filled.
pub(crate) struct Filling {
    pub(crate) path: PathBuf,
    pub(crate) file: RemoteFile,
    table: PageTable,
    /// All runs by space and address.
    places: Vec<RunPlace>,
    /// Runs of pages that are in the front only, by page: first page, pages.
    in_front: Vec<(u32, u32)>,
    /// Runs of pages that lie in blocks, by page: first page, pages, block, first page in the
    /// block.
    runs: Vec<BlockRun>,
    /// Places in `runs`, by block.
    of_blocks: Vec<(u32, u32)>,
    /// Blocks by pack and offset, and of each block its place there.
    in_packs: Vec<u32>,
    ranks: Vec<u32>,
    /// Blocks by the first of their pages, and of each block its place there: a program that goes
    /// through memory needs them in this order, whatever packs they are in.
    in_memory: Vec<u32>,
    places_there: Vec<u32>,
    /// Of the proc.
    pub(crate) account: Arc<Account>,
    state: Mutex<Coming>,
    /// Some have come, or will not.
    pub(crate) came: Notify,
}

#[derive(Default)]
pub(crate) struct Coming {
    pub(crate) blocks: HashSet<u32>,
    /// Pages that come with the front, as long as that comes.
    front: Option<HashSet<u32>>,
    streams: Streams,
    rush: Rush,
    pub(crate) told: Option<Instant>,
    /// The damage has been told: the proc that waited is ended once.
    pub(crate) damaged: bool,
}

/// A run of pages by whose memory it is.
#[derive(Clone, Copy)]
struct RunPlace {
    space: Space,
    start: u64,
    pages: u32,
    /// The number of its first page.
    first: u32,
}

impl RunPlace {
    fn of(of: RemoteRun<'_>) -> RunPlace {
        RunPlace { space: of.space, start: of.run.start, pages: of.run.pages, first: of.first }
    }
}

/// A run of pages that lie in a block.
#[derive(Clone, Copy)]
pub(crate) struct BlockRun {
    /// The number of its first page.
    pub(crate) first: u32,
    pub(crate) pages: u32,
    pub(crate) block: u32,
    /// The page of the block where it begins.
    pub(crate) at: u32,
}

impl BlockRun {
    fn of(of: RemoteRun<'_>) -> Option<BlockRun> {
        match of.run.home {
            Home::Block { block, first: at } => Some(BlockRun { first: of.first, pages: of.run.pages, block, at }),
            Home::Front | Home::Zeros => None,
        }
    }
}

/// Misses in quick succession, wherever they are.
#[derive(Default)]
struct Rush {
    /// Those that are waited for now.
    waiting: u32,
    /// Those beside which no other was waited for, and how long they took.
    misses: u32,
    waited: Duration,
    last: Option<Instant>,
    /// All that was missing has been asked for, bytes.
    whole: Option<u64>,
}

/// How long so many bytes take on a link of 100 MB/s.
fn transfer(bytes: u64) -> Duration {
    Duration::from_nanos(bytes * 10)
}

/// A thread waits for a request; since then, if no other thread waited.
pub(crate) struct Waits<'a>(&'a Filling, Option<Instant>);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let rush = &mut self.0.state().rush;
        rush.waiting -= 1;
        if let Some(since) = self.1 {
            rush.misses += 1;
            rush.waited += since.elapsed();
        }
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.end();
    }
}

impl Filling {
    /// Notes in the proc's account what was of use: that is known when the file is gone.
    pub(crate) fn end(&self) {
        // Others may still wait, which the rush counts.
        let (mut streams, whole) = {
            let mut state = self.state();
            (std::mem::take(&mut state.streams), state.rush.whole.take())
        };
        // All marks in one read: a file has thousands of runs.
        let pages = self.file.needed(0, self.file.pages()).unwrap_or_default();
        let is_needed =
            |run: BlockRun| pages[run.first as usize..].iter().take(run.pages as usize).any(|needed| *needed);
        let was_needed = |place: u32| !pages.is_empty() && self.runs_of(self.in_memory[place as usize]).any(is_needed);
        streams.end(&mut self.account.benefit(), was_needed);
        if let Some(bytes) = whole {
            let places = 0..self.in_memory.len() as u32;
            let needed = places.filter(|place| was_needed(*place)).count();
            let one_by_one = self.account.miss().unwrap_or_default() * u32::try_from(needed).unwrap_or(u32::MAX);
            if one_by_one < transfer(bytes) {
                self.account.needs_all(None);
            }
        }
    }
}

impl Filling {
    pub(crate) fn new(path: PathBuf, file: RemoteFile, table: PageTable, account: Arc<Account>) -> Filling {
        let remote = RemotePages::new(&table, 0);
        let places = remote.runs().map(RunPlace::of).collect();
        let in_front = remote.runs().filter(|of| of.run.home == Home::Front);
        let in_front = in_front.map(|of| (of.first, of.run.pages)).collect();
        let runs: Vec<BlockRun> = remote.runs().filter_map(BlockRun::of).collect();
        let mut of_blocks: Vec<(u32, u32)> = (0..).zip(&runs).map(|(place, run)| (run.block, place)).collect();
        of_blocks.sort_unstable();
        let mut in_packs: Vec<u32> = (0..table.blocks.len() as u32).collect();
        in_packs.sort_unstable_by_key(|number| {
            let block = &table.blocks[*number as usize];
            (block.pack, block.offset)
        });
        let mut ranks = vec![0; in_packs.len()];
        (0..).zip(&in_packs).for_each(|(rank, number)| ranks[*number as usize] = rank);
        let mut in_memory = Vec::new();
        let mut places_there = vec![u32::MAX; in_packs.len()];
        for BlockRun { block, .. } in &runs {
            if places_there[*block as usize] == u32::MAX {
                places_there[*block as usize] = in_memory.len() as u32;
                in_memory.push(*block);
            }
        }
        let (state, came) = (Mutex::default(), Notify::new());
        Filling {
            path,
            file,
            table,
            places,
            in_front,
            runs,
            of_blocks,
            in_packs,
            ranks,
            in_memory,
            places_there,
            account,
            state,
            came,
        }
    }

    /// The number of a page.
    fn number(&self, space: Space, address: u64) -> Option<u32> {
        let next = self.places.partition_point(|place| (place.space, place.start) <= (space, address));
        let RunPlace { space: of, start, pages, first } = *self.places.get(next.checked_sub(1)?)?;
        let index = (address - start) / PAGE as u64;
        (of == space && index < u64::from(pages)).then(|| first + index as u32)
    }

    /// Puts pages there by whose they are.
    pub(crate) fn put_pages(&self, space: Space, pages: &[(u64, Vec<u8>)]) -> io::Result<()> {
        let mut numbered: Vec<(u32, &[u8])> =
            pages.iter().filter_map(|(address, bytes)| Some((self.number(space, *address)?, &bytes[..]))).collect();
        numbered.sort_unstable_by_key(|(number, _)| *number);
        for run in numbered.chunk_by(|(one, _), (next, _)| one + 1 == *next) {
            let pages: Vec<&[u8]> = run.iter().map(|(_, bytes)| *bytes).collect();
            self.file.put(run[0].0, &pages.concat())?;
        }
        Ok(())
    }

    /// From now on what the sets have comes with the front; what does not is waited for until that
    /// has come. Not if it comes already.
    pub(crate) fn front_begins(&self, sets: &WorkingSets) -> io::Result<bool> {
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
    pub(crate) fn front_ended(&self) {
        self.state().front = None;
        self.came.notify_waiters();
    }

    /// Waits until it comes no more.
    pub(crate) async fn front_came(&self) {
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
    pub(crate) fn front_lacks(&self, pages: &Range<u32>) -> io::Result<bool> {
        let from = self.in_front.partition_point(|(first, count)| first + count <= pages.start);
        for (first, count) in self.in_front[from..].iter().take_while(|(first, _)| *first < pages.end) {
            let (start, end) = (pages.start.max(*first), pages.end.min(first + count));
            if !self.file.here(start, end - start)?.iter().all(|here| *here) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, Coming> {
        self.state.lock()
    }

    fn runs_of(&self, block: u32) -> impl Iterator<Item = BlockRun> + '_ {
        let from = self.of_blocks.partition_point(|(of, _)| *of < block);
        let places = self.of_blocks[from..].iter().take_while(move |(of, _)| *of == block);
        places.map(|(_, place)| self.runs[*place as usize])
    }

    /// The blocks of pages which are not here, and do not come with the front. Returns whether some
    /// do.
    pub(crate) fn blocks_of(&self, pages: Range<u32>, into: &mut BTreeSet<u32>) -> io::Result<bool> {
        let from = self.runs.partition_point(|run| run.first + run.pages <= pages.start);
        let mut come = self.front_lacks(&pages)?;
        for BlockRun { first, pages: count, block, .. } in
            self.runs[from..].iter().take_while(|run| run.first < pages.end)
        {
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
    pub(crate) fn blocks_of_sets(&self, map: &PageMap) -> Result<BTreeSet<u32>, DemandError> {
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
    pub(crate) fn lacks(&self, block: u32) -> io::Result<bool> {
        for BlockRun { first, pages, .. } in self.runs_of(block) {
            if !self.file.here(first, pages)?.iter().all(|here| *here) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Those that will probably be needed next, now that some are waited for. Few are added to
    /// these instead.
    pub(crate) fn ahead(&self, blocks: &mut BTreeSet<u32>) -> io::Result<BTreeSet<u32>> {
        let places = || blocks.iter().map(|block| self.places_there[*block as usize]);
        let (Some(first), Some(last)) = (places().min(), places().max()) else { return Ok(BTreeSet::new()) };
        let total = self.in_memory.len() as u32;
        let next = {
            let mut benefit = self.account.benefit();
            self.state().streams.miss(first..last + 1, total, &mut benefit, |place| self.was_needed(place))
        };
        let together = next.end - next.start <= TOGETHER;
        let mut ahead = BTreeSet::new();
        for place in next {
            let block = self.in_memory[place as usize];
            if self.lacks(block)? {
                ahead.insert(block);
            }
        }
        if together {
            blocks.append(&mut ahead);
        }
        Ok(ahead)
    }

    /// All blocks of which something is not here, with their sealed bytes.
    pub(crate) fn lacking(&self) -> io::Result<(Vec<u32>, u64)> {
        let here = self.file.here(0, self.file.pages())?;
        let mut blocks = BTreeSet::new();
        for BlockRun { first, pages, block, .. } in &self.runs {
            if !here[*first as usize..(first + pages) as usize].iter().all(|here| *here) {
                blocks.insert(*block);
            }
        }
        let bytes = blocks.iter().map(|block| u64::from(self.block(*block).sealed)).sum();
        Ok((blocks.into_iter().collect(), bytes))
    }

    /// A request to the store is waited for, until what this gives is dropped. With it come the
    /// blocks that are to be fetched now because of it: once requests that followed each other
    /// closely took twice as long as all that is missing would take, that is what comes.
    pub(crate) fn waits(&self) -> io::Result<(Waits<'_>, Vec<u32>)> {
        let now = Instant::now();
        let (alone, due) = {
            let rush = &mut self.state().rush;
            rush.waiting += 1;
            if rush.last.replace(now).is_none_or(|last| now - last > APART) {
                (rush.misses, rush.waited) = (0, Duration::ZERO);
            }
            let due = rush.whole.is_none() && rush.misses > 0 && rush.misses.is_multiple_of(JUDGE_EVERY);
            (rush.waiting == 1, due.then_some((rush.waited, rush.misses)))
        };
        let waits = Waits(self, alone.then_some(now));
        let Some((waited, misses)) = due else { return Ok((waits, Vec::new())) };
        let (blocks, bytes) = self.lacking()?;
        let comes = waited >= 2 * transfer(bytes) && self.has_room()? && self.comes_whole(bytes);
        if comes {
            self.account.needs_all(Some(waited / misses));
        }
        Ok((waits, if comes { blocks } else { Vec::new() }))
    }

    /// Whether all of it takes no more than half of what is left of the disk.
    pub(crate) fn has_room(&self) -> io::Result<bool> {
        let bytes = u64::from(self.file.pages()) * PAGE as u64;
        Ok(free(self.path.parent().unwrap_or(&self.path))? / 2 >= bytes)
    }

    /// All that is missing, so many bytes, is asked for now. False if it was already.
    pub(crate) fn comes_whole(&self, bytes: u64) -> bool {
        let mut state = self.state();
        let begins = state.rush.whole.is_none();
        state.rush.whole.get_or_insert(bytes);
        begins
    }

    /// Whether a fault needed something of a block, by its place in memory.
    fn was_needed(&self, place: u32) -> bool {
        let needed = |run: BlockRun| self.file.needed(run.first, run.pages).is_ok_and(|pages| pages.contains(&true));
        self.runs_of(self.in_memory[place as usize]).any(needed)
    }

    /// Puts the pages of a block where they belong.
    pub(crate) fn put(&self, block: u32, bytes: &[u8]) -> Result<(), DemandError> {
        for BlockRun { first, pages, at, .. } in self.runs_of(block) {
            let bytes = &bytes[at as usize * PAGE..(at + pages) as usize * PAGE];
            let put = self.file.put(first, bytes);
            put.map_err(|source| DemandError::Io { path: self.path.clone(), source })?;
        }
        Ok(())
    }

    /// Blocks as ranges of packs, each one request.
    pub(crate) fn requests(&self, blocks: &[u32]) -> Vec<Vec<u32>> {
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

    /// Where blocks lie that follow each other in a pack.
    pub(crate) fn range(&self, blocks: &[u32]) -> Range<u64> {
        self.block(blocks[0]).range().start..self.block(blocks[blocks.len() - 1]).range().end
    }

    /// Opens such blocks and puts their pages where they belong.
    pub(crate) fn open(&self, keys: &Keyring, blocks: &[u32], sealed: &[u8]) -> Result<(), DemandError> {
        let start = self.range(blocks).start;
        let mut reader = PackReader::new(keys);
        for number in blocks {
            let block = self.block(*number);
            let own = block.range();
            let opened = reader.open_block(block, &sealed[(own.start - start) as usize..(own.end - start) as usize]);
            let object = || ObjectName::Pack { realm: keys.realm().clone(), pack: block.pack.id }.to_string();
            self.put(*number, &opened.map_err(|source| DemandError::Open { object: object(), source })?)?;
        }
        Ok(())
    }

    pub(crate) fn block(&self, number: u32) -> &BlockRef {
        &self.table.blocks[number as usize]
    }
}
