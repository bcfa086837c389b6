//! Scaling.

use async_trait::async_trait;
use kip_types::ProcName;
use kip_types::api::Refusal;
use kip_types::api::scale::ScaleView;

/// Procs behind one name. How many there may be is in the spec, which
/// [`ProcService::update`](crate::ProcService::update) changes.
#[async_trait]
pub trait ScaleService: Send + Sync + 'static {
    /// How a proc is scaled, and its replicas. Wakes none.
    async fn scale(&self, name: ProcName) -> Result<ScaleView, Refusal>;
}
