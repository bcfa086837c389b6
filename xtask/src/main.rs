//! `cargo xtask check` and `cargo xtask test`: what CI runs.
//!
//! Parses the command line and hands over to [`check`] and [`suite`]. Never changes a file of the project.
#![forbid(unsafe_code)]

mod binaries;
mod check;
mod counts;
mod cycles;
mod deny;
mod edges;
mod licence;
mod metadata;
mod steps;
mod suite;
mod tidy;

use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask check [STEP..]    checks: fmt clippy dependencies advisories edges tidy scripts docs (default: all)
       cargo xtask test [STAGE..]    stages: build check cargo system measures soak (default: all but soak)";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.split_first() {
        Some((command, rest)) if command == "check" => root().and_then(|root| check::run(&root, rest)),
        Some((command, rest)) if command == "test" => root().and_then(|root| suite::run(&root, rest)),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's directory.
fn root() -> anyhow::Result<PathBuf> {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").context("run this as `cargo xtask`")?;
    Ok(Path::new(&manifest).parent().context("xtask lies in the workspace")?.to_owned())
}
