//! What a proc wrote, as a feed for a client.

use crate::follow::Follower;
use kip_service::{Feed, feed};
use kip_types::api::{Code, LogLine, LogStream, LogsRequest, Refusal};
use std::path::PathBuf;

fn line_of(line: kip_logs::LogRecord) -> LogLine {
    let text = String::from_utf8_lossy(&line.text).into_owned();
    let (stream, text) = match line.stream {
        kip_logs::Stream::Stdout => (LogStream::Stdout, text),
        kip_logs::Stream::Stderr => (LogStream::Stderr, text),
        // As a client that is attached sees it.
        kip_logs::Stream::Kip => (LogStream::Stderr, format!("[kip: {text}]")),
    };
    LogLine { at_ms: line.at_ms, stream, text }
}

/// The lines of the log at `dir`, until its end or, with `follow`, until the log or the client is
/// gone.
///
/// # Errors
/// The log cannot be opened.
pub async fn read(dir: PathBuf, which: LogsRequest) -> Result<Feed<LogLine>, Refusal> {
    let from = match (which.tail, which.since_ms) {
        (Some(lines), _) => kip_logs::From::Last(lines as usize),
        (None, Some(ms)) => kip_logs::From::Since(ms),
        (None, None) => kip_logs::From::Start,
    };
    let failed = |e: kip_logs::ReadError| Refusal::new(Code::Failed, e.to_string());
    let mut follower = Follower::open(dir, from).await.map_err(failed)?;
    let (out, lines) = feed();
    tokio::spawn(async move {
        loop {
            let read = async { if which.follow { follower.next().await } else { follower.there().await } };
            let read = tokio::select! {
                read = read => read,
                () = out.closed() => return,
            };
            match read {
                Ok(lines) if lines.is_empty() => return,
                Ok(lines) => {
                    let wanted = lines.into_iter().filter(|line| which.since_ms.is_none_or(|ms| line.at_ms >= ms));
                    for line in wanted {
                        if out.send(Ok(line_of(line))).await.is_err() {
                            return;
                        }
                    }
                }
                Err(e) => return drop(out.send(Err(failed(e))).await),
            }
        }
    });
    Ok(lines)
}
