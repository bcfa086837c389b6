//! The contract with the store in one file, alone and behind a bad connection; what is in the file
//! after a restart.

mod contract;

use contract::faulty::{Fault, Faulty};
use contract::{KEPT, Subject, TTL};
use kip_meta::{
    Certain, Condition, EmbeddedMeta, KeptHistory, KeySet, Meta, MetaError, RangeRequest, Transaction,
    TransactionOutcome,
};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn open(dir: &Path) -> EmbeddedMeta {
    let kept = KeptHistory { revisions: KEPT, ..KeptHistory::default() };
    // The tasks of watches that are gone may have the file for a moment.
    for _ in 0..1000 {
        match EmbeddedMeta::open(&dir.join("meta"), kept) {
            Err(MetaError::InUse { .. }) => std::thread::sleep(Duration::from_millis(5)),
            opened => return opened.unwrap(),
        }
    }
    panic!("the file stays in use");
}

async fn make() -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let meta: Arc<dyn Meta> = Arc::new(open(dir.path()));
    // It forgets by itself.
    Subject { calm: Arc::clone(&meta), meta, ttl: TTL, forget: Box::new(|_| Box::pin(async {})), _guard: Box::new(dir) }
}

async fn make_faulty() -> Subject {
    contract::behind_faults(make().await)
}

mod plain {
    crate::contract!(super::make);
}

mod with_faults {
    crate::contract!(super::make_faulty);
}

fn first_write() -> Transaction {
    Transaction::when(Condition::Absent(KeySet::one("a"))).put("a", "1")
}

// promise meta: behind a bad connection each transaction is made once or not at all, and its
//   caller knows
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_made_twice_behind_a_bad_connection() {
    const WRITES: usize = 20;
    let subject = make().await;
    let faulty = Arc::new(Faulty::by_chance(Arc::clone(&subject.meta), 7));
    let certain = Certain::new(faulty.clone(), Duration::from_secs(120));
    certain.transact(&Transaction::when(Condition::Absent(KeySet::one("log"))).put("log", "")).await.unwrap();
    let mut revisions = Vec::new();
    for _ in 0..WRITES {
        // Made twice, it would count twice: its condition holds each time.
        let kv = subject.meta.get(b"log").await.unwrap().unwrap();
        let longer = [kv.value.as_slice(), b"."].concat();
        let outcome =
            certain.transact(&Transaction::when(Condition::Exists(b"log".to_vec())).put("log", longer)).await.unwrap();
        let TransactionOutcome::Done { revision } = outcome else { panic!("its condition holds") };
        assert_eq!(subject.meta.get(b"log").await.unwrap().unwrap().modified, revision);
        revisions.push(revision);
    }
    let kv = subject.meta.get(b"log").await.unwrap().unwrap();
    assert_eq!((kv.value.len(), kv.version), (WRITES, WRITES as u64 + 1));
    assert!(faulty.faults.load(Ordering::Relaxed) > WRITES / 4);
}

// promise meta: a store that stays away is one clear error
#[tokio::test]
async fn patience_ends() {
    let bad = Arc::new(Faulty::always(make().await.meta, Fault::RequestLost));
    let certain = Certain::new(bad, Duration::from_millis(50));
    assert!(certain.get(b"a").await.unwrap_err().is_unavailable());
    let error = certain.transact(&first_write()).await.unwrap_err();
    assert!(error.is_unknown() || error.is_unavailable(), "{error}");
    assert!(!error.to_string().contains('\n'));
}

// promise meta: values, revisions, history and leases are there again after a restart, leases with
//   the time that was left
#[tokio::test]
async fn a_restart_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let meta = open(dir.path());
    let (long, short) =
        (meta.grant(Duration::from_secs(100)).await.unwrap(), meta.grant(Duration::from_secs(2)).await.unwrap());
    let both = first_write().put_leased("long", "", Some(long.id)).put_leased("short", "", Some(short.id));
    let revision = meta.transact(&both).await.unwrap().done().unwrap();
    drop(meta);
    tokio::time::sleep(Duration::from_millis(2200)).await;
    let meta = open(dir.path());
    let kv = meta.get(b"a").await.unwrap().unwrap();
    assert_eq!((kv.value.as_slice(), kv.modified), (b"1".as_slice(), revision));
    let left = meta.lease(long.id).await.unwrap().left;
    assert!(left < Duration::from_secs(98) && left > Duration::from_secs(10), "{left:?}");
    // The short one ran out while no process had the file; its end is a change as any other.
    let mut watch = meta.watch(KeySet::prefix(""), revision).await.unwrap();
    assert_eq!(watch.next().await.unwrap().changes.len(), 3);
    let gone = watch.next().await.unwrap();
    assert_eq!((gone.revision, gone.changes[0].key.as_slice()), (revision + 1, b"short".as_slice()));
    assert!(matches!(meta.keep_alive(short.id).await.unwrap_err(), MetaError::LeaseGone(_)));
    assert!(meta.get(b"long").await.unwrap().is_some());
    let next = meta.grant(Duration::from_secs(1)).await.unwrap();
    assert!(next.id > short.id, "no number is given twice");
}

// promise meta: a file that another process has, that is damaged or that cannot be made is one
//   clear error
#[tokio::test]
async fn files_that_cannot_be_opened_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta");
    let first = EmbeddedMeta::open(&path, KeptHistory::default()).unwrap();
    let error = EmbeddedMeta::open(&path, KeptHistory::default()).err().unwrap();
    assert!(matches!(error, MetaError::InUse { .. }) && error.to_string().contains(path.to_str().unwrap()), "{error}");
    drop(first);
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    std::fs::write(&path, vec![b'x'; 8192]).unwrap();
    for path in [path, dir.path().join("none/meta")] {
        let error = EmbeddedMeta::open(&path, KeptHistory::default()).err().unwrap();
        assert!(
            matches!(error, MetaError::Open { .. }) && error.to_string().contains(path.to_str().unwrap()),
            "{error}"
        );
    }
}

// promise meta: the past of keys whose values are not kept is refused in one clear line
#[tokio::test]
async fn a_past_without_values_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let kept = KeptHistory { has_values_of: |key| key != b"a", ..KeptHistory::default() };
    let meta = EmbeddedMeta::open(&dir.path().join("meta"), kept).unwrap();
    let before = meta.transact(&first_write().put("b", "1")).await.unwrap().done().unwrap();
    let again = Transaction::when(Condition::Exists(b"a".to_vec())).put("a", "2").put("b", "2");
    meta.transact(&again).await.unwrap().done().unwrap();
    let at = |keys| RangeRequest { keys, limit: None, at: Some(before) };
    let b = meta.range(&at(KeySet::one("b"))).await.unwrap();
    assert_eq!(b.keys[0].value, b"1");
    let error = meta.range(&at(KeySet::prefix(""))).await.unwrap_err();
    assert!(matches!(error, MetaError::Compacted { .. }) && !error.to_string().contains('\n'), "{error}");
    assert_eq!(meta.get(b"a").await.unwrap().unwrap().value, b"2");
    let mut watch = meta.watch(KeySet::one("b"), before + 1).await.unwrap();
    assert_eq!(watch.next().await.unwrap().changes[0].now.as_ref().unwrap().value, b"2");
    let mut watch = meta.watch(KeySet::prefix(""), before + 1).await.unwrap();
    assert!(matches!(watch.next().await, Err(MetaError::Compacted { .. })));
}

// promise meta: the file does not grow without bound, however much is written
#[tokio::test]
async fn the_file_stays_small() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta");
    let meta = Arc::new(
        EmbeddedMeta::open(&path, KeptHistory { revisions: 1000, bytes: 1 << 20, ..KeptHistory::default() }).unwrap(),
    );
    let mut sizes = Vec::new();
    for round in 0..4 {
        let mut writers = tokio::task::JoinSet::new();
        for writer in 0..32 {
            let meta = Arc::clone(&meta);
            writers.spawn(async move {
                for n in 0..16 {
                    let key = format!("key-{writer}");
                    let condition = match meta.get(key.as_bytes()).await.unwrap() {
                        Some(kv) => Condition::Modified(kv.key, kv.modified),
                        None => Condition::Absent(KeySet::one(key.clone())),
                    };
                    let value = vec![u8::try_from(round * 16 + n).unwrap(); 8 << 10];
                    meta.transact(&Transaction::when(condition).put(key, value)).await.unwrap().done().unwrap();
                }
            });
        }
        writers.join_all().await;
        sizes.push(std::fs::metadata(&path).unwrap().len());
    }
    // Each round writes 4 MiB of values; all that is there at once is less than 2 MiB. The file
    // grows in steps of some MiB, as many changes come at once.
    assert!(sizes.iter().all(|size| *size < 16 << 20), "{sizes:?}");
}

/// A file system of its own, which is small.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> SmallDisk {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={size}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(dir.path()).status();
        assert!(mounted.unwrap().success(), "a tmpfs is mounted, for which the test must be root");
        SmallDisk(dir)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: what was in it may be open for a moment.
        drop(Command::new("umount").arg("--lazy").arg(self.0.path()).status());
    }
}

// promise meta: a full disk is one clear error for each write, loses nothing that was answered, and
//   writes go on once there is room
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_survived() {
    let disk = SmallDisk::new("24m");
    let (path, ballast) = (disk.0.path().join("meta"), disk.0.path().join("ballast"));
    let meta =
        EmbeddedMeta::open(&path, KeptHistory { revisions: 1000, bytes: 1 << 20, ..KeptHistory::default() }).unwrap();
    let lease = meta.grant(Duration::from_secs(600)).await.unwrap().id;
    let put = async |key: &str, size: usize| {
        let write = Transaction::when(Condition::Absent(KeySet::one(key))).put_leased(key, vec![7; size], Some(lease));
        meta.transact(&write).await
    };
    put("before", 100).await.unwrap();
    let mut watch = meta.watch(KeySet::prefix(""), 1).await.unwrap();
    let mut filler = std::fs::File::create(&ballast).unwrap();
    while std::io::Write::write_all(&mut filler, &[1; 65536]).is_ok() {}
    let (mut answered, mut failed) = (vec!["before".to_owned()], 0);
    for n in 0..60 {
        match put(&format!("during-{n}"), 500_000).await {
            Ok(_) => answered.push(format!("during-{n}")),
            Err(error @ (MetaError::Storage { .. } | MetaError::Unknown { .. })) => {
                assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
                failed += 1;
            }
            Err(error) => panic!("{error}"),
        }
        if failed == 3 {
            break;
        }
    }
    assert_eq!(failed, 3, "the disk is full");
    assert!(meta.get(b"before").await.unwrap().is_some(), "what is there can be read meanwhile");
    std::fs::remove_file(&ballast).unwrap();
    drop(filler);
    put("after", 100_000).await.unwrap();
    for key in answered.iter().map(String::as_str).chain(["after"]) {
        assert_eq!(meta.get(key.as_bytes()).await.unwrap().unwrap().lease, Some(lease), "{key}");
    }
    assert!(meta.keep_alive(lease).await.unwrap().left > Duration::from_secs(590));
    // A watch that was open has all, or says that it broke off; another one goes on after it.
    let (mut seen, mut last) = (Vec::new(), 0);
    while !seen.contains(&b"after".to_vec()) {
        match tokio::time::timeout(Duration::from_secs(90), watch.next()).await.expect("the next change comes soon") {
            Ok(batch) => {
                assert!(batch.revision > last);
                last = batch.revision;
                seen.extend(batch.changes.into_iter().map(|change| change.key));
            }
            Err(_) => watch = meta.watch(KeySet::prefix(""), last + 1).await.unwrap(),
        }
    }
    assert!(answered.iter().all(|key| seen.contains(&key.clone().into_bytes())));
}
