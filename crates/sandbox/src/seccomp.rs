//! The system call filter of every sandbox.
//!
//! A short list of what is refused, not a long list of what is allowed: the kernel tries a new
//! filter on every system call number, so that each entry costs start-up time, and the rest of the
//! sandbox (a user namespace of its own, few capabilities, no mounts to act on) already bounds what
//! a call can do. What is on the list either opens kernel code that a server does not need, or
//! makes state that cannot be checkpointed.
//!
//! A light sandbox has the opposite, a short list of what is allowed ([`light`]), for its programs
//! share a network namespace and the files of their image with others.
//!
//! The program is a balanced tree over the call's number, made by [`filter`]. The seccompiler crate
//! makes a list of the same rules, which takes the kernel 255 microseconds to install here, at
//! every start and at every wake, against 45.

pub mod light;

use kip_sys::caps::Instruction;
use kip_types::spec::FilterKind;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use rustix::thread::UnshareFlags;
use std::collections::BTreeMap;

/// The filters that sandboxes of this Kip and of earlier ones have, as [`code`] has them; the last
/// is [`filter`]. Sleepers keep the one that they were started with, so that none goes from here:
/// `cargo run -p kip-sandbox --example filter` prints the next.
pub const KNOWN: [&[u8]; 2] = [include_bytes!("../filters/1.bpf"), include_bytes!("../filters/2.bpf")];

/// The same of light sandboxes.
pub const KNOWN_LIGHT: [&[u8]; 1] = [include_bytes!("../filters/light-1.bpf")];

/// Those of one kind.
pub fn known(kind: FilterKind) -> &'static [&'static [u8]] {
    match kind {
        FilterKind::Default => &KNOWN,
        FilterKind::Light => &KNOWN_LIGHT,
    }
}

/// Calls that answer EPERM whatever their arguments: numbers of x86_64.
const REFUSED: &[u32] = &[
    // Mounts: the sandbox's mount namespace is not the tenant's.
    165, // mount
    166, // umount2
    155, // pivot_root
    428, // open_tree
    429, // move_mount
    430, // fsopen
    431, // fsconfig
    432, // fsmount
    433, // fspick
    442, // mount_setattr
    467, // open_tree_attr
    // Other namespaces; unshare and clone are checked for their flags.
    308, // setns
    // Wide doors into the kernel.
    321, // bpf
    298, // perf_event_open
    323, // userfaultfd
    248, // add_key
    249, // request_key
    250, // keyctl
    // io_uring cannot be checkpointed, and programs fall back.
    425, // io_uring_setup
    426, // io_uring_enter
    427, // io_uring_register
    304, // open_by_handle_at
    // The machine itself.
    175, // init_module
    313, // finit_module
    176, // delete_module
    246, // kexec_load
    320, // kexec_file_load
    169, // reboot
    167, // swapon
    168, // swapoff
    163, // acct
    179, // quotactl
    443, // quotactl_fd
    164, // settimeofday
    227, // clock_settime
    172, // iopl
    173, // ioperm
];

const CLONE: u32 = 56;
const UNSHARE: u32 = 272;
const SOCKET: u32 = 41;
const CLONE3: u32 = 435;
/// landlock_create_ruleset(2), landlock_add_rule(2), landlock_restrict_self(2). No snapshot has
/// what a program may not do by them, and the kernel does not tell: after a wake the program could
/// do it. Programs take ENOSYS for a kernel without these calls.
const LANDLOCK: [u32; 3] = [444, 445, 446];

/// New namespaces for clone(2) and unshare(2).
const NEW_NAMESPACES: u32 = UnshareFlags::NEWNS
    .union(UnshareFlags::NEWCGROUP)
    .union(UnshareFlags::NEWUTS)
    .union(UnshareFlags::NEWIPC)
    .union(UnshareFlags::NEWUSER)
    .union(UnshareFlags::NEWPID)
    .union(UnshareFlags::NEWNET)
    .bits();
/// For unshare(2) only: for clone(2) this is part of the exit signal's byte.
const NEW_TIME: u32 = UnshareFlags::NEWTIME.bits();
/// Beyond it are AF_PACKET (not without CAP_NET_RAW), AF_ALG, AF_VSOCK, AF_XDP and
/// rarer ones.
const LAST_FAMILY: u32 = AddressFamily::NETLINK.as_raw() as u32;

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allow,
    /// EPERM.
    Refuse,
    /// ENOSYS.
    Unknown,
    /// EPERM if the first argument has any of these bits.
    RefuseBits(u32),
    /// EPERM if the first argument is greater.
    RefuseAbove(u32),
    /// EPERM if the argument of this number (from 0) is none of these.
    AllowWith(u32, &'static [u32]),
    /// EPERM but for stream sockets of AF_UNIX, by the first and the second argument.
    UnixStream,
}

/// Every number at which the verdict changes, with the verdict from there on.
fn segments(kind: FilterKind) -> Vec<(u32, Verdict)> {
    match kind {
        FilterKind::Default => usual_segments(),
        FilterKind::Light => light::segments(),
    }
}

fn usual_segments() -> Vec<(u32, Verdict)> {
    let mut special: BTreeMap<u32, Verdict> = REFUSED.iter().map(|nr| (*nr, Verdict::Refuse)).collect();
    special.insert(CLONE, Verdict::RefuseBits(NEW_NAMESPACES));
    special.insert(UNSHARE, Verdict::RefuseBits(NEW_NAMESPACES | NEW_TIME));
    special.insert(SOCKET, Verdict::RefuseAbove(LAST_FAMILY));
    // A filter cannot see its flags. ENOSYS makes libc use clone.
    special.insert(CLONE3, Verdict::Unknown);
    for call in LANDLOCK {
        special.insert(call, Verdict::Unknown);
    }
    // The x32 entry has the same architecture word but other numbers for the same calls.
    special.insert(X32_BIT, Verdict::Unknown);
    joined(special, |_| Verdict::Allow)
}

/// The numbers at which the verdict changes, where all but the `special` ones have that of
/// `other`, which is asked for the first number after each of them.
fn joined(special: BTreeMap<u32, Verdict>, other: impl Fn(u32) -> Verdict) -> Vec<(u32, Verdict)> {
    let mut segments = vec![(0, other(0))];
    for (number, verdict) in special {
        if segments.last().is_some_and(|s| s.0 == number) {
            segments.pop();
        }
        if segments.last().is_none_or(|s| s.1 != verdict) {
            segments.push((number, verdict));
        }
        if number != X32_BIT && other(number + 1) != verdict {
            segments.push((number + 1, other(number + 1)));
        }
    }
    segments
}

// Operations of linux/bpf_common.h and words of linux/seccomp.h.
const LOAD: u16 = 0x20;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER: u16 = 0x25;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;
const JUMP_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;
const AND: u16 = 0x54;
const AT_NUMBER: u32 = 0;
const AT_ARCHITECTURE: u32 = 4;
/// Low words of the arguments, each of 8 bytes.
const AT_FIRST_ARGUMENT: u32 = 16;
const X86_64: u32 = 0xc000_003e;
const X32_BIT: u32 = 0x4000_0000;
const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;
const EPERM: u32 = Errno::PERM.raw_os_error().cast_unsigned();
const ENOSYS: u32 = Errno::NOSYS.raw_os_error().cast_unsigned();

fn load(at: u32) -> Instruction {
    Instruction { code: LOAD, jt: 0, jf: 0, k: at }
}

fn jump(code: u16, k: u32, jt: u8, jf: u8) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn answer(k: u32) -> Instruction {
    Instruction { code: RETURN, jt: 0, jf: 0, k }
}

/// The filter, ready to be installed. A call by another architecture's entry (32-bit programs)
/// kills the process.
pub fn filter(kind: FilterKind) -> Vec<Instruction> {
    let mut program =
        vec![load(AT_ARCHITECTURE), jump(JUMP_EQUAL, X86_64, 1, 0), answer(KILL_PROCESS), load(AT_NUMBER)];
    tree(&segments(kind), &mut program);
    program
}

/// The same as it is in memory, and in the images of a sleeper.
pub fn code(kind: FilterKind) -> Vec<u8> {
    let bytes = |i: &Instruction| {
        let [low, high] = i.code.to_le_bytes();
        let [a, b, c, d] = i.k.to_le_bytes();
        [low, high, i.jt, i.jf, a, b, c, d]
    };
    filter(kind).iter().flat_map(bytes).collect()
}

fn tree(segments: &[(u32, Verdict)], program: &mut Vec<Instruction>) {
    if let [(_, verdict)] = segments {
        let check = |code, k| vec![load(AT_FIRST_ARGUMENT), jump(code, k, 0, 1), answer(ERRNO | EPERM), answer(ALLOW)];
        program.extend(match *verdict {
            Verdict::Allow => vec![answer(ALLOW)],
            Verdict::Refuse => vec![answer(ERRNO | EPERM)],
            Verdict::Unknown => vec![answer(ERRNO | ENOSYS)],
            Verdict::RefuseBits(bits) => check(JUMP_ANY_BIT, bits),
            Verdict::RefuseAbove(most) => check(JUMP_GREATER, most),
            Verdict::AllowWith(argument, values) => one_of(argument, values),
            Verdict::UnixStream => unix_stream(),
        });
        return;
    }
    let (below, from) = segments.split_at(segments.len() / 2);
    let at = program.len();
    program.push(jump(JUMP_GREATER_OR_EQUAL, from[0].0, 0, 0));
    tree(below, program);
    program[at].jt = u8::try_from(program.len() - at - 1).expect("the tree is small enough for short jumps");
    tree(from, program);
}

fn one_of(argument: u32, values: &[u32]) -> Vec<Instruction> {
    let mut checks = vec![load(AT_FIRST_ARGUMENT + 8 * argument)];
    for (left, value) in (0..values.len()).rev().zip(values) {
        // To the answer that allows, behind the one that refuses.
        checks.push(jump(JUMP_EQUAL, *value, u8::try_from(left + 1).expect("a short list"), 0));
    }
    checks.extend([answer(ERRNO | EPERM), answer(ALLOW)]);
    checks
}

fn unix_stream() -> Vec<Instruction> {
    /// Flags of the second argument of socket(2) lie above.
    const TYPE: u32 = 0xf;
    let and = Instruction { code: AND, jt: 0, jf: 0, k: TYPE };
    vec![
        load(AT_FIRST_ARGUMENT),
        jump(JUMP_EQUAL, AddressFamily::UNIX.as_raw().into(), 0, 3),
        load(AT_FIRST_ARGUMENT + 8),
        and,
        jump(JUMP_EQUAL, SocketType::STREAM.as_raw(), 1, 0),
        answer(ERRNO | EPERM),
        answer(ALLOW),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    // promise archive: a program that was started under an earlier system call filter of Kip's
    //   still wakes from the store
    // held by: this, `kip_checkpoint::policy::tests::more_rights_are_refused`,
    //   `tests/test_policy.py::test_what_programs_have_is_allowed`
    #[test]
    fn the_filter_of_now_is_the_last_of_those_that_are_known() {
        assert!(
            KNOWN.last() == Some(&&code(FilterKind::Default)[..]),
            "add it, and keep the others: cargo run -p kip-sandbox --example filter > crates/sandbox/filters/{}.bpf",
            KNOWN.len() + 1
        );
    }

    /// What the kernel would answer, by the rules of classic BPF.
    fn run(program: &[Instruction], architecture: u32, number: u32, argument: u32) -> u32 {
        let (mut at, mut word) = (0, 0);
        loop {
            let i = program[at];
            at += 1;
            let taken = match i.code {
                LOAD => {
                    word = match i.k {
                        AT_NUMBER => number,
                        AT_ARCHITECTURE => architecture,
                        AT_FIRST_ARGUMENT => argument,
                        other => panic!("loads {other}"),
                    };
                    continue;
                }
                RETURN => return i.k,
                JUMP_EQUAL => word == i.k,
                JUMP_GREATER => word > i.k,
                JUMP_GREATER_OR_EQUAL => word >= i.k,
                JUMP_ANY_BIT => word & i.k != 0,
                other => panic!("operation {other:#x}"),
            };
            at += usize::from(if taken { i.jt } else { i.jf });
        }
    }

    // promise sandbox: seccomp: each call has its verdict; io_uring is refused and programs fall
    //   back
    // held by: this, `crates/sandbox/tests/sandbox.rs::dangerous_calls_are_refused`,
    //   `tests/test_mariadb.py::test_fell_back_from_io_uring`
    #[test]
    fn every_call_gets_its_verdict() {
        let program = filter(FilterKind::Default);
        let (allow, refuse, unknown) = (ALLOW, ERRNO | EPERM, ERRNO | ENOSYS);
        for number in (0..1000).chain([X32_BIT - 1, X32_BIT, X32_BIT + 41, u32::MAX]) {
            for argument in [0, 2, 16, 17, 40, 0x11, 0x80, 0x20000, 0x1000_0000, 0x4000_0000, 0x003d_0f00] {
                let namespaces = argument & NEW_NAMESPACES != 0;
                let wanted = match number {
                    X32_BIT.. | CLONE3 => unknown,
                    n if LANDLOCK.contains(&n) => unknown,
                    n if REFUSED.contains(&n) => refuse,
                    CLONE if namespaces => refuse,
                    UNSHARE if namespaces || argument & NEW_TIME != 0 => refuse,
                    SOCKET if argument > 16 => refuse,
                    _ => allow,
                };
                assert_eq!(run(&program, X86_64, number, argument), wanted, "{number} {argument:#x}");
            }
        }
        assert_eq!(run(&program, 0x4000_0003, 4, 0), KILL_PROCESS);
    }

    #[test]
    fn no_call_takes_many_instructions() {
        let length = filter(FilterKind::Default).len();
        assert!(length < 200, "{length} instructions");
        assert!(
            segments(FilterKind::Default).windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 != w[1].1),
            "{:?}",
            segments(FilterKind::Default)
        );
    }

    /// In a thread of its own, for a filter never goes away.
    #[test]
    fn calls_are_refused_and_programs_go_on() {
        std::thread::spawn(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            kip_sys::caps::add_seccomp_filter(&filter(FilterKind::Default)).unwrap();
            let net = kip_sys::ns::Unshare { net: true, ..Default::default() };
            assert_eq!(kip_sys::ns::unshare(net).unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
            use rustix::net::{AddressFamily, SocketType, socket};
            assert_eq!(socket(AddressFamily::from_raw(40), SocketType::STREAM, None).unwrap_err(), Errno::PERM);
            socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            let open = rustix::mount::fsopen("proc", rustix::mount::FsOpenFlags::empty());
            assert_eq!(open.unwrap_err(), Errno::PERM);
            // Threads and processes start: libc falls back from clone3 to clone.
            std::thread::spawn(|| {}).join().unwrap();
            assert!(std::process::Command::new("/bin/true").status().unwrap().success());
        })
        .join()
        .unwrap();
    }
}
