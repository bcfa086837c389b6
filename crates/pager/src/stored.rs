//! The bytes of a working set while its program sleeps, in blocks of pages that are needed at about
//! the same time.
//!
//! [`StoredSet`] owns them, each page with the slot that it had: the thread that installs them
//! leaves out those of which the slot map says otherwise by then. A set is a hint: losing it loses
//! time only.

use crate::crew::crew;
use crate::set::Expectation;
use crate::source::PageSource;
use crate::swap::{Aligned, PAGE, open_cached, open_direct};
use kip_snapshot::pages::WorkingSet;
use parking_lot::Mutex;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fcntl_setfl};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Where the bytes of a set are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep<'a> {
    /// In memory as they are.
    Memory,
    /// In memory as they are, if they are at most `plain` bytes. Else in a file, of which at most
    /// `cached` bytes, of what is needed first, stay in the page cache, which gives them up when
    /// the machine needs room. Compressed, unless that is a small part of `cached`. The file has no
    /// name any more when this returns; the path is where it is made.
    Within {
        /// Bytes.
        plain: usize,
        /// Bytes.
        cached: usize,
        /// Of the file.
        path: &'a Path,
    },
    /// As before, with nothing in the page cache.
    File(&'a Path),
    /// Nowhere: every page comes by a fault.
    Nowhere,
}

/// Where working sets are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sets {
    /// In memory.
    Memory,
    /// In memory if they are small, else in files that stay in the page cache, while all sets of
    /// the proc together take at most so many bytes; beyond that on disk.
    Cached(usize),
    /// On disk.
    Disk,
    /// There are none.
    None,
}

#[derive(Debug)]
enum Data {
    Plain(Aligned),
    File(BlockFile),
    /// From this slot of a source on.
    Source(Arc<dyn PageSource>, u32),
    /// In a source where their slots say, or on their way there.
    Slots(Arc<dyn PageSource>),
}

/// Pages that are needed at about the same time, and are kept by address.
pub const NEEDED_TOGETHER: usize = 1024;

/// Pages of a block: they are unpacked into memory that is still in the processor's cache when the
/// kernel copies it.
pub const BLOCK: usize = 32;

/// The most bytes that are read from a disk in one go: it costs little more than to read a page,
/// and what was read before is unpacked meanwhile.
const READ: u64 = 256 << 10;

/// The most bytes that are taken from the page cache in one go: so much as all processors are to
/// end at about the same time.
const CACHED: u64 = 64 << 10;

/// A set that takes no more than this part of the room that is left in the page cache is not
/// compressed: to unpack it would take half as long again as to install it.
const PLENTY: usize = 32;

/// Pages that are on their way come no more if none has for so long.
const COMES_WITHIN: Duration = Duration::from_secs(5);
/// And are looked for so often.
const POLL_EVERY: Duration = Duration::from_micros(100);

/// Reads pages as soon as they have come.
fn read_coming(source: &dyn PageSource, slot: u32, bytes: &mut [u8]) -> io::Result<()> {
    let began = Instant::now();
    loop {
        match source.read(slot, bytes) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && began.elapsed() < COMES_WITHIN => {
                std::thread::sleep(POLL_EVERY);
            }
            other => return other,
        }
    }
}

/// Where the bytes of a set are put while they are on their way.
#[derive(Debug, Default)]
pub struct Buffers {
    plain: Aligned,
    packed: Aligned,
}

/// Room for so many bytes.
fn room(buffer: &mut Aligned, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes {
        *buffer = Aligned::new(bytes);
    }
    &mut buffer[..bytes]
}

/// Compresses all blocks, by all processors that are free.
fn packed(bytes: &[u8]) -> io::Result<Vec<Box<[u8]>>> {
    let blocks: Vec<&[u8]> = bytes.chunks(BLOCK * PAGE).collect();
    let one = |block: &[u8]| -> io::Result<Box<[u8]>> {
        let packed = lz4::block::compress(block, None, false)?;
        // One that is as long as its pages is not compressed.
        Ok(if packed.len() < block.len() { packed.into() } else { block.into() })
    };
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    crew().share(blocks.len(), |_| {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(block) = blocks.get(number) else { break };
            let packed = one(block);
            done.lock().insert(number, packed);
        }
    });
    done.into_inner().into_values().collect()
}

fn unpack<'a>(packed: &'a [u8], buffer: &'a mut Aligned, length: usize) -> io::Result<&'a [u8]> {
    if packed.len() == length {
        return Ok(packed);
    }
    let bytes = room(buffer, length);
    let length = i32::try_from(bytes.len()).expect("a block is small");
    match lz4::block::decompress_to_buffer(packed, Some(length), bytes)? {
        all if all == bytes.len() => Ok(bytes),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a working set has shrunk")),
    }
}

/// Blocks one behind the other in a file without a name: gone with this, and if they are in the
/// page cache never written to the disk if that is soon.
#[derive(Debug)]
struct BlockFile {
    file: File,
    /// Where each block begins, and the last one ends.
    at: Vec<u64>,
    /// CRC-32 of each block as it lies there: a page cache that could not be written out may
    /// forget.
    sums: Vec<u32>,
    cached: bool,
}

impl BlockFile {
    fn write(path: &Path, blocks: &[impl AsRef<[u8]>], cached: bool) -> io::Result<Self> {
        let mut at = vec![0];
        at.extend(blocks.iter().scan(0, |end, block| {
            *end += block.as_ref().len() as u64;
            Some(*end)
        }));
        let file = if cached { open_cached(path)? } else { open_direct(path, true)? };
        std::fs::remove_file(path)?;
        let all = at[blocks.len()];
        let mut bytes = Aligned::new(all.next_multiple_of(PAGE as u64) as usize);
        for (start, block) in at.iter().zip(blocks) {
            let block = block.as_ref();
            bytes[*start as usize..][..block.len()].copy_from_slice(block);
        }
        file.write_all_at(&bytes, 0)?;
        let sums = blocks.iter().map(|block| crc32fast::hash(block.as_ref())).collect();
        Ok(Self { file, at, sums, cached })
    }

    /// Bytes that it may have in the page cache.
    fn memory(&self) -> usize {
        if self.cached { self.at[self.at.len() - 1] as usize } else { 0 }
    }

    /// How many blocks from this one on are read in one go.
    fn at_once(&self, block: usize) -> usize {
        let most = if self.cached { CACHED } else { READ };
        let end = self.at.partition_point(|at| *at <= self.at[block] + most);
        end.saturating_sub(block + 1).max(1)
    }

    /// Lets the disk begin to read these portions, one behind the other, while their reader still
    /// does other things. That needs the page cache, which gives them up when this is dropped.
    fn begin(&self, portions: impl Iterator<Item = Range<usize>>) -> io::Result<()> {
        let flags = fcntl_getfl(&self.file)?;
        fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
        for blocks in portions {
            let (from, end) = (self.at[blocks.start], self.at[blocks.end]);
            fadvise(&self.file, from, NonZero::new(end - from), Advice::WillNeed)?;
        }
        Ok(())
    }

    /// Reads blocks that follow each other, and says where the first one's bytes are in the buffer.
    fn read(&self, blocks: Range<usize>, buffer: &mut Aligned) -> io::Result<usize> {
        let from = self.at[blocks.start] / PAGE as u64 * PAGE as u64;
        let bytes = room(buffer, (self.at[blocks.end] - from).next_multiple_of(PAGE as u64) as usize);
        self.file.read_exact_at(bytes, from)?;
        Ok((self.at[blocks.start] - from) as usize)
    }

    fn checked<'a>(&self, block: usize, bytes: &'a [u8]) -> io::Result<&'a [u8]> {
        if crc32fast::hash(bytes) == self.sums[block] {
            return Ok(bytes);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "a working set is damaged"))
    }

    fn length(&self, block: usize) -> usize {
        (self.at[block + 1] - self.at[block]) as usize
    }
}

/// A part of a set: from this block on, up to the next one.
#[derive(Debug)]
struct Part {
    first: usize,
    data: Data,
}

/// A set with its bytes.
#[derive(Debug)]
pub struct StoredSet {
    /// Those first that are needed first, by address within each [`NEEDED_TOGETHER`]; those of a
    /// source all by address.
    pages: Vec<Page>,
    kinds: Vec<String>,
    parts: Vec<Part>,
    /// Address and slot of what is held back and has no bytes here.
    held_back: Vec<(u64, u32)>,
}

/// A page of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// Its address.
    pub address: u64,
    /// The slot that it had.
    pub slot: u32,
    /// Bits of the kinds of wakes that it is installed at: [`StoredSet::bits`].
    pub kinds: u8,
}

impl StoredSet {
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
            Keep::Within { plain, .. } if bytes.len() <= plain => whole(Data::Plain(bytes)),
            Keep::Within { cached, path, .. } if bytes.len() <= cached / PLENTY => {
                let blocks: Vec<&[u8]> = bytes.chunks(BLOCK * PAGE).collect();
                whole(Data::File(BlockFile::write(path, &blocks, true)?))
            }
            Keep::Within { cached, path, .. } => {
                let mut blocks = packed(&bytes)?;
                let sums = blocks.iter().scan(0, |sum, block| {
                    *sum += block.len();
                    Some(*sum)
                });
                let first = sums.take_while(|sum| *sum <= cached).count();
                let rest = blocks.split_off(first);
                let mut parts = Vec::new();
                for (first, blocks, cached) in [(0, blocks, true), (first, rest, false)] {
                    if !blocks.is_empty() {
                        parts.push(Part { first, data: Data::File(BlockFile::write(path, &blocks, cached)?) });
                    }
                }
                parts
            }
            Keep::File(path) => whole(Data::File(BlockFile::write(path, &packed(&bytes)?, false)?)),
        };
        Ok(Some(Self { pages, kinds, parts, held_back: Vec::new() }))
    }

    /// The sets that a process was parked with. The bytes lie one behind the other in a source, by
    /// address, from `first` on; `slot` tells the slot that a page has now, if it can be missing.
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
        let parts = vec![Part { first: 0, data }];
        (!pages.is_empty()).then_some(Self { pages, kinds, parts, held_back: Vec::new() })
    }

    /// The same of one that came from elsewhere, or still comes: the pages for a wake of this kind
    /// lie where their slots say, and come in the order in which they are needed.
    pub fn coming(
        sets: &[WorkingSet],
        kind: &str,
        slot: impl Fn(u64) -> Option<u32>,
        source: Arc<dyn PageSource>,
    ) -> Option<Self> {
        let Expectation { kinds, pages } = Expectation::of(sets);
        let parts = vec![Part { first: 0, data: Data::Slots(source) }];
        let mut set = Self { pages: Vec::new(), kinds, parts, held_back: Vec::new() };
        let bits = set.bits(kind);
        for (address, kinds) in pages {
            match slot(address) {
                Some(slot) if kinds & bits != 0 => set.pages.push(Page { address, slot, kinds }),
                Some(slot) => set.held_back.push((address, slot)),
                None => {}
            }
        }
        set.pages.chunks_mut(BLOCK).for_each(|block| block.sort_unstable_by_key(|page| page.address));
        (!set.pages.is_empty() || !set.held_back.is_empty()).then_some(set)
    }

    /// What is held back and has no bytes here: address, slot.
    pub fn held_back(&self) -> &[(u64, u32)] {
        &self.held_back
    }

    /// The bits of a kind of wake; of one that is not known all, so that what any kind needs is
    /// installed.
    pub fn bits(&self, kind: &str) -> u8 {
        self.kinds.iter().position(|known| known == kind).map_or(u8::MAX, |place| 1 << place)
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> usize {
        let part = |part: &Part| match &part.data {
            Data::Plain(bytes) => bytes.len(),
            Data::File(_) | Data::Source(..) | Data::Slots(_) => 0,
        };
        self.parts.iter().map(part).sum::<usize>() + self.pages.len() * size_of::<Page>()
    }

    /// The same with what it may have in the page cache.
    pub fn kept(&self) -> usize {
        let cached = |part: &Part| if let Data::File(file) = &part.data { file.memory() } else { 0 };
        self.memory() + self.parts.iter().map(cached).sum::<usize>()
    }

    /// How many pages it has.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Nothing is to be installed.
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

    /// How many blocks from this one on are best read at once.
    pub fn at_once(&self, block: usize) -> usize {
        const DISK: usize = 256 / BLOCK;
        let (part, end) = self.part(block);
        match &part.data {
            Data::Plain(_) | Data::Slots(_) => 1,
            Data::File(file) => file.at_once(block - part.first),
            Data::Source(..) => DISK.min(end - block),
        }
    }

    /// Lets the disk begin to read what will be read in these portions. A hint.
    pub fn begin(&self, portions: &[Range<usize>]) {
        for Part { first, data } in &self.parts {
            let here = portions.iter().filter(|blocks| blocks.start >= *first);
            if let Data::File(file) = data
                && !file.cached
            {
                let _ = file.begin(here.map(|blocks| blocks.start - first..blocks.end - first));
            }
        }
    }

    /// Whether a block has to be read from a disk.
    pub fn on_disk(&self, block: usize) -> bool {
        match &self.part(block).0.data {
            Data::Plain(_) | Data::Slots(_) => false,
            Data::File(file) => !file.cached,
            Data::Source(..) => true,
        }
    }

    /// The block of a page that had this slot, if that block is in memory, or in the page cache
    /// unless the kernel has taken it out of there.
    pub fn block_in_memory(&self, address: u64, slot: u32) -> Option<usize> {
        let place = self.pages.iter().position(|page| (page.address, page.slot) == (address, slot))?;
        let block = place / BLOCK;
        (!self.on_disk(block) && !matches!(self.part(block).0.data, Data::Slots(_))).then_some(block)
    }

    /// Hands over the pages of some blocks with their bytes, block by block, until `take` says that
    /// it is enough. The blocks are at most as many as [`StoredSet::at_once`].
    ///
    /// # Errors
    /// The file system's; `InvalidData`; those of `take`.
    pub fn each(
        &self,
        blocks: Range<usize>,
        buffers: &mut Buffers,
        mut take: impl FnMut(&[Page], &[u8]) -> io::Result<bool>,
    ) -> io::Result<()> {
        let (Part { first, data }, _) = self.part(blocks.start);
        let Buffers { plain, packed } = buffers;
        let mut at = match data {
            Data::Plain(_) => 0,
            Data::File(file) => file.read(blocks.start - first..blocks.end - first, packed)?,
            Data::Source(source, slot) => {
                let length = self.pages(blocks.clone()).len() * PAGE;
                source.read(slot + ((blocks.start - first) * BLOCK) as u32, room(packed, length))?;
                0
            }
            Data::Slots(source) => {
                let pages = self.pages(blocks.clone());
                let mut bytes = room(packed, pages.len() * PAGE);
                for run in pages.chunk_by(|one, next| one.slot + 1 == next.slot) {
                    let (these, rest) = bytes.split_at_mut(run.len() * PAGE);
                    read_coming(&**source, run[0].slot, these)?;
                    bytes = rest;
                }
                0
            }
        };
        for block in blocks {
            let pages = self.pages(block..block + 1);
            let (length, block) = (pages.len() * PAGE, block - first);
            let bytes = match data {
                Data::Plain(bytes) => &bytes[block * BLOCK * PAGE..][..length],
                Data::Source(..) | Data::Slots(_) => &packed[at..at + length],
                Data::File(file) => unpack(file.checked(block, &packed[at..at + file.length(block)])?, plain, length)?,
            };
            if !take(pages, bytes)? {
                break;
            }
            at += match data {
                Data::File(file) => file.length(block),
                _ => length,
            };
        }
        Ok(())
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
        let within = |plain, cached| Keep::Within { plain, cached, path: &path };
        for how in [Keep::Memory, within(all, 0), within(0, all), within(0, 2000), within(0, 10), Keep::File(&path)] {
            let mut bytes = Aligned::new(count * PAGE);
            bytes.chunks_exact_mut(PAGE).enumerate().for_each(|(page, bytes)| bytes.fill(page as u8));
            // Against the order of their addresses.
            let page = |n: u32| Page { address: u64::from(1000 - n) * PAGE as u64, slot: n, kinds: 1 };
            let list: Vec<Page> = (0..count as u32).map(page).collect();
            let stored = StoredSet::keep(list.clone(), Vec::new(), bytes, how).unwrap().unwrap();
            let mut buffer = Buffers::default();
            let mut got = Vec::new();
            for start in [3, 1, 0, 2, 4] {
                let blocks = start..start + 1;
                assert!(stored.at_once(start) >= 1);
                let first = stored.pages(start..start + 1)[0];
                let there = (!stored.on_disk(start)).then_some(start);
                assert_eq!(stored.block_in_memory(first.address, first.slot), there);
                assert_eq!(stored.block_in_memory(first.address, first.slot + 1), None, "another page lies there");
                let take = |pages: &[Page], bytes: &[u8]| {
                    for (page, bytes) in pages.iter().zip(bytes.chunks_exact(PAGE)) {
                        assert!(bytes.iter().all(|b| *b == page.slot as u8));
                        got.push(*page);
                    }
                    Ok(true)
                };
                stored.each(blocks, &mut buffer, take).unwrap();
            }
            assert_eq!(stored.blocks(), 5);
            assert!(how != within(0, 2000) || stored.parts.len() == 2, "some in the cache, some not");
            got.sort_by_key(|page| page.slot);
            assert_eq!(got, list);
        }
    }

    /// A set of numbered pages on the disk.
    fn on_disk(path: &Path, count: usize) -> StoredSet {
        let mut bytes = Aligned::new(count * PAGE);
        bytes.chunks_exact_mut(PAGE).enumerate().for_each(|(page, bytes)| bytes.fill(page as u8));
        let page = |n| Page { address: u64::from(n) * PAGE as u64, slot: n, kinds: 1 };
        let pages = (0..count as u32).map(page).collect();
        StoredSet::keep(pages, Vec::new(), bytes, Keep::File(path)).unwrap().unwrap()
    }

    #[test]
    fn what_the_disk_was_told_to_begin_comes_back_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let count = 20 * BLOCK;
        let stored = on_disk(&dir.path().join("set"), count);
        assert!(stored.on_disk(0) && stored.memory() < PAGE * count && std::fs::read_dir(&dir).unwrap().count() == 0);
        let next = |from: &usize| Some(from + stored.at_once(*from));
        let starts = std::iter::successors(Some(0), next).take_while(|start| *start < stored.blocks());
        let portions: Vec<_> = starts.map(|start| start..stored.blocks().min(start + stored.at_once(start))).collect();
        stored.begin(&portions[1.min(portions.len() - 1)..]);
        let (mut buffers, mut next) = (Buffers::default(), 0);
        for blocks in portions {
            let take = |pages: &[Page], bytes: &[u8]| {
                assert!(bytes.chunks_exact(PAGE).zip(pages).all(|(b, page)| b.iter().all(|b| *b == page.slot as u8)));
                next += pages.len();
                Ok(true)
            };
            stored.each(blocks, &mut buffers, take).unwrap();
        }
        assert_eq!(next, count);
    }

    // promise hibernation: a working set that was damaged, on the disk or in the page cache, is not
    //   installed
    #[test]
    fn a_damaged_block_is_not_handed_over() {
        let dir = tempfile::tempdir().unwrap();
        let stored = on_disk(&dir.path().join("set"), 2 * BLOCK);
        let Data::File(file) = &stored.parts[0].data else { panic!("it is in a file") };
        let mut page = Aligned::new(PAGE);
        file.file.read_exact_at(&mut page, 0).unwrap();
        page[file.length(0) / 2] ^= 1;
        file.file.write_all_at(&page, 0).unwrap();
        let refused = stored.each(0..1, &mut Buffers::default(), |_, _| panic!("it is damaged")).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    /// Pages that come while they are read, each with its slot in its bytes.
    #[derive(Debug)]
    struct Arriving(AtomicUsize);

    impl PageSource for Arriving {
        fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()> {
            let came = self.0.fetch_add(1, Ordering::Relaxed);
            if came < slot as usize {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            buffer.chunks_mut(PAGE).zip(slot..).for_each(|(page, slot)| page.fill(slot as u8));
            Ok(())
        }
    }

    #[test]
    fn a_set_that_comes_is_read_as_it_comes_in_order_of_need() {
        use kip_snapshot::pages::Expected;
        let expected = |page: u64, held_back| Expected { address: page * PAGE as u64, confirmed: 1, held_back };
        let set = |kind: &str, pages| WorkingSet { kind: kind.into(), turn: 1, pages };
        let port: Vec<Expected> = (0..40).rev().map(|page| expected(page, page == 7)).collect();
        let sets = [set("port", port), set("timer", vec![expected(90, false), expected(3, false)])];
        // What has no slot cannot be missing.
        let slot = |address: u64| (address != 5 * PAGE as u64).then_some((address / PAGE as u64) as u32 + 100);
        let stored = StoredSet::coming(&sets, "port", slot, Arc::new(Arriving(AtomicUsize::new(0)))).unwrap();
        assert_eq!((stored.len(), stored.blocks()), (38, 2));
        assert_eq!(stored.held_back(), [(90 * PAGE as u64, 190), (7 * PAGE as u64, 107)]);
        let mut got = Vec::new();
        for block in 0..2 {
            let take = |pages: &[Page], bytes: &[u8]| {
                assert!(bytes.chunks(PAGE).zip(pages).all(|(bytes, page)| bytes.iter().all(|b| *b == page.slot as u8)));
                got.extend(pages.iter().map(|page| page.address / PAGE as u64));
                Ok(true)
            };
            stored.each(block..block + 1, &mut Buffers::default(), take).unwrap();
        }
        assert_eq!(got[..32], (8..40).collect::<Vec<u64>>(), "those that are needed first, by address");
        assert_eq!(got[32..], [0, 1, 2, 3, 4, 6]);
        assert_eq!(StoredSet::coming(&sets, "new", slot, Arc::new(Arriving(AtomicUsize::new(0)))).unwrap().len(), 39);
    }

    #[test]
    fn a_kind_that_is_not_known_has_all_bits() {
        let list = vec![Page { address: 0, slot: 0, kinds: 1 }];
        let kinds = vec!["a".into(), "b".into()];
        let stored = StoredSet::keep(list, kinds, Aligned::new(PAGE), Keep::Memory).unwrap().unwrap();
        assert_eq!((stored.bits("a"), stored.bits("b"), stored.bits("c")), (1, 2, u8::MAX));
    }
}
