//! One address space that is served: its userfaultfd, its slot map, and the set that its first
//! fault installs.
//!
//! ```text
//! quiet --fault--> served one by one
//! armed --first fault, or wake()--> the set is installed ([`crate::install`]), then quiet with reading ahead
//! ticking: armed, but what a tick touches is served one by one, for it is no wake ([`crate::ticking`])
//! resuming: armed, but what the kernel touches for calls that begin anew is served one by one, for it is no wake
//! ```
//!
//! Owns what missing pages are filled with, and the answers to everything that the program does to
//! its mappings while pages are missing. Never touches the process but through the userfaultfd. All
//! that must outlive us is in the slot map's file and in the descriptor, which another process
//! holds too; the set and the counts are hints.

use crate::ahead::Streams;
use crate::resuming::Resuming;
use crate::slots::{Change, Runs, SlotMap};
use crate::source::PageSource;
use crate::stored::StoredSet;
use crate::swap::{Aligned, PAGE, PARKED};
use crate::ticking::{Ticking, Touched};
use kip_sys::pagemap;
use kip_sys::uffd::{self, CopyMode, FaultEvent, Features};
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

mod fetch;

const PAGE64: u64 = PAGE as u64;

/// The least of one that was parked: what it needs is less known (paper P, section 6.4, B).
const PARKED_AHEAD: usize = 32;

/// Pages that are read for one that a tick touches, those among which it is.
const TICK_AHEAD: usize = 64;

/// After this, pages that were held back are no longer at hand.
const AT_HAND: Duration = Duration::from_secs(2);

/// A page that a thread waits for, as [`FaultEvent::Fault`] has it.
#[derive(Debug, Clone, Copy)]
struct Fault {
    address: u64,
    write: bool,
    thread: u32,
}

/// So often a fault is tried again before others are served.
const PATIENT_ROUNDS: u32 = 16;
/// A space whose events do not end lets others have their turn after so many; also those that only
/// want to look at it.
const MOST_ROUNDS: u32 = 64;

/// The name of an address space within its proc.
pub type SpaceId = u64;

/// What every userfaultfd of ours does.
pub fn features() -> Features {
    Features::FORK
        | Features::REMAP
        | Features::REMOVE
        | Features::UNMAP
        | Features::FAULT_WP
        | Features::WP_UNPOPULATED
        | Features::WP_ASYNC
        | Features::THREAD_ID
}

/// Rung by the first fault of a space that sleeps.
#[derive(Clone)]
pub struct Bell(pub Arc<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Bell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bell")
    }
}

/// What happened since the last sleep.
#[derive(Debug, Clone, Default)]
pub struct Since {
    /// What the wake was for.
    pub kind: String,
    /// Pages whose faults were served, in order.
    pub faults: Vec<u64>,
    /// Those that the set had and that were waited for when it was installed.
    pub waited: Vec<u64>,
    /// Pages that came along with others.
    pub ahead: HashSet<u64>,
    /// Pages of the set that were installed.
    pub set: HashSet<u64>,
    /// Faults of pages that were kept at hand.
    pub probed: usize,
    /// When the first fault of an armed space came, and how long the set took in microseconds.
    pub woke: Option<(Instant, u64)>,
    /// Pages of the set that were installed.
    pub installed: usize,
    /// Pages of the whole set.
    pub set_pages: usize,
    /// Its first fault was that of a tick which needed more than ticks may.
    pub long_tick: bool,
}

/// What can change while it is served.
#[derive(Debug)]
pub struct MemoryState {
    /// What missing pages hold.
    pub map: SlotMap,
    /// Pages of a parked snapshot, for slots from [`PARKED`] on.
    pub parked: Option<Arc<dyn PageSource>>,
    /// What the first fault installs.
    pub armed: Option<StoredSet>,
    /// Rings at the first fault.
    pub bell: Option<Bell>,
    /// Its process, while that goes on into its calls after a stop.
    pub resuming: Option<Resuming>,
    /// The program ticks while it sleeps: tells ticks from the wake.
    pub ticking: Option<Ticking>,
    /// What its ticks touch.
    pub touched: Touched,
    /// What happened since the last sleep.
    pub since: Since,
    /// Pages of the set that were held back, by address, with the slots that they had.
    pub at_hand: HashMap<u64, AtHand>,
    /// Whether faults fetch their neighbours.
    pub read_ahead: bool,
    /// How faults follow each other.
    pub(crate) streams: Streams,
    /// Faults that could not be served yet.
    again: Vec<Fault>,
    /// One of them waits for what is fetched from a store.
    fetching: bool,
    /// The address space is gone.
    pub gone: bool,
    /// A page that a thread waits for cannot be trusted; nothing is tried again.
    damaged: bool,
    /// No event is taken any more: a thread that waits for that waits until the userfaultfd is
    /// closed, which answers all events.
    pub(crate) closed: bool,
}

thread_local! {
    /// Where pages of a fault are read to. Of the threads that serve faults, for these are few and
    /// address spaces are many.
    static BUFFER: RefCell<Aligned> = RefCell::new(Aligned::new(PARKED_AHEAD.max(TICK_AHEAD) * PAGE));
}

/// Calls `f` with room for so many pages.
fn with_buffer<T>(pages: usize, f: impl FnOnce(&mut [u8]) -> io::Result<T>) -> io::Result<T> {
    if pages > PARKED_AHEAD.max(TICK_AHEAD) {
        return f(&mut Aligned::new(pages * PAGE));
    }
    BUFFER.with_borrow_mut(|buffer| f(&mut buffer[..pages * PAGE]))
}

/// Reads whole pages of either source into an aligned buffer.
fn read(map: &SlotMap, parked: Option<&dyn PageSource>, slot: u32, buffer: &mut [u8]) -> io::Result<()> {
    match parked {
        Some(parked) if slot >= PARKED => parked.read(slot, buffer),
        _ => map.swap().read(slot, buffer),
    }
}

/// How many of some pages can be read without waiting for a store.
fn readable(state: &MemoryState, slot: u32, pages: usize) -> usize {
    state.parked.as_deref().map_or(pages, |parked| parked.readable(slot, pages))
}

impl MemoryState {
    /// Reads whole pages from `slot` on, wherever they lie, into an aligned buffer.
    ///
    /// # Errors
    /// The source's.
    pub fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()> {
        read(&self.map, self.parked.as_deref(), slot, buffer)
    }
}

/// One address space.
#[derive(Debug)]
pub struct Memory {
    /// Its name.
    pub id: SpaceId,
    /// Its userfaultfd.
    pub uffd: OwnedFd,
    state: Mutex<MemoryState>,
}

/// What is to be done with a forked child's userfaultfd, while the parent's map is as it was at the
/// fork.
pub type Birth<'a> = &'a mut dyn FnMut(&MemoryState, OwnedFd) -> io::Result<()>;

/// How far filling came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    All,
    /// The kernel wants events to be read, or memory, first.
    Again,
    Gone,
}

/// Puts bytes into pages that are missing, leaving out those that are not, or that are no longer
/// mapped.
pub(crate) fn fill(uffd: BorrowedFd<'_>, mut to: u64, mut bytes: &[u8], protect: bool) -> io::Result<Filled> {
    let mut most = bytes.len();
    while !bytes.is_empty() {
        let length = most.min(bytes.len());
        let error = match uffd::copy(uffd, to, &bytes[..length], CopyMode { protect, wake: true }) {
            Ok(done) => {
                (to, bytes) = (to + done as u64, &bytes[done..]);
                most = bytes.len();
                continue;
            }
            Err(e) => e,
        };
        match Errno::from_io_error(&error) {
            // The range crosses the end of a mapping.
            Some(Errno::NOENT) if length > PAGE => {
                most = (length / 2).next_multiple_of(PAGE);
                continue;
            }
            Some(Errno::NOENT | Errno::EXIST) => uffd::wake(uffd, to..to + PAGE64)?,
            Some(Errno::AGAIN | Errno::NOMEM) => return Ok(Filled::Again),
            Some(Errno::SRCH) => return Ok(Filled::Gone),
            _ => return Err(error),
        }
        (to, bytes) = (to + PAGE64, &bytes[PAGE..]);
        most = bytes.len();
    }
    Ok(Filled::All)
}

/// The first page from `at` on that has a slot and is not `present`: address, slot, and how many,
/// at most `most`, follow each other in both.
fn next_missing(runs: &Runs, mut at: u64, present: &[Range<u64>], most: usize) -> Option<(u64, u32, usize)> {
    loop {
        let (slot, end) = match runs.get(at) {
            Some(found) => found,
            None => {
                at = runs.next_from(at)?;
                continue;
            }
        };
        let next = present.partition_point(|range| range.end <= at);
        match present.get(next) {
            Some(there) if there.contains(&at) => at = there.end,
            there => {
                let end = there.map_or(end, |there| there.start.min(end));
                return Some((at, slot, most.min(((end - at) / PAGE64) as usize)));
            }
        }
    }
}

/// A page that is kept at hand: the slot that it had, and its bytes.
pub type AtHand = (u32, Option<Box<[u8]>>);

impl Memory {
    /// A space that is served from now on.
    pub fn new(id: SpaceId, uffd: OwnedFd, map: SlotMap, parked: Option<Arc<dyn PageSource>>) -> Self {
        let state = MemoryState {
            map,
            parked,
            armed: None,
            bell: None,
            resuming: None,
            ticking: None,
            touched: Touched::default(),
            since: Since::default(),
            at_hand: HashMap::new(),
            read_ahead: false,
            streams: Streams::default(),
            again: Vec::new(),
            fetching: false,
            gone: false,
            damaged: false,
            closed: false,
        };
        Self { id, uffd, state: Mutex::new(state) }
    }

    /// Its state; no faults are served while it is held. It is had in bounded time, however many
    /// faults there are.
    pub fn state(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock()
    }

    /// After a pager has died: lets all threads that wait for pages ask again, for their faults may
    /// have been taken by it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn ask_again(&self) -> io::Result<()> {
        uffd::wake(self.uffd.as_fd(), pagemap::WHOLE)
    }

    /// Takes and answers all events, in their order. True if a fault could not be answered yet,
    /// because the kernel wants memory or has announced a change whose event is still to come: then
    /// this is to be called again soon.
    ///
    /// # Errors
    /// The kernel's or the source's. What could not be answered is tried again the next time, but
    /// for a page that cannot be trusted (`InvalidData`, told once): a thread that waits for that
    /// page waits until it is killed.
    pub fn serve(&self, birth: Birth<'_>) -> io::Result<bool> {
        let mut state = self.state();
        if state.closed {
            return Ok(false);
        }
        let mut rounds = 0;
        loop {
            if rounds > MOST_ROUNDS {
                return Ok(true);
            }
            let events = state.map.events.read(self.uffd.as_fd())?;
            if events.is_empty() && (state.again.is_empty() || state.gone || state.damaged) {
                return Ok(false);
            }
            if events.is_empty() && (rounds > PATIENT_ROUNDS || rounds > 0 && state.fetching) {
                return Ok(true);
            }
            let mut failed = None;
            state.fetching = false;
            // First what changes the map: the read that brought these events lets their threads go
            // on, so that the pages are given up or moved while faults of the same read wait for
            // the disk, and what is read ahead for those faults must not be put there any more.
            // Where an error ends this, they are tried again.
            let from = if state.damaged { state.again.len() } else { 0 };
            let mut read = Vec::new();
            for (index, event) in events.into_iter().enumerate() {
                match event {
                    FaultEvent::Fault { address, protected, write, thread } => {
                        read.push(index);
                        if protected {
                            // Whatever comes of it: a write that is refused again faults again.
                            let page = address..address + PAGE64;
                            let _ = uffd::write_protect(self.uffd.as_fd(), page.clone(), false);
                            uffd::wake(self.uffd.as_fd(), page)?;
                        } else {
                            state.again.push(Fault { address, write, thread });
                        }
                        continue;
                    }
                    FaultEvent::Fork(uffd) => {
                        if let Err(error) = birth(&state, uffd) {
                            tracing::error!(space = self.id, %error, "a forked child is not looked after");
                            continue;
                        }
                    }
                    FaultEvent::Remap { from, to, length } => {
                        state.map.event(index, &Change::Move { from, to, length })?
                    }
                    FaultEvent::Remove(range) | FaultEvent::Unmap(range) => {
                        state.map.event(index, &Change::Clear(range))?
                    }
                }
                state.map.done(index);
            }
            for fault in state.again.split_off(from) {
                failed = self.fault_or_again(&mut state, fault).err().or(failed);
            }
            read.into_iter().for_each(|index| state.map.done(index));
            if let Some(error) = failed {
                let known = state.damaged;
                state.damaged |= error.kind() == io::ErrorKind::InvalidData;
                if !known {
                    return Err(error);
                }
            }
            rounds += 1;
        }
    }

    fn fault_or_again(&self, state: &mut MemoryState, fault: Fault) -> io::Result<()> {
        let result = self.fault(state, fault);
        if result.is_err() {
            state.again.push(fault);
        }
        // It was asked for, and comes.
        state.fetching |= result.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
        result.or_else(|e| if e.kind() == io::ErrorKind::WouldBlock { Ok(()) } else { Err(e) })
    }

    fn fault(&self, state: &mut MemoryState, fault: Fault) -> io::Result<()> {
        let Fault { address, write, thread } = fault;
        let wakes = state.resuming.as_mut().is_none_or(|resuming| resuming.is_at_work(address, thread))
            && !state.ticking.as_mut().is_some_and(|ticking| ticking.is_tick(address, &mut state.touched));
        let first = wakes && state.armed.is_some();
        if state.since.woke.is_some_and(|(at, _)| at.elapsed() > AT_HAND) {
            state.at_hand = HashMap::new();
        }
        let bell = if wakes { state.bell.take() } else { None };
        if wakes && state.ticking.is_some() || state.ticking.as_ref().is_some_and(Ticking::begins) {
            state.at_hand = HashMap::new();
        }
        if wakes {
            state.since.long_tick |= state.ticking.take().is_some_and(|ticking| ticking.is_long());
            // Without a set that is installed, too.
            state.read_ahead |= state.resuming.take().is_some();
        }
        if first {
            self.install(state);
        }
        if let Some(Bell(ring)) = bell {
            ring();
        }
        // It came with the set.
        if first && state.since.set.contains(&address) {
            state.since.waited.push(address);
            return Ok(());
        }
        if state.since.faults.last() != Some(&address) {
            state.since.faults.push(address);
        }
        let fetched = self.fetch(state, address, write);
        if let Some(ticking) = &mut state.ticking {
            ticking.answered();
        }
        match fetched? {
            Filled::All => {}
            Filled::Again => state.again.push(fault),
            Filled::Gone => state.gone = true,
        }
        Ok(())
    }

    /// Restores every page that is paged out, in parts of 256 pages between which other faults
    /// are served. `present` are pages that are there, by address.
    ///
    /// # Errors
    /// The kernel's or the source's. What has not come back comes by faults.
    pub fn restore_all(&self, present: &[Range<u64>]) -> io::Result<()> {
        self.restore_range(0..u64::MAX, present)
    }

    /// The same of a range.
    ///
    /// # Errors
    /// As [`Memory::restore_all`].
    pub fn restore_range(&self, range: Range<u64>, present: &[Range<u64>]) -> io::Result<()> {
        const PART: usize = 256;
        /// What is fetched from a store has not come after this: the store is gone.
        const FETCHED_WITHIN: Duration = Duration::from_secs(30);
        let part = PART.min((range.end - range.start).div_ceil(PAGE64).try_into().unwrap_or(PART)).max(1);
        let mut buffer = Aligned::new(part * PAGE);
        let mut at = range.start;
        let mut waited: Option<Instant> = None;
        loop {
            let state = self.state();
            if state.gone {
                return Ok(());
            }
            let next = next_missing(state.map.runs(), at, present, part).filter(|(start, ..)| *start < range.end);
            let Some((start, slot, pages)) = next else { return Ok(()) };
            let pages = pages.min(((range.end - start) / PAGE64) as usize);
            let bytes = &mut buffer[..pages * PAGE];
            match state.read(slot, bytes) {
                Err(e)
                    if e.kind() == io::ErrorKind::WouldBlock
                        && waited.is_none_or(|at| at.elapsed() < FETCHED_WITHIN) =>
                {
                    drop(state);
                    waited.get_or_insert_with(Instant::now);
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
                other => other?,
            }
            waited = None;
            match fill(self.uffd.as_fd(), start, bytes, false)? {
                Filled::All => at = start + pages as u64 * PAGE64,
                Filled::Again => {
                    drop(state);
                    std::thread::sleep(Duration::from_micros(50));
                }
                Filled::Gone => return Ok(()),
            }
        }
    }

    /// Whether a thread waits for a page; where that cannot be known one does.
    pub(crate) fn waits(&self) -> bool {
        uffd::waiting(self.uffd.as_fd()).map_or(true, |threads| threads > 0)
    }

    /// Whether the address space is gone (its process has ended or executed another program).
    pub fn is_gone(&self) -> bool {
        let ask = uffd::write_protect(self.uffd.as_fd(), 0..PAGE64, false);
        ask.is_err_and(|e| Errno::from_io_error(&e) == Some(Errno::SRCH))
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
