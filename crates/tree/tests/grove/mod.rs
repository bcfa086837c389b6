//! Trees of the tests, and what is true of each tree whatever was done to it.

#![allow(dead_code)]

pub mod everywhere;
#[path = "../../../meta/tests/contract/faulty.rs"]
pub mod faulty;

use faulty::Faulty;
use kip_meta::{Certain, EmbeddedMeta, KeptHistory, KeySet, Meta, RangeRequest};
use kip_tree::{FileWrite, NameTree};
use kip_types::name::Realm;
use kip_types::tree::{ExpectedNode, NodeKind, TreeFence, TreeLeaseId, TreePath};
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How long a test waits for what must come.
pub const SOON: Duration = Duration::from_secs(90);
/// Far longer than a test takes.
pub const LONG: Duration = Duration::from_secs(600);

/// A tree in a store of its own.
pub struct Grove {
    pub tree: NameTree,
    /// The store without faults.
    pub meta: Arc<dyn Meta>,
    pub _guard: Box<dyn Any + Send + Sync>,
}

pub fn grove() -> Grove {
    grove_with(kept())
}

/// What a daemon keeps.
pub fn kept() -> KeptHistory {
    KeptHistory { has_values_of: kip_tree::has_past, ..KeptHistory::default() }
}

pub fn grove_with(kept: KeptHistory) -> Grove {
    let dir = tempfile::tempdir().unwrap();
    let meta: Arc<dyn Meta> = Arc::new(EmbeddedMeta::open(&dir.path().join("meta"), kept).unwrap());
    Grove { tree: NameTree::new(Arc::clone(&meta)), meta, _guard: Box::new(dir) }
}

/// The same behind a bad connection.
pub fn faulty_grove(seed: u64) -> Grove {
    let grove = grove();
    let bad = Arc::new(Faulty::by_chance(Arc::clone(&grove.meta), seed));
    Grove { tree: NameTree::new(Arc::new(Certain::new(bad, SOON))), ..grove }
}

pub fn realm() -> Realm {
    Realm::default()
}

pub fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

pub fn anyhow() -> FileWrite {
    FileWrite::default()
}

pub fn expecting(expected: ExpectedNode) -> FileWrite {
    FileWrite { expected, ..FileWrite::default() }
}

pub fn leased(lease: TreeLeaseId) -> FileWrite {
    FileWrite { lease: Some(lease), ..FileWrite::default() }
}

pub fn fenced(fence: &TreeFence) -> FileWrite {
    FileWrite { fence: Some(fence.clone()), ..FileWrite::default() }
}

/// Every file and directory below a directory, with the contents of files.
pub async fn everything(tree: &NameTree, realm: &Realm) -> Vec<(String, Option<Vec<u8>>)> {
    let (mut all, mut waiting) = (Vec::new(), vec![TreePath::root()]);
    while let Some(directory) = waiting.pop() {
        for node in tree.list(realm, &directory).await.unwrap() {
            let contents = match node.kind {
                NodeKind::File => Some(tree.read(realm, &node.path).await.unwrap().1),
                NodeKind::Directory => {
                    waiting.push(node.path.clone());
                    None
                }
            };
            all.push((node.path.to_string(), contents));
        }
    }
    all.sort();
    all
}

/// Nothing of a realm's tree is out of reach: as many entries, places and contents are kept as the
/// tree shows.
pub async fn check_whole(grove: &Grove, realm: &Realm) {
    let calm = NameTree::new(Arc::clone(&grove.meta));
    let shown = everything(&calm, realm).await;
    let files = shown.iter().filter(|(_, contents)| contents.is_some()).count();
    let count = async |part: &str| {
        let keys = KeySet::prefix(format!("tree/{realm}/{part}"));
        grove.meta.range(&RangeRequest::all(keys)).await.unwrap().keys.len()
    };
    assert_eq!(count("n/e/").await, shown.len(), "entries that no path leads to");
    assert_eq!(count("n/d/").await, shown.len() - files, "places of directories that are gone");
    assert_eq!(count("c/").await, files, "contents that no file has");
    let paths: BTreeSet<&String> = shown.iter().map(|(path, _)| path).collect();
    assert_eq!(paths.len(), shown.len(), "a node has two paths");
}
