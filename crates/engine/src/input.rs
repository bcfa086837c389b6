//! What a proc's program has for its standard input: nothing, a pipe that stays open, or a terminal
//! of its own.
//!
//! The other side is held like its output is, by daemon and keeper, as long as the proc is not
//! stopped.

use crate::descriptors::reopen;
use crate::fd_store::key;
use crate::host::Proc;
use kip_sandbox::terminals::{self, Terminal};
use rustix::fs::OFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The program's end of its standard input.
pub(crate) enum Input {
    /// Empty: the null device.
    Null,
    /// The read end of a pipe.
    Pipe(OwnedFd),
    /// The program's side of a terminal, which is its output too.
    Terminal(OwnedFd),
}

impl Input {
    /// What the program reads, if it is not the null device.
    pub(crate) fn stdin(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Input::Null => None,
            Input::Pipe(fd) | Input::Terminal(fd) => Some(fd.as_fd()),
        }
    }

    /// The terminal, if it is one.
    pub(crate) fn terminal(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Input::Terminal(fd) => Some(fd.as_fd()),
            _ => None,
        }
    }
}

/// Makes what the spec asks for and holds it. `devpts` is the file system of the sandbox's
/// terminals, if it has some, `owner` the host's user of the program.
pub(crate) fn make(proc: &Proc, devpts: Option<BorrowedFd<'_>>, owner: u32) -> io::Result<Input> {
    if let Some(devpts) = devpts.filter(|_| proc.spec().terminal) {
        let Terminal { master, slave } = terminals::open_in(devpts, owner)?;
        proc.console.begin(&master)?;
        proc.fd_store.hold(vec![(key::TERMINAL.to_owned(), master)]).map_err(io::Error::other)?;
        return Ok(Input::Terminal(slave));
    }
    match proc.spec().stdin_open {
        true => hold_input(proc, owner).map(Input::Pipe),
        false => Ok(Input::Null),
    }
}

/// Makes the pipe of an open standard input and holds it; returns the program's end.
pub(crate) fn hold_input(proc: &Proc, owner: u32) -> io::Result<OwnedFd> {
    let (read, _) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // So that the program may open /dev/stdin.
    std::os::unix::fs::fchown(&read, Some(owner), None)?;
    let both = reopen(&read, OFlags::RDWR | OFlags::NONBLOCK)?;
    proc.fd_store.hold(vec![(key::IN.to_owned(), both)]).map_err(io::Error::other)?;
    Ok(read)
}
