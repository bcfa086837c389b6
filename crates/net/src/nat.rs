//! How packets find procs: port forwarding, masquerading, and which procs and machines may talk to
//! which.
//!
//! Owns the table `inet kip_I`, `inet kip_I_standby` while that is replaced, and the forwarding
//! switches of the interfaces the outside comes by.
//! The rules are in [`ruleset`](self); they promise:
//!
//! * A published port is reached from outside, from the host by any of its addresses, 127.0.0.1 and
//!   ::1 included, and from every proc by the host's addresses.
//! * One that is published at one address is reached by that address and no other; at a loopback
//!   address, by the host alone.
//! * A declared port, published or not, is reached by its proc's own address from the procs of its
//!   network. A proc without a network has none beside it.
//! * A proc reaches the outside (masqueraded) and nothing of the host but published ports, DNS and
//!   ICMP; never what listens on the host's loopback.
//! * A proc reaches no link-local address and no address where clouds tell machines their secrets
//!   ([`NEVER`](ruleset)), but for DNS.
//! * A proc cannot send from an address that is not its own.
//! * A proc with limited egress begins no connection but to declared ports of its network and to
//!   what its [`Allowed`] name, its host and its own published ports included.
//! * A proc that is published alone reaches nothing but itself and is reached by the host only, by
//!   its own address.
//!
//! What is in the kernel stays when this process dies; [`Nat::open`] replaces it by what is wanted
//! while a second table stands by ([`Which::Standby`]), so that nothing published is ever
//! unreachable in between. The only thing
//! outside the table are the interfaces' groups, by which the rules know networks; they are read
//! back, so that a network keeps its number across restarts.

mod allowed;
mod conntrack;
mod elements;
mod forwarding;
mod nfnetlink;
mod refused;
mod ruleset;
mod spread;

use crate::addr::{Addresses, Instance, Slot};
use crate::pool::group_base;
use crate::rtnl::{How, Request, Rtnl, RtnlError, link_at};
use conntrack::Flow;
use elements::{Change, Element};
use forwarding::Defaults;
pub use forwarding::ForwardingError;
use kip_types::api::PortView;
use kip_types::spec::addresses_meet;
use kip_types::{Protocol, Realm, Spec};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use nfnetlink::Connection;
use parking_lot::Mutex;
pub use refused::RefusedCall;
pub use ruleset::OWN_MARK;
use ruleset::Which;
use rustix::io::Errno;
use spread::Spread;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A host port that leads to a proc's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Forward {
    /// Transport protocol of both.
    pub proto: Protocol,
    /// Port on the host; none for one that only procs of its network reach.
    pub host_port: Option<u16>,
    /// The one address of the host that leads to it; none for all.
    pub host_addr: Option<IpAddr>,
    /// Port inside the proc.
    pub port: u16,
}

impl Forward {
    /// A proc's port as the rules have it.
    pub fn of(view: &PortView) -> Forward {
        Forward { proto: view.proto, host_port: view.host_port, host_addr: view.only_at(), port: view.port }
    }
}

/// Procs that dial each other's declared ports.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Network {
    /// Whose.
    pub realm: Realm,
    /// Its name there.
    pub name: String,
}

/// What a proc whose egress is limited may call: it is judged by where it sends to, before any
/// translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Allowed {
    /// First and last address, of one family.
    pub addresses: (IpAddr, IpAddr),
    /// First and last port; none for all.
    pub ports: Option<(u16, u16)>,
    /// The only protocol; none for all, and, without ports, for those that have no ports.
    pub proto: Option<Protocol>,
}

/// A proc as the rules see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Which proc.
    pub slot: Slot,
    /// Which procs dial its ports directly, and it theirs; none: no others.
    pub network: Option<Network>,
    /// Its ports. May be empty, but a proc that is not published at all belongs to no network.
    pub ports: Vec<Forward>,
    /// All that it may call outside its network; none: everything that no proc is refused.
    pub egress: Option<Vec<Allowed>>,
    /// The proc reaches nothing but itself, and its ports lead to it for the host only.
    pub alone: bool,
    /// New flows to it wait: their first packets are dropped, and clients send them again.
    pub held: bool,
}

impl Network {
    /// The network that a proc is in.
    pub fn of(spec: &Spec) -> Option<Network> {
        spec.network.as_ref().map(|name| Network { realm: spec.realm.clone(), name: name.clone() })
    }
}

impl Published {
    fn group(&self, instance: Instance, networks: &mut BTreeMap<Network, u32>) -> u32 {
        match &self.network {
            _ if self.alone => alone_group(instance),
            Some(network) => group_of(instance, networks, network),
            None => 0,
        }
    }

    /// Its network, if its rules know one.
    fn known_network(&self) -> Option<&Network> {
        self.network.as_ref().filter(|_| !self.alone)
    }
}

/// The rules could not be changed. What was there before is still in force.
#[derive(Debug, thiserror::Error)]
pub enum NatError {
    /// nft(8) could not be run.
    #[error("cannot run nft: is nftables installed?")]
    NoNft(#[source] io::Error),
    /// nft(8) or the kernel refused the rules.
    #[error("nft refuses the rules of table {table}: {message}")]
    Rules {
        /// Which table.
        table: String,
        /// What nft printed.
        message: String,
    },
    /// The kernel refused to change elements.
    #[error("cannot change the published ports in table {table}")]
    Elements {
        /// Which table.
        table: String,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// Two procs want one port.
    #[error("host port {port}/{proto} already leads to slot {by}")]
    PortTaken {
        /// The port.
        port: u16,
        /// Its protocol.
        proto: Protocol,
        /// The slot of the proc that has it.
        by: Slot,
    },
    /// The proc's link.
    #[error("the link of slot {slot} cannot be changed for its rules")]
    Network {
        /// Which proc.
        slot: Slot,
        /// What the kernel refused.
        #[source]
        source: RtnlError,
    },
    /// The list of links.
    #[error("the links of the procs cannot be listed")]
    Links(#[source] RtnlError),
    /// Forwarding.
    #[error("forwarding cannot be switched")]
    Forwarding(#[from] ForwardingError),
}

/// The rules of one instance. Share it by reference or `Arc`; every call is one transaction.
pub struct Nat {
    instance: Instance,
    memory: PathBuf,
    uplinks: Vec<String>,
    state: Mutex<NatState>,
}

struct NatState {
    rtnl: Rtnl,
    nft: Connection,
    defaults: Defaults,
    networks: BTreeMap<Network, u32>,
    published: BTreeMap<Slot, Published>,
    /// Of procs whose ports lead to several; stays while such a proc is not published.
    spread: BTreeMap<Slot, Spread>,
    /// Those that are held from the moment on at which they are published.
    held_ahead: BTreeSet<Slot>,
    /// They are about to be removed for good.
    over: bool,
}

impl Nat {
    /// Puts the rules in force, with these procs published, in place of whatever an earlier daemon
    /// left, and switches forwarding on. `memory` is a file that remembers the machine's forwarding
    /// settings, one for all instances; `uplinks` are interfaces the outside comes by, in addition
    /// to those of the default routes.
    pub fn open(instance: Instance, memory: &Path, uplinks: &[String], desired: &[Published]) -> Result<Nat, NatError> {
        let rtnl = Rtnl::open().map_err(NatError::Links)?;
        let table = instance.table();
        let nft = Connection::open().map_err(|source| NatError::Elements { table, source })?;
        let (networks, published) = (BTreeMap::new(), BTreeMap::new());
        let held_ahead = BTreeSet::new();
        let (defaults, spread) = (Defaults::new(), BTreeMap::new());
        let state = NatState { rtnl, nft, defaults, networks, published, spread, held_ahead, over: false };
        let nat = Nat { instance, memory: memory.to_owned(), uplinks: uplinks.to_vec(), state: Mutex::new(state) };
        nat.sync(desired)?;
        nat.follow_uplinks()?;
        Ok(nat)
    }

    /// Makes the rules lead to exactly these procs. Links that are missing are passed over.
    pub fn sync(&self, desired: &[Published]) -> Result<(), NatError> {
        let mut state = self.state.lock();
        let wanted: BTreeMap<_, _> = desired.iter().map(|p| (p.slot, p.clone())).collect();
        let links = state.rtnl.links(&self.instance.interface_prefix()).map_err(NatError::Links)?;
        let mut networks = BTreeMap::new();
        for link in &links {
            let of_it = self.instance.slot_of(&link.name).and_then(|s| wanted.get(&s));
            if let Some(network) = of_it.and_then(Published::known_network)
                && is_network(self.instance, link.group)
                && !networks.values().any(|g| *g == link.group)
            {
                networks.entry(network.clone()).or_insert(link.group);
            }
        }
        let mut all = Vec::new();
        let mut groups = BTreeMap::new();
        for published in wanted.values() {
            refuse_clashes(wanted.values(), published)?;
            let group = published.group(self.instance, &mut networks);
            groups.insert(published.slot, group);
            all.extend(ruleset::elements(self.instance, published.known_network().map(|_| group), published));
        }
        for link in &links {
            let Some(slot) = self.instance.slot_of(&link.name) else { continue };
            let group = groups.get(&slot).copied().unwrap_or(0);
            if link.group != group {
                set_group(&mut state.rtnl, self.instance, slot, group)?;
            }
        }
        self.put_in_place(&mut state, &all)?;
        state.networks = networks;
        state.published = wanted;
        state.spread.clear();
        Ok(())
    }

    /// Publishes a proc, in place of what it had published before. Its link must exist
    /// ([`crate::NetPool::take`]). Costs about 0.1 ms, with UDP ports 15 ms.
    pub fn publish(&self, published: Published) -> Result<(), NatError> {
        self.publish_all(vec![published])
    }

    /// The same for several procs in one transaction: a host port can pass from one to another
    /// without a moment in which it leads to neither. TCP flows that are there stay where they are.
    pub fn publish_all(&self, mut all: Vec<Published>) -> Result<(), NatError> {
        let mut state = self.state.lock();
        all.iter_mut().for_each(|published| published.held |= state.held_ahead.contains(&published.slot));
        self.publish_in(&mut state, all)
    }

    fn publish_in(&self, state: &mut NatState, all: Vec<Published>) -> Result<(), NatError> {
        let (mut old, mut new, mut udp) = (Vec::new(), Vec::new(), Vec::new());
        for published in &all {
            let slot = published.slot;
            let others = state.published.values().filter(|other| !all.iter().any(|one| one.slot == other.slot));
            refuse_clashes(others.chain(&all), published)?;
            let group = published.group(self.instance, &mut state.networks);
            set_group(&mut state.rtnl, self.instance, slot, group)?;
            old.extend(state.elements_of(self.instance, slot));
            new.extend(ruleset::elements(self.instance, published.known_network().map(|_| group), published));
            let spread = state.spread.get(&slot).map_or(&[][..], |spread| &spread.over);
            let ours: Vec<IpAddr> = spread
                .iter()
                .chain([&slot])
                .map(|slot| Addresses::of(self.instance, *slot))
                .flat_map(|ours| [ours.v4.into(), ours.v6.into()])
                .collect();
            let of_it = published.ports.iter().filter(|f| f.proto == Protocol::Udp);
            udp.extend(of_it.filter_map(|f| Some((f.host_port?, f.host_addr, ours.clone()))));
        }
        self.replace(state, old, new)?;
        for published in &all {
            self.end_spreads_at(state, published.slot, &published.ports)?;
        }
        state.published.extend(all.into_iter().map(|published| (published.slot, published)));
        if !udp.is_empty() {
            // At another address the port may be another proc's.
            let strays = |f: &Flow| {
                let mut owners =
                    udp.iter().filter(|(port, at, _)| *port == f.port && addresses_meet(*at, Some(f.sent_to)));
                owners.any(|(_, _, ours)| !ours.contains(&f.leads_to))
            };
            forget(&mut state.nft, strays);
        }
        Ok(())
    }

    /// Lets a published proc call other addresses than before. For one whose egress is not limited,
    /// or that is not published, nothing changes.
    pub fn allow(&self, slot: Slot, allowed: Vec<Allowed>) -> Result<(), NatError> {
        let mut state = self.state.lock();
        let old = state.elements_of(self.instance, slot);
        let Some(published) = state.published.get_mut(&slot).filter(|p| p.egress.is_some()) else { return Ok(()) };
        let before = published.egress.replace(allowed);
        let new = state.elements_of(self.instance, slot);
        let done = self.replace(&mut state, old, new);
        if done.is_err()
            && let Some(published) = state.published.get_mut(&slot)
        {
            published.egress = before;
        }
        done
    }

    /// Has new flows to a published proc wait, or lets them through again. One that is not
    /// published is fine.
    pub fn hold(&self, slot: Slot, held: bool) -> Result<(), NatError> {
        // One lock for both: what is published in between would be undone.
        let mut state = self.state.lock();
        if !held {
            state.held_ahead.remove(&slot);
        }
        let Some(published) = state.published.get(&slot).cloned() else { return Ok(()) };
        self.publish_in(&mut state, vec![Published { held, ..published }])
    }

    /// Has new flows to a proc that is not published yet wait from its first rule on, until they
    /// are let through by [`Nat::hold`], or its publication ends.
    pub fn hold_ahead(&self, slot: Slot) {
        self.state.lock().held_ahead.insert(slot);
    }

    /// What procs whose egress is limited were refused since the last call, at most some thousands.
    pub fn take_refused(&self) -> Result<Vec<RefusedCall>, NatError> {
        let mut state = self.state.lock();
        if state.over || state.published.values().all(|p| p.egress.is_none()) {
            return Ok(Vec::new());
        }
        let table = self.instance.table();
        let taken = refused::take(&mut state.nft, &table, self.instance);
        taken.map_err(|source| NatError::Elements { table, source })
    }

    /// Ends the publication of these procs, and with it the flows that lead to them. Those that are
    /// not published are fine.
    pub fn unpublish(&self, slots: &[Slot]) -> Result<(), NatError> {
        let mut state = self.state.lock();
        let old = slots.iter().flat_map(|s| state.elements_of(self.instance, *s)).collect();
        self.replace(&mut state, old, Vec::new())?;
        let mut with_udp = Vec::new();
        for slot in slots {
            state.held_ahead.remove(slot);
            let Some(published) = state.published.remove(slot) else { continue };
            set_group(&mut state.rtnl, self.instance, *slot, 0)?;
            if published.ports.iter().any(|f| f.proto == Protocol::Udp) {
                let gone = Addresses::of(self.instance, *slot);
                with_udp.extend([IpAddr::from(gone.v4), IpAddr::from(gone.v6)]);
            }
        }
        if !with_udp.is_empty() {
            forget(&mut state.nft, |f| with_udp.contains(&f.leads_to));
        }
        let NatState { networks, published, .. } = &mut *state;
        networks.retain(|network, _| published.values().any(|p| p.known_network() == Some(network)));
        Ok(())
    }

    /// Puts the rules back if another program has removed them, with a whole rule set, say. Returns
    /// whether it had to. A check costs some microseconds.
    pub fn mend(&self) -> Result<bool, NatError> {
        let mut state = self.state.lock();
        let table = self.instance.table();
        let there = elements::is_there(&mut state.nft, &table);
        if state.over || there.map_err(|source| NatError::Elements { table, source })? {
            return Ok(false);
        }
        let all = state.all_elements(self.instance);
        self.nft(&ruleset::full(self.instance, Which::Main, &all))?;
        Ok(true)
    }

    /// Switches forwarding on for interfaces by which the outside has come since. Returns whether
    /// there were any. A check costs some ten microseconds.
    pub fn follow_uplinks(&self) -> Result<bool, NatError> {
        let mut state = self.state.lock();
        Ok(!state.over && forwarding::enable(self.instance, &self.memory, &self.uplinks, &mut state.defaults)?)
    }

    /// From now on nothing puts them back: [`Nat::remove`] follows.
    pub fn close(&self) {
        self.state.lock().over = true;
    }

    /// Removes the rules and ends this instance's need of forwarding; the last instance puts the
    /// machine's settings back.
    pub fn remove_all(self) -> Result<(), NatError> {
        Nat::remove(self.instance, &self.memory)
    }

    /// The same for an instance whose rules are not open, such as one whose daemon has died. There
    /// may be none.
    pub fn remove(instance: Instance, memory: &Path) -> Result<(), NatError> {
        // The second is left by a daemon that was killed while it replaced the first.
        run_nft(instance, &(ruleset::none(instance, Which::Main) + &ruleset::none(instance, Which::Standby)))?;
        forwarding::disable(instance, memory)?;
        Ok(())
    }

    /// The whole rule set, in place of an earlier daemon's if there is one.
    fn put_in_place(&self, state: &mut NatState, all: &[Element]) -> Result<(), NatError> {
        let table = self.instance.table();
        let there = elements::is_there(&mut state.nft, &table);
        let there = there.map_err(|source| NatError::Elements { table, source })?;
        if there {
            self.nft(&ruleset::full(self.instance, Which::Standby, all))?;
        }
        let done = self.nft(&ruleset::full(self.instance, Which::Main, all));
        // Also one that a daemon has left that was killed at this point.
        if let Err(error) = self.nft(&ruleset::none(self.instance, Which::Standby)) {
            tracing::warn!(%error, "a second table of rules stays until the next start");
        }
        done
    }

    fn nft(&self, text: &str) -> Result<(), NatError> {
        run_nft(self.instance, text)
    }

    /// A program that flushed the machine's whole rule set removed ours with it: then all of ours
    /// is put back.
    fn replace(&self, state: &mut NatState, old: Vec<Element>, new: Vec<Element>) -> Result<(), NatError> {
        let (before, after): (BTreeSet<&Element>, BTreeSet<&Element>) = (old.iter().collect(), new.iter().collect());
        let removed = before.difference(&after).map(|element| Change::Remove((*element).clone()));
        let added = after.difference(&before).map(|element| Change::Add((*element).clone()));
        let changes: Vec<_> = removed.chain(added).collect();
        if changes.is_empty() {
            return Ok(());
        }
        let table = self.instance.table();
        match elements::apply(&mut state.nft, &table, &changes) {
            Ok(()) => Ok(()),
            Err(e) if e.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => {
                tracing::warn!(%table, "the rules were gone; putting them back");
                let mut all = state.all_elements(self.instance);
                all.retain(|e| !old.contains(e));
                all.extend(new);
                all.sort_unstable();
                all.dedup();
                self.nft(&ruleset::full(self.instance, Which::Main, &all))
            }
            Err(source) => Err(NatError::Elements { table, source }),
        }
    }
}

impl NatState {
    fn all_elements(&self, instance: Instance) -> Vec<Element> {
        let published = self.published.keys().flat_map(|slot| self.elements_of(instance, *slot));
        let spread = self.spread.iter().flat_map(|(slot, over)| spread::elements(instance, *slot, over));
        published.chain(spread).collect()
    }

    fn elements_of(&self, instance: Instance, slot: Slot) -> Vec<Element> {
        match self.published.get(&slot) {
            Some(p) => ruleset::elements(instance, p.known_network().map(|network| self.networks[network]), p),
            None => Vec::new(),
        }
    }
}

/// The rules are right without this; only flows older than them would miss it.
fn forget(connection: &mut Connection, unwanted: impl Fn(&Flow) -> bool) {
    if let Err(error) = conntrack::forget(connection, unwanted) {
        tracing::warn!(%error, "UDP flows of earlier rules are not forgotten; their clients may have to pause for 2 minutes");
    }
}

fn run_nft(instance: Instance, text: &str) -> Result<(), NatError> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(NatError::NoNft)?;
    let fed = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().map_err(NatError::NoNft)?;
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match fed {
        _ if !output.status.success() => Err(NatError::Rules { table: instance.table(), message }),
        Err(source) => Err(NatError::NoNft(source)),
        Ok(()) => Ok(()),
    }
}

fn is_network(instance: Instance, group: u32) -> bool {
    let base = group_base(instance);
    (base + 1..alone_group(instance)).contains(&group)
}

/// The group of procs that are alone: the last but that of links that are to be removed.
fn alone_group(instance: Instance) -> u32 {
    group_base(instance) + 0xffe
}

/// The group that stands for a network. There are more numbers than slots, so one is always free.
fn group_of(instance: Instance, networks: &mut BTreeMap<Network, u32>, network: &Network) -> u32 {
    if let Some(group) = networks.get(network) {
        return *group;
    }
    let used: BTreeSet<u32> = networks.values().copied().collect();
    let group = (group_base(instance) + 1..alone_group(instance))
        .find(|group| !used.contains(group))
        .expect("there are fewer slots, so fewer networks, than groups");
    networks.insert(network.clone(), group);
    group
}

/// Whether one of the ports is the same port of the host.
fn meets(one: &Forward, ports: &[Forward]) -> bool {
    let same = |o: &Forward| {
        (o.proto, o.host_port) == (one.proto, one.host_port) && addresses_meet(o.host_addr, one.host_addr)
    };
    one.host_port.is_some() && ports.iter().any(same)
}

fn refuse_clashes<'a>(others: impl Iterator<Item = &'a Published>, new: &Published) -> Result<(), NatError> {
    for other in others.filter(|o| o.slot != new.slot) {
        for forward in &new.ports {
            let Some(port) = forward.host_port else { continue };
            if meets(forward, &other.ports) {
                return Err(NatError::PortTaken { port, proto: forward.proto, by: other.slot });
            }
        }
    }
    Ok(())
}

fn set_group(rtnl: &mut Rtnl, instance: Instance, slot: Slot, group: u32) -> Result<(), NatError> {
    let name = instance.interface(slot);
    let mut link = link_at(0);
    link.attributes.push(LinkAttribute::IfName(name.clone()));
    link.attributes.push(LinkAttribute::Group(group));
    let request = Request {
        doing: format!("set the group of {name}"),
        message: RouteNetlinkMessage::SetLink(link),
        how: How::Plain,
        // Taking a network away from a link that is gone is done already.
        tolerate: (group == 0).then_some(Errno::NODEV),
    };
    rtnl.batch(vec![request]).map_err(|source| NatError::Network { slot, source })
}
