//! Frames over a connection, so that a daemon that is killed loses none.
//!
//! A frame of a client is looked at where it waits, in the socket, and taken out of it when it is
//! answered: the next daemon finds it there. A client that writes a frame in many small pieces may
//! have no room for all of them; what has come of such a frame is taken out, which is noted first,
//! for the next daemon cannot go on with the rest. An answer is sent when all of it has room, by
//! one system call, so that it is there whole or not at all. Source: unix(7), recv(2).

use crate::wire::{HEAD, MOST_CALL_BYTES};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// What the client has not read may take so much of the kernel's memory, bytes, four times what is
/// there when the next answer is sent: unix sockets are writable as long as a quarter is in use.
const SEND_BUFFER: usize = 8 << 20;
/// A frame of which nothing more comes for so long is taken out in parts.
const WHOLE_WITHIN: Duration = Duration::from_millis(200);

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
    descriptor: Option<OwnedFd>,
}

/// A descriptor that others may hold as well.
#[derive(Debug)]
struct Held(Arc<OwnedFd>);

impl AsRawFd for Held {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// What waits in the socket.
#[derive(Debug)]
pub(crate) enum Waiting {
    /// A whole frame: its message, and the descriptor that came with it.
    Frame(Vec<u8>, Option<OwnedFd>),
    /// A frame of that many bytes, which is too long.
    TooLong(u32),
}

impl Stream {
    /// To be called in a runtime.
    pub(crate) fn new(fd: Arc<OwnedFd>) -> io::Result<Stream> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        sockopt::set_socket_send_buffer_size_force(&fd, SEND_BUFFER / 2)?;
        // Deprecated for types whose AsRawFd may lie; that of an OwnedFd does not. Its successor is
        // unsafe to call.
        #[allow(deprecated)]
        let polled = AsyncFd::with_interest(Held(fd), Interest::READABLE | Interest::WRITABLE)?;
        Ok(Stream { polled: Arc::new(polled), taken: Arc::default() })
    }

    fn fd(&self) -> &Arc<OwnedFd> {
        &self.polled.get_ref().0
    }

    /// The next frame, which stays where it is; none when the client has closed its end and sent no
    /// whole one. `note` is called before anything of a frame is taken out that is not whole.
    pub(crate) async fn peek(&self, note: impl Fn() -> io::Result<()>) -> io::Result<Option<Waiting>> {
        let mut buffer = vec![0; HEAD + 512];
        loop {
            let before = self.copy_taken(&mut buffer);
            if let Some(whole) = self.whole(&buffer[..before], None) {
                return Ok(Some(whole));
            }
            let mut ready = self.polled.readable().await?;
            let (came, descriptor) = match look(self.fd(), &mut buffer[before..]) {
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    continue;
                }
                Err(Errno::INTR) => continue,
                looked => looked?,
            };
            if came == 0 {
                return Ok(None);
            }
            let there = &buffer[..before + came];
            if let Some(whole) = self.whole(there, descriptor) {
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
                self.take_part(wanted)?;
            }
        }
    }

    /// What was taken out before, at the beginning of the buffer; how much that is.
    fn copy_taken(&self, buffer: &mut [u8]) -> usize {
        let taken = self.taken.lock();
        buffer[..taken.bytes.len()].copy_from_slice(&taken.bytes);
        taken.bytes.len()
    }

    /// The frame that these bytes begin with, if it is whole or too long.
    fn whole(&self, bytes: &[u8], descriptor: Option<OwnedFd>) -> Option<Waiting> {
        let length = u32::from_le_bytes(*bytes.first_chunk::<HEAD>()?);
        if length as usize > MOST_CALL_BYTES {
            return Some(Waiting::TooLong(length));
        }
        let message = bytes.get(HEAD..wanted(bytes))?.to_vec();
        Some(Waiting::Frame(message, self.taken.lock().descriptor.take().or(descriptor)))
    }

    /// Takes out what is there of a frame of that many bytes in all.
    fn take_part(&self, wanted: usize) -> io::Result<()> {
        let mut taken = self.taken.lock();
        let mut buffer = vec![0; wanted - taken.bytes.len()];
        let mut came = 0;
        while came < buffer.len() {
            match receive(self.fd(), &mut buffer[came..], RecvFlags::empty()) {
                Ok((0, _)) | Err(Errno::AGAIN) => break,
                Ok((count, descriptor)) => {
                    came += count;
                    taken.descriptor = descriptor.or(taken.descriptor.take());
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        taken.bytes.extend_from_slice(&buffer[..came]);
        Ok(())
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

    /// Takes the frame with a message of that length out of the socket; whether a part of it was
    /// already.
    pub(crate) fn consume(&self, length: usize) -> io::Result<bool> {
        let before = std::mem::take(&mut *self.taken.lock()).bytes.len();
        let mut left = HEAD + length - before;
        let mut buffer = vec![0; left];
        while left > 0 {
            match take(self.fd(), &mut buffer[..left]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => left -= count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(before > 0)
    }

    /// Sends a frame, whole, once the client has read most of what was sent before.
    pub(crate) async fn send(&self, frame: &[u8]) -> io::Result<()> {
        loop {
            let mut ready = self.polled.writable().await?;
            let events = self.poll(PollFlags::OUT)?;
            if events.intersects(PollFlags::HUP | PollFlags::ERR) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if !events.contains(PollFlags::OUT) {
                ready.clear_ready();
                continue;
            }
            return match send(self.fd(), frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    continue;
                }
                Ok(count) if count == frame.len() => Ok(()),
                // The client could not tell where the next one begins.
                Ok(_) => Err(io::Error::other("an answer went out in part")),
                Err(error) => Err(error.into()),
            };
        }
    }

    /// Says that nothing follows, and lets what waits go: a socket that is closed with something in
    /// it is a reset to its peer.
    pub(crate) fn end(&self) {
        let _ = rustix::net::shutdown(self.fd(), rustix::net::Shutdown::Both);
        let mut buffer = vec![0; MOST_CALL_BYTES];
        while take(self.fd(), &mut buffer).is_ok_and(|count| count > 0) {}
    }
}

/// Bytes of the frame that these begin, as far as is known.
fn wanted(bytes: &[u8]) -> usize {
    bytes.first_chunk::<HEAD>().map_or(HEAD, |head| HEAD + u32::from_le_bytes(*head) as usize)
}

fn receive(fd: &Arc<OwnedFd>, buffer: &mut [u8], flags: RecvFlags) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(fd.as_fd(), &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut descriptor = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            descriptor = fds.last();
        }
    }
    Ok((received.bytes, descriptor))
}

fn look(fd: &Arc<OwnedFd>, buffer: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Errno> {
    receive(fd, buffer, RecvFlags::PEEK)
}

/// Descriptors that come with it are closed.
fn take(fd: &Arc<OwnedFd>, buffer: &mut [u8]) -> Result<usize, Errno> {
    receive(fd, buffer, RecvFlags::empty()).map(|(count, _)| count)
}
