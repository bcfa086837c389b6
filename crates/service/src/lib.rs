//! The interface between API and worker: everything the API can ask of the machine, a trait for
//! each subject.
//!
//! | trait | what is asked |
//! | --- | --- |
//! | [`ProcService`] | the life of procs, and what is seen of one |
//! | [`CheckpointService`] | what procs were at some moment |
//! | [`ScaleService`] | how many procs are behind a name |
//! | [`TemplateService`] | what procs of one kind begin from |
//! | [`FileService`] | files of procs, as archives |
//! | [`TrialService`] | what a run would come to |
//! | [`SnapshotService`], [`ImageService`], [`KeyService`], [`VolumeService`] | what the data directory and its store keep |
//! | [`NodeService`] | the daemon itself, and all procs at once |
//!
//! [`WorkerService`] is all of them. The API holds one as `dyn WorkerService`, so that it does not
//! depend on what is behind it, and beside it a [`TreeService`], the name tree, and a
//! [`SpawnService`], procs by spawn. Never acts and never decides: it has no code but the types of
//! what flows between the two.
//!
//! The API calls what changes something from a task of its own and lets it run to its end even when
//! no client waits for the answer any more. Only a [`Feed`] or an [`ExecSession`] is tied to its
//! client: it is dropped when the client goes.
#![forbid(unsafe_code)]

mod checkpoints;
mod files;
mod images;
mod keys;
mod node;
mod procs;
mod scale;
mod snapshots;
mod spawn;
mod templates;
mod tree;
mod trials;
mod volumes;

pub use checkpoints::CheckpointService;
pub use files::FileService;
pub use images::ImageService;
pub use keys::KeyService;
pub use node::NodeService;
pub use procs::ProcService;
pub use scale::ScaleService;
pub use snapshots::SnapshotService;
pub use spawn::{SpawnPrograms, SpawnService};
pub use templates::TemplateService;
pub use tree::{TreeFile, TreeService};
pub use trials::TrialService;
pub use volumes::VolumeService;

use kip_types::api::{ExecEnd, Refusal, TerminalSize};
use tokio::sync::mpsc;

/// All that a worker does for the API.
pub trait WorkerService:
    ProcService
    + CheckpointService
    + TemplateService
    + ScaleService
    + FileService
    + TrialService
    + SnapshotService
    + ImageService
    + KeyService
    + VolumeService
    + NodeService
{
}

impl<
    T: ProcService
        + CheckpointService
        + TemplateService
        + ScaleService
        + FileService
        + TrialService
        + SnapshotService
        + ImageService
        + KeyService
        + VolumeService
        + NodeService,
> WorkerService for T
{
}

/// Items as they come. Its sender is dropped at the end; an error is the last item. The receiver is
/// dropped when no client wants more.
pub type Feed<T> = mpsc::Receiver<Result<T, Refusal>>;

/// Items of a feed that wait for their reader.
const FEED: usize = 64;

/// A feed and its sender.
pub fn feed<T>() -> (mpsc::Sender<Result<T, Refusal>>, Feed<T>) {
    mpsc::channel(FEED)
}

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

/// What a client sends to a program under exec.
#[derive(Debug)]
pub enum ExecInput {
    /// Bytes for its standard input, never empty.
    Bytes(Vec<u8>),
    /// The client's terminal has this size now.
    Size(TerminalSize),
}

/// A program that runs inside a proc for a client, or a client that is attached to the proc's own.
#[derive(Debug)]
pub struct ExecSession {
    /// What the client sends. Dropped at the client's end of file.
    pub input: mpsc::Sender<ExecInput>,
    /// What it writes. When this is dropped before [`ExecOutput::End`] came, the client is gone and
    /// a program that runs for it is killed.
    pub output: mpsc::Receiver<ExecOutput>,
}
