//! Page files whose pages come when they are needed: from an object store, remote page files, or
//! from memory that copies of processes hold, page files that are being filled.
//!
//! Owns what is here and what is not. Three files: `NAME` has each page that came in its place, and
//! holes; `NAME.here` says which came; `NAME.table` belongs to the code that fetches them, and is
//! opaque here. All three may be linked into later generations. They are never synced, and no part
//! of a generation is checked by them: a page that is lost, or damaged where it lies, is one that
//! is not here, and comes once more. One process writes, others read meanwhile: a page's bytes and
//! checksum are there before it is said to be here. Of a file from a store the reader notes what it
//! needed; two of them that note it at once lose a note.
//!
//! One that is being filled has no table, is none of the page map's remote files, and is like any
//! other once all has come ([`crate::settle_cloned`]).
//!
//! `NAME.here`: a byte per page (0 not here, 1 here, 2 here and zeros), padded to 8 bytes, then the
//! CRC-32 of each page.

use super::{PAGE, PageFile, PageMap, UNSYNCED};
use crate::error::{SnapshotError, io_at};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

/// What the name of the file ends with that says what is here.
pub const HERE: &str = ".here";
/// And of that which says where the pages are fetched from.
pub const TABLE: &str = ".table";

const AWAY: u8 = 0;
const CAME: u8 = 1;
const ZEROS: u8 = 2;
const NEEDED: u8 = 3;

/// A remote page file.
#[derive(Debug)]
pub struct RemoteFile {
    name: String,
    file: File,
    here: File,
    pages: u32,
}

fn open(path: &Path, new: bool) -> Result<File, SnapshotError> {
    OpenOptions::new().read(true).write(true).create_new(new).mode(0o600).open(path).map_err(io_at(path))
}

impl RemoteFile {
    /// Makes one of which nothing is here.
    ///
    /// # Errors
    /// The file system's.
    pub fn create(dir: &Path, name: &str, pages: u32) -> Result<RemoteFile, SnapshotError> {
        let made = RemoteFile {
            name: name.to_owned(),
            file: open(&dir.join(name), true)?,
            here: open(&dir.join(format!("{name}{HERE}")), true)?,
            pages,
        };
        let sized = made.file.set_len(u64::from(pages) * PAGE as u64);
        sized.and_then(|()| made.here.set_len(made.sum_at(pages))).map_err(io_at(&dir.join(name)))?;
        Ok(made)
    }

    /// Opens one.
    ///
    /// # Errors
    /// The file system's; `Damaged` if it has another size.
    pub fn open(dir: &Path, file: &PageFile) -> Result<RemoteFile, SnapshotError> {
        RemoteFile::open_as(dir, file, file.remote.unwrap_or(0))
    }

    /// Opens a page file of which not all may be here; none if it is another one.
    ///
    /// # Errors
    /// As [`RemoteFile::open`].
    pub fn find(dir: &Path, file: &PageFile) -> Result<Option<RemoteFile>, SnapshotError> {
        if file.remote.is_none() && !is_filled(dir, file) {
            return Ok(None);
        }
        let path = dir.join(&file.name);
        let pages = match file.remote {
            Some(pages) => pages,
            None => (fs::metadata(&path).map_err(io_at(&path))?.len() / PAGE as u64) as u32,
        };
        RemoteFile::open_as(dir, file, pages).map(Some)
    }

    fn open_as(dir: &Path, file: &PageFile, pages: u32) -> Result<RemoteFile, SnapshotError> {
        let path = dir.join(&file.name);
        let found = RemoteFile {
            name: file.name.clone(),
            file: open(&path, false)?,
            here: open(&dir.join(format!("{}{HERE}", file.name)), false)?,
            pages,
        };
        let has = |file: &File, bytes: u64| file.metadata().map(|found| found.len() == bytes).map_err(io_at(&path));
        let sound = has(&found.file, u64::from(pages) * PAGE as u64)? && has(&found.here, found.sum_at(pages))?;
        if sound { Ok(found) } else { Err(SnapshotError::Damaged { path, what: "size" }) }
    }

    /// How many pages it has.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    fn sum_at(&self, page: u32) -> u64 {
        u64::from(self.pages).next_multiple_of(8) + 4 * u64::from(page)
    }

    /// Of some pages which are here.
    ///
    /// # Errors
    /// The file system's.
    pub fn here(&self, first: u32, pages: u32) -> io::Result<Vec<bool>> {
        Ok(self.marks(first, pages)?.into_iter().map(|mark| mark != AWAY).collect())
    }

    fn marks(&self, first: u32, pages: u32) -> io::Result<Vec<u8>> {
        let mut marks = vec![0; pages as usize];
        self.here.read_exact_at(&mut marks, first.into())?;
        Ok(marks)
    }

    /// The checksums of all pages; none if one is not here.
    ///
    /// # Errors
    /// The file system's.
    pub fn sums(&self) -> io::Result<Option<Vec<u32>>> {
        if self.marks(0, self.pages)?.contains(&AWAY) {
            return Ok(None);
        }
        let mut bytes = vec![0; self.pages as usize * 4];
        self.here.read_exact_at(&mut bytes, self.sum_at(0))?;
        Ok(Some(bytes.chunks_exact(4).map(|sum| u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]])).collect()))
    }

    /// Puts pages there, one behind the other.
    ///
    /// # Errors
    /// The file system's: none of them is here then.
    pub fn put(&self, first: u32, bytes: &[u8]) -> io::Result<()> {
        let sums: Vec<u8> = bytes.chunks(PAGE).flat_map(|page| crc32fast::hash(page).to_le_bytes()).collect();
        self.file.write_all_at(bytes, u64::from(first) * PAGE as u64)?;
        self.here.write_all_at(&sums, self.sum_at(first))?;
        self.here.write_all_at(&vec![CAME; bytes.len() / PAGE], first.into())
    }

    /// Says of pages that they are zeros.
    ///
    /// # Errors
    /// The file system's.
    pub fn put_zeros(&self, first: u32, pages: u32) -> io::Result<()> {
        self.here.write_all_at(&vec![ZEROS; pages as usize], first.into())
    }

    /// Says of runs of pages, each its first page and how many, that they are zeros, at once; of a
    /// file of which nothing is here.
    ///
    /// # Errors
    /// The file system's.
    pub fn begin_with_zeros(&self, runs: impl Iterator<Item = (u32, u32)>) -> io::Result<()> {
        let mut marks = Vec::new();
        for (first, pages) in runs {
            let end = (first + pages) as usize;
            marks.resize(end.max(marks.len()), AWAY);
            marks[first as usize..end].fill(ZEROS);
        }
        self.here.write_all_at(&marks, 0)
    }

    /// Marks pages as needed, those of them that came.
    ///
    /// # Errors
    /// The file system's.
    pub fn mark_needed(&self, first: u32, pages: u32) -> io::Result<()> {
        let mut marks = self.marks(first, pages)?;
        if !marks.contains(&CAME) {
            return Ok(());
        }
        marks.iter_mut().filter(|mark| **mark == CAME).for_each(|mark| *mark = NEEDED);
        self.here.write_all_at(&marks, first.into())
    }

    /// Of some pages, which were marked as needed since they came.
    ///
    /// # Errors
    /// The file system's.
    pub fn needed(&self, first: u32, pages: u32) -> io::Result<Vec<bool>> {
        Ok(self.marks(first, pages)?.into_iter().map(|mark| mark == NEEDED).collect())
    }

    /// Reads pages one behind the other and compares them with their checksums.
    ///
    /// # Errors
    /// `WouldBlock` if not all are here; one that is damaged is not. The file system's.
    pub fn read(&self, first: u32, buffer: &mut [u8]) -> io::Result<()> {
        let pages = (buffer.len() / PAGE) as u32;
        let marks = self.marks(first, pages)?;
        let away = |page: u32| {
            let message = format!("page {page} of {} is not here", self.name);
            io::Error::new(io::ErrorKind::WouldBlock, message)
        };
        if let Some(index) = marks.iter().position(|mark| *mark == AWAY) {
            return Err(away(first + index as u32));
        }
        self.file.read_exact_at(buffer, u64::from(first) * PAGE as u64)?;
        let mut sums = vec![0; marks.len() * 4];
        self.here.read_exact_at(&mut sums, self.sum_at(first))?;
        for ((page, bytes), (mark, sum)) in
            (first..).zip(buffer.chunks_mut(PAGE)).zip(marks.iter().zip(sums.chunks_exact(4)))
        {
            if *mark == ZEROS {
                bytes.fill(0);
            } else if crc32fast::hash(bytes).to_le_bytes() != sum {
                tracing::warn!(
                    page,
                    file = self.name,
                    "a page that was fetched is damaged on the local disk; it is fetched again"
                );
                self.here.write_all_at(&[AWAY], page.into())?;
                return Err(away(page));
            }
        }
        Ok(())
    }
}

/// Whether a page file is being filled, or was when the last daemon ended.
pub fn is_filled(dir: &Path, file: &PageFile) -> bool {
    file.remote.is_none() && file.sums.is_empty() && dir.join(format!("{}{HERE}", file.name)).exists()
}

/// The names of the page files of a generation that are being filled, with those that say what of
/// them is here.
pub fn filled_names(dir: &Path, map: &PageMap) -> Vec<String> {
    let filled = map.files.iter().filter(|file| is_filled(dir, file));
    filled.flat_map(|file| [file.name.clone(), format!("{}{HERE}", file.name)]).collect()
}

/// Whether a generation may have such page files; reads no file.
pub fn may_be_filled(dir: &Path) -> bool {
    names_of_filled(dir).is_ok_and(|names| !names.is_empty())
}

/// The names of page files of a generation that may be being filled; reads no file.
///
/// # Errors
/// The file system's.
pub fn names_of_filled(dir: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    let names = entries.iter().filter_map(|entry| entry.file_name().to_str()?.strip_suffix(HERE).map(str::to_owned));
    Ok(names.filter(|name| name.ends_with(UNSYNCED)).collect())
}

/// A page file that is read, wherever its pages are.
#[derive(Debug)]
pub enum OpenPages {
    /// All are in it.
    Here(File),
    /// Those that came.
    Remote(RemoteFile),
}

impl OpenPages {
    /// Opens one.
    ///
    /// # Errors
    /// The file system's; `Damaged`: see [`RemoteFile::open`].
    pub fn open(dir: &Path, file: &PageFile) -> Result<OpenPages, SnapshotError> {
        let path = dir.join(&file.name);
        Ok(match RemoteFile::find(dir, file)? {
            Some(remote) => OpenPages::Remote(remote),
            None => OpenPages::Here(File::open(&path).map_err(io_at(&path))?),
        })
    }

    /// Whether a page is here.
    pub fn has(&self, page: u32) -> bool {
        match self {
            OpenPages::Here(_) => true,
            OpenPages::Remote(file) => file.here(page, 1).is_ok_and(|here| here == [true]),
        }
    }

    /// Reads pages one behind the other; checksums of those that are here are the caller's to
    /// compare.
    ///
    /// # Errors
    /// The file system's; those of [`RemoteFile::read`].
    pub fn read(&self, first: u32, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            OpenPages::Here(file) => file.read_exact_at(bytes, u64::from(first) * PAGE as u64),
            OpenPages::Remote(file) => file.read(first, bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_here_once_they_came() {
        let dir = tempfile::tempdir().unwrap();
        let made = RemoteFile::create(dir.path(), "remote", 9).unwrap();
        let mut page = [0; PAGE];
        assert_eq!(made.read(3, &mut page).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        made.put(3, &[7; 2 * PAGE]).unwrap();
        made.put_zeros(5, 2).unwrap();
        assert_eq!(made.here(2, 6).unwrap(), [false, true, true, true, true, false]);
        let zeros = RemoteFile::create(dir.path(), "zeros", 9).unwrap();
        zeros.begin_with_zeros([(4, 2), (1, 1)].into_iter()).unwrap();
        assert_eq!(zeros.here(0, 7).unwrap(), [false, true, false, false, true, true, false]);
        let file = PageFile { name: "remote".into(), remote: Some(9), ..PageFile::default() };
        let again = RemoteFile::open(dir.path(), &file).unwrap();
        let mut pages = [9; 4 * PAGE];
        again.read(3, &mut pages).unwrap();
        assert!(pages[..2 * PAGE].iter().all(|byte| *byte == 7) && pages[2 * PAGE..].iter().all(|byte| *byte == 0));
        assert!(again.read(2, &mut pages).is_err());
        again.mark_needed(2, 2).unwrap();
        assert_eq!(made.needed(2, 3).unwrap(), [false, true, false]);
        assert!(!made.here(2, 1).unwrap()[0]);
        made.read(3, &mut pages).unwrap();
        let other = PageFile { remote: Some(8), ..file };
        assert!(matches!(RemoteFile::open(dir.path(), &other), Err(SnapshotError::Damaged { what: "size", .. })));
    }

    #[test]
    fn one_that_is_damaged_is_not_here() {
        let dir = tempfile::tempdir().unwrap();
        let made = RemoteFile::create(dir.path(), "remote", 2).unwrap();
        made.put(0, &[7; 2 * PAGE]).unwrap();
        made.file.write_all_at(&[8], PAGE as u64 + 100).unwrap();
        let mut page = [0; PAGE];
        assert_eq!(made.read(1, &mut page).unwrap_err().to_string(), "page 1 of remote is not here");
        assert_eq!(made.here(0, 2).unwrap(), [true, false]);
        made.put(1, &[5; PAGE]).unwrap();
        made.read(1, &mut page).unwrap();
        assert_eq!(page[0], 5);
    }
}
