//! Blobs in an object store, and small references that are changed by compare-and-swap: where
//! archived programs lie.
//!
//! Owns how bytes get to a store and back: requests, retries, second requests for slow first bytes,
//! uploads in parts, time limits, counting. Knows nothing of what the bytes mean, and does not
//! check them: TLS, and S3's signature of what is uploaded, guard the way, but a bit that turns in
//! a store, or on the way down over plain HTTP, is for the layer above to find, which authenticates
//! what it reads. Never deletes or lists by itself, never caches.
//!
//! Invariants: an object is there whole or not at all; a read gives bytes of one object or an
//! error; a swap has one winner per version, and says truthfully what it knows when an answer is
//! lost. A crash leaves at worst parts of an upload that no key names: files `name#new.<number>` in
//! a directory ([`Store::remove_leftovers`]), an incomplete multipart upload in a bucket (give the
//! bucket a life-cycle rule for those).
//!
//! ```text
//! Store ── directory: files, fsync, rename, flock
//!       └─ remote: attempts, hedges, resumption, parts ── object_store: one signed request ── wire: HTTP, TLS
//! ```
//!
//! Two things to know above: a `put` that was given up may still arrive and replace what came after
//! it, so blobs get keys that are never used twice and only references change; and a reference is
//! read as last swapped only in stores with strong consistency, which S3 and its like have.
#![forbid(unsafe_code)]

mod address;
mod counters;
mod directory;
mod failure;
mod key;
mod listing;
mod permits;
mod probe;
mod reference;
mod remote;
mod settings;
mod wire;
mod writer;

pub use address::OpenError;
pub use counters::{Counters, FIRST_BYTE_BOUNDS, FirstByte};
pub use failure::{GetError, PutError, ReadReferenceError, StoreFailure, SwapError};
pub use key::{Key, KeyError, LONGEST_COMPONENT, LONGEST_KEY};
pub use listing::{Listed, Placed};
pub use probe::CheckSwapsError;
pub use reference::Version;
pub use settings::{Credentials, Hedge, Settings};
pub use wire::Cause;
pub use writer::Writer;

use crate::address::Address;
use crate::directory::Directory;
use crate::remote::Remote;
use bytes::Bytes;
use futures_util::stream::{BoxStream, Stream, StreamExt};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use writer::Destination;

/// A store, opened. A handle that is owned: clones are handles on the same one, cheap to make and
/// to give to tasks, and count together.
///
/// Every operation may be dropped at any point; a write that is dropped may still take place.
#[derive(Debug, Clone)]
pub struct Store(Backend);

#[derive(Debug, Clone)]
enum Backend {
    Directory(Directory),
    Remote(Remote),
}

/// An object on its way: a stream of its bytes in order, in pieces as they come. After an error it
/// gives no more.
pub struct ObjectStream {
    size: u64,
    bytes: BoxStream<'static, Result<Bytes, GetError>>,
}

impl ObjectStream {
    /// Bytes in all.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl std::fmt::Debug for ObjectStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Object").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Stream for ObjectStream {
    type Item = Result<Bytes, GetError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.bytes.poll_next_unpin(cx)
    }
}

macro_rules! either {
    ($store:expr, $backend:ident => $call:expr) => {
        match &$store.0 {
            Backend::Directory($backend) => $call,
            Backend::Remote($backend) => $call,
        }
    };
}

impl Store {
    /// Opens what a URL names. Asks no network; [`Store::check`] does.
    ///
    /// * `/dir` or `file:///dir`: a directory, which must exist.
    /// * `s3://bucket/prefix?endpoint=https://host:port&region=name`: S3 or its like. Without
    ///   `region`, `AWS_REGION` or `AWS_DEFAULT_REGION`, else `us-east-1`. Without `endpoint`,
    ///   `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, else Amazon's of the region. An endpoint
    ///   without TLS (`http://`) must stand in the URL.
    /// * `gs://bucket/prefix`, `az://container/prefix`: with the features `gcs` and `azure`;
    ///   credentials as `object_store` finds them in the environment (`GOOGLE_*`, `AZURE_*`) or
    ///   from the machine's identity.
    ///
    /// Credentials for S3 are the first that are found of [`Settings::credentials`],
    /// `AWS_ACCESS_KEY_ID` with `AWS_SECRET_ACCESS_KEY` (and `AWS_SESSION_TOKEN`), a web identity
    /// (`AWS_WEB_IDENTITY_TOKEN_FILE`, `AWS_ROLE_ARN`), the keys of the profile (`AWS_PROFILE`,
    /// else `default`) in `~/.aws/credentials` and `~/.aws/config` (`AWS_SHARED_CREDENTIALS_FILE`,
    /// `AWS_CONFIG_FILE`), a container's (`AWS_CONTAINER_CREDENTIALS_*`), the instance's role. A
    /// profile's region counts after those of the environment.
    pub fn open(url: &str, settings: Settings) -> Result<Store, OpenError> {
        Ok(Store(match Address::parse(url)? {
            Address::Directory(path) => Backend::Directory(Directory::open(path, settings)?),
            Address::Bucket(bucket) => Backend::Remote(remote::open::open(url, bucket, settings)?),
        }))
    }

    /// What it is called in messages: the path, or the URL without its parameters.
    pub fn name(&self) -> &str {
        match &self.0 {
            Backend::Directory(directory) => directory.name(),
            Backend::Remote(remote) => &remote.names().store,
        }
    }

    /// Whether it is a directory, which reads as fast as a copy of it here would.
    pub fn is_directory(&self) -> bool {
        matches!(self.0, Backend::Directory(_))
    }

    /// A handle on the same store with counters of its own, which start at zero. This one's count
    /// what is done there too.
    pub fn counting_apart(&self) -> Store {
        Store(match &self.0 {
            Backend::Directory(directory) => Backend::Directory(directory.counting_apart()),
            Backend::Remote(remote) => Backend::Remote(remote.counting_apart()),
        })
    }

    /// A handle on the same store whose requests wait for those of all others: for what no wake
    /// waits for. Counts together with this one. A directory has no such order.
    pub fn in_background(&self) -> Store {
        Store(match &self.0 {
            Backend::Directory(directory) => Backend::Directory(directory.clone()),
            Backend::Remote(remote) => Backend::Remote(remote.in_background()),
        })
    }

    /// What was done through this handle, its clones and those counting apart from it.
    pub fn counters(&self) -> Counters {
        either!(self, backend => backend.tally().read())
    }

    /// Whether the store is there and lets itself be read, with one request. Says nothing about
    /// writing.
    pub async fn check(&self) -> Result<(), StoreFailure> {
        either!(self, backend => backend.check().await)
    }

    /// Removes what processes that died left in a directory at least this long ago: files half
    /// written (`name#new.<number>`), locks of references that are gone. How many. What is being
    /// written must be younger. Of a bucket nothing: its life-cycle rule removes unfinished
    /// uploads.
    pub async fn remove_leftovers(&self, older_than: Duration) -> Result<u64, StoreFailure> {
        match &self.0 {
            Backend::Directory(directory) => directory.remove_leftovers(older_than).await,
            Backend::Remote(_) => Ok(0),
        }
    }

    /// Writes an object as its bytes are made, over one that is there. Up to two parts
    /// ([`Settings::part_bytes`]) it is one request, beyond that parts go up while more is made;
    /// they grow with the object, so that 10,000 are enough for any.
    pub fn writer(&self, key: &Key) -> Writer {
        let to = match &self.0 {
            Backend::Directory(directory) => Destination::File(directory.writer(key)),
            Backend::Remote(remote) => Destination::Parts(remote.writer(key)),
        };
        Writer { store: self.name().into(), key: key.clone(), to, whole: true }
    }

    /// Writes an object, over one that is there. Durable when it returns.
    pub async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), PutError> {
        either!(self, backend => backend.put(key, bytes).await)
    }

    /// Writes an object unless there is one. In a bucket this is one request, so at most 5 GiB,
    /// better far less. If the answer was lost and the object is there with these very bytes, it
    /// counts as written by this call.
    pub async fn put_if_absent(&self, key: &Key, bytes: Bytes) -> Result<Placed, PutError> {
        either!(self, backend => backend.put_if_absent(key, bytes).await)
    }

    /// Reads an object. Returns when its first bytes are there. A stream that breaks goes on with
    /// the rest, as long as the object is the same.
    pub async fn get(&self, key: &Key) -> Result<ObjectStream, GetError> {
        Ok(match &self.0 {
            Backend::Directory(directory) => {
                let (size, bytes) = directory.get(key).await?;
                ObjectStream { size, bytes: bytes.boxed() }
            }
            Backend::Remote(remote) => {
                let (size, bytes) = remote.get(key).await?;
                ObjectStream { size, bytes: bytes.boxed() }
            }
        })
    }

    /// Reads part of an object: all bytes of the range, or an error. An empty range is empty,
    /// without asking.
    ///
    /// # Panics
    /// If the range ends before it starts.
    pub async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, GetError> {
        assert!(range.start <= range.end, "a range ends where it starts or later");
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        either!(self, backend => backend.get_range(key, range).await)
    }

    /// Reads parts of an object at once, in as many requests; all of them from the same object.
    /// Ranges are not merged: the caller knows what lies between.
    ///
    /// # Panics
    /// If a range ends before it starts.
    pub async fn get_ranges(&self, key: &Key, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, GetError> {
        assert!(ranges.iter().all(|range| range.start <= range.end), "a range ends where it starts or later");
        if ranges.iter().all(Range::is_empty) {
            return Ok(vec![Bytes::new(); ranges.len()]);
        }
        either!(self, backend => backend.get_ranges(key, ranges).await)
    }

    /// An object's length, bytes. In a bucket one request, and a second one when there is no such
    /// object or another reason why not, which S3's answer to the first has no room for.
    pub async fn size(&self, key: &Key) -> Result<u64, GetError> {
        either!(self, backend => backend.size(key).await)
    }

    /// The objects whose keys begin with `under` and a slash, or all, by key. What is written or
    /// deleted meanwhile may be in it or not. Files and objects whose names are no keys are left
    /// out.
    pub fn list(&self, under: Option<&Key>) -> BoxStream<'static, Result<Listed, StoreFailure>> {
        either!(self, backend => backend.list(under).boxed())
    }

    /// Deletes an object or a reference. That there is none is fine.
    pub async fn delete(&self, key: &Key) -> Result<(), StoreFailure> {
        either!(self, backend => backend.delete(key).await)
    }

    /// The value of a reference and its version; none if it does not exist.
    pub async fn read_reference(&self, key: &Key) -> Result<Option<(Bytes, Version)>, ReadReferenceError> {
        either!(self, backend => backend.read_reference(key).await)
    }

    /// Gives a reference a value if it is as expected: of this version, or, for none, not there. Of
    /// all swaps that expect the same version one succeeds. An error says what is known of the
    /// outcome, see [`SwapError`]; a lost answer is looked into.
    pub async fn swap_reference(
        &self,
        key: &Key,
        expected: Option<&Version>,
        value: Bytes,
    ) -> Result<Version, SwapError> {
        either!(self, backend => backend.swap_reference(key, expected, &value).await)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one task begins, another thread may go on with. The compiler checks it; nothing needs
    /// to run.
    #[test]
    fn every_operation_can_be_spawned() {
        fn spawnable(_: impl Send) {}
        let dir = std::env::temp_dir();
        let store = Store::open(dir.to_str().expect("a plain name"), Settings::default()).expect("it exists");
        let key = Key::new("key").expect("a key");
        fn owned<T: Clone + Send + Sync + 'static>(_: &T) {}
        owned(&store);
        spawnable(store.check());
        spawnable(store.check_swaps());
        spawnable(store.remove_leftovers(Duration::ZERO));
        spawnable(store.writer(&key));
        spawnable(store.writer(&key).write(Bytes::new()));
        spawnable(store.writer(&key).finish());
        spawnable(store.put(&key, Bytes::new()));
        spawnable(store.put_if_absent(&key, Bytes::new()));
        spawnable(store.get(&key));
        spawnable(store.get_range(&key, 0..1));
        spawnable(store.get_ranges(&key, std::slice::from_ref(&(0..1))));
        spawnable(store.size(&key));
        spawnable(store.list(None));
        spawnable(store.delete(&key));
        spawnable(store.read_reference(&key));
        spawnable(store.swap_reference(&key, None, Bytes::new()));
        assert_eq!(store.counters(), Counters::default());
    }
}
