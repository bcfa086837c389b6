//! What `kip up` is: the daemon of one data directory, in the foreground.
//!
//! | module | owns |
//! | --- | --- |
//! | [`options`] | what a daemon is started with |
//! | [`start`] | the order of its parts, and of their end |
//! | [`serve`] | the API, from the socket to the end that was asked for |
//! | [`signals`], [`notify`], [`log`], [`group`] | signals; the service manager; the log on stderr; the group that may connect |
//! | `traces` | wakes as spans of OpenTelemetry (feature `otel`) |
//! | [`tree`] | the name tree: its file, its errors as refusals |
//! | [`restore`] | the data directory of a backup, before there is a daemon |
//!
//! Order: take the directory, open the worker (which finishes or undoes what a dead daemon left),
//! listen, say `ready`. SIGTERM and SIGINT end the daemon only: procs run on and the next `kip up`
//! adopts them. `kip down` ends both. SIGHUP has the certificate of the API read again. A crash at
//! any step leaves what the next start recovers from.
//!
//! Never parses a command line and never prints: both are the caller's.
#![forbid(unsafe_code)]

mod group;
mod heap;
mod log;
mod notify;
mod options;
mod restore;
mod serve;
mod signals;
mod start;
#[cfg(feature = "otel")]
mod traces;
mod tree;

pub use group::GroupError;
pub use kip_worker::{BadMarks, MemoryMarks, RestoredBackup};
pub use log::LogError;
pub use options::{Certificate, Listen, Options};
pub use restore::{RestoreError, restore};
pub use serve::{ApiAddresses, OfferError};
pub use start::{DaemonError, run};
#[cfg(feature = "otel")]
pub use traces::TracesError;
