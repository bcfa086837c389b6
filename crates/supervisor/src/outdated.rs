//! Residents that run another file than the one that is installed now: an upgrade has put new
//! programs in their place.
//!
//! The launcher is the daemon's own and as new as it. Keeper and pager outlive daemons, and are
//! replaced by the next daemon, once it has taken up everything: the same way as if they had died,
//! but in order, so that no proc wakes and no connection ends. Residents with another protocol have
//! been replaced before that.

use crate::registry::Registry;
use crate::task::{By, Handle, TaskCommand};
use futures_util::StreamExt as _;
use kip_engine::blocking::blocking;
use kip_sys::process;
use kip_types::api::EventKind;
use kip_types::chain;
use kip_types::{State, Tier};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// It has ended its work when it answers; what is left is the kernel's.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// How many times the procs that have hibernated meanwhile are parked, at most.
const ROUNDS: u32 = 5;

/// Whether a process runs another file than the one that has this path now. Not if there is none:
/// then nothing could replace it.
fn is_other(pid: u32, program: &Path) -> bool {
    let file = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    match (file(Path::new(&format!("/proc/{pid}/exe"))), file(program)) {
        (Some(runs), Some(installed)) => runs != installed,
        _ => false,
    }
}

/// Replaces what is outdated, the pager first: the next one takes up what the keeper holds.
pub async fn replace(machine: &Arc<Registry>) {
    replace_pager(machine).await;
    let machine = Arc::clone(machine);
    blocking(move || end_keeper(&machine)).await;
}

/// Ends an outdated pager; the task that follows it starts the next. Hibernated procs are parked
/// before that, which wakes none of them: otherwise held threads would run, and only this pager
/// knows whether a proc has touched its memory. The pager stays for procs that cannot be parked.
async fn replace_pager(machine: &Arc<Registry>) {
    let pid = || {
        let machine = Arc::clone(machine);
        blocking(move || machine.host.pager.pid())
    };
    let Ok(old) = pid().await else { return };
    if !is_other(old, &machine.host.programs.join("kip-pager")) {
        return;
    }
    let hibernated = machine.hibernated().len();
    if hibernated > 0 {
        let message =
            format!("pid {old} is of an older build: {hibernated} hibernated procs are parked, then it is replaced");
        machine.host.events.emit(None, EventKind::Pager, message);
    }
    let mut rounds = 0;
    // While this lives no proc falls asleep or wakes by way of the pager.
    let _nobody = loop {
        park_all(machine).await;
        let nobody = machine.host.pager_stays.write().await;
        let left = machine.hibernated();
        rounds += 1;
        if left.is_empty() {
            break nobody;
        }
        if rounds == ROUNDS {
            let names: Vec<_> = left.iter().map(|handle| handle.proc.name.as_str()).collect();
            let names = names.join(", ");
            let message = format!("pid {old} is of an older build, and stays for what cannot be parked: {names}");
            return machine.host.events.emit(None, EventKind::Pager, message);
        }
    };
    let ending = Arc::clone(machine);
    let ended = blocking(move || {
        let pidfd = process::pidfd_open(old).map_err(|e| e.to_string())?;
        ending.host.pager.quit().map_err(|e| chain(&e))?;
        process::wait_for_end(pidfd.as_fd(), Some(ENDS_WITHIN)).map_err(|e| e.to_string())
    });
    if let Err(error) = ended.await {
        return tracing::warn!(pid = old, error, "an outdated pager is not replaced");
    }
    let until = Instant::now() + ENDS_WITHIN;
    while !pid().await.is_ok_and(|new| new != old) && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Parks all that are hibernated and can be parked, as many at a time as there are processors.
async fn park_all(machine: &Registry) {
    let at_once = std::thread::available_parallelism().map_or(1, usize::from);
    let parked = futures_util::stream::iter(machine.hibernated()).map(|handle| async move {
        let slept = handle.ask(|reply| TaskCommand::Sleep { to: Tier::Parked, by: By::Kip, reply }).await;
        if let Err(refusal) = slept {
            tracing::info!(proc = %handle.proc.name, reason = refusal.message, "the pager cannot be replaced yet");
        }
    });
    parked.buffer_unordered(at_once).for_each(|()| async {}).await;
}

/// Puts the next keeper in the place of an outdated one, with all that it holds and without a
/// moment in which a client finds none; the task that watches the keeper gives the next one
/// everything once more.
fn end_keeper(machine: &Registry) {
    let pid = machine.host.keeper.pid();
    if !is_other(pid, &machine.host.programs.join("kip-keeper")) {
        return;
    }
    machine.host.ends_keeper.store(true, Ordering::SeqCst);
    if let Err(e) = machine.host.keeper.renew() {
        machine.host.ends_keeper.store(false, Ordering::SeqCst);
        tracing::warn!(pid, error = chain(&e), "an outdated keeper is not replaced");
    }
}

impl Registry {
    /// The hibernated procs.
    fn hibernated(&self) -> Vec<Handle> {
        let mut all = self.all_handles();
        all.retain(|handle| matches!(handle.status.borrow().record.state, State::Hibernated { .. }));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_at_the_same_path_is_another() {
        let own = std::env::current_exe().unwrap();
        let pid = std::process::id();
        assert!(!is_other(pid, &own));
        let directory = tempfile::tempdir().unwrap();
        let copy = directory.path().join("copy");
        assert!(!is_other(pid, &copy), "there is none to replace it");
        fs::copy(&own, &copy).unwrap();
        assert!(is_other(pid, &copy));
    }
}
