//! Calls about procs by spawn, as the service has them, and its answers as messages.

use crate::calls::{failure, invalid};
use crate::home::RuntimeHome;
use crate::wire::{
    AnswerKind, AwaitCall, CallKind, RuntimeFailure, SpawnCall, WireDone, WireEndKind, WireMoment, WireSpawnEnd,
    WireSpawned,
};
use kip_service::SpawnPrograms;
use kip_types::ProcName;
use kip_types::api::Refusal;
use kip_types::api::spawn::{EvictRequest, SpawnEnd, SpawnEndKind, SpawnMoment, SpawnRequest, SpawnedView};
use kip_types::spec::{ProcClass, Sandbox};

fn name_of(text: &str) -> Result<ProcName, RuntimeFailure> {
    text.parse().map_err(invalid)
}

/// What is not said is empty.
fn said(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

fn end(end: SpawnEnd) -> WireSpawnEnd {
    let why = match end.why {
        SpawnEndKind::Exited => WireEndKind::Exited,
        SpawnEndKind::Killed => WireEndKind::Killed,
        SpawnEndKind::Evicted => WireEndKind::Evicted,
        SpawnEndKind::NeverStarted => WireEndKind::NeverStarted,
        SpawnEndKind::Lost => WireEndKind::Lost,
    };
    let number = |of: Option<i32>| of.and_then(|number| u32::try_from(number).ok());
    WireSpawnEnd {
        why: why.into(),
        exit_code: number(end.exit_code),
        signal: number(end.signal),
        status: number(end.status),
        message: end.message.unwrap_or_default(),
    }
}

fn spawned(view: SpawnedView) -> AnswerKind {
    let SpawnedView { name, started, evicted, end: ended, .. } = view;
    AnswerKind::Spawned(WireSpawned { name: name.into(), started, evicted, end: ended.map(end) })
}

fn request(call: SpawnCall) -> SpawnRequest {
    SpawnRequest {
        command: call.command,
        env: call.env.into_iter().map(|variable| (variable.name, variable.value)).collect(),
        workdir: said(call.workdir).map(Into::into),
        class: if call.best_effort { ProcClass::Be } else { ProcClass::Lc },
        cpus: call.cpus_milli.map(|milli| f64::from(milli) / 1000.0),
        memory_bytes: call.memory_bytes,
        domain: said(call.domain),
        detached: call.detached,
        says_started: call.says_started,
        sandbox: call.light.then_some(Sandbox::Light),
        ..SpawnRequest::default()
    }
}

/// Answers a call about spawned procs that waits for nothing.
pub(crate) async fn ask(
    spawns: &dyn SpawnPrograms,
    home: &dyn RuntimeHome,
    call: CallKind,
) -> Result<AnswerKind, RuntimeFailure> {
    let refused = |refusal: Refusal| failure(&refusal);
    match call {
        CallKind::Spawn(call) => Ok(spawned(spawns.spawn_child(home.name(), request(call)).await.map_err(refused)?)),
        CallKind::Started(_) => {
            spawns.say_started(home.key()).await.map_err(refused)?;
            Ok(AnswerKind::Done(WireDone {}))
        }
        CallKind::Exited(call) => {
            let status = i32::try_from(call.status).map_err(invalid)?;
            spawns.say_exited(home.key(), status, said(call.message)).await.map_err(refused)?;
            Ok(AnswerKind::Done(WireDone {}))
        }
        CallKind::Evict(call) => {
            let request = EvictRequest { grace_ms: call.grace_ms, reason: said(call.reason) };
            Ok(spawned(spawns.evict_child(home.name(), name_of(&call.name)?, request).await.map_err(refused)?))
        }
        _ => unreachable!("it is not about spawned procs"),
    }
}

/// Answers a wait when its moment has come.
pub(crate) async fn wait(
    spawns: &dyn SpawnPrograms,
    home: &dyn RuntimeHome,
    call: &AwaitCall,
) -> Result<AnswerKind, RuntimeFailure> {
    let refused = |refusal: Refusal| failure(&refusal);
    if call.name.is_empty() {
        return Ok(spawned(spawns.wait_own_evict(home.key()).await.map_err(refused)?));
    }
    let moment = match call.moment() {
        WireMoment::Start => SpawnMoment::Start,
        WireMoment::Exit => SpawnMoment::Exit,
        WireMoment::Evict => SpawnMoment::Evict,
    };
    Ok(spawned(spawns.wait_spawned(name_of(&call.name)?, moment).await.map_err(refused)?))
}
