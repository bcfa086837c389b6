//! By which word the own clock of a proc, CLOCK_MONOTONIC, stands in a sleep.
//!
//! Owns the texts that records, manifests and the API have for these words. Does not decide which
//! word counts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The option, request or profile by which a clock stands, as one line: `--clock suspend`,
/// `the request to sleep` or `profile NAME`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
#[schemars(with = "String")]
pub enum SuspendedBy {
    /// `--clock suspend`.
    Owner,
    /// The owner has told the proc to sleep, this once.
    Once,
    /// A profile of [`crate::profile`], by its name.
    Profile(String),
    /// A word of another version of Kip: its generations and records stay readable.
    Other(String),
}

const OWNER: &str = "--clock suspend";
const ONCE: &str = "the request to sleep";
const PROFILE: &str = "profile ";

impl fmt::Display for SuspendedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SuspendedBy::Owner => f.write_str(OWNER),
            SuspendedBy::Once => f.write_str(ONCE),
            SuspendedBy::Profile(name) => write!(f, "{PROFILE}{name}"),
            SuspendedBy::Other(text) => f.write_str(text),
        }
    }
}

impl From<String> for SuspendedBy {
    fn from(text: String) -> SuspendedBy {
        match text.strip_prefix(PROFILE) {
            Some(name) => SuspendedBy::Profile(name.to_owned()),
            None if text == OWNER => SuspendedBy::Owner,
            None if text == ONCE => SuspendedBy::Once,
            None => SuspendedBy::Other(text),
        }
    }
}

impl From<SuspendedBy> for String {
    fn from(word: SuspendedBy) -> String {
        word.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_texts_of_records_on_disk() {
        for (word, text) in [
            (SuspendedBy::Owner, "--clock suspend"),
            (SuspendedBy::Once, "the request to sleep"),
            (SuspendedBy::Profile("nginx".to_owned()), "profile nginx"),
            (SuspendedBy::Profile("python http.server".to_owned()), "profile python http.server"),
            (SuspendedBy::Other("a word of later".to_owned()), "a word of later"),
        ] {
            assert_eq!(serde_json::to_value(&word).unwrap(), serde_json::json!(text));
            assert_eq!(serde_json::from_value::<SuspendedBy>(serde_json::json!(text)).unwrap(), word);
        }
    }
}
