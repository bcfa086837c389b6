//! Running another program in a sandbox that is there.

use super::confine::{Next, UserNamespace, become_user, confine, enter_user};
use super::start::{Init, enter_cgroups, place_stdio};
use super::template::in_time;
use super::{Prepared, Spawned};
use crate::protocol::{Failure, Program, Step};
use kip_sys::ns::{Clone, Strings};
use kip_types::spec::{DEFAULT_PATH, FilterKind};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, ThreadNameSpaceType, move_into_link_name_space, move_into_thread_name_spaces};
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

/// The descriptors of an exec, in the order of the request.
#[derive(Debug)]
pub(super) struct Parts {
    pub init: OwnedFd,
    /// Init has a time namespace of its own.
    pub own_time: bool,
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub cgroups: Vec<OwnedFd>,
}

/// Runs the program as a child of the launcher, which therefore learns how it ends.
pub(super) fn exec(prepared: &Prepared, parts: &Parts, program: &Program) -> Result<Spawned, Failure> {
    if !parts.own_time {
        return exec_here(prepared, parts, program);
    }
    let enter = || move_into_thread_name_spaces(parts.init.as_fd(), ThreadNameSpaceType::TIME);
    in_time(&prepared.template, enter, || exec_here(prepared, parts, program))?
}

/// In the time namespace that the launcher is in.
fn exec_here(prepared: &Prepared, parts: &Parts, program: &Program) -> Result<Spawned, Failure> {
    let bad = |_| Failure { step: Step::Request, errno: Errno::INVAL.raw_os_error(), detail: "a NUL byte".into() };
    let strings = |words: &[String]| words.iter().cloned().map(CString::new).collect::<Result<Vec<_>, _>>();
    let arguments = Strings::new(strings(&program.argv).map_err(bad)?);
    let environment = Strings::new(strings(&program.env).map_err(bad)?);
    let candidates = strings(&candidates(program)).map_err(bad)?;
    let workdir = CString::new(program.workdir.as_deref().unwrap_or("/")).map_err(bad)?;
    let own = prepared.template.pid_namespace.as_fd();
    move_into_thread_name_spaces(parts.init.as_fd(), ThreadNameSpaceType::PROCESS_ID)
        .map_err(Failure::at(Step::Namespaces))?;
    let spawned = super::spawn(Clone { shared: true, ..Clone::default() }, || {
        join(prepared, parts, program, Next::Program)?;
        kip_sys::ns::close_on_exec_from(3).map_err(Failure::at(Step::Stdio))?;
        kip_sys::ns::unblock_signals().map_err(Failure::at(Step::Exec))?;
        rustix::process::chdir(workdir.as_c_str()).map_err(Failure::at(Step::WorkDir))?;
        if let Some(ids) = program.ids.as_ref().filter(|_| program.filter == FilterKind::Default) {
            become_user(ids)?;
        }
        let mut best = Errno::NOENT.into();
        for path in &candidates {
            let error = kip_sys::ns::exec(path, &arguments, &environment);
            match Errno::from_io_error(&error) {
                Some(Errno::NOENT | Errno::NOTDIR) => {}
                Some(Errno::ACCESS) => best = error,
                _ => return Err(Failure::new(Step::Exec, error)),
            }
        }
        Err(Failure::new(Step::Exec, best))
    });
    // Otherwise every later child would be born into this sandbox.
    move_into_link_name_space(own, Some(LinkNameSpaceType::ProcessID)).expect("a way back to one's own pid namespace");
    spawned
}

/// Runs the program below a kip-init of its own, which is a child of the sandbox's init from the
/// beginning of its life on: it and the program are of the sandbox's tree, and sleep with that.
pub(super) fn session(
    prepared: &Prepared,
    parts: &Parts,
    status: &OwnedFd,
    program: &Program,
) -> Result<OwnedFd, Failure> {
    if !parts.own_time {
        return session_here(prepared, parts, status, program);
    }
    let enter = || move_into_thread_name_spaces(parts.init.as_fd(), ThreadNameSpaceType::TIME);
    in_time(&prepared.template, enter, || session_here(prepared, parts, status, program))?
}

/// In the time namespace that the launcher is in. A child in the sandbox's pid namespace makes the
/// kip-init and ends: the sandbox's init is then the parent.
fn session_here(prepared: &Prepared, parts: &Parts, status: &OwnedFd, program: &Program) -> Result<OwnedFd, Failure> {
    let init = Init::of(program)?;
    let own = prepared.template.pid_namespace.as_fd();
    move_into_thread_name_spaces(parts.init.as_fd(), ThreadNameSpaceType::PROCESS_ID)
        .map_err(Failure::at(Step::Namespaces))?;
    let spawned = super::in_child(Step::Clone, || {
        super::spawn(Clone { shared: true, ..Clone::default() }, || {
            join(prepared, parts, program, Next::Init)?;
            init.exec(status.as_fd())
        })
    });
    move_into_link_name_space(own, Some(LinkNameSpaceType::ProcessID)).expect("a way back to one's own pid namespace");
    spawned.map(|child| child.pidfd)
}

fn join(prepared: &Prepared, parts: &Parts, program: &Program, next: Next) -> Result<(), Failure> {
    enter_cgroups(&parts.cgroups)?;
    rustix::process::setsid().map_err(Failure::at(Step::Session))?;
    rustix::process::umask(Mode::from(0o022));
    let kinds = ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::MOUNT;
    move_into_thread_name_spaces(parts.init.as_fd(), kinds).map_err(Failure::at(Step::Namespaces))?;
    place_stdio([parts.stdin.as_fd(), parts.stdout.as_fd(), parts.stderr.as_fd()])?;
    enter_user(UserNamespace::Of(parts.init.as_fd()))?;
    confine(program, prepared.filter(program.filter), next)
}

/// The paths to try, as execvp(3) has them, to be resolved inside.
fn candidates(program: &Program) -> Vec<String> {
    let Some(name) = program.argv.first().filter(|n| !n.is_empty()) else { return vec![] };
    if name.contains('/') {
        return vec![name.clone()];
    }
    let path = program.env.iter().find_map(|e| e.strip_prefix("PATH=")).unwrap_or(DEFAULT_PATH);
    path.split(':').map(|dir| format!("{}/{name}", if dir.is_empty() { "." } else { dir })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_follow_path() {
        let program = |name: &str, env: &[&str]| Program {
            argv: vec![name.into()],
            env: env.iter().map(|s| s.to_string()).collect(),
            workdir: None,
            allow_setuid: false,
            capabilities: 0,
            filter: FilterKind::Default,
            ids: None,
            limits: Vec::new(),
            exec_only: false,
        };
        assert_eq!(candidates(&program("ls", &["PATH=/a::/b"])), ["/a/ls", "./ls", "/b/ls"]);
        assert_eq!(candidates(&program("./ls", &["PATH=/a"])), ["./ls"]);
        assert_eq!(candidates(&program("ls", &[])).len(), 6);
        assert!(candidates(&program("", &[])).is_empty());
    }
}
