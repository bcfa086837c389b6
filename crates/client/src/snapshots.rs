//! The calls of `kip snapshot`.

use crate::client::{Client, json, with_query};
use crate::error::CallError;
use crate::feed::AnswerFeed;
use hyper::Method;
use kip_types::api::{
    CarriedView, CollectRequest, CollectView, ExportRequest, ImportRequest, SnapshotDetails, SnapshotName,
    SnapshotsRequest, SnapshotsView, Verified, VerifyRequest,
};
use kip_types::name::ProcName;

impl Client {
    /// Generations in the store and on the local disk, by proc; with `name`, those of this name.
    pub async fn snapshots(&self, name: Option<ProcName>) -> Result<Vec<SnapshotsView>, CallError> {
        self.get(&with_query("/v1/snapshots", &SnapshotsRequest { name })).await
    }

    /// One generation in the store.
    pub async fn snapshot(&self, which: &SnapshotName) -> Result<SnapshotDetails, CallError> {
        self.get(&format!("/v1/snapshots/{which}")).await
    }

    /// Looks whether generations are what was sealed. The last item is [`Verified::End`].
    pub async fn verify(&self, request: &VerifyRequest) -> Result<AnswerFeed<Verified>, CallError> {
        Ok(AnswerFeed::new(self.send(Method::POST, "/v1/snapshots/verify", json(request)).await?))
    }

    /// Writes a generation into a file; the daemon does, so the path is absolute.
    pub async fn export(&self, which: &SnapshotName, file: String) -> Result<CarriedView, CallError> {
        self.post(&format!("/v1/snapshots/{which}/export"), &ExportRequest { file }).await
    }

    /// Brings a generation in from a file; the daemon does, so the path is absolute.
    pub async fn import(&self, request: &ImportRequest) -> Result<CarriedView, CallError> {
        self.post("/v1/snapshots/import", request).await
    }

    /// Deletes what nothing in the store leads to any more.
    pub async fn collect(&self, request: &CollectRequest) -> Result<CollectView, CallError> {
        self.post("/v1/snapshots/collect", request).await
    }
}
