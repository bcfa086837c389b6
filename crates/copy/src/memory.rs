//! The memory of processes that go on running, as it was when they stood still: copies of them hold
//! it (`crates/checkpoint/shim/hold.c`) until it is written.
//!
//! Which pages are there is read of the copies while the processes stand still, the pages
//! themselves when they run again. Owns the file that it writes. What the processes share with each
//! other, and what was paged out, is not in it.

use crate::fill::Fill;
use kip_checkpoint::helper::{Helper, HelperError};
use kip_criu_images::fields::{mm_entry, vma_entry};
use kip_criu_images::{CheckpointImageError, Images};
use kip_snapshot::SnapshotError;
use kip_snapshot::carry::without;
use kip_snapshot::pages::copied::{CopiedPages, CopiedPiece};
use kip_snapshot::pages::{PAGE, PageMap, Run};
use kip_snapshot::remote::RemoteFile;
use kip_sys::pagemap::{self, Filter, States, WHOLE, guards};
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Pages that are read and written at once.
const CHUNK: u32 = 256;
/// Bytes that are read while the processes stand still, of what no fork copies.
const MOST_READ: usize = 64 << 20;
/// A copy that was killed is gone after this.
const GONE_WITHIN: Duration = Duration::from_secs(10);
/// The most a process can have in oom_score_adj: proc(5).
const DIES_FIRST: &str = "1000";

/// The memory of a tree cannot be held by copies of its processes; they are as they were.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    /// No copies: a limit of processes or of memory, or there is no helper any more.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// Mappings of processes that no fork copies, madvise(2) with MADV_DONTFORK, have too much in
    /// them.
    #[error("process {pid} has excepted much of its memory from forks, at {address:#x} and elsewhere")]
    NotForked {
        /// Host pid.
        pid: u32,
        /// Where it begins.
        address: u64,
    },
    /// /proc of a process or of its copy.
    #[error("what a copy of process {pid} holds cannot be read")]
    Unread {
        /// Host pid.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Memory that copies hold, as long as the helper lives that made them.
#[derive(Debug, Default)]
pub struct HeldMemory {
    /// The page file that it is written to.
    file: String,
    processes: Vec<u32>,
    copies: Vec<u32>,
    /// Each copy and what of it is written where.
    parts: Vec<(u32, Run)>,
    /// What was read at once.
    read: Vec<(Run, Vec<u8>)>,
}

impl HeldMemory {
    /// None yet, which is to be written to the file of that name.
    pub fn new(file: String) -> HeldMemory {
        HeldMemory { file, ..HeldMemory::default() }
    }

    /// Has copies hold the memory of `processes`, each as numbered inside and on the host, all of
    /// which CRIU has stopped for a dump without it, and adds to `map`, which has what CRIU wrote
    /// of them, where it will be. What a fork wipes (MADV_WIPEONFORK) comes along where it is
    /// listed, by numbers inside ([`wiped`]).
    ///
    /// # Errors
    /// [`HoldError`].
    pub fn hold(
        &mut self,
        helper: &Helper,
        processes: &[(u32, u32)],
        map: &mut PageMap,
        wiped: &BTreeMap<u32, Vec<Range<u64>>>,
    ) -> Result<(), HoldError> {
        let pids: Vec<u32> = processes.iter().map(|(_, pid)| *pid).collect();
        self.copies = helper.hold(&pids)?;
        self.processes = pids;
        let (file, mut first, mut read_bytes) = (map.file(&self.file), 0, 0);
        for ((inside, pid), copy) in processes.iter().zip(self.copies.iter().copied()) {
            let unread = |source| HoldError::Unread { pid: *pid, source };
            // What the program writes meanwhile is there twice, and on its account: the program
            // must not end for that, and the copy may.
            fs::write(format!("/proc/{copy}/oom_score_adj"), DIES_FIRST).map_err(unread)?;
            let (of_process, of_copy) = (mappings(*pid).map_err(unread)?, mappings(copy).map_err(unread)?);
            let own = &mut map.processes.entry(*inside).or_default().runs;
            let by_criu = own.clone();
            let mut place = |found: Vec<Range<u64>>| {
                let runs: Vec<Run> = found.into_iter().map(|range| run_of(range, file)).collect();
                let mut placed = without(&runs, &by_criu);
                for run in &mut placed {
                    run.first = first;
                    first += run.pages;
                }
                own.extend(&placed);
                placed
            };
            let held = place(present(copy, WHOLE).map_err(unread)?);
            self.parts.extend(held.into_iter().map(|run| (copy, run)));
            // What no fork copies is read while its process still stands there.
            let of_copy: HashSet<&Range<u64>> = of_copy.iter().collect();
            let mut lost: Vec<Range<u64>> =
                of_process.into_iter().filter(|mapping| !of_copy.contains(mapping)).collect();
            let wiped = wiped.get(inside).into_iter().flatten();
            let wiped: Vec<Range<u64>> =
                wiped.filter(|range| !lost.iter().any(|other| meet(other, range))).cloned().collect();
            lost.extend(wiped);
            for lost in &lost {
                for run in place(present(*pid, lost.clone()).map_err(unread)?) {
                    let length = run.pages as usize * PAGE;
                    read_bytes += length;
                    if read_bytes > MOST_READ {
                        return Err(HoldError::NotForked { pid: *pid, address: lost.start });
                    }
                    let mut bytes = vec![0; length];
                    open_memory(*pid).and_then(|memory| memory.read_exact_at(&mut bytes, run.start)).map_err(unread)?;
                    self.read.push((run, bytes));
                }
            }
            own.sort_unstable_by_key(|run| run.start);
        }
        Ok(())
    }

    /// The processes that were copied, by host pid.
    pub fn processes(&self) -> &[u32] {
        &self.processes
    }

    /// Waits until the copies have given back what they held, which they do when their helper is
    /// dropped.
    pub fn wait_until_gone(&self) {
        let began = Instant::now();
        while self.copies.iter().any(|copy| holds(*copy)) && began.elapsed() < GONE_WITHIN {
            thread::sleep(Duration::from_micros(500));
        }
    }

    /// How much it is, pages.
    pub fn pages(&self) -> u32 {
        let runs = self.parts.iter().map(|(_, run)| run).chain(self.read.iter().map(|(run, _)| run));
        runs.map(|run| run.pages).sum()
    }

    /// Begins to put it into its file, which it makes in that directory.
    ///
    /// # Errors
    /// The file system's; a copy has ended.
    pub fn fill(&self, directory: &Path) -> Result<Fill, SnapshotError> {
        let file = RemoteFile::create(directory, &self.file, self.pages())?;
        let path = || directory.join(&self.file);
        let failed = |source| SnapshotError::Io { path: path(), source };
        for (run, bytes) in &self.read {
            file.put(run.first, bytes).map_err(failed)?;
        }
        let memory: Vec<File> =
            self.copies.iter().map(|copy| open_memory(*copy)).collect::<Result<_, _>>().map_err(failed)?;
        let place = |copy: &u32| self.copies.iter().position(|known| known == copy).expect("it is a part of a copy");
        let parts = self.parts.iter().flat_map(|(copy, run)| {
            let memory = place(copy);
            pieces(*run).map(move |run| CopiedPiece { memory, run })
        });
        let copied = CopiedPages::new(memory, parts.collect());
        Ok(Fill::new(file, copied))
    }

    /// Writes it into that directory, on all cores, and gives the checksum of each page.
    ///
    /// # Errors
    /// The file system's; a copy has ended, for want of memory or by a signal.
    pub fn write(&self, directory: &Path) -> io::Result<Vec<u32>> {
        let file = File::create_new(directory.join(&self.file))?;
        let pieces: Vec<(u32, Run)> =
            self.parts.iter().flat_map(|(copy, run)| pieces(*run).map(|run| (*copy, run))).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let (mut buffer, mut sums) = (vec![0; CHUNK as usize * PAGE], Vec::new());
            let mut open: Option<(u32, File)> = None;
            while let Some((copy, run)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let bytes = &mut buffer[..run.pages as usize * PAGE];
                if open.as_ref().is_none_or(|(of, _)| of != copy) {
                    open = Some((*copy, open_memory(*copy)?));
                }
                let (_, memory) = open.as_ref().expect("just opened");
                memory.read_exact_at(bytes, run.start)?;
                file.write_all_at(bytes, u64::from(run.first) * PAGE as u64)?;
                sums.extend((run.first..).zip(bytes.chunks(PAGE).map(crc32fast::hash)));
            }
            Ok::<_, io::Error>(sums)
        };
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        let mut sums = thread::scope(|scope| {
            let others: Vec<_> = (1..cores).map(|_| scope.spawn(work)).collect();
            let mut sums = work()?;
            for other in others {
                sums.extend(other.join().expect("it does not panic")?);
            }
            Ok::<_, io::Error>(sums)
        })?;
        for (run, bytes) in &self.read {
            file.write_all_at(bytes, u64::from(run.first) * PAGE as u64)?;
            sums.extend((run.first..).zip(bytes.chunks(PAGE).map(crc32fast::hash)));
        }
        sums.sort_unstable();
        Ok(sums.into_iter().map(|(_, sum)| sum).collect())
    }
}

fn run_of(range: Range<u64>, file: u32) -> Run {
    Run { start: range.start, pages: ((range.end - range.start) / PAGE as u64) as u32, file, first: 0 }
}

/// A run in parts that are read at once.
fn pieces(run: Run) -> impl Iterator<Item = Run> {
    (0..run.pages).step_by(CHUNK as usize).map(move |done| Run {
        start: run.start + u64::from(done) * PAGE as u64,
        pages: CHUNK.min(run.pages - done),
        first: run.first + done,
        ..run
    })
}

/// Whether a copy still has memory: one that is a zombie has given all of it back.
fn holds(copy: u32) -> bool {
    let stat = fs::read(format!("/proc/{copy}/stat")).unwrap_or_default();
    let state = stat.iter().rposition(|byte| *byte == b')').and_then(|end| stat.get(end + 2));
    state.is_some_and(|state| !b"ZX".contains(state))
}

fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// What a fork wipes of each process, by numbers inside.
///
/// # Errors
/// An image is damaged.
pub fn wiped(images: &Images) -> Result<BTreeMap<u32, Vec<Range<u64>>>, CheckpointImageError> {
    const WIPED: u64 = 1 << 18;
    let mut found: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
    for (inside, name) in images.numbered("mm") {
        for mm in images.entries(&name)? {
            let mappings = mm.messages(mm_entry::VMAS).map_err(images.damaged(&name))?;
            let wiped = mappings.iter().filter(|vma| vma.number(vma_entry::MADV) & WIPED != 0);
            let ranges = wiped.map(|vma| vma.number(vma_entry::START)..vma.number(vma_entry::END));
            found.entry(inside).or_default().extend(ranges);
        }
    }
    Ok(found)
}

/// Leaves out of a page map what a fork wipes.
pub fn leave_out(map: &mut PageMap, wiped: &BTreeMap<u32, Vec<Range<u64>>>) {
    for (inside, process) in &mut map.processes {
        let mut ranges: Vec<Run> =
            wiped.get(inside).into_iter().flatten().map(|range| run_of(range.clone(), 0)).collect();
        ranges.sort_unstable_by_key(|run| run.start);
        process.runs = without(&process.runs, &ranges);
    }
}

/// Mappings of a process, by address: proc_pid_maps(5).
fn mappings(pid: u32) -> io::Result<Vec<Range<u64>>> {
    let range = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    let text = fs::read(format!("/proc/{pid}/maps"))?;
    String::from_utf8_lossy(&text)
        .lines()
        .map(|line| range(line).ok_or_else(|| io::ErrorKind::InvalidData.into()))
        .collect()
}

/// Pages of a process that are its own and not zeros.
fn present(pid: u32, within: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let filter = Filter {
        any: States::PRESENT | States::SWAPPED,
        none: States::FILE | States::ZERO | guards(),
        report: States::PRESENT,
        ..Filter::default()
    };
    let found = pagemap::of(pid, within, filter)?;
    Ok(found.into_iter().map(|region| region.range).collect())
}

/// The memory of a process, also where its program may not read. By process_vm_readv(2) each page
/// that a copy shares would be made its own before it is read (`gup_must_unshare` in the kernel's
/// mm/internal.h).
fn open_memory(pid: u32) -> io::Result<File> {
    File::open(format!("/proc/{pid}/mem"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_in_parts_one_behind_the_other() {
        let run = Run { start: 0x1000, pages: 2 * CHUNK + 3, file: 1, first: 7 };
        let found: Vec<Run> = pieces(run).collect();
        assert_eq!(found.iter().map(|run| run.pages).collect::<Vec<_>>(), [CHUNK, CHUNK, 3]);
        assert!(found.windows(2).all(|two| two[0].end() == two[1].start && two[0].first + CHUNK == two[1].first));
        assert!((found[0].start, found[0].first) == (run.start, run.first) && found[2].end() == run.end());
    }

    #[test]
    fn a_process_has_its_own_pages_and_the_mappings_they_are_in() {
        let own = vec![7u8; 64 * PAGE];
        let pid = std::process::id();
        let (at, end) = (own.as_ptr() as u64, own.as_ptr() as u64 + own.len() as u64);
        assert!(mappings(pid).unwrap().iter().any(|mapping| mapping.start <= at && end <= mapping.end));
        assert!(present(pid, WHOLE).unwrap().iter().any(|range| range.contains(&(at + 32 * PAGE as u64))));
        let mut bytes = vec![0; own.len()];
        open_memory(pid).unwrap().read_exact_at(&mut bytes, at).unwrap();
        assert_eq!(bytes, own);
    }
}
