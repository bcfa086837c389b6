//! A proc that stands still while its files are copied (`kip backup`, `kip clone`): asleep, if it
//! can be, and nothing that comes meanwhile is looked at before that is over.

use super::sleep::Unwoken;
use super::*;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::park::{CopyDone, CopySteps};
use kip_sys::fault;
use std::sync::mpsc::{Receiver, Sender, channel};

/// How a proc stands.
#[derive(Debug)]
pub struct Stilled {
    /// Its record.
    pub record: Record,
    /// Why it goes on running.
    pub runs: Option<String>,
    /// It ran before, and is woken afterwards.
    pub was_awake: bool,
}

/// What a proc stands still for.
#[derive(Debug, Clone, Copy)]
pub struct StillFor {
    /// In a word.
    pub purpose: &'static str,
    /// One that was awake is not woken afterwards.
    pub stays: bool,
    /// One that is archived comes back from the store, and is parked from then on.
    pub fetches: bool,
}

/// How a proc is while its files are looked at or changed.
#[derive(Debug)]
pub enum FilesHeld {
    /// It runs or is hibernated, and stays so as long as the ticket lives.
    Awake(Ticket),
    /// Its processes are not there, and the task waits if it must.
    Asleep(State),
}

/// Lets a proc go on when it is dropped.
#[derive(Debug)]
pub struct Still(#[allow(dead_code, reason = "it is dropped, that is all")] oneshot::Sender<()>);

impl Still {
    /// One, and what its proc is to wait for.
    pub fn new() -> (Still, oneshot::Receiver<()>) {
        let (still, over) = oneshot::channel();
        (Still(still), over)
    }
}

/// What is done with a proc that is copied while it runs.
pub struct CopyRunning {
    /// The steps.
    pub steps: Box<dyn CopySteps + Send>,
    /// Gets it while its memory is still copied, if the copy may run then: it is one only if the
    /// whole succeeds.
    pub early: Option<oneshot::Sender<Copied>>,
}

/// The steps of a copy of which such a record will be true.
pub(super) struct StepsOf<'a> {
    pub(super) copy: &'a mut CopyRunning,
    pub(super) record: &'a Record,
}

impl CopySteps for StepsOf<'_> {
    fn files(&mut self) -> Result<(), String> {
        self.copy.steps.files()
    }

    fn is_kept(&self) -> bool {
        self.copy.steps.is_kept()
    }

    fn is_clone(&self) -> bool {
        self.copy.steps.is_clone()
    }

    fn generation(&mut self, generation: Generation) -> Result<(), String> {
        self.copy.steps.generation(generation)
    }

    fn may_run(&mut self, CopyDone { still }: CopyDone) -> Option<Receiver<()>> {
        let early = self.copy.early.take()?;
        let (runs, closed) = channel();
        // A request that was given up waits for neither.
        drop(early.send(Copied { record: self.record.clone(), still, runs: Some(runs) }));
        Some(closed)
    }
}

impl std::fmt::Debug for CopyRunning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CopyRunning")
    }
}

/// A proc that runs on, and was copied.
#[derive(Debug)]
pub struct Copied {
    /// What would be recorded of it if it slept in the generation that was copied.
    pub record: Record,
    /// How long it stood still.
    pub still: Duration,
    /// To be dropped when the copy runs, if that is still being copied.
    pub runs: Option<Sender<()>>,
}

impl Task {
    /// See [`TaskCommand::CopyRunning`]. None if it does not run, is not ready, has hooks, which
    /// are for sleeps, or has memory that cannot be held: a part of it may have been done then.
    pub(super) async fn copy_running(&mut self, copy: CopyRunning) -> Result<Option<Copied>, Refusal> {
        let runs = matches!(self.record.state, State::Hot { .. }) && self.starting.is_none();
        if !runs || self.proc.spec().hooks.are_of_sleep() {
            return Ok(None);
        }
        self.refuse_if_in_use(Tier::Parked).await?;
        let (_, ticks) = self.ticks_if_parked(By::Kip).await;
        let before = self.record.ticks;
        let copied = self.park_or_copy(ticks, By::Kip, Some(copy)).await;
        self.record.ticks = before;
        copied
    }

    /// Parks it if it runs, answers, and waits for the end. Then it is woken if it was awake,
    /// unless it stays asleep.
    pub(super) async fn stand_still(&mut self, what_for: StillFor, over: oneshot::Receiver<()>, reply: Reply<Stilled>) {
        let StillFor { purpose, stays, fetches } = what_for;
        let was_awake = matches!(self.record.state, State::Hot { .. });
        // A daemon that finds it asleep wakes it again, as one does after the machine's rest.
        self.record.wakes_again |= stays && was_awake;
        let runs = match &self.record.state {
            State::Hot { .. } | State::Hibernated { .. } if self.starting.is_some() => {
                Some(format!("{} is not ready yet", self.proc.name))
            }
            State::Hot { .. } | State::Hibernated { .. } => {
                self.pressed.sleep_cause = Some(format!("a {purpose}"));
                self.park_on_request(By::Kip).await.err().map(|refusal| refusal.message)
            }
            // It is parked from then on: what is copied has to be here.
            State::Archived { .. } if fetches => match self.fetch().await {
                Ok(()) => {
                    self.phase.parked_mut().since = Instant::now();
                    None
                }
                Err(Unwoken { refusal, .. }) => Some(refusal.message),
            },
            _ => None,
        };
        let stands = runs.is_none();
        self.record.wakes_again &= stands;
        self.publish();
        if reply.send(Ok(Stilled { record: self.record.clone(), runs, was_awake })).is_ok() && stands {
            fault::reach("backup-still");
            // However it ends.
            let _ = over.await;
        }
        if was_awake && !stays && matches!(self.record.state, State::Parked { .. }) {
            let now = Instant::now();
            self.wake_in_turn(WakeCause::Request(WakeCommand::StoodStill(purpose)), now, now, false).await;
        }
    }

    /// Answers how it is and, if it is asleep and must not be started or woken meanwhile, waits for
    /// the end. A change must not meet an upload of the files.
    pub(super) async fn hold_files(&mut self, change: bool, over: oneshot::Receiver<()>, reply: Reply<FilesHeld>) {
        let name = &self.proc.name;
        let refuse = |message: String| Err(Refusal::new(Code::State, message));
        let held = match &self.record.state {
            State::Hot { .. } | State::Hibernated { .. } => {
                self.tickets.fetch_add(1, Ordering::SeqCst);
                Ok(FilesHeld::Awake(Ticket(Arc::clone(&self.tickets))))
            }
            State::Parked { .. } if change && self.storing.is_some() => {
                refuse(format!("{name} is on its way to the store: wake it first (`kip wake {name}`)"))
            }
            _ if self.proc.dir.join(previous::ASIDE).exists() => refuse(format!(
                "{name} fell back to older files, and a start puts the newest ones back: start it first"
            )),
            State::Parked { .. } | State::Stopped { .. } => Ok(FilesHeld::Asleep(self.record.state.clone())),
            State::Archived { .. } => {
                refuse(format!("{name} is archived, and its files are in the store: wake it first (`kip wake {name}`)"))
            }
            state => refuse(format!("{name} is {}, and its files cannot be copied now: try again", state.name())),
        };
        let reads = !change && self.proc.held_mounts(true).or_else(|| self.proc.held_mounts(false)).is_some();
        let waits = matches!(&held, Ok(FilesHeld::Asleep(_))) && !reads;
        if reply.send(held).is_ok() && waits {
            // However it ends.
            let _ = over.await;
        }
    }
}
