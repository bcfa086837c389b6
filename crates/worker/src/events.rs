//! What happened, for `kip events`: a ring of the newest and a channel for who follows.

use kip_types::ProcName;
use kip_types::api::Event;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::broadcast;

/// Events that are kept for later readers.
const KEPT: usize = 4096;

/// Milliseconds since the epoch.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// The machine's events.
#[derive(Debug)]
pub(crate) struct Events {
    kept: Mutex<VecDeque<Event>>,
    live: broadcast::Sender<Event>,
}

impl Events {
    pub(crate) fn new() -> Events {
        Events { kept: Mutex::new(VecDeque::new()), live: broadcast::Sender::new(1024) }
    }

    /// Tells everybody. `kind` is one of the words in [`Event::kind`].
    pub(crate) fn tell(&self, name: Option<&ProcName>, kind: &str, detail: impl Into<String>) {
        let event = Event { at_ms: now_ms(), name: name.cloned(), kind: kind.to_owned(), detail: detail.into() };
        tracing::info!(name = name.map(ProcName::as_str), kind, detail = event.detail, "event");
        let mut kept = self.kept.lock().expect("no holder of this lock panics");
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(event.clone());
        // Sent under the lock, so that `subscribe` neither misses nor repeats one.
        let _ = self.live.send(event);
    }

    /// Those that are kept, and a receiver of all that follow.
    pub(crate) fn subscribe(&self) -> (Vec<Event>, broadcast::Receiver<Event>) {
        let kept = self.kept.lock().expect("no holder of this lock panics");
        (kept.iter().cloned().collect(), self.live.subscribe())
    }
}
