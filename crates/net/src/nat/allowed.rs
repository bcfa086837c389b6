//! What a proc may call, as boxes that nowhere overlap: addresses, protocols, ports. The kernel's
//! sets of ranges (`nft_set_pipapo`) refuse elements that overlap, while an owner's rules do. Pure.

use super::Allowed;
use super::elements::Element;
use kip_types::Protocol;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Numbers of protocols, and ports.
type Numbers = (u8, u8);
type PortRange = (u16, u16);
/// What is open at the addresses of a piece.
type Open = Vec<(Numbers, PortRange)>;

const ALL_PORTS: PortRange = (0, u16::MAX);

/// Elements that let packets of `source` through which any of `allowed` covers. Those of the other
/// family are left out.
pub(super) fn elements(source: IpAddr, allowed: &[Allowed]) -> Vec<Element> {
    let ours: Vec<&Allowed> = allowed.iter().filter(|a| a.addresses.0.is_ipv4() == source.is_ipv4()).collect();
    // Within a piece between two bounds the same rules hold for each address.
    let mut bounds = BTreeSet::new();
    for rule in &ours {
        bounds.insert(bits(rule.addresses.0));
        bounds.extend(bits(rule.addresses.1).checked_add(1));
    }
    let last = if source.is_ipv4() { u32::MAX.into() } else { u128::MAX };
    let starts: Vec<u128> = bounds.into_iter().filter(|start| *start <= last).collect();
    let mut pieces: Vec<(u128, u128, Open)> = Vec::new();
    for (at, start) in starts.iter().enumerate() {
        let end = starts.get(at + 1).map_or(last, |next| next - 1);
        let here: Vec<&Allowed> = ours
            .iter()
            .copied()
            .filter(|rule| bits(rule.addresses.0) <= *start && end <= bits(rule.addresses.1))
            .collect();
        let open = open_ports(&here);
        match pieces.last_mut() {
            Some((_, before, same)) if *before + 1 == *start && *same == open => *before = end,
            _ if open.is_empty() => {}
            _ => pieces.push((*start, end, open)),
        }
    }
    let addr = |bits: u128| address(bits, source.is_ipv4());
    let each = |(start, end, open): (u128, u128, Open)| {
        open.into_iter()
            .map(move |(protocols, ports)| Element::allowed(source, (addr(start), addr(end)), protocols, ports))
    };
    pieces.into_iter().flat_map(each).collect()
}

/// What rules that hold for the same addresses let through.
fn open_ports(rules: &[&Allowed]) -> Open {
    let of = |proto: Protocol| {
        let meant = rules.iter().filter(|rule| rule.proto.is_none_or(|only| only == proto));
        merged(meant.map(|rule| rule.ports.unwrap_or(ALL_PORTS)).collect())
    };
    let (tcp, udp) = (of(Protocol::Tcp), of(Protocol::Udp));
    // A rule without ports and protocol is for all there are, ICMP among them.
    if rules.iter().any(|rule| rule.ports.is_none() && rule.proto.is_none()) {
        return vec![((0, u8::MAX), ALL_PORTS)];
    }
    let numbered = |number: u8, ranges: Vec<PortRange>| ranges.into_iter().map(move |ports| ((number, number), ports));
    numbered(6, tcp).chain(numbered(17, udp)).collect()
}

/// The same ports, in order and without overlaps.
fn merged(mut ranges: Vec<PortRange>) -> Vec<PortRange> {
    ranges.sort_unstable();
    let mut all: Vec<PortRange> = Vec::new();
    for (first, last) in ranges {
        match all.last_mut() {
            Some((_, before)) if u32::from(first) <= u32::from(*before) + 1 => *before = last.max(*before),
            _ => all.push((first, last)),
        }
    }
    all
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address(bits: u128, is_ipv4: bool) -> IpAddr {
    match u32::try_from(bits) {
        Ok(bits) if is_ipv4 => Ipv4Addr::from_bits(bits).into(),
        _ => Ipv6Addr::from_bits(bits).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nat::elements::Set;

    fn rule(first: &str, last: &str, ports: Option<(u16, u16)>, proto: Option<Protocol>) -> Allowed {
        Allowed { addresses: (first.parse().unwrap(), last.parse().unwrap()), ports, proto }
    }

    fn texts(source: &str, rules: &[Allowed]) -> Vec<String> {
        elements(source.parse().unwrap(), rules).iter().map(Element::text).collect()
    }

    #[test]
    fn rules_that_overlap_become_boxes_that_do_not() {
        let rules = [
            rule("10.0.0.0", "10.255.255.255", Some((443, 443)), Some(Protocol::Tcp)),
            rule("10.1.2.3", "10.1.2.3", Some((80, 443)), None),
            rule("10.1.2.4", "10.1.2.4", None, None),
            rule("2001:db8::", "2001:db8::ffff", Some((53, 53)), Some(Protocol::Udp)),
        ];
        assert_eq!(
            texts("10.213.8.5", &rules),
            [
                "10.213.8.5 . 10.0.0.0-10.1.2.2 . 6 . 443",
                "10.213.8.5 . 10.1.2.3 . 6 . 80-443",
                "10.213.8.5 . 10.1.2.3 . 17 . 80-443",
                "10.213.8.5 . 10.1.2.4 . 0-255 . 0-65535",
                "10.213.8.5 . 10.1.2.5-10.255.255.255 . 6 . 443",
            ]
        );
        assert_eq!(texts("fd6b::5", &rules), ["fd6b::5 . 2001:db8::-2001:db8::ffff . 17 . 53"]);
        assert_eq!(texts("10.213.8.5", &[]), [""; 0]);
        let all = [
            rule("0.0.0.0", "255.255.255.255", None, None),
            rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
        ];
        assert_eq!(texts("10.213.8.5", &all), ["10.213.8.5 . 0.0.0.0-255.255.255.255 . 0-255 . 0-65535"]);
        assert_eq!(texts("fd6b::5", &all).len(), 1);
    }

    proptest::proptest! {
        /// Small numbers, so that rules meet: each packet that a rule covers is in exactly one box,
        /// and no other is in any.
        #[test]
        fn each_packet_is_in_one_box_or_none(
            rules in proptest::collection::vec((0u8..8, 0u8..4, 0u16..3, 0u16..8, 0u16..4), 0..8)
        ) {
            let rules: Vec<Allowed> = rules.into_iter().map(|(first, more, proto, port, ports)| Allowed {
                addresses: (IpAddr::from([10, 0, 0, first]), IpAddr::from([10, 0, 0, first + more])),
                ports: (port > 1).then_some((port, port + ports)),
                proto: [None, Some(Protocol::Tcp), Some(Protocol::Udp)][usize::from(proto)],
            }).collect();
            let boxes = elements("10.213.8.5".parse().unwrap(), &rules);
            proptest::prop_assert!(boxes.iter().all(|element| element.set == Set::Allowed4));
            for host in 0..13u8 {
                let address = IpAddr::from([10, 0, 0, host]);
                for protocol in [1u8, 6, 17] {
                    for port in 0..13u16 {
                        let meant = rules.iter().any(|rule| {
                            let proto = match rule.proto {
                                Some(Protocol::Tcp) => protocol == 6,
                                Some(Protocol::Udp) => protocol == 17,
                                None => rule.ports.is_none() || protocol != 1,
                            };
                            let (first, last) = rule.ports.unwrap_or(ALL_PORTS);
                            rule.addresses.0 <= address && address <= rule.addresses.1
                                && proto && first <= port && port <= last
                        });
                        let inside = boxes.iter().filter(|element| element.covers(address, protocol, port)).count();
                        proptest::prop_assert_eq!(inside, usize::from(meant));
                    }
                }
            }
        }
    }
}
