//! The tables of the file, and what lies in them.

use crate::keys::{KeySet, KeyValue, LeaseId, Revision};
use crate::watch::KeyChange;
use prost::Message;
use redb::{ReadableTable, Table, TableDefinition, WriteTransaction};

/// Keys as they are.
pub(super) const CURRENT: TableDefinition<&[u8], &[u8]> = TableDefinition::new("current");
/// Changes by revision and their number in it.
pub(super) const LOG: TableDefinition<(u64, u32), &[u8]> = TableDefinition::new("log");
/// Leases by their number.
pub(super) const LEASES: TableDefinition<u64, &[u8]> = TableDefinition::new("leases");
/// The keys that go with each lease.
pub(super) const BOUND: TableDefinition<(u64, &[u8]), ()> = TableDefinition::new("bound");
/// Numbers of the whole store: [`FORMAT`], [`REVISION`], [`OLDEST`], [`LOG_BYTES`], [`LAST_LEASE`].
pub(super) const STATE: TableDefinition<&str, u64> = TableDefinition::new("state");

/// The version of these tables.
pub(super) const FORMAT: &str = "format";
/// The newest revision.
pub(super) const REVISION: &str = "revision";
/// The oldest revision whose changes are kept.
pub(super) const OLDEST: &str = "oldest";
/// The bytes that all kept changes take.
pub(super) const LOG_BYTES: &str = "log_bytes";
/// The lease that was made last.
pub(super) const LAST_LEASE: &str = "last_lease";

/// The file cannot be read or written, or is not as it must be.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(super) struct FileError(Box<redb::Error>);

impl<E: Into<redb::Error>> From<E> for FileError {
    fn from(error: E) -> FileError {
        FileError(Box::new(error.into()))
    }
}

impl FileError {
    /// Whether another process has the file.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(*self.0, redb::Error::DatabaseAlreadyOpen)
    }
}

/// The file is not as it must be.
pub(super) fn corrupted(line: String) -> FileError {
    redb::Error::Corrupted(line).into()
}

/// A key's value and revisions.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct StoredValue {
    #[prost(bytes = "vec", tag = "1")]
    value: Vec<u8>,
    #[prost(uint64, tag = "2")]
    created: u64,
    #[prost(uint64, tag = "3")]
    modified: u64,
    #[prost(uint64, tag = "4")]
    version: u64,
    /// 0 for none.
    #[prost(uint64, tag = "5")]
    lease: u64,
}

/// A change.
#[derive(Clone, PartialEq, Eq, Message)]
struct LoggedChange {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(message, optional, tag = "2")]
    now: Option<StoredValue>,
    #[prost(message, optional, tag = "3")]
    before: Option<StoredValue>,
    /// It has neither of these: values of this key are not kept.
    #[prost(bool, tag = "4")]
    is_without_values: bool,
}

/// A change that was read.
pub(super) enum Logged {
    /// As it was made.
    Whole(KeyChange),
    /// Of a key whose past values are not kept.
    WithoutValues,
}

/// A lease.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct StoredLease {
    #[prost(uint64, tag = "1")]
    pub(super) ttl_ms: u64,
    /// When it runs out, by the clock of the machine: what counts while no process runs.
    #[prost(uint64, tag = "2")]
    pub(super) ends_unix_ms: u64,
}

impl StoredValue {
    fn of(kv: &KeyValue) -> StoredValue {
        StoredValue {
            value: kv.value.clone(),
            created: kv.created,
            modified: kv.modified,
            version: kv.version,
            lease: kv.lease.map_or(0, |lease| lease.0),
        }
    }

    fn under(self, key: &[u8]) -> KeyValue {
        let StoredValue { value, created, modified, version, lease } = self;
        let lease = (lease != 0).then_some(LeaseId(lease));
        KeyValue { key: key.to_vec(), value, created, modified, version, lease }
    }
}

/// Reads bytes that this module wrote.
pub(super) fn decode<T: Message + Default>(bytes: &[u8]) -> Result<T, FileError> {
    T::decode(bytes).map_err(|e| corrupted(format!("an entry cannot be read: {e}")))
}

/// Bytes of a change, with its values or without.
pub(super) fn encode_change(change: &KeyChange, with_values: bool) -> Vec<u8> {
    let stored = |kv: &Option<KeyValue>| kv.as_ref().filter(|_| with_values).map(StoredValue::of);
    let (now, before) = (stored(&change.now), stored(&change.before));
    LoggedChange { key: change.key.clone(), now, before, is_without_values: !with_values }.encode_to_vec()
}

/// A change of its bytes, if its key is one of `keys`.
pub(super) fn decode_change(bytes: &[u8], keys: &KeySet) -> Result<Option<Logged>, FileError> {
    let LoggedChange { key, now, before, is_without_values } = decode(bytes)?;
    if !keys.contains(&key) {
        return Ok(None);
    }
    if is_without_values {
        return Ok(Some(Logged::WithoutValues));
    }
    let (now, before) = (now.map(|v| v.under(&key)), before.map(|v| v.under(&key)));
    Ok(Some(Logged::Whole(KeyChange { key, now, before })))
}

/// The keys of a set that are there, in their order.
pub(super) fn read_keys(
    current: &impl ReadableTable<&'static [u8], &'static [u8]>,
    keys: &KeySet,
    limit: usize,
) -> Result<Vec<KeyValue>, FileError> {
    let read = |key: &[u8], bytes: &[u8]| decode::<StoredValue>(bytes).map(|value| value.under(key));
    if let KeySet::One(key) = keys {
        return match current.get(key.as_slice())? {
            Some(bytes) => Ok(vec![read(key, bytes.value())?]),
            None => Ok(Vec::new()),
        };
    }
    let end = keys.end();
    let range = match &end {
        Some(end) => current.range(keys.first()..end.as_slice())?,
        None => current.range(keys.first()..)?,
    };
    let mut found = Vec::new();
    for entry in range.take(limit) {
        let (key, bytes) = entry?;
        found.push(read(key.value(), bytes.value())?);
    }
    Ok(found)
}

/// A number of the whole store.
pub(super) fn number(state: &impl ReadableTable<&'static str, u64>, name: &str) -> Result<u64, FileError> {
    state.get(name)?.map(|value| value.value()).ok_or_else(|| corrupted(format!("the number {name} is missing")))
}

/// All tables, open for writing.
pub(super) struct Tables<'t> {
    pub(super) current: Table<'t, &'static [u8], &'static [u8]>,
    pub(super) log: Table<'t, (u64, u32), &'static [u8]>,
    pub(super) leases: Table<'t, u64, &'static [u8]>,
    bound: Table<'t, (u64, &'static [u8]), ()>,
    pub(super) state: Table<'t, &'static str, u64>,
}

impl<'t> Tables<'t> {
    pub(super) fn open(transaction: &'t WriteTransaction) -> Result<Tables<'t>, FileError> {
        Ok(Tables {
            current: transaction.open_table(CURRENT)?,
            log: transaction.open_table(LOG)?,
            leases: transaction.open_table(LEASES)?,
            bound: transaction.open_table(BOUND)?,
            state: transaction.open_table(STATE)?,
        })
    }

    /// Writes a key at `revision`. The lease, if there is one, must be there.
    pub(super) fn put(
        &mut self,
        key: &[u8],
        value: &[u8],
        lease: Option<LeaseId>,
        revision: Revision,
    ) -> Result<KeyChange, FileError> {
        let before = read_keys(&self.current, &KeySet::one(key), 1)?.pop();
        let (created, version) = before.as_ref().map_or((revision, 1), |kv| (kv.created, kv.version + 1));
        let now = KeyValue { key: key.to_vec(), value: value.to_vec(), created, modified: revision, version, lease };
        self.unbind(before.as_ref())?;
        if let Some(lease) = lease {
            self.bound.insert((lease.0, key), ())?;
        }
        self.current.insert(key, StoredValue::of(&now).encode_to_vec().as_slice())?;
        Ok(KeyChange { key: key.to_vec(), now: Some(now), before })
    }

    /// Removes those of these keys that are there.
    pub(super) fn delete(&mut self, keys: &KeySet) -> Result<Vec<KeyChange>, FileError> {
        let mut changes = Vec::new();
        for kv in read_keys(&self.current, keys, usize::MAX)? {
            self.unbind(Some(&kv))?;
            self.current.remove(kv.key.as_slice())?;
            changes.push(KeyChange { key: kv.key.clone(), now: None, before: Some(kv) });
        }
        Ok(changes)
    }

    fn unbind(&mut self, kv: Option<&KeyValue>) -> Result<(), FileError> {
        if let Some((lease, kv)) = kv.and_then(|kv| kv.lease.map(|lease| (lease, kv))) {
            self.bound.remove((lease.0, kv.key.as_slice()))?;
        }
        Ok(())
    }

    /// The keys that go with a lease.
    pub(super) fn bound_to(&self, lease: LeaseId) -> Result<Vec<Vec<u8>>, FileError> {
        let all = self.bound.range((lease.0, [].as_slice())..)?;
        let mut keys = Vec::new();
        for entry in all {
            let (at, _) = entry?;
            let (of, key) = at.value();
            if of != lease.0 {
                break;
            }
            keys.push(key.to_vec());
        }
        Ok(keys)
    }
}
