//! The API before a service, from its socket to its end.

use crate::notify;
use kip_api::{Api, ApiServices, ApiSocket, BindError, DataLock, Ending, RemoteListener, Tokens};
use kip_service::{SpawnService, TreeService, WorkerService};
use kip_types::spec::Timing;
use std::fmt::Display;
use std::future::Future;
use std::sync::Arc;

/// Where the API is offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiAddresses {
    /// `unix:` and the path of the socket.
    pub socket: String,
    /// The URL by TCP, if it is offered there.
    pub url: Option<String>,
}

/// The API cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum OfferError {
    /// Its socket.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Its server.
    #[error(transparent)]
    Serve(#[from] kip_api::ServeError),
}

/// How clients come to the API, and what they may leave open.
pub(crate) struct Doors {
    /// Number of the group whose members may use the socket.
    pub(crate) group: Option<u32>,
    /// The clients that are let in by TCP.
    pub(crate) tokens: Tokens,
    /// The listener there.
    pub(crate) remote: Option<RemoteListener>,
    /// What procs get whose owner does not say when they sink.
    pub(crate) timing: Timing,
}

/// What the API asks.
pub(crate) struct Services {
    /// Everything about procs.
    pub(crate) worker: Arc<dyn WorkerService>,
    /// The name tree.
    pub(crate) tree: Arc<dyn TreeService>,
    /// Procs by spawn.
    pub(crate) spawner: Arc<dyn SpawnService>,
}

/// Serves `services` until `end` or `kip down`; `ready` tells when clients can connect, and where.
/// The socket's file is gone when this returns.
pub(crate) async fn serve<E: Display>(
    lock: &DataLock,
    services: Services,
    doors: Doors,
    ready: impl FnOnce(&ApiAddresses) -> Result<(), E>,
    end: impl Future<Output = ()> + Send,
) -> Result<Ending, OfferError> {
    let Doors { group, tokens, remote, timing } = doors;
    let mut socket = ApiSocket::bind(lock, group)?;
    let Services { worker, tree, spawner } = services;
    let api = Api::new(ApiServices { service: worker, tree, spawner }, timing, tokens);
    let url = remote.as_ref().map(RemoteListener::url);
    let addresses = ApiAddresses { socket: format!("unix:{}", socket.path().display()), url };
    // The socket listens already: a program that reads this can connect. A reader that is gone is
    // no reason to end.
    if let Err(e) = ready(&addresses) {
        tracing::debug!(error = %e, "no program reads the ready line");
    }
    notify::notify(notify::READY);
    let ending = api.serve(&mut socket, remote, end).await?;
    notify::notify(notify::STOPPING);
    Ok(ending)
}

#[cfg(test)]
#[path = "../../api/tests/fake/mod.rs"]
mod fake;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn serves_until_it_is_asked_to_end() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DataLock::take(dir.path(), None).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let worker = Arc::new(fake::Fake::default());
        let (tree, spawner) = (Arc::new(fake::FakeTree::default()), Arc::new(fake::FakeSpawner));
        let services = Services { worker, tree, spawner };
        let client = kip_client::Client::new(dir.path());
        let end = async { drop(stopped.await) };
        let tokens = Tokens::open(&lock).unwrap();
        let doors = Doors { group: None, tokens, remote: None, timing: Timing::default() };
        let asks = async {
            while client.info().await.is_err() {
                tokio::task::yield_now().await;
            }
            drop(stop);
        };
        let mut told = None;
        let ready = |addresses: &ApiAddresses| {
            told = Some(addresses.clone());
            Err("its reader is gone")
        };
        let (ending, ()) = tokio::join!(serve(&lock, services, doors, ready, end), asks);
        assert_eq!(ending.unwrap(), Ending::Asked);
        let socket = dir.path().join(kip_client::SOCKET);
        assert_eq!(told, Some(ApiAddresses { socket: format!("unix:{}", socket.display()), url: None }));
        assert!(!socket.exists());
    }
}
