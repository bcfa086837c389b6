//! Files that describe procs: `kip.toml` and Compose files read into the requests that make procs,
//! and requests written as `kip.toml` again.
//!
//! Owns the keys of these files, their schema, their errors with line and column, the order of
//! starts, what two descriptions differ in, and the update that makes up for it. Never asks a
//! daemon, starts anything or decides what is replaced: that is `kip apply`. Reads no file but
//! those that a description names (`env-file`, `.env`) and the links of a [`runtime`], and changes
//! none.
#![forbid(unsafe_code)]

mod choose;
mod compose;
mod difference;
mod document;
pub mod env_file;
mod environ;
mod file;
mod in_place;
mod order;
mod place;
mod render;
pub mod runtime;
mod table;
mod values;
mod yaml;

pub use choose::choose;
pub use compose::{is_compose, overrides_beside};
pub use difference::{Difference, differences};
pub use document::{Described, Document, Lookup, Reading, lettered};
pub use file::schema;
pub use in_place::update_between;
pub use order::in_order;
pub use place::{Fault, Faults, Note, SourcePosition, Weight};
pub use render::render;
pub use table::ProcTable;
pub use values::Pull;

use kip_types::api::InFile;

/// Reads a file.
///
/// # Errors
/// All that is wrong with it, as far as one mistake does not hide another.
pub fn read(reading: &Reading<'_>) -> Result<Document, Faults> {
    let others = reading.overrides.iter().map(|(path, _)| path.as_path());
    if let Some(path) = [reading.path].into_iter().chain(others).find(|path| !is_compose(path))
        && !reading.overrides.is_empty()
    {
        let message = "only Compose files are laid over each other: describe all procs in one kip.toml";
        return Err(Fault::new(&SourcePosition::at(path, "", 0), message).into());
    }
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
