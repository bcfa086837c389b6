//! Limits of resources that each process of a proc has, getrlimit(2): `NAME=SOFT[:HARD]`, as Docker
//! has them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What stands for no limit, as the kernel has it.
pub const NO_LIMIT: u64 = u64::MAX;

/// Names with the kernel's numbers for them, those of x86_64.
const RESOURCES: [(&str, u32); 15] = [
    ("core", 4),
    ("cpu", 0),
    ("data", 2),
    ("fsize", 1),
    ("locks", 10),
    ("memlock", 8),
    ("msgqueue", 12),
    ("nice", 13),
    ("nofile", 7),
    ("nproc", 6),
    ("rss", 5),
    ("rtprio", 14),
    ("rttime", 15),
    ("sigpending", 11),
    ("stack", 3),
];

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = "^[a-z]+=[0-9a-z-]+(:[0-9a-z-]+)?$"))]
pub struct Ulimit {
    name: String,
    /// What a program meets.
    pub soft: u64,
    /// Up to what a program may raise that itself.
    pub hard: u64,
}

/// A [`Ulimit`] could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUlimit {
    /// It is not of that form.
    #[error("limit {0:?} is not valid: write NAME=SOFT[:HARD], numbers or unlimited, for example nofile=1024:4096")]
    Form(String),
    /// There is no such resource.
    #[error(
        "there is no limit {0:?}: known are core, cpu, data, fsize, locks, memlock, msgqueue, nice, nofile, nproc, rss, rtprio, rttime, sigpending and stack"
    )]
    Name(String),
    /// A program could not even have it.
    #[error("the limit {0:?} has a soft value above its hard one")]
    Order(String),
}

impl Ulimit {
    /// A limit by its name.
    ///
    /// # Errors
    /// [`BadUlimit`].
    pub fn new(name: &str, soft: u64, hard: u64) -> Result<Ulimit, BadUlimit> {
        if !RESOURCES.iter().any(|(known, _)| *known == name) {
            return Err(BadUlimit::Name(name.to_owned()));
        }
        match soft <= hard {
            true => Ok(Ulimit { name: name.to_owned(), soft, hard }),
            false => Err(BadUlimit::Order(name.to_owned())),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel's number of the resource.
    pub fn resource(&self) -> u32 {
        let known = RESOURCES.iter().find(|(known, _)| *known == self.name);
        known.expect("a limit has a known name").1
    }
}

/// A number, or `unlimited` or `-1`.
///
/// # Errors
/// The text.
pub fn parse_limit(text: &str) -> Result<u64, BadUlimit> {
    match text {
        "unlimited" | "-1" => Ok(NO_LIMIT),
        number => number.parse().map_err(|_| BadUlimit::Form(text.to_owned())),
    }
}

impl FromStr for Ulimit {
    type Err = BadUlimit;
    fn from_str(s: &str) -> Result<Self, BadUlimit> {
        let bad = |_| BadUlimit::Form(s.to_owned());
        let (name, values) = s.split_once('=').ok_or_else(|| BadUlimit::Form(s.to_owned()))?;
        let (soft, hard) = values.split_once(':').unwrap_or((values, values));
        Ulimit::new(name, parse_limit(soft).map_err(bad)?, parse_limit(hard).map_err(bad)?)
    }
}

impl TryFrom<String> for Ulimit {
    type Error = BadUlimit;
    fn try_from(text: String) -> Result<Self, BadUlimit> {
        text.parse()
    }
}

impl From<Ulimit> for String {
    fn from(limit: Ulimit) -> String {
        limit.to_string()
    }
}

impl fmt::Display for Ulimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value: u64| if value == NO_LIMIT { "unlimited".to_owned() } else { value.to_string() };
        write!(f, "{}={}:{}", self.name, text(self.soft), text(self.hard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_written_as_they_are_read() {
        for (text, same) in [
            ("nofile=1024:4096", "nofile=1024:4096"),
            ("nproc=7", "nproc=7:7"),
            ("core=-1", "core=unlimited:unlimited"),
            ("stack=8388608:unlimited", "stack=8388608:unlimited"),
        ] {
            assert_eq!(text.parse::<Ulimit>().unwrap().to_string(), same);
        }
        assert_eq!("nofile=1".parse::<Ulimit>().unwrap().resource(), 7);
        for bad in ["nofile", "nofile=", "nofile=x", "nofile=1:2:3", "nofile=2:1", "as=5", "=5"] {
            assert!(bad.parse::<Ulimit>().is_err(), "{bad}");
        }
    }
}
