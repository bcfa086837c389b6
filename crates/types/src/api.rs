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
    /// Answer only when its ports listen.
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
    /// With the values of its environment, which may be secrets: not for a token that allows to look only.
    pub env: bool,
}

/// `POST /v1/procs/NAME/sleep`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SleepRequest {
    /// The tier to go to.
    pub to: Tier,
    /// What the program's own clock does in this one sleep: `auto` as in one by itself. Without it the clock stands, unless the proc was
    /// run with `continue`.
    #[serde(default)]
    pub clock: Option<Clock>,
}

/// `GET /v1/procs/NAME/logs`, as its query; answered with one [`LogLine`] per line.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogsRequest {
    /// Go on with new lines until the proc is removed.
    pub follow: bool,
    /// Begin with this many of the newest lines; none for all that are kept.
    pub tail: Option<u64>,
    /// Leave out what was written before, milliseconds since the epoch.
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
    /// Where it was written.
    pub stream: LogStream,
    /// The line without its end; bytes that are not UTF-8 are replaced.
    pub text: String,
}

/// `GET /v1/events`, as its query; answered with one [`Event`] per line.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventsRequest {
    /// After those that are kept, which are also those of earlier daemons of this data directory, go on with new ones.
    pub follow: bool,
    /// Only events after the one with this id: a client that reconnects gives the last that it has seen.
    pub since: Option<u64>,
}

/// What `wake` may be asked with.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WakeRequest {
    /// A proc in the store, by its id there: it is taken over, under the name that is woken.
    #[serde(default)]
    pub id: Option<String>,
}

/// What `sleep` and `wake` answer: the proc as it then is.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct Moved {
    /// The proc.
    #[serde(flatten)]
    pub proc: ProcView,
    /// It was in that tier before: nothing was done.
    pub already: bool,
}

/// `POST /v1/down`, as its query.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DownRequest {
    /// Park every proc instead of ending it. No proc wakes until the next daemon runs; then those that were awake do.
    pub park: bool,
    /// With `park`: how long that may take, milliseconds; a proc that is not parked by then is left as it is. Without it [`PARK_WITHIN_MS`].
    pub within_ms: Option<u64>,
}

/// How long all procs may take to be parked before a machine goes down, milliseconds.
pub const PARK_WITHIN_MS: u64 = 90_000;

/// What `POST /v1/down` answers. The daemon ends right after.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct DownView {
    /// The procs that were running or asleep and were ended.
    pub ended: Vec<ProcName>,
    /// With `park`: those that are parked or archived now.
    #[serde(default)]
    pub asleep: Vec<ProcName>,
    /// With `park`: those that run on, and why.
    #[serde(default)]
    pub awake: BTreeMap<ProcName, String>,
}

/// The last line of an ndjson answer that broke off: why it did.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct BrokeOff {
    /// Why.
    pub refusal: Refusal,
}

/// A published port as it is.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PortView {
    /// Transport protocol.
    pub proto: Protocol,
    /// Port inside the proc.
    pub port: u16,
    /// The address inside, that other procs of the realm may dial as well.
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
    /// Kernel memory charged to its cgroup, bytes.
    pub kernel_bytes: u64,
    /// Swapped, bytes.
    pub swap_bytes: u64,
    /// Pages in the recorded working sets of all kinds of wakes.
    pub working_set_pages: u64,
    /// Pages that were installed at the last wake: those of its kind.
    #[serde(default)]
    pub working_set_installed: u64,
    /// Pages that were missing from the working set of the last wake and came one by one since.
    #[serde(default)]
    pub working_set_misses: u64,
    /// What of its working set was enough, in percent: of the pages that came back since the last wake, those that came
    /// with the set. Null before the first wake from hibernation.
    #[serde(default)]
    pub working_set_hit_percent: Option<f64>,
}

/// The last sleep.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SleepView {
    /// Tier it went to.
    pub to: Tier,
    /// The processes stood still this long, microseconds.
    pub frozen_us: u64,
    /// The whole of it, microseconds.
    pub total_us: u64,
    /// Bytes written to disk.
    pub bytes_written: u64,
    /// Its proportional set just before it was frozen, bytes, its share of files that are mapped included. Null in records of
    /// older daemons.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Memory of its own just before it was frozen, bytes: what it wrote, and shared memory. Pages of files that it only read are not in
    /// it, for the kernel keeps these whether it sleeps or not. Null in records of older daemons.
    #[serde(default)]
    pub own_bytes: Option<u64>,
    /// What was left in memory although the rest went, by reason, bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_bytes: BTreeMap<String, u64>,
    /// A hibernated proc's threads are held, not waiting in their calls.
    #[serde(default)]
    pub held: bool,
    /// By which word its clock stands in this sleep, one line; null if it goes on.
    #[serde(default)]
    pub suspended: Option<String>,
    /// Why it was put to sleep, one line; null if it was idle for as long as its owner allows, or was told to.
    #[serde(default)]
    pub cause: Option<String>,
    /// When, milliseconds since the epoch.
    pub at_ms: u64,
}

/// One step of a wake.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct StepView {
    /// What was done.
    pub name: String,
    /// How long it took, microseconds.
    pub us: u64,
}

/// The last wake.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct WakeView {
    /// What woke it, for example `tcp 0.0.0.0:80 (connection)`, `timer`, `kip wake`.
    pub trigger: String,
    /// Tier it came from.
    pub from: Tier,
    /// From the event to the program's first instruction, microseconds.
    pub total_us: u64,
    /// The steps, in order.
    pub steps: Vec<StepView>,
    /// When, milliseconds since the epoch.
    pub at_ms: u64,
    /// What came from the object store for it and behind it, until now; null of other tiers, and of an earlier daemon's wakes.
    #[serde(default)]
    pub fetched: Option<FetchedView>,
}

/// What came of a proc since it began to wake from the archive, and from where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct FetchedView {
    /// Reads of the store.
    pub requests: u64,
    /// What they brought, bytes.
    pub store_bytes: u64,
    /// What came from the cache on the local disk instead, bytes.
    pub cache_bytes: u64,
    /// Blocks that were read ahead lately, over all its wakes, and were needed.
    pub ahead_used: u32,
    /// And those that were not.
    pub ahead_unused: u32,
}

/// `GET /v1/procs/NAME` and, as a list, `GET /v1/procs`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct ProcView {
    /// Name.
    pub name: ProcName,
    /// Tenant.
    pub realm: Realm,
    /// Its state; `starting` also until its check says that it is ready.
    pub state: StateName,
    /// Where its memory is; null for a stopped proc.
    pub tier: Option<Tier>,
    /// The machine it is on.
    pub worker: String,
    /// Newest complete generation.
    pub generation: Generation,
    /// Published ports.
    pub ports: Vec<PortView>,
    /// Host pids, the sandbox's pid 1 first.
    pub pids: Vec<u32>,
    /// Memory.
    pub memory: MemoryView,
    /// Memory that it would take if it ran and does not take asleep, bytes: what it had of its own when it fell asleep, less what is left
    /// in memory. Null unless asleep, and where it is not recorded.
    #[serde(default)]
    pub saved_bytes: Option<u64>,
    /// The daemon could not look at its memory in time: `memory`, `pids` and `cpu_us` are of an earlier look.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub does_not_answer: bool,
    /// Disk space that its own files take, in bytes; null where they are not limited.
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
    /// The next timer that will wake it, milliseconds from now; null unless asleep with one that Kip watches.
    pub next_timer_ms: Option<u64>,
    /// CPU time its processes have used, microseconds; null unless running. Where it counts from is not defined: two
    /// looks give what was used between them.
    #[serde(default)]
    pub cpu_us: Option<u64>,
    /// How often it was woken since it was last started.
    #[serde(default)]
    pub wakes: u64,
    /// How often it was started again by its restart policy since its owner last started it.
    #[serde(default)]
    pub restarts: u32,
    /// When its program was last started, milliseconds since the epoch; null for procs of older daemons.
    #[serde(default)]
    pub started_at_ms: Option<u64>,
    /// When it is started again, milliseconds from now; null unless it is restarting.
    #[serde(default)]
    pub next_start_ms: Option<u64>,
    /// Whether it has become ready since its last start; null where its spec does not say what that is.
    #[serde(default)]
    pub ready: Option<bool>,
    /// What its probes were last answered, in the order of its spec. Looking here asks none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<ProbeView>,
    /// The specification that it was made from. Values of its environment are empty but in the answer to `GET /v1/procs/NAME?env=true`.
    pub spec: Spec,
}

/// `GET /v1/procs/NAME/why`. For a running proc the answer takes a second, in which its threads are watched.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct WhyView {
    /// Name.
    pub name: ProcName,
    /// Its state.
    pub state: StateName,
    /// What keeps it awake now, as lines for people, the strongest reason first; empty for a sleeper.
    pub awake_because: Vec<String>,
    /// What the newest activity was; null for a sleeper.
    pub activity: Option<ActivityKind>,
    /// Milliseconds since then, told once a second; null for a sleeper.
    pub quiet_ms: Option<u64>,
    /// Milliseconds of quiet after which it is parked; null for a sleeper and with `--never-sleep`.
    pub parks_after_ms: Option<u64>,
    /// What its threads and sockets do; null for a sleeper, and when the look was given up (`awake_because` says so).
    pub seen: Option<SeenView>,
    /// What stood in the way of the last sleep that was refused, or keeps a sleeper from going further; empty when nothing does.
    pub cannot_sleep: Vec<String>,
    /// When that was, milliseconds since the epoch; null when none was or an earlier daemon saw it.
    pub cannot_sleep_at_ms: Option<u64>,
    /// The timer that will wake a sleeper; null for the awake, and without one.
    pub next_wake: Option<NextWakeView>,
    /// Whether its clock stands while it is parked, and by which word: its owner's, or a profile's; null if it goes on.
    #[serde(default)]
    pub clock: Option<String>,
    /// The last sleep, the one that a sleeper is in.
    #[serde(default)]
    pub last_sleep: Option<SleepView>,
    /// The last wake.
    pub last_wake: Option<WakeView>,
    /// The data directory that has taken it over from the store, by its id there; null for a proc that is here.
    #[serde(default)]
    pub taken_over_by: Option<String>,
    /// Why it runs on something else than the newest it slept with, and on what; null when it does not.
    #[serde(default)]
    pub fell_back: Option<String>,
    /// The volumes that pin it to this machine and data directory, a line for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pinned_by: Vec<String>,
}

/// What was seen of a running proc's newest activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivityKind {
    /// Payload was received or sent.
    Traffic,
    /// It used more than 1% of a core.
    Cpu,
    /// It was started, woken or called and has done nothing that counts since.
    Called,
}

/// What a running proc's threads and sockets did within a second.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SeenView {
    /// How long the threads were watched, microseconds.
    pub watched_us: u64,
    /// Threads that were on a CPU meanwhile, the busiest first, at most 32. One that ended meanwhile is not seen.
    pub threads: Vec<ThreadView>,
    /// Connections, flows of datagrams and listeners with connections that wait to be accepted: the one with the newest
    /// packet first, at most 256.
    pub sockets: Vec<SocketView>,
    /// How many of those there are in all.
    pub sockets_in_all: usize,
    /// Timers and time-outs of calls that are set, the next one first, at most 64.
    pub timers: Vec<TimerView>,
    /// Programs that run in it by `kip exec`.
    pub execs: Vec<ProgramView>,
}

/// A process of a proc.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ProgramView {
    /// The name the kernel has for it, at most 15 bytes.
    pub name: String,
    /// Its process id inside.
    pub pid: u32,
}

/// A thread with CPU time.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ThreadView {
    /// The thread's own name, at most 15 bytes.
    pub name: String,
    /// Its id inside.
    pub tid: u32,
    /// Its process.
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
    /// Its own address.
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
    /// The processes that have it open.
    pub programs: Vec<ProgramView>,
}

/// A timer that is set.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TimerView {
    /// `timerfd`, `POSIX timer` or `time-out of NAME`, a call that waits.
    pub kind: String,
    /// Whose.
    pub program: ProgramView,
    /// The thread that waits, by its id inside; null for timers.
    pub tid: Option<u32>,
    /// Milliseconds until it is due; null where the kernel tells only the program itself.
    pub due_ms: Option<u64>,
    /// Its period, milliseconds; null for one that fires once or where it is not told.
    pub every_ms: Option<u64>,
}

/// The timer that will wake a sleeper.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct NextWakeView {
    /// `timerfd`, `POSIX timer`, `interval timer`, `time-out of a call` or `it was at work`.
    #[schemars(extend("enum" = TIMERS))]
    pub kind: String,
    /// When the timer is due, milliseconds from now.
    pub due_ms: u64,
    /// When the wake for it begins, milliseconds from now.
    pub begins_ms: u64,
    /// It stands for all ticks, which are gathered; none is on time.
    pub gathered: bool,
}

/// One line of `kip events`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct Event {
    /// Its number: larger than that of every earlier one, those of earlier daemons of this data directory included, and one
    /// more than that of the one before it from the same daemon. 0 from older daemons.
    #[serde(default)]
    pub id: u64,
    /// When, milliseconds since the epoch.
    pub at_ms: u64,
    /// Which proc; null for the daemon itself.
    pub name: Option<ProcName>,
    /// What happened, one of [`EVENTS`].
    #[schemars(extend("enum" = EVENTS))]
    pub kind: String,
    /// One line.
    pub detail: String,
}

/// `GET /v1/info`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct Info {
    /// Version of the daemon.
    pub version: String,
    /// Its data directory.
    pub data: String,
    /// Its pid.
    pub pid: u32,
    /// Name of this worker.
    pub worker: String,
    /// The keeper's pid.
    pub keeper_pid: u32,
    /// The pager's process id; 0 while there is none.
    #[serde(default)]
    pub pager_pid: u32,
    /// Wakes of all procs in the last 60 seconds. From the events that are kept: where those do not reach back that far,
    /// as many as there would have been at their pace.
    #[serde(default)]
    pub wakes_last_minute: u64,
    /// How full memory is; null from older daemons.
    #[serde(default)]
    pub room: Option<RoomView>,
    /// What is kept on the local disk of what is in the store; null without such a cache.
    #[serde(default)]
    pub cache: Option<CacheView>,
}
