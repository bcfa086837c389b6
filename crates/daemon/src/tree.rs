//! The name tree before the API: its file in the data directory, and its errors as refusals.
//!
//! The file is opened when the daemon begins and closed with it. What was answered is on disk.

use async_trait::async_trait;
use kip_meta::{EmbeddedMeta, KeptHistory, Meta, MetaError};
use kip_service::{Feed, TreeFile, TreeService};
use kip_tree::{FileWrite, NameTree, TreeError};
use kip_types::api::tree::{
    GrantTreeLeaseRequest, MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, TreeChanges,
    WatchTreeRequest, WriteTreeFileRequest,
};
use kip_types::api::{Code, Refusal};
use kip_types::name::Realm;
use kip_types::tree::{ExpectedNode, NodeStat, TreeLease, TreeLeaseId, TreePath};
use kip_worker::OwnFile;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The file of the metadata store in a data directory.
const FILE: &str = "meta.redb";

/// The trees of all realms of a data directory.
pub(crate) struct KeptTree {
    tree: NameTree,
    meta: Arc<EmbeddedMeta>,
}

impl KeptTree {
    /// Opens the tree of a data directory, or makes an empty one. Blocks.
    pub(crate) fn open(data: &Path) -> Result<KeptTree, MetaError> {
        let meta = Arc::new(EmbeddedMeta::open(&data.join(FILE), KeptHistory::default())?);
        Ok(KeptTree { tree: NameTree::new(Arc::clone(&meta) as Arc<dyn Meta>), meta })
    }

    /// Its file, for a backup.
    pub(crate) fn file(&self) -> OwnFile {
        let meta = Arc::clone(&self.meta);
        let copy = move |to: &Path| meta.copy(to).map_err(io::Error::other);
        OwnFile { name: FILE, copy: Arc::new(copy) }
    }
}

fn refused(error: TreeError) -> Refusal {
    use TreeError as E;
    let code = match &error {
        E::NotFound(_) | E::LeaseGone(_) => Code::Unknown,
        E::Exists(_) => Code::Taken,
        E::TooLarge { .. } => Code::TooLarge,
        E::Root | E::IntoItself { .. } | E::TooDeep(_) | E::BadLease(_) => Code::Invalid,
        E::NotADirectory(_)
        | E::IsADirectory(_)
        | E::NotEmpty(_)
        | E::Stale { .. }
        | E::Fenced { .. }
        | E::Forgotten(_)
        | E::NotYet { .. }
        | E::Contended(_) => Code::State,
        E::Store(MetaError::Storage { .. } | MetaError::Unavailable { .. } | MetaError::Unknown { .. }) => {
            Code::Exhausted
        }
        E::Store(_) => Code::Failed,
    };
    let line = kip_types::chain(&error);
    if let E::Store(_) = error {
        tracing::error!(error = line, "the name tree");
    }
    Refusal::new(code, line)
}

#[async_trait]
impl TreeService for KeptTree {
    async fn stat(&self, realm: Realm, path: TreePath) -> Result<NodeStat, Refusal> {
        self.tree.stat(&realm, &path).await.map_err(refused)
    }

    async fn list(&self, realm: Realm, path: TreePath) -> Result<Vec<NodeStat>, Refusal> {
        self.tree.list(&realm, &path).await.map_err(refused)
    }

    async fn read(&self, realm: Realm, path: TreePath) -> Result<TreeFile, Refusal> {
        let (node, contents) = self.tree.read(&realm, &path).await.map_err(refused)?;
        Ok(TreeFile { node, contents })
    }

    async fn write(&self, realm: Realm, request: WriteTreeFileRequest, contents: Vec<u8>) -> Result<NodeStat, Refusal> {
        let expected = match (request.version, request.new) {
            (Some(version), _) => ExpectedNode::Version(version),
            (None, true) => ExpectedNode::Absent,
            (None, false) => ExpectedNode::Any,
        };
        let how = FileWrite { expected, lease: request.lease, fence: request.fence };
        self.tree.write(&realm, &request.path, &contents, &how).await.map_err(refused)
    }

    async fn make_directory(&self, realm: Realm, request: MakeTreeDirectoryRequest) -> Result<NodeStat, Refusal> {
        self.tree.make_directory(&realm, &request.path, request.fence.as_ref()).await.map_err(refused)
    }

    async fn remove(&self, realm: Realm, request: RemoveTreeNodeRequest) -> Result<(), Refusal> {
        self.tree.remove(&realm, &request.path, request.version, request.fence.as_ref()).await.map_err(refused)
    }

    async fn rename(&self, realm: Realm, request: RenameTreeNodeRequest) -> Result<NodeStat, Refusal> {
        let RenameTreeNodeRequest { from, to, replace, fence } = request;
        self.tree.rename(&realm, &from, &to, replace, fence.as_ref()).await.map_err(refused)
    }

    async fn watch(&self, realm: Realm, request: WatchTreeRequest) -> Result<Feed<TreeChanges>, Refusal> {
        let watch = self.tree.watch(&realm, &request.path, request.from, !request.only).await;
        let mut watch = watch.map_err(refused)?;
        let (sender, feed) = kip_service::feed();
        tokio::spawn(async move {
            let mut item = Ok(TreeChanges { revision: watch.seen(), changes: Vec::new() });
            loop {
                let is_last = item.is_err();
                if sender.send(item).await.is_err() || is_last {
                    return;
                }
                let changes = tokio::select! {
                    changes = watch.next() => changes,
                    () = sender.closed() => return,
                };
                item = match changes {
                    Ok(changes) => Ok(TreeChanges { revision: watch.seen(), changes }),
                    // The daemon ends, and so does the feed.
                    Err(TreeError::Store(MetaError::Closed)) => return,
                    Err(error) => Err(refused(error)),
                };
            }
        });
        Ok(feed)
    }

    async fn grant_lease(&self, realm: Realm, request: GrantTreeLeaseRequest) -> Result<TreeLease, Refusal> {
        self.tree.grant_lease(&realm, Duration::from_millis(request.ttl_ms)).await.map_err(refused)
    }

    async fn keep_lease(&self, realm: Realm, id: TreeLeaseId) -> Result<TreeLease, Refusal> {
        self.tree.keep_lease(&realm, id).await.map_err(refused)
    }

    async fn revoke_lease(&self, realm: Realm, id: TreeLeaseId) -> Result<(), Refusal> {
        self.tree.revoke_lease(&realm, id).await.map_err(refused)
    }

    async fn leases(&self, realm: Realm) -> Result<Vec<TreeLease>, Refusal> {
        self.tree.leases(&realm).await.map_err(refused)
    }
}
