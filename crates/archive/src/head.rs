//! The head of a proc: the one object that changes. Which front is the newest, which data directory
//! owns the proc, which older fronts are kept.
//!
//! Owns the rules by which a head may follow another, as pure functions; the store compares and
//! swaps, and loses the race for one of two. A proc has one owner at a time, of an epoch that only
//! grows; an owner of an older epoch can change nothing. A head names fronts by generation and
//! salt, so what a stale owner writes under the same number is another object, which no head leads
//! to. A head that is replaced is gone; what it alone led to is found by collection.
//!
//! ```text
//! first --> Owned --advance--> Owned --remove--> Removed, for ever
//!             |  ^
//!     release v  | adopt (epoch + 1; from Owned too, when its owner lost its lease)
//!          Archived <--brought in from elsewhere-- nothing, or Removed
//! ```
//!
//! A caller swaps heads by [`HeadSwap`], which knows what to do when the outcome of a swap is not
//! known.

mod swap;

pub use swap::{HeadSwap, Outcome};

use crate::codec::Codec;
use crate::ids::{OwnerId, ProcId};
use crate::keys::{Keyring, NoKey};
use crate::names::FrontRef;
use crate::seal::{Expect, ObjectKind, UnsealError};
use crate::stream::{CHUNK_MAX, ChunkReader, ChunkWriter, Ends};
use kip_types::{Generation, ProcName, Realm};
use serde::{Deserialize, Serialize};

/// Version of the head's content.
pub const FORMAT: u32 = 1;
/// Older generations that are kept, at least.
pub const KEPT: usize = 2;
/// Older generations that are kept, at most.
pub const KEPT_MOST: usize = 64;
const SECTION: u8 = 1;

/// The owner of a proc, and since which adoption.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadOwner {
    /// The data directory.
    pub id: OwnerId,
    /// Grows by one with every adoption.
    pub epoch: u64,
}

/// What a proc is, as far as the store knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadState {
    /// Its owner has it, and may be running it.
    Owned,
    /// It runs nowhere: the data directory that adopts it may wake it.
    Archived,
    /// The proc is no more. Its head stays where it is, for while it does no data directory that
    /// has not heard of the proc's end can make it anew; the head leads to nothing, so collection
    /// takes all that was the proc's.
    Removed,
}

/// The newest that is known of a proc.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`FORMAT`].
    pub format: u32,
    /// Whose.
    pub proc: ProcId,
    /// Its name.
    pub name: ProcName,
    /// Its realm.
    pub realm: Realm,
    /// Grows with every change that is tried: no two heads that follow one another have the same.
    pub change: u64,
    /// The data directory that owns it, or did last.
    pub owner: HeadOwner,
    /// The front of the newest complete generation, if there is one.
    pub current: Option<FrontRef>,
    /// Older ones, newest first.
    pub kept: Vec<FrontRef>,
    /// See [`HeadState`].
    pub state: HeadState,
}

/// A head may not be followed by that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeadRefused {
    /// Another data directory owns it now.
    #[error(
        "proc {proc} belongs to data directory {} since epoch {}, not to {} of epoch {}: it was adopted meanwhile",
        now.id, now.epoch, claimed.id, claimed.epoch
    )]
    Fenced {
        /// Which.
        proc: ProcId,
        /// Its owner.
        now: HeadOwner,
        /// The owner that wanted to change it.
        claimed: HeadOwner,
    },
    /// It runs nowhere.
    #[error("proc {proc} is archived: adopt it first")]
    Archived {
        /// Which.
        proc: ProcId,
    },
    /// It is no more.
    #[error("proc {proc} was removed")]
    Removed {
        /// Which.
        proc: ProcId,
    },
    /// Generations only grow.
    #[error("generation {new} of proc {proc} does not follow {current}")]
    NotNewer {
        /// Which.
        proc: ProcId,
        /// The newest.
        current: Generation,
        /// What was to follow it.
        new: Generation,
    },
    /// It is in the store already.
    #[error("proc {proc} is in the store already, as {name}: it is not replaced; `kip rm` it there first")]
    Exists {
        /// Which.
        proc: ProcId,
        /// Its name there.
        name: ProcName,
    },
    /// It has nothing to come back from.
    #[error("proc {proc} has no complete generation in the store: it cannot be left")]
    Empty {
        /// Which.
        proc: ProcId,
    },
}

impl Head {
    /// That of a proc that was never archived; to be swapped for nothing.
    pub fn first(proc: ProcId, name: ProcName, realm: Realm, owner: OwnerId) -> Head {
        let owner = HeadOwner { id: owner, epoch: 1 };
        let (current, kept, state) = (None, Vec::new(), HeadState::Owned);
        Head { format: FORMAT, proc, name, realm, change: 1, owner, current, kept, state }
    }

    /// The head of a proc that was brought in from elsewhere with one generation: the proc runs
    /// nowhere, and the data directory that adopts it may wake it. `found`: the head that the store
    /// has of it. A proc that was removed comes back by this, and by nothing else: the importer has
    /// read of its end, and owners of earlier epochs stay fenced.
    ///
    /// # Errors
    /// `Exists`.
    pub fn imported(
        found: Option<&Head>,
        proc: ProcId,
        name: ProcName,
        realm: Realm,
        front: FrontRef,
    ) -> Result<Head, HeadRefused> {
        let first = Head::first(proc, name, realm, OwnerId::NOBODY);
        let before = match found {
            None => (0, 0),
            Some(head) if head.state == HeadState::Removed => (head.change, head.owner.epoch),
            Some(head) => return Err(HeadRefused::Exists { proc, name: head.name.clone() }),
        };
        let owner = HeadOwner { epoch: before.1 + 1, ..first.owner };
        Ok(Head { change: before.0 + 1, owner, current: Some(front), state: HeadState::Archived, ..first })
    }

    /// What follows when a data directory takes the proc over. Whether it may is decided elsewhere
    /// (lease, owner's wish).
    ///
    /// # Errors
    /// `Removed`.
    pub fn adopt(&self, owner: OwnerId) -> Result<Head, HeadRefused> {
        if self.state == HeadState::Removed {
            return Err(HeadRefused::Removed { proc: self.proc });
        }
        let owner = HeadOwner { id: owner, epoch: self.owner.epoch + 1 };
        Ok(Head { owner, state: HeadState::Owned, ..self.again() })
    }

    /// Whether the claimed owner still owns the proc.
    ///
    /// # Errors
    /// `Fenced`, `Archived`, `Removed`.
    pub fn fence(&self, claimed: HeadOwner) -> Result<(), HeadRefused> {
        if self.owner != claimed {
            return Err(HeadRefused::Fenced { proc: self.proc, now: self.owner, claimed });
        }
        match self.state {
            HeadState::Owned => Ok(()),
            HeadState::Archived => Err(HeadRefused::Archived { proc: self.proc }),
            HeadState::Removed => Err(HeadRefused::Removed { proc: self.proc }),
        }
    }

    /// What follows when its owner has stored a newer generation. `keep`: how many older ones stay,
    /// [`KEPT`] at least and [`KEPT_MOST`] at most.
    ///
    /// # Errors
    /// `Fenced`, `Archived`, `Removed`, `NotNewer`.
    pub fn advance(&self, claimed: HeadOwner, new: FrontRef, keep: usize) -> Result<Head, HeadRefused> {
        self.fence(claimed)?;
        if new.generation <= self.generation() {
            let (current, new) = (self.generation(), new.generation);
            return Err(HeadRefused::NotNewer { proc: self.proc, current, new });
        }
        let kept = self.fronts().take(keep.clamp(KEPT, KEPT_MOST)).collect();
        Ok(Head { current: Some(new), kept, ..self.again() })
    }

    /// What follows when its owner lets go of it: it is in the store, and runs nowhere.
    ///
    /// # Errors
    /// `Fenced`, `Archived`, `Removed`, `Empty`.
    pub fn release(&self, claimed: HeadOwner) -> Result<Head, HeadRefused> {
        self.fence(claimed)?;
        if self.current.is_none() {
            return Err(HeadRefused::Empty { proc: self.proc });
        }
        Ok(Head { state: HeadState::Archived, ..self.again() })
    }

    /// What follows when its owner removes the proc for good. A caller that removes an
    /// archived proc adopts it first.
    ///
    /// # Errors
    /// `Fenced`, `Archived`, `Removed`.
    pub fn remove(&self, claimed: HeadOwner) -> Result<Head, HeadRefused> {
        self.fence(claimed)?;
        Ok(Head { state: HeadState::Removed, current: None, kept: Vec::new(), ..self.again() })
    }

    /// The same as another change: what is swapped in when the outcome of the first try is not
    /// known ([`HeadSwap`]).
    pub fn again(&self) -> Head {
        Head { change: self.change + 1, ..self.clone() }
    }

    /// The newest complete generation; 0 is none.
    pub fn generation(&self) -> Generation {
        self.current.map_or(Generation(0), |front| front.generation)
    }

    /// All fronts that it keeps, newest first. What of a proc is none of these is garbage.
    pub fn fronts(&self) -> impl Iterator<Item = FrontRef> + '_ {
        self.current.into_iter().chain(self.kept.iter().copied())
    }

    /// Its object's bytes.
    ///
    /// # Errors
    /// See [`HeadSealError`].
    pub fn seal(&self, keys: &Keyring) -> Result<Vec<u8>, HeadSealError> {
        assert_eq!(self.realm, *keys.realm(), "a head is sealed by its own realm");
        let mut writer = ChunkWriter::begin(keys, ObjectKind::Head, self.proc, self.generation())?;
        let text = serde_json::to_vec(self).expect("a head is plain data");
        if text.len() > CHUNK_MAX {
            return Err(HeadSealError::TooLong { proc: self.proc, bytes: text.len() as u64 });
        }
        writer.chunk(SECTION, Codec::Plain, &text, Ends::Object);
        Ok(writer.take())
    }

    /// Reads it. `at_least`: the number of a change that is known from elsewhere to have stood; a
    /// head of a smaller number is an old one that was put back.
    ///
    /// # Errors
    /// See [`HeadError`].
    pub fn open(keys: &Keyring, proc: ProcId, at_least: Option<u64>, mut bytes: &[u8]) -> Result<Head, HeadError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let expect = Expect { kind: ObjectKind::Head, proc: Some(proc), generation: None, salt: None };
        let mut reader = ChunkReader::new(expect);
        let length = bytes.len() as u64;
        let chunk = reader.next(keys, &mut bytes)?.ok_or(UnsealError::Truncated { at: length })?;
        reader.next(keys, &mut bytes)?;
        reader.finish()?;
        let malformed = || HeadError::Open(UnsealError::Malformed { what: "head" });
        let version: Version = serde_json::from_slice(&chunk.bytes).map_err(|_| malformed())?;
        if version.format > FORMAT {
            return Err(HeadError::Newer { found: version.format });
        }
        let head: Head = serde_json::from_slice(&chunk.bytes).map_err(|_| malformed())?;
        let header = reader.header().expect("it was read before the chunk");
        if head.proc != proc || head.realm != *keys.realm() || head.generation() != header.generation {
            return Err(malformed());
        }
        match at_least {
            Some(known) if head.change < known => Err(HeadError::PutBack { found: head.change, known }),
            _ => Ok(head),
        }
    }
}

/// A head cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeadSealError {
    /// The realm has no key to seal with.
    #[error(transparent)]
    Key(#[from] NoKey),
    /// The head keeps more than a reader would accept.
    #[error("the head of proc {proc} would have {bytes} bytes, {CHUNK_MAX} are the most: keep fewer generations")]
    TooLong {
        /// Whose.
        proc: ProcId,
        /// Its bytes.
        bytes: u64,
    },
}

/// A head is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// The object is refused.
    #[error(transparent)]
    Open(#[from] UnsealError),
    /// Of a newer Kip.
    #[error("the head has format {found}, this Kip reads up to {FORMAT}: upgrade Kip")]
    Newer {
        /// Its format.
        found: u32,
    },
    /// An older one was put in its place.
    #[error("the head is of change {found}, but change {known} is known: the store gave back an older one")]
    PutBack {
        /// What it says.
        found: u64,
        /// What is known.
        known: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::FrontId;
    use proptest::prelude::*;

    fn owner(n: u8) -> OwnerId {
        OwnerId([n; 16])
    }

    fn first() -> Head {
        Head::first(ProcId([9; 16]), "web".parse().unwrap(), "blue".parse().unwrap(), owner(0))
    }

    fn front(generation: u64) -> FrontRef {
        FrontRef { generation: Generation(generation), id: FrontId::random() }
    }

    /// Three workers with copies of the head that may be old; the store swaps if the head is the
    /// one that was read.
    #[derive(Debug, Clone, Copy)]
    enum Act {
        Read(usize),
        Adopt(usize),
        Advance(usize, u64),
        Release(usize),
        Remove(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        let who = 0usize..3;
        prop_oneof![
            4 => who.clone().prop_map(Act::Read),
            4 => who.clone().prop_map(Act::Adopt),
            8 => (who.clone(), 1u64..4).prop_map(|(who, by)| Act::Advance(who, by)),
            4 => who.clone().prop_map(Act::Release),
            1 => who.prop_map(Act::Remove),
        ]
    }

    proptest! {
        #[test]
        fn a_stale_owner_never_advances(acts in prop::collection::vec(act(), 1..200)) {
            let mut stored = first();
            let mut copies = [first(), first(), first()];
            // What each believes to own.
            let mut claims = [Some(stored.owner), None, None];
            for act in acts {
                let (Act::Read(who) | Act::Adopt(who) | Act::Advance(who, _) | Act::Release(who) | Act::Remove(who)) = act;
                let copy = copies[who].clone();
                let claim = claims[who];
                let next = match (act, claim) {
                    (Act::Read(_), _) => {
                        copies[who] = stored.clone();
                        continue;
                    }
                    (Act::Adopt(_), _) => copy.adopt(owner(who as u8)),
                    (Act::Remove(_), Some(claim)) => copy.remove(claim),
                    (Act::Advance(_, by), Some(claim)) => copy.advance(claim, front(copy.generation().0 + by), 2),
                    (Act::Release(_), Some(claim)) => copy.release(claim),
                    _ => continue,
                };
                let Ok(next) = next else { continue };
                // Compare and swap.
                if copy != stored {
                    continue;
                }
                if matches!(act, Act::Advance(..)) {
                    prop_assert_eq!(Some(stored.owner), claim, "only who owns it advances it");
                    prop_assert_eq!(stored.owner.id, owner(who as u8));
                    prop_assert!(next.generation() > stored.generation() && next.owner == stored.owner);
                    let left: Vec<_> = stored.fronts().take(3).collect();
                    prop_assert_eq!(next.kept.clone(), left[..left.len().min(2)].to_vec(), "the last two stay");
                }
                prop_assert!(stored.state != HeadState::Removed, "the end is the end");
                prop_assert!(next.owner.epoch >= stored.owner.epoch && next.change > stored.change);
                prop_assert!(next.generation() >= stored.generation() || next.state == HeadState::Removed);
                prop_assert!(next.state != HeadState::Removed || next.fronts().next().is_none(), "nothing is kept");
                claims[who] = Some(next.owner);
                copies[who] = next.clone();
                stored = next;
            }
            // A data directory that does not own it now is refused, whatever it has read.
            for claim in claims.into_iter().flatten().filter(|claim| *claim != stored.owner) {
                let refused = stored.advance(claim, front(u64::MAX), 2);
                let is_fenced = matches!(refused, Err(HeadRefused::Fenced { .. }));
                prop_assert!(is_fenced);
            }
        }
    }

    // promise format: an owner of an older epoch cannot write; a change whose outcome was lost is
    //   resolved; what was removed is not revived
    // held by: this,
    //   `kip_archive::head::swap::tests::what_is_said_to_stand_stands_and_what_is_lost_never_comes`,
    //   `kip_archive::head::tests::what_was_removed_leads_to_nothing_and_nobody_revives_it`
    #[test]
    fn what_may_not_follow_is_refused() {
        let head = first();
        let own = head.owner;
        assert_eq!(head.release(own), Err(HeadRefused::Empty { proc: head.proc }));
        let head = head.advance(own, front(3), 0).unwrap();
        assert!(
            matches!(head.advance(own, front(3), 2), Err(HeadRefused::NotNewer { .. })),
            "another, of the same number"
        );
        assert_eq!(head.kept, [], "there was none before");
        let left = head.release(own).unwrap();
        assert!(matches!(left.advance(own, front(4), 2), Err(HeadRefused::Archived { .. })));
        assert!(matches!(left.remove(own), Err(HeadRefused::Archived { .. })));
        let taken = left.adopt(owner(1)).unwrap();
        let told = taken.fence(own).unwrap_err().to_string();
        assert!(told.contains("since epoch 2") && told.ends_with("it was adopted meanwhile"), "{told}");
    }

    #[test]
    fn what_was_removed_leads_to_nothing_and_nobody_revives_it() {
        let head = first();
        let head = head.advance(head.owner, front(1), 2).unwrap().advance(head.owner, front(2), 2).unwrap();
        let gone = head.remove(head.owner).unwrap();
        assert_eq!((gone.fronts().count(), gone.generation()), (0, Generation(0)));
        let removed = HeadRefused::Removed { proc: head.proc };
        assert_eq!(gone.adopt(owner(1)), Err(removed.clone()));
        assert_eq!(gone.advance(head.owner, front(3), 2), Err(removed.clone()));
        assert_eq!(gone.release(head.owner), Err(removed.clone()));
        assert_eq!(gone.remove(head.owner), Err(removed));
        let keys = Keyring::generate("blue".parse().unwrap(), 1);
        let bytes = gone.seal(&keys).unwrap();
        assert_eq!(Head::open(&keys, gone.proc, None, &bytes), Ok(gone.clone()));
        let old = head.seal(&keys).unwrap();
        let told = Head::open(&keys, gone.proc, Some(gone.change), &old).unwrap_err().to_string();
        assert!(told.ends_with("the store gave back an older one"), "{told}");
    }

    #[test]
    fn what_is_brought_in_is_free_to_adopt_and_replaces_nothing_that_lives() {
        let old = first().advance(first().owner, front(4), 2).unwrap();
        let import = |found: Option<&Head>| {
            Head::imported(found, old.proc, "copy".parse().unwrap(), old.realm.clone(), front(4))
        };
        let new = import(None).unwrap();
        assert_eq!((new.state, new.name.as_str(), new.kept.len()), (HeadState::Archived, "copy", 0));
        assert_eq!(new.generation(), Generation(4));
        let adopted = new.adopt(owner(1)).unwrap();
        for lives in [&old, &old.release(old.owner).unwrap(), &new, &adopted] {
            assert!(matches!(import(Some(lives)), Err(HeadRefused::Exists { .. })), "{:?}", lives.state);
        }
        let gone = old.remove(old.owner).unwrap();
        let back = import(Some(&gone)).unwrap();
        assert!(back.change > gone.change && back.owner.epoch > gone.owner.epoch);
        assert!(
            matches!(back.advance(old.owner, front(5), 2), Err(HeadRefused::Fenced { .. })),
            "nor does an old owner"
        );
        assert!(matches!(back.remove(gone.owner), Err(HeadRefused::Fenced { .. })));
    }

    #[test]
    fn a_head_keeps_no_more_than_can_be_read() {
        let keys = Keyring::generate("blue".parse().unwrap(), 1);
        let mut head = first();
        for number in 1..200 {
            head = head.advance(head.owner, front(number), usize::MAX).unwrap();
        }
        assert_eq!(head.kept.len(), KEPT_MOST);
        assert!(Head::open(&keys, head.proc, None, &head.seal(&keys).unwrap()).is_ok());
        head.kept = vec![front(1); 20_000];
        assert!(matches!(head.seal(&keys), Err(HeadSealError::TooLong { .. })));
    }

    #[test]
    fn a_head_is_read_back_for_its_proc_only() {
        let keys = Keyring::generate("blue".parse().unwrap(), 1);
        let head = first().advance(first().owner, front(7), 2).unwrap();
        let bytes = head.seal(&keys).unwrap();
        assert_eq!(Head::open(&keys, head.proc, None, &bytes), Ok(head.clone()));
        assert_eq!(Head::open(&keys, head.proc, Some(head.change), &bytes), Ok(head.clone()));
        let known = Some(head.change + 1);
        assert!(matches!(Head::open(&keys, head.proc, known, &bytes), Err(HeadError::PutBack { .. })));
        let other = Head::open(&keys, ProcId([1; 16]), None, &bytes);
        assert!(matches!(other, Err(HeadError::Open(UnsealError::Proc { .. }))));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::open(&keys, head.proc, None, &bad).is_err(), "bit {bit}");
        }
        for end in 0..bytes.len() {
            let cut = Head::open(&keys, head.proc, None, &bytes[..end]);
            assert!(matches!(cut, Err(HeadError::Open(UnsealError::Truncated { .. }))), "cut at {end}");
        }
        let longer = Head::open(&keys, head.proc, None, &[&bytes[..], b"x"].concat());
        assert!(matches!(longer, Err(HeadError::Open(UnsealError::Trailing { .. }))));
        let newer = Head { format: 2, ..head };
        let told = Head::open(&keys, newer.proc, None, &newer.seal(&keys).unwrap()).unwrap_err().to_string();
        assert!(told.ends_with("upgrade Kip"), "{told}");
    }
}
