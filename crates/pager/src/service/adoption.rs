//! Takes up what a pager that has died had out: before a client can ask for anything, else a proc
//! of which something is out would be taken for one that has all its memory.

use super::custody::{held_prefix, owner};
use super::refused::{OrderError, line};
use super::{Entry, Service, Slot, clear};
use crate::memory::SpaceId;
use crate::proc::PagedProc;
use crate::set::Predictor;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

impl Service {
    /// Waits until nothing is under way, and lets nothing begin any more: a pager that dies while
    /// it takes memory out costs a program.
    pub(super) fn come_to_rest(&self) {
        let mut still = Vec::new();
        loop {
            let procs = self.procs.lock();
            let moves = |slot: &&Slot| !still.iter().any(|one| Arc::ptr_eq(one, slot));
            let Some(slot) = procs.values().find(moves).cloned() else {
                // For good, like those below: this process ends now.
                return std::mem::forget(procs);
            };
            // The thread that has the slot may need the table to give it up.
            drop(procs);
            std::mem::forget(slot.lock());
            still.push(slot);
        }
    }

    /// Takes up all that the keeper holds. A client that asks for a proc that cannot be taken up is
    /// told so ([`Service::sound`]).
    ///
    /// # Errors
    /// The keeper does not tell what is out: no proc may be served then.
    pub(super) fn take_up_all(&self, dir: &Path) -> io::Result<()> {
        let held = self.keeper.list(super::custody::PREFIX).map_err(io::Error::other)?;
        let owners: BTreeMap<String, u32> = held.iter().filter_map(|(name, _)| owner(name)).collect();
        for (name, number) in owners {
            let directory = dir.join("procs").join(&name).join("pager");
            if let Err(e) = self.adopt(&name, number, &directory) {
                tracing::error!(proc = name, error = line(&e), "what it had out is not taken up: it waits");
                self.broken.lock().insert(name, Arc::new(e));
            }
        }
        Ok(())
    }

    /// Has the keeper drop what has ended: a new one may have taken it over from the last after we
    /// had that drop it.
    pub(super) fn drop_ended(&self) -> Result<(), OrderError> {
        let held = self.keeper.list(super::custody::PREFIX)?;
        let owners: BTreeMap<String, u32> = held.iter().filter_map(|(name, _)| owner(name)).collect();
        for name in owners.into_keys() {
            let slot = self.slot(&name);
            let guard = slot.lock();
            if self.sound(&name).is_err() {
                continue;
            }
            let prefix = held_prefix(&name);
            // First this, then what is served: what is born in between is in the second alone.
            let held = self.keeper.list(&prefix)?;
            let served = guard.as_ref().map(|entry| entry.proc.memories()).unwrap_or_default();
            let served: Vec<String> = served.iter().map(|memory| format!("{prefix}{:x}", memory.id)).collect();
            for (key, _) in held.iter().filter(|(key, _)| !served.contains(key)) {
                self.keeper.drop_name(key)?;
            }
        }
        Ok(())
    }

    /// Refuses a proc whose memory is paged out and could not be adopted.
    pub(super) fn sound(&self, name: &str) -> Result<(), OrderError> {
        match self.broken.lock().get(name) {
            Some(why) => Err(OrderError::NotTakenUp(Arc::clone(why))),
            None => Ok(()),
        }
    }

    pub(super) fn adopt(&self, name: &str, number: u32, directory: &Path) -> Result<(), OrderError> {
        let slot = self.slot(name);
        let mut guard = slot.lock();
        if guard.is_some() {
            return Ok(());
        }
        let prefix = held_prefix(name);
        let held = self.keeper.get_prefix(&prefix)?;
        let named =
            |(key, fd): (String, OwnedFd)| Some((SpaceId::from_str_radix(key.strip_prefix(&prefix)?, 16).ok()?, fd));
        let held: Vec<_> = held.into_iter().filter_map(named).collect();
        if held.is_empty() {
            // It had nothing out.
            drop(guard);
            self.procs.lock().remove(name);
            return clear(directory).map_err(|e| OrderError::directory(name, directory, "removed", e));
        }
        let forked = |_| Err(io::Error::other("a child was forked while the pager died; its memory is lost"));
        let custodian = self.custodian(name, number);
        let proc =
            PagedProc::adopt(number, directory, Arc::clone(&self.server), custodian, Predictor::LastUse, held, forked);
        let proc = proc.map_err(|source| OrderError::Adopt { name: name.to_owned(), source })?;
        let directory = directory.to_owned();
        self.broken.lock().remove(name);
        *guard = Some(Entry {
            proc,
            number,
            directory,
            pids: Vec::new(),
            holder: None,
            asleep: Arc::default(),
            set_bytes: 0,
            kept_bytes: 0,
        });
        Ok(())
    }
}
