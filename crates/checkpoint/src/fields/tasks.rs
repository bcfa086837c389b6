//! Messages about processes and threads, their user namespace, and how long they stood still.

/// `task_core_entry` of core.proto.
pub(crate) mod task_core_entry {
    /// See [`crate::codes::state`].
    pub(crate) const TASK_STATE: u32 = 1;
    /// As wait(2) tells it.
    pub(crate) const EXIT_CODE: u32 = 2;
    pub(crate) const PERSONALITY: u32 = 3;
    /// Signal N as bit N - 1. A thread that has a mask of its own goes by that.
    pub(crate) const BLK_SIGSET: u32 = 5;
    pub(crate) const COMM: u32 = 6;
    pub(crate) const TIMERS: u32 = 7;
    pub(crate) const RLIMITS: u32 = 8;
    /// Signals that wait for the process.
    pub(crate) const SIGNALS_S: u32 = 10;
    pub(crate) const OOM_SCORE_ADJ: u32 = 14;
    /// From signal 1 on, without SIGKILL and SIGSTOP.
    pub(crate) const SIGACTIONS: u32 = 15;
    pub(crate) const CHILD_SUBREAPER: u32 = 18;
    pub(crate) const MEMBARRIER_REGISTRATION_MASK: u32 = 22;
}

/// `task_kobj_ids_entry` of core.proto.
pub(crate) mod task_kobj_ids_entry {
    pub(crate) const VM_ID: u32 = 1;
    /// The number of the table of descriptors, which is in the name of its image.
    pub(crate) const FILES_ID: u32 = 2;
    pub(crate) const FS_ID: u32 = 3;
    pub(crate) const SIGHAND_ID: u32 = 4;
    pub(crate) const PID_NS_ID: u32 = 5;
    pub(crate) const NET_NS_ID: u32 = 6;
    pub(crate) const IPC_NS_ID: u32 = 7;
    pub(crate) const UTS_NS_ID: u32 = 8;
    pub(crate) const MNT_NS_ID: u32 = 9;
    pub(crate) const USER_NS_ID: u32 = 10;
    pub(crate) const CGROUP_NS_ID: u32 = 11;
    pub(crate) const TIME_NS_ID: u32 = 12;
}

/// `thread_sas_entry` of core.proto.
pub(crate) mod thread_sas_entry {
    pub(crate) const SS_SP: u32 = 1;
    pub(crate) const SS_SIZE: u32 = 2;
    pub(crate) const SS_FLAGS: u32 = 3;
}

/// `thread_core_entry` of core.proto.
pub mod thread_core_entry {
    /// The address of the list of robust futexes, set_robust_list(2).
    pub(crate) const FUTEX_RLA: u32 = 1;
    pub(crate) const FUTEX_RLA_LEN: u32 = 2;
    /// A sint32, which is stored folded: 0, -1, 1, -2 ..
    pub(crate) const SCHED_NICE: u32 = 3;
    /// SCHED_* of sched(7).
    pub(crate) const SCHED_POLICY: u32 = 4;
    pub(crate) const SCHED_PRIO: u32 = 5;
    /// Signal N as bit N - 1.
    pub(crate) const BLK_SIGSET: u32 = 6;
    /// The stack of signal handlers, sigaltstack(2).
    pub(crate) const SAS: u32 = 7;
    pub(crate) const PDEATH_SIG: u32 = 8;
    /// Signals that wait for the thread.
    pub(crate) const SIGNALS_P: u32 = 9;
    /// Credentials: [`super::creds_entry`].
    pub const CREDS: u32 = 10;
    /// The mode of seccomp(2): 0 is none, 2 is a filter.
    pub const SECCOMP_MODE: u32 = 11;
    /// Where the chain of the thread's filters begins, among all filters of the tree.
    pub const SECCOMP_FILTER: u32 = 12;
    pub(crate) const COMM: u32 = 13;
    pub(crate) const RSEQ_ENTRY: u32 = 15;
}

/// `task_rlimits_entry` of core.proto.
pub(crate) mod task_rlimits_entry {
    /// One for each RLIMIT_* of getrlimit(2), in the order of their numbers.
    pub(crate) const RLIMITS: u32 = 1;
}

/// `core_entry` of core.proto.
pub mod core_entry {
    /// The architecture: 1 is x86_64.
    pub(crate) const MTYPE: u32 = 1;
    /// Registers of x86_64: [`super::thread_info_x86`].
    pub const THREAD_INFO: u32 = 2;
    /// The process: [`super::task_core_entry`]. Only its first thread has it.
    pub(crate) const TC: u32 = 3;
    /// The thread: [`super::thread_core_entry`].
    pub const THREAD_CORE: u32 = 5;
}

/// `user_x86_regs_entry` of core-x86.proto.
pub(crate) mod user_x86_regs_entry {
    /// The first of those that `struct user_regs_struct` has; the others follow in its order.
    pub(crate) const R15: u32 = 1;
    pub(crate) const R10: u32 = 8;
    pub(crate) const R9: u32 = 9;
    pub(crate) const R8: u32 = 10;
    pub(crate) const AX: u32 = 11;
    pub(crate) const DX: u32 = 13;
    pub(crate) const SI: u32 = 14;
    pub(crate) const DI: u32 = 15;
    pub(crate) const ORIG_AX: u32 = 16;
    pub(crate) const IP: u32 = 17;
    pub(crate) const SP: u32 = 20;
    /// 1 for 64 bits, 2 for 32 bits.
    pub(crate) const MODE: u32 = 28;
}

/// `user_x86_cet_entry` of core-x86.proto.
pub(crate) mod user_x86_cet_entry {
    pub(crate) const CET: u32 = 1;
    /// The top of the shadow stack.
    pub(crate) const SSP: u32 = 2;
}

/// `user_x86_xsave_entry` of core-x86.proto.
pub(crate) mod user_x86_xsave_entry {
    /// The components that are in use, by their numbers as bits.
    pub(crate) const XSTATE_BV: u32 = 1;
    pub(crate) const YMMH_SPACE: u32 = 2;
    pub(crate) const BNDREG_STATE: u32 = 3;
    pub(crate) const BNDCSR_STATE: u32 = 4;
    pub(crate) const OPMASK_REG: u32 = 5;
    pub(crate) const ZMM_UPPER: u32 = 6;
    pub(crate) const HI16_ZMM: u32 = 7;
    pub(crate) const PKRU: u32 = 8;
    /// The shadow stack.
    pub(crate) const CET: u32 = 9;
}

/// `user_x86_fpregs_entry` of core-x86.proto.
pub mod user_x86_fpregs_entry {
    pub(crate) const CWD: u32 = 1;
    pub(crate) const SWD: u32 = 2;
    pub(crate) const TWD: u32 = 3;
    pub(crate) const FOP: u32 = 4;
    /// The address of the last instruction.
    pub(crate) const RIP: u32 = 5;
    /// The address of the last operand.
    pub(crate) const RDP: u32 = 6;
    pub(crate) const MXCSR: u32 = 7;
    pub(crate) const MXCSR_MASK: u32 = 8;
    pub(crate) const ST_SPACE: u32 = 9;
    pub(crate) const XMM_SPACE: u32 = 10;
    /// What only processors with XSAVE have: [`super::user_x86_xsave_entry`].
    pub const XSAVE: u32 = 13;
}

/// `user_desc_t` of core-x86.proto.
pub(crate) mod user_desc_t {
    pub(crate) const BASE_ADDR: u32 = 2;
    pub(crate) const SEG_NOT_PRESENT: u32 = 9;
}

/// `thread_info_x86` of core-x86.proto.
pub mod thread_info_x86 {
    pub(crate) const CLEAR_TID_ADDR: u32 = 1;
    /// General registers: [`super::user_x86_regs_entry`].
    pub(crate) const GPREGS: u32 = 2;
    /// All other registers: [`super::user_x86_fpregs_entry`].
    pub const FPREGS: u32 = 3;
    /// Segments of the descriptor table, set_thread_area(2).
    pub(crate) const TLS: u32 = 4;
}

/// `creds_entry` of creds.proto.
pub mod creds_entry {
    pub(crate) const UID: u32 = 1;
    pub(crate) const GID: u32 = 2;
    /// The effective user id, as numbered inside.
    pub const EUID: u32 = 3;
    pub(crate) const EGID: u32 = 4;
    pub(crate) const SUID: u32 = 5;
    pub(crate) const SGID: u32 = 6;
    pub(crate) const FSUID: u32 = 7;
    pub(crate) const FSGID: u32 = 8;
    /// Capabilities are 32 to a number, the lower ones first.
    pub(crate) const CAP_INH: u32 = 9;
    pub(crate) const CAP_PRM: u32 = 10;
    /// Effective capabilities, 32 to a number.
    pub const CAP_EFF: u32 = 11;
    pub(crate) const CAP_BND: u32 = 12;
    pub(crate) const SECBITS: u32 = 13;
    pub(crate) const GROUPS: u32 = 14;
    /// A profile of a security module.
    pub(crate) const LSM_PROFILE: u32 = 15;
    pub(crate) const LSM_SOCKCREATE: u32 = 16;
    pub(crate) const APPARMOR_DATA: u32 = 17;
    /// 1 if prctl(2) PR_SET_NO_NEW_PRIVS was called.
    pub const NO_NEW_PRIVS: u32 = 18;
    pub(crate) const CAP_AMB: u32 = 19;
}

/// `fs_entry` of fs.proto.
pub(crate) mod fs_entry {
    /// The id of the working directory among files.
    pub(crate) const CWD_ID: u32 = 1;
    /// The id of the root directory among files.
    pub(crate) const ROOT_ID: u32 = 2;
    pub(crate) const UMASK: u32 = 3;
}

/// `pstree_entry` of pstree.proto.
pub(crate) mod pstree_entry {
    pub(crate) const PID: u32 = 1;
    pub(crate) const PPID: u32 = 2;
    /// The process group.
    pub(crate) const PGID: u32 = 3;
    /// The session.
    pub(crate) const SID: u32 = 4;
    pub(crate) const THREADS: u32 = 5;
}

/// `rlimit_entry` of rlimit.proto.
pub(crate) mod rlimit_entry {
    pub(crate) const CUR: u32 = 1;
    pub(crate) const MAX: u32 = 2;
}

/// `rseq_entry` of rseq.proto.
pub(crate) mod rseq_entry {
    pub(crate) const RSEQ_ABI_POINTER: u32 = 1;
    pub(crate) const RSEQ_ABI_SIZE: u32 = 2;
    pub(crate) const SIGNATURE: u32 = 3;
    /// Not 0 in a restartable sequence.
    pub(crate) const RSEQ_CS_POINTER: u32 = 4;
}

/// `sa_entry` of sa.proto.
pub(crate) mod sa_entry {
    /// The address of the handler, SIG_DFL or SIG_IGN.
    pub(crate) const SIGACTION: u32 = 1;
    pub(crate) const FLAGS: u32 = 2;
    pub(crate) const RESTORER: u32 = 3;
    pub(crate) const MASK: u32 = 4;
    /// The handler is of 32 bits.
    pub(crate) const COMPAT_SIGACTION: u32 = 5;
}

/// `seccomp_filter` of seccomp.proto.
pub(crate) mod seccomp_filter {
    /// Instructions of classic BPF.
    pub(crate) const FILTER: u32 = 1;
    /// The place of the thread's next filter among all of the tree; none at the end of its chain.
    pub(crate) const PREV: u32 = 2;
    /// SECCOMP_FILTER_FLAG_* of seccomp(2).
    pub(crate) const FLAGS: u32 = 3;
}

/// `seccomp_entry` of seccomp.proto.
pub(crate) mod seccomp_entry {
    pub(crate) const SECCOMP_FILTERS: u32 = 1;
}

/// `siginfo_entry` of siginfo.proto.
pub(crate) mod siginfo_entry {
    /// A siginfo_t as the kernel has it.
    pub(crate) const SIGINFO: u32 = 1;
}

/// `signal_queue_entry` of siginfo.proto.
pub(crate) mod signal_queue_entry {
    pub(crate) const SIGNALS: u32 = 1;
}

/// `dump_stats_entry` of stats.proto.
pub(crate) mod dump_stats_entry {
    /// Microseconds.
    pub(crate) const FROZEN_TIME: u32 = 2;
}

/// `stats_entry` of stats.proto.
pub(crate) mod stats_entry {
    pub(crate) const DUMP: u32 = 1;
}

/// `itimer_entry` of timer.proto.
pub(crate) mod itimer_entry {
    /// The interval in seconds, and microseconds besides.
    pub(crate) const ISEC: u32 = 1;
    pub(crate) const IUSEC: u32 = 2;
    /// What is left in seconds, and microseconds besides.
    pub(crate) const VSEC: u32 = 3;
    pub(crate) const VUSEC: u32 = 4;
}

/// `posix_timer_entry` of timer.proto.
pub(crate) mod posix_timer_entry {
    /// The number that timer_create(2) gave.
    pub(crate) const IT_ID: u32 = 1;
    /// As clock_gettime(2) numbers clocks.
    pub(crate) const CLOCK_ID: u32 = 2;
    pub(crate) const SI_SIGNO: u32 = 3;
    pub(crate) const IT_SIGEV_NOTIFY: u32 = 4;
    pub(crate) const SIVAL_PTR: u32 = 5;
    /// The interval in seconds, and nanoseconds besides.
    pub(crate) const ISEC: u32 = 7;
    pub(crate) const INSEC: u32 = 8;
    /// What is left in seconds, and nanoseconds besides.
    pub(crate) const VSEC: u32 = 9;
    pub(crate) const VNSEC: u32 = 10;
    pub(crate) const NOTIFY_THREAD_ID: u32 = 11;
}

/// `task_timers_entry` of timer.proto.
pub(crate) mod task_timers_entry {
    pub(crate) const REAL: u32 = 1;
    pub(crate) const VIRT: u32 = 2;
    pub(crate) const PROF: u32 = 3;
    pub(crate) const POSIX: u32 = 4;
}

/// `uid_gid_extent` of userns.proto.
pub mod uid_gid_extent {
    /// The first id inside.
    pub(crate) const FIRST: u32 = 1;
    /// The first id outside.
    pub const LOWER_FIRST: u32 = 2;
    pub(crate) const COUNT: u32 = 3;
}

/// `userns_entry` of userns.proto.
pub mod userns_entry {
    /// Mappings of users: [`super::uid_gid_extent`].
    pub const UID_MAP: u32 = 1;
    /// Mappings of groups.
    pub(crate) const GID_MAP: u32 = 2;
}
