//! `kip up`: the options of a daemon, which [`kip_daemon`] runs, and the line that says that
//! clients can connect.

use crate::output::{print, print_json};
use crate::remote::ListenArgs;
use anyhow::bail;
use clap::Args;
use kip_daemon::{ApiAddresses, MemoryMarks, Options};
use kip_types::spec::{Timing, parse_duration_ms, parse_size};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct UpArgs {
    /// CRIU's program, instead of the one found on this machine
    #[arg(long, value_name = "PATH")]
    pub criu: Option<PathBuf>,
    /// Hibernate a proc after it has been idle for DUR, unless `kip run --idle` says otherwise
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub idle: Option<u64>,
    /// Park a hibernated proc after DUR more idle time, unless `kip run --park-after` says
    /// otherwise
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub park_after: Option<u64>,
    /// Most memory for the working sets of all hibernated procs, page cache included; Kip keeps
    /// further sets on disk. Default: an eighth of --memory, at most 256 MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub set_memory: Option<u64>,
    /// Archive a proc DUR after it was parked, unless `kip run --archive-after` says otherwise.
    /// Default: 10 min to a bucket, never to a directory, never with open connections
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub archive_after: Option<u64>,
    /// Object store for archived procs: a directory, s3://BUCKET/PREFIX?endpoint=URL, or `none`.
    /// Default: the store of the last `kip up`, at first the directory `store` in the data
    /// directory
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Collect the store so often (tests); about once an hour
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms, hide = true)]
    pub collect_every: Option<u64>,
    /// Disk space for snapshots of parked procs; beyond it Kip archives the longest parked ones
    /// (needs --store elsewhere)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub disk: Option<u64>,
    /// Size of the local cache of archived data; 0 for none. Default: a tenth of the free disk
    /// space, at most 1G; none with a directory store
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub cache: Option<u64>,
    /// Most memory that all procs may use together. Default: the memory of the machine less a
    /// reserve
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Above this share of --memory Kip puts idle procs to sleep and refuses new procs (default:
    /// 90)
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    pub memory_high: Option<u8>,
    /// Stop putting procs to sleep below this share of --memory (default: --memory-high minus 10)
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    pub memory_low: Option<u8>,
    /// Send a trace of each wake to this collector, by OTLP over HTTP, for example
    /// http://127.0.0.1:4318; the variables OTEL_EXPORTER_OTLP_* work too
    #[cfg(feature = "otel")]
    #[arg(long, value_name = "URL")]
    pub traces: Option<String>,
    /// Group that may use the API, which makes its members as powerful as root
    #[arg(long)]
    pub group: Option<String>,
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Kill the daemon at this recorded step, or delay it there (tests); `list` shows the steps
    #[arg(long, value_name = "STEP[:MS]", hide = true)]
    pub fault_at: Option<String>,
    /// Let CRIU do every wake, without native restores (tests, comparison)
    #[arg(long, hide = true)]
    pub only_criu: bool,
    /// Take keeper and pager that run for those of another version, and replace them (tests)
    #[arg(long, hide = true)]
    pub supersede: bool,
    /// What to log on stderr, for example debug or warn,kip_supervisor=debug
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

impl UpArgs {
    fn timing(&self) -> Timing {
        let usual = Timing::default();
        Timing {
            idle_ms: self.idle.unwrap_or(usual.idle_ms),
            park_after_ms: self.park_after.unwrap_or(usual.park_after_ms),
            archive_after_ms: self.archive_after.unwrap_or(usual.archive_after_ms),
            archive_by_default: self.archive_after.is_none(),
            ..usual
        }
    }

    fn into_options(self, data: PathBuf, memory: MemoryMarks) -> Options {
        let (timing, listen) = (self.timing(), self.listen.wanted());
        Options {
            data,
            criu: self.criu,
            timing,
            memory,
            set_memory: self.set_memory,
            store: self.store,
            collect_every: self.collect_every,
            disk: self.disk,
            cache: self.cache,
            #[cfg(feature = "otel")]
            traces: self.traces,
            group: self.group,
            listen,
            log: self.log,
            fault_at: self.fault_at,
            only_criu: self.only_criu,
            supersede: self.supersede,
        }
    }
}

/// Runs the daemon to its end.
pub fn up(data: PathBuf, args: UpArgs, memory: MemoryMarks, json: bool) -> anyhow::Result<ExitCode> {
    if args.fault_at.as_deref() == Some("list") {
        print(&format!("{}\n", kip_sys::fault::STEPS.join("\n")))?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.cache.is_some() && args.store.as_deref() == Some("none") {
        bail!("--cache is for what comes from a store, and `--store none` is given: leave one of the two out");
    }
    kip_daemon::run(args.into_options(data, memory), |addresses| ready(addresses, json))?;
    Ok(ExitCode::SUCCESS)
}

fn ready(addresses: &ApiAddresses, json: bool) -> anyhow::Result<()> {
    let ApiAddresses { socket, url } = addresses;
    if json {
        return print_json(&serde_json::json!({ "ready": socket, "listen": url }));
    }
    let all: Vec<&str> = std::iter::once(socket).chain(url).map(String::as_str).collect();
    print(&format!("ready {}\n", all.join(" ")))
}
