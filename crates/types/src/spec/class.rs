//! How procs share the CPUs of their machine.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a proc shares the CPUs of its machine with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcClass {
    /// Latency-critical: an equal share.
    #[default]
    Lc,
    /// Best effort: what the others leave.
    Be,
}

impl ProcClass {
    /// Whether it is the usual one.
    pub fn is_usual(&self) -> bool {
        *self == ProcClass::Lc
    }
}

impl fmt::Display for ProcClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProcClass::Lc => "lc",
            ProcClass::Be => "be",
        })
    }
}

impl FromStr for ProcClass {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "lc" => Ok(ProcClass::Lc),
            "be" => Ok(ProcClass::Be),
            _ => Err("write lc (latency-critical) or be (best effort)".to_owned()),
        }
    }
}
