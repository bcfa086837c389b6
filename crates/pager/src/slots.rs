//! The slot map of one address space: what a page holds **if it is missing**. Its slot in the swap
//! file, or, where the map has nothing, zeros.
//!
//! Said this way the map needs no change when a page comes back, is written or is mapped afresh;
//! only when pages are about to be dropped, and when the program moves, gives up or forks what may
//! be missing. Serving faults writes nothing.
//!
//! On disk a map is a file: a page of header (magic number, host pid or 0), the page into which the
//! kernel writes the events of the userfaultfd ([`kip_sys::uffd::EventPage`]), then a log of
//! changes, each with a checksum. The order of writes makes SIGKILL safe at any moment:
//!
//! * dropping: pages into slots, then the changes into the log, then the pages go. Before the last
//!   step every page is still there, so that the map, however much of it was written, says nothing
//!   that counts;
//! * an event: the kernel puts it into the event page in the same call that lets the program go on,
//!   then its change goes into the log under the event's number, then the event is marked as done.
//!   A pager that opens the map does the events that were not done, and their numbers keep it from
//!   doing one twice;
//! * a slot is given up after the change that did so is in the log.
//!
//! Nothing is synced: the processes whose memory this is do not outlive the machine. A torn record
//! at the end of the log is cut off.

use crate::spares::{Spare, Spares};
use crate::swap::{PAGE, Swap};
use kip_sys::uffd::{EVENT_PAGE, EventPage, Left};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PAGE64: u64 = PAGE as u64;
const MAGIC: u64 = 0x3130_7061_6d70_696b;
const HEADER: u64 = (PAGE + EVENT_PAGE) as u64;
/// Where the header has the pid.
const PID: u64 = 8;
const RECORD: usize = 40;

/// Address ranges in slots that follow each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runs(BTreeMap<u64, (u64, u32)>);

impl Runs {
    /// The slot of a page, and up to which address the slots behind it follow.
    pub fn get(&self, address: u64) -> Option<(u32, u64)> {
        let (start, (end, slot)) = self.0.range(..=address).next_back()?;
        (address < *end).then(|| (slot + ((address - start) / PAGE64) as u32, *end))
    }

    /// At most so many pages up to the one at `address`, whose slots follow each other: address and
    /// slot of the first, and how many. None if that page has no slot.
    pub fn before(&self, address: u64, most: usize) -> Option<(u64, u32, usize)> {
        let (start, (end, slot)) = self.0.range(..=address).next_back()?;
        let there = (address < *end).then(|| (address - start) / PAGE64)?;
        let before = there.min(most as u64 - 1);
        Some((address - before * PAGE64, slot + (there - before) as u32, before as usize + 1))
    }

    /// All ranges with the slots of their first pages, by address.
    pub fn iter(&self) -> impl Iterator<Item = (Range<u64>, u32)> + '_ {
        self.0.iter().map(|(start, (end, slot))| (*start..*end, *slot))
    }

    /// Where the first range at or behind `address` begins.
    pub fn next_from(&self, address: u64) -> Option<u64> {
        self.0.range(address..).next().map(|(start, _)| *start)
    }

    /// The parts of a range that have slots.
    pub fn inside(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let first = self.0.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        let met =
            self.0.range(first..range.end).map(|(start, (end, _))| *start.max(&range.start)..*end.min(&range.end));
        met.filter(|part| part.start < part.end).collect()
    }

    /// Makes a change without counting references to slots.
    pub fn alter(&mut self, change: &Change) {
        self.apply(change);
    }

    /// Pages in all.
    pub fn pages(&self) -> u64 {
        self.iter().map(|(range, _)| (range.end - range.start) / PAGE64).sum()
    }

    /// Cuts a range out; returns what was in it.
    fn cut(&mut self, range: Range<u64>) -> Vec<(Range<u64>, u32)> {
        let first = self.0.range(..range.start).next_back().filter(|(_, (end, _))| *end > range.start);
        let from = first.map_or(range.start, |(start, _)| *start);
        let met: Vec<_> = self.0.range(from..range.end).map(|(s, (e, slot))| (*s..*e, *slot)).collect();
        let mut inside = Vec::with_capacity(met.len());
        for (run, slot) in met {
            self.0.remove(&run.start);
            let (start, end) = (run.start.max(range.start), run.end.min(range.end));
            let at = |address: u64| slot + ((address - run.start) / PAGE64) as u32;
            if run.start < start {
                self.0.insert(run.start, (start, slot));
            }
            if end < run.end {
                self.0.insert(end, (run.end, at(end)));
            }
            inside.push((start..end, at(start)));
        }
        inside
    }

    fn put(&mut self, mut range: Range<u64>, mut slot: u32) {
        if let Some((start, (end, first))) = self.0.range(..range.start).next_back().map(|(s, r)| (*s, *r)) {
            let follows = end == range.start && u64::from(first) + (end - start) / PAGE64 == u64::from(slot);
            if follows {
                (range.start, slot) = (start, first);
            }
        }
        self.0.insert(range.start, (range.end, slot));
    }

    fn apply(&mut self, change: &Change) -> Vec<(Range<u64>, u32)> {
        match change {
            Change::Set(range, slot) => {
                let old = self.cut(range.clone());
                self.put(range.clone(), *slot);
                old
            }
            Change::Clear(range) => self.cut(range.clone()),
            Change::Move { from, to, length } => {
                let moved = self.cut(*from..from + length);
                let old = self.cut(*to..to + length);
                for (range, slot) in moved {
                    self.put(range.start - from + to..range.end - from + to, slot);
                }
                old
            }
        }
    }
}

/// A change of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A range lies in slots from this one on.
    Set(Range<u64>, u32),
    /// A range holds zeros.
    Clear(Range<u64>),
    /// Pages have moved; what was there is gone.
    Move {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes.
        length: u64,
    },
}

impl Change {
    fn encode(&self, number: u64) -> [u8; RECORD] {
        let (kind, a, b, c) = match self {
            Self::Set(range, slot) => (1u32, range.start, range.end, u64::from(*slot)),
            Self::Clear(range) => (2, range.start, range.end, 0),
            Self::Move { from, to, length } => (3, *from, *to, *length),
        };
        let mut record = [0; RECORD];
        record[4..8].copy_from_slice(&kind.to_le_bytes());
        for (index, word) in [number, a, b, c].into_iter().enumerate() {
            record[8 + index * 8..16 + index * 8].copy_from_slice(&word.to_le_bytes());
        }
        let sum = crc32fast::hash(&record[4..]);
        record[..4].copy_from_slice(&sum.to_le_bytes());
        record
    }

    fn decode(record: &[u8]) -> Option<(u64, Self)> {
        let word = |at: usize| Some(u64::from_le_bytes(record.get(at..at + 8)?.try_into().ok()?));
        let first = word(0)?;
        if crc32fast::hash(record.get(4..RECORD)?) != first as u32 {
            return None;
        }
        let (number, a, b, c) = (word(8)?, word(16)?, word(24)?, word(32)?);
        let change = match first >> 32 {
            1 => Self::Set(a..b, u32::try_from(c).ok()?),
            2 => Self::Clear(a..b),
            3 => Self::Move { from: a, to: b, length: c },
            _ => return None,
        };
        Some((number, change))
    }
}

/// The slot map of one address space, on disk.
#[derive(Debug)]
pub struct SlotMap {
    runs: Runs,
    swap: Arc<Swap>,
    log: File,
    end: u64,
    /// Host pid of the process, if it is known.
    pid: Option<u32>,
    /// Where the kernel puts the events.
    pub(crate) events: EventPage,
    /// The number of the last event that is in the log.
    last: u64,
    /// Dropped after all that uses the file.
    file: Spare,
}

fn open(path: &Path, new: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(new).truncate(new).mode(0o600).open(path)
}

/// The first map below this directory of procs that this program cannot read, if there is one.
pub(crate) fn unreadable(procs: &Path) -> Option<PathBuf> {
    let below =
        |directory: PathBuf| std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let files = below(procs.to_owned()).flat_map(|proc| below(proc.join("pager")));
    let is_other = |map: &PathBuf| {
        let mut magic = [0; 8];
        let read = File::open(map).and_then(|file| file.read_exact_at(&mut magic, 0));
        read.is_ok() && magic != MAGIC.to_le_bytes()
    };
    files.filter(|file| file.extension().is_some_and(|extension| extension == "map")).find(is_other)
}

impl SlotMap {
    /// A new map, of a process with this host pid if that is known. A pager adopts it once its
    /// userfaultfd is held, too: until then it may be half written.
    ///
    /// # Errors
    /// The file system's.
    pub fn create(
        path: &Path,
        swap: Arc<Swap>,
        runs: Runs,
        pid: Option<u32>,
        spares: &Arc<Spares>,
    ) -> io::Result<Self> {
        // A spare file that the pager of before had no time to empty is emptied here.
        spares.take(path);
        let log = open(path, true)?;
        let mut head = [0; 12];
        head[..8].copy_from_slice(&MAGIC.to_le_bytes());
        head[PID as usize..].copy_from_slice(&pid.unwrap_or(0).to_le_bytes());
        let records: Vec<u8> = runs.iter().flat_map(|(range, slot)| Change::Set(range, slot).encode(0)).collect();
        // The head first: without it a longer file would be one of another form.
        let written = log.write_all_at(&head, 0).and_then(|()| log.set_len(HEADER));
        let written = written.and_then(|()| log.write_all_at(&records, HEADER));
        let events = written.and_then(|()| EventPage::of_file(log.as_fd(), PAGE64));
        let events = events.inspect_err(|_| drop(std::fs::remove_file(path)))?;
        for (range, slot) in runs.iter() {
            swap.hold(slot..slot + ((range.end - range.start) / PAGE64) as u32);
        }
        let (end, file) = (HEADER + records.len() as u64, Spare::new(path, Arc::clone(spares)));
        Ok(Self { runs, swap, log, end, pid, events, last: 0, file })
    }

    /// The map of a pager that has died, without what is left in its event page
    /// ([`SlotMap::take_left`]).
    ///
    /// # Errors
    /// The file system's; `InvalidData` for a file that is none.
    pub fn open(path: &Path, swap: Arc<Swap>, spares: &Arc<Spares>) -> io::Result<Self> {
        let log = open(path, false)?;
        let mut bytes = vec![0; log.metadata()?.len() as usize];
        log.read_exact_at(&mut bytes, 0)?;
        if bytes.len() < HEADER as usize || bytes[..8] != MAGIC.to_le_bytes() {
            let what = format!("{} is not a slot map", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let (mut runs, mut last, mut end) = (Runs::default(), 0, HEADER);
        for record in bytes[HEADER as usize..].chunks_exact(RECORD) {
            let Some((number, change)) = Change::decode(record) else { break };
            runs.apply(&change);
            last = last.max(number);
            end += RECORD as u64;
        }
        log.set_len(end)?;
        for (range, slot) in runs.iter() {
            swap.hold(slot..slot + ((range.end - range.start) / PAGE64) as u32);
        }
        let events = EventPage::of_file(log.as_fd(), PAGE64)?;
        let pid = u32::from_le_bytes([8, 9, 10, 11].map(|at| bytes[at]));
        let pid = Some(pid).filter(|pid| *pid != 0);
        let file = Spare::new(path, Arc::clone(spares));
        Ok(Self { runs, swap, log, end, pid, events, last, file })
    }

    /// Host pid of the process, if it is known.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Notes the process of a map that was made without one.
    ///
    /// # Errors
    /// The file system's.
    pub fn set_pid(&mut self, pid: u32) -> io::Result<()> {
        self.log.write_all_at(&pid.to_le_bytes(), PID)?;
        self.pid = Some(pid);
        Ok(())
    }

    /// What missing pages hold.
    pub fn runs(&self) -> &Runs {
        &self.runs
    }

    /// The swap file.
    pub fn swap(&self) -> &Arc<Swap> {
        &self.swap
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Its file is needed no more, and has no name of this proc's from now on.
    pub fn give_up(&mut self) {
        self.file.give_up();
    }

    /// The number of an event of the last read.
    fn number(&self, index: usize) -> u64 {
        self.events.reads() << 8 | (index as u64 + 1)
    }

    /// Makes the change that an event of the last read brings, once.
    ///
    /// # Errors
    /// The file system's.
    pub fn event(&mut self, index: usize, change: &Change) -> io::Result<()> {
        let number = self.number(index);
        if number > self.last {
            self.log(&change.encode(number))?;
            self.last = number;
            self.make(change);
        }
        Ok(())
    }

    /// Makes changes of our own, in order. A [`Change::Set`] brings its references to slots with
    /// it.
    ///
    /// # Errors
    /// The file system's; nothing was changed then.
    pub fn change(&mut self, changes: &[Change]) -> io::Result<()> {
        let last = self.last;
        let records: Vec<u8> = changes.iter().flat_map(|change| change.encode(last)).collect();
        self.log(&records)?;
        for change in changes {
            self.make(change);
        }
        Ok(())
    }

    fn make(&mut self, change: &Change) {
        for (range, slot) in self.runs.apply(change) {
            self.swap.release(slot..slot + ((range.end - range.start) / PAGE64) as u32);
        }
    }

    fn log(&mut self, records: &[u8]) -> io::Result<()> {
        if let Err(error) = self.log.write_all_at(records, self.end) {
            // What came of it must not be taken for records behind a shorter write.
            self.log.set_len(self.end)?;
            return Err(error);
        }
        self.end += records.len() as u64;
        Ok(())
    }

    /// Writes the log anew when it has become much longer than what it says.
    ///
    /// # Errors
    /// The file system's; the old log is as good as before then.
    pub fn compact(&mut self) -> io::Result<()> {
        let (records, runs) = ((self.end - HEADER) / RECORD as u64, self.runs.0.len() as u64);
        if records < 4 * runs + 256 || !self.events.left().is_empty() || self.file.is_given_up() {
            return Ok(());
        }
        let staged = self.path().with_extension("new");
        let mut new = Self::create(&staged, self.swap.clone(), self.runs.clone(), self.pid, self.file.spares())?;
        std::fs::rename(&staged, self.path())?;
        new.file.path.clone_from(&self.file.path);
        // The new map counts its own references, and its events from zero.
        *self = new;
        Ok(())
    }

    /// Does, in order, what a dead pager had taken from the userfaultfd and not done. A fork is
    /// given to `fork` with the number that its descriptor had in the dead pager, while the map is
    /// as it was then.
    ///
    /// # Errors
    /// The file system's, and those of `fork`.
    pub fn take_left(&mut self, mut fork: impl FnMut(&Self, i32) -> io::Result<()>) -> io::Result<()> {
        for (index, left) in self.events.left() {
            match left {
                Left::Fork(number) => fork(self, number)?,
                Left::Fault => {}
                Left::Remap { from, to, length } => self.event(index, &Change::Move { from, to, length })?,
                Left::Gone(range) => self.event(index, &Change::Clear(range))?,
            }
            self.events.done(index);
        }
        Ok(())
    }

    /// Marks an event of the last read as done.
    pub fn done(&mut self, index: usize) {
        self.events.done(index);
    }
}

impl Drop for SlotMap {
    fn drop(&mut self) {
        for (range, slot) in self.runs.iter() {
            self.swap.release(slot..slot + ((range.end - range.start) / PAGE64) as u32);
        }
    }
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
