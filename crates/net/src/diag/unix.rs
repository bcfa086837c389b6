//! Unix sockets of a namespace: sock_diag(7), `struct unix_diag_req` and `struct unix_diag_msg`.

use super::{Diag, DiagError, u32_at};

const AF_UNIX: u8 = 1;
/// UDIAG_SHOW_NAME, UDIAG_SHOW_PEER, UDIAG_SHOW_RQLEN.
const SHOW: u32 = 1 | 1 << 2 | 1 << 4;
/// UNIX_DIAG_NAME, UNIX_DIAG_PEER, UNIX_DIAG_RQLEN.
const NAME: u16 = 0;
const PEER: u16 = 2;
const QUEUES: u16 = 4;
/// Sizes of the two structures.
const REQUEST: usize = 24;
const ANSWER: usize = 16;

/// A unix socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnixInfo {
    /// As in `socket:[INODE]`.
    pub inode: u64,
    /// SOCK_STREAM 1, SOCK_DGRAM 2, SOCK_SEQPACKET 5.
    pub kind: u8,
    /// As of TCP: 1 connected, 7 not, 10 listening.
    pub state: u8,
    /// Path as it was bound, `@NAME` of an abstract one, empty for none.
    pub name: String,
    /// Inode of the other side, 0 for none.
    pub peer: u64,
    /// Bytes to be read; of a listener, connections to be accepted.
    pub unread: u32,
    /// Bytes sent and not yet read by the other side; of a listener, its backlog.
    pub unsent: u32,
}

impl Diag {
    /// Unix sockets.
    ///
    /// # Errors
    /// The kernel's: it may have no unix_diag.
    pub fn unix(&self) -> Result<Vec<UnixInfo>, DiagError> {
        let mut request = vec![AF_UNIX, 0, 0, 0];
        request.extend(u32::MAX.to_ne_bytes());
        request.extend(0u32.to_ne_bytes());
        request.extend(SHOW.to_ne_bytes());
        // No cookie: any.
        request.resize(REQUEST, 0xff);
        let mut found = Vec::new();
        let asked = self.ask(&request, |body| found.extend(parse(body)));
        asked.map_err(|source| DiagError { doing: "list", source })?;
        Ok(found)
    }
}

fn parse(body: &[u8]) -> Option<UnixInfo> {
    let mut info = UnixInfo {
        kind: *body.get(1)?,
        state: *body.get(2)?,
        inode: u32_at(body.get(..ANSWER)?, 4).into(),
        ..UnixInfo::default()
    };
    let mut rest = &body[ANSWER..];
    while rest.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([rest[0], rest[1]])).clamp(4, rest.len());
        let value = &rest[4..length];
        match u16::from_ne_bytes([rest[2], rest[3]]) {
            NAME => info.name = name(value),
            PEER if value.len() >= 4 => info.peer = u32_at(value, 0).into(),
            QUEUES if value.len() >= 8 => (info.unread, info.unsent) = (u32_at(value, 0), u32_at(value, 4)),
            _ => {}
        }
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    Some(info)
}

fn name(bytes: &[u8]) -> String {
    match bytes.split_first() {
        Some((0, rest)) => format!("@{}", String::from_utf8_lossy(rest)),
        _ => String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

    #[test]
    fn our_own_are_among_them() {
        let name = format!("kip-unix-diag-{}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let (mut one, other) = UnixStream::pair().unwrap();
        one.write_all(b"unread").unwrap();
        let inode = |fd: std::os::fd::BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
        let all = Diag::open().unwrap().unix().unwrap();
        let find = |inode: u64| all.iter().find(|info| info.inode == inode).expect("it is listed");
        let listens = find(inode(listener.as_fd()));
        assert_eq!((listens.name.clone(), listens.state, listens.kind), (format!("@{name}"), 10, 1));
        let reader = find(inode(other.as_fd()));
        assert_eq!((reader.unread, reader.peer, reader.state), (6, inode(one.as_fd()), 1));
        assert!(find(inode(one.as_fd())).name.is_empty());
    }
}
