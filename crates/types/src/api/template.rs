//! Templates: requests and answers.

use crate::keys::KeysWrap;
use crate::spec::Spec;
use crate::{ProcName, TemplateId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `POST /v1/procs/NAME/template`.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TemplateRequest {
    /// Command that a shell runs inside before it is taken. One that fails refuses the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// A template: memory and files of a proc that was ready, for procs of the same kind to begin from.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct TemplateView {
    /// Made of what determines it: image or host files, command, environment, secrets, limits.
    pub id: TemplateId,
    /// The proc that it was taken from had this name.
    pub name: ProcName,
    /// When it was taken, or imported, milliseconds since the epoch.
    pub taken_at_ms: u64,
    /// When a proc last began from it, milliseconds since the epoch; null if none has.
    pub used_at_ms: Option<u64>,
    /// Memory that it keeps on the disk, bytes. Shared with procs that have begun from it.
    pub memory_bytes: u64,
    /// Files of the proc that it keeps, bytes.
    pub file_bytes: u64,
    /// How long the proc stood still for it at most, microseconds; 0 if it slept.
    pub still_us: u64,
    /// Until it was durable, from the moment when the proc was ready, microseconds.
    pub total_us: u64,
    /// What the proc was asked to be; the values of its environment, which the template has in its
    /// memory, are empty.
    pub spec: Spec,
}

/// Answer of `GET /v1/templates`: the one that was taken first comes first.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct TemplatesView {
    /// The templates.
    pub templates: Vec<TemplateView>,
}

/// `POST /v1/templates/ID/export` and `POST /v1/templates/import`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateFileRequest {
    /// Absolute path of the file on the daemon's machine; an export makes it.
    pub file: String,
    /// What closes it.
    pub wrap: KeysWrap,
}

/// A template that was written into a file, or has come from one.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct TemplateFileView {
    /// The template, as it is here.
    pub template: TemplateView,
    /// Its id where it was exported: of the files of a machine another one has others.
    pub exported_id: TemplateId,
    /// The file.
    pub file: String,
    /// Length of the file, bytes.
    pub file_bytes: u64,
}
