//! Time across a sleep: no call returns EINTR, clocks go on, time-outs and timers are due when they would have been.
//!
//! Three things are done. At the end of a dump the register images of threads that CRIU interrupted are set back
//! onto their system call, and a call with a relative time-out is pointed at a time-out of our own, in the stack below
//! the red zone, which the wake fills with what is left then ([`settle`]). At the wake, timers, which CRIU stores as
//! remaining time, are moved by the time slept ([`advance_timers`]). And CRIU's time namespace is left out, so that
//! every clock is the machine's. Sources: signal(7) on interrupted calls, the x86-64 system call convention, and
//! CRIU's images of timers (remaining times).

use crate::image::{Image, ImageError, numbered};
use crate::wire::{Malformed, Message};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Nanoseconds in a second.
const SECOND: i64 = 1_000_000_000;
/// Distance of our time-out below the stack pointer, bytes: past the 128 bytes of the red zone (x86-64 psABI 3.2.2).
const SCRATCH_BELOW: u64 = 512;

/// What makes a sleeper due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// timerfd_create(2).
    Timerfd,
    /// timer_create(2).
    Posix,
    /// setitimer(2), alarm(2).
    Interval,
    /// A blocking call's own time-out.
    Call,
}

/// One timer of a sleeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Due {
    /// What it is.
    pub source: Source,
    /// When, nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: i64,
    /// How often it comes, as far as can be told: the interval, or a relative time-out's whole length. None for a
    /// timer that fires once.
    pub every_ns: Option<i64>,
}

/// A relative time-out that the wake writes into a thread's stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patch {
    /// The thread, as numbered inside.
    pub thread: u32,
    /// Address of a struct timespec.
    pub address: u64,
    /// What was left of it at the freeze, nanoseconds.
    pub left_ns: i64,
}

/// What the wake needs to know about time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clocks {
    /// CLOCK_MONOTONIC at the freeze, nanoseconds.
    pub frozen_ns: i64,
    /// Relative time-outs.
    pub patches: Vec<Patch>,
    /// Everything that is due some time.
    pub dues: Vec<Due>,
}

/// Reads a sleeping thread's memory: thread as numbered inside, address, buffer. False if it cannot be read.
pub type ReadMemory<'a> = &'a dyn Fn(u32, u64, &mut [u8]) -> bool;

/// The clocks at one moment, nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// CLOCK_MONOTONIC.
    pub monotonic_ns: i64,
    /// CLOCK_REALTIME.
    pub realtime_ns: i64,
    /// CLOCK_BOOTTIME.
    pub boottime_ns: i64,
}

impl Now {
    /// Reads the clocks.
    pub fn read() -> Now {
        use rustix::time::{ClockId, clock_gettime};
        let ns = |clock| {
            let t = clock_gettime(clock);
            t.tv_sec * SECOND + t.tv_nsec
        };
        Now {
            monotonic_ns: ns(ClockId::Monotonic),
            realtime_ns: ns(ClockId::Realtime),
            boottime_ns: ns(ClockId::Boottime),
        }
    }

    /// What of an absolute time on that clock (clock_gettime(2) numbers) is left; none for clocks of CPU time.
    fn left(&self, clock: u64, at_ns: i64) -> Option<i64> {
        match clock {
            0 | 5 | 8 | 11 => Some(at_ns - self.realtime_ns),
            1 | 4 | 6 => Some(at_ns - self.monotonic_ns),
            7 | 9 => Some(at_ns - self.boottime_ns),
            _ => None,
        }
    }
}

/// How a system call takes its time-out.
enum Timeout {
    /// Milliseconds in a register; the call is exchanged for one that takes a timespec.
    Millis { value: u64, exchange: Exchange },
    /// Address of a relative timespec which the kernel leaves alone.
    Constant { address: u64, pointer: u32 },
    /// Address of a relative timespec which the kernel has updated to what is left when it was interrupted.
    Updated { address: u64, pointer: u32 },
    /// As Updated, a struct timeval of select(2), to be exchanged for pselect6.
    UpdatedTimeval { address: u64 },
    /// An absolute time that needs no change.
    Absolute { address: u64, clock: u64 },
}

/// Which call takes the place of one with milliseconds.
enum Exchange {
    /// epoll_wait(2) by epoll_pwait2.
    EpollWait,
    /// epoll_pwait(2) by epoll_pwait2, signal mask kept.
    EpollPwait,
    /// poll(2) by ppoll.
    Poll,
}

// Fields of CRIU's x86 register message.
const R10: u32 = 8;
const R9: u32 = 9;
const R8: u32 = 10;
const AX: u32 = 11;
const DX: u32 = 13;
const SI: u32 = 14;
const DI: u32 = 15;
const ORIG_AX: u32 = 16;
const IP: u32 = 17;
const SP: u32 = 20;

const EINTR: u64 = (-4i64) as u64;
const RESTART_SYSCALL: u64 = 219;

fn timeout_of(nr: u64, regs: &Message) -> Option<Timeout> {
    let r = |f| regs.number(f);
    let pointer = |field: u32, t: fn(u64, u32) -> Timeout| (r(field) != 0).then(|| t(r(field), field));
    let constant: fn(u64, u32) -> Timeout = |address, pointer| Timeout::Constant { address, pointer };
    let updated: fn(u64, u32) -> Timeout = |address, pointer| Timeout::Updated { address, pointer };
    let millis = |field: u32, exchange| {
        (r(field) as i32 >= 0).then(|| Timeout::Millis { value: r(field) as i32 as u64, exchange })
    };
    match nr {
        7 => millis(DX, Exchange::Poll),
        23 => (r(R8) != 0).then(|| Timeout::UpdatedTimeval { address: r(R8) }),
        35 => pointer(DI, constant),
        128 => pointer(DX, constant),
        202 => match r(SI) & 0x7f {
            0 => pointer(R10, constant),
            9 if r(R10) != 0 => {
                Some(Timeout::Absolute { address: r(R10), clock: if r(SI) & 256 != 0 { 0 } else { 1 } })
            }
            _ => None,
        },
        208 => pointer(R8, constant),
        220 => pointer(R10, constant),
        230 if r(SI) & 1 != 0 => Some(Timeout::Absolute { address: r(DX), clock: r(DI) }),
        230 => pointer(DX, constant),
        232 => millis(R10, Exchange::EpollWait),
        270 => pointer(R8, updated),
        271 => pointer(DX, updated),
        281 => millis(R10, Exchange::EpollPwait),
        441 => pointer(R10, constant),
        _ => None,
    }
}

/// A thread that waits in a system call, as it was seen just before the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Since when it has been off the CPU, nanoseconds of CLOCK_MONOTONIC.
    pub since_ns: i64,
    /// Number, six arguments and stack pointer of the call: proc_pid_syscall(5).
    pub call: [u64; 8],
}

/// Waiting threads, numbered inside.
pub type Since = BTreeMap<u32, Waiting>;

impl Waiting {
    /// Since when, if the thread was found frozen in the same call.
    fn since(&self, nr: u64, regs: &Message) -> Option<i64> {
        let r = |f| regs.number(f);
        (self.call == [nr, r(DI), r(SI), r(DX), r(R10), r(R8), r(R9), r(SP)]).then_some(self.since_ns)
    }
}

/// Mends registers, points relative time-outs at our own, and finds out what is due when. Run once at the end of a
/// dump, every task stopped.
pub fn settle(images: &Path, now: Now, since: &Since, read: ReadMemory<'_>) -> Result<Clocks, ImageError> {
    let mut clocks = Clocks { frozen_ns: now.monotonic_ns, ..Clocks::default() };
    for (thread, path) in numbered(images, "core")? {
        let mut image = Image::read(&path)?;
        let damaged = |source| ImageError::Damaged { path: path.clone(), source };
        let mut changed = false;
        for core in &mut image.entries {
            core.edit_messages::<Malformed>(2, |info| {
                info.edit_messages::<Malformed>(2, |regs| {
                    changed |= settle_thread(thread, regs, now, since.get(&thread).copied(), read, &mut clocks);
                    Ok(())
                })
            })
            .map_err(damaged)?;
            collect_core_timers(core, now, &mut clocks.dues).map_err(damaged)?;
        }
        if changed {
            image.write()?;
        }
    }
    let path = images.join("files.img");
    for file in Image::read(&path)?.entries {
        let timer = file.message(12).map_err(|source| ImageError::Damaged { path: path.clone(), source })?;
        if let Some(timer) = timer {
            let (left, every) = (time(&timer, 7, 8, 1), time(&timer, 9, 10, 1));
            push_due(&mut clocks.dues, Source::Timerfd, now, left, every);
        }
    }
    for (_, path) in numbered(images, "timens")? {
        std::fs::remove_file(&path).map_err(|source| ImageError::Io { path, source })?;
    }
    Ok(clocks)
}

fn push_due(dues: &mut Vec<Due>, source: Source, now: Now, left_ns: i64, every_ns: i64) {
    if left_ns > 0 {
        dues.push(Due { source, at_ns: now.monotonic_ns + left_ns, every_ns: (every_ns > 0).then_some(every_ns) });
    }
}

/// Seconds in one field, a fraction in another; `unit` is the fraction's length in nanoseconds.
fn time(m: &Message, seconds: u32, fraction: u32, unit: i64) -> i64 {
    (m.number(seconds) as i64).saturating_mul(SECOND).saturating_add((m.number(fraction) as i64).saturating_mul(unit))
}

fn collect_core_timers(core: &Message, now: Now, dues: &mut Vec<Due>) -> Result<(), Malformed> {
    let Some(timers) = core.message(3)?.map(|t| t.message(7)).transpose()?.flatten() else { return Ok(()) };
    if let Some(real) = timers.message(1)? {
        push_due(dues, Source::Interval, now, time(&real, 3, 4, 1000), time(&real, 1, 2, 1000));
    }
    for timer in timers.messages(4)? {
        if is_wall_clock(timer.number(2)) {
            push_due(dues, Source::Posix, now, time(&timer, 9, 10, 1), time(&timer, 7, 8, 1));
        }
    }
    Ok(())
}

/// Clocks that go on while a process sleeps, by their numbers in clock_gettime(2).
fn is_wall_clock(clock: u64) -> bool {
    matches!(clock, 0 | 1 | 7 | 8 | 9 | 11)
}

/// Mends one thread's registers; true if they changed.
fn settle_thread(
    thread: u32,
    regs: &mut Message,
    now: Now,
    since: Option<Waiting>,
    read: ReadMemory<'_>,
    clocks: &mut Clocks,
) -> bool {
    let orig = regs.number(ORIG_AX);
    if orig as i64 >= 0 && regs.number(AX) == EINTR {
        // CRIU left the thread behind its call with EINTR: put it back onto the call.
        let mut nr = orig;
        if nr == RESTART_SYSCALL {
            nr = number_before(thread, regs.number(IP), read).unwrap_or(nr);
        }
        regs.set_varint(AX, nr);
        regs.set_varint(IP, regs.number(IP) - 2);
        settle_call(thread, nr, regs, now, since, read, clocks);
        return true;
    }
    let mut code = [0u8; 2];
    let ip = regs.number(IP);
    let on_call = orig as i64 >= 0 && regs.number(AX) == orig && read(thread, ip, &mut code) && code == [0x0f, 0x05];
    on_call && settle_call(thread, orig, regs, now, since, read, clocks)
}

/// A thread that the kernel itself had restarted shows `restart_syscall`; the number is in the `mov eax, imm32` that
/// precedes the `syscall` instruction in every libc.
fn number_before(thread: u32, ip: u64, read: ReadMemory<'_>) -> Option<u64> {
    let mut code = [0u8; 7];
    let readable = read(thread, ip.checked_sub(7)?, &mut code);
    (readable && code[0] == 0xb8 && code[5..] == [0x0f, 0x05])
        .then(|| u64::from(u32::from_le_bytes(code[1..5].try_into().expect("4 bytes"))))
}

/// Gives a call with a relative time-out one of ours; true if registers changed.
fn settle_call(
    thread: u32,
    nr: u64,
    regs: &mut Message,
    now: Now,
    since: Option<Waiting>,
    read: ReadMemory<'_>,
    clocks: &mut Clocks,
) -> bool {
    let Some(timeout) = timeout_of(nr, regs) else { return false };
    let waited = since.and_then(|w| w.since(nr, regs)).map_or(0, |s| (now.monotonic_ns - s).max(0));
    let timespec = |address: u64| -> Option<i64> {
        let mut bytes = [0u8; 16];
        read(thread, address, &mut bytes).then(|| {
            let half = |at: usize| i64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
            half(0).saturating_mul(SECOND).saturating_add(half(8))
        })
    };
    let (left, whole, pointer) = match timeout {
        Timeout::Absolute { address, clock } => {
            if let Some(left) = timespec(address).and_then(|at| now.left(clock, at)) {
                push_due(&mut clocks.dues, Source::Call, now, left, left.saturating_add(waited));
            }
            return false;
        }
        Timeout::Millis { value: 0, .. } => return false,
        Timeout::Millis { value, .. } => {
            let whole = value as i64 * 1_000_000;
            (whole - waited, whole, None)
        }
        Timeout::Constant { address, pointer } => match timespec(address) {
            Some(whole) if whole > 0 => (whole - waited, whole, Some(pointer)),
            _ => return false,
        },
        Timeout::Updated { address, pointer } => match timespec(address) {
            Some(left) if left > 0 => (left, left.saturating_add(waited), Some(pointer)),
            _ => return false,
        },
        Timeout::UpdatedTimeval { address } => {
            let mut bytes = [0u8; 16];
            if !read(thread, address, &mut bytes) {
                return false;
            }
            let half = |at: usize| i64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
            let left = half(0).saturating_mul(SECOND).saturating_add(half(8).saturating_mul(1000));
            (left, left.saturating_add(waited), None)
        }
    };
    let address = (regs.number(SP) - SCRATCH_BELOW) & !15;
    match (&timeout, pointer) {
        (_, Some(pointer)) => regs.set_varint(pointer, address),
        (Timeout::UpdatedTimeval { .. }, _) => {
            regs.set_varint(AX, 270);
            regs.set_varint(R8, address);
            regs.set_varint(R9, 0);
        }
        (Timeout::Millis { exchange: Exchange::Poll, .. }, _) => {
            regs.set_varint(AX, 271);
            regs.set_varint(DX, address);
            regs.set_varint(R10, 0);
            regs.set_varint(R8, 0);
        }
        (Timeout::Millis { exchange, .. }, _) => {
            regs.set_varint(AX, 441);
            regs.set_varint(R10, address);
            if matches!(exchange, Exchange::EpollWait) {
                regs.set_varint(R8, 0);
                regs.set_varint(R9, 0);
            }
        }
        _ => {}
    }
    let left = left.max(0);
    clocks.patches.push(Patch { thread, address, left_ns: left });
    push_due(&mut clocks.dues, Source::Call, now, left.max(1), whole.max(1));
    true
}

/// A struct timespec of what is left of a patch at `now`, never less than a nanosecond (0 would mean "do not wait").
pub fn patch_bytes(patch: &Patch, clocks: &Clocks, now: Now) -> [u8; 16] {
    let left = (patch.left_ns - (now.monotonic_ns - clocks.frozen_ns)).max(1);
    let mut bytes = [0u8; 16];
    bytes[..8].copy_from_slice(&(left / SECOND).to_le_bytes());
    bytes[8..].copy_from_slice(&(left % SECOND).to_le_bytes());
    bytes
}

/// Moves timers in the images by the time slept. They are rewritten in a directory of their own so that the
/// generation stays as it was recorded: `from` is the generation, `to` receives the changed images; returns their names.
pub fn advance_timers(from: &Path, to: &Path, clocks: &Clocks, now: Now) -> Result<Vec<String>, ImageError> {
    let slept = (now.monotonic_ns - clocks.frozen_ns).max(0);
    let mut changed = Vec::new();
    let sources = |wanted: &[Source]| clocks.dues.iter().any(|d| wanted.contains(&d.source));
    if sources(&[Source::Timerfd]) {
        let mut image = Image::read(&from.join("files.img"))?;
        let damaged = |source| ImageError::Damaged { path: from.join("files.img"), source };
        for file in &mut image.entries {
            file.edit_messages::<Malformed>(12, |t| {
                advance_timerfd(t, slept);
                Ok(())
            })
            .map_err(damaged)?;
        }
        write_to(image, to, "files.img", &mut changed)?;
    }
    if sources(&[Source::Posix, Source::Interval]) {
        for (n, path) in numbered(from, "core")? {
            let mut image = Image::read(&path)?;
            let damaged = |source| ImageError::Damaged { path: path.clone(), source };
            for core in &mut image.entries {
                core.edit_messages::<Malformed>(3, |task| {
                    task.edit_messages::<Malformed>(7, |timers| advance_task_timers(timers, slept))
                })
                .map_err(damaged)?;
            }
            write_to(image, to, &format!("core-{n}.img"), &mut changed)?;
        }
    }
    Ok(changed)
}

fn write_to(mut image: Image, to: &Path, name: &str, changed: &mut Vec<String>) -> Result<(), ImageError> {
    image.path = to.join(name);
    image.write()?;
    changed.push(name.to_owned());
    Ok(())
}

/// (what is left, how many expirations were missed) of a timer after `slept`; all nanoseconds.
fn advance(left: i64, every: i64, slept: i64) -> (i64, u64) {
    if left <= 0 {
        return (left, 0);
    }
    let rest = left - slept;
    if rest > 0 {
        return (rest, 0);
    }
    if every <= 0 {
        return (1, 0);
    }
    let late = -rest;
    (every - late % every, 1 + (late / every) as u64)
}

fn advance_timerfd(timer: &mut Message, slept: i64) {
    if !is_wall_clock(timer.number(4)) {
        return;
    }
    let (left, missed) = advance(time(timer, 7, 8, 1), time(timer, 9, 10, 1), slept);
    timer.set_varint(7, (left.max(0) / SECOND) as u64);
    timer.set_varint(8, (left.max(0) % SECOND) as u64);
    timer.set_varint(5, timer.number(5) + missed);
    // The value is a remaining time whatever the program asked with; TFD_TIMER_ABSTIME must not be applied to it.
    timer.set_varint(6, timer.number(6) & !1);
}

fn advance_task_timers(timers: &mut Message, slept: i64) -> Result<(), Malformed> {
    timers.edit_messages::<Malformed>(1, |real| {
        let (left, missed) = advance(time(real, 3, 4, 1000), time(real, 1, 2, 1000), slept);
        // A signal cannot be added as a count: a missed one is sent at once.
        let left = if missed > 0 { 1000 } else { left.max(0) };
        real.set_varint(3, (left / SECOND) as u64);
        real.set_varint(4, (left % SECOND / 1000).max(i64::from(left > 0)) as u64);
        Ok(())
    })?;
    timers.edit_messages::<Malformed>(4, |timer| {
        if is_wall_clock(timer.number(2)) {
            let (left, missed) = advance(time(timer, 9, 10, 1), time(timer, 7, 8, 1), slept);
            let left = if missed > 0 { 1 } else { left.max(0) };
            timer.set_varint(9, (left / SECOND) as u64);
            timer.set_varint(10, (left % SECOND) as u64);
            timer.set_varint(6, timer.number(6) + missed.saturating_sub(1));
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_keep_their_phase() {
        assert_eq!(advance(5 * SECOND, 0, 2 * SECOND), (3 * SECOND, 0));
        assert_eq!(advance(5 * SECOND, 0, 9 * SECOND), (1, 0));
        assert_eq!(advance(SECOND, 2 * SECOND, 2 * SECOND), (SECOND, 1));
        assert_eq!(advance(SECOND, 2 * SECOND, 6 * SECOND), (SECOND, 3));
        assert_eq!(advance(0, 0, SECOND), (0, 0));
    }

    #[test]
    fn an_interrupted_epoll_wait_goes_back_onto_its_call() {
        let mut regs = Message::default();
        for (field, value) in [(AX, EINTR), (ORIG_AX, 232), (IP, 0x1002), (SP, 0x7000), (R10, 1500), (DI, 5)] {
            regs.set_varint(field, value);
        }
        let now = Now { monotonic_ns: 10 * SECOND, realtime_ns: 0, boottime_ns: 0 };
        let mut clocks = Clocks { frozen_ns: now.monotonic_ns, ..Clocks::default() };
        let mut call = [0; 8];
        (call[0], call[1], call[4], call[7]) = (232, 5, 1500, 0x7000);
        let waiting = Waiting { since_ns: 9 * SECOND, call };
        let mut other = regs.clone();
        assert!(settle_thread(3, &mut regs, now, Some(waiting), &|_, _, _| false, &mut clocks));
        assert_eq!((regs.number(AX), regs.number(IP), regs.number(DI)), (441, 0x1000, 5));
        assert_eq!(clocks.patches, [Patch { thread: 3, address: regs.number(R10), left_ns: 500_000_000 }]);
        assert_eq!(clocks.dues[0].at_ns, now.monotonic_ns + 500_000_000);
        assert_eq!(clocks.dues[0].every_ns, Some(1_500_000_000));
        // Seen in another call just before: it has only begun to wait.
        let earlier = Waiting { call: [202, 0, 0, 0, 0, 0, 0, 0x7000], ..waiting };
        let mut anew = Clocks::default();
        assert!(settle_thread(3, &mut other, now, Some(earlier), &|_, _, _| false, &mut anew));
        assert_eq!(anew.patches[0].left_ns, 1_500_000_000);
        let later = Now { monotonic_ns: 10 * SECOND + 200_000_000, ..now };
        assert_eq!(patch_bytes(&clocks.patches[0], &clocks, later)[8..], 300_000_000i64.to_le_bytes());
        // Due in the past: fires at once, never "do not wait", never for ever.
        let late = Now { monotonic_ns: 60 * SECOND, ..now };
        assert_eq!(patch_bytes(&clocks.patches[0], &clocks, late)[8..], 1i64.to_le_bytes());
    }

    #[test]
    fn an_endless_wait_is_only_mended() {
        let mut regs = Message::default();
        for (field, value) in [(AX, EINTR), (ORIG_AX, 232), (IP, 0x1002), (SP, 0x7000), (R10, u64::from(u32::MAX))] {
            regs.set_varint(field, value);
        }
        let now = Now { monotonic_ns: SECOND, realtime_ns: 0, boottime_ns: 0 };
        let mut clocks = Clocks::default();
        assert!(settle_thread(1, &mut regs, now, None, &|_, _, _| false, &mut clocks));
        assert_eq!((regs.number(AX), regs.number(IP)), (232, 0x1000));
        assert!(clocks.patches.is_empty() && clocks.dues.is_empty());
    }
}
