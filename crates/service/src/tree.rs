//! The name tree of a realm.

use crate::Feed;
use async_trait::async_trait;
use kip_types::api::Refusal;
use kip_types::api::tree::{
    GrantTreeLeaseRequest, MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, TreeChanges,
    WatchTreeRequest, WriteTreeFileRequest,
};
use kip_types::name::Realm;
use kip_types::tree::{NodeStat, TreeLease, TreeLeaseId, TreePath};

/// A file of the tree with its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeFile {
    /// The file.
    pub node: NodeStat,
    /// Its contents.
    pub contents: Vec<u8>,
}

/// Small files and directories under names. Each call is of one realm, and reaches nothing of
/// another; a change is on disk when it is answered.
///
/// A node that is not there is `Code::Unknown`, one that is in the way `Code::Taken`; a condition
/// that does not hold is `Code::State`, and changes nothing.
#[async_trait]
pub trait TreeService: Send + Sync + 'static {
    /// A node, without its contents.
    async fn stat(&self, realm: Realm, path: TreePath) -> Result<NodeStat, Refusal>;

    /// The nodes of a directory, sorted by name.
    async fn list(&self, realm: Realm, path: TreePath) -> Result<Vec<NodeStat>, Refusal>;

    /// A file with its contents.
    async fn read(&self, realm: Realm, path: TreePath) -> Result<TreeFile, Refusal>;

    /// Makes a file, or gives it other contents. Contents that are too long are `Code::TooLarge`.
    async fn write(&self, realm: Realm, request: WriteTreeFileRequest, contents: Vec<u8>) -> Result<NodeStat, Refusal>;

    /// Makes a directory.
    async fn make_directory(&self, realm: Realm, request: MakeTreeDirectoryRequest) -> Result<NodeStat, Refusal>;

    /// Removes a file or an empty directory.
    async fn remove(&self, realm: Realm, request: RemoveTreeNodeRequest) -> Result<(), Refusal>;

    /// Moves a file, or a directory with all that is in it.
    async fn rename(&self, realm: Realm, request: RenameTreeNodeRequest) -> Result<NodeStat, Refusal>;

    /// Changes as they come: each once, in their order. Changes that are not kept any more are
    /// `Code::State`, at once or as the feed's last item.
    async fn watch(&self, realm: Realm, request: WatchTreeRequest) -> Result<Feed<TreeChanges>, Refusal>;

    /// Makes a lease.
    async fn grant_lease(&self, realm: Realm, request: GrantTreeLeaseRequest) -> Result<TreeLease, Refusal>;

    /// Gives a lease its whole time again. One that has run out is `Code::Unknown`.
    async fn keep_lease(&self, realm: Realm, id: TreeLeaseId) -> Result<TreeLease, Refusal>;

    /// Ends a lease; its files go with it, at once.
    async fn revoke_lease(&self, realm: Realm, id: TreeLeaseId) -> Result<(), Refusal>;

    /// The realm's leases, by their numbers.
    async fn leases(&self, realm: Realm) -> Result<Vec<TreeLease>, Refusal>;
}
