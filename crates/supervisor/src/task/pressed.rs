//! A proc where memory is short: its wakes wait for leave, and it is put to sleep for others.
//!
//! A wake that has to wait is a future beside the queue of commands, so that the proc can be
//! stopped or removed meanwhile. The proc sleeps on until the wake has leave: a crash leaves
//! nothing to undo, and the socket asks again. Clients that asked for the wake by a command are
//! refused after one try. A client that connected, or a timer, cannot be told: the wake is tried
//! until it succeeds.

use super::{Asleep, By, Task, TaskCommand};
use kip_engine::cause::WakeCause;
use kip_engine::host::Proc;
use kip_pressure::{Grant, Need, QUIET, Relieved, Short, Work};
use kip_records::state::Record;
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::{State, Tier};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a woken proc takes beyond its snapshot: page tables, stacks, descriptors; bytes.
const BESIDE_SNAPSHOT: u64 = 1 << 20;
/// Between the tries of a wake for which there is no room, at first; then twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// However often it was tried.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);
/// How long a proc that is to be stopped may wait for the room to end in order.
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// A client or timer that came to a sleeper and cannot be told to come again.
#[derive(Debug)]
struct Caller {
    cause: WakeCause,
    at: Instant,
    /// When its timer is due; of a client, when it came.
    due: Instant,
    tick: bool,
}

pub(super) type Leave = Result<Grant, Short>;

/// A wake that waits for leave.
struct Queued {
    caller: Option<Caller>,
    /// Commands that begin with a wake, in their order.
    commands: Vec<TaskCommand>,
    leave: Pin<Box<dyn Future<Output = Leave> + Send>>,
    pause: Duration,
}

impl std::fmt::Debug for Queued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queued({:?}, {} commands)", self.caller, self.commands.len())
    }
}

/// What a task has to do with memory being short.
#[derive(Debug, Default)]
pub(super) struct Pressed {
    /// A wake that waits for leave to begin.
    queued: Option<Queued>,
    /// Leave for the wake that is under way.
    pub(super) grant: Option<Grant>,
    /// Why the sleep under way was begun, if not for idleness or by request.
    pub(super) sleep_cause: Option<String>,
}

impl Pressed {
    /// Whether a wake waits for leave.
    pub(super) fn waits(&self) -> bool {
        self.queued.is_some()
    }

    /// What the wake that waits is told; never, if none does.
    pub(super) async fn leave(&mut self) -> Leave {
        match &mut self.queued {
            Some(queued) => (&mut queued.leave).await,
            None => std::future::pending().await,
        }
    }
}

/// What the next wake of a sleeper takes: all that it had when it fell asleep, or its working set
/// if that is more.
pub fn need(proc: &Proc, record: &Record, asleep: Asleep) -> Need {
    let sleep = record.last_sleep.as_ref();
    let (written, awake) = sleep.map_or((0, 0), |s| (s.bytes_written, s.memory_bytes.unwrap_or(0)));
    let (bytes, work) = match record.state {
        State::Hibernated { .. } => (awake.saturating_sub(asleep.there_bytes).max(asleep.set_bytes), Work::Hardly),
        _ => (written.max(awake).saturating_add(BESIDE_SNAPSHOT), Work::Much),
    };
    Need { bytes, there: asleep.there_bytes, group: proc.cgroup.clone(), work }
}

impl Task {
    pub(super) fn need(&self) -> Need {
        need(&self.proc, &self.record, self.asleep())
    }

    /// Leave to wake now.
    fn try_admit(&mut self) -> bool {
        self.pressed.grant = self.proc.shared.pressure.try_admit(&self.need());
        self.pressed.grant.is_some()
    }

    /// A place behind the others, taken after `pause` or when there is room.
    fn place(&self, due: Instant, pause: Option<Duration>) -> Pin<Box<dyn Future<Output = Leave> + Send>> {
        let pressure = Arc::clone(&self.proc.shared.pressure);
        let need = self.need();
        Box::pin(async move {
            if let Some(pause) = pause {
                pressure.pause(&need, pause).await;
            }
            pressure.admit(need, due).await
        })
    }

    fn queue(&mut self, caller: Option<Caller>, commands: Vec<TaskCommand>, before: Option<Duration>) {
        let pause = before.map_or(FIRST_PAUSE, |p| (p * 2).min(LONGEST_PAUSE));
        let due = caller.as_ref().map_or_else(Instant::now, |caller| caller.due);
        self.pressed.queued = Some(Queued { caller, commands, leave: self.place(due, before), pause });
    }

    /// Gives up the wake's place: no task may hold one without looking at it. Clients that wait for
    /// the wake are answered by [`Task::answer_queue`].
    pub(super) fn leave_queue(&mut self) {
        if let Some(queued) = &mut self.pressed.queued {
            queued.leave = Box::pin(std::future::pending());
        }
    }

    /// Gives a command back that may be carried out now; one that begins with a wake may have to
    /// wait.
    pub(super) fn admit_or_queue(&mut self, command: TaskCommand) -> Option<TaskCommand> {
        let wakes = matches!(command, TaskCommand::Wake { .. } | TaskCommand::KeepAwake { .. });
        if !wakes || !self.sleeps() {
            return Some(command);
        }
        if let Some(queued) = &mut self.pressed.queued {
            queued.commands.push(command);
            return None;
        }
        if self.try_admit() {
            return Some(command);
        }
        self.queue(None, vec![command], None);
        None
    }

    /// Wakes the proc for a client or timer that cannot be told to come again: now, or when there
    /// is room, in the order of what is `due`.
    pub(super) async fn wake_in_turn(&mut self, cause: WakeCause, at: Instant, due: Instant, tick: bool) {
        let caller = Caller { cause, at, due, tick };
        if let Some(queued) = &mut self.pressed.queued {
            queued.caller.get_or_insert(caller);
        } else if self.try_admit() {
            self.wake_for(caller).await;
            self.pressed.grant = None;
        } else {
            self.queue(Some(caller), Vec::new(), None);
        }
    }

    async fn wake_for(&mut self, Caller { cause, at, tick, .. }: Caller) {
        if matches!(self.record.state, State::Archived { .. }) && !self.fetch_or_fall_back().await {
            return;
        }
        match self.record.state {
            State::Parked { .. } => self.wake_retrying(cause, at, tick).await,
            State::Hibernated { .. } => drop(self.rouse(cause, at, tick).await),
            _ => {}
        }
    }

    /// The wake that waited may begin, or has been refused.
    pub(super) async fn on_leave(&mut self, leave: Leave) {
        let Some(Queued { caller, commands, pause, .. }) = self.pressed.queued.take() else { return };
        let name = &self.proc.name;
        match leave {
            Ok(grant) => {
                self.pressed.grant = Some(grant);
                // A command's answer tells whether the proc slept before; traffic has no answer.
                for command in commands {
                    self.carry_out(command).await;
                }
                if let Some(caller) = caller {
                    self.wake_for(caller).await;
                }
                self.pressed.grant = None;
            }
            Err(short) => {
                let refusal = short.refusal(&format!("{name} cannot be woken"), &self.proc.shared.pressure);
                let first = pause == FIRST_PAUSE;
                if first || !commands.is_empty() {
                    self.proc.shared.events.emit(Some(name), EventKind::Pressure, refusal.message.clone());
                }
                for command in commands {
                    refuse(command, &refusal);
                }
                if let Some(caller) = caller {
                    // Behind those that wait by now: they have room, perhaps.
                    let again = Caller { due: Instant::now(), ..caller };
                    self.queue(Some(again), Vec::new(), Some(pause));
                }
            }
        }
    }

    /// Answers the clients that waited for a wake of a proc that sleeps no more, by what it is now.
    /// True when the task is to end.
    pub(super) async fn answer_queue(&mut self) -> bool {
        if self.sleeps() {
            return false;
        }
        let Some(queued) = self.pressed.queued.take() else { return false };
        for command in queued.commands {
            if self.carry_out(command).await {
                return true;
            }
        }
        false
    }

    /// Leave to wake for a stop: the program is to end in order, but not for all memory there is.
    pub(super) async fn admit_to_stop(&mut self) -> Result<(), Refusal> {
        if self.pressed.queued.is_none() && self.try_admit() {
            return Ok(());
        }
        let begun = Instant::now();
        // If it has a place already, that is the one: two of one proc could wait for each other.
        let mut place = match &mut self.pressed.queued {
            Some(queued) => std::mem::replace(&mut queued.leave, Box::pin(std::future::pending())),
            None => self.place(begun, None),
        };
        loop {
            match place.await {
                Ok(grant) => {
                    self.pressed.grant = Some(grant);
                    return Ok(());
                }
                Err(short) if begun.elapsed() >= STOP_WITHIN => {
                    let name = &self.proc.name;
                    let what = format!("{name} cannot be woken to end in order");
                    let Refusal { message, .. } = short.refusal(&what, &self.proc.shared.pressure);
                    let message = format!("{message}; `kip stop --grace 0s {name}` ends it as it sleeps");
                    let again = self.place(Instant::now(), Some(FIRST_PAUSE));
                    if let Some(queued) = &mut self.pressed.queued {
                        queued.leave = again;
                    }
                    return Err(Refusal::new(Code::Exhausted, message));
                }
                Err(_) => place = self.place(Instant::now(), Some(FIRST_PAUSE)),
            }
        }
    }

    /// Goes to sleep for others, unless it is wanted awake.
    pub(super) async fn relieve(&mut self, to: Tier, cause: String) -> Result<Relieved, Refusal> {
        // What happened since the last sample counts.
        self.sample();
        let (quiet, hibernates) = match (&self.record.state, self.phase.running()) {
            (State::Hot { .. }, Some(running)) => {
                (running.idle.quiet(Instant::now()) >= QUIET, to == Tier::Hibernated && !running.no_hibernation)
            }
            (State::Hibernated { .. }, _) => (to == Tier::Parked && !self.pressed.waits(), false),
            _ => (false, false),
        };
        let stays = self.proc.spec().timing.stays_awake() || self.kept_awake.load(Ordering::SeqCst);
        if !quiet || stays || self.tickets.load(Ordering::SeqCst) > 0 {
            return Ok(Relieved::Declined);
        }
        let ticks = if hibernates { None } else { Some(self.ticks_if_parked(By::Kip).await) };
        if ticks.is_some_and(|ticks| self.goes_last(ticks)) {
            return Ok(Relieved::Declined);
        }
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Pressure, format!("put to sleep by {cause}"));
        self.pressed.sleep_cause = Some(cause);
        // What cannot be hibernated may still be parked.
        let slept = match hibernates && self.hibernate().await.is_ok() {
            true => Ok(Relieved::Asleep),
            false => self.park_for_room(ticks).await,
        };
        self.pressed.sleep_cause = None;
        slept
    }
}

fn refuse(command: TaskCommand, refusal: &Refusal) {
    match command {
        TaskCommand::Wake { reply, .. } => drop(reply.send(Err(refusal.clone()))),
        TaskCommand::KeepAwake { reply, .. } => drop(reply.send(Err(refusal.clone()))),
        _ => unreachable!("only these begin with a wake"),
    }
}
