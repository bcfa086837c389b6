//! `/sys` of a sandbox: the kernel's, as its network namespace has it, and in it the sandbox's own
//! control groups where programs look for those of the machine.
//!
//! All of it is read-only, and none of it is made by the sandbox's root, which owns nothing there.
//! A runtime that sizes itself by its limits (a JVM, Node) finds them at the paths that
//! cgroups(7) names. The mounts are attached as volumes are, and for CRIU they are mounts from
//! outside. Source: sysfs(5), cgroups(7).

use crate::cgroup::GroupView;
use crate::volume::Volume;
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsmount, fsopen, open_tree,
};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Where it is mounted inside.
pub const TARGET: &str = "/sys";
/// Where control groups are inside.
pub const GROUPS: &str = "/sys/fs/cgroup";

/// The directories on which groups are mounted: one for each hierarchy of version 1.
const PLACES: [&str; 6] = ["memory", "cpu", "pids", "cpuacct", "freezer", "cpuset"];

/// Makes the directory that lies at [`GROUPS`] in each sandbox, on a machine that has hierarchies
/// of version 1.
///
/// # Errors
/// mkdir(2).
pub fn make_places(directory: &Path) -> io::Result<()> {
    for place in PLACES {
        fs::create_dir_all(directory.join(place))?;
    }
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))
}

/// The mounts of a sandbox in the order in which they are attached. `net` is its network namespace,
/// `places` the directory of [`make_places`].
///
/// # Errors
/// setns(2), fsopen(2), fsmount(2), open_tree(2).
pub fn mounts(net: BorrowedFd<'_>, places: &Path, groups: &[GroupView]) -> io::Result<Vec<Volume>> {
    let mut all = vec![mounted(kernel_tree(net)?, TARGET.to_owned())];
    let in_places = groups.iter().any(|group| group.controller.is_some());
    if in_places {
        all.push(mounted(read_only(places)?, GROUPS.to_owned()));
    }
    for group in groups {
        let target = group.controller.map_or_else(|| GROUPS.to_owned(), |controller| format!("{GROUPS}/{controller}"));
        all.push(mounted(read_only(&group.directory)?, target));
    }
    Ok(all)
}

/// The mounts of a sandbox whose points were these, for CRIU, which wants each of them: what this
/// machine does not have is an empty directory.
///
/// # Errors
/// As [`mounts`].
pub fn mounts_at(
    points: &[String],
    net: BorrowedFd<'_>,
    places: &Path,
    groups: &[GroupView],
) -> io::Result<Vec<Volume>> {
    let mut here = mounts(net, places, groups)?;
    let one = |point: &String| match here.iter().position(|mount| mount.target == *point) {
        Some(found) => Ok(here.swap_remove(found)),
        None => Ok(mounted(read_only(&places.join(PLACES[0]))?, point.clone())),
    };
    points.iter().map(one).collect()
}

fn mounted(fd: OwnedFd, target: String) -> Volume {
    Volume { fd, target, is_dir: true, inode: 0 }
}

const ATTRIBUTES: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_RDONLY
    .union(MountAttrFlags::MOUNT_ATTR_NOSUID)
    .union(MountAttrFlags::MOUNT_ATTR_NODEV)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// What the kernel shows is that of the network namespace of the thread that makes the mount.
fn kernel_tree(net: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let make = || -> io::Result<OwnedFd> {
        kip_sys::netns::enter_net(net)?;
        let context = fsopen("sysfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, ATTRIBUTES)?)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("kip-sysfs".to_owned()).spawn_scoped(scope, make)?;
        thread.join().expect("making a mount does not panic")
    })
}

fn read_only(directory: &Path) -> io::Result<OwnedFd> {
    let mount = open_tree(CWD, directory, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
    kip_sys::mount::restrict(mount.as_fd(), ATTRIBUTES)?;
    Ok(mount)
}
