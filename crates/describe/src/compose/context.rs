//! What is gathered while a Compose file is read, and how its values are taken.

use crate::Lookup;
use crate::place::{Fault, Note, SourcePosition, Weight};
use crate::yaml::{Value, YamlNode};
use kip_types::spec::{BadDuration, BadSize, parse_duration_ms, parse_size};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Gathers mistakes and what Kip lacks.
pub struct Context<'a> {
    pub directory: &'a Path,
    pub lookup: Lookup<'a>,
    /// In front of the names of volumes, so that files do not share them by accident.
    pub project: String,
    /// Volumes by the file's name for them.
    pub volumes: BTreeMap<String, String>,
    /// Those of them that must be there already, by their names on the machine.
    pub external: BTreeSet<String>,
    /// Networks that are internal.
    pub internal: BTreeSet<String>,
    /// Files of secrets by the file's name for them.
    pub secrets: BTreeMap<String, PathBuf>,
    pub faults: Vec<Fault>,
    pub notes: Vec<Note>,
}

impl<'a> Context<'a> {
    pub fn new(directory: &'a Path, lookup: Lookup<'a>) -> Context<'a> {
        let (project, volumes, secrets) = (String::new(), BTreeMap::new(), BTreeMap::new());
        let (faults, notes) = (Vec::new(), Vec::new());
        Context {
            directory,
            lookup,
            project,
            volumes,
            external: BTreeSet::new(),
            internal: BTreeSet::new(),
            secrets,
            faults,
            notes,
        }
    }

    pub fn fault(&mut self, place: &SourcePosition, message: impl Into<String>) {
        self.faults.push(Fault::new(place, message));
    }

    /// `key` is asked for and Kip lacks it.
    pub fn lacks(&mut self, place: &SourcePosition, weight: Weight, key: &str, why: &str) {
        self.notes.push(Note { place: place.clone(), weight, message: format!("{key} is not supported: {why}") });
    }

    /// Something is there, and has a price.
    pub fn remark(&mut self, place: &SourcePosition, key: &str, what: &str) {
        let message = format!("{key}: {what}");
        self.notes.push(Note { place: place.clone(), weight: Weight::Harmless, message });
    }

    /// The variable `name` has no value anywhere. Told once.
    pub fn unset(&mut self, place: &SourcePosition, name: &str) {
        let message = format!("the variable {name} is not set: there is nothing in its place");
        if !self.notes.iter().any(|note| note.message == message) {
            self.notes.push(Note { place: place.clone(), weight: Weight::Harmless, message });
        }
    }

    /// One scalar.
    pub fn text(&mut self, node: &YamlNode, key: &str) -> Option<String> {
        match &node.value {
            Value::Text { text, .. } => Some(text.clone()),
            Value::Null => None,
            _ => {
                self.fault(&node.place, format!("{key}: this is {}: write one value", node.kind()));
                None
            }
        }
    }

    /// One scalar, read by `read`.
    pub fn parsed<T, E: std::fmt::Display>(
        &mut self,
        node: &YamlNode,
        key: &str,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = self.text(node, key)?;
        read(&text).map_err(|e| self.fault(&node.place, format!("{key}: {e}"))).ok()
    }

    pub fn flag(&mut self, node: &YamlNode, key: &str) -> bool {
        let read = |text: &str| match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Ok(true),
            "false" | "no" | "off" => Ok(false),
            _ => Err("write true or false"),
        };
        self.parsed(node, key, read).unwrap_or(false)
    }

    /// A list; one scalar is a list of one.
    pub fn list<'n>(&mut self, node: &'n YamlNode, key: &str) -> Vec<&'n YamlNode> {
        match &node.value {
            Value::List(list) => list.iter().collect(),
            Value::Text { .. } => vec![node],
            Value::Null => Vec::new(),
            Value::Map(_) => {
                self.fault(&node.place, format!("{key}: this is a map: write a list"));
                Vec::new()
            }
        }
    }

    /// A list of scalars.
    pub fn texts(&mut self, node: &YamlNode, key: &str) -> Vec<String> {
        let list = self.list(node, key);
        list.into_iter().filter_map(|one| self.text(one, key)).collect()
    }

    /// A map, or a list of `KEY=VALUE`; without a value where none is given.
    pub fn pairs(&mut self, node: &YamlNode, key: &str) -> Vec<(String, Option<String>)> {
        match &node.value {
            Value::Map(entries) => {
                entries.iter().map(|(name, _, value)| (name.clone(), self.text(value, key))).collect()
            }
            _ => {
                let split = |text: String| match text.split_once('=') {
                    Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                    None => (text, None),
                };
                self.texts(node, key).into_iter().map(split).collect()
            }
        }
    }
}

/// `90s`, `1m30s`, `500ms`, in milliseconds.
pub fn time(text: &str) -> Result<u64, BadDuration> {
    let mut rest = text;
    let mut ms = 0u64;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
        let unit = rest[number..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |at| number + at);
        ms = ms.saturating_add(parse_duration_ms(&rest[..unit])?);
        rest = &rest[unit..];
    }
    if text.is_empty() { parse_duration_ms(text) } else { Ok(ms) }
}

/// `512m`, `1gb`, `64M`: Compose does not mind the case.
pub fn size(text: &str) -> Result<u64, BadSize> {
    parse_size(&text.to_ascii_uppercase())
}
