//! Reading a log, across its files, once or as it grows. Needs neither the pump nor the daemon that
//! wrote it.
//!
//! A reader holds its files open, so rotation cannot take them away under it. It keeps its place at
//! the end of a whole record, because the writer may cut off a torn one.

use super::record::{LogRecord, MAX_FILES, MAX_RECORD, Stream, file_name, parse};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often a follower looks for new lines.
pub const FOLLOW_POLL: Duration = Duration::from_millis(100);

const CHUNK_BYTES: usize = 256 * 1024;

/// A log could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the log {path}")]
pub struct ReadError {
    path: PathBuf,
    /// Why not.
    #[source]
    pub source: io::Error,
}

/// Where to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// With the oldest line there is.
    Start,
    /// With the last so many complete lines; 0 is only what comes from now on.
    Last(usize),
    /// With the first line of this time or later, milliseconds since the epoch.
    Since(u64),
}

fn remark(at_ms: u64, text: String) -> LogRecord {
    LogRecord { at_ms, stream: Stream::Kip, complete: true, text: text.into_bytes() }
}

#[derive(Debug)]
struct Part {
    file: File,
    inode: (u64, u64),
}

/// A place in a log.
#[derive(Debug)]
pub struct LogReader {
    directory: PathBuf,
    /// Oldest first; the first one is being read. All but the last are complete.
    parts: VecDeque<Part>,
    /// In the first part: the end of the last whole record that was read.
    offset: u64,
    since_ms: u64,
    last_ms: u64,
}

impl LogReader {
    /// Opens a log. One that has no file yet is empty.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn open(directory: &Path, from: From) -> Result<LogReader, ReadError> {
        let mut reader = LogReader {
            directory: directory.to_owned(),
            parts: VecDeque::new(),
            offset: 0,
            since_ms: if let From::Since(ms) = from { ms } else { 0 },
            last_ms: 0,
        };
        reader.parts = reader.newer_than(None)?.0;
        if let From::Last(lines) = from {
            reader.go_to_last(lines)?;
        }
        Ok(reader)
    }

    /// The next lines that are there, up to about 256 KiB of them. Empty at the end; a follower
    /// asks again after [`FOLLOW_POLL`].
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn next_lines(&mut self) -> Result<Vec<LogRecord>, ReadError> {
        loop {
            let mut lines = self.read_part()?;
            if !lines.is_empty() {
                lines.retain(|line| line.at_ms >= self.since_ms);
                if lines.is_empty() {
                    continue;
                }
                return Ok(lines);
            }
            if self.parts.len() > 1 {
                self.parts.pop_front();
                self.offset = 0;
                continue;
            }
            // A newer file means that this one is complete now: the next turn reads what came to it
            // last.
            let known = self.parts.front().map(|part| part.inode);
            let (newer, gap) = self.newer_than(known)?;
            if newer.is_empty() {
                return Ok(Vec::new());
            }
            self.parts.extend(newer);
            if gap {
                return Ok(vec![remark(
                    self.last_ms,
                    "lines may be missing here: the log was rotated faster than read".to_owned(),
                )]);
            }
        }
    }

    /// Whether there is something after this place that was not read, if only a part of a line.
    /// Does not wait for the disk.
    pub fn has_grown(&self) -> bool {
        let current = std::fs::symlink_metadata(self.directory.join(file_name(0)));
        match (current, self.parts.front()) {
            (Ok(now), Some(part)) => part.inode != (now.dev(), now.ino()) || now.len() > self.offset,
            (Ok(_), None) => true,
            // In the middle of a rotation, or gone.
            (Err(_), _) => self.parts.len() > 1,
        }
    }

    /// Whether the log was removed with its proc: nothing will come any more.
    pub fn gone(&self) -> bool {
        !self.directory.exists()
    }

    fn failed(&self, age: usize) -> impl Fn(io::Error) -> ReadError {
        let path = self.directory.join(file_name(age));
        move |source| ReadError { path: path.clone(), source }
    }

    /// The whole records at the current place; none at the end of what there is of the first part.
    fn read_part(&mut self) -> Result<Vec<LogRecord>, ReadError> {
        let Some(part) = self.parts.front() else { return Ok(Vec::new()) };
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut filled = 0;
        while filled < chunk.len() {
            match part.file.read_at(&mut chunk[filled..], self.offset + filled as u64) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(0)(e)),
            }
        }
        chunk.truncate(filled);
        let whole = chunk.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        if whole == 0 && filled > MAX_RECORD {
            self.offset += filled as u64;
            return Ok(vec![remark(self.last_ms, format!("{filled} bytes of the log cannot be understood"))]);
        }
        self.offset += whole as u64;
        let mut lines = Vec::new();
        for record in chunk[..whole].split_inclusive(|b| *b == b'\n') {
            let record = &record[..record.len() - 1];
            let line = parse(record).unwrap_or_else(|| {
                remark(self.last_ms, format!("{} bytes of the log cannot be understood", record.len() + 1))
            });
            self.last_ms = line.at_ms;
            lines.push(line);
        }
        Ok(lines)
    }

    /// The files that are newer than the known one, oldest first, and whether the known one is no
    /// longer among them.
    ///
    /// The newest is opened first: while a rotation renames them one by one, a file may then be met
    /// twice but none is missed.
    fn newer_than(&self, known: Option<(u64, u64)>) -> Result<(VecDeque<Part>, bool), ReadError> {
        let mut parts: VecDeque<Part> = VecDeque::new();
        for age in 0..MAX_FILES {
            let file = match File::open(self.directory.join(file_name(age))) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(self.failed(age)(e)),
            };
            let metadata = file.metadata().map_err(self.failed(age))?;
            let inode = (metadata.dev(), metadata.ino());
            if Some(inode) == known {
                return Ok((parts, false));
            }
            if parts.front().is_none_or(|part| part.inode != inode) {
                parts.push_front(Part { file, inode });
            }
        }
        let gap = known.is_some() && !parts.is_empty();
        Ok((parts, gap))
    }

    /// Skips all but the last so many complete lines.
    fn go_to_last(&mut self, lines: usize) -> Result<(), ReadError> {
        let mut left = lines;
        for index in (0..self.parts.len()).rev() {
            let starts = record_starts(&self.parts[index].file).map_err(self.failed(index))?;
            let Starts { complete, end } = starts;
            if left == 0 || complete.len() >= left {
                self.offset = if left == 0 { end } else { complete[complete.len() - left] };
                self.parts.drain(..index);
                return Ok(());
            }
            left -= complete.len();
        }
        Ok(())
    }
}

struct Starts {
    /// Where each complete line's last record starts.
    complete: Vec<u64>,
    /// Where the last whole record ends.
    end: u64,
}

fn record_starts(file: &File) -> io::Result<Starts> {
    let size = file.metadata()?.len();
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, 0)?;
    let mut starts = Starts { complete: Vec::new(), end: 0 };
    for record in bytes.split_inclusive(|b| *b == b'\n').filter(|r| r.ends_with(b"\n")) {
        if parse(&record[..record.len() - 1]).is_none_or(|line| line.complete) {
            starts.complete.push(starts.end);
        }
        starts.end += record.len() as u64;
    }
    Ok(starts)
}
