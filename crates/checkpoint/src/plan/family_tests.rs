//! Tests of [`super`]: trees that a history of forks, sessions and ends has made, and are made
//! again as the restorer makes them.

use super::*;
use std::collections::{BTreeMap, BTreeSet};

const SPARE: u64 = 1000;

/// Numbers by chance, the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// Processes as a kernel has them.
#[derive(Debug, Clone, Default)]
struct World(BTreeMap<u64, Entry>);

impl World {
    fn new() -> World {
        World(BTreeMap::from([(1, Entry { pid: 1, parent: 0, group: 1, session: 1, takes_orphans: false })]))
    }

    fn fork(&mut self, parent: u64, pid: u64, as_sibling: bool) {
        let taken = self.0.values().any(|e| e.pid == pid || e.group == pid || e.session == pid);
        assert!(!taken, "the number {pid} is in use");
        let of = self.0[&parent];
        let parent = if as_sibling { of.parent } else { parent };
        self.0.insert(pid, Entry { pid, parent, takes_orphans: false, ..of });
    }

    fn setsid(&mut self, pid: u64) -> bool {
        if self.0.values().any(|e| e.group == pid) {
            return false;
        }
        let at = self.0.get_mut(&pid).unwrap();
        (at.session, at.group) = (pid, pid);
        true
    }

    fn setpgid(&mut self, pid: u64, group: u64) -> bool {
        let session = self.0[&pid].session;
        let is_there = group == pid || self.0.values().any(|e| e.group == group && e.session == session);
        if session == pid || !is_there {
            return false;
        }
        self.0.get_mut(&pid).unwrap().group = group;
        true
    }

    fn exit(&mut self, pid: u64) {
        let mut heir = self.0[&pid].parent;
        while heir != 1 && !self.0[&heir].takes_orphans {
            heir = self.0[&heir].parent;
        }
        self.0.remove(&pid);
        self.0.values_mut().filter(|e| e.parent == pid).for_each(|e| e.parent = heir);
    }

    fn entries(&self) -> Vec<Entry> {
        self.0.values().copied().collect()
    }
}

/// Makes the tree as the restorer does: early children, setsid, the others, the group, and a
/// ghost's end.
fn make(order: &[Member]) -> World {
    let mut world = World::new();
    let mut waiting: Vec<u64> = Vec::new();
    fn children(world: &mut World, order: &[Member], of: usize, early: bool, waiting: &mut Vec<u64>) {
        let made_by = |m: &&Member| m.maker.is_some_and(|maker| (maker.index, maker.early) == (of, early));
        for (index, member) in order.iter().enumerate().filter(|(_, m)| made_by(m)) {
            world.fork(order[of].pid, member.pid, member.maker.unwrap().sibling);
            children(world, order, index, true, waiting);
            if member.session == member.pid {
                assert!(world.setsid(member.pid), "{member:?} leads a group");
            }
            children(world, order, index, false, waiting);
            match member.joins {
                Joins::Inherits => {}
                Joins::Enters => {
                    // Here one after the other: it would wait.
                    if !world.setpgid(member.pid, member.group) {
                        waiting.push(member.pid);
                    }
                }
                Joins::Lends => {
                    world.fork(member.pid, member.group, false);
                    assert!(world.setpgid(member.group, member.group) && world.setpgid(member.pid, member.group));
                    world.exit(member.group);
                }
            }
            if member.entry.is_none() {
                world.exit(member.pid);
            }
        }
    }
    children(&mut world, order, 0, false, &mut waiting);
    for pid in waiting {
        let member = order.iter().find(|m| m.pid == pid).unwrap();
        assert!(world.setpgid(pid, member.group), "{member:?} waits for ever in {order:#?}");
    }
    world
}

fn without_flags(entries: &[Entry]) -> BTreeSet<[u64; 4]> {
    entries.iter().map(|e| [e.pid, e.parent, e.session, e.group]).collect()
}

/// (pid, parent, group, session).
fn tree(processes: &[(u64, u64, u64, u64)]) -> Vec<Entry> {
    let entry = |(pid, parent, group, session): &_| Entry {
        pid: *pid,
        parent: *parent,
        group: *group,
        session: *session,
        takes_orphans: false,
    };
    processes.iter().map(entry).collect()
}

#[track_caller]
fn made_again(entries: &[Entry]) {
    let order = order(entries, SPARE).unwrap_or_else(|e| panic!("{e}: {entries:?}"));
    assert_eq!(without_flags(&make(&order).entries()), without_flags(entries), "{order:#?}");
}

#[test]
fn what_daemons_and_shells_leave() {
    for processes in [
        // A daemon; the same below a process that takes orphans; with a child of its own and one in
        // a group of its own.
        &[(1, 0, 1, 1), (2, 1, 2, 2), (9, 1, 8, 8)][..],
        &[(1, 0, 1, 1), (2, 1, 2, 2), (9, 2, 8, 8)],
        &[(1, 0, 1, 1), (2, 1, 2, 2), (9, 2, 8, 8), (10, 9, 8, 8), (11, 9, 11, 8)],
        // Children from before setsid, in a session with a leader and in one without.
        &[(1, 0, 1, 1), (2, 1, 2, 2), (4, 2, 4, 4), (5, 4, 2, 2)],
        &[(1, 0, 1, 1), (2, 1, 2, 2), (9, 1, 9, 9), (10, 9, 8, 8)],
        &[(1, 0, 1, 1), (2, 1, 2, 2), (9, 1, 9, 9), (10, 9, 8, 8), (11, 1, 8, 8)],
        // Groups without a leader: a job, and one of a session without a leader.
        &[(1, 0, 1, 1), (2, 1, 2, 2), (6, 2, 5, 2), (7, 2, 5, 2), (8, 7, 5, 2)],
        &[(1, 0, 1, 1), (2, 1, 2, 2), (9, 1, 7, 6), (10, 9, 6, 6), (11, 1, 6, 6)],
        // The leader lives elsewhere.
        &[(1, 0, 1, 1), (2, 1, 2, 2), (3, 2, 2, 2), (4, 3, 4, 4), (6, 1, 4, 4)],
    ] {
        made_again(&tree(processes));
    }
}

#[test]
fn parents_that_lead_no_session_cannot_both_have_children_of_one_without_a_leader() {
    // A leader above both took them to be orphans, and is gone.
    let refused =
        order(&tree(&[(1, 0, 1, 1), (2, 1, 2, 2), (4, 2, 2, 2), (5, 2, 2, 2), (9, 4, 8, 8), (11, 5, 8, 8)]), SPARE);
    assert!(refused.unwrap_err().contains("session 8"));
    made_again(&tree(&[(1, 0, 1, 1), (2, 1, 2, 2), (3, 1, 3, 3), (9, 2, 8, 8), (11, 3, 8, 8)]));
}

// promise waking: any tree that forks, sessions, groups and ends can leave is made again as it was,
//   or refused
// held by: this, `kip_checkpoint::plan::family::tests::what_daemons_and_shells_leave`
/// Histories by chance. Whatever is said to be possible comes out as it was; nearly all is
/// possible.
#[test]
fn any_history_is_made_again_or_refused() {
    let (mut refused, rounds) = (0, 5_000);
    for round in 0..rounds {
        let (mut chance, mut world, mut next) = (Chance(round), World::new(), 2);
        world.fork(1, 2, false);
        for _ in 0..4 + chance.below(30) {
            let pids: Vec<u64> = world.0.keys().copied().filter(|pid| *pid != 1).collect();
            let Some(&pid) = pids.get(chance.below(pids.len().max(1))) else { break };
            match chance.below(10) {
                0..=4 => {
                    next += 1;
                    world.fork(pid, next, false);
                }
                5 => drop(world.setsid(pid)),
                6 => drop(world.setpgid(pid, pid)),
                7 => {
                    let group = world.0[&pids[chance.below(pids.len())]].group;
                    let _ = world.setpgid(pid, group);
                }
                8 if chance.below(4) == 0 => world.0.get_mut(&pid).unwrap().takes_orphans = true,
                _ if pid != 2 => world.exit(pid),
                _ => {}
            }
        }
        let entries = world.entries();
        match order(&entries, SPARE) {
            Ok(order) => {
                let again = make(&order);
                assert_eq!(without_flags(&again.entries()), without_flags(&entries), "round {round}: {order:#?}");
            }
            Err(_) => refused += 1,
        }
    }
    assert!(refused * 20 < rounds, "{refused} of {rounds} are refused");
}
