//! Before a machine goes down: all procs are parked, so that none is lost with its memory, and none
//! is woken any more. The next daemon wakes those that were awake, once all sockets listen again.
//!
//! Crash in the middle: a parked proc is parked, and its record says whether it was awake.

use crate::worker::Worker;
use futures_util::StreamExt as _;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_supervisor::task::{Handle, TaskCommand};
use kip_types::{ProcName, State};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn at_once() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Worker {
    /// Parks all procs that can be parked, and lets none wake any more: this daemon is about to
    /// end. Returns which procs sleep, and which run on and why. A proc that has not begun to be
    /// parked `within` that time is not parked.
    pub(crate) async fn come_to_rest(&self, within: Duration) -> (Vec<ProcName>, BTreeMap<ProcName, String>) {
        self.machine.resting.store(true, Ordering::SeqCst);
        let until = Instant::now() + within;
        let resting = futures_util::stream::iter(self.handles()).map(|handle| async move {
            let rested = handle.ask(|reply| TaskCommand::Rest { until, reply });
            let rested = tokio::time::timeout_at(until.into(), rested).await;
            (handle.proc.name.clone(), rested)
        });
        let (mut asleep, mut awake) = (Vec::new(), BTreeMap::new());
        for (name, rested) in resting.buffer_unordered(at_once()).collect::<Vec<_>>().await {
            match rested {
                Ok(Ok(true)) => asleep.push(name),
                Ok(Ok(false)) => {}
                Ok(Err(refusal)) => drop(awake.insert(name, refusal.message)),
                Err(_) => drop(awake.insert(name, "it was not parked in time".to_owned())),
            }
        }
        asleep.sort();
        (asleep, awake)
    }
}

/// Wakes the procs that were awake when the last daemon parked all. A proc that is refused, for
/// want of memory say, wakes by its traffic.
pub(crate) async fn wake_again(handles: Vec<Handle>) {
    let waking = futures_util::stream::iter(handles).map(|handle| async move {
        let woken = handle.ask(|reply| TaskCommand::Wake { cause: WakeCause::Request(WakeCommand::Up), reply }).await;
        if let Err(refusal) = woken {
            tracing::warn!(proc = %handle.proc.name, error = refusal.message, "it was awake before, and is not woken now");
        }
    });
    waking.buffer_unordered(at_once()).for_each(|()| async {}).await;
}

/// Whether it is to be woken by [`wake_again`].
pub(crate) fn was_awake(handle: &Handle) -> bool {
    let status = handle.status.borrow();
    // A trial of an earlier daemon is about to go.
    let trial = handle.proc.spec().trial;
    !trial && status.record.wakes_again && matches!(status.record.state, State::Parked { .. } | State::Archived { .. })
}
