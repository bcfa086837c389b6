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

/// What programs in procs ask about spawned procs, in addition. A proc is named by its key, the
/// name that it had when it was made.
#[async_trait]
pub trait SpawnPrograms: SpawnService {
    /// Spawns a child of a proc. As many as its owner allows is `Code::Exhausted`.
    async fn spawn_child(&self, parent: ProcName, request: SpawnRequest) -> Result<SpawnedView, Refusal>;

    /// Has a proc end that this one, or one of the same family, has spawned.
    ///
    /// # Errors
    /// `Code::Unknown`: there is none of that name, or it is of another family.
    async fn evict_child(&self, of: ProcName, name: ProcName, request: EvictRequest) -> Result<SpawnedView, Refusal>;

    /// A program says that it has started. A proc that was not spawned is `Code::Unknown`.
    async fn say_started(&self, key: ProcName) -> Result<(), Refusal>;

    /// A program says the status with which it is about to end, and a line about it.
    async fn say_exited(&self, key: ProcName, status: i32, message: Option<String>) -> Result<(), Refusal>;

    /// A program waits for the word to end, from now on in place of a signal; until that has come.
    async fn wait_own_evict(&self, key: ProcName) -> Result<SpawnedView, Refusal>;
}
