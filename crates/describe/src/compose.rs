//! Compose files (compose-spec.io): services as procs.
//!
//! A service's keys become those of a `kip.toml`. What Kip lacks is named with its place, why, and
//! what happens instead, and is weighed: a program that would run as something else than was
//! described is no matter for a warning. Keys that are in no version of the specification are
//! mistakes; those that begin with `x-` are passed over, but `x-kip` has the times and ways of
//! sleeping, for a service or, at the top, for all. Keys within others need not be listed anywhere:
//! every key of a map that the reader has not asked for is reported.
//!
//! Files that are given with it are laid over it first (`overrides`), so that all else is read of
//! one file.
//!
//! A service's proc is called PROJECT-SERVICE, so that files do not get in each other's way; others
//! of the file find it by SERVICE.

mod context;
mod lacking;
mod mounts;
mod networks;
mod overrides;
mod ports;
mod service;

use crate::document::{Document, Reading, lettered};
use crate::place::{Fault, Faults, Note, SourcePosition, Weight, meant};
use crate::yaml::{self, Value, YamlNode};
use crate::{environ, file};
use context::Context;
use kip_types::name::ProcName;
use service::ComposeService;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Keys of the file itself that are looked at, or mean nothing to Kip.
const TOP: [&str; 8] = ["name", "services", "volumes", "version", "networks", "configs", "secrets", "include"];

/// Whether the file's name says that it is a Compose file.
pub fn is_compose(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// Names of the file that Compose lays over a file of its own by itself; none for a `kip.toml`.
pub fn overrides_beside(path: &Path) -> impl Iterator<Item = PathBuf> {
    let path = path.to_owned();
    let kinds = if is_compose(&path) { ["override.yaml", "override.yml"].as_slice() } else { &[] };
    kinds.iter().map(move |kind| path.with_extension(kind))
}

/// Reads a Compose file.
pub fn read(reading: &Reading<'_>) -> Result<Document, Faults> {
    let first = yaml::load(reading.path, reading.text)?;
    let directory = file::directory(reading.path);
    let beside = directory.join(".env");
    let unset = RefCell::new(Vec::new());
    let dotenv = match beside.exists() {
        true => environ::read(&beside, reading.lookup, true, &|name| unset.borrow_mut().push(name.to_owned()))
            .map_err(|e| Fault::new(&first.place, format!("its variables: {e}")))?,
        false => Vec::new(),
    };
    let of_file = |key: &str| dotenv.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.clone());
    let lookup = |key: &str| (reading.lookup)(key).or_else(|| of_file(key));
    let mut context = Context::new(&directory, &lookup);
    unset.take().iter().for_each(|name| context.unset(&first.place, name));
    let mut replace = |root: &mut yaml::YamlNode| {
        root.each_text(&mut |place, text| {
            match environ::interpolate(text, &lookup, &|name| unset.borrow_mut().push(name.to_owned())) {
                Ok(new) => *text = new,
                Err(message) => context.fault(place, message),
            }
            unset.take().iter().for_each(|name| context.unset(place, name));
        });
    };
    let mut root = first;
    replace(&mut root);
    for (path, text) in reading.overrides {
        let mut over = yaml::load(path, text)?;
        replace(&mut over);
        root = overrides::merged(root, over)?;
    }
    let root = overrides::settled(root);
    let mut document = Document { project: None, procs: Vec::new(), left_out: Vec::new(), notes: Vec::new() };
    top(&mut context, &root, reading.project, &mut document);
    let services = services(&mut context, &root, reading.profiles, &mut document);
    let procs = procs(&mut context, services);
    let Context { mut faults, mut notes, .. } = context;
    if !faults.is_empty() {
        faults.sort_by_key(|fault| (fault.place.line, fault.place.column));
        // What stands at the top for all services is read for each.
        faults.dedup();
        return Err(Faults(faults));
    }
    notes.sort_by_key(|note| (note.place.line, note.place.column));
    Ok(Document { procs, notes, ..document })
}

/// Everything beside the services.
fn top(context: &mut Context<'_>, root: &YamlNode, project: Option<&str>, document: &mut Document) {
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
    let of_environment = (context.lookup)("COMPOSE_PROJECT_NAME").filter(|name| !name.is_empty());
    document.project = project.map(str::to_owned).or(of_environment).or(document.project.take());
    match &document.project {
        Some(name) if is_project(name) => context.project.clone_from(name),
        Some(name) => {
            let message =
                format!("{name:?} is no name of a project: write a-z, 0-9, '-' and '_', a letter or digit first");
            let place = root.get("name").map_or(&root.place, |name| &name.place);
            context.fault(place, message);
        }
        None => {
            let name =
                context.directory.file_name().map_or_else(String::new, |name| name.to_string_lossy().to_lowercase());
            let letters: String =
                name.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_')).collect();
            let letters = letters.trim_start_matches(['-', '_']);
            context.project = if letters.is_empty() { "compose" } else { letters }.to_owned();
        }
    }
    mounts::declared(context, root.get("volumes"));
    mounts::declared_secrets(context, root.get("secrets"));
    networks::declared(context, root.get("networks"));
}

/// As Compose has it.
fn is_project(name: &str) -> bool {
    let known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_');
    name.chars().all(known) && !name.starts_with(['-', '_']) && !name.is_empty()
}

/// The services that are wanted.
fn services(
    context: &mut Context<'_>,
    root: &YamlNode,
    profiles: &[String],
    document: &mut Document,
) -> Vec<ComposeService> {
    let Some((.., node)) = root.entries().iter().find(|(key, ..)| key == "services") else {
        context.fault(&root.place, "there is no key services: write services: and each service below");
        return Vec::new();
    };
    let mut wanted = Vec::new();
    let mut known = BTreeSet::new();
    for (name, place, node) in node.entries() {
        let Some(proc) = proc_name(context, name, place, node) else { continue };
        let of = node.get("profiles").map(|list| context.texts(list, &format!("services.{name}.profiles")));
        known.extend(of.iter().flatten().cloned());
        if of.is_some_and(|of| !of.is_empty() && !of.iter().any(|p| profiles.contains(p) || p == "*")) {
            document.left_out.push(proc);
            continue;
        }
        wanted.push(ComposeService::read(context, name, proc, place, node, root.get("x-kip")));
        lacking::unread(context, &format!("services.{name}"), node);
    }
    for profile in profiles.iter().filter(|profile| !known.contains(*profile) && *profile != "*") {
        let meant = match known.is_empty() {
            true => "none names a profile".to_owned(),
            false => meant(profile, known.iter().map(String::as_str)),
        };
        let message = format!("no service has the profile {profile}: {meant}");
        context.notes.push(Note { place: node.place.clone(), weight: Weight::Harmless, message });
    }
    wanted
}

/// The name of a service's proc: its `container_name`, or its own after that of the project.
fn proc_name(context: &mut Context<'_>, name: &str, place: &SourcePosition, node: &YamlNode) -> Option<ProcName> {
    let own = node.get("container_name").and_then(|own| context.text(own, &format!("services.{name}.container_name")));
    let (wanted, before) = match own {
        Some(own) => (own, String::new()),
        None => (name.to_owned(), format!("{}-", lettered(&context.project))),
    };
    let new = before + &lettered(&wanted);
    match new.parse::<ProcName>() {
        Ok(proc) => {
            if lettered(&wanted) != wanted {
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
fn procs(context: &mut Context<'_>, services: Vec<ComposeService>) -> Vec<crate::Described> {
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
        procs.extend(service.described(context, &names, awaited, mine));
    }
    procs
}

#[cfg(test)]
#[path = "compose/spellings_tests.rs"]
mod spellings;
#[cfg(test)]
#[path = "compose_tests.rs"]
mod tests;
