//! What an apply would do: each proc of a file against the proc of that name that the daemon has.

use super::Asked;
use kip_client::{CallError, Client};
use kip_describe::{Described, Difference, Fault, differences};
use kip_types::api::{LeftOpen, ProcView, RunRequest};
use kip_types::image::OciImage;
use kip_types::name::ProcName;
use kip_types::spec::{Image, Spec};
use serde::Serialize;
use std::collections::BTreeMap;

/// What is to be done for a proc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Nothing: it is as described.
    Same,
    /// It is not there.
    Create,
    /// It is as described, and stopped.
    Start,
    /// It is not as described.
    Replace,
    /// The file made it and does not describe it any more.
    Remove,
}

/// What is to be done for a proc, and whether it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    pub name: ProcName,
    pub action: Action,
    /// What is not as described.
    pub fields: Vec<Difference>,
    /// It was done, or there was nothing to do.
    pub done: bool,
    /// Another file that made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// What an apply would do, in the order in which it does.
pub struct Plan {
    changes: Vec<Change>,
    described: Vec<Option<Described>>,
}

impl Plan {
    /// Compares a file with what is there. Wakes nobody.
    pub async fn new(client: &Client, asked: &Asked, prune: bool) -> anyhow::Result<Plan> {
        let there = client.list().await?;
        let mut plan = Plan { changes: Vec::new(), described: Vec::new() };
        for one in &asked.document.procs {
            let mut one = one.clone();
            one.request.spec.file = Some(asked.mark.clone());
            let name = one.request.spec.name.clone();
            let (action, fields, file) = match there.iter().any(|view| view.name == name) {
                false => (Action::Create, Vec::new(), None),
                true => compare(client, &client.inspect_with_env(&name).await?, &one.request).await?,
            };
            plan.changes.push(Change { name, action, fields, done: false, file });
            plan.described.push(Some(one));
        }
        if prune {
            let document = &asked.document;
            let kept = |name: &ProcName| {
                document.procs.iter().any(|p| p.request.spec.name == *name) || document.left_out.contains(name)
            };
            let of_file = |view: &&ProcView| view.spec.file.as_deref() == Some(&asked.mark);
            for view in there.iter().filter(of_file).filter(|view| !kept(&view.name)) {
                let (name, action) = (view.name.clone(), Action::Remove);
                plan.changes.push(Change { name, action, fields: Vec::new(), done: false, file: None });
                plan.described.push(None);
            }
        }
        Ok(plan)
    }

    /// All changes.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// All changes, with what describes each.
    pub fn both(&mut self) -> impl Iterator<Item = (&mut Change, Option<&Described>)> {
        self.changes.iter_mut().zip(self.described.iter().map(Option::as_ref))
    }

    /// What stands in the way, before anything is changed.
    pub async fn refused(&self, client: &Client, replace: bool) -> anyhow::Result<Vec<Fault>> {
        let mut faults = Vec::new();
        let volumes = match self.described.iter().flatten().any(|one| !one.external.is_empty()) {
            true => client.volumes().await?,
            false => Vec::new(),
        };
        for (change, described) in self.changes.iter().zip(&self.described) {
            let (Action::Create | Action::Replace, Some(described)) = (change.action, described) else { continue };
            let mut fault = |message: String| faults.push(Fault::new(&described.place, message));
            let name = &change.name;
            if let Some(what) = file_of_the_daemon(described).filter(|_| client.is_remote()) {
                fault(format!("{name}: {what} is a file of the daemon's machine: apply there, without --host"));
            }
            for volume in &described.external {
                if !volumes.iter().any(|there| there.name.as_str() == volume) {
                    fault(format!(
                        "{name}: there is no volume {volume}, and external: true says that there is: see `kip volume ls`"
                    ));
                }
            }
            match client.validate(&described.request).await {
                Err(CallError::Refused(refusal)) => fault(format!("{name}: {refusal}")),
                other => other?,
            }
            if change.action != Action::Replace {
                continue;
            }
            let fields = super::view::fields(&change.fields);
            match &change.file {
                Some(file) => fault(format!("{name} was made by {file} and is not as described here: {fields}")),
                None if !replace => fault(format!(
                    "{name} is not as described: {fields}; what a proc is cannot be changed: --replace makes it anew, without the files that it wrote"
                )),
                None => {}
            }
        }
        Ok(faults)
    }
}

/// What of a described proc lies where the daemon is.
fn file_of_the_daemon(described: &Described) -> Option<String> {
    match &described.request.spec.image {
        Image::Tar(path) => Some(path.display().to_string()),
        Image::Oci(image) if image.reference.starts_with("oci:") => Some(image.reference.clone()),
        Image::Oci(image) if image.reference.starts_with("docker-archive:") => Some(image.reference.clone()),
        _ => None,
    }
}

async fn compare(
    client: &Client,
    view: &ProcView,
    wanted: &RunRequest,
) -> anyhow::Result<(Action, Vec<Difference>, Option<String>)> {
    let mut fields = differences(&asked(&view.spec), wanted);
    if view.spec.asked.is_none() {
        // An older daemon's, of which only what became of the request is known: what the file leaves open is as good as any.
        fields.retain(|field| field.wanted.is_some());
    }
    if fields.iter().any(|field| field.field == "image")
        && let (Image::Oci(has), Image::Oci(asks)) = (&view.spec.image, &wanted.spec.image)
        && let Ok(here) = client.image(&asks.reference).await
        && here.view.reference == has.reference
    {
        // Two names of one image.
        fields.retain(|field| field.field != "image");
    }
    let action = match (fields.is_empty(), view.state.as_str()) {
        (false, _) => Action::Replace,
        (true, "stopped") => Action::Start,
        (true, _) => Action::Same,
    };
    let other = view.spec.file.clone().filter(|file| wanted.spec.file.as_ref() != Some(file));
    Ok((action, fields, other))
}

/// The request that made a proc, as far as it is known.
pub fn asked(spec: &Spec) -> RunRequest {
    if let Some(asked) = &spec.asked {
        return RunRequest::clone(asked);
    }
    let mut spec = spec.clone();
    if let Image::Oci(image) = &mut spec.image {
        // The command is complete: nothing of the image's own comes before it.
        let (reference, entrypoint) = (std::mem::take(&mut image.reference), Some(Vec::new()));
        *image = OciImage { reference, entrypoint, ..OciImage::default() };
    }
    RunRequest { spec, wait_ready: false, secrets: BTreeMap::new(), left_open: LeftOpen::default() }
}
