//! Messages of the API about copies of a whole data directory: `kip backup`.

use crate::keys::KeysWrap;
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `POST /v1/backup`; answered with one `BackupProgress` per line.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupRequest {
    /// Absolute path of the file, which is made, on the daemon's machine.
    pub file: String,
    /// What closes it.
    pub wrap: KeysWrap,
}

/// How a proc is in a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackedUpAs {
    /// Asleep, with its memory: it was, or was put to sleep for it.
    Asleep,
    /// Its memory, and maybe files, are in the store and not in the backup.
    InTheStore,
    /// Its files alone: it was not running.
    Stopped,
    /// Its files alone, as they were while it ran: it could not sleep.
    FilesOnly,
}

/// A proc in a backup.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[schemars(inline)]
pub struct BackedUpProc {
    /// Its name.
    pub name: ProcName,
    /// How it is in there.
    pub how: BackedUpAs,
    /// Why it is in there with its files only; null if it is not.
    pub cause: Option<String>,
    /// How long it stood still for it, microseconds; 0 for one that was not running.
    pub still_us: u64,
}

/// How far a backup is.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum BackupProgress {
    /// It is at this part now.
    At {
        /// What: `images`, `keys`, `proc web` and the like.
        part: String,
        /// Bytes that went in so far.
        bytes: u64,
    },
    /// A proc is in it.
    Proc(BackedUpProc),
    /// The last: the file is whole and on the disk.
    End {
        /// The file.
        file: String,
        /// Procs in it.
        procs: u64,
        /// Named volumes in it.
        volumes: u64,
        /// Files and directories of the host that procs have as volumes and that are not in it,
        /// sorted.
        left_out: Vec<String>,
        /// Bytes that went in.
        bytes: u64,
        /// Bytes of the file.
        file_bytes: u64,
    },
}
