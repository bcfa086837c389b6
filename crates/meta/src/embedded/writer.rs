//! The one thread that writes. It takes all that waits, makes it one transaction of the file and
//! answers once that is on disk. It ends leases when their time has come. A file that fails is
//! closed, and opened again for what is asked next.

use super::deadlines::{Deadlines, LeaseEnd, millis, unix_ms};
use super::file::{MetaFile, Opened};
use super::tables::{FileError, LAST_LEASE, REVISION, StoredLease, Tables, corrupted, decode, number, read_keys};
use super::{KeptHistory, history};
use crate::error::MetaError;
use crate::keys::{KeySet, LeaseId, Revision};
use crate::store::MetaLease;
use crate::transaction::{Operation, Transaction, TransactionOutcome};
use crate::watch::KeyChange;
use parking_lot::Mutex;
use prost::Message;
use redb::{Database, ReadableTable, WriteTransaction};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// Commands that become one transaction of the file, at most.
const AT_ONCE: usize = 256;
/// The pause after the file has failed.
const PAUSE: Duration = Duration::from_millis(50);
/// How often the pause is doubled, while the file fails again and again.
const LONGER: u32 = 4;
/// Such pauses within which readers must have left a file that has failed.
const READERS_LEAVE: usize = 40;

/// What is asked of the thread.
pub(super) enum WriteRequest {
    /// The file is open, for readers.
    Open,
    Transact(Transaction),
    Grant(Duration),
    KeepAlive(LeaseId),
    Revoke(LeaseId),
}

/// What was done.
#[derive(Debug)]
pub(super) enum Written {
    Opened,
    Outcome(TransactionOutcome),
    Lease(MetaLease),
    Revoked,
}

/// A request, and where its answer goes.
pub(super) struct Command {
    pub(super) request: WriteRequest,
    /// When it came.
    pub(super) since: Instant,
    pub(super) reply: oneshot::Sender<Result<Written, MetaError>>,
}

/// What the writer's thread has.
pub(super) struct Writer {
    pub(super) file: Arc<MetaFile>,
    pub(super) kept: KeptHistory,
    pub(super) deadlines: Arc<Mutex<Deadlines>>,
    pub(super) committed: watch::Sender<Revision>,
}

/// Why nothing was answered as it should be.
enum Failure {
    /// Nothing was changed.
    Before(FileError),
    /// The changes may be on disk.
    Commit(FileError),
}

impl<E: Into<FileError>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Before(error.into())
    }
}

/// One transaction of the file, made or committed.
struct Made {
    revision: Revision,
    ends: Vec<LeaseEnd>,
    answers: Vec<Result<Written, MetaError>>,
    /// Something was written.
    is_written: bool,
}

impl Writer {
    /// Works until every sender of commands is gone.
    pub(super) fn run(self, commands: &Receiver<Command>) {
        let mut failed = 0;
        loop {
            let due = self.deadlines.lock().first();
            let first = match due {
                Some(due) => match commands.recv_timeout(due.saturating_duration_since(Instant::now())) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                },
                None => match commands.recv() {
                    Ok(command) => Some(command),
                    Err(_) => return,
                },
            };
            let waiting: Vec<Command> = first.into_iter().chain(commands.try_iter().take(AT_ONCE)).collect();
            match self.commit(&waiting) {
                Ok(made) => {
                    if failed > 0 && made.is_written {
                        tracing::info!(path = %self.file.path.display(), "the metadata store can be written again");
                        failed = 0;
                    }
                    // Whatever time it took to write it.
                    let now = Instant::now();
                    let from_now = |end: LeaseEnd| LeaseEnd { at: end.at.map(|(ttl, _)| (ttl, now + ttl)), ..end };
                    self.deadlines.lock().change(made.ends.into_iter().map(from_now));
                    self.committed.send_replace(made.revision);
                    for (command, answer) in waiting.into_iter().zip(made.answers) {
                        // A caller that is gone needs none.
                        drop(command.reply.send(answer));
                    }
                }
                Err(failure) => {
                    self.fail(failure, waiting, failed);
                    failed += 1;
                }
            }
        }
    }

    /// Closes the file, and answers what was asked. It is logged once, however often a lease that
    /// is due is tried again, and how often it was opened for readers meanwhile.
    fn fail(&self, failure: Failure, waiting: Vec<Command>, failed: u32) {
        self.file.close();
        let (is_unknown, error) = match failure {
            Failure::Before(error) => (false, Arc::new(error)),
            Failure::Commit(error) => (true, Arc::new(error)),
        };
        let path = &self.file.path;
        if failed == 0 {
            tracing::error!(path = %path.display(), %error, "the metadata store cannot be written");
        }
        for Command { reply, .. } in waiting {
            let source = Box::new(Arc::clone(&error));
            drop(reply.send(Err(if is_unknown {
                MetaError::Unknown { store: path.display().to_string(), source }
            } else {
                MetaError::Storage { path: path.clone(), source }
            })));
        }
        // A lease that is due would be tried again at once, without end.
        std::thread::sleep(PAUSE * (1 << failed.min(LONGER)));
    }

    /// The file, opened again if it had failed.
    fn opened(&self) -> Result<Arc<Database>, FileError> {
        for _ in 0..READERS_LEAVE {
            if let Some(db) = self.file.get() {
                return Ok(db);
            }
            match self.file.open() {
                // Those that read it when it failed still have it.
                Err(error) if error.is_in_use() => std::thread::sleep(PAUSE),
                Err(error) => return Err(error),
                Ok(Opened { revision, deadlines }) => {
                    *self.deadlines.lock() = deadlines;
                    self.committed.send_replace(revision);
                }
            }
        }
        Err(corrupted("it stays in use after it has failed".to_owned()))
    }

    fn commit(&self, waiting: &[Command]) -> Result<Made, Failure> {
        let db = self.opened()?;
        // Needs no room on the disk.
        if !waiting.is_empty() && waiting.iter().all(|command| matches!(command.request, WriteRequest::Open)) {
            let answers = waiting.iter().map(|_| Ok(Written::Opened)).collect();
            let revision = *self.committed.borrow();
            return Ok(Made { revision, ends: Vec::new(), answers, is_written: false });
        }
        let mut transaction = db.begin_write().map_err(FileError::from)?;
        // Values are the tenants': with a checksum alone they could be made to look like a commit
        // that a crash has torn. It also spares the next start a walk over the whole file.
        transaction.set_quick_repair(true);
        let made = self.make(&transaction, waiting)?;
        transaction.commit().map_err(|error| Failure::Commit(error.into()))?;
        Ok(made)
    }

    fn make(&self, transaction: &WriteTransaction, waiting: &[Command]) -> Result<Made, FileError> {
        let tables = Tables::open(transaction)?;
        let revision = number(&tables.state, REVISION)?;
        let mut batch = Batch { tables, revision, kept: self.kept, ends: Vec::new() };
        // What was asked in time, and waited for the disk, is in time.
        let kept = waiting.iter().filter(|command| matches!(command.request, WriteRequest::KeepAlive(_)));
        let now = kept.map(|command| command.since).min().unwrap_or_else(Instant::now);
        let due = self.deadlines.lock().due(now);
        for lease in due {
            batch.end_lease(lease)?;
        }
        let answers = waiting.iter().map(|command| batch.carry_out(&command.request)).collect::<Result<_, _>>()?;
        Ok(Made { revision: batch.revision, ends: batch.ends, answers, is_written: true })
    }
}

/// One transaction of the file while it is made.
struct Batch<'t> {
    tables: Tables<'t>,
    revision: Revision,
    kept: KeptHistory,
    ends: Vec<LeaseEnd>,
}

impl Batch<'_> {
    fn carry_out(&mut self, request: &WriteRequest) -> Result<Result<Written, MetaError>, FileError> {
        Ok(match request {
            WriteRequest::Open => Ok(Written::Opened),
            WriteRequest::Transact(transaction) => self.transact(transaction)?.map(Written::Outcome),
            WriteRequest::Grant(ttl) => {
                let id = LeaseId(number(&self.tables.state, LAST_LEASE)? + 1);
                self.tables.state.insert(LAST_LEASE, id.0)?;
                Ok(Written::Lease(self.give_time(id, *ttl)?))
            }
            WriteRequest::KeepAlive(id) => match self.ttl(*id)? {
                Some(ttl) => Ok(Written::Lease(self.give_time(*id, ttl)?)),
                None => Err(MetaError::LeaseGone(*id)),
            },
            WriteRequest::Revoke(id) => {
                if self.end_lease(*id)? {
                    Ok(Written::Revoked)
                } else {
                    Err(MetaError::LeaseGone(*id))
                }
            }
        })
    }

    fn transact(&mut self, transaction: &Transaction) -> Result<Result<TransactionOutcome, MetaError>, FileError> {
        let (mut found, mut holds) = (Vec::new(), true);
        for condition in transaction.conditions() {
            let first = read_keys(&self.tables.current, &condition.keys(), 1)?.pop();
            holds &= condition.holds(first.as_ref());
            found.push(first);
        }
        if !holds {
            return Ok(Ok(TransactionOutcome::Refused { revision: self.revision, found }));
        }
        for operation in transaction.operations() {
            let Operation::Put { lease: Some(lease), .. } = operation else { continue };
            if self.ttl(*lease)?.is_none() {
                return Ok(Err(MetaError::LeaseGone(*lease)));
            }
        }
        let (next, mut changes) = (self.revision + 1, Vec::new());
        for operation in transaction.operations() {
            match operation {
                Operation::Put { key, value, lease } => changes.push(self.tables.put(key, value, *lease, next)?),
                Operation::Delete(keys) => changes.extend(self.tables.delete(keys)?),
            }
        }
        self.log(&changes)?;
        Ok(Ok(TransactionOutcome::Done { revision: self.revision }))
    }

    /// Makes a revision of changes, if there are any.
    fn log(&mut self, changes: &[KeyChange]) -> Result<(), FileError> {
        if !changes.is_empty() {
            self.revision += 1;
            history::log(&mut self.tables, self.revision, changes, self.kept)?;
        }
        Ok(())
    }

    /// The time that a lease gets each time; none if it is gone.
    fn ttl(&self, id: LeaseId) -> Result<Option<Duration>, FileError> {
        let Some(bytes) = self.tables.leases.get(id.0)? else { return Ok(None) };
        let StoredLease { ttl_ms, .. } = decode(bytes.value())?;
        Ok(Some(Duration::from_millis(ttl_ms)))
    }

    fn give_time(&mut self, id: LeaseId, ttl: Duration) -> Result<MetaLease, FileError> {
        let stored = StoredLease { ttl_ms: millis(ttl), ends_unix_ms: unix_ms() + millis(ttl) };
        self.tables.leases.insert(id.0, stored.encode_to_vec().as_slice())?;
        self.ends.push(LeaseEnd { id, at: Some((ttl, Instant::now() + ttl)) });
        Ok(MetaLease { id, ttl, left: ttl })
    }

    /// Ends a lease with its keys. Returns whether it was there.
    fn end_lease(&mut self, id: LeaseId) -> Result<bool, FileError> {
        self.ends.push(LeaseEnd { id, at: None });
        if self.tables.leases.remove(id.0)?.is_none() {
            return Ok(false);
        }
        let mut changes = Vec::new();
        for key in self.tables.bound_to(id)? {
            changes.extend(self.tables.delete(&KeySet::One(key))?);
        }
        self.log(&changes)?;
        Ok(true)
    }
}
