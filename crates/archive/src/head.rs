//! The head of a proc: the one object that changes. Which generation is the newest, who owns the proc, which older ones
//! are kept.
//!
//! Owns the rules by which a head may follow another, as pure functions; the store compares and swaps, and loses the
//! race for one of two. A proc has one owner at a time, of an epoch that only grows; an owner of an older epoch can
//! change nothing. A head that is replaced is gone; what it alone led to is found by collection.
//!
//! ```text
//! first --> Owned --advance--> Owned
//!             |  ^
//!     release v  | adopt (epoch + 1; from Owned too, when its owner lost its lease)
//!          Archived
//! ```

use crate::codec::Codec;
use crate::ids::{OwnerId, ProcId};
use crate::keys::{Keyring, NoKey};
use crate::seal::{Expect, Kind, OpenError};
use crate::stream::{CHUNK_MAX, ChunkReader, ChunkWriter};
use kip_types::{Generation, ProcName, Realm};
use serde::{Deserialize, Serialize};

/// Version of the head's content.
pub const FORMAT: u32 = 1;
/// Older generations that are kept, at least.
pub const KEPT: usize = 2;
const SECTION: u8 = 1;

/// Who owns a proc, and since when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The data directory.
    pub id: OwnerId,
    /// Grows by one with every adoption.
    pub epoch: u64,
}

/// What a proc is, as far as the store knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadState {
    /// It is its owner's, who may be running it.
    Owned,
    /// It runs nowhere: whoever adopts it may wake it.
    Archived,
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
    /// Who owns it, or did last.
    pub owner: Owner,
    /// The newest complete generation; 0 is none.
    pub current: Generation,
    /// Older ones, newest first.
    pub kept: Vec<Generation>,
    /// See [`HeadState`].
    pub state: HeadState,
}

/// A head may not be followed by that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeadRefused {
    /// Somebody else has it now.
    #[error(
        "proc {proc} belongs to data directory {} since epoch {}, not to {} of epoch {}: it was adopted meanwhile",
        now.id, now.epoch, claimed.id, claimed.epoch
    )]
    Fenced {
        /// Which.
        proc: ProcId,
        /// Who owns it.
        now: Owner,
        /// Who wanted to change it.
        claimed: Owner,
    },
    /// It runs nowhere.
    #[error("proc {proc} is archived: adopt it first")]
    Archived {
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
    /// It has nothing to come back from.
    #[error("proc {proc} has no complete generation in the store: it cannot be left")]
    Empty {
        /// Which.
        proc: ProcId,
    },
}

impl Head {
    /// That of a proc that was never archived.
    pub fn first(proc: ProcId, name: ProcName, realm: Realm, owner: OwnerId) -> Head {
        let owner = Owner { id: owner, epoch: 1 };
        let (current, kept, state) = (Generation(0), Vec::new(), HeadState::Owned);
        Head { format: FORMAT, proc, name, realm, owner, current, kept, state }
    }

    /// What follows when somebody takes the proc over. Whether he may is decided elsewhere (lease, owner's wish).
    pub fn adopt(&self, owner: OwnerId) -> Head {
        let owner = Owner { id: owner, epoch: self.owner.epoch + 1 };
        Head { owner, state: HeadState::Owned, ..self.clone() }
    }

    /// Whether somebody still owns the proc.
    ///
    /// # Errors
    /// `Fenced`, `Archived`.
    pub fn fence(&self, claimed: Owner) -> Result<(), HeadRefused> {
        if self.owner != claimed {
            return Err(HeadRefused::Fenced { proc: self.proc, now: self.owner, claimed });
        }
        match self.state {
            HeadState::Owned => Ok(()),
            HeadState::Archived => Err(HeadRefused::Archived { proc: self.proc }),
        }
    }

    /// What follows when its owner has stored a newer generation. `keep`: how many older ones stay, [`KEPT`] at least.
    ///
    /// # Errors
    /// `Fenced`, `Archived`, `NotNewer`.
    pub fn advance(&self, claimed: Owner, new: Generation, keep: usize) -> Result<Head, HeadRefused> {
        self.fence(claimed)?;
        if new <= self.current {
            return Err(HeadRefused::NotNewer { proc: self.proc, current: self.current, new });
        }
        let older = std::iter::once(self.current).filter(|generation| *generation != Generation(0));
        let kept = older.chain(self.kept.iter().copied()).take(keep.max(KEPT)).collect();
        Ok(Head { current: new, kept, ..self.clone() })
    }

    /// What follows when its owner lets go of it: it is in the store, and runs nowhere.
    ///
    /// # Errors
    /// `Fenced`, `Archived`, `Empty`.
    pub fn release(&self, claimed: Owner) -> Result<Head, HeadRefused> {
        self.fence(claimed)?;
        if self.current == Generation(0) {
            return Err(HeadRefused::Empty { proc: self.proc });
        }
        Ok(Head { state: HeadState::Archived, ..self.clone() })
    }

    /// All generations that it keeps, newest first.
    pub fn generations(&self) -> impl Iterator<Item = Generation> + '_ {
        let current = std::iter::once(self.current).filter(|generation| *generation != Generation(0));
        current.chain(self.kept.iter().copied())
    }

    /// Its object's bytes.
    ///
    /// # Errors
    /// The realm has no key to seal with.
    pub fn seal(&self, keys: &Keyring) -> Result<Vec<u8>, NoKey> {
        assert_eq!(self.realm, *keys.realm(), "a head is sealed by its own realm");
        let mut writer = ChunkWriter::begin(keys, Kind::Head, self.proc, self.current)?;
        let text = serde_json::to_vec(self).expect("a head is plain data");
        assert!(text.len() <= CHUNK_MAX, "a head is small");
        writer.chunk(SECTION, 0, Codec::Plain, &text, true);
        Ok(writer.take())
    }

    /// Reads it. `at_least`: an epoch and a generation that are known from elsewhere; what is older was put back by
    /// somebody.
    ///
    /// # Errors
    /// See [`HeadError`].
    pub fn open(
        keys: &Keyring,
        proc: ProcId,
        at_least: Option<(u64, Generation)>,
        mut bytes: &[u8],
    ) -> Result<Head, HeadError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let mut reader = ChunkReader::new(Expect { kind: Kind::Head, proc: Some(proc), generation: None });
        let length = bytes.len() as u64;
        let chunk = reader.next(keys, &mut bytes)?.ok_or(OpenError::Truncated { at: length })?;
        reader.next(keys, &mut bytes)?;
        reader.finish()?;
        let malformed = || HeadError::Open(OpenError::Malformed { what: "head" });
        let version: Version = serde_json::from_slice(&chunk.bytes).map_err(|_| malformed())?;
        if version.format > FORMAT {
            return Err(HeadError::Newer { found: version.format });
        }
        let head: Head = serde_json::from_slice(&chunk.bytes).map_err(|_| malformed())?;
        let header = reader.header().expect("it was read before the chunk");
        if head.proc != proc || head.realm != *keys.realm() || head.current != header.generation {
            return Err(malformed());
        }
        match at_least {
            Some((epoch, generation)) if (head.owner.epoch, head.current) < (epoch, generation) => {
                Err(HeadError::PutBack { found: (head.owner.epoch, head.current), known: (epoch, generation) })
            }
            _ => Ok(head),
        }
    }
}

/// A head is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// The object is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Of a newer Kip.
    #[error("the head has format {found}, this Kip reads up to {FORMAT}: upgrade Kip")]
    Newer {
        /// Its format.
        found: u32,
    },
    /// An older one was put in its place.
    #[error(
        "the head is of epoch {} and generation {}, but epoch {} and generation {} are known: the store gave back an older one",
        found.0, found.1, known.0, known.1
    )]
    PutBack {
        /// What it says.
        found: (u64, Generation),
        /// What is known.
        known: (u64, Generation),
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn owner(n: u8) -> OwnerId {
        OwnerId([n; 16])
    }

    fn first() -> Head {
        Head::first(ProcId([9; 16]), "web".parse().unwrap(), "blue".parse().unwrap(), owner(0))
    }

    /// Three workers with copies of the head that may be old; the store swaps if the head is the one that was read.
    #[derive(Debug, Clone, Copy)]
    enum Act {
        Read(usize),
        Adopt(usize),
        Advance(usize, u64),
        Release(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        let who = 0usize..3;
        prop_oneof![
            who.clone().prop_map(Act::Read),
            who.clone().prop_map(Act::Adopt),
            (who.clone(), 1u64..4).prop_map(|(who, by)| Act::Advance(who, by)),
            who.prop_map(Act::Release),
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
                let who = match act { Act::Read(w) | Act::Adopt(w) | Act::Advance(w, _) | Act::Release(w) => w };
                let copy = copies[who].clone();
                let claim = claims[who];
                let next = match (act, claim) {
                    (Act::Read(_), _) => {
                        copies[who] = stored.clone();
                        continue;
                    }
                    (Act::Adopt(_), _) => Ok(copy.adopt(owner(who as u8))),
                    (Act::Advance(_, by), Some(claim)) => copy.advance(claim, Generation(copy.current.0 + by), 2),
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
                    prop_assert!(next.current > stored.current && next.owner == stored.owner);
                    let left: Vec<_> = stored.generations().take(3).collect();
                    prop_assert_eq!(next.kept.clone(), left[..left.len().min(2)].to_vec(), "the last two stay");
                }
                prop_assert!(next.owner.epoch >= stored.owner.epoch && next.current >= stored.current);
                claims[who] = Some(next.owner);
                copies[who] = next.clone();
                stored = next;
            }
            // Whoever does not own it now is refused, whatever he has read.
            for claim in claims.into_iter().flatten().filter(|claim| *claim != stored.owner) {
                let refused = stored.advance(claim, Generation(u64::MAX), 2);
                let is_fenced = matches!(refused, Err(HeadRefused::Fenced { .. }));
                prop_assert!(is_fenced);
            }
        }
    }

    #[test]
    fn what_may_not_follow_is_refused() {
        let head = first();
        let own = head.owner;
        assert_eq!(head.release(own), Err(HeadRefused::Empty { proc: head.proc }));
        let head = head.advance(own, Generation(3), 0).unwrap();
        assert!(matches!(head.advance(own, Generation(3), 2), Err(HeadRefused::NotNewer { .. })));
        assert_eq!(head.kept, [], "generation 0 is none");
        let left = head.release(own).unwrap();
        assert!(matches!(left.advance(own, Generation(4), 2), Err(HeadRefused::Archived { .. })));
        let taken = left.adopt(owner(1));
        let told = taken.fence(own).unwrap_err().to_string();
        assert!(told.contains("since epoch 2") && told.ends_with("it was adopted meanwhile"), "{told}");
    }

    #[test]
    fn a_head_is_read_back_for_its_proc_only() {
        let keys = Keyring::generate("blue".parse().unwrap(), 1);
        let head = first().advance(first().owner, Generation(7), 2).unwrap();
        let bytes = head.seal(&keys).unwrap();
        assert_eq!(Head::open(&keys, head.proc, None, &bytes), Ok(head.clone()));
        assert_eq!(Head::open(&keys, head.proc, Some((1, Generation(7))), &bytes), Ok(head.clone()));
        let known = Some((1, Generation(8)));
        assert!(matches!(Head::open(&keys, head.proc, known, &bytes), Err(HeadError::PutBack { .. })));
        let other = Head::open(&keys, ProcId([1; 16]), None, &bytes);
        assert!(matches!(other, Err(HeadError::Open(OpenError::Proc { .. }))));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::open(&keys, head.proc, None, &bad).is_err(), "bit {bit}");
        }
        for end in 0..bytes.len() {
            let cut = Head::open(&keys, head.proc, None, &bytes[..end]);
            assert!(matches!(cut, Err(HeadError::Open(OpenError::Truncated { .. }))), "cut at {end}");
        }
        let longer = Head::open(&keys, head.proc, None, &[&bytes[..], b"x"].concat());
        assert!(matches!(longer, Err(HeadError::Open(OpenError::Trailing { .. }))));
        let newer = Head { format: 2, ..head };
        let told = Head::open(&keys, newer.proc, None, &newer.seal(&keys).unwrap()).unwrap_err().to_string();
        assert!(told.ends_with("upgrade Kip"), "{told}");
    }
}
