//! Forwarding from the interfaces by which the outside comes, switched on while any instance runs.
//!
//! IPv4 forwards what arrives on an interface whose own `forwarding` is set, so the global
//! `ip_forward` stays as it is. IPv6 has that since kernel 6.17 (`force_forwarding`); before, only
//! the global switch works, which also makes the machine ignore router advertisements unless
//! `accept_ra` is 2.
//!
//! Interfaces come and go, and default routes with them: [`enable`] is called again from time to
//! time. What the settings were is written to a file before the first of them is changed. The file
//! is one for all instances of the machine: the first one writes it, the last one puts everything
//! back. It is valid for one boot.

use crate::addr::Instance;
use crate::rtnl::Changes;
use crate::sysctl::{self, SysctlError};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Forwarding could not be switched.
#[derive(Debug, thiserror::Error)]
pub enum ForwardingError {
    /// A setting.
    #[error("a forwarding setting of this machine cannot be read or set")]
    Setting(#[from] SysctlError),
    /// The file that remembers settings.
    #[error("cannot {doing} {path}, which remembers the machine's forwarding settings", path = path.display())]
    Memory {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The routes of the machine.
    #[error("cannot read {0} to learn by which interface the outside comes")]
    Routes(&'static str, #[source] io::Error),
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Memory {
    boot: String,
    users: BTreeSet<Instance>,
    before: BTreeMap<String, String>,
}

/// The interfaces of the default routes. Each proc has routes of its own, so that reading all of
/// them takes longer the more there are; they are read again only if the kernel has told of a
/// change.
pub(super) struct Defaults {
    /// None where the kernel cannot be listened to: then they are read each time.
    changes: Option<Changes>,
    found: Option<BTreeSet<String>>,
}

impl Defaults {
    /// Of the network namespace of the thread.
    pub fn new() -> Defaults {
        Defaults { changes: Changes::open().ok(), found: None }
    }

    fn now(&mut self) -> Result<BTreeSet<String>, ForwardingError> {
        if self.changes.as_mut().is_none_or(Changes::any) {
            self.found = None;
        }
        match &self.found {
            Some(found) => Ok(found.clone()),
            None => Ok(self.found.insert(default_interfaces()?).clone()),
        }
    }
}

/// Switches forwarding on for these interfaces and those of the default routes as they are now.
/// Returns whether it had to.
pub(super) fn enable(
    instance: Instance,
    file: &Path,
    uplinks: &[String],
    defaults: &mut Defaults,
) -> Result<bool, ForwardingError> {
    let _lock = lock(file)?;
    let mut memory = load(file)?;
    let mut wanted = BTreeMap::new();
    let mut interfaces = defaults.now()?;
    interfaces.extend(uplinks.iter().cloned());
    let ipv6 = sysctl::has_ipv6();
    for interface in &interfaces {
        wanted.insert(format!("ipv4/conf/{interface}/forwarding"), "1");
        if !ipv6 {
            continue;
        }
        let own = format!("ipv6/conf/{interface}/force_forwarding");
        if sysctl::read(&own).is_ok() {
            wanted.insert(own, "1");
        } else {
            let accept = format!("ipv6/conf/{interface}/accept_ra");
            if sysctl::read(&accept).is_ok_and(|v| v == "1") {
                wanted.insert(accept, "2");
            }
            wanted.insert("ipv6/conf/all/forwarding".to_owned(), "1");
        }
    }
    let is_new = memory.users.insert(instance);
    let mut changes = Vec::new();
    for (key, value) in wanted {
        match sysctl::read(&key) {
            Ok(now) if now == value => {}
            Ok(now) => {
                memory.before.entry(key.clone()).or_insert(now);
                changes.push((key, value));
            }
            // The interface went meanwhile.
            Err(e) if e.is_absent() => {}
            Err(e) => return Err(e.into()),
        }
    }
    if is_new || !changes.is_empty() {
        store(file, &memory)?;
    }
    for (key, value) in &changes {
        sysctl::write_if_present(key, value)?;
    }
    Ok(!changes.is_empty())
}

/// Ends this instance's need of forwarding; the last one puts back what was, where the interface is
/// still there.
pub(super) fn disable(instance: Instance, file: &Path) -> Result<(), ForwardingError> {
    let _lock = lock(file)?;
    let mut memory = load(file)?;
    memory.users.remove(&instance);
    if !memory.users.is_empty() {
        return store(file, &memory);
    }
    for (key, value) in &memory.before {
        sysctl::write_if_present(key, value)?;
    }
    match fs::remove_file(file) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(ForwardingError::Memory { doing: "remove", path: file.to_owned(), source })
        }
        _ => Ok(()),
    }
}

fn lock(file: &Path) -> Result<fs::File, ForwardingError> {
    let path = file.with_extension("lock");
    let wrong = |source| ForwardingError::Memory { doing: "lock", path: path.clone(), source };
    let lock = fs::OpenOptions::new().create(true).append(true).open(&path).map_err(wrong)?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).map_err(|e| wrong(e.into()))?;
    Ok(lock)
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// A file of an earlier boot, or one that a power cut left unreadable (rename is atomic, so only
/// then), counts as none.
fn load(file: &Path) -> Result<Memory, ForwardingError> {
    let boot = boot_id();
    match fs::read(file) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)
            .ok()
            .filter(|m: &Memory| m.boot == boot)
            .unwrap_or(Memory { boot, ..Memory::default() })),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Memory { boot, ..Memory::default() }),
        Err(source) => Err(ForwardingError::Memory { doing: "read", path: file.to_owned(), source }),
    }
}

fn store(file: &Path, memory: &Memory) -> Result<(), ForwardingError> {
    let wrong = |source| ForwardingError::Memory { doing: "write", path: file.to_owned(), source };
    let text = serde_json::to_vec(memory).map_err(|e| wrong(e.into()))?;
    let temporary = file.with_extension("new");
    let write = || {
        let mut new = fs::File::create(&temporary)?;
        new.write_all(&text)?;
        new.sync_all()?;
        fs::rename(&temporary, file)
    };
    write().map_err(wrong)
}

/// Interfaces of the default routes, IPv4 and IPv6 (proc(5), /proc/net/route; net/ipv6/route.c for
/// the other).
fn default_interfaces() -> Result<BTreeSet<String>, ForwardingError> {
    let mut found = BTreeSet::new();
    let v4 = "/proc/thread-self/net/route";
    let text = fs::read_to_string(v4).map_err(|e| ForwardingError::Routes(v4, e))?;
    for line in text.lines().skip(1) {
        let fields: Vec<_> = line.split_whitespace().collect();
        if let [name, "00000000", _, _, _, _, _, "00000000", ..] = fields[..] {
            found.insert(name.to_owned());
        }
    }
    let v6 = "/proc/thread-self/net/ipv6_route";
    match fs::read_to_string(v6) {
        Ok(text) => {
            for line in text.lines() {
                let fields: Vec<_> = line.split_whitespace().collect();
                if let [to, "00", .., name] = fields[..]
                    && to.bytes().all(|b| b == b'0')
                    && name != "lo"
                {
                    found.insert(name.to_owned());
                }
            }
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(ForwardingError::Routes(v6, e)),
    }
    Ok(found)
}
