//! Routes of templates.

use crate::answer::{Answer, Asked, Name, RefusalAnswer};
use crate::describe::{Routes, doc};
use crate::state::Api;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use kip_types::TemplateId;
use kip_types::api::template::{TemplateFileRequest, TemplateFileView, TemplateRequest, TemplateView, TemplatesView};

/// The routes of templates, at `/v1/templates` and below `/v1/procs/NAME`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .get("/v1/templates", list, doc("listTemplates", "Lists templates in the order in which they were taken.").json::<TemplatesView>())
        .post("/v1/templates/import", import, doc("importTemplate", "Brings a template in from a file of the daemon's machine, for procs of its kind to begin from. One that could not be gone on from here is refused, and none is replaced.").body::<TemplateFileRequest>().json::<TemplateFileView>())
        .post("/v1/templates/{id}/export", export, doc("exportTemplate", "Writes a template into a new file of the daemon's machine, closed with a passphrase or a key.").body::<TemplateFileRequest>().json::<TemplateFileView>())
        .delete("/v1/templates/{id}", remove, doc("removeTemplate", "Removes a template for good; procs that have begun from it stay."))
        .post("/v1/procs/{name}/template", take, doc("takeTemplate", "Keeps memory and files of a proc for procs of the same kind to begin from. The proc stands still meanwhile and runs on; a sleeper is not woken unless a command is to run in it.").body::<TemplateRequest>().json::<TemplateView>())
}

async fn list(State(api): State<Api>) -> Answer<Json<TemplatesView>> {
    Ok(Json(api.service.templates().await?))
}

async fn take(
    State(api): State<Api>,
    Name(name): Name,
    Asked(request): Asked<TemplateRequest>,
) -> Answer<Json<TemplateView>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.take_template(name, request).await }).await?))
}

fn parsed(id: &str) -> Answer<TemplateId> {
    id.parse().map_err(|e| RefusalAnswer::invalid(format!("{e}")))
}

async fn export(
    State(api): State<Api>,
    Path(id): Path<String>,
    Asked(request): Asked<TemplateFileRequest>,
) -> Answer<Json<TemplateFileView>> {
    let (service, id) = (api.service.clone(), parsed(&id)?);
    Ok(Json(api.operate(async move { service.export_template(id, request).await }).await?))
}

async fn import(State(api): State<Api>, Asked(request): Asked<TemplateFileRequest>) -> Answer<Json<TemplateFileView>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.import_template(request).await }).await?))
}

async fn remove(State(api): State<Api>, Path(id): Path<String>) -> Answer<StatusCode> {
    let id = parsed(&id)?;
    let service = api.service.clone();
    api.operate(async move { service.remove_template(id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
