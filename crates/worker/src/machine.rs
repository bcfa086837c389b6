//! What all procs of a data directory share: the machine's side of the worker.
//!
//! Owns the instance number, slots, pools, the wake plane's thread and the connections to keeper and launcher. Has no
//! state of any proc.

use crate::archive::{Archive, Brought};
use crate::events::Events;
use crate::exec::Ends;
use crate::helper_pool::HelperPool;
use crate::holdings::key;
use crate::kits::Kits;
use crate::logs::LogPump;
use crate::metrics::Metrics;
use crate::observe::WakeObserver;
use crate::outdated;
use crate::park::Body;
use crate::pressure::{Grant, Pressure};
use crate::proc::{IDS_PER_BLOCK, Proc};
use crate::record::Records;
use crate::task::{self, Command, Handle, chain};
use crate::volumes::Claims;
use kip_image::Images;
use kip_keeper::Keeper;
use kip_net::custody::{Held, Kind};
use kip_net::wake::WakePoll;
use kip_net::{Instance, Nat, NetPool, Slot};
use kip_pager::client::Pager;
use kip_pager::protocol::Event;
use kip_sandbox::base::Base;
use kip_sandbox::cgroup::Cgroups;
use kip_sandbox::launcher::{LaunchError, Launcher};
use kip_types::api::{Code, Refusal};
use kip_types::{Image, PortSpec, Protocol, Spec, State, WakeOn};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Directory of the machine's instance locks.
const INSTANCES: &str = "/run/kip";
/// First host id of the first instance's first block.
const FIRST_ID: u32 = 0x2000_0000;

/// Shared by all procs.
pub(crate) struct Machine {
    pub(crate) data: PathBuf,
    pub(crate) name: String,
    pub(crate) instance: Instance,
    pub(crate) engine: String,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) pager: Pager,
    /// Held for reading by whoever falls asleep or wakes by way of the pager: it is not replaced meanwhile.
    pub(crate) pager_stays: tokio::sync::RwLock<()>,
    /// All are parked for the end of the machine: nobody begins or wakes any more.
    pub(crate) resting: AtomicBool,
    /// What working sets may take in memory, bytes; none for a part of all that may be used.
    pub(crate) set_memory: Option<u64>,
    pub(crate) observer: Option<Arc<dyn WakeObserver>>,
    /// The object store, if there is one.
    pub(crate) archive: Option<Arc<Archive>>,
    pub(crate) programs: PathBuf,
    pub(crate) launcher: Mutex<Arc<Launcher>>,
    /// `kip-restore`, to be executed by descriptor.
    pub(crate) restorer: OwnedFd,
    /// Wakes are CRIU's alone: asked for, or because this kernel cannot make the sandbox of a rebuild.
    pub(crate) only_criu: AtomicBool,
    pub(crate) pool: Arc<NetPool>,
    pub(crate) kits: Kits,
    pub(crate) nat: Nat,
    pub(crate) base: Base,
    pub(crate) images: Arc<Images>,
    pub(crate) cgroups: Cgroups,
    pub(crate) pressure: Arc<Pressure>,
    pub(crate) helpers: Arc<HelperPool>,
    pub(crate) exec_ends: Ends,
    pub(crate) events: Events,
    pub(crate) metrics: Metrics,
    pub(crate) logs: LogPump,
    pub(crate) wake_plane: Arc<WakePoll<Slot>>,
    pub(crate) records: Records,
    pub(crate) handles: Mutex<HashMap<Slot, Handle>>,
    pub(crate) claims: Claims,
    pub(crate) closing: AtomicBool,
    /// The keeper ends because it was told to.
    pub(crate) ends_keeper: AtomicBool,
    pub(crate) _instance_lock: File,
    pub(crate) _fast_breakpoints: Option<OwnedFd>,
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Machine({})", self.data.display())
    }
}

/// No instance number is free, or its lock cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    /// The directory of locks.
    #[error("{path}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// All are taken.
    #[error("16 data directories already run on this machine: `kip down` one of them")]
    Full,
}

/// Takes the instance number this data directory had before if it is free, else the lowest that no directory uses.
pub(crate) fn take_instance(data: &Path) -> Result<(Instance, File), InstanceError> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| InstanceError::Io { path, source }
    };
    let dir = Path::new(INSTANCES);
    let remembered = fs::read_to_string(data.join("run/instance")).ok().and_then(|t| t.trim().parse::<u8>().ok());
    let order = remembered.into_iter().chain((0..kip_net::addr::INSTANCES).filter(|n| Some(*n) != remembered));
    for number in order {
        let Ok(instance) = Instance::new(number) else { continue };
        let path = dir.join(format!("instance-{number}"));
        let Some(mut file) = lock(&path).map_err(at(&path))? else { continue };
        if is_others(number, data) {
            continue;
        }
        file.set_len(0).and_then(|()| file.write_all(data.as_os_str().as_encoded_bytes())).map_err(at(&path))?;
        let mark = data.join("run/instance");
        fs::write(&mark, number.to_string()).map_err(at(&mark))?;
        return Ok((instance, file));
    }
    Err(InstanceError::Full)
}

/// Whether a number is another data directory's. One whose daemon died may still have procs running: it belongs to its directory
/// while that remembers it.
fn is_others(number: u8, data: &Path) -> bool {
    let owner = fs::read_to_string(Path::new(INSTANCES).join(format!("instance-{number}"))).unwrap_or_default();
    let other = Path::new(owner.trim());
    let remembered = || fs::read_to_string(other.join("run/instance")).is_ok_and(|t| t.trim() == number.to_string());
    !owner.trim().is_empty() && other != data && remembered()
}

/// The number that a data directory without one is to take: `wanted`, unless it is another's. None if all are.
pub(crate) fn free_instance(wanted: u8, data: &Path) -> Option<Instance> {
    let order = std::iter::once(wanted).chain(0..kip_net::addr::INSTANCES);
    order.filter_map(|number| Instance::new(number).ok()).find(|instance| !is_others(instance.number(), data))
}

/// All ids of an instance: the first, and how many.
pub(crate) fn ids_of(instance: Instance) -> (u32, u32) {
    let count = u32::from(kip_net::addr::SLOTS) * IDS_PER_BLOCK;
    (FIRST_ID + u32::from(instance.number()) * count, count)
}

/// Locks the file at a path, which is made if it is not there; None if somebody else has the lock. Whoever gives a number back
/// removes its file: a lock on a file that the path does not lead to any more keeps nobody away, so another is opened then.
fn lock(path: &Path) -> io::Result<Option<File>> {
    const TRIES: u32 = 1000;
    let opened = || {
        path.parent().map(fs::create_dir_all).transpose()?;
        File::options().read(true).write(true).create(true).truncate(false).open(path)
    };
    let mut tries = 0;
    loop {
        tries += 1;
        let file = match opened() {
            // The last one to give its number back removes the directory as well, maybe right now.
            Err(e) if tries < TRIES && matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {
                continue;
            }
            opened => opened?,
        };
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        let locked = file.metadata()?;
        match fs::metadata(path) {
            Ok(there) if (there.dev(), there.ino()) == (locked.dev(), locked.ino()) => return Ok(Some(file)),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
}

/// Gives the instance number back, for good. Its lock is held until after this.
pub(crate) fn release_instance(data: &Path, instance: Instance) {
    let _ = fs::remove_file(data.join("run/instance"));
    let _ = fs::remove_file(Path::new(INSTANCES).join(format!("instance-{}", instance.number())));
    // Only if it is empty.
    let _ = fs::remove_dir(INSTANCES);
}

/// First host id of a slot's block.
pub(crate) fn first_id(instance: Instance, slot: Slot) -> u32 {
    let block = u32::from(instance.number()) * u32::from(kip_net::addr::SLOTS) + u32::from(slot.number());
    FIRST_ID + block * IDS_PER_BLOCK
}

impl Machine {
    /// First host id of a slot's block.
    pub(crate) fn first_id(&self, slot: Slot) -> u32 {
        first_id(self.instance, slot)
    }

    /// The skeleton of a new proc.
    pub(crate) fn base_of(&self, spec: &Spec) -> PathBuf {
        match &spec.image {
            Image::Oci(_) => self.base.over_image.clone(),
            Image::Host | Image::Tar(_) => self.base.root.clone(),
        }
    }

    fn handles(&self) -> std::sync::MutexGuard<'_, HashMap<Slot, Handle>> {
        self.handles.lock().expect("no holder of this lock panics")
    }

    /// Makes a proc known to wake plane and keeper watch.
    pub(crate) fn enlist(&self, handle: Handle) {
        self.handles().insert(handle.proc.slot, handle);
    }

    /// The proc is removed; its slot is free.
    pub(crate) fn strike(&self, slot: Slot) {
        self.handles().remove(&slot);
        self.kits.free(slot);
    }

    /// The task of the proc in that slot.
    pub(crate) fn handle(&self, slot: Slot) -> Option<Handle> {
        self.handles().get(&slot).cloned()
    }

    /// All procs that exist.
    pub(crate) fn live_procs(&self) -> Vec<Arc<Proc>> {
        self.handles().values().map(|h| Arc::clone(&h.proc)).collect()
    }

    /// Whether the proc of that slot has ended.
    pub(crate) fn is_stopped(&self, slot: Slot) -> bool {
        let stopped =
            |h: &Handle| matches!(h.status.borrow().record.state, State::Stopped { .. } | State::Restarting { .. });
        self.handles().get(&slot).is_some_and(stopped)
    }

    /// Nothing that dies from now on is replaced.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    /// Whether the daemon is ending.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Polls the held sockets of a parked proc from now on.
    pub(crate) fn watch_sockets(&self, proc: &Proc, body: &Body) {
        for socket in &body.sockets {
            let Some(fd) = proc.holdings.get(&format!("{}{}", key::SOCKET, socket.inode)) else { continue };
            let wake_on = wake_on(&proc.spec.ports, &socket.options.kind);
            let held = Held { fd, saved: socket.options };
            if let Err(e) = self.wake_plane.add(proc.slot, held, wake_on) {
                tracing::warn!(proc = %proc.name, inode = socket.inode, error = chain(&e), "a held socket cannot be watched");
            }
        }
    }

    /// Polls the sockets of a hibernated proc whose threads are held, from now on.
    pub(crate) fn watch_held(&self, proc: &Proc, sockets: &[Held]) {
        for held in sockets {
            let wake_on = wake_on(&proc.spec.ports, &held.saved.kind);
            if let Err(e) = self.wake_plane.add(proc.slot, held.clone(), wake_on) {
                tracing::warn!(proc = %proc.name, error = chain(&e), "a socket of a held program cannot be watched");
            }
        }
    }

    /// Whether a socket wakes its proc as soon as it is readable.
    pub(crate) fn wakes_at_once(&self, proc: &Proc, kind: &Kind) -> bool {
        wake_on(&proc.spec.ports, kind) == WakeOn::Connect
    }

    /// Polls them no longer.
    pub(crate) fn unwatch_sockets(&self, proc: &Proc) {
        self.wake_plane.remove(&proc.slot);
    }

    /// The launcher of the moment.
    pub(crate) fn launcher(&self) -> Arc<Launcher> {
        Arc::clone(&self.launcher.lock().expect("no holder of this lock panics"))
    }

    /// Tells those who wait how their programs under exec ended, and starts another launcher when this one dies; runs on
    /// a thread of its own.
    pub(crate) fn serve_launcher(self: &Arc<Machine>) {
        let machine = Arc::clone(self);
        let serve = move || {
            while !machine.is_closing() {
                let gone = machine.serve_exec_ends(&machine.launcher());
                if machine.is_closing() {
                    return;
                }
                tracing::warn!(error = chain(&gone), "kip-launch has died; starting another");
                machine.exec_ends.forget();
                match Launcher::spawn(&machine.programs.join("kip-launch")) {
                    Ok(new) => *machine.launcher.lock().expect("no holder of this lock panics") = Arc::new(new),
                    Err(e) => {
                        tracing::error!(error = chain(&e), "no launcher can be started");
                        std::thread::sleep(Duration::from_secs(1));
                    }
                }
            }
        };
        std::thread::Builder::new().name("launcher".to_owned()).spawn(serve).expect("a thread can be started");
    }

    /// Returns when that launcher is gone.
    fn serve_exec_ends(&self, launcher: &Launcher) -> LaunchError {
        use rustix::event::{PollFd, PollFlags, poll};
        loop {
            match launcher.next_event() {
                Ok(Some(ended)) => self.exec_ends.tell(ended),
                Ok(None) => {
                    let _ = poll(&mut [PollFd::new(&launcher.events(), PollFlags::IN)], None);
                }
                Err(gone) => return gone,
            }
        }
    }

    /// Follows the pager, and starts another when it dies; runs on a thread of its own. What is outdated is replaced once it is
    /// followed.
    pub(crate) fn serve_pager(self: &Arc<Machine>) {
        let weak = Arc::downgrade(self);
        let (is_followed, first) = tokio::sync::oneshot::channel();
        tokio::spawn({
            let weak = weak.clone();
            async move {
                if first.await.is_ok()
                    && let Some(machine) = weak.upgrade()
                {
                    outdated::replace(&machine).await;
                }
            }
        });
        let serve = move || {
            let mut is_followed = Some(is_followed);
            loop {
                let Some(machine) = weak.upgrade() else { return };
                if machine.is_closing() {
                    return;
                }
                let followed = machine.take_up_pager();
                if followed.is_ok()
                    && let Some(tell) = is_followed.take()
                {
                    let _ = tell.send(());
                }
                drop(machine);
                match followed {
                    Ok(events) => {
                        while let Ok(event) = events.next() {
                            let Some(machine) = weak.upgrade() else { return };
                            match event {
                                Event::Woke { number, turn, woken, by, .. } => {
                                    machine.tell_task(number, Command::Awake { turn, woken, by });
                                }
                                Event::Damaged { number, message, .. } => {
                                    machine.tell_task(number, Command::Damaged { message });
                                }
                                Event::Missing { number, file, first, pages, .. } => {
                                    machine.bring_missing(number, file, first..first + pages);
                                }
                            }
                        }
                    }
                    Err(e) => {
                        tracing::error!(error = chain(&e), "there is no pager");
                        std::thread::sleep(Duration::from_secs(1));
                    }
                }
            }
        };
        std::thread::Builder::new().name("pager".to_owned()).spawn(serve).expect("a thread can be started");
    }

    /// Of all procs.
    pub(crate) fn all_handles(&self) -> Vec<Handle> {
        self.handles().values().cloned().collect()
    }

    /// Makes sure that there is a pager and that it knows all that is out.
    fn take_up_pager(&self) -> Result<kip_pager::client::Events, kip_pager::client::PagerError> {
        let (status, _, started) = self.pager.ensure()?;
        let all = self.all_handles();
        if started {
            self.events.tell(None, "pager", format!("replaced, pid {}", status.pid));
            for handle in &all {
                crate::hibernate::take_up(&handle.proc);
            }
        }
        self.pager.budget(self.set_memory.unwrap_or_else(|| self.pressure.marks.set_bytes()) as usize)?;
        let events = self.pager.follow()?;
        // What happened while nobody listened.
        for handle in &all {
            self.tell_task(handle.proc.slot.number().into(), Command::LookAtPager);
        }
        Ok(events)
    }

    /// Why nothing is begun any more, if the daemon is about to end.
    pub(crate) fn rests(&self) -> Option<Refusal> {
        let rests = self.resting.load(Ordering::SeqCst);
        let message =
            "all procs are being parked and the daemon is about to end (`kip down --park`): the next `kip up` has them";
        rests.then(|| Refusal::new(Code::State, message))
    }

    fn numbered(&self, number: u32) -> Option<Handle> {
        let slot = u16::try_from(number).ok().and_then(|n| Slot::new(n).ok());
        slot.and_then(|slot| self.handles().get(&slot).cloned())
    }

    /// A running proc waits for pages that are in the store.
    fn bring_missing(&self, number: u32, file: String, pages: Range<u32>) {
        let Some(Handle { proc, inbox, .. }) = self.numbered(number) else { return };
        let Some(archive) = self.archive.clone() else {
            let message = "it waits for memory that is in a store, and there is none: `kip up --store URL`";
            return tracing::error!(proc = %proc.name, message);
        };
        let directory = proc.dir.join(crate::hibernate::DIRECTORY).join(kip_pager::proc::PARKED);
        archive.clone().spawn(async move {
            match archive.bring_missing(&directory, &file, pages).await {
                Brought::All | Brought::Later { tell: None } => {}
                Brought::Later { tell: Some(error) } => {
                    let message = format!("it waits for memory that is in the store: {error}");
                    proc.shared.events.tell(Some(&proc.name), "waiting", message);
                }
                Brought::Damaged(message) => drop(inbox.send(Command::Damaged { message }).await),
            }
        });
    }

    fn tell_task(&self, number: u32, command: Command) {
        if let Some(handle) = self.numbered(number)
            && handle.inbox.blocking_send(command).is_err()
        {
            tracing::debug!(proc = %handle.proc.name, "an event for a proc that is being removed");
        }
    }

    /// Wakes a held proc, without its task: that hears of it when the program may run already. None if there is no room,
    /// or it is not hibernated: then it is its task's business.
    fn rouse_held(&self, handle: &Handle, key: Slot, label: &str) -> Option<Grant> {
        let leave = {
            let status = handle.status.borrow();
            let hibernated = matches!(status.record.state, State::Hibernated { .. });
            hibernated.then(|| task::need(&handle.proc, &status.record, status.asleep))
        };
        let leave = self.pressure.try_admit(&leave?)?;
        // The program may run as soon as our duplicates are gone.
        self.wake_plane.remove(&key);
        if let Err(e) = self.pager.rouse(handle.proc.name.as_str(), &crate::hibernate::kind_of(label)) {
            tracing::warn!(proc = %handle.proc.name, error = chain(&e), "a held proc is not woken yet");
        }
        Some(leave)
    }

    /// Hands the wake plane's events to the tasks; runs on a thread of its own until the plane is closed.
    pub(crate) fn serve_wake_plane(self: &Arc<Machine>) {
        let plane = Arc::clone(&self.wake_plane);
        let machine = Arc::downgrade(self);
        let serve = move || {
            while let Ok(events) = plane.wait(None) {
                let at = Instant::now();
                let Some(machine) = machine.upgrade() else { return };
                for event in events {
                    let handle = machine.handles().get(&event.key).cloned();
                    let Some(handle) = handle else { continue };
                    let key = event.key;
                    let label = event.to_string();
                    let leave = machine.rouse_held(&handle, key, &label);
                    if handle.inbox.try_send(Command::Socket { label, at, leave }).is_err()
                        && let Err(e) = machine.wake_plane.rearm(&key)
                    {
                        // Its queue was full: the event is reported again.
                        tracing::warn!(proc = %handle.proc.name, error = chain(&e), "a wake event is lost");
                    }
                }
            }
        };
        std::thread::Builder::new().name("wake-plane".to_owned()).spawn(serve).expect("a thread can be started");
    }
}

/// What on this socket wakes: only TCP listeners of declared ports have a choice.
fn wake_on(ports: &[PortSpec], kind: &Kind) -> WakeOn {
    let Kind::Listener { local, .. } = kind else { return WakeOn::Connect };
    let declared = ports.iter().find(|p| p.proto == Protocol::Tcp && p.port == local.port());
    declared.map_or(WakeOn::Connect, |p| p.wake_on)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn a_lock_whose_file_is_removed_by_its_holder_is_one_holders_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("locks/instance-0");
        let (holders, taken) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let Some(held) = lock(&path).unwrap() else { continue };
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two have it");
                        taken.fetch_add(1, Ordering::SeqCst);
                        holders.fetch_sub(1, Ordering::SeqCst);
                        fs::remove_file(&path).unwrap();
                        let _ = fs::remove_dir(path.parent().unwrap());
                        drop(held);
                    }
                });
            }
        });
        assert!(taken.into_inner() > 8);
    }
}
