//! The interface between API and worker: everything the API can ask of the machine.
//!
//! The API calls what changes something from a task of its own and lets it run to its end even when no client waits for
//! the answer any more. Only a [`Feed`] or an [`ExecSession`] is tied to its client: it is dropped when the client goes.

use kip_types::api::{
    CarriedView, CheckRequest, CheckView, CollectRequest, CollectView, ContentsView, Detail, Details, DownRequest,
    DownView, Event, EventsRequest, ExecEnd, ExecRequest, HealthView, HistoryView, ImportRequest, Info, LogLine,
    LogsRequest, MeterView, Moved, ProcView, Refusal, RemoveRequest, RunRequest, SleepRequest, SnapshotDetails,
    SnapshotName, SnapshotsView, StartRequest, StopRequest, Verified, VerifyRequest, WakeRequest, WhyView,
};
use kip_types::backup::{BackupProgress, BackupRequest};
use kip_types::image::{ImageDetails, ImageView, ImagesCollectRequest, ImagesRemoved, PullProgress, PullRequest};
use kip_types::keys::{
    DestroyedKeyView, ExportKeysRequest, ExportedKeys, ImportKeysRequest, ImportedKeysView, KeyView,
};
use kip_types::name::ProcName;
use kip_types::volume::{VolumeName, VolumeView};
use std::future::Future;
use tokio::sync::mpsc;

/// Items as they come. Its sender is dropped at the end; an error is the last item. The receiver is dropped when
/// no client wants more.
pub type Feed<T> = mpsc::Receiver<Result<T, Refusal>>;

/// What a program under exec wrote, or how it ended.
#[derive(Debug)]
pub enum ExecOutput {
    /// Bytes of its standard output, never empty.
    Stdout(Vec<u8>),
    /// Bytes of its standard error, never empty.
    Stderr(Vec<u8>),
    /// It ended; nothing follows.
    End(ExecEnd),
}

/// A program that runs inside a proc for a client.
#[derive(Debug)]
pub struct ExecSession {
    /// Bytes for its standard input. Dropped at the client's end of file.
    pub stdin: mpsc::Sender<Vec<u8>>,
    /// What it writes. When the API drops this before [`ExecOutput::End`] came, the client is gone and the program is
    /// to be killed.
    pub output: mpsc::Receiver<ExecOutput>,
}

/// What a worker does for the API.
pub trait Service: Send + Sync + 'static {
    /// Creates a proc; returns when its program has been exec'd or, with `wait_ready`, when its ports listen. Nothing in
    /// the request is left open any more. A name in use is `Code::Taken`, and so is a port.
    fn run(&self, request: RunRequest) -> impl Future<Output = Result<ProcView, Refusal>> + Send;

    /// Tries whether such a proc can sleep, with a trial that is gone when this returns. The request is complete, and may write to its
    /// volumes.
    fn check(&self, request: CheckRequest) -> impl Future<Output = Result<CheckView, Refusal>> + Send;

    /// Refuses what [`Service::run`] would refuse, as far as that can be known without running the program. Leaves nothing. Those of
    /// `instead_of` are gone by then.
    fn validate(&self, run: RunRequest, instead_of: Vec<ProcName>) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// Reports whether the tarball or secrets of the proc of that name differ from the request.
    fn compare(&self, request: RunRequest) -> impl Future<Output = Result<ContentsView, Refusal>> + Send;

    /// All names in use. Cheap: measures nothing.
    fn names(&self) -> impl Future<Output = Result<Vec<ProcName>, Refusal>> + Send;

    /// All procs, sorted by name.
    fn list(&self) -> impl Future<Output = Result<Vec<ProcView>, Refusal>> + Send;

    /// One proc. Does not wake it.
    fn inspect(&self, name: ProcName) -> impl Future<Output = Result<ProcView, Refusal>> + Send;

    /// How a proc is. Neither wakes it nor keeps it awake.
    fn health(&self, name: ProcName) -> impl Future<Output = Result<HealthView, Refusal>> + Send;

    /// A proc from within: open files, environments, sockets, maps of memory. Does not wake it.
    fn details(&self, name: ProcName, of: Detail) -> impl Future<Output = Result<Details, Refusal>> + Send;

    /// Starts a stopped proc again, on its files.
    fn start(&self, name: ProcName, how: StartRequest) -> impl Future<Output = Result<ProcView, Refusal>> + Send;

    /// Ends a proc; keeps name, files and logs. One that is stopped already is answered as it is.
    fn stop(&self, name: ProcName, how: StopRequest) -> impl Future<Output = Result<ProcView, Refusal>> + Send;

    /// Removes a proc with all it has. One that is not stopped is `Code::State` unless forced.
    fn remove(&self, name: ProcName, how: RemoveRequest) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// Sends a proc to a lower tier and returns when it is there.
    fn sleep(&self, name: ProcName, how: SleepRequest) -> impl Future<Output = Result<Moved, Refusal>> + Send;

    /// Wakes a proc and returns when it runs. One that is not known here is looked for in the store, and taken over if it runs
    /// nowhere.
    fn wake(&self, name: ProcName, how: WakeRequest) -> impl Future<Output = Result<Moved, Refusal>> + Send;

    /// What a proc has used, all of it or after `since_ms`. Does not wake it.
    fn meter(&self, name: ProcName, since_ms: Option<u64>) -> impl Future<Output = Result<MeterView, Refusal>> + Send;

    /// How procs were spread over the tiers lately. Wakes no proc.
    fn history(&self) -> impl Future<Output = Result<HistoryView, Refusal>> + Send;

    /// Metrics, in Prometheus' text format. Wakes no proc.
    fn metrics(&self) -> impl Future<Output = Result<String, Refusal>> + Send;

    /// What all procs have used, sorted by name.
    fn meters(&self, since_ms: Option<u64>) -> impl Future<Output = Result<Vec<MeterView>, Refusal>> + Send;

    /// Why a proc is in the tier that it is in.
    fn why(&self, name: ProcName) -> impl Future<Output = Result<WhyView, Refusal>> + Send;

    /// What a proc wrote, oldest first. With `follow` it ends when the proc is removed.
    fn logs(&self, name: ProcName, which: LogsRequest) -> impl Future<Output = Result<Feed<LogLine>, Refusal>> + Send;

    /// What happened, oldest first; those that are kept and, with `follow`, all that come.
    fn events(&self, which: EventsRequest) -> impl Future<Output = Result<Feed<Event>, Refusal>> + Send;

    /// Runs a program inside a proc, which is woken for it.
    fn exec(&self, name: ProcName, request: ExecRequest) -> impl Future<Output = Result<ExecSession, Refusal>> + Send;

    /// Generations in the store and on the local disk, by proc; with `only`, those of one name.
    fn snapshots(&self, only: Option<ProcName>) -> impl Future<Output = Result<Vec<SnapshotsView>, Refusal>> + Send;

    /// One generation in the store.
    fn snapshot(&self, which: SnapshotName) -> impl Future<Output = Result<SnapshotDetails, Refusal>> + Send;

    /// Looks whether generations are what was sealed. The last item is [`Verified::End`] or an error.
    fn verify(&self, request: VerifyRequest) -> impl Future<Output = Result<Feed<Verified>, Refusal>> + Send;

    /// Writes a generation into a file, whose path is absolute.
    fn export(&self, which: SnapshotName, file: String) -> impl Future<Output = Result<CarriedView, Refusal>> + Send;

    /// Brings a generation in from a file.
    fn import(&self, request: ImportRequest) -> impl Future<Output = Result<CarriedView, Refusal>> + Send;

    /// Deletes what nothing in the store leads to any more.
    fn collect(&self, request: CollectRequest) -> impl Future<Output = Result<CollectView, Refusal>> + Send;

    /// The realm's keys, oldest first.
    fn keys(&self) -> impl Future<Output = Result<Vec<KeyView>, Refusal>> + Send;

    /// Adds a key, which seals from now on.
    fn rotate_keys(&self) -> impl Future<Output = Result<KeyView, Refusal>> + Send;

    /// Destroys a key, named by its id or the beginning of it. Unless `yes`: refused, and told what that would cost.
    fn destroy_key(&self, key: String, yes: bool) -> impl Future<Output = Result<DestroyedKeyView, Refusal>> + Send;

    /// All keys, closed.
    fn export_keys(&self, how: ExportKeysRequest) -> impl Future<Output = Result<ExportedKeys, Refusal>> + Send;

    /// Takes over exported keys.
    fn import_keys(&self, what: ImportKeysRequest) -> impl Future<Output = Result<ImportedKeysView, Refusal>> + Send;

    /// Writes all that the data directory keeps into a file. The last item is [`BackupProgress::End`] or an error; it ends when the
    /// feed is dropped.
    fn backup(&self, request: BackupRequest) -> impl Future<Output = Result<Feed<BackupProgress>, Refusal>> + Send;

    /// Named volumes, sorted by name.
    fn volumes(&self) -> impl Future<Output = Result<Vec<VolumeView>, Refusal>> + Send;

    /// Deletes a named volume with its files. One that a proc has is `Code::State`.
    fn remove_volume(&self, name: VolumeName) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// Images that are here, by name.
    fn images(&self) -> impl Future<Output = Result<Vec<ImageView>, Refusal>> + Send;

    /// One image: by its name, or its id or digest or the beginning of one.
    fn image(&self, reference: String) -> impl Future<Output = Result<ImageDetails, Refusal>> + Send;

    /// Brings an image. The last item is [`PullProgress::End`] or an error; it ends when the feed is dropped.
    fn pull_image(&self, request: PullRequest) -> impl Future<Output = Result<Feed<PullProgress>, Refusal>> + Send;

    /// Removes an image's name, and of its layers what nothing else needs.
    fn remove_image(&self, reference: String) -> impl Future<Output = Result<ImagesRemoved, Refusal>> + Send;

    /// Removes what no image and no proc needs.
    fn collect_images(
        &self,
        request: ImagesCollectRequest,
    ) -> impl Future<Output = Result<ImagesRemoved, Refusal>> + Send;

    /// About this daemon.
    fn info(&self) -> impl Future<Output = Result<Info, Refusal>> + Send;

    /// Ends all procs, sleeping ones included, and what is kept running for them; or parks them and keeps what they need to come
    /// back. After `Ok` the API ends.
    fn down(&self, how: DownRequest) -> impl Future<Output = Result<DownView, Refusal>> + Send;
}
