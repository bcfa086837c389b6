//! `x-kip`: what Kip has and Compose has no word for.

use super::super::context::Context;
use super::ComposeService;
use crate::place::meant;
use crate::table::ProcTable;
use crate::yaml::{Value, YamlNode};
use serde::Deserialize as _;

/// Keys of a `kip.toml` that `x-kip` may have: those for which Compose has no word.
pub(in crate::compose) const KIPS_OWN: [&str; 32] = [
    "before-checkpoint",
    "scale-max",
    "scale-min",
    "scale-method",
    "scale-volumes",
    "scale-probe",
    "scale-calm",
    "checkpoint-every",
    "checkpoint-keep",
    "template",
    "template-after",
    "before-sleep",
    "after-clone",
    "after-wake",
    "hook-timeout",
    "probe",
    "idle",
    "park-after",
    "archive-after",
    "tick",
    "clock",
    "hibernate",
    "prefetch",
    "lazy",
    "file-pages",
    "fallback",
    "never-sleep",
    "idle-dry-run",
    "allow-setuid",
    "tree",
    "spawn",
    "egress",
];

impl ComposeService {
    /// The times and ways of sleeping, with the keys of a `kip.toml`.
    pub(super) fn kips_own(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        for (key, place, value) in node.entries() {
            if !KIPS_OWN.contains(&key.as_str()) {
                let known = meant(key, KIPS_OWN.into_iter());
                context.fault(place, format!("{path} has no key {key}: {known}"));
                continue;
            }
            let json = match (key.as_str(), json(value)) {
                (_, serde_json::Value::Null) => continue,
                // As in a `kip.toml`, it is a list; one is written as one.
                ("probe", one @ serde_json::Value::String(_)) => serde_json::Value::Array(vec![one]),
                (_, json) => json,
            };
            // Each key is read onto the table of those before it, so that an error names one key.
            let all = serde_json::to_value(&self.table).expect("a table is JSON");
            let with = |json| {
                let mut all = all.clone();
                all[key] = json;
                ProcTable::deserialize(all)
            };
            let read = with(json).or_else(|e| number(value).map_or(Err(e), |number| with(number.into())));
            match read {
                Ok(table) => self.table = table,
                Err(e) => context.fault(&value.place, format!("{path}.{key}: {e}")),
            }
        }
    }
}

/// A number, for the keys that take nothing else.
fn number(node: &YamlNode) -> Option<u64> {
    match &node.value {
        Value::Text { text, quoted: false } => text.parse().ok(),
        _ => None,
    }
}

/// A value of `x-kip`. Numbers stay text, which most keys of a `kip.toml` take as well.
fn json(node: &YamlNode) -> serde_json::Value {
    match &node.value {
        Value::Null => serde_json::Value::Null,
        Value::Text { text, quoted: false } if matches!(text.as_str(), "true" | "false") => (text == "true").into(),
        Value::Text { text, .. } => text.as_str().into(),
        Value::List(list) => list.iter().map(json).collect(),
        Value::Map(map) => map.iter().map(|(key, _, value)| (key.clone(), json(value))).collect(),
    }
}
