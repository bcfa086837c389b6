//! Messages about procs by spawn.

use prost::{Enumeration, Message};

/// A variable of an environment.
#[derive(Clone, PartialEq, Message)]
pub struct WireVariable {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// Spawns a child of the proc. Answered with [`WireSpawned`] when it is recorded.
#[derive(Clone, PartialEq, Message)]
pub struct SpawnCall {
    /// Program and arguments.
    #[prost(string, repeated, tag = "1")]
    pub command: Vec<String>,
    /// Its environment.
    #[prost(message, repeated, tag = "2")]
    pub env: Vec<WireVariable>,
    /// Its working directory; none where it is empty.
    #[prost(string, tag = "3")]
    pub workdir: String,
    /// Best effort; else latency-critical.
    #[prost(bool, tag = "4")]
    pub best_effort: bool,
    /// At most so many thousandths of a CPU.
    #[prost(uint32, optional, tag = "5")]
    pub cpus_milli: Option<u32>,
    /// At most so much memory, bytes.
    #[prost(uint64, optional, tag = "6")]
    pub memory_bytes: Option<u64>,
    /// The failure domain, a machine; any where it is empty.
    #[prost(string, tag = "7")]
    pub domain: String,
    /// It goes on when the proc ends.
    #[prost(bool, tag = "8")]
    pub detached: bool,
    /// It has started when it says so.
    #[prost(bool, tag = "9")]
    pub says_started: bool,
    /// Its sandbox is light; else that of the proc.
    #[prost(bool, tag = "10")]
    pub light: bool,
}

/// Which moment is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum WireMoment {
    /// It has started, or ended.
    Start = 0,
    /// It has ended.
    Exit = 1,
    /// It is to end, or has ended.
    Evict = 2,
}

/// Waits for a moment in the life of a spawned proc. Answered with [`WireSpawned`] when that has
/// come, out of the order of calls.
#[derive(Clone, PartialEq, Message)]
pub struct AwaitCall {
    /// Its name; where it is empty the client's own proc, whose eviction is waited for.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The moment.
    #[prost(enumeration = "WireMoment", tag = "2")]
    pub moment: i32,
}

/// The client's own proc, a spawned one, has started. Answered with `WireDone`.
#[derive(Clone, PartialEq, Message)]
pub struct StartedCall {}

/// The client's own proc, a spawned one, is about to end. Answered with `WireDone`.
#[derive(Clone, PartialEq, Message)]
pub struct ExitedCall {
    /// Its status.
    #[prost(uint32, tag = "1")]
    pub status: u32,
    /// One line about it.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// Has a spawned proc end. Answered with [`WireSpawned`].
#[derive(Clone, PartialEq, Message)]
pub struct EvictCall {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Why; one line.
    #[prost(string, tag = "2")]
    pub reason: String,
    /// From the word to end to SIGKILL, milliseconds.
    #[prost(uint64, optional, tag = "3")]
    pub grace_ms: Option<u64>,
}

/// Why a spawned proc is no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum WireEndKind {
    /// Its program has exited.
    Exited = 0,
    /// A signal has ended its program.
    Killed = 1,
    /// It was evicted, or ended by its owner.
    Evicted = 2,
    /// Its program was never executed.
    NeverStarted = 3,
    /// It is gone without an exit status.
    Lost = 4,
}

/// The end of a spawned proc.
#[derive(Clone, PartialEq, Message)]
pub struct WireSpawnEnd {
    /// Why it is no more.
    #[prost(enumeration = "WireEndKind", tag = "1")]
    pub why: i32,
    /// The code that its program has exited with.
    #[prost(uint32, optional, tag = "2")]
    pub exit_code: Option<u32>,
    /// The signal that has ended its program.
    #[prost(uint32, optional, tag = "3")]
    pub signal: Option<u32>,
    /// The status that its program has said.
    #[prost(uint32, optional, tag = "4")]
    pub status: Option<u32>,
    /// What it has said with that, or more about the end.
    #[prost(string, tag = "5")]
    pub message: String,
}

/// A spawned proc.
#[derive(Clone, PartialEq, Message)]
pub struct WireSpawned {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// It has started.
    #[prost(bool, tag = "2")]
    pub started: bool,
    /// Why it is to end, if it is.
    #[prost(string, optional, tag = "3")]
    pub evicted: Option<String>,
    /// Its end.
    #[prost(message, optional, tag = "4")]
    pub end: Option<WireSpawnEnd>,
}
