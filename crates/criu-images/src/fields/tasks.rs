//! Messages about processes and threads, their user namespace, and how long they stood still.

/// `task_core_entry` of core.proto.
pub mod task_core_entry {
    /// See [`crate::codes::state`].
    pub const TASK_STATE: u32 = 1;
    /// As wait(2) reports it.
    pub const EXIT_CODE: u32 = 2;
    pub const PERSONALITY: u32 = 3;
    /// Signal N as bit N - 1. A thread that has a mask of its own goes by that.
    pub const BLK_SIGSET: u32 = 5;
    pub const COMM: u32 = 6;
    pub const TIMERS: u32 = 7;
    pub const RLIMITS: u32 = 8;
    /// Signals that wait for the process.
    pub const SIGNALS_S: u32 = 10;
    pub const OOM_SCORE_ADJ: u32 = 14;
    /// From signal 1 on, without SIGKILL and SIGSTOP.
    pub const SIGACTIONS: u32 = 15;
    pub const CHILD_SUBREAPER: u32 = 18;
    pub const MEMBARRIER_REGISTRATION_MASK: u32 = 22;
}

/// `task_kobj_ids_entry` of core.proto.
pub mod task_kobj_ids_entry {
    pub const VM_ID: u32 = 1;
    /// The number of the table of descriptors, which is in the name of its image.
    pub const FILES_ID: u32 = 2;
    pub const FS_ID: u32 = 3;
    pub const SIGHAND_ID: u32 = 4;
    pub const PID_NS_ID: u32 = 5;
    pub const NET_NS_ID: u32 = 6;
    pub const IPC_NS_ID: u32 = 7;
    pub const UTS_NS_ID: u32 = 8;
    pub const MNT_NS_ID: u32 = 9;
    pub const USER_NS_ID: u32 = 10;
    pub const CGROUP_NS_ID: u32 = 11;
    pub const TIME_NS_ID: u32 = 12;
}

/// `thread_sas_entry` of core.proto.
pub mod thread_sas_entry {
    pub const SS_SP: u32 = 1;
    pub const SS_SIZE: u32 = 2;
    pub const SS_FLAGS: u32 = 3;
}

/// `thread_core_entry` of core.proto.
pub mod thread_core_entry {
    /// The address of the list of robust futexes, set_robust_list(2).
    pub const FUTEX_RLA: u32 = 1;
    pub const FUTEX_RLA_LEN: u32 = 2;
    /// A sint32, which is stored folded: 0, -1, 1, -2 ..
    pub const SCHED_NICE: u32 = 3;
    /// SCHED_* of sched(7).
    pub const SCHED_POLICY: u32 = 4;
    pub const SCHED_PRIO: u32 = 5;
    /// Signal N as bit N - 1.
    pub const BLK_SIGSET: u32 = 6;
    /// The stack of signal handlers, sigaltstack(2).
    pub const SAS: u32 = 7;
    pub const PDEATH_SIG: u32 = 8;
    /// Signals that wait for the thread.
    pub const SIGNALS_P: u32 = 9;
    /// Credentials: [`super::creds_entry`].
    pub const CREDS: u32 = 10;
    /// The mode of seccomp(2): 0 is none, 2 is a filter.
    pub const SECCOMP_MODE: u32 = 11;
    /// Where the chain of the thread's filters begins, among all filters of the tree.
    pub const SECCOMP_FILTER: u32 = 12;
    pub const COMM: u32 = 13;
    pub const RSEQ_ENTRY: u32 = 15;
}

/// `task_rlimits_entry` of core.proto.
pub mod task_rlimits_entry {
    /// One for each RLIMIT_* of getrlimit(2), in the order of their numbers.
    pub const RLIMITS: u32 = 1;
}

/// `core_entry` of core.proto.
pub mod core_entry {
    /// The architecture: 1 is x86_64.
    pub const MTYPE: u32 = 1;
    /// Registers of x86_64: [`super::thread_info_x86`].
    pub const THREAD_INFO: u32 = 2;
    /// The process: [`super::task_core_entry`]. Only its first thread has it.
    pub const TC: u32 = 3;
    /// The thread: [`super::thread_core_entry`].
    pub const THREAD_CORE: u32 = 5;
}

/// `user_x86_regs_entry` of core-x86.proto.
pub mod user_x86_regs_entry {
    /// The first of those that `struct user_regs_struct` has; the others follow in its order.
    pub const R15: u32 = 1;
    pub const R10: u32 = 8;
    pub const R9: u32 = 9;
    pub const R8: u32 = 10;
    pub const AX: u32 = 11;
    pub const DX: u32 = 13;
    pub const SI: u32 = 14;
    pub const DI: u32 = 15;
    pub const ORIG_AX: u32 = 16;
    pub const IP: u32 = 17;
    pub const SP: u32 = 20;
    /// 1 for 64 bits, 2 for 32 bits.
    pub const MODE: u32 = 28;
}

/// `user_x86_cet_entry` of core-x86.proto.
pub mod user_x86_cet_entry {
    pub const CET: u32 = 1;
    /// The top of the shadow stack.
    pub const SSP: u32 = 2;
}

/// `user_x86_xsave_entry` of core-x86.proto.
pub mod user_x86_xsave_entry {
    /// The components that are in use, by their numbers as bits.
    pub const XSTATE_BV: u32 = 1;
    pub const YMMH_SPACE: u32 = 2;
    pub const BNDREG_STATE: u32 = 3;
    pub const BNDCSR_STATE: u32 = 4;
    pub const OPMASK_REG: u32 = 5;
    pub const ZMM_UPPER: u32 = 6;
    pub const HI16_ZMM: u32 = 7;
    pub const PKRU: u32 = 8;
    /// The shadow stack.
    pub const CET: u32 = 9;
}

/// `user_x86_fpregs_entry` of core-x86.proto.
pub mod user_x86_fpregs_entry {
    pub const CWD: u32 = 1;
    pub const SWD: u32 = 2;
    pub const TWD: u32 = 3;
    pub const FOP: u32 = 4;
    /// The address of the last instruction.
    pub const RIP: u32 = 5;
    /// The address of the last operand.
    pub const RDP: u32 = 6;
    pub const MXCSR: u32 = 7;
    pub const MXCSR_MASK: u32 = 8;
    pub const ST_SPACE: u32 = 9;
    pub const XMM_SPACE: u32 = 10;
    /// What only processors with XSAVE have: [`super::user_x86_xsave_entry`].
    pub const XSAVE: u32 = 13;
}

/// `user_desc_t` of core-x86.proto.
pub mod user_desc_t {
    pub const BASE_ADDR: u32 = 2;
    pub const SEG_NOT_PRESENT: u32 = 9;
}

/// `thread_info_x86` of core-x86.proto.
pub mod thread_info_x86 {
    pub const CLEAR_TID_ADDR: u32 = 1;
    /// General registers: [`super::user_x86_regs_entry`].
    pub const GPREGS: u32 = 2;
    /// All other registers: [`super::user_x86_fpregs_entry`].
    pub const FPREGS: u32 = 3;
    /// Segments of the descriptor table, set_thread_area(2).
    pub const TLS: u32 = 4;
}

/// `creds_entry` of creds.proto.
pub mod creds_entry {
    pub const UID: u32 = 1;
    pub const GID: u32 = 2;
    /// The effective user id, as numbered inside.
    pub const EUID: u32 = 3;
    pub const EGID: u32 = 4;
    pub const SUID: u32 = 5;
    pub const SGID: u32 = 6;
    pub const FSUID: u32 = 7;
    pub const FSGID: u32 = 8;
    /// Capabilities are 32 to a number, the lower ones first.
    pub const CAP_INH: u32 = 9;
    pub const CAP_PRM: u32 = 10;
    /// Effective capabilities, 32 to a number.
    pub const CAP_EFF: u32 = 11;
    pub const CAP_BND: u32 = 12;
    pub const SECBITS: u32 = 13;
    pub const GROUPS: u32 = 14;
    /// A profile of a security module.
    pub const LSM_PROFILE: u32 = 15;
    pub const LSM_SOCKCREATE: u32 = 16;
    pub const APPARMOR_DATA: u32 = 17;
    /// 1 if prctl(2) PR_SET_NO_NEW_PRIVS was called.
    pub const NO_NEW_PRIVS: u32 = 18;
    pub const CAP_AMB: u32 = 19;
}

/// `fs_entry` of fs.proto.
pub mod fs_entry {
    /// The id of the working directory among files.
    pub const CWD_ID: u32 = 1;
    /// The id of the root directory among files.
    pub const ROOT_ID: u32 = 2;
    pub const UMASK: u32 = 3;
}

/// `pstree_entry` of pstree.proto.
pub mod pstree_entry {
    pub const PID: u32 = 1;
    pub const PPID: u32 = 2;
    /// The process group.
    pub const PGID: u32 = 3;
    /// The session.
    pub const SID: u32 = 4;
    pub const THREADS: u32 = 5;
}

/// `rlimit_entry` of rlimit.proto.
pub mod rlimit_entry {
    pub const CUR: u32 = 1;
    pub const MAX: u32 = 2;
}

/// `rseq_entry` of rseq.proto.
pub mod rseq_entry {
    pub const RSEQ_ABI_POINTER: u32 = 1;
    pub const RSEQ_ABI_SIZE: u32 = 2;
    pub const SIGNATURE: u32 = 3;
    /// Not 0 in a restartable sequence.
    pub const RSEQ_CS_POINTER: u32 = 4;
}

/// `sa_entry` of sa.proto.
pub mod sa_entry {
    /// The address of the handler, SIG_DFL or SIG_IGN.
    pub const SIGACTION: u32 = 1;
    pub const FLAGS: u32 = 2;
    pub const RESTORER: u32 = 3;
    pub const MASK: u32 = 4;
    /// The handler is of 32 bits.
    pub const COMPAT_SIGACTION: u32 = 5;
}

/// `seccomp_filter` of seccomp.proto.
pub mod seccomp_filter {
    /// Instructions of classic BPF.
    pub const FILTER: u32 = 1;
    /// The place of the thread's next filter among all of the tree; none at the end of its chain.
    pub const PREV: u32 = 2;
    /// SECCOMP_FILTER_FLAG_* of seccomp(2).
    pub const FLAGS: u32 = 3;
}

/// `seccomp_entry` of seccomp.proto.
pub mod seccomp_entry {
    pub const SECCOMP_FILTERS: u32 = 1;
}

/// `siginfo_entry` of siginfo.proto.
pub mod siginfo_entry {
    /// A siginfo_t as the kernel has it.
    pub const SIGINFO: u32 = 1;
}

/// `signal_queue_entry` of siginfo.proto.
pub mod signal_queue_entry {
    pub const SIGNALS: u32 = 1;
}

/// `dump_stats_entry` of stats.proto.
pub mod dump_stats_entry {
    /// Microseconds.
    pub const FROZEN_TIME: u32 = 2;
}

/// `stats_entry` of stats.proto.
pub mod stats_entry {
    pub const DUMP: u32 = 1;
}

/// `itimer_entry` of timer.proto.
pub mod itimer_entry {
    /// The interval in seconds, and microseconds besides.
    pub const ISEC: u32 = 1;
    pub const IUSEC: u32 = 2;
    /// What is left in seconds, and microseconds besides.
    pub const VSEC: u32 = 3;
    pub const VUSEC: u32 = 4;
}

/// `posix_timer_entry` of timer.proto.
pub mod posix_timer_entry {
    /// The number that timer_create(2) gave.
    pub const IT_ID: u32 = 1;
    /// As clock_gettime(2) numbers clocks.
    pub const CLOCK_ID: u32 = 2;
    pub const SI_SIGNO: u32 = 3;
    pub const IT_SIGEV_NOTIFY: u32 = 4;
    pub const SIVAL_PTR: u32 = 5;
    /// The interval in seconds, and nanoseconds besides.
    pub const ISEC: u32 = 7;
    pub const INSEC: u32 = 8;
    /// What is left in seconds, and nanoseconds besides.
    pub const VSEC: u32 = 9;
    pub const VNSEC: u32 = 10;
    pub const NOTIFY_THREAD_ID: u32 = 11;
}

/// `task_timers_entry` of timer.proto.
pub mod task_timers_entry {
    pub const REAL: u32 = 1;
    pub const VIRT: u32 = 2;
    pub const PROF: u32 = 3;
    pub const POSIX: u32 = 4;
}

/// `uid_gid_extent` of userns.proto.
pub mod uid_gid_extent {
    /// The first id inside.
    pub const FIRST: u32 = 1;
    /// The first id outside.
    pub const LOWER_FIRST: u32 = 2;
    pub const COUNT: u32 = 3;
}

/// `userns_entry` of userns.proto.
pub mod userns_entry {
    /// Mappings of users: [`super::uid_gid_extent`].
    pub const UID_MAP: u32 = 1;
    /// Mappings of groups.
    pub const GID_MAP: u32 = 2;
}
