//! Starts a proc: ports, namespaces, files, cgroup, launch. Undone whole by [`crate::stop`] if a
//! step fails.

use crate::descriptors::reopen;
use crate::exits::read_record;
use crate::fd_store::key;
use crate::host::Proc;
use crate::host::resolver;
use crate::input;
use crate::prepared::PreparedNetwork;
use crate::volumes;
use kip_net::nat::{Forward, Network, Published};
use kip_net::reserve::{self, At, ReserveError};
use kip_sandbox::ResourceLimit;
use kip_sandbox::archive;
use kip_sandbox::init::{self, StartStep};
use kip_sandbox::launch::DEFAULT_PATH;
use kip_sandbox::launcher::{StartRequest, environment};
use kip_sandbox::terminals;
use kip_sandbox::users::{self, User, UserError};
use kip_sys::fault;
use kip_types::api::{Code, PortView, Refusal};
use kip_types::chain;
use kip_types::spec::Ulimit;
use kip_types::{Image, ProcName, Protocol, Spec};
use rustix::fs::OFlags;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the sandbox may take to exec the program.
const EXEC_WITHIN: Duration = Duration::from_secs(30);
/// How long `--wait-ready` waits for the ports.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// A refusal that names the proc and what could not be done.
pub fn refuse(code: Code, proc: &Proc, what: &str, e: &dyn std::error::Error) -> Refusal {
    Refusal::new(code, format!("{} cannot start: {what}: {}", proc.name, chain(e)))
}

/// What a start makes.
pub struct Started {
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
) -> Result<Started, Refusal> {
    let ports = reserve_ports(proc, earlier)?;
    fault::reach("start-ports");
    let prepared = match prepared {
        Some(prepared) => prepared,
        None => {
            let made = proc.shared.prepared_networks.make(proc.slot);
            made.map_err(|e| refuse(Code::Exhausted, proc, "its namespaces", &e))?
        }
    };
    proc.meter.without_network();
    unpack(proc)?;
    let limits = &proc.spec.limits;
    let cgroup = proc.shared.cgroups.create(proc.cgroup.name(), limits);
    let cgroup = cgroup.map_err(|e| refuse(Code::Invalid, proc, "its limits", &e))?;
    let address = prepared.net.v4;
    let made = proc.shared.launcher().namespaces(proc.first_id(), proc.spec.hostname());
    let namespaces = made.map_err(|e| refuse(Code::Exhausted, proc, "its namespaces", &e))?;
    let Pipes { status, status_write, out, err } = hold_pipes(proc)?;
    fault::reach("start-namespaces");
    let mounts = proc.mounts_of(namespaces.user.as_fd(), false);
    let mut mounts = mounts.map_err(|e| refuse(Code::Failed, proc, "its files cannot be mounted", &e))?;
    let tasks = cgroup.task_files().map_err(|e| refuse(Code::Failed, proc, "its cgroup", &e))?;
    let user = user_in(proc, mounts.root.as_fd()).map_err(|e| refuse(Code::Invalid, proc, "its user", &e))?;
    let owner = user.as_ref().map_or((0, 0), |user| (user.ids.uid, user.ids.gid));
    let volumes = volumes::for_start(proc, &mounts, namespaces.user.as_fd(), owner);
    mounts.volumes = volumes.map_err(|e| refuse(Code::Exhausted, proc, "its volumes", &e))?;
    let terminals = terminals::mount(proc.first_id()).map_err(|e| refuse(Code::Failed, proc, "its terminals", &e))?;
    let input = input::make(proc, terminals.fd.as_fd(), proc.first_id() + owner.0);
    let input = input.map_err(|e| refuse(Code::Exhausted, proc, "its standard input", &e))?;
    mounts.volumes.push(terminals);
    fault::reach("start-mounts");
    if let Some(user) = &user {
        give_output(proc, user, &[&out, &err]).map_err(|e| refuse(Code::Failed, proc, "its pipes", &e))?;
    }
    let mut env = proc.spec.env.clone();
    if proc.spec.terminal {
        env.entry("TERM".to_owned()).or_insert_with(|| "xterm".to_owned());
    }
    let env = environment_of(proc, user.as_ref(), env);
    let workdir = proc.spec.workdir.as_ref().map(|d| d.to_string_lossy().into_owned());
    fault::reach("start-held");
    // Before the program can ask.
    if !exec_only {
        resolver::make(proc, prepared.net.fd.as_fd());
    }
    let request = StartRequest {
        command: &proc.spec.command,
        env: &env,
        workdir: workdir.as_deref(),
        directories: directories_of(proc),
        allow_setuid: proc.spec.allow_setuid,
        ids: user.as_ref().map(|user| &user.ids),
        limits: &limits_of(proc),
        exec_only,
        mounts,
        namespaces: &namespaces,
        net: prepared.net.fd.as_fd(),
        cgroup: &tasks,
        stdin: input.stdin(),
        stdout: input.terminal().unwrap_or(out.as_fd()),
        stderr: input.terminal().unwrap_or(err.as_fd()),
        status: status_write.as_fd(),
    };
    let published = std::thread::scope(|scope| {
        // A proc that is to be alone is so before its program's first instruction.
        let before = if proc.spec.alone { Some(publish(proc, &ports)) } else { None };
        let beside = before.is_none().then(|| scope.spawn(|| publish(proc, &ports)));
        before.unwrap_or(Ok(()))?;
        let launched = proc.shared.launcher().start(request);
        beside.map_or(Ok(()), |publish| publish.join().expect("publishing does not panic"))?;
        launched.map_err(|e| refuse(Code::Failed, proc, "its sandbox", &e))
    });
    let started = published?;
    fault::reach("start-launched");
    let program = await_exec(proc, &status)?;
    proc.shared.follow_output(proc);
    let ports = ports.iter().map(|p| view(p, address)).collect();
    Ok(Started { init: started.init_pid, program, ports })
}

/// A port with its reservation.
pub struct Reserved {
    spec: kip_types::PortSpec,
    host_port: Option<u16>,
}

/// A reserved port, as clients see it.
pub fn view(port: &Reserved, addr: Ipv4Addr) -> PortView {
    PortView {
        proto: port.spec.proto,
        port: port.spec.port,
        addr: IpAddr::V4(addr),
        host_addr: port.spec.host_addr.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        host_port: port.host_port,
    }
}

/// Reserves host ports: the asked one, else the one it had before if that is free, else any.
pub fn reserve_ports(proc: &Proc, earlier: &[PortView]) -> Result<Vec<Reserved>, Refusal> {
    let mut reserved = Vec::new();
    let mut fds: Vec<(String, OwnedFd)> = Vec::new();
    for spec in &proc.spec.ports {
        if spec.private {
            reserved.push(Reserved { spec: spec.clone(), host_port: None });
            continue;
        }
        let before = earlier.iter().find(|p| (p.proto, p.port) == (spec.proto, spec.port)).and_then(|p| p.host_port);
        let key = format!("{}{}/{}", key::PORT, spec.proto, spec.port);
        if let Some(host_port) = before.filter(|_| proc.fd_store.get(&key).is_some()) {
            // It is started again, and has kept it.
            reserved.push(Reserved { spec: spec.clone(), host_port: Some(host_port) });
            continue;
        }
        let wish = spec.host_port.or(before);
        let at = match (spec.host_addr, before) {
            (None, _) => At::All,
            (Some(addr), None) => At::Only(addr),
            (Some(addr), Some(_)) => At::Expected(addr),
        };
        let mut got = reserve::reserve(spec.proto, at, wish);
        if got.is_err() && wish.is_some() && spec.host_port.is_none() {
            got = reserve::reserve(spec.proto, at, None);
        }
        let got = got.map_err(|e| {
            let owner = proc.shared.owner_of_port(spec, wish.unwrap_or(0), std::slice::from_ref(&proc.name));
            port_is_taken(&proc.name, owner, spec.proto, wish.unwrap_or(0), &e)
        })?;
        fds.push((key, got.fd));
        reserved.push(Reserved { spec: spec.clone(), host_port: Some(got.port) });
    }
    proc.fd_store.hold(fds).map_err(|e| refuse(Code::Exhausted, proc, "the keeper", &e))?;
    Ok(reserved)
}

/// Which proc has a port that `name` asked for, and what to do.
pub fn port_is_taken(
    name: &ProcName,
    owner: Option<ProcName>,
    proto: Protocol,
    port: u16,
    e: &ReserveError,
) -> Refusal {
    let by = owner.map_or_else(|| chain(e), |owner| format!("{proto} port {port} is taken by proc {owner}"));
    let other = if matches!(e, ReserveError::NoAddress(_)) { "address" } else { "host port" };
    Refusal::new(Code::Taken, format!("{name} cannot start: {by}; choose another {other}"))
}

/// The network that a proc is in.
pub fn network_of(spec: &Spec) -> Option<Network> {
    spec.network.as_ref().map(|name| Network { realm: spec.realm.clone(), name: name.clone() })
}

/// Has the machine lead its published ports to it.
///
/// # Errors
/// The rules cannot be set.
pub fn publish(proc: &Proc, ports: &[Reserved]) -> Result<(), Refusal> {
    let forward = |p: &Reserved| Forward {
        proto: p.spec.proto,
        host_port: p.host_port,
        host_addr: p.spec.host_addr,
        port: p.spec.port,
    };
    let forwards: Vec<Forward> = ports.iter().map(forward).collect();
    let (slot, network) = (proc.slot, network_of(&proc.spec));
    let done = proc.shared.nat.publish(Published { slot, network, ports: forwards, alone: proc.spec.alone });
    done.map_err(|e| refuse(Code::Failed, proc, "its ports cannot be forwarded", &e))
}

/// The user that its programs run as, by the files below `root`; none for the sandbox's root.
pub fn user_in(proc: &Proc, root: BorrowedFd<'_>) -> Result<Option<User>, UserError> {
    proc.spec.user.as_deref().map(|wanted| users::find(root, wanted)).transpose()
}

/// What its image wants to be there.
fn directories_of(proc: &Proc) -> &[String] {
    match &proc.spec.image {
        Image::Oci(image) => &image.volumes,
        _ => &[],
    }
}

/// The environment of its programs.
pub fn environment_of(proc: &Proc, user: Option<&User>, mut wanted: BTreeMap<String, String>) -> Vec<String> {
    if let Some(home) = user.and_then(|user| user.home.clone()) {
        wanted.entry("HOME".to_owned()).or_insert(home);
    }
    environment(proc.spec.hostname(), &wanted)
}

/// What its owner says of the limits of its processes.
pub fn limits_of(proc: &Proc) -> Vec<ResourceLimit> {
    let limit = |of: &Ulimit| ResourceLimit { resource: of.resource(), soft: of.soft, hard: of.hard };
    proc.spec.ulimits.iter().map(limit).collect()
}

/// Lets a user open /dev/stdout and /dev/stderr again.
pub fn give_output(proc: &Proc, user: &User, pipes: &[&OwnedFd]) -> io::Result<()> {
    let (uid, gid) = (proc.first_id() + user.ids.uid, proc.first_id() + user.ids.gid);
    pipes.iter().try_for_each(|pipe| std::os::unix::fs::fchown(pipe, Some(uid), Some(gid)))
}

fn unpack(proc: &Proc) -> Result<(), Refusal> {
    let Image::Tar(tarball) = &proc.spec.image else { return Ok(()) };
    let layer = proc.dir.join("layer");
    if layer.exists() {
        return Ok(());
    }
    archive::unpack(tarball, &layer, &archive::Limits::default())
        .map(|_| ())
        .map_err(|e| refuse(Code::Invalid, proc, "its tarball", &e))
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
    let failed = |e: io::Error| refuse(Code::Exhausted, proc, "its pipes", &e);
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
    proc.fd_store.hold(fds).map_err(|e| refuse(Code::Exhausted, proc, "the keeper", &e))?;
    let status = proc.fd_store.get(key::STATUS).expect("held just now");
    Ok(Pipes { status, status_write, out, err })
}

/// Waits for pid 1's word that the program was exec'd; returns its pid inside.
fn await_exec(proc: &Proc, status: &OwnedFd) -> Result<u32, Refusal> {
    match read_record(status, EXEC_WITHIN) {
        Ok(Some(init::Record::Running { pid_inside })) => Ok(pid_inside),
        Ok(Some(init::Record::NotStarted { step, errno })) => Err(exec_failed(proc, step, errno)),
        Ok(other) => Err(Refusal::new(
            Code::Failed,
            format!("{} cannot start: its sandbox ended before the program ran ({other:?})", proc.name),
        )),
        Err(e) => Err(refuse(Code::Failed, proc, "its sandbox does not answer", &e)),
    }
}

fn exec_failed(proc: &Proc, step: StartStep, errno: i32) -> Refusal {
    let program = &proc.spec.command[0];
    let e = io::Error::from_raw_os_error(errno);
    let message = match (step, e.kind()) {
        (StartStep::Exec, io::ErrorKind::NotFound) => format!(
            "{}: command {program:?} is not in the proc's files (PATH there is {})",
            proc.name,
            proc.spec.env.get("PATH").map_or(DEFAULT_PATH, String::as_str)
        ),
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
    loop {
        let missing: Vec<_> = proc.spec.ports.iter().filter(|p| !listens(init, p.proto, p.port)).collect();
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
fn listens(init: u32, proto: Protocol, port: u16) -> bool {
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
