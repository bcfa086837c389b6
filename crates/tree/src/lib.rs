//! The name tree: small files and directories of a realm, over a metadata store.
//!
//! | module | owns |
//! | --- | --- |
//! | [`tree`] | [`NameTree`]: read, write, make, remove, move |
//! | `layout` | keys and entries in the store |
//! | `walk` | from a path to its node, and what must still be so when a change is made |
//! | `places` | where directories are, and changes by their paths |
//! | `follow` | the reading of changes that all watches of a realm share |
//! | [`watch`] | watches of nodes |
//! | [`lease`] | leases of a realm |
//! | [`elect`] | leaders |
//! | [`error`] | what can go wrong, one line each |
//!
//! Each change is one transaction of the store. Its conditions say that all directories on the way
//! are where they were, that the node is as it was found, and what the caller wants; if one does
//! not hold any more, the change begins again. So changes are whole, and happen one after the
//! other.
//!
//! Nodes of a directory are kept under the directory's id and not its path: to move a directory
//! changes two keys, however much is in it.
//!
//! Every key has the realm in it, and none a machine. Knows no procs and no clients; asks no clock.
#![forbid(unsafe_code)]

pub mod elect;
pub mod error;
mod follow;
mod layout;
pub mod lease;
mod places;
pub mod tree;
mod walk;
pub mod watch;

pub use elect::Leadership;
pub use error::TreeError;
pub use layout::has_past;
pub use tree::{FileWrite, NameTree};
pub use watch::TreeWatch;
