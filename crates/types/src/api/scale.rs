//! Scaling: what is seen of it.

use crate::ProcName;
use crate::lifecycle::StateName;
use crate::scale::Scaling;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Answer of `GET /v1/procs/NAME/scale`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ScaleView {
    /// The proc.
    pub name: ProcName,
    /// How it is scaled; null for a proc that is not.
    pub scaling: Option<Scaling>,
    /// The proc first, then its replicas, the oldest first.
    pub replicas: Vec<ReplicaView>,
    /// What was decided last, and why; null if nothing was since the daemon started.
    pub last: Option<String>,
}

/// One of the procs behind a name.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ReplicaView {
    /// Its name.
    pub name: ProcName,
    /// The state that it is in.
    pub state: StateName,
    /// New connections reach it; else it keeps those that it has, sleeps and is removed.
    pub in_rotation: bool,
    /// What it did in the last second of what it can do, 0 to 1: its CPU time against its limit, or
    /// its busiest thread's against a processor, whichever is more.
    pub busy: f64,
    /// Connections that it has not accepted.
    pub queued: u32,
}
