//! Watches a request go out: as long as its bytes move it is well, however slow the way.
//!
//! The body is handed to the connection in small pieces, and each piece that is taken is progress.
//! What the connection and the kernel hold of the last ones cannot be seen, so the answer is given
//! more time than one without a body, and as much again as the bytes took so far. A peer that is
//! gone is noticed by the kernel, which hears no acknowledgement.

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use object_store::client::{HttpError, HttpRequestBody};
use parking_lot::Mutex;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

/// Bytes that are handed over at once.
const PIECE: usize = 64 << 10;
/// Bytes that are thought to be on their way, at most, when the last piece has been taken.
const UNSEEN: u64 = 1 << 20;
/// Bytes per second at which those get through on the slowest way that is thought of.
const UNSEEN_RATE: u64 = 64 << 10;

/// How patient to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Without progress.
    pub(crate) idle: Duration,
    /// Bytes per second in all, below which a transfer is given up though it moves.
    pub(crate) least_rate: u64,
}

/// Where a request is.
#[derive(Debug, Clone)]
pub(crate) struct Progress(Arc<Mutex<Transfer>>);

#[derive(Debug)]
struct Transfer {
    begun: Instant,
    moved: Instant,
    /// Bytes not yet taken.
    left: u64,
    length: u64,
}

impl Progress {
    fn new(length: u64) -> Progress {
        let now = Instant::now();
        Progress(Arc::new(Mutex::new(Transfer { begun: now, moved: now, left: length, length })))
    }

    fn note(&self, bytes: usize) {
        let mut state = self.0.lock();
        state.left = state.left.saturating_sub(bytes as u64);
        state.moved = Instant::now();
    }

    /// When it is to be given up, if nothing more moves.
    fn deadline(&self, patience: Patience) -> Instant {
        let state = self.0.lock();
        let unseen = Duration::from_millis(state.length.min(UNSEEN) * 1000 / UNSEEN_RATE);
        let idle = match state.left {
            0 => state.moved + patience.idle + unseen + (state.moved - state.begun),
            _ => state.moved + patience.idle,
        };
        let in_all = Duration::from_secs(state.length / patience.least_rate.max(1));
        idle.min(state.begun + patience.idle + unseen + in_all)
    }

    /// The time when it did not get anywhere any more, after how long.
    pub(crate) async fn stalls(&self, patience: Patience) -> Duration {
        loop {
            let deadline = self.deadline(patience);
            tokio::time::sleep_until(deadline).await;
            if self.deadline(patience) <= deadline {
                return deadline - self.0.lock().begun;
            }
        }
    }
}

/// A request's body that is watched.
#[derive(Debug)]
pub(crate) struct Watched {
    body: HttpRequestBody,
    /// Of the last frame, what was not handed over yet.
    rest: Bytes,
    progress: Progress,
}

impl Watched {
    pub(crate) fn new(body: HttpRequestBody) -> (Watched, Progress) {
        let progress = Progress::new(body.content_length() as u64);
        (Watched { body, rest: Bytes::new(), progress: progress.clone() }, progress)
    }
}

impl Body for Watched {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => self.rest = bytes,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return other,
            }
        }
        let length = self.rest.len().min(PIECE);
        let piece = self.rest.split_to(length);
        self.progress.note(length);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64 + self.body.size_hint().exact().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    const PATIENCE: Patience = Patience { idle: Duration::from_secs(15), least_rate: 1000 };

    fn waits(progress: &Progress) -> u64 {
        let begun = progress.0.lock().begun;
        (progress.deadline(PATIENCE) - begun).as_secs()
    }

    fn moved(progress: &Progress, bytes: usize, after: u64) {
        progress.note(bytes);
        let mut state = progress.0.lock();
        state.moved = state.begun + Duration::from_secs(after);
    }

    #[test]
    fn patience_starts_anew_with_every_piece_and_ends_with_the_total() {
        assert_eq!(waits(&Progress::new(0)), 15);
        let slow = Progress::new(1 << 20);
        assert_eq!(waits(&slow), 15);
        moved(&slow, 1 << 10, 14);
        assert_eq!(waits(&slow), 29);
        moved(&slow, 1 << 10, 500);
        assert_eq!(waits(&slow), 515);
        // The last of it: 16 s for what cannot be seen, and as long again as it took.
        moved(&slow, 1 << 20, 500);
        assert_eq!(waits(&slow), 500 + 15 + 16 + 500);
        moved(&slow, 0, 1070);
        assert_eq!(waits(&slow), 15 + 16 + 1048);
    }

    #[test]
    fn a_body_comes_in_pieces_and_keeps_its_length() {
        let bytes: Bytes = (0..200_000).map(|at| at as u8).collect();
        let (mut body, progress) = Watched::new(bytes.clone().into());
        let mut pieces = Vec::new();
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            while !body.is_end_stream() {
                let left = 200_000 - pieces.iter().map(Bytes::len).sum::<usize>() as u64;
                assert_eq!((body.size_hint().exact(), progress.0.lock().left), (Some(left), left));
                pieces.push(body.frame().await.unwrap().unwrap().into_data().unwrap());
            }
        });
        assert_eq!(pieces.iter().map(Bytes::len).collect::<Vec<_>>(), [65536, 65536, 65536, 3392]);
        assert!(pieces.concat() == bytes);
    }
}
