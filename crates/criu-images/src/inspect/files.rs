//! Open files of a process: what each descriptor is of.

use crate::codes::{kind, remap};
use crate::fields::{
    eventfd_file_entry, fdinfo_entry, fifo_entry, file_entry, inet_sk_entry, inotify_file_entry, memfd_file_entry,
    memfd_inode_entry, netlink_sk_entry, packet_sock_entry, pipe_entry, reg_file_entry, remap_file_path_entry,
    signalfd_entry, sk_packet_entry, timerfd_entry, tty_file_entry, unix_sk_entry,
};
use crate::file::CheckpointImageError;
use crate::images::Images;
use crate::wire::{Malformed, Message};
use std::collections::{BTreeMap, BTreeSet};

/// `st_mode`.
const TYPE: u64 = 0o170_000;
const CHARACTER: u64 = 0o020_000;
const DIRECTORY: u64 = 0o040_000;
const BLOCK: u64 = 0o060_000;
const FIFO_MODE: u64 = 0o010_000;
/// open(2).
const O_RDWR: u64 = 2;
const O_CLOEXEC: u64 = 0o2_000_000;
const O_DIRECTORY: u64 = 0o200_000;

/// What a descriptor is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileKind {
    /// Something with a path.
    Path {
        /// `file`, `directory`, `device` or `fifo`.
        kind: &'static str,
        /// As the program sees it.
        path: String,
    },
    /// memfd_create(2).
    Memory {
        /// Its name.
        name: String,
    },
    /// Known by the number of its inode.
    Pipe {
        /// That.
        inode: u64,
    },
    /// TCP, UDP, raw, and whatever else the images do not describe.
    Socket {
        /// Of sockfs.
        inode: u64,
    },
    /// A unix socket, of images what they say of it.
    Unix {
        /// Of sockfs.
        inode: u64,
        /// None where the kernel can be asked.
        state: Option<UnixState>,
        /// The file's id in the images.
        id: u64,
    },
    /// A netlink socket.
    Netlink {
        /// Of sockfs.
        inode: u64,
        /// Which family.
        protocol: Option<u64>,
        /// The file's id in the images.
        id: u64,
    },
    /// What the kernel has without a name.
    Anonymous {
        /// `epoll`, `eventfd` and the like.
        kind: String,
    },
}

/// What images say of a unix socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnixState {
    /// SOCK_*.
    pub kind: u8,
    /// As of TCP: 1 connected, 7 not, 10 listening.
    pub state: u8,
    /// Path, `@NAME`, or empty.
    pub name: String,
    /// Inode of the other side, or 0.
    pub peer: u64,
    /// Bytes to be read.
    pub queued: u64,
}

/// An open file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenFile {
    /// Descriptor.
    pub fd: i32,
    /// What it is.
    pub kind: FileKind,
    /// Flags of open(2), O_CLOEXEC included.
    pub flags: u64,
    /// Where the next read or write begins.
    pub offset: Option<u64>,
    /// It has no name any more.
    pub deleted: bool,
}

/// A name of a unix socket as people write it: abstract ones begin with `@`.
fn unix_name(bytes: &[u8]) -> String {
    match bytes.split_first() {
        Some((0, rest)) => format!("@{}", String::from_utf8_lossy(rest).trim_end_matches('\0')),
        _ => String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned(),
    }
}

/// The files of a tree, by their ids.
pub(super) struct Files {
    by_id: BTreeMap<u64, Message>,
    /// Memory files by the number of their inode: name, CRIU's number for the contents.
    memory: BTreeMap<u64, (String, u64)>,
    deleted: BTreeSet<u64>,
    /// Bytes in the queues of sockets, by file id.
    queues: BTreeMap<u64, u64>,
}

impl Files {
    pub(super) fn read(images: &Images) -> Result<Files, CheckpointImageError> {
        let memory = images.entries_if_any("memfd.img")?;
        let remapped = images.entries_if_any("remap-fpath.img")?;
        let nameless = remapped.iter().filter(|entry| entry.number(remap_file_path_entry::REMAP_TYPE) != remap::PROCFS);
        let files = images.entries_if_any("files.img")?;
        let named = |file: &Message| {
            let name = file.string(memfd_inode_entry::NAME).unwrap_or_default();
            (file.number(memfd_inode_entry::INODE_ID), (name, file.number(memfd_inode_entry::SHMID)))
        };
        Ok(Files {
            by_id: files.into_iter().map(|file| (file.number(file_entry::ID), file)).collect(),
            memory: memory.iter().map(named).collect(),
            deleted: nameless.map(|entry| entry.number(remap_file_path_entry::ORIG_ID)).collect(),
            queues: queues(images).map_err(images.damaged("sk-queues.img"))?,
        })
    }

    fn part(&self, id: u64, number: u32) -> Option<Message> {
        self.by_id.get(&id)?.message(number).ok().flatten()
    }

    /// The path of a regular file, empty if it is none.
    pub(super) fn path_of(&self, id: u64) -> String {
        self.part(id, file_entry::REG).and_then(|reg| reg.string(reg_file_entry::NAME)).unwrap_or_default()
    }

    /// Whether a file has no name any more.
    pub(super) fn is_nameless(&self, id: u64) -> bool {
        self.deleted.contains(&id)
    }

    /// The name of a memory file, and CRIU's number for its contents.
    pub(super) fn memory_file(&self, id: u64) -> (String, u64) {
        let inode = self.part(id, file_entry::MEMFD).map_or(0, |file| file.number(memfd_file_entry::INODE_ID));
        self.memory.get(&inode).cloned().unwrap_or_default()
    }

    /// An entry of a table of descriptors.
    pub(super) fn open(&self, descriptor: &Message) -> Option<OpenFile> {
        let id = descriptor.number(fdinfo_entry::ID);
        let file = self.by_id.get(&id)?;
        let cloexec = if descriptor.number(fdinfo_entry::FLAGS) & 1 != 0 { O_CLOEXEC } else { 0 };
        let part = |number| self.part(id, number).unwrap_or_default();
        let anonymous = |kind: &str| FileKind::Anonymous { kind: kind.to_owned() };
        let (kind, flags) = match file.number(file_entry::TYPE) {
            kind::REG => self.regular(&part(file_entry::REG)),
            kind::PIPE => {
                let pipe = part(file_entry::PIPE);
                (FileKind::Pipe { inode: pipe.number(pipe_entry::PIPE_ID) }, pipe.number(pipe_entry::FLAGS))
            }
            kind::FIFO => {
                let of = part(file_entry::FIFO).number(fifo_entry::REGF_ID);
                let flags = self.part(of, file_entry::REG).map_or(0, |reg| reg.number(reg_file_entry::FLAGS));
                (FileKind::Path { kind: "fifo", path: self.path_of(of) }, flags)
            }
            kind::INETSK => {
                let socket = part(file_entry::ISK);
                (FileKind::Socket { inode: socket.number(inet_sk_entry::INO) }, socket.number(inet_sk_entry::FLAGS))
            }
            kind::UNIXSK => {
                let socket = part(file_entry::USK);
                let state = UnixState {
                    kind: socket.number(unix_sk_entry::TYPE) as u8,
                    state: socket.number(unix_sk_entry::STATE) as u8,
                    name: unix_name(socket.bytes(unix_sk_entry::NAME).unwrap_or_default()),
                    peer: socket.number(unix_sk_entry::PEER),
                    queued: self.queues.get(&id).copied().unwrap_or(0),
                };
                let inode = socket.number(unix_sk_entry::INO);
                (FileKind::Unix { inode, state: Some(state), id }, socket.number(unix_sk_entry::FLAGS))
            }
            kind::NETLINKSK => {
                let socket = part(file_entry::NLSK);
                let (inode, protocol) =
                    (socket.number(netlink_sk_entry::INO), socket.varint(netlink_sk_entry::PROTOCOL));
                (FileKind::Netlink { inode, protocol, id }, socket.number(netlink_sk_entry::FLAGS))
            }
            kind::PACKETSK => (FileKind::Socket { inode: 0 }, part(file_entry::PSK).number(packet_sock_entry::FLAGS)),
            kind::MEMFD => {
                let name = self.memory_file(id).0;
                (FileKind::Memory { name }, part(file_entry::MEMFD).number(memfd_file_entry::FLAGS))
            }
            // The flags of an epoll set cannot be asked for while it is in use, so they are not
            // reported: [`OpenFile::flags`].
            kind::EVENTPOLL => return Some(OpenFile::epoll(descriptor.number(fdinfo_entry::FD) as i32)),
            kind::EVENTFD => (anonymous("eventfd"), part(file_entry::EFD).number(eventfd_file_entry::FLAGS)),
            kind::SIGNALFD => (anonymous("signalfd"), part(file_entry::SGFD).number(signalfd_entry::FLAGS)),
            kind::TIMERFD => (anonymous("timerfd"), part(file_entry::TFD).number(timerfd_entry::FLAGS)),
            kind::INOTIFY => (anonymous("inotify"), part(file_entry::IFY).number(inotify_file_entry::FLAGS)),
            kind::TTY => (anonymous("terminal"), part(file_entry::TTY).number(tty_file_entry::FLAGS)),
            other => (anonymous(&format!("kind {other}")), 0),
        };
        let has_offset = matches!(kind, FileKind::Path { kind: "file", .. } | FileKind::Memory { .. });
        let offset = match &kind {
            FileKind::Memory { .. } => part(file_entry::MEMFD).number(memfd_file_entry::POS),
            _ => part(file_entry::REG).number(reg_file_entry::POS),
        };
        let deleted = self.deleted.contains(&id) && matches!(kind, FileKind::Path { .. });
        let fd = descriptor.number(fdinfo_entry::FD) as i32;
        Some(OpenFile { fd, kind, flags: flags | cloexec, offset: has_offset.then_some(offset), deleted })
    }

    fn regular(&self, reg: &Message) -> (FileKind, u64) {
        let (path, flags) = (reg.string(reg_file_entry::NAME).unwrap_or_default(), reg.number(reg_file_entry::FLAGS));
        if let Some(inode) = path.strip_prefix("/socket:[").and_then(|rest| rest.strip_suffix(']')?.parse().ok()) {
            return (FileKind::Socket { inode }, flags);
        }
        let kind = match reg.number(reg_file_entry::MODE) & TYPE {
            CHARACTER | BLOCK => "device",
            DIRECTORY => "directory",
            FIFO_MODE => "fifo",
            0 if flags & O_DIRECTORY != 0 => "directory",
            _ => "file",
        };
        (FileKind::Path { kind, path }, flags)
    }
}

impl OpenFile {
    /// An epoll set, of which nothing else is reported: to ask for its flags is to wait for the
    /// thread that takes events from it.
    pub fn epoll(fd: i32) -> OpenFile {
        let kind = FileKind::Anonymous { kind: "epoll".to_owned() };
        OpenFile { fd, kind, flags: O_RDWR, offset: None, deleted: false }
    }
}

/// How much waits in each socket.
fn queues(images: &Images) -> Result<BTreeMap<u64, u64>, Malformed> {
    let mut found: BTreeMap<u64, u64> = BTreeMap::new();
    for packet in packets(images)? {
        *found.entry(packet.number(sk_packet_entry::ID_FOR)).or_default() += packet.number(sk_packet_entry::LENGTH);
    }
    Ok(found)
}

/// Whether a descriptor waits in a socket, for a process to receive it: SCM_RIGHTS of unix(7).
///
/// # Errors
/// The image is damaged.
pub fn carry_descriptors(images: &Images) -> Result<bool, CheckpointImageError> {
    let packets = packets(images).map_err(images.damaged(QUEUES))?;
    Ok(packets.iter().any(|packet| packet.bytes(sk_packet_entry::SCM).is_some()))
}

const QUEUES: &str = "sk-queues.img";

/// What waits in sockets: entries with as many bytes behind each as it says.
fn packets(images: &Images) -> Result<Vec<Message>, Malformed> {
    let mut found = Vec::new();
    let Some(bytes) = images.bytes(QUEUES) else { return Ok(found) };
    let mut at = 8;
    while at < bytes.len() {
        let length = bytes.get(at..at + 4).ok_or(Malformed { at })?;
        let length = u32::from_le_bytes(length.try_into().expect("4 bytes")) as usize;
        let packet = Message::decode(bytes.get(at + 4..at + 4 + length).ok_or(Malformed { at })?)?;
        let bytes = packet.number(sk_packet_entry::LENGTH);
        at = at.saturating_add(4 + length).saturating_add(bytes as usize);
        found.push(packet);
    }
    Ok(found)
}
