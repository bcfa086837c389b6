//! Why a request was not carried out: one shape, and codes of a closed list.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Why a request was not carried out. `message` is one clear line: what, where, what to do.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize, thiserror::Error)]
#[error("{message}{}", .hint.as_deref().map(|hint| format!(": {hint}")).unwrap_or_default())]
pub struct Refusal {
    /// What kind of refusal, for programs.
    pub code: Code,
    /// One line for people.
    pub message: String,
    /// What to do about it, where the message does not say so itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Refusal {
    /// A refusal of the given kind.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Refusal { code, message: message.into(), hint: None }
    }

    /// The same with what to do about it.
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Refusal { hint: Some(hint.into()), ..self }
    }
}

/// Kinds of refusals, and the status each has. The list is closed: within `/v1` none is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// 400, or 426 without the upgrade that an exec needs: the request itself is wrong, or what it
    /// names is, a damaged image for example.
    Invalid,
    /// 401: there is no token, or none that this daemon knows, or it has expired.
    Unauthorized,
    /// 403: the token does not allow this, or it can be asked for on the daemon's machine only; or
    /// a registry does not give an image to the login that asked for it.
    Forbidden,
    /// 404: there is no such proc, image, snapshot, volume, key or token, no such file of an image,
    /// or no such node or lease of the name tree.
    Unknown,
    /// 404, or 405 if there is the path but not for this method: this API has no such route.
    NoRoute,
    /// 409: a name, port or path is taken.
    Taken,
    /// 409: the state of the proc, or of the node, does not allow it now.
    State,
    /// 413: the body is too long.
    TooLarge,
    /// 422: the proc cannot sleep; the message names what stands in the way.
    CannotSleep,
    /// 503: the machine lacks something, now: memory, disk, a kernel feature, a registry that
    /// answers.
    Exhausted,
    /// 500: something failed that should not have.
    Failed,
}
