//! References in a bucket: changed only if they are as expected, by ETag (Google's: by generation).
//!
//! A request whose answer is lost may have been acted on, or may be yet. So the reference is read
//! again: if it holds the number of this write, the change stands; if it still holds what was
//! expected, the same request is sent again, which is safe, since only one of the two can find what
//! it expects. A condition that fails after a request that was refused for now is looked into the
//! same way: the refusal may have come from a proxy between, after the store had acted.

use super::{Remote, Tries};
use crate::counters::Count;
use crate::failure::{GetError, ReadReferenceError, StoreFailure, SwapError, Trouble};
use crate::key::Key;
use crate::reference::{Nonce, Version, seal, unseal};
use bytes::Bytes;
use object_store::{PutMode, PutOptions, UpdateVersion};

impl Remote {
    pub(crate) async fn read_reference(&self, key: &Key) -> Result<Option<(Bytes, Version)>, ReadReferenceError> {
        let whole = loop {
            match self.whole_with_version(key).await {
                Ok(whole) => break whole,
                Err(GetError::Missing { .. }) => return Ok(None),
                Err(GetError::Store(failure)) => return Err(failure.into()),
                // It was swapped while it was read.
                Err(GetError::Changed { .. } | GetError::BeyondEnd { .. }) => {}
            }
        };
        let (nonce, value) = unseal(&whole.bytes)
            .ok_or_else(|| ReadReferenceError::NotAReference { store: self.names().store.clone(), key: key.clone() })?;
        Ok(Some((value, Version { nonce, e_tag: whole.e_tag, number: whole.version })))
    }

    pub(crate) async fn swap_reference(
        &self,
        key: &Key,
        expected: Option<&Version>,
        value: &Bytes,
    ) -> Result<Version, SwapError> {
        let store = || self.names().store.clone();
        let nonce = Nonce::random();
        let sealed = seal(nonce, value);
        let mut tries = Tries::new(self);
        // An answer was lost: the change may stand, or come to stand yet.
        let mut in_doubt = false;
        // A request, maybe not the whole of it, reached the store or a proxy, which refused it for
        // now.
        let mut heard = false;
        loop {
            let failure = match self.swap_once(key, expected, nonce, &sealed).await {
                Ok(version) => return Ok(version),
                Err(Trouble::Condition | Trouble::Missing) if !in_doubt && !heard => {
                    return Err(SwapError::Conflict { store: store(), key: key.clone() });
                }
                // The own value, most likely; if what was expected still stands, another's attempt
                // was in the way.
                Err(trouble @ (Trouble::Condition | Trouble::Missing)) => {
                    in_doubt = true;
                    self.failure(trouble)
                }
                Err(Trouble::Store(failure)) if failure.is_temporary() || failure.may_have_acted() => failure,
                Err(trouble) if in_doubt => return Err(self.unknown(key, self.failure(trouble))),
                Err(trouble) => return Err(self.failure(trouble).into()),
            };
            in_doubt |= failure.may_have_acted();
            heard |= !matches!(failure, StoreFailure::Unreachable { .. });
            if in_doubt && let Some(version) = self.stands(key, expected, nonce).await? {
                return Ok(version);
            }
            match tries.wait_after(failure).await {
                Ok(()) => {}
                Err(Trouble::Store(failure)) if in_doubt => return Err(self.unknown(key, failure)),
                Err(trouble) => return Err(self.failure(trouble).into()),
            }
        }
    }

    fn unknown(&self, key: &Key, source: StoreFailure) -> SwapError {
        SwapError::Unknown { store: self.names().store.clone(), key: key.clone(), source: Box::new(source) }
    }

    async fn swap_once(
        &self,
        key: &Key,
        expected: Option<&Version>,
        nonce: Nonce,
        sealed: &Bytes,
    ) -> Result<Version, Trouble> {
        let mode = match expected {
            None => PutMode::Create,
            Some(version) => {
                PutMode::Update(UpdateVersion { e_tag: version.e_tag.clone(), version: version.number.clone() })
            }
        };
        let path = self.path(key);
        let request = self.cloud().put_opts(&path, sealed.clone().into(), PutOptions::from(mode));
        let written = self.once(Count::Put, sealed.len(), request).await?;
        Ok(Version { nonce, e_tag: written.e_tag, number: written.version })
    }

    /// After a lost answer: the version if the own value stands, none if what was expected does.
    async fn stands(&self, key: &Key, expected: Option<&Version>, nonce: Nonce) -> Result<Option<Version>, SwapError> {
        let (store, key) = (self.names().store.clone(), key.clone());
        let current = match self.read_reference(&key).await {
            Ok(current) => current.map(|(_, version)| version),
            Err(ReadReferenceError::Store(failure)) => return Err(self.unknown(&key, failure)),
            Err(ReadReferenceError::NotAReference { .. }) => return Err(SwapError::NotAReference { store, key }),
        };
        match (current, expected) {
            (Some(current), _) if current.nonce == nonce => Ok(Some(current)),
            (Some(current), Some(expected)) if current.nonce == expected.nonce => Ok(None),
            (None, None) => Ok(None),
            _ => Err(SwapError::Superseded { store, key }),
        }
    }
}
