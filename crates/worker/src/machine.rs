//! What all procs of a data directory share: the machine's side of the worker.
//!
//! Owns slots, pools, the wake plane's thread and the connections to keeper and launcher. Has no
//! state of any proc.

use crate::archive::{Archive, Brought};
use crate::body::Body;
use crate::events::Events;
use crate::exec_ends::Ends;
use crate::helper_pool::HelperPool;
use crate::holdings::key;
use crate::instance;
use crate::kits::Kits;
use crate::metrics::Metrics;
use crate::observe::WakeObserver;
use crate::outdated;
use crate::pressure::{Grant, Pressure};
use crate::proc::Proc;
use crate::record::Records;
use crate::task::{self, Command, Handle};
use crate::volumes::Claims;
use kip_image::Images;
use kip_keeper::Keeper;
use kip_logs::LogPump;
use kip_net::custody::{self, Held, Kind};
use kip_net::wake::WakePoll;
use kip_net::{Instance, Nat, NetPool, Slot};
use kip_pager::client::Pager;
use kip_pager::protocol::Event;
use kip_sandbox::base::Base;
use kip_sandbox::cgroup::Cgroups;
use kip_sandbox::launcher::{LaunchError, Launcher};
use kip_types::api::{Code, Refusal};
use kip_types::chain;
use kip_types::{Image, PortSpec, Protocol, Spec, State, WakeOn};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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
    /// All procs of before are known: their names can be answered for.
    pub(crate) knows_names: AtomicBool,
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

impl Machine {
    /// First host id of a slot's block.
    pub(crate) fn first_id(&self, slot: Slot) -> u32 {
        instance::first_id(self.instance, slot)
    }

    /// The skeleton of a new proc.
    pub(crate) fn base_of(&self, spec: &Spec) -> PathBuf {
        match &spec.image {
            Image::Oci(_) => self.base.over_image.clone(),
            Image::Host | Image::Tar(_) => self.base.root.clone(),
        }
    }

    pub(crate) fn handles(&self) -> std::sync::MutexGuard<'_, HashMap<Slot, Handle>> {
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

    /// Polls the held sockets of a parked proc and its watches of files from now on.
    pub(crate) fn watch(&self, proc: &Proc, body: &Body) {
        self.watch_sockets(proc, body);
        for inotify in &body.inotify {
            let Some(fd) = crate::inotify::held(inotify, proc) else { continue };
            let held = Held { fd, saved: custody::inotify(inotify.queued) };
            if let Err(e) = self.wake_plane.add(proc.slot, held, WakeOn::Connect) {
                tracing::warn!(proc = %proc.name, error = chain(&e), "held watches of files cannot be polled");
            }
        }
    }

    /// Polls its held sockets only: a wake that failed has touched its files. What was polled before is polled no longer, for a wake
    /// that failed, or a fall-back to an older generation, may have begun that already.
    pub(crate) fn watch_sockets(&self, proc: &Proc, body: &Body) {
        self.unwatch_sockets(proc);
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
        let directory = proc.dir.join(crate::proc::PAGER_DIRECTORY).join(kip_pager::proc::PARKED);
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
