//! A file of the data directory that another part of the daemon writes.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Copies a file to a path.
pub type CopyFile = dyn Fn(&Path) -> io::Result<()> + Send + Sync;

/// A file at the top of the data directory that changes under its owner's hands: a backup has what
/// the owner copies.
#[derive(Clone)]
pub struct OwnFile {
    /// Its name.
    pub name: &'static str,
    /// Makes a copy of one moment at a path where nothing is. Blocks.
    pub copy: Arc<CopyFile>,
}

impl fmt::Debug for OwnFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnFile").field("name", &self.name).finish_non_exhaustive()
    }
}
