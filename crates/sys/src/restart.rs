//! Calls that a stopped thread is to make again, left to the kernel.
//!
//! A thread that was broken off in a call and put back onto it is between two worlds: a signal that
//! has come by the time it goes on runs its handler first, and then the call waits in vain for what
//! the handler was to end it for; and the handler's frame lies where the record of the call's
//! time-out does ([`crate::ends`]), so that the call goes on with whatever is there. The kernel
//! knows neither case: it decides in one step whether a handler runs, and then ends the call with
//! EINTR or makes it again, as signal(7) says. [`leave_to_kernel`] gives it that choice back, by
//! registers that say that the call was broken off.

use crate::ends;
use crate::process::{read_memory, write_memory};
use crate::trace::{self, GENERAL};
use std::io;

const RAX: usize = 10;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;
const RSP: usize = 19;
/// The call's arguments: rdi rsi rdx r10 r8 r9.
const ARGUMENTS: [usize; 6] = [14, 13, 12, 7, 9, 8];
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The kernel's -ERESTARTSYS: made again after a handler that was set with SA_RESTART, ended with
/// EINTR by another one.
const UNLESS_REFUSED: i64 = -512;
/// The kernel's -ERESTARTNOHAND: ended with EINTR by any handler.
const UNLESS_HANDLED: i64 = -514;

/// How the kernel breaks off a call that waits; none for one that does not wait, or that is always
/// made again.
fn broken_off(call: u64, arguments: &[u64; 6]) -> Option<i64> {
    /// FUTEX_WAIT and FUTEX_WAIT_BITSET without its flags.
    const FUTEX_WAITS: [u64; 2] = [0, 9];
    /// F_SETLKW and F_OFD_SETLKW.
    const LOCKS: [u64; 2] = [7, 38];
    match call {
        // poll, select, pause, nanosleep, semop, msgsnd, msgrcv, rt_sigtimedwait, rt_sigsuspend,
        // io_getevents, semtimedop, clock_nanosleep, epoll_wait, pselect6, ppoll, epoll_pwait,
        // io_pgetevents, epoll_pwait2.
        7 | 23 | 34 | 35 | 65 | 69 | 70 | 128 | 130 | 208 | 220 | 230 | 232 | 270 | 271 | 281 | 333 | 441 => {
            Some(UNLESS_HANDLED)
        }
        202 if !FUTEX_WAITS.contains(&(arguments[1] & 0x7f)) => None,
        202 if arguments[3] != 0 => Some(UNLESS_HANDLED),
        72 if !LOCKS.contains(&arguments[1]) => None,
        _ if ends::is_marked(call, arguments) => Some(UNLESS_HANDLED),
        // read, write, readv, writev, open, sendfile, connect, accept, sendto, recvfrom, sendmsg,
        // recvmsg, wait4, fcntl, flock, futex, mq_timedsend, mq_timedreceive, waitid, openat,
        // splice, tee, vmsplice, accept4, recvmmsg, sendmmsg, preadv2, pwritev2, futex_waitv.
        0..=2
        | 19
        | 20
        | 40
        | 42..=47
        | 61
        | 72
        | 73
        | 202
        | 242
        | 243
        | 247
        | 257
        | 275
        | 276
        | 278
        | 288
        | 299
        | 307
        | 327
        | 328
        | 449
        | 455 => Some(UNLESS_REFUSED),
        _ => None,
    }
}

/// The registers of a thread that stands on such a call, as if it had been broken off in it; none
/// for any other. `ended`: the call had ended with EINTR, as one does that no flag of a handler has
/// made again. `code` reads the instruction at an address.
fn after(registers: &[u64; GENERAL], ended: bool, code: impl FnOnce(u64) -> Option<[u8; 2]>) -> Option<[u64; GENERAL]> {
    if !trace::is_64_bit(registers) {
        return None;
    }
    let call = registers[RAX];
    let how = if ended { UNLESS_HANDLED } else { broken_off(call, &arguments(registers))? };
    if code(registers[RIP])? != SYSCALL {
        return None;
    }
    let mut after = *registers;
    (after[RAX], after[ORIG_RAX]) = (how as u64, call);
    after[RIP] += SYSCALL.len() as u64;
    Some(after)
}

fn arguments(registers: &[u64; GENERAL]) -> [u64; 6] {
    ARGUMENTS.map(|argument| registers[argument])
}

/// Where a sleep that goes by a time-out of ours says what is left of it if a handler ends it.
fn remainder(registers: &[u64; GENERAL]) -> Option<u64> {
    let (call, arguments) = (registers[ORIG_RAX], arguments(registers));
    let index = ends::relative_timespec(call, &arguments)?;
    ends::remainder(call, &arguments).filter(|_| arguments[index] == ends::place(registers[RSP]))
}

/// The instruction at an address in a thread's memory.
fn code(tid: u32) -> impl FnOnce(u64) -> Option<[u8; 2]> {
    move |ip| {
        let mut code = [0u8; 2];
        read_memory(tid, ip, &mut code).is_ok().then_some(code)
    }
}

/// Whether a stopped thread stands on a call that waits. Faults of its process must be served.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn stands(tid: u32) -> io::Result<bool> {
    Ok(after(&trace::get_general(tid)?, false, code(tid)).is_some())
}

/// Has the kernel make the call on which a stopped thread stands as soon as the thread goes on,
/// unless the handler of a signal runs first: then the call ends with EINTR or is made after that.
/// Nothing happens to a thread that stands on no call that waits. Its memory must not change after
/// this, and faults of its process must be served. `ended`: it was put back onto a call that had
/// ended with EINTR.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn leave_to_kernel(tid: u32, ended: bool) -> io::Result<()> {
    let Some(registers) = after(&trace::get_general(tid)?, ended, code(tid)) else { return Ok(()) };
    if let Some(at) = remainder(&registers) {
        // The kernel said it when the thread was broken off, which was before the sleep. What
        // cannot be written now the kernel could not have written either.
        let mut left = [0; 16];
        let _ = read_memory(tid, ends::place(registers[RSP]), &mut left).and_then(|()| write_memory(tid, at, &left));
    }
    trace::set_general(tid, &registers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inject;
    use crate::process::{Signal, send_thread_signal};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    fn on(call: u64, arguments: [u64; 6]) -> [u64; GENERAL] {
        let mut registers = [0; GENERAL];
        (registers[RAX], registers[ORIG_RAX], registers[RIP], registers[17]) = (call, u64::MAX, 0x1000, 0x33);
        ARGUMENTS.into_iter().zip(arguments).for_each(|(register, value)| registers[register] = value);
        registers
    }

    #[test]
    fn each_call_is_broken_off_as_the_kernel_does() {
        let how = |call: u64, arguments: [u64; 6]| {
            let after = after(&on(call, arguments), false, |at| (at == 0x1000).then_some(SYSCALL))?;
            assert_eq!((after[ORIG_RAX], after[RIP]), (call, 0x1002));
            Some(after[RAX] as i64)
        };
        let plain = [5, 0, 0, 0, 0, 0];
        assert_eq!((how(232, plain), how(0, plain)), (Some(-514), Some(-512)), "epoll_wait, read");
        assert_eq!(how(0, [ends::marked(5), 0, 0, 0, 0, 0]), Some(-514), "a receive with a time-out");
        let futex = |operation: u64, timeout: u64| how(202, [1, operation | 128, 0, timeout, 0, 0]);
        assert_eq!((futex(0, 0), futex(0, 7), futex(9, 7)), (Some(-512), Some(-514), Some(-514)));
        assert_eq!((futex(1, 0), futex(6, 0)), (None, None), "a wake, and a lock that is always tried again");
        assert_eq!((how(72, [5, 7, 0, 0, 0, 0]), how(72, [5, 3, 0, 0, 0, 0])), (Some(-512), None), "fcntl");
        assert_eq!(how(39, plain), None, "getpid");
        assert_eq!(after(&on(232, plain), false, |_| Some([0x90; 2])), None, "232 is a result");
        let ended = after(&on(45, plain), true, |_| Some(SYSCALL)).unwrap();
        assert_eq!(ended[RAX] as i64, UNLESS_HANDLED, "a receive that had ended");
    }

    /// A shell that reads, stopped and put back onto its call before a signal comes, whose handler
    /// does not ask for SA_RESTART.
    #[test]
    fn a_handler_that_comes_first_ends_the_call() {
        let script = "trap 'echo told; exit' USR1; read line; echo ended";
        let (stdin, stdout) = (Stdio::piped(), Stdio::piped());
        let mut shell = Command::new("sh").args(["-c", script]).stdin(stdin).stdout(stdout).spawn().unwrap();
        let tid = shell.id();
        let until = Instant::now() + Duration::from_secs(10);
        let reads =
            || std::fs::read_to_string(format!("/proc/{tid}/syscall")).is_ok_and(|call| call.starts_with("0 0x0 "));
        while !reads() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        inject::seize(tid).unwrap();
        trace::interrupt(tid).unwrap();
        inject::until_stopped(tid, until).unwrap();
        let mut registers = trace::get_general(tid).unwrap();
        (registers[RAX], registers[RIP]) = (registers[ORIG_RAX], registers[RIP] - 2);
        registers[ORIG_RAX] = u64::MAX;
        trace::set_general(tid, &registers).unwrap();
        leave_to_kernel(tid, false).unwrap();
        send_thread_signal(tid, Signal::USR1).unwrap();
        trace::detach(tid).unwrap();
        let stdin = shell.stdin.take();
        let said = shell.wait_with_output().unwrap().stdout;
        drop(stdin);
        assert_eq!(String::from_utf8_lossy(&said), "told\n");
    }
}
