//! Digests of content: SHA-256, the one that every registry and every builder of images knows.

use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

const PREFIX: &str = "sha256:";

/// A text is no digest that Kip knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no sha256 digest")]
pub struct BadDigest(String);

impl Digest {
    /// Of bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The digits alone, which are a safe file name.
    pub fn hex(&self) -> &str {
        &self.0[PREFIX.len()..]
    }

    /// As a person would write it down.
    pub fn short(&self) -> &str {
        &self.hex()[..12]
    }
}

impl FromStr for Digest {
    type Err = BadDigest;

    fn from_str(text: &str) -> Result<Digest, BadDigest> {
        let hex = text.strip_prefix(PREFIX).unwrap_or("");
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        match hex.len() == 64 && hex.bytes().all(digit) {
            true => Ok(Digest(text.to_owned())),
            false => Err(BadDigest(text.to_owned())),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = BadDigest;

    fn try_from(text: String) -> Result<Digest, BadDigest> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Makes the digest of what comes in pieces.
#[derive(Clone)]
pub struct Hasher(Context);

impl Default for Hasher {
    fn default() -> Self {
        Hasher(Context::new(&SHA256))
    }
}

impl Hasher {
    /// Takes the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all of them.
    pub fn finish(self) -> Digest {
        let digits: String = self.0.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Digest(format!("{PREFIX}{digits}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_and_made() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap().short(), "e3b0c44298fc");
        for bad in ["", "sha256:", "sha512:00", &empty[..70], &empty.to_uppercase(), "sha256:../../../etc/passwd"] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }
}
