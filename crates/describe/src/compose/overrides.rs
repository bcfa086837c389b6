//! Compose's override files: what becomes of a file when another one is laid over it
//! (compose-spec, "Merge" and "Reset value").
//!
//! Maps are merged key by key, lists are joined, and any other value is replaced. A command is
//! replaced whole; what has a name within a list (a variable, a label, a volume by its target, a
//! secret) is there once, and the later file's counts. A key that has several spellings has one
//! here before it is merged. `!override` before a value replaces what earlier files say, `!reset`
//! takes it away.
//!
//! Ports are joined here as they are spelled; which of them are the same their reader finds.

use crate::place::Fault;
use crate::yaml::{MapEntry, Tag, Value, YamlNode};

/// How the values of a key are laid over each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// Maps merge, lists are joined.
    Plain,
    /// The later one counts.
    Replaced,
    /// `KEY=VALUE`, as a list or as a map.
    Variables,
    /// Names, as a list or as a map.
    Names,
    /// Services, as a list, of which each has to be started, or as a map with conditions.
    Services,
    /// Names of hosts with an address or several, as a list or as a map. All addresses count.
    Hosts,
    /// Volumes and devices, by their target.
    Targets,
    /// Secrets, by their target or their name.
    Sources,
    /// Files, one or a list, by their path.
    Files,
    /// File systems in memory, one or a list, by their place.
    InMemory,
    /// One value is a list of one.
    OneOrMore,
    /// A directory, or a map.
    Build,
}

/// Where secrets are, whether a file says so or not.
const SECRETS: &str = "/run/secrets/";

fn how(path: &[String]) -> How {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    match path.as_slice() {
        ["services", _, "command" | "entrypoint" | "extends"]
        | ["services", _, "healthcheck", "test"]
        | ["services", _, "ulimits", _]
        | ["services", _, "build", "ulimits", _]
        | ["volumes" | "networks" | "secrets" | "configs", _, "external"] => How::Replaced,
        ["services", _, "environment" | "labels" | "annotations" | "sysctls"]
        | ["services", _, "deploy", "labels"]
        | ["services", _, "build", "args" | "labels" | "additional_contexts"]
        | ["volumes" | "networks" | "secrets" | "configs", _, "labels"] => How::Variables,
        ["services", _, "networks" | "models"] => How::Names,
        ["services", _, "depends_on"] => How::Services,
        ["services", _, "extra_hosts"] | ["services", _, "build", "extra_hosts"] => How::Hosts,
        ["services", _, "volumes" | "devices"] => How::Targets,
        ["services", _, "secrets" | "configs"] | ["services", _, "build", "secrets"] => How::Sources,
        ["services", _, "env_file"] => How::Files,
        ["services", _, "tmpfs"] => How::InMemory,
        ["services", _, "dns" | "dns_opt" | "dns_search" | "label_file"]
        | ["x-kip", "probe"]
        | ["services", _, "x-kip", "probe"] => How::OneOrMore,
        ["services", _, "build"] => How::Build,
        _ => How::Plain,
    }
}

/// Lays `over` over `base`.
///
/// # Errors
/// A map or a list cannot be overridden by something else.
pub fn merged(base: YamlNode, over: YamlNode) -> Result<YamlNode, Fault> {
    merge(base, over, &mut Vec::new())
}

fn merge(base: YamlNode, over: YamlNode, path: &mut Vec<String>) -> Result<YamlNode, Fault> {
    let how = how(path);
    let nothing = base.value == Value::Null || base.tag == Some(Tag::Reset);
    if over.tag.is_some() || how == How::Replaced || nothing {
        return Ok(over);
    }
    // A variable without a value is the environment's; any other key without one says nothing.
    let is_variable = path.split_last().is_some_and(|(_, above)| self::how(above) == How::Variables);
    if over.value == Value::Null && !is_variable {
        return Ok(base);
    }
    let (base, over) = alike(how, base, over);
    let (place, base_place, kinds) = (over.place.clone(), base.place.clone(), (base.kind(), over.kind()));
    let value = match (base.value, over.value) {
        (Value::Map(entries), Value::Map(more)) if is_same_driver(path, &entries, &more) => {
            Value::Map(merge_entries(entries, more, path)?)
        }
        (Value::Map(_), Value::Map(more)) => Value::Map(more),
        (Value::List(items), Value::List(more)) => Value::List(joined(how, items, more)),
        (Value::List(_) | Value::Map(_), _) => {
            let (is, becomes) = kinds;
            let message = format!("{} is {is} at {base_place}: {becomes} cannot override it", path.join("."));
            return Err(Fault::new(&place, message));
        }
        (_, value) => value,
    };
    Ok(YamlNode::new(place, value))
}

fn merge_entries(
    mut entries: Vec<MapEntry>,
    more: Vec<MapEntry>,
    path: &mut Vec<String>,
) -> Result<Vec<MapEntry>, Fault> {
    for (key, place, node) in more {
        let Some(at) = entries.iter().position(|(known, ..)| *known == key) else {
            entries.push((key, place, node));
            continue;
        };
        path.push(key.clone());
        let base = entries[at].2.clone();
        entries[at] = (key, place, merge(base, node, path)?);
        path.pop();
    }
    Ok(entries)
}

/// Options of one driver mean nothing to another.
fn is_same_driver(path: &[String], base: &[MapEntry], over: &[MapEntry]) -> bool {
    let driver = |entries| text_of(entries, "driver");
    let is_logging = matches!(path, [services, _, logging] if services == "services" && logging == "logging");
    !is_logging || driver(over).is_none() || driver(base).is_none() || driver(base) == driver(over)
}

fn joined(how: How, mut items: Vec<YamlNode>, more: Vec<YamlNode>) -> Vec<YamlNode> {
    for one in more {
        let key = key_of(how, &one);
        let same = |item: &YamlNode| if key.is_some() { key_of(how, item) == key } else { is_same(item, &one) };
        match items.iter().position(same) {
            Some(at) => items[at] = one,
            None => items.push(one),
        }
    }
    items
}

/// What one of a list is known by.
fn key_of(how: How, item: &YamlNode) -> Option<String> {
    match (how, &item.value) {
        (How::Variables | How::Names, Value::Text { text, .. }) => text.split('=').next().map(str::to_owned),
        (How::Hosts, Value::Text { text, .. }) => Some(text.replacen([':', '='], "=", 1)),
        (How::Targets, Value::Text { text, .. }) => {
            let mut parts = text.split(':');
            let first = parts.next();
            parts.next().or(first).map(cleaned)
        }
        (How::InMemory, Value::Text { text, .. }) => text.split(':').next().map(cleaned),
        (How::Sources, Value::Text { text, .. }) => Some(text.clone()),
        (How::Targets, Value::Map(entries)) => text_of(entries, "target").as_deref().map(cleaned),
        (How::Sources, Value::Map(entries)) => {
            let target = text_of(entries, "target").or_else(|| text_of(entries, "source"))?;
            Some(target.strip_prefix(SECRETS).map_or(target.clone(), str::to_owned))
        }
        (How::Files, Value::Text { text, .. }) => Some(text.clone()),
        (How::Files, Value::Map(entries)) => text_of(entries, "path"),
        _ => None,
    }
}

/// A path without what leads nowhere else.
fn cleaned(path: &str) -> String {
    let parts = path.split('/').filter(|part| !matches!(*part, "" | "."));
    format!("/{}", parts.collect::<Vec<_>>().join("/"))
}

fn text_of(entries: &[MapEntry], key: &str) -> Option<String> {
    entries.iter().find_map(|(known, _, node)| match &node.value {
        Value::Text { text, .. } if known == key => Some(text.clone()),
        _ => None,
    })
}

/// Wherever the two stand.
fn is_same(one: &YamlNode, other: &YamlNode) -> bool {
    match (&one.value, &other.value) {
        (Value::Text { text, .. }, Value::Text { text: other, .. }) => text == other,
        (Value::List(list), Value::List(other)) => {
            list.len() == other.len() && list.iter().zip(other).all(|(one, other)| is_same(one, other))
        }
        (Value::Map(map), Value::Map(other)) => {
            let has =
                |(key, _, node): &MapEntry| other.iter().any(|(known, _, other)| known == key && is_same(node, other));
            map.len() == other.len() && map.iter().all(has)
        }
        (Value::Null, Value::Null) => true,
        _ => false,
    }
}

/// Both as maps, or both as lists, where the key may have either.
fn alike(how: How, base: YamlNode, over: YamlNode) -> (YamlNode, YamlNode) {
    let is_list = |node: &YamlNode| matches!(node.value, Value::List(_));
    match how {
        How::Variables | How::Names | How::Services if is_list(&base) != is_list(&over) => {
            (as_map(how, base), as_map(how, over))
        }
        How::OneOrMore | How::InMemory | How::Files => (as_list(how, base), as_list(how, over)),
        How::Hosts => (as_hosts(base), as_hosts(over)),
        How::Build => (as_build(base), as_build(over)),
        _ => (base, over),
    }
}

fn as_list(how: How, node: YamlNode) -> YamlNode {
    match node.value {
        Value::Text { .. } => YamlNode::new(node.place.clone(), Value::List(vec![node])),
        Value::Map(_) if how == How::Files => YamlNode::new(node.place.clone(), Value::List(vec![node])),
        _ => node,
    }
}

/// A list of `NAME=ADDRESS`.
fn as_hosts(node: YamlNode) -> YamlNode {
    let Value::Map(entries) = node.value else { return node };
    let addresses = |node: YamlNode| if let Value::List(all) = node.value { all } else { vec![node] };
    let hosts = entries.into_iter().flat_map(|(name, _, node)| {
        addresses(node).into_iter().filter_map(move |address| {
            let Value::Text { text, .. } = address.value else { return None };
            Some(YamlNode::new(address.place, Value::Text { text: format!("{name}={text}"), quoted: true }))
        })
    });
    YamlNode::new(node.place, Value::List(hosts.collect()))
}

fn as_build(node: YamlNode) -> YamlNode {
    match node.value {
        Value::Text { .. } => {
            let (place, entry) = (node.place.clone(), ("context".to_owned(), node.place.clone(), node));
            YamlNode::new(place, Value::Map(vec![entry]))
        }
        _ => node,
    }
}

fn as_map(how: How, node: YamlNode) -> YamlNode {
    let Value::List(items) = node.value else { return node };
    let entry = |item: YamlNode| {
        let Value::Text { text, .. } = item.value else { return None };
        let quoted =
            |text: &str| YamlNode::new(item.place.clone(), Value::Text { text: text.to_owned(), quoted: true });
        let (key, value) = match text.split_once('=') {
            Some((key, value)) if how == How::Variables => (key.to_owned(), quoted(value)),
            _ if how == How::Services => {
                let says = |(key, value): (&str, &str)| (key.to_owned(), item.place.clone(), quoted(value));
                let started = [("condition", "service_started"), ("required", "true")].map(says);
                let started = YamlNode::new(item.place.clone(), Value::Map(started.to_vec()));
                (text, started)
            }
            _ => (text, YamlNode::new(item.place.clone(), Value::Null)),
        };
        Some((key, item.place, value))
    };
    YamlNode::new(node.place, Value::Map(items.into_iter().filter_map(entry).collect()))
}

/// Without what `!reset` takes away.
pub fn settled(node: YamlNode) -> YamlNode {
    let stays = |node: &YamlNode| node.tag != Some(Tag::Reset);
    let value = match node.value {
        Value::Map(entries) => {
            let left = entries.into_iter().filter(|(_, _, node)| stays(node));
            Value::Map(left.map(|(key, place, node)| (key, place, settled(node))).collect())
        }
        Value::List(items) => Value::List(items.into_iter().filter(stays).map(settled).collect()),
        value => value,
    };
    YamlNode::new(node.place, value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::yaml;
    use std::path::Path;

    fn plain(node: &YamlNode) -> String {
        match &node.value {
            Value::Null => "~".to_owned(),
            Value::Text { text, .. } => text.clone(),
            Value::List(items) => format!("[{}]", items.iter().map(plain).collect::<Vec<_>>().join(" ")),
            Value::Map(entries) => {
                let of = |(key, _, node): &MapEntry| format!("{key}={}", plain(node));
                format!("{{{}}}", entries.iter().map(of).collect::<Vec<_>>().join(" "))
            }
        }
    }

    /// A service of several files.
    fn laid(texts: &[&str]) -> Result<String, String> {
        let load = |text: &&str| yaml::load(Path::new("f"), &format!("services: {{web: {text}}}")).unwrap();
        let mut files = texts.iter().map(load);
        let mut root = files.next().unwrap();
        for over in files {
            root = merged(root, over).map_err(|fault| fault.to_string())?;
        }
        let whole = plain(&settled(root));
        Ok(whole.strip_prefix("{services={web=").and_then(|rest| rest.strip_suffix("}}")).unwrap().to_owned())
    }

    // promise files: of several Compose files each is laid over those before it as Compose does it:
    //   maps merge, lists are joined, commands and single values are replaced; variables, labels,
    //   volumes and secrets are there once; `!override` replaces and `!reset` takes away; paths
    //   count from the first file's directory
    // held by: this, `tests/test_apply.py::test_several_compose_files`
    #[test]
    fn later_files_are_laid_over_earlier_ones() {
        let cases: [(&[&str], &str); 17] = [
            (&["{image: a, user: x}", "{image: b}"], "{image=b user=x}"),
            (&["{image: a, user: x}", "{image: ~, user: , cpus: 1}"], "{image=a user=x cpus=1}"),
            (&["{environment: {A: 1}}", "{environment: {A: }}"], "{environment={A=~}}"),
            (&["{logging: {options: {b: c}}}", "{logging: {driver: d}}"], "{logging={options={b=c} driver=d}}"),
            (&["{ports: [a, b]}", "{ports: [b, c]}", "{ports: ~}"], "{ports=[a b c]}"),
            (&["{command: [a, b]}", "{command: c}"], "{command=c}"),
            (
                &["{healthcheck: {test: [a], retries: 1}}", "{healthcheck: {test: [b]}}"],
                "{healthcheck={test=[b] retries=1}}",
            ),
            (&["{environment: [A=1, B=2]}", "{environment: [A=3, C]}"], "{environment=[A=3 B=2 C]}"),
            (&["{environment: [A=1, B]}", "{environment: {A: 3}}"], "{environment={A=3 B=~}}"),
            (&["{labels: {A: 1}}", "{labels: [A=3, b.c=d=e]}"], "{labels={A=3 b.c=d=e}}"),
            (
                &["{depends_on: [a]}", "{depends_on: {b: {condition: service_healthy}}}"],
                "{depends_on={a={condition=service_started required=true} b={condition=service_healthy}}}",
            ),
            (
                &["{volumes: ['a:/x', /y]}", "{volumes: ['b:/x:ro', {type: tmpfs, target: /y}]}"],
                "{volumes=[b:/x:ro {type=tmpfs target=/y}]}",
            ),
            (&["{dns: a}", "{dns: [b]}", "{dns: a}"], "{dns=[a b]}"),
            (&["{ports: [a]}", "{ports: !override [b]}", "{ports: [c]}"], "{ports=[b c]}"),
            (&["{ports: [a], user: x}", "{ports: !reset [], user: !reset ~}"], "{}"),
            (&["{ports: [a]}", "{ports: !reset ~}", "{ports: [b]}"], "{ports=[b]}"),
            (&["{logging: {driver: a, options: {b: c}}}", "{logging: {driver: d}}"], "{logging={driver=d}}"),
        ];
        for (texts, whole) in cases {
            assert_eq!(laid(texts).as_deref(), Ok(whole), "{texts:?}");
        }
        let refused = laid(&["{ports: [a]}", "{ports: a}"]).unwrap_err();
        assert_eq!(refused, "f:1:25: services.web.ports is a list at f:1:25: a value cannot override it");
    }
}
