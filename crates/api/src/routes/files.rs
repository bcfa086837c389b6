//! The routes of `kip cp`: archives both ways, piece by piece.

use crate::answer::{Answer, AskedQuery, CallerScope, Name};
use crate::describe::{ARCHIVE, Routes, doc};
use crate::state::Api;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use kip_service::Feed;
use kip_types::api::{Code, FilesWritten, ReadFilesRequest, Refusal, WriteFilesRequest};
use std::io;
use tokio::sync::{mpsc, watch};

/// Pieces of a body that wait for the worker.
const PIECES: usize = 4;

/// Its routes.
pub fn routes(routes: Routes) -> Routes {
    const PATH: &str = "/v1/procs/{name}/files";
    routes
        .get(
            PATH,
            read,
            doc("readFiles", "A file or directory of a proc as a tar archive. Does not wake it.")
                .query::<ReadFilesRequest>()
                .archive(),
        )
        .put(
            PATH,
            write,
            doc(
                "writeFiles",
                "Unpacks a tar archive in a proc, where its files belong to root. Does not wake it; what an entry that is refused \
                 comes after stays.",
            )
            .query::<WriteFilesRequest>()
            .takes_archive()
            .json::<FilesWritten>(),
        )
}

async fn read(
    State(api): State<Api>,
    Name(name): Name,
    by: CallerScope,
    AskedQuery(request): AskedQuery<ReadFilesRequest>,
) -> Answer<Response> {
    by.may_see_files()?;
    Ok(archive(api.service.read_files(name, request).await?, api.ending()))
}

/// An error ends the body before its end, so that no client takes it for whole.
fn archive(feed: Feed<Vec<u8>>, ending: watch::Receiver<bool>) -> Response {
    let pieces = stream::unfold(Some((feed, ending)), |going| async move {
        let (mut feed, mut ending) = going?;
        let piece = tokio::select! {
            _ = ending.wait_for(|ends| *ends) => return Some((Err(io::Error::other("the daemon ends")), None)),
            piece = feed.recv() => piece?,
        };
        match piece {
            Ok(piece) => Some((Ok(Bytes::from(piece)), Some((feed, ending)))),
            Err(refusal) => Some((Err(io::Error::other(refusal.message)), None)),
        }
    });
    ([(CONTENT_TYPE, ARCHIVE)], Body::from_stream(pieces)).into_response()
}

async fn write(
    State(api): State<Api>,
    Name(name): Name,
    AskedQuery(request): AskedQuery<WriteFilesRequest>,
    body: Body,
) -> Answer<Json<FilesWritten>> {
    let (sender, archive) = mpsc::channel(PIECES);
    let service = api.service.clone();
    tokio::spawn(async move {
        let mut body = body.into_data_stream();
        while let Some(piece) = body.next().await {
            let gone = |e| Refusal::new(Code::Invalid, format!("the archive breaks off: {e}"));
            if sender.send(piece.map(Vec::from).map_err(gone)).await.is_err() {
                return;
            }
        }
    });
    Ok(Json(api.operate(async move { service.write_files(name, request, archive).await }).await?))
}
