//! Messages of the API about a realm's keys, which seal what is archived: `kip key`.

use crate::name::{ID, ProcName, Realm};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One key without its secret part: an element of `GET /v1/keys`, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct KeyView {
    /// Its name: 32 hexadecimal digits.
    #[schemars(extend("pattern" = ID))]
    pub id: String,
    /// Realm of the key.
    pub realm: Realm,
    /// When it was made, milliseconds since the epoch; null for one that was destroyed.
    pub created_at_ms: Option<u64>,
    /// When it was destroyed, milliseconds since the epoch; null for one that is there.
    pub destroyed_at_ms: Option<u64>,
    /// It seals what is archived from now on.
    pub current: bool,
    /// The procs that are lost without it, sorted: archived ones, and others of whose memory some
    /// is in the store only.
    pub procs: Vec<ProcName>,
}

/// `POST /v1/keys/ID/destroy`. ID may be the beginning of an id, 6 digits at least.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DestroyKeyRequest {
    /// Destroy the key for good. Without it the answer is a refusal that names the procs that would
    /// be lost.
    pub yes: bool,
}

/// What `POST /v1/keys/ID/destroy` answers.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct DestroyedKeyView {
    /// The key.
    #[schemars(extend("pattern" = ID))]
    pub id: String,
    /// Realm of the key.
    pub realm: Realm,
    /// Procs that are lost with the key, sorted.
    pub procs: Vec<ProcName>,
}

/// A text that is not shown.
#[derive(Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Hidden(pub String);

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hidden")
    }
}

/// Bytes that travel as hexadecimal digits and are not shown.
#[derive(Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^([0-9a-fA-F]{2})*$"))]
pub struct Hex(pub Vec<u8>);

/// A text is not hexadecimal digits, two for each byte.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("these bytes are not written as hexadecimal digits, two for each")]
pub struct NotHex;

impl From<Hex> for String {
    fn from(bytes: Hex) -> String {
        bytes.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl TryFrom<String> for Hex {
    type Error = NotHex;

    fn try_from(text: String) -> Result<Hex, NotHex> {
        let digit = |byte: &u8| (*byte as char).to_digit(16).map(|digit| digit as u8).ok_or(NotHex);
        let byte = |pair: &[u8]| match pair {
            [high, low] => Ok(digit(high)? << 4 | digit(low)?),
            _ => Err(NotHex),
        };
        text.as_bytes().chunks(2).map(byte).collect::<Result<_, _>>().map(Hex)
    }
}

impl fmt::Debug for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// Secret that exported keys are encrypted with.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeysWrap {
    /// Something a person knows; at least 12 bytes.
    Passphrase(Hidden),
    /// 32 bytes.
    Key(Hex),
}

/// `POST /v1/keys/export`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportKeysRequest {
    /// Secret that the exported keys are encrypted with.
    pub wrap: KeysWrap,
}

/// What `POST /v1/keys/export` answers.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ExportedKeys {
    /// Realm of the key.
    pub realm: Realm,
    /// How many keys, those that were destroyed not counted.
    pub keys: usize,
    /// The closed keys.
    pub bytes: Hex,
}

/// `POST /v1/keys/import`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportKeysRequest {
    /// Secret that the exported keys are encrypted with.
    pub wrap: KeysWrap,
    /// The closed keys.
    pub bytes: Hex,
}

/// What `POST /v1/keys/import` answers.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ImportedKeysView {
    /// Realm of the key.
    pub realm: Realm,
    /// Ids of keys that are there now and were not before.
    pub added: Vec<String>,
    /// Ids of keys that are destroyed now and were not before.
    pub destroyed: Vec<String>,
    /// The key that seals from now on.
    pub current: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_closes_keys_is_not_shown() {
        let wrap = KeysWrap::Passphrase(Hidden("correct horse".into()));
        assert!(!format!("{:?}", ExportKeysRequest { wrap: wrap.clone() }).contains("horse"));
        let sent = serde_json::to_string(&wrap).unwrap();
        assert_eq!(sent, r#"{"passphrase":"correct horse"}"#);
        assert_eq!(serde_json::from_str::<KeysWrap>(&sent).unwrap(), wrap);
    }

    #[test]
    fn bytes_travel_as_digits() {
        let all = Hex((0..=255).collect());
        let sent = serde_json::to_string(&all).unwrap();
        assert!(sent.starts_with(r#""000102"#) && sent.ends_with(r#"feff""#), "{sent}");
        assert_eq!(serde_json::from_str::<Hex>(&sent).unwrap(), all);
        assert_eq!(format!("{all:?}"), "256 bytes");
        for bad in ["0", "0g", "é", "000"] {
            assert_eq!(Hex::try_from(bad.to_owned()), Err(NotHex), "{bad}");
        }
    }
}
