//! The memory of a generation into blocks and a page table: what is known is not read, what is the
//! same is stored once, and the pages of working sets, and those that cannot wait for a fault, go
//! to the front.
//!
//! Zeros are not stored. In anonymous memory they are not even written down, for a page in no run
//! is zeros there; in a private mapping of a file it would be the file's, so each page of zeros
//! that is present gets its place in the table. What is anonymous the caller says; of what he does
//! not speak is taken for a file's.
//!
//! Owns the rules of what is stored where. Reads pages through the caller, checks them against
//! their checksums on the way, and never touches a process. Nothing is kept here but one block.

use crate::index::{Blocks, ContentHash, ContentPlace, FileKey, Known};
use crate::packing::{PackError, Packing};
use crate::table::{Found, Home, PageTable, RemotePages, Space};
use kip_snapshot::pages::{PAGE, PageMap, ProcessPages, Run, WorkingSet, damaged};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::ops::Range;

/// Pages of a block (B of the paper's section 4.2), at most: one range read brings as many.
pub const BLOCK_PAGES: usize = 32;
/// Pages of a block lie within as many of each other.
const WINDOW: u64 = 256;

/// Reads whole pages of a page file: file, first page, where to.
pub type ReadPages<'a> = dyn FnMut(u32, u32, &mut [u8]) -> io::Result<()> + 'a;

/// Ranges of addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(BTreeMap<Space, BTreeMap<u64, u64>>);

impl Ranges {
    /// Adds one, in any order and over others.
    pub fn add(&mut self, space: Space, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let ranges = self.0.entry(space).or_default();
        let (mut start, mut end) = (range.start, range.end);
        while let Some((from, to)) = ranges.range(..=end).next_back().map(|(from, to)| (*from, *to)) {
            if to < start {
                break;
            }
            ranges.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        ranges.insert(start, end);
    }

    /// Whether an address is in one.
    pub fn has(&self, space: Space, address: u64) -> bool {
        let below = self.0.get(&space).and_then(|ranges| ranges.range(..=address).next_back());
        below.is_some_and(|(_, end)| address < *end)
    }
}

/// What the memory of processes is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Areas {
    /// Where a page that is not there is zeros: anonymous private mappings, heaps and stacks. All
    /// else of a process is taken for a mapping of a file, where such a page is the file's. Shared
    /// memory is always as if it were listed.
    pub anonymous: Ranges,
    /// Whose pages cannot wait for a fault: private mappings of files that were written
    /// (of fewer than eight processes), areas of rseq(2), locked memory.
    pub eager: Ranges,
}

impl Areas {
    fn is_zero_when_absent(&self, space: Space, address: u64) -> bool {
        matches!(space, Space::Shared(_)) || self.anonymous.has(space, address)
    }
}

/// The local pages of a generation.
pub struct Pages<'a> {
    /// Where those of processes lie.
    pub map: &'a PageMap,
    /// Where those of shared memory lie, by its number: runs as in the map, in files of the map,
    /// with offsets for addresses.
    pub shared: &'a BTreeMap<u64, Vec<Run>>,
    /// What the mappings of processes are.
    pub areas: &'a Areas,
    /// Of each page file what it is on disk; none if that is not known, and all of it is read.
    pub keys: &'a [Option<FileKey>],
    /// What comes from the store when it is needed: one of the files, which is taken over as it is;
    /// only what is here and cannot stay where it is there is read.
    pub remote: Option<&'a RemotePages<'a>>,
    /// How they are read.
    pub read: &'a mut ReadPages<'a>,
}

/// Memory cannot be archived.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// It cannot be read, or is damaged.
    #[error("pages of {file} cannot be read")]
    Read {
        /// Which page file.
        file: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It was never fetched, and cannot stay where it is: its pack may not be referred to any more,
    /// or it has to be in the front.
    #[error("page {page} of {file} was never fetched, and cannot be left in its pack: fetch it first")]
    NotHere {
        /// The file that stands for the store.
        file: String,
        /// Its number there.
        page: u32,
    },
    /// It cannot be stored.
    #[error(transparent)]
    Pack(#[from] PackError),
}

/// Memory that is archived but for the pages that go to the front.
#[derive(Debug, Default)]
pub struct Archived {
    /// Where every page is.
    pub table: PageTable,
    /// The pages that go to the front and cannot wait, by address.
    pub eager: BTreeMap<Space, Vec<u64>>,
    /// The pages of working sets that go to the front, in order of need; none that is eager.
    pub front: BTreeMap<Space, Vec<u64>>,
    /// For the next generation of the proc, once all packs are stored.
    pub known: Known,
    /// Pages that were read and hashed.
    pub hashed: u64,
    /// Pages that were put into blocks.
    pub stored: u64,
}

impl Pages<'_> {
    fn sum(&self, file: u32, page: u32) -> Option<u32> {
        self.map.files[file as usize].sums.get(page as usize).copied()
    }

    /// Reads pages, and compares them with their checksums if there are any.
    fn read(&mut self, file: u32, first: u32, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let page_file = &self.map.files[file as usize];
        let failed = |source| MemoryError::Read { file: page_file.name.clone(), source };
        (self.read)(file, first, bytes).map_err(failed)?;
        match page_file.first_damaged(first as usize, bytes) {
            Some(page) if !page_file.sums.is_empty() => Err(failed(damaged(&page_file.name, page))),
            _ => Ok(()),
        }
    }

    fn run_of(&self, space: Space, address: u64) -> Option<&Run> {
        let runs = match space {
            Space::Process(number) => &self.map.processes.get(&number)?.runs,
            Space::Shared(number) => self.shared.get(&number)?,
        };
        runs.get(runs.partition_point(|run| run.end() <= address)).filter(|run| run.start <= address)
    }

    /// Its bytes are not here, so it cannot go to the front: it stays in its block.
    fn is_away(&self, space: Space, address: u64) -> bool {
        let Some((run, remote)) = self.run_of(space, address).zip(self.remote) else { return false };
        let page = run.first + ((address - run.start) / PAGE as u64) as u32;
        run.file == remote.file() && !remote.is_here(page)
    }

    /// The bytes of one page; `None` if it lies nowhere.
    pub(crate) fn page(&mut self, space: Space, address: u64) -> Result<Option<[u8; PAGE]>, MemoryError> {
        let Some(run) = self.run_of(space, address).copied() else { return Ok(None) };
        let mut bytes = [0; PAGE];
        let page = run.first + ((address - run.start) / PAGE as u64) as u32;
        self.read(run.file, page, &mut bytes)?;
        Ok(Some(bytes))
    }
}

/// The pages of all sets in order of need: those of the newest kind first, what is only kept at
/// hand last.
fn order_of_need(process: &ProcessPages) -> Vec<u64> {
    let mut seen = HashSet::new();
    let all =
        |held_back| process.sets.iter().flat_map(|set| &set.pages).filter(move |page| page.held_back == held_back);
    all(false).chain(all(true)).map(|page| page.address).filter(|address| seen.insert(*address)).collect()
}

/// Puts the memory of all processes, and what they share, into packs.
///
/// # Errors
/// A page cannot be read or stored; what was stored until then is in no table.
pub fn archive(pages: &mut Pages<'_>, known: &Known, packing: &mut Packing<'_>) -> Result<Archived, MemoryError> {
    let mut work = Work { blocks: Blocks::default(), open: Open::default(), out: Archived::default() };
    let (map, shared) = (pages.map, pages.shared);
    for (number, process) in &map.processes {
        let sets = WorkingSets { order: order_of_need(process), left_out: left_out(&process.sets) };
        work.space(pages, Space::Process(*number), &process.runs, sets, known, packing)?;
    }
    for (number, runs) in shared {
        work.space(pages, Space::Shared(*number), runs, WorkingSets::default(), known, packing)?;
    }
    work.out.table.blocks = work.blocks.list;
    Ok(work.out)
}

/// Where a page will be.
#[derive(Debug, Clone, Copy)]
enum Spot {
    Zeros,
    Front,
    Placed(ContentPlace),
    /// In a block that was not yet written when this was noted: its number among them, page.
    Coming(usize, u32),
}

/// A page of a page file.
#[derive(Debug, Clone, Copy)]
struct Origin {
    file: FileKey,
    page: u32,
    sum: u32,
}

/// The block that is being filled.
#[derive(Debug, Default)]
struct Open {
    bytes: Vec<u8>,
    start: u64,
    contents: HashMap<ContentHash, u32>,
    /// Pages of page files that lie in it, and which of its pages they are.
    from: Vec<(Origin, u32)>,
    /// Blocks that were written before it, in the order of writing.
    written: Vec<ContentPlace>,
}

struct Work {
    blocks: Blocks,
    open: Open,
    out: Archived,
}

/// The pages of the working sets of a space.
#[derive(Default)]
struct WorkingSets {
    /// All of them, in order of need.
    order: Vec<u64>,
    /// Those that do not come with the front if they lie in blocks.
    left_out: HashSet<u64>,
}

/// What is to be done with the pages of a space.
struct Wishes<'a> {
    space: Space,
    areas: &'a Areas,
    /// Pages of working sets.
    set: HashSet<u64>,
}

impl Wishes<'_> {
    fn is_eager(&self, address: u64) -> bool {
        self.areas.eager.has(self.space, address)
    }

    /// Where a page of zeros goes: nowhere, if one that is not there is the same.
    fn zeros(&self, address: u64) -> Option<Spot> {
        (!self.areas.is_zero_when_absent(self.space, address)).then_some(Spot::Zeros)
    }
}

impl Work {
    fn space(
        &mut self,
        pages: &mut Pages<'_>,
        space: Space,
        runs: &[Run],
        sets: WorkingSets,
        known: &Known,
        packing: &mut Packing<'_>,
    ) -> Result<(), MemoryError> {
        let WorkingSets { order, left_out } = sets;
        let wishes = Wishes { space, areas: pages.areas, set: order.iter().copied().collect() };
        let mut homes: Vec<(u64, Spot)> = Vec::new();
        for run in runs {
            self.run(pages, run, known, &wishes, packing, &mut homes)?;
        }
        self.flush(packing)?;
        let (mut filled, mut eager): (HashSet<u64>, Vec<u64>) = (HashSet::new(), Vec::new());
        for (address, spot) in homes {
            let home = self.home(spot, packing);
            self.out.table.push(space, address, home);
            if home == Home::Zeros || pages.is_away(space, address) {
                continue;
            }
            if wishes.is_eager(address) {
                eager.push(address);
            } else if wishes.set.contains(&address) && (home == Home::Front || !left_out.contains(&address)) {
                filled.insert(address);
            }
        }
        let order: Vec<u64> = order.into_iter().filter(|address| filled.contains(address)).collect();
        for (to, list) in [(&mut self.out.front, order), (&mut self.out.eager, eager)] {
            if !list.is_empty() {
                to.insert(space, list);
            }
        }
        Ok(())
    }

    fn home(&mut self, spot: Spot, packing: &mut Packing<'_>) -> Home {
        let place = match spot {
            Spot::Zeros => return Home::Zeros,
            Spot::Front => return Home::Front,
            Spot::Placed(place) => place,
            Spot::Coming(block, page) => ContentPlace { at: page * PAGE as u32, ..self.open.written[block] },
        };
        packing.refer(&place.block);
        Home::Block { block: self.blocks.number(place.block), first: place.at / PAGE as u32 }
    }

    /// The pages of one run, in parts.
    fn run(
        &mut self,
        pages: &mut Pages<'_>,
        run: &Run,
        known: &Known,
        wishes: &Wishes<'_>,
        packing: &mut Packing<'_>,
        homes: &mut Vec<(u64, Spot)>,
    ) -> Result<(), MemoryError> {
        if let Some(remote) = pages.remote.filter(|remote| remote.file() == run.file) {
            return self.taken_over(pages, run, remote, wishes, packing, homes);
        }
        let key = pages.keys.get(run.file as usize).copied().flatten();
        let mut buffer = vec![0; BLOCK_PAGES * PAGE];
        for from in (0..run.pages).step_by(BLOCK_PAGES) {
            let count = (run.pages - from).min(BLOCK_PAGES as u32);
            let at = |index: u32| (run.first + from + index, run.start + u64::from(from + index) * PAGE as u64);
            let stored = |index: u32| {
                if wishes.is_eager(at(index).1) {
                    return None;
                }
                let place = known.get(key?, at(index).0, pages.sum(run.file, at(index).0)?)?;
                packing.may_use(&place).then_some(place)
            };
            let places: Vec<Option<ContentPlace>> = (0..count).map(stored).collect();
            let wanted: Vec<u32> = (0..count).filter(|index| places[*index as usize].is_none()).collect();
            if let (Some(first), Some(last)) = (wanted.first(), wanted.last()) {
                let bytes = &mut buffer[*first as usize * PAGE..(*last as usize + 1) * PAGE];
                pages.read(run.file, at(*first).0, bytes)?;
            }
            for (index, place) in (0..count).zip(places) {
                let ((page, address), sum) = (at(index), pages.sum(run.file, at(index).0));
                let origin = key.zip(sum).map(|(file, sum)| Origin { file, page, sum });
                let spot = match place {
                    Some(place) => Some(Spot::Placed(place)),
                    None => {
                        let bytes = &buffer[index as usize * PAGE..][..PAGE];
                        self.page(bytes, address, origin, wishes, packing)?
                    }
                };
                if let (Some(Spot::Placed(place)), Some(Origin { file, page, sum })) = (spot, origin) {
                    self.out.known.insert(file, page, sum, place);
                }
                homes.extend(spot.map(|spot| (address, spot)));
            }
        }
        Ok(())
    }

    /// Pages that stay where they are in the store, if they can.
    fn taken_over(
        &mut self,
        pages: &mut Pages<'_>,
        run: &Run,
        remote: &RemotePages<'_>,
        wishes: &Wishes<'_>,
        packing: &mut Packing<'_>,
        homes: &mut Vec<(u64, Spot)>,
    ) -> Result<(), MemoryError> {
        let mut bytes = [0; PAGE];
        for index in 0..run.pages {
            let (page, address) = (run.first + index, run.start + u64::from(index) * PAGE as u64);
            let spot = match remote.find(page) {
                Found::Zeros => wishes.zeros(address),
                Found::Block(place) if packing.may_use(&place) && !wishes.is_eager(address) => {
                    Some(Spot::Placed(place))
                }
                Found::Block(_) | Found::Front if remote.is_here(page) => {
                    pages.read(run.file, page, &mut bytes)?;
                    self.page(&bytes, address, None, wishes, packing)?
                }
                Found::Block(_) | Found::Front | Found::Absent => {
                    return Err(MemoryError::NotHere { file: pages.map.files[run.file as usize].name.clone(), page });
                }
            };
            homes.extend(spot.map(|spot| (address, spot)));
        }
        Ok(())
    }

    /// Where a page goes that was read; nowhere if it is zeros, and would be without us.
    fn page(
        &mut self,
        bytes: &[u8],
        address: u64,
        origin: Option<Origin>,
        wishes: &Wishes<'_>,
        packing: &mut Packing<'_>,
    ) -> Result<Option<Spot>, MemoryError> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(wishes.zeros(address));
        }
        if wishes.is_eager(address) {
            return Ok(Some(Spot::Front));
        }
        self.out.hashed += 1;
        let hash = packing.hasher.page(bytes);
        if let Some(place) = packing.find(&hash) {
            return Ok(Some(Spot::Placed(place)));
        }
        if wishes.set.contains(&address) {
            return Ok(Some(Spot::Front));
        }
        let held = self.open.bytes.len() / PAGE;
        let crosses = address / (BLOCK_PAGES * PAGE) as u64 != self.open.start / (BLOCK_PAGES * PAGE) as u64;
        let is_far = address.abs_diff(self.open.start) >= WINDOW * PAGE as u64;
        if held >= BLOCK_PAGES || held > 0 && is_far || held >= BLOCK_PAGES / 2 && crosses {
            self.flush(packing)?;
        }
        let open = &mut self.open;
        if open.bytes.is_empty() {
            open.start = address;
        }
        let next = (open.bytes.len() / PAGE) as u32;
        let page = *open.contents.entry(hash).or_insert(next);
        if page == next {
            open.bytes.extend_from_slice(bytes);
            self.out.stored += 1;
        }
        open.from.extend(origin.map(|origin| (origin, page)));
        Ok(Some(Spot::Coming(open.written.len(), page)))
    }

    /// Writes the open block.
    fn flush(&mut self, packing: &mut Packing<'_>) -> Result<(), MemoryError> {
        let open = &mut self.open;
        if open.bytes.is_empty() {
            return Ok(());
        }
        let block = packing.push(&open.bytes)?;
        let place = |page: u32| ContentPlace { block, at: page * PAGE as u32 };
        for (hash, page) in open.contents.drain() {
            packing.add(hash, place(page));
        }
        for (origin, at) in open.from.drain(..) {
            self.out.known.insert(origin.file, origin.page, origin.sum, place(at));
        }
        open.written.push(place(0));
        open.bytes.clear();
        Ok(())
    }
}

/// One in as many pages of a set is held back to see whether it is still needed, at least; beyond
/// that the set as a whole is doubted.
const DOUBTED: usize = 4;

/// The pages of sets that do not come with the front if they lie in blocks: those held back by a
/// set of which so much is that this was a wake of another kind, or that most of it only came
/// along. They follow the wake.
pub fn left_out(sets: &[WorkingSet]) -> HashSet<u64> {
    let is_doubted =
        |set: &&WorkingSet| set.pages.iter().filter(|page| page.held_back).count() * DOUBTED > set.pages.len();
    let doubted = sets.iter().filter(is_doubted).flat_map(|set| &set.pages).filter(|page| page.held_back);
    let mut left: HashSet<u64> = doubted.map(|page| page.address).collect();
    for page in sets.iter().flat_map(|set| &set.pages).filter(|page| !page.held_back) {
        left.remove(&page.address);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_snapshot::pages::Expected;
    use proptest::prelude::*;

    // promise archive: what a set doubts as a whole is not in the front if it is in a pack
    #[test]
    fn what_is_doubted_as_a_whole_is_left_out() {
        let page = |number: u64, held_back| Expected { address: number * PAGE as u64, confirmed: 1, held_back };
        let set = |pages| WorkingSet { pages, ..WorkingSet::default() };
        let left = |sets: &[WorkingSet]| {
            let mut left: Vec<u64> = left_out(sets).into_iter().map(|address| address / PAGE as u64).collect();
            left.sort_unstable();
            left
        };
        let probed: Vec<Expected> = (0..32).map(|number| page(number, number % 4 == 3)).collect();
        assert!(left(&[set(probed)]).is_empty(), "each in its turn");
        let doubted: Vec<Expected> = (30..40).map(|number| page(number, number >= 31)).collect();
        assert_eq!(left(&[set(doubted.clone())]), (31..40).collect::<Vec<u64>>());
        assert_eq!(left(&[set(doubted), set(vec![page(35, false)])]), [31, 32, 33, 34, 36, 37, 38, 39]);
    }

    proptest! {
        #[test]
        fn ranges_have_what_was_added(ranges in prop::collection::vec((0u64..60, 0u64..12), 0..20)) {
            let (space, other) = (Space::Process(1), Space::Shared(1));
            let mut all = Ranges::default();
            for (start, length) in &ranges {
                all.add(space, *start..start + length);
            }
            for address in 0..80 {
                let has = ranges.iter().any(|(start, length)| (*start..start + length).contains(&address));
                prop_assert_eq!(all.has(space, address), has, "{}", address);
                prop_assert!(!all.has(other, address));
            }
        }
    }
}
