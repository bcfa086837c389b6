//! The trait of a metadata store.

use crate::error::MetaError;
use crate::keys::{KeySet, KeyValue, LeaseId, Revision};
use crate::transaction::{Transaction, TransactionOutcome};
use crate::watch::MetaWatch;
use async_trait::async_trait;
use std::time::Duration;

/// A lease: time for which keys live on without their owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetaLease {
    /// Its number.
    pub id: LeaseId,
    /// The time that each keep-alive gives it.
    pub ttl: Duration,
    /// The time that is left.
    pub left: Duration,
}

/// Which keys to read, and in which state of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeRequest {
    /// The keys.
    pub keys: KeySet,
    /// At most so many, the first ones; all without.
    pub limit: Option<usize>,
    /// As they were at this revision; as they are without.
    pub at: Option<Revision>,
}

impl RangeRequest {
    /// All of `keys` as they are.
    pub fn all(keys: KeySet) -> RangeRequest {
        RangeRequest { keys, limit: None, at: None }
    }

    /// At most `limit` of them.
    #[must_use]
    pub fn limit(self, limit: usize) -> RangeRequest {
        RangeRequest { limit: Some(limit), ..self }
    }

    /// As they were at `revision`.
    #[must_use]
    pub fn at(self, revision: Revision) -> RangeRequest {
        RangeRequest { at: Some(revision), ..self }
    }
}

/// What was read, all of it from one state of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeFound {
    /// The newest revision of the store when it was read.
    pub revision: Revision,
    /// Keys in their order.
    pub keys: Vec<KeyValue>,
    /// Whether a limit left out further keys.
    pub more: bool,
}

/// A metadata store. All that is read is as new as the last answered write.
#[async_trait]
pub trait Meta: Send + Sync {
    /// Reads keys.
    ///
    /// # Errors
    /// [`MetaError::Compacted`] and [`MetaError::Future`] for a state that is not there;
    /// [`MetaError::Unavailable`].
    async fn range(&self, request: &RangeRequest) -> Result<RangeFound, MetaError>;

    /// Reads one key.
    ///
    /// # Errors
    /// As those of [`Meta::range`].
    async fn get(&self, key: &[u8]) -> Result<Option<KeyValue>, MetaError> {
        let found = self.range(&RangeRequest::all(KeySet::one(key)).limit(1)).await?;
        Ok(found.keys.into_iter().next())
    }

    /// Makes all changes of a transaction if all its conditions hold, and none otherwise.
    ///
    /// # Errors
    /// [`MetaError::Invalid`] and [`MetaError::LeaseGone`]: nothing was changed.
    /// [`MetaError::Unavailable`]: nothing was changed.
    /// [`MetaError::Unknown`]: the changes may have been made, or may still be made:
    /// [`OutcomeTicket::find_out`](crate::OutcomeTicket::find_out) tells.
    async fn transact(&self, transaction: &Transaction) -> Result<TransactionOutcome, MetaError>;

    /// Changes to `keys` in the revision `from` and all later ones: in their order, none lost,
    /// none twice.
    ///
    /// # Errors
    /// [`MetaError::Unavailable`]. That changes are not kept any more is said by the watch.
    async fn watch(&self, keys: KeySet, from: Revision) -> Result<MetaWatch, MetaError>;

    /// Makes a lease. The store may give more time than `ttl`, at least a second.
    ///
    /// # Errors
    /// [`MetaError::Invalid`] for no time at all or more than [`LONGEST_TTL`];
    /// [`MetaError::Unavailable`]; [`MetaError::Unknown`]: a lease that was made goes by itself.
    async fn grant(&self, ttl: Duration) -> Result<MetaLease, MetaError>;

    /// Gives a lease its whole time again.
    ///
    /// # Errors
    /// [`MetaError::LeaseGone`], [`MetaError::Unavailable`], [`MetaError::Unknown`]. After the last
    /// two it can be asked again.
    async fn keep_alive(&self, lease: LeaseId) -> Result<MetaLease, MetaError>;

    /// The time that a lease has left.
    ///
    /// # Errors
    /// [`MetaError::LeaseGone`], [`MetaError::Unavailable`].
    async fn lease(&self, lease: LeaseId) -> Result<MetaLease, MetaError>;

    /// Ends a lease. Its keys go with it, in one revision.
    ///
    /// # Errors
    /// [`MetaError::LeaseGone`], [`MetaError::Unavailable`], [`MetaError::Unknown`].
    async fn revoke(&self, lease: LeaseId) -> Result<(), MetaError>;
}

/// The most time a lease can have.
pub const LONGEST_TTL: Duration = Duration::from_secs(365 * 24 * 3600);

/// Refuses a time that no lease can have; rounds it up to whole seconds, which is what etcd counts
/// in.
pub(crate) fn whole_ttl(ttl: Duration) -> Result<Duration, MetaError> {
    if ttl.is_zero() || ttl > LONGEST_TTL {
        let most = LONGEST_TTL.as_secs();
        return Err(MetaError::Invalid(format!("a lease of {ttl:?} is not possible: give it 1 to {most} seconds")));
    }
    Ok(Duration::from_secs(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)))
}
