//! `/sys` and the runtime socket of a proc: what is mounted there at a start and at a wake, and
//! what a sleeper had.

use crate::fd_store::key;
use crate::host::Proc;
use kip_checkpoint::is_below;
use kip_sandbox::cgroup::GroupView;
use kip_sandbox::sysfs::{self, TARGET};
use kip_sandbox::volume::Volume;
use kip_sys::within;
use kip_types::runtime;
use kip_types::spec::RootKind;
use rustix::fs::{CWD, FileType, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, OpenTreeFlags, open_tree};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

/// Below the data directory: what lies at `/sys/fs/cgroup` in each proc.
pub const PLACES: &str = "run/cgroup";

/// Mount points of a sandbox, from its /proc/PID/mountinfo: those at and below `/sys`, in the order
/// in which they were mounted, and that of the runtime socket. None where an older Kip has started
/// it.
pub(crate) fn points_in(mountinfo: &str) -> Vec<String> {
    let below = |point: &&str| {
        [TARGET, runtime::PATH].contains(point) || point.strip_prefix(TARGET).is_some_and(|rest| rest.starts_with('/'))
    };
    mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).filter(below).map(str::to_owned).collect()
}

/// The mounts of a start, and of a native restore of a proc that had them; with the runtime socket
/// or without.
///
/// # Errors
/// [`sysfs::mounts`], open_tree(2).
pub(crate) fn mounts(proc: &Proc, net: BorrowedFd<'_>, with_runtime: bool) -> io::Result<Vec<Volume>> {
    let mut all = Vec::new();
    if proc.spec().sandbox.root() == RootKind::Writable {
        let (places, views) = of(proc);
        all = sysfs::mounts(net, &places, &views)?;
    }
    if with_runtime {
        match runtime_socket(proc) {
            // The next daemon makes it; the program can do without.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                tracing::warn!(proc = %proc.name, "the file of the runtime socket is gone: the proc has none");
            }
            socket => all.push(socket?),
        }
    }
    Ok(all)
}

/// Whether a sleeper had the runtime socket, by its mount points.
pub(crate) fn has_runtime(points: &[String]) -> bool {
    points.iter().any(|point| point == runtime::PATH)
}

/// Whether the runtime socket can be mounted over the files below `root`: nothing of another shape
/// is in its place, and no volume, which may be the host's.
pub(crate) fn has_runtime_place(proc: &Proc, root: BorrowedFd<'_>) -> bool {
    let spec = proc.spec();
    let targets = spec.volumes.iter().map(|volume| &volume.target).chain(spec.tmpfs.iter().map(|one| &one.target));
    let mut covering = targets.filter(|target| is_below(runtime::PATH, target));
    let kind_of = |path: &str| {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = within::open(root, &path[1..], flags, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS);
        match found {
            Err(Errno::NOENT) => Ok(None),
            found => Ok::<_, Errno>(Some(FileType::from_raw_mode(rustix::fs::fstat(found?)?.st_mode))),
        }
    };
    let is_of = |path: &str, wanted| kind_of(path).is_ok_and(|kind| kind.is_none_or(|kind| kind == wanted));
    covering.next().is_none()
        && ["/run", "/run/kip"].into_iter().all(|path| is_of(path, FileType::Directory))
        && is_of(runtime::PATH, FileType::RegularFile)
}

fn runtime_socket(proc: &Proc) -> io::Result<Volume> {
    let path = proc.shared.data.join(runtime::PLACE).join(runtime::SOCKET);
    let fd = open_tree(CWD, path, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
    let attributes = [MountAttrFlags::MOUNT_ATTR_RDONLY, MountAttrFlags::MOUNT_ATTR_NOSUID];
    let attributes = attributes.into_iter().fold(MountAttrFlags::MOUNT_ATTR_NODEV, MountAttrFlags::union);
    kip_sys::mount::restrict(fd.as_fd(), attributes)?;
    Ok(Volume { fd, target: runtime::PATH.to_owned(), is_dir: false, inode: 0 })
}

/// The mounts that CRIU asks for.
///
/// # Errors
/// [`sysfs::mounts_at`], open_tree(2); `NotFound` where the network namespace is not held.
pub(crate) fn mounts_at(proc: &Proc, points: &[String]) -> io::Result<Vec<Volume>> {
    if points.is_empty() {
        return Ok(Vec::new());
    }
    let net = proc.fd_store.get(key::NET).ok_or(io::ErrorKind::NotFound)?;
    let below: Vec<String> = points.iter().filter(|point| *point != runtime::PATH).cloned().collect();
    let mut all = Vec::new();
    if !below.is_empty() {
        let (places, views) = of(proc);
        all = sysfs::mounts_at(&below, net.as_fd(), &places, &views)?;
    }
    if has_runtime(points) {
        all.push(runtime_socket(proc)?);
    }
    Ok(all)
}

fn of(proc: &Proc) -> (PathBuf, Vec<GroupView>) {
    let host = &proc.shared;
    (host.data.join(PLACES), host.cgroups.views(&proc.cgroup))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_found_in_order() {
        let line = |point: &str| format!("36 35 98:0 / {point} rw - sysfs sysfs rw\n");
        let points = ["/", "/proc/kmsg", "/sys", "/sys/fs/cgroup", "/sysadmin", "/srv/sys", runtime::PATH];
        let text = points.map(line).concat();
        assert_eq!(points_in(&text), ["/sys", "/sys/fs/cgroup", runtime::PATH]);
        assert!(has_runtime(&points_in(&text)) && !has_runtime(&["/sys".to_owned()]));
    }
}
