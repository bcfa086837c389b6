//! How one namespace is made, step by step.
//!
//! Both ends of a link have the same hardware address and no ARP: what leaves one end is addressed
//! to itself and therefore accepted by the other. So no neighbour is ever resolved, no entry counts
//! against the machine-wide limit of the neighbour tables (1024 by default), and the first packet
//! is as fast as the second.
//!
//! The host's end has a second local route to ::1. Without it the answer to a connection from [::1]
//! is dropped: NAT turns its destination back into ::1 before routing, and the kernel looks a
//! loopback destination up strictly on the interface the packet came by (`rt6_need_strict` in
//! net/ipv6/route.c), where ::1 otherwise has no route. Packets that arrive with ::1 in them are
//! dropped before that (`ip6_rcv_core`), so the route opens nothing.

use super::{NetNs, NetNsError};
use crate::addr::{Addresses, Instance, SLOTS, Slot};
use crate::rtnl::{How, Request, Rtnl, RtnlError, link_at};
use crate::sysctl::{self, SysctlError};
use netlink_packet_core::{DefaultNla, Emitable};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope, CacheInfo};
use netlink_packet_route::link::{
    AfSpecInet, AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags,
    LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;
use std::cell::OnceCell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Index of `lo` in every namespace.
const LO: u32 = 1;
/// Routing table `local` (rtnetlink(7)).
const TABLE_LOCAL: u8 = 255;
/// Where the first of the other routes to ::1 stands: behind the ordinary one, whose metric is 0.
const LOOPBACK_METRIC: u32 = 4096;
/// `IFLA_INET_CONF`, with the flag for nested attributes.
const INET_CONF: u16 = 1 | 1 << 15;
/// Numbers of settings in linux/ip.h.
const IPV4_DEVCONF_FORWARDING: u16 = 1;
const IPV4_DEVCONF_RP_FILTER: u16 = 8;
const IPV4_DEVCONF_ROUTE_LOCALNET: u16 = 26;
/// The router as a proc sees it. No machine has this address; links resolve nothing.
const ROUTER_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Settings inside. All ports are open to all users because the namespace belongs to the initial
/// user namespace, where the proc's root has no rights; MPTCP is off because CRIU refuses its
/// sockets, and Go listens with it by default.
const INSIDE: [(&str, &str); 4] = [
    ("ipv4/ip_unprivileged_port_start", "0"),
    ("ipv4/ping_group_range", "0 2147483647"),
    ("core/somaxconn", "4096"),
    ("mptcp/enabled", "0"),
];

/// Buckets of the table of TCP connections that each namespace has for itself, 16 KiB. Of the
/// machine's table, with 262,144 where there is much memory, each look at a proc's sockets
/// (sock_diag(7), by Kip and by CRIU while a program stands still) would go through all.
const CONNECTION_BUCKETS: &str = "2048";
/// What the kernel makes smaller together with that table, and is to be as in the host's namespace.
const BY_TABLE: [&str; 2] = ["ipv4/tcp_max_tw_buckets", "ipv4/tcp_max_syn_backlog"];

/// What the making thread keeps.
pub(super) struct Maker {
    instance: Instance,
    ipv6: bool,
    host: Rtnl,
    home: OwnedFd,
    /// The namespace in which new ones are made, whose settings say how large their tables are:
    /// made for the first of them, and none on kernels before 6.1.
    nursery: OnceCell<Option<OwnedFd>>,
    /// The settings of [`BY_TABLE`].
    by_table: Vec<(&'static str, String)>,
}

/// A namespace in which new ones are made. The thread comes back to `home`.
fn make_nursery(home: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    kip_sys::netns::unshare_net()?;
    let set = sysctl::write_if_present("ipv4/tcp_child_ehash_entries", CONNECTION_BUCKETS);
    let nursery = match set.map_err(io::Error::other) {
        Ok(true) => kip_sys::netns::current_net().map(Some),
        Ok(false) => Ok(None),
        Err(e) => Err(e),
    };
    kip_sys::netns::enter_net(home)?;
    nursery
}

impl Maker {
    /// To be called in the host's namespace.
    pub fn open(instance: Instance, ipv6: bool) -> Result<Maker, NetNsError> {
        let host = Rtnl::open().map_err(NetNsError::Instance)?;
        let home = kip_sys::netns::current_net().map_err(NetNsError::Thread)?;
        let by_table = BY_TABLE.iter().filter_map(|key| Some((*key, sysctl::read(key).ok()?))).collect();
        Ok(Maker { instance, ipv6, host, home, nursery: OnceCell::new(), by_table })
    }

    /// Makes the namespace of a free slot; whatever link has its name is in the way and removed.
    pub fn make(&mut self, slot: Slot) -> Result<NetNs, NetNsError> {
        let at = |doing| move |source| NetNsError::Namespace { slot, doing, source };
        let nursery = self.nursery.get_or_init(|| {
            make_nursery(self.home.as_fd()).unwrap_or_else(|error| {
                tracing::warn!(%error, "procs share the machine's table of TCP connections");
                None
            })
        });
        if let Some(nursery) = nursery {
            kip_sys::netns::enter_net(nursery.as_fd()).map_err(at("enter a network namespace"))?;
        }
        let made = kip_sys::netns::unshare_net().map_err(at("make a network namespace"));
        let inside = made.and_then(|()| self.open_inside(slot));
        kip_sys::netns::enter_net(self.home.as_fd()).map_err(at("return from a network namespace"))?;
        let (fd, mut rtnl) = inside?;

        let addresses = Addresses::of(self.instance, slot);
        let ifname = self.instance.interface(slot);
        let linked = self.link(slot, &addresses, fd.as_fd(), &mut rtnl);
        linked.map_err(|source| NetNsError::Link { slot, source })?;
        self.settings(&ifname).map_err(|source| NetNsError::Setting { slot, source })?;
        Ok(NetNs { slot, fd, ifname, v4: addresses.v4, v6: addresses.v6 })
    }

    /// What needs the thread to be inside: the descriptor, the netlink socket, the settings.
    fn open_inside(&self, slot: Slot) -> Result<(OwnedFd, Rtnl), NetNsError> {
        let open = |source: io::Error| NetNsError::Namespace { slot, doing: "open the network namespace", source };
        let fd = kip_sys::netns::current_net().map_err(open)?;
        let rtnl = Rtnl::open().map_err(|source| NetNsError::Link { slot, source })?;
        let by_table = self.by_table.iter().filter(|_| matches!(self.nursery.get(), Some(Some(_))));
        for (key, value) in INSIDE.into_iter().chain(by_table.map(|(key, value)| (*key, value.as_str()))) {
            sysctl::write_if_present(key, value).map_err(|source| NetNsError::Setting { slot, source })?;
        }
        Ok((fd, rtnl))
    }

    fn link(
        &mut self,
        slot: Slot,
        addresses: &Addresses,
        ns: BorrowedFd<'_>,
        inside: &mut Rtnl,
    ) -> Result<(), RtnlError> {
        let ifname = &self.instance.interface(slot);
        let create = || vec![create_veth(ifname, addresses, ns)];
        match self.host.batch(create()) {
            Err(e) if e.is_refused_with(Errno::EXIST) => {
                let mut stale = link_at(0);
                stale.attributes.push(LinkAttribute::IfName(ifname.to_owned()));
                let message = RouteNetlinkMessage::DelLink(stale);
                let doing = format!("remove the stale link {ifname}");
                self.host.batch(vec![Request { doing, message, how: How::Plain, tolerate: Some(Errno::NODEV) }])?;
                self.host.batch(create())?;
            }
            other => other?,
        }
        let outer = self.host.index_of(ifname)?.ok_or_else(|| vanished(ifname))?;
        let inner = inside.index_of("eth0")?.ok_or_else(|| vanished("eth0"))?;
        self.host.batch(vec![up_outside(outer, self.ipv6)])?;
        inside.batch(vec![set_link("bring eth0 up", up(inner, self.ipv6))])?;
        inside.batch(inside_requests(inner, self.instance, addresses, self.ipv6))?;
        inside.await_carrier(inner)?;
        self.host.await_carrier(outer)?;
        self.host.batch(routes_outside(outer, self.instance, slot, addresses, self.ipv6))
    }

    fn settings(&self, ifname: &str) -> Result<(), SysctlError> {
        if self.ipv6 {
            // Kernel 6.17; older ones forward by the global switch, which `nat` sets.
            sysctl::write_if_present(&format!("ipv6/conf/{ifname}/force_forwarding"), "1")?;
        }
        Ok(())
    }
}

/// Gives the host its own addresses towards the procs, or takes them away. They are on `lo` because
/// every machine has it, with link scope and deprecated, so that nothing chooses them as a source
/// but our own routes.
pub(super) fn gateway(instance: Instance, ipv6: bool, present: bool) -> Vec<Request> {
    let mut requests = vec![address(LO, instance.gateway_v4().into(), AddressScope::Link, present)];
    if ipv6 {
        requests.push(address(LO, instance.gateway_v6().into(), AddressScope::Universe, present));
        let local = route(local(instance.gateway_v6(), LO));
        requests.push(if present { local } else { withdrawn(local) });
    }
    requests
}

fn vanished(name: &str) -> RtnlError {
    RtnlError::Refused { doing: format!("find {name}, just made"), source: io::ErrorKind::NotFound.into() }
}

fn end_of_link(name: &str, addresses: &Addresses) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Address(addresses.mac.to_vec()),
        LinkAttribute::NumTxQueues(1),
        LinkAttribute::NumRxQueues(1),
    ];
    link
}

/// Moves the calling thread into a new namespace that has no link but its loopback, which CRIU
/// needs to be up.
pub(crate) fn unlinked() -> io::Result<OwnedFd> {
    kip_sys::netns::unshare_net()?;
    let mut lo = link_at(LO);
    lo.header.flags = LinkFlags::Up;
    lo.header.change_mask = LinkFlags::Up;
    let up = Rtnl::open().and_then(|mut inside| inside.batch(vec![set_link("bring lo up", lo)]));
    up.map_err(io::Error::other)?;
    kip_sys::netns::current_net()
}

fn create_veth(ifname: &str, addresses: &Addresses, ns: BorrowedFd<'_>) -> Request {
    let mut peer = end_of_link("eth0", addresses);
    peer.attributes.push(LinkAttribute::NetNsFd(ns.as_raw_fd()));
    let mut link = end_of_link(ifname, addresses);
    link.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
    ]));
    Request {
        doing: format!("make the link {ifname}"),
        message: RouteNetlinkMessage::NewLink(link),
        how: How::Create,
        tolerate: None,
    }
}

/// Up, without ARP and without a link-local address (and so without duplicate address detection).
fn up(index: u32, ipv6: bool) -> LinkMessage {
    let mut link = link_at(index);
    link.header.flags = LinkFlags::Up | LinkFlags::Noarp;
    link.header.change_mask = LinkFlags::Up | LinkFlags::Noarp;
    let mut families = Vec::new();
    if ipv6 {
        families.push(AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]));
    }
    link.attributes.push(LinkAttribute::AfSpecUnspec(families));
    link
}

/// The host's end: may be forwarded from; 127.0.0.0/8 may be the (translated) destination of what
/// it brings.
fn up_outside(index: u32, ipv6: bool) -> Request {
    let mut link = up(index, ipv6);
    let mut settings = Vec::new();
    for (number, value) in
        [(IPV4_DEVCONF_FORWARDING, 1u32), (IPV4_DEVCONF_RP_FILTER, 0), (IPV4_DEVCONF_ROUTE_LOCALNET, 1)]
    {
        let setting = DefaultNla::new(number, value.to_ne_bytes().to_vec());
        let start = settings.len();
        settings.resize(start + setting.buffer_len(), 0);
        setting.emit(&mut settings[start..]);
    }
    let inet = AfSpecUnspec::Inet(vec![AfSpecInet::Other(DefaultNla::new(INET_CONF, settings))]);
    if let Some(LinkAttribute::AfSpecUnspec(families)) = link.attributes.last_mut() {
        families.push(inet);
    }
    set_link("bring the host's end up", link)
}

fn set_link(doing: &str, link: LinkMessage) -> Request {
    Request { doing: doing.to_owned(), message: RouteNetlinkMessage::SetLink(link), how: How::Plain, tolerate: None }
}

fn inside_requests(index: u32, instance: Instance, addresses: &Addresses, ipv6: bool) -> Vec<Request> {
    let mut lo = link_at(LO);
    lo.header.flags = LinkFlags::Up;
    lo.header.change_mask = LinkFlags::Up;
    let mut requests = vec![
        set_link("bring lo up", lo),
        address(index, addresses.v4.into(), AddressScope::Universe, true),
        route(Route {
            via: Some(instance.gateway_v4().into()),
            ..Route::to(Ipv4Addr::UNSPECIFIED.into(), 0, Some(index))
        }),
        // SO_BINDTODEVICE needs no privilege and would send 127.0.0.1 out by eth0. The host drops
        // it as well.
        route(Route { kind: RouteType::BlackHole, ..Route::to(Ipv4Addr::new(127, 0, 0, 0).into(), 8, None) }),
    ];
    if ipv6 {
        requests.push(address(index, addresses.v6.into(), AddressScope::Universe, true));
        requests.push(route(local(addresses.v6, index)));
        requests.push(route(Route {
            via: Some(ROUTER_V6.into()),
            ..Route::to(Ipv6Addr::UNSPECIFIED.into(), 0, Some(index))
        }));
    }
    requests
}

fn routes_outside(index: u32, instance: Instance, slot: Slot, addresses: &Addresses, ipv6: bool) -> Vec<Request> {
    // IPv6 tells routes to one destination apart by their metric.
    let nth = u32::from(instance.number()) * u32::from(SLOTS) + u32::from(slot.number());
    let mut requests = vec![route(Route {
        source: Some(instance.gateway_v4().into()),
        ..Route::to(addresses.v4.into(), 32, Some(index))
    })];
    if ipv6 {
        requests.push(route(Route {
            source: Some(instance.gateway_v6().into()),
            ..Route::to(addresses.v6.into(), 128, Some(index))
        }));
        requests.push(route(Route {
            kind: RouteType::Local,
            table: TABLE_LOCAL,
            metric: Some(LOOPBACK_METRIC + nth),
            ..Route::to(Ipv6Addr::LOCALHOST.into(), 128, Some(index))
        }));
    }
    requests
}

fn address(index: u32, ip: IpAddr, scope: AddressScope, present: bool) -> Request {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.scope = scope;
    (message.header.family, message.header.prefix_len) = match ip {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    message.attributes = vec![AddressAttribute::Local(ip), AddressAttribute::Address(ip)];
    if ip.is_ipv6() && present {
        message.header.flags = AddressHeaderFlags::Nodad;
        if index == LO {
            let mut life = CacheInfo::default();
            life.ifa_valid = u32::MAX;
            message.attributes.push(AddressAttribute::CacheInfo(life));
        }
    }
    let (doing, message, how, tolerate) = if present {
        ("give", RouteNetlinkMessage::NewAddress(message), How::Create, Some(Errno::EXIST))
    } else {
        ("take away", RouteNetlinkMessage::DelAddress(message), How::Plain, Some(Errno::ADDRNOTAVAIL))
    };
    Request { doing: format!("{doing} the address {ip}"), message, how, tolerate }
}

struct Route {
    to: IpAddr,
    prefix: u8,
    device: Option<u32>,
    via: Option<IpAddr>,
    source: Option<IpAddr>,
    kind: RouteType,
    table: u8,
    metric: Option<u32>,
}

impl Route {
    fn to(to: IpAddr, prefix: u8, device: Option<u32>) -> Route {
        let table = RouteHeader::RT_TABLE_MAIN;
        Route { to, prefix, device, via: None, source: None, kind: RouteType::Unicast, table, metric: None }
    }
}

/// To an address of IPv6 that was just given. The kernel sets this route itself, but in a work item
/// of its own, and until then packets are refused.
fn local(address: Ipv6Addr, device: u32) -> Route {
    Route { kind: RouteType::Local, table: TABLE_LOCAL, ..Route::to(address.into(), 128, Some(device)) }
}

/// Takes a route away again, if it is there.
fn withdrawn(set: Request) -> Request {
    let RouteNetlinkMessage::NewRoute(message) = set.message else { unreachable!("it sets a route") };
    let doing = set.doing.replace("set", "take away");
    Request { doing, message: RouteNetlinkMessage::DelRoute(message), how: How::Plain, tolerate: Some(Errno::SRCH) }
}

fn route(route: Route) -> Request {
    let ip = |a: IpAddr| match a {
        IpAddr::V4(a) => RouteAddress::Inet(a),
        IpAddr::V6(a) => RouteAddress::Inet6(a),
    };
    let mut message = RouteMessage::default();
    let header = &mut message.header;
    header.address_family = if route.to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    header.destination_prefix_length = route.prefix;
    header.table = route.table;
    header.protocol = RouteProtocol::Static;
    header.kind = route.kind;
    // A route without a router reaches its neighbours only (rtnetlink(7), rtm_scope); IPv6 ignores
    // the field.
    let direct = route.via.is_none() && route.kind == RouteType::Unicast;
    header.scope = if direct { RouteScope::Link } else { RouteScope::Universe };
    if route.via.is_some() {
        header.flags = RouteFlags::Onlink;
    }
    let attributes = &mut message.attributes;
    if route.prefix > 0 {
        attributes.push(RouteAttribute::Destination(ip(route.to)));
    }
    attributes.extend(route.device.map(RouteAttribute::Oif));
    attributes.extend(route.via.map(|a| RouteAttribute::Gateway(ip(a))));
    attributes.extend(route.source.map(|a| RouteAttribute::PrefSource(ip(a))));
    attributes.extend(route.metric.map(RouteAttribute::Priority));
    Request {
        doing: format!("set the route to {}/{}", route.to, route.prefix),
        message: RouteNetlinkMessage::NewRoute(message),
        how: How::Replace,
        tolerate: None,
    }
}
