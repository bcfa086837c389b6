//! Volumes that are kept under a name.

use async_trait::async_trait;
use kip_types::api::Refusal;
use kip_types::volume::{VolumeName, VolumeView};

/// Named volumes.
#[async_trait]
pub trait VolumeService: Send + Sync + 'static {
    /// Named volumes, sorted by name.
    async fn volumes(&self) -> Result<Vec<VolumeView>, Refusal>;

    /// Deletes a named volume with its files. One that a proc has is `Code::State`.
    async fn remove_volume(&self, name: VolumeName) -> Result<(), Refusal>;
}
