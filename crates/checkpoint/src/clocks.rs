//! Time across a sleep: no call returns EINTR, clocks go on, time-outs and timers are due when they
//! would have been.
//!
//! At the end of a dump, every task stopped, [`finalize`] sets threads that CRIU interrupted back
//! onto their system call and notes every time-out and timer ([`calls`], [`timers`]). The wake
//! moves POSIX and interval timers in the images by the time that has passed ([`advance_timers`]),
//! and sets the rest in the restored processes just before they run: time-outs in their stacks,
//! timerfds, socket options, and the signals of timers that expired meanwhile. CRIU's time
//! namespace is left out, so that every clock is the machine's.
//!
//! In a suspended sleep ([`Clocks::stands`]) the program's CLOCK_MONOTONIC stands:
//! [`Clocks::resumed`] moves whatever is on that clock by the length of the sleep, as if the freeze
//! had been at the wake, and what is ahead of the machine's clock ([`Clocks::ahead_ns`]) back by as
//! much. The processes of the wake are born in a time namespace with that offset, and keep it in
//! all later sleeps. All times here are on the machine's clock but those that the program itself
//! gave as absolute ones.

mod calls;
mod signals;
mod timers;

pub use calls::{Since, Waiting, advance_millis, end_of, is_over, live_due, patch_bytes};
pub use timers::{AFTER_PACKET, Missed, Signals, Timerfd, advance_timers, after_packet, interrupted_at, set_timerfd};

use crate::hold::{has_own_filters, stopped_threads};
use kip_criu_images::fields::{core_entry, thread_info_x86};
use kip_criu_images::{ImageError, Images, Malformed};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;

/// Nanoseconds in a second.
const SECOND: i64 = 1_000_000_000;

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
    /// No timer: it was frozen in the middle of work.
    Work,
}

/// One timer of a sleeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Due {
    /// What it is.
    pub source: Source,
    /// When, nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: i64,
    /// How often it comes, as far as is known: the interval, or a relative time-out's whole length.
    /// None for a timer that fires once.
    pub every_ns: Option<i64>,
    /// It is on CLOCK_MONOTONIC, and waits on in a suspended sleep for as long as that lasts.
    #[serde(default)]
    pub monotonic: bool,
}

/// After a suspended sleep a program's tick that was nearer than this comes first, nanoseconds: a
/// program that keeps the time of day from its last tick, as redis does, takes a client that has
/// just come for one that was silent all the while.
const TICKS_FIRST_NS: i64 = 200_000_000;

/// A relative time-out that the wake writes into a thread's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patch {
    /// The thread, as numbered inside.
    pub thread: u32,
    /// Where the time-out is.
    pub address: u64,
    /// What was left of it at the freeze, nanoseconds.
    pub left_ns: i64,
    /// It is on a clock that goes on in a suspended sleep.
    #[serde(default)]
    pub goes_on: bool,
    /// How long the program wanted to wait, nanoseconds; 0 where that is not known.
    #[serde(default)]
    pub whole_ns: i64,
    /// What the call takes there.
    #[serde(default)]
    pub form: Form,
}

/// What a call takes as its time-out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// A struct timespec of ours, with a record of when the wait ends: [`kip_sys::ends`].
    #[default]
    Record,
    /// The program's own struct timespec, which the kernel updates.
    Timespec,
    /// The program's own struct timeval, which the kernel updates.
    Timeval,
    /// Milliseconds in a register, whose field in CRIU's message takes the place of the address:
    /// the images are changed before the wake ([`advance_millis`]).
    Millis,
}

/// A time-out of a socket that the wake sets to what is left, and back when the thread is in its
/// call again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketPatch {
    /// The thread, as numbered inside.
    pub thread: u32,
    /// Number of the call that it waits in.
    pub call: u64,
    /// The socket's descriptor in its process.
    pub fd: i32,
    /// SO_SNDTIMEO, otherwise SO_RCVTIMEO.
    pub sending: bool,
    /// The option as the program set it, nanoseconds.
    pub whole_ns: i64,
    /// What was left of it at the freeze, nanoseconds.
    pub left_ns: i64,
    /// Where a record of the wait's end goes; none in images that were made before there were any.
    #[serde(default)]
    pub record: Option<u64>,
}

/// What the wake needs to know about time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clocks {
    /// CLOCK_MONOTONIC at the freeze, nanoseconds.
    pub frozen_ns: i64,
    /// Relative time-outs.
    pub patches: Vec<Patch>,
    /// Time-outs of sockets.
    #[serde(default)]
    pub sockets: Vec<SocketPatch>,
    /// Threads, and addresses of words that have to be in memory when they begin their calls anew:
    /// the kernel changes a word of FUTEX_LOCK_PI in a way that cannot wait for a page.
    #[serde(default)]
    pub words: Vec<(u32, u64)>,
    /// Timerfds that are armed or unread.
    #[serde(default)]
    pub timerfds: Vec<Timerfd>,
    /// When CRIU read the timers of each process (as numbered inside), nanoseconds of
    /// CLOCK_MONOTONIC.
    #[serde(default)]
    pub read_ns: BTreeMap<u32, i64>,
    /// Threads that stand on a call, which they make again.
    #[serde(default)]
    pub standing: BTreeSet<u32>,
    /// Everything that is due some time.
    pub dues: Vec<Due>,
    /// How far the program's CLOCK_MONOTONIC was ahead of the machine's at the freeze, nanoseconds;
    /// less than 0 after a suspended sleep.
    #[serde(default)]
    pub ahead_ns: i64,
    /// The sleep is a suspended one: that clock stands from the freeze on.
    #[serde(default)]
    pub stands: bool,
    /// How long it stood, once the sleep has ended, nanoseconds.
    #[serde(skip)]
    pub stood_ns: i64,
    /// When the packet came that the wake is for, nanoseconds of CLOCK_MONOTONIC; none if it is for
    /// something else.
    #[serde(skip)]
    pub packet_ns: Option<i64>,
}

/// Which boot of a machine clocks belong to, and where they stood in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// /proc/sys/kernel/random/boot_id.
    pub id: String,
    /// CLOCK_REALTIME less CLOCK_MONOTONIC, nanoseconds.
    pub realtime_ahead_ns: i64,
    /// CLOCK_REALTIME less CLOCK_BOOTTIME, nanoseconds.
    pub realtime_ahead_of_boottime_ns: i64,
}

impl Boot {
    /// This one, now.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn read() -> io::Result<Boot> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        let now = Now::read();
        let realtime_ahead_of_boottime_ns = now.realtime_ns - now.boottime_ns;
        Ok(Boot { id, realtime_ahead_ns: now.realtime_ns - now.monotonic_ns, realtime_ahead_of_boottime_ns })
    }
}

impl Clocks {
    /// Whether images have to be changed for the moment at which the program goes on.
    pub fn are_in_images(&self) -> bool {
        !self.read_ns.is_empty() || self.patches.iter().any(|patch| patch.form == Form::Millis)
    }

    /// What was noted in the boot `then`, as it is in the boot `now`: all is due when it would have
    /// been by the wall clock. In the same boot nothing changes, whatever became of the wall clock.
    pub fn moved(mut self, then: &Boot, now: &Boot) -> Clocks {
        if then.id == now.id {
            return self;
        }
        let monotonic = then.realtime_ahead_ns.saturating_sub(now.realtime_ahead_ns);
        // The program's own clock goes on from where it was, not from the machine's start.
        self.ahead_ns = self.ahead_ns.saturating_sub(monotonic);
        let boottime = then.realtime_ahead_of_boottime_ns.saturating_sub(now.realtime_ahead_of_boottime_ns);
        self.frozen_ns += monotonic;
        self.read_ns.values_mut().for_each(|ns| *ns += monotonic);
        self.dues.iter_mut().for_each(|due| due.at_ns = due.at_ns.saturating_add(monotonic));
        for timer in &mut self.timerfds {
            let by = match timer.clock {
                _ if timer.relative => monotonic,
                0 | 5 | 8 | 11 => 0,
                7 | 9 => boottime,
                _ => monotonic,
            };
            timer.next_ns = timer.next_ns.map(|next| next.saturating_add(by));
        }
        self
    }

    /// How long until the first time-out or timer on CLOCK_MONOTONIC that is due within
    /// [`TICKS_FIRST_NS`] of the freeze.
    fn left_to_tick(&self) -> i64 {
        let left = self.dues.iter().filter(|due| due.monotonic).map(|due| due.at_ns - self.frozen_ns);
        left.filter(|left| (0..=TICKS_FIRST_NS).contains(left)).min().unwrap_or(0)
    }

    /// What was noted, as it is for a wake at `now`. After a suspended sleep all that is on
    /// CLOCK_MONOTONIC is as far away as it was at the freeze; a tick that was near is due now.
    /// However the machine's clocks were set, the program's never goes backward.
    pub fn resumed(mut self, now: Now) -> Clocks {
        let passed = now.monotonic_ns - self.frozen_ns;
        if !self.stands {
            self.ahead_ns -= passed.min(0);
            return self;
        }
        let passed = passed - self.left_to_tick().min(passed.max(0));
        self.ahead_ns -= passed;
        self.stood_ns = passed;
        self.frozen_ns += passed;
        self.read_ns.values_mut().for_each(|ns| *ns += passed);
        self.patches.iter_mut().filter(|patch| patch.goes_on).for_each(|patch| patch.left_ns -= passed);
        self.dues.iter_mut().filter(|due| due.monotonic).for_each(|due| due.at_ns = due.at_ns.saturating_add(passed));
        for timer in self.timerfds.iter_mut().filter(|timer| timer.is_monotonic()) {
            timer.next_ns = timer.next_ns.map(|next| next.saturating_add(passed));
        }
        self
    }
}

/// Access to a frozen tree. Threads are given as numbered inside.
#[derive(Clone, Copy)]
pub struct Frozen<'a> {
    /// Reads a thread's memory: thread, address, buffer. False if it cannot be read.
    pub read: &'a dyn Fn(u32, u64, &mut [u8]) -> bool,
    /// Duplicates a descriptor of a thread's process.
    pub take: &'a dyn Fn(u32, i32) -> io::Result<OwnedFd>,
    /// Signals that have arrived since a moment before the freeze, as bits; it is due at once for
    /// them.
    pub arrived: u64,
    /// Signals that wait for a thread now.
    pub waiting: &'a dyn Fn(u32) -> Pending,
    /// When CRIU had read the timers of a process, or a little later, nanoseconds of
    /// CLOCK_MONOTONIC; none where that is not known.
    pub timers_read_ns: &'a dyn Fn(u32) -> Option<i64>,
    /// When its threads were interrupted, or a little later, nanoseconds of CLOCK_MONOTONIC.
    pub interrupted_ns: i64,
    /// When one of them was, as exactly as that is known; none where it is not.
    pub still_ns: &'a dyn Fn(u32) -> Option<i64>,
    /// How far the program's CLOCK_MONOTONIC is ahead of the machine's, nanoseconds.
    pub ahead_ns: i64,
    /// The sleep is to be a suspended one.
    pub stands: bool,
    /// The program has system call filters of its own: no call is exchanged for another. Set by
    /// [`finalize`].
    pub own_filters: bool,
    /// All threads slept just before. If not it is due at once: one may have made what another
    /// waits for after that one was interrupted, and both stand in calls now.
    pub quiescent: bool,
}

/// Signals that wait, as bits of proc_pid_status(5).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pending {
    /// For one thread.
    pub own: u64,
    /// For its whole process.
    pub shared: u64,
}

/// Time cannot be taken across the sleep.
#[derive(Debug, thiserror::Error)]
pub enum ClockError {
    /// An image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A timerfd.
    #[error("timerfd {fd} of process {pid} (as numbered inside) cannot be read")]
    Timerfd {
        /// Its process, as numbered inside.
        pid: u32,
        /// Its number there.
        fd: i32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A signal of a timer.
    #[error(
        "signal {signal} came while the snapshot was taken, and it is not known which of several timers sent it; try again"
    )]
    Whose {
        /// Its number, signal(7).
        signal: u64,
    },
}

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

    /// All clocks `ns` nanoseconds later.
    pub fn later(&self, ns: i64) -> Now {
        Now {
            monotonic_ns: self.monotonic_ns + ns,
            realtime_ns: self.realtime_ns + ns,
            boottime_ns: self.boottime_ns + ns,
        }
    }

    /// The clocks as a program sees them whose CLOCK_MONOTONIC is that far ahead.
    pub fn inside(&self, ahead_ns: i64) -> Now {
        Now { monotonic_ns: self.monotonic_ns + ahead_ns, ..*self }
    }

    /// What of an absolute time on that clock (clock_gettime(2) numbers) is left; none for clocks
    /// of CPU time.
    fn left(&self, clock: u64, at_ns: i64) -> Option<i64> {
        matches!(clock, 0 | 1 | 4..=9 | 11).then(|| at_ns.saturating_sub(self.on(clock)))
    }

    /// The time on that clock.
    fn on(&self, clock: u64) -> i64 {
        match clock {
            0 | 5 | 8 | 11 => self.realtime_ns,
            7 | 9 => self.boottime_ns,
            _ => self.monotonic_ns,
        }
    }
}

/// Mends registers, points relative time-outs at our own, and finds out what is due when. Run once
/// at the end of a dump, every task stopped.
pub fn finalize(images: &mut Images, now: Now, since: &Since, frozen: &Frozen<'_>) -> Result<Clocks, ClockError> {
    let frozen = &Frozen { own_filters: has_own_filters(images)?, ..*frozen };
    let (ahead_ns, stands) = (frozen.ahead_ns, frozen.stands);
    let mut clocks = Clocks { frozen_ns: now.monotonic_ns, ahead_ns, stands, ..Clocks::default() };
    let stopped = stopped_threads(images)?;
    let (mut busy, mut arrived) = (false, frozen.arrived);
    let read = |(thread, name): (u32, String)| {
        let read_ns = (frozen.timers_read_ns)(thread).unwrap_or_else(|| timers::read_at(images, &name, now));
        Ok::<_, ImageError>((thread, read_ns, images.image(&name)?))
    };
    let mut cores = images.numbered("core").into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let came = signals::came(&cores, frozen)?;
    for (thread, read_ns, image) in &mut cores {
        let thread = *thread;
        let damaged = image.damaged();
        let mut changed = false;
        for core in &mut image.entries {
            core.edit_messages::<Malformed>(core_entry::THREAD_INFO, |info| {
                info.edit_messages::<Malformed>(thread_info_x86::GPREGS, |regs| {
                    let since = since.get(&thread).copied();
                    let before = clocks.dues.len();
                    let found = calls::finalize_thread(thread, regs, now, since, frozen, &mut clocks);
                    if stopped.contains(&thread) {
                        // The time-out of its call passes, and it stands still all the same.
                        clocks.dues.truncate(before);
                    }
                    changed |= found.changed;
                    if found.waits && !stopped.contains(&thread) {
                        clocks.standing.insert(thread);
                    }
                    busy |= !found.waits && !found.ticks && !stopped.contains(&thread);
                    Ok(())
                })
            })
            .map_err(&damaged)?;
            changed |= timers::arm_pending(core).map_err(&damaged)?;
            changed |= signals::add(core, thread, &came).map_err(&damaged)?;
            if timers::collect(core, *read_ns, &mut arrived, &mut clocks.dues).map_err(&damaged)? {
                clocks.read_ns.insert(thread, *read_ns);
            }
        }
        if changed {
            images.put(image);
        }
    }
    timers::finalize_timerfds(images, frozen, &mut clocks)?;
    if busy || arrived != 0 || !frozen.quiescent {
        // A client may be waiting for what the program was about to do, and would wait until
        // something else wakes the proc.
        clocks.dues.push(Due { source: Source::Work, at_ns: now.monotonic_ns, every_ns: None, monotonic: false });
    }
    for (_, name) in images.numbered("timens") {
        images.remove(&name);
    }
    Ok(clocks)
}

/// What is left until something is due, and after how long it is due again, nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Left {
    ns: i64,
    every_ns: i64,
}

fn push_due(dues: &mut Vec<Due>, source: Source, now: Now, left: Left, monotonic: bool) {
    if left.ns > 0 {
        let at_ns = now.monotonic_ns.saturating_add(left.ns);
        dues.push(Due { source, at_ns, every_ns: (left.every_ns > 0).then_some(left.every_ns), monotonic });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_reboot_all_is_due_by_the_wall_clock() {
        let timer = |clock, relative| Timerfd {
            pid: 2,
            fd: 3,
            clock,
            next_ns: Some(1000),
            every_ns: 0,
            unread: 0,
            relative,
            cancel_on_set: false,
        };
        let clocks = Clocks {
            frozen_ns: 500,
            read_ns: [(2, 400)].into(),
            dues: vec![Due { source: Source::Call, at_ns: 900, every_ns: None, monotonic: true }],
            timerfds: vec![timer(1, false), timer(0, false), timer(7, false), timer(1, true), timer(7, true)],
            ..Clocks::default()
        };
        let boot = |id: &str, monotonic, boottime| Boot {
            id: id.to_owned(),
            realtime_ahead_ns: monotonic,
            realtime_ahead_of_boottime_ns: boottime,
        };
        let then = boot("a", 10_000, 9_000);
        assert_eq!(clocks.clone().moved(&then, &boot("a", 70, 60)), clocks, "somebody has set the wall clock");
        let moved = clocks.moved(&then, &boot("b", 10_300, 9_700));
        assert_eq!((moved.frozen_ns, moved.read_ns[&2], moved.dues[0].at_ns), (200, 100, 600));
        let next: Vec<_> = moved.timerfds.iter().map(|t| t.next_ns.unwrap()).collect();
        assert_eq!(next, [700, 1000, 300, 700, 700]);
        assert_eq!(moved.ahead_ns, 300, "the program's clock goes on from 500, and the machine's is at 200");
    }

    #[test]
    fn after_a_suspended_sleep_the_clock_and_what_is_on_it_is_where_it_was() {
        let timer = |clock| Timerfd {
            pid: 2,
            fd: 3,
            clock,
            next_ns: Some(1000),
            every_ns: 0,
            unread: 1,
            relative: false,
            cancel_on_set: false,
        };
        let due = |monotonic| Due { source: Source::Call, at_ns: 900, every_ns: None, monotonic };
        let patch = |goes_on| Patch { thread: 2, address: 0, left_ns: 400, goes_on, whole_ns: 0, form: Form::Record };
        let clocks = Clocks {
            frozen_ns: 500,
            read_ns: [(2, 400)].into(),
            dues: vec![due(true), due(false)],
            timerfds: vec![timer(1), timer(0), timer(7)],
            patches: vec![patch(false), patch(true)],
            ahead_ns: -40,
            stands: true,
            ..Clocks::default()
        };
        let now = Now { monotonic_ns: 800, realtime_ns: 0, boottime_ns: 0 };
        // With a tick that was near, the clock stood that much shorter.
        let mut near = clocks.clone();
        near.dues[0].at_ns = 700;
        let near = near.resumed(now);
        assert_eq!((near.frozen_ns, near.ahead_ns, near.stood_ns, near.dues[0].at_ns), (600, -140, 100, 800));
        // On a machine that began later than the program was frozen the clock does not go backward
        // all the same.
        for (at_ns, began) in [(700, 450), (10 * TICKS_FIRST_NS, 450), (700, 500), (700, 600)] {
            let mut one = clocks.clone();
            one.dues[0].at_ns = at_ns;
            let there = Now { monotonic_ns: began, ..now };
            let inside = there.inside(one.resumed(there).ahead_ns).monotonic_ns;
            assert!((500 - 40..=700 - 40).contains(&inside), "{at_ns} {began}: {inside}");
        }
        let mut clocks = clocks;
        clocks.dues[0].at_ns += TICKS_FIRST_NS;
        let awake = clocks.clone().resumed(now);
        assert_eq!((awake.frozen_ns, awake.read_ns[&2], awake.ahead_ns, awake.stood_ns), (800, 700, -340, 300));
        assert_eq!(now.inside(awake.ahead_ns).monotonic_ns, 500 - 40, "as at the freeze");
        assert_eq!(awake.dues.iter().map(|due| due.at_ns).collect::<Vec<_>>(), [1200 + TICKS_FIRST_NS, 900]);
        assert_eq!(awake.patches.iter().map(|patch| patch.left_ns).collect::<Vec<_>>(), [400, 100]);
        assert_eq!(awake.timerfds.iter().map(|timer| timer.next_ns.unwrap()).collect::<Vec<_>>(), [1300, 1000, 1000]);
        let going = Clocks { stands: false, ..clocks };
        assert_eq!(going.clone().resumed(now), going);
        let earlier = Now { monotonic_ns: 450, ..now };
        assert_eq!(going.resumed(earlier).ahead_ns, 10, "the machine's clock was set back over a boot");
    }

    #[test]
    fn a_boot_is_the_same_as_long_as_it_lasts() {
        let (one, two) = (Boot::read().unwrap(), Boot::read().unwrap());
        assert!(one.id == two.id && one.id.len() == 36, "{one:?}");
        assert!((one.realtime_ahead_ns - two.realtime_ahead_ns).abs() < SECOND);
    }
}
