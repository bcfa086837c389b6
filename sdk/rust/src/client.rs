//! Calls, each of which waits for its answer.

use crate::PATH;
use crate::connection::Connection;
use crate::error::Error;
use crate::watch::Watch;
use crate::wire::{
    AnswerKind, AwaitCall, CallKind, EvictCall, ExitedCall, GetCall, GrantCall, KeepCall, LeasesCall, ListCall,
    MkdirCall, MvCall, PutCall, RevokeCall, RmCall, RuntimeIdentity, SpawnCall, StartedCall, StatCall, WatchCall,
    WhoamiCall, WireFence, WireFile, WireLease, WireMoment, WireNode, WireSpawnEnd, WireSpawned,
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Contents that are longer go by a descriptor: a message of a client has at most 64 KiB.
const INLINE: usize = 60 << 10;

/// What a write needs to find, and the lease with which the file goes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Put {
    /// There must be nothing at the path.
    pub new: bool,
    /// The version that the file must have.
    pub version: Option<u64>,
    /// The file goes with this lease.
    pub lease: Option<u64>,
    /// Another node must be there still.
    pub fence: Option<WireFence>,
}

/// What Kip is asked from inside a proc. Threads may share one: their calls come one after the
/// other.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    connection: Mutex<Option<Connection>>,
}

impl Default for Client {
    fn default() -> Client {
        Client::new()
    }
}

/// The answer, if it is of that kind.
macro_rules! expect {
    ($answer:expr, $kind:ident) => {
        match $answer? {
            AnswerKind::$kind(value) => Ok(value),
            _ => Err(Error::Answer),
        }
    };
}

impl Client {
    /// At the socket that each proc has. It connects with the first call.
    pub fn new() -> Client {
        Client::at(Path::new(PATH))
    }

    /// At another one.
    pub fn at(path: &Path) -> Client {
        Client { path: path.to_owned(), connection: Mutex::default() }
    }

    fn connection(&self) -> MutexGuard<'_, Option<Connection>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, call: CallKind, descriptor: Option<BorrowedFd<'_>>) -> Result<AnswerKind, Error> {
        let mut held = self.connection();
        loop {
            let mut connection = match held.take().filter(|connection| !connection.is_stale()) {
                Some(connection) => connection,
                None => Connection::open(&self.path)?,
            };
            let answer = connection.send(call.clone(), descriptor).and_then(|id| connection.answer(id));
            match answer {
                Err(Error::Socket(error)) => {
                    let error = Error::Socket(error);
                    match error {
                        error if !error.is_end() => return Err(error),
                        Error::Socket(error) if call.changes() => return Err(Error::Lost(error)),
                        _ => {}
                    }
                }
                answer => {
                    *held = Some(connection);
                    return answer;
                }
            }
        }
    }

    /// Which proc this is.
    ///
    /// # Errors
    /// See [`Error`]; so of all others.
    pub fn whoami(&self) -> Result<RuntimeIdentity, Error> {
        expect!(self.ask(CallKind::Whoami(WhoamiCall {}), None), Identity)
    }

    /// A node, without its contents.
    ///
    /// # Errors
    /// [`Error`].
    pub fn stat(&self, path: &str) -> Result<WireNode, Error> {
        expect!(self.ask(CallKind::Stat(StatCall { path: path.to_owned() }), None), Node)
    }

    /// The nodes of a directory, by their names.
    ///
    /// # Errors
    /// [`Error`].
    pub fn ls(&self, path: &str) -> Result<Vec<WireNode>, Error> {
        let mut nodes: Vec<WireNode> = Vec::new();
        loop {
            let last = nodes.last().and_then(|node| node.path.rsplit_once('/'));
            let after = last.map(|(_, name)| name.to_owned()).unwrap_or_default();
            let call = CallKind::List(ListCall { path: path.to_owned(), after });
            let page = expect!(self.ask(call, None), Nodes)?;
            nodes.extend(page.nodes);
            if !page.more {
                return Ok(nodes);
            }
        }
    }

    /// A file with its contents.
    ///
    /// # Errors
    /// [`Error`].
    pub fn read(&self, path: &str) -> Result<WireFile, Error> {
        expect!(self.ask(CallKind::Get(GetCall { path: path.to_owned() }), None), File)
    }

    /// The contents of a file.
    ///
    /// # Errors
    /// [`Error`].
    pub fn get(&self, path: &str) -> Result<Vec<u8>, Error> {
        Ok(self.read(path)?.contents)
    }

    /// Makes a file, or gives it other contents.
    ///
    /// # Errors
    /// [`Error`].
    pub fn put(&self, path: &str, contents: &[u8], how: &Put) -> Result<WireNode, Error> {
        let Put { new, version, lease, fence } = how.clone();
        let mut call = PutCall { path: path.to_owned(), new, version, lease, fence, ..PutCall::default() };
        if contents.len() <= INLINE {
            call.contents = contents.to_vec();
            return expect!(self.ask(CallKind::Put(call), None), Node);
        }
        let made = memfd_create("kip-put", MemfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let mut file = File::from(made);
        file.write_all(contents)?;
        call.in_descriptor = true;
        expect!(self.ask(CallKind::Put(call), Some(file.as_fd())), Node)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// [`Error`].
    pub fn mkdir(&self, path: &str, fence: Option<WireFence>) -> Result<WireNode, Error> {
        expect!(self.ask(CallKind::Mkdir(MkdirCall { path: path.to_owned(), fence }), None), Node)
    }

    /// Removes a file or an empty directory, of that version if one is given.
    ///
    /// # Errors
    /// [`Error`].
    pub fn rm(&self, path: &str, version: Option<u64>, fence: Option<WireFence>) -> Result<(), Error> {
        expect!(self.ask(CallKind::Rm(RmCall { path: path.to_owned(), version, fence }), None), Done).map(drop)
    }

    /// Moves a file, or a directory with all that is in it. With `replace` a file may take the
    /// place of a file.
    ///
    /// # Errors
    /// [`Error`].
    pub fn mv(&self, from: &str, to: &str, replace: bool, fence: Option<WireFence>) -> Result<WireNode, Error> {
        let call = MvCall { from: from.to_owned(), to: to.to_owned(), replace, fence };
        expect!(self.ask(CallKind::Mv(call), None), Node)
    }

    /// Changes of a node and, unless `only` it is meant, of all below it: from now on, or after
    /// that revision.
    ///
    /// # Errors
    /// [`Error`].
    pub fn watch(&self, path: &str, only: bool, from: Option<u64>) -> Result<Watch, Error> {
        Watch::begin(&self.path, WatchCall { path: path.to_owned(), only, from })
    }

    /// A lease, which ends with the proc at the latest. While the proc sleeps Kip keeps it alive;
    /// with `with_proc` also while it runs.
    ///
    /// # Errors
    /// [`Error`].
    pub fn grant(&self, ttl: Duration, with_proc: bool) -> Result<WireLease, Error> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        expect!(self.ask(CallKind::Grant(GrantCall { ttl_ms, with_proc }), None), Lease)
    }

    /// Gives a lease its whole time again.
    ///
    /// # Errors
    /// [`Error`].
    pub fn keep(&self, lease: u64) -> Result<WireLease, Error> {
        expect!(self.ask(CallKind::Keep(KeepCall { lease }), None), Lease)
    }

    /// Ends a lease, and its files with it.
    ///
    /// # Errors
    /// [`Error`].
    pub fn revoke(&self, lease: u64) -> Result<(), Error> {
        expect!(self.ask(CallKind::Revoke(RevokeCall { lease }), None), Done).map(drop)
    }

    /// The leases of the realm.
    ///
    /// # Errors
    /// [`Error`].
    pub fn leases(&self) -> Result<Vec<WireLease>, Error> {
        Ok(expect!(self.ask(CallKind::Leases(LeasesCall {}), None), Leases)?.leases)
    }

    /// Spawns a child of this proc: its name, when it is recorded.
    ///
    /// # Errors
    /// [`Error`].
    pub fn spawn(&self, spawn: SpawnCall) -> Result<String, Error> {
        Ok(expect!(self.ask(CallKind::Spawn(spawn), None), Spawned)?.name)
    }

    /// Waits over a connection of its own, so that other calls do not wait, too.
    fn wait(&self, name: &str, moment: WireMoment) -> Result<WireSpawned, Error> {
        let call = CallKind::Await(AwaitCall { name: name.to_owned(), moment: moment.into() });
        loop {
            let mut connection = Connection::open(&self.path)?;
            match connection.send(call.clone(), None).and_then(|id| connection.answer(id)) {
                Err(error) if error.is_end() => {}
                answer => return expect!(answer, Spawned),
            }
        }
    }

    /// Waits until a spawned proc has started, or has ended before that.
    ///
    /// # Errors
    /// [`Error`].
    pub fn wait_start(&self, name: &str) -> Result<WireSpawned, Error> {
        self.wait(name, WireMoment::Start)
    }

    /// Waits until a spawned proc has ended: how, or why there is no exit status.
    ///
    /// # Errors
    /// [`Error`]; `NotFound` for one whose end is kept no more.
    pub fn wait_exit(&self, name: &str) -> Result<WireSpawnEnd, Error> {
        self.wait(name, WireMoment::Exit)?.end.ok_or(Error::Answer)
    }

    /// Says that this proc, a spawned one, has started.
    ///
    /// # Errors
    /// [`Error`].
    pub fn started(&self) -> Result<(), Error> {
        expect!(self.ask(CallKind::Started(StartedCall {}), None), Done).map(drop)
    }

    /// Says with which status this proc, a spawned one, is about to end, and a line about it. Its
    /// program then ends by itself.
    ///
    /// # Errors
    /// [`Error`].
    pub fn exited(&self, status: u32, message: &str) -> Result<(), Error> {
        let call = ExitedCall { status, message: message.to_owned() };
        expect!(self.ask(CallKind::Exited(call), None), Done).map(drop)
    }

    /// Has a spawned proc end: by its word or its stop signal, and by SIGKILL after a grace of 10 s
    /// or as long as is said.
    ///
    /// # Errors
    /// [`Error`].
    pub fn evict(&self, name: &str, reason: &str, grace: Option<Duration>) -> Result<WireSpawned, Error> {
        let grace_ms = grace.map(|grace| u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
        let call = EvictCall { name: name.to_owned(), reason: reason.to_owned(), grace_ms };
        expect!(self.ask(CallKind::Evict(call), None), Spawned)
    }

    /// Waits until this proc, a spawned one, is to end: why. From now on it gets no signal for
    /// that: what is left of the grace is its program's to end in.
    ///
    /// # Errors
    /// [`Error`].
    pub fn wait_evict(&self) -> Result<String, Error> {
        Ok(self.wait("", WireMoment::Evict)?.evicted.unwrap_or_default())
    }
}
