//! What of a proc never changes while it exists: name, spec, slot, directories, cgroup; and its
//! held descriptors.

use super::measured::Measured;
use super::resolver::Resolver;
use super::{Host, names};
use crate::console::Console;
use crate::fd_store::{FdStore, key};
use crate::pins;
use crate::tree::Tree;
use kip_image::Digest;
use kip_journal::meter::Meter;
use kip_net::Slot;
use kip_sandbox::cgroup::Cgroup;
use kip_sandbox::launcher::LaunchError;
use kip_sandbox::quota::{OwnFiles, OwnFilesPlace};
use kip_sandbox::rootfs::{Mounts, RootfsError, RootfsSpec, forget_cached};
use kip_types::chain;
use kip_types::{Image, ProcName, Spec};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Directory of a proc for what the pager keeps.
pub const PAGER_DIRECTORY: &str = "pager";
/// How long the mounts of the last run may take to be gone.
const MOUNT_WITHIN: Duration = Duration::from_secs(5);

fn lost(why: &io::Error) -> LaunchError {
    LaunchError::Gone(io::Error::other(format!("its user namespace is no longer held: {why}")))
}

/// A proc's layers, lowest first; none without an image. What is no digest is on no disk.
pub fn layers_of(spec: &Spec) -> Option<Vec<Digest>> {
    match &spec.image {
        Image::Oci(image) => Some(image.layers.iter().filter_map(|layer| layer.parse().ok()).collect()),
        _ => None,
    }
}

/// A proc, apart from its state.
#[derive(Debug)]
pub struct Proc {
    /// Its name.
    pub name: ProcName,
    /// What it was run with.
    pub spec: Spec,
    /// `DATA/procs/NAME`.
    pub dir: PathBuf,
    /// Its own files.
    pub files: Arc<OwnFiles>,
    /// Its place among all of this data directory.
    pub slot: Slot,
    /// The skeleton it was created over.
    pub base: PathBuf,
    /// Its control group.
    pub cgroup: Cgroup,
    /// Descriptors that are held for it.
    pub fd_store: FdStore,
    /// What it has used.
    pub meter: Meter,
    /// What its sleeps have measured.
    pub measured: Measured,
    /// Whose turn it is to ask it: one check at a time.
    pub probing: tokio::sync::Mutex<()>,
    /// Its own terminal or open standard input.
    pub console: Arc<Console>,
    /// Answers its DNS queries.
    pub resolver: Resolver,
    /// What it has of its machine.
    pub shared: Arc<Host>,
}

impl Proc {
    /// A proc that is recorded, in the directory of its name. `fd_store` is empty for one that has
    /// not been here before.
    pub fn new(
        shared: &Arc<Host>,
        spec: Spec,
        slot: Slot,
        base: PathBuf,
        fd_store: FdStore,
        meter: Meter,
    ) -> Arc<Proc> {
        let (name, dir) = (spec.name.clone(), shared.records.directory(&spec.name));
        let cgroup = shared.cgroups.open(&shared.cgroup_name(&name));
        Arc::new(Proc {
            name,
            files: OwnFiles::of(&spec, &dir),
            spec,
            dir,
            slot,
            base,
            cgroup,
            fd_store,
            meter,
            measured: Measured::default(),
            probing: tokio::sync::Mutex::default(),
            console: Arc::default(),
            resolver: Resolver::default(),
            shared: Arc::clone(shared),
        })
    }

    /// First host id of the proc's block of user and group ids.
    pub fn first_id(&self) -> u32 {
        self.shared.first_id(self.slot)
    }

    /// Host pid of the sandbox's pid 1, while it runs.
    pub fn init_pid(&self) -> Option<u32> {
        Tree::read(&self.cgroup.pids().ok()?).init()
    }

    /// Where a tarball was unpacked.
    pub fn layer(&self) -> Option<PathBuf> {
        matches!(self.spec.image, Image::Tar(_)).then(|| self.dir.join("layer"))
    }

    /// Directories whose files lie over the host's /usr inside. Its own are at `place`.
    pub fn dirs_over_usr(&self, place: &OwnFilesPlace) -> Vec<PathBuf> {
        let mut dirs = vec![place.path().join("upper/usr")];
        dirs.extend(self.layer().map(|l| l.join("usr")));
        dirs
    }

    /// How its file systems are laid out, its own files being at `place`; with the pinned base
    /// files over the base where that has changed.
    fn rootfs(&self, place: &Path, with_pins: bool) -> RootfsSpec {
        RootfsSpec {
            base: self.base.clone(),
            layer: self.layer(),
            pins: with_pins.then(|| self.dir.join("pins")),
            image: layers_of(&self.spec).map(|layers| self.shared.images.layer_dirs(&layers)),
            dir: place.to_owned(),
            uid_base: self.first_id(),
            hostname: self.spec.hostname().to_owned(),
            hosts: self.spec.extra_hosts.iter().map(|host| format!("{}\t{}\n", host.addr, host.name)).collect(),
            resolv_conf: names::resolv_conf(self),
        }
    }

    /// Mounts the file systems of a parked proc, as [`Proc::mounts_of`].
    fn mounts(&self, with_pins: bool) -> Result<Mounts, RootfsError> {
        let user = self.held_user().map_err(|e| lost(&e))?;
        self.mounts_of(user.as_fd(), with_pins)
    }

    /// Mounts its file systems, detached, with the mapping of ids of a user namespace. The earlier
    /// mounts must be gone (`index=on` allows one at a time); while the kernel still takes them
    /// down, this waits.
    pub fn mounts_of(&self, user: BorrowedFd<'_>, with_pins: bool) -> Result<Mounts, RootfsError> {
        let place = self.files.place().map_err(|e| RootfsError::Place(chain(&e)))?;
        let spec = self.rootfs(place.path(), with_pins);
        if let Err(e) = pins::note_use(&self.dir.join("pins"), with_pins)
            && with_pins
        {
            tracing::warn!(proc = %self.name, error = %e, "pins in use cannot be noted");
        }
        let until = Instant::now() + MOUNT_WITHIN;
        let mounted = loop {
            match spec.mount(&self.shared.launcher(), user) {
                Err(RootfsError::InUse { .. }) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_micros(300))
                }
                // The layers are not those of the last mount: pins came or went.
                Err(RootfsError::BaseChanged { .. }) => {
                    spec.forget_base()?;
                    break spec.mount(&self.shared.launcher(), user);
                }
                other => break other,
            }
        };
        if mounted.is_ok() {
            names::write_at(self, &place);
        }
        mounted
    }

    /// Other mounts of its filesystems while it runs. Held through the sleep they keep them as they
    /// are, and with them what the kernel knows by inode: sockets that have a path, FIFOs, open
    /// files that are deleted.
    pub fn copy_mounts(&self, init: u32) -> io::Result<Mounts> {
        let pidfd = kip_sys::process::pidfd_open(init)?;
        self.shared.launcher().copy_mounts(pidfd.as_fd()).map_err(io::Error::other)
    }

    /// The mounts that are held, unless a wake is to have others: pins over the base, or no longer.
    pub fn held_mounts(&self, with_pins: bool) -> Option<Mounts> {
        let get = |key| self.fd_store.get(key)?.try_clone().ok();
        let are_those = with_pins == pins::are_in_use(&self.dir.join("pins"));
        let (root, usr) = (get(key::ROOT)?, get(key::USR)?);
        Some(Mounts { root, usr, terminals: None, volumes: Vec::new() }).filter(|_| are_those)
    }

    /// Holds the mounts of a wake that has failed again, from the mount namespace that it made:
    /// with them the file systems live on, and what watches files in them (inotify(7)). New ones
    /// would be file systems of their own.
    pub fn hold_mounts_again(&self, namespace: BorrowedFd<'_>) {
        let held = self.shared.launcher().copy_mounts(namespace).map_err(io::Error::other).and_then(|mounts| {
            let mut fds = vec![(key::ROOT.to_owned(), mounts.root), (key::USR.to_owned(), mounts.usr)];
            fds.extend(mounts.terminals.map(|fd| (key::TERMINALS.to_owned(), fd)));
            self.fd_store.hold(fds).map_err(io::Error::other)
        });
        if let Err(error) = held {
            tracing::info!(proc = %self.name, %error, "the mounts of a wake that failed are gone, files are watched anew");
        }
    }

    /// What is held of its files is to be no more than it needs.
    pub fn forget_cached_files(&self) {
        for mount in [key::ROOT, key::USR].into_iter().filter_map(|key| self.fd_store.get(key)) {
            if let Err(error) = forget_cached(mount.as_fd()) {
                tracing::debug!(proc = %self.name, %error, "what the kernel remembers of its files stays");
            }
        }
    }

    /// The mounts of a wake: those that are held, or new ones. They are held no longer, for nothing
    /// can be attached twice.
    pub fn take_mounts(&self, with_pins: bool) -> Result<Mounts, RootfsError> {
        // Held mounts live on when their layers are deleted, but the deleted files are not in them.
        self.rootfs(&self.dir, with_pins).check_layers()?;
        let held = self.held_mounts(with_pins);
        // Its terminals are what they were, whatever its files lie over.
        let terminals = self.fd_store.get(key::TERMINALS).and_then(|fd| fd.try_clone().ok());
        if let Err(e) = self.fd_store.drop_prefix(key::MOUNTS) {
            tracing::warn!(proc = %self.name, error = %e, "the keeper did not let mounts go");
        }
        let mounts = held.map_or_else(|| self.mounts(with_pins), Ok)?;
        Ok(Mounts { terminals, ..mounts })
    }

    /// Namespaces that are held through parking, with their CLONE_NEW* types.
    pub fn held_namespaces(&self) -> Vec<(i32, Arc<OwnedFd>)> {
        KINDS.iter().filter_map(|(k, _, kind)| Some((*kind, self.fd_store.get(k)?))).collect()
    }

    /// The user namespace of a parked proc.
    pub fn held_user(&self) -> io::Result<OwnedFd> {
        if let Some(user) = self.fd_store.get(key::USER) {
            return user.try_clone();
        }
        let ipc = self.fd_store.get(key::IPC).ok_or(io::ErrorKind::NotFound)?;
        kip_sys::ns::owner(ipc.as_fd())
    }
}

/// Namespaces by key, name in /proc/PID/ns and type.
const KINDS: [(&str, &str, i32); 3] = [
    (key::NET, "net", libc_flags::NEWNET),
    (key::UTS, "uts", libc_flags::NEWUTS),
    (key::IPC, "ipc", libc_flags::NEWIPC),
];

/// A namespace of a running proc: its key in the fd store, its CLONE_NEW* type.
pub struct Namespace {
    /// What it is held as.
    pub key: &'static str,
    /// `CLONE_NEW*` of clone(2).
    pub kind: i32,
    /// The namespace.
    pub fd: OwnedFd,
}

/// The namespaces of a running sandbox that are to be held when it is parked. With `own_ipc` the
/// IPC namespace is not among them: it goes into the snapshot, with the System V memory in it.
pub fn namespaces_of(init: u32, own_ipc: bool) -> io::Result<Vec<Namespace>> {
    let kinds = KINDS.iter().filter(|(key, ..)| !(own_ipc && *key == key::IPC));
    let open = |(key, name, kind): &(&'static str, &str, i32)| {
        Ok(Namespace { key, kind: *kind, fd: File::open(format!("/proc/{init}/ns/{name}"))?.into() })
    };
    kinds.map(open).collect()
}

/// The user namespace that the IPC namespace of a running sandbox belongs to.
pub fn user_of(init: u32) -> io::Result<OwnedFd> {
    kip_sys::ns::owner(File::open(format!("/proc/{init}/ns/ipc"))?.as_fd())
}

/// Types of namespaces, clone(2).
mod libc_flags {
    pub(super) const NEWUTS: i32 = 0x0400_0000;
    pub(super) const NEWIPC: i32 = 0x0800_0000;
    pub(super) const NEWNET: i32 = 0x4000_0000;
}
