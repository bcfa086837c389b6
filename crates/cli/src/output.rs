//! Writing to stdout, whose reader may leave at any time.

use serde::Serialize;
use std::io::{self, Write};

/// Stdout's reader is gone. Not a failure: it has seen what it wanted.
#[derive(Debug, thiserror::Error)]
#[error("no program reads the output any more")]
pub struct StdoutGone;

/// Writes `text` as it is.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(failed)
}

/// Writes `value` as one line of JSON.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    print(&line)
}

/// Writes `value`, as JSON or for a person.
pub fn show<T: Serialize>(value: &T, json: bool, human: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
    if json { print_json(value) } else { print(&human(value)) }
}

/// What a failed write to stdout means.
pub fn failed(e: io::Error) -> anyhow::Error {
    if e.kind() == io::ErrorKind::BrokenPipe {
        StdoutGone.into()
    } else {
        anyhow::Error::new(e).context("cannot write the output")
    }
}
