//! A store whose connection is bad: requests and answers are lost, changes come late, watches break
//! off.

use async_trait::async_trait;
use kip_meta::{
    KeySet, LeaseId, Meta, MetaError, MetaLease, MetaWatch, RangeFound, RangeRequest, Revision, Transaction,
    TransactionOutcome,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// How late a change comes.
pub const LATE: Duration = Duration::from_millis(20);

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It is answered.
    None,
    /// It does not arrive.
    RequestLost,
    /// It is carried out, and its answer does not arrive.
    AnswerLost,
    /// It is carried out when its client has given up already.
    Late,
}

/// The store.
pub struct Faulty {
    meta: Arc<dyn Meta>,
    random: AtomicU64,
    /// What always happens; by chance without.
    always: Option<Fault>,
    /// How many faults there were.
    pub faults: AtomicUsize,
}

impl Faulty {
    /// Faults by chance, the same ones for the same seed and order of calls.
    pub fn by_chance(meta: Arc<dyn Meta>, seed: u64) -> Faulty {
        Faulty { meta, random: AtomicU64::new(seed), always: None, faults: AtomicUsize::new(0) }
    }

    /// The same fault each time.
    pub fn always(meta: Arc<dyn Meta>, fault: Fault) -> Faulty {
        Faulty { always: Some(fault), ..Faulty::by_chance(meta, 1) }
    }

    /// A number below `most` (splitmix64).
    fn below(&self, most: u64) -> u64 {
        let mut z = self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % most
    }

    fn fault(&self) -> Fault {
        let fault = self.always.unwrap_or_else(|| match self.below(10) {
            0 | 1 => Fault::RequestLost,
            2 | 3 => Fault::AnswerLost,
            4 => Fault::Late,
            _ => Fault::None,
        });
        self.faults.fetch_add(usize::from(fault != Fault::None), Ordering::Relaxed);
        fault
    }

    fn lost(&self) -> MetaError {
        MetaError::Unknown { store: "faulty".to_owned(), source: "injected".into() }
    }

    fn away(&self) -> MetaError {
        MetaError::Unavailable { store: "faulty".to_owned(), source: "injected".into() }
    }

    fn reads(&self) -> Result<(), MetaError> {
        if self.fault() == Fault::None { Ok(()) } else { Err(self.away()) }
    }
}

#[async_trait]
impl Meta for Faulty {
    async fn range(&self, request: &RangeRequest) -> Result<RangeFound, MetaError> {
        self.reads()?;
        self.meta.range(request).await
    }

    async fn transact(&self, transaction: &Transaction) -> Result<TransactionOutcome, MetaError> {
        match self.fault() {
            Fault::None => return self.meta.transact(transaction).await,
            Fault::RequestLost => {}
            Fault::AnswerLost => drop(self.meta.transact(transaction).await),
            Fault::Late => {
                let (meta, transaction) = (Arc::clone(&self.meta), transaction.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(LATE).await;
                    drop(meta.transact(&transaction).await);
                });
            }
        }
        Err(self.lost())
    }

    async fn watch(&self, keys: KeySet, from: Revision) -> Result<MetaWatch, MetaError> {
        self.reads()?;
        let mut watch = self.meta.watch(keys, from).await?;
        let (sender, batches) = MetaWatch::new();
        let (lasts, error) = (1 + self.below(5), self.away());
        tokio::spawn(async move {
            for _ in 0..lasts {
                let batch = tokio::select! {
                    batch = watch.next() => batch,
                    () = sender.closed() => return,
                };
                let is_over = batch.is_err();
                if sender.send(batch).await.is_err() || is_over {
                    return;
                }
            }
            drop(sender.send(Err(error)).await);
        });
        Ok(batches)
    }

    async fn grant(&self, ttl: Duration) -> Result<MetaLease, MetaError> {
        match self.fault() {
            Fault::None => return self.meta.grant(ttl).await,
            Fault::RequestLost => {}
            Fault::AnswerLost | Fault::Late => drop(self.meta.grant(ttl).await),
        }
        Err(self.lost())
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        match self.fault() {
            Fault::None => return self.meta.keep_alive(lease).await,
            Fault::RequestLost => {}
            Fault::AnswerLost | Fault::Late => drop(self.meta.keep_alive(lease).await),
        }
        Err(self.lost())
    }

    async fn lease(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        self.reads()?;
        self.meta.lease(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        match self.fault() {
            Fault::None => return self.meta.revoke(lease).await,
            Fault::RequestLost => {}
            Fault::AnswerLost | Fault::Late => drop(self.meta.revoke(lease).await),
        }
        Err(self.lost())
    }
}
