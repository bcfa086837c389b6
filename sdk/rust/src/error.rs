//! What can be wrong.

use crate::wire::{FailureCode, RuntimeFailure};
use std::io;

/// A call did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The daemon says no, in one line.
    #[error("{message}")]
    Failure {
        /// Of which kind.
        code: FailureCode,
        /// The line.
        message: String,
    },
    /// The connection ended before a change was answered: it may be done, or not.
    #[error("the connection ended before the call was answered: it may be done, or not")]
    Lost(#[source] io::Error),
    /// There is no connection.
    #[error("the runtime socket cannot be used")]
    Socket(#[from] io::Error),
    /// The daemon said what this version of the protocol does not have.
    #[error("an answer of the daemon is not one of this protocol")]
    Answer,
}

impl Error {
    /// The kind of the daemon's answer; none for what went wrong on the way.
    pub fn code(&self) -> Option<FailureCode> {
        match self {
            Error::Failure { code, .. } => Some(*code),
            Error::Lost(_) => Some(FailureCode::OutcomeUnknown),
            Error::Socket(_) | Error::Answer => None,
        }
    }

    /// Whether a change may have been made, or not.
    pub fn is_unknown(&self) -> bool {
        self.code() == Some(FailureCode::OutcomeUnknown)
    }

    /// Whether the connection is gone, and may be made again.
    pub(crate) fn is_end(&self) -> bool {
        let ends = [io::ErrorKind::UnexpectedEof, io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        matches!(self, Error::Socket(error) if ends.contains(&error.kind()))
    }
}

impl From<RuntimeFailure> for Error {
    fn from(failure: RuntimeFailure) -> Error {
        Error::Failure { code: failure.code(), message: failure.message }
    }
}
