//! Procs as those are asked that programs and clients spawn ([`kip_spawn`]).

use crate::registry::Registry;
use crate::task::Handle;
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_service::ProcService;
pub use kip_spawn::SpawnHost;
use kip_spawn::host::MachineRoom;
use kip_spawn::{HostedProc, ProgramEnd};
use kip_types::api::{Refusal, RemoveRequest, RunRequest, StopRequest};
use kip_types::lifecycle::{Exit, Tier};
use kip_types::{ProcName, Spec, State};
use std::future::pending;
use std::sync::{Arc, Weak};

/// The procs of a registry, which a service makes, ends and removes.
pub struct SpawnProcs {
    registry: Weak<Registry>,
    service: Arc<dyn ProcService>,
    machine: String,
    room: MachineRoom,
}

impl SpawnProcs {
    /// Those of this one.
    pub fn of(registry: &Arc<Registry>, service: Arc<dyn ProcService>) -> SpawnProcs {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let room = MachineRoom { cpus, memory_bytes: registry.host.pressure.view().limit_bytes };
        SpawnProcs { registry: Arc::downgrade(registry), service, machine: registry.host.name.clone(), room }
    }

    fn find(&self, is_it: impl Fn(&Handle) -> bool) -> Option<Arc<dyn HostedProc>> {
        let handle = self.registry.upgrade()?.all_handles().into_iter().find(is_it)?;
        let (registry, service) = (self.registry.clone(), Arc::clone(&self.service));
        Some(Arc::new(Hosted { handle, registry, service }))
    }
}

#[async_trait]
impl SpawnHost for SpawnProcs {
    async fn start(&self, request: RunRequest) -> Result<(), Refusal> {
        self.service.run(request).await.map(drop)
    }

    fn proc(&self, key: &ProcName) -> Option<Arc<dyn HostedProc>> {
        self.find(|handle| handle.proc.key == *key)
    }

    fn named(&self, name: &ProcName) -> Option<Arc<dyn HostedProc>> {
        self.find(|handle| *handle.proc.name == *name && !handle.proc.spec().trial)
    }

    fn room(&self) -> MachineRoom {
        self.room
    }

    fn machine(&self) -> &str {
        &self.machine
    }
}

/// One of them.
struct Hosted {
    handle: Handle,
    registry: Weak<Registry>,
    service: Arc<dyn ProcService>,
}

impl Hosted {
    fn name(&self) -> ProcName {
        ProcName::clone(&self.handle.proc.name)
    }

    /// Its task is over, as all are at the end of the daemon: returns only if the proc was removed.
    async fn unless_daemon_ends(&self) {
        let Some(registry) = self.registry.upgrade() else { return pending().await };
        let is_there = registry.at(self.handle.proc.slot).is_some_and(|there| there.number == self.handle.number);
        if is_there {
            pending().await
        }
    }
}

#[async_trait]
impl HostedProc for Hosted {
    fn key(&self) -> ProcName {
        self.handle.proc.key.clone()
    }

    fn spec(&self) -> Spec {
        Spec::clone(&self.handle.proc.spec())
    }

    fn started_at_ms(&self) -> u64 {
        self.handle.status.borrow().record.started_at_ms
    }

    fn tier(&self) -> Option<Tier> {
        self.handle.status.borrow().record.state.tier()
    }

    async fn program_gone(&self, started_at_ms: u64) {
        let mut status = self.handle.status.clone();
        let gone = status.wait_for(|status| {
            let record = &status.record;
            let is_over =
                matches!(record.state, State::Stopped { .. } | State::Restarting { .. } | State::Elsewhere { .. });
            is_over || record.started_at_ms != started_at_ms
        });
        if gone.await.is_err() {
            self.unless_daemon_ends().await;
        }
    }

    async fn program_ended(&self) -> Option<ProgramEnd> {
        let mut status = self.handle.status.clone();
        let ended = status.wait_for(|status| match status.record.state {
            State::Stopped { .. } => !status.record.stands_aside,
            State::Elsewhere { .. } => true,
            _ => false,
        });
        let record = ended.await.ok().map(|status| status.record.clone());
        let Some(record) = record else {
            self.unless_daemon_ends().await;
            return None;
        };
        if let State::Elsewhere { .. } = record.state {
            return Some(ProgramEnd { exit: Some(Exit::Unknown), words: None });
        }
        let exit = record.exit();
        if exit == Some(Exit::Code(0)) {
            return Some(ProgramEnd { exit, words: None });
        }
        let proc = Arc::clone(&self.handle.proc);
        let last = blocking(move || proc.shared.last_words(&proc)).await;
        let memory = record.out_of_memory.then_some("out of memory");
        let words: Vec<&str> = memory.into_iter().chain(last.strip_prefix("; ")).collect();
        Some(ProgramEnd { exit, words: (!words.is_empty()).then(|| words.join("; ")) })
    }

    async fn stop(&self, grace_ms: u64) -> Result<(), Refusal> {
        self.service.stop(self.name(), StopRequest { grace_ms: Some(grace_ms) }).await.map(drop)
    }

    async fn remove(&self) -> Result<(), Refusal> {
        self.service.remove(self.name(), RemoveRequest { force: false }).await
    }
}
