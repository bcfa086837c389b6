//! A store that is asked until each outcome is known.
//!
//! When a connection is lost during a change, the change may have been made, or may be made a
//! moment later. [`OutcomeTicket`] makes that a question with an answer: the transaction writes the
//! ticket's key, too, and is made only if that key is absent. To find out is to write the same key
//! under the same condition: whichever of the two comes first, the other one cannot follow.
//!
//! The keys of tickets begin with [`TICKETS`] and go with a lease, long after each request is
//! forgotten. A store that is away for longer than that lease leaves the outcome unknown.

use crate::error::MetaError;
use crate::keys::{KeySet, LeaseId, Revision};
use crate::store::{Meta, MetaLease, RangeFound, RangeRequest};
use crate::transaction::{Condition, Transaction, TransactionOutcome};
use crate::watch::{MetaWatch, WatchSender};
use async_trait::async_trait;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt::Write as _;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// What the keys of tickets begin with.
pub const TICKETS: &str = "kip-ticket/";
/// How long a ticket's key is there.
const TICKET_TTL: Duration = Duration::from_secs(600);
/// The pause before the first repetition; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The store in errors: its own error, which is their source, names it.
const STORE: &str = "of this transaction";

/// What the key of a ticket says.
const MADE: &[u8] = b"made";
const NEVER: &[u8] = b"never";

/// A ticket for one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutcomeTicket {
    key: Vec<u8>,
    lease: LeaseId,
}

impl OutcomeTicket {
    /// A new one, whose key goes with a lease. Until that has run out the outcome can be asked.
    pub fn new(lease: LeaseId) -> OutcomeTicket {
        let mut bytes = [0; 16];
        SystemRandom::new().fill(&mut bytes).expect("the kernel gives random bytes");
        let mut key = TICKETS.to_owned();
        for byte in bytes {
            write!(key, "{byte:02x}").expect("a string takes all");
        }
        OutcomeTicket { key: key.into_bytes(), lease }
    }

    /// A new one with the same lease.
    #[must_use]
    pub fn another(&self) -> OutcomeTicket {
        OutcomeTicket::new(self.lease)
    }

    /// The lease its key goes with.
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    /// The transaction with this ticket on it, as its last condition and its last change.
    pub fn on(&self, transaction: &Transaction) -> Transaction {
        let unused = Condition::Absent(KeySet::One(self.key.clone()));
        transaction.clone().and(unused).put_leased(self.key.clone(), MADE, Some(self.lease)).with_ticket()
    }

    /// The revision at which the transaction with this ticket was made; none if it was not, and
    /// then it never will be.
    ///
    /// # Errors
    /// [`MetaError::Unavailable`] and [`MetaError::Unknown`]: it can be asked again.
    /// [`MetaError::LeaseGone`]: it is too late to ask.
    pub async fn find_out(&self, meta: &dyn Meta) -> Result<Option<Revision>, MetaError> {
        let never = Transaction::when(Condition::Absent(KeySet::One(self.key.clone())));
        match meta.transact(&never.put_leased(self.key.clone(), NEVER, Some(self.lease))).await? {
            TransactionOutcome::Done { .. } => Ok(None),
            TransactionOutcome::Refused { found, .. } => {
                let kv = found.into_iter().flatten().next();
                Ok(kv.filter(|kv| kv.value == MADE).map(|kv| kv.created))
            }
        }
    }
}

/// A store that may be lost and found again, as one that is there: calls are repeated, and outcomes
/// found out, for as long as it has patience.
pub struct Certain {
    meta: Arc<dyn Meta>,
    patience: Duration,
    /// The lease of new tickets, and when it was made.
    tickets: Mutex<Option<(LeaseId, Instant)>>,
}

/// Repetitions of one call, until its time is over.
struct Attempts {
    until: Instant,
    pause: Duration,
}

impl Attempts {
    fn new(patience: Duration) -> Attempts {
        Attempts { until: Instant::now() + patience, pause: FIRST_PAUSE }
    }

    /// Waits before the next attempt; gives the error back if there is none.
    async fn again(&mut self, error: MetaError) -> Result<(), MetaError> {
        if Instant::now() + self.pause > self.until {
            return Err(error);
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }
}

/// A call of the store that is under way.
type Call<'a, T> = Pin<Box<dyn Future<Output = Result<T, MetaError>> + Send + 'a>>;

/// Whether another attempt at a call that can be repeated makes sense.
fn passes(error: &MetaError) -> bool {
    error.is_unavailable() || error.is_unknown()
}

impl Certain {
    /// Asks `meta` again for at most so long.
    pub fn new(meta: Arc<dyn Meta>, patience: Duration) -> Certain {
        Certain { meta, patience, tickets: Mutex::new(None) }
    }

    async fn ticket(&self) -> Result<OutcomeTicket, MetaError> {
        let mut tickets = self.tickets.lock().await;
        if let Some((lease, _)) = tickets.filter(|(_, made)| made.elapsed() < TICKET_TTL / 2) {
            return Ok(OutcomeTicket::new(lease));
        }
        let made = Instant::now();
        let lease = self.grant(TICKET_TTL).await?.id;
        *tickets = Some((lease, made));
        Ok(OutcomeTicket::new(lease))
    }

    /// Makes a call that does no harm when it is made twice.
    async fn repeat<'a, T>(&self, call: impl Fn() -> Call<'a, T>) -> Result<T, MetaError> {
        let mut attempts = Attempts::new(self.patience);
        loop {
            match call().await {
                Err(error) if passes(&error) => attempts.again(error).await?,
                done => return done,
            }
        }
    }

    /// Finds out what became of a transaction. `lost` is given back if that is not to be had.
    async fn find_out(
        &self,
        ticket: &OutcomeTicket,
        attempts: &mut Attempts,
        mut lost: MetaError,
    ) -> Result<Option<Revision>, MetaError> {
        loop {
            attempts.again(lost).await?;
            match ticket.find_out(&*self.meta).await {
                Err(error) if passes(&error) => {
                    let source = Box::new(error);
                    lost = MetaError::Unknown { store: STORE.to_owned(), source };
                }
                Err(error @ MetaError::LeaseGone(_)) => {
                    let source = Box::new(error);
                    return Err(MetaError::Unknown { store: STORE.to_owned(), source });
                }
                done => return done,
            }
        }
    }
}

#[async_trait]
impl Meta for Certain {
    async fn range(&self, request: &RangeRequest) -> Result<RangeFound, MetaError> {
        self.repeat(|| self.meta.range(request)).await
    }

    async fn transact(&self, transaction: &Transaction) -> Result<TransactionOutcome, MetaError> {
        transaction.check()?;
        let mut attempts = Attempts::new(self.patience);
        loop {
            let ticket = self.ticket().await?;
            match self.meta.transact(&ticket.on(transaction)).await {
                Ok(TransactionOutcome::Refused { revision, mut found }) => {
                    found.pop();
                    return Ok(TransactionOutcome::Refused { revision, found });
                }
                Err(MetaError::LeaseGone(lease)) if lease == ticket.lease => *self.tickets.lock().await = None,
                Err(error) if error.is_unavailable() => attempts.again(error).await?,
                Err(error) if error.is_unknown() => {
                    if let Some(revision) = self.find_out(&ticket, &mut attempts, error).await? {
                        return Ok(TransactionOutcome::Done { revision });
                    }
                }
                done => return done,
            }
        }
    }

    async fn watch(&self, keys: KeySet, from: Revision) -> Result<MetaWatch, MetaError> {
        let watch = self.repeat(|| self.meta.watch(keys.clone(), from)).await?;
        let (sender, batches) = MetaWatch::new();
        tokio::spawn(follow(Arc::clone(&self.meta), self.patience, WatchPlace { keys, from }, watch, sender));
        Ok(batches)
    }

    async fn grant(&self, ttl: Duration) -> Result<MetaLease, MetaError> {
        // One that was made and not heard of runs out by itself.
        self.repeat(|| self.meta.grant(ttl)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        self.repeat(|| self.meta.keep_alive(lease)).await
    }

    async fn lease(&self, lease: LeaseId) -> Result<MetaLease, MetaError> {
        self.repeat(|| self.meta.lease(lease)).await
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), MetaError> {
        // One that is gone before anything was asked was not ended by this call.
        self.lease(lease).await?;
        let mut attempts = Attempts::new(self.patience);
        let mut may_be_done = false;
        loop {
            match self.meta.revoke(lease).await {
                Err(error) if passes(&error) => {
                    may_be_done |= error.is_unknown();
                    attempts.again(error).await?;
                }
                Err(MetaError::LeaseGone(_)) if may_be_done => return Ok(()),
                done => return done,
            }
        }
    }
}

/// Where a watch goes on.
struct WatchPlace {
    keys: KeySet,
    from: Revision,
}

/// Hands on what a watch gives, and takes up another one where it ends.
async fn follow(
    meta: Arc<dyn Meta>,
    patience: Duration,
    mut place: WatchPlace,
    mut watch: MetaWatch,
    sender: WatchSender,
) {
    let mut attempts = Attempts::new(patience);
    loop {
        let given = tokio::select! {
            given = watch.next() => given,
            () = sender.closed() => return,
        };
        let mut error = match given {
            Ok(batch) => {
                place.from = batch.revision + 1;
                attempts = Attempts::new(patience);
                if sender.send(Ok(batch)).await.is_err() {
                    return;
                }
                continue;
            }
            Err(error) => error,
        };
        loop {
            if passes(&error) {
                if let Err(last) = attempts.again(error).await {
                    error = last;
                } else {
                    match meta.watch(place.keys.clone(), place.from).await {
                        Ok(another) => {
                            watch = another;
                            break;
                        }
                        Err(next) => {
                            error = next;
                            continue;
                        }
                    }
                }
            }
            // The reader may be gone too.
            drop(sender.send(Err(error)).await);
            return;
        }
    }
}
