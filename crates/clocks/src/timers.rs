//! Timers: timerfds, POSIX timers, interval timers.
//!
//! A timerfd is noted with the time at which it expires next, on its own clock, and is set to just
//! that in the restored process: the kernel then counts what was missed and keeps the phase. The
//! others can be set by their own process only, so their images are moved; what they missed
//! meanwhile is sent as one signal. Sources: timerfd_create(2), timer_settime(2), getitimer(2), and
//! CRIU's images of timers (remaining times at the moment CRIU read them).

use crate::due::{Due, Left, Source, push_due};
use crate::frozen::{ClockError, Frozen};
use crate::noted::{Clocks, MONOTONIC, Timerfd, spread_left};
use crate::now::{Now, SECOND};
use kip_criu_images::fields::{core_entry, file_entry, itimer_entry, posix_timer_entry};
use kip_criu_images::fields::{task_core_entry, task_timers_entry, timerfd_entry};
use kip_criu_images::processes::places;
use kip_criu_images::{CheckpointImageError, Images, Malformed, Message};
use kip_sys::timer::{self, TimerSetting, TimerSignal};
use rustix::time::{ClockId, clock_getres};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// CLOCK_REALTIME and CLOCK_REALTIME_ALARM as clock_gettime(2) numbers them.
const REALTIME: u64 = 0;
const REALTIME_ALARM: u64 = 8;
/// signal(7).
const SIGALRM: u64 = 14;
/// Longest wait for the kernel to notice that a timer was set to a time in the past.
const NOTICE: Duration = Duration::from_millis(20);
/// Two readings that are to be of the same moment are not further apart than this, nanoseconds.
const SAME_MOMENT_NS: i64 = 20_000;

/// A signal for what a timer missed. Numbers of processes and threads are those inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missed {
    /// SIGALRM of the interval timer.
    Interval {
        /// The process.
        pid: u32,
    },
    /// A POSIX timer's own signal.
    Posix {
        /// The process.
        pid: u32,
        /// The thread, for SIGEV_THREAD_ID.
        thread: Option<u32>,
        /// The signal.
        signal: TimerSignal,
    },
}

/// Seconds in one field, a fraction in another; `unit` is the fraction's length in nanoseconds.
fn time(m: &Message, seconds: u32, fraction: u32, unit: i64) -> i64 {
    (m.number(seconds) as i64).saturating_mul(SECOND).saturating_add((m.number(fraction) as i64).saturating_mul(unit))
}

/// What is left of an interval timer, nanoseconds.
fn interval_left(timer: &Message) -> i64 {
    time(timer, itimer_entry::VSEC, itimer_entry::VUSEC, 1000)
}

/// The interval of an interval timer, nanoseconds.
fn interval_every(timer: &Message) -> i64 {
    time(timer, itimer_entry::ISEC, itimer_entry::IUSEC, 1000)
}

/// What is left of a POSIX timer, nanoseconds.
fn posix_left(timer: &Message) -> i64 {
    time(timer, posix_timer_entry::VSEC, posix_timer_entry::VNSEC, 1)
}

/// Clocks that go on while a process sleeps, by their numbers in clock_gettime(2).
fn is_wall_clock(clock: u64) -> bool {
    matches!(clock, 0 | 1 | 7 | 8 | 9 | 11)
}

/// About when CRIU read a process's timers, never before, nanoseconds of CLOCK_MONOTONIC: it writes
/// the process's image next, and file times lag by up to the coarse clock's step.
pub(crate) fn read_at(images: &Images, name: &str, now: Now) -> i64 {
    images.written(name).map_or(now.monotonic_ns, |written| after(written, now))
}

/// About when CRIU had frozen every thread, never before, nanoseconds of CLOCK_MONOTONIC: it opens
/// the images of what they share next. `now` where the file system does not say when a file was
/// made.
pub fn interrupted_at(images: &Images, now: Now) -> i64 {
    images.made("files.img").map_or(now.monotonic_ns, |made| after(made, now))
}

/// A file's time, made no earlier than it was, nanoseconds of CLOCK_MONOTONIC.
fn after(file: SystemTime, now: Now) -> i64 {
    let since_epoch = file.duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX));
    let step = clock_getres(ClockId::RealtimeCoarse);
    let ago = now.realtime_ns - since_epoch - step.tv_nsec;
    // A clock that was set in between would be worse than the dump's length.
    now.monotonic_ns - ago.clamp(0, 60 * SECOND)
}

/// Arms interval timers of which nothing is left, for set to that they would never expire again:
/// one of real time that the kernel has not armed again yet, for the signal of its last expiration
/// waits; one of CPU time that is due within a microsecond. The next expiration is a whole interval
/// away, which is at most an interval late and never early. True if there is one.
pub(crate) fn arm_pending(core: &mut Message) -> Result<bool, Malformed> {
    let mut found = false;
    core.edit_messages::<Malformed>(core_entry::TC, |task| {
        task.edit_messages::<Malformed>(task_core_entry::TIMERS, |timers| {
            for kind in [task_timers_entry::REAL, task_timers_entry::VIRT, task_timers_entry::PROF] {
                timers.edit_messages::<Malformed>(kind, |timer| {
                    if interval_left(timer) <= 0 && interval_every(timer) > 0 {
                        timer.set_varint(itimer_entry::VSEC, timer.number(itimer_entry::ISEC));
                        timer.set_varint(itimer_entry::VUSEC, timer.number(itimer_entry::IUSEC));
                        found = true;
                    }
                    Ok(())
                })?;
            }
            Ok(())
        })
    })?;
    Ok(found)
}

/// An interval timer of real time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Real {
    /// Nanoseconds until it expires; 0 if it is not armed, or its signal waits.
    pub(crate) left_ns: i64,
    /// Its interval, nanoseconds, or 0.
    pub(crate) every_ns: i64,
}

/// Reads it from an image of timers.
pub(crate) fn real_timer(timers: &Message) -> Result<Option<Real>, Malformed> {
    let real = timers.message(task_timers_entry::REAL)?;
    Ok(real.map(|real| Real { left_ns: interval_left(&real), every_ns: interval_every(&real) }))
}

/// A POSIX timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Posix {
    /// As timer_create(2) gave it.
    pub(crate) id: i32,
    /// Its clock, as clock_gettime(2) numbers them.
    pub(crate) clock: u64,
    /// The signal.
    pub(crate) signal: i32,
    /// It sends it: not SIGEV_NONE.
    pub(crate) notifies: bool,
    /// The thread to which it sends it, as numbered inside; none for the whole process.
    pub(crate) thread: Option<u32>,
    /// `si_value`.
    pub(crate) value: u64,
    /// Nanoseconds until it expires; 0 if it is not armed.
    pub(crate) left_ns: i64,
    /// Its interval, nanoseconds, or 0.
    pub(crate) every_ns: i64,
}

impl Posix {
    /// SIGEV_NONE and the bit of SIGEV_THREAD_ID, sigevent(3type).
    const NONE: u64 = 1;
    const THREAD_ID: u64 = 4;

    fn read(timer: &Message) -> Posix {
        let notify = timer.number(posix_timer_entry::IT_SIGEV_NOTIFY);
        Posix {
            id: timer.number(posix_timer_entry::IT_ID) as i32,
            clock: timer.number(posix_timer_entry::CLOCK_ID),
            signal: timer.number(posix_timer_entry::SI_SIGNO) as i32,
            notifies: notify != Posix::NONE,
            thread: timer
                .varint(posix_timer_entry::NOTIFY_THREAD_ID)
                .map(|t| t as u32)
                .filter(|_| notify & Posix::THREAD_ID != 0),
            value: timer.number(posix_timer_entry::SIVAL_PTR),
            left_ns: posix_left(timer),
            every_ns: time(timer, posix_timer_entry::ISEC, posix_timer_entry::INSEC, 1),
        }
    }

    /// What it sends for one expiration.
    pub(crate) fn sends(&self) -> TimerSignal {
        TimerSignal { signal: self.signal, timer: self.id, overrun: 0, value: self.value }
    }
}

/// Those of an image of timers, but for those that count CPU time or send nothing.
pub(crate) fn posix_timers(timers: &Message) -> Result<Vec<Posix>, Malformed> {
    let all = timers.messages(task_timers_entry::POSIX)?;
    Ok(all.iter().map(Posix::read).filter(|timer| is_wall_clock(timer.clock) && timer.notifies).collect())
}

/// Collects what a process's timers make due; true if it has any. From `arrived`, signals that
/// arrived since the freeze, as bits, those of periodic timers are removed: they are due as the
/// timer is.
pub(crate) fn collect(core: &Message, read_ns: i64, arrived: &mut u64, dues: &mut Vec<Due>) -> Result<bool, Malformed> {
    let task = core.message(core_entry::TC)?;
    let timers = task.map(|t| t.message(task_core_entry::TIMERS)).transpose()?.flatten();
    let Some(timers) = timers else { return Ok(false) };
    let before = dues.len();
    let all = *arrived;
    let mut push = |source, signal: u64, left_ns: i64, every_ns: i64, monotonic| {
        if left_ns <= 0 {
            return;
        }
        let every_ns = (every_ns > 0).then_some(every_ns);
        dues.push(Due { source, at_ns: read_ns.saturating_add(left_ns), every_ns, monotonic });
        let bit = 1u64.checked_shl(signal.wrapping_sub(1) as u32).unwrap_or(0);
        if every_ns.is_some() && all & bit != 0 {
            *arrived &= !bit;
            dues.push(Due { source, at_ns: read_ns, every_ns, monotonic });
        }
    };
    if let Some(real) = real_timer(&timers)? {
        push(Source::Interval, SIGALRM, real.left_ns, real.every_ns, true);
    }
    let posix = timers.messages(task_timers_entry::POSIX)?;
    for timer in posix.iter().map(Posix::read).filter(|timer| is_wall_clock(timer.clock)) {
        push(Source::Posix, timer.signal as u64, timer.left_ns, timer.every_ns, timer.clock == MONOTONIC);
    }
    Ok(dues.len() > before)
}

/// Notes every timerfd that is armed or unread, as it is now.
pub(crate) fn finalize_timerfds(images: &Images, frozen: &Frozen<'_>, clocks: &mut Clocks) -> Result<(), ClockError> {
    let mut timers = Vec::new();
    for file in images.entries("files.img")? {
        let timer = file.message(file_entry::TFD).map_err(images.damaged("files.img"))?;
        timers.extend(timer.map(|t| (t.number(timerfd_entry::ID), t.number(timerfd_entry::CLOCKID))));
    }
    if timers.is_empty() {
        return Ok(());
    }
    let places = places(images)?;
    for (id, clock) in timers {
        // One that is only on its way through a socket has no place; it stays as CRIU has it.
        let Some(&(pid, fd)) = places.get(&id) else { continue };
        let noted = (frozen.take)(pid, fd).and_then(|timer| note(timer.as_fd(), pid, fd, clock));
        let Some(timer) = noted.map_err(|source| ClockError::Timerfd { pid, fd, source })? else { continue };
        if let Some(next) = timer.next_ns {
            let now = Now::read();
            let left = now.left(timer.clock, next).unwrap_or(0);
            push_due(
                &mut clocks.dues,
                Source::Timerfd,
                now,
                Left { ns: left.max(1), every_ns: timer.every_ns },
                timer.is_monotonic(),
            );
        }
        clocks.timerfds.push(timer);
    }
    Ok(())
}

/// None for one that is neither armed nor unread.
fn note(timer: BorrowedFd<'_>, pid: u32, fd: i32, clock: u64) -> io::Result<Option<Timerfd>> {
    let (mut now, mut state);
    let mut tries = 0;
    loop {
        let before = Now::read();
        state = timer::timerfd_state(timer)?;
        now = Now::read();
        tries += 1;
        if now.monotonic_ns - before.monotonic_ns < SAME_MOMENT_NS * tries {
            break;
        }
    }
    if state.left_ns == 0 && state.unread == 0 {
        return Ok(None);
    }
    let relative = !state.absolute && matches!(clock, REALTIME | REALTIME_ALARM);
    let clock = if relative { MONOTONIC } else { clock };
    let next_ns = (state.left_ns > 0).then(|| now.on(clock).saturating_add(state.left_ns));
    Ok(Some(Timerfd {
        pid,
        fd,
        clock,
        next_ns,
        every_ns: state.every_ns,
        unread: state.unread,
        relative,
        cancel_on_set: state.cancel_on_set,
    }))
}

/// What a timerfd for one time is set to: if it came due after the packet that the program is woken
/// for, or would as that is taken, it expires [`Clocks::taken_within`] from now. A periodic one
/// keeps its beat.
pub fn after_packet(timer: &Timerfd, clocks: &Clocks, now: Now) -> Timerfd {
    let (Some(packet_ns), Some(next), 0) = (clocks.packet_ns, timer.next_ns, timer.every_ns) else { return *timer };
    let ago = now.monotonic_ns - packet_ns;
    let taken = clocks.taken_within().as_nanos() as i64;
    match now.left(timer.clock, next) {
        Some(left) if left > -ago && left < taken => Timerfd { next_ns: Some(next - left + taken), ..*timer },
        _ => *timer,
    }
}

/// Sets a restored timerfd to what it was, the time that has passed included: expirations that were
/// missed can be read. Its program must be stopped.
///
/// # Errors
/// Those of timerfd_settime(2); EBADF and EINVAL when it is not the timerfd.
pub fn set_timerfd(fd: BorrowedFd<'_>, timer: &Timerfd) -> io::Result<()> {
    let mut unread = timer.unread;
    match timer.next_ns {
        None => timer::set_timerfd(fd, TimerSetting::Relative(0), 0)?,
        Some(next) if timer.relative => {
            let (left, missed) = advance(1, timer.every_ns, Now::read().monotonic_ns - next + 1);
            let ahead = next - Now::read().monotonic_ns;
            timer::set_timerfd(fd, TimerSetting::Relative(if ahead > 0 { ahead } else { left }), timer.every_ns)?;
            unread += if ahead > 0 { 0 } else { missed };
        }
        Some(at_ns) => {
            let value = TimerSetting::Absolute { at_ns, cancel_on_set: timer.cancel_on_set };
            timer::set_timerfd(fd, value, timer.every_ns)?;
            if unread > 0 && Now::read().left(timer.clock, at_ns).is_some_and(|left| left <= 0) {
                unread += expired(fd)?;
            }
        }
    }
    if unread > 0 { timer::set_timerfd_unread(fd, unread) } else { Ok(()) }
}

/// What the kernel counts for a timer that was set to a time in the past, as soon as it does.
fn expired(fd: BorrowedFd<'_>) -> io::Result<u64> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let patience = Timespec { tv_sec: 0, tv_nsec: i64::from(NOTICE.subsec_nanos()) };
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&patience))?;
    Ok(timer::timerfd_state(fd)?.unread)
}

/// Signals of timers for what they missed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signals {
    /// To be sent before the program goes on.
    pub now: Vec<Missed>,
    /// To be sent [`Clocks::taken_within`] after the program has gone on: they were due after the
    /// packet came that it is woken for.
    pub later: Vec<Missed>,
}

/// Moves POSIX and interval timers in the images to `now`. Returns what was missed.
///
/// # Errors
/// An image is damaged.
pub fn advance_timers(images: &mut Images, clocks: &Clocks, now: Now) -> Result<Signals, CheckpointImageError> {
    let mut missed = Signals::default();
    for (pid, name) in images.numbered("core") {
        let Some(read_ns) = clocks.read_ns.get(&pid) else { continue };
        let packet = clocks.packet_ns.map(|packet_ns| packet_ns - read_ns);
        let passed = Passed {
            monotonic: (now.monotonic_ns - read_ns).max(0),
            stood: clocks.stood_ns,
            packet,
            taken: clocks.taken_within().as_nanos() as i64,
        };
        let mut image = images.image(&name)?;
        let damaged = image.damaged();
        for core in &mut image.entries {
            core.edit_messages::<Malformed>(core_entry::TC, |task| {
                task.edit_messages::<Malformed>(task_core_entry::TIMERS, |timers| {
                    advance_task_timers(timers, pid, &passed, &mut missed)
                })
            })
            .map_err(&damaged)?;
        }
        images.put(&image);
    }
    Ok(missed)
}

/// A periodic timer by the time of day with an interval of this or more may be meant for a time of
/// day, and keeps it, nanoseconds.
const BY_THE_DAY_NS: i64 = 60 * SECOND;

/// Moves all timers that fire again and again by so many parts of 2^32 of their interval, within
/// that, in images and in what was noted. Those that fire once keep their time.
///
/// # Errors
/// An image is damaged.
pub fn spread(images: &mut Images, clocks: &mut Clocks, drawn: u32) -> Result<(), CheckpointImageError> {
    clocks.spread(drawn);
    for (pid, name) in images.numbered("core") {
        let Some(&read_ns) = clocks.read_ns.get(&pid) else { continue };
        let mut image = images.image(&name)?;
        let damaged = image.damaged();
        for core in &mut image.entries {
            core.edit_messages::<Malformed>(core_entry::TC, |task| {
                task.edit_messages::<Malformed>(task_core_entry::TIMERS, |timers| spread_task_timers(timers, drawn))
            })
            .map_err(&damaged)?;
            let mut dues = Vec::new();
            collect(core, read_ns, &mut 0, &mut dues).map_err(&damaged)?;
            clocks.dues.extend(dues.into_iter().filter(Due::is_periodic));
        }
        images.put(&image);
    }
    Ok(())
}

fn spread_task_timers(timers: &mut Message, drawn: u32) -> Result<(), Malformed> {
    timers.edit_messages::<Malformed>(task_timers_entry::REAL, |real| {
        let (left, every) = (interval_left(real), interval_every(real));
        if left > 0 && every > 0 {
            let micros = (spread_left(left, every, drawn) / 1000).max(1);
            real.set_varint(itimer_entry::VSEC, (micros / 1_000_000) as u64);
            real.set_varint(itimer_entry::VUSEC, (micros % 1_000_000) as u64);
        }
        Ok(())
    })?;
    timers.edit_messages::<Malformed>(task_timers_entry::POSIX, |timer| {
        let as_read = Posix::read(timer);
        let by_the_day = !matches!(as_read.clock, 1 | 7 | 9) && as_read.every_ns >= BY_THE_DAY_NS;
        if is_wall_clock(as_read.clock) && !by_the_day && as_read.left_ns > 0 && as_read.every_ns > 0 {
            let left = spread_left(as_read.left_ns, as_read.every_ns, drawn);
            timer.set_varint(posix_timer_entry::VSEC, (left / SECOND) as u64);
            timer.set_varint(posix_timer_entry::VNSEC, (left % SECOND) as u64);
        }
        Ok(())
    })
}

/// (what is left, how many expirations of a periodic timer were missed) after `passed`; all
/// nanoseconds. A single timer that is overdue has a nanosecond left; one that is not armed stays
/// so.
fn advance(left: i64, every: i64, passed: i64) -> (i64, u64) {
    if left <= 0 {
        return (left, 0);
    }
    let rest = left.saturating_sub(passed);
    if rest > 0 {
        return (rest, 0);
    }
    if every <= 0 {
        return (1, 0);
    }
    let late = -rest;
    (every - late % every, 1 + (late / every) as u64)
}

/// Since CRIU read the timers, nanoseconds.
#[derive(Clone, Copy)]
struct Passed {
    /// On CLOCK_MONOTONIC.
    monotonic: i64,
    /// Besides, on all other clocks.
    stood: i64,
    /// Until the packet came that the program is woken for.
    packet: Option<i64>,
    /// Until the program has taken that, from when it goes on.
    taken: i64,
}

impl Passed {
    fn on(&self, clock: u64) -> i64 {
        self.monotonic + if clock == MONOTONIC { 0 } else { self.stood }
    }

    /// What is left of a timer and what it missed, as [`advance`] says, and whether the signal of
    /// that is to come after the packet. Such a timer, and one that would expire while the program
    /// takes the packet, is moved as if that were done.
    fn advance(&self, clock: u64, left: i64, every: i64) -> (i64, u64, bool) {
        let (passed, taken) = (self.on(clock), self.taken);
        match self.packet {
            Some(packet) if left > packet.max(0) && left <= passed + taken => {
                let (rest, missed) = advance(left, every, passed + taken);
                (if every > 0 { rest + taken } else { taken }, missed, true)
            }
            _ => {
                let (rest, missed) = advance(left, every, passed);
                (rest, missed, false)
            }
        }
    }
}

fn advance_task_timers(
    timers: &mut Message,
    pid: u32,
    passed: &Passed,
    signals: &mut Signals,
) -> Result<(), Malformed> {
    let mut send = |later: bool, missed| if later { signals.later.push(missed) } else { signals.now.push(missed) };
    timers.edit_messages::<Malformed>(task_timers_entry::REAL, |real| {
        let (left, missed, later) = passed.advance(MONOTONIC, interval_left(real), interval_every(real));
        let micros = left.max(0).saturating_add(999) / 1000;
        real.set_varint(itimer_entry::VSEC, (micros / 1_000_000) as u64);
        real.set_varint(itimer_entry::VUSEC, (micros % 1_000_000) as u64);
        if missed > 0 {
            send(later, Missed::Interval { pid });
        }
        Ok(())
    })?;
    timers.edit_messages::<Malformed>(task_timers_entry::POSIX, |timer| {
        if !is_wall_clock(timer.number(posix_timer_entry::CLOCK_ID)) {
            return Ok(());
        }
        let as_read = Posix::read(timer);
        let (left, missed, later) = passed.advance(as_read.clock, as_read.left_ns, as_read.every_ns);
        timer.set_varint(posix_timer_entry::VSEC, (left.max(0) / SECOND) as u64);
        timer.set_varint(posix_timer_entry::VNSEC, (left.max(0) % SECOND) as u64);
        if missed > 0 && as_read.notifies {
            let overrun = i32::try_from(missed - 1).unwrap_or(i32::MAX);
            let signal = TimerSignal { overrun, ..as_read.sends() };
            send(later, Missed::Posix { pid, thread: as_read.thread, signal });
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

    #[test]
    fn timers_keep_their_phase() {
        assert_eq!(advance(5 * SECOND, 0, 2 * SECOND), (3 * SECOND, 0));
        assert_eq!(advance(5 * SECOND, 0, 9 * SECOND), (1, 0));
        assert_eq!(advance(SECOND, 2 * SECOND, 2 * SECOND), (SECOND, 1));
        assert_eq!(advance(SECOND, 2 * SECOND, 6 * SECOND), (SECOND, 3));
        assert_eq!(advance(0, 0, SECOND), (0, 0));
    }

    proptest! {
        /// Expirations are at left, left + every, ...: those up to `passed` are missed, the next
        /// one is left.
        #[test]
        fn a_period_is_kept(left in 1..1_000_000_000_000i64, every in 1..1_000_000_000_000i64, passed in 0..10_000_000_000_000i64) {
            let (rest, missed) = advance(left, every, passed);
            prop_assert!(rest >= 1);
            prop_assert_eq!(passed + rest, left + missed as i64 * every);
            prop_assert!(missed == 0 || rest <= every);
        }

        /// Two sleeps are as good as one.
        #[test]
        fn sleeps_add_up(left in 1..1_000_000_000i64, every in 1..1_000_000_000i64, a in 0..10_000_000_000i64, b in 0..10_000_000_000i64) {
            let (between, first) = advance(left, every, a);
            let (rest, second) = advance(between, every, b);
            prop_assert_eq!((rest, first + second), advance(left, every, a + b));
        }

        #[test]
        fn single_timers_are_never_early(left in 1..1_000_000_000i64, passed in 0..2_000_000_000i64) {
            let (rest, missed) = advance(left, 0, passed);
            prop_assert_eq!((rest, missed), ((left - passed).max(1), 0));
        }
    }

    /// Timers that fire once keep their time, and those of the time of day.
    #[test]
    fn periodic_timers_are_moved_by_a_part_of_their_interval() {
        const HALF: u32 = 1 << 31;
        let due = |source, at_ns, every_ns, monotonic| Due { source, at_ns, every_ns, monotonic };
        let timerfd = |clock, every_ns| Timerfd {
            pid: 2,
            fd: 3,
            clock,
            next_ns: Some(1000),
            every_ns,
            unread: 0,
            relative: false,
            cancel_on_set: false,
        };
        let mut clocks = Clocks {
            frozen_ns: 100,
            read_ns: [(2, 100)].into(),
            dues: vec![
                due(Source::Interval, 500, Some(60), true),
                due(Source::Posix, 500, None, true),
                due(Source::Timerfd, 1000, Some(60), false),
                due(Source::Call, 500, Some(60), true),
                due(Source::Interval, 100, Some(60), true),
            ],
            timerfds: vec![timerfd(MONOTONIC, 1000), timerfd(REALTIME, 1000), timerfd(MONOTONIC, 0)],
            ..Clocks::default()
        };
        assert!(clocks.has_periodic());
        clocks.spread(HALF);
        // That of the images is found in these, as it is there then.
        let dues: Vec<_> = clocks.dues.iter().map(|due| (due.source, due.at_ns)).collect();
        let others = [(Source::Posix, 500), (Source::Timerfd, 1000), (Source::Call, 500), (Source::Interval, 100)];
        assert_eq!(dues[..4], others);
        assert_eq!(dues[4..], [(Source::Timerfd, 500)]);
        assert_eq!(clocks.timerfds.iter().map(|timer| timer.next_ns).collect::<Vec<_>>(), [500, 1000, 1000].map(Some));
        clocks.dues.retain(|due| due.every_ns.is_none());
        clocks.timerfds.clear();
        assert!(!clocks.has_periodic());
        for (left, every, moved) in [(5, 2, 5), (2, 2, 1), (1, 2, 2), (0, 2, 0), (900, 1000, 400)] {
            assert_eq!(crate::noted::spread_left(left, every, HALF), moved, "{left} of {every}");
        }
        for (left, every, moved) in [((1, 0), (2, 0), (2, 0)), ((5, 0), (0, 0), (5, 0)), ((0, 0), (2, 0), (0, 0))] {
            let mut core = core_of(task_timers_entry::REAL, &real(left, every));
            let edited = core.edit_messages::<Malformed>(core_entry::TC, |task| {
                task.edit_messages::<Malformed>(task_core_entry::TIMERS, |timers| spread_task_timers(timers, HALF))
            });
            edited.unwrap();
            assert_eq!(core, core_of(task_timers_entry::REAL, &real(moved, every)), "{left:?} of {every:?}");
        }
    }

    /// An interval timer: seconds and microseconds that are left, and those of its interval.
    fn real(left: (u64, u64), every: (u64, u64)) -> Message {
        let mut real = Message::default();
        real.set_varint(itimer_entry::ISEC, every.0);
        real.set_varint(itimer_entry::IUSEC, every.1);
        real.set_varint(itimer_entry::VSEC, left.0);
        real.set_varint(itimer_entry::VUSEC, left.1);
        real
    }

    /// A process that has no timer but that interval timer, of which the image has field `kind`.
    fn core_of(kind: u32, timer: &Message) -> Message {
        let (mut core, mut task, mut timers) = (Message::default(), Message::default(), Message::default());
        timers.set_bytes(kind, timer.encode());
        task.set_bytes(task_core_entry::TIMERS, timers.encode());
        core.set_bytes(core_entry::TC, task.encode());
        core
    }

    #[test]
    fn missed_signals_are_sent_once() {
        let posix = |notify: u64| {
            let mut timer = Message::default();
            for (field, value) in [
                (posix_timer_entry::IT_ID, 6),
                (posix_timer_entry::CLOCK_ID, 1),
                (posix_timer_entry::SI_SIGNO, 40),
                (posix_timer_entry::IT_SIGEV_NOTIFY, notify),
                (posix_timer_entry::SIVAL_PTR, 77),
                (posix_timer_entry::ISEC, 1),
                (posix_timer_entry::INSEC, 0),
                (posix_timer_entry::VSEC, 0),
                (posix_timer_entry::VNSEC, 500_000_000),
                (posix_timer_entry::NOTIFY_THREAD_ID, 12),
            ] {
                timer.set_varint(field, value);
            }
            timer.encode()
        };
        let mut timers = Message::default();
        timers.set_bytes(task_timers_entry::REAL, real((0, 100_000), (0, 200_000)).encode());
        for notify in [4, 1, 0] {
            timers.0.push((task_timers_entry::POSIX, kip_criu_images::FieldValue::Bytes(posix(notify))));
        }
        let before = timers.clone();
        let mut missed = Signals::default();
        let passed = Passed { monotonic: 2_700_000_000, stood: SECOND, packet: None, taken: 30_000_000 };
        advance_task_timers(&mut timers, 9, &passed, &mut missed).unwrap();
        let signal = TimerSignal { signal: 40, timer: 6, overrun: 2, value: 77 };
        let posix = |thread| Missed::Posix { pid: 9, thread, signal };
        let expected = vec![Missed::Interval { pid: 9 }, posix(Some(12)), posix(None)];
        assert_eq!(missed, Signals { now: expected, later: vec![] });
        let real = timers.message(task_timers_entry::REAL).unwrap().unwrap();
        assert_eq!(interval_left(&real), 200_000_000);
        for timer in timers.messages(task_timers_entry::POSIX).unwrap() {
            assert_eq!(posix_left(&timer), 800_000_000);
        }
        // The packet came before the POSIX timers were due, and after the interval timer was.
        let (mut timers, mut missed) = (before, Signals::default());
        advance_task_timers(&mut timers, 9, &Passed { packet: Some(400_000_000), stood: 0, ..passed }, &mut missed)
            .unwrap();
        assert_eq!((missed.now.len(), missed.later.len()), (1, 2));
    }

    #[test]
    fn what_was_due_after_the_packet_comes_after_it() {
        let (ms, passed) =
            (1_000_000, Passed { monotonic: 5 * SECOND, stood: 0, packet: Some(4 * SECOND), taken: 30_000_000 });
        let advanced = |left, every| passed.advance(MONOTONIC, left, every);
        assert_eq!(advanced(4500 * ms, 0), (30 * ms, 0, true), "due while it was woken");
        assert_eq!(advanced(5010 * ms, 0), (30 * ms, 0, true), "due as it begins");
        assert_eq!(advanced(5040 * ms, 0), (40 * ms, 0, false));
        assert_eq!(advanced(3500 * ms, 0), (1, 0, false), "due before the packet");
        assert_eq!(advanced(4500 * ms, 2 * SECOND), (1500 * ms, 1, true), "its beat is kept");
        assert_eq!(advanced(4500 * ms, 250 * ms), (250 * ms, 3, true), "the one that comes 250 ms from now is not due");
        assert_eq!(advanced(3500 * ms, 2 * SECOND), (500 * ms, 1, false));
    }

    /// The kernel arms an interval timer again when its signal is taken: while that waits, nothing
    /// is left and the interval is there.
    #[test]
    fn a_timer_whose_signal_waits_is_armed() {
        for kind in [task_timers_entry::REAL, task_timers_entry::VIRT, task_timers_entry::PROF] {
            let core = |left, every| core_of(kind, &real((left, 0), (every, if every == 0 { 0 } else { 7 })));
            let left = |core: &Message| {
                let task = core.message(core_entry::TC).unwrap().unwrap();
                let timers = task.message(task_core_entry::TIMERS).unwrap().unwrap();
                interval_left(&timers.message(kind).unwrap().unwrap())
            };
            for (mut core, armed, expected) in [
                (core(0, 2), true, 2 * SECOND + 7_000),
                (core(1, 2), false, SECOND),
                (core(1, 0), false, SECOND),
                (core(0, 0), false, 0),
            ] {
                assert_eq!(arm_pending(&mut core).unwrap(), armed);
                assert_eq!(left(&core), expected);
            }
        }
    }

    /// A tick that came while the program was frozen is no reason to wake at once, any other signal
    /// is.
    #[test]
    fn signals_of_ticks_are_gathered() {
        let core = core_of(task_timers_entry::REAL, &real((0, 100_000), (0, 200_000)));
        let (mut arrived, mut dues) = (1 << (SIGALRM - 1) | 1, Vec::new());
        assert!(collect(&core, SECOND, &mut arrived, &mut dues).unwrap());
        assert_eq!(arrived, 1);
        let every_ns = Some(200_000_000);
        let due = |at_ns| Due { source: Source::Interval, at_ns, every_ns, monotonic: true };
        assert_eq!(dues, [due(SECOND + 100_000_000), due(SECOND)]);
    }

    /// A timerfd is noted, the time passes, and another one takes its place.
    #[test]
    fn a_timerfd_goes_on_in_another() {
        let every = 40_000_000;
        for (clock, id) in
            [(TimerfdClockId::Monotonic, 1), (TimerfdClockId::Realtime, 0), (TimerfdClockId::Boottime, 7)]
        {
            for absolute in [false, true] {
                let old = timerfd_create(clock, TimerfdFlags::NONBLOCK).unwrap();
                let begin = Now::read();
                let at_ns = begin.on(id) + every;
                let value = if absolute {
                    TimerSetting::Absolute { at_ns, cancel_on_set: false }
                } else {
                    TimerSetting::Relative(every)
                };
                timer::set_timerfd(old.as_fd(), value, every).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                let noted = note(old.as_fd(), 1, 5, id).unwrap().unwrap();
                let new = timerfd_create(clock, TimerfdFlags::NONBLOCK).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                set_timerfd(new.as_fd(), &noted).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                // Both are live: they agree for ever, but for the time between the two looks.
                let looked_ns = Now::read().monotonic_ns;
                let (a, b) = (timer::timerfd_state(old.as_fd()).unwrap(), timer::timerfd_state(new.as_fd()).unwrap());
                assert!(a.unread.abs_diff(b.unread) <= 1, "{id} {absolute}: {a:?} {b:?}");
                let now_ns = Now::read().monotonic_ns;
                let ticks = (now_ns - begin.monotonic_ns) / every;
                assert!((ticks - b.unread as i64).abs() <= 1, "{id} {absolute}: {b:?} after {ticks}");
                let apart = (a.left_ns - b.left_ns).rem_euclid(every);
                let most = 2_000_000 + now_ns - looked_ns;
                assert!(apart.min(every - apart) < most, "{id} {absolute}: {a:?} {b:?}");
            }
        }
    }
}
