//! Checkpoints of procs on disk, in directories like those of procs: `checkpoints/KEY/TAG`, where
//! KEY is that of the first proc of a name, which the later ones of a rollback or a replacement
//! have in their specs.
//!
//! A checkpoint has the spec and the record of its proc then, and a note. It never changes, and no
//! process has it open.

use crate::record::{RecordError, Records, Unpublished, sync_directory};
use kip_types::{CheckpointTag, ProcName};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const CHECKPOINTS: &str = "checkpoints";

/// What is known of a checkpoint beside its spec and record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointNote {
    /// The one before it.
    pub parent: Option<CheckpointTag>,
    /// Milliseconds since the epoch.
    pub taken_at_ms: u64,
    /// The proc ran.
    pub was_awake: bool,
    /// First id of the block that its files belong to.
    pub first_id: u32,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Files, bytes.
    pub file_bytes: u64,
    /// How long the proc stood still, microseconds.
    pub still_us: u64,
    /// How long it took, microseconds.
    pub total_us: u64,
}

impl CheckpointNote {
    /// Its name in the directory of a checkpoint or a template.
    pub const FILE: &str = "checkpoint.json";
}

/// The checkpoints of all procs of a data directory.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    dir: PathBuf,
}

impl Checkpoints {
    /// Those of that data directory, which may have none.
    pub fn new(data: &Path) -> Checkpoints {
        Checkpoints { dir: data.join(CHECKPOINTS) }
    }

    /// Those with that key, which may be none.
    pub fn of(&self, key: &ProcName) -> Records {
        Records::at(self.dir.join(key.as_str()))
    }

    /// The same, with a directory to make one in.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    pub fn make_room(&self, key: &ProcName) -> Result<Records, RecordError> {
        let path = self.dir.join(key.as_str());
        if !path.is_dir() {
            DirBuilder::new().mode(0o700).recursive(true).create(&path).map_err(RecordError::io("create", &path))?;
            sync_directory(&self.dir)?;
            sync_directory(self.dir.parent().expect("it lies in a data directory"))?;
        }
        Ok(Records::at(path))
    }

    /// Their tags, in no order of time.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    pub fn tags(&self, key: &ProcName) -> Result<Vec<CheckpointTag>, RecordError> {
        if !self.dir.join(key.as_str()).is_dir() {
            return Ok(Vec::new());
        }
        Ok(self.of(key).list()?.names.into_iter().map(CheckpointTag::from).collect())
    }

    /// What is known of one.
    ///
    /// # Errors
    /// [`RecordError::Io`], [`RecordError::Corrupt`], [`RecordError::Unknown`].
    pub fn note(&self, key: &ProcName, tag: &CheckpointTag) -> Result<CheckpointNote, RecordError> {
        self.of(key).read(&tag.clone().into(), CheckpointNote::FILE)
    }

    /// Puts the note beside the record of one that is being made.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    pub fn add_note(made: &Unpublished, note: &CheckpointNote) -> Result<(), RecordError> {
        let path = made.path().join(CheckpointNote::FILE);
        let bytes = serde_json::to_vec_pretty(note).map_err(|source| RecordError::Encode { path, source })?;
        made.add(CheckpointNote::FILE, &bytes)
    }

    /// Whether any has that key.
    pub fn has(&self, key: &ProcName) -> bool {
        self.dir.join(key.as_str()).is_dir()
    }

    /// Removes all of that key: the last proc that has them was removed.
    ///
    /// # Errors
    /// [`RecordError::Io`]; the rest is removed by the next sweep.
    pub fn remove_all(&self, key: &ProcName) -> Result<(), RecordError> {
        match Records::at(self.dir.clone()).remove(key) {
            Err(RecordError::Unknown { .. }) => Ok(()),
            removed => removed?.delete(),
        }
    }

    /// Removes what an earlier daemon was making or removing, and those of no proc any more.
    /// Returns what could not be removed.
    pub fn sweep(&self, is_used: impl Fn(&ProcName) -> bool) -> Vec<RecordError> {
        let Ok(entries) = fs::read_dir(&self.dir) else { return Vec::new() };
        let mut failed = Records::at(self.dir.clone()).delete_leftovers().unwrap_or_else(|e| vec![e]);
        let keys = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<ProcName>().ok());
        for key in keys {
            match is_used(&key) {
                true => failed.extend(self.of(&key).delete_leftovers().unwrap_or_else(|e| vec![e])),
                false => failed.extend(self.remove_all(&key).err()),
            }
        }
        failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Durability;
    use kip_types::chain;

    #[test]
    fn what_no_proc_has_any_more_is_swept_and_what_was_begun_too() {
        let data = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(data.path());
        let [web, gone]: [ProcName; 2] = ["web", "gone"].map(|key| key.parse().unwrap());
        assert_eq!(checkpoints.tags(&web).unwrap(), []);
        let note = CheckpointNote {
            parent: None,
            taken_at_ms: 1,
            was_awake: true,
            first_id: 65536,
            memory_bytes: 2,
            file_bytes: 3,
            still_us: 4,
            total_us: 5,
        };
        for key in [&web, &gone] {
            let records = checkpoints.make_room(key).unwrap();
            let made = records.prepare(&"c1".parse().unwrap(), &"spec", &"state", Durability::Fsync).unwrap();
            Checkpoints::add_note(&made, &note).unwrap();
            made.publish().unwrap();
            // One more is being made.
            records.prepare(&"c2".parse().unwrap(), &"spec", &"state", Durability::Fsync).unwrap();
        }
        let tag: CheckpointTag = "c1".parse().unwrap();
        assert_eq!(checkpoints.sweep(|key| *key == web).iter().map(|e| chain(e)).collect::<Vec<_>>(), [""; 0]);
        assert!(checkpoints.tags(&web).unwrap() == std::slice::from_ref(&tag));
        assert_eq!(checkpoints.note(&web, &tag).unwrap(), note);
        assert_eq!(fs::read_dir(data.path().join("checkpoints/web")).unwrap().count(), 1);
        assert!(!checkpoints.has(&gone) && checkpoints.has(&web));
        assert!(matches!(checkpoints.note(&web, &"c2".parse().unwrap()), Err(RecordError::Unknown { .. })));
    }
}
