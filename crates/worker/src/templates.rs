//! Templates: what the first proc of a kind leaves when it is ready, for later ones to begin from.
//!
//! A template is a checkpoint of no proc ([`checkpoints`](crate::checkpoints)), whose id is made of
//! what determines it: the files that a proc begins with, its command, environment, secrets and
//! limits. A proc of the same kind is made of it as a clone is ([`clones`](crate::clones)), and
//! starts where that cannot be. It never changes: where what determines it does, there is none, and
//! the next proc leaves one.

use crate::checkpoints::{Taking, check, copy_to};
use crate::clones::from_checkpoint;
use crate::copied::{Purpose, finish_copy};
use crate::lineage::{Checkpoint, generation_in};
use crate::staging::Moment;
use crate::worker::{NotReady, Worker, until_listening, until_ready};
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::volumes;
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
use tokio::sync::OwnedRwLockReadGuard;

/// Most templates that are kept; for one more the one goes that was not used for longest.
const MOST: usize = 32;
/// Bytes of the hash that an id shows.
const ID_BYTES: usize = 8;
/// What of a spec is one proc's own, or is about it from the outside: procs of one kind differ in
/// it. What a spec gets in addition counts as its kind until it is named here.
const OWN: [&str; 18] = [
    "checkpoints",
    "name",
    "aliases",
    "hostname",
    "labels",
    "timing",
    "restart",
    "stop_signal",
    "stop_grace_ms",
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
/// Files and directories of the host that change when its packages do, whatever manages them.
const OF_PACKAGES: [&str; 10] = [
    "/var/lib/dpkg/status",
    "/var/lib/rpm",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/bin",
    "/usr/local/lib",
    "/usr/local/lib/node_modules",
];
/// Below these lie directories of languages, with their packages in `dist-packages` or
/// `site-packages`.
const OF_LANGUAGES: [&str; 2] = ["/usr/lib", "/usr/local/lib"];
/// Files of a volume that are looked at: of more a change may not be noticed.
const MOST_LOOKED_AT: usize = 2000;

impl Worker {
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
                let id = id_of(&kind, &worker.machine.base_of(&kind), &worker.machine.data, &own);
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
        let made = self.publish_all(&format!("template {id}"), vec![staged.await?], true, true, true).await?;
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
        check(&spec, Purpose::Template)?;
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
            let id = id_of(&kind, &proc.proc.base, &worker.machine.data, &secrets);
            let changed = changed_since(&kind, &worker.machine.data, started_ms);
            Ok::<_, Refusal>((id, started_ms, changed))
        });
        let (id, started_ms, changed) = known.await?;
        if let Some(path) = changed {
            let why = format!("{} has changed since it started: restart it first", path.display());
            return Err(refuse(why));
        }
        let claimed = self.templated.lock().insert(id.clone());
        let _claim = claimed.then(|| TemplateClaim { worker: self.clone(), id: id.clone() });
        if !claimed || by_itself && self.template_store().note(&id).is_ok_and(|note| note.taken_at_ms >= started_ms) {
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
            let made = worker.template_store().prepare(&of, &*kind, &record);
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

    /// The template of a proc's kind.
    pub(crate) async fn template_for(&self, source: &Handle) -> Result<Checkpoint, Refusal> {
        let (worker, source) = (self.clone(), source.clone());
        blocking(move || {
            let (spec, secrets) = (source.proc.spec(), worker.secrets_of(&source)?);
            let id = id_of(&spec, &worker.machine.base_of(&spec), &worker.machine.data, &secrets);
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
            false => {
                Err(Refusal::new(Code::Unknown, format!("there is no template {id}: `kip template ls` lists them")))
            }
        })
        .await
    }
}

/// While one lives no other template of the kind is taken.
struct TemplateClaim {
    worker: Worker,
    id: TemplateId,
}

impl Drop for TemplateClaim {
    fn drop(&mut self) {
        self.worker.templated.lock().remove(&self.id);
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
    // One that an image exposes is private, and need not be listened at.
    spec.ports.iter().filter(|port| port.proto == Protocol::Tcp && !port.private).map(|port| port.port).collect()
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
fn id_of(spec: &Spec, base: &Path, data: &Path, secrets: &BTreeMap<String, Hex>) -> TemplateId {
    let mut kind = serde_json::to_value(spec).expect("a spec is recorded as JSON");
    let fields = kind.as_object_mut().expect("it is a table");
    OWN.iter().for_each(|own| _ = fields.remove(*own));
    let ports = spec.ports.iter().map(|port| json!([port.proto, port.port]));
    fields.insert("ports".into(), Value::Array(ports.collect()));
    // Paths of a request may have links in them, which those of a proc have not.
    let volumes = spec.volumes.iter().filter(|volume| volume.source != VolumeSource::Secrets).map(|volume| {
        let source = match &volume.source {
            VolumeSource::Host(path) => fs::canonicalize(path).unwrap_or_else(|_| path.clone()),
            other => PathBuf::from(other.to_string()),
        };
        json!([source, volume.target, volume.read_only])
    });
    fields.insert("volumes".into(), Value::Array(volumes.collect()));
    fields.insert("base".into(), json!(base));
    let stamps = stamps(spec, data).into_iter().map(|(path, stamp)| json!([path, stamp]));
    fields.insert("files".into(), Value::Array(stamps.collect()));
    fields.insert("template_after".into(), json!(spec.template.as_ref().and_then(|template| template.after.as_ref())));
    let secrets = secrets.iter().map(|(name, contents)| json!([name, blake3::hash(&contents.0).to_hex().as_str()]));
    fields.insert("contents of secrets".into(), Value::Array(secrets.collect()));
    let hash = blake3::hash(kind.to_string().as_bytes());
    let hex: String = hash.as_bytes()[..ID_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("t{hex}").parse().expect("a letter and digits are a name")
}

/// When files changed that a proc begins with and that no image fixes: seconds and nanoseconds of
/// the clock, and a size; null of what is not there.
fn stamps(spec: &Spec, data: &Path) -> Vec<(PathBuf, Value)> {
    let mut stamps = Vec::new();
    for volume in spec.volumes.iter().filter(|volume| volume.source != VolumeSource::Secrets) {
        let path = volumes::path_of(data, &volume.source);
        let path = fs::canonicalize(&path).unwrap_or(path);
        let stamp = newest_below(&path);
        stamps.push((path, stamp));
    }
    if matches!(spec.image, Image::Oci(_)) {
        return stamps;
    }
    let path = spec.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let program = Path::new(spec.command.first().map_or("", String::as_str));
    let mut candidates = std::env::split_paths(path).map(|directory| directory.join(program));
    let program = if program.is_absolute() { Some(program.to_owned()) } else { candidates.find(|path| path.is_file()) };
    let of_languages =
        OF_LANGUAGES.iter().flat_map(|directory| fs::read_dir(directory).into_iter().flatten().flatten());
    let packages = of_languages.flat_map(|of| ["dist-packages", "site-packages"].map(|name| of.path().join(name)));
    let mut packages: Vec<PathBuf> = packages.filter(|path| path.is_dir()).collect();
    packages.sort();
    let places = OF_PACKAGES.iter().map(PathBuf::from).chain(packages).chain(program);
    stamps.extend(places.map(|place| {
        let stamp = fs::metadata(&place).map_or(Value::Null, |known| stamp_of(&known));
        (place, stamp)
    }));
    stamps
}

/// Not by the time of its inode, which another name for it changes, as those that Kip gives. A file
/// that is replaced by an older one changes the time of its directory.
fn stamp_of(known: &fs::Metadata) -> Value {
    json!([known.mtime(), known.mtime_nsec(), if known.is_dir() { 0 } else { known.size() }])
}

/// The newest of a file or directory and what lies below, and how many there are.
fn newest_below(path: &Path) -> Value {
    let (mut left, mut newest, mut count) = (vec![path.to_owned()], (0, 0), 0_usize);
    while let Some(path) = left.pop() {
        let Ok(known) = fs::symlink_metadata(&path) else { continue };
        newest = newest.max((known.mtime(), known.mtime_nsec()));
        count += 1;
        if count > MOST_LOOKED_AT {
            break;
        }
        if known.is_dir() {
            let mut below: Vec<PathBuf> =
                fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()).collect();
            below.sort();
            left.extend(below);
        }
    }
    json!([newest.0, newest.1, count])
}

/// What has changed of that since a moment, milliseconds since the epoch.
fn changed_since(spec: &Spec, data: &Path, moment_ms: u64) -> Option<PathBuf> {
    let changed = |(path, stamp): (PathBuf, Value)| {
        let part = |n: usize| stamp.get(n).and_then(Value::as_u64).unwrap_or(0);
        (part(0) * 1000 + part(1) / 1_000_000 > moment_ms).then_some(path)
    };
    stamps(spec, data).into_iter().find_map(changed)
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
        let id = |spec: &Spec| id_of(spec, Path::new("/base"), Path::new("/data"), &none);
        let usual = id(&spec());
        let mut same = Spec { template: Some(Templating::default()), hostname: Some("h".into()), ..spec() };
        same.name = "other".parse().unwrap();
        same.ports[0].host_port = None;
        same.labels.insert("a".into(), "b".into());
        assert_eq!(id(&same), usual);
        let mut differing = vec![spec(), spec(), spec(), spec(), spec(), spec()];
        differing[0].command.push("x".into());
        differing[1].env.insert("A".into(), "b".into());
        differing[2].limits.memory_bytes = Some(1 << 30);
        differing[3].ports[0].port = 81;
        differing[4].hooks.before_sleep = Some("true".into());
        differing[5].template = Some(Templating { after: Some("true".into()) });
        for other in &differing {
            assert_ne!(id(other), usual);
        }
        assert_ne!(id_of(&spec(), Path::new("/other"), Path::new("/data"), &none), usual);
        let secrets = |contents: &str| BTreeMap::from([("key".to_owned(), Hex(contents.into()))]);
        let with = |contents| id_of(&spec(), Path::new("/base"), Path::new("/data"), &secrets(contents));
        assert!(with("1") != usual && with("1") != with("2") && with("1") == with("1"));
    }

    #[test]
    fn files_of_a_volume_count_wherever_they_lie() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("a/b");
        fs::create_dir_all(&below).unwrap();
        fs::write(below.join("main.py"), "one").unwrap();
        let mut spec = spec();
        let source = VolumeSource::Host(dir.path().to_owned());
        spec.volumes.push(kip_types::VolumeSpec { source, target: "/app".into(), read_only: true });
        let id = || id_of(&spec, Path::new("/base"), Path::new("/data"), &BTreeMap::new());
        let before = id();
        assert_eq!(id(), before);
        let now = now_ms();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(changed_since(&spec, Path::new("/data"), now), None);
        fs::write(below.join("main.py"), "two").unwrap();
        assert_ne!(id(), before);
        assert_eq!(
            changed_since(&spec, Path::new("/data"), now).as_deref(),
            Some(&*dir.path().canonicalize().unwrap())
        );
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
