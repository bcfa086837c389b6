//! Large objects go up in parts, several at once; the object appears when the last step succeeds,
//! whole.
//!
//! An upload that fails or is dropped is aborted. A crash leaves its parts behind, unseen and paid
//! for: a life-cycle rule of the bucket should remove incomplete uploads after some days.

//!
//! An upload has a number of its own, which the object then carries: when the answer to the last
//! step is lost, and a second one finds nothing to complete, the object itself says whether it came
//! from this upload.

use super::{Attempt, Remote};
use crate::counters::Count;
use crate::failure::{PutError, StoreFailure, Trouble};
use crate::key::Key;
use crate::reference::Nonce;
use crate::wire::Cause;
use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{Attribute, Attributes, GetOptions, MultipartId, PutMultipartOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

/// The most that S3 takes.
const MOST_PARTS: usize = 10_000;
/// So many parts of a stream have the same length, the next ones twice as much.
const DOUBLES_AFTER: usize = 1000;
/// When an upload is aborted once more, after it was and then after that.
const ABORTED_AGAIN: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(15)];
/// What an object says about the upload that it came from.
const NUMBER: Attribute = Attribute::Metadata(std::borrow::Cow::Borrowed("kip-upload"));

impl Remote {
    pub(super) async fn put_in_parts(&self, key: &Key, bytes: Bytes) -> Attempt<()> {
        let path = self.path(key);
        for _ in 1..self.settings().attempts {
            match self.upload(&path, &bytes).await {
                // The answer to the last step was lost, and a second one finds nothing to complete.
                // Whether the object there is this one cannot be told from outside, so all of it
                // goes up once more.
                Err(Trouble::NoUpload) => self.tally.one(Count::Retry),
                done => return done,
            }
        }
        self.upload(&path, &bytes).await
    }

    async fn upload(&self, path: &Path, bytes: &Bytes) -> Attempt<()> {
        let upload = Upload::begin(self, path).await?;
        let part_bytes = part_bytes(bytes.len(), self.settings().part_bytes);
        let parts = (0..bytes.len()).step_by(part_bytes).enumerate();
        let parts =
            parts.map(|(number, start)| upload.part(number, bytes.slice(start..bytes.len().min(start + part_bytes))));
        let sent = stream::iter(parts).buffered(self.settings().most_uploads.max(1)).try_collect::<Vec<_>>().await;
        upload.end(sent).await
    }

    /// An object to be written piece by piece.
    pub(crate) fn writer(&self, key: &Key) -> PartsWriter {
        let (remote, key) = (self.clone(), key.clone());
        PartsWriter {
            remote,
            key,
            held: BytesMut::new(),
            upload: None,
            begun: 0,
            sending: JoinSet::new(),
            sent: Vec::new(),
        }
    }
}

/// An object that is being written. Dropped, it leaves nothing.
#[derive(Debug)]
pub(crate) struct PartsWriter {
    remote: Remote,
    key: Key,
    /// Not yet sent.
    held: BytesMut,
    /// None as long as it may become a single request.
    upload: Option<Arc<Upload>>,
    /// Parts.
    begun: usize,
    sending: JoinSet<(usize, Attempt<PartId>)>,
    sent: Vec<(usize, PartId)>,
}

impl PartsWriter {
    pub(crate) async fn write(&mut self, bytes: Bytes) -> Result<(), PutError> {
        self.held.extend_from_slice(&bytes);
        self.send_what_is_full().await.map_err(|trouble| self.remote.not_put(trouble))
    }

    async fn send_what_is_full(&mut self) -> Attempt<()> {
        let usual = self.remote.settings().part_bytes.max(1);
        if self.upload.is_none() && self.held.len() > 2 * usual {
            self.upload = Some(Arc::new(Upload::begin(&self.remote, &self.remote.path(&self.key)).await?));
        }
        let Some(upload) = self.upload.clone() else { return Ok(()) };
        while self.held.len() >= growing_part_bytes(self.begun, usual) {
            let part = self.held.split_to(growing_part_bytes(self.begun, usual)).freeze();
            self.send(&upload, part).await?;
        }
        Ok(())
    }

    /// In a task of its own, so that it goes on while more is made.
    async fn send(&mut self, upload: &Arc<Upload>, part: Bytes) -> Attempt<()> {
        while self.sending.len() >= self.remote.settings().most_uploads.max(1) {
            self.one_is_sent().await?;
        }
        let (upload, number) = (upload.clone(), self.begun);
        self.begun += 1;
        self.sending.spawn(async move { (number, upload.part(number, part).await) });
        Ok(())
    }

    /// Waits for a part. False if none is on its way.
    async fn one_is_sent(&mut self) -> Attempt<bool> {
        match self.sending.join_next().await {
            None => Ok(false),
            Some(Ok((number, part))) => {
                self.sent.push((number, part?));
                Ok(true)
            }
            Some(Err(error)) => {
                let store = self.remote.names().store.clone();
                Err(Trouble::Store(StoreFailure::Ended { store, source: Cause::new(error) }))
            }
        }
    }

    pub(crate) async fn finish(mut self) -> Result<(), PutError> {
        let last = self.held.split().freeze();
        let Some(upload) = self.upload.take() else { return self.remote.put(&self.key, last).await };
        let sent = self.rest(&upload, last).await;
        self.sending.shutdown().await;
        match upload.end(sent).await {
            Err(trouble @ Trouble::NoUpload) => Err(PutError::Unknown {
                store: self.remote.names().store.clone(),
                key: self.key.clone(),
                source: Box::new(self.remote.failure(trouble)),
            }),
            done => done.map_err(|trouble| self.remote.not_put(trouble)),
        }
    }

    async fn rest(&mut self, upload: &Arc<Upload>, last: Bytes) -> Attempt<Vec<PartId>> {
        if !last.is_empty() {
            self.send(upload, last).await?;
        }
        while self.one_is_sent().await? {}
        self.sent.sort_unstable_by_key(|(number, _)| *number);
        Ok(std::mem::take(&mut self.sent).into_iter().map(|(_, part)| part).collect())
    }
}

/// Parts of a stream, whose end is not known: 10,000 of them reach beyond what any store takes.
fn growing_part_bytes(number: usize, usual: usize) -> usize {
    usual << (number / DOUBLES_AFTER)
}

/// Parts of equal length, as some providers want them.
fn part_bytes(length: usize, usual: usize) -> usize {
    usual.max(length.div_ceil(MOST_PARTS)).max(1)
}

/// An upload that was begun; aborted when it is dropped before it is done.
#[derive(Debug)]
struct Upload {
    remote: Remote,
    path: Path,
    id: MultipartId,
    /// None where objects cannot carry it.
    number: Option<String>,
    done: AtomicBool,
}

impl Upload {
    async fn begin(remote: &Remote, path: &Path) -> Attempt<Upload> {
        let number = remote.names().store.starts_with("s3:").then(|| format!("{:?}", Nonce::random()));
        let create = || async {
            let mut attributes = Attributes::new();
            if let Some(number) = &number {
                attributes.insert(NUMBER, number.clone().into());
            }
            let options = PutMultipartOptions { attributes, ..PutMultipartOptions::default() };
            remote.once(Count::Upload, 0, remote.cloud().create_multipart_opts(path, options)).await
        };
        let id = remote.retried(create).await?;
        Ok(Upload { remote: remote.clone(), path: path.clone(), id, number, done: AtomicBool::new(false) })
    }

    /// Makes an object of the parts, or of none if one was not sent.
    async fn end(&self, sent: Attempt<Vec<PartId>>) -> Attempt<()> {
        let completed = match sent {
            Ok(parts) => self.complete(parts).await,
            Err(trouble) => Err(trouble),
        };
        let completed = match completed {
            Err(Trouble::NoUpload) if self.stands().await => Ok(()),
            completed => completed,
        };
        if completed.is_err() {
            self.abort().await;
            self.abort_again();
        }
        self.done.store(true, Ordering::Relaxed);
        completed
    }

    /// Whether the object that is there came from this upload.
    async fn stands(&self) -> bool {
        let Some(number) = &self.number else { return false };
        let head = || async {
            let options = GetOptions { head: true, ..GetOptions::default() };
            self.remote.once(Count::Head, 0, self.remote.cloud().get_opts(&self.path, options)).await
        };
        let there = self.remote.retried(head).await;
        there.is_ok_and(|there| there.attributes.get(&NUMBER).is_some_and(|found| found.as_ref() == number))
    }

    async fn part(&self, number: usize, bytes: Bytes) -> Attempt<PartId> {
        let put = || async {
            let request = self.remote.cloud().put_part(&self.path, &self.id, number, bytes.clone().into());
            self.remote.once(Count::Part, bytes.len(), request).await
        };
        self.remote.retried(put).await
    }

    async fn complete(&self, parts: Vec<PartId>) -> Attempt<()> {
        let complete = || async {
            let request = self.remote.cloud().complete_multipart(&self.path, &self.id, parts.clone());
            self.remote.once(Count::Upload, 0, request).await.map(drop)
        };
        self.remote.retried(complete).await
    }

    /// As well as can be: what fails here has failed before, and that is what is reported.
    async fn abort(&self) {
        let abort = || async {
            let request = self.remote.cloud().abort_multipart(&self.path, &self.id);
            self.remote.once(Count::Upload, 0, request).await
        };
        match self.remote.retried(abort).await {
            Ok(()) | Err(Trouble::NoUpload | Trouble::Missing) => {}
            Err(trouble) => {
                let (path, store) = (&self.path, &self.remote.names().store);
                tracing::warn!(%path, %store, "an upload could not be aborted, its parts stay: {trouble:?}");
            }
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !*self.done.get_mut() {
            self.abort_in(&[Duration::ZERO, ABORTED_AGAIN[0], ABORTED_AGAIN[1]]);
        }
    }
}

impl Upload {
    /// A part that was cut off with all its bytes on the way may come to the store after the upload
    /// was aborted, and stay.
    fn abort_again(&self) {
        self.abort_in(&ABORTED_AGAIN);
    }

    /// In the background, after each of these waits.
    fn abort_in(&self, waits: &[Duration]) {
        let waits = waits.to_vec();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (remote, path, id) = (self.remote.clone(), self.path.clone(), self.id.clone());
        runtime.spawn(async move {
            let upload = Upload { remote, path, id, number: None, done: AtomicBool::new(true) };
            for wait in waits {
                tokio::time::sleep(wait).await;
                upload.abort().await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_stream_grow_beyond_any_object() {
        let of = |number| growing_part_bytes(number, 8 << 20);
        assert_eq!((of(0), of(999), of(1000), of(9999)), (8 << 20, 8 << 20, 16 << 20, 4 << 30));
        let most: usize = (0..MOST_PARTS).map(of).sum();
        assert!(most > 5 << 40, "{most}");
    }

    #[test]
    fn parts_grow_before_there_are_too_many() {
        assert_eq!(part_bytes(1, 8), 8);
        assert_eq!(part_bytes(80_000, 8), 8);
        assert_eq!(part_bytes(80_001, 8), 9);
    }
}
