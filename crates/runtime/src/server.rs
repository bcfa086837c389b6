//! Connections as they come, and those of the last daemon.

use crate::connection::{Connection, Service, turn_away};
use crate::frames::Stream;
use crate::home::{RuntimeHome, RuntimeHomes};
use crate::leases::{self, Leases};
use crate::wire::{FailureCode, RuntimeFailure};
use kip_service::TreeService;
use kip_types::name::Realm;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Most connections of a proc.
const MOST_CONNECTIONS: usize = 64;
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
    /// The realm of all procs.
    pub realm: Realm,
}

/// How many connections each proc has, by its directory.
type Counts = Arc<parking_lot::Mutex<BTreeMap<std::path::PathBuf, usize>>>;

/// Counts a connection as long as it lives.
struct Counted {
    counts: Counts,
    of: std::path::PathBuf,
}

impl Counted {
    /// None if the proc has as many as it may.
    fn new(counts: &Counts, home: &dyn RuntimeHome, at_most: usize) -> Option<Counted> {
        let of = home.directory();
        let mut all = counts.lock();
        let count = all.entry(of.clone()).or_default();
        if *count >= at_most {
            return None;
        }
        *count += 1;
        Some(Counted { counts: Arc::clone(counts), of })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = self.counts.lock();
        let left = all.get_mut(&self.of).map(|count| {
            *count -= 1;
            *count
        });
        if left == Some(0) {
            all.remove(&self.of);
        }
    }
}

/// Takes up what the last daemon has left, and serves all that comes from now on. To be called in a
/// runtime, once all procs are known.
///
/// # Errors
/// The socket cannot be polled.
pub fn serve(parts: RuntimeParts) -> io::Result<()> {
    let RuntimeParts { listener, homes, tree, realm } = parts;
    // As that of a connection.
    #[allow(deprecated)]
    let listener = AsyncFd::with_interest(listener, Interest::READABLE)?;
    let leases = Arc::new(Leases::new(Arc::clone(&tree), realm.clone()));
    leases.take_up(&*homes);
    tokio::spawn(leases::follow(Arc::clone(&leases)));
    let service = Arc::new(Service { tree, realm, leases });
    let counts = Counts::default();
    let mut last = 0;
    for home in homes.all() {
        for number in home.connections() {
            last = last.max(number);
            let Some(connection) = Connection::held(Arc::clone(&service), Arc::clone(&home), number) else {
                home.let_go(number);
                continue;
            };
            let counted = Counted::new(&counts, &*home, usize::MAX);
            tokio::spawn(async move {
                connection.resume().await;
                drop(counted);
            });
        }
    }
    tokio::spawn(accept(listener, service, homes, counts, AtomicU64::new(last + 1)));
    Ok(())
}

async fn accept(
    listener: AsyncFd<OwnedFd>,
    service: Arc<Service>,
    homes: Arc<dyn RuntimeHomes>,
    counts: Counts,
    next: AtomicU64,
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
            continue;
        };
        let (service, number) = (Arc::clone(&service), next.fetch_add(1, Ordering::Relaxed));
        let counted = Counted::new(&counts, &*home, MOST_CONNECTIONS);
        tokio::spawn(async move {
            match counted {
                Some(_counted) => Connection::begin(service, home, number, fd).await,
                None => {
                    let Ok(stream) = Stream::new(Arc::new(fd)) else { return };
                    let message = format!("the proc has {MOST_CONNECTIONS} connections, more are not possible");
                    turn_away(&stream, 0, RuntimeFailure::new(FailureCode::TooMany, message)).await;
                }
            }
        });
    }
}
