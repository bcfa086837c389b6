//! The calls of `kip template`.

use crate::client::Client;
use crate::connect::collect;
use crate::error::CallError;
use hyper::Method;
use hyper::body::Bytes;
use kip_types::api::template::{TemplateFileRequest, TemplateFileView, TemplateRequest, TemplateView, TemplatesView};
use kip_types::{ProcName, TemplateId};

impl Client {
    /// Takes a template from a proc.
    pub async fn take_template(&self, name: &ProcName, request: &TemplateRequest) -> Result<TemplateView, CallError> {
        self.post(&format!("/v1/procs/{name}/template"), request).await
    }

    /// All templates.
    pub async fn templates(&self) -> Result<TemplatesView, CallError> {
        self.get("/v1/templates").await
    }

    /// Writes a template into a new file of the daemon's machine.
    pub async fn export_template(
        &self,
        id: &TemplateId,
        request: &TemplateFileRequest,
    ) -> Result<TemplateFileView, CallError> {
        self.post(&format!("/v1/templates/{id}/export"), request).await
    }

    /// Brings a template in from a file of the daemon's machine.
    pub async fn import_template(&self, request: &TemplateFileRequest) -> Result<TemplateFileView, CallError> {
        self.post("/v1/templates/import", request).await
    }

    /// Removes a template for good.
    pub async fn remove_template(&self, id: &TemplateId) -> Result<(), CallError> {
        collect(self.send(Method::DELETE, &format!("/v1/templates/{id}"), Bytes::new()).await?).await?;
        Ok(())
    }
}
