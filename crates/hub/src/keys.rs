//! Routes of the realm's keys.

use crate::answer::{Answer, Asked};
use crate::server::Hub;
use crate::service::Service;
use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use kip_types::keys::{
    DestroyKeyRequest, DestroyedKeyView, ExportKeysRequest, ExportedKeys, ImportKeysRequest, ImportedKeysView, KeyView,
};

/// The routes below `/v1/keys`.
pub fn routes<S: Service>() -> Router<Hub<S>> {
    Router::new()
        .route("/v1/keys", get(list::<S>))
        .route("/v1/keys/rotate", post(rotate::<S>))
        .route("/v1/keys/export", post(export::<S>))
        .route("/v1/keys/import", post(import::<S>))
        .route("/v1/keys/{id}/destroy", post(destroy::<S>))
}

async fn list<S: Service>(State(hub): State<Hub<S>>) -> Answer<Json<Vec<KeyView>>> {
    Ok(Json(hub.service.keys().await?))
}

async fn rotate<S: Service>(State(hub): State<Hub<S>>) -> Answer<Json<KeyView>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.rotate_keys().await }).await?))
}

async fn destroy<S: Service>(
    State(hub): State<Hub<S>>,
    Path(id): Path<String>,
    Asked(how): Asked<DestroyKeyRequest>,
) -> Answer<Json<DestroyedKeyView>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.destroy_key(id, how.yes).await }).await?))
}

async fn export<S: Service>(
    State(hub): State<Hub<S>>,
    Asked(how): Asked<ExportKeysRequest>,
) -> Answer<Json<ExportedKeys>> {
    Ok(Json(hub.service.export_keys(how).await?))
}

async fn import<S: Service>(
    State(hub): State<Hub<S>>,
    Asked(what): Asked<ImportKeysRequest>,
) -> Answer<Json<ImportedKeysView>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.import_keys(what).await }).await?))
}
