//! Makes anew what a sleeper held, where all of it is lost: after a reboot, when daemon and keeper
//! died at once, or in another data directory. Network and namespaces, pipes, and every INET
//! socket; listeners listen where they did.
//!
//! Connections cannot come back: they are sockets that their peer has reset, and the program is
//! told so. Everything else that the kernel kept of it, the next wake makes from the images: what
//! it can for the plan of a clone ([`kip_remake::remake`]), or all of it by CRIU. Steps may
//! be repeated: a crash leaves descriptors with the keeper, and the next start of the daemon
//! takes those, or makes all of them again.

use crate::descriptors::pipe_key;
use crate::fd_store::key;
use crate::host::Proc;
use crate::host::resolver;
use crate::input;
use crate::ports::{self, Earlier};
use crate::start;
use kip_keeper::KeeperError;
use kip_net::Addresses;
use kip_net::prepared::PreparedNetwork;
use kip_net::renewal::{RenewalError, RenewalPlace, make};
use kip_records::body::Body;
use kip_sandbox::cgroup::CgroupError;
use kip_sandbox::launcher::LaunchError;
use kip_types::api::{PortView, Refusal};
use std::os::fd::AsFd;

/// It holds nothing, and cannot be woken until it does.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum RenewError {
    #[error("it was put to sleep by an older Kip, which did not note what its sockets were")]
    Unknown,
    #[error("{}", .0.message)]
    Refused(Refusal),
    #[error("its network cannot be prepared")]
    Net(#[from] kip_net::prepared::PrepareError),
    #[error("an old link of its network cannot be removed")]
    Link(#[from] kip_net::pool::NetNsError),
    #[error("its namespaces cannot be made")]
    Namespaces(#[from] LaunchError),
    #[error("its cgroup cannot be made")]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Socket(#[from] RenewalError),
    #[error("the keeper does not take what is held for it")]
    Keeper(#[from] KeeperError),
    #[error("its standard input cannot be made")]
    Input(#[source] std::io::Error),
}

/// Whether what it held is lost.
pub fn is_lost(proc: &Proc) -> bool {
    proc.fd_store.get(key::NET).is_none() || proc.held_user().is_err()
}

/// Makes it. `earlier`: the ports that it has on the host; others are taken where they are not to
/// be had any more.
pub fn renew(proc: &Proc, body: &Body, earlier: &[PortView]) -> Result<Vec<PortView>, RenewError> {
    proc.shared.pool.release(&[proc.slot])?;
    let prepared = proc.shared.prepared_networks.make(proc.slot, proc.spec().sandbox.network())?;
    renew_in(proc, body, earlier, prepared)
}

/// The same with the network that was prepared for its slot.
pub fn renew_in(
    proc: &Proc,
    body: &Body,
    earlier: &[PortView],
    prepared: PreparedNetwork,
) -> Result<Vec<PortView>, RenewError> {
    let home = body.home.as_ref().ok_or(RenewError::Unknown)?;
    let recipes = body.sockets.iter().map(|s| Some((s.recipe.as_ref()?, &s.options))).collect::<Option<Vec<_>>>();
    let recipes = recipes.ok_or(RenewError::Unknown)?;
    key::ALL_UP.iter().try_for_each(|prefix| proc.fd_store.drop_prefix(prefix))?;
    let machine = &proc.shared;
    proc.meter.without_network();
    proc.meter.engine_at_work();
    // Those that were made ahead have no host name, which a start alone sets.
    drop(machine.ready_namespaces.take(proc.slot));
    let made = machine.launcher().namespaces(proc.first_id(), proc.spec().hostname())?;
    machine.cgroups.create(proc.cgroup.name(), &proc.spec().limits)?;
    let addresses = Addresses::of(machine.instance, proc.slot);
    let place = RenewalPlace { namespace: prepared.net.as_fd(), addresses, ids: (home.first_id, proc.first_id()) };
    let sockets = make(&recipes, &place)?;
    let reserved =
        ports::reserve(proc, &proc.spec().ports, Earlier { of: proc, ports: earlier }).map_err(RenewError::Refused)?;
    start::hold_pipes(proc).map_err(RenewError::Refused)?;
    if home.pipes.contains_key(key::IN) {
        input::hold_input(proc, proc.first_id()).map_err(RenewError::Input)?;
    }
    let names = body.sockets.iter().map(|s| format!("{}{}", key::SOCKET, s.inode));
    let mut fds: Vec<_> = names.zip(sockets).collect();
    fds.push((key::UTS.to_owned(), made.uts));
    match body.own_ipc {
        true => fds.push((key::USER.to_owned(), made.user)),
        false => fds.push((key::IPC.to_owned(), made.ipc)),
    }
    resolver::make(proc, prepared.net.as_fd());
    // Last: by this it is told whether all is there.
    fds.push((key::NET.to_owned(), prepared.net));
    proc.fd_store.hold(fds)?;
    ports::publish(proc, &reserved).map_err(RenewError::Refused)?;
    Ok(reserved)
}

/// Whether what it holds was made anew since its generation was sealed: then there is not all that
/// a plan counts on.
pub fn is_renewed(proc: &Proc, body: &Body) -> bool {
    let is_other = |(key, was): (&String, &String)| {
        let held = proc.fd_store.get(key);
        held.is_none_or(|pipe| pipe_key(&pipe).ok().as_ref() != Some(was))
    };
    body.home.as_ref().is_some_and(|home| home.pipes.iter().any(is_other))
}
