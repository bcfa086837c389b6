//! What each tree does, whichever store it has.

use super::{Grove, LONG, anyhow, check_whole, everything, expecting, fenced, path, realm};
use kip_tree::{NameTree, TreeError};
use kip_types::tree::{ExpectedNode, TreeFence};

pub async fn put(tree: &NameTree, at: &str, contents: &str) -> u64 {
    tree.write(&realm(), &path(at), contents.as_bytes(), &anyhow()).await.unwrap().version
}

pub async fn mkdir(tree: &NameTree, at: &str) {
    tree.make_directory(&realm(), &path(at), None).await.unwrap();
}

pub async fn text(tree: &NameTree, at: &str) -> String {
    String::from_utf8(tree.read(&realm(), &path(at)).await.unwrap().1).unwrap()
}

pub fn line(error: &TreeError) -> String {
    let line = error.to_string();
    assert!(!line.contains('\n') && !line.is_empty(), "{line}");
    line
}

/// Writers, makers and movers at once, with each its own outcome.
pub async fn beside_each_other(grove: &Grove, rounds: usize) {
    let (tree, realm) = (&grove.tree, realm());
    mkdir(tree, "/a").await;
    mkdir(tree, "/a/d").await;
    put(tree, "/count", "0").await;
    let mut tasks = tokio::task::JoinSet::new();
    // A directory goes to and fro while others work in it at either place.
    let (mover, of) = (tree.clone(), realm.clone());
    tasks.spawn(async move {
        for round in 0..rounds {
            let (from, to) = if round % 2 == 0 { ("/a/d", "/d") } else { ("/d", "/a/d") };
            mover.rename(&of, &path(from), &path(to), false, None).await.unwrap();
        }
        0
    });
    for worker in 0..3 {
        let (tree, realm) = (tree.clone(), realm.clone());
        tasks.spawn(async move {
            let mut made = 0;
            for round in 0..rounds {
                let at = path(["/a/d", "/d"][round % 2]);
                let name = at.join(&format!("{worker}-{round}"));
                match tree.write(&realm, &name, b"x", &expecting(ExpectedNode::Absent)).await {
                    Ok(_) => made += 1,
                    Err(TreeError::NotFound(gone)) => assert_eq!(gone, at),
                    Err(error) => panic!("{error}"),
                }
                loop {
                    let (stat, count) = tree.read(&realm, &path("/count")).await.unwrap();
                    let next = String::from_utf8(count).unwrap().parse::<usize>().unwrap() + 1;
                    let how = expecting(ExpectedNode::Version(stat.version));
                    match tree.write(&realm, &path("/count"), next.to_string().as_bytes(), &how).await {
                        Ok(_) => break,
                        Err(TreeError::Stale { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            made
        });
    }
    // A directory is made and removed while others write in it: no file may be left without it.
    let (remover, of) = (tree.clone(), realm.clone());
    tasks.spawn(async move {
        for round in 0..rounds * 2 {
            let made = remover.make_directory(&of, &path("/r"), None).await;
            assert!(matches!(made, Ok(_) | Err(TreeError::Exists(_))));
            if round % 3 == 0 {
                drop(remover.remove(&of, &path("/r/f"), None, None).await);
            }
            match remover.remove(&of, &path("/r"), None, None).await {
                Ok(()) | Err(TreeError::NotEmpty(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        0
    });
    let (writer, of) = (tree.clone(), realm.clone());
    tasks.spawn(async move {
        for _ in 0..rounds * 2 {
            let written = writer.write(&of, &path("/r/f"), b"", &anyhow()).await;
            assert!(matches!(written, Ok(_) | Err(TreeError::NotFound(_))));
        }
        0
    });
    // Two directories go into each other: never both.
    for (one, other) in [("/p", "/q"), ("/q", "/p")] {
        mkdir(tree, one).await;
        let (tree, realm) = (tree.clone(), realm.clone());
        tasks.spawn(async move {
            let inside = path(other).join("in");
            for _ in 0..rounds {
                for (from, to) in [(path(one), inside.clone()), (inside.clone(), path(one))] {
                    match tree.rename(&realm, &from, &to, false, None).await {
                        Ok(_) | Err(TreeError::NotFound(_) | TreeError::Exists(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            0
        });
    }
    let made: usize = tasks.join_all().await.into_iter().sum();
    assert_eq!(text(tree, "/count").await, (3 * rounds).to_string());
    let all = everything(tree, &realm).await;
    let files = all.iter().filter(|(path, contents)| contents.is_some() && path != "/r/f").count();
    assert_eq!(files, made + 1);
    check_whole(grove, &realm).await;
}

pub async fn former_leaders_are_fenced(grove: &Grove) {
    let (tree, realm, at) = (&grove.tree, realm(), path("/leader"));
    mkdir(tree, "/d").await;
    put(tree, "/d/f", "").await;
    let lease = tree.grant_lease(&realm, LONG).await.unwrap().id;
    let old = tree.try_to_lead(&realm, &at, lease, b"one").await.unwrap();
    assert!(matches!(tree.try_to_lead(&realm, &at, lease, b"two").await.unwrap_err(), TreeError::Exists(_)));
    tree.write(&realm, &path("/d/f"), b"led", &fenced(&old.fence)).await.unwrap();
    // What the leader says of itself can change; it leads on.
    tree.write(&realm, &at, b"one, at another address", &fenced(&old.fence)).await.unwrap();
    tree.make_directory(&realm, &path("/d/led"), Some(&old.fence)).await.unwrap();
    tree.revoke_lease(&realm, lease).await.unwrap();
    let fail = async |fence: &TreeFence| {
        for error in [
            tree.write(&realm, &path("/d/f"), b"late", &fenced(fence)).await.unwrap_err(),
            tree.make_directory(&realm, &path("/d/late"), Some(fence)).await.unwrap_err(),
            tree.remove(&realm, &path("/d/f"), None, Some(fence)).await.unwrap_err(),
            tree.rename(&realm, &path("/d/f"), &path("/late"), false, Some(fence)).await.unwrap_err(),
        ] {
            assert!(line(&error).contains(&format!("the epoch {} of {} is over", fence.epoch, fence.path)), "{error}");
        }
    };
    fail(&old.fence).await;
    let next = tree.grant_lease(&realm, LONG).await.unwrap().id;
    let new = tree.try_to_lead(&realm, &at, next, b"two").await.unwrap();
    assert!(new.fence.epoch > old.fence.epoch);
    fail(&old.fence).await;
    fail(&TreeFence { path: path("/d/none/x"), epoch: 1 }).await;
    assert!(matches!(tree.resign(&realm, &old).await.unwrap_err(), TreeError::Fenced { .. }));
    tree.write(&realm, &path("/d/f"), b"led again", &fenced(&new.fence)).await.unwrap();
    tree.resign(&realm, &new).await.unwrap();
    fail(&new.fence).await;
    check_whole(grove, &realm).await;
}
