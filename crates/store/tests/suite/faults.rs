//! What a bad network or an ill store does to reads, uploads and messages, and what the counters
//! say of it.

use crate::gateway::{Gateway, SECRET, free_address, url_at};
use crate::proxy::{Fault, Proxy, Seen};
use crate::{credentials, key, keys, pattern, read, settings, until};
use futures_util::TryStreamExt;
use kip_store::{GetError, Hedge, Key, PutError, Settings, Store, StoreFailure};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Asks again so late that the first request is also the first at the proxy.
fn keen() -> Settings {
    Settings { hedge: Hedge::After(Duration::from_millis(200)), ..settings() }
}

fn get(seen: &Seen) -> bool {
    seen.is("GET")
}

/// A server, a bad network before it, a store behind that, and an object in it.
struct Scene {
    gateway: Gateway,
    proxy: Proxy,
    store: Store,
    key: Key,
    bytes: bytes::Bytes,
}

async fn scene(length: usize, settings: Settings) -> Scene {
    let gateway = Gateway::start().await;
    let proxy = Proxy::before(gateway.address).await;
    let store = Store::open(&url_at(proxy.address, ""), settings).unwrap();
    let (key, bytes) = (key("object"), pattern(length, 3));
    gateway.store("").put(&key, bytes.clone()).await.unwrap();
    Scene { gateway, proxy, store, key, bytes }
}

// promise stores: what passes is tried again, what stays is not; a stream that breaks goes on where
//   it was, never from another object
// held by: this, `crates/store/tests/suite/faults.rs::what_stays_is_not_tried_again`,
//   `crates/store/tests/suite/faults.rs::a_stream_that_breaks_goes_on_where_it_was`,
//   `crates/store/tests/suite/faults.rs::the_rest_is_never_taken_from_another_object`
#[tokio::test(flavor = "multi_thread")]
async fn what_passes_is_tried_again_and_counted() {
    let Scene { proxy, store, key, bytes, gateway: _gateway, .. } = scene(5000, settings()).await;
    for (fault, number) in [
        (Fault::Answer(503, "SlowDown"), 1),
        (Fault::Answer(500, "InternalError"), 2),
        (Fault::Answer(429, ""), 3),
        (Fault::LoseRequest, 4),
        (Fault::LoseAnswer, 5),
    ] {
        proxy.fail(2, fault.clone(), get);
        assert!(store.get_range(&key, 0..5000).await.unwrap() == bytes);
        let counters = store.counters();
        assert_eq!((counters.gets, counters.retries), (3 * number, 2 * number), "{fault:?}");
    }
    assert_eq!((store.counters().resumes, store.counters().hedges), (0, 0));
}

// promise stores: wrong credentials, missing bucket, clock skew, unreachable, missing object, full
//   or read-only disk: one line that names it, also where S3's answer has no room for a reason
// held by: this, `crates/store/tests/suite/faults.rs::a_real_server_refuses_in_clear_words`,
//   `crates/store/tests/suite/faults.rs::a_store_that_is_not_there_is_named`,
//   `crates/store/tests/suite/directory.rs::a_full_and_a_read_only_disk_are_named`
#[tokio::test(flavor = "multi_thread")]
async fn what_stays_is_not_tried_again() {
    let Scene { proxy, store, key, gateway: _gateway, .. } = scene(10, settings()).await;
    for (status, code, word) in [
        (403, "AccessDenied", "forbids"),
        (403, "RequestTimeTooSkewed", "clock"),
        (403, "SignatureDoesNotMatch", "does not accept the credentials"),
        (400, "ExpiredToken", "does not accept the credentials"),
        (404, "NoSuchBucket", "does not exist"),
        (301, "PermanentRedirect", "another region"),
        (404, "NoSuchKey", "has no object object"),
        (400, "InvalidRequest", "refused"),
    ] {
        let before = store.counters();
        proxy.fail(1, Fault::Answer(status, code), get);
        let error = store.get(&key).await.expect_err(code);
        assert!(error.to_string().contains(word) && !error.is_temporary(), "{code}: {error}");
        let after = store.counters();
        assert_eq!((after.gets, after.retries), (before.gets + 1, before.retries), "{code}");
        // The answer to HEAD has no room for a reason; it is asked for.
        proxy.fail(2, Fault::Answer(status, code), |_| true);
        let error = store.size(&key).await.expect_err(code);
        assert!(error.to_string().contains(word) && !error.is_temporary(), "{code}: {error}");
        assert_eq!(store.counters().retries, before.retries, "{code}");
        proxy.heal();
    }
    proxy.fail(2, Fault::Nonsense, get);
    let error = store.list(None).try_next().await.expect_err("no listing");
    assert!(matches!(error, StoreFailure::Unintelligible { .. }), "{error:?}");
    let error = store.get(&key).await.expect_err("no object");
    assert!(matches!(error, GetError::Store(StoreFailure::Unintelligible { .. })), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn enough_is_enough() {
    let few = Settings { attempts: 3, ..settings() };
    let Scene { proxy, store, key, gateway: _gateway, .. } = scene(10, few).await;
    proxy.fail(usize::MAX, Fault::Answer(503, "SlowDown"), get);
    let error = store.get(&key).await.expect_err("never anything else");
    assert!(matches!(&error, GetError::Store(StoreFailure::Busy { status: 503, .. })), "{error:?}");
    assert!(error.is_temporary());
    assert_eq!((store.counters().gets, store.counters().retries), (3, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_never_answers_is_given_up() {
    let hasty = Settings { attempts: 2, answer_timeout: Duration::from_millis(100), ..settings() };
    let Scene { proxy, store, key, gateway: _gateway, .. } = scene(10, hasty).await;
    proxy.fail(usize::MAX, Fault::Hold, |_| true);
    let error = store.get(&key).await.expect_err("no answer");
    assert!(matches!(&error, GetError::Store(StoreFailure::TimedOut { waited_ms: 100, .. })), "{error:?}");
    assert!(matches!(store.size(&key).await, Err(GetError::Store(StoreFailure::TimedOut { .. }))));
    assert!(matches!(store.put(&key, "x".into()).await, Err(PutError::Store(StoreFailure::TimedOut { .. }))));
    let counters = store.counters();
    assert_eq!((counters.gets, counters.heads, counters.puts, counters.retries), (2, 2, 2, 3));
    until("the connections to be closed", || proxy.abandoned() == 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_not_there_is_named() {
    let address = free_address();
    let store = Store::open(&url_at(address, "p"), Settings { attempts: 3, ..settings() }).unwrap();
    let error = store.get(&key("object")).await.expect_err("nobody listens");
    assert!(matches!(error, GetError::Store(StoreFailure::Unreachable { .. })), "{error:?}");
    let words = format!("store s3://blobs/p cannot be reached at http://{address}: ");
    assert!(error.to_string().starts_with(&words) && error.is_temporary(), "{error}");
    assert_eq!((store.counters().gets, store.counters().retries), (3, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_breaks_goes_on_where_it_was() {
    let Scene { proxy, store, key, bytes, gateway: _gateway, .. } = scene(3 << 20, settings()).await;
    for after in [1_000_000, 0, 700_000] {
        proxy.fail(1, Fault::Cut(after), get);
    }
    assert!(read(&store, &key).await.unwrap() == bytes);
    let counters = store.counters();
    assert_eq!((counters.gets, counters.retries), (4, 3));
    assert_eq!(counters.bytes_read, 3 << 20);
    let ranges: Vec<_> = proxy.seen().iter().filter_map(|seen| seen.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges, ["bytes=1000000-3145727", "bytes=1000000-3145727", "bytes=1700000-3145727"]);
    assert!(proxy.seen().iter().skip(1).all(|seen| seen.header("if-match").is_some()));
    // A range is a stream too.
    proxy.fail(1, Fault::Cut(500), get);
    assert!(store.get_range(&key, 10..2000).await.unwrap() == bytes[10..2000]);
    assert_eq!(proxy.seen().last().unwrap().header("range"), Some("bytes=510-1999"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_stops_goes_on_too() {
    let hasty = Settings { attempts: 50, answer_timeout: Duration::from_millis(500), ..settings() };
    let Scene { proxy, store, key, bytes, gateway: _gateway, .. } = scene(1 << 20, hasty).await;
    proxy.fail(1, Fault::Stall(300_000), get);
    assert!(read(&store, &key).await.unwrap() == bytes);
    assert!(store.counters().resumes >= 1);
    until("the stalled connection to be closed", || proxy.abandoned() >= 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rest_is_never_taken_from_another_object() {
    let Scene { gateway, proxy, store, key, .. } = scene(1 << 20, settings()).await;
    let direct = gateway.store("");
    for replace in [true, false] {
        proxy.fail(1, Fault::Cut(100_000), |seen| seen.is("GET"));
        let object = store.get(&key).await.unwrap();
        if replace {
            direct.put(&key, pattern(2 << 20, 4)).await.unwrap();
        } else {
            direct.delete(&key).await.unwrap();
        }
        let error = object.try_collect::<Vec<_>>().await.expect_err("another object");
        assert!(matches!(error, GetError::Changed { .. }), "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_of_two_objects_are_not_given_out_as_one() {
    let Scene { gateway, proxy, store, key, .. } = scene(1000, settings()).await;
    let gate = Arc::new(Notify::new());
    proxy.fail(1, Fault::Gate(gate.clone()), |seen| seen.header("range") == Some("bytes=500-599"));
    let asked = tokio::spawn({
        let (store, key) = (store.clone(), key.clone());
        async move { store.get_ranges(&key, &[0..100, 500..600]).await }
    });
    until("the first range", || store.counters().first_byte.count == 1 && proxy.count("GET") == 2).await;
    gateway.store("").put(&key, pattern(1000, 5)).await.unwrap();
    gate.notify_one();
    let error = asked.await.unwrap().expect_err("pieces of two objects");
    assert!(matches!(error, GetError::Changed { .. }), "{error:?}");
}

/// Not this crate's to find, see its documentation: it would have to know what the bytes should be.
#[tokio::test(flavor = "multi_thread")]
async fn a_bit_that_turned_on_the_way_is_left_to_those_above() {
    let Scene { proxy, store, key, bytes, gateway: _gateway, .. } = scene(1000, settings()).await;
    proxy.fail(1, Fault::Flip(500), get);
    let got = read(&store, &key).await.unwrap();
    let wrong: Vec<_> = (0..1000).filter(|at| got[*at] != bytes[*at]).collect();
    assert_eq!(wrong, [500]);
}

// promise stores: a slow first byte is asked for again
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_first_byte_is_asked_for_again() {
    let Scene { proxy, store, key, bytes, gateway: _gateway, .. } = scene(5000, keen()).await;
    proxy.fail(1, Fault::Hold, get);
    assert!(read(&store, &key).await.unwrap() == bytes);
    let counters = store.counters();
    assert_eq!((counters.gets, counters.hedges, counters.hedges_won, counters.retries), (2, 1, 1, 0));
    until("the loser to be dropped", || proxy.abandoned() == 1).await;
    assert_eq!(counters.first_byte.count, 1);
    assert!(proxy.count("GET") == 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_of_two_may_still_win() {
    let Scene { proxy, store, key, bytes, gateway: _gateway, .. } = scene(5000, keen()).await;
    let gate = Arc::new(Notify::new());
    proxy.fail(1, Fault::Gate(gate.clone()), get);
    proxy.fail(1, Fault::Hold, get);
    let asked = tokio::spawn({
        let (store, key) = (store.clone(), key.clone());
        async move { store.get_range(&key, 0..5000).await }
    });
    until("the second request", || proxy.count("GET") == 2).await;
    gate.notify_one();
    assert!(asked.await.unwrap().unwrap() == bytes);
    let counters = store.counters();
    assert_eq!((counters.gets, counters.hedges, counters.hedges_won), (2, 1, 0));
    until("the loser to be dropped", || proxy.abandoned() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_that_fails_leaves_it_to_the_other() {
    let Scene { proxy, store, key, bytes, gateway: _gateway, .. } = scene(5000, keen()).await;
    let gate = Arc::new(Notify::new());
    proxy.fail(1, Fault::Gate(gate.clone()), get);
    proxy.fail(1, Fault::LoseRequest, get);
    let asked = tokio::spawn({
        let (store, key) = (store.clone(), key.clone());
        async move { store.get_range(&key, 0..5000).await }
    });
    until("the second request", || proxy.count("GET") == 2).await;
    gate.notify_one();
    assert!(asked.await.unwrap().unwrap() == bytes);
    assert_eq!(store.counters().retries, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quick_answer_or_a_full_store_is_not_asked_again() {
    let slow = Settings { hedge: Hedge::After(Duration::from_secs(60)), ..settings() };
    let scene = scene(5000, slow).await;
    read(&scene.store, &scene.key).await.unwrap();
    assert_eq!((scene.store.counters().gets, scene.store.counters().hedges), (1, 0));
    let narrow = Settings { hedge: Hedge::After(Duration::from_millis(1)), most_requests: 1, ..settings() };
    let store = Store::open(&url_at(scene.proxy.address, ""), narrow).unwrap();
    scene.proxy.fail(1, Fault::Delay(Duration::from_millis(100)), get);
    read(&store, &scene.key).await.unwrap();
    assert_eq!((store.counters().gets, store.counters().hedges), (1, 0));
    assert!(store.counters().first_byte.longest.unwrap() >= Duration::from_millis(100));
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_are_tried_again_one_by_one() {
    let Scene { gateway, proxy, store, key, .. } = scene(0, settings()).await;
    proxy.fail(1, Fault::Answer(503, "SlowDown"), |seen| seen.line.contains("partNumber=2"));
    proxy.fail(1, Fault::LoseAnswer, |seen| seen.line.contains("partNumber=3"));
    let bytes = pattern(11 << 20, 8);
    store.put(&key, bytes.clone()).await.unwrap();
    assert!(read(&store, &key).await.unwrap() == bytes);
    let counters = store.counters();
    assert_eq!((counters.parts, counters.uploads, counters.puts, counters.retries), (5, 2, 0, 2));
    assert_eq!(gateway.unfinished_uploads(), 0);
}

// promise stores: an upload that fails or is dropped leaves the object as it was
// held by: this, `crates/store/tests/suite/faults.rs::an_upload_that_is_dropped_is_aborted`,
//   `crates/store/tests/suite/directory.rs::a_process_that_is_killed_while_it_writes_leaves_no_half_object`
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_fails_is_aborted_and_the_object_is_as_it_was() {
    let Scene { gateway, proxy, store, key, bytes } = scene(1000, settings()).await;
    proxy.fail(1, Fault::Answer(403, "AccessDenied"), |seen| seen.line.contains("partNumber=3"));
    let error = store.put(&key, pattern(11 << 20, 8)).await.expect_err("a part is refused");
    assert!(matches!(error, PutError::Store(StoreFailure::Forbidden { .. })), "{error:?}");
    // A part that was on its way may come after the abortion, which is done again then.
    until("the abortion", || gateway.unfinished_uploads() == 0).await;
    assert!(read(&store, &key).await.unwrap() == bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_dropped_is_aborted() {
    let Scene { gateway, proxy, store, key, bytes } = scene(1000, settings()).await;
    proxy.fail(1, Fault::Hold, |seen| seen.line.contains("partNumber=3"));
    let task = tokio::spawn({
        let (store, key) = (store.clone(), key.clone());
        async move { store.put(&key, pattern(11 << 20, 8)).await }
    });
    until("two parts", || gateway.unfinished_uploads() >= 2).await;
    task.abort();
    until("the abortion", || gateway.unfinished_uploads() == 0).await;
    assert!(read(&store, &key).await.unwrap() == bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_whose_end_is_not_heard_of_is_made_sure() {
    let Scene { gateway, proxy, store, key, .. } = scene(1000, settings()).await;
    proxy.fail(1, Fault::LoseAnswer, |seen| seen.is("POST") && seen.line.contains("uploadId="));
    let bytes = pattern(11 << 20, 8);
    store.put(&key, bytes.clone()).await.unwrap();
    assert!(read(&store, &key).await.unwrap() == bytes);
    assert_eq!(gateway.unfinished_uploads(), 0);
    // A success that is none: https://repost.aws/knowledge-center/s3-resolve-200-internalerror
    proxy.fail(1, Fault::Answer(200, "InternalError"), |seen| seen.is("POST") && seen.line.contains("uploadId="));
    let bytes = pattern(11 << 20, 9);
    store.put(&key, bytes.clone()).await.unwrap();
    assert!(read(&store, &key).await.unwrap() == bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_server_refuses_in_clear_words() {
    let gateway = Gateway::start().await;
    let with =
        |url: &str, credentials| Store::open(url, Settings { credentials: Some(credentials), ..settings() }).unwrap();
    let wrong = with(&gateway.url(""), credentials("guessed"));
    let error = wrong.put(&key("x"), "x".into()).await.expect_err("a wrong secret");
    assert!(matches!(error, PutError::Store(StoreFailure::WrongCredentials { .. })), "{error:?}");
    let Err(GetError::Store(failure)) = wrong.size(&key("x")).await else { panic!("a wrong secret") };
    let words = "store s3://blobs does not accept the credentials (SignatureDoesNotMatch): ";
    assert!(failure.to_string().starts_with(words), "{failure}");
    let unknown = kip_store::Credentials { key_id: "nobody".into(), ..credentials(SECRET) };
    let error = with(&gateway.url(""), unknown).check().await.expect_err("an unknown key");
    assert!(matches!(error, StoreFailure::WrongCredentials { .. }), "{error:?}");
    let nowhere = with(&gateway.url("").replace("blobs", "no-such-bucket"), credentials(SECRET));
    for error in [
        nowhere.check().await.expect_err("no bucket"),
        match nowhere.get(&key("x")).await.expect_err("no bucket") {
            GetError::Store(failure) => failure,
            other => panic!("{other:?}"),
        },
        match nowhere.put(&key("x"), "x".into()).await.expect_err("no bucket") {
            PutError::Store(failure) => failure,
            other => panic!("{other:?}"),
        },
        match nowhere.size(&key("x")).await.expect_err("no bucket") {
            GetError::Store(failure) => failure,
            other => panic!("{other:?}"),
        },
        nowhere.list(None).try_next().await.expect_err("no bucket"),
        nowhere.delete(&key("x")).await.expect_err("no bucket"),
    ] {
        let words = format!("bucket \"no-such-bucket\" does not exist at http://{}", gateway.address);
        assert!(error.to_string().starts_with(&words) && !error.is_temporary(), "{error}");
    }
    assert_eq!(nowhere.counters().retries, 0);
    assert_eq!(keys(&gateway.store(""), None).await, Vec::<String>::new());
}
