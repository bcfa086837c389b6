//! The page files of a parked generation as a page source: [`kip_snapshot::pages`].
//!
//! Reads through the page cache, which the wake of a proc that was parked a moment ago finds warm. Every page is compared
//! with its checksum before anybody gets it. The generation itself may go while its pages are still needed: [`keep`].

use crate::source::{PARKED, PageSource};
use crate::swap::PAGE;
use kip_snapshot::SnapshotError;
use kip_snapshot::pages::{PAGES, PageFile, PageMap, Process, Run, SETS, damaged};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Makes `directory`, with the page map and the page files of a generation (hard links).
///
/// # Errors
/// The file system's; a damaged page map.
pub fn keep(generation: &Path, directory: &Path) -> Result<(), SnapshotError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| SnapshotError::Io { path, source }
    };
    std::fs::create_dir(directory).map_err(failed(directory))?;
    let files = PageMap::load(generation)?.files;
    for name in files.iter().map(|file| file.name.as_str()).chain([PAGES]) {
        std::fs::hard_link(generation.join(name), directory.join(name)).map_err(failed(&generation.join(name)))?;
    }
    Ok(())
}

/// The page files of one generation. A slot is a page's place among all pages of all files; between two files lies one
/// that nobody has, so that what follows each other in slots does so in a file.
#[derive(Debug)]
pub struct Parked {
    /// By the slot of its first page.
    files: Vec<(u32, PageFile, File)>,
}

impl Parked {
    /// Opens the page files of the generation in a directory; tells what its processes have in them, by number inside.
    ///
    /// # Errors
    /// The file system's; a damaged page map.
    pub fn open(dir: &Path) -> Result<(Parked, BTreeMap<u32, Process>), SnapshotError> {
        let PageMap { files, processes } = PageMap::load(dir)?;
        let mut next = PARKED;
        let mut open = Vec::with_capacity(files.len());
        for file in files {
            let path = dir.join(&file.name);
            let opened = File::open(&path).map_err(|source| SnapshotError::Io { path, source })?;
            // Read-ahead is ours: only we know what is needed together.
            let _ = rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::Random);
            let pages = file.sums.len() as u32;
            open.push((next, file, opened));
            next += pages + 1;
        }
        Ok((Parked { files: open }, processes))
    }

    /// The files, as a page map names them.
    pub fn files(&self) -> impl Iterator<Item = &PageFile> {
        self.files.iter().map(|(_, file, _)| file)
    }

    /// The file of a slot, and which of its pages that is.
    pub fn place(&self, slot: u32) -> Option<(usize, u32)> {
        let index = self.files.partition_point(|(first, ..)| *first <= slot).checked_sub(1)?;
        Some((index, slot - self.files[index].0))
    }

    /// The slot of a run's first page.
    pub fn slot(&self, run: &Run) -> u32 {
        self.files[run.file as usize].0 + run.first
    }

    /// The slot of the first page of all working sets, if there are any.
    pub fn sets(&self) -> Option<u32> {
        self.files.iter().find(|(_, file, _)| file.name == SETS).map(|(slot, ..)| *slot)
    }
}

impl PageSource for Parked {
    fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()> {
        let (index, page) = self.place(slot).ok_or(io::ErrorKind::InvalidInput)?;
        let ((_, file, open), page) = (&self.files[index], page as usize);
        open.read_exact_at(buffer, (page * PAGE) as u64)?;
        match file.first_damaged(page, buffer) {
            Some(page) => Err(damaged(&file.name, page)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let (parked, _) = Parked::open(dir.path()).unwrap();
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
}
