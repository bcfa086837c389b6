//! Random number generators that a clone must not have alike: OpenSSL's, from 3.0 on.
//!
//! Such a generator draws a new seed from the kernel when getpid(2) is not what it was, as after a
//! fork. A clone's is. So what it remembers of the pid is made another in a clone, and the count by
//! which generators that were seeded from it see that they have to be seeded anew
//! (`struct prov_drbg_st` of OpenSSL's default provider, the same from 3.0 to 3.6).
//!
//! Nothing says where a generator is. What a process has in memory is gone through for what OpenSSL
//! has as the most that may be asked for; if that is much, from the writable data of OpenSSL's
//! library, or, where there is none, of all that is mapped as a program or a library, which may
//! have OpenSSL in it, pointer by pointer, and what a generator must be is compared:
//! functions of one program, the pid, what OpenSSL has as the most that may be asked for. Reads a
//! generation, and no process; what is in no page of it was never written, and what is in a store
//! must have come.

use crate::fill::{Fill, Fills};
use kip_clocks::tree::Tree;
use kip_criu_images::fields::{file_entry, reg_file_entry};
use kip_criu_images::inspect::{ImageProcess, MappedRange, MappingKind, processes};
use kip_criu_images::{CheckpointImageError, Images};
use kip_snapshot::MemoryPatch;
use kip_snapshot::pages::{PAGE, PageMap, ProcessPages, UNSYNCED};
use kip_snapshot::remote::OpenPages;
use kip_sys::process::write_memory;
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Most pages that are read for one process.
const MOST_PAGES: usize = 4096;
/// Most pages of a process all of which are gone through, one behind the other: that takes some
/// milliseconds, and less than to follow pointers.
const MOST_SCANNED: u64 = 8192;
/// Pages that are gone through at once.
const SCANNED_AT_ONCE: u32 = 64;
/// Most pointers that are followed in one process.
const MOST_POINTERS: usize = 100_000;
/// How many pointers lie between a library's data and a generator: the library's context, its list
/// of parts, their array, the part for random numbers, the generator's handle, the generator.
const DEEPEST: u32 = 6;
/// Bytes that are looked at behind a pointer.
const LOOKED_AT: usize = 512;

/// Byte offsets in a generator: its first function, how many follow each other, the pid, the
/// strength in bits, the most that may be asked for at once, and how often it was seeded.
const FUNCTIONS: usize = 16;
const FUNCTION_COUNT: usize = 4;
const FORK_ID: usize = 120;
const STRENGTH: usize = 128;
const MAX_REQUEST: usize = 136;
const RESEED_COUNTER: usize = 216;
const STRENGTHS: [u32; 4] = [112, 128, 192, 256];
const MOST_AT_ONCE: u64 = 1 << 16;

/// What makes the generators that are found in a generation draw new seeds.
///
/// # Errors
/// An image is damaged; memory is lost that was still to be copied.
pub fn find(directory: &Path, images: &Images, fills: &Fills) -> Result<Vec<MemoryPatch>, CheckpointImageError> {
    // Without one it is a generation of an older Kip.
    let Ok(map) = PageMap::load(directory) else { return Ok(Vec::new()) };
    let (mut found, lost) = (Vec::new(), Cell::new(false));
    for process in processes(images)?.iter().filter(|process| !process.ended) {
        if let Some(pages) = map.processes.get(&process.pid) {
            let files = PageFiles { directory, map: &map, fills, lost: &lost, open: HashMap::new() };
            let memory = Memory { files, pages, read: HashMap::new() };
            let search = Search::of(process, memory);
            found.extend(if search.memory.is_small() { search.all() } else { search.generators() });
        }
    }
    if lost.get() {
        let source = io::Error::other("memory of its source was lost before it was copied");
        return Err(CheckpointImageError::Io { path: directory.to_owned(), source });
    }
    Ok(found)
}

/// Writes them into the memory of a tree whose threads stand still. Faults must be served.
///
/// # Errors
/// The last of those that were not written; the others are.
pub fn apply(tree: &Tree, patches: &[MemoryPatch]) -> io::Result<()> {
    let write = |patch: &MemoryPatch| {
        let tid = tree.threads.get(&patch.pid).ok_or(io::ErrorKind::NotFound)?;
        write_memory(*tid, patch.address, &patch.value.to_le_bytes())
    };
    let mut done = Ok(());
    for patch in patches {
        done = write(patch).and(done);
    }
    done
}

/// Programs and libraries with a random number generator that takes a clone for the process that it
/// was: it draws new numbers from the kernel when its pid changes, and that is the same. None of
/// them was found in memory: there may be none yet.
///
/// # Errors
/// An image is damaged.
pub fn suspects(images: &Images) -> Result<Vec<String>, CheckpointImageError> {
    let mut notes = BTreeSet::new();
    for file in images.entries("files.img")? {
        let reg = file.message(file_entry::REG).map_err(images.damaged("files.img"))?.unwrap_or_default();
        let path = reg.string(reg_file_entry::NAME).unwrap_or_default();
        let name = path.rsplit('/').next().unwrap_or_default();
        if name.starts_with("libcrypto.so") || name == "node" {
            notes.insert(format!("{path} may have OpenSSL's random numbers, and none were found to be made others: those that were drawn before may go on alike in source and clones"));
        }
    }
    Ok(notes.into_iter().collect())
}

/// The page files of a generation.
struct PageFiles<'a> {
    directory: &'a Path,
    map: &'a PageMap,
    fills: &'a Fills,
    /// A page was to be copied and is lost.
    lost: &'a Cell<bool>,
    open: HashMap<u32, Option<Opened>>,
}

/// A page file, and what it is filled from if it is being filled.
struct Opened {
    pages: OpenPages,
    fill: Option<Arc<Fill>>,
}

impl PageFiles<'_> {
    /// Reads pages one behind the other. None: they are not in the file, or not here.
    fn read(&mut self, file: u32, first: u32, bytes: &mut [u8]) -> Option<()> {
        let known = &self.map.files[file as usize];
        let is_filled = known.name.ends_with(UNSYNCED);
        let open = || {
            let fill = if is_filled { self.fills.of(&self.directory.join(&known.name)).ok().flatten() } else { None };
            Some(Opened { pages: OpenPages::open(self.directory, known).ok()?, fill })
        };
        let opened = self.open.entry(file).or_insert_with(open).as_ref()?;
        let from_copy = opened.fill.as_ref().is_some_and(|fill| fill.read(first, bytes).is_ok());
        let read = if from_copy { Ok(()) } else { opened.pages.read(first, bytes) };
        self.lost.set(self.lost.get() || is_filled && read.is_err());
        read.ok()
    }
}

/// The pages of one process in a generation.
struct Memory<'a> {
    files: PageFiles<'a>,
    pages: &'a ProcessPages,
    read: HashMap<u64, Box<[u8; PAGE]>>,
}

impl Memory<'_> {
    fn is_small(&self) -> bool {
        self.pages.runs.iter().map(|run| u64::from(run.pages)).sum::<u64>() <= MOST_SCANNED
    }

    /// The addresses at which that word is, of those that are multiples of 8.
    fn find(&mut self, wanted: u64) -> Vec<u64> {
        let mut found = Vec::new();
        let mut buffer = vec![0; SCANNED_AT_ONCE as usize * PAGE];
        for run in &self.pages.runs {
            for done in (0..run.pages).step_by(SCANNED_AT_ONCE as usize) {
                let bytes = &mut buffer[..SCANNED_AT_ONCE.min(run.pages - done) as usize * PAGE];
                if self.files.read(run.file, run.first + done, bytes).is_none() {
                    continue;
                }
                let start = run.start + u64::from(done) * PAGE as u64;
                let words = bytes.chunks_exact(8).enumerate().filter(|(_, bytes)| word(bytes, 0) == Some(wanted));
                found.extend(words.map(|(number, _)| start + 8 * number as u64));
            }
        }
        found
    }

    /// The page at an address; none if it is in no file here.
    fn page(&mut self, address: u64) -> Option<&[u8; PAGE]> {
        if !self.read.contains_key(&address) {
            let page = if self.read.len() < MOST_PAGES { self.read_page(address)? } else { return None };
            self.read.insert(address, page);
        }
        self.read.get(&address).map(|page| &**page)
    }

    fn read_page(&mut self, address: u64) -> Option<Box<[u8; PAGE]>> {
        let run = self.pages.runs.get(self.pages.runs.partition_point(|run| run.end() <= address))?;
        if run.start > address {
            return None;
        }
        let page = u64::from(run.first) + (address - run.start) / PAGE as u64;
        let mut bytes = Box::new([0; PAGE]);
        self.files.read(run.file, page.try_into().ok()?, &mut bytes[..])?;
        Some(bytes)
    }

    /// Puts into `bytes` what is at an address, up to the end of what there is or of `length`.
    fn fill(&mut self, bytes: &mut Vec<u8>, address: u64, length: usize) {
        bytes.clear();
        while bytes.len() < length {
            let at = address + bytes.len() as u64;
            let within = at as usize % PAGE;
            let Some(page) = self.page(at - within as u64) else { break };
            let end = PAGE.min(within + length - bytes.len());
            bytes.extend_from_slice(&page[within..end]);
        }
    }
}

struct Search<'a> {
    pid: u32,
    memory: Memory<'a>,
    /// What is executed of files.
    code: Vec<Range<u64>>,
    /// What pointers may lead to.
    data: Vec<Range<u64>>,
    /// Where the search begins.
    roots: Vec<Range<u64>>,
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn containing(ranges: &[Range<u64>], address: u64) -> Option<&Range<u64>> {
    ranges.get(ranges.partition_point(|range| range.end <= address)).filter(|range| range.start <= address)
}

/// Whether OpenSSL's library is what is mapped there.
fn is_of_library(mapping: &MappedRange) -> bool {
    let MappingKind::File { path } = &mapping.kind else { return false };
    path.rsplit('/').next().is_some_and(|name| name.starts_with("libcrypto"))
}

impl<'a> Search<'a> {
    fn of(process: &ImageProcess, memory: Memory<'a>) -> Search<'a> {
        const WRITE: u64 = 2;
        const EXEC: u64 = 4;
        let (mut code, mut data, mut roots) = (Vec::new(), Vec::new(), Vec::<Range<u64>>::new());
        let has_library = process.mappings.iter().any(is_of_library);
        for mapping in &process.mappings {
            let range = || mapping.range.clone();
            let of_file = matches!(mapping.kind, MappingKind::File { .. });
            if of_file && mapping.protection & EXEC != 0 {
                code.push(range());
            }
            if mapping.shared || mapping.protection & WRITE == 0 {
                continue;
            }
            data.push(range());
            // What is zero in the file lies behind its data, in memory of no file.
            let behind = roots.last().is_some_and(|last| last.end == mapping.range.start);
            if of_file && (!has_library || is_of_library(mapping)) || !of_file && behind {
                roots.push(range());
            }
        }
        Search { pid: process.pid, memory, code, data, roots }
    }

    /// All generators in all memory.
    fn all(mut self) -> Vec<MemoryPatch> {
        let (mut found, mut bytes) = (Vec::new(), Vec::with_capacity(LOOKED_AT));
        for at in self.memory.find(MOST_AT_ONCE) {
            let Some(address) = at.checked_sub(MAX_REQUEST as u64) else { continue };
            let Some(range) = containing(&self.data, address) else { continue };
            self.memory.fill(&mut bytes, address, LOOKED_AT.min((range.end - address) as usize));
            if self.is_generator(&bytes) {
                found.extend(self.patches(address, &bytes));
            }
        }
        found
    }

    /// What makes the generator draw a new seed whose bytes these are.
    fn patches(&self, address: u64, bytes: &[u8]) -> impl Iterator<Item = MemoryPatch> + use<> {
        let pid = self.pid;
        let patch = move |at: usize, value| MemoryPatch { pid, address: address + at as u64, value };
        // Zero means that it does not count.
        let counted = half(bytes, RESEED_COUNTER).filter(|count| *count != 0);
        let counted = counted.map(|count| patch(RESEED_COUNTER, count.wrapping_add(1).max(1)));
        // No process has that number.
        std::iter::once(patch(FORK_ID, 0)).chain(counted)
    }

    /// Those that pointers lead to.
    fn generators(mut self) -> Vec<MemoryPatch> {
        let mut found = Vec::new();
        let mut seen: HashSet<u64> = HashSet::new();
        let mut left: VecDeque<(u64, usize, u32)> = VecDeque::new();
        // Of the data, which may be large, what was ever written; half of what is read at most.
        let runs = &self.memory.pages.runs;
        let written = runs.iter().flat_map(|run| (run.start..run.end()).step_by(PAGE));
        let of_roots = written.filter(|page| containing(&self.roots, *page).is_some());
        left.extend(of_roots.take(MOST_PAGES / 2).map(|page| (page, PAGE, 0)));
        let mut bytes = Vec::with_capacity(PAGE);
        let mut last = 0..0;
        let lowest = self.data.first().map_or(u64::MAX, |range| range.start.max(1));
        while let Some((address, length, depth)) = left.pop_front() {
            self.memory.fill(&mut bytes, address, length);
            if depth > 0 && self.is_generator(&bytes) {
                found.extend(self.patches(address, &bytes));
            }
            if depth == DEEPEST {
                continue;
            }
            for pointer in bytes.chunks_exact(8).filter_map(|bytes| word(bytes, 0)) {
                // Most are no pointers, and most that are lead to where the last one led.
                if pointer < lowest || pointer % 8 != 0 {
                    continue;
                }
                if !last.contains(&pointer) {
                    let Some(range) = containing(&self.data, pointer) else { continue };
                    last = range.clone();
                }
                if seen.len() < MOST_POINTERS && seen.insert(pointer) {
                    let length = LOOKED_AT.min((last.end - pointer) as usize);
                    left.push_back((pointer, length, depth + 1));
                }
            }
        }
        found
    }

    fn is_generator(&self, bytes: &[u8]) -> bool {
        let is_like_one = half(bytes, FORK_ID) == Some(self.pid)
            && word(bytes, MAX_REQUEST) == Some(MOST_AT_ONCE)
            && half(bytes, STRENGTH).is_some_and(|strength| STRENGTHS.contains(&strength))
            && half(bytes, RESEED_COUNTER).is_some();
        let function = |number: usize| {
            let pointer = word(bytes, FUNCTIONS + 8 * number)?;
            containing(&self.code, pointer).map(|range| range.start)
        };
        let first = if is_like_one { function(0) } else { None };
        first.is_some() && (1..FUNCTION_COUNT).all(|number| function(number) == first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generator_is_known_by_its_functions_and_its_pid() {
        let map = PageMap::default();
        let pages = ProcessPages::default();
        let (fills, lost) = (Fills::default(), Cell::new(false));
        let files =
            PageFiles { directory: Path::new("/"), map: &map, fills: &fills, lost: &lost, open: HashMap::new() };
        let memory = Memory { files, pages: &pages, read: HashMap::new() };
        let code = vec![0x1000..0x2000, 0x8000..0x9000];
        let search = Search { pid: 7, memory, code, data: Vec::new(), roots: Vec::new() };
        let mut bytes = vec![0; LOOKED_AT];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        for number in 0..FUNCTION_COUNT {
            put(FUNCTIONS + 8 * number, &(0x8100 + number as u64 * 16).to_le_bytes());
        }
        put(FORK_ID, &7_u32.to_le_bytes());
        put(STRENGTH, &256_u32.to_le_bytes());
        put(MAX_REQUEST, &MOST_AT_ONCE.to_le_bytes());
        assert!(search.is_generator(&bytes));
        for (at, value) in
            [(FORK_ID, 8_u64), (STRENGTH, 255), (MAX_REQUEST, 1), (FUNCTIONS, 0x1100), (FUNCTIONS + 8, 0)]
        {
            let mut other = bytes.clone();
            other[at..at + 4].copy_from_slice(&(value as u32).to_le_bytes());
            assert!(!search.is_generator(&other), "{at}");
        }
        assert!(!search.is_generator(&bytes[..RESEED_COUNTER]));
    }
}
