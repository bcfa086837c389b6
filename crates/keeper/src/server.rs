//! The keeper's process: one thread, one poll loop, one message at a time.
//!
//! Invariants: a request takes effect wholly or not at all; nothing a client sends ends the process
//! but a quit; a client that does not read its answers is cut off rather than waited for; closing a
//! descriptor never blocks the loop. A crash leaves nothing but what `place` describes: everything
//! held is closed by the kernel.

use crate::bundle::{Bundle, BundlePart};
use crate::protocol::{
    KeeperAnswer, KeeperRefusal, KeeperRequest, KeeperStatus, MAX_MESSAGE, MAX_PART, PROTOCOL, Select, check_name,
};
use crate::store::{HandleEntry, HandleStore, RenameError};
use kip_sys::fdpass;
use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketFlags;
use rustix::process::Resource;
use std::collections::{BTreeMap, BTreeSet, VecDeque, btree_map};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
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
/// Descriptors that a get and a change open of bundles meanwhile are left free as well, but for no
/// more than an eighth of all.
const MEANWHILE: usize = 3 * MAX_PART;

const CLOSER_STACK_BYTES: usize = 64 * 1024;
const CLOSE_PATIENCE: Duration = Duration::from_millis(5);

/// Descriptors whose names have the same first two parts, `web/io/out` and `web/io/err` for
/// example, are held in one [`Bundle`]: there are thousands of names, and a process may have only
/// so many open files. The others are each one of their own.
fn group(name: &str) -> Select {
    match name.match_indices('/').nth(1) {
        Some((at, _)) => Select::Prefix(name[..=at].to_owned()),
        None => Select::Name(name.to_owned()),
    }
}

/// Fewer than that are not bundled: a bundle takes some 3 KB of the kernel's memory.
const WORTH_A_BUNDLE: usize = 4;

/// A descriptor that is held.
#[derive(Debug)]
enum Held {
    Open(Open),
    /// The one of that number.
    Bundled(Rc<Kept>, usize),
}

/// A bundle. When the last name of it goes its descriptors are opened and closed one by one, so
/// that none blocks.
#[derive(Debug)]
struct Kept(Option<Bundle>);

impl Kept {
    fn bundle(&self) -> &Bundle {
        self.0.as_ref().expect("taken by drop only")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let bundle = self.0.take();
        // Where there is no room for them the kernel closes them with the bundle.
        let fds = bundle.as_ref().and_then(|bundle| bundle.unpack().ok()).unwrap_or_default();
        drop(bundle);
        fds.into_iter().for_each(|fd| drop(Open(Some(fd))));
    }
}

impl Held {
    fn new(fd: OwnedFd) -> Held {
        Held::Open(Open(Some(fd)))
    }
}

/// One that is open. Closing the last duplicate of a socket with SO_LINGER (socket(7))
/// waits for the peer, for as long as the program that set it liked; that happens on a thread of
/// its own.
#[derive(Debug)]
struct Open(Option<OwnedFd>);

impl Open {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("taken by drop only").as_fd()
    }
}

impl Drop for Open {
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
    outgoing: VecDeque<HandleEntry<Held>>,
}

/// What to do with a client after its message.
#[derive(PartialEq, Eq)]
enum After {
    Keep,
    Cut,
    Quit,
}

/// What the process could do for itself; goes into [`KeeperStatus`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Protection {
    /// mlockall worked.
    pub memory_locked: bool,
    /// oom_score_adj could be lowered.
    pub oom_protected: bool,
}

/// The keeper's state.
pub struct KeeperServer {
    listener: OwnedFd,
    clients: Vec<Client>,
    store: HandleStore<Held>,
    /// How many descriptors those of each group take.
    groups: BTreeMap<Select, usize>,
    /// And all of them.
    taken: usize,
    limit: usize,
    protection: Protection,
    buffer: Vec<u8>,
}

impl KeeperServer {
    /// Serves on a listening nonblocking SEQPACKET socket, up to the current RLIMIT_NOFILE.
    pub fn new(listener: OwnedFd, protection: Protection) -> KeeperServer {
        let nofile = rustix::process::getrlimit(Resource::Nofile).current;
        let nofile = nofile.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
        let limit = nofile.saturating_sub(RESERVED + MEANWHILE.min(nofile / 8));
        KeeperServer {
            listener,
            clients: Vec::new(),
            store: HandleStore::default(),
            groups: BTreeMap::new(),
            taken: 0,
            limit,
            protection,
            buffer: vec![0; MAX_MESSAGE],
        }
    }

    /// Has these from the beginning. It cannot fail: whatever they come from is gone.
    #[must_use]
    pub fn with_entries(mut self, parts: Vec<BundlePart>) -> KeeperServer {
        for part in parts {
            let kept = Rc::new(Kept(Some(part.bundle)));
            let bundled = |(at, name)| (name, Held::Bundled(Rc::clone(&kept), at));
            let entries = part.names.into_iter().enumerate().map(bundled).collect();
            self.change(|store| store.put(None, entries));
        }
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
                let fds = fds.into_iter().map(Held::new).collect();
                match serde_json::from_slice(&self.buffer[..length]) {
                    Ok(KeeperRequest::Get { select }) => return self.get(index, Some(&select)),
                    Ok(KeeperRequest::Next) => return self.get(index, None),
                    Ok(KeeperRequest::Quit) => (KeeperAnswer::Done { count: self.store.names() }, After::Quit),
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
        if matches!(answer, KeeperAnswer::Refused { .. }) {
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

    fn answer(&mut self, index: usize, request: KeeperRequest, fds: Vec<Held>) -> KeeperAnswer {
        if let KeeperRequest::Put { names, more, clear } = request {
            return self.put(index, names, fds, more, clear.as_ref());
        }
        if !fds.is_empty() {
            return malformed("only a put brings descriptors".to_owned());
        }
        match request {
            KeeperRequest::List { prefix, after } => {
                let (names, more) = self.store.list(&prefix, after.as_deref(), MAX_PART);
                KeeperAnswer::Names { names, more }
            }
            KeeperRequest::Drop { select } => KeeperAnswer::Done { count: self.change(|store| store.remove(&select)) },
            KeeperRequest::Rename { from, to } => match self.change(|store| store.rename(&from, &to)) {
                Ok(count) => KeeperAnswer::Done { count },
                Err(e @ RenameError::Taken(_)) => {
                    KeeperAnswer::Refused { code: KeeperRefusal::Taken, message: e.to_string() }
                }
                Err(e @ RenameError::BadName(_)) => malformed(e.to_string()),
            },
            KeeperRequest::Ping => KeeperAnswer::Status(self.status()),
            KeeperRequest::Put { .. } | KeeperRequest::Get { .. } | KeeperRequest::Next | KeeperRequest::Quit => {
                unreachable!("served by the caller")
            }
        }
    }

    fn put(
        &mut self,
        index: usize,
        names: Vec<String>,
        fds: Vec<Held>,
        more: bool,
        clear: Option<&Select>,
    ) -> KeeperAnswer {
        if names.len() != fds.len() {
            return malformed(format!("{} names came with {} descriptors", names.len(), fds.len()));
        }
        if let Err(e) = names.iter().try_for_each(|n| check_name(n)) {
            return malformed(e.to_string());
        }
        let staged: usize = self.clients.iter().map(|c| c.staged.len()).sum();
        if self.taken + staged + fds.len() > self.limit {
            return self.full();
        }
        let client = &mut self.clients[index];
        client.staged.extend(names.into_iter().zip(fds));
        if more {
            return KeeperAnswer::Done { count: 0 };
        }
        let entries = std::mem::take(&mut client.staged);
        KeeperAnswer::Done { count: self.change(|store| store.put(clear, entries)) }
    }

    /// Changes what is held, and bundles it anew where that has changed.
    fn change<T>(&mut self, change: impl FnOnce(&mut HandleStore<Held>) -> T) -> T {
        let result = change(&mut self.store);
        let changed: BTreeSet<Select> = self.store.take_changed().iter().map(|name| group(name)).collect();
        for group in changed {
            let before = self.groups.remove(&group).unwrap_or(0);
            let now = bundle(&mut self.store, &group);
            self.taken = self.taken + now - before;
            if now > 0 {
                self.groups.insert(group, now);
            }
        }
        result
    }

    /// Sends a first part (of `select`) or the next one.
    fn get(&mut self, index: usize, select: Option<&Select>) -> After {
        let client = &mut self.clients[index];
        if let Some(select) = select {
            client.outgoing = self.store.snapshot(select).into();
        }
        let part: Vec<HandleEntry<Held>> = client.outgoing.drain(..client.outgoing.len().min(MAX_PART)).collect();
        let names = part.iter().map(|(name, _)| name.to_string()).collect();
        let answer = KeeperAnswer::Fds { names, more: !client.outgoing.is_empty() };
        let sent = match Opened::of(&part) {
            Ok(opened) => send(client, &answer, &opened.fds()),
            Err(error) => {
                say!("what is held cannot be opened for a client: {error}");
                client.outgoing.clear();
                let full = self.full();
                send(&self.clients[index], &full, &[])
            }
        };
        match sent {
            Ok(()) => After::Keep,
            Err(e) => {
                say!("a client does not take its descriptors and was cut off: {e}");
                After::Cut
            }
        }
    }

    fn full(&self) -> KeeperAnswer {
        let message =
            format!("keeper holds {} descriptors, limit {} (by its RLIMIT_NOFILE)", self.store.handles(), self.limit);
        KeeperAnswer::Refused { code: KeeperRefusal::Full, message }
    }

    fn status(&self) -> KeeperStatus {
        KeeperStatus {
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

/// Held ones, as open as a call needs them.
struct Opened<'a> {
    entries: &'a [HandleEntry<Held>],
    /// Of bundles: what each message has, by the address of the bundle and the message's number.
    messages: BTreeMap<(*const Kept, usize), Vec<OwnedFd>>,
}

impl<'a> Opened<'a> {
    fn of(entries: &'a [HandleEntry<Held>]) -> io::Result<Opened<'a>> {
        let mut messages = BTreeMap::new();
        for (_, held) in entries {
            if let Held::Bundled(kept, at) = &**held
                && let btree_map::Entry::Vacant(free) = messages.entry((Rc::as_ptr(kept), at / MAX_PART))
            {
                free.insert(kept.bundle().message(at / MAX_PART)?);
            }
        }
        Ok(Opened { entries, messages })
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.entries
            .iter()
            .map(|(_, held)| match &**held {
                Held::Open(open) => open.as_fd(),
                Held::Bundled(kept, at) => self.messages[&(Rc::as_ptr(kept), at / MAX_PART)][at % MAX_PART].as_fd(),
            })
            .collect()
    }
}

/// Bundles what a group has, if that is worth it. Returns how many descriptors it takes then.
fn bundle(store: &mut HandleStore<Held>, group: &Select) -> usize {
    let entries = store.snapshot(group);
    if let Some((_, first)) = entries.first()
        && let Held::Bundled(kept, 0) = &**first
    {
        let same =
            |(_, held): &HandleEntry<Held>| matches!(&**held, Held::Bundled(other, _) if Rc::ptr_eq(kept, other));
        if kept.bundle().count() == entries.len() && entries.iter().all(same) {
            return kept.bundle().takes();
        }
    }
    let bundled = entries.len() >= WORTH_A_BUNDLE;
    if !bundled && entries.iter().all(|(_, held)| matches!(**held, Held::Open(_))) {
        return entries.len();
    }
    let made = Opened::of(&entries).and_then(|opened| {
        let names = entries.iter().map(|(name, _)| name.to_string());
        if bundled {
            let kept = Rc::new(Kept(Some(Bundle::pack(&opened.fds())?)));
            return Ok(names.enumerate().map(|(at, name)| (name, Held::Bundled(Rc::clone(&kept), at))).collect());
        }
        let open = opened.fds().into_iter().map(|fd| fd.try_clone_to_owned().map(Held::new));
        names.zip(open).map(|(name, held)| Ok((name, held?))).collect::<io::Result<Vec<_>>>()
    });
    match made {
        Ok(made) => {
            store.put(None, made);
            store.take_changed();
            if bundled { entries.len().div_ceil(MAX_PART) } else { entries.len() }
        }
        Err(error) => {
            say!("{group:?} is not bundled: {error}");
            entries.len()
        }
    }
}

fn malformed(message: String) -> KeeperAnswer {
    KeeperAnswer::Refused { code: KeeperRefusal::Malformed, message }
}

fn send(client: &Client, answer: &KeeperAnswer, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(answer).expect("answers are plain data");
    fdpass::send(client.socket.as_fd(), &bytes, fds)
}
