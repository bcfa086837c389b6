//! States and changes of the past: read, and dropped when there are too many.

use super::KeptHistory;
use super::tables::{
    CURRENT, FileError, LOG, LOG_BYTES, Logged, OLDEST, REVISION, STATE, Tables, decode_change, encode_change, number,
    read_keys,
};
use crate::error::MetaError;
use crate::keys::{FIRST_REVISION, KeySet, KeyValue, Revision};
use crate::store::{RangeFound, RangeRequest};
use crate::watch::{ChangeBatch, KeyChange};
use redb::Database;
use std::collections::BTreeMap;

/// Changes that one reading of the log takes, more or less: it ends with a whole revision.
const AT_ONCE: usize = 256;
/// Entries of the log that are looked at for these.
const LOOKED_AT: usize = 4096;

/// Why something was not read.
pub(super) enum Unread {
    /// The file.
    Broken(FileError),
    /// The request.
    Wrong(MetaError),
}

impl<E: Into<FileError>> From<E> for Unread {
    fn from(error: E) -> Unread {
        Unread::Broken(error.into())
    }
}

/// Reads keys, in a state of now or of the past.
pub(super) fn range(db: &Database, request: &RangeRequest) -> Result<RangeFound, Unread> {
    let transaction = db.begin_read()?;
    let (current, state) = (transaction.open_table(CURRENT)?, transaction.open_table(STATE)?);
    let revision = number(&state, REVISION)?;
    let limit = request.limit.unwrap_or(usize::MAX);
    let Some(at) = request.at.filter(|at| *at != revision) else {
        let mut keys = read_keys(&current, &request.keys, limit.saturating_add(1))?;
        let more = keys.len() > limit;
        keys.truncate(limit);
        return Ok(RangeFound { revision, keys, more });
    };
    if at > revision {
        return Err(Unread::Wrong(MetaError::Future { wanted: at, newest: revision }));
    }
    // To undo a revision its changes are needed, and not those of the state that is wanted.
    let oldest = number(&state, OLDEST)?;
    if at + 1 < oldest {
        return Err(Unread::Wrong(MetaError::Compacted { wanted: at }));
    }
    let now = read_keys(&current, &request.keys, usize::MAX)?;
    let mut then: BTreeMap<Vec<u8>, KeyValue> = now.into_iter().map(|kv| (kv.key.clone(), kv)).collect();
    for entry in transaction.open_table(LOG)?.range((at + 1, 0)..)?.rev() {
        let (_, bytes) = entry?;
        let Some(logged) = decode_change(bytes.value(), &request.keys)? else { continue };
        let Logged::Whole(change) = logged else { return Err(Unread::Wrong(MetaError::Compacted { wanted: at })) };
        match change.before {
            Some(kv) => then.insert(change.key, kv),
            None => then.remove(&change.key),
        };
    }
    let more = then.len() > limit;
    Ok(RangeFound { revision, keys: then.into_values().take(limit).collect(), more })
}

/// What a watch reads at once.
pub(super) struct Reading {
    /// Batches in their order.
    pub(super) batches: Vec<ChangeBatch>,
    /// Everything up to here was looked at.
    pub(super) up_to: Revision,
}

/// Changes to `keys` from the revision `from` on: not all at once if there are many.
pub(super) fn changes(db: &Database, keys: &KeySet, from: Revision) -> Result<Reading, Unread> {
    let transaction = db.begin_read()?;
    let state = transaction.open_table(STATE)?;
    let (newest, oldest) = (number(&state, REVISION)?, number(&state, OLDEST)?);
    if from.max(FIRST_REVISION + 1) < oldest {
        return Err(Unread::Wrong(MetaError::Compacted { wanted: from }));
    }
    let mut reading = Reading { batches: Vec::new(), up_to: newest };
    let (mut taken, mut looked_at) = (0, 0);
    for entry in transaction.open_table(LOG)?.range((from, 0)..)? {
        let (at, bytes) = entry?;
        let (revision, number) = at.value();
        if number == 0 && (taken >= AT_ONCE || looked_at >= LOOKED_AT) {
            reading.up_to = revision - 1;
            break;
        }
        looked_at += 1;
        let Some(logged) = decode_change(bytes.value(), keys)? else { continue };
        let Logged::Whole(change) = logged else {
            return Err(Unread::Wrong(MetaError::Compacted { wanted: revision }));
        };
        taken += 1;
        match reading.batches.last_mut().filter(|batch| batch.revision == revision) {
            Some(batch) => batch.changes.push(change),
            None => reading.batches.push(ChangeBatch { revision, changes: vec![change] }),
        }
    }
    Ok(reading)
}

/// Adds the changes of a revision, and drops the oldest ones if there are too many.
pub(super) fn log(
    tables: &mut Tables<'_>,
    revision: Revision,
    changes: &[KeyChange],
    kept: KeptHistory,
) -> Result<(), FileError> {
    let mut bytes = number(&tables.state, LOG_BYTES)?;
    for (number, change) in (0u32..).zip(changes) {
        let encoded = encode_change(change, (kept.has_values_of)(&change.key));
        bytes += encoded.len() as u64;
        tables.log.insert((revision, number), encoded.as_slice())?;
    }
    let mut oldest = number(&tables.state, OLDEST)?;
    while oldest < revision && (bytes > kept.bytes || revision - oldest >= kept.revisions) {
        bytes -= drop_revision(tables, oldest)?;
        oldest += 1;
    }
    tables.state.insert(REVISION, revision)?;
    tables.state.insert(OLDEST, oldest)?;
    tables.state.insert(LOG_BYTES, bytes)?;
    Ok(())
}

/// Removes the changes of a revision. Returns the bytes that they took.
fn drop_revision(tables: &mut Tables<'_>, revision: Revision) -> Result<u64, FileError> {
    let mut bytes = 0;
    for number in 0.. {
        let Some(removed) = tables.log.remove((revision, number))? else { break };
        bytes += removed.value().len() as u64;
    }
    Ok(bytes)
}
