//! Brings a parked proc back: from a wake event to the program's first instruction.
//!
//! The generation is checked while CRIU restores it, on another core; the result is awaited before
//! the program may run. Until then everything can be taken back: held sockets stay held, and what
//! was restored is killed. In the last step, with every task stopped, time-outs are filled in, the
//! sockets get their own options back, and our duplicates of them are let go, so that the program's
//! close is a close.

mod rebuild;
mod reopen;
mod timers;

use crate::cause::WakeCause;
use crate::descriptors::{pipe_key, reopen};
use crate::fd_store::key;
use crate::host::Proc;
use crate::lifted::LiftedGroup;
use crate::owners;
use crate::pins;
use crate::sysfs;
use crate::terminals;
use crate::tmpfs::{self, TmpfsLost};
use crate::volumes::sleep::{self as volumes, VolumeChanged};
use kip_checkpoint::policy::mount_key;
use kip_checkpoint::restore::{CriuRestoreError, RestoreRequest, RestoredVolume, Stage, restore};
use kip_checkpoint::resume::{self, Thread, WaitingProcess};
use kip_checkpoint::sockets::inherit_key;
use kip_checkpoint::{Held, attributes, hold_threads, inotify, is_for_criu, make_whole, move_id_block};
use kip_clocks::tree::Tree;
use kip_clocks::{Clocks, Missed, Now, Signals};
use kip_copy::fill::is_unfinished;
use kip_criu_images::processes::stopped_threads;
use kip_criu_images::{CheckpointImageError, Images, bars_criu};
use kip_net::custody;
use kip_offload::DemandError;
use kip_records::body::{Body, ImagesHome};
use kip_sandbox::cgroup::CgroupError;
use kip_sandbox::volume::Volume;
use kip_snapshot::pages::{PAGES, PageMap};
use kip_snapshot::{Manifest, SnapshotError};
use kip_sys::fault;
use kip_sys::process::Signal;
use kip_sys::shortened::Shortened;
use kip_sys::status::threads;
use kip_sys::{timens, within};
use kip_types::api::StepView;
use kip_types::{Generation, generation_id};
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Processes of a restore that failed are gone after this.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// Why a wake failed. Nothing is lost: generation and sockets are as before.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum WakeError {
    #[error(transparent)]
    Restore(#[from] CriuRestoreError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Image(#[from] CheckpointImageError),
    #[error(transparent)]
    Rebuild(Box<rebuild::Failure>),
    #[error(
        "kernel objects that Kip held for the sleeping proc are lost, and this proc can be restored only with them: {what}"
    )]
    OnlyNative { what: String },
    #[error("the helper for the restore cannot be started")]
    Helper(#[from] kip_checkpoint::helper::HelperError),
    #[error("the file system of the proc cannot be mounted")]
    Mounts(#[source] kip_sandbox::rootfs::RootfsError),
    #[error("/sys of the proc cannot be mounted")]
    Sys(#[source] io::Error),
    #[error("the terminals of the proc cannot be mounted")]
    Terminals(#[source] io::Error),
    #[error(transparent)]
    Volumes(#[from] VolumeChanged),
    #[error(transparent)]
    Tmpfs(#[from] TmpfsLost),
    #[error("the cgroup of the proc cannot be joined")]
    Cgroup(#[source] CgroupError),
    #[error("the threads that CRIU has restored cannot be given their registers")]
    Held(#[source] io::Error),
    #[error("a clock that stood while it slept cannot be made, time_namespaces(7)")]
    Time(#[source] io::Error),
    #[error("what is held for the sleeping proc cannot be opened: raise the daemon's limit on open files")]
    Packed(#[source] io::Error),
    #[error("{what} is no longer held")]
    Lost { what: String },
    #[error("some of its memory is in the store and does not come")]
    Fetch(#[from] DemandError),
    #[error("its memory cannot be copied from the proc that it is a clone of")]
    Uncopied(#[source] io::Error),
    #[error("some of its memory is in a store, and there is none: `kip up --store URL`")]
    NoStore,
    #[error("the images cannot be prepared in {path}")]
    Prepare {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl WakeError {
    /// Nothing is wrong with the generation: what it needs is in a store that does not give it, or
    /// not yet, or a newer Kip has made it, or this process has no room for it.
    pub fn is_the_stores(&self) -> bool {
        match self {
            WakeError::NoStore | WakeError::Packed(_) | WakeError::Snapshot(SnapshotError::Newer { .. }) => true,
            WakeError::Fetch(e) => e.is_the_stores(),
            _ => false,
        }
    }
}

/// Times of a wake's steps, from the event on.
#[derive(Debug)]
pub struct Steps {
    start: Instant,
    last: Instant,
    steps: Vec<StepView>,
}

impl Steps {
    /// The event was at `start`.
    pub fn since(start: Instant) -> Steps {
        Steps { start, last: start, steps: Vec::new() }
    }

    /// The step that ends now.
    pub fn done(&mut self, name: &str) {
        let now = Instant::now();
        self.steps.push(StepView { name: name.to_owned(), us: (now - self.last).as_micros() as u64 });
        self.last = now;
    }

    /// The step that took `us` of the time since the last one ended.
    pub fn done_with(&mut self, name: &str, us: u64) {
        self.steps.push(StepView { name: name.to_owned(), us });
        self.last += Duration::from_micros(us);
    }

    /// (total in microseconds, the steps).
    pub fn finish(self) -> (u64, Vec<StepView>) {
        ((self.last - self.start).as_micros() as u64, self.steps)
    }
}

/// Fetches what is still in the store, or in copies of another proc's processes, and needed before
/// the program runs: the pages of these places, or all.
fn fetch_pages(
    proc: &Proc,
    images: &Path,
    manifest: &Manifest<Body>,
    which: Option<&[(u32, u32, u32)]>,
    steps: &mut Steps,
) -> Result<(), WakeError> {
    if is_unfinished(&proc.dir) {
        proc.shared.fills.put_of(images, which).map_err(WakeError::Uncopied)?;
    }
    let is_remote = |(file, ..): &(u32, u32, u32)| manifest.remote.contains(file);
    if manifest.remote.is_empty() || which.is_some_and(|which| !which.iter().any(is_remote)) {
        return Ok(());
    }
    proc.shared.archive.as_ref().ok_or(WakeError::NoStore)?.fetch_pages(images, which)?;
    steps.done("bring");
    Ok(())
}

/// Restores the generation for `cause`; returns the host pid of the sandbox's pid 1.
pub fn wake(proc: &Proc, generation: Generation, cause: WakeCause, steps: &mut Steps) -> Result<u32, WakeError> {
    proc.fd_store.unpack().map_err(WakeError::Packed)?;
    let _settled = proc.settling.read();
    let directory = kip_snapshot::path_of(&proc.dir, generation);
    let mut manifest: Manifest<Body> = kip_snapshot::open(&directory)?;
    let now = Now::read();
    manifest.body.clocks = manifest.body.clocks_now().resumed(now);
    // Where its clock stood it ticks first, for the other clocks have gone on: redis takes a client
    // for one that was silent meanwhile.
    let is_packet = cause.is_packet() && !manifest.body.clocks.stands;
    let wake_ns = now.monotonic_ns - steps.start.elapsed().as_nanos() as i64;
    (manifest.body.clocks.wake_ns, manifest.body.clocks.packet_ns) = (wake_ns, is_packet.then_some(wake_ns));
    manifest.body.clocks.far = if manifest.remote.is_empty() { Duration::ZERO } else { steps.start.elapsed() };
    let body = &manifest.body;
    proc.absolute_waits.lock().clone_from(&body.clocks.absolute);
    let time = time_namespace(body.clocks.ahead_ns)?;
    let time = time.as_ref().map(AsFd::as_fd);
    let with_pins = pins::base_changed(&body.pins);
    // First: what is not as it was is no fault of the plan's.
    let mut volumes = Some(volumes::for_wake(proc, generation, &body.volumes)?);
    let files = manifest.parts.iter().filter(|part| part.name.starts_with("core-")).count();
    let _lifted = LiftedGroup::for_threads(proc, files.max(manifest.body.threads)).map_err(WakeError::Cgroup)?;
    let held_in_memory = tmpfs::held(proc, &body.tmpfs);
    let mut in_memory = Some(tmpfs::for_wake(proc, &directory, &body.tmpfs)?);
    let mut unbuilt = None;
    if let Some(ready) = rebuild::ready(proc, &directory, &manifest, with_pins) {
        fetch_pages(proc, &directory, &manifest, ready.needed(), steps)?;
        let volumes = volumes.take().expect("only a restore takes them");
        let in_memory = in_memory.take().expect("only a restore takes them");
        let around = rebuild::Around { with_pins, volumes, in_memory, held_in_memory: held_in_memory.clone(), time };
        match rebuild::rebuild(proc, &directory, &manifest, &ready, around, cause, steps) {
            Ok(init) => return Ok(init),
            Err(e @ rebuild::Failure::Damaged(_)) => return Err(e.into()),
            Err(e) => {
                steps.done("not rebuilt");
                unbuilt = Some(e);
            }
        }
    }
    let mut images = Images::read(&directory)?;
    match (unbuilt, bars_criu(&images)?) {
        // What the plan takes over stays held for another try.
        (Some(e), Some(_)) => return Err(e.into()),
        (None, Some(what)) => return Err(WakeError::OnlyNative { what }),
        (Some(e), None) => {
            tracing::warn!(proc = %proc.name, error = kip_types::chain(&e), "native restore failed; CRIU restores the proc");
        }
        (None, None) => {}
    }
    fetch_pages(proc, &directory, &manifest, None, steps)?;
    // CRIU makes them anew, some under names that are taken as long as these live.
    if let Err(e) = proc.fd_store.drop_prefix(key::OBJECT) {
        tracing::warn!(proc = %proc.name, error = %e, "the keeper did not close kernel objects that CRIU restores");
    }
    let helper = proc.shared.helpers.take()?;
    steps.done("helper");
    fault::reach("wake-helper");
    let inotify = held_inotify(proc, body, with_pins);
    let mut mounts = proc.take_mounts(with_pins).map_err(WakeError::Mounts)?;
    let terminals = terminals::for_wake(proc, body, mounts.terminals.take()).map_err(WakeError::Terminals)?;
    let mounted = volumes.map_or_else(|| volumes::for_wake(proc, generation, &body.volumes), Ok)?;
    let in_memory = in_memory.map_or_else(|| tmpfs::for_wake(proc, &directory, &body.tmpfs), Ok)?;
    let mut volumes: Vec<_> = mounted.iter().enumerate().map(|(number, volume)| restored(number, volume)).collect();
    let one = |(number, mount)| RestoredVolume { key: tmpfs::key_of(number), ..restored(number, mount) };
    volumes.extend(in_memory.iter().enumerate().map(one));
    let sys = sysfs::mounts_at(proc, &body.sys).map_err(WakeError::Sys)?;
    volumes.extend(sys.iter().map(|mount| RestoredVolume {
        key: mount_key(&mount.target),
        fd: mount.fd.as_fd(),
        is_dir: mount.is_dir,
    }));
    let key = || kip_sandbox::terminals::KEY.to_owned();
    volumes.extend(terminals.iter().map(|mount| RestoredVolume { key: key(), fd: mount.fd.as_fd(), is_dir: true }));
    steps.done("mounts");
    let cgroups = proc.cgroup.task_files().map_err(WakeError::Cgroup)?;
    let cgroups: Vec<_> = cgroups.iter().map(AsFd::as_fd).collect();
    let plan = timers::TimerPlan::new(proc, &body.clocks);
    let scratch = scratch(proc)?;
    let missed = advance(proc, &mut images, &scratch, body, plan.armed_at(), &inotify.keys().copied().collect())?;
    let is_of_now = |home: &ImagesHome| kip_clocks::Boot::read().is_ok_and(|now| now.id == home.boot.id);
    let held = hold_threads(&mut images, &body.clocks.standing, body.home.as_ref().is_some_and(is_of_now))?;
    images.lay_out(&scratch)?;
    let mut inherit = inherited(proc, body)?;
    inherit.extend(inotify.into_iter().map(|(id, fd)| (inotify::inherit_key(id), fd)));
    let inherit: Vec<_> = inherit.iter().map(|(k, fd)| (k.clone(), fd.as_fd())).collect();
    let namespaces = proc.held_namespaces();
    let mut namespaces: Vec<_> = namespaces.iter().map(|(kind, fd)| (*kind, fd.as_fd())).collect();
    namespaces.extend(time.map(|fd| (timens::NEWTIME, fd)));
    let external: Vec<_> = body.masks.iter().map(|m| (mount_key(m), "/dev/null".to_owned())).collect();
    let request = RestoreRequest {
        images: &scratch,
        bytes: manifest.parts.iter().map(|part| part.size).sum(),
        namespaces: &namespaces,
        cgroups: &cgroups,
        root: mounts.root.as_fd(),
        usr: mounts.usr.as_fd(),
        volumes: &volumes,
        external_mounts: &external,
        inherit: &inherit,
    };
    steps.done("prepare");
    let mut damage = None;
    let mut mounted = None;
    let (mut shortened, mut released) = (Vec::new(), false);
    let restored = std::thread::scope(|scope| {
        let check = scope.spawn(|| kip_snapshot::verify(&directory, &manifest.parts));
        let mut check = Some(check);
        restore(helper, &request, &mut |stage| match stage {
            Stage::Created(pid) => {
                mounted = mount_namespace(pid).ok();
                steps.done("processes");
                fault::reach("wake-created");
                true
            }
            Stage::Restored => {
                steps.done("memory");
                let verdict = check.take().map_or(Ok(()), |c| c.join().expect("verify does not panic"));
                steps.done("verified");
                fault::reach("wake-restored");
                damage = verdict.err();
                plan.wait(proc, &body.clocks);
                damage.is_none()
            }
            Stage::Resuming => {
                steps.done("registers");
                if held.is_none() {
                    released = true;
                    shortened = release(proc, generation, body, &body.clocks, &missed.now, false);
                    steps.done("release");
                    fault::reach("wake-released");
                }
                if let Err(e) = keep_stopped(proc, &images) {
                    tracing::warn!(proc = %proc.name, error = kip_types::chain(&e), "stopped processes may run on");
                }
                true
            }
        })
    });
    timers::give_back(shortened);
    drop(mounts);
    if matches!(restored, Err(CriuRestoreError::Helper(_))) && !released {
        end_half_made(proc);
    }
    if restored.is_err() {
        // CRIU's log says more than the error does: it stays for the owner to read.
        let _ = fs::copy(scratch.join(kip_checkpoint::restore::RESTORE_LOG), proc.dir.join("refused-restore.log"));
    }
    let woken = match (restored, damage) {
        (_, Some(damage)) => Err(damage.into()),
        (Err(e), None) => Err(e.into()),
        (Ok(pid), None) => held.map_or(Ok(()), |held| let_go(proc, &manifest, &held, &missed.now, steps)).map(|()| {
            steps.done("resume");
            pid
        }),
    };
    if let (Err(_), false, Some(mounted)) = (&woken, released, mounted) {
        proc.hold_mounts_again(mounted.as_fd(), held_in_memory);
    }
    // After the program runs. Links would keep the generation's blocks after it has gone.
    if let Err(error) = fs::remove_dir_all(&scratch) {
        tracing::warn!(proc = %proc.name, path = %scratch.display(), %error, "links to images stay until the next wake");
    }
    if woken.is_ok() {
        timers::send_later(proc, &missed.later, body.clocks.taken_within());
        fault::reach("wake-resumed");
    }
    woken
}

/// The threads that are to have registers, by process.
fn held_processes<'a>(tree: &Tree, held: &'a Held) -> Vec<WaitingProcess<'a>> {
    let inside: BTreeMap<u32, u32> = tree.threads.iter().map(|(inside, host)| (*host, *inside)).collect();
    let process = |pid: &u32| {
        let tids = threads(*pid).unwrap_or_default().into_iter();
        let thread = |tid| Some(Thread { tid, registers: Some(held.get(inside.get(&tid)?)?), filters: &[] });
        let threads: Vec<_> = tids.filter_map(thread).collect();
        (!threads.is_empty()).then_some(WaitingProcess { threads, unmap: (0, 0), syscall_at: 0 })
    };
    tree.pids.iter().filter_map(process).collect()
}

/// Gives the threads that CRIU has left held what they are to have, and lets them go. On an error
/// the whole tree is ended.
fn let_go(
    proc: &Proc,
    manifest: &Manifest<Body>,
    held: &Held,
    missed: &[Missed],
    steps: &mut Steps,
) -> Result<(), WakeError> {
    let body = &manifest.body;
    fault::reach("wake-held");
    let tree = proc.cgroup.pids().map(|pids| Tree::read(&pids)).map_err(io::Error::other);
    let stopped = tree.and_then(|tree| resume::stop(&held_processes(&tree, held)));
    let stopped = stopped.and_then(|stopped| stopped.outlive().map(|()| stopped));
    let stopped = stopped.map_err(|source| {
        end_half_made(proc);
        WakeError::Held(source)
    })?;
    let shortened = release(proc, manifest.generation, body, &body.clocks, missed, true);
    steps.done("release");
    fault::reach("wake-released");
    if let Err(e) = stopped.go() {
        tracing::warn!(proc = %proc.name, error = %e, "a restored thread was not let go");
    }
    timers::give_back(shortened);
    Ok(())
}

/// The time namespace that processes are to be born in whose CLOCK_MONOTONIC is that far ahead of
/// the machine's; none for the machine's own.
fn time_namespace(ahead_ns: i64) -> Result<Option<OwnedFd>, WakeError> {
    (ahead_ns != 0).then(|| timens::new_time(ahead_ns)).transpose().map_err(WakeError::Time)
}

/// The mount namespace of a process that is being restored.
fn mount_namespace(pid: u32) -> io::Result<OwnedFd> {
    fs::File::open(format!("/proc/{pid}/ns/mnt")).map(OwnedFd::from)
}

/// What a CRIU that died or hung has left: it is restored once more.
fn end_half_made(proc: &Proc) {
    let ended = proc.cgroup.kill(GONE_WITHIN);
    if let Err(e) = ended.and_then(|()| proc.cgroup.set_limits(&proc.spec().limits)) {
        tracing::warn!(proc = %proc.name, error = kip_types::chain(&e), "what CRIU had begun is not ended whole");
    }
}

fn restored(number: usize, volume: &Volume) -> RestoredVolume<'_> {
    RestoredVolume { key: volumes::key(number), fd: volume.fd.as_fd(), is_dir: volume.is_dir }
}

/// Sockets and pipes for the program to take over, by CRIU's keys.
fn inherited(proc: &Proc, body: &Body) -> Result<Vec<(String, Arc<OwnedFd>)>, WakeError> {
    let mut list = Vec::new();
    for socket in &body.sockets {
        let what = format!("{}{}", key::SOCKET, socket.inode);
        let fd = proc.fd_store.get(&what).ok_or(WakeError::Lost { what })?;
        list.push((inherit_key(socket.inode), fd));
    }
    for (what, is_input) in key::PIPES {
        let lost = || WakeError::Lost { what: what.to_owned() };
        let held = match proc.fd_store.get(what) {
            Some(held) => held,
            // Not all procs have it, and it ends.
            None if is_input => continue,
            None => return Err(lost()),
        };
        let end = reopen(&held, if is_input { OFlags::RDONLY } else { OFlags::WRONLY }).map_err(|_| lost())?;
        // The images know the pipe that it was, which may have been lost since.
        let was = body.home.as_ref().and_then(|home| home.pipes.get(what).cloned());
        let pipe = was.map_or_else(|| pipe_key(&end), Ok).map_err(|_| lost())?;
        list.push((pipe, Arc::new(end)));
    }
    Ok(list)
}

/// The inotify instances that are held and see the files with which it wakes, by their ids. CRIU
/// makes the others anew.
fn held_inotify(proc: &Proc, body: &Body, with_pins: bool) -> BTreeMap<u64, Arc<OwnedFd>> {
    if proc.held_mounts(with_pins).is_none() {
        return BTreeMap::new();
    }
    body.inotify.iter().filter_map(|known| Some((known.id, crate::inotify::held(known, proc)?))).collect()
}

/// Has the threads of stopped processes, which CRIU is about to let go, stop before they run. CRIU
/// itself sends the process one signal: of several threads all but one would run for a moment, and
/// SIGTSTP does nothing in an orphaned process group, where no shell could end the stop.
fn keep_stopped(proc: &Proc, images: &Images) -> Result<(), WakeError> {
    let stopped = stopped_threads(images)?;
    if stopped.is_empty() {
        return Ok(());
    }
    let tree = Tree::read(&proc.cgroup.pids().map_err(WakeError::Cgroup)?);
    for tid in stopped.iter().filter_map(|inside| tree.threads.get(inside)) {
        let sent = kip_sys::process::send_thread_signal(*tid, Signal::STOP);
        sent.map_err(|source| WakeError::Prepare { path: PathBuf::from(format!("/proc/{tid}")), source })?;
    }
    Ok(())
}

/// An empty directory for the files that CRIU restores from: the generation stays as it was
/// recorded.
fn scratch(proc: &Proc) -> Result<PathBuf, WakeError> {
    let scratch = proc.dir.join("wake");
    let removed = match fs::remove_dir_all(&scratch) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    let made = removed.and_then(|()| fs::create_dir(&scratch));
    made.map(|()| scratch.clone()).map_err(|source| WakeError::Prepare { path: scratch, source })
}

/// Changes images for a restore by CRIU: timers and ids are moved, inotify instances given back,
/// pages that lie in files of which CRIU knows nothing are put into files of its own in `scratch`.
/// Returns what those timers missed.
fn advance(
    proc: &Proc,
    images: &mut Images,
    scratch: &Path,
    body: &Body,
    armed_at: Now,
    inotify: &BTreeSet<u64>,
) -> Result<Signals, WakeError> {
    let moved = body.home.as_ref().map(|home| home.first_id).filter(|id| *id != proc.first_id());
    let directory = images.directory();
    let pages = if directory.join(PAGES).exists() { PageMap::load(directory)? } else { PageMap::default() };
    if !is_for_criu(&pages) {
        make_whole(images, scratch, &pages)?;
    }
    if let Some(then) = moved {
        move_id_block(images, then, proc.first_id())?;
    }
    if !inotify.is_empty() {
        inotify::turn_into_files(images, inotify)?;
    }
    let missed = kip_clocks::advance_timers(images, &body.clocks, armed_at)?;
    kip_clocks::advance_millis(images, &body.clocks, armed_at)?;
    Ok(missed)
}

/// Whether a held socket has something that the program has not seen.
fn packet_came(proc: &Proc, body: &Body) -> bool {
    body.sockets.iter().any(|socket| {
        let (fd, before) = (proc.fd_store.get(&format!("{}{}", key::SOCKET, socket.inode)), socket.options.seen);
        let now = fd.and_then(|fd| custody::seen(fd.as_fd(), &socket.options.kind).ok());
        now.is_some_and(|now| now.queued > before.queued || now.ended && !before.ended)
    })
}

/// The last step, every task stopped, `traced` by this thread or by CRIU, and about to run.
/// `clocks` is what of the body's has to be set.
fn release(
    proc: &Proc,
    generation: Generation,
    body: &Body,
    clocks: &Clocks,
    missed: &[Missed],
    traced: bool,
) -> Vec<Shortened> {
    // The wake was for a timer, and takes longer than it was begun ahead.
    let other = clocks.packet_ns.is_none() && !clocks.stands && !clocks.patches.is_empty() && packet_came(proc, body);
    let with_packet = other.then(|| clocks.with_packet());
    let shortened = timers::set(proc, clocks, with_packet.as_ref().unwrap_or(clocks), missed, traced);
    owners::give(proc, body);
    let tree = || Tree::read(&proc.cgroup.pids().unwrap_or_default());
    let patches = kip_snapshot::cloned_patches(&proc.dir, generation);
    if patches.is_some()
        && let Some(init) = tree().threads.get(&1)
    {
        // What watches it hears of it first. A program may have another file there, or none.
        let _ = within::write_again(*init, generation_id::PATH);
    }
    let patches = patches.unwrap_or_default();
    if !patches.is_empty()
        && let Err(error) = kip_copy::random::apply(&tree(), &patches)
    {
        tracing::warn!(proc = %proc.name, %error, "random numbers of a clone may be those of its source");
    }
    if !body.attributes.is_empty() {
        attributes::give(&tree(), &body.attributes);
    }
    let held: Vec<_> = body
        .sockets
        .iter()
        .filter_map(|s| Some((s, proc.fd_store.get(&format!("{}{}", key::SOCKET, s.inode))?)))
        .collect();
    for (socket, fd) in &held {
        if let Err(e) = custody::release(fd.as_fd(), &socket.options) {
            tracing::warn!(proc = %proc.name, inode = socket.inode, error = %e, "options of a socket could not be put back");
        }
    }
    drop(held);
    if let Err(e) = proc.fd_store.drop_prefix(key::ASLEEP) {
        tracing::warn!(proc = %proc.name, error = %e, "the keeper did not let sockets go");
    }
    shortened
}
