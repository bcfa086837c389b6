//! One archiving's way into packs: looks content up, puts what is new into blocks, and hands packs
//! over when they are full.
//!
//! Owns the pack that is being filled; holds one in memory at most. What it stored is known to
//! others only when the caller merges [`Packed::added`] into the realm's index, which must wait
//! until every pack is stored. Called off: drop it, and nothing was said.

use crate::ids::PackId;
use crate::index::{ContentHash, ContentPlace, Hasher, Index};
use crate::keys::{Keyring, NoKey};
use crate::pack::{BlockRef, Finished, PackRef, PackWriter};
use std::collections::BTreeMap;
use std::io;

/// Content cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The realm cannot seal.
    #[error(transparent)]
    Key(#[from] NoKey),
    /// The sink did not take a full pack.
    #[error("pack {pack} was not stored")]
    Store {
        /// Which.
        pack: PackId,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The sink did not take an earlier pack, and nothing more can be stored here.
    #[error("pack {pack} was not stored before: begin again")]
    Lost {
        /// Which.
        pack: PackId,
    },
}

/// Takes packs when they are full.
pub type Sink<'a> = dyn FnMut(Finished) -> io::Result<()> + 'a;

/// What an archiving stores in packs.
pub struct Packing<'a> {
    pub(crate) keys: &'a Keyring,
    pub(crate) hasher: Hasher,
    index: &'a Index,
    /// Packs that may be referred to: not those that are candidates for deletion.
    usable: &'a dyn Fn(&PackId) -> bool,
    sink: &'a mut Sink<'a>,
    added: Index,
    open: Option<PackWriter>,
    /// The packs that were made, and their bytes.
    made: BTreeMap<PackRef, u64>,
    bytes: u64,
    /// Of each pack that is referred to the blocks: offset, bytes there.
    referred: BTreeMap<PackRef, BTreeMap<u32, u32>>,
    /// One that was not stored: what refers to it cannot be told from the rest.
    lost: Option<PackId>,
}

/// What one left.
#[derive(Debug, Default)]
pub struct Packed {
    /// For the realm's index, once all packs are stored.
    pub added: Index,
    /// The packs that were made, and the bytes of each.
    pub made: BTreeMap<PackRef, u64>,
    /// The bytes of those that were made.
    pub bytes: u64,
    /// The packs that the generation refers to, old and new: what its manifest names.
    pub refers: BTreeMap<PackRef, Referred>,
}

/// What a generation has in a pack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Referred {
    /// Blocks of it that are referred to.
    pub blocks: u64,
    /// Their bytes in the store.
    pub bytes: u64,
}

impl<'a> Packing<'a> {
    /// One for a realm. `usable` says which packs may be referred to, see [`crate::gc`].
    ///
    /// # Errors
    /// The realm has no key to seal with.
    pub fn new(
        keys: &'a Keyring,
        index: &'a Index,
        usable: &'a dyn Fn(&PackId) -> bool,
        sink: &'a mut Sink<'a>,
    ) -> Result<Packing<'a>, NoKey> {
        let (added, made) = (Index::default(), BTreeMap::new());
        Ok(Packing {
            keys,
            hasher: Hasher::new(keys)?,
            index,
            usable,
            sink,
            added,
            open: None,
            made,
            bytes: 0,
            referred: BTreeMap::new(),
            lost: None,
        })
    }

    /// Where content lies that may be referred to. What is found of the realm's counts as stored
    /// now, so that the index keeps it.
    pub(crate) fn find(&mut self, hash: &ContentHash) -> Option<ContentPlace> {
        if let Some(place) = self.added.get(hash) {
            return Some(place);
        }
        let place = self.index.get(hash).filter(|place| self.may_use(place))?;
        self.added.insert(*hash, place);
        Some(place)
    }

    /// Not in a pack that may go, nor in one that another key opens than that which seals now: what
    /// is stored after a rotation needs the new key only.
    pub(crate) fn may_use(&self, place: &ContentPlace) -> bool {
        let pack = &place.block.pack;
        (self.usable)(&pack.id) && self.keys.current().is_ok_and(|key| key == pack.key)
    }

    /// Says where content lies that was just put into a block.
    pub(crate) fn add(&mut self, hash: ContentHash, place: ContentPlace) {
        self.added.insert(hash, place);
    }

    /// Says that a table or tree leads to a block.
    pub(crate) fn refer(&mut self, block: &BlockRef) {
        self.referred.entry(block.pack).or_default().insert(block.offset, block.sealed);
    }

    /// What was said of a pack that was not stored is in `added`.
    fn is_whole(&self) -> Result<(), PackError> {
        self.lost.map_or(Ok(()), |pack| Err(PackError::Lost { pack }))
    }

    pub(crate) fn push(&mut self, block: &[u8]) -> Result<BlockRef, PackError> {
        self.is_whole()?;
        if self.open.as_ref().is_some_and(PackWriter::is_full) {
            self.close()?;
        }
        let writer = match &mut self.open {
            Some(writer) => writer,
            none => none.insert(PackWriter::begin(self.keys)?),
        };
        Ok(writer.push(self.keys, block))
    }

    fn close(&mut self) -> Result<(), PackError> {
        self.is_whole()?;
        let Some(writer) = self.open.take() else { return Ok(()) };
        let finished = writer.finish();
        let pack = finished.pack;
        let bytes = finished.bytes.len() as u64;
        if let Err(source) = (self.sink)(finished) {
            self.lost = Some(pack.id);
            return Err(PackError::Store { pack: pack.id, source });
        }
        self.made.insert(pack, bytes);
        self.bytes += bytes;
        Ok(())
    }

    /// Hands over the last pack.
    ///
    /// # Errors
    /// It was not stored.
    pub fn finish(mut self) -> Result<Packed, PackError> {
        self.close()?;
        let referred = |blocks: BTreeMap<u32, u32>| Referred {
            blocks: blocks.len() as u64,
            bytes: blocks.values().map(|sealed| u64::from(*sealed)).sum(),
        };
        let refers = self.referred.into_iter().map(|(pack, blocks)| (pack, referred(blocks))).collect();
        Ok(Packed { added: self.added, made: self.made, bytes: self.bytes, refers })
    }
}
