//! Messages about memory: mappings, and where the contents of pages are.

/// `mm_entry` of mm.proto.
pub mod mm_entry {
    pub const MM_START_CODE: u32 = 1;
    pub const MM_END_CODE: u32 = 2;
    pub const MM_START_DATA: u32 = 3;
    pub const MM_END_DATA: u32 = 4;
    pub const MM_START_STACK: u32 = 5;
    pub const MM_START_BRK: u32 = 6;
    pub const MM_BRK: u32 = 7;
    pub const MM_ARG_START: u32 = 8;
    pub const MM_ARG_END: u32 = 9;
    pub const MM_ENV_START: u32 = 10;
    pub const MM_ENV_END: u32 = 11;
    /// The id of the program's file.
    pub const EXE_FILE_ID: u32 = 12;
    pub const MM_SAVED_AUXV: u32 = 13;
    pub const VMAS: u32 = 14;
    pub const DUMPABLE: u32 = 15;
    /// Rings of io_setup(2).
    pub const AIOS: u32 = 16;
    pub const THP_DISABLED: u32 = 17;
}

/// `aio_ring_entry` of mm.proto.
pub mod aio_ring_entry {
    /// Its address.
    pub const ID: u32 = 1;
    /// Requests, as io_setup(2) takes it for a ring of that size.
    pub const NR_REQ: u32 = 2;
}

/// `pagemap_head` of pagemap.proto.
pub mod pagemap_head {
    /// The number of the image with the contents, `pages-NUMBER.img`.
    pub const PAGES_ID: u32 = 1;
}

/// `pagemap_entry` of pagemap.proto.
pub mod pagemap_entry {
    pub const VADDR: u32 = 1;
    /// How many pages, if `NR_PAGES` is absent or 0.
    pub const COMPAT_NR_PAGES: u32 = 2;
    pub const IN_PARENT: u32 = 3;
    /// See [`crate::pagemap`].
    pub const FLAGS: u32 = 4;
    pub const NR_PAGES: u32 = 5;
}

/// `vma_entry` of vma.proto.
pub mod vma_entry {
    pub const START: u32 = 1;
    pub const END: u32 = 2;
    /// Where the mapping begins in its file or memory, bytes.
    pub const PGOFF: u32 = 3;
    /// The number of the shared memory, or the id of the file.
    pub const SHMID: u32 = 4;
    pub const PROT: u32 = 5;
    pub const FLAGS: u32 = 6;
    /// See [`crate::codes::status`].
    pub const STATUS: u32 = 7;
    /// MADV_* of madvise(2) as bits.
    pub const MADV: u32 = 9;
    /// Flags of open(2) that the mapped file was opened with.
    pub const FDFLAGS: u32 = 10;
}
