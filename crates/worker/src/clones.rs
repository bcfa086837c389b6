//! `kip clone`: procs that go on from where another one is, or was at a checkpoint.
//!
//! A clone is a sleeper after a reboot: it has a generation and files, and nothing in the kernel.
//! Listening sockets are made anew for it ([`renew`]); connections end there with a reset. How its
//! source is copied: [`copied`](crate::copied).
//!
//! A clone is made in a directory that has no proc's name yet, and gets the name when all of it is
//! on disk: a crash before that leaves what the next daemon removes, after it a parked proc.

use crate::copied::{
    Behind, CopyTarget, Purpose, SourceCopy, begin_unfinished, copy_source, finish_clones, finish_copy,
};
use crate::lineage::{Checkpoint, generation_in};
use crate::staging::{CopiedFrom, Moment, Staging};
use crate::volumes_of_clones::{self, OwnVolumes, check_dropped};
use crate::worker::{NameClaim, NotReady, Worker, first, until_ready};
use kip_checkpoint::plan::PLAN;
use kip_copy::Becomes;
use kip_copy::fill::is_unfinished;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::fd_store::FdStore;
use kip_engine::host::Proc;
use kip_engine::plans::{plan_wake, take_custody};
use kip_engine::{renew, secrets, stop};
use kip_insight::view;
use kip_journal::meter::Meter;
use kip_net::Slot;
use kip_net::prepared::PreparedNetwork;
use kip_records::body::Body;
use kip_records::record::{Durability, RecordError};
use kip_records::state::Record;
use kip_service::ProcService as _;
use kip_supervisor::probe::Listeners;
use kip_supervisor::task::{By, Handle, TaskCommand, run_hook};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::clone::{CloneAdvice, CloneMethod, CloneRequest, ClonesView, MOST_CLONES};
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::chain;
use kip_types::keys::Hex;
use kip_types::life::Restart;
use kip_types::name::MAX_NAME;
use kip_types::volume::ClonedVolumes;
use kip_types::{CheckpointTag, Generation, PortSpec, ProcName, Spec, State, Tier, VolumeSource};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Numbers that are tried for the name of a clone: there are fewer procs.
const MOST_NUMBERED: u32 = 100_000;

impl Worker {
    /// As [`kip_service::ProcService::clone_proc`].
    pub(crate) async fn cloned(&self, name: ProcName, request: CloneRequest) -> Result<ClonesView, Refusal> {
        // A checkpoint leaves no choice, which is refused there.
        if request.method != CloneMethod::Auto || request.checkpoint.is_some() {
            return self.cloned_by(name, request).await;
        }
        let CloneAdvice { method, why, .. } = self.clone_advice(name.clone()).await?;
        // Files are copied at the moment of a hot clone.
        let copies = request.volumes == Some(ClonedVolumes::Copy);
        let method = if copies && method == CloneMethod::Cold { CloneMethod::Hot } else { method };
        let request = CloneRequest { method, ..request };
        let is_other = |code: Code| matches!(code, Code::Invalid | Code::Unknown | Code::Taken | Code::Exhausted);
        let view = match self.cloned_by(name.clone(), request.clone()).await {
            // It cannot be cloned; one that is to sleep needs a memory to do it in.
            Err(refusal) if method == CloneMethod::Hot && !is_other(refusal.code) && !request.asleep && !copies => {
                let cold = CloneRequest { method: CloneMethod::Cold, ..request };
                ClonesView { why: Some(refusal.message), ..self.cloned_by(name, cold).await? }
            }
            other => ClonesView { why: Some(why), ..other? },
        };
        Ok(view)
    }

    /// By a method that has been chosen.
    async fn cloned_by(&self, name: ProcName, request: CloneRequest) -> Result<ClonesView, Refusal> {
        let began = Instant::now();
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        let (source, tag) = (self.handle(&name)?, request.checkpoint.clone());
        let _begun = self.begin_on(&source, &name).await?;
        // Of templates only: what is copied needs it no more.
        let templates_stay = match request.method {
            CloneMethod::Warm => Some(Arc::clone(&self.templating).read_owned().await),
            CloneMethod::Hot | CloneMethod::Cold | CloneMethod::Auto => None,
        };
        let from = match (&tag, request.method) {
            (Some(tag), _) => Some(self.checkpoint_of(&source, tag).await?),
            (None, CloneMethod::Warm) => Some(self.template_for(&source, true).await?),
            (None, CloneMethod::Hot | CloneMethod::Cold | CloneMethod::Auto) => None,
        };
        let spec = match (&from, &tag) {
            (Some(from), Some(_)) => Arc::new(from.spec.clone()),
            _ => source.proc.spec(),
        };
        check(&spec, &request)?;
        let _in_use = self.has_layers(&spec).await?;
        let claimed = self.claim_names(&name, &request)?;
        let names: Vec<ProcName> = claimed.iter().map(|claimed| claimed.of.clone()).collect();
        if request.method == CloneMethod::Cold {
            let clones = self.begun_cold(&source, &names, &request).await?;
            let views = blocking(move || clones.iter().map(view::proc_view).collect()).await;
            let total_us = began.elapsed().as_micros() as u64;
            let (method, notes) = (request.method, Vec::new());
            return Ok(ClonesView { clones: views, method, why: None, still_us: 0, total_us, notes });
        }
        // Those of a sleeper sleep, and take no memory.
        let runs = || matches!(source.status.borrow().record.state, State::Hot { .. });
        if !request.asleep && from.as_ref().map_or_else(runs, Checkpoint::runs_again) {
            for name in &names {
                self.machine.pressure.admit_new(name).await?;
            }
        }
        let (worker, first) = (self.clone(), names[0].clone());
        let begun = {
            let (source, request) = (source.clone(), request.clone());
            let base = from.as_ref().map_or_else(|| source.proc.base.clone(), |from| from.record.base.clone());
            blocking(move || {
                let secrets = worker.secrets_of(&source)?;
                let own = OwnVolumes::make(&worker.machine, &spec, &first, &request)?;
                let spec_of_first = spec_of(&spec, &first, &request, &own);
                let moment = Moment { spec, base, secrets };
                let mut first = worker.begin_staging(&moment, spec_of_first)?;
                first.own_volumes = Some(own);
                Ok::<_, Refusal>((moment, first))
            })
        };
        let (moment, first) = begun.await?;
        let (asleep, method) = (request.asleep, request.method);
        let (moment, mut first, copied) = match from {
            Some(from) => from_checkpoint(moment, first, from).await?,
            None => {
                let target = CopyTarget {
                    directory: first.directory(),
                    first_id: first.first_id(),
                    hostname: first.spec.hostname().to_owned(),
                    volumes: first.own_volumes.as_ref().map(OwnVolumes::all).unwrap_or_default(),
                    runs: !asleep,
                };
                let copied = copy_source(&source, target, Purpose::Clone).await;
                (moment, first, copied?)
            }
        };
        drop(templates_stay);
        fault::reach("clone-copied");
        let SourceCopy { mut record, was_awake, still_us, inspected, behind, .. } = copied;
        record.wakes_again = was_awake && !asleep;
        let generation = generation_in(&record);
        let (worker, others) = (self.clone(), names[1..].to_vec());
        let (notes, staged) = blocking(move || {
            first.settle(&record)?;
            let (source, directory) = (&moment.spec.name, first.directory());
            let finished = |generation| finish_copy(source, &directory, generation, inspected, Purpose::Clone);
            let notes = generation.map_or_else(|| Ok(Vec::new()), finished)?;
            if request.volumes == Some(ClonedVolumes::Drop) {
                check_dropped(&moment.spec, &directory, generation)
                    .map_err(|why| Purpose::Clone.refuse(source, Code::State, &why))?;
            }
            let mut staged = vec![first];
            for name in others {
                let own = OwnVolumes::make(&worker.machine, &moment.spec, &name, &request)?;
                let spec = spec_of(&moment.spec, &name, &request, &own);
                let mut other = worker.begin_staging(&moment, spec)?;
                let like: &Staging = &staged[0];
                let from = CopiedFrom {
                    directory: like.directory(),
                    first_id: like.first_id(),
                    hostname: like.spec.hostname().to_owned(),
                    volumes: like.own_volumes.as_ref().map(|first| own.like(first)).unwrap_or_default(),
                    becomes: Becomes::Another,
                };
                other.own_volumes = Some(own);
                from.copy(&other, generation)?;
                other.settle(&record)?;
                staged.push(other);
            }
            Ok::<_, Refusal>((notes, staged))
        })
        .await?;
        let origin = match method {
            CloneMethod::Warm => format!("the template of {name}"),
            CloneMethod::Hot | CloneMethod::Cold | CloneMethod::Auto => origin(&name, tag.as_ref()),
        };
        let clones = self.publish_all(&origin, staged, behind, was_awake && !asleep, !asleep, false).await?;
        // Before they are parked, for which they would stand still.
        let directories: Vec<_> = clones.iter().map(|clone| clone.proc.dir.clone()).collect();
        tokio::spawn(blocking(move || directories.iter().for_each(|dir| kip_snapshot::sync_unsynced(dir))));
        drop(claimed);
        let views = blocking(move || clones.iter().map(view::proc_view).collect()).await;
        let total_us = began.elapsed().as_micros() as u64;
        Ok(ClonesView { clones: views, method, why: None, still_us, total_us, notes })
    }

    /// Starts clones that are no more like their source than what it was asked to be. All of them,
    /// or none.
    async fn begun_cold(
        &self,
        source: &Handle,
        names: &[ProcName],
        request: &CloneRequest,
    ) -> Result<Vec<Handle>, Refusal> {
        let (mut begun, mut own_volumes) = (Vec::new(), Vec::new());
        let origin = format!("what {} was asked to be", source.proc.name);
        for name in names {
            let (worker, of, name, request) = (self.clone(), source.clone(), name.clone(), request.clone());
            let started = async {
                self.machine.pressure.admit_new(&name).await?;
                let made = blocking(move || {
                    let own = OwnVolumes::make(&worker.machine, &of.proc.spec(), &name, &request)?;
                    let mut spec = spec_of(&of.proc.spec(), &name, &request, &own);
                    spec.volumes.retain(|volume| volume.source != VolumeSource::Secrets);
                    Ok::<_, Refusal>((worker.create(spec, worker.secrets_of(&of)?)?, own))
                });
                let ((proc, prepared, record, claim), own) = made.await?;
                own_volumes.push(own);
                if proc.spec().hooks.after_clone.is_some() {
                    self.machine.nat.hold_ahead(proc.slot);
                }
                let clone = self.adopt(proc, record, Some(prepared), Listeners::new());
                drop(claim);
                begun.push(clone.clone());
                self.notify_network(&clone.proc.spec()).await;
                clone.ask(|reply| TaskCommand::Start { wait_ready: false, reply }).await?;
                let not_ready = |why| Refusal::new(Code::Failed, format!("{} is not made: it {why}", clone.proc.name));
                until_ready(&clone).await.map_err(|NotReady { why, .. }| not_ready(why))?;
                self.run_after_clone(&clone, &origin, true).await
            };
            if let Err(refusal) = started.await {
                for clone in &begun {
                    self.discard(clone).await;
                }
                blocking(move || drop(own_volumes)).await;
                return Err(refusal);
            }
        }
        own_volumes.into_iter().for_each(OwnVolumes::keep);
        for clone in &begun {
            let events = &clone.proc.shared.events;
            events.emit(Some(&clone.proc.name), EventKind::Cloned, format!("from {origin}"));
            if clone.proc.spec().remove {
                tokio::spawn(self.clone().remove_at_end(clone.clone(), false));
            }
        }
        Ok(begun)
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

    /// Contents of a proc's secrets, by their names.
    pub(crate) fn secrets_of(&self, source: &Handle) -> Result<BTreeMap<String, Hex>, Refusal> {
        let spec = source.proc.spec();
        if !spec.volumes.iter().any(|volume| volume.source == VolumeSource::Secrets) {
            return Ok(BTreeMap::new());
        }
        let failed =
            |e| Refusal::new(Code::Failed, format!("the secrets of {} cannot be read: {}", spec.name, chain(&e)));
        let opened = secrets::open(&source.proc).map_err(failed)?;
        Ok(opened.files().map(|(name, contents)| (name.to_owned(), Hex(contents.to_vec()))).collect())
    }

    /// All of them, or none. They are woken if `awake`; those of a stopped proc are started if
    /// `started`. To one that `is_new` a client may be about to attach.
    pub(crate) async fn publish_all(
        &self,
        origin: &str,
        staged: Vec<Staging>,
        behind: Option<Behind>,
        awake: bool,
        started: bool,
        is_new: bool,
    ) -> Result<Vec<Handle>, Refusal> {
        let (mut clones, mut own_volumes, mut unsynced) = (Vec::new(), Vec::new(), Vec::new());
        for mut staging in staged {
            let of_it = staging.own_volumes.take();
            let published = async {
                let durable = blocking(move || (of_it.as_ref().map_or(Ok(()), OwnVolumes::sync), of_it));
                let (durable, of_it) = durable.await;
                own_volumes.extend(of_it);
                let failed = |why| Refusal::new(Code::Failed, format!("{} cannot be made: {why}", staging.spec.name));
                durable.map_err(failed)?;
                let directory = staging.directory();
                if awake {
                    // It is one once it runs, and all of its memory is copied.
                    unsynced.push(blocking(move || begin_unfinished(&directory)).await.map_err(failed)?);
                }
                // One that is not started, and has nothing to be woken from, does not run it.
                let runs = started || generation_in(&staging.record).is_some();
                let is_held = runs && staging.spec.hooks.after_clone.is_some();
                let handle = self.publish_clone(staging, awake, is_held).await?;
                clones.push(handle.clone());
                let (name, events) = (handle.proc.name.clone(), &handle.proc.shared.events);
                events.emit(Some(&name), EventKind::Cloned, format!("from {origin}"));
                if handle.proc.spec().remove {
                    tokio::spawn(self.clone().remove_at_end(handle.clone(), is_new));
                }
                let is_stopped = matches!(handle.status.borrow().record.state, State::Stopped { .. });
                if started && is_stopped {
                    handle.ask(|reply| TaskCommand::Start { wait_ready: false, reply }).await?;
                }
                if started || !is_stopped {
                    self.run_after_clone(&handle, origin, awake || is_stopped).await?;
                }
                Ok::<_, Refusal>(())
            };
            match published.await {
                Ok(()) => {}
                Err(refusal) => {
                    for clone in &clones {
                        self.discard(clone).await;
                    }
                    blocking(move || drop(own_volumes)).await;
                    return Err(refusal);
                }
            }
        }
        if awake {
            let woken = clones.iter().cloned().map(|clone| {
                let cause = WakeCause::Request(WakeCommand::StoodStill("clone"));
                tokio::spawn(async move { clone.ask(|reply| TaskCommand::Wake { cause, reply }).await })
            });
            let mut refused = None;
            for woken in woken.collect::<Vec<_>>() {
                let refusal = woken.await.ok().and_then(Result::err);
                // One that is to wait, for memory say, is woken by its first client.
                refused = refused.or(refusal.filter(|refusal| refusal.code == Code::Failed));
            }
            if let Some(refusal) = refused {
                for clone in &clones {
                    self.discard(clone).await;
                }
                blocking(move || drop(own_volumes)).await;
                let message = format!("clones of {origin} cannot be made: {}", refusal.message);
                return Err(Refusal { message, ..refusal });
            }
        }
        if awake {
            let copied = match behind {
                Some(mut behind) => {
                    behind.clones_run();
                    behind.finish().await
                }
                None => Ok(()),
            };
            fault::reach("clone-filled");
            let procs: Vec<_> = clones.iter().map(|clone| Arc::clone(&clone.proc)).collect();
            let finished = blocking(move || copied.and_then(|()| finish_clones(&procs, &unsynced))).await;
            if let Err(why) = finished {
                for clone in &clones {
                    self.discard(clone).await;
                }
                blocking(move || drop(own_volumes)).await;
                return Err(Refusal::new(Code::Failed, format!("clones of {origin} cannot be made: {why}")));
            }
        }
        own_volumes.into_iter().for_each(OwnVolumes::keep);
        Ok(clones)
    }

    /// Runs a clone's own command, and lets clients reach it then. It sleeps again afterwards
    /// unless it `stays` awake.
    async fn run_after_clone(&self, clone: &Handle, origin: &str, stays: bool) -> Result<(), Refusal> {
        let spec = clone.proc.spec();
        let Some(command) = &spec.hooks.after_clone else { return Ok(()) };
        let cause = WakeCause::Request(WakeCommand::StoodStill("clone"));
        let ticket = clone.ask(|reply| TaskCommand::KeepAwake { cause, reply }).await?;
        let env = BTreeMap::from([("KIP_CLONE_OF".to_owned(), origin.to_owned())]);
        let ran = run_hook(&clone.proc, command, env, ticket, spec.hooks.within_ms).await;
        ran.map_err(|why| {
            let message = format!("{} is not made: its own command after the clone failed: {why}", spec.name);
            Refusal::new(Code::Failed, message)
        })?;
        if !stays {
            // One that cannot sleep says itself why.
            let _ = clone.ask(|reply| TaskCommand::Sleep { to: Tier::Parked, by: By::Kip, reply }).await;
        }
        self.hold_connections(clone, false).await;
        Ok(())
    }

    /// Gives a proc that was made its name, and what it needs of the kernel while it sleeps. One
    /// that `runs` is woken at once; its clients wait if it `is_held`.
    pub(crate) async fn publish_clone(
        &self,
        mut staging: Staging,
        runs: bool,
        is_held: bool,
    ) -> Result<Handle, Refusal> {
        let (machine, name) = (Arc::clone(&self.machine), staging.spec.name.clone());
        let published = blocking(move || {
            let directory = staging.directory();
            let generation =
                generation_in(&staging.record).filter(|_| runs).map(|of| kip_snapshot::path_of(&directory, of));
            let mut made = staging.made.take().expect("it is published once");
            // What runs at once is synced when it does.
            if !is_unfinished(&directory) {
                kip_copy::sync(&directory, generation.as_deref()).map_err(|e| {
                    Refusal::new(Code::Failed, format!("{} cannot be made: {}", staging.spec.name, chain(&e)))
                })?;
                made = made.durable();
            }
            fault::reach("clone-synced");
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
        let prepared = staging.prepared.take().expect("it is held once");
        if is_held {
            machine.nat.hold_ahead(slot);
        }
        let (record, prepared) = match generation_in(&record) {
            // It begins with a start.
            None => (record, Some(prepared)),
            Some(generation) => {
                let held = {
                    let proc = Arc::clone(&proc);
                    blocking(move || hold(&proc, record, generation, prepared)).await
                };
                match held {
                    Ok(record) => (record, None),
                    Err(why) => {
                        if let Err(e) = machine.nat.hold(slot, false) {
                            tracing::warn!(proc = %name, error = chain(&e), "connections to a clone that is not made wait");
                        }
                        if let Err(e) = stop::remove(&proc).await {
                            tracing::warn!(proc = %name, error = %e, "a clone that cannot be woken is left to the next daemon");
                        }
                        return Err(Refusal::new(Code::Failed, format!("{name} cannot be made: {why}")));
                    }
                }
            }
        };
        let handle = self.adopt(proc, record, prepared, Listeners::new());
        drop(staging);
        self.notify_network(&handle.proc.spec()).await;
        Ok(handle)
    }
}

/// Where clones come from, as their events say it.
fn origin(name: &ProcName, tag: Option<&CheckpointTag>) -> String {
    tag.map_or_else(|| name.to_string(), |tag| format!("{name}@{tag}"))
}

/// Copies a checkpoint to the first clone of it.
pub(crate) async fn from_checkpoint(
    moment: Moment,
    first: Staging,
    from: Checkpoint,
) -> Result<(Moment, Staging, SourceCopy), Refusal> {
    blocking(move || {
        let was_awake = from.note.was_awake;
        let (first_id, hostname) = (from.note.first_id, from.spec.hostname().to_owned());
        let copied = CopiedFrom {
            directory: from.directory,
            first_id,
            hostname,
            volumes: Vec::new(),
            becomes: Becomes::Another,
        };
        copied.copy(&first, generation_in(&from.record))?;
        Ok((
            moment,
            first,
            SourceCopy { record: from.record, was_awake, still_us: 0, still: None, inspected: None, behind: None },
        ))
    })
    .await
}

/// What a clone needs of the kernel while it sleeps, and its ports; with them its record.
fn hold(proc: &Arc<Proc>, record: Record, generation: Generation, prepared: PreparedNetwork) -> Result<Record, String> {
    let directory = kip_snapshot::path_of(&proc.dir, generation);
    let body = kip_snapshot::open::<Body>(&directory).map_err(|e| chain(&e))?.body;
    let ports = renew::renew_in(proc, &body, &[], prepared).map_err(|e| chain(&e))?;
    let record = Record { ports, ..record };
    let durability = if is_unfinished(&proc.dir) { Durability::Rename } else { Durability::Fsync };
    proc.write_record(&record, durability).map_err(|e| chain(&e))?;
    proc.meter.level(kip_snapshot::bytes_of(&directory));
    take_custody(proc, &body);
    // Of a source that ran on, which has none.
    if !directory.join(PLAN).exists() {
        plan_wake(proc, generation, &body);
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
    if request.method != CloneMethod::Hot && request.checkpoint.is_some() {
        return invalid(format!(
            "a clone of a checkpoint of {name} goes on from that: leave out --warm, --cold and --method"
        ));
    }
    if request.method == CloneMethod::Cold && request.asleep {
        return invalid("a cold clone starts: it has no memory yet in which it could sleep".into());
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
    volumes_of_clones::check(source, request)
}

/// What a clone of that proc is asked to be.
fn spec_of(source: &Spec, name: &ProcName, request: &CloneRequest, own_volumes: &OwnVolumes) -> Spec {
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
        lineage: None,
        scale: None,
        checkpoints: spec.checkpoints.filter(|_| request.replica_of.is_none()),
        replica_of: request.replica_of.clone(),
        own_volumes: Vec::new(),
        // A replica that ends is replaced.
        restart: if request.replica_of.is_some() { Restart::No } else { spec.restart },
        remove: spec.remove && request.replica_of.is_none(),
        ..spec.clone()
    };
    let mut spec = own(source);
    spec.volumes = source.volumes.iter().map(|volume| own_volumes.replace(volume)).collect();
    if request.replica_of.is_some() {
        spec.own_volumes = own_volumes.names().collect();
    }
    if let Some(asked) = &mut spec.asked {
        asked.spec = own(&asked.spec);
        // There they are as the request had them, with links perhaps.
        for volume in &mut asked.spec.volumes {
            if let Some(known) = source.volumes.iter().find(|known| known.target == volume.target) {
                let source = own_volumes.replace(known).source;
                volume.source = if source == known.source { volume.source.clone() } else { source };
            }
        }
        // A proc that was renamed has its old one, which its owner did not ask for.
        if asked.spec.hostname.is_none() {
            spec.hostname = None;
        }
    }
    spec
}
