//! Elements of the sets, as text for nft(8) and as nfnetlink messages.
//!
//! Starting nft costs 4-5 ms whatever it has to do, so elements are added and removed by messages
//! of our own, which cost a tenth of a millisecond. The encoding is that of libnftnl: each part of
//! a concatenation fills whole 4-byte registers; numbers of the wire are big-endian, interface
//! groups are in the machine's order.

use super::Forward;
use super::nfnetlink::{
    Connection, Content, NFNL_SUBSYS_NFTABLES, NFPROTO_UNSPEC, NLM_F_ACK, NLM_F_CREATE, attribute, nested,
};
use kip_types::Protocol;
use std::io;
use std::net::IpAddr;
use std::ops::ControlFlow;

const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const NFT_MSG_GETTABLE: u16 = 1;
const NFT_MSG_NEWSETELEM: u16 = 12;
const NFT_MSG_GETSETELEM: u16 = 13;
const NFT_MSG_DELSETELEM: u16 = 14;
const NFPROTO_INET: u8 = 1;
/// Kinds of attributes; the numbers are those of linux/netfilter/nf_tables.h.
const TABLE_NAME: u16 = 1;
const SET_ELEM_LIST_TABLE: u16 = 1;
const SET_ELEM_LIST_SET: u16 = 2;
pub(super) const SET_ELEM_LIST_ELEMENTS: u16 = 3;
const LIST_ELEM: u16 = 1;
pub(super) const SET_ELEM_KEY: u16 = 1;
const SET_ELEM_DATA: u16 = 2;
const SET_ELEM_KEY_END: u16 = 10;
pub(super) const DATA_VALUE: u16 = 1;

/// Changes in one transaction; the socket's buffer limits a message to about 200 KB.
const MOST: usize = 1000;

/// A set or map of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Set {
    Tcp4,
    Udp4,
    Tcp6,
    Udp6,
    Tcp4At,
    Udp4At,
    Tcp6At,
    Udp6At,
    Declared4,
    Declared6,
    Own4,
    Own6,
    Limited4,
    Limited6,
    Allowed4,
    Allowed6,
    Refused4,
    Refused6,
    Held4,
    Held6,
    Spread4,
    Spread6,
    Spread4At,
    Spread6At,
}

/// New flows to a port that is spread fall into so many parts, at random.
pub(super) const PARTS: u32 = 64;

impl Set {
    pub const ALL: [Set; 24] = [
        Set::Tcp4,
        Set::Udp4,
        Set::Tcp6,
        Set::Udp6,
        Set::Tcp4At,
        Set::Udp4At,
        Set::Tcp6At,
        Set::Udp6At,
        Set::Declared4,
        Set::Declared6,
        Set::Own4,
        Set::Own6,
        Set::Limited4,
        Set::Limited6,
        Set::Allowed4,
        Set::Allowed6,
        Set::Refused4,
        Set::Refused6,
        Set::Held4,
        Set::Held6,
        Set::Spread4,
        Set::Spread6,
        Set::Spread4At,
        Set::Spread6At,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Set::Tcp4 => "tcp4",
            Set::Udp4 => "udp4",
            Set::Tcp6 => "tcp6",
            Set::Udp6 => "udp6",
            Set::Tcp4At => "tcp4at",
            Set::Udp4At => "udp4at",
            Set::Tcp6At => "tcp6at",
            Set::Udp6At => "udp6at",
            Set::Declared4 => "declared4",
            Set::Declared6 => "declared6",
            Set::Own4 => "own4",
            Set::Own6 => "own6",
            Set::Limited4 => "limited4",
            Set::Limited6 => "limited6",
            Set::Allowed4 => "allowed4",
            Set::Allowed6 => "allowed6",
            Set::Refused4 => "refused4",
            Set::Refused6 => "refused6",
            Set::Held4 => "held4",
            Set::Held6 => "held6",
            Set::Spread4 => "spread4",
            Set::Spread6 => "spread6",
            Set::Spread4At => "spread4at",
            Set::Spread6At => "spread6at",
        }
    }

    /// Its types, by name or, where they have none, by what is compared.
    pub fn types(self) -> &'static str {
        match self {
            Set::Spread4 => "typeof meta l4proto . th dport . numgen random mod 64 : ip daddr . tcp dport",
            Set::Spread6 => "typeof meta l4proto . th dport . numgen random mod 64 : ip6 daddr . tcp dport",
            Set::Spread4At => "typeof ip daddr . meta l4proto . th dport . numgen random mod 64 : ip daddr . tcp dport",
            Set::Spread6At => {
                "typeof ip6 daddr . meta l4proto . th dport . numgen random mod 64 : ip6 daddr . tcp dport"
            }
            Set::Tcp4 | Set::Udp4 => "type inet_service : ipv4_addr . inet_service",
            Set::Tcp6 | Set::Udp6 => "type inet_service : ipv6_addr . inet_service",
            Set::Tcp4At | Set::Udp4At => "type ipv4_addr . inet_service : ipv4_addr . inet_service",
            Set::Tcp6At | Set::Udp6At => "type ipv6_addr . inet_service : ipv6_addr . inet_service",
            Set::Declared4 => "type devgroup . ipv4_addr . inet_proto . inet_service",
            Set::Declared6 => "type devgroup . ipv6_addr . inet_proto . inet_service",
            Set::Own4 => "type ipv4_addr . ipv4_addr",
            Set::Own6 => "type ipv6_addr . ipv6_addr",
            Set::Limited4 | Set::Held4 => "type ipv4_addr",
            Set::Limited6 | Set::Held6 => "type ipv6_addr",
            Set::Allowed4 | Set::Refused4 => "type ipv4_addr . ipv4_addr . inet_proto . inet_service",
            Set::Allowed6 | Set::Refused6 => "type ipv6_addr . ipv6_addr . inet_proto . inet_service",
        }
    }

    /// What is said of it besides its types.
    pub fn properties(self) -> &'static str {
        match self {
            Set::Allowed4 | Set::Allowed6 => " flags interval;",
            // Filled by the kernel. A proc that tries more addresses than there is room for is
            // refused all the same.
            Set::Refused4 | Set::Refused6 => " flags dynamic, timeout; timeout 1h; size 4096;",
            _ => "",
        }
    }

    pub fn is_map(self) -> bool {
        self.types().contains(':')
    }
}

/// One part of a key or value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Part {
    Group(u32),
    Address(IpAddr),
    Protocol(Protocol),
    Port(u16),
    /// One of [`PARTS`].
    Number(u32),
    Addresses(IpAddr, IpAddr),
    Protocols(u8, u8),
    Ports(u16, u16),
}

/// One element.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Element {
    pub set: Set,
    key: Vec<Part>,
    value: Vec<Part>,
}

/// One step of a transaction.
pub(super) enum Change {
    Add(Element),
    Remove(Element),
}

impl Element {
    /// None for a private port, and for an address of the host's that is of the other family.
    pub fn forward(address: IpAddr, forward: Forward) -> Option<Element> {
        let host_port = forward.host_port?;
        let at = forward.host_addr;
        if at.is_some_and(|at| at.is_ipv4() != address.is_ipv4()) {
            return None;
        }
        let set = match (forward.proto, address.is_ipv4(), at.is_some()) {
            (Protocol::Tcp, true, false) => Set::Tcp4,
            (Protocol::Udp, true, false) => Set::Udp4,
            (Protocol::Tcp, false, false) => Set::Tcp6,
            (Protocol::Udp, false, false) => Set::Udp6,
            (Protocol::Tcp, true, true) => Set::Tcp4At,
            (Protocol::Udp, true, true) => Set::Udp4At,
            (Protocol::Tcp, false, true) => Set::Tcp6At,
            (Protocol::Udp, false, true) => Set::Udp6At,
        };
        let key = at.map(Part::Address).into_iter().chain([Part::Port(host_port)]).collect();
        let value = vec![Part::Address(address), Part::Port(forward.port)];
        Some(Element { set, key, value })
    }

    pub fn declared(group: u32, address: IpAddr, forward: Forward) -> Element {
        let set = if address.is_ipv4() { Set::Declared4 } else { Set::Declared6 };
        let key =
            vec![Part::Group(group), Part::Address(address), Part::Protocol(forward.proto), Part::Port(forward.port)];
        Element { set, key, value: Vec::new() }
    }

    pub fn own(address: IpAddr) -> Element {
        let set = if address.is_ipv4() { Set::Own4 } else { Set::Own6 };
        Element { set, key: vec![Part::Address(address); 2], value: Vec::new() }
    }

    /// Lets packets of a proc through: first and last of addresses, numbers of protocols and ports.
    pub fn allowed(source: IpAddr, to: (IpAddr, IpAddr), protocols: (u8, u8), ports: (u16, u16)) -> Element {
        let set = if source.is_ipv4() { Set::Allowed4 } else { Set::Allowed6 };
        let key = vec![
            Part::Address(source),
            Part::Addresses(to.0, to.1),
            Part::Protocols(protocols.0, protocols.1),
            Part::Ports(ports.0, ports.1),
        ];
        Element { set, key, value: Vec::new() }
    }

    /// A proc's address whose calls are judged by what is allowed.
    pub fn limited(source: IpAddr) -> Element {
        let set = if source.is_ipv4() { Set::Limited4 } else { Set::Limited6 };
        Element { set, key: vec![Part::Address(source)], value: Vec::new() }
    }

    /// A proc's address to which new flows wait.
    pub fn held(address: IpAddr) -> Element {
        let set = if address.is_ipv4() { Set::Held4 } else { Set::Held6 };
        Element { set, key: vec![Part::Address(address)], value: Vec::new() }
    }

    /// Leads a part of the new flows to a port, at that address or at all, to an address.
    pub fn spread(at: Option<IpAddr>, to: IpAddr, forward: Forward, outer: u16, part: u32) -> Element {
        let set = match (to.is_ipv4(), at.is_some()) {
            (true, false) => Set::Spread4,
            (false, false) => Set::Spread6,
            (true, true) => Set::Spread4At,
            (false, true) => Set::Spread6At,
        };
        let rest = [Part::Protocol(forward.proto), Part::Port(outer), Part::Number(part)];
        let key = at.map(Part::Address).into_iter().chain(rest).collect();
        Element { set, key, value: vec![Part::Address(to), Part::Port(forward.port)] }
    }

    /// Whether an element that lets packets through is for this one.
    #[cfg(test)]
    pub fn covers(&self, to: IpAddr, protocol: u8, port: u16) -> bool {
        self.key[1..].iter().all(|part| match *part {
            Part::Addresses(first, last) => first <= to && to <= last,
            Part::Protocols(first, last) => first <= protocol && protocol <= last,
            Part::Ports(first, last) => first <= port && port <= last,
            _ => false,
        })
    }

    pub fn text(&self) -> String {
        let join = |parts: &[Part]| parts.iter().map(|p| p.text()).collect::<Vec<_>>().join(" . ");
        if self.value.is_empty() { join(&self.key) } else { format!("{} : {}", join(&self.key), join(&self.value)) }
    }
}

impl Part {
    fn text(self) -> String {
        match self {
            Part::Group(number) | Part::Number(number) => number.to_string(),
            Part::Address(address) => address.to_string(),
            Part::Protocol(proto) => proto.to_string(),
            Part::Port(port) => port.to_string(),
            Part::Addresses(first, last) if first == last => first.to_string(),
            Part::Addresses(first, last) => format!("{first}-{last}"),
            Part::Protocols(first, last) if first == last => first.to_string(),
            Part::Protocols(first, last) => format!("{first}-{last}"),
            Part::Ports(first, last) if first == last => first.to_string(),
            Part::Ports(first, last) => format!("{first}-{last}"),
        }
    }

    /// Where a range begins and where it ends; for all else the same twice.
    fn ends(self) -> [Part; 2] {
        match self {
            Part::Addresses(first, last) => [Part::Address(first), Part::Address(last)],
            Part::Protocols(first, last) => [Part::Protocols(first, first), Part::Protocols(last, last)],
            Part::Ports(first, last) => [Part::Port(first), Part::Port(last)],
            other => [other; 2],
        }
    }

    fn bytes(self) -> Vec<u8> {
        match self {
            Part::Group(number) | Part::Number(number) => number.to_ne_bytes().to_vec(),
            Part::Address(IpAddr::V4(a)) | Part::Addresses(IpAddr::V4(a), _) => a.octets().to_vec(),
            Part::Address(IpAddr::V6(a)) | Part::Addresses(IpAddr::V6(a), _) => a.octets().to_vec(),
            Part::Protocol(Protocol::Tcp) => vec![6],
            Part::Protocol(Protocol::Udp) => vec![17],
            Part::Protocols(number, _) => vec![number],
            Part::Port(port) | Part::Ports(port, _) => port.to_be_bytes().to_vec(),
        }
    }
}

/// Whether there is such a table.
pub(super) fn is_there(connection: &mut Connection, table: &str) -> io::Result<bool> {
    let mut bytes = Vec::new();
    let kind = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETTABLE;
    let name = attribute(TABLE_NAME, [table.as_bytes(), &[0]].concat());
    let asked = connection.append(&mut bytes, kind, NLM_F_ACK, NFPROTO_INET, &name);
    connection.exchange(&bytes, asked, |answer| match answer.content {
        Content::Outcome(Ok(())) => ControlFlow::Break(Ok(true)),
        Content::Outcome(Err(e)) if e.kind() == io::ErrorKind::NotFound => ControlFlow::Break(Ok(false)),
        Content::Outcome(Err(e)) => ControlFlow::Break(Err(e)),
        _ => ControlFlow::Continue(()),
    })?
}

/// Carries all changes out in order and returns the kernel's first refusal. Up to [`MOST`] of them,
/// far more than one proc has that is not spread, are one transaction: all or none.
pub(super) fn apply(connection: &mut Connection, table: &str, changes: &[Change]) -> io::Result<()> {
    changes.chunks(MOST).try_for_each(|changes| transaction(connection, table, changes))
}

/// Removes elements by their keys, all or none of each [`MOST`].
pub(super) fn remove_keys(connection: &mut Connection, table: &str, set: Set, keys: &[Vec<u8>]) -> io::Result<()> {
    let message = |key: &Vec<u8>| {
        let key = nested(SET_ELEM_KEY, attribute(DATA_VALUE, key.clone()));
        (NFT_MSG_DELSETELEM, 0, of_set(table, set, Some(nested(LIST_ELEM, key))))
    };
    keys.chunks(MOST).try_for_each(|keys| batch(connection, keys.iter().map(message).collect()))
}

/// Appends the question for all elements of a set and returns its sequence number.
pub(super) fn append_list(connection: &mut Connection, bytes: &mut Vec<u8>, table: &str, set: Set, flags: u16) -> u32 {
    let kind = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETSETELEM;
    connection.append(bytes, kind, flags, NFPROTO_INET, &of_set(table, set, None))
}

fn transaction(connection: &mut Connection, table: &str, changes: &[Change]) -> io::Result<()> {
    let message = |change: &Change| match change {
        Change::Add(element) => (NFT_MSG_NEWSETELEM, NLM_F_CREATE, body(table, element)),
        Change::Remove(element) => (NFT_MSG_DELSETELEM, 0, body(table, element)),
    };
    batch(connection, changes.iter().map(message).collect())
}

/// One transaction of messages, each with its kind, its flags and its body.
fn batch(connection: &mut Connection, messages: Vec<(u16, u16, Vec<u8>)>) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(256 * messages.len());
    let batch = connection.append(&mut bytes, NFNL_MSG_BATCH_BEGIN, 0, NFPROTO_UNSPEC, &[]);
    let mut last = batch;
    let count = messages.len();
    for (i, (kind, flags, body)) in messages.into_iter().enumerate() {
        // Refusals are always told; success only of the last, which is that of all.
        let answer = if i + 1 == count { NLM_F_ACK } else { 0 };
        let kind = NFNL_SUBSYS_NFTABLES << 8 | kind;
        last = connection.append(&mut bytes, kind, answer | flags, NFPROTO_INET, &body);
    }
    connection.append(&mut bytes, NFNL_MSG_BATCH_END, 0, NFPROTO_UNSPEC, &[]);
    // An answer to the batch's beginning is one to all of it.
    let mut outcome = Ok(());
    connection.exchange(&bytes, batch, |answer| {
        if let Content::Outcome(this) = answer.content {
            if outcome.is_ok() {
                outcome = this;
            }
            if answer.sequence == batch || answer.sequence == last {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    })?;
    outcome
}

fn body(table: &str, element: &Element) -> Vec<u8> {
    let ends: Vec<[Part; 2]> = element.key.iter().map(|part| part.ends()).collect();
    let end = |which: usize| ends.iter().map(|ends| ends[which]).collect::<Vec<Part>>();
    let (first, last) = (end(0), end(1));
    let mut inner = data(SET_ELEM_KEY, &first);
    if first != last {
        inner.extend(data(SET_ELEM_KEY_END, &last));
    }
    if !element.value.is_empty() {
        inner.extend(data(SET_ELEM_DATA, &element.value));
    }
    of_set(table, element.set, Some(nested(LIST_ELEM, inner)))
}

/// The body of a message about a set, with an element of it or none.
fn of_set(table: &str, set: Set, element: Option<Vec<u8>>) -> Vec<u8> {
    let mut body = attribute(SET_ELEM_LIST_TABLE, c_string(table));
    body.extend(attribute(SET_ELEM_LIST_SET, c_string(set.name())));
    body.extend(element.map(|element| nested(SET_ELEM_LIST_ELEMENTS, element)).unwrap_or_default());
    body
}

fn data(kind: u16, parts: &[Part]) -> Vec<u8> {
    let mut value = Vec::with_capacity(64);
    for part in parts {
        value.extend(part.bytes());
        if parts.len() > 1 {
            value.resize(value.len().next_multiple_of(4), 0);
        }
    }
    nested(kind, attribute(DATA_VALUE, value))
}

fn c_string(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    bytes
}
