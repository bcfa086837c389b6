//! Messages of the API: what `kip --json` prints and what travels on the socket, as JSON.

mod check;
pub mod checkpoint;
pub mod clone;
mod described;
mod details;
mod event;
mod exec;
mod health;
mod history;
mod meter;
mod refusal;
pub mod scale;
mod snapshot;
pub mod spawn;
pub mod template;
mod token;
mod top;
pub mod tree;
mod update;
mod why;
mod words;

pub use check::*;
pub use described::*;
pub use details::*;
pub use event::*;
pub use exec::*;
pub use health::*;
pub use history::*;
pub use meter::*;
pub use refusal::*;
pub use snapshot::*;
pub use token::*;
pub use top::*;
pub use update::*;
pub use why::*;
pub use words::*;

pub use crate::spec::request::{InFile, LeftOpen, RunRequest};

use crate::lifecycle::{Generation, StateName, Tier};
use crate::name::{ProcName, Realm};
use crate::spec::{Clock, PortSpec, Protocol, Spec, addresses_meet};
use crate::suspend::SuspendedBy;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// `POST /v1/procs/NAME/start`, as its query.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StartRequest {
    /// Answer only when the ports of the proc listen.
    pub wait_ready: bool,
}

/// `POST /v1/procs/NAME/stop`.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StopRequest {
    /// From the stop signal to SIGKILL, milliseconds; null for what the proc's spec says. 0 kills
    /// at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
}

/// `POST /v1/procs/NAME/signal`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignalRequest {
    /// `HUP`, `SIGHUP` or a number. `KILL` ends the proc as a stop without grace does.
    pub signal: String,
}

/// `DELETE /v1/procs/NAME`, as its query.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RemoveRequest {
    /// End it first if it is not stopped.
    pub force: bool,
}

/// `GET /v1/procs/NAME`, as its query.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InspectRequest {
    /// With the values of the proc's environment, which may be secrets: refused to a token of scope
    /// `read`.
    pub env: bool,
}

/// `POST /v1/procs/NAME/sleep`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SleepRequest {
    /// The tier to go to.
    pub to: Tier,
    /// How CLOCK_MONOTONIC behaves in this sleep: `auto` as for an automatic sleep. Null: the clock
    /// stands still, unless the proc was run with `continue`.
    #[serde(default)]
    pub clock: Option<Clock>,
}

/// `GET /v1/procs/NAME/logs`, as its query; answered with one `LogLine` per line.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogsRequest {
    /// Follow new lines until the proc is removed.
    pub follow: bool,
    /// Begin with this many of the newest lines; none for all that are kept.
    pub tail: Option<u64>,
    /// Leave out lines that were written before this time, milliseconds since the epoch.
    pub since_ms: Option<u64>,
}

/// `GET /v1/procs/NAME/files`, as its query; answered with a tar archive of what is at the path.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReadFilesRequest {
    /// What to send, as the program sees it from `/`. A directory comes with all that is below it;
    /// the archive begins with its name, or with `.` if the path ends with `/.`.
    pub path: String,
    /// Where the path ends with a link, send what that leads to instead of the link.
    pub follow: bool,
}

/// `PUT /v1/procs/NAME/files`, as its query. The body is a tar archive.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WriteFilesRequest {
    /// The directory that takes what is in the archive, as the program sees it from `/`.
    pub path: String,
    /// If the path is no directory, it is the new name of the archive's first entry, and of what is
    /// below that.
    pub rename: bool,
}

/// What came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct FilesWritten {
    /// Contents of files, bytes.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

/// Which of its two outputs a program wrote to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogStream {
    /// Descriptor 1.
    Stdout,
    /// Descriptor 2.
    Stderr,
}

/// One line that a proc wrote.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct LogLine {
    /// When Kip read it, milliseconds since the epoch.
    pub at_ms: u64,
    /// Output that the line was written to.
    pub stream: LogStream,
    /// The line without its end; bytes that are not UTF-8 are replaced.
    pub text: String,
}

/// `POST /v1/procs/NAME/wake`, as its query.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WakeRequest {
    /// Id of a proc in the store, which is taken over under the name in the path.
    #[serde(default)]
    pub id: Option<String>,
}

/// Answer of `sleep` and `wake`: the proc after the change.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct Moved {
    /// The proc.
    #[serde(flatten)]
    pub proc: ProcView,
    /// True: the proc was in that tier before, and nothing was done.
    pub already: bool,
}

/// `POST /v1/down`, as its query.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DownRequest {
    /// Park every proc instead of ending it. No proc wakes until the next daemon runs; then those
    /// that were awake do.
    pub park: bool,
    /// With `park`: time for parking all procs, milliseconds; a proc that is not parked by then
    /// runs on. Null is 90 seconds.
    pub within_ms: Option<u64>,
}

/// How long all procs may take to be parked before a machine goes down, milliseconds.
pub const PARK_WITHIN_MS: u64 = 90_000;

/// What `POST /v1/down` answers. The daemon ends right after.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct DownView {
    /// The procs that were running or asleep and were ended.
    pub ended: Vec<ProcName>,
    /// With `park`: the procs that are parked or archived now.
    #[serde(default)]
    pub asleep: Vec<ProcName>,
    /// With `park`: the procs that run on, and why.
    #[serde(default)]
    pub awake: BTreeMap<ProcName, String>,
}

/// Last line of an ndjson answer that ended early, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct BrokeOff {
    /// Reason why the answer ended early.
    pub refusal: Refusal,
}

/// `POST /v1/procs/NAME/rename`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RenameRequest {
    /// Its name from now on.
    pub name: ProcName,
}

/// A published port with the addresses in use.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PortView {
    /// Transport protocol.
    pub proto: Protocol,
    /// Port inside the proc.
    pub port: u16,
    /// Address inside, which other procs of the realm may dial as well.
    pub addr: IpAddr,
    /// Address on the host, `0.0.0.0` for all.
    pub host_addr: IpAddr,
    /// Port on the host; null for a private one.
    pub host_port: Option<u16>,
}

impl PortView {
    /// The one address of the host at which it is published; none for all.
    pub fn only_at(&self) -> Option<IpAddr> {
        Some(self.host_addr).filter(|addr| !addr.is_unspecified())
    }

    /// Whether a spec's port would be published alike: by the host's port if it is asked for, else
    /// by the proc's own.
    pub fn is_like(&self, wanted: &PortSpec) -> bool {
        let same = wanted.host_port.map_or(wanted.port == self.port, |port| self.host_port == Some(port));
        (wanted.proto, wanted.host_addr) == (self.proto, self.only_at()) && self.host_port.is_some() && same
    }

    /// Whether a spec asks for the port at other addresses, or for a probe: the kernel gives it to
    /// one socket only.
    pub fn clashes(&self, spec: &Spec) -> bool {
        let meets = |port: &PortSpec| {
            let same = (port.proto, port.host_port) == (self.proto, self.host_port) && self.host_port.is_some();
            same && port.host_addr != self.only_at() && addresses_meet(port.host_addr, self.only_at())
        };
        let probed = |port: u16| (self.proto, self.host_port) == (Protocol::Tcp, Some(port));
        spec.ports.iter().any(meets) || spec.probes.iter().any(|probe| probed(probe.host_port))
    }

    /// The same ports, not published.
    pub fn all_unpublished(views: &[PortView]) -> Vec<PortView> {
        let all = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        views.iter().map(|view| PortView { host_port: None, host_addr: all, ..view.clone() }).collect()
    }

    /// Whether these are the ports that a spec asks for.
    pub fn all_agree(views: &[PortView], spec: &[PortSpec]) -> bool {
        let agrees = |view: &PortView, wanted: &PortSpec| match wanted.private {
            true => (wanted.proto, wanted.port, None) == (view.proto, view.port, view.host_port),
            false => wanted.port == view.port && view.is_like(wanted),
        };
        spec.len() == views.len() && spec.iter().all(|wanted| views.iter().any(|view| agrees(view, wanted)))
    }
}

/// Memory of a proc. Zero for a parked one.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct MemoryView {
    /// Resident set, bytes.
    pub rss_bytes: u64,
    /// Proportional set, bytes.
    pub pss_bytes: u64,
    /// Kernel memory charged to the cgroup of the proc, bytes.
    pub kernel_bytes: u64,
    /// Swapped, bytes.
    pub swap_bytes: u64,
    /// Pages in the recorded working sets of all kinds of wakes.
    pub working_set_pages: u64,
    /// Pages of the working set that the last wake installed.
    #[serde(default)]
    pub working_set_installed: u64,
    /// Pages that were missing from the working set of the last wake and came one by one since.
    #[serde(default)]
    pub working_set_misses: u64,
    /// Hit rate of the working set, percent: of the pages that came back since the last wake, the
    /// share that came with the set. Null before the first wake from hibernation.
    #[serde(default)]
    pub working_set_hit_percent: Option<f64>,
}

/// The last sleep.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SleepView {
    /// Tier that the proc went to.
    pub to: Tier,
    /// Time that the processes were frozen, microseconds.
    pub frozen_us: u64,
    /// Duration of the whole sleep operation, microseconds.
    pub total_us: u64,
    /// Bytes written to disk.
    pub bytes_written: u64,
    /// Proportional set just before the freeze, bytes, with the proc's share of mapped files. Null
    /// in records of older daemons.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Own memory of the proc just before the freeze, bytes: memory that it wrote, and shared
    /// memory. Pages of files that it only read do not count, for the kernel keeps these whether
    /// the proc sleeps or not. Null in records of older daemons.
    #[serde(default)]
    pub own_bytes: Option<u64>,
    /// Memory that was not paged out, by reason, bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_bytes: BTreeMap<String, u64>,
    /// True: the threads of the hibernated proc are held, not waiting in their system calls.
    #[serde(default)]
    pub held: bool,
    /// Option or profile by which CLOCK_MONOTONIC stands still in this sleep, one line; null if the
    /// clock goes on.
    #[serde(default)]
    pub suspended: Option<SuspendedBy>,
    /// Reason of the sleep, one line; null if the proc was idle for its idle time, or a client
    /// asked for the sleep.
    #[serde(default)]
    pub cause: Option<String>,
    /// Time, milliseconds since the epoch.
    pub at_ms: u64,
}

/// One step of a wake.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct StepView {
    /// Name of the step.
    pub name: String,
    /// Duration of the step, microseconds.
    pub us: u64,
}

/// The last wake.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct WakeView {
    /// Event that woke the proc, for example `tcp 0.0.0.0:80 (connection)`, `timer`, `kip wake`.
    pub trigger: String,
    /// Tier that the wake began in.
    pub from: Tier,
    /// Time from the event to the program's first instruction, microseconds.
    pub total_us: u64,
    /// Steps of the wake, in order.
    pub steps: Vec<StepView>,
    /// Time, milliseconds since the epoch.
    pub at_ms: u64,
    /// Data fetched from the object store for the wake and since; null for other tiers, and for
    /// wakes of an earlier daemon.
    #[serde(default)]
    pub fetched: Option<FetchedView>,
}

/// Data of a proc that was fetched since its wake from the archive began, by source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct FetchedView {
    /// Reads of the store.
    pub requests: u64,
    /// Bytes that those reads returned.
    pub store_bytes: u64,
    /// Bytes from the cache on the local disk instead.
    pub cache_bytes: u64,
    /// Recent blocks that were read ahead and needed, over all wakes of the proc.
    pub ahead_used: u32,
    /// Recent blocks that were read ahead and not needed.
    pub ahead_unused: u32,
}

/// `GET /v1/procs/NAME` and, as a list, `GET /v1/procs`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct ProcView {
    /// Name of the proc.
    pub name: ProcName,
    /// Realm (tenant) of the proc.
    pub realm: Realm,
    /// State of the proc; `starting` also until its readiness check succeeds.
    pub state: StateName,
    /// Tier of the proc, where its memory is; null for a stopped proc.
    pub tier: Option<Tier>,
    /// Machine that the proc is on.
    pub worker: String,
    /// Newest complete generation.
    pub generation: Generation,
    /// Published ports.
    pub ports: Vec<PortView>,
    /// Process ids on the host, the sandbox's pid 1 first.
    pub pids: Vec<u32>,
    /// Memory.
    pub memory: MemoryView,
    /// Memory that the proc would take if it ran and does not take asleep, bytes: its own memory
    /// before the sleep, less what is left in memory. Null unless asleep, and where it is not
    /// recorded.
    #[serde(default)]
    pub saved_bytes: Option<u64>,
    /// True: the daemon could not measure the proc in time; `memory`, `pids` and `cpu_us` are of an
    /// earlier sample.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub does_not_answer: bool,
    /// Disk space of the proc's own files, bytes; null where it is not limited.
    #[serde(default)]
    pub disk_bytes: Option<u64>,
    /// The last sleep.
    pub last_sleep: Option<SleepView>,
    /// The last wake.
    pub last_wake: Option<WakeView>,
    /// How the program ended, for a proc that is stopped or restarting: `exit code 1`, `signal 9`,
    /// and `signal 9, out of memory` where the kernel ended it for that.
    pub exit: Option<String>,
    /// `exit` as shells tell it: the exit code of the program, or 128 and the number of the signal
    /// that ended it; null where `exit` is null or `unknown`, and from older daemons.
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// True: the program ended because the kernel killed it for lack of memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub out_of_memory: bool,
    /// Milliseconds without activity; null unless running.
    pub idle_ms: Option<u64>,
    /// Time until the next timer that will wake the proc, milliseconds; null unless the proc sleeps
    /// and Kip watches a timer.
    pub next_timer_ms: Option<u64>,
    /// CPU time of the proc's processes, microseconds; null unless running. Its origin is not
    /// defined: the difference of two samples is the use between them.
    #[serde(default)]
    pub cpu_us: Option<u64>,
    /// Number of wakes since the last start.
    #[serde(default)]
    pub wakes: u64,
    /// Number of restarts by the restart policy since a client last started the proc.
    #[serde(default)]
    pub restarts: u32,
    /// Time of the last start of the program, milliseconds since the epoch; null for procs of older
    /// daemons.
    #[serde(default)]
    pub started_at_ms: Option<u64>,
    /// Time until the restart, milliseconds; null unless the proc is restarting.
    #[serde(default)]
    pub next_start_ms: Option<u64>,
    /// Whether the proc has become ready since its last start; null where its spec has no readiness
    /// check.
    #[serde(default)]
    pub ready: Option<bool>,
    /// Last answers of the probes, in the order of the spec. This request asks no probe.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<ProbeView>,
    /// Specification that the proc was made from. Values of the environment are empty except in the
    /// answer to `GET /v1/procs/NAME?env=true`.
    pub spec: Spec,
}

/// `GET /v1/info`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct Info {
    /// Version of the daemon.
    pub version: String,
    /// Data directory of the daemon.
    pub data: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Name of this worker.
    pub worker: String,
    /// Process id of the keeper.
    pub keeper_pid: u32,
    /// Process id of the pager; 0 while no pager runs.
    #[serde(default)]
    pub pager_pid: u32,
    /// Wakes of all procs in the last 60 seconds, counted in the kept events; where these do not
    /// reach back that far, extrapolated from them.
    #[serde(default)]
    pub wakes_last_minute: u64,
    /// Use of memory; null from older daemons.
    #[serde(default)]
    pub room: Option<RoomView>,
    /// Local cache of the store; null without one.
    #[serde(default)]
    pub cache: Option<CacheView>,
}
