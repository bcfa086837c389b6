//! What a sleep notes of time for its wake, and what becomes of that while the proc sleeps.

use crate::due::{Due, Source};
use crate::now::{Boot, Now};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// CLOCK_MONOTONIC as clock_gettime(2) numbers it.
pub(crate) const MONOTONIC: u64 = 1;
/// A signal that was due after the packet came that a program is woken for is sent so long after it
/// has gone on: it has taken the packet by then, if its memory is on this machine
/// ([`Clocks::taken_within`]).
pub const AFTER_PACKET: Duration = Duration::from_millis(30);
/// The same where a store is far, at most.
pub(crate) const FAR_AFTER_PACKET: Duration = Duration::from_secs(3);
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
    /// the images are changed before the wake ([`crate::advance_millis`]).
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

/// A timerfd of a sleeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timerfd {
    /// A process that has it, as numbered inside.
    pub pid: u32,
    /// Its number there.
    pub fd: i32,
    /// The clock that `next_ns` is on, as clock_gettime(2) numbers them. A real-time timer that was
    /// set relative to its setting does not follow changes of the clock: it is given on
    /// CLOCK_MONOTONIC.
    pub clock: u64,
    /// When it expires next, nanoseconds; none when it is not armed.
    pub next_ns: Option<i64>,
    /// Its interval, nanoseconds, or 0.
    pub every_ns: i64,
    /// Unread expirations at the freeze.
    pub unread: u64,
    /// It is relative (see `clock`).
    pub relative: bool,
    /// It was set with TFD_TIMER_CANCEL_ON_SET.
    pub cancel_on_set: bool,
}

impl Timerfd {
    /// It is on CLOCK_MONOTONIC.
    pub fn is_monotonic(&self) -> bool {
        self.clock == MONOTONIC
    }
}

/// A wait until an absolute time, as it was first seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AbsoluteWait {
    /// Until when, nanoseconds of its clock.
    until_ns: i64,
    /// How long the program wanted to wait, nanoseconds.
    whole_ns: i64,
}

/// The absolute waits of a program, by threads as numbered inside. A thread makes such a call anew
/// after each stop as it is, and nothing in it shows any more how long the wait has lasted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AbsoluteWaits(pub(crate) BTreeMap<u32, AbsoluteWait>);

impl AbsoluteWaits {
    /// The whole length of a thread's wait until `until_ns` that looks `whole_ns` long now.
    pub(crate) fn whole(&mut self, thread: u32, until_ns: i64, whole_ns: i64) -> i64 {
        let known = self.0.get(&thread).filter(|known| known.until_ns == until_ns);
        let whole_ns = known.map_or(whole_ns, |known| known.whole_ns.max(whole_ns));
        self.0.insert(thread, AbsoluteWait { until_ns, whole_ns });
        whole_ns
    }

    /// Forgets threads that are not there any more.
    pub fn keep(&mut self, is_there: impl Fn(u32) -> bool) {
        self.0.retain(|thread, _| is_there(*thread));
    }
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
    /// Waits until absolute times.
    #[serde(default)]
    pub absolute: AbsoluteWaits,
    /// A thread that was frozen in the middle of work: its number inside, and its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_work: Option<(u32, String)>,
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
    /// When the wake began, nanoseconds of CLOCK_MONOTONIC.
    #[serde(skip)]
    pub wake_ns: i64,
    /// How long the first part of its memory took to come from a store, where more of it is still
    /// there; zero if all of it is on this machine.
    #[serde(skip)]
    pub far: Duration,
}

/// All timerfds are noted this long after the freeze, nanoseconds.
const NOTED_WITHIN_NS: i64 = 200_000_000;

/// What is left of a periodic timer that is moved by so many parts of 2^32 of its interval, within
/// the interval; all nanoseconds. One whose first expiration is further away keeps that.
pub(crate) fn spread_left(left_ns: i64, every_ns: i64, drawn: u32) -> i64 {
    if left_ns <= 0 || left_ns > every_ns {
        return left_ns;
    }
    let by = ((i128::from(every_ns) * i128::from(drawn)) >> 32) as i64;
    (left_ns - 1 + by) % every_ns + 1
}

impl Timerfd {
    /// It fires again and again, and not by the time of day.
    fn is_periodic(&self) -> bool {
        self.every_ns > 0 && self.next_ns.is_some() && (self.is_monotonic() || self.relative)
    }
}

impl Due {
    /// It is a timer that fires again and again, as [`crate::spread`] moves it.
    pub(crate) fn is_periodic(&self) -> bool {
        let moves = match self.source {
            Source::Interval | Source::Posix => true,
            // One that follows the time of day is on another clock.
            Source::Timerfd => self.monotonic,
            Source::Call | Source::Work => false,
        };
        moves && self.every_ns.is_some()
    }
}

impl Clocks {
    /// Whether it has timers that fire again and again.
    pub fn has_periodic(&self) -> bool {
        self.dues.iter().any(Due::is_periodic) || self.timerfds.iter().any(Timerfd::is_periodic)
    }

    /// Moves them, but for those in the images, which are not due any more either.
    pub(crate) fn spread(&mut self, drawn: u32) {
        // One that has expired before the freeze, and whose signal waits, is due as it was.
        let frozen_ns = self.frozen_ns;
        self.dues.retain(|due| !due.is_periodic() || due.at_ns <= frozen_ns);
        for timer in self.timerfds.iter_mut().filter(|timer| timer.is_periodic()) {
            let Some(next) = timer.next_ns else { continue };
            // It may have expired between the freeze and the moment at which it was noted.
            let (left, every) = (next - frozen_ns, timer.every_ns);
            let left = if left > every && left - every < NOTED_WITHIN_NS { (left - 1) % every + 1 } else { left };
            let at_ns = frozen_ns.saturating_add(spread_left(left, every, drawn));
            timer.next_ns = Some(at_ns);
            self.dues.push(Due { source: Source::Timerfd, at_ns, every_ns: Some(timer.every_ns), monotonic: true });
        }
    }

    /// The same for a program that is given a packet which came while it was being woken for
    /// something else. The moment is not known: what was not due when the wake began comes after
    /// the packet.
    pub fn with_packet(&self) -> Clocks {
        Clocks { packet_ns: Some(self.wake_ns), ..self.clone() }
    }

    /// When the program has taken the packet that it is woken for, from the moment at which it goes
    /// on. One whose memory is in a store waits for pages before it can, each for about as long as
    /// the first part took to come.
    pub fn taken_within(&self) -> Duration {
        AFTER_PACKET.max((2 * self.far).min(FAR_AFTER_PACKET))
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
}
