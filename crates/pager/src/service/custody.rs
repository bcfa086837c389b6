//! The keeper as the second holder of userfaultfds.

use super::refused::OrderError;
use super::{News, Service};
use crate::memory::SpaceId;
use crate::proc::Custodian;
use crate::protocol::PagerEvent;
use kip_keeper::Keeper;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, mpsc};

/// Prefix of all names in the keeper; no proc can be called so.
pub(super) const PREFIX: &str = "@pager/";

/// The keeper as the second holder of a proc's userfaultfds.
pub(super) struct InKeeper {
    pub(super) keeper: Arc<Keeper>,
    pub(super) name: String,
    pub(super) number: u32,
    pub(super) news: mpsc::Sender<News>,
    pub(super) missing: mpsc::Sender<PagerEvent>,
}

/// Prefix of a proc's names.
pub(super) fn held_prefix(name: &str) -> String {
    format!("{PREFIX}{name}/")
}

impl InKeeper {
    fn key(&self, space: SpaceId) -> String {
        format!("{}{space:x}", held_prefix(&self.name))
    }
}

impl Custodian for InKeeper {
    fn hold(&self, spaces: &[(SpaceId, BorrowedFd<'_>)]) -> io::Result<()> {
        let put = || self.keeper.put_many(spaces.iter().map(|(space, uffd)| (self.key(*space), *uffd)));
        let result = put().or_else(|first| match self.keeper.respawn() {
            Ok(_) => put(),
            Err(_) => Err(first),
        });
        result.map_err(io::Error::other)
    }

    fn release(&self, space: SpaceId) {
        // A keeper that is gone holds nothing.
        let _ = self.keeper.drop_name(&self.key(space));
    }

    fn damaged(&self, error: &io::Error) {
        let (name, number, message) = (self.name.clone(), self.number, error.to_string());
        let _ = self.news.send(News::Event(PagerEvent::Damaged { name, number, message }));
    }

    fn missing(&self, file: &str, pages: Range<u32>) {
        let (name, number, file) = (self.name.clone(), self.number, file.to_owned());
        let (first, pages) = (pages.start, pages.end - pages.start);
        let _ = self.missing.send(PagerEvent::Missing { name, number, file, first, pages });
    }
}

/// The proc that a name in the keeper belongs to, and its number.
pub(super) fn owner(key: &str) -> Option<(String, u32)> {
    let (name, id) = key.strip_prefix(PREFIX)?.rsplit_once('/')?;
    let id = SpaceId::from_str_radix(id, 16).ok()?;
    Some((name.to_owned(), (id >> 32) as u32))
}

impl Service {
    /// Puts all descriptors into a keeper that is new, under the names of their procs.
    pub(super) fn mirror(&self) -> Result<(), OrderError> {
        let all: Vec<(String, _)> =
            self.procs.lock().iter().map(|(name, slot)| (name.clone(), Arc::clone(slot))).collect();
        self.keeper.respawn()?;
        for (name, slot) in all {
            let guard = slot.lock();
            let Some(entry) = guard.as_ref() else { continue };
            let custodian = self.custodian(&name, entry.number);
            let memories = entry.proc.memories();
            let spaces: Vec<_> = memories.iter().map(|memory| (memory.id, memory.uffd.as_fd())).collect();
            let held = custodian.hold(&spaces);
            held.map_err(|source| OrderError::NotHeldTwice { name: name.clone(), source })?;
        }
        self.drop_ended()
    }
}
