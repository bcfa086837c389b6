//! What can go wrong between a keeper and its client.

use crate::protocol::{BadHandleName, PROTOCOL};
use crate::resident;
use crate::run_directory::RunDirectoryError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// How long one answer may take.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why no keeper could be had.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The run directory.
    #[error(transparent)]
    Place(#[from] RunDirectoryError),
    /// It does not start.
    #[error(transparent)]
    Run(#[from] resident::RunError),
    /// It cannot be connected to.
    #[error("cannot connect to the keeper at {path}")]
    Connect {
        /// Its socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It does not answer a first ping.
    #[error("the keeper at {path} does not answer properly")]
    Ping {
        /// Its socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: KeeperError,
    },
    /// It is of another kind.
    #[error("the keeper of pid {pid} speaks protocol {theirs}, this program {PROTOCOL}: the next `kip up` replaces it")]
    Protocol {
        /// Its process id.
        pid: u32,
        /// Its protocol.
        theirs: u32,
    },
}

/// Why the keeper did not do it. Nothing was changed, except that after `Gone`, `Stuck` and
/// `Answer` it is not known.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// It has died. [`crate::Keeper::respawn`], then put everything again.
    #[error("the keeper is gone")]
    Gone {
        /// How it was noticed.
        #[source]
        source: io::Error,
    },
    /// It lives but does not answer. The connection was given up; [`crate::Keeper::respawn`] makes
    /// a new one.
    #[error("the keeper did not answer within {} s", ANSWER_TIMEOUT.as_secs())]
    Stuck,
    /// It holds as many descriptors as it can.
    #[error("{0}")]
    Full(String),
    /// A name to rename to is in use.
    #[error("{0}")]
    Taken(String),
    /// It did not accept the request.
    #[error("the keeper refused a request: {0}")]
    Refused(String),
    /// It holds nothing of that name.
    #[error("the keeper holds no {name:?}")]
    Unknown {
        /// The name.
        name: String,
    },
    /// Not a name.
    #[error(transparent)]
    BadName(#[from] BadHandleName),
    /// A name was put without a descriptor.
    #[error("nothing to hold under {name:?}")]
    Nothing {
        /// The name.
        name: String,
    },
    /// The request could not be sent, the answer not received or not understood, for example
    /// because this process has no room for more open files. The connection was given up;
    /// [`crate::Keeper::respawn`] makes a new one.
    #[error("cannot talk to the keeper")]
    Answer {
        /// Why.
        #[source]
        source: io::Error,
    },
}
