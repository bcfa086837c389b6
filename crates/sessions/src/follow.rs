//! The lines of a log, as they come, for any number of clients.
//!
//! A follower has a thread only while it reads what is there. In between it looks ten times a
//! second whether the log has grown, by one system call.

use kip_engine::blocking::blocking;
use kip_logs::{FOLLOW_POLL, From, LogReader, LogRecord, ReadError};
use std::path::PathBuf;
use tokio::task::JoinHandle;

/// A place in a log.
#[derive(Debug)]
pub struct Follower(ReaderState);

#[derive(Debug)]
enum ReaderState {
    /// At the end of what there was.
    End(LogReader),
    Reading(JoinHandle<(LogReader, Result<Vec<LogRecord>, ReadError>)>),
    /// Reading has panicked.
    Lost,
}

impl Follower {
    /// Opens a log: later lines are not missed once this has returned.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn open(directory: PathBuf, from: From) -> Result<Follower, ReadError> {
        let reader = blocking(move || LogReader::open(&directory, from)).await?;
        Ok(Follower(ReaderState::End(reader)))
    }

    /// The next lines that are there, none at the end of the log. May be dropped: the next call
    /// goes on.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn there(&mut self) -> Result<Vec<LogRecord>, ReadError> {
        if let ReaderState::End(_) = &self.0
            && let ReaderState::End(mut reader) = std::mem::replace(&mut self.0, ReaderState::Lost)
        {
            self.0 = ReaderState::Reading(tokio::task::spawn_blocking(move || {
                let lines = reader.next_lines();
                (reader, lines)
            }));
        }
        let ReaderState::Reading(reading) = &mut self.0 else { return Ok(Vec::new()) };
        match reading.await {
            Ok((reader, lines)) => {
                self.0 = ReaderState::End(reader);
                lines
            }
            Err(_) => {
                self.0 = ReaderState::Lost;
                Ok(Vec::new())
            }
        }
    }

    /// Waits for the next lines; none when the log has gone with its proc. May be dropped as
    /// [`Follower::there`] may.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn next(&mut self) -> Result<Vec<LogRecord>, ReadError> {
        loop {
            if let ReaderState::End(reader) = &self.0
                && !reader.has_grown()
            {
                if reader.gone() {
                    return Ok(Vec::new());
                }
                tokio::time::sleep(FOLLOW_POLL).await;
                continue;
            }
            let lines = self.there().await?;
            if !lines.is_empty() || matches!(self.0, ReaderState::Lost) {
                return Ok(lines);
            }
            // What there is of the next line is not a whole one.
            tokio::time::sleep(FOLLOW_POLL).await;
        }
    }
}
