//! What a proc has apart from its state: key, slot, directories and cgroup, which never change
//! while it exists; its name and its spec, which an update replaces as a whole; and its held
//! descriptors.

use super::egress::EgressControl;
use super::measured::Measured;
use super::resolver::Resolver;
use super::{Host, names};
use crate::fd_store::{FdStore, key};
use crate::pins;
use kip_clocks::AbsoluteWaits;
use kip_clocks::tree::Tree;
use kip_image::Digest;
use kip_journal::meter::Meter;
use kip_logs::console::Console;
use kip_net::Slot;
use kip_sandbox::cgroup::Cgroup;
use kip_sandbox::launcher::{CopiedMounts, LaunchError};
use kip_sandbox::quota::{OwnFiles, OwnFilesPlace};
use kip_sandbox::rootfs::{Mounts, RootfsError, RootfsSpec, forget_cached};
use kip_types::chain;
use kip_types::spec::RootKind;
use kip_types::{CurrentName, Image, ProcName, Spec};
use parking_lot::{Mutex, RwLock};
use rustix::thread::UnshareFlags;
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
    /// The name of its directory, its cgroup, and of what keeper, pager and logs have of it. It is
    /// the name that the proc was made with, unless a proc that was renamed since had that one.
    pub key: ProcName,
    /// Its name for clients and for other procs.
    pub name: CurrentName,
    /// What it was run with, as the last update has left it.
    spec: RwLock<Arc<Spec>>,
    /// `DATA/procs/KEY`.
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
    /// Its waits until absolute times, each as it was when a look at it first found it.
    pub absolute_waits: Mutex<AbsoluteWaits>,
    /// Whose turn it is to ask it: one check at a time.
    pub probing: tokio::sync::Mutex<()>,
    /// Held while its ports are reserved and published for a start, or pass to another proc.
    pub placing: tokio::sync::Mutex<()>,
    /// Held by a wake, and by what makes the generation of a clone one like any other: that puts
    /// other files in the place of those that the wake reads.
    pub settling: RwLock<()>,
    /// Its own terminal or open standard input.
    pub console: Arc<Console>,
    /// What it may call outside its network.
    pub egress: Arc<EgressControl>,
    /// Answers its DNS queries.
    pub resolver: Resolver,
    /// What it has of its machine.
    pub shared: Arc<Host>,
}

impl Proc {
    /// A proc that is recorded, in the directory of its key. `fd_store` is empty for one that has
    /// not been here before.
    pub fn new(
        shared: &Arc<Host>,
        key: ProcName,
        spec: Spec,
        slot: Slot,
        base: PathBuf,
        fd_store: FdStore,
        meter: Meter,
    ) -> Arc<Proc> {
        let (name, dir) = (CurrentName::new(spec.name.clone()), shared.records.directory(&key));
        let cgroup = shared.cgroups.open(&shared.cgroup_name(&key));
        let egress = Arc::new(EgressControl::open(&spec, &dir));
        Arc::new(Proc {
            key,
            name,
            files: OwnFiles::of(&spec, &dir),
            spec: RwLock::new(Arc::new(spec)),
            dir,
            slot,
            base,
            cgroup,
            fd_store,
            meter,
            measured: Measured::default(),
            absolute_waits: Mutex::default(),
            probing: tokio::sync::Mutex::default(),
            placing: tokio::sync::Mutex::default(),
            settling: RwLock::default(),
            console: Arc::default(),
            resolver: Resolver::default(),
            egress,
            shared: Arc::clone(shared),
        })
    }

    /// What it was run with, as the last update has left it. One value does not change while a
    /// caller has it.
    pub fn spec(&self) -> Arc<Spec> {
        Arc::clone(&self.spec.read())
    }

    /// Replaces the spec, after the new one is on disk. Only limits, timing, labels, the restart
    /// policy and the way to end may differ: everything else was acted on when the proc was made.
    pub fn set_spec(&self, spec: Spec) {
        *self.spec.write() = Arc::new(spec);
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
        matches!(self.spec().image, Image::Tar(_)).then(|| self.dir.join("layer"))
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
            image: layers_of(&self.spec()).map(|layers| self.shared.images.layer_dirs(&layers)),
            kind: self.spec().sandbox.root(),
            dir: match self.spec().sandbox.root() {
                RootKind::Writable => place.to_owned(),
                RootKind::Sealed => self.shared.base.sealed.clone(),
            },
            uid_base: self.first_id(),
            hostname: self.spec().hostname().to_owned(),
            hosts: self.spec().extra_hosts.iter().map(|host| format!("{}\t{}\n", host.addr, host.name)).collect(),
            resolv_conf: names::resolv_conf(self),
        }
    }

    /// Mounts the file systems of a parked proc, as [`Proc::mounts_of`].
    ///
    /// # Errors
    /// See [`RootfsError`].
    pub(crate) fn mounts(&self, with_pins: bool) -> Result<Mounts, RootfsError> {
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

    /// Other mounts of its filesystems while it runs, and of those in memory at these places. Held
    /// through the sleep they keep them as they are, and with them what the kernel knows by inode:
    /// sockets that have a path, FIFOs, open files that are deleted.
    pub fn copy_mounts(&self, init: u32, in_memory: &[String]) -> io::Result<CopiedMounts> {
        let pidfd = kip_sys::process::pidfd_open(init)?;
        self.shared.launcher().copy_mounts(pidfd.as_fd(), in_memory).map_err(io::Error::other)
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
    ///
    /// `in_memory` are places and keys of the file systems in memory that were held.
    pub fn hold_mounts_again(&self, namespace: BorrowedFd<'_>, in_memory: Vec<(String, String)>) {
        let (points, keys): (Vec<String>, Vec<String>) = in_memory.into_iter().unzip();
        let copied = self.shared.launcher().copy_mounts(namespace, &points).map_err(io::Error::other);
        let held = copied.and_then(|CopiedMounts { files: mounts, in_memory }| {
            let mut fds: Vec<(String, OwnedFd)> = keys.into_iter().zip(in_memory).collect();
            fds.extend([(key::ROOT.to_owned(), mounts.root), (key::USR.to_owned(), mounts.usr)]);
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
        self.restrict(&mounts)?;
        Ok(Mounts { terminals, ..mounts })
    }

    /// Makes mounts of its files read-only, if its owner wants them so. Those that are held are so
    /// already, for they were copied from its own.
    ///
    /// # Errors
    /// [`kip_sys::mount::restrict`].
    pub fn restrict(&self, mounts: &Mounts) -> Result<(), RootfsError> {
        let read_only = rustix::mount::MountAttrFlags::MOUNT_ATTR_RDONLY;
        let all = [&mounts.root, &mounts.usr].into_iter().filter(|_| self.spec().read_only);
        let set = |mount: &OwnedFd| kip_sys::mount::restrict(mount.as_fd(), read_only);
        all.into_iter().try_for_each(set).map_err(RootfsError::ReadOnly)
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
    (key::NET, "net", setns_type(UnshareFlags::NEWNET)),
    (key::UTS, "uts", setns_type(UnshareFlags::NEWUTS)),
    (key::IPC, "ipc", setns_type(UnshareFlags::NEWIPC)),
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
/// IPC namespace is not among them: it goes into the snapshot, with the System V IPC in it.
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

/// A type of namespaces as setns(2) takes it.
const fn setns_type(kind: UnshareFlags) -> i32 {
    kind.bits().cast_signed()
}
