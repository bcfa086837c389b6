//! The keeper's process: one thread, one poll loop, one message at a time.
//!
//! Invariants: a request takes effect wholly or not at all; nothing a client sends ends the process
//! but a quit; a client that does not read its answers is cut off rather than waited for; closing a
//! descriptor never blocks the loop. A crash leaves nothing but what `place` describes: everything
//! held is closed by the kernel.

use crate::protocol::{Answer, MAX_MESSAGE, MAX_PART, PROTOCOL, Refusal, Request, Select, Status, check_name};
use crate::store::{Entry, RenameError, Store};
use kip_sys::fdpass;
use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketFlags;
use rustix::process::Resource;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Writes a line to standard error, the keeper's log. Unlike `eprintln!` it does not panic on a
/// full disk: everything held would be lost for a log line.
#[macro_export]
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($argument)*);
    }};
}

/// Most clients at a time; one more is cut off at once.
pub const MAX_CLIENTS: usize = 32;

/// Descriptors that are not for holding: clients, the listener, the lock, standard streams, one
/// being accepted.
const RESERVED: usize = MAX_CLIENTS + 16;

const CLOSER_STACK_BYTES: usize = 64 * 1024;
const CLOSE_PATIENCE: Duration = Duration::from_millis(5);

/// A descriptor that is held. Closing the last duplicate of a socket with SO_LINGER (socket(7))
/// waits for the peer, for as long as the program that set it liked; that happens on a thread of
/// its own.
#[derive(Debug)]
struct Held(Option<OwnedFd>);

impl Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("taken by drop only").as_fd()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(fd) = self.0.take() else { return };
        if matches!(rustix::net::sockopt::socket_linger(&fd), Ok(Some(time)) if !time.is_zero()) {
            let (done, closed) = std::sync::mpsc::sync_channel(1);
            let close = move || {
                drop(fd);
                let _ = done.send(());
            };
            // When no thread can be had the closure is dropped here, and closes here. Where others
            // have the socket too, as after a wake, the close takes microseconds and has happened
            // before the client hears that it has.
            let _ = std::thread::Builder::new().stack_size(CLOSER_STACK_BYTES).spawn(close);
            let _ = closed.recv_timeout(CLOSE_PATIENCE);
        }
    }
}

/// One connection.
struct Client {
    socket: OwnedFd,
    /// Parts of a put that is not complete.
    staged: Vec<(String, Held)>,
    /// What is left of a get.
    outgoing: VecDeque<Entry<Held>>,
}

/// What to do with a client after its message.
#[derive(PartialEq, Eq)]
enum After {
    Keep,
    Cut,
    Quit,
}

/// What the process could do for itself; goes into [`Status`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Protection {
    /// mlockall worked.
    pub memory_locked: bool,
    /// oom_score_adj could be lowered.
    pub oom_protected: bool,
}

/// The keeper's state.
pub struct Server {
    listener: OwnedFd,
    clients: Vec<Client>,
    store: Store<Held>,
    limit: usize,
    protection: Protection,
    buffer: Vec<u8>,
}

impl Server {
    /// Serves on a listening nonblocking SEQPACKET socket, up to the current RLIMIT_NOFILE.
    pub fn new(listener: OwnedFd, protection: Protection) -> Server {
        let nofile = rustix::process::getrlimit(Resource::Nofile).current;
        let limit = nofile.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX)).saturating_sub(RESERVED);
        Server {
            listener,
            clients: Vec::new(),
            store: Store::default(),
            limit,
            protection,
            buffer: vec![0; MAX_MESSAGE],
        }
    }

    /// Has these from the beginning.
    #[must_use]
    pub fn with_entries(mut self, entries: Vec<(String, OwnedFd)>) -> Server {
        self.store.put(None, entries.into_iter().map(|(name, fd)| (name, Held(Some(fd)))).collect());
        self
    }

    /// Serves until a client asks to quit, then returns with nothing held any more.
    ///
    /// # Errors
    /// When poll(2) fails, which it does not but for want of memory.
    pub fn run(mut self) -> io::Result<()> {
        loop {
            let (accept, ready) = self.wait()?;
            let mut quit = false;
            // From the back, so that a removal does not move those still to come.
            for index in ready.into_iter().rev() {
                match self.serve(index) {
                    After::Keep => {}
                    After::Cut => drop(self.clients.swap_remove(index)),
                    After::Quit => quit = true,
                }
            }
            if quit {
                return Ok(());
            }
            if accept {
                self.accept();
            }
        }
    }

    /// Waits until something can be read: whether there is a connection to accept, and the indices
    /// of clients.
    fn wait(&self) -> io::Result<(bool, Vec<usize>)> {
        let mut fds = Vec::with_capacity(1 + self.clients.len());
        fds.push(PollFd::new(&self.listener, PollFlags::IN));
        fds.extend(self.clients.iter().map(|c| PollFd::new(&c.socket, PollFlags::IN)));
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, None))?;
        let ready = (0..self.clients.len()).filter(|i| !fds[i + 1].revents().is_empty()).collect();
        Ok((!fds[0].revents().is_empty(), ready))
    }

    fn accept(&mut self) {
        match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) if self.clients.len() < MAX_CLIENTS => {
                self.clients.push(Client { socket, staged: Vec::new(), outgoing: VecDeque::new() });
            }
            Ok(socket) => {
                say!("more than {MAX_CLIENTS} clients, one was cut off");
                drop(socket);
            }
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
            Err(e) => {
                // Out of descriptors or memory for the moment: the listener stays readable, so do
                // not spin.
                say!("cannot accept a client: {e}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Reads one message of a client and answers it.
    fn serve(&mut self, index: usize) -> After {
        let received = fdpass::recv_into(self.clients[index].socket.as_fd(), &mut self.buffer);
        let (answer, after) = match received {
            Ok((length, fds)) => {
                let fds = fds.into_iter().map(|fd| Held(Some(fd))).collect();
                match serde_json::from_slice(&self.buffer[..length]) {
                    Ok(Request::Get { select }) => return self.get(index, Some(&select)),
                    Ok(Request::Next) => return self.get(index, None),
                    Ok(Request::Quit) => (Answer::Done { count: self.store.names() }, After::Quit),
                    Ok(request) => (self.answer(index, request, fds), After::Keep),
                    Err(e) => (malformed(format!("a message could not be understood: {e}")), After::Keep),
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return After::Keep,
            Err(e) if e.kind() == io::ErrorKind::InvalidData && fdpass::lost_descriptors(&e) => {
                (self.full(), After::Keep)
            }
            Err(e) if e.kind() == io::ErrorKind::InvalidData => (malformed(e.to_string()), After::Keep),
            Err(_) => return After::Cut,
        };
        let client = &mut self.clients[index];
        if matches!(answer, Answer::Refused { .. }) {
            client.staged.clear();
        }
        match (send(client, &answer, &[]), after) {
            (_, After::Quit) => After::Quit,
            (Ok(()), after) => after,
            (Err(e), _) => {
                say!("a client does not take its answer and was cut off: {e}");
                After::Cut
            }
        }
    }

    fn answer(&mut self, index: usize, request: Request, fds: Vec<Held>) -> Answer {
        if let Request::Put { names, more, clear } = request {
            return self.put(index, names, fds, more, clear.as_ref());
        }
        if !fds.is_empty() {
            return malformed("only a put brings descriptors".to_owned());
        }
        match request {
            Request::List { prefix, after } => {
                let (names, more) = self.store.list(&prefix, after.as_deref(), MAX_PART);
                Answer::Names { names, more }
            }
            Request::Drop { select } => Answer::Done { count: self.store.remove(&select) },
            Request::Rename { from, to } => match self.store.rename(&from, &to) {
                Ok(count) => Answer::Done { count },
                Err(e @ RenameError::Taken(_)) => Answer::Refused { code: Refusal::Taken, message: e.to_string() },
                Err(e @ RenameError::BadName(_)) => malformed(e.to_string()),
            },
            Request::Ping => Answer::Status(self.status()),
            Request::Put { .. } | Request::Get { .. } | Request::Next | Request::Quit => {
                unreachable!("served by the caller")
            }
        }
    }

    fn put(&mut self, index: usize, names: Vec<String>, fds: Vec<Held>, more: bool, clear: Option<&Select>) -> Answer {
        if names.len() != fds.len() {
            return malformed(format!("{} names came with {} descriptors", names.len(), fds.len()));
        }
        if let Err(e) = names.iter().try_for_each(|n| check_name(n)) {
            return malformed(e.to_string());
        }
        let staged: usize = self.clients.iter().map(|c| c.staged.len()).sum();
        if self.store.handles() + staged + fds.len() > self.limit {
            return self.full();
        }
        let client = &mut self.clients[index];
        client.staged.extend(names.into_iter().zip(fds));
        if more {
            return Answer::Done { count: 0 };
        }
        let entries = std::mem::take(&mut client.staged);
        Answer::Done { count: self.store.put(clear, entries) }
    }

    /// Sends a first part (of `select`) or the next one.
    fn get(&mut self, index: usize, select: Option<&Select>) -> After {
        let client = &mut self.clients[index];
        if let Some(select) = select {
            client.outgoing = self.store.snapshot(select).into();
        }
        let part: Vec<Entry<Held>> = client.outgoing.drain(..client.outgoing.len().min(MAX_PART)).collect();
        let names = part.iter().map(|(name, _)| name.to_string()).collect();
        let fds: Vec<BorrowedFd<'_>> = part.iter().map(|(_, held)| held.as_fd()).collect();
        let answer = Answer::Fds { names, more: !client.outgoing.is_empty() };
        match send(client, &answer, &fds) {
            Ok(()) => After::Keep,
            Err(e) => {
                say!("a client does not take its descriptors and was cut off: {e}");
                After::Cut
            }
        }
    }

    fn full(&self) -> Answer {
        let message = format!(
            "keeper holds {} descriptors, limit {} (its RLIMIT_NOFILE less {RESERVED})",
            self.store.handles(),
            self.limit
        );
        Answer::Refused { code: Refusal::Full, message }
    }

    fn status(&self) -> Status {
        Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL,
            names: self.store.names(),
            descriptors: self.store.handles(),
            limit: self.limit,
            memory_locked: self.protection.memory_locked,
            oom_protected: self.protection.oom_protected,
        }
    }
}

fn malformed(message: String) -> Answer {
    Answer::Refused { code: Refusal::Malformed, message }
}

fn send(client: &Client, answer: &Answer, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(answer).expect("answers are plain data");
    fdpass::send(client.socket.as_fd(), &bytes, fds)
}
