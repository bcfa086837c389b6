//! User, uts and ipc namespaces of the next procs, made ahead of their starts: two processes are
//! made and waited for, which takes longer than all else that the launcher does for a start.
//!
//! They belong to a slot, for the mapping of ids follows from that. Only the daemon has them: they
//! go with it.

use kip_net::Slot;
use kip_net::prepared::PreparedNetworks;
use kip_sandbox::launcher::{LaunchError, Namespaces};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::Duration;

/// Namespaces that wait, by their slots.
#[derive(Debug, Default)]
pub struct ReadyNamespaces(Mutex<HashMap<Slot, Namespaces>>);

impl ReadyNamespaces {
    /// Those of a slot, if they were made. Their uts namespace has no host name yet.
    pub fn take(&self, slot: Slot) -> Option<Namespaces> {
        self.0.lock().remove(&slot)
    }

    /// Makes them for slots that are about to be used, until no slot is made ready any more.
    pub fn serve(&self, slots: &PreparedNetworks, make: impl Fn(Slot) -> Result<Namespaces, LaunchError>) {
        while let Some(slot) = slots.next_slot(|slot| self.0.lock().contains_key(&slot)) {
            match make(slot) {
                // A start that was faster has made its own.
                Ok(made) => slots.if_ready(slot, || drop(self.0.lock().insert(slot, made))),
                Err(error) => {
                    tracing::debug!(%error, "no namespaces can be prepared now");
                    std::thread::sleep(Duration::from_secs(1));
                }
            }
        }
        self.0.lock().clear();
    }
}
