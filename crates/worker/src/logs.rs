//! What a proc wrote, as a feed for a client.

use kip_logs::{FOLLOW_POLL, LogReader};
use kip_types::api::{Code, LogLine, LogStream, LogsRequest, Refusal};
use std::path::Path;
use tokio::sync::mpsc;

fn line_of(line: kip_logs::LogLine) -> LogLine {
    let stream = if line.stream == kip_logs::Stream::Stderr { LogStream::Stderr } else { LogStream::Stdout };
    LogLine { at_ms: line.at_ms, stream, text: String::from_utf8_lossy(&line.text).into_owned() }
}

/// Sends the lines of the log at `dir`, until its end or, with `follow`, until the log or the receiver is gone. Blocking.
pub(crate) fn read(dir: &Path, which: &LogsRequest, out: &mpsc::Sender<Result<LogLine, Refusal>>) {
    let from = match (which.tail, which.since_ms) {
        (Some(lines), _) => kip_logs::From::Last(lines as usize),
        (None, Some(ms)) => kip_logs::From::Since(ms),
        (None, None) => kip_logs::From::Start,
    };
    let failed = |e: kip_logs::ReadError| Refusal::new(Code::Failed, e.to_string());
    let mut reader = match LogReader::open(dir, from) {
        Ok(reader) => reader,
        Err(e) => return drop(out.blocking_send(Err(failed(e)))),
    };
    loop {
        let lines = match reader.next_lines() {
            Ok(lines) => lines,
            Err(e) => return drop(out.blocking_send(Err(failed(e)))),
        };
        if lines.is_empty() {
            if !which.follow || reader.gone() || out.is_closed() {
                return;
            }
            std::thread::sleep(FOLLOW_POLL);
        }
        for line in lines {
            if which.since_ms.is_some_and(|ms| line.at_ms < ms) {
                continue;
            }
            if out.blocking_send(Ok(line_of(line))).is_err() {
                return;
            }
        }
    }
}
