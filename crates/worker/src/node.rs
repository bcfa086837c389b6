//! The daemon of a data directory, and all of its procs at once: what it is, what it counts, what
//! happened, its end.

use crate::backup;
use crate::lately;
use crate::scrape::{Moment, Process};
use crate::worker::{Worker, grace_of};
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::stop::{self, NetworkFate};
use kip_insight::view;
use kip_net::Slot;
use kip_service::{Feed, NodeService, feed};
use kip_supervisor::task::{Handle, TaskCommand};
use kip_types::api::{
    CacheView, DownRequest, DownView, Event, EventKind, EventsRequest, HistoryView, Info, PARK_WITHIN_MS, Refusal,
};
use kip_types::backup::{BackupProgress, BackupRequest};
use kip_types::{ProcName, State};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{broadcast, mpsc};

/// How many procs end at the same time when all do. Most of that time each waits: for its program,
/// for a disk, for the kernel.
const ENDING_AT_ONCE: usize = 16;
/// The same for parked ones, which are rebuilt for it.
const WAKING_AT_ONCE: usize = 4;

#[async_trait]
impl NodeService for Worker {
    async fn info(&self) -> Result<Info, Refusal> {
        let machine = Arc::clone(&self.machine);
        let pager_pid = blocking(move || machine.pager.known_pid().unwrap_or(0)).await;
        let machine = &self.machine;
        let cached = machine.archive.as_ref().and_then(|archive| archive.cached());
        Ok(Info {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            data: machine.data.display().to_string(),
            pid: std::process::id(),
            worker: machine.name.clone(),
            keeper_pid: machine.keeper.pid(),
            pager_pid,
            wakes_last_minute: machine.events.per_minute(&EventKind::Woken, kip_sys::clock::now_ms()),
            room: Some(machine.pressure.view()),
            cache: cached.map(|(bytes, limit_bytes)| CacheView { bytes, limit_bytes }),
        })
    }

    async fn history(&self) -> Result<HistoryView, Refusal> {
        Ok(lately::history(self).await)
    }

    async fn metrics(&self) -> Result<String, Refusal> {
        let handles = self.handles();
        let machine = Arc::clone(&self.machine);
        let text = blocking(move || {
            let archive = machine.archive.as_ref();
            let moment = Moment {
                procs: handles.iter().map(view::proc_now).collect(),
                room: Some(machine.pressure.view()),
                wanted_bytes: machine.pressure.wanted_bytes(),
                cache: archive.and_then(|archive| archive.cache_use()),
                store: archive.map(|archive| archive.store_use()),
                refused: machine.pressure.refused(),
                process: Process::read(),
            };
            machine.metrics.text(moment)
        });
        Ok(text.await)
    }

    async fn events(&self, which: EventsRequest) -> Result<Feed<Event>, Refusal> {
        let (out, feed) = feed();
        tokio::spawn(send_events(self.clone(), which, out));
        Ok(feed)
    }

    async fn backup(&self, request: BackupRequest) -> Result<Feed<BackupProgress>, Refusal> {
        let (out, feed) = feed();
        backup::begin(self.clone(), request, out);
        Ok(feed)
    }

    async fn down(&self, how: DownRequest) -> Result<DownView, Refusal> {
        if how.park {
            let within = Duration::from_millis(how.within_ms.unwrap_or(PARK_WITHIN_MS));
            let (asleep, awake) = self.come_to_rest(within).await;
            self.close().await;
            return Ok(DownView { ended: Vec::new(), asleep, awake });
        }
        Ok(DownView { ended: self.end().await?, ..DownView::default() })
    }
}

/// Sends events: those that are kept and, with `follow`, those that come, as long as they are
/// received.
async fn send_events(worker: Worker, which: EventsRequest, out: mpsc::Sender<Result<Event, Refusal>>) {
    let mut seen = which.since.unwrap_or(0);
    // Again whenever its reader is so slow that live ones were dropped: they are kept for longer
    // than that.
    loop {
        let (kept, mut live) = worker.machine.events.subscribe(seen);
        for event in kept {
            seen = event.id;
            if out.send(Ok(event)).await.is_err() {
                return;
            }
        }
        if !which.follow {
            return;
        }
        loop {
            let next = tokio::select! {
                next = live.recv() => next,
                () = out.closed() => return,
            };
            match next {
                Ok(event) => {
                    seen = event.id;
                    if out.send(Ok(event)).await.is_err() {
                        return;
                    }
                }
                Err(broadcast::error::RecvError::Lagged(_)) => break,
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }
}

impl Worker {
    /// Ends every proc and everything that is kept running for them: nothing of this data directory
    /// is left on the machine but its files. Returns the names of those that were running or
    /// asleep.
    async fn end(&self) -> Result<Vec<ProcName>, Refusal> {
        self.ending.store(true, Ordering::SeqCst);
        let ended = self.end_everything().await;
        // Those that run on are looked after as before.
        self.ending.store(ended.is_ok(), Ordering::SeqCst);
        ended
    }

    async fn end_everything(&self) -> Result<Vec<ProcName>, Refusal> {
        let handles = self.handles();
        // Each is looked at once: one that wakes or falls asleep meanwhile is in one of the two all
        // the same.
        let (mut up, mut parked) = (Vec::new(), Vec::new());
        for handle in handles {
            let state = handle.status.borrow().record.state.clone();
            match state {
                State::Stopped { .. } | State::Elsewhere { .. } => {}
                // Last: to end in order they need the room that the others leave.
                State::Parked { .. } | State::Archived { .. } => parked.push(handle),
                _ => up.push(handle),
            }
        }
        let names: Vec<ProcName> = up.iter().chain(&parked).map(|h| h.proc.name.clone()).collect();
        let slots: Vec<Slot> = up.iter().chain(&parked).map(|h| h.proc.slot).collect();
        let mut ended = end_all(up, ENDING_AT_ONCE).await;
        if ended.is_ok() {
            ended = end_all(parked, WAKING_AT_ONCE).await;
        }
        if let Err(refusal) = ended {
            // Those that run on keep theirs.
            let stopped = |slot: &Slot| self.registry.is_stopped(*slot);
            let slots: Vec<Slot> = slots.into_iter().filter(stopped).collect();
            let machine = Arc::clone(&self.machine);
            blocking(move || stop::remove_networks(&machine, &slots)).await?;
            return Err(refusal);
        }
        let machine = Arc::clone(&self.machine);
        let dismantled = move || {
            machine.dismantle()?;
            machine.events.close();
            Ok::<(), Refusal>(())
        };
        blocking(dismantled).await?;
        Ok(names)
    }
}

/// Ends all of them, so many at the same time. Those that had begun are waited for when one cannot
/// be ended.
async fn end_all(handles: Vec<Handle>, at_once: usize) -> Result<(), Refusal> {
    let mut waiting = handles.into_iter();
    let mut ending = tokio::task::JoinSet::new();
    let mut all = Ok(());
    loop {
        while all.is_ok()
            && ending.len() < at_once
            && let Some(handle) = waiting.next()
        {
            let grace = grace_of(&handle);
            let stop = move |reply| TaskCommand::Stop { grace, network: NetworkFate::Left, reply };
            ending.spawn(async move { handle.ask(stop).await });
        }
        let Some(ended) = ending.join_next().await else { return all };
        all = all.and(ended.expect("stopping does not panic"));
    }
}
