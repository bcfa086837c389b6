//! Clients at a proc's own terminal or open standard input: `kip run -it`, `kip attach`.
//!
//! What a client types wakes the proc first, as in [`crate::session`]. Output of a program without a terminal comes from its log. A
//! client that goes leaves the program alone.

use crate::session::{KeepAwake, READS_WITHIN, woken};
use kip_engine::console::Piece;
use kip_engine::descriptors::{reopen, watched};
use kip_engine::fd_store::key;
use kip_engine::host::Proc;
use kip_engine::pty::{resize, write};
use kip_engine::tickets::Ticket;
use kip_service::{ExecInput, ExecOutput, ExecSession, Feed};
use kip_types::api::{AttachRequest, Code, ExecEnd, LogLine, LogStream, Refusal, TerminalSize};
use kip_types::lifecycle::Exit;
use rustix::fs::OFlags;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::{broadcast, mpsc};
use tokio::time::{sleep, timeout};

/// A log that is silent for so long after the end of its program has no more of it.
const SILENT: Duration = Duration::from_millis(300);
/// A client that is gone drops both ways at once; one that is at its end of file keeps the other.
const BOTH_WAYS: Duration = Duration::from_millis(100);

/// Ends when the proc is stopped.
pub type Ended = Pin<Box<dyn Future<Output = Exit> + Send>>;

/// Gives a client what the program writes, and the program what the client types. `lines` is the log of a proc that has no terminal.
pub fn attach(
    proc: &Arc<Proc>,
    request: &AttachRequest,
    keep_awake: KeepAwake,
    ended: Ended,
    lines: Option<Feed<LogLine>>,
) -> Result<ExecSession, Refusal> {
    let failed = |e: io::Error| Refusal::new(Code::Exhausted, format!("attaching to {} failed: {e}", proc.name));
    let (input, typed) = mpsc::channel(16);
    let (sender, output) = mpsc::channel(16);
    let to = match (proc.fd_store.get(key::TERMINAL), proc.fd_store.get(key::IN)) {
        (Some(master), _) => To::Terminal(watched(master.try_clone().map_err(failed)?).map_err(failed)?),
        (None, Some(_)) => To::Pipe,
        (None, None) => To::Nothing,
    };
    let from = match lines {
        Some(lines) => From::Log(lines),
        None => {
            let (before, pieces) = proc.console.subscribe(request.since_start);
            From::Terminal { before, pieces }
        }
    };
    let seat = proc.console.seat();
    let (size, ends_input) = (request.terminal, request.ends_input);
    let feeder = Feeder { proc: Arc::clone(proc), to, keep_awake, ends_input };
    let client = sender.clone();
    tokio::spawn(async move {
        let _seat = seat;
        let fed = feeder.feed(size, typed, client);
        tokio::select! {
            () = show(from, ended, &sender) => {}
            refusal = fed => {
                let _ = sender.send(ExecOutput::End(ExecEnd { code: 1, refusal: Some(refusal) })).await;
            }
            () = sender.closed() => {}
        }
    });
    Ok(ExecSession { input, output })
}

/// Where output comes from.
enum From {
    Terminal { before: Vec<u8>, pieces: broadcast::Receiver<Piece> },
    Log(Feed<LogLine>),
}

impl From {
    /// None when no more comes.
    async fn next(&mut self) -> Option<ExecOutput> {
        match self {
            From::Terminal { before, .. } if !before.is_empty() => Some(ExecOutput::Stdout(std::mem::take(before))),
            From::Terminal { pieces, .. } => match pieces.recv().await {
                Ok(Piece::Bytes(bytes)) => Some(ExecOutput::Stdout(bytes.to_vec())),
                Ok(Piece::HungUp) | Err(broadcast::error::RecvError::Closed) => None,
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    Some(ExecOutput::Stdout(b"\r\n[kip: output was lost, for it was not read]\r\n".to_vec()))
                }
            },
            From::Log(lines) => {
                let line = lines.recv().await?.ok()?;
                let mut text = line.text.into_bytes();
                text.push(b'\n');
                Some(match line.stream {
                    LogStream::Stdout => ExecOutput::Stdout(text),
                    LogStream::Stderr => ExecOutput::Stderr(text),
                })
            }
        }
    }
}

/// Sends what the program writes, and last how it ended.
async fn show(mut from: From, mut ended: Ended, sender: &mpsc::Sender<ExecOutput>) {
    let mut is_open = true;
    let exit = loop {
        tokio::select! {
            biased;
            output = from.next(), if is_open => match output {
                Some(output) => if sender.send(output).await.is_err() { return },
                None => is_open = false,
            },
            exit = &mut ended => break exit,
        }
    };
    // What it wrote last.
    while is_open && let Ok(Some(output)) = timeout(SILENT, from.next()).await {
        if sender.send(output).await.is_err() {
            return;
        }
    }
    let _ = sender.send(ExecOutput::End(ExecEnd { code: exit.shell_code(), refusal: None })).await;
}

/// What a client types goes there.
enum To {
    Terminal(AsyncFd<OwnedFd>),
    /// Opened for each piece, so that no client keeps the program from the end that another has given.
    Pipe,
    Nothing,
}

struct Feeder {
    proc: Arc<Proc>,
    to: To,
    keep_awake: KeepAwake,
    ends_input: bool,
}

impl Feeder {
    /// Returns only when the proc cannot be woken for what was typed.
    async fn feed(
        self,
        size: Option<TerminalSize>,
        mut typed: mpsc::Receiver<ExecInput>,
        client: mpsc::Sender<ExecOutput>,
    ) -> Refusal {
        let mut first = size.map(ExecInput::Size);
        loop {
            let input = match first.take() {
                Some(input) => Some(input),
                None => typed.recv().await,
            };
            let Some(input) = input else {
                return self.at_end(&client).await;
            };
            if matches!(self.to, To::Nothing)
                || !matches!((&input, &self.to), (ExecInput::Bytes(_), _) | (_, To::Terminal(_)))
            {
                continue;
            }
            let awake = match woken(&self.keep_awake, &client).await {
                Ok(Some(ticket)) => ticket,
                // The client has gone, which ends this.
                Ok(None) => return std::future::pending().await,
                Err(refusal) => return refusal,
            };
            self.give(input, awake).await;
        }
    }

    /// A program that does not read what was typed may sleep all the same, and what was typed waits.
    async fn give(&self, input: ExecInput, awake: Ticket) {
        let mut awake = Some(awake);
        match (input, &self.to) {
            (ExecInput::Size(size), To::Terminal(terminal)) => drop(resize(terminal.get_ref(), size)),
            (ExecInput::Bytes(bytes), _) => {
                let pipe = self.pipe();
                let mut left = &bytes[..];
                while !left.is_empty() {
                    let written = tokio::select! {
                        written = self.write(pipe.as_ref(), left) => written,
                        () = sleep(READS_WITHIN), if awake.is_some() => { awake = None; continue }
                    };
                    let Some(written) = written else { return };
                    left = &left[written..];
                }
            }
            (ExecInput::Size(_), _) => {}
        }
    }

    /// Our end of the program's standard input, as long as that is open.
    fn pipe(&self) -> Option<pipe::Sender> {
        let held = self.proc.fd_store.get(key::IN).filter(|_| matches!(self.to, To::Pipe))?;
        pipe::Sender::from_owned_fd(reopen(&held, OFlags::WRONLY | OFlags::NONBLOCK).ok()?).ok()
    }

    /// As many bytes as there is room for; none when no process reads them.
    async fn write(&self, pipe: Option<&pipe::Sender>, bytes: &[u8]) -> Option<usize> {
        if let To::Terminal(terminal) = &self.to {
            return write(terminal, bytes).await;
        }
        let pipe = pipe?;
        loop {
            pipe.writable().await.ok()?;
            match pipe.try_write(bytes) {
                Ok(written) => return Some(written),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
    }

    /// The client is at its end of file, and may still watch.
    async fn at_end(&self, client: &mpsc::Sender<ExecOutput>) -> Refusal {
        sleep(BOTH_WAYS).await;
        if self.ends_input
            && !client.is_closed()
            && matches!(self.to, To::Pipe)
            // Awake, the program learns that its input has ended.
            && let Ok(Some(_awake)) = woken(&self.keep_awake, client).await
            && let Err(e) = self.proc.fd_store.drop_prefix(key::IN)
        {
            tracing::warn!(proc = %self.proc.name, error = kip_types::chain(&e), "its standard input stays open");
        }
        std::future::pending().await
    }
}
