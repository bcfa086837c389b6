//! `kip clone`: procs that go on from where another one is.
//!
//! A clone is a sleeper after a reboot: it has a generation and files, and nothing in the kernel.
//! The source stands still ([`Still`]: parked, if it runs) while its files are copied and its
//! generation, which does not change any more, is linked; then it goes on. What it was that listens
//! is made anew for the clone ([`renew`]), as after a reboot; connections end there with a reset.
//!
//! A clone is made in a directory that has no proc's name yet, and gets the name when all of it is
//! on disk: a crash before that leaves what the next daemon removes, after it a parked proc.

use crate::view;
use crate::worker::{NameClaim, Worker, first};
use kip_copy::ProcCopy;
use kip_criu_images::fields::{file_entry, reg_file_entry};
use kip_criu_images::{CheckpointImageError, Images, bars_criu};
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::fd_store::FdStore;
use kip_engine::host::{Host, Proc};
use kip_engine::plans::take_custody;
use kip_engine::prepared::PreparedNetwork;
use kip_engine::{renew, secrets, stop, volumes};
use kip_journal::meter::Meter;
use kip_net::Slot;
use kip_records::body::Body;
use kip_records::record::{Durability, RecordError, Unpublished};
use kip_records::state::Record;
use kip_supervisor::probe::Listeners;
use kip_supervisor::task::{Handle, Still, Stilled, TaskCommand};
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
/// How long the source may take to run again before the answer says so.
const RUNS_WITHIN: Duration = Duration::from_secs(30);

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
    prepared: Option<PreparedNetwork>,
    _volumes: volumes::Claim,
}

impl Staging {
    fn directory(&self) -> PathBuf {
        self.made.as_ref().expect("it is published last").path().to_owned()
    }

    fn first_id(&self) -> u32 {
        let slot = Slot::new(self.record.slot).expect("it was taken");
        self.machine.first_id(slot)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let Some(made) = self.made.take() else { return };
        if let Err(e) = fs::remove_dir_all(made.path()) {
            tracing::warn!(path = %made.path().display(), error = %e, "a clone that was not made is left to the next daemon");
        }
        let slot = Slot::new(self.record.slot).expect("it was taken");
        let _ = self.machine.pool.release(&[slot]);
        self.machine.prepared_networks.free(slot);
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
        let spec = source.proc.spec();
        check(&spec, &request)?;
        let _begun = self.begin_on(&source, &name).await?;
        let _in_use = self.has_layers(&spec).await?;
        let claimed = self.claim_names(&name, &request)?;
        let was_awake = matches!(source.status.borrow().record.state, State::Hot { .. });
        let awake = was_awake && !request.asleep;
        if awake {
            for claimed in &claimed {
                self.machine.pressure.admit_new(&claimed.name).await?;
            }
        }

        let (still, over) = Still::new();
        let stood = Instant::now();
        let stilled = source.ask(|reply| TaskCommand::StandStill { purpose: "clone", over, reply }).await?;
        let (generation, notes) = cloneable(&name, &source.proc.dir, &stilled)?;
        let (worker, mut staged) = (self.clone(), Vec::new());
        let names: Vec<ProcName> = claimed.iter().map(|claimed| claimed.name.clone()).collect();
        let (first, others) = names.split_first().expect("at least one is asked for");
        let made = {
            let (worker, source, request) = (worker.clone(), source.clone(), request.clone());
            let (first, record) = (first.clone(), stilled.record.clone());
            blocking(move || worker.stage_of_source(&source, first, &request, &record, generation)).await
        };
        fault::reach("clone-copied");
        // It goes on, whatever came of the copy.
        drop(still);
        let runs = was_awake.then(|| tokio::spawn(runs_again(source.clone(), stood)));
        staged.push(made?);
        for name in others {
            let (worker, source, request, name) = (worker.clone(), source.clone(), request.clone(), name.clone());
            let (record, from) = (
                stilled.record.clone(),
                CopiedFrom { directory: staged[0].directory(), first_id: staged[0].first_id() },
            );
            let made = blocking(move || worker.stage_of_clone(&source, name, &request, &record, generation, from));
            staged.push(made.await?);
        }
        let clones = self.publish_all(&name, staged, awake).await?;
        drop(claimed);
        let still_us = match runs {
            Some(runs) => runs.await.unwrap_or_default(),
            None => 0,
        };
        let views = blocking(move || clones.iter().map(view::proc_view).collect()).await;
        Ok(ClonesView { clones: views, still_us, total_us: began.elapsed().as_micros() as u64, notes })
    }

    /// Names that no other proc has, in their order.
    fn claim_names(&self, source: &ProcName, request: &CloneRequest) -> Result<Vec<NameClaim>, Refusal> {
        if let (Some(name), 1) = (&request.name, request.count) {
            return Ok(vec![self.claim_name(name)?]);
        }
        let like = request.name.as_ref().unwrap_or(source);
        let stem: String = like.as_str().chars().take(MAX_NAME - 7).collect();
        let names = (1..MOST_NUMBERED).filter_map(|n| format!("{stem}-{n}").parse().ok());
        let mut free = names.filter_map(|name: ProcName| self.claim_name(&name).ok());
        (0..request.count).map(|_| first(&mut free, like)).collect()
    }

    /// What the clone has of itself: its spec, its secrets under its own key, and its place.
    fn begin_staging(
        &self,
        source: &Handle,
        name: ProcName,
        request: &CloneRequest,
        record: &Record,
    ) -> Result<Staging, Refusal> {
        let machine = &self.machine;
        let failed = |what: &str, e: &dyn std::error::Error| {
            Refusal::new(Code::Failed, format!("{name} cannot be made: {what}: {}", chain(e)))
        };
        let mut spec = spec_of(&source.proc.spec(), &name, request);
        let key = self.key_for(&name)?;
        let _volumes = volumes::declare(machine, &mut spec)?;
        let mut sealed = None;
        if spec.volumes.iter().any(|volume| volume.source == VolumeSource::Secrets) {
            let opened = secrets::open(&source.proc).map_err(|e| failed("its secrets", &e))?;
            let contents: BTreeMap<String, Hex> =
                opened.files().map(|(name, contents)| (name.to_owned(), Hex(contents.to_vec()))).collect();
            spec.volumes.retain(|volume| volume.source != VolumeSource::Secrets);
            sealed = secrets::seal(machine, &key, &mut spec, contents).map_err(|e| failed("its secrets", &e))?;
        }
        let prepared = machine.prepared_networks.take().map_err(|e| Refusal::new(Code::Exhausted, chain(&e)))?;
        let slot = prepared.slot;
        let state = record.state.clone();
        let record = Record {
            state,
            established: true,
            program: record.program,
            last_sleep: record.last_sleep.clone(),
            ticks: record.ticks,
            started_at_ms: record.started_at_ms,
            ready: record.ready,
            ..Record::new(slot.number(), source.proc.base.clone())
        };
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
            prepared: Some(prepared),
            _volumes,
        };
        if let (Some(sealed), Some(made)) = (sealed, &staging.made) {
            made.add(secrets::FILE, &sealed).map_err(|e| failed("its secrets", &e))?;
        }
        Ok(staging)
    }

    fn stage_of_source(
        &self,
        source: &Handle,
        name: ProcName,
        request: &CloneRequest,
        record: &Record,
        generation: Generation,
    ) -> Result<Staging, Refusal> {
        let from = CopiedFrom { directory: source.proc.dir.clone(), first_id: source.proc.first_id() };
        // Mounted, if its disk is limited.
        let _place = source.proc.files.place().map_err(|e| Refusal::new(Code::Failed, chain(&e)))?;
        self.stage_of_clone(source, name, request, record, generation, from)
    }

    /// Copies from the directory of that source, or of a clone of it.
    fn stage_of_clone(
        &self,
        source: &Handle,
        name: ProcName,
        request: &CloneRequest,
        record: &Record,
        generation: Generation,
        from: CopiedFrom,
    ) -> Result<Staging, Refusal> {
        let staging = self.begin_staging(source, name.clone(), request, record)?;
        let names = (source.proc.spec().hostname().to_owned(), staging.spec.hostname().to_owned());
        let copy = ProcCopy {
            from: from.directory,
            to: staging.directory(),
            ids: (from.first_id, staging.first_id()),
            generation,
            names,
        };
        copy.copy().map_err(|e| {
            Refusal::new(
                Code::Failed,
                format!("{name} cannot be made: the files of {}: {}", source.proc.name, chain(&e)),
            )
        })?;
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
            let woken = clones.iter().map(|clone| {
                let cause = WakeCause::Request(WakeCommand::StoodStill("clone"));
                clone.ask(move |reply| TaskCommand::Wake { cause, reply })
            });
            // One that does not wake says why itself, and is woken by its first client.
            for woken in woken.collect::<Vec<_>>() {
                woken.await?;
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

/// The generation that a clone goes on from, and what its owner should know of that.
fn cloneable(name: &ProcName, directory: &Path, stilled: &Stilled) -> Result<(Generation, Vec<String>), Refusal> {
    let refuse = |why: String| Err(Refusal::new(Code::State, format!("{name} cannot be cloned now: {why}")));
    // What is held for the source alone, and is made anew by neither way.
    let read = |generation| {
        let images = Images::read(&kip_snapshot::path_of(directory, generation))?;
        Ok::<_, CheckpointImageError>((bars_criu(&images)?, generators(&images)?))
    };
    if let Some(why) = &stilled.runs {
        return refuse(why.clone());
    }
    match &stilled.record.state {
        State::Parked { generation } => match read(*generation) {
            Ok((None, notes)) => Ok((*generation, notes)),
            Ok((Some(what), _)) => refuse(what),
            Err(e) => refuse(chain(&e)),
        },
        State::Stopped { .. } => refuse("it is stopped, and a clone goes on from where its source is: start it".into()),
        State::Archived { .. } => refuse(format!("its memory is in the store: wake it first (`kip wake {name}`)")),
        state => refuse(format!("it is {}: try again", state.name())),
    }
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

/// How long the source stood, microseconds, once it runs.
async fn runs_again(source: Handle, stood: Instant) -> u64 {
    let mut status = source.status.clone();
    let runs = status.wait_for(|status| !matches!(status.record.state, State::Parked { .. } | State::Waking { .. }));
    let _ = tokio::time::timeout(RUNS_WITHIN, runs).await;
    stood.elapsed().as_micros() as u64
}

/// What a clone of that proc is asked to be.
fn spec_of(source: &Spec, name: &ProcName, request: &CloneRequest) -> Spec {
    let asked = |port: &PortSpec| request.ports.iter().find(|asked| asked.inner() == port.inner());
    let ports = source.ports.iter().map(|port| match asked(port) {
        Some(asked) => asked.clone(),
        None => PortSpec { host_port: None, ..port.clone() },
    });
    Spec {
        name: name.clone(),
        ports: ports.collect(),
        // These are one proc's.
        aliases: Vec::new(),
        probes: Vec::new(),
        file: None,
        replaced: 0,
        ..source.clone()
    }
}
