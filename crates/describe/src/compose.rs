//! Compose files (compose-spec.io): services as procs.
//!
//! A service's keys become those of a `kip.toml`. What Kip lacks is named with its place, why, and what happens instead, and is weighed: a
//! program that would run as something else than was described is no matter for a warning. Keys that are in no version of the
//! specification are mistakes; those that begin with `x-` are nobody's, but `x-kip` has the times and ways of sleeping.

mod context;
mod lacking;
mod mounts;
mod ports;
mod service;

use crate::place::{Fault, Faults, Note, Place, Weight, meant};
use crate::yaml::{self, Node, Value};
use crate::{Document, Reading, environ, file};
use context::Context;
use kip_types::name::ProcName;
use service::Service;
use std::path::Path;

/// Keys of the file itself that are looked at, or mean nothing to Kip.
const TOP: [&str; 8] = ["name", "services", "volumes", "version", "networks", "configs", "secrets", "include"];

/// Whether the file's name says that it is a Compose file.
pub fn is_compose(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// Reads a Compose file.
pub fn read(reading: &Reading<'_>) -> Result<Document, Faults> {
    let mut root = yaml::load(reading.path, reading.text)?;
    let directory = file::directory(reading.path);
    let beside = directory.join(".env");
    let dotenv = match beside.exists() {
        true => environ::read(&beside, reading.lookup, true)
            .map_err(|e| Fault::new(&root.place, format!("its variables: {e}")))?,
        false => Vec::new(),
    };
    let of_file = |key: &str| dotenv.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.clone());
    let lookup = |key: &str| (reading.lookup)(key).or_else(|| of_file(key));
    let mut context = Context::new(&directory, &lookup);
    root.each_text(&mut |place, text| match environ::interpolate(text, &lookup) {
        Ok(new) => *text = new,
        Err(message) => context.fault(place, message),
    });
    let mut document = Document { project: None, procs: Vec::new(), left_out: Vec::new(), notes: Vec::new() };
    top(&mut context, &root, &mut document);
    let services = services(&mut context, &root, reading.profiles, &mut document);
    let procs = procs(&mut context, services);
    let Context { mut faults, mut notes, .. } = context;
    if !faults.is_empty() {
        faults.sort_by_key(|fault| (fault.place.line, fault.place.column));
        return Err(Faults(faults));
    }
    notes.sort_by_key(|note| (note.place.line, note.place.column));
    Ok(Document { procs, notes, ..document })
}

/// Everything beside the services.
fn top(context: &mut Context<'_>, root: &Node, document: &mut Document) {
    if !matches!(root.value, Value::Map(_)) {
        context.fault(&root.place, format!("this is {}: a Compose file begins with services:", root.kind()));
        return;
    }
    for (key, place, node) in root.entries() {
        match key.as_str() {
            "name" => document.project = context.text(node, "name"),
            "include" => context.lacks(place, Weight::Changes, "include", "write those services here"),
            known if TOP.contains(&known) || known.starts_with("x-") => {}
            other => {
                let known = meant(other, TOP.into_iter());
                context.fault(place, format!("there is no key {other}: {known}"));
            }
        }
    }
    let usual = context.directory.file_name().map_or_else(|| "compose".into(), |name| name.to_string_lossy());
    let project = document.project.clone().unwrap_or_else(|| usual.to_lowercase());
    let letters = project.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    context.project = letters.collect();
    mounts::declared(context, root.get("volumes"));
    mounts::declared_secrets(context, root.get("secrets"));
}

/// The services that are wanted.
fn services(context: &mut Context<'_>, root: &Node, profiles: &[String], document: &mut Document) -> Vec<Service> {
    let Some((.., node)) = root.entries().iter().find(|(key, ..)| key == "services") else {
        context.fault(&root.place, "there is no key services: write services: and each service below");
        return Vec::new();
    };
    let mut wanted = Vec::new();
    for (name, place, node) in node.entries() {
        let Some(proc) = proc_name(context, name, place) else { continue };
        let of = node.get("profiles").map(|list| context.texts(list, &format!("services.{name}.profiles")));
        if of.is_some_and(|of| !of.is_empty() && !of.iter().any(|p| profiles.contains(p) || p == "*")) {
            document.left_out.push(proc);
            continue;
        }
        wanted.push(Service::read(context, name, proc, place, node));
    }
    wanted
}

/// The name of a service as that of a proc.
fn proc_name(context: &mut Context<'_>, name: &str, place: &Place) -> Option<ProcName> {
    let new = name.to_ascii_lowercase().replace(['_', '.'], "-");
    match new.parse::<ProcName>() {
        Ok(proc) => {
            if new != name {
                let message = format!("services.{name} is called {new}: names of procs are of a-z, 0-9 and '-'");
                context.notes.push(Note { place: place.clone(), weight: Weight::Harmless, message });
            }
            Some(proc)
        }
        Err(e) => {
            context.fault(place, e.to_string());
            None
        }
    }
}

/// Services as procs, with what they mean for each other.
fn procs(context: &mut Context<'_>, services: Vec<Service>) -> Vec<crate::Described> {
    let names: Vec<(String, ProcName)> = services.iter().map(|s| (s.name.clone(), s.proc.clone())).collect();
    for (at, (name, proc)) in names.iter().enumerate() {
        if let Some((other, _)) = names[..at].iter().find(|(_, known)| known == proc) {
            let place = services[at].place.clone();
            context.fault(&place, format!("services.{name} and services.{other} would both be called {proc}"));
        }
    }
    let awaited: Vec<String> = services.iter().flat_map(|s| s.awaits.iter().cloned()).collect();
    let links: Vec<(String, String)> = services.iter().flat_map(|s| s.links.iter().cloned()).collect();
    let mut procs = Vec::new();
    for service in services {
        let awaited = awaited.contains(&service.name);
        let mine = links.iter().filter(|(of, _)| *of == service.name).map(|(_, name)| name.clone()).collect();
        procs.extend(service.described(context, &names, (awaited, mine)));
    }
    procs
}

#[cfg(test)]
#[path = "compose_tests.rs"]
mod tests;
