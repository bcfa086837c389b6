//! What a proc may call outside its own network. Owns the form of one rule and what it covers.

use super::Protocol;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Most rules of a proc.
pub const MOST_EGRESS: usize = 64;

/// A rule of `egress`: `all`, `none`, or `ADDRESS[/LENGTH][:PORT[-PORT]][/tcp|/udp]`, with a name
/// or `*.NAME` in place of the address.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = r"^(all|none|[A-Za-z0-9_*\[][A-Za-z0-9_.:\[\]/*-]{0,299}|::[A-Za-z0-9_.:/-]*)$"))]
pub enum Egress {
    /// Everything that no proc is refused.
    All,
    /// Nothing.
    None,
    /// These addresses.
    Addresses {
        /// First and last of them, of one family.
        range: (IpAddr, IpAddr),
        /// Which ports there.
        ports: Ports,
    },
    /// The addresses that the proc's resolver finds for these names.
    Names {
        /// A host name in small letters, without a dot at its end.
        name: String,
        /// All names below that one, and not the name itself: `*.NAME`.
        below: bool,
        /// Which ports there.
        ports: Ports,
    },
}

/// Ports of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports {
    /// First and last; none for all, and for protocols without ports.
    pub range: Option<(u16, u16)>,
    /// The only protocol; none for all.
    pub proto: Option<Protocol>,
}

/// An [`Egress`] could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no rule for egress: write all, none, an address, ADDRESS/LENGTH, a name or *.NAME, each with :PORT or :PORT-PORT and /tcp or /udp if only these are meant, for example pypi.org:443 or 192.0.2.0/24 or [2001:db8::7]:53/udp"
)]
pub struct BadEgress(String);

impl Egress {
    /// Whether a rule covers a name, in any case of letters and with or without a dot at its end;
    /// and then which ports.
    pub fn covers_name(&self, asked: &str) -> Option<Ports> {
        let Egress::Names { name, below, ports } = self else { return None };
        let asked = asked.trim_end_matches('.').to_ascii_lowercase();
        let fits = match asked.strip_suffix(name.as_str()) {
            Some(front) if *below => front.len() > 1 && front.ends_with('.'),
            Some(front) => front.is_empty(),
            None => false,
        };
        fits.then_some(*ports)
    }
}

/// What is wrong with the rules of one proc taken together; none if nothing is.
pub fn bad_egress(rules: &[Egress]) -> Option<String> {
    let alone = rules.iter().find(|rule| matches!(rule, Egress::All | Egress::None));
    match alone {
        Some(rule) if rules.len() > 1 => Some(format!("egress {rule} stands alone: leave out the other rules")),
        _ if rules.len() > MOST_EGRESS => {
            Some(format!("{} rules for egress are too many: at most {MOST_EGRESS}", rules.len()))
        }
        _ => None,
    }
}

fn bounds(addr: IpAddr, length: u8) -> Option<(IpAddr, IpAddr)> {
    match addr {
        IpAddr::V4(addr) => {
            let host = u32::MAX.checked_shr(length.into()).unwrap_or(0);
            let first = addr.to_bits() & !host;
            (length <= 32).then(|| (Ipv4Addr::from_bits(first).into(), Ipv4Addr::from_bits(first | host).into()))
        }
        IpAddr::V6(addr) => {
            let host = u128::MAX.checked_shr(length.into()).unwrap_or(0);
            let first = addr.to_bits() & !host;
            (length <= 128).then(|| (Ipv6Addr::from_bits(first).into(), Ipv6Addr::from_bits(first | host).into()))
        }
    }
}

/// How many leading bits the addresses of a range have in common: its LENGTH.
fn length_of(range: (IpAddr, IpAddr)) -> (u32, u32) {
    match range {
        (IpAddr::V4(first), IpAddr::V4(last)) => ((first.to_bits() ^ last.to_bits()).leading_zeros(), 32),
        (IpAddr::V6(first), IpAddr::V6(last)) => ((first.to_bits() ^ last.to_bits()).leading_zeros(), 128),
        _ => (0, 0),
    }
}

fn is_name(name: &str) -> bool {
    let label = |label: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        (1..=63).contains(&label.len()) && label.chars().all(known) && !label.starts_with('-')
    };
    // What is digits and dots alone is a mistyped address.
    let address = name.chars().all(|c| c.is_ascii_digit() || c == '.');
    name.len() <= 253 && !address && name.split('.').all(label)
}

impl FromStr for Egress {
    type Err = BadEgress;
    fn from_str(text: &str) -> Result<Self, BadEgress> {
        let bad = || BadEgress(text.to_owned());
        match text {
            "all" => return Ok(Egress::All),
            "none" => return Ok(Egress::None),
            _ => {}
        }
        let (rest, proto) = match text.rsplit_once('/') {
            Some((rest, "tcp")) => (rest, Some(Protocol::Tcp)),
            Some((rest, "udp")) => (rest, Some(Protocol::Udp)),
            _ => (text, None),
        };
        // IPv6 has colons of its own: with a port it stands in brackets.
        let (host, port) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, port)) => match port.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None => return Err(bad()),
            },
            None if rest.matches(':').count() == 1 => {
                rest.split_once(':').map_or((rest, None), |(host, port)| (host, Some(port)))
            }
            None => (rest, None),
        };
        let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0 && !text.starts_with('+'));
        let range = match port.map(|port| port.split_once('-').unwrap_or((port, port))) {
            Some((first, last)) => match (number(first), number(last)) {
                (Some(first), Some(last)) if first <= last => Some((first, last)),
                _ => return Err(bad()),
            },
            None => None,
        };
        let ports = Ports { range, proto };
        let (addr, length) = host.split_once('/').map_or((host, None), |(addr, length)| (addr, Some(length)));
        if let Ok(addr) = addr.parse::<IpAddr>() {
            let whole = if addr.is_ipv4() { 32 } else { 128 };
            let length = length.map_or(Some(whole), |text| text.parse().ok().filter(|_| !text.starts_with('+')));
            let range = length.and_then(|length| bounds(addr, length)).ok_or_else(bad)?;
            return Ok(Egress::Addresses { range, ports });
        }
        let (name, below) = host.strip_prefix("*.").map_or((host, false), |name| (name, true));
        let name = name.trim_end_matches('.');
        // Brackets are for addresses.
        if rest.starts_with('[') || !is_name(name) || ["all", "none"].contains(&name.to_ascii_lowercase().as_str()) {
            return Err(bad());
        }
        Ok(Egress::Names { name: name.to_ascii_lowercase(), below, ports })
    }
}

impl fmt::Display for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ports = match self {
            Egress::All => return f.write_str("all"),
            Egress::None => return f.write_str("none"),
            Egress::Names { name, below, ports } => {
                write!(f, "{}{name}", if *below { "*." } else { "" })?;
                ports
            }
            Egress::Addresses { range, ports } => {
                let (length, whole) = length_of(*range);
                let brackets = range.0.is_ipv6() && ports.range.is_some();
                let (open, close) = if brackets { ("[", "]") } else { ("", "") };
                let length = if length < whole { format!("/{length}") } else { String::new() };
                write!(f, "{open}{}{length}{close}", range.0)?;
                ports
            }
        };
        match ports.range {
            Some((first, last)) if first == last => write!(f, ":{first}")?,
            Some((first, last)) => write!(f, ":{first}-{last}")?,
            None => {}
        }
        ports.proto.map_or(Ok(()), |proto| write!(f, "/{proto}"))
    }
}

impl TryFrom<String> for Egress {
    type Error = BadEgress;
    fn try_from(text: String) -> Result<Self, BadEgress> {
        text.parse()
    }
}

impl From<Egress> for String {
    fn from(rule: Egress) -> String {
        rule.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_written_as_they_are_read() {
        for text in [
            "all",
            "none",
            "192.0.2.7",
            "192.0.2.0/24",
            "0.0.0.0/0:443",
            "192.0.2.0/24:80-90/tcp",
            "192.0.2.7/udp",
            "2001:db8::7",
            "2001:db8::/32",
            "::/0",
            "[2001:db8::7]:53/udp",
            "[2001:db8::/32]:443",
            "pypi.org:443",
            "*.npmjs.org:443/tcp",
            "db",
        ] {
            assert_eq!(text.parse::<Egress>().unwrap().to_string(), text);
        }
        for (text, same) in [
            ("192.0.2.9/24", "192.0.2.0/24"),
            ("PyPI.org.", "pypi.org"),
            ("192.0.2.7/32", "192.0.2.7"),
            ("[::1]", "::1"),
            ("db:5-5", "db:5"),
        ] {
            assert_eq!(text.parse::<Egress>().unwrap().to_string(), same);
        }
        for bad in [
            "",
            "None",
            "a b",
            "-a",
            "192.0.2",
            "192.0.2.0/33",
            "::/129",
            "db:0",
            "db:9-8",
            "db:x",
            "db/sctp",
            "db:80/",
            "[db]:80",
            "*.",
            "*",
            "a.*.b",
            "192.0.2.7:",
            "[::1]80",
            "[::1",
            "192.0.2.0/+8",
            "db:+8",
            "2001:db8::7:70000:1:2:3:4",
            "x..y",
            "all:80",
            "none/tcp",
        ] {
            assert!(bad.parse::<Egress>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_are_covered_whole_or_below() {
        let covers = |rule: &str, name: &str| rule.parse::<Egress>().unwrap().covers_name(name).is_some();
        assert!(covers("pypi.org", "PYPI.org."));
        assert!(!covers("pypi.org", "files.pypi.org") && !covers("pypi.org", "mypypi.org"));
        assert!(
            covers("*.pypi.org", "a.b.pypi.org")
                && !covers("*.pypi.org", "pypi.org")
                && !covers("*.pypi.org", ".pypi.org")
        );
        assert!(!covers("*.pypi.org", "xpypi.org") && !covers("all", "pypi.org") && !covers("192.0.2.7", "192.0.2.7"));
    }

    #[test]
    fn all_and_none_stand_alone() {
        let rules = |words: &[&str]| words.iter().map(|word| word.parse().unwrap()).collect::<Vec<Egress>>();
        assert!(bad_egress(&rules(&["none", "db"])).unwrap().contains("none stands alone"));
        assert!(bad_egress(&rules(&["none", "none"])).is_some());
        assert_eq!(bad_egress(&rules(&["none"])), None);
        assert_eq!(bad_egress(&rules(&["db", "192.0.2.7"])), None);
        assert!(
            bad_egress(&vec![
                Egress::Names {
                    name: "x".into(),
                    below: false,
                    ports: Ports { range: None, proto: None }
                };
                65
            ])
            .is_some()
        );
    }

    #[test]
    fn bounds_of_a_network() {
        let range = |text: &str| match text.parse().unwrap() {
            Egress::Addresses { range: (first, last), .. } => format!("{first} {last}"),
            other => panic!("{other}"),
        };
        assert_eq!(range("10.1.2.3/8"), "10.0.0.0 10.255.255.255");
        assert_eq!(range("0.0.0.0/0"), "0.0.0.0 255.255.255.255");
        assert_eq!(range("10.1.2.3"), "10.1.2.3 10.1.2.3");
        assert_eq!(range("2001:db8::1/64"), "2001:db8:: 2001:db8::ffff:ffff:ffff:ffff");
    }
}
