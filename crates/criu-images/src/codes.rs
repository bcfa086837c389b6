//! Values of fields of CRIU's images: kinds of descriptors, states of processes, bits of mappings.
//! [`crate::fields`] has the fields.
#![allow(missing_docs, reason = "the names are CRIU's; a comment has what they do not say")]

/// `fd_types` of CRIU's images.
pub mod kind {
    pub const REG: u64 = 1;
    pub const PIPE: u64 = 2;
    pub const FIFO: u64 = 3;
    pub const INETSK: u64 = 4;
    pub const UNIXSK: u64 = 5;
    pub const EVENTFD: u64 = 6;
    pub const EVENTPOLL: u64 = 7;
    pub const INOTIFY: u64 = 8;
    pub const SIGNALFD: u64 = 9;
    pub const PACKETSK: u64 = 10;
    pub const TTY: u64 = 11;
    pub const NETLINKSK: u64 = 13;
    pub const TIMERFD: u64 = 17;
    pub const MEMFD: u64 = 18;
    pub const PIDFD: u64 = 20;
}

/// `task_state` of CRIU's images: TASK_*.
pub mod state {
    /// The process is neither dead nor stopped.
    pub const ALIVE: u64 = 1;
    /// The process is a zombie.
    pub const DEAD: u64 = 2;
    /// A signal has stopped the process, signal(7).
    pub const STOPPED: u64 = 3;
}

/// `seccomp_mode` of CRIU's images, and a flag of filters, seccomp(2).
pub mod seccomp {
    pub const DISABLED: u64 = 0;
    pub const FILTER: u64 = 2;
    /// All threads of the process have the filter: SECCOMP_FILTER_FLAG_TSYNC.
    pub const TSYNC: u64 = 1;
}

/// `remap_type` of CRIU's images: how CRIU keeps a file that its path does not lead to any more.
pub mod remap {
    /// The file has another name, and a hard link that CRIU made in the same directory.
    pub const LINKED: u64 = 0;
    /// The contents of a deleted file are in an image.
    pub const GHOST: u64 = 1;
    /// The file is one of a process that has ended, in proc(5).
    pub const PROCFS: u64 = 2;
}

/// VMA_AREA_* of CRIU's images.
pub mod status {
    pub const REGULAR: u64 = 1;
    pub const STACK: u64 = 1 << 1;
    pub const VSYSCALL: u64 = 1 << 2;
    pub const VDSO: u64 = 1 << 3;
    pub const HEAP: u64 = 1 << 5;
    pub const FILE_PRIVATE: u64 = 1 << 6;
    pub const FILE_SHARED: u64 = 1 << 7;
    pub const ANON_SHARED: u64 = 1 << 8;
    pub const ANON_PRIVATE: u64 = 1 << 9;
    /// Shared memory of shmat(2).
    pub const SYSVIPC: u64 = 1 << 10;
    pub const VVAR: u64 = 1 << 12;
    /// A ring of io_setup(2).
    pub const AIORING: u64 = 1 << 13;
    pub const MEMFD: u64 = 1 << 14;
    /// Not a mapping but guards (MADV_GUARD_INSTALL) in others.
    pub const GUARD: u64 = 1 << 16;
    pub const KNOWN: u64 = REGULAR
        | STACK
        | VSYSCALL
        | VDSO
        | HEAP
        | FILE_PRIVATE
        | FILE_SHARED
        | ANON_SHARED
        | ANON_PRIVATE
        | SYSVIPC
        | VVAR
        | AIORING
        | MEMFD
        | GUARD;
}
