//! What a proc's owner asked for. Once the proc exists, only what
//! [`UpdateRequest`](crate::api::UpdateRequest) has can be changed.

mod access;
mod capability;
mod class;
mod egress;
pub(crate) mod request;
mod sandbox;
mod signal;
mod timing;
mod tmpfs;
mod ulimit;
mod units;
mod words;

pub use access::TreeAccess;
pub use capability::{BadCapability, Capability, CapabilityBits, capabilities};
pub use class::ProcClass;
pub use egress::{BadEgress, Egress, MOST_EGRESS, Ports, bad_egress};
pub use sandbox::{FilterKind, NetworkKind, RootKind, Sandbox};
pub use signal::{BadSignal, parse_signal};
pub use timing::{Clock, Fallback, Hibernate, Lazy, Timing};
pub use tmpfs::{BadTmpfs, MOST_TMPFS, SHM, SHM_BYTES, Tmpfs};
pub use ulimit::{BadUlimit, Ulimit, parse_limit};
pub use units::{BadDuration, BadSize, parse_duration_ms, parse_size, show_bytes};
pub use words::{BadHostEntry, HostEntry, MOST_HOSTS, MOST_LABELS, bad_hostname, bad_label, parse_label};

use crate::image::OciImage;
use crate::life::{Hooks, PeriodicCheckpoints, Probe, Ready, Restart, Templating};
use crate::name::{CheckpointTag, ProcName, Realm};
use crate::scale::Scaling;
use crate::volume::{VolumeName, VolumeSpec};
use request::RunRequest;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;

/// Where a program without a slash in its name is looked for when the environment has no PATH.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Transport protocol of a published port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP, tcp(7).
    Tcp,
    /// UDP, udp(7).
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        })
    }
}

/// What on a listening port wakes a parked proc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WakeOn {
    /// A completed handshake wakes: the server may have to speak first.
    #[default]
    Connect,
    /// Only a connection that brought data wakes; for servers whose clients speak first.
    Data,
}

/// One declared port, `[ADDRESS:][HOST:]PORT[/tcp|/udp][,wake=data][,private]`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PortSpec {
    /// Transport protocol.
    pub proto: Protocol,
    /// Port inside the proc.
    pub port: u16,
    /// Port on the host; none asks Kip to choose one.
    pub host_port: Option<u16>,
    /// The one address of the host at which it is published; none for all of them.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "one_address")]
    pub host_addr: Option<IpAddr>,
    /// What on this port wakes the proc.
    #[serde(default)]
    pub wake_on: WakeOn,
    /// There is no port on the host: only procs of its realm reach it, by its address.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub private: bool,
}

/// A declared port by what it is inside the proc, `PORT[/tcp|/udp]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InnerPort {
    /// Transport protocol.
    pub proto: Protocol,
    /// Port inside the proc.
    pub port: u16,
}

impl FromStr for InnerPort {
    type Err = String;

    fn from_str(text: &str) -> Result<InnerPort, String> {
        let (port, proto) = match text.split_once('/') {
            None | Some((_, "tcp")) => (text.trim_end_matches("/tcp"), Protocol::Tcp),
            Some((port, "udp")) => (port, Protocol::Udp),
            Some((_, other)) => return Err(format!("{other:?} is neither tcp nor udp")),
        };
        let port = port.parse().ok().filter(|port| *port > 0);
        port.map(|port| InnerPort { proto, port }).ok_or_else(|| format!("{text:?} is no port: give PORT or PORT/udp"))
    }
}

impl PortSpec {
    /// What it is inside the proc.
    pub fn inner(&self) -> InnerPort {
        InnerPort { proto: self.proto, port: self.port }
    }
}

impl fmt::Display for PortSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host_addr {
            Some(IpAddr::V6(addr)) => write!(f, "[{addr}]:")?,
            Some(IpAddr::V4(addr)) => write!(f, "{addr}:")?,
            None => {}
        }
        match self.host_port {
            Some(host) => write!(f, "{host}:")?,
            None if self.host_addr.is_some() => f.write_str(":")?,
            None => {}
        }
        write!(f, "{}", self.port)?;
        f.write_str(if self.proto == Protocol::Udp { "/udp" } else { "" })?;
        f.write_str(if self.wake_on == WakeOn::Data { ",wake=data" } else { "" })?;
        f.write_str(if self.private { ",private" } else { "" })
    }
}

/// A `--port` argument could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "port {0:?} is not valid: write [ADDRESS:][HOST:]PORT[/tcp|/udp][,wake=connect|data] or PORT,private, ports from 1 to 65535, for example 8080:80, 127.0.0.1:8080:80 or 53/udp"
)]
pub struct BadPort(String);

impl FromStr for PortSpec {
    type Err = BadPort;
    fn from_str(s: &str) -> Result<Self, BadPort> {
        let bad = || BadPort(s.to_owned());
        let number = |t: &str| t.parse::<u16>().ok().filter(|p| *p != 0).ok_or_else(bad);
        let (mut wake_on, mut private) = (WakeOn::Connect, false);
        let mut parts = s.split(',');
        let main = parts.next().ok_or_else(bad)?;
        for option in parts {
            match option {
                "wake=connect" => wake_on = WakeOn::Connect,
                "wake=data" => wake_on = WakeOn::Data,
                "private" => private = true,
                _ => return Err(bad()),
            }
        }
        let (ports, proto) = match main.split_once('/') {
            None | Some((_, "tcp")) => (main.split('/').next().unwrap_or(main), Protocol::Tcp),
            Some((ports, "udp")) => (ports, Protocol::Udp),
            Some(_) => return Err(bad()),
        };
        let (outside, port) = ports.rsplit_once(':').map_or((None, ports), |(outside, port)| (Some(outside), port));
        // The address may stand alone, with nothing for a port of Kip's choice, or with a port;
        // only in brackets does one of IPv6 stand alone.
        let (address, host) = match outside {
            None => (None, None),
            Some(alone) if alone.ends_with(']') || alone.parse::<Ipv4Addr>().is_ok() => (Some(alone), None),
            Some(both) => {
                let (address, host) = both.rsplit_once(':').map_or((None, both), |(a, h)| (Some(a), h));
                (address, Some(host).filter(|host| !(host.is_empty() && address.is_some())))
            }
        };
        let host_addr = address.map(|text| parse_host_addr(text).ok_or_else(bad)).transpose()?.flatten();
        let host_port = host.map(number).transpose()?;
        if private && (host_port.is_some() || address.is_some()) {
            return Err(bad());
        }
        Ok(PortSpec { proto, port: number(port)?, host_port, host_addr, wake_on, private })
    }
}

/// An address of the host at which a port may be published, IPv6 also in brackets; none within for
/// all of them, `0.0.0.0` and `::`.
pub fn parse_host_addr(text: &str) -> Option<Option<IpAddr>> {
    let plain = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let addr = if plain.len() == text.len() { plain.parse().ok()? } else { IpAddr::V6(plain.parse().ok()?) };
    let addr = Some(addr.to_canonical()).filter(|addr| !addr.is_unspecified());
    addr.is_none_or(can_be_published_at).then_some(addr)
}

/// Whether a port may be published at that address: a link-local one needs its link beside it.
pub fn can_be_published_at(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(v4) => !v4.is_multicast() && !v4.is_broadcast(),
        IpAddr::V6(v6) => !v6.is_multicast() && !v6.is_unicast_link_local(),
    }
}

/// Whether ports of these numbers at these addresses (none: all) are in each other's way.
pub fn addresses_meet(one: Option<IpAddr>, other: Option<IpAddr>) -> bool {
    one.is_none() || other.is_none() || one == other
}

/// As views have it, `0.0.0.0` is all of them.
fn one_address<'de, D: Deserializer<'de>>(from: D) -> Result<Option<IpAddr>, D::Error> {
    let addr = Option::<IpAddr>::deserialize(from)?.map(|addr| addr.to_canonical());
    Ok(addr.filter(|addr| !addr.is_unspecified()))
}

/// The filesystem a proc starts from.
#[derive(Debug, Clone, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Image {
    /// An allowlist of the host's own files, read-only, under a private writable layer.
    #[default]
    Host,
    /// A tarball (plain, gzip or zstd) that lies over the host base. The path is absolute and on
    /// the daemon's machine.
    Tar(PathBuf),
    /// An image's layers and nothing of the host.
    Oci(OciImage),
}

/// Bytes of each file of a log, unless its owner says otherwise.
pub const LOG_BYTES: u64 = 10 << 20;
/// Files of a log, likewise.
pub const LOG_FILES: u32 = 3;
/// Smallest file of a log, bytes: it holds what one read brings.
pub const LEAST_LOG_BYTES: u64 = 64 << 10;
/// Most files of a log.
pub const MOST_LOG_FILES: u32 = 16;

/// What it may use at most: by cgroups, and by a file system of its own. None means unlimited,
/// except `pids` and its log.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// CPUs, 1.0 is one core.
    pub cpus: Option<f64>,
    /// How it shares the CPUs with other procs.
    #[serde(skip_serializing_if = "ProcClass::is_usual")]
    pub class: ProcClass,
    /// Processes and threads.
    pub pids: u32,
    /// Disk space of its own files, bytes: what it changes of its root file system. Not volumes,
    /// logs and what it sleeps in.
    pub disk_bytes: Option<u64>,
    /// What it writes to its output is kept in files of so many bytes.
    pub log_bytes: u64,
    /// In so many files, 1 to 16; the oldest goes.
    pub log_files: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memory_bytes: None,
            cpus: None,
            class: ProcClass::Lc,
            pids: 4096,
            disk_bytes: None,
            log_bytes: LOG_BYTES,
            log_files: LOG_FILES,
        }
    }
}

/// Everything a proc's owner asked for.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Spec {
    /// The proc's name.
    pub name: ProcName,
    /// Its tenant.
    #[serde(default)]
    pub realm: Realm,
    /// Program and arguments; never empty. Only in a request, the image's own may be meant by none.
    pub command: Vec<String>,
    /// Environment on top of PATH, HOME, HOSTNAME. In answers the values are empty unless they are
    /// asked for.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Working directory inside the proc.
    #[serde(default)]
    pub workdir: Option<PathBuf>,
    /// Filesystem.
    #[serde(default)]
    pub image: Image,
    /// Published ports.
    #[serde(default)]
    pub ports: Vec<PortSpec>,
    /// Procs with the same word here find each other by name and reach each other's declared ports;
    /// others reach only what is published on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Further names that those of its network find it by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Its host name; none is the proc's own name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Further names in its /etc/hosts, each with its address: `NAME:ADDRESS`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_hosts: Vec<HostEntry>,
    /// What the proc may call outside its network; empty is `["all"]`. `all` or `none`, or any of
    /// `ADDRESS[/LENGTH][:PORT[-PORT]][/tcp|/udp]`, with a name or `*.NAME` in place of the
    /// address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<Egress>,
    /// Words that its owner gives it, by which it is found. Kip does nothing by them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Files of this machine, which pin it here.
    #[serde(default)]
    pub volumes: Vec<VolumeSpec>,
    /// Cgroup limits.
    #[serde(default)]
    pub limits: Limits,
    /// What each of its processes may use at most, getrlimit(2): `NAME=SOFT[:HARD]`; of the others
    /// it has those of the machine's services.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ulimits: Vec<Ulimit>,
    /// Its root file system cannot be written to, only its volumes, /dev/shm and what is mounted
    /// for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// File systems in memory, `PATH[:size=SIZE,mode=OCTAL,..]`; they sleep with the proc, and a
    /// start makes them anew.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tmpfs: Vec<Tmpfs>,
    /// Size of the one at /dev/shm, bytes; null is 64 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shm_bytes: Option<u64>,
    /// Capabilities that its root has in addition, within its own user namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cap_add: Vec<Capability>,
    /// Capabilities that its root has not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cap_drop: Vec<Capability>,
    /// When the proc goes to a lower tier.
    #[serde(default)]
    pub timing: Timing,
    /// Lets setuid and setgid programs inside gain their owner's identity (within the proc's own
    /// user namespace).
    #[serde(default)]
    pub allow_setuid: bool,
    /// How much of the kernel and of the machine its programs have: `light` is a program without
    /// network, files of its own and capabilities, in which about 70 system calls can be made.
    #[serde(default, skip_serializing_if = "Sandbox::is_full")]
    pub sandbox: Sandbox,
    /// What its programs may do to the realm's name tree, over the runtime socket.
    #[serde(default, skip_serializing_if = "TreeAccess::is_none")]
    pub tree: TreeAccess,
    /// How many procs its programs may have spawned that have not ended, over the runtime socket;
    /// those of its children count as its own. 0 for none.
    #[serde(default, skip_serializing_if = "spawns_none")]
    pub spawn: u32,
    /// The user that the program runs as, `USER[:GROUP]`, names (of the proc's own /etc/passwd and
    /// /etc/group) or numbers; none is root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What `kip stop` sends first, name or number; none is SIGTERM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// From that signal to SIGKILL, milliseconds; null is 10 s. A stop request may have another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_grace_ms: Option<u64>,
    /// Whether it is started again when its program ends.
    #[serde(default, skip_serializing_if = "Restart::is_no")]
    pub restart: Restart,
    /// Names of the secrets of the proc, files below /run/secrets. Their contents are in the
    /// request that makes the proc, and cannot be read back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// When it is ready after a start; none is as soon as its program was exec'd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
    /// What is run inside when it falls asleep and when it has woken.
    #[serde(default, skip_serializing_if = "Hooks::is_none")]
    pub hooks: Hooks,
    /// It begins from a template, or leaves one; null for a proc that always starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<Templating>,
    /// Checkpoints that are taken of it by themselves; null for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<PeriodicCheckpoints>,
    /// How many procs serve behind its name; null for itself alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Scaling>,
    /// Ports of the host on which Kip answers how it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<Probe>,
    /// Its program's standard input and output are a terminal of its own, at which a client sits by
    /// `kip attach`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub terminal: bool,
    /// Its program's standard input is open, for what a client that is attached sends; a terminal
    /// always is. Without either it is empty.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stdin_open: bool,
    /// It is removed with all it has when its program has ended and no client is attached.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub remove: bool,
    /// The file that describes it, as `kip apply` calls it; none for a proc that no file made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// A trial of `kip check`, removed when that ends. Set by Kip alone, ignored in requests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trial: bool,
    /// It reaches only itself by network, and only the host reaches it: a trial. Set by Kip alone,
    /// ignored in requests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone: bool,
    /// How many procs have had its name before it, each replaced by the next one; of two procs with
    /// one name the higher has it. Set by Kip alone, ignored in requests.
    #[serde(default, skip_serializing_if = "is_none_yet")]
    pub replaced: u64,
    /// Whose checkpoints are its own, and which of them it goes on from; null for a proc that was
    /// never rolled back or replaced: its own. Set by Kip alone, ignored in requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Lineage>,
    /// Key of the proc behind whose name it serves, a replica; null for any other proc. Set by Kip
    /// alone, ignored in requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_of: Option<ProcName>,
    /// Named volumes that were made for it alone, a replica; they go with it. Set by Kip alone,
    /// ignored in requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own_volumes: Vec<VolumeName>,
    /// Digest of the tarball that it was made from. Found by the worker, ignored in requests; null
    /// for procs of older daemons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tar_digest: Option<String>,
    /// The request that made it, before daemon and image completed it. Kept by the daemon, ignored
    /// in requests, left out of listings; null for procs of older daemons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<Box<RunRequest>>,
}

/// Where the checkpoints of a proc are that is not the first of its name.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Lineage {
    /// Key of the first proc.
    pub key: ProcName,
    /// The checkpoint that this proc goes on from; null for one that began anew.
    pub checkpoint: Option<CheckpointTag>,
    /// Since when, milliseconds since the epoch.
    pub since_ms: u64,
}

fn spawns_none(number: &u32) -> bool {
    *number == 0
}

fn is_none_yet(number: &u64) -> bool {
    *number == 0
}

/// Where a proc has its secrets.
pub const SECRETS: &str = "/run/secrets";
/// Most secrets of a proc.
pub const MOST_SECRETS: usize = 64;
/// Most that one holds, bytes.
pub const LONGEST_SECRET: usize = 64 << 10;

/// What is wrong with the name of a secret, which is a file's; none if nothing is.
pub fn bad_secret(name: &str) -> Option<String> {
    let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let fine = !name.is_empty() && name.len() <= 128 && !name.starts_with('.') && name.bytes().all(good);
    (!fine).then(|| {
        format!("the name {name:?} of a secret is not valid: use 1 to 128 of A-Z, a-z, 0-9, '-', '_' and '.', not beginning with '.'")
    })
}

/// Port of DNS.
const DNS_PORT: u16 = 53;

/// The time that a program has to end in order by default, milliseconds.
pub const STOP_GRACE_MS: u64 = 10_000;

impl Spec {
    /// Leaves the names of its environment and none of the values: these may be secrets.
    pub fn hide_values(&mut self) {
        self.env.values_mut().for_each(String::clear);
        if let Some(asked) = &mut self.asked {
            asked.spec.env.values_mut().for_each(String::clear);
        }
    }

    /// Whether the proc may call only what its rules name.
    pub fn limits_egress(&self) -> bool {
        !self.egress.is_empty() && self.egress != [Egress::All]
    }

    /// The name of its machine as its program sees it.
    pub fn hostname(&self) -> &str {
        self.hostname.as_deref().unwrap_or(self.name.as_str())
    }

    /// Whether it has a port at which names are asked for: then Kip answers none there.
    pub fn has_dns_port(&self) -> bool {
        self.ports.iter().any(|port| port.port == DNS_PORT)
    }

    /// Capabilities of its root, a bit for each.
    pub fn capabilities(&self) -> CapabilityBits {
        match self.sandbox {
            Sandbox::Full => capabilities(&self.cap_add, &self.cap_drop),
            Sandbox::Light => 0,
        }
    }

    /// What its program has to end in order, milliseconds; `asked` is what the stop itself says.
    pub fn grace_ms(&self, asked: Option<u64>) -> u64 {
        asked.or(self.stop_grace_ms).unwrap_or(STOP_GRACE_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_ports() {
        let p: PortSpec = "8080:80".parse().unwrap();
        assert_eq!((p.proto, p.host_port, p.port), (Protocol::Tcp, Some(8080), 80));
        let p: PortSpec = "53/udp".parse().unwrap();
        assert_eq!((p.proto, p.host_port, p.port), (Protocol::Udp, None, 53));
        for (text, host_addr, host_port) in [
            ("127.0.0.1:8080:80", "127.0.0.1", Some(8080)),
            ("127.0.0.1::80", "127.0.0.1", None),
            ("[::1]:8080:80/udp,wake=data", "::1", Some(8080)),
            ("[fd00::5]::80", "fd00::5", None),
        ] {
            let p: PortSpec = text.parse().unwrap();
            assert_eq!((p.host_addr, p.host_port, p.port), (Some(host_addr.parse().unwrap()), host_port, 80), "{text}");
            assert_eq!(p.to_string(), text);
        }
        for (text, same) in [
            ("0.0.0.0:8080:80", "8080:80"),
            ("[::]:8080:80", "8080:80"),
            ("127.0.0.1:80", "127.0.0.1::80"),
            ("[::1]:80", "[::1]::80"),
            ("::1:8080:80", "[::1]:8080:80"),
        ] {
            assert_eq!(text.parse::<PortSpec>(), same.parse(), "{text}");
        }
        for bad in ["localhost:8080:80", "127.0.0.1:80,private", ":80", "127.0.0.1:0:80", "[fe80::1]:80:80", "1.2.3:80"]
        {
            assert!(bad.parse::<PortSpec>().is_err(), "{bad}");
        }
        let p: PortSpec = "80/tcp,wake=data".parse().unwrap();
        assert_eq!((p.proto, p.wake_on), (Protocol::Tcp, WakeOn::Data));
        for bad in ["", "0", "80/sctp", "a:80", "70000", "80,wake=x", ":80"] {
            assert!(bad.parse::<PortSpec>().is_err(), "{bad}");
        }
    }
}
