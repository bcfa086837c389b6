//! The files of events in a data directory: `events.jsonl`, an event a line, and
//! `events.old.jsonl`, what that was before it became too long. Owns both. Never syncs one: what
//! the machine's end takes is no proc's state.
//!
//! A line that a crash cut short is skipped by the next reader.

use kip_types::api::Event;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

const FILE: &str = "events.jsonl";
const OLD: &str = "events.old.jsonl";
/// A file that is longer is the old one from then on, bytes.
const LONGEST: u64 = 1 << 20;
/// Events that wait to be written; more are not written.
const WAITING: usize = 4096;

/// The newest `most` events of both files, oldest first.
pub fn read(data: &Path, most: usize) -> VecDeque<Event> {
    let mut all = VecDeque::new();
    for name in [OLD, FILE] {
        // Twice the longest, for a file that anything else made long.
        let text = read_end(&data.join(name), 2 * LONGEST).unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(file = name, %error, "events of earlier daemons cannot be read");
            }
            Vec::new()
        });
        for event in text.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice::<Event>(line).ok()) {
            // Ids go up, also where a file was put back from elsewhere.
            if all.back().is_none_or(|newest: &Event| newest.id < event.id) {
                all.push_back(event);
            }
        }
    }
    let over = all.len().saturating_sub(most);
    drop(all.drain(..over));
    all
}

fn read_end(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The thread that writes, and the way to it.
#[derive(Debug)]
pub struct EventWriter(Mutex<Option<(SyncSender<Event>, JoinHandle<()>)>>);

impl EventWriter {
    /// None if there can be no such thread.
    pub fn start(data: &Path) -> Option<EventWriter> {
        let (sender, receiver) = sync_channel(WAITING);
        let data = data.to_owned();
        let thread = std::thread::Builder::new().name("events".to_owned()).spawn(move || write_all(&data, &receiver));
        let thread = thread.inspect_err(|error| tracing::warn!(%error, "events are not kept on disk")).ok()?;
        Some(EventWriter(Mutex::new(Some((sender, thread)))))
    }

    /// Has an event written. Never waits.
    pub fn write(&self, event: Event) {
        if let Some((sender, _)) = &*self.0.lock() {
            let _ = sender.try_send(event);
        }
    }

    /// Returns when all is written.
    pub fn close(&self) {
        // An event that comes meanwhile does not wait for the disk.
        let taken = self.0.lock().take();
        if let Some((sender, thread)) = taken {
            drop(sender);
            let _ = thread.join();
        }
    }
}

fn write_all(data: &Path, events: &Receiver<Event>) {
    let mut log = Log { data: data.to_owned(), open: None, told: false };
    while let Ok(first) = events.recv() {
        let mut text = Vec::new();
        for event in std::iter::once(first).chain(events.try_iter().take(WAITING)) {
            if serde_json::to_writer(&mut text, &event).is_ok() {
                text.push(b'\n');
            }
        }
        log.append(&text);
    }
}

struct Log {
    data: PathBuf,
    open: Option<(File, u64)>,
    /// It was told that writing fails.
    told: bool,
}

impl Log {
    fn append(&mut self, text: &[u8]) {
        let written = self.ready().and_then(|(file, length)| {
            file.write_all(text)?;
            *length += text.len() as u64;
            Ok(())
        });
        self.told &= written.is_err();
        if let Err(error) = written {
            // The next one begins on a line of its own.
            self.open = None;
            if !std::mem::replace(&mut self.told, true) {
                tracing::info!(%error, "events are not kept on disk for now");
            }
        }
    }

    /// The file to append to, with its length.
    fn ready(&mut self) -> io::Result<&mut (File, u64)> {
        let path = self.data.join(FILE);
        if self.open.as_ref().is_some_and(|(_, length)| *length > LONGEST) {
            self.open = None;
            fs::rename(&path, self.data.join(OLD))?;
        }
        match &mut self.open {
            Some(open) => Ok(open),
            closed => {
                let mut file = OpenOptions::new().append(true).read(true).create(true).mode(0o600).open(&path)?;
                let mut length = file.metadata()?.len();
                if length > 0 {
                    file.seek(SeekFrom::End(-1))?;
                    let mut last = [0];
                    file.read_exact(&mut last)?;
                    if last != *b"\n" {
                        file.write_all(b"\n")?;
                        length += 1;
                    }
                }
                Ok(closed.insert((file, length)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::api::EventKind;

    fn event(id: u64, detail: &str) -> Event {
        Event { id, at_ms: id, name: None, kind: EventKind::Ready, detail: detail.to_owned() }
    }

    fn append(log: &mut Log, event: &Event) {
        log.append(format!("{}\n", serde_json::to_string(event).unwrap()).as_bytes());
    }

    #[test]
    fn what_a_crash_cut_short_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log { data: dir.path().to_owned(), open: None, told: false };
        append(&mut log, &event(1, "whole"));
        log.append(b"{\"id\":2,\"at_ms");
        let mut log = Log { data: dir.path().to_owned(), open: None, told: false };
        append(&mut log, &event(3, "after"));
        let ids: Vec<u64> = read(dir.path(), 10).iter().map(|e| e.id).collect();
        assert_eq!(ids, [1, 3]);
        assert_eq!(read(dir.path(), 1)[0].id, 3);
        assert!(read(Path::new("/no/such/directory"), 10).is_empty());
    }

    #[test]
    fn an_event_of_another_kip_keeps_its_word() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log { data: dir.path().to_owned(), open: None, told: false };
        log.append(b"{\"id\":1,\"at_ms\":1,\"name\":\"web\",\"kind\":\"divined\",\"detail\":\"\"}\n");
        append(&mut log, &event(2, "ours"));
        let kinds: Vec<_> = read(dir.path(), 10).into_iter().map(|e| e.kind).collect();
        assert_eq!(kinds, [EventKind::Unknown("divined".to_owned()), EventKind::Ready]);
    }

    #[test]
    fn the_files_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Log { data: dir.path().to_owned(), open: None, told: false };
        let long = "x".repeat(10_000);
        (1..=350).for_each(|id| append(&mut log, &event(id, &long)));
        let size = |name: &str| fs::metadata(dir.path().join(name)).unwrap().len();
        let most = LONGEST + 11_000;
        assert!(size(FILE) <= most && size(OLD) <= most, "{} {}", size(FILE), size(OLD));
        let all = read(dir.path(), 4096);
        assert!(all.len() > 100 && all.back().unwrap().id == 350, "{}", all.len());
        assert!(all.iter().zip(all.iter().skip(1)).all(|(a, b)| a.id + 1 == b.id));
    }
}
