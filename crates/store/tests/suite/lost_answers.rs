//! A conditional write whose answer is lost: what is said of it is true.

use crate::gateway::{Gateway, free_address, url_at};
use crate::proxy::{Fault, Proxy, Seen};
use crate::{key, read, settings, until};
use kip_store::{Key, Placed, Settings, Store, StoreFailure, SwapError, Version};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

fn put(seen: &Seen) -> bool {
    seen.is("PUT")
}

/// A server, a bad network before it, a store behind that, one beside it, and a reference.
struct Scene {
    gateway: Gateway,
    proxy: Proxy,
    store: Store,
    direct: Store,
    head: Key,
    version: Version,
}

async fn scene(settings: Settings) -> Scene {
    let gateway = Gateway::start().await;
    let proxy = Proxy::before(gateway.address).await;
    let store = Store::open(&url_at(proxy.address, ""), settings).unwrap();
    let direct = gateway.store("");
    let head = key("head");
    let version = direct.swap_reference(&head, None, "old".into()).await.unwrap();
    Scene { gateway, proxy, store, direct, head, version }
}

async fn value(store: &Store, head: &Key) -> String {
    let (value, _) = store.read_reference(head).await.unwrap().expect("there is one");
    String::from_utf8(value.to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_own_value_is_recognised() {
    let Scene { proxy, store, direct, head, mut version, gateway: _gateway, .. } = scene(settings()).await;
    for fault in [Fault::LoseAnswer, Fault::LoseRequest, Fault::Answer(500, "InternalError"), Fault::Answer(409, "")] {
        proxy.fail(2, fault.clone(), put);
        let name = format!("{fault:?}");
        version = store.swap_reference(&head, Some(&version), name.clone().into()).await.unwrap();
        assert_eq!(value(&direct, &head).await, name);
        proxy.heal();
    }
    // And its version is one to go on from.
    direct.swap_reference(&head, Some(&version), "next".into()).await.unwrap();
    let fresh = key("fresh");
    proxy.fail(1, Fault::LoseAnswer, put);
    store.swap_reference(&fresh, None, "first".into()).await.unwrap();
    assert_eq!(value(&direct, &fresh).await, "first");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_in_time_is_investigated() {
    let hasty = Settings { attempts: 50, answer_timeout: Duration::from_millis(500), ..settings() };
    let Scene { proxy, store, direct, head, version, gateway: _gateway, .. } = scene(hasty).await;
    proxy.fail(1, Fault::HoldAnswer, put);
    store.swap_reference(&head, Some(&version), "new".into()).await.unwrap();
    assert_eq!(value(&direct, &head).await, "new");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_without_doubt_is_one() {
    let Scene { proxy, store, direct, head, version, gateway: _gateway, .. } = scene(settings()).await;
    direct.swap_reference(&head, Some(&version), "theirs".into()).await.unwrap();
    let error = store.swap_reference(&head, Some(&version), "mine".into()).await.expect_err("theirs stands");
    assert!(matches!(error, SwapError::Conflict { .. }), "{error:?}");
    assert_eq!(store.counters().requests(), 1);
    // A 503 may not come from the store itself: it is not known whether the own value stood before
    // theirs.
    proxy.fail(2, Fault::Answer(503, "SlowDown"), put);
    let error = store.swap_reference(&head, Some(&version), "mine".into()).await.expect_err("theirs stands");
    assert!(matches!(error, SwapError::Superseded { .. }), "{error:?}");
    assert_eq!(value(&direct, &head).await, "theirs");
}

/// As a balancer does that gives up waiting for the store.
#[tokio::test(flavor = "multi_thread")]
async fn a_503_after_which_the_condition_fails_may_have_been_a_success() {
    let Scene { proxy, store, direct, head, version, gateway: _gateway, .. } = scene(settings()).await;
    let mut version = version;
    for code in ["", "SlowDown"] {
        proxy.fail(1, Fault::Instead(503, code), put);
        version = store.swap_reference(&head, Some(&version), "mine".into()).await.unwrap();
        assert_eq!(value(&direct, &head).await, "mine");
        let once = key(&format!("once{code}"));
        proxy.fail(1, Fault::Instead(503, code), put);
        assert_eq!(store.put_if_absent(&once, "mine".into()).await.unwrap(), Placed::New);
        assert_eq!(read(&direct, &once).await.unwrap(), "mine");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_that_may_have_stood_is_not_called_a_conflict() {
    let Scene { proxy, store, direct, head, version, gateway: _gateway, .. } = scene(settings()).await;
    let gate = Arc::new(Notify::new());
    proxy.fail(1, Fault::LoseAnswer, put);
    proxy.fail(1, Fault::Gate(gate.clone()), |seen| seen.is("GET"));
    let swap = tokio::spawn({
        let (store, head) = (store.clone(), head.clone());
        async move { store.swap_reference(&head, Some(&version), "mine".into()).await }
    });
    until("the question what stands", || proxy.count("GET") == 1).await;
    let (mine, version) = direct.read_reference(&head).await.unwrap().unwrap();
    assert_eq!(mine, "mine");
    direct.swap_reference(&head, Some(&version), "theirs".into()).await.unwrap();
    gate.notify_one();
    let error = swap.await.unwrap().expect_err("theirs stands");
    assert!(matches!(error, SwapError::Superseded { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_known_is_said() {
    let few = Settings { attempts: 3, ..settings() };
    let Scene { proxy, store, direct, head, version, gateway: _gateway, .. } = scene(few).await;
    proxy.fail(1, Fault::LoseAnswer, put);
    proxy.fail(usize::MAX, Fault::LoseRequest, |_| true);
    let error = store.swap_reference(&head, Some(&version), "mine".into()).await.expect_err("nothing is heard");
    assert!(matches!(error, SwapError::Unknown { .. }), "{error:?}");
    assert_eq!(value(&direct, &head).await, "mine");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_surely_not_done_is_said_too() {
    let few = Settings { attempts: 3, ..settings() };
    let Scene { proxy, store, direct, head, version, gateway: _gateway, .. } = scene(few.clone()).await;
    proxy.fail(usize::MAX, Fault::Answer(503, "SlowDown"), |_| true);
    let error = store.swap_reference(&head, Some(&version), "mine".into()).await.expect_err("always busy");
    assert!(matches!(&error, SwapError::Store(StoreFailure::Busy { .. })) && error.is_temporary(), "{error:?}");
    assert_eq!(value(&direct, &head).await, "old");
    let nowhere = Store::open(&url_at(free_address(), ""), few).unwrap();
    let error = nowhere.swap_reference(&head, Some(&version), "mine".into()).await.expect_err("nobody there");
    assert!(matches!(error, SwapError::Store(StoreFailure::Unreachable { .. })), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_put_only_once_is_recognised_too() {
    let Scene { proxy, store, direct, gateway: _gateway, .. } = scene(settings()).await;
    let (mine, theirs) = (key("mine"), key("theirs"));
    proxy.fail(1, Fault::LoseAnswer, put);
    assert_eq!(store.put_if_absent(&mine, "mine".into()).await.unwrap(), Placed::New);
    assert_eq!(store.counters().retries, 1);
    direct.put(&theirs, "theirs".into()).await.unwrap();
    proxy.fail(1, Fault::LoseAnswer, put);
    assert_eq!(store.put_if_absent(&theirs, "mine".into()).await.unwrap(), Placed::AlreadyThere);
    assert_eq!(read(&direct, &theirs).await.unwrap(), "theirs");
}
