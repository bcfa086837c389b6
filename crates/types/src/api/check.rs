//! A trial before a proc is trusted, for `kip check`.

use super::{CHECK_STEPS, RunRequest};
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
    /// The trial may write to the volumes. Not to those that a proc has which runs or sleeps.
    #[serde(default)]
    pub volumes: bool,
    /// The trial reaches what the proc would: its network, the outside. Otherwise it reaches only itself.
    #[serde(default)]
    pub network: bool,
}

/// One step of a trial.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckStep {
    /// What was done: `start`, `sleep` or `wake`.
    #[schemars(extend("enum" = CHECK_STEPS))]
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

/// An answer to a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckAnswer {
    /// It was tried.
    Yes,
    /// It is known not to be possible.
    No,
    /// It was not tried.
    Untried,
}

/// What a trial says about something, and on what that rests.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckVerdict {
    /// The answer.
    pub answer: CheckAnswer,
    /// Why it is that, and what it depends on, a line each.
    pub because: Vec<String>,
}

/// What a trial showed.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckView {
    /// What was done, in order.
    pub steps: Vec<CheckStep>,
    /// It slept in each tier that was tried, in one at least, and was as before when it woke.
    pub sleeps: bool,
    /// What was not tried and why, a line each.
    pub untried: Vec<String>,
    /// Whether it can go on elsewhere.
    pub moves: CheckVerdict,
    /// Whether several can be made of it.
    pub clones: CheckVerdict,
    /// What of it ties it to this machine, whatever was tried; empty if that is nothing known.
    pub pinned: Vec<String>,
}
