//! Whether any peer talks to a running proc, judged by the counters of its network namespace.
//!
//! Only payload counts. A health check that connects and closes moves segments but no data, and
//! must not keep a proc awake. The kernel has no counter of payload, so it is judged in two ways,
//! and either suffices. (1) It counts segments sent with new data (`TCPOrigDataSent`), a FIN among
//! them; more of those than connections that ended are data. (2) Bytes of IP, less what as many
//! packets without data would have taken (RFC 793, RFC 7323: 20 bytes of TCP header and 12 of time
//! stamps; 8 more in a SYN). Peers without time stamps make the second estimate low: from such a
//! one a request below about 50 bytes that gets no answer at all goes unnoticed.

use kip_sys::kernel_file;
use std::io;
use std::path::PathBuf;

/// Sizes of packets without data, bytes.
const BARE_TCP4: i128 = 20 + 20 + 12;
const BARE_TCP6: i128 = 40 + 20 + 12;
const SYN_EXTRA: i128 = 8;
/// An echo request as ping(8) sends it.
const PING4: i128 = 84;
const PING6: i128 = 104;
/// The longest complaint about a packet: RFC 1812, 4.3.2.3, and RFC 4443, 2.4.
const COMPLAINT4: i128 = 576;
const COMPLAINT6: i128 = 1280;

/// The counters at one moment. They belong to the namespace and only grow while it lives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrafficCounters {
    data_segments_sent: u64,
    datagrams: u64,
    v4_in: Traffic,
    v6_in: Traffic,
    v4_out: Traffic,
    v6_out: Traffic,
    /// Connections opened, both ways.
    opened: u64,
    /// Those that others opened.
    accepted: u64,
    /// Datagrams that came.
    received: u64,
    /// Connections open now.
    open: u64,
    /// SYNs that were refused, and other resets.
    resets: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Traffic {
    bytes: u64,
    packets: u64,
    icmp: u64,
    udp: u64,
}

/// The counters could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ActivityError {
    /// The process is gone, or its /proc is not ours to read.
    #[error("cannot read {path}", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A counter that every kernel has is missing.
    #[error("{path} has no counter {name}", path = path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// Which one.
        name: &'static str,
    },
}

impl TrafficCounters {
    /// TCP connections that others have opened, those of the namespace to itself included.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// TCP connections that were opened from within the namespace, those to itself included.
    pub fn opened_from_within(&self) -> u64 {
        self.opened.saturating_sub(self.accepted)
    }

    /// UDP datagrams that were delivered.
    pub fn datagrams_received(&self) -> u64 {
        self.received
    }

    /// Whether a packet of any kind has come since then.
    pub fn has_received_since(&self, before: &TrafficCounters) -> bool {
        (self.v4_in.packets, self.v6_in.packets) != (before.v4_in.packets, before.v6_in.packets)
    }

    /// Reads the counters of the network namespace of a process, given by its pid as we see it.
    pub fn read(pid: u32) -> Result<TrafficCounters, ActivityError> {
        let snmp = Table::read(pid, "snmp")?;
        let netstat = Table::read(pid, "netstat")?;
        let snmp6 = Table::read(pid, "snmp6")?;
        let s4 = |names: &[&'static str]| names.iter().map(|n| snmp.get(n)).sum::<Result<u64, _>>();
        let s6 = |names: &[&str]| names.iter().map(|n| snmp6.get_or_zero(n)).sum::<u64>();
        Ok(TrafficCounters {
            data_segments_sent: netstat.get("TcpExt.TCPOrigDataSent")?,
            datagrams: s4(&["Udp.InDatagrams", "Udp.OutDatagrams"])? + s6(&["Udp6InDatagrams", "Udp6OutDatagrams"]),
            v4_in: Traffic {
                bytes: netstat.get("IpExt.InOctets")?,
                packets: s4(&["Ip.InReceives"])?,
                icmp: s4(&["Icmp.InMsgs"])?,
                udp: s4(&["Udp.InDatagrams", "Udp.NoPorts", "Udp.InErrors"])?,
            },
            v6_in: Traffic {
                bytes: s6(&["Ip6InOctets"]),
                packets: s6(&["Ip6InReceives"]),
                icmp: s6(&["Icmp6InMsgs"]),
                udp: s6(&["Udp6InDatagrams", "Udp6NoPorts", "Udp6InErrors"]),
            },
            v4_out: Traffic {
                bytes: netstat.get("IpExt.OutOctets")?,
                packets: s4(&["Ip.OutRequests"])?,
                icmp: s4(&["Icmp.OutMsgs"])?,
                udp: s4(&["Udp.OutDatagrams"])?,
            },
            v6_out: Traffic {
                bytes: s6(&["Ip6OutOctets"]),
                packets: s6(&["Ip6OutRequests"]),
                icmp: s6(&["Icmp6OutMsgs"]),
                udp: s6(&["Udp6OutDatagrams"]),
            },
            opened: s4(&["Tcp.PassiveOpens", "Tcp.ActiveOpens"])?,
            accepted: s4(&["Tcp.PassiveOpens"])?,
            received: s4(&["Udp.InDatagrams"])? + s6(&["Udp6InDatagrams"]),
            open: s4(&["Tcp.CurrEstab"])?,
            resets: s4(&["Tcp.OutRsts"])?,
        })
    }
}

/// Whether payload moved between two moments, the earlier one first. Counters that went back are
/// those of another namespace, which counts as activity.
pub fn activity_between(a: &TrafficCounters, b: &TrafficCounters) -> bool {
    let grown = |b: u64, a: u64| i128::from(b) - i128::from(a);
    let opened = grown(b.opened, a.opened);
    let ended = opened - grown(b.open, a.open);
    if b.datagrams != a.datagrams || grown(b.data_segments_sent, a.data_segments_sent) > ended.max(0) {
        return true;
    }
    let allowed = SYN_EXTRA * (opened + grown(b.resets, a.resets));
    let ways = [
        (&a.v4_in, &b.v4_in, BARE_TCP4, PING4),
        (&a.v6_in, &b.v6_in, BARE_TCP6, PING6),
        (&a.v4_out, &b.v4_out, BARE_TCP4, COMPLAINT4),
        (&a.v6_out, &b.v6_out, BARE_TCP6, COMPLAINT6),
    ];
    ways.into_iter().any(|(a, b, bare_tcp, bare_icmp)| {
        let icmp = grown(b.icmp, a.icmp);
        let tcp = grown(b.packets, a.packets) - icmp - grown(b.udp, a.udp);
        let bytes = grown(b.bytes, a.bytes);
        bytes < 0 || bytes - bare_tcp * tcp.max(0) - bare_icmp * icmp > allowed
    })
}

/// A file of counters as it was read: with hundreds of them, of which few are wanted, it is
/// searched and not taken apart.
struct Table {
    path: PathBuf,
    text: String,
}

impl Table {
    fn read(pid: u32, file: &str) -> Result<Table, ActivityError> {
        let path = PathBuf::from(format!("/proc/{pid}/net/{file}"));
        match kernel_file::read_to_string(&path) {
            Ok(text) => Ok(Table { path, text }),
            Err(e) if file == "snmp6" && e.kind() == io::ErrorKind::NotFound => Ok(Table { path, text: String::new() }),
            Err(source) => Err(ActivityError::Unreadable { path, source }),
        }
    }

    /// A counter of a file of pairs of lines, names and then values, both after the same prefix:
    /// `prefix.name`.
    fn get(&self, name: &'static str) -> Result<u64, ActivityError> {
        let found = || {
            let (prefix, name) = name.split_once('.')?;
            let mut lines = self.text.lines().filter_map(|line| line.strip_prefix(prefix)?.strip_prefix(':'));
            let (names, numbers) = (lines.next()?, lines.next()?);
            let at = names.split_ascii_whitespace().position(|n| n == name)?;
            numbers.split_ascii_whitespace().nth(at)?.parse().ok()
        };
        found().ok_or_else(|| ActivityError::Missing { path: self.path.clone(), name })
    }

    /// A counter of a file of lines of a name and a value; 0 if it is not there.
    fn get_or_zero(&self, name: &str) -> u64 {
        let value = self.text.lines().find_map(|line| {
            let (found, number) = line.split_once(char::is_whitespace)?;
            (found == name).then(|| number.trim().parse().ok())?
        });
        value.unwrap_or(0)
    }
}
