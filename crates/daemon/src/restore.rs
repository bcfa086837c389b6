//! A data directory is made of a backup, with its lock held: no daemon may begin meanwhile.

use kip_api::{DataLock, LockError};
use kip_types::keys::KeysWrap;
use kip_worker::RestoredBackup;
use std::path::Path;

/// No data directory was made.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// It is not ours alone.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The backup, or the disk.
    #[error("nothing was restored")]
    Restore(#[from] kip_worker::BackupRestoreError),
}

/// Makes the data directory `data` of the backup in `file`. `report` hears how many bytes of the
/// file were read.
///
/// # Errors
/// See [`RestoreError`].
pub fn restore(
    data: &Path,
    file: &Path,
    wrap: &KeysWrap,
    report: impl FnMut(u64),
) -> Result<RestoredBackup, RestoreError> {
    let _lock = DataLock::take(data, None)?;
    Ok(kip_worker::restore(data, file, wrap, report)?)
}
