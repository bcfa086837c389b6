//! What is asked of the procs of the machine.

use async_trait::async_trait;
use kip_types::api::{Refusal, RunRequest};
use kip_types::lifecycle::{Exit, Tier};
use kip_types::{ProcName, Spec};
use std::sync::Arc;

/// How the program of a proc has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramEnd {
    /// Its exit; none if it was ended while it slept, or could not be started again.
    pub exit: Option<Exit>,
    /// More about it in words, such as the last line that the program wrote.
    pub words: Option<String>,
}

/// A proc. Its key is its name when it was made, and stays when it is renamed.
#[async_trait]
pub trait HostedProc: Send + Sync + 'static {
    /// Its key.
    fn key(&self) -> ProcName;

    /// What its owner asked for, with its name of now.
    fn spec(&self) -> Spec;

    /// When its program was started, milliseconds since the epoch: another time for each program
    /// that the proc has had.
    fn started_at_ms(&self) -> u64;

    /// Its tier; none while it has no program.
    fn tier(&self) -> Option<Tier>;

    /// Waits until the program that was started at that time is no more. Never returns because the
    /// daemon ends.
    async fn program_gone(&self, started_at_ms: u64);

    /// Waits until its program has ended for good; none if the proc was removed. Never returns
    /// because the daemon ends.
    async fn program_ended(&self) -> Option<ProgramEnd>;

    /// Ends its program: by its stop signal, and by SIGKILL after `grace_ms`.
    ///
    /// # Errors
    /// It cannot be ended now, or is no more.
    async fn stop(&self, grace_ms: u64) -> Result<(), Refusal>;

    /// Removes it with all it has.
    ///
    /// # Errors
    /// It has not ended, or cannot be removed now.
    async fn remove(&self) -> Result<(), Refusal>;
}

/// What the machine has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MachineRoom {
    /// CPUs.
    pub cpus: f64,
    /// Memory that procs may use, bytes.
    pub memory_bytes: u64,
}

/// The procs of the machine.
#[async_trait]
pub trait SpawnHost: Send + Sync + 'static {
    /// Makes a proc and starts it; returns when its program was executed.
    ///
    /// # Errors
    /// Why it was not; then nothing is left of it. `Code::Exhausted`: there is no room now.
    async fn start(&self, request: RunRequest) -> Result<(), Refusal>;

    /// The proc of that key.
    fn proc(&self, key: &ProcName) -> Option<Arc<dyn HostedProc>>;

    /// The proc that has that name.
    fn named(&self, name: &ProcName) -> Option<Arc<dyn HostedProc>>;

    /// What can be reserved.
    fn room(&self) -> MachineRoom;

    /// The name of the machine, a failure domain.
    fn machine(&self) -> &str;
}
