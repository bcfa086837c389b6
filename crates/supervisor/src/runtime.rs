//! Procs as the runtime socket knows them ([`kip_runtime`]): by their user ids, with what is held
//! for them.

use crate::registry::Registry;
use crate::task::Handle;
use kip_engine::fd_store::key;
use kip_net::Slot;
use kip_records::instance::{IDS_PER_BLOCK, ids_of};
use kip_runtime::wire::RuntimeIdentity;
use kip_runtime::{HomeLife, RuntimeHome, RuntimeHomes};
use kip_sys::within;
use kip_types::name::Realm;
use kip_types::spec::TreeAccess;
use kip_types::{State, chain, generation_id};
use rustix::fs::{OFlags, ResolveFlags};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

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
        let is_it = |handle: &Handle| handle.proc.slot == slot && !handle.proc.spec().alone;
        let handle = registry.all_handles().into_iter().find(is_it)?;
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

    fn tree(&self) -> TreeAccess {
        self.0.proc.spec().tree
    }

    fn life(&self) -> HomeLife {
        match self.0.status.borrow().record.state {
            State::Starting | State::Hot { .. } | State::Waking { .. } => HomeLife::Awake,
            State::Hibernated { .. } | State::Parking { .. } | State::Parked { .. } | State::Archived { .. } => {
                HomeLife::Asleep
            }
            State::Elsewhere { .. } | State::Stopping | State::Restarting { .. } | State::Stopped { .. } => {
                HomeLife::Ended
            }
        }
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
