//! The REST API. Each handler parses, has the service do it and answers.

use crate::admit;
use crate::answer::{Answer, Asked, AskedQuery, Name, Refused};
use crate::exec;
use crate::feed;
use crate::server::Hub;
use crate::service::Service;
use crate::snapshots;
use axum::extract::{DefaultBodyLimit, FromRequestParts, State};
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use kip_types::api::{
    Code, Details, DetailsRequest, DownView, EXEC_PROTOCOL, EventsRequest, ExecRequest, Info, LogsRequest, Moved,
    ProcView, Refusal, RemoveRequest, RunRequest, SleepRequest, StopRequest, WakeRequest, WhyView,
};

/// How often `run` picks another name when somebody else takes the one it picked.
const NAME_ATTEMPTS: u32 = 100;

/// Most bytes in a request's body. More than the arguments and environment that exec takes: 6 MiB, execve(2).
const BODY_MAX: usize = 8 << 20;

/// All routes.
pub fn router<S: Service>(hub: Hub<S>) -> Router {
    Router::new()
        .route("/v1/procs", post(run::<S>).get(list::<S>))
        .route("/v1/procs/{name}", get(inspect::<S>).delete(remove::<S>))
        .route("/v1/procs/{name}/start", post(start::<S>))
        .route("/v1/procs/{name}/stop", post(stop::<S>))
        .route("/v1/procs/{name}/sleep", post(sleep::<S>))
        .route("/v1/procs/{name}/wake", post(wake::<S>))
        .route("/v1/procs/{name}/exec", post(exec::<S>))
        .route("/v1/procs/{name}/why", get(why::<S>))
        .route("/v1/procs/{name}/details", get(details::<S>))
        .route("/v1/procs/{name}/logs", get(logs::<S>))
        .route("/v1/snapshots", get(snapshots::list::<S>))
        .route("/v1/snapshots/{name}", get(snapshots::show::<S>))
        .route("/v1/snapshots/{name}/export", post(snapshots::export::<S>))
        .route("/v1/verify", post(snapshots::verify::<S>))
        .route("/v1/import", post(snapshots::import::<S>))
        .route("/v1/collect", post(snapshots::collect::<S>))
        .route("/v1/events", get(events::<S>))
        .route("/v1/info", get(info::<S>))
        .route("/v1/down", post(down::<S>))
        .merge(crate::keys::routes::<S>())
        .merge(crate::volumes::routes::<S>())
        .merge(crate::images::routes::<S>())
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(hub)
}

async fn no_route(uri: Uri) -> Refused {
    Refused::invalid(format!("this API has no {}", uri.path())).with_status(StatusCode::NOT_FOUND)
}

async fn no_method(method: Method, uri: Uri) -> Refused {
    Refused::invalid(format!("{} does not take {method}", uri.path())).with_status(StatusCode::METHOD_NOT_ALLOWED)
}

async fn run<S: Service>(State(hub): State<Hub<S>>, Asked(mut request): Asked<RunRequest>) -> Answer<Response> {
    admit::complete(&mut request, &hub.defaults)?;
    let service = hub.service.clone();
    let view = hub.operate(async move { run_named(&*service, request).await }).await?;
    Ok((StatusCode::CREATED, Json(view)).into_response())
}

/// Runs `request`; if its name is a stem, under the first free name made of it.
async fn run_named<S: Service>(service: &S, mut request: RunRequest) -> Result<ProcView, Refusal> {
    if !std::mem::take(&mut request.left_open.name) {
        return service.run(request).await;
    }
    let stem = request.spec.name.clone();
    for _ in 0..NAME_ATTEMPTS {
        let mut named = request.clone();
        named.spec.name = admit::free_name(&stem, &service.names().await?)?;
        let name = named.spec.name.clone();
        match service.run(named).await {
            // Somebody took the name in between, or a port is taken; only the first is worth another attempt.
            Err(refusal) if refusal.code == Code::Taken && service.names().await?.contains(&name) => {}
            done => return done,
        }
    }
    Err(Refusal::new(Code::Taken, format!("no free name was found for {stem}: give one with --name")))
}

async fn list<S: Service>(State(hub): State<Hub<S>>) -> Answer<Json<Vec<ProcView>>> {
    Ok(Json(hub.service.list().await?))
}

async fn inspect<S: Service>(State(hub): State<Hub<S>>, Name(name): Name) -> Answer<Json<ProcView>> {
    Ok(Json(hub.service.inspect(name).await?))
}

async fn details<S: Service>(
    State(hub): State<Hub<S>>,
    Name(name): Name,
    AskedQuery(request): AskedQuery<DetailsRequest>,
) -> Answer<Json<Details>> {
    Ok(Json(hub.service.details(name, request.of).await?))
}

async fn remove<S: Service>(
    State(hub): State<Hub<S>>,
    Name(name): Name,
    AskedQuery(how): AskedQuery<RemoveRequest>,
) -> Answer<StatusCode> {
    let service = hub.service.clone();
    hub.operate(async move { service.remove(name, how).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn start<S: Service>(State(hub): State<Hub<S>>, Name(name): Name) -> Answer<Json<ProcView>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.start(name).await }).await?))
}

async fn stop<S: Service>(
    State(hub): State<Hub<S>>,
    Name(name): Name,
    Asked(how): Asked<StopRequest>,
) -> Answer<Json<ProcView>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.stop(name, how).await }).await?))
}

async fn sleep<S: Service>(
    State(hub): State<Hub<S>>,
    Name(name): Name,
    Asked(how): Asked<SleepRequest>,
) -> Answer<Json<Moved>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.sleep(name, how).await }).await?))
}

async fn wake<S: Service>(
    State(hub): State<Hub<S>>,
    Name(name): Name,
    AskedQuery(how): AskedQuery<WakeRequest>,
) -> Answer<Json<Moved>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.wake(name, how).await }).await?))
}

async fn why<S: Service>(State(hub): State<Hub<S>>, Name(name): Name) -> Answer<Json<WhyView>> {
    Ok(Json(hub.service.why(name).await?))
}

async fn logs<S: Service>(
    State(hub): State<Hub<S>>,
    Name(name): Name,
    AskedQuery(which): AskedQuery<LogsRequest>,
) -> Answer<Response> {
    Ok(feed::lines(hub.service.logs(name, which).await?, hub.ending()))
}

async fn events<S: Service>(
    State(hub): State<Hub<S>>,
    AskedQuery(which): AskedQuery<EventsRequest>,
) -> Answer<Response> {
    Ok(feed::lines(hub.service.events(which).await?, hub.ending()))
}

async fn info<S: Service>(State(hub): State<Hub<S>>) -> Answer<Json<Info>> {
    Ok(Json(hub.service.info().await?))
}

async fn down<S: Service>(State(hub): State<Hub<S>>) -> Answer<Json<DownView>> {
    let (service, ended) = (hub.service.clone(), hub.clone());
    let view = hub.operate(async move {
        let view = service.down().await?;
        // In the task: the daemon ends even if whoever asked did not wait.
        ended.went_down();
        Ok(view)
    });
    Ok(Json(view.await?))
}

/// The client's wish to go on in frames after the answer.
struct Upgrade(OnUpgrade);

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        let asks = parts.headers.get(UPGRADE).is_some_and(|v| v.as_bytes() == EXEC_PROTOCOL.as_bytes());
        match parts.extensions.remove::<OnUpgrade>() {
            Some(upgrade) if asks => Ok(Upgrade(upgrade)),
            _ => Err(Refused::invalid(format!(
                "exec needs the headers Connection: upgrade and Upgrade: {EXEC_PROTOCOL}"
            ))
            .with_status(StatusCode::UPGRADE_REQUIRED)),
        }
    }
}

async fn exec<S: Service>(
    State(hub): State<Hub<S>>,
    Name(name): Name,
    Upgrade(upgrade): Upgrade,
    Asked(request): Asked<ExecRequest>,
) -> Answer<Response> {
    if request.command.first().is_none_or(|program| program.is_empty()) {
        return Err(Refused::invalid("no command was given"));
    }
    let service = hub.service.clone();
    let session = hub.operate(async move { service.exec(name, request).await }).await?;
    let ending = hub.ending();
    tokio::spawn(async move {
        match upgrade.await {
            Ok(connection) => exec::carry(TokioIo::new(connection), session, ending).await,
            Err(e) => tracing::debug!(error = %e, "exec client is gone"),
        }
    });
    Ok((StatusCode::SWITCHING_PROTOCOLS, [(CONNECTION, "upgrade"), (UPGRADE, EXEC_PROTOCOL)]).into_response())
}
