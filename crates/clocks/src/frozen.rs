//! What is asked of a frozen process tree.

use crate::noted::AbsoluteWaits;
use kip_criu_images::CheckpointImageError;
use std::io;
use std::os::fd::OwnedFd;

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
    /// Absolute waits as they were seen before.
    pub absolute: &'a AbsoluteWaits,
    /// The sleep is to be a suspended one.
    pub stands: bool,
    /// The program has system call filters of its own: no call is exchanged for another. Set by
    /// [`crate::finalize`].
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
    Image(#[from] CheckpointImageError),
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
