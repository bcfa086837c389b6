//! Writing a log: whole records are appended to `current`, which is renamed to `current.1` and so
//! on when it is full.
//!
//! No descriptor is kept, for there are thousands of procs and most are asleep. After a failed
//! write the file is cut back to its last whole record. A crash may leave a record without its end,
//! which [`LogFile::open`] mends.

use super::record::{MAX_FILES, MAX_RECORD, Stream, encode, file_name, parse};
use kip_types::Limits;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// When a log's files change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotation {
    /// A file that has this many bytes is full. It may get larger by what one read brought.
    pub max_bytes: u64,
    /// How many files there are at most, the current one included; 1 to 16.
    pub files: usize,
}

impl Default for Rotation {
    fn default() -> Self {
        Rotation::of(&Limits::default())
    }
}

impl Rotation {
    /// As a proc's owner wants it.
    pub fn of(limits: &Limits) -> Rotation {
        Rotation { max_bytes: limits.log_bytes, files: limits.log_files as usize }
    }
}

/// What could not be written since it last worked.
#[derive(Debug, Default)]
struct Lost {
    records: u64,
    bytes: u64,
    why: String,
}

/// One proc's log, for writing.
#[derive(Debug)]
pub(super) struct LogFile {
    directory: PathBuf,
    rotation: Rotation,
    lost: Option<Lost>,
}

impl LogFile {
    /// Makes the directory when it is missing and mends what a crash may have left.
    pub(super) fn open(directory: &Path, rotation: Rotation) -> io::Result<LogFile> {
        match DirBuilder::new().mode(0o700).create(directory) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let rotation = Rotation { files: rotation.files.clamp(1, MAX_FILES), ..rotation };
        let log = LogFile { directory: directory.to_owned(), rotation, lost: None };
        log.mend()?;
        Ok(log)
    }

    /// Appends records. What cannot be written is counted; the log says so before the next that
    /// can.
    pub(super) fn append(&mut self, records: &[u8]) {
        if records.is_empty() {
            return;
        }
        let remark = self.lost.as_ref().map(Lost::remark).unwrap_or_default();
        let batch = [remark.as_slice(), records].concat();
        let (written, error) = match self.write(&batch) {
            Ok(()) => {
                self.lost = None;
                return;
            }
            Err(failure) => failure,
        };
        if written >= remark.len() {
            self.lost = None;
        }
        let rest = &batch[written.max(remark.len())..];
        if self.lost.is_none() {
            tracing::warn!(path = %self.directory.display(), error = %error, "cannot write a log; counting what is lost");
        }
        let lost = self.lost.get_or_insert_default();
        lost.records += rest.iter().filter(|b| **b == b'\n').count() as u64;
        lost.bytes += rest.len() as u64;
        lost.why = error.to_string();
    }

    /// Writes the batch, or fails with how much of it is in the file all the same, which is always
    /// whole records.
    fn write(&self, batch: &[u8]) -> Result<(), (usize, io::Error)> {
        let none = |e| (0, e);
        let mut file = self.current().map_err(none)?;
        let mut size = file.metadata().map_err(none)?.len();
        if size > 0 && size + batch.len() as u64 > self.rotation.max_bytes {
            self.rotate().map_err(none)?;
            file = self.current().map_err(none)?;
            size = 0;
        }
        let mut written = 0;
        while written < batch.len() {
            let error = match file.write(&batch[written..]) {
                Ok(0) => io::ErrorKind::WriteZero.into(),
                Ok(n) => {
                    written += n;
                    continue;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => e,
            };
            let whole = batch[..written].iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
            // Shortening needs no space. Should it fail all the same, readers step over the torn
            // record.
            let _ = file.set_len(size + whole as u64);
            return Err((whole, error));
        }
        Ok(())
    }

    fn current(&self) -> io::Result<File> {
        let path = self.directory.join(file_name(0));
        let nofollow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
        OpenOptions::new().read(true).append(true).create(true).mode(0o600).custom_flags(nofollow).open(path)
    }

    fn rotate(&self) -> io::Result<()> {
        let path = |age| self.directory.join(file_name(age));
        let oldest = self.rotation.files - 1;
        // Those that an earlier, larger setting left go too.
        for age in (oldest.max(1)..MAX_FILES).filter(|age| *age >= oldest) {
            remove_if_there(&path(age))?;
        }
        if oldest == 0 {
            return remove_if_there(&path(0));
        }
        for age in (0..oldest).rev() {
            match std::fs::rename(path(age), path(age + 1)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Ends the last record when it can be understood, cuts it off when not.
    fn mend(&self) -> io::Result<()> {
        let mut file = self.current()?;
        let size = file.metadata()?.len();
        let start = size.saturating_sub(MAX_RECORD as u64);
        let mut tail = vec![0; (size - start) as usize];
        file.read_exact_at(&mut tail, start)?;
        let whole = tail.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        match &tail[whole..] {
            [] => Ok(()),
            torn if parse(torn).is_some() => file.write_all(b"\n"),
            _ => file.set_len(start + whole as u64),
        }
    }
}

impl Lost {
    fn remark(&self) -> Vec<u8> {
        let text = format!("{} lines ({} bytes) were lost here: {}", self.records, self.bytes, self.why);
        let mut record = Vec::new();
        encode(&mut record, super::now_ms(), Stream::Kip, true, text.as_bytes());
        record
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
