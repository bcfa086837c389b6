//! Down and up: the transitions to and from archived.
//!
//! A parked proc stays parked, and wakes as such, until its generation is in the store: the upload
//! runs beside the task, which hears of its end. What is needed locally of an archived proc, its
//! sockets' options and due timers, is kept in `archived.json`.

use super::sleep::{SECOND_TRY_AFTER, Unwoken, Why};
use super::{By, Reply, Task, TaskCommand};
use crate::policy;
use kip_archive::ids::KeyId;
use kip_archive::names::FrontRef;
use kip_checkpoint::sockets::file_paths;
use kip_criu_images::Images;
use kip_engine::blocking::blocking;
use kip_engine::fd_store::key;
use kip_engine::host::Proc;
use kip_engine::plans::{compile_plan, save_plan};
use kip_engine::suspend::is_connection;
use kip_journal::metrics::RefusalCause;
use kip_offload::ARCHIVED;
use kip_offload::{Archive, Own, Uploaded};
use kip_records::body::Body;
use kip_records::record;
use kip_records::state::Record;
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::{Code, EventKind, Refusal, SleepView};
use kip_types::chain;
use kip_types::lifecycle::Input;
use kip_types::{Generation, State, Tier, Timing};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What is known locally of an archived proc.
#[derive(Debug, Serialize, Deserialize)]
pub struct ArchivedNote {
    /// What it wakes from.
    pub front: FrontRef,
    /// The keys without which it cannot be woken; none in what an older daemon wrote, and then it
    /// may need any.
    #[serde(default)]
    pub keys: BTreeSet<KeyId>,
    /// Its sockets and due timers.
    pub body: Body,
}

/// A store that does not answer keeps a proc from waking no longer than this.
const RELEASED_WITHIN: Duration = Duration::from_secs(5);
/// And from being stopped.
const TAKEN_WITHIN: Duration = Duration::from_secs(15);

fn report_left(proc: &Proc, failed: &[String]) {
    for error in failed {
        tracing::warn!(proc = %proc.name, error, "what is not needed any more stays in the store");
    }
}

/// After a fetch that failed sockets and timers do not wake it sooner.
pub(super) const FETCH_AGAIN: Duration = Duration::from_secs(5);
/// After an upload that failed the next one by itself is not sooner.
const RETRY: Duration = Duration::from_secs(60);

/// Its generation does not come.
struct Unfetched {
    message: String,
    /// For good: see [`kip_offload::FetchError::is_damage`]. Or it came and may not be woken.
    is_final: bool,
}

impl From<String> for Unfetched {
    fn from(message: String) -> Unfetched {
        Unfetched { message, is_final: false }
    }
}

/// Its generation does not go to the store.
#[derive(Debug)]
pub enum NotStored {
    /// Not now.
    Failed(String),
    /// It could not be woken from there: see [`policy::check_return`].
    Stays(String),
}

impl From<String> for NotStored {
    fn from(message: String) -> NotStored {
        NotStored::Failed(message)
    }
}

impl NotStored {
    fn of(e: &policy::NoReturn) -> NotStored {
        let message = format!("it could not be woken from the store: {}", chain(e));
        if e.is_final() { NotStored::Stays(message) } else { NotStored::Failed(message) }
    }
}

/// An upload under way.
#[derive(Debug)]
pub(super) struct Storing {
    generation: Generation,
    since: Instant,
    replies: Vec<Reply<bool>>,
    /// Told to the upload when it wakes.
    woke: Arc<AtomicBool>,
    /// Why, if not because of its own times or a command.
    cause: Option<String>,
}

impl Task {
    pub(super) async fn archive_on_request(&mut self, by: By, reply: Reply<bool>) {
        let Some(archive) = self.proc.shared.archive.clone() else {
            let message =
                format!("{} cannot be archived: there is no store; `kip up --store URL` gives one", self.proc.name);
            let _ = reply.send(Err(Refusal::new(Code::State, message)));
            return;
        };
        if matches!(self.record.state, State::Archived { .. }) {
            let _ = reply.send(Ok(true));
            return;
        }
        if let Err(refusal) = self.park_on_request(by).await {
            let _ = reply.send(Err(refusal));
            return;
        }
        let State::Parked { generation } = self.record.state else { unreachable!("it was just parked") };
        match &mut self.storing {
            Some(storing) if storing.generation == generation => storing.replies.push(reply),
            _ => self.begin_storing(archive, generation, vec![reply], None),
        }
    }

    /// When it is archived because it has been parked for that long.
    pub(super) fn archives_at(&self) -> Option<Instant> {
        let timing = &self.proc.spec().timing;
        let archive = self.proc.shared.archive.as_ref();
        let may = matches!(self.record.state, State::Parked { .. })
            && self.record.stays_parked.is_none()
            && archive.is_some_and(|archive| archives_by_itself(timing, archive.store.is_directory()))
            && self.storing.is_none();
        let parked = self.phase.parked().filter(|_| may)?;
        parked.since.checked_add(Duration::from_millis(timing.archive_after_ms))
    }

    pub(super) fn archive_by_itself(&mut self) {
        let (State::Parked { generation }, Some(archive)) = (&self.record.state, self.proc.shared.archive.clone())
        else {
            return;
        };
        let generation = *generation;
        if self.proc.spec().timing.archive_by_default && self.has_connections(generation) {
            let wait = RETRY.saturating_sub(Duration::from_millis(self.proc.spec().timing.archive_after_ms));
            self.phase.parked_mut().since = Instant::now() + wait;
            return;
        }
        self.begin_storing(archive, generation, Vec::new(), None);
    }

    /// Whether a peer is connected to the proc, or the proc to a peer.
    fn has_connections(&self, generation: Generation) -> bool {
        let Ok(manifest) = kip_snapshot::open::<Body>(&kip_snapshot::path_of(&self.proc.dir, generation)) else {
            return false;
        };
        let held = |inode: u32| self.proc.fd_store.get(&format!("{}{inode}", key::SOCKET));
        manifest.body.sockets.iter().filter_map(|socket| held(socket.inode)).any(|fd| is_connection(&fd))
    }

    /// Declines if it is not parked, is on its way already, or sleeps only when told to.
    pub(super) fn archive_for_room(&mut self, cause: String, reply: Reply<bool>) {
        let can = self.storing.is_none() && self.record.stays_parked.is_none();
        let may = can && !self.proc.spec().timing.stays_awake();
        match (&self.record.state, self.proc.shared.archive.clone()) {
            (State::Parked { generation }, Some(archive)) if may => {
                self.proc.shared.events.emit(
                    Some(&self.proc.name),
                    EventKind::Pressure,
                    format!("archived by {cause}"),
                );
                self.begin_storing(archive, *generation, vec![reply], Some(cause));
            }
            _ => {
                let message = format!("{} is not to be archived now", self.proc.name);
                let _ = reply.send(Err(Refusal::new(Code::State, message)));
            }
        }
    }

    fn begin_storing(
        &mut self,
        archive: Arc<Archive>,
        generation: Generation,
        replies: Vec<Reply<bool>>,
        cause: Option<String>,
    ) {
        let woke = Arc::new(AtomicBool::new(false));
        let storing = Storing { generation, since: Instant::now(), replies, woke: Arc::clone(&woke), cause };
        for reply in self.storing.replace(storing).into_iter().flat_map(|overtaken| overtaken.replies) {
            let _ = reply.send(Ok(false));
        }
        let proc = Arc::clone(&self.proc);
        let own = self.own.upgrade();
        tokio::spawn(async move {
            let result = blocking(move || -> Result<_, NotStored> {
                let directory = kip_snapshot::path_of(&proc.dir, generation);
                policy::check_return(&proc, &directory).map_err(|e| NotStored::of(&e))?;
                let place = proc.files.place().map_err(|e| chain(&e))?;
                let images = Images::read(&directory).map_err(|e| chain(&e))?;
                let first = file_paths(&images).map_err(|e| chain(&e))?.into_iter().map(Into::into).collect();
                let files = Own { dir: proc.dir.clone(), place, first_id: proc.first_id(), first, woke };
                let spec = serde_json::to_value(&*proc.spec()).expect("a spec is plain data");
                let id = || archive.id_of(&proc.dir).map_err(|e| chain(&e));
                let store = |id| archive.store(id, &proc.name, &directory, spec.clone(), &files);
                match store(id()?) {
                    // No generation can follow one whose key is destroyed: storing begins anew,
                    // from what is here.
                    Err(e) if e.is_of_destroyed_key() => {
                        Archive::forget(&proc.dir).map_err(|e| format!("{}: {e}", proc.dir.display()))?;
                        Ok(store(id()?).map_err(|e| chain(&e))?)
                    }
                    stored => Ok(stored.map_err(|e| chain(&e))?),
                }
            })
            .await;
            if let Some(own) = own {
                let _ = own.send(TaskCommand::Stored { generation, result }).await;
            }
        });
    }

    /// It is about to run: its files will not be those of its generation any more.
    pub(super) fn overtake_storing(&self) {
        if let Some(storing) = &self.storing {
            storing.woke.store(true, Ordering::SeqCst);
        }
    }

    /// The upload has ended, one way or the other. If it has woken meanwhile, it is not archived
    /// and nothing is lost.
    pub(super) async fn on_stored(&mut self, generation: Generation, result: Result<Uploaded, NotStored>) {
        let Some(storing) = self.storing.take_if(|storing| storing.generation == generation) else { return };
        let answer = match result {
            // It was put to sleep, and has woken since: the view that is answered with says so.
            _ if self.record.state != (State::Parked { generation }) => Ok(false),
            Err(NotStored::Failed(message)) => {
                let wait = RETRY.saturating_sub(Duration::from_millis(self.proc.spec().timing.archive_after_ms));
                self.phase.parked_mut().since = Instant::now() + wait;
                Err(self.stays_parked(RefusalCause::Store, Code::Failed, &message))
            }
            // Nor the next time: it is the same generation.
            Err(NotStored::Stays(message)) => {
                let refusal = self.stays_parked(RefusalCause::Snapshot, Code::CannotSleep, &message);
                let refused_at_ms = Some(now_ms());
                self.keep(Record { stays_parked: Some(message), refused_at_ms, ..self.record.clone() });
                Err(refusal)
            }
            Ok(uploaded) => {
                fault::reach("archive-stored");
                self.become_archived(generation, uploaded, storing.since, storing.cause).await.map(|()| false)
            }
        };
        for reply in storing.replies {
            let _ = reply.send(answer.clone());
        }
    }

    fn stays_parked(&self, cause: RefusalCause, code: Code, message: &str) -> Refusal {
        let message = format!("{} stays parked: {message}", self.proc.name);
        self.proc.shared.metrics.refused(Tier::Archived, cause);
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refused, message.clone());
        Refusal::new(code, message)
    }

    async fn become_archived(
        &mut self,
        generation: Generation,
        uploaded: Uploaded,
        since: Instant,
        cause: Option<String>,
    ) -> Result<(), Refusal> {
        let proc = Arc::clone(&self.proc);
        let (front, mut keys) = (uploaded.front, uploaded.keys.clone());
        let stays = |message: String| Refusal::new(Code::Failed, format!("{} stays parked: {message}", self.proc.name));
        // Held until all of it is done, so that `kip key destroy` knows which keys this proc needs.
        let archive = self.proc.shared.archive.clone().expect("what was stored was stored somewhere");
        let held = archive.hold_keys().await;
        held.still_open(&uploaded.ring).map_err(|e| stays(chain(&e)))?;
        // Its head is sealed by that, here and when it lets go.
        keys.extend(archive.keys().current());
        let kept = blocking(move || {
            let manifest = kip_snapshot::open::<Body>(&kip_snapshot::path_of(&proc.dir, generation));
            let archived = manifest.map(|m| ArchivedNote { front, keys, body: m.body }).map_err(|e| chain(&e))?;
            let text = serde_json::to_vec(&archived).expect("it is plain data");
            record::replace(&proc.dir.join(ARCHIVED), &text).map_err(|e| chain(&e))
        })
        .await;
        kept.map_err(stays)?;
        fault::reach("archive-kept");
        // With the state, so that no client sees an archived proc whose last sleep ended parked.
        let parked = self.record.last_sleep.clone();
        self.record.last_sleep = parked.clone().map(|sleep| {
            let total_us = sleep.total_us + since.elapsed().as_micros() as u64;
            SleepView { to: Tier::Archived, total_us, cause: cause.or(sleep.cause.clone()), ..sleep }
        });
        if let Err(refusal) = self.advance(Input::Archived, record::Durability::Fsync) {
            self.record.last_sleep = parked;
            return Err(refusal);
        }
        self.proc.meter.level(uploaded.held_bytes);
        fault::reach("archive-recorded");
        // With what it takes from now on: a daemon that comes after this one counts by that.
        self.keep(self.record.clone());
        self.proc.shared.metrics.slept(Tier::Archived, since.elapsed().as_micros() as u64);
        let (proc, uploads) = (Arc::clone(&self.proc), Arc::clone(&archive));
        let swept = blocking(move || {
            if let Err(e) = kip_snapshot::leave_spare(&proc.dir, generation) {
                tracing::debug!(proc = %proc.name, error = chain(&e), "no file of the archived generation is kept as a spare");
            }
            kip_offload::forget_page_files(&proc.dir);
            if let Err(e) = kip_snapshot::sweep(&proc.dir, None) {
                tracing::warn!(proc = %proc.name, error = chain(&e), "an archived generation is left on disk");
            }
            uploads.forget_gone();
        });
        if let ((), Err(error)) = tokio::join!(swept, self.let_go(front)) {
            tracing::warn!(proc = %self.proc.name, error, "an archived proc can be woken by this data directory only");
        }
        drop(held);
        fault::reach("archive-released");
        let detail = format!("{} bytes in packs, {} in its front", uploaded.pack_bytes, uploaded.front_bytes);
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Archived, detail);
        Ok(())
    }

    /// Whether the store answers, and has the head of this proc.
    pub(super) async fn is_in_store(&mut self) -> bool {
        let Some(archive) = &self.proc.shared.archive else { return false };
        let Ok(id) = archive.id_of(&self.proc.dir) else { return false };
        archive.head(id).await.is_ok_and(|head| head.is_some())
    }

    /// Says in the store that it runs nowhere. If that does not succeed it is still this
    /// directory's there, and wakes here only.
    async fn let_go(&mut self, front: FrontRef) -> Result<(), String> {
        let Some(archive) = &self.proc.shared.archive else { return Ok(()) };
        let id = archive.id_of(&self.proc.dir).map_err(|e| chain(&e))?;
        match tokio::time::timeout(RELEASED_WITHIN, archive.release(id, front)).await {
            Ok(released) => released.map_err(|e| chain(&e)),
            Err(_) => Err("the store does not answer".to_owned()),
        }
    }

    /// Takes the proc's head back: the proc will not wake from the store any more, and no other
    /// data directory may wake it either.
    pub(super) async fn take_back(&mut self) -> Result<(), Refusal> {
        let refused = |message: String| {
            let message = format!("{} cannot be stopped: {message}; it stays archived", self.proc.name);
            Refusal::new(Code::Failed, message)
        };
        let Some(archive) = &self.proc.shared.archive else {
            return Err(refused("there is no store: `kip up --store URL`".to_owned()));
        };
        let front = archived(&self.proc).map_err(refused)?.front;
        let id = archive.id_of(&self.proc.dir).map_err(|e| refused(chain(&e)))?;
        match tokio::time::timeout(TAKEN_WITHIN, archive.adopt(id, front)).await {
            Ok(adopted) => adopted.map(drop).map_err(|e| refused(chain(&e))),
            Err(_) => Err(refused("the store does not answer".to_owned())),
        }
    }

    /// It begins anew: what it was is nothing to wake from.
    pub(super) fn forget_archive(&self) -> Result<(), Refusal> {
        let failed = |e| Refusal::new(Code::Failed, format!("{} cannot start: {ARCHIVED}: {e}", self.proc.name));
        Archive::forget(&self.proc.dir).map_err(failed)?;
        if let Some(archive) = self.proc.shared.archive.clone() {
            let proc = Arc::clone(&self.proc);
            tokio::spawn(async move { report_left(&proc, &archive.retire(&proc.dir, false).await) });
        }
        Ok(())
    }

    /// Takes all of it out of the store; what the store does not let go of is told and left there.
    pub(super) async fn retire_all(&mut self) {
        if let Some(archive) = &self.proc.shared.archive {
            report_left(&self.proc, &archive.retire(&self.proc.dir, true).await);
        }
    }

    /// What the record says: its sockets are watched, its timers known.
    pub(super) fn resume_archived(&mut self) {
        if !matches!(self.record.state, State::Archived { .. }) || !self.record.established {
            return;
        }
        match archived(&self.proc) {
            Ok(archived) => self.begin_sleeping(&archived.body),
            // It is woken by request only, if at all.
            Err(error) => {
                tracing::error!(proc = %self.proc.name, error, "an archived proc's sockets and timers are not known")
            }
        }
    }

    /// Makes a parked proc of it: its generation comes back, and no other data directory may wake
    /// it from then on. A failure is told, and the proc's sockets and timers have to wait a moment.
    pub(super) async fn fetch(&mut self) -> Result<(), Unwoken> {
        if !self.record.established {
            let message = format!("{0} is being taken over from the store: `kip wake {0}` again", self.proc.name);
            return Err(Refusal::new(Code::State, message).into());
        }
        if let Err(Unfetched { message, is_final }) = self.try_fetch().await {
            self.notice_elsewhere().await?;
            self.listen_later();
            let name = &self.proc.name;
            let mut message = format!("{name} cannot be woken: {message}; it stays archived");
            if is_final {
                message
                    .push_str(&format!(", `kip stop {name}` and `kip start {name}` start it cold on its newest files"));
            }
            self.count_failed_wake(Tier::Archived, &message);
            self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refused, message.clone());
            let why = if is_final { Why::Damage } else { Why::Store };
            return Err(Unwoken { refusal: Refusal::new(Code::Failed, message), why });
        }
        let parked = self.phase.parked_mut();
        (parked.listens_again, parked.fetched) = (None, true);
        Ok(())
    }

    /// The same for traffic and timers, which cannot be told of a failure. What is damaged in the
    /// store is read again, and if it still is damaged the proc falls back; for a store that does
    /// not give it the proc only waits. True if the proc is parked now.
    pub(super) async fn fetch_or_fall_back(&mut self) -> bool {
        match self.fetch().await {
            Ok(()) => return true,
            Err(Unwoken { why: Why::Damage, .. }) => tokio::time::sleep(SECOND_TRY_AFTER).await,
            Err(_) => return false,
        }
        match self.fetch().await {
            Ok(()) => true,
            Err(Unwoken { why: Why::Damage, refusal }) => {
                self.fall_back(&refusal.message).await;
                false
            }
            Err(_) => false,
        }
    }

    /// A wake has failed: if it was of a generation that came from the store, and it is damaged
    /// here, it is archived again, to be fetched once more. The copy was never synced, so that it
    /// may be lost with the machine.
    pub(super) async fn drop_damaged_copy(&mut self) -> bool {
        let State::Parked { generation } = self.record.state else { return false };
        let Some(archive) = self.proc.shared.archive.clone() else { return false };
        if !archived(&self.proc).is_ok_and(|a| a.front.generation == generation) {
            return false;
        }
        let proc = Arc::clone(&self.proc);
        let damaged = blocking(move || {
            let path = kip_snapshot::path_of(&proc.dir, generation);
            let manifest = kip_snapshot::open::<Body>(&path);
            let sound = manifest.and_then(|manifest| kip_snapshot::verify(&path, &manifest.parts));
            let is_newer = matches!(sound, Err(kip_snapshot::SnapshotError::Newer { .. }));
            let is_sound = sound.is_ok() && archive.can_be_filled(&path);
            !is_sound && !is_newer && kip_snapshot::sweep(&proc.dir, None).is_ok()
        })
        .await;
        if !damaged || self.advance(Input::Archived, record::Durability::Fsync).is_err() {
            return false;
        }
        let message = "what came from the store is damaged on the local disk: it is fetched again";
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refetch, message.to_owned());
        true
    }

    async fn try_fetch(&mut self) -> Result<(), Unfetched> {
        let no_store = || "there is no store: `kip up --store URL`".to_owned();
        let archive = self.proc.shared.archive.clone().ok_or_else(no_store)?;
        let known = archived(&self.proc)?;
        let id = archive.id_of(&self.proc.dir).map_err(|e| chain(&e))?;
        let (proc, adopting) = (Arc::clone(&self.proc), Arc::clone(&archive));
        let fetch = blocking(move || {
            let generation = known.front.generation;
            let check = |images: &Path| {
                let checked = policy::check(&proc, images, &known.body);
                let refused = |e| Unfetched { message: chain(&e), is_final: true };
                checked.map_err(refused).map(|()| compile_plan(&proc, generation, &known.body))
            };
            let fetched = archive.fetch(id, known.front, &proc.dir, check);
            let (_, checked) = fetched.map_err(|e| Unfetched { message: chain(&e), is_final: e.is_damage() })?;
            // Nothing of it is restored, and the plan is not there, before the check has let it
            // through.
            let plan = checked?;
            if let Some(plan) = plan {
                save_plan(&proc, generation, &plan);
            }
            Ok::<_, Unfetched>(())
        });
        // The proc runs only if it is known that no other data directory may wake it. And only of a
        // store that answers is it known that something is missing there.
        let (fetched, adopted) = tokio::join!(fetch, adopting.adopt(id, known.front));
        let is_ours = adopted.is_ok();
        if let Err(unfetched) = adopted.map_err(|e| Unfetched::from(chain(&e))).and(fetched) {
            // The next try makes it anew, and cannot where this one's is; it may also be in the way
            // of others, on a disk that has no room.
            let proc = Arc::clone(&self.proc);
            let _ = blocking(move || kip_snapshot::sweep(&proc.dir, None)).await;
            // Another machine may be able to wake it.
            if is_ours && let Err(error) = self.let_go(known.front).await {
                tracing::debug!(proc = %self.proc.name, error, "the store still records this data directory as the owner");
            }
            return Err(unfetched);
        }
        fault::reach("fetch-done");
        self.advance(Input::Fetched, record::Durability::Rename).map_err(|refusal| refusal.message)?;
        fault::reach("fetch-recorded");
        Ok(())
    }
}

/// Whether a parked proc is archived without being told to. Where its owner has not said when, not
/// to a directory of this machine.
fn archives_by_itself(timing: &Timing, store_is_directory: bool) -> bool {
    !(timing.stays_awake() || timing.archive_by_default && store_is_directory)
}

/// What is known locally of an archived proc.
pub fn archived(proc: &Proc) -> Result<ArchivedNote, String> {
    let path = proc.dir.join(ARCHIVED);
    let text = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    // promise archive: where no time was set, after 10 minutes, but not to a directory, and not
    //   while a connection is open
    // held by: this,
    //   `kip_supervisor::task::archive::tests::who_listens_has_no_connection_and_who_was_connected_to_has_one`
    #[test]
    fn by_itself_it_goes_to_a_store_elsewhere_or_when_somebody_has_said_when() {
        let (unsaid, said) = (Timing::default(), Timing { archive_by_default: false, ..Timing::default() });
        assert_eq!((unsaid.archive_after_ms, unsaid.archive_by_default), (600_000, true));
        let by = |timing: &Timing| [false, true].map(|is_directory| archives_by_itself(timing, is_directory));
        assert_eq!((by(&unsaid), by(&said)), ([true, false], [true, true]));
        assert_eq!(by(&Timing { never: true, ..said }), [false, false]);
        // Records of older Kips, and requests with some times only.
        let of = |text: &str| {
            let mut timing: Timing = serde_json::from_str(text).unwrap();
            timing.resolve_archive_default();
            timing.archive_by_default
        };
        assert!(!of(r#"{"archive_after_ms": 300000}"#) && of(r#"{"archive_after_ms": 86400000}"#));
        assert!(of(r#"{"idle_ms": 1}"#) && !of(r#"{"archive_after_ms": 600000, "archive_by_default": false}"#));
    }

    #[test]
    fn who_listens_has_no_connection_and_who_was_connected_to_has_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        datagrams.connect(datagrams.local_addr().unwrap()).unwrap();
        assert!(!is_connection(&listener.into()) && !is_connection(&datagrams.into()));
        assert!(is_connection(&client.into()) && is_connection(&accepted.into()));
    }
}
