//! Names of objects: what may be one.
//!
//! A key is at once a path in a bucket and a path in a directory, so it is held to what both can
//! bear and no encoding is ever needed. Characters outside this set (`#`) are left to the directory
//! store's own files.

use std::fmt;

/// Longest key, bytes. S3 allows 1024 with the prefix of the URL.
pub const LONGEST_KEY: usize = 800;
/// Longest component of a key, bytes: leaves room in a file name (255) for what a directory store
/// appends.
pub const LONGEST_COMPONENT: usize = 200;

/// The name of an object: components of `A-Z a-z 0-9 . _ -`, parted by `/`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

/// A text that is no key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Nothing.
    #[error("an object's key is empty")]
    Empty,
    /// A character outside the set.
    #[error("key {key:?} contains {character:?}: only letters, digits, '.', '_', '-' and '/' may be in a key")]
    Character {
        /// The text.
        key: String,
        /// The first wrong one.
        character: char,
    },
    /// `a//b`, `/a`, `a/`.
    #[error("key {key:?} has an empty component: it must not start or end with '/' nor contain '//'")]
    EmptyComponent {
        /// The text.
        key: String,
    },
    /// `.` or `..` as a component.
    #[error("key {key:?} has the component {component:?}, which would leave its place")]
    Dots {
        /// The text.
        key: String,
        /// `.` or `..`.
        component: String,
    },
    /// Too long.
    #[error(
        "key {key:?} is too long: {LONGEST_KEY} bytes are the most, {LONGEST_COMPONENT} of them between two slashes"
    )]
    Long {
        /// The text.
        key: String,
    },
}

impl Key {
    /// The key of this name, if it can be one.
    pub fn new(text: impl Into<String>) -> Result<Key, KeyError> {
        let key = text.into();
        if key.is_empty() {
            return Err(KeyError::Empty);
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/');
        if let Some(character) = key.chars().find(|c| !allowed(*c)) {
            return Err(KeyError::Character { key, character });
        }
        if key.split('/').any(str::is_empty) {
            return Err(KeyError::EmptyComponent { key });
        }
        if let Some(component) = key.split('/').find(|part| matches!(*part, "." | "..")).map(str::to_owned) {
            return Err(KeyError::Dots { key, component });
        }
        if key.len() > LONGEST_KEY || key.split('/').any(|part| part.len() > LONGEST_COMPONENT) {
            return Err(KeyError::Long { key });
        }
        Ok(Key(key))
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_both_kinds_of_store_can_name_is_a_key() {
        let longest = "a".repeat(LONGEST_COMPONENT);
        for good in ["a", "a/b", "gen-7/pages.0", ".hidden", "a..b", "...", "A_z-0.9", longest.as_str()] {
            assert_eq!(Key::new(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn what_would_leave_its_place_or_need_encoding_is_none() {
        assert_eq!(Key::new(""), Err(KeyError::Empty));
        for bad in ["/", "/a", "a/", "a//b"] {
            assert!(matches!(Key::new(bad), Err(KeyError::EmptyComponent { .. })), "{bad}");
        }
        for bad in [".", "..", "../a", "a/..", "a/./b", "a/../../b"] {
            assert!(matches!(Key::new(bad), Err(KeyError::Dots { .. })), "{bad}");
        }
        for bad in ["a b", "a#1", "a?b", "a%2e", "a\\b", "\0", "ä", "a\nb", "a*", "a:b", "~a", "a+b"] {
            assert!(matches!(Key::new(bad), Err(KeyError::Character { .. })), "{bad}");
        }
        for bad in ["a".repeat(LONGEST_COMPONENT + 1), vec!["abc"; LONGEST_KEY / 4 + 1].join("/")] {
            assert!(matches!(Key::new(bad.clone()), Err(KeyError::Long { .. })), "{bad}");
        }
    }
}
