//! Routes of named volumes.

use crate::answer::{Answer, RefusalAnswer};
use crate::describe::{Routes, doc};
use crate::state::Api;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;

use kip_types::volume::{VolumeName, VolumeView};

/// The routes below `/v1/volumes`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .get("/v1/volumes", list, doc("listVolumes", "Named volumes, sorted by name.").json::<Vec<VolumeView>>())
        .delete("/v1/volumes/{name}", remove, doc("removeVolume", "Deletes a named volume with its files."))
}

async fn list(State(api): State<Api>) -> Answer<Json<Vec<VolumeView>>> {
    Ok(Json(api.service.volumes().await?))
}

async fn remove(State(api): State<Api>, Path(name): Path<String>) -> Answer<StatusCode> {
    let name: VolumeName = name.parse().map_err(|e| RefusalAnswer::invalid(format!("{e}")))?;
    let service = api.service.clone();
    api.operate(async move { service.remove_volume(name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
