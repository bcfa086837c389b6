//! What `kip top` shows: procs side by side, the room that they share and the cache.

use crate::lifecycle::{StateName, Tier};
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `kip top --json`: one look at all procs.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct TopView {
    /// When, milliseconds since the epoch.
    pub at_ms: u64,
    /// Number of procs by tier, `stopped` for those in none.
    pub tiers: std::collections::BTreeMap<String, usize>,
    /// Proportional sets of all running procs, bytes.
    pub held_bytes: u64,
    /// What the sleepers would take if they ran and do not take, bytes.
    pub saved_bytes: u64,
    /// Wakes of all procs in the last 60 seconds.
    pub wakes_last_minute: u64,
    /// How full memory is; null from older daemons.
    #[serde(default)]
    pub room: Option<RoomView>,
    /// What is kept on the local disk of what is in the store; null without such a cache.
    #[serde(default)]
    pub cache: Option<CacheView>,
    /// Sorted by tier (hot first), then by memory (most first), then by name.
    pub procs: Vec<TopProc>,
}

/// A proc in `TopView`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct TopProc {
    /// Name.
    pub name: ProcName,
    /// Its state.
    pub state: StateName,
    /// Where its memory is; null for a stopped proc.
    pub tier: Option<Tier>,
    /// Its proportional set, bytes; 0 unless running.
    pub memory_bytes: u64,
    /// What it would take of memory if it ran and does not take, bytes; null unless asleep, and
    /// where it is not recorded.
    pub saved_bytes: Option<u64>,
    /// Milliseconds without activity; null unless running.
    pub idle_ms: Option<u64>,
    /// CPU time since the look before, in percent of a core; null unless it ran at both.
    pub cpu_percent: Option<f64>,
    /// How often it was woken since it was last started.
    pub wakes: u64,
    /// How long its last wake took, microseconds.
    pub last_wake_us: Option<u64>,
    /// When that was, milliseconds since the epoch.
    pub last_wake_at_ms: Option<u64>,
    /// What woke it.
    pub last_trigger: Option<String>,
}

/// Memory in use and the marks that it is held against (`kip up --memory`, `--memory-high`,
/// `--memory-low`).
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct RoomView {
    /// What this daemon's procs hold together, with their working sets, and what wakes under way
    /// will; without `--memory`, what the whole machine uses if that is more; bytes.
    pub used_bytes: u64,
    /// All that may be used, bytes.
    pub limit_bytes: u64,
    /// Above this idle procs are put to sleep and new ones refused, bytes.
    pub high_bytes: u64,
    /// Until no more than this is used, bytes.
    pub low_bytes: u64,
    /// Of what is used, working sets of hibernated procs that are kept in memory, bytes.
    #[serde(default)]
    pub set_bytes: u64,
}

/// The cache of what is in the store (`kip up --cache`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CacheView {
    /// What it takes on the local disk, bytes.
    pub bytes: u64,
    /// What it may, bytes.
    pub limit_bytes: u64,
}
