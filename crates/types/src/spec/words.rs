//! Labels of a proc, and further names that it knows addresses by. Owns their forms and what is
//! refused of them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Most labels of a proc.
pub const MOST_LABELS: usize = 256;
/// Longest key of a label, bytes.
const LONGEST_KEY: usize = 253;
/// Longest value of a label, bytes.
const LONGEST_VALUE: usize = 4096;
/// Most further names that a proc knows addresses by.
pub const MOST_HOSTS: usize = 64;
/// Longest host name, bytes: what the kernel takes, gethostname(2).
const LONGEST_HOSTNAME: usize = 64;

/// What is wrong with a label; none if nothing is.
pub fn bad_label(key: &str, value: &str) -> Option<String> {
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && c != '=';
    if key.is_empty() || key.len() > LONGEST_KEY || !key.chars().all(plain) {
        return Some(format!(
            "the key {key:?} of a label is not valid: use 1 to {LONGEST_KEY} bytes without white space and '='"
        ));
    }
    let too_much = value.len() > LONGEST_VALUE || value.contains('\0');
    too_much.then(|| {
        format!("the value of the label {key} is not valid: use at most {LONGEST_VALUE} bytes and no NUL byte")
    })
}

/// Reads `KEY=VALUE`, or `KEY` for an empty value.
///
/// # Errors
/// What is wrong with it.
pub fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    bad_label(key, value).map_or_else(|| Ok((key.to_owned(), value.to_owned())), Err)
}

/// What is wrong with a host name; none if nothing is.
pub fn bad_hostname(name: &str) -> Option<String> {
    let fine = name.len() <= LONGEST_HOSTNAME && is_host(name);
    (!fine).then(|| {
        format!("host name {name:?} is not valid: use 1 to {LONGEST_HOSTNAME} letters, digits, '-', '_' and '.'")
    })
}

fn is_host(name: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=253).contains(&name.len()) && name.chars().all(known) && !name.starts_with(['-', '.'])
}

/// A name and its address in the /etc/hosts of a proc, `NAME:ADDRESS`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}[:=](\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f:.]+)$"))]
pub struct HostEntry {
    /// The name.
    pub name: String,
    /// What it stands for.
    pub addr: IpAddr,
}

/// A [`HostEntry`] could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no name with its address: write NAME:ADDRESS, for example db:192.0.2.7 or db:[2001:db8::7]")]
pub struct BadHostEntry(String);

impl FromStr for HostEntry {
    type Err = BadHostEntry;
    fn from_str(s: &str) -> Result<Self, BadHostEntry> {
        let bad = || BadHostEntry(s.to_owned());
        // Docker's command takes a colon, its Compose an equals sign as well.
        let (name, addr) = s.split_once([':', '=']).ok_or_else(bad)?;
        let plain = addr.strip_prefix('[').and_then(|addr| addr.strip_suffix(']')).unwrap_or(addr);
        let addr = plain.parse().map_err(|_| bad())?;
        if is_host(name) { Ok(HostEntry { name: name.to_owned(), addr }) } else { Err(bad()) }
    }
}

impl TryFrom<String> for HostEntry {
    type Error = BadHostEntry;
    fn try_from(text: String) -> Result<Self, BadHostEntry> {
        text.parse()
    }
}

impl From<HostEntry> for String {
    fn from(entry: HostEntry) -> String {
        entry.to_string()
    }
}

impl fmt::Display for HostEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.addr {
            IpAddr::V4(addr) => write!(f, "{}:{addr}", self.name),
            IpAddr::V6(addr) => write!(f, "{}:[{addr}]", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_keys() {
        assert_eq!(parse_label("a.b/c=x=y"), Ok(("a.b/c".to_owned(), "x=y".to_owned())));
        assert_eq!(parse_label("alone"), Ok(("alone".to_owned(), String::new())));
        for bad in ["", "=x", "a b=x", "a\nb=x"] {
            assert!(parse_label(bad).is_err(), "{bad:?}");
        }
        assert!(bad_label("a", &"x".repeat(LONGEST_VALUE + 1)).is_some());
    }

    #[test]
    fn host_names_are_what_the_kernel_takes() {
        assert_eq!(bad_hostname("db-1.example"), None);
        for bad in ["", "-a", ".a", "a b", &"x".repeat(65)] {
            assert!(bad_hostname(bad).is_some(), "{bad:?}");
        }
    }

    #[test]
    fn entries_are_written_as_they_are_read() {
        for text in ["db:192.0.2.7", "db:[2001:db8::7]"] {
            assert_eq!(text.parse::<HostEntry>().unwrap().to_string(), text);
        }
        assert_eq!("db=::1".parse::<HostEntry>(), "db:[::1]".parse());
        assert_eq!("db:::1".parse::<HostEntry>(), "db:[::1]".parse());
        for bad in ["db", "db:", ":192.0.2.7", "a b:192.0.2.7", "db:host-gateway"] {
            assert!(bad.parse::<HostEntry>().is_err(), "{bad}");
        }
    }
}
