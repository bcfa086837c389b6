//! The daemon's side of the keeper: [`Keeper`], a connection that may be used from any thread.
//! Calls block, for some tens of microseconds each; in an async task use `spawn_blocking` or
//! `block_in_place` for large ones.
//!
//! When the keeper has died every call returns [`KeeperError::Gone`] until [`Keeper::respawn`]; the
//! new keeper is empty, and the program that holds the duplicates must put them again.

use crate::bundle::{Bundle, BundlePart};
use crate::errors::{ANSWER_TIMEOUT, KeeperError, StartError};
use crate::protocol::{
    KeeperAnswer, KeeperRefusal, KeeperRequest, KeeperStatus, MAX_MESSAGE, MAX_PART, PROTOCOL, Select, check_name,
};
use crate::run_directory::RunDirectory;
use crate::{resident, say};
use kip_sys::fdpass;
use kip_sys::process::{Signal, pidfd_open, pidfd_send_signal, wait_for_end};
use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The name of its files.
pub const KIND: &str = "keeper";
/// How long a keeper may take to be there, which includes a dying predecessor's letting go of the
/// lock.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const START_RETRY: Duration = Duration::from_millis(5);
/// Between tries to find a keeper for what no other process holds.
const FILL_RETRY: Duration = Duration::from_secs(1);

/// Whether a keeper was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// One was running, and may hold things.
    Running,
    /// It was started by this call (or by another's at the same time) and was empty then.
    Started,
}

#[derive(Debug)]
struct Connection {
    /// None after an error that left request and answer out of step.
    socket: Option<OwnedFd>,
    pidfd: OwnedFd,
    pid: u32,
}

/// A connection to the keeper of a data directory.
#[derive(Debug)]
pub struct Keeper {
    binary: PathBuf,
    dir: PathBuf,
    found: Presence,
    connection: Mutex<Connection>,
}

impl Keeper {
    /// Connects to the keeper of the data directory; starts the program `binary` when none runs.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn connect_or_spawn(binary: &Path, dir: &Path) -> Result<Keeper, StartError> {
        let (connection, found) = establish(binary, dir)?;
        Ok(Keeper { binary: binary.to_owned(), dir: dir.to_owned(), found, connection: Mutex::new(connection) })
    }

    /// Connects to the keeper of the data directory if one runs.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn connect(binary: &Path, dir: &Path) -> Result<Option<Keeper>, StartError> {
        let place = RunDirectory::open(dir, KIND)?;
        match place.connect(ANSWER_TIMEOUT) {
            Ok(socket) => {
                let connection = Mutex::new(greet(&place, socket)?);
                Ok(Some(Keeper {
                    binary: binary.to_owned(),
                    dir: dir.to_owned(),
                    found: Presence::Running,
                    connection,
                }))
            }
            Err(e) if nobody(&e) => Ok(None),
            Err(source) => Err(StartError::Connect { path: place.socket_path(), source }),
        }
    }

    /// Whether one runs that speaks another protocol.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn is_foreign(dir: &Path) -> Result<bool, StartError> {
        let place = RunDirectory::open(dir, KIND)?;
        drop(place.turn()?);
        let found = meet_any(&place)?;
        Ok(found.is_some_and(|(_, status)| status.protocol != PROTOCOL))
    }

    /// Puts this program's keeper in the place of the one that runs, whatever protocol that speaks,
    /// with all that it holds. Returns how many descriptors that are; none if none runs. The new
    /// one takes them itself before the old one ends, and we hold them too until it has them:
    /// either may die. No other process may change what is held meanwhile, and a client that is
    /// connected to the old one has to connect anew.
    ///
    /// # Errors
    /// [`StartError`]; the other is as it was.
    pub fn supersede(binary: &Path, dir: &Path) -> Result<Option<usize>, StartError> {
        let place = RunDirectory::open(dir, KIND)?;
        let turn = place.turn()?;
        let Some((mut old, _)) = meet_any(&place)? else { return Ok(None) };
        let held = old.get_bundled().map_err(|source| mute(&place, source))?;
        if let Err(error) = resident::run_in_place(binary, dir, turn) {
            // Had it been asked to end, it would not answer twice.
            if old.ping().and_then(|_| old.ping()).is_ok() {
                return Err(error.into());
            }
            old.see_out();
            say!("the keeper of pid {} has ended, and its successor too: {error}", old.pid);
        }
        // The other has ended. Whatever goes wrong now, we do not let go.
        let fill = || -> Result<(), StartError> {
            let new = Keeper::connect_or_spawn(binary, dir)?;
            for part in &held {
                let fds = part.bundle.unpack();
                let put = fds.map_err(|source| KeeperError::Answer { source });
                let put = put.and_then(|fds| new.put_many(part.names.iter().zip(fds.iter().map(AsFd::as_fd))));
                put.map_err(|source| mute(&place, source))?;
            }
            Ok(())
        };
        while let Err(error) = fill() {
            say!("no keeper takes what the last one held; it is tried again: {error}");
            std::thread::sleep(FILL_RETRY);
        }
        Ok(Some(held.iter().map(|part| part.names.len()).sum()))
    }

    /// Whether the keeper ran already when this was made.
    pub fn found(&self) -> Presence {
        self.found
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.lock().pid
    }

    /// A pidfd of the keeper: becomes readable the moment it dies. After [`Keeper::respawn`] ask
    /// again.
    ///
    /// # Errors
    /// EMFILE.
    pub fn watch_fd(&self) -> io::Result<OwnedFd> {
        self.lock().pidfd.try_clone()
    }

    /// Connects anew after [`KeeperError::Gone`], and starts another keeper when there is none.
    /// With [`Presence::Started`] it is empty and everything has to be put again.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn respawn(&self) -> Result<Presence, StartError> {
        let mut connection = self.lock();
        // Close the old one first: a keeper takes a limited number of clients.
        connection.socket = None;
        let (new, found) = establish(&self.binary, &self.dir)?;
        let replaced = new.pid != connection.pid;
        *connection = new;
        // Another thread's or process's call may have started it: what counts is whether it is the
        // one we filled.
        Ok(if replaced { Presence::Started } else { found })
    }

    /// How it is.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn ping(&self) -> Result<KeeperStatus, KeeperError> {
        self.lock().ping()
    }

    /// Holds the descriptors under the name, in place of what was there.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn put(&self, name: &str, fds: &[BorrowedFd<'_>]) -> Result<(), KeeperError> {
        if fds.is_empty() {
            return Err(KeeperError::Nothing { name: name.to_owned() });
        }
        self.put_many(fds.iter().map(|fd| (name, *fd)))
    }

    /// Holds all of these, each name in place of what was there, all at once or none; equal names
    /// hold several.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn put_many<'a>(
        &self,
        entries: impl IntoIterator<Item = (impl AsRef<str>, BorrowedFd<'a>)>,
    ) -> Result<(), KeeperError> {
        self.put_clearing(None, entries)
    }

    /// Holds exactly these under the prefix: what else has it is dropped in the same step.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn replace_prefix<'a>(
        &self,
        prefix: &str,
        entries: impl IntoIterator<Item = (impl AsRef<str>, BorrowedFd<'a>)>,
    ) -> Result<(), KeeperError> {
        self.put_clearing(Some(Select::Prefix(prefix.to_owned())), entries)
    }

    fn put_clearing<'a>(
        &self,
        clear: Option<Select>,
        entries: impl IntoIterator<Item = (impl AsRef<str>, BorrowedFd<'a>)>,
    ) -> Result<(), KeeperError> {
        let mut names = Vec::new();
        let mut fds = Vec::new();
        for (name, fd) in entries {
            check_name(name.as_ref())?;
            names.push(name.as_ref().to_owned());
            fds.push(fd);
        }
        let mut connection = self.lock();
        let parts = names.len().div_ceil(MAX_PART).max(1);
        for part in 0..parts {
            let range = part * MAX_PART..((part + 1) * MAX_PART).min(names.len());
            let more = part + 1 < parts;
            let names = names[range.clone()].to_vec();
            let request = KeeperRequest::Put { names, more, clear: clear.clone().filter(|_| !more) };
            connection.done(&request, &fds[range])?;
        }
        Ok(())
    }

    /// Duplicates of what is held under the name, close-on-exec; they stay held.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn get(&self, name: &str) -> Result<Vec<OwnedFd>, KeeperError> {
        let entries = self.lock().get(Select::Name(name.to_owned()))?;
        if entries.is_empty() {
            return Err(KeeperError::Unknown { name: name.to_owned() });
        }
        Ok(entries.into_iter().map(|(_, fd)| fd).collect())
    }

    /// Duplicates of all whose names start with the prefix, as of one moment, in the order of
    /// names; none is no error.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn get_prefix(&self, prefix: &str) -> Result<Vec<(String, OwnedFd)>, KeeperError> {
        self.lock().get(Select::Prefix(prefix.to_owned()))
    }

    /// Names that start with the prefix, in order, with how many descriptors each holds.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn list(&self, prefix: &str) -> Result<Vec<(String, usize)>, KeeperError> {
        let mut connection = self.lock();
        let mut all: Vec<(String, usize)> = Vec::new();
        loop {
            let after = all.last().map(|(name, _)| name.clone());
            match connection.call(&KeeperRequest::List { prefix: prefix.to_owned(), after }, &[])? {
                (KeeperAnswer::Names { names, more }, _) => {
                    let progress = !names.is_empty();
                    all.extend(names);
                    if !(more && progress) {
                        return Ok(all);
                    }
                }
                (other, _) => return Err(connection.unexpected(other)),
            }
        }
    }

    /// Lets go of the name. Returns whether it was held; the last duplicate anywhere closes the
    /// thing itself.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn drop_name(&self, name: &str) -> Result<bool, KeeperError> {
        let request = KeeperRequest::Drop { select: Select::Name(name.to_owned()) };
        Ok(self.lock().done(&request, &[])? > 0)
    }

    /// Lets go of all names that start with the prefix, at once. Returns how many that were.
    ///
    /// # Errors
    /// [`KeeperError`].
    pub fn drop_prefix(&self, prefix: &str) -> Result<usize, KeeperError> {
        self.lock().done(&KeeperRequest::Drop { select: Select::Prefix(prefix.to_owned()) }, &[])
    }

    /// Replaces the prefix `from` of all names that have it by `to`, at once. Returns how many that
    /// were.
    ///
    /// # Errors
    /// [`KeeperError::Taken`] when one of the new names is in use.
    pub fn rename_prefix(&self, from: &str, to: &str) -> Result<usize, KeeperError> {
        self.lock().done(&KeeperRequest::Rename { from: from.to_owned(), to: to.to_owned() }, &[])
    }

    /// Puts this program's keeper in its place, as for another build of the same protocol; a thread
    /// that asks something meanwhile waits. The new one has what the old one held; what others than
    /// we changed at the last moment has to be put again.
    ///
    /// # Errors
    /// [`StartError`]; it is as it was, or gone.
    pub fn renew(&self) -> Result<(), StartError> {
        let mut connection = self.lock();
        let turn = RunDirectory::open(&self.dir, KIND)?.turn()?;
        resident::run_in_place(&self.binary, &self.dir, turn)?;
        (*connection, _) = establish(&self.binary, &self.dir)?;
        Ok(())
    }

    /// Makes it let go of everything and end, and waits until it has.
    ///
    /// # Errors
    /// [`KeeperError`]; `Stuck` when it has not ended after 10 s.
    pub fn quit(&self) -> Result<(), KeeperError> {
        self.lock().end()
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A thread that panicked in the middle of a call leaves a connection that is at worst out
        // of step, which the next call notices by the kind of the answer.
        self.connection.lock()
    }
}

impl Connection {
    fn call(
        &mut self,
        request: &KeeperRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(KeeperAnswer, Vec<OwnedFd>), KeeperError> {
        let Some(socket) = &self.socket else {
            return Err(KeeperError::Gone { source: io::ErrorKind::NotConnected.into() });
        };
        let bytes = serde_json::to_vec(request).expect("requests are plain data");
        let answered = fdpass::send(socket.as_fd(), &bytes, fds)
            .and_then(|()| fdpass::recv(socket.as_fd(), MAX_MESSAGE))
            .and_then(|(bytes, fds)| Ok((serde_json::from_slice::<KeeperAnswer>(&bytes)?, fds)));
        match answered {
            Ok((KeeperAnswer::Refused { code, message }, _)) => Err(match code {
                KeeperRefusal::Full => KeeperError::Full(message),
                KeeperRefusal::Taken => KeeperError::Taken(message),
                KeeperRefusal::Malformed => KeeperError::Refused(message),
            }),
            Ok(answer) => Ok(answer),
            Err(source) => {
                self.socket = None;
                Err(match source.kind() {
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => KeeperError::Gone { source },
                    io::ErrorKind::UnexpectedEof if source.get_ref().is_none() => KeeperError::Gone { source },
                    io::ErrorKind::WouldBlock => KeeperError::Stuck,
                    _ => KeeperError::Answer { source },
                })
            }
        }
    }

    fn done(&mut self, request: &KeeperRequest, fds: &[BorrowedFd<'_>]) -> Result<usize, KeeperError> {
        match self.call(request, fds)? {
            (KeeperAnswer::Done { count }, _) => Ok(count),
            (other, _) => Err(self.unexpected(other)),
        }
    }

    fn end(&mut self) -> Result<(), KeeperError> {
        self.done(&KeeperRequest::Quit, &[])?;
        self.socket = None;
        match wait_for_end(self.pidfd.as_fd(), Some(ANSWER_TIMEOUT)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(KeeperError::Stuck),
            Err(source) => Err(KeeperError::Answer { source }),
        }
    }

    /// Waits until it has ended, and kills it if that takes long.
    fn see_out(&mut self) {
        self.socket = None;
        if !matches!(wait_for_end(self.pidfd.as_fd(), Some(ANSWER_TIMEOUT)), Ok(true)) {
            say!("the keeper of pid {} does not end and is killed", self.pid);
            // Fails only if it has ended meanwhile.
            let _ = pidfd_send_signal(self.pidfd.as_fd(), Signal::KILL);
            let _ = wait_for_end(self.pidfd.as_fd(), None);
        }
    }

    fn ping(&mut self) -> Result<KeeperStatus, KeeperError> {
        match self.call(&KeeperRequest::Ping, &[])? {
            (KeeperAnswer::Status(status), _) => Ok(status),
            (other, _) => Err(self.unexpected(other)),
        }
    }

    fn get(&mut self, select: Select) -> Result<Vec<(String, OwnedFd)>, KeeperError> {
        let mut all = Vec::new();
        self.get_parts(select, |part, _| {
            all.append(part);
            Ok(())
        })?;
        Ok(all)
    }

    /// All that it holds, and no more of it open at a time than one message has: a keeper holds
    /// more than a process may have open files.
    fn get_bundled(&mut self) -> Result<Vec<BundlePart>, KeeperError> {
        let mut parts = Vec::new();
        self.get_parts(Select::Prefix(String::new()), |part, more| {
            // What one name holds is put at once: the last name's may go on in the next message.
            let last = part.last().map(|(name, _)| name.clone()).filter(|_| more);
            let whole = part.iter().position(|(name, _)| Some(name) == last.as_ref()).unwrap_or(part.len());
            let (names, fds): (Vec<String>, Vec<OwnedFd>) = part.drain(..whole).unzip();
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            parts.push(BundlePart { names, bundle: Bundle::pack(&fds)? });
            Ok(())
        })?;
        Ok(parts)
    }

    /// Calls `each` with what has come, and whether there is more. What it leaves comes again,
    /// before the next.
    fn get_parts(
        &mut self,
        select: Select,
        mut each: impl FnMut(&mut Vec<(String, OwnedFd)>, bool) -> io::Result<()>,
    ) -> Result<(), KeeperError> {
        let mut come = Vec::new();
        let mut request = KeeperRequest::Get { select };
        loop {
            match self.call(&request, &[])? {
                (KeeperAnswer::Fds { names, more }, fds) if names.len() == fds.len() => {
                    come.extend(names.into_iter().zip(fds));
                    if let Err(source) = each(&mut come, more) {
                        // The rest is not asked for.
                        self.socket = None;
                        return Err(KeeperError::Answer { source });
                    }
                    if !more {
                        return Ok(());
                    }
                    request = KeeperRequest::Next;
                }
                (other, _) => return Err(self.unexpected(other)),
            }
        }
    }

    fn unexpected(&mut self, answer: KeeperAnswer) -> KeeperError {
        self.socket = None;
        let source = io::Error::new(io::ErrorKind::InvalidData, format!("an answer of the wrong kind: {answer:?}"));
        KeeperError::Answer { source }
    }
}

/// Whether a connect failed because no keeper listens.
fn nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn establish(binary: &Path, dir: &Path) -> Result<(Connection, Presence), StartError> {
    let place = RunDirectory::open(dir, KIND)?;
    drop(place.turn()?);
    let deadline = Instant::now() + START_TIMEOUT;
    let mut found = Presence::Running;
    loop {
        let error = match place.connect(ANSWER_TIMEOUT) {
            Ok(socket) => match greet(&place, socket) {
                Ok(connection) => return Ok((connection, found)),
                // It died between our connecting and its answer.
                Err(e @ StartError::Ping { source: KeeperError::Gone { .. }, .. }) => e,
                Err(e) => return Err(e),
            },
            Err(source) if nobody(&source) => StartError::Connect { path: place.socket_path(), source },
            Err(source) => return Err(StartError::Connect { path: place.socket_path(), source }),
        };
        if Instant::now() > deadline {
            return Err(error);
        }
        if found == Presence::Started {
            std::thread::sleep(START_RETRY);
        }
        resident::run(binary, dir)?;
        found = Presence::Started;
    }
}

/// Makes a connection of a socket to a keeper that speaks our protocol.
fn greet(place: &RunDirectory, socket: OwnedFd) -> Result<Connection, StartError> {
    match meet(place, socket)? {
        (connection, status) if status.protocol == PROTOCOL => Ok(connection),
        (Connection { pid, .. }, status) => Err(StartError::Protocol { pid, theirs: status.protocol }),
    }
}

/// The keeper that serves there, of whatever protocol.
fn meet_any(place: &RunDirectory) -> Result<Option<(Connection, KeeperStatus)>, StartError> {
    match place.connect(ANSWER_TIMEOUT) {
        Ok(socket) => meet(place, socket).map(Some),
        Err(e) if nobody(&e) => Ok(None),
        Err(source) => Err(StartError::Connect { path: place.socket_path(), source }),
    }
}

/// The successor's part: takes all that the keeper there holds, and ends it then. One that does not
/// end by itself is killed: what it had is here by then. It needs of the other only what no
/// protocol may change: see [`crate::protocol`].
///
/// # Errors
/// [`StartError`]; the other is as it was.
pub fn take_over(place: &RunDirectory) -> Result<Vec<BundlePart>, StartError> {
    let Some((mut old, _)) = meet_any(place)? else { return Ok(Vec::new()) };
    let held = old.get_bundled().map_err(|source| mute(place, source))?;
    // Whatever it answers.
    let _ = old.done(&KeeperRequest::Quit, &[]);
    old.see_out();
    Ok(held)
}

fn mute(place: &RunDirectory, source: KeeperError) -> StartError {
    StartError::Ping { path: place.socket_path(), source }
}

/// Finds out which process is at the other end and that it answers.
fn meet(place: &RunDirectory, socket: OwnedFd) -> Result<(Connection, KeeperStatus), StartError> {
    let path = place.socket_path();
    let failed = |source: io::Error| StartError::Connect { path: path.clone(), source };
    let peer = rustix::net::sockopt::socket_peercred(&socket).map_err(|e| failed(e.into()))?;
    let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
    // The pidfd is of the right process: had it died before, and its id gone to another, the ping
    // would fail.
    let gone = |source| StartError::Ping { path: path.clone(), source: KeeperError::Gone { source } };
    let pidfd = pidfd_open(pid).map_err(gone)?;
    let mut connection = Connection { socket: Some(socket), pidfd, pid };
    let status = connection.ping().map_err(|source| StartError::Ping { path: path.clone(), source })?;
    Ok((connection, status))
}
