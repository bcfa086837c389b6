//! `kip exec`: this process's standard streams, or its terminal, for a program inside a proc.

use crate::detach::Watch;
use crate::names;
use crate::output;
use crate::terminal::{self, Raw};
use anyhow::Context;
use clap::Args;
use kip_client::{Client, Exec, ExecReceived, ExecSender};
use kip_describe::env_file::parse_env;
use kip_types::api::{ExecRequest, TerminalSize};
use kip_types::name::ProcName;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, mpsc};

/// Bytes of input sent at once.
const PIECE: usize = 64 << 10;

/// What a program of a shell ends with when its output is closed: 128 and SIGPIPE.
const NOBODY_READS: u8 = 141;

#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Give the program this command's standard input; without it the program's is empty
    #[arg(short, long)]
    pub interactive: bool,
    /// Run it on a terminal, as a session that sleeps with the proc and goes on when something is
    /// typed
    #[arg(short, long)]
    pub tty: bool,
    /// Return as soon as the program runs; its output goes to the proc's logs
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    /// Set an environment variable; may be repeated
    #[arg(short, long, value_name = "K=V", value_parser = parse_env)]
    pub env: Vec<(String, String)>,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Run as USER[:GROUP] of the proc's own files, names or numbers, instead of the proc's user",
        short,
        long
    )]
    pub user: Option<String>,
    /// Working directory inside, instead of the proc's
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Program and arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// Runs the program and returns its code.
pub async fn exec(client: &Client, name: &ProcName, args: ExecArgs) -> anyhow::Result<ExitCode> {
    let size = if args.tty { Some(terminal::size()?) } else { None };
    let mut env: std::collections::BTreeMap<_, _> = args.env.into_iter().collect();
    if let (Some(_), Ok(kind)) = (size, std::env::var("TERM")) {
        env.entry("TERM".to_owned()).or_insert(kind);
    }
    let ExecArgs { command, user, workdir, detach, .. } = args;
    let request = ExecRequest { command, env, user, workdir, terminal: size, detach };
    let Exec { input, output } = client.exec(name, &request).await?;
    // Until this returns, whatever happens.
    let raw = if args.tty && args.interactive { Some(Raw::begin().context("the terminal")?) } else { None };
    // Beside the output: either may wait for the other. It ends with this process.
    tokio::spawn(send(input, args.interactive, size, None));
    let code = receive(output).await;
    drop(raw);
    code
}

/// Shows what the program writes; returns its code.
pub async fn receive(mut output: kip_client::ExecReceiver) -> anyhow::Result<ExitCode> {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    loop {
        let written = match output.next().await? {
            ExecReceived::Stdout(bytes) => write(&mut stdout, &bytes).await,
            // A closed stderr does not end the command: its user wants no messages.
            ExecReceived::Stderr(bytes) => write(&mut stderr, &bytes).await.or(Ok(())),
            ExecReceived::End(end) => {
                if let Some(refusal) = end.refusal {
                    return Err(refusal.into());
                }
                let code = u8::try_from(end.code).with_context(|| format!("{} is not an exit code", end.code))?;
                return Ok(ExitCode::from(code));
            }
        };
        match written {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(ExitCode::from(NOBODY_READS)),
            Err(e) => return Err(output::failed(e)),
        }
    }
}

async fn write(to: &mut (impl AsyncWriteExt + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

/// Sends what is typed and new sizes of the terminal. A failure here is either the end of the
/// session, which the output tells, or of our own stdin, which is its end. `watch`: the keys by
/// which the user leaves, and what is notified of that.
pub async fn send(
    mut input: ExecSender,
    interactive: bool,
    size: Option<TerminalSize>,
    mut watch: Option<(Watch, Arc<Notify>)>,
) {
    if !interactive && size.is_none() {
        let _ = input.end().await;
        return;
    }
    let (sender, mut typed) = mpsc::channel(1);
    if interactive {
        tokio::spawn(read_stdin(sender));
    } else {
        drop(sender);
    }
    let Ok(mut resized) = signal(SignalKind::window_change()) else { return };
    let (mut size, mut is_open) = (size, true);
    // A size that came between the first one and now has sent its signal already.
    if let (Some(first), Ok(now)) = (size, terminal::size())
        && first != now
    {
        size = Some(now);
        if input.resize(now).await.is_err() {
            return;
        }
    }
    loop {
        let sent = tokio::select! {
            piece = typed.recv(), if is_open => match piece {
                Some(bytes) => match watch.as_mut().map(|(watch, _)| watch.pass(&bytes)) {
                    None => input.write(&bytes).await,
                    Some(passed) => {
                        let sent = input.write(&passed.bytes).await;
                        if let Some((_, left)) = watch.as_ref().filter(|_| passed.is_complete) {
                            left.notify_one();
                            return;
                        }
                        sent
                    }
                },
                None => {
                    is_open = false;
                    // Dropping this half is no sign to the daemon; the connection lives on in the
                    // other. A terminal has no end of input, and new sizes still follow.
                    if size.is_some() { Ok(()) } else { input.end().await }
                }
            },
            _ = resized.recv(), if size.is_some() => match terminal::size() {
                Ok(now) if size != Some(now) => {
                    size = Some(now);
                    input.resize(now).await
                }
                _ => Ok(()),
            },
        };
        if sent.is_err() || (!is_open && size.is_none()) {
            return;
        }
    }
}

/// The channel is closed at the end of standard input.
async fn read_stdin(to: mpsc::Sender<Vec<u8>>) {
    let mut stdin = tokio::io::stdin();
    let mut piece = vec![0; PIECE];
    while let Ok(n @ 1..) = stdin.read(&mut piece).await {
        if to.send(piece[..n].to_vec()).await.is_err() {
            return;
        }
    }
}
