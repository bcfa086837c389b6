//! Routes of procs by spawn.

use crate::answer::{Answer, Asked, AskedQuery, Name};
use crate::describe::{Routes, doc};
use crate::state::Api;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use kip_types::api::spawn::{EvictRequest, SpawnMoment, SpawnRequest, SpawnedRequest, SpawnedView};
use kip_types::api::{Code, Refusal};
use kip_types::name::ProcName;
use std::future::pending;
use std::time::Duration;

/// The routes below `/v1/spawned`.
pub fn routes(routes: Routes) -> Routes {
    let spawn = doc("spawnProc", "Spawns a proc: it is recorded when this is answered, starts by itself, and never starts again. Its name is that of no other.")
        .body::<SpawnRequest>()
        .json_with::<SpawnedView>(201);
    let list = doc("listSpawned", "Lists the procs by spawn, those included whose ends are kept, sorted by name.")
        .json::<Vec<SpawnedView>>();
    let one = doc("waitSpawned", "Returns one proc by spawn; with `wait` once it has started, has ended or is to end. With `within_ms` as it is after that time.")
        .query::<SpawnedRequest>()
        .json::<SpawnedView>();
    let evict =
        doc("evictSpawned", "Has a proc by spawn end. Answers when that is recorded; the proc ends after that.")
            .body::<EvictRequest>()
            .json::<SpawnedView>();
    routes
        .post("/v1/spawned", spawn_proc, spawn)
        .get("/v1/spawned", list_spawned, list)
        .get("/v1/spawned/{name}", wait_spawned, one)
        .post("/v1/spawned/{name}/evict", evict_spawned, evict)
}

async fn spawn_proc(
    State(api): State<Api>,
    Asked(request): Asked<SpawnRequest>,
) -> Answer<(StatusCode, Json<SpawnedView>)> {
    let spawner = api.spawner.clone();
    let view = api.operate(async move { spawner.spawn(request).await }).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

async fn list_spawned(State(api): State<Api>) -> Answer<Json<Vec<SpawnedView>>> {
    Ok(Json(api.spawner.spawned().await?))
}

async fn wait_spawned(
    State(api): State<Api>,
    Name(name): Name,
    AskedQuery(request): AskedQuery<SpawnedRequest>,
) -> Answer<Json<SpawnedView>> {
    let Some(moment) = request.wait else { return Ok(Json(api.spawner.spawned_one(name).await?)) };
    Ok(Json(until(&api, name, moment, request.within_ms).await?))
}

async fn until(api: &Api, name: ProcName, moment: SpawnMoment, within_ms: Option<u64>) -> Result<SpawnedView, Refusal> {
    let mut ending = api.ending();
    // Its sender is in the API.
    let ends = async { drop(ending.wait_for(|ends| *ends).await) };
    let late = async {
        match within_ms {
            Some(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
            None => pending().await,
        }
    };
    tokio::select! {
        view = api.spawner.wait_spawned(name.clone(), moment) => view,
        () = late => api.spawner.spawned_one(name).await,
        () = ends => {
            Err(Refusal::new(Code::Exhausted, "the daemon ends: ask the next one, which knows the proc"))
        }
    }
}

async fn evict_spawned(
    State(api): State<Api>,
    Name(name): Name,
    Asked(request): Asked<EvictRequest>,
) -> Answer<Json<SpawnedView>> {
    let spawner = api.spawner.clone();
    Ok(Json(api.operate(async move { spawner.evict(name, request).await }).await?))
}
