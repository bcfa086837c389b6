//! Why files are not copied.

use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// Files were not copied, or not all of them.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// Nothing is at a path.
    #[error("there is no {}", path.display())]
    Missing {
        /// The path, as it was asked for.
        path: PathBuf,
    },
    /// A path leads through something that is no directory, or ends there.
    #[error("{} is not a directory", path.display())]
    NotDirectory {
        /// The path, as it was asked for.
        path: PathBuf,
    },
    /// A path leads to what the kernel makes up, or to a pipe, a socket or a device.
    #[error("{} is not a file on a disk", path.display())]
    Special {
        /// The path, as it was asked for.
        path: PathBuf,
    },
    /// A directory cannot take the place of a file.
    #[error("{} is a file: a directory is not copied onto it", path.display())]
    OntoFile {
        /// The path, as it was asked for.
        path: PathBuf,
    },
    /// An entry that is not taken; those before it are there.
    #[error("entry {entry:?} {why}; what came before it is copied")]
    Entry {
        /// The entry's name, as the archive has it.
        entry: String,
        /// Why, for people.
        why: String,
    },
    /// All of it is too much; what came before is there.
    #[error("{0}")]
    TooMuch(String),
    /// The stream breaks off or is no tar archive.
    #[error("the archive cannot be read")]
    Archive(#[source] io::Error),
    /// The receiver of the stream takes no more.
    #[error("the archive cannot be sent")]
    Sent(#[source] io::Error),
    /// The kernel refuses a step.
    #[error("{} cannot be copied", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl FilesError {
    /// The error of a lookup of `path`.
    pub(crate) fn of(path: &Path) -> impl FnOnce(Errno) -> FilesError {
        let path = path.to_owned();
        move |errno| match errno {
            Errno::NOENT => FilesError::Missing { path },
            Errno::NOTDIR => FilesError::NotDirectory { path },
            Errno::XDEV => FilesError::Special { path },
            other => FilesError::Io { path, source: other.into() },
        }
    }
}
