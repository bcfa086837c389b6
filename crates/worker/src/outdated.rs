//! Residents that run another file than the one that is installed now: an upgrade has put new programs in their place.
//!
//! The launcher is the daemon's own and as new as it. Keeper and pager outlive daemons, and are replaced by the next one, once it has taken up
//! everything: the same way as if they had died, but in order, so that nobody wakes and no connection ends. Programs whose
//! protocols differ have refused each other before that.

use crate::machine::Machine;
use crate::task::chain;
use kip_sys::process;
use kip_types::State;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// It has ended its work when it answers; what is left is the kernel's.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Whether a process runs another file than the one that has this path now. Not if there is none: then nothing could replace it.
fn is_other(pid: u32, program: &Path) -> bool {
    let file = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    match (file(Path::new(&format!("/proc/{pid}/exe"))), file(program)) {
        (Some(runs), Some(installed)) => runs != installed,
        _ => false,
    }
}

/// Ends an outdated pager; who follows it starts the next. As long as procs are hibernated it stays: held threads would run, and whether a
/// proc has touched its memory is known to this pager only.
pub(crate) fn end_pager(machine: &Machine) {
    let Ok(pid) = machine.pager.pid() else { return };
    if !is_other(pid, &machine.programs.join("kip-pager")) {
        return;
    }
    let hibernated = machine.hibernated();
    if hibernated > 0 {
        let message = format!("pid {pid} is of an older build, and stays for {hibernated} hibernated procs");
        return machine.events.tell(None, "pager", message);
    }
    let ended = process::pidfd_open(pid).map_err(|e| e.to_string()).and_then(|pidfd| {
        machine.pager.quit().map_err(|e| chain(&e))?;
        process::wait_for_end(pidfd.as_fd(), Some(ENDS_WITHIN)).map_err(|e| e.to_string())
    });
    if let Err(error) = ended {
        tracing::warn!(pid, error, "an outdated pager is not replaced");
    }
}

/// Ends an outdated keeper; who watches it starts the next.
pub(crate) fn end_keeper(machine: &Machine) {
    let pid = machine.keeper.pid();
    if !is_other(pid, &machine.programs.join("kip-keeper")) {
        return;
    }
    machine.ends_keeper.store(true, Ordering::SeqCst);
    if let Err(e) = machine.keeper.quit() {
        machine.ends_keeper.store(false, Ordering::SeqCst);
        tracing::warn!(pid, error = chain(&e), "an outdated keeper is not replaced");
    }
}

impl Machine {
    /// How many procs are hibernated.
    fn hibernated(&self) -> usize {
        let is =
            |handle: &&crate::task::Handle| matches!(handle.status.borrow().record.state, State::Hibernated { .. });
        self.all_handles().iter().filter(is).count()
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
