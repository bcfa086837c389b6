//! The session that controls a terminal: ioctl_tty(2) `TIOCSCTTY` and `TIOCNOTTY` with the arguments that rustix lacks.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes the terminal that of the calling session, and takes it from the session that has it. The caller leads its session, has no
/// terminal and has CAP_SYS_ADMIN in the initial user namespace.
///
/// # Errors
/// `EPERM`: the caller is not that.
pub fn take(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the argument is a number, and no memory of ours is touched.
    done(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 1) })
}

/// Gives up the terminal of the calling session, whose leader the caller is; its foreground group, which should be the caller's own, is
/// sent SIGHUP and SIGCONT.
///
/// # Errors
/// `ENOTTY`: the session has another terminal, or none.
pub fn give_up(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: there is no argument, and no memory of ours is touched.
    done(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCNOTTY) })
}
