//! Takes a stopped process's memory out: the steps in their order, for one process.
//!
//! 1. written pages of private file mappings become private memory ([`crate::convert`]);
//! 2. one scan tells what is there and what was written since it came;
//! 3. what will be dropped is registered: that this is possible is known before anything is lost;
//! 4. written pages but zeros go to the swap file, then the slot map is changed; the set is kept;
//! 5. part by part: registration is lifted (our own dropping would wait for us to read its event),
//!    one injected call drops the part, and it is registered again before the thread that made the
//!    call can touch anything. What another process touched between the two is put right
//!    ([`crate::mend`]).
//!
//! Steps 1 and 5 make calls in the process ([`crate::proc`]), 2 to 4 ([`save_all`]) only look at
//! it. Until step 5 nothing is lost by a crash or an error: every page is still there. In step 5
//! the thread is not let go between drop and registration, the call is waited for without a limit,
//! and the kernel kills the process if we die there.

use crate::ahead::Streams;
use crate::arguments;
use crate::convert::within;
use crate::fault;
use crate::memory::{Memory, Since};
use crate::mend::{mend, put_back};
use crate::set::{Expectation, Histories, SetRecord};
use crate::slots::{Change, Runs};
use crate::space::{Mapping, Reason, SpaceKind, mappings};
use crate::stored::{Keep, NEEDED_TOGETHER, Page as SetPage, Sets, StoredSet};
use crate::swap::{Aligned, PAGE};
use crate::ticking;
use kip_stop::timers::Timer;
use kip_stop::{Scratch, call};
use kip_sys::inject::Hand;
use kip_sys::pagemap::{self, Filter, Region, States};
use kip_sys::process::write_memory;
use kip_sys::uffd::{self, Catch};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::Path;

const PAGE64: u64 = PAGE as u64;
/// Pages read and written at once.
const CHUNK: usize = 256;
/// Ranges that one call drops (UIO_MAXIOV).
const RANGES: usize = 1024;
/// Bytes of the injected list of ranges.
pub(crate) const SCRATCH: u64 = (RANGES * 16) as u64;

/// What was done with one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Deflated {
    /// Pages that were there and are gone.
    pub dropped_pages: u64,
    /// Pages written to the swap file.
    pub written_pages: u64,
    /// Pages of zeros that were there.
    pub zero_pages: u64,
    /// Ranges of file mappings that became private memory.
    pub converted: usize,
    /// Pages of the working set, and the memory that they take.
    pub set_pages: usize,
    /// Bytes of memory that the set takes from others.
    pub set_bytes: usize,
    /// Bytes that it may have in memory, the page cache included.
    pub kept_bytes: usize,
    /// Bytes that are there and were left, by reason.
    pub left: BTreeMap<Reason, u64>,
    /// Its timers that are armed, if they were asked for.
    pub timers: Vec<Timer>,
}

/// How a process is taken out.
#[derive(Debug, Clone)]
pub struct How<'a> {
    /// Drops clean pages of files too; they come back from the page cache.
    pub drop_files: bool,
    /// It goes on ticking, and what its ticks touch stays.
    pub ticks: bool,
    /// Where its working set is kept.
    pub sets: Sets,
    /// The file that it is made in.
    pub path: &'a Path,
    /// Pages that are ours. The kernel may have joined them to a mapping of the program's.
    pub leave: Range<u64>,
}

/// All that is needed of a process is saved; what can be dropped.
pub(crate) struct Saved {
    pub(crate) report: Deflated,
    /// What is dropped together.
    parts: Vec<Part>,
    /// Pages in the watched ones.
    pages: u64,
}

/// Saves the memory of one process, and its set. No other thread may hold the state of `memory`;
/// its faults must be served.
///
/// # Errors
/// The kernel's or the swap file's. The process is whole all the same.
pub(crate) fn save_all(
    pid: u32,
    memory: &Memory,
    histories: &mut Histories,
    how: How<'_>,
) -> io::Result<(Saved, Option<StoredSet>)> {
    let filter = Filter {
        any: States::PRESENT | States::SWAPPED,
        report: States::PRESENT | States::SWAPPED | States::WRITTEN | States::FILE | States::ZERO | pagemap::guards(),
        ..Filter::default()
    };
    let mut report = Deflated::default();
    let maps = mappings(pid)?;
    let regions = pagemap::of(pid, pagemap::WHOLE, filter)?;
    let maps = without(maps, &how.leave);
    let kept = arguments::pages(pid)?;
    let (segments, pages) = register(memory, &maps, &regions, &kept, &mut report)?;
    fault::reach("watched")?;
    let stay = if how.ticks { memory.state().touched.stay() } else { BTreeSet::new() };
    let stored = save(pid, memory, &pages, histories, &how, &stay, &mut report)?;
    let cut = |range: Range<u64>| {
        let parts = arguments::without(&range, &kept).into_iter();
        Part { drop: parts.flat_map(|part| ticking::without(part, &stay)).collect(), watched: Some(range) }
    };
    let mut parts: Vec<_> = segments.into_iter().map(cut).filter(|part| !part.drop.is_empty()).collect();
    if how.drop_files {
        let clean = clean_files(&maps, &regions, &mut report);
        parts.extend(clean.map(|range| Part { drop: vec![range], watched: None }));
    }
    let dropped = pages.iter().filter(|page| !stay.contains(&page.address)).count() as u64;
    Ok((Saved { report, parts, pages: dropped }, stored))
}

/// A mapping of which something is dropped.
struct Part {
    drop: Vec<Range<u64>>,
    /// The whole of it, for watching a part splits it.
    watched: Option<Range<u64>>,
}

impl Saved {
    /// Drops all that is saved.
    ///
    /// # Errors
    /// See [`DropError`].
    pub(crate) fn drop_all(
        mut self,
        pid: u32,
        hand: &Hand,
        scratch: &Scratch,
        memory: &Memory,
    ) -> Result<Deflated, DropError> {
        let mut portions = portions(&self.parts).into_iter();
        let dropped = portions.try_for_each(|parts| drop_parts(pid, hand, scratch, memory, &parts));
        let mended = {
            let state = memory.state();
            mend(pid, state.map.runs(), |slot, page| state.read(slot, page)).map_err(DropError::Lost)
        };
        // Whatever became of it, it is whole, or stopped for good.
        hand.survives(true)?;
        mended?;
        dropped?;
        fault::reach("mended")?;
        self.report.dropped_pages += self.pages;
        Ok(self.report)
    }
}

/// What each call drops. A part of more ranges than one call takes is dropped by several.
fn portions(parts: &[Part]) -> Vec<Vec<Part>> {
    let (mut portions, mut room): (Vec<Vec<Part>>, _) = (Vec::new(), 0);
    for part in parts {
        for ranges in part.drop.chunks(RANGES) {
            if ranges.len() > room {
                portions.push(Vec::new());
                room = RANGES;
            }
            room -= ranges.len();
            let portion = portions.last_mut().expect("just begun, or it had room");
            portion.push(Part { drop: ranges.to_vec(), watched: part.watched.clone() });
        }
    }
    portions
}

/// Not all that was saved could be dropped.
#[derive(Debug)]
pub(crate) enum DropError {
    /// The kernel's. The process is whole all the same.
    Kept(io::Error),
    /// Pages are there that are not its own, and what it had there cannot be read: it must not run
    /// again.
    Lost(io::Error),
}

impl From<io::Error> for DropError {
    fn from(e: io::Error) -> DropError {
        DropError::Kept(e)
    }
}

/// Mappings without what lies in a range.
fn without(maps: Vec<Mapping>, range: &Range<u64>) -> Vec<Mapping> {
    let cut = |mapping: Mapping| {
        let Range { start, end } = mapping.range;
        let parts = [start..end.min(range.start), start.max(range.end)..end];
        let inside = parts.into_iter().filter(|part| part.start < part.end);
        let parts: Vec<Mapping> = inside.map(|range| Mapping { range, ..mapping.clone() }).collect();
        parts
    };
    maps.into_iter().flat_map(cut).collect()
}

/// A page that is there.
struct Page {
    address: u64,
    written: bool,
}

/// Registers all that holds or held pages, and tells those that are there and can be taken out: not
/// those of `kept`, and no guards. What cannot be registered is left.
fn register(
    memory: &Memory,
    maps: &[Mapping],
    regions: &[Region],
    kept: &Range<u64>,
    report: &mut Deflated,
) -> io::Result<(Vec<Range<u64>>, Vec<Page>)> {
    let state = memory.state();
    let (mut segments, mut pages) = (Vec::new(), Vec::new());
    for mapping in maps {
        let there = || within(&mapping.range, regions);
        let bytes = || there().map(|(range, _)| range.end - range.start).sum::<u64>();
        match mapping.kind {
            SpaceKind::Left(reason) => *report.left.entry(reason).or_default() += bytes(),
            SpaceKind::Anonymous => {
                if there().next().is_none() && state.map.runs().inside(&mapping.range).is_empty() {
                    continue;
                }
                // The whole of it: a mapping that we have split cannot be moved by mremap(2) any
                // more.
                let registered = uffd::register(memory.uffd.as_fd(), mapping.range.clone(), Catch::Both);
                if let Err(error) = registered {
                    tracing::debug!(range = ?mapping.range, %error, "a mapping cannot be watched");
                    *report.left.entry(Reason::Watched).or_default() += bytes();
                    continue;
                }
                segments.push(mapping.range.clone());
                for (range, states) in there() {
                    if states.has(States::GUARD) {
                        continue;
                    }
                    let addresses = range.step_by(PAGE).filter(|address| !kept.contains(address));
                    if states.has(States::ZERO) {
                        report.zero_pages += addresses.count() as u64;
                    } else {
                        let written = states.has(States::WRITTEN);
                        pages.extend(addresses.map(|address| Page { address, written }));
                    }
                }
            }
            SpaceKind::File | SpaceKind::Kernel => {}
        }
    }
    Ok((segments, pages))
}

/// Parts of file mappings that hold nothing but the page cache's pages.
fn clean_files<'a>(
    maps: &'a [Mapping],
    regions: &'a [Region],
    report: &mut Deflated,
) -> impl Iterator<Item = Range<u64>> + use<'a> {
    let files = maps.iter().filter(|m| m.kind == SpaceKind::File);
    let clean = files.filter(|m| {
        let mut there = within(&m.range, regions).peekable();
        there.peek().is_some() && there.all(|(_, states)| states.has(States::FILE))
    });
    report.dropped_pages += clean
        .clone()
        .flat_map(|m| within(&m.range, regions))
        .map(|(range, _)| (range.end - range.start) / PAGE64)
        .sum::<u64>();
    clean.map(|m| m.range.clone())
}

/// The set that is expected next, with room for the bytes of its pages.
struct Collected {
    kinds: Vec<String>,
    index: HashMap<u64, usize>,
    /// Address, bits of its kinds, slot once it has bytes.
    pages: Vec<(u64, u8, Option<u32>)>,
    bytes: Aligned,
}

impl Collected {
    fn new(Expectation { pages: predicted, kinds }: Expectation) -> Self {
        let bytes = Aligned::new(predicted.len() * PAGE);
        let index = predicted.iter().enumerate().map(|(index, (page, _))| (*page, index)).collect();
        let pages = predicted.into_iter().map(|(page, kinds)| (page, kinds, None)).collect();
        Self { kinds, index, pages, bytes }
    }

    fn take(&mut self, address: u64, slot: Option<u32>, bytes: &[u8]) {
        if let (Some(index), Some(slot)) = (self.index.get(&address), slot) {
            self.pages[*index].2 = Some(slot);
            self.bytes[index * PAGE..(index + 1) * PAGE].copy_from_slice(bytes);
        }
    }

    /// Those that have bytes, which are all that are no zeros.
    fn keep(self, how: Keep<'_>) -> io::Result<Option<StoredSet>> {
        let mut have: Vec<usize> = (0..self.pages.len()).filter(|index| self.pages[*index].2.is_some()).collect();
        have.chunks_mut(NEEDED_TOGETHER).for_each(|block| block.sort_unstable_by_key(|index| self.pages[*index].0));
        let mut bytes = Aligned::new(have.len() * PAGE);
        for (to, from) in have.iter().enumerate() {
            bytes[to * PAGE..(to + 1) * PAGE].copy_from_slice(&self.bytes[from * PAGE..(from + 1) * PAGE]);
        }
        let page = |index: usize| {
            let (address, kinds, slot) = self.pages[index];
            Some(SetPage { address, slot: slot?, kinds })
        };
        StoredSet::keep(have.into_iter().filter_map(page).collect(), self.kinds, bytes, how)
    }
}

/// How a set is kept, of which at most so many bytes may be in memory: it must not cost what
/// sleeping saves, so only a small set stays in memory that no other program can get.
fn share<'a>(most: usize, runs: &Runs, path: &'a Path) -> Keep<'a> {
    const LEAST_PLAIN: usize = 256 << 10;
    let out = runs.iter().map(|(range, _)| range.end - range.start).sum::<u64>() as usize;
    Keep::Within { plain: most.min(LEAST_PLAIN.max(out / 64)), cached: most, path }
}

/// Puts what was written into the swap file and says so in the slot map; predicts the working set,
/// and before that records it, unless the process has not run since its wake.
fn save(
    pid: u32,
    memory: &Memory,
    pages: &[Page],
    histories: &mut Histories,
    how: &How<'_>,
    stay: &BTreeSet<u64>,
    report: &mut Deflated,
) -> io::Result<Option<StoredSet>> {
    let mut state = memory.state();
    if let Some(record) = record(&state.since, pages).filter(|_| state.armed.is_none()) {
        histories.push(&state.since.kind, record);
    }
    let mut expected = if how.sets == Sets::None { Expectation::default() } else { histories.expect() };
    expected.pages.retain(|(page, _)| !stay.contains(page));
    let mut set = Collected::new(expected);
    let needed: Vec<&Page> = pages.iter().filter(|p| p.written || set.index.contains_key(&p.address)).collect();
    let mut buffer = Aligned::new(CHUNK * PAGE);
    let mut changes = Vec::new();
    let mut saved = Ok(());
    for chunk in needed.chunks(CHUNK) {
        let bytes = &mut buffer[..chunk.len() * PAGE];
        saved = read_pages(pid, chunk, bytes).and_then(|()| {
            let slots = place(&state.map, chunk, bytes, &mut changes, report);
            for (page, (slot, bytes)) in chunk.iter().zip(slots.iter().zip(bytes.chunks_exact(PAGE))) {
                set.take(page.address, *slot, bytes);
            }
            write_pages(state.map.swap(), chunk, &slots, bytes, report)
        });
        if saved.is_err() {
            break;
        }
    }
    let saved = saved.and_then(|()| state.map.change(&changes));
    if let Err(error) = saved {
        give_up(&state.map, &changes);
        return Err(error);
    }
    state.map.compact()?;
    // Pages that are expected and have not come back this time.
    let there: HashSet<u64> = pages.iter().map(|page| page.address).collect();
    let missing: Vec<u64> = set.index.keys().copied().filter(|page| !there.contains(page)).collect();
    let mut missing: Vec<(u32, u64)> =
        missing.into_iter().filter_map(|page| Some((state.map.runs().get(page)?.0, page))).collect();
    missing.sort_unstable();
    for run in missing.chunk_by(|a, b| a.0 + 1 == b.0).flat_map(|run| run.chunks(CHUNK)) {
        let bytes = &mut buffer[..run.len() * PAGE];
        state.read(run[0].0, bytes)?;
        for ((slot, page), bytes) in run.iter().zip(bytes.chunks_exact(PAGE)) {
            set.take(*page, Some(*slot), bytes);
        }
    }
    let stored = set.keep(match how.sets {
        Sets::Memory => Keep::Memory,
        Sets::Cached(most) => share(most, state.map.runs(), how.path),
        Sets::Disk => Keep::File(how.path),
        Sets::None => Keep::Nowhere,
    });
    // Without it the next wake takes longer, that is all.
    let stored = stored.unwrap_or_else(|error| {
        tracing::warn!(space = memory.id, %error, "a working set cannot be kept");
        None
    });
    report.set_pages = stored.as_ref().map_or(0, StoredSet::len);
    report.set_bytes = stored.as_ref().map_or(0, StoredSet::memory);
    report.kept_bytes = stored.as_ref().map_or(0, StoredSet::kept);
    (state.armed, state.ticking) = (None, None);
    state.read_ahead = false;
    state.at_hand = HashMap::new();
    state.since = Since::default();
    state.streams = Streams::default();
    Ok(stored)
}

/// Learns what a process that was woken, and now stands still, has needed since.
///
/// # Errors
/// The kernel's.
pub(crate) fn learn(pid: u32, since: &Since, histories: &mut Histories) -> io::Result<()> {
    let filter = Filter { any: States::PRESENT, report: States::PRESENT | States::WRITTEN, ..Filter::default() };
    let regions = pagemap::of(pid, pagemap::WHOLE, filter)?;
    let anonymous = mappings(pid)?.into_iter().filter(|mapping| mapping.kind == SpaceKind::Anonymous);
    let mut pages = Vec::new();
    for (range, states) in anonymous.flat_map(|mapping| within(&mapping.range, &regions).collect::<Vec<_>>()) {
        let written = states.has(States::WRITTEN);
        pages.extend(range.step_by(PAGE).map(|address| Page { address, written }));
    }
    if let Some(record) = record(since, &pages) {
        histories.push(&since.kind, record);
    }
    Ok(())
}

/// What came back since the last sleep; none if there was none.
fn record(since: &Since, pages: &[Page]) -> Option<SetRecord> {
    if since.faults.is_empty() && since.set.is_empty() {
        return None;
    }
    let there: HashSet<u64> = pages.iter().map(|page| page.address).collect();
    let mut seen = HashSet::new();
    let mut new = |list: &mut dyn Iterator<Item = u64>| -> Vec<u64> {
        list.filter(|page| there.contains(page) && seen.insert(*page)).collect()
    };
    let touched = new(&mut since.faults.iter().copied());
    let waited = new(&mut since.waited.iter().copied());
    let written = new(&mut pages.iter().filter(|page| page.written).map(|page| page.address));
    let mut others = |pages: &HashSet<u64>| {
        let mut others = new(&mut pages.iter().copied());
        others.sort_unstable();
        others
    };
    let came_along = others(&since.ahead);
    let from_set = others(&since.set);
    // Those that came along count whether or not the program wrote to them.
    let along = since.ahead.iter().filter(|page| there.contains(page) && !since.faults.contains(page)).count();
    let missed = (since.faults.len() - since.probed.min(since.faults.len()) + along, since.set.len());
    Some(SetRecord { touched, waited, written, came_along, from_set, missed })
}

fn read_pages(pid: u32, pages: &[&Page], buffer: &mut [u8]) -> io::Result<()> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for page in pages {
        match ranges.last_mut() {
            Some(last) if last.end == page.address => last.end += PAGE64,
            _ => ranges.push(page.address..page.address + PAGE64),
        }
    }
    match pagemap::read_ranges(pid, &ranges, buffer)? {
        all if all == buffer.len() => Ok(()),
        _ => Err(io::Error::from(rustix::io::Errno::FAULT)),
    }
}

/// The slot of each page, none for zeros. What was written gets a new one where the old is shared
/// with a forked process, and where the old ones lie so far apart that writing all in one go is
/// faster. New ones are changes.
fn place(
    map: &crate::slots::SlotMap,
    pages: &[&Page],
    bytes: &[u8],
    changes: &mut Vec<Change>,
    report: &mut Deflated,
) -> Vec<Option<u32>> {
    /// More writes than this are not made to leave pages where they are.
    const WRITES: usize = 4;
    let old = |page: &Page| map.runs().get(page.address).map(|(slot, _)| slot);
    let mut slots: Vec<Option<u32>> = pages.iter().map(|page| old(page)).collect();
    let mut moved = Vec::new();
    let (mut writes, mut last) = (0, None);
    for (index, (page, bytes)) in pages.iter().zip(bytes.chunks_exact(PAGE)).enumerate() {
        if !page.written {
            continue;
        }
        if is_zero(bytes) {
            report.zero_pages += 1;
            if slots[index].take().is_some() {
                changes.push(Change::Clear(page.address..page.address + PAGE64));
            }
            continue;
        }
        let sole = slots[index].filter(|slot| map.swap().sole(*slot));
        // New ones get slots that follow each other, wherever they are.
        writes += usize::from(sole.is_some() && sole != last);
        last = sole.map(|slot| slot + 1);
        moved.push((index, sole.is_none()));
    }
    if writes <= WRITES {
        moved.retain(|(_, must)| *must);
    }
    let first = map.swap().allocate(moved.len());
    for (slot, (index, _)) in (first..).zip(moved) {
        let address = pages[index].address;
        slots[index] = Some(slot);
        match changes.last_mut() {
            Some(Change::Set(range, first))
                if range.end == address && *first + ((address - range.start) / PAGE64) as u32 == slot =>
            {
                range.end += PAGE64;
            }
            _ => changes.push(Change::Set(address..address + PAGE64, slot)),
        }
    }
    slots
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks_exact(64).all(|part| part == [0; 64])
}

/// Writes pages that were written, as many at once as lie one behind the other.
fn write_pages(
    swap: &crate::swap::Swap,
    pages: &[&Page],
    slots: &[Option<u32>],
    bytes: &mut [u8],
    report: &mut Deflated,
) -> io::Result<()> {
    // First pages of the group in the buffer, which is packed as we go, and in the file.
    let (mut first, mut count, mut slot) = (0, 0, 0);
    for (index, (page, place)) in pages.iter().zip(slots).enumerate() {
        let Some(place) = place.filter(|_| page.written) else { continue };
        if count > 0 && place != slot + count as u32 {
            swap.write(slot, &bytes[first * PAGE..(first + count) * PAGE])?;
            (first, count) = (index, 0);
        }
        if count == 0 {
            (first, slot) = (index, place);
        }
        bytes.copy_within(index * PAGE..(index + 1) * PAGE, (first + count) * PAGE);
        count += 1;
        report.written_pages += 1;
    }
    if count > 0 {
        swap.write(slot, &bytes[first * PAGE..(first + count) * PAGE])?;
    }
    Ok(())
}

/// Gives back the slots of changes that were not made.
fn give_up(map: &crate::slots::SlotMap, changes: &[Change]) {
    for change in changes {
        if let Change::Set(range, slot) = change {
            map.swap().release(*slot..*slot + ((range.end - range.start) / PAGE64) as u32);
        }
    }
}

/// Drops parts by one call. From where the first is not watched any more the process does not
/// survive our death.
fn drop_parts(pid: u32, hand: &Hand, scratch: &Scratch, memory: &Memory, parts: &[Part]) -> Result<(), DropError> {
    const DONTNEED: u64 = 4;
    const SELF: u64 = -10000i64 as u64;
    let ranges: Vec<&Range<u64>> = parts.iter().flat_map(|part| &part.drop).collect();
    let list: Vec<u8> = ranges.iter().flat_map(|r| [r.start, r.end - r.start]).flat_map(u64::to_le_bytes).collect();
    write_memory(pid, scratch.at, &list)?;
    let watched = || parts.iter().filter_map(|part| part.watched.clone());
    let fd = memory.uffd.as_fd();
    // It waits for a processor before anything is unwatched.
    hand.enter(&[SELF, scratch.at, ranges.len() as u64, DONTNEED, 0])?;
    fault::reach("entered")?;
    hand.survives(false)?;
    let dropped = watched()
        .try_for_each(|range| uffd::unregister(fd, range))
        .and_then(|()| fault::reach("unwatched"))
        .and_then(|()| hand.leave(call::PROCESS_MADVISE, None));
    let dropped = dropped.and_then(|done| fault::reach("dropped").map(|()| done));
    // Whatever was dropped must be watched again before the thread runs, and what was out before
    // must be too.
    for range in watched() {
        if let Err(error) = uffd::register(fd, range.clone(), Catch::Both) {
            tracing::warn!(pid, ?range, %error, "memory that cannot be watched any more is put back");
            let state = memory.state();
            let put = put_back(pid, &[range], state.map.runs(), |slot, page| state.read(slot, page));
            put.map_err(DropError::Lost)?;
        }
    }
    let all: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    if dropped? != all {
        tracing::debug!(pid, "not all memory was dropped");
    }
    fault::reach("watched-again")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that went on elsewhere and wrote there is known to have: what came along with its
    /// faults is no less of that.
    #[test]
    fn what_came_along_counts_as_missed_whether_written_or_not() {
        let page = |n: u64| n * PAGE as u64;
        let since = Since {
            faults: vec![page(100), page(132)],
            ahead: (101..132).chain(133..164).map(page).collect(),
            set: (0..100).map(page).collect(),
            ..Since::default()
        };
        for written in [false, true] {
            let pages: Vec<Page> = (0..164).map(|n| Page { address: page(n), written: written && n >= 100 }).collect();
            let record = record(&since, &pages).unwrap();
            assert_eq!(record.missed, (64, 100), "written: {written}");
            assert_eq!(record.from_set.len(), 100);
        }
    }

    #[test]
    fn no_call_drops_more_than_it_takes() {
        let part = |start: u64, count: u64| Part {
            drop: (0..count).map(|n| start + 2 * n..start + 2 * n + 1).collect(),
            watched: Some(start..start + 2 * count),
        };
        let most = RANGES as u64;
        let parts = [part(0, most - 1), part(10_000, 2), part(20_000, 2 * most + 1), part(40_000, 0)];
        let portions = portions(&parts);
        let counts: Vec<usize> = portions.iter().map(|parts| parts.iter().map(|part| part.drop.len()).sum()).collect();
        assert_eq!(counts, [RANGES - 1, 2, RANGES, RANGES, 1]);
        let all = |parts: &[Part]| parts.iter().flat_map(|part| part.drop.clone()).collect::<Vec<_>>();
        assert_eq!(portions.iter().flat_map(|parts| all(parts)).collect::<Vec<_>>(), all(&parts));
    }

    #[test]
    fn what_is_ours_is_cut_out_of_what_it_was_joined_to() {
        let map = |range: Range<u64>| Mapping { range, protection: 3, kind: SpaceKind::Anonymous };
        let ranges = |maps: Vec<Mapping>| maps.into_iter().map(|m| m.range).collect::<Vec<_>>();
        let maps = vec![map(0..10), map(20..40), map(50..60)];
        assert_eq!(ranges(without(maps.clone(), &(20..25))), [0..10, 25..40, 50..60]);
        assert_eq!(ranges(without(maps.clone(), &(35..40))), [0..10, 20..35, 50..60]);
        assert_eq!(ranges(without(maps.clone(), &(25..30))), [0..10, 20..25, 30..40, 50..60]);
        assert_eq!(ranges(without(maps.clone(), &(50..60))), [0..10, 20..40]);
        assert_eq!(ranges(without(maps, &(10..20))), [0..10, 20..40, 50..60]);
    }
}
