//! What files that describe procs need of the API: how they have procs made, and what is looked at before one goes for another.

use super::RunRequest;
use crate::image::Pull;
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a file that describes a proc has it made. Kept with the request for `kip export`; nothing else goes by it.
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

/// `POST /v1/validate`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ValidateRequest {
    /// What would be run. A proc of its name may be there: it is taken for the one that makes room.
    #[serde(flatten)]
    pub run: RunRequest,
    /// Others that will be gone by then: their ports are as good as free.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instead_of: Vec<ProcName>,
}

/// What `POST /v1/compare` answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ContentsView {
    /// What of the proc contains something else than what the request would give it; empty if nothing does.
    pub differ: Vec<ContentView>,
}

/// Contents that are not those that are asked for.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ContentView {
    /// `tar` or `secret.NAME`, as keys of a `kip.toml` are called.
    pub key: String,
    /// Digest of what the proc has; null for secrets, of which nothing is given out.
    pub is: Option<String>,
    /// Digest of what it would get; null likewise.
    pub wanted: Option<String>,
}
