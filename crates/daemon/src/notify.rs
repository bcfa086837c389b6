//! Tells a service manager how far the daemon is: sd_notify(3), a datagram to the socket that
//! NOTIFY_SOCKET names.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The daemon serves.
pub const READY: &str = "READY=1\n";
/// It ends; procs run on.
pub const STOPPING: &str = "STOPPING=1\n";

/// It has come a step further in taking up what is there, and is waited for so much longer if its
/// time is over, microseconds.
const GOES_ON: &str = "EXTEND_TIMEOUT_USEC=120000000\n";

/// Tells that it goes on.
pub fn goes_on() {
    notify(GOES_ON);
}

/// Without $NOTIFY_SOCKET it does nothing. A manager that cannot be told is no reason to end, and
/// is in the log.
pub fn notify(state: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = send(&socket, state)
    {
        tracing::warn!(socket = %socket.display(), %error, "the service manager cannot be told");
    }
}

fn send(socket: &OsString, state: &str) -> io::Result<()> {
    let address = match socket.clone().into_vec().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None if socket.as_bytes().starts_with(b"/") => SocketAddr::from_pathname(socket)?,
        None => return Err(io::Error::new(io::ErrorKind::Unsupported, "it is neither a path nor begins with @")),
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_abstract_names_are_reached() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("kip-test-notify-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        let sockets = [
            (path.clone().into_os_string(), UnixDatagram::bind(&path).unwrap()),
            (format!("@{name}").into(), UnixDatagram::bind_addr(&abstract_name).unwrap()),
        ];
        for (socket, receiver) in sockets {
            send(&socket, READY).unwrap();
            let mut bytes = [0; 64];
            let length = receiver.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..length], READY.as_bytes());
        }
        assert!(send(&"vsock:2:1".into(), READY).is_err());
    }
}
