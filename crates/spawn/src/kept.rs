//! Entries in the metadata store: `spawn/NAME`, as JSON.

use crate::entry::SpawnEntry;
use kip_meta::{Condition, KeySet, Meta, MetaError, RangeRequest, Transaction};
use kip_types::ProcName;
use std::sync::Arc;

const PREFIX: &str = "spawn/";

/// Entries of one read: each has 64 KiB at most.
const PAGE: usize = 512;

/// Whether a key of the store is one of these. Their past is of no use.
pub fn is_spawn_key(key: &[u8]) -> bool {
    key.starts_with(PREFIX.as_bytes())
}

fn key(name: &ProcName) -> Vec<u8> {
    format!("{PREFIX}{name}").into_bytes()
}

fn json(entry: &SpawnEntry) -> Vec<u8> {
    serde_json::to_vec(entry).expect("an entry is JSON")
}

/// An entry is not on disk.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotKept {
    /// The store.
    #[error(transparent)]
    Store(#[from] MetaError),
    /// It is not there any more, or there already.
    #[error("the entry of {0} was changed by another")]
    Contended(ProcName),
}

/// The entries of all spawned procs.
#[derive(Clone)]
pub(crate) struct KeptEntries(Arc<dyn Meta>);

impl KeptEntries {
    pub(crate) fn new(meta: Arc<dyn Meta>) -> KeptEntries {
        KeptEntries(meta)
    }

    /// All of them. One that cannot be read is left out, and logged.
    pub(crate) async fn read(&self) -> Result<Vec<SpawnEntry>, MetaError> {
        let mut all = Vec::new();
        let mut from = PREFIX.as_bytes().to_vec();
        // What comes after all keys of the prefix.
        let to = b"spawn0".to_vec();
        loop {
            let keys = KeySet::Interval { from, to: to.clone() };
            let found = self.0.range(&RangeRequest::all(keys).limit(PAGE)).await?;
            for kept in &found.keys {
                match serde_json::from_slice(&kept.value) {
                    Ok(entry) => all.push(entry),
                    Err(error) => {
                        let key = String::from_utf8_lossy(&kept.key);
                        tracing::error!(%key, %error, "a spawned proc cannot be read, and is not known");
                    }
                }
            }
            let Some(last) = found.keys.last().filter(|_| found.more) else { return Ok(all) };
            from = [&last.key[..], b"\0"].concat();
        }
    }

    async fn transact(&self, name: &ProcName, transaction: Transaction) -> Result<(), NotKept> {
        let done = self.0.transact(&transaction).await?;
        done.done().map(drop).ok_or_else(|| NotKept::Contended(name.clone()))
    }

    /// Keeps a new one.
    pub(crate) async fn make(&self, entry: &SpawnEntry) -> Result<(), NotKept> {
        let key = key(&entry.name);
        let absent = Transaction::when(Condition::Absent(KeySet::one(key.clone())));
        self.transact(&entry.name, absent.put(key, json(entry))).await
    }

    /// Keeps one that is kept as it is now, and forgets others.
    pub(crate) async fn change(&self, entry: &SpawnEntry, forgotten: &[ProcName]) -> Result<(), NotKept> {
        let key = key(&entry.name);
        let mut transaction = Transaction::when(Condition::Exists(key.clone())).put(key, json(entry));
        for name in forgotten {
            transaction = transaction.delete(KeySet::one(self::key(name)));
        }
        self.transact(&entry.name, transaction).await
    }
}
