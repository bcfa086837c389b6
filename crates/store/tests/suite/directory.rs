//! What only a directory store can meet: processes that die while they write, full disks, read-only
//! mounts, other files.

use crate::{key, keys, pattern, read, settings, until};
use bytes::Bytes;
use kip_store::{GetError, OpenError, PutError, Settings, Store, StoreFailure, SwapError};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Tells a second run of this program which directory to write to.
const WRITE_IN: &str = "KIP_STORE_WRITE_IN";
/// And where small file systems are mounted for it.
const MOUNTED: &str = "KIP_STORE_MOUNTED";

fn open(dir: &Path) -> Store {
    Store::open(dir.to_str().unwrap(), settings()).unwrap()
}

fn being_written(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path());
    paths.filter(|path| path.to_str().unwrap().contains("#new.")).collect()
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Ended already where the test killed it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_killed_while_it_writes_leaves_no_half_object() {
    const LENGTH: usize = 4 << 20;
    let object = key("object");
    if let Some(dir) = std::env::var_os(WRITE_IN) {
        for byte in (1..=255).cycle() {
            open(Path::new(&dir)).put(&object, vec![byte; LENGTH].into()).await.unwrap();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.put(&object, vec![0; LENGTH].into()).await.unwrap();
    // Most kills come while there is a file being written; a few fall between two.
    let mut rounds = 0;
    while being_written(dir.path()).is_empty() {
        rounds += 1;
        assert!(rounds <= 50, "no kill came in the middle of a write");
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "directory::a_process_that_is_killed_while_it_writes_leaves_no_half_object"])
            .env(WRITE_IN, dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let child = Killed(child);
        until("a file that is being written", || !being_written(dir.path()).is_empty()).await;
        drop(child);
    }
    assert_eq!(keys(&store, None).await, ["object"]);
    let bytes = read(&store, &object).await.unwrap();
    assert_eq!(bytes.len(), LENGTH);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "one write's bytes only");
    store.put(&object, "next".into()).await.unwrap();
    assert_eq!(read(&store, &object).await.unwrap(), "next");
    store.delete(&object).await.unwrap();
    assert_eq!(keys(&store, None).await, Vec::<String>::new());
}

#[tokio::test]
async fn files_that_are_no_objects_are_not_listed() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.put(&key("a/b"), "x".into()).await.unwrap();
    store.swap_reference(&key("a/head"), None, "x".into()).await.unwrap();
    for name in ["a/b#new.0123456789abcdef", "a/with space", "a/umlaut ä"] {
        fs::write(dir.path().join(name), "half").unwrap();
    }
    fs::create_dir_all(dir.path().join("empty/deep")).unwrap();
    std::os::unix::fs::symlink("b", dir.path().join("a/link")).unwrap();
    assert_eq!(keys(&store, None).await, ["a/b", "a/head"]);
}

#[tokio::test]
async fn a_reader_keeps_the_object_it_began_with() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().to_str().unwrap(), Settings { chunk_bytes: 1000, ..settings() }).unwrap();
    let (object, bytes) = (key("object"), pattern(100_000, 1));
    for replace in [true, false] {
        store.put(&object, bytes.clone()).await.unwrap();
        let reading = store.get(&object).await.unwrap();
        if replace {
            store.put(&object, "other".into()).await.unwrap();
        } else {
            store.delete(&object).await.unwrap();
        }
        let got: Vec<Bytes> = futures_util::TryStreamExt::try_collect(reading).await.unwrap();
        assert!(got.concat() == bytes);
        assert_eq!(got.len(), 100);
    }
}

#[tokio::test]
async fn an_object_that_is_cut_short_from_outside_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().to_str().unwrap(), Settings { chunk_bytes: 1000, ..settings() }).unwrap();
    let object = key("object");
    store.put(&object, pattern(100_000, 1)).await.unwrap();
    let reading = store.get(&object).await.unwrap();
    fs::File::options().write(true).open(dir.path().join("object")).unwrap().set_len(50_500).unwrap();
    let error = futures_util::TryStreamExt::try_collect::<Vec<_>>(reading).await.expect_err("cut short");
    assert!(matches!(error, GetError::Changed { .. }), "{error:?}");
}

#[tokio::test]
async fn an_object_cannot_begin_the_key_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.put(&key("a"), "x".into()).await.unwrap();
    store.put(&key("b/c"), "x".into()).await.unwrap();
    for taken in ["a/b", "a/b/c", "b"] {
        let error = store.put(&key(taken), "x".into()).await.expect_err(taken);
        assert!(matches!(error, PutError::Store(StoreFailure::NameTaken { .. })), "{taken}: {error:?}");
        let error = store.put_if_absent(&key(taken), "x".into()).await.expect_err(taken);
        assert!(matches!(error, PutError::Store(StoreFailure::NameTaken { .. })), "{taken}: {error:?}");
        assert!(matches!(store.get(&key(taken)).await, Err(GetError::Missing { .. })), "{taken}");
        assert!(matches!(store.size(&key(taken)).await, Err(GetError::Missing { .. })), "{taken}");
        store.delete(&key(taken)).await.unwrap();
    }
    assert_eq!(keys(&store, None).await, ["a", "b/c"]);
    assert_eq!(keys(&store, Some("a")).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_directory_that_is_not_there_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let gone = dir.path().join("mnt");
    let opened = || Store::open(gone.to_str().unwrap(), settings());
    assert!(matches!(opened(), Err(OpenError::NoDirectory { .. })));
    fs::write(&gone, "a file").unwrap();
    assert!(matches!(opened(), Err(OpenError::Directory { .. })));
    fs::remove_file(&gone).unwrap();
    fs::create_dir(&gone).unwrap();
    let store = opened().unwrap();
    fs::remove_dir(&gone).unwrap();
    let object = key("a/object");
    let gone = |failure: StoreFailure| assert!(matches!(failure, StoreFailure::DirectoryGone { .. }), "{failure:?}");
    gone(store.check().await.unwrap_err());
    gone(store.delete(&object).await.unwrap_err());
    let Err(PutError::Store(failure)) = store.put(&object, "x".into()).await else { panic!("no directory") };
    gone(failure);
    let Err(GetError::Store(failure)) = store.get(&object).await else { panic!("no directory") };
    gone(failure);
    let Err(SwapError::Store(failure)) = store.swap_reference(&object, None, "x".into()).await else {
        panic!("no directory")
    };
    gone(failure);
}

#[tokio::test]
async fn a_lock_that_nobody_lets_go_of_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let hasty = Settings { answer_timeout: Duration::from_millis(50), ..settings() };
    let store = Store::open(dir.path().to_str().unwrap(), hasty).unwrap();
    let lock = fs::File::create(dir.path().join("head#lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let error = store.swap_reference(&key("head"), None, "x".into()).await.expect_err("locked");
    assert!(matches!(&error, SwapError::Store(StoreFailure::Locked { .. })) && error.is_temporary(), "{error:?}");
    fs::write(dir.path().join("head"), "whatever").unwrap();
    let error = store.delete(&key("head")).await.expect_err("locked");
    assert!(matches!(&error, StoreFailure::Locked { .. }) && error.is_temporary(), "{error:?}");
    fs::remove_file(dir.path().join("head")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::Unlock).unwrap();
    store.swap_reference(&key("head"), None, "x".into()).await.unwrap();
}

// promise stores: what dead processes left in a directory is removed, and nothing else; deleting
//   waits for who swaps
// held by: this, `crates/store/tests/suite/directory.rs::a_lock_that_nobody_lets_go_of_is_named`
#[tokio::test]
async fn what_dead_processes_left_is_removed_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.put(&key("a/b"), "x".into()).await.unwrap();
    store.swap_reference(&key("a/head"), None, "x".into()).await.unwrap();
    for name in ["a/b#new.0123456789abcdef", "c#new.1", "a/gone#lock", "#probe.1", "a/not ours"] {
        fs::write(dir.path().join(name), "left").unwrap();
    }
    assert_eq!(store.remove_leftovers(Duration::from_secs(3600)).await.unwrap(), 0);
    assert_eq!(store.remove_leftovers(Duration::ZERO).await.unwrap(), 4);
    let mut left: Vec<_> = [dir.path().to_owned(), dir.path().join("a")]
        .iter()
        .flat_map(|dir| fs::read_dir(dir).unwrap())
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["a", "b", "head", "head#lock", "not ours"]);
}

#[tokio::test]
async fn a_file_that_is_being_written_is_gone_with_its_writer() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let mut writer = store.writer(&key("object"));
    writer.write("half".into()).await.unwrap();
    assert_eq!(being_written(dir.path()).len(), 1);
    drop(writer);
    assert!(being_written(dir.path()).is_empty() && keys(&store, None).await.is_empty());
}

/// In mount and user namespaces of its own, a second run finds a small disk and one that is
/// read-only.
#[tokio::test]
async fn a_full_and_a_read_only_disk_are_named() {
    if let Some(mounted) = std::env::var_os(MOUNTED) {
        return on_the_mounted(Path::new(&mounted)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    for name in ["small", "fixed"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let script = "set -e; mount -t tmpfs -o size=256k none \"$1/small\"; mount -t tmpfs none \"$1/fixed\"; \
        echo x >\"$1/fixed/there\"; mount -o remount,ro \"$1/fixed\"; echo mounted; shift; exec \"$@\"";
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"])
        .arg(dir.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "directory::a_full_and_a_read_only_disk_are_named", "--nocapture"])
        .env(MOUNTED, dir.path())
        .output();
    let text = match &output {
        Ok(output) => String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned(),
        Err(error) => error.to_string(),
    };
    assert!(text.contains("mounted"), "the test needs user namespaces: {}", text.trim());
    assert!(output.unwrap().status.success(), "{text}");
}

async fn on_the_mounted(dir: &Path) {
    let small = open(&dir.join("small"));
    small.put(&key("fits"), vec![1; 1000].into()).await.unwrap();
    let error = small.put(&key("fits"), vec![2; 1 << 20].into()).await.expect_err("a full disk");
    assert!(matches!(&error, PutError::Store(StoreFailure::DiskFull { .. })) && !error.is_temporary(), "{error:?}");
    assert!(read(&small, &key("fits")).await.unwrap().iter().all(|byte| *byte == 1));
    assert!(being_written(&dir.join("small")).is_empty(), "what did not fit is removed");
    let mut writer = small.writer(&key("fits"));
    let error = writer.write(vec![2; 1 << 20].into()).await.expect_err("a full disk");
    assert!(matches!(&error, PutError::Store(StoreFailure::DiskFull { .. })), "{error:?}");
    for error in [writer.write("x".into()).await.expect_err("a gap"), writer.finish().await.expect_err("a gap")] {
        assert!(matches!(error, PutError::Incomplete { .. }), "{error:?}");
    }
    let head = key("head");
    let version = small.swap_reference(&head, None, "x".into()).await.unwrap();
    let error = small.swap_reference(&head, Some(&version), vec![3; 1 << 20].into()).await.expect_err("a full disk");
    assert!(matches!(error, SwapError::Store(StoreFailure::DiskFull { .. })), "{error:?}");
    assert_eq!(small.read_reference(&head).await.unwrap().unwrap().1, version);

    let fixed = open(&dir.join("fixed"));
    assert_eq!(read(&fixed, &key("there")).await.unwrap(), "x\n");
    let read_only = |failure: StoreFailure| assert!(matches!(failure, StoreFailure::ReadOnly { .. }), "{failure:?}");
    let Err(PutError::Store(failure)) = fixed.put(&key("a/b"), "x".into()).await else { panic!("read-only") };
    read_only(failure);
    read_only(fixed.delete(&key("there")).await.expect_err("read-only"));
    let Err(SwapError::Store(failure)) = fixed.swap_reference(&head, None, "x".into()).await else {
        panic!("read-only")
    };
    read_only(failure);
}
