//! Authenticated encryption of objects: the clear header that says what an object belongs to, and
//! the key that only it has.
//!
//! Owns the header's layout (docs/design/2026-11-22-archive.md) and the order of the checks.
//! Nothing in an object is believed before it was authenticated, and there is no way to write one
//! that is not. Each object has a key of its own, derived from the realm's and a salt that is never
//! used twice, so a nonce needs to differ within one object only; the caller that seals gives a
//! number that only grows.

use crate::ids::{KeyId, ProcId, random};
use crate::keys::{Keyring, NoKey, Secret};
use kip_types::{Generation, Realm};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf;
use std::fmt;
use zeroize::Zeroizing;

/// Newest version of the layout of any object. [`ObjectKind::format`] has that of each kind.
pub const FORMAT: u16 = 2;
/// Bytes of the clear header.
pub const HEADER: usize = 192;
/// Bytes that sealing adds.
pub const TAG: usize = 16;
const MAGIC: [u8; 8] = *b"KIPARCHV";
/// AES-256-GCM.
const CIPHER: u8 = 1;
/// Where the header's own tag begins.
const TAGGED: usize = 160;

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// A generation's front.
    Front = 1,
    /// Blocks.
    Pack = 2,
    /// A proc's newest state.
    Head = 3,
    /// A data directory; no object of a store.
    Backup = 4,
    /// A template; no object of a store.
    Template = 5,
}

impl ObjectKind {
    /// Version of the layout in which this Kip writes an object of this kind; it reads all versions
    /// up to that one.
    ///
    /// A front has format 2 since its checkpoint images are one file, `checkpoint.tar`, instead of
    /// a file each.
    pub const fn format(self) -> u16 {
        match self {
            ObjectKind::Front => 2,
            ObjectKind::Pack | ObjectKind::Head | ObjectKind::Backup | ObjectKind::Template => 1,
        }
    }

    fn of(byte: u8) -> Option<ObjectKind> {
        [ObjectKind::Front, ObjectKind::Pack, ObjectKind::Head, ObjectKind::Backup, ObjectKind::Template]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ObjectKind::Front => "front",
            ObjectKind::Pack => "pack",
            ObjectKind::Head => "head",
            ObjectKind::Backup => "backup",
            ObjectKind::Template => "template",
        })
    }
}

/// The clear beginning of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Version of its layout, at most that of its kind.
    pub format: u16,
    /// What it is.
    pub kind: ObjectKind,
    /// The realm's key that sealed it.
    pub key: KeyId,
    /// What its own key was derived with; of a pack its name, of a front a part of it.
    pub salt: [u8; 32],
    /// Whose it is; zeros, if it is a pack, which belongs to no proc.
    pub proc: ProcId,
    /// Of which generation; 0 of a pack.
    pub generation: Generation,
    /// Of which realm.
    pub realm: Realm,
}

/// What the caller that opens an object knows of it. The realm is the keyring's.
#[derive(Debug, Clone, Copy)]
pub struct Expect {
    /// What it must be.
    pub kind: ObjectKind,
    /// Whose it must be, if that matters.
    pub proc: Option<ProcId>,
    /// Of which generation, if that is known.
    pub generation: Option<Generation>,
    /// Which one of all that are called so: what its name says of its salt.
    pub salt: Option<[u8; 32]>,
}

/// An object is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnsealError {
    /// Something else.
    #[error("this is no object of Kip's archive")]
    NotOurs,
    /// Of a newer Kip.
    #[error("the object has format {found}, this Kip reads up to {newest}: upgrade Kip")]
    Newer {
        /// Its format.
        found: u16,
        /// The newest that this Kip reads of an object of its kind.
        newest: u16,
    },
    /// Another kind of object.
    #[error("the object is a {found}, not a {expected}")]
    Kind {
        /// What it is.
        found: ObjectKind,
        /// What it should be.
        expected: ObjectKind,
    },
    /// Another tenant's.
    #[error("the object belongs to realm {found}, not to {expected}")]
    Realm {
        /// Whose it says that it is.
        found: Realm,
        /// Whose it should be.
        expected: Realm,
    },
    /// Another proc's.
    #[error("the object belongs to proc {found}, not to {expected}")]
    Proc {
        /// Whose it is.
        found: ProcId,
        /// Whose it should be.
        expected: ProcId,
    },
    /// Another generation's.
    #[error("the object belongs to generation {found}, not to {expected}")]
    Generation {
        /// Whose it is.
        found: Generation,
        /// Whose it should be.
        expected: Generation,
    },
    /// Another one under this one's name.
    #[error("the object is another {kind} than its name says")]
    Other {
        /// What both are.
        kind: ObjectKind,
    },
    /// Its key is missing or gone.
    #[error(transparent)]
    Key(#[from] NoKey),
    /// Bytes were changed, moved or exchanged.
    #[error("the object is damaged: its {what} at byte {at} is not what was sealed")]
    Damaged {
        /// Which part.
        what: &'static str,
        /// Where it begins in the object.
        at: u64,
    },
    /// The end is missing.
    #[error("the object is cut short: it ends at byte {at}, before its last part")]
    Truncated {
        /// Bytes that there are.
        at: u64,
    },
    /// Something was appended.
    #[error("the object goes on behind its last part, at byte {at}")]
    Trailing {
        /// Bytes up to there.
        at: u64,
    },
    /// Sealed by a key of the realm, and yet not understood.
    #[error("the {what} is authentic but cannot be understood: it was made by a faulty Kip")]
    Malformed {
        /// Which part.
        what: &'static str,
    },
}

impl UnsealError {
    /// What is there is not what was stored, and no key and no other Kip would change that.
    pub fn is_damage(&self) -> bool {
        !matches!(self, UnsealError::Newer { .. } | UnsealError::Key(_))
    }
}

/// An object's own keys.
pub(crate) struct ObjectKey {
    aead: LessSafeKey,
    tag: Secret,
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ObjectKey")
    }
}

/// The header's tag, additional data of all that follows.
pub(crate) type HeaderTag = [u8; 32];

fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl ObjectKey {
    /// That of an object with this salt.
    pub(crate) fn derive(secret: &Secret, salt: &[u8; 32]) -> ObjectKey {
        let extracted = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&secret[..]);
        let expand = |info: &[u8]| -> Secret {
            let mut key = Zeroizing::new([0; 32]);
            let info = [info];
            let expanded = extracted.expand(&info, Length(32));
            expanded.and_then(|okm| okm.fill(&mut key[..])).expect("32 bytes are what HKDF can give");
            key
        };
        let sealing = expand(b"kip archive 2026-11-22 seal");
        let aead = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &sealing[..]).expect("32 bytes"));
        ObjectKey { aead, tag: expand(b"kip archive 2026-11-22 header") }
    }

    /// Seals in place, and appends [`TAG`] bytes. No number may be used twice.
    pub(crate) fn seal(&self, number: u64, aad: &[u8], bytes: &mut Vec<u8>, from: usize) {
        let sealed = self.aead.seal_in_place_separate_tag(nonce(number), Aad::from(aad), &mut bytes[from..]);
        let tag = sealed.expect("parts are far below AES-GCM's limit");
        bytes.extend_from_slice(tag.as_ref());
    }

    /// Opens in place what [`ObjectKey::seal`] made.
    pub(crate) fn open<'a>(&self, number: u64, aad: &[u8], sealed: &'a mut [u8]) -> Option<&'a mut [u8]> {
        self.aead.open_in_place(nonce(number), Aad::from(aad), sealed).ok()
    }

    fn header_tag(&self, header: &[u8]) -> HeaderTag {
        *blake3::keyed_hash(&self.tag, &header[..TAGGED]).as_bytes()
    }
}

/// What an object is sealed with, once its header is written or checked.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) header: Header,
    pub(crate) key: ObjectKey,
    pub(crate) tag: HeaderTag,
}

/// Begins an object with the realm's current key: its header's bytes, and what the rest is sealed
/// with.
pub(crate) fn begin(
    keys: &Keyring,
    kind: ObjectKind,
    proc: ProcId,
    generation: Generation,
) -> Result<(Vec<u8>, Opened), NoKey> {
    let id = keys.current()?;
    let header =
        Header { format: kind.format(), kind, key: id, salt: random(), proc, generation, realm: keys.realm().clone() };
    let key = ObjectKey::derive(keys.secret(id)?, &header.salt);
    let mut bytes = header.encode();
    let tag = key.header_tag(&bytes);
    bytes.extend_from_slice(&tag);
    Ok((bytes, Opened { header, key, tag }))
}

/// Checks a header against what is expected.
pub(crate) fn open(bytes: &[u8; HEADER], keys: &Keyring, expect: &Expect) -> Result<Opened, UnsealError> {
    let header = Header::decode(bytes)?;
    if header.kind != expect.kind {
        return Err(UnsealError::Kind { found: header.kind, expected: expect.kind });
    }
    if header.realm != *keys.realm() {
        return Err(UnsealError::Realm { found: header.realm, expected: keys.realm().clone() });
    }
    let key = ObjectKey::derive(keys.secret(header.key)?, &header.salt);
    let tag = key.header_tag(bytes);
    // blake3::Hash compares in constant time.
    let stored = blake3::Hash::from_bytes(bytes[TAGGED..].try_into().expect("32 bytes"));
    if stored != blake3::Hash::from_bytes(tag) {
        return Err(UnsealError::Damaged { what: "header", at: 0 });
    }
    match (expect.proc, expect.generation, expect.salt) {
        (Some(expected), _, _) if header.proc != expected => Err(UnsealError::Proc { found: header.proc, expected }),
        (_, Some(expected), _) if header.generation != expected => {
            Err(UnsealError::Generation { found: header.generation, expected })
        }
        (_, _, Some(expected)) if header.salt != expected => Err(UnsealError::Other { kind: header.kind }),
        _ => Ok(Opened { header, key, tag }),
    }
}

impl Header {
    /// Reads a header without believing it: for a caller that wants to know which key an object
    /// needs.
    ///
    /// # Errors
    /// `NotOurs`, `Newer`, `Truncated`, `Damaged`.
    pub fn peek(bytes: &[u8]) -> Result<Header, UnsealError> {
        let head = bytes.first_chunk().ok_or(UnsealError::Truncated { at: bytes.len() as u64 })?;
        Header::decode(head)
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.format.to_le_bytes());
        out.extend_from_slice(&[self.kind as u8, CIPHER, 0, 0, 0, 0]);
        out.extend_from_slice(&self.key.0);
        out.extend_from_slice(&self.salt);
        out.extend_from_slice(&self.proc.0);
        out.extend_from_slice(&self.generation.0.to_le_bytes());
        out.extend_from_slice(self.realm.as_str().as_bytes());
        out.resize(TAGGED, 0);
        out
    }

    fn decode(bytes: &[u8; HEADER]) -> Result<Header, UnsealError> {
        if bytes[..8] != MAGIC {
            return Err(UnsealError::NotOurs);
        }
        let damaged = || UnsealError::Damaged { what: "header", at: 0 };
        let format = u16::from_le_bytes([bytes[8], bytes[9]]);
        // A kind that this Kip does not know is of a newer one too, if the format says so.
        let kind = ObjectKind::of(bytes[10]);
        let newest = kind.map_or(FORMAT, ObjectKind::format);
        if format > newest {
            return Err(UnsealError::Newer { found: format, newest });
        }
        let kind = kind.ok_or_else(damaged)?;
        let part = |at: usize| -> [u8; 16] { bytes[at..at + 16].try_into().expect("16 bytes") };
        let name = bytes[88..152].split(|byte| *byte == 0).next().expect("there is always a first part");
        let realm = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok()).ok_or_else(damaged)?;
        let header = Header {
            format,
            kind,
            key: KeyId(part(16)),
            salt: bytes[32..64].try_into().expect("32 bytes"),
            proc: ProcId(part(64)),
            generation: Generation(u64::from_le_bytes(bytes[80..88].try_into().expect("8 bytes"))),
            realm,
        };
        // Only one way to write it.
        if header.encode() != bytes[..TAGGED] { Err(damaged()) } else { Ok(header) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(realm: &str) -> Keyring {
        Keyring::generate(realm.parse().unwrap(), 1)
    }

    fn made(keys: &Keyring) -> ([u8; HEADER], ProcId) {
        let proc = ProcId::random();
        let (bytes, _) = begin(keys, ObjectKind::Front, proc, Generation(4)).unwrap();
        (bytes.try_into().unwrap(), proc)
    }

    fn expect(proc: ProcId, generation: u64) -> Expect {
        Expect { kind: ObjectKind::Front, proc: Some(proc), generation: Some(Generation(generation)), salt: None }
    }

    #[test]
    fn each_thing_that_is_not_as_expected_has_its_own_word() {
        let keys = ring("blue");
        let (bytes, proc) = made(&keys);
        assert_eq!(open(&bytes, &keys, &expect(proc, 4)).unwrap().header.generation, Generation(4));
        let refused = |keys: &Keyring, expect| open(&bytes, keys, &expect).unwrap_err();
        assert!(matches!(refused(&ring("red"), expect(proc, 4)), UnsealError::Realm { .. }));
        assert!(matches!(refused(&ring("blue"), expect(proc, 4)), UnsealError::Key(NoKey::Unknown { .. })));
        assert!(matches!(refused(&keys, expect(ProcId::random(), 4)), UnsealError::Proc { .. }));
        assert!(matches!(refused(&keys, expect(proc, 5)), UnsealError::Generation { .. }));
        let salt = Header::peek(&bytes).unwrap().salt;
        open(&bytes, &keys, &Expect { salt: Some(salt), ..expect(proc, 4) }).unwrap();
        let other = Expect { salt: Some([1; 32]), ..expect(proc, 4) };
        assert_eq!(refused(&keys, other).to_string(), "the object is another front than its name says");
        let head = Expect { kind: ObjectKind::Head, ..expect(proc, 4) };
        assert_eq!(refused(&keys, head).to_string(), "the object is a front, not a head");
        let mut newer = bytes;
        newer[8] = 3;
        let told = open(&newer, &keys, &expect(proc, 4)).unwrap_err().to_string();
        assert_eq!(told, "the object has format 3, this Kip reads up to 2: upgrade Kip");
        assert_eq!(Header::peek(b"KIPARCHV"), Err(UnsealError::Truncated { at: 8 }));
        assert_eq!(Header::peek(&[0; HEADER]), Err(UnsealError::NotOurs));
    }

    #[test]
    fn the_format_is_that_of_the_kind_and_older_ones_are_read() {
        let keys = ring("blue");
        let proc = ProcId::random();
        for kind in [ObjectKind::Front, ObjectKind::Pack, ObjectKind::Head, ObjectKind::Backup] {
            let (bytes, _) = begin(&keys, kind, proc, Generation(4)).unwrap();
            let header = Header::peek(&bytes).unwrap();
            assert_eq!(header.format, kind.format());
            let older = Header { format: 1, ..header.clone() };
            assert_eq!(Header::peek(&[older.encode(), vec![0; TAG * 2]].concat()), Ok(older));
            let newer = Header { format: kind.format() + 1, ..header };
            let refused = Header::peek(&[newer.encode(), vec![0; TAG * 2]].concat());
            assert_eq!(refused, Err(UnsealError::Newer { found: newer.format, newest: kind.format() }));
        }
    }

    // promise format: a destroyed key is not called damage; keys rotate and travel wrapped
    // held by: this,
    //   `kip_archive::pack::tests::packs_of_an_older_key_still_open_and_of_a_destroyed_one_say_so`,
    //   `kip_archive::keys::wrap::tests::keys_travel_under_a_key_or_a_passphrase`
    #[test]
    fn a_destroyed_key_is_not_called_damage() {
        let mut keys = ring("blue");
        let (bytes, proc) = made(&keys);
        keys.rotate(2);
        open(&bytes, &keys, &expect(proc, 4)).unwrap();
        keys.destroy(keys.facts()[0].id, 3).unwrap();
        let e = open(&bytes, &keys, &expect(proc, 4)).unwrap_err();
        assert!(matches!(e, UnsealError::Key(NoKey::Destroyed { at_ms: 3, .. })), "{e}");
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_found() {
        let keys = ring("blue");
        let (bytes, proc) = made(&keys);
        for bit in 0..HEADER * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&bad, &keys, &expect(proc, 4)).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn what_is_sealed_under_one_number_opens_under_no_other() {
        let keys = ring("blue");
        let (_, opened) = begin(&keys, ObjectKind::Pack, ProcId([0; 16]), Generation(0)).unwrap();
        let mut bytes = b"..secret".to_vec();
        opened.key.seal(7, b"of this", &mut bytes, 2);
        assert_eq!(bytes.len(), 8 + TAG);
        assert_eq!(opened.key.open(7, b"of this", &mut bytes[2..].to_vec()).unwrap(), b"secret");
        assert!(opened.key.open(8, b"of this", &mut bytes[2..].to_vec()).is_none());
        assert!(opened.key.open(7, b"of that", &mut bytes[2..].to_vec()).is_none());
        assert!(opened.key.open(7, b"of this", &mut bytes[3..].to_vec()).is_none());
    }
}
