//! `kip profiles`: the table of programs that are known to bear a sleep in which their clock
//! stands. No daemon is asked.

use crate::output::show;
use kip_text::table;
use kip_types::profile::{PROFILES, Profile, VERSION};
use serde::Serialize;

/// The table and its version.
#[derive(Debug, Serialize)]
struct Table {
    version: u32,
    profiles: &'static [Profile],
}

/// Prints the table.
pub fn profiles(json: bool) -> anyhow::Result<()> {
    show(&Table { version: VERSION, profiles: PROFILES }, json, lines)
}

fn lines(all: &Table) -> String {
    let head = ["PROFILE", "PROGRAMS", "ARGUMENTS"].map(str::to_owned).to_vec();
    let row = |p: &Profile| vec![p.name.to_owned(), p.programs.join(", "), p.arguments.join(" ")];
    let rows: Vec<_> = std::iter::once(head).chain(all.profiles.iter().map(row)).collect();
    format!("{}version {}\n", table(&rows), all.version)
}
