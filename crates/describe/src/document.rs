//! What is read from a file that describes procs, and how it is read.

use crate::place::{Note, SourcePosition};
use crate::values::Pull;
use kip_types::api::RunRequest;
use kip_types::name::ProcName;
use std::path::{Path, PathBuf};

/// Gives the value of a variable of the caller's environment.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A name of a file in the letters that names of procs have.
pub fn lettered(text: &str) -> String {
    text.to_ascii_lowercase().replace(['_', '.'], "-")
}

/// One proc of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// Where it begins.
    pub place: SourcePosition,
    /// What the file calls it: in a Compose file its service.
    pub called: String,
    /// What makes it. `spec.file` is for the caller to fill in.
    pub request: RunRequest,
    /// When its image is brought.
    pub pull: Pull,
    /// Its registry is asked without TLS.
    pub plain_http: bool,
    /// Named volumes that must be there already.
    pub external: Vec<String>,
    /// Those that are started before it, each of the same file.
    pub depends_on: Vec<ProcName>,
}

/// What a file says.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// What its procs are known by to belong together, where the file says so.
    pub project: Option<String>,
    /// Its procs, each after those that it depends on.
    pub procs: Vec<Described>,
    /// Procs that it describes and that are not wanted now.
    pub left_out: Vec<ProcName>,
    /// What it asks for and Kip lacks.
    pub notes: Vec<Note>,
}

/// How a file is read.
pub struct Reading<'a> {
    /// The file. Its name says which kind it is, and paths in it count from its directory.
    pub path: &'a Path,
    /// What it contains.
    pub text: &'a str,
    /// Compose files that are laid over it, one after the other, and what they contain.
    pub overrides: &'a [(PathBuf, String)],
    /// The environment, for Compose files.
    pub lookup: Lookup<'a>,
    /// What a Compose file's procs, volumes and network are named after, instead of what it says
    /// itself.
    pub project: Option<&'a str>,
    /// Compose services of these profiles are wanted too.
    pub profiles: &'a [String],
}
