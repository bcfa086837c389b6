//! Reads from a bucket: the first byte as early as can be, and all of the rest.
//!
//! A read is asked for once more when its first byte is slow, and goes on with a further range when
//! it breaks off; the object's ETag ties the pieces together, so that what a reader gets is always
//! one object.
//!
//! ```text
//! first byte: attempt ──(slow)──> attempt + second attempt ──> whichever comes first
//! stream:     bytes ──(breaks)──> wait ──> first byte of the rest, same ETag ──> bytes
//! ```

use super::{Attempt, Remote, Tries};
use crate::counters::Count;
use crate::failure::{GetError, StoreFailure, Trouble};
use crate::key::Key;
use crate::wire::Cause;
use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, BoxStream, Stream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta};
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::time::Instant;

/// No store has longer ones, and some ignore a range whose numbers they cannot hold.
const LONGEST_OBJECT: u64 = i64::MAX as u64;

/// A read whose first bytes have come.
struct Begun {
    /// Of the whole object.
    size: u64,
    e_tag: String,
    version: Option<String>,
    /// What this answer holds.
    range: Range<u64>,
    /// None of an empty one.
    first: Option<Bytes>,
    rest: BoxStream<'static, object_store::Result<Bytes>>,
    /// Sent to first byte.
    took: std::time::Duration,
}

/// A whole read.
pub(crate) struct Whole {
    pub(crate) bytes: Bytes,
    /// None of an empty range, for which no request was sent.
    pub(crate) e_tag: Option<String>,
    pub(crate) version: Option<String>,
}

/// What is asked for.
#[derive(Debug, Clone)]
struct Wish {
    path: Path,
    range: Option<Range<u64>>,
    /// Only if the object still has this ETag.
    e_tag: Option<String>,
}

impl Remote {
    /// Size and bytes, once the first have come.
    pub(crate) async fn get(
        &self,
        key: &Key,
    ) -> Result<(u64, impl Stream<Item = Result<Bytes, GetError>> + Send + use<>), GetError> {
        let begun = self.begin(key, None).await?;
        Ok((begun.size, self.clone().go_on(key.clone(), begun)))
    }

    pub(crate) async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, GetError> {
        Ok(self.range(key, range).await?.bytes)
    }

    /// All of one object, or none: ranges that were answered from different objects are not given
    /// out.
    pub(crate) async fn get_ranges(&self, key: &Key, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, GetError> {
        let pieces = ranges.iter().cloned().map(|range| self.range(key, range));
        let pieces: Vec<Whole> =
            stream::iter(pieces).buffered(self.settings().most_requests.max(1)).try_collect().await?;
        let mut tags = pieces.iter().filter_map(|piece| piece.e_tag.as_ref());
        if let Some(first) = tags.next()
            && tags.any(|tag| tag != first)
        {
            return Err(self.changed(key));
        }
        Ok(pieces.into_iter().map(|piece| piece.bytes).collect())
    }

    /// The bytes of a small object.
    pub(crate) async fn whole(&self, key: &Key) -> Result<Bytes, GetError> {
        Ok(self.whole_with_version(key).await?.bytes)
    }

    pub(crate) async fn whole_with_version(&self, key: &Key) -> Result<Whole, GetError> {
        let begun = self.begin(key, None).await?;
        self.collect(key, begun).await
    }

    async fn range(&self, key: &Key, range: Range<u64>) -> Result<Whole, GetError> {
        if range.is_empty() {
            return Ok(Whole { bytes: Bytes::new(), e_tag: None, version: None });
        }
        if range.end > LONGEST_OBJECT {
            return Err(self.not_got(key, Some(range), Trouble::BeyondEnd(None)));
        }
        let begun = self.begin(key, Some(range.clone())).await?;
        if begun.range != range {
            return Err(self.not_got(key, Some(range), Trouble::BeyondEnd(Some(begun.size))));
        }
        self.collect(key, begun).await
    }

    async fn collect(&self, key: &Key, begun: Begun) -> Result<Whole, GetError> {
        let (e_tag, version) = (Some(begun.e_tag.clone()), begun.version.clone());
        let length = usize::try_from(begun.range.end - begun.range.start).expect("64 bits");
        if begun.first.as_ref().is_some_and(|first| first.len() == length) {
            self.tally.add(Count::BytesRead, length as u64);
            return Ok(Whole { bytes: begun.first.unwrap_or_default(), e_tag, version });
        }
        // Not all at once for a length that is only claimed.
        let mut bytes = BytesMut::with_capacity(length.min(self.settings().part_bytes));
        let mut stream = pin!(self.clone().go_on(key.clone(), begun));
        while let Some(chunk) = stream.try_next().await? {
            bytes.extend_from_slice(&chunk);
        }
        Ok(Whole { bytes: bytes.freeze(), e_tag, version })
    }

    /// A read for the sake of how it ends: the object's length, or why there is none.
    pub(super) async fn first_bytes(&self, key: &Key) -> Attempt<u64> {
        let wish = Wish { path: self.path(key), range: Some(0..1), e_tag: None };
        match self.retried(|| self.hedged(&wish)).await {
            Ok(begun) => Ok(begun.size),
            // It came meanwhile, and is empty.
            Err(Trouble::BeyondEnd(_)) => Ok(0),
            Err(trouble) => Err(trouble),
        }
    }

    async fn begin(&self, key: &Key, range: Option<Range<u64>>) -> Result<Begun, GetError> {
        let wish = Wish { path: self.path(key), range, e_tag: None };
        let result = self.retried(|| self.hedged(&wish)).await;
        result.map_err(|trouble| self.not_got(key, wish.range, trouble))
    }

    pub(super) fn not_got(&self, key: &Key, range: Option<Range<u64>>, trouble: Trouble) -> GetError {
        let (store, key) = (self.names().store.clone(), key.clone());
        match (trouble, range) {
            (Trouble::Missing, _) => GetError::Missing { store, key },
            (Trouble::BeyondEnd(size), Some(range)) => {
                GetError::BeyondEnd { store, key, start: range.start, end: range.end, size }
            }
            (trouble, _) => GetError::Store(self.failure(trouble)),
        }
    }

    fn changed(&self, key: &Key) -> GetError {
        GetError::Changed { store: self.names().store.clone(), key: key.clone() }
    }

    /// One attempt, and a second one beside it when the first byte is slow.
    async fn hedged(&self, wish: &Wish) -> Attempt<Begun> {
        let permit = self.bucket.small.take(self.urgency).await;
        let mut first = pin!(self.attempt(wish));
        let delay = self.settings().hedge.delay(self.tally.usual_first_byte());
        let Some(delay) = delay else { return first.await };
        if let Ok(done) = tokio::time::timeout(delay, &mut first).await {
            return done;
        }
        // No room: a second request would only make what is slow slower.
        let Some(_second_permit) = self.bucket.small.try_take() else { return first.await };
        self.tally.one(Count::Hedge);
        let mut second = pin!(self.attempt(wish));
        let (done, other_is_second) = tokio::select! {
            done = &mut first => (done, true),
            done = &mut second => (done, false),
        };
        drop(permit);
        // One that failed in a way that may pass leaves the answer to the other.
        let undecided = matches!(&done, Err(Trouble::Store(failure)) if failure.is_temporary());
        let (done, second_won) = match (undecided, other_is_second) {
            (false, other_is_second) => (done, !other_is_second),
            (true, true) => (second.await, true),
            (true, false) => (first.await, false),
        };
        if second_won && done.is_ok() {
            self.tally.one(Count::HedgeWon);
        }
        done
    }

    /// One request, up to its first bytes.
    async fn attempt(&self, wish: &Wish) -> Attempt<Begun> {
        self.tally.one(Count::Get);
        let sent = Instant::now();
        let limit = self.settings().answer_timeout;
        let options = GetOptions {
            range: wish.range.clone().map(GetRange::Bounded),
            if_match: wish.e_tag.clone(),
            ..GetOptions::default()
        };
        let first_bytes = async {
            let answer = self.cloud().get_opts(&wish.path, options).await?;
            let (meta, range) = (answer.meta.clone(), answer.range.clone());
            let mut rest = answer.into_stream();
            let first = rest.try_next().await?;
            Ok((meta, range, first, rest))
        };
        let (meta, range, first, rest) = match tokio::time::timeout(limit, first_bytes).await {
            Ok(result) => result.map_err(|error| self.names().trouble(error))?,
            Err(_) => return Err(self.names().timed_out(limit)),
        };
        if first.is_none() && !range.is_empty() {
            return Err(self.names().broken(Cause::new(io::Error::from(io::ErrorKind::UnexpectedEof))));
        }
        let e_tag = self.e_tag(&meta)?;
        let took = sent.elapsed();
        self.tally.first_byte(took);
        Ok(Begun { size: meta.size, e_tag, version: meta.version, range, first, rest, took })
    }

    /// Every object store gives one; what answers without is another kind of server.
    pub(super) fn e_tag(&self, meta: &ObjectMeta) -> Attempt<String> {
        meta.e_tag.clone().ok_or_else(|| {
            let names = self.names();
            let source = Cause::new(io::Error::new(io::ErrorKind::InvalidData, "the answer has no ETag"));
            let (store, endpoint) = (names.store.clone(), names.endpoint.clone());
            Trouble::Store(StoreFailure::Unintelligible { store, endpoint, source })
        })
    }

    fn go_on(self, key: Key, begun: Begun) -> impl Stream<Item = Result<Bytes, GetError>> + Send {
        tracing::trace!(%key, size = begun.size, first_byte_us = begun.took.as_micros(), "reading");
        let reading = Reading { remote: self, key, begun };
        stream::try_unfold(
            reading,
            |mut reading| async move { Ok(reading.next().await?.map(|bytes| (bytes, reading))) },
        )
    }
}

/// A stream on its way. `begun.range` is what is still to come.
struct Reading {
    remote: Remote,
    key: Key,
    begun: Begun,
}

impl Reading {
    async fn next(&mut self) -> Result<Option<Bytes>, GetError> {
        if self.begun.range.is_empty() {
            return Ok(None);
        }
        let bytes = match self.chunk().await {
            Ok(bytes) => bytes,
            Err(trouble) => self.resume(trouble).await?,
        };
        let left = usize::try_from(self.begun.range.end - self.begun.range.start).expect("64 bits");
        let bytes = if bytes.len() > left { bytes.slice(..left) } else { bytes };
        self.begun.range.start += bytes.len() as u64;
        self.remote.tally.add(Count::BytesRead, bytes.len() as u64);
        Ok(Some(bytes))
    }

    /// The next bytes of the answer that is being read; never none.
    async fn chunk(&mut self) -> Attempt<Bytes> {
        let names = self.remote.names();
        loop {
            let chunk = match self.begun.first.take() {
                Some(first) => Some(first),
                None => {
                    let limit = self.remote.settings().answer_timeout;
                    let next = tokio::time::timeout(limit, self.begun.rest.try_next()).await;
                    next.map_err(|_| names.timed_out(limit))?.map_err(|error| names.trouble(error))?
                }
            };
            match chunk {
                Some(bytes) if bytes.is_empty() => {}
                Some(bytes) => return Ok(bytes),
                None => return Err(names.broken(Cause::new(io::Error::from(io::ErrorKind::UnexpectedEof)))),
            }
        }
    }

    /// Asks for the rest, in as many tries as a request has; gives its first bytes.
    async fn resume(&mut self, mut trouble: Trouble) -> Result<Bytes, GetError> {
        let remote = self.remote.clone();
        let mut tries = Tries::new(&remote);
        let mut wish = Wish { path: remote.path(&self.key), range: None, e_tag: Some(self.begun.e_tag.clone()) };
        loop {
            let failure = match trouble {
                Trouble::Store(failure) if failure.is_temporary() => failure,
                Trouble::Missing | Trouble::Condition | Trouble::BeyondEnd(_) => return Err(remote.changed(&self.key)),
                other => return Err(remote.not_got(&self.key, None, other)),
            };
            if let Err(trouble) = tries.wait_after(failure).await {
                return Err(remote.not_got(&self.key, None, trouble));
            }
            remote.tally.one(Count::Resume);
            wish.range = Some(self.begun.range.clone());
            trouble = match remote.hedged(&wish).await {
                Ok(begun) if begun.range == self.begun.range && Some(&begun.e_tag) == wish.e_tag.as_ref() => {
                    self.begun = begun;
                    match self.chunk().await {
                        Ok(bytes) => return Ok(bytes),
                        Err(trouble) => trouble,
                    }
                }
                Ok(_) => return Err(remote.changed(&self.key)),
                Err(trouble) => trouble,
            };
        }
    }
}
