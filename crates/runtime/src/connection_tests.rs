//! Tests of connections: a tree that counts, a proc that holds, and a client. Never asks a machine.

#[path = "connection_watches_tests.rs"]
mod watches;

use self::watches::Jobs;
use super::*;
use crate::home::{HomeLife, RuntimeHome};
use crate::wire::{GetCall, RuntimeIdentity, WhoamiCall};
use async_trait::async_trait;
use kip_service::TreeFile;
use kip_types::ProcName;
use kip_types::api::tree::{
    GrantTreeLeaseRequest, MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, WriteTreeFileRequest,
};
use kip_types::api::{Code, Refusal};
use kip_types::spec::TreeAccess;
use kip_types::tree::{NodeKind, NodeStat, TreeChange, TreeChangeKind, TreeLease, TreePath};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

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
struct Holder {
    fds: Mutex<BTreeMap<(u64, &'static str), Arc<OwnedFd>>>,
    sleeps: AtomicBool,
}

impl RuntimeHome for Holder {
    fn identity(&self) -> RuntimeIdentity {
        RuntimeIdentity { name: "holder".to_owned(), ..RuntimeIdentity::default() }
    }

    fn key(&self) -> ProcName {
        "holder".parse().unwrap()
    }

    fn name(&self) -> ProcName {
        self.key()
    }

    fn may_spawn(&self) -> bool {
        true
    }

    fn tree(&self) -> TreeAccess {
        TreeAccess::Write
    }

    fn life(&self) -> HomeLife {
        if self.sleeps.load(Ordering::SeqCst) { HomeLife::Asleep } else { HomeLife::Awake }
    }

    fn directory(&self) -> PathBuf {
        PathBuf::from("/nowhere")
    }

    fn hold(&self, connection: u64, fds: Vec<(&'static str, OwnedFd)>) -> io::Result<()> {
        self.fds.lock().extend(fds.into_iter().map(|(name, fd)| ((connection, name), Arc::new(fd))));
        Ok(())
    }

    fn held(&self, connection: u64, name: &str) -> Option<Arc<OwnedFd>> {
        self.fds
            .lock()
            .iter()
            .find(|((number, held), _)| *number == connection && *held == name)
            .map(|(_, fd)| fd.clone())
    }

    fn connections(&self) -> Vec<u64> {
        self.fds.lock().keys().map(|(number, _)| *number).collect()
    }

    fn let_go(&self, connection: u64) {
        self.fds.lock().retain(|(number, _), _| *number != connection);
    }
}

/// A daemon's parts, and a client of it.
struct Both {
    tree: Arc<CountingTree>,
    jobs: Arc<Jobs>,
    service: Arc<Service>,
    home: Arc<Holder>,
    share: Arc<ProcShare>,
    number: u64,
    client: UnixStream,
    server: Option<OwnedFd>,
}

impl Both {
    fn new() -> Both {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let tree = Arc::new(CountingTree::default());
        let leases = Arc::new(Leases::new(tree.clone(), Realm::default()));
        let jobs = Arc::new(Jobs::default());
        let service = Service { tree: tree.clone(), spawns: jobs.clone(), realm: Realm::default(), leases };
        let (service, share) = (Arc::new(service), Arc::new(ProcShare::new()));
        Both { tree, jobs, service, home: Arc::default(), share, number: 1, client, server: Some(server.into()) }
    }

    fn client_of(&self) -> Client {
        Client { home: self.home.clone(), share: Arc::clone(&self.share) }
    }

    /// The daemon accepts the connection.
    fn begin(&mut self) -> JoinHandle<()> {
        let fd = self.server.take().expect("it is accepted once");
        let client = self.client_of();
        let place = client.share.place().expect("there is room");
        tokio::spawn(Connection::begin(Arc::clone(&self.service), client, self.number, fd, place))
    }

    /// The next daemon goes on with it.
    fn resume(&self) -> JoinHandle<()> {
        let connection = Connection::held(Arc::clone(&self.service), self.client_of(), 1, None).expect("it is held");
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

fn whoami() -> CallKind {
    CallKind::Whoami(WhoamiCall {})
}

impl Both {
    /// Another client of the same proc.
    fn another(&self) -> Both {
        static LAST: AtomicU64 = AtomicU64::new(1);
        let number = LAST.fetch_add(1, Ordering::SeqCst) + 1;
        let (service, home, share) = (self.service.clone(), self.home.clone(), self.share.clone());
        Both { service, home, share, number, ..Both::new() }
    }

    /// A descriptor goes with the first of these bytes.
    fn send_with(&self, bytes: &[u8], fd: &impl AsFd) {
        let fds = [fd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let sent = sendmsg(&self.client, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
        assert_eq!(sent, bytes.len());
    }

    fn say_with(&self, id: u64, kind: CallKind, fd: &impl AsFd) {
        self.send_with(&framed(&RuntimeCall { id, kind: Some(kind) }), fd);
    }

    /// Whether nothing comes any more but this answer.
    async fn ends_with(&self, wanted: FailureCode) {
        assert_eq!(code(&self.hear().await.1), Some(wanted));
        let mut client = self.client.try_clone().unwrap();
        let read = tokio::task::spawn_blocking(move || client.read(&mut [0])).await.unwrap();
        assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    }

    async fn wait(&self, until: impl Fn(&Both) -> bool) {
        let begun = Instant::now();
        while !until(self) {
            assert!(begun.elapsed() < Duration::from_secs(20), "it does not come");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A TCP socket whose last close waits for an hour, as long as the other one is there.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600))).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    // Other open files have the flag, too.
    socket.set_nonblocking(false).unwrap();
    (socket, peer)
}

// promise runtime: a descriptor that takes an hour to close, sent with any message or with none
//   that is whole, stands in the way of its own connection at most
#[tokio::test]
async fn what_takes_long_to_close_is_in_the_way_of_nothing_else() {
    let mut another = Both::new();
    another.greet().await;
    for (turn, bytes) in
        [framed(&RuntimeCall { id: 2, kind: Some(whoami()) }), vec![255; 8], vec![9, 0]].into_iter().enumerate()
    {
        let mut both = another.another();
        both.greet().await;
        let (socket, _peer) = lingering();
        both.send_with(&bytes, &socket);
        drop(socket);
        match turn {
            0 => assert!(matches!(both.hear().await, (2, AnswerKind::Identity(_)))),
            1 => assert_eq!(code(&both.hear().await.1), Some(FailureCode::TooLarge)),
            _ => both.client.shutdown(std::net::Shutdown::Both).unwrap(),
        }
        drop(both);
        tokio::time::sleep(Duration::from_millis(400)).await;
        another.say(2, whoami());
        assert!(matches!(another.hear().await, (2, AnswerKind::Identity(_))));
    }
}

// promise runtime: the contents of a file come from a file in memory; another descriptor is refused
#[tokio::test(flavor = "multi_thread")]
async fn only_files_in_memory_are_read() {
    let mut both = Both::new();
    both.greet().await;
    let call = || CallKind::Put(PutCall { path: "/a".to_owned(), in_descriptor: true, ..PutCall::default() });
    let memory = ConnectionMemory::make().unwrap();
    let (socket, _peer) = lingering();
    let proc = std::fs::File::open("/proc/self/status").unwrap();
    both.say_with(2, call(), &memory);
    both.say_with(3, call(), &proc);
    both.say_with(4, call(), &socket);
    both.say(5, call());
    assert!(matches!(both.hear().await, (2, AnswerKind::Node(_))));
    for _ in 3..=5 {
        assert_eq!(code(&both.hear().await.1), Some(FailureCode::Invalid));
    }
    // In parts, too.
    let frame = framed(&RuntimeCall { id: 6, kind: Some(call()) });
    for fd in [memory.as_fd(), proc.as_fd()] {
        both.send_with(&frame[..5], &fd);
        tokio::time::sleep(Duration::from_millis(300)).await;
        both.client.write_all(&frame[5..]).unwrap();
    }
    assert!(matches!(both.hear().await, (6, AnswerKind::Node(_))));
    assert_eq!(code(&both.hear().await.1), Some(FailureCode::Invalid));
    assert_eq!(both.tree.writes.load(Ordering::SeqCst), 2);
}

// promise runtime: a connection is held from its beginning, and the next daemon greets its client
//   if the last one did not
#[test]
fn a_connection_is_held_before_it_is_greeted() {
    for begins_well in [true, false] {
        let mut both = Both::new();
        daemon().block_on(async {
            both.begin();
            both.wait(|both| both.home.held(1, MEMORY).is_some()).await;
        });
        daemon().block_on(async {
            both.resume();
            if begins_well {
                both.say(1, CallKind::Hello(HelloCall { version: VERSION }));
                both.say(2, whoami());
                assert!(matches!(both.hear().await, (1, AnswerKind::Welcome(_))));
                assert!(matches!(both.hear().await, (2, AnswerKind::Identity(_))));
            } else {
                both.say(2, whoami());
                both.ends_with(FailureCode::BadFrame).await;
            }
        });
        // Killed after it has greeted the client, and before it took the hello out.
        if begins_well {
            both.say(1, CallKind::Hello(HelloCall { version: VERSION }));
            daemon().block_on(async {
                both.resume();
                assert!(matches!(both.hear().await, (1, AnswerKind::Welcome(_))));
            });
        }
    }
}

// promise runtime: a call with the number 0 ends its connection
#[tokio::test(flavor = "multi_thread")]
async fn no_call_has_the_number_0() {
    let mut both = Both::new();
    both.greet().await;
    both.say(0, put());
    both.ends_with(FailureCode::BadFrame).await;
    assert_eq!(both.tree.writes.load(Ordering::SeqCst), 0);
}

// promise runtime: a message that is not finished ends its connection, but not while the program
//   sleeps; so does the end of its proc, though the client has sent its own end over it
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_finished_or_the_connection_ends() {
    for ends_by_itself in [true, false] {
        let mut both = Both::new();
        let task = both.greet().await;
        both.home.sleeps.store(true, Ordering::SeqCst);
        both.send_with(&[9, 0], &both.client.try_clone().unwrap());
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!task.is_finished());
        if ends_by_itself {
            both.home.sleeps.store(false, Ordering::SeqCst);
            both.ends_with(FailureCode::BadFrame).await;
        } else {
            let socket = both.home.held(1, SOCKET).unwrap();
            drop(both.client);
            rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
        }
        tokio::time::timeout(Duration::from_secs(20), task).await.expect("it ends").unwrap();
        assert!(both.home.connections().is_empty());
    }
}

// promise runtime: the watches of all connections of a proc are counted together, and one that
//   ends makes room
#[tokio::test(flavor = "multi_thread")]
async fn watches_of_a_proc_are_counted_together() {
    let mut both = Both::new();
    let mut another = both.another();
    let task = both.greet().await;
    let watch = || CallKind::Watch(WatchCall { path: "/a".to_owned(), only: false, from: None });
    let most = MOST_WATCHES as u64;
    for id in 2..2 + most {
        both.say(id, watch());
        assert!(matches!(both.hear().await, (_, AnswerKind::Changes(_))));
    }
    another.greet().await;
    another.say(2, watch());
    assert_eq!(code(&another.hear().await.1), Some(FailureCode::TooMany));
    both.client.shutdown(std::net::Shutdown::Both).unwrap();
    task.await.unwrap();
    another.say(3, watch());
    assert!(matches!(another.hear().await, (3, AnswerKind::Changes(_))));
}

// promise runtime: long answers that no client of a proc reads are few, and each comes when others
//   were read
#[tokio::test(flavor = "multi_thread")]
async fn long_answers_wait_for_each_other() {
    let first = Both::new();
    let mut all: Vec<Both> = (0..20).map(|_| first.another()).collect();
    for both in &mut all {
        both.greet().await;
        both.say(2, get());
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let waits: u64 = all.iter().map(|both| rustix::io::ioctl_fionread(&both.client).unwrap()).sum();
    assert!((7 << 20..9 << 20).contains(&waits), "{waits}");
    for both in all.iter().rev() {
        if rustix::io::ioctl_fionread(&both.client).unwrap() > 0 {
            assert!(matches!(both.hear().await, (2, AnswerKind::File(_))));
        }
    }
    for both in &mut all {
        both.say(3, whoami());
        while !matches!(both.hear().await, (3, AnswerKind::Identity(_))) {}
    }
}
