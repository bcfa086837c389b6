//! Leases of a realm. Each has a key, which goes with it: a realm can neither use nor see a lease
//! of another.

use crate::error::TreeError;
use crate::layout;
use crate::tree::NameTree;
use kip_meta::{Condition, KeySet, LeaseId, MetaError, MetaLease, RangeRequest, Transaction};
use kip_types::name::Realm;
use kip_types::tree::{TreeLease, TreeLeaseId};
use std::time::Duration;

fn shown(lease: MetaLease) -> TreeLease {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    TreeLease { id: TreeLeaseId(lease.id.0), ttl_ms: millis(lease.ttl), left_ms: millis(lease.left) }
}

impl NameTree {
    /// Makes a lease; it has at least this time.
    ///
    /// # Errors
    /// [`TreeError::BadLease`].
    pub async fn grant_lease(&self, realm: &Realm, ttl: Duration) -> Result<TreeLease, TreeError> {
        let lease = self.meta.grant(ttl).await.map_err(|error| match error {
            MetaError::Invalid(line) => TreeError::BadLease(line),
            error => error.into(),
        })?;
        let key = layout::lease(realm, TreeLeaseId(lease.id.0));
        let own = Transaction::when(Condition::Absent(KeySet::One(key.clone()))).put_leased(key, "", Some(lease.id));
        self.meta.transact(&own).await?;
        Ok(shown(lease))
    }

    /// Gives a lease its whole time again.
    ///
    /// # Errors
    /// [`TreeError::LeaseGone`].
    pub async fn keep_lease(&self, realm: &Realm, id: TreeLeaseId) -> Result<TreeLease, TreeError> {
        self.check_lease(realm, id).await?;
        Ok(shown(self.meta.keep_alive(LeaseId(id.0)).await?))
    }

    /// Ends a lease; its files go with it, at once.
    ///
    /// # Errors
    /// [`TreeError::LeaseGone`].
    pub async fn revoke_lease(&self, realm: &Realm, id: TreeLeaseId) -> Result<(), TreeError> {
        self.check_lease(realm, id).await?;
        Ok(self.meta.revoke(LeaseId(id.0)).await?)
    }

    /// All leases, by their numbers.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn leases(&self, realm: &Realm) -> Result<Vec<TreeLease>, TreeError> {
        let found = self.meta.range(&RangeRequest::all(layout::leases(realm))).await?;
        let mut leases = Vec::new();
        for id in found.keys.into_iter().filter_map(|kv| kv.lease) {
            match self.meta.lease(id).await {
                Ok(lease) => leases.push(shown(lease)),
                // It has run out meanwhile.
                Err(MetaError::LeaseGone(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        leases.sort_by_key(|lease| lease.id);
        Ok(leases)
    }

    async fn check_lease(&self, realm: &Realm, id: TreeLeaseId) -> Result<(), TreeError> {
        match self.meta.get(&layout::lease(realm, id)).await? {
            Some(_) => Ok(()),
            None => Err(TreeError::LeaseGone(id)),
        }
    }
}
