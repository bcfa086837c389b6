//! The sockets of a proc, asked for in its network namespace, which is there in every tier.
//!
//! Of a sleeper those that are held are live sockets: what has come for them since it fell asleep
//! is seen. Only what is not held, such as unix sockets that CRIU makes anew, is told from the
//! images.

use super::Subject;
use crate::why::{plain, state_of};
use kip_criu_images::inspect::{FileKind, ImageProcess, UnixState};
use kip_engine::fd_store::key;
use kip_engine::host::Proc;
use kip_net::custody::SocketKind;
use kip_net::diag::{Diag, SocketInfo, TcpState, UnixInfo};
use kip_records::body::Body;
use kip_types::Protocol;
use kip_types::api::{OpenAt, OpenSocketView, SocketFamily};
use kip_types::chain;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

/// States of unix sockets.
const CONNECTED: u8 = 1;
const LISTENS: u8 = 10;

/// All sockets of a proc.
pub(super) struct Sockets {
    inet: HashMap<u64, SocketInfo>,
    unix: HashMap<u64, UnixInfo>,
    /// Protocols of those of processes that are there.
    netlink: HashMap<u64, u64>,
    /// Names of unix sockets in images, by their numbers there.
    names: HashMap<u64, String>,
    /// Where each is open, by what it is called in the descriptors.
    open: BTreeMap<u64, Vec<OpenAt>>,
    /// Of a sleeper: numbers of the held ones by the numbers that they have in the images.
    held: Option<HashMap<u64, u64>>,
    /// Of a sleeper: what was noted of each, by the number in the images.
    noted: HashMap<u64, SocketKind>,
}

/// The number of a socket in descriptors or images.
fn inode_of(kind: &FileKind) -> Option<u64> {
    match kind {
        FileKind::Socket { inode } | FileKind::Unix { inode, .. } | FileKind::Netlink { inode, .. } => Some(*inode),
        FileKind::Path { .. } | FileKind::Memory { .. } | FileKind::Pipe { .. } | FileKind::Anonymous { .. } => None,
    }
}

impl Sockets {
    pub(super) fn read(proc: &Proc, subject: &Subject) -> Result<Sockets, String> {
        let (netns, sleeper) = match subject {
            Subject::Live(live) => (live.netns(), None),
            Subject::Asleep(asleep) => {
                let netns = proc.fd_store.get(key::NET).and_then(|fd| fd.try_clone().ok());
                (netns, Some(&asleep.body))
            }
        };
        let processes = subject.processes();
        let mut sockets = Sockets {
            inet: HashMap::new(),
            unix: HashMap::new(),
            netlink: match subject {
                Subject::Live(live) => live.netlink(),
                Subject::Asleep(_) => HashMap::new(),
            },
            names: names(processes),
            open: open_at(processes),
            held: sleeper.map(|_| held(proc, processes)),
            noted: sleeper.map(noted).unwrap_or_default(),
        };
        if let Some(netns) = netns {
            sockets.ask(&netns).map_err(|e| chain(&e))?;
        }
        Ok(sockets)
    }

    fn ask(&mut self, netns: &OwnedFd) -> Result<(), kip_net::diag::DiagError> {
        use std::os::fd::AsFd as _;
        let diag = Diag::open_in(netns.as_fd())?;
        let inet = diag.listeners()?.into_iter().chain(diag.connections()?).chain(diag.udp()?);
        self.inet = inet.map(|info| (info.inode, info)).collect();
        self.unix = diag.unix()?.into_iter().map(|info| (info.inode, info)).collect();
        Ok(())
    }

    /// The number that a socket has in the kernel, if it is there.
    fn live(&self, inode: u64) -> Option<u64> {
        match &self.held {
            Some(held) => held.get(&inode).copied(),
            None => Some(inode),
        }
    }

    /// What people see of one, but for where it is open.
    pub(super) fn view(&self, kind: &FileKind) -> OpenSocketView {
        let inode = inode_of(kind).unwrap_or(0);
        let live = self.live(inode);
        let mut view = match kind {
            _ if live.is_some_and(|live| self.inet.contains_key(&live)) => inet(&self.inet[&live.expect("just found")]),
            _ if live.is_some_and(|live| self.unix.contains_key(&live)) => {
                self.unix(&self.unix[&live.expect("just found")])
            }
            FileKind::Unix { state: Some(state), .. } => self.unix(&of_image(inode, state)),
            FileKind::Netlink { protocol, .. } => netlink(protocol.unwrap_or(0)),
            _ if self.netlink.contains_key(&inode) => netlink(self.netlink[&inode]),
            _ => self.noted.get(&inode).map_or_else(|| bare(SocketFamily::Socket), of_note),
        };
        view.held = self.held.as_ref().map(|held| held.contains_key(&inode));
        view
    }

    /// All sockets that a process has open.
    pub(super) fn open(&self, processes: &[ImageProcess]) -> Vec<OpenSocketView> {
        let kinds = processes.iter().flat_map(|process| &process.files).map(|file| &file.kind);
        let by_inode: BTreeMap<u64, &FileKind> = kinds.filter_map(|kind| Some((inode_of(kind)?, kind))).collect();
        let mut views: Vec<OpenSocketView> = by_inode
            .into_iter()
            .map(|(inode, kind)| OpenSocketView {
                open: self.open.get(&inode).cloned().unwrap_or_default(),
                ..self.view(kind)
            })
            .collect();
        let rank = |view: &OpenSocketView| {
            let proto = match view.proto {
                SocketFamily::Tcp => 0,
                SocketFamily::Udp => 1,
                SocketFamily::Unix => 2,
                SocketFamily::Netlink | SocketFamily::Socket | SocketFamily::Unknown => 3,
            };
            (proto, !view.state.ends_with("listen"), view.open.first().cloned())
        };
        views.sort_by_key(rank);
        views
    }

    fn unix(&self, info: &UnixInfo) -> OpenSocketView {
        let kind = match info.kind {
            1 => "stream",
            2 => "datagram",
            5 => "packet",
            _ => "unknown",
        };
        let state = match info.state {
            LISTENS => format!("{kind} listen"),
            CONNECTED => format!("{kind} connected"),
            _ if info.peer != 0 => format!("{kind} connected"),
            _ => format!("{kind} open"),
        };
        OpenSocketView {
            state,
            local: info.name.clone(),
            peer: (info.peer != 0).then(|| self.unix_peer(info.peer)),
            unread: Some(info.unread.into()),
            unsent: (info.state != LISTENS).then_some(info.unsent.into()),
            ..bare(SocketFamily::Unix)
        }
    }

    /// The other side of a unix socket: its name, or the process that has it open.
    fn unix_peer(&self, peer: u64) -> String {
        let in_images = self.held.as_ref().and_then(|held| held.iter().find(|(_, live)| **live == peer));
        let number = in_images.map_or(peer, |(number, _)| *number);
        let named = self.unix.get(&peer).map(|info| &info.name).or_else(|| self.names.get(&number));
        let named = named.filter(|name| !name.is_empty()).cloned();
        let open = self.open.get(&number).and_then(|open| open.first());
        let open = open.map(|at| format!("pid {} fd {}", at.pid, at.fd));
        named.or(open).unwrap_or_else(|| format!("socket:[{peer}]"))
    }
}

fn bare(proto: SocketFamily) -> OpenSocketView {
    OpenSocketView {
        proto,
        state: "open".to_owned(),
        local: String::new(),
        peer: None,
        unread: None,
        unsent: None,
        held: None,
        open: Vec::new(),
    }
}

fn netlink(protocol: u64) -> OpenSocketView {
    OpenSocketView { local: format!("protocol {protocol}"), ..bare(SocketFamily::Netlink) }
}

fn names(processes: &[ImageProcess]) -> HashMap<u64, String> {
    let files = processes.iter().flat_map(|process| &process.files);
    let named = files.filter_map(|file| match &file.kind {
        FileKind::Unix { inode, state: Some(state), .. } => Some((*inode, state.name.clone())),
        _ => None,
    });
    named.collect()
}

fn open_at(processes: &[ImageProcess]) -> BTreeMap<u64, Vec<OpenAt>> {
    let mut open: BTreeMap<u64, Vec<OpenAt>> = BTreeMap::new();
    for process in processes {
        for file in &process.files {
            if let Some(inode) = inode_of(&file.kind) {
                let at = OpenAt { pid: process.pid, name: process.name.clone(), fd: file.fd };
                open.entry(inode).or_default().push(at);
            }
        }
    }
    open
}

/// Held sockets: the number that each has now, by that in the images. They differ where it was made
/// anew.
fn held(proc: &Proc, processes: &[ImageProcess]) -> HashMap<u64, u64> {
    let mut found = HashMap::new();
    for file in processes.iter().flat_map(|process| &process.files) {
        let (inode, key) = match &file.kind {
            FileKind::Socket { inode } => (*inode, format!("{}{inode}", key::SOCKET)),
            FileKind::Unix { inode, id, .. } | FileKind::Netlink { inode, id, .. } => {
                (*inode, format!("{}{id}", key::OBJECT))
            }
            _ => continue,
        };
        if let Some(fd) = proc.fd_store.get(&key)
            && let Ok(stat) = rustix::fs::fstat(&*fd)
        {
            found.insert(inode, stat.st_ino);
        }
    }
    found
}

fn noted(body: &Body) -> HashMap<u64, SocketKind> {
    body.sockets.iter().map(|socket| (socket.inode.into(), socket.options.kind)).collect()
}

fn address(address: SocketAddr) -> String {
    plain(address).to_string()
}

fn inet(info: &SocketInfo) -> OpenSocketView {
    let (tcp, listens) = (info.proto == Protocol::Tcp, info.state == TcpState::Listen);
    let has_peer = info.peer.port() != 0;
    let state = match (tcp, has_peer) {
        (true, _) => state_of(info.state).into(),
        (false, true) => "connected",
        (false, false) => "open",
    };
    OpenSocketView {
        state: state.to_owned(),
        local: address(info.local),
        peer: has_peer.then(|| address(info.peer)),
        unread: Some(info.receive_queue.into()),
        unsent: (!listens).then_some(info.send_queue.into()),
        ..bare(if tcp { SocketFamily::Tcp } else { SocketFamily::Udp })
    }
}

/// One that is not held, as it was when its program was frozen.
fn of_note(kind: &SocketKind) -> OpenSocketView {
    let (proto, state, local, peer) = match kind {
        SocketKind::Listener { local, .. } => (SocketFamily::Tcp, "listen", Some(local), None),
        SocketKind::Stream { local, peer } => (SocketFamily::Tcp, "established", Some(local), Some(peer)),
        SocketKind::Udp { local } => (SocketFamily::Udp, "open", Some(local), None),
        SocketKind::Runtime => (SocketFamily::Unix, "established", None, None),
        SocketKind::Inotify | SocketKind::Other => (SocketFamily::Socket, "open", None, None),
    };
    OpenSocketView {
        state: state.to_owned(),
        local: local.map(|local| address(*local)).unwrap_or_default(),
        peer: peer.map(|peer| address(*peer)),
        ..bare(proto)
    }
}

fn of_image(inode: u64, state: &UnixState) -> UnixInfo {
    UnixInfo {
        inode,
        kind: state.kind,
        state: state.state,
        name: state.name.clone(),
        peer: state.peer,
        unread: state.queued.min(u32::MAX.into()) as u32,
        unsent: 0,
    }
}
