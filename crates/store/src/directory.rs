//! A store in a directory: an object is a file, its key the path.
//!
//! What is written is durable when the call returns: temporary file beside it, fsync, rename (or
//! link, where nothing may be replaced), fsync of the directory. References are swapped under a
//! lock file, so processes of one machine, or of several on a file system whose flock(2) reaches
//! all of them, exclude each other. Crash: at worst a file `name#new.<number>` that no key can name
//! and no listing shows; [`Directory::remove_leftovers`] removes it. What is deleted is deleted
//! under the lock that swapping takes. Only Kip's user may read what is made here (0600, 0700).
//! `name#lock` lies beside a reference as long as it exists.

mod files;

use crate::address::OpenError;
use crate::counters::{Count, Tally};
use crate::failure::{GetError, PutError, ReadReferenceError, StoreFailure, SwapError};
use crate::key::Key;
use crate::listing::{Listed, Placed};
use crate::reference::Version;
use crate::settings::Settings;
use crate::wire::Cause;
use bytes::Bytes;
use files::{NewFile, Over, Reading, Root};
use futures_util::stream::{self, Stream, StreamExt, TryStreamExt};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One handle on a directory.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    root: Arc<Root>,
    tally: Arc<Tally>,
}

impl Directory {
    pub(crate) fn open(path: PathBuf, settings: Settings) -> Result<Directory, OpenError> {
        let path = match fs::canonicalize(&path) {
            Ok(found) if found.is_dir() => found,
            Ok(_) => return Err(OpenError::Directory { path, source: io::ErrorKind::NotADirectory.into() }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(OpenError::NoDirectory { path }),
            Err(source) => return Err(OpenError::Directory { path, source }),
        };
        Ok(Directory { root: Arc::new(Root::new(path, settings)), tally: Arc::default() })
    }

    /// The same directory, counting apart.
    pub(crate) fn counting_apart(&self) -> Directory {
        Directory { root: self.root.clone(), tally: Tally::below(&self.tally) }
    }

    pub(crate) fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.root.name
    }

    /// Work that waits for the disk, on a thread that may.
    async fn blocking<T: Send + 'static, E: From<StoreFailure> + Send + 'static>(
        &self,
        work: impl FnOnce(&Root) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let root = self.root.clone();
        match tokio::task::spawn_blocking(move || work(&root)).await {
            Ok(result) => result,
            Err(error) => Err(StoreFailure::Ended { store: self.name().clone(), source: Cause::new(error) }.into()),
        }
    }

    /// The same for what is not as long as an object: a file system that hangs is left to itself.
    async fn in_time<T: Send + 'static, E: From<StoreFailure> + Send + 'static>(
        &self,
        work: impl FnOnce(&Root) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        self.while_moving(&AtomicU64::new(0), work).await
    }

    /// The same for what takes as long as there are files, which it counts.
    async fn while_moving<T: Send + 'static, E: From<StoreFailure> + Send + 'static>(
        &self,
        seen: &AtomicU64,
        work: impl FnOnce(&Root) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let limit = self.root.settings.operation_timeout;
        let mut working = pin!(self.blocking(work));
        let mut before = 0;
        loop {
            if let Ok(done) = tokio::time::timeout(limit, &mut working).await {
                return done;
            }
            let now = seen.load(Ordering::Relaxed);
            if now == before {
                let waited_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
                return Err(StoreFailure::Hangs { path: self.root.path.clone(), waited_ms }.into());
            }
            before = now;
        }
    }

    pub(crate) async fn check(&self) -> Result<(), StoreFailure> {
        self.tally.one(Count::List);
        self.in_time(|root| fs::read_dir(&root.path).map(drop).map_err(|e| root.failure(&root.path, e))).await
    }

    pub(crate) async fn locks_exclude(&self) -> Result<bool, StoreFailure> {
        self.in_time(Root::locks_exclude).await
    }

    pub(crate) async fn remove_leftovers(&self, older_than: Duration) -> Result<u64, StoreFailure> {
        self.blocking(move |root| root.remove_leftovers(older_than)).await
    }

    pub(crate) async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), PutError> {
        self.write(key, bytes, Over::Anything).await.map(drop)
    }

    pub(crate) async fn put_if_absent(&self, key: &Key, bytes: Bytes) -> Result<Placed, PutError> {
        self.write(key, bytes, Over::Nothing).await
    }

    async fn write(&self, key: &Key, bytes: Bytes, over: Over) -> Result<Placed, PutError> {
        self.tally.one(Count::Put);
        self.tally.add(Count::BytesWritten, bytes.len() as u64);
        let key = key.clone();
        self.blocking(move |root| root.write(&key, &bytes, over).map_err(|e| root.put_error(&key, e))).await
    }

    pub(crate) async fn size(&self, key: &Key) -> Result<u64, GetError> {
        self.tally.one(Count::Head);
        let key = key.clone();
        self.in_time(move |root| root.object(&key).map(|(_, size)| size)).await
    }

    /// Size and bytes, once the first have come.
    pub(crate) async fn get(
        &self,
        key: &Key,
    ) -> Result<(u64, impl Stream<Item = Result<Bytes, GetError>> + Send + use<>), GetError> {
        self.tally.one(Count::Get);
        let since = Instant::now();
        let asked = key.clone();
        let (reading, first) = self
            .blocking(move |root| {
                let (file, size) = root.object(&asked)?;
                let reading = Reading { file: Arc::new(file), key: asked, size };
                let first = reading.chunk(root, 0)?;
                Ok::<_, GetError>((reading, first))
            })
            .await?;
        self.tally.first_byte(since.elapsed());
        let size = reading.size;
        let start = (self.clone(), reading, Some(first), 0);
        let stream = stream::try_unfold(start, |(directory, reading, first, at)| async move {
            if at == reading.size {
                return Ok(None);
            }
            let bytes = match first {
                Some(first) => first,
                None => {
                    let reading = reading.clone();
                    directory.blocking(move |root| reading.chunk(root, at)).await?
                }
            };
            directory.tally.add(Count::BytesRead, bytes.len() as u64);
            let next = at + bytes.len() as u64;
            Ok(Some((bytes, (directory, reading, None, next))))
        });
        Ok((size, stream))
    }

    pub(crate) async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, GetError> {
        let mut pieces = self.get_ranges(key, &[range]).await?;
        Ok(pieces.pop().expect("one range, one piece"))
    }

    /// All from one file: what replaces it meanwhile is another.
    pub(crate) async fn get_ranges(&self, key: &Key, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, GetError> {
        let since = Instant::now();
        let asked = key.clone();
        let (file, size) = self.blocking(move |root| root.object(&asked)).await?;
        let reading = Reading { file: Arc::new(file), key: key.clone(), size };
        let beyond = |range: &Range<u64>| GetError::BeyondEnd {
            store: self.name().clone(),
            key: key.clone(),
            start: range.start,
            end: range.end,
            size: Some(size),
        };
        if let Some(range) = ranges.iter().find(|range| !range.is_empty() && range.end > size) {
            return Err(beyond(range));
        }
        let pieces = ranges.iter().cloned().map(|range| {
            let reading = reading.clone();
            async move {
                self.tally.one(Count::Get);
                let bytes = self.blocking(move |root| reading.bytes(root, range)).await?;
                self.tally.first_byte(since.elapsed());
                self.tally.add(Count::BytesRead, bytes.len() as u64);
                Ok(bytes)
            }
        });
        stream::iter(pieces).buffered(self.root.settings.most_requests.max(1)).try_collect().await
    }

    pub(crate) fn list(&self, under: Option<&Key>) -> impl Stream<Item = Result<Listed, StoreFailure>> + use<> {
        let (directory, under) = (self.clone(), under.cloned());
        let listed = async move {
            directory.tally.one(Count::List);
            let seen = Arc::<AtomicU64>::default();
            let counted = seen.clone();
            let found = directory.while_moving(&seen, move |root| root.list(under.as_ref(), &counted)).await?;
            Ok::<_, StoreFailure>(stream::iter(found.into_iter().map(Ok)))
        };
        stream::once(listed).try_flatten()
    }

    pub(crate) async fn delete(&self, key: &Key) -> Result<(), StoreFailure> {
        self.tally.one(Count::Delete);
        let key = key.clone();
        self.in_time(move |root| root.delete(&key)).await
    }

    pub(crate) async fn read_reference(&self, key: &Key) -> Result<Option<(Bytes, Version)>, ReadReferenceError> {
        self.tally.one(Count::Get);
        let asked = key.clone();
        let found = self.in_time(move |root| root.read_reference(&asked)).await?;
        self.tally.add(Count::BytesRead, found.as_ref().map_or(0, |(value, _)| value.len() as u64));
        Ok(found)
    }

    pub(crate) async fn swap_reference(
        &self,
        key: &Key,
        expected: Option<&Version>,
        value: &Bytes,
    ) -> Result<Version, SwapError> {
        self.tally.one(Count::Put);
        self.tally.add(Count::BytesWritten, value.len() as u64);
        let (asked, expected, value) = (key.clone(), expected.cloned(), value.clone());
        match self.in_time(move |root| root.swap_reference(&asked, expected.as_ref(), &value)).await {
            // It may have come to its end all the same.
            Err(SwapError::Store(source @ (StoreFailure::Ended { .. } | StoreFailure::Hangs { .. }))) => {
                Err(SwapError::Unknown { store: self.name().clone(), key: key.clone(), source: Box::new(source) })
            }
            done => done,
        }
    }

    /// An object to be written piece by piece.
    pub(crate) fn writer(&self, key: &Key) -> FileWriter {
        FileWriter { directory: self.clone(), key: key.clone(), new: None }
    }
}

/// An object that is being written. Dropped, it leaves nothing.
#[derive(Debug)]
pub(crate) struct FileWriter {
    directory: Directory,
    key: Key,
    /// None before the first piece, and while one is being written.
    new: Option<NewFile>,
}

impl FileWriter {
    pub(crate) async fn write(&mut self, bytes: Bytes) -> Result<(), PutError> {
        self.directory.tally.add(Count::BytesWritten, bytes.len() as u64);
        let (key, new) = (self.key.clone(), self.new.take());
        let written = self.directory.blocking(move |root| {
            let mut new = new.map_or_else(|| root.begin(&key), Ok)?;
            root.append(&key, &mut new, &bytes)?;
            Ok::<_, PutError>(new)
        });
        self.new = Some(written.await?);
        Ok(())
    }

    pub(crate) async fn finish(self) -> Result<(), PutError> {
        self.directory.tally.one(Count::Put);
        let (key, new) = (self.key, self.new);
        let finished = self.directory.blocking(move |root| {
            let new = new.map_or_else(|| root.begin(&key), Ok)?;
            root.publish(&key, new, Over::Anything).map_err(|e| root.put_error(&key, e))
        });
        finished.await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn a_file_system_that_hangs_is_left_to_itself_and_one_that_is_slow_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings { operation_timeout: Duration::from_millis(50), ..Settings::default() };
        let directory = Directory::open(dir.path().to_owned(), settings).unwrap();
        let (release, hanging) = mpsc::channel::<()>();
        let hung = directory.in_time(move |_| {
            // Ends when the test does.
            let _ = hanging.recv();
            Ok::<_, StoreFailure>(())
        });
        let failure = hung.await.expect_err("it hangs");
        assert!(matches!(failure, StoreFailure::Hangs { waited_ms: 50, .. }) && failure.is_temporary(), "{failure:?}");
        drop(release);
        let seen = Arc::<AtomicU64>::default();
        let counted = seen.clone();
        let slow = directory.while_moving(&seen, move |_| {
            let since = Instant::now();
            while since.elapsed() < Duration::from_millis(300) {
                counted.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
            }
            Ok::<_, StoreFailure>(())
        });
        slow.await.unwrap();
    }

    // promise stores: work that panics is an error of the operation
    #[tokio::test]
    async fn work_that_panics_is_an_error_and_no_panic() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::open(dir.path().to_owned(), Settings::default()).unwrap();
        let ended = directory.blocking(|_| -> Result<(), StoreFailure> { panic!("as the test wants it") }).await;
        assert!(matches!(ended, Err(StoreFailure::Ended { .. })), "{ended:?}");
    }
}
