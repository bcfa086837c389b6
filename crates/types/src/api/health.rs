//! How a proc is, as its probes see it.

use crate::life::Check;
use crate::lifecycle::{StateName, Tier};
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a check said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// It did what it is there for.
    Healthy,
    /// It did not.
    Unhealthy,
    /// No answer yet.
    Unknown,
}

impl std::fmt::Display for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Health::Healthy => "healthy",
            Health::Unhealthy => "unhealthy",
            Health::Unknown => "unknown",
        })
    }
}

/// One probe, and what it was answered last.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ProbeView {
    /// Port of the host where it is asked.
    pub host_port: u16,
    /// The check.
    pub check: Check,
    /// What that said last.
    pub health: Health,
    /// What was wrong; null unless unhealthy.
    pub reason: Option<String>,
    /// How long ago that was, milliseconds; null if it is unknown.
    pub checked_ms: Option<u64>,
}

/// `GET /v1/procs/NAME/health`, and what a probe's own port answers: there with status 200 or 503, as `available` says.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct HealthView {
    /// Name.
    pub name: ProcName,
    /// Its state; `starting` also until its check says that it is ready.
    pub state: StateName,
    /// Where its memory is; null for a stopped proc.
    pub tier: Option<Tier>,
    /// Requests are answered: it runs, or is asleep and would wake for them, and no probe says that it is unhealthy.
    pub available: bool,
    /// Why not; null if it is available.
    pub reason: Option<String>,
    /// Its probes; of a sleeper as they were when it was awake.
    pub probes: Vec<ProbeView>,
}
