//! Objects that are read from front to back: a header, then sealed chunks, of which the last is
//! marked.
//!
//! Owns the framing. Knows nothing of what the chunks mean. Reading takes bytes as they come, in
//! pieces of any size, and holds at most one chunk; a length is looked at only after it was
//! authenticated.
//!
//! ```text
//! Header --192 bytes--> Frame --28 bytes--> Payload --+--> Frame ..
//!                                                     +--last--> Done
//! ```

use crate::codec::{Codec, Packer, Unpacker};
use crate::ids::ProcId;
use crate::keys::{Keyring, NoKey};
use crate::seal::{self, Expect, HEADER, Header, ObjectKind, Opened, TAG, UnsealError};
use kip_types::Generation;

/// Most bytes that a chunk unpacks to.
pub const CHUNK_MAX: usize = 1 << 20;
/// Bytes of a frame in clear: section, codec, what ends, 0, payload, length.
const FRAME: usize = 12;

/// What is over with a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    Nothing = 0,
    /// Its section.
    Section = 1,
    /// All of it.
    Object = 2,
}

impl Ends {
    fn of(byte: u8) -> Option<Ends> {
        [Ends::Nothing, Ends::Section, Ends::Object].into_iter().find(|ends| *ends as u8 == byte)
    }
}

/// Writes an object.
#[derive(Debug)]
pub(crate) struct ChunkWriter {
    out: Vec<u8>,
    sealing: Opened,
    number: u64,
    packer: Packer,
}

impl ChunkWriter {
    pub(crate) fn begin(
        keys: &Keyring,
        kind: ObjectKind,
        proc: ProcId,
        generation: Generation,
    ) -> Result<ChunkWriter, NoKey> {
        let (out, sealing) = seal::begin(keys, kind, proc, generation)?;
        Ok(ChunkWriter { out, sealing, number: 0, packer: Packer::new() })
    }

    /// What its header says.
    pub(crate) fn header(&self) -> &Header {
        &self.sealing.header
    }

    /// Appends a chunk of at most [`CHUNK_MAX`] bytes.
    pub(crate) fn chunk(&mut self, section: u8, codec: Codec, bytes: &[u8], ends: Ends) {
        assert!(bytes.len() <= CHUNK_MAX, "chunks are cut before they are written");
        let (codec, payload) = self.packer.pack(codec, bytes);
        let at = self.out.len();
        self.out.extend_from_slice(&[section, codec as u8, ends as u8, 0]);
        for number in [payload.len() as u32, bytes.len() as u32] {
            self.out.extend_from_slice(&number.to_le_bytes());
        }
        let (key, tag) = (&self.sealing.key, &self.sealing.tag);
        key.seal(self.number * 2, tag, &mut self.out, at);
        let at = self.out.len();
        self.out.extend_from_slice(payload);
        key.seal(self.number * 2 + 1, tag, &mut self.out, at);
        self.number += 1;
    }

    /// What was written since the last call.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }
}

/// A chunk that was authenticated.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) section: u8,
    pub(crate) ends: Ends,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Await {
    Header,
    Frame,
    Payload { section: u8, codec: u8, ends: Ends, length: usize },
    Done,
}

/// Reads an object.
#[derive(Debug)]
pub(crate) struct ChunkReader {
    expect: Expect,
    opened: Option<Opened>,
    awaited: Await,
    /// Bytes of what is awaited.
    need: usize,
    /// Of what is awaited, what has come.
    held: Vec<u8>,
    number: u64,
    /// Where what is awaited begins.
    at: u64,
    unpacker: Unpacker,
}

impl ChunkReader {
    pub(crate) fn new(expect: Expect) -> ChunkReader {
        let (awaited, need, held) = (Await::Header, HEADER, Vec::new());
        ChunkReader { expect, opened: None, awaited, need, held, number: 0, at: 0, unpacker: Unpacker::new() }
    }

    pub(crate) fn header(&self) -> Option<&Header> {
        self.opened.as_ref().map(|opened| &opened.header)
    }

    /// Takes from the front of `bytes` what makes one more chunk. `None`: all were taken, and more
    /// are needed. After an error nothing more is read.
    pub(crate) fn next(&mut self, keys: &Keyring, bytes: &mut &[u8]) -> Result<Option<Chunk>, UnsealError> {
        loop {
            if let Await::Done = self.awaited {
                return if bytes.is_empty() { Ok(None) } else { Err(UnsealError::Trailing { at: self.at }) };
            }
            let missing = self.need - self.held.len();
            let (now, rest) = bytes.split_at(missing.min(bytes.len()));
            self.held.extend_from_slice(now);
            *bytes = rest;
            if self.held.len() < self.need {
                return Ok(None);
            }
            let held = std::mem::take(&mut self.held);
            if let Some(chunk) = self.step(keys, held)? {
                return Ok(Some(chunk));
            }
        }
    }

    /// Opens what was awaited, and says what is awaited next.
    fn step(&mut self, keys: &Keyring, mut held: Vec<u8>) -> Result<Option<Chunk>, UnsealError> {
        let damaged = |what| UnsealError::Damaged { what, at: self.at };
        let length = held.len() as u64;
        let mut chunk = None;
        let (awaited, need) = match (self.awaited, &self.opened) {
            (Await::Header, _) => {
                let header = held.as_slice().try_into().expect("as many as were awaited");
                self.opened = Some(seal::open(header, keys, &self.expect)?);
                (Await::Frame, FRAME + TAG)
            }
            (Await::Frame, Some(Opened { key, tag, .. })) => {
                let frame = key.open(self.number * 2, tag, &mut held).ok_or_else(|| damaged("chunk's frame"))?;
                let number = |at: usize| u32::from_le_bytes(frame[at..at + 4].try_into().expect("4 bytes"));
                let (payload, length) = (number(4) as usize, number(8) as usize);
                if payload > CHUNK_MAX || length > CHUNK_MAX {
                    return Err(UnsealError::Malformed { what: "chunk's frame" });
                }
                let ends = Ends::of(frame[2]).ok_or(UnsealError::Malformed { what: "chunk's frame" })?;
                (Await::Payload { section: frame[0], codec: frame[1], ends, length }, payload + TAG)
            }
            (Await::Payload { section, codec, ends, length }, Some(Opened { key, tag, .. })) => {
                let packed = key.open(self.number * 2 + 1, tag, &mut held).ok_or_else(|| damaged("chunk"))?;
                let bytes = self.unpacker.unpack(codec, packed, length);
                let bytes = bytes.ok_or(UnsealError::Malformed { what: "chunk" })?;
                chunk = Some(Chunk { section, ends, bytes });
                self.number += 1;
                if ends == Ends::Object { (Await::Done, 0) } else { (Await::Frame, FRAME + TAG) }
            }
            (Await::Frame | Await::Payload { .. } | Await::Done, _) => unreachable!("the header comes first"),
        };
        (self.awaited, self.need) = (awaited, need);
        self.at += length;
        Ok(chunk)
    }

    /// There is no more.
    pub(crate) fn finish(&self) -> Result<(), UnsealError> {
        match self.awaited {
            Await::Done => Ok(()),
            _ => Err(UnsealError::Truncated { at: self.at + self.held.len() as u64 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> Keyring {
        Keyring::generate("blue".parse().unwrap(), 1)
    }

    fn expect() -> Expect {
        Expect { kind: ObjectKind::Front, proc: None, generation: None, salt: None }
    }

    fn read(keys: &Keyring, bytes: &[u8], split: usize) -> Result<Vec<Chunk>, UnsealError> {
        let mut reader = ChunkReader::new(expect());
        let mut chunks = Vec::new();
        for mut part in bytes.chunks(split) {
            while let Some(chunk) = reader.next(keys, &mut part)? {
                chunks.push(chunk);
            }
        }
        reader.finish().map(|()| chunks)
    }

    fn made(keys: &Keyring) -> (Vec<u8>, Vec<usize>) {
        let mut writer = ChunkWriter::begin(keys, ObjectKind::Front, ProcId::random(), Generation(1)).unwrap();
        let mut ends = vec![writer.out.len()];
        for (index, length) in [5usize, 0, 300, 5].into_iter().enumerate() {
            let over = [Ends::Nothing, Ends::Section, Ends::Nothing, Ends::Object][index];
            writer.chunk(index as u8, Codec::Zstd, &vec![index as u8; length], over);
            ends.push(writer.out.len());
        }
        (writer.take(), ends)
    }

    #[test]
    fn chunks_come_back_however_they_arrive() {
        let keys = ring();
        let (bytes, _) = made(&keys);
        for split in [1, 2, 7, 31, 192, 10_000] {
            let chunks = read(&keys, &bytes, split).unwrap();
            let seen: Vec<_> = chunks.iter().map(|c| (c.section, c.bytes.len(), c.ends)).collect();
            assert_eq!(
                seen,
                [(0, 5, Ends::Nothing), (1, 0, Ends::Section), (2, 300, Ends::Nothing), (3, 5, Ends::Object)]
            );
        }
    }

    #[test]
    fn flipped_bits_cuts_additions_and_moved_chunks_are_found() {
        let keys = ring();
        let (bytes, ends) = made(&keys);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&keys, &bad, 64).is_err(), "bit {bit}");
        }
        for end in 0..bytes.len() {
            assert_eq!(read(&keys, &bytes[..end], 64).unwrap_err(), UnsealError::Truncated { at: end as u64 });
        }
        let longer = [&bytes[..], b"x"].concat();
        assert_eq!(read(&keys, &longer, 64).unwrap_err(), UnsealError::Trailing { at: bytes.len() as u64 });
        let chunk = |n: usize| &bytes[ends[n]..ends[n + 1]];
        let swapped = [&bytes[..ends[0]], chunk(3), chunk(1), chunk(2), chunk(0)].concat();
        let without = [&bytes[..ends[1]], &bytes[ends[2]..]].concat();
        let twice = [&bytes[..ends[1]], &bytes[ends[0]..]].concat();
        for bad in [swapped, without, twice] {
            assert!(matches!(read(&keys, &bad, 64), Err(UnsealError::Damaged { .. })));
        }
        let (other, others) = made(&keys);
        let grafted = [&bytes[..ends[3]], &other[others[3]..]].concat();
        assert!(matches!(read(&keys, &grafted, 64), Err(UnsealError::Damaged { what: "chunk's frame", .. })));
    }
}
