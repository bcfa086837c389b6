//! Clients at a proc's own terminal or open standard input: `kip run -it`, `kip attach`.
//!
//! What a client types wakes the proc first, as in [`crate::session`]. Output of a program without
//! a terminal comes from its log. A client that goes leaves the program alone.

use crate::follow::Follower;
use crate::session::{KeepAwake, READS_WITHIN, woken};
use kip_engine::descriptors::reopen;
use kip_engine::fd_store::key;
use kip_engine::host::Proc;
use kip_engine::tickets::Ticket;
use kip_logs::console::OutputPiece;
use kip_logs::pty::{watched, write};
use kip_logs::{From as LogStart, LogRecord, Stream};
use kip_service::{ExecInput, ExecOutput, ExecSession};
use kip_types::api::{AttachRequest, Code, ExecEnd, Refusal, TerminalSize};
use kip_types::chain;
use kip_types::lifecycle::Exit;
use rustix::fs::OFlags;
use std::collections::VecDeque;
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

/// A terminal that is silent for so long after the end of its program has no more of it.
const SILENT: Duration = Duration::from_millis(300);
/// A client that is gone drops both ways at once; one that is at its end of file keeps the other.
const BOTH_WAYS: Duration = Duration::from_millis(100);

/// Ends when the proc is stopped.
pub type Ended = Pin<Box<dyn Future<Output = Exit> + Send>>;

/// Gives a client what the program writes, and the program what the client types.
pub async fn attach(
    proc: &Arc<Proc>,
    request: &AttachRequest,
    keep_awake: KeepAwake,
    ended: Ended,
) -> Result<ExecSession, Refusal> {
    let (input, typed) = mpsc::channel(16);
    let (sender, output) = mpsc::channel(16);
    let from = if proc.spec().terminal {
        let (before, pieces) = proc.console.subscribe(request.since_start);
        From::Terminal { before, pieces }
    } else {
        let place = if request.since_start { LogStart::Start } else { LogStart::Last(0) };
        let opened = Follower::open(proc.dir.join("logs"), place).await;
        let follower = opened.map_err(|e| Refusal::new(Code::Failed, chain(&e)))?;
        From::Log { follower, lines: VecDeque::new() }
    };
    let seat = proc.console.seat();
    let (size, ends_input) = (request.terminal, request.ends_input);
    let feeder = Feeder { proc: Arc::clone(proc), keep_awake, ends_input };
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
    Terminal { before: Vec<u8>, pieces: broadcast::Receiver<OutputPiece> },
    Log { follower: Follower, lines: VecDeque<LogRecord> },
}

impl From {
    /// None when no more comes, as long as the program is not started again.
    async fn next(&mut self) -> Option<ExecOutput> {
        match self {
            From::Terminal { before, .. } if !before.is_empty() => Some(ExecOutput::Stdout(std::mem::take(before))),
            From::Terminal { pieces, .. } => match pieces.recv().await {
                Ok(OutputPiece::Bytes(bytes)) => Some(ExecOutput::Stdout(bytes.to_vec())),
                Ok(OutputPiece::HungUp) | Err(broadcast::error::RecvError::Closed) => None,
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    Some(ExecOutput::Stdout(b"\r\n[kip: output was lost, for it was not read]\r\n".to_vec()))
                }
            },
            From::Log { follower, lines } => {
                if lines.is_empty() {
                    lines.extend(follower.next().await.ok()?);
                }
                lines.pop_front().map(output_of)
            }
        }
    }

    /// Of a program that has ended: what it wrote last, and then none.
    async fn last(&mut self) -> Option<ExecOutput> {
        match self {
            From::Terminal { .. } => timeout(SILENT, self.next()).await.ok()?,
            // All that a program wrote is in its log before it is known to have ended.
            From::Log { follower, lines } => {
                if lines.is_empty() {
                    lines.extend(follower.there().await.ok()?);
                }
                lines.pop_front().map(output_of)
            }
        }
    }
}

/// The bytes of a line, as the program wrote them. What Kip says of the log goes to standard error.
fn output_of(line: LogRecord) -> ExecOutput {
    let LogRecord { stream, complete, mut text, .. } = line;
    if stream == Stream::Kip {
        let remark = String::from_utf8_lossy(&text);
        return ExecOutput::Stderr(format!("[kip: {remark}]\n").into_bytes());
    }
    if complete {
        text.push(b'\n');
    }
    if stream == Stream::Stderr { ExecOutput::Stderr(text) } else { ExecOutput::Stdout(text) }
}

/// Sends what the program writes, and last how it ended. A program that is started again has
/// another terminal, which may follow.
async fn show(mut from: From, mut ended: Ended, sender: &mpsc::Sender<ExecOutput>) {
    let goes_on = matches!(from, From::Terminal { .. });
    let (mut is_open, mut has_all) = (true, false);
    let exit = loop {
        tokio::select! {
            biased;
            output = from.next(), if is_open => match output {
                Some(output) => {
                    has_all = false;
                    if sender.send(output).await.is_err() { return }
                }
                None => (is_open, has_all) = (goes_on, true),
            },
            exit = &mut ended => break exit,
        }
    };
    // What it wrote last.
    while !has_all && let Some(output) = from.last().await {
        if sender.send(output).await.is_err() {
            return;
        }
    }
    let _ = sender.send(ExecOutput::End(ExecEnd { code: exit.shell_code(), refusal: None })).await;
}

/// Where what a client types goes. Opened for each piece: a program that is started again has
/// another terminal, and no client is to keep a program from the end of input that another has
/// given.
enum To {
    Terminal(AsyncFd<OwnedFd>),
    Pipe(pipe::Sender),
}

impl To {
    /// None if the program has no input that is open.
    fn of(proc: &Proc) -> io::Result<Option<To>> {
        if let Some(master) = proc.fd_store.get(key::TERMINAL) {
            return Ok(Some(To::Terminal(watched(master.try_clone()?)?)));
        }
        let Some(held) = proc.fd_store.get(key::IN) else { return Ok(None) };
        let end = reopen(&held, OFlags::WRONLY | OFlags::NONBLOCK)?;
        Ok(Some(To::Pipe(pipe::Sender::from_owned_fd(end)?)))
    }

    /// As many bytes as there is room for; none when no process reads them.
    async fn write(&self, bytes: &[u8]) -> Option<usize> {
        let pipe = match self {
            To::Terminal(terminal) => return write(terminal, bytes).await,
            To::Pipe(pipe) => pipe,
        };
        loop {
            pipe.writable().await.ok()?;
            match pipe.try_write(bytes) {
                Ok(written) => return Some(written),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
    }
}

struct Feeder {
    proc: Arc<Proc>,
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
            if !self.takes(&input) {
                continue;
            }
            let awake = match woken(&self.keep_awake, &client).await {
                Ok(Some(ticket)) => ticket,
                // The client has gone, which ends this.
                Ok(None) => return std::future::pending().await,
                // The program has ended, or is about to be started again: `show` tells the client
                // how it ended.
                Err(refusal) if matches!(refusal.code, Code::State | Code::Unknown) => continue,
                Err(refusal) => return refusal,
            };
            if let Err(error) = self.give(input, awake).await {
                tracing::warn!(proc = %self.proc.name, %error, "what a client typed is lost");
            }
        }
    }

    /// Whether the program has anything from that: only a terminal has a size.
    fn takes(&self, input: &ExecInput) -> bool {
        let has = |key| self.proc.fd_store.get(key).is_some();
        has(key::TERMINAL) || matches!(input, ExecInput::Bytes(_)) && has(key::IN)
    }

    /// A program that does not read what was typed may sleep all the same, and what was typed
    /// waits.
    async fn give(&self, input: ExecInput, awake: Ticket) -> io::Result<()> {
        let Some(to) = To::of(&self.proc)? else { return Ok(()) };
        let mut awake = Some(awake);
        match (input, &to) {
            (ExecInput::Size(size), To::Terminal(terminal)) => {
                self.proc.console.resize(terminal.get_ref(), size)?;
            }
            (ExecInput::Size(_), To::Pipe(_)) => {}
            (ExecInput::Bytes(bytes), to) => {
                let mut left = &bytes[..];
                while !left.is_empty() {
                    let written = tokio::select! {
                        written = to.write(left) => written,
                        () = sleep(READS_WITHIN), if awake.is_some() => { awake = None; continue }
                    };
                    let Some(written) = written else { break };
                    left = &left[written..];
                }
            }
        }
        Ok(())
    }

    /// The client is at its end of file, and may still watch.
    async fn at_end(&self, client: &mpsc::Sender<ExecOutput>) -> Refusal {
        sleep(BOTH_WAYS).await;
        if self.ends_input
            && !client.is_closed()
            && self.proc.fd_store.get(key::IN).is_some()
            // Awake, the program learns that its input has ended.
            && let Ok(Some(_awake)) = woken(&self.keep_awake, client).await
            && let Err(e) = self.proc.fd_store.drop_prefix(key::IN)
        {
            tracing::warn!(proc = %self.proc.name, error = kip_types::chain(&e), "its standard input stays open");
        }
        std::future::pending().await
    }
}
