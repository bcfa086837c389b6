//! Sealed bytes of objects on the local disk: what this machine wrote or fetched a while ago, a
//! wake need not fetch again.
//!
//! Owns `DIR/cache`: what is there, how much of it, and which entry goes first (the one used the
//! longest ago). Shared by all procs. Knows nothing of what the bytes mean: fronts as a whole and
//! pieces of packs, by the name of the object and the range. Those never change in a store. Heads
//! and other references, which do, are never here. Bytes are sealed as they are in the store, so
//! that no program can read more here than there, and a key that is destroyed shreds these too. The
//! reader authenticates them, and says what could not be opened ([`Cache::damaged`]).
//!
//! A file is `NAME@START-END`, with dots for the slashes of the name. It is written under another
//! name and gets its own when it is whole, without a sync: after a crash of the machine it may be
//! shorter, which is seen by its length, or zeros, which cannot be opened. No wake depends on the
//! cache: the daemon logs trouble with the disk once, and then works as if there were no cache.

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// In the data directory.
const DIRECTORY: &str = "cache";
/// Where the room on the disk is left to be chosen: a tenth of what is free, and no more than this,
/// bytes.
const USUAL_MOST: u64 = 1 << 30;
/// So much of the disk is left to others, bytes.
const SPARE: u64 = 64 << 20;
/// What is put in at once is cut into entries of this size, so that of a pack what is used stays,
/// bytes.
const PIECE: usize = 2 << 20;
/// Entries at most, so that a directory of them is looked through in no time.
const MOST_ENTRIES: usize = 16 << 10;
/// That it cannot be used is told no more often.
const REPORT_EVERY: Duration = Duration::from_secs(600);
/// What a file takes on the disk is a multiple of this, bytes.
const GRAIN: u64 = 4096;

/// The cache of a data directory.
#[derive(Debug)]
pub(crate) struct Cache {
    directory: PathBuf,
    limit: u64,
    state: Mutex<CacheState>,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Debug, Default)]
struct CacheState {
    /// By object and start.
    entries: HashMap<Arc<str>, BTreeMap<u64, Entry>>,
    /// The longest unused first.
    order: BTreeMap<u64, (Arc<str>, u64)>,
    turn: u64,
    /// What all of them take.
    bytes: u64,
    /// Files that were begun.
    begun: u64,
    /// When it was told that it cannot be used.
    told: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    end: u64,
    turn: u64,
}

fn cost(range: &Range<u64>) -> u64 {
    (range.end - range.start).next_multiple_of(GRAIN)
}

fn file_name(object: &str, range: &Range<u64>) -> String {
    format!("{}@{}-{}", object.replace('/', "."), range.start, range.end)
}

fn parsed(name: &str) -> Option<(String, Range<u64>)> {
    let (object, range) = name.split_once('@')?;
    let (start, end) = range.split_once('-')?;
    let range = start.parse().ok()?..end.parse().ok()?;
    (range.start < range.end).then(|| (object.replace('.', "/"), range))
}

impl CacheState {
    fn insert(&mut self, object: &Arc<str>, range: &Range<u64>) {
        self.turn += 1;
        let entry = Entry { end: range.end, turn: self.turn };
        if let Some(old) = self.entries.entry(Arc::clone(object)).or_default().insert(range.start, entry) {
            self.order.remove(&old.turn);
            self.bytes -= cost(&(range.start..old.end));
        }
        self.order.insert(self.turn, (Arc::clone(object), range.start));
        self.bytes += cost(range);
    }

    /// What there is of a range, in order and without a gap, or nothing.
    fn covering(&self, object: &str, range: &Range<u64>) -> Option<Vec<Range<u64>>> {
        let entries = self.entries.get(object)?;
        let (mut at, mut found) = (range.start, Vec::new());
        while at < range.end {
            let (start, entry) = entries.range(..=at).next_back().filter(|(_, entry)| entry.end > at)?;
            found.push(*start..entry.end);
            at = entry.end;
        }
        Some(found)
    }

    fn used(&mut self, object: &str, start: u64) {
        let Some((object, entries)) = self.entries.get_key_value(object) else { return };
        let (object, Some(entry)) = (Arc::clone(object), entries.get(&start).copied()) else { return };
        self.turn += 1;
        self.order.remove(&entry.turn);
        self.order.insert(self.turn, (Arc::clone(&object), start));
        let entries = self.entries.get_mut(&object).expect("it was just there");
        entries.insert(start, Entry { turn: self.turn, ..entry });
    }

    /// Takes one off the list; its range.
    fn remove(&mut self, object: &str, start: u64) -> Option<Range<u64>> {
        let entries = self.entries.get_mut(object)?;
        let entry = entries.remove(&start)?;
        if entries.is_empty() {
            self.entries.remove(object);
        }
        self.order.remove(&entry.turn);
        self.bytes -= cost(&(start..entry.end));
        Some(start..entry.end)
    }
}

impl Cache {
    /// Opens the one of a data directory, or makes it. `limit`: what its files may take, bytes;
    /// none for a share of the disk. With 0 there is none, and what an earlier daemon left goes.
    /// Blocking.
    pub(crate) fn open(data: &Path, limit: Option<u64>) -> Option<Arc<Cache>> {
        let directory = data.join(DIRECTORY);
        if limit == Some(0) {
            if let Err(error) = fs::remove_dir_all(&directory)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %directory.display(), %error, "an old cache stays on the disk: remove it");
            }
            return None;
        }
        let mut cache = Cache {
            directory,
            limit: limit.unwrap_or(0),
            state: Mutex::default(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        };
        if let Err(error) = cache.load() {
            cache.trouble(&error);
        }
        if limit.is_none() {
            // Its own files are room that it has already.
            let own = cache.state().bytes;
            cache.limit = USUAL_MOST.min((free(data).unwrap_or(0) + own) / 10);
        }
        cache.shrink(&mut cache.state(), 0);
        Some(Arc::new(cache))
    }

    fn load(&self) -> io::Result<()> {
        self.make_directory()?;
        let mut found: Vec<(SystemTime, Arc<str>, Range<u64>)> = Vec::new();
        for file in fs::read_dir(&self.directory)? {
            let file = file?;
            let meta = file.metadata()?;
            let name = file.file_name();
            let sound = parsed(&name.to_string_lossy()).filter(|(_, range)| range.end - range.start == meta.len());
            match sound {
                Some((object, range)) => found.push((meta.modified()?, object.into(), range)),
                // Half written, or cut by a crash. What cannot be removed is not ours, and does no
                // harm.
                None => drop(fs::remove_file(file.path())),
            }
        }
        found.sort_by_key(|(used, ..)| *used);
        let mut state = self.state();
        found.iter().for_each(|(_, object, range)| state.insert(object, range));
        Ok(())
    }

    fn make_directory(&self) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.directory) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    fn state(&self) -> MutexGuard<'_, CacheState> {
        self.state.lock()
    }

    fn path(&self, object: &str, range: &Range<u64>) -> PathBuf {
        self.directory.join(file_name(object, range))
    }

    /// What its files take, and what they may, bytes.
    pub(crate) fn held(&self) -> (u64, u64) {
        (self.state().bytes, self.limit)
    }

    /// How often it was asked for what it has, and for what it has not.
    pub(crate) fn answers(&self) -> (u64, u64) {
        (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed))
    }

    fn count(&self, has: bool) {
        let counter = if has { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether all of a range is here.
    pub(crate) fn has(&self, object: &str, range: &Range<u64>) -> bool {
        let has = self.state().covering(object, range).is_some();
        self.count(has);
        has
    }

    /// A range of an object, if all of it is here. Blocking.
    pub(crate) fn read(&self, object: &str, range: &Range<u64>) -> Option<Bytes> {
        let pieces = self.state().covering(object, range)?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        for piece in pieces {
            let from = piece.start.max(range.start)..piece.end.min(range.end);
            let part = &mut bytes[(from.start - range.start) as usize..(from.end - range.start) as usize];
            let read = self.opened(object, &piece).and_then(|file| file.read_exact_at(part, from.start - piece.start));
            if let Err(error) = read {
                self.lost(object, &piece, &error);
                return None;
            }
        }
        Some(bytes.into())
    }

    /// An object that was put in as a whole. Blocking.
    pub(crate) fn whole(&self, object: &str) -> Option<File> {
        let end = self.state().entries.get(object).and_then(|entries| entries.get(&0)).map(|entry| entry.end);
        self.count(end.is_some());
        let end = end?;
        match self.opened(object, &(0..end)) {
            Ok(file) => Some(file),
            Err(error) => {
                self.lost(object, &(0..end), &error);
                None
            }
        }
    }

    fn opened(&self, object: &str, entry: &Range<u64>) -> io::Result<File> {
        let file = File::open(self.path(object, entry))?;
        // The order outlives the daemon by this; if it fails it does not.
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let _ = rustix::fs::futimens(&file, &rustix::fs::Timestamps { last_access: now, last_modification: now });
        self.state().used(object, entry.start);
        Ok(file)
    }

    /// An entry that is on the list and cannot be read. A missing file was removed from outside: if
    /// the whole cache was, the next write logs that.
    fn lost(&self, object: &str, entry: &Range<u64>, error: &io::Error) {
        let known = self.drop_entry(&mut self.state(), object, entry.start).is_some();
        if known && error.kind() != io::ErrorKind::NotFound {
            self.trouble(error);
        }
    }

    /// What was read here cannot be opened: it goes, and that is told.
    pub(crate) fn damaged(&self, object: &str, range: &Range<u64>) {
        let mut state = self.state();
        let starts = state.entries.get(object).into_iter().flatten();
        let bad: Vec<u64> = starts.filter(|(s, e)| **s < range.end && range.start < e.end).map(|(s, _)| *s).collect();
        if !bad.is_empty() {
            tracing::warn!(object, "what the cache had of it was damaged on the local disk; it is fetched again");
        }
        for start in bad {
            self.drop_entry(&mut state, object, start);
        }
    }

    /// Puts bytes of an object in, from `start` on. Blocking.
    pub(crate) fn keep(&self, object: &str, start: u64, bytes: &[u8]) {
        let mut at = start;
        for piece in bytes.chunks(PIECE) {
            let Some(mut writing) = self.begin(object, at, piece.len() as u64) else { return };
            if writing.write(piece) {
                writing.finish();
            }
            at += piece.len() as u64;
        }
    }

    /// Puts an object in as a whole. Blocking.
    pub(crate) fn keep_whole(&self, object: &str, bytes: &[u8]) {
        if let Some(mut writing) = self.begin(object, 0, bytes.len() as u64)
            && writing.write(bytes)
        {
            writing.finish();
        }
    }

    /// Begins to put in an object, from `start` on and as one entry. Blocking.
    pub(crate) fn begin(&self, object: &str, start: u64, bytes: u64) -> Option<Writing<'_>> {
        let (number, there) = {
            let mut state = self.state();
            state.begun += 1;
            (state.begun, state.covering(object, &(start..start + bytes)).is_some())
        };
        if there || cost(&(0..bytes)) > self.limit {
            return None;
        }
        let path = self.directory.join(format!("new-{number}"));
        match self.create(&path, bytes) {
            Ok(file) => Some(Writing { cache: self, object: object.into(), start, length: 0, path, file: Some(file) }),
            Err(error) => {
                self.trouble(&error);
                None
            }
        }
    }

    fn create(&self, path: &Path, bytes: u64) -> io::Result<File> {
        let lacks = |cache: &Cache| free(&cache.directory).is_ok_and(|free| free < bytes + SPARE);
        if lacks(self) {
            self.shrink(&mut self.state(), bytes);
            if lacks(self) {
                return Err(io::ErrorKind::StorageFull.into());
            }
        }
        let create = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        match create() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // The whole cache was removed from outside.
                let mut state = self.state();
                *state = CacheState { begun: state.begun, told: state.told, ..CacheState::default() };
                drop(state);
                tracing::warn!(path = %self.directory.display(), "the cache has gone from the disk; it begins anew");
                self.make_directory()?;
                create()
            }
            created => created,
        }
    }

    /// Lets go of those unused the longest, until there is room for `more` bytes, on the disk and
    /// in number.
    fn shrink(&self, state: &mut CacheState, more: u64) {
        let least = if more == 0 { self.limit } else { state.bytes.min(self.limit).saturating_sub(more) };
        while state.bytes > least || state.order.len() > MOST_ENTRIES {
            let Some((_, (object, start))) = state.order.first_key_value() else { return };
            let (object, start) = (Arc::clone(object), *start);
            self.drop_entry(state, &object, start);
        }
    }

    /// Under the lock, so that a file that comes anew is not taken for the old one.
    fn drop_entry(&self, state: &mut CacheState, object: &str, start: u64) -> Option<Range<u64>> {
        let range = state.remove(object, start)?;
        let _ = fs::remove_file(self.path(object, &range));
        Some(range)
    }

    /// Lets go of all of the objects of which that is true.
    pub(crate) fn forget(&self, which: impl Fn(&str) -> bool) {
        let mut state = self.state();
        let objects: Vec<Arc<str>> = state.entries.keys().filter(|object| which(object)).cloned().collect();
        for object in objects {
            let starts: Vec<u64> = state.entries[&object].keys().copied().collect();
            for start in starts {
                self.drop_entry(&mut state, &object, start);
            }
        }
    }

    /// Reported now and then.
    fn trouble(&self, error: &io::Error) {
        let mut state = self.state();
        if state.told.is_none_or(|at| at.elapsed() > REPORT_EVERY) {
            state.told = Some(Instant::now());
            let path = self.directory.display();
            tracing::warn!(%path, %error, "the cache cannot be used: what archived procs need comes from the store");
        }
    }
}

/// Bytes that are left of the file system of a path.
pub(crate) fn free(path: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// An entry that is written; dropped before it is finished it leaves nothing.
#[derive(Debug)]
pub(crate) struct Writing<'a> {
    cache: &'a Cache,
    object: Arc<str>,
    start: u64,
    length: u64,
    path: PathBuf,
    file: Option<File>,
}

impl Writing<'_> {
    /// The next bytes; whether they could be written. If not, there will be no entry.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> bool {
        let Some(file) = &mut self.file else { return false };
        self.length += bytes.len() as u64;
        if let Err(error) = file.write_all(bytes) {
            self.cache.trouble(&error);
            self.file = None;
            let _ = fs::remove_file(&self.path);
        }
        self.file.is_some()
    }

    /// It is whole.
    pub(crate) fn finish(mut self) {
        if self.file.take().is_none() || self.length == 0 {
            return;
        }
        let range = self.start..self.start + self.length;
        let mut state = self.cache.state();
        // Another of the same place goes first, for it may have another name.
        self.cache.drop_entry(&mut state, &self.object, self.start);
        match fs::rename(&self.path, self.cache.path(&self.object, &range)) {
            Ok(()) => {
                state.insert(&self.object, &range);
                self.cache.shrink(&mut state, 0);
            }
            Err(error) => {
                drop(state);
                let _ = fs::remove_file(&self.path);
                self.cache.trouble(&error);
            }
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    fn opened(data: &Path, limit: u64) -> Arc<Cache> {
        Cache::open(data, Some(limit)).unwrap()
    }

    fn files(data: &Path) -> Vec<String> {
        let names = fs::read_dir(data.join(DIRECTORY)).unwrap().map(|file| file.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_was_put_in_is_read_in_any_ranges() {
        let data = tempfile::tempdir().unwrap();
        let cache = opened(data.path(), 100 << 20);
        let bytes: Vec<u8> = (0..5_000_000_u32).map(|n| (n / 7) as u8).collect();
        cache.keep("realms/default/packs/a1", 100, &bytes);
        assert_eq!(files(data.path()).len(), 3, "pieces");
        for (start, end) in [(100, 5_000_100), (100, 101), (2_097_251, 2_097_253), (3_000_000, 5_000_100)] {
            let read = cache.read("realms/default/packs/a1", &(start..end)).unwrap();
            assert_eq!(read, bytes[start as usize - 100..end as usize - 100]);
        }
        for lacking in [99..101, 5_000_000..5_000_101] {
            assert!(!cache.has("realms/default/packs/a1", &lacking));
            assert_eq!(cache.read("realms/default/packs/a1", &lacking), None);
        }
        assert_eq!(cache.read("realms/default/packs/a", &(100..101)), None, "another's");
        // It outlives the daemon; what is half written does not.
        fs::write(data.path().join("cache/new-1"), "half").unwrap();
        fs::write(data.path().join("cache/realms.default.packs.b@0-9"), "cut").unwrap();
        fs::create_dir(data.path().join("cache/not-ours")).unwrap();
        let again = opened(data.path(), 100 << 20);
        assert_eq!(again.read("realms/default/packs/a1", &(100..5_000_100)).unwrap(), bytes);
        fs::remove_dir(data.path().join("cache/not-ours")).unwrap();
        assert_eq!((files(data.path()).len(), again.held().0), (3, cache.held().0));
        again.forget(|object| object.ends_with("packs/a1"));
        assert_eq!((files(data.path()).len(), again.held().0), (0, 0));
        assert!(Cache::open(data.path(), Some(0)).is_none() && !data.path().join(DIRECTORY).exists());
    }

    #[test]
    fn what_was_unused_the_longest_goes_first() {
        let data = tempfile::tempdir().unwrap();
        let cache = opened(data.path(), 3 * GRAIN);
        for object in ["a", "b", "c"] {
            cache.keep(object, 0, &[1; 3000]);
            std::thread::sleep(Duration::from_millis(10)); // so that their times tell them apart
        }
        cache.read("a", &(0..10)).unwrap();
        cache.keep("d", 0, &[1; 3000]);
        assert!(!cache.has("b", &(0..1)) && ["a", "c", "d"].iter().all(|object| cache.has(object, &(0..3000))));
        assert_eq!(cache.held(), (3 * GRAIN, 3 * GRAIN));
        // Another daemon, with less room.
        let again = opened(data.path(), 2 * GRAIN);
        assert!(!again.has("c", &(0..1)) && again.has("a", &(0..1)) && again.has("d", &(0..1)));
        again.keep("large", 0, &[1; 3 * GRAIN as usize]);
        assert!(!again.has("large", &(0..1)) && again.has("a", &(0..1)), "one that never fits takes nobody's place");
    }

    #[test]
    fn what_cannot_be_read_or_opened_is_dropped() {
        let data = tempfile::tempdir().unwrap();
        let cache = opened(data.path(), 1 << 20);
        cache.keep("a", 0, &[1; 5000]);
        cache.keep("a", 5000, &[1; 5000]);
        cache.damaged("a", &(5000..5001));
        assert!(cache.has("a", &(0..5000)) && !cache.has("a", &(5000..5001)));
        fs::write(data.path().join("cache/a@0-5000"), "short").unwrap();
        assert_eq!(cache.read("a", &(0..5000)), None);
        assert!(!cache.has("a", &(0..1)) && files(data.path()).is_empty());
        // One that is begun again is another file, and one that is not finished none.
        drop(cache.begin("a", 0, 10));
        let mut whole = cache.begin("a", 0, 10).unwrap();
        assert!(whole.write(&[7; 4]) && whole.write(&[8; 6]) && cache.whole("a").is_none());
        whole.finish();
        assert!(cache.whole("a").is_some());
        assert_eq!(files(data.path()), ["a@0-10"]);
        // Removed beneath us, then unwritable.
        fs::remove_dir_all(data.path().join(DIRECTORY)).unwrap();
        assert!(cache.whole("a").is_none());
        cache.keep("b", 0, &[1; 5000]);
        assert_eq!(cache.held().0, 2 * GRAIN);
        fs::remove_dir_all(data.path().join(DIRECTORY)).unwrap();
        fs::write(data.path().join(DIRECTORY), "a file").unwrap();
        cache.keep("c", 0, &[1; 5000]);
        assert!(cache.read("b", &(0..1)).is_none() && cache.state().told.is_some());
        fs::remove_file(data.path().join(DIRECTORY)).unwrap();
        cache.keep("c", 0, &[1; 5000]);
        assert!(cache.has("c", &(0..5000)));
    }

    #[test]
    fn the_usual_limit_is_a_share_of_the_disk() {
        let data = tempfile::tempdir().unwrap();
        let (_, limit) = Cache::open(data.path(), None).unwrap().held();
        assert!(limit > 0 && limit <= USUAL_MOST && limit <= free(data.path()).unwrap() / 9, "{limit}");
        assert_eq!(fs::metadata(data.path().join(DIRECTORY)).unwrap().mode() & 0o777, 0o700);
    }
}
