//! Where the memory of a generation's processes lies: for every page that is not zeros a place in a
//! page file, and for every page of a page file a checksum, so that one page can be read and
//! trusted without the rest.
//!
//! Owns `pages.map`, a part of the generation like the others. Page files are files of whole pages
//! one behind the other; one may belong to several generations (a hard link), when what lies in it
//! has not changed. Never reads a process.
//!
//! Layout, little-endian 64-bit words: `KIPPAGES`, CRC-32 of all that follows, number of files,
//! number of processes; per file the length of its name, the number of its pages, the name padded
//! to words, the CRC-32 of each page, two to a word; of a remote one ([`remote`]) the highest bit
//! of the length of the name is set and there are no checksums here; per process its number, the
//! count of its runs, the count of its working sets; then each run as start, pages, file, first
//! page in it; then each set as the length of its kind, its turn, the count of its pages, the kind
//! padded to words, the addresses in the order in which they are needed, with 1 added to those held
//! back, 16 for each time that they are confirmed.

pub mod copied;
pub mod remote;

use crate::error::{SnapshotError, io_at};
use remote::RemoteFile;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// The file's name.
pub const PAGES: &str = "pages.map";
/// Name of the page file with the pages of all working sets once more, each process's by address,
/// the processes by number.
pub const SETS: &str = "sets.pages";
/// What the name of a page file ends with that was not synced when its generation was sealed: a
/// later one that takes it over, and is to be kept, syncs it and leaves that out.
pub const UNSYNCED: &str = ".unsynced";
/// Bytes of a page.
pub const PAGE: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"KIPPAGES");
/// Words before the files.
const HEAD: usize = 4;
/// In the length of a name.
const REMOTE: u64 = 1 << 63;

/// Pages that follow each other in memory and in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Address of the first.
    pub start: u64,
    /// How many.
    pub pages: u32,
    /// Which of [`PageMap::files`].
    pub file: u32,
    /// The first one's number in the file.
    pub first: u32,
}

impl Run {
    /// Behind the last page.
    pub fn end(&self) -> u64 {
        self.start + u64::from(self.pages) * PAGE as u64
    }
}

/// A file of pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageFile {
    /// Its name in the generation's directory.
    pub name: String,
    /// CRC-32 (ISO-HDLC) of each page; empty until the file has been read ([`crate::seal`]), and of
    /// a remote one.
    pub sums: Vec<u32>,
    /// How many pages it has if it is a remote one: [`remote`].
    pub remote: Option<u32>,
}

/// A page of a working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Its address.
    pub address: u64,
    /// How often it was seen to be touched, and did not just come along; at most 7.
    pub confirmed: u8,
    /// It is kept at hand, not installed, to see whether it is still needed.
    pub held_back: bool,
}

/// The pages that are expected to be needed first at a wake of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// The kind: a port, a timer, a call.
    pub kind: String,
    /// How many sets of this kind there have been.
    pub turn: u64,
    /// In the order in which they are needed.
    pub pages: Vec<Expected>,
}

/// The memory of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessPages {
    /// By address, none over another.
    pub runs: Vec<Run>,
    /// The newest kind first. The bytes of all pages that any of them has lie in [`SETS`] once
    /// more.
    pub sets: Vec<WorkingSet>,
}

impl ProcessPages {
    /// The pages of all sets, by address.
    pub fn expected(&self) -> Vec<u64> {
        let mut pages: Vec<u64> = self.sets.iter().flat_map(|set| &set.pages).map(|page| page.address).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageMap {
    /// The page files.
    pub files: Vec<PageFile>,
    /// By number inside the sandbox.
    pub processes: BTreeMap<u32, ProcessPages>,
}

impl PageMap {
    /// The number of a page file in [`PageMap::files`], which is new if it was not there.
    pub fn file(&mut self, name: &str) -> u32 {
        let known = self.files.iter().position(|file| file.name == name);
        let place = known.unwrap_or_else(|| {
            self.files.push(PageFile { name: name.to_owned(), ..PageFile::default() });
            self.files.len() - 1
        });
        place as u32
    }

    /// Writes it; the caller syncs.
    ///
    /// # Errors
    /// The file system's.
    pub fn save(&self, dir: &Path) -> Result<(), SnapshotError> {
        self.save_as(&dir.join(PAGES))
    }

    /// Writes it to any file.
    ///
    /// # Errors
    /// The file system's.
    pub fn save_as(&self, path: &Path) -> Result<(), SnapshotError> {
        let mut words = vec![MAGIC, 0, self.files.len() as u64, self.processes.len() as u64];
        for file in &self.files {
            let length = file.name.len() as u64;
            match file.remote {
                Some(pages) => words.extend([length | REMOTE, pages.into()]),
                None => words.extend([length, file.sums.len() as u64]),
            }
            words.extend(text_words(&file.name));
            let pair = |pair: &[u32]| u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32;
            words.extend(file.sums.chunks(2).map(pair));
        }
        for (pid, process) in &self.processes {
            words.extend([u64::from(*pid), process.runs.len() as u64, process.sets.len() as u64]);
            for run in &process.runs {
                words.extend([run.start, run.pages.into(), run.file.into(), run.first.into()]);
            }
            for set in &process.sets {
                words.extend([set.kind.len() as u64, set.turn, set.pages.len() as u64]);
                words.extend(text_words(&set.kind));
                let word =
                    |page: &Expected| page.address | u64::from(page.held_back) | u64::from(page.confirmed & 7) << 4;
                words.extend(set.pages.iter().map(word));
            }
        }
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let crc = u64::from(crc32fast::hash(&bytes[16..]));
        bytes[8..16].copy_from_slice(&crc.to_le_bytes());
        fs::write(path, bytes).map_err(io_at(path))
    }

    /// Reads it back.
    ///
    /// # Errors
    /// The file system's; `Damaged`.
    pub fn load(dir: &Path) -> Result<PageMap, SnapshotError> {
        Self::load_from(&dir.join(PAGES))
    }

    /// Reads it from any file.
    ///
    /// # Errors
    /// As [`PageMap::load`].
    pub fn load_from(path: &Path) -> Result<PageMap, SnapshotError> {
        let bytes = fs::read(path).map_err(io_at(path))?;
        Self::decode(&bytes).ok_or_else(|| SnapshotError::Damaged { path: path.to_owned(), what: "checksum" })
    }

    fn decode(bytes: &[u8]) -> Option<PageMap> {
        if !bytes.len().is_multiple_of(8) || bytes.len() < HEAD * 8 {
            return None;
        }
        let mut reader = Reader(bytes);
        let (magic, crc) = (reader.word()?, reader.word()?);
        if magic != MAGIC || crc != u64::from(crc32fast::hash(&bytes[16..])) {
            return None;
        }
        let (files, processes) = (reader.word()?, reader.word()?);
        let mut map = PageMap::default();
        for _ in 0..files {
            let (length, pages) = (reader.word()?, reader.word()? as usize);
            let name = reader.text((length & !REMOTE) as usize)?;
            if length & REMOTE != 0 {
                map.files.push(PageFile { name, sums: Vec::new(), remote: Some(pages.try_into().ok()?) });
                continue;
            }
            let sums = reader.take(pages.checked_mul(4)?.checked_next_multiple_of(8)?)?;
            let sums = sums.chunks_exact(4).take(pages).map(|s| u32::from_le_bytes([s[0], s[1], s[2], s[3]])).collect();
            map.files.push(PageFile { name, sums, remote: None });
        }
        for _ in 0..processes {
            let (pid, runs, sets) = (reader.word()? as u32, reader.word()?, reader.word()?);
            let mut process = ProcessPages::default();
            for _ in 0..runs {
                let (start, pages, file, first) = (reader.word()?, reader.word()?, reader.word()?, reader.word()?);
                let run = Run { start, pages: pages as u32, file: file as u32, first: first as u32 };
                let file = map.files.get(run.file as usize)?;
                let has = file.remote.map_or(file.sums.len(), |pages| pages as usize);
                if has > 0 && has < run.first as usize + run.pages as usize {
                    return None;
                }
                process.runs.push(run);
            }
            for _ in 0..sets {
                let (length, turn, pages) = (reader.word()? as usize, reader.word()?, reader.word()?);
                let mut set = WorkingSet { kind: reader.text(length)?, turn, pages: Vec::new() };
                for _ in 0..pages {
                    let word = reader.word()?;
                    let (held_back, confirmed) = (word & 1 != 0, (word >> 4 & 7) as u8);
                    set.pages.push(Expected { address: word & !0xfff, confirmed, held_back });
                }
                process.sets.push(set);
            }
            map.processes.insert(pid, process);
        }
        reader.0.is_empty().then_some(map)
    }

    /// Reads pages of a page file and compares them with their checksums.
    ///
    /// # Errors
    /// The file system's; `Damaged`; a page of a remote file is not here.
    pub fn verify(&self, dir: &Path, ranges: &[Run]) -> Result<(), SnapshotError> {
        const CHUNK: usize = 64;
        let mut buffer = vec![0; CHUNK * PAGE];
        let mut open: BTreeMap<u32, File> = BTreeMap::new();
        for run in ranges {
            let file = &self.files[run.file as usize];
            let path = dir.join(&file.name);
            if let Some(remote) = RemoteFile::find(dir, file)? {
                for first in (0..run.pages).step_by(CHUNK) {
                    let count = (run.pages - first).min(CHUNK as u32) as usize;
                    remote.read(run.first + first, &mut buffer[..count * PAGE]).map_err(io_at(&path))?;
                }
                continue;
            }
            if let std::collections::btree_map::Entry::Vacant(place) = open.entry(run.file) {
                place.insert(File::open(&path).map_err(io_at(&path))?);
            }
            let (mut page, end) = (run.first as usize, run.first as usize + run.pages as usize);
            while page < end {
                let count = (end - page).min(CHUNK);
                let bytes = &mut buffer[..count * PAGE];
                open[&run.file].read_exact_at(bytes, (page * PAGE) as u64).map_err(io_at(&path))?;
                if file.first_damaged(page, bytes).is_some() {
                    return Err(SnapshotError::Damaged { path, what: "checksum" });
                }
                page += count;
            }
        }
        Ok(())
    }
}

impl PageFile {
    /// The names of all files that belong to it.
    pub fn names(&self) -> impl Iterator<Item = String> + '_ {
        let companions = self.remote.iter().flat_map(|_| [remote::HERE, remote::TABLE]);
        std::iter::once(self.name.clone()).chain(companions.map(|suffix| format!("{}{suffix}", self.name)))
    }

    /// A checksum of all its checksums.
    pub(crate) fn sum(&self) -> u32 {
        crc32fast::hash(&self.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// The first of some pages, from number `first` on, whose bytes are not the recorded ones. None
    /// are recorded of a file that is still being filled from copies ([`remote::is_filled`]).
    pub fn first_damaged(&self, first: usize, bytes: &[u8]) -> Option<usize> {
        if self.sums.is_empty() && self.name.ends_with(UNSYNCED) {
            return None;
        }
        let good = |(index, page): (usize, &[u8])| self.sums.get(first + index) == Some(&crc32fast::hash(page));
        bytes.chunks(PAGE).enumerate().position(|page| !good(page)).map(|index| first + index)
    }
}

/// A text as words.
fn text_words(text: &str) -> impl Iterator<Item = u64> + '_ {
    text.as_bytes().chunks(8).map(|part| {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        u64::from_le_bytes(word)
    })
}

/// Bytes that are taken from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(head)
    }

    fn text(&mut self, length: usize) -> Option<String> {
        let padded = self.take(length.checked_next_multiple_of(8)?)?;
        String::from_utf8(padded.get(..length)?.to_vec()).ok()
    }

    fn word(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().expect("8 bytes")))
    }
}

/// An error of a page that cannot be trusted, for callers that speak of files.
pub fn damaged(name: &str, page: usize) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("page {page} of {name} is damaged: its checksum is not the recorded one"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> PageMap {
        let mut map = PageMap::default();
        let (a, b) = (map.file("pages-1.img"), map.file(SETS));
        map.files[a as usize].sums = vec![1, 2, 3];
        map.files[b as usize].sums = vec![4];
        let run = |start, pages, first| Run { start, pages, file: a, first };
        let (yes, no) = (true, false);
        let first = Expected { address: 0x9000, confirmed: 3, held_back: no };
        let second = Expected { address: 0x1000, confirmed: 0, held_back: yes };
        let sets = vec![
            WorkingSet { kind: "tcp 8080".into(), turn: 9, pages: vec![first, second] },
            WorkingSet { kind: String::new(), turn: 0, pages: Vec::new() },
        ];
        map.processes.insert(2, ProcessPages { runs: vec![run(0x1000, 2, 0), run(0x9000, 1, 2)], sets });
        map.processes.insert(7, ProcessPages::default());
        map
    }

    // promise parking: where each page lies and its checksum are recorded; every flipped bit of
    //   that is found
    #[test]
    fn it_is_read_back_and_every_flipped_bit_is_found() {
        let dir = tempfile::tempdir().unwrap();
        map().save(dir.path()).unwrap();
        assert_eq!(PageMap::load(dir.path()).unwrap(), map());
        let good = fs::read(dir.path().join(PAGES)).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 4;
            assert_eq!(PageMap::decode(&bad), None, "byte {at}");
        }
        assert_eq!(PageMap::decode(&good[..good.len() - 8]), None, "cut short");
    }

    #[test]
    fn one_page_is_checked_without_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes: Vec<u8> = (0..3 * PAGE).map(|n| (n / 100) as u8).collect();
        let sums: Vec<u32> = bytes.chunks(PAGE).map(crc32fast::hash).collect();
        let map =
            PageMap { files: vec![PageFile { name: "p".into(), sums, remote: None }], processes: BTreeMap::new() };
        bytes[PAGE + 5] ^= 1;
        fs::write(dir.path().join("p"), &bytes).unwrap();
        let run = |first, pages| Run { start: 0, pages, file: 0, first };
        map.verify(dir.path(), &[run(0, 1), run(2, 1)]).unwrap();
        assert!(matches!(map.verify(dir.path(), &[run(0, 3)]), Err(SnapshotError::Damaged { .. })));
        assert_eq!(map.files[0].first_damaged(0, &bytes), Some(1));
    }
}
