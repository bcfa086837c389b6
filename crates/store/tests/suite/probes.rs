//! Stores that do not do what references need: they are found out before they are used.

use crate::gateway::{Gateway, free_address, url_at};
use crate::{keys, settings};
use kip_store::{CheckSwapsError, Settings, Store, StoreFailure};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What a made-up server does with conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ignores {
    Nothing,
    IfNoneMatch,
    IfMatch,
    /// It knows that there are conditions, and wants none.
    RefusesThem,
    /// It takes no writes at all.
    RefusesAll,
}

type Objects = Mutex<HashMap<String, Vec<u8>>>;

/// A server that keeps small objects in memory, on a port of its own.
async fn server(ignores: Ignores) -> (SocketAddr, Arc<Objects>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, objects) = (listener.local_addr().unwrap(), Arc::<Objects>::default());
    let shared = objects.clone();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let objects = shared.clone();
            tokio::spawn(async move {
                // The client may close it at any time.
                let _ = serve(client, ignores, &objects).await;
            });
        }
    });
    (address, objects)
}

async fn serve(mut client: TcpStream, ignores: Ignores, objects: &Objects) -> std::io::Result<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await?);
        }
        let head = String::from_utf8(head).unwrap();
        let header = |name: &str| {
            head.lines().find_map(|line| line.split_once(": ").filter(|(found, _)| found.eq_ignore_ascii_case(name)))
        };
        let value = |name: &str| header(name).map(|(_, value)| value.to_owned());
        let mut body = vec![0; value("content-length").map_or(0, |length| length.parse().unwrap())];
        client.read_exact(&mut body).await?;
        let mut words = head.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap().to_owned());
        let (status, body) = {
            let mut objects = objects.lock();
            let there = objects.get(&path).map(|bytes| e_tag(bytes));
            let conditional = value("if-match").is_some() || value("if-none-match").is_some();
            let exists = value("if-none-match").is_some() && there.is_some() && ignores != Ignores::IfNoneMatch;
            let differs = value("if-match").is_some_and(|tag| Some(tag) != there) && ignores != Ignores::IfMatch;
            match method {
                "PUT" if conditional && ignores == Ignores::RefusesThem => {
                    ("501 Not Implemented", "<Error><Code>NotImplemented</Code></Error>".into())
                }
                "PUT" if ignores == Ignores::RefusesAll => {
                    ("400 Bad Request", "<Error><Code>InvalidRequest</Code></Error>".into())
                }
                "PUT" if exists || differs => ("412 Precondition Failed", Vec::new()),
                "PUT" => {
                    objects.insert(path.clone(), body);
                    ("200 OK", Vec::new())
                }
                "DELETE" => {
                    objects.remove(&path);
                    ("204 No Content", Vec::new())
                }
                _ => match objects.get(&path) {
                    Some(bytes) => ("200 OK", bytes.clone()),
                    None => ("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>".into()),
                },
            }
        };
        let tag = objects.lock().get(&path).map(|bytes| e_tag(bytes)).unwrap_or_default();
        let answer = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: {tag}\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n",
            body.len()
        );
        client.write_all(answer.as_bytes()).await?;
        client.write_all(&body).await?;
    }
}

/// Different for different bytes.
fn e_tag(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

#[tokio::test(flavor = "multi_thread")]
async fn stores_that_hold_references_pass_and_keep_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().to_str().unwrap(), settings()).unwrap();
    store.check_swaps().await.unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let (address, objects) = server(Ignores::Nothing).await;
    Store::open(&url_at(address, "p"), settings()).unwrap().check_swaps().await.unwrap();
    assert!(objects.lock().is_empty());
    let gateway = Gateway::start().await;
    let store = gateway.store("some/prefix");
    store.check_swaps().await.unwrap();
    assert_eq!(keys(&store, None).await, Vec::<String>::new());
}

// promise stores: a store that ignores If-Match or If-None-Match is found out before it is used
// held by: this,
//   `crates/store/tests/suite/probes.rs::stores_that_hold_references_pass_and_keep_nothing`,
//   `crates/store/tests/suite/probes.rs::a_store_that_cannot_be_asked_is_not_called_unfit`
#[tokio::test(flavor = "multi_thread")]
async fn stores_that_ignore_a_condition_are_named() {
    for (ignores, words) in [
        (
            Ignores::IfNoneMatch,
            "it writes over what is there though it was told not to (If-None-Match); take a store with",
        ),
        (Ignores::IfMatch, "it writes over another version than the one it was told (If-Match); take a store with"),
        (Ignores::RefusesThem, "it refuses to write on a condition (501 NotImplemented); take a store with"),
    ] {
        let (address, objects) = server(ignores).await;
        let store = Store::open(&url_at(address, "p"), settings()).unwrap();
        let error = store.check_swaps().await.expect_err("unfit");
        assert!(matches!(error, CheckSwapsError::Unfit { .. }), "{error:?}");
        assert!(error.to_string().starts_with("store s3://blobs/p cannot hold references: "), "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert!(objects.lock().is_empty(), "{ignores:?} left something");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_cannot_be_asked_is_not_called_unfit() {
    let (address, _) = server(Ignores::RefusesAll).await;
    let error = Store::open(&url_at(address, ""), settings()).unwrap().check_swaps().await.expect_err("no writes");
    assert!(matches!(error, CheckSwapsError::Store(StoreFailure::Refused { status: 400, .. })), "{error:?}");
    let store = Store::open(&url_at(free_address(), ""), Settings { attempts: 2, ..settings() }).unwrap();
    let error = store.check_swaps().await.expect_err("nobody listens");
    assert!(matches!(error, CheckSwapsError::Store(StoreFailure::Unreachable { .. })), "{error:?}");
}
