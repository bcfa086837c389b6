//! `cargo xtask check` and `cargo xtask test`, which CI runs, and `cargo xtask spec`.
//!
//! Parses the command line and hands over to [`check`], [`suite`] and [`spec`]. Never changes a
//! file of the project but the index of promises.
#![forbid(unsafe_code)]

mod binaries;
mod check;
mod counts;
mod cycles;
mod deny;
mod edges;
mod licence;
mod metadata;
mod spec;
mod steps;
mod suite;
mod tidy;

use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask check [STEP..]    checks: fmt clippy dependencies advisories edges cycles tidy scripts docs (default: all)
       cargo xtask test [--loaded] [STAGE..]    stages: build check units cargo smoke system measures soak
                                     (default: build check cargo system measures); --loaded: beside two busy threads
       cargo xtask spec              writes docs/promises.md from the promises at the tests";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.split_first() {
        Some((command, rest)) if command == "check" => root().and_then(|root| check::run(&root, rest)),
        Some((command, rest)) if command == "test" => root().and_then(|root| suite::run(&root, rest)),
        Some((command, [])) if command == "spec" => root().and_then(|root| write_index(&root)),
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

/// Writes the index of promises; false if one of them is wrong.
fn write_index(root: &Path) -> anyhow::Result<bool> {
    let (text, wrong) = spec::index(&tidy::files(root)?);
    wrong.iter().for_each(|line| eprintln!("{line}"));
    if wrong.is_empty() {
        std::fs::write(root.join(spec::INDEX), text).context(spec::INDEX)?;
    }
    Ok(wrong.is_empty())
}

/// The workspace's directory.
fn root() -> anyhow::Result<PathBuf> {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").context("run this as `cargo xtask`")?;
    Ok(Path::new(&manifest).parent().context("xtask lies in the workspace")?.to_owned())
}
