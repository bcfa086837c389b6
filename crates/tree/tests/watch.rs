//! Watches of the tree: paths of changes, moves, where a watch begins and goes on; and random
//! changes, which leave what a model of them has and of which a watch tells the same.

mod grove;

use grove::{LONG, SOON, anyhow, check_whole, everything, grove, grove_with, kept, leased, path, realm};
use kip_meta::KeptHistory;
use kip_tree::{NameTree, TreeError, TreeWatch};
use kip_types::tree::{TreeChange, TreeChangeKind, TreePath};
use proptest::prelude::*;
use std::collections::BTreeMap;

async fn put(tree: &NameTree, at: &str, contents: &str) -> u64 {
    tree.write(&realm(), &path(at), contents.as_bytes(), &grove::anyhow()).await.unwrap().version
}

async fn mkdir(tree: &NameTree, at: &str) {
    tree.make_directory(&realm(), &path(at), None).await.unwrap();
}

async fn next(watch: &mut TreeWatch) -> Vec<TreeChange> {
    tokio::time::timeout(SOON, watch.next()).await.expect("the next change comes soon").unwrap()
}

/// A change in short: what, where, and from where.
fn short(change: &TreeChange) -> String {
    let from = change.from.as_ref().map(|from| format!(" from {from}")).unwrap_or_default();
    format!("{:?} {}{from}", change.kind, change.path)
}

async fn shorts(watch: &mut TreeWatch, count: usize) -> Vec<String> {
    let mut all = Vec::new();
    while all.len() < count {
        let mut of_one: Vec<String> = next(watch).await.iter().map(short).collect();
        of_one.sort();
        all.extend(of_one);
    }
    all
}

// promise tree: a watch of a subtree tells what was made, written, moved and removed, by path, in
//   order
#[tokio::test]
async fn a_subtree_is_watched() {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    mkdir(tree, "/w").await;
    mkdir(tree, "/elsewhere").await;
    let mut watch = tree.watch(&realm, &path("/w"), None, true).await.unwrap();
    mkdir(tree, "/w/d").await;
    put(tree, "/elsewhere/x", "").await;
    let version = put(tree, "/w/d/f", "1").await;
    put(tree, "/w/d/f", "2").await;
    tree.rename(&realm, &path("/w/d"), &path("/w/e"), false, None).await.unwrap();
    put(tree, "/w/e/f", "3").await;
    tree.rename(&realm, &path("/elsewhere/x"), &path("/w/x"), false, None).await.unwrap();
    tree.rename(&realm, &path("/w/e"), &path("/elsewhere/e"), false, None).await.unwrap();
    put(tree, "/elsewhere/e/f", "not seen").await;
    tree.remove(&realm, &path("/w/x"), None, None).await.unwrap();
    tree.rename(&realm, &path("/w"), &path("/v"), false, None).await.unwrap();
    let expected = [
        "Created /w/d",
        "Created /w/d/f",
        "Written /w/d/f",
        "Moved /w/e from /w/d",
        "Written /w/e/f",
        "Moved /w/x from /elsewhere/x",
        "Moved /elsewhere/e from /w/e",
        "Removed /w/x",
        "Moved /v from /w",
    ];
    assert_eq!(shorts(&mut watch, expected.len()).await, expected);
    // Another watch goes on after any of these revisions, with paths as they were then.
    let mut again = tree.watch(&realm, &path("/w"), Some(version), true).await.unwrap();
    assert_eq!(shorts(&mut again, 7).await, expected[2..]);
    assert_eq!(again.seen(), watch.seen());
}

// promise tree: a watch of one node tells of that alone, before it is there, and when a directory
//   above it moves
#[tokio::test]
async fn a_node_is_watched() {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    let mut watch = tree.watch(&realm, &path("/d/f"), None, false).await.unwrap();
    mkdir(tree, "/d").await;
    put(tree, "/d/g", "").await;
    put(tree, "/d/f", "").await;
    mkdir(tree, "/d/f-not").await;
    tree.rename(&realm, &path("/d"), &path("/e"), false, None).await.unwrap();
    assert_eq!(shorts(&mut watch, 2).await, ["Created /d/f", "Moved /e from /d"]);
}

// promise tree: files that go with a lease are told in one revision
#[tokio::test]
async fn the_end_of_a_lease_is_watched() {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    let lease = tree.grant_lease(&realm, LONG).await.unwrap().id;
    for at in ["/a", "/b"] {
        tree.write(&realm, &path(at), b"", &leased(lease)).await.unwrap();
    }
    let mut watch = tree.watch(&realm, &TreePath::root(), None, true).await.unwrap();
    tree.revoke_lease(&realm, lease).await.unwrap();
    let mut gone: Vec<String> = next(&mut watch).await.iter().map(short).collect();
    gone.sort();
    assert_eq!(gone, ["Removed /a", "Removed /b"]);
}

// promise tree: all watches of a realm know one list of its directories; each misses nothing, from
//   wherever it begins and however slow it is
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_watches_miss_nothing() {
    const WRITES: u64 = 600;
    let grove = grove();
    let (tree, root) = (&grove.tree, TreePath::root());
    mkdir(tree, "/d").await;
    let begin = put(tree, "/d/f", "").await;
    let mut slow = tree.watch(&realm(), &root, None, true).await.unwrap();
    let mut watches = tokio::task::JoinSet::new();
    for number in 0..WRITES {
        let version = put(tree, "/d/f", &number.to_string()).await;
        if number % 60 == 0 {
            // From the beginning, from somewhere, and from now on.
            for after in [Some(begin), Some(version - number / 2), None] {
                let (tree, root) = (tree.clone(), root.clone());
                let mut watch = tree.watch(&realm(), &root, after, true).await.unwrap();
                watches.spawn(async move {
                    let mut expected = after.unwrap_or(version) + 1;
                    while expected <= begin + WRITES {
                        let changes = next(&mut watch).await;
                        assert_eq!(
                            (changes.len(), changes[0].revision, short(&changes[0]).as_str()),
                            (1, expected, "Written /d/f")
                        );
                        expected += 1;
                    }
                });
            }
        }
    }
    while let Some(done) = watches.join_next().await {
        done.unwrap();
    }
    for revision in begin + 1..=begin + WRITES {
        assert_eq!(next(&mut slow).await[0].revision, revision);
    }
}

// promise tree: a watch that would begin before what is kept is refused in one clear line
#[tokio::test]
async fn what_is_forgotten_is_refused() {
    let grove = grove_with(KeptHistory { revisions: 10, ..kept() });
    let first = put(&grove.tree, "/f", "0").await;
    for n in 1..20 {
        put(&grove.tree, "/f", &n.to_string()).await;
    }
    let error = grove.tree.watch(&realm(), &path("/f"), Some(first), false).await.err().unwrap();
    assert!(matches!(error, TreeError::Forgotten(_)), "{error}");
    assert!(error.to_string().contains("read all again") && !error.to_string().contains('\n'));
}

// promise tree: what large files had in them takes no room of the changes that a watch needs
#[tokio::test]
async fn large_files_make_no_watch_miss_a_change() {
    let (room, large) = (1 << 20, vec![b'x'; 256 << 10]);
    let grove = grove_with(KeptHistory { bytes: room, ..kept() });
    let first = put(&grove.tree, "/f", "0").await;
    for _ in 0..3 * room as usize / large.len() {
        grove.tree.write(&realm(), &path("/large"), &large, &anyhow()).await.unwrap();
    }
    let mut watch = grove.tree.watch(&realm(), &TreePath::root(), Some(first), true).await.unwrap();
    assert_eq!(next(&mut watch).await.iter().map(short).collect::<Vec<_>>(), ["Created /large"]);
    assert_eq!(grove.tree.read(&realm(), &path("/large")).await.unwrap().1, large);
}

#[derive(Debug, Clone)]
enum Step {
    Write(usize, u8),
    MakeDirectory(usize),
    Remove(usize),
    Rename(usize, usize, bool),
}

/// Few enough that they meet.
const PATHS: [&str; 9] = ["/a", "/b", "/a/a", "/a/b", "/b/a", "/a/a/a", "/a/b/a", "/b/a/a", "/a/a/a/a"];

fn step() -> impl Strategy<Value = Step> {
    let at = || 0..PATHS.len();
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(at, byte)| Step::Write(at, byte)),
        4 => at().prop_map(Step::MakeDirectory),
        2 => at().prop_map(Step::Remove),
        4 => (at(), at(), any::<bool>()).prop_map(|(from, to, replace)| Step::Rename(from, to, replace)),
    ]
}

/// Contents by path; none for directories.
type Model = BTreeMap<String, Option<Vec<u8>>>;

fn is_directory(model: &Model, at: &TreePath) -> bool {
    at.split().is_none() || model.get(at.as_str()).is_some_and(Option::is_none)
}

/// What is at a path or below it, there no more.
fn cut(model: &mut Model, at: &TreePath) -> Model {
    let below = |text: &String| path(text).is_within(at);
    let gone: Model = model.iter().filter(|(text, _)| below(text)).map(|(k, v)| (k.clone(), v.clone())).collect();
    model.retain(|text, _| !below(text));
    gone
}

fn graft(model: &mut Model, branch: Model, from: &TreePath, to: &TreePath) {
    model.extend(branch.into_iter().map(|(text, contents)| (text.replacen(from.as_str(), to.as_str(), 1), contents)));
}

/// Does a step in the model. False if it cannot be done.
fn apply(model: &mut Model, step: &Step) -> bool {
    let parent_is_there =
        |model: &Model, at: &TreePath| is_directory(model, &at.split().expect("it is not the root").0);
    match step {
        Step::Write(at, byte) => {
            let at = path(PATHS[*at]);
            let possible = parent_is_there(model, &at) && !is_directory(model, &at);
            if possible {
                model.insert(at.to_string(), Some(vec![*byte]));
            }
            possible
        }
        Step::MakeDirectory(at) => {
            let at = path(PATHS[*at]);
            let possible = parent_is_there(model, &at) && !model.contains_key(at.as_str());
            if possible {
                model.insert(at.to_string(), None);
            }
            possible
        }
        Step::Remove(at) => {
            let at = path(PATHS[*at]);
            let inside = model.keys().filter(|text| path(text).is_within(&at)).count();
            if inside == 1 {
                model.remove(at.as_str());
            }
            inside == 1
        }
        Step::Rename(from, to, replace) => {
            let (from, to) = (path(PATHS[*from]), path(PATHS[*to]));
            if !model.contains_key(from.as_str()) {
                return false;
            }
            if from == to {
                return true;
            }
            let free = match model.get(to.as_str()) {
                None => true,
                Some(old) => *replace && old.is_some() && !is_directory(model, &from),
            };
            let possible = free && parent_is_there(model, &to) && !to.is_within(&from);
            if possible {
                cut(model, &to);
                let branch = cut(model, &from);
                graft(model, branch, &from, &to);
            }
            possible
        }
    }
}

async fn carry_out(tree: &NameTree, step: &Step) -> bool {
    let realm = realm();
    match step {
        Step::Write(at, byte) => tree.write(&realm, &path(PATHS[*at]), &[*byte], &grove::anyhow()).await.is_ok(),
        Step::MakeDirectory(at) => tree.make_directory(&realm, &path(PATHS[*at]), None).await.is_ok(),
        Step::Remove(at) => tree.remove(&realm, &path(PATHS[*at]), None, None).await.is_ok(),
        Step::Rename(from, to, replace) => {
            tree.rename(&realm, &path(PATHS[*from]), &path(PATHS[*to]), *replace, None).await.is_ok()
        }
    }
}

/// Follows changes: which paths there are, and the version of each.
fn follow(known: &mut BTreeMap<String, u64>, change: &TreeChange) {
    let below = |text: &String, at: &TreePath| path(text).is_within(at);
    match change.kind {
        TreeChangeKind::Removed => {
            assert!(known.remove(change.path.as_str()).is_some(), "{change:?}");
        }
        TreeChangeKind::Created => {
            assert!(known.insert(change.path.to_string(), change.revision).is_none(), "{change:?}");
        }
        TreeChangeKind::Written => {
            assert!(known.insert(change.path.to_string(), change.revision).is_some(), "{change:?}");
        }
        TreeChangeKind::Moved => {
            let from = change.from.as_ref().expect("a move has an origin");
            let branch: Vec<String> = known.keys().filter(|text| below(text, from)).cloned().collect();
            assert!(!branch.is_empty(), "{change:?}");
            let versions: Vec<(String, u64)> =
                branch.into_iter().map(|text| (text.clone(), known.remove(&text).expect("it is known"))).collect();
            for (text, version) in versions {
                known.insert(text.replacen(from.as_str(), change.path.as_str(), 1), version);
            }
            known.insert(change.path.to_string(), change.revision);
        }
    }
}

async fn run(steps: Vec<Step>) {
    let grove = grove();
    let (tree, realm) = (&grove.tree, realm());
    let mut watch = tree.watch(&realm, &TreePath::root(), None, true).await.unwrap();
    let mut model = Model::new();
    for step in &steps {
        let possible = apply(&mut model, step);
        assert_eq!(carry_out(tree, step).await, possible, "{step:?}");
    }
    let shown: Model = everything(tree, &realm).await.into_iter().collect();
    assert_eq!(shown, model);
    check_whole(&grove, &realm).await;
    // The last change of all.
    let end = put(tree, "/end", "").await;
    let mut known = BTreeMap::new();
    while watch.seen() < end {
        next(&mut watch).await.iter().for_each(|change| follow(&mut known, change));
    }
    known.remove("/end");
    let mut there = BTreeMap::new();
    for text in model.keys() {
        there.insert(text.clone(), tree.stat(&realm, &path(text)).await.unwrap().version);
    }
    assert_eq!(known, there);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    // promise tree: random changes leave what a model of them has, and a watch tells the same
    #[test]
    fn random_changes_match_a_model(steps in proptest::collection::vec(step(), 1..40)) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run(steps));
    }
}
