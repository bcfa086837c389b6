//! Spawned procs of which there is one, `job-1`, that has ended; `job-2` does not end.

use super::*;
use kip_service::SpawnService;
use kip_types::api::spawn::{
    EvictRequest, SpawnEnd, SpawnEndKind, SpawnMoment, SpawnRequest, SpawnedState, SpawnedView,
};
use kip_types::spec::ProcClass;

/// The service.
pub struct FakeSpawner;

fn ended(name: &str, command: Vec<String>) -> SpawnedView {
    let end =
        SpawnEnd { why: SpawnEndKind::Exited, exit_code: Some(3), signal: None, status: None, message: None, at_ms: 2 };
    SpawnedView {
        name: name.parse().unwrap(),
        command,
        parent: None,
        detached: false,
        class: ProcClass::Be,
        state: SpawnedState::Ended,
        tier: None,
        waits_for: None,
        started: true,
        evicted: None,
        spawned_at_ms: 1,
        end: Some(end),
    }
}

#[async_trait]
impl SpawnService for FakeSpawner {
    async fn spawn(&self, request: SpawnRequest) -> Result<SpawnedView, Refusal> {
        let view = ended("job-2", request.command);
        Ok(SpawnedView { class: request.class, parent: request.parent, state: SpawnedState::Queued, end: None, ..view })
    }

    async fn spawned(&self) -> Result<Vec<SpawnedView>, Refusal> {
        Ok(vec![ended("job-1", Vec::new())])
    }

    async fn spawned_one(&self, name: ProcName) -> Result<SpawnedView, Refusal> {
        match name.as_str() {
            "job-1" => Ok(ended("job-1", Vec::new())),
            "job-2" => Ok(SpawnedView { state: SpawnedState::Live, end: None, ..ended("job-2", Vec::new()) }),
            _ => Err(unknown(&name)),
        }
    }

    async fn wait_spawned(&self, name: ProcName, moment: SpawnMoment) -> Result<SpawnedView, Refusal> {
        let view = self.spawned_one(name).await?;
        if view.end.is_none() && moment != SpawnMoment::Start {
            std::future::pending::<()>().await;
        }
        Ok(view)
    }

    async fn evict(&self, name: ProcName, request: EvictRequest) -> Result<SpawnedView, Refusal> {
        Ok(SpawnedView { evicted: request.reason, ..self.spawned_one(name).await? })
    }
}
