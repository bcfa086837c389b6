//! How a program is just before it is frozen: what its threads wait for, what its sockets offer.

use crate::descriptors::{duplicate, places};
use crate::host::Proc;
use crate::inotify::{self, InotifyEvents};
use crate::survey;
use kip_clocks::tree::Tree;
use kip_clocks::{Pending, Unreceived, WaitingThreads};
use kip_net::custody::{self, SavedOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// So long a moment is waited for in which all of the program sleeps, before it is frozen as it is.
/// One that ticks is seldom awake, but where others want the processors its ticks wait for them,
/// too.
const QUIESCENT_WITHIN: Duration = Duration::from_millis(200);
/// The program is looked at so often at least, however long it takes to look at hundreds of
/// threads.
const LEAST_LOOKS: usize = 4;
/// Between two looks.
const BETWEEN_SAMPLES: Duration = Duration::from_millis(2);
/// So many threads that ran while all were looked at are looked at again, by themselves.
const FEW: usize = 8;

/// How the program was found just before it was frozen.
#[derive(Default)]
pub(super) struct Ran {
    /// In which calls its threads waited.
    pub(super) since: WaitingThreads,
    /// Options and queues of its sockets.
    pub(super) sockets: BTreeMap<u32, SavedOptions>,
    /// Bytes of events in its inotify instances, by where these are open.
    pub(super) events: InotifyEvents,
    /// Stopped processes of which their parents have not been told.
    pub(super) unreported: Vec<u32>,
    /// All of it slept, and nothing ran.
    pub(super) quiescent: bool,
    /// Signals that waited for its threads.
    pub(super) pending: BTreeMap<u32, Pending>,
    /// What its threads had sent to each other.
    sent: Unreceived,
}

impl Ran {
    /// Of a program whose threads all sleep.
    fn of(tree: &Tree, before_stop: &WaitingThreads) -> Ran {
        let mut ran = Ran {
            sockets: BTreeMap::new(),
            events: InotifyEvents::new(),
            unreported: tree.unreported(),
            since: dated(tree.waiting(), before_stop),
            quiescent: true,
            pending: tree.pending(),
            sent: Unreceived::default(),
        };
        ran.look_at_descriptors(tree);
        ran
    }

    /// Looks again at a few threads of the program, and at what they may have changed, while they
    /// sleep; none if they do not. What waits for the others is known from before: a signal that
    /// has come since then counts as one that comes later.
    fn look_again(&mut self, tree: &Tree, few: &Tree, until: Instant) -> Option<()> {
        let mut tries = 0;
        loop {
            if let Some(asleep) = few.asleep() {
                let pending = few.pending();
                self.unreported = tree.unreported();
                self.look_at_descriptors(tree);
                if few.switches() == asleep {
                    self.pending.extend(pending);
                    return Some(());
                }
            }
            tries += 1;
            if tries >= LEAST_LOOKS && Instant::now() >= until {
                return None;
            }
            std::thread::sleep(BETWEEN_SAMPLES);
        }
    }

    /// Reads anew since when a few threads wait.
    fn redate(&mut self, few: &Tree, before_stop: &WaitingThreads) {
        self.since.retain(|thread, _| !few.threads.contains_key(thread));
        self.since.extend(dated(few.waiting(), before_stop));
    }

    /// Looks at the program once more, now that it stands still. A thread that has run since it was
    /// found asleep may have sent something to another one that was stopped in its wait before it
    /// could take that.
    pub(super) fn check(&mut self, proc: &Proc) {
        if !self.quiescent {
            return;
        }
        let now = proc.cgroup.pids().map(|pids| Unreceived::read(&Tree::read(&pids)));
        if now.map_or(true, |now| now.is_more_than(&self.sent)) {
            self.forget_seen();
        }
    }

    /// The program has run since its queues were looked at: it may have been about to look at them
    /// itself, and will not have done so when it is frozen.
    fn forget_seen(&mut self) {
        self.quiescent = false;
        self.events.clear();
        for saved in self.sockets.values_mut() {
            saved.seen = custody::Seen { full: saved.seen.full, ..custody::Seen::default() };
        }
    }

    fn look_at_descriptors(&mut self, tree: &Tree) {
        self.sockets = sockets(tree);
        self.events = inotify::events(tree);
        self.sent = Unreceived::read(tree);
    }
}

fn sockets(tree: &Tree) -> BTreeMap<u32, SavedOptions> {
    let sample = |(inode, (pid, number))| {
        let fd = duplicate(pid, number).ok()?;
        Some((inode, custody::snapshot_options(fd.as_fd()).ok()?))
    };
    places(tree).into_iter().filter_map(sample).collect()
}

/// Options and queues while the program still runs: the dump changes options, and what arrives from
/// now on may be something that the program has never seen. What is there already counts as seen
/// only if every thread slept all the while: one that runs may be about to look, and will not have
/// done so when it is frozen. A program that has just done something is given a moment to become
/// quiescent, if it is to sleep: a copy that runs at once takes it as it is.
pub(super) fn sample_before_freeze(proc: &Proc, then: &Tree, sleeps: bool) -> Ran {
    // A process that has ended or begun since then counts as it is now.
    let tree = || proc.cgroup.pids().map_or_else(|_| then.clone(), |pids| Tree::read(&pids));
    survey::find_ends(proc, &tree());
    kip_checkpoint::inotify::names::look_up(inotify::places(&tree()));
    // Our own stop makes each wait look as if it had just begun.
    let before_stop = tree().waiting();
    // A dump that is called off has each wait begin anew.
    survey::note_ends(proc);
    let until = Instant::now() + if sleeps { QUIESCENT_WITHIN } else { Duration::ZERO };
    for look in 1.. {
        if let Some(ran) = while_asleep(&tree, &before_stop) {
            return ran;
        }
        if look >= LEAST_LOOKS && Instant::now() >= until {
            break;
        }
        std::thread::sleep(BETWEEN_SAMPLES);
    }
    let tree = tree();
    let mut ran = Ran::of(&tree, &before_stop);
    ran.forget_seen();
    ran
}

/// What a program is like whose threads all sleep while it is looked at; none if they do not. To
/// look at hundreds of threads takes longer than a tick of one of them. So what can change by the
/// few that have run meanwhile is looked at again while these sleep, which is quickly done, and the
/// others only for whether they have slept from the first look to the last.
fn while_asleep(read: &dyn Fn() -> Tree, before_stop: &WaitingThreads) -> Option<Ran> {
    let tree = &read();
    let first = tree.asleep()?;
    let mut ran = Ran::of(tree, before_stop);
    let mut few = BTreeSet::new();
    let until = Instant::now() + QUIESCENT_WITHIN;
    loop {
        let now = tree.switches();
        let moved = first.iter().filter(|(thread, before)| now.get(thread) != Some(before)).map(|(thread, _)| *thread);
        let known = few.len();
        few.extend(moved);
        if few.len() == known {
            let few = tree.only(&few);
            if read().threads != tree.threads {
                return None;
            }
            // Since the last look they may have begun their next waits.
            ran.redate(&few, before_stop);
            // A wait whose beginning is not known would begin anew.
            return (!tree.has_unknown(&ran.since)).then_some(ran);
        }
        if few.len() > FEW {
            return None;
        }
        ran.look_again(tree, &tree.only(&few), until)?;
    }
}

/// Waits of now, dated by what they were before a stop of ours.
fn dated(now: WaitingThreads, before: &WaitingThreads) -> WaitingThreads {
    now.into_iter().map(|(inside, waiting)| (inside, waiting.dated(before.get(&inside)))).collect()
}
