//! The name tree of a realm: paths, nodes, changes, and what is asked of it. Nothing here names a
//! machine.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Most bytes of a file in the tree.
pub const MOST_FILE_BYTES: usize = 1 << 20;
/// Longest name of a node, bytes.
pub const LONGEST_NODE_NAME: usize = 255;
/// Most names in a path.
pub const DEEPEST_PATH: usize = 32;

/// Where a node is: `/`, or names that each begin with a slash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^/"))]
pub struct TreePath(String);

/// What no node of a tree can be called.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("path {path:?} is not valid: {what}")]
pub struct BadTreePath {
    path: String,
    what: String,
}

fn fault(name: &str) -> Option<String> {
    if name.is_empty() {
        return Some("a name in it is empty: no slash follows another, none is last".to_owned());
    }
    if name == "." || name == ".." {
        return Some(format!("the name {name:?} has a meaning of its own: write the whole path"));
    }
    if name.len() > LONGEST_NODE_NAME {
        return Some(format!("a name in it has {} bytes: at most {LONGEST_NODE_NAME} are possible", name.len()));
    }
    name.chars().any(char::is_control).then(|| format!("the name {name:?} has a control character"))
}

impl FromStr for TreePath {
    type Err = BadTreePath;

    fn from_str(path: &str) -> Result<TreePath, BadTreePath> {
        let bad = |what: String| BadTreePath { path: path.chars().take(300).collect(), what };
        let Some(names) = path.strip_prefix('/') else {
            return Err(bad("it must begin with a slash".to_owned()));
        };
        if names.is_empty() {
            return Ok(TreePath("/".to_owned()));
        }
        if let Some(what) = names.split('/').find_map(fault) {
            return Err(bad(what));
        }
        let depth = names.split('/').count();
        if depth > DEEPEST_PATH {
            return Err(bad(format!("it has {depth} names: at most {DEEPEST_PATH} are possible")));
        }
        Ok(TreePath(path.to_owned()))
    }
}

impl TryFrom<String> for TreePath {
    type Error = BadTreePath;

    fn try_from(path: String) -> Result<TreePath, BadTreePath> {
        path.parse()
    }
}

impl From<TreePath> for String {
    fn from(path: TreePath) -> String {
        path.0
    }
}

impl fmt::Display for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TreePath {
    /// The directory that has all others.
    pub fn root() -> TreePath {
        TreePath("/".to_owned())
    }

    /// The path's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its names, from the root on; none for the root.
    pub fn names(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.0.split('/').filter(|name| !name.is_empty())
    }

    /// The directory it is in, and its name there; none for the root.
    pub fn split(&self) -> Option<(TreePath, &str)> {
        let (parent, name) = self.0.rsplit_once('/').filter(|(_, name)| !name.is_empty())?;
        Some((TreePath(if parent.is_empty() { "/" } else { parent }.to_owned()), name))
    }

    /// The path of a node in this directory. The name is one of a node: it was checked when that
    /// was made.
    #[must_use]
    pub fn join(&self, name: &str) -> TreePath {
        let slash = if self.0 == "/" { "" } else { "/" };
        TreePath(format!("{}{slash}{name}", self.0))
    }

    /// Whether it is `above`, or below that.
    pub fn is_within(&self, above: &TreePath) -> bool {
        let rest = self.0.strip_prefix(&above.0);
        above.0 == "/" || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

/// The number of a lease: hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = "^[0-9a-f]{1,16}$"))]
pub struct TreeLeaseId(pub u64);

/// What is no number of a lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("lease {0:?} is not valid: give the number that `kip tree lease grant` printed")]
pub struct BadTreeLeaseId(String);

impl FromStr for TreeLeaseId {
    type Err = BadTreeLeaseId;

    fn from_str(text: &str) -> Result<TreeLeaseId, BadTreeLeaseId> {
        let is_digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = u64::from_str_radix(text, 16).ok().filter(|_| is_digits);
        number.map(TreeLeaseId).ok_or_else(|| BadTreeLeaseId(text.chars().take(64).collect()))
    }
}

impl TryFrom<String> for TreeLeaseId {
    type Error = BadTreeLeaseId;

    fn try_from(text: String) -> Result<TreeLeaseId, BadTreeLeaseId> {
        text.parse()
    }
}

impl From<TreeLeaseId> for String {
    fn from(id: TreeLeaseId) -> String {
        id.to_string()
    }
}

impl fmt::Display for TreeLeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// What a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeKind {
    /// It has contents.
    File,
    /// It has nodes.
    Directory,
}

/// A node, without its contents.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct NodeStat {
    /// Where it is.
    pub path: TreePath,
    /// What it is.
    pub kind: NodeKind,
    /// Bytes of its contents; 0 for a directory.
    pub size_bytes: u64,
    /// The revision of the tree at which it was written or moved last. No two states of a path have
    /// the same.
    pub version: u64,
    /// The revision at which its path came to be: an epoch that no other node at this path has.
    pub created: u64,
    /// The lease with which it goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<TreeLeaseId>,
}

/// A condition of writes: the node at this path has been there since this revision. A leader's
/// writes have that of its own node, so that they fail once it leads no more. Its text is
/// `PATH@EPOCH`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = "^/.*@[0-9]+$"))]
pub struct TreeFence {
    /// The node.
    pub path: TreePath,
    /// Its `created`.
    pub epoch: u64,
}

/// What is no fence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("fence {0:?} is not valid: write PATH@EPOCH, with the node's path and its `created`")]
pub struct BadTreeFence(String);

impl FromStr for TreeFence {
    type Err = BadTreeFence;

    fn from_str(text: &str) -> Result<TreeFence, BadTreeFence> {
        let read = || {
            let (path, epoch) = text.rsplit_once('@')?;
            Some(TreeFence { path: path.parse().ok()?, epoch: epoch.parse().ok()? })
        };
        read().ok_or_else(|| BadTreeFence(text.chars().take(300).collect()))
    }
}

impl TryFrom<String> for TreeFence {
    type Error = BadTreeFence;

    fn try_from(text: String) -> Result<TreeFence, BadTreeFence> {
        text.parse()
    }
}

impl From<TreeFence> for String {
    fn from(fence: TreeFence) -> String {
        fence.to_string()
    }
}

impl fmt::Display for TreeFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.path, self.epoch)
    }
}

/// What a write needs to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpectedNode {
    /// Anything, or nothing.
    #[default]
    Any,
    /// Nothing.
    Absent,
    /// The node with this version.
    Version(u64),
}

/// What happened to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TreeChangeKind {
    /// It was made.
    Created,
    /// It has other contents, or another lease.
    Written,
    /// It is gone.
    Removed,
    /// It is elsewhere, with all that is in it.
    Moved,
}

/// A change of a node.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TreeChange {
    /// The revision of the tree. Changes of one revision happened at once.
    pub revision: u64,
    /// What happened.
    pub kind: TreeChangeKind,
    /// Where the node is; where it was, if it is gone.
    pub path: TreePath,
    /// Where it was, if it was moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<TreePath>,
    /// The node; none if it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeStat>,
}

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TreeLease {
    /// Its number.
    pub id: TreeLeaseId,
    /// The time that each keep-alive gives it, milliseconds.
    pub ttl_ms: u64,
    /// The time that is left, milliseconds.
    pub left_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> TreePath {
        text.parse().unwrap()
    }

    // promise tree: a path that is none is one clear line
    #[test]
    fn paths_are_checked() {
        for good in ["/", "/a", "/a/b c", "/…/a.b", "/.../x", &format!("/{}", "n".repeat(LONGEST_NODE_NAME))] {
            assert_eq!(path(good).as_str(), good);
        }
        let deep = "/x".repeat(DEEPEST_PATH + 1);
        let long = format!("/{}", "n".repeat(LONGEST_NODE_NAME + 1));
        let bad = [
            ("", "slash"),
            ("a", "slash"),
            ("//", "empty"),
            ("/a/", "empty"),
            ("/a//b", "empty"),
            ("/a/../b", "\"..\""),
            ("/.", "\".\""),
            ("/a\0", "control"),
            ("/a\nb", "control"),
            (&long, "256 bytes"),
            (&deep, "33 names"),
        ];
        for (text, what) in bad {
            let line = text.parse::<TreePath>().unwrap_err().to_string();
            assert!(line.contains(what) && !line.contains(['\n', '\0']) && line.len() < 700, "{line}");
        }
    }

    #[test]
    fn paths_are_taken_apart() {
        assert_eq!(path("/").split(), None);
        assert_eq!(path("/a").split(), Some((path("/"), "a")));
        assert_eq!(path("/a/b").split(), Some((path("/a"), "b")));
        assert_eq!(path("/").join("a"), path("/a"));
        assert_eq!(path("/a").join("b"), path("/a/b"));
        assert_eq!(path("/a/b").names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(path("/").names().count(), 0);
        for (below, above, is) in [("/a/b", "/a", true), ("/a", "/a", true), ("/ab", "/a", false), ("/a", "/", true)] {
            assert_eq!(path(below).is_within(&path(above)), is, "{below} {above}");
        }
    }

    #[test]
    fn a_fence_is_a_path_and_an_epoch() {
        let fence = TreeFence { path: path("/a@b/c"), epoch: 7 };
        assert_eq!((fence.to_string().parse(), fence.to_string()), (Ok(fence), "/a@b/c@7".to_owned()));
        for bad in ["", "/a", "/a@", "a@1", "/a@-1", "@1"] {
            assert!(bad.parse::<TreeFence>().is_err(), "{bad}");
        }
    }

    #[test]
    fn leases_are_hexadecimal() {
        assert_eq!("1f".parse(), Ok(TreeLeaseId(31)));
        assert_eq!(TreeLeaseId(31).to_string(), "1f");
        for bad in ["", "+1", "g", "1F", "11111111111111111"] {
            assert!(bad.parse::<TreeLeaseId>().is_err(), "{bad}");
        }
    }
}
