//! SIGKILL of a process that writes to the store in one file. The test starts itself as that
//! process: with [`CHILD`] set it writes until it is killed.

use kip_meta::{Condition, EmbeddedMeta, KeptHistory, KeySet, Meta, RangeRequest, Transaction};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const CHILD: &str = "KIP_META_WRITES_TO";
const WRITERS: usize = 4;
const KILLS: u64 = 12;

fn kept() -> KeptHistory {
    KeptHistory { revisions: 1 << 40, bytes: 1 << 40, ..KeptHistory::default() }
}

/// Writes numbers, each to two keys at once and with a value that takes some pages, and says which
/// of them were answered.
async fn write(path: &Path) {
    let meta = Arc::new(EmbeddedMeta::open(path, kept()).unwrap());
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let meta = Arc::clone(&meta);
        writers.spawn(async move {
            let (count, copy) = (format!("count/{writer}"), format!("copy/{writer}"));
            loop {
                let kv = meta.get(count.as_bytes()).await.unwrap();
                let n = kv.as_ref().map_or(0, |kv| number(&kv.value)) + 1;
                let condition = match kv {
                    Some(kv) => Condition::Modified(kv.key, kv.modified),
                    None => Condition::Absent(KeySet::one(count.clone())),
                };
                let value = format!("{n:08}{}", "x".repeat(usize::try_from(n * 97 % 20_000).unwrap()));
                let both = Transaction::when(condition).put(count.clone(), value.clone()).put(copy.clone(), value);
                let revision = meta.transact(&both).await.unwrap().done().unwrap();
                let line = format!("{writer} {n} {revision}\n");
                // One write: a line is there whole or not at all.
                std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
                std::io::stdout().flush().unwrap();
            }
        });
    }
    writers.join_all().await;
}

fn number(value: &[u8]) -> u64 {
    std::str::from_utf8(&value[..8]).unwrap().parse().unwrap()
}

// promise meta: SIGKILL in the middle of writes loses nothing that was answered, and leaves
//   nothing half made
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_lose_nothing() {
    if let Some(path) = std::env::var_os(CHILD) {
        return write(Path::new(&path)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta");
    let mut answered = [0; WRITERS];
    for round in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kills_lose_nothing", "--nocapture"])
            .env(CHILD, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut newest = 0;
        let mut read = |line: String, newest: &mut u64| {
            let fields: Vec<u64> = line.split(' ').filter_map(|field| field.parse().ok()).collect();
            // The test program's own lines come before.
            if let [writer, n, revision] = fields[..] {
                answered[usize::try_from(writer).unwrap()] = n;
                *newest = revision.max(*newest);
            }
        };
        while newest == 0 {
            read(lines.next().expect("it writes").unwrap(), &mut newest);
        }
        // In the middle of something, each time of something else.
        tokio::time::sleep(Duration::from_millis(17 * round)).await;
        child.kill().unwrap();
        child.wait().unwrap();
        lines.for_each(|line| read(line.unwrap(), &mut newest));

        let meta = EmbeddedMeta::open(&path, kept()).unwrap();
        let found = meta.range(&RangeRequest::all(KeySet::prefix(""))).await.unwrap();
        assert!(found.revision >= newest, "revision {} after {newest} was answered", found.revision);
        for (writer, answered) in answered.iter().enumerate().filter(|(_, answered)| **answered > 0) {
            let count = meta.get(format!("count/{writer}").as_bytes()).await.unwrap().unwrap();
            let copy = meta.get(format!("copy/{writer}").as_bytes()).await.unwrap().unwrap();
            assert_eq!((&count.value, count.modified), (&copy.value, copy.modified));
            // One more may have been made whose answer was not heard.
            assert!((*answered..=answered + 1).contains(&number(&count.value)), "{answered} was answered");
        }
        // The history is whole, and leads to what is there.
        let (mut watch, mut state) = (meta.watch(KeySet::prefix(""), 1).await.unwrap(), BTreeMap::new());
        for revision in 2..=found.revision {
            let batch = watch.next().await.unwrap();
            assert_eq!((batch.revision, batch.changes.len()), (revision, 2));
            state.extend(batch.changes.into_iter().map(|change| (change.key, change.now.unwrap())));
        }
        assert_eq!(state.into_values().collect::<Vec<_>>(), found.keys);
        drop((watch, meta));
        // The task of the watch may have the file for a moment.
        while EmbeddedMeta::open(&path, kept()).is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    assert!(answered.iter().sum::<u64>() > KILLS, "{answered:?}");
}
