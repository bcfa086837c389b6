//! Why the pager does not do what it was asked for. Becomes a line of text where the answer leaves
//! ([`OrderError::answer`]), and nowhere before that.

use crate::proc::DeflateError;
use crate::protocol::PagerAnswer;
use kip_keeper::{KeeperError, StartError};
use kip_snapshot::SnapshotError;
use kip_stop::StopError;
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why an order is not carried out.
#[derive(Debug, thiserror::Error)]
pub(super) enum OrderError {
    /// What arrived is no request of this protocol.
    #[error("not a request")]
    Request(#[source] serde_json::Error),
    /// There is no descriptor for the connection of a client.
    #[error("the pager has no file descriptor left for another client")]
    Accept(#[source] io::Error),
    /// There is no thread for a client.
    #[error("the pager cannot start a thread for another client")]
    Thread(#[source] io::Error),
    /// The descriptors of a request did not arrive.
    #[error("the pager has no room for the descriptors of a request")]
    Receive(#[source] io::Error),
    /// A dead pager had memory of the proc out, which could not be taken up.
    #[error(transparent)]
    NotTakenUp(Arc<OrderError>),
    /// Nothing of the proc is here.
    #[error("{name} is not known")]
    Unknown { name: String },
    /// The proc is asleep.
    #[error("{name} sleeps already")]
    Asleep { name: String },
    /// The directory of its swap file and slot maps.
    #[error("the directory {} for the memory of {name} cannot be {what}", path.display())]
    Directory { name: String, path: PathBuf, what: &'static str, source: io::Error },
    /// The eventfd by which the pager notifies the thread that holds the proc.
    #[error("no descriptor to hold {name} by")]
    Bell { name: String, source: io::Error },
    /// Its processes.
    #[error("the processes in {} cannot be listed", path.display())]
    List { path: PathBuf, source: io::Error },
    /// Its threads do not stand still.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// Its memory stays where it is.
    #[error(transparent)]
    Deflate(#[from] DeflateError),
    /// Its memory stays out.
    #[error("the memory of {name} does not come back")]
    Restore { name: String, source: io::Error },
    /// A rebuilt proc came with too few descriptors, or too many.
    #[error("{processes} processes of {name} came with {descriptors} descriptors")]
    Descriptors { name: String, processes: usize, descriptors: usize },
    /// What a dead pager had out.
    #[error("what {name} had out cannot be taken up")]
    Adopt { name: String, source: io::Error },
    /// It cannot be parked.
    #[error("the memory of {name} cannot be made ready for parking")]
    PrepareParking { name: String, source: io::Error },
    /// Where its memory lies.
    #[error("what {name} has out cannot be told")]
    PageMap { name: String, source: io::Error },
    /// The page map cannot be written.
    #[error(transparent)]
    Write(#[from] SnapshotError),
    /// A request came without its descriptor.
    #[error("there is no file to write to")]
    NoFile,
    /// Pages that were asked for.
    #[error("pages cannot be handed over")]
    HandOver(#[source] io::Error),
    /// The keeper does not answer, or refuses.
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    /// There is no new keeper.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The keeper does not hold what this pager holds.
    #[error("{name} is not held twice")]
    NotHeldTwice { name: String, source: io::Error },
}

impl OrderError {
    /// Nothing of the proc `name` is here.
    pub(super) fn unknown(name: &str) -> OrderError {
        OrderError::Unknown { name: name.to_owned() }
    }

    /// The directory at `path` cannot be `what`, made or removed.
    pub(super) fn directory(name: &str, path: &Path, what: &'static str, source: io::Error) -> OrderError {
        OrderError::Directory { name: name.to_owned(), path: path.to_owned(), what, source }
    }

    /// As it travels.
    pub(super) fn answer(&self) -> PagerAnswer {
        let message = line(self);
        match self {
            OrderError::Accept(_) | OrderError::Thread(_) | OrderError::Receive(_) => PagerAnswer::Busy { message },
            _ => PagerAnswer::Refused { message },
        }
    }
}

/// An error with all its causes, in one line.
pub(super) fn line(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_proc_and_each_cause_once() {
        let source = io::Error::from(io::ErrorKind::NotFound);
        let adopt = Arc::new(OrderError::Adopt { name: "web".into(), source });
        let expected = "what web had out cannot be taken up: entity not found";
        assert_eq!(OrderError::NotTakenUp(adopt).answer(), PagerAnswer::Refused { message: expected.into() });
        let unknown = OrderError::Unknown { name: "web".into() };
        assert_eq!(unknown.answer(), PagerAnswer::Refused { message: "web is not known".into() });
    }
}
