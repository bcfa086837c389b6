//! Procs of one network know each other by name: a part of /etc/hosts between two marks, which is
//! Kip's. /etc/resolv.conf is made with such a part, which names the proc's own resolver
//! ([`resolver`]).
//!
//! The file is written where it lies, below the overlay that may be mounted over it: it has been
//! copied up when the proc was made, so that what reads it reads this very inode. What the program
//! has changed outside the marks stays. A proc's file is written before each start and each wake
//! from disk, and when another of its network comes or goes; a crash in between is mended by the
//! next of these.

use super::{Host, Proc, resolver};
use kip_net::addr::Addresses;
use kip_sandbox::quota::OwnFilesPlace;
use kip_sys::within;
use kip_types::chain;
use std::fs;
use std::sync::Arc;

const BEGIN: &str = "# kip: procs of this network\n";
const END: &str = "# kip: end\n";

/// In its own files.
const FILE: &str = "upper/root/etc/hosts";

/// What is said of a proc: a line for each of its addresses.
fn lines(proc: &Proc) -> String {
    let Addresses { v4, v6, .. } = Addresses::of(proc.shared.instance, proc.slot);
    let spec = proc.spec();
    let mut names = vec![proc.name.as_str()];
    names.extend(spec.aliases.iter().map(String::as_str).filter(|alias| *alias != proc.name.as_str()));
    let names = names.join(" ");
    format!("{v4}\t{names}\n{v6}\t{names}\n")
}

/// `text` with another part between the marks; at its end if it has none.
fn with_part(text: &str, part: &str) -> String {
    let (before, after) = match text.split_once(BEGIN) {
        Some((before, rest)) => (before, rest.split_once(END).map_or("", |(_, after)| after)),
        None => (text, ""),
    };
    let newline = if before.is_empty() || before.ends_with('\n') { "" } else { "\n" };
    format!("{before}{newline}{BEGIN}{part}{END}{after}")
}

/// Writes for a proc the names of those of its network, itself among them. It has its files, at
/// `place`.
pub fn write_at(proc: &Proc, place: &OwnFilesPlace) {
    let Some(network) = &proc.spec().network else { return };
    let procs = proc.shared.live_procs();
    let mut all: Vec<&Arc<Proc>> = procs.iter().filter(|p| p.spec().network.as_ref() == Some(network)).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let part: String = all.into_iter().map(|p| lines(p)).collect();
    if let Err(error) = within::rewrite(place.path(), FILE, |text| with_part(text, &part)) {
        tracing::warn!(proc = %proc.name, path = FILE, %error, "it is not told of its network");
    }
}

/// What /etc/resolv.conf of a proc with a resolver is made as: that first, then the machine's own,
/// for where no daemon runs. A proc with limited egress reaches no others.
pub fn resolv_conf(proc: &Proc) -> Option<String> {
    resolver::has_one(proc).then(|| {
        let host = kip_sandbox::base::resolv_conf("/".as_ref());
        let host = host.and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let limited = proc.egress.is_limited();
        // A search domain would only make names of which none is in the rules.
        let out = ["nameserver", "search", "domain"];
        let stays = |line: &&str| !(limited && out.iter().any(|word| line.trim_start().starts_with(word)));
        let host: String = host.split_inclusive('\n').filter(stays).collect();
        // Names of procs have no dots, and are asked for as they are.
        format!("{BEGIN}nameserver {}\noptions ndots:0\n{END}{host}", resolver::ADDRESS)
    })
}

/// Writes the names of a network's procs into the /etc/hosts of each, after one came or went. A
/// proc that has no files now has the names written when it gets them.
pub fn write_all(machine: &Host, network: &str) {
    let procs = machine.live_procs();
    for proc in procs.iter().filter(|p| p.spec().network.as_deref() == Some(network)) {
        match proc.files.place() {
            Ok(place) if place.path().join(FILE).exists() => write_at(proc, &place),
            Ok(_) => {}
            Err(error) => tracing::warn!(proc = %proc.name, error = chain(&error), "it is not told of its network"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let first = with_part("127.0.0.1\tlocalhost\n", "10.0.0.1\ta\n");
        assert_eq!(first, format!("127.0.0.1\tlocalhost\n{BEGIN}10.0.0.1\ta\n{END}"));
        let own = format!("{first}192.0.2.1\tmine");
        let second = with_part(&own, "10.0.0.2\tb\n");
        assert_eq!(second, format!("127.0.0.1\tlocalhost\n{BEGIN}10.0.0.2\tb\n{END}192.0.2.1\tmine"));
        assert_eq!(with_part(&second, "10.0.0.2\tb\n"), second);
        assert_eq!(with_part("x", ""), format!("x\n{BEGIN}{END}"));
        assert_eq!(with_part(&format!("x\n{BEGIN}half"), ""), format!("x\n{BEGIN}{END}"), "a part that was cut off");
    }
}
