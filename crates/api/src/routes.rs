//! The REST API. Each handler parses, has the service do it and answers.

mod backup;
mod checkpoints;
pub(crate) mod dashboard;
mod files;
mod images;
mod keys;
mod meters;
mod scale;
mod snapshots;
mod spawned;
mod templates;
mod tokens;
mod tree;
mod volumes;

use crate::admit;
use crate::answer::{self, Answer, Asked, AskedQuery, BODY_MAX, CallerScope, Name, RefusalAnswer};
use crate::describe::{Routes, doc};
use crate::exec;
use crate::feed;
use crate::state::Api;
use axum::extract::{DefaultBodyLimit, FromRequestParts, State};
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use kip_service::{ExecSession, WorkerService};
use kip_types::api::clone::{CloneAdvice, CloneRequest, ClonesView};
use kip_types::api::{
    AttachRequest, CheckRequest, CheckView, Code, ContentsView, Detail, Details, DetailsRequest, DownRequest, DownView,
    EXEC_PROTOCOL, Event, EventsRequest, ExecRequest, HealthView, Info, InspectRequest, LogLine, LogsRequest, Moved,
    ProcView, Refusal, RemoveRequest, RenameRequest, RunRequest, SignalRequest, SleepRequest, StartRequest,
    StopRequest, UpdateRequest, ValidateRequest, WakeRequest, WhyView,
};

/// What is said of a field that an update does not have.
const ONLY_ANEW: &str = "limits, timing, ports, labels, restart and stop can be changed; for anything else make the proc anew: \
                         `kip apply --replace`, or `kip rm` and `kip run`";

/// How often `run` picks another name when another request takes the one it picked.
const NAME_ATTEMPTS: u32 = 100;

/// All routes, answering on the unix socket; by TCP [`crate::remote`] stands before them.
pub fn router(api: Api) -> Router {
    dashboard::files(all().router())
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .layer(axum::middleware::from_fn(answer::with_request_id))
        .with_state(api)
}

/// The OpenAPI document of this API. It does not depend on the service behind it.
pub fn openapi() -> serde_json::Value {
    all().document()
}

fn all() -> Routes {
    let routes = Routes::new()
        .get("/v1/procs", list, doc("listProcs", "Lists all procs, sorted by name.").json::<Vec<ProcView>>())
        .post("/v1/procs", run, doc("runProc", "Creates a proc and starts it.").body::<RunRequest>().json_with::<ProcView>(201))
        .post("/v1/validate", validate, doc("validateRun", "Refuses what `runProc` would refuse, as far as that can be known without running the program. Leaves nothing.").body::<ValidateRequest>())
        .post("/v1/compare", compare, doc("compareRun", "Reports whether the proc's tarball or secrets differ from the request. Wakes no proc.").body::<RunRequest>().json::<ContentsView>())
        .post("/v1/check", check, doc("checkRun", "Tries whether such a proc can sleep and wake, with a trial proc that is removed afterwards.").body::<CheckRequest>().json::<CheckView>())
        .get("/v1/procs/{name}", inspect, doc("inspectProc", "Returns one proc without waking it.").query::<InspectRequest>().json::<ProcView>())
        .patch("/v1/procs/{name}", update, doc("updateProc", "Changes limits, times, ports, labels, the restart policy and the way to end of a proc, in any tier, without a restart and without waking it.").body::<UpdateRequest>().json::<ProcView>())
        .delete("/v1/procs/{name}", remove, doc("removeProc", "Removes a proc with all it has.").query::<RemoveRequest>())
        .post("/v1/procs/{name}/start", start, doc("startProc", "Starts a stopped proc again, on its files.").query::<StartRequest>().json::<ProcView>())
        .post("/v1/procs/{name}/stop", stop, doc("stopProc", "Ends a proc; its name, files and logs stay.").body::<StopRequest>().json::<ProcView>())
        .post("/v1/procs/{name}/replace", replace, doc("replaceProc", "Creates a proc in place of the one of its name, which ends, with its own files, when the new one is ready. Clients that connect meanwhile reach the one or the other.").body::<RunRequest>().json::<ProcView>())
        .post("/v1/procs/{name}/rename", rename, doc("renameProc", "Gives a proc another name, in any tier, without a restart and without waking it.").body::<RenameRequest>().json::<ProcView>())
        .get("/v1/procs/{name}/clone", clone_advice, doc("adviseClone", "Tells how a clone of a proc would best be made just now, and why. Watches one that runs for half a second, and wakes none.").json::<CloneAdvice>())
        .post("/v1/procs/{name}/clone", clone, doc("cloneProc", "Makes procs that go on from where a proc is, each with a copy of its files, and a name, ports and addresses of its own. A sleeper is not woken.").body::<CloneRequest>().json::<ClonesView>())
        .post("/v1/procs/{name}/signal", signal, doc("signalProc", "Sends a signal to a proc's program, which is woken for it.").body::<SignalRequest>())
        .post("/v1/procs/{name}/sleep", sleep, doc("sleepProc", "Sends a proc to a lower tier and answers when the proc is there.").body::<SleepRequest>().json::<Moved>())
        .post("/v1/procs/{name}/wake", wake, doc("wakeProc", "Wakes a proc and answers when it runs; takes the proc over if only the store has it.").query::<WakeRequest>().json::<Moved>())
        .post("/v1/procs/{name}/exec", exec, doc("execInProc", "Runs a program inside a proc. Needs `Connection: upgrade` and `Upgrade: kip-frames`.").body::<ExecRequest>().upgrade())
        .post("/v1/procs/{name}/attach", attach, doc("attachToProc", "Carries the output of a proc's own program to the client, and input to the program. Needs `Connection: upgrade` and `Upgrade: kip-frames`.").body::<AttachRequest>().upgrade())
        .get("/v1/procs/{name}/why", why, doc("whyProc", "Returns why a proc is in its tier.").json::<WhyView>())
        .get("/v1/procs/{name}/health", health, doc("healthOfProc", "Returns the health of a proc, from its probes if it is awake. The request neither wakes the proc nor keeps it awake.").json::<HealthView>())
        .get("/v1/procs/{name}/details", details, doc("lookIntoProc", "Lists open files, environments, sockets or memory maps of a proc without waking it.").query::<DetailsRequest>().json::<Details>())
        .get("/v1/procs/{name}/logs", logs, doc("readLogs", "Returns the output of a proc, oldest line first.").query::<LogsRequest>().lines::<LogLine>())
        .get("/v1/events", events, doc("readEvents", "Lists events, oldest first; with `since` each event comes once, and none is missed as long as it is kept.").query::<EventsRequest>().lines::<Event>())
        .get("/v1/info", info, doc("aboutDaemon", "Describes this daemon.").json::<Info>())
        .post("/v1/down", down, doc("endDaemon", "Ends all procs and the daemon; or parks them and ends the daemon.").query::<DownRequest>().json::<DownView>())
        .get("/v1/openapi.json", document, doc("readOpenapi", "Returns this document.").json::<serde_json::Map<String, serde_json::Value>>());
    let routes = files::routes(routes);
    let routes = snapshots::routes(routes);
    let routes = keys::routes(routes);
    let routes = backup::routes(routes);
    let routes = volumes::routes(routes);
    let routes = checkpoints::routes(routes);
    let routes = scale::routes(routes);
    let routes = templates::routes(routes);
    let routes = meters::routes(routes);
    let routes = dashboard::routes(routes);
    let routes = tokens::routes(routes);
    let routes = tree::routes(routes);
    let routes = spawned::routes(routes);
    images::routes(routes)
}

/// Made anew each time: it is asked for once, by a person or a generator.
async fn document() -> Json<serde_json::Value> {
    Json(openapi())
}

async fn no_route(uri: Uri) -> RefusalAnswer {
    Refusal::new(Code::NoRoute, format!("this API has no {}: GET /v1/openapi.json says what it has", uri.path())).into()
}

async fn no_method(method: Method, uri: Uri) -> RefusalAnswer {
    let refusal = Refusal::new(Code::NoRoute, format!("{} does not take {method}", uri.path()));
    RefusalAnswer::from(refusal).with_status(StatusCode::METHOD_NOT_ALLOWED)
}

async fn run(State(api): State<Api>, Asked(mut request): Asked<RunRequest>) -> Answer<Response> {
    admit::complete(&mut request, &api.defaults)?;
    let service = api.service.clone();
    let view = api.operate(async move { run_named(&*service, request).await }).await?;
    Ok((StatusCode::CREATED, shown(view)).into_response())
}

/// Nothing is changed: a client asks this before it removes procs for others to take their place.
async fn validate(State(api): State<Api>, Asked(request): Asked<ValidateRequest>) -> Answer<StatusCode> {
    let (mut run, instead_of) = request.parts();
    admit::complete(&mut run, &api.defaults)?;
    let service = api.service.clone();
    api.operate(async move { service.validate(run, instead_of).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn compare(State(api): State<Api>, Asked(mut request): Asked<RunRequest>) -> Answer<Json<ContentsView>> {
    admit::complete(&mut request, &api.defaults)?;
    Ok(Json(api.service.compare(request).await?))
}

async fn check(State(api): State<Api>, Asked(mut request): Asked<CheckRequest>) -> Answer<Json<CheckView>> {
    admit::complete(&mut request.run, &api.defaults)?;
    admit::check_trial(&request)?;
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.check(request).await }).await?))
}

/// Runs `request`; if its name is a stem, under the first free name made of it.
async fn run_named(service: &dyn WorkerService, mut request: RunRequest) -> Result<ProcView, Refusal> {
    if !std::mem::take(&mut request.left_open.name) {
        return service.run(request).await;
    }
    let stem = request.spec.name.clone();
    for _ in 0..NAME_ATTEMPTS {
        let mut named = request.clone();
        named.spec.name = admit::free_name(&stem, &service.names().await?)?;
        let name = named.spec.name.clone();
        match service.run(named).await {
            // Another request took the name in between, or a port is taken; only the first is worth
            // another attempt.
            Err(refusal) if refusal.code == Code::Taken && service.names().await?.contains(&name) => {}
            done => return done,
        }
    }
    Err(Refusal::new(Code::Taken, format!("no free name was found for {stem}: give one with --name")))
}

async fn list(State(api): State<Api>) -> Answer<Json<Vec<ProcView>>> {
    let mut views = api.service.list().await?;
    views.iter_mut().for_each(|view| view.spec.hide_values());
    Ok(Json(views))
}

async fn inspect(
    State(api): State<Api>,
    Name(name): Name,
    by: CallerScope,
    AskedQuery(request): AskedQuery<InspectRequest>,
) -> Answer<Json<ProcView>> {
    if request.env {
        by.may_see_values()?;
        return Ok(Json(api.service.inspect(name).await?));
    }
    Ok(shown(api.service.inspect(name).await?))
}

/// Without what may be secret.
fn shown(mut view: ProcView) -> Json<ProcView> {
    view.spec.hide_values();
    Json(view)
}

fn moved(mut done: Moved) -> Json<Moved> {
    done.proc.spec.hide_values();
    Json(done)
}

async fn health(State(api): State<Api>, Name(name): Name) -> Answer<Json<HealthView>> {
    Ok(Json(api.service.health(name).await?))
}

async fn details(
    State(api): State<Api>,
    Name(name): Name,
    by: CallerScope,
    AskedQuery(request): AskedQuery<DetailsRequest>,
) -> Answer<Json<Details>> {
    if request.of == Detail::Env {
        by.may_see_values()?;
    }
    Ok(Json(api.service.details(name, request.of).await?))
}

async fn remove(
    State(api): State<Api>,
    Name(name): Name,
    AskedQuery(how): AskedQuery<RemoveRequest>,
) -> Answer<StatusCode> {
    let service = api.service.clone();
    api.operate(async move { service.remove(name, how).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn start(
    State(api): State<Api>,
    Name(name): Name,
    AskedQuery(how): AskedQuery<StartRequest>,
) -> Answer<Json<ProcView>> {
    let service = api.service.clone();
    Ok(shown(api.operate(async move { service.start(name, how).await }).await?))
}

async fn stop(State(api): State<Api>, Name(name): Name, Asked(how): Asked<StopRequest>) -> Answer<Json<ProcView>> {
    let service = api.service.clone();
    Ok(shown(api.operate(async move { service.stop(name, how).await }).await?))
}

async fn update(
    State(api): State<Api>,
    Name(name): Name,
    asked: Result<Asked<UpdateRequest>, RefusalAnswer>,
) -> Answer<Json<ProcView>> {
    let Asked(change) = asked.map_err(|refused| refused.with_hint(ONLY_ANEW))?;
    admit::check_update(&change, api.service.inspect(name.clone()).await?.spec)?;
    let service = api.service.clone();
    Ok(shown(api.operate(async move { service.update(name, change).await }).await?))
}

async fn replace(
    State(api): State<Api>,
    Name(name): Name,
    Asked(mut request): Asked<RunRequest>,
) -> Answer<Json<ProcView>> {
    if request.spec.name != name || request.left_open.name {
        return Err(RefusalAnswer::invalid(format!(
            "the request describes {}: it can replace no {name}",
            request.spec.name
        )));
    }
    admit::complete(&mut request, &api.defaults)?;
    let service = api.service.clone();
    Ok(shown(api.operate(async move { service.replace(request).await }).await?))
}

async fn rename(State(api): State<Api>, Name(name): Name, Asked(new): Asked<RenameRequest>) -> Answer<Json<ProcView>> {
    let service = api.service.clone();
    Ok(shown(api.operate(async move { service.rename(name, new).await }).await?))
}

async fn clone(
    State(api): State<Api>,
    Name(name): Name,
    Asked(request): Asked<CloneRequest>,
) -> Answer<Json<ClonesView>> {
    admit::check_clone(&request)?;
    let service = api.service.clone();
    let mut made = api.operate(async move { service.clone_proc(name, request).await }).await?;
    made.clones.iter_mut().for_each(|view| view.spec.hide_values());
    Ok(Json(made))
}

async fn clone_advice(State(api): State<Api>, Name(name): Name) -> Answer<Json<CloneAdvice>> {
    Ok(Json(api.service.clone_advice(name).await?))
}

async fn signal(State(api): State<Api>, Name(name): Name, Asked(request): Asked<SignalRequest>) -> Answer<StatusCode> {
    let service = api.service.clone();
    api.operate(async move { service.signal(name, request).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn sleep(State(api): State<Api>, Name(name): Name, Asked(how): Asked<SleepRequest>) -> Answer<Json<Moved>> {
    let service = api.service.clone();
    Ok(moved(api.operate(async move { service.sleep(name, how).await }).await?))
}

async fn wake(
    State(api): State<Api>,
    Name(name): Name,
    AskedQuery(how): AskedQuery<WakeRequest>,
) -> Answer<Json<Moved>> {
    let service = api.service.clone();
    Ok(moved(api.operate(async move { service.wake(name, how).await }).await?))
}

async fn why(State(api): State<Api>, Name(name): Name) -> Answer<Json<WhyView>> {
    Ok(Json(api.service.why(name).await?))
}

async fn logs(
    State(api): State<Api>,
    Name(name): Name,
    AskedQuery(which): AskedQuery<LogsRequest>,
) -> Answer<Response> {
    Ok(feed::lines(api.service.logs(name, which).await?, api.ending()))
}

async fn events(State(api): State<Api>, AskedQuery(which): AskedQuery<EventsRequest>) -> Answer<Response> {
    Ok(feed::lines(api.service.events(which).await?, api.ending()))
}

async fn info(State(api): State<Api>) -> Answer<Json<Info>> {
    Ok(Json(api.service.info().await?))
}

async fn down(
    State(api): State<Api>,
    AskedQuery(how): AskedQuery<DownRequest>,
    Asked(body): Asked<serde_json::Map<String, serde_json::Value>>,
) -> Answer<Json<DownView>> {
    // A client that believes to have said `park` must not lose every proc.
    if !body.is_empty() {
        return Err(RefusalAnswer::invalid(
            "how the daemon ends is said in the query, as in POST /v1/down?park=true: leave the body empty",
        ));
    }
    if how.within_ms.is_some() && !how.park {
        return Err(RefusalAnswer::invalid("within_ms says how long parking may take: give it with park=true"));
    }
    let (service, ended) = (api.service.clone(), api.clone());
    let view = api.operate(async move {
        let view = service.down(how).await?;
        // In the task: the daemon ends even if the client does not wait.
        ended.went_down();
        Ok(view)
    });
    Ok(Json(view.await?))
}

/// The client's wish to go on in frames after the answer.
struct Upgrade(OnUpgrade);

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = RefusalAnswer;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        let asks = parts.headers.get(UPGRADE).is_some_and(|v| v.as_bytes() == EXEC_PROTOCOL.as_bytes());
        match parts.extensions.remove::<OnUpgrade>() {
            Some(upgrade) if asks => Ok(Upgrade(upgrade)),
            _ => Err(RefusalAnswer::invalid(format!(
                "exec and attach need the headers Connection: upgrade and Upgrade: {EXEC_PROTOCOL}"
            ))
            .with_status(StatusCode::UPGRADE_REQUIRED)),
        }
    }
}

async fn exec(
    State(api): State<Api>,
    Name(name): Name,
    Upgrade(upgrade): Upgrade,
    Asked(request): Asked<ExecRequest>,
) -> Answer<Response> {
    if request.command.first().is_none_or(|program| program.is_empty()) {
        return Err(RefusalAnswer::invalid("no command was given"));
    }
    let service = api.service.clone();
    let session = api.operate(async move { service.exec(name, request).await }).await?;
    Ok(in_frames(&api, upgrade, session))
}

async fn attach(
    State(api): State<Api>,
    Name(name): Name,
    Upgrade(upgrade): Upgrade,
    Asked(request): Asked<AttachRequest>,
) -> Answer<Response> {
    let session = api.service.attach(name, request).await?;
    Ok(in_frames(&api, upgrade, session))
}

fn in_frames(api: &Api, upgrade: OnUpgrade, session: ExecSession) -> Response {
    let ending = api.ending();
    tokio::spawn(async move {
        match upgrade.await {
            Ok(connection) => exec::carry(TokioIo::new(connection), session, ending).await,
            Err(e) => tracing::debug!(error = %e, "exec client is gone"),
        }
    });
    (StatusCode::SWITCHING_PROTOCOLS, [(CONNECTION, "upgrade"), (UPGRADE, EXEC_PROTOCOL)]).into_response()
}
