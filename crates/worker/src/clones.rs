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

/// A proc as it stood, from which clones go on.
struct Moment {
    source: Handle,
    /// As it was then.
    spec: Arc<Spec>,
    record: Record,
    generation: Generation,
    /// Contents of its secrets, by their names.
    secrets: BTreeMap<String, Hex>,
    /// What the owner of the clones should know.
    notes: Vec<String>,
    request: CloneRequest,
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

        let (still, over) = Still::new();
        let stood = Instant::now();
        let stilled = source.ask(|reply| TaskCommand::StandStill { purpose: "clone", over, reply }).await?;
        let awake = stilled.was_awake && !request.asleep;
        let (worker, first) = (self.clone(), names[0].clone());
        let moment = {
            let (worker, source) = (self.clone(), source.clone());
            blocking(move || worker.moment(source, request, &stilled).map(|moment| (moment, stilled.was_awake))).await
        };
        let first = match moment {
            Err(refusal) => Err(refusal),
            Ok((moment, was_awake)) => {
                let staged = blocking(move || {
                    // Mounted, if its disk is limited.
                    let _place = moment.source.proc.files.place();
                    let _place = _place.map_err(|e| Refusal::new(Code::Failed, chain(&e)))?;
                    let proc = &moment.source.proc;
                    let from = CopiedFrom { directory: proc.dir.clone(), first_id: proc.first_id() };
                    worker.stage(&moment, first, from).map(|staging| (moment, staging))
                });
                staged.await.map(|(moment, staging)| (moment, staging, was_awake))
            }
        };
        fault::reach("clone-copied");
        // It goes on, whatever came of the copy.
        drop(still);
        let (moment, first, was_awake) = first?;
        let runs = was_awake.then(|| tokio::spawn(runs_again(source.clone(), stood)));
        let (worker, others) = (self.clone(), names[1..].to_vec());
        let (notes, staged) = blocking(move || {
            let mut staged = vec![first];
            for name in others {
                let from = CopiedFrom { directory: staged[0].directory(), first_id: staged[0].first_id() };
                staged.push(worker.stage(&moment, name, from)?);
            }
            Ok::<_, Refusal>((moment.notes, staged))
        })
        .await?;
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
        // The directory of a proc whose record cannot be read is left alone.
        let unused =
            |name: &ProcName| self.key_for(name).is_ok_and(|key| !self.machine.records.directory(&key).exists());
        let mut free = names.filter(unused).filter_map(|name: ProcName| self.claim_name(&name).ok());
        (0..request.count).map(|_| first(&mut free, like)).collect()
    }

    /// What clones go on from.
    fn moment(&self, source: Handle, request: CloneRequest, stilled: &Stilled) -> Result<Moment, Refusal> {
        let (generation, notes) = cloneable(&source.proc.name, &source.proc.dir, stilled)?;
        let (spec, mut secrets) = (source.proc.spec(), BTreeMap::new());
        if spec.volumes.iter().any(|volume| volume.source == VolumeSource::Secrets) {
            let failed = |e| Refusal::new(Code::Failed, format!("{} cannot be cloned: {}", spec.name, chain(&e)));
            let opened = secrets::open(&source.proc).map_err(failed)?;
            secrets.extend(opened.files().map(|(name, contents)| (name.to_owned(), Hex(contents.to_vec()))));
        }
        Ok(Moment { source, spec, record: stilled.record.clone(), generation, secrets, notes, request })
    }

    /// A clone whose directory is whole, copied from that of the source, or of another clone.
    fn stage(&self, moment: &Moment, name: ProcName, from: CopiedFrom) -> Result<Staging, Refusal> {
        let staging = self.begin_staging(moment, name.clone())?;
        let copy = ProcCopy {
            from: from.directory,
            to: staging.directory(),
            ids: (from.first_id, staging.first_id()),
            generation: moment.generation,
            names: (moment.spec.hostname().to_owned(), staging.spec.hostname().to_owned()),
        };
        copy.copy().map_err(|e| {
            let source = &moment.spec.name;
            Refusal::new(Code::Failed, format!("{name} cannot be made: the files of {source}: {}", chain(&e)))
        })?;
        Ok(staging)
    }

    /// What the clone has of itself: its spec, its secrets under its own key, and its place.
    fn begin_staging(&self, moment: &Moment, name: ProcName) -> Result<Staging, Refusal> {
        let (machine, record) = (&self.machine, &moment.record);
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
        let state = record.state.clone();
        let record = Record {
            state,
            established: true,
            program: record.program,
            last_sleep: record.last_sleep.clone(),
            ticks: record.ticks,
            started_at_ms: record.started_at_ms,
            ready: record.ready,
            ..Record::new(slot.number(), moment.source.proc.base.clone())
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
            let woken = clones.iter().map(|clone| {
                let cause = WakeCause::Request(WakeCommand::StoodStill("clone"));
                clone.ask(move |reply| TaskCommand::Wake { cause, reply })
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
    let outside = |port: &PortSpec| port.host_port.map(|host_port| (port.proto, host_port));
    for (at, port) in request.ports.iter().enumerate() {
        let before = &request.ports[..at];
        if before.iter().any(|p| p.inner() == port.inner() || outside(p).is_some() && outside(p) == outside(port)) {
            return invalid(format!("{} port {} is asked for twice, inside or on the host", port.proto, port.port));
        }
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
