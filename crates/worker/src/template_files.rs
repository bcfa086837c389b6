//! Templates into files, and from files: for another data directory, or another machine.
//!
//! What a file is made of, and what it must fit to, is [`kip_offload::template`]'s. Here a template
//! gets the id that its kind has on this machine, so that `kip run` of the same spec begins from
//! it. A template that needs more of its machine than the files of programs goes nowhere. A crash
//! leaves a directory without a name, which the next daemon removes.

use crate::checkpoints::{Finished, Taking};
use crate::claim::Claim;
use crate::lineage::{Checkpoint, generation_in};
use crate::templates::{unknown, view_of};
use crate::worker::Worker;
use kip_engine::blocking::blocking;
use kip_offload::find::absolute;
use kip_offload::template::{
    self, CarriedTemplate, OpenedTemplate, TemplateExportError, TemplateImportError, other_base_file,
};
use kip_records::body::Body;
use kip_records::checkpoints::CheckpointNote;
use kip_records::record::RecordError;
use kip_records::state::Record;
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::template::{TemplateFileRequest, TemplateFileView};
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::{Spec, TemplateId, VolumeSource, chain};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

impl Worker {
    /// As [`kip_service::TemplateService::export_template`].
    pub(crate) async fn template_exported(
        &self,
        id: TemplateId,
        request: TemplateFileRequest,
    ) -> Result<TemplateFileView, Refusal> {
        let worker = self.clone();
        blocking(move || worker.write_template(id, request)).await
    }

    fn write_template(&self, id: TemplateId, request: TemplateFileRequest) -> Result<TemplateFileView, Refusal> {
        let refuse = |code, why: &str| Refusal::new(code, format!("the template {id} is not exported: {why}"));
        let path = absolute(&request.file)?;
        let found = self.read_template(&id)?.ok_or_else(|| unknown(&id))?;
        found.verify(true).map_err(|why| refuse(Code::Failed, &format!("it is damaged: {why}")))?;
        if let Some(volume) = found.spec.volumes.iter().find(|volume| volume.source != VolumeSource::Secrets) {
            let why = format!("its volume {} at {} stays on this machine", volume.source, volume.target);
            return Err(refuse(Code::State, &why));
        }
        let older = || refuse(Code::State, "an older Kip took it: remove it, and have a proc leave another");
        let asked = self.template_store().asked(&id).ok_or_else(older)?;
        let generation = generation_in(&found.record).ok_or_else(|| refuse(Code::Failed, "it has no memory"))?;
        let manifest = kip_snapshot::open::<Body>(&kip_snapshot::path_of(&found.directory, generation));
        let engine = manifest.map_err(|e| refuse(Code::Failed, &chain(&e)))?.engine;
        let Checkpoint { directory, spec, record, note } = found;
        let template = view_of(id.clone(), note.clone(), self.template_store().used_at_ms(&id), &spec);
        let carried = CarriedTemplate::new(id.clone(), asked, engine, spec, record, note);
        let written = template::export(&directory, generation, &carried, path, &request.wrap);
        let file_bytes = written.map_err(|e| {
            let is_asked = matches!(
                e,
                TemplateExportError::Exists { .. } | TemplateExportError::Begin(_) | TemplateExportError::KeyLength(_)
            );
            refuse(if is_asked { Code::Invalid } else { Code::Failed }, &chain(&e))
        })?;
        Ok(TemplateFileView { template, exported_id: id, file: request.file, file_bytes })
    }

    /// As [`kip_service::TemplateService::import_template`].
    pub(crate) async fn template_imported(&self, request: TemplateFileRequest) -> Result<TemplateFileView, Refusal> {
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        let refuse = {
            let file = request.file.clone();
            move |code, why: &str| Refusal::new(code, format!("{file} is not imported: {why}"))
        };
        let failed = |e: &TemplateImportError| {
            let is_asked = matches!(e, TemplateImportError::Open { .. } | TemplateImportError::KeyLength(_));
            refuse(if is_asked { Code::Invalid } else { Code::Failed }, &chain(e))
        };
        let (engine, asked) = (self.machine.engine.clone(), request.clone());
        absolute(&request.file)?;
        let opened = blocking(move || template::open(Path::new(&asked.file), &asked.wrap, &engine)).await;
        let opened = opened.map_err(|e| failed(&e))?;
        let exported_id = opened.carried.id.clone();
        let in_use = self.has_layers(&opened.carried.spec).await;
        let _in_use = in_use.map_err(|refusal| refuse(refusal.code, &refusal.message))?;
        let (worker, refusing) = (self.clone(), refuse.clone());
        let unpacked = blocking(move || worker.unpack_template(opened, &refusing));
        let Unpacked { claim, finished, spec } = unpacked.await?;
        fault::reach("template-unpacked");
        let _alone = Arc::clone(&self.templating).write_owned().await;
        let (worker, id) = (self.clone(), claim.of.clone());
        let template = blocking(move || {
            let note = finished.publish_or(|why| refuse(Code::Exhausted, why))?;
            worker.remove_least_used();
            Ok::<_, Refusal>(view_of(id, note, None, &spec))
        });
        let template = template.await?;
        let detail = format!("template {} from {}", template.id, request.file);
        self.machine.events.emit(None, EventKind::Imported, detail);
        let file_bytes = fs::metadata(&request.file).map_or(0, |found| found.len());
        Ok(TemplateFileView { template, exported_id, file: request.file, file_bytes })
    }
}

/// One that is whole and has no name yet: the claim of its id, and what its proc was asked to be.
struct Unpacked {
    claim: Claim<TemplateId>,
    finished: Finished,
    spec: Spec,
}

impl Worker {
    /// Unpacks a template, and refuses what does not go on on this machine; says why not.
    fn unpack_template(
        &self,
        opened: OpenedTemplate,
        refuse: &dyn Fn(Code, &str) -> Refusal,
    ) -> Result<Unpacked, Refusal> {
        let CarriedTemplate { asked, spec, record, note, .. } = opened.carried.clone();
        let (templates, base) = (self.template_store(), self.machine.base_of(&spec));
        let id = self.kind_of(&spec, &base, &BTreeMap::new()).id_for(&asked);
        let there = |what: &str| refuse(Code::Taken, &format!("the template {id}, of the same kind, {what}"));
        let claim = Claim::of(id.clone(), &self.templated).ok_or_else(|| there("is being taken or imported"))?;
        if templates.records().directory(&id.clone().into()).exists() {
            return Err(there("is here already").with_hint(format!("`kip template rm {id}` removes it")));
        }
        let failed = |why: String| refuse(Code::Failed, &why);
        let full = |e: RecordError| refuse(Code::Exhausted, &chain(&e));
        let record = Record { base, ..record };
        let taking = Taking::new(templates.prepare(&id, &asked, &spec, &record).map_err(full)?);
        let directory = taking.made().path().to_owned();
        opened.unpack(&directory).map_err(|e| failed(chain(&e)))?;
        let note = CheckpointNote { taken_at_ms: now_ms(), ..note };
        let template = Checkpoint { directory, spec, record, note };
        template.verify(true).map_err(|why| failed(format!("it is damaged: {why}")))?;
        let generation = generation_in(&template.record).ok_or_else(|| failed("it has no memory".to_owned()))?;
        let manifest = kip_snapshot::open::<Body>(&kip_snapshot::path_of(&template.directory, generation));
        let body = manifest.map_err(|e| failed(chain(&e)))?.body;
        let other = other_base_file(&template.directory, &body.pins).map_err(|e| failed(chain(&e)))?;
        if let Some(path) = other {
            let why = format!("this machine has another {path} than the one that its program runs on");
            let hint = "install the same packages, or have the proc leave a template here";
            return Err(refuse(Code::State, &why).with_hint(hint));
        }
        // All of it has just been written, also what is a link in a copy.
        let synced = File::open(&template.directory).and_then(|directory| Ok(rustix::fs::syncfs(directory)?));
        synced.map_err(|e| failed(chain(&e)))?;
        let finished = taking.noted(template.note).map_err(failed)?;
        Ok(Unpacked { claim, finished, spec: template.spec })
    }
}
