//! Programs run inside a running proc for a client.
//!
//! The proc stays awake as long as one runs. A client that goes away ends its program, with what
//! that has started and not put into a group of its own.

use kip_engine::blocking::blocking;
use kip_engine::files;
use kip_engine::host::Proc;
use kip_engine::start::{environment_of, give_output, limits_of, path_in, user_in};
use kip_engine::tickets::Ticket;
use kip_files::interpreter;
use kip_sandbox::ResourceLimit;
use kip_sandbox::launcher::{Executing, LaunchError, SandboxExec as Launch};
use kip_sandbox::users::{self, User};
use kip_service::ExecInput;
pub use kip_service::{ExecOutput, ExecSession};
use kip_types::Image;
use kip_types::api::{Code, ExecEnd, ExecRequest, Refusal};
use kip_types::chain;
use kip_types::lifecycle::Exit;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};

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
    let (stdin, typed) = mpsc::channel(16);
    let (sender, output) = mpsc::channel(16);
    tokio::spawn(feed(input, typed));
    tokio::spawn(carry(executing, ends, out, err, sender, ticket));
    Ok(ExecSession { input: stdin, output })
}

type Launched = (Executing, oneshot::Receiver<Exit>, [OwnedFd; 3]);

/// Where in a proc a program is run, and as which user.
pub(crate) struct ExecContext<'a> {
    pub proc: &'a Proc,
    /// The proc's root directory.
    pub root: File,
    /// None is the sandbox's root.
    pub user: Option<User>,
    init: OwnedFd,
    own_time: bool,
    limits: Vec<ResourceLimit>,
    cgroup: Vec<OwnedFd>,
    env: Vec<String>,
    workdir: Option<String>,
}

/// An error that names the proc.
fn refusal(proc: &Proc, code: Code, what: &str) -> Refusal {
    Refusal::new(code, format!("exec in {} failed: {what}", proc.name))
}

impl<'a> ExecContext<'a> {
    /// That of a request; the proc runs.
    pub fn find(proc: &'a Proc, request: &ExecRequest) -> Result<ExecContext<'a>, Refusal> {
        let io = |e: io::Error| refusal(proc, Code::Exhausted, &e.to_string());
        if request.command.is_empty() {
            return Err(refusal(proc, Code::Invalid, "no command given"));
        }
        let init = proc.init_pid().ok_or_else(|| refusal(proc, Code::State, "the proc has ended"))?;
        let root = File::open(format!("/proc/{init}/root")).map_err(io)?;
        let user = match &request.user {
            Some(wanted) => users::find(root.as_fd(), wanted).map(Some),
            None => user_in(proc, root.as_fd()),
        };
        let user = user.map_err(|e| refusal(proc, Code::Invalid, &chain(&e)))?;
        let own_time = kip_sys::timens::other_time_of(init).map_err(io)?.is_some();
        let mut all = proc.spec().env.clone();
        all.extend(request.env.clone());
        let own = || proc.spec().workdir.as_ref().map(|dir| dir.to_string_lossy().into_owned());
        Ok(ExecContext {
            root,
            own_time,
            init: kip_sys::process::pidfd_open(init).map_err(io)?,
            limits: limits_of(proc),
            cgroup: proc.cgroup.task_files().map_err(|e| refusal(proc, Code::Failed, &chain(&e)))?,
            env: environment_of(proc, user.as_ref(), all),
            workdir: request.workdir.clone().or_else(own),
            user,
            proc,
        })
    }

    /// An error that names the proc.
    pub fn refuse(&self, code: Code, what: &str) -> Refusal {
        refusal(self.proc, code, what)
    }

    /// The command that is missing, if it is that, or the launcher's own words.
    fn explain(&self, command: &[String], error: &LaunchError) -> Refusal {
        match error.is_missing_command() {
            true => {
                let workdir = self.workdir.as_deref().map(Path::new);
                let look = |tree| interpreter::missing(&tree, &command[0], workdir, path_in(&self.env));
                let why = match files::awake(self.proc).ok().and_then(look) {
                    Some(missing) => format!("command {:?} cannot be started: {missing}", command[0]),
                    None => {
                        let of_machine = !matches!(self.proc.spec().image, Image::Oci(_));
                        interpreter::absent(&command[0], path_in(&self.env), of_machine)
                    }
                };
                self.refuse(Code::Invalid, &why)
            }
            false => self.refuse(Code::Failed, &chain(error)),
        }
    }

    /// What the launcher is asked, with these standard streams.
    pub fn launch<'b>(&'b self, command: &'b [String], [stdin, stdout, stderr]: [BorrowedFd<'b>; 3]) -> Launch<'b> {
        Launch {
            init: self.init.as_fd(),
            own_time: self.own_time,
            command,
            env: &self.env,
            workdir: self.workdir.as_deref(),
            filter: self.proc.spec().sandbox.filter(),
            allow_setuid: self.proc.spec().allow_setuid,
            capabilities: self.proc.spec().capabilities(),
            ids: self.user.as_ref().map(|user| &user.ids),
            limits: &self.limits,
            cgroup: &self.cgroup,
            stdin,
            stdout,
            stderr,
        }
    }
}

fn launch(proc: &Proc, request: &ExecRequest) -> Result<Launched, Refusal> {
    let place = ExecContext::find(proc, request)?;
    let io = |e: io::Error| place.refuse(Code::Exhausted, &e.to_string());
    let (stdin, stdout, stderr) =
        (make_pipe(proc, true).map_err(io)?, make_pipe(proc, false).map_err(io)?, make_pipe(proc, false).map_err(io)?);
    if let Some(user) = &place.user {
        give_output(proc, user, &[&stdin.theirs, &stdout.theirs, &stderr.theirs]).map_err(io)?;
    }
    let streams = [stdin.theirs.as_fd(), stdout.theirs.as_fd(), stderr.theirs.as_fd()];
    let executing = proc.shared.launcher().exec(place.launch(&request.command, streams));
    let executing = executing.map_err(|e| place.explain(&request.command, &e))?;
    let ends = proc.shared.exec_ends.wait(executing.id);
    Ok((executing, ends, [stdin.ours, stdout.ours, stderr.ours]))
}

async fn feed(mut input: pipe::Sender, mut typed: mpsc::Receiver<ExecInput>) {
    while let Some(item) = typed.recv().await {
        // Without a terminal there is nothing that has a size.
        let ExecInput::Bytes(bytes) = item else { continue };
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
            // A child it left behind may keep the pipes open: what was written when it ended is
            // enough.
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
    let code = exit.unwrap_or(Exit::Unknown).shell_code();
    let _ = sender.send(ExecOutput::End(ExecEnd { code, refusal: None })).await;
}
