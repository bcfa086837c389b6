//! Reading a front as it arrives: bytes in pieces of any size in, events in the order of need out.
//!
//! Holds one chunk, or a section that must be whole to be understood (manifest, sets, page table,
//! files), which has a limit.
//!
//! ```text
//! Manifest -> Sets -> PageTable -> Files -> Metadata* -> EagerPages* -> Eager -> SetPages* -> End
//! ```
//!
//! Each event comes as soon as its bytes have. From `Files` on it is known where everything is,
//! from `Eager` on all is there that cannot wait for a fault, at `End` every page has come that the
//! page table says is in the front.

use super::{FrontManifest, PageList, SECTION_MAX, WorkingSets, decode_pages, decode_sets, section};
use crate::files::tree::Files;
use crate::ids::ProcId;
use crate::keys::Keyring;
use crate::names::FrontRef;
use crate::seal::{Expect, Header, ObjectKind, UnsealError};
use crate::stream::{Chunk, ChunkReader, Ends};
use crate::table::{Found, PageTable, Space};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// What has arrived.
#[derive(Debug, Clone, PartialEq)]
pub enum FrontEvent {
    /// What the generation is: the first.
    Manifest(Box<FrontManifest>),
    /// The working sets.
    Sets(WorkingSets),
    /// Where every page is.
    PageTable(PageTable),
    /// The filesystem difference.
    Files(Files),
    /// A part of a metadata file.
    Metadata {
        /// Its name.
        name: String,
        /// The next bytes of it.
        bytes: Vec<u8>,
        /// There are no more of it.
        is_complete: bool,
    },
    /// Pages that cannot wait for a fault.
    EagerPages {
        /// Whose.
        space: Space,
        /// Address, bytes.
        pages: Vec<(u64, Vec<u8>)>,
    },
    /// All eager pages have come.
    Eager,
    /// Pages of working sets, in order of need.
    SetPages {
        /// Whose.
        space: Space,
        /// Address, bytes.
        pages: Vec<(u64, Vec<u8>)>,
    },
    /// The last.
    End,
}

/// Reads a front.
#[derive(Debug)]
pub struct FrontReader {
    keys: Arc<Keyring>,
    chunks: ChunkReader,
    manifest: Option<FrontManifest>,
    section: u8,
    /// Of a section that is held whole, what has come.
    held: Vec<u8>,
    /// Metadata files that are not complete: which of the manifest's, bytes left.
    awaited: VecDeque<(usize, u64)>,
    /// What the page table says of pages, until all have come.
    table: PageTable,
    /// Pages that have come.
    came: HashSet<(Space, u64)>,
    ready: VecDeque<FrontEvent>,
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
            table: PageTable::default(),
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
    /// See [`UnsealError`]; after one nothing more may be pushed, and nothing that came before it
    /// is complete.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<FrontEvent>, UnsealError> {
        let mut events = Vec::new();
        while let Some(event) = self.next(&mut bytes)? {
            events.push(event);
        }
        Ok(events)
    }

    /// Takes from the front of `bytes` what makes one more event: for a caller that wants to hold
    /// no more than one. `None`: all bytes were taken, and more are needed.
    ///
    /// # Errors
    /// As [`FrontReader::push`].
    pub fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<FrontEvent>, UnsealError> {
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
    pub fn finish(&self) -> Result<(), UnsealError> {
        self.chunks.finish()
    }

    fn chunk(&mut self, chunk: Chunk) -> Result<(), UnsealError> {
        let malformed = |what| UnsealError::Malformed { what };
        if chunk.section != self.section || (chunk.ends == Ends::Object) != (chunk.section == section::END) {
            return Err(malformed("order of sections"));
        }
        match chunk.section {
            section::MANIFEST | section::SETS | section::TABLE | section::FILES => {
                if self.held.len() + chunk.bytes.len() > SECTION_MAX {
                    return Err(malformed("length of a section"));
                }
                self.held.extend_from_slice(&chunk.bytes);
            }
            section::METADATA => self.metadata(&chunk.bytes).ok_or(malformed("metadata"))?,
            section::EAGER | section::SET_PAGES if !chunk.bytes.is_empty() => {
                let (space, pages) = self.pages(&chunk.bytes).ok_or(malformed("chunk of pages"))?;
                self.ready.push_back(match chunk.section {
                    section::EAGER => FrontEvent::EagerPages { space, pages },
                    _ => FrontEvent::SetPages { space, pages },
                });
            }
            section::END => self.ready.push_back(FrontEvent::End),
            _ => {}
        }
        if chunk.ends == Ends::Section {
            self.leave()?;
            self.section += 1;
        }
        Ok(())
    }

    /// Pages of which the table says that they are somewhere, each once.
    fn pages(&mut self, bytes: &[u8]) -> Option<(Space, PageList)> {
        let (space, pages) = decode_pages(bytes)?;
        for (address, _) in &pages {
            let is_somewhere = matches!(self.table.find(space, *address), Found::Front | Found::Block(_));
            if !is_somewhere || !self.came.insert((space, *address)) {
                return None;
            }
        }
        Some((space, pages))
    }

    /// A section is over.
    fn leave(&mut self) -> Result<(), UnsealError> {
        let malformed = |what| UnsealError::Malformed { what };
        let held = std::mem::take(&mut self.held);
        let packs = || self.manifest.as_ref().map_or(&[][..], |manifest| &manifest.packs);
        let event = match self.section {
            section::MANIFEST => {
                let manifest = manifest_of(&held, self.chunks.header())?;
                let files = manifest.metadata.iter().map(|file| file.size).enumerate();
                self.awaited = files.collect();
                self.manifest = Some(manifest.clone());
                FrontEvent::Manifest(Box::new(manifest))
            }
            section::SETS => FrontEvent::Sets(decode_sets(&held).ok_or(malformed("list of working sets"))?),
            section::TABLE => {
                self.table = PageTable::decode(&held, packs()).ok_or(malformed("page table"))?;
                FrontEvent::PageTable(self.table.clone())
            }
            section::FILES => FrontEvent::Files(Files::decode(&held, packs()).ok_or(malformed("list of files"))?),
            section::METADATA => return self.complete().ok_or(malformed("metadata")),
            section::EAGER => FrontEvent::Eager,
            _ => {
                let table = std::mem::take(&mut self.table);
                let came = std::mem::take(&mut self.came);
                let is_whole = table.in_front().all(|page| came.contains(&page));
                return if is_whole { Ok(()) } else { Err(malformed("page table")) };
            }
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
        self.ready.push_back(FrontEvent::Metadata { name, bytes, is_complete });
    }
}

fn expect(proc: Option<ProcId>, front: Option<FrontRef>) -> Expect {
    let (generation, salt) = (front.map(|front| front.generation), front.map(|front| front.id.0));
    Expect { kind: ObjectKind::Front, proc, generation, salt }
}

/// A manifest that says what its header says.
fn manifest_of(bytes: &[u8], header: Option<&Header>) -> Result<FrontManifest, UnsealError> {
    let malformed = UnsealError::Malformed { what: "manifest" };
    let manifest: FrontManifest = serde_json::from_slice(bytes).map_err(|_| malformed.clone())?;
    let is_its = header.is_some_and(|header| header.generation == manifest.generation);
    if is_its && manifest.fault().is_none() { Ok(manifest) } else { Err(malformed) }
}

/// The manifest from an object's first bytes, [`super::SUMMARY`] of them as a rule. `None`: more
/// are needed. `proc` and `front` are checked if they are given.
///
/// # Errors
/// See [`UnsealError`].
pub fn summary(
    keys: &Keyring,
    proc: Option<ProcId>,
    front: Option<FrontRef>,
    mut bytes: &[u8],
) -> Result<Option<FrontManifest>, UnsealError> {
    let mut chunks = ChunkReader::new(expect(proc, front));
    let mut held = Vec::new();
    while let Some(chunk) = chunks.next(keys, &mut bytes)? {
        if chunk.section != section::MANIFEST || held.len() + chunk.bytes.len() > SECTION_MAX {
            return Err(UnsealError::Malformed { what: "manifest" });
        }
        held.extend_from_slice(&chunk.bytes);
        if chunk.ends == Ends::Section {
            return manifest_of(&held, chunks.header()).map(Some);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::front::{MetadataFile, Sizes, encode_pages};
    use crate::ids::FrontId;
    use crate::stream::ChunkWriter;
    use crate::table::Home;
    use kip_types::Generation;

    fn manifest(metadata: &[(&str, u64)]) -> FrontManifest {
        FrontManifest {
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

    /// A front of these chunks, each its section's last but those with `goes_on`, sealed by the
    /// realm's own key.
    fn read(chunks: &[(u8, &[u8])], goes_on: &[usize]) -> Result<usize, UnsealError> {
        let keys = Arc::new(Keyring::generate("blue".parse().unwrap(), 1));
        let proc = ProcId::random();
        let mut writer = ChunkWriter::begin(&keys, ObjectKind::Front, proc, Generation(1)).unwrap();
        for (index, (section, bytes)) in chunks.iter().enumerate() {
            let ends = match *section {
                section::END => Ends::Object,
                _ if goes_on.contains(&index) => Ends::Nothing,
                _ => Ends::Section,
            };
            writer.chunk(*section, Codec::Zstd, bytes, ends);
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
        fn front(manifest: &[u8]) -> Vec<(u8, &[u8])> {
            vec![(1, manifest), (2, b"\0"), (3, b"\0\0"), (4, b"\0"), (5, b""), (6, b""), (7, b""), (8, b"")]
        }
        let malformed = |chunks: &[(u8, &[u8])], goes_on: &[usize]| {
            let refused = read(chunks, goes_on).unwrap_err();
            assert!(matches!(refused, UnsealError::Malformed { .. }), "{refused}");
        };
        let with = |at: usize, chunk: &'static [u8]| {
            let mut chunks = front(&with_file);
            chunks[at].1 = chunk;
            chunks
        };
        assert_eq!(read(&front(&plain), &[]), Ok(6));
        assert_eq!(read(&with(4, b"abc"), &[]), Ok(7));
        for short in [&b""[..], b"ab", b"abcd"] {
            let mut chunks = front(&with_file);
            chunks[4].1 = short;
            malformed(&chunks, &[]);
        }
        for missing in 0..7 {
            let mut chunks = front(&plain);
            chunks.remove(missing);
            malformed(&chunks, &[]);
            malformed(&front(&plain), &[missing]);
            let mut chunks = front(&plain);
            chunks.swap(missing, missing + 1);
            malformed(&chunks, &[]);
        }
        malformed(&front(&text(&[("../core", 0)])), &[]);
        malformed(&front(b"{}"), &[]);
        let mut other = front(&plain);
        other[7] = (9, b"");
        malformed(&other, &[]);
        let truncated = read(&front(&plain)[..7], &[]);
        assert!(matches!(truncated, Err(UnsealError::Truncated { .. })), "{truncated:?}");
    }

    #[test]
    fn pages_come_once_and_as_the_table_says() {
        let text = serde_json::to_vec(&manifest(&[])).unwrap();
        let space = Space::Shared(9);
        let mut table = PageTable::default();
        table.push(space, 0x1000, Home::Front);
        table.push(space, 0x2000, Home::Front);
        table.push(space, 0x3000, Home::Zeros);
        let table = table.encode(&[]);
        let pages = |addresses: &[u64]| {
            if addresses.is_empty() { vec![] } else { encode_pages(space, addresses, &vec![7; addresses.len() * 4096]) }
        };
        let front = |eager: &[u64], set: &[u64]| {
            let (eager, set) = (pages(eager), pages(set));
            read(&[(1, &text), (2, b"\0"), (3, &table), (4, b"\0"), (5, b""), (6, &eager), (7, &set), (8, b"")], &[])
        };
        assert_eq!(front(&[0x1000], &[0x2000]), Ok(8));
        assert_eq!(front(&[], &[0x2000, 0x1000]), Ok(7));
        let malformed = |what| Err(UnsealError::Malformed { what });
        assert_eq!(front(&[0x1000], &[]), malformed("page table"), "one did not come");
        assert_eq!(front(&[0x1000], &[0x1000, 0x2000]), malformed("chunk of pages"), "twice");
        assert_eq!(front(&[0x1000, 0x2000, 0x3000], &[]), malformed("chunk of pages"), "those are zeros");
        assert_eq!(front(&[0x1000, 0x2000], &[0x4000]), malformed("chunk of pages"), "of nowhere");
    }
}
