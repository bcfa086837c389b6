//! What is known of a checkpoint, and whose it is.

use kip_engine::host::Proc;
use kip_records::body::Body;
use kip_records::checkpoints::CheckpointNote;
use kip_records::state::Record;
use kip_types::api::checkpoint::CheckpointView;
use kip_types::{CheckpointTag, Generation, ProcName, Spec, State, chain};
use std::path::PathBuf;

/// A checkpoint, read.
pub(crate) struct Checkpoint {
    pub(crate) directory: PathBuf,
    /// The spec of the proc then.
    pub(crate) spec: Spec,
    /// What it sleeps in.
    pub(crate) record: Record,
    pub(crate) note: CheckpointNote,
}

impl Checkpoint {
    /// What goes on from it takes memory at once: it was awake, or starts.
    pub(crate) fn runs_again(&self) -> bool {
        self.note.was_awake || generation_in(&self.record).is_none()
    }

    /// Compares its generation with what was recorded of it, every page with `whole`.
    pub(crate) fn verify(&self, whole: bool) -> Result<(), String> {
        let Some(generation) = generation_in(&self.record) else { return Ok(()) };
        let path = kip_snapshot::path_of(&self.directory, generation);
        let manifest = kip_snapshot::open::<Body>(&path).map_err(|e| chain(&e))?;
        let verified = match whole {
            true => kip_snapshot::verify(&path, &manifest.parts),
            false => kip_snapshot::verify_some(&path, &manifest.parts, &[]),
        };
        verified.map_err(|e| chain(&e))
    }
}

/// Under which key a proc's checkpoints are.
pub(crate) fn key_of(proc: &Proc) -> ProcName {
    proc.spec().lineage.as_ref().map_or_else(|| proc.key.clone(), |lineage| lineage.key.clone())
}

/// What people see of one.
pub(crate) fn view_of(
    proc: &Proc,
    tag: CheckpointTag,
    note: CheckpointNote,
    spec: &Spec,
    current: Option<&CheckpointTag>,
) -> CheckpointView {
    CheckpointView {
        name: proc.spec().name.clone(),
        is_current: current == Some(&tag),
        tag,
        parent: note.parent,
        taken_at_ms: note.taken_at_ms,
        has_memory: note.memory_bytes > 0,
        memory_bytes: note.memory_bytes,
        file_bytes: note.file_bytes,
        still_us: note.still_us,
        total_us: note.total_us,
        command: spec.command.clone(),
    }
}

/// The generation that is recorded of a proc which sleeps.
pub(crate) fn generation_in(record: &Record) -> Option<Generation> {
    match record.state {
        State::Parked { generation } => Some(generation),
        _ => None,
    }
}
