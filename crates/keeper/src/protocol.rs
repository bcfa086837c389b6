//! The messages between keeper and clients: JSON, one SEQPACKET message each, descriptors beside it
//! as SCM_RIGHTS.
//!
//! Every request has exactly one answer. What does not fit in one message goes in several: a put is
//! staged by the keeper until its last part (`more` is false) and takes effect at once then; a get
//! is a snapshot whose further parts are asked for with [`KeeperRequest::Next`]. A keeper outlives
//! upgrades of its clients, so fields are only ever added, with defaults.
//!
//! What has to be changed otherwise gets another [`PROTOCOL`]. For good, in every protocol, stay as
//! they are: [`KeeperRequest::Ping`] with `pid` and `protocol` of its [`KeeperStatus`],
//! [`KeeperRequest::Get`] of a prefix with [`KeeperRequest::Next`], and [`KeeperRequest::Quit`]: by
//! these a daemon of any other version takes everything over ([`crate::Keeper::supersede`]).

use serde::{Deserialize, Serialize};

/// Version of these messages.
pub const PROTOCOL: u32 = 1;

/// Longest name, bytes. [`MAX_PART`] of them fit in [`MAX_MESSAGE`].
pub const MAX_NAME: usize = 200;

/// Most descriptors or names in one message.
pub const MAX_PART: usize = kip_sys::fdpass::MAX_FDS;

/// Longest message, bytes.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// A name (or prefix) cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} cannot name a descriptor: use 1 to {MAX_NAME} visible ASCII characters without quotes and backslashes")]
pub struct BadHandleName(pub String);

/// Checks a name: what passes needs no escapes in JSON.
///
/// # Errors
/// [`BadHandleName`].
pub fn check_name(name: &str) -> Result<(), BadHandleName> {
    let visible = |b: &u8| b.is_ascii_graphic() && *b != b'"' && *b != b'\\';
    let good = !name.is_empty() && name.len() <= MAX_NAME && name.as_bytes().iter().all(visible);
    if good { Ok(()) } else { Err(BadHandleName(name.chars().take(MAX_NAME).collect())) }
}

/// Which names a request is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Select {
    /// This one.
    Name(String),
    /// All that start with this; the empty prefix means all there are.
    Prefix(String),
}

impl Select {
    /// Whether the name is selected.
    pub fn matches(&self, name: &str) -> bool {
        match self {
            Select::Name(n) => n == name,
            Select::Prefix(p) => name.starts_with(p.as_str()),
        }
    }
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum KeeperRequest {
    /// How it is. Answer: [`KeeperAnswer::Status`].
    Ping,
    /// Hold the descriptors of this message under `names`, one each; equal names hold several, in
    /// order. With the last part all of it takes effect at once: first what `clear` selects is
    /// dropped, then each name is replaced. Answer: [`KeeperAnswer::Done`].
    Put {
        /// Names, as many as descriptors.
        names: Vec<String>,
        /// Another part follows.
        #[serde(default)]
        more: bool,
        /// Dropped before the names are set; counts in the last part only.
        #[serde(default)]
        clear: Option<Select>,
    },
    /// Duplicates of all that is selected. Answer: [`KeeperAnswer::Fds`].
    Get {
        /// What.
        select: Select,
    },
    /// The next part of a get. Answer: [`KeeperAnswer::Fds`].
    Next,
    /// Names only. Answer: [`KeeperAnswer::Names`], one part of it.
    List {
        /// Names that start with this.
        prefix: String,
        /// Only names after this one.
        #[serde(default)]
        after: Option<String>,
    },
    /// Let go of all that is selected. Answer: [`KeeperAnswer::Done`].
    Drop {
        /// What.
        select: Select,
    },
    /// Replace the prefix `from` of all names that have it by `to`. Answer: [`KeeperAnswer::Done`].
    Rename {
        /// Old prefix.
        from: String,
        /// New prefix.
        to: String,
    },
    /// Let go of everything and end. Answer: [`KeeperAnswer::Done`].
    Quit,
}

/// What the keeper answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "re", rename_all = "lowercase")]
pub enum KeeperAnswer {
    /// Done; how many names it concerned.
    Done {
        /// Names.
        count: usize,
    },
    /// Descriptors beside this message, one per name.
    Fds {
        /// Their names.
        names: Vec<String>,
        /// Ask for the next part.
        more: bool,
    },
    /// Names and how many descriptors each holds.
    Names {
        /// In order.
        names: Vec<(String, usize)>,
        /// Ask again with `after` the last of them.
        more: bool,
    },
    /// How it is.
    Status(KeeperStatus),
    /// Not done, and nothing was changed.
    Refused {
        /// Which kind.
        code: KeeperRefusal,
        /// One line.
        message: String,
    },
}

/// Kinds of refusals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeeperRefusal {
    /// The message could not be understood.
    Malformed,
    /// As many descriptors as the limit allows are held.
    Full,
    /// A new name is in use.
    Taken,
}

/// How a keeper is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeeperStatus {
    /// Its process id.
    pub pid: u32,
    /// Its version.
    #[serde(default)]
    pub version: String,
    /// The version of its messages.
    pub protocol: u32,
    /// Names in use.
    #[serde(default)]
    pub names: usize,
    /// Descriptors held.
    #[serde(default)]
    pub descriptors: usize,
    /// Most descriptors it can hold.
    #[serde(default)]
    pub limit: usize,
    /// Its memory is locked.
    #[serde(default)]
    pub memory_locked: bool,
    /// The kernel will kill nearly anything else first when memory runs out.
    #[serde(default)]
    pub oom_protected: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_part_fits_in_a_message() {
        let names = vec!["n".repeat(MAX_NAME); MAX_PART];
        let put =
            KeeperRequest::Put { names: names.clone(), more: true, clear: Some(Select::Prefix("p".repeat(MAX_NAME))) };
        assert!(serde_json::to_vec(&put).unwrap().len() <= MAX_MESSAGE);
        let list = KeeperAnswer::Names { names: names.into_iter().map(|n| (n, usize::MAX)).collect(), more: true };
        assert!(serde_json::to_vec(&list).unwrap().len() <= MAX_MESSAGE);
    }

    #[test]
    fn names_are_checked() {
        for good in ["web/netns", "web/sock/12345", "a", "x:[1]", &"n".repeat(MAX_NAME)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "a\"", "a\\", "\n", "ä", &"n".repeat(MAX_NAME + 1)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    // promise install: what every protocol has to understand stays as it is written
    // held by: this, `kip_pager::protocol::tests::what_every_version_understands_never_changes`
    /// Other versions say these as they are written here.
    #[test]
    fn what_every_version_understands_never_changes() {
        let said = |text: &str| serde_json::from_str::<KeeperRequest>(text).unwrap();
        assert_eq!(said(r#"{"op":"ping"}"#), KeeperRequest::Ping);
        assert_eq!(
            said(r#"{"op":"get","select":{"prefix":""}}"#),
            KeeperRequest::Get { select: Select::Prefix(String::new()) }
        );
        assert_eq!(said(r#"{"op":"next"}"#), KeeperRequest::Next);
        assert_eq!(said(r#"{"op":"quit"}"#), KeeperRequest::Quit);
        let fds = KeeperAnswer::Fds { names: vec!["a".to_owned()], more: true };
        assert_eq!(serde_json::to_string(&fds).unwrap(), r#"{"re":"fds","names":["a"],"more":true}"#);
        assert_eq!(serde_json::to_string(&KeeperAnswer::Done { count: 1 }).unwrap(), r#"{"re":"done","count":1}"#);
    }

    #[test]
    fn messages_survive_json() {
        let request = KeeperRequest::Drop { select: Select::Prefix("web/".to_owned()) };
        let text = serde_json::to_string(&request).unwrap();
        assert_eq!(text, r#"{"op":"drop","select":{"prefix":"web/"}}"#);
        assert_eq!(serde_json::from_str::<KeeperRequest>(&text).unwrap(), request);
        // An older client leaves out what has a default.
        let put: KeeperRequest = serde_json::from_str(r#"{"op":"put","names":["a"]}"#).unwrap();
        assert_eq!(put, KeeperRequest::Put { names: vec!["a".to_owned()], more: false, clear: None });
    }
}
