//! Memory files in a plan: which are made again, which of those the restorer fills, and what is
//! mapped from them.

use super::files::{Files, Key, O_RDWR, Ref};
use super::memfd::{self, MemoryFile, Opened};
use super::{PlanError, Received, unsupported};
use kip_criu_images::Message;
use kip_criu_images::codes::kind;
use kip_criu_images::fields::{file_entry, fown_entry, memfd_file_entry, memfd_inode_entry};

/// Most of what the daemon copies into memory files that are no programs, bytes: that is not the
/// program's own memory, and CRIU has the disk keep it.
pub(super) const MOST_COPIED: u64 = 16 << 20;
/// `F_SEAL_WRITE` and `F_SEAL_FUTURE_WRITE` of fcntl(2).
const SEALS_CONTENTS: u32 = 8 | 16;
/// Of a memory file.
const BOTH_WAYS: &str = "a memory file that is mapped both shared and private";

/// A memory file that the restorer fills.
#[derive(Debug)]
pub(super) struct OpenMemory {
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// CRIU's number for what it contains.
    pub contents: u64,
    /// To be written to.
    pub file: Ref,
}

impl Files<'_> {
    /// A memory file that is only mapped, and shared: CRIU's number for its contents, and its size.
    pub(super) fn shared_memory_file(&mut self, id: u64) -> Result<(u64, u64), PlanError> {
        let (inode, memory) = self.memory_file(id)?;
        let found = (memory.number(memfd_inode_entry::SHMID), memory.number(memfd_inode_entry::SIZE));
        if self.places.contains_key(&Key::Memory(inode)) || self.programs.contains(&inode) {
            return unsupported(BOTH_WAYS);
        }
        if self.in_flight {
            return unsupported("a memory file, and a descriptor that is on its way between sockets");
        }
        self.shared.insert(inode);
        Ok(found)
    }

    /// The memory files that processes have open and the restorer fills: a file that is sealed
    /// against changes is filled before.
    pub(super) fn open_memory(&mut self) -> Result<Vec<OpenMemory>, PlanError> {
        let mut all = Vec::new();
        let ids: Vec<u64> = self
            .by_id
            .values()
            .filter(|f| f.number(file_entry::TYPE) == kind::MEMFD)
            .map(|f| f.number(file_entry::ID))
            .collect();
        for id in ids {
            let Some(inode) = self.filled_inside(id)? else { continue };
            if self.places.contains_key(&Key::Memory(inode)) {
                continue;
            }
            let made = self.made_memory_file(id)?;
            let contents = self.memory_file(id)?.1.number(memfd_inode_entry::SHMID);
            let size = made.size;
            let file = self.receive_memory(id, made, true);
            // An empty one has nothing to fill.
            if size > 0 {
                all.push(OpenMemory { inode, size, contents, file });
            }
        }
        Ok(all)
    }

    /// The inode of a memory file that the restorer fills; none for others.
    pub(super) fn filled_inside(&self, id: u64) -> Result<Option<u64>, PlanError> {
        let (inode, memory) = self.memory_file(id)?;
        let sealed = memory.number(memfd_inode_entry::SEALS) as u32 & SEALS_CONTENTS != 0;
        Ok((self.open_memory.contains(&inode) && !sealed).then_some(inode))
    }

    /// Whether a memory file is made again, not what CRIU makes of anonymous shared memory.
    pub(super) fn is_made(&self, id: u64) -> Result<bool, PlanError> {
        Ok(self.open_memory.contains(&self.memory_file(id)?.0))
    }

    /// What is mapped from a memory file, to be written to or not.
    pub(super) fn mapped_memory_file(&mut self, id: u64, writable: bool) -> Result<Ref, PlanError> {
        if !self.is_made(id)? {
            return self.own_memory_file(id);
        }
        // The kernel allows it only if the mapping was there before the seal.
        if writable && self.filled_inside(id)?.is_none() {
            return unsupported("a sealed memory file that is mapped to be written to");
        }
        let made = self.made_memory_file(id)?;
        Ok(self.receive_memory(id, made, writable))
    }

    /// The descriptor from which a memory file is mapped that `id` is an open file of.
    pub(super) fn receive_memory(&mut self, id: u64, made: MemoryFile, writable: bool) -> Ref {
        if !writable {
            return self.receive(Key::ReadOnlyMemory(made.inode), Received::Memory(made));
        }
        let opened = Opened { id, flags: O_RDWR as u32, position: 0 };
        self.receive(Key::Memory(made.inode), Received::OpenMemory(made, opened))
    }

    /// A memory file that a process runs from, or has mapped for itself alone.
    pub(super) fn own_memory_file(&mut self, id: u64) -> Result<Ref, PlanError> {
        let made = self.made_memory_file(id)?;
        if self.shared.contains(&made.inode) {
            return unsupported(BOTH_WAYS);
        }
        Ok(self.receive(Key::Memory(made.inode), Received::Memory(made)))
    }

    /// What the wake makes it with.
    pub(super) fn made_memory_file(&mut self, id: u64) -> Result<MemoryFile, PlanError> {
        let made = self.describe_memory_file(id)?;
        if !made.is_program {
            self.note_copied(&made)?;
        }
        Ok(made)
    }

    /// Notes a file that the daemon makes with what it had.
    pub(super) fn note_copied(&mut self, made: &MemoryFile) -> Result<(), PlanError> {
        if self.in_flight {
            return unsupported("a memory file or a deleted one, and a descriptor that is on its way between sockets");
        }
        self.copied.insert(made.inode, made.contents.iter().map(|piece| piece.length).sum());
        if self.copied.values().sum::<u64>() > MOST_COPIED {
            return unsupported("sealed memory files or deleted files of more than 16 MiB that are mapped");
        }
        Ok(())
    }

    fn describe_memory_file(&self, id: u64) -> Result<MemoryFile, PlanError> {
        let (inode, memory) = self.memory_file(id)?;
        Ok(MemoryFile {
            inode,
            name: memory.string(memfd_inode_entry::NAME).unwrap_or_default(),
            size: memory.number(memfd_inode_entry::SIZE),
            mode: memory.number(memfd_inode_entry::MODE) as u32,
            owner: (memory.number(memfd_inode_entry::UID) as u32, memory.number(memfd_inode_entry::GID) as u32),
            seals: memory.number(memfd_inode_entry::SEALS) as u32,
            contents: match self.filled_inside(id)? {
                Some(_) => Vec::new(),
                None => memfd::contents(self.images, memory.number(memfd_inode_entry::SHMID))?,
            },
            is_program: self.programs.contains(&inode),
        })
    }

    /// How one is open, and its inode.
    pub(super) fn opened_memory(&self, file: &Message) -> Result<(u64, Opened), PlanError> {
        let id = file.number(file_entry::ID);
        let (inode, _) = self.memory_file(id)?;
        let open = file.message(file_entry::MEMFD)?.unwrap_or_default();
        let has_owner = open.message(memfd_file_entry::FOWN)?.unwrap_or_default().number(fown_entry::PID) != 0;
        if has_owner {
            return unsupported("how a memory file is open");
        }
        let (flags, position) = (open.number(memfd_file_entry::FLAGS) as u32, open.number(memfd_file_entry::POS));
        Ok((inode, Opened { id, flags, position }))
    }

    /// The inode of a memory file, and what images have of it.
    fn memory_file(&self, id: u64) -> Result<(u64, &Message), PlanError> {
        let inode = self.file(id)?.message(file_entry::MEMFD)?.map_or(0, |f| f.number(memfd_file_entry::INODE_ID));
        match self.memory.get(&inode) {
            Some(memory) if memory.number(memfd_inode_entry::HUGETLB_FLAG) == 0 => Ok((inode, memory)),
            _ => unsupported("a memory file of huge pages"),
        }
    }
}
