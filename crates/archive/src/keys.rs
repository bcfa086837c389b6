//! The keys of a realm: which exist, which one seals what is new, which were destroyed and when.
//!
//! Owns the secrets in memory, which are zeroed when they are dropped, their file ([`mod@file`])
//! and their way to other machines ([`wrap`]). Never seals an object: that is [`crate::seal`]. A
//! key is never forgotten: what is left of one that was destroyed is its id and the time, so that a
//! caller that opens what the key sealed learns what happened.
//!
//! ```text
//! generate --> current --rotate--> old, still opens --destroy--> a tombstone, opens nothing
//! ```

mod file;
mod wrap;

pub use file::KeyFileError;
pub use wrap::{Wrap, WrapError};

use crate::ids::{KeyId, random};
use crate::wire::{self, Reader};
use kip_types::Realm;
use std::fmt;
use zeroize::Zeroizing;

/// Bytes of a secret.
pub const SECRET: usize = 32;
/// Version of the keys' layout.
pub const FORMAT: u64 = 1;
const MAGIC: [u8; 8] = *b"KIPKEYS1";

pub(crate) type Secret = Zeroizing<[u8; SECRET]>;

/// There is no such key to work with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoKey {
    /// Never seen.
    #[error("realm {realm} does not have the key {key}: import the keys of the machine that made this")]
    Unknown {
        /// Which.
        key: KeyId,
        /// Whose keys were looked through.
        realm: Realm,
    },
    /// Shredded.
    #[error("the key {key} of realm {realm} was destroyed at {}: what it sealed can never be read again", utc(*.at_ms))]
    Destroyed {
        /// Which.
        key: KeyId,
        /// Whose.
        realm: Realm,
        /// Unix time in milliseconds.
        at_ms: u64,
    },
    /// All are destroyed.
    #[error("realm {realm} has no key to seal with: its current one was destroyed; rotate its keys")]
    NoCurrent {
        /// Whose.
        realm: Realm,
    },
}

#[derive(Clone)]
enum KeyState {
    Live { created_ms: u64, secret: Secret },
    Destroyed { at_ms: u64 },
}

struct Entry {
    id: KeyId,
    state: KeyState,
}

/// What is no secret of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFact {
    /// Its name.
    pub id: KeyId,
    /// Unix time in milliseconds of its making; of one that was destroyed, none.
    pub created_ms: Option<u64>,
    /// Unix time in milliseconds of its end.
    pub destroyed_ms: Option<u64>,
    /// It seals what is new.
    pub is_current: bool,
}

/// All keys of one realm.
pub struct Keyring {
    realm: Realm,
    /// The secret of page hashes; gone with the last key.
    dedup: Option<Secret>,
    entries: Vec<Entry>,
    current: Option<usize>,
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyring").field("realm", &self.realm).field("keys", &self.facts()).finish()
    }
}

impl Keyring {
    /// A ring with one new key, in memory only: what it seals is lost with it. [`Keyring::create`]
    /// makes one that lasts. `now_ms`: Unix time in milliseconds.
    pub fn generate(realm: Realm, now_ms: u64) -> Keyring {
        let mut ring = Keyring { realm, dedup: None, entries: Vec::new(), current: None };
        ring.rotate(now_ms);
        ring
    }

    /// Whose.
    pub fn realm(&self) -> &Realm {
        &self.realm
    }

    /// What there is, oldest first.
    pub fn facts(&self) -> Vec<KeyFact> {
        let fact = |(index, entry): (usize, &Entry)| {
            let (created_ms, destroyed_ms) = match entry.state {
                KeyState::Live { created_ms, .. } => (Some(created_ms), None),
                KeyState::Destroyed { at_ms } => (None, Some(at_ms)),
            };
            KeyFact { id: entry.id, created_ms, destroyed_ms, is_current: self.current == Some(index) }
        };
        self.entries.iter().enumerate().map(fact).collect()
    }

    /// The key that seals what is new.
    ///
    /// # Errors
    /// `NoCurrent`.
    pub fn current(&self) -> Result<KeyId, NoKey> {
        let index = self.current.ok_or_else(|| NoKey::NoCurrent { realm: self.realm.clone() })?;
        Ok(self.entries[index].id)
    }

    /// Adds a key, which seals from now on; the old ones still open.
    pub fn rotate(&mut self, now_ms: u64) -> KeyId {
        let id = KeyId::random();
        let secret = Zeroizing::new(random());
        self.entries.push(Entry { id, state: KeyState::Live { created_ms: now_ms, secret } });
        self.current = Some(self.entries.len() - 1);
        self.dedup.get_or_insert_with(|| Zeroizing::new(random()));
        id
    }

    /// Forgets a secret for good; [`Keyring::save`] makes it so on disk. With the last one goes the
    /// secret of page hashes.
    ///
    /// # Errors
    /// `Unknown`. One that was destroyed before keeps its time.
    pub fn destroy(&mut self, id: KeyId, now_ms: u64) -> Result<(), NoKey> {
        let place = self.entries.iter().position(|entry| entry.id == id);
        let index = place.ok_or_else(|| NoKey::Unknown { key: id, realm: self.realm.clone() })?;
        if let KeyState::Live { .. } = self.entries[index].state {
            self.entries[index].state = KeyState::Destroyed { at_ms: now_ms };
        }
        if self.current == Some(index) {
            self.current = None;
        }
        if self.entries.iter().all(|entry| matches!(entry.state, KeyState::Destroyed { .. })) {
            self.dedup = None;
        }
        Ok(())
    }

    /// Forgets all secrets.
    pub fn destroy_all(&mut self, now_ms: u64) {
        for id in self.entries.iter().map(|entry| entry.id).collect::<Vec<_>>() {
            self.destroy(id, now_ms).expect("it is one of ours");
        }
    }

    /// Whether it opens what it sealed.
    ///
    /// # Errors
    /// `Unknown`, `Destroyed`.
    pub fn check(&self, id: KeyId) -> Result<(), NoKey> {
        self.secret(id).map(drop)
    }

    pub(crate) fn secret(&self, id: KeyId) -> Result<&Secret, NoKey> {
        let realm = || self.realm.clone();
        match self.entries.iter().find(|entry| entry.id == id).map(|entry| &entry.state) {
            Some(KeyState::Live { secret, .. }) => Ok(secret),
            Some(KeyState::Destroyed { at_ms }) => Err(NoKey::Destroyed { key: id, realm: realm(), at_ms: *at_ms }),
            None => Err(NoKey::Unknown { key: id, realm: realm() }),
        }
    }

    /// What hashes of pages and contents are keyed with.
    pub(crate) fn hash_key(&self) -> Result<Secret, NoKey> {
        let secret = self.dedup.as_ref().ok_or_else(|| NoKey::NoCurrent { realm: self.realm.clone() })?;
        Ok(Zeroizing::new(blake3::derive_key("kip archive 2026-11-22 hashes of pages and contents", &secret[..])))
    }

    /// Takes over what another copy of the same ring knows: keys that this one does not have, and
    /// the ends of those that were destroyed there. False, and nothing is changed, if the other is
    /// no copy of this ring: live keys would belong to another secret of hashes.
    #[must_use]
    fn merge(&mut self, other: &Keyring) -> bool {
        let is_live = |entry: &&Entry| matches!(entry.state, KeyState::Live { .. });
        let ours = |id: KeyId| self.entries.iter().find(|entry| entry.id == id).map(|entry| &entry.state);
        let stays = |entry: &&Entry| is_live(entry) && !matches!(ours(entry.id), Some(KeyState::Destroyed { .. }));
        let some_stay = other.entries.iter().any(|entry| stays(&entry));
        if self.realm != other.realm {
            return false;
        }
        match (&self.dedup, &other.dedup) {
            (Some(ours), Some(theirs)) if some_stay && ours != theirs => return false,
            (None, Some(theirs)) if some_stay => self.dedup = Some(theirs.clone()),
            _ => {}
        }
        let seals = |ring: &Keyring| ring.current.map(|index| ring.entries[index].id);
        let (mine, their) = (seals(self), seals(other));
        let is_news = their.is_some_and(|their| self.entries.iter().all(|entry| entry.id != their));
        let is_known = mine.is_some_and(|mine| other.entries.iter().any(|entry| entry.id == mine));
        let mut added = Vec::new();
        for entry in &other.entries {
            match self.entries.iter_mut().find(|own| own.id == entry.id) {
                None => added.push(Entry { id: entry.id, state: entry.state.clone() }),
                Some(own) => {
                    if let (KeyState::Live { .. }, KeyState::Destroyed { at_ms }) = (&own.state, &entry.state) {
                        own.state = KeyState::Destroyed { at_ms: *at_ms };
                    }
                }
            }
        }
        self.entries.extend(added);
        // Oldest first; what was destroyed before all of them. Stable, so that the order of both
        // rings is kept.
        self.entries.sort_by_key(|entry| match entry.state {
            KeyState::Live { created_ms, .. } => created_ms,
            KeyState::Destroyed { .. } => 0,
        });
        // A ring that rotated after it saw the other's key decides which key seals; of two rings
        // that did not see each other's key the later key seals.
        let place = |id: Option<KeyId>| {
            let index = self.entries.iter().position(|entry| Some(entry.id) == id)?;
            matches!(self.entries[index].state, KeyState::Live { .. }).then_some(index)
        };
        let (mine, their) = (place(mine), place(their));
        self.current = match (mine, their) {
            (Some(mine), Some(their)) if is_news => Some(if is_known { their } else { mine.max(their) }),
            (mine, their) => mine.or(their),
        };
        if !self.entries.iter().any(|entry| is_live(&entry)) {
            self.dedup = None;
        }
        true
    }

    /// Everything, in a buffer that is zeroed and was never moved.
    fn encode(&self) -> Zeroizing<Vec<u8>> {
        let mut out = Zeroizing::new(Vec::with_capacity(256 + 96 * self.entries.len()));
        out.extend_from_slice(&MAGIC);
        wire::put(&mut out, FORMAT);
        wire::put_bytes(&mut out, self.realm.as_str().as_bytes());
        wire::put_bytes(&mut out, self.dedup.as_ref().map_or(&[][..], |secret| &secret[..]));
        wire::put(&mut out, self.entries.len() as u64);
        for entry in &self.entries {
            out.extend_from_slice(&entry.id.0);
            match &entry.state {
                KeyState::Live { created_ms, secret } => {
                    wire::put(&mut out, *created_ms);
                    wire::put_bytes(&mut out, &secret[..]);
                }
                KeyState::Destroyed { at_ms } => {
                    wire::put(&mut out, *at_ms);
                    wire::put_bytes(&mut out, &[]);
                }
            }
        }
        wire::put(&mut out, self.current.map_or(0, |index| index as u64 + 1));
        let sum = *blake3::hash(&out).as_bytes();
        out.extend_from_slice(&sum);
        out
    }

    fn decode(bytes: &[u8]) -> Result<Keyring, Undecodable> {
        let damaged = || Undecodable::Damaged;
        let (body, sum) = bytes.split_last_chunk::<32>().ok_or_else(damaged)?;
        let mut reader = Reader(body);
        if reader.array() != Some(MAGIC) {
            return Err(Undecodable::Damaged);
        }
        match reader.number() {
            Some(FORMAT) => {}
            Some(found) if found > FORMAT => return Err(Undecodable::Newer(found)),
            _ => return Err(Undecodable::Damaged),
        }
        if blake3::hash(body) != *sum {
            return Err(Undecodable::Damaged);
        }
        Self::decode_body(&mut reader).ok_or_else(damaged)
    }

    fn decode_body(reader: &mut Reader<'_>) -> Option<Keyring> {
        let secret = |bytes: &[u8]| -> Option<Option<Secret>> {
            if bytes.is_empty() { Some(None) } else { Some(Some(Zeroizing::new(bytes.try_into().ok()?))) }
        };
        let realm = reader.text()?.parse().ok()?;
        let dedup = secret(reader.bytes()?)?;
        let mut entries = Vec::new();
        for _ in 0..reader.count()? {
            let id = KeyId(reader.array()?);
            let time = reader.number()?;
            let state = match secret(reader.bytes()?)? {
                Some(secret) => KeyState::Live { created_ms: time, secret },
                None => KeyState::Destroyed { at_ms: time },
            };
            entries.push(Entry { id, state });
        }
        let current = reader.number()?.checked_sub(1).map(|index| index as usize);
        reader.end()?;
        let is_live =
            |index: usize| matches!(entries.get(index).map(|e: &Entry| &e.state), Some(KeyState::Live { .. }));
        let is_sound = current.is_none_or(is_live);
        is_sound.then_some(Keyring { realm, dedup, entries, current })
    }
}

/// Bytes are not a keyring.
#[derive(Debug)]
enum Undecodable {
    Damaged,
    Newer(u64),
}

/// A time for people, RFC 3339.
pub(crate) fn utc(ms: u64) -> String {
    let (days, second) = (ms / 86_400_000, ms / 1000 % 86_400);
    // Days to a date: http://howardhinnant.github.io/date_algorithms.html#civil_from_days, for days
    // after 1970.
    let day = days + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let (month, date) = (if shifted < 10 { shifted + 3 } else { shifted - 9 }, of_year - (153 * shifted + 2) / 5 + 1);
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn realm() -> Realm {
        "blue".parse().unwrap()
    }

    #[test]
    fn a_time_is_a_date() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400_000), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_354_137_999), "2026-11-22T13:28:57Z");
    }

    #[test]
    fn a_ring_is_read_back_and_every_flipped_bit_is_found() {
        let mut ring = Keyring::generate(realm(), 5);
        let first = ring.current().unwrap();
        ring.rotate(6);
        ring.destroy(first, 7).unwrap();
        let bytes = ring.encode();
        let back = Keyring::decode(&bytes).unwrap();
        assert_eq!((back.facts(), back.realm()), (ring.facts(), &realm()));
        assert_eq!(back.hash_key().unwrap(), ring.hash_key().unwrap());
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Keyring::decode(&bad).is_err(), "bit {bit}");
        }
        for end in 0..bytes.len() {
            assert!(Keyring::decode(&bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn what_was_destroyed_says_when() {
        let mut ring = Keyring::generate(realm(), 5);
        let first = ring.current().unwrap();
        let second = ring.rotate(6);
        ring.destroy(first, 1_795_354_137_000).unwrap();
        ring.destroy(first, 9).unwrap();
        assert_eq!((ring.check(first), ring.check(second)), (ring.secret(first).map(drop), Ok(())));
        let told = ring.check(first).unwrap_err().to_string();
        assert!(told.contains("of realm blue was destroyed at 2026-11-22T13:28:57Z"), "{told}");
        assert_eq!(ring.current(), Ok(second));
        ring.destroy_all(10);
        assert_eq!(ring.current(), Err(NoKey::NoCurrent { realm: realm() }));
        assert!(ring.hash_key().is_err());
        let other = KeyId::random();
        assert_eq!(ring.destroy(other, 1), Err(NoKey::Unknown { key: other, realm: realm() }));
        ring.rotate(11);
        assert!(ring.current().is_ok() && ring.hash_key().is_ok());
    }

    #[test]
    fn secrets_are_not_shown() {
        let ring = Keyring::generate(realm(), 5);
        let shown = format!("{ring:?}");
        let secret = crate::ids::hex(&ring.secret(ring.current().unwrap()).unwrap()[..]);
        assert!(shown.contains("blue") && !shown.contains(&secret) && !shown.contains("secret"));
    }
}
