//! The tree over the store in one file: each call, each error, moves beside writers, leases, fences
//! and leaders.

mod grove;

use grove::everywhere::{self, line, mkdir, put, text};
use grove::{LONG, SOON, check_whole, everything, expecting, faulty_grove, fenced, grove, leased, path, realm};
use kip_tree::{FileWrite, TreeError};
use kip_types::name::Realm;
use kip_types::tree::{DEEPEST_PATH, ExpectedNode, MOST_FILE_BYTES, NodeKind, TreePath};
use std::time::Duration;

// promise tree: files and directories are made, listed, read, written and removed
#[tokio::test]
async fn files_and_directories() {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    assert_eq!(tree.list(&realm, &TreePath::root()).await.unwrap(), []);
    mkdir(tree, "/d").await;
    let first = put(tree, "/d/f", "one").await;
    put(tree, "/d/e", "").await;
    let stat = tree.stat(&realm, &path("/d/f")).await.unwrap();
    assert_eq!((stat.kind, stat.size_bytes, stat.version, stat.created), (NodeKind::File, 3, first, first));
    let second = put(tree, "/d/f", "longer").await;
    let stat = tree.stat(&realm, &path("/d/f")).await.unwrap();
    assert_eq!((stat.size_bytes, stat.version, stat.created), (6, second, first));
    assert_eq!(text(tree, "/d/f").await, "longer");
    let listed = tree.list(&realm, &path("/d")).await.unwrap();
    assert_eq!(listed.iter().map(|node| node.path.as_str()).collect::<Vec<_>>(), ["/d/e", "/d/f"]);
    assert_eq!(tree.stat(&realm, &TreePath::root()).await.unwrap().kind, NodeKind::Directory);
    for at in ["/d/f", "/d/e", "/d"] {
        tree.remove(&realm, &path(at), None, None).await.unwrap();
    }
    assert_eq!(everything(tree, &realm).await, []);
    check_whole(&grove, &realm).await;
}

// promise tree: each thing that cannot be done is one clear error of its own, and changes nothing
#[tokio::test]
async fn what_cannot_be_done_is_said() {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    mkdir(tree, "/d").await;
    mkdir(tree, "/d/inside").await;
    let version = put(tree, "/f", "x").await;
    let before = everything(tree, &realm).await;
    let write = async |at: &str, how: &FileWrite| tree.write(&realm, &path(at), b"new", how).await.unwrap_err();
    let any = grove::anyhow();
    assert!(matches!(write("/none/f", &any).await, TreeError::NotFound(at) if at == path("/none")));
    assert!(matches!(write("/f/g", &any).await, TreeError::NotADirectory(at) if at == path("/f")));
    assert!(matches!(write("/d", &any).await, TreeError::IsADirectory(_)));
    assert!(matches!(write("/", &any).await, TreeError::Root));
    assert!(matches!(write("/f", &expecting(ExpectedNode::Absent)).await, TreeError::Exists(_)));
    assert!(matches!(write("/g", &expecting(ExpectedNode::Version(1))).await, TreeError::NotFound(_)));
    let stale = write("/f", &expecting(ExpectedNode::Version(version - 1))).await;
    assert!(line(&stale).contains(&format!("version {version} by now, not {}", version - 1)), "{stale}");
    let large = vec![0; MOST_FILE_BYTES + 1];
    let error = tree.write(&realm, &path("/large"), &large, &any).await.unwrap_err();
    assert!(line(&error).contains("1048577 bytes is too large"), "{error}");
    for (at, what) in [("/none", "not there"), ("/f/g", "not a directory"), ("/d", "is a directory"), ("/", "is a dir")]
    {
        let error = tree.read(&realm, &path(at)).await.unwrap_err();
        assert!(line(&error).contains(what), "{at}: {error}");
    }
    assert!(matches!(tree.list(&realm, &path("/f")).await.unwrap_err(), TreeError::NotADirectory(_)));
    assert!(matches!(tree.stat(&realm, &path("/none")).await.unwrap_err(), TreeError::NotFound(_)));
    for (at, what) in [("/f", "already"), ("/d", "already"), ("/", "already"), ("/none/x", "not there")] {
        let error = tree.make_directory(&realm, &path(at), None).await.unwrap_err();
        assert!(line(&error).contains(what), "{at}: {error}");
    }
    for (at, what) in [("/d", "not empty"), ("/none", "not there"), ("/", "neither")] {
        let error = tree.remove(&realm, &path(at), None, None).await.unwrap_err();
        assert!(line(&error).contains(what), "{at}: {error}");
    }
    assert!(matches!(
        tree.remove(&realm, &path("/f"), Some(version + 1), None).await.unwrap_err(),
        TreeError::Stale { .. }
    ));
    let moves = [
        ("/none", "/x", "not there"),
        ("/f", "/d", "already"),
        ("/d", "/f", "already"),
        ("/d", "/d/inside/d", "inside it"),
        ("/", "/x", "neither"),
        ("/f", "/", "neither"),
        ("/f", "/none/f", "not there"),
    ];
    for (from, to, what) in moves {
        for replace in [false, true] {
            let error = tree.rename(&realm, &path(from), &path(to), replace, None).await.unwrap_err();
            assert!(line(&error).contains(what), "{from} {to}: {error}");
        }
    }
    assert_eq!(everything(tree, &realm).await, before);
    // The largest file that is possible.
    tree.write(&realm, &path("/large"), &large[1..], &any).await.unwrap();
    assert_eq!(tree.read(&realm, &path("/large")).await.unwrap().1.len(), MOST_FILE_BYTES);
    check_whole(&grove, &realm).await;
}

// promise tree: a file or a directory with all that is in it is moved at once
#[tokio::test]
async fn moves_take_everything_along() {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    for at in ["/a", "/a/b", "/a/b/c", "/other"] {
        mkdir(tree, at).await;
    }
    put(tree, "/a/b/c/f", "deep").await;
    put(tree, "/old", "old").await;
    put(tree, "/new", "new").await;
    let moved = tree.rename(&realm, &path("/a/b"), &path("/other/x"), false, None).await.unwrap();
    assert_eq!((moved.path.as_str(), moved.kind), ("/other/x", NodeKind::Directory));
    assert_eq!(text(tree, "/other/x/c/f").await, "deep");
    assert!(matches!(tree.stat(&realm, &path("/a/b")).await.unwrap_err(), TreeError::NotFound(_)));
    assert!(matches!(
        tree.rename(&realm, &path("/new"), &path("/old"), false, None).await.unwrap_err(),
        TreeError::Exists(_)
    ));
    tree.rename(&realm, &path("/new"), &path("/old"), true, None).await.unwrap();
    assert_eq!(text(tree, "/old").await, "new");
    let same = tree.stat(&realm, &path("/old")).await.unwrap();
    assert_eq!(tree.rename(&realm, &path("/old"), &path("/old"), false, None).await.unwrap(), same);
    check_whole(&grove, &realm).await;
    // A path can say only so many names.
    let mut deep = TreePath::root();
    for _ in 0..DEEPEST_PATH - 3 {
        deep = deep.join("d");
        tree.make_directory(&realm, &deep, None).await.unwrap();
    }
    let error = tree.rename(&realm, &path("/other"), &deep.join("x"), false, None).await.unwrap_err();
    assert!(line(&error).contains("deeper than 32 names"), "{error}");
    tree.rename(&realm, &path("/other/x/c"), &deep.join("x"), false, None).await.unwrap();
    assert_eq!(text(tree, deep.join("x").join("f").as_str()).await, "deep");
}

// promise tree: nothing is lost and nothing is out of reach when directories move under writers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moves_beside_writers() {
    everywhere::beside_each_other(&grove(), 40).await;
}

// promise tree: the same holds when the connection to the store is lost again and again
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moves_beside_writers_behind_a_bad_connection() {
    everywhere::beside_each_other(&faulty_grove(5), 6).await;
}

// promise tree: of many that make the same node exactly one does
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_makes_it() {
    let grove = grove();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let tree = grove.tree.clone();
        tasks.spawn(async move {
            let made = tree.write(&realm(), &path("/one"), b"", &expecting(ExpectedNode::Absent)).await;
            made.map_err(|error| assert!(matches!(error, TreeError::Exists(_)), "{error}")).is_ok()
        });
    }
    assert_eq!(tasks.join_all().await.into_iter().filter(|made| *made).count(), 1);
}

// promise tree: a file that was written with a lease goes with it, wherever it was moved
#[tokio::test]
async fn files_go_with_their_lease() {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    mkdir(tree, "/d").await;
    let lease = tree.grant_lease(&realm, LONG).await.unwrap();
    assert_eq!(lease.ttl_ms, 600_000);
    for at in ["/d/a", "/b", "/c"] {
        let node = tree.write(&realm, &path(at), b"x", &leased(lease.id)).await.unwrap();
        assert_eq!(node.lease, Some(lease.id));
    }
    tree.rename(&realm, &path("/b"), &path("/d/b"), false, None).await.unwrap();
    // Written anew without a lease it keeps the one it has.
    put(tree, "/d/a", "y").await;
    put(tree, "/plain", "").await;
    assert!(matches!(
        tree.rename(&realm, &path("/plain"), &path("/c"), true, None).await.unwrap_err(),
        TreeError::Exists(_)
    ));
    assert_eq!(tree.leases(&realm).await.unwrap().len(), 1);
    assert!(tree.keep_lease(&realm, lease.id).await.unwrap().left_ms > 590_000);
    tree.revoke_lease(&realm, lease.id).await.unwrap();
    let left: Vec<String> = everything(tree, &realm).await.into_iter().map(|(path, _)| path).collect();
    assert_eq!(left, ["/d", "/plain"]);
    check_whole(&grove, &realm).await;
    for error in [
        tree.write(&realm, &path("/x"), b"", &leased(lease.id)).await.unwrap_err(),
        tree.keep_lease(&realm, lease.id).await.unwrap_err(),
        tree.revoke_lease(&realm, lease.id).await.unwrap_err(),
    ] {
        assert!(line(&error).contains(&format!("lease {} has run out", lease.id)), "{error}");
    }
    assert_eq!(tree.leases(&realm).await.unwrap(), []);
    let error = tree.grant_lease(&realm, Duration::ZERO).await.unwrap_err();
    assert!(line(&error).contains("not possible"), "{error}");
}

// promise tree: a realm sees neither nodes nor leases of another, and cannot use them
#[tokio::test]
async fn realms_are_apart() {
    let grove = grove();
    let (tree, one, other) = (&grove.tree, realm(), "other".parse::<Realm>().unwrap());
    mkdir(tree, "/d").await;
    put(tree, "/d/f", "secret").await;
    let lease = tree.grant_lease(&one, LONG).await.unwrap();
    assert_eq!(everything(tree, &other).await, []);
    assert_eq!(tree.leases(&other).await.unwrap(), []);
    for error in [
        tree.write(&other, &path("/x"), b"", &leased(lease.id)).await.unwrap_err(),
        tree.keep_lease(&other, lease.id).await.unwrap_err(),
        tree.revoke_lease(&other, lease.id).await.unwrap_err(),
    ] {
        assert!(matches!(error, TreeError::LeaseGone(_)), "{error}");
    }
    let mut watch = tree.watch(&other, &TreePath::root(), None, true).await.unwrap();
    put(tree, "/d/g", "").await;
    tree.write(&other, &path("/mine"), b"", &grove::anyhow()).await.unwrap();
    assert_eq!(watch.next().await.unwrap()[0].path, path("/mine"));
}

// promise tree: what a leader of former times writes, makes, moves or removes fails, with its
//   epoch in the error
#[tokio::test]
async fn former_leaders_are_fenced() {
    everywhere::former_leaders_are_fenced(&grove()).await;
}

// promise tree: one candidate leads at a time, and the next one does once the lease of the leader
//   runs out
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaders_follow_each_other() {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    let mut candidates = tokio::task::JoinSet::new();
    for number in 0..3 {
        let (tree, realm) = (tree.clone(), realm.clone());
        candidates.spawn(async move {
            let lease = tree.grant_lease(&realm, Duration::from_secs(3)).await.unwrap().id;
            let keeper = tokio::spawn({
                let (tree, realm) = (tree.clone(), realm.clone());
                async move {
                    while tree.keep_lease(&realm, lease).await.is_ok() {
                        tokio::time::sleep(Duration::from_millis(300)).await;
                    }
                }
            });
            let led = tree.lead(&realm, &path("/leader"), lease, &[number]).await.unwrap();
            tree.write(&realm, &path("/led"), &[number], &fenced(&led.fence)).await.unwrap();
            // It dies: its lease runs out, or is revoked, which is quicker.
            keeper.abort();
            if number == 0 {
                tree.revoke_lease(&realm, lease).await.unwrap();
            }
            led.fence.epoch
        });
    }
    let all = tokio::time::timeout(SOON * 2, candidates.join_all()).await.expect("each leads once");
    let mut epochs = all.clone();
    epochs.sort_unstable();
    epochs.dedup();
    assert_eq!(epochs.len(), 3, "{all:?}");
    // A candidate whose own lease is gone does not wait without end.
    let lead = tree.grant_lease(&realm, LONG).await.unwrap().id;
    tokio::time::timeout(SOON, tree.lead(&realm, &path("/leader"), lead, b"")).await.unwrap().unwrap();
    let lost = tree.grant_lease(&realm, LONG).await.unwrap().id;
    let (waiting, of) = (tree.clone(), realm.clone());
    let waits = tokio::spawn(async move { waiting.lead(&of, &path("/leader"), lost, b"").await });
    tree.revoke_lease(&realm, lost).await.unwrap();
    let error = tokio::time::timeout(SOON, waits).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, TreeError::LeaseGone(_)), "{error}");
}
