//! Changes as they come.

use crate::connection::Connection;
use crate::error::Error;
use crate::wire::{AnswerKind, CallKind, WatchCall, WireChanges};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// A watch, over a connection of its own. It goes on over lost connections, misses nothing and
/// tells nothing twice. The descriptor is readable when a change may have come.
#[derive(Debug)]
pub struct Watch {
    path: PathBuf,
    call: WatchCall,
    id: u64,
    connection: Connection,
    /// Parts of a revision's changes of which another is to come.
    gathered: Option<WireChanges>,
}

impl Watch {
    pub(crate) fn begin(path: &Path, call: WatchCall) -> Result<Watch, Error> {
        let (connection, id, revision) = begin(path, &call)?;
        let from = call.from.or(Some(revision));
        Ok(Watch { path: path.to_owned(), call: WatchCall { from, ..call }, id, connection, gathered: None })
    }

    /// The revision after which changes come.
    pub fn revision(&self) -> u64 {
        self.call.from.unwrap_or(0)
    }

    /// Waits for the next revision with changes.
    ///
    /// # Errors
    /// The watch has ended: changes are not kept any more, or the daemon cannot be reached.
    pub fn next_changes(&mut self) -> Result<WireChanges, Error> {
        loop {
            match self.connection.answer(self.id) {
                // A daemon that was ended may have sent some that the next one sends again.
                Ok(AnswerKind::Changes(changes)) if changes.revision > self.revision() => {
                    let Some(all) = WireChanges::joined(&mut self.gathered, changes) else { continue };
                    self.call.from = Some(all.revision);
                    if !all.changes.is_empty() {
                        return Ok(all);
                    }
                }
                Ok(AnswerKind::Changes(_)) => {}
                Ok(_) => return Err(Error::Answer),
                Err(error) if error.is_end() => (self.connection, self.id, _) = begin(&self.path, &self.call)?,
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.stream().as_fd()
    }
}

fn begin(path: &Path, call: &WatchCall) -> Result<(Connection, u64, u64), Error> {
    let mut connection = Connection::open(path)?;
    let id = connection.send(CallKind::Watch(call.clone()), None)?;
    match connection.answer(id)? {
        AnswerKind::Changes(first) => Ok((connection, id, first.revision)),
        _ => Err(Error::Answer),
    }
}
