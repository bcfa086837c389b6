//! Tests of watches and waits, and spawned procs that end when the test says so.

use super::*;
use crate::memory::KeptWait;
use crate::wire::{AwaitCall, SpawnCall, WhoamiCall};
use kip_service::SpawnService;
use kip_types::api::spawn::{EvictRequest, SpawnMoment, SpawnRequest, SpawnedState, SpawnedView};
use kip_types::spec::ProcClass;

/// Spawned procs that end when `ended` has their names.
#[derive(Default)]
pub(super) struct Jobs {
    ended: tokio::sync::watch::Sender<Vec<ProcName>>,
    spawned: AtomicU64,
}

fn job(name: ProcName) -> SpawnedView {
    SpawnedView {
        name,
        command: Vec::new(),
        parent: None,
        detached: false,
        class: ProcClass::Lc,
        state: SpawnedState::Live,
        tier: None,
        waits_for: None,
        started: true,
        evicted: None,
        spawned_at_ms: 1,
        end: None,
    }
}

#[async_trait]
impl SpawnService for Jobs {
    async fn spawn(&self, _: SpawnRequest) -> Result<SpawnedView, Refusal> {
        let count = self.spawned.fetch_add(1, Ordering::SeqCst);
        Ok(job(format!("job-{count}").parse().unwrap()))
    }

    async fn spawned(&self) -> Result<Vec<SpawnedView>, Refusal> {
        none()
    }

    async fn spawned_one(&self, _: ProcName) -> Result<SpawnedView, Refusal> {
        none()
    }

    async fn wait_spawned(&self, name: ProcName, _: SpawnMoment) -> Result<SpawnedView, Refusal> {
        let _ = self.ended.subscribe().wait_for(|ended| ended.contains(&name)).await;
        Ok(job(name))
    }

    async fn evict(&self, _: ProcName, _: EvictRequest) -> Result<SpawnedView, Refusal> {
        none()
    }
}

#[async_trait]
impl SpawnPrograms for Jobs {
    async fn spawn_child(&self, _: ProcName, request: SpawnRequest) -> Result<SpawnedView, Refusal> {
        self.spawn(request).await
    }

    async fn evict_child(&self, _: ProcName, name: ProcName, request: EvictRequest) -> Result<SpawnedView, Refusal> {
        self.evict(name, request).await
    }

    async fn say_started(&self, _: ProcName) -> Result<(), Refusal> {
        none()
    }

    async fn say_exited(&self, _: ProcName, _: i32, _: Option<String>) -> Result<(), Refusal> {
        none()
    }

    async fn wait_own_evict(&self, _: ProcName) -> Result<SpawnedView, Refusal> {
        none()
    }
}

fn wait(name: &str) -> CallKind {
    CallKind::Await(AwaitCall { name: name.to_owned(), moment: 1 })
}

fn is_of(answer: &(u64, AnswerKind), id: u64, name: &str) -> bool {
    matches!(answer, (is, AnswerKind::Spawned(spawned)) if *is == id && spawned.name == name)
}

// promise spawn: a wait over the runtime socket keeps no other call of its connection waiting, goes
//   on with the next daemon, and is answered once
#[test]
fn waits_are_answered_when_their_moment_comes() {
    let mut both = Both::new();
    let name = |name: &str| -> ProcName { name.parse().unwrap() };
    daemon().block_on(async {
        both.greet().await;
        both.say(2, wait("job-7"));
        both.say(3, wait("job-8"));
        both.say(4, wait("job-9"));
        both.say(5, CallKind::Spawn(SpawnCall::default()));
        assert!(is_of(&both.hear().await, 5, "job-0"));
        both.jobs.ended.send_modify(|ended| ended.push(name("job-8")));
        assert!(is_of(&both.hear().await, 3, "job-8"));
        both.say(6, CallKind::Unwatch(crate::wire::UnwatchCall { watch: 4 }));
        assert!(matches!(both.hear().await, (6, AnswerKind::Done(_))));
        let memory = ConnectionMemory::of(both.home.held(1, MEMORY).unwrap());
        let call = Some(AwaitCall { name: "job-7".to_owned(), moment: 1 });
        let left = KeptCalls { watches: Vec::new(), waits: vec![KeptWait { id: 2, call }] };
        while memory.calls() != Some(left.clone()) {
            tokio::task::yield_now().await;
        }
    });
    // It has ended while no daemon was there, and the end of job-9 is waited for no more.
    both.jobs.ended.send_modify(|ended| ended.extend([name("job-7"), name("job-9")]));
    daemon().block_on(async {
        both.resume();
        assert!(is_of(&both.hear().await, 2, "job-7"));
        both.say(7, CallKind::Whoami(WhoamiCall {}));
        assert!(matches!(both.hear().await, (7, AnswerKind::Identity(_))));
    });
}

// promise runtime: a watch goes on with the next daemon, after the revision that was told last
#[test]
fn watches_go_on() {
    let mut both = Both::new();
    let change = |revision| {
        let path: TreePath = "/a".parse().unwrap();
        let change = TreeChange { revision, kind: TreeChangeKind::Removed, path, from: None, node: None };
        Ok(TreeChanges { revision, changes: vec![change] })
    };
    daemon().block_on(async {
        both.greet().await;
        both.say(5, CallKind::Watch(WatchCall { path: "/a".to_owned(), only: false, from: None }));
        assert!(matches!(both.hear().await, (5, AnswerKind::Changes(first)) if first.revision == 10));
        let sender = both.tree.watches.lock()[0].clone();
        sender.send(change(12)).await.unwrap();
        assert!(matches!(both.hear().await, (5, AnswerKind::Changes(changes)) if changes.revision == 12));
        let memory = ConnectionMemory::of(both.home.held(1, MEMORY).unwrap());
        // What is being written is not whole.
        while memory.calls().is_none_or(|calls| calls.watches[0].seen != 12) {
            tokio::task::yield_now().await;
        }
    });
    let memory = ConnectionMemory::of(both.home.held(1, MEMORY).unwrap());
    daemon().block_on(async {
        both.resume();
        both.say(6, put());
        assert!(matches!(both.hear().await, (6, AnswerKind::Node(_))));
        assert_eq!(*both.tree.from.lock(), [None, Some(12)]);
        let sender = both.tree.watches.lock()[1].clone();
        sender.send(change(13)).await.unwrap();
        assert!(matches!(both.hear().await, (5, AnswerKind::Changes(changes)) if changes.revision == 13));
        // The last answer to a watch is its failure.
        sender.send(Err(Refusal::new(Code::State, "not kept any more"))).await.unwrap();
        assert_eq!(code(&both.hear().await.1), Some(FailureCode::Condition));
        both.say(7, CallKind::Unwatch(crate::wire::UnwatchCall { watch: 5 }));
        assert!(matches!(both.hear().await, (7, AnswerKind::Done(_))));
        assert_eq!(memory.calls(), Some(KeptCalls::default()));
    });
}

#[test]
fn changes_that_are_too_long_for_an_answer_come_in_parts() {
    let mut both = Both::new();
    let name = "n".repeat(200);
    let path = |at: usize| format!("/{name}/{name}/{name}/{name}/{at}").parse::<TreePath>().unwrap();
    let change = |path| TreeChange { revision: 12, kind: TreeChangeKind::Removed, path, from: None, node: None };
    let changes: Vec<TreeChange> = (0..6_000).map(path).map(change).collect();
    daemon().block_on(async {
        both.greet().await;
        both.say(5, CallKind::Watch(WatchCall { path: "/".to_owned(), only: false, from: None }));
        assert!(matches!(both.hear().await, (5, AnswerKind::Changes(first)) if !first.more));
        let sender = both.tree.watches.lock()[0].clone();
        sender.send(Ok(TreeChanges { revision: 12, changes })).await.unwrap();
        let (mut gathered, mut parts) = (None, Vec::new());
        let all = loop {
            let (5, AnswerKind::Changes(next)) = both.hear().await else { panic!("no changes") };
            parts.push((next.part, next.revision));
            // A daemon that is ended in between sends them from the first part on.
            if parts.len() == 2 {
                let again = WireChanges { part: 0, more: true, ..next.clone() };
                assert_eq!(WireChanges::joined(&mut gathered.clone(), again), None);
            }
            if let Some(all) = WireChanges::joined(&mut gathered, next) {
                break all;
            }
        };
        assert_eq!(parts, [(0, 12), (1, 12), (2, 12)]);
        assert!(
            all.changes
                .iter()
                .map(|change| &change.path)
                .eq((0..6_000).map(|at| path(at).into()).collect::<Vec<String>>().iter())
        );
        let memory = ConnectionMemory::of(both.home.held(1, MEMORY).unwrap());
        while memory.calls().is_none_or(|calls| calls.watches[0].seen != 12) {
            tokio::task::yield_now().await;
        }
        let anew = WireChanges { changes: all.changes[..1].to_vec(), part: 0, more: false, revision: 12 };
        assert_eq!(WireChanges::joined(&mut Some(all), anew.clone()), Some(anew), "part 0 begins anew");
    });
}
