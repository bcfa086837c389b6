//! What the next daemon has to know of a connection: the change that was begun, whether a frame was
//! taken out in part, whether the client was greeted, the watches and the waits.
//!
//! It is in a memory file that is held with the connection. The number of the change is written by
//! itself; the watches have a checksum, by which a daemon that was killed while it wrote them is
//! found out. Source: memfd_create(2), pwrite(2).

use crate::wire::AwaitCall;
use prost::Message;
use rustix::fs::MemfdFlags;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Where it says that a frame was taken out in part, bytes.
const IN_PART_AT: u64 = 8;
/// Where it says that the client has not been greeted, bytes.
const NEW_AT: u64 = 9;
/// Where the watches are in the file, bytes.
const WATCHES_AT: u64 = 4096;
/// Longest list of watches, bytes.
const MOST_BYTES: usize = 1 << 20;

/// A watch of a connection.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeptWatch {
    /// The number of the call that began it.
    #[prost(uint64, tag = "1")]
    pub(crate) id: u64,
    #[prost(string, tag = "2")]
    pub(crate) path: String,
    #[prost(bool, tag = "3")]
    pub(crate) only: bool,
    /// The revision of the last answer that was sent.
    #[prost(uint64, tag = "4")]
    pub(crate) seen: u64,
}

/// A call that is not answered yet, while others are.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeptWait {
    /// Its number.
    #[prost(uint64, tag = "1")]
    pub(crate) id: u64,
    #[prost(message, optional, tag = "2")]
    pub(crate) call: Option<AwaitCall>,
}

/// What a connection waits for: its watches and its waits.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeptCalls {
    #[prost(message, repeated, tag = "1")]
    pub(crate) watches: Vec<KeptWatch>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) waits: Vec<KeptWait>,
}

/// The memory of a connection.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionMemory(Arc<OwnedFd>);

impl ConnectionMemory {
    /// The file of a new one.
    pub(crate) fn make() -> io::Result<OwnedFd> {
        Ok(rustix::fs::memfd_create("kip-runtime", MemfdFlags::CLOEXEC)?)
    }

    pub(crate) fn of(fd: Arc<OwnedFd>) -> ConnectionMemory {
        ConnectionMemory(fd)
    }

    /// A change with this number is begun; 0: none is.
    pub(crate) fn note_begun(&self, id: u64) -> io::Result<()> {
        self.write(&id.to_le_bytes(), 0)
    }

    /// The change that was begun last, if the file says so.
    pub(crate) fn begun(&self) -> u64 {
        let mut bytes = [0; 8];
        self.read(&mut bytes, 0).map_or(0, |()| u64::from_le_bytes(bytes))
    }

    /// Something of a frame is taken out of the socket before that is whole, or not any more.
    pub(crate) fn note_in_part(&self, is_in_part: bool) -> io::Result<()> {
        self.write(&[is_in_part.into()], IN_PART_AT)
    }

    /// Whether it says so.
    pub(crate) fn is_in_part(&self) -> bool {
        let mut byte = [0];
        self.read(&mut byte, IN_PART_AT).is_ok() && byte != [0]
    }

    /// The client has been greeted, or not yet.
    pub(crate) fn note_greeted(&self, is_greeted: bool) -> io::Result<()> {
        self.write(&[(!is_greeted).into()], NEW_AT)
    }

    /// Whether it has been; so it is where nothing was noted.
    pub(crate) fn is_greeted(&self) -> bool {
        let mut byte = [0];
        self.read(&mut byte, NEW_AT).is_err() || byte == [0]
    }

    /// These are its watches and its waits.
    pub(crate) fn note_calls(&self, calls: &KeptCalls) -> io::Result<()> {
        let bytes = calls.encode_to_vec();
        let mut text = Vec::with_capacity(8 + bytes.len());
        text.extend((bytes.len() as u32).to_le_bytes());
        text.extend(crc32fast::hash(&bytes).to_le_bytes());
        text.extend(bytes);
        self.write(&text, WATCHES_AT)
    }

    /// Its watches and its waits; none if they cannot be read.
    pub(crate) fn calls(&self) -> Option<KeptCalls> {
        let mut head = [0; 8];
        if rustix::fs::fstat(self.0.as_fd()).ok()?.st_size as u64 <= WATCHES_AT {
            return Some(KeptCalls::default());
        }
        self.read(&mut head, WATCHES_AT).ok()?;
        let [length, sum] = [0, 4].map(|at| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes")));
        let mut bytes = vec![0; Some(length as usize).filter(|length| *length <= MOST_BYTES)?];
        self.read(&mut bytes, WATCHES_AT + 8).ok()?;
        (crc32fast::hash(&bytes) == sum).then(|| KeptCalls::decode(&bytes[..]).ok())?
    }

    fn write(&self, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = rustix::io::retry_on_intr(|| rustix::io::pwrite(self.0.as_fd(), bytes, at))?;
            bytes = &bytes[count..];
            at += count as u64;
        }
        Ok(())
    }

    fn read(&self, bytes: &mut [u8], mut at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::retry_on_intr(|| rustix::io::pread(self.0.as_fd(), &mut bytes[done..], at))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => (done, at) = (done + count, at + count as u64),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_is_read_by_the_next_and_damage_is_found() {
        let fd = Arc::new(ConnectionMemory::make().unwrap());
        let memory = ConnectionMemory::of(Arc::clone(&fd));
        assert_eq!((memory.begun(), memory.calls()), (0, Some(KeptCalls::default())));
        let watch = KeptWatch { id: 7, path: "/a".to_owned(), only: true, seen: 9 };
        memory.note_begun(5).unwrap();
        let wait = KeptWait { id: 8, call: Some(AwaitCall { name: "job".to_owned(), moment: 1 }) };
        let calls = KeptCalls { watches: vec![watch.clone()], waits: vec![wait] };
        memory.note_calls(&KeptCalls { watches: vec![watch.clone(), watch], ..calls.clone() }).unwrap();
        memory.note_calls(&calls).unwrap();
        let next = ConnectionMemory::of(Arc::clone(&fd));
        assert_eq!((next.begun(), next.calls(), next.is_in_part()), (5, Some(calls), false));
        memory.note_in_part(true).unwrap();
        assert!(next.is_in_part() && next.begun() == 5 && next.is_greeted());
        memory.note_greeted(false).unwrap();
        assert!(!next.is_greeted() && next.is_in_part());
        memory.note_greeted(true).unwrap();
        assert!(next.is_greeted());
        rustix::io::pwrite(&fd, b"x", WATCHES_AT + 9).unwrap();
        assert_eq!(next.calls(), None);
    }
}
