//! The way of clients to published ports: forwarding per interface, and rules of others that drop
//! what is forwarded.

use crate::check::{DoctorCheck, is_root, read};
use rustix::fs::StatVfsMountFlags;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

pub(super) fn checks() -> Vec<DoctorCheck> {
    let v4 = family("forwarding v4", "ipv4", "forwarding", &read("/proc/net/route").unwrap_or_default());
    let v6 = match read("/proc/sys/net/ipv6/conf/all/forwarding") {
        None => DoctorCheck::ok("forwarding v6", "no IPv6 here"),
        Some(all) if all != "0" => DoctorCheck::ok("forwarding v6", "on"),
        // From Linux 6.17 each interface has a switch of its own; before, only the global one
        // forwards.
        Some(_) if !Path::new("/proc/sys/net/ipv6/conf/all/force_forwarding").exists() => {
            DoctorCheck::ok("forwarding v6", "off; `kip up` switches it on for all interfaces")
        }
        Some(_) => {
            family("forwarding v6", "ipv6", "force_forwarding", &read("/proc/net/ipv6_route").unwrap_or_default())
        }
    };
    vec![v4, v6, settings(), foreign_rules()]
}

/// An interface that is up, as far as forwarding goes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    name: String,
    forwards: bool,
    /// A default route leads out of it, so that `kip up` makes it forward.
    is_uplink: bool,
}

fn family(name: &'static str, family: &str, setting: &str, routes: &str) -> DoctorCheck {
    let uplinks = default_routes(routes);
    let conf = format!("/proc/sys/net/{family}/conf");
    let entries = std::fs::read_dir(&conf).into_iter().flatten().flatten();
    let mut interfaces: Vec<Interface> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name != "lo" && !name.starts_with("kpI-") && is_up(name))
        .filter_map(|name| {
            let forwards = read(&format!("{conf}/{name}/{setting}"))? != "0";
            Some(Interface { is_uplink: uplinks.contains(&name), forwards, name })
        })
        .collect();
    interfaces.sort_by(|a, b| a.name.cmp(&b.name));
    judge(name, &format!("net.{family}.conf"), setting, &interfaces)
}

/// IFF_UP of an interface; false for `all` and `default`, which are none.
fn is_up(name: &str) -> bool {
    let flags = read(&format!("/sys/class/net/{name}/flags")).unwrap_or_default();
    u32::from_str_radix(flags.trim_start_matches("0x"), 16).is_ok_and(|flags| flags & 1 == 1)
}

/// The interfaces of default routes in /proc/net/route (interface, destination, .., mask in column
/// 8) or /proc/net/ipv6_route (destination, its length, .., interface in column 10).
fn default_routes(routes: &str) -> Vec<String> {
    let mut found: Vec<String> = routes
        .lines()
        .filter_map(|line| match line.split_whitespace().collect::<Vec<_>>().as_slice() {
            [name, "00000000", _, _, _, _, _, "00000000", ..] => Some((*name).to_owned()),
            [destination, "00", .., name] if destination.len() == 32 && *name != "lo" => Some((*name).to_owned()),
            _ => None,
        })
        .collect();
    found.sort();
    found.dedup();
    found
}

fn judge(name: &'static str, conf: &str, setting: &str, interfaces: &[Interface]) -> DoctorCheck {
    let those = |wanted: fn(&Interface) -> bool| -> Vec<&str> {
        interfaces.iter().filter(|i| wanted(i)).map(|i| i.name.as_str()).collect()
    };
    let (on, uplinks) = (those(|i| i.forwards), those(|i| !i.forwards && i.is_uplink));
    let off = those(|i| !i.forwards && !i.is_uplink);
    let mut found = Vec::new();
    if !on.is_empty() {
        found.push(format!("on: {}", on.join(" ")));
    }
    if !uplinks.is_empty() {
        found.push(format!("switched on by `kip up`: {}", uplinks.join(" ")));
    }
    if off.is_empty() {
        return DoctorCheck::ok(
            name,
            if found.is_empty() { "no interface is up".to_owned() } else { found.join("; ") },
        );
    }
    found.push(format!("off: {}", off.join(" ")));
    let cost = format!("clients that come in by {} reach no published port; this host's own do", off.join(", "));
    // sysctl(8) spells a dot in an interface's name as a slash.
    let mend = off.iter().map(|name| format!("sysctl -w {conf}.{}.{setting}=1", name.replace('.', "/")));
    DoctorCheck::warn(name, found.join("; "), cost, mend.collect::<Vec<_>>().join("; "))
}

/// `kip up` switches forwarding on; in many containers it may not.
fn settings() -> DoctorCheck {
    const NAME: &str = "net settings";
    if !is_root() {
        return DoctorCheck::warn(
            NAME,
            "not tried: needs root",
            "not known whether they may be changed",
            "run this as root",
        );
    }
    match rustix::fs::statvfs("/proc/sys/net/ipv4") {
        Ok(fs) if fs.f_flag.contains(StatVfsMountFlags::RDONLY) => {
            let mend = "outside containers; or a privileged one, with /proc/sys writable";
            DoctorCheck::fail(
                NAME,
                "/proc/sys is read-only",
                "forwarding cannot be switched on: no port can be reached",
                mend,
            )
        }
        _ => DoctorCheck::ok(NAME, "may be changed"),
    }
}

fn foreign_rules() -> DoctorCheck {
    const NAME: &str = "other firewalls";
    if !is_root() {
        return DoctorCheck::warn(
            NAME,
            "not tried: needs root",
            "not known whether rules of others drop traffic to procs",
            "run this as root",
        );
    }
    let output = Command::new("nft").args(["-j", "list", "chains"]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    match output.ok().and_then(|output| dropping_chains(&output.stdout)) {
        None => DoctorCheck::warn(
            NAME,
            "nft does not list them",
            "not known whether rules of others drop traffic to procs",
            "see nft",
        ),
        Some(chains) if chains.is_empty() => DoctorCheck::ok(NAME, "none that drops what is forwarded"),
        Some(chains) => {
            let cost = "clients from outside may reach no published port: each firewall has its own say";
            let mend = "accept 10.213.0.0/16 and fd6b:6970::/32 in those chains, both ways";
            DoctorCheck::warn(NAME, format!("dropping by default: {}", chains.join(", ")), cost, mend)
        }
    }
}

/// The chains that hook into forwarding and drop by default, from `nft -j list chains`, but for our
/// own tables.
fn dropping_chains(json: &[u8]) -> Option<Vec<String>> {
    let listing: Value = serde_json::from_slice(json).ok()?;
    let chains = listing["nftables"].as_array()?.iter().map(|entry| &entry["chain"]);
    let drops = chains.filter(|chain| chain["hook"] == "forward" && chain["policy"] == "drop");
    let foreign = drops.filter(|chain| !chain["table"].as_str().unwrap_or_default().starts_with("kip_"));
    let word = |chain: &Value, key: &str| chain[key].as_str().unwrap_or("?").to_owned();
    Some(foreign.map(|c| format!("{} {} {}", word(c, "family"), word(c, "table"), word(c, "name"))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::CheckStatus;

    fn interface(name: &str, forwards: bool, is_uplink: bool) -> Interface {
        Interface { name: name.to_owned(), forwards, is_uplink }
    }

    #[test]
    fn interfaces_that_will_not_forward_are_named_with_their_remedy() {
        let all =
            [interface("docker0", true, false), interface("eth0", false, true), interface("eth1.7", false, false)];
        let check = judge("v4", "net.ipv4.conf", "forwarding", &all);
        assert_eq!(check.status, CheckStatus::Warn);
        assert_eq!(check.found, "on: docker0; switched on by `kip up`: eth0; off: eth1.7");
        assert_eq!(check.mend.as_deref(), Some("sysctl -w net.ipv4.conf.eth1/7.forwarding=1"));
        assert_eq!(judge("v4", "net.ipv4.conf", "forwarding", &all[..2]).status, CheckStatus::Ok);
        assert_eq!(judge("v4", "net.ipv4.conf", "forwarding", &[]).found, "no interface is up");
    }

    #[test]
    fn default_routes_are_read_from_both_tables() {
        let v4 = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
                  eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n\
                  eth1 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n\
                  tun0 00000000 00000000 0001 0 0 0 00000080 0 0 0\n";
        assert_eq!(default_routes(v4), ["eth0"], "0.0.0.0/1 is no default route");
        let zero = "0".repeat(32);
        let v6 = format!(
            "{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 1 0 00000003 wlan0\n\
             fe800000000000000000000000000000 40 {zero} 00 {zero} 00000100 1 0 00000001 eth0\n\
             {zero} 00 {zero} 00 {zero} ffffffff 1 0 00200200 lo\n"
        );
        assert_eq!(default_routes(&v6), ["wlan0"]);
    }

    #[test]
    fn only_foreign_chains_that_drop_what_is_forwarded_count() {
        let json = br#"{"nftables": [{"metainfo": {"version": "1.0.6"}},
            {"chain": {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "drop"}},
            {"chain": {"family": "ip", "table": "filter", "name": "INPUT", "hook": "input", "policy": "drop"}},
            {"chain": {"family": "inet", "table": "kip_0", "name": "forward", "hook": "forward", "policy": "drop"}},
            {"chain": {"family": "inet", "table": "x", "name": "plain"}}]}"#;
        assert_eq!(dropping_chains(json), Some(vec!["ip filter FORWARD".to_owned()]));
        assert_eq!(dropping_chains(br#"{"nftables": []}"#), Some(vec![]));
        assert_eq!(dropping_chains(b""), None);
    }
}
