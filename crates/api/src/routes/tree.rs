//! Routes of the name tree. All of them are of the one realm that this daemon has.

use crate::answer::{Answer, Asked, AskedQuery, BodyBytes, CallerScope, RefusalAnswer};
use crate::describe::{BYTES, Routes, doc};
use crate::feed;
use crate::state::Api;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, ETAG};
use axum::response::{IntoResponse, Response};
use kip_types::api::tree::{
    GrantTreeLeaseRequest, MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, TreeChanges,
    TreeNodeRequest, WatchTreeRequest, WriteTreeFileRequest,
};
use kip_types::name::Realm;
use kip_types::tree::{NodeStat, TreeLease, TreeLeaseId};

/// The routes below `/v1/tree`.
pub fn routes(routes: Routes) -> Routes {
    let stat = doc("statTreeNode", "Returns a node of the name tree, without its contents.")
        .query::<TreeNodeRequest>()
        .json::<NodeStat>();
    let remove = doc("removeTreeNode", "Removes a file or an empty directory of the name tree.")
        .query::<RemoveTreeNodeRequest>();
    let list = doc("listTree", "Lists the nodes of a directory of the name tree, sorted by name.")
        .query::<TreeNodeRequest>()
        .json::<Vec<NodeStat>>();
    let read = doc("readTreeFile", "Returns the contents of a file of the name tree; the header `etag` has its version in quotes. Needs a token that allows changes.").query::<TreeNodeRequest>().bytes();
    let write = doc(
        "writeTreeFile",
        "Makes a file of the name tree, or gives it other contents: at most 1 MiB. On disk when answered.",
    )
    .query::<WriteTreeFileRequest>()
    .takes_bytes()
    .json::<NodeStat>();
    let mkdir = doc("makeTreeDirectory", "Makes a directory of the name tree.")
        .body::<MakeTreeDirectoryRequest>()
        .json_with::<NodeStat>(201);
    let rename = doc("renameTreeNode", "Moves a file of the name tree, or a directory with all that is in it.")
        .body::<RenameTreeNodeRequest>()
        .json::<NodeStat>();
    let watch = doc("watchTree", "Sends changes of the name tree as they come, each once and in their order, one revision on each line; the first line has no change.").query::<WatchTreeRequest>().lines::<TreeChanges>();
    let leases = doc("listTreeLeases", "Lists the leases of the name tree.").json::<Vec<TreeLease>>();
    let grant = doc(
        "grantTreeLease",
        "Makes a lease. Files that are written with it go when it ends: its client keeps it alive.",
    )
    .body::<GrantTreeLeaseRequest>()
    .json_with::<TreeLease>(201);
    let keep = doc("keepTreeLease", "Gives a lease its whole time again.").json::<TreeLease>();
    let revoke = doc("revokeTreeLease", "Ends a lease; its files go with it, at once.");
    routes
        .get("/v1/tree/node", stat_node, stat)
        .delete("/v1/tree/node", remove_node, remove)
        .get("/v1/tree/nodes", list_nodes, list)
        .get("/v1/tree/file", read_file, read)
        .put("/v1/tree/file", write_file, write)
        .post("/v1/tree/directories", make_directory, mkdir)
        .post("/v1/tree/rename", rename_node, rename)
        .get("/v1/tree/watch", watch_nodes, watch)
        .get("/v1/tree/leases", list_leases, leases)
        .post("/v1/tree/leases", grant_lease, grant)
        .post("/v1/tree/leases/{lease}/keep", keep_lease, keep)
        .delete("/v1/tree/leases/{lease}", revoke_lease, revoke)
}

/// Whose tree it is: a client cannot say, and so reaches no other realm's.
fn realm() -> Realm {
    Realm::default()
}

async fn stat_node(State(api): State<Api>, AskedQuery(of): AskedQuery<TreeNodeRequest>) -> Answer<Json<NodeStat>> {
    Ok(Json(api.tree.stat(realm(), of.path).await?))
}

async fn remove_node(
    State(api): State<Api>,
    AskedQuery(request): AskedQuery<RemoveTreeNodeRequest>,
) -> Answer<StatusCode> {
    let tree = api.tree.clone();
    api.operate(async move { tree.remove(realm(), request).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn list_nodes(
    State(api): State<Api>,
    AskedQuery(of): AskedQuery<TreeNodeRequest>,
) -> Answer<Json<Vec<NodeStat>>> {
    Ok(Json(api.tree.list(realm(), of.path).await?))
}

async fn read_file(
    State(api): State<Api>,
    by: CallerScope,
    AskedQuery(of): AskedQuery<TreeNodeRequest>,
) -> Answer<Response> {
    by.may_see_files()?;
    let file = api.tree.read(realm(), of.path).await?;
    let etag = format!("\"{}\"", file.node.version);
    Ok(([(CONTENT_TYPE, BYTES.to_owned()), (ETAG, etag)], file.contents).into_response())
}

async fn write_file(
    State(api): State<Api>,
    AskedQuery(request): AskedQuery<WriteTreeFileRequest>,
    BodyBytes(contents): BodyBytes,
) -> Answer<Json<NodeStat>> {
    if request.new && request.version.is_some() {
        return Err(RefusalAnswer::invalid("a file cannot be new and have a version: give one of the two"));
    }
    let tree = api.tree.clone();
    Ok(Json(api.operate(async move { tree.write(realm(), request, contents.into()).await }).await?))
}

async fn make_directory(
    State(api): State<Api>,
    Asked(request): Asked<MakeTreeDirectoryRequest>,
) -> Answer<(StatusCode, Json<NodeStat>)> {
    let tree = api.tree.clone();
    let made = api.operate(async move { tree.make_directory(realm(), request).await }).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

async fn rename_node(State(api): State<Api>, Asked(request): Asked<RenameTreeNodeRequest>) -> Answer<Json<NodeStat>> {
    let tree = api.tree.clone();
    Ok(Json(api.operate(async move { tree.rename(realm(), request).await }).await?))
}

async fn watch_nodes(State(api): State<Api>, AskedQuery(request): AskedQuery<WatchTreeRequest>) -> Answer<Response> {
    Ok(feed::lines(api.tree.watch(realm(), request).await?, api.ending()))
}

async fn list_leases(State(api): State<Api>) -> Answer<Json<Vec<TreeLease>>> {
    Ok(Json(api.tree.leases(realm()).await?))
}

async fn grant_lease(
    State(api): State<Api>,
    Asked(request): Asked<GrantTreeLeaseRequest>,
) -> Answer<(StatusCode, Json<TreeLease>)> {
    let tree = api.tree.clone();
    let lease = api.operate(async move { tree.grant_lease(realm(), request).await }).await?;
    Ok((StatusCode::CREATED, Json(lease)))
}

fn lease(text: &str) -> Answer<TreeLeaseId> {
    text.parse().map_err(|e| RefusalAnswer::invalid(format!("{e}")))
}

async fn keep_lease(State(api): State<Api>, Path(id): Path<String>) -> Answer<Json<TreeLease>> {
    let (tree, id) = (api.tree.clone(), lease(&id)?);
    Ok(Json(api.operate(async move { tree.keep_lease(realm(), id).await }).await?))
}

async fn revoke_lease(State(api): State<Api>, Path(id): Path<String>) -> Answer<StatusCode> {
    let (tree, id) = (api.tree.clone(), lease(&id)?);
    api.operate(async move { tree.revoke_lease(realm(), id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
