//! The ways between a proc here and its parked generation: [`PagedProc::inflate`] takes up one that
//! was rebuilt without a part of its memory; [`PagedProc::prepare_parking`] and
//! [`PagedProc::account`] make one ready for being parked with a part of its memory out.

use super::{Custodian, Known, PARKED, PagedProc};
use crate::arguments;
use crate::crew::crew;
use crate::deflate;
use crate::memory::Memory;
use crate::mend::mend;
use crate::parked::{self, CopiedFile, Parked};
use crate::resuming::Resuming;
use crate::serve::{Server, processor};
use crate::set::{Histories, Predictor};
use crate::slots::{Change, Runs};
use crate::source::PageSource as _;
use crate::space::{self, SpaceKind};
use crate::stored::StoredSet;
use crate::swap::{PAGE, Swap};
use kip_snapshot::pages::{PageMap, ProcessPages, Run};
use kip_stop::ended;
use kip_sys::uffd::{self, Catch};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// A process that was rebuilt without a part of its memory.
#[derive(Debug)]
pub struct RebuiltProcess {
    /// Its host pid.
    pub host: u32,
    /// Its number inside, by which the generation knows it.
    pub inside: u32,
    /// Pages that the generation has in those of its mappings that can be watched.
    pub can_come: u64,
    /// A userfaultfd of its memory, new.
    pub uffd: OwnedFd,
    /// Its set waits until it touches its memory.
    pub waits: bool,
}

/// Where each process's part of the file of working sets begins.
fn set_slots(parked: &Parked, processes: &BTreeMap<u32, ProcessPages>) -> HashMap<u32, u32> {
    let Some(mut next) = parked.sets() else { return HashMap::new() };
    let place = |(inside, process): (&u32, &ProcessPages)| {
        let slot = next;
        next += process.expected().len() as u32;
        (*inside, slot)
    };
    processes.iter().map(place).collect()
}

/// Watches all of a rebuilt process's memory that may be missing, and tells where that lies. What
/// is missing and cannot come would be read as zeros, so it is counted whether that is as much as
/// was left to us.
fn watch_missing(pid: u32, uffd: BorrowedFd<'_>, all: &[Run], can_come: u64, parked: &Parked) -> io::Result<Runs> {
    let mut runs = Runs::default();
    let mut watched = 0;
    // Neighbours in one call.
    let mut to_watch: Vec<Range<u64>> = Vec::new();
    for mapping in space::mappings(pid)?.into_iter().filter(|m| m.kind == SpaceKind::Anonymous) {
        let first = all.partition_point(|run| run.end() <= mapping.range.start);
        let mut met = all[first..].iter().take_while(|run| run.start < mapping.range.end).peekable();
        if met.peek().is_none() {
            continue;
        }
        match to_watch.last_mut() {
            Some(last) if last.end == mapping.range.start => last.end = mapping.range.end,
            _ => to_watch.push(mapping.range.clone()),
        }
        for run in met {
            let (start, end) = (run.start.max(mapping.range.start), run.end().min(mapping.range.end));
            let slot = parked.slot(run) + ((start - run.start) / PAGE as u64) as u32;
            runs.alter(&Change::Set(start..end, slot));
            watched += (end - start) / PAGE as u64;
        }
    }
    to_watch.into_iter().try_for_each(|range| uffd::register(uffd, range, Catch::Both))?;
    if watched != can_come {
        let what = format!("{can_come} pages of process {pid} are to come later, and {watched} can");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(runs)
}

/// Watches all of them, and tells where their missing memory lies, in their order.
fn watch(processes: &[RebuiltProcess], known: &BTreeMap<u32, ProcessPages>, parked: &Parked) -> io::Result<Vec<Runs>> {
    let one = |process: &RebuiltProcess| {
        let RebuiltProcess { host, inside, can_come, ref uffd, .. } = *process;
        let all = known.get(&inside).map_or(&[][..], |process| &process.runs);
        uffd::api(uffd.as_fd(), crate::memory::features())?;
        let runs = watch_missing(host, uffd.as_fd(), all, can_come, parked)?;
        mend(host, &runs, |slot, page| parked.read(slot, page))?;
        Ok(runs)
    };
    let watched = Mutex::new(BTreeMap::new());
    crew().each(processes, |index, process| {
        let runs = one(process);
        watched.lock().insert(index, runs);
    });
    watched.into_inner().into_values().collect()
}

impl PagedProc {
    /// All pages are in the files of its generation.
    pub fn all_is_here(&self) {
        self.family.parked.iter().for_each(|parked| parked.all_is_here());
    }

    /// A proc that was rebuilt from the generation in `parked`, without a part of its memory. None
    /// of its processes may run yet. Their sets for this kind of wake are installed at once if
    /// there is to be prefetching, but for those of processes that wait: what one of them touches
    /// first outside of the call that it stands in has its set installed. Pages that copies still
    /// hold are read there.
    ///
    /// # Errors
    /// The file system's and the kernel's; `InvalidData` if something is missing that cannot come.
    /// The processes must be killed then.
    #[expect(clippy::too_many_arguments, reason = "as for one that has not slept, and what it was rebuilt from")]
    pub fn inflate(
        number: u32,
        directory: &Path,
        server: Arc<Server>,
        custodian: Arc<dyn Custodian>,
        predictor: Predictor,
        generation: &Path,
        copied: Option<CopiedFile>,
        processes: Vec<RebuiltProcess>,
        prefetch: bool,
        kind: &str,
    ) -> io::Result<Self> {
        let swap = Arc::new(Swap::create(&directory.join("swap"))?);
        let map = parked::keep(generation, &directory.join(PARKED)).map_err(io::Error::other)?;
        let asking = super::asking(&custodian);
        let (parked, mut known) = Parked::open(&directory.join(PARKED), map, asking).map_err(io::Error::other)?;
        copied.into_iter().for_each(|copied| parked.read_copies(copied));
        let mut set_slots = set_slots(&parked, &known);
        let is_here = parked.sets().is_some();
        let parked = Arc::new(parked);
        let mut proc = Self::with(number, directory, server, custodian, predictor, swap, Some(parked.clone()))?;
        let watched = watch(&processes, &known, &parked)?;
        let (mut spaces, mut rebuilt) = (Vec::new(), Vec::new());
        for (RebuiltProcess { host, inside, uffd, waits, .. }, runs) in processes.into_iter().zip(watched) {
            rebuilt.push((host, inside, waits));
            spaces.push((uffd, runs, Some(host)));
        }
        let memories = proc.family.take_in_all(spaces)?;
        for (memory, (host, inside, _)) in memories.iter().zip(&rebuilt) {
            let process = known.remove(inside).unwrap_or_default();
            let mut state = memory.state();
            let runs = state.map.runs();
            let slot = |page| runs.get(page).map(|(slot, _)| slot);
            let stored = match (set_slots.remove(inside), parked.sets()) {
                (Some(first), _) => StoredSet::parked(&process.sets, slot, parked.clone(), first),
                (None, None) => StoredSet::coming(&process.sets, kind, slot, parked.clone()),
                (None, Some(_)) => None,
            };
            state.armed = stored.filter(|_| prefetch);
            kind.clone_into(&mut state.since.kind);
            let histories = Histories::resumed(predictor, &process.sets);
            proc.known.insert(*host, Known { id: memory.id, histories, set: None });
        }
        let failed = Mutex::new(Ok(()));
        let prepare = |index: usize, memory: &Arc<Memory>| {
            let (host, _, waits) = rebuilt[index];
            let mut state = memory.state();
            // What has to come from a store is waited for by no thread that serves faults.
            if waits && is_here && state.armed.is_some() {
                state.resuming = Some(Resuming::of(host));
            } else {
                memory.install(&mut state);
                state.read_ahead = true;
            }
            drop(state);
            let served = proc.server.add(memory, proc.family.clone());
            let served = served.and_then(|()| proc.server.move_to(memory.id, processor(host)));
            if served.is_err() {
                *failed.lock() = served;
            }
            arguments::fetch_soon(host, memory);
        };
        // Sets that have to come from a store are waited for, and not by threads that others need.
        match is_here {
            true => crew().each(&memories, prepare),
            false => memories.iter().enumerate().for_each(|(index, memory)| prepare(index, memory)),
        }
        failed.into_inner()?;
        Ok(proc)
    }

    /// Before the proc is parked: brings back what no process is known for, and lets no fault
    /// install anything more. What is out is served on, but for where CRIU puts its own code for a
    /// moment: the lowest executable pages, to which ptrace(2) cannot write as long as they are
    /// missing.
    ///
    /// # Errors
    /// The kernel's or the source's; nothing is lost.
    pub fn prepare_parking(&mut self) -> io::Result<()> {
        self.sweep();
        let members: Vec<_> =
            self.family.spaces().values().map(|member| (member.memory.clone(), member.pid.is_some())).collect();
        for (memory, is_known) in members {
            let mut state = memory.state();
            (state.bell, state.ticking) = (None, None);
            if let Some(set) = state.armed.take()
                && let Some(known) = self.known.values_mut().find(|known| known.id == memory.id)
            {
                known.set = Some(set);
            }
            drop(state);
            if !is_known {
                memory.restore_all(&[])?;
                self.server.remove(memory.id);
                self.family.custodian.release(memory.id);
                self.family.spaces().remove(&memory.id);
            }
        }
        for (pid, known) in &self.known {
            const EXECUTE: u64 = 4;
            const LENGTH: u64 = 2 * PAGE as u64;
            let memory = self.family.spaces().get(&known.id).map(|member| member.memory.clone());
            let mappings = match space::mappings(*pid) {
                Err(e) if ended(&e) => continue,
                other => other?,
            };
            let lowest = mappings.into_iter().find(|mapping| mapping.protection & EXECUTE != 0);
            if let (Some(memory), Some(mapping)) = (memory, lowest) {
                let end = mapping.range.end.min(mapping.range.start + LENGTH);
                memory.restore_range(mapping.range.start..end, &[])?;
            }
        }
        Ok(())
    }

    /// Where every page lies that may still be out, and what is expected next, by host pid: files
    /// as in the proc's directory, and of the swap file without checksums. All processes stand
    /// still; one whose own set has not been used has no set here.
    ///
    /// # Errors
    /// The kernel's: a process cannot be looked at. `Unsupported` if a child was forked since
    /// [`PagedProc::prepare_parking`]: the pager does not know which process that is. `WouldBlock`
    /// if a page file is still being filled.
    pub fn account(&mut self) -> io::Result<PageMap> {
        self.sweep();
        if self.family.spaces().values().any(|member| member.pid.is_none()) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "a child was forked meanwhile"));
        }
        let (mut map, swap) = self.files();
        if self.family.parked.as_ref().is_some_and(|parked| parked.is_being_filled()) {
            let what = "its memory is still being copied from the proc that it is a clone of";
            return Err(io::Error::new(io::ErrorKind::WouldBlock, what));
        }
        let all: Vec<_> = self.known.iter().map(|(pid, known)| (*pid, known.id)).collect();
        for (pid, id) in all {
            let Some(memory) = self.family.spaces().get(&id).map(|member| member.memory.clone()) else {
                continue;
            };
            let state = memory.state();
            let runs = self.runs_in(state.map.runs(), swap)?;
            let known = self.known.get_mut(&pid).expect("no thread forgets the process meanwhile");
            if known.set.is_none() {
                match deflate::learn(pid, &state.since, &mut known.histories) {
                    Err(e) if ended(&e) => continue,
                    other => other?,
                }
            }
            map.processes.insert(pid, ProcessPages { runs, sets: known.histories.working_sets() });
        }
        Ok(map)
    }
}
