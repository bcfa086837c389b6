//! What one proc may have of the daemon at a time: its connections together.

use crate::home::RuntimeHome;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most connections of a proc.
pub(crate) const MOST_CONNECTIONS: usize = 64;
/// Most watches of a proc: each knows where all directories of the realm are.
pub(crate) const MOST_WATCHES: usize = 64;
/// Most waits of a proc that are not answered yet.
pub(crate) const MOST_WAITS: usize = 1024;
/// Listings of a proc at a time: each reads its directory whole.
const LISTINGS: usize = 2;
/// Long answers of a proc that its clients have not read.
const LONG_ANSWERS: usize = 8;

/// What one proc has.
#[derive(Debug)]
pub(crate) struct ProcShare {
    connections: Arc<Semaphore>,
    pub(crate) watches: Arc<Semaphore>,
    pub(crate) waits: Arc<Semaphore>,
    pub(crate) listings: Semaphore,
    pub(crate) long_answers: Arc<Semaphore>,
}

/// The shares of all procs that have connections, by the directories of these.
#[derive(Debug, Default)]
pub(crate) struct ProcShares(Mutex<BTreeMap<PathBuf, Weak<ProcShare>>>);

/// A connection's place among those of its proc, until it is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPlace {
    _permit: OwnedSemaphorePermit,
    /// It is this one that counts the connection, also while nothing else has it any more.
    _share: Arc<ProcShare>,
}

impl ProcShares {
    /// That of a proc.
    pub(crate) fn of(&self, home: &dyn RuntimeHome) -> Arc<ProcShare> {
        let mut all = self.0.lock();
        let directory = home.directory();
        if let Some(share) = all.get(&directory).and_then(Weak::upgrade) {
            return share;
        }
        all.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(ProcShare::new());
        all.insert(directory, Arc::downgrade(&share));
        share
    }
}

impl ProcShare {
    pub(crate) fn new() -> ProcShare {
        ProcShare {
            connections: Arc::new(Semaphore::new(MOST_CONNECTIONS)),
            watches: Arc::new(Semaphore::new(MOST_WATCHES)),
            waits: Arc::new(Semaphore::new(MOST_WAITS)),
            listings: Semaphore::new(LISTINGS),
            long_answers: Arc::new(Semaphore::new(LONG_ANSWERS)),
        }
    }

    /// None if the proc has as many connections as it may.
    pub(crate) fn place(self: &Arc<ProcShare>) -> Option<ConnectionPlace> {
        let permit = Arc::clone(&self.connections).try_acquire_owned().ok()?;
        Some(ConnectionPlace { _permit: permit, _share: Arc::clone(self) })
    }
}
