//! The store in one file, by redb.
//!
//! ```text
//!  callers --commands--> writer (one thread) --commit--> file
//!     |                     |                              ^
//!     |                     +--newest revision--> watches -+- read the log
//!     +------------------------- reads --------------------+
//! ```
//!
//! A call is answered once its changes are on disk. Reads go to the file, each in a state of its
//! own, and do not wait for the writer. A watch holds nothing but the revision up to which it has
//! read the log: it cannot lose a change, and one that is slow costs no memory.
//!
//! The log keeps the changes of the newest revisions, as many as [`KeptHistory`] says; the file has
//! no other part that grows without bound. Its free space is used again.

mod deadlines;
mod history;
mod tables;
mod writer;

use crate::error::MetaError;
use crate::keys::{FIRST_REVISION, KeySet, LeaseId, Revision};
use crate::store::{Meta, MetaLease, RangeFound, RangeRequest, whole_ttl};
use crate::transaction::{Transaction, TransactionOutcome, check_keys};
use crate::watch::{ChangeBatch, MetaWatch, WatchSender};
use async_trait::async_trait;
use deadlines::{Deadlines, taken_up};
use history::Unread;
use parking_lot::Mutex;
use redb::{Builder, Database, ReadableTable};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use tables::{FORMAT, FileError, LAST_LEASE, LOG_BYTES, OLDEST, REVISION, Tables, corrupted, decode, number};
use tokio::sync::{oneshot, watch};
use writer::{Command, Reply, Writer};

/// The version of the tables that this program writes.
const FORMAT_NOW: u64 = 1;
/// Memory for pages of the file, bytes.
const CACHE_BYTES: usize = 16 << 20;
/// Revisions without a change to its keys after which a watch says how far it is.
const PROGRESS_EVERY: u64 = 1000;
/// A file larger than this is made smaller at the start if most of it is free.
const LARGE_BYTES: u64 = 64 << 20;

/// How much of the past is kept: revisions and their bytes, whichever is less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptHistory {
    /// Revisions, at least 1.
    pub revisions: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Default for KeptHistory {
    fn default() -> KeptHistory {
        KeptHistory { revisions: 100_000, bytes: 64 << 20 }
    }
}

/// The store in one file.
pub struct EmbeddedMeta {
    path: PathBuf,
    db: Arc<Database>,
    /// None while it is dropped.
    commands: Option<mpsc::Sender<Command>>,
    writer: Option<JoinHandle<()>>,
    deadlines: Arc<Mutex<Deadlines>>,
    failure: Arc<Mutex<Option<Arc<FileError>>>>,
    committed: watch::Receiver<Revision>,
}

impl EmbeddedMeta {
    /// Opens the file, or makes it. Blocks.
    ///
    /// # Errors
    /// [`MetaError::InUse`] and [`MetaError::Open`].
    pub fn open(path: &Path, kept: KeptHistory) -> Result<EmbeddedMeta, MetaError> {
        let failed = |error: FileError| match error {
            error if error.is_in_use() => MetaError::InUse { path: path.to_owned() },
            error => MetaError::Open { path: path.to_owned(), source: Box::new(error) },
        };
        let db = open_file(path).map_err(failed)?;
        let mut known = Deadlines::default();
        let revision = set_up(&db, &mut known).map_err(failed)?;
        let (deadlines, failure) = (Arc::new(Mutex::new(known)), Arc::default());
        let (commands, queue) = mpsc::channel();
        let (committed, newest) = watch::channel(revision);
        let db = Arc::new(db);
        let writer = Writer {
            db: Arc::clone(&db),
            kept,
            deadlines: Arc::clone(&deadlines),
            failure: Arc::clone(&failure),
            committed,
        };
        let thread = std::thread::Builder::new().name("kip-meta".to_owned());
        let writer = thread.spawn(move || writer.run(&queue)).map_err(|e| failed(e.into()))?;
        Ok(EmbeddedMeta {
            path: path.to_owned(),
            db,
            commands: Some(commands),
            writer: Some(writer),
            deadlines,
            failure,
            committed: newest,
        })
    }

    /// Has the writer do something, and waits until it is on disk.
    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, MetaError> {
        let (reply, answer) = oneshot::channel();
        let commands = self.commands.as_ref().expect("only a drop takes it");
        if commands.send(command(reply)).is_err() {
            return Err(self.failed());
        }
        answer.await.unwrap_or_else(|_| Err(self.failed()))
    }

    /// Why the writer is gone.
    fn failed(&self) -> MetaError {
        match self.failure.lock().clone() {
            Some(error) => MetaError::Storage { path: self.path.clone(), source: Box::new(error) },
            None => MetaError::Closed,
        }
    }
}

impl Drop for EmbeddedMeta {
    fn drop(&mut self) {
        drop(self.commands.take());
        if let Some(writer) = self.writer.take() {
            // A writer that has panicked was heard of already.
            drop(writer.join());
        }
    }
}

/// Opens the file, which only its owner may read, or makes it.
fn open_file(path: &Path) -> Result<Database, FileError> {
    let is_new = !path.exists();
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if let (true, Some(dir)) = (is_new, path.parent()) {
        std::fs::File::open(dir)?.sync_all()?;
    }
    let open = || Builder::new().create_with_file_format_v3(true).set_cache_size(CACHE_BYTES).create(path);
    let mut db = open()?;
    if std::fs::metadata(path)?.len() > LARGE_BYTES {
        let used = db.begin_write()?.stats()?.stored_bytes();
        if std::fs::metadata(path)?.len() > used.saturating_mul(4).max(LARGE_BYTES) {
            db.compact()?;
        }
    }
    Ok(db)
}

/// Makes what a new file lacks, and takes up leases. Returns the newest revision.
fn set_up(db: &Database, deadlines: &mut Deadlines) -> Result<Revision, FileError> {
    let transaction = db.begin_write()?;
    let mut tables = Tables::open(&transaction)?;
    if tables.state.get(FORMAT)?.is_none() {
        for (name, value) in [
            (FORMAT, FORMAT_NOW),
            (REVISION, FIRST_REVISION),
            (OLDEST, FIRST_REVISION + 1),
            (LOG_BYTES, 0),
            (LAST_LEASE, 0),
        ] {
            tables.state.insert(name, value)?;
        }
    }
    let format = number(&tables.state, FORMAT)?;
    if format != FORMAT_NOW {
        let line = format!("it has the format {format}, this Kip knows {FORMAT_NOW}: use the Kip that wrote it");
        return Err(corrupted(line));
    }
    for entry in tables.leases.iter()? {
        let (id, bytes) = entry?;
        deadlines.change([taken_up(LeaseId(id.value()), &decode(bytes.value())?)]);
    }
    let revision = number(&tables.state, REVISION)?;
    drop(tables);
    transaction.commit()?;
    Ok(revision)
}

/// Reads the file on a thread that may block.
async fn read<T: Send + 'static>(
    db: &Arc<Database>,
    path: &Path,
    what: impl FnOnce(&Database) -> Result<T, Unread> + Send + 'static,
) -> Result<T, MetaError> {
    let db = Arc::clone(db);
    let read = tokio::task::spawn_blocking(move || what(&db)).await.map_err(|_| MetaError::Closed)?;
    read.map_err(|unread| match unread {
        Unread::Wrong(error) => error,
        Unread::Broken(error) => MetaError::Storage { path: path.to_owned(), source: Box::new(error) },
    })
}

#[async_trait]
impl Meta for EmbeddedMeta {
    async fn range(&self, request: &RangeRequest) -> Result<RangeFound, MetaError> {
        check_keys(&request.keys)?;
        let request = request.clone();
        read(&self.db, &self.path, move |db| history::range(db, &request)).await
    }

    async fn transact(&self, transaction: &Transaction) -> Result<TransactionOutcome, MetaError> {
        transaction.check()?;
        self.ask(|reply| Command::Transact(transaction.clone(), reply)).await
    }

    async fn watch(&self, keys: KeySet, from: Revision) -> Result<MetaWatch, MetaError> {
        check_keys(&keys)?;
        let (sender, batches) = MetaWatch::new();
        let follower =
            Follower { db: Arc::downgrade(&self.db), path: self.path.clone(), keys, from, said: from, sender };
        tokio::spawn(follower.follow(self.committed.clone()));
        Ok(batches)
    }

    async fn grant(&self, ttl: Duration) -> Result<MetaLease, MetaError> {
        let ttl = whole_ttl(ttl)?;
        self.ask(|reply| Command::Grant(ttl, reply)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        self.ask(|reply| Command::KeepAlive(lease, reply)).await
    }

    async fn lease(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        self.deadlines.lock().lease(lease).ok_or(MetaError::LeaseGone(lease))
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        self.ask(|reply| Command::Revoke(lease, reply)).await
    }
}

/// The task of one watch.
struct Follower {
    /// Not held while it waits: the file is closed with the store.
    db: std::sync::Weak<Database>,
    path: PathBuf,
    keys: KeySet,
    /// The next revision to read.
    from: Revision,
    /// The next revision that the reader does not know of.
    said: Revision,
    sender: WatchSender,
}

impl Follower {
    async fn follow(mut self, mut committed: watch::Receiver<Revision>) {
        loop {
            let newest = *committed.borrow_and_update();
            while self.from <= newest {
                if self.go_on().await.is_none() {
                    return;
                }
            }
            tokio::select! {
                changed = committed.changed() => if changed.is_err() { return },
                () = self.sender.closed() => return,
            }
        }
    }

    /// Reads on; none if the watch is over.
    async fn go_on(&mut self) -> Option<()> {
        let (db, keys, from) = (self.db.upgrade()?, self.keys.clone(), self.from);
        let reading = match read(&db, &self.path, move |db| history::changes(db, &keys, from)).await {
            Ok(reading) => reading,
            Err(error) => {
                // The reader may be gone too.
                drop(self.sender.send(Err(error)).await);
                return None;
            }
        };
        drop(db);
        for batch in reading.batches {
            self.said = batch.revision + 1;
            self.sender.send(Ok(batch)).await.ok()?;
        }
        self.from = reading.up_to + 1;
        if self.from.saturating_sub(self.said) >= PROGRESS_EVERY {
            self.said = self.from;
            self.sender.send(Ok(ChangeBatch { revision: reading.up_to, changes: Vec::new() })).await.ok()?;
        }
        Some(())
    }
}
