//! Templates.

use async_trait::async_trait;
use kip_types::api::Refusal;
use kip_types::api::template::{TemplateFileRequest, TemplateFileView, TemplateRequest, TemplateView, TemplatesView};
use kip_types::{ProcName, TemplateId};

/// What procs of one kind begin from in place of a start: taken, listed, removed, carried in files.
/// Procs begin from one by [`ProcService::run`](crate::ProcService::run) and
/// [`ProcService::clone_proc`](crate::ProcService::clone_proc).
#[async_trait]
pub trait TemplateService: Send + Sync + 'static {
    /// Takes one from a proc; an older one of its kind is removed.
    async fn take_template(&self, name: ProcName, request: TemplateRequest) -> Result<TemplateView, Refusal>;

    /// All of them.
    async fn templates(&self) -> Result<TemplatesView, Refusal>;

    /// Removes one, for good. Procs that have begun from it stay.
    async fn remove_template(&self, id: TemplateId) -> Result<(), Refusal>;

    /// Writes one into a new file.
    async fn export_template(&self, id: TemplateId, request: TemplateFileRequest) -> Result<TemplateFileView, Refusal>;

    /// Brings one in from a file, if it can be gone on from here; it replaces none.
    async fn import_template(&self, request: TemplateFileRequest) -> Result<TemplateFileView, Refusal>;
}
