//! The launcher's own mount namespace: a small tmpfs and nothing of the host's.
//!
//! Every sandbox's mount namespace begins as a copy of this one, so what is not here cannot leak,
//! and copying is cheap. It holds `/dev/null` (for masks), `/new` (where a sandbox's root is
//! attached before pivot_root), `/l/N` (where the layers of an overlay are attached while it is
//! mounted: kernels before 6.15 take no detached mount as a layer) and `/proc`, for its being
//! there: within a user namespace the kernel mounts a proc only beside one that is wholly visible
//! (mount_namespaces(7)). With everything else of the template it is gone from a sandbox when that
//! changes its root.

use crate::protocol::{Failure, Step};
use kip_types::spec::RootKind;
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, unmount,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Where the sandbox's root is attached.
pub(super) const NEW_ROOT: &str = "/new";
/// Where the layers are. Short, for the paths of all of them are one option of a mount.
pub(super) const LAYERS: &str = "/l";
/// Where a /proc is mounted; no process uses this path.
const PROC: &str = "/proc";
/// A child gives up the launcher's memory within this time, or never.
const ALONE_WITHIN: Duration = Duration::from_secs(5);
/// Most layers of a root and its /usr together; an image has at most 127 (the limit of the tools
/// that build them).
pub(super) const MOST_LAYERS: usize = 200;

/// What the launcher keeps of the host: descriptors that cannot be walked out of.
#[derive(Debug)]
pub(super) struct Template {
    /// The template's /proc, of the launcher's own pid namespace: the host's.
    pub proc: OwnedFd,
    /// The launcher's own pid namespace, to come back to.
    pub pid_namespace: OwnedFd,
    /// Its own time namespace, likewise; none where the kernel has none.
    pub time_namespace: Option<OwnedFd>,
}

impl Template {
    /// Moves the calling process into a new mount namespace with only the template in it.
    pub fn enter() -> Result<Template, Failure> {
        let at = |e: rustix::io::Errno| Failure::new(Step::Template, e);
        let pid_namespace =
            rustix::fs::open("/proc/self/ns/pid", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(at)?;
        let time_namespace =
            rustix::fs::open("/proc/self/ns/time", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
        let mount = kip_sys::ns::Unshare { mount: true, ..Default::default() };
        kip_sys::ns::unshare(mount).map_err(Failure::at(Step::Template))?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).map_err(at)?;
        let tmpfs = mount_new("tmpfs", &[], MountAttrFlags::empty()).map_err(at)?;
        fill(&tmpfs).map_err(at)?;
        // Any directory will do, for the namespace it is in is left at once.
        move_mount(&tmpfs, "", CWD, "/proc", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(at)?;
        rustix::process::fchdir(&tmpfs).map_err(at)?;
        enter_root().map_err(at)?;
        let proc = mount_proc(RootKind::Writable).map_err(at)?;
        move_mount(&proc, "", CWD, PROC, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(at)?;
        Ok(Template { proc, pid_namespace, time_namespace })
    }
}

/// Makes children in another time namespace. Only a process that shares its memory with no other
/// may enter one, so it is the launcher itself that does, and comes back.
pub(super) fn in_time<T>(
    template: &Template,
    enter: impl FnMut() -> rustix::io::Result<()>,
    make: impl FnOnce() -> T,
) -> Result<T, Failure> {
    alone(enter).map_err(Failure::at(Step::Namespaces))?;
    let made = make();
    let own = template.time_namespace.as_ref().expect("a kernel with another one has its own");
    alone(|| move_into_link_name_space(own.as_fd(), Some(LinkNameSpaceType::Time)))
        .expect("a way back to one's own time namespace");
    Ok(made)
}

/// Tries until nothing shares memory with the launcher any more: a child for which it has waited as
/// vfork(2) does lets it go on before the memory is given up, by a moment that is long where the
/// processor is taken from the child.
fn alone<T>(mut enter: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    let until = Instant::now() + ALONE_WITHIN;
    loop {
        match enter() {
            Err(rustix::io::Errno::USERS) if Instant::now() < until => std::thread::sleep(Duration::from_micros(50)),
            done => return done,
        }
    }
}

fn fill(tmpfs: &OwnedFd) -> rustix::io::Result<()> {
    let (mode, null) = (Mode::from(0o755), rustix::fs::makedev(1, 3));
    for dir in ["dev", &NEW_ROOT[1..], &LAYERS[1..], &PROC[1..]] {
        rustix::fs::mkdirat(tmpfs, dir, mode)?;
    }
    for n in 0..=MOST_LAYERS {
        rustix::fs::mkdirat(tmpfs, format!("{}/{n}", &LAYERS[1..]), mode)?;
    }
    rustix::fs::mknodat(tmpfs, "dev/null", FileType::CharacterDevice, Mode::from(0o666), null)
}

/// Makes the working directory, which is the root of a mount, the root of the mount namespace and
/// drops the old one: pivot_root(2), "pivot_root(".", ".")".
pub(super) fn enter_root() -> rustix::io::Result<()> {
    rustix::process::pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")
}

/// A new detached mount of the /proc of the caller's pid namespace. Beside a sealed root it has
/// only the processes: nothing of the machine, and nothing that would have to be masked.
pub(super) fn mount_proc(kind: RootKind) -> rustix::io::Result<OwnedFd> {
    let safe = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let options: &[(&str, &str)] = if kind == RootKind::Sealed { &[("subset", "pid")] } else { &[] };
    mount_new("proc", options, safe)
}

/// A new detached mount of a filesystem without a source.
fn mount_new(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> rustix::io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    options.iter().try_for_each(|(key, value)| fsconfig_set_string(&context, *key, *value))?;
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}
