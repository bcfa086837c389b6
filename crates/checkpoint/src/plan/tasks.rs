//! Processes and threads.

use super::family::{self, Entry, Joins, Maker, Member};
use super::files::{Files, Ref, base_above};
use super::filters::{Filters, OwnFilters, ProcessFilters};
use super::layout::{Program, Span, Writer};
use super::memory::{Memory, SharedItem, SharedMemory, VdsoShape, write_pages};
use super::of_processes::{OfProcess, own_oom_score, own_settings, usual_oom_score};
use super::settings::{Base, intervals, limits, locks, pending, posix_timers, signals, thread};
use super::{PlanError, PlannedTask, PlannedThread, Received, Wish, inherit, system_v, unsupported};
use crate::registers;
use crate::terminals::{self, Controlled};
use kip_clocks::Now;
use kip_criu_images::codes::{kind, state};
use kip_criu_images::fields::{
    core_entry, eventpoll_tfd_entry, fdinfo_entry, fs_entry, mm_entry, pstree_entry, rseq_entry, task_core_entry,
    task_kobj_ids_entry, task_timers_entry, thread_core_entry, thread_info_x86, user_desc_t,
};
use kip_criu_images::{Images, Message};
use kip_snapshot::pages::Run;
use std::collections::{BTreeMap, BTreeSet};

/// The fields of a process's memory in the order of prctl_mm_map: brk comes after start_brk, and
/// start_stack after both.
const MEMORY: [u32; 11] = [
    mm_entry::MM_START_CODE,
    mm_entry::MM_END_CODE,
    mm_entry::MM_START_DATA,
    mm_entry::MM_END_DATA,
    mm_entry::MM_START_BRK,
    mm_entry::MM_BRK,
    mm_entry::MM_START_STACK,
    mm_entry::MM_ARG_START,
    mm_entry::MM_ARG_END,
    mm_entry::MM_ENV_START,
    mm_entry::MM_ENV_END,
];
/// Words of `struct task`, and where its threads are.
const TASK_WORDS: usize = 71;
const TASK_THREADS: usize = 21;
/// From so many processes on [`Memory::free_of_files`] pays.
const FREE_OF_FILES_FROM: usize = 8;
/// Where its state and status are, and `TASK_STOPPED`.
const STATE: usize = 7;
const TASK_STOPPED: u64 = 3;
/// Words of `struct thread`, and where its name is.
const THREAD_WORDS: usize = 18;
const THREAD_COMM: usize = 11;

/// What a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    /// It runs.
    Alive,
    /// It has ended, with this status, and its parent has not asked yet.
    Zombie(u64),
    /// It has ended and gone: it makes others, which a session is named after or which lose it as
    /// their parent.
    Ghost,
}

/// One process, its images read; of one that is not alive most are empty.
#[derive(Debug)]
pub(super) struct Task {
    pid: u32,
    life: Life,
    member: Member,
    threads: Vec<(u32, Message)>,
    core: Message,
    mm: Message,
    fs: Message,
    descriptors: Vec<Message>,
}

pub(super) fn one(images: &Images, name: &str) -> Result<Message, PlanError> {
    match images.entries(name)?.into_iter().next() {
        Some(entry) => Ok(entry),
        None => unsupported(format!("an empty {name}")),
    }
}

/// The tree, makers before what they make; the first is pid 1.
pub(super) fn read(images: &Images) -> Result<Vec<Task>, PlanError> {
    let tree = images.entries("pstree.img")?;
    let mut cores = Vec::new();
    let (mut entries, mut highest) = (Vec::new(), 1);
    for task in &tree {
        let pid = task.number(pstree_entry::PID);
        let (group, session) = (task.number(pstree_entry::PGID), task.number(pstree_entry::SID));
        let numbers = task.varints(pstree_entry::THREADS)?.into_iter().chain([pid, group, session]);
        highest = numbers.max().unwrap_or(1).max(highest);
        let core = one(images, &format!("core-{pid}.img"))?;
        let tc = core.message(core_entry::TC)?.unwrap_or_default();
        let takes_orphans = tc.number(task_core_entry::CHILD_SUBREAPER) != 0;
        let parent = task.number(pstree_entry::PPID);
        entries.push(Entry { pid, parent, group, session, takes_orphans });
        cores.push(core);
    }
    let order = family::order(&entries, highest + 1).or_else(unsupported)?;
    let mut shared_ids = BTreeSet::new();
    let read = |member: Member| match member.entry {
        Some(entry) => Task::read(images, &tree[entry], cores[entry].clone(), member, &mut shared_ids),
        None => Ok(Task::ghost(member)),
    };
    order.into_iter().map(read).collect()
}

impl Task {
    fn read(
        images: &Images,
        entry: &Message,
        core: Message,
        member: Member,
        shared_ids: &mut BTreeSet<(u32, u64)>,
    ) -> Result<Task, PlanError> {
        let pid = entry.number(pstree_entry::PID);
        let tc = core.message(core_entry::TC)?.unwrap_or_default();
        let mut task = Task {
            life: match tc.number(task_core_entry::TASK_STATE) {
                state::DEAD => Life::Zombie(tc.number(task_core_entry::EXIT_CODE)),
                _ => Life::Alive,
            },
            threads: vec![(pid as u32, core.clone())],
            core,
            ..Task::ghost(member)
        };
        if task.life != Life::Alive {
            return Ok(task);
        }
        let ids = one(images, &format!("ids-{pid}.img"))?;
        for (number, what) in [
            (task_kobj_ids_entry::VM_ID, "memory"),
            (task_kobj_ids_entry::FILES_ID, "descriptors"),
            (task_kobj_ids_entry::FS_ID, "directories"),
            (task_kobj_ids_entry::SIGHAND_ID, "signal actions"),
        ] {
            if !shared_ids.insert((number, ids.number(number))) {
                return unsupported(format!("processes that share their {what}"));
            }
        }
        for thread in entry.varints(pstree_entry::THREADS)? {
            if thread != pid {
                task.threads.push((thread as u32, one(images, &format!("core-{thread}.img"))?));
            }
        }
        let table = ids.number(task_kobj_ids_entry::FILES_ID);
        task.descriptors = images.entries_if_any(&format!("fdinfo-{table}.img"))?;
        task.mm = one(images, &format!("mm-{pid}.img"))?;
        task.fs = one(images, &format!("fs-{pid}.img"))?;
        Ok(task)
    }

    /// One that ends as soon as it has made others.
    fn ghost(member: Member) -> Task {
        let pid = member.pid as u32;
        Task {
            pid,
            life: Life::Ghost,
            member,
            threads: vec![(pid, Message::default())],
            core: Message::default(),
            mm: Message::default(),
            fs: Message::default(),
            descriptors: Vec::new(),
        }
    }
}

/// What [`write`] has made.
pub(super) struct Written {
    pub planned: BTreeMap<u64, PlannedTask>,
    pub program: Program,
    /// Memory that is read before anything runs, if some is not.
    pub eager: Vec<Run>,
}

/// Writes everything. Two passes: references first, so that the numbers of all descriptors are
/// known when they are written.
pub(super) fn write(
    writer: &mut Writer,
    files: &mut Files<'_>,
    images: &Images,
    tree: &[Task],
    wish: &Wish<'_>,
) -> Result<Written, PlanError> {
    let all_filters = Filters::read(images)?;
    let namespace = system_v::read(images)?;
    let mut shared = SharedMemory::of(&namespace, files)?;
    for d in tree.iter().flat_map(|task| &task.descriptors) {
        *files.uses.entry(d.number(fdinfo_entry::ID)).or_default() += 1;
    }
    let mut found = Vec::new();
    let mut highest = 0;
    let mut watched = BTreeSet::new();
    let mut spare = spare_above(tree);
    let mut shape: Option<VdsoShape> = None;
    for task in tree {
        if task.life != Life::Alive {
            found.push(None);
            continue;
        }
        let references = References::gather(task, files, &mut spare, &mut watched)?;
        let numbers =
            references.descriptors.iter().map(|d| d.0).chain(references.of_processes.iter().map(|one| one.number));
        highest = numbers.max().unwrap_or(0).max(highest);
        // Pid 1 is kip-init, of which none is kept.
        let read = |_| Memory::read(wish.pages, task.pid, &task.mm, &task.rseq()?, files, &mut shared);
        let memory = task.member.maker.map(read).transpose()?;
        if let Some(memory) = &memory
            && *shape.get_or_insert_with(|| memory.vdso_shape.clone()) != memory.vdso_shape
        {
            return unsupported("processes of several kernels");
        }
        found.push(Some((references, memory)));
    }
    let controlled = controlled(images, files, tree, wish.terminals)?;
    let memories = || found.iter().flatten().filter_map(|(_, memory)| memory.as_ref());
    let mut device = None;
    if memories().map(Memory::can_wait).sum::<u64>() >= wish.lazy_from.max(1) {
        device = Some(files.device());
        let is_large = found.len() >= FREE_OF_FILES_FROM || wish.lazy_from == 0;
        for memory in found.iter_mut().flatten().filter_map(|(_, memory)| memory.as_mut()) {
            if is_large {
                memory.free_of_files();
            }
            memory.leave_out();
        }
    }
    let memories = found.iter().flatten().filter_map(|(_, memory)| memory.as_ref());
    let eager = if device.is_some() { memories.flat_map(Memory::eager).collect() } else { Vec::new() };
    let shared_pages = shared.read(images, files)?;
    let file_list = files.write(writer);
    let shared_items: Vec<Vec<u64>> = shared_pages
        .iter()
        .map(|(SharedItem { size, segment, how, file }, pages)| {
            let Span(at, count) = write_pages(writer, files, pages);
            vec![*size, 0, at, count, *segment, *how, file.map_or(u64::MAX, |file| files.number(file))]
        })
        .collect();
    let shared_list = writer.list(&shared_items);
    let locks = locks(images)?;
    let now = Now::read();
    let of = |found: &Option<(References, Option<Memory>)>| Some(found.as_ref()?.1.as_ref()?.mappings(files, &shared));
    let mut mappings: Vec<_> = found.iter().map(|found| of(found).unwrap_or_default()).collect();
    let inherits = inherit::mark(&tree.iter().map(|task| task.member.maker).collect::<Vec<_>>(), &mut mappings);
    let mut planned = BTreeMap::new();
    let mut items = Vec::new();
    for (index, (task, found)) in tree.iter().zip(&found).enumerate() {
        let Some((references, memory)) = found else {
            items.push(task.write_dead(writer)?);
            continue;
        };
        let base = Base::of(task.pid, wish.clocks, now);
        let common = Common { files, locks: &locks, unreported: wish.unreported };
        let ProcessFilters { sandbox, own } = all_filters.of_process(writer, &task.threads)?;
        let before = Before { base, filters: sandbox, mappings: writer.list(&mappings[index]) };
        let mut item = task.write(writer, &common, references, memory.as_ref(), before)?;
        let lazy = device.filter(|_| memory.as_ref().is_some_and(|m| m.can_come > 0));
        item.extend([lazy, references.root].map(|it| it.map_or(u64::MAX, |it| files.number(it))));
        item.push(u64::from(inherits[index]));
        debug_assert_eq!(item.len(), TASK_WORDS);
        items.push(item);
        if let Some(memory) = memory {
            planned.insert(index as u64, task.planned(memory, references.sockets(files), own)?);
        }
    }
    let tasks = writer.list(&items);
    let vdso: Vec<Vec<u64>> = shape.unwrap_or_default().iter().map(|(offset, size)| vec![*offset, *size, 0]).collect();
    let vdso = writer.list(&vdso);
    let terminals: Vec<Vec<u64>> = controlled
        .iter()
        .map(|Session { leader, terminal, foreground }| vec![*leader, files.number(*terminal), *foreground])
        .collect();
    let terminals = writer.list(&terminals);
    let (init, argument) = (writer.string(wish.init), writer.string(&wish.program.to_string()));
    let [settings, objects] = system_v::write(&namespace, writer);
    let writer = std::mem::replace(writer, Writer::new());
    let spans = [file_list, shared_list, tasks, vdso, terminals, settings, objects];
    let program = writer.finish(base_above(highest), spans, init, argument);
    Ok(Written { planned, program, eager })
}

/// A session that gets its terminal back.
struct Session {
    /// Index of the process that leads it.
    leader: u64,
    terminal: Ref,
    /// The group in the foreground; 0 where that is the leader's own.
    foreground: u64,
}

/// The sessions of a tree that have a terminal.
fn controlled(
    images: &Images,
    files: &mut Files<'_>,
    tree: &[Task],
    wanted: &[Controlled],
) -> Result<Vec<Session>, PlanError> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let slaves = terminals::slaves(images)?;
    let mut sessions = Vec::new();
    for Controlled { session, device, foreground } in wanted {
        let is_leader = |task: &Task| task.pid == *session && task.life == Life::Alive;
        let Some(leader) = tree.iter().position(is_leader) else { continue };
        let Some(file) = slaves.get(device) else {
            return unsupported("a controlling terminal that no process has open for reading");
        };
        let is_there = |group: &u32| {
            let in_it = |task: &Task| {
                task.life == Life::Alive
                    && task.member.group == u64::from(*group)
                    && task.member.session == u64::from(*session)
            };
            group != session && tree.iter().any(in_it)
        };
        let foreground = foreground.filter(is_there).map_or(0, u64::from);
        sessions.push(Session { leader: leader as u64, terminal: files.open_file(*file)?, foreground });
    }
    Ok(sessions)
}

/// The first number above all that a tree has.
fn spare_above(tree: &[Task]) -> u64 {
    let threads = tree.iter().flat_map(|task| task.threads.iter().map(|(id, _)| u64::from(*id)));
    let members = tree.iter().flat_map(|task| [task.member.group, task.member.session]);
    threads.chain(members).max().unwrap_or(1) + 1
}

/// What of a task is a descriptor.
struct References {
    /// (number, file, flags).
    descriptors: Vec<(u64, Ref, u64)>,
    directory: Ref,
    /// Of one that has called chroot(2).
    root: Option<Ref>,
    executable: Option<Ref>,
    /// What is opened when the processes are there.
    of_processes: Vec<OfProcess>,
    /// (set, number, events, data) of what has to be put into epoll sets once more.
    watches: Vec<Vec<u64>>,
}

impl References {
    /// `spare`: a number of no process, for those that have ended. `watched`: the files that a
    /// process before this one puts into a set, as (set, file). Processes share sets, and two of
    /// them cannot both add a file.
    fn gather(
        task: &Task,
        files: &mut Files<'_>,
        spare: &mut u64,
        watched: &mut BTreeSet<(u64, u64)>,
    ) -> Result<References, PlanError> {
        let mut descriptors = Vec::new();
        let (mut of_processes, mut signalfds, mut reopened) = (Vec::new(), BTreeSet::new(), BTreeMap::new());
        for d in &task.descriptors {
            let (id, fd) = (d.number(fdinfo_entry::ID), d.number(fdinfo_entry::FD));
            let kind = files.kind(id);
            if kind == kind::SIGNALFD {
                signalfds.insert(fd);
            }
            let descriptor_flags = d.number(fdinfo_entry::FLAGS);
            if kind == kind::PIDFD {
                reopened.insert(fd, id);
                let (found, flags) = files.pidfd(id)?;
                let (process, gone) = (found.unwrap_or(*spare), found.is_none());
                *spare += u64::from(gone);
                of_processes.push(OfProcess { number: fd, process, flags, descriptor_flags, gone, file: None });
                continue;
            }
            if let Some(file) = files.process_file(id)? {
                reopened.insert(fd, id);
                let (process, flags) = (file.process, file.flags);
                let file = Some(file);
                of_processes.push(OfProcess { number: fd, process, flags, descriptor_flags, gone: false, file });
                continue;
            }
            if files.is_reopened(id)? {
                reopened.insert(fd, id);
            }
            descriptors.push((fd, files.open_file(id)?, descriptor_flags));
        }
        let mut watches = Vec::new();
        for d in &task.descriptors {
            let set = d.number(fdinfo_entry::ID);
            if files.kind(set) != kind::EVENTPOLL {
                continue;
            }
            for watch in files.watches(set)? {
                let fd = watch.number(eventpoll_tfd_entry::TFD);
                let is_first = |file: &u64| watched.insert((set, *file));
                if signalfds.contains(&fd) || reopened.get(&fd).is_some_and(is_first) {
                    let events = watch.number(eventpoll_tfd_entry::EVENTS);
                    watches.push(vec![d.number(fdinfo_entry::FD), fd, events, watch.number(eventpoll_tfd_entry::DATA)]);
                }
            }
        }
        let executable =
            task.member.maker.map(|_| files.executable(task.mm.number(mm_entry::EXE_FILE_ID))).transpose()?;
        let directory = files.open_path(task.fs.number(fs_entry::CWD_ID), false)?;
        let root = task.fs.number(fs_entry::ROOT_ID);
        let root = if files.path_of(root)? == "/" { None } else { Some(files.open_path(root, false)?) };
        Ok(References { descriptors, directory, root, executable, of_processes, watches })
    }

    /// Inodes of the INET sockets among the descriptors.
    fn sockets(&self, files: &Files<'_>) -> BTreeSet<u32> {
        let inode = |(_, file, _): &(u64, Ref, u64)| match file {
            Ref::Received(number) => match files.received.get(*number)? {
                Received::Socket(inode) => Some(*inode),
                _ => None,
            },
            Ref::Opened(_) => None,
        };
        self.descriptors.iter().filter_map(inode).collect()
    }
}

/// What the tasks of a plan have in common.
struct Common<'a> {
    files: &'a Files<'a>,
    /// Locks of files, by process.
    locks: &'a BTreeMap<u32, Vec<Vec<u64>>>,
    /// Stopped processes whose parent has not been told.
    unreported: &'a [u32],
}

/// What is written of a task before the rest.
struct Before {
    base: Base,
    filters: Span,
    mappings: Span,
}

impl Task {
    fn tc(&self) -> Result<Message, PlanError> {
        Ok(self.core.message(core_entry::TC)?.unwrap_or_default())
    }

    /// Areas of rseq(2), address and length, of its threads.
    fn rseq(&self) -> Result<Vec<(u64, u64)>, PlanError> {
        let mut found = Vec::new();
        for (_, core) in &self.threads {
            let thread = core.message(core_entry::THREAD_CORE)?.unwrap_or_default();
            let area = thread.message(thread_core_entry::RSEQ_ENTRY)?.unwrap_or_default();
            let address = area.number(rseq_entry::RSEQ_ABI_POINTER);
            if address != 0 {
                found.push((address, area.number(rseq_entry::RSEQ_ABI_SIZE)));
            }
        }
        Ok(found)
    }

    fn planned(&self, memory: &Memory, sockets: BTreeSet<u32>, mut own: OwnFilters) -> Result<PlannedTask, PlanError> {
        let mut threads = Vec::new();
        for (id, core) in &self.threads {
            let Some(registers) = registers::read(core)? else {
                return unsupported("registers that this machine does not have");
            };
            threads.push(PlannedThread { id: *id, registers, filters: own.remove(id).unwrap_or_default() });
        }
        Ok(PlannedTask {
            pid: self.pid,
            vdso: memory.vdso,
            threads,
            can_come: memory.can_come,
            stopped: self.tc()?.number(task_core_entry::TASK_STATE) == state::STOPPED,
            sockets,
        })
    }

    /// `struct task`.
    fn write(
        &self,
        writer: &mut Writer,
        common: &Common<'_>,
        references: &References,
        memory: Option<&Memory>,
        Before { base, filters, mappings }: Before,
    ) -> Result<Vec<u64>, PlanError> {
        let Common { files, locks, unreported } = *common;
        let tc = self.tc()?;
        self.check(&tc)?;
        let descriptors: Vec<Vec<u64>> =
            references.descriptors.iter().map(|(number, of, flags)| vec![*number, files.number(*of), *flags]).collect();
        let descriptors = writer.list(&descriptors);
        let (pages, vdso) = memory.map(|m| m.write(writer, files)).unwrap_or_default();
        let signals = writer.list(&signals(&tc)?);
        let limits = writer.list(&limits(&tc)?);
        let timers = tc.message(task_core_entry::TIMERS)?.unwrap_or_default();
        if !timers.messages(task_timers_entry::POSIX)?.is_empty() && !kip_sys::timer::can_choose_timer_ids() {
            return unsupported("POSIX timers on a kernel that numbers them as it likes");
        }
        let posix = writer.list(&posix_timers(&timers, base)?);
        let mut thread_items = Vec::new();
        for (id, core) in &self.threads {
            thread_items.push(thread(writer, *id, core, &tc)?);
        }
        let threads = writer.list(&thread_items);
        let locks = writer.list(locks.get(&self.pid).map_or(&[], Vec::as_slice));
        let watches = writer.list(&references.watches);
        let of_processes: Vec<_> = references.of_processes.iter().map(|one| one.write(writer)).collect();
        let of_processes = writer.list(&of_processes);
        let auxv: Vec<u64> = self.mm.varints(mm_entry::MM_SAVED_AUXV)?;
        let auxv = Span(writer.words(&auxv), auxv.len() as u64 * 8);
        let mut item = self.identity();
        if tc.number(task_core_entry::TASK_STATE) == state::STOPPED {
            (item[STATE], item[STATE + 1]) = (TASK_STOPPED, u64::from(unreported.contains(&self.pid)));
        }
        for span in
            [descriptors, mappings, pages, signals, limits, posix, threads, filters, locks, watches, vdso, of_processes]
        {
            item.extend([span.0, span.1]);
        }
        item.extend([
            files.number(references.directory),
            self.fs.varint(fs_entry::UMASK).unwrap_or(0o022),
            references.executable.map_or(u64::MAX, |e| files.number(e)),
            self.mm.varint(mm_entry::DUMPABLE).unwrap_or(1),
            self.mm.number(mm_entry::THP_DISABLED),
            tc.number(task_core_entry::CHILD_SUBREAPER),
            tc.number(task_core_entry::PERSONALITY),
            tc.number(task_core_entry::MEMBARRIER_REGISTRATION_MASK),
        ]);
        item.extend(intervals(&timers, base.monotonic)?);
        item.extend(MEMORY.map(|field| self.mm.number(field)));
        item.extend([auxv.0, auxv.1]);
        let pending = pending(writer, tc.message(task_core_entry::SIGNALS_S)?)?;
        let populate = memory.map(|m| m.write_populate(writer)).unwrap_or_default();
        let rings = memory.map(|m| m.write_rings(writer, files)).unwrap_or_default();
        let settings = own_settings(writer, &tc);
        for span in [pending, populate, rings, settings] {
            item.extend([span.0, span.1]);
        }
        Ok(item)
    }

    /// The first words of `struct task`.
    fn identity(&self) -> Vec<u64> {
        let (state, status) = match self.life {
            Life::Alive => (0, 0),
            Life::Zombie(status) => (1, status),
            Life::Ghost => (2, 0),
        };
        let Member { pid, maker, session, group, joins, .. } = self.member;
        let is = |how: fn(&Maker) -> bool| u64::from(maker.as_ref().is_some_and(how));
        vec![
            pid,
            maker.map_or(u64::MAX, |maker| maker.index as u64),
            is(|maker| maker.sibling),
            is(|maker| maker.early),
            u64::from(maker.is_some() && session == pid),
            if joins == Joins::Inherits { 0 } else { group },
            u64::from(joins == Joins::Lends),
            state,
            status,
        ]
    }

    /// `struct task` of one that ends at once: nothing but its name.
    fn write_dead(&self, writer: &mut Writer) -> Result<Vec<u64>, PlanError> {
        let comm = writer.string(&self.tc()?.string(task_core_entry::COMM).unwrap_or_default());
        let mut thread = vec![0; THREAD_WORDS];
        (thread[0], thread[THREAD_COMM]) = (u64::from(self.pid), comm);
        let threads = writer.list(&[thread]);
        let mut item = self.identity();
        item.resize(TASK_WORDS, 0);
        (item[TASK_THREADS], item[TASK_THREADS + 1]) = (threads.0, threads.1);
        Ok(item)
    }

    fn check(&self, tc: &Message) -> Result<(), PlanError> {
        if !matches!(tc.number(task_core_entry::TASK_STATE), state::ALIVE | state::STOPPED) {
            return unsupported("a process in an unknown state");
        }
        if self.mm.varint(mm_entry::DUMPABLE).unwrap_or(1) > 1 {
            return unsupported("a process that may only be dumped by root");
        }
        if own_oom_score(tc).is_some_and(|score| score < usual_oom_score()) {
            return unsupported("an out-of-memory score that it could not set itself");
        }
        for (_, core) in &self.threads {
            let thread = core.message(core_entry::THREAD_CORE)?.unwrap_or_default();
            let rseq = thread.message(thread_core_entry::RSEQ_ENTRY)?;
            if rseq.is_some_and(|r| r.number(rseq_entry::RSEQ_CS_POINTER) != 0) {
                return unsupported("a thread in a restartable sequence");
            }
            let info = core.message(core_entry::THREAD_INFO)?.unwrap_or_default();
            if info.messages(thread_info_x86::TLS)?.iter().any(|tls| tls.number(user_desc_t::BASE_ADDR) != 0) {
                return unsupported("32-bit thread areas");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "tasks_tests.rs"]
mod tests;
