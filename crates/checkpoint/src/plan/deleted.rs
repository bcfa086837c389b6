//! Mappings of files whose last name is gone.
//!
//! One that a process has open is held, and mapped from its descriptor. One that is only mapped is
//! made again as a memory file, with what its image has.

use super::files::{Files, O_RDWR, Ref};
use super::memfd::{MemoryFile, Piece};
use super::memory_files::MOST_COPIED;
use super::{PlanError, unsupported};
use kip_criu_images::GhostFile;
use kip_criu_images::codes::remap;
use kip_criu_images::fields::{file_entry, reg_file_entry};

/// In the number of a memory file that is made of a deleted file.
const GHOST: u64 = 1 << 63;
/// Longest name of such a one, characters of up to 4 bytes: memfd_create(2) takes 249 bytes.
const MOST_OF_NAME: usize = 60;

impl Files<'_> {
    /// What is mapped from a file.
    pub(super) fn mapped(&mut self, id: u64, writable: bool) -> Result<Ref, PlanError> {
        let Some(&(remap::GHOST, number)) = self.remapped.get(&id) else { return self.open_path(id, writable) };
        let Some(open) = self.open_ghosts.get(&number) else { return self.mapped_ghost(id, number, writable) };
        // Held, its descriptor is what is mapped.
        for id in open.clone() {
            let reg = self.file(id)?.message(file_entry::REG)?.unwrap_or_default();
            let mode = reg.number(reg_file_entry::FLAGS) & 3;
            if mode == O_RDWR || mode == 0 && !writable {
                return self.open_file(id);
            }
        }
        unsupported(format!("{}, which is deleted, is mapped and open in another way", self.path_of(id)?))
    }

    /// A deleted file that no process has open: its mappings get a memory file with what it has.
    fn mapped_ghost(&mut self, id: u64, number: u64, writable: bool) -> Result<Ref, PlanError> {
        let made = match self.ghosts.get(&number) {
            Some(made) => made.clone(),
            None => self.memory_of_ghost(id, number)?,
        };
        self.note_copied(&made)?;
        self.ghosts.insert(number, made.clone());
        Ok(self.receive_memory(id, made, writable))
    }

    /// What the wake makes that memory file with.
    fn memory_of_ghost(&self, id: u64, number: u64) -> Result<MemoryFile, PlanError> {
        let path = self.path_of(id)?;
        let ghost = self.images.ghost(number, MOST_COPIED)?;
        let Some(GhostFile { owner, mode, size, image, pieces }) = ghost else {
            return unsupported(format!("{path}, which is deleted and has more than 16 MiB, is mapped"));
        };
        let piece = |(position, offset, length)| Piece { pages: image.clone(), position, offset, length };
        let contents = pieces.into_iter().map(piece).collect();
        let name = path.rsplit('/').next().unwrap_or_default().chars().take(MOST_OF_NAME).collect();
        Ok(MemoryFile { inode: GHOST | number, name, size, mode, owner, seals: 0, contents, is_program: false })
    }
}
