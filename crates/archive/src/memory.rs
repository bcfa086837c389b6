//! The memory of a generation into blocks and a page table: what is known is not read, what is the same is stored once,
//! zeros not at all, and the pages of working sets go to the front.
//!
//! Owns the rules of what is stored where. Reads pages through the caller, checks them against their checksums on the
//! way, and never touches a process. Nothing is kept here but one block.

use crate::index::{Blocks, ContentHash, FileKey, Known, Place};
use crate::packing::{PackError, Packing};
use crate::table::{Found, Home, PageTable, Remote};
use kip_snapshot::pages::{PAGE, PageMap, Process, Run, damaged};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

/// Pages of a block (B of the paper's section 4.2), at most: one range read brings as many.
pub const BLOCK_PAGES: usize = 32;
/// Pages of a block lie within as many of each other.
const WINDOW: u64 = 256;

/// Reads whole pages of a page file: file, first page, where to.
pub type ReadPages<'a> = dyn FnMut(u32, u32, &mut [u8]) -> io::Result<()> + 'a;

/// The local pages of a generation.
pub struct Pages<'a> {
    /// Where they lie.
    pub map: &'a PageMap,
    /// Of each page file what it is on disk; none if that is not known, and all of it is read.
    pub keys: &'a [Option<FileKey>],
    /// What was never fetched from the store: one of the files, which is not read but taken over as it is.
    pub remote: Option<&'a Remote<'a>>,
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
    /// It was never fetched, and cannot stay where it is.
    #[error("page {page} of {file} was never fetched, and its pack may not be referred to any more: fetch it first")]
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
    /// The pages that go to the front, of each process in order of need.
    pub front: BTreeMap<u32, Vec<u64>>,
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

    fn run_of(&self, process: u32, address: u64) -> Option<&Run> {
        let runs = &self.map.processes.get(&process)?.runs;
        runs.get(runs.partition_point(|run| run.end() <= address)).filter(|run| run.start <= address)
    }

    /// Its bytes are not here, so it cannot go to the front: it stays in its block.
    fn is_remote(&self, process: u32, address: u64) -> bool {
        let file = self.run_of(process, address).map(|run| run.file);
        self.remote.is_some_and(|remote| file == Some(remote.file()))
    }

    /// The bytes of one page; `None` if it lies nowhere.
    pub(crate) fn page(&mut self, process: u32, address: u64) -> Result<Option<[u8; PAGE]>, MemoryError> {
        let Some(run) = self.run_of(process, address).copied() else { return Ok(None) };
        let mut bytes = [0; PAGE];
        let page = run.first + ((address - run.start) / PAGE as u64) as u32;
        self.read(run.file, page, &mut bytes)?;
        Ok(Some(bytes))
    }
}

/// The pages of all sets in order of need: those of the newest kind first, what is only kept at hand last.
fn order_of_need(process: &Process) -> Vec<u64> {
    let mut seen = HashSet::new();
    let all =
        |held_back| process.sets.iter().flat_map(|set| &set.pages).filter(move |page| page.held_back == held_back);
    all(false).chain(all(true)).map(|page| page.address).filter(|address| seen.insert(*address)).collect()
}

/// Puts the memory of all processes into packs.
///
/// # Errors
/// A page cannot be read or stored; what was stored until then is in no table.
pub fn archive(pages: &mut Pages<'_>, known: &Known, packing: &mut Packing<'_>) -> Result<Archived, MemoryError> {
    let mut work = Work { blocks: Blocks::default(), open: Open::default(), out: Archived::default() };
    let map = pages.map;
    for (number, process) in &map.processes {
        let order = order_of_need(process);
        let set: HashSet<u64> = order.iter().copied().collect();
        let mut homes: Vec<(u64, Spot)> = Vec::new();
        for run in &process.runs {
            work.run(pages, run, known, &set, packing, &mut homes)?;
        }
        work.flush(packing)?;
        let mut filled: HashSet<u64> = HashSet::new();
        for (address, spot) in homes {
            let home = work.home(spot);
            work.out.table.push(*number, address, home);
            if set.contains(&address) && !pages.is_remote(*number, address) {
                filled.insert(address);
            }
        }
        let order: Vec<u64> = order.into_iter().filter(|address| filled.contains(address)).collect();
        if !order.is_empty() {
            work.out.front.insert(*number, order);
        }
    }
    work.out.table.blocks = work.blocks.list;
    Ok(work.out)
}

/// Where a page will be.
#[derive(Debug, Clone, Copy)]
enum Spot {
    Front,
    Placed(Place),
    /// In a block that was not yet written when this was noted: its number among them, page.
    Coming(usize, u32),
}

/// The block that is being filled.
#[derive(Debug, Default)]
struct Open {
    bytes: Vec<u8>,
    start: u64,
    contents: HashMap<ContentHash, u32>,
    /// Pages of page files that lie in it: file, page, checksum, page in the block.
    from: Vec<(FileKey, u32, u32, u32)>,
    /// Blocks that were written before it, in the order of writing.
    written: Vec<Place>,
}

struct Work {
    blocks: Blocks,
    open: Open,
    out: Archived,
}

impl Work {
    fn home(&mut self, spot: Spot) -> Home {
        let place = match spot {
            Spot::Front => return Home::Front,
            Spot::Placed(place) => place,
            Spot::Coming(block, page) => Place { at: page * PAGE as u32, ..self.open.written[block] },
        };
        Home::Block { block: self.blocks.number(place.block), first: place.at / PAGE as u32 }
    }

    /// The pages of one run, in parts.
    fn run(
        &mut self,
        pages: &mut Pages<'_>,
        run: &Run,
        known: &Known,
        set: &HashSet<u64>,
        packing: &mut Packing<'_>,
        homes: &mut Vec<(u64, Spot)>,
    ) -> Result<(), MemoryError> {
        if let Some(remote) = pages.remote.filter(|remote| remote.file() == run.file) {
            return taken_over(pages.map, run, remote, packing, homes);
        }
        let key = pages.keys.get(run.file as usize).copied().flatten();
        let mut buffer = vec![0; BLOCK_PAGES * PAGE];
        for from in (0..run.pages).step_by(BLOCK_PAGES) {
            let count = (run.pages - from).min(BLOCK_PAGES as u32);
            let at = |index: u32| (run.first + from + index, run.start + u64::from(from + index) * PAGE as u64);
            let stored = |index: u32| {
                let place = known.get(key?, at(index).0, pages.sum(run.file, at(index).0)?)?;
                packing.may_use(&place).then_some(place)
            };
            let places: Vec<Option<Place>> = (0..count).map(stored).collect();
            let wanted: Vec<u32> = (0..count).filter(|index| places[*index as usize].is_none()).collect();
            if let (Some(first), Some(last)) = (wanted.first(), wanted.last()) {
                let bytes = &mut buffer[*first as usize * PAGE..(*last as usize + 1) * PAGE];
                pages.read(run.file, at(*first).0, bytes)?;
            }
            for (index, place) in (0..count).zip(places) {
                let ((page, address), sum) = (at(index), pages.sum(run.file, at(index).0));
                let origin = key.zip(sum).map(|(key, sum)| (key, page, sum));
                let spot = match place {
                    Some(place) => Some(Spot::Placed(place)),
                    None => {
                        let bytes = &buffer[index as usize * PAGE..][..PAGE];
                        self.page(bytes, address, origin, set.contains(&address), packing)?
                    }
                };
                if let (Some(Spot::Placed(place)), Some((key, page, sum))) = (spot, origin) {
                    self.out.known.insert(key, page, sum, place);
                }
                homes.extend(spot.map(|spot| (address, spot)));
            }
        }
        Ok(())
    }

    /// Where a page goes that was read; nowhere if it is zeros.
    fn page(
        &mut self,
        bytes: &[u8],
        address: u64,
        origin: Option<(FileKey, u32, u32)>,
        in_set: bool,
        packing: &mut Packing<'_>,
    ) -> Result<Option<Spot>, MemoryError> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        self.out.hashed += 1;
        let hash = packing.hasher.page(bytes);
        if let Some(place) = packing.find(&hash) {
            return Ok(Some(Spot::Placed(place)));
        }
        if in_set {
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
        open.from.extend(origin.map(|(key, number, sum)| (key, number, sum, page)));
        Ok(Some(Spot::Coming(open.written.len(), page)))
    }

    /// Writes the open block.
    fn flush(&mut self, packing: &mut Packing<'_>) -> Result<(), MemoryError> {
        let open = &mut self.open;
        if open.bytes.is_empty() {
            return Ok(());
        }
        let block = packing.push(&open.bytes)?;
        let place = |page: u32| Place { block, at: page * PAGE as u32 };
        for (hash, page) in open.contents.drain() {
            packing.add(hash, place(page));
        }
        for (key, number, sum, page) in open.from.drain(..) {
            self.out.known.insert(key, number, sum, place(page));
        }
        open.written.push(place(0));
        open.bytes.clear();
        Ok(())
    }
}

/// Pages that stay where they are in the store.
fn taken_over(
    map: &PageMap,
    run: &Run,
    remote: &Remote<'_>,
    packing: &Packing<'_>,
    homes: &mut Vec<(u64, Spot)>,
) -> Result<(), MemoryError> {
    for index in 0..run.pages {
        let (page, address) = (run.first + index, run.start + u64::from(index) * PAGE as u64);
        match remote.find(page) {
            Found::Zeros => {}
            Found::Block(place) if packing.may_use(&place) => homes.push((address, Spot::Placed(place))),
            // The front was fetched whole: its pages are in another file of the map.
            Found::Block(_) | Found::Front => {
                return Err(MemoryError::NotHere { file: map.files[run.file as usize].name.clone(), page });
            }
        }
    }
    Ok(())
}
