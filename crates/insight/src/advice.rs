//! How a clone would best be made (paper S, section IV-C): a hot clone has what its source has in
//! memory, which is no help where that is what the source does not need.

use kip_engine::blocking::blocking;
use kip_supervisor::task::Handle;
use kip_types::api::clone::{CloneAdvice, CloneMethod};
use kip_types::{State, VolumeSource};
use std::time::{Duration, Instant};

/// How long one that runs is watched.
const WATCHED: Duration = Duration::from_millis(500);
/// Bytes that a source reads again, a second, above which it thrashes: less than a disk without
/// flash can read at random, and more than a source that has what it needs.
const THRASHES: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// What is known of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SourceFacts {
    /// There is a template of its kind.
    has_template: bool,
    /// It could leave one: it has no volume that it can write to.
    can_leave_one: bool,
    is_stopped: bool,
    /// Bytes that it reads again, a second; none of one that is not watched.
    rereads: Option<u64>,
}

/// What a clone begins from best, why, and what would be better.
#[derive(Debug, PartialEq, Eq)]
struct CloneChoice {
    method: CloneMethod,
    why: String,
    better: Option<String>,
}

/// The one rule of `--method auto`, of `--explain`, of `kip why` and of replicas.
fn choose(name: &str, facts: SourceFacts) -> CloneChoice {
    let SourceFacts { has_template, can_leave_one, is_stopped, rereads } = facts;
    let thrashes = rereads.unwrap_or(0) > THRASHES;
    let (method, why) = match () {
        () if has_template => (CloneMethod::Warm, "there is a template of its kind".to_owned()),
        () if is_stopped => (CloneMethod::Cold, "it does not run, and has no memory".to_owned()),
        () if thrashes => {
            let mib = rereads.unwrap_or(0) as f64 / f64::from(1 << 20);
            let why = format!("it thrashes: it reads {mib:.1} MiB a second again that was pushed out of memory");
            (CloneMethod::Cold, why)
        }
        () => (CloneMethod::Hot, "there is no template of its kind, and it does not thrash".to_owned()),
    };
    let better = match method {
        _ if !can_leave_one => None,
        CloneMethod::Cold => {
            Some("a template would spare clones the start: `kip run --template auto` leaves one".to_owned())
        }
        // A sleeper does not stand still for a clone.
        CloneMethod::Hot if rereads.is_some() => {
            Some(format!("a template would spare it the moment in which it stands still: `kip template take {name}`"))
        }
        CloneMethod::Hot | CloneMethod::Warm | CloneMethod::Auto => None,
    };
    CloneChoice { method, why, better }
}

/// What a clone of a proc begins from best. Watches one that runs, and has no template, for
/// half a second, and wakes none.
pub async fn advice(source: &Handle, has_template: bool) -> CloneAdvice {
    let state = source.status.borrow().record.state.clone();
    let proc = &source.proc;
    let rereads = match state {
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
    let spec = proc.spec();
    let facts = SourceFacts {
        has_template,
        can_leave_one: spec.volumes.iter().all(|v| v.read_only || v.source == VolumeSource::Secrets),
        is_stopped: matches!(state, State::Stopped { .. } | State::Restarting { .. }),
        rereads,
    };
    let CloneChoice { method, why, better } = choose(spec.name.as_str(), facts);
    CloneAdvice {
        name: (*proc.name).clone(),
        method,
        why,
        better,
        has_template,
        memory_bytes: memory_bytes.await,
        limit_bytes: spec.limits.memory_bytes,
        reread_bytes_per_s: rereads,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_goes_before_memory_and_memory_that_helps_before_a_start() {
        let facts = SourceFacts { has_template: false, can_leave_one: true, is_stopped: false, rereads: Some(0) };
        let told = |facts: SourceFacts| {
            let CloneChoice { method, why, better } = choose("web", facts);
            (method, why, better.unwrap_or_default())
        };
        let (method, why, better) = told(facts);
        assert!(method == CloneMethod::Hot && why.ends_with("it does not thrash"));
        assert!(better.ends_with("`kip template take web`"), "{better}");
        assert_eq!(told(SourceFacts { rereads: None, ..facts }).2, "", "a sleeper");
        let (method, why, better) = told(SourceFacts { rereads: Some(3 << 20), ..facts });
        assert!(method == CloneMethod::Cold && why.contains("reads 3.0 MiB a second") && better.contains("the start"));
        let (method, why, _) = told(SourceFacts { is_stopped: true, rereads: None, ..facts });
        assert!(method == CloneMethod::Cold && why.contains("does not run"));
        let with = SourceFacts { has_template: true, is_stopped: true, rereads: None, ..facts };
        assert!(told(with).0 == CloneMethod::Warm && told(with).2.is_empty());
        assert_eq!(told(SourceFacts { can_leave_one: false, ..facts }).2, "", "it cannot leave one");
    }
}
