//! Frames over a connection, so that a daemon that is killed loses none.
//!
//! A frame of a client is looked at where it waits, in the socket, and taken out of it when it is
//! answered: the next daemon finds it there. A client that writes a frame in many small pieces may
//! have no room for all of them; what has come of such a frame is taken out, which is noted first,
//! for the next daemon cannot go on with the rest. An answer is sent when all of it has room, by
//! one system call, so that it is there whole or not at all. Source: unix(7), recv(2).
//!
//! A descriptor that a client has sent may take as long to close as the client likes: SO_LINGER of
//! socket(7), a file system that does not answer. So what has descriptors with it is taken out by
//! a thread of its own, and of all descriptors only those of files in memory are ever held.

use crate::share::ConnectionPlace;
use crate::wire::{HEAD, MOST_CALL_BYTES};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

/// Bytes of an answer that is not long.
pub(crate) const SHORT_ANSWER_BYTES: usize = 64 << 10;
/// What the client has not read may take so much of the kernel's memory, bytes, four times what is
/// there when the next answer is sent: unix sockets are writable as long as a quarter is in use.
/// For a long answer it is more while that is sent, so that all of it has room.
const SEND_BUFFER: usize = 256 << 10;
/// A frame of which nothing more comes for so long is taken out in parts.
const WHOLE_WITHIN: Duration = Duration::from_millis(200);
/// Between two looks at whether a program that has sent a part of a frame is awake to go on.
const LOOK_EVERY: Duration = if cfg!(test) { Duration::from_millis(100) } else { Duration::from_secs(10) };
/// A program that was awake at so many looks, and sent nothing more, does not finish the frame.
const LOOKS: usize = 3;
/// A thread that takes something out needs little.
const STACK_BYTES: usize = 256 << 10;

/// The daemon's end of a connection, not blocking.
#[derive(Debug, Clone)]
pub(crate) struct Stream {
    polled: Arc<AsyncFd<Held>>,
    taken: Arc<Mutex<Taken>>,
}

/// What was taken out of the socket of a frame that did not come whole.
#[derive(Debug, Default)]
struct Taken {
    bytes: Vec<u8>,
    file: Option<SentFile>,
}

/// The first descriptor that came with a frame.
#[derive(Debug)]
pub(crate) enum SentFile {
    /// A file in memory.
    InMemory(OwnedFd),
    /// Something else, which is closed.
    Other,
}

/// A descriptor that others may hold as well, and the place of its connection: a thread that takes
/// something out has it, too.
#[derive(Debug)]
struct Held {
    fd: Arc<OwnedFd>,
    _place: Option<ConnectionPlace>,
}

impl AsRawFd for Held {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// What waits in the socket.
#[derive(Debug)]
pub(crate) enum Waiting {
    /// A whole frame.
    Frame(WaitingFrame),
    /// A frame of that many bytes, which is too long.
    TooLong(u32),
    /// A part of a frame, and nothing more of it comes.
    Unfinished,
}

/// A whole frame in the socket.
#[derive(Debug)]
pub(crate) struct WaitingFrame {
    pub(crate) message: Vec<u8>,
    /// Descriptors came with it.
    has_descriptors: bool,
}

/// What a look at the socket has found.
struct Found {
    bytes: usize,
    has_descriptors: bool,
}

impl Stream {
    /// To be called in a runtime.
    pub(crate) fn new(fd: Arc<OwnedFd>, place: Option<ConnectionPlace>) -> io::Result<Stream> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        sockopt::set_socket_send_buffer_size_force(&fd, SEND_BUFFER / 2)?;
        // A read past a byte out of band would close the descriptor that came with that byte.
        sockopt::set_socket_oobinline(&fd, true)?;
        // Deprecated for types whose AsRawFd may lie; that of an OwnedFd does not. Its successor is
        // unsafe to call.
        #[allow(deprecated)]
        let polled = AsyncFd::with_interest(Held { fd, _place: place }, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Stream { polled: Arc::new(polled), taken: Arc::default() })
    }

    fn fd(&self) -> &Arc<OwnedFd> {
        &self.polled.get_ref().fd
    }

    /// The next frame, which stays where it is; none when the client has closed its end and sent no
    /// whole one. `note` is called before anything of a frame is taken out that is not whole;
    /// `sleeps` tells whether the program cannot go on with it.
    pub(crate) async fn peek(
        &self,
        note: impl Fn() -> io::Result<()>,
        sleeps: impl Fn() -> bool,
    ) -> io::Result<Option<Waiting>> {
        let mut buffer = vec![0; HEAD + 512];
        let mut looks = 0;
        loop {
            let before = self.copy_taken(&mut buffer);
            if let Some(whole) = whole(&buffer[..before], false) {
                return Ok(Some(whole));
            }
            let readable = self.polled.readable();
            let mut ready = if before == 0 {
                readable.await?
            } else if let Ok(ready) = tokio::time::timeout(LOOK_EVERY, readable).await {
                ready?
            } else {
                looks = if sleeps() { 0 } else { looks + 1 };
                if looks == LOOKS {
                    return Ok(Some(Waiting::Unfinished));
                }
                continue;
            };
            let found = match look(self.fd(), &mut buffer[before..]) {
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    continue;
                }
                Err(Errno::INTR) => continue,
                looked => looked?,
            };
            if found.bytes == 0 {
                return Ok(None);
            }
            looks = 0;
            let there = &buffer[..before + found.bytes];
            if let Some(whole) = whole(there, found.has_descriptors) {
                return Ok(Some(whole));
            }
            let wanted = wanted(there);
            if buffer.len() < wanted {
                // All of it may be there already.
                buffer.resize(wanted, 0);
                continue;
            }
            if self.has_ended()? {
                return Ok(None);
            }
            // More bytes are a new event.
            ready.clear_ready();
            drop(ready);
            if tokio::time::timeout(WHOLE_WITHIN, self.polled.readable()).await.is_err() {
                note()?;
                self.take_part(wanted).await?;
            }
        }
    }

    /// What was taken out before, at the beginning of the buffer; how much that is.
    fn copy_taken(&self, buffer: &mut Vec<u8>) -> usize {
        let taken = self.taken.lock();
        if buffer.len() < wanted(&taken.bytes) {
            buffer.resize(wanted(&taken.bytes), 0);
        }
        buffer[..taken.bytes.len()].copy_from_slice(&taken.bytes);
        taken.bytes.len()
    }

    /// Takes out what is there of a frame of that many bytes in all.
    async fn take_part(&self, wanted: usize) -> io::Result<()> {
        let stream = self.clone();
        let take = move || {
            let mut buffer = vec![0; wanted - stream.taken.lock().bytes.len()];
            let (mut came, mut file) = (0, None);
            while came < buffer.len() {
                match receive_file(stream.fd(), &mut buffer[came..], RecvFlags::empty()) {
                    Ok((0, _)) | Err(Errno::AGAIN) => break,
                    Ok((count, with_it)) => {
                        came += count;
                        file = file.or(with_it);
                    }
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            let mut taken = stream.taken.lock();
            taken.bytes.extend_from_slice(&buffer[..came]);
            taken.file = taken.file.take().or(file);
            Ok(())
        };
        apart(take).await?
    }

    /// The first descriptor that came with the frame that waits.
    pub(crate) async fn file(&self, frame: &WaitingFrame) -> io::Result<Option<SentFile>> {
        let taken = self.taken.lock().file.take();
        if taken.is_some() || !frame.has_descriptors {
            return Ok(taken);
        }
        let stream = self.clone();
        Ok(apart(move || receive_file(stream.fd(), &mut [0], RecvFlags::PEEK)).await??.1)
    }

    /// Whether the client sends nothing any more.
    fn has_ended(&self) -> io::Result<bool> {
        let events = self.poll(PollFlags::RDHUP)?;
        Ok(events.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR))
    }

    fn poll(&self, flags: PollFlags) -> io::Result<PollFlags> {
        let mut fds = [PollFd::new(self.fd(), flags)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        Ok(fds[0].revents())
    }

    /// Takes the frame out of the socket; whether a part of it was already.
    pub(crate) async fn consume(&self, frame: &WaitingFrame) -> io::Result<bool> {
        let before = std::mem::take(&mut *self.taken.lock()).bytes.len();
        let left = HEAD + frame.message.len() - before;
        if frame.has_descriptors {
            let stream = self.clone();
            apart(move || take_out(stream.fd(), left)).await??;
        } else {
            take_out(self.fd(), left)?;
        }
        Ok(before > 0)
    }

    /// Waits until the client has read most of what was sent.
    pub(crate) async fn writable(&self) -> io::Result<()> {
        loop {
            let mut ready = self.polled.writable().await?;
            let events = self.poll(PollFlags::OUT)?;
            if events.intersects(PollFlags::HUP | PollFlags::ERR) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if events.contains(PollFlags::OUT) {
                return Ok(());
            }
            ready.clear_ready();
        }
    }

    /// Sends a frame, whole, once the client has read most of what was sent before.
    pub(crate) async fn send(&self, frame: &[u8]) -> io::Result<()> {
        self.writable().await?;
        let is_long = frame.len() > SHORT_ANSWER_BYTES;
        if is_long {
            // A half more than its bytes is enough for what the kernel has beside them.
            sockopt::set_socket_send_buffer_size_force(self.fd(), SEND_BUFFER / 2 + frame.len() / 4 * 3)?;
        }
        let sent = loop {
            match send(self.fd(), frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                sent => break sent,
            }
        };
        if is_long {
            sockopt::set_socket_send_buffer_size_force(self.fd(), SEND_BUFFER / 2)?;
        }
        match sent {
            Ok(count) if count == frame.len() => Ok(()),
            // The client could not tell where the next one begins.
            Ok(_) => Err(io::Error::other("an answer went out in part")),
            Err(error) => Err(error.into()),
        }
    }

    /// Says that nothing follows, and lets what waits go: a socket that is closed with something in
    /// it is a reset to its peer. Nothing comes any more then, so that closing it takes no time.
    pub(crate) async fn end(&self) {
        let _ = rustix::net::shutdown(self.fd(), rustix::net::Shutdown::Both);
        if rustix::io::ioctl_fionread(self.fd()).is_ok_and(|bytes| bytes == 0) {
            return;
        }
        let stream = self.clone();
        let drained = apart(move || {
            let mut buffer = vec![0; MOST_CALL_BYTES];
            while look_at(stream.fd(), &mut buffer, RecvFlags::empty()).is_ok_and(|found| found.bytes > 0) {}
        });
        if let Err(error) = drained.await {
            tracing::warn!(%error, "what waits in a runtime connection is not let go");
        }
    }
}

/// Does in a thread of its own what may take as long as the client likes.
async fn apart<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (done, outcome) = oneshot::channel();
    let named = thread::Builder::new().name("runtime-take".to_owned()).stack_size(STACK_BYTES);
    named.spawn(move || drop(done.send(what())))?;
    outcome.await.map_err(io::Error::other)
}

/// The frame that these bytes begin with, if it is whole or too long.
fn whole(bytes: &[u8], has_descriptors: bool) -> Option<Waiting> {
    let length = u32::from_le_bytes(*bytes.first_chunk::<HEAD>()?);
    if length as usize > MOST_CALL_BYTES {
        return Some(Waiting::TooLong(length));
    }
    let message = bytes.get(HEAD..wanted(bytes))?.to_vec();
    Some(Waiting::Frame(WaitingFrame { message, has_descriptors }))
}

/// Bytes of the frame that these begin, as far as is known.
fn wanted(bytes: &[u8]) -> usize {
    bytes.first_chunk::<HEAD>().map_or(HEAD, |head| HEAD + u32::from_le_bytes(*head) as usize)
}

/// Without room for descriptors: the kernel says only that some have come.
fn look_at(fd: &Arc<OwnedFd>, buffer: &mut [u8], flags: RecvFlags) -> Result<Found, Errno> {
    let mut control = RecvAncillaryBuffer::default();
    let received = recvmsg(fd.as_fd(), &mut [IoSliceMut::new(buffer)], &mut control, flags | RecvFlags::DONTWAIT)?;
    Ok(Found { bytes: received.bytes, has_descriptors: received.flags.contains(ReturnFlags::CTRUNC) })
}

fn look(fd: &Arc<OwnedFd>, buffer: &mut [u8]) -> Result<Found, Errno> {
    look_at(fd, buffer, RecvFlags::PEEK)
}

/// Takes so many bytes out, and closes descriptors that came with them.
fn take_out(fd: &Arc<OwnedFd>, bytes: usize) -> io::Result<()> {
    let mut left = bytes;
    let mut buffer = vec![0; left];
    while left > 0 {
        match look_at(fd, &mut buffer[..left], RecvFlags::empty()) {
            Ok(Found { bytes: 0, .. }) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(found) => left -= found.bytes,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Bytes, and the first descriptor that came with them. What has seals is in memory, which is
/// known without asking the file's system: fcntl(2), F_GET_SEALS.
fn receive_file(fd: &Arc<OwnedFd>, buffer: &mut [u8], flags: RecvFlags) -> Result<(usize, Option<SentFile>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(fd.as_fd(), &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut file = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            file = fds.next().map(|fd| match rustix::fs::fcntl_get_seals(&fd) {
                Ok(_) => SentFile::InMemory(fd),
                Err(_) => SentFile::Other,
            });
        }
    }
    Ok((received.bytes, file))
}
