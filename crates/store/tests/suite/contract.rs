//! What every store does, whatever it is made of.

use crate::gateway::{Gateway, url_at};
use crate::proxy::{Fault, Proxy};
use crate::{key, keys, pattern, read, settings};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use kip_store::{GetError, Placed, ReadReferenceError, Store, SwapError};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether answers can be lost on the way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Network {
    Good,
    Bad,
}

/// All of it, over an empty store.
async fn holds_for(store: &Store, network: Network) {
    nothing_is_there_yet(store).await;
    objects_come_back_as_they_went(store).await;
    what_is_written_in_pieces_comes_back_whole(store).await;
    ranges_are_exact(store).await;
    what_is_there_is_not_replaced_by_accident(store).await;
    listings_know_components(store).await;
    what_is_deleted_is_gone(store).await;
    references_change_from_what_is_expected(store, network).await;
    what_is_no_reference_is_not_taken_for_one(store).await;
    store.check_swaps().await.unwrap();
    counters_report_who_did_what(store).await;
    let left: Vec<_> = store.list(None).try_collect().await.unwrap();
    for listed in left {
        store.delete(&listed.key).await.unwrap();
    }
    assert_eq!(keys(store, None).await, Vec::<String>::new());
}

fn is_missing<T: std::fmt::Debug>(result: Result<T, GetError>) {
    let error = result.expect_err("there is none");
    assert!(matches!(error, GetError::Missing { .. }), "{error:?}");
    assert!(!error.is_temporary());
}

async fn nothing_is_there_yet(store: &Store) {
    let nothing = key("no/such-object");
    store.check().await.unwrap();
    is_missing(store.get(&nothing).await);
    is_missing(store.size(&nothing).await);
    is_missing(store.get_range(&nothing, 0..1).await);
    is_missing(store.get_ranges(&nothing, &[0..1, 5..9]).await);
    assert_eq!(store.read_reference(&nothing).await.unwrap(), None);
    store.delete(&nothing).await.unwrap();
    assert_eq!(keys(store, None).await, Vec::<String>::new());
    assert_eq!(keys(store, Some("no/such")).await, Vec::<String>::new());
}

async fn objects_come_back_as_they_went(store: &Store) {
    // Nothing, a little, more than one chunk, more than two parts.
    for (number, length) in [0, 1, 1000, (1 << 20) + 1, (11 << 20) + 7].into_iter().enumerate() {
        let key = key(&format!("sizes/{number}.bin"));
        let bytes = pattern(length, number as u64);
        store.put(&key, bytes.clone()).await.unwrap();
        assert!(read(store, &key).await.unwrap() == bytes, "{length} bytes");
        assert_eq!(store.size(&key).await.unwrap(), length as u64);
    }
    let key = key("sizes/3.bin");
    for length in [5, (11 << 20) + 1, 0, 3] {
        let bytes = pattern(length, 99);
        store.put(&key, bytes.clone()).await.unwrap();
        assert!(read(store, &key).await.unwrap() == bytes, "replaced by {length} bytes");
    }
}

async fn what_is_written_in_pieces_comes_back_whole(store: &Store) {
    // Nothing, one request, two parts exactly, one byte more, parts and a rest.
    for (length, piece) in [(0, 1), (1000, 7), (10 << 20, 1 << 20), ((10 << 20) + 1, 3 << 20), (23 << 20, 12_345_678)] {
        let (key, bytes) = (key("pieces/object"), pattern(length, 5));
        let mut writer = store.writer(&key);
        for start in (0..length).step_by(piece) {
            writer.write(bytes.slice(start..length.min(start + piece))).await.unwrap();
        }
        writer.finish().await.unwrap();
        assert!(read(store, &key).await.unwrap() == bytes, "{length} bytes");
    }
}

async fn ranges_are_exact(store: &Store) {
    let (key, empty) = (key("ranges/object"), key("ranges/empty"));
    let bytes = pattern(100_000, 7);
    store.put(&key, bytes.clone()).await.unwrap();
    store.put(&empty, Bytes::new()).await.unwrap();
    for range in [0..1, 0..100_000, 99_999..100_000, 4096..8192, 70_000..70_000] {
        let got = store.get_range(&key, range.clone()).await.unwrap();
        assert!(got == bytes[range.start as usize..range.end as usize], "{range:?}");
    }
    for range in [99_999..100_001, 100_000..100_001, 0..u64::MAX, 500_000..600_000] {
        let error = store.get_range(&key, range.clone()).await.expect_err("beyond its end");
        assert!(matches!(error, GetError::BeyondEnd { .. }), "{range:?}: {error:?}");
    }
    let error = store.get_range(&key, 99_000..100_001).await.expect_err("beyond its end");
    assert_eq!(
        error.to_string(),
        format!("bytes 99000 to 100001 of ranges/object in store {} lie beyond its end, it has 100000", store.name())
    );
    assert!(matches!(store.get_range(&empty, 0..1).await, Err(GetError::BeyondEnd { .. })));
    let several = [5..10, 0..0, 99_990..100_000, 5..10, 1..50_000];
    let got = store.get_ranges(&key, &several).await.unwrap();
    assert_eq!(got.len(), several.len());
    for (got, range) in got.iter().zip(&several) {
        assert!(*got == bytes[range.start as usize..range.end as usize], "{range:?}");
    }
    assert!(matches!(store.get_ranges(&key, &[0..5, 0..100_001]).await, Err(GetError::BeyondEnd { .. })));
    assert_eq!(store.get_ranges(&key, &[]).await.unwrap(), Vec::<Bytes>::new());
}

async fn what_is_there_is_not_replaced_by_accident(store: &Store) {
    let once = key("once/object");
    assert_eq!(store.put_if_absent(&once, "first".into()).await.unwrap(), Placed::New);
    assert_eq!(store.put_if_absent(&once, "second".into()).await.unwrap(), Placed::AlreadyThere);
    assert_eq!(read(store, &once).await.unwrap(), "first");
    let contested = key("once/contested");
    let racers = (0..8).map(|racer| store.put_if_absent(&contested, format!("racer {racer}").into()));
    let placed = futures_util::future::try_join_all(racers).await.unwrap();
    let winners: Vec<_> = (0..8).filter(|racer| placed[*racer] == Placed::New).collect();
    assert_eq!(winners.len(), 1, "{placed:?}");
    assert_eq!(read(store, &contested).await.unwrap(), format!("racer {}", winners[0]));
}

async fn listings_know_components(store: &Store) {
    for name in ["list/a/1", "list/a/2/deep", "list/ab", "list/.hidden", "list/a-b/1"] {
        store.put(&key(name), Bytes::copy_from_slice(name.as_bytes())).await.unwrap();
    }
    assert_eq!(keys(store, Some("list")).await, ["list/.hidden", "list/a-b/1", "list/a/1", "list/a/2/deep", "list/ab"]);
    assert_eq!(keys(store, Some("list/a")).await, ["list/a/1", "list/a/2/deep"]);
    assert_eq!(keys(store, Some("list/ab")).await, Vec::<String>::new());
    let sizes: Vec<_> = store.list(Some(&key("list/a"))).map_ok(|listed| listed.size).try_collect().await.unwrap();
    assert_eq!(sizes, [8, 13]);
    let listed: Vec<_> = store.list(Some(&key("list"))).try_collect().await.unwrap();
    for listed in listed {
        let age = listed.modified.elapsed().unwrap_or_default();
        assert!(age < std::time::Duration::from_secs(600), "{listed:?}");
    }
}

async fn what_is_deleted_is_gone(store: &Store) {
    let (gone, stays) = (key("delete/deep/down/gone"), key("delete/stays"));
    for key in [&gone, &stays] {
        store.put(key, "x".into()).await.unwrap();
    }
    store.delete(&gone).await.unwrap();
    is_missing(store.get(&gone).await);
    store.delete(&gone).await.unwrap();
    assert_eq!(keys(store, Some("delete")).await, ["delete/stays"]);
    store.put(&gone, "again".into()).await.unwrap();
    assert_eq!(read(store, &gone).await.unwrap(), "again");
}

async fn references_change_from_what_is_expected(store: &Store, network: Network) {
    let head = key("refs/deep/head");
    let conflict = |result: Result<_, SwapError>| {
        let error = result.expect_err("not as expected");
        let in_doubt = network == Network::Bad && matches!(error, SwapError::Superseded { .. });
        assert!(in_doubt || matches!(error, SwapError::Conflict { .. }), "{error:?}");
    };
    assert_eq!(store.read_reference(&head).await.unwrap(), None);
    let first = store.swap_reference(&head, None, "one".into()).await.unwrap();
    assert_eq!(store.read_reference(&head).await.unwrap(), Some(("one".into(), first.clone())));
    conflict(store.swap_reference(&head, None, "other".into()).await);
    let second = store.swap_reference(&head, Some(&first), Bytes::new()).await.unwrap();
    conflict(store.swap_reference(&head, Some(&first), "other".into()).await);
    assert_eq!(store.read_reference(&head).await.unwrap(), Some((Bytes::new(), second.clone())));
    // A value that was there before is another version.
    let third = store.swap_reference(&head, Some(&second), "one".into()).await.unwrap();
    assert_ne!(third, first);
    conflict(store.swap_reference(&head, Some(&first), "other".into()).await);
    assert_eq!(store.read_reference(&head).await.unwrap().unwrap().0, "one");
    store.delete(&head).await.unwrap();
    assert_eq!(store.read_reference(&head).await.unwrap(), None);
    conflict(store.swap_reference(&head, Some(&third), "other".into()).await);
    assert_eq!(keys(store, Some("refs")).await, Vec::<String>::new());
    let again = store.swap_reference(&head, None, "one".into()).await.unwrap();
    assert_ne!(again, first);
    assert_eq!(keys(store, Some("refs")).await, ["refs/deep/head"]);
}

async fn what_is_no_reference_is_not_taken_for_one(store: &Store) {
    let blob = key("refs/blob");
    store.put(&blob, "just bytes".into()).await.unwrap();
    let error = store.read_reference(&blob).await.expect_err("bytes of anything");
    assert!(matches!(error, ReadReferenceError::NotAReference { .. }), "{error:?}");
    assert!(store.swap_reference(&blob, None, "x".into()).await.is_err());
    assert_eq!(read(store, &blob).await.unwrap(), "just bytes");
}

async fn counters_report_who_did_what(store: &Store) {
    let key = key("counted");
    let (above, apart) = (store.counters(), store.counting_apart());
    apart.put(&key, pattern(1000, 1)).await.unwrap();
    store.put(&key, pattern(3000, 1)).await.unwrap();
    let (mine, all) = (apart.counters(), store.counters());
    assert!(mine.puts >= 1 && mine.bytes_written >= 1000, "{mine:?}");
    assert!(all.puts >= above.puts + 2 && all.bytes_written >= above.bytes_written + 4000, "{all:?}");
    read(&apart, &key).await.unwrap();
    let mine = apart.counters();
    assert!(mine.gets >= 1 && mine.bytes_read == 3000 && mine.first_byte.count >= 1, "{mine:?}");
    assert!(mine.first_byte.median.is_some());
}

// promise stores: the same contract in a directory, in a bucket of a real S3 server, behind a
//   network that loses, cuts and refuses
// held by: this, `crates/store/tests/suite/contract.rs::an_s3_bucket_holds_the_contract`,
//   `crates/store/tests/suite/contract.rs::a_bucket_behind_a_bad_network_holds_the_contract`
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_holds_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().to_str().unwrap(), settings()).unwrap();
    holds_for(&store, Network::Good).await;
    let url = format!("file://{}", dir.path().display());
    holds_for(&Store::open(&url, settings()).unwrap(), Network::Good).await;
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "deleting leaves neither directories nor locks");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_s3_bucket_holds_the_contract() {
    let gateway = Gateway::start().await;
    holds_for(&gateway.store("some/prefix"), Network::Good).await;
    holds_for(&gateway.store(""), Network::Good).await;
    assert_eq!(gateway.unfinished_uploads(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_behind_a_bad_network_holds_the_contract() {
    let gateway = Gateway::start().await;
    let proxy = Proxy::before(gateway.address).await;
    for (every, fault) in [
        (5, Fault::Answer(503, "SlowDown")),
        (7, Fault::LoseAnswer),
        (11, Fault::LoseRequest),
        (13, Fault::Answer(500, "InternalError")),
    ] {
        let passed = AtomicUsize::new(0);
        proxy.fail(usize::MAX, fault, move |_| passed.fetch_add(1, Ordering::Relaxed) % every == every - 1);
    }
    let passed = AtomicUsize::new(0);
    proxy.fail(usize::MAX, Fault::Cut(700), move |seen| {
        seen.is("GET") && passed.fetch_add(1, Ordering::Relaxed) % 3 == 2
    });
    let mut patient = settings();
    patient.attempts = 20;
    let store = Store::open(&url_at(proxy.address, ""), patient).unwrap();
    holds_for(&store, Network::Bad).await;
    let counters = store.counters();
    assert!(counters.retries > 20 && counters.resumes > 0, "{counters:?}");
    // Of several ranges of which the first fails, the second may be dropped before it is sent.
    let (counted, came_by) = (counters.requests() as usize, proxy.seen().len());
    assert!(
        (came_by..=came_by + 2).contains(&counted),
        "every request that came by was counted: {came_by}, {counters:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_of_several_pages_is_whole() {
    let gateway = Gateway::start().await;
    let store = gateway.store("pages");
    let names: Vec<String> = (0..1100).map(|number| format!("many/{number:04}")).collect();
    futures_util::stream::iter(&names)
        .for_each_concurrent(16, |name| async { store.put(&key(name), Bytes::new()).await.unwrap() })
        .await;
    let apart = store.counting_apart();
    assert_eq!(keys(&apart, Some("many")).await, names);
    assert_eq!(apart.counters().lists, 2);
}
