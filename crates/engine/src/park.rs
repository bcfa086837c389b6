//! Parks a running proc: one pass from a frozen tree to a recorded generation, or back to the tree
//! running on. Or copies it: the same, but the tree runs on, and its memory is written then.
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

mod copy;
mod error;
mod sample;
mod take;

pub use copy::{CopyDone, CopySteps, copy};
pub use error::ParkError;
use sample::{Ran, sample_before_freeze};
use take::{carry_over, paged_out, take_namespaces, take_objects, take_sockets, to_kip};

use crate::descriptors::{pipe_key, take};
use crate::fd_store::key;
use crate::host::proc::{Proc, namespaces_of};
use crate::inotify;
use crate::lifted;
use crate::pins;
use crate::plans::plan_of;
use crate::survey;
use crate::suspend::{self, is_connection};
use crate::sysfs;
use crate::terminals;
use crate::tmpfs;
use crate::volumes;
use kip_checkpoint::dump::{DumpError, DumpRequest, Dumped, Log, Stage, dump};
use kip_checkpoint::helper::Helper;
use kip_checkpoint::policy::mount_key;
use kip_checkpoint::{
    attributes, has_own_ipc, is_below, mend_proc_paths, page_map, sockets, take_owners, use_other_names,
};
use kip_clocks::tree::Tree;
use kip_clocks::{Boot, Frozen, Now, Pending};
use kip_criu_images::fields::mm_entry;
use kip_criu_images::{Images, bars_criu};
use kip_records::body::{Body, ImagesHome, SleepingTerminals, Slept};
use kip_sandbox::launcher::CopiedMounts;
use kip_sandbox::quota::OwnFilesPlace;
use kip_sandbox::rootfs::Mounts;
use kip_snapshot::carry::Growing;
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
use std::time::{Duration, Instant};

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
    /// Inodes of its connections to Kip.
    to_kip: BTreeSet<u32>,
    /// Host pid of its pid 1.
    init: u32,
    /// Limits that are lifted until this is dropped.
    lifted: Vec<(u32, Lifted)>,
}

/// What was made of a frozen tree, and is not on disk yet.
struct Finalized {
    body: Body,
    images: Images,
    pages: PageMap,
    /// What the keeper is to hold of one that sleeps.
    fds: Vec<(String, OwnedFd)>,
}

/// A proc that is about to be frozen.
struct Freeze<'a> {
    proc: &'a Proc,
    pids: &'a [u32],
    generation: Generation,
    /// The pager has memory of the proc, and is ready for that.
    paged_out: bool,
    /// A client asks for this one sleep.
    once: Option<Option<Clock>>,
    /// It, or a copy of it, is to sleep.
    sleeps: bool,
    /// Copies hold its memory.
    leaves_memory: bool,
}

/// One that was frozen, and what came of it.
struct Thawed<T> {
    outcome: T,
    dumped: Result<Dumped, DumpError>,
    /// Copies that hold memory live as long as it does.
    helper: Helper,
    /// How long it stood still, or a little less time.
    still: Duration,
}

/// A tree that stands still, and where its generation grows.
struct Still<'a> {
    growing: &'a Path,
    log: &'a Log,
    helper: &'a Helper,
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
    let freeze = Freeze { proc, pids, generation, paged_out, once, sleeps: true, leaves_memory: false };
    let mut parked = |still: &Still<'_>, seen: &mut Seen| {
        let mut place = |memory: FrozenMemory<'_>| {
            carry_over(proc, memory.map, memory.paged_out, memory.images.directory(), into(generation))
        };
        let finalized = finalize(&freeze, still, seen, &mut place)?;
        keep(proc, still.growing, generation, finalized, record)
    };
    let Thawed { outcome, dumped, .. } = frozen(&freeze, &mut parked, true)?;
    let frozen_us = match dumped {
        Ok(dumped) => dumped.frozen_us,
        // Recorded, and CRIU failed after that: if the tree is gone all the same, it is parked.
        Err(_) if proc.wait_until_empty(Duration::from_secs(1)) => 0,
        Err(error) => {
            let tree = Tree::read(&proc.cgroup.pids().unwrap_or_default());
            return Err(undo(proc, generation, &tree.pids, refused(&tree, error)));
        }
    };
    Ok(ParkDone { frozen_us, ..outcome })
}

/// Freezes a tree, has `finalize` done with it, and ends it if that says so, or else lets it run
/// on. An error leaves it running, and nothing of the generation.
fn frozen<T>(
    freeze: &Freeze<'_>,
    finalize: &mut dyn FnMut(&Still<'_>, &mut Seen) -> Result<T, ParkError>,
    ends: bool,
) -> Result<Thawed<T>, ParkError> {
    let Freeze { proc, pids, generation, once, sleeps, leaves_memory, .. } = *freeze;
    let whole = Tree::read_whole(pids, ENDS_WITHIN);
    let tree = whole.map_err(|(pid, name)| ParkError::WithoutFirstThread { pid, name })?;
    let growing = kip_snapshot::begin(&proc.dir, generation)?;
    let init = tree.init().ok_or_else(|| ParkError::Tree(io::ErrorKind::NotFound.into()))?;
    let mountinfo = fs::read_to_string(format!("/proc/{init}/mountinfo")).map_err(ParkError::Tree)?;
    let (masks, sys) = (masks_in(&mountinfo), sysfs::points_in(&mountinfo));
    let volumes = volumes::sleep::read(proc, init)?;
    let own_ipc = has_own_ipc(&tree, init).map_err(ParkError::Tree)?;
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
    let to_kip = to_kip(proc, &tree);
    let external_files =
        terminals.iter().cloned().chain(to_kip.iter().map(|inode| sockets::external(*inode))).collect();
    let request = DumpRequest {
        pid: init,
        images: &growing,
        namespaces: &borrowed,
        external_mounts: &external,
        external: &external_files,
        ghost_limit: GHOST_LIMIT,
        leaves_memory,
    };
    if let Some(pid) = tree.stopped_with_threads() {
        return Err(undo(proc, generation, &tree.pids, ParkError::StoppedThreads { pid }));
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
        once,
        mounts,
        place,
        terminals: Terminals { there: has_terminals, open: terminals.clone() },
        to_kip,
        init,
        lifted,
    };
    let (mut outcome, mut begun) = (None, Instant::now());
    fault::reach("park-dump");
    let dumped = dump(&helper, &request, &mut |stage| match stage {
        Stage::Running => {
            seen.lifted = lifted::lift(&tree);
            seen.ran = sample_before_freeze(proc, &tree, sleeps);
            seen.slacks = attributes::slacks(&tree);
            fault::reach("park-sampled");
            begun = Instant::now();
            true
        }
        Stage::Still => {
            seen.ran.check(proc);
            true
        }
        Stage::Frozen(log) => {
            fault::reach("park-frozen");
            let result = finalize(&Still { growing: &growing, log, helper: &helper }, &mut seen);
            let good = result.is_ok();
            outcome = Some(result);
            good && ends
        }
    });
    let still = begun.elapsed();
    match (dumped, outcome) {
        (dumped, Some(Ok(outcome))) => Ok(Thawed { outcome, dumped, helper, still }),
        (dumped, outcome) => {
            // Copies of the processes end with it.
            drop(helper);
            let error = match (dumped, outcome) {
                (_, Some(Err(error))) => error,
                (Err(source), _) => refused(&tree, source),
                (Ok(_), _) => unreachable!("CRIU reports success only after the post-dump stage"),
            };
            Err(undo(proc, generation, &tree.pids, error))
        }
    }
}

/// What a tree that ends is parked in.
fn into(generation: Generation) -> Growing<'static> {
    Growing { generation, is_kept: true, still_written: None }
}

/// A dump that failed.
fn refused(tree: &Tree, source: DumpError) -> ParkError {
    match lifted::used_up(tree) {
        Some(what) => ParkError::UsedUp { what, source },
        None => ParkError::Dump(source),
    }
}

fn undo(proc: &Proc, generation: Generation, pids: &[u32], error: ParkError) -> ParkError {
    // The dump had each call begin anew.
    survey::note_ends_of(proc, pids);
    // CRIU's log says more than the error does: it stays for the owner to read.
    let growing = kip_snapshot::growing_path(&proc.dir, generation);
    let _ = fs::rename(growing.join(kip_checkpoint::dump::DUMP_LOG), proc.dir.join("refused-dump.log"));
    if let Err(e) = proc.fd_store.drop_prefix(key::ASLEEP) {
        tracing::warn!(proc = %proc.name, error = %e, "sockets of a snapshot that was called off stay with the keeper");
    }
    sweep(proc, generation);
    error
}

/// Removes a generation in which the proc does not sleep.
fn sweep(proc: &Proc, generation: Generation) {
    let keep = Generation(generation.0.saturating_sub(1));
    if let Err(e) = kip_snapshot::sweep(&proc.dir, Some(keep)) {
        tracing::warn!(proc = %proc.name, error = %e, "a snapshot that was called off is left on disk");
    }
}

/// The memory of a frozen tree.
struct FrozenMemory<'a> {
    tree: &'a Tree,
    images: &'a Images,
    /// What CRIU has written.
    map: PageMap,
    /// What the processes never brought back, with the pager's files.
    paged_out: Option<PageMap>,
}

/// What the images of a frozen tree become; `place` says where its memory is to lie.
fn finalize(
    freeze: &Freeze<'_>,
    still: &Still<'_>,
    seen: &mut Seen,
    place: &mut dyn FnMut(FrozenMemory<'_>) -> Result<PageMap, ParkError>,
) -> Result<Finalized, ParkError> {
    let (proc, growing, log) = (freeze.proc, still.growing, still.log);
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
    let turned = sockets::turn_into_files(&mut images, &seen.to_kip)?;
    let sockets = take_sockets(&tree, &turned, &seen.ran.sockets)?;
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
    let mut map = page_map(&images)?;
    // It is listed before copies of the processes are there, of which it would be asked too.
    let paged_out = paged_out(freeze, &mut map, &tree)?;
    let pages = place(FrozenMemory { tree: &tree, images: &images, map, paged_out })?;
    if let Some(criu) = bars_criu(&images)? {
        check_native_only(proc, &images, &pages, &body, has_all).map_err(|plan| ParkError::NoWayBack { criu, plan })?;
    }
    Ok(Finalized { body, images, pages, fds })
}

/// Makes a generation durable, and what it needs of the kernel stay, and has it recorded.
fn keep(
    proc: &Proc,
    growing: &Path,
    generation: Generation,
    finalized: Finalized,
    record: &mut dyn FnMut() -> Result<(), kip_records::record::RecordError>,
) -> Result<ParkDone, ParkError> {
    let Finalized { body, mut images, pages, fds } = finalized;
    let image_bytes = pages.processes.values().flat_map(|p| &p.runs).map(|run| run.end() - run.start).sum();
    let Sealed { bytes, pages, .. } = sealed(proc, growing, generation, &body, pages, &images, true)?;
    fault::reach("park-sealed");
    proc.fd_store.hold(fds)?;
    fault::reach("park-held");
    record().map_err(ParkError::Record)?;
    fault::reach("park-recorded");
    images.set_directory(kip_snapshot::path_of(&proc.dir, generation));
    Ok(ParkDone { body, frozen_us: 0, bytes, image_bytes, images, pages })
}

fn sealed(
    proc: &Proc,
    growing: &Path,
    generation: Generation,
    body: &Body,
    pages: PageMap,
    images: &Images,
    is_kept: bool,
) -> Result<Sealed, ParkError> {
    images.save(growing)?;
    let contents = Contents { engine: proc.shared.engine.clone(), body: body.clone(), pages };
    let seal = if is_kept { kip_snapshot::seal } else { kip_snapshot::seal_for_now };
    Ok(seal(growing, generation, contents)?)
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

/// Mount points in the sandbox's /proc: masks.
fn masks_in(mountinfo: &str) -> Vec<String> {
    let points = mountinfo.lines().filter_map(|l| l.split(' ').nth(4));
    points.filter(|p| p.starts_with("/proc/")).map(str::to_owned).collect()
}
