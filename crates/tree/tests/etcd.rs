//! The tree over a real etcd: the largest file and the deepest paths, moves beside writers, fences,
//! and a watch that goes on.

mod grove;
#[allow(dead_code, reason = "the tests of the store kill it, too")]
#[path = "../../meta/tests/contract/server.rs"]
mod server;

use grove::everywhere::{self, mkdir, put, text};
use grove::{Grove, SOON, anyhow, check_whole, leased, path, realm};
use kip_meta::{Certain, Meta};
use kip_tree::NameTree;
use kip_types::tree::{DEEPEST_PATH, MOST_FILE_BYTES, TreeChangeKind, TreePath};
use server::EtcdServer;
use std::sync::Arc;
use std::time::Duration;

async fn grove_in_etcd() -> Grove {
    let server = EtcdServer::start().await;
    let meta: Arc<dyn Meta> = Arc::new(server.connect().await);
    let tree = NameTree::new(Arc::new(Certain::new(Arc::clone(&meta), SOON)));
    Grove { tree, meta, _guard: Box::new(server) }
}

// promise tree: over etcd nothing is lost either when directories move under writers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moves_beside_writers() {
    everywhere::beside_each_other(&grove_in_etcd().await, 15).await;
}

// promise tree: over etcd former leaders are fenced, too
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_leaders_are_fenced() {
    everywhere::former_leaders_are_fenced(&grove_in_etcd().await).await;
}

// promise tree: the largest file, the deepest path and a lease that runs out fit into etcd, and a
//   watch tells of them from a revision of the past
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_possible_is_possible_in_etcd() {
    let grove = grove_in_etcd().await;
    let (tree, realm) = (&grove.tree, realm());
    let begin = put(tree, "/begin", "").await;
    let mut deep = TreePath::root();
    for _ in 1..DEEPEST_PATH {
        deep = deep.join(&"n".repeat(255));
        tree.make_directory(&realm, &deep, None).await.unwrap();
    }
    let largest = vec![0x5a; MOST_FILE_BYTES];
    let file = deep.join("f");
    tree.write(&realm, &file, &largest, &anyhow()).await.unwrap();
    assert!(tree.read(&realm, &file).await.unwrap().1 == largest);
    mkdir(tree, "/d").await;
    tree.rename(&realm, &file, &path("/d/f"), false, None).await.unwrap();
    tree.rename(&realm, &path("/d"), &path("/e"), false, None).await.unwrap();
    assert_eq!(text(tree, "/e/f").await.len(), MOST_FILE_BYTES);
    let lease = tree.grant_lease(&realm, Duration::from_secs(4)).await.unwrap();
    let kept = tree.keep_lease(&realm, lease.id).await.unwrap();
    assert!(kept.ttl_ms >= 4000);
    tree.write(&realm, &path("/short"), b"", &leased(lease.id)).await.unwrap();
    let mut watch = tree.watch(&realm, &TreePath::root(), Some(begin), true).await.unwrap();
    let mut all = Vec::new();
    while all.last().is_none_or(|(kind, _)| *kind != TreeChangeKind::Removed) {
        let changes = tokio::time::timeout(SOON, watch.next()).await.expect("the lease runs out soon").unwrap();
        all.extend(changes.into_iter().map(|change| (change.kind, change.path.to_string())));
    }
    let last: Vec<&str> = all[DEEPEST_PATH..].iter().map(|(_, path)| path.as_str()).collect();
    assert_eq!(last, ["/d", "/d/f", "/e", "/short", "/short"]);
    check_whole(&grove, &realm).await;
}
