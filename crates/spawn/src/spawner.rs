//! The service: spawn, look, wait, evict.

use crate::entry::{EntryNow, Eviction, ParentProgram, Reserved, SaidExit, SpawnEntry, Stage};
use crate::host::{HostedProc, SpawnHost};
use crate::kept::{KeptEntries, NotKept};
use crate::request::{new_name, run_request};
use crate::room::RoomBooks;
use async_trait::async_trait;
use kip_meta::Meta;
use kip_service::{SpawnPrograms, SpawnService};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::spawn::{EvictRequest, SpawnMoment, SpawnRequest, SpawnedView};
use kip_types::api::{Code, Refusal, RunRequest};
use kip_types::spec::ProcClass;
use kip_types::{ProcName, chain};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Most of them that have not ended.
const MOST_LIVE: usize = 16_384;
/// Most ends that are kept.
const MOST_ENDS: usize = 16_384;
/// How long an end is kept, milliseconds: a day.
const KEPT_MS: u64 = 24 * 3600 * 1000;
/// Most that are forgotten at a time: one transaction's.
const FORGOTTEN_AT_ONCE: usize = 64;
/// Longest request, bytes.
const LONGEST: usize = 64 << 10;
/// From the word to end to SIGKILL, milliseconds.
pub(crate) const GRACE_MS: u64 = 10_000;
/// Longest reason of an eviction, or line about an end, bytes.
const LONGEST_REASON: usize = 1024;

/// Completes the request of a proc and refuses one that makes no sense, as the API does.
pub type CompleteRun = Arc<dyn Fn(&mut RunRequest) -> Result<(), Refusal> + Send + Sync>;

/// What a spawner is made of.
pub struct SpawnParts {
    /// The procs of the machine.
    pub host: Arc<dyn SpawnHost>,
    /// Where entries are kept; none if it cannot be opened.
    pub meta: Option<Arc<dyn Meta>>,
    /// What completes a request.
    pub complete: CompleteRun,
}

/// All spawned procs of a data directory. Clones are the same.
#[derive(Clone)]
pub struct Spawner(pub(crate) Arc<SpawnerParts>);

/// What all of them share.
pub(crate) struct SpawnerParts {
    pub(crate) host: Arc<dyn SpawnHost>,
    pub(crate) kept: Option<KeptEntries>,
    complete: CompleteRun,
    entries: Mutex<BTreeMap<ProcName, Arc<SpawnedProc>>>,
    pub(crate) books: RoomBooks,
    /// Starts at a time.
    pub(crate) starts: Arc<Semaphore>,
    /// Held while the children of a program are counted and one more is made.
    counting: tokio::sync::Mutex<()>,
    /// Changes whenever room may have become free.
    pub(crate) freed: watch::Sender<u64>,
}

/// One spawned proc.
pub(crate) struct SpawnedProc {
    pub(crate) now: watch::Sender<EntryNow>,
    /// One change at a time.
    changing: tokio::sync::Mutex<()>,
}

impl SpawnedProc {
    fn new(entry: SpawnEntry) -> Arc<SpawnedProc> {
        Arc::new(SpawnedProc { now: watch::Sender::new(EntryNow::new(entry)), changing: tokio::sync::Mutex::default() })
    }

    pub(crate) fn entry(&self) -> SpawnEntry {
        self.now.borrow().entry.clone()
    }
}

fn unknown(name: &ProcName) -> Refusal {
    let message = format!(
        "there is no spawned proc {:?}: an end is kept for a day, and of {MOST_ENDS} procs at most (`kip procs --all`)",
        name.as_str()
    );
    Refusal::new(Code::Unknown, message)
}

fn check_line(text: &str) -> Result<(), Refusal> {
    if text.len() <= LONGEST_REASON && !text.contains(char::is_control) {
        return Ok(());
    }
    Err(Refusal::new(Code::Invalid, format!("write one line of at most {LONGEST_REASON} bytes")))
}

fn not_spawned(refusal: Refusal) -> Refusal {
    match refusal.code {
        Code::Unknown => Refusal::new(
            Code::Unknown,
            "this proc was not spawned: only a spawned one has a start and an end that are waited for",
        ),
        _ => refusal,
    }
}

fn not_kept(error: &NotKept) -> Refusal {
    Refusal::new(Code::Exhausted, format!("the proc is not recorded: {}", chain(error)))
}

impl Spawner {
    /// Takes up what the last daemon left. To be called in a runtime, once all procs are known.
    pub async fn open(parts: SpawnParts) -> Spawner {
        let SpawnParts { host, meta, complete } = parts;
        let mut kept = meta.map(KeptEntries::new);
        let found = match &kept {
            Some(entries) => entries.read().await.unwrap_or_else(|error| {
                tracing::error!(error = chain(&error), "procs cannot be spawned, and spawned procs are not known");
                kept = None;
                Vec::new()
            }),
            // That it cannot be opened is logged already.
            None => Vec::new(),
        };
        let starts = std::thread::available_parallelism().map_or(2, |count| count.get() * 2);
        let spawner = Spawner(Arc::new(SpawnerParts {
            host,
            kept,
            complete,
            entries: Mutex::default(),
            books: RoomBooks::default(),
            starts: Arc::new(Semaphore::new(starts)),
            counting: tokio::sync::Mutex::default(),
            freed: watch::Sender::new(0),
        }));
        let known: Vec<_> = found.into_iter().map(SpawnedProc::new).collect();
        let name = |proc: &Arc<SpawnedProc>| proc.now.borrow().entry.name.clone();
        *spawner.0.entries.lock() = known.iter().map(|proc| (name(proc), Arc::clone(proc))).collect();
        for proc in known {
            let entry = proc.entry();
            if let Stage::Begun { .. } = entry.stage {
                spawner.0.books.take_again(entry.reserved);
            }
            tokio::spawn(spawner.clone().take_up(proc));
        }
        spawner
    }

    fn all(&self) -> Vec<Arc<SpawnedProc>> {
        self.0.entries.lock().values().cloned().collect()
    }

    fn one(&self, name: &ProcName) -> Result<Arc<SpawnedProc>, Refusal> {
        let proc = self.0.entries.lock().get(name).cloned().ok_or_else(|| unknown(name))?;
        let is_old = proc.now.borrow().entry.end().is_some_and(|end| end.at_ms + KEPT_MS < now_ms());
        if is_old { Err(unknown(name)) } else { Ok(proc) }
    }

    pub(crate) fn view(&self, proc: &SpawnedProc) -> SpawnedView {
        let now = proc.now.borrow().clone();
        now.view(self.0.host.proc(&now.entry.name).and_then(|proc| proc.tier()))
    }

    /// Changes an entry: on disk first, and then for those that wait.
    pub(crate) async fn change(
        &self,
        proc: &SpawnedProc,
        how: impl FnOnce(&SpawnEntry) -> Option<SpawnEntry>,
        forgotten: &[ProcName],
    ) -> Result<(), NotKept> {
        let _alone = proc.changing.lock().await;
        let Some(next) = how(&proc.now.borrow().entry) else { return Ok(()) };
        let kept = self.0.kept.as_ref().expect("an entry is there only if its store is");
        kept.change(&next, forgotten).await?;
        proc.now.send_modify(|now| now.entry = next);
        Ok(())
    }

    /// Ends that are too many or too old, so that one more can be kept.
    pub(crate) fn to_forget(&self) -> Vec<ProcName> {
        let entries = self.0.entries.lock();
        let at = |proc: &Arc<SpawnedProc>| proc.now.borrow().entry.end().map(|end| end.at_ms);
        let mut ends: Vec<(u64, &ProcName)> =
            entries.iter().filter_map(|(name, proc)| Some((at(proc)?, name))).collect();
        let (surplus, old) = ((ends.len() + 1).saturating_sub(MOST_ENDS), now_ms().saturating_sub(KEPT_MS));
        if surplus == 0 && ends.iter().all(|(at_ms, _)| *at_ms >= old) {
            return Vec::new();
        }
        ends.sort_unstable();
        let is_due = |(place, end): &(usize, &(u64, &ProcName))| *place < surplus || end.0 < old;
        let due = ends.iter().enumerate().filter(is_due).take(FORGOTTEN_AT_ONCE);
        due.map(|(_, (_, name))| (*name).clone()).collect()
    }

    /// They are kept no more.
    pub(crate) fn forget(&self, forgotten: &[ProcName]) {
        let mut entries = self.0.entries.lock();
        forgotten.iter().for_each(|name| drop(entries.remove(name)));
    }

    /// The program that is to be a parent.
    fn parent(&self, name: &ProcName) -> Result<(ParentProgram, Arc<dyn HostedProc>), Refusal> {
        let proc = self.0.host.named(name).filter(|proc| proc.tier().is_some());
        let proc = proc.ok_or_else(|| {
            let message = format!("{name} cannot have a child: it has no program that runs or sleeps (`kip ps`)");
            Refusal::new(Code::State, message)
        })?;
        let (key, started_at_ms) = (proc.key(), proc.started_at_ms());
        let above = self.0.entries.lock().get(&key).and_then(|above| above.entry().parent);
        let root = above.map_or_else(|| key.clone(), |above| above.root);
        Ok((ParentProgram { key, name: name.clone(), started_at_ms, root }, proc))
    }

    /// A new entry, and leave to start it at once if there is room.
    fn entry(&self, request: SpawnRequest) -> Result<(SpawnEntry, Option<OwnedSemaphorePermit>), Refusal> {
        if let Some(domain) = request.domain.as_deref().filter(|domain| *domain != self.0.host.machine()) {
            let message = format!(
                "there is no failure domain {domain:?}: this machine is {:?}, the only one",
                self.0.host.machine()
            );
            return Err(Refusal::new(Code::Invalid, message));
        }
        let parent = request.parent.as_ref().map(|name| self.parent(name)).transpose()?;
        let spec = parent.as_ref().map(|(_, proc)| proc.spec());
        let name = new_name(&request.command);
        let mut run = run_request(&request, name.clone(), spec.as_ref())?;
        (self.0.complete)(&mut run)?;
        let reserved = match request.class {
            ProcClass::Lc => Reserved {
                cpus: request.cpus.unwrap_or_default(),
                memory_bytes: request.memory_bytes.unwrap_or_default(),
            },
            ProcClass::Be => Reserved::default(),
        };
        if let Some(never) = RoomBooks::never(self.0.host.room(), reserved) {
            return Err(Refusal::new(Code::Exhausted, never));
        }
        let run = Box::new(run);
        let leave = Arc::clone(&self.0.starts).try_acquire_owned().ok();
        let leave = leave.filter(|_| self.0.books.take(self.0.host.room(), reserved).is_ok());
        let entry = SpawnEntry {
            name,
            command: request.command,
            class: request.class,
            parent: parent.map(|(parent, _)| parent),
            detached: request.detached,
            says_started: request.says_started,
            reserved,
            spawned_at_ms: now_ms(),
            stage: if leave.is_some() { Stage::Begun { run } } else { Stage::Queued { run } },
            started: false,
            said: None,
            takes_word: false,
            evicted: None,
        };
        Ok((entry, leave))
    }
}

#[async_trait]
impl SpawnService for Spawner {
    async fn spawn(&self, request: SpawnRequest) -> Result<SpawnedView, Refusal> {
        let Some(kept) = &self.0.kept else {
            return Err(Refusal::new(
                Code::Exhausted,
                "procs cannot be spawned: the metadata store could not be opened when the daemon began; its log says why",
            ));
        };
        let bytes = serde_json::to_vec(&request).map_or(0, |json| json.len());
        if bytes > LONGEST {
            let message =
                format!("the program's arguments and environment have {bytes} bytes, at most {LONGEST} are possible");
            return Err(Refusal::new(Code::TooLarge, message));
        }
        let live = self.all().iter().filter(|proc| proc.now.borrow().entry.end().is_none()).count();
        if live >= MOST_LIVE {
            let message =
                format!("{live} spawned procs have not ended, more are not possible: wait for some, or evict them");
            return Err(Refusal::new(Code::Exhausted, message));
        }
        let (entry, leave) = self.entry(request)?;
        if let Err(error) = kept.make(&entry).await {
            if leave.is_some() {
                self.0.books.give_back(entry.reserved);
            }
            return Err(not_kept(&error));
        }
        fault::reach("spawn-recorded");
        let proc = SpawnedProc::new(entry.clone());
        self.0.entries.lock().insert(entry.name, Arc::clone(&proc));
        let view = self.view(&proc);
        tokio::spawn(self.clone().live(proc, leave));
        Ok(view)
    }

    async fn spawned(&self) -> Result<Vec<SpawnedView>, Refusal> {
        Ok(self.all().iter().map(|proc| self.view(proc)).collect())
    }

    async fn spawned_one(&self, name: ProcName) -> Result<SpawnedView, Refusal> {
        Ok(self.view(&*self.one(&name)?))
    }

    async fn wait_spawned(&self, name: ProcName, moment: SpawnMoment) -> Result<SpawnedView, Refusal> {
        let proc = self.one(&name)?;
        // Its sender is in the proc.
        let _ = proc.now.subscribe().wait_for(|now| now.has_come(moment)).await;
        Ok(self.view(&proc))
    }

    async fn evict(&self, name: ProcName, request: EvictRequest) -> Result<SpawnedView, Refusal> {
        let proc = self.one(&name)?;
        let reason = request.reason.unwrap_or_else(|| "it was evicted".to_owned());
        check_line(&reason)?;
        let eviction = Eviction { reason, grace_ms: request.grace_ms.unwrap_or(GRACE_MS) };
        self.evict_for(&proc, eviction).await.map_err(|error| not_kept(&error))?;
        Ok(self.view(&proc))
    }
}

impl Spawner {
    /// Records that it is to end, unless it has ended or is to already.
    pub(crate) async fn evict_for(&self, proc: &SpawnedProc, eviction: Eviction) -> Result<(), NotKept> {
        let how = |entry: &SpawnEntry| {
            let is_new = entry.end().is_none() && entry.evicted.is_none();
            is_new.then(|| SpawnEntry { evicted: Some(eviction), ..entry.clone() })
        };
        self.change(proc, how, &[]).await?;
        fault::reach("spawn-evicted");
        Ok(())
    }
}

#[async_trait]
impl SpawnPrograms for Spawner {
    async fn spawn_child(&self, parent: ProcName, request: SpawnRequest) -> Result<SpawnedView, Refusal> {
        // Two at the same moment are counted one after the other.
        let _alone = self.0.counting.lock().await;
        let (program, proc) = self.parent(&parent)?;
        let most = proc.spec().spawn;
        let is_one = |child: &Arc<SpawnedProc>| {
            let entry = &child.now.borrow().entry;
            entry.end().is_none() && entry.parent.as_ref().is_some_and(|above| above.root == program.root)
        };
        let live = self.all().iter().filter(|child| is_one(child)).count();
        if live >= most as usize {
            let message = format!(
                "{live} procs that {parent} and its children have spawned have not ended, and its owner allows {most}: wait for some"
            );
            return Err(Refusal::new(Code::Exhausted, message));
        }
        self.spawn(SpawnRequest { parent: Some(parent), ..request }).await
    }

    async fn evict_child(&self, of: ProcName, name: ProcName, request: EvictRequest) -> Result<SpawnedView, Refusal> {
        let (program, _) = self.parent(&of)?;
        let above = self.one(&name)?.entry().parent;
        if above.is_none_or(|above| above.root != program.root) {
            return Err(unknown(&name));
        }
        self.evict(name, request).await
    }

    async fn say_started(&self, key: ProcName) -> Result<(), Refusal> {
        let proc = self.one(&key).map_err(not_spawned)?;
        let how = |entry: &SpawnEntry| (!entry.started).then(|| SpawnEntry { started: true, ..entry.clone() });
        self.change(&proc, how, &[]).await.map_err(|error| not_kept(&error))
    }

    async fn say_exited(&self, key: ProcName, status: i32, message: Option<String>) -> Result<(), Refusal> {
        let proc = self.one(&key).map_err(not_spawned)?;
        message.as_deref().map_or(Ok(()), check_line)?;
        let said = Some(SaidExit { status, message });
        let how = |entry: &SpawnEntry| {
            let is_new = entry.end().is_none() && entry.said != said;
            is_new.then(|| SpawnEntry { said, ..entry.clone() })
        };
        self.change(&proc, how, &[]).await.map_err(|error| not_kept(&error))
    }

    async fn wait_own_evict(&self, key: ProcName) -> Result<SpawnedView, Refusal> {
        let proc = self.one(&key).map_err(not_spawned)?;
        let how = |entry: &SpawnEntry| (!entry.takes_word).then(|| SpawnEntry { takes_word: true, ..entry.clone() });
        self.change(&proc, how, &[]).await.map_err(|error| not_kept(&error))?;
        self.wait_spawned(key, SpawnMoment::Evict).await
    }
}
