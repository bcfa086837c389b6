//! Writing a front: sections in their order, bytes to be taken whenever the caller likes.
//!
//! Owns the cutting into chunks, and the rule that nothing is written that would not be read again:
//! what is beyond a reader's limits is an error here, while the proc still runs, and not at its
//! restore. Calls out of order are faults of the caller and end the program that makes them. After
//! an error the front is given up.

use super::{CHUNK, FrontManifest, SECTION_MAX, SET_PAGES, WorkingSets, encode_pages, encode_sets, section};
use crate::codec::Codec;
use crate::files::tree::Files;
use crate::ids::{FrontId, PackId, ProcId};
use crate::keys::{Keyring, NoKey};
use crate::memory::{Archived, MemoryError, Pages};
use crate::names::FrontRef;
use crate::pack::PackRef;
use crate::seal::ObjectKind;
use crate::stream::{CHUNK_MAX, ChunkWriter, Ends};
use crate::table::{PageTable, Space};
use kip_snapshot::pages::PAGE;
use std::collections::BTreeSet;

/// A front cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// The realm has no key to seal with.
    #[error(transparent)]
    Key(#[from] NoKey),
    /// More than a reader holds.
    #[error("the {what} of this generation has {bytes} bytes, {most} are the most that a front can have of it")]
    TooLarge {
        /// Which section.
        what: &'static str,
        /// Its bytes.
        bytes: u64,
        /// How many it may have.
        most: u64,
    },
    /// What no reader would believe.
    #[error("the {what} of this generation has a wrong {fault}: it would never be read again")]
    Fault {
        /// Which section; of files the root as well.
        what: String,
        /// What of it.
        fault: &'static str,
    },
    /// The manifest and what follows do not belong together.
    #[error("the {what} of this generation leads to pack {pack}, which its manifest does not name")]
    Pack {
        /// Which section.
        what: &'static str,
        /// Which pack.
        pack: PackId,
    },
    /// Fewer or more metadata than the manifest says.
    #[error("the metadata of this generation has {bytes} bytes, its manifest says {announced}")]
    Metadata {
        /// What came, at least.
        bytes: u64,
        /// What was to come.
        announced: u64,
    },
    /// Pages of a process or of shared memory cannot be read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Writes a front.
#[derive(Debug)]
pub struct FrontWriter {
    chunks: ChunkWriter,
    manifest: FrontManifest,
    section: u8,
    /// Metadata that makes no full chunk yet.
    held: Vec<u8>,
    /// Metadata that was announced, and that has come.
    announced: u64,
    came: u64,
    /// Most bytes of a section that is read whole.
    most: usize,
}

impl FrontWriter {
    /// Begins the front of `manifest`'s generation.
    ///
    /// # Errors
    /// The realm has no key to seal with; a manifest that no reader would accept.
    pub fn begin(keys: &Keyring, proc: ProcId, manifest: &FrontManifest) -> Result<FrontWriter, FrontError> {
        FrontWriter::begin_within(SECTION_MAX, keys, proc, manifest)
    }

    fn begin_within(
        most: usize,
        keys: &Keyring,
        proc: ProcId,
        manifest: &FrontManifest,
    ) -> Result<FrontWriter, FrontError> {
        if let Some(fault) = manifest.fault() {
            return Err(FrontError::Fault { what: "manifest".into(), fault });
        }
        let chunks = ChunkWriter::begin(keys, ObjectKind::Front, proc, manifest.generation)?;
        let announced = manifest.metadata.iter().map(|file| file.size).sum();
        let (manifest, held, section) = (manifest.clone(), Vec::new(), section::MANIFEST);
        let mut writer = FrontWriter { chunks, manifest, section, held, announced, came: 0, most };
        let text = serde_json::to_vec(&writer.manifest).expect("a manifest is plain data");
        writer.whole(section::MANIFEST, "manifest", &text)?;
        Ok(writer)
    }

    /// Which it is: its name in the store, and what the head leads to it by.
    pub fn front(&self) -> FrontRef {
        let header = self.chunks.header();
        FrontRef { generation: header.generation, id: FrontId(header.salt) }
    }

    /// The working sets.
    ///
    /// # Errors
    /// `TooLarge`.
    pub fn sets(&mut self, sets: &WorkingSets) -> Result<(), FrontError> {
        self.whole(section::SETS, "list of working sets", &encode_sets(sets))
    }

    /// The page table, whose packs the manifest names.
    ///
    /// # Errors
    /// `TooLarge`, `Fault`, `Pack`.
    pub fn page_table(&mut self, table: &PageTable) -> Result<(), FrontError> {
        let what = "page table";
        if let Some(fault) = table.fault() {
            return Err(FrontError::Fault { what: what.into(), fault });
        }
        self.names(what, &table.packs())?;
        let bytes = table.encode(&self.manifest.packs);
        self.whole(section::TABLE, what, &bytes)
    }

    /// The files, whose packs the manifest names.
    ///
    /// # Errors
    /// `TooLarge`, `Fault`, `Pack`.
    pub fn files(&mut self, files: &Files) -> Result<(), FrontError> {
        let what = "list of files";
        if let Some((root, fault)) = files.fault() {
            return Err(FrontError::Fault { what: format!("{what} in {root:?}"), fault });
        }
        self.names(what, &files.packs())?;
        let bytes = files.encode(&self.manifest.packs);
        self.whole(section::FILES, what, &bytes)
    }

    /// More of the metadata files, which follow each other without anything between.
    ///
    /// # Errors
    /// `Metadata`: more than the manifest says.
    pub fn metadata(&mut self, mut bytes: &[u8]) -> Result<(), FrontError> {
        self.enter(section::METADATA);
        self.came += bytes.len() as u64;
        if self.came > self.announced {
            return Err(FrontError::Metadata { bytes: self.came, announced: self.announced });
        }
        while self.held.len() + bytes.len() >= CHUNK {
            let (now, rest) = bytes.split_at(CHUNK - self.held.len());
            self.held.extend_from_slice(now);
            bytes = rest;
            let chunk = std::mem::take(&mut self.held);
            self.chunks.chunk(section::METADATA, Codec::Zstd, &chunk, Ends::Nothing);
        }
        self.held.extend_from_slice(bytes);
        Ok(())
    }

    /// Pages that cannot wait for a fault.
    ///
    /// # Errors
    /// `Metadata`: not all of it has come.
    pub fn eager_pages(&mut self, space: Space, addresses: &[u64], bytes: &[u8]) -> Result<(), FrontError> {
        self.some_pages(section::EAGER, space, addresses, bytes)
    }

    /// Pages of working sets, in order of need.
    ///
    /// # Errors
    /// As [`FrontWriter::eager_pages`].
    pub fn set_pages(&mut self, space: Space, addresses: &[u64], bytes: &[u8]) -> Result<(), FrontError> {
        self.some_pages(section::SET_PAGES, space, addresses, bytes)
    }

    fn some_pages(&mut self, section: u8, space: Space, addresses: &[u64], bytes: &[u8]) -> Result<(), FrontError> {
        assert_eq!(addresses.len() * PAGE, bytes.len(), "each address has a page");
        self.metadata_is_whole()?;
        self.enter(section);
        for (addresses, bytes) in addresses.chunks(SET_PAGES).zip(bytes.chunks(SET_PAGES * PAGE)) {
            let chunk = encode_pages(space, addresses, bytes);
            self.chunks.chunk(section, Codec::Zstd, &chunk, Ends::Nothing);
        }
        Ok(())
    }

    /// All pages that [`crate::memory::archive`] left to the front: the eager ones, then those of
    /// the sets.
    ///
    /// # Errors
    /// A page cannot be read; `Metadata`.
    pub fn pages_of(&mut self, archived: &Archived, pages: &mut Pages<'_>) -> Result<(), FrontError> {
        for (section, spaces) in [(section::EAGER, &archived.eager), (section::SET_PAGES, &archived.front)] {
            for (space, order) in spaces {
                for addresses in order.chunks(SET_PAGES) {
                    let mut bytes = Vec::with_capacity(addresses.len() * PAGE);
                    for address in addresses {
                        let page = pages.page(*space, *address)?.expect("what is in the order lies somewhere");
                        bytes.extend_from_slice(&page);
                    }
                    self.some_pages(section, *space, addresses, &bytes)?;
                }
            }
        }
        Ok(())
    }

    /// What was written since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        self.chunks.take()
    }

    /// The last bytes.
    ///
    /// # Errors
    /// `Metadata`: not all of it has come.
    pub fn end(mut self) -> Result<Vec<u8>, FrontError> {
        self.metadata_is_whole()?;
        self.enter(section::END);
        self.chunks.chunk(section::END, Codec::Plain, &[], Ends::Object);
        Ok(self.chunks.take())
    }

    fn metadata_is_whole(&self) -> Result<(), FrontError> {
        let (bytes, announced) = (self.came, self.announced);
        if bytes == announced { Ok(()) } else { Err(FrontError::Metadata { bytes, announced }) }
    }

    fn names(&self, what: &'static str, packs: &BTreeSet<PackRef>) -> Result<(), FrontError> {
        let named: BTreeSet<&PackRef> = self.manifest.packs.iter().collect();
        match packs.iter().find(|pack| !named.contains(pack)) {
            Some(pack) => Err(FrontError::Pack { what, pack: pack.id }),
            None => Ok(()),
        }
    }

    /// A section in as many chunks as it needs; the last one ends it, so that it is understood as
    /// soon as it is there.
    fn whole(&mut self, section: u8, what: &'static str, bytes: &[u8]) -> Result<(), FrontError> {
        self.enter(section);
        if bytes.len() > self.most {
            return Err(FrontError::TooLarge { what, bytes: bytes.len() as u64, most: self.most as u64 });
        }
        let mut parts = bytes.chunks(CHUNK_MAX).peekable();
        while let Some(part) = parts.next() {
            let ends = if parts.peek().is_some() { Ends::Nothing } else { Ends::Section };
            self.chunks.chunk(section, Codec::Zstd, part, ends);
        }
        self.section = section + 1;
        Ok(())
    }

    /// Goes on to a section, and ends those before it that may be empty.
    fn enter(&mut self, section: u8) {
        while self.section < section {
            assert!(
                [section::METADATA, section::EAGER, section::SET_PAGES].contains(&self.section),
                "no section is left out"
            );
            let held = std::mem::take(&mut self.held);
            self.chunks.chunk(self.section, Codec::Zstd, &held, Ends::Section);
            self.section += 1;
        }
        assert_eq!(section, self.section, "sections come in their order");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tree::FileTree;
    use crate::front::{MetadataFile, Sizes};
    use crate::ids::KeyId;
    use crate::pack::BlockRef;
    use crate::table::{Home, TableRun};
    use kip_types::Generation;

    fn manifest() -> FrontManifest {
        FrontManifest {
            generation: Generation(1),
            parent: None,
            frozen_at_ms: 0,
            engine: String::new(),
            kernel: String::new(),
            cpu_features: vec![],
            spec: serde_json::Value::Null,
            body: serde_json::Value::Null,
            metadata: vec![],
            packs: vec![],
            sizes: Sizes::default(),
        }
    }

    fn begun(most: usize, manifest: &FrontManifest) -> Result<FrontWriter, FrontError> {
        let keys = Keyring::generate("blue".parse().unwrap(), 1);
        FrontWriter::begin_within(most, &keys, ProcId([1; 16]), manifest)
    }

    // promise format: what would not be read again is not written
    // held by: this, `kip_archive::head::tests::a_head_keeps_no_more_than_can_be_read`,
    //   `kip_archive::pack::tests::a_pack_never_outgrows_one_request`
    #[test]
    fn what_would_not_be_read_is_not_written() {
        let told = begun(100, &manifest()).unwrap_err().to_string();
        assert!(
            told.starts_with("the manifest of this generation has ") && told.contains("100 are the most"),
            "{told}"
        );
        let file = |name: &str, size| MetadataFile { name: name.into(), size };
        for metadata in [vec![file("..", 1)], vec![file("a", 1), file("a", 1)], vec![file("a", 9), file("b", u64::MAX)]]
        {
            assert!(matches!(begun(9999, &FrontManifest { metadata, ..manifest() }), Err(FrontError::Fault { .. })));
        }
        let mut writer = begun(9999, &manifest()).unwrap();
        writer.sets(&WorkingSets::new()).unwrap();
        let run = |start: u64| TableRun { start: start * PAGE as u64, pages: 1, home: Home::Zeros };
        let table = |runs| PageTable { spaces: [(Space::Process(1), runs)].into(), ..PageTable::default() };
        let told = writer.page_table(&table(vec![run(2), run(1)])).unwrap_err().to_string();
        assert_eq!(told, "the page table of this generation has a wrong run: it would never be read again");
        let many = table((0..9999).map(|n| run(n * 2)).collect());
        assert!(matches!(writer.page_table(&many), Err(FrontError::TooLarge { what: "page table", .. })));
        let pack = PackRef { id: PackId([1; 32]), key: KeyId([1; 16]) };
        let blocks = vec![BlockRef { pack, offset: 192, sealed: 99, plain: 4096 }];
        let elsewhere = PageTable { blocks: blocks.clone(), ..PageTable::default() };
        assert!(matches!(writer.page_table(&elsewhere), Err(FrontError::Pack { .. })));
        writer.page_table(&table(vec![run(1)])).unwrap();
        let files = |name: &str, tree| Files { roots: [(name.to_owned(), tree)].into() };
        assert!(matches!(writer.files(&files("..", FileTree::default())), Err(FrontError::Fault { .. })));
        let bad = FileTree { order: vec![7], ..FileTree::default() };
        let told = writer.files(&files("upper", bad)).unwrap_err().to_string();
        assert!(told.starts_with("the list of files in \"upper\" of this generation has a wrong order"), "{told}");
        let other = FileTree { blocks, ..FileTree::default() };
        assert!(matches!(writer.files(&files("upper", other)), Err(FrontError::Pack { what: "list of files", .. })));
    }

    #[test]
    fn metadata_is_what_the_manifest_says() {
        let manifest = FrontManifest { metadata: vec![MetadataFile { name: "a".into(), size: 3 }], ..manifest() };
        let ready = || {
            let mut writer = begun(9999, &manifest).unwrap();
            writer.sets(&WorkingSets::new()).unwrap();
            writer.page_table(&PageTable::default()).unwrap();
            writer.files(&Files::default()).unwrap();
            writer
        };
        assert!(matches!(ready().metadata(b"abcd"), Err(FrontError::Metadata { bytes: 4, announced: 3 })));
        let mut short = ready();
        short.metadata(b"ab").unwrap();
        let page = short.set_pages(Space::Process(1), &[4096], &[1; PAGE]);
        assert!(matches!(page, Err(FrontError::Metadata { bytes: 2, announced: 3 })));
        assert!(matches!(short.end(), Err(FrontError::Metadata { .. })));
        let mut whole = ready();
        whole.metadata(b"abc").unwrap();
        assert!(whole.end().is_ok());
    }
}
