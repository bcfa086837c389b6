//! The client's side of a terminal of a proc, for the event loop.

use kip_types::api::TerminalSize;
use rustix::termios::{Winsize, tcsetwinsize};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use tokio::io::unix::AsyncFd;

/// Bytes that are read from a terminal at once.
const PIECE: usize = 32 << 10;

/// The descriptor for the event loop.
pub fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // Deprecated for types whose AsRawFd may lie; an OwnedFd's does not. Its successor is unsafe to
    // call.
    #[allow(deprecated)]
    AsyncFd::new(fd)
}

/// Gives it another size: its foreground group gets SIGWINCH.
///
/// # Errors
/// ioctl(2).
pub fn resize(master: impl AsFd, size: TerminalSize) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(master, size)?)
}

/// None when the terminal has been hung up.
pub async fn read(master: &AsyncFd<OwnedFd>) -> Option<Vec<u8>> {
    loop {
        let mut ready = master.readable().await.ok()?;
        match ready.try_io(|master| read_once(master.get_ref())) {
            Ok(Ok(bytes)) if !bytes.is_empty() => return Some(bytes),
            Ok(_) => return None,
            Err(_would_block) => {}
        }
    }
}

fn read_once(master: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; PIECE];
    let got = rustix::io::read(master, &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes)
}

/// As [`read`], without waiting.
pub fn read_now(master: &OwnedFd) -> Option<Vec<u8>> {
    read_once(master).ok().filter(|bytes| !bytes.is_empty())
}

/// As many bytes as there is room for; none when the terminal has been hung up.
pub async fn write(master: &AsyncFd<OwnedFd>, bytes: &[u8]) -> Option<usize> {
    loop {
        let mut ready = master.writable().await.ok()?;
        match ready.try_io(|master| Ok(rustix::io::write(master.get_ref(), bytes)?)) {
            Ok(written) => return written.ok(),
            Err(_would_block) => {}
        }
    }
}
