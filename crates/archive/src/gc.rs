//! What may be deleted: a pure decision about objects that no head leads to, made so that it is right beside writers
//! that know nothing of it.
//!
//! Owns the rule; lists and deletes nothing. An object goes if two marks, the second begun a grace time after the first
//! had ended, both found that no head leads to it. A writer that stores a generation does not lock anything either: it
//! reads the candidates, refers to none of them, and publishes its head within half the grace time, or begins again
//! ([`Writing`]). One collector runs at a time (a lease): what one decides by an old look could take away what protects
//! another's decision. One that dies leaves its candidates, or none; the next goes on from there.
//!
//! ```text
//! live --no head leads to it--> candidate since T --still, begun at T + grace or later--> deleted
//!   ^------------a head leads to it again-----------'
//! ```
//!
//! Why it is right: what a writer refers to was live or young when it began. Suppose that it is deleted. Then a mark
//! ended at T without seeing it referred to, and the writer did not see it as a candidate, so it began before T and
//! published before T + grace / 2; the second mark began later and saw the head. Nor was it deleted before the writer
//! began: it was seen to be there after that.

use crate::ids::{PackId, ProcId};
use kip_types::Generation;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How long an object must have been without use, in milliseconds.
pub const GRACE_MS: u64 = 24 * 3600 * 1000;

/// Something that can be deleted. Heads never are, here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Object {
    /// Blocks.
    Pack(PackId),
    /// A generation's front.
    Front(ProcId, Generation),
}

/// What the store has, and when it was written by the store's own clock, Unix time in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Which.
    pub object: Object,
    /// When.
    pub written_ms: u64,
}

/// What earlier marks found unused, and the time at which the first of these had ended. The collector stores it before
/// it deletes anything, and each writer reads it before it refers to anything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Candidates(pub BTreeMap<Object, u64>);

impl Candidates {
    /// Whether a writer that read these may refer to a pack.
    pub fn may_use(&self, pack: &PackId) -> bool {
        !self.0.contains_key(&Object::Pack(*pack))
    }
}

/// One look at everything. Heads are read first, then the fronts that they lead to, and the list of objects is made
/// before both: what is newer than that is not there.
#[derive(Debug, Clone, Copy)]
pub struct Mark<'a> {
    /// Before the first head was read, Unix time in milliseconds.
    pub began_ms: u64,
    /// After the last.
    pub ended_ms: u64,
    /// All fronts that a head keeps, and the packs that their manifests name. One that cannot be read: do not mark at
    /// all.
    pub live: &'a BTreeSet<Object>,
    /// What the store has.
    pub stored: &'a [Stored],
}

/// What to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// To be stored, durably, before anything is deleted.
    pub candidates: Candidates,
    /// To be deleted; they stay candidates until a later mark sees them gone.
    pub delete: Vec<Object>,
}

/// Decides. `earlier`: what was stored by the last collector. A clock that goes back postpones, and deletes nothing.
pub fn plan(mark: &Mark<'_>, earlier: &Candidates, grace_ms: u64) -> Plan {
    let mut plan = Plan::default();
    for Stored { object, written_ms } in mark.stored {
        if mark.live.contains(object) {
            continue;
        }
        let since = earlier.0.get(object).copied().filter(|since| *since <= mark.began_ms).unwrap_or(mark.ended_ms);
        plan.candidates.0.insert(*object, since);
        let is_old = |since: u64| since.checked_add(grace_ms).is_some_and(|end| end <= mark.began_ms);
        if is_old(since) && is_old(*written_ms) {
            plan.delete.push(*object);
        }
    }
    plan
}

/// The storing of one generation, from the reading of the candidates to the publishing of the head.
#[derive(Debug, Clone)]
pub struct Writing {
    candidates: Candidates,
    /// Packs that were there after the candidates were read: the realm's index may still know some that are gone.
    stored: BTreeSet<PackId>,
    /// Unix time in milliseconds.
    deadline_ms: u64,
}

/// The head may not be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "storing this generation took too long, until {now_ms} instead of {deadline_ms}: what it refers to may be deleted; begin again"
)]
pub struct TooLate {
    /// Now.
    pub now_ms: u64,
    /// The last moment.
    pub deadline_ms: u64,
}

impl Writing {
    /// Begins. `now_ms` is taken before the candidates are read.
    pub fn begin(now_ms: u64, candidates: Candidates, grace_ms: u64) -> Writing {
        Writing { candidates, stored: BTreeSet::new(), deadline_ms: now_ms.saturating_add(grace_ms / 2) }
    }

    /// Tells it which packs the store has, all or those in question. The store is asked after the candidates were read.
    pub fn saw(&mut self, stored: impl IntoIterator<Item = PackId>) {
        self.stored.extend(stored);
    }

    /// Whether it may refer to a pack that was there before: asked for each, those of the parent generation included.
    /// None that was not seen.
    pub fn may_use(&self, pack: &PackId) -> bool {
        self.stored.contains(pack) && self.candidates.may_use(pack)
    }

    /// Whether the head may be published now. Asked last, right before the swap, which must take less than half the
    /// grace time.
    ///
    /// # Errors
    /// Too late.
    pub fn may_publish(&self, now_ms: u64) -> Result<(), TooLate> {
        let deadline_ms = self.deadline_ms;
        if now_ms < deadline_ms { Ok(()) } else { Err(TooLate { now_ms, deadline_ms }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pack(n: u64) -> PackId {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&n.to_le_bytes());
        PackId(id)
    }

    #[test]
    fn two_marks_a_grace_time_apart_are_needed() {
        let object = Object::Pack(pack(1));
        let stored = [Stored { object, written_ms: 0 }];
        let (none, all) = (BTreeSet::new(), BTreeSet::from([object]));
        let mark = |began_ms, live| Mark { began_ms, ended_ms: began_ms + 10, live, stored: &stored };
        let first = plan(&mark(1000, &none), &Candidates::default(), 100);
        assert_eq!((first.delete.len(), first.candidates.0[&object]), (0, 1010));
        assert!(!first.candidates.may_use(&pack(1)) && first.candidates.may_use(&pack(2)));
        assert_eq!(plan(&mark(1109, &none), &first.candidates, 100).delete, []);
        let second = plan(&mark(1110, &none), &first.candidates, 100);
        assert_eq!(second.delete, [object]);
        assert!(!second.candidates.may_use(&pack(1)), "until it is gone");
        let saved = plan(&mark(1110, &all), &first.candidates, 100);
        assert_eq!(saved, Plan::default());
        assert_eq!(plan(&mark(1200, &none), &saved.candidates, 100).delete, [], "it begins anew");
        let back = plan(&mark(500, &none), &first.candidates, 100);
        assert_eq!((back.delete.len(), back.candidates.0[&object]), (0, 510), "the clock went back");
        let young = [Stored { object, written_ms: 1050 }];
        assert_eq!(plan(&Mark { stored: &young, ..mark(1110, &none) }, &first.candidates, 100).delete, []);
    }

    #[test]
    fn who_is_late_does_not_publish() {
        let writing = Writing::begin(1000, Candidates::default(), 100);
        assert_eq!(writing.may_publish(1049), Ok(()));
        assert_eq!(writing.may_publish(1050), Err(TooLate { now_ms: 1050, deadline_ms: 1050 }));
    }

    const GRACE: u64 = 100;

    /// What writers and collectors do, one small step each, in any order.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Pass(u64),
        Begin(usize),
        Look(usize),
        Refer(usize, usize),
        Upload(usize),
        Publish(usize),
        Drop(usize),
        List,
        Heads,
        Decide,
        Delete,
    }

    #[derive(Default)]
    struct Writer {
        writing: Option<Writing>,
        packs: BTreeSet<PackId>,
    }

    #[derive(Default)]
    struct Collector {
        listed: Option<Vec<Stored>>,
        began_ms: u64,
        live: Option<BTreeSet<Object>>,
        delete: Vec<Object>,
    }

    /// Three procs with a writer each, a collector, which may die at any step, and one store.
    #[derive(Default)]
    struct World {
        now: u64,
        next: u64,
        stored: BTreeMap<PackId, u64>,
        heads: [BTreeSet<PackId>; 3],
        candidates: Candidates,
        writers: [Writer; 3],
        collector: Collector,
        deleted: usize,
    }

    impl World {
        fn step(&mut self, step: Step) {
            self.now += 1;
            match step {
                Step::Pass(time) => self.now += time,
                Step::Begin(who) => {
                    let writing = Some(Writing::begin(self.now, self.candidates.clone(), GRACE));
                    self.writers[who] = Writer { writing, packs: BTreeSet::new() };
                }
                Step::Look(who) => {
                    let stored: Vec<PackId> = self.stored.keys().copied().collect();
                    if let Some(writing) = &mut self.writers[who].writing {
                        writing.saw(stored);
                    }
                }
                Step::Refer(who, which) => {
                    // Anything that the realm's index ever knew.
                    let pack = pack(1 + which as u64 % self.next.max(1));
                    let writer = &mut self.writers[who];
                    if writer.writing.as_ref().is_some_and(|writing| writing.may_use(&pack)) {
                        writer.packs.insert(pack);
                    }
                }
                Step::Upload(who) => {
                    if self.writers[who].writing.is_some() {
                        self.next += 1;
                        self.stored.insert(pack(self.next), self.now);
                        self.writers[who].packs.insert(pack(self.next));
                    }
                }
                Step::Publish(who) => {
                    let writer = std::mem::take(&mut self.writers[who]);
                    if writer.writing.is_some_and(|writing| writing.may_publish(self.now).is_ok()) {
                        self.heads[who] = writer.packs;
                    }
                }
                Step::Drop(who) => self.heads[who].clear(),
                Step::List => {
                    let stored =
                        |(pack, written): (&PackId, &u64)| Stored { object: Object::Pack(*pack), written_ms: *written };
                    let listed = Some(self.stored.iter().map(stored).collect());
                    self.collector = Collector { listed, began_ms: self.now, ..Collector::default() };
                }
                Step::Heads => {
                    let packs = self.heads.iter().flatten().map(|pack| Object::Pack(*pack));
                    self.collector.live = Some(packs.collect());
                }
                Step::Decide => {
                    let Collector { listed: Some(stored), began_ms, live: Some(live), .. } = &self.collector else {
                        return;
                    };
                    let mark = Mark { began_ms: *began_ms, ended_ms: self.now, live, stored };
                    let plan = plan(&mark, &self.candidates, GRACE);
                    self.candidates = plan.candidates;
                    self.collector = Collector { delete: plan.delete, ..Collector::default() };
                }
                Step::Delete => {
                    for object in std::mem::take(&mut self.collector.delete) {
                        let Object::Pack(pack) = object else { continue };
                        self.deleted += usize::from(self.stored.remove(&pack).is_some());
                    }
                }
            }
        }

        fn lost(&self) -> Option<PackId> {
            self.heads.iter().flatten().find(|pack| !self.stored.contains_key(pack)).copied()
        }
    }

    fn step() -> impl Strategy<Value = Step> {
        let writer = 0usize..3;
        prop_oneof![
            (0u64..60).prop_map(Step::Pass),
            writer.clone().prop_map(Step::Begin),
            writer.clone().prop_map(Step::Look),
            (writer.clone(), any::<usize>()).prop_map(|(who, which)| Step::Refer(who, which)),
            writer.clone().prop_map(Step::Upload),
            writer.clone().prop_map(Step::Publish),
            writer.prop_map(Step::Drop),
            Just(Step::List),
            Just(Step::Heads),
            Just(Step::Decide),
            Just(Step::Delete),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(150))]
        #[test]
        fn no_live_generation_loses_a_pack(steps in prop::collection::vec(step(), 1..400)) {
            let mut world = World::default();
            for step in steps {
                world.step(step);
                prop_assert_eq!(world.lost(), None, "at {}", world.now);
            }
        }
    }

    #[test]
    fn the_model_does_delete() {
        let mut world = World::default();
        let collect = [Step::List, Step::Heads, Step::Decide, Step::Delete];
        let write = [Step::Begin(0), Step::Upload(0), Step::Publish(0), Step::Drop(0)];
        for step in write.into_iter().chain(collect).chain([Step::Pass(GRACE)]).chain(collect) {
            world.step(step);
        }
        assert_eq!((world.deleted, world.stored.len()), (1, 0));
    }
}
