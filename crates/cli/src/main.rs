//! The `kip` command.
//!
//! Parses, asks a daemon or runs one, and shows; decides nothing. Every command but `up`,
//! `restore`, `doctor`, `completion` and `man` is a call of the daemon of `--data` or `--host`.
//! Exit codes: 0 done, 1 refused or failed with one line on stderr, 2 usage; `exec` exits with the
//! program's code.
#![forbid(unsafe_code)]

mod apply;
mod args;
mod attach;
mod backup;
mod check;
mod checkpoint;
mod commands;
mod cp;
mod detach;
mod details;
mod events;
mod exec;
mod filter;
mod follow;
mod image;
mod key;
mod life;
mod logs;
mod manual;
mod many;
mod meter;
mod names;
mod output;
mod port;
mod profiles;
mod ps;
mod remote;
mod run_args;
mod scale;
mod snapshot;
mod spawn;
mod stats;
mod template;
mod terminal;
mod token;
mod top;
mod tree;
mod up;
mod update;
mod view;
mod volume;
mod wait;

use args::{Cli, Command};
use clap::CommandFactory;
use clap::error::ErrorKind;
use kip_daemon::MemoryMarks;
use output::StdoutGone;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    manual::complete();
    match dispatch(Cli::read(std::env::args_os()).unwrap_or_else(|e| e.exit())) {
        Ok(code) => code,
        // The reader of the output has closed it.
        Err(e) if e.is::<StdoutGone>() => ExitCode::SUCCESS,
        Err(e) => {
            // No reader is left when this fails.
            let _ = writeln!(std::io::stderr(), "kip: {}", kip_text::one_line(&format!("{e:#}")));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    let named = cli.data;
    let data = std::path::absolute(named.as_deref().unwrap_or(Path::new(remote::DATA)))?;
    let json = cli.json;
    match cli.command {
        Command::Doctor(args) => kip_doctor::run(&kip_doctor::DoctorOptions { data, criu: args.criu, json }),
        Command::Completion(args) => manual::completion(&args),
        Command::Man(args) => manual::man(&args),
        Command::Profiles => profiles::profiles(json).map(|()| ExitCode::SUCCESS),
        Command::Restore(args) => backup::restore(&data, &args, json),
        Command::Up(args) => {
            let memory = MemoryMarks::new(args.memory, args.memory_high, args.memory_low)
                .unwrap_or_else(|e| Cli::command().error(ErrorKind::ValueValidation, e).exit());
            up::up(data, *args, memory, json)
        }
        command => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let client = remote::client(named.as_deref(), cli.remote, commands::at_home_only(&command))?;
            let done = runtime.block_on(commands::call(&client, command, json));
            // A read of the terminal may be under way that never returns.
            runtime.shutdown_background();
            done
        }
    }
}
