//! Volumes, in the short and the long form, and those that the file declares.

use super::context::{Context, size};
use crate::place::Weight;
use crate::values::VolumeText;
use crate::yaml::{Value, YamlNode};
use kip_types::spec::Tmpfs;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Options of the short form that change nothing here.
const NOTHING: [&str; 7] = ["rw", "z", "Z", "cached", "delegated", "consistent", "rprivate"];
/// Why it cannot be asked for that it stays empty.
const COPIED: &str = "a new volume gets the files of the image that it covers";

/// Reads the file's own `volumes`: what each is called on the machine.
pub fn declared(context: &mut Context<'_>, node: Option<&YamlNode>) {
    for (name, _, volume) in node.map_or(&[][..], YamlNode::entries) {
        let mut called = format!("{}_{name}", context.project);
        let mut external = false;
        for (key, place, value) in volume.entries() {
            let path = format!("volumes.{name}.{key}");
            match key.as_str() {
                "name" => called = context.text(value, &path).unwrap_or(called),
                "external" if context.flag(value, &path) => {
                    external = true;
                    if volume.get("name").is_none() {
                        called.clone_from(name);
                    }
                }
                "external" | "labels" => {}
                "driver" if context.text(value, &path).is_none_or(|driver| driver == "local") => {}
                "driver" | "driver_opts" => {
                    context.lacks(place, Weight::Changes, &path, "a volume is a directory of the machine");
                }
                other if other.starts_with("x-") => {}
                other => context.fault(place, format!("volumes.{name} has no key {other}: known are name, external")),
            }
        }
        if external {
            context.external.insert(called.clone());
        }
        context.volumes.insert(name.clone(), called);
    }
}

/// Reads the file's own `secrets`: where their contents are.
pub fn declared_secrets(context: &mut Context<'_>, node: Option<&YamlNode>) {
    for (name, place, secret) in node.map_or(&[][..], YamlNode::entries) {
        let mut file = None;
        for (key, place, value) in secret.entries() {
            let path = format!("secrets.{name}.{key}");
            match key.as_str() {
                "file" => file = context.text(value, &path),
                // Told below, if there is no file.
                "external" | "environment" | "driver" | "driver_opts" | "template_driver" | "name" | "labels" => {}
                other if other.starts_with("x-") => {}
                other => context.fault(place, format!("secrets.{name} has no key {other}: known is file")),
            }
        }
        match file {
            Some(file) => drop(context.secrets.insert(name.clone(), file.into())),
            None => {
                let key = format!("secrets.{name}");
                context.lacks(
                    place,
                    Weight::Changes,
                    &key,
                    "the contents of a secret are those of a file: write file: PATH",
                );
            }
        }
    }
}

/// Reads a service's `secrets`, which are at `/run/secrets/NAME` as Compose has them.
pub fn secrets(context: &mut Context<'_>, node: &YamlNode, key: &str, into: &mut BTreeMap<String, PathBuf>) {
    for one in context.list(node, key) {
        let (source, target) = match &one.value {
            Value::Map(_) => {
                let mut part = |part: &str| one.get(part).and_then(|value| context.text(value, key));
                (part("source"), part("target"))
            }
            _ => (context.text(one, key), None),
        };
        let Some(source) = source else {
            context.fault(&one.place, format!("{key}: write source: NAME"));
            continue;
        };
        let target = target.unwrap_or_else(|| source.clone());
        let target = target.strip_prefix("/run/secrets/").unwrap_or(&target).to_owned();
        if target.contains('/') {
            context.lacks(&one.place, Weight::Changes, key, "secrets are below /run/secrets and nowhere else");
            continue;
        }
        match context.secrets.get(&source) {
            Some(file) => drop(into.insert(target, file.clone())),
            None => context.fault(&one.place, format!("{key}: there is no secret {source}: write it below secrets:")),
        }
    }
}

/// Reads a service's `volumes`; those in memory go to `in_memory`.
pub fn volumes(context: &mut Context<'_>, node: &YamlNode, key: &str, in_memory: &mut Vec<Tmpfs>) -> Vec<VolumeText> {
    let mut all = Vec::new();
    for one in context.list(node, key) {
        let volume = match &one.value {
            Value::Map(_) => long(context, one, key, in_memory),
            _ => context.text(one, key).and_then(|text| short(context, one, key, &text)),
        };
        let Some(volume) = volume else { continue };
        match volume.resolve(context.directory) {
            Ok(_) => all.push(volume),
            Err(e) => context.fault(&one.place, format!("{key}: {e}")),
        }
    }
    all
}

/// What a volume without a source is.
fn anonymous(context: &mut Context<'_>, node: &YamlNode, key: &str) -> Option<VolumeText> {
    let why = "a volume without a name is a directory of the proc's own, and goes with it";
    context.lacks(&node.place, Weight::Harmless, key, why);
    None
}

fn short(context: &mut Context<'_>, node: &YamlNode, key: &str, text: &str) -> Option<VolumeText> {
    let mut parts = text.splitn(3, ':');
    let (source, target, options) = (parts.next().unwrap_or(""), parts.next(), parts.next().unwrap_or("rw"));
    let Some(target) = target else { return anonymous(context, node, key) };
    let mut read_only = false;
    for option in options.split(',') {
        match option {
            "ro" => read_only = true,
            "nocopy" => context.lacks(&node.place, Weight::Changes, key, COPIED),
            known if NOTHING.contains(&known) => {}
            other => context.lacks(&node.place, Weight::Changes, key, &format!("Kip has no option {other} of volumes")),
        }
    }
    let source = match source.chars().next() {
        Some('.' | '/') => source.to_owned(),
        Some('~') => home(context, source),
        _ => named(context, node, key, source)?,
    };
    Some(VolumeText { source, target: target.to_owned(), read_only })
}

fn long(context: &mut Context<'_>, node: &YamlNode, key: &str, in_memory: &mut Vec<Tmpfs>) -> Option<VolumeText> {
    let mut volume = VolumeText { source: String::new(), target: String::new(), read_only: false };
    let (mut kind, mut options) = ("volume".to_owned(), Vec::new());
    for (name, place, value) in node.entries() {
        match name.as_str() {
            "type" => kind = context.text(value, key).unwrap_or(kind),
            "source" => volume.source = context.text(value, key).unwrap_or_default(),
            "target" => volume.target = context.text(value, key).unwrap_or_default(),
            "read_only" => volume.read_only = context.flag(value, key),
            "volume" => {
                if value.get("nocopy").is_some_and(|node| context.flag(node, key)) {
                    context.lacks(place, Weight::Changes, key, COPIED);
                }
                if value.get("subpath").is_some() {
                    context.lacks(place, Weight::Changes, key, "a part of a volume cannot be asked for");
                }
            }
            "bind" => bind(context, value, key),
            "tmpfs" => options = tmpfs_options(context, value, key),
            "consistency" => {}
            other => {
                context.fault(place, format!("{key} has no key {other}: known are type, source, target, read_only"))
            }
        }
    }
    match kind.as_str() {
        "volume" if volume.source.is_empty() => return anonymous(context, node, key),
        "volume" => volume.source = named(context, node, key, &volume.source)?,
        "bind" if volume.source.starts_with(['/', '.']) => {}
        "bind" if volume.source.starts_with('~') => volume.source = home(context, &volume.source),
        "bind" => volume.source = format!("./{}", volume.source),
        "tmpfs" => {
            match format!("{}:{}", volume.target, options.join(",")).parse() {
                Ok(one) => in_memory.push(one),
                Err(e) => context.fault(&node.place, format!("{key}: {e}")),
            }
            return None;
        }
        other => {
            let why = format!("Kip has no volumes of the type {other}");
            context.lacks(&node.place, Weight::Changes, key, &why);
            return None;
        }
    }
    Some(volume)
}

/// What the long form says of a file system in memory, as the short form of `tmpfs` has it.
fn tmpfs_options(context: &mut Context<'_>, node: &YamlNode, key: &str) -> Vec<String> {
    let mut options = Vec::new();
    for (name, place, value) in node.entries() {
        match name.as_str() {
            "size" => options.extend(context.parsed(value, key, size).map(|bytes| format!("size={bytes}"))),
            // YAML takes the 0 of an octal number off, or leaves it.
            "mode" => {
                options.extend(context.text(value, key).map(|mode| format!("mode={}", mode.trim_start_matches("0o"))))
            }
            other => context.fault(place, format!("{key}.tmpfs has no key {other}: known are size, mode")),
        }
    }
    options
}

/// What the long form says of a directory of the machine.
fn bind(context: &mut Context<'_>, node: &YamlNode, key: &str) {
    for (name, place, value) in node.entries() {
        let path = format!("{key}.bind.{name}");
        match name.as_str() {
            "propagation"
                if context.text(value, &path).is_none_or(|how| matches!(how.as_str(), "private" | "rprivate")) => {}
            "propagation" => {
                context.lacks(place, Weight::Changes, &path, "mounts do not propagate between host and proc")
            }
            "create_host_path" if context.flag(value, &path) => {
                context.lacks(place, Weight::Harmless, &path, "a path that does not exist is refused");
            }
            "create_host_path" | "selinux" | "recursive" => {}
            other => {
                context.fault(place, format!("{key}.bind has no key {other}: known are propagation, create_host_path"))
            }
        }
    }
}

fn home(context: &Context<'_>, source: &str) -> String {
    source.replacen('~', &(context.lookup)("HOME").unwrap_or_else(|| "/root".to_owned()), 1)
}

fn named(context: &mut Context<'_>, node: &YamlNode, key: &str, name: &str) -> Option<String> {
    let found = context.volumes.get(name).cloned();
    if found.is_none() {
        let message = format!("{key}: there is no volume {name}: write it below volumes:, or ./{name} for a directory");
        context.fault(&node.place, message);
    }
    found
}
