//! Procs by spawn: started once, waited for by name.

use async_trait::async_trait;
use kip_types::api::Refusal;
use kip_types::api::spawn::{EvictRequest, SpawnMoment, SpawnRequest, SpawnedView};
use kip_types::name::ProcName;

/// Procs that clients and programs spawn. A name that is not known, or whose end is kept no more,
/// is `Code::Unknown`.
#[async_trait]
pub trait SpawnService: Send + Sync + 'static {
    /// Spawns a proc; it is on disk when this is answered, and starts by itself. Too many of them,
    /// or more than this machine could ever reserve, is `Code::Exhausted`.
    async fn spawn(&self, request: SpawnRequest) -> Result<SpawnedView, Refusal>;

    /// All of them, the ends that are kept included, sorted by name.
    async fn spawned(&self) -> Result<Vec<SpawnedView>, Refusal>;

    /// One of them, as it is now.
    async fn spawned_one(&self, name: ProcName) -> Result<SpawnedView, Refusal>;

    /// One of them, once that moment has come.
    async fn wait_spawned(&self, name: ProcName, moment: SpawnMoment) -> Result<SpawnedView, Refusal>;

    /// Has one end. That it is to is on disk when this is answered. One that has ended is answered
    /// as it is.
    async fn evict(&self, name: ProcName, request: EvictRequest) -> Result<SpawnedView, Refusal>;
}
