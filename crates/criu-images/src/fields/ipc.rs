//! Messages about System V IPC, sysvipc(7).

/// `ipc_desc_entry` of ipc-desc.proto.
pub mod ipc_desc_entry {
    pub const KEY: u32 = 1;
    /// The owner, as numbered inside.
    pub const UID: u32 = 2;
    pub const GID: u32 = 3;
    /// The creator.
    pub const CUID: u32 = 4;
    pub const CGID: u32 = 5;
    /// Permissions, with SHM_DEST and SHM_LOCKED of shmctl(2).
    pub const MODE: u32 = 6;
    pub const ID: u32 = 7;
}

/// `ipc_shm_entry` of ipc-shm.proto.
pub mod ipc_shm_entry {
    pub const DESC: u32 = 1;
    /// Bytes.
    pub const SIZE: u32 = 2;
    /// The contents are in `pagemap-shmem-ID.img`; else they follow.
    pub const IN_PAGEMAPS: u32 = 3;
    /// Flags of shmget(2), if it is of huge pages.
    pub const HUGETLB_FLAG: u32 = 4;
}

/// `ipc_sem_entry` of ipc-sem.proto; the values follow, 16 bits each, up to a multiple of 8 bytes.
pub mod ipc_sem_entry {
    pub const DESC: u32 = 1;
    /// How many.
    pub const NSEMS: u32 = 2;
}

/// `ipc_msg_entry` of ipc-msg.proto; so many [`super::ipc_msg`] follow.
pub mod ipc_msg_entry {
    pub const DESC: u32 = 1;
    /// Bytes that the queue may have.
    pub const QBYTES: u32 = 2;
    /// Messages that it has.
    pub const QNUM: u32 = 3;
}

/// `ipc_msg` of ipc-msg.proto; its text follows, up to a multiple of 8 bytes.
pub mod ipc_msg {
    pub const MTYPE: u32 = 1;
    /// Bytes.
    pub const MSIZE: u32 = 2;
}

/// `ipc_var_entry` of ipc-var.proto: files of /proc/sys, which belong to the IPC namespace.
pub mod ipc_var_entry {
    /// Four numbers.
    pub const SEM_CTLS: u32 = 1;
    pub const MSG_CTLMAX: u32 = 2;
    pub const MSG_CTLMNB: u32 = 3;
    pub const MSG_CTLMNI: u32 = 4;
    pub const SHM_CTLMAX: u32 = 6;
    pub const SHM_CTLALL: u32 = 7;
    pub const SHM_CTLMNI: u32 = 8;
    pub const SHM_RMID_FORCED: u32 = 9;
}
