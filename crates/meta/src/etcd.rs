//! The store in an etcd cluster, 3.4 or newer.
//!
//! Each call is one request to etcd. A request whose answer is lost may have been carried out:
//! [`MetaError::Unknown`] for changes, and [`MetaError::Unavailable`] for reads. etcd says in no
//! status that is sure to come that a change was not made, so it is never concluded from one.

use crate::error::MetaError;
use crate::keys::{KeySet, KeyValue, LeaseId, Revision};
use crate::store::{Meta, MetaLease, RangeFound, RangeRequest, whole_ttl};
use crate::transaction::{Condition, Operation, Transaction, TransactionOutcome, check_keys};
use crate::watch::{ChangeBatch, KeyChange, MetaWatch, WatchSender};
use async_trait::async_trait;
use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, DeleteOptions, Error, EventType, GetOptions, PutOptions,
    ResponseHeader, SortOrder, SortTarget, Txn, TxnOp, TxnOpResponse, WatchOptions, WatchResponse, WatchStream,
};
use std::time::Duration;

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a silent connection is tried.
const PING_EVERY: Duration = Duration::from_secs(10);
/// The largest answer that is read, bytes.
const LARGEST_ANSWER: usize = 256 << 20;

/// Codes of gRPC's statuses (grpc/status.h).
const INVALID_ARGUMENT: i32 = 3;
const NOT_FOUND: i32 = 5;
const OUT_OF_RANGE: i32 = 11;

/// The store in an etcd cluster.
#[derive(Clone)]
pub struct EtcdMeta {
    client: Client,
    /// The cluster, as people know it.
    store: String,
}

impl EtcdMeta {
    /// Connects to a cluster at these URLs, for example `http://127.0.0.1:2379`.
    ///
    /// # Errors
    /// [`MetaError::Unavailable`].
    pub async fn connect(urls: &[String]) -> Result<EtcdMeta, MetaError> {
        let store = urls.join(",");
        let options = ConnectOptions::new()
            .with_timeout(PATIENCE)
            .with_connect_timeout(PATIENCE)
            .with_keep_alive(PING_EVERY, PATIENCE)
            .with_require_leader(true);
        match Client::connect(urls, Some(options)).await {
            Ok(client) => Ok(EtcdMeta { client, store }),
            Err(error) => Err(MetaError::Unavailable { store, source: Box::new(error) }),
        }
    }

    fn unread(&self, error: Error) -> MetaError {
        MetaError::Unavailable { store: self.store.clone(), source: Box::new(error) }
    }

    /// What an error says of a change.
    fn unwritten(&self, error: Error) -> MetaError {
        match code(&error) {
            Some(INVALID_ARGUMENT) => MetaError::Invalid(format!("etcd refuses this: {error}")),
            _ => MetaError::Unknown { store: self.store.clone(), source: Box::new(error) },
        }
    }

    /// The newest revision.
    async fn newest(&self) -> Result<Revision, MetaError> {
        let options = GetOptions::new().with_limit(1).with_keys_only();
        let read = self.client.kv_client().get("\0", Some(options)).await.map_err(|e| self.unread(e))?;
        Ok(revision_of(read.header()))
    }

    /// What the state that was asked for lacks.
    async fn out_of_range(&self, wanted: Revision) -> MetaError {
        match self.newest().await {
            Ok(newest) if wanted > newest => MetaError::Future { wanted, newest },
            Ok(_) => MetaError::Compacted { wanted },
            Err(error) => error,
        }
    }
}

fn code(error: &Error) -> Option<i32> {
    match error {
        Error::GRpcStatus(status) => Some(status.code() as i32),
        _ => None,
    }
}

/// etcd's numbers are signed and never negative.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn seconds(number: i64) -> Duration {
    Duration::from_secs(unsigned(number))
}

fn revision_of(header: Option<&ResponseHeader>) -> Revision {
    header.map_or(0, |header| unsigned(header.revision()))
}

fn owned(kv: &etcd_client::KeyValue) -> KeyValue {
    KeyValue {
        key: kv.key().to_vec(),
        value: kv.value().to_vec(),
        created: unsigned(kv.create_revision()),
        modified: unsigned(kv.mod_revision()),
        version: unsigned(kv.version()),
        lease: (kv.lease() != 0).then(|| LeaseId(unsigned(kv.lease()))),
    }
}

/// The end of a set as etcd takes it; none for one key.
fn end_of(keys: &KeySet) -> Option<Vec<u8>> {
    match keys {
        KeySet::One(_) => None,
        // A zero byte says: to the last key there is.
        _ => Some(keys.end().unwrap_or_else(|| vec![0])),
    }
}

/// The first key as etcd takes it, which knows no empty key.
fn first_of(keys: &KeySet) -> Vec<u8> {
    if keys.first().is_empty() { vec![0] } else { keys.first().to_vec() }
}

fn get_of(keys: &KeySet) -> GetOptions {
    let options = GetOptions::new().with_sort(SortTarget::Key, SortOrder::Ascend);
    match end_of(keys) {
        Some(end) => options.with_range(end),
        None => options,
    }
}

fn compare(condition: &Condition) -> Compare {
    match condition {
        Condition::Exists(key) => Compare::create_revision(key.clone(), CompareOp::Greater, 0),
        // No key of the set was made: one that is there has a revision.
        Condition::Absent(keys) => {
            let compare = Compare::create_revision(first_of(keys), CompareOp::Equal, 0);
            match end_of(keys) {
                Some(end) => compare.with_range(end),
                None => compare,
            }
        }
        Condition::Modified(key, revision) => {
            Compare::mod_revision(key.clone(), CompareOp::Equal, signed(*revision).max(1))
        }
        Condition::Created(key, revision) => {
            Compare::create_revision(key.clone(), CompareOp::Equal, signed(*revision).max(1))
        }
        Condition::Value(key, value) => Compare::value(key.clone(), CompareOp::Equal, value.clone()),
    }
}

fn change(operation: &Operation) -> TxnOp {
    match operation {
        Operation::Put { key, value, lease } => {
            let options = lease.map(|lease| PutOptions::new().with_lease(signed(lease.0)));
            TxnOp::put(key.clone(), value.clone(), options)
        }
        Operation::Delete(keys) => {
            let options = end_of(keys).map(|end| DeleteOptions::new().with_range(end));
            TxnOp::delete(first_of(keys), options)
        }
    }
}

#[async_trait]
impl Meta for EtcdMeta {
    async fn range(&self, request: &RangeRequest) -> Result<RangeFound, MetaError> {
        check_keys(&request.keys)?;
        let mut options = get_of(&request.keys);
        if let Some(limit) = request.limit {
            // 0 is no limit to etcd.
            options = options.with_limit(signed(limit as u64).max(1));
        }
        if let Some(at) = request.at {
            options = options.with_revision(signed(at));
        }
        let mut client = self.client.kv_client().max_decoding_message_size(LARGEST_ANSWER);
        let read = match client.get(first_of(&request.keys), Some(options)).await {
            Ok(read) => read,
            Err(error) if code(&error) == Some(OUT_OF_RANGE) => {
                return Err(self.out_of_range(request.at.unwrap_or_default()).await);
            }
            Err(error) => return Err(self.unread(error)),
        };
        let mut keys: Vec<KeyValue> = read.kvs().iter().map(owned).collect();
        let none = request.limit == Some(0);
        let more = read.more() || none && !keys.is_empty();
        if none {
            keys.clear();
        }
        Ok(RangeFound { revision: revision_of(read.header()), keys, more })
    }

    async fn transact(&self, transaction: &Transaction) -> Result<TransactionOutcome, MetaError> {
        transaction.check()?;
        let conditions = transaction.conditions();
        let look = |condition: &Condition| {
            let keys = condition.keys();
            TxnOp::get(first_of(&keys), Some(get_of(&keys).with_limit(1)))
        };
        let txn = Txn::new()
            .when(conditions.iter().map(compare).collect::<Vec<_>>())
            .and_then(transaction.operations().iter().map(change).collect::<Vec<_>>())
            .or_else(conditions.iter().map(look).collect::<Vec<_>>());
        let mut client = self.client.kv_client().max_decoding_message_size(LARGEST_ANSWER);
        let answer = match client.txn(txn).await {
            Ok(answer) => answer,
            Err(error) if code(&error) == Some(NOT_FOUND) => return Err(self.gone_lease(transaction, error).await),
            Err(error) => return Err(self.unwritten(error)),
        };
        let revision = revision_of(answer.header());
        if answer.succeeded() {
            return Ok(TransactionOutcome::Done { revision });
        }
        let first = |answer: TxnOpResponse| match answer {
            TxnOpResponse::Get(read) => read.kvs().first().map(owned),
            _ => None,
        };
        let found = answer.op_responses().into_iter().map(first).collect();
        Ok(TransactionOutcome::Refused { revision, found })
    }

    async fn watch(&self, keys: KeySet, from: Revision) -> Result<MetaWatch, MetaError> {
        check_keys(&keys)?;
        let mut options = WatchOptions::new().with_prev_key().with_progress_notify();
        options = options.with_start_revision(signed(from).max(1));
        if let Some(end) = end_of(&keys) {
            options = options.with_range(end);
        }
        let mut client = self.client.watch_client().max_decoding_message_size(LARGEST_ANSWER);
        let stream = client.watch(first_of(&keys), Some(options)).await.map_err(|e| self.unread(e))?;
        let (sender, batches) = MetaWatch::new();
        let follower = Follower { store: self.clone(), from, sender };
        tokio::spawn(follower.follow(stream));
        Ok(batches)
    }

    async fn grant(&self, ttl: Duration) -> Result<MetaLease, MetaError> {
        let ttl = whole_ttl(ttl)?;
        let granted = self.client.lease_client().grant(signed(ttl.as_secs()), None).await;
        let granted = granted.map_err(|e| self.unwritten(e))?;
        let ttl = seconds(granted.ttl());
        Ok(MetaLease { id: LeaseId(unsigned(granted.id())), ttl, left: ttl })
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        match self.client.lease_client().keep_alive(signed(lease.0)).await {
            Ok(_) => self.lease(lease).await,
            // The client's own error, for an answer without time.
            Err(Error::LeaseKeepAliveError(_)) => Err(MetaError::LeaseGone(lease)),
            Err(error) => Err(self.unwritten(error)),
        }
    }

    async fn lease(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        let read = self.client.lease_client().time_to_live(signed(lease.0), None).await;
        let read = read.map_err(|e| self.unread(e))?;
        if read.ttl() < 0 || read.granted_ttl() <= 0 {
            return Err(MetaError::LeaseGone(lease));
        }
        Ok(MetaLease { id: lease, ttl: seconds(read.granted_ttl()), left: seconds(read.ttl()) })
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        match self.client.lease_client().revoke(signed(lease.0)).await {
            Ok(_) => Ok(()),
            Err(error) if code(&error) == Some(NOT_FOUND) => Err(MetaError::LeaseGone(lease)),
            Err(error) => Err(self.unwritten(error)),
        }
    }
}

impl EtcdMeta {
    /// Which lease of a transaction is gone: etcd does not say.
    async fn gone_lease(&self, transaction: &Transaction, error: Error) -> MetaError {
        let leases = transaction.operations().iter().filter_map(|operation| match operation {
            Operation::Put { lease, .. } => *lease,
            Operation::Delete(_) => None,
        });
        let all: Vec<LeaseId> = leases.collect();
        for lease in &all {
            if let Err(gone @ MetaError::LeaseGone(_)) = self.lease(*lease).await {
                return gone;
            }
        }
        // Nothing was changed, and the lease cannot come back.
        all.first().map_or_else(|| self.unread(error), |lease| MetaError::LeaseGone(*lease))
    }
}

/// The task of one watch.
struct Follower {
    store: EtcdMeta,
    /// The next revision that the reader does not have.
    from: Revision,
    sender: WatchSender,
}

impl Follower {
    async fn follow(mut self, mut stream: WatchStream) {
        loop {
            let message = tokio::select! {
                message = stream.message() => message,
                () = self.sender.closed() => return,
            };
            let handed_on = match message {
                Ok(Some(answer)) => self.hand_on(&answer).await,
                Ok(None) => Err(self.store.unread(Error::WatchError("the stream has ended".to_owned()))),
                Err(error) => Err(self.store.unread(error)),
            };
            if let Err(error) = handed_on {
                // The reader may be gone too.
                drop(self.sender.send(Err(error)).await);
                return;
            }
        }
    }

    /// Gives the reader what one answer says.
    async fn hand_on(&mut self, answer: &WatchResponse) -> Result<(), MetaError> {
        if answer.compact_revision() > 0 {
            return Err(MetaError::Compacted { wanted: self.from });
        }
        if answer.canceled() {
            let reason = answer.cancel_reason().to_owned();
            return Err(self.store.unread(Error::WatchError(reason)));
        }
        let mut batches: Vec<ChangeBatch> = Vec::new();
        for event in answer.events() {
            let Some(kv) = event.kv() else { continue };
            let now = (event.event_type() == EventType::Put).then(|| owned(kv));
            let change = KeyChange { key: kv.key().to_vec(), now, before: event.prev_kv().map(owned) };
            let revision = unsigned(kv.mod_revision());
            match batches.last_mut().filter(|batch| batch.revision == revision) {
                Some(batch) => batch.changes.push(change),
                None => batches.push(ChangeBatch { revision, changes: vec![change] }),
            }
        }
        let newest = revision_of(answer.header());
        // Without events it is progress, but for the first answer, which says nothing of the past.
        if batches.is_empty() && !answer.created() && newest >= self.from {
            batches.push(ChangeBatch { revision: newest, changes: Vec::new() });
        }
        for batch in batches {
            self.from = batch.revision + 1;
            self.sender.send(Ok(batch)).await.map_err(|_| MetaError::Closed)?;
        }
        Ok(())
    }
}
