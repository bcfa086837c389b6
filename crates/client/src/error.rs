//! Why a call did not do what was asked. Each Display is one line for a person.

use crate::remote::RemoteError;
use kip_types::api::Refusal;
use std::io;
use std::path::{Path, PathBuf};

/// A call's failure.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No daemon listens on the socket.
    #[error("no daemon answers at {}: start one with `kip --data {} up`", .socket.display(), .data.display())]
    NoDaemon {
        /// The socket.
        socket: PathBuf,
        /// The data directory.
        data: PathBuf,
    },
    /// The socket's permissions exclude the caller.
    #[error("no permission to use {}: run as root, or as a member of the group given to `kip up --group`", .socket.display())]
    Denied {
        /// The socket.
        socket: PathBuf,
    },
    /// Connecting failed for another reason.
    #[error("cannot connect to {}", .socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The daemon cannot be reached by TCP.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The daemon refused; its line says why.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The connection ended before the answer did.
    #[error(
        "the daemon ended, or the connection to it, before it answered: check `systemctl status kip`, then `kip ps`"
    )]
    Lost(#[source] io::Error),
    /// What answers does not speak this API.
    #[error("the daemon's answer cannot be read: client and daemon may be of different versions")]
    Foreign(#[source] serde_json::Error),
}

impl CallError {
    pub(crate) fn connecting(data: &Path, socket: PathBuf, source: io::Error) -> CallError {
        use io::ErrorKind as K;
        match source.kind() {
            K::NotFound | K::ConnectionRefused | K::NotADirectory => {
                CallError::NoDaemon { socket, data: data.to_owned() }
            }
            K::PermissionDenied => CallError::Denied { socket },
            _ => CallError::Connect { socket, source },
        }
    }

    pub(crate) fn lost(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> CallError {
        CallError::Lost(io::Error::other(source))
    }
}
