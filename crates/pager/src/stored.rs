//! The bytes of a working set while its program sleeps, in blocks of pages that are needed at about the same time.
//!
//! [`Stored`] owns them, each page with the slot that it had: whoever installs it leaves out what the slot map says
//! otherwise by then. A set is a hint: losing it loses time only.

use crate::set::Expectation;
use crate::source::PageSource;
use crate::swap::{Aligned, PAGE, open_direct};
use kip_snapshot::pages::WorkingSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

/// Where the bytes of a set are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep<'a> {
    /// In memory as they are.
    Memory,
    /// At most so many bytes in memory: as they are if all have room there, else compressed, those first that are needed first;
    /// the others in this file, which is made anew.
    Packed(usize, &'a Path),
    /// In this file, which is made anew.
    File(&'a Path),
    /// Nowhere: every page comes by a fault.
    Nowhere,
}

#[derive(Debug)]
enum Data {
    Plain(Aligned),
    /// Blocks, each by itself.
    Packed(Vec<Box<[u8]>>),
    File(File),
    /// From this slot of a source on.
    Source(Arc<dyn PageSource>, u32),
}

/// Pages that are needed at about the same time, and are kept by address.
pub const NEEDED_TOGETHER: usize = 1024;

/// Pages of a block: they are unpacked into memory that is still in the processor's cache when the kernel copies it.
pub const BLOCK: usize = 64;

/// Compresses blocks as long as they take at most so many bytes together.
fn packed(bytes: &[u8], most: usize) -> Vec<Box<[u8]>> {
    let mut left = most;
    let mut blocks = Vec::new();
    for block in bytes.chunks(BLOCK * PAGE) {
        let packed = lz4_flex::block::compress(block).into_boxed_slice();
        let Some(rest) = left.checked_sub(packed.len()) else { break };
        left = rest;
        blocks.push(packed);
    }
    blocks
}

fn written(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let file = open_direct(path, true)?;
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

/// A part of a set: from this block on, up to the next one.
#[derive(Debug)]
struct Part {
    first: usize,
    data: Data,
}

/// A set with its bytes.
#[derive(Debug)]
pub struct Stored {
    /// Those first that are needed first, by address within each [`NEEDED_TOGETHER`]; those of a source all by address.
    pages: Vec<Page>,
    kinds: Vec<String>,
    parts: Vec<Part>,
}

/// A page of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// Its address.
    pub address: u64,
    /// The slot that it had.
    pub slot: u32,
    /// Bits of the kinds of wakes that it is installed at: [`Stored::bits`].
    pub kinds: u8,
}

impl Stored {
    /// Keeps a set; `bytes` are those of `pages` one behind the other.
    ///
    /// # Errors
    /// The file system's.
    pub fn keep(pages: Vec<Page>, kinds: Vec<String>, bytes: Aligned, how: Keep<'_>) -> io::Result<Option<Self>> {
        if pages.is_empty() {
            return Ok(None);
        }
        assert_eq!(pages.len() * PAGE, bytes.len(), "each page has its bytes");
        let whole = |data| vec![Part { first: 0, data }];
        let parts = match how {
            Keep::Nowhere => return Ok(None),
            Keep::Memory => whole(Data::Plain(bytes)),
            Keep::Packed(most, _) if bytes.len() <= most => whole(Data::Plain(bytes)),
            Keep::Packed(most, path) => {
                let blocks = packed(&bytes, most);
                let first = blocks.len();
                let rest = &bytes[(first * BLOCK * PAGE).min(bytes.len())..];
                let mut parts = if blocks.is_empty() { Vec::new() } else { whole(Data::Packed(blocks)) };
                if !rest.is_empty() {
                    parts.push(Part { first, data: Data::File(written(path, rest)?) });
                }
                parts
            }
            Keep::File(path) => whole(Data::File(written(path, &bytes)?)),
        };
        Ok(Some(Self { pages, kinds, parts }))
    }

    /// The sets that a process was parked with. The bytes lie one behind the other in a source, by address, from `first` on;
    /// `slot` tells the slot that a page has now, if it can be missing.
    pub fn parked(
        sets: &[WorkingSet],
        slot: impl Fn(u64) -> Option<u32>,
        source: Arc<dyn PageSource>,
        first: u32,
    ) -> Option<Self> {
        let Expectation { kinds, pages } = Expectation::of(sets);
        // A page that cannot be missing has no slot, and this is that of no page.
        let page = |(address, kinds)| Page { address, slot: slot(address).unwrap_or(u32::MAX), kinds };
        let mut pages: Vec<Page> = pages.into_iter().map(page).collect();
        pages.sort_unstable_by_key(|page| page.address);
        let data = Data::Source(source, first);
        (!pages.is_empty()).then(|| Self { pages, kinds, parts: vec![Part { first: 0, data }] })
    }

    /// The bits of a kind of wake; of one that is not known all, so that what any kind needs is installed.
    pub fn bits(&self, kind: &str) -> u8 {
        self.kinds.iter().position(|known| known == kind).map_or(u8::MAX, |place| 1 << place)
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> usize {
        let part = |part: &Part| match &part.data {
            Data::Plain(bytes) => bytes.len(),
            Data::Packed(blocks) => blocks.iter().map(|block| block.len()).sum(),
            Data::File(..) | Data::Source(..) => 0,
        };
        self.parts.iter().map(part).sum::<usize>() + self.pages.len() * size_of::<Page>()
    }

    /// How many pages it has.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Never: there is no set then.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// How many blocks that are.
    pub fn blocks(&self) -> usize {
        self.pages.len().div_ceil(BLOCK)
    }

    /// The pages of some blocks that follow each other.
    pub fn pages(&self, blocks: Range<usize>) -> &[Page] {
        &self.pages[blocks.start * BLOCK..(blocks.end * BLOCK).min(self.pages.len())]
    }

    /// Where a block lies, and where the blocks end that lie there.
    fn part(&self, block: usize) -> (&Part, usize) {
        let next = self.parts.partition_point(|part| part.first <= block);
        (&self.parts[next - 1], self.parts.get(next).map_or(self.blocks(), |part| part.first))
    }

    /// How many blocks from this one on are best read at once. To a disk a large read is about the same as a small one.
    pub fn at_once(&self, block: usize) -> usize {
        const DISK: usize = 256 / BLOCK;
        let (part, end) = self.part(block);
        match part.data {
            Data::Plain(_) | Data::Packed(_) => 1,
            Data::File(_) | Data::Source(..) => DISK.min(end - block),
        }
    }

    /// The bytes of some blocks' pages, into `buffer` if they have to be put anywhere. They are at most as many as
    /// [`Stored::at_once`].
    ///
    /// # Errors
    /// The file system's; `InvalidData`.
    pub fn bytes<'a>(&'a self, blocks: Range<usize>, buffer: &'a mut Aligned) -> io::Result<&'a [u8]> {
        let (Part { first, data }, _) = self.part(blocks.start);
        let length = self.pages(blocks.clone()).len() * PAGE;
        let from = (blocks.start - first) * BLOCK;
        if let Data::Plain(bytes) = data {
            return Ok(&bytes[from * PAGE..from * PAGE + length]);
        }
        if buffer.len() < length {
            *buffer = Aligned::new(length);
        }
        let bytes = &mut buffer[..length];
        match data {
            Data::Plain(_) => unreachable!("they are given as they are"),
            Data::Packed(packed) => {
                for (block, bytes) in packed[blocks].iter().zip(bytes.chunks_mut(BLOCK * PAGE)) {
                    let damaged = |_| io::Error::new(io::ErrorKind::InvalidData, "a working set is damaged");
                    let got = lz4_flex::block::decompress_into(block, bytes).map_err(damaged)?;
                    if got != bytes.len() {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, "a working set has shrunk"));
                    }
                }
            }
            Data::File(file) => file.read_exact_at(bytes, (from * PAGE) as u64)?,
            Data::Source(source, slot) => source.read(slot + from as u32, bytes)?,
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_from_everywhere_block_by_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("set");
        let count = 9 * BLOCK / 2;
        let all = count * PAGE;
        for how in [
            Keep::Memory,
            Keep::Packed(all, &path),
            Keep::Packed(3000, &path),
            Keep::Packed(10, &path),
            Keep::File(&path),
        ] {
            let mut bytes = Aligned::new(count * PAGE);
            bytes.chunks_exact_mut(PAGE).enumerate().for_each(|(page, bytes)| bytes.fill(page as u8));
            // Against the order of their addresses.
            let page = |n: u32| Page { address: u64::from(1000 - n) * PAGE as u64, slot: n, kinds: 1 };
            let list: Vec<Page> = (0..count as u32).map(page).collect();
            let stored = Stored::keep(list.clone(), Vec::new(), bytes, how).unwrap().unwrap();
            let mut buffer = Aligned::default();
            let mut got = Vec::new();
            for start in [3, 1, 0, 2, 4] {
                let blocks = start..start + 1;
                assert!(stored.at_once(start) >= 1);
                let pages = stored.pages(blocks.clone()).to_vec();
                let bytes = stored.bytes(blocks.clone(), &mut buffer).unwrap();
                for (page, bytes) in pages.iter().zip(bytes.chunks_exact(PAGE)) {
                    assert!(bytes.iter().all(|b| *b == page.slot as u8));
                    got.push(*page);
                }
            }
            assert_eq!(stored.blocks(), 5);
            assert!(how != Keep::Packed(3000, &path) || stored.parts.len() == 2, "some in memory, some in the file");
            got.sort_by_key(|page| page.slot);
            assert_eq!(got, list);
        }
    }

    #[test]
    fn a_kind_that_is_not_known_has_all_bits() {
        let list = vec![Page { address: 0, slot: 0, kinds: 1 }];
        let kinds = vec!["a".into(), "b".into()];
        let stored = Stored::keep(list, kinds, Aligned::new(PAGE), Keep::Memory).unwrap().unwrap();
        assert_eq!((stored.bits("a"), stored.bits("b"), stored.bits("c")), (1, 2, u8::MAX));
    }
}
