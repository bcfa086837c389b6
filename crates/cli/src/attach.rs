//! `kip attach`, and `kip run` that stays: this process's standard streams, or its terminal, for
//! the proc's own program.

use crate::detach::{DETACH_KEYS, Keys, Watch, parse_keys};
use crate::exec::{receive, send};
use crate::names::{self, name};
use crate::run_args::RunArgs;
use crate::terminal::{self, Raw};
use anyhow::{Context, bail};
use clap::Args;
use kip_client::{Client, Exec};
use kip_types::StateName;
use kip_types::api::{AttachRequest, TerminalSize};
use kip_types::name::ProcName;
use rustix::termios::isatty;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::sync::Notify;

#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Only watch: send no input to the program
    #[arg(long)]
    pub no_stdin: bool,
    /// Keys that detach this client, typed one after the other: a letter, or ctrl- and one of a to
    /// z @ [ \ ] ^ _
    #[arg(long, value_name = "KEYS", default_value = DETACH_KEYS, value_parser = parse_keys)]
    pub detach_keys: Keys,
}

/// How a client sits at a proc.
#[derive(Debug)]
pub struct Attachment {
    /// What is typed here goes to the program.
    types: bool,
    /// This end of file is the program's.
    ends_input: bool,
    since_start: bool,
    size: Option<TerminalSize>,
    keys: Keys,
}

impl Attachment {
    /// That of a run, if it stays; found before the proc is made.
    pub fn of_run(args: &RunArgs, stays: bool) -> anyhow::Result<Option<Attachment>> {
        if !stays {
            return Ok(None);
        }
        if args.tty && args.interactive && !isatty(std::io::stdin()) {
            bail!("-it: standard input is no terminal: leave -t out, and the program reads what comes here");
        }
        let size = if args.tty { Some(terminal::size()?) } else { None };
        let keys = args.detach_keys.clone();
        // Docker has -t without -i show a terminal and send it nothing.
        Ok(Some(Attachment { types: args.interactive, ends_input: true, since_start: true, size, keys }))
    }

    /// Returns the program's code once it has ended, or success when this client leaves it alone.
    pub async fn sit(self, client: &Client, name: &ProcName) -> anyhow::Result<ExitCode> {
        let Attachment { types, ends_input, since_start, size, keys } = self;
        let request = AttachRequest { terminal: size, since_start, ends_input };
        let Exec { input, output } = client.attach(name, &request).await?;
        // Until this returns, whatever happens.
        let raw = if types && size.is_some() { Some(Raw::begin().context("the terminal")?) } else { None };
        let left = Arc::new(Notify::new());
        // Only a terminal in raw mode has keys; what is piped is passed as it is.
        let watch = raw.as_ref().filter(|raw| raw.is_in_place()).map(|_| (Watch::new(&keys), Arc::clone(&left)));
        tokio::spawn(send(input, types, size, watch));
        let code = tokio::select! {
            code = receive(output) => code,
            () = left.notified() => {
                drop(raw);
                eprintln!("\nkip: {name} runs on: `kip attach {name}` goes on here");
                return Ok(ExitCode::SUCCESS);
            }
        };
        drop(raw);
        code
    }
}

/// Attaches until the program has ended or the client leaves it alone.
pub async fn attach(client: &Client, args: &AttachArgs) -> anyhow::Result<ExitCode> {
    let name = name(&args.name)?;
    let view = client.inspect(&name).await?;
    if view.state == StateName::Stopped {
        bail!("{name} is stopped: `kip start {name}` starts it again, `kip logs {name}` shows what it wrote");
    }
    let spec = view.spec;
    let types = !args.no_stdin && (spec.terminal || spec.stdin_open);
    if spec.terminal && types && terminal::size().is_err() {
        bail!("{name} has a terminal, and here is none: add --no-stdin to watch it, or use a terminal");
    }
    let size = if spec.terminal && types { Some(terminal::size()?) } else { None };
    let keys = args.detach_keys.clone();
    Attachment { types, ends_input: false, since_start: false, size, keys }.sit(client, &name).await
}
