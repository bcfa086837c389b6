//! Files that describe procs: `kip.toml` and Compose files read into the requests that make procs, and requests written as
//! `kip.toml` again.
//!
//! Owns the keys of these files, their schema, their errors with line and column, the order of starts, and what two descriptions
//! differ in. Never asks a daemon, starts anything or decides what is replaced: that is `kip apply`. Reads no file but those that a
//! description names (`env-file`, `.env`), and changes none.
#![forbid(unsafe_code)]

mod compose;
mod environ;
mod file;
mod order;
mod place;
mod table;
mod values;
mod yaml;

pub use compose::is_compose;
pub use file::schema;
pub use order::in_order;
pub use place::{Fault, Faults, Note, Place, Weight};
pub use table::{Difference, ProcTable, differences, render};
pub use values::Pull;

use kip_types::api::{InFile, RunRequest};
use kip_types::name::ProcName;
use std::path::Path;

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
    pub place: Place,
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
    /// The environment, for Compose files.
    pub lookup: Lookup<'a>,
    /// What a Compose file's procs, volumes and network are named after, instead of what it says itself.
    pub project: Option<&'a str>,
    /// Compose services of these profiles are wanted too.
    pub profiles: &'a [String],
}

/// Reads a file.
///
/// # Errors
/// All that is wrong with it, as far as one mistake does not hide another.
pub fn read(reading: &Reading<'_>) -> Result<Document, Faults> {
    let document = if is_compose(reading.path) { compose::read(reading)? } else { file::read(reading)? };
    let mut procs = in_order(document.procs)?;
    for one in &mut procs {
        one.request.in_file = InFile {
            depends_on: one.depends_on.clone(),
            pull: (one.pull != Pull::default()).then_some(one.pull),
            plain_http: one.plain_http,
            project: document.project.clone(),
        };
    }
    Ok(Document { procs, ..document })
}
