//! What a frozen tree has beside its images, and where it goes: sockets and objects to the keeper,
//! memory that was paged out to its generation.

use super::{Freeze, ParkError};
use crate::descriptors::{duplicate, places, seen};
use crate::fd_store::key;
use crate::host::proc::{PAGER_DIRECTORY, Proc, namespaces_of, user_of};
use kip_checkpoint::{plan, sockets};
use kip_clocks::tree::Tree;
use kip_criu_images::Images;
use kip_net::custody::{self, SavedOptions};
use kip_net::renewal;
use kip_records::body::SleepingSocket;
use kip_remake::ObjectNote;
use kip_snapshot::carry::{self, Growing};
use kip_snapshot::pages::PageMap;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// What the processes never brought back from where it was, with the pager's files; without what
/// CRIU has written, to whose map go the working sets.
pub(super) fn paged_out(freeze: &Freeze<'_>, map: &mut PageMap, tree: &Tree) -> Result<Option<PageMap>, ParkError> {
    let proc = freeze.proc;
    if !freeze.paged_out {
        return Ok(None);
    }
    let told = proc.dir.join(PAGER_DIRECTORY).join("told");
    proc.shared.pager.account(proc.key.as_str(), &told).map_err(ParkError::Account)?;
    let of_hosts = PageMap::load_from(&told);
    let _ = fs::remove_file(&told);
    let PageMap { files, processes } = of_hosts.map_err(ParkError::Carry)?;
    let mut carried = PageMap { files, ..PageMap::default() };
    for (host, mut process) in processes {
        let inside = tree.threads.iter().find(|(_, tid)| **tid == host).map(|(inside, _)| *inside);
        let Some((inside, own)) = inside.and_then(|inside| Some((inside, map.processes.get_mut(&inside)?))) else {
            return Err(ParkError::Unmatched { pid: host });
        };
        own.sets = std::mem::take(&mut process.sets);
        carried.processes.insert(inside, process);
    }
    Ok(Some(carried))
}

/// Where the memory of all processes lies: what was written, or is held, and what was paged out.
pub(super) fn carry_over(
    proc: &Proc,
    mut map: PageMap,
    paged_out: Option<PageMap>,
    growing: &Path,
    into: Growing<'_>,
) -> Result<PageMap, ParkError> {
    let Some(mut carried) = paged_out else { return Ok(map) };
    for (inside, process) in &mut carried.processes {
        process.runs = carry::without(&process.runs, &map.processes[inside].runs);
    }
    let directory = proc.dir.join(PAGER_DIRECTORY);
    carry::carry(&mut map, growing, &carried, &directory, into).map_err(ParkError::Carry)?;
    carry::write_sets(&mut map, growing).map_err(ParkError::Carry)?;
    Ok(map)
}

pub(super) fn take_sockets(
    tree: &Tree,
    wanted: &[sockets::Socket],
    before: &BTreeMap<u32, SavedOptions>,
) -> Result<Vec<(OwnedFd, SleepingSocket)>, ParkError> {
    let places = if wanted.is_empty() { BTreeMap::new() } else { places(tree) };
    let mut taken = Vec::new();
    for socket in wanted {
        let failed = |source| ParkError::Socket { inode: socket.inode, source };
        let (pid, number) = places.get(&socket.inode).copied().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let fd = duplicate(pid, number).map_err(failed)?;
        let frozen = custody::snapshot_options(fd.as_fd()).map_err(|e| failed(io::Error::other(e)))?;
        let known = before.get(&socket.inode);
        // A socket that was made since: it is not known whether the program has looked.
        let seen = seen(known.map_or(custody::Seen::default(), |k| k.seen), frozen.seen);
        let mut options = known.copied().unwrap_or(frozen);
        options.seen = seen;
        let recipe = Some(renewal::recipe(fd.as_fd()).map_err(failed)?);
        taken.push((fd, SleepingSocket { inode: socket.inode, options, recipe }));
    }
    Ok(taken)
}

/// Inodes of the tree's connections to Kip: the runtime socket.
pub(super) fn to_kip(proc: &Proc, tree: &Tree) -> BTreeSet<u32> {
    if proc.fd_store.keys(key::RUNTIME).is_empty() {
        return BTreeSet::new();
    }
    let is_one = |place: &(u32, i32)| duplicate(place.0, place.1).is_ok_and(|fd| custody::is_to_kip(fd.as_fd()));
    places(tree).into_iter().filter(|(_, place)| is_one(place)).map(|(inode, _)| inode).collect()
}

/// What can be held instead of rebuilt, with its key; none if the tree is for CRIU in any case.
pub(super) fn take_objects(
    tree: &Tree,
    images: &Images,
    first_id: u32,
    noted: &mut Vec<ObjectNote>,
) -> Result<Option<Vec<(String, OwnedFd)>>, ParkError> {
    let mut taken = Vec::new();
    for object in plan::objects(images)? {
        let Some(&host) = tree.threads.get(&object.pid) else { return Ok(None) };
        // Without it the wake takes the other way.
        let Ok(fd) = duplicate(host, object.fd) else { return Ok(None) };
        noted.extend(ObjectNote::of(object, &fd, first_id).map_err(ParkError::Tree)?);
        taken.push((format!("{}{}", key::OBJECT, object.id), fd));
    }
    Ok(Some(taken))
}

/// What only its processes keep alive, with its keys.
pub(super) fn take_namespaces(init: u32, own_ipc: bool) -> io::Result<Vec<(String, OwnedFd)>> {
    let mut taken: Vec<_> = namespaces_of(init, own_ipc)?.into_iter().map(|n| (n.key.to_owned(), n.fd)).collect();
    if own_ipc {
        taken.push((key::USER.to_owned(), user_of(init)?));
    }
    Ok(taken)
}
