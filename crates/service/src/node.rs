//! The daemon of a data directory, and all of its procs at once.

use crate::Feed;
use async_trait::async_trait;
use kip_types::api::{DownRequest, DownView, Event, EventsRequest, HistoryView, Info, Refusal};
use kip_types::backup::{BackupProgress, BackupRequest};

/// The daemon itself.
#[async_trait]
pub trait NodeService: Send + Sync + 'static {
    /// About this daemon.
    async fn info(&self) -> Result<Info, Refusal>;

    /// How procs were spread over the tiers in the last hour, and are at this moment. Wakes no
    /// proc.
    async fn history(&self) -> Result<HistoryView, Refusal>;

    /// Metrics, in Prometheus' text format. Wakes and inspects no proc.
    async fn metrics(&self) -> Result<String, Refusal>;

    /// What happened, oldest first; those that are kept and, with `follow`, all that come.
    async fn events(&self, which: EventsRequest) -> Result<Feed<Event>, Refusal>;

    /// Writes all that the data directory keeps into a file. The last item is
    /// [`BackupProgress::End`] or an error; the backup ends when the feed is dropped.
    async fn backup(&self, request: BackupRequest) -> Result<Feed<BackupProgress>, Refusal>;

    /// Ends all procs, sleeping ones included, and what is kept running for them: nothing of the
    /// data directory is left on the machine but its files. Or parks them and keeps what they need
    /// to come back. After `Ok` the API ends.
    async fn down(&self, how: DownRequest) -> Result<DownView, Refusal>;
}
