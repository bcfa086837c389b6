//! What scaling asks of those that have the procs.

use crate::load::LoadCounters;
use async_trait::async_trait;
use kip_types::ProcName;
use kip_types::api::clone::CloneMethod;
use kip_types::life::Check;
use kip_types::scale::Scaling;

/// A proc as far as it matters how many there are.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Its name.
    pub name: ProcName,
    /// Another one for each proc: of two that have one name after the other, too.
    pub id: u64,
    /// Whether it can serve.
    pub state: MemberState,
    /// CPU time that it may use a second.
    pub cpus: f64,
    /// What it has used.
    pub usage: LoadCounters,
}

/// Whether a proc can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberState {
    /// Awake, or in memory.
    Up,
    /// Parked or archived; a connection wakes it.
    Down,
    /// Its program has ended, and is started again by its own policy.
    Restarting,
    /// Its program has ended by itself.
    Ended,
    /// Its owner has stopped it.
    Stopped,
}

/// A proc and those that serve behind its name.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// What the proc is known by, also where it exists no more.
    pub key: ProcName,
    /// The proc itself; none if it has been removed or replaced.
    pub primary: Option<Member>,
    /// How it is scaled; none if it is not, or not any more.
    pub scaling: Option<Scaling>,
    /// Its replicas, the oldest first.
    pub replicas: Vec<Member>,
}

/// The procs of a machine.
#[async_trait]
pub trait Fleet: Send + Sync + 'static {
    /// Procs that are scaled, and those that have replicas.
    async fn groups(&self) -> Vec<Group>;

    /// Makes a replica, and returns when it accepts connections.
    ///
    /// # Errors
    /// Why there is none, in one line.
    async fn add(&self, primary: &ProcName, method: CloneMethod) -> Result<ProcName, String>;

    /// Removes a replica for good.
    ///
    /// # Errors
    /// Why it is still there, in one line.
    async fn remove(&self, replica: &ProcName) -> Result<(), String>;

    /// Has new connections to the ports of a proc go to these, by their names.
    ///
    /// # Errors
    /// Why they do not, in one line.
    async fn spread(&self, primary: &ProcName, over: &[ProcName]) -> Result<(), String>;

    /// Whether a proc has connections; one that cannot tell has some.
    async fn has_connections(&self, name: &ProcName) -> bool;

    /// Wakes a proc and keeps it awake while it is idle, or lets it sleep again.
    async fn keep_awake(&self, name: &ProcName, awake: bool);

    /// Starts a proc again that has ended.
    ///
    /// # Errors
    /// Why it does not run, in one line.
    async fn start(&self, name: &ProcName) -> Result<(), String>;

    /// Whether a check of a proc succeeds; none for one that is asleep. It is no activity.
    async fn probe(&self, name: &ProcName, check: &Check) -> Option<bool>;

    /// Whether there is a template of the proc's kind.
    async fn has_template(&self, name: &ProcName) -> bool;

    /// Says what was done, as an event of the proc.
    fn tell(&self, primary: &ProcName, detail: String);

    /// The daemon is about to end.
    fn is_closing(&self) -> bool;
}
