//! Calls that wait for a moment in the life of a spawned proc. They are answered when that comes,
//! out of their order: noted before their frame is taken out of the socket, and until they are
//! answered, so that the next daemon waits on. It may answer one again that was answered.

use super::{Connection, answer, refusal};
use crate::access;
use crate::memory::KeptWait;
use crate::share::MOST_WAITS;
use crate::spawns;
use crate::wire::{AwaitCall, CallKind, FailureCode, RuntimeFailure};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

/// A wait that is not answered.
pub(super) struct CallWait {
    pub(super) kept: KeptWait,
    /// None until its frame is taken out.
    task: Option<JoinHandle<()>>,
    /// Its place among the waits of its proc.
    _room: OwnedSemaphorePermit,
}

impl Connection {
    /// Notes one, which begins with [`Connection::begin_waits`].
    pub(super) async fn wait(&self, id: u64, call: AwaitCall) -> Result<(), RuntimeFailure> {
        access::check(&*self.home, &CallKind::Await(call.clone()))?;
        // One of that number is of the last daemon's, which did not take out its frame.
        self.unwait(id).await;
        let room = Arc::clone(&self.share.waits).try_acquire_owned().map_err(|_| {
            let message = format!("{MOST_WAITS} waits of the proc are not answered, more are not possible");
            RuntimeFailure::new(FailureCode::TooMany, message)
        })?;
        let kept = KeptWait { id, call: Some(call) };
        self.waits.lock().insert(id, CallWait { kept, task: None, _room: room });
        self.note_calls();
        Ok(())
    }

    /// Begins those that are new.
    pub(super) fn begin_waits(self: &Arc<Connection>) {
        let mut waits = self.waits.lock();
        for (id, wait) in waits.iter_mut().filter(|(_, wait)| wait.task.is_none()) {
            let (connection, id, call) = (Arc::clone(self), *id, wait.kept.call.clone().unwrap_or_default());
            wait.task = Some(tokio::spawn(async move { connection.answer_wait(id, call).await }));
        }
    }

    /// Goes on with one of the last daemon's.
    pub(super) fn wait_again(self: &Arc<Connection>, kept: KeptWait) {
        match Arc::clone(&self.share.waits).try_acquire_owned() {
            Ok(room) => drop(self.waits.lock().insert(kept.id, CallWait { kept, task: None, _room: room })),
            Err(_) => tracing::warn!("a wait of the last daemon's is lost: the proc has too many"),
        }
        self.begin_waits();
    }

    async fn answer_wait(&self, id: u64, call: AwaitCall) {
        let done = spawns::wait(&*self.service.spawns, &*self.home, &call).await;
        let frame = done.map_or_else(|failure| refusal(id, failure), |kind| answer(id, kind));
        if self.send(&frame).await.is_ok() {
            self.waits.lock().remove(&id);
            self.note_calls();
        }
    }

    /// Ends one, if it is there.
    pub(super) async fn unwait(&self, id: u64) {
        let Some(wait) = self.waits.lock().remove(&id) else { return };
        if let Some(task) = wait.task {
            task.abort();
            let _ = task.await;
        }
        self.note_calls();
    }

    /// The connection ends.
    pub(super) fn end_waits(&self) {
        let waits = std::mem::take(&mut *self.waits.lock());
        waits.into_values().filter_map(|wait| wait.task).for_each(|task| task.abort());
    }
}
