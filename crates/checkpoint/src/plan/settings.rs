//! What a process and its threads have besides memory and descriptors: signals, limits, timers,
//! credentials, locks.

use super::layout::{Span, Writer};
use super::{PlanError, unsupported};
use kip_clocks::{Clocks, Now};
use kip_criu_images::fields::{
    core_entry, creds_entry, file_lock_entry, itimer_entry, posix_timer_entry, rlimit_entry, rseq_entry, sa_entry,
    siginfo_entry, signal_queue_entry, task_core_entry, task_rlimits_entry, task_timers_entry, thread_core_entry,
    thread_info_x86, thread_sas_entry,
};
use kip_criu_images::{Images, Message};
use std::collections::BTreeMap;

/// Bytes of a siginfo_t.
const INFO_BYTES: usize = 128;
/// SS_DISABLE.
const NO_STACK: u64 = 2;
const SIG_DFL: u64 = 0;
/// SIGKILL and SIGSTOP have no action.
const UNCATCHABLE: [u64; 2] = [9, 19];
const SECOND: u64 = 1_000_000_000;
const MICROSECOND: u64 = 1000;
/// Clocks of real time, not of CPU time: clock_gettime(2).
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
    for (number, action) in numbers.zip(tc.messages(task_core_entry::SIGACTIONS)?) {
        if action.number(sa_entry::COMPAT_SIGACTION) != 0 {
            return unsupported("a 32-bit signal handler");
        }
        let (handler, flags) = (action.number(sa_entry::SIGACTION), action.number(sa_entry::FLAGS));
        let (restorer, mask) = (action.number(sa_entry::RESTORER), action.number(sa_entry::MASK));
        if handler != SIG_DFL || flags != 0 {
            items.push(vec![number, handler, flags, restorer, mask]);
        }
    }
    Ok(items)
}

pub(super) fn limits(tc: &Message) -> Result<Vec<Vec<u64>>, PlanError> {
    let all = tc.message(task_core_entry::RLIMITS)?.unwrap_or_default().messages(task_rlimits_entry::RLIMITS)?;
    let words = |(resource, limit): (u64, Message)| {
        vec![resource, limit.number(rlimit_entry::CUR), limit.number(rlimit_entry::MAX)]
    };
    Ok((0..).zip(all).map(words).collect())
}

/// Real, virtual, profiling: (due or left, every) each, nanoseconds.
pub(super) fn intervals(timers: &Message, base_ns: u64) -> Result<[u64; 6], PlanError> {
    let mut words = [0; 6];
    let fields = [task_timers_entry::REAL, task_timers_entry::VIRT, task_timers_entry::PROF];
    for (which, number) in fields.into_iter().enumerate() {
        let timer = timers.message(number)?.unwrap_or_default();
        let left = timer.number(itimer_entry::VSEC) * SECOND + timer.number(itimer_entry::VUSEC) * MICROSECOND;
        words[2 * which] = if left > 0 && which == 0 { base_ns + left } else { left };
        let every = timer.number(itimer_entry::ISEC) * SECOND + timer.number(itimer_entry::IUSEC) * MICROSECOND;
        words[2 * which + 1] = every;
    }
    Ok(words)
}

pub(super) fn posix_timers(timers: &Message, base: Base) -> Result<Vec<Vec<u64>>, PlanError> {
    let mut items = Vec::new();
    for t in timers.messages(task_timers_entry::POSIX)? {
        // The clock that the time due is given on; none for what is left of CPU time.
        let (on, base_ns) = match t.number(posix_timer_entry::CLOCK_ID) {
            MONOTONIC => (MONOTONIC, base.monotonic),
            clock if WALL_CLOCKS.contains(&clock) => (BOOTTIME, base.boottime),
            _ => (0, 0),
        };
        let left = t.number(posix_timer_entry::VSEC) * SECOND + t.number(posix_timer_entry::VNSEC);
        let due = if left > 0 { base_ns + left } else { left };
        let every = t.number(posix_timer_entry::ISEC) * SECOND + t.number(posix_timer_entry::INSEC);
        let thread = t.varint(posix_timer_entry::NOTIFY_THREAD_ID).unwrap_or(0);
        items.push(vec![
            t.number(posix_timer_entry::IT_ID),
            t.number(posix_timer_entry::CLOCK_ID),
            t.number(posix_timer_entry::SI_SIGNO),
            t.number(posix_timer_entry::IT_SIGEV_NOTIFY),
            t.number(posix_timer_entry::SIVAL_PTR),
            thread,
            on,
            due,
            every,
        ]);
    }
    Ok(items)
}

/// `struct thread`.
pub(super) fn thread(writer: &mut Writer, id: u32, core: &Message, tc: &Message) -> Result<Vec<u64>, PlanError> {
    let info = core.message(core_entry::THREAD_INFO)?.unwrap_or_default();
    let thread = core.message(core_entry::THREAD_CORE)?.unwrap_or_default();
    let comm = thread.string(thread_core_entry::COMM).or_else(|| tc.string(task_core_entry::COMM)).unwrap_or_default();
    let stack = thread.message(thread_core_entry::SAS)?;
    let stack = stack.filter(|s| s.number(thread_sas_entry::SS_FLAGS) & NO_STACK == 0).unwrap_or_default();
    let rseq = thread.message(thread_core_entry::RSEQ_ENTRY)?.unwrap_or_default();
    // A sint32 is stored folded: 0, -1, 1, -2 ..
    let nice = thread.number(thread_core_entry::SCHED_NICE);
    let nice = (nice >> 1) ^ (nice & 1).wrapping_neg();
    let Some(creds) = thread.message(thread_core_entry::CREDS)? else {
        return unsupported("a thread without credentials");
    };
    let credentials = credentials(writer, &creds)?;
    let pending = pending(writer, thread.message(thread_core_entry::SIGNALS_P)?)?;
    Ok(vec![
        u64::from(id),
        info.number(thread_info_x86::CLEAR_TID_ADDR),
        thread.number(thread_core_entry::FUTEX_RLA),
        thread.number(thread_core_entry::FUTEX_RLA_LEN),
        stack.number(thread_sas_entry::SS_SP),
        stack.number(thread_sas_entry::SS_SIZE),
        stack.number(thread_sas_entry::SS_FLAGS),
        thread.number(thread_core_entry::PDEATH_SIG),
        thread.number(thread_core_entry::SCHED_POLICY),
        thread.number(thread_core_entry::SCHED_PRIO),
        nice,
        writer.string(&comm),
        rseq.number(rseq_entry::RSEQ_ABI_POINTER),
        rseq.number(rseq_entry::RSEQ_ABI_SIZE),
        rseq.number(rseq_entry::SIGNATURE),
        credentials,
        pending.0,
        pending.1,
    ])
}

/// Signals that wait, each as the kernel has it.
pub(super) fn pending(writer: &mut Writer, queue: Option<Message>) -> Result<Span, PlanError> {
    let mut bytes = Vec::new();
    for signal in queue.unwrap_or_default().messages(signal_queue_entry::SIGNALS)? {
        match signal.bytes(siginfo_entry::SIGINFO) {
            Some(info) if info.len() == INFO_BYTES => bytes.extend_from_slice(info),
            _ => return unsupported("a signal of another kernel"),
        }
    }
    Ok(Span(writer.bytes(&bytes), (bytes.len() / INFO_BYTES) as u64))
}

/// `struct credentials`; says where.
fn credentials(writer: &mut Writer, creds: &Message) -> Result<u64, PlanError> {
    let profiles = [creds_entry::LSM_PROFILE, creds_entry::LSM_SOCKCREATE, creds_entry::APPARMOR_DATA];
    if profiles.into_iter().any(|field| creds.bytes(field).is_some()) {
        return unsupported("a profile of a security module");
    }
    let groups = creds.varints(creds_entry::GROUPS)?;
    let count = groups.len() as u64;
    let groups: Vec<u8> = groups.iter().flat_map(|g| (*g as u32).to_le_bytes()).collect();
    let groups = writer.bytes(&groups);
    let set = |number| -> Result<u64, PlanError> {
        let words = creds.varints(number)?;
        Ok(words.first().copied().unwrap_or(0) | words.get(1).copied().unwrap_or(0) << 32)
    };
    let ids = [
        creds_entry::UID,
        creds_entry::GID,
        creds_entry::EUID,
        creds_entry::EGID,
        creds_entry::SUID,
        creds_entry::SGID,
        creds_entry::FSUID,
        creds_entry::FSGID,
    ];
    let mut words: Vec<u64> = ids.iter().map(|field| creds.number(*field)).collect();
    words.extend([
        groups,
        count,
        set(creds_entry::CAP_INH)?,
        set(creds_entry::CAP_PRM)?,
        set(creds_entry::CAP_EFF)?,
        set(creds_entry::CAP_BND)?,
        set(creds_entry::CAP_AMB)?,
        creds.number(creds_entry::SECBITS),
        creds.number(creds_entry::NO_NEW_PRIVS),
    ]);
    Ok(writer.words(&words))
}

/// File locks by the process that sets them.
pub(super) fn locks(images: &Images) -> Result<BTreeMap<u32, Vec<Vec<u64>>>, PlanError> {
    let mut by_pid: BTreeMap<u32, Vec<Vec<u64>>> = BTreeMap::new();
    for lock in images.entries_if_any("filelocks.img")? {
        let (kind, kind_of_lock) = (lock.number(file_lock_entry::FLAG), lock.number(file_lock_entry::TYPE));
        if !matches!(kind, 1 | 2 | 4) || kind_of_lock > 1 {
            return unsupported("a lease or a mandatory lock");
        }
        by_pid.entry(lock.number(file_lock_entry::PID) as u32).or_default().push(vec![
            kind,
            kind_of_lock,
            lock.number(file_lock_entry::FD),
            lock.number(file_lock_entry::START),
            lock.number(file_lock_entry::LEN),
        ]);
    }
    Ok(by_pid)
}
