//! Time-outs of calls that a stop breaks off and that begin anew when the thread goes on: what is left of them, not all.
//!
//! Most calls need nothing of the kind: poll, nanosleep and futex are restarted by the kernel, which knows when they end.
//! select, pselect6 and ppoll have what was left when they were broken off in the program's own memory, where the kernel
//! has put it; the time that the thread stood still is missing. The others end with EINTR and are called again: epoll_wait,
//! epoll_pwait (milliseconds in a register), epoll_pwait2, sigtimedwait, semtimedop (a struct timespec, which is the
//! program's: what is left is written below its stack's red zone, and the register points there for this one call). A receive
//! with SO_RCVTIMEO waits its whole time anew. A wait for events whose time-out has passed meanwhile ends by it ([`timed`]).

use kip_sys::process::{read_memory, write_memory};
use kip_sys::ran::{CpuClocks, monotonic_ns};
use kip_sys::{timed, trace};
use std::collections::HashMap;
use std::io;

const ORIG_RAX: usize = 15;
const R10: usize = 7;
const RDX: usize = 12;
const RSP: usize = 19;
/// Distance of our time-out below the stack pointer, bytes: past the 128 bytes of the red zone (x86-64 psABI 3.2.2).
const BELOW: u64 = 512;
/// poll(2).
pub(crate) const POLL: u64 = 7;
const SECOND: i64 = 1_000_000_000;

/// A call that is to be restarted if no handler runs: the kernel's -ERESTARTNOHAND.
const RESTART: i64 = -514;
const RAX: usize = 10;
const R8: usize = 9;

/// Register with the address of a time-out that the kernel updates, and nanoseconds of its second half's unit.
fn updated(call: u64) -> Option<(usize, i64)> {
    match call {
        23 => Some((R8, 1_000)),
        270 => Some((R8, 1)),
        271 => Some((RDX, 1)),
        _ => None,
    }
}

/// Takes the time that a thread stood still off the time-out of a select or ppoll that begins anew: `ns` nanoseconds, or
/// since the thread last ran, which is when it was interrupted, if that is longer.
///
/// # Errors
/// ESRCH when it has died; EFAULT for a time-out that cannot be written.
pub(crate) fn stood_still(pid: u32, tid: u32, ns: i64) -> io::Result<()> {
    let registers = trace::get_general(tid)?;
    let Some((register, unit)) = updated(registers[ORIG_RAX]) else { return Ok(()) };
    let at = registers[register];
    if registers[RAX] as i64 != RESTART || at == 0 {
        return Ok(());
    }
    let left = read_time(pid, at, unit)?;
    if left == 0 {
        return Ok(());
    }
    let ns = CpuClocks::default().last_ran(tid).map_or(ns, |ran| ns.max(monotonic_ns() - ran));
    // Zero would be never to wait, which is right; but the kernel does not update it then.
    let left = left - ns;
    if left <= 0 && timed::end_wait(tid)? {
        return Ok(());
    }
    let left = left.max(unit);
    let bytes: Vec<u8> = [left / SECOND, left % SECOND / unit].iter().flat_map(|w| w.to_le_bytes()).collect();
    write_memory(pid, at, &bytes)
}

/// Lets the poll of a stopped thread end if its time-out has passed; `since` is when it began to wait. The kernel knows the
/// end of a poll, but tells of events first.
///
/// # Errors
/// ESRCH when it has died; EFAULT for descriptors that cannot be written.
pub(crate) fn end_poll(tid: u32, since: i64) -> io::Result<()> {
    let registers = trace::get_general(tid)?;
    let whole = i64::from(registers[RDX] as i32);
    if registers[ORIG_RAX] == POLL && whole > 0 && monotonic_ns() - since >= whole * 1_000_000 {
        timed::end_wait(tid)?;
    }
    Ok(())
}

fn read_time(pid: u32, at: u64, unit: i64) -> io::Result<i64> {
    let mut bytes = [0u8; 16];
    read_memory(pid, at, &mut bytes)?;
    let word = |at: usize| i64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    Ok(word(0).saturating_mul(SECOND).saturating_add(word(8).saturating_mul(unit)))
}

/// How a call takes its time-out.
enum Takes {
    Millis,
    Timespec(usize),
}

fn takes(call: u64) -> Option<Takes> {
    match call {
        232 | 281 => Some(Takes::Millis),
        441 | 220 => Some(Takes::Timespec(R10)),
        128 => Some(Takes::Timespec(RDX)),
        _ => None,
    }
}

/// Which threads of these processes wait in such a call: its number, and since when, nanoseconds of CLOCK_MONOTONIC. To
/// be asked before they are stopped.
pub(crate) fn since(pids: &[u32]) -> HashMap<u32, (u64, i64)> {
    let mut clocks = CpuClocks::default();
    let mut found = HashMap::new();
    for tid in pids.iter().flat_map(|pid| crate::stop::threads(*pid).unwrap_or_default()) {
        let text = std::fs::read_to_string(format!("/proc/{tid}/syscall")).unwrap_or_default();
        if let Some(call) = timed_call(&text)
            && let Some(since) = clocks.last_ran(tid)
        {
            found.insert(tid, (call, since));
        }
    }
    found
}

/// The call of proc_pid_syscall(5), if it is one of ours and has a time-out.
fn timed_call(text: &str) -> Option<u64> {
    let mut words = text.split_ascii_whitespace();
    let call = words.next()?.parse().ok()?;
    let mut argument = |n| u64::from_str_radix(words.nth(n)?.strip_prefix("0x")?, 16).ok();
    if call == POLL {
        return (argument(2)? as i32 > 0).then_some(call);
    }
    let timed = match takes(call)? {
        Takes::Millis => argument(3)? as i32 > 0,
        Takes::Timespec(RDX) => argument(2)? != 0,
        Takes::Timespec(_) => argument(3)? != 0,
    };
    timed.then_some(call)
}

/// Gives a stopped thread that is about to begin its call anew what is left of the time-out. Faults must be served.
///
/// # Errors
/// ESRCH when it has died; EFAULT for a time-out that cannot be read.
pub(crate) fn shorten(pid: u32, tid: u32, since: i64) -> io::Result<()> {
    let mut registers = trace::get_general(tid)?;
    let waited = (monotonic_ns() - since).max(0);
    match takes(registers[ORIG_RAX]) {
        Some(Takes::Millis) => {
            let whole = i64::from(registers[R10] as i32);
            if whole <= 0 {
                return Ok(());
            }
            if waited >= whole * 1_000_000 && timed::end_wait(tid)? {
                return Ok(());
            }
            // Rounded up: early is never allowed.
            registers[R10] = (((whole * 1_000_000 - waited).max(0) + 999_999) / 1_000_000) as u64;
        }
        Some(Takes::Timespec(register)) => {
            let at = registers[register];
            if at == 0 {
                return Ok(());
            }
            let left = (read_time(pid, at, 1)? - waited).max(0);
            if left == 0 && timed::end_wait(tid)? {
                return Ok(());
            }
            let bytes: Vec<u8> = [left / SECOND, left % SECOND].iter().flat_map(|w| w.to_le_bytes()).collect();
            registers[register] = (registers[RSP] - BELOW) & !15;
            write_memory(pid, registers[register], &bytes)?;
        }
        None => return Ok(()),
    }
    trace::set_general(tid, &registers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_with_a_time_out_are_timed() {
        let wait = |call: u64, rdx: &str, r10: &str| {
            timed_call(&format!("{call} 0x5 0x7ffe {rdx} {r10} 0x0 0x8 0x7ffe1000 0x7f00\n"))
        };
        assert_eq!(wait(232, "0x40", "0x3e8"), Some(232));
        assert_eq!(wait(281, "0x40", "0xffffffff"), None, "for ever");
        assert_eq!(wait(441, "0x40", "0x7ffe2000"), Some(441));
        assert_eq!((wait(128, "0x0", "0x8"), wait(128, "0x7ffe2000", "0x8")), (None, Some(128)));
        assert_eq!((wait(7, "0x40", "0x0"), wait(7, "0xffffffff", "0x0")), (Some(7), None));
        assert_eq!((timed_call("running\n"), timed_call("")), (None, None));
    }
}
