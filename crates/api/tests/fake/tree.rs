//! A name tree in memory. It knows one lease, `1f`; watches of `/slow` are silent, all others have
//! three changes, and `/gone` breaks off after its first.

use super::*;
use kip_service::{TreeFile, TreeService};
use kip_types::api::tree::{
    GrantTreeLeaseRequest, MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, TreeChanges,
    WatchTreeRequest, WriteTreeFileRequest,
};
use kip_types::name::Realm;
use kip_types::tree::{NodeKind, NodeStat, TreeChange, TreeChangeKind, TreeLease, TreeLeaseId, TreePath};

/// The tree: nodes with their contents, and the revision.
#[derive(Default)]
pub struct FakeTree(Mutex<(BTreeMap<TreePath, TreeFile>, u64)>);

fn missing(path: &TreePath) -> Refusal {
    Refusal::new(Code::Unknown, format!("{path} is not there: `kip tree ls` shows what is"))
}

fn leased(id: TreeLeaseId) -> Result<TreeLease, Refusal> {
    match id.0 {
        0x1f => Ok(TreeLease { id, ttl_ms: 10_000, left_ms: 9000 }),
        _ => Err(Refusal::new(Code::Unknown, format!("the lease {id} has run out"))),
    }
}

impl FakeTree {
    fn put(&self, path: TreePath, kind: NodeKind, contents: Vec<u8>, lease: Option<TreeLeaseId>) -> NodeStat {
        let mut tree = self.0.lock();
        tree.1 += 1;
        let version = tree.1;
        let created = tree.0.get(&path).map_or(version, |file| file.node.created);
        let node = NodeStat { path: path.clone(), kind, size_bytes: contents.len() as u64, version, created, lease };
        tree.0.insert(path, TreeFile { node: node.clone(), contents });
        node
    }
}

#[async_trait]
impl TreeService for FakeTree {
    async fn stat(&self, realm: Realm, path: TreePath) -> Result<NodeStat, Refusal> {
        if path.split().is_none() {
            let (kind, size_bytes) = (NodeKind::Directory, 0);
            return Ok(NodeStat { path, kind, size_bytes, version: 0, created: 0, lease: None });
        }
        Ok(self.read(realm, path).await?.node)
    }

    async fn list(&self, _: Realm, path: TreePath) -> Result<Vec<NodeStat>, Refusal> {
        let tree = self.0.lock();
        let inside = |file: &&TreeFile| file.node.path.split().is_some_and(|(above, _)| above == path);
        Ok(tree.0.values().filter(inside).map(|file| file.node.clone()).collect())
    }

    async fn read(&self, _: Realm, path: TreePath) -> Result<TreeFile, Refusal> {
        self.0.lock().0.get(&path).cloned().ok_or_else(|| missing(&path))
    }

    async fn write(&self, realm: Realm, request: WriteTreeFileRequest, contents: Vec<u8>) -> Result<NodeStat, Refusal> {
        let there = self.stat(realm, request.path.clone()).await.ok();
        if request.new && there.is_some() {
            return Err(Refusal::new(Code::Taken, format!("{} is there already", request.path)));
        }
        match (request.version, there) {
            (Some(wanted), Some(node)) if node.version != wanted => {
                let line = format!("{} has the version {} by now, not {wanted}", request.path, node.version);
                return Err(Refusal::new(Code::State, line));
            }
            (Some(_), None) => return Err(missing(&request.path)),
            _ => {}
        }
        request.lease.map(leased).transpose()?;
        Ok(self.put(request.path, NodeKind::File, contents, request.lease))
    }

    async fn make_directory(&self, _: Realm, request: MakeTreeDirectoryRequest) -> Result<NodeStat, Refusal> {
        if self.0.lock().0.contains_key(&request.path) {
            return Err(Refusal::new(Code::Taken, format!("{} is there already", request.path)));
        }
        Ok(self.put(request.path, NodeKind::Directory, Vec::new(), None))
    }

    async fn remove(&self, _: Realm, request: RemoveTreeNodeRequest) -> Result<(), Refusal> {
        self.0.lock().0.remove(&request.path).map(drop).ok_or_else(|| missing(&request.path))
    }

    async fn rename(&self, _: Realm, request: RenameTreeNodeRequest) -> Result<NodeStat, Refusal> {
        let file = self.0.lock().0.remove(&request.from).ok_or_else(|| missing(&request.from))?;
        Ok(self.put(request.to, file.node.kind, file.contents, file.node.lease))
    }

    async fn watch(&self, _: Realm, request: WatchTreeRequest) -> Result<Feed<TreeChanges>, Refusal> {
        let from = request.from.unwrap_or(100);
        let (sender, feed) = kip_service::feed();
        tokio::spawn(async move {
            let change =
                |revision, kind| TreeChange { revision, kind, path: request.path.clone(), from: None, node: None };
            let first = TreeChanges { revision: from, changes: Vec::new() };
            let made = TreeChanges { revision: from + 1, changes: vec![change(from + 1, TreeChangeKind::Created)] };
            let two = [TreeChangeKind::Written, TreeChangeKind::Removed].map(|kind| change(from + 9, kind));
            let mut items = vec![Ok(first), Ok(made)];
            match request.path.as_str() {
                "/slow" => items.truncate(1),
                "/gone" => items.push(Err(Refusal::new(Code::State, "changes are not kept any more"))),
                _ => items.push(Ok(TreeChanges { revision: from + 9, changes: two.to_vec() })),
            }
            for item in items {
                if sender.send(item).await.is_err() {
                    return;
                }
            }
            if request.path.as_str() == "/slow" {
                sender.closed().await;
            }
        });
        Ok(feed)
    }

    async fn grant_lease(&self, _: Realm, request: GrantTreeLeaseRequest) -> Result<TreeLease, Refusal> {
        Ok(TreeLease { id: TreeLeaseId(0x1f), ttl_ms: request.ttl_ms, left_ms: request.ttl_ms })
    }

    async fn keep_lease(&self, _: Realm, id: TreeLeaseId) -> Result<TreeLease, Refusal> {
        leased(id)
    }

    async fn revoke_lease(&self, _: Realm, id: TreeLeaseId) -> Result<(), Refusal> {
        leased(id).map(drop)
    }

    async fn leases(&self, _: Realm) -> Result<Vec<TreeLease>, Refusal> {
        Ok(vec![leased(TreeLeaseId(0x1f))?])
    }
}
