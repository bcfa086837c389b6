//! The procs of one data directory: what the API asks of them.

use crate::{inspect, view, why};
use kip_engine::blocking::blocking;
use kip_engine::cause::{Request, WakeCause};
use kip_engine::exec::ExecSession;
use kip_engine::host::Host;
use kip_engine::host::Proc;
use kip_engine::host::names;
use kip_engine::metrics::{Moment, Process};
use kip_engine::stop::Network;
use kip_engine::{exec, fd_store, meter, prepared, secrets, stop, volumes};
use kip_net::Slot;
use kip_records::record;
use kip_records::state::Record;
use kip_supervisor::probe;
use kip_supervisor::probe::Listeners;
use kip_supervisor::registry::Registry;
use kip_supervisor::task::{By, Command, Handle, Task};
use kip_types::api::{
    CacheView, Code, Detail, Details, Event, ExecRequest, HealthView, MeterView, ProcView, Refusal, RoomView, WhyView,
};
use kip_types::chain;
use kip_types::keys::Hex;
use kip_types::spec::{Clock, parse_signal};
use kip_types::{Image, ProcName, Spec, State, Tier};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast;

/// Beyond the time that a proc has to become ready, for telling so.
const READY_MORE: Duration = Duration::from_millis(500);
/// How many procs end at the same time when all do. Most of that time each waits: for its program, for a disk, for the kernel.
const ENDING_AT_ONCE: usize = 16;
/// The same for parked ones, which are rebuilt for it.
const WAKING_AT_ONCE: usize = 4;

/// The worker of one data directory.
#[derive(Debug)]
pub struct Worker {
    pub(crate) machine: Arc<Host>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) procs: Mutex<BTreeMap<ProcName, Handle>>,
    pub(crate) history: crate::history::History,
    /// One at a time.
    pub(crate) backing_up: Mutex<()>,
}

impl Worker {
    pub(crate) fn handle(&self, name: &ProcName) -> Result<Handle, Refusal> {
        let procs = self.procs.lock();
        procs.get(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = procs.keys().take(5).map(ProcName::as_str).collect();
            let hint = match kip_types::nearest(name.as_str(), procs.keys().map(ProcName::as_str)) {
                Some(nearest) => format!("did you mean {nearest}?"),
                None if known.is_empty() => "none exists".to_owned(),
                None => format!("there are {}", known.join(", ")),
            };
            Refusal::new(Code::Unknown, format!("there is no proc {:?}; {hint} (`kip ps` lists them)", name.as_str()))
        })
    }

    pub(crate) fn handles(&self) -> Vec<Handle> {
        self.procs.lock().values().cloned().collect()
    }

    pub(crate) fn forget(&self, name: &ProcName) {
        self.procs.lock().remove(name);
    }

    pub(crate) fn adopt(
        &self,
        proc: Arc<Proc>,
        record: Record,
        prepared: Option<prepared::PreparedNetwork>,
        listeners: Listeners,
    ) -> Handle {
        let name = proc.name.clone();
        let (mut task, handle) = Task::new(proc, record, prepared, self.registry.when_removed());
        self.registry.enlist(handle.clone());
        task.probes = probe::serve(&handle, listeners);
        task.start_running();
        self.procs.lock().insert(name, handle.clone());
        handle
    }

    /// Creates and starts a proc. The spec is complete: nothing is left open.
    pub async fn run(
        self: &Arc<Self>,
        spec: Spec,
        secrets: BTreeMap<String, Hex>,
        wait_ready: bool,
    ) -> Result<ProcView, Refusal> {
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        // Its layers are kept until the proc is known, which keeps them then.
        let (spec, _in_use) = self.complete(spec).await?;
        check_spec(&spec)?;
        let name = spec.name.clone();
        self.machine.pressure.admit_new(&name).await?;
        let listeners = probe::listen(&spec)?;
        let worker = Arc::clone(self);
        let (proc, prepared, record, claim) = blocking(move || worker.create(spec, secrets)).await?;
        let handle = self.adopt(proc, record, Some(prepared), listeners);
        self.notify_network(&handle.proc.spec).await;
        drop(claim);
        let started = handle.ask(|reply| Command::Start { wait_ready, reply }).await;
        if started.is_err() {
            self.forget(&name);
            self.notify_network(&handle.proc.spec).await;
        }
        started?;
        ready(&handle).await?;
        Ok(blocking(move || view::proc_view(&handle)).await)
    }

    pub(crate) fn create(
        &self,
        mut spec: Spec,
        secrets: BTreeMap<String, Hex>,
    ) -> Result<(Arc<Proc>, prepared::PreparedNetwork, Record, volumes::Claim), Refusal> {
        let machine = &self.machine;
        let name = spec.name.clone();
        if self.procs.lock().contains_key(&name) {
            return Err(taken(&name));
        }
        let claim = volumes::declare(machine, &mut spec)?;
        let sealed = secrets::seal(machine, &mut spec, secrets)
            .map_err(|e| Refusal::new(Code::Failed, format!("{name} cannot start: {}", chain(&e))))?;
        let prepared = machine
            .prepared_networks
            .take()
            .map_err(|e| Refusal::new(Code::Exhausted, format!("{name} cannot start: {}", chain(&e))))?;
        let record = Record::new(prepared.slot.number(), machine.base_of(&spec));
        let made = machine.records.prepare(&name, &spec, &record).and_then(|made| {
            sealed.iter().try_for_each(|sealed| made.add(secrets::FILE, sealed))?;
            made.publish()
        });
        made.map_err(|e| {
            let _ = machine.pool.release(&[prepared.slot]);
            machine.prepared_networks.free(prepared.slot);
            match e {
                record::RecordError::Exists { .. } => taken(&name),
                other => Refusal::new(Code::Exhausted, format!("{name} cannot be recorded: {}", chain(&other))),
            }
        })?;
        let fd_store = fd_store::FdStore::new(&name, Arc::clone(&machine.keeper));
        let meter = meter::Meter::new(kip_sys::clock::now_ms());
        let proc = Proc::new(machine, spec, prepared.slot, record.base.clone(), fd_store, meter);
        Ok((proc, prepared, record, claim))
    }

    /// All names.
    pub fn names(&self) -> Vec<ProcName> {
        self.procs.lock().keys().cloned().collect()
    }

    /// All procs, sorted by name.
    pub async fn list(&self) -> Vec<ProcView> {
        let handles = self.handles();
        blocking(move || {
            let mut views = view::proc_views(&handles);
            for view in &mut views {
                view.spec.asked = None;
                view.spec.hide_values();
            }
            views
        })
        .await
    }

    /// One proc. Does not wake it.
    pub async fn inspect(&self, name: &ProcName) -> Result<ProcView, Refusal> {
        let mut handle = self.handle(name)?;
        handle.wait_until_stable().await;
        Ok(blocking(move || view::proc_view(&handle)).await)
    }

    /// How a proc is: its probes are asked, if it is awake and they were not a moment ago. Neither wakes it nor keeps it awake.
    pub async fn health(&self, name: &ProcName) -> Result<HealthView, Refusal> {
        let handle = self.handle(name)?;
        Ok(probe::health(&handle, &handle.proc.spec.probes).await)
    }

    /// A proc from within. Does not wake it, and changes nothing.
    pub async fn details(&self, name: &ProcName, of: Detail) -> Result<Details, Refusal> {
        inspect::details(&mut self.handle(name)?, of).await
    }

    /// What a proc has used, all of it or after `since_ms`. Does not wake it.
    pub async fn meter(&self, name: &ProcName, since_ms: Option<u64>) -> Result<MeterView, Refusal> {
        let handle = self.handle(name)?;
        Ok(blocking(move || view::meter_view(&handle, since_ms)).await)
    }

    /// What all procs have used, sorted by name.
    pub async fn meters(&self, since_ms: Option<u64>) -> Vec<MeterView> {
        let handles = self.handles();
        blocking(move || handles.iter().map(|handle| view::meter_view(handle, since_ms)).collect()).await
    }

    /// Metrics, in Prometheus' text format. Inspects no proc.
    pub async fn metrics(&self) -> String {
        let handles = self.handles();
        let machine = Arc::clone(&self.machine);
        blocking(move || {
            let archive = machine.archive.as_ref();
            let moment = Moment {
                procs: handles.iter().map(view::proc_now).collect(),
                room: Some(machine.pressure.view()),
                wanted_bytes: machine.pressure.wanted_bytes(),
                cache: archive.and_then(|archive| archive.cache_use()),
                store: archive.map(|archive| archive.store_use()),
                refused: machine.pressure.refused(),
                process: Process::read(),
            };
            machine.metrics.text(moment)
        })
        .await
    }

    /// Why the proc is in the tier that it is in. Watches a running one for a second; touches,
    /// wakes and waits for no proc.
    pub async fn why(&self, name: &ProcName) -> Result<WhyView, Refusal> {
        let handle = self.handle(name)?;
        Ok(why::why(&handle).await)
    }

    /// Starts a stopped proc; with `wait_ready` returns when its ports listen.
    pub async fn start(&self, name: &ProcName, wait_ready: bool) -> Result<ProcView, Refusal> {
        let handle = self.handle(name)?;
        if matches!(handle.status.borrow().record.state, State::Stopped { .. } | State::Restarting { .. }) {
            self.machine.pressure.admit_new(name).await?;
        }
        handle.ask(|reply| Command::Start { wait_ready, reply }).await?;
        self.inspect(name).await
    }

    /// Ends a proc; its name, files and logs stay.
    pub async fn stop(&self, name: &ProcName, grace: Option<Duration>) -> Result<ProcView, Refusal> {
        let network = Network::Removed;
        let handle = self.handle(name)?;
        let grace = grace.unwrap_or_else(|| grace_of(&handle));
        handle.ask(|reply| Command::Stop { grace, network, reply }).await?;
        self.inspect(name).await
    }

    /// Removes a proc.
    pub async fn remove(&self, name: &ProcName, force: bool) -> Result<(), Refusal> {
        let handle = self.handle(name)?;
        handle.ask(|reply| Command::Remove { force, reply }).await?;
        self.forget(name);
        self.notify_network(&handle.proc.spec).await;
        Ok(())
    }

    /// Notifies a proc's network that it has come or gone.
    pub(crate) async fn notify_network(&self, spec: &Spec) {
        if let Some(network) = spec.network.clone() {
            let machine = Arc::clone(&self.machine);
            blocking(move || names::write_all(&machine, &network)).await;
        }
    }

    /// Sends a proc to a lower tier; `clock` is its owner's word for that one sleep. Returns
    /// whether it was there already.
    pub async fn sleep(&self, name: &ProcName, to: Tier, clock: Option<Clock>) -> Result<(ProcView, bool), Refusal> {
        if (to, clock) == (Tier::Hibernated, Some(Clock::Suspend)) {
            let message = format!(
                "{name} cannot be hibernated with a clock that stands: its threads stay in place, and its clocks go on; \
                 use `--to parked`, or leave out `--clock`"
            );
            return Err(Refusal::new(Code::Invalid, message));
        }
        let already = self.handle(name)?.ask(|reply| Command::Sleep { to, by: By::Owner(clock), reply }).await?;
        Ok((self.inspect(name).await?, already))
    }

    /// Wakes a proc; tells whether it was running already. One that is not here is taken over from the store: that of the id, or
    /// the one that has this name, or id, there.
    pub async fn wake(&self, name: &ProcName, id: Option<&str>) -> Result<(ProcView, bool), Refusal> {
        let name = &match self.handle(name) {
            Err(unknown) => self.take_over(name, id, unknown).await?,
            Ok(_) if id.is_some() => return Err(taken(name)),
            Ok(handle) => {
                self.take_over_again(&handle).await?;
                name.clone()
            }
        };
        let already =
            self.handle(name)?.ask(|reply| Command::Wake { cause: WakeCause::Request(Request::Wake), reply }).await?;
        Ok((self.inspect(name).await?, already))
    }

    /// Runs a program inside a proc, which is woken for it.
    pub async fn exec(&self, name: &ProcName, request: ExecRequest) -> Result<ExecSession, Refusal> {
        let handle = self.handle(name)?;
        let cause = WakeCause::Request(Request::Exec);
        let ticket = handle.ask(|reply| Command::KeepAwake { cause, reply }).await?;
        exec::exec(handle.proc, request, ticket).await
    }

    /// The proc's log directory.
    pub fn log_directory(&self, name: &ProcName) -> Result<PathBuf, Refusal> {
        Ok(self.handle(name)?.proc.dir.join("logs"))
    }

    /// Events that are kept and come after the one with id `since`, and those to come.
    pub fn events(&self, since: u64) -> (Vec<Event>, broadcast::Receiver<Event>) {
        self.machine.events.subscribe(since)
    }

    /// Lets go of the machine's parts; procs run on, to be taken up by the next daemon.
    pub async fn close(&self) {
        let machine = Arc::clone(&self.machine);
        blocking(move || {
            machine.close();
            machine.helpers.close();
            machine.events.close();
        })
        .await;
    }

    /// Wakes of all procs in the last minute.
    pub fn wakes_last_minute(&self) -> u64 {
        self.machine.events.per_minute("woken", kip_sys::clock::now_ms())
    }

    /// How full memory is.
    pub fn room(&self) -> RoomView {
        self.machine.pressure.view()
    }

    /// What is kept on the local disk of what is in the store.
    pub fn cache(&self) -> Option<CacheView> {
        let (bytes, limit_bytes) = self.machine.archive.as_ref()?.cached()?;
        Some(CacheView { bytes, limit_bytes })
    }

    /// The name of this worker.
    pub fn name(&self) -> &str {
        &self.machine.name
    }

    /// The keeper's process id.
    pub fn keeper_pid(&self) -> u32 {
        self.machine.keeper.pid()
    }

    /// The pager's process id; 0 while there is none.
    pub async fn pager_pid(&self) -> u32 {
        let machine = Arc::clone(&self.machine);
        blocking(move || machine.pager.pid().unwrap_or(0)).await
    }

    /// Ends every proc and everything that is kept running for them: nothing of this data directory is left on the
    /// machine but its files. Returns the names of those that were running or asleep.
    pub async fn down(&self) -> Result<Vec<ProcName>, Refusal> {
        let handles = self.handles();
        // Each is looked at once: one that wakes or falls asleep meanwhile is in one of the two all the same.
        let (mut up, mut parked) = (Vec::new(), Vec::new());
        for handle in handles {
            let state = handle.status.borrow().record.state.clone();
            match state {
                State::Stopped { .. } | State::Elsewhere { .. } => {}
                // Last: to end in order they need the room that the others leave.
                State::Parked { .. } | State::Archived { .. } => parked.push(handle),
                _ => up.push(handle),
            }
        }
        let names: Vec<ProcName> = up.iter().chain(&parked).map(|h| h.proc.name.clone()).collect();
        let slots: Vec<Slot> = up.iter().chain(&parked).map(|h| h.proc.slot).collect();
        let mut ended = end_all(up, ENDING_AT_ONCE).await;
        if ended.is_ok() {
            ended = end_all(parked, WAKING_AT_ONCE).await;
        }
        if let Err(refusal) = ended {
            // Those that run on keep theirs.
            let stopped = |slot: &Slot| self.registry.is_stopped(*slot);
            let slots: Vec<Slot> = slots.into_iter().filter(stopped).collect();
            let machine = Arc::clone(&self.machine);
            blocking(move || stop::remove_networks(&machine, &slots)).await?;
            return Err(refusal);
        }
        let machine = Arc::clone(&self.machine);
        blocking(move || machine.dismantle()).await?;
        Ok(names)
    }
}

/// Ends all of them, so many at the same time. Those that had begun are waited for when one cannot be ended.
pub(crate) async fn end_all(handles: Vec<Handle>, at_once: usize) -> Result<(), Refusal> {
    let mut waiting = handles.into_iter();
    let mut ending = tokio::task::JoinSet::new();
    let mut all = Ok(());
    loop {
        while all.is_ok()
            && ending.len() < at_once
            && let Some(handle) = waiting.next()
        {
            let grace = grace_of(&handle);
            let stop = move |reply| Command::Stop { grace, network: Network::Left, reply };
            ending.spawn(async move { handle.ask(stop).await });
        }
        let Some(ended) = ending.join_next().await else { return all };
        all = all.and(ended.expect("stopping does not panic"));
    }
}

/// Waits until a proc that was started is ready, if its spec says what that is. It runs on if it is not.
pub(crate) async fn ready(handle: &Handle) -> Result<(), Refusal> {
    let Some(ready) = &handle.proc.spec.ready else { return Ok(()) };
    let name = &handle.proc.name;
    let mut status = handle.status.clone();
    let decided = status.wait_for(|s| match s.record.state {
        State::Stopped { .. } => true,
        State::Hot { .. } => !s.starting,
        _ => s.record.ready == Some(true),
    });
    let decided = tokio::time::timeout(Duration::from_millis(ready.within_ms) + READY_MORE, decided).await;
    let record = match decided {
        Ok(Ok(status)) if status.record.ready == Some(true) => return Ok(()),
        Ok(Ok(status)) => Some(status.record.clone()),
        Ok(Err(_)) => return Err(Refusal::new(Code::Unknown, format!("{name} was removed before it was ready"))),
        Err(_) => None,
    };
    let message = match record.map(|record| record.state) {
        Some(State::Stopped { exit }) => {
            let how = exit.map_or_else(|| "it was stopped".to_owned(), |exit| exit.to_string());
            let last = handle.proc.shared.last_words(&handle.proc);
            format!("{name} ended before it was ready ({}): {how}{last}; its name, files and logs stay", ready.check)
        }
        _ => {
            let why = handle.proc.shared.events.last_detail(name, "not-ready");
            let why = why.map(|why| format!(": {why}")).unwrap_or_default();
            format!(
                "{name} was not ready ({}) within {} ms{why}; it is left as it is: `kip logs {name}` has its output, `kip rm --force {name}` ends it",
                ready.check, ready.within_ms
            )
        }
    };
    Err(Refusal::new(Code::Failed, message))
}

/// The time that a program has to end in order, if the caller does not say.
pub(crate) fn grace_of(handle: &Handle) -> Duration {
    Duration::from_millis(handle.proc.spec.grace_ms(None))
}

pub(crate) fn taken(name: &ProcName) -> Refusal {
    Refusal::new(
        Code::Taken,
        format!("a proc named {:?} exists already: choose another name, or `kip rm {name}` first", name.as_str()),
    )
}

pub(crate) fn check_spec(spec: &Spec) -> Result<(), Refusal> {
    let invalid = |message: String| Err(Refusal::new(Code::Invalid, message));
    let name = &spec.name;
    if spec.command.first().is_none_or(String::is_empty) {
        return invalid(format!("{name}: no command given: write it after `--`"));
    }
    if let Some(bad) = spec.command.iter().chain(spec.env.values()).find(|t| t.contains('\0')) {
        return invalid(format!("{name}: {bad:?} contains a NUL byte"));
    }
    if let Some(bad) = spec.env.keys().find(|k| k.is_empty() || k.contains(['=', '\0'])) {
        return invalid(format!("{name}: {bad:?} cannot be the name of an environment variable"));
    }
    for (n, port) in spec.ports.iter().enumerate() {
        if spec.ports[..n].iter().any(|p| (p.proto, p.port) == (port.proto, port.port)) {
            return invalid(format!("{name}: {} port {} is given twice", port.proto, port.port));
        }
    }
    if let Some(Err(e)) = spec.stop_signal.as_deref().map(parse_signal) {
        return invalid(format!("{name}: stop {e}"));
    }
    if let Image::Tar(path) = &spec.image
        && !path.is_file()
    {
        return invalid(format!("{name}: there is no tarball {}", path.display()));
    }
    Ok(())
}
