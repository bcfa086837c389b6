//! Network namespaces of procs, made ahead of need.
//!
//! One thread of its own makes namespaces, because unshare(2) moves the thread that calls it; it
//! always comes back to the host's namespace, so that it keeps none alive. Since addresses belong
//! to slots, a namespace is made for one slot: the caller that hands out slots says early which
//! ones come next ([`NetPool::prefill`]), and [`NetPool::take`] then costs microseconds; a slot
//! that was not announced is made while the caller waits.
//!
//! A namespace belongs to the initial user namespace and lives as long as a process holds its
//! descriptor. Its link dies with it, or earlier by [`NetPool::release`]. A crash leaves links
//! behind only of namespaces that another process (the keeper) holds; [`NetPool::sweep`] removes
//! the links that the daemon does not want to keep, and [`NetPool::remove_all`] everything.

mod namespace;

pub(crate) use namespace::unlinked;

use crate::addr::{Instance, Slot};
use crate::rtnl::{How, Request, Rtnl, RtnlError, link_at};
use crate::sysctl::{self, SysctlError};
use namespace::Maker;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

/// The network of one proc: `eth0` inside, `ifname` on the host, a route between them.
#[derive(Debug)]
pub struct NetNs {
    /// Whose it is.
    pub slot: Slot,
    /// The namespace, as setns(2) takes it.
    pub fd: OwnedFd,
    /// The host's end of its link.
    pub ifname: String,
    /// Its address.
    pub v4: Ipv4Addr,
    /// Its address, in use only where the machine has IPv6.
    pub v6: Ipv6Addr,
}

/// A namespace could not be made or removed.
#[derive(Debug, thiserror::Error)]
pub enum NetNsError {
    /// Links, addresses or routes.
    #[error("the network namespace of slot {slot} cannot be made, linked or removed")]
    Link {
        /// Which slot.
        slot: Slot,
        /// What the kernel refused.
        #[source]
        source: RtnlError,
    },
    /// Settings.
    #[error("a setting of the network namespace of slot {slot} cannot be written")]
    Setting {
        /// Which slot.
        slot: Slot,
        /// Which setting.
        #[source]
        source: SysctlError,
    },
    /// unshare(2), setns(2) or /proc.
    #[error("cannot {doing} for slot {slot}")]
    Namespace {
        /// Which slot.
        slot: Slot,
        /// What was tried.
        doing: &'static str,
        /// Its answer.
        source: io::Error,
    },
    /// The pool was closed or its thread died.
    #[error("the pool of network namespaces is closed")]
    Closed,
    /// Anything that belongs to no slot.
    #[error("the network links of this data directory cannot be listed, made or removed")]
    Instance(#[source] RtnlError),
    /// The thread could not be started.
    #[error("cannot start the thread that makes network namespaces")]
    Thread(#[source] io::Error),
}

/// The maker of namespaces of one instance. Share it by reference or `Arc`.
pub struct NetPool {
    instance: Instance,
    shared: Arc<Shared>,
    host: Mutex<Rtnl>,
    maker: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<PoolState>,
    changed: Condvar,
}

#[derive(Default)]
struct PoolState {
    wanted: VecDeque<Slot>,
    making: Option<Slot>,
    ready: HashMap<Slot, NetNs>,
    awaited: HashSet<Slot>,
    failed: HashMap<Slot, NetNsError>,
    closed: bool,
}

impl NetPool {
    /// Gives the host its gateway addresses on `lo` and starts the thread. Can be repeated after a
    /// crash.
    pub fn new(instance: Instance) -> Result<NetPool, NetNsError> {
        let mut host = Rtnl::open().map_err(NetNsError::Instance)?;
        let ipv6 = sysctl::has_ipv6();
        host.batch(namespace::gateway(instance, ipv6, true)).map_err(NetNsError::Instance)?;
        let shared = Arc::new(Shared::default());
        let mut maker = Maker::open(instance, ipv6)?;
        let theirs = Arc::clone(&shared);
        let maker = std::thread::Builder::new()
            .name("kip-netns".to_owned())
            .spawn(move || serve(&mut maker, &theirs))
            .map_err(NetNsError::Thread)?;
        Ok(NetPool { instance, shared, host: Mutex::new(host), maker: Some(maker) })
    }

    /// Asks for namespaces of these slots to be made in the background. They must be free.
    pub fn prefill(&self, slots: &[Slot]) {
        let mut state = self.shared.state.lock();
        for &slot in slots {
            if !state.knows(slot) {
                state.wanted.push_back(slot);
            }
        }
        self.shared.changed.notify_all();
    }

    /// How many namespaces stand ready.
    pub fn ready(&self) -> usize {
        self.shared.state.lock().ready.len()
    }

    /// The namespace of a free slot: at once if it was announced in time, else after it has been
    /// made (about 1 ms).
    pub fn take(&self, slot: Slot) -> Result<NetNs, NetNsError> {
        let mut state = self.shared.state.lock();
        loop {
            if let Some(namespace) = state.ready.remove(&slot) {
                return Ok(namespace);
            }
            if let Some(error) = state.failed.remove(&slot) {
                return Err(error);
            }
            if state.closed {
                return Err(NetNsError::Closed);
            }
            if state.awaited.insert(slot) && state.making != Some(slot) {
                state.wanted.retain(|s| *s != slot);
                state.wanted.push_front(slot);
                self.shared.changed.notify_all();
            }
            self.shared.changed.wait(&mut state);
        }
    }

    /// Removes the links of these slots in one go, and with them their addresses and routes. Links
    /// that are gone already are fine. The namespaces themselves go with their last descriptor.
    pub fn release(&self, slots: &[Slot]) -> Result<(), NetNsError> {
        self.forget(|slot| slots.contains(&slot));
        let names: Vec<_> = slots.iter().map(|s| self.instance.interface(*s)).collect();
        self.delete(&names)
    }

    /// Removes the links of all slots but these; tells how many there were. For a daemon that has
    /// just started.
    pub fn sweep(&self, keep: &[Slot]) -> Result<usize, NetNsError> {
        self.forget(|slot| !keep.contains(&slot));
        let keep: HashSet<_> = keep.iter().map(|s| self.instance.interface(*s)).collect();
        let mut host = self.host.lock();
        let links = host.links(&self.instance.interface_prefix()).map_err(NetNsError::Instance)?;
        drop(host);
        let names: Vec<_> = links.into_iter().map(|l| l.name).filter(|name| !keep.contains(name)).collect();
        self.delete(&names)?;
        Ok(names.len())
    }

    /// Ends the pool and removes every link of the instance and the gateway addresses.
    pub fn remove_all(mut self) -> Result<(), NetNsError> {
        self.stop();
        self.clear()
    }

    /// Removes every link of the instance and the gateway addresses; nothing may be taken from the
    /// pool after that.
    pub fn clear(&self) -> Result<(), NetNsError> {
        self.sweep(&[])?;
        let mut host = self.host.lock();
        host.batch(namespace::gateway(self.instance, true, false)).map_err(NetNsError::Instance)
    }

    fn forget(&self, unwanted: impl Fn(Slot) -> bool) {
        let mut state = self.shared.state.lock();
        state.wanted.retain(|s| !unwanted(*s));
        while state.making.is_some_and(&unwanted) {
            self.shared.changed.wait(&mut state);
        }
        state.ready.retain(|s, _| !unwanted(*s));
        state.failed.retain(|s, _| !unwanted(*s));
    }

    fn delete(&self, names: &[String]) -> Result<(), NetNsError> {
        if names.is_empty() {
            return Ok(());
        }
        let doomed = doomed_group(self.instance);
        let gone = Some(rustix::io::Errno::NODEV);
        let mut requests: Vec<_> = names
            .iter()
            .map(|name| {
                let mut link = link_at(0);
                link.attributes.push(LinkAttribute::IfName(name.clone()));
                link.attributes.push(LinkAttribute::Group(doomed));
                let message = RouteNetlinkMessage::SetLink(link);
                Request { doing: format!("mark {name} for removal"), message, how: How::Plain, tolerate: gone }
            })
            .collect();
        let mut group = link_at(0);
        group.attributes.push(LinkAttribute::Group(doomed));
        let message = RouteNetlinkMessage::DelLink(group);
        requests.push(Request { doing: "remove links".to_owned(), message, how: How::Plain, tolerate: gone });
        let mut host = self.host.lock();
        host.batch(requests).map_err(NetNsError::Instance)
    }

    fn stop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
        if let Some(maker) = self.maker.take()
            && maker.join().is_err()
        {
            tracing::error!("the thread that makes network namespaces panicked");
        }
    }
}

impl Drop for NetPool {
    fn drop(&mut self) {
        self.stop();
        let unused: Vec<_> = self.shared.state.lock().ready.keys().copied().collect();
        if let Err(error) = self.release(&unused) {
            tracing::warn!(error = %kip_types::chain(&error), "unused network namespaces are left behind");
        }
    }
}

impl PoolState {
    fn knows(&self, slot: Slot) -> bool {
        self.making == Some(slot) || self.ready.contains_key(&slot) || self.wanted.contains(&slot)
    }
}

/// Interface groups (netdevice group ids) of an instance: 4096 numbers, of which the last marks
/// links for removal and the others stand for networks.
pub(crate) fn group_base(instance: Instance) -> u32 {
    0x4b70_0000 | u32::from(instance.number()) << 12
}

fn doomed_group(instance: Instance) -> u32 {
    group_base(instance) + 0xfff
}

fn serve(maker: &mut Maker, shared: &Shared) {
    let mut state = shared.state.lock();
    while !state.closed {
        let Some(slot) = state.wanted.pop_front() else {
            shared.changed.wait(&mut state);
            continue;
        };
        state.making = Some(slot);
        drop(state);
        let made = maker.make(slot);
        state = shared.state.lock();
        state.making = None;
        let awaited = state.awaited.remove(&slot);
        match made {
            Ok(namespace) => {
                state.ready.insert(slot, namespace);
            }
            Err(error) if awaited => {
                state.failed.insert(slot, error);
            }
            Err(error) => {
                tracing::warn!(%slot, error = %kip_types::chain(&error), "cannot make a network namespace ahead");
            }
        }
        shared.changed.notify_all();
    }
}
