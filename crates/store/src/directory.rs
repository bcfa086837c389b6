//! A store in a directory: an object is a file, its key the path.
//!
//! What is written is durable when the call returns: temporary file beside it, fsync, rename (or link, where nothing may be
//! replaced), fsync of the directory. References are swapped under a lock file, so processes of one machine, or of several
//! on a file system whose flock(2) reaches all of them, exclude each other. Crash: at worst a file `name#new.<number>`
//! that no key can name and no listing shows. Only Kip's user may read what is made here (0600, 0700). `name#lock` lies beside a reference as long as it exists.

use crate::counters::{Count, Tally};
use crate::failure::{Failure, GetError, PutError, ReadReferenceError, SwapError};
use crate::key::Key;
use crate::reference::{Nonce, Version, random, seal, unseal};
use crate::settings::Settings;
use crate::{Listed, OpenError, Placed};
use bytes::Bytes;
use futures_util::stream::{self, Stream, StreamExt, TryStreamExt};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Directories that a deletion removes from under a write are made again this often.
const LOST_DIRECTORIES: u32 = 100;

/// One handle on a directory.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    root: Arc<Root>,
    tally: Arc<Tally>,
}

#[derive(Debug)]
struct Root {
    path: PathBuf,
    name: Arc<str>,
    settings: Settings,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    Anything,
    Nothing,
}

impl Directory {
    pub(crate) fn open(path: PathBuf, settings: Settings) -> Result<Directory, OpenError> {
        let path = match fs::canonicalize(&path) {
            Ok(found) if found.is_dir() => found,
            Ok(_) => return Err(OpenError::Directory { path, source: io::ErrorKind::NotADirectory.into() }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(OpenError::NoDirectory { path }),
            Err(source) => return Err(OpenError::Directory { path, source }),
        };
        let name = path.display().to_string().into();
        Ok(Directory { root: Arc::new(Root { path, name, settings }), tally: Arc::default() })
    }

    /// The same directory, counting apart.
    pub(crate) fn counting_apart(&self) -> Directory {
        Directory { root: self.root.clone(), tally: Tally::below(&self.tally) }
    }

    pub(crate) fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.root.name
    }

    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce(&Root) -> T + Send + 'static) -> T {
        let root = self.root.clone();
        let joined = tokio::task::spawn_blocking(move || work(&root)).await;
        joined.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }

    pub(crate) async fn check(&self) -> Result<(), Failure> {
        self.tally.one(Count::List);
        self.blocking(|root| fs::read_dir(&root.path).map(drop).map_err(|e| root.failure(&root.path, e))).await
    }

    pub(crate) async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), PutError> {
        self.write(key, bytes, Over::Anything).await.map(drop)
    }

    pub(crate) async fn put_if_absent(&self, key: &Key, bytes: Bytes) -> Result<Placed, PutError> {
        self.write(key, bytes, Over::Nothing).await
    }

    async fn write(&self, key: &Key, bytes: Bytes, over: Over) -> Result<Placed, PutError> {
        self.tally.one(Count::Put);
        self.tally.add(Count::BytesWritten, bytes.len() as u64);
        let key = key.clone();
        Ok(self.blocking(move |root| root.write(&key, &bytes, over)).await?)
    }

    pub(crate) async fn size(&self, key: &Key) -> Result<u64, GetError> {
        self.tally.one(Count::Head);
        let key = key.clone();
        self.blocking(move |root| root.object(&key).map(|(_, size)| size)).await
    }

    /// Size and bytes, once the first have come.
    pub(crate) async fn get(
        &self,
        key: &Key,
    ) -> Result<(u64, impl Stream<Item = Result<Bytes, GetError>> + Send + use<>), GetError> {
        self.tally.one(Count::Get);
        let since = Instant::now();
        let asked = key.clone();
        let (reading, first) = self
            .blocking(move |root| {
                let (file, size) = root.object(&asked)?;
                let reading = Reading { file: Arc::new(file), key: asked, size };
                let first = reading.chunk(root, 0)?;
                Ok::<_, GetError>((reading, first))
            })
            .await?;
        self.tally.first_byte(since.elapsed());
        let size = reading.size;
        let start = (self.clone(), reading, Some(first), 0);
        let stream = stream::try_unfold(start, |(directory, reading, first, at)| async move {
            if at == reading.size {
                return Ok(None);
            }
            let bytes = match first {
                Some(first) => first,
                None => {
                    let reading = reading.clone();
                    directory.blocking(move |root| reading.chunk(root, at)).await?
                }
            };
            directory.tally.add(Count::BytesRead, bytes.len() as u64);
            let next = at + bytes.len() as u64;
            Ok(Some((bytes, (directory, reading, None, next))))
        });
        Ok((size, stream))
    }

    pub(crate) async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, GetError> {
        let mut pieces = self.get_ranges(key, &[range]).await?;
        Ok(pieces.pop().expect("one range, one piece"))
    }

    /// All from one file: what replaces it meanwhile is another.
    pub(crate) async fn get_ranges(&self, key: &Key, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, GetError> {
        let since = Instant::now();
        let asked = key.clone();
        let (file, size) = self.blocking(move |root| root.object(&asked)).await?;
        let reading = Reading { file: Arc::new(file), key: key.clone(), size };
        let beyond = |range: &Range<u64>| GetError::BeyondEnd {
            store: self.name().clone(),
            key: key.clone(),
            start: range.start,
            end: range.end,
            size: Some(size),
        };
        if let Some(range) = ranges.iter().find(|range| !range.is_empty() && range.end > size) {
            return Err(beyond(range));
        }
        let pieces = ranges.iter().cloned().map(|range| {
            let reading = reading.clone();
            async move {
                self.tally.one(Count::Get);
                let bytes = self.blocking(move |root| reading.bytes(root, range)).await?;
                self.tally.first_byte(since.elapsed());
                self.tally.add(Count::BytesRead, bytes.len() as u64);
                Ok(bytes)
            }
        });
        stream::iter(pieces).buffered(self.root.settings.most_requests.max(1)).try_collect().await
    }

    pub(crate) fn list(&self, under: Option<&Key>) -> impl Stream<Item = Result<Listed, Failure>> + use<> {
        let (directory, under) = (self.clone(), under.cloned());
        let listed = async move {
            directory.tally.one(Count::List);
            let found = directory.blocking(move |root| root.list(under.as_ref())).await?;
            Ok::<_, Failure>(stream::iter(found.into_iter().map(Ok)))
        };
        stream::once(listed).try_flatten()
    }

    pub(crate) async fn delete(&self, key: &Key) -> Result<(), Failure> {
        self.tally.one(Count::Delete);
        let key = key.clone();
        self.blocking(move |root| root.delete(&key)).await
    }

    pub(crate) async fn read_reference(&self, key: &Key) -> Result<Option<(Bytes, Version)>, ReadReferenceError> {
        self.tally.one(Count::Get);
        let asked = key.clone();
        let found = self.blocking(move |root| root.read_reference(&asked)).await?;
        self.tally.add(Count::BytesRead, found.as_ref().map_or(0, |(value, _)| value.len() as u64));
        Ok(found)
    }

    pub(crate) async fn swap_reference(
        &self,
        key: &Key,
        expected: Option<&Version>,
        value: &Bytes,
    ) -> Result<Version, SwapError> {
        self.tally.one(Count::Put);
        self.tally.add(Count::BytesWritten, value.len() as u64);
        let (key, expected, value) = (key.clone(), expected.cloned(), value.clone());
        self.blocking(move |root| root.swap_reference(&key, expected.as_ref(), &value)).await
    }
}

/// An open object.
#[derive(Debug, Clone)]
struct Reading {
    file: Arc<File>,
    key: Key,
    size: u64,
}

impl Reading {
    fn chunk(&self, root: &Root, at: u64) -> Result<Bytes, GetError> {
        let chunk = root.settings.chunk_bytes.max(1) as u64;
        self.bytes(root, at..self.size.min(at.saturating_add(chunk)))
    }

    fn bytes(&self, root: &Root, range: Range<u64>) -> Result<Bytes, GetError> {
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
    fn file(&self, key: &Key) -> PathBuf {
        self.path.join(key.as_str())
    }

    fn beside(&self, key: &Key, suffix: &str) -> PathBuf {
        let mut path = self.file(key).into_os_string();
        path.push(suffix);
        path.into()
    }

    fn failure(&self, path: &Path, source: io::Error) -> Failure {
        if source.kind() == io::ErrorKind::NotFound && !self.path.is_dir() {
            return Failure::DirectoryGone { path: self.path.clone() };
        }
        Failure::of_file(path, source)
    }

    /// An object's file and length.
    fn object(&self, key: &Key) -> Result<(File, u64), GetError> {
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

    fn write(&self, key: &Key, bytes: &[u8], over: Over) -> Result<Placed, Failure> {
        let path = self.file(key);
        let number: String = random(8).iter().map(|byte| format!("{byte:02x}")).collect();
        let new = self.beside(key, &format!("#new.{number}"));
        let mut lost = 0;
        loop {
            self.make_directories(&path)?;
            match publish(&new, &path, bytes, over) {
                Ok(placed) => return Ok(placed),
                // A deletion took the empty directory away before there was a file in it.
                Err(e) if e.kind() == io::ErrorKind::NotFound && lost < LOST_DIRECTORIES && self.path.is_dir() => {
                    lost += 1;
                }
                Err(e) => {
                    // Nothing to remove in most cases; a file that stays is never seen.
                    let _ = fs::remove_file(&new);
                    return Err(self.failure(&path, e));
                }
            }
        }
    }

    /// The directories above a file, each durable.
    fn make_directories(&self, file: &Path) -> Result<(), Failure> {
        let parent = file.parent().expect("below the root");
        if parent.is_dir() {
            return Ok(());
        }
        let mut above: Vec<&Path> = parent.ancestors().take_while(|path| *path != self.path).collect();
        above.reverse();
        for path in above {
            match fs::DirBuilder::new().mode(0o700).create(path) {
                Ok(()) => sync_above(path).map_err(|e| self.failure(path, e))?,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                // Taken away again; the next write into it says so, and this is done once more.
                Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => {}
                Err(e) => return Err(self.failure(path, e)),
            }
        }
        Ok(())
    }

    fn list(&self, under: Option<&Key>) -> Result<Vec<Listed>, Failure> {
        let mut found = Vec::new();
        let mut left = vec![under.map_or_else(|| self.path.clone(), |key| self.file(key))];
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
                    Ok(metadata) if metadata.is_file() => {
                        found.extend(self.key(&path).map(|key| Listed { key, size: metadata.len() }));
                    }
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    Err(e) => return Err(self.failure(&path, e)),
                }
            }
        }
        found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// None of files that are no objects: those being written, locks, what others put there.
    fn key(&self, path: &Path) -> Option<Key> {
        Key::new(path.strip_prefix(&self.path).ok()?.to_str()?).ok()
    }

    fn delete(&self, key: &Key) -> Result<(), Failure> {
        let path = self.file(key);
        let lock = self.beside(key, "#lock");
        let held = if lock.exists() { Some(self.lock(key)?) } else { None };
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                if !self.path.is_dir() {
                    return Err(self.failure(&path, e));
                }
            }
            // A directory: there is no such object.
            Err(_) if path.is_dir() => return Ok(()),
            Err(e) => return Err(self.failure(&path, e)),
        }
        if held.is_some() {
            fs::remove_file(&lock).map_err(|e| self.failure(&lock, e))?;
        }
        match sync_above(&path) {
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

    fn read_reference(&self, key: &Key) -> Result<Option<(Bytes, Version)>, ReadReferenceError> {
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

    fn swap_reference(&self, key: &Key, expected: Option<&Version>, value: &[u8]) -> Result<Version, SwapError> {
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
            // It is in its place, but the disk did not say that it stays there.
            Err(source) if current().is_ok_and(|now| now == Some(nonce)) => {
                Err(SwapError::Unknown { store: self.name.clone(), key: key.clone(), source: Box::new(source) })
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// Holds the lock of a reference. Lock files are removed with their reference, so the one that was opened must still be
    /// the one that is there.
    fn lock(&self, key: &Key) -> Result<Held, Failure> {
        let path = self.beside(key, "#lock");
        let since = Instant::now();
        loop {
            let waited = since.elapsed();
            if waited > self.settings.answer_timeout {
                let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                return Err(Failure::Locked { path, waited_ms });
            }
            self.make_directories(&path)?;
            let file = match File::options().create(true).append(true).mode(0o600).open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound && self.path.is_dir() => continue,
                Err(e) => return Err(self.failure(&path, e)),
            };
            match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if same_file(&file, &path).map_err(|e| self.failure(&path, e))? => {
                    return Ok(Held(file));
                }
                Ok(()) | Err(rustix::io::Errno::INTR) => {}
                // Held for a few fsyncs; a random wait, so that no order of arrival is unlucky again and again.
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    std::thread::sleep(Duration::from_micros(200 + 16 * u64::from(random(1)[0])));
                }
                Err(e) => return Err(self.failure(&path, e.into())),
            }
        }
    }
}

/// A lock, until it is dropped. Closing the file would not be enough: a process that was just forked off has it open too,
/// until it executes its program.
struct Held(File);

impl Drop for Held {
    fn drop(&mut self) {
        // What cannot be unlocked is unlocked when it is closed.
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}

/// Writes a file under another name and gives it its own when it is on disk.
fn publish(new: &Path, path: &Path, bytes: &[u8], over: Over) -> io::Result<Placed> {
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    match over {
        Over::Anything => fs::rename(new, path)?,
        Over::Nothing => {
            let linked = fs::hard_link(new, path);
            fs::remove_file(new)?;
            match linked {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
                    return Err(io::ErrorKind::IsADirectory.into());
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(Placed::AlreadyThere),
                linked => linked?,
            }
        }
    }
    sync_above(path)?;
    Ok(Placed::New)
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
