//! Bytes on a slow way up, and objects that are written while they are made.

use crate::gateway::{Gateway, url_at};
use crate::proxy::{Fault, Proxy, Seen};
use crate::{key, keys, pattern, read, settings, until};
use kip_store::{PutError, Settings, Store, StoreFailure};
use std::time::{Duration, Instant};

fn put(seen: &Seen) -> bool {
    seen.is("PUT")
}

// promise stores: a slow way up is no trouble, one on which nothing moves is
// held by: this,
//   `crates/store/tests/suite/uploads.rs::a_way_up_on_which_nothing_moves_is_given_up`,
//   `kip_store::wire::sending::tests::patience_starts_anew_with_every_piece_and_ends_with_the_total`;
//   of an answer:
//   `crates/store/tests/suite/uploads.rs::an_answer_may_take_long_as_long_as_it_moves`
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_way_up_is_no_trouble() {
    let gateway = Gateway::start().await;
    let proxy = Proxy::narrow(gateway.address).await;
    let patient = Settings { answer_timeout: Duration::from_secs(1), ..settings() };
    let store = Store::open(&url_at(proxy.address, ""), patient).unwrap();
    let bytes = pattern(8 << 20, 1);
    proxy.fail(1, Fault::Trickle(128 << 10, Duration::from_millis(50)), put);
    let since = Instant::now();
    store.put(&key("object"), bytes.clone()).await.unwrap();
    assert!(since.elapsed() > Duration::from_secs(3), "longer than nothing may move");
    assert_eq!((store.counters().puts, store.counters().retries), (1, 0));
    assert!(read(&gateway.store(""), &key("object")).await.unwrap() == bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_way_up_on_which_nothing_moves_is_given_up() {
    let gateway = Gateway::start().await;
    let proxy = Proxy::narrow(gateway.address).await;
    let hasty = Settings { attempts: 2, answer_timeout: Duration::from_millis(500), ..settings() };
    let store = Store::open(&url_at(proxy.address, ""), hasty).unwrap();
    proxy.fail(2, Fault::Choke(1 << 20), put);
    let since = Instant::now();
    let error = store.put(&key("object"), pattern(8 << 20, 1)).await.expect_err("stuck");
    // The kernel notices too, and either may be first.
    let stuck = matches!(&error, PutError::Store(StoreFailure::TimedOut { .. } | StoreFailure::Broken { .. }));
    assert!(stuck && error.is_temporary(), "{error:?}");
    assert!(since.elapsed() < Duration::from_secs(60), "not as long as so many bytes may take");
    assert_eq!((store.counters().puts, store.counters().retries), (2, 1));
}

/// Of a long listing on a slow way, or of an object that is being put together.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_may_take_long_as_long_as_it_moves() {
    let gateway = Gateway::start().await;
    let proxy = Proxy::before(gateway.address).await;
    let hasty = Settings { attempts: 1, answer_timeout: Duration::from_secs(1), ..settings() };
    let store = Store::open(&url_at(proxy.address, ""), hasty).unwrap();
    store.put(&key("object"), "x".into()).await.unwrap();
    proxy.fail(1, Fault::Drip(100, Duration::from_millis(300)), |seen| seen.is("GET"));
    let since = Instant::now();
    assert_eq!(keys(&store, None).await, ["object"]);
    assert!(since.elapsed() > Duration::from_millis(1500), "longer than nothing may move: {:?}", since.elapsed());
    proxy.fail(1, Fault::Stall(100), |seen| seen.is("GET"));
    let error = futures_util::TryStreamExt::try_next(&mut store.list(None)).await.expect_err("it stops");
    assert!(matches!(error, StoreFailure::TimedOut { waited_ms: 1000, .. }), "{error:?}");
}

async fn write_in_pieces(store: &Store, bytes: &bytes::Bytes) -> Result<(), PutError> {
    let mut writer = store.writer(&key("object"));
    for start in (0..bytes.len()).step_by(1 << 20) {
        writer.write(bytes.slice(start..bytes.len().min(start + (1 << 20)))).await?;
    }
    writer.finish().await
}

// promise stores: an object is written while it is made: one request up to two parts, then parts
//   that go up early; an end that was not heard of is recognised
// held by: this, `crates/store/tests/suite/uploads.rs::pieces_over_a_bad_network`,
//   `crates/store/tests/suite/directory.rs::a_file_that_is_being_written_is_gone_with_its_writer`
#[tokio::test(flavor = "multi_thread")]
async fn few_bytes_are_one_request_and_many_are_parts_that_go_up_early() {
    let gateway = Gateway::start().await;
    let store = gateway.store("");
    write_in_pieces(&store, &pattern(10 << 20, 1)).await.unwrap();
    let counters = store.counters();
    assert_eq!((counters.puts, counters.parts, counters.uploads), (1, 0, 0));
    let (object, bytes) = (key("object"), pattern(12 << 20, 2));
    let mut writer = store.writer(&object);
    writer.write(bytes.slice(..11 << 20)).await.unwrap();
    until("two parts", || gateway.unfinished_uploads() >= 2).await;
    assert_eq!(read(&store, &object).await.unwrap().len(), 10 << 20, "the object is as it was");
    writer.write(bytes.slice(11 << 20..)).await.unwrap();
    writer.finish().await.unwrap();
    assert!(read(&store, &object).await.unwrap() == bytes);
    assert_eq!((store.counters().puts, store.counters().parts, store.counters().uploads), (1, 3, 2));
    let mut writer = store.writer(&object);
    writer.write(pattern(11 << 20, 3)).await.unwrap();
    until("two parts", || gateway.unfinished_uploads() >= 2).await;
    drop(writer);
    until("the abortion", || gateway.unfinished_uploads() == 0).await;
    assert!(read(&store, &object).await.unwrap() == bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn pieces_over_a_bad_network() {
    let gateway = Gateway::start().await;
    let proxy = Proxy::before(gateway.address).await;
    let store = Store::open(&url_at(proxy.address, ""), settings()).unwrap();
    let end = |seen: &Seen| seen.is("POST") && seen.line.contains("uploadId=");
    // The end is not heard of, and is recognised: nothing goes up twice.
    proxy.fail(1, Fault::LoseAnswer, end);
    let bytes = pattern(11 << 20, 8);
    write_in_pieces(&store, &bytes).await.unwrap();
    assert!(read(&gateway.store(""), &key("object")).await.unwrap() == bytes);
    assert_eq!((store.counters().parts, store.counters().uploads), (3, 3));
    store.put(&key("object"), bytes.clone()).await.unwrap();
    assert_eq!(store.counters().parts, 6);
    // Another object there is not taken for it.
    proxy.fail(1, Fault::Answer(404, "NoSuchUpload"), end);
    let error = write_in_pieces(&store, &pattern(11 << 20, 9)).await.expect_err("the upload is gone");
    assert!(matches!(&error, PutError::Unknown { .. }), "{error:?}");
    // A part that is refused ends it, and nothing stays.
    proxy.fail(1, Fault::Answer(403, "AccessDenied"), |seen| seen.line.contains("partNumber=2"));
    let error = write_in_pieces(&store, &pattern(11 << 20, 9)).await.expect_err("a part is refused");
    assert!(matches!(&error, PutError::Store(StoreFailure::Forbidden { .. })), "{error:?}");
    until("the abortion", || gateway.unfinished_uploads() == 0).await;
    assert!(read(&store, &key("object")).await.unwrap() == bytes);
}
