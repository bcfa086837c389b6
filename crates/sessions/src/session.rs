//! A client's terminal in a proc: a program that is a part of the proc's tree and sleeps with it.
//!
//! The client has one side of a pseudoterminal, through the daemon; the kernel keeps the rest. The
//! proc is kept awake only while something comes from the client: what the client types wakes it
//! first, for a signal that the terminal makes of it (Ctrl-C) must find its processes. When the
//! client goes the terminal is hung up, as that of a lost connection is. A session does not outlive
//! its daemon.

use crate::exec::ExecContext;
use kip_engine::blocking::blocking;
use kip_engine::descriptors::reopen;
use kip_engine::fd_store::key;
use kip_engine::host::Proc;
use kip_engine::tickets::Ticket;
use kip_logs::pty::{read, read_now, resize, watched, write};
use kip_sandbox::init::{InitRecord, RECORD_BYTES, StartStep};
use kip_sandbox::terminals::{self, Terminal};
use kip_service::{ExecInput, ExecOutput, ExecSession};
use kip_types::api::{Code, ExecEnd, ExecRequest, Refusal, TerminalSize};
use kip_types::chain;
use kip_types::lifecycle::Exit;
use rustix::fs::{OFlags, ResolveFlags};
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// How long the program may take to be exec'd.
const EXEC_WITHIN: Duration = Duration::from_secs(30);
/// How long a proc may take to wake for the news that its client has gone.
const HANG_UP_WITHIN: Duration = Duration::from_secs(10);
/// So long a program may take to read what was typed before its proc may sleep again.
pub(crate) const READS_WITHIN: Duration = Duration::from_secs(5);
/// From a wake that was refused to the next try.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// So many pieces of output are carried after the end of the program.
const LAST_PIECES: usize = 8;

/// Wakes the proc if it sleeps, and keeps it awake as long as the ticket lives.
pub type KeepAwake = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Result<Ticket, Refusal>> + Send>> + Send + Sync>;

/// Starts the program, on a terminal or without a client. `awake` keeps the proc awake until it
/// runs.
pub async fn begin(
    proc: Arc<Proc>,
    request: ExecRequest,
    awake: Ticket,
    keep_awake: KeepAwake,
) -> Result<ExecSession, Refusal> {
    let failed = {
        let name = proc.name.clone();
        move |e: io::Error| Refusal::new(Code::Exhausted, format!("exec in {name} failed: {e}"))
    };
    let program = request.command.first().cloned().unwrap_or_default();
    let launched = {
        let proc = Arc::clone(&proc);
        let launch = move || match request.terminal {
            Some(size) => launch(&proc, &request, size),
            None => launch_detached(&proc, &request),
        };
        blocking(launch).await?
    };
    let Launched { master, status } = launched;
    let mut status = pipe::Receiver::from_owned_fd(status).map_err(&failed)?;
    match timeout(EXEC_WITHIN, next_record(&mut status)).await {
        Ok(Some(InitRecord::Running { .. })) => {}
        Ok(Some(InitRecord::NotStarted { step, errno })) => return Err(not_started(&proc, &program, step, errno)),
        other => {
            let why = format!("exec in {} failed: its session ended before the program ran ({other:?})", proc.name);
            return Err(Refusal::new(Code::Failed, why));
        }
    }
    let (input, typed) = mpsc::channel(16);
    let (sender, output) = mpsc::channel(16);
    let Some(master) = master else {
        let end = ExecEnd { code: 0, refusal: None };
        tokio::spawn(async move { sender.send(ExecOutput::End(end)).await });
        return Ok(ExecSession { input, output });
    };
    let master = watched(master).map_err(&failed)?;
    tokio::spawn(carry(master, status, typed, sender, awake, keep_awake));
    Ok(ExecSession { input, output })
}

fn not_started(proc: &Proc, program: &str, step: StartStep, errno: i32) -> Refusal {
    let error = io::Error::from_raw_os_error(errno);
    let what = match (step, error.kind()) {
        (StartStep::Exec, io::ErrorKind::NotFound) => format!("command {program:?} is not in the proc's files"),
        (StartStep::WorkDir, _) => format!("its working directory: {error}"),
        _ => format!("command {program:?} cannot be started ({step:?}): {error}"),
    };
    Refusal::new(Code::Invalid, format!("exec in {} failed: {what}", proc.name))
}

struct Launched {
    /// None without a terminal.
    master: Option<OwnedFd>,
    status: OwnedFd,
}

fn launch(proc: &Proc, request: &ExecRequest, size: TerminalSize) -> Result<Launched, Refusal> {
    let place = ExecContext::find(proc, request)?;
    let io = |e: io::Error| place.refuse(Code::Exhausted, &e.to_string());
    let owner = proc.first_id() + place.user.as_ref().map_or(0, |user| user.ids.uid);
    let Terminal { master, slave } = terminals::open(place.root.as_fd(), owner).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            place.refuse(Code::State, "it has no terminals, /dev/pts: an older Kip has started it; start it again")
        }
        _ => io(e),
    })?;
    resize(&master, size).map_err(io)?;
    let (status, theirs) = status_pipe().map_err(io)?;
    let launch = place.launch(&request.command, [slave.as_fd(); 3]);
    let launched = proc.shared.launcher().session(launch, theirs.as_fd());
    launched.map_err(|e| place.refuse(Code::Failed, &chain(&e)))?;
    Ok(Launched { master: Some(master), status })
}

/// The same without a client and a terminal; what the program writes goes where the proc's own
/// output goes.
fn launch_detached(proc: &Proc, request: &ExecRequest) -> Result<Launched, Refusal> {
    let place = ExecContext::find(proc, request)?;
    let io = |e: io::Error| place.refuse(Code::Exhausted, &e.to_string());
    let lost = || place.refuse(Code::State, "its output is lost: no process holds its pipes any more");
    let output = |key| reopen(&*proc.fd_store.get(key).ok_or_else(lost)?, OFlags::WRONLY).map_err(io);
    let (out, err) = (output(key::OUT)?, output(key::ERR)?);
    let null = null_of(&place.root).map_err(io)?;
    let (status, theirs) = status_pipe().map_err(io)?;
    let launch = place.launch(&request.command, [null.as_fd(), out.as_fd(), err.as_fd()]);
    let launched = proc.shared.launcher().session(launch, theirs.as_fd());
    launched.map_err(|e| place.refuse(Code::Failed, &chain(&e)))?;
    Ok(Launched { master: None, status })
}

/// The sandbox's own null device: CRIU knows no file of the host's.
fn null_of(root: &File) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let found = kip_sys::within::open(root, "/dev/null", OFlags::PATH | OFlags::CLOEXEC, resolve)?;
    if rustix::fs::fstat(&found)?.st_rdev != rustix::fs::makedev(1, 3) {
        return Err(io::Error::other("its /dev/null is not the null device any more"));
    }
    reopen(&found, OFlags::RDWR)
}

/// The pipe by which a session's kip-init tells of its program; our end first.
fn status_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (status, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::fs::fcntl_setfl(&status, OFlags::NONBLOCK)?;
    Ok((status, theirs))
}

/// None at the end of the pipe.
async fn next_record(status: &mut pipe::Receiver) -> Option<InitRecord> {
    let mut bytes = [0; RECORD_BYTES];
    status.read_exact(&mut bytes).await.ok()?;
    InitRecord::parse(&bytes)
}

/// Carries bytes both ways until the program has ended or the client has gone.
async fn carry(
    master: AsyncFd<OwnedFd>,
    mut status: pipe::Receiver,
    mut typed: mpsc::Receiver<ExecInput>,
    sender: mpsc::Sender<ExecOutput>,
    begun: Ticket,
    keep_awake: KeepAwake,
) {
    // Only until the program has what was typed.
    drop(begun);
    let mut awake = None;
    let (mut is_open, mut has_input, mut unwritten) = (true, true, Vec::new());
    let exit = loop {
        tokio::select! {
            record = next_record(&mut status) => match record {
                Some(InitRecord::Ended(exit)) => break exit,
                Some(_) => {}
                None => break Exit::Unknown,
            },
            read = read(&master), if is_open => match read {
                Some(bytes) => if sender.send(ExecOutput::Stdout(bytes)).await.is_err() { break Exit::Unknown },
                None => is_open = false,
            },
            written = write(&master, &unwritten), if !unwritten.is_empty() => {
                drop(unwritten.drain(..written.unwrap_or(unwritten.len())));
                awake = awake.filter(|_| !unwritten.is_empty());
            }
            // Beside the output: a program that is not read stops reading.
            input = typed.recv(), if has_input && unwritten.is_empty() => {
                // A client that is at its end of file may still watch.
                let Some(input) = input else { has_input = false; continue };
                match woken(&keep_awake, &sender).await {
                    Ok(ticket) => awake = ticket,
                    Err(refusal) => {
                        let end = ExecEnd { code: 1, refusal: Some(refusal) };
                        let _ = sender.send(ExecOutput::End(end)).await;
                        return;
                    }
                }
                match input {
                    ExecInput::Bytes(bytes) => unwritten = bytes,
                    ExecInput::Size(size) => {
                        let _ = resize(master.get_ref(), size);
                        awake = None;
                    }
                }
            }
            // A program that does not read what was typed may sleep all the same.
            () = sleep(READS_WITHIN), if awake.is_some() => awake = None,
            () = sender.closed() => break Exit::Unknown,
        }
    };
    if sender.is_closed() {
        // Awake, its program learns by a signal that the terminal is hung up.
        let _awake = timeout(HANG_UP_WITHIN, keep_awake()).await;
        drop(master);
        return;
    }
    // What the program wrote last. Others of its session may write on.
    for _ in 0..LAST_PIECES {
        let Some(bytes) = read_now(master.get_ref()) else { break };
        if sender.send(ExecOutput::Stdout(bytes)).await.is_err() {
            return;
        }
    }
    let _ = sender.send(ExecOutput::End(ExecEnd { code: exit.shell_code(), refusal: None })).await;
}

/// Wakes the proc for what was typed. A wake that is refused (there is no memory, say) is tried
/// again as long as there is a client, but not where the proc has ended; none if the client has
/// gone.
pub(crate) async fn woken(
    keep_awake: &KeepAwake,
    client: &mpsc::Sender<ExecOutput>,
) -> Result<Option<Ticket>, Refusal> {
    loop {
        let refusal = tokio::select! {
            woken = keep_awake() => match woken {
                Ok(ticket) => return Ok(Some(ticket)),
                Err(refusal) => refusal,
            },
            () = client.closed() => return Ok(None),
        };
        if matches!(refusal.code, Code::State | Code::Unknown) {
            return Err(refusal);
        }
        tracing::info!(reason = refusal.message, "what a client types waits for its proc");
        tokio::select! {
            () = sleep(AGAIN_AFTER) => {}
            () = client.closed() => return Ok(None),
        }
    }
}
