//! What collectors and writers of a realm tell each other, as the value of one reference: the
//! candidates, which data directory has the lease, and how short the wait is. A collector has it,
//! an import, and a writer whose first try a collection has undone.
//!
//! Owns the value and which data directory may replace it; the store compares and swaps. The value
//! is not sealed: it says nothing that a listing of the store does not say, a program that could
//! change it could as well delete, and a realm whose keys were destroyed is still to be collected.
//! Crash: a lease that ends by itself.

use super::{Candidates, GRACE_MS};
use crate::ids::OwnerId;
use serde::{Deserialize, Serialize};

/// Version of the value's layout.
const FORMAT: u32 = 1;
/// How long a collector has the lease, in milliseconds. It takes it anew with every change.
pub const LEASE_MS: u64 = 15 * 60 * 1000;

/// The data directory that collects, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The data directory.
    pub owner: OwnerId,
    /// When it ends, by its own clock, Unix time in milliseconds.
    pub until_ms: u64,
}

/// The value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collection {
    format: u32,
    /// What may be deleted some time.
    pub candidates: Candidates,
    /// The wait from a candidate to its deletion that the collector uses which is at work, in
    /// milliseconds.
    grace_ms: u64,
    /// The lease of the collector that is at work.
    pub lease: Option<Lease>,
}

impl Default for Collection {
    fn default() -> Collection {
        Collection { format: FORMAT, candidates: Candidates::default(), grace_ms: GRACE_MS, lease: None }
    }
}

/// Another data directory collects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("data directory {owner} collects or stores now: try again in {left_s} s at the latest")]
pub struct Busy {
    /// Which.
    pub owner: OwnerId,
    /// Seconds until its lease ends.
    pub left_s: u64,
}

/// The value cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectionError {
    /// It is nothing that Kip wrote.
    #[error("what is noted about collection cannot be read: delete {object} if nothing is being archived now")]
    Malformed {
        /// Its object.
        object: String,
    },
    /// Of a newer Kip.
    #[error("{object} has format {found}, this Kip reads up to {FORMAT}: upgrade Kip")]
    Newer {
        /// Its object.
        object: String,
        /// Its format.
        found: u32,
    },
}

impl Collection {
    /// What follows when a collector begins, waiting `grace_ms` at least. One's own lease is taken
    /// over: a data directory collects once at a time, so the collector that had the lease is dead.
    ///
    /// # Errors
    /// Another data directory has the lease.
    pub fn begin(&self, owner: OwnerId, now_ms: u64, grace_ms: u64) -> Result<Collection, Busy> {
        match self.lease {
            Some(lease) if lease.owner != owner && lease.until_ms > now_ms => {
                // A clock that was far ahead keeps other collectors out for no longer than a lease.
                let left = lease.until_ms - now_ms;
                if left <= LEASE_MS {
                    return Err(Busy { owner: lease.owner, left_s: left.div_ceil(1000) });
                }
            }
            _ => {}
        }
        let lease = Some(Lease { owner, until_ms: now_ms.saturating_add(LEASE_MS) });
        Ok(Collection { grace_ms: grace_ms.min(GRACE_MS), lease, ..self.clone() })
    }

    /// The wait that a writer has to reckon with, in milliseconds: a shorter one than usual while
    /// another data directory collects with it. A collector that was killed meanwhile does not
    /// count once its lease has ended, nor does a writer's own data directory.
    pub fn grace_for(&self, writer: OwnerId, now_ms: u64) -> u64 {
        match self.lease {
            Some(lease) if lease.owner != writer && lease.until_ms > now_ms => self.grace_ms,
            _ => GRACE_MS,
        }
    }

    /// What follows when the collector has found these candidates. Its lease begins anew: if the
    /// lease had ended, no other collector took it.
    pub fn found(&self, candidates: Candidates, now_ms: u64) -> Collection {
        let until_ms = now_ms.saturating_add(LEASE_MS);
        Collection { candidates, lease: self.lease.map(|lease| Lease { until_ms, ..lease }), ..self.clone() }
    }

    /// What follows when it is done: the candidates were stored before `now_ms`.
    pub fn end(&self, now_ms: u64) -> Collection {
        let mut candidates = self.candidates.clone();
        candidates.stored(now_ms);
        Collection { candidates, ..Collection::default() }
    }

    /// The reference's value.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("it is plain data")
    }

    /// Reads it. `object`: its name, for messages.
    ///
    /// # Errors
    /// See [`CollectionError`].
    pub fn decode(object: &str, bytes: &[u8]) -> Result<Collection, CollectionError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let malformed = |_| CollectionError::Malformed { object: object.to_owned() };
        let version: Version = serde_json::from_slice(bytes).map_err(malformed)?;
        if version.format > FORMAT {
            return Err(CollectionError::Newer { object: object.to_owned(), found: version.format });
        }
        serde_json::from_slice(bytes).map_err(malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gc::Object;
    use crate::ids::PackId;

    fn owner(n: u8) -> OwnerId {
        OwnerId([n; 16])
    }

    fn two() -> Candidates {
        vec![(Object::Pack(PackId([1; 32])), Some(7)), (Object::Pack(PackId([2; 32])), None)].into()
    }

    #[test]
    fn one_collects_at_a_time() {
        let begun = Collection::default().begin(owner(1), 1000, 50).unwrap();
        assert_eq!((begun.grace_ms, begun.lease.unwrap().owner), (50, owner(1)));
        let graces = [(2, 1500), (1, 1500), (2, 1000 + LEASE_MS)].map(|(who, at)| begun.grace_for(owner(who), at));
        assert_eq!(graces, [50, GRACE_MS, GRACE_MS], "of another's that lasts only");
        let busy = begun.begin(owner(2), 1500, 50).unwrap_err();
        assert_eq!((busy.owner, busy.left_s), (owner(1), (LEASE_MS - 500).div_ceil(1000)));
        assert!(begun.begin(owner(1), 1500, 50).is_ok(), "its own, from before a crash");
        assert!(begun.begin(owner(2), 1000 + LEASE_MS, 50).is_ok(), "it has ended");
        let ahead = Collection::default().begin(owner(1), 1 << 60, 50).unwrap();
        assert!(ahead.begin(owner(2), 1000, 50).is_ok(), "no lease is as long as that");
        let found = begun.found(two(), 5000);
        assert_eq!(found.lease.unwrap().until_ms, 5000 + LEASE_MS);
        let ended = found.end(9000);
        assert_eq!((ended.lease, ended.grace_ms), (None, GRACE_MS));
        assert!(ended.begin(owner(2), 1500, u64::MAX).is_ok_and(|next| next.grace_ms == GRACE_MS));
    }

    #[test]
    fn it_counts_from_when_it_was_written_down() {
        let begun = Collection::default().begin(owner(1), 1000, 50).unwrap().found(two(), 1000);
        assert!(begun.candidates.has_new());
        let ended = begun.end(9000);
        assert!(!ended.candidates.has_new());
        let since = [1, 2, 3].map(|n| ended.candidates.since(&Object::Pack(PackId([n; 32]))));
        assert_eq!(since, [Some(7), Some(9000), None]);
    }

    #[test]
    fn it_is_read_back_and_nothing_else_is() {
        let value = Collection::default().begin(owner(1), 1000, 50).unwrap().found(two(), 1000);
        assert_eq!(Collection::decode("x", &value.encode()), Ok(value.clone()));
        for bad in [&b""[..], b"{}", b"{\"format\":1}", b"[]", &value.encode()[1..]] {
            let told = Collection::decode("realms/blue/collection", bad).unwrap_err().to_string();
            assert!(told.contains("realms/blue/collection"), "{told}");
        }
        let newer = Collection { format: 2, ..value };
        let told = Collection::decode("x", &newer.encode()).unwrap_err().to_string();
        assert!(told.ends_with("upgrade Kip"), "{told}");
    }
}
