//! A proc's secrets, files that only the proc may read: sealed in one file beside its record, under
//! the realm's current key.
//!
//! ```text
//! magic 8 | id of the key 16 | salt 32 | sealed: count, then for each name and contents, each with its length (u32 LE) | tag 16
//! ```
//!
//! Owns these bytes; never writes them anywhere. They open only as those of the realm and the proc
//! that they were sealed for. Contents in memory are zeroed when they are dropped.

use crate::ids::{KeyId, random};
use crate::keys::{Keyring, NoKey};
use crate::seal::ObjectKey;
use kip_types::{ProcName, Realm};
use std::collections::BTreeMap;
use std::fmt;
use zeroize::Zeroizing;

const MAGIC: [u8; 8] = *b"KIPSECR1";
/// Bytes before what is sealed.
const HEAD: usize = 8 + 16 + 32;

/// Sealed secrets are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecretsError {
    /// Its key does not open it any more, or never did here.
    #[error(transparent)]
    NoKey(#[from] NoKey),
    /// Something else, or not as it was sealed.
    #[error("they are damaged, or were sealed for another proc")]
    Damaged,
}

/// Files by name.
pub struct Secrets(BTreeMap<String, Zeroizing<Vec<u8>>>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Secrets {
    /// Of these files.
    pub fn new(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Secrets {
        Secrets(files.into_iter().map(|(name, contents)| (name, Zeroizing::new(contents))).collect())
    }

    /// Each name with its contents.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(name, contents)| (name.as_str(), contents.as_slice()))
    }

    /// The bytes to keep.
    ///
    /// # Errors
    /// `NoCurrent`.
    pub fn seal(&self, keys: &Keyring, proc: &ProcName) -> Result<Vec<u8>, NoKey> {
        let id = keys.current()?;
        let salt: [u8; 32] = random();
        let mut plain = Zeroizing::new(Vec::new());
        let length = |n: usize| u32::try_from(n).expect("secrets are far below 4 GiB").to_le_bytes();
        plain.extend_from_slice(&length(self.0.len()));
        for (name, contents) in self.files() {
            for part in [name.as_bytes(), contents] {
                plain.extend_from_slice(&length(part.len()));
                plain.extend_from_slice(part);
            }
        }
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&id.0);
        out.extend_from_slice(&salt);
        // Exactly as much as it takes: what grows leaves copies behind.
        out.reserve_exact(plain.len() + crate::seal::TAG);
        out.extend_from_slice(&plain);
        let aad = belongs(&out[..HEAD], keys.realm(), proc);
        ObjectKey::derive(keys.secret(id)?, &salt).seal(0, &aad, &mut out, HEAD);
        Ok(out)
    }

    /// Opens what [`Secrets::seal`] made.
    ///
    /// # Errors
    /// See [`SecretsError`].
    pub fn open(keys: &Keyring, proc: &ProcName, bytes: &[u8]) -> Result<Secrets, SecretsError> {
        let id = key_of(bytes).ok_or(SecretsError::Damaged)?;
        let (head, sealed) = bytes.split_at(HEAD);
        let salt: [u8; 32] = head[24..].try_into().expect("32 bytes");
        let mut sealed = Zeroizing::new(sealed.to_vec());
        let aad = belongs(head, keys.realm(), proc);
        let plain = ObjectKey::derive(keys.secret(id)?, &salt).open(0, &aad, &mut sealed);
        read(plain.ok_or(SecretsError::Damaged)?).ok_or(SecretsError::Damaged)
    }
}

/// The key that opens sealed secrets; none if they are none.
pub fn key_of(bytes: &[u8]) -> Option<KeyId> {
    let head = bytes.get(..HEAD).filter(|head| head[..8] == MAGIC)?;
    Some(KeyId(head[8..24].try_into().ok()?))
}

fn belongs(head: &[u8], realm: &Realm, proc: &ProcName) -> Vec<u8> {
    [head, realm.to_string().as_bytes(), b"/", proc.as_str().as_bytes()].concat()
}

fn read(mut plain: &[u8]) -> Option<Secrets> {
    fn length(plain: &mut &[u8]) -> Option<usize> {
        let (number, rest) = plain.split_first_chunk()?;
        *plain = rest;
        usize::try_from(u32::from_le_bytes(*number)).ok()
    }
    fn part<'a>(plain: &mut &'a [u8]) -> Option<&'a [u8]> {
        let length = length(plain)?;
        let (part, rest) = plain.split_at_checked(length)?;
        *plain = rest;
        Some(part)
    }
    let count = length(&mut plain)?;
    let mut files = BTreeMap::new();
    for _ in 0..count {
        let name = String::from_utf8(part(&mut plain)?.to_vec()).ok()?;
        files.insert(name, Zeroizing::new(part(&mut plain)?.to_vec()));
    }
    Some(Secrets(files))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_open_for_their_proc_only_and_as_long_as_their_key_is_there() {
        let mut ring = Keyring::generate(Realm::default(), 1);
        let (web, db): (ProcName, ProcName) = ("web".parse().unwrap(), "db".parse().unwrap());
        let files = [("a".to_owned(), b"hunter2".to_vec()), ("b".to_owned(), Vec::new())];
        let secrets = Secrets::new(files);
        assert!(!format!("{secrets:?}").contains("hunter2"));
        let sealed = secrets.seal(&ring, &web).unwrap();
        assert!(!sealed.windows(7).any(|w| w == b"hunter2"));
        assert_eq!(key_of(&sealed), ring.current().ok());
        let opened = Secrets::open(&ring, &web, &sealed).unwrap();
        assert_eq!(opened.files().collect::<Vec<_>>(), [("a", &b"hunter2"[..]), ("b", b"")]);
        assert_eq!(Secrets::open(&ring, &db, &sealed).unwrap_err(), SecretsError::Damaged);
        for at in 0..sealed.len() {
            let mut bad = sealed.clone();
            bad[at] ^= 1;
            assert!(Secrets::open(&ring, &web, &bad).is_err(), "byte {at}");
        }
        let old = ring.current().unwrap();
        ring.rotate(2);
        assert!(Secrets::open(&ring, &web, &sealed).is_ok());
        ring.destroy(old, 3).unwrap();
        let refused = Secrets::open(&ring, &web, &sealed).unwrap_err();
        assert!(refused.to_string().contains("was destroyed"), "{refused}");
    }
}
