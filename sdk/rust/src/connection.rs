//! One connection: frames and their numbers.

use crate::error::Error;
use crate::wire::{AnswerKind, CallKind, HEAD, HelloCall, RuntimeAnswer, RuntimeCall, VERSION, framed};
use prost::Message as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// So often is a connection made that ends before it is greeted.
const TRIES: u32 = 5;
/// Between two of them.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// A greeted connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    /// Number of the last call.
    last: u64,
    /// The process that made it: a child of that has its own.
    process: u32,
}

impl Connection {
    /// The daemon may be ended while it greets one.
    pub(crate) fn open(path: &Path) -> Result<Connection, Error> {
        for _ in 1..TRIES {
            match Connection::greeted(path) {
                Err(error) if error.is_end() => std::thread::sleep(AGAIN_AFTER),
                done => return done,
            }
        }
        Connection::greeted(path)
    }

    fn greeted(path: &Path) -> Result<Connection, Error> {
        let mut connection = Connection { stream: UnixStream::connect(path)?, last: 0, process: std::process::id() };
        let id = connection.send(CallKind::Hello(HelloCall { version: VERSION }), None)?;
        match connection.answer(id)? {
            AnswerKind::Welcome(_) => Ok(connection),
            _ => Err(Error::Answer),
        }
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Whether it has ended, or is another process's.
    pub(crate) fn is_stale(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let polled = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        self.process != std::process::id() || polled != Ok(0)
    }

    /// Sends a call; its number.
    pub(crate) fn send(&mut self, kind: CallKind, descriptor: Option<BorrowedFd<'_>>) -> Result<u64, Error> {
        self.last += 1;
        let frame = framed(&RuntimeCall { id: self.last, kind: Some(kind) });
        let sent = descriptor.map_or(Ok(0), |descriptor| self.send_with(&frame, descriptor))?;
        self.stream.write_all(&frame[sent..])?;
        Ok(self.last)
    }

    fn send_with(&self, frame: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "there is room for one");
        let send = || sendmsg(&self.stream, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL);
        Ok(rustix::io::retry_on_intr(send)?)
    }

    /// The next answer to that call. Another number is that of a call of before: the daemon was
    /// ended after it had answered.
    pub(crate) fn answer(&mut self, id: u64) -> Result<AnswerKind, Error> {
        loop {
            let mut head = [0; HEAD];
            self.stream.read_exact(&mut head)?;
            let mut message = vec![0; u32::from_le_bytes(head) as usize];
            self.stream.read_exact(&mut message)?;
            let answer = RuntimeAnswer::decode(&message[..]).map_err(|_| Error::Answer)?;
            if answer.id != id && answer.id != 0 {
                continue;
            }
            return match answer.kind.ok_or(Error::Answer)? {
                AnswerKind::Failure(failure) => Err(failure.into()),
                kind => Ok(kind),
            };
        }
    }
}
