//! The start of a proc, recorded.

use super::Task;
use kip_engine::blocking::blocking;
use kip_engine::start::{build, ready, refuse};
use kip_records::record;
use kip_records::state::Record;
use kip_sys::fault;
use kip_types::State;
use kip_types::api::{Code, Refusal};
use kip_types::lifecycle::Input;
use std::sync::Arc;

/// Starts the proc of the task; returns the host pid of its pid 1.
pub(super) async fn start(task: &mut Task, wait_ready: bool) -> Result<u32, Refusal> {
    fault::reach("start-recorded");
    let proc = Arc::clone(&task.proc);
    let prepared = task.prepared.take();
    let earlier = task.record.ports.clone();
    let starting = Arc::clone(&proc);
    let placing = starting.placing.lock().await;
    let (records, key) = (proc.shared.records.clone(), proc.key.clone());
    let (started, settled) = tokio::join!(
        blocking(move || build(&proc, prepared, &earlier, false)),
        blocking(move || records.settle(&key)),
    );
    let started = started?;
    settled.map_err(|e| refuse(Code::Exhausted, &task.proc, "its record cannot be synced", &e))?;
    let init_started = kip_sys::process::start_time(started.init).unwrap_or(0);
    let input = Input::Execed { init: started.init, init_started };
    let next = task.record.after(input).map_err(|e| Refusal::new(Code::State, e.to_string()))?;
    let next =
        Record { ports: started.ports, program: started.program, established: true, stands_aside: false, ..next };
    let written = task.proc.write_record(&next, record::Durability::Fsync);
    written.map_err(|e| refuse(Code::Exhausted, &task.proc, "its state cannot be recorded", &e))?;
    let before = std::mem::replace(&mut task.record, next);
    drop(placing);
    fault::reach("start-hot");
    if wait_ready && let Err(refusal) = ready(&task.proc, started.init).await {
        task.record.established = before.established;
        task.record.state = State::Starting;
        return Err(refusal);
    }
    Ok(started.init)
}
