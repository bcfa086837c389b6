//! KeySet, sets of keys, and what the store says of a key.

use std::fmt;

/// Number of a state of the whole store. The first change makes revision 2, as in etcd: 1 is the
/// empty store.
pub type Revision = u64;

/// The revision of a store in which nothing was ever written.
pub const FIRST_REVISION: Revision = 1;

/// Number of a lease, never 0. A store never gives a number twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// The key.
    pub key: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
    /// The revision that made the key, after it was absent. Fresh each time: a fencing token.
    pub created: Revision,
    /// The revision of the last write to the key.
    pub modified: Revision,
    /// How often the key was written since it was made, from 1.
    pub version: u64,
    /// The lease with which the key goes.
    pub lease: Option<LeaseId>,
}

/// A set of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySet {
    /// One key.
    One(Vec<u8>),
    /// All keys that begin with these bytes; all keys at all if there are none.
    Prefix(Vec<u8>),
    /// Keys from the first, included, to the second, excluded.
    Interval {
        /// The first key.
        from: Vec<u8>,
        /// The key after the last.
        to: Vec<u8>,
    },
}

impl KeySet {
    /// One key.
    pub fn one(key: impl Into<Vec<u8>>) -> KeySet {
        KeySet::One(key.into())
    }

    /// All keys that begin with these bytes.
    pub fn prefix(prefix: impl Into<Vec<u8>>) -> KeySet {
        KeySet::Prefix(prefix.into())
    }

    /// Keys from `from`, included, to `to`, excluded.
    pub fn interval(from: impl Into<Vec<u8>>, to: impl Into<Vec<u8>>) -> KeySet {
        KeySet::Interval { from: from.into(), to: to.into() }
    }

    /// Whether the key is one of them.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            KeySet::One(one) => one == key,
            KeySet::Prefix(prefix) => key.starts_with(prefix),
            KeySet::Interval { from, to } => from.as_slice() <= key && key < to.as_slice(),
        }
    }

    /// The first key that may be one of them.
    pub fn first(&self) -> &[u8] {
        match self {
            KeySet::One(first) | KeySet::Prefix(first) | KeySet::Interval { from: first, .. } => first,
        }
    }

    /// The first key after all of them; none if there is no such key.
    pub fn end(&self) -> Option<Vec<u8>> {
        match self {
            KeySet::One(key) => Some([key.as_slice(), &[0]].concat()),
            KeySet::Prefix(prefix) => after_prefix(prefix),
            KeySet::Interval { to, .. } => Some(to.clone()),
        }
    }
}

/// The first key after all that begin with `prefix`.
fn after_prefix(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != 0xff)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_ends_after_its_last_key() {
        for keys in [KeySet::one("a"), KeySet::prefix("a"), KeySet::prefix(vec![1, 0xff]), KeySet::interval("a", "b")] {
            let end = keys.end().unwrap();
            assert!(keys.contains(keys.first()), "{keys:?}");
            assert!(!keys.contains(&end), "{keys:?} has {end:?}");
        }
        assert_eq!(KeySet::prefix(vec![1, 0xff]).end(), Some(vec![2]));
        assert_eq!(KeySet::prefix(vec![0xff, 0xff]).end(), None);
        assert_eq!(KeySet::prefix("").end(), None);
        assert!(KeySet::prefix("").contains(b"anything"));
    }
}
