//! A proc from the store, into this data directory: which one, and the record of what is going to
//! be done.
//!
//! A daemon that may read the store and has the realm's keys may take over a proc that runs
//! nowhere. Intent first: a record of an archived proc that is not established, with its id and
//! what it wakes from, is complete before the head in the store is touched. The rest is
//! [`kip_supervisor::task`]'s. After a crash the next daemon looks at the head: if that is this
//! data directory's, the daemon goes on, if not, it removes the record.

use crate::worker::Worker;
use crate::worker::taken;
use kip_archive::head::Head;
use kip_engine::blocking::blocking;
use kip_engine::fd_store::FdStore;
use kip_engine::host::Proc;
use kip_journal::meter::Meter;
use kip_net::prepared::PreparedNetwork;
use kip_offload::{Whole, processor};
use kip_records::body::Body;
use kip_records::record::{Durability, RecordError};
use kip_records::state::Record;
use kip_supervisor::probe::Listeners;
use kip_supervisor::task::{self, ArchivedNote, Handle, TaskCommand};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::{Code, Refusal};
use kip_types::chain;
use kip_types::{ProcName, Spec, State};
use std::sync::Arc;

/// The first process that pid 1 makes, as numbered inside.
const PROGRAM: u32 = 2;

/// Volumes that a refusal names.
const NAMED: usize = 3;

/// It wakes only where its volumes are.
fn pinned(name: &ProcName, head: &Head, body: &Body) -> Refusal {
    let mut needs = body.pinned_by();
    let more = needs.len().saturating_sub(NAMED);
    needs.truncate(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let message = format!(
        "{name} stays in data directory {}: its volumes are there ({}{more}); wake it there",
        head.owner.id,
        needs.join(", ")
    );
    Refusal::new(Code::State, message)
}

impl Worker {
    /// Takes a proc over that is not here, and returns its name here. `unknown`: what is said if
    /// there is no store.
    pub(crate) async fn take_over(
        &self,
        name: &ProcName,
        id: Option<&str>,
        unknown: Refusal,
    ) -> Result<ProcName, Refusal> {
        let Some(archive) = self.machine.archive.clone() else { return Err(unknown) };
        let (head, front) = archive.free(id.unwrap_or(name.as_str()), &unknown).await?;
        // An id in the place of a name is no name.
        let by_id = id.is_none() && head.name != *name;
        let name = if by_id { head.name.clone() } else { name.clone() };
        let failed = |message: String| Refusal::new(Code::Failed, format!("{name} cannot be taken over: {message}"));
        // All of it is read: a proc that cannot be read here is left to a daemon that can read it.
        let Whole { manifest, keys, stored_bytes } =
            archive.read_to_take(head.proc, front).await.map_err(|e| failed(chain(&e)))?;
        archive.check_engine(&manifest.engine).map_err(|e| failed(chain(&e)))?;
        processor::check(&manifest.cpu_features).map_err(|e| failed(chain(&e)))?;
        let spec: Spec = serde_json::from_value(manifest.spec).map_err(|e| failed(format!("its spec: {e}")))?;
        let body: Body = serde_json::from_value(manifest.body).map_err(|e| failed(format!("its manifest: {e}")))?;
        if !spec.volumes.is_empty() || !body.volumes.is_empty() {
            return Err(pinned(&name, &head, &body));
        }
        let archived = ArchivedNote { front, keys, body };
        if archived.body.home.is_none() {
            return Err(failed(
                "it was archived by an older Kip; wake it where it was, and archive it again".to_owned(),
            ));
        }
        let _in_use = self.has_layers(&spec).await.map_err(|refusal| {
            Refusal::new(refusal.code, format!("{name} cannot be taken over: {}", refusal.message))
        })?;
        let (machine, spec) =
            (Arc::clone(&self.machine), Spec { name: name.clone(), lineage: None, replica_of: None, ..spec });
        let claimed_name = self.claim_name(&name)?;
        let key = self.key_for(&name)?;
        let recorded = blocking(move || {
            let prepared = machine.prepared_networks.take(spec.sandbox.network());
            let PreparedNetwork { slot, net } = prepared.map_err(|e| Refusal::new(Code::Exhausted, chain(&e)))?;
            // It gets another when it is known to be ours, as after a reboot.
            drop(net);
            let new = Record::new(slot.number(), machine.base_of(&spec));
            let state = State::Archived { generation: front.generation };
            let record = Record { state, program: PROGRAM, ..new };
            let text = serde_json::to_vec(&archived).expect("it is plain data");
            let written = machine.records.prepare(&key, &spec, &record, Durability::Fsync).and_then(|new| {
                new.add(kip_offload::ID, head.proc.to_string().as_bytes())?;
                new.add(kip_offload::ARCHIVED, &text)?;
                new.publish()
            });
            written.map_err(|e| {
                let _ = machine.pool.release(&[slot]);
                machine.prepared_networks.free(slot);
                match e {
                    RecordError::Exists { .. } => taken(&spec.name),
                    other => {
                        Refusal::new(Code::Exhausted, format!("{} cannot be recorded: {}", spec.name, chain(&other)))
                    }
                }
            })?;
            let fd_store = FdStore::new(&key, Arc::clone(&machine.keeper));
            let meter = Meter::new(now_ms());
            meter.enter(record.state.tier());
            meter.level(stored_bytes);
            let proc = Proc::new(&machine, key, spec, slot, record.base.clone(), fd_store, meter);
            Ok::<_, Refusal>((proc, record))
        });
        let (proc, record) = recorded.await?;
        fault::reach("adopt-recorded");
        let handle = self.adopt(proc, record, None, Listeners::new());
        drop(claimed_name);
        self.notify_network(&handle.proc.spec()).await;
        if handle.proc.spec().remove {
            tokio::spawn(self.clone().remove_at_end(handle.clone(), false));
        }
        let took = handle.ask(|reply| TaskCommand::TakeOver { only_if_ours: false, reply }).await;
        self.forget_if_gone(&handle).await;
        took.map(|()| name)
    }

    /// One whose taking over could not be finished.
    pub(crate) async fn take_over_again(&self, handle: &Handle) -> Result<(), Refusal> {
        let half_taken = {
            let status = handle.status.borrow();
            matches!(status.record.state, State::Archived { .. }) && !status.record.established
        };
        if !half_taken {
            return Ok(());
        }
        let took = handle.ask(|reply| TaskCommand::TakeOver { only_if_ours: false, reply }).await;
        self.forget_if_gone(handle).await;
        took
    }

    /// After a start of the daemon: what the last one had begun.
    pub(crate) async fn finish_taking_over(self, handle: Handle) {
        if let Err(refusal) = task::finish_taking_over(&handle).await {
            tracing::info!(proc = %handle.proc.name, reason = refusal.message, "not taken over");
        }
        self.forget_if_gone(&handle).await;
    }

    /// The task of a proc that is removed ends right after its answer.
    async fn forget_if_gone(&self, handle: &Handle) {
        if !handle.proc.dir.exists() {
            handle.inbox.closed().await;
            self.forget(&handle.proc);
        }
    }
}
