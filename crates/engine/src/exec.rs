//! Programs run inside a running proc for a client.
//!
//! The proc stays awake as long as one runs. A client that goes away ends its program, with what that has started and not put into a
//! group of its own.

use crate::blocking::blocking;
use crate::host::Proc;
use crate::start::{environment_of, give_output, limits_of, user_in};
use crate::tickets::Ticket;
use kip_sandbox::launcher::{ExecRequest as Launch, Executing};
use kip_types::api::{Code, ExecEnd, ExecRequest, Refusal};
use kip_types::chain;
use kip_types::lifecycle::Exit;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};

/// What a program under exec wrote, or how it ended.
#[derive(Debug)]
pub enum ExecOutput {
    /// Bytes of its standard output.
    Stdout(Vec<u8>),
    /// Bytes of its standard error.
    Stderr(Vec<u8>),
    /// It ended; nothing follows.
    End(ExecEnd),
}

/// A program that runs inside a proc for a client.
#[derive(Debug)]
pub struct ExecSession {
    /// Bytes for its standard input; dropped at their end.
    pub stdin: mpsc::Sender<Vec<u8>>,
    /// What it writes. Dropped before [`ExecOutput::End`], the program is killed.
    pub output: mpsc::Receiver<ExecOutput>,
}

struct Pipe {
    ours: OwnedFd,
    theirs: OwnedFd,
}

/// A pipe of which the program gets one end: the read end for its input, else the write end.
fn make_pipe(proc: &Proc, input: bool) -> io::Result<Pipe> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let (ours, theirs) = if input { (write, read) } else { (read, write) };
    rustix::fs::fcntl_setfl(&ours, rustix::fs::OFlags::NONBLOCK)?;
    std::os::unix::fs::fchown(&theirs, Some(proc.first_id()), Some(proc.first_id()))?;
    Ok(Pipe { ours, theirs })
}

/// Starts the program. The ticket keeps the proc awake until it has ended.
pub async fn exec(proc: Arc<Proc>, request: ExecRequest, ticket: Ticket) -> Result<ExecSession, Refusal> {
    let (executing, ends, pipes) = {
        let proc = Arc::clone(&proc);
        blocking(move || launch(&proc, &request)).await?
    };
    let failed = |e: io::Error| Refusal::new(Code::Exhausted, format!("exec in {} failed: {e}", proc.name));
    let [input, out, err] = pipes;
    let input = pipe::Sender::from_owned_fd(input).map_err(failed)?;
    let out = pipe::Receiver::from_owned_fd(out).map_err(failed)?;
    let err = pipe::Receiver::from_owned_fd(err).map_err(failed)?;
    let (stdin, bytes) = mpsc::channel(16);
    let (sender, output) = mpsc::channel(16);
    tokio::spawn(feed(input, bytes));
    tokio::spawn(carry(executing, ends, out, err, sender, ticket));
    Ok(ExecSession { stdin, output })
}

type Launched = (Executing, oneshot::Receiver<Exit>, [OwnedFd; 3]);

fn launch(proc: &Proc, request: &ExecRequest) -> Result<Launched, Refusal> {
    let refuse = |code, what: String| Refusal::new(code, format!("exec in {} failed: {what}", proc.name));
    let io = |e: io::Error| refuse(Code::Exhausted, e.to_string());
    let Some(program) = request.command.first() else {
        return Err(refuse(Code::Invalid, "no command given".to_owned()));
    };
    let init = proc.init_pid().ok_or_else(|| refuse(Code::State, "the proc has ended".to_owned()))?;
    let root = File::open(format!("/proc/{init}/root")).map_err(io)?;
    let user = user_in(proc, root.as_fd()).map_err(|e| refuse(Code::Invalid, chain(&e)))?;
    let own_time = kip_sys::timens::other_time_of(init).map_err(io)?.is_some();
    let init = kip_sys::process::pidfd_open(init).map_err(io)?;
    let (stdin, stdout, stderr) =
        (make_pipe(proc, true).map_err(io)?, make_pipe(proc, false).map_err(io)?, make_pipe(proc, false).map_err(io)?);
    let cgroup = proc.cgroup.task_files().map_err(|e| refuse(Code::Failed, chain(&e)))?;
    let mut all = proc.spec.env.clone();
    all.extend(request.env.clone());
    let env = environment_of(proc, user.as_ref(), all);
    if let Some(user) = &user {
        give_output(proc, user, &[&stdin.theirs, &stdout.theirs, &stderr.theirs]).map_err(io)?;
    }
    let workdir = proc.spec.workdir.as_ref().map(|d| d.to_string_lossy().into_owned());
    let executing = proc.shared.launcher().exec(Launch {
        init: init.as_fd(),
        own_time,
        command: &request.command,
        env: &env,
        workdir: workdir.as_deref(),
        allow_setuid: proc.spec.allow_setuid,
        ids: user.as_ref().map(|user| &user.ids),
        limits: &limits_of(proc),
        cgroup: &cgroup,
        stdin: stdin.theirs.as_fd(),
        stdout: stdout.theirs.as_fd(),
        stderr: stderr.theirs.as_fd(),
    });
    let executing = executing.map_err(|e| match e.is_missing_command() {
        true => refuse(Code::Invalid, format!("command {program:?} is not in the proc's files")),
        false => refuse(Code::Failed, chain(&e)),
    })?;
    let ends = proc.shared.exec_ends.wait(executing.id);
    Ok((executing, ends, [stdin.ours, stdout.ours, stderr.ours]))
}

async fn feed(mut input: pipe::Sender, mut bytes: mpsc::Receiver<Vec<u8>>) {
    while let Some(bytes) = bytes.recv().await {
        if input.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

async fn carry(
    executing: Executing,
    ends: oneshot::Receiver<Exit>,
    mut out: pipe::Receiver,
    mut err: pipe::Receiver,
    sender: mpsc::Sender<ExecOutput>,
    ticket: Ticket,
) {
    let (mut out_open, mut err_open) = (true, true);
    let (mut out_buffer, mut err_buffer) = (vec![0; 32 * 1024], vec![0; 32 * 1024]);
    let mut exit = None;
    tokio::pin!(ends);
    while exit.is_none() || out_open || err_open {
        let item = tokio::select! {
            biased;
            n = out.read(&mut out_buffer), if out_open => match n {
                Ok(n) if n > 0 => Some(ExecOutput::Stdout(out_buffer[..n].to_vec())),
                _ => { out_open = false; None }
            },
            n = err.read(&mut err_buffer), if err_open => match n {
                Ok(n) if n > 0 => Some(ExecOutput::Stderr(err_buffer[..n].to_vec())),
                _ => { err_open = false; None }
            },
            end = &mut ends, if exit.is_none() => { exit = Some(end.unwrap_or(Exit::Unknown)); None }
            // A child it left behind may keep the pipes open: what was written when it ended is enough.
            () = tokio::time::sleep(std::time::Duration::from_millis(50)), if exit.is_some() => break,
            () = sender.closed() => {
                let _ = kip_sys::process::pidfd_kill_group(executing.pidfd.as_fd());
                return drop(ticket);
            }
        };
        if let Some(item) = item
            && sender.send(item).await.is_err()
        {
            let _ = kip_sys::process::pidfd_kill_group(executing.pidfd.as_fd());
            return drop(ticket);
        }
    }
    drop(ticket);
    let code = match exit {
        Some(Exit::Code(code)) => code,
        Some(Exit::Signal(signal)) => 128 + signal,
        _ => 1,
    };
    let _ = sender.send(ExecOutput::End(ExecEnd { code, refusal: None })).await;
}
