//! Collection of the store by itself, as long as the daemon lives.

use kip_engine::host::Host;
use kip_offload::collect::{CollectError, summary};
use kip_types::api::{CollectRequest, EventKind};
use kip_types::chain;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

/// Collects now and then as long as the daemon lives. To be called within a runtime.
pub(crate) fn collect_by_itself(machine: &Arc<Host>, every_ms: u64) {
    let Some(archive) = machine.archive.clone() else { return };
    let machine = Arc::downgrade(machine);
    tokio::spawn(async move {
        loop {
            let spread = RandomState::new().build_hasher().finish() % (every_ms / 2).max(1);
            tokio::time::sleep(Duration::from_millis(every_ms - every_ms / 4 + spread)).await;
            let collected = archive.collect(&CollectRequest::default(), kip_sys::clock::now_ms).await;
            let Some(machine) = machine.upgrade() else { return };
            match collected {
                Ok(view) if view.deleted.is_empty() => {}
                Ok(view) => machine.events.emit(None, EventKind::Collected, summary(&view)),
                // Another collection is under way: that is all that was wanted.
                Err(CollectError::UnderWay | CollectError::Busy(_) | CollectError::Overtaken) => {}
                Err(_) if machine.is_closing() => {}
                Err(e) => tracing::warn!(error = chain(&e), "the store is not collected"),
            }
        }
    });
}
