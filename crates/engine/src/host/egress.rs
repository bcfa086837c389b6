//! What a proc may call outside its network, where its owner limits that: its rules, the addresses
//! that its resolver has found for the names in them, and what it was refused.
//!
//! The rules themselves are the kernel's (`crates/net/src/nat`). An address that was found for a
//! name stays allowed while the proc exists: programs keep addresses for as long as they like, and
//! sleep in between. Where there are more than [`MOST_FOUND`] the address that was not asked for
//! the longest goes. They are kept in the proc's directory, for the next daemon.

use super::{Host, Proc};
use crate::blocking::blocking;
use kip_net::Slot;
use kip_net::nat::{Allowed, RefusedCall};
use kip_records::record;
use kip_sys::clock::now_ms;
use kip_types::api::{EventKind, RefusedCallView};
use kip_types::chain;
use kip_types::spec::{Egress as Rule, Spec};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// In the proc's directory.
const FILE: &str = "egress.json";
/// Addresses that are kept for a proc's names.
const MOST_FOUND: usize = 256;
/// Refusals that are remembered of a proc.
const MOST_REFUSED: usize = 64;
/// A call that was refused so long ago is a new one when it is refused again, milliseconds.
const OLD_MS: u64 = 3_600_000;
/// Refusals of a proc that are events of their own, in an hour.
const MOST_EVENTS: usize = 64;

/// An address that the resolver has found for a rule's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Found {
    rule: Rule,
    address: IpAddr,
}

/// What a proc may call.
#[derive(Debug)]
pub struct EgressControl {
    /// None for a proc that may call all.
    rules: Option<Vec<Rule>>,
    file: PathBuf,
    /// The one that was asked for last is the last.
    found: Mutex<Vec<Found>>,
    /// Held while an address is kept and the kernel's rules are changed, so that none is closed by
    /// an answer that came at the same time; whether the kernel has all that are kept.
    in_force: Mutex<bool>,
    refused: Mutex<Told>,
}

/// What was refused: the newest last.
#[derive(Debug, Default)]
struct Told {
    calls: VecDeque<RefusedCallView>,
    /// Those that no event tells of yet, and whether there are more.
    fresh: Vec<String>,
    more: bool,
    /// Since when events are counted, milliseconds since the epoch, and how many there were.
    since_ms: u64,
    events: usize,
}

impl EgressControl {
    /// Of a proc whose directory is `dir`.
    pub fn open(spec: &Spec, dir: &Path) -> EgressControl {
        let rules = spec.limits_egress().then(|| {
            let names = spec.egress.iter().filter(|rule| **rule != Rule::None);
            names.cloned().collect::<Vec<Rule>>()
        });
        let file = dir.join(FILE);
        let mut found = Vec::new();
        if let Some(rules) = &rules {
            // What cannot be read is found again when the program asks for the name.
            let kept: Vec<Found> =
                fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
            found.extend(kept.into_iter().filter(|found| rules.contains(&found.rule)));
        }
        EgressControl { rules, file, found: Mutex::new(found), in_force: Mutex::new(true), refused: Mutex::default() }
    }

    /// Whether the proc may call only what its rules name.
    pub fn is_limited(&self) -> bool {
        self.rules.is_some()
    }

    /// For the kernel's rules; none for a proc that may call all.
    pub fn allowed(&self) -> Option<Vec<Allowed>> {
        let rules = self.rules.as_ref()?;
        let fixed = rules.iter().filter_map(|rule| match rule {
            Rule::Addresses { range, ports } => {
                Some(Allowed { addresses: *range, ports: ports.range, proto: ports.proto })
            }
            Rule::Names { .. } | Rule::All | Rule::None => None,
        });
        let found = self.found.lock();
        let found = found.iter().filter_map(|found| match &found.rule {
            Rule::Names { ports, .. } => {
                Some(Allowed { addresses: (found.address, found.address), ports: ports.range, proto: ports.proto })
            }
            _ => None,
        });
        Some(fixed.chain(found).collect())
    }

    /// Whether the proc's resolver may ask name servers for a name.
    pub fn may_ask(&self, name: &str) -> bool {
        self.rules.as_ref().is_none_or(|rules| rules.iter().any(|rule| rule.covers_name(name).is_some()))
    }

    /// Keeps addresses that were found for a name. Whether some of them are new.
    fn keep(&self, name: &str, addresses: &[IpAddr]) -> bool {
        let rules = self.rules.iter().flatten().filter(|rule| rule.covers_name(name).is_some());
        let mut found = self.found.lock();
        let mut new = false;
        for rule in rules {
            for address in addresses {
                let this = Found { rule: rule.clone(), address: *address };
                let before = found.len();
                found.retain(|known| *known != this);
                new |= found.len() == before;
                found.push(this);
            }
        }
        let too_many = found.len().saturating_sub(MOST_FOUND);
        found.drain(..too_many);
        new
    }

    /// For the next daemon.
    fn save(&self) {
        let found = self.found.lock().clone();
        let text = serde_json::to_vec(&found).expect("it is plain data");
        if let Err(error) = record::replace(&self.file, &text) {
            let error = chain(&error);
            tracing::warn!(file = %self.file.display(), error, "addresses of names are not kept for the next daemon");
        }
    }

    /// Notes a call that was refused.
    pub fn note(&self, to: String) {
        let now = now_ms();
        let mut told = self.refused.lock();
        let known = told.calls.iter().position(|call| call.to == to).and_then(|at| told.calls.remove(at));
        if known.is_none_or(|call| now.saturating_sub(call.at_ms) > OLD_MS) {
            if told.fresh.len() < MOST_EVENTS {
                told.fresh.push(to.clone());
            } else {
                told.more = true;
            }
        }
        told.calls.push_back(RefusedCallView { to, at_ms: now });
        if told.calls.len() > MOST_REFUSED {
            told.calls.pop_front();
        }
    }

    /// What it was refused, the newest first.
    pub fn refused(&self) -> Vec<RefusedCallView> {
        self.refused.lock().calls.iter().rev().cloned().collect()
    }
}

/// Lets a proc call the addresses that were found for a name. When this returns, the proc may.
pub async fn learn(machine: &Arc<Host>, slot: Slot, egress: &Arc<EgressControl>, name: &str, addresses: Vec<IpAddr>) {
    let (machine, egress, name) = (Arc::clone(machine), Arc::clone(egress), name.to_owned());
    let allow = move || {
        let mut in_force = egress.in_force.lock();
        let new = egress.keep(&name, &addresses);
        if !new && *in_force {
            return;
        }
        // An answer may come after its proc was removed, and the slot may be another proc's by
        // then, or become it right now.
        let owner = || machine.procs().get(&slot).map(|proc| Arc::clone(&proc.egress));
        let is_ours =
            |owner: &Option<Arc<EgressControl>>| owner.as_ref().is_some_and(|owner| Arc::ptr_eq(owner, &egress));
        *in_force = false;
        if !is_ours(&owner()) {
            return;
        }
        let allowed = machine.nat.allow(slot, egress.allowed().unwrap_or_default());
        if let Some(now) = owner().filter(|now| !Arc::ptr_eq(now, &egress)) {
            let _ = machine.nat.allow(slot, now.allowed().unwrap_or_default());
            return;
        }
        *in_force = allowed.is_ok();
        if let Err(error) = allowed {
            tracing::error!(
                name,
                error = chain(&error),
                "a proc may not call the addresses of a name that its rules have"
            );
        }
        if new {
            egress.save();
        }
    };
    blocking(allow).await;
}

fn text(refused: &RefusedCall) -> String {
    match refused.port {
        Some((proto, port)) => format!("{proto} {}", std::net::SocketAddr::new(refused.to, port)),
        None => format!("icmp {}", refused.to),
    }
}

impl Host {
    /// Reads what the kernel has refused procs since the last time.
    pub fn note_refused_calls(&self) {
        let refused = match self.nat.take_refused() {
            Ok(refused) => refused,
            Err(error) => {
                tracing::debug!(error = chain(&error), "what procs were refused to call cannot be read");
                return;
            }
        };
        let procs = self.procs();
        for call in refused {
            if let Some(proc) = procs.get(&call.slot) {
                proc.egress.note(text(&call));
            }
        }
    }

    /// Tells in events what procs were refused to call since the last time.
    pub fn tell_refused_calls(&self) {
        self.note_refused_calls();
        for proc in self.live_procs() {
            tell(self, &proc);
        }
    }
}

fn tell(machine: &Host, proc: &Proc) {
    for line in proc.egress.refused.lock().take_lines(now_ms()) {
        machine.events.emit(Some(&proc.name), EventKind::EgressRefused, line);
    }
}

impl Told {
    /// What events tell now: a proc that tries one address after the other has [`MOST_EVENTS`] an
    /// hour, and one with how many more there were.
    fn take_lines(&mut self, now_ms: u64) -> Vec<String> {
        if now_ms.saturating_sub(self.since_ms) > OLD_MS {
            (self.since_ms, self.events) = (now_ms, 0);
        }
        let room = MOST_EVENTS.saturating_sub(self.events);
        let mut lines = std::mem::take(&mut self.fresh);
        self.more |= lines.len() > room;
        lines.truncate(room);
        self.events += lines.len();
        if self.more && room > 0 && self.events >= MOST_EVENTS {
            lines.push("and more, of which no event tells before an hour is over".to_owned());
        }
        self.more = false;
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(rules: &[&str]) -> Spec {
        let rules: Vec<String> = rules.iter().map(|rule| (*rule).to_owned()).collect();
        serde_json::from_value(serde_json::json!({"name": "a", "command": ["x"], "egress": rules})).unwrap()
    }

    #[test]
    fn addresses_of_names_are_kept_for_the_next_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let spec_ = spec(&["pypi.org:443", "*.org/udp", "192.0.2.0/24"]);
        let egress = EgressControl::open(&spec_, dir.path());
        assert_eq!(egress.allowed().unwrap().len(), 1);
        assert!(egress.may_ask("PyPI.org.") && egress.may_ask("a.org") && !egress.may_ask("example.com"));
        let address: IpAddr = "198.51.100.7".parse().unwrap();
        assert!(egress.keep("pypi.org", &[address]), "by both rules for names");
        assert!(!egress.keep("pypi.org", &[address]) && !egress.keep("example.com", &[address]));
        let allowed = egress.allowed().unwrap();
        assert_eq!(allowed.len(), 3);
        assert!(allowed.contains(&Allowed { addresses: (address, address), ports: Some((443, 443)), proto: None }));
        egress.save();
        assert_eq!(EgressControl::open(&spec_, dir.path()).allowed().unwrap(), allowed);
        assert_eq!(
            EgressControl::open(&spec(&["pypi.org:443"]), dir.path()).allowed().unwrap().len(),
            1,
            "of its rules alone"
        );
        fs::write(dir.path().join(FILE), "{").unwrap();
        assert_eq!(EgressControl::open(&spec_, dir.path()).allowed().unwrap().len(), 1);
    }

    #[test]
    fn what_was_not_asked_for_the_longest_goes() {
        let dir = tempfile::tempdir().unwrap();
        let egress = EgressControl::open(&spec(&["*.org"]), dir.path());
        let address = |n: usize| IpAddr::from([10, 0, (n >> 8) as u8, n as u8]);
        for n in 0..MOST_FOUND {
            egress.keep("a.org", &[address(n)]);
        }
        egress.keep("a.org", &[address(0)]);
        egress.keep("b.org", &[address(MOST_FOUND)]);
        let allowed = egress.allowed().unwrap();
        assert_eq!(allowed.len(), MOST_FOUND);
        let has = |n: usize| allowed.iter().any(|allowed| allowed.addresses.0 == address(n));
        assert!(has(0) && !has(1) && has(2) && has(MOST_FOUND));
    }

    #[test]
    fn all_and_none() {
        let dir = tempfile::tempdir().unwrap();
        for rules in [&[][..], &["all"]] {
            let egress = EgressControl::open(&spec(rules), dir.path());
            assert!(!egress.is_limited() && egress.allowed().is_none() && egress.may_ask("x"));
        }
        let none = EgressControl::open(&spec(&["none"]), dir.path());
        assert!(none.is_limited() && none.allowed() == Some(vec![]) && !none.may_ask("x"));
    }

    #[test]
    fn refusals_are_remembered_once() {
        let dir = tempfile::tempdir().unwrap();
        let egress = EgressControl::open(&spec(&["none"]), dir.path());
        for n in 0..MOST_REFUSED + 6 {
            egress.note(format!("tcp 192.0.2.7:{n}"));
        }
        egress.note("tcp 192.0.2.7:10".to_owned());
        let refused = egress.refused();
        assert_eq!((refused.len(), refused[0].to.as_str()), (MOST_REFUSED, "tcp 192.0.2.7:10"));
        let mut told = egress.refused.lock();
        let lines = told.take_lines(OLD_MS + 1);
        assert_eq!((lines.len(), lines[0].as_str()), (MOST_EVENTS + 1, "tcp 192.0.2.7:0"));
        assert!(lines[MOST_EVENTS].starts_with("and more"));
        told.fresh.push("name x".to_owned());
        assert_eq!(told.take_lines(OLD_MS + 2), [""; 0], "within the hour");
        told.fresh.push("name y".to_owned());
        assert_eq!(told.take_lines(3 * OLD_MS), ["name y"]);
    }
}
