//! `kip clone`: procs that go on from where another one is.
//!
//! A clone is a sleeper after a reboot: it has a generation and files, and nothing in the kernel.
//! The source stands still while its files are copied and its generation, which does not change
//! any more, is linked: frozen in a dump that is called off then, if it runs and has little in
//! memory ([`CopySealed`]), else parked ([`Still`]). Listening sockets are made anew for the clone
//! ([`renew`]), as after a reboot; connections end there with a reset.
//!
//! A clone is made in a directory that has no proc's name yet, and gets the name when all of it is
//! on disk: a crash before that leaves what the next daemon removes, after it a parked proc.

use crate::view;
use crate::worker::{NameClaim, Worker, first};
use kip_checkpoint::plan::PLAN;
use kip_copy::ProcCopy;
use kip_criu_images::fields::{file_entry, reg_file_entry};
use kip_criu_images::{CheckpointImageError, Images, bars_criu};
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::fd_store::FdStore;
use kip_engine::host::{Host, Proc};
use kip_engine::plans::{plan_wake, take_custody};
use kip_engine::prepared::PreparedNetwork;
use kip_engine::{renew, secrets, stop, volumes};
use kip_journal::meter::Meter;
use kip_net::Slot;
use kip_records::body::Body;
use kip_records::record::{Durability, RecordError, Unpublished};
use kip_records::state::Record;
use kip_supervisor::probe::Listeners;
use kip_supervisor::task::{CopySealed, Handle, Still, Stilled, TaskCommand};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::clone::{CloneRequest, ClonesView, MOST_CLONES};
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::chain;
use kip_types::keys::Hex;
use kip_types::name::MAX_NAME;
use kip_types::{Generation, PortSpec, ProcName, Spec, State, VolumeSource};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Numbers that are tried for the name of a clone: there are fewer procs.
const MOST_NUMBERED: u32 = 100_000;
/// Memory of a source that is copied while it is frozen, and not while it is parked, bytes.
const COPIED_RUNNING: u64 = 64 << 20;
/// How long the source may take to run again before the answer says so.
const RUNS_WITHIN: Duration = Duration::from_secs(30);

/// What clones have of their source beside memory and files.
struct Moment {
    source: Handle,
    /// As it was when they were asked for.
    spec: Arc<Spec>,
    /// Contents of its secrets, by their names.
    secrets: BTreeMap<String, Hex>,
    request: CloneRequest,
}

impl Moment {
    /// Copies from another clone.
    fn copy(&self, to: &Staging, from: CopiedFrom, generation: Generation) -> Result<(), Refusal> {
        let copy = ProcCopy {
            from: from.directory,
            to: to.directory(),
            ids: (from.first_id, to.first_id()),
            generation,
            names: (self.spec.hostname().to_owned(), to.spec.hostname().to_owned()),
        };
        let failed = |e| Refusal::new(Code::Failed, format!("{} cannot be made: {}", to.spec.name, chain(&e)));
        copy.copy().map_err(failed)
    }
}

/// What files are copied from: a directory, and the first id of the block that owns them.
struct CopiedFrom {
    directory: PathBuf,
    first_id: u32,
}

/// A proc that is being made, with its slot, until it is published.
struct Staging {
    machine: Arc<Host>,
    spec: Spec,
    record: Record,
    key: ProcName,
    made: Option<Unpublished>,
    /// Its directory has its name: the slot is the proc's.
    published: bool,
    prepared: Option<PreparedNetwork>,
    _volumes: volumes::Claim,
}

impl Staging {
    fn directory(&self) -> PathBuf {
        self.made.as_ref().expect("it is published last").path().to_owned()
    }

    /// Records what it sleeps in: what its source would.
    fn settle(&mut self, source: &Record) -> Result<(), Refusal> {
        self.record = Record {
            state: source.state.clone(),
            established: true,
            program: source.program,
            last_sleep: source.last_sleep.clone(),
            ticks: source.ticks,
            started_at_ms: source.started_at_ms,
            ready: source.ready,
            ..self.record.clone()
        };
        let made = self.made.as_ref().expect("it is published last");
        let failed = |e| Refusal::new(Code::Exhausted, format!("{} cannot be recorded: {}", self.spec.name, chain(&e)));
        made.change_state(&self.record).map_err(failed)
    }

    fn first_id(&self) -> u32 {
        let slot = Slot::new(self.record.slot).expect("it was taken");
        self.machine.first_id(slot)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(made) = self.made.take()
            && let Err(e) = fs::remove_dir_all(made.path())
        {
            tracing::warn!(path = %made.path().display(), error = %e, "a clone that was not made is left to the next daemon");
        }
        if !self.published {
            let slot = Slot::new(self.record.slot).expect("it was taken");
            let _ = self.machine.pool.release(&[slot]);
            self.machine.prepared_networks.free(slot);
        }
    }
}

impl Worker {
    /// As [`kip_service::ProcService::clone_proc`].
    pub(crate) async fn cloned(&self, name: ProcName, request: CloneRequest) -> Result<ClonesView, Refusal> {
        let began = Instant::now();
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        let source = self.handle(&name)?;
        check(&source.proc.spec(), &request)?;
        let _begun = self.begin_on(&source, &name).await?;
        let _in_use = self.has_layers(&source.proc.spec()).await?;
        let claimed = self.claim_names(&name, &request)?;
        let names: Vec<ProcName> = claimed.iter().map(|claimed| claimed.name.clone()).collect();
        // Those of a sleeper sleep, and take no memory.
        if !request.asleep && matches!(source.status.borrow().record.state, State::Hot { .. }) {
            for name in &names {
                self.machine.pressure.admit_new(name).await?;
            }
        }

        let (worker, first) = (self.clone(), names[0].clone());
        let begun = {
            let (source, asleep) = (source.clone(), request.asleep);
            blocking(move || {
                let moment = worker.moment(source, request)?;
                let first = worker.begin_staging(&moment, first)?;
                Ok::<_, Refusal>((moment, first, asleep))
            })
        };
        let (moment, mut first, asleep) = begun.await?;
        let stood = Instant::now();
        let copied = self.copy_source(&source, &moment, &first).await;
        fault::reach("clone-copied");
        let (record, was_awake) = copied?;
        let still_us = if was_awake { stood.elapsed().as_micros() as u64 } else { 0 };
        let (worker, others) = (self.clone(), names[1..].to_vec());
        let (notes, staged) = blocking(move || {
            first.settle(&record)?;
            let notes = cloneable(&moment.spec.name, &first.directory(), record.generation())?;
            let mut staged = vec![first];
            for name in others {
                let mut other = worker.begin_staging(&moment, name)?;
                let from = CopiedFrom { directory: staged[0].directory(), first_id: staged[0].first_id() };
                moment.copy(&other, from, record.generation())?;
                other.settle(&record)?;
                staged.push(other);
            }
            Ok::<_, Refusal>((notes, staged))
        })
        .await?;
        let clones = self.publish_all(&name, staged, was_awake && !asleep).await?;
        drop(claimed);
        let views = blocking(move || clones.iter().map(view::proc_view).collect()).await;
        Ok(ClonesView { clones: views, still_us, total_us: began.elapsed().as_micros() as u64, notes })
    }

    /// Copies the source into the directory of the first clone: while it is frozen and then runs
    /// on, if it runs; else while it stands still, parked. Returns what would be recorded of it in
    /// that generation, and whether it ran.
    async fn copy_source(&self, source: &Handle, moment: &Moment, first: &Staging) -> Result<(Record, bool), Refusal> {
        let proc = Arc::clone(&source.proc);
        let copy = ProcCopy {
            from: proc.dir.clone(),
            to: first.directory(),
            ids: (proc.first_id(), first.first_id()),
            // It is known when it is copied.
            generation: Generation(0),
            names: (moment.spec.hostname().to_owned(), first.spec.hostname().to_owned()),
        };
        let copied = move |generation| {
            // Mounted, if its disk is limited.
            let _place = proc.files.place().map_err(|e| chain(&e))?;
            ProcCopy { generation, ..copy.clone() }.copy().map_err(|e| chain(&e))
        };
        let running = CopySealed(Box::new(copied.clone()));
        let name = &moment.spec.name;
        let refused = |refusal: Refusal| {
            let message = format!("{name} cannot be cloned now: {}", refusal.message);
            Refusal { message, ..refusal }
        };
        // All that is here is written while it stands still, by each copy again: much of it is
        // better put away once, by a sleep, from which it comes back as it is needed.
        if source.proc.cgroup.held_bytes() <= COPIED_RUNNING {
            let copied_running = source.ask(|reply| TaskCommand::CopyRunning { copy: running, reply }).await;
            if let Some(copied) = copied_running.map_err(refused)? {
                return Ok((copied.record, true));
            }
        }
        let (still, over) = Still::new();
        let stilled = source.ask(|reply| TaskCommand::StandStill { purpose: "clone", over, reply }).await?;
        let generation = parked_in(&moment.spec.name, &stilled)?;
        let done = blocking(move || copied(generation)).await;
        // It goes on, whatever came of the copy.
        drop(still);
        let failed = |why| Refusal::new(Code::Failed, format!("{} cannot be cloned: {why}", moment.spec.name));
        done.map_err(failed)?;
        if stilled.was_awake {
            runs_again(source).await;
        }
        Ok((stilled.record, stilled.was_awake))
    }

    /// Names that no other proc has, in their order.
    fn claim_names(&self, source: &ProcName, request: &CloneRequest) -> Result<Vec<NameClaim>, Refusal> {
        if let (Some(name), 1) = (&request.name, request.count) {
            return Ok(vec![self.claim_name(name)?]);
        }
        let like = request.name.as_ref().unwrap_or(source);
        let stem: String = like.as_str().chars().take(MAX_NAME - 7).collect();
        let names = (1..MOST_NUMBERED).filter_map(|n| format!("{stem}-{n}").parse().ok());
        // The directory of a proc whose record cannot be read is left alone.
        let unused =
            |name: &ProcName| self.key_for(name).is_ok_and(|key| !self.machine.records.directory(&key).exists());
        let mut free = names.filter(unused).filter_map(|name: ProcName| self.claim_name(&name).ok());
        (0..request.count).map(|_| first(&mut free, like)).collect()
    }

    /// What clones of that proc have of it.
    fn moment(&self, source: Handle, request: CloneRequest) -> Result<Moment, Refusal> {
        let (spec, mut secrets) = (source.proc.spec(), BTreeMap::new());
        if spec.volumes.iter().any(|volume| volume.source == VolumeSource::Secrets) {
            let failed = |e| Refusal::new(Code::Failed, format!("{} cannot be cloned: {}", spec.name, chain(&e)));
            let opened = secrets::open(&source.proc).map_err(failed)?;
            secrets.extend(opened.files().map(|(name, contents)| (name.to_owned(), Hex(contents.to_vec()))));
        }
        Ok(Moment { source, spec, secrets, request })
    }

    /// What the clone has of itself: its spec, its secrets under its own key, and its place.
    fn begin_staging(&self, moment: &Moment, name: ProcName) -> Result<Staging, Refusal> {
        let machine = &self.machine;
        let failed = |what: &str, e: &dyn std::error::Error| {
            Refusal::new(Code::Failed, format!("{name} cannot be made: {what}: {}", chain(e)))
        };
        let mut spec = spec_of(&moment.spec, &name, &moment.request);
        let key = self.key_for(&name)?;
        let _volumes = volumes::declare(machine, &mut spec)?;
        spec.volumes.retain(|volume| volume.source != VolumeSource::Secrets);
        let sealed = secrets::seal(machine, &key, &mut spec, moment.secrets.clone());
        let sealed = sealed.map_err(|e| failed("its secrets", &e))?;
        let prepared = machine.prepared_networks.take().map_err(|e| Refusal::new(Code::Exhausted, chain(&e)))?;
        let slot = prepared.slot;
        // What it sleeps in is recorded when that is there.
        let record = Record::new(slot.number(), moment.source.proc.base.clone());
        let made = machine.records.prepare(&key, &spec, &record).map_err(|e| {
            let _ = machine.pool.release(&[slot]);
            machine.prepared_networks.free(slot);
            Refusal::new(Code::Exhausted, format!("{name} cannot be recorded: {}", chain(&e)))
        })?;
        let staging = Staging {
            machine: Arc::clone(machine),
            spec,
            record,
            key,
            made: Some(made),
            published: false,
            prepared: Some(prepared),
            _volumes,
        };
        if let (Some(sealed), Some(made)) = (sealed, &staging.made) {
            made.add(secrets::FILE, &sealed).map_err(|e| failed("its secrets", &e))?;
        }
        Ok(staging)
    }

    /// All of them, or none.
    async fn publish_all(&self, source: &ProcName, staged: Vec<Staging>, awake: bool) -> Result<Vec<Handle>, Refusal> {
        let mut clones = Vec::new();
        for staging in staged {
            match self.publish_clone(source, staging).await {
                Ok(handle) => clones.push(handle),
                Err(refusal) => {
                    for clone in &clones {
                        self.discard(clone).await;
                    }
                    return Err(refusal);
                }
            }
        }
        if awake {
            let woken = clones.iter().cloned().map(|clone| {
                let cause = WakeCause::Request(WakeCommand::StoodStill("clone"));
                tokio::spawn(async move { clone.ask(|reply| TaskCommand::Wake { cause, reply }).await })
            });
            // One that does not wake says why itself, and is woken by its first client.
            for woken in woken.collect::<Vec<_>>() {
                let _ = woken.await;
            }
        }
        Ok(clones)
    }

    async fn publish_clone(&self, source: &ProcName, mut staging: Staging) -> Result<Handle, Refusal> {
        let (machine, name) = (Arc::clone(&self.machine), staging.spec.name.clone());
        let published = blocking(move || {
            kip_copy::sync(&staging.directory()).map_err(|e| {
                Refusal::new(Code::Failed, format!("{} cannot be made: {}", staging.spec.name, chain(&e)))
            })?;
            fault::reach("clone-synced");
            let made = staging.made.take().expect("it is published once");
            made.publish().map_err(|e| match e {
                RecordError::Exists { name, .. } => crate::worker::taken(&name),
                other => Refusal::new(Code::Exhausted, chain(&other)),
            })?;
            staging.published = true;
            Ok::<_, Refusal>(staging)
        });
        let mut staging = published.await?;
        fault::reach("clone-published");
        let (key, spec, record) = (staging.key.clone(), staging.spec.clone(), staging.record.clone());
        let meter = Meter::new(now_ms());
        meter.enter(record.state.tier());
        let fd_store = FdStore::new(&key, Arc::clone(&machine.keeper));
        let slot = Slot::new(record.slot).expect("it was taken");
        let proc = Proc::new(&machine, key, spec, slot, record.base.clone(), fd_store, meter);
        let held = {
            let (proc, record) = (Arc::clone(&proc), record.clone());
            let prepared = staging.prepared.take().expect("it is held once");
            blocking(move || hold(&proc, record, prepared)).await
        };
        let record = match held {
            Ok(record) => record,
            Err(why) => {
                if let Err(e) = stop::remove(&proc).await {
                    tracing::warn!(proc = %name, error = %e, "a clone that cannot be woken is left to the next daemon");
                }
                return Err(Refusal::new(Code::Failed, format!("{name} cannot be made: {why}")));
            }
        };
        let handle = self.adopt(proc, record, None, Listeners::new());
        drop(staging);
        self.notify_network(&handle.proc.spec()).await;
        let events = &handle.proc.shared.events;
        events.emit(Some(&name), EventKind::Cloned, format!("from {source}"));
        if handle.proc.spec().remove {
            tokio::spawn(self.clone().remove_at_end(handle.clone(), false));
        }
        Ok(handle)
    }
}

/// What a clone needs of the kernel while it sleeps, and its ports; with them its record.
fn hold(proc: &Arc<Proc>, record: Record, prepared: PreparedNetwork) -> Result<Record, String> {
    let directory = kip_snapshot::path_of(&proc.dir, record.generation());
    let body = kip_snapshot::open::<Body>(&directory).map_err(|e| chain(&e))?.body;
    let ports = renew::renew_in(proc, &body, &[], prepared).map_err(|e| chain(&e))?;
    let record = Record { ports, ..record };
    proc.write_record(&record, Durability::Fsync).map_err(|e| chain(&e))?;
    proc.meter.level(kip_snapshot::bytes_of(&directory));
    take_custody(proc, &body);
    // Of a source that ran on, which has none.
    if !directory.join(PLAN).exists() {
        plan_wake(proc, record.generation(), &body);
    }
    proc.shared.follow_output(proc);
    proc.fd_store.pack();
    Ok(record)
}

/// Refuses what cannot be asked for.
fn check(source: &Spec, request: &CloneRequest) -> Result<(), Refusal> {
    let invalid = |why: String| Err(Refusal::new(Code::Invalid, why));
    let name = &source.name;
    if request.count == 0 || request.count > MOST_CLONES {
        return invalid(format!("{} clones cannot be made at once: ask for 1 to {MOST_CLONES}", request.count));
    }
    if request.count > 1 && !request.ports.is_empty() {
        return invalid(
            "a port of the host is one clone's: publish ports of a single clone, or leave them to Kip".into(),
        );
    }
    if let Some(port) = request.ports.iter().find(|port| !source.ports.iter().any(|p| p.inner() == port.inner())) {
        let (proto, inner) = (port.proto, port.port);
        return invalid(format!(
            "{name} has no {proto} port {inner}: `kip update {name} -p {inner}` publishes it first"
        ));
    }
    if source.trial {
        return Err(Refusal::new(Code::State, format!("{name} is a trial: it is about to go")));
    }
    let writable = source.volumes.iter().find(|v| !v.read_only && v.source != VolumeSource::Secrets);
    if let Some(volume) = writable {
        let what = format!("{name} has the volume {} at {}", volume.source, volume.target);
        return Err(Refusal::new(
            Code::State,
            format!("{what}, which a clone would write to as well: it is not cloned"),
        ));
    }
    Ok(())
}

/// The generation in which a source stands still.
fn parked_in(name: &ProcName, stilled: &Stilled) -> Result<Generation, Refusal> {
    let refuse = |why: String| Err(Refusal::new(Code::State, format!("{name} cannot be cloned now: {why}")));
    if let Some(why) = &stilled.runs {
        return refuse(why.clone());
    }
    match &stilled.record.state {
        State::Parked { generation } => Ok(*generation),
        State::Stopped { .. } => refuse("it is stopped, and a clone goes on from where its source is: start it".into()),
        State::Archived { .. } => refuse(format!("its memory is in the store: wake it first (`kip wake {name}`)")),
        state => refuse(format!("it is {}: try again", state.name())),
    }
}

/// What the owner of a clone with that generation should know.
fn cloneable(source: &ProcName, directory: &Path, generation: Generation) -> Result<Vec<String>, Refusal> {
    let read = || {
        let images = Images::read(&kip_snapshot::path_of(directory, generation))?;
        Ok::<_, CheckpointImageError>((bars_criu(&images)?, generators(&images)?))
    };
    let why = match read() {
        Ok((None, notes)) => return Ok(notes),
        // What is held for the source alone, and is made anew by neither way.
        Ok((Some(what), _)) => what,
        Err(e) => chain(&e),
    };
    Err(Refusal::new(Code::State, format!("{source} cannot be cloned now: {why}")))
}

/// Programs and libraries with a random number generator that takes a clone for the process that it
/// was: it draws new numbers from the kernel when its pid changes, and that is the same.
fn generators(images: &Images) -> Result<Vec<String>, CheckpointImageError> {
    let mut notes = BTreeSet::new();
    for file in images.entries("files.img")? {
        let reg = file.message(file_entry::REG).map_err(images.damaged("files.img"))?.unwrap_or_default();
        let path = reg.string(reg_file_entry::NAME).unwrap_or_default();
        let name = path.rsplit('/').next().unwrap_or_default();
        if name.starts_with("libcrypto.so") || name == "node" {
            notes.insert(format!("{path} has OpenSSL's random numbers, which go on alike in source and clones"));
        }
    }
    Ok(notes.into_iter().collect())
}

/// Waits until the source runs.
async fn runs_again(source: &Handle) {
    let mut status = source.status.clone();
    let runs = status.wait_for(|status| !matches!(status.record.state, State::Parked { .. } | State::Waking { .. }));
    let _ = tokio::time::timeout(RUNS_WITHIN, runs).await;
}

/// What a clone of that proc is asked to be.
fn spec_of(source: &Spec, name: &ProcName, request: &CloneRequest) -> Spec {
    let published = |ports: &[PortSpec]| -> Vec<PortSpec> {
        let place = |port: &PortSpec| {
            let asked = request.ports.iter().find(|asked| asked.inner() == port.inner());
            let private = asked.map_or(port.private, |asked| asked.private);
            let (host_port, host_addr) = match asked {
                Some(asked) => (asked.host_port, asked.host_addr),
                None => (None, port.host_addr.filter(|_| !private)),
            };
            PortSpec { host_port, host_addr, private, ..port.clone() }
        };
        ports.iter().map(place).collect()
    };
    // What of it is one proc's.
    let own = |spec: &Spec| Spec {
        name: name.clone(),
        ports: published(&spec.ports),
        aliases: Vec::new(),
        probes: Vec::new(),
        file: None,
        replaced: 0,
        ..spec.clone()
    };
    let mut spec = own(source);
    if let Some(asked) = &mut spec.asked {
        asked.spec = own(&asked.spec);
        // A proc that was renamed has its old one, which its owner did not ask for.
        if asked.spec.hostname.is_none() {
            spec.hostname = None;
        }
    }
    spec
}
