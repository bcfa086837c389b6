//! Connections as they come, and those of the last daemon.

use crate::connection::{Client, Connection, Service, turn_away};
use crate::frames::Stream;
use crate::home::RuntimeHomes;
use crate::leases::{self, Leases};
use crate::share::{MOST_CONNECTIONS, ProcShares};
use crate::wire::{FailureCode, RuntimeFailure};
use kip_service::{SpawnPrograms, TreeService};
use kip_types::name::Realm;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// What cannot be accepted now is tried again after this.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// What the runtime socket is served with.
pub struct RuntimeParts {
    /// The socket of [`crate::listen`].
    pub listener: OwnedFd,
    /// All procs.
    pub homes: Arc<dyn RuntimeHomes>,
    /// The name tree.
    pub tree: Arc<dyn TreeService>,
    /// Procs by spawn.
    pub spawns: Arc<dyn SpawnPrograms>,
    /// The realm of all procs.
    pub realm: Realm,
}

/// Takes up what the last daemon has left, and serves all that comes from now on. To be called in a
/// runtime, once all procs are known.
///
/// # Errors
/// The socket cannot be polled.
pub fn serve(parts: RuntimeParts) -> io::Result<()> {
    let RuntimeParts { listener, homes, tree, spawns, realm } = parts;
    // As that of a connection.
    #[allow(deprecated)]
    let listener = AsyncFd::with_interest(listener, Interest::READABLE)?;
    let leases = Arc::new(Leases::new(Arc::clone(&tree), realm.clone()));
    leases.take_up(&*homes);
    tokio::spawn(leases::follow(Arc::clone(&leases)));
    let service = Arc::new(Service { tree, spawns, realm, leases });
    let shares = Arc::new(ProcShares::default());
    let mut last = 0;
    for home in homes.all() {
        for number in home.connections() {
            last = last.max(number);
            let share = shares.of(&*home);
            let place = share.place();
            let client = Client { home: Arc::clone(&home), share };
            match Connection::held(Arc::clone(&service), client, number, place) {
                Some(connection) => drop(tokio::spawn(connection.resume())),
                None => home.let_go(number),
            }
        }
    }
    tokio::spawn(accept(listener, service, homes, shares, last));
    Ok(())
}

async fn accept(
    listener: AsyncFd<OwnedFd>,
    service: Arc<Service>,
    homes: Arc<dyn RuntimeHomes>,
    shares: Arc<ProcShares>,
    mut last: u64,
) {
    loop {
        let Ok(mut ready) = listener.readable().await else { return };
        let fd = match accept_with(listener.get_ref(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(fd) => fd,
            Err(Errno::AGAIN) => {
                ready.clear_ready();
                continue;
            }
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(error) => {
                tracing::warn!(%error, "a runtime connection cannot be accepted");
                tokio::time::sleep(AGAIN_AFTER).await;
                continue;
            }
        };
        // By the user that has connected, whose id the kernel tells.
        let uid = sockopt::socket_peercred(&fd).map(|peer| peer.uid.as_raw());
        let Some(home) = uid.ok().and_then(|uid| homes.of_user(uid)) else {
            tracing::debug!(?uid, "a runtime connection of no proc");
            tokio::spawn(refuse(fd, None));
            continue;
        };
        last += 1;
        let share = shares.of(&*home);
        match share.place() {
            Some(place) => {
                let client = Client { home, share };
                tokio::spawn(Connection::begin(Arc::clone(&service), client, last, fd, place));
            }
            None => {
                let message = format!("the proc has {MOST_CONNECTIONS} connections, more are not possible");
                tokio::spawn(refuse(fd, Some(RuntimeFailure::new(FailureCode::TooMany, message))));
            }
        }
    }
}

/// Ends a connection that is not served. To close it may take time: something may be in it already.
async fn refuse(fd: OwnedFd, why: Option<RuntimeFailure>) {
    match (Stream::new(Arc::new(fd), None), why) {
        (Ok(stream), Some(failure)) => turn_away(&stream, 0, failure).await,
        (Ok(stream), None) => stream.end().await,
        (Err(error), _) => tracing::debug!(%error, "a runtime connection is closed"),
    }
}
