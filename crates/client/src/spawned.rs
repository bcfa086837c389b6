//! The calls of `kip spawn`, `kip procs` and `kip evict`.

use crate::client::{Client, with_query};
use crate::error::CallError;
use kip_types::api::spawn::{EvictRequest, SpawnRequest, SpawnedRequest, SpawnedView};
use kip_types::name::ProcName;

impl Client {
    /// Spawns a proc.
    pub async fn spawn(&self, request: &SpawnRequest) -> Result<SpawnedView, CallError> {
        self.post("/v1/spawned", request).await
    }

    /// All procs by spawn, those included whose ends are kept, sorted by name.
    pub async fn spawned(&self) -> Result<Vec<SpawnedView>, CallError> {
        self.get("/v1/spawned").await
    }

    /// One proc by spawn, at once or when that has come which the request waits for.
    pub async fn wait_spawned(&self, name: &ProcName, request: &SpawnedRequest) -> Result<SpawnedView, CallError> {
        self.get(&with_query(&format!("/v1/spawned/{name}"), request)).await
    }

    /// Has a proc by spawn end.
    pub async fn evict(&self, name: &ProcName, request: &EvictRequest) -> Result<SpawnedView, CallError> {
        self.post(&format!("/v1/spawned/{name}/evict"), request).await
    }
}
