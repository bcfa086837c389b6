//! Procs that serve behind the name of another: what [`kip_scale`] asks of this machine. Decides
//! nothing.

use crate::worker::{Worker, grace_of, until_listening};
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::stop::NetworkFate;
use kip_net::Slot;
use kip_net::diag::Diag;
use kip_scale::{Fleet, Group, LoadCounters, Member, MemberState};
use kip_service::ScaleService;
use kip_supervisor::probe;
use kip_supervisor::task::{Handle, TaskCommand};
use kip_sys::clock::now_ms;
use kip_types::api::clone::CloneRequest;
use kip_types::api::scale::{ReplicaView, ScaleView};
use kip_types::api::{Detail, Details, EventKind, Refusal, SocketFamily};
use kip_types::life::Check;
use kip_types::scale::CloneMethod;
use kip_types::{PortSpec, ProcName, Protocol, State, StateName, chain};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The kernel knows a flow of datagrams for so long: nf_conntrack_udp_timeout_stream.
const FLOW_LASTS: Duration = Duration::from_secs(120);

#[async_trait]
impl Fleet for Worker {
    async fn groups(&self) -> Vec<Group> {
        if self.stands_still() {
            return Vec::new();
        }
        let replacing: BTreeSet<ProcName> = self.replacing.lock().keys().cloned().collect();
        // What is being replaced is let alone: it may be there for its replicas again.
        let is_settled = |group: &HandlesOfGroup| {
            group.primary.as_ref().map_or(replacing.is_empty(), |primary| !replacing.contains(&*primary.proc.name))
        };
        let known = self.scaled().into_iter().filter(is_settled).collect::<Vec<_>>();
        blocking(move || known.into_iter().map(HandlesOfGroup::measured).collect()).await
    }

    async fn add(&self, primary: u64, method: CloneMethod, ports: &[u16]) -> Result<(Member, String), String> {
        let source = self.numbered(primary)?;
        let (spec, key) = (source.proc.spec(), source.proc.key.clone());
        let private = |port: &PortSpec| PortSpec { host_port: None, host_addr: None, private: true, ..port.clone() };
        let request = CloneRequest {
            name: None,
            checkpoint: None,
            count: 1,
            ports: spec.ports.iter().map(private).collect(),
            method,
            volumes: spec.scale.as_ref().and_then(|scaling| scaling.volumes),
            asleep: false,
            replica_of: Some(key.clone()),
        };
        let made = self.cloned(spec.name.clone(), request).await.map_err(|refusal| refusal.message)?;
        // That it is no cold start needs no reason.
        let (how, why) = (made.method.to_string(), made.why.filter(|_| made.method == CloneMethod::Cold));
        let new = made.clones.into_iter().next().map(|view| view.name).ok_or("none was made")?;
        let handle = self.handle(&new).map_err(|refusal| refusal.message)?;
        let mut fit = until_listening(&handle, ports, "take connections").await.map_err(|why| format!("{new} {why}"));
        // Another proc may have the name by now.
        if fit.is_ok() && self.numbered(primary).is_err() {
            fit = Err("the proc has gone meanwhile".to_owned());
        }
        if let Err(why) = fit {
            self.discard(&handle).await;
            return Err(why);
        }
        let how = why.map_or_else(|| how.clone(), |why| format!("{how}, for {why}"));
        Ok((blocking(move || member(&handle)).await, how))
    }

    async fn remove(&self, replica: u64) -> Result<(), String> {
        let handle = self.numbered(replica)?;
        let name = handle.proc.name.clone();
        let removed = async {
            let _begun = self.begin_on(&handle, &name).await?;
            if !matches!(handle.status.borrow().record.state, State::Stopped { .. }) {
                let (grace, network) = (grace_of(&handle), NetworkFate::Removed);
                handle.ask(|reply| TaskCommand::Stop { grace, network, reply }).await?;
            }
            handle.ask(|reply| TaskCommand::Remove { force: true, reply }).await
        };
        removed.await.map_err(|refusal| refusal.message)?;
        self.forget_with_checkpoints(&handle.proc).await;
        self.notify_network(&handle.proc.spec()).await;
        Ok(())
    }

    async fn spread(&self, primary: u64, over: &[u64]) -> Result<(), String> {
        let of = match self.numbered(primary) {
            // Nothing leads to one that is gone.
            Err(_) if over.is_empty() => return Ok(()),
            of => of?.proc.slot,
        };
        let over: Vec<Slot> = over.iter().filter_map(|id| Some(self.numbered(*id).ok()?.proc.slot)).collect();
        let machine = Arc::clone(&self.machine);
        blocking(move || machine.nat.spread(of, &over)).await.map_err(|e| chain(&e))
    }

    async fn is_in_use(&self, id: u64) -> bool {
        let Ok(mut handle) = self.numbered(id) else { return true };
        let spec = handle.proc.spec();
        let of = self.handles().into_iter().find(|other| Some(&other.proc.key) == spec.replica_of.as_ref());
        // The proc may have got a port since.
        let mut ports = spec.ports.clone();
        ports.extend(of.iter().flat_map(|of| of.proc.spec().ports.clone()));
        let (quiet, sessions) = {
            let status = handle.status.borrow();
            let asleep = status.record.last_sleep.as_ref().map(|sleep| now_ms().saturating_sub(sleep.at_ms));
            (status.quiet_since.map(|since| since.elapsed()).or(asleep.map(Duration::from_millis)), status.execs)
        };
        if sessions > 0 {
            return true;
        }
        if ports.iter().any(|port| port.proto == Protocol::Udp) && quiet.is_none_or(|quiet| quiet < FLOW_LASTS) {
            return true;
        }
        let Ok(Details::Sockets(view)) = kip_insight::details(&mut handle, Detail::Sockets).await else { return true };
        let is_at = |local: &str| {
            let port = local.rsplit(':').next().and_then(|port| port.parse().ok());
            ports.iter().any(|known| Some(known.port) == port)
        };
        view.sockets.iter().any(|socket| match socket.proto {
            SocketFamily::Tcp if socket.state == "listen" => socket.unread.unwrap_or(0) > 0,
            SocketFamily::Tcp => is_at(&socket.local),
            _ => false,
        })
    }

    async fn keep_awake(&self, id: u64, awake: bool) {
        if let Ok(handle) = self.numbered(id) {
            handle.kept_awake.store(awake, Ordering::SeqCst);
        }
    }

    async fn wake(&self, id: u64) {
        let Ok(handle) = self.numbered(id) else { return };
        let cause = WakeCause::Request(WakeCommand::StoodStill("scale"));
        // It may have to wait for memory.
        tokio::spawn(async move { handle.ask(|reply| TaskCommand::Wake { cause, reply }).await });
    }

    async fn start(&self, id: u64) -> Result<(), String> {
        let handle = self.numbered(id)?;
        let started = async {
            self.machine.pressure.admit_new(&handle.proc.name).await?;
            let _begun = self.begin_on(&handle, &handle.proc.name).await?;
            if self.stands_still() || self.scaler.is_ended(&handle.proc.key) {
                return Err(Refusal::new(kip_types::api::Code::State, "its owner has ended it"));
            }
            handle.ask(|reply| TaskCommand::Start { wait_ready: false, reply }).await
        };
        started.await.map(drop).map_err(|refusal| refusal.message)
    }

    async fn probe(&self, id: u64, check: &Check) -> Option<bool> {
        let handle = self.numbered(id).ok()?;
        probe::check(&handle, check).await.map(|found| found.is_ok())
    }

    fn tell(&self, primary: &ProcName, detail: String) {
        self.machine.events.emit(Some(primary), EventKind::Scaled, detail);
    }

    fn is_closing(&self) -> bool {
        self.machine.is_closing()
    }
}

#[async_trait]
impl ScaleService for Worker {
    async fn scale(&self, name: ProcName) -> Result<ScaleView, Refusal> {
        let primary = self.handle(&name)?;
        let (key, scaling) = (primary.proc.key.clone(), primary.proc.spec().scale.clone());
        let loads = self.scaler.loads(&key);
        let of_it = replicas_by_key(&self.handles()).remove(&key).unwrap_or_default();
        let view = |handle: &Handle| {
            let known = loads.get(&handle.number);
            let load = known.map(|(load, _)| *load).unwrap_or_default();
            ReplicaView {
                name: handle.proc.name.clone(),
                state: handle.status.borrow().record.state.name(),
                in_rotation: known.map_or(handle.proc.key == key, |(_, is_in)| *is_in),
                busy: load.busy,
                queued: load.queued,
            }
        };
        let replicas = [primary].iter().chain(&of_it).map(view).collect();
        Ok(ScaleView { name, scaling, replicas, last: self.scaler.last(&key) })
    }
}

/// A group before it is measured.
struct HandlesOfGroup {
    key: ProcName,
    primary: Option<Handle>,
    replicas: Vec<Handle>,
}

impl Worker {
    /// Procs are about to end or to be parked, all of them: none is made or started.
    fn stands_still(&self) -> bool {
        self.ending.load(Ordering::SeqCst) || self.machine.rests().is_some()
    }

    /// Ends those that serve behind a proc's name, for one that writes to the same files is about
    /// to start.
    pub(crate) async fn end_replicas(&self, of: &Handle) {
        let replicas = replicas_by_key(&self.handles()).remove(&of.proc.key).unwrap_or_default();
        let (machine, slot) = (Arc::clone(&self.machine), of.proc.slot);
        blocking(move || machine.nat.forget(slot)).await;
        for replica in replicas {
            let (grace, network) = (grace_of(&replica), NetworkFate::Removed);
            if let Err(refusal) = replica.ask(|reply| TaskCommand::Stop { grace, network, reply }).await {
                tracing::info!(proc = %replica.proc.name, error = refusal.message, "a replica is not ended in order");
            }
            self.discard(&replica).await;
        }
    }

    fn numbered(&self, number: u64) -> Result<Handle, String> {
        let found = self.handles().into_iter().find(|handle| handle.number == number && !handle.inbox.is_closed());
        found.filter(|_| !self.stands_still()).ok_or_else(|| "it is there no more".to_owned())
    }

    fn scaled(&self) -> Vec<HandlesOfGroup> {
        let handles = self.handles();
        let mut replicas = replicas_by_key(&handles);
        let concerned = |handle: &&Handle| handle.proc.spec().scale.is_some() || handle.is_kept_awake();
        let is_replica = |handle: &Handle| handle.proc.spec().replica_of.is_some();
        let scaled = handles.iter().filter(concerned).filter(|handle| !is_replica(handle));
        let keys: BTreeSet<ProcName> = scaled.map(|h| h.proc.key.clone()).chain(replicas.keys().cloned()).collect();
        let group = |key: ProcName| HandlesOfGroup {
            primary: handles.iter().find(|handle| handle.proc.key == key).cloned(),
            replicas: replicas.remove(&key).unwrap_or_default(),
            key,
        };
        keys.into_iter().map(group).collect()
    }
}

impl HandlesOfGroup {
    fn measured(self) -> Group {
        // One that another proc has taken the place of is a trial, and about to go.
        let spec = self.primary.as_ref().map(|primary| primary.proc.spec()).filter(|spec| !spec.trial);
        let scaling = spec.and_then(|spec| spec.scale.clone());
        let replicas = self.replicas.iter().map(member).collect();
        Group { key: self.key, primary: self.primary.as_ref().map(member), scaling, replicas }
    }
}

/// Replicas by what they are of, by their numbers.
fn replicas_by_key(handles: &[Handle]) -> BTreeMap<ProcName, Vec<Handle>> {
    let mut found: BTreeMap<ProcName, Vec<Handle>> = BTreeMap::new();
    for handle in handles {
        if let Some(of) = &handle.proc.spec().replica_of {
            found.entry(of.clone()).or_default().push(handle.clone());
        }
    }
    // Their numbers grow.
    let order = |handle: &Handle| (handle.proc.name.as_str().len(), handle.proc.name.clone());
    found.values_mut().for_each(|replicas| replicas.sort_by_key(order));
    found
}

fn member(handle: &Handle) -> Member {
    let (proc, status) = (&handle.proc, handle.status.borrow().clone());
    let spec = proc.spec();
    let all = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let ended = matches!(status.record.state, State::Stopped { exit: Some(_) });
    let state = match status.record.state.name() {
        _ if status.starting => MemberState::Starting,
        StateName::Hibernated => MemberState::Hibernated,
        StateName::Parked | StateName::Archived => MemberState::Parked,
        // One that is on its way up or down serves, and is let alone.
        StateName::Parking | StateName::Waking => MemberState::Hibernated,
        StateName::Starting | StateName::Restarting => MemberState::Starting,
        StateName::Stopped if ended => MemberState::Ended,
        StateName::Stopped | StateName::Stopping | StateName::Elsewhere => MemberState::Stopped,
        StateName::Running | StateName::Unknown => MemberState::Awake,
    };
    let (mut used, mut listens) = (LoadCounters::default(), Vec::new());
    if state == MemberState::Awake {
        let pids = proc.cgroup.pids().unwrap_or_default();
        let of = |pid: &u32| Diag::open_in(File::open(format!("/proc/{pid}/ns/net")).ok()?.as_fd()).ok();
        let listeners = pids.first().and_then(of).and_then(|diag| diag.listeners().ok()).unwrap_or_default();
        let queued = listeners.iter().map(|listener| listener.receive_queue).sum();
        used = LoadCounters::read(&pids, proc.cgroup.cpu_ns().unwrap_or(0), queued);
        let is_open = |port: &u16| listeners.iter().any(|listener| listener.local.port() == *port);
        let declared = spec.ports.iter().filter(|port| port.proto == Protocol::Tcp).map(|port| port.port);
        listens = declared.filter(is_open).collect();
    }
    Member {
        name: proc.name.clone(),
        id: handle.number,
        state,
        cpus: spec.limits.cpus.unwrap_or(all).min(all),
        used,
        listens,
        is_to_listen: spec.ports.iter().any(|port| port.proto == Protocol::Tcp),
    }
}
