//! The calls of `kip template`.

use crate::client::Client;
use crate::connect::collect;
use crate::error::CallError;
use hyper::Method;
use hyper::body::Bytes;
use kip_types::api::template::{TemplateRequest, TemplateView, TemplatesView};
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

    /// Removes a template for good.
    pub async fn remove_template(&self, id: &TemplateId) -> Result<(), CallError> {
        collect(self.send(Method::DELETE, &format!("/v1/templates/{id}"), Bytes::new()).await?).await?;
        Ok(())
    }
}
