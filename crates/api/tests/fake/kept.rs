//! What a fake worker keeps: snapshots, images, keys, volumes.

use super::Fake;
use async_trait::async_trait;
use kip_service::{
    CheckpointService, Feed, ImageService, KeyService, ScaleService, SnapshotService, TemplateService, VolumeService,
};
use kip_types::Spec;
use kip_types::api::checkpoint::{CheckpointRequest, CheckpointView, CheckpointsView, RollbackRequest, RolledBackView};
use kip_types::api::scale::ScaleView;
use kip_types::api::template::{TemplateFileRequest, TemplateFileView, TemplateRequest, TemplateView, TemplatesView};
use kip_types::api::*;
use kip_types::image::{ImageDetails, ImageView, ImagesCollectRequest, ImagesRemoved, PullProgress, PullRequest};
use kip_types::keys::*;
use kip_types::lifecycle::Generation;
use kip_types::name::{CheckpointTag, ProcName, TemplateId};
use kip_types::volume::{VolumeName, VolumeView};

#[async_trait]
impl SnapshotService for Fake {
    async fn snapshots(&self, only: Option<ProcName>) -> Result<Vec<SnapshotsView>, Refusal> {
        let procs = self.procs.lock();
        let wanted = procs.keys().filter(|name| only.as_ref().is_none_or(|only| only == *name));
        Ok(wanted.map(snapshots_of).collect())
    }

    async fn snapshot(&self, which: SnapshotName) -> Result<SnapshotDetails, Refusal> {
        Err(Refusal::new(Code::Unknown, format!("there is no snapshot {which}")))
    }

    async fn verify(&self, request: VerifyRequest) -> Result<Feed<Verified>, Refusal> {
        self.hear(&request);
        let damaged = u64::from(request.which.is_none());
        let mut items = vec![Ok(Verified::Progress { done: 1, of: 2, bytes: 7 })];
        if damaged > 0 {
            let (object, what) = ("realms/default/packs/00".into(), "the object is cut short".into());
            items.push(Ok(Verified::Damage { object, what, snapshot: "web@1".into() }));
        }
        match request.which.is_some_and(|which| which.generation.is_some()) {
            true => items.push(Err(Refusal::new(Code::Failed, "the store does not answer"))),
            false => items.push(Ok(Verified::End { generations: 1, objects: 2, bytes: 9, damaged })),
        }
        Ok(self.feed(items, None::<fn(u64) -> Verified>))
    }

    async fn export(&self, which: SnapshotName, file: String) -> Result<CarriedView, Refusal> {
        self.hear(&which);
        Ok(carried(which.proc.parse().unwrap(), file))
    }

    async fn import(&self, request: ImportRequest) -> Result<CarriedView, Refusal> {
        self.hear(&request);
        Ok(carried(request.name.unwrap_or_else(|| "web".parse().unwrap()), request.file))
    }

    async fn collect(&self, request: CollectRequest) -> Result<CollectView, Refusal> {
        self.hear(&request);
        Ok(CollectView { dry_run: request.dry_run, used: 3, waiting: vec![], deleted: vec![] })
    }
}

#[async_trait]
impl ScaleService for Fake {
    async fn scale(&self, name: ProcName) -> Result<ScaleView, Refusal> {
        Ok(ScaleView { name, scaling: None, replicas: vec![], last: None })
    }
}

#[async_trait]
impl ImageService for Fake {
    async fn images(&self) -> Result<Vec<ImageView>, Refusal> {
        Ok(vec![])
    }

    async fn image(&self, reference: String) -> Result<ImageDetails, Refusal> {
        Err(Refusal::new(Code::Unknown, format!("there is no image {reference} here")))
    }

    async fn pull_image(&self, request: PullRequest) -> Result<Feed<PullProgress>, Refusal> {
        self.hear(&request);
        let here = PullProgress::Here { layer: "sha256:00".into() };
        Ok(self.feed(vec![Ok(here), Err(Refusal::new(Code::Failed, "the registry does not answer"))], None))
    }

    async fn remove_image(&self, reference: String) -> Result<ImagesRemoved, Refusal> {
        self.hear(&reference);
        Ok(ImagesRemoved { references: vec![reference], ..ImagesRemoved::default() })
    }

    async fn collect_images(&self, request: ImagesCollectRequest) -> Result<ImagesRemoved, Refusal> {
        self.hear(&request);
        Ok(ImagesRemoved::default())
    }
}

#[async_trait]
impl KeyService for Fake {
    async fn keys(&self) -> Result<Vec<KeyView>, Refusal> {
        let (id, realm) = ("ab".repeat(16), Default::default());
        let procs = vec!["web".parse().unwrap()];
        Ok(vec![KeyView { id, realm, created_at_ms: Some(1), destroyed_at_ms: None, current: true, procs }])
    }

    async fn rotate_keys(&self) -> Result<KeyView, Refusal> {
        Ok(self.keys().await?.remove(0))
    }

    async fn destroy_key(&self, id: String, yes: bool) -> Result<DestroyedKeyView, Refusal> {
        self.hear(("destroy", &id, yes));
        let costs = || Refusal::new(Code::State, "web could never be woken again");
        let procs = yes.then(Vec::new).ok_or_else(costs)?;
        Ok(DestroyedKeyView { id, realm: Default::default(), procs })
    }

    async fn export_keys(&self, how: ExportKeysRequest) -> Result<ExportedKeys, Refusal> {
        self.hear(&how);
        Ok(ExportedKeys { realm: Default::default(), keys: 1, bytes: Hex(b"closed".to_vec()) })
    }

    async fn import_keys(&self, what: ImportKeysRequest) -> Result<ImportedKeysView, Refusal> {
        self.hear(&what);
        let added = vec![String::from_utf8(what.bytes.0).unwrap()];
        Ok(ImportedKeysView { realm: Default::default(), added, destroyed: vec![], current: None })
    }
}

fn checkpoint_of(name: ProcName, tag: Option<CheckpointTag>) -> CheckpointView {
    CheckpointView {
        name,
        tag: tag.unwrap_or_else(|| "c1".parse().unwrap()),
        parent: None,
        is_current: true,
        taken_at_ms: 1,
        has_memory: true,
        memory_bytes: 4096,
        file_bytes: 4096,
        still_us: 1,
        total_us: 2,
        command: vec!["closed".to_owned()],
    }
}

fn template_of(id: TemplateId, spec: Spec) -> TemplateView {
    TemplateView {
        id,
        name: spec.name.clone(),
        taken_at_ms: 1,
        used_at_ms: None,
        memory_bytes: 1 << 20,
        file_bytes: 0,
        still_us: 1,
        total_us: 2,
        spec,
    }
}

#[async_trait]
impl TemplateService for Fake {
    async fn take_template(&self, name: ProcName, request: TemplateRequest) -> Result<TemplateView, Refusal> {
        self.hear(&request);
        let proc = self.procs.lock().get(&name).cloned();
        let proc = proc.ok_or_else(|| Refusal::new(Code::Unknown, format!("there is no proc {name}")))?;
        Ok(template_of("t0123456789abcdef".parse().expect("a good id"), proc.spec))
    }

    async fn export_template(&self, id: TemplateId, request: TemplateFileRequest) -> Result<TemplateFileView, Refusal> {
        self.hear(&request);
        let spec = self.procs.lock().values().next().map(|proc| proc.spec.clone());
        let spec = spec.ok_or_else(|| Refusal::new(Code::Unknown, format!("there is no template {id}")))?;
        let template = template_of(id.clone(), spec);
        Ok(TemplateFileView { template, exported_id: id, file: request.file, file_bytes: 7 })
    }

    async fn import_template(&self, request: TemplateFileRequest) -> Result<TemplateFileView, Refusal> {
        self.export_template("t0123456789abcdef".parse().expect("a good id"), request).await
    }

    async fn templates(&self) -> Result<TemplatesView, Refusal> {
        Ok(TemplatesView::default())
    }

    async fn remove_template(&self, id: TemplateId) -> Result<(), Refusal> {
        self.hear(&id);
        Err(Refusal::new(Code::Unknown, format!("there is no template {id}")))
    }
}

#[async_trait]
impl CheckpointService for Fake {
    async fn checkpoint(&self, name: ProcName, request: CheckpointRequest) -> Result<CheckpointView, Refusal> {
        self.hear(&request);
        Ok(checkpoint_of(name, request.tag))
    }

    async fn checkpoints(&self, name: Option<ProcName>) -> Result<CheckpointsView, Refusal> {
        let checkpoints = name.into_iter().map(|name| checkpoint_of(name, None)).collect();
        Ok(CheckpointsView { checkpoints })
    }

    async fn remove_checkpoint(&self, name: ProcName, tag: CheckpointTag) -> Result<(), Refusal> {
        self.hear(&tag);
        Err(Refusal::new(Code::Unknown, format!("{name} has no checkpoint {tag}")))
    }

    async fn rollback(&self, name: ProcName, request: RollbackRequest) -> Result<RolledBackView, Refusal> {
        self.hear(&request);
        let proc = self.procs.lock().get(&name).cloned();
        let proc = proc.ok_or_else(|| Refusal::new(Code::Unknown, format!("there is no proc {name}")))?;
        Ok(RolledBackView { proc, kept: checkpoint_of(name, None), total_us: 1 })
    }
}

#[async_trait]
impl VolumeService for Fake {
    async fn volumes(&self) -> Result<Vec<VolumeView>, Refusal> {
        let (name, path) = ("db".parse().unwrap(), "/d/volumes/db".into());
        Ok(vec![VolumeView { name, path, bytes: 4096, users: vec![] }])
    }

    async fn remove_volume(&self, name: VolumeName) -> Result<(), Refusal> {
        self.hear(&name);
        Err(Refusal::new(Code::State, format!("volume {name} is in use")))
    }
}

fn snapshots_of(name: &ProcName) -> SnapshotsView {
    let generation = SnapshotView {
        generation: Generation(1),
        place: SnapshotPlace::Current,
        frozen_at_ms: None,
        bytes: Some(4096),
        format: Some(1),
        trouble: None,
    };
    SnapshotsView {
        name: Some(name.clone()),
        proc: Some("ab".repeat(16)),
        state: SnapshotState::Archived,
        owner: None,
        generations: vec![generation],
        packs: 0,
        pack_bytes: 0,
        trouble: None,
    }
}

fn carried(name: ProcName, file: String) -> CarriedView {
    CarriedView { name, proc: "ab".repeat(16), generation: Generation(1), packs: 2, bytes: 4096, file }
}
