//! Messages of the API: what `kip --json` prints and what travels on the socket, as JSON.

mod check;
mod described;
mod details;
mod exec;
mod health;
mod history;
mod meter;
mod refusal;
mod snapshot;
mod token;
mod top;
mod words;

pub use check::*;
pub use described::*;
pub use details::*;
pub use exec::*;
pub use health::*;
pub use history::*;
pub use meter::*;
pub use refusal::*;
pub use snapshot::*;
pub use token::*;
pub use top::*;
pub use words::*;

pub use crate::spec::request::{InFile, LeftOpen, RunRequest};

use crate::lifecycle::{Generation, StateName, Tier};
use crate::name::{ProcName, Realm};
use crate::spec::{Clock, Protocol, Spec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

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
    /// From the stop signal to SIGKILL, milliseconds; null for what the proc's spec says. 0 kills at once.
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
    /// With the values of the proc's environment, which may be secrets: refused to a token of scope `read`.
    pub env: bool,
}

/// `POST /v1/procs/NAME/sleep`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SleepRequest {
    /// The tier to go to.
    pub to: Tier,
    /// How CLOCK_MONOTONIC behaves in this sleep: `auto` as for an automatic sleep. Null: the clock stands still, unless the proc was
    /// run with `continue`.
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
    /// What to send, as the program sees it from `/`. A directory comes with all that is below it; the archive begins with its name, or
    /// with `.` if the path ends with `/.`.
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
    /// If the path is no directory, it is the new name of the archive's first entry, and of what is below that.
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

/// `GET /v1/events`, as its query; answered with one `Event` per line.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventsRequest {
    /// Follow new events after those that are kept, which include events of earlier daemons of this data directory.
    pub follow: bool,
    /// Only events after the one with this id: a client that reconnects gives the last id that it has seen.
    pub since: Option<u64>,
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
    /// Park every proc instead of ending it. No proc wakes until the next daemon runs; then those that were awake do.
    pub park: bool,
    /// With `park`: time for parking all procs, milliseconds; a proc that is not parked by then runs on. Null is 90 seconds.
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
    /// Hit rate of the working set, percent: of the pages that came back since the last wake, the share that came
    /// with the set. Null before the first wake from hibernation.
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
    /// Proportional set just before the freeze, bytes, with the proc's share of mapped files. Null in records of
    /// older daemons.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Own memory of the proc just before the freeze, bytes: memory that it wrote, and shared memory. Pages of files that it only read
    /// do not count, for the kernel keeps these whether the proc sleeps or not. Null in records of older daemons.
    #[serde(default)]
    pub own_bytes: Option<u64>,
    /// Memory that was not paged out, by reason, bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_bytes: BTreeMap<String, u64>,
    /// True: the threads of the hibernated proc are held, not waiting in their system calls.
    #[serde(default)]
    pub held: bool,
    /// Option or profile by which CLOCK_MONOTONIC stands still in this sleep, one line; null if the clock goes on.
    #[serde(default)]
    pub suspended: Option<String>,
    /// Reason of the sleep, one line; null if the proc was idle for its idle time, or a client asked for the sleep.
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
    /// Data fetched from the object store for the wake and since; null for other tiers, and for wakes of an earlier daemon.
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
    /// Memory that the proc would take if it ran and does not take asleep, bytes: its own memory before the sleep, less what is left
    /// in memory. Null unless asleep, and where it is not recorded.
    #[serde(default)]
    pub saved_bytes: Option<u64>,
    /// True: the daemon could not measure the proc in time; `memory`, `pids` and `cpu_us` are of an earlier sample.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub does_not_answer: bool,
    /// Disk space of the proc's own files, bytes; null where it is not limited.
    #[serde(default)]
    pub disk_bytes: Option<u64>,
    /// The last sleep.
    pub last_sleep: Option<SleepView>,
    /// The last wake.
    pub last_wake: Option<WakeView>,
    /// How the program ended, for a proc that is stopped or restarting: `exit code 1`, `signal 9`, and `signal 9, out of memory` where the
    /// kernel ended it for that.
    pub exit: Option<String>,
    /// Milliseconds without activity; null unless running.
    pub idle_ms: Option<u64>,
    /// Time until the next timer that will wake the proc, milliseconds; null unless the proc sleeps and Kip watches a timer.
    pub next_timer_ms: Option<u64>,
    /// CPU time of the proc's processes, microseconds; null unless running. Its origin is not defined: the difference of two
    /// samples is the use between them.
    #[serde(default)]
    pub cpu_us: Option<u64>,
    /// Number of wakes since the last start.
    #[serde(default)]
    pub wakes: u64,
    /// Number of restarts by the restart policy since a client last started the proc.
    #[serde(default)]
    pub restarts: u32,
    /// Time of the last start of the program, milliseconds since the epoch; null for procs of older daemons.
    #[serde(default)]
    pub started_at_ms: Option<u64>,
    /// Time until the restart, milliseconds; null unless the proc is restarting.
    #[serde(default)]
    pub next_start_ms: Option<u64>,
    /// Whether the proc has become ready since its last start; null where its spec has no readiness check.
    #[serde(default)]
    pub ready: Option<bool>,
    /// Last answers of the probes, in the order of the spec. This request asks no probe.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<ProbeView>,
    /// Specification that the proc was made from. Values of the environment are empty except in the answer to `GET /v1/procs/NAME?env=true`.
    pub spec: Spec,
}

/// `GET /v1/procs/NAME/why`. For a running proc the answer takes a second, in which its threads are watched.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct WhyView {
    /// Name of the proc.
    pub name: ProcName,
    /// State of the proc.
    pub state: StateName,
    /// Reasons why the proc is awake now, as lines for people, the strongest first; empty for a sleeping proc.
    pub awake_because: Vec<String>,
    /// Kind of the newest activity; null for a sleeping proc.
    pub activity: Option<ActivityKind>,
    /// Time since that activity, milliseconds, sampled once a second; null for a sleeping proc.
    pub quiet_ms: Option<u64>,
    /// Time without activity after which the proc is parked, milliseconds; null for a sleeping proc and with `--never-sleep`.
    pub parks_after_ms: Option<u64>,
    /// Activity of threads and sockets; null for a sleeping proc, and when the inspection failed (`awake_because` says so).
    pub seen: Option<SeenView>,
    /// Causes that refused the last sleep, or that keep a sleeping proc from a lower tier; empty if there are none.
    pub cannot_sleep: Vec<String>,
    /// Time of that refusal, milliseconds since the epoch; null if there was none or an earlier daemon saw it.
    pub cannot_sleep_at_ms: Option<u64>,
    /// Timer that will wake the sleeping proc; null for a proc that is awake or has no timer.
    pub next_wake: Option<NextWakeView>,
    /// Sentence that CLOCK_MONOTONIC stands still while the proc is parked, and by which option or profile; null if the clock goes on.
    #[serde(default)]
    pub clock: Option<String>,
    /// The last sleep; of a sleeping proc the present one.
    #[serde(default)]
    pub last_sleep: Option<SleepView>,
    /// The last wake.
    pub last_wake: Option<WakeView>,
    /// Id of the data directory that has taken the proc over from the store; null for a proc that is here.
    #[serde(default)]
    pub taken_over_by: Option<String>,
    /// Reason why the proc runs from something else than its newest snapshot, and from what; null if it does not.
    #[serde(default)]
    pub fell_back: Option<String>,
    /// Volumes that pin the proc to this machine and data directory, a line for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pinned_by: Vec<String>,
}

/// Kind of a running proc's newest activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivityKind {
    /// Payload was received or sent.
    Traffic,
    /// The proc used more than 1% of a core.
    Cpu,
    /// The proc was started, woken or asked by a command and has done nothing that counts since.
    Called,
}

/// Activity of a running proc's threads and sockets within a second.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SeenView {
    /// Time that the threads were watched, microseconds.
    pub watched_us: u64,
    /// Threads that were on a CPU meanwhile, the busiest first, at most 32, without threads that ended meanwhile.
    pub threads: Vec<ThreadView>,
    /// Connections, flows of datagrams and listeners with connections that wait to be accepted: the one with the newest
    /// packet first, at most 256.
    pub sockets: Vec<SocketView>,
    /// Number of such sockets in all.
    pub sockets_in_all: usize,
    /// Timers and time-outs of calls that are set, the next one first, at most 64.
    pub timers: Vec<TimerView>,
    /// Programs that run in the proc by `kip exec`.
    pub execs: Vec<ProgramView>,
}

/// A process of a proc.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ProgramView {
    /// Name of the process in the kernel, at most 15 bytes.
    pub name: String,
    /// Process id inside.
    pub pid: u32,
}

/// A thread with CPU time.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ThreadView {
    /// The thread's own name, at most 15 bytes.
    pub name: String,
    /// Thread id inside.
    pub tid: u32,
    /// Process of the thread.
    pub program: ProgramView,
    /// CPU time while it was watched, microseconds.
    pub cpu_us: u64,
}

/// A socket, as the proc sees it.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SocketView {
    /// TCP or UDP.
    pub proto: Protocol,
    /// `established`, `close-wait`, `fin-wait`, `syn-sent`, `listen` or `closing`; for UDP `flow`.
    #[schemars(extend("enum" = SOCKET_STATES))]
    pub state: String,
    /// Local address.
    pub local: SocketAddr,
    /// The other side's address as the proc sees it; null for a listener, and for datagrams whose sender is not known.
    pub peer: Option<SocketAddr>,
    /// The client's address as the host sees it, before translation; null unless a client came from outside the proc.
    pub client: Option<SocketAddr>,
    /// Bytes that the program has not read; for a listener, connections it has not accepted.
    pub unread: u32,
    /// Bytes that are not sent or not acknowledged; 0 for a listener.
    pub unsent: u32,
    /// The newest packet either way, empty ones included, is at most this many milliseconds old, and at most a second
    /// younger. From the flow table of the host; null for what is not in it, such as connections within the proc.
    pub packet_ms: Option<u64>,
    /// Processes that have the socket open.
    pub programs: Vec<ProgramView>,
}

/// A timer that is set.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TimerView {
    /// `timerfd`, `POSIX timer` or `time-out of NAME`, a call that waits.
    pub kind: String,
    /// Process that the timer belongs to.
    pub program: ProgramView,
    /// Id inside of the thread that waits; null for timers.
    pub tid: Option<u32>,
    /// Milliseconds until the timer is due; null where the kernel shows that to the program only.
    pub due_ms: Option<u64>,
    /// Period of the timer, milliseconds; null for a timer that fires once or whose period is not known.
    pub every_ms: Option<u64>,
}

/// Timer that will wake a sleeping proc.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct NextWakeView {
    /// `timerfd`, `POSIX timer`, `interval timer`, `time-out of a call` or `it was at work`.
    #[schemars(extend("enum" = TIMERS))]
    pub kind: String,
    /// When the timer is due, milliseconds from now.
    pub due_ms: u64,
    /// When the wake for it begins, milliseconds from now.
    pub begins_ms: u64,
    /// True: this is one wake for all ticks together, and no tick is on time.
    pub gathered: bool,
}

/// One line of `kip events`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct Event {
    /// Event id, ascending over all daemons of this data directory, and by one from event to event of the same
    /// daemon. 0 from older daemons.
    #[serde(default)]
    pub id: u64,
    /// Time, milliseconds since the epoch.
    pub at_ms: u64,
    /// Proc that the event is about; null for the daemon itself.
    pub name: Option<ProcName>,
    /// Kind of the event.
    #[schemars(extend("enum" = EVENTS))]
    pub kind: String,
    /// Description for people, one line.
    pub detail: String,
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
    /// Wakes of all procs in the last 60 seconds, counted in the kept events; where these do not reach back that far,
    /// extrapolated from them.
    #[serde(default)]
    pub wakes_last_minute: u64,
    /// Use of memory; null from older daemons.
    #[serde(default)]
    pub room: Option<RoomView>,
    /// Local cache of the store; null without one.
    #[serde(default)]
    pub cache: Option<CacheView>,
}
