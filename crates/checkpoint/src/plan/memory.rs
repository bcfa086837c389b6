//! Mappings and their contents.

use super::files::{Files, Ref};
use super::inherit::MappingWords;
use super::layout::{AREA, AREA_END, PAGE, SHARED, Span, Writer};
use super::memory_files::OpenMemory;
use super::{PlanError, unsupported};
use crate::pages::part;
use kip_criu_images::codes::status;
use kip_criu_images::fields::{aio_ring_entry, mm_entry, pagemap_entry, pagemap_head, vma_entry};
use kip_criu_images::pagemap::{IN_PARENT, PRESENT, pages_of};
use kip_criu_images::system_v::{Segment, SystemV};
use kip_criu_images::{Images, Message};
use kip_snapshot::pages::{PageMap, Run};
use std::collections::BTreeMap;

const PROT_READ: u64 = 1;
const PROT_WRITE: u64 = 2;
const PROT_EXEC: u64 = 4;
const MAP_PRIVATE: u64 = 2;
const MAP_ANONYMOUS: u64 = 0x20;
const MAP_LOCKED: u64 = 0x2000;
const MAP_HUGETLB: u64 = 0x4_0000;
/// A private mapping of a file is divided into so many pieces at most, written and not: each is a
/// mapping more.
const MOST_PIECES: usize = 64;
/// To make one takes about as long as to read so many pages.
const PAGES_A_PIECE: u64 = 2;
/// Shorter runs are left to faults, bytes.
const LEAST_POPULATED: u64 = 4 * PAGE as u64;
/// Where [`Mapping::kind`] says so, `ours` is the number of a shared memory.
const KIND_SHARED: u64 = 1;
/// Guards in mappings that come before it.
const KIND_GUARD: u64 = 2;

/// The vdso and what belongs to it: (offset from its start, size) of each piece, as they follow
/// each other.
pub(super) type VdsoShape = Vec<(u64, u64)>;

/// One mapping.
#[derive(Debug, Clone, Copy)]
struct Mapping {
    start: u64,
    end: u64,
    protection: u64,
    flags: u64,
    file: Option<Ref>,
    shared: Option<SharedId>,
    offset: u64,
    advice: u64,
    /// Its pages may come later: what the pager can serve.
    can_wait: bool,
}

/// Pages that follow each other in a file.
#[derive(Debug)]
pub(super) struct Pages {
    file: Ref,
    position: u64,
    /// Where the last run ends in the file.
    end: u64,
    runs: Vec<(u64, u64)>,
}

/// A ring of io_setup(2).
#[derive(Debug)]
struct Ring {
    start: u64,
    end: u64,
    /// As io_setup(2) takes it.
    requests: u64,
    /// Its first page, which has its head.
    head: (Ref, Run),
}

/// The memory of one process.
#[derive(Debug)]
pub(super) struct Memory {
    mappings: Vec<Mapping>,
    /// Guards in them.
    guards: Vec<(u64, u64)>,
    rings: Vec<Ring>,
    /// What is read before the program runs, by address.
    runs: Vec<(Ref, Run)>,
    /// Pages of rseq(2) areas: the kernel writes to them when it moves a thread, and kills the
    /// thread where it cannot.
    rseq: Vec<u64>,
    /// Pages in mappings of which some come later.
    pub can_come: u64,
    /// Start of the vdso.
    pub vdso: u64,
    pub vdso_shape: VdsoShape,
}

/// A memory shared among processes or mappings, by CRIU's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SharedId {
    Anonymous(u64),
    /// A System V segment, by its own number.
    Segment(u64),
    /// The same for those that have attached it to read only.
    ReadOnly(u64),
    /// A memory file that processes have open, by the number of its inode.
    Open(u64),
}

/// What is shared: its size, whether it is a segment that goes with its last attachment, and of a
/// memory file that is open its descriptor and CRIU's number for its contents.
#[derive(Debug, Clone, Copy, Default)]
struct Shared {
    size: u64,
    removed: bool,
    file: Option<(Ref, u64)>,
}

/// Memory shared among processes or mappings; its place among all is its number in the plan.
#[derive(Debug, Default)]
pub(super) struct SharedMemory(BTreeMap<SharedId, Shared>);

impl SharedMemory {
    /// With the segments of a namespace and the memory files that are open, whether they are mapped
    /// or not.
    pub(super) fn of(system_v: &SystemV, files: &mut Files<'_>) -> Result<SharedMemory, PlanError> {
        let segment = |Segment { id, size, removed, .. }| (SharedId::Segment(id), Shared { size, removed, file: None });
        let mut all: BTreeMap<SharedId, Shared> = system_v.segments().map(segment).collect();
        for OpenMemory { inode, size, contents, file } in files.open_memory()? {
            all.insert(SharedId::Open(inode), Shared { size, removed: false, file: Some((file, contents)) });
        }
        Ok(SharedMemory(all))
    }

    fn note(&mut self, id: u64, size: u64) -> SharedId {
        let id = SharedId::Anonymous(id);
        let known = self.0.entry(id).or_default();
        known.size = known.size.max(size);
        id
    }

    /// Notes a mapping of a segment.
    fn note_segment(&mut self, id: u64, read_only: bool) -> Result<SharedId, PlanError> {
        let Some(segment) = self.0.get(&SharedId::Segment(id)).copied() else {
            return unsupported("System V memory of another IPC namespace");
        };
        if !read_only {
            return Ok(SharedId::Segment(id));
        }
        self.0.insert(SharedId::ReadOnly(id), Shared { removed: false, ..segment });
        Ok(SharedId::ReadOnly(id))
    }

    fn place(&self, id: SharedId) -> u64 {
        self.0.keys().position(|k| *k == id).expect("noted before") as u64
    }

    /// `struct shared` for each, but for where the list of its contents is, and those.
    pub(super) fn read(
        &self,
        images: &Images,
        files: &mut Files<'_>,
    ) -> Result<Vec<(SharedItem, Vec<Pages>)>, PlanError> {
        let mut address = SHARED;
        let mut all = Vec::new();
        for (id, Shared { size, removed, file }) in &self.0 {
            let room = |at: &u64| *at <= AREA_END;
            let end =
                size.checked_next_multiple_of(PAGE as u64).and_then(|size| address.checked_add(size)).filter(room);
            let Some(end) = end else {
                return unsupported("more shared memory than there is room to make it");
            };
            let (segment, contents) = match id {
                SharedId::Anonymous(id) if self.0.contains_key(&SharedId::Segment(*id)) => {
                    return unsupported("memory of both kinds by one number");
                }
                SharedId::Anonymous(id) => (NO_SEGMENT, Some(id)),
                SharedId::Segment(id) => (*id, Some(id)),
                SharedId::ReadOnly(id) => (*id, None),
                SharedId::Open(_) => (NO_SEGMENT, file.as_ref().map(|(_, contents)| contents)),
            };
            let entries = match contents {
                Some(id) => images.entries_if_any(&format!("pagemap-shmem-{id}.img"))?,
                None => Vec::new(),
            };
            let how = u64::from(contents.is_none()) | u64::from(*removed) << 1;
            let file = file.map(|(file, _)| file);
            all.push((SharedItem { size: *size, segment, how, file }, read_pages(&entries, files, address, *size)?));
            address = end;
        }
        Ok(all)
    }
}

/// What is in no plan but as memory of its own: `segment` of `struct shared`.
const NO_SEGMENT: u64 = u64::MAX;

/// Words of `struct shared`.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedItem {
    pub size: u64,
    /// The number of the segment.
    pub segment: u64,
    /// `SHARED_*` in plan.h.
    pub how: u64,
    /// A memory file.
    pub file: Option<Ref>,
}

impl Memory {
    /// Takes `mm-PID.img` and the pages that belong to it. `rseq` are the areas of its threads:
    /// address and length.
    pub(super) fn read(
        pages: &PageMap,
        pid: u32,
        mm: &Message,
        rseq: &[(u64, u64)],
        files: &mut Files<'_>,
        shared: &mut SharedMemory,
    ) -> Result<Memory, PlanError> {
        let page = |address: u64| address & !(PAGE as u64 - 1);
        let rseq = rseq.iter().flat_map(|(at, length)| [page(*at), page(at + length.max(&1) - 1)]).collect();
        let (mappings, runs, vdso_shape) = (Vec::new(), Vec::new(), Vec::new());
        let (guards, rings) = (Vec::new(), Vec::new());
        let mut memory = Memory { mappings, guards, rings, runs, rseq, can_come: 0, vdso: 0, vdso_shape };
        let (mut special, mut rings) = (Vec::new(), Vec::new());
        for vma in mm.messages(mm_entry::VMAS)? {
            let (start, end) = (vma.number(vma_entry::START), vma.number(vma_entry::END));
            let status = vma.number(vma_entry::STATUS);
            if status & !status::KNOWN != 0 || vma.number(vma_entry::FLAGS) & MAP_HUGETLB != 0 {
                return unsupported(format!("a mapping of CRIU's kind {status:#x}"));
            }
            if status & status::VSYSCALL != 0 {
                continue;
            }
            if start < AREA_END && end > AREA {
                return unsupported("a mapping where the restorer needs room");
            }
            if status & status::GUARD != 0 {
                memory.guards.push((start, end));
                continue;
            }
            if status & (status::VDSO | status::VVAR) != 0 {
                if status & status::VDSO != 0 {
                    memory.vdso = start;
                }
                special.push((start, end - start));
                continue;
            }
            if status & status::AIORING != 0 {
                rings.push((start, end));
                continue;
            }
            memory.mappings.push(mapping(&vma, status, files, shared)?);
        }
        special.sort_unstable();
        if memory.vdso == 0 {
            return unsupported("a process without a vdso");
        }
        memory.vdso_shape = special.iter().map(|(at, size)| (at.wrapping_sub(memory.vdso), *size)).collect();
        let Some(process) = pages.processes.get(&pid) else { return unsupported("a process without a pagemap") };
        for (start, end) in rings {
            let entries = mm.messages(mm_entry::AIOS)?;
            let entry = entries.iter().find(|ring| ring.number(aio_ring_entry::ID) == start);
            let head = process.runs.iter().find_map(|run| Some((run, part(run, start, start + PAGE as u64)?)));
            let (Some(entry), Some((run, page))) = (entry, head) else { return unsupported("a ring without contents") };
            let head = (files.pages(&pages.files[run.file as usize].name), page);
            let requests = entry.number(aio_ring_entry::NR_REQ);
            memory.rings.push(Ring { start, end, requests, head });
            special.push((start, end - start));
        }
        special.sort_unstable();
        for run in &process.runs {
            let file = files.pages(&pages.files[run.file as usize].name);
            // A run of the store goes on from one mapping into the next.
            let mut at = run.start;
            for (start, size) in special.iter().filter(|(start, size)| run.start < start + size && run.end() > *start) {
                memory.runs.extend(part(run, at, *start).map(|part| (file, part)));
                at = start + size;
            }
            memory.runs.extend(part(run, at, u64::MAX).map(|part| (file, part)));
        }
        if memory.eager().any(|run| run.start < AREA_END && run.end() > AREA) {
            return unsupported("pages where the restorer needs room");
        }
        Ok(memory)
    }

    /// Has what is written of private file mappings come back as private memory, which may come
    /// later, as the pager does with them before a process hibernates: the file's name is gone
    /// from there. Of what its parent had written before a fork each process has such pages, a
    /// megabyte or two.
    pub(super) fn free_of_files(&mut self) {
        let mut divided = Vec::with_capacity(self.mappings.len());
        for m in std::mem::take(&mut self.mappings) {
            let pieces = self.pieces(&m);
            let written: u64 = pieces.iter().filter(|piece| piece.2).map(|(start, end, _)| end - start).sum();
            let pays = written / PAGE as u64 >= PAGES_A_PIECE * (pieces.len() as u64).saturating_sub(1);
            if pieces.is_empty() || pieces.len() > MOST_PIECES || !pays {
                divided.push(m);
                continue;
            }
            for (start, end, written) in pieces {
                divided.push(if written {
                    let flags = m.flags | MAP_ANONYMOUS;
                    Mapping { start, end, flags, file: None, offset: 0, can_wait: true, ..m }
                } else {
                    Mapping { start, end, offset: m.offset + (start - m.start), ..m }
                });
            }
        }
        self.mappings = divided;
    }

    /// A private mapping of a file in pieces: start, end, whether it is written. None of any other
    /// mapping, or of one of which nothing is written.
    fn pieces(&self, m: &Mapping) -> Vec<(u64, u64, bool)> {
        let fits = m.file.is_some()
            && m.flags & (MAP_PRIVATE | MAP_LOCKED) == MAP_PRIVATE
            && m.protection & (PROT_READ | PROT_EXEC) == PROT_READ;
        let mut pieces: Vec<(u64, u64, bool)> = Vec::new();
        if !fits {
            return pieces;
        }
        let first = self.runs.partition_point(|(_, run)| run.end() <= m.start);
        let mut at = m.start;
        for (_, run) in self.runs[first..].iter().take_while(|(_, run)| run.start < m.end) {
            let (start, end) = (run.start.max(m.start), run.end().min(m.end));
            if start > at {
                pieces.push((at, start, false));
            }
            match pieces.last_mut() {
                Some(last) if last.2 && last.1 == start => last.1 = end,
                _ => pieces.push((start, end, true)),
            }
            at = end;
        }
        if at > m.start && at < m.end {
            pieces.push((at, m.end, false));
        }
        pieces
    }

    /// Bytes of pages that may come later.
    pub(super) fn can_wait(&self) -> u64 {
        self.split().1.iter().map(|run| run.end() - run.start).sum()
    }

    /// Leaves them out.
    pub(super) fn leave_out(&mut self) {
        let (now, later) = self.split();
        let in_mapping = |run: &Run, m: &Mapping| part(run, m.start, m.end).map_or(0, |part| u64::from(part.pages));
        let waiting = || self.mappings.iter().filter(|m| m.can_wait);
        let pages = |run: &Run| waiting().map(|m| in_mapping(run, m)).sum::<u64>();
        self.can_come = if later.is_empty() { 0 } else { self.runs.iter().map(|(_, run)| pages(run)).sum() };
        self.runs = now;
    }

    /// What has to be there when the program runs, and what may come later.
    fn split(&self) -> (Vec<(Ref, Run)>, Vec<Run>) {
        let (mut now, mut later) = (Vec::new(), Vec::new());
        let mut mappings = self.mappings.iter().peekable();
        for (file, run) in &self.runs {
            let mut at = run.start;
            while at < run.end() {
                while mappings.next_if(|m| m.end <= at).is_some() {}
                let (end, waits) = match mappings.peek() {
                    Some(m) if m.start <= at => (m.end.min(run.end()), m.can_wait),
                    Some(m) => (m.start.min(run.end()), false),
                    None => (run.end(), false),
                };
                // What waits is cut at pages that cannot.
                let (end, waits) = match self.rseq.iter().filter(|page| waits && **page >= at).min() {
                    Some(page) if *page == at => (at + PAGE as u64, false),
                    Some(page) => (end.min(*page), waits),
                    None => (end, waits),
                };
                match part(run, at, end) {
                    Some(part) if waits => later.push(part),
                    Some(part) => now.push((*file, part)),
                    None => {}
                }
                at = end;
            }
        }
        (now, later)
    }

    /// What is read before the program runs.
    pub(super) fn eager(&self) -> impl Iterator<Item = Run> + '_ {
        self.runs.iter().chain(self.rings.iter().map(|ring| &ring.head)).map(|(_, run)| *run)
    }

    /// Whether any page of a mapping is read.
    fn is_filled(&self, m: &Mapping) -> bool {
        let first = self.runs.partition_point(|(_, run)| run.end() <= m.start);
        self.runs.get(first).is_some_and(|(_, run)| run.start < m.end)
    }

    /// What is read, as lists of what follows each other in a file.
    fn lists(&self) -> Vec<Pages> {
        let mut runs: Vec<&(Ref, Run)> = self.runs.iter().collect();
        runs.sort_unstable_by_key(|(_, run)| (run.file, run.first));
        let mut lists: Vec<Pages> = Vec::new();
        for (file, run) in runs {
            let (position, length) = (u64::from(run.first) * PAGE as u64, run.end() - run.start);
            match lists.last_mut() {
                Some(list) if list.file == *file && list.end == position => {
                    list.runs.push((run.start, length));
                    list.end += length;
                }
                _ => {
                    lists.push(Pages { file: *file, position, end: position + length, runs: vec![(run.start, length)] })
                }
            }
        }
        lists
    }

    /// Runs of anonymous memory long enough that it pays to have their pages made in one call.
    pub(super) fn write_populate(&self, writer: &mut Writer) -> Span {
        let mut found: Vec<(u64, u64)> = Vec::new();
        for m in self.mappings.iter().filter(|m| m.file.is_none() && m.shared.is_none()) {
            let first = self.runs.partition_point(|(_, run)| run.end() <= m.start);
            for (_, run) in self.runs[first..].iter().take_while(|(_, run)| run.start < m.end) {
                let (start, end) = (run.start.max(m.start), run.end().min(m.end));
                match found.last_mut() {
                    Some(last) if last.1 == start && start > m.start => last.1 = end,
                    _ => found.push((start, end)),
                }
            }
        }
        let long = found.iter().filter(|(start, end)| end - start >= LEAST_POPULATED);
        writer.list(&long.map(|(start, end)| vec![*start, end - start]).collect::<Vec<_>>())
    }

    /// `struct ring`.
    pub(super) fn write_rings(&self, writer: &mut Writer, files: &Files<'_>) -> Span {
        let one = |Ring { start, end, requests, head: (file, run) }: &Ring| {
            vec![*start, end - start, *requests, files.number(*file), u64::from(run.first) * PAGE as u64]
        };
        writer.list(&self.rings.iter().map(one).collect::<Vec<_>>())
    }

    /// Its mappings, without what makes them.
    pub(super) fn mappings(&self, files: &Files<'_>, shared: &SharedMemory) -> Vec<MappingWords> {
        let guard = |(start, end): &(u64, u64)| vec![*start, *end, 0, 0, u64::MAX, 0, KIND_GUARD, 0, 0, 0];
        let plain = |m: &Mapping| {
            let ours = m.file.map(|f| files.number(f)).or(m.shared.map(|id| shared.place(id))).unwrap_or(u64::MAX);
            let kind = if m.shared.is_some() { KIND_SHARED } else { 0 };
            let (offset, written) = (m.offset, u64::from(self.is_filled(m)));
            vec![m.start, m.end, m.protection, m.flags, ours, offset, kind, m.advice, written, 0]
        };
        self.mappings.iter().map(plain).chain(self.guards.iter().map(guard)).collect()
    }

    /// Lists of `struct pages` and of the pieces of its vdso.
    pub(super) fn write(&self, writer: &mut Writer, files: &Files<'_>) -> (Span, Span) {
        let piece = |&(offset, size): &(u64, u64)| vec![offset, size, self.vdso.wrapping_add(offset)];
        let vdso: Vec<Vec<u64>> = self.vdso_shape.iter().map(piece).collect();
        (write_pages(writer, files, &self.lists()), writer.list(&vdso))
    }
}

fn mapping(vma: &Message, status: u64, files: &mut Files<'_>, shared: &mut SharedMemory) -> Result<Mapping, PlanError> {
    let (start, end) = (vma.number(vma_entry::START), vma.number(vma_entry::END));
    let (protection, flags) = (vma.number(vma_entry::PROT), vma.number(vma_entry::FLAGS));
    // Of shared memory or of a file.
    let id = vma.number(vma_entry::SHMID);
    let mut m = Mapping {
        start,
        end,
        protection,
        flags,
        file: None,
        shared: None,
        offset: vma.number(vma_entry::PGOFF),
        advice: vma.number(vma_entry::MADV),
        can_wait: status & status::ANON_PRIVATE != 0 && protection & PROT_READ != 0 && flags & MAP_LOCKED == 0,
    };
    if status & status::SYSVIPC != 0 {
        m.shared = Some(shared.note_segment(id, vma.varint(vma_entry::FDFLAGS) == Some(0))?);
    } else if status & status::ANON_SHARED != 0 {
        m.shared = Some(shared.note(id, m.offset.saturating_add(end.saturating_sub(start))));
    } else if status & status::MEMFD != 0 {
        let is_shared = status & status::FILE_SHARED != 0;
        if !is_shared || files.is_made(id)? {
            let opened_for_writing = vma.number(vma_entry::FDFLAGS) & 3 != 0 || protection & PROT_WRITE != 0;
            m.file = Some(files.mapped_memory_file(id, is_shared && opened_for_writing)?);
            m.flags &= !MAP_ANONYMOUS;
        } else {
            // What CRIU makes of anonymous shared memory, or a memory file that has been closed.
            let (contents, size) = files.shared_memory_file(id)?;
            m.shared = Some(shared.note(contents, size.max(m.offset.saturating_add(end.saturating_sub(start)))));
        }
    } else if status & (status::FILE_PRIVATE | status::FILE_SHARED) != 0 {
        // A process that mapped the file to write to it had it open for that.
        let opened_for_writing = vma.number(vma_entry::FDFLAGS) & 3 != 0 || protection & PROT_WRITE != 0;
        m.file = Some(files.mapped(id, status & status::FILE_SHARED != 0 && opened_for_writing)?);
        m.flags &= !MAP_ANONYMOUS;
    } else {
        m.flags |= MAP_ANONYMOUS;
        m.offset = 0;
    }
    Ok(m)
}

/// The page runs of a pagemap image of a shared memory of `size` bytes, moved by `base`.
fn read_pages(entries: &[Message], files: &mut Files<'_>, base: u64, size: u64) -> Result<Vec<Pages>, PlanError> {
    let mut entries = entries.iter();
    let Some(head) = entries.next() else { return Ok(Vec::new()) };
    let file = files.pages(&format!("pages-{}.img", head.number(pagemap_head::PAGES_ID)));
    let mut lists: Vec<Pages> = Vec::new();
    for (position, at, length) in runs(entries.as_slice())? {
        // The restorer reads them to where they say, and has other memory of its own behind.
        if at + length > size.next_multiple_of(PAGE as u64) {
            return unsupported("pages beyond the end of a shared memory");
        }
        match lists.last_mut() {
            Some(list) if list.end == position => {
                list.runs.push((at + base, length));
                list.end += length;
            }
            _ => lists.push(Pages { file, position, end: position + length, runs: vec![(at + base, length)] }),
        }
    }
    Ok(lists)
}

/// The runs of a pagemap image of shared memory, without its head: place in the file of pages,
/// place in the memory, length; bytes.
pub(super) fn runs(entries: &[Message]) -> Result<Vec<(u64, u64, u64)>, PlanError> {
    let (mut found, mut position) = (Vec::new(), 0);
    for entry in entries {
        let flags = entry.number(pagemap_entry::FLAGS);
        if flags & IN_PARENT != 0 || entry.number(pagemap_entry::IN_PARENT) != 0 {
            return unsupported("pages in another snapshot");
        }
        if flags & PRESENT != 0 {
            let (at, length) = (entry.number(pagemap_entry::VADDR), pages_of(entry).saturating_mul(PAGE as u64));
            let (Some(next), Some(_)) = (u64::checked_add(position, length), at.checked_add(length)) else {
                return unsupported("pages beyond all memory");
            };
            found.push((position, at, length));
            position = next;
        }
    }
    Ok(found)
}

pub(super) fn write_pages(writer: &mut Writer, files: &Files<'_>, lists: &[Pages]) -> Span {
    let items: Vec<Vec<u64>> = lists
        .iter()
        .map(|list| {
            let runs: Vec<Vec<u64>> = list.runs.iter().map(|(at, length)| vec![*at, *length]).collect();
            let Span(at, count) = writer.list(&runs);
            vec![files.number(list.file), list.position, at, count]
        })
        .collect();
    writer.list(&items)
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise waking: pages that an image has beyond the end of a shared memory are refused, and so
    //   are sizes and places that add up to more than there is
    #[test]
    fn pages_beyond_a_shared_memory_are_refused() {
        const SIZE: u64 = 2 * PAGE as u64;
        let read = |size: u64, at: u64, pages: u64| {
            let (mut head, mut entry) = (Message::default(), Message::default());
            head.set_varint(pagemap_head::PAGES_ID, 1);
            for (field, value) in
                [(pagemap_entry::VADDR, at), (pagemap_entry::NR_PAGES, pages), (pagemap_entry::FLAGS, PRESENT)]
            {
                entry.set_varint(field, value);
            }
            let mut images = Images::default();
            images.put_entries("pagemap-shmem-7.img", &[head, entry]);
            for empty in ["files.img", "mountpoints.img"] {
                images.put_entries(empty, &[]);
            }
            let mut shared = SharedMemory::default();
            shared.note(7, size);
            let read = shared.read(&images, &mut Files::read(&images).unwrap());
            read.map(|all| all.iter().map(|(_, lists)| lists.len()).sum::<usize>())
        };
        assert_eq!(read(SIZE, 0, 2).unwrap(), 1);
        assert_eq!(read(SIZE - 1, PAGE as u64, 1).unwrap(), 1, "the last page is not whole");
        for (size, at, pages) in
            [(SIZE, 0, 3), (SIZE, SIZE, 1), (SIZE, !0xfff, 1), (SIZE, 0, u64::MAX), (AREA_END, 0, 1), (u64::MAX, 0, 1)]
        {
            assert!(
                matches!(read(size, at, pages), Err(PlanError::Unsupported { .. })),
                "{size:#x} {at:#x} {pages:#x}"
            );
        }
    }
}
