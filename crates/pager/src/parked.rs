//! The page files of a parked generation as a page source: [`kip_snapshot::pages`].
//!
//! Reads through the page cache, which the wake of a proc that was parked a moment ago finds warm.
//! Every page is compared with its checksum before it is given out. The generation itself may go
//! while its pages are still needed: [`keep`]. Pages of remote page files may not be here: reading
//! one asks for it ([`AskFor`]) and fails with `WouldBlock` until it came, unless copies of
//! processes hold it ([`CopiedFile`]).

use crate::source::PageSource;
use crate::swap::{PAGE, PARKED};
use kip_snapshot::SnapshotError;
use kip_snapshot::pages::copied::CopiedPages;
use kip_snapshot::pages::{PAGES, PageFile, PageMap, ProcessPages, Run, SETS, damaged};
use kip_snapshot::remote::{self, RemoteFile};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// Asks for pages of a remote page file: its name, which.
pub type AskFor = Box<dyn Fn(&str, Range<u32>) + Send + Sync>;

/// Pages that have not come after this are asked for again: the daemon that was asked may have
/// died.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// As many pages are remembered as asked for.
const REMEMBERED: usize = 4096;

/// Makes `directory`, with the page map and the page files of a generation (hard links). Returns
/// that map.
///
/// # Errors
/// The file system's; a damaged page map.
pub fn keep(generation: &Path, directory: &Path) -> Result<PageMap, SnapshotError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| SnapshotError::Io { path, source }
    };
    loop {
        std::fs::create_dir(directory).map_err(failed(directory))?;
        let map = PageMap::load(generation)?;
        let filled = remote::filled_names(generation, &map).into_iter().filter(|name| name.ends_with(remote::HERE));
        let names: Vec<String> = map.files.iter().flat_map(PageFile::names).chain(filled).collect();
        let linked = names.into_iter().chain([PAGES.to_owned()]).try_for_each(|name| {
            let path = generation.join(&name);
            std::fs::hard_link(&path, directory.join(&name)).map_err(failed(&path))
        });
        // One that is being filled may have been settled meanwhile.
        let is_settled = map.files.iter().all(|file| file.remote.is_some() || !file.sums.is_empty());
        if is_settled || PageMap::load(if linked.is_ok() { directory } else { generation })? == map {
            return linked.map(|()| map);
        }
        std::fs::remove_dir_all(directory).map_err(failed(directory))?;
    }
}

/// The page files of one generation. A slot is a page's place among all pages of all files; between
/// two files lies a slot that no page has, so that pages that follow each other in slots do so in a
/// file.
pub struct Parked {
    /// By the slot of its first page.
    files: Vec<(u32, PageFile, Pages)>,
    ask: AskFor,
    /// Pages of one of the files that copies of processes still hold; none once a copy has ended
    /// or all is here.
    copied: RwLock<Option<CopiedFile>>,
    /// Which pages were asked for, and when: file, page.
    asked: Mutex<HashMap<(usize, u32), Instant>>,
}

/// A page file that is being filled, and where the pages come from.
#[derive(Debug)]
pub struct CopiedFile {
    /// Its name.
    pub name: String,
    /// The pages.
    pub pages: CopiedPages,
}

#[derive(Debug)]
enum Pages {
    Here(File),
    Remote(RemoteFile),
}

impl Pages {
    /// What says which pages are here, if it is a page file that is, or was, being filled.
    fn being_filled(&self, file: &PageFile) -> Option<&RemoteFile> {
        match self {
            Pages::Remote(filled) if file.remote.is_none() => Some(filled),
            _ => None,
        }
    }
}

impl std::fmt::Debug for Parked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parked").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Parked {
    /// Opens the page files of the generation in a directory, whose page map `map` is; tells what
    /// its processes have in them, by number inside. `ask` is called for what is not here, and then
    /// no more often than once a second for a page.
    ///
    /// # Errors
    /// The file system's.
    pub fn open(dir: &Path, map: PageMap, ask: AskFor) -> Result<(Parked, BTreeMap<u32, ProcessPages>), SnapshotError> {
        let PageMap { files, processes } = map;
        let mut next = PARKED;
        let mut open = Vec::with_capacity(files.len());
        for file in files {
            let (pages, opened) = match RemoteFile::find(dir, &file)? {
                Some(remote) => (remote.pages(), Pages::Remote(remote)),
                None => {
                    let path = dir.join(&file.name);
                    let opened = File::open(&path).map_err(|source| SnapshotError::Io { path, source })?;
                    // Read-ahead is ours: only we know what is needed together.
                    let _ = rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::Random);
                    (file.sums.len() as u32, Pages::Here(opened))
                }
            };
            open.push((next, file, opened));
            next += pages + 1;
        }
        Ok((Parked { files: open, ask, copied: RwLock::default(), asked: Mutex::default() }, processes))
    }

    /// Pages of that file are read of their copies, as long as those are there, and not asked for.
    pub fn read_copies(&self, copied: CopiedFile) {
        *self.copied.write() = Some(copied);
    }

    /// All pages are in the files: gives up what copies hold.
    pub fn all_is_here(&self) {
        *self.copied.write() = None;
    }

    /// Reads pages of which one is not here of the copies that hold them; false if that cannot be.
    fn read_copied(&self, file: &PageFile, remote: &RemoteFile, page: u32, buffer: &mut [u8]) -> bool {
        let mut in_file = Ok(());
        let read = match &*self.copied.read() {
            Some(copied) if copied.name == file.name => copied.pages.read(page, buffer, |page, bytes| {
                in_file = remote.read(page, bytes);
                in_file.as_ref().map_err(|e| e.kind().into()).copied()
            }),
            _ => return false,
        };
        if let (Err(error), Ok(())) = (&read, in_file) {
            // The daemon has put all into the file, or says that it cannot.
            tracing::debug!(file = file.name, %error, "a copy that held memory of a clone has ended");
            self.all_is_here();
        }
        read.is_ok()
    }

    /// Whether pages of a file that are not here are read of copies.
    fn is_copied(&self, file: &PageFile) -> bool {
        self.copied.read().as_ref().is_some_and(|copied| copied.name == file.name)
    }

    /// Asks for those of some pages that are not here.
    fn ask_for(&self, index: usize, file: &RemoteFile, pages: Range<u32>) -> io::Result<()> {
        let name = &self.files[index].1.name;
        let here = file.here(pages.start, pages.end - pages.start)?;
        let mut asked = self.asked.lock();
        if asked.len() > REMEMBERED {
            asked.retain(|_, at| at.elapsed() < ASK_AGAIN);
        }
        let mut wanted: Option<Range<u32>> = None;
        for (page, here) in pages.zip(here) {
            if here || asked.get(&(index, page)).is_some_and(|at| at.elapsed() < ASK_AGAIN) {
                continue;
            }
            asked.insert((index, page), Instant::now());
            match &mut wanted {
                Some(range) if range.end == page => range.end += 1,
                _ => {
                    if let Some(range) = wanted.replace(page..page + 1) {
                        (self.ask)(name, range);
                    }
                }
            }
        }
        if let Some(range) = wanted {
            (self.ask)(name, range);
        }
        Ok(())
    }

    /// The files, as a page map names them. One that was filled has its checksums.
    pub fn files(&self) -> impl Iterator<Item = PageFile> {
        self.files.iter().map(|(_, file, pages)| {
            let sums = pages.being_filled(file).and_then(|filled| filled.sums().ok().flatten());
            PageFile { sums: sums.unwrap_or_else(|| file.sums.clone()), ..file.clone() }
        })
    }

    /// Whether pages are missing that come from copies of another proc's processes.
    pub fn is_being_filled(&self) -> bool {
        let mut filled = self.files.iter().filter_map(|(_, file, pages)| pages.being_filled(file));
        filled.any(|filled| !filled.sums().is_ok_and(|sums| sums.is_some()))
    }

    /// The file of a slot, and which of its pages that is.
    pub fn place(&self, slot: u32) -> Option<(usize, u32)> {
        let index = self.files.partition_point(|(first, ..)| *first <= slot).checked_sub(1)?;
        Some((index, slot - self.files[index].0))
    }

    /// The file and page of a slot whose page is not here; none if it is. Asks for nothing.
    ///
    /// # Errors
    /// The file system's; there is no such slot.
    pub fn away(&self, slot: u32) -> io::Result<Option<(&str, u32)>> {
        let (index, page) = self.place(slot).ok_or(io::ErrorKind::InvalidInput)?;
        let (_, file, pages) = &self.files[index];
        match pages {
            Pages::Remote(remote) if remote.here(page, 1)? == [false] && !self.is_copied(file) => {
                Ok(Some((&file.name, page)))
            }
            _ => Ok(None),
        }
    }

    /// The slot of a run's first page.
    pub fn slot(&self, run: &Run) -> u32 {
        self.files[run.file as usize].0 + run.first
    }

    fn remote(&self, slot: u32) -> Option<(&PageFile, &RemoteFile, u32)> {
        let (index, page) = self.place(slot)?;
        match &self.files[index] {
            (_, file, Pages::Remote(remote)) if page < remote.pages() => Some((file, remote, page)),
            _ => None,
        }
    }

    /// The slot of the first page of all working sets, if there are any.
    pub fn sets(&self) -> Option<u32> {
        self.files.iter().find(|(_, file, _)| file.name == SETS).map(|(slot, ..)| *slot)
    }
}

impl PageSource for Parked {
    fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()> {
        let (index, page) = self.place(slot).ok_or(io::ErrorKind::InvalidInput)?;
        let (_, file, pages) = &self.files[index];
        let open = match pages {
            Pages::Here(open) => open,
            Pages::Remote(remote) => {
                let is_away =
                    |result: &io::Result<()>| result.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
                let mut result = remote.read(page, buffer);
                if is_away(&result) && self.is_copied(file) {
                    if self.read_copied(file, remote, page, buffer) {
                        return Ok(());
                    }
                    result = remote.read(page, buffer);
                }
                if is_away(&result) {
                    self.ask_for(index, remote, page..page + (buffer.len() / PAGE) as u32)?;
                }
                return result;
            }
        };
        let page = page as usize;
        open.read_exact_at(buffer, (page * PAGE) as u64)?;
        match file.first_damaged(page, buffer) {
            Some(page) => Err(damaged(&file.name, page)),
            None => Ok(()),
        }
    }

    fn readable(&self, slot: u32, pages: usize) -> usize {
        match self.remote(slot) {
            Some((file, remote, page)) => {
                let pages = (pages as u32).min(remote.pages() - page);
                if self.is_copied(file) {
                    return pages as usize;
                }
                let here = remote.here(page, pages);
                here.map_or(0, |here| here.iter().take_while(|here| **here).count())
            }
            None => pages,
        }
    }

    fn needed(&self, slot: u32, pages: usize) {
        // What it says is a hint, and for files from a store alone: one that is being filled is
        // marked by the daemon as well.
        if let Some((file, remote, page)) = self.remote(slot)
            && file.remote.is_some()
            && let Err(error) = remote.mark_needed(page, pages as u32)
        {
            tracing::debug!(%error, "what was needed of a remote page file is not marked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_snapshot::pages::copied::CopiedPiece;

    #[test]
    fn pages_are_found_and_damaged_ones_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut map = PageMap::default();
        for (name, fill) in [("pages-1.img", 1u8), (SETS, 5)] {
            let mut bytes = vec![fill; 2 * PAGE];
            bytes[PAGE] += 1;
            std::fs::write(dir.path().join(name), &bytes).unwrap();
            let file = map.file(name) as usize;
            map.files[file].sums = bytes.chunks(PAGE).map(crc32fast::hash).collect();
        }
        map.save(dir.path()).unwrap();
        let (parked, _) =
            Parked::open(dir.path(), PageMap::load(dir.path()).unwrap(), Box::new(|_, _| unreachable!("all is here")))
                .unwrap();
        let at = |file, first| parked.slot(&Run { start: 0, pages: 1, file, first });
        let mut page = vec![0; PAGE];
        for (slot, first) in [(at(0, 0), 1), (at(0, 1), 2), (at(1, 0), 5), (at(1, 1), 6)] {
            parked.read(slot, &mut page).unwrap();
            assert_eq!(page[0], first);
        }
        assert_eq!(parked.sets(), Some(at(1, 0)));
        std::fs::write(dir.path().join(SETS), vec![5u8; 2 * PAGE]).unwrap();
        parked.read(at(1, 0), &mut page).unwrap();
        let error = parked.read(at(1, 1), &mut page).unwrap_err().to_string();
        assert_eq!(error, "page 1 of sets.pages is damaged: its checksum is not the recorded one");
        assert!(parked.read(at(1, 0) - 1, &mut page).is_err(), "between two files");
    }

    #[test]
    fn what_copies_hold_is_read_of_them_and_asked_for_when_they_have_ended() {
        let dir = tempfile::tempdir().unwrap();
        let name = format!("memory.pages{}", kip_snapshot::pages::UNSYNCED);
        let mut map = PageMap::default();
        map.file(&name);
        let remote = RemoteFile::create(dir.path(), &name, 8).unwrap();
        remote.put(2, &[9; PAGE]).unwrap();
        map.save(dir.path()).unwrap();
        let asked = std::sync::Arc::new(Mutex::new(Vec::new()));
        let told = std::sync::Arc::clone(&asked);
        let ask = move |_: &str, pages| told.lock().push(pages);
        let (parked, _) = Parked::open(dir.path(), PageMap::load(dir.path()).unwrap(), Box::new(ask)).unwrap();
        // The program has its own pages where its copy has them, which is another process.
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
        let start = u64::from_str_radix(maps.split('-').next().unwrap(), 16).unwrap();
        let memory = File::open(format!("/proc/{}/mem", child.id())).unwrap();
        let mut held = vec![0; 2 * PAGE];
        memory.read_exact_at(&mut held, start).unwrap();
        let piece = CopiedPiece { memory: 0, run: Run { start, pages: 2, file: 0, first: 3 } };
        parked.read_copies(CopiedFile { name, pages: CopiedPages::new(vec![memory], vec![piece]) });
        let slot = parked.slot(&Run { start: 0, pages: 1, file: 0, first: 2 });
        let mut pages = vec![0; 3 * PAGE];
        assert_eq!((parked.readable(slot, 99), remote.here(3, 2).unwrap()), (6, vec![false, false]));
        parked.read(slot, &mut pages).unwrap();
        assert!(pages[..PAGE] == [9; PAGE] && pages[PAGE..] == held && asked.lock().is_empty());
        parked.needed(slot, 3);
        assert_eq!((remote.needed(2, 1).unwrap(), parked.away(slot + 1).unwrap()), (vec![false], None));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(parked.read(slot, &mut pages).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!((asked.lock().pop(), parked.readable(slot, 99)), (Some(3..5), 1));
        assert!(asked.lock().is_empty() && parked.copied.read().is_none());
    }

    #[test]
    fn what_is_not_here_is_asked_for_once_and_read_when_it_came() {
        let dir = tempfile::tempdir().unwrap();
        let mut map = PageMap::default();
        let file = map.file("remote") as usize;
        map.files[file].remote = Some(100);
        let remote = RemoteFile::create(dir.path(), "remote", 100).unwrap();
        remote.put(11, &[3; PAGE]).unwrap();
        map.save(dir.path()).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let sender = Mutex::new(sender);
        let ask = move |name: &str, pages| sender.lock().send((name.to_owned(), pages)).unwrap();
        let (parked, _) = Parked::open(dir.path(), PageMap::load(dir.path()).unwrap(), Box::new(ask)).unwrap();
        let slot = parked.slot(&Run { start: 0, pages: 1, file: 0, first: 10 });
        let mut pages = vec![0; 4 * PAGE];
        for _ in 0..3 {
            assert_eq!(parked.read(slot, &mut pages).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        let told: Vec<_> = receiver.try_iter().collect();
        assert_eq!(told, [("remote".to_owned(), 10..11), ("remote".to_owned(), 12..14)]);
        assert_eq!((parked.away(slot).unwrap(), parked.away(slot + 1).unwrap()), (Some(("remote", 10)), None));
        remote.put(10, &[2; PAGE]).unwrap();
        remote.put_zeros(12, 2).unwrap();
        parked.read(slot, &mut pages).unwrap();
        assert_eq!([pages[0], pages[PAGE], pages[2 * PAGE]], [2, 3, 0]);
        assert_eq!([parked.readable(slot, 2), parked.readable(slot, 9), parked.readable(slot - 1, 9)], [2, 4, 0]);
        parked.needed(slot, 1);
        assert_eq!(remote.needed(10, 2).unwrap(), [true, false]);
        assert!(!remote.needed(12, 79).unwrap().contains(&true));
    }
}
