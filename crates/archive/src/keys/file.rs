//! A realm's keys on disk: one file, `REALM.keys`, mode 0600, replaced by rename.
//!
//! Owns how the file is replaced. No live key that is on the disk is ever lost by that: the process
//! that saves holds a lock on the directory, reads what is there, takes over every key that it does
//! not have, and only then puts its file in place. A key that one of both has destroyed is
//! destroyed. A file of another ring in the way is an error. Then, and only then, the bytes of the
//! file that was replaced are overwritten in place, which is as much as the file system and the
//! disk allow: one that copies on write, or a flash disk, may keep them.
//!
//! A crash leaves the old file or the new one, and maybe `REALM.keys.old`, another name of either:
//! the next [`Keyring::save`] takes over what it has before it is overwritten.

use super::{Keyring, Undecodable};
use kip_types::Realm;
use rustix::fs::{FlockOperation, OFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
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
    #[error("key file {path} cannot be read or written")]
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
    /// There are keys already.
    #[error("realm {realm} has keys in {path}: load them")]
    Exists {
        /// Whose.
        realm: Realm,
        /// Where.
        path: PathBuf,
    },
    /// Another ring of the same realm.
    #[error(
        "key file {path} has keys of realm {realm} that were made apart from these: nothing was saved; export both and keep one"
    )]
    OtherRing {
        /// Which.
        path: PathBuf,
        /// Whose.
        realm: Realm,
    },
    /// What a crash left may be the only copy.
    #[error(
        "key file {path} is there, but not the one that replaced it: move it to its name without `.old`, or remove it"
    )]
    Orphan {
        /// Which.
        path: PathBuf,
    },
    /// A process that does not take the lock replaced the file.
    #[error("key file {path} was replaced while keys were saved: nothing was saved; try again")]
    Changed {
        /// Which.
        path: PathBuf,
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
    /// A ring with one new key, which is on the disk before it seals anything. `now_ms`: Unix time
    /// in milliseconds.
    ///
    /// # Errors
    /// `Exists`: the realm has keys there. What [`Keyring::save`] says.
    pub fn create(dir: &Path, realm: Realm, now_ms: u64) -> Result<Keyring, KeyFileError> {
        let mut ring = Keyring::generate(realm, now_ms);
        ring.save_as(dir, true)?;
        Ok(ring)
    }

    /// Reads a realm's keys from a directory of such files.
    ///
    /// # Errors
    /// See [`KeyFileError`].
    pub fn load(dir: &Path, realm: &Realm) -> Result<Keyring, KeyFileError> {
        let missing = || KeyFileError::Missing { realm: realm.clone(), dir: dir.to_owned() };
        read(&path_of(dir, realm), realm)?.map(|(ring, _)| ring).ok_or_else(missing)
    }

    /// Writes them, reads them back, and overwrites what was there before. Takes over what is there
    /// and not in this ring: afterwards both are the same. Waits for other processes that save in
    /// the same directory.
    ///
    /// # Errors
    /// Another ring's keys are there ([`KeyFileError::Foreign`], [`KeyFileError::OtherRing`]), or
    /// what cannot be read; the file system's. Then the file is the old one or the new one, and no
    /// key that was in it is lost.
    pub fn save(&mut self, dir: &Path) -> Result<(), KeyFileError> {
        self.save_as(dir, false)
    }

    fn save_as(&mut self, dir: &Path, is_new: bool) -> Result<(), KeyFileError> {
        let path = path_of(dir, self.realm());
        let (new, old) = (path.with_extension("keys.new"), path.with_extension("keys.old"));
        // Released when it is closed.
        let locked = File::open(dir).map_err(io_at(dir))?;
        rustix::fs::flock(&locked, FlockOperation::LockExclusive).map_err(|e| io_at(dir)(e.into()))?;
        let realm = self.realm().clone();
        let found = read(&path, &realm)?;
        if is_new && found.is_some() {
            return Err(KeyFileError::Exists { realm, path });
        }
        let in_use = found.as_ref().map(|(_, inode)| *inode);
        let other = |path: &Path| KeyFileError::OtherRing { path: path.to_owned(), realm: realm.clone() };
        if found.as_ref().is_some_and(|(ring, _)| !self.merge(ring)) {
            return Err(other(&path));
        }
        match leftover(&old, in_use, self.realm())? {
            Leftover::None => {}
            Leftover::OtherName => fs::remove_file(&old).map_err(io_at(&old))?,
            Leftover::Replaced(ring) => {
                if let Some(ring) = ring {
                    if !self.merge(&ring) {
                        return Err(other(&old));
                    }
                    // What was only there is on the disk elsewhere before it is overwritten.
                    self.place(dir, &path, &new, None)?;
                }
                shred(&old).map_err(io_at(&old))?;
            }
        }
        let replaced = read(&path, self.realm())?.map(|(_, inode)| inode);
        self.place(dir, &path, &new, replaced.map(|inode| (&*old, inode)))?;
        if replaced.is_some() { shred(&old).map_err(io_at(&old)) } else { Ok(()) }
    }

    /// Puts the file into its place. `old`: the name under which the one before stays, and which
    /// file it is.
    fn place(&self, dir: &Path, path: &Path, new: &Path, old: Option<(&Path, Inode)>) -> Result<(), KeyFileError> {
        remove(new).map_err(io_at(new))?;
        let bytes = self.encode();
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(new);
        made.and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all())).map_err(io_at(new))?;
        if *Zeroizing::new(fs::read(new).map_err(io_at(new))?) != *bytes {
            return Err(KeyFileError::Damaged { path: new.to_owned() });
        }
        if let Some((old, inode)) = old {
            fs::hard_link(path, old).map_err(io_at(old))?;
            if inode_of(old).map_err(io_at(old))? != Some(inode) {
                remove(old).map_err(io_at(old))?;
                return Err(KeyFileError::Changed { path: path.to_owned() });
            }
        }
        fs::rename(new, path).map_err(io_at(path))?;
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_at(dir))
    }
}

/// Device and number.
type Inode = (u64, u64);

/// None if there is no such file; an error that hides it is one.
fn inode_of(path: &Path) -> io::Result<Option<Inode>> {
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        meta => meta.map(|meta| Some((meta.dev(), meta.ino()))),
    }
}

/// The ring in a file, and which file it was; none if there is none.
fn read(path: &Path, realm: &Realm) -> Result<Option<(Keyring, Inode)>, KeyFileError> {
    let mut file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(io_at(path))?,
    };
    let meta = file.metadata().map_err(io_at(path))?;
    let mut bytes = Zeroizing::new(Vec::with_capacity(meta.len() as usize + 1));
    file.read_to_end(&mut bytes).map_err(io_at(path))?;
    let ring = Keyring::decode(&bytes).map_err(|e| match e {
        Undecodable::Damaged => KeyFileError::Damaged { path: path.to_owned() },
        Undecodable::Newer(found) => KeyFileError::Newer { path: path.to_owned(), found },
    })?;
    if ring.realm() != realm {
        return Err(KeyFileError::Foreign { path: path.to_owned(), found: ring.realm().clone() });
    }
    Ok(Some((ring, (meta.dev(), meta.ino()))))
}

/// What a crash left under the name of what was replaced.
enum Leftover {
    None,
    /// Another name of the file in use.
    OtherName,
    /// A file that was replaced, and its keys; none if it is overwritten in part.
    Replaced(Option<Box<Keyring>>),
}

fn leftover(old: &Path, in_use: Option<Inode>, realm: &Realm) -> Result<Leftover, KeyFileError> {
    let Some(inode) = inode_of(old).map_err(io_at(old))? else { return Ok(Leftover::None) };
    match in_use {
        None => return Err(KeyFileError::Orphan { path: old.to_owned() }),
        Some(in_use) if in_use == inode => return Ok(Leftover::OtherName),
        Some(_) => {}
    }
    match read(old, realm) {
        Ok(ring) => Ok(ring.map_or(Leftover::None, |(ring, _)| Leftover::Replaced(Some(Box::new(ring))))),
        // Overwriting begins at the front: only what has begun is gone on with.
        Err(KeyFileError::Damaged { .. }) if begins_with_zeros(old).map_err(io_at(old))? => {
            Ok(Leftover::Replaced(None))
        }
        Err(e) => Err(e),
    }
}

fn begins_with_zeros(path: &Path) -> io::Result<bool> {
    let mut start = [1; 8];
    let mut file = File::open(path)?;
    let length = file.read(&mut start)?;
    Ok(start[..length].iter().all(|byte| *byte == 0))
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

/// Overwrites and removes a file that was replaced, and whose keys are in the one that replaced it.
fn shred(old: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).custom_flags(OFlags::NOFOLLOW.bits() as i32).open(old)?;
    let length = file.metadata()?.len();
    file.write_all(&vec![0; length as usize])?;
    file.sync_all()?;
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
        Keyring::create(dir.path(), realm(), 5).unwrap();
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

    fn live(ring: &Keyring) -> Vec<crate::ids::KeyId> {
        let mut live: Vec<_> = ring.facts().iter().filter(|f| f.created_ms.is_some()).map(|f| f.id).collect();
        live.sort_unstable();
        live
    }

    fn again(dir: &tempfile::TempDir) -> Keyring {
        Keyring::load(dir.path(), &realm()).unwrap()
    }

    #[test]
    fn a_new_ring_is_on_the_disk_first_and_never_in_anothers_place() {
        let dir = tempfile::tempdir().unwrap();
        let ring = Keyring::create(dir.path(), realm(), 5).unwrap();
        assert_eq!(again(&dir).facts(), ring.facts());
        let told = Keyring::create(dir.path(), realm(), 6).unwrap_err();
        assert!(matches!(told, KeyFileError::Exists { .. }), "{told}");
        let told = Keyring::generate(realm(), 6).save(dir.path()).unwrap_err();
        assert!(matches!(told, KeyFileError::OtherRing { .. }), "{told}");
        fs::rename(dir.path().join("blue.keys"), dir.path().join("red.keys")).unwrap();
        let told = Keyring::generate("red".parse().unwrap(), 6).save(dir.path()).unwrap_err();
        assert!(matches!(told, KeyFileError::Foreign { .. }), "{told}");
        let left = fs::read(dir.path().join("red.keys")).unwrap();
        assert_eq!(left, *ring.encode(), "nothing of it was touched");
    }

    // promise format: saving keys loses none that is on the disk, another writer's neither; what
    //   one destroyed stays destroyed
    // held by: this,
    //   `kip_archive::keys::file::tests::a_new_ring_is_on_the_disk_first_and_never_in_anothers_place`,
    //   `kip_archive::keys::file::tests::what_a_crash_left_is_taken_over_before_it_is_overwritten`
    #[test]
    fn two_writers_keep_each_others_keys_and_what_one_destroyed_is_destroyed() {
        let dir = tempfile::tempdir().unwrap();
        let mut one = Keyring::create(dir.path(), realm(), 5).unwrap();
        let first = one.current().unwrap();
        let mut two = again(&dir);
        let (a, b) = (one.rotate(6), two.rotate(7));
        one.save(dir.path()).unwrap();
        two.save(dir.path()).unwrap();
        let mut all = vec![first, a, b];
        all.sort_unstable();
        assert_eq!((live(&again(&dir)), live(&two)), (all.clone(), all));
        assert_eq!(again(&dir).current(), Ok(b), "the later one");
        // Ring `one`, which never saw the key of `two`, destroys the first; `two` saves after that,
        // with all that it knows.
        one.destroy(first, 9).unwrap();
        one.save(dir.path()).unwrap();
        assert_eq!(one.current(), Ok(b), "it is news");
        two.save(dir.path()).unwrap();
        let back = again(&dir);
        assert!(matches!(back.secret(first), Err(NoKey::Destroyed { at_ms: 9, .. })));
        assert!(matches!(two.secret(first), Err(NoKey::Destroyed { .. })));
        assert_eq!(back.facts(), two.facts());
        // A rotation after the other's key was seen counts, and a ring that is all destroyed takes
        // what came since.
        let c = two.rotate(1);
        two.save(dir.path()).unwrap();
        assert_eq!(again(&dir).current(), Ok(c), "though its clock is behind");
        one.destroy_all(10);
        one.save(dir.path()).unwrap();
        assert_eq!((live(&again(&dir)), again(&dir).current()), (vec![c], Ok(c)));
        assert!(again(&dir).hash_key().is_ok());
        two.destroy_all(11);
        two.rotate(12);
        two.save(dir.path()).unwrap();
        assert_eq!(live(&again(&dir)).len(), 1, "a new secret of hashes, for no key of the old one is left");
    }

    #[test]
    fn what_a_crash_left_is_taken_over_before_it_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let (path, old) = (dir.path().join("blue.keys"), dir.path().join("blue.keys.old"));
        let mut ring = Keyring::create(dir.path(), realm(), 5).unwrap();
        let mut other = again(&dir);
        let only = other.rotate(6);
        fs::write(&old, &*other.encode()).unwrap();
        ring.rotate(7);
        ring.save(dir.path()).unwrap();
        assert!(live(&again(&dir)).contains(&only) && !old.exists());
        // Overwritten in part: gone on with. Damaged otherwise, or another's: left alone.
        fs::write(&old, [0; 99]).unwrap();
        ring.save(dir.path()).unwrap();
        assert!(!old.exists());
        fs::write(&old, b"who knows").unwrap();
        let before = fs::read(&path).unwrap();
        ring.rotate(8);
        assert!(matches!(ring.save(dir.path()), Err(KeyFileError::Damaged { .. })));
        fs::write(&old, &*Keyring::generate(realm(), 9).encode()).unwrap();
        let kept = fs::read(&old).unwrap();
        assert!(matches!(ring.save(dir.path()), Err(KeyFileError::OtherRing { .. })));
        assert_eq!((fs::read(&path).unwrap(), fs::read(&old).unwrap()), (before, kept));
        // The only copy is not overwritten, whatever happened to the other.
        fs::rename(&path, &old).unwrap();
        assert!(matches!(ring.save(dir.path()), Err(KeyFileError::Orphan { .. })));
        assert!(Keyring::decode(&fs::read(&old).unwrap()).is_ok());
        // What hides whether it is there is an error.
        fs::rename(&old, &path).unwrap();
        let long = dir.path().join("x").join("blue");
        assert!(inode_of(&path.join("below")).is_err() && inode_of(&long).unwrap().is_none());
    }
}
