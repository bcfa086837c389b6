//! A backup, or a template that is exported, as a stream of bytes: closed with a passphrase or a
//! key file, compressed, authenticated chunk by chunk.
//!
//! ```text
//! magic | length of the next, u32 LE | a ring made for this file, closed as exported keys are | stream of that kind
//! ```
//!
//! The magic is `KIPBACK1` or `KIPTMPL1` ([`Content`]). Owns these bytes; what they say in clear is
//! the caller's (a tar). The stream is that of every
//! other object: see docs/design/2026-11-22-archive.md, "Sealing". A reader gives nothing that was
//! not authenticated, and no end of file before the marked end: what was cut short is an error.

use crate::codec::Codec;
use crate::ids::ProcId;
use crate::keys::{Keyring, Wrap, WrapError};

use crate::seal::{Expect, ObjectKind, UnsealError};
use crate::stream::{CHUNK_MAX, ChunkReader, ChunkWriter, Ends};
use kip_types::{Generation, Realm};
use std::fmt;
use std::io::{self, Read, Write};

/// Most bytes of a closed ring; one with a single key has some 300.
const RING_MAX: u32 = 1 << 20;
/// Bytes that are read of the file at once.
const PIECE: usize = 256 << 10;

/// What a closed file has in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A data directory.
    Backup,
    /// A template.
    Template,
}

impl Content {
    const ALL: [Content; 2] = [Content::Backup, Content::Template];

    const fn magic(self) -> [u8; 8] {
        match self {
            Content::Backup => *b"KIPBACK1",
            Content::Template => *b"KIPTMPL1",
        }
    }

    const fn kind(self) -> ObjectKind {
        match self {
            Content::Backup => ObjectKind::Backup,
            Content::Template => ObjectKind::Template,
        }
    }

    /// The command that reads such a file.
    const fn reader(self) -> &'static str {
        match self {
            Content::Backup => "kip restore",
            Content::Template => "kip template import",
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Content::Backup => "backup",
            Content::Template => "template",
        })
    }
}

/// A file cannot be begun or opened.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The file.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Something else, or of another version.
    #[error("this is no {0} of Kip's")]
    NotOurs(Content),
    /// A file of Kip's with something else in it.
    #[error("this is a {0}, which `{reader} FILE` reads", reader = .0.reader())]
    Other(Content),
    /// What closes it does not, or is not what closed it.
    #[error("{}", said(*content, .error))]
    Wrap {
        /// What the file has in it.
        content: Content,
        /// Why not.
        error: WrapError,
    },
}

/// Of the file, not of keys.
fn said(content: Content, error: &WrapError) -> String {
    match error {
        WrapError::NotOurs => format!("this is no {content} of Kip's, or it is damaged"),
        WrapError::OtherMethod { method } => format!("the {content} is closed with a {method}: give that"),
        WrapError::Refused => {
            format!("the passphrase or key is not the one that closed the {content}, or the file is damaged")
        }
        other => other.to_string(),
    }
}

/// Writes a closed file. It is whole after [`BackupWriter::finish`] only.
#[derive(Debug)]
pub struct BackupWriter<W> {
    out: W,
    chunks: ChunkWriter,
    held: Vec<u8>,
}

impl<W: Write> BackupWriter<W> {
    /// Begins one. `now_ms`: Unix time in milliseconds.
    ///
    /// # Errors
    /// The writer's; `Wrap` for a passphrase that is too short.
    pub fn begin(mut out: W, content: Content, wrap: &Wrap<'_>, now_ms: u64) -> Result<BackupWriter<W>, BackupError> {
        let ring = Keyring::generate(Realm::default(), now_ms);
        let closed = ring.export(wrap).map_err(|error| BackupError::Wrap { content, error })?;
        let chunks = ChunkWriter::begin(&ring, content.kind(), ProcId([0; 16]), Generation(0));
        let chunks = chunks.expect("a ring that was just made seals");
        out.write_all(&content.magic())?;
        out.write_all(&u32::try_from(closed.len()).expect("a ring is short").to_le_bytes())?;
        out.write_all(&closed)?;
        Ok(BackupWriter { out, chunks, held: Vec::with_capacity(CHUNK_MAX) })
    }

    fn chunk(&mut self, ends: Ends) -> io::Result<()> {
        self.chunks.chunk(0, Codec::Zstd, &self.held, ends);
        self.held.clear();
        self.out.write_all(&self.chunks.take())
    }

    /// Marks the end, and gives the writer back.
    ///
    /// # Errors
    /// The writer's.
    pub fn finish(mut self) -> io::Result<W> {
        self.chunk(Ends::Object)?;
        self.out.flush()?;
        Ok(self.out)
    }
}

impl<W: Write> Write for BackupWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.held.len() == CHUNK_MAX {
            self.chunk(Ends::Nothing)?;
        }
        let count = bytes.len().min(CHUNK_MAX - self.held.len());
        self.held.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    /// Of the writer below; what is no whole chunk stays here.
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Reads a closed file.
#[derive(Debug)]
pub struct BackupReader<R> {
    from: R,
    ring: Keyring,
    chunks: ChunkReader,
    /// What came of the file and is not opened yet, from `next` on.
    sealed: Vec<u8>,
    next: usize,
    /// What is opened and not given yet, from `given` on.
    opened: Vec<u8>,
    given: usize,
    over: bool,
}

impl<R: Read> BackupReader<R> {
    /// Opens one.
    ///
    /// # Errors
    /// See [`BackupError`].
    pub fn open(mut from: R, content: Content, wrap: &Wrap<'_>) -> Result<BackupReader<R>, BackupError> {
        let short = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => BackupError::NotOurs(content),
            _ => e.into(),
        };
        let mut head = [0; 12];
        from.read_exact(&mut head).map_err(short)?;
        let length = u32::from_le_bytes(head[8..].try_into().expect("4 bytes"));
        match Content::ALL.into_iter().find(|known| known.magic() == head[..8]) {
            Some(found) if found == content && length <= RING_MAX => {}
            Some(found) if found != content => return Err(BackupError::Other(found)),
            _ => return Err(BackupError::NotOurs(content)),
        }
        let mut closed = vec![0; length as usize];
        from.read_exact(&mut closed).map_err(short)?;
        let ring = Keyring::import(&closed, wrap).map_err(|error| BackupError::Wrap { content, error })?;
        let expect = Expect { kind: content.kind(), proc: None, generation: None, salt: None };
        Ok(BackupReader {
            from,
            ring,
            chunks: ChunkReader::new(expect),
            sealed: Vec::new(),
            next: 0,
            opened: Vec::new(),
            given: 0,
            over: false,
        })
    }

    /// The next opened bytes are there, or it is over.
    fn fill(&mut self) -> io::Result<()> {
        let damaged = |e: UnsealError| io::Error::new(io::ErrorKind::InvalidData, e);
        while self.given == self.opened.len() && !self.over {
            let mut rest = &self.sealed[self.next..];
            let chunk = self.chunks.next(&self.ring, &mut rest).map_err(damaged)?;
            self.next = self.sealed.len() - rest.len();
            if let Some(chunk) = chunk {
                (self.opened, self.given) = (chunk.bytes, 0);
                continue;
            }
            self.sealed.resize(PIECE, 0);
            let count = self.from.read(&mut self.sealed)?;
            self.sealed.truncate(count);
            self.next = 0;
            if count == 0 {
                self.chunks.finish().map_err(damaged)?;
                self.over = true;
            }
        }
        Ok(())
    }
}

impl<R: Read> Read for BackupReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.fill()?;
        let rest = &self.opened[self.given..];
        let count = rest.len().min(to.len());
        to[..count].copy_from_slice(&rest[..count]);
        self.given += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; 32] = [7; 32];

    fn made(bytes: &[u8]) -> Vec<u8> {
        let mut writer = BackupWriter::begin(Vec::new(), Content::Backup, &Wrap::Key(&KEY), 1).unwrap();
        writer.write_all(bytes).unwrap();
        writer.finish().unwrap()
    }

    fn read(sealed: &[u8]) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let reader = BackupReader::open(sealed, Content::Backup, &Wrap::Key(&KEY));
        reader.map_err(io::Error::other)?.read_to_end(&mut bytes).map(|_| bytes)
    }

    #[test]
    fn what_was_written_comes_back() {
        let long: Vec<u8> = (0..3 * CHUNK_MAX + 5).map(|n| (n * n % 251) as u8).collect();
        for bytes in [&b""[..], b"short", &long[..CHUNK_MAX], &long] {
            assert!(read(&made(bytes)).unwrap() == bytes, "{} bytes", bytes.len());
        }
    }

    // promise backup: a flipped bit, a cut or an addition anywhere, and a wrong passphrase or key,
    //   are one line, and nothing is left
    // held by: this, `kip_archive::backup::tests::it_opens_with_what_closed_it_only`,
    //   `tests/test_backup.py::test_what_cannot_be_is_one_line`
    #[test]
    fn a_flipped_bit_a_cut_and_an_addition_are_found() {
        let sealed = made(&[1; 5000]);
        for byte in 0..sealed.len() {
            let mut bad = sealed.clone();
            bad[byte] ^= 1;
            assert!(read(&bad).is_err(), "byte {byte}");
            assert!(read(&sealed[..byte]).is_err(), "cut at {byte}");
        }
        assert!(read(&[&sealed[..], b"x"].concat()).is_err());
    }

    #[test]
    fn it_opens_with_what_closed_it_only() {
        let sealed = made(b"x");
        let opened = |content, wrap: &Wrap<'_>, bytes: &[u8]| BackupReader::open(bytes, content, wrap).unwrap_err();
        let said = |wrap: &Wrap<'_>, bytes: &[u8]| opened(Content::Backup, wrap, bytes).to_string();
        assert!(said(&Wrap::Key(&[8; 32]), &sealed).contains("not the one that closed the backup"));
        assert!(said(&Wrap::Passphrase("correct horse battery"), &sealed).contains("closed with a key file"));
        assert!(said(&Wrap::Key(&KEY), b"something else altogether").contains("no backup of Kip's"));
        let other = opened(Content::Template, &Wrap::Key(&KEY), &sealed).to_string();
        assert_eq!(other, "this is a backup, which `kip restore FILE` reads");
        // Also where only the beginning says so.
        let renamed = [&Content::Template.magic()[..], &sealed[8..]].concat();
        let mut reader = BackupReader::open(&renamed[..], Content::Template, &Wrap::Key(&KEY)).unwrap();
        assert!(reader.read_to_end(&mut Vec::new()).unwrap_err().to_string().contains("the object is a backup"));
        let begun = BackupWriter::begin(Vec::new(), Content::Backup, &Wrap::Passphrase("short"), 1);
        let short = begun.unwrap_err();
        assert!(short.to_string().contains("too short"));
        assert!(!sealed.windows(4).any(|w| w == [7; 4]));
    }
}
