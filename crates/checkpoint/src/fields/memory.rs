//! Messages about memory: mappings, and where the contents of pages are.

/// `mm_entry` of mm.proto.
pub(crate) mod mm_entry {
    pub(crate) const MM_START_CODE: u32 = 1;
    pub(crate) const MM_END_CODE: u32 = 2;
    pub(crate) const MM_START_DATA: u32 = 3;
    pub(crate) const MM_END_DATA: u32 = 4;
    pub(crate) const MM_START_STACK: u32 = 5;
    pub(crate) const MM_START_BRK: u32 = 6;
    pub(crate) const MM_BRK: u32 = 7;
    pub(crate) const MM_ARG_START: u32 = 8;
    pub(crate) const MM_ARG_END: u32 = 9;
    pub(crate) const MM_ENV_START: u32 = 10;
    pub(crate) const MM_ENV_END: u32 = 11;
    /// The id of the program's file.
    pub(crate) const EXE_FILE_ID: u32 = 12;
    pub(crate) const MM_SAVED_AUXV: u32 = 13;
    pub(crate) const VMAS: u32 = 14;
    pub(crate) const DUMPABLE: u32 = 15;
    /// Rings of io_setup(2).
    pub(crate) const AIOS: u32 = 16;
    pub(crate) const THP_DISABLED: u32 = 17;
}

/// `pagemap_head` of pagemap.proto.
pub(crate) mod pagemap_head {
    /// The number of the image with the contents, `pages-NUMBER.img`.
    pub(crate) const PAGES_ID: u32 = 1;
}

/// `pagemap_entry` of pagemap.proto.
pub(crate) mod pagemap_entry {
    pub(crate) const VADDR: u32 = 1;
    /// How many pages, if `NR_PAGES` is absent or 0.
    pub(crate) const COMPAT_NR_PAGES: u32 = 2;
    pub(crate) const IN_PARENT: u32 = 3;
    /// See [`crate::pages`].
    pub(crate) const FLAGS: u32 = 4;
    pub(crate) const NR_PAGES: u32 = 5;
}

/// `vma_entry` of vma.proto.
pub(crate) mod vma_entry {
    pub(crate) const START: u32 = 1;
    pub(crate) const END: u32 = 2;
    /// Where the mapping begins in its file or memory, bytes.
    pub(crate) const PGOFF: u32 = 3;
    /// The number of the shared memory, or the id of the file.
    pub(crate) const SHMID: u32 = 4;
    pub(crate) const PROT: u32 = 5;
    pub(crate) const FLAGS: u32 = 6;
    /// See [`crate::codes::status`].
    pub(crate) const STATUS: u32 = 7;
    /// MADV_* of madvise(2) as bits.
    pub(crate) const MADV: u32 = 9;
    /// Flags of open(2) that the mapped file was opened with.
    pub(crate) const FDFLAGS: u32 = 10;
}
