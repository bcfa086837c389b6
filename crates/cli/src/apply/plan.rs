//! What an apply would do: each proc of a file against the proc of that name that the daemon has.

use super::Asked;
use kip_client::{CallError, Client};
use kip_describe::{Described, Difference, Fault, Pull, differences, update_between};
use kip_types::api::{Code, ContentKey, ContentView, InFile, LeftOpen, ProcView, Refusal, RunRequest, ValidateRequest};
use kip_types::image::OciImage;
use kip_types::spec::{Image, Protocol, Spec, addresses_meet};
use kip_types::{ProcName, StateName};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::IpAddr;

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
    /// It is not as described, and an update makes it so.
    Update,
    /// It is not as described, and cannot be changed so.
    Replace,
    /// The file made it and does not describe it any more.
    Remove,
}

/// What is to be done for a proc, and whether it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedChange {
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

impl PlannedChange {
    /// A proc is made.
    pub fn makes(&self) -> bool {
        matches!(self.action, Action::Create | Action::Replace)
    }
}

/// What an apply would do, in the order in which it does.
pub struct ApplyPlan {
    changes: Vec<PlannedChange>,
    described: Vec<Option<Described>>,
    /// Procs that the file made and does not describe any more, and that stay.
    left_over: Vec<ProcName>,
}

impl ApplyPlan {
    /// Compares a file with what is there. Wakes no proc.
    pub async fn new(client: &Client, asked: &Asked, prune: bool) -> anyhow::Result<ApplyPlan> {
        let there = client.list().await?;
        let mut plan = ApplyPlan { changes: Vec::new(), described: Vec::new(), left_over: Vec::new() };
        let document = &asked.document;
        let kept = |name: &ProcName| {
            document.procs.iter().any(|p| p.request.spec.name == *name) || document.left_out.contains(name)
        };
        let of_file = |view: &&ProcView| asked.whole && view.spec.file.as_deref() == Some(&asked.mark);
        let gone = there.iter().filter(of_file).filter(|view| !kept(&view.name)).map(|view| view.name.clone());
        if prune {
            // First: a proc that takes their place may want their ports.
            for name in gone {
                let action = Action::Remove;
                plan.changes.push(PlannedChange { name, action, fields: Vec::new(), done: false, file: None });
                plan.described.push(None);
            }
        } else {
            plan.left_over = gone.collect();
        }
        for one in &asked.document.procs {
            let mut one = one.clone();
            one.request.spec.file = Some(asked.mark.clone());
            let name = one.request.spec.name.clone();
            let (action, fields, file) = match there.iter().any(|view| view.name == name) {
                false => (Action::Create, Vec::new(), None),
                true => compare(client, &client.inspect_with_env(&name).await?, &one.request).await?,
            };
            plan.changes.push(PlannedChange { name, action, fields, done: false, file });
            plan.described.push(Some(one));
        }
        Ok(plan)
    }

    /// All changes.
    pub fn changes(&self) -> &[PlannedChange] {
        &self.changes
    }

    /// All changes, with what describes each.
    pub fn both(&mut self) -> impl Iterator<Item = (&mut PlannedChange, Option<&Described>)> {
        self.changes.iter_mut().zip(self.described.iter().map(Option::as_ref))
    }

    /// A line about procs that the file has left behind, if there are some.
    pub fn left_over(&self) -> Option<String> {
        let names: Vec<&str> = self.left_over.iter().map(ProcName::as_str).collect();
        let are = if names.len() == 1 { "is" } else { "are" };
        let line =
            || format!("{} {are} of this file and not in it any more: --prune removes what is", names.join(", "));
        (!names.is_empty()).then(line)
    }

    /// What stands in the way, before anything is changed. Then those, by their places, whose image
    /// has to be here before more can be said.
    pub async fn refused(&self, client: &Client, replace: bool) -> anyhow::Result<(Vec<Fault>, Vec<usize>)> {
        let (mut faults, mut without_image) = (Vec::new(), Vec::new());
        let volumes = match self.described.iter().flatten().any(|one| !one.external.is_empty()) {
            true => client.volumes().await?,
            false => Vec::new(),
        };
        for (at, (change, described)) in self.changes.iter().zip(&self.described).enumerate() {
            let Some(described) = described.as_ref().filter(|_| change.makes() || change.action == Action::Update)
            else {
                continue;
            };
            let mut fault = |message: String| faults.push(Fault::new(&described.place, message));
            let name = &change.name;
            if let Some(what) = file_of_the_daemon(described).filter(|_| client.is_remote()) {
                fault(format!("{name}: {what} is a file of the daemon's machine: apply there, without --host"));
                continue;
            }
            for volume in &described.external {
                if !volumes.iter().any(|there| there.name.as_str() == volume) {
                    fault(format!(
                        "{name}: there is no volume {volume}, and external: true says that there is: see `kip volume ls`"
                    ));
                }
            }
            if let Some((other, (proto, port))) = self.also_wants(described) {
                fault(format!("{name}: {proto} host port {port} is asked for by {other}, too: choose another one"));
                continue;
            }
            match self.validate(client, described).await? {
                Some(refusal) if refusal.code == Code::Unknown && described.pull != Pull::Never => {
                    without_image.push(at)
                }
                Some(refusal) => fault(said(name, &refusal)),
                None => {}
            }
            if change.action != Action::Replace {
                continue;
            }
            let fields = super::view::fields(&change.fields);
            match &change.file {
                Some(file) => fault(format!("{name} was made by {file} and differs from this file: {fields}")),
                None if !replace => fault(format!(
                    "{name} differs from the file: {fields}. Not all of this can be changed in place: --replace recreates it and deletes its own files"
                )),
                None => {}
            }
        }
        Ok((faults, without_image))
    }

    /// Why some of those could not be started.
    pub async fn invalid(&self, client: &Client, some: &[usize]) -> anyhow::Result<Vec<Fault>> {
        let mut faults = Vec::new();
        for described in some.iter().filter_map(|at| self.described[*at].as_ref()) {
            if let Some(refusal) = self.validate(client, described).await? {
                faults.push(Fault::new(&described.place, said(&described.request.spec.name, &refusal)));
            }
        }
        Ok(faults)
    }

    /// Another proc that is described with one of its host ports.
    fn also_wants(&self, described: &Described) -> Option<(&ProcName, (Protocol, u16))> {
        let spec = &described.request.spec;
        let own = host_ports(spec);
        let others = self.described.iter().flatten().map(|other| &other.request.spec);
        let all = others
            .filter(|other| other.name != spec.name)
            .flat_map(|other| host_ports(other).into_iter().map(|(proto, at, port)| (&other.name, (proto, at, port))));
        let meets = |(proto, at, port): (Protocol, Option<IpAddr>, u16)| {
            own.iter().any(|one| (one.0, one.2) == (proto, port) && addresses_meet(one.1, at))
        };
        let mut both = all.filter(|(_, port)| meets(*port));
        both.next().map(|(name, (proto, _, port))| (name, (proto, port)))
    }

    /// Those that go before it leave their ports, and so do those whose ports change.
    async fn validate(&self, client: &Client, described: &Described) -> anyhow::Result<Option<Refusal>> {
        let before = self.changes.iter().take_while(|change| change.name != described.request.spec.name);
        let goes = |change: &&PlannedChange| match change.action {
            Action::Remove | Action::Replace => true,
            Action::Update => change.fields.iter().any(|field| field.field == "port"),
            _ => false,
        };
        let instead_of = before.filter(goes).map(|change| change.name.clone()).collect();
        match client.validate(&ValidateRequest::new(described.request.clone(), instead_of)).await {
            Err(CallError::Refused(refusal)) => Ok(Some(refusal)),
            other => Ok(other.map(|()| None)?),
        }
    }
}

/// Ports of the host that it asks for, with their addresses; all addresses without one.
fn host_ports(spec: &Spec) -> Vec<(Protocol, Option<IpAddr>, u16)> {
    let published = spec.ports.iter().filter_map(|port| Some((port.proto, port.host_addr, port.host_port?)));
    published.chain(spec.probes.iter().map(|probe| (Protocol::Tcp, None, probe.host_port))).collect()
}

/// Some refusals begin with the name.
fn said(name: &ProcName, refusal: &Refusal) -> String {
    let message = refusal.to_string();
    if message.starts_with(name.as_str()) { message } else { format!("{name}: {message}") }
}

/// What of a described proc lies where the daemon is.
pub fn file_of_the_daemon(described: &Described) -> Option<String> {
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
    let is = asked(&view.spec);
    let mut fields = differences(&is, wanted);
    let by_key: Vec<String> = fields.iter().map(|field| field.field.clone()).collect();
    if view.spec.asked.is_none() {
        // An older daemon's, of which only what became of the request is known: what the file
        // leaves open is as good as any.
        fields.retain(|field| field.wanted.is_some());
    }
    if let (Image::Oci(has), Image::Oci(asks)) = (&view.spec.image, &wanted.spec.image)
        && let Ok(here) = client.image(&asks.reference).await
        && here.view.reference == has.reference
    {
        // Two names of one image, which may lead elsewhere than when the proc was made.
        fields.retain(|field| field.field != "image");
        if here.view.digest != has.digest {
            let of = |digest: &str| Some(format!("{} {digest}", asks.reference));
            let (is, wanted) = (of(&has.digest), of(&here.view.digest));
            fields.push(Difference { field: "image".to_owned(), is, wanted });
        }
    }
    fields.extend(other_contents(client, wanted, &fields).await?);
    let other = view.spec.file.clone().filter(|file| wanted.spec.file.as_ref() != Some(file));
    let in_place = || {
        let known = view.spec.asked.is_some() && other.is_none() && view.state != StateName::Elsewhere;
        known && fields.iter().all(|field| by_key.contains(&field.field)) && update_between(&is, wanted).is_some()
    };
    let action = match (fields.is_empty(), view.state) {
        (false, _) if in_place() => Action::Update,
        (false, _) => Action::Replace,
        (true, StateName::Stopped) => Action::Start,
        (true, _) => Action::Same,
    };
    Ok((action, fields, other))
}

/// In what the contents of files differ that are named alike.
async fn other_contents(client: &Client, wanted: &RunRequest, named: &[Difference]) -> anyhow::Result<Vec<Difference>> {
    let tar = matches!(wanted.spec.image, Image::Tar(_)) && !named.iter().any(|field| field.field == "tar");
    if !tar && wanted.secrets.is_empty() {
        return Ok(Vec::new());
    }
    let contents = match client.compare(wanted).await {
        // It differs by name, too, and is told as what stands in the way, with its place.
        Err(CallError::Refused(refusal)) if refusal.code == Code::Invalid => return Ok(Vec::new()),
        contents => contents?,
    };
    let differs = contents.differ.into_iter().filter(|content| tar || content.key != ContentKey::Tar);
    let hidden = || Some("(not shown)".to_owned());
    Ok(differs
        .map(|ContentView { key, is, wanted }| Difference {
            field: key.into(),
            is: is.or_else(hidden),
            wanted: wanted.or_else(hidden),
        })
        .collect())
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
    let (secrets, left_open, in_file) = (BTreeMap::new(), LeftOpen::default(), InFile::default());
    RunRequest { spec, wait_ready: false, secrets, left_open, in_file }
}
