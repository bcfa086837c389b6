//! Capabilities of a proc's root, capabilities(7), by the names that Docker has for them.
//!
//! All of them count within the proc's own user namespace only. What a capability could do beyond
//! that Kip gives to no proc, so [`Capability::is_given`] tells which ones can be asked for.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Their names in the order of the kernel's numbers, linux/capability.h.
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];
/// What common servers need to open low ports, change their user and own their files.
const USUAL: [&str; 12] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "SETFCAP",
    "AUDIT_WRITE",
];
/// What can be asked for in addition: the kernel looks for these in the proc's own user namespace.
const FURTHER: [&str; 3] = ["DAC_READ_SEARCH", "IPC_OWNER", "SYS_PTRACE"];
/// Stands for all of them.
const ALL: &str = "ALL";

/// A capability by its name, with or without `CAP_`, or `ALL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = "^[A-Za-z_]+$"))]
pub struct Capability(Option<u8>);

/// A [`Capability`] could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no capability {0:?}: write one of capabilities(7), for example NET_BIND_SERVICE, or ALL")]
pub struct BadCapability(String);

/// A set of capabilities, a bit for each.
pub type CapabilityBits = u64;

fn bits(names: &[&str]) -> CapabilityBits {
    let bit = |name: &&str| NAMES.iter().position(|known| known == name).map_or(0, |at| 1 << at);
    names.iter().map(bit).fold(0, |all, bit| all | bit)
}

impl Capability {
    /// Whether a proc can have it.
    pub fn is_given(self) -> bool {
        self.0.is_none_or(|at| (bits(&USUAL) | bits(&FURTHER)) & (1 << at) != 0)
    }

    /// Those that a proc can have, for messages.
    pub fn given() -> String {
        USUAL.into_iter().chain(FURTHER).collect::<Vec<_>>().join(", ")
    }
}

/// What a proc's root has, by what its owner has added and dropped: as Docker has it, `ALL` is all
/// that can be given where it is added, and nothing stays but what is added where it is dropped.
pub fn capabilities(added: &[Capability], dropped: &[Capability]) -> CapabilityBits {
    let all = bits(&USUAL) | bits(&FURTHER);
    let set = |of: &[Capability]| of.iter().filter_map(|one| one.0).fold(0, |all, at| all | 1 << at);
    let has_all = |of: &[Capability]| of.iter().any(|one| one.0.is_none());
    let found = match (has_all(added), has_all(dropped)) {
        (true, _) => all & !set(dropped),
        (false, true) => set(added),
        (false, false) => bits(&USUAL) & !set(dropped) | set(added),
    };
    found & all
}

impl FromStr for Capability {
    type Err = BadCapability;
    fn from_str(s: &str) -> Result<Self, BadCapability> {
        let upper = s.to_ascii_uppercase();
        let name = upper.strip_prefix("CAP_").unwrap_or(&upper);
        if name == ALL {
            return Ok(Capability(None));
        }
        let at = NAMES.iter().position(|known| *known == name).ok_or_else(|| BadCapability(s.to_owned()))?;
        Ok(Capability(Some(at as u8)))
    }
}

impl TryFrom<String> for Capability {
    type Error = BadCapability;
    fn try_from(text: String) -> Result<Self, BadCapability> {
        text.parse()
    }
}

impl From<Capability> for String {
    fn from(one: Capability) -> String {
        one.to_string()
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.map_or(ALL, |at| NAMES[usize::from(at)]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(added: &[&str], dropped: &[&str]) -> CapabilityBits {
        let read = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<Vec<Capability>>();
        capabilities(&read(added), &read(dropped))
    }

    #[test]
    fn sets_are_those_of_docker_among_what_can_be_given() {
        let (usual, all) = (bits(&USUAL), bits(&USUAL) | bits(&FURTHER));
        assert_eq!(of(&[], &[]), usual);
        assert_eq!(of(&["SYS_PTRACE"], &["chown", "CAP_KILL"]), usual & !0b10_0001 | 1 << 19);
        assert_eq!(of(&[], &["all"]), 0);
        assert_eq!(of(&["CAP_NET_BIND_SERVICE"], &["ALL"]), 1 << 10);
        assert_eq!(of(&["ALL"], &["SETUID"]), all & !(1 << 7));
        assert_eq!(of(&["ALL"], &["ALL"]), all);
        assert_eq!(of(&["SYS_ADMIN"], &[]), usual, "what is never given is in no set");
    }

    #[test]
    fn names_are_those_of_the_kernel() {
        for (name, number) in [("CHOWN", 0), ("SYS_ADMIN", 21), ("MKNOD", 27), ("SETFCAP", 31), ("BPF", 39)] {
            assert_eq!(name.parse(), Ok(Capability(Some(number))), "{name}");
        }
        assert!(!"SYS_ADMIN".parse::<Capability>().unwrap().is_given());
        assert!("ALL".parse::<Capability>().unwrap().is_given());
        assert!("CAPNET".parse::<Capability>().is_err());
        assert_eq!("cap_net_raw".parse::<Capability>().unwrap().to_string(), "NET_RAW");
        assert!(USUAL.iter().chain(&FURTHER).all(|name| NAMES.contains(name)));
    }
}
