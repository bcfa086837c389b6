//! A proc takes the place of another: it is started beside that one, under a name of its own, and
//! gets name, ports and probes when it is ready. Or a proc gets another name and nothing else.
//!
//! ```text
//! made --> started --> ready --> in its place --> the other one drained, stopped, removed
//!   \________|___________/
//!        removed; the other one is as it was
//! ```
//!
//! What was begun on the other one, a start for example, is done before the new one is made. A stop
//! that its owner asks for meanwhile ends the replacement, and the proc stays stopped.
//!
//! No connection is refused: a port leads to the one or the other. Where both cannot run at once,
//! the other one is stopped first, and what is sent to its ports meanwhile is dropped before it
//! reaches either, so that clients send it again. Its record says so before that (`stands_aside`),
//! and until it runs again. Crash: the new one is a trial until its spec says that it has the name,
//! and the next daemon removes it and starts again the one that stands aside; from then on the
//! other one is a trial, which the next daemon removes.

use crate::copied::{Purpose, check_kept};
use crate::lineage::key_of;
use crate::worker::{
    NameClaim, NotReady, Wish, Worker, being_replaced, check_spec, first, grace_of, ready, taken, until_listening,
    until_ready,
};
use kip_engine::blocking::blocking;
use kip_engine::fd_store::key;
use kip_engine::ports::{self, Earlier};
use kip_engine::start::listens;
use kip_engine::stop::NetworkFate;
use kip_engine::volumes::path_of;
use kip_insight::view;
use kip_supervisor::probe::{self, Listeners};
use kip_supervisor::recover::numbered;
use kip_supervisor::task::{Handle, Probes, Still, TakenPlace, TaskCommand, hidden};
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_types::api::{Code, PortView, ProcView, Refusal, RenameRequest, RunRequest};
use kip_types::life::Probe;
use kip_types::spec::Lineage;
use kip_types::{ProcName, Protocol, Spec, State, VolumeSource, chain};
use std::collections::btree_map::Entry;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::{MutexGuard, OwnedRwLockReadGuard};

/// Between looks at it, and at the connections of one that is about to end.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Connections on which nothing was sent for so long are between two requests.
const QUIET: Duration = Duration::from_secs(2);
/// What is said of the one that is not replaced.
const STAYS_STOPPED: &str = "the one that is there stays stopped";
const REMOVED: &str = "the one that was there has been removed";
/// States of /proc/net/tcp: a connection that is over for the program, and a listener.
const TIME_WAIT: &str = "06";
const LISTEN: &str = "0A";

impl Worker {
    /// As [`kip_service::ProcService::rename`].
    pub(crate) async fn renamed(&self, name: ProcName, request: RenameRequest) -> Result<ProcView, Refusal> {
        let new = request.name;
        let _one = self.renaming.lock().await;
        let handle = self.handle(&name)?;
        let spec = handle.proc.spec();
        if let Some(file) = &spec.file {
            let message = format!("{name} belongs to {file}, which would make another {name}: rename it there");
            return Err(Refusal::new(Code::State, message).with_hint("`kip apply` makes it anew under the new name"));
        }
        if spec.trial {
            return Err(Refusal::new(Code::State, format!("{name} is a trial: it is about to go")));
        }
        let _begun = self.begin_on(&handle, &name).await?;
        let claimed_name = self.claim_name(&new)?;
        self.procs.lock().insert(new.clone(), handle.clone());
        drop(claimed_name);
        // The directory of a proc whose record cannot be read is left alone, and its name too.
        let made = self.key_for(&new).is_ok_and(|key| key == new) && self.machine.records.directory(&new).exists();
        let own = handle.proc.key == new;
        let renamed = match made && !own {
            true => Err(taken(&new)),
            false => handle.ask(|reply| TaskCommand::Rename { name: new.clone(), reply }).await,
        };
        let gone = if renamed.is_ok() { &name } else { &new };
        self.procs.lock().remove(gone);
        renamed?;
        self.notify_network(&handle.proc.spec()).await;
        Ok(blocking(move || view::proc_view(&handle)).await)
    }

    /// As [`kip_service::ProcService::replace`].
    pub(crate) async fn replaced(&self, request: RunRequest) -> Result<ProcView, Refusal> {
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        let _only = Replacing::begin(self, &request.spec.name)?;
        until_settled(&self.handle(&request.spec.name)?).await;
        let old = self.handle(&request.spec.name)?;
        // Its layers are kept until the proc is known, which keeps them then.
        let (spec, _in_use) = self.complete(request.spec).await?;
        check_spec(&spec)?;
        if spec.checkpoints.is_some() {
            check_kept(&spec, Purpose::Checkpoint)?;
        }
        // The checkpoints stay, and it begins anew.
        let lineage = Lineage { key: key_of(&old.proc), checkpoint: None, since_ms: now_ms() };
        let spec = Spec { replaced: old.proc.spec().replaced + 1, lineage: Some(lineage), ..spec };
        let name = spec.name.clone();
        let ran = !matches!(state_of(&old), State::Stopped { .. } | State::Elsewhere { .. });
        let at_once = !ran || !self.write_alike(&old.proc.spec(), &spec) && self.has_room(&name).await;
        let needed = if ran { needed(&old, &spec) } else { Vec::new() };
        let claimed_name = self.name_beside(&name)?;
        let first_spec = hidden(&spec, claimed_name.of.clone());
        let worker = self.clone();
        let made = blocking(move || worker.create(first_spec, request.secrets)).await;
        let (proc, prepared, record, claim) = made?;
        let new = self.adopt(proc, record, Some(prepared), Listeners::new());
        drop(claimed_name);
        drop(claim);
        // As they were made: with their real paths, and one for its secrets.
        let spec = Spec { volumes: new.proc.spec().volumes.clone(), ..spec };
        let placed = async {
            if !at_once {
                self.make_room(&old).await?;
            }
            tokio::select! {
                started = self.started(&new, request.wait_ready, &needed) => started?,
                refusal = self.stopped_by_owner(&old, &name) => return Err(refusal),
            }
            self.put_in_place(&old, &new, spec, None).await
        };
        if let Err(refusal) = placed.await {
            fault::reach("replace-failed");
            let hidden = new.proc.name.to_string();
            let stays = match at_once {
                false => self.give_back(&new, &old).await,
                true if old.inbox.is_closed() => REMOVED,
                true if ran && !self.is_to_stop(&name) => "the one that is there runs on",
                true => STAYS_STOPPED,
            };
            self.discard(&new).await;
            let message = refusal.message.replace(&hidden, name.as_str());
            return Err(Refusal { message: format!("{message}; {stays}"), ..refusal });
        }
        self.end_replaced(&old, at_once && ran).await;
        if new.proc.spec().remove {
            tokio::spawn(self.clone().remove_at_end(new.clone(), true));
        }
        ready(&new).await?;
        Ok(blocking(move || view::proc_view(&new)).await)
    }

    /// Begins a request that starts or changes a proc, until what is returned is dropped.
    ///
    /// # Errors
    /// It is being replaced.
    pub(crate) async fn begin_on(&self, handle: &Handle, name: &ProcName) -> Result<Begun, Refusal> {
        let refused = || if self.replacing.lock().contains_key(name) { Err(being_replaced(name)) } else { Ok(()) };
        // First, for a replacement has the lock until it has begun.
        refused()?;
        let begun = Arc::clone(&handle.begun).read_owned().await;
        refused().map(|()| begun)
    }

    /// The proc that a stop of that name is for. One that is being replaced is not after that; the
    /// new one is meant where it has the place already.
    pub(crate) async fn handle_to_stop(&self, name: &ProcName) -> Result<Handle, Refusal> {
        let _stays = self.keep_in_place(name).await;
        if let Some(wish) = self.replacing.lock().get_mut(name) {
            *wish = Wish::Stop;
        }
        self.handle(name)
    }

    /// While the result lives no proc takes the place of that one.
    pub(crate) async fn keep_in_place(&self, name: &ProcName) -> Option<MutexGuard<'_, ()>> {
        let replaced = self.replacing.lock().contains_key(name);
        if replaced { Some(self.renaming.lock().await) } else { None }
    }

    fn is_to_stop(&self, name: &ProcName) -> bool {
        self.replacing.lock().get(name) == Some(&Wish::Stop)
    }

    /// Waits until its owner stops a proc that is being replaced.
    pub(crate) async fn stopped_by_owner(&self, old: &Handle, name: &ProcName) -> Refusal {
        let mut status = old.status.clone();
        loop {
            if self.is_to_stop(name) {
                return stopped_meanwhile(name);
            }
            // One that is removed is missed when the new one is to have its place.
            if status.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Removes trials that an earlier daemon has left, and starts again what was stopped for some.
    /// From the call on no other request starts those.
    pub(crate) fn end_trials(self, trials: Vec<Handle>, stood_aside: Vec<Handle>) -> impl Future<Output = ()> {
        let begin = |old: &Handle| Replacing::begin(&self, &old.proc.name).ok();
        let begun: Vec<Option<Replacing>> = stood_aside.iter().map(begin).collect();
        async move {
            // Both may write to one volume.
            for trial in &trials {
                self.end_program(trial).await;
            }
            for (old, _only) in stood_aside.iter().zip(begun) {
                self.put_back(old).await;
            }
            for trial in &trials {
                self.discard(trial).await;
            }
        }
    }

    /// Ends a new proc that does not take the place of the old one, and starts that again: both may
    /// write to one volume.
    async fn give_back(&self, new: &Handle, old: &Handle) -> &'static str {
        self.end_program(new).await;
        self.put_back(old).await
    }

    /// Ends a trial's program, which may have ended or never begun.
    async fn end_program(&self, trial: &Handle) {
        // One that sleeps is not woken to be told.
        let runs = matches!(state_of(trial), State::Hot { .. });
        let grace = if runs { grace_of(trial) } else { Duration::ZERO };
        let stopped = trial.ask(|reply| TaskCommand::Stop { grace, network: NetworkFate::Removed, reply }).await;
        if let Err(refusal) = stopped {
            tracing::debug!(proc = %trial.proc.name, error = refusal.message, "the program of a trial was not stopped");
        }
    }

    /// A name and key that no other proc has.
    pub(crate) fn name_beside(&self, name: &ProcName) -> Result<NameClaim, Refusal> {
        let free = numbered(name).filter(|name| !self.machine.records.directory(name).exists());
        first(free.filter_map(|name| self.claim_name(&name).ok()), name)
    }

    async fn has_room(&self, name: &ProcName) -> bool {
        self.machine.pressure.admit_new(name).await.is_ok()
    }

    /// Whether both would write to the same files: that is for one program at a time.
    fn write_alike(&self, old: &Spec, new: &Spec) -> bool {
        let real = |source: &VolumeSource| {
            let path = path_of(&self.machine.data, source);
            fs::canonicalize(&path).unwrap_or(path)
        };
        let own = |volume: &&kip_types::VolumeSpec| volume.source != VolumeSource::Secrets;
        old.volumes.iter().filter(own).any(|one| {
            let one_path = real(&one.source);
            new.volumes.iter().filter(own).filter(|other| !(one.read_only && other.read_only)).any(|other| {
                let other_path = real(&other.source);
                one_path.starts_with(&other_path) || other_path.starts_with(&one_path)
            })
        })
    }

    /// Ends the old one in order. New connections wait from before that on.
    async fn make_room(&self, old: &Handle) -> Result<(), Refusal> {
        self.hold_connections(old, true).await;
        self.end_replicas(old).await;
        let grace = grace_of(old);
        old.ask(|reply| TaskCommand::Stop { grace, network: NetworkFate::Kept, reply }).await?;
        self.machine.pressure.admit_new(&old.proc.name).await
    }

    /// Has new connections to a proc wait, until it or another one serves its ports, or lets them
    /// pass again.
    pub(crate) async fn hold_connections(&self, old: &Handle, waits: bool) {
        if old.inbox.is_closed() {
            // It was removed, and what it had may be another proc's by now.
            return;
        }
        let (machine, slot) = (Arc::clone(&self.machine), old.proc.slot);
        if let Err(e) = blocking(move || machine.nat.hold(slot, waits)).await {
            let message =
                if waits { "connections do not wait for the new proc" } else { "connections wait although it runs on" };
            tracing::warn!(proc = %old.proc.name, error = chain(&e), message);
        }
    }

    /// Starts it and waits until it is as good as the old one.
    pub(crate) async fn started(&self, new: &Handle, wait_ready: bool, needed: &[u16]) -> Result<(), Refusal> {
        new.ask(|reply| TaskCommand::Start { wait_ready, reply }).await?;
        fault::reach("replace-started");
        let failed = |why: String| Refusal::new(Code::Failed, format!("{} {why}", new.proc.name));
        until_ready(new).await.map_err(|NotReady { why, .. }| failed(why))?;
        until_listening(new, needed, "take over").await.map_err(failed)
    }

    /// The moment from which on the new one has the name.
    ///
    /// `still` keeps the old one asleep until then.
    pub(crate) async fn put_in_place(
        &self,
        old: &Handle,
        new: &Handle,
        spec: Spec,
        mut still: Option<Still>,
    ) -> Result<(), Refusal> {
        let one = match self.renaming.try_lock() {
            Ok(one) => one,
            Err(_) => {
                // By a request that removes the old one, perhaps, and waits until that hears of it.
                still = None;
                self.renaming.lock().await
            }
        };
        let name = spec.name.clone();
        if self.is_to_stop(&name) {
            return Err(stopped_meanwhile(&name));
        }
        if !self.handle(&name).is_ok_and(|now| Arc::ptr_eq(&now.proc, &old.proc)) {
            return Err(Refusal::new(Code::Taken, format!("{name} is another proc by now, or none")));
        }
        let own =
            |probe: &Probe| spec.ports.iter().any(|p| (p.proto, p.host_port) == (Protocol::Tcp, Some(probe.host_port)));
        let in_the_way = old.proc.spec().probes.iter().any(own);
        if in_the_way {
            // It has to hear of that.
            still = None;
            self.answer_probes(old, false).await?;
        }
        let placing = between_starts(old).await;
        let their_ports = old.status.borrow().record.ports.clone();
        let (of, proc, wanted, theirs) =
            (Arc::clone(&old.proc), Arc::clone(&new.proc), spec.clone(), their_ports.clone());
        let held = blocking(move || {
            let clashes = ports::let_go_of_clashes(&of, &theirs, &wanted);
            let earlier = Earlier { of: &of, ports: &theirs };
            let held = ports::reserve(&proc, &wanted.ports, earlier)
                .and_then(|ports| probe::inherit(&proc, &wanted, &of).map(|()| ports));
            (clashes, held)
        });
        let hidden = new.proc.name.clone();
        let (clashes, held) = held.await;
        let placed = match held {
            Err(refusal) => Err(refusal),
            Ok(ports) => {
                let runs = state_of(old).tier().is_some();
                let place = Box::new(TakenPlace { spec, ports, of: Arc::clone(&old.proc), their_ports, runs });
                new.ask(|reply| TaskCommand::TakePlace { place, reply }).await
            }
        };
        drop(still);
        if let Err(refusal) = placed {
            self.let_go_of_all(new).await;
            // Else a start of the old one, which waits for that, could not come to its end.
            drop(placing);
            let back = old.ask(|reply| TaskCommand::TakePortsAgain { ports: clashes, reply }).await;
            let answers = if in_the_way { self.answer_probes(old, true).await } else { Ok(()) };
            if let Err(e) = back.and(answers) {
                tracing::warn!(proc = %old.proc.name, error = e.message, "it does not have all its ports again");
            }
            return Err(refusal);
        }
        {
            let mut procs = self.procs.lock();
            procs.insert(name, new.clone());
            procs.insert(hidden, old.clone());
        }
        // The old one may be at something that takes minutes.
        drop((one, placing));
        self.notify_network(&new.proc.spec()).await;
        let left = old.ask(|reply| TaskCommand::LeavePlace { reply }).await;
        let answers = self.answer_probes(new, true).await;
        match left.and(answers) {
            // It was removed meanwhile.
            Err(refusal) if refusal.code == Code::Unknown => {}
            Err(refusal) => {
                tracing::warn!(proc = %new.proc.name, error = refusal.message, "probes are not answered as they should be");
            }
            Ok(()) => {}
        }
        Ok(())
    }

    /// A new proc that does not take the place of the old one lets go of the ports that it has been
    /// given.
    async fn let_go_of_all(&self, new: &Handle) {
        let proc = Arc::clone(&new.proc);
        blocking(move || ports::let_go_of_others(&proc, &[])).await;
        self.close_probes(new).await;
    }

    /// Has a proc answer at its probes, or lets go of their ports.
    async fn answer_probes(&self, handle: &Handle, answers: bool) -> Result<(), Refusal> {
        let probes = if answers { probe::serve(handle, Listeners::new()) } else { Probes::default() };
        handle.ask(|reply| TaskCommand::ReplaceProbes { probes, reply }).await?;
        if !answers {
            self.close_probes(handle).await;
        }
        Ok(())
    }

    async fn close_probes(&self, handle: &Handle) {
        let proc = Arc::clone(&handle.proc);
        if let Err(e) = blocking(move || proc.fd_store.drop_prefix(key::PROBE)).await {
            tracing::warn!(proc = %handle.proc.name, error = chain(&e), "the keeper did not let the ports of its probes go");
        }
    }

    /// Ends the one that was replaced, when its connections have.
    pub(crate) async fn end_replaced(&self, old: &Handle, drains: bool) {
        let grace = grace_of(old);
        if drains {
            drain(old, grace).await;
        }
        let stopped = old.ask(|reply| TaskCommand::Stop { grace, network: NetworkFate::Removed, reply }).await;
        if let Err(refusal) = stopped {
            tracing::warn!(proc = %old.proc.name, error = refusal.message, "a replaced proc does not end in order");
        }
        self.discard(old).await;
    }

    pub(crate) async fn discard(&self, handle: &Handle) {
        match handle.ask(|reply| TaskCommand::Remove { force: true, reply }).await {
            Ok(()) => {}
            // A start that failed has removed it.
            Err(refusal) if refusal.code == Code::Unknown => {}
            Err(refusal) => {
                tracing::warn!(proc = %handle.proc.name, error = refusal.message, "it is left to the next daemon");
                return;
            }
        }
        self.forget_with_checkpoints(&handle.proc).await;
        self.notify_network(&handle.proc.spec()).await;
    }

    /// Starts again what was stopped for another proc that has not taken its place. Returns what is
    /// said of it.
    async fn put_back(&self, old: &Handle) -> &'static str {
        let (machine, slot) = (Arc::clone(&self.machine), old.proc.slot);
        if old.inbox.is_closed() {
            // What it had may be another proc's by now.
            return REMOVED;
        }
        if self.is_to_stop(&old.proc.name) {
            return STAYS_STOPPED;
        }
        if !matches!(state_of(old), State::Stopped { .. }) {
            self.hold_connections(old, false).await;
            return "the one that is there runs on";
        }
        if self.ending.load(Ordering::SeqCst) {
            return "the one that was there is started by the next `kip up`";
        }
        fault::reach("replace-gives-back");
        // A start makes its link; the rules stay until it has published.
        if let Err(e) = blocking(move || machine.pool.release(&[slot])).await {
            tracing::warn!(proc = %old.proc.name, error = chain(&e), "its link is not removed");
        }
        match old.ask(|reply| TaskCommand::PutBack { reply }).await {
            Ok(false) => STAYS_STOPPED,
            Ok(true) => {
                fault::reach("replace-given-back");
                "the one that was there is started again"
            }
            Err(refusal) => {
                tracing::warn!(proc = %old.proc.name, error = refusal.message, "a proc that was to be replaced stays stopped");
                let (machine, slot) = (Arc::clone(&self.machine), old.proc.slot);
                let _ = blocking(move || machine.nat.unpublish(&[slot])).await;
                "the one that was there is stopped, with its files"
            }
        }
    }
}

/// While one lives the proc is not replaced.
pub(crate) type Begun = OwnedRwLockReadGuard<()>;

/// While one lives no other request replaces a proc of that name, or starts the one that stands
/// aside.
pub(crate) struct Replacing {
    worker: Worker,
    name: ProcName,
}

impl Replacing {
    pub(crate) fn begin(worker: &Worker, name: &ProcName) -> Result<Replacing, Refusal> {
        match worker.replacing.lock().entry(name.clone()) {
            Entry::Occupied(_) => return Err(being_replaced(name)),
            Entry::Vacant(free) => drop(free.insert(Wish::Replace)),
        }
        Ok(Replacing { worker: worker.clone(), name: name.clone() })
    }
}

impl Drop for Replacing {
    fn drop(&mut self) {
        self.worker.replacing.lock().remove(&self.name);
    }
}

fn stopped_meanwhile(name: &ProcName) -> Refusal {
    Refusal::new(Code::State, format!("{name} was stopped while it was being replaced"))
}

/// Waits for what was begun on a proc before it was to be replaced: requests, and a start.
pub(crate) async fn until_settled(old: &Handle) {
    drop(old.begun.write().await);
    let mut status = old.status.clone();
    let _ = status.wait_for(|status| !matches!(status.record.state, State::Starting)).await;
}

/// Keeps a proc from being given ports by a start. One that its restart policy has begun is done
/// first.
async fn between_starts(old: &Handle) -> MutexGuard<'_, ()> {
    let mut status = old.status.clone();
    loop {
        let placing = old.proc.placing.lock().await;
        if !matches!(state_of(old), State::Starting) {
            return placing;
        }
        drop(placing);
        if status.wait_for(|status| !matches!(status.record.state, State::Starting)).await.is_err() {
            return old.proc.placing.lock().await;
        }
    }
}

pub(crate) fn state_of(handle: &Handle) -> State {
    handle.status.borrow().record.state.clone()
}

/// Ports where the new one has to listen before it takes over, if nothing else says when it is
/// ready: those that clients reach now.
fn needed(old: &Handle, spec: &Spec) -> Vec<u16> {
    if spec.ready.is_some() {
        return Vec::new();
    }
    let record = old.status.borrow().record.clone();
    let answers = |view: &&PortView| match record.state {
        State::Hot { init, .. } | State::Hibernated { init, .. } => listens(init, Protocol::Tcp, view.port),
        _ => true,
    };
    let published = record.ports.iter().filter(|view| view.proto == Protocol::Tcp && view.host_port.is_some());
    let answering: Vec<&PortView> = published.filter(answers).collect();
    let like = |port: &&kip_types::PortSpec| {
        let same = |view: &&PortView| port.host_port.map_or(view.port == port.port, |p| view.host_port == Some(p));
        port.proto == Protocol::Tcp && !port.private && answering.iter().any(same)
    };
    spec.ports.iter().filter(like).map(|port| port.port).collect()
}

/// Waits until no client has a connection to one of its ports, or none has sent anything for a
/// while; `within` at most.
async fn drain(old: &Handle, within: Duration) {
    let (begun, mut none_before) = (Instant::now(), false);
    let own: Vec<u16> = old.proc.spec().ports.iter().map(|port| port.port).collect();
    while begun.elapsed() < within {
        let State::Hot { init, .. } = state_of(old) else { return };
        let none = !has_connections(init, &own);
        let quiet = old.status.borrow().quiet_since.is_some_and(|since| since.elapsed() >= QUIET);
        // Twice, for what was on its way at the first look.
        if none && none_before || quiet && begun.elapsed() >= QUIET {
            return;
        }
        none_before = none;
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Whether clients are connected to these ports, or wait to be accepted there.
fn has_connections(init: u32, own: &[u16]) -> bool {
    ["tcp", "tcp6"].iter().any(|file| {
        let text = fs::read_to_string(format!("/proc/{init}/net/{file}")).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, local, _, state, queues, ..] = fields.as_slice() else { return false };
            let port = local.rsplit(':').next().and_then(|port| u16::from_str_radix(port, 16).ok());
            let waits = *state == LISTEN && queues.rsplit(':').next().is_some_and(|queue| queue != "00000000");
            port.is_some_and(|port| own.contains(&port)) && (waits || *state != LISTEN && *state != TIME_WAIT)
        })
    })
}
