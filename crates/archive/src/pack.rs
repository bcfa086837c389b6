//! Packs: objects of many blocks, each sealed and compressed by itself, so that a range read of one
//! block is enough to open it.
//!
//! Owns the layout of a pack. Knows nothing of what blocks hold: the caller that adds a block keeps
//! its [`BlockRef`]. Packs belong to a realm, not to a proc. A crash while a pack is written leaves
//! nothing here; a pack that was uploaded and is in no front is found by collection.

use crate::codec::{Codec, Packer, Unpacker};
use crate::ids::{KeyId, PackId, ProcId};
use crate::keys::{Keyring, NoKey};
use crate::seal::{self, Expect, HEADER, ObjectKey, ObjectKind, Opened, TAG, UnsealError};
use crate::wire::{self, Reader};
use kip_types::Generation;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Bytes at which a pack is full: large enough that requests do not count, small enough that
/// several go up side by side, and little is left to be read back when the last has gone up.
pub const TARGET: usize = 7 << 20;
/// Most bytes of a pack, with its directory: what the store sends in one piece. There are older
/// ones that are larger than what is made now.
pub const PACK_MAX: usize = 16 << 20;
/// Most bytes of a block.
pub const BLOCK_MAX: usize = 1 << 20;
/// Length of the directory, number of blocks.
const FOOTER: usize = 16;
/// Most bytes that a block takes in the directory: two lengths of at most 21 bits.
const LISTED: usize = 6;
/// Most bytes that a pack has besides what its blocks pack and list: the last block's codec, tag
/// and place in the directory, the directory's tag, the footer.
const FRINGE: usize = 1 + TAG + LISTED + TAG + FOOTER;

/// A pack, and the realm's key that opens it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PackRef {
    /// Its name.
    pub id: PackId,
    /// The key.
    pub key: KeyId,
}

/// A block, and all that is needed to read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRef {
    /// Where it is.
    pub pack: PackRef,
    /// Its first byte there.
    pub offset: u32,
    /// Its bytes there.
    pub sealed: u32,
    /// Its bytes, opened.
    pub plain: u32,
}

impl BlockRef {
    /// The range to read.
    pub fn range(&self) -> std::ops::Range<u64> {
        u64::from(self.offset)..u64::from(self.offset) + u64::from(self.sealed)
    }

    /// Within what a reader takes.
    pub(crate) fn is_sound(&self) -> bool {
        self.plain as usize <= BLOCK_MAX
            && self.sealed as usize <= BLOCK_MAX + 1 + TAG
            && self.offset.checked_add(self.sealed).is_some()
    }

    /// Additional data of it, wherever it is read from.
    fn aad(&self, keys: &Keyring) -> Vec<u8> {
        let mut aad = b"kip block".to_vec();
        aad.extend_from_slice(&self.pack.key.0);
        aad.extend_from_slice(&self.sealed.to_le_bytes());
        aad.extend_from_slice(&self.plain.to_le_bytes());
        aad.extend_from_slice(keys.realm().as_str().as_bytes());
        aad
    }
}

/// A pack that is ready to be stored.
#[derive(Debug)]
pub struct Finished {
    /// Its name.
    pub pack: PackRef,
    /// All of it.
    pub bytes: Vec<u8>,
}

/// Writes a pack.
#[derive(Debug)]
pub struct PackWriter {
    out: Vec<u8>,
    sealing: Opened,
    pack: PackRef,
    packer: Packer,
    /// Sealed and plain lengths.
    blocks: Vec<(u32, u32)>,
}

impl PackWriter {
    /// Begins one, with a new name.
    ///
    /// # Errors
    /// The realm has no key to seal with.
    pub fn begin(keys: &Keyring) -> Result<PackWriter, NoKey> {
        let (out, sealing) = seal::begin(keys, ObjectKind::Pack, ProcId([0; 16]), Generation(0))?;
        let pack = PackRef { id: PackId(sealing.header.salt), key: sealing.header.key };
        Ok(PackWriter { out, sealing, pack, packer: Packer::new(), blocks: Vec::new() })
    }

    /// Appends a block of at most [`BLOCK_MAX`] bytes.
    ///
    /// # Panics
    /// It is longer, or the pack was full before.
    pub fn push(&mut self, keys: &Keyring, bytes: &[u8]) -> BlockRef {
        assert!(bytes.len() <= BLOCK_MAX, "blocks are cut before they are packed");
        assert!(!self.is_full(), "who packs asks first whether it is time for another pack");
        let at = self.out.len();
        let (codec, packed) = self.packer.pack(Codec::Zstd, bytes);
        self.out.push(codec as u8);
        self.out.extend_from_slice(packed);
        let sealed = (self.out.len() - at + TAG) as u32;
        let block = BlockRef { pack: self.pack, offset: at as u32, sealed, plain: bytes.len() as u32 };
        self.sealing.key.seal(at as u64, &block.aad(keys), &mut self.out, at);
        self.blocks.push((block.sealed, block.plain));
        block
    }

    /// It is time for another one: with one more block it could be longer than [`PACK_MAX`].
    pub fn is_full(&self) -> bool {
        self.out.len() + self.blocks.len() * LISTED + FRINGE > TARGET
    }

    /// Its bytes.
    pub fn finish(self) -> Finished {
        let PackWriter { mut out, sealing, pack, blocks, .. } = self;
        let at = out.len();
        for (sealed, plain) in &blocks {
            wire::put(&mut out, u64::from(*sealed));
            wire::put(&mut out, u64::from(*plain));
        }
        let footer = footer(out.len() - at + TAG, blocks.len());
        sealing.key.seal(at as u64, &[&sealing.tag[..], &footer].concat(), &mut out, at);
        out.extend_from_slice(&footer);
        Finished { pack, bytes: out }
    }
}

fn footer(directory: usize, blocks: usize) -> [u8; FOOTER] {
    let mut footer = [0; FOOTER];
    footer[..8].copy_from_slice(&(directory as u64).to_le_bytes());
    footer[8..].copy_from_slice(&(blocks as u64).to_le_bytes());
    footer
}

/// Opens blocks; keeps the keys of the packs that it saw.
#[derive(Debug)]
pub struct PackReader<'k> {
    keys: &'k Keyring,
    opened: HashMap<PackRef, ObjectKey>,
    unpacker: Unpacker,
}

impl<'k> PackReader<'k> {
    /// One for the packs of a realm.
    pub fn new(keys: &'k Keyring) -> PackReader<'k> {
        PackReader { keys, opened: HashMap::new(), unpacker: Unpacker::new() }
    }

    /// Opens one block, whose bytes are those of [`BlockRef::range`].
    ///
    /// # Errors
    /// The key is missing or destroyed; fewer bytes than there should be; damage.
    pub fn open_block(&mut self, block: &BlockRef, bytes: &[u8]) -> Result<Vec<u8>, UnsealError> {
        if bytes.len() < block.sealed as usize {
            return Err(UnsealError::Truncated { at: u64::from(block.offset) + bytes.len() as u64 });
        }
        let mut sealed = bytes.to_vec();
        let aad = block.aad(self.keys);
        let key = self.key_of(block.pack)?;
        let damaged = UnsealError::Damaged { what: "block", at: block.offset.into() };
        let opened = key.open(block.offset.into(), &aad, &mut sealed).ok_or(damaged)?;
        let malformed = UnsealError::Malformed { what: "block" };
        let (codec, packed) = opened.split_first().ok_or(malformed.clone())?;
        if block.plain as usize > BLOCK_MAX {
            return Err(malformed);
        }
        self.unpacker.unpack(*codec, packed, block.plain as usize).ok_or(malformed)
    }

    fn key_of(&mut self, pack: PackRef) -> Result<&ObjectKey, UnsealError> {
        match self.opened.entry(pack) {
            std::collections::hash_map::Entry::Occupied(known) => Ok(known.into_mut()),
            std::collections::hash_map::Entry::Vacant(new) => {
                Ok(new.insert(ObjectKey::derive(self.keys.secret(pack.key)?, &pack.id.0)))
            }
        }
    }

    /// Opens every block of a whole pack and calls `each` with it: for checking, and for making an
    /// index anew.
    ///
    /// # Errors
    /// Another pack than `id`; what [`PackReader::open_block`] says.
    pub fn check(
        &mut self,
        id: PackId,
        bytes: &[u8],
        mut each: impl FnMut(BlockRef, &[u8]),
    ) -> Result<(), UnsealError> {
        let truncated = UnsealError::Truncated { at: bytes.len() as u64 };
        let header = bytes.first_chunk::<HEADER>().ok_or(truncated.clone())?;
        let opened = seal::open(
            header,
            self.keys,
            &Expect { kind: ObjectKind::Pack, proc: None, generation: None, salt: Some(id.0) },
        )?;
        let (body, footer) = bytes[HEADER..].split_last_chunk::<FOOTER>().ok_or(truncated.clone())?;
        let number = |at: usize| u64::from_le_bytes(footer[at..at + 8].try_into().expect("8 bytes"));
        let length = usize::try_from(number(0)).ok().filter(|length| *length <= body.len()).ok_or(truncated)?;
        let (blocks, sealed) = body.split_at(body.len() - length);
        let at = (HEADER + blocks.len()) as u64;
        let (mut sealed, aad) = (sealed.to_vec(), [&opened.tag[..], footer].concat());
        let damaged = UnsealError::Damaged { what: "directory", at };
        let directory = opened.key.open(at, &aad, &mut sealed).ok_or(damaged)?;
        let pack = PackRef { id, key: opened.header.key };
        let listed = listed(pack, directory, number(8), at).ok_or(UnsealError::Malformed { what: "directory" })?;
        for block in listed {
            let range = block.offset as usize..(block.offset + block.sealed) as usize;
            let plain = self.open_block(&block, &bytes[range])?;
            each(block, &plain);
        }
        Ok(())
    }
}

/// The blocks of a directory, which fill a pack from its header to `end`.
fn listed(pack: PackRef, directory: &[u8], count: u64, end: u64) -> Option<Vec<BlockRef>> {
    let mut reader = Reader(directory);
    let mut offset = HEADER as u32;
    let mut blocks = Vec::new();
    for _ in 0..count {
        let (sealed, plain) = (reader.small()?, reader.small()?);
        blocks.push(BlockRef { pack, offset, sealed, plain });
        offset = offset.checked_add(sealed)?;
    }
    reader.end()?;
    (u64::from(offset) == end).then_some(blocks)
}

/// Writes the blocks of a section: each by its pack's place in `packs` and its distance from the
/// one before.
pub(crate) fn put_blocks(out: &mut Vec<u8>, blocks: &[BlockRef], packs: &[PackRef]) {
    let places: HashMap<&PackRef, u64> = packs.iter().zip(0..).collect();
    wire::put(out, blocks.len() as u64);
    let mut end = 0;
    for block in blocks {
        wire::put(out, *places.get(&block.pack).expect("the manifest lists every pack of its sections"));
        wire::put_signed(out, i64::from(block.offset) - end);
        wire::put(out, block.sealed.into());
        wire::put(out, block.plain.into());
        end = i64::from(block.offset) + i64::from(block.sealed);
    }
}

/// Reads what [`put_blocks`] wrote.
pub(crate) fn take_blocks(reader: &mut Reader<'_>, packs: &[PackRef]) -> Option<Vec<BlockRef>> {
    let count = reader.count()?;
    let mut blocks = Vec::new();
    let mut end = 0i64;
    for _ in 0..count {
        let pack = *packs.get(reader.small()? as usize)?;
        let offset = u32::try_from(end.checked_add(reader.signed()?)?).ok()?;
        let (sealed, plain) = (reader.small()?, reader.small()?);
        let block = BlockRef { pack, offset, sealed, plain };
        if !block.is_sound() {
            return None;
        }
        end = i64::from(offset) + i64::from(sealed);
        blocks.push(block);
    }
    Some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ring() -> Keyring {
        Keyring::generate("blue".parse().unwrap(), 1)
    }

    fn made(keys: &Keyring, contents: &[Vec<u8>]) -> (Finished, Vec<BlockRef>) {
        let mut writer = PackWriter::begin(keys).unwrap();
        let blocks = contents.iter().map(|bytes| writer.push(keys, bytes)).collect();
        (writer.finish(), blocks)
    }

    fn part<'a>(pack: &'a Finished, block: &BlockRef) -> &'a [u8] {
        &pack.bytes[block.range().start as usize..block.range().end as usize]
    }

    proptest! {
        #[test]
        fn each_block_opens_alone_and_all_together(contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..2000), 0..8)) {
            let keys = ring();
            let (pack, blocks) = made(&keys, &contents);
            let mut reader = PackReader::new(&keys);
            for (block, content) in blocks.iter().zip(&contents) {
                prop_assert_eq!(&reader.open_block(block, part(&pack, block)).unwrap(), content);
            }
            let mut seen = Vec::new();
            reader.check(pack.pack.id, &pack.bytes, |block, bytes| seen.push((block, bytes.to_vec()))).unwrap();
            prop_assert_eq!(seen, blocks.iter().copied().zip(contents).collect::<Vec<_>>());
            let mut out = Vec::new();
            put_blocks(&mut out, &blocks, &[pack.pack]);
            let mut read = Reader(&out);
            prop_assert_eq!(take_blocks(&mut read, &[pack.pack]), Some(blocks));
            prop_assert_eq!(read.end(), Some(()));
        }
    }

    #[test]
    fn a_pack_never_outgrows_one_request() {
        let keys = ring();
        let noise: Vec<u8> = std::iter::repeat_with(crate::ids::random::<4096>).take(256).flatten().collect();
        // Large blocks alone, and small ones up to the brim, whose directory is long, with a large
        // one behind.
        for small in [0, 190_000] {
            let mut writer = PackWriter::begin(&keys).unwrap();
            for block in 0..small {
                let is_near = writer.out.len() + (writer.blocks.len() + 1) * LISTED + FRINGE + 60 > TARGET;
                if is_near {
                    break;
                }
                writer.push(&keys, &noise[block % 1000..][..40]);
            }
            while !writer.is_full() {
                writer.push(&keys, &noise);
            }
            let length = writer.finish().bytes.len();
            assert!((TARGET - BLOCK_MAX..=TARGET + BLOCK_MAX).contains(&length), "{length}");
        }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        let keys = ring();
        let (pack, _) = made(&keys, &[vec![1; 300], b"short".to_vec(), vec![]]);
        let mut reader = PackReader::new(&keys);
        let mut check = |bytes: &[u8]| reader.check(pack.pack.id, bytes, |_, _| {});
        check(&pack.bytes).unwrap();
        for bit in 0..pack.bytes.len() * 8 {
            let mut bad = pack.bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(check(&bad).is_err(), "bit {bit}");
        }
        for end in 0..pack.bytes.len() {
            assert!(check(&pack.bytes[..end]).is_err(), "cut at {end}");
        }
        assert!(check(&[&pack.bytes[..], b"x"].concat()).is_err());
    }

    #[test]
    fn blocks_that_were_moved_or_are_anothers_are_refused() {
        let keys = ring();
        let (pack, blocks) = made(&keys, &[vec![1; 40], vec![2; 40]]);
        let (other, others) = made(&keys, &[vec![3; 40], vec![4; 40]]);
        let mut reader = PackReader::new(&keys);
        let damaged = |at: u32| UnsealError::Damaged { what: "block", at: at.into() };
        assert_eq!(reader.open_block(&blocks[0], part(&pack, &blocks[1])), Err(damaged(blocks[0].offset)));
        assert_eq!(reader.open_block(&blocks[0], part(&other, &others[0])), Err(damaged(blocks[0].offset)));
        let longer = BlockRef { plain: 41, ..blocks[0] };
        assert_eq!(reader.open_block(&longer, part(&pack, &blocks[0])), Err(damaged(blocks[0].offset)));
        assert_eq!(
            reader.check(other.pack.id, &pack.bytes, |_, _| {}),
            Err(UnsealError::Other { kind: ObjectKind::Pack })
        );
        let short = &part(&pack, &blocks[0])[..10];
        assert!(matches!(reader.open_block(&blocks[0], short), Err(UnsealError::Truncated { .. })));
        let foreign = Keyring::generate("red".parse().unwrap(), 1);
        let mut reader = PackReader::new(&foreign);
        let refused = reader.open_block(&blocks[0], part(&pack, &blocks[0])).unwrap_err();
        assert!(matches!(refused, UnsealError::Key(NoKey::Unknown { .. })), "{refused}");
        assert!(matches!(reader.check(pack.pack.id, &pack.bytes, |_, _| {}), Err(UnsealError::Realm { .. })));
    }

    #[test]
    fn packs_of_an_older_key_still_open_and_of_a_destroyed_one_say_so() {
        let mut keys = ring();
        let (pack, blocks) = made(&keys, &[vec![1; 40]]);
        let old = keys.current().unwrap();
        keys.rotate(2);
        assert_ne!(made(&keys, &[]).0.pack.key, old);
        assert_eq!(PackReader::new(&keys).open_block(&blocks[0], part(&pack, &blocks[0])).unwrap(), [1; 40]);
        keys.destroy(old, 3).unwrap();
        let refused = PackReader::new(&keys).open_block(&blocks[0], part(&pack, &blocks[0])).unwrap_err();
        assert!(refused.to_string().contains("was destroyed at 1970-01-01T00:00:00Z"), "{refused}");
    }
}
