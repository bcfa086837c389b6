//! Mappings of a process: what each range of addresses is of.

use super::files::Files;
use crate::codes::status;
use crate::fields::{mm_entry, pagemap_entry, vma_entry};
use crate::images::Images;
use crate::pagemap::{PRESENT, pages_of};
use crate::wire::{Malformed, Message};
use std::ops::Range;

/// Bytes of a page.
const PAGE: u64 = 4096;
/// CRIU's for System V memory.
const SYSTEM_V: u64 = 1 << 10;
const MAP_SHARED: u64 = 1;

/// What a mapping is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MappingKind {
    /// Private memory: where no page of it lies, it is zeros.
    Private {
        /// `[heap]`, `[stack]` or `[anonymous]`.
        name: String,
    },
    /// Memory shared with others, and how much of it the images have.
    Shared {
        /// `[shared]`, or the name of a memory file.
        name: String,
        /// Bytes; none where there are no images.
        stored: Option<u64>,
    },
    /// A file: where no page of it lies, it is as the file has it.
    File {
        /// Its path as the program sees it.
        path: String,
    },
    /// The kernel's own.
    Kernel {
        /// `[vdso]` and the like.
        name: String,
    },
}

/// A mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedRange {
    /// Addresses.
    pub range: Range<u64>,
    /// PROT_READ, PROT_WRITE and PROT_EXEC.
    pub protection: u64,
    /// MAP_SHARED.
    pub shared: bool,
    /// Where in the file it begins.
    pub offset: u64,
    /// What it is of.
    pub kind: MappingKind,
}

/// The mappings of a process.
pub(super) fn mappings(images: &Images, files: &Files, mm: &Message) -> Result<Vec<MappedRange>, Malformed> {
    let heap = mm.number(mm_entry::MM_START_BRK)..mm.number(mm_entry::MM_BRK);
    let stack = mm.number(mm_entry::MM_START_STACK);
    let mut found = Vec::new();
    for vma in mm.messages(mm_entry::VMAS)? {
        let range = vma.number(vma_entry::START)..vma.number(vma_entry::END);
        let (state, id) = (vma.number(vma_entry::STATUS), vma.number(vma_entry::SHMID));
        if state & status::GUARD != 0 {
            continue;
        }
        let shared = vma.number(vma_entry::FLAGS) & MAP_SHARED != 0;
        let kernel = |name: &str| MappingKind::Kernel { name: name.to_owned() };
        let private = |name: &str| MappingKind::Private { name: name.to_owned() };
        let kind = if state & status::VSYSCALL != 0 {
            kernel("[vsyscall]")
        } else if state & status::VDSO != 0 {
            kernel("[vdso]")
        } else if state & status::VVAR != 0 {
            kernel("[vvar]")
        } else if state & (status::ANON_SHARED | status::MEMFD | SYSTEM_V) != 0 {
            let (name, contents) = match state & status::MEMFD != 0 {
                true => files.memory_file(id),
                false => (String::new(), id),
            };
            // CRIU finds memory without a name as a memory file of this one.
            let nameless = name.is_empty() || name == "/dev/zero";
            let name = if nameless { "[shared]".to_owned() } else { format!("/memfd:{name}") };
            MappingKind::Shared { name, stored: Some(stored(images, contents, &vma)?) }
        } else if state & (status::FILE_PRIVATE | status::FILE_SHARED) != 0 {
            let path = files.path_of(id);
            MappingKind::File { path: if files.is_nameless(id) { format!("{path} (deleted)") } else { path } }
        } else if state & status::STACK != 0 || range.contains(&stack) {
            private("[stack]")
        } else if state & status::HEAP != 0 || range.start < heap.end && heap.start < range.end {
            private("[heap]")
        } else {
            private("[anonymous]")
        };
        let (protection, offset) = (vma.number(vma_entry::PROT), vma.number(vma_entry::PGOFF));
        found.push(MappedRange { range, protection, shared, offset, kind });
    }
    Ok(found)
}

/// How much of a shared mapping the images have: their addresses are offsets from its memory's
/// start.
fn stored(images: &Images, contents: u64, vma: &Message) -> Result<u64, Malformed> {
    let name = format!("pagemap-shmem-{contents}.img");
    let from = vma.number(vma_entry::PGOFF);
    let length = vma.number(vma_entry::END).saturating_sub(vma.number(vma_entry::START));
    let part = from..from.saturating_add(length);
    let entries = images.entries_if_any(&name).map_err(|_| Malformed { at: 0 })?;
    let mut bytes = 0;
    for entry in entries.iter().skip(1).filter(|entry| entry.number(pagemap_entry::FLAGS) & PRESENT != 0) {
        let start = entry.number(pagemap_entry::VADDR);
        let end = start.saturating_add(pages_of(entry).saturating_mul(PAGE));
        bytes += end.min(part.end).saturating_sub(start.max(part.start));
    }
    Ok(bytes)
}
