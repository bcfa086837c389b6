//! Generations, in the store and on the local disk.

use crate::Feed;
use async_trait::async_trait;
use kip_types::api::{
    CarriedView, CollectRequest, CollectView, ImportRequest, Refusal, SnapshotDetails, SnapshotName, SnapshotsView,
    Verified, VerifyRequest,
};
use kip_types::name::ProcName;

/// Generations: listed, verified, carried elsewhere, collected.
#[async_trait]
pub trait SnapshotService: Send + Sync + 'static {
    /// Generations in the store and on the local disk, by proc; with `only`, those of one name.
    async fn snapshots(&self, only: Option<ProcName>) -> Result<Vec<SnapshotsView>, Refusal>;

    /// One generation in the store.
    async fn snapshot(&self, which: SnapshotName) -> Result<SnapshotDetails, Refusal>;

    /// Verifies that generations are what was sealed, as long as the client listens. The last item
    /// is [`Verified::End`] or an error.
    async fn verify(&self, request: VerifyRequest) -> Result<Feed<Verified>, Refusal>;

    /// Writes a generation into a file, whose path is absolute.
    async fn export(&self, which: SnapshotName, file: String) -> Result<CarriedView, Refusal>;

    /// Imports a generation from a file.
    async fn import(&self, request: ImportRequest) -> Result<CarriedView, Refusal>;

    /// Deletes what nothing in the store leads to any more.
    async fn collect(&self, request: CollectRequest) -> Result<CollectView, Refusal>;
}
