//! Gives a stopped process a userfaultfd for its own memory and takes it out, leaving nothing
//! behind.
//!
//! userfaultfd(2) is refused to a process without privileges, and a sandbox has no
//! /dev/userfaultfd. The kernel checks no request on an open one, so the process is handed our open
//! device: it makes a socket, we take a duplicate of that socket (pidfd_getfd(2)), bind it, connect
//! it to itself and send the device on it, and the process receives it. No second process, no path
//! and no mount is needed, whatever namespaces it has; its seccomp filters are suspended. Two free
//! numbers below its RLIMIT_NOFILE are needed for that moment, the lowest ones, which are free
//! again afterwards.

use kip_stop::{Scratch, call};
use kip_sys::inject::Hand;
use kip_sys::process::{pidfd_getfd, pidfd_open, read_memory, write_memory};
use kip_sys::{fdpass, uffd};
use rustix::net::{SocketAddrUnix, bind, connect, getsockname};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

/// Makes the userfaultfd and sets it up.
///
/// # Errors
/// The kernel's; EMFILE when the process has no two free numbers. It is left without extra
/// descriptors in any case that it survives.
pub fn plant(pid: u32, hand: &Hand, scratch: &Scratch, device: &OwnedFd) -> io::Result<OwnedFd> {
    const UNIX: u64 = 1;
    const DATAGRAM_CLOEXEC: u64 = 2 | 0o2_000_000;
    let pidfd = pidfd_open(pid)?;
    let socket = hand.call(call::SOCKET, &[UNIX, DATAGRAM_CLOEXEC, 0])?;
    let passed = pidfd_getfd(pidfd.as_fd(), socket as i32).and_then(|ours| {
        bind(&ours, &SocketAddrUnix::new_unnamed())?;
        let name = SocketAddrUnix::try_from(getsockname(&ours)?)?;
        connect(&ours, &name)?;
        fdpass::send(ours.as_fd(), b"u", &[device.as_fd()])
    });
    let received = passed.and_then(|()| receive(pid, hand, scratch, socket));
    hand.call(call::CLOSE, &[socket])?;
    let device = received?;
    let made = hand.call(call::IOCTL, &[device, uffd::NEW, uffd::NEW_FLAGS]);
    hand.call(call::CLOSE, &[device])?;
    let made = made?;
    let taken = pidfd_getfd(pidfd.as_fd(), made as i32);
    hand.call(call::CLOSE, &[made])?;
    let taken = taken?;
    uffd::api(taken.as_fd(), crate::memory::features())?;
    Ok(taken)
}

/// recvmsg(2) of one descriptor; `struct msghdr`, `iovec`, a byte and room for one control message
/// lie in the scratch.
fn receive(pid: u32, hand: &Hand, scratch: &Scratch, socket: u64) -> io::Result<u64> {
    const CLOEXEC_DONTWAIT: u64 = 0x4000_0000 | 0x40;
    let (vector, byte, control) = (scratch.at + 64, scratch.at + 96, scratch.at + 128);
    let words = [0, 0, vector, 1, control, 24, 0, 0, byte, 1];
    let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
    write_memory(pid, scratch.at, &bytes)?;
    hand.call(call::RECVMSG, &[socket, scratch.at, CLOEXEC_DONTWAIT])?;
    let mut got = [0u8; 24];
    read_memory(pid, control, &mut got)?;
    let word = |at: usize| i32::from_le_bytes([got[at], got[at + 1], got[at + 2], got[at + 3]]);
    // cmsg_len, SOL_SOCKET, SCM_RIGHTS, the number.
    if (word(0), word(8), word(12)) != (20, 1, 1) || word(16) < 0 {
        return Err(io::Error::from(rustix::io::Errno::MFILE));
    }
    Ok(word(16) as u64)
}
