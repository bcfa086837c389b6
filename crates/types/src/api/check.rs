//! A trial before a proc is trusted, for `kip check`.

use super::RunRequest;
use crate::lifecycle::Tier;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `POST /v1/check`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckRequest {
    /// What would be run. The trial has a name and host ports of its own.
    pub run: RunRequest,
    /// The lowest tier that it is sent to.
    pub to: Tier,
    /// The trial may write to the volumes.
    #[serde(default)]
    pub volumes: bool,
}

/// One step of a trial.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckStep {
    /// What was done: `start`, `sleep` or `wake`.
    pub step: String,
    /// Where it went, or came from; null for the start.
    pub tier: Option<Tier>,
    /// How long that took, microseconds; null if it was refused.
    pub us: Option<u64>,
    /// What a sleep wrote, bytes.
    pub bytes: Option<u64>,
    /// What stood in the way, or was not as before; empty if nothing.
    pub refused: Vec<String>,
}

/// What a trial showed.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckView {
    /// What was done, in order.
    pub steps: Vec<CheckStep>,
    /// It slept in each tier that it was to and was as before when it woke.
    pub sleeps: bool,
    /// What ties it to this machine; empty if, once archived, it wakes elsewhere too.
    pub pinned: Vec<String>,
}
