//! The store against the real thing: one contract for every kind, races, and a network that fails
//! on demand.
//!
//! The S3 server is versitygw (`scripts/setup` installs it).

mod contract;
mod directory;
mod faults;
mod gateway;
mod lost_answers;
mod opening;
mod permits;
mod probes;
mod proxy;
mod races;
mod uploads;

use bytes::Bytes;
use futures_util::TryStreamExt;
use kip_store::{Credentials, GetError, Hedge, Key, Settings, Store};
use std::time::Duration;

fn key(text: &str) -> Key {
    Key::new(text).expect("a key of the tests")
}

/// Quick to try again, slow to give up, never asks twice: what is counted is what the test brought
/// about.
fn settings() -> Settings {
    Settings {
        first_backoff: Duration::from_millis(2),
        longest_backoff: Duration::from_millis(50),
        answer_timeout: Duration::from_secs(60),
        hedge: Hedge::Off,
        part_bytes: 5 << 20,
        credentials: Some(credentials(gateway::SECRET)),
        ..Settings::default()
    }
}

fn credentials(secret: &str) -> Credentials {
    Credentials { key_id: gateway::KEY_ID.into(), secret: secret.into(), session_token: None }
}

/// Bytes that are different everywhere.
fn pattern(length: usize, seed: u64) -> Bytes {
    let word = |at: u64| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).to_le_bytes();
    (0..length.div_ceil(8) as u64).flat_map(word).take(length).collect()
}

async fn read(store: &Store, key: &Key) -> Result<Bytes, GetError> {
    let object = store.get(key).await?;
    let size = object.size();
    let bytes: Vec<Bytes> = object.try_collect().await?;
    let bytes = bytes.concat();
    assert_eq!(bytes.len() as u64, size, "a stream that ends well has the size that was promised");
    Ok(bytes.into())
}

async fn keys(store: &Store, under: Option<&str>) -> Vec<String> {
    let under = under.map(key);
    let listed: Vec<_> = store.list(under.as_ref()).try_collect().await.expect("a listing");
    listed.into_iter().map(|listed| listed.key.to_string()).collect()
}

/// Waits for something that others bring about.
async fn until(what: &str, mut there: impl FnMut() -> bool) {
    let since = std::time::Instant::now();
    while !there() {
        assert!(since.elapsed() < Duration::from_secs(120), "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
