//! The files of a resident program KIND, such as the keeper: `DIR/run/KIND.sock`, `KIND.lock` (its
//! pid, locked as long as it lives) and `KIND.log`.
//!
//! Only the process that holds the lock may bind, so two of a kind never run on one data directory.
//! A crash leaves a socket that refuses connections and a lock that no process holds; the next
//! program replaces both.

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LOG_MAX_BYTES: u64 = 1 << 20;
const BACKLOG: i32 = 64;

/// Something in the run directory could not be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {path}")]
pub struct RunDirectoryError {
    what: &'static str,
    path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// An open run directory.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
    directory: OwnedFd,
    kind: &'static str,
}

impl RunDirectory {
    /// Opens `dir/run` for the files of this kind; makes it (mode 0700) when it is missing.
    ///
    /// # Errors
    /// [`RunDirectoryError`].
    pub fn open(dir: &Path, kind: &'static str) -> Result<RunDirectory, RunDirectoryError> {
        let path = dir.join("run");
        let failed = |what, source| RunDirectoryError { what, path: path.clone(), source };
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed("create", e)),
            _ => {}
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| failed("open", e.into()))?;
        Ok(RunDirectory { path, directory, kind })
    }

    /// Where the socket is.
    pub fn socket_path(&self) -> PathBuf {
        self.path.join(self.file("sock"))
    }

    /// Where the log is.
    pub fn log_path(&self) -> PathBuf {
        self.path.join(self.file("log"))
    }

    fn file(&self, extension: &str) -> String {
        format!("{}.{extension}", self.kind)
    }

    fn failed(&self, what: &'static str, extension: &str, source: io::Error) -> RunDirectoryError {
        RunDirectoryError { what, path: self.path.join(self.file(extension)), source }
    }

    /// The socket's address by way of the open directory: unix(7) allows 107 bytes, and data
    /// directories may be deep.
    fn address(&self) -> io::Result<SocketAddrUnix> {
        Ok(SocketAddrUnix::new(format!("/proc/self/fd/{}/{}", self.directory.as_raw_fd(), self.file("sock")))?)
    }

    fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
        Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)?)
    }

    /// Connects to the program. Sending and receiving on the result give up after `timeout`.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` when none runs.
    pub fn connect(&self, timeout: Duration) -> io::Result<OwnedFd> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        let socket = RunDirectory::socket(SocketFlags::empty())?;
        set_socket_timeout(&socket, Timeout::Recv, Some(timeout))?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        let address = self.address()?;
        rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address))?;
        Ok(socket)
    }

    /// The right to connect and to try for the lock, for a moment; but a program that takes
    /// another's place has it all the while, so that no third one comes in between and no client
    /// connects to one that is about to end. Waits. The right is held until all duplicates are
    /// closed.
    ///
    /// # Errors
    /// [`RunDirectoryError`].
    pub fn turn(&self) -> Result<OwnedFd, RunDirectoryError> {
        let taken = || -> io::Result<OwnedFd> {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = rustix::fs::openat(&self.directory, ".", flags, Mode::empty())?;
            rustix::io::retry_on_intr(|| rustix::fs::flock(&directory, FlockOperation::LockExclusive))?;
            Ok(directory)
        };
        taken().map_err(|source| RunDirectoryError { what: "lock", path: self.path.clone(), source })
    }

    /// Takes the program's lock, or none when another has it. It is held until the file is closed.
    ///
    /// # Errors
    /// [`RunDirectoryError`].
    pub fn lock(&self) -> Result<Option<File>, RunDirectoryError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&self.directory, self.file("lock"), flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| self.failed("open", "lock", e.into()))?;
        let mut file = File::from(file);
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => return Err(self.failed("lock", "lock", e.into())),
            Ok(()) => {}
        }
        // The pid is for people; nothing reads it back.
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(|e| self.failed("write", "lock", e))?;
        Ok(Some(file))
    }

    /// The listening socket (mode 0600, nonblocking), in place of whatever a predecessor left. Only
    /// for the process that holds the lock.
    ///
    /// # Errors
    /// [`RunDirectoryError`].
    pub fn bind(&self) -> Result<OwnedFd, RunDirectoryError> {
        self.unlink().map_err(|e| self.failed("remove", "sock", e))?;
        let bound = || {
            let socket = RunDirectory::socket(SocketFlags::NONBLOCK)?;
            let old = rustix::process::umask(Mode::from_raw_mode(0o177));
            let result = self.address().and_then(|a| Ok(rustix::net::bind(&socket, &a)?));
            rustix::process::umask(old);
            result?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(socket)
        };
        bound().map_err(|e| self.failed("listen on", "sock", e))
    }

    /// Removes the socket. Only for the process that holds the lock.
    ///
    /// # Errors
    /// Those of unlinkat(2); a missing socket is none.
    pub fn unlink(&self) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.directory, self.file("sock"), rustix::fs::AtFlags::empty()) {
            Err(e) if e != rustix::io::Errno::NOENT => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// The log, for appending; emptied first when it has grown beyond 1 MiB.
    ///
    /// # Errors
    /// [`RunDirectoryError`].
    pub fn log(&self) -> Result<File, RunDirectoryError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = || -> io::Result<File> {
            let file = File::from(rustix::fs::openat(
                self.directory.as_fd(),
                self.file("log"),
                flags,
                Mode::RUSR | Mode::WUSR,
            )?);
            if file.metadata()?.len() > LOG_MAX_BYTES {
                file.set_len(0)?;
            }
            Ok(file)
        };
        opened().map_err(|e| self.failed("open", "log", e))
    }
}
