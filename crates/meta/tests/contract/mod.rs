//! What each metadata store does, whichever it is. `contract!` makes a test of each case.

pub mod faulty;

use faulty::{Fault, Faulty};
use kip_meta::{
    Certain, ChangeBatch, Condition, KeySet, KeyValue, LeaseId, Meta, MetaError, MetaWatch, OutcomeTicket, RangeFound,
    RangeRequest, Revision, Transaction, TransactionOutcome,
};
use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a test waits for what must come, beside others that keep the disk busy.
const SOON: Duration = Duration::from_secs(90);
/// A lease that every store can give, and that outlives a few calls.
pub const TTL: Duration = Duration::from_secs(3);
/// The same behind a bad connection.
const PATIENT_TTL: Duration = Duration::from_secs(5);
/// Longer than a test takes.
const LONG: Duration = Duration::from_secs(800);

/// Has a store forget all that was before a revision.
pub type Forget = Box<dyn Fn(Revision) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// A store of one test.
pub struct Subject {
    pub meta: Arc<dyn Meta>,
    /// The same store by a good connection.
    pub calm: Arc<dyn Meta>,
    pub forget: Forget,
    /// The time of a lease that is to run out.
    pub ttl: Duration,
    /// What ends when the test does.
    pub _guard: Box<dyn Any + Send>,
}

/// The store behind faults by chance, and a client that finds out what became of each call.
pub fn behind_faults(subject: Subject) -> Subject {
    let faulty = Arc::new(Faulty::by_chance(subject.meta, 22));
    Subject { meta: Arc::new(Certain::new(faulty, Duration::from_secs(120))), ttl: PATIENT_TTL, ..subject }
}

/// Revisions that [`Subject::forget`] leaves at most. More than any case makes while a watch is
/// lost: behind a bad connection each write makes some, to find out what became of it.
pub const KEPT: u64 = 400;

fn absent(key: &str) -> Condition {
    Condition::Absent(KeySet::one(key))
}

impl Subject {
    /// Makes a transaction that must be made.
    async fn done(&self, transaction: Transaction) -> Revision {
        match self.meta.transact(&transaction).await.unwrap() {
            TransactionOutcome::Done { revision } => revision,
            refused => panic!("{transaction:?}: {refused:?}"),
        }
    }

    async fn refused(&self, transaction: Transaction) -> Vec<Option<KeyValue>> {
        match self.meta.transact(&transaction).await.unwrap() {
            TransactionOutcome::Refused { found, .. } => found,
            done => panic!("{transaction:?}: {done:?}"),
        }
    }

    /// Writes a key, whatever it is.
    async fn put(&self, key: &str, value: &str) -> Revision {
        self.put_leased(key, value, None).await
    }

    async fn put_leased(&self, key: &str, value: &str, lease: Option<LeaseId>) -> Revision {
        let condition = match self.meta.get(key.as_bytes()).await.unwrap() {
            Some(kv) => Condition::Modified(kv.key, kv.modified),
            None => absent(key),
        };
        self.done(Transaction::when(condition).put_leased(key, value, lease)).await
    }

    async fn get(&self, key: &str) -> Option<KeyValue> {
        self.meta.get(key.as_bytes()).await.unwrap()
    }

    async fn range(&self, request: RangeRequest) -> RangeFound {
        self.meta.range(&request).await.unwrap()
    }

    async fn watch(&self, prefix: &str, from: Revision) -> MetaWatch {
        self.meta.watch(KeySet::prefix(prefix), from).await.unwrap()
    }
}

fn names(found: &RangeFound) -> Vec<&str> {
    found.keys.iter().map(|kv| std::str::from_utf8(&kv.key).unwrap()).collect()
}

/// The next batch with changes.
async fn next(watch: &mut MetaWatch) -> Result<ChangeBatch, MetaError> {
    let with_changes = async {
        loop {
            match watch.next().await {
                Ok(batch) if batch.changes.is_empty() => {}
                batch => return batch,
            }
        }
    };
    tokio::time::timeout(SOON, with_changes).await.expect("the next change comes soon")
}

// promise meta: a key tells when it was made, when it was written and how often
pub async fn keys_have_revisions(subject: &Subject) {
    assert_eq!(subject.get("a").await, None);
    let made = subject.put("a", "1").await;
    let expected = |value: &str, created, modified, version| {
        Some(KeyValue { key: b"a".to_vec(), value: value.into(), created, modified, version, lease: None })
    };
    assert_eq!(subject.get("a").await, expected("1", made, made, 1));
    let written = subject.put("a", "2").await;
    assert!(written > made);
    assert_eq!(subject.get("a").await, expected("2", made, written, 2));
    subject.done(Transaction::when(Condition::Exists(b"a".to_vec())).delete(KeySet::one("a"))).await;
    assert_eq!(subject.get("a").await, None);
    let again = subject.put("a", "3").await;
    assert_eq!(subject.get("a").await, expected("3", again, again, 1));
}

// promise meta: keys are read by prefix and interval, in their order, with a limit, as they are
//   and as they were
pub async fn ranges_are_read(subject: &Subject) {
    for key in ["b", "a/2", "a/1", "a", "c"] {
        subject.put(key, key).await;
    }
    let all = subject.range(RangeRequest::all(KeySet::prefix(""))).await;
    let ours = |found: &RangeFound| names(found).into_iter().filter(|name| name.len() <= 3).count();
    assert_eq!(ours(&all), 5);
    let slash = subject.range(RangeRequest::all(KeySet::prefix("a/"))).await;
    assert_eq!((names(&slash), slash.more), (vec!["a/1", "a/2"], false));
    let between = subject.range(RangeRequest::all(KeySet::interval("a/2", "c"))).await;
    assert_eq!(names(&between), ["a/2", "b"]);
    let two = subject.range(RangeRequest::all(KeySet::prefix("a")).limit(2)).await;
    assert_eq!((names(&two), two.more), (vec!["a", "a/1"], true));
    let none = subject.range(RangeRequest::all(KeySet::prefix("a")).limit(0)).await;
    assert_eq!((names(&none), none.more), (vec![], true));
    let then = all.revision;
    subject.put("a/1", "new").await;
    subject.done(Transaction::when(Condition::Exists(b"a".to_vec())).delete(KeySet::prefix("a/")).put("a0", "")).await;
    let now = subject.range(RangeRequest::all(KeySet::interval("a", "b"))).await;
    assert_eq!(names(&now), ["a", "a0"]);
    let before = subject.range(RangeRequest::all(KeySet::interval("a", "b")).at(then)).await;
    assert_eq!(names(&before), ["a", "a/1", "a/2"]);
    assert_eq!(before.keys[1].value, b"a/1");
    let limited = subject.range(RangeRequest::all(KeySet::interval("a", "b")).at(then).limit(1)).await;
    assert_eq!((names(&limited), limited.more), (vec!["a"], true));
    let wanted = now.revision + 1000;
    let error = subject.meta.range(&RangeRequest::all(KeySet::one("a")).at(wanted)).await.unwrap_err();
    assert!(matches!(error, MetaError::Future { wanted: w, .. } if w == wanted), "{error}");
}

// promise meta: a transaction is made whole if all its conditions hold, and not at all otherwise
pub async fn transactions_are_whole(subject: &Subject) {
    let made = subject.put("a", "1").await;
    let key = || b"a".to_vec();
    let hold = [
        Condition::Exists(key()),
        absent("b"),
        Condition::Absent(KeySet::prefix("b")),
        Condition::Modified(key(), made),
        Condition::Created(key(), made),
        Condition::Value(key(), b"1".to_vec()),
    ];
    let fail = [
        Condition::Exists(b"b".to_vec()),
        absent("a"),
        Condition::Absent(KeySet::prefix("")),
        Condition::Modified(key(), made - 1),
        Condition::Modified(b"b".to_vec(), 0),
        Condition::Created(key(), made + 1),
        Condition::Created(b"b".to_vec(), 0),
        Condition::Value(key(), b"2".to_vec()),
        Condition::Value(b"b".to_vec(), Vec::new()),
    ];
    for condition in fail {
        let all = hold.iter().cloned().fold(Transaction::when(condition.clone()), Transaction::and);
        let found = subject.refused(all.put("b", "").delete(KeySet::one("a"))).await;
        assert_eq!(found.len(), hold.len() + 1);
        assert_eq!(found[1].as_ref().map(|kv| kv.modified), Some(made), "{condition:?}");
        assert_eq!(found[2], None);
    }
    assert_eq!(subject.get("b").await, None);
    let all = hold.iter().cloned().fold(Transaction::when(Condition::Exists(key())), Transaction::and);
    let done = subject.done(all.put("b", "x").put("c", "y").delete(KeySet::one("a"))).await;
    assert_eq!(subject.get("a").await, None);
    for name in ["b", "c"] {
        assert_eq!(subject.get(name).await.unwrap().modified, done);
    }
}

// promise meta: what cannot be done is refused in one line and changes nothing
pub async fn nonsense_is_refused(subject: &Subject) {
    let twice = Transaction::when(absent("a")).put("a", "1").put("a", "2");
    let empty = Transaction::when(absent("a")).put("", "1");
    for transaction in [twice, empty] {
        let error = subject.meta.transact(&transaction).await.unwrap_err();
        assert!(matches!(error, MetaError::Invalid(_)), "{error}");
    }
    let unknown = LeaseId(0x7777);
    let leased = Transaction::when(absent("a")).put("b", "").put_leased("a", "", Some(unknown));
    let error = subject.meta.transact(&leased).await.unwrap_err();
    assert!(matches!(error, MetaError::LeaseGone(lease) if lease == unknown), "{error}");
    for error in [
        subject.meta.keep_alive(unknown).await.unwrap_err(),
        subject.meta.lease(unknown).await.unwrap_err(),
        subject.meta.revoke(unknown).await.unwrap_err(),
    ] {
        assert!(matches!(error, MetaError::LeaseGone(lease) if lease == unknown), "{error}");
        assert!(!error.to_string().contains('\n'));
    }
    for ttl in [Duration::ZERO, Duration::MAX] {
        assert!(matches!(subject.meta.grant(ttl).await.unwrap_err(), MetaError::Invalid(_)));
    }
    let backwards = RangeRequest::all(KeySet::interval("b", "a"));
    assert!(matches!(subject.meta.range(&backwards).await.unwrap_err(), MetaError::Invalid(_)));
    assert_eq!(names(&subject.range(RangeRequest::all(KeySet::interval("a", "c"))).await), Vec::<&str>::new());
}

// promise meta: writers that compare revisions lose no update
pub async fn comparing_writers_lose_nothing(subject: &Subject) {
    const WRITERS: usize = 4;
    const EACH: usize = 5;
    subject.put("sum", "0").await;
    let mut writers = tokio::task::JoinSet::new();
    for _ in 0..WRITERS {
        let meta = Arc::clone(&subject.meta);
        writers.spawn(async move {
            let (mut done, mut revisions) = (0, Vec::new());
            while done < EACH {
                let kv = meta.get(b"sum").await.unwrap().unwrap();
                let sum: usize = std::str::from_utf8(&kv.value).unwrap().parse().unwrap();
                let add = Transaction::when(Condition::Modified(kv.key, kv.modified)).put("sum", (sum + 1).to_string());
                if let Some(revision) = meta.transact(&add).await.unwrap().done() {
                    done += 1;
                    revisions.push(revision);
                }
            }
            revisions
        });
    }
    let mut all: Vec<Revision> = writers.join_all().await.into_iter().flatten().collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), WRITERS * EACH, "each update has a revision of its own");
    assert_eq!(subject.get("sum").await.unwrap().value, (WRITERS * EACH).to_string().into_bytes());
}

// promise meta: a watch begins in the past and goes on with what happens, in order, each revision
//   once and whole
pub async fn watches_see_everything(subject: &Subject) {
    let first = subject.put("w/a", "1").await;
    subject.put("other", "x").await;
    let mut watch = subject.watch("w/", first).await;
    let second =
        subject.done(Transaction::when(Condition::Exists(b"w/a".to_vec())).put("w/a", "2").put("w/b", "1")).await;
    let third = subject.done(Transaction::when(Condition::Exists(b"w/a".to_vec())).delete(KeySet::prefix("w/"))).await;
    let batch = next(&mut watch).await.unwrap();
    assert_eq!((batch.revision, batch.changes.len()), (first, 1));
    assert_eq!((batch.changes[0].now.as_ref().unwrap().version, &batch.changes[0].before), (1, &None));
    let mut batch = next(&mut watch).await.unwrap();
    batch.changes.sort_by(|a, b| a.key.cmp(&b.key));
    assert_eq!((batch.revision, batch.changes.len()), (second, 2));
    assert_eq!(batch.changes[0].before.as_ref().unwrap().value, b"1");
    assert_eq!(batch.changes[0].now.as_ref().unwrap().value, b"2");
    let batch = next(&mut watch).await.unwrap();
    assert_eq!((batch.revision, batch.changes.len()), (third, 2));
    assert!(batch.changes.iter().all(|change| change.now.is_none() && change.before.is_some()));
    // A watch that begins later has nothing of it; one that begins in the future waits for that.
    let mut late = subject.watch("w/", third + 2).await;
    subject.put("other", "y").await;
    let fourth = subject.put("w/late", "").await;
    assert_eq!(next(&mut late).await.unwrap().revision, fourth);
    assert_eq!(next(&mut watch).await.unwrap().revision, fourth);
}

// promise meta: watches that begin while others write miss nothing and see nothing twice
pub async fn watches_beside_writers(subject: &Subject) {
    const WRITERS: usize = 4;
    const EACH: usize = 12;
    let from = subject.put("n/begin", "").await + 1;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let meta = Arc::clone(&subject.meta);
        writers.spawn(async move {
            for n in 0..EACH {
                let key = format!("n/{writer}/{n}");
                let put = Transaction::when(Condition::Absent(KeySet::one(key.clone()))).put(key, "");
                meta.transact(&put).await.unwrap().done().unwrap();
            }
        });
    }
    let mut watchers = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let meta = Arc::clone(&subject.meta);
        watchers.spawn(async move {
            let mut watch = meta.watch(KeySet::prefix("n/"), from).await.unwrap();
            let (mut seen, mut last) = (Vec::new(), 0);
            while seen.len() < WRITERS * EACH {
                let batch = next(&mut watch).await.unwrap();
                assert!(batch.revision > last, "revisions come in order");
                last = batch.revision;
                seen.extend(batch.changes.into_iter().map(|change| change.key));
            }
            seen.sort();
            seen.dedup();
            seen.len()
        });
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    writers.join_all().await;
    assert_eq!(watchers.join_all().await, [WRITERS * EACH; 3]);
}

// promise meta: the store refuses a watch from before the oldest change that it keeps, and a reader
//   of a state from before it, and says so
pub async fn what_is_forgotten_is_said(subject: &Subject) {
    let first = subject.put("f", "0").await;
    // Not what is looked at here: without faults, and at once.
    let mut fillers = tokio::task::JoinSet::new();
    for n in 0..2 * KEPT {
        let (calm, key) = (Arc::clone(&subject.calm), format!("other/{n}"));
        fillers.spawn(async move { calm.transact(&Transaction::when(absent(&key)).put(key, "")).await.unwrap() });
    }
    assert!(fillers.join_all().await.into_iter().all(|outcome| outcome.done().is_some()));
    let last = subject.put("f", "1").await;
    let newest = subject.put("f", "2").await;
    (subject.forget)(last).await;
    let error = next(&mut subject.watch("f", first).await).await.unwrap_err();
    assert!(matches!(error, MetaError::Compacted { wanted } if wanted == first), "{error}");
    let error = subject.meta.range(&RangeRequest::all(KeySet::one("f")).at(first)).await.unwrap_err();
    assert!(matches!(error, MetaError::Compacted { wanted } if wanted == first), "{error}");
    let mut watch = subject.watch("f", last).await;
    assert_eq!(next(&mut watch).await.unwrap().revision, last);
    assert_eq!(next(&mut watch).await.unwrap().revision, newest);
}

// promise meta: the keys of a lease that is revoked go with it in one revision; keys that have
//   left it stay
pub async fn keys_go_with_their_lease(subject: &Subject) {
    let (lease, other) = (subject.meta.grant(LONG).await.unwrap(), subject.meta.grant(LONG).await.unwrap());
    assert!(lease.id != other.id && lease.ttl >= LONG && lease.left <= lease.ttl);
    for key in ["l/a", "l/b", "l/freed", "l/moved"] {
        subject.put_leased(key, "", Some(lease.id)).await;
    }
    subject.put("l/freed", "").await;
    subject.put_leased("l/moved", "", Some(other.id)).await;
    assert_eq!(subject.get("l/a").await.unwrap().lease, Some(lease.id));
    let from = subject.range(RangeRequest::all(KeySet::one("l/a"))).await.revision + 1;
    subject.meta.revoke(lease.id).await.unwrap();
    assert_eq!(names(&subject.range(RangeRequest::all(KeySet::prefix("l/"))).await), ["l/freed", "l/moved"]);
    let mut watch = subject.watch("l/", from).await;
    let batch = next(&mut watch).await.unwrap();
    let mut gone: Vec<_> = batch.changes.into_iter().map(|change| change.key).collect();
    gone.sort();
    assert_eq!(gone, [b"l/a", b"l/b"]);
    let late = Transaction::when(absent("l/a")).put_leased("l/a", "", Some(lease.id));
    for error in [
        subject.meta.transact(&late).await.unwrap_err(),
        subject.meta.keep_alive(lease.id).await.unwrap_err(),
        subject.meta.lease(lease.id).await.unwrap_err(),
        subject.meta.revoke(lease.id).await.unwrap_err(),
    ] {
        assert!(matches!(error, MetaError::LeaseGone(id) if id == lease.id), "{error}");
    }
    assert!(subject.meta.lease(other.id).await.unwrap().left > LONG / 2);
}

// promise meta: a lease that is kept alive outlives its time, and one that is not runs out
pub async fn leases_run_out(subject: &Subject) {
    let ttl = subject.ttl;
    let (kept, left) = (subject.meta.grant(ttl).await.unwrap(), subject.meta.grant(ttl).await.unwrap());
    subject.put_leased("e/kept", "", Some(kept.id)).await;
    let last = subject.put_leased("e/left", "", Some(left.id)).await;
    let mut watch = subject.watch("e/", last + 1).await;
    let since = Instant::now();
    let gone = tokio::spawn(async move { next(&mut watch).await });
    while since.elapsed() < kept.ttl + Duration::from_secs(1) {
        let again = subject.meta.keep_alive(kept.id).await.unwrap();
        assert!(again.left + Duration::from_secs(1) >= kept.ttl);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let batch = gone.await.unwrap().unwrap();
    assert_eq!((batch.changes.len(), batch.changes[0].key.as_slice()), (1, b"e/left".as_slice()));
    assert!(subject.get("e/kept").await.is_some());
    assert!(matches!(subject.meta.keep_alive(left.id).await.unwrap_err(), MetaError::LeaseGone(_)));
    subject.meta.revoke(kept.id).await.unwrap();
}

// promise meta: each acquisition of a lock has a fresh fencing token, and a write with an older
//   one fails
pub async fn old_tokens_fence(subject: &Subject) {
    let take = async |lease| subject.done(Transaction::when(absent("lock")).put_leased("lock", "", Some(lease))).await;
    let write =
        |token| Transaction::when(Condition::Created(b"lock".to_vec(), token)).put("guarded", token.to_string());
    let first = subject.meta.grant(LONG).await.unwrap().id;
    let old = take(first).await;
    subject.done(write(old)).await;
    subject.refused(Transaction::when(absent("lock")).put("lock", "")).await;
    subject.meta.revoke(first).await.unwrap();
    subject.refused(write(old)).await;
    let new = take(subject.meta.grant(LONG).await.unwrap().id).await;
    assert!(new > old);
    subject.refused(write(old)).await;
    subject.done(write(new)).await;
    assert_eq!(subject.get("guarded").await.unwrap().value, new.to_string().into_bytes());
}

// promise meta: when the connection is lost in the middle of a transaction, its ticket tells
//   whether it was made
pub async fn tickets_tell(subject: &Subject) {
    let ticket = OutcomeTicket::new(subject.meta.grant(LONG).await.unwrap().id);
    let cases = [("lost", Fault::RequestLost, false), ("made", Fault::AnswerLost, true), ("late", Fault::Late, false)];
    for (key, fault, expected) in cases {
        let ticket = ticket.another();
        let write = ticket.on(&Transaction::when(absent(key)).put(key, "1"));
        let bad = Faulty::always(Arc::clone(&subject.meta), fault);
        let error = bad.transact(&write).await.unwrap_err();
        assert!(error.is_unknown(), "{error}");
        let made = ticket.find_out(&*subject.meta).await.unwrap();
        assert_eq!(made.is_some(), expected, "{fault:?}");
        // What comes late is not made any more, and the answer stays what it was.
        tokio::time::sleep(faulty::LATE * 3).await;
        assert_eq!(subject.get(key).await.map(|kv| kv.modified), made, "{fault:?}");
        assert_eq!(ticket.find_out(&*subject.meta).await.unwrap(), made, "{fault:?}");
    }
    let late = OutcomeTicket::new(subject.meta.grant(LONG).await.unwrap().id);
    subject.done(late.on(&Transaction::when(absent("x")).put("x", ""))).await;
    subject.meta.revoke(late.lease()).await.unwrap();
    let error = late.find_out(&*subject.meta).await.unwrap_err();
    assert!(matches!(error, MetaError::LeaseGone(lease) if lease == late.lease()), "{error}");
}

/// Makes a test of each case, with a store that `$make` makes.
#[macro_export]
macro_rules! contract {
    ($make:path) => {
        $crate::contract!(
            @ $make: keys_have_revisions ranges_are_read transactions_are_whole nonsense_is_refused
            comparing_writers_lose_nothing watches_see_everything watches_beside_writers
            what_is_forgotten_is_said keys_go_with_their_lease leases_run_out old_tokens_fence tickets_tell
        );
    };
    (@ $make:path: $($case:ident)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                $crate::contract::$case(&$make().await).await;
            }
        )+
    };
}
