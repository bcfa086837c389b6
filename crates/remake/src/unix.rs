//! Unix sockets made anew: listening ones, bound ones, pairs, and connections to a listening one of
//! the tree, with what waited in them.
//!
//! A thread makes them that is in the proc's network namespace, by which the kernel finds them, and
//! has the proc's `/` as its root, so that each has the very path that it had. A
//! program that asks a socket for its maker (SO_PEERCRED) sees the user and the group of a process
//! that has the socket, and the pid 0. What cannot be made in this way is CRIU's to make.

use crate::failure::{RemakeError, errno, system, with_status};
use crate::note::MadeAlready;
use crate::place::{inside, is_in_root};
use kip_criu_images::codes::kind;
use kip_criu_images::fields::{
    core_entry, creds_entry, file_entry, file_perms_entry, fown_entry, sk_opts_entry, sk_packet_entry,
    thread_core_entry, unix_sk_entry,
};
use kip_criu_images::processes::FileTable;
use kip_criu_images::{Images, Message};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Uid};
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    send, shutdown, socket_with, socketpair, sockopt,
};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// States as the kernel counts those of TCP.
const CONNECTED: u64 = 1;
const CLOSED: u64 = 7;
const LISTENS: u64 = 10;

/// A user and a group, as numbered inside.
#[derive(Debug, Clone, Copy, Default)]
struct Owner {
    user: u32,
    group: u32,
}

/// A socket as the images have it.
#[derive(Debug)]
struct Socket {
    id: u64,
    entry: Message,
    /// Its options.
    options: Message,
    kind: SocketType,
    /// Of a process that has it.
    owner: Owner,
    /// What waits in it, one message after the other.
    queue: Vec<Vec<u8>>,
}

impl Socket {
    fn state(&self) -> u64 {
        self.entry.number(unix_sk_entry::STATE)
    }

    /// Its path, without the 0 behind that, or 0 and an abstract name.
    fn name(&self) -> &[u8] {
        let name = self.entry.bytes(unix_sk_entry::NAME).unwrap_or_default();
        if name.first() == Some(&0) { name } else { name.split(|byte| *byte == 0).next().unwrap_or_default() }
    }

    fn peer(&self) -> u64 {
        self.entry.number(unix_sk_entry::PEER)
    }

    fn has_path(&self) -> bool {
        self.name().first().is_some_and(|first| *first != 0)
    }
}

const fn unsupported(what: &'static str) -> RemakeError {
    RemakeError::Unsupported(what)
}

/// Makes those of the files with these ids that are unix sockets.
///
/// # Errors
/// See [`RemakeError`]; what was made is closed again.
pub(crate) fn sockets(
    images: &Images,
    files: &BTreeMap<u64, Message>,
    tables: &[FileTable],
    wanted: &[u64],
    around: &impl MadeAlready,
) -> Result<Vec<(u64, OwnedFd)>, RemakeError> {
    let is_one = |id: &&u64| files.get(id).is_some_and(|file| file.number(file_entry::TYPE) == kind::UNIXSK);
    let ids: BTreeSet<u64> = wanted.iter().filter(is_one).copied().collect();
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let mut queues = queues(images, &ids)?;
    let mut found = BTreeMap::new();
    for id in ids {
        let entry = files[&id].message(file_entry::USK)?.unwrap_or_default();
        let owner = owner(images, tables, id)?;
        let queue = queues.remove(&id).unwrap_or_default();
        let socket = socket(images, id, entry, owner, queue)?;
        found.insert(socket.entry.number(unix_sk_entry::INO), socket);
    }
    let network = around.network().ok_or(unsupported("a unix socket without its network namespace"))?;
    let root = if found.values().any(|socket| socket.has_path() && socket.state() != CONNECTED) {
        Some(around.files().map_err(system("the proc's files"))?)
    } else {
        None
    };
    let first = around.root();
    let made = inside(Some(network.as_fd()), root.as_ref().map(AsFd::as_fd), || {
        Maker { sockets: &found, first, made: BTreeMap::new() }.all()
    })?;
    Ok(made.into_iter().map(|(inode, fd)| (found[&inode].id, fd)).collect())
}

/// What waits in these sockets, by their ids.
fn queues(images: &Images, ids: &BTreeSet<u64>) -> Result<BTreeMap<u64, Vec<Vec<u8>>>, RemakeError> {
    let mut found: BTreeMap<u64, Vec<Vec<u8>>> = BTreeMap::new();
    let Some(mut mixed) = images.mixed("sk-queues.img")? else { return Ok(found) };
    while let Some(packet) = mixed.entry()? {
        let contents = mixed.contents(packet.number(sk_packet_entry::LENGTH) as usize)?;
        let id = packet.number(sk_packet_entry::ID_FOR);
        if !ids.contains(&id) {
            continue;
        }
        let is_plain = packet.bytes(sk_packet_entry::SCM).is_none()
            && packet.bytes(sk_packet_entry::ADDR).is_none_or(<[u8]>::is_empty);
        if !is_plain {
            return Err(unsupported("a unix socket in which a descriptor or a sender's name waits"));
        }
        found.entry(id).or_default().push(contents.to_vec());
    }
    Ok(found)
}

/// User and group of a process that has the file.
fn owner(images: &Images, tables: &[FileTable], id: u64) -> Result<Owner, RemakeError> {
    let table = tables.iter().find(|table| table.files.values().any(|file| *file == id));
    let Some(pid) = table.map(|table| table.pid) else { return Ok(Owner::default()) };
    let core = images.first(&format!("core-{pid}.img"))?.unwrap_or_default();
    let thread = core.message(core_entry::THREAD_CORE)?.unwrap_or_default();
    let creds = thread.message(thread_core_entry::CREDS)?.unwrap_or_default();
    let of = |field| creds.number(field) as u32;
    Ok(Owner { user: of(creds_entry::EUID), group: of(creds_entry::EGID) })
}

/// A socket that can be made here.
fn socket(images: &Images, id: u64, entry: Message, owner: Owner, queue: Vec<Vec<u8>>) -> Result<Socket, RemakeError> {
    let options = entry.message(unix_sk_entry::OPTS)?.unwrap_or_default();
    let kind = match entry.number(unix_sk_entry::TYPE) {
        1 => SocketType::STREAM,
        2 => SocketType::DGRAM,
        5 => SocketType::SEQPACKET,
        _ => return Err(unsupported("a unix socket of an unknown type")),
    };
    if entry.message(unix_sk_entry::FOWN)?.unwrap_or_default().number(fown_entry::PID) != 0 {
        return Err(unsupported("an open file with an owner"));
    }
    if entry.number(unix_sk_entry::UFLAGS) != 0 {
        return Err(unsupported("a unix socket that is connected to the outside"));
    }
    let is_set = |field| options.number(field) != 0;
    let rare = [sk_opts_entry::PRIORITY, sk_opts_entry::MARK, sk_opts_entry::PASSSEC].into_iter().any(is_set)
        || [sk_opts_entry::BOUND_DEV, sk_opts_entry::FILTER].into_iter().any(|field| options.bytes(field).is_some());
    if rare {
        return Err(unsupported("a unix socket with a priority, a mark, a device or a filter"));
    }
    if options.number(sk_opts_entry::PASSCRED) != 0 && !queue.is_empty() {
        return Err(unsupported("a unix socket in which the ids of a sender wait"));
    }
    let socket = Socket { id, entry, options, kind, owner, queue };
    if socket.has_path() && socket.state() != CONNECTED {
        check_path(images, &socket.entry, socket.name())?;
    }
    Ok(socket)
}

fn check_path(images: &Images, entry: &Message, name: &[u8]) -> Result<(), RemakeError> {
    if entry.number(unix_sk_entry::DELETED) != 0 {
        return Err(unsupported("a unix socket whose file is deleted"));
    }
    if name.first() != Some(&b'/') {
        return Err(unsupported("a unix socket bound to a relative path"));
    }
    match is_in_root(images, name, entry.varint(unix_sk_entry::MNT_ID))? {
        true => Ok(()),
        false => Err(unsupported("a unix socket bound to a path that is not in /")),
    }
}

struct Maker<'a> {
    /// By their inodes of before.
    sockets: &'a BTreeMap<u64, Socket>,
    /// Host id of the user that is root inside.
    first: u32,
    made: BTreeMap<u64, OwnedFd>,
}

impl Maker<'_> {
    fn all(mut self) -> Result<BTreeMap<u64, OwnedFd>, RemakeError> {
        let sockets = self.sockets;
        for (inode, socket) in sockets.iter().filter(|(_, socket)| socket.state() != CONNECTED) {
            let made = self.alone(socket)?;
            self.made.insert(*inode, made);
        }
        for (inode, socket) in sockets.iter().filter(|(_, socket)| socket.state() == CONNECTED) {
            if !self.made.contains_key(inode) {
                self.connected(*inode, socket)?;
            }
        }
        // When all are connected: what waits goes by the other end.
        for (inode, socket) in sockets {
            set_up(socket, &self.made[inode])?;
        }
        let made = self.made.into_iter();
        made.map(|(inode, fd)| Ok((inode, with_status(fd, sockets[&inode].entry.number(unix_sk_entry::FLAGS))?)))
            .collect()
    }

    /// One that is connected to none.
    fn alone(&self, socket: &Socket) -> Result<OwnedFd, RemakeError> {
        if socket.peer() != 0 || !socket.queue.is_empty() || socket.entry.number(unix_sk_entry::SHUTDOWN) != 0 {
            return Err(unsupported("a unix socket that has been connected or has something waiting"));
        }
        let made = socket_with(AddressFamily::UNIX, socket.kind, SocketFlags::CLOEXEC, None);
        let made = made.map_err(errno("a unix socket"))?;
        match socket.name() {
            [] => {}
            [0, name @ ..] => {
                let address = SocketAddrUnix::new_abstract_name(name).map_err(errno("an abstract name"))?;
                bind(&made, &address).map_err(errno("a unix socket with its abstract name"))?;
            }
            path => self.bind(&made, path, socket)?,
        }
        match socket.state() {
            CLOSED => Ok(made),
            LISTENS => {
                let backlog = socket.entry.number(unix_sk_entry::BACKLOG) as i32;
                let listens = || listen(&made, backlog).map_err(errno("a listening unix socket"));
                self.as_owner(socket.owner, listens).map(|()| made)
            }
            _ => Err(unsupported("a unix socket in an unknown state")),
        }
    }

    /// Binds it to a path, in the place of the file that the old one has left there.
    fn bind(&self, made: &OwnedFd, path: &[u8], socket: &Socket) -> Result<(), RemakeError> {
        let address = SocketAddrUnix::new(path).map_err(errno("the path of a unix socket"))?;
        let place = errno("a unix socket at its path");
        let perms = socket.entry.message(unix_sk_entry::FILE_PERMS)?.unwrap_or_default();
        let of = |field| self.first + perms.number(field) as u32;
        let (mut mode, mut user, mut group) =
            (perms.number(file_perms_entry::MODE) as u32, of(file_perms_entry::UID), of(file_perms_entry::GID));
        match rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {
                (mode, user, group) = (stat.st_mode, stat.st_uid, stat.st_gid);
                rustix::fs::unlink(path).map_err(&place)?;
            }
            Ok(_) => return Err(unsupported("a unix socket at whose path is another file")),
            Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(place(e)),
        }
        bind(made, &address).map_err(&place)?;
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        rustix::fs::chownat(CWD, path, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW).map_err(&place)?;
        rustix::fs::chmod(path, Mode::from_raw_mode(mode & 0o7777)).map_err(&place)
    }

    /// Both ends of a connection, or the one whose other end is closed.
    fn connected(&mut self, inode: u64, socket: &Socket) -> Result<(), RemakeError> {
        if socket.peer() == 0 {
            if !socket.name().is_empty() || !socket.queue.is_empty() {
                return Err(unsupported("a unix socket with a name whose other end is closed"));
            }
            // The other end is closed with the pair.
            let (end, _) = self.pair(socket)?;
            self.made.insert(inode, end);
            return Ok(());
        }
        let peer = self.sockets.get(&socket.peer()).filter(|peer| peer.state() == CONNECTED && peer.peer() == inode);
        let peer = peer.ok_or(unsupported("a unix socket whose other end is not the tree's"))?;
        let ends = match (socket.name(), peer.name()) {
            ([], []) => self.pair(socket)?,
            (name, []) => self.accepted(name, socket, peer)?,
            ([], name) => {
                let (accepted, client) = self.accepted(name, peer, socket)?;
                (client, accepted)
            }
            _ => return Err(unsupported("a connection between two unix sockets with names")),
        };
        for (from, to) in [(&ends.1, socket), (&ends.0, peer)] {
            fill(from, &to.queue)?;
        }
        let (other, end) = (socket.peer(), ends);
        self.made.insert(inode, end.0);
        self.made.insert(other, end.1);
        Ok(())
    }

    fn pair(&self, socket: &Socket) -> Result<(OwnedFd, OwnedFd), RemakeError> {
        let make = || socketpair(AddressFamily::UNIX, socket.kind, SocketFlags::CLOEXEC, None);
        self.as_owner(socket.owner, || make().map_err(errno("a pair of unix sockets")))
    }

    /// A connection to the listening socket with that name: the end that it gave, and the client's.
    fn accepted(&self, name: &[u8], server: &Socket, client: &Socket) -> Result<(OwnedFd, OwnedFd), RemakeError> {
        let listens = |(_, socket): &(&u64, &Socket)| socket.state() == LISTENS && socket.name() == name;
        let listener = self.sockets.iter().find(listens).and_then(|(inode, _)| self.made.get(inode));
        let listener = listener.ok_or(unsupported("a connection to a unix socket that listens no more"))?;
        let what = errno("a connection to a unix socket");
        let address = match name {
            [0, name @ ..] => SocketAddrUnix::new_abstract_name(name),
            path => SocketAddrUnix::new(path),
        };
        let address = address.map_err(&what)?;
        let end = socket_with(AddressFamily::UNIX, server.kind, SocketFlags::CLOEXEC, None).map_err(&what)?;
        self.as_owner(client.owner, || connect(&end, &address).map_err(&what))?;
        // It is there already: nothing else can have connected.
        let accepted = accept_with(listener, SocketFlags::CLOEXEC).map_err(&what)?;
        Ok((accepted, end))
    }

    /// With the ids of a process inside, which the kernel keeps as those of the socket's maker.
    fn as_owner<T>(&self, owner: Owner, act: impl FnOnce() -> Result<T, RemakeError>) -> Result<T, RemakeError> {
        let ids = errno("a unix socket of its user");
        let (group, user) = (Gid::from_raw(self.first + owner.group), Uid::from_raw(self.first + owner.user));
        let own = (rustix::process::getegid(), rustix::process::geteuid());
        rustix::thread::set_thread_res_gid(None, group, None).map_err(&ids)?;
        let done = match rustix::thread::set_thread_res_uid(None, user, None) {
            Ok(()) => {
                let done = act();
                rustix::thread::set_thread_res_uid(None, own.1, None).map_err(&ids)?;
                done
            }
            Err(e) => Err(ids(e)),
        };
        rustix::thread::set_thread_res_gid(None, own.0, None).map_err(&ids)?;
        done
    }
}

/// Sends what waited in the other end.
fn fill(end: &OwnedFd, queue: &[Vec<u8>]) -> Result<(), RemakeError> {
    for message in queue {
        let sent = send(end, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        let sent = sent.map_err(errno("what waited in a unix socket"))?;
        if sent < message.len() {
            return Err(unsupported("a unix socket in which more waits than a new one takes"));
        }
    }
    Ok(())
}

/// Options, and what shutdown(2) has closed.
fn set_up(socket: &Socket, made: &OwnedFd) -> Result<(), RemakeError> {
    let what = errno("a unix socket with its options");
    let of = |field| socket.options.number(field);
    let (sndbuf, rcvbuf) = (of(sk_opts_entry::SNDBUF) as usize, of(sk_opts_entry::RCVBUF) as usize);
    // The kernel doubles what it is asked for.
    if sndbuf > 0 && sockopt::socket_send_buffer_size(made).map_err(&what)? != sndbuf {
        sockopt::set_socket_send_buffer_size_force(made, sndbuf / 2).map_err(&what)?;
    }
    if rcvbuf > 0 && sockopt::socket_recv_buffer_size(made).map_err(&what)? != rcvbuf {
        sockopt::set_socket_recv_buffer_size_force(made, rcvbuf / 2).map_err(&what)?;
    }
    for (id, seconds, micros) in [
        (sockopt::Timeout::Send, sk_opts_entry::SND_TMO_SEC, sk_opts_entry::SND_TMO_USEC),
        (sockopt::Timeout::Recv, sk_opts_entry::RCV_TMO_SEC, sk_opts_entry::RCV_TMO_USEC),
    ] {
        let time_out = Duration::from_secs(of(seconds)) + Duration::from_micros(of(micros));
        if !time_out.is_zero() {
            sockopt::set_socket_timeout(made, id, Some(time_out)).map_err(&what)?;
        }
    }
    if of(sk_opts_entry::PASSCRED) != 0 {
        sockopt::set_socket_passcred(made, true).map_err(&what)?;
    }
    // The end of a connection whose other end is closed is shut down with that.
    let how = match socket.entry.number(unix_sk_entry::SHUTDOWN) {
        _ if socket.peer() == 0 => return Ok(()),
        1 => Shutdown::Read,
        2 => Shutdown::Write,
        3 => Shutdown::Both,
        _ => return Ok(()),
    };
    shutdown(made, how).map_err(&what)
}
