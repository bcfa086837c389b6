//! The daemon's side of `kip-launch`: blocking calls, from any thread.
//!
//! Calls are carried out one by one. Each is answered once the kernel has done it; nothing waits
//! for a tenant's program. When the launcher dies every call fails with [`LaunchError::Gone`] and a
//! new one has to be spawned; what the old one had started goes on, but the ends of its execs are
//! lost.

use crate::init::exit_of;
use crate::mounts::Mounts;
use crate::protocol::{Ended, FILLED, Failure, Lower, Program, ProgramIds, Reply, Request, ResourceLimit, Step};
use kip_sys::fdpass;
use kip_types::lifecycle::Exit;
use kip_types::spec::{CapabilityBits, DEFAULT_PATH, FilterKind, RootKind};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A call to the launcher failed.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A step that the launcher took; nothing is left of it.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The command, with its arguments and environment, does not fit into a message.
    #[error("the command with its environment has {bytes} bytes; at most {} are possible", fdpass::MAX_BYTES)]
    TooLong {
        /// As JSON.
        bytes: usize,
    },
    /// The launcher is not there any more.
    #[error("kip-launch has ended")]
    Gone(#[source] io::Error),
    /// The launcher could not be started.
    #[error("could not start {program}")]
    Spawn {
        /// The program.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl LaunchError {
    /// The command that was to be executed is not there.
    pub fn is_missing_command(&self) -> bool {
        let missing = Errno::NOENT.raw_os_error();
        matches!(self, LaunchError::Failed(f) if f.step == Step::Exec && f.errno == missing)
    }
}

/// The namespaces of a proc that the launcher makes. They live as long as these descriptors or a
/// process in them.
#[derive(Debug)]
pub struct Namespaces {
    /// Maps the ids 0 to 65535 to the proc's block.
    pub user: OwnedFd,
    /// With the hostname, owned by the initial user namespace.
    pub uts: OwnedFd,
    /// Empty, owned by the user namespace above.
    pub ipc: OwnedFd,
}

/// A sandbox to start.
#[derive(Debug)]
pub struct SandboxStart<'a> {
    /// Program and arguments.
    pub command: &'a [String],
    /// The whole environment, see [`environment`].
    pub env: &'a [String],
    /// None is `/`.
    pub workdir: Option<&'a str>,
    /// Directories that are made if they are not there, absolute.
    pub directories: &'a [String],
    /// The host name that its uts namespace gets.
    pub hostname: &'a str,
    /// `/` and `/usr` cannot be written to.
    pub read_only: bool,
    /// What it has for a root.
    pub root: RootKind,
    /// The system calls that it may make.
    pub filter: FilterKind,
    /// Lets setuid programs inside gain their owner's identity.
    pub allow_setuid: bool,
    /// Capabilities of its root, a bit for each (capabilities(7)).
    pub capabilities: CapabilityBits,
    /// The user that the program runs as; none is the sandbox's root.
    pub ids: Option<&'a ProgramIds>,
    /// Limits of resources beside those that the launcher has.
    pub limits: &'a [ResourceLimit],
    /// Only checks whether the program can be started: it is exec'd, and killed before its first
    /// instruction, with its sandbox.
    pub exec_only: bool,
    /// Used up: a mount can be attached only once.
    pub mounts: Mounts,
    /// The slot's.
    pub namespaces: &'a Namespaces,
    /// The network namespace.
    pub net: BorrowedFd<'a>,
    /// From [`crate::cgroup::Cgroup::task_files`].
    pub cgroup: &'a [OwnedFd],
    /// The program's stdin; none is the sandbox's null device.
    pub stdin: Option<BorrowedFd<'a>>,
    /// The program's stdout.
    pub stdout: BorrowedFd<'a>,
    /// The program's stderr.
    pub stderr: BorrowedFd<'a>,
    /// The write end of a pipe for [`crate::init::InitRecord`]s.
    pub status: BorrowedFd<'a>,
}

/// A sandbox to start with a restorer in the place of init.
#[derive(Debug)]
pub struct SandboxRestore<'a> {
    /// Used up: a mount can be attached only once.
    pub mounts: Mounts,
    /// What it has for a root.
    pub root: RootKind,
    /// The user namespace, which will own the pid and mount namespaces too.
    pub user: BorrowedFd<'a>,
    /// The network namespace.
    pub net: BorrowedFd<'a>,
    /// The uts namespace.
    pub uts: BorrowedFd<'a>,
    /// The ipc namespace; without one a new one is made, which belongs to the user namespace.
    pub ipc: Option<BorrowedFd<'a>>,
    /// The time namespace, if it is to be another than the launcher's.
    pub time: Option<BorrowedFd<'a>>,
    /// Becomes [`crate::restorer::CONTROL_FD`].
    pub control: BorrowedFd<'a>,
    /// What to execute, e.g. a memfd with [`crate::restorer::RESTORER`]; no process may have it
    /// open for writing.
    pub program: BorrowedFd<'a>,
    /// From [`crate::cgroup::Cgroup::task_files`].
    pub cgroup: &'a [OwnedFd],
}

/// A program to run in a sandbox that is there.
#[derive(Debug)]
pub struct SandboxExec<'a> {
    /// pidfd of the sandbox's init.
    pub init: BorrowedFd<'a>,
    /// Whether init has another time namespace than the launcher.
    pub own_time: bool,
    /// Program and arguments.
    pub command: &'a [String],
    /// The whole environment, see [`environment`].
    pub env: &'a [String],
    /// None is `/`.
    pub workdir: Option<&'a str>,
    /// As at the start.
    pub filter: FilterKind,
    /// As at the start.
    pub allow_setuid: bool,
    /// As at the start.
    pub capabilities: CapabilityBits,
    /// As at the start.
    pub ids: Option<&'a ProgramIds>,
    /// As at the start.
    pub limits: &'a [ResourceLimit],
    /// As at the start.
    pub cgroup: &'a [OwnedFd],
    /// Its stdin.
    pub stdin: BorrowedFd<'a>,
    /// Its stdout.
    pub stdout: BorrowedFd<'a>,
    /// Its stderr.
    pub stderr: BorrowedFd<'a>,
}

/// A sandbox whose init has been exec'd. Whether the program has is told by the status pipe; an
/// init that the kernel killed at once (a memory limit) says nothing there, and its pidfd tells
/// that it has ended.
#[derive(Debug)]
pub struct Started {
    /// Host pid.
    pub init_pid: u32,
    /// Readable when init has ended.
    pub pidfd: OwnedFd,
}

/// An exec that runs.
#[derive(Debug)]
pub struct Executing {
    /// By which [`Launcher::next_event`] names it.
    pub id: ExecId,
    /// Host pid.
    pub pid: u32,
    /// Readable when it has ended, possibly before the event.
    pub pidfd: OwnedFd,
}

/// Names an exec of one launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExecId(u64);

/// The end of an exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecEnded {
    /// Which.
    pub id: ExecId,
    /// How.
    pub exit: Exit,
}

/// Other mounts of what a sandbox has mounted.
#[derive(Debug)]
pub struct CopiedMounts {
    /// Of its own files, without its volumes.
    pub files: Mounts,
    /// Of file systems in memory, as they were asked for.
    pub in_memory: Vec<OwnedFd>,
}

/// A running `kip-launch`. It ends when this is dropped.
#[derive(Debug)]
pub struct Launcher {
    requests: Mutex<OwnedFd>,
    events: OwnedFd,
    child: Mutex<Child>,
    next_exec: AtomicU64,
}

impl Launcher {
    /// Starts the program and waits until it is ready.
    ///
    /// # Errors
    /// [`LaunchError::Spawn`], or the step of its set-up that failed.
    pub fn spawn(program: &Path) -> Result<Launcher, LaunchError> {
        let failed = |source| LaunchError::Spawn { program: program.display().to_string(), source };
        let (requests, theirs) = fdpass::seqpacket_pair().map_err(failed)?;
        let (events, events_theirs) = fdpass::seqpacket_pair().map_err(failed)?;
        for end in [&events, &events_theirs] {
            rustix::fs::fcntl_setfl(end, OFlags::NONBLOCK).map_err(|e| failed(e.into()))?;
        }
        let mut command = Command::new(program);
        command.env_clear().stdin(theirs).stdout(Stdio::null()).current_dir("/");
        let child = command.spawn().map_err(failed)?;
        kip_sys::process::usual_nofile(child.id()).map_err(failed)?;
        // The descriptor given away is ours to close too, or the launcher's end would not be
        // noticed.
        drop(command);
        let launcher =
            Launcher { requests: Mutex::new(requests), events, child: Mutex::new(child), next_exec: AtomicU64::new(1) };
        match launcher.call(&Request::Events, &[events_theirs.as_fd()])? {
            (Reply::Ready, _) => Ok(launcher),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.lock().id()
    }

    /// Starts init in a new sandbox, which then starts the program.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn start(&self, request: SandboxStart<'_>) -> Result<Started, LaunchError> {
        let Namespaces { user, uts, ipc } = request.namespaces;
        let mut fds = vec![
            request.mounts.root.as_fd(),
            request.mounts.usr.as_fd(),
            user.as_fd(),
            request.net,
            uts.as_fd(),
            ipc.as_fd(),
            request.stdout,
            request.stderr,
            request.status,
        ];
        fds.extend(request.stdin);
        let volumes = attached(&request.mounts, &mut fds);
        fds.extend(request.cgroup.iter().map(|f| f.as_fd()));
        let rights =
            Rights { allow_setuid: request.allow_setuid, capabilities: request.capabilities, filter: request.filter };
        let program = program(request.command, request.env, request.workdir, rights, request.ids);
        let program = Program { exec_only: request.exec_only, limits: request.limits.to_vec(), ..program };
        let directories = request.directories.to_vec();
        let start = Request::Start {
            program,
            has_stdin: request.stdin.is_some(),
            volumes,
            directories,
            hostname: request.hostname.to_owned(),
            read_only: request.read_only,
            root: request.root,
        };
        let (init_pid, pidfd) = self.process(&start, &fds)?;
        Ok(Started { init_pid, pidfd })
    }

    /// Makes a sandbox as for a start and executes a restorer as its pid 1: with every capability
    /// of the sandbox's user namespace and without a system call filter, both of which it must give
    /// up itself. The program finds only the control socket, and as stdin, stdout and stderr the
    /// sandbox's null device or, if that is none, nothing.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn restore(&self, request: SandboxRestore<'_>) -> Result<Started, LaunchError> {
        let mut fds = vec![
            request.mounts.root.as_fd(),
            request.mounts.usr.as_fd(),
            request.user,
            request.net,
            request.uts,
            request.control,
            request.program,
        ];
        fds.extend(request.ipc);
        fds.extend(request.time);
        let volumes = attached(&request.mounts, &mut fds);
        fds.extend(request.cgroup.iter().map(|f| f.as_fd()));
        let (new_ipc, own_time) = (request.ipc.is_none(), request.time.is_some());
        let (init_pid, pidfd) =
            self.process(&Request::Restore { new_ipc, own_time, volumes, root: request.root }, &fds)?;
        Ok(Started { init_pid, pidfd })
    }

    /// Runs a program in a sandbox. Its end is told by [`Launcher::next_event`].
    ///
    /// # Errors
    /// See [`LaunchError`], in particular [`LaunchError::is_missing_command`].
    pub fn exec(&self, request: SandboxExec<'_>) -> Result<Executing, LaunchError> {
        let id = self.next_exec.fetch_add(1, Ordering::Relaxed);
        let mut fds = vec![request.init, request.stdin, request.stdout, request.stderr];
        fds.extend(request.cgroup.iter().map(|f| f.as_fd()));
        let rights =
            Rights { allow_setuid: request.allow_setuid, capabilities: request.capabilities, filter: request.filter };
        let program = program(request.command, request.env, request.workdir, rights, request.ids);
        let program = Program { limits: request.limits.to_vec(), ..program };
        let (pid, pidfd) = self.process(&Request::Exec { id, program, own_time: request.own_time }, &fds)?;
        Ok(Executing { id: ExecId(id), pid, pidfd })
    }

    /// Runs a program in a sandbox as a part of its tree. [`crate::init::InitRecord`]s of the
    /// program come by the pipe `status`; the result is the pidfd of the kip-init that writes them.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn session(&self, request: SandboxExec<'_>, status: BorrowedFd<'_>) -> Result<OwnedFd, LaunchError> {
        let mut fds = vec![request.init, request.stdin, request.stdout, request.stderr, status];
        fds.extend(request.cgroup.iter().map(|f| f.as_fd()));
        let rights =
            Rights { allow_setuid: request.allow_setuid, capabilities: request.capabilities, filter: request.filter };
        let program = program(request.command, request.env, request.workdir, rights, request.ids);
        let program = Program { limits: request.limits.to_vec(), ..program };
        let [pidfd] = self.ready(&Request::Session { program, own_time: request.own_time }, &fds)?;
        Ok(pidfd)
    }

    /// Makes the namespaces of a slot: `uid_base` is the host id of the first of its 65,536 ids. A
    /// start gives them the host name again, for it may not be known before.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn namespaces(&self, uid_base: u32, hostname: &str) -> Result<Namespaces, LaunchError> {
        let request = Request::Namespaces { uid_base, hostname: hostname.to_owned() };
        let [user, uts, ipc] = self.ready(&request, &[])?;
        Ok(Namespaces { user, uts, ipc })
    }

    /// Other detached mounts of a running sandbox's filesystems, by the pidfd of its init. As long
    /// as they are held no new ones can be mounted from the same directories.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn copy_mounts(&self, init: BorrowedFd<'_>, points: &[String]) -> Result<CopiedMounts, LaunchError> {
        let (reply, fds) = self.call(&Request::Copy { points: points.to_vec() }, &[init])?;
        let mut fds = fds.into_iter();
        let (Some(root), Some(usr)) = (fds.next(), fds.next()) else { return Err(unexpected(&reply)) };
        let in_memory: Vec<OwnedFd> = fds.by_ref().take(points.len()).collect();
        if in_memory.len() != points.len() {
            return Err(unexpected(&reply));
        }
        Ok(CopiedMounts { files: Mounts { root, usr, terminals: fds.next(), volumes: Vec::new() }, in_memory })
    }

    /// Makes what [`kip_files::whole::write`] has written into `contents` in a file system in
    /// memory, which these cgroups pay for. Waits until it is done.
    ///
    /// # Errors
    /// See [`LaunchError`]; [`Step::Fill`] says why it could not be done.
    pub fn fill(
        &self,
        mount: BorrowedFd<'_>,
        contents: BorrowedFd<'_>,
        first_id: u32,
        cgroup: &[OwnedFd],
    ) -> Result<(), LaunchError> {
        let failed = |e: io::Error| LaunchError::from(Failure::new(Step::Fill, e));
        let (mut said, theirs) = io::pipe().map_err(failed)?;
        let mut fds = vec![mount, contents, theirs.as_fd()];
        fds.extend(cgroup.iter().map(AsFd::as_fd));
        let [] = self.ready(&Request::Fill { first_id }, &fds)?;
        drop(theirs);
        let mut text = Vec::new();
        io::Read::read_to_end(&mut said, &mut text).map_err(failed)?;
        match &text[..] {
            FILLED => Ok(()),
            b"" => Err(failed(io::Error::other("its process was killed: the memory limit may be too small for it"))),
            why => Err(failed(io::Error::other(String::from_utf8_lossy(why).into_owned()))),
        }
    }

    /// Mounts the overlays of a proc.
    pub(crate) fn mount(&self, lower: Lower, root: RootKind, fds: &[BorrowedFd<'_>]) -> Result<Mounts, LaunchError> {
        let [root, usr] = self.ready(&Request::Mount { lower, root }, fds)?;
        Ok(Mounts { root, usr, terminals: None, volumes: Vec::new() })
    }

    /// The next end of an exec, if one is there. Never blocks.
    ///
    /// # Errors
    /// [`LaunchError::Gone`].
    pub fn next_event(&self) -> Result<Option<ExecEnded>, LaunchError> {
        match fdpass::recv(self.events.as_fd(), 256) {
            Ok((bytes, _)) => {
                let ended: Ended = serde_json::from_slice(&bytes).map_err(|e| LaunchError::Gone(e.into()))?;
                Ok(Some(ExecEnded { id: ExecId(ended.id), exit: exit_of(ended.status) }))
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(LaunchError::Gone(e)),
        }
    }

    /// Readable when [`Launcher::next_event`] has something to say, its end included. Nonblocking.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    fn process(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(u32, OwnedFd), LaunchError> {
        match self.call(request, fds)? {
            (Reply::Process { pid }, mut fds) if fds.len() == 1 => Ok((pid, fds.remove(0))),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn ready<const N: usize>(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<[OwnedFd; N], LaunchError> {
        let (reply, fds) = self.call(request, fds)?;
        fds.try_into().map_err(|_| unexpected(&reply))
    }

    fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), LaunchError> {
        let bytes = serde_json::to_vec(request).expect("a request has only strings and numbers");
        if bytes.len() > fdpass::MAX_BYTES {
            return Err(LaunchError::TooLong { bytes: bytes.len() });
        }
        let socket = self.requests.lock();
        fdpass::send(socket.as_fd(), &bytes, fds).map_err(LaunchError::Gone)?;
        let (bytes, fds) = fdpass::recv(socket.as_fd(), 16 * 1024).map_err(LaunchError::Gone)?;
        match serde_json::from_slice(&bytes).map_err(|e| LaunchError::Gone(e.into()))? {
            Reply::Failed(failure) => Err(failure.into()),
            reply => Ok((reply, fds)),
        }
    }
}

impl Drop for Launcher {
    /// Lets it finish what it does and waits for it, at most two seconds.
    fn drop(&mut self) {
        let socket = self.requests.get_mut();
        let _ = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
        let child = self.child.get_mut();
        let until = Instant::now() + Duration::from_secs(2);
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() > until {
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Where the volumes are attached; their mounts go to the other descriptors.
fn attached<'a>(mounts: &'a Mounts, fds: &mut Vec<BorrowedFd<'a>>) -> Vec<String> {
    fds.extend(mounts.volumes.iter().map(|v| v.fd.as_fd()));
    mounts.volumes.iter().map(|v| v.target.clone()).collect()
}

/// What a program's root can do.
#[derive(Debug, Clone, Copy)]
struct Rights {
    allow_setuid: bool,
    capabilities: CapabilityBits,
    filter: FilterKind,
}

fn program(
    command: &[String],
    env: &[String],
    workdir: Option<&str>,
    rights: Rights,
    ids: Option<&ProgramIds>,
) -> Program {
    let Rights { allow_setuid, capabilities, filter } = rights;
    let workdir = workdir.map(str::to_owned);
    let (argv, env, ids) = (command.to_vec(), env.to_vec(), ids.cloned());
    Program { argv, env, workdir, allow_setuid, capabilities, filter, ids, limits: Vec::new(), exec_only: false }
}

fn unexpected(reply: &Reply) -> LaunchError {
    LaunchError::Gone(io::Error::new(io::ErrorKind::InvalidData, format!("an answer to another question: {reply:?}")))
}

/// The environment of a proc's programs: PATH, HOME and HOSTNAME, and what its owner wants on top
/// or instead.
pub fn environment(hostname: &str, wanted: &BTreeMap<String, String>) -> Vec<String> {
    let mut all = BTreeMap::from([("PATH", DEFAULT_PATH), ("HOME", "/root"), ("HOSTNAME", hostname)]);
    all.extend(wanted.iter().map(|(k, v)| (k.as_str(), v.as_str())));
    all.into_iter().map(|(k, v)| format!("{k}={v}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_s_environment_wins() {
        let wanted = BTreeMap::from([("HOME".into(), "/srv".into()), ("A".into(), "b=c".into())]);
        let env = environment("web", &wanted);
        assert_eq!(env, ["A=b=c", "HOME=/srv", "HOSTNAME=web", &format!("PATH={DEFAULT_PATH}")]);
    }
}
