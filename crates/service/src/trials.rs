//! What a run would come to.

use async_trait::async_trait;
use kip_types::api::{CheckRequest, CheckView, ContentsView, Refusal, RunRequest};
use kip_types::name::ProcName;

/// Requests that are tried, and leave nothing.
#[async_trait]
pub trait TrialService: Send + Sync + 'static {
    /// Tries whether such a proc sleeps in every tier down to the one that is asked for, and is as
    /// before when it wakes, with a trial that is gone when this returns. The request is complete,
    /// and may write to its volumes.
    ///
    /// # Errors
    /// What has nothing to do with sleep: no name, no room, a volume that others have. What stands
    /// in the way of a start or a sleep is in the view.
    async fn check(&self, request: CheckRequest) -> Result<CheckView, Refusal>;

    /// Refuses what [`crate::ProcService::run`] would refuse, as far as that can be known without
    /// running the program. A proc of that name, and those of `instead_of`, are taken for gone by
    /// then.
    ///
    /// # Errors
    /// The first reason why it could not be started.
    async fn validate(&self, request: RunRequest, instead_of: Vec<ProcName>) -> Result<(), Refusal>;

    /// Reports whether the tarball or secrets of the proc of that name differ from the request.
    /// Wakes no proc.
    ///
    /// # Errors
    /// There is no such proc, or the tarball cannot be read.
    async fn compare(&self, request: RunRequest) -> Result<ContentsView, Refusal>;
}
