//! Routes of checkpoints.

use crate::answer::{Answer, Asked, Name, RefusalAnswer};
use crate::describe::{Routes, doc};
use crate::state::Api;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use kip_types::api::checkpoint::{CheckpointRequest, CheckpointView, CheckpointsView, RollbackRequest, RolledBackView};
use kip_types::{CheckpointTag, ProcName};

/// The routes of checkpoints, below `/v1/procs/NAME` and at `/v1/checkpoints`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .get("/v1/checkpoints", all, doc("listCheckpoints", "Lists the checkpoints of all procs.").json::<CheckpointsView>())
        .get("/v1/procs/{name}/checkpoints", list, doc("listCheckpointsOfProc", "Lists the checkpoints of a proc in the order in which they were taken.").json::<CheckpointsView>())
        .post("/v1/procs/{name}/checkpoints", take, doc("checkpointProc", "Keeps memory and files of a proc as they are at one moment, in any tier. A sleeper is not woken; a proc that runs stands still meanwhile and runs on.").body::<CheckpointRequest>().json::<CheckpointView>())
        .delete("/v1/procs/{name}/checkpoints/{tag}", remove, doc("removeCheckpoint", "Removes a checkpoint for good."))
        .post("/v1/procs/{name}/rollback", rollback, doc("rollBackProc", "Lets a proc go on from a checkpoint, with its memory and files of then; its connections end with a reset. What it was is kept as another checkpoint.").body::<RollbackRequest>().json::<RolledBackView>())
}

async fn all(State(api): State<Api>) -> Answer<Json<CheckpointsView>> {
    Ok(Json(api.service.checkpoints(None).await?))
}

async fn list(State(api): State<Api>, Name(name): Name) -> Answer<Json<CheckpointsView>> {
    Ok(Json(api.service.checkpoints(Some(name)).await?))
}

async fn take(
    State(api): State<Api>,
    Name(name): Name,
    Asked(request): Asked<CheckpointRequest>,
) -> Answer<Json<CheckpointView>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.checkpoint(name, request).await }).await?))
}

async fn remove(State(api): State<Api>, Path((name, tag)): Path<(String, String)>) -> Answer<StatusCode> {
    let name: ProcName = name.parse().map_err(|e| RefusalAnswer::invalid(format!("{e}")))?;
    let tag: CheckpointTag = tag.parse().map_err(|e| RefusalAnswer::invalid(format!("{e}")))?;
    let service = api.service.clone();
    api.operate(async move { service.remove_checkpoint(name, tag).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn rollback(
    State(api): State<Api>,
    Name(name): Name,
    Asked(request): Asked<RollbackRequest>,
) -> Answer<Json<RolledBackView>> {
    let service = api.service.clone();
    let mut done = api.operate(async move { service.rollback(name, request).await }).await?;
    done.proc.spec.hide_values();
    Ok(Json(done))
}
