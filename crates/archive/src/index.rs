//! What is stored already: by content for a whole realm ([`Index`]), by place on the local disk for
//! one proc ([`Known`]).
//!
//! What is stored grows without end, and what a daemon keeps of it in memory must not: the index
//! has the contents that were stored or found last, [`HALF`] of them and as many of those before,
//! in some 15 MB; `Known` is read for one upload from a file of its proc.
//!
//! Both are local caches. They may be lost, which costs uploads and reading, and must never be
//! wrong: additions are merged only after the packs they speak of are stored. Hashes are keyed with
//! a secret of the realm, so that neither says anything to a reader without that secret, and
//! nothing is ever shared between realms.

use crate::ids::{KeyId, PackId};
use crate::keys::{Keyring, NoKey, Secret};
use crate::pack::{BlockRef, PackRef};
use crate::wire::{self, Reader};
use kip_types::Realm;
use rustix::fs::{AtFlags, StatxFlags};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::AsFd;
use zeroize::Zeroizing;

const INDEX: [u8; 8] = *b"KIPINDX1";
const KNOWN: [u8; 8] = *b"KIPKNWN1";

/// Names a page or a piece of a file by its content, within a realm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentHash([u8; 16]);

/// Makes such names.
pub(crate) struct Hasher {
    pages: Secret,
    pieces: Secret,
}

impl Hasher {
    pub(crate) fn new(keys: &Keyring) -> Result<Hasher, NoKey> {
        let secret = keys.hash_key()?;
        let derive = |context| Zeroizing::new(blake3::derive_key(context, &secret[..]));
        let pages = derive("kip archive 2026-11-22 pages");
        Ok(Hasher { pages, pieces: derive("kip archive 2026-11-22 pieces of files") })
    }

    pub(crate) fn page(&self, bytes: &[u8]) -> ContentHash {
        hash(&self.pages, bytes)
    }

    pub(crate) fn piece(&self, bytes: &[u8]) -> ContentHash {
        hash(&self.pieces, bytes)
    }
}

fn hash(key: &Secret, bytes: &[u8]) -> ContentHash {
    let hash = blake3::keyed_hash(key, bytes);
    ContentHash(*hash.as_bytes().first_chunk().expect("32 bytes"))
}

/// Where content lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentPlace {
    /// In which block.
    pub block: BlockRef,
    /// Its first byte in the opened block.
    pub at: u32,
}

/// Blocks, each once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Blocks {
    pub(crate) list: Vec<BlockRef>,
    places: HashMap<BlockRef, u32>,
}

impl Blocks {
    pub(crate) fn number(&mut self, block: BlockRef) -> u32 {
        *self.places.entry(block).or_insert_with(|| {
            self.list.push(block);
            (self.list.len() - 1) as u32
        })
    }
}

/// Contents and where they lie.
#[derive(Debug, Clone, Default)]
struct Contents {
    blocks: Blocks,
    places: HashMap<ContentHash, (u32, u32)>,
}

impl Contents {
    fn get(&self, hash: &ContentHash) -> Option<ContentPlace> {
        let (block, at) = *self.places.get(hash)?;
        Some(ContentPlace { block: self.blocks.list[block as usize], at })
    }

    fn insert(&mut self, hash: ContentHash, place: ContentPlace) {
        let block = self.blocks.number(place.block);
        self.places.insert(hash, (block, place.at));
    }

    fn all(&self) -> impl Iterator<Item = (ContentHash, ContentPlace)> {
        self.places
            .iter()
            .map(|(hash, (block, at))| (*hash, ContentPlace { block: self.blocks.list[*block as usize], at: *at }))
    }
}

/// The contents that were stored last are kept, between one and two times as many: 0.5 to 1 GiB of
/// pages.
const HALF: usize = 128 << 10;

/// The contents that a realm has stored, as far as they were stored or found lately.
#[derive(Debug, Clone, Default)]
pub struct Index {
    young: Contents,
    /// Those from before the young ones, and none of them.
    old: Contents,
}

impl Index {
    /// Where it lies.
    pub fn get(&self, hash: &ContentHash) -> Option<ContentPlace> {
        self.young.get(hash).or_else(|| self.old.get(hash))
    }

    /// Says where it lies. The newest place counts: the one before may be in a pack that could not
    /// be used any more.
    pub fn insert(&mut self, hash: ContentHash, place: ContentPlace) {
        self.young.insert(hash, place);
        if self.young.places.len() >= HALF {
            self.old = std::mem::take(&mut self.young);
        } else {
            self.old.places.remove(&hash);
        }
    }

    /// How many contents.
    pub fn len(&self) -> usize {
        self.young.places.len() + self.old.places.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, the older ones first.
    fn all(&self) -> impl Iterator<Item = (ContentHash, ContentPlace)> {
        self.old.all().chain(self.young.all())
    }

    /// Takes over what was stored; only once its packs are.
    pub fn merge(&mut self, added: &Index) {
        added.all().for_each(|(hash, place)| self.insert(hash, place));
    }

    /// Forgets all in packs that `keep` does not want, such as those that are to be deleted.
    pub fn retain(&mut self, keep: impl Fn(&PackId) -> bool) {
        for part in [&mut self.old, &mut self.young] {
            let before = std::mem::take(part);
            before
                .all()
                .filter(|(_, place)| keep(&place.block.pack.id))
                .for_each(|(hash, place)| part.insert(hash, place));
        }
    }

    /// Its bytes, for a local file.
    pub fn save(&self, realm: &Realm) -> Vec<u8> {
        let mut blocks = Blocks::default();
        let mut body = Vec::with_capacity(24 * self.len());
        wire::put(&mut body, self.len() as u64);
        for (hash, place) in self.all() {
            body.extend_from_slice(&hash.0);
            wire::put(&mut body, blocks.number(place.block).into());
            wire::put(&mut body, place.at.into());
        }
        let mut out = begin(INDEX, realm);
        put_places(&mut out, &blocks.list);
        out.extend_from_slice(&body);
        end(out)
    }

    /// Reads it back. What is damaged or another realm's is as good as lost: `None`.
    pub fn load(bytes: &[u8], realm: &Realm) -> Option<Index> {
        let mut reader = open(bytes, INDEX, realm)?;
        let list = take_places(&mut reader)?;
        let mut index = Index::default();
        for _ in 0..reader.count()? {
            let hash = ContentHash(reader.array()?);
            let block = *list.get(reader.small()? as usize)?;
            index.insert(hash, ContentPlace { block, at: reader.small()? });
        }
        reader.end()?;
        Some(index)
    }
}

/// A page file of a sealed generation on the local disk, whatever its name: hard links of it are
/// the same. Such files never change; the time of birth tells one from a later one that got its
/// inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    /// Device.
    pub dev: u64,
    /// Inode.
    pub ino: u64,
    /// statx(2), stx_btime, in nanoseconds since the epoch.
    pub born_ns: u64,
}

impl FileKey {
    /// That of an open file. `None`: its file system does not tell when it was born, and nothing is
    /// known of it.
    ///
    /// # Errors
    /// The file system's.
    pub fn of(file: impl AsFd) -> io::Result<Option<FileKey>> {
        let wanted = StatxFlags::BTIME | StatxFlags::INO;
        let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted)?;
        let has_all = stat.stx_mask & wanted.bits() == wanted.bits();
        let born_ns = u64::try_from(stat.stx_btime.tv_sec)
            .ok()
            .and_then(|seconds| seconds.checked_mul(1_000_000_000)?.checked_add(stat.stx_btime.tv_nsec.into()));
        let dev = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
        Ok(born_ns.filter(|_| has_all).map(|born_ns| FileKey { dev, ino: stat.stx_ino, born_ns }))
    }
}

/// Which pages of which page files are stored: (checksum, place) by file and page. A page whose
/// checksum is another one was written anew.
#[derive(Debug, Clone, Default)]
pub struct Known {
    blocks: Blocks,
    /// Checksum, number of the block, first byte there.
    files: BTreeMap<FileKey, BTreeMap<u32, (u32, u32, u32)>>,
}

impl Known {
    /// Where a page lies, if it is still the one with this checksum (CRC-32).
    pub fn get(&self, file: FileKey, page: u32, sum: u32) -> Option<ContentPlace> {
        let (known, block, at) = *self.files.get(&file)?.get(&page)?;
        (known == sum).then(|| ContentPlace { block: self.blocks.list[block as usize], at })
    }

    /// Says where a page lies.
    pub fn insert(&mut self, file: FileKey, page: u32, sum: u32, place: ContentPlace) {
        let block = self.blocks.number(place.block);
        self.files.entry(file).or_default().insert(page, (sum, block, place.at));
    }

    /// Its bytes, for a local file.
    pub fn save(&self, realm: &Realm) -> Vec<u8> {
        let mut body = Vec::new();
        wire::put(&mut body, self.files.len() as u64);
        for (file, pages) in &self.files {
            for number in [file.dev, file.ino, file.born_ns, pages.len() as u64] {
                wire::put(&mut body, number);
            }
            for (page, (sum, block, at)) in pages {
                for number in [*page, *sum, *block, *at] {
                    wire::put(&mut body, number.into());
                }
            }
        }
        let mut out = begin(KNOWN, realm);
        put_places(&mut out, &self.blocks.list);
        out.extend_from_slice(&body);
        end(out)
    }

    /// Reads it back, as [`Index::load`].
    pub fn load(bytes: &[u8], realm: &Realm) -> Option<Known> {
        let mut reader = open(bytes, KNOWN, realm)?;
        let list = take_places(&mut reader)?;
        let mut known = Known::default();
        for _ in 0..reader.count()? {
            let file = FileKey { dev: reader.number()?, ino: reader.number()?, born_ns: reader.number()? };
            for _ in 0..reader.count()? {
                let (page, sum) = (reader.small()?, reader.small()?);
                let block = *list.get(reader.small()? as usize)?;
                known.insert(file, page, sum, ContentPlace { block, at: reader.small()? });
            }
        }
        reader.end()?;
        Some(known)
    }
}

pub(crate) fn begin(magic: [u8; 8], realm: &Realm) -> Vec<u8> {
    let mut out = magic.to_vec();
    wire::put_bytes(&mut out, realm.as_str().as_bytes());
    out
}

pub(crate) fn end(mut out: Vec<u8>) -> Vec<u8> {
    let sum = blake3::hash(&out);
    out.extend_from_slice(sum.as_bytes());
    out
}

pub(crate) fn open<'a>(bytes: &'a [u8], magic: [u8; 8], realm: &Realm) -> Option<Reader<'a>> {
    let (body, sum) = bytes.split_last_chunk::<32>()?;
    let mut reader = Reader(body);
    let is_it = blake3::hash(body) == *sum && reader.array()? == magic && reader.text()? == realm.as_str();
    is_it.then_some(reader)
}

pub(crate) fn put_places(out: &mut Vec<u8>, blocks: &[BlockRef]) {
    let mut packs: Vec<PackRef> = blocks.iter().map(|block| block.pack).collect();
    packs.sort_unstable();
    packs.dedup();
    wire::put(out, packs.len() as u64);
    for pack in &packs {
        out.extend_from_slice(&pack.id.0);
        out.extend_from_slice(&pack.key.0);
    }
    crate::pack::put_blocks(out, blocks, &packs);
}

pub(crate) fn take_places(reader: &mut Reader<'_>) -> Option<Vec<BlockRef>> {
    let mut packs = Vec::new();
    for _ in 0..reader.count()? {
        packs.push(PackRef { id: PackId(reader.array()?), key: KeyId(reader.array()?) });
    }
    crate::pack::take_blocks(reader, &packs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(pack: u8, offset: u32) -> ContentPlace {
        let pack = PackRef { id: PackId([pack; 32]), key: KeyId([1; 16]) };
        ContentPlace { block: BlockRef { pack, offset, sealed: 100, plain: 8192 }, at: 4096 }
    }

    #[test]
    fn both_are_read_back_and_another_realms_is_not() {
        let (realm, other) = ("blue".parse().unwrap(), "red".parse().unwrap());
        let mut index = Index::default();
        let hash = |n| ContentHash([n; 16]);
        index.insert(hash(1), place(7, 300));
        index.insert(hash(2), place(9, 192));
        index.insert(hash(2), place(8, 192));
        let bytes = index.save(&realm);
        let mut back = Index::load(&bytes, &realm).unwrap();
        assert_eq!((back.get(&hash(1)), back.get(&hash(2)), back.len()), (Some(place(7, 300)), Some(place(8, 192)), 2));
        assert!(Index::load(&bytes, &other).is_none() && Known::load(&bytes, &realm).is_none());
        back.retain(|pack| pack.0[0] != 7);
        assert_eq!((back.get(&hash(1)), back.get(&hash(2))), (None, Some(place(8, 192))));
        let mut known = Known::default();
        let file = FileKey { dev: 1, ino: 2, born_ns: 3 };
        known.insert(file, 5, 99, place(7, 300));
        let bytes = known.save(&realm);
        let back = Known::load(&bytes, &realm).unwrap();
        assert_eq!((back.get(file, 5, 99), back.get(file, 6, 99)), (Some(place(7, 300)), None));
        assert_eq!((known.get(file, 5, 99), known.get(file, 5, 98)), (Some(place(7, 300)), None));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(Known::load(&bad, &realm).is_none(), "byte {at}");
        }
    }

    #[test]
    fn what_was_neither_stored_nor_found_for_the_longest_goes() {
        let hash = |n: usize| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            ContentHash(bytes)
        };
        let mut index = Index::default();
        let mut often = Index::default();
        often.insert(hash(0), place(7, 300));
        for n in 0..10 * HALF {
            index.insert(hash(n), place(7, n as u32 & 0xffff));
            if n % (HALF / 2) == 0 {
                index.merge(&often);
            }
            assert!(index.len() <= 2 * HALF);
        }
        assert!(index.len() >= HALF);
        assert_eq!(index.get(&hash(0)), Some(place(7, 300)), "it is found again and again");
        assert_eq!(index.get(&hash(1)), None);
        assert!((9 * HALF..10 * HALF).all(|n| index.get(&hash(n)).is_some()));
        let realm = "blue".parse().unwrap();
        let back = Index::load(&index.save(&realm), &realm).unwrap();
        assert!((9 * HALF..10 * HALF).all(|n| back.get(&hash(n)) == index.get(&hash(n))));
    }

    #[test]
    fn a_file_has_one_key_under_all_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let key = |name: &str| FileKey::of(std::fs::File::open(at(name)).unwrap()).unwrap();
        std::fs::write(at("a"), "1").unwrap();
        let first = key("a");
        assert!(first.is_some(), "the file system of {} keeps no times of birth", dir.path().display());
        std::fs::hard_link(at("a"), at("b")).unwrap();
        std::fs::write(at("a"), "other").unwrap();
        std::fs::write(at("c"), "1").unwrap();
        assert_eq!(key("b"), first);
        assert_ne!(key("c"), first);
    }

    #[test]
    fn hashes_of_two_realms_differ() {
        let hasher = |realm: &str| Hasher::new(&Keyring::generate(realm.parse().unwrap(), 1)).unwrap();
        let (blue, red) = (hasher("blue"), hasher("red"));
        assert_eq!(blue.page(b"x"), blue.page(b"x"));
        assert_ne!(blue.page(b"x"), red.page(b"x"));
        assert_ne!(blue.page(b"x"), blue.piece(b"x"));
    }
}
