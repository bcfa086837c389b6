//! Leases that procs have granted over their sockets: each belongs to its proc.
//!
//! While the program runs it keeps its leases alive itself, but for those that are to live as long
//! as the proc. While it sleeps the daemon does, for sleep is not death; at its wake each has its
//! whole time again. They end with the proc's processes: when it is stopped or removed, or its
//! program has ended. Which leases a proc has is in a file of its directory, which whatever ends
//! the proc gives another name; the next daemon goes on from both.

use crate::home::{HomeLife, RuntimeHome, RuntimeHomes};
use kip_service::TreeService;
use kip_types::api::{Code, Refusal};
use kip_types::name::Realm;
use kip_types::runtime::{ENDED_LEASES, LEASES};
use kip_types::tree::{TreeLease, TreeLeaseId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The last word of a line for a lease that the daemon keeps all the time.
const WITH_PROC: &str = "with-proc";
/// Between two looks at what procs are at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The leases of all procs, by the directories of these.
#[derive(Default)]
pub(crate) struct Leases(Mutex<BTreeMap<PathBuf, Owned>>);

/// Those of a proc.
struct Owned {
    home: Arc<dyn RuntimeHome>,
    life: HomeLife,
    leases: BTreeMap<TreeLeaseId, HeldLease>,
}

#[derive(Debug, Clone, Copy)]
struct HeldLease {
    ttl: Duration,
    /// The daemon keeps it while its proc is awake, too.
    with_proc: bool,
    /// When the daemon kept it last.
    kept: Instant,
}

/// What is to be done about a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Keep,
    Revoke,
}

impl Leases {
    /// A proc has another one.
    pub(crate) fn add(&self, home: &Arc<dyn RuntimeHome>, lease: &TreeLease, with_proc: bool) {
        let directory = home.directory();
        let mut all = self.0.lock();
        let owned = all.entry(directory.clone()).or_insert_with(|| Owned {
            home: Arc::clone(home),
            life: HomeLife::Awake,
            leases: BTreeMap::new(),
        });
        let held = HeldLease { ttl: Duration::from_millis(lease.ttl_ms), with_proc, kept: Instant::now() };
        owned.leases.insert(lease.id, held);
        write(&directory, &owned.leases);
    }

    /// One is gone.
    pub(crate) fn forget(&self, lease: TreeLeaseId) {
        for (directory, owned) in self.0.lock().iter_mut() {
            if owned.leases.remove(&lease).is_some() {
                write(directory, &owned.leases);
            }
        }
    }

    /// Those that the last daemon knew of.
    pub(crate) fn take_up(&self, homes: &dyn RuntimeHomes) {
        let mut all = self.0.lock();
        for home in homes.all() {
            let directory = home.directory();
            // At the first look those of a sleeper are kept, and what has ended is revoked.
            let mut leases = read(&directory.join(ENDED_LEASES));
            let life = if leases.is_empty() { HomeLife::Awake } else { HomeLife::Ended };
            leases.extend(read(&directory.join(LEASES)));
            if !leases.is_empty() {
                all.insert(directory, Owned { home, life, leases });
            }
        }
    }

    /// What is due now. A lease is kept when its proc falls asleep and when it wakes, and again and
    /// again between the two.
    fn due(&self) -> Vec<(TreeLeaseId, Due)> {
        let mut due = Vec::new();
        let now = Instant::now();
        self.0.lock().retain(|directory, owned| {
            let before = std::mem::replace(&mut owned.life, owned.home.life());
            // One that has ended may have been started again already.
            let has_ended = !directory.join(LEASES).exists() || before == HomeLife::Ended;
            match if has_ended { HomeLife::Ended } else { owned.life } {
                HomeLife::Ended => {
                    due.extend(owned.leases.keys().map(|id| (*id, Due::Revoke)));
                    owned.leases.clear();
                    for name in [LEASES, ENDED_LEASES] {
                        let _ = fs::remove_file(directory.join(name));
                    }
                }
                life => {
                    for (id, lease) in &mut owned.leases {
                        let is_ours = lease.with_proc || life == HomeLife::Asleep;
                        let is_old = is_ours && now.duration_since(lease.kept) >= lease.ttl / 3;
                        if is_old || before != life {
                            lease.kept = now;
                            due.push((*id, Due::Keep));
                        }
                    }
                }
            }
            !owned.leases.is_empty()
        });
        due
    }

    /// Keeps and ends them, for ever.
    pub(crate) async fn follow(&self, tree: &dyn TreeService, realm: &Realm) {
        loop {
            for (id, due) in self.due() {
                let done = match due {
                    Due::Keep => tree.keep_lease(realm.clone(), id).await.map(drop),
                    Due::Revoke => tree.revoke_lease(realm.clone(), id).await,
                };
                match done {
                    Ok(()) => {}
                    Err(Refusal { code: Code::Unknown, .. }) => self.forget(id),
                    Err(refusal) => tracing::warn!(lease = %id, error = refusal.message, "a lease of a proc"),
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

fn read(path: &Path) -> BTreeMap<TreeLeaseId, HeldLease> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let one = |line: &str| {
        let mut words = line.split(' ');
        let (id, ttl_ms) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let with_proc = words.next() == Some(WITH_PROC);
        Some((id, HeldLease { ttl: Duration::from_millis(ttl_ms), with_proc, kept: Instant::now() }))
    };
    text.lines().filter_map(one).collect()
}

/// Not synced: after a power cut a lease ends by its time.
fn write(directory: &Path, leases: &BTreeMap<TreeLeaseId, HeldLease>) {
    let path = directory.join(LEASES);
    let mut text = String::new();
    for (id, lease) in leases {
        let word = if lease.with_proc { WITH_PROC } else { "" };
        writeln!(text, "{id} {} {word}", lease.ttl.as_millis()).expect("a String takes anything");
    }
    let written = match text.is_empty() {
        true => fs::remove_file(&path).or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) }),
        false => {
            let new = path.with_extension("new");
            fs::write(&new, text).and_then(|()| fs::rename(&new, &path))
        }
    };
    if let Err(error) = written {
        tracing::warn!(path = %path.display(), %error, "which leases a proc has is not noted");
    }
}
