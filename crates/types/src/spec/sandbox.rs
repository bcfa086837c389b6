//! How much of the kernel and of the machine a proc's sandbox has, as kinds of its parts.
//!
//! Owns the names, and what each contradicts. Whatever makes or judges a part of a sandbox asks for
//! its kind, and never which sandbox it is.

use super::Spec;
use crate::image::OciImage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The sandbox of a proc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// A private Linux: a network, files of its own, most system calls.
    #[default]
    Full,
    /// A program alone: no network, files that it can only read, about 70 system calls, no
    /// capabilities.
    Light,
}

/// What a proc has for a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkKind {
    /// A network namespace of its own, with a link and addresses.
    Private,
    /// The network namespace without links that all such procs of a data directory share; their
    /// filter lets them make no sockets in it that another process can find.
    None,
}

/// What a proc has for a root file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RootKind {
    /// Files of its own over those of its image, /proc, /sys, /dev/shm and terminals.
    #[default]
    Writable,
    /// The files of its image, which cannot be written to, and a /proc of its processes alone.
    Sealed,
}

/// Which system calls a proc may make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilterKind {
    /// All but a list.
    #[default]
    Default,
    /// Those of a list.
    Light,
}

impl Sandbox {
    /// Whether that is the usual one.
    pub fn is_full(&self) -> bool {
        *self == Sandbox::Full
    }

    /// Its network.
    pub fn network(self) -> NetworkKind {
        match self {
            Sandbox::Full => NetworkKind::Private,
            Sandbox::Light => NetworkKind::None,
        }
    }

    /// Its root file system.
    pub fn root(self) -> RootKind {
        match self {
            Sandbox::Full => RootKind::Writable,
            Sandbox::Light => RootKind::Sealed,
        }
    }

    /// Its system calls.
    pub fn filter(self) -> FilterKind {
        match self {
            Sandbox::Full => FilterKind::Default,
            Sandbox::Light => FilterKind::Light,
        }
    }
}

impl Spec {
    /// What it asks for that its sandbox does not have, in one line; none if there is nothing.
    pub fn outside_sandbox(&self) -> Option<String> {
        if self.sandbox.is_full() {
            return None;
        }
        let image = |has: fn(&OciImage) -> bool| matches!(&self.image, crate::Image::Oci(image) if has(image));
        let asked = [
            (!self.ports.is_empty(), "ports", "no network"),
            (image(|image| image.publish_all), "the ports of its image", "no network"),
            (!self.probes.is_empty(), "probes", "no network"),
            (self.network.is_some(), "a network", "no network"),
            (!self.extra_hosts.is_empty(), "names of hosts", "no network"),
            (!self.egress.is_empty(), "egress rules", "no network"),
            (!self.volumes.is_empty(), "volumes", "no files but its image's"),
            (!self.secrets.is_empty(), "secrets", "no files but its image's"),
            (self.limits.disk_bytes.is_some(), "a limit of disk space", "no files of its own"),
            (self.shm_bytes.is_some(), "a size of /dev/shm", "no /dev/shm"),
            (!self.cap_add.is_empty(), "capabilities", "none"),
            (self.allow_setuid, "setuid programs", "no change of identity"),
            (self.terminal, "a terminal", "no terminals"),
        ];
        let found = asked.into_iter().find(|(is_asked, ..)| *is_asked);
        found.map(|(_, what, has)| {
            format!("a light sandbox has {has}, and {what} cannot be had in it: leave out one of the two")
        })
    }
}

impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Sandbox::Full => "full",
            Sandbox::Light => "light",
        })
    }
}

impl FromStr for Sandbox {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "full" => Ok(Sandbox::Full),
            "light" => Ok(Sandbox::Light),
            _ => Err("write full or light".to_owned()),
        }
    }
}
