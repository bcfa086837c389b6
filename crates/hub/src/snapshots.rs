//! The routes of `kip snapshot`. Each handler parses, has the service do it and answers.

use crate::answer::{Answer, Asked, AskedQuery, Refused};
use crate::feed;
use crate::server::Hub;
use crate::service::Service;
use axum::Json;
use axum::extract::{Path, State};
use axum::response::Response;
use kip_types::api::{
    CarriedView, CollectRequest, CollectView, ExportRequest, ImportRequest, SnapshotDetails, SnapshotName,
    SnapshotsRequest, SnapshotsView, VerifyRequest,
};

fn named(text: &str) -> Answer<SnapshotName> {
    text.parse().map_err(|e| Refused::invalid(format!("{e}")))
}

pub async fn list<S: Service>(
    State(hub): State<Hub<S>>,
    AskedQuery(which): AskedQuery<SnapshotsRequest>,
) -> Answer<Json<Vec<SnapshotsView>>> {
    Ok(Json(hub.service.snapshots(which.name).await?))
}

pub async fn show<S: Service>(State(hub): State<Hub<S>>, Path(name): Path<String>) -> Answer<Json<SnapshotDetails>> {
    Ok(Json(hub.service.snapshot(named(&name)?).await?))
}

pub async fn verify<S: Service>(State(hub): State<Hub<S>>, Asked(request): Asked<VerifyRequest>) -> Answer<Response> {
    Ok(feed::lines(hub.service.verify(request).await?, hub.ending()))
}

pub async fn export<S: Service>(
    State(hub): State<Hub<S>>,
    Path(name): Path<String>,
    Asked(request): Asked<ExportRequest>,
) -> Answer<Json<CarriedView>> {
    let (service, which) = (hub.service.clone(), named(&name)?);
    Ok(Json(hub.operate(async move { service.export(which, request.file).await }).await?))
}

pub async fn import<S: Service>(
    State(hub): State<Hub<S>>,
    Asked(request): Asked<ImportRequest>,
) -> Answer<Json<CarriedView>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.import(request).await }).await?))
}

pub async fn collect<S: Service>(
    State(hub): State<Hub<S>>,
    Asked(request): Asked<CollectRequest>,
) -> Answer<Json<CollectView>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.collect(request).await }).await?))
}
