//! What a proc has used, for `kip meter`.

use super::TRIGGERS;
use crate::lifecycle::{StateName, Tier};
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `GET /v1/meters` and `GET /v1/procs/NAME/meter`, as their query.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeterRequest {
    /// Only what was used after that, milliseconds since the epoch, to within a quarter of an hour;
    /// from the proc's beginning without it.
    pub since_ms: Option<u64>,
}

/// What a proc has used from one moment to another.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct MeterView {
    /// Name.
    pub name: ProcName,
    /// Its state.
    pub state: StateName,
    /// Where its memory is; null for a stopped proc, whose time does not count.
    pub tier: Option<Tier>,
    /// Counted from then on, milliseconds since the epoch.
    pub from_ms: u64,
    /// To then.
    pub to_ms: u64,
    /// What it holds where its tier has it, when it was last looked at, bytes.
    pub held_bytes: u64,
    /// Use by tier; those that it never was in are left out.
    pub tiers: Vec<TierMeterView>,
    /// CPU time that the kernel has counted for its cgroups, microseconds; work that sleeping and
    /// waking does in them included.
    pub cpu_us: u64,
    /// TCP connections that were made to it, as the kernel has counted them, without those of Kip's
    /// own checks.
    pub connections: u64,
    /// UDP datagrams that came to it, as the kernel has counted them.
    pub datagrams: u64,
    /// Processes that the kernel has killed because its memory was at its limit.
    #[serde(default)]
    pub oom_kills: u64,
    /// Its wakes.
    pub wakes: Vec<WakesView>,
}

/// Use of one tier.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct TierMeterView {
    /// The tier.
    pub tier: Tier,
    /// How long it was in it, microseconds.
    pub time_us: u64,
    /// What it held there, times how long: memory of the hot and the hibernated, the local disk of
    /// the parked, the store of the archived; bytes times seconds.
    pub byte_seconds: f64,
    /// Of its CPU time what was used there, the work of the wake that ended the tier included;
    /// microseconds. Of the hot one starting and ending it, too.
    pub cpu_us: u64,
    /// Of its connections those that came there: of a sleeper those that woke it, or came until it
    /// ran.
    pub connections: u64,
    /// Of its datagrams, likewise.
    pub datagrams: u64,
}

/// Wakes of one kind.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct WakesView {
    /// The tier it woke from.
    pub from: Tier,
    /// What for: `tcp`, `udp`, `timer`, `touch` (its own memory), `wake`, `exec`, `stop` (commands)
    /// or `other`.
    #[schemars(extend("enum" = TRIGGERS))]
    pub trigger: String,
    /// How often.
    pub count: u64,
}
