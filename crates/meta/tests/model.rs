//! Random operations on the store in one file, compared with a model in memory: what is there, what
//! was there at each revision, what a watch sees, and all of it again after a restart.

use kip_meta::{
    ChangeBatch, Condition, EmbeddedMeta, KeptHistory, KeyChange, KeySet, KeyValue, LeaseId, Meta, MetaError,
    RangeRequest, Revision, Transaction, TransactionOutcome,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// Far longer than a test takes.
const TTL: Duration = Duration::from_secs(1000);

#[derive(Debug, Clone)]
enum Step {
    /// Puts and deletes, each with a key, under a condition.
    Transact {
        condition: Cond,
        puts: Vec<(u8, u8, Option<usize>)>,
        deletes: Vec<(u8, bool)>,
    },
    Grant,
    Revoke(usize),
    Reopen,
}

/// A condition on a key; `true` for one that holds, as far as that can be.
#[derive(Debug, Clone)]
enum Cond {
    Exists(u8),
    Absent(u8),
    NonePrefixed(u8),
    Modified(u8, bool),
    Created(u8, bool),
    Value(u8, bool),
}

fn cond() -> impl Strategy<Value = Cond> {
    let key = 0..6u8;
    prop_oneof![
        key.clone().prop_map(Cond::Exists),
        key.clone().prop_map(Cond::Absent),
        key.clone().prop_map(Cond::NonePrefixed),
        (key.clone(), any::<bool>()).prop_map(|(key, holds)| Cond::Modified(key, holds)),
        (key.clone(), any::<bool>()).prop_map(|(key, holds)| Cond::Created(key, holds)),
        (key, any::<bool>()).prop_map(|(key, holds)| Cond::Value(key, holds)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let put = (0..6u8, any::<u8>(), proptest::option::of(0..4usize));
    let puts = proptest::collection::vec(put, 0..4);
    let deletes = proptest::collection::vec((0..6u8, any::<bool>()), 0..2);
    prop_oneof![
        12 => (cond(), puts, deletes).prop_map(|(condition, puts, deletes)| Step::Transact { condition, puts, deletes }),
        2 => Just(Step::Grant),
        2 => (0..4usize).prop_map(Step::Revoke),
        1 => Just(Step::Reopen),
    ]
}

/// Some are prefixes of others.
fn key(n: u8) -> Vec<u8> {
    [b"a".as_slice(), b"a/", b"a/b", b"b", &[0xff], &[0xff, 0xff]][usize::from(n)].to_vec()
}

#[derive(Default)]
struct Model {
    keys: BTreeMap<Vec<u8>, KeyValue>,
    revision: Revision,
    batches: Vec<ChangeBatch>,
    /// What was there at each revision.
    states: BTreeMap<Revision, Vec<KeyValue>>,
    leases: Vec<LeaseId>,
    live: BTreeSet<LeaseId>,
}

impl Model {
    fn new() -> Model {
        Model { revision: 1, states: BTreeMap::from([(1, Vec::new())]), ..Model::default() }
    }

    fn lease(&self, at: Option<usize>) -> Option<LeaseId> {
        at.and_then(|at| self.leases.get(at).copied())
    }

    fn condition(&self, cond: &Cond) -> Condition {
        let is = |n: &u8| self.keys.get(&key(*n));
        match cond {
            Cond::Exists(n) => Condition::Exists(key(*n)),
            Cond::Absent(n) => Condition::Absent(KeySet::One(key(*n))),
            Cond::NonePrefixed(n) => Condition::Absent(KeySet::Prefix(key(*n))),
            Cond::Modified(n, holds) => {
                Condition::Modified(key(*n), is(n).map_or(1, |kv| kv.modified + u64::from(!holds)))
            }
            Cond::Created(n, holds) => {
                Condition::Created(key(*n), is(n).map_or(1, |kv| kv.created + u64::from(!holds)))
            }
            Cond::Value(n, holds) => {
                let value = is(n).map_or_else(Vec::new, |kv| kv.value.clone());
                Condition::Value(key(*n), if *holds { value } else { b"another".to_vec() })
            }
        }
    }

    fn holds(&self, condition: &Condition) -> bool {
        let keys = condition.keys();
        condition.holds(self.keys.values().find(|kv| keys.contains(&kv.key)))
    }

    fn change(&mut self, changes: Vec<KeyChange>) {
        if changes.is_empty() {
            return;
        }
        self.revision += 1;
        for change in &changes {
            match &change.now {
                Some(kv) => self.keys.insert(change.key.clone(), kv.clone()),
                None => self.keys.remove(&change.key),
            };
        }
        self.batches.push(ChangeBatch { revision: self.revision, changes });
        self.states.insert(self.revision, self.keys.values().cloned().collect());
    }

    fn removal(&self, of: impl Fn(&KeyValue) -> bool) -> Vec<KeyChange> {
        let gone = self.keys.values().filter(|kv| of(kv));
        gone.map(|kv| KeyChange { key: kv.key.clone(), now: None, before: Some(kv.clone()) }).collect()
    }
}

fn open(dir: &Path) -> EmbeddedMeta {
    loop {
        match EmbeddedMeta::open(&dir.join("meta"), KeptHistory::default()) {
            // The task of a watch may have the file for a moment.
            Err(MetaError::InUse { .. }) => std::thread::sleep(Duration::from_millis(1)),
            opened => return opened.unwrap(),
        }
    }
}

/// Does one step with both, and compares their answers.
async fn take(meta: &EmbeddedMeta, model: &mut Model, step: &Step) {
    match step {
        Step::Reopen => unreachable!("the caller reopens"),
        Step::Grant => {
            let lease = meta.grant(TTL).await.unwrap().id;
            assert!(model.leases.iter().all(|known| *known < lease));
            model.leases.push(lease);
            model.live.insert(lease);
        }
        Step::Revoke(at) => {
            let Some(lease) = model.lease(Some(*at)) else { return };
            let revoked = meta.revoke(lease).await;
            assert_eq!(revoked.is_ok(), model.live.remove(&lease));
            model.change(model.removal(|kv| kv.lease == Some(lease)));
        }
        Step::Transact { condition, puts, deletes } => {
            let condition = model.condition(condition);
            let holds = model.holds(&condition);
            let mut transaction = Transaction::when(condition);
            let (next, mut changes) = (model.revision + 1, Vec::new());
            for (n, value, lease) in puts {
                let (key, lease) = (key(*n), model.lease(*lease));
                transaction = transaction.put_leased(key.clone(), vec![*value], lease);
                let before = model.keys.get(&key).cloned();
                let (created, version) = before.as_ref().map_or((next, 1), |kv| (kv.created, kv.version + 1));
                let now = KeyValue { key: key.clone(), value: vec![*value], created, modified: next, version, lease };
                changes.push(KeyChange { key, now: Some(now), before });
            }
            for (n, with_prefix) in deletes {
                let keys = if *with_prefix { KeySet::Prefix(key(*n)) } else { KeySet::One(key(*n)) };
                for change in model.removal(|kv| keys.contains(&kv.key)) {
                    if !changes.iter().any(|other| other.key == change.key) {
                        changes.push(change);
                    }
                }
                transaction = transaction.delete(keys);
            }
            let gone = puts.iter().filter_map(|(.., lease)| model.lease(*lease)).any(|l| !model.live.contains(&l));
            match meta.transact(&transaction).await {
                Err(MetaError::Invalid(_)) => assert!(transaction.check().is_err()),
                Err(MetaError::LeaseGone(_)) => assert!(holds && gone),
                Err(error) => panic!("{error}"),
                Ok(TransactionOutcome::Refused { revision, .. }) => {
                    assert_eq!((holds, revision), (false, model.revision))
                }
                Ok(TransactionOutcome::Done { revision }) => {
                    assert!(holds && !gone);
                    model.change(changes);
                    assert_eq!(revision, model.revision);
                }
            }
        }
    }
}

async fn compare(meta: &EmbeddedMeta, model: &Model) {
    let found = meta.range(&RangeRequest::all(KeySet::prefix(""))).await.unwrap();
    assert_eq!(found.keys, model.states[&model.revision]);
    assert_eq!(found.revision, model.revision);
}

async fn run(steps: Vec<Step>) {
    let dir = tempfile::tempdir().unwrap();
    let (mut meta, mut model) = (open(dir.path()), Model::new());
    for step in &steps {
        if matches!(step, Step::Reopen) {
            drop(meta);
            meta = open(dir.path());
        } else {
            take(&meta, &mut model, step).await;
        }
        compare(&meta, &model).await;
    }
    for (revision, state) in &model.states {
        let found = meta.range(&RangeRequest::all(KeySet::prefix("")).at(*revision)).await.unwrap();
        assert_eq!(found.keys, *state, "at {revision}");
    }
    let mut watch = meta.watch(KeySet::prefix(""), 1).await.unwrap();
    for batch in &model.batches {
        assert_eq!(watch.next().await.unwrap(), *batch);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    // promise meta: random operations leave what a model of them has, at each revision and after
    //   each restart
    #[test]
    fn random_operations_match_a_model(steps in proptest::collection::vec(step(), 1..40)) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run(steps));
    }
}
