//! Starts a proc: ports, namespaces, files, cgroup, launch. Undone whole by [`crate::stop`] if a
//! step fails.

use crate::descriptors::reopen;
use crate::exits::read_record;
use crate::fd_store::key;
use crate::files;
use crate::host::Proc;
use crate::host::resolver;
use crate::input;
pub use crate::ports::refuse;
use crate::ports::{self, Earlier};
use crate::sysfs;
use crate::tmpfs;
use crate::volumes;
use kip_clocks::AbsoluteWaits;
use kip_files::interpreter::{self, MissingInterpreter};
use kip_net::prepared::PreparedNetwork;
use kip_sandbox::ResourceLimit;
use kip_sandbox::archive;
use kip_sandbox::init::{self, StartStep};
use kip_sandbox::launcher::{SandboxStart, environment};
use kip_sandbox::terminals;
use kip_sandbox::users::{self, User, UserError};
use kip_sys::fault;
use kip_types::api::{Code, PortView, Refusal};
use kip_types::spec::{DEFAULT_PATH, NetworkKind, RootKind, Ulimit};
use kip_types::{Image, Protocol, Spec};
use rustix::fs::OFlags;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the sandbox may take to exec the program.
const EXEC_WITHIN: Duration = Duration::from_secs(30);
/// How long `--wait-ready` waits for the ports.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// What a start makes.
pub struct StartedProc {
    /// Its pid 1, by the machine's number.
    pub init: u32,
    /// The program, by its number inside.
    pub program: u32,
    /// Its ports.
    pub ports: Vec<PortView>,
}

/// Does all of a start of a new proc but run its program.
pub fn rehearse(proc: &Proc, prepared: PreparedNetwork) -> Result<(), Refusal> {
    build(proc, Some(prepared), &[], true).map(drop)
}

/// With `exec_only` its program is exec'd, but does not run.
pub fn build(
    proc: &Proc,
    prepared: Option<PreparedNetwork>,
    earlier: &[PortView],
    exec_only: bool,
) -> Result<StartedProc, Refusal> {
    let spec = proc.spec();
    // Those of a program that has ended.
    *proc.absolute_waits.lock() = AbsoluteWaits::default();
    let ports = ports::reserve(proc, &proc.spec().ports, Earlier { of: proc, ports: earlier })?;
    // A restart policy may have kept others, which a spec that was changed does not ask for.
    ports::let_go_of_others(proc, &ports);
    fault::reach("start-ports");
    let prepared = match prepared {
        Some(prepared) => prepared,
        None => {
            let made = proc.shared.prepared_networks.make(proc.slot, proc.spec().sandbox.network());
            made.map_err(|e| refuse(Code::Exhausted, proc, "its namespaces cannot be made", &e))?
        }
    };
    proc.meter.without_network();
    unpack(proc)?;
    let limits = &proc.spec().limits;
    let cgroup = proc.shared.cgroups.create(proc.cgroup.name(), limits);
    let cgroup = cgroup.map_err(|e| refuse(Code::Invalid, proc, "its limits cannot be set", &e))?;
    let ready = proc.shared.ready_namespaces.take(proc.slot);
    let ready = ready.map_or_else(|| proc.shared.launcher().namespaces(proc.first_id(), spec.hostname()), Ok);
    let namespaces = ready.map_err(|e| refuse(Code::Exhausted, proc, "its namespaces cannot be made", &e))?;
    let Pipes { status, status_write, out, err } = hold_pipes(proc)?;
    fault::reach("start-namespaces");
    let mounts = proc.mounts_of(namespaces.user.as_fd(), false);
    let mut mounts = mounts.map_err(|e| refuse(Code::Failed, proc, "its files cannot be mounted", &e))?;
    let tasks = cgroup.task_files().map_err(|e| refuse(Code::Failed, proc, "its cgroup cannot be opened", &e))?;
    let user = user_in(proc, mounts.root.as_fd())
        .map_err(|e| refuse(Code::Invalid, proc, "its user cannot be looked up", &e))?;
    let owner = user.as_ref().map_or((0, 0), |user| (user.ids.uid, user.ids.gid));
    let volumes = volumes::for_start(proc, &mounts, namespaces.user.as_fd(), owner);
    let volumes = volumes.map_err(|e| refuse(Code::Exhausted, proc, "its volumes cannot be opened", &e))?;
    let in_memory = tmpfs::for_start(proc);
    let in_memory =
        in_memory.map_err(|e| refuse(Code::Failed, proc, "its file systems in memory cannot be made", &e))?;
    mounts.volumes = tmpfs::in_order(in_memory, volumes);
    let has_terminals = spec.sandbox.root() == RootKind::Writable;
    let terminals = has_terminals.then(|| terminals::mount(proc.first_id())).transpose();
    let terminals = terminals.map_err(|e| refuse(Code::Failed, proc, "its terminals cannot be mounted", &e))?;
    let input = input::make(proc, terminals.as_ref().map(|mount| mount.fd.as_fd()), proc.first_id() + owner.0);
    let input = input.map_err(|e| refuse(Code::Exhausted, proc, "its standard input cannot be made", &e))?;
    mounts.volumes.extend(terminals);
    let with_runtime = sysfs::has_runtime_place(proc, mounts.root.as_fd());
    let sys = sysfs::mounts(proc, prepared.net.as_fd(), with_runtime);
    mounts.volumes.extend(sys.map_err(|e| refuse(Code::Failed, proc, "its /sys cannot be mounted", &e))?);
    fault::reach("start-mounts");
    if let Some(user) = &user {
        give_output(proc, user, &[&out, &err])
            .map_err(|e| refuse(Code::Failed, proc, "its pipes cannot be given to its user", &e))?;
    }
    let mut env = proc.spec().env.clone();
    if proc.spec().terminal {
        env.entry("TERM".to_owned()).or_insert_with(|| "xterm".to_owned());
    }
    let env = environment_of(proc, user.as_ref(), env);
    let workdir = proc.spec().workdir.as_ref().map(|d| d.to_string_lossy().into_owned());
    fault::reach("start-held");
    let look = mounts.root.try_clone().and_then(|root| Ok((root, mounts.usr.try_clone()?)));
    // Before the program can ask.
    if !exec_only {
        resolver::make(proc, prepared.net.as_fd());
    }
    let request = SandboxStart {
        hostname: spec.hostname(),
        command: &spec.command,
        env: &env,
        workdir: workdir.as_deref(),
        directories: directories_of(&spec),
        read_only: spec.read_only && spec.sandbox.root() == RootKind::Writable,
        root: spec.sandbox.root(),
        filter: spec.sandbox.filter(),
        allow_setuid: spec.allow_setuid,
        capabilities: spec.capabilities(),
        ids: user.as_ref().map(|user| &user.ids),
        limits: &limits_of(proc),
        exec_only,
        mounts,
        namespaces: &namespaces,
        net: prepared.net.as_fd(),
        cgroup: &tasks,
        stdin: input.stdin(),
        stdout: input.terminal().unwrap_or(out.as_fd()),
        stderr: input.terminal().unwrap_or(err.as_fd()),
        status: status_write.as_fd(),
    };
    let published = std::thread::scope(|scope| {
        // What a program may not call it may not call from its first instruction on.
        let first = proc.spec().alone || proc.egress.is_limited();
        let before = first.then(|| ports::publish(proc, &ports));
        let has_link = spec.sandbox.network() == NetworkKind::Private;
        let beside = (has_link && before.is_none()).then(|| scope.spawn(|| ports::publish(proc, &ports)));
        before.unwrap_or(Ok(()))?;
        let launched = proc.shared.launcher().start(request);
        beside.map_or(Ok(()), |publish| publish.join().expect("publishing does not panic"))?;
        launched.map_err(|e| refuse(Code::Failed, proc, "its sandbox cannot be started", &e))
    });
    let started = published?;
    fault::reach("start-launched");
    let missing = || {
        let (root, usr) = look.ok()?;
        let tree = files::mounted(proc, root, usr, &namespaces.user).ok()?;
        interpreter::missing(&tree, &proc.spec().command[0], proc.spec().workdir.as_deref(), path_in(&env))
    };
    let program = await_exec(proc, &status, missing)?;
    proc.shared.follow_output(proc);
    Ok(StartedProc { init: started.init_pid, program, ports })
}

/// The user that its programs run as, by the files below `root`; none for the sandbox's root.
pub fn user_in(proc: &Proc, root: BorrowedFd<'_>) -> Result<Option<User>, UserError> {
    proc.spec().user.as_deref().map(|wanted| users::find(root, wanted)).transpose()
}

/// What its image wants to be there.
fn directories_of(spec: &Spec) -> &[String] {
    match &spec.image {
        // In a sealed root nothing can be made.
        Image::Oci(image) if spec.sandbox.is_full() => &image.volumes,
        _ => &[],
    }
}

/// The environment of its programs.
pub fn environment_of(proc: &Proc, user: Option<&User>, mut wanted: BTreeMap<String, String>) -> Vec<String> {
    if let Some(home) = user.and_then(|user| user.home.clone()) {
        wanted.entry("HOME".to_owned()).or_insert(home);
    }
    environment(proc.spec().hostname(), &wanted)
}

/// Where programs are looked for with that environment.
pub fn path_in(environment: &[String]) -> &str {
    environment.iter().find_map(|word| word.strip_prefix("PATH=")).unwrap_or(DEFAULT_PATH)
}

/// What its owner says of the limits of its processes.
pub fn limits_of(proc: &Proc) -> Vec<ResourceLimit> {
    let limit = |of: &Ulimit| ResourceLimit { resource: of.resource(), soft: of.soft, hard: of.hard };
    proc.spec().ulimits.iter().map(limit).collect()
}

/// Lets a user open /dev/stdout and /dev/stderr again.
pub fn give_output(proc: &Proc, user: &User, pipes: &[&OwnedFd]) -> io::Result<()> {
    let (uid, gid) = (proc.first_id() + user.ids.uid, proc.first_id() + user.ids.gid);
    pipes.iter().try_for_each(|pipe| std::os::unix::fs::fchown(pipe, Some(uid), Some(gid)))
}

fn unpack(proc: &Proc) -> Result<(), Refusal> {
    let Image::Tar(tarball) = &proc.spec().image else { return Ok(()) };
    let layer = proc.dir.join("layer");
    if layer.exists() {
        return Ok(());
    }
    archive::unpack(tarball, &layer, &archive::ArchiveLimits::default())
        .map(|_| ())
        .map_err(|e| refuse(Code::Invalid, proc, "its tarball cannot be unpacked", &e))
}

/// The three pipes: what pid 1 reports, and the ends for the sandbox.
pub struct Pipes {
    status: Arc<OwnedFd>,
    status_write: OwnedFd,
    out: OwnedFd,
    err: OwnedFd,
}

/// Makes the three pipes and holds them. One descriptor is open at both ends: it reads, and it
/// keeps the pipe from ending when a program is parked.
pub fn hold_pipes(proc: &Proc) -> Result<Pipes, Refusal> {
    let failed = |e: io::Error| refuse(Code::Exhausted, proc, "its pipes cannot be made", &e);
    let first = proc.first_id();
    let mut fds = Vec::new();
    let mut make = |key: &str| -> io::Result<OwnedFd> {
        let (r, w) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        // So that the program may open /dev/stdout.
        std::os::unix::fs::fchown(&w, Some(first), Some(first))?;
        fds.push((key.to_owned(), reopen(&r, OFlags::RDWR | OFlags::NONBLOCK)?));
        Ok(w)
    };
    let [out, err, status_write] = [make(key::OUT), make(key::ERR), make(key::STATUS)];
    let (out, err, status_write) = (out.map_err(failed)?, err.map_err(failed)?, status_write.map_err(failed)?);
    proc.fd_store
        .hold(fds)
        .map_err(|e| refuse(Code::Exhausted, proc, "the keeper does not take its descriptors", &e))?;
    let status = proc.fd_store.get(key::STATUS).expect("held just now");
    Ok(Pipes { status, status_write, out, err })
}

/// Waits for pid 1's word that the program was exec'd; returns its pid inside.
fn await_exec(
    proc: &Proc,
    status: &OwnedFd,
    missing: impl FnOnce() -> Option<MissingInterpreter>,
) -> Result<u32, Refusal> {
    match read_record(status, EXEC_WITHIN) {
        Ok(Some(init::InitRecord::Running { pid_inside })) => Ok(pid_inside),
        Ok(Some(init::InitRecord::NotStarted { step, errno })) => Err(exec_failed(proc, step, errno, missing)),
        Ok(other) => Err(Refusal::new(
            Code::Failed,
            format!("{} cannot start: its sandbox ended before the program ran ({other:?})", proc.name),
        )),
        Err(e) => Err(refuse(Code::Failed, proc, "its sandbox does not answer", &e)),
    }
}

fn exec_failed(
    proc: &Proc,
    step: StartStep,
    errno: i32,
    missing: impl FnOnce() -> Option<MissingInterpreter>,
) -> Refusal {
    let program = &proc.spec().command[0];
    let e = io::Error::from_raw_os_error(errno);
    let message = match (step, e.kind()) {
        (StartStep::Exec, io::ErrorKind::NotFound) => match missing() {
            Some(missing) => format!("{}: command {program:?} cannot be started: {missing}", proc.name),
            None => {
                let (spec, of_machine) = (proc.spec(), !matches!(proc.spec().image, Image::Oci(_)));
                let path = spec.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
                format!("{}: {}", proc.name, interpreter::absent(program, path, of_machine))
            }
        },
        (StartStep::Exec, io::ErrorKind::PermissionDenied) => {
            format!("{}: command {program:?} may not be executed", proc.name)
        }
        (step, _) => format!("{}: command {program:?} cannot be started ({step:?}): {e}", proc.name),
    };
    Refusal::new(Code::Invalid, message)
}

/// Waits until every declared port has a socket, in the proc's own namespace.
pub async fn ready(proc: &Arc<Proc>, init: u32) -> Result<(), Refusal> {
    let until = Instant::now() + READY_WITHIN;
    let spec = proc.spec();
    loop {
        let missing: Vec<_> = spec.ports.iter().filter(|p| !listens(init, p.proto, p.port)).collect();
        let Some(first) = missing.first() else { return Ok(()) };
        if !Path::new(&format!("/proc/{init}/ns")).exists() || proc.cgroup.pids().is_ok_and(|p| p.is_empty()) {
            let exit = crate::exits::reported_exit(proc).map_or_else(|| "it is gone".to_owned(), |e| e.to_string());
            let last = proc.shared.last_words(proc);
            return Err(Refusal::new(
                Code::Failed,
                format!("{} ended before it listened on {} port {}: {exit}{last}", proc.name, first.proto, first.port),
            ));
        }
        if Instant::now() > until {
            return Err(Refusal::new(
                Code::Failed,
                format!(
                    "{} did not listen on {} port {} within {} s",
                    proc.name,
                    first.proto,
                    first.port,
                    READY_WITHIN.as_secs()
                ),
            ));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether anything listens there: /proc/PID/net/{tcp,udp}{,6} of the namespace of `init`.
pub fn listens(init: u32, proto: Protocol, port: u16) -> bool {
    let (files, state) = match proto {
        Protocol::Tcp => (["tcp", "tcp6"], Some("0A")),
        Protocol::Udp => (["udp", "udp6"], None),
    };
    let suffix = format!(":{port:04X}");
    files.iter().any(|file| {
        let text = fs::read_to_string(format!("/proc/{init}/net/{file}")).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, _, st) = (fields.next(), fields.next(), fields.next());
            local.is_some_and(|l| l.ends_with(&suffix)) && state.is_none_or(|s| st == Some(s))
        })
    })
}
