//! One connection of a program, from its greeting to its end.
//!
//! ```text
//!  held by the keeper, too --> hello --> call --noted, if it changes something--> done --answered--> taken out
//! ```
//!
//! Calls of a connection are answered one after the other, in their order; only changes of watches
//! and answers to waits come between. So the client's frames wait in its own socket, and a client
//! that reads nothing costs no memory but that. A daemon that is killed leaves the connection with
//! the keeper: the next one finds the call that waits first, and if that was begun, and changes
//! something, it answers that it does not know what became of it.

mod waits;

use self::waits::CallWait;
use crate::access;
use crate::calls::{self, changes, failure, invalid, path_of};
use crate::frames::{SHORT_ANSWER_BYTES, SentFile, Stream, Waiting, WaitingFrame};
use crate::home::{HomeLife, MEMORY, RuntimeHome, SOCKET};
use crate::leases::{self, Leases};
use crate::memory::{ConnectionMemory, KeptCalls, KeptWatch};
use crate::share::{ConnectionPlace, MOST_WATCHES, ProcShare};
use crate::spawns;
use crate::wire::{
    AnswerKind, BESIDE_CHANGES, CallKind, FailureCode, HEAD, HelloCall, MOST_ANSWER_BYTES, MOST_CALL_BYTES, PutCall,
    RuntimeAnswer, RuntimeCall, RuntimeFailure, RuntimeWelcome, VERSION, WatchCall, WireChanges, WireDone, framed,
};
use kip_service::{Feed, SpawnPrograms, TreeService};
use kip_sys::fault;
use kip_types::api::tree::{TreeChanges, WatchTreeRequest};
use kip_types::name::Realm;
use kip_types::tree::TreeLeaseId;
use parking_lot::Mutex;
use prost::Message as _;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

/// What all connections have.
pub(crate) struct Service {
    pub(crate) tree: Arc<dyn TreeService>,
    pub(crate) spawns: Arc<dyn SpawnPrograms>,
    pub(crate) realm: Realm,
    pub(crate) leases: Arc<Leases>,
}

/// A proc, and what its connections may have together.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) home: Arc<dyn RuntimeHome>,
    pub(crate) share: Arc<ProcShare>,
}

/// A connection that is held.
pub(crate) struct Connection {
    service: Arc<Service>,
    home: Arc<dyn RuntimeHome>,
    share: Arc<ProcShare>,
    number: u64,
    stream: Stream,
    memory: ConnectionMemory,
    /// One answer at a time.
    writing: tokio::sync::Mutex<()>,
    watches: Mutex<BTreeMap<u64, Watching>>,
    waits: Mutex<BTreeMap<u64, CallWait>>,
    /// One note of all watches and waits at a time, so that the last one that is written is the
    /// newest.
    noting: Mutex<()>,
}

/// A watch that goes on.
struct Watching {
    kept: KeptWatch,
    /// Its changes, until they are followed.
    feed: Option<Feed<TreeChanges>>,
    task: Option<JoinHandle<()>>,
    /// Its place among the watches of its proc.
    _room: OwnedSemaphorePermit,
}

fn whole(id: u64, kind: AnswerKind) -> Result<Vec<u8>, RuntimeFailure> {
    let frame = framed(&RuntimeAnswer { id, kind: Some(kind) });
    if frame.len() <= HEAD + MOST_ANSWER_BYTES {
        return Ok(frame);
    }
    let message = format!("the answer has {} bytes, and at most {MOST_ANSWER_BYTES} are possible", frame.len() - HEAD);
    Err(RuntimeFailure::new(FailureCode::TooLarge, message))
}

fn answer(id: u64, kind: AnswerKind) -> Vec<u8> {
    whole(id, kind).unwrap_or_else(|failure| refusal(id, failure))
}

fn refusal(id: u64, failure: RuntimeFailure) -> Vec<u8> {
    framed(&RuntimeAnswer { id, kind: Some(AnswerKind::Failure(failure)) })
}

fn too_long(length: u32) -> RuntimeFailure {
    let message = format!(
        "a message of {length} bytes, and at most {MOST_CALL_BYTES} are possible: \
        contents of a file that are longer go by a descriptor"
    );
    RuntimeFailure::new(FailureCode::TooLarge, message)
}

fn no_message(error: &prost::DecodeError) -> RuntimeFailure {
    RuntimeFailure::new(FailureCode::BadFrame, format!("the bytes of a frame are no message: {error}"))
}

fn other_version(version: u32) -> RuntimeFailure {
    let message = format!("the client speaks version {version} of the runtime protocol, this daemon {VERSION}");
    RuntimeFailure::new(FailureCode::Version, message)
}

fn welcome() -> AnswerKind {
    AnswerKind::Welcome(RuntimeWelcome {
        version: VERSION,
        most_call_bytes: MOST_CALL_BYTES as u32,
        most_answer_bytes: MOST_ANSWER_BYTES as u32,
    })
}

fn unfinished() -> RuntimeFailure {
    RuntimeFailure::new(FailureCode::BadFrame, "a message was begun, and the rest of it did not come")
}

/// What is wrong with a call, so that the connection ends.
fn wrong(call: &RuntimeCall, is_greeted: bool) -> Option<RuntimeFailure> {
    let bad = |message| Some(RuntimeFailure::new(FailureCode::BadFrame, message));
    match call {
        RuntimeCall { id: 0, .. } => bad("the number of a call is never 0"),
        _ if is_greeted => None,
        RuntimeCall { kind: Some(CallKind::Hello(HelloCall { version: VERSION })), .. } => None,
        RuntimeCall { kind: Some(CallKind::Hello(HelloCall { version })), .. } => Some(other_version(*version)),
        _ => bad("the first message of a connection must be a hello"),
    }
}

/// Says what is wrong with the connection, and ends it.
pub(crate) async fn turn_away(stream: &Stream, id: u64, failure: RuntimeFailure) {
    let _ = stream.send(&refusal(id, failure)).await;
    stream.end().await;
}

impl Connection {
    /// Holds a new connection and serves it to its end.
    pub(crate) async fn begin(service: Arc<Service>, client: Client, number: u64, fd: OwnedFd, place: ConnectionPlace) {
        let home = Arc::clone(&client.home);
        let of_it = Arc::clone(&home);
        let hold = move || {
            let memory = ConnectionMemory::make()?;
            let copy = fd.try_clone()?;
            ConnectionMemory::of(Arc::new(memory.try_clone()?)).note_greeted(false)?;
            let held = of_it.hold(number, vec![(SOCKET, copy), (MEMORY, memory)]);
            io::Result::Ok((fd, held))
        };
        let held = tokio::task::spawn_blocking(hold).await.expect("the keeper's client does not panic");
        let (fd, error) = match held {
            Ok((fd, Ok(()))) => {
                drop(fd);
                match Connection::held(service, client, number, Some(place)) {
                    Some(connection) => connection.serve().await,
                    None => home.let_go(number),
                }
                return;
            }
            Ok((fd, Err(error))) => (Some(fd), error),
            Err(error) => (None, error),
        };
        tracing::warn!(%error, "a runtime connection cannot be held");
        home.let_go(number);
        if let Some(stream) = fd.and_then(|fd| Stream::new(Arc::new(fd), Some(place)).ok()) {
            stream.end().await;
        }
    }

    /// One that is held.
    pub(crate) fn held(
        service: Arc<Service>,
        client: Client,
        number: u64,
        place: Option<ConnectionPlace>,
    ) -> Option<Arc<Connection>> {
        let Client { home, share } = client;
        let (socket, memory) = (home.held(number, SOCKET)?, home.held(number, MEMORY)?);
        let stream = Stream::new(socket, place);
        let stream = stream.inspect_err(|error| tracing::warn!(%error, "a runtime connection is lost"));
        Some(Arc::new(Connection {
            service,
            home,
            share,
            number,
            stream: stream.ok()?,
            memory: ConnectionMemory::of(memory),
            writing: tokio::sync::Mutex::default(),
            watches: Mutex::default(),
            waits: Mutex::default(),
            noting: Mutex::default(),
        }))
    }

    /// Goes on with one that the last daemon has left.
    pub(crate) async fn resume(self: Arc<Connection>) {
        match self.memory.calls().filter(|_| !self.memory.is_in_part()) {
            Some(KeptCalls { watches, waits }) => {
                for kept in watches {
                    self.watch_again(kept).await;
                }
                waits.into_iter().for_each(|kept| self.wait_again(kept));
                self.serve().await;
            }
            None => {
                let message = "the daemon was ended in the middle of a message of this connection: connect again";
                turn_away(&self.stream, 0, RuntimeFailure::new(FailureCode::OutcomeUnknown, message)).await;
                self.end().await;
            }
        }
    }

    async fn send(&self, frame: &[u8]) -> io::Result<()> {
        let _alone = self.writing.lock().await;
        if frame.len() <= SHORT_ANSWER_BYTES {
            return self.stream.send(frame).await;
        }
        self.stream.writable().await?;
        let room = Arc::clone(&self.share.long_answers).acquire_owned().await.map_err(io::Error::other)?;
        self.stream.send(frame).await?;
        let stream = self.stream.clone();
        tokio::spawn(async move {
            let _ = stream.writable().await;
            drop(room);
        });
        Ok(())
    }

    /// Answers calls until the client has gone.
    async fn serve(self: Arc<Connection>) {
        if let Err(error) = self.answer_calls().await {
            tracing::debug!(%error, "a runtime connection ended");
        }
        self.end().await;
    }

    async fn end(&self) {
        let watches = std::mem::take(&mut *self.watches.lock());
        for task in watches.into_values().filter_map(|watching| watching.task) {
            task.abort();
        }
        self.end_waits();
        self.stream.end().await;
        let (home, number) = (Arc::clone(&self.home), self.number);
        let _ = tokio::task::spawn_blocking(move || home.let_go(number)).await;
    }

    /// The next call and the frame that it is in; none if the connection ends.
    async fn next_call(&self, is_greeted: bool) -> io::Result<Option<(WaitingFrame, RuntimeCall)>> {
        let sleeps = || self.home.life() == HomeLife::Asleep;
        let (id, failure) = match self.stream.peek(|| self.memory.note_in_part(true), sleeps).await? {
            Some(Waiting::Frame(frame)) => match RuntimeCall::decode(&frame.message[..]) {
                Ok(call) => match wrong(&call, is_greeted) {
                    None => return Ok(Some((frame, call))),
                    Some(failure) => (call.id, failure),
                },
                Err(error) => (0, no_message(&error)),
            },
            Some(Waiting::TooLong(length)) => (0, too_long(length)),
            Some(Waiting::Unfinished) => (0, unfinished()),
            None => return Ok(None),
        };
        self.send(&refusal(id, failure)).await?;
        Ok(None)
    }

    async fn answer_calls(self: &Arc<Connection>) -> io::Result<()> {
        let mut unknown = self.memory.begun();
        let mut is_greeted = self.memory.is_greeted();
        while let Some((waiting, RuntimeCall { id, kind })) = self.next_call(is_greeted).await? {
            if !is_greeted {
                fault::reach("runtime-held");
            }
            let is_unknown = std::mem::take(&mut unknown) == id;
            let kind = match kind {
                Some(CallKind::Await(call)) => {
                    let refused = self.wait(id, call).await;
                    if let Err(failure) = refused {
                        self.send(&refusal(id, failure)).await?;
                    }
                    if self.stream.consume(&waiting).await? {
                        self.memory.note_in_part(false)?;
                    }
                    self.begin_waits();
                    continue;
                }
                kind => kind,
            };
            let frame = match kind {
                Some(kind) if is_unknown && kind.changes() => {
                    let message = "the daemon was ended while it did this: it may be done, or not";
                    refusal(id, RuntimeFailure::new(FailureCode::OutcomeUnknown, message))
                }
                Some(kind) if kind.changes() => {
                    self.memory.note_begun(id)?;
                    fault::reach("runtime-begun");
                    let done = self.ask(id, kind, &waiting).await;
                    fault::reach("runtime-done");
                    done.map_or_else(|failure| refusal(id, failure), |kind| answer(id, kind))
                }
                Some(kind) => {
                    let done = self.ask(id, kind, &waiting).await;
                    done.map_or_else(|failure| refusal(id, failure), |kind| answer(id, kind))
                }
                None => {
                    let message = "this daemon does not know the call: it is of a newer version of the protocol";
                    refusal(id, RuntimeFailure::new(FailureCode::UnknownCall, message))
                }
            };
            self.send(&frame).await?;
            fault::reach("runtime-answered");
            if !is_greeted {
                // First, for the next daemon may well answer it again, but expects no other.
                self.memory.note_greeted(true)?;
                is_greeted = true;
            }
            if self.stream.consume(&waiting).await? {
                self.memory.note_in_part(false)?;
            }
            self.follow_new();
        }
        Ok(())
    }

    async fn ask(
        self: &Arc<Connection>,
        id: u64,
        call: CallKind,
        waiting: &WaitingFrame,
    ) -> Result<AnswerKind, RuntimeFailure> {
        access::check(&*self.home, &call)?;
        let (tree, realm) = (&self.service.tree, self.service.realm.clone());
        match call {
            // The last daemon was ended before it could answer it.
            CallKind::Hello(HelloCall { version: VERSION }) => Ok(welcome()),
            CallKind::Hello(HelloCall { version }) => Err(other_version(version)),
            CallKind::Whoami(_) => {
                let home = Arc::clone(&self.home);
                let identity = tokio::task::spawn_blocking(move || home.identity()).await;
                Ok(AnswerKind::Identity(identity.expect("to look at a proc does not panic")))
            }
            CallKind::Watch(call) => self.watch(id, call).await,
            CallKind::Unwatch(call) => {
                self.unwait(call.watch).await;
                self.unwatch(call.watch).await;
                Ok(AnswerKind::Done(WireDone {}))
            }
            CallKind::Grant(call) => {
                let lease = leases::grant(&self.service.leases, &self.home, self.number, call).await?;
                Ok(AnswerKind::Lease(calls::lease(&lease)))
            }
            CallKind::Revoke(call) => {
                leases::revoke(&self.service.leases, TreeLeaseId(call.lease)).await?;
                Ok(AnswerKind::Done(WireDone {}))
            }
            CallKind::Spawn(_) | CallKind::Started(_) | CallKind::Exited(_) | CallKind::Evict(_) => {
                spawns::ask(&*self.service.spawns, &*self.home, call).await
            }
            CallKind::List(_) => {
                let _turn = self.share.listings.acquire().await;
                calls::ask(&**tree, &realm, call, None).await
            }
            CallKind::Put(PutCall { in_descriptor: true, .. }) => {
                let file = self.file(waiting).await?;
                calls::ask(&**tree, &realm, call, file).await
            }
            call => calls::ask(&**tree, &realm, call, None).await,
        }
    }

    /// The file whose descriptor came with a call.
    async fn file(&self, waiting: &WaitingFrame) -> Result<Option<OwnedFd>, RuntimeFailure> {
        match self.stream.file(waiting).await.map_err(invalid)? {
            Some(SentFile::InMemory(file)) => Ok(Some(file)),
            Some(SentFile::Other) => Err(invalid("the descriptor is of no file in memory: memfd_create(2), tmpfs(5)")),
            None => Ok(None),
        }
    }

    async fn watch(&self, id: u64, call: WatchCall) -> Result<AnswerKind, RuntimeFailure> {
        // One of that number is of the last daemon's, which was ended before it could answer.
        self.unwatch(id).await;
        let room = self.room()?;
        let (feed, first) = self.feed(&call.path, call.only, call.from).await?;
        let kept = KeptWatch { id, path: call.path, only: call.only, seen: first.revision };
        self.watches.lock().insert(id, Watching { kept, feed: Some(feed), task: None, _room: room });
        self.note_calls();
        Ok(AnswerKind::Changes(changes(first)))
    }

    /// A place for one more watch of the proc.
    fn room(&self) -> Result<OwnedSemaphorePermit, RuntimeFailure> {
        let message = || format!("the proc has {MOST_WATCHES} watches, more are not possible");
        let room = Arc::clone(&self.share.watches).try_acquire_owned();
        room.map_err(|_| RuntimeFailure::new(FailureCode::TooMany, message()))
    }

    /// Follows the watches whose first answer has been sent.
    fn follow_new(self: &Arc<Connection>) {
        let mut watches = self.watches.lock();
        for (id, watching) in watches.iter_mut() {
            let Some(mut feed) = watching.feed.take() else { continue };
            let (connection, id) = (Arc::clone(self), *id);
            watching.task = Some(tokio::spawn(async move { connection.follow(id, &mut feed).await }));
        }
    }

    /// The changes that follow, and the first item, which has none.
    async fn feed(
        &self,
        path: &str,
        only: bool,
        from: Option<u64>,
    ) -> Result<(Feed<TreeChanges>, TreeChanges), RuntimeFailure> {
        let request = WatchTreeRequest { path: path_of(path)?, only, from };
        let refused = |refusal: kip_types::api::Refusal| failure(&refusal);
        let mut feed = self.service.tree.watch(self.service.realm.clone(), request).await.map_err(refused)?;
        match feed.recv().await {
            Some(Ok(first)) => Ok((feed, first)),
            Some(Err(refusal)) => Err(failure(&refusal)),
            None => Err(RuntimeFailure::new(FailureCode::Unavailable, "the daemon ends")),
        }
    }

    /// Goes on with a watch of the last daemon's.
    async fn watch_again(self: &Arc<Connection>, kept: KeptWatch) {
        let again = async {
            let room = self.room()?;
            let (feed, _) = self.feed(&kept.path, kept.only, Some(kept.seen)).await?;
            Ok((feed, room))
        };
        match again.await {
            Ok((feed, room)) => {
                let watching = Watching { kept: kept.clone(), feed: Some(feed), task: None, _room: room };
                self.watches.lock().insert(kept.id, watching);
                self.follow_new();
            }
            Err(failure) => drop(self.send(&refusal(kept.id, failure)).await),
        }
    }

    async fn unwatch(&self, id: u64) {
        let task = self.watches.lock().remove(&id).and_then(|watching| watching.task);
        if let Some(task) = task {
            task.abort();
            // Nothing of it comes after the answer.
            let _ = task.await;
        }
        self.note_calls();
    }

    /// Sends changes until there are no more. Without an error the daemon ends, and the next one
    /// goes on with the watch.
    async fn follow(&self, id: u64, feed: &mut Feed<TreeChanges>) {
        while let Some(item) = feed.recv().await {
            let sent = match item {
                Ok(item) => self.send_changes(id, changes(item)).await.map(Some),
                Err(refused) => self.send(&refusal(id, failure(&refused))).await.map(|()| None),
            };
            match sent {
                Ok(Some(revision)) => {
                    if let Some(watching) = self.watches.lock().get_mut(&id) {
                        watching.kept.seen = revision;
                    }
                    self.note_calls();
                }
                Ok(None) => {
                    self.watches.lock().remove(&id);
                    return self.note_calls();
                }
                Err(_) => return,
            }
        }
    }

    /// Sends all changes of one revision, which it returns.
    async fn send_changes(&self, id: u64, changes: WireChanges) -> io::Result<u64> {
        let revision = changes.revision;
        for part in changes.parts(MOST_ANSWER_BYTES - BESIDE_CHANGES) {
            self.send(&answer(id, AnswerKind::Changes(part))).await?;
        }
        Ok(revision)
    }

    fn note_calls(&self) {
        let _alone = self.noting.lock();
        let watches = self.watches.lock().values().map(|watching| watching.kept.clone()).collect();
        let waits = self.waits.lock().values().map(|wait| wait.kept.clone()).collect();
        if let Err(error) = self.memory.note_calls(&KeptCalls { watches, waits }) {
            tracing::warn!(%error, "watches and waits of a runtime connection are not noted");
        }
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
