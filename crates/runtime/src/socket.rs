//! The listening socket, one for all procs of a data directory: each has it at [`PATH`].
//!
//! It is bound by way of its directory's descriptor, for the path of a socket may have 108 bytes at
//! most: unix(7).
//!
//! [`PATH`]: kip_types::runtime::PATH

use kip_types::runtime::SOCKET;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen as begin_listening, socket_with,
};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::Path;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;

/// Makes the socket in a directory, in the place of what was there before.
///
/// # Errors
/// Those of bind(2), and of the file system.
pub fn listen(directory: &Path) -> io::Result<OwnedFd> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let path = directory.join(SOCKET);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let opened = File::open(directory)?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{SOCKET}", opened.as_raw_fd()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&listener, &address)?;
    // To connect to it takes the right to write.
    fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    begin_listening(&listener, BACKLOG)?;
    Ok(listener)
}

/// Whether the socket is still where it was made.
pub fn is_there(directory: &Path) -> bool {
    fs::symlink_metadata(directory.join(SOCKET)).is_ok_and(|found| found.file_type().is_socket())
}
