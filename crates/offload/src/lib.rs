//! Generations of parked procs to an object store and back, and which data directory owns them.
//!
//! Owns the connection to the store, the realm's keys, what is known of content that is stored
//! already, and the order of steps. The format is `kip-archive`'s, the moving of bytes
//! `kip-store`'s. Never sees a task, never decides when a generation goes or comes.
//!
//! Up ([`Archive::store`]): packs, read back; the front, read back; then the head by
//! compare-and-swap. Only then does the generation exist for others, and only then may the local
//! one go (ARCHITECTURE.md, Invariants). A crash before that leaves objects that no head leads to.
//!
//! Back ([`Archive::fetch`]): the front in one streamed GET, into a generation directory like any
//! other, with all memory in a remote page file. The wake begins once the front's first part is
//! there; working sets follow ([`stream`]), and of all else [`demand`] fetches by ranges what is
//! needed. A crash leaves a directory that the next sweep removes.
#![forbid(unsafe_code)]

mod account;
mod ahead;
mod cache;
pub mod collect;
mod demand;
pub mod engine;
mod errors;
mod export;
mod fetch;
mod files;
mod filling;
pub mod find;
pub mod import;
mod inspect;
mod keys;
mod ownership;
pub mod place;
pub mod processor;
mod read_front;
pub mod restore;
mod show;
#[cfg(test)]
mod snapshot_tests;
mod stream;
mod survey;
pub mod template;
#[cfg(test)]
mod tests;
mod upload;
pub mod verify;

pub use demand::Fetched;
pub use errors::{DemandError, FetchError};
pub use files::{Own, forget_page_files};
pub use inspect::StoredImages;
pub use keys::{KeyChangeError, KeyLength, with_wrap};
pub use read_front::Whole;
pub use upload::Uploaded;

use kip_archive::gc::{BootMs, TooLate};
use kip_archive::head::{Head, HeadError, HeadOwner, HeadRefused, HeadSealError, HeadState, KEPT};
use kip_archive::head::{HeadSwap, Outcome};
use kip_archive::ids::{BadId, OwnerId, PackId, ProcId};
use kip_archive::index::Index;
use kip_archive::keys::{KeyFileError, Keyring, NoKey};
use kip_archive::names::{FrontRef, ObjectName};
use kip_archive::seal;
use kip_store::{Key, OpenError, ReadReferenceError, Settings, Store, SwapError, Version};
use kip_types::{ProcName, Realm};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Runs `work` on a thread that may wait.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(e) => match e.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime ends, and with it whatever waits for this.
            Err(_) => std::future::pending().await,
        },
    }
}

/// In a proc's directory: what of it is in the store.
pub const ARCHIVED: &str = "archived.json";
/// Local files, in the data directory.
const DIRECTORY: &str = "archive";
const OWNER: &str = "owner";
/// In a proc's directory.
pub const ID: &str = "archive-id";
/// The same of what it was before it was started anew, and when that was.
const ENDED: &str = "archive-ended-";
/// The same of what it was when nothing of that could be woken any more.
pub const ASIDE: &str = "archive-aside-";
const INDEX: &str = "index";
/// Beside the directory of the archive: those of procs.
const PROCS: &str = "procs";
/// A proc is not kept longer than this by a store that does not answer.
const RETIRED_WITHIN: Duration = Duration::from_secs(10);

/// The store cannot be used.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// What the URL says.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The realm's keys.
    #[error(transparent)]
    Keys(#[from] KeyFileError),
    /// A file of ours.
    #[error("cannot read or write {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The head of a proc cannot be read or changed.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum HeadFailure {
    #[error(transparent)]
    Read(#[from] ReadReferenceError),
    #[error(transparent)]
    Head(#[from] HeadError),
    #[error(transparent)]
    Refused(#[from] HeadRefused),
    #[error(transparent)]
    Seal(#[from] HeadSealError),
    #[error(transparent)]
    Swap(#[from] SwapError),
    #[error("proc {0} is not in the store")]
    None(ProcId),
    #[error("the store has {stored} of proc {proc} as the newest, not {expected}: it was woken elsewhere meanwhile")]
    Other { proc: ProcId, stored: String, expected: FrontRef },
    #[error(transparent)]
    TooLate(#[from] TooLate),
    #[error("what was stored cannot be used")]
    KeyGone(#[source] NoKey),
    #[error("the head of proc {0} changes faster than it can be changed: try again")]
    Contended(ProcId),
}

impl HeadFailure {
    /// The head was sealed by a key that is destroyed: it, and what it leads to, cannot be read
    /// here.
    pub fn is_of_destroyed_key(&self) -> bool {
        matches!(self, HeadFailure::Head(HeadError::Open(seal::UnsealError::Key(NoKey::Destroyed { .. }))))
    }
}

impl HeadFailure {
    /// Whether it is known that the change has not been made.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            HeadFailure::Refused(_) | HeadFailure::Other { .. } | HeadFailure::None(_) | HeadFailure::Head(_)
        )
    }
}

/// The store of a data directory.
pub struct Archive {
    /// Where objects are.
    pub store: Store,
    /// Whose procs it has.
    pub realm: Realm,
    /// A task that begins to seal or open takes the ring of that moment.
    keys: Mutex<Arc<Keyring>>,
    /// Held for writing while keys change.
    changing: Arc<tokio::sync::RwLock<()>>,
    /// This data directory, as heads name it.
    pub owner: OwnerId,
    directory: PathBuf,
    runtime: tokio::runtime::Handle,
    /// The store is known to compare and swap.
    fit: tokio::sync::OnceCell<()>,
    /// What is stored in the realm, as far as this directory knows: a cache.
    index: Mutex<Arc<Index>>,
    /// How often what is known of what is stored was found wrong: an upload that began before the
    /// last time adds nothing to it.
    distrusted: AtomicU64,
    /// Heads as this directory left them, so that what follows needs no request to know them: a
    /// cache.
    heads: Mutex<HashMap<ProcId, (Head, Version)>>,
    /// What is being fetched on demand.
    fetched: demand::Open,
    /// What came so far, by proc.
    accounts: account::Accounts,
    /// What restores here; none where nothing is to be.
    engine: Option<String>,
    /// Sealed bytes on the local disk, if there are to be any.
    cache: Option<Arc<cache::Cache>>,
    /// Held for reading by an upload, for writing by a backup, and by a collection that waits less
    /// than is usual.
    storing: tokio::sync::RwLock<()>,
    /// Held by a collection, an import, and the second try to store a generation.
    collecting: tokio::sync::Mutex<()>,
}

impl std::fmt::Debug for Archive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Archive({})", self.store.name())
    }
}

/// Tries to change a head that others change meanwhile, or whose changes are not answered.
const TRIES: u32 = 8;

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> ArchiveError + '_ {
    move |source| ArchiveError::Io { path: path.to_owned(), source }
}

/// What the cache takes, and what it was good for since the daemon's start.
#[derive(Debug, Clone, Copy)]
pub struct CacheUse {
    /// What it takes on the disk, bytes.
    pub bytes: u64,
    /// What it may take, bytes.
    pub limit_bytes: u64,
    /// Reads that it answered.
    pub hits: u64,
    /// Reads that it could not answer.
    pub misses: u64,
}

impl Archive {
    /// Opens the store of a data directory; makes its identity and the realm's keys the first time.
    /// Asks nothing of the store. To be called within a runtime.
    pub fn open(url: &str, data: &Path, realm: Realm, now_ms: u64) -> Result<Archive, ArchiveError> {
        let store = Store::open(url, Settings::default())?;
        let directory = data.join(DIRECTORY);
        fs::create_dir_all(&directory).map_err(io_at(&directory))?;
        let keys = match Keyring::load(&directory, &realm) {
            Ok(keys) => keys,
            Err(KeyFileError::Missing { .. }) => Keyring::create(&directory, realm.clone(), now_ms)?,
            Err(e) => return Err(e.into()),
        };
        let owner = identity(&directory.join(OWNER))?;
        let index = fs::read(directory.join(INDEX)).ok().and_then(|bytes| Index::load(&bytes, &realm));
        Ok(Archive {
            store,
            realm,
            keys: Mutex::new(Arc::new(keys)),
            changing: Arc::default(),
            owner,
            directory,
            runtime: tokio::runtime::Handle::current(),
            fit: tokio::sync::OnceCell::new(),
            index: Mutex::new(Arc::new(index.unwrap_or_default())),
            distrusted: AtomicU64::new(0),
            heads: Mutex::default(),
            fetched: demand::Open::default(),
            accounts: account::Accounts::default(),
            engine: None,
            cache: None,
            storing: tokio::sync::RwLock::default(),
            collecting: tokio::sync::Mutex::default(),
        })
    }

    /// With a cache on the local disk of at most so many bytes; without a number, a share of the
    /// disk, and none where the store is on this machine itself. Blocking.
    pub fn with_cache(self, data: &Path, limit: Option<u64>) -> Archive {
        let none = self.store.is_directory().then_some(0);
        Archive { cache: cache::Cache::open(data, limit.or(none)), ..self }
    }

    /// With an engine that restores what comes from it.
    pub fn with_engine(self, engine: String) -> Archive {
        Archive { engine: Some(engine), ..self }
    }

    /// Whether that can be restored here at all.
    pub fn check_engine(&self, there: &str) -> Result<(), engine::Unreadable> {
        self.engine.as_deref().map_or(Ok(()), |here| engine::check(there, here))
    }

    /// What the cache takes on the disk, and what it may, bytes.
    pub fn cached(&self) -> Option<(u64, u64)> {
        self.cache.as_ref().map(|cache| cache.held())
    }

    /// The cache, with how many reads it answered and how many it could not.
    pub fn cache_use(&self) -> Option<CacheUse> {
        let cache = self.cache.as_ref()?;
        let ((bytes, limit_bytes), (hits, misses)) = (cache.held(), cache.answers());
        Some(CacheUse { bytes, limit_bytes, hits, misses })
    }

    /// What was done in the store since the daemon's start.
    pub fn store_use(&self) -> kip_store::Counters {
        self.store.counters()
    }

    /// Drops fronts of a proc from the cache, all but one: as far as the daemon knows, no reader
    /// wants them again.
    fn uncache_fronts(&self, proc: ProcId, but: Option<FrontRef>) {
        let Some(cache) = &self.cache else { return };
        let own = format!("{}/", ObjectName::of_proc(&self.realm, proc));
        let kept = but.map(|front| self.front_key(proc, front));
        cache.forget(|object| object.starts_with(&own) && kept.as_ref().is_none_or(|kept| kept.as_str() != object));
    }

    /// Forgets that a proc was ever archived, for it begins anew; what is to be removed from the
    /// store is noted.
    pub fn forget(dir: &Path) -> io::Result<()> {
        part(dir, ENDED)
    }

    /// The same for one that cannot be woken: what is in the store stays there, and this
    /// directory's, until the proc is removed.
    pub fn set_aside(dir: &Path) -> io::Result<()> {
        part(dir, ASIDE)
    }

    /// Until the returned guard is dropped this daemon stores no generation.
    pub async fn nobody_stores(&self) -> tokio::sync::RwLockWriteGuard<'_, ()> {
        self.storing.write().await
    }

    /// Takes out of the store what was noted, and this proc if `whole`. Returns what could not be
    /// done.
    pub async fn retire(&self, dir: &Path, whole: bool) -> Vec<String> {
        let names = fs::read_dir(dir).into_iter().flatten().flatten();
        let noted = names.filter(|entry| {
            let name = entry.file_name();
            let text = name.to_string_lossy();
            text.starts_with(ENDED) || whole && (name == ID || text.starts_with(ASIDE))
        });
        let mut failed = Vec::new();
        if whole {
            self.close_account(dir);
        }
        for path in noted.map(|entry| entry.path()) {
            let Some(id) = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<ProcId>().ok()) else {
                continue;
            };
            self.uncache_fronts(id, None);
            match tokio::time::timeout(RETIRED_WITHIN, self.remove(id)).await {
                Ok(Ok(())) => drop(fs::remove_file(&path)),
                Ok(Err(e)) => failed.push(kip_types::chain(&e)),
                Err(_) => failed.push(format!("store {} does not answer", self.store.name())),
            }
        }
        failed
    }

    /// The id of the proc whose directory that is, made the first time.
    pub fn id_of(&self, dir: &Path) -> Result<ProcId, ArchiveError> {
        identity(&dir.join(ID))
    }

    fn key(name: &ObjectName) -> Key {
        Key::new(name.to_string()).expect("names of objects are letters, digits, dashes and slashes")
    }

    fn pack_key(&self, pack: PackId) -> Key {
        Archive::key(&ObjectName::Pack { realm: self.realm.clone(), pack })
    }

    fn front_key(&self, proc: ProcId, front: FrontRef) -> Key {
        Archive::key(&ObjectName::Front { realm: self.realm.clone(), proc, front })
    }

    fn head_key(&self, proc: ProcId) -> Key {
        Archive::key(&ObjectName::Head { realm: self.realm.clone(), proc })
    }

    /// The head of a proc, if the store has one.
    pub async fn head(&self, proc: ProcId) -> Result<Option<(Head, Version)>, HeadFailure> {
        self.head_in(&self.store, proc).await
    }

    /// The same by another handle on the store.
    async fn head_in(&self, store: &Store, proc: ProcId) -> Result<Option<(Head, Version)>, HeadFailure> {
        let read = store.read_reference(&self.head_key(proc)).await?;
        let Some((bytes, version)) = read else { return Ok(None) };
        Ok(Some((Head::open(&self.keys(), proc, None, &bytes)?, version)))
    }

    /// Changes the head of a proc to what `follow` says comes after it, and returns that once it is
    /// known to stand. `last` is what it was when it was seen last: it costs nothing if that is
    /// wrong.
    async fn change(
        &self,
        proc: ProcId,
        mut last: Option<(Head, Version)>,
        follow: impl Fn(Option<&Head>) -> Result<Head, HeadFailure>,
    ) -> Result<(Head, Option<Version>), HeadFailure> {
        let mut tries = 0..TRIES;
        while tries.next().is_some() {
            let remembered = last.take();
            let is_remembered = remembered.is_some();
            let seen = match remembered {
                Some(seen) => Some(seen),
                None => self.head(proc).await?,
            };
            let (from, mut version) = seen.unzip();
            let to = match follow(from.as_ref()) {
                // Only what a swap confirms is taken from memory.
                Err(_) if is_remembered => continue,
                to => to?,
            };
            if from.as_ref() == Some(&to) {
                if is_remembered {
                    continue;
                }
                return Ok((to, version));
            }
            let mut swap = HeadSwap::new(from, to);
            loop {
                let bytes = swap.attempt().seal(&self.keys())?;
                match self.store.swap_reference(&self.head_key(proc), version.as_ref(), bytes.into()).await {
                    Ok(version) => return Ok((swap.attempt().clone(), Some(version))),
                    Err(SwapError::Conflict { .. }) => break,
                    Err(SwapError::Superseded { .. } | SwapError::Unknown { .. }) if tries.next().is_some() => {}
                    Err(e) => return Err(e.into()),
                }
                let (found, now) = self.head(proc).await?.unzip();
                match swap.read(found.as_ref()) {
                    Outcome::Stands(head) => return Ok((*head, now)),
                    Outcome::Again => version = now,
                    Outcome::Lost => break,
                }
            }
        }
        Err(HeadFailure::Contended(proc))
    }

    fn owner_in(&self, head: &Head) -> HeadOwner {
        HeadOwner { id: self.owner, epoch: head.owner.epoch }
    }

    /// Makes a front the newest of its proc, which stays this directory's: it may have woken
    /// meanwhile. `last` as for a change.
    async fn publish(
        &self,
        proc: ProcId,
        name: &ProcName,
        front: FrontRef,
        last: Option<(Head, Version)>,
        in_time: impl Fn() -> Result<(), TooLate>,
    ) -> Result<(), HeadFailure> {
        let follow = |found: Option<&Head>| {
            in_time()?;
            let first = || Head::first(proc, name.clone(), self.realm.clone(), self.owner);
            let head = found.cloned().unwrap_or_else(first);
            if head.current == Some(front) && head.owner.id == self.owner {
                return Ok(head);
            }
            let owner = self.owner_in(&head);
            // It may have been taken over under another name.
            Ok(Head { name: name.clone(), ..head.advance(owner, front, KEPT)? })
        };
        let (head, version) = self.change(proc, last, follow).await?;
        self.left(proc, head, version);
        Ok(())
    }

    fn left(&self, proc: ProcId, head: Head, version: Option<Version>) {
        let left = version.map(|version| (proc, (head, version)));
        self.heads.lock().extend(left);
    }

    fn last_left(&self, proc: ProcId) -> Option<(Head, Version)> {
        self.heads.lock().remove(&proc)
    }

    /// Lets go of a proc: it runs nowhere, and the data directory that adopts it may wake it from
    /// `front`.
    pub async fn release(&self, proc: ProcId, front: FrontRef) -> Result<(), HeadFailure> {
        let follow = |found: Option<&Head>| {
            let head = self.at_front(proc, found, front)?;
            match head.state {
                HeadState::Archived if head.owner.id == self.owner => Ok(head.clone()),
                _ => Ok(head.release(self.owner_in(head))?),
            }
        };
        let (head, version) = self.change(proc, self.last_left(proc), follow).await?;
        self.left(proc, head, version);
        Ok(())
    }

    /// Takes a proc out of the store for good: what it left there is for collection.
    pub async fn remove(&self, proc: ProcId) -> Result<(), HeadFailure> {
        let follow = |found: Option<&Head>| {
            let Some(head) = found else { return Err(HeadFailure::None(proc)) };
            match head.state {
                HeadState::Removed => Ok(head.clone()),
                HeadState::Archived if head.owner.id == self.owner => {
                    let adopted = head.adopt(self.owner)?;
                    Ok(adopted.remove(adopted.owner)?)
                }
                _ => Ok(head.remove(self.owner_in(head))?),
            }
        };
        match self.change(proc, None, follow).await {
            Ok(_) | Err(HeadFailure::None(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn at_front<'a>(&self, proc: ProcId, found: Option<&'a Head>, expected: FrontRef) -> Result<&'a Head, HeadFailure> {
        let head = found.ok_or(HeadFailure::None(proc))?;
        if head.current == Some(expected) {
            return Ok(head);
        }
        let stored = head.current.map_or_else(|| "nothing".to_owned(), |front| front.to_string());
        Err(HeadFailure::Other { proc, stored, expected })
    }

    /// Takes a proc over that runs nowhere: from here on only this data directory may wake it, and
    /// `front` is what it wakes from.
    pub async fn adopt(&self, proc: ProcId, front: FrontRef) -> Result<Head, HeadFailure> {
        let last = self.last_left(proc);
        let follow = |found: Option<&Head>| {
            let head = self.at_front(proc, found, front)?;
            match head.state {
                HeadState::Archived => Ok(head.adopt(self.owner)?),
                _ => head.fence(self.owner_in(head)).map(|()| head.clone()).map_err(Into::into),
            }
        };
        Ok(self.change(proc, last, follow).await?.0)
    }

    /// Runs something beside all tasks.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    fn save_index(&self) {
        let bytes = self.index.lock().save(&self.realm);
        // A cache.
        if let Err(error) = fs::write(self.directory.join(INDEX), bytes) {
            tracing::debug!(%error, "what is stored is not remembered");
        }
    }
}

/// A proc is not any more what it is in the store: its generations are numbered anew.
fn part(dir: &Path, word: &str) -> io::Result<()> {
    let there = |done: io::Result<()>| match done {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    there(fs::remove_file(dir.join(ARCHIVED)))?;
    there(fs::rename(dir.join(ID), dir.join(format!("{word}{}", kip_sys::clock::now_ms()))))
}

fn boot_ms() -> BootMs {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    BootMs(now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000)
}

/// The id in a file, which is made with a new one if it is not there.
fn identity<T: Id>(path: &Path) -> Result<T, ArchiveError> {
    match fs::read_to_string(path) {
        Ok(text) => text.trim().parse().map_err(|e| io_at(path)(io::Error::new(io::ErrorKind::InvalidData, e))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let id = T::new();
            let written = kip_records::record::replace(path, id.to_string().as_bytes());
            written.map(|()| id).map_err(|e| io_at(path)(io::Error::other(e)))
        }
        Err(e) => Err(io_at(path)(e)),
    }
}

trait Id: std::str::FromStr<Err = BadId> + std::fmt::Display {
    fn new() -> Self;
}

impl Id for OwnerId {
    fn new() -> Self {
        Self::random()
    }
}

impl Id for ProcId {
    fn new() -> Self {
        Self::random()
    }
}
