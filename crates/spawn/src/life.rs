//! One spawned proc, from the queue to the end that is kept.

use crate::entry::{Eviction, SpawnEntry, Stage};
use crate::host::HostedProc;
use crate::spawner::{GRACE_MS, SpawnedProc, Spawner};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::spawn::{SpawnEnd, SpawnEndKind};
use kip_types::api::{Code, Refusal, RunRequest};
use kip_types::chain;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;

/// What failed is tried again after this.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How a start came out.
enum Started {
    /// Its program was executed.
    Live(Arc<dyn HostedProc>),
    /// It will not be.
    Never(SpawnEnd),
    /// There is no room now.
    NoRoom(String),
}

/// What keeps it from its turn in the queue.
enum Turn {
    Mine(OwnedSemaphorePermit),
    Over(SpawnEnd),
}

fn never(entry: &SpawnEntry, message: impl Into<String>) -> SpawnEnd {
    let (why, message) = match &entry.evicted {
        Some(eviction) => (SpawnEndKind::Evicted, format!("{}, before it was started", eviction.reason)),
        None => (SpawnEndKind::NeverStarted, message.into()),
    };
    entry.end_without(why, message, now_ms())
}

impl Spawner {
    /// Goes on with one of the last daemon's.
    pub(crate) async fn take_up(self, proc: Arc<SpawnedProc>) {
        let entry = proc.entry();
        match (&entry.stage, self.0.host.proc(&entry.name)) {
            (Stage::Ended { .. }, there) => self.remove(there).await,
            (Stage::Queued { .. }, _) => self.live(proc, None).await,
            (Stage::Begun { .. }, Some(there)) => {
                let end = self.follow(&proc, there).await;
                self.end(&proc, end).await;
            }
            (Stage::Begun { .. }, None) => {
                let message = "the daemon was ended while it started the program, which may have run for a moment";
                let end = match &entry.evicted {
                    Some(eviction) => entry.end_without(SpawnEndKind::Evicted, eviction.reason.clone(), now_ms()),
                    None => entry.end_without(SpawnEndKind::Lost, message.to_owned(), now_ms()),
                };
                self.end(&proc, end).await;
            }
        }
    }

    /// Has it run to its end. With leave it is begun.
    pub(crate) async fn live(self, proc: Arc<SpawnedProc>, mut leave: Option<OwnedSemaphorePermit>) {
        let end = loop {
            let turn = match leave.take() {
                Some(leave) => leave,
                None => match self.turn(&proc).await {
                    Turn::Mine(leave) => leave,
                    Turn::Over(end) => break end,
                },
            };
            let started = self.start(&proc).await;
            drop(turn);
            match started {
                Started::Live(there) => break self.follow(&proc, there).await,
                Started::Never(end) => break end,
                Started::NoRoom(why) => {
                    let entry = proc.entry();
                    self.requeue(&proc).await;
                    self.0.books.give_back(entry.reserved);
                    proc.now.send_modify(|now| now.waits_for = Some(why));
                    let mut freed = self.0.freed.subscribe();
                    let _ = tokio::time::timeout(AGAIN_AFTER, freed.changed()).await;
                }
            }
        };
        self.end(&proc, end).await;
    }

    /// Waits for its turn in the queue, and records that it is begun.
    async fn turn(&self, proc: &SpawnedProc) -> Turn {
        let mine = async {
            loop {
                let mut freed = self.0.freed.subscribe();
                let leave = Arc::clone(&self.0.starts).acquire_owned().await.expect("it is never closed");
                let wanted = proc.now.borrow().entry.reserved;
                match self.0.books.take(self.0.host.room(), wanted) {
                    Ok(()) => return leave,
                    Err(why) => proc.now.send_modify(|now| now.waits_for = Some(why)),
                }
                drop(leave);
                let _ = freed.changed().await;
            }
        };
        let leave = tokio::select! {
            end = self.over(proc) => return Turn::Over(end),
            leave = mine => leave,
        };
        let begin = |entry: &SpawnEntry| match &entry.stage {
            Stage::Queued { run } => Some(SpawnEntry { stage: Stage::Begun { run: run.clone() }, ..entry.clone() }),
            _ => None,
        };
        self.until_done("it is begun", || self.change(proc, begin, &[])).await;
        Turn::Mine(leave)
    }

    /// Its end, if it is not to be started any more.
    async fn over(&self, proc: &SpawnedProc) -> SpawnEnd {
        let evicted = async {
            let _ = proc.now.subscribe().wait_for(|now| now.entry.evicted.is_some()).await;
        };
        tokio::select! {
            () = evicted => never(&proc.entry(), ""),
            () = self.orphaned(proc) => {
                let entry = proc.entry();
                let parent = entry.parent.as_ref().map_or("", |parent| parent.name.as_str());
                never(&entry, format!("its parent {parent} ended before it was started"))
            }
        }
    }

    async fn requeue(&self, proc: &SpawnedProc) {
        let again = |entry: &SpawnEntry| match &entry.stage {
            Stage::Begun { run } => Some(SpawnEntry { stage: Stage::Queued { run: run.clone() }, ..entry.clone() }),
            _ => None,
        };
        self.until_done("it waits again", || self.change(proc, again, &[])).await;
    }

    async fn start(&self, proc: &SpawnedProc) -> Started {
        let entry = proc.entry();
        let Stage::Begun { run } = &entry.stage else { unreachable!("it has leave") };
        fault::reach("spawn-begun");
        let started = self.0.host.start(RunRequest::clone(run)).await;
        fault::reach("spawn-started");
        match started {
            Ok(()) => match self.0.host.proc(&entry.name) {
                Some(there) => Started::Live(there),
                // It has ended and was removed already.
                None => Started::Never(entry.end_by(None, now_ms())),
            },
            Err(Refusal { code: Code::Exhausted | Code::State, message, .. }) => Started::NoRoom(message),
            Err(refusal) => Started::Never(never(&entry, refusal.to_string())),
        }
    }

    /// Waits until the program of its parent is gone; for ever if it does not end with that.
    async fn orphaned(&self, proc: &SpawnedProc) {
        let entry = proc.entry();
        let Some(parent) = entry.parent.filter(|_| !entry.detached) else { return std::future::pending().await };
        if let Some(there) = self.0.host.proc(&parent.key) {
            there.program_gone(parent.started_at_ms).await;
        }
    }

    /// Waits until a proc that runs or sleeps has ended; ends it when it is evicted or its parent
    /// has ended.
    async fn follow(&self, proc: &Arc<SpawnedProc>, there: Arc<dyn HostedProc>) -> SpawnEnd {
        proc.now.send_modify(|now| (now.is_live, now.waits_for) = (true, None));
        let orphaned = async {
            self.orphaned(proc).await;
            let parent = proc.entry().parent.map(|parent| parent.name.to_string()).unwrap_or_default();
            let eviction = Eviction { reason: format!("its parent {parent} has ended"), grace_ms: GRACE_MS };
            self.until_done("it is to end", || self.evict_for(proc, eviction.clone())).await;
            std::future::pending().await
        };
        let evicted = async {
            let mut now = proc.now.subscribe();
            let grace_ms = match now.wait_for(|now| now.entry.evicted.is_some()).await {
                Ok(now) => now.entry.evicted.as_ref().map_or(GRACE_MS, |eviction| eviction.grace_ms),
                Err(_) => GRACE_MS,
            };
            if proc.now.borrow().entry.takes_word {
                // The word has gone out.
                tokio::time::sleep(Duration::from_millis(grace_ms)).await;
                self.until_stopped(&*there, 0).await;
            } else {
                self.until_stopped(&*there, grace_ms).await;
            }
            std::future::pending().await
        };
        let ended = tokio::select! {
            ended = there.program_ended() => ended,
            () = orphaned => unreachable!("it waits for the end"),
            () = evicted => unreachable!("it waits for the end"),
        };
        proc.entry().end_by(ended, now_ms())
    }

    async fn until_stopped(&self, there: &dyn HostedProc, grace_ms: u64) {
        while let Err(refusal) = there.stop(grace_ms).await {
            tracing::info!(proc = %there.key(), error = refusal.message, "an evicted proc is not ended yet");
            tokio::time::sleep(AGAIN_AFTER).await;
        }
    }

    /// Keeps the end of a proc, by which those that wait are answered, and removes the proc.
    async fn end(&self, proc: &SpawnedProc, end: SpawnEnd) {
        let entry = proc.entry();
        let forgotten = self.to_forget();
        fault::reach("spawn-ended");
        let how = |entry: &SpawnEntry| Some(entry.ended(end.clone()));
        self.until_done("it has ended", || self.change(proc, how, &forgotten)).await;
        self.forget(&forgotten);
        fault::reach("spawn-end-kept");
        if let Stage::Begun { .. } = entry.stage {
            self.0.books.give_back(entry.reserved);
        }
        self.remove(self.0.host.proc(&entry.name)).await;
        self.0.freed.send_modify(|count| *count += 1);
    }

    async fn remove(&self, there: Option<Arc<dyn HostedProc>>) {
        let Some(there) = there else { return };
        loop {
            match there.remove().await {
                Ok(()) | Err(Refusal { code: Code::Unknown, .. }) => return,
                Err(refusal) => {
                    tracing::info!(proc = %there.key(), error = refusal.message, "a spawned proc that has ended is not removed yet");
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        }
    }

    /// Does it until it is done: it has to be on disk before a client hears of it.
    async fn until_done<E: std::error::Error, F: Future<Output = Result<(), E>>>(
        &self,
        what: &str,
        act: impl Fn() -> F,
    ) {
        let mut is_told = false;
        while let Err(error) = act().await {
            if !std::mem::replace(&mut is_told, true) {
                tracing::error!(
                    error = chain(&error),
                    what,
                    "a spawned proc is not recorded, which is tried until it is"
                );
            }
            tokio::time::sleep(AGAIN_AFTER).await;
        }
    }
}
