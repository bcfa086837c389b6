//! Routes of named volumes.

use crate::answer::{Answer, Refused};
use crate::server::Hub;
use crate::service::Service;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{delete, get};
use axum::{Json, Router};
use kip_types::volume::{VolumeName, VolumeView};

/// The routes below `/v1/volumes`.
pub fn routes<S: Service>() -> Router<Hub<S>> {
    Router::new().route("/v1/volumes", get(list::<S>)).route("/v1/volumes/{name}", delete(remove::<S>))
}

async fn list<S: Service>(State(hub): State<Hub<S>>) -> Answer<Json<Vec<VolumeView>>> {
    Ok(Json(hub.service.volumes().await?))
}

async fn remove<S: Service>(State(hub): State<Hub<S>>, Path(name): Path<String>) -> Answer<StatusCode> {
    let name: VolumeName = name.parse().map_err(|e| Refused::invalid(format!("{e}")))?;
    let service = hub.service.clone();
    hub.operate(async move { service.remove_volume(name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
