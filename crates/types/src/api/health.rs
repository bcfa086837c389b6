//! How a proc is, as its probes see it.

use crate::life::Check;
use crate::lifecycle::{StateName, Tier};
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// The check succeeded.
    Healthy,
    /// The check failed.
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

/// A probe and its last answer.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ProbeView {
    /// Port of the host that answers the probe.
    pub host_port: u16,
    /// The check.
    pub check: Check,
    /// Last result of the check.
    pub health: Health,
    /// Cause of the failure; null unless unhealthy.
    pub reason: Option<String>,
    /// Age of that result, milliseconds; null if it is unknown.
    pub checked_ms: Option<u64>,
}

/// `GET /v1/procs/NAME/health`, and what a probe's own port answers: there with status 200 or 503,
/// as `available` says.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct HealthView {
    /// Name of the proc.
    pub name: ProcName,
    /// State of the proc; `starting` also until its readiness check succeeds.
    pub state: StateName,
    /// Tier of the proc, where its memory is; null for a stopped proc.
    pub tier: Option<Tier>,
    /// True if requests are answered: the proc runs, or would wake for them, and no probe says that
    /// it is unhealthy.
    pub available: bool,
    /// Reason why the proc is unavailable; null if it is available.
    pub reason: Option<String>,
    /// Probes of the proc; for a sleeping proc their last results.
    pub probes: Vec<ProbeView>,
}
