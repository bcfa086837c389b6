//! Routes of the realm's keys.

use crate::answer::{Answer, Asked};
use crate::describe::{Routes, doc};
use crate::state::Api;
use axum::Json;
use axum::extract::{Path, State};
use kip_types::keys::{
    DestroyKeyRequest, DestroyedKeyView, ExportKeysRequest, ExportedKeys, ImportKeysRequest, ImportedKeysView, KeyView,
};

/// The routes below `/v1/keys`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .get("/v1/keys", list, doc("listKeys", "The realm's keys, oldest first.").json::<Vec<KeyView>>())
        .post("/v1/keys/rotate", rotate, doc("rotateKeys", "Adds a key, which seals from now on.").json::<KeyView>())
        .post(
            "/v1/keys/export",
            export,
            doc("exportKeys", "All keys, closed.").body::<ExportKeysRequest>().json::<ExportedKeys>(),
        )
        .post(
            "/v1/keys/import",
            import,
            doc("importKeys", "Takes over exported keys.").body::<ImportKeysRequest>().json::<ImportedKeysView>(),
        )
        .post(
            "/v1/keys/{id}/destroy",
            destroy,
            doc("destroyKey", "Destroys a key, and with it what only it opens.")
                .body::<DestroyKeyRequest>()
                .json::<DestroyedKeyView>(),
        )
}

async fn list(State(api): State<Api>) -> Answer<Json<Vec<KeyView>>> {
    Ok(Json(api.service.keys().await?))
}

async fn rotate(State(api): State<Api>) -> Answer<Json<KeyView>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.rotate_keys().await }).await?))
}

async fn destroy(
    State(api): State<Api>,
    Path(id): Path<String>,
    Asked(how): Asked<DestroyKeyRequest>,
) -> Answer<Json<DestroyedKeyView>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.destroy_key(id, how.yes).await }).await?))
}

async fn export(State(api): State<Api>, Asked(how): Asked<ExportKeysRequest>) -> Answer<Json<ExportedKeys>> {
    Ok(Json(api.service.export_keys(how).await?))
}

async fn import(State(api): State<Api>, Asked(what): Asked<ImportKeysRequest>) -> Answer<Json<ImportedKeysView>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.import_keys(what).await }).await?))
}
