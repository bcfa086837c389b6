//! A trial of a proc before it is trusted: one like it, under a name and with host ports of its own, sleeps and wakes in each tier, and
//! is looked at from outside before and after.
//!
//! The trial is an ordinary proc with a mark, [`Spec::trial`]. It is removed at the end, however that comes; a daemon that finds
//! one was killed in its middle and removes it.

use crate::Worker;
use crate::task::chain;
use kip_types::api::{CheckStep, CheckView, Code, PortView, ProcView, Refusal};
use kip_types::keys::Hex;
use kip_types::life::Restart;
use kip_types::spec::{Hibernate, Protocol};
use kip_types::{ProcName, Spec, Tier};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// A program that nobody says is ready has to be quiet for this long before it is put to sleep, or not, as long as it is waited for.
const QUIET_MS: u64 = 300;
const QUIET_WITHIN: Duration = Duration::from_secs(5);
/// One that wakes at once, for it was in the middle of something, is put to sleep again.
const SLEEPS: u32 = 5;
/// A program that does not survive its wake ends soon after it.
const AFTER_A_WAKE: Duration = Duration::from_millis(300);
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// The number of the next trial.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Connections to the ports that take some.
struct Held(Vec<(PortView, TcpStream)>);

impl Held {
    async fn open(view: &ProcView) -> Held {
        let mut held = Vec::new();
        for port in view.ports.iter().filter(|port| port.proto == Protocol::Tcp) {
            if let Ok(stream) = connect(port).await {
                held.push((port.clone(), stream));
            }
        }
        Held(held)
    }

    /// What is not as it was.
    async fn look(self) -> Vec<String> {
        let mut lost = Vec::new();
        for (port, stream) in self.0 {
            if let Err(e) = connect(&port).await {
                lost.push(format!("tcp port {} takes no connection any more: {e}", port.port));
            }
            if let Some(how) = ended(&stream) {
                lost.push(format!("a connection to tcp port {}, which was open, {how}", port.port));
            }
        }
        lost
    }
}

async fn connect(port: &PortView) -> std::io::Result<TcpStream> {
    let connecting = TcpStream::connect(SocketAddr::new(port.addr, port.port));
    tokio::time::timeout(CONNECT_WITHIN, connecting).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}

/// How a connection on which nothing was said has ended, if it has. A server may have said something.
fn ended(stream: &TcpStream) -> Option<String> {
    let mut bytes = [0; 4096];
    loop {
        match stream.try_read(&mut bytes) {
            Ok(0) => return Some("was closed".to_owned()),
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
            Err(e) => return Some(format!("was lost: {e}")),
        }
    }
}

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

fn done(step: &str, tier: Option<Tier>, us: u64, bytes: Option<u64>) -> CheckStep {
    CheckStep { step: step.to_owned(), tier, us: Some(us), bytes, refused: Vec::new() }
}

fn refused(step: &str, tier: Option<Tier>, refused: Vec<String>) -> CheckStep {
    CheckStep { step: step.to_owned(), tier, us: None, bytes: None, refused }
}

impl Worker {
    /// Tries whether such a proc sleeps in every tier down to `to`, and is as before when it wakes.
    ///
    /// # Errors
    /// What has nothing to do with sleep: no name, no room. What stands in the way of a start or a sleep is in the view.
    pub async fn check(
        self: &Arc<Self>,
        mut spec: Spec,
        secrets: BTreeMap<String, Hex>,
        wait_ready: bool,
        to: Tier,
    ) -> Result<CheckView, Refusal> {
        let pinned = pins(&spec);
        spec.trial = true;
        (spec.timing.never, spec.timing.dry_run) = (true, false);
        (spec.restart, spec.asked, spec.file) = (Restart::No, None, None);
        // Nobody else is to take it for the one that it is like.
        spec.aliases.clear();
        spec.ports.iter_mut().for_each(|port| port.host_port = None);
        // Whoever asks there asks for the other. Its hooks do run: they may be what keeps it from sleeping.
        spec.probes.clear();
        let begun = Instant::now();
        spec.name = self.trial_name()?;
        let started = self.run(spec.clone(), secrets, wait_ready).await;
        let name = spec.name.clone();
        let mut steps = Vec::new();
        match started {
            Ok(_) => {
                let us = begun.elapsed().as_micros() as u64;
                match self.wait_until_quiet(&name).await {
                    Some(exit) => steps.push(refused("start", None, vec![format!("its program ended: {exit}")])),
                    None => {
                        steps.push(done("start", None, us, None));
                        self.try_tiers(&name, &spec, to, &mut steps).await;
                    }
                }
            }
            Err(refusal) => steps.push(refused("start", None, vec![refusal.message])),
        }
        let is_there = self.handle(&name).is_ok_and(|handle| handle.proc.spec.trial);
        if is_there && let Err(refusal) = self.remove(&name, true).await {
            tracing::warn!(proc = %name, error = refusal.message, "a trial is left; the next daemon removes it");
        }
        let sleeps = steps.iter().all(|step| step.refused.is_empty());
        Ok(CheckView { steps, sleeps, pinned })
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

    async fn try_tiers(self: &Arc<Self>, name: &ProcName, spec: &Spec, to: Tier, steps: &mut Vec<CheckStep>) {
        let tiers = [Tier::Hibernated, Tier::Parked, Tier::Archived];
        let wanted =
            |tier: &Tier| *tier <= to && (*tier != Tier::Hibernated || spec.timing.hibernate != Hibernate::Off);
        for tier in tiers.into_iter().filter(wanted) {
            let Ok(view) = self.inspect(name).await else { return };
            let held = Held::open(&view).await;
            match self.try_sleep(name, tier).await {
                Ok(step) => steps.push(step),
                Err(why) => {
                    steps.push(refused("sleep", Some(tier), why));
                    continue;
                }
            }
            match self.try_wake(name, tier, held).await {
                Ok(step) => steps.push(step),
                Err(why) => {
                    steps.push(refused("wake", Some(tier), why));
                    return;
                }
            }
        }
    }

    /// How its program ended, if it does instead.
    async fn wait_until_quiet(&self, name: &ProcName) -> Option<String> {
        let until = Instant::now() + QUIET_WITHIN;
        while Instant::now() < until {
            let view = self.inspect(name).await.ok()?;
            if view.exit.is_some() || view.idle_ms.is_some_and(|idle| idle >= QUIET_MS) {
                return view.exit;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        None
    }

    async fn try_sleep(&self, name: &ProcName, tier: Tier) -> Result<CheckStep, Vec<String>> {
        let mut woken = None;
        for _ in 0..SLEEPS {
            let (view, _) = self.sleep(name, tier).await.map_err(|refusal| vec![refusal.message])?;
            if view.tier == Some(tier) {
                let slept = view.last_sleep.filter(|slept| slept.to == tier);
                let (us, bytes) = slept.map(|slept| (slept.total_us, slept.bytes_written)).unwrap_or_default();
                return Ok(done("sleep", Some(tier), us, Some(bytes)));
            }
            if view.exit.is_some() {
                return Err(vec![format!("its program ended: {}", view.exit.unwrap_or_default())]);
            }
            woken = view.last_wake.map(|wake| wake.trigger);
            tokio::time::sleep(Duration::from_millis(QUIET_MS)).await;
        }
        Err(vec![format!("it wakes at once, {SLEEPS} times, by {}", woken.as_deref().unwrap_or("work of its own"))])
    }

    async fn try_wake(&self, name: &ProcName, from: Tier, held: Held) -> Result<CheckStep, Vec<String>> {
        let (view, _) = self.wake(name, None).await.map_err(|refusal| vec![refusal.message])?;
        let us = view.last_wake.map(|wake| wake.total_us).unwrap_or_default();
        tokio::time::sleep(AFTER_A_WAKE).await;
        let mut lost = Vec::new();
        match self.inspect(name).await {
            Ok(view) => lost.extend(view.exit.map(|exit| format!("its program ended after the wake: {exit}"))),
            Err(refusal) => lost.push(refusal.message),
        }
        if lost.is_empty() {
            lost = held.look().await;
        }
        if lost.is_empty() { Ok(done("wake", Some(from), us, None)) } else { Err(lost) }
    }
}
