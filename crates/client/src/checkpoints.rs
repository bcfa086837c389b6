//! The calls of `kip checkpoint`, `kip rollback` and `kip scale`.

use crate::client::Client;
use crate::connect::collect;
use crate::error::CallError;
use hyper::Method;
use hyper::body::Bytes;
use kip_types::api::checkpoint::{CheckpointRequest, CheckpointView, CheckpointsView, RollbackRequest, RolledBackView};
use kip_types::api::scale::ScaleView;
use kip_types::{CheckpointTag, ProcName};

impl Client {
    /// How a proc is scaled.
    pub async fn scale(&self, name: &ProcName) -> Result<ScaleView, CallError> {
        self.get(&format!("/v1/procs/{name}/scale")).await
    }

    /// Keeps a proc's memory and files of one moment.
    pub async fn checkpoint(&self, name: &ProcName, request: &CheckpointRequest) -> Result<CheckpointView, CallError> {
        self.post(&format!("/v1/procs/{name}/checkpoints"), request).await
    }

    /// The checkpoints of one proc, or of all.
    pub async fn checkpoints(&self, name: Option<&ProcName>) -> Result<CheckpointsView, CallError> {
        match name {
            Some(name) => self.get(&format!("/v1/procs/{name}/checkpoints")).await,
            None => self.get("/v1/checkpoints").await,
        }
    }

    /// Removes a checkpoint for good.
    pub async fn remove_checkpoint(&self, name: &ProcName, tag: &CheckpointTag) -> Result<(), CallError> {
        let path = format!("/v1/procs/{name}/checkpoints/{tag}");
        collect(self.send(Method::DELETE, &path, Bytes::new()).await?).await?;
        Ok(())
    }

    /// Lets a proc go on from a checkpoint.
    pub async fn rollback(&self, name: &ProcName, request: &RollbackRequest) -> Result<RolledBackView, CallError> {
        self.post(&format!("/v1/procs/{name}/rollback"), request).await
    }
}
