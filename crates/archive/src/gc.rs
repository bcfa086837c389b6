//! What may be deleted: a pure decision about objects that no head leads to, made so that it is
//! right beside writers that know nothing of it.
//!
//! Owns the rule; lists and deletes nothing. An object goes if a mark found that no head leads to
//! it, that was written down as a candidate, and a second mark, begun a grace time after it was
//! written down, found the same. A writer that stores a generation does not lock anything either:
//! it reads the candidates, refers to none of them, and publishes its head within half the grace
//! time, or begins again ([`Writing`]). One collector runs at a time (a lease, and a
//! compare-and-swap of the candidates): what one decides by an old look could take away what
//! protects another's decision. One that dies leaves its candidates, or none; the next goes on from
//! there.
//!
//! ```text
//! live --no head leads to it--> found --stored, at S--> candidate since S --begun at S + grace, still--> deleted
//!   ^------------------a head leads to it again----------------------'
//! ```
//!
//! Why it is right: what a writer refers to was live or young when it began. Suppose that it is
//! deleted. Then it was a candidate since S, and a writer that read the candidates after S saw
//! that. So it read them before S, began before that, and published before S + grace / 2; the
//! second mark began later and saw the head. Nor was it deleted before the writer began: it was
//! seen to be there after that. Fronts need no more than that: a writer refers to no front but its
//! own, whose name no other writer ever writes ([`crate::names`]), and a front that its head does
//! not name is garbage, whichever writer wrote it.

mod record;

pub use record::{Busy, Collection, CollectionError, LEASE_MS, Lease};

use crate::ids::{PackId, ProcId};
use crate::names::{FrontRef, ObjectName};
use kip_types::Realm;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// How long an object must have been without use, in milliseconds.
pub const GRACE_MS: u64 = 24 * 3600 * 1000;

/// Something that can be deleted. Heads never are, here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Object {
    /// Blocks.
    Pack(PackId),
    /// A front, by all that its name says.
    Front(ProcId, FrontRef),
}

impl Object {
    /// What a name in a realm's part of the store is, if it is anything that can be deleted: no
    /// head, nothing foreign, nothing of another realm.
    pub fn of(realm: &Realm, name: &ObjectName) -> Option<Object> {
        match name {
            ObjectName::Pack { realm: of, pack } if of == realm => Some(Object::Pack(*pack)),
            ObjectName::Front { realm: of, proc, front } if of == realm => Some(Object::Front(*proc, *front)),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(&self, realm: &Realm) -> ObjectName {
        let realm = realm.clone();
        match *self {
            Object::Pack(pack) => ObjectName::Pack { realm, pack },
            Object::Front(proc, front) => ObjectName::Front { realm, proc, front },
        }
    }
}

/// What the store has, and when it was written by the store's own clock, Unix time in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatedObject {
    /// Which.
    pub object: Object,
    /// When.
    pub written_ms: u64,
}

impl DatedObject {
    /// What a listing of a realm's part of the store says: names and times, of which those that can
    /// be deleted are kept.
    pub fn listed<'a>(realm: &Realm, listing: impl IntoIterator<Item = (&'a str, u64)>) -> Vec<DatedObject> {
        let stored = |(name, written_ms)| {
            let object = Object::of(realm, &ObjectName::parse(name))?;
            Some(DatedObject { object, written_ms })
        };
        listing.into_iter().filter_map(stored).collect()
    }
}

/// What earlier marks found unused, and since when it is known to be written down, Unix time in
/// milliseconds; of what was found by the last mark that is not known yet. The collector stores it
/// before it deletes anything, and each writer reads it before it refers to anything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(Object, Option<u64>)>", into = "Vec<(Object, Option<u64>)>")]
pub struct Candidates(BTreeMap<Object, Option<u64>>);

impl Candidates {
    /// Whether a writer that read these may refer to a pack.
    pub fn may_use(&self, pack: &PackId) -> bool {
        !self.0.contains_key(&Object::Pack(*pack))
    }

    /// These were stored durably; `now_ms`: Unix time in milliseconds, taken after that. What was
    /// new among them counts from now on, if they are stored once more. If they are not, it counts
    /// from the next mark on.
    pub fn stored(&mut self, now_ms: u64) {
        self.0.values_mut().for_each(|since| *since = since.or(Some(now_ms)));
    }

    /// Those that there are.
    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        self.0.keys()
    }

    /// Since when an object is known to be written down as one, Unix time in milliseconds; none if
    /// it is no candidate, or was found by the last mark.
    pub fn since(&self, object: &Object) -> Option<u64> {
        self.0.get(object).copied().flatten()
    }

    /// Some were found by the last mark: it is not known yet since when they are written down.
    pub fn has_new(&self) -> bool {
        self.0.values().any(Option::is_none)
    }
}

impl From<Vec<(Object, Option<u64>)>> for Candidates {
    fn from(list: Vec<(Object, Option<u64>)>) -> Candidates {
        Candidates(list.into_iter().collect())
    }
}

impl From<Candidates> for Vec<(Object, Option<u64>)> {
    fn from(candidates: Candidates) -> Vec<(Object, Option<u64>)> {
        candidates.0.into_iter().collect()
    }
}

/// One look at everything. The candidates are read from the store first, then the list of objects
/// is made, then heads are read, then the fronts that they lead to: what is newer than the list is
/// not there.
#[derive(Debug, Clone, Copy)]
pub struct Mark<'a> {
    /// After the candidates were read and before the first head was, Unix time in milliseconds.
    pub began_ms: u64,
    /// All fronts that a head keeps, and the packs that their manifests name. One that cannot be
    /// read: do not mark at all.
    pub live: &'a BTreeSet<Object>,
    /// What the store has.
    pub stored: &'a [DatedObject],
}

/// What to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SweepPlan {
    /// To be stored, durably, before anything is deleted. Then [`Candidates::stored`].
    pub candidates: Candidates,
    /// To be deleted; they stay candidates until a later mark sees them gone.
    pub delete: Vec<Object>,
}

/// Decides. `earlier`: the candidates that were read from the store before the mark began. A clock
/// that goes back postpones, and deletes nothing.
pub fn plan(mark: &Mark<'_>, earlier: &Candidates, grace_ms: u64) -> SweepPlan {
    let mut plan = SweepPlan::default();
    for DatedObject { object, written_ms } in mark.stored {
        if mark.live.contains(object) {
            continue;
        }
        // What was read from the store was stored before this mark began, whenever that was.
        let counts = |since: Option<u64>| since.filter(|since| *since <= mark.began_ms).unwrap_or(mark.began_ms);
        let since = earlier.0.get(object).map(|since| counts(*since));
        plan.candidates.0.insert(*object, since);
        let is_old = |since: u64| since.checked_add(grace_ms).is_some_and(|end| end <= mark.began_ms);
        if since.is_some_and(is_old) && is_old(*written_ms) {
            plan.delete.push(*object);
        }
    }
    plan
}

/// A moment of this machine, in milliseconds of CLOCK_BOOTTIME: the clock goes on while the machine
/// sleeps, and no program sets it. Only good for comparing with others of the same boot, which is
/// as long as any writer lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootMs(pub u64);

impl fmt::Display for BootMs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms after the boot", self.0)
    }
}

/// The storing of one generation, from the reading of the candidates to the publishing of the head.
#[derive(Debug, Clone)]
pub struct Writing {
    candidates: Candidates,
    /// Packs that were there after the candidates were read: the realm's index may still know some
    /// that are gone.
    stored: BTreeSet<PackId>,
    deadline: BootMs,
}

/// The head may not be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "storing this generation took too long, until {now} instead of {deadline}: what it refers to may be deleted; begin again"
)]
pub struct TooLate {
    /// Now.
    pub now: BootMs,
    /// The last moment.
    pub deadline: BootMs,
}

impl Writing {
    /// Begins. `now` is taken before the candidates are read.
    pub fn begin(now: BootMs, candidates: Candidates, grace_ms: u64) -> Writing {
        let deadline = BootMs(now.0.saturating_add(grace_ms / 2));
        Writing { candidates, stored: BTreeSet::new(), deadline }
    }

    /// Tells it which packs the store has, all or those in question. The store is asked after the
    /// candidates were read.
    pub fn saw(&mut self, stored: impl IntoIterator<Item = PackId>) {
        self.stored.extend(stored);
    }

    /// Whether it may refer to a pack that was there before: asked for each, those of the parent
    /// generation included. None that was not seen.
    pub fn may_use(&self, pack: &PackId) -> bool {
        self.stored.contains(pack) && self.candidates.may_use(pack)
    }

    /// Whether the head may be published now. Asked last, right before each try to swap it, which
    /// must take less than half the grace time.
    ///
    /// # Errors
    /// Too late.
    pub fn may_publish(&self, now: BootMs) -> Result<(), TooLate> {
        let deadline = self.deadline;
        if now < deadline { Ok(()) } else { Err(TooLate { now, deadline }) }
    }
}

#[cfg(test)]
mod tests;
