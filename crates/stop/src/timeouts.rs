//! Relative time-outs of calls that a stop breaks off: they end when they would have ended, however
//! often that happens.
//!
//! Three kinds. select, pselect6 and ppoll have what was left when they were broken off in the
//! program's own memory, where the kernel has put it; the time that the thread stood still is taken
//! off. epoll_wait, epoll_pwait, epoll_pwait2, sigtimedwait, semtimedop and io_getevents end with
//! EINTR and are called again, with what is left and a record beside it ([`kip_sys::ends`]), from
//! the stop on. poll, nanosleep, clock_nanosleep and FUTEX_WAIT are restarted by the kernel, which
//! knows when they end but does not tell: seen from outside the thread is in restart_syscall, and a
//! proc that is parked then has lost which call that was. So they too are called again with a
//! record, when they are let go; if we die before, the kernel's own end holds. Calls that
//! epoll_wait, epoll_pwait and poll are exchanged for take a struct timespec instead of
//! milliseconds.
//!
//! A call that obeys the time-out of its socket (SO_RCVTIMEO, SO_SNDTIMEO) ends with EINTR too; the
//! socket has what is left for as long as the thread enters the call, and the call a mark that its
//! record belongs to it.
//!
//! A wait for events whose time-out has passed meanwhile ends by it ([`timed`]).
//!
//! The pager reckons the end of a call from when its thread last ran before the stop; where the
//! kernel does not say that, from the timer that is gone when the thread has stopped ([`Armed`]).

use kip_sys::armed::Armed;
use kip_sys::ends::{self, Call, End};
use kip_sys::inject;
use kip_sys::process::{read_memory, write_memory};
use kip_sys::ran::{CpuClocks, monotonic_ns};
use kip_sys::restart;
use kip_sys::shortened::{Shortened, Wait};
use kip_sys::status::{Status, threads};
use kip_sys::trace::GENERAL;
use kip_sys::{timed, trace};
use std::collections::HashMap;
use std::io;
use std::time::Duration;

/// Where PTRACE_GETREGS has the call's arguments: rdi rsi rdx r10 r8 r9.
const ARGUMENTS: [usize; 6] = [14, 13, 12, 7, 9, 8];
const R10: usize = 7;
const R9: usize = 8;
const R8: usize = 9;
const RAX: usize = 10;
const RDX: usize = 12;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;
const RSP: usize = 19;
/// Bytes of the `syscall` instruction.
const SYSCALL_LENGTH: u64 = 2;
const SECOND: i64 = 1_000_000_000;
const MILLISECOND: i64 = 1_000_000;

/// A call that is to be restarted if no handler runs: the kernel's -ERESTARTNOHAND.
const RESTART: i64 = -514;
/// That, and a call that the kernel restarts with what it remembers: -ERESTART_RESTARTBLOCK.
const RESTARTS: [i64; 2] = [RESTART, -516];

const POLL: u64 = 7;
const SELECT: u64 = 23;
const FUTEX: u64 = 202;
/// Its operation that ends at an absolute time.
const WAIT_BITSET: u64 = 9;
const EPOLL_WAIT: u64 = 232;
const PSELECT6: u64 = 270;
const PPOLL: u64 = 271;
const EPOLL_PWAIT: u64 = 281;
const EPOLL_PWAIT2: u64 = 441;

/// What is known of a thread's wait before its stop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Before {
    /// The call.
    call: Call,
    /// Since when it waits, nanoseconds of CLOCK_MONOTONIC; none if that cannot be told.
    since: Option<i64>,
    /// How often it had waited by then.
    pub(crate) waits: u64,
}

/// That of each thread that waits in such a call.
pub(crate) type Since = HashMap<u32, Before>;

/// Register with the address of a time-out that the kernel updates, and nanoseconds of its second
/// half's unit.
fn updated(call: u64) -> Option<(usize, i64)> {
    match call {
        SELECT => Some((R8, 1_000)),
        PSELECT6 => Some((R8, 1)),
        PPOLL => Some((RDX, 1)),
        _ => None,
    }
}

/// The call that a stopped thread stands in.
fn call_of(registers: &[u64; GENERAL]) -> Call {
    let [a, b, c, d, e, f] = ARGUMENTS.map(|register| registers[register]);
    [registers[ORIG_RAX], a, b, c, d, e, f, registers[RSP]]
}

/// Milliseconds of a time-out in a register; none for a call without one.
fn milliseconds(call: &Call) -> Option<i64> {
    let value = match call[0] {
        POLL => call[3],
        EPOLL_WAIT | EPOLL_PWAIT => call[4],
        _ => return None,
    };
    let value = i64::from(value as i32);
    (value > 0).then_some(value)
}

/// Whether a call ends by a relative time-out that the kernel does not update for its program, or
/// may do so because of its socket.
fn is_timed(call: &Call) -> bool {
    let [number, arguments @ .., _] = call;
    let pointed = || ends::relative_timespec(*number, arguments).is_some_and(|index| arguments[index] != 0);
    let socket = ends::socket_call(*number).is_some();
    milliseconds(call).is_some() || socket || !matches!(*number, SELECT | PSELECT6) && pointed()
}

/// Which threads of these processes wait in such a call, and since when. To be asked before they
/// are stopped.
pub(crate) fn since(pids: &[u32]) -> Since {
    let mut clocks = CpuClocks::default();
    let waiting = |tid| {
        let before = before(tid)?;
        Some((tid, Before { since: Some(clocks.last_ran(tid)?), ..before }))
    };
    pids.iter().flat_map(|pid| threads(*pid).unwrap_or_default()).filter_map(waiting).collect()
}

/// What is known of the wait of a thread but since when it waits; none if it is in no such call.
pub(crate) fn before(tid: u32) -> Option<Before> {
    let text = std::fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?;
    let call = parse(&text).filter(is_timed)?;
    Some(Before { call, since: None, waits: Status::read(tid).ok()?.waits()? })
}

/// Number, arguments and stack pointer of proc_pid_syscall(5); none for a thread that runs.
fn parse(text: &str) -> Option<Call> {
    let mut words = text.split_ascii_whitespace();
    let mut call = [words.next()?.parse().ok()?; 8];
    for word in &mut call[1..] {
        *word = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some(call)
}

/// When the call of a thread that has just stopped ends; none if it has no time-out, or one that
/// the kernel updates. `before` is what [`since`] has found, if the thread slept from then on; if
/// that is no time, `armed` has what the thread was to be woken by. `mended`: it is put back onto
/// its call. Faults must be served.
///
/// # Errors
/// ESRCH when it has died; EFAULT for a time-out that cannot be read.
pub(crate) fn end(tid: u32, mended: bool, before: Option<Before>, armed: Option<&Armed>) -> io::Result<Option<End>> {
    let registers = trace::get_general(tid)?;
    let call = call_of(&registers);
    if !(mended || RESTARTS.contains(&(registers[RAX] as i64))) || !is_timed(&call) {
        return Ok(None);
    }
    if (call[0] == POLL || ends::socket_call(call[0]).is_some()) && has_own_filters(tid) {
        return Ok(None);
    }
    let read = |at: u64, bytes: &mut [u8]| read_memory(tid, at, bytes).is_ok();
    if let Some(end) = ends::of(&call, &read) {
        return Ok(Some(end));
    }
    let now = monotonic_ns();
    let before = before.filter(|before| before.call == call);
    // A thread that has run since the look began this call after it: late by what the look took,
    // and never early.
    let since = before.and_then(|before| before.since).unwrap_or(now);
    let [number, arguments @ .., _] = call;
    let whole = match (milliseconds(&call), ends::relative_timespec(number, &arguments)) {
        _ if number == PPOLL => return Ok(None),
        // Only one with a time-out ends with EINTR for a stop.
        _ if mended && ends::socket_call(number).is_some() => {
            match socket_wait(tid, &call).map(|w| w.whole()).transpose()? {
                Some(Some(whole)) => whole.as_nanos() as i64,
                _ => return Ok(None),
            }
        }
        (Some(ms), _) => ms * MILLISECOND,
        (None, Some(index)) => read_time(tid, arguments[index], 1)?,
        (None, None) => return Ok(None),
    };
    if let Some(left) = remainder(tid, number, &arguments)? {
        let all = if ends::remainder(number, &arguments) == arguments.first().copied() {
            left + (now - since)
        } else {
            whole
        };
        return Ok(Some(End { at_ns: now + left, whole_ns: all.max(left) }));
    }
    let latest = since.saturating_add(whole);
    let gone = armed.filter(|_| before.is_some()).map(Armed::gone).unwrap_or_default();
    // The last of several: never early.
    let at_ns = gone.into_iter().filter(|at| (now..latest).contains(at)).max().unwrap_or(latest);
    Ok(Some(End { at_ns, whole_ns: whole }))
}

/// Whether a program filters its own calls, seccomp(2): it may refuse one that its call is
/// exchanged for, or a descriptor with a mark. Every program has the filter of its sandbox.
pub(crate) fn has_own_filters(tid: u32) -> bool {
    Status::read(tid).is_ok_and(|status| status.number("Seccomp_filters:").is_some_and(|count| count > 1))
}

/// What a thread waits for in a call that obeys the time-out of its socket.
fn socket_wait(tid: u32, call: &Call) -> Option<Wait> {
    let sending = ends::socket_call(call[0])?;
    Some(Wait { tid, call: call[0], fd: call[1] as i32, sending })
}

/// Gives the socket that a stopped thread waits for what is left of its time-out; none if it waits
/// for no socket.
///
/// # Errors
/// The thread has ended, or has closed the socket.
pub(crate) fn shorten_socket(tid: u32, end: End) -> io::Result<Option<Shortened>> {
    let Some(wait) = socket_wait(tid, &call_of(&trace::get_general(tid)?)) else { return Ok(None) };
    let ns = |ns: i64| Duration::from_nanos(ns.max(0) as u64);
    Shortened::shorten(wait, ns(end.whole_ns), ns(end.at_ns - monotonic_ns())).map(Some)
}

/// Puts a stopped thread that the kernel would have restart a wait with an absolute end back onto
/// that call itself: seen from outside it would be in restart_syscall. And brings the word of a
/// lock for which it waits.
///
/// # Errors
/// ESRCH when it has died.
pub(crate) fn make_again(tid: u32) -> io::Result<()> {
    let mut registers = trace::get_general(tid)?;
    let [number, arguments @ .., _] = call_of(&registers);
    if let Some(word) = ends::lock_word(number, &arguments) {
        // A word that is not there is the kernel's to complain of.
        let _ = read_memory(tid, word, &mut [0; 4]);
    }
    if number == FUTEX && arguments[1] & 0x7f == WAIT_BITSET && registers[RAX] as i64 == RESTARTS[1] {
        registers[RIP] -= SYSCALL_LENGTH;
        registers[RAX] = FUTEX;
        trace::set_general(tid, &registers)?;
    }
    Ok(())
}

/// What the kernel says is left of a sleep. It may have written that over the whole time: sleep(3)
/// gives it one place for both.
fn remainder(tid: u32, number: u64, arguments: &[u64; 6]) -> io::Result<Option<i64>> {
    ends::remainder(number, arguments).map(|at| read_time(tid, at, 1)).transpose()
}

/// Lets a stopped thread make the call that it was broken off in again, with what is left of its
/// time-out and a record of its end. A packet that came at `packet_ns` (CLOCK_MONOTONIC), before
/// that end, is given to the program first. Faults must be served.
///
/// # Errors
/// ESRCH when it has died; EFAULT for memory below its stack that cannot be written.
pub(crate) fn begin_anew(tid: u32, end: End, packet_ns: Option<i64>) -> io::Result<()> {
    let left = end.at_ns - monotonic_ns();
    if left <= 0 && packet_ns.is_none_or(|packet_ns| end.at_ns <= packet_ns) && timed::end_wait(tid)? {
        return Ok(());
    }
    let mut registers = trace::get_general(tid)?;
    // Its wait may have been ended already, when another look found it over, or by a signal.
    if !inject::in_call(&registers) || !RESTARTS.contains(&(registers[RAX] as i64)) && !restart::stands(tid)? {
        return Ok(());
    }
    if matches!(registers[ORIG_RAX], EPOLL_WAIT | EPOLL_PWAIT) && has_own_filters(tid) {
        // Rounded up: early is never allowed.
        registers[R10] = ((left.max(0) + MILLISECOND - 1) / MILLISECOND) as u64;
        return trace::set_general(tid, &registers);
    }
    let place = ends::place(registers[RSP]);
    write_memory(tid, place, &ends::encode(left, end, place))?;
    if RESTARTS.contains(&(registers[RAX] as i64)) {
        registers[RIP] -= SYSCALL_LENGTH;
    }
    point(&mut registers, place);
    trace::set_general(tid, &registers)
}

/// Fetches what a stopped thread needs to make its call again: where its record goes, and the
/// instruction that makes the call.
pub(crate) fn fetch_for_call(tid: u32) {
    let Ok(registers) = trace::get_general(tid) else { return };
    for at in [ends::place(registers[RSP]), registers[RIP]] {
        // What cannot be read is complained of when it is needed.
        let _ = read_memory(tid, at, &mut [0]);
    }
}

/// Points the call of `registers` to the time-out at `place`.
fn point(registers: &mut [u64; GENERAL], place: u64) {
    let number = match registers[ORIG_RAX] {
        POLL => {
            (registers[RDX], registers[R10], registers[R8]) = (place, 0, 0);
            PPOLL
        }
        EPOLL_WAIT => {
            (registers[R10], registers[R8], registers[R9]) = (place, 0, 0);
            EPOLL_PWAIT2
        }
        EPOLL_PWAIT => {
            registers[R10] = place;
            EPOLL_PWAIT2
        }
        number => {
            let arguments = ARGUMENTS.map(|register| registers[register]);
            if ends::socket_call(number).is_some() {
                registers[ARGUMENTS[0]] = ends::marked(arguments[0]);
            }
            if let Some(index) = ends::relative_timespec(number, &arguments) {
                registers[ARGUMENTS[index]] = place;
            }
            number
        }
    };
    (registers[RAX], registers[ORIG_RAX]) = (number, number);
}

/// Takes the time that a thread stood still off the time-out of a select or ppoll that begins anew:
/// `ns` nanoseconds, or since the thread last ran, which is when it was interrupted, if that is
/// longer.
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
        return write_memory(pid, at, &[0; 16]);
    }
    let left = left.max(unit);
    let bytes: Vec<u8> = [left / SECOND, left % SECOND / unit].iter().flat_map(|w| w.to_le_bytes()).collect();
    write_memory(pid, at, &bytes)
}

fn read_time(pid: u32, at: u64, unit: i64) -> io::Result<i64> {
    let mut bytes = [0u8; 16];
    read_memory(pid, at, &mut bytes)?;
    let word = |at: usize| i64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    Ok(word(0).saturating_mul(SECOND).saturating_add(word(8).saturating_mul(unit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_with_a_time_out_are_timed() {
        let wait = |call: u64, rdx: &str, r10: &str| {
            let text = format!("{call} 0x5 0x0 {rdx} {r10} 0x0 0x8 0x7ffe1000 0x7f00\n");
            parse(&text).filter(is_timed).map(|call| call[0])
        };
        assert_eq!(wait(232, "0x40", "0x3e8"), Some(232));
        assert_eq!(wait(281, "0x40", "0xffffffff"), None, "for ever");
        assert_eq!(wait(441, "0x40", "0x7ffe2000"), Some(441));
        assert_eq!((wait(128, "0x0", "0x8"), wait(128, "0x7ffe2000", "0x8")), (None, Some(128)));
        assert_eq!((wait(7, "0x40", "0x0"), wait(7, "0xffffffff", "0x0")), (Some(7), None));
        assert_eq!((wait(202, "0x1", "0x7ffe2000"), wait(202, "0x1", "0x0")), (Some(202), None));
        assert_eq!((wait(230, "0x7ffe2000", "0x0"), wait(23, "0x1", "0x1")), (None, None), "CPU time; updated");
        assert_eq!((parse("running\n"), parse("")), (None, None));
    }

    #[test]
    fn a_call_is_pointed_to_its_time_out() {
        let pointed = |call: u64| {
            let mut registers = [0; GENERAL];
            (registers[ORIG_RAX], registers[RAX], registers[R10], registers[RDX]) = (call, call, 70, 80);
            point(&mut registers, 0x7000);
            assert_eq!(registers[RAX], registers[ORIG_RAX]);
            (registers[RAX], registers[R10], registers[RDX])
        };
        assert_eq!(pointed(POLL), (PPOLL, 0, 0x7000));
        assert_eq!(pointed(EPOLL_WAIT), (EPOLL_PWAIT2, 0x7000, 80));
        assert_eq!(pointed(EPOLL_PWAIT), (EPOLL_PWAIT2, 0x7000, 80));
        assert_eq!(pointed(220), (220, 0x7000, 80));
        assert_eq!(pointed(128), (128, 70, 0x7000));
    }
}
