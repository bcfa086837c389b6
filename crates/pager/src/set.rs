//! Working sets: which pages came back between two sleeps, which are expected the next time, and their bytes.
//!
//! A page that was installed ahead leaves no trace of whether it was used (there is no cheap accessed bit), unless it
//! was written. So that pages that are not needed fall out, they are held back now and then: their bytes are at hand, a fault
//! of some microseconds brings them, and only those that somebody touches stay known. One that nobody was ever seen to
//! touch (it came as another's neighbour) is held back in one of [`History::FIRST_TURNS`] sets, any other in one of
//! [`History::TURNS`]. And when the program has gone on to something else (at least half as much came by faults as the set
//! had), all that was installed and not seen to be touched is held back.
//!
//! What is needed depends on what a wake is for: each port, timers and calls have a history of their own ([`Histories`]). Their
//! sets are kept as one, each page with the kinds of wakes that it is installed at; at others it is held back.
//!
//! Prediction is pure. [`Stored`] owns the bytes, each page with the slot that it had: whoever installs it leaves out
//! what the slot map says otherwise by then. A set is a hint: losing it loses time only.

use crate::source::PageSource;
use crate::swap::{Aligned, PAGE, open_direct};
use kip_snapshot::pages::{Expected, WorkingSet};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

/// What came back between two sleeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// Pages that were touched for certain, by faults in their order, then those that were written.
    pub touched: Vec<u64>,
    /// Pages that came along with these, and may be of no use.
    pub came_along: Vec<u64>,
    /// Pages of the set that was installed, which may have been of no use.
    pub from_set: Vec<u64>,
    /// How many came by faults that the set did not have, and how many it had.
    pub missed: (usize, usize),
}

impl Record {
    fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        [&self.touched, &self.came_along, &self.from_set].into_iter().flatten().copied()
    }

    /// Whether so much came that was not in the set that this was of another use.
    fn is_elsewhere(&self) -> bool {
        self.missed.1 > 0 && self.missed.0 * 2 >= self.missed.1
    }
}

/// What is expected next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Those first that were touched first the last time.
    pub pages: Vec<u64>,
    /// Those of them that are kept at hand and not installed.
    pub held_back: HashSet<u64>,
}

/// How a set is predicted from the last records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Predictor {
    /// What the last one had.
    LastUse,
    /// What at least `k` of the last `n` had.
    KOfN {
        /// At least.
        k: usize,
        /// Of these.
        n: usize,
    },
    /// What any of the last `n` had.
    Union {
        /// Of these.
        n: usize,
    },
}

/// The last records of one address space, and what to expect from them.
#[derive(Debug)]
pub struct History {
    records: VecDeque<Record>,
    predictor: Predictor,
    turn: u64,
    /// Pages of the records that were once touched for certain.
    confirmed: HashSet<u64>,
}

impl History {
    /// The most pages of a set: a program that looked at all it has shall not wait for all of it the next time. 16 MiB.
    pub const MOST: usize = 4096;
    /// A page that was not seen to be touched the last time is held back in one of this many sets.
    pub const TURNS: u64 = 32;
    /// One that never was, in one of so many.
    pub const FIRST_TURNS: u64 = 4;

    /// An empty one.
    pub fn new(predictor: Predictor) -> Self {
        Self { records: VecDeque::new(), predictor, turn: 0, confirmed: HashSet::new() }
    }

    /// One that goes on after its process was parked with this set.
    pub fn resumed(predictor: Predictor, set: &WorkingSet) -> Self {
        let last = Record { from_set: set.pages.iter().map(|page| page.address).collect(), ..Record::default() };
        let confirmed = set.pages.iter().filter(|page| page.confirmed).map(|page| page.address).collect();
        Self { records: VecDeque::from([last]), turn: set.turn, confirmed, ..Self::new(predictor) }
    }

    /// What is expected next, with what is known of it: for [`History::resumed`].
    pub fn told(&self, kind: &str) -> WorkingSet {
        let Prediction { mut pages, mut held_back } = self.predict();
        // What was touched the last time, and not yet often enough, is at hand.
        let known: HashSet<u64> = pages.iter().copied().collect();
        for page in self.records.front().map_or(&[][..], |last| &last.touched) {
            if pages.len() < Self::MOST && !known.contains(page) {
                pages.push(*page);
                held_back.insert(*page);
            }
        }
        let tell = |page: &u64| Expected {
            address: *page,
            confirmed: self.confirmed.contains(page),
            held_back: held_back.contains(page),
        };
        WorkingSet { kind: kind.to_owned(), turn: self.turn, pages: pages.iter().map(tell).collect() }
    }

    fn depth(&self) -> usize {
        match self.predictor {
            Predictor::LastUse => 1,
            Predictor::KOfN { n, .. } | Predictor::Union { n } => n.max(1),
        }
    }

    /// Adds what came back since the last sleep.
    pub fn push(&mut self, record: Record) {
        self.records.push_front(record);
        self.records.truncate(self.depth());
        self.turn += 1;
        let known: HashSet<u64> = self.records.iter().flat_map(Record::pages).collect();
        self.confirmed.extend(self.records[0].touched.iter());
        self.confirmed.retain(|page| known.contains(page));
    }

    /// Pages that are expected next.
    pub fn predict(&self) -> Prediction {
        let least = match self.predictor {
            Predictor::KOfN { k, .. } => k.max(1).min(self.records.len().max(1)),
            _ => 1,
        };
        let mut seen: HashMap<u64, usize> = HashMap::new();
        let mut order = Vec::new();
        for page in self.records.iter().flat_map(Record::pages) {
            let count = seen.entry(page).or_insert(0);
            *count += 1;
            if *count == 1 {
                order.push(page);
            }
        }
        order.retain(|page| seen[page] >= least);
        order.truncate(Self::MOST);
        let Some(last) = self.records.front() else { return Prediction::default() };
        let certain: HashSet<u64> = last.touched.iter().copied().collect();
        let doubted: HashSet<u64> =
            if last.is_elsewhere() { last.from_set.iter().copied().collect() } else { HashSet::new() };
        let held_back = order
            .iter()
            .copied()
            .filter(|page| !certain.contains(page) && (doubted.contains(page) || self.is_due(*page)));
        Prediction { held_back: held_back.collect(), pages: order }
    }

    fn is_due(&self, page: u64) -> bool {
        let mixed = (page / PAGE as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let turns = if self.confirmed.contains(&page) { Self::TURNS } else { Self::FIRST_TURNS };
        mixed % turns == self.turn % turns
    }
}

/// The histories of one address space, by what it was woken for.
#[derive(Debug)]
pub struct Histories {
    predictor: Predictor,
    /// The newest first.
    kinds: Vec<(String, History)>,
}

/// The pages that are expected next, those first that are needed first: each with a bit for every kind of wake that it is
/// installed at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expectation {
    /// The kinds.
    pub kinds: Vec<String>,
    /// Address and bits of each page.
    pub pages: Vec<(u64, u8)>,
}

impl Expectation {
    fn of(sets: &[WorkingSet]) -> Self {
        let mut found = Self { kinds: sets.iter().map(|set| set.kind.clone()).collect(), pages: Vec::new() };
        let mut places = HashMap::new();
        for (number, set) in sets.iter().enumerate() {
            for page in &set.pages {
                let place = *places.entry(page.address).or_insert_with(|| {
                    found.pages.push((page.address, 0));
                    found.pages.len() - 1
                });
                found.pages[place].1 |= u8::from(!page.held_back) << number;
            }
        }
        found
    }
}

impl Histories {
    /// Kinds that are kept apart; the one that has not come for longest makes place.
    pub const MOST: usize = 8;

    /// None.
    pub fn new(predictor: Predictor) -> Self {
        Self { predictor, kinds: Vec::new() }
    }

    /// Those of a process that was parked with these sets.
    pub fn resumed(predictor: Predictor, sets: &[WorkingSet]) -> Self {
        let resume = |set: &WorkingSet| (set.kind.clone(), History::resumed(predictor, set));
        Self { predictor, kinds: sets.iter().take(Self::MOST).map(resume).collect() }
    }

    /// Adds what came back since a wake of this kind.
    pub fn push(&mut self, kind: &str, record: Record) {
        let known = self.kinds.iter().position(|(known, _)| known == kind).map(|place| self.kinds.remove(place));
        let (kind, mut history) = known.unwrap_or_else(|| (kind.to_owned(), History::new(self.predictor)));
        history.push(record);
        self.kinds.insert(0, (kind, history));
        self.kinds.truncate(Self::MOST);
    }

    /// The sets of all kinds.
    pub fn told(&self) -> Vec<WorkingSet> {
        self.kinds.iter().map(|(kind, history)| history.told(kind)).collect()
    }

    /// What is expected next.
    pub fn expect(&self) -> Expectation {
        Expectation::of(&self.told())
    }
}

/// Where the bytes of a set are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep<'a> {
    /// In memory as they are.
    Memory,
    /// In memory if that takes at most so many bytes: small ones as they are, while half of these are left after that, others
    /// compressed. Else in this file, which is made anew.
    Packed(usize, &'a Path),
    /// In this file, which is made anew.
    File(&'a Path),
    /// Nowhere: every page comes by a fault.
    Nowhere,
}

#[derive(Debug)]
enum Data {
    Plain(Aligned),
    /// Blocks of [`BLOCK`] pages, each by itself.
    Packed(Vec<Box<[u8]>>),
    /// From this place on.
    File(Arc<File>, u64),
    /// From this slot of a source on.
    Source(Arc<dyn PageSource>, u32),
}

/// Pages that are packed together: they are unpacked into memory that is still in the processor's cache when the kernel
/// copies it.
const BLOCK: usize = 64;

/// At most so many pages are a small set.
const PLAIN: usize = 192;

/// Fewer pages are not worth another thread.
pub const LEAST_PART: usize = 5 * BLOCK;

fn packed(bytes: &[u8]) -> Vec<Box<[u8]>> {
    bytes.chunks(BLOCK * PAGE).map(|block| lz4_flex::block::compress(block).into_boxed_slice()).collect()
}

fn written(path: &Path, bytes: &Aligned) -> io::Result<File> {
    let file = open_direct(path, true)?;
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

/// A set with its bytes.
#[derive(Debug)]
pub struct Stored {
    /// By address.
    pub pages: Vec<Page>,
    kinds: Arc<[String]>,
    data: Data,
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
        let data = match how {
            Keep::Nowhere => return Ok(None),
            Keep::Memory => Data::Plain(bytes),
            // It is faster, and there is room.
            Keep::Packed(most, _) if pages.len() <= PLAIN && bytes.len() <= most / 2 => Data::Plain(bytes),
            Keep::Packed(most, path) => {
                let blocks = packed(&bytes);
                match blocks.iter().map(|block| block.len()).sum::<usize>() {
                    length if length <= most => Data::Packed(blocks),
                    _ => Data::File(Arc::new(written(path, &bytes)?), 0),
                }
            }
            Keep::File(path) => Data::File(Arc::new(written(path, &bytes)?), 0),
        };
        Ok(Some(Self { pages, kinds: kinds.into(), data }))
    }

    /// The sets that a process was parked with. The bytes lie one behind the other in a source, by address, from `first` on;
    /// `slot` tells the slot that a page has now, if it can be missing.
    pub fn parked(
        sets: &[WorkingSet],
        slot: impl Fn(u64) -> Option<u32>,
        source: Arc<dyn PageSource>,
        first: u32,
    ) -> Option<Self> {
        let Expectation { kinds, mut pages } = Expectation::of(sets);
        pages.sort_unstable();
        // A page that cannot be missing has no slot, and this is that of no page.
        let page = |(address, kinds)| Page { address, slot: slot(address).unwrap_or(u32::MAX), kinds };
        let pages: Vec<Page> = pages.into_iter().map(page).collect();
        (!pages.is_empty()).then(|| Self { pages, kinds: kinds.into(), data: Data::Source(source, first) })
    }

    /// The bits of a kind of wake; of one that is not known all, so that what any kind needs is installed.
    pub fn bits(&self, kind: &str) -> u8 {
        self.kinds.iter().position(|known| known == kind).map_or(u8::MAX, |place| 1 << place)
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> usize {
        let data = match &self.data {
            Data::Plain(bytes) => bytes.len(),
            Data::Packed(blocks) => blocks.iter().map(|block| block.len()).sum(),
            Data::File(..) | Data::Source(..) => 0,
        };
        data + self.pages.len() * size_of::<Page>()
    }

    /// The same in about equal parts, at most `most` of at least [`LEAST_PART`] pages each.
    pub fn split(mut self, most: usize) -> Vec<Stored> {
        let parts = (self.pages.len() / LEAST_PART).clamp(1, most.max(1));
        // Whole blocks.
        let pages = self.pages.len().div_ceil(parts).next_multiple_of(BLOCK);
        let mut found = Vec::new();
        while self.pages.len() > pages && !matches!(self.data, Data::Plain(_)) {
            let rest = self.pages.split_off(pages);
            let data = match &mut self.data {
                Data::Packed(blocks) => Data::Packed(blocks.split_off(pages / BLOCK)),
                Data::File(file, from) => Data::File(Arc::clone(file), *from + (pages * PAGE) as u64),
                Data::Source(source, slot) => Data::Source(Arc::clone(source), *slot + pages as u32),
                Data::Plain(_) => unreachable!("it is not split"),
            };
            let rest = Stored { pages: rest, kinds: Arc::clone(&self.kinds), data };
            found.push(std::mem::replace(&mut self, rest));
        }
        found.push(self);
        found
    }

    /// Gives the pages with their bytes to `take`, in parts, until it says that it wants no more.
    ///
    /// # Errors
    /// The file system's; `InvalidData`; those of `take`.
    pub fn each(self, mut take: impl FnMut(&[Page], &[u8]) -> io::Result<bool>) -> io::Result<()> {
        match self.data {
            Data::Plain(bytes) => take(&self.pages, &bytes).map(drop),
            Data::Packed(blocks) => {
                let mut bytes = Aligned::new(BLOCK.min(self.pages.len()) * PAGE);
                for (pages, block) in self.pages.chunks(BLOCK).zip(blocks) {
                    let bytes = &mut bytes[..pages.len() * PAGE];
                    let shrunk = |_| io::Error::new(io::ErrorKind::InvalidData, "a working set is damaged");
                    let got = lz4_flex::block::decompress_into(&block, bytes).map_err(shrunk)?;
                    if got != bytes.len() {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, "a working set has shrunk"));
                    }
                    if !take(pages, bytes)? {
                        break;
                    }
                }
                Ok(())
            }
            // One large read: a disk takes about as long for it as for a small one.
            Data::File(file, from) => {
                let mut bytes = Aligned::new(self.pages.len() * PAGE);
                file.read_exact_at(&mut bytes, from)?;
                take(&self.pages, &bytes).map(drop)
            }
            Data::Source(source, slot) => {
                let mut bytes = Aligned::new(BLOCK.min(self.pages.len()) * PAGE);
                for (index, pages) in self.pages.chunks(BLOCK).enumerate() {
                    let bytes = &mut bytes[..pages.len() * PAGE];
                    source.read(slot + (index * BLOCK) as u32, bytes)?;
                    if !take(pages, bytes)? {
                        break;
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(list: &[u64]) -> Vec<u64> {
        list.iter().map(|p| p * PAGE as u64).collect()
    }

    fn history(predictor: Predictor, records: &[&[u64]]) -> Vec<u64> {
        let mut history = History::new(predictor);
        records.iter().for_each(|r| history.push(Record { touched: pages(r), ..Record::default() }));
        history.predict().pages
    }

    /// Uses a set as a program does that needs the pages `useful`.
    fn used(history: &mut History, useful: &[u64]) {
        let Prediction { pages, held_back } = history.predict();
        let needs = |page: &&u64| useful.contains(page) && (held_back.contains(page) || !pages.contains(page));
        let touched = useful.iter().filter(needs).copied().collect();
        let from_set = pages.into_iter().filter(|page| !held_back.contains(page)).collect();
        history.push(Record { touched, from_set, ..Record::default() });
    }

    #[test]
    fn predictors_count_records_and_keep_the_order() {
        let records: [&[u64]; 3] = [&[1, 2], &[3, 2], &[4, 2, 3]];
        assert_eq!(history(Predictor::LastUse, &records), pages(&[4, 2, 3]));
        assert_eq!(history(Predictor::KOfN { k: 2, n: 3 }, &records), pages(&[2, 3]));
        assert_eq!(history(Predictor::Union { n: 2 }, &records), pages(&[4, 2, 3]));
        assert_eq!(history(Predictor::Union { n: 3 }, &records), pages(&[4, 2, 3, 1]));
        assert_eq!(history(Predictor::KOfN { k: 2, n: 3 }, &records[..1]), pages(&[1, 2]), "one record is all we know");
        assert_eq!(history(Predictor::LastUse, &[]), Vec::<u64>::new());
    }

    #[test]
    fn pages_of_no_use_fall_out_and_others_stay() {
        let mut history = History::new(Predictor::LastUse);
        let (useful, useless) = (pages(&(0..50).collect::<Vec<_>>()), pages(&(100..150).collect::<Vec<_>>()));
        history.push(Record { touched: useful.iter().chain(&useless).copied().collect(), ..Record::default() });
        (0..=History::TURNS).for_each(|_| used(&mut history, &useful));
        let set = history.predict().pages;
        assert!(useless.iter().all(|p| !set.contains(p)));
        assert!(useful.iter().all(|p| set.contains(p)));
    }

    #[test]
    fn neighbours_that_nobody_touches_fall_out_soon() {
        let mut history = History::new(Predictor::LastUse);
        let (useful, neighbours) = (pages(&(0..50).collect::<Vec<_>>()), pages(&(100..400).collect::<Vec<_>>()));
        history.push(Record { touched: useful.clone(), came_along: neighbours.clone(), ..Record::default() });
        (0..History::FIRST_TURNS).for_each(|_| used(&mut history, &useful));
        let set = history.predict();
        assert!(neighbours.iter().all(|p| !set.pages.contains(p)));
        assert!(useful.iter().all(|p| set.pages.contains(p)) && set.held_back.len() < 10);
    }

    #[test]
    fn a_set_of_another_use_is_held_back_at_once() {
        let mut history = History::new(Predictor::LastUse);
        let (old, new) = (pages(&(0..50).collect::<Vec<_>>()), pages(&(100..150).collect::<Vec<_>>()));
        history.push(Record { touched: old.clone(), ..Record::default() });
        let (touched, came_along, from_set) = (new[..4].to_vec(), new[4..].to_vec(), old.clone());
        history.push(Record { touched, came_along, from_set, missed: (50, 50) });
        let set = history.predict();
        assert!(old.iter().all(|p| set.held_back.contains(p)));
        assert!(new[..4].iter().all(|p| set.pages.contains(p) && !set.held_back.contains(p)));
        history.push(Record {
            touched: old[..4].to_vec(),
            from_set: new.clone(),
            missed: (4, 50),
            ..Record::default()
        });
        assert!(history.predict().held_back.len() < 25, "a little that is new says nothing");
    }

    #[test]
    fn what_is_known_of_a_set_outlives_parking() {
        let mut history = History::new(Predictor::LastUse);
        history.push(Record { touched: pages(&[1, 2]), came_along: pages(&[3]), ..Record::default() });
        let set = history.told("tcp 80");
        assert_eq!(set.pages.iter().map(|p| p.confirmed).collect::<Vec<_>>(), [true, true, false]);
        let again = History::resumed(Predictor::LastUse, &set);
        assert_eq!((again.turn, &again.confirmed), (history.turn, &history.confirmed));
        assert_eq!(again.predict().pages, history.predict().pages);
    }

    #[test]
    fn what_was_touched_too_rarely_is_at_hand() {
        let mut history = History::new(Predictor::KOfN { k: 2, n: 3 });
        let touched = |list: &[u64]| Record { touched: pages(list), ..Record::default() };
        history.push(touched(&[1, 2]));
        history.push(touched(&[2, 3]));
        let told = |history: &History| -> Vec<(u64, bool)> {
            history.told("").pages.iter().map(|p| (p.address / PAGE as u64, p.held_back)).collect()
        };
        assert_eq!(told(&history), [(2, false), (3, true)]);
        let mut again = History::resumed(Predictor::KOfN { k: 2, n: 3 }, &history.told(""));
        again.push(Record { touched: pages(&[3]), from_set: pages(&[2]), ..Record::default() });
        assert_eq!(told(&again), [(3, false), (2, false)], "it is learned although it was parked meanwhile");
    }

    #[test]
    fn each_kind_of_wake_has_a_set_of_its_own() {
        let mut histories = Histories::new(Predictor::LastUse);
        let touched = |list: &[u64]| Record { touched: pages(list), ..Record::default() };
        histories.push("tcp 80", touched(&[1, 2]));
        histories.push("timer", touched(&[2, 3]));
        let Expectation { kinds, pages: expected } = histories.expect();
        assert_eq!(kinds, ["timer", "tcp 80"]);
        let bits: Vec<(u64, u8)> = expected.iter().map(|(page, bits)| (page / PAGE as u64, *bits)).collect();
        assert_eq!(bits, [(2, 0b11), (3, 0b01), (1, 0b10)]);
        histories.push("tcp 80", touched(&[4]));
        assert_eq!(histories.expect().kinds, ["tcp 80", "timer"], "the newest first");
        (0..20).for_each(|n| histories.push(&format!("tcp {n}"), touched(&[n])));
        assert_eq!(histories.expect().kinds.len(), Histories::MOST);
        let list = vec![Page { address: 0, slot: 0, kinds: 1 }];
        let stored =
            Stored::keep(list, vec!["a".into(), "b".into()], Aligned::new(PAGE), Keep::Memory).unwrap().unwrap();
        assert_eq!((stored.bits("a"), stored.bits("b"), stored.bits("c")), (1, 2, u8::MAX));
    }

    #[test]
    fn a_set_is_split_into_whole_parts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("set");
        let count = 5 * LEAST_PART / 2 + 7;
        for how in [Keep::Packed(usize::MAX, &path), Keep::File(&path), Keep::Memory] {
            let mut bytes = Aligned::new(count * PAGE);
            bytes.chunks_exact_mut(PAGE).enumerate().for_each(|(page, bytes)| bytes.fill(page as u8));
            let page = |n: u64| Page { address: n * PAGE as u64, slot: n as u32, kinds: 1 };
            let list: Vec<Page> = (0..count as u64).map(page).collect();
            let parts = Stored::keep(list.clone(), Vec::new(), bytes, how).unwrap().unwrap().split(2);
            assert_eq!(parts.len(), if how == Keep::Memory { 1 } else { 2 });
            let mut got = Vec::new();
            for part in parts {
                part.each(|pages, bytes| {
                    for (page, bytes) in pages.iter().zip(bytes.chunks_exact(PAGE)) {
                        assert!(bytes.iter().all(|b| *b == page.slot as u8));
                        got.push(*page);
                    }
                    Ok(true)
                })
                .unwrap();
            }
            assert_eq!(got, list);
        }
    }

    #[test]
    fn bytes_come_back_from_everywhere() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("set");
        for how in [Keep::Memory, Keep::Packed(usize::MAX, &path), Keep::Packed(10, &path), Keep::File(&path)] {
            let mut bytes = Aligned::new(3 * PAGE);
            bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i / 1000) as u8);
            let expected = bytes.to_vec();
            let list =
                [(0, 5), (1, 9), (9, 1)].map(|(page, slot)| Page { address: page * PAGE as u64, slot, kinds: 1 });
            let list = list.to_vec();
            let (mut pages, mut got) = (Vec::new(), Vec::new());
            let stored = Stored::keep(list.clone(), Vec::new(), bytes, how).unwrap().unwrap();
            let take = |some: &[Page], bytes: &[u8]| {
                pages.extend_from_slice(some);
                got.extend_from_slice(bytes);
                Ok(true)
            };
            stored.each(take).unwrap();
            assert_eq!((pages, got), (list, expected));
        }
    }
}
