//! What a program may do to the name tree.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What the programs of a proc may do to its realm's name tree, over the runtime socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TreeAccess {
    /// Nothing.
    #[default]
    None,
    /// Read and watch it.
    Read,
    /// Read and change it, with leases.
    Write,
}

impl TreeAccess {
    /// Whether that is nothing.
    pub fn is_none(&self) -> bool {
        *self == TreeAccess::None
    }
}

impl fmt::Display for TreeAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TreeAccess::None => "none",
            TreeAccess::Read => "read",
            TreeAccess::Write => "write",
        })
    }
}

impl FromStr for TreeAccess {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "none" => Ok(TreeAccess::None),
            "read" => Ok(TreeAccess::Read),
            "write" => Ok(TreeAccess::Write),
            _ => Err("write none, read or write".to_owned()),
        }
    }
}
