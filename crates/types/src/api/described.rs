//! What files that describe procs need of the API: what is looked at before one proc goes for
//! another.

use super::{InFile, LeftOpen, RunRequest};
use crate::keys::Hex;
use crate::name::ProcName;
use crate::spec::Spec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const TAR: &str = "tar";
const SECRET: &str = "secret.";

/// `POST /v1/validate`.
// The fields of a RunRequest, written out: a flattened struct hides unknown fields from the code
// that refuses them.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ValidateRequest {
    /// What would be run. A proc of its name may be there: it is taken for the one that makes room.
    pub spec: Spec,
    /// As for `runProc`; nothing is waited for.
    #[serde(default)]
    pub wait_ready: bool,
    /// Contents of the proc's secrets by their names. `spec.secrets` follows from them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, Hex>,
    /// What in `spec` the caller left to the daemon.
    #[serde(default)]
    pub left_open: LeftOpen,
    /// What the file that describes it says about making it.
    #[serde(default, skip_serializing_if = "InFile::is_none")]
    pub in_file: InFile,
    /// Others that will be gone by then: their ports are as good as free.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instead_of: Vec<ProcName>,
}

impl ValidateRequest {
    /// Whether `run` could be run when those of `instead_of` are gone.
    pub fn new(run: RunRequest, instead_of: Vec<ProcName>) -> ValidateRequest {
        let RunRequest { spec, wait_ready, secrets, left_open, in_file } = run;
        ValidateRequest { spec, wait_ready, secrets, left_open, in_file, instead_of }
    }

    /// What would be run, and which procs are gone by then.
    pub fn parts(self) -> (RunRequest, Vec<ProcName>) {
        let ValidateRequest { spec, wait_ready, secrets, left_open, in_file, instead_of } = self;
        (RunRequest { spec, wait_ready, secrets, left_open, in_file }, instead_of)
    }
}

/// What `POST /v1/compare` answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ContentsView {
    /// What of the proc contains something else than what the request would give it; empty if
    /// nothing does.
    pub differ: Vec<ContentView>,
}

/// The key of contents: `tar` or `secret.NAME`, as keys of a `kip.toml` are called.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub enum ContentKey {
    /// The tarball that the files of the proc come from.
    Tar,
    /// A secret, by its name.
    Secret(String),
}

/// A [`ContentKey`] could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no key of contents: known are tar and secret.NAME")]
pub struct BadContentKey(String);

impl TryFrom<String> for ContentKey {
    type Error = BadContentKey;
    fn try_from(text: String) -> Result<ContentKey, BadContentKey> {
        match text.strip_prefix(SECRET) {
            Some(name) => Ok(ContentKey::Secret(name.to_owned())),
            None if text == TAR => Ok(ContentKey::Tar),
            None => Err(BadContentKey(text)),
        }
    }
}

impl From<ContentKey> for String {
    fn from(key: ContentKey) -> String {
        match key {
            ContentKey::Tar => TAR.to_owned(),
            ContentKey::Secret(name) => format!("{SECRET}{name}"),
        }
    }
}

/// Contents that are not those that are asked for.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ContentView {
    /// Key of the contents.
    pub key: ContentKey,
    /// Digest of what the proc has; null for secrets, of which nothing is given out.
    pub is: Option<String>,
    /// Digest of what it would get; null likewise.
    pub wanted: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_a_kip_toml() {
        for (key, text) in [(ContentKey::Tar, "tar"), (ContentKey::Secret("db.key".to_owned()), "secret.db.key")] {
            assert_eq!(serde_json::to_value(&key).unwrap(), serde_json::json!(text));
            assert_eq!(serde_json::from_value::<ContentKey>(serde_json::json!(text)).unwrap(), key);
        }
        assert!(ContentKey::try_from("tarball".to_owned()).is_err());
    }
}
