//! The API's socket file, `DIR/run/api.sock`.
//!
//! File permissions alone decide which users may connect, so the file never exists with other ones:
//! it is bound inside a closed directory, given its mode and owner there and moved into place, over
//! the file a dead daemon left. A client that may connect is as powerful as root on this machine.

use crate::lock::DataLock;
use rustix::fs::{Mode, OFlags};
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Path of the API's socket below a data directory.
pub const SOCKET: &str = "run/api.sock";

/// The socket could not be put in place.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {}", .path.display())]
pub struct BindError {
    /// Path of the socket.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// The listening socket and its file. Dropping it removes the file; it must be dropped before the
/// lock is.
#[derive(Debug)]
pub struct ApiSocket {
    listener: Option<UnixListener>,
    path: PathBuf,
}

impl ApiSocket {
    /// Listens on `DIR/run/api.sock`: mode 0600 or, with `group`, 0660 and that group's. A file
    /// that is there belongs to a dead daemon, for the lock is held, and is replaced.
    pub fn bind(lock: &DataLock, group: Option<u32>) -> Result<ApiSocket, BindError> {
        let path = lock.data().join(SOCKET);
        match bind_at(&path, group) {
            Ok(listener) => Ok(ApiSocket { listener: Some(listener), path }),
            Err(source) => Err(BindError { path, source }),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The listener, non-blocking. Can be taken once.
    pub(crate) fn listener(&mut self) -> io::Result<tokio::net::UnixListener> {
        let listener = self.listener.take().expect("a socket is served once");
        tokio::net::UnixListener::from_std(listener)
    }
}

impl Drop for ApiSocket {
    fn drop(&mut self) {
        // Leaving the file does no harm: no process listens on it and the next daemon replaces it.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn bind_at(path: &Path, group: Option<u32>) -> io::Result<UnixListener> {
    let closed = path.with_extension("new");
    match std::fs::remove_dir_all(&closed) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    DirBuilder::new().mode(0o700).create(&closed)?;
    let bound = bind_in(&closed, path, group);
    let cleaned = std::fs::remove_dir_all(&closed);
    let listener = bound?;
    cleaned?;
    Ok(listener)
}

fn bind_in(closed: &Path, path: &Path, group: Option<u32>) -> io::Result<UnixListener> {
    // A socket's address holds 107 bytes (unix(7)) and data directories may lie deep: the way
    // through the descriptor is always short.
    let dir = rustix::fs::open(closed, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let listener = UnixListener::bind(format!("/proc/self/fd/{}/s", dir.as_raw_fd()))?;
    listener.set_nonblocking(true)?;
    let file = closed.join("s");
    if group.is_some() {
        std::os::unix::fs::chown(&file, None, group)?;
    }
    std::fs::set_permissions(&file, Permissions::from_mode(if group.is_some() { 0o660 } else { 0o600 }))?;
    std::fs::rename(&file, path)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    // promise command-line: access by a socket with file permissions, `--group`
    // held by: this, `kip_api::socket::tests::a_group_may_be_let_in`,
    //   `tests/test_cli.py::test_no_root`
    #[tokio::test]
    async fn replaces_a_dead_daemons_file_closed_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DataLock::take(dir.path(), None).unwrap();
        let path = dir.path().join(SOCKET);
        drop(UnixListener::bind(&path).unwrap());
        assert!(UnixStream::connect(&path).is_err());

        let socket = ApiSocket::bind(&lock, None).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        drop(socket);
        assert!(!path.exists());
        assert_eq!(std::fs::read_dir(dir.path().join("run")).unwrap().count(), 1, "only the lock is left");
    }

    #[tokio::test]
    async fn a_group_may_be_let_in() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DataLock::take(dir.path(), Some(12345)).unwrap();
        let socket = ApiSocket::bind(&lock, Some(12345)).unwrap();
        let meta = std::fs::metadata(socket.path()).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.gid()), (0o660, 12345));
    }

    #[tokio::test]
    async fn a_deep_data_directory_works() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("x".repeat(100)).join("y".repeat(100));
        let lock = DataLock::take(&deep, None).unwrap();
        ApiSocket::bind(&lock, None).unwrap();
    }
}
