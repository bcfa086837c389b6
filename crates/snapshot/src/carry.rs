//! Takes pages that a process never brought back over from where they lie into a new generation,
//! without reading them where that can be avoided: files of which at least half is still needed
//! become links, the rest is copied.
//!
//! So the files of a generation are never more than twice what is needed of them. Never looks at a
//! process: the caller knows which pages are still out.

use crate::error::{SnapshotError, io_at};
use crate::pages::remote::OpenPages;
use crate::pages::{PAGE, PageMap, Run, UNSYNCED, damaged};
use kip_types::Generation;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Smaller files are copied: many cycles leave many of them, bytes.
const LEAST_LINKED: u64 = 1 << 20;
/// Pages copied at once.
const CHUNK: u32 = 256;

/// The parts of `runs` that are in none of `others`; both are by address.
pub fn without(runs: &[Run], others: &[Run]) -> Vec<Run> {
    let mut left = Vec::new();
    let mut others = others.iter().peekable();
    for run in runs {
        let mut start = run.start;
        while let Some(other) = others.peek().filter(|o| o.start < run.end()) {
            if start < other.start {
                left.push(part(run, start, other.start));
            }
            start = start.max(other.end());
            if other.end() > run.end() {
                break;
            }
            others.next();
        }
        if start < run.end() {
            left.push(part(run, start, run.end()));
        }
    }
    left
}

/// The part of a run in a range that it has all of.
fn part(run: &Run, start: u64, end: u64) -> Run {
    let pages = |bytes: u64| (bytes / PAGE as u64) as u32;
    Run { start, pages: pages(end - start), first: run.first + pages(start - run.start), ..*run }
}

/// A generation that takes pages over.
#[derive(Debug, Clone, Copy)]
pub struct Growing<'a> {
    /// Its number.
    pub generation: Generation,
    /// It is to outlive the machine: [`crate::seal`].
    pub is_kept: bool,
    /// Of the files, the one that is written to further on.
    pub still_written: Option<&'a str>,
}

impl Growing<'_> {
    /// What a page file is called in it that is called `last` elsewhere.
    pub fn name_of(&self, last: &str) -> String {
        let last = last.strip_suffix(UNSYNCED).unwrap_or(last);
        // A name that it has from an earlier generation is no other's.
        let is_own = last.starts_with('g') && last.contains('-');
        let own = if is_own { last.to_owned() } else { format!("g{}-{last}", self.generation) };
        if self.is_kept { own } else { format!("{own}{UNSYNCED}") }
    }
}

/// Adds to `map`, which describes what is in `growing` already, the runs of `carried`, whose files
/// lie in `from`. No page may be in both.
///
/// # Errors
/// The file system's; a page that is damaged where it lies.
pub fn carry(
    map: &mut PageMap,
    growing: &Path,
    carried: &PageMap,
    from: &Path,
    into: Growing<'_>,
) -> Result<(), SnapshotError> {
    let mut used = vec![0u64; carried.files.len()];
    for run in carried.processes.values().flat_map(|process| &process.runs) {
        used[run.file as usize] += u64::from(run.pages);
    }
    let mut copies = Copies { growing, name: into.name_of("carried"), open: None };
    let mut moved: BTreeMap<u32, Moved> = BTreeMap::new();
    for (index, file) in carried.files.iter().enumerate().filter(|(index, _)| used[*index] > 0) {
        let path = from.join(&file.name);
        let size = fs::metadata(&path).map_err(io_at(&path))?.len();
        let is_fixed = into.still_written != Some(file.name.as_str());
        let is_worth_it = is_fixed && size >= LEAST_LINKED && used[index] * 2 * PAGE as u64 >= size;
        let to = if is_worth_it || file.remote.is_some() {
            let last = file.name.rsplit('/').next().unwrap_or_default();
            let number = map.file(&if file.remote.is_some() { last.to_owned() } else { into.name_of(last) });
            let linked = &mut map.files[number as usize];
            linked.sums.clone_from(&file.sums);
            linked.remote = file.remote;
            if into.is_kept && last.ends_with(UNSYNCED) {
                File::open(&path).and_then(|file| file.sync_all()).map_err(io_at(&path))?;
            }
            for (old, new) in file.names().zip(linked.names()) {
                let path = from.join(old);
                fs::hard_link(&path, growing.join(new)).map_err(io_at(&path))?;
            }
            Moved::Linked(number)
        } else {
            Moved::Copied(File::open(&path).map_err(io_at(&path))?)
        };
        moved.insert(index as u32, to);
    }
    for (pid, process) in &carried.processes {
        let mut runs = Vec::with_capacity(process.runs.len());
        for run in &process.runs {
            let file = &carried.files[run.file as usize];
            match &moved[&run.file] {
                Moved::Linked(number) => runs.push(Run { file: *number, ..*run }),
                Moved::Copied(source) => {
                    let check = |first: u32, bytes: &[u8]| match file.first_damaged(first as usize, bytes) {
                        // The pager's own file has none.
                        Some(page) if !file.sums.is_empty() => Err(damaged(&file.name, page)),
                        _ => Ok(()),
                    };
                    let path = from.join(&file.name);
                    runs.push(copies.add(map, run, source, check).map_err(io_at(&path))?);
                }
            }
        }
        let own = &mut map.processes.entry(*pid).or_default().runs;
        own.extend(runs);
        own.sort_unstable_by_key(|run| run.start);
    }
    Ok(())
}

/// Where a file's pages have gone.
enum Moved {
    /// To this file of the new map, each in its place.
    Linked(u32),
    /// They are copied one by one.
    Copied(File),
}

/// The file of copied pages, made when there is one.
struct Copies<'a> {
    growing: &'a Path,
    name: String,
    open: Option<Copied>,
}

struct Copied {
    file: File,
    /// Which of the page map's files it is.
    number: u32,
    /// Pages in it.
    pages: u32,
}

impl Copies<'_> {
    fn add(
        &mut self,
        map: &mut PageMap,
        run: &Run,
        source: &File,
        check: impl Fn(u32, &[u8]) -> io::Result<()>,
    ) -> io::Result<Run> {
        if self.open.is_none() {
            let file = OpenOptions::new().write(true).create_new(true).open(self.growing.join(&self.name))?;
            self.open = Some(Copied { file, number: map.file(&self.name), pages: 0 });
        }
        let Copied { file, number, pages: next } = self.open.as_mut().expect("just made");
        let first = *next;
        let mut buffer = vec![0; CHUNK.min(run.pages) as usize * PAGE];
        let mut done = 0;
        while done < run.pages {
            let pages = CHUNK.min(run.pages - done);
            let bytes = &mut buffer[..pages as usize * PAGE];
            let at = run.first + done;
            source.read_exact_at(bytes, u64::from(at) * PAGE as u64)?;
            check(at, bytes)?;
            file.write_all(bytes)?;
            done += pages;
        }
        *next += run.pages;
        Ok(Run { file: *number, first, ..*run })
    }
}

/// Writes [`crate::pages::SETS`]: the bytes of the sets that `map` names, which loses the pages
/// that it has no place for, or that are not here.
///
/// # Errors
/// The file system's.
pub fn write_sets(map: &mut PageMap, growing: &Path) -> Result<(), SnapshotError> {
    let name = crate::pages::SETS;
    let path = growing.join(name);
    let mut out: Option<io::BufWriter<File>> = None;
    let open: Vec<OpenPages> = map.files.iter().map(|file| OpenPages::open(growing, file)).collect::<Result<_, _>>()?;
    let mut page = vec![0; PAGE];
    for process in map.processes.values_mut() {
        let runs = &process.runs;
        let place = |address: u64| {
            let run = runs.get(runs.partition_point(|run| run.end() <= address))?;
            let page = (run.start <= address).then(|| part(run, address, address + PAGE as u64))?;
            open[page.file as usize].has(page.first).then_some(page)
        };
        for set in &mut process.sets {
            set.pages.retain(|expected| place(expected.address).is_some());
        }
        for run in process.expected().into_iter().filter_map(place) {
            if out.is_none() {
                out = Some(io::BufWriter::with_capacity(1 << 20, File::create(&path).map_err(io_at(&path))?));
            }
            let out = out.as_mut().expect("just made");
            let read = open[run.file as usize].read(run.first, &mut page);
            read.and_then(|()| out.write_all(&page)).map_err(io_at(&path))?;
        }
    }
    if let Some(mut out) = out {
        out.flush().map_err(io_at(&path))?;
        map.file(name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::remote::RemoteFile;
    use crate::pages::{Expected, ProcessPages, WorkingSet};

    fn run(start: u64, pages: u32, file: u32, first: u32) -> Run {
        Run { start: start * PAGE as u64, pages, file, first }
    }

    fn growing_as(generation: u64) -> Growing<'static> {
        Growing { generation: Generation(generation), is_kept: true, still_written: None }
    }

    /// Of a proc that goes on running, and for a clone that runs at once.
    #[test]
    fn what_is_written_further_on_is_copied_and_what_is_not_synced_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let (from, one, two) = (dir.path().join("from"), dir.path().join("one"), dir.path().join("two"));
        for path in [&from, &one, &two] {
            fs::create_dir(path).unwrap();
        }
        fs::write(from.join("swap"), vec![3; 300 * PAGE]).unwrap();
        fs::write(from.join("g1-memory"), vec![4; 300 * PAGE]).unwrap();
        let mut carried = PageMap::default();
        let (swap, memory) = (carried.file("swap"), carried.file("g1-memory"));
        let runs = vec![run(0, 300, swap, 0), run(1000, 300, memory, 0)];
        carried.processes.insert(2, ProcessPages { runs, ..ProcessPages::default() });
        let mut map = PageMap::default();
        let into = Growing { still_written: Some("swap"), is_kept: false, ..growing_as(7) };
        carry(&mut map, &one, &carried, &from, into).unwrap();
        let names = |map: &PageMap| map.files.iter().map(|file| file.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&map), ["g1-memory.unsynced", "g7-carried.unsynced"]);
        fs::write(from.join("swap"), vec![9; 300 * PAGE]).unwrap();
        assert_eq!(fs::read(one.join("g7-carried.unsynced")).unwrap(), vec![3; 300 * PAGE]);
        // Later it is parked.
        let mut next = PageMap::default();
        carry(&mut next, &two, &map, &one, growing_as(8)).unwrap();
        assert_eq!(names(&next), ["g1-memory", "g7-carried"]);
    }

    #[test]
    fn a_remote_file_is_linked_whole_and_sets_have_what_is_here() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&to).unwrap();
        let remote = RemoteFile::create(&from, "g1-remote", 8).unwrap();
        fs::write(from.join("g1-remote.table"), b"table").unwrap();
        remote.put(5, &[5; PAGE]).unwrap();
        let mut carried = PageMap::default();
        let file = carried.file("g1-remote") as usize;
        carried.files[file].remote = Some(8);
        carried.processes.insert(2, ProcessPages { runs: vec![run(100, 2, 0, 4)], sets: Vec::new() });
        let mut map = PageMap::default();
        carry(&mut map, &to, &carried, &from, growing_as(2)).unwrap();
        let told: Vec<String> = map.files[0].names().collect();
        assert_eq!(told, ["g1-remote", "g1-remote.here", "g1-remote.table"], "a small part of it, and still linked");
        assert!(told.iter().all(|name| to.join(name).exists()) && map.files[0].remote == Some(8));
        let expected = |page: u64| Expected { address: page * PAGE as u64, confirmed: 0, held_back: false };
        let set = WorkingSet { kind: "port".into(), turn: 1, pages: vec![expected(101), expected(100)] };
        map.processes.get_mut(&2).unwrap().sets = vec![set];
        write_sets(&mut map, &to).unwrap();
        assert_eq!(map.processes[&2].sets[0].pages, [expected(101)]);
        assert_eq!(fs::read(to.join(crate::pages::SETS)).unwrap(), [5; PAGE]);
        let crate::Sealed { path, .. } =
            crate::seal(&to, Generation(2), crate::Contents { engine: String::new(), body: (), pages: map }).unwrap();
        let manifest = crate::open::<()>(&path).unwrap();
        assert!(!manifest.parts.iter().any(|part| part.name.contains("remote")), "it grows later");
        remote.put(4, &[4; PAGE]).unwrap();
        crate::verify(&path, &manifest.parts).unwrap();
        assert_eq!(PageMap::load(&path).unwrap().files[0].remote, Some(8));
    }

    #[test]
    fn what_has_been_written_anew_is_cut_out() {
        let runs = [run(10, 10, 0, 0), run(30, 5, 1, 7)];
        assert_eq!(without(&runs, &[]), runs);
        let left = without(&runs, &[run(8, 4, 9, 0), run(14, 2, 9, 4), run(19, 12, 9, 6), run(34, 9, 9, 0)]);
        assert_eq!(left, [run(12, 2, 0, 2), run(16, 3, 0, 6), run(31, 3, 1, 8)]);
        assert_eq!(without(&runs, &[run(0, 100, 9, 0)]), []);
    }

    // promise parking: pages that stayed out are taken over, by link where most of a file is
    //   needed, and never if they are damaged
    // held by: this, `kip_snapshot::carry::tests::what_has_been_written_anew_is_cut_out`,
    //   `kip_snapshot::carry::tests::a_damaged_page_is_not_carried`
    #[test]
    fn files_that_are_mostly_needed_are_linked_and_others_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let (from, growing) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("parked")).unwrap();
        fs::create_dir(&growing).unwrap();
        let mut carried = PageMap::default();
        for (name, pages, seed) in [("parked/pages-1.img", 512u32, 1u8), ("parked/g2-swap", 512, 2), ("swap", 300, 3)] {
            let bytes: Vec<u8> = (0..pages).flat_map(|n| [seed.wrapping_add(n as u8); PAGE]).collect();
            fs::write(from.join(name), &bytes).unwrap();
            let file = carried.file(name) as usize;
            carried.files[file].sums = bytes.chunks(PAGE).map(crc32fast::hash).collect();
        }
        let runs = vec![run(0, 300, 0, 100), run(1000, 10, 1, 5), run(2000, 300, 2, 0)];
        carried.processes.insert(2, ProcessPages { runs, ..ProcessPages::default() });
        let mut map = PageMap::default();
        carry(&mut map, &growing, &carried, &from, growing_as(7)).unwrap();
        let names: Vec<_> = map.files.iter().map(|f| (f.name.as_str(), f.sums.len())).collect();
        assert_eq!(names, [("g7-pages-1.img", 512), ("g7-swap", 300), ("g7-carried", 0)]);
        assert_eq!(map.processes[&2].runs, [run(0, 300, 0, 100), run(1000, 10, 2, 0), run(2000, 300, 1, 0)]);
        let copied = fs::read(growing.join("g7-carried")).unwrap();
        assert!(copied.len() == 10 * PAGE && copied[0] == 7 && copied[9 * PAGE] == 16);

        let expect = |page: u64| Expected { address: page * PAGE as u64, confirmed: 1, held_back: false };
        let set = |pages| WorkingSet { pages, ..WorkingSet::default() };
        let two = vec![set(vec![expect(2001), expect(999), expect(1001)]), set(vec![expect(1001), expect(3)])];
        map.processes.get_mut(&2).unwrap().sets = two;
        write_sets(&mut map, &growing).unwrap();
        assert_eq!(map.processes[&2].sets[0].pages, [expect(2001), expect(1001)], "the one that is nowhere is gone");
        let sets = fs::read(growing.join(crate::pages::SETS)).unwrap();
        let first: Vec<u8> = sets.chunks(PAGE).map(|page| page[0]).collect();
        assert_eq!(first, [104, 8, 4], "by address");
    }

    #[test]
    fn a_damaged_page_is_not_carried() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), vec![1; 4 * PAGE]).unwrap();
        let mut carried = PageMap::default();
        carried.file("a");
        carried.files[0].sums = vec![5; 4];
        carried.processes.insert(2, ProcessPages { runs: vec![run(0, 4, 0, 0)], ..ProcessPages::default() });
        let growing = dir.path().join("to");
        fs::create_dir(&growing).unwrap();
        let e = carry(&mut PageMap::default(), &growing, &carried, dir.path(), growing_as(1)).unwrap_err();
        assert!(std::error::Error::source(&e).unwrap().to_string().contains("page 0 of a is damaged"));
    }
}
