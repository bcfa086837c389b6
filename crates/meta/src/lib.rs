//! Metadata: a small key-value store with revisions, as etcd has it.
//!
//! | module | owns |
//! | --- | --- |
//! | [`store`] | the trait [`Meta`]: get, range, transact, watch, leases |
//! | [`keys`] | keys, sets of keys, and what the store says of a key |
//! | [`transaction`] | conditions and changes, and their limits, the same for each implementation |
//! | [`watch`] | changes as they come, one batch for each revision |
//! | [`error`] | what can go wrong, one line each |
//! | `embedded` | the store in one file, by redb (feature `embedded`, the default) |
//! | `etcd` | the store in an etcd cluster (feature `etcd`) |
//! | [`certain`] | a store that is asked until each outcome is known |
//!
//! Knows nothing of what is kept in it: no paths, no realms, no procs.
//!
//! **Revisions.** Each transaction that changes something makes one revision, and so does the end
//! of a lease. A revision is never given twice, so a key's revision tells each state of the key
//! from all others, also after the key was removed and made again.
//!
//! **There is no write without a condition.** A [`Transaction`] begins with one. A lock that is
//! held by a lease does not exclude (etcd's issues 11456 and 11457): its holder can be late, and
//! the next holder is there already. So each write compares a revision, and a holder's fencing
//! token is the revision at which its key was created, which no other acquisition ever has.
//!
//! **What a crash leaves behind.** Embedded: all transactions that were answered, each whole; the
//! file is checked when it is opened. etcd: what its cluster has agreed on.
#![forbid(unsafe_code)]

pub mod certain;
#[cfg(feature = "embedded")]
mod embedded;
pub mod error;
#[cfg(feature = "etcd")]
mod etcd;
pub mod keys;
pub mod store;
pub mod transaction;
pub mod watch;

pub use certain::{Certain, OutcomeTicket};
#[cfg(feature = "embedded")]
pub use embedded::{EmbeddedMeta, KeptHistory};
pub use error::MetaError;
#[cfg(feature = "etcd")]
pub use etcd::EtcdMeta;
pub use keys::{KeySet, KeyValue, LeaseId, Revision};
pub use store::{Meta, MetaLease, RangeFound, RangeRequest};
pub use transaction::{Condition, Operation, Transaction, TransactionOutcome};
pub use watch::{ChangeBatch, KeyChange, MetaWatch};
