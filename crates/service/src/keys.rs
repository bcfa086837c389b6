//! The realm's keys.

use async_trait::async_trait;
use kip_types::api::Refusal;
use kip_types::keys::{
    DestroyedKeyView, ExportKeysRequest, ExportedKeys, ImportKeysRequest, ImportedKeysView, KeyView,
};

/// Keys that seal what is archived.
#[async_trait]
pub trait KeyService: Send + Sync + 'static {
    /// The realm's keys, oldest first.
    async fn keys(&self) -> Result<Vec<KeyView>, Refusal>;

    /// Adds a key, which seals from now on.
    async fn rotate_keys(&self) -> Result<KeyView, Refusal>;

    /// Destroys a key, named by its id or the beginning of it. Without `yes` it is refused, and the
    /// refusal names what that would cost.
    async fn destroy_key(&self, key: String, yes: bool) -> Result<DestroyedKeyView, Refusal>;

    /// All keys, closed.
    async fn export_keys(&self, how: ExportKeysRequest) -> Result<ExportedKeys, Refusal>;

    /// Takes over exported keys.
    async fn import_keys(&self, what: ImportKeysRequest) -> Result<ImportedKeysView, Refusal>;
}
