//! Why a proc is in its tier: `GET /v1/procs/NAME/why`.

use super::*;

/// `GET /v1/procs/NAME/why`. For a running proc the answer takes a second, in which its threads are
/// watched.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct WhyView {
    /// Name of the proc.
    pub name: ProcName,
    /// State of the proc.
    pub state: StateName,
    /// Reasons why the proc is awake now, as lines for people, the strongest first; empty for a
    /// sleeping proc.
    pub awake_because: Vec<String>,
    /// Kind of the newest activity; null for a sleeping proc.
    pub activity: Option<ActivityKind>,
    /// Time since that activity, milliseconds, sampled once a second; null for a sleeping proc.
    pub quiet_ms: Option<u64>,
    /// Time without activity after which the proc is parked, milliseconds; null for a sleeping proc
    /// and with `--never-sleep`.
    pub parks_after_ms: Option<u64>,
    /// Activity of threads and sockets; null for a sleeping proc, and when the inspection failed
    /// (`awake_because` says so).
    pub seen: Option<SeenView>,
    /// Causes that refused the last sleep, or that keep a sleeping proc from a lower tier; empty if
    /// there are none.
    pub cannot_sleep: Vec<String>,
    /// Time of that refusal, milliseconds since the epoch; null if there was none or an earlier
    /// daemon saw it.
    pub cannot_sleep_at_ms: Option<u64>,
    /// Timer that will wake the sleeping proc; null for a proc that is awake or has no timer.
    pub next_wake: Option<NextWakeView>,
    /// Sentence that CLOCK_MONOTONIC stands still while the proc is parked, and by which option or
    /// profile; null if the clock goes on.
    #[serde(default)]
    pub clock: Option<String>,
    /// The last sleep; of a sleeping proc the present one.
    #[serde(default)]
    pub last_sleep: Option<SleepView>,
    /// The last wake.
    pub last_wake: Option<WakeView>,
    /// Id of the data directory that has taken the proc over from the store; null for a proc that
    /// is here.
    #[serde(default)]
    pub taken_over_by: Option<String>,
    /// Reason why the proc runs from something else than its newest snapshot, and from what; null
    /// if it does not.
    #[serde(default)]
    pub fell_back: Option<String>,
    /// Volumes that pin the proc to this machine and data directory, a line for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pinned_by: Vec<String>,
    /// What a clone of the proc would begin from best just now, and why; null of a trial, and from
    /// a daemon that does not say so.
    #[serde(default)]
    pub clone: Option<clone::CloneAdvice>,
    /// Calls that the proc's egress rules refused, at most 64, the newest first; forgotten when the
    /// daemon is replaced.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress_refused: Vec<RefusedCallView>,
}

/// A call that a proc's egress rules refused.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct RefusedCallView {
    /// `tcp ADDRESS:PORT`, `udp ADDRESS:PORT`, `icmp ADDRESS` or `name NAME`.
    pub to: String,
    /// Time at which the daemon learned of the newest such call, milliseconds since the epoch.
    pub at_ms: u64,
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
    /// Threads that were on a CPU meanwhile, the busiest first, at most 32, without threads that
    /// ended meanwhile.
    pub threads: Vec<ThreadView>,
    /// Connections, flows of datagrams and listeners with connections that wait to be accepted: the
    /// one with the newest packet first, at most 256.
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

/// The state of a socket.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize, strum::Display, strum::IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum SocketState {
    /// TCP: both sides may send.
    Established,
    /// TCP: the peer sends no more.
    CloseWait,
    /// TCP: the proc sends no more.
    FinWait,
    /// TCP: the proc connects.
    SynSent,
    /// TCP: the proc listens.
    Listen,
    /// TCP: any other state of a connection that begins or ends.
    Closing,
    /// UDP: datagrams with one peer.
    Flow,
    /// A word of a newer Kip.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A socket, as the proc sees it.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SocketView {
    /// TCP or UDP.
    pub proto: Protocol,
    /// State of the socket.
    pub state: SocketState,
    /// Local address.
    pub local: SocketAddr,
    /// The other side's address as the proc sees it; null for a listener, and for datagrams whose
    /// sender is not known.
    pub peer: Option<SocketAddr>,
    /// The client's address as the host sees it, before translation; null unless a client came from
    /// outside the proc.
    pub client: Option<SocketAddr>,
    /// Bytes that the program has not read; for a listener, connections it has not accepted.
    pub unread: u32,
    /// Bytes that are not sent or not acknowledged; 0 for a listener.
    pub unsent: u32,
    /// The newest packet either way, empty ones included, is at most this many milliseconds old,
    /// and at most a second younger. From the flow table of the host; null for what is not in it,
    /// such as connections within the proc.
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
    /// Period of the timer, milliseconds; null for a timer that fires once or whose period is not
    /// known.
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
