//! The contract with a real etcd, alone and behind a bad connection; a real connection that is lost
//! because etcd is killed. Each test starts its own etcd on loopback, in a temporary directory.

mod contract;
#[path = "contract/server.rs"]
mod server;

use contract::{Subject, TTL};
use kip_meta::{Certain, Condition, EtcdMeta, KeySet, Meta, Transaction};
use server::EtcdServer;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(90);

async fn make() -> Subject {
    let server = EtcdServer::start().await;
    let meta: Arc<dyn Meta> = Arc::new(server.connect().await);
    let client = etcd_client::Client::connect([server.url()], None).await.unwrap();
    let forget: contract::Forget = Box::new(move |revision| {
        let mut client = client.clone();
        Box::pin(async move { assert!(client.compact(i64::try_from(revision).unwrap(), None).await.is_ok()) })
    });
    Subject { calm: Arc::clone(&meta), meta, ttl: TTL, forget, _guard: Box::new(server) }
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

// promise meta: etcd is killed in the middle of transactions: each is made once or not at all, a
//   watch misses none
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_killed_in_the_middle() {
    const WRITERS: usize = 4;
    const KILLS: usize = 3;
    let mut server = EtcdServer::start().await;
    let meta = Arc::new(Certain::new(Arc::new(server.connect().await), SOON));
    let mut watch = meta.watch(KeySet::prefix("log/"), 1).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let (meta, is_over) = (Arc::clone(&meta), Arc::clone(&is_over));
        writers.spawn(async move {
            let key = format!("log/{writer}").into_bytes();
            let begin = Transaction::when(Condition::Absent(KeySet::one(key.clone()))).put(key.clone(), "");
            meta.transact(&begin).await.unwrap().done().unwrap();
            let mut writes: u64 = 0;
            while !is_over.load(Ordering::Relaxed) {
                writes += 1;
                // Made twice, it would count twice: its condition holds each time.
                let write = Transaction::when(Condition::Exists(key.clone())).put(key.clone(), writes.to_string());
                meta.transact(&write).await.unwrap().done().unwrap();
            }
            (key, writes)
        });
    }
    for _ in 0..KILLS {
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.kill();
        server.start_again();
        server.ready().await;
    }
    is_over.store(true, Ordering::Relaxed);
    let mut all = 0;
    for (key, writes) in writers.join_all().await {
        let kv = meta.get(&key).await.unwrap().unwrap();
        assert_eq!((kv.value, kv.version), (writes.to_string().into_bytes(), writes + 1));
        all += writes + 1;
    }
    assert!(all > 100, "only {all} writes");
    let (mut seen, mut last) = (0, 0);
    while seen < all {
        let batch = tokio::time::timeout(SOON, watch.next()).await.expect("the next change comes soon").unwrap();
        assert!(batch.revision > last || batch.changes.is_empty());
        last = batch.revision;
        seen += batch.changes.len() as u64;
    }
    assert_eq!(seen, all);
}

// promise meta: an etcd that is not there is one clear error
#[tokio::test]
async fn no_etcd_is_one_clear_error() {
    let url = "http://127.0.0.1:1".to_owned();
    let connected = EtcdMeta::connect(std::slice::from_ref(&url)).await;
    let error = match connected {
        Ok(meta) => meta.get(b"a").await.unwrap_err(),
        Err(error) => error,
    };
    assert!(error.is_unavailable() && error.to_string().contains(&url), "{error}");
    assert!(!error.to_string().contains('\n'));
}
