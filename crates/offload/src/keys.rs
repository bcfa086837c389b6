//! The realm's keys while the daemon runs: which ring is in use, and how it is changed.
//!
//! Owns the order of a change: first on the disk, then in use. A task that begins to seal or open
//! takes the ring of that moment ([`Archive::keys`]) and keeps it to its end. A crash after the
//! first step is as if the daemon had been told in time: the next daemon reads the file.
//!
//! Invariant: what would be sealed by a key that was destroyed meanwhile never becomes the only
//! copy of anything. A task that lets go of a local copy looks at the ring while no change can
//! happen ([`Archive::hold_keys`], [`HeldKeys::still_open`]).

use crate::stream::origin_of;
use crate::{ASIDE, Archive, DemandError, ENDED, ID, PROCS};
use kip_archive::ids::KeyId;
use kip_archive::keys::{KeyFact, KeyFileError, Keyring, NoKey, Wrap, WrapError};
use kip_archive::table::{Home, RemotePages, RemoteRun};
use kip_snapshot::pages::PageMap;
use kip_snapshot::remote::RemoteFile;
use kip_types::Realm;
use kip_types::keys::{Hex, KeysWrap};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Fewest digits that name a key.
const FEWEST: usize = 6;

/// A key file is none.
#[derive(Debug, thiserror::Error)]
#[error("a key file has 32 bytes, this one has {0}: `head -c 32 /dev/urandom` makes one")]
pub struct KeyLength(usize);

/// Hands over what closes exported keys or a backup.
pub fn with_wrap<T>(wrap: &KeysWrap, work: impl FnOnce(&Wrap<'_>) -> T) -> Result<T, KeyLength> {
    match wrap {
        KeysWrap::Passphrase(text) => Ok(work(&Wrap::Passphrase(&text.0))),
        KeysWrap::Key(Hex(bytes)) => {
            let key: &[u8; 32] = bytes[..].try_into().map_err(|_| KeyLength(bytes.len()))?;
            Ok(work(&Wrap::Key(key)))
        }
    }
}

/// The keys are as they were.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum KeyChangeError {
    #[error(transparent)]
    File(#[from] KeyFileError),
    #[error(transparent)]
    Wrap(#[from] WrapError),
    #[error(transparent)]
    NoKey(#[from] NoKey),
    #[error("realm {realm} has no key {text:?}: give an id of `kip key ls`, or its first {FEWEST} digits or more")]
    Unknown { text: String, realm: Realm },
    #[error("{text:?} begins the ids of {count} keys of realm {realm}: give more digits")]
    Ambiguous { text: String, realm: Realm, count: usize },
    #[error("key {0} is the one that seals what is archived now: `kip key rotate` first")]
    Current(KeyId),
    #[error("these are keys of realm {found}, and this daemon has the realm {realm} only: nothing was imported")]
    OtherRealm { found: Realm, realm: Realm },
    #[error(transparent)]
    KeyLength(#[from] KeyLength),
    #[error("cannot read or rename {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// What an import brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    pub added: Vec<KeyId>,
    pub destroyed: Vec<KeyId>,
    pub current: Option<KeyId>,
}

/// While it lives no key is added or destroyed.
pub struct HeldKeys<'a> {
    archive: &'a Archive,
    _unchanged: tokio::sync::RwLockReadGuard<'a, ()>,
}

/// While it lives no other task changes keys, and no task lets go of a local copy only because the
/// store has one.
pub struct ChangingKeys {
    archive: Arc<Archive>,
    _alone: tokio::sync::OwnedRwLockWriteGuard<()>,
}

impl HeldKeys<'_> {
    /// Whether all keys that a ring had still open what they sealed.
    pub fn still_open(&self, ring: &Keyring) -> Result<(), NoKey> {
        let now = self.archive.keys();
        live(ring).into_iter().try_for_each(|key| now.check(key))
    }
}

fn live(ring: &Keyring) -> BTreeSet<KeyId> {
    ring.facts().iter().filter(|fact| fact.destroyed_ms.is_none()).map(|fact| fact.id).collect()
}

impl Archive {
    /// The ring in use.
    pub fn keys(&self) -> Arc<Keyring> {
        Arc::clone(&self.keys.lock())
    }

    /// Waits until no key is being changed, and keeps it so.
    pub async fn hold_keys(&self) -> HeldKeys<'_> {
        HeldKeys { archive: self, _unchanged: self.changing.read().await }
    }

    /// Waits until no task holds the keys.
    pub async fn change_keys(self: &Arc<Self>) -> ChangingKeys {
        ChangingKeys { archive: Arc::clone(self), _alone: Arc::clone(&self.changing).write_owned().await }
    }

    /// The keys of what a generation here has in the store only; none if nothing is missing here.
    /// Blocking.
    ///
    /// # Errors
    /// Something of the generation cannot be read: the keys are not known.
    pub fn keys_of_missing(&self, directory: &Path) -> Result<BTreeSet<KeyId>, DemandError> {
        let mut keys = BTreeSet::new();
        for file in PageMap::load(directory)?.files.iter().filter(|file| file.remote.is_some()) {
            let (remote, table) = (RemoteFile::open(directory, file)?, self.table_of(directory, file)?);
            for RemoteRun { first, run, .. } in RemotePages::new(&table, 0).runs() {
                let here = remote.here(first, run.pages);
                let here = here.map_err(|source| DemandError::Io { path: directory.join(&file.name), source })?;
                if here.iter().all(|here| *here) {
                    continue;
                }
                match run.home {
                    Home::Block { block, .. } => drop(keys.insert(table.blocks[block as usize].pack.key)),
                    Home::Front => {
                        keys.extend(origin_of(directory, &file.name).map(|(_, of)| of.keys).unwrap_or_default())
                    }
                    Home::Zeros => {}
                }
            }
        }
        Ok(keys)
    }

    /// The key that an id, or the beginning of one, stands for.
    pub fn find_key(&self, text: &str) -> Result<KeyFact, KeyChangeError> {
        let facts = self.keys().facts();
        let begins = |fact: &&KeyFact| text.len() >= FEWEST && fact.id.to_string().starts_with(text);
        let found: Vec<&KeyFact> = facts.iter().filter(begins).collect();
        let (text, realm) = (text.to_owned(), self.realm.clone());
        match found[..] {
            [] => Err(KeyChangeError::Unknown { text, realm }),
            [one] => Ok(one.clone()),
            _ => Err(KeyChangeError::Ambiguous { text, realm, count: found.len() }),
        }
    }
}

impl ChangingKeys {
    fn directory(&self) -> &Path {
        &self.archive.directory
    }

    /// Adds a key, which seals from now on. Blocking.
    pub fn rotate(&self, now_ms: u64) -> Result<KeyId, KeyChangeError> {
        let mut ring = Keyring::load(self.directory(), &self.archive.realm)?;
        let id = ring.rotate(now_ms);
        ring.save(self.directory())?;
        self.use_ring(ring);
        Ok(id)
    }

    /// Destroys a key that does not seal any more. Blocking.
    pub fn destroy(&self, id: KeyId, now_ms: u64) -> Result<(), KeyChangeError> {
        let mut ring = Keyring::load(self.directory(), &self.archive.realm)?;
        ring.check(id)?;
        if ring.current() == Ok(id) {
            return Err(KeyChangeError::Current(id));
        }
        ring.destroy(id, now_ms)?;
        ring.save(self.directory())?;
        self.use_ring(ring);
        Ok(())
    }

    /// Takes over exported keys. Those of a ring that was made apart take the place of this
    /// directory's own if these have never sealed anything; the file of the own ones is kept under
    /// another name. Blocking.
    pub fn import(&self, closed: &[u8], wrap: &Wrap<'_>, now_ms: u64) -> Result<Imported, KeyChangeError> {
        let mut ring = Keyring::import(closed, wrap)?;
        let realm = &self.archive.realm;
        if ring.realm() != realm {
            return Err(KeyChangeError::OtherRealm { found: ring.realm().clone(), realm: realm.clone() });
        }
        let before = self.archive.keys();
        match ring.save(self.directory()) {
            Err(KeyFileError::OtherRing { path, realm }) => {
                let is_unused =
                    self.archive.has_sealed_nothing().map_err(|(path, source)| KeyChangeError::Io { path, source })?;
                if !is_unused {
                    return Err(KeyFileError::OtherRing { path, realm }.into());
                }
                let aside = path.with_extension(format!("unused-{now_ms}"));
                fs::rename(&path, &aside).map_err(|source| KeyChangeError::Io { path: path.clone(), source })?;
                // Should that fail, the keys are where they were before.
                ring.save(self.directory()).inspect_err(|_| drop(fs::rename(&aside, &path)))?;
            }
            saved => saved?,
        }
        let (had, has) = (live(&before), live(&ring));
        let gone = |fact: &&KeyFact| fact.destroyed_ms.is_some() && had.contains(&fact.id);
        let destroyed = ring.facts().iter().filter(gone).map(|fact| fact.id).collect();
        let added = has.difference(&had).copied().collect();
        let current = ring.current().ok();
        self.use_ring(ring);
        Ok(Imported { added, destroyed, current })
    }

    /// From now on. What is new is not stored in packs of another key than the one that seals it,
    /// so that nothing that is archived from now on needs an older key; but for pages that a proc
    /// left in the store while it was awake.
    fn use_ring(&self, ring: Keyring) {
        let archive = &self.archive;
        let before = std::mem::replace(&mut *archive.keys.lock(), Arc::new(ring));
        let now = archive.keys();
        if let Some(cache) = archive.cache.as_ref().filter(|_| !live(&before).is_subset(&live(&now))) {
            // Some of the cache can no longer be opened. Which part is not known, and the rest
            // comes again.
            cache.forget(|_| true);
        }
        if before.current() != now.current() {
            *archive.index.lock() = Arc::default();
            archive.save_index();
        }
    }
}

impl Archive {
    /// No proc of this data directory is or ever was in a store.
    fn has_sealed_nothing(&self) -> Result<bool, (PathBuf, io::Error)> {
        if !self.index.lock().is_empty() {
            return Ok(false);
        }
        let procs = self.directory.with_file_name(PROCS);
        let at = |path: &Path| {
            let path = path.to_owned();
            move |e| (path, e)
        };
        let entries = match fs::read_dir(&procs) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
            entries => entries.map_err(at(&procs))?,
        };
        for entry in entries {
            let dir = entry.map_err(at(&procs))?.path();
            for file in fs::read_dir(&dir).map_err(at(&dir))? {
                let name = file.map_err(at(&dir))?.file_name();
                let text = name.to_string_lossy();
                if name == ID || [ENDED, ASIDE].iter().any(|word| text.starts_with(word)) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_archive::ids::ProcId;

    fn opened(data: &Path) -> Arc<Archive> {
        let store = data.join("store");
        fs::create_dir_all(&store).unwrap();
        Arc::new(Archive::open(store.to_str().unwrap(), data, Realm::default(), 1).unwrap())
    }

    #[test]
    fn what_a_key_sealed_that_is_destroyed_meanwhile_is_no_only_copy() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _inside = runtime.enter();
        let dir = tempfile::tempdir().unwrap();
        let archive = opened(dir.path());
        let (proc, name) = (ProcId::random(), "web".parse().unwrap());
        let store = |number| {
            let path = super::super::tests::generation(dir.path(), number);
            archive.store(proc, &name, &path, serde_json::json!({}), &super::super::tests::own(dir.path()))
        };
        let ring = archive.keys();
        let old = ring.current().unwrap();
        let first = store(1).unwrap();
        assert_eq!(first.keys, [old].into());
        let changing = runtime.block_on(archive.change_keys());
        assert!(archive.changing.try_read().is_err(), "whoever lets go of a local copy waits");
        let new = changing.rotate(5).unwrap();
        drop(changing);
        let held = runtime.block_on(archive.hold_keys());
        held.still_open(&first.ring).unwrap();
        assert!(archive.changing.try_write().is_err(), "no key is destroyed meanwhile");
        drop(held);
        let second = store(2).unwrap();
        assert_eq!(second.keys, [new].into(), "not even packs of the old one");
        let changing = runtime.block_on(archive.change_keys());
        assert!(matches!(changing.destroy(new, 6), Err(KeyChangeError::Current(_))));
        changing.destroy(old, 6).unwrap();
        assert!(matches!(changing.destroy(old, 7), Err(KeyChangeError::NoKey(NoKey::Destroyed { at_ms: 6, .. }))));
        drop(changing);
        let held = runtime.block_on(archive.hold_keys());
        assert!(matches!(held.still_open(&first.ring), Err(NoKey::Destroyed { at_ms: 6, .. })));
        drop(held);
        // The head is sealed with the new one. With that destroyed nothing can follow it, and that
        // is told apart.
        store(3).unwrap();
        let changing = runtime.block_on(archive.change_keys());
        changing.rotate(8).unwrap();
        changing.destroy(new, 9).unwrap();
        drop(changing);
        let refused = store(4).unwrap_err();
        assert!(refused.is_of_destroyed_key(), "{refused}");
        assert_eq!(opened(dir.path()).keys().facts(), archive.keys().facts(), "it is all on the disk");
    }

    #[test]
    fn a_key_is_found_by_the_beginning_of_its_id() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _inside = runtime.enter();
        let dir = tempfile::tempdir().unwrap();
        let archive = opened(dir.path());
        let id = archive.keys().current().unwrap();
        let text = id.to_string();
        assert_eq!(archive.find_key(&text).unwrap().id, id);
        assert_eq!(archive.find_key(&text[..6]).unwrap().id, id);
        assert!(matches!(archive.find_key(&text[..5]), Err(KeyChangeError::Unknown { .. })));
        assert!(matches!(archive.find_key(""), Err(KeyChangeError::Unknown { .. })));
    }

    #[test]
    fn keys_made_apart_take_the_place_of_unused_ones_only() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _inside = runtime.enter();
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (archive, other) = (opened(here.path()), opened(there.path()));
        let wrap = Wrap::Key(&[7; 32]);
        let closed = other.keys().export(&wrap).unwrap();
        let used = here.path().join("procs/web");
        fs::create_dir_all(&used).unwrap();
        fs::write(used.join(ID), ProcId::random().to_string()).unwrap();
        let changing = runtime.block_on(archive.change_keys());
        let before = archive.keys().facts();
        let refused = changing.import(&closed, &wrap, 5).unwrap_err();
        assert!(matches!(refused, KeyChangeError::File(KeyFileError::OtherRing { .. })), "{refused}");
        assert_eq!(archive.keys().facts(), before);
        fs::remove_file(used.join(ID)).unwrap();
        let imported = changing.import(&closed, &wrap, 6).unwrap();
        assert_eq!(imported.current, other.keys().current().ok());
        assert_eq!(archive.keys().facts(), other.keys().facts());
        assert!(here.path().join("archive/default.unused-6").exists(), "the own ones are kept");
        let blue = Keyring::generate("blue".parse().unwrap(), 1).export(&wrap).unwrap();
        assert!(matches!(changing.import(&blue, &wrap, 7), Err(KeyChangeError::OtherRealm { .. })));
        assert_eq!(archive.keys().facts(), other.keys().facts());
    }
}
