//! Templates on disk, in directories like those of checkpoints: `templates/ID`. One never changes
//! but for the moment at which it was last used, and no process has it open.

use crate::checkpoints::CheckpointNote;
use crate::record::{Durability, RecordError, Records, Unpublished, sync_directory};
use kip_types::{ProcName, TemplateId};
use serde::Serialize;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

const TEMPLATES: &str = "templates";
/// Its time of change is the moment of the last use.
const USED: &str = "used";
/// [`Kind::asked`](crate::kind::Kind::asked) of its proc.
const ASKED: &str = "asked";

/// The templates of a data directory.
#[derive(Debug, Clone)]
pub struct Templates {
    dir: PathBuf,
}

impl Templates {
    /// Those of that data directory, which may have none.
    pub fn new(data: &Path) -> Templates {
        Templates { dir: data.join(TEMPLATES) }
    }

    /// Their records.
    pub fn records(&self) -> Records {
        Records::at(self.dir.clone())
    }

    /// Begins one, with the spec and the record of its proc, and [`Kind::asked`] of that.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    ///
    /// [`Kind::asked`]: crate::kind::Kind::asked
    pub fn prepare(
        &self,
        id: &TemplateId,
        asked: &str,
        spec: &impl Serialize,
        record: &impl Serialize,
    ) -> Result<Unpublished, RecordError> {
        if !self.dir.is_dir() {
            let failed = RecordError::io("create", &self.dir);
            DirBuilder::new().mode(0o700).recursive(true).create(&self.dir).map_err(failed)?;
            sync_directory(self.dir.parent().expect("it lies in a data directory"))?;
        }
        let made = self.records().prepare(&id.clone().into(), spec, record, Durability::Fsync)?;
        made.add(ASKED, asked.as_bytes())?;
        Ok(made)
    }

    /// [`Kind::asked`](crate::kind::Kind::asked) of its proc; none of one that an older Kip took.
    pub fn asked(&self, id: &TemplateId) -> Option<String> {
        let name: ProcName = id.clone().into();
        fs::read_to_string(self.records().directory(&name).join(ASKED)).ok()
    }

    /// Which there are.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    pub fn ids(&self) -> Result<Vec<TemplateId>, RecordError> {
        if !self.dir.is_dir() {
            return Ok(Vec::new());
        }
        Ok(self.records().list()?.names.into_iter().map(TemplateId::from).collect())
    }

    /// What is known of one.
    ///
    /// # Errors
    /// [`RecordError::Io`], [`RecordError::Corrupt`], [`RecordError::Unknown`].
    pub fn note(&self, id: &TemplateId) -> Result<CheckpointNote, RecordError> {
        self.records().read(&id.clone().into(), CheckpointNote::FILE)
    }

    /// Notes that a proc has begun from it, which keeps it from being the one that is removed for
    /// another. A note that cannot be made is no obstacle.
    pub fn note_use(&self, id: &TemplateId) {
        let name: ProcName = id.clone().into();
        let _ = fs::write(self.records().directory(&name).join(USED), []);
    }

    /// When that was last, milliseconds since the epoch; none if no proc has.
    pub fn used_at_ms(&self, id: &TemplateId) -> Option<u64> {
        let name: ProcName = id.clone().into();
        let at = fs::metadata(self.records().directory(&name).join(USED)).ok()?.modified().ok()?;
        Some(at.duration_since(UNIX_EPOCH).ok()?.as_millis() as u64)
    }

    /// Removes what an earlier daemon was making or removing. Returns what could not be removed.
    pub fn sweep(&self) -> Vec<RecordError> {
        match self.dir.is_dir() {
            true => self.records().delete_leftovers().unwrap_or_else(|e| vec![e]),
            false => Vec::new(),
        }
    }
}
