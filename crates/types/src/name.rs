//! Names of procs and realms. A name is a file name, a DNS label and part of an nftables comment,
//! so its alphabet is that of a DNS label.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Deref;
use std::str::FromStr;
use std::sync::OnceLock;

/// Longest name, in bytes: that of a DNS label (RFC 1035, 2.3.4).
pub const MAX_NAME: usize = 63;

/// The same as a regular expression, for schemas.
pub(crate) const NAME: &str = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$";

/// An id of a key, of a proc in the store, of a data directory: 32 hexadecimal digits.
pub(crate) const ID: &str = "^[0-9a-f]{32}$";

/// A name was not a lower-case DNS label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} name {name:?} is not valid: use 1 to {MAX_NAME} of a-z, 0-9 and '-', starting with a letter or digit and not ending with '-'"
)]
pub struct BadName {
    what: &'static str,
    name: String,
}

fn check(what: &'static str, name: &str) -> Result<(), BadName> {
    let bytes = name.as_bytes();
    let ok = !bytes.is_empty()
        && bytes.len() <= MAX_NAME
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
        && bytes[0] != b'-'
        && bytes[bytes.len() - 1] != b'-';
    if ok { Ok(()) } else { Err(BadName { what, name: name.to_owned() }) }
}

macro_rules! name_type {
    ($type:ident, $what:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        #[schemars(extend("pattern" = NAME))]
        pub struct $type(String);

        impl $type {
            /// The name's text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl FromStr for $type {
            type Err = BadName;
            fn from_str(s: &str) -> Result<Self, BadName> {
                check($what, s)?;
                Ok(Self(s.to_owned()))
            }
        }
        impl TryFrom<String> for $type {
            type Error = BadName;
            fn try_from(s: String) -> Result<Self, BadName> {
                check($what, &s)?;
                Ok(Self(s))
            }
        }
        impl From<$type> for String {
            fn from(n: $type) -> String {
                n.0
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name_type!(ProcName, "proc", "The name of a proc, unique within its realm.");
name_type!(CheckpointTag, "checkpoint", "The name of a checkpoint among those of its proc.");
name_type!(TemplateId, "template", "The id of a template, made of what determines it.");
name_type!(Realm, "realm", "A tenant: owner of procs, names and quotas.");

impl From<CheckpointTag> for ProcName {
    /// The same text: a checkpoint is recorded as a proc is.
    fn from(tag: CheckpointTag) -> ProcName {
        ProcName(tag.0)
    }
}

impl From<TemplateId> for ProcName {
    /// The same text: a template is recorded as a proc is.
    fn from(id: TemplateId) -> ProcName {
        ProcName(id.0)
    }
}

impl From<ProcName> for TemplateId {
    fn from(name: ProcName) -> TemplateId {
        TemplateId(name.0)
    }
}

impl From<ProcName> for CheckpointTag {
    fn from(name: ProcName) -> CheckpointTag {
        CheckpointTag(name.0)
    }
}

/// A name that changes while many have a reference to it: each reads the newest. Former names stay
/// in memory, for a reader may still have one; a proc is not renamed often.
#[derive(Debug)]
pub struct CurrentName {
    name: ProcName,
    next: OnceLock<Box<CurrentName>>,
}

impl CurrentName {
    /// The first one.
    pub fn new(name: ProcName) -> CurrentName {
        CurrentName { name, next: OnceLock::new() }
    }

    /// Another one from now on.
    pub fn change(&self, name: ProcName) {
        let mut at = self;
        let mut new = Box::new(CurrentName::new(name));
        loop {
            match at.next.set(new) {
                Ok(()) => return,
                Err(back) => new = back,
            }
            at = at.next.get().expect("it was set before");
        }
    }
}

impl Deref for CurrentName {
    type Target = ProcName;

    fn deref(&self) -> &ProcName {
        let mut at = self;
        while let Some(next) = at.next.get() {
            at = next;
        }
        &at.name
    }
}

impl fmt::Display for CurrentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ProcName::fmt(self, f)
    }
}

impl Default for Realm {
    fn default() -> Self {
        Realm("default".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_changes_is_the_newest_for_each_reader() {
        let name = |text: &str| text.parse::<ProcName>().unwrap();
        let current = CurrentName::new(name("a"));
        let before = &*current;
        current.change(name("b"));
        current.change(name("c"));
        assert_eq!((before.as_str(), current.as_str(), current.to_string()), ("a", "c", "c".to_owned()));
    }

    #[test]
    fn accepts_labels_and_refuses_paths() {
        for good in ["a", "web-1", "0x"] {
            assert!(good.parse::<ProcName>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a/b", "..", "a.b", "a b", &"x".repeat(64)] {
            assert!(bad.parse::<ProcName>().is_err(), "{bad}");
        }
    }
}
