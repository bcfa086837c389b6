//! The routes of `kip snapshot`. Each handler parses, has the service do it and answers.

use crate::answer::{Answer, Asked, AskedQuery, RefusalAnswer};
use crate::describe::{Routes, doc};
use crate::feed;
use crate::state::Api;
use axum::Json;
use axum::extract::{Path, State};
use axum::response::Response;
use kip_types::api::{
    CarriedView, CollectRequest, CollectView, ExportRequest, ImportRequest, SnapshotDetails, SnapshotName,
    SnapshotsRequest, SnapshotsView, Verified, VerifyRequest,
};

/// Its routes.
pub fn routes(routes: Routes) -> Routes {
    routes
        .get(
            "/v1/snapshots",
            list,
            doc("listSnapshots", "Generations in the store and on the local disk, by proc.")
                .query::<SnapshotsRequest>()
                .json::<Vec<SnapshotsView>>(),
        )
        .post(
            "/v1/snapshots/verify",
            verify,
            doc("verifySnapshots", "Looks whether generations are what was sealed.")
                .body::<VerifyRequest>()
                .lines::<Verified>(),
        )
        .post(
            "/v1/snapshots/import",
            import,
            doc("importSnapshot", "Brings a generation in from a file of the daemon's machine.")
                .body::<ImportRequest>()
                .json::<CarriedView>(),
        )
        .post(
            "/v1/snapshots/collect",
            collect,
            doc("collectStore", "Deletes what nothing in the store leads to any more.")
                .body::<CollectRequest>()
                .json::<CollectView>(),
        )
        .get(
            "/v1/snapshots/{snapshot}",
            show,
            doc("inspectSnapshot", "One generation in the store, `NAME` or `NAME@GENERATION`.")
                .json::<SnapshotDetails>(),
        )
        .post(
            "/v1/snapshots/{snapshot}/export",
            export,
            doc("exportSnapshot", "Writes a generation into a new file of the daemon's machine.")
                .body::<ExportRequest>()
                .json::<CarriedView>(),
        )
}

fn named(text: &str) -> Answer<SnapshotName> {
    text.parse().map_err(|e| RefusalAnswer::invalid(format!("{e}")))
}

async fn list(
    State(api): State<Api>,
    AskedQuery(which): AskedQuery<SnapshotsRequest>,
) -> Answer<Json<Vec<SnapshotsView>>> {
    Ok(Json(api.service.snapshots(which.name).await?))
}

async fn show(State(api): State<Api>, Path(name): Path<String>) -> Answer<Json<SnapshotDetails>> {
    Ok(Json(api.service.snapshot(named(&name)?).await?))
}

async fn verify(State(api): State<Api>, Asked(request): Asked<VerifyRequest>) -> Answer<Response> {
    Ok(feed::lines(api.service.verify(request).await?, api.ending()))
}

async fn export(
    State(api): State<Api>,
    Path(name): Path<String>,
    Asked(request): Asked<ExportRequest>,
) -> Answer<Json<CarriedView>> {
    let (service, which) = (api.service.clone(), named(&name)?);
    Ok(Json(api.operate(async move { service.export(which, request.file).await }).await?))
}

async fn import(State(api): State<Api>, Asked(request): Asked<ImportRequest>) -> Answer<Json<CarriedView>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.import(request).await }).await?))
}

async fn collect(State(api): State<Api>, Asked(request): Asked<CollectRequest>) -> Answer<Json<CollectView>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.collect(request).await }).await?))
}
