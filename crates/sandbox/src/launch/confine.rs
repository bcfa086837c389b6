//! The last steps before a program of the tenant's runs: giving up everything it must not have.

use crate::protocol::{Failure, Program, ProgramIds, Step};
use kip_sys::caps::Instruction;
use kip_types::spec::{CapabilityBits, FilterKind};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, ThreadNameSpaceType, move_into_link_name_space,
    move_into_thread_name_spaces, remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::os::fd::BorrowedFd;

/// What pid 1 needs to start the program as another user and with fewer capabilities.
const OF_INIT: CapabilitySet = CapabilitySet::SETGID.union(CapabilitySet::SETUID).union(CapabilitySet::SETPCAP);

/// The same, a bit for each (capabilities(7)).
pub const INIT_CAPABILITY_BITS: CapabilityBits = OF_INIT.bits();

/// What the program can have, if pid 1 has to have more.
pub(super) fn limited(program: &Program) -> Option<CapabilityBits> {
    let has_all = program.capabilities & INIT_CAPABILITY_BITS == INIT_CAPABILITY_BITS;
    (program.filter == FilterKind::Default && !has_all).then_some(program.capabilities)
}

/// The user namespace to enter.
#[derive(Debug, Clone, Copy)]
pub(super) enum UserNamespace<'a> {
    /// This one.
    Itself(BorrowedFd<'a>),
    /// That of the process with this pidfd.
    Of(BorrowedFd<'a>),
}

/// Enters the user namespace as its root.
pub(super) fn enter_user(namespace: UserNamespace<'_>) -> Result<(), Failure> {
    match namespace {
        UserNamespace::Itself(fd) => move_into_link_name_space(fd, Some(LinkNameSpaceType::User)),
        UserNamespace::Of(pidfd) => move_into_thread_name_spaces(pidfd, ThreadNameSpaceType::USER),
    }
    .map_err(Failure::at(Step::UserNamespace))?;
    if let UserNamespace::Itself(_) = namespace {
        // CRIU only dumps a mount namespace that belongs to the user namespace of its processes.
        // What is attached before this would be locked in the copy, and no process could make other
        // mounts of it, one by one.
        let mount = kip_sys::ns::Unshare { mount: true, ..Default::default() };
        kip_sys::ns::unshare(mount).map_err(Failure::at(Step::UserNamespace))?;
    }
    become_root()
}

/// What is executed next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// A kip-init, which starts the program.
    Init,
    /// The program itself.
    Program,
}

/// Gives up all that the program is not to have, for good. What a program of root gets at its
/// execve(2) is the bounding set; until then the thread keeps what it needs to become another user.
pub(super) fn confine(program: &Program, filter: &[Instruction], next: Next) -> Result<(), Failure> {
    // The user namespace lets no limit be raised above what it is here.
    for limit in &program.limits {
        kip_sys::process::set_limit(limit.resource, limit.soft, limit.hard).map_err(Failure::at(Step::Limits))?;
    }
    let given = CapabilitySet::from_bits_retain(program.capabilities);
    if program.filter == FilterKind::Light {
        return confine_light(program, filter, given);
    }
    let own = given.union(OF_INIT);
    let bounding = if next == Next::Init { own } else { given };
    limit_bounding_set(bounding).map_err(Failure::at(Step::Capabilities))?;
    if !program.allow_setuid {
        set_no_new_privs(true).map_err(Failure::at(Step::NoNewPrivs))?;
    }
    // Before the capabilities go: without no_new_privs it needs CAP_SYS_ADMIN in the user
    // namespace.
    kip_sys::caps::add_seccomp_filter(filter).map_err(Failure::at(Step::Seccomp))?;
    let sets = CapabilitySets { effective: own, permitted: own, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(Failure::at(Step::Capabilities))
}

/// The same where pid 1 has no more than the program: the calls by which ids and capabilities
/// change are none that the filter allows, so that all of it is done before.
fn confine_light(program: &Program, filter: &[Instruction], given: CapabilitySet) -> Result<(), Failure> {
    limit_bounding_set(given).map_err(Failure::at(Step::Capabilities))?;
    set_no_new_privs(true).map_err(Failure::at(Step::NoNewPrivs))?;
    program.ids.as_ref().map_or(Ok(()), become_user)?;
    let sets = CapabilitySets { effective: given, permitted: given, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(Failure::at(Step::Capabilities))?;
    kip_sys::caps::add_seccomp_filter(filter).map_err(Failure::at(Step::Seccomp))
}

/// Takes the ids 0 of the user namespace, and no others.
pub(super) fn become_root() -> Result<(), Failure> {
    let (uid, gid) = (Uid::ROOT, Gid::ROOT);
    set_thread_groups(&[])
        .and_then(|()| set_thread_res_gid(gid, gid, gid))
        .and_then(|()| set_thread_res_uid(uid, uid, uid))
        .map_err(Failure::at(Step::Ids))
}

/// Takes the ids of another user of the namespace. Its capabilities go with the ids 0:
/// capabilities(7).
pub(super) fn become_user(ids: &ProgramIds) -> Result<(), Failure> {
    let (uid, gid) = (Uid::from_raw(ids.uid), Gid::from_raw(ids.gid));
    let groups: Vec<Gid> = ids.groups.iter().map(|id| Gid::from_raw(*id)).collect();
    set_thread_groups(&groups)
        .and_then(|()| set_thread_res_gid(gid, gid, gid))
        .and_then(|()| set_thread_res_uid(uid, uid, uid))
        .map_err(Failure::at(Step::Ids))
}

/// The kernel refuses the first number that it has no capability for.
fn limit_bounding_set(kept: CapabilitySet) -> rustix::io::Result<()> {
    for bit in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if kept.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            Err(Errno::INVAL) => break,
            other => other?,
        }
    }
    Ok(())
}
