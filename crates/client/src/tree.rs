//! The calls of `kip tree`.

use crate::client::{Client, Nothing, parse, with_query};
use crate::connect::collect;
use crate::error::CallError;
use crate::feed::AnswerFeed;
use hyper::Method;
use hyper::body::Bytes;
use hyper::header::ETAG;
use kip_types::api::tree::{
    GrantTreeLeaseRequest, MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, TreeChanges,
    TreeNodeRequest, WatchTreeRequest, WriteTreeFileRequest,
};
use kip_types::tree::{NodeStat, TreeLease, TreeLeaseId, TreePath};

/// A file of the tree as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeFileRead {
    /// Its version.
    pub version: u64,
    /// Its contents.
    pub contents: Bytes,
}

fn of(route: &str, path: &TreePath) -> String {
    with_query(route, &TreeNodeRequest { path: path.clone() })
}

impl Client {
    /// A node of the tree, without its contents.
    pub async fn tree_stat(&self, path: &TreePath) -> Result<NodeStat, CallError> {
        self.get(&of("/v1/tree/node", path)).await
    }

    /// The nodes of a directory of the tree, sorted by name.
    pub async fn tree_list(&self, path: &TreePath) -> Result<Vec<NodeStat>, CallError> {
        self.get(&of("/v1/tree/nodes", path)).await
    }

    /// A file of the tree with its contents.
    pub async fn tree_read(&self, path: &TreePath) -> Result<TreeFileRead, CallError> {
        let sent = self.send(Method::GET, &of("/v1/tree/file", path), Bytes::new()).await?;
        let etag = sent.response.headers().get(ETAG).and_then(|etag| etag.to_str().ok()).unwrap_or_default();
        let version = serde_json::from_str(etag.trim_matches('"')).map_err(CallError::Foreign);
        let contents = collect(sent).await?;
        Ok(TreeFileRead { version: version?, contents })
    }

    /// Makes a file of the tree, or gives it other contents.
    pub async fn tree_write(&self, request: &WriteTreeFileRequest, contents: Vec<u8>) -> Result<NodeStat, CallError> {
        let path = with_query("/v1/tree/file", request);
        parse(&collect(self.send(Method::PUT, &path, contents.into()).await?).await?)
    }

    /// Makes a directory of the tree.
    pub async fn tree_make_directory(&self, request: &MakeTreeDirectoryRequest) -> Result<NodeStat, CallError> {
        self.post("/v1/tree/directories", request).await
    }

    /// Removes a file or an empty directory of the tree.
    pub async fn tree_remove(&self, request: &RemoveTreeNodeRequest) -> Result<(), CallError> {
        collect(self.send(Method::DELETE, &with_query("/v1/tree/node", request), Bytes::new()).await?).await?;
        Ok(())
    }

    /// Moves a node of the tree.
    pub async fn tree_rename(&self, request: &RenameTreeNodeRequest) -> Result<NodeStat, CallError> {
        self.post("/v1/tree/rename", request).await
    }

    /// Changes of the tree as they come; the first item has none.
    pub async fn tree_watch(&self, request: &WatchTreeRequest) -> Result<AnswerFeed<TreeChanges>, CallError> {
        let path = with_query("/v1/tree/watch", request);
        Ok(AnswerFeed::new(self.send(Method::GET, &path, Bytes::new()).await?))
    }

    /// All leases of the tree.
    pub async fn tree_leases(&self) -> Result<Vec<TreeLease>, CallError> {
        self.get("/v1/tree/leases").await
    }

    /// Makes a lease of the tree.
    pub async fn tree_grant_lease(&self, request: &GrantTreeLeaseRequest) -> Result<TreeLease, CallError> {
        self.post("/v1/tree/leases", request).await
    }

    /// Gives a lease of the tree its whole time again.
    pub async fn tree_keep_lease(&self, id: TreeLeaseId) -> Result<TreeLease, CallError> {
        self.post(&format!("/v1/tree/leases/{id}/keep"), &Nothing {}).await
    }

    /// Ends a lease of the tree, and its files.
    pub async fn tree_revoke_lease(&self, id: TreeLeaseId) -> Result<(), CallError> {
        collect(self.send(Method::DELETE, &format!("/v1/tree/leases/{id}"), Bytes::new()).await?).await?;
        Ok(())
    }
}
