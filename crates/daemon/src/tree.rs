//! The name tree before the API: its file in the data directory, and its errors as refusals.
//!
//! The file is opened when the daemon begins and closed with it. What was answered is on disk. One
//! that cannot be opened keeps no proc from running: what is asked of the tree is refused, and
//! opens it again if that can be.

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
use parking_lot::Mutex;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The file of the metadata store in a data directory.
const FILE: &str = "meta.redb";

/// The trees of all realms of a data directory.
#[derive(Clone)]
pub(crate) struct KeptTree(Arc<TreeOf>);

struct TreeOf {
    path: PathBuf,
    /// None if it could not be opened yet.
    open: Mutex<Option<OpenTree>>,
}

/// A store, and the trees in it.
#[derive(Clone)]
struct OpenTree {
    meta: Arc<EmbeddedMeta>,
    tree: NameTree,
}

impl KeptTree {
    /// Opens the tree of a data directory, or makes an empty one. Blocks.
    pub(crate) fn open(data: &Path) -> KeptTree {
        let tree = KeptTree(Arc::new(TreeOf { path: data.join(FILE), open: Mutex::default() }));
        if let Err(error) = tree.0.open() {
            let error = kip_types::chain(&error);
            tracing::error!(error, "there is no name tree, until its file can be opened");
        }
        tree
    }

    /// Its file, for a backup.
    pub(crate) fn file(&self) -> OwnFile {
        let tree = self.clone();
        let copy = move |to: &Path| tree.0.open().and_then(|open| open.meta.copy(to)).map_err(io::Error::other);
        OwnFile { name: FILE, copy: Arc::new(copy) }
    }

    /// The store that it is in; none if that could not be opened.
    pub(crate) fn meta(&self) -> Option<Arc<dyn Meta>> {
        self.0.open.lock().as_ref().map(|open| Arc::clone(&open.meta) as Arc<dyn Meta>)
    }

    async fn tree(&self) -> Result<NameTree, Refusal> {
        // Another request may be opening it, which takes as long as the disk needs.
        let open = self.0.open.try_lock().and_then(|open| open.clone());
        if let Some(open) = open {
            return Ok(open.tree);
        }
        let of_it = Arc::clone(&self.0);
        let opened = tokio::task::spawn_blocking(move || of_it.open()).await.expect("to open a store does not panic");
        opened.map(|open| open.tree).map_err(|error| refused(error.into()))
    }
}

impl TreeOf {
    /// Opens it if it is not open. Blocks.
    fn open(&self) -> Result<OpenTree, MetaError> {
        let mut open = self.open.lock();
        let opened = match &*open {
            Some(open) => open.clone(),
            None => {
                let kept = KeptHistory {
                    has_values_of: |key| kip_tree::has_past(key) && !kip_spawn::is_spawn_key(key),
                    ..KeptHistory::default()
                };
                let meta = Arc::new(EmbeddedMeta::open(&self.path, kept)?);
                OpenTree { tree: NameTree::new(Arc::clone(&meta) as Arc<dyn Meta>), meta }
            }
        };
        Ok(open.insert(opened).clone())
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
        self.tree().await?.stat(&realm, &path).await.map_err(refused)
    }

    async fn list(&self, realm: Realm, path: TreePath) -> Result<Vec<NodeStat>, Refusal> {
        self.tree().await?.list(&realm, &path).await.map_err(refused)
    }

    async fn read(&self, realm: Realm, path: TreePath) -> Result<TreeFile, Refusal> {
        let (node, contents) = self.tree().await?.read(&realm, &path).await.map_err(refused)?;
        Ok(TreeFile { node, contents })
    }

    async fn write(&self, realm: Realm, request: WriteTreeFileRequest, contents: Vec<u8>) -> Result<NodeStat, Refusal> {
        let expected = match (request.version, request.new) {
            (Some(version), _) => ExpectedNode::Version(version),
            (None, true) => ExpectedNode::Absent,
            (None, false) => ExpectedNode::Any,
        };
        let how = FileWrite { expected, lease: request.lease, fence: request.fence };
        self.tree().await?.write(&realm, &request.path, &contents, &how).await.map_err(refused)
    }

    async fn make_directory(&self, realm: Realm, request: MakeTreeDirectoryRequest) -> Result<NodeStat, Refusal> {
        self.tree().await?.make_directory(&realm, &request.path, request.fence.as_ref()).await.map_err(refused)
    }

    async fn remove(&self, realm: Realm, request: RemoveTreeNodeRequest) -> Result<(), Refusal> {
        self.tree().await?.remove(&realm, &request.path, request.version, request.fence.as_ref()).await.map_err(refused)
    }

    async fn rename(&self, realm: Realm, request: RenameTreeNodeRequest) -> Result<NodeStat, Refusal> {
        let RenameTreeNodeRequest { from, to, replace, fence } = request;
        self.tree().await?.rename(&realm, &from, &to, replace, fence.as_ref()).await.map_err(refused)
    }

    async fn watch(&self, realm: Realm, request: WatchTreeRequest) -> Result<Feed<TreeChanges>, Refusal> {
        let watch = self.tree().await?.watch(&realm, &request.path, request.from, !request.only).await;
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
        self.tree().await?.grant_lease(&realm, Duration::from_millis(request.ttl_ms)).await.map_err(refused)
    }

    async fn keep_lease(&self, realm: Realm, id: TreeLeaseId) -> Result<TreeLease, Refusal> {
        self.tree().await?.keep_lease(&realm, id).await.map_err(refused)
    }

    async fn revoke_lease(&self, realm: Realm, id: TreeLeaseId) -> Result<(), Refusal> {
        self.tree().await?.revoke_lease(&realm, id).await.map_err(refused)
    }

    async fn leases(&self, realm: Realm) -> Result<Vec<TreeLease>, Refusal> {
        self.tree().await?.leases(&realm).await.map_err(refused)
    }
}
