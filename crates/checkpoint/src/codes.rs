//! Values of fields of CRIU's images: kinds of descriptors, states of processes, bits of mappings.
//! [`crate::fields`] has the fields.

/// `fd_types` of CRIU's images.
pub(crate) mod kind {
    pub(crate) const REG: u64 = 1;
    pub(crate) const PIPE: u64 = 2;
    pub(crate) const FIFO: u64 = 3;
    pub(crate) const INETSK: u64 = 4;
    pub(crate) const UNIXSK: u64 = 5;
    pub(crate) const EVENTFD: u64 = 6;
    pub(crate) const EVENTPOLL: u64 = 7;
    pub(crate) const INOTIFY: u64 = 8;
    pub(crate) const SIGNALFD: u64 = 9;
    pub(crate) const PACKETSK: u64 = 10;
    pub(crate) const TTY: u64 = 11;
    pub(crate) const NETLINKSK: u64 = 13;
    pub(crate) const TIMERFD: u64 = 17;
    pub(crate) const MEMFD: u64 = 18;
    pub(crate) const PIDFD: u64 = 20;
}

/// `task_state` of CRIU's images: TASK_*.
pub(crate) mod state {
    /// The process is neither dead nor stopped.
    pub(crate) const ALIVE: u64 = 1;
    /// The process is a zombie.
    pub(crate) const DEAD: u64 = 2;
    /// A signal has stopped the process, signal(7).
    pub(crate) const STOPPED: u64 = 3;
}

/// `seccomp_mode` of CRIU's images, and a flag of filters, seccomp(2).
pub(crate) mod seccomp {
    pub(crate) const DISABLED: u64 = 0;
    pub(crate) const FILTER: u64 = 2;
    /// All threads of the process have the filter: SECCOMP_FILTER_FLAG_TSYNC.
    pub(crate) const TSYNC: u64 = 1;
}

/// `remap_type` of CRIU's images: how CRIU keeps a file that its path does not lead to any more.
pub(crate) mod remap {
    /// The contents of a deleted file are in an image.
    pub(crate) const GHOST: u64 = 1;
    /// The file is one of a process that has ended, in proc(5).
    pub(crate) const PROCFS: u64 = 2;
}

/// VMA_AREA_* of CRIU's images.
pub(crate) mod status {
    pub(crate) const REGULAR: u64 = 1;
    pub(crate) const STACK: u64 = 1 << 1;
    pub(crate) const VSYSCALL: u64 = 1 << 2;
    pub(crate) const VDSO: u64 = 1 << 3;
    pub(crate) const HEAP: u64 = 1 << 5;
    pub(crate) const FILE_PRIVATE: u64 = 1 << 6;
    pub(crate) const FILE_SHARED: u64 = 1 << 7;
    pub(crate) const ANON_SHARED: u64 = 1 << 8;
    pub(crate) const ANON_PRIVATE: u64 = 1 << 9;
    pub(crate) const VVAR: u64 = 1 << 12;
    pub(crate) const MEMFD: u64 = 1 << 14;
    /// Not a mapping but guards (MADV_GUARD_INSTALL) in others.
    pub(crate) const GUARD: u64 = 1 << 16;
    pub(crate) const KNOWN: u64 = REGULAR
        | STACK
        | VSYSCALL
        | VDSO
        | HEAP
        | FILE_PRIVATE
        | FILE_SHARED
        | ANON_SHARED
        | ANON_PRIVATE
        | VVAR
        | MEMFD
        | GUARD;
}
