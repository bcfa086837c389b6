//! Templates: what the first proc of a kind leaves when it is ready, for later ones to begin from.
//!
//! A template is a checkpoint of no proc ([`checkpoints`](crate::checkpoints)), whose id is made of
//! what determines it: the files that a proc begins with, its command, environment, secrets and
//! limits. A proc of the same kind is made of it as a clone is ([`clones`](crate::clones)), and
//! starts where that cannot be. It never changes: where what determines it does, there is none, and
//! the next proc leaves one.

use crate::checkpoints::{Taking, check, copy_to};
use crate::clones::{Moment, from_checkpoint};
use crate::copied::{Purpose, finish_copy};
use crate::lineage::{Checkpoint, generation_in};
use crate::worker::{NotReady, Worker, until_listening, until_ready};
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_records::checkpoints::CheckpointNote;
use kip_records::record::RecordError;
use kip_records::state::Record;
use kip_records::templates::Templates;
use kip_service::TemplateService;
use kip_supervisor::task::{Handle, TaskCommand, run_hook};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::template::{TemplateRequest, TemplateView, TemplatesView};
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::keys::Hex;
use kip_types::spec::DEFAULT_PATH;
use kip_types::{Image, ProcName, Protocol, Spec, State, TemplateId, VolumeSource, chain};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Most templates that are kept; for one more the one goes that was not used for longest.
const MOST: usize = 32;
/// Bytes of the hash that an id shows.
const ID_BYTES: usize = 8;
/// What of a spec is one proc's own, or is about it from the outside: procs of one kind differ in
/// it. What a spec gets in addition counts as its kind until it is named here.
const OWN: [&str; 20] = [
    "checkpoints",
    "name",
    "aliases",
    "hostname",
    "labels",
    "timing",
    "restart",
    "stop_signal",
    "stop_grace_ms",
    "ready",
    "hooks",
    "template",
    "probes",
    "egress",
    "remove",
    "file",
    "trial",
    "replaced",
    "lineage",
    "asked",
];
/// Directories of the host that change when its packages do.
const OF_PACKAGES: [&str; 5] =
    ["/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];

impl Worker {
    /// Those of this data directory.
    pub(crate) fn template_store(&self) -> Templates {
        Templates::new(&self.machine.data)
    }

    /// Begins a new proc from the template of its kind, if there is one. None if the proc has to
    /// start: there is none, or it cannot be gone on from, which an event says.
    pub(crate) async fn begun_from_template(&self, spec: &Spec, secrets: &BTreeMap<String, Hex>) -> Option<Handle> {
        spec.template.as_ref()?;
        let _templates_stay = Arc::clone(&self.templating).read_owned().await;
        let (worker, kind, own) = (self.clone(), spec.clone(), secrets.clone());
        let found = blocking(move || {
            let id = id_of(&kind, &worker.machine.base_of(&kind), &own);
            worker.read_template(&id).map(|found| found.map(|template| (id, template)))
        });
        let begun = async {
            let Some((id, template)) = found.await? else { return Ok(None) };
            let begun = self.begin_from(&id, template, spec.clone(), secrets.clone()).await?;
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
    ) -> Result<Handle, Refusal> {
        let _in_use = self.has_layers(&template.spec).await?;
        let worker = self.clone();
        let staged = blocking(move || {
            let (hostname, base) = (template.spec.hostname().to_owned(), template.record.base.clone());
            let moment = Moment { spec: Arc::new(spec.clone()), hostname, base, secrets };
            let staging = worker.begin_staging(&moment, spec)?;
            Ok::<_, Refusal>((moment, staging, template))
        });
        let (moment, staging, template) = staged.await?;
        let (moment, mut staging, copied) = from_checkpoint(moment, staging, template).await?;
        fault::reach("template-copied");
        let staged = blocking(move || {
            let record = Record { wakes_again: true, started_at_ms: now_ms(), ..copied.record };
            staging.settle(&record)?;
            if let Some(generation) = generation_in(&record) {
                finish_copy(&moment.spec.name, &staging.directory(), generation, None, Purpose::Template)?;
            }
            Ok::<_, Refusal>(staging)
        });
        let made = self.publish_all(&format!("template {id}"), vec![staged.await?], true, true).await?;
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
            let Err(refusal) = worker.template_of(&handle, template.after.as_deref()).await else { return };
            if !handle.inbox.is_closed() {
                let events = &handle.proc.shared.events;
                events.emit(Some(&name), EventKind::Templated, format!("it leaves none: {}", refusal.message));
            }
        });
    }

    /// Takes a template from a proc when it is ready.
    async fn template_of(&self, source: &Handle, after: Option<&str>) -> Result<TemplateView, Refusal> {
        let spec = source.proc.spec();
        let name = spec.name.clone();
        check(&spec, Purpose::Template)?;
        let refuse = |why: String| Purpose::Template.refuse(&name, Code::State, &why);
        until_ready(source).await.map_err(|NotReady { why, .. }| refuse(format!("it {why}")))?;
        let listens = until_listening(source, &tcp_ports(&spec), "be kept as a template").await;
        listens.map_err(|why| refuse(format!("it {why}")))?;
        let began = Instant::now();
        let _begun = self.begin_on(source, &name).await?;
        if let Some(command) = after {
            let cause = WakeCause::Request(WakeCommand::StoodStill("template"));
            let ticket = source.ask(|reply| TaskCommand::KeepAwake { cause, reply }).await?;
            let ran = run_hook(&source.proc, command, BTreeMap::new(), ticket, spec.hooks.within_ms).await;
            ran.map_err(|why| refuse(format!("its own command before that failed: {why}")))?;
        }
        let (worker, proc, kind) = (self.clone(), source.clone(), Arc::clone(&spec));
        let begun = blocking(move || {
            let secrets = worker.secrets_of(&proc)?;
            let id = id_of(&kind, &worker.machine.base_of(&kind), &secrets);
            let record = Record::new(proc.proc.slot.number(), proc.proc.base.clone());
            let made = worker.template_store().prepare(&id, &*kind, &record).map_err(|e| failed(&kind.name, &e))?;
            Ok::<_, Refusal>((id, Taking::new(made)))
        });
        let (id, taking) = begun.await?;
        let (taken, _) = copy_to(source, taking, Purpose::Template, began).await?;
        fault::reach("template-taken");
        let _alone = Arc::clone(&self.templating).write_owned().await;
        let worker = self.clone();
        let view = blocking(move || {
            // An older one of its kind.
            worker.remove_one(&id, Code::Exhausted)?;
            let note = taken.publish(Purpose::Template, &spec.name, |note| note)?;
            worker.remove_least_used();
            Ok::<_, Refusal>(view_of(id, note, None, &spec))
        });
        let view = view.await?;
        let events = &source.proc.shared.events;
        events.emit(Some(&name), EventKind::Templated, format!("{} was taken from it", view.id));
        Ok(view)
    }

    /// The template of a proc's kind.
    pub(crate) async fn template_for(&self, source: &Handle) -> Result<Checkpoint, Refusal> {
        let (worker, source) = (self.clone(), source.clone());
        blocking(move || {
            let (spec, secrets) = (source.proc.spec(), worker.secrets_of(&source)?);
            let id = id_of(&spec, &worker.machine.base_of(&spec), &secrets);
            let found = worker.read_template(&id)?;
            let found = found.inspect(|_| worker.template_store().note_use(&id));
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
    fn read_template(&self, id: &TemplateId) -> Result<Option<Checkpoint>, Refusal> {
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

    fn remove_least_used(&self) {
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
        self.template_of(&source, request.after.as_deref()).await
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
            false => {
                Err(Refusal::new(Code::Unknown, format!("there is no template {id}: `kip template ls` lists them")))
            }
        })
        .await
    }
}

/// Refuses a proc that could never leave a template, or of which it is not known when.
pub(crate) fn check_templated(spec: &Spec) -> Result<(), Refusal> {
    if spec.template.is_none() {
        return Ok(());
    }
    check(spec, Purpose::Template)?;
    if spec.ready.is_none() && tcp_ports(spec).is_empty() {
        let name = &spec.name;
        let message =
            format!("{name}: by --template auto it leaves a template when it is ready: say by --ready when that is");
        return Err(Refusal::new(Code::Invalid, message));
    }
    Ok(())
}

fn tcp_ports(spec: &Spec) -> Vec<u16> {
    spec.ports.iter().filter(|port| port.proto == Protocol::Tcp).map(|port| port.port).collect()
}

fn failed(name: &ProcName, error: &RecordError) -> Refusal {
    Refusal::new(Code::Exhausted, format!("a template of {name} cannot be recorded: {}", chain(error)))
}

fn view_of(id: TemplateId, note: CheckpointNote, used_at_ms: Option<u64>, spec: &Spec) -> TemplateView {
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

/// The id of the kind of a proc: the same for procs that may begin from each other's template.
fn id_of(spec: &Spec, base: &Path, secrets: &BTreeMap<String, Hex>) -> TemplateId {
    let mut kind = serde_json::to_value(spec).expect("a spec is recorded as JSON");
    let fields = kind.as_object_mut().expect("it is a table");
    OWN.iter().for_each(|own| _ = fields.remove(*own));
    let ports = spec.ports.iter().map(|port| json!([port.proto, port.port]));
    fields.insert("ports".into(), Value::Array(ports.collect()));
    // Paths of a request may have links in them, which those of a proc have not.
    let volumes = spec.volumes.iter().filter(|volume| volume.source != VolumeSource::Secrets).map(|volume| {
        let changed = match &volume.source {
            VolumeSource::Host(path) => changed_at(path),
            _ => Value::Null,
        };
        let source = match &volume.source {
            VolumeSource::Host(path) => fs::canonicalize(path).unwrap_or_else(|_| path.clone()),
            other => PathBuf::from(other.to_string()),
        };
        json!([source, volume.target, volume.read_only, changed])
    });
    fields.insert("volumes".into(), Value::Array(volumes.collect()));
    fields.insert("base".into(), json!(base));
    fields.insert("host".into(), host_files(spec));
    let secrets = secrets.iter().map(|(name, contents)| json!([name, blake3::hash(&contents.0).to_hex().as_str()]));
    fields.insert("contents of secrets".into(), Value::Array(secrets.collect()));
    let hash = blake3::hash(kind.to_string().as_bytes());
    let hex: String = hash.as_bytes()[..ID_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("t{hex}").parse().expect("a letter and digits are a name")
}

/// When files of the host changed that a program without an image of its own uses.
fn host_files(spec: &Spec) -> Value {
    if matches!(spec.image, Image::Oci(_)) {
        return Value::Null;
    }
    let path = spec.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let program = Path::new(spec.command.first().map_or("", String::as_str));
    let candidates = std::env::split_paths(path).map(|directory| directory.join(program));
    let program =
        if program.is_absolute() { Some(program.to_owned()) } else { candidates.into_iter().find(|p| p.is_file()) };
    let places = OF_PACKAGES.iter().map(PathBuf::from).chain(program);
    Value::Array(places.map(|place| changed_at(&place)).collect())
}

/// When a file changed, and its size; null of one that is not there.
fn changed_at(path: &Path) -> Value {
    let Ok(known) = fs::metadata(path) else { return Value::Null };
    let size = if known.is_dir() { 0 } else { known.size() };
    json!([known.mtime(), known.mtime_nsec(), size])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::life::Templating;

    fn spec() -> Spec {
        let json = json!({"name": "web", "command": ["/bin/sh", "-c", "true"], "ports": [{"proto": "tcp", "port": 80, "host_port": 8080}]});
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_kind_is_what_determines_memory_and_files() {
        let none = BTreeMap::new();
        let id = |spec: &Spec| id_of(spec, Path::new("/base"), &none);
        let usual = id(&spec());
        let mut same = Spec { template: Some(Templating::default()), hostname: Some("h".into()), ..spec() };
        same.name = "other".parse().unwrap();
        same.ports[0].host_port = None;
        same.labels.insert("a".into(), "b".into());
        assert_eq!(id(&same), usual);
        let mut differing = vec![spec(), spec(), spec(), spec()];
        differing[0].command.push("x".into());
        differing[1].env.insert("A".into(), "b".into());
        differing[2].limits.memory_bytes = Some(1 << 30);
        differing[3].ports[0].port = 81;
        for other in &differing {
            assert_ne!(id(other), usual);
        }
        assert_ne!(id_of(&spec(), Path::new("/other"), &none), usual);
        let secrets = |contents: &str| BTreeMap::from([("key".to_owned(), Hex(contents.into()))]);
        let with = |contents| id_of(&spec(), Path::new("/base"), &secrets(contents));
        assert!(with("1") != usual && with("1") != with("2") && with("1") == with("1"));
    }

    #[test]
    fn what_is_a_procs_own_is_a_field_of_its_spec() {
        let full = schemars::schema_for!(Spec);
        let fields = full.get("properties").and_then(Value::as_object).unwrap();
        for own in OWN {
            assert!(fields.contains_key(own), "{own}");
        }
    }
}
