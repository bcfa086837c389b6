//! Large objects go up in parts, several at once; the object appears when the last step succeeds, whole.
//!
//! An upload that fails or is dropped is aborted. A crash leaves its parts behind, unseen and paid for: a life-cycle rule
//! of the bucket should remove incomplete uploads after some days.

use super::{Attempt, Remote};
use crate::counters::Count;
use crate::failure::Trouble;
use crate::key::Key;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::MultipartId;
use object_store::multipart::PartId;
use object_store::path::Path;

/// The most that S3 takes.
const MOST_PARTS: usize = 10_000;

impl Remote {
    pub(super) async fn put_in_parts(&self, key: &Key, bytes: Bytes) -> Attempt<()> {
        let path = self.path(key);
        for _ in 1..self.settings().attempts {
            match self.upload(&path, &bytes).await {
                // The answer to the last step was lost, and a second one finds nothing to complete. Whether the object there
                // is this one cannot be told from outside, so all of it goes up once more.
                Err(Trouble::NoUpload) => self.tally.one(Count::Retry),
                done => return done,
            }
        }
        self.upload(&path, &bytes).await
    }

    async fn upload(&self, path: &Path, bytes: &Bytes) -> Attempt<()> {
        let create = || self.once(Count::Upload, 0, self.cloud().create_multipart(path));
        let id = self.retried(create).await?;
        let mut upload = Upload { remote: self.clone(), path: path.clone(), id, done: false };
        let part_bytes = part_bytes(bytes.len(), self.settings().part_bytes);
        let parts = (0..bytes.len()).step_by(part_bytes).enumerate();
        let parts =
            parts.map(|(number, start)| upload.part(number, bytes.slice(start..bytes.len().min(start + part_bytes))));
        let sent = stream::iter(parts).buffered(self.settings().most_requests.max(1)).try_collect::<Vec<_>>().await;
        let completed = match sent {
            Ok(parts) => upload.complete(parts).await,
            Err(trouble) => Err(trouble),
        };
        if completed.is_err() {
            upload.abort().await;
        }
        upload.done = true;
        completed
    }
}

/// Parts of equal length, as some providers want them.
fn part_bytes(length: usize, usual: usize) -> usize {
    usual.max(length.div_ceil(MOST_PARTS)).max(1)
}

/// An upload that was begun; aborted when it is dropped before it is done.
struct Upload {
    remote: Remote,
    path: Path,
    id: MultipartId,
    done: bool,
}

impl Upload {
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
        if self.done {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (remote, path, id) = (self.remote.clone(), self.path.clone(), self.id.clone());
        runtime.spawn(async move {
            let upload = Upload { remote, path, id, done: true };
            upload.abort().await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_grow_before_there_are_too_many() {
        assert_eq!(part_bytes(1, 8), 8);
        assert_eq!(part_bytes(80_000, 8), 8);
        assert_eq!(part_bytes(80_001, 8), 9);
    }
}
