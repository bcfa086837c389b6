//! Networks, those that the file declares and those of a service. All services of a file are in
//! one, which is named after the project.

use super::context::Context;
use crate::place::{Weight, meant};
use crate::yaml::{Value, YamlNode};

/// Keys of a network.
const KEYS: [&str; 10] = [
    "attachable",
    "driver",
    "driver_opts",
    "enable_ipv4",
    "enable_ipv6",
    "external",
    "internal",
    "ipam",
    "labels",
    "name",
];

/// Reads the file's own `networks`. Services of internal ones call nothing outside.
pub fn declared(context: &mut Context<'_>, node: Option<&YamlNode>) {
    for (name, _, network) in node.map_or(&[][..], YamlNode::entries) {
        for (key, place, value) in network.entries() {
            let path = format!("networks.{name}.{key}");
            match key.as_str() {
                "internal" if context.flag(value, &path) => {
                    context.internal.insert(name.clone());
                }
                "external" if context.flag(value, &path) => {
                    let why = "services of this file find each other by name, and no others find them";
                    context.lacks(place, Weight::Changes, &path, why);
                }
                "driver" => match context.text(value, &path).as_deref() {
                    None | Some("" | "default" | "bridge" | "overlay") => {}
                    Some(_) => {
                        context.lacks(place, Weight::Changes, &path, "a proc has a network of its own, behind NAT")
                    }
                },
                "driver_opts" if !value.entries().is_empty() => {
                    context.lacks(place, Weight::Changes, &path, "Kip makes the network itself");
                }
                "ipam" if !value.entries().is_empty() => {
                    context.lacks(place, Weight::Harmless, &path, "Kip assigns addresses itself");
                }
                "enable_ipv4" | "enable_ipv6" if !context.flag(value, &path) => {
                    context.lacks(place, Weight::Harmless, &path, "a proc has an address of each kind");
                }
                known if KEYS.contains(&known) || known.starts_with("x-") => {}
                other => {
                    let known = meant(other, KEYS.into_iter());
                    context.fault(place, format!("networks.{name} has no key {other}: {known}"));
                }
            }
        }
    }
}

fn text(node: &YamlNode) -> Option<&str> {
    match &node.value {
        Value::Text { text, .. } => Some(text),
        _ => None,
    }
}

/// Whether a service with these `networks` is in internal ones only.
pub fn is_internal(context: &Context<'_>, node: Option<&YamlNode>) -> bool {
    let named: Vec<&str> = match node.map(|node| &node.value) {
        Some(Value::Map(map)) => map.iter().map(|(name, ..)| name.as_str()).collect(),
        Some(Value::List(list)) => list.iter().filter_map(text).collect(),
        _ => Vec::new(),
    };
    let internal = |name: &str| context.internal.contains(name);
    if named.is_empty() { internal("default") } else { named.into_iter().all(internal) }
}

/// Reads a service's `networks`: the names that it has there.
pub fn names(context: &mut Context<'_>, node: &YamlNode, path: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (name, _, how) in node.entries() {
        let path = format!("{path}.{name}.aliases");
        names.extend(how.get("aliases").map(|list| context.texts(list, &path)).unwrap_or_default());
    }
    let known = node.entries().len();
    if known > 1 || matches!(&node.value, Value::List(all) if all.len() > 1) {
        let why = "all services of the file find each other; none is kept apart";
        context.lacks(&node.place, Weight::Harmless, path, why);
    }
    names
}
