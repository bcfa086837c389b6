//! Clones of procs: the request and its answer.

pub use crate::scale::CloneMethod;

use super::ProcView;
use crate::spec::PortSpec;
use crate::volume::ClonedVolumes;
use crate::{CheckpointTag, ProcName};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Clones that one request may ask for.
pub const MOST_CLONES: u32 = 256;

fn one() -> u32 {
    1
}

/// `POST /v1/procs/NAME/clone`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneRequest {
    /// The clone's name. With `count`, or without a name, it is this one, or the source's, with a
    /// number: the first that are free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<ProcName>,
    /// The checkpoint of the source that the clones go on from; null for where the source is now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointTag>,
    /// How many clones, all of the same moment; at most 256.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 256))]
    pub count: u32,
    /// Where the ports of a single clone are published; others of the source's ports are published
    /// at ports of the host that Kip chooses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortSpec>,
    /// What they begin from.
    #[serde(default)]
    pub method: CloneMethod,
    /// What they have in place of volumes that the source can write to; null refuses a clone of a
    /// source with such a volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<ClonedVolumes>,
    /// The clones sleep until a packet wakes them, also if the source is awake.
    #[serde(default)]
    pub asleep: bool,
    /// Key of the source, if they serve behind its name. Set by Kip alone.
    #[serde(skip)]
    pub replica_of: Option<ProcName>,
}

/// Answer of `POST /v1/procs/NAME/clone`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct ClonesView {
    /// The clones.
    pub clones: Vec<ProcView>,
    /// What they have begun from.
    #[serde(default)]
    pub method: CloneMethod,
    /// Why from that, where Kip has chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// How long the source stood still at most, microseconds; 0 if it slept.
    pub still_us: u64,
    /// From the request until each clone was there, microseconds.
    pub total_us: u64,
    /// What the clones have in common that no two procs should: libraries of theirs go on with the
    /// same random numbers.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// Answer of `GET /v1/procs/NAME/clone`: how a clone would best be made just now.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct CloneAdvice {
    /// The source.
    pub name: ProcName,
    /// What a clone begins from best.
    pub method: CloneMethod,
    /// Why, in words.
    pub why: String,
    /// What a clone would begin from better if it were there, and how to get it, in words; null if
    /// there is nothing.
    #[serde(default)]
    pub better: Option<String>,
    /// There is a template for what the source is.
    pub has_template: bool,
    /// Memory that the source holds, or has in its sleep, bytes.
    pub memory_bytes: u64,
    /// The most that it may hold, bytes; null for no limit.
    pub limit_bytes: Option<u64>,
    /// What it reads again because it was pushed out of its memory, bytes a second; null where
    /// that was not watched, of a source that sleeps or has a template.
    pub reread_bytes_per_s: Option<u64>,
}
