//! Writing a front: sections in their order, bytes to be taken whenever the caller likes.
//!
//! Owns the cutting into chunks. Calls out of order, or contents that the manifest did not announce, are faults of the
//! caller and end the program that makes them.

use super::{CHUNK, Manifest, SET_PAGES, Sets, encode_set_pages, encode_sets, section};
use crate::codec::Codec;
use crate::files::tree::Tree;
use crate::ids::{FrontId, ProcId};
use crate::keys::{Keyring, NoKey};
use crate::memory::{Archived, MemoryError, Pages};
use crate::names::FrontRef;
use crate::seal::Kind;
use crate::stream::{CHUNK_MAX, ChunkWriter};
use crate::table::PageTable;
use kip_snapshot::pages::PAGE;

/// Writes a front.
#[derive(Debug)]
pub struct FrontWriter {
    chunks: ChunkWriter,
    manifest: Manifest,
    section: u8,
    /// Metadata that makes no full chunk yet.
    held: Vec<u8>,
    /// Metadata that was announced and has not come.
    awaited: u64,
}

impl FrontWriter {
    /// Begins the front of `manifest`'s generation.
    ///
    /// # Errors
    /// The realm has no key to seal with.
    pub fn begin(keys: &Keyring, proc: ProcId, manifest: &Manifest) -> Result<FrontWriter, NoKey> {
        assert!(manifest.is_sound(), "metadata files have names");
        let chunks = ChunkWriter::begin(keys, Kind::Front, proc, manifest.generation)?;
        let awaited = manifest.metadata.iter().map(|file| file.size).sum();
        let (manifest, held, section) = (manifest.clone(), Vec::new(), section::MANIFEST);
        let mut writer = FrontWriter { chunks, manifest, section, held, awaited };
        let text = serde_json::to_vec(&writer.manifest).expect("a manifest is plain data");
        writer.whole(section::MANIFEST, &text);
        Ok(writer)
    }

    /// Which it is: its name in the store, and what the head leads to it by.
    pub fn front(&self) -> FrontRef {
        let header = self.chunks.header();
        FrontRef { generation: header.generation, id: FrontId(header.salt) }
    }

    /// The working sets.
    pub fn sets(&mut self, sets: &Sets) {
        self.whole(section::SETS, &encode_sets(sets));
    }

    /// More of the metadata files, which follow each other without anything between.
    pub fn metadata(&mut self, mut bytes: &[u8]) {
        self.enter(section::METADATA);
        self.awaited = self.awaited.checked_sub(bytes.len() as u64).expect("no more than the manifest says");
        while self.held.len() + bytes.len() >= CHUNK {
            let (now, rest) = bytes.split_at(CHUNK - self.held.len());
            self.held.extend_from_slice(now);
            bytes = rest;
            self.flush();
        }
        self.held.extend_from_slice(bytes);
    }

    /// Pages of one process, in order of need.
    pub fn set_pages(&mut self, process: u32, addresses: &[u64], bytes: &[u8]) {
        assert_eq!(addresses.len() * PAGE, bytes.len(), "each address has a page");
        self.enter(section::SET_PAGES);
        for (addresses, bytes) in addresses.chunks(SET_PAGES).zip(bytes.chunks(SET_PAGES * PAGE)) {
            let chunk = encode_set_pages(addresses, bytes);
            self.chunks.chunk(section::SET_PAGES, process, Codec::Zstd, &chunk, false);
        }
    }

    /// All pages that [`crate::memory::archive`] left to the front.
    ///
    /// # Errors
    /// A page cannot be read.
    pub fn pages_of(&mut self, archived: &Archived, pages: &mut Pages<'_>) -> Result<(), MemoryError> {
        for (process, order) in &archived.front {
            for addresses in order.chunks(SET_PAGES) {
                let mut bytes = Vec::with_capacity(addresses.len() * PAGE);
                for address in addresses {
                    let page = pages.page(*process, *address)?.expect("what is in the order lies somewhere");
                    bytes.extend_from_slice(&page);
                }
                self.set_pages(*process, addresses, &bytes);
            }
        }
        Ok(())
    }

    /// The page table, whose packs the manifest names.
    pub fn page_table(&mut self, table: &PageTable) {
        let bytes = table.encode(&self.manifest.packs);
        self.whole(section::TABLE, &bytes);
    }

    /// The files, whose packs the manifest names.
    pub fn files(&mut self, tree: &Tree) {
        let bytes = tree.encode(&self.manifest.packs);
        self.whole(section::FILES, &bytes);
    }

    /// What was written since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        self.chunks.take()
    }

    /// The last bytes.
    pub fn end(mut self) -> Vec<u8> {
        self.enter(section::END);
        assert_eq!(self.awaited, 0, "all metadata that the manifest names");
        self.chunks.chunk(section::END, 0, Codec::Plain, &[], true);
        self.chunks.take()
    }

    /// A section in as many chunks as it needs.
    fn whole(&mut self, section: u8, bytes: &[u8]) {
        self.enter(section);
        for part in bytes.chunks(CHUNK_MAX) {
            self.chunks.chunk(section, 0, Codec::Zstd, part, false);
        }
    }

    fn enter(&mut self, section: u8) {
        assert!(section >= self.section, "sections come in their order");
        if section != self.section {
            self.flush();
        }
        self.section = section;
    }

    fn flush(&mut self) {
        let held = std::mem::take(&mut self.held);
        if !held.is_empty() {
            self.chunks.chunk(section::METADATA, 0, Codec::Zstd, &held, false);
        }
    }
}
