//! The fast way up: the tree is rebuilt from its plan, with what was held through the sleep,
//! without CRIU.
//!
//! Anything that is missing or goes wrong before the program runs leaves generation and held
//! descriptors as they were, and CRIU does the wake. The last step is the same for both ways: see
//! [`super::release`].

use super::reopen::open_again;
use super::{Steps, WakeError, end_half_made, mount_namespace, release, timers};
use crate::cause::WakeCause;
use crate::fd_store::key;
use crate::hibernate;
use crate::host::Proc;
use crate::inotify::key_of;
use crate::plans::plan_wake;
use crate::sysfs;
use crate::terminals;
use crate::tmpfs;
use kip_checkpoint::plan::{MemoryFiles, Plan, PlanError, Received};
use kip_checkpoint::{Came, Rebuild, RebuildError, Unfilled};
use kip_clocks::Boot;
use kip_copy::fill::is_unfinished;
use kip_criu_images::Images;
use kip_pager::client::PagerError;
use kip_pager::protocol::Rebuilt;
use kip_records::body::{Body, ImagesHome};
use kip_remake::{MadeAlready, ObjectNote, Remade, remake};
use kip_sandbox::cgroup::CgroupError;
use kip_sandbox::launcher::{LaunchError, SandboxRestore};
use kip_sandbox::rootfs::RootfsError;
use kip_sandbox::volume::Volume;
use kip_snapshot::pages::{PAGE, PageMap, Run, SETS};
use kip_snapshot::{Manifest, SnapshotError};
use kip_sys::fault;
use kip_sys::process::{Signal, pidfd_send_signal};
use kip_types::chain;
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Processes of a rebuild that failed are gone after this.
const GONE_WITHIN: Duration = Duration::from_secs(5);

/// Most descriptors that are sent with a clone whose memory copies hold.
const MOST_SENT: usize = 100;

/// Why a rebuild failed; CRIU may still succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Rebuild(#[from] RebuildError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("the file system of the proc cannot be mounted")]
    Mounts(#[source] RootfsError),
    #[error("/sys of the proc cannot be mounted")]
    Sys(#[source] io::Error),
    #[error("the terminals of the proc cannot be mounted")]
    Terminals(#[source] io::Error),
    #[error("the cgroup of the proc cannot be joined")]
    Cgroup(#[source] CgroupError),
    #[error("the pager does not take up what was left out")]
    Pager(#[from] PagerError),
    /// The generation itself: CRIU would fail as well.
    #[error(transparent)]
    Damaged(SnapshotError),
}

/// Everything that a rebuild takes, at hand.
pub(super) struct Ready {
    plan: Plan,
    received: Vec<Arc<OwnedFd>>,
    namespaces: [Arc<OwnedFd>; 3],
    /// None if the IPC namespace is in the snapshot: another one is made.
    ipc: Option<Arc<OwnedFd>>,
}

impl Ready {
    /// The pages that have to be here before the program runs, or none for all.
    pub(super) fn needed(&self) -> Option<&[(u32, u32, u32)]> {
        self.plan.is_lazy().then_some(&self.plan.eager[..])
    }
}

/// What has taken the place of what a proc held.
struct Renewed<'a> {
    proc: &'a Proc,
    body: &'a Body,
    with_pins: bool,
}

impl MadeAlready for Renewed<'_> {
    fn pipe(&self, id: u64) -> Option<Arc<OwnedFd>> {
        let was = format!("pipe:[{id}]");
        let key = self.body.home.as_ref()?.pipes.iter().find(|(_, pipe)| **pipe == was)?.0;
        self.proc.fd_store.get(key)
    }

    fn socket(&self, inode: u32) -> Option<Arc<OwnedFd>> {
        self.proc.fd_store.get(&format!("{}{inode}", key::SOCKET))
    }

    fn root(&self) -> u32 {
        self.proc.first_id()
    }

    fn noted(&self, id: u64) -> ObjectNote {
        self.body.objects.iter().find(|note| note.id == id).copied().unwrap_or_default()
    }

    fn network(&self) -> Option<Arc<OwnedFd>> {
        self.proc.fd_store.get(key::NET)
    }

    /// The mounts that the wake takes: what is bound to a file in them is found there alone.
    fn files(&self) -> io::Result<OwnedFd> {
        if let Some(held) = self.proc.held_mounts(self.with_pins) {
            return Ok(held.root);
        }
        let made = self.proc.mounts(self.with_pins).map_err(io::Error::other)?;
        let root = made.root.try_clone()?;
        let both = vec![(key::ROOT.to_owned(), made.root), (key::USR.to_owned(), made.usr)];
        self.proc.fd_store.hold(both).map_err(io::Error::other)?;
        Ok(root)
    }
}

/// The objects of a plan, made anew; none if only CRIU makes all of them.
fn remade(proc: &Proc, images: &Path, plan: &Plan, renewed: &Renewed<'_>) -> Option<Remade> {
    let objects = plan.received.iter().filter_map(|what| match what {
        Received::Object(id) | Received::Deleted(id) => Some(*id),
        _ => None,
    });
    let wanted: Vec<u64> = objects.collect();
    let read = Images::read(images).map_err(|e| chain(&e));
    let made = read.and_then(|images| remake(&images, &wanted, renewed).map_err(|e| chain(&e)));
    made.inspect_err(|why| tracing::info!(proc = %proc.name, why, "CRIU will do the wake")).ok()
}

/// None if there is no plan of this generation for this kernel, or something of it is no longer
/// held and not made anew here.
pub(super) fn ready(proc: &Proc, images: &Path, manifest: &Manifest<Body>, with_pins: bool) -> Option<Ready> {
    let renewed = crate::renew::is_renewed(proc, &manifest.body);
    let of_now = |home: &ImagesHome| Boot::read().is_ok_and(|now| now.id == home.boot.id);
    // What was held for a clone's source is not lost, and a plan of this boot is one for both.
    let is_clone = kip_snapshot::is_cloned(&proc.dir, manifest.generation);
    let lost = renewed && !(is_clone && manifest.body.home.as_ref().is_some_and(of_now));
    if lost || proc.shared.only_criu.load(Ordering::Relaxed) || manifest.kernel != kip_snapshot::kernel() {
        return None;
    }
    let plan = match Plan::load(images) {
        Ok(Some(plan)) => plan,
        Ok(None) if !renewed => return None,
        Ok(None) | Err(PlanError::OtherVersion) => {
            plan_wake(proc, manifest.generation, &manifest.body);
            Plan::load(images).ok()??
        }
        Err(e) => {
            tracing::warn!(proc = %proc.name, error = chain(&e), "the plan of a wake cannot be used");
            return None;
        }
    };
    // What is made anew is bound to files of now.
    if plan.same_files && !renewed && !tmpfs::are_held(proc, &manifest.body.tmpfs) {
        return None;
    }
    let around = Renewed { proc, body: &manifest.body, with_pins };
    let anew = if renewed { remade(proc, images, &plan, &around)? } else { Remade::new() };
    let mounts = if plan.same_files && !renewed { Some(proc.held_mounts(with_pins)?) } else { None };
    let mut memory_files = MemoryFiles::default();
    let complain = |error: &io::Error| tracing::warn!(proc = %proc.name, %error, "a memory file cannot be made again");
    let mut get = |what: &Received| match what {
        Received::Plan => None,
        Received::Pages(name) => File::open(images.join(name)).ok().map(|f| Arc::new(f.into())),
        Received::Object(id) => proc.fd_store.get(&format!("{}{id}", key::OBJECT)).or_else(|| anew.get(id).cloned()),
        Received::Deleted(id) if renewed => anew.get(id).cloned(),
        Received::Deleted(id) => {
            let held = proc.fd_store.get(&format!("{}{id}", key::OBJECT))?;
            let again = open_again(held.as_fd(), mounts.as_ref()?);
            again
                .map_err(|error| tracing::info!(proc = %proc.name, %error, "a deleted file cannot be opened again"))
                .ok()
                .map(Arc::new)
        }
        Received::Device => kip_sys::uffd::open_device().ok().map(Arc::new),
        Received::Memory(memory) => {
            memory_files.readable(memory, images, proc.first_id()).inspect_err(complain).ok().map(Arc::new)
        }
        Received::OpenMemory(memory, opened) => {
            let opened = memory_files.opened(memory, *opened, images, proc.first_id());
            opened.inspect_err(complain).ok().map(Arc::new)
        }
        Received::Inotify(id) => proc.fd_store.get(&key_of(*id)),
        Received::Socket(inode) => proc.fd_store.get(&format!("{}{inode}", key::SOCKET)),
    };
    let received = plan.received.iter().skip(1).map(&mut get).collect::<Option<Vec<_>>>()?;
    let namespace = |key| proc.fd_store.get(key);
    let user = Arc::new(proc.held_user().ok()?);
    let namespaces = [user, namespace(key::NET)?, namespace(key::UTS)?];
    let ipc = if manifest.body.own_ipc { None } else { Some(namespace(key::IPC)?) };
    Some(Ready { plan, received, namespaces, ipc })
}

/// What of the machine the tree gets that is no part of its plan.
pub(super) struct Around<'a> {
    /// Files of the host as they were when it fell asleep.
    pub(super) with_pins: bool,
    /// Its volumes.
    pub(super) volumes: Vec<Volume>,
    /// Its file systems in memory.
    pub(super) in_memory: Vec<Volume>,
    /// Places and keys of those of them that were held.
    pub(super) held_in_memory: Vec<(String, String)>,
    /// Its own time namespace, if it has one.
    pub(super) time: Option<BorrowedFd<'a>>,
}

/// Rebuilds; returns the host pid of pid 1.
pub(super) fn rebuild(
    proc: &Proc,
    images: &Path,
    manifest: &Manifest<Body>,
    ready: &Ready,
    around: Around<'_>,
    cause: WakeCause,
    steps: &mut Steps,
) -> Result<u32, Failure> {
    let Around { with_pins, volumes, in_memory, held_in_memory, time } = around;
    let body = &manifest.body;
    if ready.plan.is_lazy() && proc.spec().timing.prefetch {
        read_ahead(&images.join(SETS));
    }
    steps.done("plan");
    fault::reach("wake-helper");
    let mut mounts = proc.take_mounts(with_pins).map_err(Failure::Mounts)?;
    mounts.volumes = tmpfs::in_order(in_memory, volumes);
    let terminals = terminals::for_wake(proc, body, mounts.terminals.take()).map_err(Failure::Terminals)?;
    mounts.volumes.extend(terminals);
    let [user, net, uts] = &ready.namespaces;
    if !body.sys.is_empty() {
        let with_runtime = sysfs::has_runtime(&body.sys);
        mounts.volumes.extend(sysfs::mounts(proc, net.as_fd(), with_runtime).map_err(Failure::Sys)?);
    }
    let cgroup = proc.cgroup.task_files().map_err(Failure::Cgroup)?;
    let received: Vec<_> = ready.received.iter().map(|fd| fd.as_fd()).collect();
    let bytes = manifest.parts.iter().map(|p| p.size).sum();
    // The restorer sets timers when it has read the memory, and the program goes on when that is
    // verified.
    let within = body.clocks.taken_within() + verified_within(images, manifest, ready.needed());
    let came = |packet_ns: i64| Came {
        ago: Duration::from_nanos((kip_sys::ran::monotonic_ns() - packet_ns).max(1) as u64),
        taken_within: within,
    };
    let came = body.clocks.packet_ns.map(came);
    let (mut rebuild, control) = Rebuild::begin(&ready.plan, images, &received, bytes, came)?;
    steps.done("mounts");
    let started = proc.shared.launcher().restore(SandboxRestore {
        mounts,
        root: proc.spec().sandbox.root(),
        user: user.as_fd(),
        net: net.as_fd(),
        uts: uts.as_fd(),
        ipc: ready.ipc.as_ref().map(|fd| fd.as_fd()),
        time,
        control: control.as_fd(),
        program: proc.shared.restorer.as_fd(),
        cgroup: &cgroup,
    });
    if let Err(LaunchError::Failed(_)) = started {
        // It will not succeed the next time either: an older kernel, or one with other rules.
        proc.shared.only_criu.store(true, Ordering::Relaxed);
    }
    let started = started.inspect_err(|_| {
        // A launcher that died may have left a child, which has the mounts of the next try.
        if !proc.cgroup.pids().unwrap_or_default().is_empty() {
            end_half_made(proc);
        }
    })?;
    drop(control);
    steps.done("processes");
    fault::reach("wake-created");
    let (init, pidfd) = (started.init_pid, started.pidfd);
    let mounted = mount_namespace(init);
    rebuild.go_on();
    let later = &bystanders(&ready.plan, body, cause);
    let result = std::thread::scope(|scope| {
        let check = scope.spawn(|| verify(images, manifest, &ready.plan));
        let mut inflating = None;
        let waited = rebuild.wait(|unfilled| {
            inflating = Some(scope.spawn(move || inflate(proc, images, &unfilled, cause, later)));
        });
        steps.done("memory");
        let inflated = inflating.map(|inflating| inflating.join().expect("the pager's client does not panic"));
        if inflated.is_some() {
            steps.done("set");
        }
        let verdict = check.join().expect("verify does not panic");
        steps.done("verified");
        // First, for damage may be why the others failed.
        verdict.map_err(Failure::Damaged)?;
        waited?;
        inflated.unwrap_or(Ok(()))?;
        fault::reach("wake-restored");
        let stopped = rebuild.stop(init)?;
        steps.done("registers");
        // What is released below is nowhere else any more: from here on the tree lives, whatever
        // becomes of us.
        stopped.outlive().map_err(RebuildError::Trace)?;
        // Timerfds were held: nothing was missed. They know nothing of a clock that stood.
        let mut clocks = body.clocks.clone();
        clocks.timerfds.retain(|timer| clocks.stood_ns != 0 && timer.is_monotonic());
        let shortened = release(proc, manifest.generation, body, &clocks, &[], true);
        steps.done("release");
        fault::reach("wake-released");
        // What was held is given up: the tree has been woken even if one of it died meanwhile.
        if let Err(e) = stopped.go() {
            tracing::warn!(proc = %proc.name, error = %e, "a rebuilt thread was not let go");
        }
        timers::send_later(proc, rebuild.later(), within);
        timers::give_back(shortened);
        Ok(())
    });
    match result {
        Ok(()) => {
            steps.done("resume");
            fault::reach("wake-resumed");
            Ok(init)
        }
        Err(e) => {
            if let Ok(mounted) = mounted {
                proc.hold_mounts_again(mounted.as_fd(), held_in_memory);
            }
            // With pid 1 the kernel ends all the others; often it has ended by itself, which must
            // not hide why.
            let _ = pidfd_send_signal(pidfd.as_fd(), Signal::KILL);
            hibernate::forget(proc);
            if !proc.wait_until_empty(GONE_WITHIN) {
                tracing::warn!(proc = %proc.name, "processes of a wake that failed are still there after 5 s");
            }
            Err(e)
        }
    }
}

/// How long after it is read the memory of a program may be verified: all of it, or these pages and
/// the files in which no process has pages of its own.
fn verified_within(images: &Path, manifest: &Manifest<Body>, needed: Option<&[(u32, u32, u32)]>) -> Duration {
    /// On a busy machine the checksum ends at most a millisecond later for each so many bytes.
    const BYTES_A_MS: u64 = 5 << 20;
    let map = needed.and_then(|_| PageMap::load(images).ok());
    let in_map = |name: &str| map.as_ref().is_some_and(|map| map.files.iter().any(|file| file.name == name));
    let whole: u64 = manifest.parts.iter().filter(|part| !in_map(&part.name)).map(|part| part.size).sum();
    let pages: u64 = needed.unwrap_or_default().iter().map(|(.., pages)| u64::from(*pages)).sum();
    Duration::from_millis((whole + pages * PAGE as u64) / BYTES_A_MS)
}

/// Has the disk begin with a file that is needed in a moment; there may be none.
fn read_ahead(path: &Path) {
    if let Ok(file) = File::open(path) {
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed);
    }
}

/// What is read before the program runs is checked before it runs; what comes later is checked when
/// it comes.
fn verify(images: &Path, manifest: &Manifest<Body>, plan: &Plan) -> Result<(), SnapshotError> {
    if !plan.is_lazy() {
        return kip_snapshot::verify(images, &manifest.parts);
    }
    let run = |(file, first, pages): &(u32, u32, u32)| Run { start: 0, pages: *pages, file: *file, first: *first };
    kip_snapshot::verify_some(images, &manifest.parts, &plan.eager.iter().map(run).collect::<Vec<_>>())
}

/// The processes (by number inside) that do not have the socket open at which the proc is woken.
/// One that has a part in the answer all the same has its working set when it runs.
fn bystanders(plan: &Plan, body: &Body, cause: WakeCause) -> BTreeSet<u32> {
    let WakeCause::Descriptor(kind, _) = cause else { return BTreeSet::new() };
    let woken = body.sockets.iter().filter(|socket| socket.options.kind == kind);
    plan.without(&woken.map(|socket| socket.inode).collect())
}

/// Lets the pager look after what was left out.
fn inflate(
    proc: &Proc,
    images: &Path,
    unfilled: &[Unfilled],
    cause: WakeCause,
    later: &BTreeSet<u32>,
) -> Result<(), Failure> {
    let copied = HeldCopies::of(proc, images, unfilled.len());
    let rebuilt = Rebuilt {
        name: proc.key.to_string(),
        number: proc.slot.number().into(),
        directory: proc.dir.join(crate::host::proc::PAGER_DIRECTORY),
        generation: images.to_owned(),
        processes: unfilled.iter().map(|u| (u.host, u.inside, u.can_come)).collect(),
        prefetch: proc.spec().timing.prefetch,
        set: cause.purpose().set,
        later: later.clone(),
        copied: copied.as_ref().map(|copied| copied.name.clone()),
    };
    let mut descriptors: Vec<_> = unfilled.iter().map(|u| u.uffd.as_fd()).collect();
    descriptors.extend(copied.iter().flat_map(|copied| &copied.descriptors).map(AsFd::as_fd));
    proc.shared.pager.inflate(rebuilt, &descriptors)?;
    Ok(())
}

/// Memory of a clone that copies of its source's processes still hold.
struct HeldCopies {
    /// The name of its page file.
    name: String,
    /// A file that says which page is where, and the memory of each copy. Duplicates, for the fill
    /// is not to wait for the pager.
    descriptors: Vec<OwnedFd>,
}

impl HeldCopies {
    /// None if there is none, or too much for one message: then the pager asks for each page.
    fn of(proc: &Proc, images: &Path, processes: usize) -> Option<HeldCopies> {
        if !is_unfinished(&proc.dir) {
            return None;
        }
        let copied = HeldCopies::open(proc, images).unwrap_or_else(|error| {
            tracing::debug!(proc = %proc.name, %error, "the pager asks for memory that is still copied");
            None
        });
        copied.filter(|copied| copied.descriptors.len() + processes <= MOST_SENT)
    }

    fn open(proc: &Proc, images: &Path) -> io::Result<Option<HeldCopies>> {
        let Some((name, fill)) = proc.shared.fills.of_generation(images)? else { return Ok(None) };
        let table = File::from(memfd_create("copied", MemfdFlags::CLOEXEC)?);
        table.write_all_at(&fill.copied().table(), 0)?;
        let mut descriptors = vec![table.into()];
        for memory in fill.copied().descriptors() {
            descriptors.push(memory.try_clone_to_owned()?);
        }
        Ok(Some(HeldCopies { name, descriptors }))
    }
}

impl From<Failure> for WakeError {
    fn from(failure: Failure) -> WakeError {
        match failure {
            Failure::Damaged(e) => WakeError::Snapshot(e),
            other => WakeError::Rebuild(Box::new(other)),
        }
    }
}
