//! The last hour of all procs, sampled as long as the daemon lives.

use crate::history::{EVERY, sample};
use crate::worker::Worker;
use kip_engine::blocking::blocking;
use kip_types::api::HistoryView;
use std::sync::Arc;

/// Samples until the worker is gone.
pub(crate) fn watch(worker: &Arc<Worker>) {
    let worker = Arc::downgrade(worker);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(EVERY).await;
            let Some(worker) = worker.upgrade() else { return };
            let handles = worker.handles();
            let sample = blocking(move || sample(&handles)).await;
            worker.history.keep(sample);
        }
    });
}

impl Worker {
    /// The last hour, and this moment. Inspects no proc.
    pub async fn history(&self) -> HistoryView {
        let handles = self.handles();
        let now = blocking(move || sample(&handles)).await;
        HistoryView { every_ms: EVERY.as_millis() as u64, samples: self.history.with(now) }
    }
}
