//! One task owns each proc: requests and events come in on one queue and are handled one at a time,
//! top to bottom.
//!
//! A handler decides with the pure lifecycle function, records what it is going to do, does it on a
//! blocking thread, and records the outcome. What others may see of a proc leaves on a watch
//! channel ([`ProcStatus`]).

mod adopt;
mod archive;
mod checked;
mod command;
mod deadline;
mod ending;
mod hibernate;
mod hooks;
mod observed;
mod phase;
mod place;
mod pressed;
mod previous;
mod probes;
mod ready;
mod request;
mod rest;
mod sleep;
mod starting;
mod still;
mod ticks;
mod update;

pub use adopt::finish as finish_taking_over;
use archive::Storing;
pub use archive::{ArchivedNote, archived};
pub use checked::Asking;
pub use command::{By, Reply, TaskCommand};
pub use hibernate::Asleep;
pub use hooks::run_hook;
use kip_engine::descriptors::watched;
use kip_engine::tickets::Ticket;
use kip_engine::volumes::sleep::forget_restored;
use kip_records::body::Body;
use kip_types::chain;
use phase::{Parked, Phase, Running, Woke};
pub use place::{TakenPlace, hidden};
pub use pressed::need;
pub use previous::ASIDE;
pub use probes::Probes;
pub use ready::check_once;
pub use still::{Copied, CopyRunning, FilesHeld, Still, StillFor, Stilled};
pub use ticks::would_be_late;

use crate::idle::{Activity, DryRun, Sample};
use kip_clocks::Now;
use kip_engine::blocking::blocking;
use kip_engine::cause::WakeCause;
use kip_engine::host::Proc;
use kip_engine::stop::{self, NetworkFate};
use kip_journal::meter::WRITE_EVERY;
use kip_net::activity::TrafficCounters as Traffic;
use kip_net::prepared::PreparedNetwork;
use kip_pressure::Grant;
use kip_records::due::{self, NextWake};
use kip_records::record;
use kip_records::state::{Checked, Record};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::lifecycle::{Exit, Input};
use kip_types::{Generation, Hibernate, Restart, State, Tier};
use pressed::Pressed;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::sync::{RwLock, mpsc, oneshot, watch};

/// How long `inspect` waits for a transition that is under way.
const STABLE_WITHIN: Duration = Duration::from_secs(2);
/// Between samples of a running proc.
const SAMPLE_EVERY: Duration = Duration::from_millis(1000);
/// Nor more often than that.
const SOONEST_SAMPLE: Duration = Duration::from_millis(20);
/// A proc that was woken for ticks only is parked again after this much quiet.
const AFTER_TICKS: Duration = Duration::from_millis(500);
/// Timers are met by waking this much longer before they are due than the last wake took.
const LEAD: Duration = Duration::from_millis(20);
/// However long the last wake took.
const LONGEST_LEAD: Duration = Duration::from_millis(300);
/// After a refused sleep, the next try.
const RETRY_SLEEP: Duration = Duration::from_secs(60);
/// A record that could not be written is tried again after this.
const WRITE_AGAIN: Duration = Duration::from_secs(5);

/// What others see of a proc.
#[derive(Debug, Clone)]
pub struct ProcStatus {
    /// What is recorded of the proc.
    pub record: Record,
    /// Since when nothing has happened; none unless running.
    pub quiet_since: Option<Instant>,
    /// The newest activity.
    pub seen: Option<Activity>,
    /// The next wake for a timer.
    pub next: Option<NextWake>,
    /// It is being looked whether it has become ready.
    pub starting: bool,
    /// Programs under exec.
    pub execs: usize,
    /// What it takes while it is hibernated.
    pub asleep: Asleep,
    /// It is known to tick, in place if it is hibernated: parked, its ticks would be late.
    pub ticks: bool,
    /// The thread that does, in words.
    pub ticker: Option<String>,
    /// Its wake waits for leave.
    pub waits: bool,
    /// Its idle policy is only tried.
    pub dry_run: Option<DryRun>,
}

impl ProcStatus {
    /// Before anything is known but its record.
    pub fn new(record: Record) -> ProcStatus {
        ProcStatus {
            record,
            quiet_since: None,
            seen: None,
            next: None,
            starting: false,
            execs: 0,
            asleep: Asleep::default(),
            ticks: false,
            ticker: None,
            waits: false,
            dry_run: None,
        }
    }
}

/// The owner of one proc.
#[derive(Debug)]
pub struct Task {
    /// To be called when it is removed.
    removed: Removed,
    /// Its own inbox, for work that it has done beside it.
    own: mpsc::WeakSender<TaskCommand>,
    /// The proc.
    pub proc: Arc<Proc>,
    /// What is recorded of the proc.
    pub record: Record,
    inbox: mpsc::Receiver<TaskCommand>,
    status: watch::Sender<ProcStatus>,
    phase: Phase,
    tickets: Arc<AtomicUsize>,
    kept_awake: Arc<AtomicBool>,
    /// Of those the ones of its own commands after a wake.
    hooking: Arc<AtomicUsize>,
    /// Of its hibernation; none if that is not known any more.
    turn: Option<u64>,
    /// Pages that one of its ticks may touch while it is hibernated; 0 until a tick has woken it.
    patience: usize,
    /// Its snapshots have shown ticks that cannot be seen while it runs: POSIX and interval timers.
    hidden_ticks: bool,
    pressed: Pressed,
    storing: Option<Storing>,
    /// All are ended: it is not to be started again by this daemon.
    ending: bool,
    /// When its record was written last.
    written: Instant,
    /// The look whether it has become ready.
    starting: Option<ready::Watching>,
    /// Closed at its end: a probe is asking it, or has just asked.
    checking: Option<oneshot::Receiver<()>>,
    /// Ports on which Kip answers how the proc is.
    pub probes: Probes,
    /// Namespaces for the first start.
    pub prepared: Option<PreparedNetwork>,
}

type OnRemoval = dyn Fn(&Arc<Proc>) + Send + Sync;

/// Is called when a proc is removed.
pub struct Removed(pub Box<OnRemoval>);

impl std::fmt::Debug for Removed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Removed")
    }
}

/// Others' side of a task.
#[derive(Debug, Clone)]
pub struct Handle {
    /// The proc.
    pub proc: Arc<Proc>,
    /// What the task is asked.
    pub inbox: mpsc::Sender<TaskCommand>,
    /// How the proc is, as its task has said last.
    pub status: watch::Receiver<ProcStatus>,
    /// Is read by a request that starts or changes the proc, until its task has done so: another
    /// proc takes its place after that.
    pub begun: Arc<RwLock<()>>,
    /// It does not fall asleep because it is idle: so many are to be awake behind a name.
    pub kept_awake: Arc<AtomicBool>,
    /// Another one for each proc of this daemon: of two with one name, too.
    pub number: u64,
}

impl Handle {
    /// Whether it stays awake while it is idle, for so many are to be awake behind a name.
    pub fn is_kept_awake(&self) -> bool {
        self.kept_awake.load(Ordering::SeqCst)
    }

    /// Waits, [`STABLE_WITHIN`] at most, for a transition that is under way. A client may have its
    /// reply before the wake is recorded: of a proc that is recorded as hibernated the pager is
    /// asked whether it still is.
    pub async fn wait_until_stable(&mut self) {
        let _ = tokio::time::timeout(STABLE_WITHIN, self.stable()).await;
    }

    async fn stable(&mut self) {
        let between = |state: &State| matches!(state, State::Waking { .. } | State::Parking { .. });
        let asleep = |state: &State| matches!(state, State::Hibernated { .. });
        let stable = self.status.wait_for(|s| !between(&s.record.state)).await;
        let Some(wakes) = stable.ok().filter(|s| asleep(&s.record.state)).map(|s| s.record.wakes) else { return };
        let proc = Arc::clone(&self.proc);
        let seen = blocking(move || proc.shared.pager.inspect(proc.key.as_str())).await;
        if seen.is_ok_and(|seen| !seen.asleep) {
            // Its task finds that out too, and records it.
            let recorded = |s: &ProcStatus| s.record.wakes != wakes || !asleep(&s.record.state);
            let _ = self.status.wait_for(|s| recorded(s) && !between(&s.record.state)).await;
        }
    }

    /// Sends a command and waits for its answer.
    pub async fn ask<T>(&self, make: impl FnOnce(Reply<T>) -> TaskCommand) -> Result<T, Refusal> {
        let gone = || {
            let name = self.proc.name.as_str();
            match self.proc.shared.rests() {
                Some(refusal) => refusal,
                None => Refusal::new(Code::Unknown, format!("there is no proc {name:?} any more")),
            }
        };
        let (reply, answer) = oneshot::channel();
        self.inbox.send(make(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

impl Task {
    /// A task for the proc in the state of its record. To be started by [`Task::start_running`]
    /// when its handle is known to all parts of the daemon that may have something for it: a parked
    /// proc's sockets may have an event at once.
    pub fn new(proc: Arc<Proc>, record: Record, prepared: Option<PreparedNetwork>, removed: Removed) -> (Task, Handle) {
        let (sender, inbox) = mpsc::channel(64);
        let (status, watcher) = watch::channel(ProcStatus::new(record.clone()));
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let (begun, kept_awake) = (Arc::default(), Arc::default());
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let handle = Handle { proc: Arc::clone(&proc), inbox: sender, status: watcher, begun, kept_awake, number };
        let tickets = Arc::new(AtomicUsize::new(0));
        let task = Task {
            removed,
            own: handle.inbox.downgrade(),
            proc,
            record,
            inbox,
            status,
            phase: Phase::Down,
            tickets,
            kept_awake: Arc::clone(&handle.kept_awake),
            hooking: Arc::default(),
            turn: None,
            patience: 0,
            hidden_ticks: false,
            pressed: Pressed::default(),
            storing: None,
            ending: false,
            written: Instant::now(),
            starting: None,
            checking: None,
            probes: Probes::default(),
            prepared,
        };
        (task, handle)
    }

    /// Runs it until the proc is removed.
    pub fn start_running(self) {
        tokio::spawn(self.run());
    }

    async fn run(mut self) {
        self.resume_record().await;
        loop {
            self.publish();
            let deadline = self.deadline();
            tokio::select! {
                command = self.inbox.recv() => {
                    let Some(command) = command else { return };
                    if self.handle(command).await {
                        return;
                    }
                }
                () = self.phase.ended() => self.on_exit().await,
                leave = self.pressed.leave() => self.on_leave(leave).await,
                () = async {
                    match deadline {
                        Some(at) => tokio::time::sleep_until(at.into()).await,
                        None => std::future::pending().await,
                    }
                } => self.on_deadline().await,
            }
        }
    }

    /// Takes up what the record says, after recovery has made it true.
    async fn resume_record(&mut self) {
        if self.sleeps() || matches!(self.record.state, State::Hot { .. }) {
            self.keep_newest_files(self.record.generation()).await;
        }
        match self.record.state.clone() {
            State::Hot { init, .. } => {
                self.begin_running(init, Tier::Hot, Woke::Called);
                self.watch_readiness();
            }
            State::Hibernated { init, .. } => self.resume_hibernated(init).await,
            State::Archived { .. } => self.resume_archived(),
            State::Parked { generation } => self.resume_parked(generation),
            _ => {}
        }
    }

    fn resume_parked(&mut self, generation: Generation) {
        let dir = kip_snapshot::path_of(&self.proc.dir, generation);
        match kip_snapshot::open::<Body>(&dir) {
            Ok(manifest) => self.begin_sleeping(&manifest.body),
            Err(e) => {
                tracing::warn!(proc = %self.proc.name, error = chain(&e), "the snapshot of a parked proc cannot be read");
                self.phase = Phase::Parked(Parked::new(None));
            }
        }
    }

    fn publish(&self) {
        self.status.send_replace(ProcStatus {
            record: self.record.clone(),
            quiet_since: self.phase.running().map(|r| Instant::now() - r.idle.quiet(Instant::now())),
            seen: self.phase.running().and_then(|r| r.idle.seen()),
            next: self.phase.next_timer(),
            starting: self.starting.is_some(),
            execs: self.tickets.load(Ordering::SeqCst),
            asleep: self.asleep(),
            ticks: self.phase.hibernated().is_some_and(|h| h.ticks.is_some())
                || self.phase.running().is_some_and(|r| r.ticks),
            ticker: self.phase.hibernated().and_then(|h| h.ticker.clone()),
            waits: self.pressed.waits(),
            dry_run: self.phase.running().and_then(|r| r.dry_run),
        });
    }

    /// It has no thread that runs: it is woken before it does anything.
    fn sleeps(&self) -> bool {
        matches!(self.record.state, State::Parked { .. } | State::Archived { .. } | State::Hibernated { .. })
    }

    /// Records the state after `input`, before anything is done about it.
    pub fn advance(&mut self, input: Input, durability: record::Durability) -> Result<(), Refusal> {
        let next = self.record.after(input).map_err(|e| self.unfit(&e))?;
        self.write(next, durability)
    }

    /// The state after something that has happened: it is so even if it cannot be recorded now, and
    /// the next daemon finds out by itself.
    fn record_outcome(&mut self, input: Input) {
        if let Ok(next) = self.record.after(input) {
            self.keep(next);
        }
    }

    fn keep(&mut self, next: Record) {
        if let Err(e) = self.write(next.clone(), record::Durability::Rename) {
            tracing::warn!(proc = %self.proc.name, error = %e, "a state is not on disk; Kip tries again");
            // Until then another daemon would take an older state for the true one.
            self.written = Instant::now().checked_sub(WRITE_EVERY - WRITE_AGAIN).unwrap_or(self.written);
            self.proc.meter.enter(next.state.tier());
            self.record = next;
            self.publish();
        }
    }

    fn write(&mut self, next: Record, durability: record::Durability) -> Result<(), Refusal> {
        self.proc.write_record(&next, durability).map_err(|e| {
            Refusal::new(Code::Exhausted, format!("the state of {} cannot be recorded: {}", self.proc.name, chain(&e)))
        })?;
        self.record = next;
        self.written = Instant::now();
        self.publish();
        Ok(())
    }

    fn unfit(&self, e: &kip_types::lifecycle::Unfit) -> Refusal {
        Refusal::new(Code::State, format!("{} cannot do that now: {e}", self.proc.name))
    }

    /// True when the task is to end.
    async fn handle(&mut self, command: TaskCommand) -> bool {
        let Some(command) = self.admit_or_queue(command) else { return false };
        if self.carry_out(command).await {
            return true;
        }
        self.pressed.grant = None;
        self.answer_queue().await
    }

    async fn carry_out(&mut self, command: TaskCommand) -> bool {
        match command {
            TaskCommand::Start { wait_ready, reply } => {
                let result = self.start(wait_ready).await;
                let removed = result.is_err() && !self.record.established;
                let _ = reply.send(result);
                return removed;
            }
            TaskCommand::PutBack { reply } => {
                let stands_aside = self.record.stands_aside;
                let result = if stands_aside { self.start(false).await } else { Ok(()) };
                let _ = reply.send(result.map(|()| stands_aside));
            }
            TaskCommand::Stop { grace, network, reply } => {
                let _ = reply.send(self.stop(grace, network).await);
            }
            TaskCommand::Update { change, reply } => {
                let _ = reply.send(self.update(&change).await);
            }
            TaskCommand::Rename { name, reply } => drop(reply.send(self.rename(name).await)),
            TaskCommand::TakePlace { place, reply } => drop(reply.send(self.take_place(*place).await)),
            TaskCommand::LeavePlace { reply } => {
                self.leave_place().await;
                let _ = reply.send(Ok(()));
            }
            TaskCommand::TakePortsAgain { ports, reply } => {
                self.take_ports_again(ports).await;
                let _ = reply.send(Ok(()));
            }
            TaskCommand::ReplaceProbes { probes, reply } => {
                self.replace_probes(probes).await;
                let _ = reply.send(Ok(()));
            }
            TaskCommand::Remove { force, reply } => {
                let result = self.remove(force).await;
                let removed = result.is_ok();
                let _ = reply.send(result);
                return removed;
            }
            TaskCommand::Ready { started_at_ms, result } => self.on_ready(started_at_ms, result),
            TaskCommand::Ask { reply } => drop(reply.send(Ok(self.begin_check()))),
            TaskCommand::Checked { checked, reply } => {
                self.on_checked(checked);
                let _ = reply.send(Ok(()));
            }
            TaskCommand::Sleep { to: Tier::Hibernated, reply, .. } => {
                let _ = reply.send(self.hibernate_on_request().await);
            }
            TaskCommand::Sleep { to: Tier::Archived, by, reply } => self.archive_on_request(by, reply).await,
            TaskCommand::Stored { generation, result } => self.on_stored(generation, result).await,
            TaskCommand::Sleep { by, reply, .. } => {
                let _ = reply.send(self.park_on_request(by).await);
            }
            TaskCommand::Wake { cause, reply } => {
                let _ = reply.send(self.wake_on_request(cause).await);
            }
            TaskCommand::Socket { cause, at, leave } => self.on_socket(cause, at, leave).await,
            TaskCommand::Awake { turn, woken, by } => self.on_awake(turn, woken, by).await,
            TaskCommand::Damaged { message } => self.on_damaged(message).await,
            TaskCommand::TakeOver { only_if_ours, reply } => {
                let (result, removed) = self.take_over(only_if_ours).await;
                let _ = reply.send(result);
                return removed;
            }
            TaskCommand::ArchiveForRoom { cause, reply } => self.archive_for_room(cause, reply),
            TaskCommand::Rest { until, reply } => {
                let _ = reply.send(self.rest(until).await);
                return true;
            }
            TaskCommand::StandStill { what_for, over, reply } => self.stand_still(what_for, over, reply).await,
            TaskCommand::CopyRunning { copy, reply } => {
                let _ = reply.send(self.copy_running(copy).await);
            }
            TaskCommand::HoldFiles { change, over, reply } => self.hold_files(change, over, reply).await,
            TaskCommand::InspectPager => self.inspect_pager(WakeCause::PagerReplaced).await,
            TaskCommand::Relieve { to, cause, reply } => {
                let _ = reply.send(self.relieve(to, cause).await);
            }
            TaskCommand::KeepAwake { cause, reply } => {
                let awake = self.wake_on_request(cause).await;
                if let Some(running) = self.phase.running_mut() {
                    running.idle.touch(Instant::now());
                }
                let _ = reply.send(awake.map(|_| {
                    self.tickets.fetch_add(1, Ordering::SeqCst);
                    Ticket(Arc::clone(&self.tickets))
                }));
            }
        }
        false
    }

    /// Its owner starts it.
    async fn start(&mut self, wait_ready: bool) -> Result<(), Refusal> {
        (self.record.restarts, self.record.restarts_in_a_row) = (0, 0);
        self.begin(wait_ready, false).await
    }

    /// Starts it on its files; `again` by its restart policy, which goes on if that fails.
    async fn begin(&mut self, wait_ready: bool, again: bool) -> Result<(), Refusal> {
        (self.record.wakes, self.record.started_at_ms) = (0, now_ms());
        self.record.ready = self.proc.spec().ready.as_ref().map(|_| false);
        self.record.fell_back = None;
        self.record.out_of_memory = false;
        self.record.checked.clear();
        self.record.wakes_again = false;
        if self.record.established {
            // What it has in the store is forgotten only for one that does start.
            self.record.after(Input::Start).map_err(|e| self.unfit(&e))?;
            self.put_files_back().await?;
            self.forget_archive()?;
            // Generations are counted anew from here on.
            let forgotten = kip_snapshot::forget_cloned(&self.proc.dir);
            if let Err(e) = forgotten.and_then(|()| forget_restored(&self.proc.dir)) {
                let message = format!("{} cannot be started: its directory cannot be written: {e}", self.proc.name);
                return Err(Refusal::new(Code::Exhausted, message));
            }
            self.advance(Input::Start, record::Durability::Fsync)?;
        }
        match starting::start(self, wait_ready).await {
            Ok(init) => {
                self.begin_running(init, Tier::Hot, Woke::Called);
                self.watch_readiness();
                self.proc.shared.events.emit(
                    Some(&self.proc.name),
                    EventKind::Started,
                    self.proc.spec().command.join(" "),
                );
                Ok(())
            }
            Err(refusal) => {
                self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refused, refusal.message.clone());
                if again {
                    let next = self.record.after_end(self.proc.spec().restart, Exit::Unknown, now_ms());
                    let next = next.map_err(|e| self.unfit(&e))?;
                    stop::release(&self.proc, NetworkFate::after(&next.state)).await;
                    self.write(next, record::Durability::Fsync)?;
                } else if self.record.established {
                    stop::release(&self.proc, NetworkFate::Removed).await;
                    self.advance(Input::Exited(None), record::Durability::Fsync)?;
                } else {
                    self.remove_all().await?;
                }
                Err(refusal)
            }
        }
    }

    fn begin_running(&mut self, init: u32, from: Tier, woke: Woke) {
        match kip_sys::process::pidfd_open(init).and_then(watched) {
            Ok(pidfd) => self.run_on(pidfd, from, woke),
            // It has ended already: the status pipe says how.
            Err(_) => self.phase = Phase::Gone,
        }
    }

    fn run_on(&mut self, pidfd: AsyncFd<OwnedFd>, from: Tier, woke: Woke) {
        self.phase = Phase::Running(Box::new(Running::new(pidfd, from, woke, self.proc.spec().timing.dry_run)));
        self.sample();
    }

    fn begin_sleeping(&mut self, body: &Body) {
        let last = self.record.last_wake.as_ref().map_or(Duration::ZERO, |w| Duration::from_micros(w.total_us));
        let lead = (last.min(LONGEST_LEAD) + LEAD).as_nanos() as i64;
        let timing = &self.proc.spec().timing;
        let Record { ticks, tick_wakes, .. } = self.record;
        let next = due::next_wake(&body.clocks_now(), timing.tick_ms, ticks, tick_wakes, lead);
        self.phase = Phase::Parked(Parked { at_work: body.clocks.at_work.clone(), ..Parked::new(next) });
        kip_engine::watches::watch(&self.proc, body);
        self.proc.fd_store.pack();
    }

    async fn on_socket(&mut self, cause: WakeCause, at: Instant, leave: Option<Grant>) {
        if let Some(leave) = leave {
            if let Some(hibernating) = self.phase.hibernated_mut() {
                hibernating.roused = Some((cause, leave));
            }
        } else if self.sleeps() {
            self.wake_in_turn(cause, at, at, false).await;
        }
    }
}
