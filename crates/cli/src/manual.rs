//! What comes with a command line: completion in shells, and manual pages. Both are made from what the parser knows.

use crate::args::Cli;
use crate::output::print;
use anyhow::{Context, bail};
use clap::{Args, CommandFactory};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use kip_client::Client;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The shell asks for words by this variable, whose value is its name.
const VARIABLE: &str = "KIP_COMPLETE";
/// A daemon that does not say its procs' names within that leaves who types without them.
const NAMES_WITHIN: Duration = Duration::from_millis(300);

#[derive(Debug, Args)]
pub struct CompletionArgs {
    /// bash, zsh, fish, elvish or powershell
    pub shell: String,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// Write a page for each command into this directory, instead of the first one to stdout
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Answers a shell that asks for words, and then ends the process.
pub fn complete() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).complete();
}

/// Prints what a shell has to be told so that it asks.
pub fn completion(args: &CompletionArgs) -> anyhow::Result<ExitCode> {
    let shells = Shells::builtins();
    let Some(shell) = shells.completer(&args.shell) else {
        bail!(
            "no completion for the shell {:?}: there are {}",
            args.shell,
            shells.names().collect::<Vec<_>>().join(", ")
        );
    };
    let mut text = Vec::new();
    shell.write_registration(VARIABLE, "kip", "kip", "kip", &mut text)?;
    shown(&text)
}

/// Writes manual pages.
pub fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    // Its long name is not in the pages of its commands: kip-run(1).
    let command = Cli::command().disable_help_subcommand(true);
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return shown(&page);
    };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    clap_mangen::generate_to(command, dir).with_context(|| format!("cannot write pages into {}", dir.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn shown(text: &[u8]) -> anyhow::Result<ExitCode> {
    print(&String::from_utf8_lossy(text))?;
    Ok(ExitCode::SUCCESS)
}

/// The names of procs, for arguments that are one.
pub fn names() -> ArgValueCandidates {
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
            .map(|view| CompletionCandidate::new(view.name.to_string()).help(Some(view.state.clone().into())))
            .collect()
    })
}

/// The data directory that the words typed so far name. They are not parsed, for they are not finished.
fn data_of(words: impl Iterator<Item = OsString>) -> PathBuf {
    let words: Vec<OsString> = words.collect();
    let beside = words.windows(2).find(|pair| pair[0] == "--data").map(|pair| PathBuf::from(&pair[1]));
    let within = || words.iter().find_map(|word| word.to_str()?.strip_prefix("--data=").map(PathBuf::from));
    beside.or_else(within).unwrap_or_else(|| Path::new(crate::abroad::DATA).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_directory_is_found_among_the_words() {
        let of = |text: &str| data_of(text.split(' ').map(OsString::from));
        assert_eq!(of("kip -- kip --data /a sleep w"), Path::new("/a"));
        assert_eq!(of("kip -- kip sleep --data=/b w"), Path::new("/b"));
        assert_eq!(of("kip -- kip sleep"), Path::new(crate::abroad::DATA));
    }

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        man(&ManArgs { dir: Some(dir.path().to_owned()) }).unwrap();
        let commands = Cli::command().get_subcommands().map(|c| format!("kip-{}.1", c.get_name())).collect::<Vec<_>>();
        assert!(commands.len() > 20);
        for page in commands {
            let text = std::fs::read_to_string(dir.path().join(&page)).unwrap();
            assert!(text.starts_with(".ie") && text.contains(".SH SYNOPSIS"), "{page}: {text}");
        }
    }
}
