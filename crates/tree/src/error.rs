//! What can go wrong with a name tree.

use kip_meta::MetaError;
use kip_types::tree::{DEEPEST_PATH, MOST_FILE_BYTES, TreeLeaseId, TreePath};

/// A call to a name tree was not done; nothing was changed, but for [`TreeError::Store`].
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// There is no such node.
    #[error("{0} is not there: `kip tree ls` shows what is")]
    NotFound(TreePath),
    /// The node is there already.
    #[error("{0} is there already: take another name, or remove it first")]
    Exists(TreePath),
    /// A file where a directory is needed.
    #[error("{0} is a file, not a directory")]
    NotADirectory(TreePath),
    /// A directory where a file is needed.
    #[error("{0} is a directory, not a file")]
    IsADirectory(TreePath),
    /// The directory has nodes.
    #[error("the directory {0} is not empty: remove what is in it first")]
    NotEmpty(TreePath),
    /// The root can be neither written, moved nor removed.
    #[error("/ can be neither written, moved nor removed")]
    Root,
    /// A directory cannot be in itself.
    #[error("{from} cannot be moved to {to}, which is inside it")]
    IntoItself {
        /// The directory.
        from: TreePath,
        /// Where to.
        to: TreePath,
    },
    /// The moved nodes would be deeper than a path can say.
    #[error("what is in it would be deeper than {DEEPEST_PATH} names at {0}: move it less deep")]
    TooDeep(TreePath),
    /// The contents are too many bytes.
    #[error("{path} with {bytes} bytes is too large: a file of the tree has at most {MOST_FILE_BYTES}")]
    TooLarge {
        /// The file.
        path: TreePath,
        /// Its size.
        bytes: usize,
    },
    /// The node was written since.
    #[error("{path} has the version {found} by now, not {wanted}: read it again")]
    Stale {
        /// The node.
        path: TreePath,
        /// The caller's.
        wanted: u64,
        /// The node's.
        found: u64,
    },
    /// The leader leads no more.
    #[error("the epoch {epoch} of {path} is over: another may lead by now")]
    Fenced {
        /// The leader's node.
        path: TreePath,
        /// The caller's epoch.
        epoch: u64,
    },
    /// The lease has run out, was revoked or never was.
    #[error("the lease {0} has run out or was revoked: take a new one")]
    LeaseGone(TreeLeaseId),
    /// No lease has such a time.
    #[error("{0}")]
    BadLease(String),
    /// Changes that are not kept any more.
    #[error("changes since revision {0} are not kept any more: read all again")]
    Forgotten(u64),
    /// A revision that is not there yet: it may be one of another data directory.
    #[error("there is no revision {wanted} yet, the newest one is {newest}: read all again")]
    NotYet {
        /// What was asked for.
        wanted: u64,
        /// The newest.
        newest: u64,
    },
    /// Others changed the same nodes each time.
    #[error("{0} changes too often: try again")]
    Contended(TreePath),
    /// The store.
    #[error("the tree cannot be reached")]
    Store(#[source] MetaError),
}

impl From<MetaError> for TreeError {
    fn from(error: MetaError) -> TreeError {
        match error {
            MetaError::LeaseGone(id) => TreeError::LeaseGone(TreeLeaseId(id.0)),
            MetaError::Compacted { wanted } => TreeError::Forgotten(wanted),
            MetaError::Future { wanted, newest } => TreeError::NotYet { wanted, newest },
            error => TreeError::Store(error),
        }
    }
}
