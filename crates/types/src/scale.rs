//! How many procs serve behind one name: replicas of a proc, added and removed by load.

use crate::life::Check;
use crate::volume::ClonedVolumes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Most replicas of a proc, itself included.
pub const MOST_REPLICAS: u32 = 32;
/// How long the load has to be low before a replica is taken away, where the owner does not say,
/// milliseconds.
pub const CALM_MS: u64 = 60_000;

/// What procs that are made from another one begin from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloneMethod {
    /// Memory and files of the source as they are now, or were at a checkpoint.
    #[default]
    Hot,
    /// The template of the source: memory and files of a proc of its kind when that was ready.
    Warm,
    /// What the source was asked to be: a start of its command.
    Cold,
    /// The template of its kind where there is one; else the source as it is, unless that thrashes
    /// or cannot be cloned; else a start.
    Auto,
}

impl FromStr for CloneMethod {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(CloneMethod::Auto),
            "hot" => Ok(CloneMethod::Hot),
            "warm" => Ok(CloneMethod::Warm),
            "cold" => Ok(CloneMethod::Cold),
            _ => Err("write auto, hot, warm or cold".to_owned()),
        }
    }
}

/// The name of a method, as commands and files have it.
impl std::fmt::Display for CloneMethod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            CloneMethod::Auto => "auto",
            CloneMethod::Hot => "hot",
            CloneMethod::Warm => "warm",
            CloneMethod::Cold => "cold",
        })
    }
}

fn auto() -> CloneMethod {
    CloneMethod::Auto
}

fn most() -> u32 {
    1
}

fn calm() -> u64 {
    CALM_MS
}

/// How a proc is scaled (paper S, section I). Connections to its ports are spread by the kernel
/// over the proc and its replicas; those that are open stay where they are.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scaling {
    /// So many procs are there and awake, the proc itself included; with 0 the last one sleeps
    /// like any other proc.
    #[serde(default)]
    #[schemars(range(max = 32))]
    pub min: u32,
    /// At most so many, the proc itself included.
    #[serde(default = "most")]
    #[schemars(range(min = 1, max = 32))]
    pub max: u32,
    /// What a new replica begins from.
    #[serde(default = "auto")]
    pub method: CloneMethod,
    /// What replicas have in place of volumes that the proc can write to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<ClonedVolumes>,
    /// What shows that there are enough, asked every 3 s of the proc while it is awake: another
    /// replica is added while the check fails. It is no activity of the proc.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<Check>,
    /// The load has to be low for so long before a replica is taken away, milliseconds.
    #[serde(default = "calm")]
    pub calm_ms: u64,
}

impl Default for Scaling {
    fn default() -> Self {
        let (min, max, method) = (0, most(), auto());
        Scaling { min, max, method, volumes: None, probe: None, calm_ms: calm() }
    }
}

impl Scaling {
    /// What is wrong with it; none if nothing is.
    pub fn fault(&self) -> Option<String> {
        let Scaling { min, max, .. } = self;
        if !(1..=MOST_REPLICAS).contains(max) {
            return Some(format!("it cannot be scaled to {max}: say 1 to {MOST_REPLICAS}"));
        }
        if min > max {
            return Some(format!("it cannot be scaled to at least {min} and at most {max}"));
        }
        None
    }
}
