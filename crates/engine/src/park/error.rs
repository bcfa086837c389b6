//! Why a proc was not parked.

use crate::pins::PinError;
use crate::volumes::sleep::UnfitVolume;
use kip_checkpoint::clocks::ClockError;
use kip_checkpoint::dump::DumpError;
use kip_checkpoint::plan::PlanError;
use kip_criu_images::ImageError;
use kip_keeper::KeeperError;
use kip_pager::client::PagerError;
use kip_sandbox::quota::QuotaError;
use kip_snapshot::SnapshotError;
use std::io;

/// Why a proc was not parked; it runs on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum ParkError {
    #[error(transparent)]
    Dump(#[from] DumpError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Clock(#[from] ClockError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    #[error("the pager, which has some of its memory, does not tell of it")]
    Pager(#[from] PagerError),
    #[error("what it has out cannot be told")]
    Account(#[source] PagerError),
    #[error("memory that it has out cannot be taken over")]
    Carry(#[source] SnapshotError),
    #[error("process {pid} has memory out and is not in the snapshot")]
    Unmatched { pid: u32 },
    #[error("the helper for the snapshot cannot be started")]
    Helper(#[from] kip_checkpoint::helper::HelperError),
    #[error("socket {inode} of the frozen program cannot be taken over")]
    Socket {
        inode: u32,
        #[source]
        source: io::Error,
    },
    #[error("process {pid} is stopped by a signal and has several threads, which CRIU cannot put into a snapshot")]
    StoppedThreads {
        /// As numbered inside.
        pid: u32,
    },
    #[error("the state cannot be recorded")]
    Record(#[source] kip_records::record::RecordError),
    #[error(transparent)]
    Volume(#[from] UnfitVolume),
    #[error("the first thread of process {pid} ({name}) has ended while others of it go on, pthread_exit(3)")]
    WithoutFirstThread { pid: u32, name: String },
    #[error("it opened a terminal just now")]
    OpensTerminals,
    #[error("it could not be woken: {criu} ({plan})")]
    NoWayBack { criu: String, plan: String },
    #[error("its own files cannot be looked at")]
    Place(#[from] QuotaError),
    #[error("its processes cannot be read")]
    Tree(#[source] io::Error),
    #[error("{what}")]
    UsedUp {
        what: String,
        #[source]
        source: DumpError,
    },
}

impl ParkError {
    /// It may succeed with all memory there.
    pub fn is_about_what_is_out(&self) -> bool {
        let refused = matches!(self, ParkError::Account(PagerError::Refused(_)));
        refused || matches!(self, ParkError::Carry(_) | ParkError::Unmatched { .. })
    }
}
