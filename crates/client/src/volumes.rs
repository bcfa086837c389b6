//! The calls of `kip volume`.

use crate::client::Client;
use crate::connect::collect;
use crate::error::CallError;
use hyper::Method;
use hyper::body::Bytes;
use kip_types::volume::{VolumeName, VolumeView};

impl Client {
    /// Named volumes, sorted by name.
    pub async fn volumes(&self) -> Result<Vec<VolumeView>, CallError> {
        self.get("/v1/volumes").await
    }

    /// Deletes a named volume with its files.
    pub async fn remove_volume(&self, name: &VolumeName) -> Result<(), CallError> {
        collect(self.send(Method::DELETE, &format!("/v1/volumes/{name}"), Bytes::new()).await?).await?;
        Ok(())
    }
}
