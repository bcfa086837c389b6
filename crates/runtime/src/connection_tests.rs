//! Tests of connections: a tree that counts, a proc that holds, and a client. Never asks a machine.

use super::*;
use crate::home::{HomeLife, RuntimeHome};
use crate::wire::{GetCall, PutCall, RuntimeIdentity, WhoamiCall};
use async_trait::async_trait;
use kip_service::TreeFile;
use kip_types::api::tree::{
    GrantTreeLeaseRequest, MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, WriteTreeFileRequest,
};
use kip_types::api::{Code, Refusal};
use kip_types::spec::TreeAccess;
use kip_types::tree::{NodeKind, NodeStat, TreeChange, TreeChangeKind, TreeLease, TreePath};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A tree that counts writes, and whose watches are fed by hand.
#[derive(Default)]
struct CountingTree {
    writes: AtomicU64,
    watches: Mutex<Vec<tokio::sync::mpsc::Sender<Result<TreeChanges, Refusal>>>>,
    from: Mutex<Vec<Option<u64>>>,
}

fn none<T>() -> Result<T, Refusal> {
    Err(Refusal::new(Code::Unknown, "there is no such node"))
}

fn file(path: TreePath) -> NodeStat {
    NodeStat { path, kind: NodeKind::File, size_bytes: 0, version: 1, created: 1, lease: None }
}

#[async_trait]
impl TreeService for CountingTree {
    async fn stat(&self, _: Realm, _: TreePath) -> Result<NodeStat, Refusal> {
        none()
    }

    async fn list(&self, _: Realm, _: TreePath) -> Result<Vec<NodeStat>, Refusal> {
        none()
    }

    async fn read(&self, _: Realm, path: TreePath) -> Result<TreeFile, Refusal> {
        Ok(TreeFile { node: file(path), contents: vec![7; 1 << 20] })
    }

    async fn write(&self, _: Realm, request: WriteTreeFileRequest, _: Vec<u8>) -> Result<NodeStat, Refusal> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        Ok(file(request.path))
    }

    async fn make_directory(&self, _: Realm, _: MakeTreeDirectoryRequest) -> Result<NodeStat, Refusal> {
        none()
    }

    async fn remove(&self, _: Realm, _: RemoveTreeNodeRequest) -> Result<(), Refusal> {
        none()
    }

    async fn rename(&self, _: Realm, _: RenameTreeNodeRequest) -> Result<NodeStat, Refusal> {
        none()
    }

    async fn watch(&self, _: Realm, request: WatchTreeRequest) -> Result<Feed<TreeChanges>, Refusal> {
        let (sender, feed) = kip_service::feed();
        let revision = request.from.unwrap_or(10);
        sender.send(Ok(TreeChanges { revision, changes: Vec::new() })).await.expect("there is room");
        self.from.lock().push(request.from);
        self.watches.lock().push(sender);
        Ok(feed)
    }

    async fn grant_lease(&self, _: Realm, _: GrantTreeLeaseRequest) -> Result<TreeLease, Refusal> {
        none()
    }

    async fn keep_lease(&self, _: Realm, _: TreeLeaseId) -> Result<TreeLease, Refusal> {
        none()
    }

    async fn revoke_lease(&self, _: Realm, _: TreeLeaseId) -> Result<(), Refusal> {
        none()
    }

    async fn leases(&self, _: Realm) -> Result<Vec<TreeLease>, Refusal> {
        Ok(Vec::new())
    }
}

/// A proc that holds what it is given.
#[derive(Default)]
struct Holder(Mutex<BTreeMap<(u64, &'static str), Arc<OwnedFd>>>);

impl RuntimeHome for Holder {
    fn identity(&self) -> RuntimeIdentity {
        RuntimeIdentity { name: "holder".to_owned(), ..RuntimeIdentity::default() }
    }

    fn tree(&self) -> TreeAccess {
        TreeAccess::Write
    }

    fn life(&self) -> HomeLife {
        HomeLife::Awake
    }

    fn directory(&self) -> PathBuf {
        PathBuf::from("/nowhere")
    }

    fn hold(&self, connection: u64, fds: Vec<(&'static str, OwnedFd)>) -> io::Result<()> {
        self.0.lock().extend(fds.into_iter().map(|(name, fd)| ((connection, name), Arc::new(fd))));
        Ok(())
    }

    fn held(&self, connection: u64, name: &str) -> Option<Arc<OwnedFd>> {
        self.0
            .lock()
            .iter()
            .find(|((number, held), _)| *number == connection && *held == name)
            .map(|(_, fd)| fd.clone())
    }

    fn connections(&self) -> Vec<u64> {
        self.0.lock().keys().map(|(number, _)| *number).collect()
    }

    fn let_go(&self, connection: u64) {
        self.0.lock().retain(|(number, _), _| *number != connection);
    }
}

/// A daemon's parts, and a client of it.
struct Both {
    tree: Arc<CountingTree>,
    service: Arc<Service>,
    home: Arc<Holder>,
    client: UnixStream,
    server: Option<OwnedFd>,
}

impl Both {
    fn new() -> Both {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let tree = Arc::new(CountingTree::default());
        let leases = Arc::new(Leases::new(tree.clone(), Realm::default()));
        let service = Service { tree: tree.clone(), realm: Realm::default(), leases };
        Both { tree, service: Arc::new(service), home: Arc::default(), client, server: Some(server.into()) }
    }

    fn home(&self) -> Arc<dyn RuntimeHome> {
        self.home.clone()
    }

    /// The daemon accepts the connection.
    fn begin(&mut self) -> JoinHandle<()> {
        let fd = self.server.take().expect("it is accepted once");
        tokio::spawn(Connection::begin(Arc::clone(&self.service), self.home(), 1, fd))
    }

    /// The next daemon goes on with it.
    fn resume(&self) -> JoinHandle<()> {
        let connection = Connection::held(Arc::clone(&self.service), self.home(), 1).expect("it is held");
        tokio::spawn(connection.resume())
    }

    fn say(&mut self, id: u64, kind: CallKind) {
        self.client.write_all(&framed(&RuntimeCall { id, kind: Some(kind) })).unwrap();
    }

    async fn hear(&self) -> (u64, AnswerKind) {
        let mut client = self.client.try_clone().unwrap();
        let read = move || {
            let mut head = [0; HEAD];
            client.read_exact(&mut head).unwrap();
            let mut message = vec![0; u32::from_le_bytes(head) as usize];
            client.read_exact(&mut message).unwrap();
            RuntimeAnswer::decode(&message[..]).unwrap()
        };
        let answer = tokio::task::spawn_blocking(read).await.unwrap();
        (answer.id, answer.kind.expect("every answer has a kind"))
    }

    async fn greet(&mut self) -> JoinHandle<()> {
        let task = self.begin();
        self.say(1, CallKind::Hello(HelloCall { version: VERSION }));
        assert!(matches!(self.hear().await, (1, AnswerKind::Welcome(_))));
        task
    }
}

/// What a daemon runs on: dropped, all of its tasks end where they are.
fn daemon() -> tokio::runtime::Runtime {
    tokio::runtime::Runtime::new().unwrap()
}

fn put() -> CallKind {
    CallKind::Put(PutCall { path: "/a".to_owned(), ..PutCall::default() })
}

fn get() -> CallKind {
    CallKind::Get(GetCall { path: "/a".to_owned() })
}

fn code(kind: &AnswerKind) -> Option<FailureCode> {
    if let AnswerKind::Failure(failure) = kind { Some(failure.code()) } else { None }
}

// promise runtime: calls of one connection are answered in their order; a connection and what is
//   held of it go when the client goes
#[tokio::test(flavor = "multi_thread")]
async fn calls_are_answered_in_their_order() {
    let mut both = Both::new();
    let task = both.greet().await;
    both.say(2, put());
    both.say(3, CallKind::Whoami(WhoamiCall {}));
    both.say(4, get());
    assert!(matches!(both.hear().await, (2, AnswerKind::Node(_))));
    assert!(matches!(both.hear().await, (3, AnswerKind::Identity(identity)) if identity.name == "holder"));
    assert!(matches!(both.hear().await, (4, AnswerKind::File(file)) if file.contents.len() == 1 << 20));
    assert_eq!(both.home.connections().len(), 2);
    both.client.shutdown(std::net::Shutdown::Both).unwrap();
    task.await.unwrap();
    assert!(both.home.connections().is_empty());
}

// promise runtime: the next daemon does not repeat a change that may be done: it says that this is
//   not known; what changes nothing it answers, and all that comes after
#[test]
fn what_was_begun_is_not_begun_again() {
    for (begun, kind, is_unknown) in [(2, put(), true), (2, get(), false), (1, put(), false), (0, put(), false)] {
        let mut both = Both::new();
        drop(daemon().block_on(both.greet()));
        let memory = ConnectionMemory::of(both.home.held(1, MEMORY).unwrap());
        memory.note_begun(begun).unwrap();
        both.say(2, kind);
        both.say(3, put());
        daemon().block_on(async {
            both.resume();
            let (id, first) = both.hear().await;
            assert_eq!((id, code(&first) == Some(FailureCode::OutcomeUnknown)), (2, is_unknown), "{begun} {first:?}");
            assert!(matches!(both.hear().await, (3, AnswerKind::Node(_))));
        });
    }
}

// promise runtime: a watch goes on with the next daemon, after the revision that was told last
#[test]
fn watches_go_on() {
    let mut both = Both::new();
    let change = |revision| {
        let path: TreePath = "/a".parse().unwrap();
        let change = TreeChange { revision, kind: TreeChangeKind::Removed, path, from: None, node: None };
        Ok(TreeChanges { revision, changes: vec![change] })
    };
    daemon().block_on(async {
        both.greet().await;
        both.say(5, CallKind::Watch(WatchCall { path: "/a".to_owned(), only: false, from: None }));
        assert!(matches!(both.hear().await, (5, AnswerKind::Changes(first)) if first.revision == 10));
        let sender = both.tree.watches.lock()[0].clone();
        sender.send(change(12)).await.unwrap();
        assert!(matches!(both.hear().await, (5, AnswerKind::Changes(changes)) if changes.revision == 12));
        let memory = ConnectionMemory::of(both.home.held(1, MEMORY).unwrap());
        // What is being written is not whole.
        while memory.watches().is_none_or(|watches| watches[0].seen != 12) {
            tokio::task::yield_now().await;
        }
    });
    let memory = ConnectionMemory::of(both.home.held(1, MEMORY).unwrap());
    daemon().block_on(async {
        both.resume();
        both.say(6, put());
        assert!(matches!(both.hear().await, (6, AnswerKind::Node(_))));
        assert_eq!(*both.tree.from.lock(), [None, Some(12)]);
        let sender = both.tree.watches.lock()[1].clone();
        sender.send(change(13)).await.unwrap();
        assert!(matches!(both.hear().await, (5, AnswerKind::Changes(changes)) if changes.revision == 13));
        // The last answer to a watch is its failure.
        sender.send(Err(Refusal::new(Code::State, "not kept any more"))).await.unwrap();
        assert_eq!(code(&both.hear().await.1), Some(FailureCode::Condition));
        both.say(7, CallKind::Unwatch(crate::wire::UnwatchCall { watch: 5 }));
        assert!(matches!(both.hear().await, (7, AnswerKind::Done(_))));
        assert_eq!(memory.watches(), Some(Vec::new()));
    });
}

// promise runtime: a client that reads nothing is answered no more until it reads
#[tokio::test(flavor = "multi_thread")]
async fn answers_wait_for_their_reader() {
    let mut both = Both::new();
    let task = both.greet().await;
    let calls = 60;
    for id in 2..2 + calls {
        both.say(id, get());
    }
    both.say(99, put());
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(both.tree.writes.load(Ordering::SeqCst), 0, "60 MiB are not answered at once");
    for id in 2..2 + calls {
        assert!(matches!(both.hear().await, (heard, AnswerKind::File(_)) if heard == id));
    }
    assert!(matches!(both.hear().await, (99, AnswerKind::Node(_))));
    task.abort();
}
