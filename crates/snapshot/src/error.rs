//! Why a generation cannot be made, read or trusted.

use std::io;
use std::path::{Path, PathBuf};

/// Version of a generation's layout: 4 since procs have file systems in memory, 3 since its images
/// are one file, 2 since pages may come from
/// elsewhere, 1 before. A proc whose generation a newer Kip has made stays parked.
pub const FORMAT: u32 = 4;

/// A generation cannot be made, read or trusted.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file system's word.
    #[error("snapshot file {path} cannot be read or written")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file is not what was recorded.
    #[error("snapshot file {path} is damaged: its {what} is not the recorded one")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// `size` or `checksum`.
        what: &'static str,
    },
    /// The manifest cannot be read.
    #[error("snapshot manifest {path} cannot be read")]
    Manifest {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// It was made by a newer Kip.
    #[error("snapshot {path} has format {found}, this Kip reads up to {FORMAT}: upgrade Kip")]
    Newer {
        /// Which.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
}

pub(crate) fn io_at(path: &Path) -> impl FnOnce(io::Error) -> SnapshotError + '_ {
    move |source| SnapshotError::Io { path: path.to_owned(), source }
}
