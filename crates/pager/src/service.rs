//! What `kip-pager` is: every proc of a data directory, a thread for each connection, and the
//! keeper at hand.
//!
//! A proc that is held is held by the thread that stopped it, because a trace belongs to a thread:
//! it waits for the order to let go. If we die the kernel lets all of them run, and they wait at
//! their first missing page for the next pager.

mod adoption;
mod clients;
mod custody;
mod inspect;
mod news;
mod parking;
mod refused;

use crate::memory::Bell;
use crate::proc::{PagedProc, Sets, Way};
use crate::protocol::{
    Hibernated, MAX_MESSAGE, MemoryStatus, Order, PagerAnswer, PagerEvent, PagerRequest, PagerStatus, Purpose, Woken,
};
use crate::serve::Server;
use crate::set::Predictor;
use crate::spares::Spares;
use crate::swap::{PAGE, Swap};
use crate::ticking::packets;
use custody::{InKeeper, held_prefix};
use kip_keeper::Keeper;
use kip_stop::{Stopped, stop_quiescent};
use kip_sys::fdpass;
use news::at_once_or_later;
use parking_lot::Mutex;
use refused::{OrderError, line};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

/// How long the threads of a proc may take to stand still.
const STOP_WITHIN: Duration = Duration::from_secs(2);
/// How long they may take to be back in their calls: a proc that may use a tenth of a processor
/// stands still for 90 ms at a time.
const QUIESCENT_WITHIN: Duration = Duration::from_millis(500);
/// How long the page cache has what a sleep wrote: longer than a tick takes to come by default.
const CACHED_FOR: Duration = Duration::from_secs(75);
/// Stack of a thread that serves a connection, and maybe holds a proc for hours.
const STACK: usize = 256 << 10;
/// Spare files of slot maps, in the data directory.
const SPARES: &str = "run/maps";
/// What working sets may take in memory unless the daemon says otherwise, bytes.
pub const DEFAULT_BUDGET: usize = 256 << 20;

/// What followers are notified of.
enum News {
    Rung(Rung),
    Event(PagerEvent),
}

/// A first fault.
struct Rung {
    name: String,
    number: u32,
    turn: u64,
    /// The wake took so long; none: as long as the set.
    total_us: Option<u64>,
    at: Instant,
    by: Option<usize>,
}

/// An order to a thread that holds a proc.
enum Let {
    /// Let it go, and say so.
    Go(mpsc::Sender<()>),
    /// Wake it.
    Wake(Instant, Purpose),
}

/// The way to a thread that holds a proc.
struct Holder {
    order: mpsc::Sender<Let>,
    bell: Arc<OwnedFd>,
}

impl Holder {
    fn send(&self, order: Let) {
        // Both fail only if the thread is gone, and its traces with it.
        let _ = self.order.send(order);
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }
}

/// A proc's own place in the table; empty before its first sleep and after its end.
type Slot = Arc<Mutex<Option<Entry>>>;

/// One proc.
struct Entry {
    proc: PagedProc,
    number: u32,
    directory: PathBuf,
    pids: Vec<u32>,
    holder: Option<Holder>,
    /// The proc sleeps, and what is out has not been touched.
    asleep: Arc<AtomicBool>,
    /// What its sets take from others, and what of the budget.
    set_bytes: usize,
    kept_bytes: usize,
}

impl Entry {
    /// Lets a held proc run.
    fn let_go(&mut self) {
        if let Some(holder) = self.holder.take() {
            let (done, wait) = mpsc::channel();
            holder.send(Let::Go(done));
            let _ = wait.recv();
        }
    }
}

/// The pager of one data directory.
pub struct Service {
    keeper: Arc<Keeper>,
    server: Arc<Server>,
    procs: Mutex<HashMap<String, Slot>>,
    /// Procs of which a dead pager had something out that could not be taken up, and why.
    broken: Mutex<HashMap<String, Arc<OrderError>>>,
    followers: Mutex<Vec<OwnedFd>>,
    budget: AtomicUsize,
    in_memory: AtomicUsize,
    news: mpsc::Sender<News>,
    /// Pages that are not here and needed.
    missing: mpsc::Sender<PagerEvent>,
    /// Swap files in the page cache, and when that began.
    cached: mpsc::Sender<(Instant, Weak<Swap>)>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").finish_non_exhaustive()
    }
}

fn reply(socket: &OwnedFd, answer: &PagerAnswer) -> bool {
    let bytes = serde_json::to_vec(answer).expect("answers are plain data");
    fdpass::send(socket.as_fd(), &bytes, &[]).is_ok()
}

impl Service {
    /// Serves what a dead pager of the data directory `dir` had out, and no other proc yet.
    ///
    /// # Errors
    /// The kernel's; the keeper does not tell what is out.
    pub fn new(keeper: Keeper, dir: &Path) -> io::Result<Arc<Service>> {
        let (news, heard) = mpsc::channel();
        let (missing, wanted) = mpsc::channel();
        let (cached, caching) = mpsc::channel();
        let spares = Spares::in_directory(&dir.join(SPARES)).unwrap_or_else(|error| {
            tracing::warn!(%error, "files of slot maps are made anew for each wake");
            Spares::default()
        });
        let service = Arc::new(Service {
            keeper: Arc::new(keeper),
            server: Arc::new(Server::with_spares(spares)?),
            procs: Mutex::default(),
            broken: Mutex::default(),
            followers: Mutex::default(),
            budget: DEFAULT_BUDGET.into(),
            in_memory: 0.into(),
            news,
            missing,
            cached,
        });
        // By a thread of its own: the other may wait for a proc that waits for pages.
        let asker = Arc::clone(&service);
        let ask = move || wanted.iter().for_each(|event| asker.broadcast(&event));
        std::thread::Builder::new().name("missing".into()).stack_size(STACK).spawn(ask)?;
        std::thread::Builder::new().name("cached".into()).stack_size(STACK).spawn(move || end_caches(&caching))?;
        service.take_up_all(dir)?;
        let reporter = Arc::clone(&service);
        std::thread::Builder::new().name("events".into()).spawn(move || reporter.report_news(&heard))?;
        Ok(service)
    }

    /// Serves one connection; true for quit.
    fn connection(self: &Arc<Service>, socket: OwnedFd) -> bool {
        let say = |answer: &PagerAnswer| reply(&socket, answer);
        loop {
            let (bytes, fds) = match fdpass::recv(socket.as_fd(), MAX_MESSAGE) {
                Ok(received) => received,
                Err(error) => {
                    if fdpass::lost_descriptors(&error) {
                        say(&OrderError::Receive(error).answer());
                    }
                    return false;
                }
            };
            let request: PagerRequest = match serde_json::from_slice(&bytes) {
                Ok(request) => request,
                Err(e) => {
                    say(&OrderError::Request(e).answer());
                    return false;
                }
            };
            // As large as a message may be, and this thread may hold a proc for days.
            drop(bytes);
            let done = match request {
                PagerRequest::Hibernate(order) => {
                    // It answers by itself: this thread may have to hold the proc after that, for
                    // which it needs no connection.
                    let (name, mut socket) = (order.name.clone(), Some(socket));
                    let answer = |done| socket.take().is_some_and(|to| reply(&to, &PagerAnswer::Hibernated(done)));
                    if let Err(e) = self.hibernate(order, fds, answer) {
                        tracing::warn!(proc = name, error = line(&e), "not hibernated");
                        if let Some(socket) = socket {
                            reply(&socket, &e.answer());
                        }
                    }
                    return false;
                }
                PagerRequest::Follow => {
                    if say(&PagerAnswer::Done) {
                        self.followers.lock().push(socket);
                    }
                    return false;
                }
                PagerRequest::Quit => {
                    self.come_to_rest();
                    say(&PagerAnswer::Done);
                    return true;
                }
                PagerRequest::Ping => Ok(PagerAnswer::Status(PagerStatus::own())),
                PagerRequest::Budget { bytes } => {
                    self.budget.store(bytes, Ordering::Relaxed);
                    Ok(PagerAnswer::Done)
                }
                PagerRequest::Rouse { name, purpose } => {
                    self.rouse(&name, purpose);
                    continue;
                }
                PagerRequest::Wake { name, purpose } => self.wake(&name, &purpose.set).map(PagerAnswer::Woken),
                PagerRequest::Inflate(rebuilt) => self.inflate(rebuilt, fds).map(PagerAnswer::Woken),
                PagerRequest::Restore { name } => self.restore(&name).map(|()| PagerAnswer::Done),
                PagerRequest::Forget { name } => {
                    self.forget(&name);
                    Ok(PagerAnswer::Done)
                }
                PagerRequest::Copied { name } => {
                    self.all_is_here(&name);
                    Ok(PagerAnswer::Done)
                }
                PagerRequest::Adopt { name, number, directory } => {
                    self.adopt(&name, number, &directory).map(|()| PagerAnswer::Done)
                }
                PagerRequest::PrepareParking { name } => {
                    self.prepare_parking(&name).map(|known| PagerAnswer::ParkingPrepared { known })
                }
                PagerRequest::Account { name, file } => self.account(&name, &file).map(|()| PagerAnswer::Done),
                PagerRequest::Chart { name } => self.chart(&name, fds),
                PagerRequest::Peek(peek) => self.peek(&peek, fds),
                PagerRequest::Survey { name, processes, survey } => self.survey(&name, &processes, survey),
                PagerRequest::Inspect { name } => Ok(PagerAnswer::MemoryStatus(self.memory_status(&name))),
                PagerRequest::Mirror => self.mirror().map(|()| PagerAnswer::Done),
            };
            let answer = done.unwrap_or_else(|e: OrderError| e.answer());
            if !say(&answer) {
                return false;
            }
        }
    }

    fn slot(&self, name: &str) -> Slot {
        Arc::clone(self.procs.lock().entry(name.to_owned()).or_default())
    }

    fn known(&self, name: &str) -> Option<Slot> {
        self.procs.lock().get(name).cloned()
    }

    fn custodian(&self, name: &str, number: u32) -> Arc<InKeeper> {
        let (keeper, name, news) = (Arc::clone(&self.keeper), name.to_owned(), self.news.clone());
        let missing = self.missing.clone();
        Arc::new(InKeeper { keeper, name, number, news, missing })
    }

    fn new_entry(&self, order: &Order) -> Result<Entry, OrderError> {
        let (path, custodian) = (&order.directory, self.custodian(&order.name, order.number));
        let made = clear(path).and_then(|()| fs::DirBuilder::new().mode(0o700).create(path)).and_then(|()| {
            PagedProc::create(order.number, path, Arc::clone(&self.server), custodian, Predictor::LastUse)
        });
        let proc = made.map_err(|e| OrderError::directory(&order.name, path, "made", e))?;
        Ok(Entry {
            proc,
            number: order.number,
            directory: order.directory.clone(),
            pids: Vec::new(),
            holder: None,
            asleep: Arc::default(),
            set_bytes: 0,
            kept_bytes: 0,
        })
    }

    /// Takes a proc's memory out. `answer` tells whether the answer was taken: a client that has
    /// given up takes the proc for awake, and nothing would wake it.
    fn hibernate(
        &self,
        order: Order,
        watch: Vec<OwnedFd>,
        answer: impl FnOnce(Hibernated) -> bool,
    ) -> Result<(), OrderError> {
        self.sound(&order.name)?;
        let slot = self.slot(&order.name);
        let mut guard = slot.lock();
        if guard.is_none() {
            *guard = Some(self.new_entry(&order)?);
        }
        let entry = guard.as_mut().expect("just made");
        if entry.asleep.load(Ordering::SeqCst) {
            return Err(OrderError::Asleep { name: order.name });
        }
        // Before anything is out: without the bell the proc could not be held.
        let bell = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|e| OrderError::Bell { name: order.name.clone(), source: e.into() })?;
        let pids = listed(&order.processes).unwrap_or_default();
        let came = pids.first().filter(|_| order.patience > 0).and_then(|pid| packets(*pid));
        let (stopped, quiescent) = stop_quiescent(|| listed(&order.processes), STOP_WITHIN)?;
        let slept = order.slept.iter().map(|sleeper| (sleeper.tid, sleeper.switches)).collect();
        let hold = order.hold && quiescent && stopped.slept_since(&slept);
        // What others have, and this one's own, which is about to be given up.
        self.sets_are_used(entry);
        let left = self.budget.load(Ordering::Relaxed).saturating_sub(self.in_memory.load(Ordering::Relaxed));
        let sets = match (order.prefetch, left) {
            (false, _) => Sets::None,
            (true, 0) => Sets::Disk,
            (true, left) => Sets::Cached(left),
        };
        let ticks = order.patience > 0 && !hold;
        let way = Way { drop_files: order.drop_files, ticks, sets, timers: hold };
        if left > 0 {
            // Its threads are not to stand still until the disk has all, nor its first ticks to
            // wait for the disk.
            entry.proc.swap().cache();
            let _ = self.cached.send((Instant::now(), Arc::downgrade(entry.proc.swap())));
        }
        let deflated = entry.proc.deflate(&stopped, way)?;
        let mut done = Hibernated::default();
        deflated.values().for_each(|one| done.add(one));
        (done.frozen_us, done.held) = (micros(stopped.began), hold);
        (entry.set_bytes, entry.kept_bytes) = (done.set_bytes as usize, done.kept_bytes as usize);
        self.in_memory.fetch_add(entry.kept_bytes, Ordering::Relaxed);
        entry.pids = stopped.processes.keys().copied().collect();
        let asleep = Arc::new(AtomicBool::new(true));
        entry.asleep = Arc::clone(&asleep);
        if hold {
            let (sender, orders) = mpsc::channel();
            let bell = Arc::new(bell);
            entry.holder = Some(Holder { order: sender, bell: Arc::clone(&bell) });
            drop(guard);
            if !answer(done) {
                self.rouse(&order.name, Purpose::default());
            }
            self.hold(order, &slot, stopped, watch, (&orders, &bell));
            return Ok(());
        }
        let (name, number, turn, news) = (order.name.clone(), order.number, order.turn, self.news.clone());
        let ring = move || {
            if asleep.swap(false, Ordering::SeqCst) {
                let name = name.clone();
                let _ =
                    news.send(News::Rung(Rung { name, number, turn, total_us: None, at: Instant::now(), by: None }));
            }
        };
        let ticks = (order.patience > 0).then_some((order.patience, came));
        entry.proc.arm(&entry.pids, Some(&Bell(Arc::new(ring))), ticks);
        stopped.go();
        entry.proc.wait_until_quiescent(&entry.pids, QUIESCENT_WITHIN);
        drop(guard);
        if !answer(done) {
            self.wake(&order.name, "")?;
        }
        Ok(())
    }

    /// Holds stopped processes until told to let go, or until one of them is killed.
    fn hold(
        &self,
        order: Order,
        slot: &Slot,
        mut stopped: Stopped,
        watch: Vec<OwnedFd>,
        told: (&mpsc::Receiver<Let>, &OwnedFd),
    ) {
        let (orders, bell) = told;
        let mut by: Option<usize> = None;
        let told = loop {
            let ends: Vec<OwnedFd> =
                stopped.mortal().into_iter().filter_map(|pid| kip_sys::process::pidfd_open(pid).ok()).collect();
            let all = watch.iter().chain([bell]).chain(&ends);
            let mut fds: Vec<_> = all.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            if let Err(error) = rustix::io::retry_on_intr(|| poll(&mut fds, None)) {
                tracing::error!(proc = order.name, %error, "a held proc is let go");
                break Some(Let::Wake(Instant::now(), Purpose::default()));
            }
            let at = Instant::now();
            by = fds[..watch.len()].iter().position(|fd| !fd.revents().is_empty());
            if let Some(by) = by {
                break Some(Let::Wake(at, order.watch[by].clone()));
            }
            if let Ok(told) = orders.try_recv() {
                break Some(told);
            }
            let before = stopped.processes.len();
            stopped.bury();
            if stopped.processes.is_empty() {
                break None;
            }
            // The process that waits for a killed one has to hear of its end; pid 1, if that was
            // the program.
            if stopped.processes.len() < before {
                break Some(Let::Wake(at, Purpose::default()));
            }
        };
        // The program may close what we have duplicates of, and that is to be a close.
        drop(watch);
        match told {
            Some(Let::Wake(at, purpose)) => {
                let mut guard = loop {
                    if let Some(guard) = slot.try_lock() {
                        break guard;
                    }
                    // The thread that has the slot may be waiting for us to let go.
                    if let Ok(Let::Go(done)) = orders.try_recv() {
                        stopped.go();
                        let _ = done.send(());
                        return;
                    }
                    std::thread::sleep(Duration::from_micros(20));
                };
                if let Some(entry) = guard.as_mut() {
                    entry.holder = None;
                    entry.asleep.store(false, Ordering::SeqCst);
                    entry.proc.wake(&entry.pids, &purpose.set);
                }
                if by.is_some() || purpose.packet {
                    stopped.go_for_packet(at);
                } else {
                    stopped.go();
                }
                drop(guard);
                let Order { name, number, turn, .. } = order;
                let rung = Rung { name, number, turn, total_us: Some(micros(at)), at, by };
                let _ = self.news.send(News::Rung(rung));
            }
            Some(Let::Go(done)) => {
                stopped.go();
                let _ = done.send(());
            }
            None => {}
        }
    }

    /// The sets of a proc take no memory any more.
    fn sets_are_used(&self, entry: &mut Entry) {
        entry.set_bytes = 0;
        self.in_memory.fetch_sub(std::mem::take(&mut entry.kept_bytes), Ordering::Relaxed);
    }

    fn rouse(&self, name: &str, purpose: Purpose) {
        let at = Instant::now();
        let Some(slot) = self.known(name) else { return };
        at_once_or_later(slot, "rouse", move |entry| {
            if let Some(holder) = entry.as_ref().and_then(|entry| entry.holder.as_ref()) {
                holder.send(Let::Wake(at, purpose));
            }
        });
    }

    fn wake(&self, name: &str, set: &str) -> Result<Woken, OrderError> {
        let slot = self.known(name).ok_or_else(|| OrderError::unknown(name))?;
        let mut guard = slot.lock();
        let entry = guard.as_mut().ok_or_else(|| OrderError::unknown(name))?;
        let began = Instant::now();
        entry.asleep.store(false, Ordering::SeqCst);
        entry.proc.wake(&entry.pids, set);
        self.sets_are_used(entry);
        let install_us = micros(began);
        entry.let_go();
        Ok(Woken { install_us, total_us: micros(began), pages: installed_pages(entry), long_tick: false })
    }

    fn restore(&self, name: &str) -> Result<(), OrderError> {
        self.sound(name)?;
        let Some(slot) = self.known(name) else { return Ok(()) };
        let mut guard = slot.lock();
        let Some(entry) = guard.as_mut() else { return Ok(()) };
        entry.asleep.store(false, Ordering::SeqCst);
        let restored = entry.proc.restore_all();
        entry.let_go();
        restored.map_err(|source| OrderError::Restore { name: name.to_owned(), source })?;
        self.give_up(name, guard.take());
        Ok(())
    }

    fn forget(&self, name: &str) {
        self.broken.lock().remove(name);
        let entry = self.known(name).and_then(|slot| slot.lock().take());
        self.give_up(name, entry);
        if let Err(e) = self.keeper.drop_prefix(&held_prefix(name)) {
            tracing::warn!(proc = name, error = line(&e), "the keeper still holds something of a proc that is no more");
        }
    }

    fn give_up(&self, name: &str, entry: Option<Entry>) {
        let Some(mut entry) = entry else { return };
        entry.let_go();
        self.sets_are_used(&mut entry);
        let Entry { proc, directory, .. } = entry;
        proc.give_up();
        self.procs.lock().remove(name);
        if let Err(e) = clear(&directory) {
            tracing::warn!(proc = name, error = %e, "what a proc had on disk is left");
        }
    }

    fn memory_status(&self, name: &str) -> MemoryStatus {
        let Some(slot) = self.known(name) else { return MemoryStatus::default() };
        let guard = slot.lock();
        let Some(entry) = guard.as_ref() else { return MemoryStatus::default() };
        let (mut faults, mut installed, mut set_pages, mut ticks) = (0, 0, 0, false);
        for (pid, memory) in entry.pids.iter().filter_map(|pid| Some((pid, entry.proc.memory(*pid)?))) {
            let state = memory.state();
            set_pages += entry.proc.set_pages(*pid, &state) as u64;
            faults += state.since.faults.len().saturating_sub(state.since.probed) as u64;
            installed += state.since.installed as u64;
            ticks |= state.ticking.is_some();
        }
        MemoryStatus {
            known: true,
            asleep: entry.asleep.load(Ordering::SeqCst),
            held: entry.holder.is_some(),
            ticks,
            swap_bytes: (entry.proc.swap().used() * PAGE) as u64,
            faults,
            installed,
            set_pages,
            set_bytes: entry.set_bytes as u64,
        }
    }
}

fn micros(since: Instant) -> u64 {
    since.elapsed().as_micros() as u64
}

fn installed_pages(entry: &Entry) -> u64 {
    entry.pids.iter().filter_map(|pid| entry.proc.memory(*pid)).map(|m| m.state().since.installed as u64).sum()
}

/// Ends what [`Swap::cache`] began.
fn end_caches(began: &mpsc::Receiver<(Instant, Weak<Swap>)>) {
    for (at, swap) in began {
        std::thread::sleep(CACHED_FOR.saturating_sub(at.elapsed()));
        if let Some(swap) = swap.upgrade()
            && let Err(error) = swap.end_cache()
        {
            tracing::error!(%error, "the disk does not take what a sleep wrote, which stays in the page cache: make room, or mend the disk");
        }
    }
}

fn by_long_tick(entry: &Entry) -> bool {
    entry.pids.iter().filter_map(|pid| entry.proc.memory(*pid)).any(|m| m.state().since.long_tick)
}

fn install_us(entry: &Entry) -> u64 {
    let took = entry.pids.iter().filter_map(|pid| entry.proc.memory(*pid)?.state().since.woke.map(|(_, us)| us));
    took.max().unwrap_or(0)
}

fn listed(file: &Path) -> io::Result<Vec<u32>> {
    Ok(fs::read_to_string(file)?.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Removes a directory of ours that may not exist.
fn clear(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
