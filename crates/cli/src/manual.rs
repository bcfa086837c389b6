//! What comes with a command line: completion in shells, and manual pages. Both are made from what
//! the parser knows.

use crate::args::{Cli, CompletionArgs, ManArgs};
use crate::output::print;
use anyhow::{Context, bail};
use clap::CommandFactory;
use clap_complete::env::{CompleteEnv, Shells};
use std::process::ExitCode;

/// The shell asks for words by this variable, whose value is its name.
const VARIABLE: &str = "KIP_COMPLETE";

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

#[cfg(test)]
mod tests {
    use super::*;

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
