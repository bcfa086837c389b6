//! Taking over: a proc from the store becomes this data directory's, and one of this data
//! directory's is seen to be another's.
//!
//! The worker has recorded what is to come: an archived proc that is not established. Its steps
//! here, each of which may be repeated: what it needs on this machine is made and held, the head is
//! swapped, its files come, it is established. Before the swap it is free in the store and nothing
//! of it is here that counts; after it, it is here and nowhere else.

use super::archive::FETCH_AGAIN;
use super::phase::Phase;
use super::{Task, TaskCommand, archived};
use kip_engine::blocking::blocking;
use kip_engine::plans::take_custody;
use kip_engine::renew;
use kip_engine::stop::{self, NetworkFate};
use kip_offload::Archive;
use kip_records::record;
use kip_records::state::Record;
use kip_sys::fault;
use kip_types::State;
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::chain;
use kip_types::lifecycle::Input;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A store that does not answer is not waited for longer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// How far it got.
enum Undone {
    /// It is not ours: nothing is to be kept here.
    NotOurs(String),
    /// It is, or may be.
    Ours(String),
}

impl Task {
    /// See [`TaskCommand::TakeOver`]. With the answer: whether all of it is removed here.
    pub(super) async fn take_over(&mut self, only_if_ours: bool) -> (Result<(), Refusal>, bool) {
        if self.record.established {
            return (Ok(()), false);
        }
        let name = self.proc.name.clone();
        let failed =
            |message: String| Err(Refusal::new(Code::Failed, format!("{name} cannot be taken over: {message}")));
        match self.try_take_over(only_if_ours).await {
            Ok(()) => (Ok(()), false),
            Err(Undone::Ours(message)) => {
                (failed(format!("{message}; it is kept here, `kip wake {name}` tries again")), false)
            }
            Err(Undone::NotOurs(message)) => match self.remove_all().await {
                Ok(()) => (failed(message), true),
                Err(refusal) => (failed(format!("{message}; {}", refusal.message)), false),
            },
        }
    }

    async fn try_take_over(&mut self, only_if_ours: bool) -> Result<(), Undone> {
        let no_store = || Undone::Ours("there is no store: `kip up --store URL`".to_owned());
        let archive = self.proc.shared.archive.clone().ok_or_else(no_store)?;
        let known = archived(&self.proc).map_err(Undone::NotOurs)?;
        let id = archive.id_of(&self.proc.dir).map_err(|e| Undone::NotOurs(chain(&e)))?;
        let silent = |_| Undone::Ours("the store does not answer".to_owned());
        if only_if_ours {
            let ours = tokio::time::timeout(ANSWERS_WITHIN, archive.is_ours(id, known.front)).await.map_err(silent)?;
            if !ours.map_err(|e| Undone::Ours(chain(&e)))? {
                return Err(Undone::NotOurs("it was not begun when the daemon ended".to_owned()));
            }
        }
        let (proc, earlier) = (Arc::clone(&self.proc), self.record.ports.clone());
        let body = known.body.clone();
        let renewed = blocking(move || renew::renew(&proc, &body, &earlier).map_err(|e| chain(&e))).await;
        let ports = match renewed {
            Ok(ports) => ports,
            Err(message) if only_if_ours => return Err(Undone::Ours(message)),
            Err(message) => return Err(Undone::NotOurs(message)),
        };
        fault::reach("adopt-held");
        let adopted = tokio::time::timeout(ANSWERS_WITHIN, archive.adopt(id, known.front)).await.map_err(silent)?;
        adopted.map_err(|e| if e.is_final() { Undone::NotOurs(chain(&e)) } else { Undone::Ours(chain(&e)) })?;
        fault::reach("adopt-headed");
        if let Err(message) = self.fetch_files(&archive, &known).await {
            // The proc has not run here: another data directory may have it.
            return Err(match archive.release(id, known.front).await {
                Ok(_) => Undone::NotOurs(message),
                Err(_) => Undone::Ours(message),
            });
        }
        fault::reach("adopt-files");
        let next = Record { ports, established: true, ..self.record.clone() };
        self.write(next, record::Durability::Fsync).map_err(|refusal| Undone::Ours(refusal.message))?;
        fault::reach("adopt-done");
        take_custody(&self.proc, &known.body);
        self.proc.shared.follow_output(&self.proc);
        if only_if_ours {
            self.begin_sleeping(&known.body);
        } else {
            // It is about to be woken. The ends of its connections would do that first, by another
            // way.
            self.phase.parked_mut().wait_until(Instant::now() + FETCH_AGAIN);
        }
        let detail = format!("from the store, {}", known.front);
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::TakenOver, detail);
        Ok(())
    }

    async fn fetch_files(
        &mut self,
        archive: &Arc<Archive>,
        known: &super::archive::ArchivedNote,
    ) -> Result<(), String> {
        let (proc, archive, front) = (Arc::clone(&self.proc), Arc::clone(archive), known.front);
        let then = known.body.home.as_ref().map_or(0, |home| home.first_id);
        blocking(move || {
            let id = archive.id_of(&proc.dir).map_err(|e| chain(&e))?;
            let place = proc.files.place().map_err(|e| chain(&e))?;
            archive.restore_files(id, front, &proc.dir, &place, (then, proc.first_id())).map_err(|e| chain(&e))
        })
        .await
    }

    /// A wake from the store has failed: if that is because another data directory has the proc, it
    /// is not here any more.
    pub(super) async fn notice_elsewhere(&mut self) -> Result<(), Refusal> {
        let Some(archive) = self.proc.shared.archive.clone() else { return Ok(()) };
        let Ok(id) = archive.id_of(&self.proc.dir) else { return Ok(()) };
        let Ok(Some(owner)) = archive.other_owner(id).await else { return Ok(()) };
        let taken_over_by = Some(owner.to_string());
        let next = self.record.after(Input::TakenOver).map_err(|e| self.unfit(&e))?;
        self.write(Record { taken_over_by, ports: Vec::new(), ..next }, record::Durability::Fsync)?;
        kip_engine::watches::unwatch_sockets(&self.proc);
        self.phase = Phase::Down;
        stop::release(&self.proc, NetworkFate::Removed).await;
        if let Err(e) = kip_snapshot::sweep(&self.proc.dir, None) {
            tracing::warn!(proc = %self.proc.name, error = chain(&e), "what is of no use any more stays on disk");
        }
        let refused = self.refuse_if_elsewhere();
        if let Err(refusal) = &refused {
            self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Elsewhere, refusal.message.clone());
        }
        refused
    }

    pub(super) fn refuse_if_elsewhere(&self) -> Result<(), Refusal> {
        if !matches!(self.record.state, State::Elsewhere { .. }) {
            return Ok(());
        }
        let by = self.record.taken_over_by.as_deref().unwrap_or("another");
        let name = &self.proc.name;
        let message = format!(
            "{name} is not here any more: data directory {by} has taken it over; `kip rm {name}` removes what is left"
        );
        Err(Refusal::new(Code::State, message))
    }
}

/// Asks a task to finish, or undo, what was under way when the last daemon ended.
pub async fn finish(handle: &super::Handle) -> Result<(), Refusal> {
    handle.ask(|reply| TaskCommand::TakeOver { only_if_ours: true, reply }).await
}
