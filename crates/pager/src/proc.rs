//! One proc: its processes' address spaces, its swap file, and the steps down and up for all of
//! them together.
//!
//! On disk, in a directory of its own: `swap`, `space-N.map` for each address space (and, for a
//! moment, `space-N.set`), and in `parked` the pages of the generation that it was woken from, if a
//! part of its memory may still lie there only. What must survive us beside these are the
//! userfaultfds, which the [`Custodian`] holds too, by the same N. A later pager takes both up with
//! [`PagedProc::adopt`].

mod inspect;
mod parking;

pub use inspect::{Peeked, peek_whole};
pub use parking::RebuiltProcess;

use crate::arguments;
use crate::convert;
use crate::deflate::{self, Deflated, DropError, How};
use crate::fault;
use crate::memory::{Bell, Memory, MemoryState, SpaceId};
use crate::parked::{AskFor, Parked};
use crate::plant::plant;
use crate::resuming::Resuming;
use crate::serve::{Nursery, Server, processor};
use crate::set::{Histories, Predictor};
use crate::slots::{Change, Runs, SlotMap};
use crate::source::PageSource;
use crate::space;
use crate::spares::Spares;
pub use crate::stored::Sets;
use crate::stored::StoredSet;
use crate::swap::{PAGE, SWAP, Swap};
use crate::ticking::Ticking;
use kip_snapshot::pages::PageMap;
use kip_stop::limits::{self, Lifted};
use kip_stop::{Scratch, Stopped, StoppedProcess, timers};
use kip_sys::inject::Hand;
use kip_sys::pagemap;
use kip_sys::status::{Status, threads};
use kip_sys::uffd::{self, Catch};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Holds duplicates of userfaultfds, so that our death lets processes wait rather than lose their
/// memory.
pub trait Custodian: Send + Sync {
    /// Holds a duplicate of each under its name, of all or of none.
    ///
    /// # Errors
    /// Nothing is taken out of a process whose descriptor is not held.
    fn hold(&self, spaces: &[(SpaceId, BorrowedFd<'_>)]) -> io::Result<()>;
    /// Lets go of it.
    fn release(&self, space: SpaceId);
    /// Hears that a page of the proc is damaged where it lies, so that the proc cannot go on.
    fn damaged(&self, _error: &io::Error) {}
    /// Hears that pages of a remote page file are needed, and not here: see
    /// [`crate::parked::AskFor`].
    fn missing(&self, _file: &str, _pages: Range<u32>) {}
}

/// How a proc's memory is taken out.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    /// Drops clean pages of files too; they come back from the page cache.
    pub drop_files: bool,
    /// Where working sets are kept.
    pub sets: Sets,
    /// The program goes on ticking: what its ticks touch stays.
    pub ticks: bool,
    /// Asks what is left of the processes' timers, because they will not run when these fire.
    pub timers: bool,
}

/// Why a proc's memory stays where it is.
#[derive(Debug, thiserror::Error)]
pub enum DeflateError {
    /// The memory of one of its processes could not be taken out.
    #[error("the memory of process {pid} cannot be taken out")]
    Deflate {
        /// Which.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What the server needs to look after forks; shared with it.
struct Family {
    number: u64,
    directory: PathBuf,
    swap: Arc<Swap>,
    parked: Option<Arc<Parked>>,
    custodian: Arc<dyn Custodian>,
    spares: Arc<Spares>,
    next: AtomicU64,
    spaces: Mutex<BTreeMap<SpaceId, Member>>,
}

struct Member {
    memory: Arc<Memory>,
    /// None: a forked child that has not been matched with a process yet.
    pid: Option<u32>,
}

impl Family {
    fn spaces(&self) -> MutexGuard<'_, BTreeMap<SpaceId, Member>> {
        self.spaces.lock()
    }

    fn path(&self, id: SpaceId, kind: &str) -> PathBuf {
        self.directory.join(format!("space-{:x}.{kind}", id & 0xffff_ffff))
    }

    fn take_in(&self, uffd: OwnedFd, runs: Runs, pid: Option<u32>) -> io::Result<Arc<Memory>> {
        Ok(self.take_in_all(vec![(uffd, runs, pid)])?.remove(0))
    }

    /// Takes address spaces in, all of them or none: their userfaultfds, what is missing, and pids.
    fn take_in_all(&self, all: Vec<(OwnedFd, Runs, Option<u32>)>) -> io::Result<Vec<Arc<Memory>>> {
        let first = self.number << 32 | self.next.fetch_add(all.len() as u64, Ordering::Relaxed);
        let mut made = Vec::new();
        for (id, (uffd, runs, pid)) in (first..).zip(all) {
            made.push((id, uffd, SlotMap::create(&self.path(id, "map"), self.swap.clone(), runs, pid, &self.spares)?));
        }
        // In one step for a thread that compares what is held with what is served.
        let mut spaces = self.spaces();
        self.custodian.hold(&made.iter().map(|(id, uffd, _)| (*id, uffd.as_fd())).collect::<Vec<_>>())?;
        let served = made.into_iter().map(|(id, uffd, map)| {
            let pid = map.pid();
            let memory = Arc::new(Memory::new(id, uffd, map, self.source()));
            spaces.insert(id, Member { memory: memory.clone(), pid });
            memory
        });
        Ok(served.collect())
    }

    fn source(&self) -> Option<Arc<dyn PageSource>> {
        self.parked.clone().map(|parked| parked as Arc<dyn PageSource>)
    }
}

impl Nursery for Family {
    fn born(&self, parent: SpaceId, state: &MemoryState, uffd: OwnedFd) -> io::Result<Arc<Memory>> {
        let pid = self.spaces().get(&parent).and_then(|member| member.pid);
        let mut runs = state.map.runs().clone();
        for range in pid.map(space::not_inherited).transpose()?.unwrap_or_default() {
            runs.alter(&Change::Clear(range));
        }
        self.take_in(uffd, runs, None)
    }

    fn damaged(&self, error: &io::Error) {
        self.custodian.damaged(error);
    }
}

/// The function that asks the custodian for pages that are not here.
fn asking(custodian: &Arc<dyn Custodian>) -> AskFor {
    let custodian = Arc::clone(custodian);
    Box::new(move |file, pages| custodian.missing(file, pages))
}

/// Name of the directory with the pages of a generation, in that of a proc.
pub const PARKED: &str = "parked";

/// Name of the file with limits that are lifted, in the directory of a proc.
pub(crate) const LIFTED: &str = "lifted";

/// What a wake by a first touch is for: the pager knows no more of it.
const TOUCH: &str = "touch";

/// What is known of a process beside its memory.
#[derive(Debug)]
struct Known {
    id: SpaceId,
    histories: Histories,
    /// What its first fault is to install.
    set: Option<StoredSet>,
}

/// One proc.
pub struct PagedProc {
    family: Arc<Family>,
    server: Arc<Server>,
    predictor: Predictor,
    known: HashMap<u32, Known>,
}

impl PagedProc {
    /// A proc that has not slept yet. `number` is its own among all that `server` serves;
    /// `directory` exists and is empty.
    ///
    /// # Errors
    /// The file system's.
    pub fn create(
        number: u32,
        directory: &Path,
        server: Arc<Server>,
        custodian: Arc<dyn Custodian>,
        predictor: Predictor,
    ) -> io::Result<Self> {
        let swap = Arc::new(Swap::create(&directory.join(SWAP))?);
        Self::with(number, directory, server, custodian, predictor, swap, None)
    }

    fn with(
        number: u32,
        directory: &Path,
        server: Arc<Server>,
        custodian: Arc<dyn Custodian>,
        predictor: Predictor,
        swap: Arc<Swap>,
        parked: Option<Arc<Parked>>,
    ) -> io::Result<Self> {
        let family = Arc::new(Family {
            number: u64::from(number),
            directory: directory.into(),
            swap,
            parked,
            custodian,
            spares: server.spares().clone(),
            next: AtomicU64::new(1),
            spaces: Mutex::default(),
        });
        Ok(Self { family, server, predictor, known: HashMap::new() })
    }

    /// Takes up what a dead pager served: its directory, and the userfaultfds that another process
    /// held, each with its name. `forked` gives out the descriptor that had a number in the dead
    /// pager, of a child whose birth that pager did not finish.
    ///
    /// # Errors
    /// The kernel's or the file system's. Nothing is lost by trying again.
    pub fn adopt(
        number: u32,
        directory: &Path,
        server: Arc<Server>,
        custodian: Arc<dyn Custodian>,
        predictor: Predictor,
        held: Vec<(SpaceId, OwnedFd)>,
        mut forked: impl FnMut(i32) -> io::Result<OwnedFd>,
    ) -> io::Result<Self> {
        limits::put_back_left(&directory.join(LIFTED));
        let swap = Arc::new(Swap::open(&directory.join(SWAP))?);
        let kept = Some(directory.join(PARKED)).filter(|kept| kept.exists());
        let parked = kept.map(|kept| Parked::open(&kept, PageMap::load(&kept)?, asking(&custodian)));
        let parked = parked.transpose().map_err(io::Error::other)?;
        let parked = parked.map(|(parked, _)| Arc::new(parked));
        let mut proc = Self::with(number, directory, server, custodian, predictor, swap, parked)?;
        let family = proc.family.clone();
        let last = held.iter().map(|(id, ..)| id & 0xffff_ffff).max().unwrap_or(0);
        family.next.store(last + 1, Ordering::Relaxed);
        // All maps are counted before any slot is given up.
        let mut maps = Vec::new();
        for (id, uffd) in held {
            let map = SlotMap::open(&family.path(id, "map"), family.swap.clone(), &family.spares)?;
            // Pagers of before had it in a file of its own.
            let alone = || std::fs::read_to_string(family.path(id, "pid")).ok().and_then(|text| text.parse().ok());
            maps.push((id, map.pid().or_else(alone), uffd, map));
        }
        for (id, pid, uffd, mut map) in maps {
            map.take_left(|map, number| family.take_in(forked(number)?, map.runs().clone(), None).map(drop))?;
            let memory = Arc::new(Memory::new(id, uffd, map, family.source()));
            family.spaces().insert(id, Member { memory, pid });
            if let Some(pid) = pid {
                proc.known.insert(pid, Known { id, histories: Histories::new(predictor), set: None });
            }
        }
        let spaces: Vec<Arc<Memory>> = family.spaces().values().map(|member| member.memory.clone()).collect();
        for memory in spaces {
            proc.server.add(&memory, family.clone())?;
            memory.ask_again()?;
        }
        Ok(proc)
    }

    /// The address space of a process, if it is served.
    pub fn memory(&self, pid: u32) -> Option<Arc<Memory>> {
        let id = self.known.get(&pid)?.id;
        self.family.spaces().get(&id).map(|member| member.memory.clone())
    }

    /// Pages of the set of a process: see [`crate::protocol::MemoryStatus::set_pages`].
    pub fn set_pages(&self, pid: u32, state: &MemoryState) -> usize {
        let sleeping = self.known.get(&pid).and_then(|known| known.set.as_ref()).or(state.armed.as_ref());
        sleeping.map_or(state.since.set_pages, |set| set.len())
    }

    /// The swap file.
    pub fn swap(&self) -> &Arc<Swap> {
        &self.family.swap
    }

    /// Takes the memory of stopped processes out. They are still stopped; let go, they come back by
    /// faults, and by their sets after [`PagedProc::arm`] or [`PagedProc::wake`].
    ///
    /// # Errors
    /// See [`DeflateError`]. All processes are whole; some may have their memory out, which comes
    /// back by itself.
    pub fn deflate(&mut self, stopped: &Stopped, way: Way) -> Result<BTreeMap<u32, Deflated>, DeflateError> {
        self.sweep();
        let mut reports = BTreeMap::new();
        let mut way = way;
        for process in stopped.processes.values() {
            let pid = process.pid;
            if space::is_small(pid) && self.memory(pid).is_none() {
                if way.timers {
                    let timers = timers::ask(process, Some(&self.family.directory.join(LIFTED)));
                    let timers = timers.map_err(|source| DeflateError::Deflate { pid, source })?;
                    reports.insert(pid, Deflated { timers, ..Deflated::default() });
                }
                continue;
            }
            let done = self.deflate_one(process, way);
            let done = done.map_err(|source| DeflateError::Deflate { pid, source })?;
            if let Sets::Cached(left) = &mut way.sets {
                *left = left.saturating_sub(done.kept_bytes);
            }
            reports.insert(pid, done);
        }
        Ok(reports)
    }

    /// Calls are made in two short spells, with the long work of saving between them.
    fn deflate_one(&mut self, process: &StoppedProcess, way: Way) -> io::Result<Deflated> {
        let pid = process.pid;
        fault::reach("stopped")?;
        let hand = process.hand()?;
        fault::reach("in-hand")?;
        let lifted = Lifted::of(pid, Some(&self.family.directory.join(LIFTED)))?;
        let scratch = Scratch::map(&hand, deflate::SCRATCH).map_err(|e| limits::name(pid, e))?;
        let prepared = fault::reach("scratch").and_then(|()| {
            let memory = self.space_of(pid, &hand, &scratch)?;
            fault::reach("planted")?;
            let converted = convert::all(pid, &hand)?;
            fault::reach("turned")?;
            Ok((memory, converted))
        });
        let prepared = prepared.map_err(|e| limits::name(pid, e));
        drop(lifted);
        hand.give_back()?;
        let saved = prepared.and_then(|(memory, converted)| {
            fault::reach("handed-back")?;
            self.server.move_to(memory.id, processor(pid))?;
            if let Err(error) = arguments::fetch(pid, &memory) {
                tracing::debug!(pid, %error, "arguments stay out");
            }
            let path = self.family.path(memory.id, "set");
            let known = self.known.get_mut(&pid).expect("it has a space");
            let leave = scratch.at..scratch.at + scratch.length();
            let how = How { drop_files: way.drop_files, ticks: way.ticks, sets: way.sets, path: &path, leave };
            let (mut saved, set) = deflate::save_all(pid, &memory, &mut known.histories, how)?;
            known.set = set;
            saved.report.converted = converted;
            fault::reach("saved")?;
            Ok((memory, saved))
        });
        let hand = process.hand()?;
        let done = saved.and_then(|(memory, saved)| {
            fault::reach("in-hand-again")?;
            let dropped = saved.drop_all(pid, &hand, &scratch, &memory);
            let mut report = dropped.map_err(|e| match e {
                DropError::Kept(e) => e,
                DropError::Lost(e) => self.must_not_run(pid, e),
            })?;
            if way.timers {
                report.timers = timers::left(pid, process.alarmed, &hand, &scratch)?;
            }
            Ok(report)
        });
        scratch.unmap(&hand)?;
        fault::reach("unmapped")?;
        hand.give_back()?;
        fault::reach("out")?;
        done
    }

    /// Keeps a stopped process from running on with pages that are not its own: as with a page that
    /// is damaged, it waits to be killed, and the pager tells the custodian, which has it killed. A
    /// signal that came while all its threads stood still is taken before any of them runs.
    fn must_not_run(&self, pid: u32, error: io::Error) -> io::Error {
        let what = format!(
            "memory of process {pid} that was touched from outside while it was taken out cannot be put back: {error}"
        );
        let told = io::Error::new(error.kind(), what);
        let stop = |pid| rustix::process::kill_process(pid, rustix::process::Signal::STOP);
        if let Some(Err(e)) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).map(stop) {
            tracing::error!(pid, error = %e, "a process that must not run cannot be stopped");
        }
        self.family.custodian.damaged(&told);
        told
    }

    /// The space of a process: known, a forked child's that is matched now, or a new one.
    fn space_of(&mut self, pid: u32, hand: &Hand, scratch: &Scratch) -> io::Result<Arc<Memory>> {
        if let Some(memory) = self.memory(pid) {
            return Ok(memory);
        }
        let orphan = self.matching(scratch);
        let memory = match orphan {
            Some(memory) => memory,
            None => {
                let uffd = plant(pid, hand, scratch, &uffd::open_device()?)?;
                let memory = self.family.take_in(uffd, Runs::default(), Some(pid))?;
                self.server.add(&memory, self.family.clone())?;
                memory
            }
        };
        if let Some(member) = self.family.spaces().get_mut(&memory.id) {
            member.pid = Some(pid);
        }
        memory.state().map.set_pid(pid)?;
        let known = Known { id: memory.id, histories: Histories::new(self.predictor), set: None };
        self.known.insert(pid, known);
        Ok(memory)
    }

    /// The space without a process that has the scratch: only its userfaultfd can register there.
    fn matching(&self, scratch: &Scratch) -> Option<Arc<Memory>> {
        let range = scratch.at..scratch.at + scratch.length();
        let spaces = self.family.spaces();
        let orphans = spaces.values().filter(|member| member.pid.is_none());
        let mut fits = orphans.filter(|member| {
            let fd = member.memory.uffd.as_fd();
            uffd::register(fd, range.clone(), Catch::Missing)
                .is_ok_and(|()| uffd::unregister(fd, range.clone()).is_ok())
        });
        fits.next().map(|member| member.memory.clone())
    }

    /// Arms the sets of processes that are still stopped: what one of them touches first when it
    /// was let go is its wake. Until [`PagedProc::wait_until_quiescent`] only what it touches
    /// outside of the call that it stood in. `ticks` is of a program that ticks: how many pages one
    /// tick may fetch back, and what [`packets`] said before it was stopped. Every touch of any
    /// other is its wake.
    ///
    /// [`packets`]: crate::ticking::packets
    pub fn arm(&mut self, pids: &[u32], bell: Option<&Bell>, ticks: Option<(usize, Option<u64>)>) {
        for pid in pids {
            let Some(memory) = self.memory(*pid) else { continue };
            if let Some(known) = self.known.get_mut(pid) {
                let mut state = memory.state();
                state.armed = known.set.take();
                let out =
                    state.map.runs().iter().map(|(range, _)| (range.end - range.start) / PAGE as u64).sum::<u64>();
                state.ticking = ticks.map(|(patience, came)| Ticking::new(*pid, patience, out as usize, came));
                state.since.kind = TOUCH.to_owned();
                state.bell = bell.cloned();
                state.resuming = Some(Resuming::of(*pid));
            }
        }
    }

    /// Waits until processes that were let go are back in their calls, or awake, but at most
    /// `patience` in all. From then on any fault is their wake.
    pub fn wait_until_quiescent(&self, pids: &[u32], patience: Duration) {
        let until = Instant::now() + patience;
        for pid in pids {
            let Some(memory) = self.memory(*pid) else { continue };
            loop {
                let waits = memory.waits();
                let (served, resuming) = {
                    let state = memory.state();
                    (state.since.faults.len(), state.resuming.is_some())
                };
                // Asleep is also a thread that waits for a page, be it that its fault was not read.
                let back = || is_quiescent(*pid) && !memory.waits() && memory.state().since.faults.len() == served;
                if !resuming || !waits && back() || Instant::now() > until {
                    break;
                }
                std::thread::sleep(Duration::from_micros(300));
            }
            let _ = self.server.move_to(memory.id, processor(*pid));
            memory.state().resuming = None;
        }
    }

    /// Installs the sets of processes that are still stopped, or armed, now; what cannot be
    /// installed comes by faults. `kind` is what they are woken for.
    pub fn wake(&mut self, pids: &[u32], kind: &str) {
        for pid in pids {
            let Some(memory) = self.memory(*pid) else { continue };
            let set = self.known.get_mut(pid).and_then(|known| known.set.take());
            let mut state = memory.state();
            (state.bell, state.ticking) = (None, None);
            state.armed = set.or(state.armed.take());
            kind.clone_into(&mut state.since.kind);
            memory.install(&mut state);
            state.read_ahead = true;
        }
    }

    /// Restores all memory of all processes and serves it no more. Once this is dropped the
    /// processes are as if they had never slept, and the directory is not needed any more.
    ///
    /// # Errors
    /// The kernel's or the source's; nothing is lost, all is served on.
    pub fn restore_all(&mut self) -> io::Result<()> {
        let mut closed = HashSet::new();
        let restored = self.restore_and_close(&mut closed);
        let spaces = self.family.spaces().iter().map(|(id, m)| (*id, m.memory.clone())).collect::<Vec<_>>();
        for (id, memory) in spaces {
            if restored.is_ok() {
                self.server.remove(id);
                self.family.custodian.release(id);
            } else if closed.contains(&id) {
                memory.state().closed = false;
                self.server.add(&memory, self.family.clone())?;
            }
        }
        restored
    }

    /// Restores all, then lets no child be born any more: no thread would serve a child that is
    /// taken in after that. A fork whose event is not taken waits until its parent is released, and
    /// then the child has the parent's pages, all of them.
    fn restore_and_close(&self, closed: &mut HashSet<SpaceId>) -> io::Result<()> {
        // A child that was forked meanwhile is taken in with what its parent had out.
        let mut done: HashSet<SpaceId> = HashSet::new();
        loop {
            let spaces = self.family.spaces();
            let next =
                spaces.iter().find(|(id, _)| !done.contains(id)).or(spaces.iter().find(|(id, _)| !closed.contains(id)));
            let Some((id, memory, pid)) = next.map(|(id, m)| (*id, m.memory.clone(), m.pid)) else { break };
            drop(spaces);
            if !done.insert(id) {
                self.server.remove(id);
                // Not before a birth that is under way is over.
                memory.state().closed = true;
                closed.insert(id);
                continue;
            }
            if memory.is_gone() {
                continue;
            }
            {
                let mut state = memory.state();
                (state.armed, state.bell, state.ticking) = (None, None, None);
            }
            memory
                .restore_all(&pid.map(|pid| pagemap::present(pid, pagemap::WHOLE)).transpose()?.unwrap_or_default())?;
        }
        Ok(())
    }

    /// Gives up spaces that are gone: their processes have ended or executed other programs.
    pub fn sweep(&mut self) {
        let mut spaces = self.family.spaces();
        let gone: Vec<SpaceId> = spaces.iter().filter(|(_, m)| m.memory.is_gone()).map(|(id, _)| *id).collect();
        let mut given_up = Vec::new();
        for id in gone {
            self.server.remove(id);
            self.family.custodian.release(id);
            given_up.extend(spaces.remove(&id));
            self.known.retain(|_, known| known.id != id);
            for kind in ["set", "pid"] {
                // A set has a name for a moment only.
                let _ = std::fs::remove_file(self.family.path(id, kind));
            }
        }
        // A thread that takes a child in has the state of its parent, and waits for the spaces.
        drop(spaces);
        given_up.iter().for_each(|member| member.memory.state().map.give_up());
    }

    /// All spaces served.
    pub fn memories(&self) -> Vec<Arc<Memory>> {
        self.family.spaces().values().map(|member| member.memory.clone()).collect()
    }

    /// Drops it: nothing of it is needed any more.
    pub fn give_up(self) {
        self.memories().iter().for_each(|memory| memory.state().map.give_up());
    }

    /// The names of all spaces served, with their processes where they are known.
    pub fn spaces(&self) -> Vec<(SpaceId, Option<u32>)> {
        self.family.spaces().iter().map(|(id, member)| (*id, member.pid)).collect()
    }
}

impl Drop for PagedProc {
    fn drop(&mut self) {
        let ids: Vec<SpaceId> = self.family.spaces().keys().copied().collect();
        ids.into_iter().for_each(|id| self.server.remove(id));
    }
}

/// Whether all threads wait for something, a page or what a call waits for.
fn is_quiescent(pid: u32) -> bool {
    threads(pid).unwrap_or_default().into_iter().all(|tid| !Status::read(tid).is_ok_and(|status| status.is_busy()))
}
