//! Turns a [`Feed`] into a chunked body of JSON lines.
//!
//! The feed is dropped with the body, which hyper does as soon as the client is gone, and ends when
//! the API does.

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use kip_service::Feed;
use kip_types::api::{BrokeOff, Refusal};
use serde::Serialize;
use std::convert::Infallible;
use tokio::sync::watch;

/// Most items that are sent as one chunk.
const BATCH: usize = 256;

/// The answer that sends all of `feed`, until `ending` becomes true.
pub fn lines<T: Serialize + Send + 'static>(feed: Feed<T>, ending: watch::Receiver<bool>) -> Response {
    let chunks = stream::unfold((feed, ending), |(mut feed, mut ending)| async move {
        let mut batch = Vec::new();
        tokio::select! {
            _ = ending.wait_for(|ends| *ends) => return None,
            count = feed.recv_many(&mut batch, BATCH) => if count == 0 { return None },
        }
        let mut chunk = Vec::new();
        for item in batch {
            write_line(&mut chunk, item);
        }
        Some((Ok::<_, Infallible>(Bytes::from(chunk)), (feed, ending)))
    });
    ([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(chunks)).into_response()
}

fn write_line<T: Serialize>(chunk: &mut Vec<u8>, item: Result<T, Refusal>) {
    match item {
        Ok(item) => serde_json::to_writer(&mut *chunk, &item),
        Err(refusal) => serde_json::to_writer(&mut *chunk, &BrokeOff { refusal }),
    }
    .expect("the API's types are JSON and a Vec takes every write");
    chunk.push(b'\n');
}
