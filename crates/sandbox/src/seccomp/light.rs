//! The system calls of a light sandbox: which ones, and what each is for.
//!
//! The table is all there is: the filter is made from it, and `docs/light.md` has it word for word.
//! A call that is not in it answers EPERM, or, from [`MODERN`] on, ENOSYS, by which programs fall
//! back to older calls. The programs of light sandboxes share a network namespace and read-only
//! files with others of their data directory: no call here makes a name in the one (an abstract
//! address, a port) or a lock in the other.

use super::{CLONE3, Verdict, X32_BIT, joined};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The first number that all architectures have in common: what came with Linux 5.1 and later.
const MODERN: u32 = 424;

// Of linux/prctl.h.
const PRCTL: [u32; 6] = [15, 16, 1, 3, 4, 0x5356_4d41];
// Of linux/fcntl.h.
const FCNTL: [u32; 6] = [1, 2, 3, 4, 0, 1030];
// Of asm-generic/ioctls.h.
const IOCTL: [u32; 6] = [0x5401, 0x5413, 0x541b, 0x5421, 0x5450, 0x5451];

/// A group of calls with one reason.
struct Group {
    reason: &'static str,
    calls: &'static [LightCall],
}

/// A call by its name and its number on x86_64.
struct LightCall {
    name: &'static str,
    number: u32,
    verdict: Verdict,
    /// What of it is allowed, in words; empty for all of it.
    limit: &'static str,
}

const fn call(name: &'static str, number: u32) -> LightCall {
    LightCall { name, number, verdict: Verdict::Allow, limit: "" }
}

const fn limited(name: &'static str, number: u32, verdict: Verdict, limit: &'static str) -> LightCall {
    LightCall { name, number, verdict, limit }
}

const TABLE: &[Group] = &[
    Group {
        reason: "memory of the program",
        calls: &[
            call("brk", 12),
            call("mmap", 9),
            call("mprotect", 10),
            call("munmap", 11),
            call("mremap", 25),
            call("madvise", 28),
        ],
    },
    Group {
        reason: "threads and child processes, in no new namespaces",
        calls: &[
            limited("clone", 56, Verdict::RefuseBits(super::NEW_NAMESPACES), "no new namespace"),
            call("fork", 57),
            call("vfork", 58),
            call("execve", 59),
            call("exit", 60),
            call("exit_group", 231),
            call("wait4", 61),
        ],
    },
    Group {
        reason: "thread state that C libraries set at the start of a thread",
        calls: &[
            call("arch_prctl", 158),
            call("set_tid_address", 218),
            call("set_robust_list", 273),
            call("rseq", 334),
        ],
    },
    Group {
        reason: "locks and the scheduler, as language runtimes use them",
        calls: &[call("futex", 202), call("sched_yield", 24), call("sched_getaffinity", 204)],
    },
    Group {
        reason: "names and death signals of threads; pid 1 makes itself dumpable",
        calls: &[limited(
            "prctl",
            157,
            Verdict::AllowWith(0, &PRCTL),
            "PR_SET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA",
        )],
    },
    Group { reason: "limits of resources: read, and lowered", calls: &[call("prlimit64", 302)] },
    Group {
        reason: "what the process, its machine and its use of both are",
        calls: &[
            call("getpid", 39),
            call("getppid", 110),
            call("gettid", 186),
            call("getuid", 102),
            call("geteuid", 107),
            call("getgid", 104),
            call("getegid", 108),
            call("uname", 63),
        ],
    },
    Group {
        reason: "signals within the proc's own pid namespace",
        calls: &[
            call("rt_sigaction", 13),
            call("rt_sigprocmask", 14),
            call("rt_sigreturn", 15),
            call("sigaltstack", 131),
            call("kill", 62),
            call("tgkill", 234),
            call("setsid", 112),
        ],
    },
    Group {
        reason: "calls go on after a sleep of the proc, whose threads a wake holds in pause(2) until all is back",
        calls: &[call("restart_syscall", 219), call("pause", 34)],
    },
    Group { reason: "randomness", calls: &[call("getrandom", 318)] },
    Group {
        reason: "clocks and timers",
        calls: &[
            call("clock_gettime", 228),
            call("nanosleep", 35),
            call("clock_nanosleep", 230),
            call("timerfd_create", 283),
            call("timerfd_settime", 286),
        ],
    },
    Group {
        reason: "waiting for descriptors",
        calls: &[
            call("poll", 7),
            call("ppoll", 271),
            call("pselect6", 270),
            call("epoll_create1", 291),
            call("epoll_ctl", 233),
            call("epoll_wait", 232),
            call("epoll_pwait", 281),
            call("eventfd2", 290),
        ],
    },
    Group {
        reason: "reading and writing open files, pipes and connections",
        calls: &[
            call("read", 0),
            call("write", 1),
            call("readv", 19),
            call("writev", 20),
            call("pread64", 17),
            call("lseek", 8),
            call("close", 3),
            call("close_range", 436),
            call("dup", 32),
            call("dup2", 33),
            call("dup3", 292),
            call("pipe2", 293),
        ],
    },
    Group {
        reason: "flags and copies of descriptors, and no locks: other procs have the same files",
        calls: &[limited(
            "fcntl",
            72,
            Verdict::AllowWith(1, &FCNTL),
            "F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC",
        )],
    },
    Group {
        reason: "whether a descriptor is a terminal, how much can be read, and non-blocking",
        calls: &[limited(
            "ioctl",
            16,
            Verdict::AllowWith(1, &IOCTL),
            "TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX",
        )],
    },
    Group {
        reason: "opening and finding files of the read-only root: programs, libraries, settings",
        calls: &[
            call("open", 2),
            call("openat", 257),
            call("stat", 4),
            call("fstat", 5),
            call("newfstatat", 262),
            call("statx", 332),
            call("access", 21),
            call("readlink", 89),
            call("getdents64", 217),
            call("getcwd", 79),
            call("chdir", 80),
        ],
    },
    Group {
        reason: "connections to Kip by its runtime socket, and between processes of the proc: streams of AF_UNIX only",
        calls: &[
            limited("socket", 41, Verdict::UnixStream, "AF_UNIX with SOCK_STREAM"),
            limited("socketpair", 53, Verdict::UnixStream, "AF_UNIX with SOCK_STREAM"),
        ],
    },
    Group {
        reason: "those connections in use; none is waited for, so that there is no bind, listen or accept",
        calls: &[
            call("connect", 42),
            call("sendto", 44),
            call("recvfrom", 45),
            call("sendmsg", 46),
            call("recvmsg", 47),
            call("shutdown", 48),
            call("getsockopt", 55),
        ],
    },
];

fn calls() -> impl Iterator<Item = &'static LightCall> {
    TABLE.iter().flat_map(|group| group.calls)
}

pub(super) fn segments() -> Vec<(u32, Verdict)> {
    let mut special: BTreeMap<u32, Verdict> = calls().map(|call| (call.number, call.verdict)).collect();
    special.insert(CLONE3, Verdict::Unknown);
    special.insert(X32_BIT, Verdict::Unknown);
    // Only for the number at which the other answer begins.
    special.entry(MODERN).or_insert(Verdict::Unknown);
    joined(special, |number| if number < MODERN { Verdict::Refuse } else { Verdict::Unknown })
}

/// The table as `docs/light.md` has it.
pub fn table() -> String {
    let mut text = String::from("| call | number | limited to | what for |\n| --- | --- | --- | --- |\n");
    for group in TABLE {
        for call in group.calls {
            let LightCall { name, number, limit, .. } = call;
            writeln!(text, "| `{name}` | {number} | {limit} | {} |", group.reason).expect("a String takes anything");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::{KNOWN_LIGHT, code};
    use kip_types::spec::FilterKind;
    use std::collections::BTreeSet;

    #[test]
    fn the_filter_of_now_is_the_last_of_those_that_are_known() {
        assert!(
            KNOWN_LIGHT.last() == Some(&&code(FilterKind::Light)[..]),
            "add it, and keep the others: cargo run -p kip-sandbox --example filter light > crates/sandbox/filters/light-{}.bpf",
            KNOWN_LIGHT.len() + 1
        );
    }

    #[test]
    fn each_call_is_in_the_table_once_and_in_its_document() {
        let numbers: BTreeSet<u32> = calls().map(|call| call.number).collect();
        assert_eq!(numbers.len(), calls().count());
        assert!(numbers.len() <= 90, "{}", numbers.len());
        let document = include_str!("../../../../docs/light.md");
        assert!(document.contains(&table()), "its table is to be this one:\n{}", table());
    }

    #[test]
    fn the_tree_is_in_order() {
        let segments = segments();
        assert!(segments.windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 != w[1].1), "{segments:?}");
    }
}
