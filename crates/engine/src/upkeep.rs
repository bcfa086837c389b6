//! What the machine itself needs while procs live on it: a keeper that lives, rules that lead to
//! ports, and all of it gone at the end.

use crate::blocking::blocking;
use crate::host::Host;
use kip_net::Nat;
use kip_net::nat::{NatError, Published};
use kip_pager::client::PagerError;
use kip_records::instance;
use kip_types::ProcName;
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::chain;
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Remembers the machine's own forwarding settings, for all instances.
pub const FORWARDING: &str = "/run/kip/forwarding";
/// What the keeper calls the runtime socket: a name that no proc can have.
pub const RUNTIME: &str = "@runtime";

/// Between looks whether the rules are there.
const RULES_EVERY: Duration = Duration::from_secs(5);

impl Host {
    /// Removes what no record knows, after recovery.
    ///
    /// # Errors
    /// The rules of ports cannot be set.
    pub fn sweep(&self, live: &[Published], keys: &BTreeSet<ProcName>) -> Result<(), NatError> {
        self.nat.sync(live)?;
        let held = self.keeper.list("").unwrap_or_default();
        let strangers: BTreeSet<String> = held
            .iter()
            .filter_map(|(name, _)| name.split_once('/').map(|(proc, _)| proc.to_owned()))
            // The pager's own names, which no proc can have.
            .filter(|proc| !proc.starts_with('@'))
            .filter(|proc| !keys.iter().any(|key| key.as_str() == proc))
            .collect();
        for proc in strangers {
            if let Err(e) = self.keeper.drop_prefix(&format!("{proc}/")) {
                tracing::warn!(proc, error = chain(&e), "the keeper still holds something of a proc that is no more");
            }
        }
        Ok(())
    }

    /// Starts another keeper when this one dies, and gives it everything again.
    pub fn watch_keeper(self: &Arc<Host>) {
        let machine = Arc::downgrade(self);
        let watch = move || {
            // The last daemon may have ended before a new keeper had everything.
            if let Some(strong) = machine.upgrade()
                && let Err(e) = strong.pager.mirror()
                && !matches!(e, PagerError::Gone(_))
            {
                tracing::warn!(error = chain(&e), "the keeper may not hold what the pager has");
            }
            loop {
                let Some(strong) = machine.upgrade() else { return };
                let Ok(fd) = strong.keeper.watch_fd() else { return };
                drop(strong);
                let ended = kip_sys::process::wait_for_end(fd.as_fd(), None);
                let Some(machine) = machine.upgrade() else { return };
                if ended.is_err() || machine.is_closing() {
                    return;
                }
                machine.replace_keeper();
            }
        };
        std::thread::Builder::new().name("keeper-watch".to_owned()).spawn(watch).expect("a thread can be started");
    }

    /// Puts the rules back that a flush of the machine's took away: until then no published port is
    /// reached. And forwards from interfaces that have come since the start: until then what
    /// arrives by one reaches no proc. And tells what procs were refused to call.
    pub fn watch_rules(self: &Arc<Host>) {
        let machine = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut told = false;
            loop {
                tokio::time::sleep(RULES_EVERY).await;
                let Some(machine) = machine.upgrade().filter(|machine| !machine.is_closing()) else { return };
                let rules = Arc::clone(&machine);
                match blocking(move || Ok::<_, NatError>((rules.nat.mend()?, rules.nat.follow_uplinks()?))).await {
                    Ok((mended, followed)) => {
                        told = false;
                        if mended {
                            let detail = format!("table inet {} was gone and is put back", machine.instance.table());
                            machine.events.emit(None, EventKind::Rules, detail);
                        }
                        let refused = Arc::clone(&machine);
                        blocking(move || refused.tell_refused_calls()).await;
                        if followed {
                            let detail = "forwarding is on for an interface of a new default route";
                            machine.events.emit(None, EventKind::Rules, detail);
                        }
                    }
                    Err(e) if !std::mem::replace(&mut told, true) => {
                        tracing::error!(error = chain(&e), "the rules that lead to published ports cannot be put back");
                    }
                    Err(_) => {}
                }
            }
        });
    }

    fn replace_keeper(&self) {
        if !self.ends_keeper.swap(false, std::sync::atomic::Ordering::SeqCst) {
            tracing::warn!("the keeper died; starting another");
        }
        if let Err(e) = self.keeper.respawn() {
            tracing::error!(error = chain(&e), "no keeper can be started");
            std::thread::sleep(Duration::from_secs(1));
            return;
        }
        if let Err(e) = self.keeper.put(RUNTIME, &[self.runtime.as_fd()]) {
            tracing::error!(error = chain(&e), "the new keeper does not hold the runtime socket");
        }
        for proc in self.live_procs() {
            if let Err(e) = proc.fd_store.mirror() {
                tracing::error!(proc = %proc.name, error = chain(&e), "the new keeper does not hold everything");
            }
        }
        if let Err(e) = self.pager.mirror() {
            tracing::error!(error = chain(&e), "the new keeper does not hold what the pager has");
        }
        self.events.emit(None, EventKind::Keeper, format!("replaced, pid {}", self.keeper.pid()));
    }

    /// Takes everything of this data directory off the machine. All procs have ended.
    ///
    /// # Errors
    /// Something of it cannot be removed.
    pub fn dismantle(&self) -> Result<(), Refusal> {
        self.close();
        let failed = |what: &str, e: &dyn std::error::Error| {
            Refusal::new(Code::Failed, format!("{what} cannot be removed: {}", chain(e)))
        };
        self.nat.close();
        self.helpers.close();
        let waiting = self.prepared_networks.close();
        self.pool.release(&waiting).map_err(|e| failed("network links", &e))?;
        self.pool.clear().map_err(|e| failed("network links", &e))?;
        Nat::remove(self.instance, Path::new(FORWARDING)).map_err(|e| failed("port forwarding", &e))?;
        self.cgroups
            .remove_all(&format!("kip-{}", self.instance.number()))
            .map_err(|e| failed("control groups", &e))?;
        self.pager.quit().map_err(|e| failed("the pager", &e))?;
        self.keeper.quit().map_err(|e| failed("the keeper", &e))?;
        instance::release(&self.data, self.instance);
        Ok(())
    }
}
