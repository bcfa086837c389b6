//! `kip checkpoint` and `kip rollback`: a proc as it was at one moment, kept beside it, and gone
//! back to.
//!
//! A checkpoint is a clone that is no proc: copied as one ([`copied`](crate::copied)), recorded as
//! one, and never changed. A rollback makes a proc of it, as a clone is made, which takes the place
//! of the one that is there ([`replace`](crate::replace)). That one is asleep from the moment at
//! which it is kept as a checkpoint itself, and ends when the other has its place: a crash leaves
//! the one or the other.
//!
//! A proc's checkpoints go with it: its name may change, and another may take its place, as the
//! lineage in its spec says. The last proc that is removed takes them along.

use crate::claim::{Claim, TagClaim};
use crate::copied::{CopyTarget, Purpose, SourceCopy, check_kept, copy_source, finish_copy};
use crate::lineage::{Checkpoint, generation_in, key_of, view_of};
use crate::replace::{Replacing, state_of, until_settled};
use crate::staging::{CopiedFrom, Moment};
use crate::worker::Worker;
use async_trait::async_trait;
use kip_copy::Becomes;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::host::Proc;
use kip_engine::volumes;
use kip_insight::view;
use kip_records::checkpoints::{CheckpointNote, Checkpoints};
use kip_records::record::{Durability, RecordError, Unpublished};
use kip_records::state::Record;
use kip_service::{CheckpointService, VolumeService as _};
use kip_supervisor::task::{Handle, Still, TaskCommand, hidden};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::checkpoint::{CheckpointRequest, CheckpointView, CheckpointsView, RollbackRequest, RolledBackView};
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::name::MAX_NAME;
use kip_types::spec::Lineage;
use kip_types::{CheckpointTag, ProcName, Spec, State, VolumeSource, chain};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Numbers that are tried for a tag.
const MOST_NUMBERED: u32 = 100_000;

/// One that is being taken; what there is of it goes if it is not published.
pub(crate) struct Taking(Option<Unpublished>);

impl Taking {
    pub(crate) fn new(made: Unpublished) -> Taking {
        Taking(Some(made))
    }

    pub(crate) fn made(&self) -> &Unpublished {
        self.0.as_ref().expect("it is published last")
    }

    /// Adds its note to what is durable; says why not.
    pub(crate) fn noted(self, note: CheckpointNote) -> Result<Finished, String> {
        Checkpoints::add_note(self.made(), &note).map_err(|e| chain(&e))?;
        Ok(Finished { taking: self, note })
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        if let Some(made) = self.0.take()
            && let Err(e) = fs::remove_dir_all(made.path())
            // The proc was removed meanwhile, with all its checkpoints.
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %made.path().display(), error = %e, "a checkpoint that was not taken is left to the next daemon");
        }
    }
}

/// One that was copied, and has no name yet.
pub(crate) struct Taken {
    taking: Taking,
    copied: SourceCopy,
    first_id: u32,
    taken_at_ms: u64,
    began: Instant,
}

/// Copies a proc as it is now to where it is to be kept. Returns also what keeps it asleep if it is
/// rolled back.
pub(crate) async fn copy_to(
    source: &Handle,
    taking: Taking,
    purpose: Purpose,
    began: Instant,
) -> Result<(Taken, Option<Still>), Refusal> {
    let (first_id, taken_at_ms) = (source.proc.first_id(), now_ms());
    let hostname = source.proc.spec().hostname().to_owned();
    let target =
        CopyTarget { directory: taking.made().path().to_owned(), first_id, hostname, volumes: Vec::new(), runs: false };
    let mut copied = copy_source(source, target, purpose).await?;
    let still = copied.still.take();
    Ok((Taken { taking, copied, first_id, taken_at_ms, began }, still))
}

impl Taken {
    /// Makes it durable. Its note is what `complete` makes of what is known.
    pub(crate) fn finish(
        self,
        purpose: Purpose,
        name: &ProcName,
        complete: impl FnOnce(CheckpointNote) -> CheckpointNote,
    ) -> Result<Finished, Refusal> {
        let SourceCopy { record, was_awake, still_us, inspected, .. } = self.copied;
        let failed = |why: String| purpose.refuse(name, Code::Exhausted, &why);
        let directory = self.taking.made().path().to_owned();
        let mut memory_bytes = 0;
        if let Some(generation) = generation_in(&record) {
            finish_copy(name, &directory, generation, inspected, purpose)?;
            memory_bytes = kip_snapshot::bytes_of(&kip_snapshot::path_of(&directory, generation));
        }
        let file_bytes = ["upper", "disk"].iter().map(|own| volumes::size(&directory.join(own))).sum();
        self.taking.made().change_state(&record).map_err(|e| failed(chain(&e)))?;
        kip_copy::sync(&directory, None).map_err(|e| failed(chain(&e)))?;
        let total_us = self.began.elapsed().as_micros() as u64;
        let (first_id, taken_at_ms) = (self.first_id, self.taken_at_ms);
        let note = complete(CheckpointNote {
            parent: None,
            taken_at_ms,
            was_awake,
            first_id,
            memory_bytes,
            file_bytes,
            still_us,
            total_us,
        });
        self.taking.noted(note).map_err(failed)
    }
}

/// One that is whole, and has no name yet.
pub(crate) struct Finished {
    taking: Taking,
    note: CheckpointNote,
}

impl Finished {
    /// Gives it its name.
    pub(crate) fn publish(self, purpose: Purpose, name: &ProcName) -> Result<CheckpointNote, Refusal> {
        self.publish_or(|why| purpose.refuse(name, Code::Exhausted, why))
    }

    /// The same, with another refusal.
    pub(crate) fn publish_or(mut self, refuse: impl FnOnce(&str) -> Refusal) -> Result<CheckpointNote, Refusal> {
        let made = self.taking.0.take().expect("it is published once");
        made.publish().map_err(|e| refuse(&chain(&e)))?;
        Ok(self.note)
    }
}

/// Which tag a checkpoint gets.
pub(crate) enum Tag {
    Wanted(CheckpointTag),
    /// The first free one of these words with a number.
    Numbered(String),
}

impl Worker {
    /// Those of this data directory.
    pub(crate) fn checkpoint_store(&self) -> Checkpoints {
        Checkpoints::new(&self.machine.data)
    }

    /// As [`kip_service::CheckpointService::checkpoint`].
    pub(crate) async fn checkpointed(
        &self,
        name: ProcName,
        request: CheckpointRequest,
    ) -> Result<CheckpointView, Refusal> {
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        let source = self.handle(&name)?;
        let _begun = self.begin_on(&source, &name).await?;
        let tag = request.tag.map_or_else(|| Tag::Numbered("c".to_owned()), Tag::Wanted);
        self.keep(&source, tag, Purpose::Checkpoint).await.map(|(view, _)| view)
    }

    /// As [`kip_service::CheckpointService::checkpoints`]; of all procs without a name.
    pub(crate) async fn checkpoints_of(&self, name: Option<ProcName>) -> Result<CheckpointsView, Refusal> {
        let handles = match name {
            Some(name) => vec![self.handle(&name)?],
            None => self.handles().into_iter().filter(|handle| !handle.proc.spec().trial).collect(),
        };
        let worker = self.clone();
        blocking(move || {
            let of = handles.iter().map(|handle| worker.views_of(&handle.proc));
            let checkpoints = of.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
            Ok(CheckpointsView { checkpoints })
        })
        .await
    }

    /// As [`kip_service::CheckpointService::remove_checkpoint`].
    pub(crate) async fn checkpoint_removed(&self, name: ProcName, tag: CheckpointTag) -> Result<(), Refusal> {
        let handle = self.handle(&name)?;
        // A clone, or a rollback, may be reading it.
        let _alone = handle.begun.write().await;
        let worker = self.clone();
        blocking(move || {
            let key = key_of(&handle.proc);
            let removed = worker.checkpoint_store().of(&key).remove(&tag.clone().into());
            let trash = removed.map_err(|e| worker.unreadable(&handle.proc, &tag, e))?;
            if let Err(e) = trash.delete() {
                tracing::warn!(proc = %name, error = chain(&e), "a removed checkpoint is still on disk until the next start");
            }
            Ok(())
        })
        .await
    }

    /// As [`kip_service::CheckpointService::rollback`].
    pub(crate) async fn rolled_back(
        &self,
        name: ProcName,
        request: RollbackRequest,
    ) -> Result<RolledBackView, Refusal> {
        let began = Instant::now();
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        let _only = Replacing::begin(self, &name)?;
        until_settled(&self.handle(&name)?).await;
        let old = self.handle(&name)?;
        // Its checkpoints stay meanwhile.
        let _begun = Arc::clone(&old.begun).read_owned().await;
        let old_spec = old.proc.spec();
        check_kept(&old_spec, Purpose::Rollback)?;
        let from = self.checkpoint_of(&old, &request.to).await?;
        let (from, damage) = blocking(move || {
            let damage = from.verify(true).err();
            (from, damage)
        })
        .await;
        if let Some(why) = damage {
            let message = format!("{name} is not rolled back: its checkpoint {} is damaged: {why}", request.to);
            return Err(Refusal::new(Code::Failed, message));
        }
        let _in_use = self.has_layers(&from.spec).await?;
        let claimed = self.name_beside(&name)?;
        let hidden_name = claimed.of.clone();
        let spec = Spec {
            name: name.clone(),
            hostname: Some(from.spec.hostname().to_owned()),
            file: old_spec.file.clone(),
            replaced: old_spec.replaced + 1,
            ..from.spec.clone()
        };
        let (wakes, was_stopped) = (from.runs_again(), generation_in(&from.record).is_none());
        let staging = {
            let (worker, old, hidden) = (self.clone(), old.clone(), hidden(&spec, hidden_name.clone()));
            blocking(move || {
                let secrets = worker.secrets_of(&old)?;
                let (first_id, hostname) = (from.note.first_id, from.spec.hostname().to_owned());
                let moment = Moment { spec: Arc::new(from.spec), base: from.record.base.clone(), secrets };
                let mut staging = worker.begin_staging(&moment, hidden)?;
                let copied = CopiedFrom {
                    directory: from.directory,
                    first_id,
                    hostname,
                    volumes: Vec::new(),
                    becomes: Becomes::TheSame,
                };
                copied.copy(&staging, generation_in(&from.record))?;
                staging.settle(&Record { wakes_again: wakes, ..from.record })?;
                Ok::<_, Refusal>(staging)
            })
        };
        let was_awake = matches!(state_of(&old), State::Hot { .. });
        let placed = async {
            let staging = staging.await?;
            // Connections that were begun on the old one would be lost with it.
            self.hold_connections(&old, true).await;
            // From here on the old one is asleep, and not woken before the other has its place.
            let before = Tag::Numbered(format!("before-{}-", request.to));
            let (kept, still) = self.keep(&old, before, Purpose::Rollback).await?;
            fault::reach("rollback-kept");
            let new = self.publish_clone(staging, false, false).await?;
            let placed = async {
                if was_stopped {
                    tokio::select! {
                        started = self.started(&new, false, &[]) => started?,
                        refusal = self.stopped_by_owner(&old, &name) => return Err(refusal),
                    }
                } else if wakes {
                    let cause = WakeCause::Request(WakeCommand::StoodStill("rollback"));
                    new.ask(|reply| TaskCommand::Wake { cause, reply }).await?;
                }
                let lineage =
                    Lineage { key: key_of(&old.proc), checkpoint: Some(request.to.clone()), since_ms: now_ms() };
                // As they were made: with their real paths, and one for its secrets.
                let volumes = new.proc.spec().volumes.clone();
                let spec = Spec { volumes, lineage: Some(lineage), ..spec };
                self.put_in_place(&old, &new, spec, still).await
            };
            match placed.await {
                Ok(()) => Ok((new, kept)),
                Err(refusal) => {
                    self.discard(&new).await;
                    Err(refusal)
                }
            }
        };
        let (new, kept) = match placed.await {
            Ok(placed) => placed,
            Err(refusal) => {
                self.hold_connections(&old, false).await;
                if was_awake && !old.inbox.is_closed() {
                    let cause = WakeCause::Request(WakeCommand::StoodStill("rollback"));
                    // It says itself why it does not wake, and is woken by its first client.
                    let _ = old.ask(|reply| TaskCommand::Wake { cause, reply }).await;
                }
                let why = refusal.message.replace(hidden_name.as_str(), name.as_str());
                return Err(Refusal { message: format!("{name} is not rolled back: {why}"), ..refusal });
            }
        };
        drop(claimed);
        // It is not told: what it did from now on would be lost.
        self.discard(&old).await;
        let events = &new.proc.shared.events;
        events.emit(Some(&name), EventKind::RolledBack, format!("to {}; it was kept as {}", request.to, kept.tag));
        if new.proc.spec().remove {
            tokio::spawn(self.clone().remove_at_end(new.clone(), false));
        }
        let proc = blocking(move || view::proc_view(&new)).await;
        Ok(RolledBackView { proc, kept, total_us: began.elapsed().as_micros() as u64 })
    }

    /// Takes a checkpoint. Returns it, and what keeps the source asleep if it is rolled back.
    pub(crate) async fn keep(
        &self,
        source: &Handle,
        tag: Tag,
        purpose: Purpose,
    ) -> Result<(CheckpointView, Option<Still>), Refusal> {
        let began = Instant::now();
        let spec = source.proc.spec();
        check_kept(&spec, purpose)?;
        let name = spec.name.clone();
        let (worker, proc) = (self.clone(), Arc::clone(&source.proc));
        let (claim, parent, taking) = blocking(move || worker.begin_checkpoint(&proc, tag)).await?;
        let (taken, still) = copy_to(source, taking, purpose, began).await?;
        fault::reach("checkpoint-copied");
        let (proc, spec) = (Arc::clone(&source.proc), source.proc.spec());
        let view = blocking(move || {
            let note = taken.finish(purpose, &spec.name, |note| CheckpointNote { parent, ..note })?;
            let note = note.publish(purpose, &spec.name)?;
            fault::reach("checkpoint-published");
            let current = Some(&claim.of.1).filter(|_| purpose == Purpose::Checkpoint);
            Ok::<_, Refusal>(view_of(&proc, claim.of.1.clone(), note, &spec, current))
        })
        .await?;
        self.machine.events.emit(Some(&name), EventKind::Checkpointed, format!("as {}", view.tag));
        Ok((view, still))
    }

    /// Its tag, the one before it, and where it grows.
    fn begin_checkpoint(
        &self,
        proc: &Arc<Proc>,
        tag: Tag,
    ) -> Result<(TagClaim, Option<CheckpointTag>, Taking), Refusal> {
        let (key, spec, checkpoints) = (key_of(proc), proc.spec(), self.checkpoint_store());
        let name = &spec.name;
        let failed = |e: RecordError| {
            Refusal::new(Code::Exhausted, format!("a checkpoint of {name} cannot be recorded: {}", chain(&e)))
        };
        let records = checkpoints.make_room(&key).map_err(failed)?;
        let claim = self.claim_tag(&key, name, tag)?;
        let parent = self.current(proc).map_err(failed)?;
        let tag: ProcName = claim.of.1.clone().into();
        let record = Record::new(proc.slot.number(), proc.base.clone());
        let made = records.prepare(&tag, &*spec, &record, Durability::Fsync).map_err(failed)?;
        Ok((claim, parent, Taking::new(made)))
    }

    fn claim_tag(&self, key: &ProcName, name: &ProcName, tag: Tag) -> Result<TagClaim, Refusal> {
        let records = self.checkpoint_store().of(key);
        let claim = |tag: CheckpointTag| {
            let claim = Claim::of((key.clone(), tag.clone()), &self.tags)?;
            (!records.directory(&tag.into()).exists()).then_some(claim)
        };
        match tag {
            Tag::Wanted(tag) => claim(tag.clone()).ok_or_else(|| {
                let message = format!("{name} has a checkpoint {tag} already");
                Refusal::new(Code::Taken, message)
                    .with_hint(format!("choose another tag, or `kip checkpoint rm {name}@{tag}`"))
            }),
            Tag::Numbered(stem) => {
                let stem: String = stem.chars().take(MAX_NAME - 6).collect();
                let mut free = (1..MOST_NUMBERED).filter_map(|n| claim(format!("{stem}{n}").parse().ok()?));
                free.next().ok_or_else(|| Refusal::new(Code::Exhausted, format!("{name} has too many checkpoints")))
            }
        }
    }

    /// The checkpoint that a proc goes on from: the newest since it is what it is, or the one that
    /// it began with.
    fn current(&self, proc: &Proc) -> Result<Option<CheckpointTag>, RecordError> {
        let (key, spec, checkpoints) = (key_of(proc), proc.spec(), self.checkpoint_store());
        let since = spec.lineage.as_ref().map_or(0, |lineage| lineage.since_ms);
        let mut newest = None;
        for tag in checkpoints.tags(&key)? {
            // One that cannot be read stands in no other's way.
            let Ok(note) = checkpoints.note(&key, &tag) else { continue };
            newest = newest.max(Some((note.taken_at_ms, tag)).filter(|(at, _)| *at > since));
        }
        let began_with = || spec.lineage.as_ref().and_then(|lineage| lineage.checkpoint.clone());
        Ok(newest.map(|(_, tag)| tag).or_else(began_with))
    }

    fn views_of(&self, proc: &Proc) -> Result<Vec<CheckpointView>, Refusal> {
        let (key, checkpoints, name) = (key_of(proc), self.checkpoint_store(), proc.spec().name.clone());
        let failed = |e: RecordError| {
            Refusal::new(Code::Failed, format!("the checkpoints of {name} cannot be read: {}", chain(&e)))
        };
        let current = self.current(proc).map_err(failed)?;
        let mut views = Vec::new();
        for tag in checkpoints.tags(&key).map_err(failed)? {
            let spec = checkpoints.of(&key).read_spec::<Spec>(&tag.clone().into());
            match checkpoints.note(&key, &tag).and_then(|note| Ok((note, spec?))) {
                Ok((note, spec)) => views.push(view_of(proc, tag, note, &spec, current.as_ref())),
                // It was removed meanwhile.
                Err(RecordError::Unknown { .. }) => {}
                Err(e) => {
                    tracing::warn!(proc = %name, %tag, error = chain(&e), "a checkpoint cannot be read, and is not listed");
                }
            }
        }
        views.sort_by(|one, other| (one.taken_at_ms, &one.tag).cmp(&(other.taken_at_ms, &other.tag)));
        Ok(views)
    }

    /// One of a proc's checkpoints.
    pub(crate) async fn checkpoint_of(&self, source: &Handle, tag: &CheckpointTag) -> Result<Checkpoint, Refusal> {
        let (worker, proc, tag) = (self.clone(), Arc::clone(&source.proc), tag.clone());
        blocking(move || {
            let (key, checkpoints) = (key_of(&proc), worker.checkpoint_store());
            let (records, recorded): (_, ProcName) = (checkpoints.of(&key), tag.clone().into());
            let read = || {
                Ok(Checkpoint {
                    directory: records.directory(&recorded),
                    note: checkpoints.note(&key, &tag)?,
                    spec: records.read_spec(&recorded)?,
                    record: records.read_state(&recorded)?,
                })
            };
            let checkpoint = read().map_err(|e| worker.unreadable(&proc, &tag, e))?;
            let has_secrets = |spec: &Spec| spec.volumes.iter().any(|v| v.source == VolumeSource::Secrets);
            let (then, now) = (has_secrets(&checkpoint.spec), has_secrets(&proc.spec()));
            if then != now && generation_in(&checkpoint.record).is_some() {
                let had = if then { "had secrets, and it has none now" } else { "had no secrets, and it has some now" };
                let message = format!("checkpoint {tag} of {} cannot be gone on from: the proc {had}", proc.name);
                return Err(Refusal::new(Code::State, message));
            }
            checkpoint.verify(false).map_err(|why| {
                Refusal::new(Code::Failed, format!("checkpoint {tag} of {} is damaged: {why}", proc.name))
            })?;
            Ok(checkpoint)
        })
        .await
    }

    fn unreadable(&self, proc: &Proc, tag: &CheckpointTag, error: RecordError) -> Refusal {
        let name = proc.spec().name.clone();
        if !matches!(error, RecordError::Unknown { .. }) {
            return Refusal::new(Code::Failed, format!("checkpoint {tag} of {name} cannot be read: {}", chain(&error)));
        }
        let tags = self.checkpoint_store().tags(&key_of(proc)).unwrap_or_default();
        let tags: Vec<&str> = tags.iter().map(CheckpointTag::as_str).collect();
        let hint = match kip_types::nearest(tag.as_str(), tags.iter().copied()) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None if tags.is_empty() => format!("it has none: `kip checkpoint {name}` takes one"),
            None => format!("it has {}", tags.join(", ")),
        };
        Refusal::new(Code::Unknown, format!("{name} has no checkpoint {tag}; {hint}"))
    }

    /// A proc was removed: so are its checkpoints, unless another proc goes on with them.
    pub(crate) async fn forget_with_checkpoints(&self, proc: &Arc<Proc>) {
        let key = key_of(proc);
        self.forget(proc);
        for volume in &proc.spec().own_volumes {
            if let Err(refusal) = self.remove_volume(volume.clone()).await {
                tracing::info!(%volume, error = refusal.message, "the volume of a replica stays");
            }
        }
        if self.lineages().contains(&key) {
            return;
        }
        let checkpoints = self.checkpoint_store();
        if let Err(e) = blocking(move || checkpoints.remove_all(&key)).await {
            tracing::warn!(proc = %proc.name, error = chain(&e), "checkpoints of a removed proc are left to the next daemon");
        }
    }

    /// Keys of the checkpoints of all procs, whatever names these have just now.
    fn lineages(&self) -> BTreeSet<ProcName> {
        self.machine.live_procs().iter().map(|proc| key_of(proc)).collect()
    }

    /// Removes checkpoints of procs that are not there any more, and skeletons of a state of the
    /// host's files over which neither a proc nor a checkpoint nor a template lies; `bases` are
    /// those of procs. All procs are known.
    pub(crate) fn sweep_checkpoints(&self, mut bases: Vec<PathBuf>) {
        let keys = self.lineages();
        for error in self.template_store().sweep() {
            tracing::warn!(error = chain(&error), "a template that was being made or removed stays on disk");
        }
        for error in self.checkpoint_store().sweep(|key| keys.contains(key)) {
            tracing::warn!(error = chain(&error), "a checkpoint of no proc stays on disk");
        }
        let swept = self.checkpointed_specs().map_err(|e| chain(&e)).and_then(|of_checkpoints| {
            bases.extend(of_checkpoints.into_iter().map(|(_, base)| base));
            let all = self.machine.data.join("base");
            self.machine.base.remove_others(&all, &bases).map_err(|e| chain(&e))
        });
        if let Err(error) = swept {
            tracing::warn!(error, "old skeletons of roots stay on disk");
        }
    }

    /// Specs and bases of all checkpoints and templates: what they lie over must stay.
    ///
    /// # Errors
    /// One cannot be read.
    pub(crate) fn checkpointed_specs(&self) -> Result<Vec<(Spec, PathBuf)>, RecordError> {
        let (checkpoints, mut found) = (self.checkpoint_store(), Vec::new());
        for key in self.lineages() {
            let records = checkpoints.of(&key);
            for tag in checkpoints.tags(&key)?.into_iter().map(ProcName::from) {
                found.push((records.read_spec(&tag)?, records.read_state::<Record>(&tag)?.base));
            }
        }
        found.extend(self.templated_specs()?);
        Ok(found)
    }
}

#[async_trait]
impl CheckpointService for Worker {
    async fn checkpoint(&self, name: ProcName, request: CheckpointRequest) -> Result<CheckpointView, Refusal> {
        self.checkpointed(name, request).await
    }

    async fn checkpoints(&self, name: Option<ProcName>) -> Result<CheckpointsView, Refusal> {
        self.checkpoints_of(name).await
    }

    async fn remove_checkpoint(&self, name: ProcName, tag: CheckpointTag) -> Result<(), Refusal> {
        self.checkpoint_removed(name, tag).await
    }

    async fn rollback(&self, name: ProcName, request: RollbackRequest) -> Result<RolledBackView, Refusal> {
        self.rolled_back(name, request).await
    }
}
