//! Checkpoints of procs.

use async_trait::async_trait;
use kip_types::api::Refusal;
use kip_types::api::checkpoint::{CheckpointRequest, CheckpointView, CheckpointsView, RollbackRequest, RolledBackView};
use kip_types::{CheckpointTag, ProcName};

/// A proc as it was at some moment: kept, listed, removed, gone back to.
#[async_trait]
pub trait CheckpointService: Send + Sync + 'static {
    /// Keeps a proc's memory and files of one moment. A sleeper is not woken; one that runs stands
    /// still meanwhile and runs on.
    async fn checkpoint(&self, name: ProcName, request: CheckpointRequest) -> Result<CheckpointView, Refusal>;

    /// The checkpoints of one proc, or of all.
    async fn checkpoints(&self, name: Option<ProcName>) -> Result<CheckpointsView, Refusal>;

    /// Removes a checkpoint, for good.
    async fn remove_checkpoint(&self, name: ProcName, tag: CheckpointTag) -> Result<(), Refusal>;

    /// Lets a proc go on from a checkpoint. What it was is kept as another one; if that, or the
    /// rollback, fails the proc is as it was.
    async fn rollback(&self, name: ProcName, request: RollbackRequest) -> Result<RolledBackView, Refusal>;
}
