//! Waits whose time-out has passed while their thread stood still: the wait ends by it, before
//! anything else is told.
//!
//! A program that waits for events or for a second, and sleeps for an hour, has seen its time-out
//! pass long before the event came that woke it. Made to wait anew with nothing left, the kernel
//! would tell it of the event first, and what it then does with the event it does with the time of
//! an hour ago: lighttpd takes a new connection for one that has been silent for that hour, and
//! closes it. So epoll_wait, poll and select, which can tell of events, return 0 here as they would
//! have. All other calls with time-outs are left to the kernel.

use crate::inject;
use crate::process::{read_memory, write_memory};
use crate::trace::{self, GENERAL};
use std::io;

const R10: usize = 7;
const RAX: usize = 10;
const RDX: usize = 12;
const RSI: usize = 13;
const RDI: usize = 14;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The kernel's -ERESTARTNOHAND and -ERESTART_RESTARTBLOCK: the call is restarted when the thread
/// goes on.
const RESTARTS: [i64; 2] = [-514, -516];
/// struct pollfd of poll(2), bytes, and where its answer lies.
const POLLFD: usize = 8;
const REVENTS: usize = 6;
/// More descriptors than that are not waited for, bytes of what describes them.
const MOST: usize = 1 << 20;

/// What such a call has to say in memory when it returns 0.
#[derive(Debug, PartialEq, Eq)]
enum Says {
    Nothing,
    /// No answer in each struct pollfd.
    Revents {
        at: u64,
        bytes: usize,
    },
    /// Empty sets, at these addresses (0: none).
    Sets {
        at: [u64; 3],
        bytes: usize,
    },
}

fn says(call: u64, registers: &[u64; GENERAL]) -> Option<Says> {
    let count = usize::try_from(registers[if matches!(call, 7 | 271) { RSI } else { RDI }] & 0xffff_ffff).ok()?;
    let says = match call {
        232 | 281 | 441 => return Some(Says::Nothing),
        7 | 271 => Says::Revents { at: registers[RDI], bytes: count * POLLFD },
        23 | 270 => Says::Sets { at: [registers[RSI], registers[RDX], registers[R10]], bytes: count.div_ceil(64) * 8 },
        _ => return None,
    };
    let bytes = match says {
        Says::Nothing => 0,
        Says::Revents { bytes, .. } | Says::Sets { bytes, .. } => bytes,
    };
    (bytes <= MOST).then_some(says)
}

/// The call that a stopped thread goes on with, and where it stands after it.
fn goes_on_with(registers: &[u64; GENERAL], code: impl FnOnce(u64) -> Option<[u8; 2]>) -> Option<(u64, u64)> {
    if !inject::is_64_bit(registers) {
        return None;
    }
    let (ip, result, orig) = (registers[RIP], registers[RAX] as i64, registers[ORIG_RAX] as i64);
    if RESTARTS.contains(&result) && orig >= 0 {
        return Some((orig as u64, ip));
    }
    let to_be_made = says(registers[RAX], registers).is_some() && code(ip)? == SYSCALL;
    to_be_made.then_some((registers[RAX], ip + SYSCALL.len() as u64))
}

/// Lets the wait of a stopped thread, which it would go on with, end by its time-out; false if it
/// is in no such wait. Faults of its process must be served.
///
/// # Errors
/// ESRCH when it has died or is not ours; EFAULT for memory that the call could not have written
/// either.
pub fn end_wait(tid: u32) -> io::Result<bool> {
    let mut registers = trace::get_general(tid)?;
    let code = |ip| {
        let mut code = [0u8; 2];
        read_memory(tid, ip, &mut code).is_ok().then_some(code)
    };
    let Some((call, ip)) = goes_on_with(&registers, code) else { return Ok(false) };
    match says(call, &registers) {
        None => return Ok(false),
        Some(Says::Nothing) => {}
        Some(Says::Revents { at, bytes }) => {
            let mut fds = vec![0u8; bytes];
            read_memory(tid, at, &mut fds)?;
            fds.chunks_exact_mut(POLLFD).for_each(|fd| fd[REVENTS..].fill(0));
            write_memory(tid, at, &fds)?;
        }
        Some(Says::Sets { at, bytes }) => {
            at.into_iter().filter(|at| *at != 0).try_for_each(|at| write_memory(tid, at, &vec![0; bytes]))?;
        }
    }
    (registers[RAX], registers[ORIG_RAX], registers[RIP]) = (0, u64::MAX, ip);
    trace::set_general(tid, &registers)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(call: u64, result: i64) -> [u64; GENERAL] {
        let mut registers = [0; GENERAL];
        (registers[ORIG_RAX], registers[RAX], registers[RIP], registers[17]) = (call, result as u64, 0x1000, 0x33);
        (registers[RDI], registers[RSI], registers[RDX]) = (70, 0x7000, 0x8000);
        registers
    }

    #[test]
    fn only_waits_for_events_end() {
        let syscall = |_| Some(SYSCALL);
        assert_eq!(goes_on_with(&standing(7, -516), syscall), Some((7, 0x1000)), "broken off");
        assert_eq!(goes_on_with(&standing(u64::MAX, 232), syscall), Some((232, 0x1002)), "to be made");
        assert_eq!(goes_on_with(&standing(232, 232), syscall), Some((232, 0x1002)), "to be made again");
        assert_eq!(goes_on_with(&standing(232, 7), |_| Some([0x90; 2])), None, "7 events");
        assert_eq!(goes_on_with(&standing(7, 0), syscall), None, "read(2)");
        assert_eq!(says(202, &standing(202, -516)), None, "a futex tells of nothing else");
        assert_eq!(says(270, &standing(270, -514)), Some(Says::Sets { at: [0x7000, 0x8000, 0], bytes: 16 }));
        assert_eq!(says(7, &standing(7, -516)), Some(Says::Revents { at: 70, bytes: 0x7000 * 8 }));
    }
}
