//! What can go wrong with a metadata store.

use crate::keys::{LeaseId, Revision};
use std::error::Error;
use std::path::PathBuf;

/// A call to a metadata store was not done.
#[derive(Debug, thiserror::Error)]
pub enum MetaError {
    /// The request makes no sense, in any state of the store.
    #[error("{0}")]
    Invalid(String),
    /// The store could not be reached; nothing was changed.
    #[error("the metadata store {store} cannot be reached: start it, or try again")]
    Unavailable {
        /// Which.
        store: String,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The answer to a change was lost.
    #[error("the metadata store {store} was lost during a change, which may have been made: look")]
    Unknown {
        /// Which.
        store: String,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The lease has run out, was revoked or never was.
    #[error("the lease {0} has run out or was revoked: take a new one")]
    LeaseGone(LeaseId),
    /// Changes that are not kept any more.
    #[error("the changes of revision {wanted} are not kept any more: read all again")]
    Compacted {
        /// What was asked for.
        wanted: Revision,
    },
    /// A state that is not there yet.
    #[error("there is no revision {wanted} yet, the newest one is {newest}")]
    Future {
        /// What was asked for.
        wanted: Revision,
        /// The newest.
        newest: Revision,
    },
    /// The file cannot be opened.
    #[error("cannot open the metadata store {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Another process has the file.
    #[error("the metadata store {} is open in another process: end that first", .path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be read or written; nothing was changed.
    #[error("cannot read or write the metadata store {}: look at its disk, then try again", .path.display())]
    Storage {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The store was closed.
    #[error("the metadata store was closed")]
    Closed,
}

impl MetaError {
    /// Whether the same call may succeed later, and has changed nothing.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, MetaError::Unavailable { .. })
    }

    /// Whether a change may have been made or not.
    pub fn is_unknown(&self) -> bool {
        matches!(self, MetaError::Unknown { .. })
    }
}
