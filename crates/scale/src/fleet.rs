//! What scaling asks of those that have the procs.

use crate::load::LoadCounters;
use async_trait::async_trait;
use kip_types::ProcName;
use kip_types::life::Check;
use kip_types::scale::{CloneMethod, Scaling};

/// A proc as far as it matters how many there are.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Its name, for people.
    pub name: ProcName,
    /// Another one for each proc of this daemon: of two that have one name after the other, too.
    pub id: u64,
    /// Whether it can serve.
    pub state: MemberState,
    /// CPU time that it may use a second.
    pub cpus: f64,
    /// What it has used.
    pub used: LoadCounters,
    /// Its declared TCP ports at which it listens; empty for one that sleeps.
    pub listens: Vec<u16>,
    /// It declares TCP ports.
    pub is_to_listen: bool,
}

/// Whether a proc can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberState {
    /// It runs.
    Awake,
    /// It is paged out; a connection wakes it.
    Hibernated,
    /// It is parked or archived; a connection wakes it.
    Parked,
    /// It is started, by its owner or by its own policy.
    Starting,
    /// Its program has ended by itself.
    Ended,
    /// Its owner has stopped it.
    Stopped,
}

impl MemberState {
    /// A connection to it is accepted, if it listens.
    pub fn serves(self) -> bool {
        matches!(self, MemberState::Awake | MemberState::Hibernated | MemberState::Parked)
    }
}

/// A proc and those that serve behind its name.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// What the proc is known by, also where it exists no more.
    pub key: ProcName,
    /// The proc itself; none if it has been removed.
    pub primary: Option<Member>,
    /// How it is scaled; none if it is not, or not any more.
    pub scaling: Option<Scaling>,
    /// Its replicas, the oldest first.
    pub replicas: Vec<Member>,
}

/// The procs of a machine, by their ids. What is asked of one that is there no more is refused.
#[async_trait]
pub trait Fleet: Send + Sync + 'static {
    /// Procs that are scaled, those that have replicas, and those that are kept awake.
    async fn groups(&self) -> Vec<Group>;

    /// Makes a replica, and returns when it accepts connections at these ports. Says how it was
    /// made, in words.
    ///
    /// # Errors
    /// Why there is none, in one line.
    async fn add(&self, primary: u64, method: CloneMethod, ports: &[u16]) -> Result<(Member, String), String>;

    /// Ends a replica in order, and removes it for good.
    ///
    /// # Errors
    /// Why it is still there, in one line.
    async fn remove(&self, replica: u64) -> Result<(), String>;

    /// Has new connections to the ports of a proc go to these.
    ///
    /// # Errors
    /// Why they do not, in one line.
    async fn spread(&self, primary: u64, over: &[u64]) -> Result<(), String>;

    /// Whether a client has to do with a proc: it has a connection, or flows of datagrams that the
    /// kernel may know. One that cannot tell is in use.
    async fn is_in_use(&self, id: u64) -> bool;

    /// Whether a proc falls asleep because it is idle.
    async fn keep_awake(&self, id: u64, awake: bool);

    /// Begins to wake a proc.
    async fn wake(&self, id: u64);

    /// Starts a proc again that has ended by itself.
    ///
    /// # Errors
    /// Why it does not run, in one line.
    async fn start(&self, id: u64) -> Result<(), String>;

    /// Whether a check of a proc succeeds; none for one that is asleep. It is no activity.
    async fn probe(&self, id: u64, check: &Check) -> Option<bool>;

    /// Says what was done, as an event of the proc.
    fn tell(&self, primary: &ProcName, detail: String);

    /// The daemon is about to end.
    fn is_closing(&self) -> bool;
}
