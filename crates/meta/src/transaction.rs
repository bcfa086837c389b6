//! Transactions: conditions, changes, and limits that are the same for each implementation.

use crate::error::MetaError;
use crate::keys::{KeySet, KeyValue, LeaseId, Revision};

/// Longest key, bytes.
pub const LONGEST_KEY: usize = 4096;
/// Most bytes of keys and values in one transaction: below etcd's limit of a request, 1.5 MiB.
pub const MOST_BYTES: usize = (1 << 20) + (256 << 10);
/// Most conditions, and most changes: below etcd's limit of 128.
pub const MOST_STEPS: usize = 120;

/// What must be so for a transaction to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// The key is there.
    Exists(Vec<u8>),
    /// None of these keys is there.
    Absent(KeySet),
    /// The key was written last at this revision.
    Modified(Vec<u8>, Revision),
    /// The key was made at this revision and is there since.
    Created(Vec<u8>, Revision),
    /// The key is there with this value.
    Value(Vec<u8>, Vec<u8>),
}

impl Condition {
    /// The keys that are looked at.
    pub fn keys(&self) -> KeySet {
        match self {
            Condition::Exists(key)
            | Condition::Modified(key, _)
            | Condition::Created(key, _)
            | Condition::Value(key, _) => KeySet::One(key.clone()),
            Condition::Absent(keys) => keys.clone(),
        }
    }

    /// Whether it holds, if `found` is the first of its keys that is there.
    pub fn holds(&self, found: Option<&KeyValue>) -> bool {
        match self {
            Condition::Exists(_) => found.is_some(),
            Condition::Absent(_) => found.is_none(),
            Condition::Modified(_, revision) => found.is_some_and(|kv| kv.modified == *revision),
            Condition::Created(_, revision) => found.is_some_and(|kv| kv.created == *revision),
            Condition::Value(_, value) => found.is_some_and(|kv| kv.value == *value),
        }
    }
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Writes a key, with the lease it goes with.
    Put {
        /// The key.
        key: Vec<u8>,
        /// Its value.
        value: Vec<u8>,
        /// The lease; without one the key stays.
        lease: Option<LeaseId>,
    },
    /// Removes those of these keys that are there.
    Delete(KeySet),
}

/// Changes that are made all or not at all. It has a condition: no write goes without one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction {
    conditions: Vec<Condition>,
    operations: Vec<Operation>,
    /// One condition and one change are a ticket's, and count for no limit.
    has_ticket: bool,
}

impl Transaction {
    /// One that is made only if this holds.
    pub fn when(condition: Condition) -> Transaction {
        Transaction { conditions: vec![condition], operations: Vec::new(), has_ticket: false }
    }

    /// And only if this holds, too.
    #[must_use]
    pub fn and(mut self, condition: Condition) -> Transaction {
        self.conditions.push(condition);
        self
    }

    /// Writes a key.
    #[must_use]
    pub fn put(mut self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Transaction {
        self.operations.push(Operation::Put { key: key.into(), value: value.into(), lease: None });
        self
    }

    /// Writes a key that goes with a lease, if there is one.
    #[must_use]
    pub fn put_leased(
        mut self,
        key: impl Into<Vec<u8>>,
        value: impl Into<Vec<u8>>,
        lease: Option<LeaseId>,
    ) -> Transaction {
        self.operations.push(Operation::Put { key: key.into(), value: value.into(), lease });
        self
    }

    /// Removes keys.
    #[must_use]
    pub fn delete(mut self, keys: KeySet) -> Transaction {
        self.operations.push(Operation::Delete(keys));
        self
    }

    pub(crate) fn with_ticket(self) -> Transaction {
        Transaction { has_ticket: true, ..self }
    }

    /// What must hold.
    pub fn conditions(&self) -> &[Condition] {
        &self.conditions
    }

    /// What is changed.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Refuses what some implementation could not do, so that each refuses it.
    ///
    /// # Errors
    /// [`MetaError::Invalid`], which says what is too much.
    pub fn check(&self) -> Result<(), MetaError> {
        let (conditions, operations) = (self.conditions.len(), self.operations.len());
        let most = MOST_STEPS + usize::from(self.has_ticket);
        if conditions > most || operations > most {
            return Err(MetaError::Invalid(format!(
                "{conditions} conditions with {operations} changes are too many for one transaction: at most {MOST_STEPS} of each"
            )));
        }
        let bytes: usize = self.operations.iter().map(Operation::bytes).sum();
        let most_bytes = MOST_BYTES + if self.has_ticket { LONGEST_KEY } else { 0 };
        if bytes > most_bytes {
            return Err(MetaError::Invalid(format!(
                "changes of {bytes} bytes are too many for one transaction: at most {MOST_BYTES}"
            )));
        }
        let all_keys = self.conditions.iter().map(Condition::keys).chain(self.operations.iter().map(Operation::keys));
        for keys in all_keys {
            check_keys(&keys)?;
        }
        for (at, operation) in self.operations.iter().enumerate() {
            let Operation::Put { key, .. } = operation else { continue };
            let others = self.operations.iter().enumerate().filter(|(other, _)| *other != at);
            if others.map(|(_, other)| other.keys()).any(|keys| keys.contains(key)) {
                return Err(MetaError::Invalid(format!(
                    "the key {:?} is changed twice in one transaction",
                    String::from_utf8_lossy(key)
                )));
            }
        }
        Ok(())
    }
}

/// Refuses keys that no store can have.
pub(crate) fn check_keys(keys: &KeySet) -> Result<(), MetaError> {
    if matches!(keys, KeySet::One(key) if key.is_empty()) {
        return Err(MetaError::Invalid("a key is empty: give it a byte at least".to_owned()));
    }
    if matches!(keys, KeySet::Interval { from, to } if from >= to) {
        return Err(MetaError::Invalid("an interval of keys ends before it begins".to_owned()));
    }
    let length = keys.first().len();
    if length > LONGEST_KEY {
        return Err(MetaError::Invalid(format!("a key of {length} bytes is too long: at most {LONGEST_KEY}")));
    }
    Ok(())
}

impl Operation {
    fn keys(&self) -> KeySet {
        match self {
            Operation::Put { key, .. } => KeySet::One(key.clone()),
            Operation::Delete(keys) => keys.clone(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Operation::Put { key, value, .. } => key.len() + value.len(),
            Operation::Delete(keys) => keys.first().len(),
        }
    }
}

/// What became of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransactionOutcome {
    /// Its changes were made. The revision is theirs, and the newest one if nothing changed.
    Done {
        /// The revision.
        revision: Revision,
    },
    /// A condition did not hold; nothing was changed.
    Refused {
        /// The newest revision.
        revision: Revision,
        /// For each condition the first of its keys that is there.
        found: Vec<Option<KeyValue>>,
    },
}

impl TransactionOutcome {
    /// The revision of the changes, if they were made.
    pub fn done(&self) -> Option<Revision> {
        match self {
            TransactionOutcome::Done { revision } => Some(*revision),
            TransactionOutcome::Refused { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn absent() -> Transaction {
        Transaction::when(Condition::Absent(KeySet::one("a")))
    }

    #[test]
    fn what_is_too_much_is_refused_in_one_line() {
        absent().put("a", "1").put("b", "2").delete(KeySet::prefix("c")).check().unwrap();
        let many = (0..=MOST_STEPS).fold(absent(), |all, n| all.put(format!("{n}"), ""));
        let wrong = [
            (many, "too many"),
            (absent().put("a", vec![0; MOST_BYTES]), "bytes are too many"),
            (absent().put("a", "1").put("a", "2"), "\"a\" is changed twice"),
            (absent().put("ab", "1").delete(KeySet::prefix("a")), "\"ab\" is changed twice"),
            (absent().put("", "1"), "empty"),
            (absent().put(vec![b'k'; LONGEST_KEY + 1], ""), "too long"),
        ];
        for (transaction, what) in wrong {
            let line = transaction.check().unwrap_err().to_string();
            assert!(line.contains(what) && !line.contains('\n'), "{line}");
        }
    }
}
