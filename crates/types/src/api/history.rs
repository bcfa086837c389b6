//! How procs were spread over the tiers lately, for clients that draw it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One sample of all procs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct HistorySample {
    /// Time of the sample, milliseconds since the epoch.
    pub at_ms: u64,
    /// Number of procs that run.
    pub hot: u32,
    /// Procs whose processes are there and whose memory is paged out.
    pub hibernated: u32,
    /// Procs on the local disk.
    pub parked: u32,
    /// Procs in the store.
    pub archived: u32,
    /// Procs that have no tier: stopped ones, and those that are being started again.
    pub stopped: u32,
    /// Memory that hot and hibernated procs hold, bytes.
    pub held_bytes: u64,
    /// Memory that sleepers would take if they ran and do not take, bytes: the sum of `saved_bytes`
    /// of all procs.
    pub saved_bytes: u64,
}

/// `GET /v1/history`.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct HistoryView {
    /// Time between two samples, milliseconds.
    pub every_ms: u64,
    /// Samples of the last hour, oldest first, since this daemon began; the last one is of this
    /// moment.
    pub samples: Vec<HistorySample>,
}
