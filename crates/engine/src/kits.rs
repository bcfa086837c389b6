//! Slots, and kits made ahead of need: the network namespaces of the next procs.
//!
//! A slot is a number that a proc has from its creation to its removal; addresses and ids follow from it. A thread
//! keeps a few kits ready, so that a start takes one in microseconds.

use kip_net::{NetNs, NetPool, Slot};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Kits that wait.
const READY: usize = 2;

/// What is made ahead for one proc.
#[derive(Debug)]
pub struct Kit {
    /// For which proc.
    pub slot: Slot,
    /// Its network.
    pub net: NetNs,
}

/// A kit could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum KitError {
    #[error("no slot is free: this data directory already has {} procs", kip_net::addr::USABLE_SLOTS)]
    Full,
    #[error(transparent)]
    Net(#[from] kip_net::pool::NetNsError),
}

#[derive(Debug, Default)]
struct State {
    used: BTreeSet<Slot>,
    ready: VecDeque<Kit>,
    closed: bool,
}

/// The slots and kits of a data directory.
#[derive(Debug)]
pub struct Kits {
    inner: Arc<Inner>,
}

struct Inner {
    state: Mutex<State>,
    changed: Condvar,
    pool: Arc<NetPool>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.state.fmt(f)
    }
}

impl Kits {
    /// `used` are the slots of procs that exist.
    pub fn start(pool: Arc<NetPool>, used: BTreeSet<Slot>) -> Kits {
        let state = Mutex::new(State { used, ..State::default() });
        let inner = Arc::new(Inner { state, changed: Condvar::new(), pool });
        let filler = Arc::clone(&inner);
        std::thread::Builder::new()
            .name("kits".to_owned())
            .spawn(move || filler.fill())
            .expect("a thread can be started");
        Kits { inner }
    }

    /// A kit for a new proc; its slot is used from now on.
    pub fn take(&self) -> Result<Kit, KitError> {
        let kit = self.inner.state.lock().ready.pop_front();
        self.inner.changed.notify_one();
        match kit {
            Some(kit) => Ok(kit),
            None => self.inner.make_next(),
        }
    }

    /// Namespaces for a proc that has its slot already.
    pub fn make(&self, slot: Slot) -> Result<Kit, KitError> {
        self.inner.make(slot)
    }

    /// The slot is free again; its links must be gone.
    pub fn free(&self, slot: Slot) {
        self.inner.state.lock().used.remove(&slot);
    }

    /// Makes no more, and lets go those that wait; returns their slots, whose links are to be removed.
    pub fn close(&self) -> Vec<Slot> {
        let mut state = self.inner.state.lock();
        state.closed = true;
        self.inner.changed.notify_one();
        state.ready.drain(..).map(|k| k.slot).collect()
    }
}

impl Inner {
    fn make_next(&self) -> Result<Kit, KitError> {
        let slot = {
            let mut state = self.state.lock();
            let slot = Slot::all().find(|s| !state.used.contains(s)).ok_or(KitError::Full)?;
            state.used.insert(slot);
            slot
        };
        self.make(slot).inspect_err(|_| {
            self.state.lock().used.remove(&slot);
        })
    }

    fn make(&self, slot: Slot) -> Result<Kit, KitError> {
        let net = self.pool.take(slot)?;
        Ok(Kit { slot, net })
    }

    fn fill(&self) {
        loop {
            {
                let mut state = self.state.lock();
                while !state.closed && state.ready.len() >= READY {
                    self.changed.wait(&mut state);
                }
                if state.closed {
                    return;
                }
            }
            match self.make_next() {
                Ok(kit) => {
                    let mut state = self.state.lock();
                    if state.closed {
                        return;
                    }
                    state.ready.push_back(kit);
                }
                Err(e) => {
                    tracing::debug!(error = %e, "no kit can be made ahead now");
                    std::thread::sleep(std::time::Duration::from_secs(1));
                }
            }
        }
    }
}
