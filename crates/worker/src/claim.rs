//! What is being made, so that it is not made twice: names of procs, tags, templates.

use kip_types::{CheckpointTag, ProcName};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

/// All that are being made.
pub(crate) type Claims<T> = Arc<Mutex<BTreeSet<T>>>;

/// The tag of a checkpoint, with the key of its lineage.
pub(crate) type TagClaim = Claim<(ProcName, CheckpointTag)>;

/// While one lives no other gets the same. Whether it is there already is to be looked at after
/// that: what was made a moment ago is there, and claimed no more.
#[derive(Debug)]
pub(crate) struct Claim<T: Ord> {
    pub(crate) of: T,
    all: Claims<T>,
}

impl<T: Ord + Clone> Claim<T> {
    /// None if it is claimed.
    pub(crate) fn of(of: T, all: &Claims<T>) -> Option<Claim<T>> {
        let is_new = all.lock().insert(of.clone());
        is_new.then(|| Claim { of, all: Arc::clone(all) })
    }
}

impl<T: Ord> Drop for Claim<T> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.of);
    }
}
