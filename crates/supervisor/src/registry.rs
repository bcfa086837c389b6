//! The tasks of procs that exist, and what comes to them from outside: the wake plane's events and
//! the pager's.

use crate::task::{self, Handle, Removed, TaskCommand};
use kip_engine::cause::WakeCause;
use kip_engine::hibernate;
use kip_engine::host::{Host, Proc};
use kip_net::Slot;
use kip_offload::Fetched;
use kip_pager::protocol::PagerEvent;
use kip_pressure::Grant;
use kip_snapshot::pages::UNSYNCED;
use kip_types::State;
use kip_types::api::EventKind;
use kip_types::chain;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Processes of a clone that cannot be made are gone after this.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Which procs exist, and how each is spoken to.
#[derive(Debug)]
pub struct Registry {
    /// What procs have of their machine.
    pub host: Arc<Host>,
    handles: Mutex<HashMap<Slot, Handle>>,
}

impl Registry {
    /// Without procs.
    pub fn new(host: Arc<Host>) -> Arc<Registry> {
        Arc::new(Registry { host, handles: Mutex::default() })
    }

    fn handles(&self) -> parking_lot::MutexGuard<'_, HashMap<Slot, Handle>> {
        self.handles.lock()
    }

    /// A proc exists from now on: its task hears of the wake plane's events and of the pager's.
    pub fn enlist(&self, handle: Handle) {
        self.host.enlist(Arc::clone(&handle.proc));
        self.handles().insert(handle.proc.slot, handle);
    }

    /// Strikes a proc when its task has removed it.
    pub fn when_removed(self: &Arc<Registry>) -> Removed {
        let registry = Arc::downgrade(self);
        Removed(Box::new(move |proc| {
            if let Some(registry) = registry.upgrade() {
                registry.strike(proc);
            }
        }))
    }

    fn strike(&self, proc: &Arc<Proc>) {
        let mut handles = self.handles();
        // Its slot may be another's by now.
        if handles.get(&proc.slot).is_some_and(|handle| Arc::ptr_eq(&handle.proc, proc)) {
            handles.remove(&proc.slot);
        }
    }

    /// The proc of that slot.
    pub fn at(&self, slot: Slot) -> Option<Handle> {
        self.handles().get(&slot).cloned()
    }

    /// Whether the proc of that slot has ended.
    pub fn is_stopped(&self, slot: Slot) -> bool {
        let stopped =
            |h: &Handle| matches!(h.status.borrow().record.state, State::Stopped { .. } | State::Restarting { .. });
        self.handles().get(&slot).is_some_and(stopped)
    }

    /// Follows the pager, and starts another when it dies; runs on a thread of its own. The
    /// receiver gets `()` when it is followed for the first time.
    pub fn serve_pager(self: &Arc<Registry>) -> tokio::sync::oneshot::Receiver<()> {
        let weak = Arc::downgrade(self);
        let (is_followed, first) = tokio::sync::oneshot::channel();
        let serve = move || {
            let mut is_followed = Some(is_followed);
            loop {
                let Some(machine) = weak.upgrade() else { return };
                if machine.host.is_closing() {
                    return;
                }
                let followed = machine.take_up_pager();
                if followed.is_ok()
                    && let Some(first_follow) = is_followed.take()
                {
                    let _ = first_follow.send(());
                }
                drop(machine);
                match followed {
                    Ok(events) => {
                        while let Ok(event) = events.next() {
                            let Some(machine) = weak.upgrade() else { return };
                            match event {
                                PagerEvent::Woke { number, turn, woken, by, .. } => {
                                    machine.notify_task(number, TaskCommand::Awake { turn, woken, by });
                                }
                                PagerEvent::Damaged { number, message, .. } => {
                                    machine.notify_task(number, TaskCommand::Damaged { message });
                                }
                                PagerEvent::Missing { number, file, first, pages, .. } => {
                                    machine.fetch_missing(number, file, first..first + pages);
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
        first
    }

    /// Of all procs.
    pub fn all_handles(&self) -> Vec<Handle> {
        self.handles().values().cloned().collect()
    }

    /// Makes sure that there is a pager and that it knows all that is out.
    fn take_up_pager(&self) -> Result<kip_pager::client::PagerEvents, kip_pager::client::PagerError> {
        let (status, _, started) = self.host.pager.ensure()?;
        let all = self.all_handles();
        if started {
            self.host.events.emit(None, EventKind::Pager, format!("replaced, pid {}", status.pid));
            for handle in &all {
                hibernate::take_up(&handle.proc);
            }
        }
        self.host.pager.budget(self.host.set_memory.unwrap_or_else(|| self.host.pressure.marks.set_bytes()) as usize)?;
        let events = self.host.pager.follow()?;
        // What happened while the daemon did not listen.
        for handle in &all {
            self.notify_task(handle.proc.slot.number().into(), TaskCommand::InspectPager);
        }
        Ok(events)
    }

    fn numbered(&self, number: u32) -> Option<Handle> {
        let slot = u16::try_from(number).ok().and_then(|n| Slot::new(n).ok());
        slot.and_then(|slot| self.at(slot))
    }

    /// A running proc waits for pages that are in the store, or in copies of another one's
    /// processes.
    fn fetch_missing(&self, number: u32, file: String, pages: Range<u32>) {
        let Some(Handle { proc, inbox, .. }) = self.numbered(number) else { return };
        let directory = proc.dir.join(kip_engine::host::proc::PAGER_DIRECTORY).join(kip_pager::proc::PARKED);
        if file.ends_with(UNSYNCED) {
            // The pager's other events do not wait for the disk.
            let put = move || put_waited_for(&proc, &inbox, &directory, &file, pages);
            let begun = std::thread::Builder::new().name("fill".to_owned()).spawn(put);
            return begun.map_or_else(|e| tracing::error!(error = %e, "a thread cannot be started"), drop);
        }
        let Some(archive) = self.host.archive.clone() else {
            let message = "it waits for memory that is in a store, and there is none: `kip up --store URL`";
            return tracing::error!(proc = %proc.name, message);
        };
        archive.clone().spawn(async move {
            match archive.fetch_missing(&directory, &file, pages).await {
                Fetched::All | Fetched::Later { report: None } => {}
                Fetched::Later { report: Some(error) } => {
                    let message = format!("it waits for memory that is in the store: {error}");
                    proc.shared.events.emit(Some(&proc.name), EventKind::Waiting, message);
                }
                Fetched::Damaged(message) => drop(inbox.send(TaskCommand::Damaged { message }).await),
            }
        });
    }

    fn notify_task(&self, number: u32, command: TaskCommand) {
        if let Some(handle) = self.numbered(number)
            && handle.inbox.blocking_send(command).is_err()
        {
            tracing::debug!(proc = %handle.proc.name, "an event for a proc that is being removed");
        }
    }

    /// Wakes a held proc, without its task: that hears of it when the program may run already. None
    /// if there is no room, or it is not hibernated: then it is its task's business.
    fn rouse_held(&self, handle: &Handle, key: Slot, cause: WakeCause) -> Option<Grant> {
        let leave = {
            let status = handle.status.borrow();
            let hibernated = matches!(status.record.state, State::Hibernated { .. });
            hibernated.then(|| task::need(&handle.proc, &status.record, status.asleep))
        };
        let leave = self.host.pressure.try_admit(&leave?)?;
        // The program may run as soon as our duplicates are gone.
        self.host.wake_plane.remove(&key);
        if let Err(e) = self.host.pager.rouse(handle.proc.key.as_str(), cause.purpose()) {
            tracing::warn!(proc = %handle.proc.name, error = chain(&e), "a held proc is not woken yet");
        }
        Some(leave)
    }

    /// Hands the wake plane's events to the tasks; runs on a thread of its own until the plane is
    /// closed.
    pub fn serve_wake_plane(self: &Arc<Registry>) {
        let plane = Arc::clone(&self.host.wake_plane);
        let machine = Arc::downgrade(self);
        let serve = move || {
            while let Ok(events) = plane.wait(None) {
                let at = Instant::now();
                let Some(machine) = machine.upgrade() else { return };
                for event in events {
                    let handle = machine.handles().get(&event.key).cloned();
                    let Some(handle) = handle else { continue };
                    let key = event.key;
                    let cause = WakeCause::of(&event);
                    let leave = machine.rouse_held(&handle, key, cause);
                    if handle.inbox.try_send(TaskCommand::Socket { cause, at, leave }).is_err()
                        && let Err(e) = machine.host.wake_plane.rearm(&key)
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

/// Copies pages for which a clone waits. If that cannot be, the clone is ended, for it is none: the
/// command that makes it fails, and removes it.
fn put_waited_for(proc: &Proc, inbox: &mpsc::Sender<TaskCommand>, directory: &Path, file: &str, pages: Range<u32>) {
    let (fills, path) = (&proc.shared.fills, directory.join(file));
    let Err(e) = fills.put_waited_for(directory, file, pages) else { return };
    if fills.of(&path).is_ok_and(|fill| fill.is_some_and(|fill| fill.has_failed())) {
        tracing::warn!(proc = %proc.name, error = chain(&e), "memory of a clone cannot be copied: the clone is ended");
        if let Err(e) = proc.cgroup.kill(ENDS_WITHIN) {
            tracing::warn!(proc = %proc.name, error = chain(&e), "processes of a clone are left");
        }
        // What waits for that page waits no more.
        hibernate::forget(proc);
    } else if path.exists() {
        let message = format!("memory of its source was not copied: {}", chain(&e));
        drop(inbox.blocking_send(TaskCommand::Damaged { message }));
    }
}
