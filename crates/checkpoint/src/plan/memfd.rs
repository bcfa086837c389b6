//! Memory files that are made again from the images: those that a program runs from or has mapped for itself alone.
//!
//! Owns what such a file has: name, size, mode, owner, seals and contents (memfd_create(2)). A tree that has one of
//! them open by a descriptor, or shares one that is made here, gets no plan.

use super::PlanError;
use kip_criu_images::Images;
use kip_criu_images::fields::pagemap_head;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fchmod, fchown, fcntl_add_seals, ftruncate, memfd_create, open};
use rustix::process::{Gid, Uid};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A memory file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFile {
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
    /// Where its contents are in the images' files of pages.
    pub contents: Vec<Piece>,
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
    /// Makes it, open for reading only: a file that is open for writing cannot be a program (`ETXTBSY` of execve(2)). `first_id` is
    /// the number that user and group 0 inside have outside.
    ///
    /// # Errors
    /// The images cannot be read, or there is no memory.
    pub fn make(&self, images: &Path, first_id: u32) -> io::Result<OwnedFd> {
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
        fcntl_add_seals(&file, SealFlags::from_bits_retain(self.seals))?;
        let readable =
            open(format!("/proc/self/fd/{}", file.as_raw_fd()), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let outside = |id: u32| first_id.checked_add(id).ok_or(io::ErrorKind::InvalidData);
        let (user, group) = (Uid::from_raw(outside(self.owner.0)?), Gid::from_raw(outside(self.owner.1)?));
        fchown(&readable, Some(user), Some(group))?;
        fchmod(&readable, Mode::from_raw_mode(self.mode & 0o7777))?;
        Ok(readable)
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
            name: "program".into(),
            size: 6 * 4096 - 100,
            mode: 0o100_751,
            owner: (3, 4),
            seals: SealFlags::SHRINK.bits(),
            // A hole between them, and the last page is not whole.
            contents: vec![piece(0, 4096, 4096), piece(4096, 4 * 4096, 8192)],
        };
        let made = File::from(memory.make(images.path(), 1000).unwrap());
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
    }
}
