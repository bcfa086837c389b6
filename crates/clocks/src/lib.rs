//! Time across a sleep: no call returns EINTR, clocks go on, time-outs and timers are due when they
//! would have been. What threads wait for, and since when, is read by [`tree`].
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

#![forbid(unsafe_code)]

mod calls;
mod due;
mod finalize;
mod frozen;
mod noted;
mod now;
mod signals;
mod timers;
pub mod tree;
mod unread;
mod with_time_outs;

pub use calls::{Waiting, WaitingThreads, advance_millis, end_of, fill, is_over, live_due};
pub use due::{Due, Source};
pub use finalize::finalize;
pub use frozen::{ClockError, Frozen, Pending};
pub use noted::{AFTER_PACKET, AbsoluteWaits, Clocks, Form, Patch, SocketPatch, Timerfd};
pub use now::{Boot, Now};
pub use timers::{Missed, Signals, advance_timers, after_packet, interrupted_at, set_timerfd, spread};
pub use unread::Unreceived;
pub use with_time_outs::{IN_MS, POINTED, call_name};
