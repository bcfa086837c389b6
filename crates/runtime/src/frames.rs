//! Frames over a connection, so that a daemon that is killed loses none.
//!
//! A frame of a client is looked at where it waits, in the socket, and taken out of it when it is
//! answered: the next daemon finds it there. An answer is sent when all of it has room, by one
//! system call, so that it is there whole or not at all. Source: unix(7), recv(2).

use crate::wire::{HEAD, MOST_CALL_BYTES};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// What the client has not read may take so much of the kernel's memory, bytes, four times what is
/// there when the next answer is sent: unix sockets are writable as long as a quarter is in use.
const SEND_BUFFER: usize = 8 << 20;

/// The daemon's end of a connection, not blocking.
#[derive(Debug, Clone)]
pub(crate) struct Stream(Arc<AsyncFd<Held>>);

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
        Ok(Stream(Arc::new(polled)))
    }

    fn fd(&self) -> &Arc<OwnedFd> {
        &self.0.get_ref().0
    }

    /// The next frame, which stays where it is; none when the client has closed its end and sent no
    /// whole one.
    pub(crate) async fn peek(&self) -> io::Result<Option<Waiting>> {
        let mut buffer = vec![0; HEAD + 512];
        loop {
            let mut ready = self.0.readable().await?;
            let (count, descriptor) = match look(self.fd(), &mut buffer) {
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    continue;
                }
                Err(Errno::INTR) => continue,
                looked => looked?,
            };
            if count == 0 {
                return Ok(None);
            }
            let mut wanted = HEAD;
            if let Some(head) = buffer[..count].first_chunk::<HEAD>() {
                let length = u32::from_le_bytes(*head);
                if length as usize > MOST_CALL_BYTES {
                    return Ok(Some(Waiting::TooLong(length)));
                }
                wanted += length as usize;
                if count >= wanted {
                    return Ok(Some(Waiting::Frame(buffer[HEAD..wanted].to_vec(), descriptor)));
                }
            }
            if count == buffer.len() {
                // More may be there already.
                buffer.resize(wanted.max(buffer.len()), 0);
                if count < buffer.len() {
                    continue;
                }
            }
            buffer.resize(wanted.max(buffer.len()), 0);
            if self.has_ended()? {
                return Ok(None);
            }
            // More bytes are a new event.
            ready.clear_ready();
        }
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

    /// Takes the frame with a message of that length out of the socket.
    pub(crate) fn consume(&self, length: usize) -> io::Result<()> {
        let (mut left, mut buffer) = (HEAD + length, vec![0; HEAD + length]);
        while left > 0 {
            match take(self.fd(), &mut buffer[..left]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => left -= count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a frame, whole, once the client has read most of what was sent before.
    pub(crate) async fn send(&self, frame: &[u8]) -> io::Result<()> {
        loop {
            let mut ready = self.0.writable().await?;
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
