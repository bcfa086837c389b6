//! A file that a client asked for gets its name when it is whole and on the disk; nothing is
//! replaced.

use rustix::fs::{CWD, RenameFlags};
use std::fs::File;
use std::io;
use std::path::Path;

/// Syncs what has grown at `growing` and names it.
///
/// # Errors
/// `AlreadyExists`: something has that name. The file system's.
pub fn publish(file: &File, growing: &Path, name: &Path) -> io::Result<()> {
    file.sync_all()?;
    rustix::fs::renameat_with(CWD, growing, CWD, name, RenameFlags::NOREPLACE)?;
    File::open(name.parent().unwrap_or(Path::new("/")))?.sync_all()
}
