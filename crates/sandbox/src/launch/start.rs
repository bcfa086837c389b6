//! Starting a sandbox: one child whose steps read from top to bottom.

use super::confine::{Next, UserNamespace, confine, enter_user, limited};
use super::template::{NEW_ROOT, enter_root, mount_proc};
use super::volumes::{self, Placed};
use super::{Prepared, Spawned};
use crate::init;
use crate::protocol::{Failure, Program, Step};
use kip_sys::ns::{Clone, Strings};
use kip_types::spec::{FilterKind, RootKind};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::convert::Infallible;
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Paths of /proc that are covered by `/dev/null`, where the kernel has them. Each is a mount that
/// a checkpoint of the sandbox has to know of.
pub const MASKED: &[&str] =
    &["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sysrq-trigger", "/proc/kmsg", "/proc/kallsyms"];

/// The sandbox's files, as detached mounts.
#[derive(Debug)]
pub(super) struct Files {
    pub kind: RootKind,
    pub root: OwnedFd,
    pub usr: OwnedFd,
    pub volumes: Vec<Placed>,
    /// What is to be a directory.
    pub directories: Vec<String>,
    /// What volumes lie on is made if it is missing; else it has to be there.
    pub may_make: bool,
    /// Neither `/` nor `/usr` can be written to by what runs in them.
    pub read_only: bool,
}

/// The descriptors of a start, in the order of the request.
#[derive(Debug)]
pub(super) struct Parts {
    pub mounts: Files,
    pub hostname: String,
    pub user: OwnedFd,
    pub net: OwnedFd,
    pub uts: OwnedFd,
    pub ipc: OwnedFd,
    /// None is the null device.
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub status: OwnedFd,
    pub cgroups: Vec<OwnedFd>,
}

/// Starts init in a new sandbox. The program is then init's to start.
pub(super) fn start(prepared: &Prepared, parts: &Parts, program: &Program) -> Result<Spawned, Failure> {
    let init = Init::of(program)?;
    let how = Clone { shared: true, new_pid: true, ..Clone::default() };
    super::spawn(how, || {
        build(prepared, parts, program)?;
        init.exec(parts.status.as_fd())
    })
}

/// A kip-init about to be executed.
pub(super) struct Init {
    path: CString,
    arguments: Strings,
    environment: Strings,
}

impl Init {
    /// The one that runs this program.
    pub(super) fn of(program: &Program) -> Result<Init, Failure> {
        let bad = |_| Failure { step: Step::Request, errno: Errno::INVAL.raw_os_error(), detail: "a NUL byte".into() };
        let strings = |words: &mut dyn Iterator<Item = String>| {
            words.map(CString::new).collect::<Result<_, _>>().map(Strings::new).map_err(bad)
        };
        let workdir = program.workdir.clone().unwrap_or_default();
        let name = if program.exec_only { init::EXEC_ONLY } else { init::RUN };
        // Of a light sandbox pid 1 is the program's user already.
        let ids = program.ids.as_ref().filter(|_| program.filter == FilterKind::Default);
        let words = [name.to_owned(), workdir, init::ids_word(ids, limited(program))];
        Ok(Init {
            path: CString::new(init::PATH).expect("a constant without NUL"),
            arguments: strings(&mut words.into_iter().chain(program.argv.iter().cloned()))?,
            environment: strings(&mut program.env.iter().cloned())?,
        })
    }

    /// The last step. A descriptor numbered 3 is gone, whatever it was.
    pub(super) fn exec(&self, status: BorrowedFd<'_>) -> Result<Infallible, Failure> {
        kip_sys::ns::place(status, init::STATUS_FD).map_err(Failure::at(Step::Stdio))?;
        kip_sys::ns::close_on_exec_from(init::STATUS_FD + 1).map_err(Failure::at(Step::Stdio))?;
        kip_sys::ns::unblock_signals().map_err(Failure::at(Step::Exec))?;
        Err(Failure::new(Step::Exec, kip_sys::ns::exec(&self.path, &self.arguments, &self.environment)))
    }
}

fn build(prepared: &Prepared, parts: &Parts, program: &Program) -> Result<(), Failure> {
    enter_cgroups(&parts.cgroups)?;
    // The session's leader has to be inside the pid namespace, or it cannot be checkpointed.
    rustix::process::setsid().map_err(Failure::at(Step::Session))?;
    rustix::process::umask(Mode::from(0o022));
    enter_namespaces(parts.net.as_fd(), parts.uts.as_fd(), Some(parts.ipc.as_fd()))?;
    rustix::system::sethostname(parts.hostname.as_bytes()).map_err(Failure::at(Step::Namespaces))?;
    // It belongs to the pid namespace, and this one to the initial user namespace.
    let proc = mount_proc(parts.mounts.kind).map_err(Failure::at(Step::Proc))?;
    enter_user(UserNamespace::Itself(parts.user.as_fd()))?;
    enter_mounts(&parts.mounts, &proc)?;
    let null = open_null().map_err(Failure::at(Step::Stdio))?;
    let stdin = parts.stdin.as_ref().unwrap_or(&null);
    place_stdio([stdin.as_fd(), parts.stdout.as_fd(), parts.stderr.as_fd()])?;
    confine(program, prepared.filter(filter_of(program)), Next::Init)
}

/// Pid 1 traces a program that is only exec'd, so that this has the usual filter, whatever it is
/// to have when it runs.
fn filter_of(program: &Program) -> FilterKind {
    if program.exec_only { FilterKind::Default } else { program.filter }
}

/// Each process moves itself, before it has a second thread.
pub(super) fn enter_cgroups(files: &[OwnedFd]) -> Result<(), Failure> {
    for file in files {
        rustix::io::write(file, b"0").map_err(Failure::at(Step::Cgroup))?;
    }
    Ok(())
}

/// Enters the namespaces that belong to the initial user namespace, in part, and are therefore
/// entered from there.
pub(super) fn enter_namespaces(
    net: BorrowedFd<'_>,
    uts: BorrowedFd<'_>,
    ipc: Option<BorrowedFd<'_>>,
) -> Result<(), Failure> {
    let always = [(net, LinkNameSpaceType::Network), (uts, LinkNameSpaceType::HostNameAndNISDomainName)];
    for (fd, kind) in always.into_iter().chain(ipc.map(|ipc| (ipc, LinkNameSpaceType::InterProcessCommunication))) {
        move_into_link_name_space(fd, Some(kind)).map_err(Failure::at(Step::Namespaces))?;
    }
    Ok(())
}

/// Puts the sandbox's mounts in the place of the template's, of which nothing stays: in a mount
/// namespace that is a copy of the launcher's. The caller is root of the sandbox.
pub(super) fn enter_mounts(files: &Files, proc: &OwnedFd) -> Result<(), Failure> {
    let root = files.root.as_fd();
    move_mount(root, "", CWD, NEW_ROOT, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(Failure::at(Step::Root))?;
    attach(files.usr.as_fd(), root, "usr").map_err(Failure::at(Step::Usr))?;
    // Before /proc, so that no link of the tenant's leads one into it.
    volumes::provide(&files.directories, root)?;
    volumes::attach(&files.volumes, root, files.may_make)?;
    if files.read_only {
        // After all that had to be made in them.
        for mount in [root, files.usr.as_fd()] {
            kip_sys::mount::restrict(mount, MountAttrFlags::MOUNT_ATTR_RDONLY).map_err(Failure::at(Step::Root))?;
        }
    }
    attach(proc.as_fd(), root, "proc").map_err(Failure::at(Step::Proc))?;
    for path in MASKED.iter().filter(|_| files.kind == RootKind::Writable) {
        mask(proc, path).map_err(Failure::at(Step::Mask))?;
    }
    rustix::process::fchdir(root).and_then(|()| enter_root()).map_err(Failure::at(Step::Pivot))
}

pub(super) fn place_stdio(fds: [BorrowedFd<'_>; 3]) -> Result<(), Failure> {
    rustix::stdio::dup2_stdin(fds[0])
        .and_then(|()| rustix::stdio::dup2_stdout(fds[1]))
        .and_then(|()| rustix::stdio::dup2_stderr(fds[2]))
        .map_err(Failure::at(Step::Stdio))
}

/// Attaches a mount to a directory of the sandbox, which the tenant may have replaced: links are
/// not followed.
fn attach(mount: BorrowedFd<'_>, root: BorrowedFd<'_>, name: &str) -> rustix::io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let target = rustix::fs::openat2(root, name, flags, Mode::empty(), resolve)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, "", &target, "", flags)
}

fn mask(proc: &OwnedFd, path: &str) -> rustix::io::Result<()> {
    let name = path.strip_prefix("/proc/").expect("every masked path is in /proc");
    let target = match rustix::fs::openat(proc, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
    {
        Err(Errno::NOENT) => return Ok(()),
        other => other?,
    };
    // The template's, as long as the working root is the template.
    let null = open_tree(CWD, "/dev/null", OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&null, "", &target, "", flags)
}

/// The sandbox's own null device, which is in no mount of ours. The tenant may have put something
/// else there.
pub(super) fn open_null() -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let path = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let found = rustix::fs::openat2(CWD, "/dev/null", path, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&found)?;
    let is_null = stat.st_rdev == rustix::fs::makedev(1, 3);
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice || !is_null {
        return Err(Errno::NODEV);
    }
    let null = rustix::fs::openat2(CWD, "/dev/null", flags, Mode::empty(), resolve)?;
    rustix::fs::fcntl_setfl(&null, OFlags::empty())?;
    Ok(null)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masked_paths_are_in_proc() {
        assert!(MASKED.iter().all(|p| p.starts_with("/proc/") && !p.ends_with('/')));
    }
}
