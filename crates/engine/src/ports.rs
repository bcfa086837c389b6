//! Ports of the host that lead to procs: reserved, published, and passed from one proc to another.
//!
//! Owns which ports a proc gets, and the sockets that keep them its own. A crash in between leaves
//! sockets with the keeper and no rules: the next daemon makes the rules by what is recorded.

use crate::fd_store::key;
use crate::host::Proc;
use kip_net::addr::Addresses;
use kip_net::nat::{Forward, Network, Published};
use kip_net::reserve::{self, At};
use kip_types::api::{Code, PortView, Refusal};
use kip_types::{PortSpec, Protocol, Spec, chain};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

/// A refusal that names the proc and what could not be done.
pub fn refuse(code: Code, proc: &Proc, what: &str, e: &dyn std::error::Error) -> Refusal {
    Refusal::new(code, format!("{} cannot start: {what}: {}", proc.name, chain(e)))
}

/// Ports that a proc had, or that another proc has and gives to it.
#[derive(Debug, Clone, Copy)]
pub struct Earlier<'a> {
    /// Which proc: itself perhaps.
    pub of: &'a Proc,
    /// Its ports.
    pub ports: &'a [PortView],
}

fn key_of(proto: Protocol, port: u16) -> String {
    format!("{}{proto}/{port}", key::PORT)
}

/// Reserves host ports: the asked one, else the one it had before if that is free, else any. What
/// another proc gives stays its own, too, until that proc lets it go.
///
/// # Errors
/// A port is taken, or the keeper cannot hold its socket. The proc may hold others that it would
/// have had.
pub fn reserve(proc: &Proc, wanted: &[PortSpec], earlier: Earlier) -> Result<Vec<PortView>, Refusal> {
    let mut views = Vec::new();
    let mut fds: Vec<(String, OwnedFd)> = Vec::new();
    let Addresses { v4, .. } = Addresses::of(proc.shared.instance, proc.slot);
    for spec in wanted {
        let mut view = PortView {
            proto: spec.proto,
            port: spec.port,
            addr: IpAddr::V4(v4),
            host_addr: spec.host_addr.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            host_port: None,
        };
        if !spec.private {
            let key = key_of(spec.proto, spec.port);
            let before = earlier.ports.iter().find(|view| view.is_like(spec));
            // A daemon died before it had recorded that.
            let own = proc.fd_store.get(&key);
            let own = own.and_then(|fd| reserve::port_at(&*fd, spec.host_addr, spec.host_port));
            let held = before.and_then(|before| {
                let theirs = key_of(before.proto, before.port);
                earlier.of.fd_store.get(&theirs).map(|fd| (fd, earlier.of.slot == proc.slot && theirs == key))
            });
            view.host_port = match held {
                // It is started again, and has kept it.
                Some((_, true)) => before.and_then(|before| before.host_port),
                Some((fd, false)) => {
                    let fd = fd
                        .try_clone()
                        .map_err(|e| refuse(Code::Exhausted, proc, "its ports cannot be reserved", &e))?;
                    fds.push((key, fd));
                    before.and_then(|before| before.host_port)
                }
                None if own.is_some() => own,
                None => {
                    let got = reserve_one(proc, spec, before.and_then(|before| before.host_port))?;
                    fds.push((key, got.fd));
                    Some(got.port)
                }
            };
        }
        views.push(view);
    }
    proc.fd_store.hold(fds).map_err(|e| refuse(Code::Exhausted, proc, "the keeper does not take its ports", &e))?;
    Ok(views)
}

/// Reserves and publishes what a spec asks for in place of what a proc has. Ports that it does not
/// have any more are still its own, [`let_go_of_others()`].
///
/// # Errors
/// As [`reserve()`], and the rules cannot be set. Then it has what it had.
pub fn change(proc: &Proc, spec: &Spec, has: &[PortView]) -> Result<Vec<PortView>, Refusal> {
    let clashes = let_go_of_clashes(proc, has, spec);
    let keys = has.iter().map(|view| key_of(view.proto, view.port));
    let held: Vec<(String, OwnedFd)> =
        keys.filter_map(|key| Some((key.clone(), proc.fd_store.get(&key)?.try_clone().ok()?))).collect();
    let earlier = Earlier { of: proc, ports: has };
    let done = reserve(proc, &spec.ports, earlier).and_then(|ports| publish(proc, &ports).map(|()| ports));
    done.map_err(|refusal| {
        let_go_of_others(proc, &[]);
        if let Err(e) = proc.fd_store.hold(held) {
            tracing::warn!(proc = %proc.name, error = chain(&e), "ports are lost");
        }
        take_again(proc, &clashes);
        let message = refusal.message.replacen("cannot start", "cannot have these ports", 1);
        Refusal { message, ..refusal }
    })
}

/// Lets go of what a proc holds of ports that a spec asks for at other addresses, or for probes:
/// the kernel gives those to one socket only. The rules lead to the proc as before. Returns which
/// these are, for [`take_again`].
pub fn let_go_of_clashes(proc: &Proc, ports: &[PortView], wanted: &Spec) -> Vec<PortView> {
    let holds = |view: &&PortView| proc.fd_store.get(&key_of(view.proto, view.port)).is_some();
    let clashes: Vec<PortView> = ports.iter().filter(|view| view.clashes(wanted)).filter(holds).cloned().collect();
    clashes.iter().for_each(|view| let_go(proc, &key_of(view.proto, view.port)));
    clashes
}

/// Reserves ports again that a proc has let go, where it had them. A start may have done so.
pub fn take_again(proc: &Proc, ports: &[PortView]) {
    let lacks = |view: &&PortView| proc.fd_store.get(&key_of(view.proto, view.port)).is_none();
    for view in ports.iter().filter(lacks) {
        let at = view.only_at().map_or(At::All, At::Expected);
        let hold = |got: reserve::Reservation| {
            let held = proc.fd_store.hold(vec![(key_of(view.proto, view.port), got.fd)]);
            held.map_err(|e| chain(&e))
        };
        if let Err(error) = reserve::reserve(view.proto, at, view.host_port).map_err(|e| chain(&e)).and_then(hold) {
            tracing::warn!(proc = %proc.name, port = view.port, error, "a port is not reserved any more");
        }
    }
}

/// Lets go of all ports but these, those that are not published any more for example. The rules
/// stay as they are.
pub fn let_go_of_others(proc: &Proc, has: &[PortView]) {
    let published = has.iter().filter(|view| view.host_port.is_some());
    let keys: Vec<String> = published.map(|view| key_of(view.proto, view.port)).collect();
    let others = proc.fd_store.keys(key::PORT).into_iter().filter(|key| !keys.contains(key));
    others.for_each(|key| let_go(proc, &key));
}

fn let_go(proc: &Proc, key: &str) {
    if let Err(e) = proc.fd_store.drop_key(key) {
        tracing::warn!(proc = %proc.name, port = key, error = chain(&e), "the keeper did not let a port go");
    }
}

fn reserve_one(proc: &Proc, spec: &PortSpec, before: Option<u16>) -> Result<reserve::Reservation, Refusal> {
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
    got.map_err(|e| {
        let owner = proc.shared.owner_of_port(spec, wish.unwrap_or(0), std::slice::from_ref(&*proc.name));
        e.refusal(&proc.name, owner, spec.proto, wish.unwrap_or(0))
    })
}

/// A proc as the rules have it.
pub fn published(proc: &Proc, ports: &[PortView]) -> Published {
    Published {
        slot: proc.slot,
        network: Network::of(&proc.spec()),
        ports: ports.iter().map(Forward::of).collect(),
        egress: proc.egress.allowed(),
        alone: proc.spec().alone,
        held: false,
    }
}

/// Has the machine lead its published ports to it.
///
/// # Errors
/// The rules cannot be set.
pub fn publish(proc: &Proc, ports: &[PortView]) -> Result<(), Refusal> {
    let done = proc.shared.nat.publish(published(proc, ports));
    done.map_err(|e| refuse(Code::Failed, proc, "its ports cannot be forwarded", &e))
}
