//! A daemon from its start to its end: each part in its order.

use crate::group::{self, GroupError};
use crate::log::{self, LogError};
use crate::options::{Listen, Options};
use crate::serve::{ApiAddresses, Doors, OfferError, Services, serve};
use crate::signals::Signals;
#[cfg(feature = "otel")]
use crate::traces::{Traces, TracesError};
use crate::tree::KeptTree;
use crate::{heap, notify};
use kip_api::{DataLock, Ending, ListenError, LockError, RemoteListener, Tokens, TokensError};
use kip_spawn::{SpawnParts, Spawner};
use kip_worker::{Config, OpenWorkerError, Worker};
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// How long threads of a daemon that has ended are waited for. What still runs is a client that
/// hangs on or a blocking call; the next daemon recovers from either.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A daemon cannot be started, or served to its end.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// A fault at a step that no daemon has.
    #[error("--fault-at {0}: there is no such step; `list` shows them")]
    NoStep(String),
    /// It is not root.
    #[error("the daemon builds namespaces and cgroups, for which it must be root: use sudo kip up")]
    NotRoot,
    /// The group that may use the API.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The data directory is not ours alone.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// Files that may be open.
    #[error("cannot raise the limit of open files")]
    OpenFiles(#[source] io::Error),
    /// Its mount namespace.
    #[error("cannot enter a mount namespace of its own for {}", .data.display())]
    Mounts {
        /// The data directory.
        data: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its threads.
    #[error(transparent)]
    Threads(io::Error),
    /// What is to be logged.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The tokens.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// The API by TCP.
    #[error(transparent)]
    Remote(#[from] ListenError),
    /// Traces of wakes.
    #[cfg(feature = "otel")]
    #[error(transparent)]
    Traces(#[from] TracesError),
    /// Where this program is.
    #[error("cannot find this program's own path")]
    OwnPath(#[source] io::Error),
    /// A program that is started by the daemon.
    #[error("{name} is not in {}: install Kip's programs together", .dir.display())]
    Program {
        /// Which.
        name: &'static str,
        /// Where it should be.
        dir: PathBuf,
    },
    /// The worker.
    #[error("cannot open {}", .data.display())]
    Open {
        /// The data directory.
        data: PathBuf,
        /// Why.
        #[source]
        source: Box<OpenWorkerError>,
    },
    /// The runtime socket.
    #[error("cannot serve the runtime socket of procs")]
    Runtime(#[source] io::Error),
    /// Signals.
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    /// The API.
    #[error(transparent)]
    Serve(#[from] OfferError),
}

/// Runs the daemon to its end. To be called while the process has one thread; `ready` tells when
/// clients can connect, and where.
///
/// # Errors
/// See [`DaemonError`].
pub fn run<E: Display>(
    options: Options,
    ready: impl FnOnce(&ApiAddresses) -> Result<(), E>,
) -> Result<(), DaemonError> {
    let (lock, group) = take(&options)?;
    let runtime = Runtime::new().map_err(DaemonError::Threads)?;
    let done = runtime.block_on(up(&lock, group, options, ready));
    runtime.shutdown_timeout(LAST_WORDS);
    done
}

/// What has to be done while the process has one thread: the fault to inject, the lock, its own
/// mount namespace. Returns the number of the group that may use the API, too.
fn take(options: &Options) -> Result<(DataLock, Option<u32>), DaemonError> {
    if let Some(step) = options.fault_at.as_ref().filter(|step| !kip_sys::fault::arm(step)) {
        return Err(DaemonError::NoStep(step.clone()));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(DaemonError::NotRoot);
    }
    let group = options.group.as_deref().map(group::id_of).transpose()?;
    let lock = DataLock::take(&options.data, group)?;
    // Six for each proc, and one for each further socket.
    kip_sys::process::raise_nofile().map_err(DaemonError::OpenFiles)?;
    heap::map_large_memory();
    kip_worker::enter_private_mounts(&options.data)
        .map_err(|source| DaemonError::Mounts { data: options.data.clone(), source })?;
    Ok((lock, group))
}

async fn up<E: Display>(
    lock: &DataLock,
    group: Option<u32>,
    options: Options,
    ready: impl FnOnce(&ApiAddresses) -> Result<(), E>,
) -> Result<(), DaemonError> {
    log::to_stderr(&options.log)?;
    // Before anything is taken up: what is wrong with these is a matter of the command line.
    let tokens = Tokens::open(lock)?;
    let remote = bind(options.listen.as_ref()).await?;
    let data = lock.data().to_owned();
    let tree = tokio::task::spawn_blocking(move || KeptTree::open(&data)).await.expect("to open it does not panic");
    #[cfg(feature = "otel")]
    let traces = Traces::open(options.traces.as_deref(), lock.data())?;
    #[cfg(feature = "otel")]
    let observer = traces.clone().map(|traces| traces as Arc<dyn kip_worker::WakeObserver>);
    #[cfg(not(feature = "otel"))]
    let observer = None;
    let config = Config {
        data: lock.data().to_owned(),
        criu: options.criu,
        programs: programs()?,
        only_criu: options.only_criu,
        supersede: options.supersede,
        progress: notify::goes_on,
        set_memory: options.set_memory,
        observer,
        store: options.store,
        collect_every: options.collect_every,
        memory: options.memory,
        disk: options.disk,
        cache: options.cache,
        own_file: Some(tree.file()),
    };
    let opened = Worker::open(config).await;
    let worker = opened.map_err(|e| DaemonError::Open { data: lock.data().to_owned(), source: Box::new(e) })?;
    let mut signals = Signals::listen().map_err(DaemonError::Signals)?;
    let end = signals.end(remote.as_ref().and_then(RemoteListener::tls));
    let doors = Doors { group, tokens, remote, timing: options.timing };
    tokio::spawn(heap::give_back());
    let timing = options.timing;
    let spawning = SpawnParts {
        host: worker.spawn_host(),
        meta: tree.meta(),
        complete: Arc::new(move |request| kip_api::admit::complete(request, &timing)),
    };
    let spawner = Arc::new(Spawner::open(spawning).await);
    let services = Services { worker: Arc::new(worker.clone()), tree: Arc::new(tree), spawner: spawner.clone() };
    worker.serve_runtime(Arc::clone(&services.tree), spawner).map_err(DaemonError::Runtime)?;
    let ending = serve(lock, services, doors, ready, end).await?;
    // After `kip down` there is nothing left to let go of.
    if ending == Ending::Asked {
        worker.close().await;
    }
    #[cfg(feature = "otel")]
    if let Some(traces) = traces {
        tokio::task::spawn_blocking(move || traces.close()).await.expect("closing does not panic");
    }
    tracing::info!(?ending, "daemon ends");
    Ok(())
}

async fn bind(listen: Option<&Listen>) -> Result<Option<RemoteListener>, ListenError> {
    let Some(Listen { address, tls }) = listen else { return Ok(None) };
    let tls = tls.as_ref().map(|tls| (tls.chain.as_path(), tls.key.as_path()));
    Ok(Some(RemoteListener::bind(*address, tls).await?))
}

/// Where `kip-keeper` and `kip-launch` are: beside this program.
fn programs() -> Result<PathBuf, DaemonError> {
    let own = std::env::current_exe().map_err(DaemonError::OwnPath)?;
    let dir = own.parent().unwrap_or(Path::new("/")).to_owned();
    for name in ["kip-keeper", "kip-launch"] {
        if !dir.join(name).is_file() {
            return Err(DaemonError::Program { name, dir });
        }
    }
    Ok(dir)
}
