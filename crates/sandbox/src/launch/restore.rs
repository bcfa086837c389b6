//! Starting a sandbox whose pid 1 is a restorer: two children whose steps read from top to bottom.
//!
//! The restorer gives processes the pids they had, which takes a capability in the user namespace
//! that owns their pid namespace. In an ordinary start that is the initial one. Here the first
//! child enters the sandbox's user namespace and makes the second there, with pid and mount
//! namespaces that the sandbox's owns; the second is the launcher's child, for the first ends when
//! it has exec'd. Until then both share the launcher's memory and it stands still, so that a
//! failure of either is ours.
//!
//! Nothing is given up here: the restorer has every capability, in its user namespace, and no
//! filter.

use super::confine::become_root;
use super::start::{Files, enter_cgroups, enter_mounts, enter_namespaces, open_null, place_stdio};
use super::template::{in_time, mount_proc};
use super::{Prepared, Spawned};
use crate::protocol::{Failure, Step};
use crate::restorer::CONTROL_FD;
use kip_sys::ns::{Clone, Strings, Unshare, unshare};
use rustix::fs::Mode;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::{AsFd, OwnedFd};

/// The descriptors of a restore, in the order of the request.
#[derive(Debug)]
pub(super) struct Parts {
    pub mounts: Files,
    pub user: OwnedFd,
    pub net: OwnedFd,
    pub uts: OwnedFd,
    /// A new one is made if there is none.
    pub ipc: Option<OwnedFd>,
    pub time: Option<OwnedFd>,
    pub control: OwnedFd,
    pub program: OwnedFd,
    pub cgroups: Vec<OwnedFd>,
}

/// Starts the restorer in a new sandbox.
pub(super) fn restore(prepared: &Prepared, parts: &Parts) -> Result<Spawned, Failure> {
    let Some(time) = &parts.time else { return restore_here(parts) };
    let enter = || move_into_link_name_space(time.as_fd(), Some(LinkNameSpaceType::Time));
    in_time(&prepared.template, enter, || restore_here(parts))?
}

/// In the time namespace that the launcher is in.
fn restore_here(parts: &Parts) -> Result<Spawned, Failure> {
    let arguments = Strings::new(vec![c"kip-restore".into()]);
    let environment = Strings::new(vec![]);
    let how = Clone { shared: true, new_mount: true, new_pid: true, sibling: true, ..Clone::default() };
    super::in_child(Step::Clone, || {
        // The restorer has all descriptors of the tree open beside those of the process that it
        // becomes. Each process gets its own limits again.
        kip_sys::process::raise_nofile().map_err(Failure::at(Step::Restorer))?;
        enter_namespaces(parts.net.as_fd(), parts.uts.as_fd(), parts.ipc.as_ref().map(AsFd::as_fd))?;
        // Last, for what comes before takes capabilities outside.
        move_into_link_name_space(parts.user.as_fd(), Some(LinkNameSpaceType::User))
            .map_err(Failure::at(Step::UserNamespace))?;
        if parts.ipc.is_none() {
            unshare(Unshare { ipc: true, ..Unshare::default() }).map_err(Failure::at(Step::NewUtsIpc))?;
        }
        super::spawn(how, || {
            build(parts)?;
            // From here on a descriptor numbered 3 is gone, whatever it was.
            let program =
                rustix::io::fcntl_dupfd_cloexec(&parts.program, CONTROL_FD + 1).map_err(Failure::at(Step::Restorer))?;
            kip_sys::ns::place(parts.control.as_fd(), CONTROL_FD).map_err(Failure::at(Step::Stdio))?;
            kip_sys::ns::unblock_signals().map_err(Failure::at(Step::Restorer))?;
            Err(Failure::new(Step::Restorer, kip_sys::ns::exec_open(program.as_fd(), &arguments, &environment)))
        })
    })
}

fn build(parts: &Parts) -> Result<(), Failure> {
    // The process that opened the files is the one that needs to be allowed this.
    enter_cgroups(&parts.cgroups)?;
    rustix::process::setsid().map_err(Failure::at(Step::Session))?;
    rustix::process::umask(Mode::from(0o022));
    let proc = mount_proc(parts.mounts.kind).map_err(Failure::at(Step::Proc))?;
    enter_mounts(&parts.mounts, &proc)?;
    become_root()?;
    kip_sys::ns::close_on_exec_from(0).map_err(Failure::at(Step::Stdio))?;
    // A tenant that broke its null device sleeps and wakes all the same.
    match open_null() {
        Ok(null) => place_stdio([null.as_fd(); 3]),
        Err(_) => Ok(()),
    }
}
