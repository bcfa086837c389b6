//! A page table made ready for serving faults: what lies behind a block in its pack, and whose pages a block has.
//!
//! Owns orders that are made once, when the table is loaded, so that a fault costs a few binary searches. Holds 12 bytes
//! for each block and 16 for each run besides the table.

use super::{Home, PageTable, Space, TableRun};
use kip_snapshot::pages::PAGE;

/// A page table and what a fault asks of it.
#[derive(Debug, Clone)]
pub struct Lookup {
    table: PageTable,
    /// Numbers of blocks, by pack and offset.
    in_packs: Vec<u32>,
    /// Of each block its place there.
    ranks: Vec<u32>,
    spaces: Vec<Space>,
    /// Runs that lie in blocks, by block: block, place of the space, place of the run.
    users: Vec<(u32, u32, u32)>,
}

/// A page of a block and where it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Belongs {
    /// To whose memory.
    pub space: Space,
    /// Where there.
    pub address: u64,
    /// Its first byte in the opened block.
    pub at: u32,
}

impl Lookup {
    /// Prepares a table; takes time in proportion to it, once.
    pub fn new(table: PageTable) -> Lookup {
        let mut in_packs: Vec<u32> = (0..table.blocks.len() as u32).collect();
        in_packs.sort_unstable_by_key(|number| {
            let block = &table.blocks[*number as usize];
            (block.pack, block.offset)
        });
        let mut ranks = vec![0; in_packs.len()];
        (0..).zip(&in_packs).for_each(|(rank, number)| ranks[*number as usize] = rank);
        let spaces: Vec<Space> = table.spaces.keys().copied().collect();
        let mut users = Vec::new();
        for (space, runs) in (0..).zip(table.spaces.values()) {
            for (place, run) in (0..).zip(runs) {
                if let Home::Block { block, .. } = run.home {
                    users.push((block, space, place));
                }
            }
        }
        users.sort_unstable();
        Lookup { table, in_packs, ranks, spaces, users }
    }

    /// The table.
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// The run that has a page.
    fn run(&self, space: Space, address: u64) -> Option<&TableRun> {
        let runs = self.table.spaces.get(&space)?;
        runs.get(runs.partition_point(|run| run.end() <= address)).filter(|run| run.start <= address)
    }

    /// The block of a page and those right behind it in its pack, by their numbers in [`PageTable::blocks`]: one range to
    /// read, of `most` sealed bytes at most, but the first in any case. None if the page is in no block.
    pub fn ahead(&self, space: Space, address: u64, most: u64) -> Vec<u32> {
        let Some(Home::Block { block: number, .. }) = self.run(space, address).map(|run| run.home) else {
            return Vec::new();
        };
        let first = self.table.blocks[number as usize];
        let (mut ahead, mut end) = (vec![number], first.range().end);
        for next in &self.in_packs[self.ranks[number as usize] as usize + 1..] {
            let block = self.table.blocks[*next as usize];
            if block.pack != first.pack || block.range().start != end || block.range().end - first.range().start > most
            {
                break;
            }
            ahead.push(*next);
            end = block.range().end;
        }
        ahead
    }

    /// Everything that a block's pages are the content of: whoever fetched it can install all of that.
    pub fn belongs(&self, block: u32) -> impl Iterator<Item = Belongs> + '_ {
        let from = self.users.partition_point(|(of, ..)| *of < block);
        let users = self.users[from..].iter().take_while(move |(of, ..)| *of == block);
        users.flat_map(|(_, space, place)| {
            let space = self.spaces[*space as usize];
            let run = &self.table.spaces[&space][*place as usize];
            let first = match run.home {
                Home::Block { first, .. } => first,
                Home::Front | Home::Zeros => unreachable!("only runs in blocks are listed"),
            };
            (0..run.pages).map(move |page| Belongs {
                space,
                address: run.start + u64::from(page) * PAGE as u64,
                at: (first + page) * PAGE as u32,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{KeyId, PackId};
    use crate::index::Place;
    use crate::pack::{BlockRef, PackRef};
    use crate::table::Found;
    use proptest::prelude::*;

    const P: Space = Space::Process(7);

    fn block(pack: u8, offset: u32) -> BlockRef {
        let pack = PackRef { id: PackId([pack; 32]), key: KeyId([1; 16]) };
        BlockRef { pack, offset, sealed: 100, plain: 4 * PAGE as u32 }
    }

    #[test]
    fn reading_ahead_is_one_range() {
        // In the table by address, which need not be the order of the pack.
        let blocks = vec![block(1, 300), block(1, 200), block(2, 400), block(1, 400), block(1, 600)];
        let mut table = PageTable { blocks, ..PageTable::default() };
        for number in 0..5u32 {
            table.push(P, u64::from(number) * PAGE as u64, Home::Block { block: number, first: 0 });
        }
        table.push(P, 9 * PAGE as u64, Home::Front);
        assert_eq!(table.in_front().collect::<Vec<_>>(), [(P, 9 * PAGE as u64)]);
        let lookup = Lookup::new(table);
        assert_eq!(lookup.ahead(P, PAGE as u64, 1000), [1, 0, 3], "up to the gap");
        assert_eq!(lookup.ahead(P, PAGE as u64, 200), [1, 0]);
        assert_eq!(lookup.ahead(P, PAGE as u64, 0), [1]);
        assert_eq!(lookup.ahead(P, 2 * PAGE as u64, 1000), [2], "not into another pack");
        for nowhere in [7, 9] {
            assert_eq!(lookup.ahead(P, nowhere * PAGE as u64, 1000), [0; 0]);
        }
    }

    proptest! {
        #[test]
        fn a_block_knows_all_of_its_pages(pages in prop::collection::btree_map((0u64..3, 0u64..200), (0u32..7, 0u32..4), 0..200)) {
            let blocks = (0..6).map(|n| block(n as u8 % 2, 192 + n * 50)).collect();
            let mut table = PageTable { blocks, ..PageTable::default() };
            for ((space, page), (number, first)) in &pages {
                let home = if *number == 6 { Home::Zeros } else { Home::Block { block: *number, first: *first } };
                table.push(Space::Shared(*space), page * PAGE as u64, home);
            }
            let lookup = Lookup::new(table);
            let mut seen = 0;
            for number in 0..6u32 {
                for Belongs { space, address, at } in lookup.belongs(number) {
                    let place = Place { block: lookup.table().blocks[number as usize], at };
                    prop_assert_eq!(lookup.table().find(space, address), Found::Block(place));
                    seen += 1;
                }
            }
            prop_assert_eq!(seen, pages.values().filter(|(number, _)| *number < 6).count());
        }
    }
}
