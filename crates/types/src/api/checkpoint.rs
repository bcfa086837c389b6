//! Checkpoints of procs: requests and answers.

use super::ProcView;
use crate::{CheckpointTag, ProcName};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `POST /v1/procs/NAME/checkpoints`.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointRequest {
    /// The checkpoint's tag, which no other checkpoint of the proc has; the first free one of `c1`,
    /// `c2` and so on, if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<CheckpointTag>,
}

/// A checkpoint: a proc's memory and files of one moment.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckpointView {
    /// The proc that has it.
    pub name: ProcName,
    /// Its tag.
    pub tag: CheckpointTag,
    /// The checkpoint that the proc had gone on from, or that was taken before; null for the first
    /// one.
    pub parent: Option<CheckpointTag>,
    /// The proc goes on from it: no other was taken since, and the proc was not rolled back to
    /// another.
    pub is_current: bool,
    /// When it was taken, milliseconds since the epoch.
    pub taken_at_ms: u64,
    /// It has the memory of processes; else the proc was stopped, and goes on from the files alone.
    pub has_memory: bool,
    /// Memory that it keeps on the disk, bytes. Shared with other checkpoints, clones and the proc
    /// where they have the same generation.
    pub memory_bytes: u64,
    /// Files of the proc that it keeps, bytes.
    pub file_bytes: u64,
    /// How long the proc stood still for it at most, microseconds; 0 if it slept or was stopped.
    pub still_us: u64,
    /// Until it was durable, from the request on, microseconds.
    pub total_us: u64,
    /// The proc's command then.
    pub command: Vec<String>,
}

/// Answer of `GET /v1/procs/NAME/checkpoints` and `GET /v1/checkpoints`: in the order in which they
/// were taken, proc by proc.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckpointsView {
    /// The checkpoints.
    pub checkpoints: Vec<CheckpointView>,
}

/// `POST /v1/procs/NAME/rollback`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RollbackRequest {
    /// The checkpoint that the proc goes on from.
    pub to: CheckpointTag,
}

/// Answer of `POST /v1/procs/NAME/rollback`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct RolledBackView {
    /// The proc.
    pub proc: ProcView,
    /// What it was before, as a checkpoint of its own.
    pub kept: CheckpointView,
    /// From the request until the proc was there again, microseconds.
    pub total_us: u64,
}
