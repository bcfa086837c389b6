//! Falling back: its newest generation is damaged for good, here or in the store. Nothing of it is
//! deleted.
//!
//! Where its spec asks for it, the newest older generation in the store that is whole comes back,
//! memory and files of one freeze and nothing of another, as the generation after the newest. Its
//! connections of then are gone, as after a reboot. Its newest files are set aside: as [`ASIDE`]
//! until it runs, and are put back if it does not; then as `aside-gen-N` until it is removed. In
//! every other case, and without such a spec, the proc starts cold on its newest files.
//!
//! A crash in the middle leaves a proc that is stopped, with its newest files once it is started;
//! or parked, as what it falls back to.

use super::Task;
use super::archive::ArchivedNote;
use super::sleep::SECOND_TRY_AFTER;
use crate::policy::{self, NotAllowed};
use kip_archive::ids::ProcId;
use kip_archive::names::FrontRef;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::host::Proc;
use kip_engine::plans::take_custody;
use kip_engine::renew;
use kip_engine::stop::NetworkFate;
use kip_offload::ARCHIVED;
use kip_offload::Archive;
use kip_records::record;
use kip_records::state::Record;
use kip_sys::fault;
use kip_types::api::{Code, EventKind, PortView, Refusal};
use kip_types::chain;
use kip_types::lifecycle::Input;
use kip_types::{Fallback, Generation};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where its newest files are while it is not known whether an older generation comes back.
pub const ASIDE: &str = "aside";
/// In it, once all of them are: what is there after that is the older generation's.
const MOVED: &str = ".moved";
/// All that a proc's own files are, in its directory or on its limited disk.
const FILES: [&str; 4] = ["upper", "work", "layer", "pins"];

/// Between tries to bring what was whole just before.
const FETCH_AGAIN: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(15)];

/// An older generation that comes back.
struct Older {
    id: ProcId,
    front: FrontRef,
    /// The number that it comes back as.
    number: Generation,
}

/// None could be woken.
enum NoOlder {
    /// Or it is not known: the store does not answer.
    Unknown(String),
    None(String),
}

impl Task {
    /// Its newest generation is of no use any more.
    pub(super) async fn fall_back(&mut self, why: &str) {
        let mut why = why.to_owned();
        if self.proc.spec().timing.fallback == Fallback::Previous {
            match self.wake_older(&why).await {
                Ok(()) => return,
                Err(NoOlder::Unknown(message)) if self.sleeps() => {
                    let message = format!("{why}; whether an older generation is whole is not known: {message}");
                    self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refused, message);
                    return self.listen_later();
                }
                Err(NoOlder::Unknown(message) | NoOlder::None(message)) => {
                    why = format!("{why}; no older generation can be woken: {message}");
                }
            }
        }
        if let Err(refusal) = self.start_cold(&why).await {
            tracing::error!(proc = %self.proc.name, error = refusal.message, "a proc whose snapshot is damaged does not start");
        }
    }

    async fn start_cold(&mut self, why: &str) -> Result<(), Refusal> {
        let message = format!("{why}; starting it cold on its newest files");
        self.proc.shared.metrics.started_cold();
        self.end_for(&message, EventKind::ColdStart).await?;
        Archive::set_aside(&self.proc.dir)
            .map_err(|e| self.failed("what it has in the store cannot be set aside", &e))?;
        self.begin(false, false).await?;
        self.keep(Record { fell_back: Some(message), ..self.record.clone() });
        Ok(())
    }

    /// Whatever it is, it is stopped; its generation is set aside.
    async fn end_for(&mut self, message: &str, kind: EventKind) -> Result<(), Refusal> {
        tracing::warn!(proc = %self.proc.name, message, "its snapshot cannot be used");
        self.proc.shared.events.emit(Some(&self.proc.name), kind, message);
        let generation = self.record.generation();
        if kip_snapshot::path_of(&self.proc.dir, generation).exists()
            && let Err(e) = kip_snapshot::set_aside(&self.proc.dir, generation)
        {
            tracing::warn!(proc = %self.proc.name, error = chain(&e), "the snapshot cannot be set aside");
        }
        if let Some(archive) = &self.proc.shared.archive {
            archive.distrust(&self.proc.dir);
        }
        self.stop(Duration::ZERO, NetworkFate::Removed).await
    }

    async fn wake_older(&mut self, why: &str) -> Result<(), NoOlder> {
        let older = self.newest_older().await?;
        let message =
            format!("{why}; waking it from generation {}, the newest older one that is whole", older.front.generation);
        let (number, ports) = (older.number, self.record.ports.clone());
        self.end_for(&message, EventKind::FellBack).await.map_err(|refusal| NoOlder::Unknown(refusal.message))?;
        let proc = Arc::clone(&self.proc);
        let fetched = blocking(move || {
            // All of it could be read just now: a store that does not answer for a moment is not to
            // cost it.
            let mut pauses = FETCH_AGAIN.iter();
            loop {
                match (fetch_older(&proc, &older, &ports), pauses.next()) {
                    (Ok(fetched), _) => return Ok(fetched),
                    (Err(NotFetched::Failed(_)), Some(pause)) => {
                        let _ = kip_snapshot::sweep(&proc.dir, None);
                        std::thread::sleep(*pause);
                    }
                    (Err(NotFetched::Failed(message) | NotFetched::Refused(message)), _) => return Err(message),
                }
            }
        })
        .await;
        let woken = match fetched {
            Ok((archived, ports)) => {
                fault::reach("older-brought");
                let next = self.record.after(Input::FellBack { generation: number });
                let next = next.map_err(|e| NoOlder::None(e.to_string()))?;
                let next = Record { ports, fell_back: Some(message), ..next };
                let recorded = self.write(next, record::Durability::Fsync).map_err(|refusal| refusal.message);
                fault::reach("older-recorded");
                take_custody(&self.proc, &archived.body);
                self.proc.shared.follow_output(&self.proc);
                match recorded {
                    Ok(()) => {
                        let mut woken =
                            self.wake(WakeCause::Request(WakeCommand::Fallback), Instant::now(), false).await;
                        if woken.is_err() {
                            tokio::time::sleep(SECOND_TRY_AFTER).await;
                            woken = self.wake(WakeCause::Request(WakeCommand::Fallback), Instant::now(), false).await;
                        }
                        woken.map_err(|e| e.refusal.message)
                    }
                    Err(message) => Err(message),
                }
            }
            Err(message) => Err(message),
        };
        match woken {
            Ok(()) => {
                self.keep_newest_files(number).await;
                Ok(())
            }
            // Its files are put back by what follows; what came of it is in the store.
            Err(message) => {
                let _ = kip_snapshot::sweep(&self.proc.dir, None);
                Err(NoOlder::None(message))
            }
        }
    }

    /// The newest older generation that is whole, every byte of it.
    async fn newest_older(&mut self) -> Result<Older, NoOlder> {
        let none = || NoOlder::None("the store has no older generation".to_owned());
        let archive = self.proc.shared.archive.clone().ok_or_else(none)?;
        if !self.proc.dir.join(kip_offload::ID).exists() {
            return Err(none());
        }
        let unknown = |e: &dyn std::error::Error| NoOlder::Unknown(chain(e));
        let id = archive.id_of(&self.proc.dir).map_err(|e| unknown(&e))?;
        let newest = self.record.generation();
        let (head, _) = archive.head(id).await.map_err(|e| unknown(&e))?.ok_or_else(none)?;
        let last = newest.max(head.generation());
        for front in head.fronts().filter(|front| front.generation < newest) {
            if archive.is_whole(id, front).await.map_err(|e| unknown(&e))? {
                return Ok(Older { id, front, number: last.next() });
            }
        }
        Err(none())
    }

    /// What it fell back to runs, or will: its newest files are kept, out of the way.
    pub(super) async fn keep_newest_files(&mut self, generation: Generation) {
        if !self.proc.dir.join(ASIDE).exists() {
            return;
        }
        let proc = Arc::clone(&self.proc);
        let rename = move |place: &Path| {
            let to = place.join(format!("{ASIDE}-gen-{generation}"));
            match fs::rename(place.join(ASIDE), to) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
                _ => Ok(()),
            }
        };
        let renamed = blocking(move || each_place(&proc, Order::Back, rename)).await;
        if let Err(error) = renamed {
            tracing::warn!(proc = %self.proc.name, error, "its newest files are not where they are to be kept");
        }
    }

    /// Before it starts: files of an older generation that did not come back go, its newest are
    /// there again.
    pub(super) async fn put_files_back(&mut self) -> Result<(), Refusal> {
        if !self.proc.dir.join(ASIDE).exists() {
            return Ok(());
        }
        let proc = Arc::clone(&self.proc);
        let back = blocking(move || each_place(&proc, Order::Back, put_back)).await;
        back.map_err(|e| self.failed("its newest files cannot be put back", &io::Error::other(e)))
    }
}

impl Task {
    fn failed(&self, what: &str, e: &io::Error) -> Refusal {
        Refusal::new(Code::Failed, format!("{} cannot start: {what}: {e}", self.proc.name))
    }
}

/// Why an older generation was not fetched.
enum NotFetched {
    /// It may, a moment later.
    Failed(String),
    /// It never will: it asks for more than its proc may have.
    Refused(String),
}

impl NotFetched {
    fn of(e: NotAllowed) -> Self {
        match &e {
            NotAllowed::Refused(_) | NotAllowed::Body => NotFetched::Refused(chain(&e)),
            NotAllowed::Facts(_) | NotAllowed::Snapshot(_) => NotFetched::Failed(chain(&e)),
        }
    }
}

impl From<String> for NotFetched {
    fn from(message: String) -> Self {
        NotFetched::Failed(message)
    }
}

/// Fetches an older generation, all of it, and its files; makes what it holds.
fn fetch_older(
    proc: &Arc<Proc>,
    older: &Older,
    ports: &[PortView],
) -> Result<(ArchivedNote, Vec<PortView>), NotFetched> {
    let archive = proc.shared.archive.clone().ok_or_else(|| "no store is configured".to_owned())?;
    let Older { id, front, number } = *older;
    let manifest = archive.manifest_of(id, front).map_err(|e| chain(&e))?;
    let body = serde_json::from_value(manifest.body).map_err(|e| format!("its manifest: {e}"))?;
    let archived = ArchivedNote { front, keys: BTreeSet::new(), body };
    // By this it is known where pages are that come with its front.
    let text = serde_json::to_vec(&archived).expect("it is plain data");
    record::replace(&proc.dir.join(ARCHIVED), &text).map_err(|e| chain(&e))?;
    let check = |images: &Path| policy::check(proc, images, &archived.body).map_err(NotFetched::of);
    let (images, checked) = archive.fetch_as(id, front, number, &proc.dir, check).map_err(|e| chain(&e))?;
    checked?;
    archive.fetch_pages(&images, None).map_err(|e| chain(&e))?;
    let first_id = archived.body.home.as_ref().map_or(0, |home| home.first_id);
    each_place(proc, Order::Aside, set_aside)?;
    fault::reach("older-aside");
    let place = proc.files.place().map_err(|e| chain(&e))?;
    archive.restore_files(id, front, &proc.dir, &place, (first_id, proc.first_id())).map_err(|e| chain(&e))?;
    let synced = fs::File::open(&proc.dir).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
    synced.map_err(|e| format!("{}: {e}", proc.dir.display()))?;
    let ports = renew::renew(proc, &archived.body, ports).map_err(|e| chain(&e))?;
    Ok((archived, ports))
}

/// Which comes first: as long as its directory has an [`ASIDE`] it is looked at, whatever was
/// interrupted elsewhere.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Its directory, then its limited disk.
    Aside,
    /// The other way round.
    Back,
}

/// Where files of its own are: its directory, and its limited disk if it has one.
fn each_place(proc: &Proc, order: Order, work: impl Fn(&Path) -> io::Result<()>) -> Result<(), String> {
    let place = proc.files.place().map_err(|e| chain(&e))?;
    in_order(&proc.dir, place.path(), order, work)
}

fn in_order(dir: &Path, disk: &Path, order: Order, work: impl Fn(&Path) -> io::Result<()>) -> Result<(), String> {
    let mut places = vec![dir];
    places.extend((disk != dir).then_some(disk));
    if order == Order::Back {
        places.reverse();
    }
    places.into_iter().try_for_each(|place| work(place).map_err(|e| format!("{}: {e}", place.display())))
}

/// What is there is moved out of the way, all of it.
fn set_aside(place: &Path) -> io::Result<()> {
    put_back(place)?;
    let aside = place.join(ASIDE);
    fs::create_dir(&aside)?;
    for name in FILES.iter().filter(|name| place.join(name).exists()) {
        fs::rename(place.join(name), aside.join(name))?;
    }
    fs::File::create(aside.join(MOVED))?.sync_all()?;
    fs::File::open(place)?.sync_all()
}

/// The opposite, from wherever that was interrupted.
fn put_back(place: &Path) -> io::Result<()> {
    let aside = place.join(ASIDE);
    if !aside.exists() {
        return Ok(());
    }
    let gone = |name: &str| match fs::remove_dir_all(place.join(name)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    if aside.join(MOVED).exists() {
        FILES.iter().filter(|name| !aside.join(name).exists()).try_for_each(|name| gone(name))?;
        // From here on what is not in it is back already.
        fs::remove_file(aside.join(MOVED))?;
        fs::File::open(&aside)?.sync_all()?;
    }
    for name in FILES.iter().filter(|name| aside.join(name).exists()) {
        gone(name)?;
        fs::rename(aside.join(name), place.join(name))?;
    }
    fs::remove_dir(aside)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever is interrupted between the two places, its directory says that there is something
    /// to do.
    #[test]
    fn files_on_a_limited_disk_are_not_forgotten_half_way() {
        let dir = tempfile::tempdir().unwrap();
        let (own, disk) = (dir.path().to_owned(), dir.path().join("disk"));
        fs::create_dir_all(disk.join("upper")).unwrap();
        fs::create_dir_all(own.join("pins")).unwrap();
        fs::write(disk.join("upper/file"), "newest").unwrap();
        in_order(&own, &disk, Order::Aside, set_aside).unwrap();
        fs::create_dir(disk.join("upper")).unwrap();
        fs::write(disk.join("upper/file"), "older").unwrap();
        // The second of both fails, the first time.
        let done = std::cell::Cell::new(0);
        let broken = in_order(&own, &disk, Order::Back, |place| {
            done.set(done.get() + 1);
            if done.get() == 2 { Err(io::ErrorKind::Other.into()) } else { put_back(place) }
        });
        assert!(broken.is_err() && own.join(ASIDE).exists());
        in_order(&own, &disk, Order::Back, put_back).unwrap();
        assert_eq!(fs::read(disk.join("upper/file")).unwrap(), b"newest");
        assert!(own.join("pins").exists() && !own.join(ASIDE).exists() && !disk.join(ASIDE).exists());
    }

    #[test]
    fn the_newest_files_are_put_back_from_wherever_it_was_interrupted() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path();
        let make = |name: &str, text: &str| {
            fs::create_dir_all(place.join(name)).unwrap();
            fs::write(place.join(name).join("file"), text).unwrap();
        };
        let is_as_before = || {
            assert_eq!(fs::read(place.join("upper/file")).unwrap(), b"newest");
            assert_eq!(fs::read(place.join("pins/file")).unwrap(), b"pinned");
            assert!(!place.join("layer").exists() && !place.join(ASIDE).exists());
        };
        make("upper", "newest");
        make("pins", "pinned");
        put_back(place).unwrap();
        is_as_before();
        // In the middle of moving.
        fs::create_dir(place.join(ASIDE)).unwrap();
        fs::rename(place.join("upper"), place.join("aside/upper")).unwrap();
        put_back(place).unwrap();
        is_as_before();
        // When others had taken their places; and in the middle of putting back.
        for half_back in [false, true] {
            set_aside(place).unwrap();
            make("upper", "older");
            make("layer", "older");
            if half_back {
                fs::remove_dir_all(place.join("layer")).unwrap();
                fs::remove_file(place.join(ASIDE).join(MOVED)).unwrap();
                fs::remove_dir_all(place.join("upper")).unwrap();
                fs::rename(place.join("aside/upper"), place.join("upper")).unwrap();
            }
            put_back(place).unwrap();
            is_as_before();
        }
    }
}
