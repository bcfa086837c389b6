//! Leases that procs have granted over their sockets: each belongs to its proc.
//!
//! While the program runs it keeps its leases alive itself, but for those that are to live as long
//! as the proc. While it sleeps the daemon does, for sleep is not death; at its wake each has its
//! whole time again. They end with the proc's processes: when it is stopped or removed, or its
//! program has ended.
//!
//! ```text
//!  granted --noted--> live --file has another name--> ended --revoked--> forgotten
//! ```
//!
//! Which leases a program has is in a file of its proc's directory. Whatever ends the program gives
//! that file another name, after the program's connections were let go: what is written to the file
//! of an ended program ends with it, and a lease that a next program grants begins a file of its
//! own. The next daemon goes on from these files. The lock is held while files are written, so it
//! is taken on threads that may block.

mod file;

use crate::calls::failure;
use crate::home::{HomeLife, RuntimeHome, RuntimeHomes, SOCKET};
use crate::wire::{FailureCode, GrantCall, RuntimeFailure};
use kip_service::TreeService;
use kip_types::api::tree::GrantTreeLeaseRequest;
use kip_types::api::{Code, Refusal};
use kip_types::name::Realm;
use kip_types::tree::{TreeLease, TreeLeaseId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Most leases of a proc.
const MOST_LEASES: usize = 64;
/// Between two looks at what procs are at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The same after something has failed.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The leases of all procs.
pub(crate) struct Leases {
    tree: Arc<dyn TreeService>,
    realm: Realm,
    /// By the directories of their procs.
    all: Mutex<BTreeMap<PathBuf, Owned>>,
}

/// Those of a proc.
struct Owned {
    home: Arc<dyn RuntimeHome>,
    life: HomeLife,
    /// Those of the program that runs or sleeps.
    live: BTreeMap<TreeLeaseId, HeldLease>,
    /// Those that are to be revoked.
    ended: BTreeSet<TreeLeaseId>,
}

#[derive(Debug, Clone, Copy)]
struct HeldLease {
    ttl: Duration,
    /// The daemon keeps it while its proc is awake, too.
    with_proc: bool,
    /// When the daemon kept it last; none: it is to be kept at the next look.
    kept: Option<Instant>,
    /// Its line in the file.
    line: usize,
}

/// What is to be done about a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Keep,
    Revoke,
}

/// A lease cannot be a proc's.
#[derive(Debug, thiserror::Error)]
enum NotNoted {
    #[error("the proc has {MOST_LEASES} leases, more are not possible")]
    TooMany,
    #[error("the program has ended")]
    Ended,
    #[error("that the proc has the lease cannot be noted: {0}")]
    Io(#[from] io::Error),
}

impl Owned {
    fn new(home: Arc<dyn RuntimeHome>) -> Owned {
        Owned { home, life: HomeLife::Awake, live: BTreeMap::new(), ended: BTreeSet::new() }
    }

    /// The program that had them is no more.
    fn end_live(&mut self) {
        self.ended.extend(std::mem::take(&mut self.live).into_keys());
    }

    fn note(&mut self, directory: &Path, connection: u64, lease: &TreeLease, with_proc: bool) -> Result<(), NotNoted> {
        let file = match file::open(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.end_live();
                file::make(directory)
            }
            file => file,
        }?;
        if self.live.len() >= MOST_LEASES {
            return Err(NotNoted::TooMany);
        }
        let is_free = |line: &usize| self.live.values().all(|held| held.line != *line);
        let line = (0..MOST_LEASES).find(is_free).expect("there is a line for each");
        let ttl = Duration::from_millis(lease.ttl_ms);
        let held = HeldLease { ttl, with_proc, kept: Some(Instant::now()), line };
        file::put(&file, lease.id, &held)?;
        // Held, it is of a program whose file did not have another name yet.
        if self.home.held(connection, SOCKET).is_none() {
            file::clear(&file, line)?;
            return Err(NotNoted::Ended);
        }
        self.live.insert(lease.id, held);
        Ok(())
    }

    /// It is gone.
    fn forget(&mut self, directory: &Path, id: TreeLeaseId) {
        if let Some(held) = self.live.remove(&id) {
            match file::open(directory).and_then(|file| file::clear(&file, held.line)) {
                // It has ended meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::warn!(%error, lease = %id, "that a lease of a proc is gone is not noted"),
                Ok(()) => {}
            }
        }
        if self.ended.remove(&id) && self.ended.is_empty() {
            file::sweep(directory, |id| self.live.contains_key(&id));
        }
    }

    /// What is due now. A lease is kept when its proc falls asleep and when it wakes, and again and
    /// again between the two.
    fn due(&mut self, directory: &Path, due: &mut Vec<(TreeLeaseId, Due)>) {
        let before = std::mem::replace(&mut self.life, self.home.life());
        if self.life == HomeLife::Ended {
            file::end(directory);
        }
        if !file::is_there(directory) {
            self.end_live();
        }
        due.extend(self.ended.iter().map(|id| (*id, Due::Revoke)));
        let (now, life) = (Instant::now(), self.life);
        for (id, lease) in &mut self.live {
            let is_ours = lease.with_proc || life == HomeLife::Asleep;
            let is_old = |kept: Instant| is_ours && now.duration_since(kept) >= lease.ttl / 3;
            if before != life || lease.kept.is_none_or(is_old) {
                lease.kept = Some(now);
                due.push((*id, Due::Keep));
            }
        }
    }
}

impl Leases {
    /// None of that realm.
    pub(crate) fn new(tree: Arc<dyn TreeService>, realm: Realm) -> Leases {
        Leases { tree, realm, all: Mutex::default() }
    }

    /// A proc has another one, granted on this connection.
    fn add(
        &self,
        home: &Arc<dyn RuntimeHome>,
        connection: u64,
        lease: &TreeLease,
        with_proc: bool,
    ) -> Result<(), NotNoted> {
        let directory = home.directory();
        let mut all = self.all.lock();
        let owned = all.entry(directory.clone()).or_insert_with(|| Owned::new(Arc::clone(home)));
        // Those that are to be revoked may be of a proc that had this directory before.
        owned.home = Arc::clone(home);
        owned.note(&directory, connection, lease, with_proc)
    }

    /// One that was not noted is to be revoked.
    fn refuse(&self, home: &Arc<dyn RuntimeHome>, id: TreeLeaseId) {
        let mut all = self.all.lock();
        all.entry(home.directory()).or_insert_with(|| Owned::new(Arc::clone(home))).ended.insert(id);
    }

    fn forget(&self, id: TreeLeaseId) {
        for (directory, owned) in self.all.lock().iter_mut() {
            owned.forget(directory, id);
        }
    }

    /// Those of a proc that are none of these have run out.
    fn forget_others(&self, home: &dyn RuntimeHome, there: &[TreeLease]) {
        let directory = home.directory();
        let mut all = self.all.lock();
        let Some(owned) = all.get_mut(&directory) else { return };
        let gone: Vec<TreeLeaseId> =
            owned.live.keys().filter(|id| there.iter().all(|lease| lease.id != **id)).copied().collect();
        for id in gone {
            owned.forget(&directory, id);
        }
    }

    /// Those that the last daemon knew of. At the first look each is kept or revoked.
    pub(crate) fn take_up(&self, homes: &dyn RuntimeHomes) {
        let mut all = self.all.lock();
        for home in homes.all() {
            let directory = home.directory();
            let (live, ended) = (file::read(&directory), file::ended(&directory));
            if !live.is_empty() || !ended.is_empty() {
                all.insert(directory, Owned { live, ended, ..Owned::new(home) });
            }
        }
    }

    fn due(&self) -> Vec<(TreeLeaseId, Due)> {
        let mut due = Vec::new();
        self.all.lock().retain(|directory, owned| {
            owned.due(directory, &mut due);
            !owned.live.is_empty() || !owned.ended.is_empty()
        });
        due
    }

    /// What became of what was due. False: something is to be done again.
    fn settle(&self, outcomes: Vec<(TreeLeaseId, Due, Result<(), Refusal>)>) -> bool {
        let mut failed = None;
        for (id, due, outcome) in outcomes {
            match (due, outcome) {
                (Due::Keep, Ok(())) => {}
                (Due::Revoke, Ok(())) | (_, Err(Refusal { code: Code::Unknown, .. })) => self.forget(id),
                (Due::Revoke, Err(refusal)) => failed = Some(refusal),
                (Due::Keep, Err(refusal)) => {
                    let mut all = self.all.lock();
                    if let Some(held) = all.values_mut().find_map(|owned| owned.live.get_mut(&id)) {
                        held.kept = None;
                    }
                    failed = Some(refusal);
                }
            }
        }
        if let Some(refusal) = &failed {
            tracing::warn!(
                error = refusal.message,
                "leases of procs are neither kept nor ended, and will be tried again"
            );
        }
        failed.is_none()
    }
}

/// On a thread that may block.
async fn with<T: Send + 'static>(leases: &Arc<Leases>, act: impl FnOnce(&Leases) -> T + Send + 'static) -> T {
    let leases = Arc::clone(leases);
    tokio::task::spawn_blocking(move || act(&leases)).await.expect("leases do not panic")
}

/// Grants one that ends with the proc.
pub(crate) async fn grant(
    leases: &Arc<Leases>,
    home: &Arc<dyn RuntimeHome>,
    connection: u64,
    call: GrantCall,
) -> Result<TreeLease, RuntimeFailure> {
    let refused = |refusal: Refusal| failure(&refusal);
    let request = GrantTreeLeaseRequest { ttl_ms: call.ttl_ms };
    let lease = leases.tree.grant_lease(leases.realm.clone(), request).await.map_err(refused)?;
    let add = || {
        let (home, lease) = (Arc::clone(home), lease.clone());
        with(leases, move |leases| leases.add(&home, connection, &lease, call.with_proc))
    };
    let mut noted = add().await;
    if matches!(noted, Err(NotNoted::TooMany))
        && let Ok(there) = leases.tree.leases(leases.realm.clone()).await
    {
        // Those that the program let run out are none.
        let home = Arc::clone(home);
        with(leases, move |leases| leases.forget_others(&*home, &there)).await;
        noted = add().await;
    }
    let Err(error) = noted else { return Ok(lease) };
    let home = Arc::clone(home);
    with(leases, move |leases| leases.refuse(&home, lease.id)).await;
    let code = match error {
        NotNoted::TooMany => FailureCode::TooMany,
        NotNoted::Ended | NotNoted::Io(_) => FailureCode::Unavailable,
    };
    Err(RuntimeFailure::new(code, error.to_string()))
}

/// Ends one.
pub(crate) async fn revoke(leases: &Arc<Leases>, id: TreeLeaseId) -> Result<(), RuntimeFailure> {
    leases.tree.revoke_lease(leases.realm.clone(), id).await.map_err(|refusal| failure(&refusal))?;
    with(leases, move |leases| leases.forget(id)).await;
    Ok(())
}

/// Keeps and ends them, for ever; what is due at one look, at the same time.
pub(crate) async fn follow(leases: Arc<Leases>) {
    loop {
        let mut acts = JoinSet::new();
        for (id, due) in with(&leases, Leases::due).await {
            let leases = Arc::clone(&leases);
            acts.spawn(async move {
                let realm = leases.realm.clone();
                let done = match due {
                    Due::Keep => leases.tree.keep_lease(realm, id).await.map(drop),
                    Due::Revoke => leases.tree.revoke_lease(realm, id).await,
                };
                (id, due, done)
            });
        }
        let outcomes = acts.join_all().await;
        let is_done = outcomes.is_empty() || with(&leases, move |leases| leases.settle(outcomes)).await;
        tokio::time::sleep(if is_done { LOOK_EVERY } else { AGAIN_AFTER }).await;
    }
}

#[cfg(test)]
#[path = "leases_tests.rs"]
mod tests;
