//! Slots, and prepared namespaces: the network namespaces of the next procs, made ahead of a start.
//!
//! A slot is a number that a proc has from its creation to its removal; addresses and ids follow
//! from it. A thread keeps a few namespaces ready, so that a start takes one in microseconds.
//!
//! Procs without a network share one namespace, made when the first of them needs it. The kernel
//! keeps 100 KiB and more for each namespace; what the sharing opens, the system call filter of
//! these procs closes (`kip_sandbox::seccomp`). A daemon makes one for itself: procs of the last
//! one keep theirs.

use crate::addr::{Slot, USABLE_SLOTS};
use crate::pool::{NetNsError, NetPool, unlinked};
use kip_types::spec::NetworkKind;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Prepared namespaces of each kind that wait.
const READY: usize = 2;

/// A slot with its network namespace, made ahead of a start.
#[derive(Debug)]
pub struct PreparedNetwork {
    /// For which proc.
    pub slot: Slot,
    /// Its network namespace.
    pub net: OwnedFd,
}

/// A network namespace could not be prepared.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum PrepareError {
    #[error("no slot is free: this data directory already has {} procs", USABLE_SLOTS)]
    Full,
    #[error("the network namespace of procs without a network cannot be made")]
    Shared(#[source] io::Error),
    #[error(transparent)]
    Net(#[from] NetNsError),
}

#[derive(Debug, Default)]
struct Slots {
    used: BTreeSet<Slot>,
    ready: VecDeque<PreparedNetwork>,
    /// The same of procs without a network, once there has been one.
    ready_without: Option<VecDeque<PreparedNetwork>>,
    closed: bool,
}

/// The slots and prepared namespaces of a data directory.
#[derive(Debug)]
pub struct PreparedNetworks {
    inner: Arc<Inner>,
}

struct Inner {
    state: Mutex<Slots>,
    changed: Condvar,
    pool: Arc<NetPool>,
    /// The one of procs without a network.
    shared: Mutex<Option<OwnedFd>>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.state.fmt(f)
    }
}

impl PreparedNetworks {
    /// `used` are the slots of procs that exist.
    pub fn start(pool: Arc<NetPool>, used: BTreeSet<Slot>) -> PreparedNetworks {
        let state = Mutex::new(Slots { used, ..Slots::default() });
        let inner = Arc::new(Inner { state, changed: Condvar::new(), pool, shared: Mutex::default() });
        let filler = Arc::clone(&inner);
        std::thread::Builder::new()
            .name("prepare-netns".to_owned())
            .spawn(move || filler.fill())
            .expect("a thread can be started");
        PreparedNetworks { inner }
    }

    /// A namespace of that kind for a new proc; its slot is used from now on.
    pub fn take(&self, kind: NetworkKind) -> Result<PreparedNetwork, PrepareError> {
        let network = self.inner.state.lock().ready_of(kind).pop_front();
        self.inner.changed.notify_all();
        match network {
            Some(network) => Ok(network),
            None => self.inner.make_next(kind),
        }
    }

    /// A network namespace for a proc that has its slot already.
    pub fn make(&self, slot: Slot, kind: NetworkKind) -> Result<PreparedNetwork, PrepareError> {
        self.inner.make(slot, kind)
    }

    /// The slot is free again; its links must be gone.
    pub fn free(&self, slot: Slot) {
        self.inner.state.lock().used.remove(&slot);
    }

    /// Makes no more, and lets go those that wait; returns their slots, whose links are to be
    /// removed.
    pub fn close(&self) -> Vec<Slot> {
        let mut state = self.inner.state.lock();
        state.closed = true;
        self.inner.changed.notify_all();
        let without = state.ready_without.take().into_iter().flatten();
        let all: Vec<PreparedNetwork> = without.chain(state.ready.drain(..)).collect();
        all.into_iter().map(|k| k.slot).collect()
    }

    /// Acts if that slot is still ready for a new proc: none takes it meanwhile.
    pub fn if_ready(&self, slot: Slot, act: impl FnOnce()) {
        let state = self.inner.state.lock();
        if state.ready_without.iter().flatten().chain(&state.ready).any(|network| network.slot == slot) {
            act();
        }
    }

    /// Waits for a slot that is ready for a new proc and for which the caller has not made what it
    /// makes ahead; none when no more are made.
    pub fn next_slot(&self, is_served: impl Fn(Slot) -> bool) -> Option<Slot> {
        let mut state = self.inner.state.lock();
        loop {
            if state.closed {
                return None;
            }
            let all = state.ready_without.iter().flatten().chain(&state.ready);
            if let Some(slot) = all.map(|network| network.slot).find(|slot| !is_served(*slot)) {
                return Some(slot);
            }
            self.inner.changed.wait(&mut state);
        }
    }
}

impl Slots {
    fn ready_of(&mut self, kind: NetworkKind) -> &mut VecDeque<PreparedNetwork> {
        match kind {
            NetworkKind::Private => &mut self.ready,
            NetworkKind::None => self.ready_without.get_or_insert_default(),
        }
    }

    /// A kind of which there are too few.
    fn lacking(&self) -> Option<NetworkKind> {
        let without = self.ready_without.as_ref().filter(|ready| ready.len() < READY);
        let private = (self.ready.len() < READY).then_some(NetworkKind::Private);
        private.or(without.map(|_| NetworkKind::None))
    }
}

impl Inner {
    fn make_next(&self, kind: NetworkKind) -> Result<PreparedNetwork, PrepareError> {
        let slot = {
            let mut state = self.state.lock();
            let slot = Slot::all().find(|s| !state.used.contains(s)).ok_or(PrepareError::Full)?;
            state.used.insert(slot);
            slot
        };
        self.make(slot, kind).inspect_err(|_| {
            self.state.lock().used.remove(&slot);
        })
    }

    fn make(&self, slot: Slot, kind: NetworkKind) -> Result<PreparedNetwork, PrepareError> {
        let net = match kind {
            NetworkKind::Private => self.pool.take(slot)?.fd,
            NetworkKind::None => self.shared().map_err(PrepareError::Shared)?,
        };
        Ok(PreparedNetwork { slot, net })
    }

    /// The namespace of procs without a network.
    fn shared(&self) -> io::Result<OwnedFd> {
        let mut shared = self.shared.lock();
        if let Some(made) = &*shared {
            return made.try_clone();
        }
        // In a thread of its own, which ends: unshare(2) moves the thread that calls it.
        let made = std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().name("kip-netns".to_owned());
            let thread = builder.spawn_scoped(scope, unlinked)?;
            thread.join().expect("making a namespace does not panic")
        })?;
        shared.insert(made).try_clone()
    }

    fn fill(&self) {
        loop {
            let kind = {
                let mut state = self.state.lock();
                loop {
                    if state.closed {
                        return;
                    }
                    match state.lacking() {
                        Some(kind) => break kind,
                        None => self.changed.wait(&mut state),
                    }
                }
            };
            match self.make_next(kind) {
                Ok(network) => {
                    let mut state = self.state.lock();
                    if state.closed {
                        return;
                    }
                    state.ready_of(kind).push_back(network);
                    self.changed.notify_all();
                }
                Err(e) => {
                    tracing::debug!(error = %e, "no network namespace can be prepared now");
                    std::thread::sleep(std::time::Duration::from_secs(1));
                }
            }
        }
    }
}
