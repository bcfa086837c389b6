//! The API's life: serve the API on the socket until asked to end, then let what was begun come to
//! its end.
//!
//! ```text
//! serving --shutdown or down--> ending: no new connections, feeds and execs end
//!         --operations done, or DRAIN passed--> ended
//! ```

use crate::remote::RemoteListener;
use crate::routes;
use crate::socket::ApiSocket;
use crate::state::Api;
use std::future::{Future, IntoFuture};
use std::io;
use std::time::Duration;

/// How long operations that were begun may go on after the API was asked to end. What takes longer
/// is finished or undone by the next daemon, like after a crash.
const DRAIN: Duration = Duration::from_secs(10);

/// Why the API ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The caller's shutdown future completed; procs run on.
    Asked,
    /// `down` was carried out; there are no procs any more.
    Down,
}

/// The API could not be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The listener could not be registered with the runtime.
    #[error("cannot serve the API's socket")]
    Listen(#[source] io::Error),
    /// Accepting connections came to an end.
    #[error("the API's server ended")]
    Accept(#[source] io::Error),
}

impl Api {
    /// Serves the API on `socket`, and by TCP at `remote`, until `shutdown` completes or a `down`
    /// was carried out.
    pub async fn serve(
        &self,
        socket: &mut ApiSocket,
        remote: Option<RemoteListener>,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<Ending, ServeError> {
        let listener = socket.listener().map_err(ServeError::Listen)?;
        let mut ending = self.ending.subscribe();
        let server = axum::serve(listener, routes::router(self.clone())).with_graceful_shutdown(async move {
            // The sender cannot be gone: this API holds it.
            let _ = ending.wait_for(|ends| *ends).await;
        });
        // A task of its own, so that connections are accepted and drained while this one waits for
        // the end.
        let mut server = tokio::spawn(server.into_future());
        let mut remote_server = tokio::task::JoinSet::new();
        if let Some(remote) = remote {
            remote_server.spawn(remote.serve(self.clone(), self.ending()));
        }
        let mut down = self.down.subscribe();
        let why = tokio::select! {
            () = shutdown => Ending::Asked,
            _ = down.wait_for(|down| *down) => Ending::Down,
            ended = &mut server => {
                let ended = ended.unwrap_or_else(|e| Err(io::Error::other(e)));
                return Err(ServeError::Accept(ended.err().unwrap_or_else(|| io::ErrorKind::BrokenPipe.into())));
            }
        };
        self.ending.send_replace(true);
        let mut operations = self.operations.subscribe();
        let drained = tokio::time::timeout(DRAIN, async {
            let _ = operations.wait_for(|n| *n == 0).await;
            let _ = (&mut server).await;
            while remote_server.join_next().await.is_some() {}
        });
        if drained.await.is_err() {
            tracing::warn!(operations = *self.operations.borrow(), "ending although operations or clients remain");
            server.abort();
        }
        Ok(why)
    }
}
