//! `kip.toml`: the text, what is wrong with it and where, and its schema.
//!
//! Every key of a proc is looked at by name first, so that all that are not known are told at once,
//! then the table is read as a whole; procs are read one by one, so that the mistakes of one do not
//! hide those of another.

use crate::document::{Described, Document, Reading};
use crate::environ;
use crate::place::{Fault, Faults, SourcePosition, meant};
use crate::table::{ProcTable, read_secrets};
use kip_types::life::TemplateWhen;
use kip_types::name::ProcName;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A file that describes procs.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "kip.toml")]
#[allow(dead_code, reason = "the schema's; the text is read table by table")]
struct KipFile {
    /// What its procs are known by to belong together, for `kip apply --prune`; without it the
    /// file's own path.
    project: Option<String>,
    /// The procs, by name.
    #[serde(default)]
    proc: BTreeMap<ProcName, ProcTable>,
}

/// JSON Schema of a `kip.toml`.
pub fn schema() -> serde_json::Value {
    let settings = SchemaSettings::draft2020_12();
    let mut schema = settings.into_generator().into_root_schema_for::<KipFile>();
    schema.insert("title".to_owned(), "kip.toml".into());
    schema.into()
}

/// Names of the keys of a proc.
fn keys() -> Vec<String> {
    let schema = schemars::schema_for!(ProcTable);
    let properties = schema.get("properties").and_then(|p| p.as_object()).expect("a struct has properties");
    properties.keys().cloned().collect()
}

/// Reads a `kip.toml`.
pub fn read(reading: &Reading<'_>) -> Result<Document, Faults> {
    let place = |span: Range<usize>| SourcePosition::at(reading.path, reading.text, span.start);
    let root = DeTable::parse(reading.text).map_err(|e| {
        let at = place(e.span().unwrap_or_default());
        Fault::new(&at, one_line(e.message()))
    })?;
    let mut faults = Vec::new();
    let mut document = Document { project: None, procs: Vec::new(), left_out: Vec::new(), notes: Vec::new() };
    for (key, value) in root.into_inner() {
        let at = place(value.span());
        match (key.get_ref().as_ref(), value.into_inner()) {
            ("project", DeValue::String(name)) if !name.is_empty() => document.project = Some(name.into_owned()),
            ("project", _) => faults.push(Fault::new(&at, "project: write a name, for example \"shop\"")),
            ("proc", DeValue::Table(procs)) => {
                // By place, which is the order of the file.
                let mut procs: Vec<_> = procs.into_iter().collect();
                procs.sort_by_key(|(name, _)| name.span().start);
                for (name, value) in procs {
                    match proc(reading, name.get_ref(), place(name.span()), value) {
                        Ok(described) => document.procs.push(described),
                        Err(Faults(more)) => faults.extend(more),
                    }
                }
            }
            ("proc", _) => faults.push(Fault::new(&at, "proc: write a table for each proc, [proc.NAME]")),
            (other, _) => {
                let known = meant(other, ["proc", "project"].into_iter());
                faults.push(Fault::new(&place(key.span()), format!("there is no key {other}: {known}")));
            }
        }
    }
    faults.sort_by_key(|fault| (fault.place.line, fault.place.column));
    if faults.is_empty() { Ok(document) } else { Err(Faults(faults)) }
}

/// Reads the table of one proc.
fn proc(
    reading: &Reading<'_>,
    name: &str,
    at: SourcePosition,
    value: Spanned<DeValue<'_>>,
) -> Result<Described, Faults> {
    let place = |span: &Range<usize>| SourcePosition::at(reading.path, reading.text, span.start);
    let DeValue::Table(table) = value.get_ref() else {
        return Err(Fault::new(&place(&value.span()), format!("proc.{name}: write a table, [proc.{name}]")).into());
    };
    let spans: BTreeMap<String, Range<usize>> =
        table.iter().map(|(key, value)| (key.get_ref().to_string(), value.span())).collect();
    let known = keys();
    let unknown: Vec<Fault> = table
        .keys()
        .filter(|key| !known.iter().any(|k| k == key.get_ref().as_ref()))
        .map(|key| {
            let word = key.get_ref().as_ref();
            let meant = meant(word, known.iter().map(String::as_str));
            Fault::new(&place(&key.span()), format!("proc.{name} has no key {word}: {meant}"))
        })
        .collect();
    if !unknown.is_empty() {
        return Err(Faults(unknown));
    }
    let proc_name: ProcName = name.parse().map_err(|e| Fault::new(&at, format!("{e}")))?;
    let table = ProcTable::deserialize(value.into_deserializer()).map_err(|e| {
        let span = e.span().unwrap_or_default();
        let holds = |of: &Range<usize>| of.start <= span.start && span.start < of.end.max(of.start + 1);
        let key = spans.iter().find(|(_, of)| holds(of)).map(|(key, _)| format!(".{key}")).unwrap_or_default();
        Fault::new(&place(&span), format!("proc.{name}{key}: {}", one_line(e.message())))
    })?;
    let at_key = |key: &str| spans.get(key).map_or_else(|| at.clone(), &place);
    if let Some((key, message)) = contradiction(&table) {
        return Err(Fault::new(&at_key(key), format!("proc.{name}{message}")).into());
    }
    let directory = directory(reading.path);
    let mut env = Vec::new();
    for file in table.env_file.iter().flat_map(|files| &files.0) {
        let said = environ::read(&directory.join(file), reading.lookup, false, &|_| ());
        env.extend(said.map_err(|e| Fault::new(&at_key("env-file"), format!("proc.{name}.env-file: {e}")))?);
    }
    let secrets = read_secrets(&table.secret, &directory)
        .map_err(|(secret, e)| Fault::new(&at_key("secret"), format!("proc.{name}.secret.{secret}: {e}")))?;
    let described = Described {
        place: at.clone(),
        called: name.to_owned(),
        external: Vec::new(),
        pull: table.pull.unwrap_or_default(),
        plain_http: table.plain_http,
        depends_on: table.depends_on.clone(),
        request: table
            .into_request(proc_name, &directory, env, secrets)
            .map_err(|e| Fault::new(&at_key("volume"), format!("proc.{name}.volume: {e}")))?,
    };
    Ok(described)
}

/// What cannot stand together, by the key that it is told at.
fn contradiction(table: &ProcTable) -> Option<(&'static str, &'static str)> {
    let without_image = [
        ("entrypoint", table.entrypoint.is_some(), ".entrypoint: only an image has one, and there is no key image"),
        ("pull", table.pull.is_some(), ".pull: only an image is pulled, and there is no key image"),
        ("plain-http", table.plain_http, ".plain-http: only an image is pulled, and there is no key image"),
        ("publish-all", table.publish_all, ".publish-all: only an image exposes ports, and there is no key image"),
    ];
    if table.tar.is_some() && table.image.is_some() {
        return Some(("tar", ".tar: an image has all of its files: write tar or image"));
    }
    if table.idle_dry_run && table.never_sleep {
        return Some((
            "idle-dry-run",
            ".idle-dry-run: it cannot be used with never-sleep, which leaves nothing to try",
        ));
    }
    if table.ready_timeout.is_some() && table.ready.is_none() {
        return Some(("ready-timeout", ".ready-timeout: nothing says what ready is: write ready = \"tcp:PORT\", too"));
    }
    if table.template_after.is_some() && table.template != Some(TemplateWhen::Auto) {
        return Some(("template-after", ".template-after: no template is taken: write template = \"auto\", too"));
    }
    if table.checkpoint_keep.is_some() && table.checkpoint_every.is_none() {
        return Some(("checkpoint-keep", ".checkpoint-keep: none is taken: write checkpoint-every = \"10m\", too"));
    }
    let of_scale = [
        ("scale-min", table.scale_min.is_some(), ".scale-min: it is not scaled: write scale-max = 8, too"),
        ("scale-method", table.scale_method.is_some(), ".scale-method: it is not scaled: write scale-max = 8, too"),
        ("scale-volumes", table.scale_volumes.is_some(), ".scale-volumes: it is not scaled: write scale-max = 8, too"),
        ("scale-probe", table.scale_probe.is_some(), ".scale-probe: it is not scaled: write scale-max = 8, too"),
        ("scale-calm", table.scale_calm.is_some(), ".scale-calm: it is not scaled: write scale-max = 8, too"),
    ];
    if table.scale_max.is_none()
        && let Some((key, _, message)) = of_scale.into_iter().find(|(_, there, _)| *there)
    {
        return Some((key, message));
    }
    if table.image.is_none() {
        if let Some((key, _, message)) = without_image.into_iter().find(|(_, there, _)| *there) {
            return Some((key, message));
        }
        if table.command.as_ref().is_none_or(|words| words.0.is_empty()) {
            return Some(("command", " says no program: write command = [\"PROGRAM\", \"ARGUMENT\"], or image"));
        }
    }
    None
}

/// Where relative paths of a file count from: absolute.
pub fn directory(path: &Path) -> std::path::PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    absolute.parent().map_or_else(|| "/".into(), Path::to_owned)
}

fn one_line(message: &str) -> String {
    message.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
