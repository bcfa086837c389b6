//! Ends of programs under exec, between the launcher, which tells of them, and the clients that
//! wait for them.

use kip_sandbox::launcher::{ExecEnded, ExecId};
use kip_types::lifecycle::Exit;
use parking_lot::Mutex;
use std::collections::HashMap;
use tokio::sync::oneshot;

/// Ends of programs that a client waits for, or that came before a client waited.
#[derive(Debug, Default)]
pub struct Ends {
    inner: Mutex<EndsInner>,
}

#[derive(Debug, Default)]
struct EndsInner {
    waiting: HashMap<ExecId, oneshot::Sender<Exit>>,
    early: HashMap<ExecId, Exit>,
}

impl Ends {
    /// The launcher has reported an end.
    pub fn notify(&self, ended: ExecEnded) {
        let mut inner = self.inner.lock();
        match inner.waiting.remove(&ended.id) {
            Some(waiting) => drop(waiting.send(ended.exit)),
            None => drop(inner.early.insert(ended.id, ended.exit)),
        }
    }

    /// The launcher died: no client will be told of the ends of its programs any more.
    pub fn forget(&self) {
        let mut inner = self.inner.lock();
        inner.waiting.clear();
        inner.early.clear();
    }

    /// The end of that program, when it comes.
    pub fn wait(&self, id: ExecId) -> oneshot::Receiver<Exit> {
        let (sender, receiver) = oneshot::channel();
        let mut inner = self.inner.lock();
        match inner.early.remove(&id) {
            Some(exit) => drop(sender.send(exit)),
            None => drop(inner.waiting.insert(id, sender)),
        }
        receiver
    }
}
