//! Memory files that are made again from the images: those that a program runs from or has mapped
//! for itself alone, and those that take the place of deleted files that are only mapped (a
//! semaphore of sem_open(3), a library that was replaced).
//!
//! Owns what such a file has: name, size, mode, owner, seals and contents (memfd_create(2)). One
//! that is open and not sealed is made empty: the restorer fills it.

use super::PlanError;
use kip_criu_images::Images;
use kip_criu_images::fields::pagemap_head;
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, fchmod, fchown, fcntl_add_seals, fcntl_setfl, ftruncate,
    memfd_create, open, seek,
};
use rustix::process::{Gid, Uid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A memory file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFile {
    /// Its number in the images.
    #[serde(default)]
    pub inode: u64,
    /// Its name, as /proc/PID/maps has it behind `/memfd:`.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Permissions.
    pub mode: u32,
    /// User and group, as numbered inside.
    pub owner: (u32, u32),
    /// `F_SEAL_*` of fcntl(2).
    pub seals: u32,
    /// Where its contents are in the images' files of pages; none of one that the restorer fills.
    pub contents: Vec<Piece>,
    /// A process runs from it.
    #[serde(default)]
    pub is_program: bool,
}

/// Contents that follow each other; what no piece has is a hole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// File of the images' directory.
    pub pages: String,
    /// Where it begins in that, bytes.
    pub position: u64,
    /// Where it begins in the memory file, bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl MemoryFile {
    /// Makes it. `first_id` is the number that user and group 0 inside have outside.
    fn make(&self, images: &Path, first_id: u32) -> io::Result<Made> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(self.name.as_str(), flags)?);
        ftruncate(&file, self.size)?;
        let mut buffer = vec![0; 1 << 20];
        for piece in &self.contents {
            let pages = File::open(images.join(&piece.pages))?;
            let mut done = 0;
            while done < piece.length {
                let part = &mut buffer[..(piece.length - done).min(1 << 20) as usize];
                pages.read_exact_at(part, piece.position + done)?;
                // The last page may reach beyond the end of the file.
                let there = (self.size.saturating_sub(piece.offset + done)).min(part.len() as u64) as usize;
                file.write_all_at(&part[..there], piece.offset + done)?;
                done += part.len() as u64;
            }
        }
        let outside = |id: u32| first_id.checked_add(id).ok_or(io::ErrorKind::InvalidData);
        let (user, group) = (Uid::from_raw(outside(self.owner.0)?), Gid::from_raw(outside(self.owner.1)?));
        fchown(&file, Some(user), Some(group))?;
        // A file that is sealed against being a program keeps its mode, and would be sealed against
        // all else were it one now.
        fchmod(&file, Mode::from_raw_mode(self.mode & 0o7777))?;
        fcntl_add_seals(&file, SealFlags::from_bits_retain(self.seals))?;
        let readable =
            open(format!("/proc/self/fd/{}", file.as_raw_fd()), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Made { writable: Some(file.into()), readable })
    }
}

/// How a program has a memory file open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The id of the open file in the images.
    pub id: u64,
    /// Flags of open(2).
    pub flags: u32,
    /// Its position, bytes.
    pub position: u64,
}

impl Opened {
    /// Whether it can be written to.
    pub(super) fn is_writable(self) -> bool {
        OFlags::from_bits_retain(self.flags) & OFlags::ACCMODE != OFlags::RDONLY
    }
}

/// A memory file that has been made.
#[derive(Debug)]
struct Made {
    /// The open file that it was made as: the kernel does not count that as open for writing, and
    /// no other that can be written to may be there while it is a program (`ETXTBSY` of execve(2)).
    writable: Option<OwnedFd>,
    readable: OwnedFd,
}

/// The memory files of a tree that is rebuilt, each made once.
#[derive(Debug, Default)]
pub struct MemoryFiles(BTreeMap<u64, Made>);

impl MemoryFiles {
    fn made(&mut self, memory: &MemoryFile, images: &Path, first_id: u32) -> io::Result<&mut Made> {
        Ok(match self.0.entry(memory.inode) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(place) => place.insert(memory.make(images, first_id)?),
        })
    }

    /// One, open for reading only.
    ///
    /// # Errors
    /// The images cannot be read, or there is no memory.
    pub fn readable(&mut self, memory: &MemoryFile, images: &Path, first_id: u32) -> io::Result<OwnedFd> {
        self.made(memory, images, first_id)?.readable.try_clone()
    }

    /// One, as the program had it open. Once to be written to, if a process runs from it.
    ///
    /// # Errors
    /// As [`MemoryFiles::readable`].
    pub fn opened(&mut self, memory: &MemoryFile, opened: Opened, images: &Path, first_id: u32) -> io::Result<OwnedFd> {
        let made = self.made(memory, images, first_id)?;
        let flags = OFlags::from_bits_retain(opened.flags);
        let file = if opened.is_writable() && memory.is_program {
            made.writable.take().ok_or(io::ErrorKind::ResourceBusy)?
        } else {
            let path = format!("/proc/self/fd/{}", made.readable.as_raw_fd());
            open(path, flags & OFlags::ACCMODE | OFlags::CLOEXEC, Mode::empty())?
        };
        fcntl_setfl(&file, flags & (OFlags::APPEND | OFlags::NONBLOCK | OFlags::NOATIME))?;
        seek(&file, SeekFrom::Start(opened.position))?;
        Ok(file)
    }
}

/// The pieces of `pagemap-shmem-ID.img`.
pub(super) fn contents(images: &Images, id: u64) -> Result<Vec<Piece>, PlanError> {
    let entries = images.entries_if_any(&format!("pagemap-shmem-{id}.img"))?;
    let Some(head) = entries.first() else { return Ok(Vec::new()) };
    let pages = format!("pages-{}.img", head.number(pagemap_head::PAGES_ID));
    let runs = super::memory::runs(&entries[1..])?;
    let piece = |(position, offset, length)| Piece { pages: pages.clone(), position, offset, length };
    Ok(runs.into_iter().map(piece).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_memory_file_is_made_with_what_it_had() {
        let images = tempfile::tempdir().unwrap();
        let written: Vec<u8> = (0..3 * 4096u32).map(|n| (n % 251) as u8).collect();
        std::fs::write(images.path().join("pages-1.img"), &written).unwrap();
        let piece = |position, offset, length| Piece { pages: "pages-1.img".into(), position, offset, length };
        let memory = MemoryFile {
            inode: 7,
            name: "program".into(),
            size: 6 * 4096 - 100,
            mode: 0o100_751,
            owner: (3, 4),
            seals: SealFlags::SHRINK.bits(),
            // A hole between them, and the last page is not whole.
            contents: vec![piece(0, 4096, 4096), piece(4096, 4 * 4096, 8192)],
            is_program: true,
        };
        let mut files = MemoryFiles::default();
        let made = File::from(files.readable(&memory, images.path(), 1000).unwrap());
        let meta = made.metadata().unwrap();
        assert_eq!((meta.size(), meta.mode() & 0o7777, meta.uid(), meta.gid()), (memory.size, 0o751, 1003, 1004));
        assert_eq!(rustix::fs::fcntl_get_seals(&made).unwrap(), SealFlags::SHRINK);
        let mut read = vec![1; memory.size as usize];
        made.read_exact_at(&mut read, 0).unwrap();
        assert!(read[..4096].iter().chain(&read[8192..4 * 4096]).all(|byte| *byte == 0));
        assert_eq!((&read[4096..8192], &read[4 * 4096..]), (&written[..4096], &written[4096..3 * 4096 - 100]));
        assert!(made.write_at(b"x", 0).is_err(), "it is open for reading only");
        let link = std::fs::read_link(format!("/proc/self/fd/{}", made.as_raw_fd())).unwrap();
        assert_eq!(link.to_str(), Some("/memfd:program (deleted)"));
        // And as a program has it open.
        let mut open = |flags: OFlags| {
            let opened = Opened { id: 3, flags: flags.bits(), position: 4100 };
            files.opened(&memory, opened, images.path(), 1000).map(File::from)
        };
        let (reads, writes) = (open(OFlags::RDONLY).unwrap(), open(OFlags::RDWR | OFlags::APPEND).unwrap());
        assert!(open(OFlags::RDWR).is_err(), "another one would not let it be a program");
        for file in [&reads, &writes] {
            assert_eq!(rustix::fs::tell(file).unwrap(), 4100);
            assert_eq!(file.metadata().unwrap().ino(), made.metadata().unwrap().ino());
        }
        writes.write_at(b"x", 0).unwrap();
        assert!(rustix::fs::fcntl_getfl(&writes).unwrap().contains(OFlags::RDWR | OFlags::APPEND));
    }
}
