//! The inotify instances of a parked proc: held, so that watches and queue live on, and polled, so
//! that a file that changes wakes it as it would have woken the program. See
//! [`kip_checkpoint::inotify`].

use crate::descriptors::duplicate;
use crate::descriptors::seen;
use crate::fd_store::key;
use crate::host::Proc;
use kip_checkpoint::inotify::InotifyInstance;
use kip_clocks::tree::{self, Tree};
use kip_criu_images::{CheckpointImageError, Images};
use kip_net::custody;
use kip_records::body::SleepingInotify;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Bytes of events that wait, by where the instance is open: host pid, descriptor.
pub type InotifyEvents = BTreeMap<(u32, i32), u32>;

/// Its descriptor, if it is held.
pub fn held(instance: &SleepingInotify, proc: &Proc) -> Option<Arc<OwnedFd>> {
    proc.fd_store.get(&key_of(instance.id))
}

/// To be called once the processes are gone. What their end did to files of theirs does not wake
/// the proc.
pub fn ignore_end_of_processes(instance: &mut SleepingInotify, proc: &Proc) {
    if instance.sees_sleep
        && let Some(fd) = held(instance, proc)
    {
        instance.queued = custody::queued_events(fd.as_fd()).unwrap_or(0).max(instance.queued);
    }
}

/// Instances and, with their keys, their descriptors.
pub type Taken = (Vec<SleepingInotify>, Vec<(String, OwnedFd)>);

/// Its key in the fd store.
pub fn key_of(id: u64) -> String {
    format!("{}{id}", key::INOTIFY)
}

/// Where each inotify instance of the tree is open, as (host pid, descriptor); one may be in
/// several places.
pub fn places(tree: &Tree) -> Vec<(u32, i32)> {
    let of =
        |pid: u32| tree::descriptors(pid).unwrap_or_default().into_iter().map(move |(fd, target)| (pid, fd, target));
    let all = tree.pids.iter().flat_map(|&pid| of(pid));
    all.filter(|(.., target)| target == "anon_inode:inotify").map(|(pid, fd, _)| (pid, fd)).collect()
}

/// How much waits in each.
pub fn events(tree: &Tree) -> InotifyEvents {
    let queued = |place: (u32, i32)| {
        let fd = duplicate(place.0, place.1).ok()?;
        Some((place, custody::queued_events(fd.as_fd()).ok()?))
    };
    places(tree).into_iter().filter_map(queued).collect()
}

/// The inotify instances and, with their keys, their descriptors. One that cannot be had is CRIU's
/// to make anew.
pub fn take(tree: &Tree, images: &Images, before: &InotifyEvents) -> Result<Taken, CheckpointImageError> {
    let mut taken = (Vec::new(), Vec::new());
    for InotifyInstance { object, sees_sleep } in kip_checkpoint::inotify::instances(images)? {
        let Some(&host) = tree.threads.get(&object.pid) else { continue };
        let Ok(fd) = duplicate(host, object.fd) else { continue };
        let queued = |queued| custody::Seen { queued, ..custody::Seen::default() };
        let frozen = custody::queued_events(fd.as_fd()).unwrap_or(0);
        let known = before.get(&(host, object.fd)).copied().unwrap_or(0);
        let queued = seen(queued(known), queued(frozen)).queued;
        taken.0.push(SleepingInotify { id: object.id, queued, sees_sleep });
        taken.1.push((key_of(object.id), fd));
    }
    Ok(taken)
}
