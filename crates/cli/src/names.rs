//! Names of procs on a command line: read from it, and offered to a shell that completes one.

use crate::remote::DATA;
use anyhow::Context;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use kip_client::Client;
use kip_types::name::ProcName;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A daemon that does not answer with the names of its procs within this time leaves the shell
/// without them.
const NAMES_WITHIN: Duration = Duration::from_millis(300);

/// A name that no proc can have is one of an unknown proc.
pub fn name(text: &str) -> anyhow::Result<ProcName> {
    text.parse().with_context(|| format!("there is no proc {text:?}"))
}

/// The names of procs, for arguments that are one.
pub fn known() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let client = Client::new(data_of(std::env::args_os()));
        let listed = runtime.map(|runtime| {
            runtime
                .block_on(async { tokio::time::timeout(NAMES_WITHIN, client.list()).await.ok().and_then(Result::ok) })
        });
        let views = listed.ok().flatten().unwrap_or_default();
        views
            .iter()
            .map(|view| CompletionCandidate::new(view.name.to_string()).help(Some(<&str>::from(view.state).into())))
            .collect()
    })
}

/// The data directory that the words typed so far name. They are not parsed, for they are not
/// finished.
fn data_of(words: impl Iterator<Item = OsString>) -> PathBuf {
    let words: Vec<OsString> = words.collect();
    let beside = words.windows(2).find(|pair| pair[0] == "--data").map(|pair| PathBuf::from(&pair[1]));
    let within = || words.iter().find_map(|word| word.to_str()?.strip_prefix("--data=").map(PathBuf::from));
    beside.or_else(within).unwrap_or_else(|| Path::new(DATA).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_directory_is_found_among_the_words() {
        let of = |text: &str| data_of(text.split(' ').map(OsString::from));
        assert_eq!(of("kip -- kip --data /a sleep w"), Path::new("/a"));
        assert_eq!(of("kip -- kip sleep --data=/b w"), Path::new("/b"));
        assert_eq!(of("kip -- kip sleep"), Path::new(DATA));
    }
}
