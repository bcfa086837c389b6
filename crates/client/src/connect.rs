//! One HTTP/1.1 exchange over a fresh connection.

use crate::error::CallError;
use crate::remote::{Remote, Stream};
use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use kip_types::api::Refusal;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

/// Path of the API's socket below a data directory.
pub const SOCKET: &str = "run/api.sock";

/// How a daemon is reached.
#[derive(Debug, Clone)]
pub(crate) enum Way {
    /// By the unix socket of this data directory.
    Local(PathBuf),
    /// By TCP.
    Remote(Remote),
}

/// An answer whose body is still to be read. The connection ends when this is dropped.
#[derive(Debug)]
pub struct Sent {
    pub response: Response<Incoming>,
    pub connection: Connection,
}

/// The task that moves an exchange's bytes; ends with its owner.
#[derive(Debug)]
pub struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Sends `request` and returns its answer if that is not a refusal.
pub async fn send<B>(way: &Way, request: Request<B>) -> Result<Sent, CallError>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let stream: Box<dyn Stream> = match way {
        Way::Local(data) => Box::new(local(data).await?),
        Way::Remote(remote) => remote.connect().await?,
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(CallError::lost)?;
    let connection = Connection(tokio::spawn(async move {
        // The exchange's own futures report what went wrong.
        let _ = connection.with_upgrades().await;
    }));
    let response = sender.send_request(request).await.map_err(CallError::lost)?;
    let sent = Sent { response, connection };
    if sent.response.status().is_success() || sent.response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(sent);
    }
    let refusal: Refusal = serde_json::from_slice(&collect(sent).await?).map_err(CallError::Foreign)?;
    Err(CallError::Refused(refusal))
}

/// The whole body.
pub async fn collect(sent: Sent) -> Result<Bytes, CallError> {
    let Sent { response, connection: _connection } = sent;
    Ok(response.into_body().collect().await.map_err(CallError::lost)?.to_bytes())
}

/// A fresh connection to the daemon of `data`.
pub async fn local(data: &Path) -> Result<UnixStream, CallError> {
    let socket = data.join(SOCKET);
    connect(&socket).await.map_err(|e| CallError::connecting(data, socket, e))
}

async fn connect(socket: &Path) -> io::Result<UnixStream> {
    let (Some(dir), Some(file)) = (socket.parent(), socket.file_name()) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    // A socket's address holds 107 bytes (unix(7)) and data directories may lie deep: the way
    // through the descriptor is always short.
    let dir = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    UnixStream::connect(Path::new(&format!("/proc/self/fd/{}", dir.as_raw_fd())).join(file)).await
}
