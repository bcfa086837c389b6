//! Why a generation, or pages of it, do not come from the store.

use crate::processor::Lacking;
use crate::{HeadFailure, engine};
use kip_archive::files::restore::TreeRestoreError;
use kip_archive::ids::ProcId;
use kip_archive::names::FrontRef;
use kip_archive::seal::UnsealError;
use kip_snapshot::SnapshotError;
use kip_store::GetError;
use std::io;
use std::path::PathBuf;

/// A generation did not come back; what the store has is as it was.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error(transparent)]
    Head(#[from] HeadFailure),
    #[error(transparent)]
    Get(#[from] GetError),
    #[error("the archived {front} of proc {proc} cannot be opened")]
    Open {
        proc: ProcId,
        front: FrontRef,
        #[source]
        source: UnsealError,
    },
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Processor(#[from] Lacking),
    #[error(transparent)]
    Engine(#[from] engine::Unreadable),
    #[error("its files have a part {name:?}, which this Kip does not know: upgrade Kip")]
    Files { name: String },
    #[error("{path} of its own files cannot be restored")]
    Restore {
        path: PathBuf,
        #[source]
        source: Box<TreeRestoreError>,
    },
    #[error("cannot read or write {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl FetchError {
    /// The store answers, and what it has is not what was stored: waiting does not help.
    pub fn is_damage(&self) -> bool {
        match self {
            FetchError::Get(e) => matches!(e, GetError::Missing { .. }),
            FetchError::Open { source, .. } => source.is_damage(),
            _ => false,
        }
    }
}

/// Pages do not come; a thread that needs them waits.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum DemandError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("cannot read or write {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the list of remote pages {path} is damaged")]
    Table { path: PathBuf },
    #[error(transparent)]
    Get(#[from] GetError),
    #[error("{object} cannot be opened")]
    Open {
        object: String,
        #[source]
        source: UnsealError,
    },
    #[error(transparent)]
    Front(Box<FetchError>),
    #[error("pages of {path} lie in a generation of the store that is not known here")]
    NoFront { path: PathBuf },
}

impl DemandError {
    /// The store does not give what it has, or not yet; or it cannot be opened as long as a key or
    /// a newer Kip is missing.
    pub fn is_the_stores(&self) -> bool {
        match self {
            DemandError::Get(_) => !self.is_missing(),
            DemandError::Open { source, .. } => !source.is_damage(),
            DemandError::Front(e) => match &**e {
                FetchError::Get(_) => !self.is_missing(),
                FetchError::Open { source, .. } => !source.is_damage(),
                _ => false,
            },
            _ => false,
        }
    }

    /// An object is not in the store, if that is there.
    pub fn is_missing(&self) -> bool {
        let get = match self {
            DemandError::Get(e) => Some(e),
            DemandError::Front(e) => {
                if let FetchError::Get(e) = &**e {
                    Some(e)
                } else {
                    None
                }
            }
            _ => None,
        };
        matches!(get, Some(GetError::Missing { .. }))
    }

    /// What the store has is not what was stored.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            DemandError::Open { source, .. } => source.is_damage(),
            DemandError::Front(e) => matches!(&**e, FetchError::Open { source, .. } if source.is_damage()),
            _ => false,
        }
    }
}
