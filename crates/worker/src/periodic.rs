//! Checkpoints that are taken by themselves, as the spec of a proc says
//! ([`PeriodicCheckpoints`](kip_types::life::PeriodicCheckpoints)), and the oldest of them removed.

use crate::checkpoints::Tag;
use crate::copied::Purpose;
use crate::lineage::key_of;
use crate::worker::Worker;
use kip_engine::blocking::blocking;
use kip_records::state::Record;
use kip_supervisor::task::Handle;
use kip_sys::clock::now_ms;
use kip_types::api::{EventKind, Refusal};
use kip_types::{CheckpointTag, ProcName, State};
use std::collections::BTreeMap;
use std::time::Duration;

/// Between looks at which are due.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Tags of such checkpoints begin with this, and end with a number.
const STEM: &str = "every-";

/// Takes those that are due as long as the daemon lives, one at a time. To be called within a
/// runtime.
pub(crate) fn watch(worker: &Worker) {
    let worker = worker.clone();
    tokio::spawn(async move {
        // When the last one was taken or tried, by the keys of procs, milliseconds since the epoch.
        let mut last: BTreeMap<ProcName, u64> = BTreeMap::new();
        while !worker.machine.is_closing() {
            tokio::time::sleep(LOOK_EVERY).await;
            let handles: Vec<Handle> =
                worker.handles().into_iter().filter(|handle| handle.proc.spec().checkpoints.is_some()).collect();
            last.retain(|key, _| handles.iter().any(|handle| handle.proc.key == *key));
            for handle in handles {
                let before = match last.get(&handle.proc.key) {
                    Some(at) => *at,
                    None => worker.last_taken(&handle).await,
                };
                let taken = worker.take_if_due(&handle, before).await;
                last.insert(handle.proc.key.clone(), taken.unwrap_or(before));
            }
        }
    });
}

impl Worker {
    /// When the last one was taken of a proc, or the proc was started.
    async fn last_taken(&self, handle: &Handle) -> u64 {
        let (worker, proc) = (self.clone(), handle.clone());
        let taken = blocking(move || worker.periodic_of(&proc).into_iter().map(|(at_ms, _)| at_ms).max()).await;
        taken.unwrap_or(0).max(handle.status.borrow().record.started_at_ms)
    }

    /// Takes one if it is time, `before` being when the last was taken. Returns when it was taken
    /// or tried; none if it is not time.
    async fn take_if_due(&self, handle: &Handle, before: u64) -> Option<u64> {
        let spec = handle.proc.spec();
        let periodic = spec.checkpoints?;
        let is_due = now_ms().saturating_sub(before) >= periodic.every_ms;
        if !is_due || !has_changed(&handle.status.borrow().record, before) {
            return None;
        }
        let taken = async {
            let _begun = self.begin_on(handle, &spec.name).await?;
            self.keep(handle, Tag::Numbered(STEM.to_owned()), Purpose::Checkpoint).await
        };
        let at_ms = match taken.await {
            Ok((view, _)) => view.taken_at_ms,
            Err(refusal) => {
                if !handle.inbox.is_closed() {
                    let detail = format!("not by itself: {}", refusal.message);
                    self.machine.events.emit(Some(&spec.name), EventKind::Checkpointed, detail);
                }
                now_ms()
            }
        };
        let (worker, proc) = (self.clone(), handle.clone());
        let mut known = blocking(move || worker.periodic_of(&proc)).await;
        known.sort();
        let too_many = known.len().saturating_sub(periodic.keep as usize);
        for (_, tag) in known.into_iter().take(too_many) {
            if let Err(Refusal { message, .. }) = self.checkpoint_removed(spec.name.clone(), tag).await {
                tracing::info!(proc = %spec.name, error = message, "an old checkpoint stays for now");
            }
        }
        Some(at_ms)
    }

    /// When each was taken, milliseconds since the epoch, and its tag.
    fn periodic_of(&self, handle: &Handle) -> Vec<(u64, CheckpointTag)> {
        let (key, checkpoints) = (key_of(&handle.proc), self.checkpoint_store());
        let is_one = |tag: &CheckpointTag| {
            tag.as_str().strip_prefix(STEM).is_some_and(|number| number.bytes().all(|b| b.is_ascii_digit()))
        };
        let tags = checkpoints.tags(&key).unwrap_or_default().into_iter().filter(is_one);
        tags.filter_map(|tag| Some((checkpoints.note(&key, &tag).ok()?.taken_at_ms, tag))).collect()
    }
}

/// Whether a proc has run since that moment.
fn has_changed(record: &Record, since_ms: u64) -> bool {
    match record.state {
        State::Hot { .. } | State::Hibernated { .. } => true,
        State::Parked { .. } => record.last_sleep.as_ref().is_some_and(|sleep| sleep.at_ms > since_ms),
        // Of one that is archived nothing is here, and one that is stopped does not change.
        _ => false,
    }
}
