//! Checkpoints that are taken by themselves, as the spec of a proc says
//! ([`PeriodicCheckpoints`](kip_types::life::PeriodicCheckpoints)), and the oldest of them removed.

use crate::checkpoints::Tag;
use crate::copied::{Purpose, check_kept};
use crate::lineage::key_of;
use crate::worker::Worker;
use kip_engine::blocking::blocking;
use kip_supervisor::task::{Handle, ProcStatus};
use kip_sys::clock::now_ms;
use kip_types::api::EventKind;
use kip_types::life::PeriodicCheckpoints;
use kip_types::{CheckpointTag, ProcName, State, chain};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Between looks at which are due.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Tags of such checkpoints begin with this, and end with a number that grows.
const STEM: &str = "every-";

/// What is known of a proc's.
#[derive(Debug, Clone, Default)]
struct Last {
    /// When the last one was there, milliseconds since the epoch; at first, when the proc was
    /// started.
    taken_ms: u64,
    /// When one was last tried.
    tried_ms: u64,
    /// Why that failed.
    refused: Option<String>,
}

/// Takes those that are due as long as the daemon lives, one at a time. To be called within a
/// runtime.
pub(crate) fn watch(worker: &Worker) {
    let worker = worker.clone();
    tokio::spawn(async move {
        let mut last: BTreeMap<ProcName, Last> = BTreeMap::new();
        while !worker.machine.is_closing() {
            tokio::time::sleep(LOOK_EVERY).await;
            // One that is about to take the place of another has no checkpoints yet.
            let has = |handle: &Handle| {
                let spec = handle.proc.spec();
                spec.checkpoints.filter(|_| !spec.trial).map(|periodic| (handle.clone(), periodic))
            };
            let handles: Vec<_> = worker.handles().iter().filter_map(has).collect();
            last.retain(|key, _| handles.iter().any(|(handle, _)| handle.proc.key == *key));
            for (handle, periodic) in handles {
                let key = handle.proc.key.clone();
                let mut known = match last.remove(&key) {
                    Some(known) => known,
                    None => Last { taken_ms: worker.last_taken(&handle).await, ..Last::default() },
                };
                worker.take_if_due(&handle, periodic, &mut known).await;
                last.insert(key, known);
            }
        }
    });
}

impl Worker {
    /// When the last one was taken of a proc, or the proc was started.
    async fn last_taken(&self, handle: &Handle) -> u64 {
        let (worker, proc) = (self.clone(), handle.clone());
        let taken = blocking(move || worker.periodic_of(&proc).into_iter().map(|one| one.taken_at_ms).max()).await;
        taken.unwrap_or(0).max(handle.status.borrow().record.started_at_ms)
    }

    async fn take_if_due(&self, handle: &Handle, periodic: PeriodicCheckpoints, last: &mut Last) {
        let spec = handle.proc.spec();
        let is_due = now_ms().saturating_sub(last.taken_ms.max(last.tried_ms)) >= periodic.every_ms;
        if !is_due || !has_changed(&handle.status.borrow(), last.taken_ms) {
            return;
        }
        let (worker, proc) = (self.clone(), handle.clone());
        let known = blocking(move || worker.periodic_of(&proc)).await;
        let number = known.iter().map(|one| one.number).max().unwrap_or(0) + 1;
        let tag: CheckpointTag = format!("{STEM}{number}").parse().expect("a word and a number are a tag");
        let taken = async {
            check_kept(&spec, Purpose::Checkpoint)?;
            let _begun = self.begin_on(handle, &spec.name).await?;
            self.keep(handle, Tag::Wanted(tag), Purpose::Checkpoint).await
        };
        last.tried_ms = now_ms();
        match taken.await {
            Ok(_) => {
                // A wake that belongs to it is no change.
                *last = Last { taken_ms: now_ms(), ..Last::default() };
                self.remove_oldest(handle, periodic.keep as usize).await;
            }
            Err(refusal) => {
                let refused = Some(refusal.message);
                if !handle.inbox.is_closed() && last.refused != refused {
                    let detail = format!("not by itself: {}", refused.as_deref().unwrap_or_default());
                    self.machine.events.emit(Some(&spec.name), EventKind::Checkpointed, detail);
                }
                last.refused = refused;
            }
        }
    }

    /// Removes those that are more than are kept, unless one of them may be read just now: then the
    /// next time.
    async fn remove_oldest(&self, handle: &Handle, kept: usize) {
        let Ok(alone) = Arc::clone(&handle.begun).try_write_owned() else { return };
        let (worker, proc) = (self.clone(), handle.clone());
        blocking(move || {
            let mut known = worker.periodic_of(&proc);
            known.sort_by_key(|one| one.number);
            let records = worker.checkpoint_store().of(&key_of(&proc.proc));
            for one in known.iter().rev().skip(kept) {
                let removed = records.remove(&one.tag.clone().into()).and_then(|trash| trash.delete());
                if let Err(e) = removed {
                    tracing::info!(proc = %proc.proc.name, tag = %one.tag, error = chain(&e), "an old checkpoint stays for now");
                }
            }
            drop(alone);
        })
        .await;
    }

    fn periodic_of(&self, handle: &Handle) -> Vec<Periodic> {
        let (key, checkpoints) = (key_of(&handle.proc), self.checkpoint_store());
        let read = |tag: CheckpointTag| {
            let number = tag.as_str().strip_prefix(STEM)?.parse().ok()?;
            Some(Periodic { taken_at_ms: checkpoints.note(&key, &tag).ok()?.taken_at_ms, number, tag })
        };
        checkpoints.tags(&key).unwrap_or_default().into_iter().filter_map(read).collect()
    }
}

/// One that is there.
struct Periodic {
    taken_at_ms: u64,
    number: u64,
    tag: CheckpointTag,
}

/// Whether a proc has done anything since that moment, as far as it counts for its sleeps.
fn has_changed(status: &ProcStatus, since_ms: u64) -> bool {
    let record = &status.record;
    let slept_since = record.last_sleep.as_ref().is_some_and(|sleep| sleep.at_ms > since_ms);
    match record.state {
        State::Hot { .. } => {
            let quiet_ms = status.quiet_since.map_or(0, |since| since.elapsed().as_millis() as u64);
            now_ms().saturating_sub(quiet_ms) > since_ms
        }
        State::Hibernated { .. } | State::Parked { .. } => slept_since,
        // Of one that is archived nothing is here, and one that is stopped does not change.
        _ => false,
    }
}
