//! Messages of the API about procs by spawn: `kip spawn`, `kip procs`, `kip evict`.

use crate::lifecycle::Tier;
use crate::name::ProcName;
use crate::spec::{Image, ProcClass, Sandbox, TreeAccess};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// `POST /v1/spawned`; answered with `SpawnedView`. What is left open is the parent's, if there is
/// one.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpawnRequest {
    /// Program, by its path or its name in PATH, and its arguments; never empty.
    pub command: Vec<String>,
    /// Environment on top of PATH, HOME, HOSTNAME.
    pub env: BTreeMap<String, String>,
    /// Working directory inside the proc.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<PathBuf>,
    /// How it shares CPUs with other procs.
    pub class: ProcClass,
    /// At most so many CPUs, 1.0 is one core; of the class `lc` so many are reserved for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// At most so much memory, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The failure domain to run in: the name of a machine. Null for any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// The proc that it is a child of, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<ProcName>,
    /// It goes on when its parent ends.
    pub detached: bool,
    /// It has started only when its program says so over the runtime socket; else once its program
    /// was executed.
    pub says_started: bool,
    /// File system; null is that of the parent, or the host's files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
    /// Its sandbox; null is that of the parent, and a light parent has light children alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// The network that it is in; null is that of the parent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// What it may do to the name tree; null is what the parent may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree: Option<TreeAccess>,
}

/// Which moment in the life of a proc by spawn is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SpawnMoment {
    /// It has started, or ended before that.
    Start,
    /// It has ended.
    Exit,
    /// It is to end, or has ended.
    Evict,
}

/// `GET /v1/spawned/NAME`, as its query.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpawnedRequest {
    /// Answer when that has come; at once without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait: Option<SpawnMoment>,
    /// But no later than after this time, milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within_ms: Option<u64>,
}

/// `POST /v1/spawned/NAME/evict`; answered with `SpawnedView` when it is recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvictRequest {
    /// From the word to end to SIGKILL, milliseconds; null is 10 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// Why, for those that wait for its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// How far a proc by spawn is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum SpawnedState {
    /// It waits for room.
    Queued,
    /// It is being started.
    Starting,
    /// Its program runs or sleeps.
    Live,
    /// It has ended.
    Ended,
}

/// Why a proc by spawn is no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum SpawnEndKind {
    /// Its program has exited with a code.
    Exited,
    /// A signal has ended its program.
    Killed,
    /// It was evicted, or stopped or removed by its owner.
    Evicted,
    /// Its program was never executed.
    NeverStarted,
    /// It is gone and there is no exit status: the machine was restarted, for example.
    Lost,
}

/// The end of a proc by spawn.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SpawnEnd {
    /// Why it is no more.
    pub why: SpawnEndKind,
    /// The code that its program exited with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The signal that ended its program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The status that its program has said over the runtime socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<i32>,
    /// What its program has said with it, or else more about the end, one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// When, milliseconds since the epoch.
    pub at_ms: u64,
}

impl SpawnEnd {
    /// As shells tell it: the code that the program has exited with, or 128 and the number of the
    /// signal; 1 if there is neither.
    pub fn shell_code(&self) -> i32 {
        self.exit_code.or(self.signal.map(|signal| 128 + signal)).unwrap_or(1)
    }
}

/// A proc by spawn.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SpawnedView {
    /// Its name, never that of another one.
    pub name: ProcName,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Name of its parent; null for one that a client has spawned.
    pub parent: Option<ProcName>,
    /// It goes on when its parent ends.
    pub detached: bool,
    /// How it shares CPUs with other procs.
    pub class: ProcClass,
    /// How far it is.
    pub state: SpawnedState,
    /// Its tier; null unless it is live.
    pub tier: Option<Tier>,
    /// What it waits for in the queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// It has started, also if it has ended since.
    pub started: bool,
    /// It is to end, and why; null unless it was evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evicted: Option<String>,
    /// When it was spawned, milliseconds since the epoch.
    pub spawned_at_ms: u64,
    /// Its end; null before that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<SpawnEnd>,
}
