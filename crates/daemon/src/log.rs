//! The daemon's log, on stderr.

use std::io::{self, IsTerminal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// What is to be logged cannot be understood.
#[derive(Debug, thiserror::Error)]
#[error("--log {filter:?} is not a filter: write for example debug or warn,kip_supervisor=debug")]
pub struct LogError {
    /// What was given.
    pub filter: String,
    /// Why.
    #[source]
    pub source: ParseError,
}

/// Logs on stderr from here on. To be called once in a process.
pub(crate) fn to_stderr(filter: &str) -> Result<(), LogError> {
    let parsed = EnvFilter::try_new(filter).map_err(|source| LogError { filter: filter.to_owned(), source })?;
    let colours = io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(parsed).with_writer(io::stderr).with_ansi(colours).init();
    Ok(())
}
