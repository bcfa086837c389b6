//! A proc's spec is changed while the proc exists: limits, times, ports, labels, the restart
//! policy, the way to end. Neither wakes the proc nor keeps it awake.
//!
//! The spec is on disk before its limits hold. A crash in between leaves the new spec, and the next
//! daemon sets the limits and publishes the ports (`recover`). What is refused changes nothing.

use super::*;
use kip_engine::blocking::blocking;
use kip_engine::ports;
use kip_sandbox::cgroup::CgroupError;
use kip_types::api::{UpdateRequest, updated_fields};
use kip_types::spec::Timing;
use kip_types::{Limits, Spec};

impl Task {
    pub(super) async fn update(&mut self, change: &UpdateRequest) -> Result<(), Refusal> {
        self.refuse_if_elsewhere()?;
        let is = self.proc.spec();
        let mut becomes = Spec::clone(&is);
        change.apply(&mut becomes);
        if becomes == *is {
            return Ok(());
        }
        if let Some(message) = becomes.outside_sandbox() {
            return Err(Refusal::new(Code::Invalid, format!("{} stays as it is: {message}", self.proc.name)));
        }
        if becomes.ports != is.ports && matches!(self.record.state, State::Restarting { .. }) {
            let name = &self.proc.name;
            let message = format!("{name} is about to be started again, on the ports that it has");
            return Err(Refusal::new(Code::State, message)
                .with_hint(format!("`kip stop {name}` first, or try again when it runs")));
        }
        let (proc, record, before, after) =
            (Arc::clone(&self.proc), self.record.clone(), Arc::clone(&is), becomes.clone());
        let ports = blocking(move || {
            refuse_too_little(&proc, &record, &before.limits, &after.limits)?;
            write_spec(&proc, &after)?;
            fault::reach("update-written");
            if before.limits != after.limits {
                limit(&proc, &after.limits).inspect_err(|_| take_back(&proc, &before))?;
            }
            // One that is stopped gets its ports when it starts.
            let changes = before.ports != after.ports && record.state.tier().is_some();
            let changed = changes.then(|| ports::change(&proc, &after, &record.ports)).transpose();
            changed.inspect_err(|_| take_back(&proc, &before))
        })
        .await?;
        if let Some(ports) = ports {
            fault::reach("update-ports");
            self.keep(Record { ports, ..self.record.clone() });
            ports::let_go_of_others(&self.proc, &self.record.ports);
        }
        let fields = updated_fields(&is, &becomes);
        let (was, timing) = (is.timing, becomes.timing);
        self.proc.set_spec(becomes);
        self.go_by(&was, &timing);
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Updated, fields.join(", "));
        Ok(())
    }

    /// Has what was decided by the old times decided anew.
    pub(super) fn go_by(&mut self, was: &Timing, timing: &Timing) {
        if was == timing {
            return;
        }
        let now = Instant::now();
        match &mut self.phase {
            Phase::Running(running) => {
                (running.next_sample, running.not_before) = (now, now);
                running.no_hibernation &= was.hibernate == timing.hibernate;
                if was.dry_run != timing.dry_run {
                    running.dry_run = timing.dry_run.then(|| DryRun::new(now));
                }
            }
            Phase::Hibernated(hibernated) => hibernated.parks_at = parks_at(hibernated.parks_at, was, timing, now),
            // When it is archived is worked out each time.
            Phase::Parked(_) | Phase::Down | Phase::Gone => {}
        }
    }
}

/// When a hibernated proc is parked that was to be parked at `at` by its old times.
fn parks_at(at: Option<Instant>, was: &Timing, timing: &Timing, now: Instant) -> Option<Instant> {
    if timing.stays_awake() {
        return None;
    }
    let since = at.and_then(|at| at.checked_sub(Duration::from_millis(was.park_after_ms))).unwrap_or(now);
    since.checked_add(Duration::from_millis(timing.park_after_ms))
}

/// Less memory than it has would not be a limit, or would end the program at once.
fn refuse_too_little(proc: &Proc, record: &Record, is: &Limits, becomes: &Limits) -> Result<(), Refusal> {
    let lower = becomes.memory_bytes.filter(|bytes| is.memory_bytes.is_none_or(|is| *bytes < is));
    match lower {
        Some(limit) if limit < memory_of(proc, record) => Err(too_little(proc, record, limit)),
        _ => Ok(()),
    }
}

/// Bytes that it has, or takes when it wakes.
fn memory_of(proc: &Proc, record: &Record) -> u64 {
    let asleep = || {
        let sleep = record.last_sleep.as_ref();
        sleep.map_or(0, |sleep| sleep.own_bytes.unwrap_or(sleep.bytes_written))
    };
    match record.state.tier() {
        None => 0,
        Some(Tier::Hot) => proc.cgroup.held_bytes(),
        Some(Tier::Hibernated) => proc.cgroup.held_bytes().max(asleep()),
        Some(Tier::Parked | Tier::Archived) => asleep(),
    }
}

fn too_little(proc: &Proc, record: &Record, limit: u64) -> Refusal {
    let (name, has, limit) = (&proc.name, memory_of(proc, record).div_ceil(1 << 20), limit >> 20);
    let uses = if record.state.tier() == Some(Tier::Hot) { "uses" } else { "slept with" };
    let message = format!("{name} {uses} {has} MiB of memory: it cannot be limited to {limit} MiB");
    Refusal::new(Code::State, message).with_hint(format!("`kip stop {name}` first, or ask for more"))
}

pub(super) fn write_spec(proc: &Proc, spec: &Spec) -> Result<(), Refusal> {
    record::write_spec(&proc.dir, spec).map_err(|e| {
        Refusal::new(Code::Exhausted, format!("the spec of {} cannot be recorded: {}", proc.name, chain(&e)))
    })
}

fn limit(proc: &Proc, limits: &Limits) -> Result<(), Refusal> {
    // A proc without a cgroup gets its limits when one is made.
    if !proc.cgroup.exists() {
        return Ok(());
    }
    proc.cgroup.set_limits(limits).map_err(|e| {
        let code = if matches!(e, CgroupError::TooSmall { .. }) { Code::Invalid } else { Code::State };
        Refusal::new(code, format!("{} cannot have these limits: {}", proc.name, chain(&e)))
    })
}

fn take_back(proc: &Proc, spec: &Spec) {
    let limited = limit(proc, &spec.limits);
    if let Err(refusal) = limited.and_then(|()| write_spec(proc, spec)) {
        tracing::warn!(proc = %proc.name, error = refusal.message, "an update that failed is not taken back whole");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_time_counts_from_the_same_moment() {
        let now = Instant::now();
        let after = |park_after_ms| Timing { park_after_ms, ..Timing::default() };
        let slept = now + Duration::from_secs(100);
        let (at, now) = (Some(slept + Duration::from_millis(5000)), slept + Duration::from_secs(1));
        assert_eq!(parks_at(at, &after(5000), &after(9000), now), Some(slept + Duration::from_millis(9000)));
        assert_eq!(parks_at(at, &after(5000), &after(10), now), Some(slept + Duration::from_millis(10)));
        let never = Timing { never: true, ..after(5000) };
        assert_eq!(parks_at(at, &after(5000), &never, now), None);
        assert_eq!(parks_at(None, &never, &after(7), now), Some(now + Duration::from_millis(7)));
        assert!(parks_at(at, &after(5000), &after(u64::MAX), now).is_none_or(|at| at > now));
    }
}
