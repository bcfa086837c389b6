//! Templates: what the first proc of a kind leaves when it is ready, for later ones to begin from.
//!
//! A template is a checkpoint of no proc ([`checkpoints`](crate::checkpoints)), whose id is made of
//! what determines it: the files that a proc begins with, its command, environment, secrets and
//! limits. A proc of the same kind is made of it as a clone is ([`clones`](crate::clones)), and
//! starts where that cannot be. It never changes: where what determines it does, there is none, and
//! the next proc leaves one.

use crate::checkpoints::{Taking, copy_to};
use crate::claim::Claim;
use crate::clones::from_checkpoint;
use crate::copied::{Purpose, check_kept, finish_copy};
use crate::lineage::{Checkpoint, generation_in};
use crate::staging::Moment;
use crate::worker::{NotReady, Worker, until_listening, until_ready};
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::volumes;
use kip_records::checkpoints::CheckpointNote;
use kip_records::kind::Kind;
use kip_records::record::RecordError;
use kip_records::state::Record;
use kip_records::templates::Templates;
use kip_service::TemplateService;
use kip_supervisor::task::{Handle, TaskCommand, run_hook};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::template::{TemplateFileRequest, TemplateFileView, TemplateRequest, TemplateView, TemplatesView};
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::keys::Hex;
use kip_types::{ProcName, Protocol, Spec, State, TemplateId, chain};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedRwLockReadGuard;

/// Most templates that are kept; for one more the one goes that was not used for longest.
const MOST: usize = 32;
impl Worker {
    pub(crate) fn kind_of<'a>(&self, spec: &'a Spec, base: &'a Path, secrets: &'a BTreeMap<String, Hex>) -> Kind<'a> {
        Kind { spec, base, volumes: volumes::directory(&self.machine.data), secrets }
    }

    /// Those of this data directory.
    pub(crate) fn template_store(&self) -> Templates {
        Templates::new(&self.machine.data)
    }

    /// Begins a new proc from the template of its kind, if there is one. None if the proc has to
    /// start: there is none, or it cannot be gone on from, which an event says.
    pub(crate) async fn begun_from_template(&self, spec: &Spec, secrets: &BTreeMap<String, Hex>) -> Option<Handle> {
        spec.template.as_ref()?;
        let (worker, kind, own) = (self.clone(), spec.clone(), secrets.clone());
        let begun = async {
            let stay = Arc::clone(&self.templating).read_owned().await;
            let found = blocking(move || {
                let id = worker.kind_of(&kind, &worker.machine.base_of(&kind), &own).id();
                worker.read_template(&id).map(|found| found.map(|template| (id, template)))
            });
            let Some((id, template)) = found.await? else { return Ok(None) };
            let begun = self.begin_from(&id, template, spec.clone(), secrets.clone(), stay).await?;
            self.template_store().note_use(&id);
            Ok::<_, Refusal>(Some(begun))
        };
        match begun.await {
            Ok(begun) => begun,
            Err(refusal) => {
                let detail = format!("it starts, for its template cannot be gone on from: {}", refusal.message);
                self.machine.events.emit(Some(&spec.name), EventKind::Templated, detail);
                None
            }
        }
    }

    async fn begin_from(
        &self,
        id: &TemplateId,
        template: Checkpoint,
        spec: Spec,
        secrets: BTreeMap<String, Hex>,
        templates_stay: OwnedRwLockReadGuard<()>,
    ) -> Result<Handle, Refusal> {
        let _in_use = self.has_layers(&template.spec).await?;
        let worker = self.clone();
        let staged = blocking(move || {
            let moment = Moment { spec: Arc::new(spec.clone()), base: template.record.base.clone(), secrets };
            let staging = worker.begin_staging(&moment, spec)?;
            Ok::<_, Refusal>((moment, staging, template))
        });
        let (moment, staging, template) = staged.await?;
        let (moment, mut staging, copied) = from_checkpoint(moment, staging, template).await?;
        drop(templates_stay);
        fault::reach("template-copied");
        let staged = blocking(move || {
            let record = Record { wakes_again: true, started_at_ms: now_ms(), ..copied.record };
            staging.settle(&record)?;
            if let Some(generation) = generation_in(&record) {
                finish_copy(&moment.spec.name, &staging.directory(), generation, None, Purpose::Template)?;
            }
            Ok::<_, Refusal>(staging)
        });
        let made = self.publish_all(&format!("template {id}"), vec![staged.await?], None, true, true, true).await?;
        let made = made.into_iter().next().expect("one was asked for");
        let cause = WakeCause::Request(WakeCommand::StoodStill("template"));
        // It is awake already, but if it could not be woken.
        if let Err(refusal) = made.ask(|reply| TaskCommand::Wake { cause, reply }).await {
            self.discard(&made).await;
            return Err(refusal);
        }
        Ok(made)
    }

    /// Has a proc that was started leave a template when it is ready.
    pub(crate) fn leave_template(&self, handle: Handle) {
        let Some(template) = handle.proc.spec().template.clone() else { return };
        let worker = self.clone();
        tokio::spawn(async move {
            let name = handle.proc.spec().name.clone();
            let Err(refusal) = worker.template_of(&handle, template.after.as_deref(), true).await else { return };
            if !handle.inbox.is_closed() {
                let events = &handle.proc.shared.events;
                events.emit(Some(&name), EventKind::Templated, format!("it leaves none: {}", refusal.message));
            }
        });
    }

    /// Takes a template from a proc when it is ready. None is taken `by_itself` where another proc
    /// of the kind is about to leave one, or has left one meanwhile.
    async fn template_of(
        &self,
        source: &Handle,
        after: Option<&str>,
        by_itself: bool,
    ) -> Result<Option<TemplateView>, Refusal> {
        let spec = source.proc.spec();
        let name = spec.name.clone();
        check_kept(&spec, Purpose::Template)?;
        let refuse = |why: String| Purpose::Template.refuse(&name, Code::State, &why);
        until_ready(source).await.map_err(|NotReady { why, .. }| refuse(format!("it {why}")))?;
        if spec.ready.is_none() {
            let listens = until_listening(source, &tcp_ports(&spec), "be kept as a template").await;
            listens.map_err(|why| refuse(format!("it {why}")))?;
        }
        let began = Instant::now();
        let _begun = self.begin_on(source, &name).await?;
        let (worker, proc, kind) = (self.clone(), source.clone(), Arc::clone(&spec));
        let known = blocking(move || {
            let secrets = worker.secrets_of(&proc)?;
            let started_ms = proc.status.borrow().record.started_at_ms;
            let kind = worker.kind_of(&kind, &proc.proc.base, &secrets);
            let asked = kind.asked();
            Ok::<_, Refusal>((kind.id_for(&asked), asked, started_ms, kind.changed_since(started_ms)))
        });
        let (id, asked, started_ms, changed) = known.await?;
        if let Some(path) = changed {
            let why = format!("{} has changed since it started: restart it first", path.display());
            return Err(refuse(why));
        }
        let claim = Claim::of(id.clone(), &self.templated);
        if claim.is_none()
            || by_itself && self.template_store().note(&id).is_ok_and(|note| note.taken_at_ms >= started_ms)
        {
            let why = "another one of its kind is being kept".to_owned();
            return if by_itself { Ok(None) } else { Err(refuse(why)) };
        }
        if let Some(command) = after {
            let cause = WakeCause::Request(WakeCommand::StoodStill("template"));
            let ticket = source.ask(|reply| TaskCommand::KeepAwake { cause, reply }).await?;
            let ran = run_hook(&source.proc, command, BTreeMap::new(), ticket, spec.hooks.within_ms).await;
            ran.map_err(|why| refuse(format!("its own command before that failed: {why}")))?;
        }
        let (worker, proc, kind, of) = (self.clone(), source.clone(), Arc::clone(&spec), id.clone());
        let begun = blocking(move || {
            let record = Record::new(proc.proc.slot.number(), proc.proc.base.clone());
            let made = worker.template_store().prepare(&of, &asked, &*kind, &record);
            made.map(Taking::new).map_err(|e| failed(&kind.name, &e))
        });
        let (taken, _) = copy_to(source, begun.await?, Purpose::Template, began).await?;
        fault::reach("template-taken");
        let finished = {
            let name = name.clone();
            blocking(move || taken.finish(Purpose::Template, &name, |note| note))
        };
        let finished = finished.await?;
        let _alone = Arc::clone(&self.templating).write_owned().await;
        let worker = self.clone();
        let view = blocking(move || {
            // An older one of its kind.
            worker.remove_one(&id, Code::Exhausted)?;
            let note = finished.publish(Purpose::Template, &spec.name)?;
            worker.remove_least_used();
            Ok::<_, Refusal>(view_of(id, note, None, &spec))
        });
        let view = view.await?;
        let events = &source.proc.shared.events;
        events.emit(Some(&name), EventKind::Templated, format!("{} was taken from it", view.id));
        Ok(Some(view))
    }

    /// The template of a proc's kind; that it is used is noted, if it `is_used`.
    pub(crate) async fn template_for(&self, source: &Handle, is_used: bool) -> Result<Checkpoint, Refusal> {
        let (worker, source) = (self.clone(), source.clone());
        blocking(move || {
            let (spec, secrets) = (source.proc.spec(), worker.secrets_of(&source)?);
            let id = worker.kind_of(&spec, &worker.machine.base_of(&spec), &secrets).id();
            let found = worker.read_template(&id)?;
            if is_used && found.is_some() {
                worker.template_store().note_use(&id);
            }
            found.ok_or_else(|| {
                let name = &spec.name;
                let message =
                    format!("there is no template for what {name} is now: `kip template take {name}` makes one");
                Refusal::new(Code::Unknown, message)
            })
        })
        .await
    }

    /// None if there is none; one that is damaged is refused.
    pub(crate) fn read_template(&self, id: &TemplateId) -> Result<Option<Checkpoint>, Refusal> {
        let (templates, recorded) = (self.template_store(), id.clone().into());
        let records = templates.records();
        let read = || {
            let directory = records.directory(&recorded);
            let (spec, record) = (records.read_spec(&recorded)?, records.read_state(&recorded)?);
            Ok(Checkpoint { directory, note: templates.note(id)?, spec, record })
        };
        let damaged = |why: String| Refusal::new(Code::Failed, format!("the template {id} is damaged: {why}"));
        match read() {
            Ok(template) => template.verify(false).map_err(damaged).map(|()| Some(template)),
            Err(RecordError::Unknown { .. }) => Ok(None),
            Err(e) => Err(damaged(chain(&e))),
        }
    }

    /// Whether there was one.
    fn remove_one(&self, id: &TemplateId, code: Code) -> Result<bool, Refusal> {
        let removed = self.template_store().records().remove(&id.clone().into());
        let trash = match removed {
            Err(RecordError::Unknown { .. }) => return Ok(false),
            removed => removed.map_err(|e| Refusal::new(code, format!("the template {id} stays: {}", chain(&e))))?,
        };
        if let Err(e) = trash.delete() {
            tracing::warn!(%id, error = chain(&e), "a removed template is still on disk until the next start");
        }
        Ok(true)
    }

    pub(crate) fn remove_least_used(&self) {
        let templates = self.template_store();
        let mut known: Vec<_> = templates.ids().unwrap_or_default();
        known.sort_by_cached_key(|id| {
            let taken = templates.note(id).map_or(0, |note| note.taken_at_ms);
            templates.used_at_ms(id).map_or(taken, |used| used.max(taken))
        });
        for id in known.iter().rev().skip(MOST) {
            if let Err(refusal) = self.remove_one(id, Code::Failed) {
                tracing::warn!(%id, error = refusal.message, "a template too many stays");
            }
        }
    }

    /// Specs and bases of all templates.
    ///
    /// # Errors
    /// One cannot be read.
    pub(crate) fn templated_specs(&self) -> Result<Vec<(Spec, PathBuf)>, RecordError> {
        let templates = self.template_store();
        let records = templates.records();
        let read = |id: TemplateId| {
            let recorded = id.into();
            Ok((records.read_spec(&recorded)?, records.read_state::<Record>(&recorded)?.base))
        };
        templates.ids()?.into_iter().map(read).collect()
    }

    fn views_of_templates(&self) -> Result<TemplatesView, Refusal> {
        let templates = self.template_store();
        let unread = |e: RecordError| Refusal::new(Code::Failed, format!("templates cannot be read: {}", chain(&e)));
        let mut views = Vec::new();
        for id in templates.ids().map_err(unread)? {
            let spec = templates.records().read_spec::<Spec>(&id.clone().into());
            match templates.note(&id).and_then(|note| Ok((note, spec?))) {
                Ok((note, spec)) => views.push(view_of(id.clone(), note, templates.used_at_ms(&id), &spec)),
                // It was removed meanwhile.
                Err(RecordError::Unknown { .. }) => {}
                Err(e) => tracing::warn!(%id, error = chain(&e), "a template cannot be read, and is not listed"),
            }
        }
        views.sort_by(|one, other| (one.taken_at_ms, &one.id).cmp(&(other.taken_at_ms, &other.id)));
        Ok(TemplatesView { templates: views })
    }
}

#[async_trait]
impl TemplateService for Worker {
    async fn take_template(&self, name: ProcName, request: TemplateRequest) -> Result<TemplateView, Refusal> {
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        let source = self.handle(&name)?;
        if matches!(source.status.borrow().record.state, State::Stopped { .. } | State::Restarting { .. }) {
            let why = format!("it does not run: `kip start {name}` first");
            return Err(Purpose::Template.refuse(&name, Code::State, &why));
        }
        let taken = self.template_of(&source, request.after.as_deref(), false).await?;
        Ok(taken.expect("one is taken, or why not is said"))
    }

    async fn templates(&self) -> Result<TemplatesView, Refusal> {
        let worker = self.clone();
        blocking(move || worker.views_of_templates()).await
    }

    async fn remove_template(&self, id: TemplateId) -> Result<(), Refusal> {
        // A proc may be about to begin from it.
        let _alone = Arc::clone(&self.templating).write_owned().await;
        let worker = self.clone();
        blocking(move || match worker.remove_one(&id, Code::Failed)? {
            true => Ok(()),
            false => Err(unknown(&id)),
        })
        .await
    }

    async fn export_template(&self, id: TemplateId, request: TemplateFileRequest) -> Result<TemplateFileView, Refusal> {
        self.template_exported(id, request).await
    }

    async fn import_template(&self, request: TemplateFileRequest) -> Result<TemplateFileView, Refusal> {
        self.template_imported(request).await
    }
}

pub(crate) fn unknown(id: &TemplateId) -> Refusal {
    Refusal::new(Code::Unknown, format!("there is no template {id}: `kip template ls` lists them"))
}

/// Refuses a proc that could never leave a template, or of which it is not known when.
pub(crate) fn check_templated(spec: &Spec) -> Result<(), Refusal> {
    if spec.template.is_none() {
        return Ok(());
    }
    check_kept(spec, Purpose::Template)?;
    if spec.ready.is_none() && tcp_ports(spec).is_empty() {
        let name = &spec.name;
        let message =
            format!("{name}: by --template auto it leaves a template when it is ready: say by --ready when that is");
        return Err(Refusal::new(Code::Invalid, message));
    }
    Ok(())
}

fn tcp_ports(spec: &Spec) -> Vec<u16> {
    // One that an image exposes is private, and need not be listened at.
    spec.ports.iter().filter(|port| port.proto == Protocol::Tcp && !port.private).map(|port| port.port).collect()
}

fn failed(name: &ProcName, error: &RecordError) -> Refusal {
    Refusal::new(Code::Exhausted, format!("a template of {name} cannot be recorded: {}", chain(error)))
}

pub(crate) fn view_of(id: TemplateId, note: CheckpointNote, used_at_ms: Option<u64>, spec: &Spec) -> TemplateView {
    let mut spec = spec.clone();
    spec.asked = None;
    spec.hide_values();
    TemplateView {
        id,
        name: spec.name.clone(),
        taken_at_ms: note.taken_at_ms,
        used_at_ms,
        memory_bytes: note.memory_bytes,
        file_bytes: note.file_bytes,
        still_us: note.still_us,
        total_us: note.total_us,
        spec,
    }
}
