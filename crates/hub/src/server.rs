//! The hub's life: serve the API on the socket until asked to end, then let what was begun come to its end.
//!
//! ```text
//! serving --shutdown or down--> ending: no new connections, feeds and execs end
//!         --operations done, or DRAIN passed--> ended
//! ```

use crate::answer::Refused;
use crate::remote::Remote;
use crate::routes;
use crate::service::Service;
use crate::socket::ApiSocket;
use crate::tokens::Tokens;
use kip_types::api::{Code, Refusal};
use kip_types::spec::Timing;
use std::future::{Future, IntoFuture};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How long operations that were begun may go on after the hub was asked to end. What takes longer is finished or
/// undone by the next daemon, like after a crash.
const DRAIN: Duration = Duration::from_secs(10);

/// Why the hub ended.
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

/// The hub of one data directory. Clones share it.
pub struct Hub<S> {
    pub(crate) service: Arc<S>,
    pub(crate) defaults: Timing,
    pub(crate) tokens: Arc<Tokens>,
    /// True once `down` was carried out.
    down: watch::Sender<bool>,
    /// True once the hub is ending for any reason.
    ending: watch::Sender<bool>,
    /// Operations under way.
    operations: watch::Sender<usize>,
}

impl<S> Clone for Hub<S> {
    fn clone(&self) -> Self {
        Hub {
            service: self.service.clone(),
            defaults: self.defaults,
            tokens: self.tokens.clone(),
            down: self.down.clone(),
            ending: self.ending.clone(),
            operations: self.operations.clone(),
        }
    }
}

/// Counts an operation as under way while it lives.
struct UnderWay(watch::Sender<usize>);

impl UnderWay {
    fn begin(count: &watch::Sender<usize>) -> UnderWay {
        count.send_modify(|n| *n += 1);
        UnderWay(count.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

impl<S: Service> Hub<S> {
    /// A hub before `service`. `defaults` is what procs get whose owner does not say when they sink,
    /// `tokens` decides which clients are let in by TCP.
    pub fn new(service: Arc<S>, defaults: Timing, tokens: Tokens) -> Hub<S> {
        Hub {
            service,
            defaults,
            tokens: Arc::new(tokens),
            down: watch::Sender::new(false),
            ending: watch::Sender::new(false),
            operations: watch::Sender::new(0),
        }
    }

    /// Serves the API on `socket`, and by TCP at `remote`, until `shutdown` completes or a `down` was carried out.
    pub async fn serve(
        &self,
        socket: &mut ApiSocket,
        remote: Option<Remote>,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<Ending, ServeError> {
        let listener = socket.listener().map_err(ServeError::Listen)?;
        let mut ending = self.ending.subscribe();
        let server = axum::serve(listener, routes::router(self.clone())).with_graceful_shutdown(async move {
            // The sender cannot be gone: this hub holds it.
            let _ = ending.wait_for(|ends| *ends).await;
        });
        // A task of its own, so that connections are accepted and drained while this one waits for the end.
        let mut server = tokio::spawn(server.into_future());
        let mut abroad = tokio::task::JoinSet::new();
        if let Some(remote) = remote {
            abroad.spawn(remote.serve(self.clone(), self.ending()));
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
            while abroad.join_next().await.is_some() {}
        });
        if drained.await.is_err() {
            tracing::warn!(operations = *self.operations.borrow(), "ending although operations or clients remain");
            server.abort();
        }
        Ok(why)
    }

    /// Carries out `work` to its end, whether or not the caller is still there to hear of it.
    pub(crate) async fn operate<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
    ) -> Result<T, Refused> {
        let under_way = UnderWay::begin(&self.operations);
        let task = tokio::spawn(async move {
            let done = work.await;
            drop(under_way);
            done
        });
        match task.await {
            Ok(done) => Ok(done?),
            Err(e) => {
                tracing::error!(error = %e, "an operation died");
                Err(Refusal::new(Code::Failed, "the daemon failed at this; its log says where").into())
            }
        }
    }

    /// Whether the hub is ending.
    pub(crate) fn ending(&self) -> watch::Receiver<bool> {
        self.ending.subscribe()
    }

    /// Makes [`Hub::serve`] end with [`Ending::Down`].
    pub(crate) fn went_down(&self) {
        self.down.send_replace(true);
    }
}
