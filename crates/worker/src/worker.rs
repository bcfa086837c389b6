//! The procs of one data directory, by name, and how a new one comes among them.

use crate::claim::{Claim, Claims};
use crate::lineage::key_of;
use crate::own_file::OwnFile;
use kip_engine::blocking::blocking;
use kip_engine::host::{Host, Proc, names};
use kip_engine::start::listens;
use kip_engine::{fd_store, secrets, volumes};
use kip_insight::history::TierHistory;
use kip_journal::meter;
use kip_net::prepared::PreparedNetwork;
use kip_records::record;
use kip_records::state::Record;
use kip_runtime::RuntimeParts;
use kip_service::{SpawnPrograms, TreeService};
use kip_supervisor::probe::{self, Listeners};
use kip_supervisor::recover::numbered;
use kip_supervisor::registry::Registry;
use kip_supervisor::runtime::RuntimeProcs;
use kip_supervisor::spawned::{SpawnHost, SpawnProcs};
use kip_supervisor::task::{Handle, Task};
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::chain;
use kip_types::keys::Hex;
use kip_types::name::Realm;
use kip_types::spec::parse_signal;
use kip_types::{CheckpointTag, Image, ProcName, Protocol, Spec, State, TemplateId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Beyond the time that a proc has to become ready, for telling so.
const READY_MORE: Duration = Duration::from_millis(500);
/// How long a new proc may take to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(60);
/// Between looks at whether it does.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The worker of one data directory.
/// Clones are the same worker.
#[derive(Debug, Clone)]
pub struct Worker {
    pub(crate) machine: Arc<Host>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) procs: Arc<Mutex<BTreeMap<ProcName, Handle>>>,
    pub(crate) history: Arc<TierHistory>,
    /// One at a time.
    pub(crate) backing_up: Arc<Mutex<()>>,
    /// Likewise.
    pub(crate) renaming: Arc<tokio::sync::Mutex<()>>,
    /// Procs that are being replaced.
    pub(crate) replacing: Arc<Mutex<BTreeMap<ProcName, Wish>>>,
    /// All procs are being ended: none that stands aside is put back.
    pub(crate) ending: Arc<AtomicBool>,
    /// Tags of checkpoints that are being taken.
    pub(crate) tags: Claims<(ProcName, CheckpointTag)>,
    /// Kinds of which a template is being taken.
    pub(crate) templated: Claims<TemplateId>,
    /// Held by those that read templates; alone by one that removes some.
    pub(crate) templating: Arc<tokio::sync::RwLock<()>>,
    /// How many procs serve behind each name.
    pub(crate) scaler: Arc<kip_scale::Scaler>,
    /// Names of procs that are being made, before these are among the others.
    pub(crate) claimed: Claims<ProcName>,
    /// A file of the data directory that is another part's.
    pub(crate) own_file: Option<OwnFile>,
}

/// What the owner of a proc that is being replaced has asked for last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// That another one takes its place.
    Replace,
    /// That it ends.
    Stop,
}

/// While one lives no other proc gets the name.
pub(crate) type NameClaim = Claim<ProcName>;

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
        // One that is being renamed is there twice.
        self.procs.lock().iter().filter(|(name, handle)| **name == *handle.proc.name).map(|(_, h)| h.clone()).collect()
    }

    /// Whatever its name is by now.
    pub(crate) fn forget(&self, proc: &Arc<Proc>) {
        self.procs.lock().retain(|_, handle| !Arc::ptr_eq(&handle.proc, proc));
    }

    /// Keeps a name for a proc that is about to be made, until that is among the others.
    ///
    /// # Errors
    /// Another proc has it, is getting it, or is being replaced under it.
    pub(crate) fn claim_name(&self, name: &ProcName) -> Result<NameClaim, Refusal> {
        let claim = Claim::of(name.clone(), &self.claimed);
        if self.procs.lock().contains_key(name) {
            return Err(taken(name));
        }
        // The proc that is replaced was removed, and the new one is about to have its name.
        if self.replacing.lock().contains_key(name) {
            return Err(being_replaced(name));
        }
        claim.ok_or_else(|| taken(name))
    }

    /// What a new proc of that name has for a key: another than its name only if a proc that was
    /// renamed has that, checkpoints that another proc goes on with, or replicas that are about to
    /// go.
    pub(crate) fn key_for(&self, name: &ProcName) -> Result<ProcName, Refusal> {
        let procs = self.machine.live_procs();
        let renamed = |key: &ProcName| {
            let has = |proc: &Arc<Proc>| proc.key == *key || key_of(proc) == *key;
            let is_its = |proc: &Arc<Proc>| proc.spec().replica_of.as_ref() == Some(key);
            procs.iter().any(|proc| has(proc) && *proc.name != *name || is_its(proc))
        };
        let others = numbered(name)
            .filter(|key| !self.machine.records.directory(key).exists() && !self.checkpoint_store().has(key))
            .filter(|key| !renamed(key));
        if renamed(name) || self.checkpoint_store().has(name) { first(others, name) } else { Ok(name.clone()) }
    }

    pub(crate) fn adopt(
        &self,
        proc: Arc<Proc>,
        record: Record,
        prepared: Option<PreparedNetwork>,
        listeners: Listeners,
    ) -> Handle {
        let name = proc.name.clone();
        self.scaler.owner_starts(&proc.key);
        let (mut task, handle) = Task::new(proc, record, prepared, self.registry.when_removed());
        self.registry.enlist(handle.clone());
        task.probes = probe::serve(&handle, listeners);
        task.start_running();
        self.procs.lock().insert(name, handle.clone());
        handle
    }

    /// Records a new proc, whose name its caller has claimed.
    pub(crate) fn create(
        &self,
        mut spec: Spec,
        secrets: BTreeMap<String, Hex>,
    ) -> Result<(Arc<Proc>, PreparedNetwork, Record, volumes::Claim), Refusal> {
        let machine = &self.machine;
        let name = spec.name.clone();
        let key = self.key_for(&name)?;
        let claim = volumes::declare(machine, &mut spec)?;
        let sealed = secrets::seal(machine, &key, &mut spec, secrets)
            .map_err(|e| Refusal::new(Code::Failed, format!("{name} cannot start: {}", chain(&e))))?;
        let prepared = machine
            .prepared_networks
            .take(spec.sandbox.network())
            .map_err(|e| Refusal::new(Code::Exhausted, format!("{name} cannot start: {}", chain(&e))))?;
        let record = Record::new(prepared.slot.number(), machine.base_of(&spec));
        let made = machine.records.begin(&key, &spec, &record).and_then(|made| {
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
        let fd_store = fd_store::FdStore::new(&key, Arc::clone(&machine.keeper));
        let meter = meter::Meter::new(kip_sys::clock::now_ms());
        let proc = Proc::new(machine, key, spec, prepared.slot, record.base.clone(), fd_store, meter);
        Ok((proc, prepared, record, claim))
    }

    /// Notifies a proc's network that it has come or gone.
    pub(crate) async fn notify_network(&self, spec: &Spec) {
        if let Some(network) = spec.network.clone() {
            let machine = Arc::clone(&self.machine);
            blocking(move || names::write_all(&machine, &network)).await;
        }
    }

    /// Serves the runtime socket, by which programs in procs reach these, from now on.
    ///
    /// # Errors
    /// The socket cannot be polled.
    pub fn serve_runtime(&self, tree: Arc<dyn TreeService>, spawns: Arc<dyn SpawnPrograms>) -> io::Result<()> {
        let homes = Arc::new(RuntimeProcs::of(&self.registry));
        let listener = self.machine.runtime.try_clone()?;
        kip_runtime::serve(RuntimeParts { listener, homes, tree, spawns, realm: Realm::default() })
    }

    /// The procs as spawned procs ask for them.
    pub fn spawn_host(&self) -> Arc<dyn SpawnHost> {
        Arc::new(SpawnProcs::of(&self.registry, Arc::new(self.clone())))
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
}

/// The first of them; too many are in use if there is none.
pub(crate) fn first<T>(mut names: impl Iterator<Item = T>, like: &ProcName) -> Result<T, Refusal> {
    names.next().ok_or_else(|| Refusal::new(Code::Exhausted, format!("too many procs have had the name {like}")))
}

/// Waits until a proc that was started is ready, if its spec says what that is. It runs on if it is
/// not.
pub(crate) async fn ready(handle: &Handle) -> Result<(), Refusal> {
    let name = &handle.proc.name;
    until_ready(handle).await.map_err(|NotReady { why, ended }| {
        let stays = match ended {
            true => "its name, files and logs stay".to_owned(),
            false => format!("it is left as it is: `kip logs {name}` has its output, `kip rm --force {name}` ends it"),
        };
        Refusal::new(Code::Failed, format!("{name} {why}; {stays}"))
    })
}

/// Why a proc has not become ready.
pub(crate) struct NotReady {
    /// What it did or did not.
    pub(crate) why: String,
    /// It runs no more.
    pub(crate) ended: bool,
}

pub(crate) async fn until_ready(handle: &Handle) -> Result<(), NotReady> {
    let Some(ready) = &handle.proc.spec().ready else { return Ok(()) };
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
        Ok(Err(_)) => return Err(NotReady { why: "was removed before it was ready".to_owned(), ended: true }),
        Err(_) => None,
    };
    Err(match record.map(|record| record.state) {
        Some(State::Stopped { exit }) => {
            let how = exit.map_or_else(|| "it was stopped".to_owned(), |exit| exit.to_string());
            let last = handle.proc.shared.last_words(&handle.proc);
            NotReady { why: format!("ended before it was ready ({}): {how}{last}", ready.check), ended: true }
        }
        _ => {
            let why = handle.proc.shared.events.last_detail(&handle.proc.name, &EventKind::NotReady);
            let why = why.map(|why| format!(": {why}")).unwrap_or_default();
            let within = ready.within_ms;
            NotReady { why: format!("was not ready ({}) within {within} ms{why}", ready.check), ended: false }
        }
    })
}

/// Waits until a proc that was started listens on those TCP ports, before which it cannot do what
/// it is to.
///
/// # Errors
/// Why it does not, in words.
pub(crate) async fn until_listening(new: &Handle, needed: &[u16], to_do: &str) -> Result<(), String> {
    let until = Instant::now() + LISTENS_WITHIN;
    let mut status = new.status.clone();
    loop {
        let state = status.borrow().record.state.clone();
        let init = match state {
            State::Hot { init, .. } | State::Hibernated { init, .. } => init,
            State::Stopped { exit } => {
                let how = exit.map_or_else(|| "it was stopped".to_owned(), |exit| exit.to_string());
                let last = new.proc.shared.last_words(&new.proc);
                return Err(format!("ended before it could {to_do}: {how}{last}"));
            }
            // It was idle already.
            _ => return Ok(()),
        };
        let Some(missing) = needed.iter().find(|port| !listens(init, Protocol::Tcp, **port)) else { return Ok(()) };
        if Instant::now() > until {
            let within = LISTENS_WITHIN.as_secs();
            return Err(format!("did not listen on tcp port {missing} within {within} s"));
        }
        let _ = tokio::time::timeout(LOOK_EVERY, status.changed()).await;
    }
}

/// The time that a program has to end in order, if the caller does not say.
pub(crate) fn grace_of(handle: &Handle) -> Duration {
    Duration::from_millis(handle.proc.spec().grace_ms(None))
}

pub(crate) fn taken(name: &ProcName) -> Refusal {
    Refusal::new(
        Code::Taken,
        format!("a proc named {:?} exists already: choose another name, or `kip rm {name}` first", name.as_str()),
    )
}

/// The refusal of a request that would be in the way of a replacement.
pub(crate) fn being_replaced(name: &ProcName) -> Refusal {
    Refusal::new(Code::State, format!("{name} is being replaced: try again when that is over"))
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
    if let Some(fault) = spec.checkpoints.and_then(|periodic| periodic.fault()) {
        return invalid(format!("{name}: {fault}"));
    }
    if let Image::Tar(path) = &spec.image
        && !path.is_file()
    {
        return invalid(format!("{name}: there is no tarball {}", path.display()));
    }
    Ok(())
}
