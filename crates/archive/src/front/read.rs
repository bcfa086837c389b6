//! Reading a front as it arrives: bytes in pieces of any size in, events in the order of need out.
//!
//! Holds one chunk, or a section that must be whole to be understood (manifest, sets, page table, files), which has a
//! limit.
//!
//! ```text
//! Manifest -> Sets -> Metadata* -> SetPages* -> PageTable -> Files -> End
//! ```

use super::{Manifest, Sets, decode_set_pages, decode_sets, section};
use crate::files::tree::Tree;
use crate::ids::ProcId;
use crate::keys::Keyring;
use crate::names::FrontRef;
use crate::seal::{Expect, Header, Kind, OpenError};
use crate::stream::{Chunk, ChunkReader};
use crate::table::PageTable;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// Most bytes of a section that is held whole.
const SECTION_MAX: usize = 256 << 20;

/// What has arrived.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// What the generation is: the first.
    Manifest(Box<Manifest>),
    /// The working sets.
    Sets(Sets),
    /// A part of a metadata file.
    Metadata {
        /// Its name.
        name: String,
        /// The next bytes of it.
        bytes: Vec<u8>,
        /// There are no more of it.
        is_complete: bool,
    },
    /// Pages of working sets, in order of need.
    SetPages {
        /// Number inside the sandbox.
        process: u32,
        /// Address, bytes.
        pages: Vec<(u64, Vec<u8>)>,
    },
    /// Where every page is.
    PageTable(PageTable),
    /// The filesystem difference.
    Files(Tree),
    /// The last.
    End,
}

/// Reads a front.
#[derive(Debug)]
pub struct FrontReader {
    keys: Arc<Keyring>,
    chunks: ChunkReader,
    manifest: Option<Manifest>,
    section: u8,
    /// Of a section that is held whole, what has come.
    held: Vec<u8>,
    /// Metadata files that are not complete: which of the manifest's, bytes left.
    awaited: VecDeque<(usize, u64)>,
    /// Pages that have come: process, address. The page table must not name others as being here.
    came: HashSet<(u32, u64)>,
    ready: VecDeque<Event>,
}

impl FrontReader {
    /// One for a front of this proc.
    pub fn new(keys: Arc<Keyring>, proc: ProcId, front: FrontRef) -> FrontReader {
        let expect = expect(Some(proc), Some(front));
        FrontReader {
            keys,
            chunks: ChunkReader::new(expect),
            manifest: None,
            section: section::MANIFEST,
            held: Vec::new(),
            awaited: VecDeque::new(),
            came: HashSet::new(),
            ready: VecDeque::new(),
        }
    }

    /// The header, once it has come.
    pub fn header(&self) -> Option<&Header> {
        self.chunks.header()
    }

    /// All events that some more bytes make.
    ///
    /// # Errors
    /// See [`OpenError`]; after one nothing more may be pushed, and nothing that came before it is complete.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<Event>, OpenError> {
        let mut events = Vec::new();
        while let Some(event) = self.next(&mut bytes)? {
            events.push(event);
        }
        Ok(events)
    }

    /// Takes from the front of `bytes` what makes one more event: for whoever wants to hold no more than that. `None`:
    /// all were taken, and more are needed.
    ///
    /// # Errors
    /// As [`FrontReader::push`].
    pub fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<Event>, OpenError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            match self.chunks.next(&self.keys, bytes)? {
                None => return Ok(None),
                Some(chunk) => self.chunk(chunk)?,
            }
        }
    }

    /// There are no more bytes.
    ///
    /// # Errors
    /// `Truncated`.
    pub fn finish(&self) -> Result<(), OpenError> {
        self.chunks.finish()
    }

    fn chunk(&mut self, chunk: Chunk) -> Result<(), OpenError> {
        let malformed = |what| OpenError::Malformed { what };
        if chunk.section < self.section || chunk.last != (chunk.section == section::END) {
            return Err(malformed("order of sections"));
        }
        if chunk.section > self.section {
            self.leave()?;
            let whole = [section::SETS, section::TABLE, section::FILES];
            if whole.iter().any(|whole| self.section < *whole && *whole < chunk.section) {
                return Err(malformed("order of sections"));
            }
            if self.section <= section::METADATA && chunk.section > section::METADATA {
                self.complete().ok_or(malformed("metadata"))?;
            }
            self.section = chunk.section;
        }
        match chunk.section {
            section::MANIFEST | section::SETS | section::TABLE | section::FILES => {
                if self.held.len() + chunk.bytes.len() > SECTION_MAX {
                    return Err(malformed("length of a section"));
                }
                self.held.extend_from_slice(&chunk.bytes);
            }
            section::METADATA => self.metadata(&chunk.bytes).ok_or(malformed("metadata"))?,
            section::SET_PAGES => {
                let pages = decode_set_pages(&chunk.bytes).ok_or(malformed("chunk of pages"))?;
                self.came.extend(pages.iter().map(|(address, _)| (chunk.extra, *address)));
                self.ready.push_back(Event::SetPages { process: chunk.extra, pages });
            }
            section::END => self.ready.push_back(Event::End),
            _ => return Err(malformed("section")),
        }
        Ok(())
    }

    /// A section is over.
    fn leave(&mut self) -> Result<(), OpenError> {
        let malformed = |what| OpenError::Malformed { what };
        let held = std::mem::take(&mut self.held);
        let packs = || self.manifest.as_ref().map_or(&[][..], |manifest| &manifest.packs);
        let event = match self.section {
            section::MANIFEST => {
                let manifest = manifest_of(&held, self.chunks.header())?;
                let files = manifest.metadata.iter().map(|file| file.size).enumerate();
                self.awaited = files.collect();
                self.manifest = Some(manifest.clone());
                Event::Manifest(Box::new(manifest))
            }
            section::SETS => Event::Sets(decode_sets(&held).ok_or(malformed("list of working sets"))?),
            section::TABLE => {
                let table = PageTable::decode(&held, packs()).ok_or(malformed("page table"))?;
                let is_here =
                    |process: &u32| table.in_front(*process).all(|page| self.came.contains(&(*process, page)));
                if !table.processes.keys().all(is_here) {
                    return Err(malformed("page table"));
                }
                Event::PageTable(table)
            }
            section::FILES => Event::Files(Tree::decode(&held, packs()).ok_or(malformed("list of files"))?),
            _ => return Ok(()),
        };
        self.ready.push_back(event);
        Ok(())
    }

    /// Cuts metadata into its files.
    fn metadata(&mut self, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() {
            let (file, left) = self.awaited.pop_front()?;
            let (now, rest) = bytes.split_at(left.min(bytes.len() as u64) as usize);
            bytes = rest;
            let left = left - now.len() as u64;
            self.part(file, now.to_vec(), left == 0);
            if left > 0 {
                self.awaited.push_front((file, left));
            }
        }
        Some(())
    }

    /// Files of no bytes at the end; all others must be there.
    fn complete(&mut self) -> Option<()> {
        while let Some((file, left)) = self.awaited.pop_front() {
            if left > 0 {
                return None;
            }
            self.part(file, Vec::new(), true);
        }
        Some(())
    }

    fn part(&mut self, file: usize, bytes: Vec<u8>, is_complete: bool) {
        let manifest = self.manifest.as_ref().expect("files are awaited once there is one");
        let name = manifest.metadata[file].name.clone();
        self.ready.push_back(Event::Metadata { name, bytes, is_complete });
    }
}

fn expect(proc: Option<ProcId>, front: Option<FrontRef>) -> Expect {
    let (generation, salt) = (front.map(|front| front.generation), front.map(|front| front.id.0));
    Expect { kind: Kind::Front, proc, generation, salt }
}

/// A manifest that says what its header says.
fn manifest_of(bytes: &[u8], header: Option<&Header>) -> Result<Manifest, OpenError> {
    let malformed = OpenError::Malformed { what: "manifest" };
    let manifest: Manifest = serde_json::from_slice(bytes).map_err(|_| malformed.clone())?;
    let is_its = header.is_some_and(|header| header.generation == manifest.generation);
    if is_its && manifest.is_sound() { Ok(manifest) } else { Err(malformed) }
}

/// The manifest from an object's first bytes, [`super::SUMMARY`] of them as a rule. `None`: more are needed. `proc` and
/// `front` are checked if they are given.
///
/// # Errors
/// See [`OpenError`].
pub fn summary(
    keys: &Keyring,
    proc: Option<ProcId>,
    front: Option<FrontRef>,
    mut bytes: &[u8],
) -> Result<Option<Manifest>, OpenError> {
    let mut chunks = ChunkReader::new(expect(proc, front));
    let mut held = Vec::new();
    while let Some(chunk) = chunks.next(keys, &mut bytes)? {
        // JSON says itself where it ends, but only the chunk behind it says that nothing is missing.
        if chunk.section != section::MANIFEST {
            return manifest_of(&held, chunks.header()).map(Some);
        }
        held.extend_from_slice(&chunk.bytes);
        if let Ok(manifest) = manifest_of(&held, chunks.header()) {
            return Ok(Some(manifest));
        }
        if held.len() > SECTION_MAX {
            return Err(OpenError::Malformed { what: "length of a section" });
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::front::{MetadataFile, Sizes};
    use crate::ids::FrontId;
    use crate::stream::ChunkWriter;
    use crate::table::Home;
    use kip_types::Generation;

    fn manifest(metadata: &[(&str, u64)]) -> Manifest {
        Manifest {
            generation: Generation(1),
            parent: None,
            frozen_at_ms: 0,
            engine: String::new(),
            kernel: String::new(),
            cpu_features: vec![],
            spec: serde_json::Value::Null,
            body: serde_json::Value::Null,
            metadata: metadata.iter().map(|(name, size)| MetadataFile { name: (*name).into(), size: *size }).collect(),
            packs: vec![],
            sizes: Sizes::default(),
        }
    }

    /// A front of these chunks, sealed by the realm's own key.
    fn read(chunks: &[(u8, &[u8])]) -> Result<usize, OpenError> {
        let keys = Arc::new(Keyring::generate("blue".parse().unwrap(), 1));
        let proc = ProcId::random();
        let mut writer = ChunkWriter::begin(&keys, Kind::Front, proc, Generation(1)).unwrap();
        for (section, bytes) in chunks {
            writer.chunk(*section, 1, Codec::Zstd, bytes, *section == section::END);
        }
        let front = FrontRef { generation: Generation(1), id: FrontId(writer.header().salt) };
        let mut reader = FrontReader::new(keys, proc, front);
        let events = reader.push(&writer.take())?;
        reader.finish().map(|()| events.len())
    }

    #[test]
    fn what_is_authentic_but_not_whole_is_refused() {
        let text = |metadata| serde_json::to_vec(&manifest(metadata)).unwrap();
        let (plain, with_file) = (text(&[]), text(&[("core-1.img", 3)]));
        let (sets, table, files) = ((2, &b"\0"[..]), (5, &b"\0\0"[..]), (6, &b"\0\0\0"[..]));
        let end = (7, &b""[..]);
        let malformed = |chunks: &[(u8, &[u8])]| {
            let refused = read(chunks).unwrap_err();
            assert!(matches!(refused, OpenError::Malformed { .. }), "{refused}");
        };
        assert_eq!(read(&[(1, &plain), sets, table, files, end]), Ok(5));
        assert_eq!(read(&[(1, &with_file), sets, (3, b"abc"), table, files, end]), Ok(6));
        malformed(&[(1, &with_file), sets, table, files, end]);
        malformed(&[(1, &with_file), sets, (3, b"ab"), table, files, end]);
        malformed(&[(1, &with_file), sets, (3, b"abcd"), table, files, end]);
        for missing in 0..4 {
            let mut chunks = vec![(1, &plain[..]), sets, table, files, end];
            chunks.remove(missing);
            malformed(&chunks);
        }
        malformed(&[(1, &plain), sets, files, table, end]);
        malformed(&[(1, &text(&[("../core", 0)])), sets, table, files, end]);
        malformed(&[(1, b"{}"), sets, table, files, end]);
        malformed(&[(1, &plain), sets, table, (9, b"")]);
        let truncated = read(&[(1, &plain), sets, table, files]);
        assert!(matches!(truncated, Err(OpenError::Truncated { .. })), "{truncated:?}");
        let mut elsewhere = PageTable::default();
        elsewhere.push(1, 0x1000, Home::Front);
        malformed(&[(1, &plain), sets, (5, &elsewhere.encode(&[])), files, end]);
    }
}
