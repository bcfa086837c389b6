//! What makes a sleeper due, and when.

use crate::now::Now;
use serde::{Deserialize, Serialize};

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

/// What is left until something is due, and after how long it is due again, nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left {
    pub(crate) ns: i64,
    pub(crate) every_ns: i64,
}

pub(crate) fn push_due(dues: &mut Vec<Due>, source: Source, now: Now, left: Left, monotonic: bool) {
    if left.ns > 0 {
        let at_ns = now.monotonic_ns.saturating_add(left.ns);
        dues.push(Due { source, at_ns, every_ns: (left.every_ns > 0).then_some(left.every_ns), monotonic });
    }
}
