//! What of a proc never changes while it exists: name, spec, slot, directories, cgroup; and its held descriptors.

use crate::holdings::{Holdings, key};
use crate::machine::Machine;
use crate::pins;
use crate::tree::Tree;
use kip_net::Slot;
use kip_sandbox::cgroup::Cgroup;
use kip_sandbox::launcher::LaunchError;
use kip_sandbox::rootfs::{Mounts, RootfsError, RootfsSpec};
use kip_types::{Image, ProcName, Spec};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Ids in one block: 0 to 65,535 inside.
pub(crate) const IDS_PER_BLOCK: u32 = 65_536;

/// How long the mounts of the last run may take to be gone.
const MOUNT_WITHIN: Duration = Duration::from_secs(5);

fn lost(what: &str) -> LaunchError {
    LaunchError::Gone(std::io::Error::other(format!("{what} is no longer held")))
}

/// Mounts made ahead of a wake.
#[derive(Debug)]
pub(crate) struct Prepared {
    mounts: Mounts,
    with_pins: bool,
}

/// A proc, apart from its state.
#[derive(Debug)]
pub(crate) struct Proc {
    pub(crate) name: ProcName,
    pub(crate) spec: Spec,
    /// `DATA/procs/NAME`.
    pub(crate) dir: PathBuf,
    pub(crate) slot: Slot,
    /// The skeleton it was created over.
    pub(crate) base: PathBuf,
    pub(crate) cgroup: Cgroup,
    pub(crate) holdings: Holdings,
    pub(crate) shared: Arc<Machine>,
    /// Mounts for the next wake, made when it fell asleep.
    pub(crate) prepared: Mutex<Option<Prepared>>,
}

impl Proc {
    /// First host id of the proc's block of user and group ids.
    pub(crate) fn first_id(&self) -> u32 {
        self.shared.first_id(self.slot)
    }

    /// Host pid of the sandbox's pid 1, while it runs.
    pub(crate) fn init_pid(&self) -> Option<u32> {
        Tree::read(&self.cgroup.pids().ok()?).init()
    }

    /// Where a tarball was unpacked.
    pub(crate) fn layer(&self) -> Option<PathBuf> {
        matches!(self.spec.image, Image::Tar(_)).then(|| self.dir.join("layer"))
    }

    /// Directories whose files lie over the host's /usr inside.
    pub(crate) fn dirs_over_usr(&self) -> Vec<PathBuf> {
        let mut dirs = vec![self.dir.join("upper/usr")];
        dirs.extend(self.layer().map(|l| l.join("usr")));
        dirs
    }

    /// How its file systems are laid out; with the pinned base files over the base where that has changed.
    pub(crate) fn rootfs(&self, with_pins: bool) -> RootfsSpec {
        RootfsSpec {
            base: self.base.clone(),
            layer: self.layer(),
            pins: with_pins.then(|| self.dir.join("pins")),
            dir: self.dir.clone(),
            uid_base: self.first_id(),
            hostname: self.name.to_string(),
        }
    }

    /// Mounts its file systems, detached. The earlier mounts must be gone (`index=on` allows one at a time); while the
    /// kernel still takes them down, this waits.
    pub(crate) fn mounts(&self, with_pins: bool) -> Result<Mounts, RootfsError> {
        let spec = self.rootfs(with_pins);
        if let Err(e) = pins::note_use(&self.dir.join("pins"), with_pins)
            && with_pins
        {
            tracing::warn!(proc = %self.name, error = %e, "pins in use cannot be noted");
        }
        let user = self.holdings.get(key::USER).ok_or_else(|| lost(key::USER))?;
        let until = Instant::now() + MOUNT_WITHIN;
        loop {
            match spec.mount(&self.shared.launcher(), user.as_fd()) {
                Err(RootfsError::InUse { .. }) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_micros(300))
                }
                // The layers are not those of the last mount: pins came or went.
                Err(RootfsError::BaseChanged { .. }) => {
                    spec.forget_base()?;
                    return spec.mount(&self.shared.launcher(), user.as_fd());
                }
                other => return other,
            }
        }
    }

    /// Makes the mounts of the next wake ahead of it. All processes must be gone.
    pub(crate) fn prepare_mounts(&self, with_pins: bool) {
        match self.mounts(with_pins) {
            Ok(mounts) => {
                *self.prepared.lock().expect("no holder of this lock panics") = Some(Prepared { mounts, with_pins });
            }
            Err(e) => tracing::debug!(proc = %self.name, error = %e, "no mounts ahead of the wake"),
        }
    }

    /// The mounts of a wake: those made ahead, unless the base has changed since.
    pub(crate) fn take_mounts(&self, with_pins: bool) -> Result<Mounts, RootfsError> {
        let prepared = self.drop_mounts();
        if let Some(prepared) = prepared
            && prepared.with_pins == with_pins
        {
            return Ok(prepared.mounts);
        }
        self.mounts(with_pins)
    }

    /// Gives up what was made ahead.
    pub(crate) fn drop_mounts(&self) -> Option<Prepared> {
        self.prepared.lock().expect("no holder of this lock panics").take()
    }

    /// Namespaces that are held through a sleep, with their CLONE_NEW* types. With `own_ipc` the IPC namespace is not
    /// among them: it goes into the snapshot, with the System V memory in it.
    pub(crate) fn held_namespaces(&self, own_ipc: bool) -> Vec<(i32, Arc<OwnedFd>)> {
        const KINDS: [(&str, i32); 3] =
            [(key::NET, libc_flags::NEWNET), (key::UTS, libc_flags::NEWUTS), (key::IPC, libc_flags::NEWIPC)];
        let kinds = KINDS.iter().filter(|(k, _)| !(own_ipc && *k == key::IPC));
        kinds.filter_map(|(k, kind)| Some((*kind, self.holdings.get(k)?))).collect()
    }
}

/// Types of namespaces, clone(2).
mod libc_flags {
    pub(super) const NEWUTS: i32 = 0x0400_0000;
    pub(super) const NEWIPC: i32 = 0x0800_0000;
    pub(super) const NEWNET: i32 = 0x4000_0000;
}
