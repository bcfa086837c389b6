//! A trial before a proc is trusted, for `kip check`.

use super::RunRequest;
use crate::lifecycle::Tier;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `POST /v1/check`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckRequest {
    /// The proc to try. The trial has a name and host ports of its own.
    pub run: RunRequest,
    /// Lowest tier that the trial is sent to.
    pub to: Tier,
    /// The trial may write to the volumes, except to volumes of a proc that runs or sleeps.
    #[serde(default)]
    pub volumes: bool,
    /// The trial has the network of the proc, the outside included. Otherwise the trial reaches
    /// only itself.
    #[serde(default)]
    pub network: bool,
}

/// What a step of a trial did.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize, strum::Display, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum CheckOperation {
    /// The trial was started.
    Start,
    /// The trial was put to sleep.
    Sleep,
    /// The trial was woken.
    Wake,
    /// A word of a newer Kip.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// One step of a trial.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckStep {
    /// Operation.
    pub step: CheckOperation,
    /// Tier that the trial went to or woke from; null for the start.
    pub tier: Option<Tier>,
    /// Duration of the step, microseconds; null if the step was refused.
    pub us: Option<u64>,
    /// Bytes that the sleep wrote.
    pub bytes: Option<u64>,
    /// Causes of a refusal, and differences after a wake; empty if there are none.
    pub refused: Vec<String>,
}

/// An answer to a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckAnswer {
    /// The trial has shown it.
    Yes,
    /// Known to be impossible.
    No,
    /// Not tried.
    Untried,
}

/// Verdict of a trial and its reasons.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckVerdict {
    /// The answer.
    pub answer: CheckAnswer,
    /// Reasons and conditions of the answer, a line each.
    pub because: Vec<String>,
}

/// Result of a trial.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckView {
    /// Steps of the trial, in order.
    pub steps: Vec<CheckStep>,
    /// True: the trial slept in each tier that was tried, in one at least, and was unchanged after
    /// each wake.
    pub sleeps: bool,
    /// Tiers that were not tried and why, a line each.
    pub untried: Vec<String>,
    /// Whether the proc can move to another machine.
    pub moves: CheckVerdict,
    /// Whether the proc can be cloned.
    pub clones: CheckVerdict,
    /// Things that tie the proc to this machine, whatever was tried; empty if none is known.
    pub pinned: Vec<String>,
}
