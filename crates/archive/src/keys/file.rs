//! A realm's keys on disk: one file, `REALM.keys`, mode 0600, replaced by rename.
//!
//! Owns how the file is replaced. A crash leaves the old file or the new one, and maybe `REALM.keys.old`, which the
//! next [`Keyring::save`] overwrites and removes. What a key that was destroyed leaves on the disk is overwritten in
//! place, which is as much as the file system and the disk allow: one that copies on write, or a flash disk, may keep
//! it.

use super::{Keyring, Undecodable};
use kip_types::Realm;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// A realm's keys cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// There is no such file.
    #[error("realm {realm} has no keys in {dir}: import them, or make new ones")]
    Missing {
        /// Whose.
        realm: Realm,
        /// Where they would be.
        dir: PathBuf,
    },
    /// The file system's word.
    #[error("key file {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Not what was written.
    #[error("key file {path} is damaged: restore it from an export")]
    Damaged {
        /// Which.
        path: PathBuf,
    },
    /// Of a newer Kip.
    #[error("key file {path} has format {found}, this Kip reads up to {}: upgrade Kip", super::FORMAT)]
    Newer {
        /// Which.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// Another realm's under this one's name.
    #[error("key file {path} has the keys of realm {found}")]
    Foreign {
        /// Which.
        path: PathBuf,
        /// Whose keys they are.
        found: Realm,
    },
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> KeyFileError + '_ {
    move |source| KeyFileError::Io { path: path.to_owned(), source }
}

impl Keyring {
    /// Reads a realm's keys from a directory of such files.
    ///
    /// # Errors
    /// See [`KeyFileError`].
    pub fn load(dir: &Path, realm: &Realm) -> Result<Keyring, KeyFileError> {
        let path = path_of(dir, realm);
        let bytes = match fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(KeyFileError::Missing { realm: realm.clone(), dir: dir.to_owned() });
            }
            read => Zeroizing::new(read.map_err(io_at(&path))?),
        };
        let ring = Keyring::decode(&bytes).map_err(|e| match e {
            Undecodable::Damaged => KeyFileError::Damaged { path: path.clone() },
            Undecodable::Newer(found) => KeyFileError::Newer { path: path.clone(), found },
        })?;
        if ring.realm() != realm {
            return Err(KeyFileError::Foreign { path, found: ring.realm().clone() });
        }
        Ok(ring)
    }

    /// Writes them, reads them back, and overwrites what was there before. One caller at a time.
    ///
    /// # Errors
    /// The file system's; then the file is the old one or the new one.
    pub fn save(&self, dir: &Path) -> Result<(), KeyFileError> {
        let path = path_of(dir, self.realm());
        let (new, old) = (path.with_extension("keys.new"), path.with_extension("keys.old"));
        shred_leftover(&old, &path).map_err(io_at(&old))?;
        remove(&new).map_err(io_at(&new))?;
        let bytes = self.encode();
        let mut options = OpenOptions::new();
        let made = options.write(true).create_new(true).mode(0o600).open(&new);
        made.and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all())).map_err(io_at(&new))?;
        if *Zeroizing::new(fs::read(&new).map_err(io_at(&new))?) != *bytes {
            return Err(KeyFileError::Damaged { path: new });
        }
        match fs::hard_link(&path, &old) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_at(&old)(e)),
            _ => {}
        }
        fs::rename(&new, &path).map_err(io_at(&path))?;
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_at(dir))?;
        shred_leftover(&old, &path).map_err(io_at(&old))
    }
}

/// The file of a realm's keys.
fn path_of(dir: &Path, realm: &Realm) -> PathBuf {
    dir.join(format!("{realm}.keys"))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Overwrites what was replaced, unless a crash left it as another name of what is in use.
fn shred_leftover(old: &Path, in_use: &Path) -> io::Result<()> {
    let meta = match fs::symlink_metadata(old) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        meta => meta?,
    };
    let same = fs::symlink_metadata(in_use).is_ok_and(|m| (m.dev(), m.ino()) == (meta.dev(), meta.ino()));
    if !same && meta.is_file() {
        let mut file = OpenOptions::new().write(true).open(old)?;
        file.write_all(&vec![0; meta.len() as usize])?;
        file.sync_all()?;
    }
    fs::remove_file(old)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::NoKey;

    fn realm() -> Realm {
        "blue".parse().unwrap()
    }

    #[test]
    fn keys_are_kept_in_a_private_file_and_destroying_overwrites_it() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Keyring::load(dir.path(), &realm()), Err(KeyFileError::Missing { .. })));
        let mut ring = Keyring::generate(realm(), 5);
        ring.save(dir.path()).unwrap();
        let path = dir.path().join("blue.keys");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        let witness = dir.path().join("witness");
        fs::hard_link(&path, &witness).unwrap();
        let key = ring.current().unwrap();
        ring.destroy(key, 9).unwrap();
        ring.save(dir.path()).unwrap();
        assert!(fs::read(&witness).unwrap().iter().all(|byte| *byte == 0), "the old bytes are gone");
        let back = Keyring::load(dir.path(), &realm()).unwrap();
        assert!(matches!(back.secret(key), Err(NoKey::Destroyed { at_ms: 9, .. })));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left beside it");
    }

    #[test]
    fn a_crash_before_the_rename_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut ring = Keyring::generate(realm(), 5);
        ring.save(dir.path()).unwrap();
        fs::hard_link(dir.path().join("blue.keys"), dir.path().join("blue.keys.old")).unwrap();
        fs::write(dir.path().join("blue.keys.new"), b"half").unwrap();
        assert_eq!(Keyring::load(dir.path(), &realm()).unwrap().facts(), ring.facts());
        ring.rotate(6);
        ring.save(dir.path()).unwrap();
        assert_eq!(Keyring::load(dir.path(), &realm()).unwrap().facts(), ring.facts());
    }

    #[test]
    fn what_is_damaged_newer_or_foreign_is_said_to_be() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blue.keys");
        Keyring::generate(realm(), 5).save(dir.path()).unwrap();
        let good = fs::read(&path).unwrap();
        fs::write(&path, &good[1..]).unwrap();
        assert!(matches!(Keyring::load(dir.path(), &realm()), Err(KeyFileError::Damaged { .. })));
        let mut newer = good.clone();
        newer[8] = 2;
        fs::write(&path, &newer).unwrap();
        let told = Keyring::load(dir.path(), &realm()).unwrap_err().to_string();
        assert!(told.ends_with("has format 2, this Kip reads up to 1: upgrade Kip"), "{told}");
        fs::write(dir.path().join("red.keys"), &good).unwrap();
        let red = "red".parse().unwrap();
        assert!(matches!(Keyring::load(dir.path(), &red), Err(KeyFileError::Foreign { .. })));
    }
}
