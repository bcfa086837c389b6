//! What files that describe procs need of the API: what is looked at before one proc goes for
//! another.

use super::{InFile, LeftOpen, RunRequest};
use crate::keys::Hex;
use crate::name::ProcName;
use crate::spec::Spec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `POST /v1/validate`.
// The fields of a RunRequest, written out: a flattened struct hides unknown fields from the code
// that refuses them.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ValidateRequest {
    /// What would be run. A proc of its name may be there: it is taken for the one that makes room.
    pub spec: Spec,
    /// As for `runProc`; nothing is waited for.
    #[serde(default)]
    pub wait_ready: bool,
    /// Contents of the proc's secrets by their names. `spec.secrets` follows from them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, Hex>,
    /// What in `spec` the caller left to the daemon.
    #[serde(default)]
    pub left_open: LeftOpen,
    /// What the file that describes it says about making it.
    #[serde(default, skip_serializing_if = "InFile::is_none")]
    pub in_file: InFile,
    /// Others that will be gone by then: their ports are as good as free.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instead_of: Vec<ProcName>,
}

impl ValidateRequest {
    /// Whether `run` could be run when those of `instead_of` are gone.
    pub fn new(run: RunRequest, instead_of: Vec<ProcName>) -> ValidateRequest {
        let RunRequest { spec, wait_ready, secrets, left_open, in_file } = run;
        ValidateRequest { spec, wait_ready, secrets, left_open, in_file, instead_of }
    }

    /// What would be run, and which procs are gone by then.
    pub fn parts(self) -> (RunRequest, Vec<ProcName>) {
        let ValidateRequest { spec, wait_ready, secrets, left_open, in_file, instead_of } = self;
        (RunRequest { spec, wait_ready, secrets, left_open, in_file }, instead_of)
    }
}

/// What `POST /v1/compare` answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ContentsView {
    /// What of the proc contains something else than what the request would give it; empty if
    /// nothing does.
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
