//! Messages of the API about the name tree: `kip tree`.

use crate::tree::{TreeChange, TreeFence, TreeLeaseId, TreePath};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which node, as the query of what is asked of one.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeNodeRequest {
    /// Path of the node.
    pub path: TreePath,
}

/// `PUT /v1/tree/file`, as its query; the body is the contents. Answered with `NodeStat`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriteTreeFileRequest {
    /// Path of the file.
    pub path: TreePath,
    /// The version that the file must have; any without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// There must be nothing at the path.
    #[serde(default)]
    pub new: bool,
    /// The lease with which the file goes; without one it keeps the lease that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<TreeLeaseId>,
    /// PATH@EPOCH: the node at this path must have this `created`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<TreeFence>,
}

/// `DELETE /v1/tree/node`, as its query.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveTreeNodeRequest {
    /// Path of the file or empty directory.
    pub path: TreePath,
    /// The version that the node must have; any without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// PATH@EPOCH: the node at this path must have this `created`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<TreeFence>,
}

/// `POST /v1/tree/directories`; answered with `NodeStat`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakeTreeDirectoryRequest {
    /// Path of the directory.
    pub path: TreePath,
    /// PATH@EPOCH: the node at this path must have this `created`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<TreeFence>,
}

/// `POST /v1/tree/rename`; answered with `NodeStat`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RenameTreeNodeRequest {
    /// Where the node is.
    pub from: TreePath,
    /// Where it will be.
    pub to: TreePath,
    /// A file may take the place of a file that has no lease.
    #[serde(default)]
    pub replace: bool,
    /// PATH@EPOCH: the node at this path must have this `created`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<TreeFence>,
}

/// `GET /v1/tree/watch`, as its query; answered with `TreeChanges`, one revision per line.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchTreeRequest {
    /// Path of the node, which need not be there yet.
    pub path: TreePath,
    /// Only the node itself, and nothing below it.
    #[serde(default)]
    pub only: bool,
    /// Changes after this revision; without it, changes from now on. A client that reconnects gives
    /// the revision of the last line that it has read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u64>,
}

/// One line of a watch: all changes of one revision. The first line has none, and tells the
/// revision after which changes come.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TreeChanges {
    /// The revision of the tree.
    pub revision: u64,
    /// What changed, all at once.
    pub changes: Vec<TreeChange>,
}

/// `POST /v1/tree/leases`; answered with `TreeLease`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrantTreeLeaseRequest {
    /// The time that each keep-alive gives the lease, milliseconds; rounded up to whole seconds.
    pub ttl_ms: u64,
}
