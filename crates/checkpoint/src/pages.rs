//! Where CRIU has put the memory of each process: its pagemap images, as a page map of ours.

use kip_criu_images::fields::{pagemap_entry, pagemap_head};
use kip_criu_images::pagemap::{PRESENT, pages_of};
use kip_criu_images::{CheckpointImage, CheckpointImageError, FieldValue, Images, Message};
use kip_snapshot::pages::{PAGE, PageMap, ProcessPages, Run, damaged};
use kip_snapshot::remote::RemoteFile;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::thread;

/// All pages of all processes that are in the images.
///
/// # Errors
/// See [`CheckpointImageError`].
pub fn page_map(images: &Images) -> Result<PageMap, CheckpointImageError> {
    let mut map = PageMap::default();
    for (pid, name) in images.numbered("pagemap") {
        let entries = images.entries(&name)?;
        let mut entries = entries.iter();
        let Some(head) = entries.next() else { continue };
        let file = map.file(&format!("pages-{}.img", head.number(pagemap_head::PAGES_ID)));
        let mut process = ProcessPages::default();
        let mut first = 0;
        for entry in entries {
            if entry.number(pagemap_entry::FLAGS) & PRESENT == 0 {
                continue;
            }
            let pages = pages_of(entry) as u32;
            process.runs.push(Run { start: entry.number(pagemap_entry::VADDR), pages, file, first });
            first += pages;
        }
        process.runs.sort_unstable_by_key(|run| run.start);
        map.processes.insert(pid, process);
    }
    Ok(map)
}

/// Whether CRIU itself finds all pages: none lies in a file of ours.
pub fn is_for_criu(map: &PageMap) -> bool {
    map.processes.values().flat_map(|process| &process.runs).all(|run| is_criu(&map.files[run.file as usize].name))
}

fn is_criu(name: &str) -> bool {
    name.starts_with("pages-")
}

/// Makes images whole that CRIU is to restore: their pagemaps, and page files in `scratch`, get all
/// pages of the map. Processes are done at the same time, on all cores.
///
/// # Errors
/// See [`CheckpointImageError`]; a page that is damaged, or of a remote file and not here.
pub fn make_whole(images: &mut Images, scratch: &Path, map: &PageMap) -> Result<(), CheckpointImageError> {
    let whole = |run: &Run| is_criu(&map.files[run.file as usize].name);
    let lacking = map.processes.iter().filter(|(_, process)| !process.runs.iter().all(whole));
    let lacking = Mutex::new(lacking);
    let next = || lacking.lock().next();
    let before = &*images;
    let work = || {
        let mut whole = Vec::new();
        while let Some((pid, process)) = next() {
            whole.extend(make_process_whole(before, scratch, map, *pid, &process.runs)?);
        }
        Ok::<_, CheckpointImageError>(whole)
    };
    let cores = thread::available_parallelism().map_or(1, |n| n.get());
    let whole = thread::scope(|scope| {
        let others: Vec<_> = (1..cores).map(|_| scope.spawn(work)).collect();
        let all =
            std::iter::once(work()).chain(others.into_iter().map(|other| other.join().expect("it does not panic")));
        all.collect::<Vec<_>>().into_iter().collect::<Result<Vec<_>, _>>()
    })?;
    whole.iter().flatten().for_each(|image| images.put(image));
    Ok(())
}

/// Writes the page file of a process; its pagemap is for the caller to put among the images.
fn make_process_whole(
    images: &Images,
    scratch: &Path,
    map: &PageMap,
    pid: u32,
    runs: &[Run],
) -> Result<Option<CheckpointImage>, CheckpointImageError> {
    let mut image = images.image(&format!("pagemap-{pid}.img"))?;
    image.entries.truncate(1);
    let Some(head) = image.entries.first() else { return Ok(None) };
    let path = scratch.join(format!("pages-{}.img", head.number(pagemap_head::PAGES_ID)));
    write_pages(images.directory(), &path, map, runs).map_err(|source| CheckpointImageError::Io { path, source })?;
    // What follows each other in memory is one, wherever it came from: CRIU reads each by itself.
    let mut whole: Vec<(u64, u64)> = Vec::new();
    for run in runs {
        match whole.last_mut() {
            Some((start, pages)) if *start + *pages * PAGE as u64 == run.start => *pages += u64::from(run.pages),
            _ => whole.push((run.start, run.pages.into())),
        }
    }
    for (start, pages) in whole {
        let entry = [
            (pagemap_entry::VADDR, start),
            (pagemap_entry::COMPAT_NR_PAGES, pages),
            (pagemap_entry::FLAGS, PRESENT),
            (pagemap_entry::NR_PAGES, pages),
        ];
        image.entries.push(Message(entry.map(|(field, value)| (field, FieldValue::Varint(value))).to_vec()));
    }
    Ok(Some(image))
}

/// A page file that is read.
enum Source {
    Remote(RemoteFile),
    Local(File),
}

/// Writes all pages of some runs into a file that replaces the one at `path`.
fn write_pages(directory: &Path, path: &Path, map: &PageMap, runs: &[Run]) -> io::Result<()> {
    const CHUNK: u32 = 256;
    let new = path.with_extension("whole");
    let mut out = BufWriter::with_capacity(CHUNK as usize * PAGE, File::create(&new)?);
    let mut open: BTreeMap<u32, Source> = BTreeMap::new();
    let mut buffer = vec![0; CHUNK as usize * PAGE];
    for run in runs {
        let file = &map.files[run.file as usize];
        if let Entry::Vacant(place) = open.entry(run.file) {
            place.insert(match file.remote {
                Some(_) => Source::Remote(RemoteFile::open(directory, file).map_err(io::Error::other)?),
                None => Source::Local(File::open(directory.join(&file.name))?),
            });
        }
        for done in (0..run.pages).step_by(CHUNK as usize) {
            let first = run.first + done;
            let bytes = &mut buffer[..CHUNK.min(run.pages - done) as usize * PAGE];
            match &open[&run.file] {
                Source::Remote(remote) => remote.read(first, bytes)?,
                Source::Local(local) => {
                    local.read_exact_at(bytes, u64::from(first) * PAGE as u64)?;
                    if let Some(page) = file.first_damaged(first as usize, bytes) {
                        return Err(damaged(&file.name, page));
                    }
                }
            }
            out.write_all(bytes)?;
        }
    }
    out.flush()?;
    fs::rename(new, path)
}

/// The part of a run in a range; none if there is none.
pub(crate) fn part(run: &Run, start: u64, end: u64) -> Option<Run> {
    let (from, to) = (run.start.max(start), run.end().min(end));
    let number = |address: u64| ((address - run.start) / PAGE as u64) as u32;
    (from < to).then(|| Run { start: from, pages: number(to) - number(from), first: run.first + number(from), ..*run })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_runs_keep_their_places() {
        let run = Run { start: 0x4000, pages: 4, file: 1, first: 10 };
        assert_eq!(part(&run, 0, 0x10000), Some(run));
        assert_eq!(part(&run, 0x5000, 0x6000), Some(Run { start: 0x5000, pages: 1, file: 1, first: 11 }));
        assert_eq!(part(&run, 0x7000, 0x9000), Some(Run { start: 0x7000, pages: 1, file: 1, first: 13 }));
        assert_eq!(part(&run, 0x8000, 0x9000), None);
    }
}
