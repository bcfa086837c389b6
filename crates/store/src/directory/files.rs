//! The files of a directory store: what each operation does to them, on the thread that waits for
//! the disk.
//!
//! Nothing here is asynchronous or counted. An error of a write tells whether the object can have
//! come into its place.

use crate::failure::{GetError, PutError, ReadReferenceError, StoreFailure, SwapError};
use crate::key::Key;
use crate::listing::{Listed, Placed};
use crate::reference::{Nonce, Version, random, seal, unseal};
use crate::settings::Settings;
use bytes::Bytes;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Directories that a deletion removes from under a write are made again this often.
const LOST_DIRECTORIES: u32 = 100;
/// Directories that are remembered as durable; beyond it all are forgotten and synced once more.
const MOST_SYNCED: usize = 4096;
/// Begins the name of a file that locks are tried with.
const PROBE: &str = "#probe.";

/// The directory of a store.
#[derive(Debug)]
pub(super) struct Root {
    pub(super) path: PathBuf,
    pub(super) name: Arc<str>,
    pub(super) settings: Settings,
    /// Directories whose names are known to be on disk.
    synced: Mutex<HashMap<PathBuf, Identity>>,
    /// fsync(2) of the directory that a path lies in.
    sync_above: fn(&Path) -> io::Result<()>,
}

/// A directory and no other one of the same name: device, inode, when it was made.
type Identity = (u64, u64, SystemTime);

/// Whether a write may replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    Anything,
    Nothing,
}

/// An object that is not, or not surely, in its place.
#[derive(Debug)]
pub(super) enum Unpublished {
    /// What was there is there.
    Not(StoreFailure),
    /// It is there, but the disk did not say that it stays.
    Unsure(StoreFailure),
}

impl From<StoreFailure> for Unpublished {
    fn from(failure: StoreFailure) -> Unpublished {
        Unpublished::Not(failure)
    }
}

/// A file that is being written, beside its place. Removed unless it got there by rename.
#[derive(Debug)]
pub(super) struct NewFile {
    file: File,
    path: PathBuf,
    renamed: bool,
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.renamed {
            // A file that stays is never seen, and swept some day.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// An open object.
#[derive(Debug, Clone)]
pub(super) struct Reading {
    pub(super) file: Arc<File>,
    pub(super) key: Key,
    pub(super) size: u64,
}

impl Reading {
    pub(super) fn chunk(&self, root: &Root, at: u64) -> Result<Bytes, GetError> {
        let chunk = root.settings.chunk_bytes.max(1) as u64;
        self.bytes(root, at..self.size.min(at.saturating_add(chunk)))
    }

    pub(super) fn bytes(&self, root: &Root, range: Range<u64>) -> Result<Bytes, GetError> {
        let length = usize::try_from(range.end.saturating_sub(range.start)).expect("64 bits");
        let mut bytes = vec![0; length];
        match self.file.read_exact_at(&mut bytes, range.start) {
            Ok(()) => Ok(bytes.into()),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(GetError::Changed { store: root.name.clone(), key: self.key.clone() })
            }
            Err(e) => Err(root.failure(&root.file(&self.key), e).into()),
        }
    }
}

impl Root {
    pub(super) fn new(path: PathBuf, settings: Settings) -> Root {
        let name = path.display().to_string().into();
        Root { path, name, settings, synced: Mutex::default(), sync_above }
    }

    fn file(&self, key: &Key) -> PathBuf {
        self.path.join(key.as_str())
    }

    fn beside(&self, key: &Key, suffix: &str) -> PathBuf {
        let mut path = self.file(key).into_os_string();
        path.push(suffix);
        path.into()
    }

    pub(super) fn failure(&self, path: &Path, source: io::Error) -> StoreFailure {
        if source.kind() == io::ErrorKind::NotFound && !self.path.is_dir() {
            return StoreFailure::DirectoryGone { path: self.path.clone() };
        }
        StoreFailure::of_file(path, source)
    }

    /// An object's file and length.
    pub(super) fn object(&self, key: &Key) -> Result<(File, u64), GetError> {
        let path = self.file(key);
        let missing = || GetError::Missing { store: self.name.clone(), key: key.clone() };
        match File::open(&path).and_then(|file| file.metadata().map(|metadata| (file, metadata))) {
            Ok((file, metadata)) if metadata.is_file() => Ok((file, metadata.len())),
            Ok(_) => Err(missing()),
            // `a/b` where `a` is an object.
            Err(e) if e.kind() == io::ErrorKind::NotADirectory => Err(missing()),
            Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => Err(missing()),
            Err(e) => Err(self.failure(&path, e).into()),
        }
    }

    pub(super) fn write(&self, key: &Key, bytes: &[u8], over: Over) -> Result<Placed, Unpublished> {
        let mut new = self.begin(key)?;
        self.append(key, &mut new, bytes)?;
        self.publish(key, new, over)
    }

    /// An empty file beside an object's place.
    pub(super) fn begin(&self, key: &Key) -> Result<NewFile, StoreFailure> {
        let number: String = random(8).iter().map(|byte| format!("{byte:02x}")).collect();
        let path = self.beside(key, &format!("#new.{number}"));
        let mut lost = 0;
        loop {
            self.make_directories(&path)?;
            match File::options().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => return Ok(NewFile { file, path, renamed: false }),
                // A deletion took the empty directory away before there was a file in it.
                Err(e) if e.kind() == io::ErrorKind::NotFound && lost < LOST_DIRECTORIES && self.path.is_dir() => {
                    lost += 1;
                }
                Err(e) => return Err(self.failure(&self.file(key), e)),
            }
        }
    }

    pub(super) fn append(&self, key: &Key, new: &mut NewFile, bytes: &[u8]) -> Result<(), StoreFailure> {
        new.file.write_all(bytes).map_err(|e| self.failure(&self.file(key), e))
    }

    /// Gives a file its own name when it is on disk. A network file system may report that it
    /// failed though it was done, when it did not hear of the first of two tries; so the file
    /// itself is asked.
    pub(super) fn publish(&self, key: &Key, mut new: NewFile, over: Over) -> Result<Placed, Unpublished> {
        let path = self.file(key);
        let not = |e| Unpublished::Not(self.failure(&path, e));
        new.file.sync_all().map_err(not)?;
        let placed = match over {
            Over::Anything => {
                match fs::rename(&new.path, &path) {
                    Err(e) if !same_file(&new.file, &path).unwrap_or(false) => return Err(not(e)),
                    _ => new.renamed = true,
                }
                Placed::New
            }
            Over::Nothing => match fs::hard_link(&new.path, &path) {
                Ok(()) => Placed::New,
                Err(_) if new.file.metadata().is_ok_and(|metadata| metadata.nlink() > 1) => Placed::New,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
                    return Err(not(io::ErrorKind::IsADirectory.into()));
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Placed::AlreadyThere,
                Err(e) => return Err(not(e)),
            },
        };
        drop(new);
        // Of one that was there too: its writer may have died before it came to this.
        (self.sync_above)(&path).map_err(|e| Unpublished::Unsure(self.failure(&path, e)))?;
        Ok(placed)
    }

    /// The directories above a file, each durable. Those that are there already too, once: a
    /// process that died may have made them just before.
    fn make_directories(&self, file: &Path) -> Result<(), StoreFailure> {
        let parent = file.parent().expect("below the root");
        let mut above: Vec<&Path> = parent.ancestors().take_while(|path| *path != self.path).collect();
        above.reverse();
        for path in above {
            if identity(path).is_some_and(|there| self.is_synced(path, there)) {
                continue;
            }
            match fs::DirBuilder::new().mode(0o700).create(path) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                // Taken away again; the next write into it says so, and this is done once more.
                Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => continue,
                Err(e) => return Err(self.failure(path, e)),
            }
            let made = identity(path);
            match (self.sync_above)(path) {
                Ok(()) => self.note_synced(path, made),
                Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => {}
                Err(e) => return Err(self.failure(path, e)),
            }
        }
        Ok(())
    }

    fn is_synced(&self, path: &Path, there: Identity) -> bool {
        self.synced.lock().get(path) == Some(&there)
    }

    fn note_synced(&self, path: &Path, there: Option<Identity>) {
        let Some(there) = there else { return };
        let mut synced = self.synced.lock();
        if synced.len() >= MOST_SYNCED {
            synced.clear();
        }
        synced.insert(path.to_owned(), there);
    }

    /// All objects; `seen` grows with every file, whatever it is.
    pub(super) fn list(&self, under: Option<&Key>, seen: &AtomicU64) -> Result<Vec<Listed>, StoreFailure> {
        let mut found = Vec::new();
        self.walk(under.map_or_else(|| self.path.clone(), |key| self.file(key)), |path, metadata| {
            seen.fetch_add(1, Ordering::Relaxed);
            if let Some(key) = self.key(path) {
                let modified = metadata.modified().map_err(|e| self.failure(path, e))?;
                found.push(Listed { key, size: metadata.len(), modified });
            }
            Ok(())
        })?;
        found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// All files below a directory, in no order.
    fn walk(
        &self,
        from: PathBuf,
        mut visit: impl FnMut(&Path, &Metadata) -> Result<(), StoreFailure>,
    ) -> Result<(), StoreFailure> {
        let mut left = vec![from];
        while let Some(directory) = left.pop() {
            let entries = match fs::read_dir(&directory) {
                Ok(entries) => entries,
                // Deleted meanwhile, or never there, or an object.
                Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => continue,
                Err(e) if e.kind() == io::ErrorKind::NotADirectory => continue,
                Err(e) => return Err(self.failure(&directory, e)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| self.failure(&directory, e))?;
                let path = entry.path();
                match entry.metadata() {
                    Ok(metadata) if metadata.is_dir() => left.push(path),
                    Ok(metadata) if metadata.is_file() => visit(&path, &metadata)?,
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(self.failure(&path, e)),
                }
            }
        }
        Ok(())
    }

    /// Removes what processes that died left: files being written, probes, locks of nothing. How
    /// many.
    pub(super) fn remove_leftovers(&self, older_than: Duration) -> Result<u64, StoreFailure> {
        let mut removed = 0;
        self.walk(self.path.clone(), |path, metadata| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            // A time in the future is no age.
            let age = metadata.modified().ok().and_then(|at| at.elapsed().ok()).unwrap_or_default();
            if age < older_than {
                return Ok(());
            }
            if let Some(key) = path.to_str().and_then(|path| self.key(Path::new(path.strip_suffix("#lock")?))) {
                let _held = self.lock(&key)?;
                if self.file(&key).exists() {
                    return Ok(());
                }
            } else if !name.contains("#new.") && !name.starts_with(PROBE) {
                return Ok(());
            }
            match fs::remove_file(path) {
                Ok(()) => removed += 1,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(self.failure(path, e)),
            }
            Ok(())
        })?;
        Ok(removed)
    }

    /// Whether a lock keeps others out here: some network file systems have none, or let all
    /// processes have one.
    pub(super) fn locks_exclude(&self) -> Result<bool, StoreFailure> {
        let number: String = random(8).iter().map(|byte| format!("{byte:02x}")).collect();
        let path = self.path.join(format!("{PROBE}{number}"));
        let failure = |e| self.failure(&path, e);
        let first = File::options().create_new(true).append(true).mode(0o600).open(&path).map_err(failure)?;
        let second = File::options().append(true).open(&path);
        fs::remove_file(&path).map_err(failure)?;
        flock(&first, FlockOperation::NonBlockingLockExclusive).map_err(|e| self.not_locked(&path, e))?;
        match flock(&second.map_err(failure)?, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(false),
            Err(Errno::WOULDBLOCK) => Ok(true),
            Err(e) => Err(self.not_locked(&path, e)),
        }
    }

    fn not_locked(&self, path: &Path, error: Errno) -> StoreFailure {
        match error {
            Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL => {
                StoreFailure::NoLocks { path: self.path.clone(), source: error.into() }
            }
            error => self.failure(path, error.into()),
        }
    }

    /// None of files that are no objects: those being written, locks, what others put there.
    fn key(&self, path: &Path) -> Option<Key> {
        Key::new(path.strip_prefix(&self.path).ok()?.to_str()?).ok()
    }

    /// Under the lock that swapping takes, so that no process swaps what is being deleted.
    pub(super) fn delete(&self, key: &Key) -> Result<(), StoreFailure> {
        let path = self.file(key);
        match fs::symlink_metadata(&path) {
            // A directory: there is no such object.
            Ok(there) if there.is_dir() => return Ok(()),
            Ok(_) => {
                let held = match self.lock(key) {
                    Ok(held) => Some(held),
                    // A lock that cannot be made is held by no process, and deleting is what a full
                    // disk needs.
                    Err(StoreFailure::DiskFull { .. }) => None,
                    Err(failure) => return Err(failure),
                };
                self.remove(&path)?;
                if held.is_some() {
                    self.remove(&self.beside(key, "#lock"))?;
                }
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                if !self.path.is_dir() {
                    return Err(self.failure(&path, e));
                }
            }
            Err(e) => return Err(self.failure(&path, e)),
        }
        match (self.sync_above)(&path) {
            Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(self.failure(&path, e));
            }
            _ => {}
        }
        let above = path.ancestors().skip(1).take_while(|above| *above != self.path);
        // Empty ones only; the first that is not ends it.
        for directory in above {
            if fs::remove_dir(directory).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn remove(&self, path: &Path) -> Result<(), StoreFailure> {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(self.failure(path, e)),
            _ => Ok(()),
        }
    }

    pub(super) fn read_reference(&self, key: &Key) -> Result<Option<(Bytes, Version)>, ReadReferenceError> {
        let path = self.file(key);
        let bytes = match self.object(key) {
            Ok(_) => match fs::read(&path) {
                Ok(bytes) => Bytes::from(bytes),
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(self.failure(&path, e).into()),
            },
            Err(GetError::Store(failure)) => return Err(failure.into()),
            Err(GetError::Missing { .. } | GetError::BeyondEnd { .. } | GetError::Changed { .. }) => return Ok(None),
        };
        let (nonce, value) = unseal(&bytes)
            .ok_or_else(|| ReadReferenceError::NotAReference { store: self.name.clone(), key: key.clone() })?;
        Ok(Some((value, Version { nonce, e_tag: None, number: None })))
    }

    pub(super) fn swap_reference(
        &self,
        key: &Key,
        expected: Option<&Version>,
        value: &[u8],
    ) -> Result<Version, SwapError> {
        let conflict = || SwapError::Conflict { store: self.name.clone(), key: key.clone() };
        let current = || match self.read_reference(key) {
            Ok(found) => Ok(found.map(|(_, version)| version.nonce)),
            Err(ReadReferenceError::Store(failure)) => Err(SwapError::Store(failure)),
            Err(ReadReferenceError::NotAReference { store, key }) => Err(SwapError::NotAReference { store, key }),
        };
        let expected = expected.map(|version| version.nonce);
        // Without the lock, so that nothing is made beside what is not there.
        if current()? != expected {
            return Err(conflict());
        }
        let _held = self.lock(key)?;
        if current()? != expected {
            return Err(conflict());
        }
        let nonce = Nonce::random();
        match self.write(key, &seal(nonce, value), Over::Anything) {
            Ok(_) => Ok(Version { nonce, e_tag: None, number: None }),
            Err(Unpublished::Unsure(source)) => {
                Err(SwapError::Unknown { store: self.name.clone(), key: key.clone(), source: Box::new(source) })
            }
            Err(Unpublished::Not(failure)) => Err(failure.into()),
        }
    }

    pub(super) fn put_error(&self, key: &Key, unpublished: Unpublished) -> PutError {
        match unpublished {
            Unpublished::Not(failure) => failure.into(),
            Unpublished::Unsure(source) => {
                PutError::Unknown { store: self.name.clone(), key: key.clone(), source: Box::new(source) }
            }
        }
    }

    /// Holds the lock of a reference. Lock files are removed with their reference, so the one that
    /// was opened must still be the one that is there.
    pub(super) fn lock(&self, key: &Key) -> Result<Held, StoreFailure> {
        let path = self.beside(key, "#lock");
        let since = Instant::now();
        loop {
            let waited = since.elapsed();
            if waited > self.settings.answer_timeout {
                let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                return Err(StoreFailure::Locked { path, waited_ms });
            }
            self.make_directories(&path)?;
            let file = match File::options().create(true).append(true).mode(0o600).open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => continue,
                Err(e) => return Err(self.failure(&path, e)),
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if same_file(&file, &path).map_err(|e| self.failure(&path, e))? => {
                    return Ok(Held(file));
                }
                Ok(()) | Err(Errno::INTR) => {}
                // Held for a few fsyncs; a random wait, so that no order of arrival is unlucky
                // again and again.
                Err(Errno::WOULDBLOCK) => {
                    std::thread::sleep(Duration::from_micros(200 + 16 * u64::from(random(1)[0])));
                }
                Err(e) => return Err(self.not_locked(&path, e)),
            }
        }
    }
}

/// A lock, until it is dropped. Closing the file would not be enough: a process that was just
/// forked off has it open too, until it executes its program.
pub(super) struct Held(File);

impl Drop for Held {
    fn drop(&mut self) {
        // What cannot be unlocked is unlocked when it is closed.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

/// None of what is not there, or of a file system that does not say when something was made.
fn identity(path: &Path) -> Option<Identity> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.created().ok()?))
}

fn sync_above(path: &Path) -> io::Result<()> {
    File::open(path.parent().expect("below the root"))?.sync_all()
}

fn same_file(file: &File, path: &Path) -> io::Result<bool> {
    let there = match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        there => there?,
    };
    let held = file.metadata()?;
    Ok((held.dev(), held.ino()) == (there.dev(), there.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    thread_local! {
        static SYNCED: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
    }

    fn noted(path: &Path) -> io::Result<()> {
        SYNCED.with_borrow_mut(|synced| synced.push(path.to_owned()));
        sync_above(path)
    }

    fn failing(_: &Path) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(5))
    }

    fn root(sync_above: fn(&Path) -> io::Result<()>) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root { sync_above, ..Root::new(dir.path().to_owned(), Settings::default()) };
        (dir, root)
    }

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    // promise stores: in a directory every name up to its root is durable, whichever process made
    //   it; what may not stay is called unknown; a rename or link that is reported as failed though
    //   it was done counts
    // held by: this,
    //   `kip_store::directory::files::tests::what_is_in_its_place_but_not_surely_for_good_is_unknown`,
    //   `kip_store::directory::files::tests::a_step_that_was_done_though_an_error_says_otherwise_counts`;
    //   on NFS: untested
    #[test]
    fn every_name_up_to_the_root_is_made_durable_whoever_made_it() {
        let (dir, root) = root(noted);
        let synced = |names: &[&str]| {
            let expected: Vec<_> = names.iter().map(|name| dir.path().join(name)).collect();
            assert_eq!(SYNCED.take(), expected);
        };
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        root.write(&key("a/b/c/one"), b"x", Over::Anything).unwrap();
        synced(&["a", "a/b", "a/b/c", "a/b/c/one"]);
        root.write(&key("a/b/c/two"), b"x", Over::Nothing).unwrap();
        synced(&["a/b/c/two"]);
        assert_eq!(root.write(&key("a/b/c/two"), b"y", Over::Nothing).unwrap(), Placed::AlreadyThere);
        synced(&["a/b/c/two"]);
        // Another one of the same name.
        fs::remove_dir_all(dir.path().join("a/b")).unwrap();
        fs::create_dir_all(dir.path().join("a/b/c")).unwrap();
        root.write(&key("a/b/c/one"), b"x", Over::Anything).unwrap();
        synced(&["a/b", "a/b/c", "a/b/c/one"]);
    }

    #[test]
    fn what_is_in_its_place_but_not_surely_for_good_is_unknown() {
        let (dir, root) = root(failing);
        for over in [Over::Anything, Over::Nothing] {
            let unpublished = root.write(&key("object"), b"x", over).unwrap_err();
            let error = root.put_error(&key("object"), unpublished);
            assert!(matches!(error, PutError::Unknown { .. }), "{error:?}");
            assert_eq!(fs::read(dir.path().join("object")).unwrap(), b"x");
            fs::remove_file(dir.path().join("object")).unwrap();
        }
        let error = root.swap_reference(&key("head"), None, b"x").unwrap_err();
        assert!(matches!(error, SwapError::Unknown { .. }), "{error:?}");
        assert_eq!(root.read_reference(&key("head")).unwrap().unwrap().0, "x");
    }

    /// As a network file system does that sends a request again whose answer it lost.
    #[test]
    fn a_step_that_was_done_though_an_error_says_otherwise_counts() {
        let (dir, root) = root(sync_above);
        let (linked, renamed) = (dir.path().join("linked"), dir.path().join("renamed"));
        let begun = |name: &str| {
            let mut new = root.begin(&key(name)).unwrap();
            root.append(&key(name), &mut new, b"mine").unwrap();
            new
        };
        let new = begun("linked");
        fs::hard_link(&new.path, &linked).unwrap();
        assert_eq!(root.publish(&key("linked"), new, Over::Nothing).unwrap(), Placed::New);
        let new = begun("renamed");
        fs::rename(&new.path, &renamed).unwrap();
        assert_eq!(root.publish(&key("renamed"), new, Over::Anything).unwrap(), Placed::New);
        assert!(fs::read(linked).unwrap() == b"mine" && fs::read(renamed).unwrap() == b"mine");
        let new = begun("taken");
        fs::write(dir.path().join("taken"), b"theirs").unwrap();
        assert_eq!(root.publish(&key("taken"), new, Over::Nothing).unwrap(), Placed::AlreadyThere);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    // promise stores: a directory on a file system whose locks do not exclude is found out
    // held by: untested: the machine of the tests has none; the words: this
    #[test]
    fn locks_that_do_not_exist_are_named() {
        let (_dir, root) = root(sync_above);
        assert!(root.locks_exclude().unwrap());
        let failure = root.not_locked(Path::new("/x"), Errno::NOLCK);
        assert!(failure.to_string().contains("has no locks") && !failure.is_temporary(), "{failure}");
        assert_eq!(fs::read_dir(&root.path).unwrap().count(), 0);
    }
}
