//! Reads a body of JSON lines as it comes.

use crate::CallError;
use crate::connect::{Connection, Sent};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use kip_types::api::BrokeOff;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::marker::PhantomData;

/// Items as the daemon sends them. Dropping it ends the daemon's sending.
#[derive(Debug)]
pub struct AnswerFeed<T> {
    body: Incoming,
    _connection: Connection,
    lines: Lines,
    item: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> AnswerFeed<T> {
    pub(crate) fn new(sent: Sent) -> AnswerFeed<T> {
        let Sent { response, connection } = sent;
        AnswerFeed { body: response.into_body(), _connection: connection, lines: Lines::default(), item: PhantomData }
    }

    /// The next item, or none at the end. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<T>, CallError> {
        loop {
            if let Some(line) = self.lines.next() {
                return parse(&line).map(Some);
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(e)) => return Err(CallError::lost(e)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.lines.take_in(&data);
                    }
                }
            }
        }
    }
}

fn parse<T: DeserializeOwned>(line: &[u8]) -> Result<T, CallError> {
    serde_json::from_slice(line).map_err(|foreign| match serde_json::from_slice::<BrokeOff>(line) {
        Ok(broke_off) => CallError::Refused(broke_off.refusal),
        Err(_) => CallError::Foreign(foreign),
    })
}

/// Cuts chunks into lines, wherever the chunks were cut.
#[derive(Debug, Default)]
struct Lines {
    whole: VecDeque<Vec<u8>>,
    begun: Vec<u8>,
}

impl Lines {
    fn take_in(&mut self, data: &[u8]) {
        let mut pieces = data.split(|byte| *byte == b'\n');
        let last = pieces.next_back().unwrap_or_default();
        for piece in pieces {
            self.begun.extend_from_slice(piece);
            self.whole.push_back(std::mem::take(&mut self.begun));
        }
        self.begun.extend_from_slice(last);
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        self.whole.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_do_not_depend_on_where_chunks_are_cut() {
        let text = b"one\ntwo\n\nthree\n";
        for size in 1..=text.len() {
            let mut lines = Lines::default();
            text.chunks(size).for_each(|chunk| lines.take_in(chunk));
            let all: Vec<_> = std::iter::from_fn(|| lines.next()).collect();
            assert_eq!(all, [&b"one"[..], b"two", b"", b"three"], "chunks of {size}");
            assert!(lines.begun.is_empty());
        }
    }
}
