//! Messages about tokens, which let clients in by TCP: `kip token`.

use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a token allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// To look: GET. It sees logs, files, sockets and names of variables, but no environment's
    /// values.
    Read,
    /// Everything but tokens themselves, which makes its holder as powerful as root on the daemon's
    /// machine.
    #[default]
    Write,
}

/// `POST /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// What it is called; in the alphabet of procs' names.
    pub name: ProcName,
    /// What it allows.
    #[serde(default)]
    pub scope: Scope,
    /// For how long, milliseconds; null for ever.
    #[serde(default)]
    pub expires_in_ms: Option<u64>,
}

/// A token, as far as it is kept: an element of `GET /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TokenView {
    /// What it is called.
    pub name: ProcName,
    /// What it allows.
    pub scope: Scope,
    /// When it was made, milliseconds since the epoch.
    pub created_at_ms: u64,
    /// From when on it is refused, milliseconds since the epoch; null for never.
    pub expires_at_ms: Option<u64>,
}

/// What `POST /v1/tokens` answers.
#[derive(Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct NewToken {
    /// The token itself. It is shown this once; only its hash is kept.
    pub token: String,
    /// About it.
    #[serde(flatten)]
    pub view: TokenView,
}
