//! What a process and its threads have besides memory and descriptors: signals, limits, timers, credentials, filters, locks.

use super::layout::{Span, Writer};
use super::tasks::one;
use super::{PlanError, unsupported};
use crate::clocks::{Clocks, Now};
use crate::images::Images;
use crate::wire::Message;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a siginfo_t.
const INFO_BYTES: usize = 128;
/// SS_DISABLE.
const NO_STACK: u64 = 2;
const SIG_DFL: u64 = 0;
/// SIGKILL and SIGSTOP have no action.
const UNCATCHABLE: [u64; 2] = [9, 19];
const SECOND: u64 = 1_000_000_000;
const MICROSECOND: u64 = 1000;
/// Clocks that tell time, as opposed to CPU time: clock_gettime(2).
const WALL_CLOCKS: [u64; 6] = [0, 1, 7, 8, 9, 11];
const MONOTONIC: u64 = 1;
const BOOTTIME: u64 = 7;

/// When CRIU read the timers of a process, nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Base {
    /// On the program's own CLOCK_MONOTONIC, which stands in a suspended sleep.
    pub(super) monotonic: u64,
    /// On CLOCK_BOOTTIME, which never does: all clocks but the other one go as it does.
    boottime: u64,
}

impl Base {
    pub(super) fn of(pid: u32, clocks: &Clocks, now: Now) -> Base {
        let read_ns = clocks.read_ns.get(&pid).copied().unwrap_or(0);
        let boottime = read_ns + now.boottime_ns - now.monotonic_ns;
        Base { monotonic: (read_ns + clocks.ahead_ns).max(0) as u64, boottime: boottime.max(0) as u64 }
    }
}

pub(super) fn signals(tc: &Message) -> Result<Vec<Vec<u64>>, PlanError> {
    let mut items = Vec::new();
    let numbers = (1..=64).filter(|n| !UNCATCHABLE.contains(n));
    for (number, action) in numbers.zip(tc.messages(15)?) {
        if action.number(5) != 0 {
            return unsupported("a 32-bit signal handler");
        }
        let (handler, flags, restorer, mask) = (action.number(1), action.number(2), action.number(3), action.number(4));
        if handler != SIG_DFL || flags != 0 {
            items.push(vec![number, handler, flags, restorer, mask]);
        }
    }
    Ok(items)
}

pub(super) fn limits(tc: &Message) -> Result<Vec<Vec<u64>>, PlanError> {
    let all = tc.message(8)?.unwrap_or_default().messages(1)?;
    Ok((0..).zip(all).map(|(resource, limit)| vec![resource, limit.number(1), limit.number(2)]).collect())
}

/// Real, virtual, profiling: (due or left, every) each, nanoseconds.
pub(super) fn intervals(timers: &Message, base_ns: u64) -> Result<[u64; 6], PlanError> {
    let mut words = [0; 6];
    for (which, number) in [(0, 1), (1, 2), (2, 3)] {
        let timer = timers.message(number)?.unwrap_or_default();
        let left = timer.number(3) * SECOND + timer.number(4) * MICROSECOND;
        words[2 * which] = if left > 0 && which == 0 { base_ns + left } else { left };
        words[2 * which + 1] = timer.number(1) * SECOND + timer.number(2) * MICROSECOND;
    }
    Ok(words)
}

pub(super) fn posix_timers(timers: &Message, base: Base) -> Result<Vec<Vec<u64>>, PlanError> {
    let mut items = Vec::new();
    for t in timers.messages(4)? {
        // The clock that the time due is given on; none for what is left of CPU time.
        let (on, base_ns) = match t.number(2) {
            MONOTONIC => (MONOTONIC, base.monotonic),
            clock if WALL_CLOCKS.contains(&clock) => (BOOTTIME, base.boottime),
            _ => (0, 0),
        };
        let left = t.number(9) * SECOND + t.number(10);
        let due = if left > 0 { base_ns + left } else { left };
        let every = t.number(7) * SECOND + t.number(8);
        let thread = t.varint(11).unwrap_or(0);
        items.push(vec![t.number(1), t.number(2), t.number(3), t.number(4), t.number(5), thread, on, due, every]);
    }
    Ok(items)
}

/// `struct thread`.
pub(super) fn thread(writer: &mut Writer, id: u32, core: &Message, tc: &Message) -> Result<Vec<u64>, PlanError> {
    let info = core.message(2)?.unwrap_or_default();
    let thread = core.message(5)?.unwrap_or_default();
    let comm = thread.string(13).or_else(|| tc.string(6)).unwrap_or_default();
    let stack = thread.message(7)?.filter(|s| s.number(3) & NO_STACK == 0).unwrap_or_default();
    let rseq = thread.message(15)?.unwrap_or_default();
    // A sint32 is stored folded: 0, -1, 1, -2 ..
    let nice = thread.number(3);
    let nice = (nice >> 1) ^ (nice & 1).wrapping_neg();
    let Some(creds) = thread.message(10)? else { return unsupported("a thread without credentials") };
    let credentials = credentials(writer, &creds)?;
    let pending = pending(writer, thread.message(9)?)?;
    Ok(vec![
        u64::from(id),
        info.number(1),
        thread.number(1),
        thread.number(2),
        stack.number(1),
        stack.number(2),
        stack.number(3),
        thread.number(8),
        thread.number(4),
        thread.number(5),
        nice,
        writer.string(&comm),
        rseq.number(1),
        rseq.number(2),
        rseq.number(3),
        credentials,
        pending.0,
        pending.1,
    ])
}

/// Signals that wait, each as the kernel has it.
pub(super) fn pending(writer: &mut Writer, queue: Option<Message>) -> Result<Span, PlanError> {
    let mut bytes = Vec::new();
    for signal in queue.unwrap_or_default().messages(1)? {
        match signal.bytes(1) {
            Some(info) if info.len() == INFO_BYTES => bytes.extend_from_slice(info),
            _ => return unsupported("a signal of another kernel"),
        }
    }
    Ok(Span(writer.bytes(&bytes), (bytes.len() / INFO_BYTES) as u64))
}

/// `struct credentials`; says where.
fn credentials(writer: &mut Writer, creds: &Message) -> Result<u64, PlanError> {
    if creds.bytes(15).is_some() || creds.bytes(16).is_some() || creds.bytes(17).is_some() {
        return unsupported("a profile of a security module");
    }
    let groups = creds.varints(14)?;
    let count = groups.len() as u64;
    let groups: Vec<u8> = groups.iter().flat_map(|g| (*g as u32).to_le_bytes()).collect();
    let groups = writer.bytes(&groups);
    let set = |number| -> Result<u64, PlanError> {
        let words = creds.varints(number)?;
        Ok(words.first().copied().unwrap_or(0) | words.get(1).copied().unwrap_or(0) << 32)
    };
    let mut words: Vec<u64> = (1..=8).map(|n| creds.number(n)).collect();
    words.extend([groups, count, set(9)?, set(10)?, set(11)?, set(12)?, set(19)?, creds.number(13), creds.number(18)]);
    Ok(writer.words(&words))
}

/// System call filters: each names the one that was there before it.
#[derive(Debug)]
pub(super) struct Filters(Vec<Message>);

impl Filters {
    pub(super) fn read(images: &Images) -> Result<Filters, PlanError> {
        if images.length("seccomp.img").is_none() {
            return Ok(Filters(Vec::new()));
        }
        Ok(Filters(one(images, "seccomp.img")?.messages(1)?))
    }
}

/// The filter that all threads have. CRIU says so by TSYNC at the leader's and leaves the others' out. One alone is the
/// sandbox's own, under which the restorer can finish; what further filters forbid is not known.
pub(super) fn filter_of(writer: &mut Writer, filters: &Filters, threads: &[(u32, Message)]) -> Result<Span, PlanError> {
    const DISABLED: u64 = 0;
    const FILTER: u64 = 2;
    const TSYNC: u64 = 1;
    let mut all = BTreeSet::new();
    let mut of_all = false;
    for (_, core) in threads {
        let thread = core.message(5)?.unwrap_or_default();
        match (thread.number(11), thread.varint(12).and_then(|last| filters.0.get(last as usize))) {
            (DISABLED, _) if of_all => {}
            (DISABLED, _) => drop(all.insert(None)),
            (FILTER, Some(filter)) if filter.varint(2).is_none() => {
                of_all |= filter.number(3) & TSYNC != 0;
                all.insert(Some((filter.bytes(1).unwrap_or_default(), filter.number(3) & !TSYNC)));
            }
            _ => return unsupported("system call filters of the program's own"),
        }
    }
    match (all.len(), all.first()) {
        (1, Some(None)) => Ok(Span::default()),
        (1, Some(Some((code, flags)))) => {
            let at = writer.bytes(code);
            Ok(writer.list(&[vec![at, code.len() as u64 / 8, *flags]]))
        }
        _ => unsupported("threads with different system call filters"),
    }
}

/// File locks by the process that sets them.
pub(super) fn locks(images: &Images) -> Result<BTreeMap<u32, Vec<Vec<u64>>>, PlanError> {
    let mut by_pid: BTreeMap<u32, Vec<Vec<u64>>> = BTreeMap::new();
    for lock in images.entries_if_any("filelocks.img")? {
        let (kind, kind_of_lock) = (lock.number(1), lock.number(2));
        if !matches!(kind, 1 | 2 | 4) || kind_of_lock > 1 {
            return unsupported("a lease or a mandatory lock");
        }
        by_pid.entry(lock.number(3) as u32).or_default().push(vec![
            kind,
            kind_of_lock,
            lock.number(4),
            lock.number(5),
            lock.number(6),
        ]);
    }
    Ok(by_pid)
}
