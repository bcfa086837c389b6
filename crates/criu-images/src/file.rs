//! One CRIU image: two magic numbers, then entries, each a length and a protobuf message.
//! [`crate::Images`] has all of a tree.
//!
//! Source: CRIU's documentation, "Images".

use crate::wire::{Malformed, Message};
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// First magic number of every image but the inventory, which has only its own.
const COMMON_MAGIC: u32 = 0x5456_4319;
/// The same of files about CRIU itself, such as its statistics.
const SERVICE_MAGIC: u32 = 0x5510_5940;

/// An image file's contents.
#[derive(Debug, Clone)]
pub struct CheckpointImage {
    /// The file.
    pub path: PathBuf,
    head: Vec<u8>,
    /// Its entries.
    pub entries: Vec<Message>,
}

/// An image file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointImageError {
    /// The file system's word.
    #[error("image {path} cannot be read or written")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is not what CRIU writes.
    #[error("image {path} is damaged")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// Where.
        #[source]
        source: Malformed,
    },
}

impl CheckpointImage {
    /// So much of a file has its first entry, bytes.
    const FIRST_WITHIN: u64 = 64 << 10;

    pub(crate) fn new(path: PathBuf, entries: Vec<Message>) -> CheckpointImage {
        let head = [COMMON_MAGIC.to_le_bytes(), 1u32.to_le_bytes()].concat();
        CheckpointImage { path, head, entries }
    }

    /// Reads a file of nothing but entries.
    pub fn read(path: &Path) -> Result<CheckpointImage, CheckpointImageError> {
        let bytes = fs::read(path).map_err(|source| CheckpointImageError::Io { path: path.to_owned(), source })?;
        Self::parse(path, &bytes).map_err(|source| CheckpointImageError::Damaged { path: path.to_owned(), source })
    }

    /// The first entry of a file in which contents without a form may follow.
    ///
    /// # Errors
    /// The file system's; what is there is no entry.
    pub(crate) fn first_of_file(path: &Path) -> Result<Option<Message>, CheckpointImageError> {
        let mut bytes = Vec::new();
        let read = fs::File::open(path).and_then(|file| file.take(Self::FIRST_WITHIN).read_to_end(&mut bytes));
        read.map_err(|source| CheckpointImageError::Io { path: path.to_owned(), source })?;
        Self::first(path, &bytes)
    }

    /// The same of the file's bytes.
    pub(crate) fn first(path: &Path, bytes: &[u8]) -> Result<Option<Message>, CheckpointImageError> {
        let Some(length) = bytes.get(8..12) else { return Ok(None) };
        let end = 12usize.saturating_add(u32::from_le_bytes(length.try_into().expect("4 bytes")) as usize);
        let cut = CheckpointImage::parse(path, bytes.get(..end).unwrap_or(bytes));
        let image = cut.map_err(|source| CheckpointImageError::Damaged { path: path.to_owned(), source })?;
        Ok(image.entries.into_iter().next())
    }

    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<CheckpointImage, Malformed> {
        let word = |at: usize| -> Result<u32, Malformed> {
            let four = bytes.get(at..at + 4).ok_or(Malformed { at })?;
            Ok(u32::from_le_bytes(four.try_into().expect("4 bytes")))
        };
        let mut at = if matches!(word(0)?, COMMON_MAGIC | SERVICE_MAGIC) { 8 } else { 4 };
        let head = bytes.get(..at).ok_or(Malformed { at })?.to_vec();
        let mut entries = Vec::new();
        while at < bytes.len() {
            let len = word(at)? as usize;
            at += 4;
            let entry = bytes.get(at..at + len).ok_or(Malformed { at })?;
            entries.push(Message::decode(entry).map_err(|e| Malformed { at: at + e.at })?);
            at += len;
        }
        Ok(CheckpointImage { path: path.to_owned(), head, entries })
    }

    /// Its bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = self.head.clone();
        for entry in &self.entries {
            let bytes = entry.encode();
            out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            out.extend_from_slice(&bytes);
        }
        out
    }

    /// What an error of it becomes.
    pub fn damaged(&self) -> impl Fn(Malformed) -> CheckpointImageError + use<> {
        let path = self.path.clone();
        move |source| CheckpointImageError::Damaged { path: path.clone(), source }
    }
}

/// An image in which contents without a form follow entries, read from its start.
#[derive(Debug)]
pub struct Mixed<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Mixed<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Mixed<'a>, Malformed> {
        let mut mixed = Mixed { bytes, at: 0 };
        if matches!(mixed.word()?, COMMON_MAGIC | SERVICE_MAGIC) {
            mixed.word()?;
        }
        Ok(mixed)
    }

    /// The entry that comes next; none at the end.
    ///
    /// # Errors
    /// What is there is no entry.
    pub fn entry(&mut self) -> Result<Option<Message>, Malformed> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let length = self.word()? as usize;
        let start = self.at;
        Message::decode(self.contents(length)?).map(Some).map_err(|e| Malformed { at: start + e.at })
    }

    /// So many bytes that come next.
    ///
    /// # Errors
    /// There are fewer.
    pub fn contents(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at.checked_add(length).ok_or(Malformed { at: self.at })?;
        let found = self.bytes.get(self.at..end).ok_or(Malformed { at: self.at })?;
        self.at = end;
        Ok(found)
    }

    /// Where the next byte is, and how many there are from there.
    pub(crate) fn rest(&self) -> (u64, u64) {
        (self.at as u64, (self.bytes.len() - self.at) as u64)
    }

    fn word(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.contents(4)?.try_into().expect("4 bytes")))
    }
}
