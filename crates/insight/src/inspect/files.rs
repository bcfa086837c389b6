//! A descriptor in words.

use super::sockets::Sockets;
use kip_criu_images::inspect::{FileKind, OpenFile};
use kip_types::api::OpenFileView;

/// Flags of open(2) with their names; O_SYNC has O_DSYNC in it.
const FLAGS: [(u64, &str); 9] = [
    (0o2_000, "append"),
    (0o4_000, "nonblock"),
    (0o4_010_000, "sync"),
    (0o10_000, "dsync"),
    (0o20_000, "async"),
    (0o40_000, "direct"),
    (0o1_000_000, "noatime"),
    (0o2_000_000, "cloexec"),
    (PATH, "path"),
];
/// O_PATH.
const PATH: u64 = 0o10_000_000;

/// What people see of it.
pub(super) fn view(file: &OpenFile, sockets: &Sockets) -> OpenFileView {
    let (kind, what, peer) = match &file.kind {
        FileKind::Path { kind, path } => ((*kind).to_owned(), path.clone(), None),
        FileKind::Memory { name } => ("memory".to_owned(), name.clone(), None),
        FileKind::Pipe { inode } => ("pipe".to_owned(), format!("pipe:[{inode}]"), None),
        FileKind::Anonymous { kind } => (kind.clone(), String::new(), None),
        FileKind::Socket { .. } | FileKind::Unix { .. } | FileKind::Netlink { .. } => {
            let socket = sockets.view(&file.kind);
            (socket.proto.to_string(), socket.local, socket.peer)
        }
    };
    let (access, flags) = words(file.flags);
    let (fd, offset, deleted) = (file.fd, file.offset, file.deleted);
    OpenFileView { fd, kind, what, peer, access: access.to_owned(), flags, offset, deleted }
}

fn words(flags: u64) -> (&'static str, Vec<String>) {
    let access = match flags & 3 {
        _ if flags & PATH != 0 => "-",
        0 => "r",
        1 => "w",
        2 => "rw",
        _ => "-",
    };
    let mut left = flags;
    let mut named = Vec::new();
    for (bits, name) in FLAGS {
        if left & bits == bits {
            left &= !bits;
            named.push(name.to_owned());
        }
    }
    (access, named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_names() {
        assert_eq!(words(0o2_002_001), ("w", vec!["append".to_owned(), "cloexec".to_owned()]));
        assert_eq!(words(0o4_010_002), ("rw", vec!["sync".to_owned()]));
        assert_eq!(words(0o10_000), ("r", vec!["dsync".to_owned()]));
        assert_eq!(words(0o10_200_000), ("-", vec!["path".to_owned()]));
    }
}
