//! Why a proc was not parked.

use crate::pins::PinError;
use crate::tmpfs::UnfitTmpfs;
use crate::volumes::sleep::UnfitVolume;
use kip_checkpoint::dump::{DumpError, WITHOUT_FIRST_THREAD};
use kip_checkpoint::plan::PlanError;
use kip_clocks::ClockError;
use kip_copy::memory::HoldError;
use kip_criu_images::CheckpointImageError;
use kip_keeper::KeeperError;
use kip_pager::client::PagerError;
use kip_sandbox::cgroup::CgroupError;
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
    Image(#[from] CheckpointImageError),
    #[error(transparent)]
    Clock(#[from] ClockError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    #[error("the pager does not say which memory of the proc is paged out")]
    Pager(#[from] PagerError),
    #[error("the pager cannot list the proc's paged-out memory")]
    Account(#[source] PagerError),
    #[error("the proc's paged-out memory cannot be added to the snapshot")]
    Carry(#[source] SnapshotError),
    #[error("process {pid} has paged-out memory and is not in the snapshot")]
    Unmatched { pid: u32 },
    #[error("its memory cannot be held while it runs")]
    Hold(#[from] HoldError),
    #[error("its limits cannot be lifted while it is copied")]
    Limits(#[source] CgroupError),
    #[error("its memory was held, and cannot be written")]
    Held(#[source] io::Error),
    #[error("{0}")]
    Copy(String),
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
    #[error(transparent)]
    Tmpfs(#[from] UnfitTmpfs),
    #[error("the first thread of process {pid} ({name}) has ended while others of it go on, pthread_exit(3)")]
    WithoutFirstThread { pid: u32, name: String },
    #[error("the proc opened a terminal while it was parked")]
    OpensTerminals,
    #[error("the proc is not parked, because neither CRIU ({criu}) nor a native restore ({plan}) could wake it")]
    NoWayBack { criu: String, plan: String },
    #[error("the proc's own files cannot be inspected")]
    Place(#[from] QuotaError),
    #[error("the proc's processes cannot be listed")]
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
    pub fn is_about_paged_out(&self) -> bool {
        let refused = matches!(self, ParkError::Account(PagerError::Refused(_)));
        refused || matches!(self, ParkError::Carry(_) | ParkError::Unmatched { .. })
    }

    /// It may succeed in a moment: a process was about to end when it was to be frozen.
    /// `one_ended`: one that was there before is there no more.
    pub fn is_about_an_end(&self, one_ended: bool) -> bool {
        let ends = |causes: &[String]| one_ended || causes.iter().any(|cause| cause == WITHOUT_FIRST_THREAD);
        matches!(self, ParkError::Dump(DumpError::Refused { causes, no_room: false }) if ends(causes))
            || one_ended && matches!(self, ParkError::WithoutFirstThread { .. })
    }
}
