//! Memory that copies of processes hold, put into its page file while a clone goes on from it: what
//! the clone waits for at once, the rest behind it.
//!
//! The file says which of its pages are here ([`kip_snapshot::remote`]). The threads that need a
//! page put it there themselves; that of two threads each may put the same one does no harm.
//! Nothing is left of it in another daemon, which removes such a clone.

use kip_snapshot::pages::copied::{CopiedPages, CopiedPiece};
use kip_snapshot::pages::{PAGE, PageMap};
use kip_snapshot::remote::{self, RemoteFile};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Pages that are put together with one that is needed, those among which it is.
const TOGETHER: u32 = 16;

/// A page file that is being filled.
#[derive(Debug)]
pub struct Fill {
    file: RemoteFile,
    copied: CopiedPages,
    /// A page could not be put there.
    failed: AtomicBool,
}

impl Fill {
    /// One of a file of which nothing is here but what copies do not hold.
    pub(crate) fn new(file: RemoteFile, copied: CopiedPages) -> Fill {
        Fill { file, copied, failed: AtomicBool::new(false) }
    }

    /// Where copies hold the pages.
    pub fn copied(&self) -> &CopiedPages {
        &self.copied
    }

    /// Puts pages of the file there. All of them are here if it succeeds.
    ///
    /// # Errors
    /// The file system's; a copy has ended.
    pub fn put(&self, pages: Range<u32>) -> io::Result<()> {
        let mut buffer = Vec::new();
        for piece in self.copied.from(pages.start).iter().take_while(|piece| piece.run.first < pages.end) {
            let first = piece.run.first.max(pages.start / TOGETHER * TOGETHER);
            let end = (piece.run.first + piece.run.pages).min(pages.end.next_multiple_of(TOGETHER));
            self.put_pages(piece, first..end, &mut buffer)?;
        }
        let pages = pages.start..pages.end.min(self.file.pages());
        if self.file.here(pages.start, pages.end.saturating_sub(pages.start))?.contains(&false) {
            // It was put there when the copies were made, and is damaged.
            return Err(io::Error::other("a page that no copy holds is lost"));
        }
        Ok(())
    }

    /// Reads pages of the file that follow each other, wherever they are, and puts none there.
    ///
    /// # Errors
    /// As [`Fill::put`].
    pub fn read(&self, first: u32, bytes: &mut [u8]) -> io::Result<()> {
        self.copied.read(first, bytes, |page, bytes| self.file.read(page, bytes))
    }

    /// Puts pages of one piece there, by their numbers in the file.
    fn put_pages(&self, piece: &CopiedPiece, pages: Range<u32>, buffer: &mut Vec<u8>) -> io::Result<()> {
        let count = pages.end - pages.start;
        if !self.file.here(pages.start, count)?.contains(&false) {
            return Ok(());
        }
        buffer.resize(count as usize * PAGE, 0);
        let read = self.copied.read_piece(piece, pages.start, buffer);
        let put = read.and_then(|()| self.file.put(pages.start, buffer));
        self.failed.fetch_or(put.is_err(), Ordering::Relaxed);
        put
    }

    /// Puts all of them there, on all cores but one, which is the clone's.
    ///
    /// # Errors
    /// As [`Fill::put`].
    pub fn put_all(&self) -> io::Result<()> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut buffer = Vec::new();
            while let Some(piece) = self.copied.pieces().get(next.fetch_add(1, Ordering::Relaxed)) {
                self.put_pages(piece, piece.run.first..piece.run.first + piece.run.pages, &mut buffer)?;
            }
            Ok::<_, io::Error>(())
        };
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        thread::scope(|scope| {
            let others: Vec<_> = (2..cores).map(|_| scope.spawn(work)).collect();
            let own = work();
            others.into_iter().fold(own, |done, other| done.and(other.join().expect("it does not panic")))
        })?;
        // One that was damaged on the disk meanwhile is put there again.
        self.put(0..self.file.pages())?;
        // The clone was ended for that.
        if self.has_failed() { Err(io::Error::other("a page that it waited for could not be copied")) } else { Ok(()) }
    }

    /// Whether a page could not be put there: what waits for it waits for ever.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }
}

/// The page files of this daemon that are being filled.
#[derive(Debug, Default)]
pub struct Fills(Mutex<HashMap<FileId, Arc<Fill>>>);

/// Device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    fn of(path: &Path) -> io::Result<FileId> {
        let found = fs::metadata(path)?;
        Ok(FileId { device: found.dev(), inode: found.ino() })
    }
}

/// A file is being filled until this is dropped.
#[derive(Debug)]
pub struct Filling<'a> {
    fills: &'a Fills,
    id: FileId,
    fill: Arc<Fill>,
}

impl Filling<'_> {
    /// What is filled.
    pub fn fill(&self) -> &Fill {
        &self.fill
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.fills.0.lock().remove(&self.id);
        // The copies end after this, and a thread that has it may be reading of them.
        while Arc::strong_count(&self.fill) > 1 {
            thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Fills {
    /// The file that has this path is filled from now on, whatever other paths it gets.
    ///
    /// # Errors
    /// The file system's.
    pub fn begin(&self, path: &Path, fill: Fill) -> io::Result<Filling<'_>> {
        let (id, fill) = (FileId::of(path)?, Arc::new(fill));
        self.0.lock().insert(id, Arc::clone(&fill));
        Ok(Filling { fills: self, id, fill })
    }

    /// Puts pages of a file there if it is being filled, which is said.
    ///
    /// # Errors
    /// The file system's; a copy has ended.
    pub fn put(&self, path: &Path, pages: Range<u32>) -> io::Result<bool> {
        self.of(path)?.map_or(Ok(false), |fill| fill.put(pages).map(|()| true))
    }

    /// What fills a page file of that generation, and the file's name.
    ///
    /// # Errors
    /// The file system's.
    pub fn of_generation(&self, directory: &Path) -> io::Result<Option<(String, Arc<Fill>)>> {
        for name in remote::names_of_filled(directory)? {
            if let Some(fill) = self.of(&directory.join(&name))? {
                return Ok(Some((name, fill)));
            }
        }
        Ok(None)
    }

    /// What fills that file.
    ///
    /// # Errors
    /// The file system's.
    pub fn of(&self, path: &Path) -> io::Result<Option<Arc<Fill>>> {
        let id = FileId::of(path)?;
        Ok(self.0.lock().get(&id).cloned())
    }

    /// Puts pages of a page file there for which a program waits.
    ///
    /// # Errors
    /// As [`Fills::put_of`].
    pub fn put_waited_for(&self, directory: &Path, name: &str, pages: Range<u32>) -> io::Result<()> {
        if self.put(&directory.join(name), pages.clone())? {
            return Ok(());
        }
        // By now all of it is here, unless the daemon that filled it has ended.
        let map = PageMap::load(directory).map_err(io::Error::other)?;
        let number = map.files.iter().position(|file| file.name == name);
        number.map_or(Ok(()), |number| {
            self.put_of(directory, Some(&[(number as u32, pages.start, pages.end - pages.start)]))
        })
    }

    /// Puts those pages of a generation there that come from copies: `which`, as number of the
    /// file, first page and pages, or all.
    ///
    /// # Errors
    /// The file system's; a copy has ended, or is not this daemon's.
    pub fn put_of(&self, directory: &Path, which: Option<&[(u32, u32, u32)]>) -> io::Result<()> {
        match remote::names_of_filled(directory) {
            Ok(names) if names.is_empty() => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found.map(drop)?,
        }
        let map = PageMap::load(directory).map_err(io::Error::other)?;
        for (number, file) in (0..).zip(&map.files).filter(|(_, file)| remote::is_filled(directory, file)) {
            let Some(found) = RemoteFile::find(directory, file).map_err(io::Error::other)? else { continue };
            let all = [(number, 0, found.pages())];
            for (_, first, pages) in which.unwrap_or(&all).iter().filter(|(of, ..)| *of == number) {
                let is_filled = self.put(&directory.join(&file.name), *first..*first + *pages)?;
                if !is_filled && found.here(*first, *pages)?.contains(&false) {
                    return Err(io::Error::other("the daemon that copied it has ended before all was copied"));
                }
            }
        }
        Ok(())
    }
}

/// In a clone's directory: it does not run yet, or its memory is still copied.
const UNFINISHED: &str = "unfinished";

/// Notes of a clone that it is one only once it runs and its memory is copied. Nothing of it is
/// synced until then: a file system that keeps changes of directories in their order has this in
/// each state in which it has the clone's name.
///
/// # Errors
/// The file system's.
pub fn mark_unfinished(clone: &Path) -> io::Result<()> {
    fs::write(clone.join(UNFINISHED), "")
}

/// Notes that it is one now.
///
/// # Errors
/// The file system's.
pub fn unmark_unfinished(clone: &Path) -> io::Result<()> {
    match fs::remove_file(clone.join(UNFINISHED)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Whether a proc is such a clone: memory may be missing in its generation, and after a crash of
/// the machine any part of it.
pub fn is_unfinished(proc: &Path) -> bool {
    proc.join(UNFINISHED).exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_snapshot::pages::Run;
    use std::fs::File;

    #[test]
    fn pages_are_put_where_they_are_needed_first_and_then_all() {
        let dir = tempfile::tempdir().unwrap();
        let own: Vec<u8> = (0..64 * PAGE).map(|n| (n / PAGE) as u8 + 1).collect();
        let memory = || File::open("/proc/self/mem").unwrap();
        let run = |first: u32, pages| Run {
            start: own.as_ptr() as u64 + u64::from(first) * PAGE as u64,
            pages,
            file: 0,
            first,
        };
        let file = RemoteFile::create(dir.path(), "memory", 64).unwrap();
        let piece = |memory, run| CopiedPiece { memory, run };
        let pieces = vec![piece(1, run(20, 44)), piece(0, run(0, 20))];
        let fill = Fill::new(file, CopiedPages::new(vec![memory(), memory()], pieces));
        let (path, fills) = (dir.path().join("memory"), Fills::default());
        assert!(!fills.put(&path, 0..64).unwrap());
        let filling = fills.begin(&path, fill).unwrap();
        let here = || filling.fill().file.here(0, 64).unwrap();
        assert!(!here().contains(&true));
        let other = dir.path().join("other");
        fs::hard_link(&path, &other).unwrap();
        let mut read = vec![0; 3 * PAGE];
        fills.of(&other).unwrap().unwrap().read(19, &mut read).unwrap();
        assert!(read == own[19 * PAGE..22 * PAGE] && !here().contains(&true));
        assert!(fills.put(&other, 18..34).unwrap());
        let came: Vec<u32> = (0..64).zip(here()).filter(|(_, here)| *here).map(|(page, _)| page).collect();
        assert_eq!(came, (16..48).collect::<Vec<_>>());
        filling.fill().put_all().unwrap();
        assert!(!here().contains(&false));
        drop(filling);
        assert_eq!(fs::read(&other).unwrap(), own);
    }

    #[test]
    fn a_page_that_cannot_be_copied_is_found_at_the_end_too() {
        let dir = tempfile::tempdir().unwrap();
        let file = RemoteFile::create(dir.path(), "memory", 4).unwrap();
        let run = |start| Run { start, pages: 2, file: 0, first: if start == 0 { 0 } else { 2 } };
        let own = [7u8; 3 * PAGE];
        let there = (own.as_ptr() as u64).next_multiple_of(PAGE as u64);
        let memory = vec![File::open("/proc/self/mem").unwrap()];
        let pieces = [0, there].map(|start| CopiedPiece { memory: 0, run: run(start) });
        let fill = Fill::new(file, CopiedPages::new(memory, pieces.into()));
        fill.put(2..4).unwrap();
        assert!(!fill.has_failed());
        assert!(fill.put(0..1).is_err() && fill.has_failed() && fill.put_all().is_err());
    }

    #[test]
    fn a_clone_is_unfinished_until_it_is_unmarked() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_unfinished(dir.path()));
        unmark_unfinished(dir.path()).unwrap();
        mark_unfinished(dir.path()).unwrap();
        assert!(is_unfinished(dir.path()));
        unmark_unfinished(dir.path()).unwrap();
        assert!(!is_unfinished(dir.path()));
    }
}
