//! The last hour of all procs, sampled as long as the daemon lives.

use crate::worker::Worker;
use kip_engine::blocking::blocking;
use kip_insight::history::{EVERY, sample};
use kip_supervisor::task::Handle;
use kip_types::api::HistoryView;
use std::sync::Arc;

/// Samples until the worker is gone.
pub(crate) fn watch(worker: &Worker) {
    let (procs, history) = (Arc::downgrade(&worker.procs), Arc::downgrade(&worker.history));
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(EVERY).await;
            let (Some(procs), Some(history)) = (procs.upgrade(), history.upgrade()) else { return };
            let handles: Vec<Handle> = procs.lock().values().cloned().collect();
            history.keep(blocking(move || sample(&handles)).await);
        }
    });
}

/// The last hour, and this moment. Inspects no proc.
pub(crate) async fn history(worker: &Worker) -> HistoryView {
    let handles = worker.handles();
    let now = blocking(move || sample(&handles)).await;
    HistoryView { every_ms: EVERY.as_millis() as u64, samples: worker.history.with(now) }
}
