//! `kip up`: the daemon of one data directory, in the foreground.
//!
//! Order: take the directory, open the worker (which finishes or undoes what a dead daemon left), listen, say `ready`.
//! SIGTERM and SIGINT end the daemon only: procs run on and the next `kip up` adopts them. `kip down` ends both. SIGHUP has the
//! certificate of the API read again.
//! A crash at any step leaves what the next start recovers from.

use crate::notify;
use crate::output::{print, print_json};
use crate::remote::ListenArgs;
#[cfg(feature = "otel")]
use crate::traces;
use anyhow::{Context, bail};
use clap::Args;
use kip_api::{Api, ApiSocket, DataLock, Ending, Remote, Tls, Tokens};
use kip_service::Service;
use kip_types::spec::{Timing, parse_duration_ms, parse_size};
use kip_worker::{Config, MemoryMarks, Worker};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use tokio::signal::unix::{Signal, SignalKind, signal};

#[derive(Debug, Args)]
pub struct UpArgs {
    /// CRIU's program, instead of the one found on this machine
    #[arg(long, value_name = "PATH")]
    pub criu: Option<PathBuf>,
    /// Idle this long, a proc leaves the hot tier, unless its owner said otherwise
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub idle: Option<u64>,
    /// That long after, it is parked, unless its owner said otherwise
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub park_after: Option<u64>,
    /// Most memory that all working sets of hibernated procs may take, the page cache included; beyond that they are on
    /// disk. Without it, an eighth of --memory, at most 256 MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub set_memory: Option<u64>,
    /// Parked that long, it is archived, if there is a store, unless its owner said otherwise. Without it after 10 min, but not to a
    /// directory, and not while connections are open
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub archive_after: Option<u64>,
    /// Object store that procs are archived in: a directory, s3://BUCKET/PREFIX?endpoint=URL, or `none`. Without it that of the
    /// last time, at first a directory `store` in the data directory
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Collect the store so often (tests); about once an hour
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms, hide = true)]
    pub collect_every: Option<u64>,
    /// Most that parked procs may take on the local disk; beyond that those parked the longest are archived, to a store
    /// elsewhere
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub disk: Option<u64>,
    /// Most that what was stored or fetched lately may take on the local disk, sealed, so that it need not be fetched again; 0 for
    /// none. Without it a tenth of what is free there, at most 1G; none where the store is a directory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub cache: Option<u64>,
    /// Most memory that procs may use together; without it, the machine's less a reserve
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Above this share of it idle procs are put to sleep and new ones refused (90)
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    pub memory_high: Option<u8>,
    /// Until no more than this share is used (10 below the high mark)
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    pub memory_low: Option<u8>,
    /// Send a trace of each wake to this collector, by OTLP over HTTP, for example http://127.0.0.1:4318; the variables OTEL_EXPORTER_OTLP_* work too
    #[cfg(feature = "otel")]
    #[arg(long, value_name = "URL")]
    pub traces: Option<String>,
    /// Group that may use the API, which makes its members as powerful as root
    #[arg(long)]
    pub group: Option<String>,
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Kill the daemon at this recorded step (tests); `list` shows the steps
    #[arg(long, value_name = "STEP", hide = true)]
    pub fault_at: Option<String>,
    /// Let CRIU do every wake, none by plan (tests, comparison)
    #[arg(long, hide = true)]
    pub only_criu: bool,
    /// Take keeper and pager that run for those of another version, and replace them (tests)
    #[arg(long, hide = true)]
    pub supersede: bool,
    /// What to log on stderr, for example debug or warn,kip_worker=debug
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
}

/// `90` or `90%`.
fn parse_percent(s: &str) -> Result<u8, String> {
    match s.strip_suffix('%').unwrap_or(s).parse::<u8>() {
        Ok(percent) if (1..=100).contains(&percent) => Ok(percent),
        _ => Err("write a share of memory from 1 to 100 percent".to_owned()),
    }
}

/// What has to be done while the process has one thread: its own mount namespace, and the fault to inject.
pub fn prepare(data: &Path, args: &UpArgs) -> anyhow::Result<DataLock> {
    if let Some(step) = &args.fault_at {
        if step == "list" {
            print(&format!("{}\n", kip_sys::fault::STEPS.join("\n")))?;
            std::process::exit(0);
        }
        anyhow::ensure!(kip_sys::fault::arm(step), "--fault-at {step}: there is no such step; `list` shows them");
    }
    if args.cache.is_some() && args.store.as_deref() == Some("none") {
        bail!("--cache is for what comes from a store, and `--store none` is given: leave one of the two out");
    }
    if !rustix::process::geteuid().is_root() {
        bail!("the daemon builds namespaces and cgroups, for which it must be root: use sudo kip up");
    }
    let lock = DataLock::take(data, group_of(args)?)?;
    // A dozen for each proc.
    kip_sys::process::raise_nofile().context("cannot raise the limit of open files")?;
    kip_worker::enter_private_mounts(data)
        .with_context(|| format!("cannot enter a mount namespace of its own for {}", data.display()))?;
    Ok(lock)
}

fn group_of(args: &UpArgs) -> anyhow::Result<Option<u32>> {
    args.group.as_deref().map(group_id).transpose()
}

/// Where `kip-keeper` and `kip-launch` are: beside this program.
fn programs() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own path")?;
    let dir = own.parent().unwrap_or(Path::new("/")).to_owned();
    for name in ["kip-keeper", "kip-launch"] {
        anyhow::ensure!(
            dir.join(name).is_file(),
            "{name} is not in {}: install Kip's programs together",
            dir.display()
        );
    }
    Ok(dir)
}

/// Runs the daemon to its end.
pub async fn up(lock: DataLock, args: UpArgs, memory: MemoryMarks, json: bool) -> anyhow::Result<ExitCode> {
    log_to_stderr(&args.log)?;
    let group = group_of(&args)?;
    let usual = Timing::default();
    let defaults = Timing {
        idle_ms: args.idle.unwrap_or(usual.idle_ms),
        park_after_ms: args.park_after.unwrap_or(usual.park_after_ms),
        archive_after_ms: args.archive_after.unwrap_or(usual.archive_after_ms),
        archive_by_default: args.archive_after.is_none(),
        ..usual
    };
    // Before anything is taken up: what is wrong with these is a matter of the command line.
    let doors = (Tokens::open(&lock)?, args.listen.bind().await?);
    #[cfg(feature = "otel")]
    let traces = traces::Traces::open(args.traces.as_deref(), lock.data())?;
    #[cfg(feature = "otel")]
    let observer = traces.clone().map(|traces| traces as Arc<dyn kip_worker::WakeObserver>);
    #[cfg(not(feature = "otel"))]
    let observer = None;
    let config = Config {
        data: lock.data().to_owned(),
        criu: args.criu,
        programs: programs()?,
        only_criu: args.only_criu,
        supersede: args.supersede,
        progress: notify::goes_on,
        set_memory: args.set_memory,
        observer,
        store: args.store,
        collect_every: args.collect_every,
        memory,
        disk: args.disk,
        cache: args.cache,
    };
    let worker = Worker::open(config).await.with_context(|| format!("cannot open {}", lock.data().display()))?;
    let mut signals = Signals::listen()?;
    let tls = doors.1.as_ref().and_then(Remote::tls);
    let ending = serve(&lock, Arc::new(worker.clone()), defaults, (group, doors), json, signals.end(tls)).await?;
    if ending == Ending::Asked {
        worker.close().await;
    }
    #[cfg(feature = "otel")]
    if let Some(traces) = traces {
        tokio::task::spawn_blocking(move || traces.close()).await?;
    }
    tracing::info!(?ending, "daemon ends");
    Ok(ExitCode::SUCCESS)
}

/// Serves `service` until `end` or `kip down`. The socket's file is gone when this returns.
async fn serve(
    lock: &DataLock,
    service: Arc<dyn Service>,
    defaults: Timing,
    (group, (tokens, remote)): (Option<u32>, (Tokens, Option<Remote>)),
    json: bool,
    end: impl Future<Output = ()> + Send,
) -> anyhow::Result<Ending> {
    let mut socket = ApiSocket::bind(lock, group)?;
    let api = Api::new(service, defaults, tokens);
    let address = format!("unix:{}", socket.path().display());
    let url = remote.as_ref().map(Remote::url);
    // The socket listens already: a program that reads this line can connect. A reader that is gone is no reason to end.
    let said = match json {
        true => print_json(&serde_json::json!({ "ready": address, "listen": url })),
        false => {
            print(&format!("ready {}\n", [Some(address), url].into_iter().flatten().collect::<Vec<_>>().join(" ")))
        }
    };
    if said.is_err() {
        tracing::debug!("no program reads the ready line");
    }
    notify::notify(notify::READY);
    let ending = api.serve(&mut socket, remote, end).await?;
    notify::notify(notify::STOPPING);
    Ok(ending)
}

/// The signals that the daemon takes.
struct Signals([Signal; 3]);

impl Signals {
    fn listen() -> anyhow::Result<Signals> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Signals([listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?, listen(SignalKind::hangup())?]))
    }

    /// Until one of those that end it.
    async fn end(&mut self, tls: Option<Tls>) {
        let [terminate, interrupt, hangup] = &mut self.0;
        loop {
            tokio::select! {
                _ = terminate.recv() => return,
                _ = interrupt.recv() => return,
                _ = hangup.recv() => {}
            }
            match tls.as_ref().map(Tls::read_again) {
                None => tracing::info!("SIGHUP: there is nothing to be read again"),
                Some(Ok(())) => tracing::info!("SIGHUP: the certificate was read again"),
                Some(Err(e)) => {
                    let error = format!("{:#}", anyhow::Error::new(e));
                    tracing::error!(error, "SIGHUP: the certificate is as it was");
                }
            }
        }
    }
}

fn log_to_stderr(filter: &str) -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_new(filter).with_context(|| {
        format!("--log {filter:?} is not a filter: write for example debug or warn,kip_worker=debug")
    })?;
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours).init();
    Ok(())
}

/// The number of a group that is given by number or by its name in /etc/group, group(5).
fn group_id(group: &str) -> anyhow::Result<u32> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let file = std::fs::read_to_string("/etc/group").context("cannot read /etc/group")?;
    group_in(&file, group).with_context(|| format!("there is no group {group} in /etc/group: give its number"))
}

fn group_in(file: &str, group: &str) -> Option<u32> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
#[path = "../../api/tests/fake/mod.rs"]
mod fake;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_name() {
        let file = "root:x:0:\ndocker:x:998:alice,bob\nbroken\nbroken2:x:much:\n";
        assert_eq!(group_in(file, "docker"), Some(998));
        assert_eq!(group_in(file, "broken"), None);
        assert_eq!(group_in(file, "broken2"), None);
        assert_eq!(group_in(file, "doc"), None);
        assert_eq!(group_id("17").unwrap(), 17);
    }

    #[tokio::test]
    async fn serves_until_it_is_asked_to_end() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DataLock::take(dir.path(), None).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let service = Arc::new(fake::Fake::default());
        let client = kip_client::Client::new(dir.path());
        let end = async { drop(stopped.await) };
        let doors = (None, (Tokens::open(&lock).unwrap(), None));
        let asks = async {
            while client.info().await.is_err() {
                tokio::task::yield_now().await;
            }
            drop(stop);
        };
        let (ending, ()) = tokio::join!(serve(&lock, service, Timing::default(), doors, true, end), asks);
        assert_eq!(ending.unwrap(), Ending::Asked);
        assert!(!dir.path().join(kip_client::SOCKET).exists());
    }
}
