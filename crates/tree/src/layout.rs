//! Keys and entries in the store.
//!
//! ```text
//!  tree/REALM/n/e/DIRECTORY/NAME   an entry: what the node is, and its id
//!  tree/REALM/n/d/ID               where the directory with this id is: its parent and its name
//!  tree/REALM/c/ID                 contents, never changed: a write makes new ones
//!  tree/REALM/l/LEASE              a lease of the realm, which goes with it
//! ```
//!
//! What is watched lies together and is small.

use kip_meta::{KeySet, KeyValue, LeaseId, MetaError};
use kip_types::name::Realm;
use kip_types::tree::{NodeKind, NodeStat, TreeLeaseId, TreePath};
use prost::Message;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt::Write as _;

/// The id of the root, which has no entry.
pub(crate) const ROOT: &str = "root";

/// What is kept of a node under its name.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct NodeEntry {
    /// A directory if true.
    #[prost(bool, tag = "1")]
    pub(crate) is_directory: bool,
    /// Of a directory its own, for as long as it is there; of a file that of its contents.
    #[prost(string, tag = "2")]
    pub(crate) id: String,
    #[prost(uint64, tag = "3")]
    pub(crate) size_bytes: u64,
}

/// Where a directory is.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub(crate) struct DirectoryPlace {
    #[prost(string, tag = "1")]
    pub(crate) parent: String,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
}

/// A node that was found.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) entry: NodeEntry,
    pub(crate) modified: u64,
    pub(crate) created: u64,
    pub(crate) lease: Option<LeaseId>,
}

impl Node {
    pub(crate) fn stat(&self, path: TreePath) -> NodeStat {
        let kind = if self.entry.is_directory { NodeKind::Directory } else { NodeKind::File };
        NodeStat {
            path,
            kind,
            size_bytes: self.entry.size_bytes,
            version: self.modified,
            created: self.created,
            lease: self.lease.map(|lease| TreeLeaseId(lease.0)),
        }
    }
}

/// Reads an entry of the store.
pub(crate) fn node(kv: &KeyValue) -> Result<Node, MetaError> {
    Ok(Node { entry: decode(&kv.value)?, modified: kv.modified, created: kv.created, lease: kv.lease })
}

/// Reads bytes that this module wrote.
pub(crate) fn decode<T: Message + Default>(bytes: &[u8]) -> Result<T, MetaError> {
    T::decode(bytes).map_err(|e| MetaError::Invalid(format!("an entry of the tree cannot be read: {e}")))
}

/// A new id.
pub(crate) fn new_id() -> String {
    let mut bytes = [0; 16];
    SystemRandom::new().fill(&mut bytes).expect("the kernel gives random bytes");
    bytes.iter().fold(String::new(), |mut id, byte| {
        write!(id, "{byte:02x}").expect("a string takes all");
        id
    })
}

/// All keys that a watch looks at.
pub(crate) fn watched(realm: &Realm) -> KeySet {
    KeySet::prefix(format!("tree/{realm}/n/"))
}

/// The key of a node in the directory with this id.
pub(crate) fn entry(realm: &Realm, directory: &str, name: &str) -> Vec<u8> {
    format!("tree/{realm}/n/e/{directory}/{name}").into_bytes()
}

/// The keys of all nodes of a directory.
pub(crate) fn entries(realm: &Realm, directory: &str) -> KeySet {
    KeySet::Prefix(entry(realm, directory, ""))
}

/// The key that says where a directory is.
pub(crate) fn place(realm: &Realm, id: &str) -> Vec<u8> {
    format!("tree/{realm}/n/d/{id}").into_bytes()
}

/// Those of all directories.
pub(crate) fn places(realm: &Realm) -> KeySet {
    KeySet::Prefix(place(realm, ""))
}

/// The key of contents.
pub(crate) fn contents(realm: &Realm, id: &str) -> Vec<u8> {
    format!("tree/{realm}/c/{id}").into_bytes()
}

/// Whether the past of a key is ever read: that of contents, which are never changed, is not, and
/// would take the room of all other changes.
pub fn has_past(key: &[u8]) -> bool {
    let mut parts = key.split(|byte| *byte == b'/');
    parts.next() != Some(b"tree") || parts.nth(1) != Some(b"c")
}

/// The key of a lease.
pub(crate) fn lease(realm: &Realm, id: TreeLeaseId) -> Vec<u8> {
    format!("tree/{realm}/l/{id}").into_bytes()
}

/// Those of all leases.
pub(crate) fn leases(realm: &Realm) -> KeySet {
    KeySet::prefix(format!("tree/{realm}/l/"))
}

/// What a key that is watched is.
pub(crate) enum WatchedKey<'k> {
    /// A node with this name in this directory.
    Entry(&'k str, &'k str),
    /// Where the directory with this id is.
    Place(&'k str),
}

/// Takes a key apart that is watched.
pub(crate) fn watched_key<'k>(realm: &Realm, key: &'k [u8]) -> Option<WatchedKey<'k>> {
    let rest = std::str::from_utf8(key).ok()?.strip_prefix(&format!("tree/{realm}/n/"))?;
    match rest.split_once('/')? {
        ("e", node) => node.split_once('/').map(|(directory, name)| WatchedKey::Entry(directory, name)),
        ("d", id) => Some(WatchedKey::Place(id)),
        _ => None,
    }
}
