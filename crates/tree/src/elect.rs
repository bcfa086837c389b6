//! Leaders: the owner of the lease of a node that all candidates want to make.
//!
//! A lease alone does not exclude: a leader can be late and not know yet that it leads no more. So
//! what it writes has the fence of its leadership, and fails once the node is another one's.

use crate::error::TreeError;
use crate::tree::{FileWrite, NameTree};
use kip_types::name::Realm;
use kip_types::tree::{ExpectedNode, NodeStat, TreeFence, TreeLeaseId, TreePath};
use std::time::Duration;

/// How often a candidate looks whether its own lease is still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// That a candidate leads, for as long as its lease lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leadership {
    /// What each write of the leader must have.
    pub fence: TreeFence,
    /// The node.
    pub node: NodeStat,
}

impl NameTree {
    /// Leads if no candidate does: makes the file at `path` with this lease. `contents` tell others
    /// where the leader is.
    ///
    /// # Errors
    /// [`TreeError::Exists`] if another leads, and those of [`NameTree::write`].
    pub async fn try_to_lead(
        &self,
        realm: &Realm,
        path: &TreePath,
        lease: TreeLeaseId,
        contents: &[u8],
    ) -> Result<Leadership, TreeError> {
        let how = FileWrite { expected: ExpectedNode::Absent, lease: Some(lease), fence: None };
        let node = self.write(realm, path, contents, &how).await?;
        Ok(Leadership { fence: TreeFence { path: path.clone(), epoch: node.created }, node })
    }

    /// Waits until it leads.
    ///
    /// # Errors
    /// [`TreeError::LeaseGone`], and those of [`NameTree::write`] and [`NameTree::watch`].
    pub async fn lead(
        &self,
        realm: &Realm,
        path: &TreePath,
        lease: TreeLeaseId,
        contents: &[u8],
    ) -> Result<Leadership, TreeError> {
        loop {
            // From before the attempt: a leader that goes after it is seen.
            let mut watch = self.watch(realm, path, None, false).await?;
            match self.try_to_lead(realm, path, lease, contents).await {
                Err(TreeError::Exists(_)) => {}
                done => return done,
            }
            loop {
                tokio::select! {
                    changes = watch.next() => {
                        changes?;
                        break;
                    }
                    () = tokio::time::sleep(LOOK_EVERY) => {
                        if !self.leases(realm).await?.iter().any(|own| own.id == lease) {
                            return Err(TreeError::LeaseGone(lease));
                        }
                    }
                }
            }
        }
    }

    /// Leads no more. Another candidate does at once.
    ///
    /// # Errors
    /// [`TreeError::Fenced`] if it did not lead any more.
    pub async fn resign(&self, realm: &Realm, leadership: &Leadership) -> Result<(), TreeError> {
        let fence = &leadership.fence;
        self.remove(realm, &fence.path, None, Some(fence)).await
    }
}
