//! Owners of a sleeper's open files, fcntl(2) F_SETOWN: set again at a wake, and sent the signal
//! for what came meanwhile.

use crate::descriptors::take;
use crate::host::Proc;
use kip_checkpoint::Owned;
use kip_clocks::tree::{self, Tree};
use kip_net::custody;
use kip_records::body::Body;
use kip_sys::owner::{Owner, Told, Whom, as_user, notifies_owner, notify, set_async, set_owner};
use kip_sys::status::Status;
use std::fs;
use std::io;
use std::os::fd::AsFd;

/// Sets all owners; the processes are there and stopped, and the sockets not yet let go. What
/// cannot be set is logged.
pub fn give(proc: &Proc, body: &Body) {
    if body.owned.is_empty() {
        return;
    }
    let tree = Tree::read(&proc.cgroup.pids().unwrap_or_default());
    for owned in &body.owned {
        if let Err(e) = give_one(proc, &tree, body, owned) {
            tracing::warn!(proc = %proc.name, pid = owned.pid, fd = owned.fd, error = %e, "an open file's owner is not told of it any more");
        }
    }
}

fn give_one(proc: &Proc, tree: &Tree, body: &Body, owned: &Owned) -> io::Result<()> {
    let host = |inside: u32| tree.threads.get(&inside).copied().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
    let process = host(owned.pid)?;
    let file = take(process, owned.fd)?;
    let whom = owned.owner.map(|owner| {
        Ok::<_, io::Error>(match owner {
            kip_checkpoint::SignalReceiver::Thread(thread) => Whom::Thread(host(thread)?),
            kip_checkpoint::SignalReceiver::Process(pid) => Whom::Process(host(pid)?),
            kip_checkpoint::SignalReceiver::Group(group) => Whom::Group(group_of(tree, group)?),
        })
    });
    // One that has ended before the sleep was told of nothing any more.
    let whom = whom.transpose().or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(e) })?;
    let now = Owner { whom, signal: owned.signal };
    let [user, effective] = [owned.by.0, owned.by.1].map(|id| proc.first_id().saturating_add(id));
    as_user(user, effective, || set_owner(file.as_fd(), now))?;
    let target = fs::read_link(format!("/proc/{process}/fd/{}", owned.fd))?;
    let inode = tree::socket_inode(&target.to_string_lossy());
    let Some(socket) = body.sockets.iter().find(|socket| Some(socket.inode) == inode) else {
        // Unlike sockets it may have been opened anew, and as another number first.
        let notifies = owned.notifies || notifies_owner(file.as_fd())?;
        return if notifies { set_async(file.as_fd(), owned.fd) } else { Ok(()) };
    };
    let saved = &socket.options;
    let seen = custody::seen(file.as_fd(), &saved.kind)?;
    let came = seen.queued > saved.seen.queued || seen.ended && !saved.seen.ended || saved.seen.full && !seen.full;
    if !came || !notifies_owner(file.as_fd())? {
        return Ok(());
    }
    for told in told(tree, now, process) {
        match as_user(user, effective, || notify(told, now.signal, owned.fd)) {
            // What that user may not send the kernel would not have sent either.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
            told => told?,
        }
    }
    Ok(())
}

/// The processes that get the owner's signal. A group's get one each: kill(2) would not say which
/// file it is about. `otherwise`: the process of a thread that is in none.
fn told(tree: &Tree, owner: Owner, otherwise: u32) -> Vec<Told> {
    match owner.whom {
        None => Vec::new(),
        Some(Whom::Process(process)) => vec![Told { process, thread: None }],
        Some(Whom::Thread(thread)) => {
            let has_it = |pid: &&u32| fs::metadata(format!("/proc/{pid}/task/{thread}")).is_ok();
            let process = tree.pids.iter().find(has_it).copied().unwrap_or(otherwise);
            vec![Told { process, thread: Some(thread) }]
        }
        Some(Whom::Group(group)) => {
            let members = tree.pids.iter().filter(|pid| group_ids(**pid).is_some_and(|(host, _)| host == group));
            members.map(|&process| Told { process, thread: None }).collect()
        }
    }
}

/// The host's id of a process group, by its id inside.
fn group_of(tree: &Tree, inside: u32) -> io::Result<u32> {
    let found = tree.pids.iter().filter_map(|pid| group_ids(*pid)).find(|(_, group)| *group == inside);
    found.map(|(host, _)| host).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The process group of a process, as the host numbers it and as it is numbered inside:
/// proc_pid_status(5).
fn group_ids(pid: u32) -> Option<(u32, u32)> {
    let status = Status::read(pid).ok()?;
    let mut all = status.field("NSpgid:")?.split_whitespace().filter_map(|n| n.parse().ok());
    let first = all.next()?;
    Some((first, all.next_back().unwrap_or(first)))
}
