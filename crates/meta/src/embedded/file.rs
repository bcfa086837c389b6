//! The file: opened, closed after it failed, opened again.
//!
//! redb takes no further change after an error of the disk. So the writer closes the file then, and
//! opens it again for the next change: a disk that was full for a while stops nothing for good.

use super::deadlines::{Deadlines, taken_up};
use super::tables::{FORMAT, FileError, LAST_LEASE, LOG_BYTES, OLDEST, REVISION, Tables, corrupted, decode, number};
use crate::keys::{FIRST_REVISION, LeaseId, Revision};
use parking_lot::RwLock;
use redb::{Builder, Database, ReadableTable};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The version of the tables that this program writes.
const FORMAT_NOW: u64 = 1;
/// Memory for pages of the file, bytes.
const CACHE_BYTES: usize = 16 << 20;
/// A file larger than this is made smaller at the start if most of it is free.
const LARGE_BYTES: u64 = 64 << 20;

/// The file.
pub(super) struct MetaFile {
    pub(super) path: PathBuf,
    db: RwLock<Option<Arc<Database>>>,
}

/// What a file says when it is opened.
pub(super) struct Opened {
    pub(super) revision: Revision,
    pub(super) deadlines: Deadlines,
}

impl MetaFile {
    /// A file that is not open.
    pub(super) fn new(path: &Path) -> MetaFile {
        MetaFile { path: path.to_owned(), db: RwLock::new(None) }
    }

    /// Opens it, or makes it.
    pub(super) fn open(&self) -> Result<Opened, FileError> {
        let db = open(&self.path)?;
        let opened = set_up(&db)?;
        *self.db.write() = Some(Arc::new(db));
        Ok(opened)
    }

    /// Closes it, once those that read it have done so.
    pub(super) fn close(&self) {
        *self.db.write() = None;
    }

    /// The file, if it is open.
    pub(super) fn get(&self) -> Option<Arc<Database>> {
        self.db.read().clone()
    }
}

/// Opens the file, which only its owner may read, or makes it.
fn open(path: &Path) -> Result<Database, FileError> {
    let is_new = !path.exists();
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if let (true, Some(dir)) = (is_new, path.parent()) {
        std::fs::File::open(dir)?.sync_all()?;
    }
    let open = || Builder::new().create_with_file_format_v3(true).set_cache_size(CACHE_BYTES).create(path);
    let mut db = open()?;
    if std::fs::metadata(path)?.len() > LARGE_BYTES {
        let used = db.begin_write()?.stats()?.stored_bytes();
        if std::fs::metadata(path)?.len() > used.saturating_mul(4).max(LARGE_BYTES) {
            db.compact()?;
        }
    }
    Ok(db)
}

/// So many revisions and leases a store gives at most that is older than one that goes on from its
/// copy.
const APART: u64 = 1 << 32;

/// Has a store that goes on from this file, a copy, give no revision and no lease a second time.
pub(super) fn set_apart(path: &Path) -> Result<(), FileError> {
    let db = open(path)?;
    let transaction = db.begin_write()?;
    let mut tables = Tables::open(&transaction)?;
    tables.log.retain(|_, _| false)?;
    let revision = number(&tables.state, REVISION)? + APART;
    let last_lease = number(&tables.state, LAST_LEASE)? + APART;
    for (name, value) in [(REVISION, revision), (OLDEST, revision + 1), (LOG_BYTES, 0), (LAST_LEASE, last_lease)] {
        tables.state.insert(name, value)?;
    }
    drop(tables);
    transaction.commit()?;
    Ok(())
}

/// Makes what a new file lacks, and reads leases and the newest revision.
fn set_up(db: &Database) -> Result<Opened, FileError> {
    let transaction = db.begin_write()?;
    let mut tables = Tables::open(&transaction)?;
    let is_new = tables.state.get(FORMAT)?.is_none();
    if is_new {
        for (name, value) in [
            (FORMAT, FORMAT_NOW),
            (REVISION, FIRST_REVISION),
            (OLDEST, FIRST_REVISION + 1),
            (LOG_BYTES, 0),
            (LAST_LEASE, 0),
        ] {
            tables.state.insert(name, value)?;
        }
    }
    let format = number(&tables.state, FORMAT)?;
    if format != FORMAT_NOW {
        let line = format!("it has the format {format}, this Kip knows {FORMAT_NOW}: use the Kip that wrote it");
        return Err(corrupted(line));
    }
    let mut deadlines = Deadlines::default();
    for entry in tables.leases.iter()? {
        let (id, bytes) = entry?;
        deadlines.change([taken_up(LeaseId(id.value()), &decode(bytes.value())?)]);
    }
    let revision = number(&tables.state, REVISION)?;
    drop(tables);
    // A file that is there needs no room on the disk to be opened.
    if is_new {
        transaction.commit()?
    } else {
        transaction.abort()?
    }
    Ok(Opened { revision, deadlines })
}
