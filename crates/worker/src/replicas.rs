//! Procs that serve behind the name of another: what [`kip_scale`] asks of this machine. Decides
//! nothing.

use crate::worker::{Worker, until_listening};
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::start::listens;
use kip_net::Slot;
use kip_scale::{Fleet, Group, LoadCounters, Member, MemberState};
use kip_service::{ProcService, ScaleService};
use kip_supervisor::probe;
use kip_supervisor::task::{Handle, TaskCommand};
use kip_types::api::clone::{CloneMethod, CloneRequest};
use kip_types::api::scale::{ReplicaView, ScaleView};
use kip_types::api::{Detail, Details, EventKind, Refusal, RemoveRequest, SocketFamily, StartRequest};
use kip_types::life::Check;
use kip_types::{PortSpec, ProcName, Protocol, State, StateName, chain};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[async_trait]
impl Fleet for Worker {
    async fn groups(&self) -> Vec<Group> {
        if self.machine.rests().is_some() {
            return Vec::new();
        }
        let (groups, replacing) = (self.scaled(), !self.replacing.lock().is_empty());
        // A proc that is being replaced may be there for its replicas again.
        let known = groups.into_iter().filter(|group| group.primary.is_some() || !replacing).collect::<Vec<_>>();
        blocking(move || known.into_iter().map(HandlesOfGroup::measured).collect()).await
    }

    async fn add(&self, primary: &ProcName, method: CloneMethod) -> Result<ProcName, String> {
        let source = self.handle(primary).map_err(|refusal| refusal.message)?;
        let spec = source.proc.spec();
        let private = |port: &PortSpec| PortSpec { host_port: None, host_addr: None, private: true, ..port.clone() };
        let request = CloneRequest {
            name: None,
            checkpoint: None,
            count: 1,
            ports: spec.ports.iter().map(private).collect(),
            method,
            volumes: spec.scale.as_ref().and_then(|scaling| scaling.volumes),
            asleep: false,
            replica_of: Some(source.proc.key.clone()),
        };
        let needed = listened_at(&source, &spec.ports);
        let made = self.cloned(primary.clone(), request).await.map_err(|refusal| refusal.message)?;
        let new = made.clones.into_iter().next().map(|view| view.name).ok_or("none was made")?;
        let handle = self.handle(&new).map_err(|refusal| refusal.message)?;
        if let Err(why) = until_listening(&handle, &needed, "take connections").await {
            self.discard(&handle).await;
            return Err(format!("{new} {why}"));
        }
        Ok(new)
    }

    async fn remove(&self, replica: &ProcName) -> Result<(), String> {
        // By its name another proc could be meant by now.
        let handle = self.handle(replica).map_err(|refusal| refusal.message)?;
        if handle.proc.spec().replica_of.is_none() {
            return Err("it is no replica any more".to_owned());
        }
        let how = RemoveRequest { force: true };
        ProcService::remove(self, replica.clone(), how).await.map_err(|refusal| refusal.message)
    }

    async fn spread(&self, primary: &ProcName, over: &[ProcName]) -> Result<(), String> {
        let slot = |name: &ProcName| Some(self.handle(name).ok()?.proc.slot);
        let Some(of) = slot(primary) else { return Ok(()) };
        let (over, machine): (Vec<Slot>, _) = (over.iter().filter_map(slot).collect(), Arc::clone(&self.machine));
        blocking(move || machine.nat.spread(of, &over)).await.map_err(|e| chain(&e))
    }

    async fn has_connections(&self, name: &ProcName) -> bool {
        let Ok(mut handle) = self.handle(name) else { return true };
        let ports = handle.proc.spec().ports.clone();
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

    async fn keep_awake(&self, name: &ProcName, awake: bool) {
        let Ok(handle) = self.handle(name) else { return };
        handle.kept_awake.store(awake, Ordering::SeqCst);
        let state = handle.status.borrow().record.state.name();
        let sleeps = matches!(state, StateName::Hibernated | StateName::Parked | StateName::Archived);
        if awake && sleeps {
            let cause = WakeCause::Request(WakeCommand::StoodStill("scale"));
            // It may have to wait for memory.
            tokio::spawn(async move { handle.ask(|reply| TaskCommand::Wake { cause, reply }).await });
        }
    }

    async fn start(&self, name: &ProcName) -> Result<(), String> {
        let started = ProcService::start(self, name.clone(), StartRequest { wait_ready: false }).await;
        started.map(drop).map_err(|refusal| refusal.message)
    }

    async fn probe(&self, name: &ProcName, check: &Check) -> Option<bool> {
        let handle = self.handle(name).ok()?;
        probe::check(&handle, check).await.map(|found| found.is_ok())
    }

    async fn has_template(&self, name: &ProcName) -> bool {
        match self.handle(name) {
            Ok(handle) => self.template_for(&handle).await.is_ok(),
            Err(_) => false,
        }
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
        let handles = self.handles();
        let of_it = replicas_by_key(&handles).remove(&key).unwrap_or_default();
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
    fn scaled(&self) -> Vec<HandlesOfGroup> {
        let handles = self.handles();
        let mut replicas = replicas_by_key(&handles);
        let of = |handle: &Handle| handle.proc.spec().scale.is_some() && !handle.proc.spec().trial;
        let scaled = handles.iter().filter(|handle| of(handle)).map(|handle| handle.proc.key.clone());
        let keys: BTreeSet<ProcName> = scaled.chain(replicas.keys().cloned()).collect();
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
        let scaling = self.primary.as_ref().and_then(|primary| primary.proc.spec().scale.clone());
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
    let (spec, shown) = (proc.spec(), status.record.state.name());
    let pids = proc.cgroup.pids().unwrap_or_default();
    let all = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let ended = matches!(status.record.state, State::Stopped { exit: Some(_) });
    Member {
        name: proc.name.clone(),
        id: handle.number,
        state: match shown {
            StateName::Parked | StateName::Archived => MemberState::Down,
            StateName::Restarting => MemberState::Restarting,
            StateName::Stopped if ended => MemberState::Ended,
            StateName::Stopped | StateName::Stopping | StateName::Elsewhere => MemberState::Stopped,
            _ => MemberState::Up,
        },
        cpus: spec.limits.cpus.unwrap_or(all).min(all),
        usage: LoadCounters::read(&pids, proc.cgroup.cpu_ns().unwrap_or(0), proc.cgroup.refaults()),
    }
}

/// TCP ports at which a proc that is in memory listens.
fn listened_at(handle: &Handle, ports: &[PortSpec]) -> Vec<u16> {
    let (State::Hot { init, .. } | State::Hibernated { init, .. }) = handle.status.borrow().record.state else {
        return Vec::new();
    };
    let tcp = ports.iter().filter(|port| port.proto == Protocol::Tcp).map(|port| port.port);
    tcp.filter(|port| listens(init, Protocol::Tcp, *port)).collect()
}
