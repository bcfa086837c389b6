//! The request that makes a proc. A proc keeps the one that made it, which is why it is not with
//! the other messages of the API.

use super::Spec;
use crate::image::Pull;
use crate::keys::Hex;
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `POST /v1/procs`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct RunRequest {
    /// What to run.
    pub spec: Spec,
    /// Return only when the ports listen.
    #[serde(default)]
    pub wait_ready: bool,
    /// Contents of the proc's secrets by their names. `spec.secrets` follows from them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, Hex>,
    /// What in `spec` the caller left to the daemon. The API fills it in; a worker sees nothing
    /// left open.
    #[serde(default)]
    pub left_open: LeftOpen,
    /// What the file that describes it says about making it.
    #[serde(default, skip_serializing_if = "InFile::is_none")]
    pub in_file: InFile,
}

/// Parts of a `Spec` that a caller left to the daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LeftOpen {
    /// `spec.name` is only a stem: `-` and the lowest number that is free are added to it.
    pub name: bool,
    /// `spec.timing.idle_ms` is the daemon's default.
    pub idle: bool,
    /// `spec.timing.park_after_ms` is the daemon's default.
    pub park_after: bool,
    /// `spec.timing.archive_after_ms` is the daemon's default.
    pub archive_after: bool,
}

/// How a file that describes a proc has it made. Kept with the request for `kip export`; nothing
/// else goes by it.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default)]
pub struct InFile {
    /// Those that are started before it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<ProcName>,
    /// When its image is brought, where the file says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pull: Option<Pull>,
    /// Its registry is asked without TLS.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plain_http: bool,
    /// The name that the file gives its procs together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
}

impl InFile {
    /// Nothing is said.
    pub fn is_none(&self) -> bool {
        *self == InFile::default()
    }
}
