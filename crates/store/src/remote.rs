//! A store in a bucket: single requests, sent again while that can help.
//!
//! `object_store` makes, signs and sends one request at a time and is told never to try again
//! itself: so each try is signed anew, has its own time limit and is counted. A request dropped in
//! the middle leaves nothing behind but a connection that is closed, and an upload in parts that is
//! aborted in the background.

pub(crate) mod open;
mod profile;
mod reading;
mod swap;
pub(crate) mod upload;

use crate::counters::{Count, Tally};
use crate::failure::{GetError, Names, PutError, StoreFailure, Trouble};
use crate::key::{Key, KeyError};
use crate::listing::{Listed, Placed};
use crate::permits::{Permit, Permits, Urgency};
use crate::reference::random;
use crate::settings::Settings;
use bytes::Bytes;
use futures_util::stream::{self, Stream};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// What a provider's client must be able to do.
pub(crate) trait Cloud: ObjectStore + MultipartStore + PaginatedListStore {}
impl<T: ObjectStore + MultipartStore + PaginatedListStore> Cloud for T {}

/// One handle on a bucket.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    bucket: Arc<Bucket>,
    tally: Arc<Tally>,
    urgency: Urgency,
}

#[derive(Debug)]
struct Bucket {
    cloud: Arc<dyn Cloud>,
    names: Names,
    /// Before every key; empty, or ends with a slash.
    prefix: String,
    settings: Settings,
    /// Of requests that bring bytes, or are small.
    small: Permits,
    /// Of those that carry many up.
    uploads: Permits,
}

/// Requests that carry more bytes are uploads.
const SMALL: usize = 64 << 10;

/// A response to one attempt.
type Attempt<T> = Result<T, Trouble>;

impl Remote {
    fn new(cloud: Arc<dyn Cloud>, names: Names, prefix: &str, settings: Settings) -> Remote {
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let (small, uploads) = (Permits::new(settings.most_requests), Permits::new(settings.most_uploads));
        let bucket = Arc::new(Bucket { cloud, names, prefix, settings, small, uploads });
        Remote { bucket, tally: Arc::default(), urgency: Urgency::Foreground }
    }

    /// The same bucket, counting apart.
    pub(crate) fn counting_apart(&self) -> Remote {
        Remote { tally: Tally::below(&self.tally), ..self.clone() }
    }

    /// The same bucket, giving way to others.
    pub(crate) fn in_background(&self) -> Remote {
        Remote { urgency: Urgency::Background, ..self.clone() }
    }

    pub(crate) fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    pub(crate) fn names(&self) -> &Names {
        &self.bucket.names
    }

    fn settings(&self) -> &Settings {
        &self.bucket.settings
    }

    fn cloud(&self) -> &dyn Cloud {
        &*self.bucket.cloud
    }

    fn path(&self, key: &Key) -> Path {
        Path::parse(format!("{}{key}", self.bucket.prefix)).expect("a key's characters need no encoding")
    }

    /// The permit for a request that carries so many bytes.
    async fn permit(&self, carried: usize) -> Permit {
        if carried > SMALL {
            self.bucket.uploads.take(self.urgency).await
        } else {
            self.bucket.small.take(self.urgency).await
        }
    }

    /// One request, counted. The wire sees to it that bytes move up, and the answer's head comes;
    /// the limit here is for the rest of an answer.
    async fn once<T>(
        &self,
        kind: Count,
        carried: usize,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Attempt<T> {
        let _turn = self.permit(carried).await;
        self.tally.one(kind);
        self.tally.add(Count::BytesWritten, carried as u64);
        if carried > 0 {
            return request.await.map_err(|error| self.names().trouble(error));
        }
        let limit = match kind {
            // The wire waits for these as long as their answers move.
            Count::List | Count::Upload => self.settings().operation_timeout,
            _ => self.settings().answer_timeout,
        };
        match tokio::time::timeout(limit, request).await {
            Ok(result) => result.map_err(|error| self.names().trouble(error)),
            Err(_) => Err(self.names().timed_out(limit)),
        }
    }

    /// An operation that is less than an object, with all its attempts and waits.
    async fn in_time<T>(&self, operation: impl Future<Output = Attempt<T>>) -> Attempt<T> {
        let limit = self.settings().operation_timeout;
        tokio::time::timeout(limit, operation).await.unwrap_or_else(|_| {
            let waited_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
            Err(Trouble::Store(StoreFailure::TookTooLong { store: self.names().store.clone(), waited_ms }))
        })
    }

    /// Attempts until one succeeds, fails in a way that stays, or enough have failed.
    async fn retried<T, F: Future<Output = Attempt<T>>>(&self, attempt: impl Fn() -> F) -> Attempt<T> {
        let mut tries = Tries::new(self);
        loop {
            match attempt().await {
                Err(Trouble::Store(failure)) if failure.is_temporary() => tries.wait_after(failure).await?,
                done => return done,
            }
        }
    }

    pub(crate) async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), PutError> {
        if bytes.len() > 2 * self.settings().part_bytes {
            return self.put_in_parts(key, bytes).await.map_err(|trouble| self.not_put(trouble));
        }
        let path = self.path(key);
        let put = || async {
            self.once(Count::Put, bytes.len(), self.cloud().put(&path, bytes.clone().into())).await.map(drop)
        };
        self.retried(put).await.map_err(|trouble| self.not_put(trouble))
    }

    /// An answer to a write that is about no condition and yet no success.
    fn not_put(&self, trouble: Trouble) -> PutError {
        PutError::Store(self.failure(trouble))
    }

    /// Trouble of a request that names no object, or whose object cannot be missing.
    fn failure(&self, trouble: Trouble) -> StoreFailure {
        let names = self.names();
        let refused = |status, code: &str| StoreFailure::Refused {
            store: names.store.clone(),
            endpoint: names.endpoint.clone(),
            status,
            code: code.to_owned(),
            message: "no such answer is expected here".to_owned(),
        };
        match trouble {
            Trouble::Store(failure) => failure,
            Trouble::Missing => {
                StoreFailure::NoBucket { bucket: names.bucket.clone(), endpoint: names.endpoint.clone() }
            }
            Trouble::Condition => refused(412, "PreconditionFailed"),
            Trouble::BeyondEnd(_) => refused(416, "InvalidRange"),
            Trouble::NoUpload => refused(404, "NoSuchUpload"),
        }
    }

    /// One request whatever the size: providers have no condition for uploads in parts that all of
    /// them know.
    pub(crate) async fn put_if_absent(&self, key: &Key, bytes: Bytes) -> Result<Placed, PutError> {
        let path = self.path(key);
        let in_doubt = AtomicBool::new(false);
        let put = || async {
            let options = PutOptions::from(PutMode::Create);
            let request = self.cloud().put_opts(&path, bytes.clone().into(), options);
            let result = self.once(Count::Put, bytes.len(), request).await;
            // Even of one that says it is busy: a condition that fails next may be the own object's
            // doing.
            if matches!(&result, Err(Trouble::Store(failure)) if !matches!(failure, StoreFailure::Unreachable { .. })) {
                in_doubt.store(true, Ordering::Relaxed);
            }
            result
        };
        match self.retried(put).await {
            Ok(_) => Ok(Placed::New),
            Err(Trouble::Condition) if in_doubt.load(Ordering::Relaxed) && self.holds(key, &bytes).await? => {
                Ok(Placed::New)
            }
            Err(Trouble::Condition) => Ok(Placed::AlreadyThere),
            Err(trouble) => Err(self.not_put(trouble)),
        }
    }

    /// Whether an object has exactly these bytes.
    async fn holds(&self, key: &Key, bytes: &Bytes) -> Result<bool, PutError> {
        match self.whole(key).await {
            Ok(object) => Ok(object == *bytes),
            Err(GetError::Store(failure)) => Err(PutError::Store(failure)),
            Err(GetError::Missing { .. } | GetError::BeyondEnd { .. } | GetError::Changed { .. }) => Ok(false),
        }
    }

    pub(crate) async fn size(&self, key: &Key) -> Result<u64, GetError> {
        let path = self.path(key);
        let head = || async {
            let options = GetOptions { head: true, ..GetOptions::default() };
            let answer = self.once(Count::Head, 0, self.cloud().get_opts(&path, options)).await?;
            self.e_tag(&answer.meta).map(|_| answer.meta.size)
        };
        let found = self.in_time(self.retried(head)).await;
        // S3's answer to this question has no room for a reason: a missing bucket, a wrong clock. A
        // read has.
        let without_reason = match &found {
            Err(Trouble::Missing) => true,
            Err(Trouble::Store(failure)) => {
                !failure.is_temporary()
                    && !matches!(failure, StoreFailure::Unintelligible { .. } | StoreFailure::NoCredentials { .. })
            }
            _ => false,
        };
        if !without_reason {
            return found.map_err(|trouble| self.not_got(key, None, trouble));
        }
        self.in_time(self.first_bytes(key)).await.map_err(|trouble| self.not_got(key, None, trouble))
    }

    pub(crate) async fn delete(&self, key: &Key) -> Result<(), StoreFailure> {
        let path = self.path(key);
        match self.in_time(self.retried(|| self.once(Count::Delete, 0, self.cloud().delete(&path)))).await {
            Ok(()) | Err(Trouble::Missing) => Ok(()),
            Err(trouble) => Err(self.failure(trouble)),
        }
    }

    /// One page of the listing at most, whose content does not matter.
    pub(crate) async fn check(&self) -> Result<(), StoreFailure> {
        self.page(&self.bucket.prefix, None, Some(1)).await.map(drop)
    }

    pub(crate) fn list(&self, under: Option<&Key>) -> impl Stream<Item = Result<Listed, StoreFailure>> + use<> {
        let prefix = match under {
            Some(key) => format!("{}{key}/", self.bucket.prefix),
            None => self.bucket.prefix.clone(),
        };
        let start = Listing { remote: self.clone(), prefix, page: VecDeque::new(), next: Next::First };
        stream::try_unfold(
            start,
            |mut listing| async move { Ok(listing.next().await?.map(|listed| (listed, listing))) },
        )
    }

    async fn page(
        &self,
        prefix: &str,
        page_token: Option<String>,
        max_keys: Option<usize>,
    ) -> Result<(Vec<Listed>, Option<String>), StoreFailure> {
        let prefix = (!prefix.is_empty()).then_some(prefix);
        let list = || async {
            let options = PaginatedListOptions { page_token: page_token.clone(), max_keys, ..Default::default() };
            self.once(Count::List, 0, self.cloud().list_paginated(prefix, options)).await
        };
        let answer = self.in_time(self.retried(list)).await.map_err(|trouble| self.failure(trouble))?;
        let objects = answer.result.objects.into_iter();
        // What another program put there under a name that is no key is none of ours.
        let named = objects.filter_map(|object| {
            let modified = SystemTime::from(object.last_modified);
            Some(Listed { key: self.key(&object.location).ok()?, size: object.size, modified })
        });
        Ok((named.collect(), answer.page_token))
    }

    fn key(&self, path: &Path) -> Result<Key, KeyError> {
        Key::new(path.as_ref().strip_prefix(&self.bucket.prefix).unwrap_or_default())
    }
}

/// A listing on its way.
struct Listing {
    remote: Remote,
    prefix: String,
    page: VecDeque<Listed>,
    next: Next,
}

enum Next {
    First,
    Page(String),
    Nothing,
}

impl Listing {
    async fn next(&mut self) -> Result<Option<Listed>, StoreFailure> {
        loop {
            if let Some(listed) = self.page.pop_front() {
                return Ok(Some(listed));
            }
            let token = match std::mem::replace(&mut self.next, Next::Nothing) {
                Next::First => None,
                Next::Page(token) => Some(token),
                Next::Nothing => return Ok(None),
            };
            let (page, token) = self.remote.page(&self.prefix, token, None).await?;
            self.page = page.into();
            self.next = token.map_or(Next::Nothing, Next::Page);
        }
    }
}

/// How often something was tried in a row, and how long to wait before the next try.
struct Tries<'a> {
    remote: &'a Remote,
    failed: u32,
}

impl<'a> Tries<'a> {
    fn new(remote: &'a Remote) -> Tries<'a> {
        Tries { remote, failed: 0 }
    }

    /// Waits before the next try, or gives the failure back when there have been enough.
    async fn wait_after(&mut self, failure: StoreFailure) -> Result<(), Trouble> {
        let settings = self.remote.settings();
        self.failed += 1;
        self.remote.tally.one(Count::Failure);
        if self.failed >= settings.attempts {
            return Err(Trouble::Store(failure));
        }
        let wait = backoff(settings, self.failed, random(1)[0]);
        tracing::debug!(failed = self.failed, wait_ms = wait.as_millis(), "will try again: {failure}");
        tokio::time::sleep(wait).await;
        self.remote.tally.one(Count::Retry);
        Ok(())
    }
}

/// The wait after the so-manyth failure in a row; up to half of it is left out by chance.
fn backoff(settings: &Settings, failed: u32, chance: u8) -> Duration {
    let full = settings.first_backoff.saturating_mul(2_u32.saturating_pow(failed - 1)).min(settings.longest_backoff);
    full - full * u32::from(chance) / 512
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_up_to_its_limit_and_half_of_it_is_chance() {
        let settings = Settings {
            first_backoff: Duration::from_millis(50),
            longest_backoff: Duration::from_millis(300),
            ..Settings::default()
        };
        let full: Vec<_> = (1..=5).map(|failed| backoff(&settings, failed, 0).as_millis()).collect();
        assert_eq!(full, [50, 100, 200, 300, 300]);
        assert_eq!(backoff(&settings, u32::MAX, 0).as_millis(), 300);
        let least = backoff(&settings, 1, 255);
        assert!(least >= Duration::from_millis(25) && least < Duration::from_millis(26), "{least:?}");
    }
}
