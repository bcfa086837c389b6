//! `/sys` of a proc: what is mounted there at a start and at a wake, and what a sleeper had.

use crate::fd_store::key;
use crate::host::Proc;
use kip_sandbox::cgroup::GroupView;
use kip_sandbox::sysfs::{self, TARGET};
use kip_sandbox::volume::Volume;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

/// Below the data directory: what lies at `/sys/fs/cgroup` in each proc.
pub const PLACES: &str = "run/cgroup";

/// Mount points of a sandbox, from its /proc/PID/mountinfo: those at and below `/sys`, in the order
/// in which they were mounted. None where an older Kip has started it.
pub(crate) fn points_in(mountinfo: &str) -> Vec<String> {
    let below = |point: &&str| *point == TARGET || point.strip_prefix(TARGET).is_some_and(|rest| rest.starts_with('/'));
    mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).filter(below).map(str::to_owned).collect()
}

/// The mounts of a start, and of a native restore of a proc that had them.
///
/// # Errors
/// [`sysfs::mounts`].
pub(crate) fn mounts(proc: &Proc, net: BorrowedFd<'_>) -> io::Result<Vec<Volume>> {
    let (places, views) = of(proc);
    sysfs::mounts(net, &places, &views)
}

/// The mounts that CRIU asks for.
///
/// # Errors
/// [`sysfs::mounts_at`]; `NotFound` where the network namespace is not held.
pub(crate) fn mounts_at(proc: &Proc, points: &[String]) -> io::Result<Vec<Volume>> {
    if points.is_empty() {
        return Ok(Vec::new());
    }
    let net = proc.fd_store.get(key::NET).ok_or(io::ErrorKind::NotFound)?;
    let (places, views) = of(proc);
    sysfs::mounts_at(points, net.as_fd(), &places, &views)
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
        let text = ["/", "/proc/kmsg", "/sys", "/sys/fs/cgroup", "/sysadmin", "/srv/sys"].map(line).concat();
        assert_eq!(points_in(&text), ["/sys", "/sys/fs/cgroup"]);
    }
}
