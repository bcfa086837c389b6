//! What came of a proc's memory since it was fetched, and from where; what reading ahead of it was
//! good for. In memory only.

use crate::ahead::Benefit;
use crate::{Archive, ID};
use kip_store::Store;
use kip_types::api::FetchedView;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// By the proc's directory.
pub(crate) type Accounts = Mutex<HashMap<PathBuf, Arc<Account>>>;

/// Of one proc, since it was fetched last.
#[derive(Debug)]
pub(crate) struct Account {
    /// Counts apart what is read for it.
    pub(crate) store: Store,
    cached: AtomicU64,
    benefit: Mutex<Benefit>,
    /// If it needs parts of its memory all over, so many that all of it comes sooner than these one
    /// by one: how long it waited for each.
    miss: Mutex<Option<Duration>>,
}

impl Account {
    fn new(store: &Store, benefit: Benefit, miss: Option<Duration>) -> Arc<Account> {
        Arc::new(Account {
            store: store.counting_apart(),
            cached: AtomicU64::new(0),
            benefit: Mutex::new(benefit),
            miss: Mutex::new(miss),
        })
    }

    /// Whether it will need so much, all over, that all of its memory is fetched with a wake: how
    /// long it waited for each piece.
    pub(crate) fn needs_all(&self, miss: Option<Duration>) {
        *self.miss.lock() = miss;
    }

    pub(crate) fn miss(&self) -> Option<Duration> {
        *self.miss.lock()
    }

    /// So many bytes came from the local disk.
    pub(crate) fn cached(&self, bytes: u64) {
        self.cached.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn benefit(&self) -> MutexGuard<'_, Benefit> {
        self.benefit.lock()
    }

    fn view(&self) -> FetchedView {
        let read = self.store.counters();
        let benefit = *self.benefit();
        FetchedView {
            requests: read.gets,
            store_bytes: read.bytes_read,
            cache_bytes: self.cached.load(Ordering::Relaxed),
            ahead_used: benefit.used,
            ahead_unused: benefit.unused,
        }
    }
}

impl Archive {
    fn accounts(&self) -> MutexGuard<'_, HashMap<PathBuf, Arc<Account>>> {
        self.accounts.lock()
    }

    /// A new one, for a proc that is fetched now. What was of use is known from the last time.
    pub(crate) fn open_account(&self, dir: &Path) -> Arc<Account> {
        // Files that are not filled any more say what reading ahead was good for.
        self.forget_gone();
        let mut accounts = self.accounts();
        let known = accounts.get(dir).map(|account| (*account.benefit(), account.miss()));
        let (benefit, miss) = known.unwrap_or_default();
        let account = Account::new(&self.store, benefit, miss);
        accounts.insert(dir.to_owned(), Arc::clone(&account));
        account
    }

    /// That of the proc whose generation, or what the pager keeps of one, is in a directory.
    pub(crate) fn account_of(&self, directory: &Path) -> Arc<Account> {
        let above = || directory.ancestors().skip(1).take(2);
        let dir = above().find(|dir| dir.join(ID).exists()).or(directory.parent()).unwrap_or(directory);
        let mut accounts = self.accounts();
        let account =
            accounts.entry(dir.to_owned()).or_insert_with(|| Account::new(&self.store, Benefit::default(), None));
        Arc::clone(account)
    }

    pub(crate) fn close_account(&self, dir: &Path) {
        self.accounts().remove(dir);
    }

    /// What came of a proc since it was fetched, as far as this daemon knows.
    pub fn fetched(&self, dir: &Path) -> Option<FetchedView> {
        self.accounts().get(dir).map(|account| account.view())
    }
}
