//! How a clone would best be made (paper S, section IV-C): a hot clone has what its source has in
//! memory, which is no help where that is what the source does not need.

use kip_engine::blocking::blocking;
use kip_supervisor::task::Handle;
use kip_types::State;
use kip_types::api::clone::{CloneAdvice, CloneMethod};
use std::time::{Duration, Instant};

/// How long one that runs is watched.
const WATCHED: Duration = Duration::from_millis(500);
/// Bytes that a source reads again, a second, above which it thrashes: less than a disk without
/// flash can read at random, and more than a source that has what it needs.
const THRASHES: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// What a clone of a proc begins from best. Watches one that runs, and has no template, for
/// half a second, and wakes none.
pub async fn advice(source: &Handle, has_template: bool) -> CloneAdvice {
    let state = source.status.borrow().record.state.clone();
    let proc = &source.proc;
    let reread_bytes_per_s = match state {
        State::Hot { .. } if !has_template => {
            let (before, began) = (proc.cgroup.refaults(), Instant::now());
            tokio::time::sleep(WATCHED).await;
            let pages = proc.cgroup.refaults().saturating_sub(before);
            Some((pages as f64 * PAGE as f64 / began.elapsed().as_secs_f64()) as u64)
        }
        _ => None,
    };
    let (of, status) = (source.proc.clone(), source.status.borrow().clone());
    let memory_bytes = blocking(move || match status.record.state.tier() {
        Some(kip_types::Tier::Hot) => of.cgroup.held_bytes(),
        _ => status.record.last_sleep.as_ref().and_then(|sleep| sleep.own_bytes).unwrap_or(0),
    });
    let rereads = reread_bytes_per_s.unwrap_or(0);
    let (method, why) = match state {
        _ if has_template => (CloneMethod::Warm, "there is a template of its kind".to_owned()),
        State::Stopped { .. } | State::Restarting { .. } => {
            (CloneMethod::Cold, "it does not run, and has no memory".to_owned())
        }
        _ if rereads > THRASHES => {
            let mib = rereads as f64 / f64::from(1 << 20);
            let why = format!("it thrashes: it reads {mib:.1} MiB a second again that was pushed out of memory");
            (CloneMethod::Cold, why)
        }
        _ => (CloneMethod::Hot, "there is no template of its kind, and it does not thrash".to_owned()),
    };
    CloneAdvice {
        name: (*proc.name).clone(),
        method,
        why,
        has_template,
        memory_bytes: memory_bytes.await,
        limit_bytes: proc.spec().limits.memory_bytes,
        reread_bytes_per_s,
    }
}
