//! Messages with descriptors over unix SEQPACKET sockets: unix(7), SCM_RIGHTS in cmsg(3).
//!
//! One call is one message. A descriptor in flight is alive even when its sender is gone. A message
//! that would arrive in part (too many bytes, too many descriptors, no room in the receiver's
//! descriptor table) is an error and never half a result: what did arrive of it is closed.

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Most descriptors in one message. The kernel's own limit is 253 (SCM_MAX_FD, unix(7)).
pub const MAX_FDS: usize = 250;

/// Most bytes in one message that is sure to pass with the default buffers (net.core.wmem_default
/// is 212,992 with the kernel's overhead of about a page).
pub const MAX_BYTES: usize = 128 * 1024;

const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// A connected pair of SEQPACKET sockets, both close-on-exec: socketpair(2).
pub fn seqpacket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

#[derive(Debug, thiserror::Error)]
#[error("only {arrived} descriptors of a message arrived: too many, or no room for more open files")]
struct LostDescriptors {
    arrived: usize,
}

/// Whether an error of [`recv`] means that descriptors of the message were lost: there were too
/// many, or this process is at its RLIMIT_NOFILE.
pub fn lost_descriptors(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|e| e.is::<LostDescriptors>())
}

/// Sends one message: sendmsg(2), never SIGPIPE. The descriptors are duplicated by the kernel, the
/// caller keeps its own.
///
/// # Errors
/// `InvalidInput` for an empty message (the receiver could not tell it from the end) or more than
/// [`MAX_FDS`]; `BrokenPipe` or `ConnectionReset` when the other end is closed; `WouldBlock` for a
/// nonblocking socket whose peer does not read; `ETOOMANYREFS` when the user has as many
/// descriptors in flight as its RLIMIT_NOFILE.
pub fn send(sock: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if bytes.is_empty() || fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a message has 1 or more bytes and at most {MAX_FDS} descriptors, not {} and {}",
                bytes.len(),
                fds.len()
            ),
        ));
    }
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "the control buffer has room for MAX_FDS");
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(sock, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    debug_assert_eq!(sent, bytes.len(), "SEQPACKET sends all or nothing");
    Ok(())
}

/// Receives one message of at most `max_bytes` bytes and [`MAX_FDS`] descriptors, which are
/// close-on-exec: recvmsg(2).
///
/// # Errors
/// `UnexpectedEof` when the peer has closed; `InvalidData` when the message was longer than
/// `max_bytes` or lost descriptors (too many of them, or this process is at its RLIMIT_NOFILE), in
/// which case all of it is dropped; `WouldBlock` for a nonblocking socket without a message.
pub fn recv(sock: BorrowedFd<'_>, max_bytes: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; max_bytes];
    let (length, fds) = recv_into(sock, &mut bytes)?;
    bytes.truncate(length);
    Ok((bytes, fds))
}

/// As [`recv`], and the message stays to be received again: MSG_PEEK, recv(2).
///
/// # Errors
/// As [`recv`]; the message stays then, too.
pub fn peek(sock: BorrowedFd<'_>, max_bytes: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; max_bytes];
    let (length, fds) = receive(sock, &mut bytes, RecvFlags::PEEK)?;
    bytes.truncate(length);
    Ok((bytes, fds))
}

/// As [`recv`], into a buffer of the caller's; returns how many bytes of it are the message.
///
/// # Errors
/// As [`recv`].
pub fn recv_into(sock: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive(sock, buffer, RecvFlags::empty())
}

fn receive(sock: BorrowedFd<'_>, buffer: &mut [u8], flags: RecvFlags) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(sock, &mut [IoSliceMut::new(buffer)], &mut control, flags | RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a message was longer than the {} bytes expected", buffer.len()),
        ));
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, LostDescriptors { arrived: fds.len() }));
    }
    if got.bytes == 0 && fds.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((got.bytes, fds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn bytes_and_descriptors_arrive() {
        let (a, b) = seqpacket_pair().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        send(a.as_fd(), b"one", &[writer.as_fd()]).unwrap();
        send(a.as_fd(), b"two", &[]).unwrap();
        drop(writer);
        let (bytes, fds) = recv(b.as_fd(), 64).unwrap();
        assert_eq!((bytes.as_slice(), fds.len()), (&b"one"[..], 1));
        assert!(rustix::io::fcntl_getfd(&fds[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        for fd in fds {
            File::from(fd).write_all(b"through").unwrap();
        }
        let mut text = String::new();
        File::from(reader).read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
        let (bytes, fds) = recv(b.as_fd(), 64).unwrap();
        assert_eq!((bytes.as_slice(), fds.len()), (&b"two"[..], 0));
    }

    #[test]
    fn the_largest_message_passes_and_a_larger_one_is_refused() {
        let (a, b) = seqpacket_pair().unwrap();
        let fds = vec![a.as_fd(); MAX_FDS];
        send(a.as_fd(), &vec![7; MAX_BYTES], &fds).unwrap();
        let (bytes, got) = recv(b.as_fd(), MAX_BYTES).unwrap();
        assert_eq!((bytes.len(), got.len()), (MAX_BYTES, MAX_FDS));
        let fds = vec![a.as_fd(); MAX_FDS + 1];
        assert_eq!(send(a.as_fd(), b"x", &fds).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(send(a.as_fd(), b"", &[]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn truncated_bytes_are_an_error_and_close_the_descriptors() {
        let (a, b) = seqpacket_pair().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        send(a.as_fd(), b"too long", &[writer.as_fd()]).unwrap();
        drop(writer);
        let error = recv(b.as_fd(), 3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(!lost_descriptors(&error));
        // End of file proves that no copy of the write end is left.
        assert_eq!(File::from(reader).read(&mut [0; 1]).unwrap(), 0);
        send(a.as_fd(), b"ok", &[]).unwrap();
        assert_eq!(recv(b.as_fd(), 64).unwrap().0, b"ok");
    }

    #[test]
    fn a_closed_peer_is_told_apart() {
        let (a, b) = seqpacket_pair().unwrap();
        send(a.as_fd(), b"last", &[]).unwrap();
        drop(a);
        assert_eq!(recv(b.as_fd(), 64).unwrap().0, b"last");
        assert_eq!(recv(b.as_fd(), 64).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(send(b.as_fd(), b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    /// RLIMIT_NOFILE belongs to the whole process, so this test runs in a child: the test binary
    /// with this test only.
    #[test]
    fn no_room_for_the_descriptors_is_an_error() {
        const NAME: &str = "fdpass::tests::no_room_for_the_descriptors_is_an_error";
        if std::env::args().any(|a| a == "--include-ignored") {
            let (a, b) = seqpacket_pair().unwrap();
            send(a.as_fd(), b"x", &[a.as_fd(); 100]).unwrap();
            let full = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: Some(50), maximum: full.maximum }).unwrap();
            let error = recv(b.as_fd(), 64).unwrap_err();
            setrlimit(Resource::Nofile, full).unwrap();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            assert!(lost_descriptors(&error));
            assert!(std::fs::read_dir("/proc/self/fd").unwrap().count() < 20, "what arrived was closed");
            return;
        }
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact", "--include-ignored"])
            .status()
            .unwrap();
        assert!(status.success());
    }
}
