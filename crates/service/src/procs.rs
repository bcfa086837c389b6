//! The life of procs, and what is seen of one.

use crate::{ExecSession, Feed};
use async_trait::async_trait;
use kip_types::api::clone::{CloneAdvice, CloneRequest, ClonesView};
use kip_types::api::{
    AttachRequest, Detail, Details, ExecRequest, HealthView, LogLine, LogsRequest, MeterView, Moved, ProcView, Refusal,
    RemoveRequest, RenameRequest, RunRequest, SignalRequest, SleepRequest, StartRequest, StopRequest, UpdateRequest,
    WakeRequest, WhyView,
};
use kip_types::name::ProcName;

/// Procs: made, looked at, put to sleep, woken, removed.
#[async_trait]
pub trait ProcService: Send + Sync + 'static {
    /// Creates a proc; returns when its program has been exec'd or, with `wait_ready`, when its
    /// ports listen. Nothing in the request is left open any more. A name in use is `Code::Taken`,
    /// and so is a port.
    async fn run(&self, request: RunRequest) -> Result<ProcView, Refusal>;

    /// All names in use. Cheap: measures nothing.
    async fn names(&self) -> Result<Vec<ProcName>, Refusal>;

    /// All procs, sorted by name.
    async fn list(&self) -> Result<Vec<ProcView>, Refusal>;

    /// One proc. Does not wake it.
    async fn inspect(&self, name: ProcName) -> Result<ProcView, Refusal>;

    /// How a proc is: its probes are asked, if it is awake and they were not a moment ago. Neither
    /// wakes it nor keeps it awake.
    async fn health(&self, name: ProcName) -> Result<HealthView, Refusal>;

    /// A proc from within: open files, environments, sockets, maps of memory. Does not wake it, and
    /// changes nothing.
    async fn details(&self, name: ProcName, of: Detail) -> Result<Details, Refusal>;

    /// Why a proc is in the tier that it is in. Watches a running one for a second; touches, wakes
    /// and waits for no proc.
    async fn why(&self, name: ProcName) -> Result<WhyView, Refusal>;

    /// What a proc has used, all of it or after `since_ms`. Does not wake it.
    async fn meter(&self, name: ProcName, since_ms: Option<u64>) -> Result<MeterView, Refusal>;

    /// What all procs have used, sorted by name.
    async fn meters(&self, since_ms: Option<u64>) -> Result<Vec<MeterView>, Refusal>;

    /// What a proc wrote, oldest first. With `follow` it ends when the proc is removed.
    async fn logs(&self, name: ProcName, which: LogsRequest) -> Result<Feed<LogLine>, Refusal>;

    /// Starts a stopped proc again, on its files; with `wait_ready` returns when its ports listen.
    async fn start(&self, name: ProcName, how: StartRequest) -> Result<ProcView, Refusal>;

    /// Ends a proc; keeps name, files and logs. One that is stopped already is answered as it is.
    async fn stop(&self, name: ProcName, how: StopRequest) -> Result<ProcView, Refusal>;

    /// Changes what of a proc can be changed without a restart. Neither wakes it nor keeps it
    /// awake; more memory in use than a new limit allows is `Code::State`, and changes nothing.
    async fn update(&self, name: ProcName, change: UpdateRequest) -> Result<ProcView, Refusal>;

    /// Makes a proc in place of the one of its name: started beside that one, it gets its name, its
    /// ports and its probes when it is ready, and the other one ends with its files. Clients that
    /// connect meanwhile reach the one or the other. If the new one does not get ready that is
    /// refused, and the other one stays.
    async fn replace(&self, request: RunRequest) -> Result<ProcView, Refusal>;

    /// Gives a proc another name. Neither wakes it nor stops it.
    async fn rename(&self, name: ProcName, request: RenameRequest) -> Result<ProcView, Refusal>;

    /// Makes procs that go on from where a proc is, each with a copy of its files and a name, ports
    /// and addresses of its own. A sleeper is not woken; one that runs stands still meanwhile. All
    /// of them or none.
    async fn clone_proc(&self, name: ProcName, request: CloneRequest) -> Result<ClonesView, Refusal>;

    /// How a clone of a proc would best be made just now. Watches one that runs for half a second,
    /// and wakes none.
    async fn clone_advice(&self, name: ProcName) -> Result<CloneAdvice, Refusal>;

    /// Sends a signal to a proc's program, which is woken for it; its end, if that is what comes of
    /// it, is as by itself. SIGKILL wakes none and ends the proc as a stop does.
    async fn signal(&self, name: ProcName, request: SignalRequest) -> Result<(), Refusal>;

    /// Removes a proc with all it has. One that is not stopped is `Code::State` unless forced.
    async fn remove(&self, name: ProcName, how: RemoveRequest) -> Result<(), Refusal>;

    /// Sends a proc to a lower tier and returns when it is there.
    async fn sleep(&self, name: ProcName, how: SleepRequest) -> Result<Moved, Refusal>;

    /// Wakes a proc and returns when it runs. One that is not known here is looked for in the
    /// store, by its id or by its name there, and taken over if it runs nowhere.
    async fn wake(&self, name: ProcName, how: WakeRequest) -> Result<Moved, Refusal>;

    /// What a proc's own program writes, and what a client types for it, until the client goes. One
    /// that has ended shows what it wrote.
    async fn attach(&self, name: ProcName, request: AttachRequest) -> Result<ExecSession, Refusal>;

    /// Runs a program inside a proc, which is woken for it.
    async fn exec(&self, name: ProcName, request: ExecRequest) -> Result<ExecSession, Refusal>;
}
