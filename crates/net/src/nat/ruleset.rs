//! The nftables table of an instance, as text for nft(8). Pure.
//!
//! Rules are written once; what changes with procs are elements of sets and maps.
//!
//! * `tcp4`, `udp4`, `tcp6`, `udp6`: host port to proc address and port.
//! * `tcp4at`, `udp4at`, `tcp6at`, `udp6at`: the same by host address and host port.
//! * `declared4`, `declared6`: network (as the group of the incoming interface), proc address,
//!   protocol, port that procs of that network may dial directly.
//! * `limited4`, `limited6`: addresses of procs that may call only what `allowed4` and `allowed6`
//!   name: proc address, addresses outside, protocols, ports. What is refused them is in `refused4`
//!   and `refused6`, which the kernel fills and [`super::refused`] reads.
//! * `held4`, `held6`: addresses of procs to which new flows wait: their first packets are dropped
//!   after the translation, before the kernel remembers the flow. Those of Kip itself
//!   ([`OWN_MARK`]) are not.
//! * `spread4`, `spread6`, `spread4at`, `spread6at`: (host address,) protocol, port and a number
//!   that is drawn for each new flow, to the address and port of one of several procs; before the
//!   maps above. The address may be a proc's own, for procs of its network.
//! * `own4`, `own6`: a proc's address twice, to recognise a proc that reaches itself by the host's
//!   address; without translating its source as well, the answer would never leave its namespace
//!   and so never be translated back.

use super::elements::{Element, PARTS, Set};
use super::{Published, allowed};
use crate::addr::{Addresses, Instance};
use std::fmt::Write;
use std::net::IpAddr;

/// Where a machine learns of its secrets, and what is on its own links only: no business of a
/// tenant's. Some of these addresses are name servers too. After the first two, which all clouds
/// use by IPv4: Alibaba Cloud, Azure; by IPv6 AWS, Google, Oracle, Akamai, Scaleway. What counts is
/// where a packet was sent to, whatever other programs have made of that.
const NEVER: [&str; 9] = [
    "ip daddr 169.254.0.0/16",
    "ip6 daddr fe80::/10",
    "ip daddr 100.100.100.200",
    "ip daddr 168.63.129.16",
    "ip6 daddr fd00:ec2::/64",
    "ip6 daddr fd20:ce::/64",
    "ip6 daddr fd00:c1::/64",
    "ip6 daddr fd00:a9fe:a9fe::/64",
    "ip6 daddr fd00:42::/64",
];

/// Packets of Kip's own to procs, for hooks and checks, have this mark: "kip".
pub const OWN_MARK: u32 = 0x6b_6970;

/// Which of an instance's two tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// The one that is there always.
    Main,
    /// One with the same rules, asked after it: there while the main table is replaced.
    ///
    /// The kernel replaces a table in one transaction; still a packet that is on its way through
    /// the hooks at that moment meets neither: it has passed the new chain while that was not in
    /// force yet, and comes to the old one when that is over, or looks into a map whose elements
    /// have just gone. Its connection would be refused, or it would pass unfiltered.
    Standby,
}

impl Which {
    /// Its name.
    pub(super) fn table(self, instance: Instance) -> String {
        match self {
            Which::Main => instance.table(),
            Which::Standby => format!("{}_standby", instance.table()),
        }
    }
}

/// Everything, with these procs published, in place of whatever the table held: one transaction.
pub(super) fn full(instance: Instance, which: Which, elements: &[Element]) -> String {
    let table = which.table(instance);
    let mut text = none(instance, which);
    let _ = writeln!(text, "table inet {table} {{");
    for set in Set::ALL {
        let kind = if set.is_map() { "map" } else { "set" };
        let _ = write!(text, "  {kind} {} {{ {};{}", set.name(), set.types(), set.properties());
        let mut inside = elements.iter().filter(|e| e.set == set).peekable();
        if inside.peek().is_some() {
            let list: Vec<_> = inside.map(|e| e.text()).collect();
            let _ = write!(text, " elements = {{ {} }};", list.join(", "));
        }
        text.push_str(" }\n");
    }
    text.push_str(&chains(instance, which));
    text.push_str("}\n");
    text
}

/// Nothing of the table, whether it is there or not.
pub(super) fn none(instance: Instance, which: Which) -> String {
    format!("add table inet {t}\ndelete table inet {t}\n", t = which.table(instance))
}

/// Elements of a published proc; `group` is that of its network.
pub(super) fn elements(instance: Instance, group: Option<u32>, published: &Published) -> Vec<Element> {
    if published.alone {
        return Vec::new();
    }
    let addresses = Addresses::of(instance, published.slot);
    let mut all = Vec::with_capacity(4 * published.ports.len() + 2);
    for forward in &published.ports {
        all.extend(Element::forward(addresses.v4.into(), *forward));
        all.extend(Element::forward(addresses.v6.into(), *forward));
        all.extend(group.map(|group| Element::declared(group, addresses.v4.into(), *forward)));
        all.extend(group.map(|group| Element::declared(group, addresses.v6.into(), *forward)));
    }
    if !published.ports.is_empty() {
        all.push(Element::own(addresses.v4.into()));
        all.push(Element::own(addresses.v6.into()));
    }
    if published.held {
        all.push(Element::held(addresses.v4.into()));
        all.push(Element::held(addresses.v6.into()));
    }
    if let Some(allowed) = &published.egress {
        for source in [IpAddr::from(addresses.v4), IpAddr::from(addresses.v6)] {
            all.push(Element::limited(source));
            all.extend(allowed::elements(source, allowed));
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

fn chains(instance: Instance, which: Which) -> String {
    // Numbers for the names raw, mangle, dstnat, srcnat and filter: those of dstnat and srcnat have
    // no place in the hook of what the host sends.
    let priority = |main: i32| match which {
        Which::Main => main,
        Which::Standby => main + 1,
    };
    let (raw, mangle, dstnat, translated) = (priority(-300), priority(-150), priority(-100), priority(-90));
    let (filter, srcnat) = (priority(0), priority(100));
    let procs = format!("\"{}*\"", instance.interface_prefix());
    let (gateway4, gateway6) = (instance.gateway_v4(), instance.gateway_v6());
    let alone = super::alone_group(instance);
    let never = |what: &str| {
        let which = format!("iifname {procs} oifname != {procs} ct original {what}");
        format!(
            "    {which} meta l4proto {{ tcp, udp }} th dport 53 accept\n    {which} reject with icmpx admin-prohibited\n"
        )
    };
    let never: String = NEVER.map(never).concat();
    let spread = |ip: &str, at: &str, set: &str| {
        let rule = |proto: &str| {
            format!("    dnat {ip} to {at}meta l4proto . {proto} dport . numgen random mod {PARTS} map @{set}\n")
        };
        rule("tcp") + &rule("udp")
    };
    // A proc's own address is for procs of its network.
    let near = |ip: &str, v: &str| {
        let of_network = format!("iifname {procs} meta iifgroup . {ip} daddr . meta l4proto . th dport @declared{v}");
        let rules = spread(ip, &format!("{ip} daddr . "), &format!("spread{v}at"));
        rules.lines().map(|rule| format!("    {of_network} {}\n", rule.trim())).collect::<String>()
    };
    let near = near("ip", "4") + &near("ip6", "6");
    let spread = spread("ip", "ip daddr . ", "spread4at")
        + &spread("ip6", "ip6 daddr . ", "spread6at")
        + &spread("ip", "", "spread4")
        + &spread("ip6", "", "spread6");
    let published = format!(
        "\
    fib daddr type != local accept
    ip6 daddr fe80::/10 accept
{spread}    dnat ip to ip daddr . tcp dport map @tcp4at
    dnat ip to ip daddr . udp dport map @udp4at
    dnat ip6 to ip6 daddr . tcp dport map @tcp6at
    dnat ip6 to ip6 daddr . udp dport map @udp6at
    dnat ip to tcp dport map @tcp4
    dnat ip to udp dport map @udp4
    dnat ip6 to tcp dport map @tcp6
    dnat ip6 to udp dport map @udp6
"
    );
    let limits = |v: &str, ip: &str| {
        let sent = format!("{ip} saddr . {ip} daddr . meta l4proto");
        format!(
            "\
  chain limited{v} {{
    meta iifgroup . {ip} daddr . meta l4proto . th dport @declared{v} accept
    {sent} . th dport @allowed{v} accept
    meta l4proto {{ tcp, udp }} update @refused{v} {{ {sent} . th dport }}
    meta l4proto {{ icmp, ipv6-icmp }} update @refused{v} {{ {sent} . 0 }}
    reject with icmpx admin-prohibited
  }}
"
        )
    };
    let held =
        |by: &str| format!("    ct state new {by}ip daddr @held4 drop\n    ct state new {by}ip6 daddr @held6 drop\n");
    let (arrived, sent) = (held(""), held(&format!("meta mark != {OWN_MARK:#x} ")));
    let limits = limits("4", "ip") + &limits("6", "ip6");
    format!(
        "\
  # What a proc sends must come from its own address and not go to the host's loopback. This is before any
  # translation, so answers to the host's own connections from 127.0.0.1 are not meant.
  chain guard {{
    type filter hook prerouting priority {raw}; policy accept;
    iifname != {procs} accept
    ip daddr 127.0.0.0/8 drop
    ip6 daddr ::1 drop
    fib saddr . iif oif missing counter drop
  }}
  # What a proc with limited egress begins is judged before any translation, by where it is sent to.
{limits}  chain egress {{
    type filter hook prerouting priority {mangle}; policy accept;
    iifname != {procs} accept
    ct state established,related accept
    ip saddr @limited4 jump limited4
    ip6 saddr @limited6 jump limited6
  }}
  # Packets for the loopback that come by a link are forged: translated they would pass for others, so they are left to the
  # kernel, which drops them.
  chain arriving {{
    type nat hook prerouting priority {dstnat}; policy accept;
    ip daddr 127.0.0.0/8 accept
    ip6 daddr ::1 accept
{near}{published}  }}
  chain local {{
    type nat hook output priority {dstnat}; policy accept;
{published}  }}
  chain leaving {{
    type nat hook postrouting priority {srcnat}; policy accept;
    oifname {procs} ip saddr 127.0.0.0/8 snat ip to {gateway4}
    oifname {procs} ip6 saddr ::1 snat ip6 to {gateway6}
    iifname {procs} oifname {procs} ip saddr . ip daddr @own4 snat ip to {gateway4}
    iifname {procs} oifname {procs} ip6 saddr . ip6 daddr @own6 snat ip6 to {gateway6}
    iifname {procs} oifname != {procs} masquerade
  }}
  # After the translation and before the way is looked for: where a proc has ended there is none, and clients would be told.
  chain arrived {{
    type filter hook prerouting priority {translated}; policy accept;
{arrived}  }}
  chain sent {{
    type filter hook output priority {translated}; policy accept;
{sent}  }}
  chain forwarded {{
    type filter hook forward priority {filter}; policy accept;
    iifname != {procs} oifname != {procs} accept
    ct state established,related accept
    ct state invalid drop
    iifgroup {alone} reject with icmpx admin-prohibited
{never}    ct status dnat accept
    iifname {procs} oifname != {procs} accept
    iifname {procs} meta iifgroup . ip daddr . meta l4proto . th dport @declared4 accept
    iifname {procs} meta iifgroup . ip6 daddr . meta l4proto . th dport @declared6 accept
    iifname {procs} reject with icmpx admin-prohibited
    drop
  }}
  chain host {{
    type filter hook input priority {filter}; policy accept;
    iifname != {procs} accept
    ct state established,related accept
    ct state invalid drop
    iifgroup {alone} reject with icmpx admin-prohibited
    meta l4proto {{ icmp, ipv6-icmp }} accept
    meta l4proto {{ tcp, udp }} th dport 53 accept
    drop
  }}
"
    )
}
