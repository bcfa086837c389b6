//! What there is of a proc now: one thing at a time, each with what its task knows only then.

use super::deadline::Levels;
use super::hibernate::Hibernating;
use crate::idle::{DryRun, Idle};
use kip_net::activity::TrafficCounters as Traffic;
use kip_records::due::NextWake;
use kip_types::Tier;
use std::os::fd::OwnedFd;
use std::time::Instant;
use tokio::io::unix::AsyncFd;

/// What there is of a proc now. The record says what is to be true of a proc, a phase what its task
/// has at hand for that.
#[derive(Debug, Default)]
pub(super) enum Phase {
    /// Nothing that the task watches: the proc is stopped, is to be started again, is elsewhere, or
    /// is between two phases.
    #[default]
    Down,
    /// The program had ended before the task could watch it.
    Gone,
    /// The program runs.
    Running(Box<Running>),
    /// The program is hibernated.
    Hibernated(Box<Hibernating>),
    /// The proc is parked or archived.
    Parked(Parked),
}

/// What a running program was woken by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Woke {
    /// It was not woken, or for something: it was started, its daemon is a new one, a packet has
    /// come, it was called.
    Called,
    /// For ticks and nothing else so far.
    ForTicks,
    /// It touched its memory.
    Touch {
        /// No data has come for it.
        without_data: bool,
        /// By a tick that touched more than the pager had patience for, or of which Kip did not
        /// know.
        by_a_tick: bool,
    },
}

/// A running proc.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) pidfd: AsyncFd<OwnedFd>,
    pub(super) idle: Idle<Traffic>,
    pub(super) next_sample: Instant,
    pub(super) levels: Levels,
    /// What woke it.
    pub(super) woke: Woke,
    /// Where it woke from; hot for one that was started.
    pub(super) from: Tier,
    /// No automatic sleep before this.
    pub(super) not_before: Instant,
    /// When a sleep was put off because a wait was about to end.
    pub(super) put_off: Option<Instant>,
    /// When its first wait ends and its first timer is due, as it was seen before the last sleep
    /// that Kip began by itself.
    pub(super) first_due: Option<Instant>,
    /// It cannot be hibernated: from hot it goes to parked.
    pub(super) no_hibernation: bool,
    /// Parked, its ticks would be late.
    pub(super) ticks: bool,
    pub(super) dry_run: Option<DryRun>,
}

impl Running {
    /// One that begins to run.
    pub(super) fn new(pidfd: AsyncFd<OwnedFd>, from: Tier, woke: Woke, dry_run: bool) -> Running {
        let now = Instant::now();
        Running {
            pidfd,
            idle: Idle::new(now),
            next_sample: now,
            levels: Levels::since(now),
            woke,
            from,
            not_before: now,
            put_off: None,
            first_due: None,
            no_hibernation: false,
            ticks: false,
            dry_run: dry_run.then(|| DryRun::new(now)),
        }
    }
}

/// A parked or archived proc.
#[derive(Debug)]
pub(super) struct Parked {
    /// The next timer that it has to be woken for.
    pub(super) next: Option<NextWake>,
    /// Since when it has been parked, or since when another try to archive it is not worth it.
    pub(super) since: Instant,
    /// What it wakes from, or a part of that, is not to be had from the store, or it is parked
    /// without its volumes: when its sockets and timers may wake it again.
    pub(super) listens_again: Option<Instant>,
    /// Its generation has just come from the store.
    pub(super) fetched: bool,
    /// The thread that was at work when the program was frozen:
    /// [`kip_clocks::Clocks::at_work`].
    pub(super) at_work: Option<(u32, String)>,
}

impl Default for Parked {
    fn default() -> Parked {
        Parked::new(None)
    }
}

impl Parked {
    /// Its sockets and timers may not wake it before `at`.
    pub(super) fn wait_until(&mut self, at: Instant) {
        (self.next, self.listens_again) = (None, Some(at));
    }

    /// One that is parked now.
    pub(super) fn new(next: Option<NextWake>) -> Parked {
        Parked { next, since: Instant::now(), listens_again: None, fetched: false, at_work: None }
    }
}

impl Phase {
    pub(super) fn running(&self) -> Option<&Running> {
        if let Phase::Running(running) = self { Some(running) } else { None }
    }

    pub(super) fn running_mut(&mut self) -> Option<&mut Running> {
        if let Phase::Running(running) = self { Some(running) } else { None }
    }

    pub(super) fn hibernated(&self) -> Option<&Hibernating> {
        if let Phase::Hibernated(hibernated) = self { Some(hibernated) } else { None }
    }

    pub(super) fn hibernated_mut(&mut self) -> Option<&mut Hibernating> {
        if let Phase::Hibernated(hibernated) = self { Some(hibernated) } else { None }
    }

    pub(super) fn parked(&self) -> Option<&Parked> {
        if let Phase::Parked(parked) = self { Some(parked) } else { None }
    }

    /// Of a proc that is parked, whatever the task knew of it before.
    pub(super) fn parked_mut(&mut self) -> &mut Parked {
        if !matches!(self, Phase::Parked(_)) {
            *self = Phase::Parked(Parked::new(None));
        }
        match self {
            Phase::Parked(parked) => parked,
            _ => unreachable!("just made"),
        }
    }

    /// The next timer that a sleeper has to be woken for.
    pub(super) fn next_timer(&self) -> Option<NextWake> {
        match self {
            Phase::Parked(parked) => parked.next,
            Phase::Hibernated(hibernated) => hibernated.next,
            _ => None,
        }
    }

    /// The program has ended.
    pub(super) async fn ended(&self) {
        let pidfd = match self {
            Phase::Running(running) => Some(&running.pidfd),
            Phase::Hibernated(hibernated) => hibernated.pidfd.as_ref(),
            Phase::Gone => None,
            Phase::Down | Phase::Parked(_) => return std::future::pending().await,
        };
        if let Some(pidfd) = pidfd {
            drop(pidfd.readable().await);
        }
    }
}
