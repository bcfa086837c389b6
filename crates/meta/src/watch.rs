//! Changes as they come.

use crate::error::MetaError;
use crate::keys::{KeyValue, Revision};
use tokio::sync::mpsc;

/// Batches that wait for their reader; further ones wait in the store.
const WAITING: usize = 16;

/// One key that was changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// The key.
    pub key: Vec<u8>,
    /// What it is now; none if it was removed.
    pub now: Option<KeyValue>,
    /// What it was before; none if it was not there. etcd says nothing of it either once that
    /// revision is not kept any more.
    pub before: Option<KeyValue>,
}

/// All changes of one revision to keys that are watched. Without changes it says how far the watch
/// has come: a watch can be taken up after that revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeBatch {
    /// The revision.
    pub revision: Revision,
    /// The changes, each key at most once.
    pub changes: Vec<KeyChange>,
}

/// The sending end of a watch.
pub type WatchSender = mpsc::Sender<Result<ChangeBatch, MetaError>>;

/// A watch. It ends when it is dropped.
#[derive(Debug)]
pub struct MetaWatch {
    batches: mpsc::Receiver<Result<ChangeBatch, MetaError>>,
}

impl MetaWatch {
    /// A watch and the end that feeds it.
    pub fn new() -> (WatchSender, MetaWatch) {
        let (sender, batches) = mpsc::channel(WAITING);
        (sender, MetaWatch { batches })
    }

    /// The next batch; waits for it.
    ///
    /// # Errors
    /// [`MetaError::Compacted`] if changes are lost to this watch, and
    /// [`MetaError::Unavailable`] if the connection is: another watch can go on after the last
    /// revision that this one gave. [`MetaError::Closed`] after any error.
    pub async fn next(&mut self) -> Result<ChangeBatch, MetaError> {
        self.batches.recv().await.unwrap_or(Err(MetaError::Closed))
    }
}
