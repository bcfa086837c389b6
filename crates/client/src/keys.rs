//! Calls about the realm's keys, and about what is closed by one of its own.

use crate::client::{Client, Nothing, json};
use crate::error::CallError;
use crate::feed::AnswerFeed;
use hyper::Method;
use kip_types::backup::{BackupProgress, BackupRequest};
use kip_types::keys::{
    DestroyKeyRequest, DestroyedKeyView, ExportKeysRequest, ExportedKeys, Hex, ImportKeysRequest, ImportedKeysView,
    KeyView, KeysWrap,
};

impl Client {
    /// The realm's keys, oldest first.
    pub async fn keys(&self) -> Result<Vec<KeyView>, CallError> {
        self.get("/v1/keys").await
    }

    /// Adds a key, which seals from now on.
    pub async fn rotate_keys(&self) -> Result<KeyView, CallError> {
        self.post("/v1/keys/rotate", &Nothing {}).await
    }

    /// Destroys a key, named by its id or the beginning of it: letters and digits only. Without
    /// `yes` it is refused, and told what that would cost.
    pub async fn destroy_key(&self, key: &str, yes: bool) -> Result<DestroyedKeyView, CallError> {
        self.post(&format!("/v1/keys/{key}/destroy"), &DestroyKeyRequest { yes }).await
    }

    /// All keys, closed.
    pub async fn export_keys(&self, wrap: KeysWrap) -> Result<ExportedKeys, CallError> {
        self.post("/v1/keys/export", &ExportKeysRequest { wrap }).await
    }

    /// Writes all that the data directory keeps into a file of the daemon's machine. The last item
    /// is [`BackupProgress::End`].
    pub async fn backup(&self, request: &BackupRequest) -> Result<AnswerFeed<BackupProgress>, CallError> {
        Ok(AnswerFeed::new(self.send(Method::POST, "/v1/backup", json(request)).await?))
    }

    /// Takes over exported keys.
    pub async fn import_keys(&self, wrap: KeysWrap, closed: Vec<u8>) -> Result<ImportedKeysView, CallError> {
        self.post("/v1/keys/import", &ImportKeysRequest { wrap, bytes: Hex(closed) }).await
    }
}
