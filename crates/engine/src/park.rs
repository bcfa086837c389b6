//! Parks a running proc: one pass from a frozen tree to a recorded generation, or back to the tree
//! running on.
//!
//! Steps, each of which a crash may follow:
//!
//! ```text
//! record Parking -> CRIU freezes and dumps -> duplicate sockets -> mend images -> pin base files
//!   -> seal (sync, read back, rename) -> keeper holds the sockets -> record Parked -> CRIU kills the tree
//! ```
//!
//! Until "record Parked" the tree runs on whatever happens, the daemon's death included: CRIU
//! resumes it when its socket closes. A tree found running under a recorded Parked is newer than
//! the snapshot and wins (recovery).

mod error;
mod sample;

pub use error::ParkError;
use sample::{Ran, sample_before_freeze};

use crate::descriptors::{duplicate, pipe_key, places, seen, take};
use crate::fd_store::key;
use crate::host::proc::PAGER_DIRECTORY;
use crate::host::proc::{Proc, namespaces_of, user_of};
use crate::inotify;
use crate::lifted;
use crate::pins;
use crate::plans::plan_of;
use crate::survey;
use crate::suspend::{self, is_connection};
use crate::sysfs;
use crate::system_v;
use crate::terminals;
use crate::tmpfs;
use crate::volumes;
use kip_checkpoint::dump::{DumpRequest, Log, Stage, dump};
use kip_checkpoint::policy::mount_key;
use kip_checkpoint::remake::ObjectNote;
use kip_checkpoint::{attributes, is_below, mend_proc_paths, page_map, plan, sockets, take_owners, use_other_names};
use kip_clocks::tree::Tree;
use kip_clocks::{Boot, Frozen, Now, Pending};
use kip_criu_images::fields::mm_entry;
use kip_criu_images::{Images, bars_criu};
use kip_net::custody::{self, SavedOptions};
use kip_net::renewal;
use kip_records::body::{Body, ImagesHome, SleepingSocket, SleepingTerminals, Slept};
use kip_sandbox::launcher::CopiedMounts;
use kip_sandbox::quota::OwnFilesPlace;
use kip_sandbox::rootfs::Mounts;
use kip_snapshot::carry;
use kip_snapshot::pages::PageMap;
use kip_snapshot::{Contents, Sealed};
use kip_stop::limits::Lifted;
use kip_sys::{fault, timens};
use kip_types::chain;
use kip_types::spec::Clock;
use kip_types::{Generation, Image};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Largest deleted file that is taken into a snapshot, bytes.
const GHOST_LIMIT: u32 = 1 << 30;

/// Whether the proc was started with a devpts, and CRIU's words for the terminals that it has open.
struct Terminals {
    there: bool,
    open: BTreeSet<String>,
}

/// What was read while the program still ran.
struct Seen {
    ran: Ran,
    masks: Vec<String>,
    /// Mount points at and below `/sys`.
    sys: Vec<String>,
    /// Timer slacks, nanoseconds, by ids of threads inside.
    slacks: BTreeMap<u32, u64>,
    volumes: Vec<Slept>,
    own_ipc: bool,
    /// Some memory of the proc may be paged out: the pager knows it.
    paged_out: bool,
    /// Its owner asks for this one sleep, and says that of its clock.
    once: Option<Option<Clock>>,
    /// Other mounts of its files.
    mounts: Option<CopiedMounts>,
    /// Its file systems in memory.
    tmpfs: Vec<tmpfs::Running>,
    /// Where its own files are.
    place: OwnFilesPlace,
    /// Its terminals.
    terminals: Terminals,
    /// Host pid of its pid 1.
    init: u32,
    /// Limits that are lifted until this is dropped.
    lifted: Vec<(u32, Lifted)>,
}

/// What was made of a frozen tree.
struct Finalized {
    body: Body,
    /// New on disk.
    bytes: u64,
    image_bytes: u64,
    images: Images,
    pages: PageMap,
}

/// A finished parking.
#[derive(Debug)]
pub struct ParkDone {
    /// What the manifest has of it.
    pub body: Body,
    /// It stood still for so long, microseconds.
    pub frozen_us: u64,
    /// Written, bytes.
    pub bytes: u64,
    /// All memory in the generation, old and new.
    pub image_bytes: u64,
    /// Its images, of which the plan of the next wake is made.
    pub images: Images,
    /// Where its memory lies.
    pub pages: PageMap,
}

/// A process that is ending has ended within this time.
const ENDS_WITHIN: Duration = Duration::from_millis(500);

/// Parks. `paged_out`: the pager has memory of the proc, and is ready for that. `once`: a client
/// asks for this one sleep. `record` is called when the generation is complete and must write the
/// state Parked durably.
pub fn park(
    proc: &Proc,
    pids: &[u32],
    generation: Generation,
    paged_out: bool,
    once: Option<Option<Clock>>,
    record: &mut dyn FnMut() -> Result<(), kip_records::record::RecordError>,
) -> Result<ParkDone, ParkError> {
    let dir = proc.dir.clone();
    let whole = Tree::read_whole(pids, ENDS_WITHIN);
    let tree = whole.map_err(|(pid, name)| ParkError::WithoutFirstThread { pid, name })?;
    let growing = kip_snapshot::begin(&dir, generation)?;
    let init = tree.init().ok_or_else(|| ParkError::Tree(io::ErrorKind::NotFound.into()))?;
    let mountinfo = fs::read_to_string(format!("/proc/{init}/mountinfo")).map_err(ParkError::Tree)?;
    let (masks, sys) = (masks_in(&mountinfo), sysfs::points_in(&mountinfo));
    let volumes = volumes::sleep::read(proc, init)?;
    let own_ipc = system_v::is_in_snapshot(&tree, init).map_err(ParkError::Tree)?;
    let namespaces = namespaces_of(init, own_ipc).map_err(ParkError::Tree)?;
    let place = proc.files.place()?;
    let tmpfs = tmpfs::read(proc, init)?;
    let in_memory: Vec<String> = tmpfs.iter().map(|one| one.point.clone()).collect();
    let mounts = proc.copy_mounts(init, &in_memory);
    if let Err(error) = &mounts {
        tracing::info!(proc = %proc.name, %error, "its mounts cannot be held, CRIU will do the next wake");
    }
    // In the proc's own time namespace CRIU knows of no other, and nothing of it is in the images.
    let time = timens::other_time_of(init).map_err(ParkError::Tree)?;
    let mut borrowed: Vec<_> = namespaces.iter().map(|n| (n.kind, n.fd.as_fd())).collect();
    borrowed.extend(time.iter().map(|fd| (timens::NEWTIME, fd.as_fd())));
    let mut external: Vec<(String, String)> = masks.iter().map(|m| (m.clone(), mount_key(m))).collect();
    external.push(("/usr".to_owned(), "usr".to_owned()));
    external.extend(sys.iter().map(|point| (point.clone(), mount_key(point))));
    external.extend(volumes.iter().enumerate().map(|(n, v)| (v.point.clone(), volumes::sleep::key(n))));
    external.extend(in_memory.into_iter().enumerate().map(|(n, point)| (point, tmpfs::key_of(n))));
    let has_terminals = terminals::are_there(init);
    if has_terminals {
        external.push((kip_sandbox::terminals::TARGET.to_owned(), kip_sandbox::terminals::KEY.to_owned()));
    }
    let terminals = terminals::outside(&tree);
    let request = DumpRequest {
        pid: init,
        images: &growing,
        namespaces: &borrowed,
        external_mounts: &external,
        external: &terminals,
        ghost_limit: GHOST_LIMIT,
    };
    if let Some(pid) = tree.stopped_with_threads() {
        return Err(undo(proc, generation, ParkError::StoppedThreads { pid }));
    }
    let helper = proc.shared.helpers.take()?;
    let mounts = mounts.ok();
    let (ran, lifted) = (Ran::default(), Vec::new());
    let mut seen = Seen {
        tmpfs,
        ran,
        masks,
        sys,
        slacks: BTreeMap::new(),
        volumes,
        own_ipc,
        paged_out,
        once,
        mounts,
        place,
        terminals: Terminals { there: has_terminals, open: terminals.clone() },
        init,
        lifted,
    };
    let mut outcome = None;
    let done = |Finalized { body, bytes, image_bytes, images, pages }, frozen_us| ParkDone {
        body,
        frozen_us,
        bytes,
        image_bytes,
        images,
        pages,
    };
    fault::reach("park-dump");
    let dumped = dump(helper, &request, &mut |stage| match stage {
        Stage::Running => {
            seen.lifted = lifted::lift(&tree);
            seen.ran = sample_before_freeze(proc, &tree);
            seen.slacks = attributes::slacks(&tree);
            fault::reach("park-sampled");
            true
        }
        Stage::Still => {
            seen.ran.check(proc);
            true
        }
        Stage::Frozen(log) => {
            fault::reach("park-frozen");
            let result = finalize(proc, &growing, log, generation, &mut seen, record);
            let good = result.is_ok();
            outcome = Some(result);
            good
        }
    });
    match (dumped, outcome) {
        (Ok(dumped), Some(Ok(finalized))) => Ok(done(finalized, dumped.frozen_us)),
        // Recorded, and CRIU failed after that: if the tree is gone all the same, it is parked.
        (Err(_), Some(Ok(finalized))) if proc.wait_until_empty(Duration::from_secs(1)) => Ok(done(finalized, 0)),
        (_, Some(Err(e))) => Err(undo(proc, generation, e)),
        (Err(source), _) => {
            let error = match lifted::used_up(&tree) {
                Some(what) => ParkError::UsedUp { what, source },
                None => ParkError::Dump(source),
            };
            Err(undo(proc, generation, error))
        }
        (Ok(_), None) => unreachable!("CRIU reports success only after the post-dump stage"),
    }
}

fn undo(proc: &Proc, generation: Generation, error: ParkError) -> ParkError {
    // The dump had each call begin anew.
    survey::note_ends(proc);
    let keep = Generation(generation.0.saturating_sub(1));
    // CRIU's log says more than the error does: it stays for the owner to read.
    let growing = kip_snapshot::growing_path(&proc.dir, generation);
    let _ = fs::rename(growing.join(kip_checkpoint::dump::DUMP_LOG), proc.dir.join("refused-dump.log"));
    if let Err(e) = proc.fd_store.drop_prefix(key::ASLEEP) {
        tracing::warn!(proc = %proc.name, error = %e, "sockets of a snapshot that was called off stay with the keeper");
    }
    if let Err(e) = kip_snapshot::sweep(&proc.dir, Some(keep)) {
        tracing::warn!(proc = %proc.name, error = %e, "a snapshot that was called off is left on disk");
    }
    error
}

/// Everything between freeze and kill.
fn finalize(
    proc: &Proc,
    growing: &Path,
    log: &Log,
    generation: Generation,
    seen: &mut Seen,
    record: &mut dyn FnMut() -> Result<(), kip_records::record::RecordError>,
) -> Result<Finalized, ParkError> {
    let now = Now::read();
    let init = seen.init;
    let mut images = Images::read(growing)?;
    // The times of files tell nothing where the clock that they are by was set.
    let was_set = log.clock_was_set();
    let (read_at, still_at) = (log.timers_read(), log.still());
    let last_still = || still_at.values().max().map_or(now.monotonic_ns, |at_ns| now.monotonic_ns.min(*at_ns));
    let interrupted_ns = if was_set { last_still() } else { kip_clocks::interrupted_at(&images, now) };
    let tree = Tree::read(&proc.cgroup.pids().map_err(|e| ParkError::Tree(io::Error::other(e)))?);
    lifted::note(&seen.lifted, &tree, &mut images)?;
    attributes::mend_personalities(&mut images, &tree)?;
    sockets::order_unix_pairs(&mut images)?;
    let link = |pid: u32, at: &str| {
        let target = fs::read_link(format!("/proc/{}/{at}", tree.threads.get(&pid)?)).ok()?;
        Some(target.to_string_lossy().into_owned())
    };
    mend_proc_paths(&mut images, &link)?;
    let in_volumes: Vec<_> = seen.volumes.iter().map(|volume| volume.point.as_str()).collect();
    use_other_names(&mut images, init, &in_volumes)?;
    let owned = take_owners(&mut images)?;
    let sockets = take_sockets(&tree, &sockets::turn_into_files(&mut images)?, &seen.ran.sockets)?;
    let connected = || sockets.iter().any(|(fd, _)| is_connection(fd));
    let word = suspend::word(proc.spec().timing.clock, seen.once, &tree.pids, connected);
    let read = |thread: u32, address: u64, buffer: &mut [u8]| {
        tree.threads.get(&thread).is_some_and(|tid| kip_sys::process::read_memory(*tid, address, buffer).is_ok())
    };
    let take = |thread: u32, number: i32| {
        tree.threads.get(&thread).ok_or_else(|| io::ErrorKind::NotFound.into()).and_then(|tid| take(*tid, number))
    };
    let waiting = tree.pending();
    let all = |pending: Pending| pending.own | pending.shared;
    let new =
        |(thread, now): (&u32, &Pending)| all(*now) & !all(seen.ran.pending.get(thread).copied().unwrap_or_default());
    let arrived = waiting.iter().map(new).fold(0, |a, b| a | b);
    let waiting = |thread: u32| waiting.get(&thread).copied().unwrap_or_default();
    let when = |known: &BTreeMap<u32, i64>, thread: u32| {
        let at_ns = known.get(tree.threads.get(&thread)?)?;
        Some(now.monotonic_ns.min(*at_ns))
    };
    let timers_read_ns = |thread: u32| when(&read_at, thread).or(was_set.then_some(now.monotonic_ns));
    let still_ns = |thread: u32| when(&still_at, thread);
    let (ahead_ns, stands) = (tree.ahead_ns(), word.is_some());
    let quiescent = seen.ran.quiescent;
    let absolute = proc.absolute_waits.lock().clone();
    let frozen = Frozen {
        read: &read,
        take: &take,
        arrived,
        waiting: &waiting,
        timers_read_ns: &timers_read_ns,
        interrupted_ns,
        still_ns: &still_ns,
        ahead_ns,
        absolute: &absolute,
        stands,
        own_filters: false,
        quiescent,
    };
    let clocks = kip_clocks::finalize(&mut images, now, &seen.ran.since, &frozen)?;
    // For the next sleep, should this one be called off.
    proc.absolute_waits.lock().clone_from(&clocks.absolute);
    let mut volumes = seen.volumes.clone();
    volumes::sleep::note_files(&mut volumes, &mut images, init)?;
    let mut paths = sockets::file_paths(&images)?;
    let outside = |path: &str| {
        let points = volumes.iter().map(|v| &v.point).chain(seen.tmpfs.iter().map(|one| &one.point));
        points.chain(&seen.sys).any(|point| is_below(path, point))
    };
    paths.retain(|path| !outside(path));
    if matches!(proc.spec().image, Image::Oci(_)) {
        // Nothing of the host is below it, and its layers stay as long as the proc.
        paths.clear();
    }
    let dir = proc.dir.join("pins");
    let mut pins = pins::pin(&paths, &dir, &proc.dirs_over_usr(&seen.place))?;
    pins.push(pins::pin_init(&proc.base, &dir)?);
    sockets::mend_mounts(&mut images)?;
    // Without the mounts what has a path would be in the way of new ones.
    let is_for_criu = proc.shared.only_criu.load(Ordering::Relaxed) || seen.mounts.is_none();
    let mut noted = Vec::new();
    let objects = if is_for_criu { None } else { take_objects(&tree, &images, proc.first_id(), &mut noted)? };
    let has_all = objects.is_some();
    let (mut fds, sockets): (Vec<_>, Vec<_>) =
        sockets.into_iter().map(|(fd, s)| ((format!("{}{}", key::SOCKET, s.inode), fd), s)).unzip();
    let home = Some(home_of(proc).map_err(ParkError::Tree)?);
    // Without its mounts a file system ends, and the watches in it.
    let (inotify, instances) =
        if seen.mounts.is_some() { inotify::take(&tree, &images, &seen.ran.events)? } else { Default::default() };
    let copies = seen.mounts.as_mut().map(|mounts| std::mem::take(&mut mounts.in_memory)).unwrap_or_default();
    let (tmpfs, in_memory) =
        tmpfs::save(proc, &seen.tmpfs, growing, copies, &kip_checkpoint::inotify::watched(&images)?)?;
    let (masks, own_ipc, suspended) = (seen.masks.clone(), seen.own_ipc, word);
    let (unreported, threads) = (seen.ran.unreported.clone(), images.threads());
    // CRIU would have emptied the queues of another one.
    if !terminals::outside(&tree).is_subset(&seen.terminals.open) {
        return Err(ParkError::OpensTerminals);
    }
    let controlled = if seen.terminals.open.is_empty() { Vec::new() } else { terminals::controlled(&tree) };
    let terminals = seen.terminals.there.then_some(SleepingTerminals { controlled });
    let body = Body {
        clocks,
        sockets,
        masks,
        sys: seen.sys.clone(),
        attributes: attributes::read(&tree, init, &seen.slacks),
        objects: noted,
        pins,
        own_ipc,
        home,
        volumes,
        inotify,
        unreported,
        owned,
        suspended,
        terminals,
        threads,
        tmpfs,
    };
    fds.extend(in_memory);
    fds.extend(objects.into_iter().flatten());
    fds.extend(instances);
    fds.extend(take_namespaces(init, seen.own_ipc).map_err(ParkError::Tree)?);
    if let Some(CopiedMounts { files: Mounts { root, usr, terminals, .. }, .. }) = &seen.mounts {
        let terminals = terminals.as_ref().filter(|_| !seen.terminals.open.is_empty());
        for (key, fd) in
            [(key::ROOT, root), (key::USR, usr)].into_iter().chain(terminals.map(|fd| (key::TERMINALS, fd)))
        {
            fds.push((key.to_owned(), fd.try_clone().map_err(ParkError::Tree)?));
        }
    }
    fault::reach("park-images");
    let pages = pages(proc, &images, generation, &tree, seen.paged_out)?;
    if let Some(criu) = bars_criu(&images)? {
        check_native_only(proc, &images, &pages, &body, has_all).map_err(|plan| ParkError::NoWayBack { criu, plan })?;
    }
    let image_bytes = pages.processes.values().flat_map(|p| &p.runs).map(|run| run.end() - run.start).sum();
    let engine = proc.shared.engine.clone();
    let contents = Contents { engine, body: body.clone(), pages };
    images.save(growing)?;
    let Sealed { bytes, pages, .. } = kip_snapshot::seal(growing, generation, contents)?;
    fault::reach("park-sealed");
    proc.fd_store.hold(fds)?;
    fault::reach("park-held");
    record().map_err(ParkError::Record)?;
    fault::reach("park-recorded");
    images.set_directory(kip_snapshot::path_of(&proc.dir, generation));
    Ok(Finalized { body, bytes, image_bytes, images, pages })
}

/// Whether a plan brings back what CRIU cannot. Made here and once more when the tree is gone: few
/// trees come here.
fn check_native_only(proc: &Proc, images: &Images, pages: &PageMap, body: &Body, has_all: bool) -> Result<(), String> {
    if !has_all {
        return Err("what the kernel keeps of it could not be held".to_owned());
    }
    // Only the restore finds out whether the program has taken each event of a ring, and leaves the
    // wake to CRIU if not.
    for (_, name) in images.numbered("mm") {
        let read = images.image(&name).map_err(|e| chain(&e))?;
        if read.entries.iter().any(|mm| mm.bytes(mm_entry::AIOS).is_some()) {
            return Err("a ring of asynchronous I/O may have events that only CRIU brings back".to_owned());
        }
    }
    plan_of(proc, images, pages, body).map(drop).map_err(|e| chain(&e))
}

/// Where it is now.
fn home_of(proc: &Proc) -> io::Result<ImagesHome> {
    let mut pipes = BTreeMap::new();
    for (key, _) in key::PIPES {
        // What is not held is lost already, and the wake says so.
        if let Some(held) = proc.fd_store.get(key) {
            pipes.insert(key.to_owned(), pipe_key(&held)?);
        }
    }
    Ok(ImagesHome { first_id: proc.first_id(), boot: Boot::read()?, pipes, machine: proc.shared.name.clone() })
}

/// Where the memory of all processes lies: what CRIU has written, and what they never brought back
/// from where it was.
fn pages(
    proc: &Proc,
    images: &Images,
    generation: Generation,
    tree: &Tree,
    paged_out: bool,
) -> Result<PageMap, ParkError> {
    let mut map = page_map(images)?;
    if !paged_out {
        return Ok(map);
    }
    let directory = proc.dir.join(PAGER_DIRECTORY);
    let told = directory.join("told");
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
        process.runs = carry::without(&process.runs, &own.runs);
        carried.processes.insert(inside, process);
    }
    carry::carry(&mut map, images.directory(), &carried, &directory, generation).map_err(ParkError::Carry)?;
    carry::write_sets(&mut map, images.directory()).map_err(ParkError::Carry)?;
    Ok(map)
}

fn take_sockets(
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

/// What can be held instead of rebuilt, with its key; none if the tree is for CRIU in any case.
fn take_objects(
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
fn take_namespaces(init: u32, own_ipc: bool) -> io::Result<Vec<(String, OwnedFd)>> {
    let mut taken: Vec<_> = namespaces_of(init, own_ipc)?.into_iter().map(|n| (n.key.to_owned(), n.fd)).collect();
    if own_ipc {
        taken.push((key::USER.to_owned(), user_of(init)?));
    }
    Ok(taken)
}

/// Mount points in the sandbox's /proc: masks.
fn masks_in(mountinfo: &str) -> Vec<String> {
    let points = mountinfo.lines().filter_map(|l| l.split(' ').nth(4));
    points.filter(|p| p.starts_with("/proc/")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_net::custody::Seen;

    #[test]
    fn what_a_program_may_not_have_seen_wakes_it() {
        let queued = |queued| Seen { queued, ..Seen::default() };
        assert_eq!(seen(queued(7), queued(7)), queued(7));
        assert_eq!(seen(queued(7), queued(12)), queued(7));
        assert_eq!(seen(queued(7), queued(3)), queued(0), "it has read, and 3 came after that");
        let full = Seen { full: true, ..Seen::default() };
        assert_eq!(seen(Seen::default(), full), full, "it waits for room");
        assert_eq!(seen(Seen::default(), Seen { ended: true, ..full }), full, "the end is news");
    }
}
