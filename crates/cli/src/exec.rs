//! `kip exec`: this process's standard streams for a program inside a proc.

use crate::env_file::parse_env;
use crate::names;
use crate::output;
use anyhow::Context;
use clap::Args;
use kip_client::{Client, Exec, ExecInput, Received};
use kip_types::api::ExecRequest;
use kip_types::name::ProcName;
use std::process::ExitCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Bytes of input sent at once.
const PIECE: usize = 64 << 10;

/// What a program of a shell ends with when its output is closed: 128 and SIGPIPE.
const NOBODY_READS: u8 = 141;

#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Set an environment variable; may be repeated
    #[arg(long, value_name = "K=V", value_parser = parse_env)]
    pub env: Vec<(String, String)>,
    /// Program and arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// Runs the program and returns its code.
pub async fn exec(client: &Client, name: &ProcName, args: ExecArgs) -> anyhow::Result<ExitCode> {
    let request = ExecRequest { command: args.command, env: args.env.into_iter().collect() };
    let Exec { input, mut output } = client.exec(name, &request).await?;
    // Beside the output: either may wait for the other. It ends with this process.
    tokio::spawn(send_stdin(input));
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    loop {
        let written = match output.next().await? {
            Received::Stdout(bytes) => write(&mut stdout, &bytes).await,
            // A closed stderr does not end the command: its user wants no messages.
            Received::Stderr(bytes) => write(&mut stderr, &bytes).await.or(Ok(())),
            Received::End(end) => {
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

/// A failure here is either the end of the session, which the output tells, or of our own stdin, which is its end.
async fn send_stdin(mut input: ExecInput) {
    let mut stdin = tokio::io::stdin();
    let mut piece = vec![0; PIECE];
    loop {
        let sent = match stdin.read(&mut piece).await {
            Ok(0) | Err(_) => {
                let _ = input.end().await;
                // Dropping this half is no sign to the daemon; the connection lives on in the other.
                return;
            }
            Ok(n) => input.write(&piece[..n]).await,
        };
        if sent.is_err() {
            return;
        }
    }
}
