//! A proc, copied: its directory, also as a stream, its memory while it runs on, and the random
//! number generators in it that must not go on alike.
//!
//! Owns both directories while it copies; knows of no record, and never decides what is copied
//! when.
#![forbid(unsafe_code)]

pub mod fill;
pub mod inspected;
pub mod memory;
pub mod random;
mod spread;
mod stage;
pub mod tarred;
mod tree;

pub use stage::{Becomes, ProcCopy, UnsyncedFiles, copy_volume, sync};

use kip_criu_images::CheckpointImageError;
use kip_snapshot::SnapshotError;
use std::io;
use std::path::{Path, PathBuf};

/// Of the overlay: true on one machine only (`kip_archive::files::rules`).
pub const BOUND: [&str; 4] = ["origin", "nlink", "uuid", "impure"];

/// A directory is not there as a whole.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum CopyError {
    #[error("cannot read or write {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("some of its memory is still in the store, and no store is open: `kip up --store URL`")]
    Remote,
    #[error(transparent)]
    Generation(SnapshotError),
    #[error(transparent)]
    Images(#[from] CheckpointImageError),
    #[error("it was removed meanwhile")]
    Removed,
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> CopyError {
    let path = path.to_owned();
    move |source| CopyError::Io { path, source }
}
