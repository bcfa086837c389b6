//! The host's table of flows, nf_conntrack: which peers a proc talks to, and how old the newest
//! packet is.
//!
//! The kernel has no such time for a socket that could be read without the socket's lock, which a
//! thread that waits for a page may hold. A flow's entry is given a time-out by each of its
//! packets, so what has gone by of it is the age of the newest packet, in whole seconds.

use kip_types::Protocol;
use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};

const TABLE: &str = "/proc/net/nf_conntrack";
const TIMEOUTS: &str = "/proc/sys/net/netfilter";

/// One flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) proto: Protocol,
    /// The sender of its first packet, and the address that it was sent to.
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    /// The side that answers, and the address that it answers to: the same after translation.
    pub(super) answers: SocketAddr,
    pub(super) answers_to: SocketAddr,
    /// Of its time-out this many seconds are left.
    left_s: u64,
    /// The kernel's word for where a TCP connection is, in small letters.
    state: Option<String>,
    /// Packets went both ways.
    assured: bool,
}

/// The flows of some addresses, and the machine's time-outs.
#[derive(Debug, Default)]
pub(super) struct Flows {
    pub(super) all: Vec<Flow>,
    timeouts: HashMap<String, u64>,
}

impl Flows {
    /// Those that lead to or come from one of `addresses`; none where the kernel does not show its
    /// table.
    pub(super) fn read(addresses: &[IpAddr]) -> Flows {
        let text = fs::read_to_string(TABLE).unwrap_or_default();
        let concerns = |f: &Flow| addresses.contains(&f.from.ip()) || addresses.contains(&f.answers.ip());
        let all = text.lines().filter_map(parse).filter(concerns).collect();
        let mut timeouts = HashMap::new();
        for entry in fs::read_dir(TIMEOUTS).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(name) =
                name.strip_prefix("nf_conntrack_").filter(|n| n.contains("timeout") || n.contains("udp"))
                && let Some(seconds) = fs::read_to_string(entry.path()).ok().and_then(|t| t.trim().parse().ok())
            {
                timeouts.insert(name.to_owned(), seconds);
            }
        }
        Flows { all, timeouts }
    }

    /// The flow between a socket and its peer, as the proc sees both.
    pub(super) fn between(&self, proto: Protocol, local: SocketAddr, peer: SocketAddr) -> Option<&Flow> {
        self.all.iter().find(|f| f.proto == proto && f.inside(local.ip()) == Some((local, peer)))
    }

    /// At most how old the flow's newest packet is, milliseconds. `queued`: bytes wait in one of
    /// the socket's queues, which is why the kernel may have given the flow less time than its
    /// state has.
    pub(super) fn packet_ms(&self, flow: &Flow, queued: bool) -> Option<u64> {
        let timeout = |name: &str| self.timeouts.get(name).copied();
        let given = match (flow.proto, &flow.state) {
            (Protocol::Tcp, Some(state)) => {
                let full = timeout(&format!("tcp_timeout_{state}"))?;
                let stalled = timeout("tcp_timeout_unacknowledged").filter(|s| queued && *s < full);
                stalled.filter(|s| flow.left_s <= *s).unwrap_or(full)
            }
            (Protocol::Tcp, None) => return None,
            (Protocol::Udp, _) if flow.assured => timeout("udp_timeout_stream")?,
            (Protocol::Udp, _) => timeout("udp_timeout")?,
        };
        Some(given.checked_sub(flow.left_s)? * 1000)
    }
}

impl Flow {
    /// Both ends as the proc with that address sees them: its own first.
    pub(super) fn inside(&self, own: IpAddr) -> Option<(SocketAddr, SocketAddr)> {
        if self.answers.ip() == own {
            Some((self.answers, self.answers_to))
        } else if self.from.ip() == own {
            Some((self.from, self.to))
        } else {
            None
        }
    }

    /// The client as the host sees it, if the flow was begun from outside the proc.
    pub(super) fn client(&self, own: IpAddr) -> Option<SocketAddr> {
        (self.answers.ip() == own).then_some(self.from)
    }
}

/// One line: family, its number, protocol, its number, seconds left, for TCP a state, then both
/// directions.
fn parse(line: &str) -> Option<Flow> {
    let mut words = line.split_ascii_whitespace().skip(2);
    let proto = match words.next()? {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        _ => return None,
    };
    let left_s = words.nth(1)?.parse().ok()?;
    let (mut state, mut assured) = (None, false);
    let (mut ips, mut ports): (Vec<IpAddr>, Vec<u16>) = (Vec::new(), Vec::new());
    for word in words {
        match word.split_once('=') {
            Some(("src" | "dst", ip)) => ips.push(ip.parse().ok()?),
            Some(("sport" | "dport", port)) => ports.push(port.parse().ok()?),
            Some(_) => {}
            None if word == "[ASSURED]" => assured = true,
            None if ips.is_empty() => state = Some(word.to_ascii_lowercase()),
            None => {}
        }
    }
    let end = |n: usize| Some(SocketAddr::new(*ips.get(n)?, *ports.get(n)?));
    let (from, to, answers, answers_to) = (end(0)?, end(1)?, end(2)?, end(3)?);
    Some(Flow { proto, from, to, answers, answers_to, left_s, state, assured })
}

#[cfg(test)]
mod tests {
    use super::*;

    const IN: &str = "ipv4     2 tcp      6 431990 ESTABLISHED src=127.0.0.1 dst=127.0.0.1 sport=52098 dport=8080 \
        src=10.213.0.1 dst=10.213.0.255 sport=80 dport=52098 [ASSURED] mark=0 zone=0 use=2";
    const OUT: &str = "ipv6     10 udp      17 25 src=fd6b:6970:0000:0000:0000:0000:0000:0001 dst=2001:0db8::0001 \
        sport=4000 dport=53 [UNREPLIED] src=2001:0db8::0001 dst=2001:0db8::0002 sport=53 dport=4000 mark=0 use=2";

    fn flows() -> Flows {
        let timeouts = [("tcp_timeout_established", 432_000), ("tcp_timeout_unacknowledged", 300), ("udp_timeout", 30)];
        let timeouts = timeouts.map(|(name, s)| (name.to_owned(), s)).into();
        Flows { all: [IN, OUT].into_iter().filter_map(parse).collect(), timeouts }
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_socket_s_flow_is_found_with_its_client_and_age() {
        let flows = flows();
        let (local, peer) = (at("10.213.0.1:80"), at("10.213.0.255:52098"));
        let flow = flows.between(Protocol::Tcp, local, peer).unwrap();
        assert_eq!(flow.client(local.ip()), Some(at("127.0.0.1:52098")));
        assert_eq!(flows.packet_ms(flow, false), Some(10_000));
        let own = at("[fd6b:6970::1]:4000");
        let flow = flows.between(Protocol::Udp, own, at("[2001:db8::1]:53")).unwrap();
        assert_eq!((flow.client(own.ip()), flows.packet_ms(flow, false)), (None, Some(5_000)));
        assert_eq!(flows.between(Protocol::Tcp, local, at("10.213.0.255:52099")), None);
    }

    #[test]
    fn a_stalled_connection_s_flow_has_less_time() {
        let flows = flows();
        let stalled = Flow { left_s: 290, ..flows.all[0].clone() };
        assert_eq!(flows.packet_ms(&stalled, true), Some(10_000));
        assert_eq!(flows.packet_ms(&stalled, false), Some(431_710_000));
        let unknown = Flow { state: Some("new".into()), ..flows.all[0].clone() };
        assert_eq!(flows.packet_ms(&unknown, false), None);
    }

    #[test]
    fn what_is_no_flow_is_left_out() {
        for line in ["", "ipv4 2 icmp 1 29 src=1.2.3.4 dst=1.2.3.5 type=8 code=0 id=1 src=1.2.3.5", "ipv4 2 tcp 6 x"] {
            assert_eq!(parse(line), None);
        }
    }
}
