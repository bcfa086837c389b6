//! Whether a store can hold references: asked of it, not believed.
//!
//! Swaps are made with a reference of its own, in the way they are made with any other, some of
//! which must fail. A store that ignores a condition takes them. What is left if this is cut off is
//! one small object `kip-probe-<number>`.

use crate::failure::{PutError, ReadReferenceError, StoreFailure, SwapError};
use crate::key::Key;
use crate::listing::Placed;
use crate::reference::{Nonce, Version};
use crate::{Backend, Store};
use bytes::Bytes;
use std::sync::Arc;

/// References of this store are not safe, or it could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum CheckSwapsError {
    /// It does not do what swapping needs.
    #[error(
        "store {store} cannot hold references: it {what}; take a store with If-Match and If-None-Match for PUT, or a \
         directory on a file system with locks"
    )]
    Unfit {
        /// As in the URL.
        store: Arc<str>,
        /// What it does.
        what: String,
    },
    /// The outcome of a swap was not learned. The same may succeed later.
    #[error("whether store {store} can hold references was not learned")]
    Unknown {
        /// As in the URL.
        store: Arc<str>,
        /// What hid it.
        #[source]
        source: Box<SwapError>,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

/// What became of a swap that was tried.
enum Tried {
    Taken(Version),
    Refused,
}

struct Probe<'a> {
    store: &'a Store,
    key: Key,
}

impl Store {
    /// Whether references can be kept here: whether a bucket honours If-Match and If-None-Match,
    /// whether locks in a directory exclude. Writes, swaps and deletes a small reference
    /// `kip-probe-<number>`, which stays if this is cut off; five to ten requests. Worth asking
    /// once, before a store is first used.
    pub async fn check_swaps(&self) -> Result<(), CheckSwapsError> {
        let key = Key::new(format!("kip-probe-{:?}", Nonce::random())).expect("hex digits");
        let probe = Probe { store: self, key };
        if let Backend::Directory(directory) = &self.0
            && !directory.locks_exclude().await?
        {
            return Err(probe.unfit("lets two hold the same lock"));
        }
        let found = probe.swaps().await;
        let removed = self.delete(&probe.key).await;
        found?;
        Ok(removed?)
    }
}

impl Probe<'_> {
    fn unfit(&self, what: &str) -> CheckSwapsError {
        CheckSwapsError::Unfit { store: self.store.name().into(), what: what.to_owned() }
    }

    fn not_put(&self, error: PutError) -> CheckSwapsError {
        match error {
            PutError::Store(failure) => failure.into(),
            PutError::Unknown { source, .. } => (*source).into(),
            PutError::Incomplete { .. } => self.unfit("does not take a few bytes"),
        }
    }

    async fn swap(&self, expected: Option<&Version>, value: &'static str) -> Result<Tried, CheckSwapsError> {
        match self.store.swap_reference(&self.key, expected, Bytes::from_static(value.as_bytes())).await {
            Ok(version) => Ok(Tried::Taken(version)),
            Err(SwapError::Conflict { .. } | SwapError::Superseded { .. }) => Ok(Tried::Refused),
            Err(SwapError::Store(StoreFailure::Refused { status, code, .. })) => {
                // Unless it refuses to write at all.
                match self.store.put(&self.key, Bytes::from_static(b"x")).await {
                    Ok(()) => Err(self.unfit(&format!("refuses to write on a condition ({status} {code})"))),
                    Err(error) => Err(self.not_put(error)),
                }
            }
            Err(SwapError::Store(failure)) => Err(failure.into()),
            Err(source @ (SwapError::Unknown { .. } | SwapError::NotAReference { .. })) => {
                Err(CheckSwapsError::Unknown { store: self.store.name().into(), source: Box::new(source) })
            }
        }
    }

    async fn must_take(&self, expected: Option<&Version>, otherwise: &str) -> Result<Version, CheckSwapsError> {
        match self.swap(expected, "taken").await? {
            Tried::Taken(version) => Ok(version),
            Tried::Refused => Err(self.unfit(otherwise)),
        }
    }

    async fn must_refuse(&self, expected: Option<&Version>, otherwise: &str) -> Result<(), CheckSwapsError> {
        match self.swap(expected, "refused").await? {
            Tried::Taken(_) => Err(self.unfit(otherwise)),
            Tried::Refused => Ok(()),
        }
    }

    async fn swaps(&self) -> Result<(), CheckSwapsError> {
        let first = self.must_take(None, "refuses what is not there yet (If-None-Match)").await?;
        self.must_refuse(None, "writes over what is there though it was told not to (If-None-Match)").await?;
        match self.store.put_if_absent(&self.key, Bytes::from_static(b"x")).await {
            Ok(Placed::AlreadyThere) => {}
            Ok(Placed::New) => return Err(self.unfit("writes over what is there though it was told not to")),
            Err(error) => return Err(self.not_put(error)),
        }
        let never = Version {
            nonce: Nonce::random(),
            e_tag: first.e_tag.as_ref().map(|_| "\"00000000000000000000000000000000\"".to_owned()),
            number: first.number.as_ref().map(|_| "1".to_owned()),
        };
        self.must_refuse(Some(&never), "writes over another version than the one it was told (If-Match)").await?;
        let second = self.must_take(Some(&first), "refuses the version that is there (If-Match)").await?;
        self.must_refuse(Some(&first), "writes over another version than the one it was told (If-Match)").await?;
        match self.store.read_reference(&self.key).await {
            Ok(Some((value, version))) if version.nonce == second.nonce && value == "taken" => Ok(()),
            Ok(_) => Err(self.unfit("does not give back what was written last")),
            Err(ReadReferenceError::Store(failure)) => Err(failure.into()),
            Err(ReadReferenceError::NotAReference { .. }) => Err(self.unfit("gives back what was not written")),
        }
    }
}
