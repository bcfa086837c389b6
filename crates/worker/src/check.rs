//! A trial of a proc before it is trusted: one like it, under a name of its own, sleeps and wakes
//! in each tier, and is looked at from outside before and after.
//!
//! It is alone ([`Spec::alone`]) unless that is asked otherwise: it dials no database, takes no
//! work from a queue, sends no mail, and no client finds it. It never writes to a volume of another
//! proc that is not stopped. What was not tried is said.
//!
//! The trial is an ordinary proc with a mark, [`Spec::trial`]. It is removed at the end, however
//! that comes; a daemon that finds one was killed in its middle and removes it.

mod connections;

use crate::worker::Worker;
use connections::{Held, Known};
use kip_engine::blocking::blocking;
use kip_engine::volumes::path_of;
use kip_offload::processor;
use kip_service::ProcService;
use kip_types::api::{
    CheckAnswer, CheckOperation, CheckRequest, CheckStep, CheckVerdict, CheckView, Code, Refusal, RemoveRequest,
    SleepRequest, WakeRequest,
};
use kip_types::chain;
use kip_types::life::Restart;
use kip_types::spec::{Clock, Hibernate, Protocol};
use kip_types::{Image, ProcName, Spec, State, Tier, VolumeSpec};
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A program with no sign that it is ready has to be quiet for this long before it is put to sleep;
/// after [`QUIET_WITHIN`] it is put to sleep all the same.
const QUIET_MS: u64 = 300;
/// One that has no port by which it shows that it has begun is quiet for so long.
const QUIET_AT_FIRST_MS: u64 = 1000;
const QUIET_WITHIN: Duration = Duration::from_secs(5);
/// One that wakes at once, for it was in the middle of something, is put to sleep again.
const SLEEPS: u32 = 5;
/// A program that does not survive its wake ends soon after it.
const AFTER_A_WAKE: Duration = Duration::from_millis(300);
/// A program whose owner does not say when it is ready listens within this time on each TCP port
/// that it declares.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);
/// The number of the next trial.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What ties such a proc to this machine.
fn pins(spec: &Spec) -> Vec<String> {
    let mut pins: Vec<String> = spec
        .volumes
        .iter()
        .map(|volume| format!("the volume {} at {} is here", volume.source, volume.target))
        .collect();
    if !spec.secrets.is_empty() {
        pins.push("its secrets are kept here".to_owned());
    }
    pins
}

/// What another machine has to have.
fn needs(spec: &Spec) -> Vec<String> {
    let mut needs =
        vec![format!("the other machine's processor needs these features: {}", processor::used_here().join(" "))];
    let files = match spec.image {
        Image::Oci(_) => "and the layers of its image",
        _ => {
            "files of the host that it has open or mapped go with it; those that it opens later are the other machine's"
        }
    };
    needs.push(files.to_owned());
    needs
}

/// Whether it can go on elsewhere.
fn moves(spec: &Spec, pinned: &[String], trial: &Trial) -> CheckVerdict {
    if !pinned.is_empty() {
        return CheckVerdict { answer: CheckAnswer::No, because: pinned.to_vec() };
    }
    let is_kept = |step: &&CheckStep| step.tier == Some(Tier::Parked) && !step.refused.is_empty();
    if let Some(step) = trial.steps.iter().find(is_kept) {
        let why = step.refused.join("; ");
        let because = vec![format!("only archived procs move, and this one cannot be archived: {why}")];
        return CheckVerdict { answer: CheckAnswer::No, because };
    }
    let (answer, tried) = match trial.fetched {
        Some(bytes) => {
            (CheckAnswer::Yes, format!("it went to the store, and {bytes} bytes came from there when it woke"))
        }
        None => {
            (CheckAnswer::Untried, "`kip check --to archived` archives and wakes the trial (needs a store)".to_owned())
        }
    };
    let mut because = vec![tried];
    because.extend(needs(spec));
    CheckVerdict { answer, because }
}

fn clones(spec: &Spec) -> CheckVerdict {
    let mut because = vec!["no trial is cloned: `kip clone` of the proc that runs says it".to_owned()];
    let written = spec.volumes.iter().filter(|volume| !volume.read_only);
    because.extend(written.map(|v| format!("copies of it would all write to the volume {} at {}", v.source, v.target)));
    if !spec.secrets.is_empty() {
        because.push("copies of it would have the same secrets".to_owned());
    }
    CheckVerdict { answer: CheckAnswer::Untried, because }
}

/// What a trial has shown so far.
#[derive(Default)]
struct Trial {
    steps: Vec<CheckStep>,
    untried: Vec<String>,
    /// What came from the store at the wake from there.
    fetched: Option<u64>,
    /// How the program treats connections while it is awake.
    known: Known,
}

fn done(step: CheckOperation, tier: Option<Tier>, us: u64, bytes: Option<u64>) -> CheckStep {
    CheckStep { step, tier, us: Some(us), bytes, refused: Vec::new() }
}

fn refused(step: CheckOperation, tier: Option<Tier>, refused: Vec<String>) -> CheckStep {
    CheckStep { step, tier, us: None, bytes: None, refused }
}

impl Worker {
    /// Makes the trial, and removes it. As [`kip_service::TrialService::check`].
    pub(crate) async fn try_out(&self, request: CheckRequest) -> Result<CheckView, Refusal> {
        let CheckRequest { mut run, to, network, .. } = request;
        let spec = &mut run.spec;
        let (pinned, clones) = (pins(spec), clones(spec));
        let (worker, volumes) = (self.clone(), spec.volumes.clone());
        blocking(move || worker.refuse_in_use(&volumes)).await?;
        spec.trial = true;
        spec.remove = false;
        (spec.timing.never, spec.timing.dry_run) = (true, false);
        (spec.restart, spec.asked, spec.file) = (Restart::No, None, None);
        // No other proc is to take the trial for the proc that it is like.
        spec.aliases.clear();
        spec.ports.iter_mut().for_each(|port| port.host_port = None);
        if !network {
            (spec.alone, spec.network) = (true, None);
            spec.ports.iter_mut().for_each(|port| port.private = true);
        }
        // A client that asks there asks for the other proc. The trial's hooks do run: they may be
        // what keeps it from sleeping.
        spec.probes.clear();
        let begun = Instant::now();
        spec.name = self.trial_name()?;
        let (spec, name) = (spec.clone(), spec.name.clone());
        let started = self.run(run).await;
        let mut trial = Trial::default();
        let ended = match started {
            Err(refusal) => Some(refusal.message),
            Ok(_) => {
                let us = begun.elapsed().as_micros() as u64;
                let ended = self.wait_until_begun(&name).await.err();
                if ended.is_none() {
                    if let Ok(view) = self.inspect(name.clone()).await {
                        trial.known = Known::learn(&view).await;
                        trial.untried.extend(trial.known.untried());
                    }
                    trial.steps.push(done(CheckOperation::Start, None, us, None));
                    self.try_tiers(&name, &spec, to, &mut trial).await;
                }
                ended
            }
        };
        if let Some(why) = ended {
            let alone = spec.alone.then(|| "the trial reaches nothing by network: --with-network lets it".to_owned());
            trial.steps.push(refused(CheckOperation::Start, None, [why].into_iter().chain(alone).collect()));
        }
        let is_there = self.handle(&name).is_ok_and(|handle| handle.proc.spec().trial);
        if is_there && let Err(refusal) = self.remove(name.clone(), RemoveRequest { force: true }).await {
            tracing::warn!(proc = %name, error = refusal.message, "a trial is left; the next daemon removes it");
        }
        let moves = moves(&spec, &pinned, &trial);
        let Trial { steps, untried, .. } = trial;
        let slept = steps.iter().any(|step| step.step == CheckOperation::Wake && step.refused.is_empty());
        let sleeps = slept && steps.iter().all(|step| step.refused.is_empty());
        Ok(CheckView { steps, sleeps, untried, moves, clones, pinned })
    }

    /// A name that no other trial of this daemon gets, and no proc of the owner's has.
    pub(crate) fn trial_name(&self) -> Result<ProcName, Refusal> {
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("trial-{number}").parse().map_err(|e| Refusal::new(Code::Failed, chain(&e)))?;
            if self.handle(&name).is_err() {
                return Ok(name);
            }
        }
    }

    /// A trial would write to a volume that another proc works on, or counts on when it wakes.
    fn refuse_in_use(&self, volumes: &[VolumeSpec]) -> Result<(), Refusal> {
        let data = &self.machine.data;
        for volume in volumes.iter().filter(|volume| !volume.read_only) {
            let real = |source: &kip_types::VolumeSource| {
                let path = path_of(data, source);
                fs::canonicalize(&path).unwrap_or(path)
            };
            let path = real(&volume.source);
            for handle in self.handles() {
                let of_it = |other: &VolumeSpec| {
                    let other = real(&other.source);
                    other.starts_with(&path) || path.starts_with(&other)
                };
                let is_over = matches!(
                    handle.status.borrow().record.state,
                    State::Stopped { .. } | State::Stopping | State::Elsewhere { .. }
                );
                if !is_over && handle.proc.spec().volumes.iter().any(of_it) {
                    let (name, source, target) = (&handle.proc.name, &volume.source, &volume.target);
                    let message = format!(
                        "the trial would write to the volume {source} at {target}, which {name} has: `kip stop {name}` first, or give the trial another one"
                    );
                    return Err(Refusal::new(Code::State, message));
                }
            }
        }
        Ok(())
    }

    async fn try_tiers(&self, name: &ProcName, spec: &Spec, to: Tier, trial: &mut Trial) {
        let mut broken = false;
        for tier in [Tier::Hibernated, Tier::Parked, Tier::Archived] {
            let untried = match tier {
                _ if tier > to => Some(format!("whether it can be {tier}: `--to {tier}` does")),
                _ if broken => Some(format!("whether it can be {tier}: the trial had ended before")),
                Tier::Hibernated if spec.timing.hibernate == Hibernate::Off => {
                    Some(format!("whether it can be {tier}: hibernation is off (`--hibernate off`)"))
                }
                _ => None,
            };
            match untried {
                Some(line) => trial.untried.push(line),
                None => broken = !self.try_tier(name, tier, trial).await,
            }
        }
    }

    /// False if it does not run as before, so that nothing more can be tried.
    async fn try_tier(&self, name: &ProcName, tier: Tier, trial: &mut Trial) -> bool {
        let view = match self.inspect(name.clone()).await {
            Ok(view) => view,
            Err(refusal) => {
                trial.steps.push(refused(CheckOperation::Sleep, Some(tier), vec![refusal.message]));
                return false;
            }
        };
        let held = Held::open(&trial.known, &view).await;
        self.wait_until_quiet(name, QUIET_MS).await;
        let held = held.without_closed();
        match self.try_sleep(name, tier).await {
            Ok(step) => trial.steps.push(step),
            Err(why) => {
                trial.steps.push(refused(CheckOperation::Sleep, Some(tier), why));
                return true;
            }
        }
        match self.try_wake(name, tier, held, &trial.known).await {
            Ok(step) => trial.steps.push(step),
            Err(why) => {
                trial.steps.push(refused(CheckOperation::Wake, Some(tier), why));
                return false;
            }
        }
        if tier == Tier::Archived
            && let Ok(view) = self.inspect(name.clone()).await
        {
            let fetched = view.last_wake.and_then(|wake| wake.fetched);
            trial.fetched = fetched.map(|fetched| fetched.store_bytes).filter(|bytes| *bytes > 0);
        }
        true
    }

    /// Waits until the program has begun: it listens on the TCP ports that it declares, and is
    /// quiet.
    async fn wait_until_begun(&self, name: &ProcName) -> Result<(), String> {
        let until = Instant::now() + LISTENS_WITHIN;
        let begun = |exit: Option<String>| exit.map_or(Ok(()), |exit| Err(format!("its program ended: {exit}")));
        loop {
            let view = self.inspect(name.clone()).await.map_err(|refusal| refusal.message)?;
            begun(view.exit.clone())?;
            match connections::silent_port(&view).await {
                None => {
                    let has_ports = view.ports.iter().any(|port| port.proto == Protocol::Tcp);
                    let quiet_ms = if has_ports { QUIET_MS } else { QUIET_AT_FIRST_MS };
                    return begun(self.wait_until_quiet(name, quiet_ms).await);
                }
                Some(port) if Instant::now() > until => {
                    let seconds = LISTENS_WITHIN.as_secs();
                    return Err(format!("its program does not listen on tcp port {port} within {seconds} s"));
                }
                Some(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// How its program ended, if it does instead.
    async fn wait_until_quiet(&self, name: &ProcName, quiet_ms: u64) -> Option<String> {
        let until = Instant::now() + QUIET_WITHIN;
        while Instant::now() < until {
            let view = self.inspect(name.clone()).await.ok()?;
            if view.exit.is_some() || view.idle_ms.is_some_and(|idle| idle >= quiet_ms) {
                return view.exit;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        None
    }

    async fn try_sleep(&self, name: &ProcName, tier: Tier) -> Result<CheckStep, Vec<String>> {
        let mut woken = None;
        for _ in 0..SLEEPS {
            let how = SleepRequest { to: tier, clock: Some(Clock::Auto) };
            let slept = self.sleep(name.clone(), how).await;
            let view = slept.map_err(|refusal| vec![refusal.message])?.proc;
            if view.tier == Some(tier) {
                let slept = view.last_sleep.filter(|slept| slept.to == tier);
                let (us, bytes) = slept.map(|slept| (slept.total_us, slept.bytes_written)).unwrap_or_default();
                return Ok(done(CheckOperation::Sleep, Some(tier), us, Some(bytes)));
            }
            if view.exit.is_some() {
                return Err(vec![format!("its program ended: {}", view.exit.unwrap_or_default())]);
            }
            woken = view.last_wake.map(|wake| wake.trigger);
            tokio::time::sleep(Duration::from_millis(QUIET_MS)).await;
        }
        Err(vec![format!("it wakes at once, {SLEEPS} times, by {}", woken.as_deref().unwrap_or("work of its own"))])
    }

    async fn try_wake(&self, name: &ProcName, from: Tier, held: Held, known: &Known) -> Result<CheckStep, Vec<String>> {
        let woken = self.wake(name.clone(), WakeRequest::default()).await;
        let view = woken.map_err(|refusal| vec![refusal.message])?.proc;
        let us = view.last_wake.map(|wake| wake.total_us).unwrap_or_default();
        tokio::time::sleep(AFTER_A_WAKE).await;
        let mut lost = Vec::new();
        match self.inspect(name.clone()).await {
            Ok(view) => lost.extend(view.exit.map(|exit| format!("its program ended after the wake: {exit}"))),
            Err(refusal) => lost.push(refusal.message),
        }
        if lost.is_empty() {
            lost = held.losses(known).await;
        }
        if lost.is_empty() { Ok(done(CheckOperation::Wake, Some(from), us, None)) } else { Err(lost) }
    }
}
