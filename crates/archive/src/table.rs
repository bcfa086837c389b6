//! The page table of an archived generation: for every page its place in a block, or "in the
//! front", or "zeros".
//!
//! Owns the section's layout (docs/design/2026-11-22-archive.md). Addresses are multiples of 4096.
//! A page in no run is as its mapping makes it: zeros in anonymous and in shared memory, the file's
//! content in a private mapping of a file. So a page of zeros that was written into the latter has
//! a run of its own.

use crate::index::{self, ContentPlace};
use crate::pack::{self, BlockRef, PackRef};
use crate::wire::{self, Reader};
use kip_snapshot::pages::{PAGE, Run};
use kip_types::Realm;
use std::collections::{BTreeMap, BTreeSet};

const SAVED: [u8; 8] = *b"KIPTABL1";
/// Where a run's pages are: in the front,
const FRONT: u64 = 0;
/// zeros,
const ZEROS: u64 = 1;
/// or in blocks, whose differences are counted from here.
const BLOCKS: u64 = 2;

/// Memory with addresses of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// That of a process, by its number inside the sandbox.
    Process(u32),
    /// Shared memory (anonymous, memfd, System V), by the number that the images have for it
    /// (CRIU's `pagemap-shmem-ID.img`). Its addresses are offsets from its start.
    Shared(u64),
}

impl Space {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        let (kind, number) = match *self {
            Space::Process(number) => (0, number.into()),
            Space::Shared(number) => (1, number),
        };
        wire::put(out, kind);
        wire::put(out, number);
    }

    pub(crate) fn take(reader: &mut Reader<'_>) -> Option<Space> {
        match (reader.number()?, reader.number()?) {
            (0, number) => Some(Space::Process(number.try_into().ok()?)),
            (1, number) => Some(Space::Shared(number)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Space::Process(number) => write!(f, "process {number}"),
            Space::Shared(number) => write!(f, "shared memory {number}"),
        }
    }
}

/// Where pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// Nowhere: they are zeros, whatever is mapped there.
    Zeros,
    /// Among the eager or the set pages of the same front.
    Front,
    /// In a block.
    Block {
        /// Which of [`PageTable::blocks`].
        block: u32,
        /// The first one's place in it, in pages.
        first: u32,
    },
}

/// Pages that follow each other in memory and where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRun {
    /// Address of the first.
    pub start: u64,
    /// How many.
    pub pages: u32,
    /// Where.
    pub home: Home,
}

impl TableRun {
    /// Behind the last page.
    pub fn end(&self) -> u64 {
        self.start + u64::from(self.pages) * PAGE as u64
    }
}

/// Where one page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// In no run: as its mapping makes it.
    Absent,
    /// Nowhere: it is zeros.
    Zeros,
    /// In the front.
    Front,
    /// In a block.
    Block(ContentPlace),
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageTable {
    /// The blocks.
    pub blocks: Vec<BlockRef>,
    /// Runs by address, none over another.
    pub spaces: BTreeMap<Space, Vec<TableRun>>,
}

impl PageTable {
    /// Where a page is.
    pub fn find(&self, space: Space, address: u64) -> Found {
        let Some(runs) = self.spaces.get(&space) else { return Found::Absent };
        match runs.get(runs.partition_point(|run| run.end() <= address)) {
            Some(run) if run.start <= address => self.found(run, ((address - run.start) / PAGE as u64) as u32),
            _ => Found::Absent,
        }
    }

    fn found(&self, run: &TableRun, page: u32) -> Found {
        match run.home {
            Home::Zeros => Found::Zeros,
            Home::Front => Found::Front,
            Home::Block { block, first } => {
                let at = (first + page) * PAGE as u32;
                Found::Block(ContentPlace { block: self.blocks[block as usize], at })
            }
        }
    }

    /// The packs that it leads to.
    pub fn packs(&self) -> BTreeSet<PackRef> {
        self.blocks.iter().map(|block| block.pack).collect()
    }

    /// The pages that are in the front.
    pub fn in_front(&self) -> impl Iterator<Item = (Space, u64)> + '_ {
        let all = self.spaces.iter().flat_map(|(space, runs)| runs.iter().map(move |run| (*space, run)));
        let front = all.filter(|(_, run)| run.home == Home::Front);
        front.flat_map(|(space, run)| (run.start..run.end()).step_by(PAGE).map(move |address| (space, address)))
    }

    /// Pages that it has, those of zeros among them.
    pub fn pages(&self) -> u64 {
        self.spaces.values().flatten().map(|run| u64::from(run.pages)).sum()
    }

    /// Appends a page behind all others of a space.
    pub(crate) fn push(&mut self, space: Space, address: u64, home: Home) {
        let runs = self.spaces.entry(space).or_default();
        if let Some(last) = runs.last_mut() {
            assert!(last.end() <= address, "pages are added by address");
            let goes_on = match (last.home, home) {
                (Home::Front, Home::Front) | (Home::Zeros, Home::Zeros) => true,
                (Home::Block { block, first }, Home::Block { block: next, first: page }) => {
                    block == next && first + last.pages == page
                }
                _ => false,
            };
            if goes_on && last.end() == address && last.pages < u32::MAX {
                last.pages += 1;
                return;
            }
        }
        runs.push(TableRun { start: address, pages: 1, home });
    }

    /// Why a reader would refuse the table, if it would.
    pub fn fault(&self) -> Option<&'static str> {
        if self.blocks.iter().any(|block| !block.is_sound()) {
            return Some("block");
        }
        for runs in self.spaces.values() {
            let mut end = 0;
            for run in runs {
                let length = u64::from(run.pages) * PAGE as u64;
                let is_placed = run.start >= end && run.start % PAGE as u64 == 0 && run.pages > 0;
                if !is_placed || run.start.checked_add(length).is_none() {
                    return Some("run");
                }
                end = run.start + length;
                if let Home::Block { block, first } = run.home {
                    let has = self.blocks.get(block as usize).map_or(0, |block| u64::from(block.plain) / PAGE as u64);
                    if u64::from(first) + u64::from(run.pages) > has {
                        return Some("place in a block");
                    }
                }
            }
        }
        None
    }

    /// Its bytes, for a local file, so that faults can be served after a restart without the front.
    pub fn save(&self, realm: &Realm) -> Vec<u8> {
        let mut out = index::begin(SAVED, realm);
        index::put_places(&mut out, &self.blocks);
        self.put_runs(&mut out);
        index::end(out)
    }

    /// Reads it back. What is damaged or another realm's is as good as lost: `None`, and the front
    /// is read again.
    pub fn load(bytes: &[u8], realm: &Realm) -> Option<PageTable> {
        let mut reader = index::open(bytes, SAVED, realm)?;
        let blocks = index::take_places(&mut reader)?;
        PageTable::take_spaces(&mut reader, blocks)
    }

    /// Its section. It has no [`PageTable::fault`], and `packs` lists all of its packs.
    pub(crate) fn encode(&self, packs: &[PackRef]) -> Vec<u8> {
        let mut out = Vec::new();
        pack::put_blocks(&mut out, &self.blocks, packs);
        self.put_runs(&mut out);
        out
    }

    fn put_runs(&self, out: &mut Vec<u8>) {
        wire::put(out, self.spaces.len() as u64);
        for (space, runs) in &self.spaces {
            space.put(out);
            wire::put(out, runs.len() as u64);
            let (mut end, mut before) = (0, 0i64);
            for run in runs {
                wire::put(out, (run.start - end) / PAGE as u64);
                wire::put(out, run.pages.into());
                match run.home {
                    Home::Front => wire::put(out, FRONT),
                    Home::Zeros => wire::put(out, ZEROS),
                    Home::Block { block, first } => {
                        let number = i64::from(block) - before;
                        wire::put(out, (number << 1 ^ number >> 63) as u64 + BLOCKS);
                        wire::put(out, first.into());
                        before = i64::from(block);
                    }
                }
                end = run.end();
            }
        }
    }

    pub(crate) fn decode(bytes: &[u8], packs: &[PackRef]) -> Option<PageTable> {
        let mut reader = Reader(bytes);
        let blocks = pack::take_blocks(&mut reader, packs)?;
        PageTable::take_spaces(&mut reader, blocks)
    }

    fn take_spaces(reader: &mut Reader<'_>, blocks: Vec<BlockRef>) -> Option<PageTable> {
        let mut table = PageTable { blocks, ..PageTable::default() };
        for _ in 0..reader.count()? {
            let space = Space::take(reader)?;
            let runs = take_runs(reader)?;
            if table.spaces.insert(space, runs).is_some() {
                return None;
            }
        }
        reader.end()?;
        table.fault().is_none().then_some(table)
    }
}

/// A run of a [`RemotePages`].
#[derive(Debug, Clone, Copy)]
pub struct RemoteRun<'a> {
    /// The number of its first page.
    pub first: u32,
    /// Whose memory it is.
    pub space: Space,
    /// What the table says.
    pub run: &'a TableRun,
}

/// The pages of an archived generation as a page file most of which is nowhere on the local disk:
/// its page `n` is the `n`th page of the table. So the page map of a proc that was woken from the
/// store says of what it never fetched where it lies, also after the program has moved it to
/// another address. See [`kip_snapshot::remote`].
pub struct RemotePages<'a> {
    table: &'a PageTable,
    file: u32,
    /// The runs of all processes.
    runs: Vec<RemoteRun<'a>>,
    here: &'a dyn Fn(u32) -> bool,
}

impl std::fmt::Debug for RemotePages<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("file", &self.file).finish_non_exhaustive()
    }
}

/// A page that was not fetched.
fn away(_: u32) -> bool {
    false
}

impl<'a> RemotePages<'a> {
    /// That of a table, to be number `file` of a page map's files. None of it is here.
    pub fn new(table: &'a PageTable, file: u32) -> RemotePages<'a> {
        let mut next = 0;
        let mut runs = Vec::new();
        for (space, list) in &table.spaces {
            for run in list {
                runs.push(RemoteRun { first: next, space: *space, run });
                next += run.pages;
            }
        }
        RemotePages { table, file, runs, here: &away }
    }

    /// The same, of which what `here` says can be read.
    pub fn with(self, here: &'a dyn Fn(u32) -> bool) -> RemotePages<'a> {
        RemotePages { here, ..self }
    }

    /// Which of a page map's files it is.
    pub fn file(&self) -> u32 {
        self.file
    }

    /// Whether a page of it can be read.
    pub fn is_here(&self, page: u32) -> bool {
        (self.here)(page)
    }

    /// Its runs.
    pub fn runs(&self) -> impl Iterator<Item = RemoteRun<'a>> + '_ {
        self.runs.iter().copied()
    }

    /// The number of a page.
    pub fn number(&self, space: Space, address: u64) -> Option<u32> {
        let next = self.runs.partition_point(|of| (of.space, of.run.start) <= (space, address));
        let RemoteRun { first, space: of, run } = *self.runs.get(next.checked_sub(1)?)?;
        (of == space && address < run.end()).then(|| first + ((address - run.start) / PAGE as u64) as u32)
    }

    /// Where all memory lies when nothing of it was fetched.
    pub fn map(&self) -> BTreeMap<Space, Vec<Run>> {
        let mut map: BTreeMap<Space, Vec<Run>> = BTreeMap::new();
        for RemoteRun { first, space, run } in self.runs() {
            map.entry(space).or_default().push(Run { start: run.start, pages: run.pages, file: self.file, first });
        }
        map
    }

    /// Where a page of it lies.
    pub fn find(&self, page: u32) -> Found {
        let Some(index) = self.runs.partition_point(|run| run.first <= page).checked_sub(1) else {
            return Found::Absent;
        };
        let RemoteRun { first: start, run, .. } = self.runs[index];
        if page - start < run.pages { self.table.found(run, page - start) } else { Found::Absent }
    }
}

fn take_runs(reader: &mut Reader<'_>) -> Option<Vec<TableRun>> {
    let mut runs = Vec::new();
    let (mut end, mut before) = (0u64, 0i64);
    for _ in 0..reader.count()? {
        let start = end.checked_add(reader.number()?.checked_mul(PAGE as u64)?)?;
        let pages = reader.small()?;
        let home = match reader.number()? {
            FRONT => Home::Front,
            ZEROS => Home::Zeros,
            number => {
                let zigzag = number - BLOCKS;
                before = before.checked_add((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))?;
                Home::Block { block: u32::try_from(before).ok()?, first: reader.small()? }
            }
        };
        end = start.checked_add(u64::from(pages) * PAGE as u64)?;
        runs.push(TableRun { start, pages, home });
    }
    Some(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{KeyId, PackId};
    use proptest::prelude::*;

    const P: Space = Space::Process(7);

    fn blocks(count: u32) -> (Vec<BlockRef>, Vec<PackRef>) {
        let packs: Vec<PackRef> = (1..4).map(|n| PackRef { id: PackId([n; 32]), key: KeyId([n; 16]) }).collect();
        let block = |n: u32| BlockRef {
            pack: packs[(n % 3) as usize],
            offset: 192 + n * 777,
            sealed: 700,
            plain: 32 * PAGE as u32,
        };
        ((0..count).map(block).collect(), packs)
    }

    proptest! {
        #[test]
        fn a_table_comes_back_and_finds_each_page(pages in prop::collection::btree_map(0u64..500, prop::option::of((0u32..9, 0u32..32)), 0..200)) {
            let (blocks, packs) = blocks(9);
            let mut table = PageTable { blocks, ..PageTable::default() };
            for (page, home) in &pages {
                let home = home.map_or(if page % 3 == 0 { Home::Zeros } else { Home::Front }, |(block, first)| Home::Block { block, first });
                let space = if page % 2 == 0 { P } else { Space::Shared(u64::MAX - 7) };
                table.push(space, page * PAGE as u64, home);
            }
            let back = PageTable::decode(&table.encode(&packs), &packs).unwrap();
            prop_assert_eq!(&back, &table);
            for page in 0..501u64 {
                let space = if page % 2 == 0 { P } else { Space::Shared(u64::MAX - 7) };
                let found = back.find(space, page * PAGE as u64);
                match pages.get(&page) {
                    None => prop_assert_eq!(found, Found::Absent),
                    Some(None) if page % 3 == 0 => prop_assert_eq!(found, Found::Zeros),
                    Some(None) => prop_assert_eq!(found, Found::Front),
                    Some(Some((block, first))) => {
                        let place = ContentPlace { block: table.blocks[*block as usize], at: first * PAGE as u32 };
                        prop_assert_eq!(found, Found::Block(place));
                    }
                }
            }
            prop_assert_eq!(back.pages(), pages.len() as u64);
            let (realm, other) = ("blue".parse().unwrap(), "red".parse().unwrap());
            let saved = table.save(&realm);
            prop_assert_eq!(PageTable::load(&saved, &realm), Some(table));
            prop_assert_eq!(PageTable::load(&saved, &other), None);
            prop_assert_eq!(PageTable::load(&saved[1..], &realm), None);
        }

        #[test]
        fn any_bytes_can_be_read(bytes: Vec<u8>) {
            let _ = PageTable::decode(&bytes, &blocks(1).1);
        }
    }

    #[test]
    fn a_run_beyond_its_block_is_not_understood() {
        let (blocks, packs) = blocks(1);
        let home = Home::Block { block: 0, first: 31 };
        let run = |pages| vec![TableRun { start: 4096, pages, home }];
        let table = |pages| PageTable { blocks: blocks.clone(), spaces: [(P, run(pages))].into() };
        assert!(PageTable::decode(&table(1).encode(&packs), &packs).is_some());
        assert!(PageTable::decode(&table(2).encode(&packs), &packs).is_none());
        assert!(PageTable::decode(&table(0).encode(&packs), &packs).is_none());
        // What a reader would refuse is known before it is written.
        assert_eq!(
            (table(1).fault(), table(2).fault(), table(0).fault()),
            (None, Some("place in a block"), Some("run"))
        );
        let at = |start| TableRun { start, pages: 1, home: Home::Front };
        let of = |runs| PageTable { spaces: [(P, runs)].into(), ..PageTable::default() }.fault();
        assert_eq!(of(vec![at(4096), at(8192)]), None);
        for bad in [vec![at(8192), at(4096)], vec![at(4096), at(4096)], vec![at(7)], vec![at(u64::MAX - 4095)]] {
            assert_eq!(of(bad), Some("run"));
        }
    }
}
