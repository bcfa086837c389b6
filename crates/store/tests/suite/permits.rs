//! Which request goes first when there is not room for all, and how long anything may take.

use crate::gateway::{Gateway, url_at};
use crate::proxy::{Fault, Proxy, Seen};
use crate::{key, pattern, settings, until};
use futures_util::TryStreamExt;
use kip_store::{GetError, Settings, Store, StoreFailure};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

// promise stores: uploads keep no read waiting, reads that no wake waits for give way, what is less
//   than an object ends in time
// held by: this, `crates/store/tests/suite/permits.rs::reads_that_nobody_waits_for_give_way`,
//   `crates/store/tests/suite/permits.rs::what_is_less_than_an_object_ends_in_time`,
//   `kip_store::directory::tests::a_file_system_that_hangs_is_left_to_itself_and_one_that_is_slow_is_not`
#[tokio::test(flavor = "multi_thread")]
async fn uploads_that_hang_keep_no_read_waiting() {
    let gateway = Gateway::start().await;
    let proxy = Proxy::before(gateway.address).await;
    let narrow = Settings { most_requests: 1, most_uploads: 2, ..settings() };
    let store = Store::open(&url_at(proxy.address, ""), narrow).unwrap();
    let small = key("small");
    store.put(&small, "x".into()).await.unwrap();
    proxy.fail(usize::MAX, Fault::Hold, |seen| seen.line.contains("/blob-"));
    let uploads: Vec<_> = (0..10)
        .map(|number| {
            let store = store.clone();
            tokio::spawn(async move { store.put(&key(&format!("blob-{number}")), pattern(100_000, number)).await })
        })
        .collect();
    until("all uploads that there is room for", || store.counters().puts == 3).await;
    assert_eq!(store.get_range(&small, 0..1).await.unwrap(), "x");
    let version = store.swap_reference(&key("head"), None, "small things too".into()).await.unwrap();
    assert_eq!(store.read_reference(&key("head")).await.unwrap().unwrap().1, version);
    assert_eq!(store.counters().puts, 4);
    for upload in uploads {
        upload.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_that_nobody_waits_for_give_way() {
    let gateway = Gateway::start().await;
    let proxy = Proxy::before(gateway.address).await;
    let store = Store::open(&url_at(proxy.address, ""), Settings { most_requests: 1, ..settings() }).unwrap();
    for name in ["held", "wake", "idle-0", "idle-1", "idle-2"] {
        gateway.store("").put(&key(name), "x".into()).await.unwrap();
    }
    let gate = Arc::new(Notify::new());
    proxy.fail(1, Fault::Gate(gate.clone()), |_| true);
    let read = |store: Store, name: String| tokio::spawn(async move { store.get_range(&key(&name), 0..1).await });
    let mut reads = vec![read(store.clone(), "held".into())];
    until("the first read", || proxy.count("GET") == 1).await;
    // On this thread, so that they surely stand in the queue before the one in a hurry comes.
    let later = store.in_background();
    let names = ["idle-0", "idle-1", "idle-2"].map(key);
    let mut idle = Box::pin(futures_util::future::try_join_all(names.iter().map(|key| later.get_range(key, 0..1))));
    assert!(futures_util::FutureExt::now_or_never(&mut idle).is_none());
    let wake_key = key("wake");
    let mut wake = Box::pin(store.get_range(&wake_key, 0..1));
    assert!(futures_util::FutureExt::now_or_never(&mut wake).is_none());
    gate.notify_one();
    let (idle, wake) = tokio::join!(idle, wake);
    assert!(idle.is_ok() && wake.is_ok());
    for read in reads.drain(..) {
        read.await.unwrap().unwrap();
    }
    let order: Vec<_> =
        proxy.seen().iter().map(|seen| seen.line.split(['/', ' ']).nth(3).unwrap().to_owned()).collect();
    assert_eq!(order, ["held", "wake", "idle-0", "idle-1", "idle-2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_less_than_an_object_ends_in_time() {
    let gateway = Gateway::start().await;
    let proxy = Proxy::before(gateway.address).await;
    let hasty = Settings { attempts: 1000, operation_timeout: Duration::from_millis(300), ..settings() };
    let store = Store::open(&url_at(proxy.address, ""), hasty).unwrap();
    let too_long = |failure: StoreFailure| {
        assert!(matches!(&failure, StoreFailure::TookTooLong { waited_ms: 300, .. }), "{failure:?}");
        assert!(failure.is_temporary() && failure.to_string().contains("within 300 ms"), "{failure}");
    };
    let busy = |_: &Seen| true;
    proxy.fail(usize::MAX, Fault::Answer(503, "SlowDown"), busy);
    too_long(store.check().await.expect_err("always busy"));
    too_long(store.delete(&key("x")).await.expect_err("always busy"));
    too_long(store.list(None).try_next().await.expect_err("always busy"));
    let Err(GetError::Store(failure)) = store.size(&key("x")).await else { panic!("always busy") };
    too_long(failure);
}
