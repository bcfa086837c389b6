//! The calls of `kip cp`: archives both ways, piece by piece.

use crate::client::{Client, escaped, parse};
use crate::connect::{self, Connection, collect};
use crate::error::CallError;
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::{Body, Bytes, Frame, Incoming};
use kip_types::api::{FilesWritten, ReadFilesRequest, WriteFilesRequest};
use kip_types::name::ProcName;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// A tar archive as the daemon sends it.
#[derive(Debug)]
pub struct Archive {
    body: Incoming,
    _connection: Connection,
}

impl Archive {
    /// The next piece, or none at the end.
    ///
    /// # Errors
    /// It breaks off.
    pub async fn next(&mut self) -> Result<Option<Bytes>, CallError> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(e)) => return Err(CallError::lost(e)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }
}

/// A tar archive for the daemon, as it comes. An error ends the call.
#[derive(Debug)]
pub struct Pieces(pub mpsc::Receiver<io::Result<Vec<u8>>>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| piece.map(|piece| Frame::data(piece.into()))))
    }
}

impl Client {
    /// What is at a path in a proc. Does not wake it.
    pub async fn read_files(&self, name: &ProcName, request: &ReadFilesRequest) -> Result<Archive, CallError> {
        let path = format!("/v1/procs/{name}/files?path={}&follow={}", escaped(&request.path), request.follow);
        let sent = self.send(Method::GET, &path, Bytes::new()).await?;
        Ok(Archive { body: sent.response.into_body(), _connection: sent.connection })
    }

    /// Puts what is in an archive at a path in a proc. Does not wake it.
    pub async fn write_files(
        &self,
        name: &ProcName,
        request: &WriteFilesRequest,
        archive: Pieces,
    ) -> Result<FilesWritten, CallError> {
        let path = format!("/v1/procs/{name}/files?path={}&rename={}", escaped(&request.path), request.rename);
        let request = self.request(Method::PUT, &path).body(archive);
        let request = request.expect("a name is a path segment, the path is escaped and the rest is constant");
        parse(&collect(connect::send(&self.way, request).await?).await?)
    }
}
