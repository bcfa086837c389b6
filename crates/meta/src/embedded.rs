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
mod file;
mod history;
mod tables;
mod writer;

use crate::error::MetaError;
use crate::keys::{KeySet, LeaseId, Revision};
use crate::store::{Meta, MetaLease, RangeFound, RangeRequest, whole_ttl};
use crate::transaction::{Transaction, TransactionOutcome, check_keys};
use crate::watch::{ChangeBatch, MetaWatch, WatchSender};
use async_trait::async_trait;
use deadlines::Deadlines;
use file::{MetaFile, Opened};
use history::Unread;
use parking_lot::Mutex;
use redb::Database;
use std::path::Path;
use std::sync::{Arc, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tables::{FileError, corrupted};
use tokio::sync::{oneshot, watch};
use writer::{Command, WriteRequest, Writer, Written};

/// Revisions without a change to its keys after which a watch says how far it is.
const PROGRESS_EVERY: u64 = 1000;
/// How much of the past is kept: revisions and their bytes, whichever is less.
#[derive(Debug, Clone, Copy)]
pub struct KeptHistory {
    /// Revisions, at least 1.
    pub revisions: u64,
    /// Bytes.
    pub bytes: u64,
    /// Whether past values of a key are kept. A reading of the past, or a watch, that comes to one
    /// that is not kept fails with [`MetaError::Compacted`].
    pub has_values_of: fn(&[u8]) -> bool,
}

impl Default for KeptHistory {
    fn default() -> KeptHistory {
        KeptHistory { revisions: 100_000, bytes: 64 << 20, has_values_of: |_| true }
    }
}

/// The store in one file.
pub struct EmbeddedMeta {
    file: Arc<MetaFile>,
    /// None while it is dropped.
    commands: Option<mpsc::Sender<Command>>,
    writer: Option<JoinHandle<()>>,
    deadlines: Arc<Mutex<Deadlines>>,
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
        let file = Arc::new(MetaFile::new(path));
        let Opened { revision, deadlines } = file.open().map_err(failed)?;
        let deadlines = Arc::new(Mutex::new(deadlines));
        let (commands, queue) = mpsc::channel();
        let (newest, committed) = watch::channel(revision);
        let writer = Writer { file: Arc::clone(&file), kept, deadlines: Arc::clone(&deadlines), committed: newest };
        let thread = std::thread::Builder::new().name("kip-meta".to_owned());
        let writer = thread.spawn(move || writer.run(&queue)).map_err(|e| failed(e.into()))?;
        Ok(EmbeddedMeta { file, commands: Some(commands), writer: Some(writer), deadlines, committed })
    }

    /// Copies the file to `to`, where nothing is, as it is between two transactions; changes wait
    /// meanwhile. Blocks. The copy is not synced. A store that goes on from it has no changes of
    /// before, and gives no revision and no lease a second time that this one gives from now on.
    ///
    /// # Errors
    /// [`MetaError::Storage`], which names the file that was copied.
    pub fn copy(&self, to: &Path) -> Result<(), MetaError> {
        let failed = |error: FileError| MetaError::Storage { path: self.file.path.clone(), source: Box::new(error) };
        if self.file.get().is_none() {
            // It has failed: the writer opens it again.
            self.send(WriteRequest::Open)?.blocking_recv().unwrap_or(Err(MetaError::Closed))?;
        }
        let db = self.file.get().ok_or_else(|| failed(corrupted("it has failed, and is closed".to_owned())))?;
        // There is one at a time, and this one changes nothing.
        let alone = db.begin_write().map_err(|error| failed(error.into()))?;
        std::fs::copy(&self.file.path, to).map_err(|error| failed(error.into()))?;
        alone.abort().map_err(|error| failed(error.into()))?;
        file::set_apart(to).map_err(failed)
    }

    fn send(&self, request: WriteRequest) -> Result<oneshot::Receiver<Result<Written, MetaError>>, MetaError> {
        let (reply, answer) = oneshot::channel();
        let commands = self.commands.as_ref().expect("only a drop takes it");
        commands.send(Command { request, since: Instant::now(), reply }).map_err(|_| MetaError::Closed)?;
        Ok(answer)
    }

    /// Has the writer do something, and waits until it is on disk.
    async fn ask(&self, request: WriteRequest) -> Result<Written, MetaError> {
        self.send(request)?.await.unwrap_or(Err(MetaError::Closed))
    }

    /// Has the writer do something that is answered with a lease.
    async fn ask_lease(&self, request: WriteRequest) -> Result<MetaLease, MetaError> {
        match self.ask(request).await? {
            Written::Lease(lease) => Ok(lease),
            other => unreachable!("a lease was asked for, and {other:?} came"),
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
        self.file.close();
    }
}

/// Reads the file on a thread that may block.
async fn read<T: Send + 'static>(
    file: &MetaFile,
    what: impl FnOnce(&Database) -> Result<T, Unread> + Send + 'static,
) -> Result<T, MetaError> {
    let Some(db) = file.get() else {
        return Err(MetaError::Storage { path: file.path.clone(), source: "it has failed, and is closed".into() });
    };
    let read = tokio::task::spawn_blocking(move || what(&db)).await.map_err(|_| MetaError::Closed)?;
    read.map_err(|unread| match unread {
        Unread::Wrong(error) => error,
        Unread::Broken(error) => MetaError::Storage { path: file.path.clone(), source: Box::new(error) },
    })
}

#[async_trait]
impl Meta for EmbeddedMeta {
    async fn range(&self, request: &RangeRequest) -> Result<RangeFound, MetaError> {
        check_keys(&request.keys)?;
        if self.file.get().is_none() {
            // It has failed: the writer opens it again.
            self.ask(WriteRequest::Open).await?;
        }
        let request = request.clone();
        read(&self.file, move |db| history::range(db, &request)).await
    }

    async fn transact(&self, transaction: &Transaction) -> Result<TransactionOutcome, MetaError> {
        transaction.check()?;
        match self.ask(WriteRequest::Transact(transaction.clone())).await? {
            Written::Outcome(outcome) => Ok(outcome),
            other => unreachable!("an outcome was asked for, and {other:?} came"),
        }
    }

    async fn watch(&self, keys: KeySet, from: Revision) -> Result<MetaWatch, MetaError> {
        check_keys(&keys)?;
        let (sender, batches) = MetaWatch::new();
        let follower = Follower { file: Arc::downgrade(&self.file), keys, from, said: from, sender };
        tokio::spawn(follower.follow(self.committed.clone()));
        Ok(batches)
    }

    async fn grant(&self, ttl: Duration) -> Result<MetaLease, MetaError> {
        let ttl = whole_ttl(ttl)?;
        self.ask_lease(WriteRequest::Grant(ttl)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        self.ask_lease(WriteRequest::KeepAlive(lease)).await
    }

    async fn lease(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        self.deadlines.lock().lease(lease).ok_or(MetaError::LeaseGone(lease))
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        self.ask(WriteRequest::Revoke(lease)).await.map(drop)
    }
}

/// The task of one watch.
struct Follower {
    /// Not held while it waits: the file is closed with the store.
    file: Weak<MetaFile>,
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
        let (file, keys, from) = (self.file.upgrade()?, self.keys.clone(), self.from);
        let reading = match read(&file, move |db| history::changes(db, &keys, from)).await {
            Ok(reading) => reading,
            Err(error) => {
                // The reader may be gone too.
                drop(self.sender.send(Err(error)).await);
                return None;
            }
        };
        drop(file);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transaction::Condition;

    const LONG: Duration = Duration::from_secs(60);

    fn opened(directory: &Path, name: &str) -> Arc<EmbeddedMeta> {
        Arc::new(EmbeddedMeta::open(&directory.join(name), KeptHistory::default()).unwrap())
    }

    async fn put(meta: &EmbeddedMeta, key: &str, lease: Option<LeaseId>) -> Revision {
        let absent = Condition::Absent(KeySet::One(b"nothing".to_vec()));
        let change = Transaction::when(absent).put_leased(key, "value", lease);
        meta.transact(&change).await.unwrap().done().unwrap()
    }

    // promise tree: a lease that is kept alive in time does not end because the disk is busy
    #[tokio::test(flavor = "multi_thread")]
    async fn a_lease_that_is_kept_alive_in_time_does_not_end_while_the_disk_is_busy() {
        let directory = tempfile::tempdir().unwrap();
        let meta = opened(directory.path(), "meta");
        let ttl = Duration::from_secs(2);
        let (kept, lost) = (meta.grant(ttl).await.unwrap().id, meta.grant(ttl).await.unwrap().id);
        let db = meta.file.get().unwrap();
        let busy = tokio::task::spawn_blocking(move || {
            let alone = db.begin_write().unwrap();
            std::thread::sleep(ttl * 2);
            alone.abort().unwrap();
        });
        tokio::time::sleep(ttl / 4).await;
        assert!(meta.keep_alive(kept).await.unwrap().left > ttl / 2);
        busy.await.unwrap();
        put(&meta, "after", Some(kept)).await;
        tokio::time::sleep(ttl / 4).await;
        assert!(matches!(meta.keep_alive(lost).await, Err(MetaError::LeaseGone(_))));
        assert!(meta.lease(kept).await.unwrap().left > Duration::ZERO);
    }

    // promise tree: after `kip restore` no version, epoch or lease is given that was given before
    #[tokio::test(flavor = "multi_thread")]
    async fn what_goes_on_from_a_copy_gives_nothing_a_second_time() {
        let directory = tempfile::tempdir().unwrap();
        let meta = opened(directory.path(), "meta");
        let lease = meta.grant(LONG).await.unwrap().id;
        put(&meta, "a", Some(lease)).await;
        // As after an error of the disk.
        meta.file.close();
        let (of, to) = (Arc::clone(&meta), directory.path().join("copy"));
        tokio::task::spawn_blocking(move || of.copy(&to)).await.unwrap().unwrap();
        let (mut revision, mut last) = (0, lease);
        for _ in 0..50 {
            revision = put(&meta, "b", None).await;
            last = meta.grant(LONG).await.unwrap().id;
        }
        let copy = opened(directory.path(), "copy");
        assert_eq!(copy.get(b"a").await.unwrap().unwrap().lease, Some(lease));
        assert!(copy.get(b"b").await.unwrap().is_none() && copy.lease(lease).await.is_ok());
        assert!(put(&copy, "c", None).await > revision && copy.grant(LONG).await.unwrap().id > last);
        let mut watch = copy.watch(KeySet::One(b"c".to_vec()), revision).await.unwrap();
        assert!(matches!(watch.next().await, Err(MetaError::Compacted { .. })));
    }
}
