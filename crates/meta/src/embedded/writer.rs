//! The one thread that writes. It takes all that waits, makes it one transaction of the file and
//! answers once that is on disk. It ends leases when their time has come.

use super::deadlines::{Deadlines, LeaseEnd, millis, unix_ms};
use super::tables::{FileError, LAST_LEASE, REVISION, StoredLease, Tables, decode, number, read_keys};
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

/// Where the answer to a command goes.
pub(super) type Reply<T> = oneshot::Sender<Result<T, MetaError>>;

/// What is asked of the thread.
pub(super) enum Command {
    Transact(Transaction, Reply<TransactionOutcome>),
    Grant(Duration, Reply<MetaLease>),
    KeepAlive(LeaseId, Reply<MetaLease>),
    Revoke(LeaseId, Reply<()>),
}

/// An answer that waits for the disk.
type Answer = Box<dyn FnOnce() + Send>;

/// The answer to a call; a caller that is gone needs none.
fn answer<T: Send + 'static>(reply: Reply<T>, result: Result<T, MetaError>) -> Answer {
    Box::new(move || drop(reply.send(result)))
}

/// The thread's own.
pub(super) struct Writer {
    pub(super) db: Arc<Database>,
    pub(super) kept: KeptHistory,
    pub(super) deadlines: Arc<Mutex<Deadlines>>,
    /// Why the file could not be written.
    pub(super) failure: Arc<Mutex<Option<Arc<FileError>>>>,
    pub(super) committed: watch::Sender<Revision>,
}

impl Writer {
    /// Works until every sender of commands is gone, or the file cannot be written: the answers
    /// that are missing then are not given, and the callers find the failure.
    pub(super) fn run(self, commands: &Receiver<Command>) {
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
            if let Err(error) = self.commit(waiting) {
                tracing::error!(%error, "the metadata store cannot be written");
                *self.failure.lock() = Some(Arc::new(error));
                return;
            }
        }
    }

    fn commit(&self, commands: Vec<Command>) -> Result<(), FileError> {
        let mut transaction = self.db.begin_write()?;
        // Values are the tenants': with a checksum alone they could be made to look like a commit
        // that a crash has torn. It also spares the next start a walk over the whole file.
        transaction.set_quick_repair(true);
        let Made { revision, ends, answers } = self.make(&transaction, commands)?;
        transaction.commit()?;
        self.deadlines.lock().change(ends);
        self.committed.send_replace(revision);
        answers.into_iter().for_each(|give| give());
        Ok(())
    }

    fn make(&self, transaction: &WriteTransaction, commands: Vec<Command>) -> Result<Made, FileError> {
        let tables = Tables::open(transaction)?;
        let revision = number(&tables.state, REVISION)?;
        let mut batch = Batch { tables, revision, kept: self.kept, ends: Vec::new() };
        for lease in self.deadlines.lock().due(Instant::now()) {
            batch.end_lease(lease)?;
        }
        let carried_out = commands.into_iter().map(|command| batch.carry_out(command));
        let answers = carried_out.collect::<Result<_, _>>()?;
        Ok(Made { revision: batch.revision, ends: batch.ends, answers })
    }
}

/// One transaction of the file, before it is committed.
struct Made {
    revision: Revision,
    ends: Vec<LeaseEnd>,
    answers: Vec<Answer>,
}

/// One transaction of the file while it is made.
struct Batch<'t> {
    tables: Tables<'t>,
    revision: Revision,
    kept: KeptHistory,
    ends: Vec<LeaseEnd>,
}

impl Batch<'_> {
    fn carry_out(&mut self, command: Command) -> Result<Answer, FileError> {
        Ok(match command {
            Command::Transact(transaction, reply) => answer(reply, self.transact(&transaction)?),
            Command::Grant(ttl, reply) => {
                let id = LeaseId(number(&self.tables.state, LAST_LEASE)? + 1);
                self.tables.state.insert(LAST_LEASE, id.0)?;
                answer(reply, Ok(self.give_time(id, ttl)?))
            }
            Command::KeepAlive(id, reply) => match self.ttl(id)? {
                Some(ttl) => answer(reply, Ok(self.give_time(id, ttl)?)),
                None => answer(reply, Err(MetaError::LeaseGone(id))),
            },
            Command::Revoke(id, reply) => {
                let was = self.end_lease(id)?;
                answer(reply, if was { Ok(()) } else { Err(MetaError::LeaseGone(id)) })
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
