//! Tests of leases: a tree of leases, and a proc whose state the test sets. Never asks a machine.

use super::*;
use crate::wire::RuntimeIdentity;
use async_trait::async_trait;
use kip_service::{Feed, TreeFile};
use kip_types::ProcName;
use kip_types::api::tree::{
    MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, TreeChanges, WatchTreeRequest,
    WriteTreeFileRequest,
};
use kip_types::runtime::LEASES;
use kip_types::spec::TreeAccess;
use kip_types::tree::{NodeStat, TreePath};
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Leases that are there, and what was done to them.
#[derive(Default)]
struct LeaseTree {
    there: Mutex<BTreeSet<TreeLeaseId>>,
    granted: AtomicUsize,
    kept: Mutex<Vec<TreeLeaseId>>,
    is_down: AtomicBool,
    keeps: AtomicUsize,
    most_keeps: AtomicUsize,
}

fn no<T>() -> Result<T, Refusal> {
    Err(Refusal::new(Code::Unknown, "there is no such node or lease"))
}

impl LeaseTree {
    fn check(&self, id: TreeLeaseId) -> Result<(), Refusal> {
        if self.is_down.load(Ordering::SeqCst) {
            return Err(Refusal::new(Code::Exhausted, "there is no store"));
        }
        if self.there.lock().contains(&id) { Ok(()) } else { no() }
    }
}

#[async_trait]
impl TreeService for LeaseTree {
    async fn stat(&self, _: Realm, _: TreePath) -> Result<NodeStat, Refusal> {
        no()
    }

    async fn list(&self, _: Realm, _: TreePath) -> Result<Vec<NodeStat>, Refusal> {
        no()
    }

    async fn read(&self, _: Realm, _: TreePath) -> Result<TreeFile, Refusal> {
        no()
    }

    async fn write(&self, _: Realm, _: WriteTreeFileRequest, _: Vec<u8>) -> Result<NodeStat, Refusal> {
        no()
    }

    async fn make_directory(&self, _: Realm, _: MakeTreeDirectoryRequest) -> Result<NodeStat, Refusal> {
        no()
    }

    async fn remove(&self, _: Realm, _: RemoveTreeNodeRequest) -> Result<(), Refusal> {
        no()
    }

    async fn rename(&self, _: Realm, _: RenameTreeNodeRequest) -> Result<NodeStat, Refusal> {
        no()
    }

    async fn watch(&self, _: Realm, _: WatchTreeRequest) -> Result<Feed<TreeChanges>, Refusal> {
        no()
    }

    async fn grant_lease(&self, _: Realm, request: GrantTreeLeaseRequest) -> Result<TreeLease, Refusal> {
        let id = TreeLeaseId(1 + self.granted.fetch_add(1, Ordering::SeqCst) as u64);
        self.there.lock().insert(id);
        Ok(TreeLease { id, ttl_ms: request.ttl_ms, left_ms: request.ttl_ms })
    }

    async fn keep_lease(&self, _: Realm, id: TreeLeaseId) -> Result<TreeLease, Refusal> {
        let keeps = 1 + self.keeps.fetch_add(1, Ordering::SeqCst);
        self.most_keeps.fetch_max(keeps, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.keeps.fetch_sub(1, Ordering::SeqCst);
        self.check(id)?;
        self.kept.lock().push(id);
        Ok(TreeLease { id, ttl_ms: 1000, left_ms: 1000 })
    }

    async fn revoke_lease(&self, _: Realm, id: TreeLeaseId) -> Result<(), Refusal> {
        self.check(id)?;
        self.there.lock().remove(&id);
        Ok(())
    }

    async fn leases(&self, _: Realm) -> Result<Vec<TreeLease>, Refusal> {
        Ok(self.there.lock().iter().map(|id| TreeLease { id: *id, ttl_ms: 1000, left_ms: 1000 }).collect())
    }
}

/// A proc with one connection, which its program's end lets go.
struct Program {
    directory: PathBuf,
    life: Mutex<HomeLife>,
    connection: Mutex<Option<Arc<OwnedFd>>>,
}

impl RuntimeHome for Program {
    fn identity(&self) -> RuntimeIdentity {
        RuntimeIdentity::default()
    }

    fn key(&self) -> ProcName {
        "program".parse().unwrap()
    }

    fn name(&self) -> ProcName {
        self.key()
    }

    fn may_spawn(&self) -> bool {
        false
    }

    fn tree(&self) -> TreeAccess {
        TreeAccess::Write
    }

    fn life(&self) -> HomeLife {
        *self.life.lock()
    }

    fn directory(&self) -> PathBuf {
        self.directory.clone()
    }

    fn hold(&self, _: u64, _: Vec<(&'static str, OwnedFd)>) -> io::Result<()> {
        Ok(())
    }

    fn held(&self, _: u64, _: &str) -> Option<Arc<OwnedFd>> {
        self.connection.lock().clone()
    }

    fn connections(&self) -> Vec<u64> {
        Vec::new()
    }

    fn let_go(&self, _: u64) {}
}

struct One(Arc<dyn RuntimeHome>);

impl RuntimeHomes for One {
    fn of_user(&self, _: u32) -> Option<Arc<dyn RuntimeHome>> {
        None
    }

    fn all(&self) -> Vec<Arc<dyn RuntimeHome>> {
        vec![Arc::clone(&self.0)]
    }
}

struct Machine {
    tree: Arc<LeaseTree>,
    leases: Arc<Leases>,
    program: Arc<Program>,
    _directory: tempfile::TempDir,
}

impl Machine {
    fn new() -> Machine {
        let directory = tempfile::tempdir().unwrap();
        let tree = Arc::new(LeaseTree::default());
        let leases = Leases::new(tree.clone(), Realm::default());
        let program = Program {
            directory: directory.path().to_owned(),
            life: Mutex::new(HomeLife::Awake),
            connection: Mutex::default(),
        };
        let machine = Machine { tree, leases: Arc::new(leases), program: Arc::new(program), _directory: directory };
        machine.connect();
        machine
    }

    fn home(&self) -> Arc<dyn RuntimeHome> {
        self.program.clone()
    }

    fn connect(&self) {
        let fd = OwnedFd::from(fs::File::open("/dev/null").unwrap());
        *self.program.connection.lock() = Some(Arc::new(fd));
    }

    /// What the end of a program does.
    fn end(&self) {
        *self.program.connection.lock() = None;
        file::end(&self.program.directory);
    }

    /// Another daemon in the place of this one.
    fn next_daemon(&mut self) {
        let leases = Leases::new(self.tree.clone(), Realm::default());
        leases.take_up(&One(self.home()));
        self.leases = Arc::new(leases);
    }

    async fn grant(&self, with_proc: bool) -> Result<TreeLeaseId, RuntimeFailure> {
        let call = GrantCall { ttl_ms: 1000, with_proc };
        grant(&self.leases, &self.home(), 1, call).await.map(|lease| lease.id)
    }

    /// What is due, done.
    async fn look(&self) -> Vec<(TreeLeaseId, Due)> {
        let due = self.leases.due();
        let mut outcomes = Vec::new();
        for (id, what) in &due {
            let done = match what {
                Due::Keep => self.tree.keep_lease(Realm::default(), *id).await.map(drop),
                Due::Revoke => self.tree.revoke_lease(Realm::default(), *id).await,
            };
            outcomes.push((*id, *what, done));
        }
        self.leases.settle(outcomes);
        due
    }

    fn there(&self) -> Vec<u64> {
        self.tree.there.lock().iter().map(|id| id.0).collect()
    }

    fn files(&self) -> usize {
        fs::read_dir(&self.program.directory).unwrap().count()
    }
}

// promise runtime: a lease ends with the program that it was granted to, also if the next program
//   of the proc grants one before that is seen; that of the next program stays
#[tokio::test]
async fn each_program_has_its_own() {
    for is_next_daemon in [false, true] {
        let mut machine = Machine::new();
        for with_proc in [true, false] {
            machine.grant(with_proc).await.unwrap();
        }
        for _ in 0..2 {
            machine.end();
            machine.connect();
            machine.grant(true).await.unwrap();
        }
        if is_next_daemon {
            machine.next_daemon();
        }
        machine.look().await;
        assert_eq!(machine.there(), [4], "{is_next_daemon}");
        assert_eq!((machine.files(), file::read(&machine.program.directory).len()), (1, 1));
        machine.look().await;
        assert_eq!(machine.there(), [4], "{is_next_daemon}");
        machine.end();
        machine.look().await;
        assert_eq!((machine.there(), machine.files()), (vec![], 0));
        assert!(machine.leases.all.lock().get(&machine.program.directory).is_none_or(|owned| owned.ended.is_empty()));
    }
}

// promise runtime: a lease that a program is granted at its end goes with it
#[tokio::test]
async fn a_grant_at_the_end_is_none() {
    let machine = Machine::new();
    machine.grant(true).await.unwrap();
    machine.end();
    assert_eq!(machine.grant(true).await.unwrap_err().code(), FailureCode::Unavailable);
    machine.look().await;
    assert_eq!(machine.there(), Vec::<u64>::new());
}

// promise runtime: a lease that cannot be noted is refused and ended
#[tokio::test]
async fn what_cannot_be_noted_is_refused() {
    let machine = Machine::new();
    fs::create_dir(machine.program.directory.join(LEASES)).unwrap();
    let failure = machine.grant(true).await.unwrap_err();
    assert!(failure.message.contains("cannot be noted"), "{failure:?}");
    machine.look().await;
    assert_eq!(machine.there(), Vec::<u64>::new());
}

// promise runtime: what cannot be revoked is tried again, by the next daemon, too
#[tokio::test]
async fn a_revoke_that_fails_is_tried_again() {
    let mut machine = Machine::new();
    machine.grant(true).await.unwrap();
    machine.end();
    machine.tree.is_down.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        assert_eq!(machine.look().await, [(TreeLeaseId(1), Due::Revoke)]);
    }
    machine.next_daemon();
    assert_eq!(machine.look().await, [(TreeLeaseId(1), Due::Revoke)]);
    machine.tree.is_down.store(false, Ordering::SeqCst);
    machine.look().await;
    assert_eq!((machine.there(), machine.files()), (vec![], 0));
    assert_eq!(machine.look().await, []);
}

// promise runtime: a lease has its whole time again when its proc falls asleep, when it wakes, and
//   when the daemon is there again
#[tokio::test]
async fn a_lease_is_kept_at_each_turn() {
    let mut machine = Machine::new();
    let mine = machine.grant(false).await.unwrap();
    assert_eq!(machine.look().await, []);
    machine.next_daemon();
    assert_eq!(machine.look().await, [(mine, Due::Keep)]);
    assert_eq!(machine.look().await, []);
    for life in [HomeLife::Asleep, HomeLife::Awake] {
        *machine.program.life.lock() = life;
        assert_eq!(machine.look().await, [(mine, Due::Keep)]);
        assert_eq!(machine.look().await, []);
    }
}

// promise runtime: a proc has at most 64 leases; those that have run out do not count
#[tokio::test]
async fn there_are_not_too_many() {
    let machine = Machine::new();
    for _ in 0..MOST_LEASES {
        machine.grant(false).await.unwrap();
    }
    assert_eq!(machine.grant(false).await.unwrap_err().code(), FailureCode::TooMany);
    machine.look().await;
    assert_eq!(machine.there().len(), MOST_LEASES);
    machine.tree.there.lock().remove(&TreeLeaseId(7));
    machine.grant(false).await.unwrap();
    assert_eq!(machine.grant(false).await.unwrap_err().code(), FailureCode::TooMany);
    assert_eq!(file::read(&machine.program.directory).len(), MOST_LEASES);
}

// promise runtime: leases are kept at the same time, so that those of one proc do not make those of
//   others late
#[tokio::test(flavor = "multi_thread")]
async fn leases_are_kept_at_the_same_time() {
    let machine = Machine::new();
    for _ in 0..20 {
        machine.grant(true).await.unwrap();
    }
    *machine.program.life.lock() = HomeLife::Asleep;
    let task = tokio::spawn(follow(Arc::clone(&machine.leases)));
    while machine.tree.kept.lock().len() < 20 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(machine.tree.most_keeps.load(Ordering::SeqCst), 20);
    task.abort();
}

#[tokio::test]
async fn revoked_ones_are_forgotten() {
    let machine = Machine::new();
    let (first, second) = (machine.grant(true).await.unwrap(), machine.grant(true).await.unwrap());
    revoke(&machine.leases, first).await.unwrap();
    assert_eq!(file::read(&machine.program.directory).into_keys().collect::<Vec<_>>(), [second]);
    let third = machine.grant(false).await.unwrap();
    let lines = file::read(&machine.program.directory);
    assert_eq!((lines[&third].line, lines[&third].with_proc, lines[&second].with_proc), (0, false, true));
}
