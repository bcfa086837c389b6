//! Names of what is archived: random numbers that are written as hexadecimal digits. Owns no
//! meaning: the caller that made a name knows what it means.

use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A text is not the hexadecimal digits of an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} id {text:?} is not valid: it has {digits} hexadecimal digits, in lower case")]
pub struct BadId {
    what: &'static str,
    text: String,
    digits: usize,
}

/// Random bytes of the kernel's.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).expect("getrandom(2) gives bytes to every process");
    bytes
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse<const N: usize>(what: &'static str, text: &str) -> Result<[u8; N], BadId> {
    let bad = || BadId { what, text: text.to_owned(), digits: N * 2 };
    if text.len() != N * 2 || !text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return Err(bad());
    }
    let mut bytes = [0; N];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).map_err(|_| bad())?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| bad())?;
    }
    Ok(bytes)
}

macro_rules! id_type {
    ($type:ident, $bytes:literal, $what:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(pub [u8; $bytes]);

        impl $type {
            /// A new one.
            pub fn random() -> Self {
                Self(random())
            }
        }
        impl FromStr for $type {
            type Err = BadId;
            fn from_str(text: &str) -> Result<Self, BadId> {
                parse($what, text).map(Self)
            }
        }
        impl TryFrom<String> for $type {
            type Error = BadId;
            fn try_from(text: String) -> Result<Self, BadId> {
                text.parse()
            }
        }
        impl From<$type> for String {
            fn from(id: $type) -> String {
                id.to_string()
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&hex(&self.0))
            }
        }
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self)
            }
        }
    };
}

id_type!(KeyId, 16, "key", "One of a realm's keys.");
id_type!(ProcId, 16, "proc", "A proc, for as long as it exists; its name may change.");
id_type!(PackId, 32, "pack", "A pack. It is the salt of the pack's key as well.");
id_type!(
    FrontId,
    32,
    "front",
    "A front. It is the salt of the front's key as well, so no two writings of one have the same."
);
id_type!(OwnerId, 16, "data directory", "A worker's data directory: who may own a proc.");

impl OwnerId {
    /// No data directory: the owner of a proc that was brought in and that no data directory has
    /// adopted yet.
    pub const NOBODY: OwnerId = OwnerId([0; 16]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_as_they_are_written() {
        let id = PackId::random();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(serde_json::from_str::<PackId>(&serde_json::to_string(&id).unwrap()).unwrap(), id);
        assert_ne!(id, PackId::random());
        for bad in ["", "00", &"A".repeat(32), &"g".repeat(32), &"é".repeat(16), &"0".repeat(33)] {
            let e = bad.parse::<KeyId>().unwrap_err();
            assert!(e.to_string().starts_with("key id"), "{e}");
        }
    }
}
