//! The page table of an archived generation: for every page that is not zeros its place in a block, or "in the front".
//!
//! Owns the section's layout (docs/design/2026-11-22-archive.md). Addresses are multiples of 4096; a page in no run is
//! zeros.

use crate::index::Place;
use crate::pack::{self, BlockRef, PackRef};
use crate::wire::{self, Reader};
use kip_snapshot::pages::{PAGE, Run};
use std::collections::{BTreeMap, BTreeSet};

/// Where pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// Among the set pages of the same front.
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
    /// Nowhere: it is zeros.
    Zeros,
    /// In the front.
    Front,
    /// In a block.
    Block(Place),
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageTable {
    /// The blocks.
    pub blocks: Vec<BlockRef>,
    /// By number inside the sandbox; runs by address, none over another.
    pub processes: BTreeMap<u32, Vec<TableRun>>,
}

impl PageTable {
    /// Where a page is.
    pub fn find(&self, process: u32, address: u64) -> Found {
        let Some(runs) = self.processes.get(&process) else { return Found::Zeros };
        let Some(run) = runs.get(runs.partition_point(|run| run.end() <= address)) else { return Found::Zeros };
        if run.start > address {
            return Found::Zeros;
        }
        match run.home {
            Home::Front => Found::Front,
            Home::Block { block, first } => {
                let page = first + ((address - run.start) / PAGE as u64) as u32;
                Found::Block(Place { block: self.blocks[block as usize], at: page * PAGE as u32 })
            }
        }
    }

    /// The packs that it leads to.
    pub fn packs(&self) -> BTreeSet<PackRef> {
        self.blocks.iter().map(|block| block.pack).collect()
    }

    /// The block of a page and those right behind it in its pack, `most` sealed bytes at most but the first in any
    /// case: one range to read. None if the page is in no block.
    pub fn ahead(&self, process: u32, address: u64, most: u64) -> Vec<BlockRef> {
        let Found::Block(place) = self.find(process, address) else { return Vec::new() };
        let first = place.block;
        let mut near: Vec<BlockRef> =
            self.blocks.iter().filter(|b| b.pack == first.pack && b.offset > first.offset).copied().collect();
        near.sort_unstable_by_key(|block| block.offset);
        let mut ahead = vec![first];
        for block in near {
            let end = ahead.last().expect("there is a first").range().end;
            if block.range().start != end || block.range().end - first.range().start > most {
                break;
            }
            ahead.push(block);
        }
        ahead
    }

    /// The pages of a process that are in the front.
    pub fn in_front(&self, process: u32) -> impl Iterator<Item = u64> + '_ {
        let runs = self.processes.get(&process).map_or(&[][..], |runs| &runs[..]);
        let front = runs.iter().filter(|run| run.home == Home::Front);
        front.flat_map(|run| (run.start..run.end()).step_by(PAGE))
    }

    /// Pages that are not zeros.
    pub fn pages(&self) -> u64 {
        self.processes.values().flatten().map(|run| u64::from(run.pages)).sum()
    }

    /// Appends a page behind all others of a process.
    pub(crate) fn push(&mut self, process: u32, address: u64, home: Home) {
        let runs = self.processes.entry(process).or_default();
        if let Some(last) = runs.last_mut() {
            assert!(last.end() <= address, "pages are added by address");
            let goes_on = match (last.home, home) {
                (Home::Front, Home::Front) => true,
                (Home::Block { block, first }, Home::Block { block: next, first: page }) => {
                    block == next && first + last.pages == page
                }
                _ => false,
            };
            if goes_on && last.end() == address {
                last.pages += 1;
                return;
            }
        }
        runs.push(TableRun { start: address, pages: 1, home });
    }

    pub(crate) fn encode(&self, packs: &[PackRef]) -> Vec<u8> {
        let mut out = Vec::new();
        pack::put_blocks(&mut out, &self.blocks, packs);
        wire::put(&mut out, self.processes.len() as u64);
        for (process, runs) in &self.processes {
            wire::put(&mut out, (*process).into());
            wire::put(&mut out, runs.len() as u64);
            let (mut end, mut before) = (0, 0i64);
            for run in runs {
                wire::put(&mut out, (run.start - end) / PAGE as u64);
                wire::put(&mut out, run.pages.into());
                match run.home {
                    Home::Front => wire::put(&mut out, 0),
                    Home::Block { block, first } => {
                        let number = i64::from(block) - before;
                        // 0 is the front's: differences go up by one where they would be that.
                        wire::put(&mut out, zigzag_from_one(number));
                        wire::put(&mut out, first.into());
                        before = i64::from(block);
                    }
                }
                end = run.end();
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8], packs: &[PackRef]) -> Option<PageTable> {
        let mut reader = Reader(bytes);
        let blocks = pack::take_blocks(&mut reader, packs)?;
        let mut processes = BTreeMap::new();
        for _ in 0..reader.count()? {
            let process = reader.small()?;
            let runs = take_runs(&mut reader, &blocks)?;
            if processes.insert(process, runs).is_some() {
                return None;
            }
        }
        reader.end()?;
        Some(PageTable { blocks, processes })
    }
}

/// The pages of an archived generation as a page file that is nowhere on the local disk: its page `n` is the `n`th page
/// of the table. So the page map of a proc that was woken from the store says of what it never fetched where it lies,
/// also after the program has moved it to another address.
#[derive(Debug)]
pub struct Remote<'a> {
    table: &'a PageTable,
    file: u32,
    /// The runs of all processes, and the number of each one's first page.
    runs: Vec<(u32, &'a TableRun)>,
}

impl<'a> Remote<'a> {
    /// That of a table, to be number `file` of a page map's files.
    pub fn new(table: &'a PageTable, file: u32) -> Remote<'a> {
        let mut next = 0;
        let mut runs = Vec::new();
        for run in table.processes.values().flatten() {
            runs.push((next, run));
            next += run.pages;
        }
        Remote { table, file, runs }
    }

    /// Which of a page map's files it is.
    pub fn file(&self) -> u32 {
        self.file
    }

    /// Where the memory of each process lies when nothing of it was fetched.
    pub fn map(&self) -> BTreeMap<u32, Vec<Run>> {
        let mut starts = self.runs.iter();
        let mut run = |run: &TableRun| {
            let (first, _) = starts.next().expect("as many as there are");
            Run { start: run.start, pages: run.pages, file: self.file, first: *first }
        };
        self.table.processes.iter().map(|(process, runs)| (*process, runs.iter().map(&mut run).collect())).collect()
    }

    /// Where a page of it lies.
    pub fn find(&self, page: u32) -> Found {
        let Some(index) = self.runs.partition_point(|(first, _)| *first <= page).checked_sub(1) else {
            return Found::Zeros;
        };
        let (start, run) = self.runs[index];
        match run.home {
            _ if page - start >= run.pages => Found::Zeros,
            Home::Front => Found::Front,
            Home::Block { block, first } => {
                let at = (first + page - start) * PAGE as u32;
                Found::Block(Place { block: self.table.blocks[block as usize], at })
            }
        }
    }
}

fn zigzag_from_one(number: i64) -> u64 {
    ((number << 1 ^ number >> 63) as u64) + 1
}

fn take_runs(reader: &mut Reader<'_>, blocks: &[BlockRef]) -> Option<Vec<TableRun>> {
    let mut runs = Vec::new();
    let (mut end, mut before) = (0u64, 0i64);
    for _ in 0..reader.count()? {
        let start = end.checked_add(reader.number()?.checked_mul(PAGE as u64)?)?;
        let pages = reader.small()?;
        let home = match reader.number()?.checked_sub(1) {
            None => Home::Front,
            Some(zigzag) => {
                let number = before.checked_add((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))?;
                let (block, first) = (u32::try_from(number).ok()?, reader.small()?);
                let has = blocks.get(block as usize)?.plain as usize / PAGE;
                if first as usize + pages as usize > has {
                    return None;
                }
                before = number;
                Home::Block { block, first }
            }
        };
        end = start.checked_add(u64::from(pages).checked_mul(PAGE as u64)?)?;
        if pages == 0 {
            return None;
        }
        runs.push(TableRun { start, pages, home });
    }
    Some(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{KeyId, PackId};
    use proptest::prelude::*;

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
                let home = home.map_or(Home::Front, |(block, first)| Home::Block { block, first });
                table.push(7, page * PAGE as u64, home);
            }
            let back = PageTable::decode(&table.encode(&packs), &packs).unwrap();
            prop_assert_eq!(&back, &table);
            for page in 0..501u64 {
                let found = back.find(7, page * PAGE as u64);
                match pages.get(&page) {
                    None => prop_assert_eq!(found, Found::Zeros),
                    Some(None) => prop_assert_eq!(found, Found::Front),
                    Some(Some((block, first))) => {
                        let place = Place { block: table.blocks[*block as usize], at: first * PAGE as u32 };
                        prop_assert_eq!(found, Found::Block(place));
                    }
                }
            }
            prop_assert_eq!(back.pages(), pages.len() as u64);
        }

        #[test]
        fn any_bytes_can_be_read(bytes: Vec<u8>) {
            let _ = PageTable::decode(&bytes, &blocks(1).1);
        }
    }

    #[test]
    fn reading_ahead_is_one_range() {
        let pack = |n| PackRef { id: PackId([n; 32]), key: KeyId([1; 16]) };
        let block = |n, offset| BlockRef { pack: pack(n), offset, sealed: 100, plain: PAGE as u32 };
        // In the table by address, which need not be the order of the pack.
        let blocks = vec![block(1, 300), block(1, 200), block(2, 400), block(1, 400), block(1, 600)];
        let mut table = PageTable { blocks: blocks.clone(), ..PageTable::default() };
        for number in 0..5u32 {
            table.push(7, u64::from(number) * PAGE as u64, Home::Block { block: number, first: 0 });
        }
        table.push(7, 9 * PAGE as u64, Home::Front);
        assert_eq!(table.ahead(7, PAGE as u64, 1000), [blocks[1], blocks[0], blocks[3]], "up to the gap");
        assert_eq!(table.ahead(7, PAGE as u64, 200), [blocks[1], blocks[0]]);
        assert_eq!(table.ahead(7, PAGE as u64, 0), [blocks[1]]);
        assert_eq!(table.ahead(7, 9 * PAGE as u64, 1000), []);
        assert_eq!(table.in_front(7).collect::<Vec<_>>(), [9 * PAGE as u64]);
    }

    #[test]
    fn a_run_beyond_its_block_is_not_understood() {
        let (blocks, packs) = blocks(1);
        let home = Home::Block { block: 0, first: 31 };
        let run = |pages| vec![TableRun { start: 4096, pages, home }];
        let table = |pages| PageTable { blocks: blocks.clone(), processes: [(1, run(pages))].into() };
        assert!(PageTable::decode(&table(1).encode(&packs), &packs).is_some());
        assert!(PageTable::decode(&table(2).encode(&packs), &packs).is_none());
        assert!(PageTable::decode(&table(0).encode(&packs), &packs).is_none());
    }
}
