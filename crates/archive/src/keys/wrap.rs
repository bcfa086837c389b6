//! A realm's keys on their way to another machine: the bytes of the key file, sealed with a key
//! file of 32 bytes or a passphrase.
//!
//! Layout: `KIPWRAP1`, method (1 key, 2 passphrase), then for a passphrase Argon2id's memory in
//! KiB, passes and lanes as 32-bit numbers (0 for a key), 32 bytes of salt, and the sealed keys
//! (AES-256-GCM, nonce 0, everything before as additional data). The salt makes the key of each
//! export another one, so that the nonce never repeats.

use super::{Keyring, Secret, Undecodable};
use crate::ids::random;
use argon2::{Algorithm, Argon2, Params, Version};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use zeroize::Zeroizing;

/// What Argon2id costs (RFC 9106).
#[derive(Clone, Copy)]
struct Cost {
    memory_kib: u32,
    passes: u32,
    lanes: u32,
}

const MAGIC: [u8; 8] = *b"KIPWRAP1";
/// Magic, method, three numbers, salt.
const HEAD: usize = 8 + 1 + 12 + 32;
/// Argon2id: memory in KiB, passes, lanes; the second recommended option of RFC 9106, 4.
const COST: Cost = Cost { memory_kib: 64 * 1024, passes: 3, lanes: 4 };
/// What a file may ask of the machine that reads it: 1 GiB, 16 passes, 16 lanes.
const MOST: Cost = Cost { memory_kib: 1024 * 1024, passes: 16, lanes: 16 };
/// Fewest bytes of a passphrase.
const SHORTEST: usize = 12;

/// With what an export is closed.
pub enum Wrap<'a> {
    /// 32 random bytes that are kept elsewhere.
    Key(&'a [u8; 32]),
    /// Something a person knows; at least 12 bytes.
    Passphrase(&'a str),
}

/// Exported keys cannot be made or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WrapError {
    /// Too easy to try.
    #[error("the passphrase is too short: use at least {SHORTEST} bytes")]
    Short,
    /// No export.
    #[error("this is no file of exported keys")]
    NotOurs,
    /// The other method.
    #[error("these keys are closed with a {method}: give that")]
    OtherMethod {
        /// `passphrase` or `key file`.
        method: &'static str,
    },
    /// The file asks for more work than any export of Kip does.
    #[error("the file asks for {memory_kib} KiB of memory, {passes} passes and {lanes} lanes, which no Kip writes")]
    Costly {
        /// Argon2's memory.
        memory_kib: u32,
        /// Argon2's passes.
        passes: u32,
        /// Argon2's lanes.
        lanes: u32,
    },
    /// One cannot know which.
    #[error("the passphrase or key is not the one that closed these keys, or the file is damaged")]
    Refused,
    /// Of a newer Kip.
    #[error("the keys have format {found}, this Kip reads up to {}: upgrade Kip", super::FORMAT)]
    Newer {
        /// Their format.
        found: u64,
    },
}

impl Keyring {
    /// All keys, closed.
    ///
    /// # Errors
    /// `Short`.
    pub fn export(&self, wrap: &Wrap<'_>) -> Result<Vec<u8>, WrapError> {
        let (method, cost) = match wrap {
            Wrap::Key(_) => (1, Cost { memory_kib: 0, passes: 0, lanes: 0 }),
            Wrap::Passphrase(text) if text.len() < SHORTEST => return Err(WrapError::Short),
            Wrap::Passphrase(_) => (2, COST),
        };
        let salt: [u8; 32] = random();
        let mut out = MAGIC.to_vec();
        out.push(method);
        for number in [cost.memory_kib, cost.passes, cost.lanes] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&salt);
        let key = closing_key(wrap, &salt, cost)?;
        let mut keys = self.encode();
        let tag = key.seal_in_place_separate_tag(Nonce::assume_unique_for_key([0; 12]), Aad::from(&out[..]), &mut keys);
        let tag = tag.expect("a key file is far below AES-GCM's limit");
        out.extend_from_slice(&keys);
        out.extend_from_slice(tag.as_ref());
        Ok(out)
    }

    /// Opens what [`Keyring::export`] made.
    ///
    /// # Errors
    /// See [`WrapError`].
    pub fn import(bytes: &[u8], wrap: &Wrap<'_>) -> Result<Keyring, WrapError> {
        let (head, sealed) = bytes.split_at_checked(HEAD).ok_or(WrapError::NotOurs)?;
        if head[..8] != MAGIC {
            return Err(WrapError::NotOurs);
        }
        match (head[8], wrap) {
            (1, Wrap::Key(_)) | (2, Wrap::Passphrase(_)) => {}
            (1, _) => return Err(WrapError::OtherMethod { method: "key file" }),
            (2, _) => return Err(WrapError::OtherMethod { method: "passphrase" }),
            _ => return Err(WrapError::NotOurs),
        }
        let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        let cost = Cost { memory_kib: number(9), passes: number(13), lanes: number(17) };
        if cost.memory_kib > MOST.memory_kib || cost.passes > MOST.passes || cost.lanes > MOST.lanes {
            return Err(WrapError::Costly { memory_kib: cost.memory_kib, passes: cost.passes, lanes: cost.lanes });
        }
        let key = closing_key(wrap, &head[21..], cost)?;
        let mut keys = Zeroizing::new(sealed.to_vec());
        let nonce = Nonce::assume_unique_for_key([0; 12]);
        let opened = key.open_in_place(nonce, Aad::from(head), &mut keys).map_err(|_| WrapError::Refused)?;
        Keyring::decode(opened).map_err(|e| match e {
            Undecodable::Damaged => WrapError::Refused,
            Undecodable::Newer(found) => WrapError::Newer { found },
        })
    }
}

fn closing_key(wrap: &Wrap<'_>, salt: &[u8], cost: Cost) -> Result<LessSafeKey, WrapError> {
    let mut secret: Secret = Zeroizing::new([0; 32]);
    match wrap {
        Wrap::Key(key) => {
            let mut material = Zeroizing::new([0u8; 64]);
            material[..32].copy_from_slice(&key[..]);
            material[32..].copy_from_slice(salt);
            *secret = blake3::derive_key("kip archive 2026-11-22 exported keys", &material[..]);
        }
        Wrap::Passphrase(text) => {
            let params =
                Params::new(cost.memory_kib, cost.passes, cost.lanes, Some(32)).map_err(|_| WrapError::Refused)?;
            let argon = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
            argon.hash_password_into(text.as_bytes(), salt, &mut secret[..]).map_err(|_| WrapError::Refused)?;
        }
    }
    Ok(LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &secret[..]).expect("32 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_travel_under_a_key_or_a_passphrase() {
        let ring = Keyring::generate("blue".parse().unwrap(), 5);
        let other = [8; 32];
        for (wrap, wrong) in [
            (Wrap::Key(&[7; 32]), Wrap::Key(&other)),
            (Wrap::Passphrase("correct horse battery"), Wrap::Passphrase("correct horse batterx")),
        ] {
            let closed = ring.export(&wrap).unwrap();
            let back = Keyring::import(&closed, &wrap).unwrap();
            assert_eq!(back.encode(), ring.encode());
            assert_eq!(Keyring::import(&closed, &wrong).unwrap_err(), WrapError::Refused);
        }
        assert_eq!(ring.export(&Wrap::Passphrase("short")).unwrap_err(), WrapError::Short);
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_refused() {
        let ring = Keyring::generate("blue".parse().unwrap(), 5);
        let wrap = Wrap::Key(&[7; 32]);
        let closed = ring.export(&wrap).unwrap();
        for bit in 0..closed.len() * 8 {
            let mut bad = closed.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Keyring::import(&bad, &wrap).is_err(), "bit {bit}");
        }
        for end in 0..closed.len() {
            assert!(Keyring::import(&closed[..end], &wrap).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn a_file_cannot_ask_for_more_than_it_may() {
        let ring = Keyring::generate("blue".parse().unwrap(), 5);
        let mut closed = ring.export(&Wrap::Key(&[7; 32])).unwrap();
        closed[8] = 2;
        assert!(matches!(
            Keyring::import(&closed, &Wrap::Key(&[7; 32])),
            Err(WrapError::OtherMethod { method: "passphrase" })
        ));
        closed[9..13].copy_from_slice(&u32::MAX.to_le_bytes());
        let refused = Keyring::import(&closed, &Wrap::Passphrase("correct horse battery"));
        assert!(matches!(refused, Err(WrapError::Costly { .. })));
    }
}
