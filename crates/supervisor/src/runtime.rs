//! Procs as the runtime socket knows them ([`kip_runtime`]): by their user ids, with what is held
//! for them.

use crate::registry::Registry;
use crate::task::Handle;
use kip_engine::fd_store::key;
use kip_engine::upkeep::RUNTIME;
use kip_keeper::{Keeper, KeeperError};
use kip_net::Slot;
use kip_records::instance::{IDS_PER_BLOCK, ids_of};
use kip_runtime::wire::RuntimeIdentity;
use kip_runtime::{HomeLife, RuntimeHome, RuntimeHomes};
use kip_sys::within;
use kip_types::name::Realm;
use kip_types::runtime::PLACE;
use kip_types::spec::TreeAccess;
use kip_types::{ProcName, State, chain, generation_id};
use rustix::fs::{OFlags, ResolveFlags};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// The runtime socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeSocketError {
    /// The keeper has it, and does not give it back: another would be none that procs have.
    #[error("the keeper does not give back the runtime socket of procs: run `kip up` again")]
    NotGivenBack(#[source] KeeperError),
    /// It cannot be made.
    #[error("cannot make the runtime socket {path}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The runtime socket of all procs: that which the last daemon has left, for procs have it mounted.
///
/// # Errors
/// [`RuntimeSocketError`].
pub fn socket(data: &Path, keeper: &Keeper) -> Result<OwnedFd, RuntimeSocketError> {
    let path = data.join(PLACE);
    if let Some(held) = held_socket(keeper.get(RUNTIME))?.filter(|_| kip_runtime::is_there(&path)) {
        return Ok(held);
    }
    let made = kip_runtime::listen(&path).map_err(|source| RuntimeSocketError::Io { path, source })?;
    if let Err(error) = keeper.put(RUNTIME, &[made.as_fd()]) {
        tracing::error!(error = chain(&error), "the keeper does not hold the runtime socket");
    }
    Ok(made)
}

/// What the keeper says that it holds.
fn held_socket(got: Result<Vec<OwnedFd>, KeeperError>) -> Result<Option<OwnedFd>, RuntimeSocketError> {
    match got {
        Ok(mut fds) => Ok(fds.pop()),
        Err(KeeperError::Unknown { .. }) => Ok(None),
        Err(error) => Err(RuntimeSocketError::NotGivenBack(error)),
    }
}

/// All procs of a registry.
pub struct RuntimeProcs(Weak<Registry>);

impl RuntimeProcs {
    /// Those of this one.
    pub fn of(registry: &Arc<Registry>) -> RuntimeProcs {
        RuntimeProcs(Arc::downgrade(registry))
    }
}

impl RuntimeHomes for RuntimeProcs {
    fn of_user(&self, uid: u32) -> Option<Arc<dyn RuntimeHome>> {
        let registry = self.0.upgrade()?;
        let (first, count) = ids_of(registry.host.instance);
        let number = uid.checked_sub(first).filter(|number| *number < count)? / IDS_PER_BLOCK;
        let slot = Slot::new(u16::try_from(number).ok()?).ok()?;
        // A trial changes nothing outside.
        let handle = registry.at(slot).filter(|handle| !handle.proc.spec().alone)?;
        Some(Arc::new(Home(handle)))
    }

    fn all(&self) -> Vec<Arc<dyn RuntimeHome>> {
        let handles = self.0.upgrade().map(|registry| registry.all_handles()).unwrap_or_default();
        handles.into_iter().map(|handle| Arc::new(Home(handle)) as Arc<dyn RuntimeHome>).collect()
    }
}

/// A proc.
struct Home(Handle);

impl Home {
    /// The count in its file, which a program may have replaced by one of its own.
    fn clone_count(&self) -> io::Result<u64> {
        let place = self.0.proc.files.place().map_err(io::Error::other)?;
        let root = File::open(place.path().join("upper/root"))?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let file = File::from(within::open(&root, generation_id::PATH, flags, resolve)?);
        let mut text = String::new();
        file.take(16).read_to_string(&mut text)?;
        u64::from_str_radix(&text, 16).map_err(io::Error::other)
    }
}

/// What a proc is at in that state.
fn life_in(state: &State) -> HomeLife {
    match state {
        // While it is being ended its program has its grace.
        State::Starting | State::Hot { .. } | State::Stopping => HomeLife::Awake,
        // A wake may take as long as its snapshot takes to come from the store.
        State::Hibernated { .. }
        | State::Parking { .. }
        | State::Parked { .. }
        | State::Archived { .. }
        | State::Waking { .. } => HomeLife::Asleep,
        State::Elsewhere { .. } | State::Restarting { .. } | State::Stopped { .. } => HomeLife::Ended,
    }
}

impl RuntimeHome for Home {
    fn identity(&self) -> RuntimeIdentity {
        let generation = self.0.status.borrow().record.state.generation();
        RuntimeIdentity {
            name: self.0.proc.name.to_string(),
            realm: Realm::default().to_string(),
            generation: generation.0,
            clone_count: self.clone_count().unwrap_or(0),
        }
    }

    fn key(&self) -> ProcName {
        self.0.proc.key.clone()
    }

    fn name(&self) -> ProcName {
        ProcName::clone(&self.0.proc.name)
    }

    fn may_spawn(&self) -> bool {
        self.0.proc.spec().spawn > 0
    }

    fn tree(&self) -> TreeAccess {
        self.0.proc.spec().tree
    }

    fn life(&self) -> HomeLife {
        life_in(&self.0.status.borrow().record.state)
    }

    fn directory(&self) -> PathBuf {
        self.0.proc.dir.clone()
    }

    fn hold(&self, connection: u64, fds: Vec<(&'static str, OwnedFd)>) -> io::Result<()> {
        let named = |(name, fd)| (format!("{}{connection}/{name}", key::RUNTIME), fd);
        self.0.proc.fd_store.hold(fds.into_iter().map(named).collect()).map_err(io::Error::other)
    }

    fn held(&self, connection: u64, name: &str) -> Option<Arc<OwnedFd>> {
        self.0.proc.fd_store.get(&format!("{}{connection}/{name}", key::RUNTIME))
    }

    fn connections(&self) -> Vec<u64> {
        let keys = self.0.proc.fd_store.keys(key::RUNTIME);
        let number = |key: &String| key.strip_prefix(key::RUNTIME)?.split('/').next()?.parse().ok();
        let mut numbers: Vec<u64> = keys.iter().filter_map(number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    fn let_go(&self, connection: u64) {
        if let Err(error) = self.0.proc.fd_store.drop_prefix(&format!("{}{connection}/", key::RUNTIME)) {
            tracing::debug!(proc = %self.0.proc.name, error = chain(&error), "the keeper did not let a connection go");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::Generation;

    // promise runtime: leases are kept while a proc wakes, however long that takes, and do not end
    //   before its program has had its grace
    // held by: this, `tests/test_runtime.py::test_leases_in_the_grace`
    #[test]
    fn a_proc_that_wakes_sleeps_and_one_that_is_being_ended_runs() {
        assert_eq!(life_in(&State::Waking { generation: Generation(1) }), HomeLife::Asleep);
        assert_eq!(life_in(&State::Parked { generation: Generation(1) }), HomeLife::Asleep);
        assert_eq!(life_in(&State::Stopping), HomeLife::Awake);
        assert_eq!(life_in(&State::Stopped { exit: None }), HomeLife::Ended);
    }

    // promise runtime: a daemon that does not get the socket of its procs back makes no other in
    //   its place
    #[test]
    fn a_socket_that_is_not_given_back_is_not_replaced() {
        let unknown = KeeperError::Unknown { name: RUNTIME.to_owned() };
        assert!(matches!(held_socket(Err(unknown)), Ok(None)));
        let lost = KeeperError::Answer { source: io::Error::other("no answer") };
        assert!(matches!(held_socket(Err(lost)), Err(RuntimeSocketError::NotGivenBack(_))));
    }
}
