//! The last steps before a program of the tenant's runs: giving up everything it must not have.

use crate::protocol::{Failure, Ids, Program, Step};
use kip_sys::caps::Instruction;
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, ThreadNameSpaceType, move_into_link_name_space,
    move_into_thread_name_spaces, remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::os::fd::BorrowedFd;

/// What the sandbox's root can do within its own user namespace: what common servers need to open
/// low ports, change their user and own their files. Nothing of it reaches the host.
pub(super) const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::AUDIT_WRITE);

/// The same, a bit for each (capabilities(7)).
pub const CAPABILITY_BITS: u64 = CAPABILITIES.bits();

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

/// Gives up all that the program is not to have, for good.
pub(super) fn confine(program: &Program, filter: &[Instruction]) -> Result<(), Failure> {
    // The user namespace lets no limit be raised above what it is here.
    for limit in &program.limits {
        kip_sys::process::set_limit(limit.resource, limit.soft, limit.hard).map_err(Failure::at(Step::Limits))?;
    }
    limit_bounding_set().map_err(Failure::at(Step::Capabilities))?;
    if !program.allow_setuid {
        set_no_new_privs(true).map_err(Failure::at(Step::NoNewPrivs))?;
    }
    // Before the capabilities go: without no_new_privs it needs CAP_SYS_ADMIN in the user
    // namespace.
    kip_sys::caps::add_seccomp_filter(filter).map_err(Failure::at(Step::Seccomp))?;
    let sets = CapabilitySets { effective: CAPABILITIES, permitted: CAPABILITIES, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(Failure::at(Step::Capabilities))
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
pub(super) fn become_user(ids: &Ids) -> Result<(), Failure> {
    let (uid, gid) = (Uid::from_raw(ids.uid), Gid::from_raw(ids.gid));
    let groups: Vec<Gid> = ids.groups.iter().map(|id| Gid::from_raw(*id)).collect();
    set_thread_groups(&groups)
        .and_then(|()| set_thread_res_gid(gid, gid, gid))
        .and_then(|()| set_thread_res_uid(uid, uid, uid))
        .map_err(Failure::at(Step::Ids))
}

/// The kernel refuses the first number that it has no capability for.
fn limit_bounding_set() -> rustix::io::Result<()> {
    for bit in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if CAPABILITIES.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            Err(Errno::INVAL) => break,
            other => other?,
        }
    }
    Ok(())
}
