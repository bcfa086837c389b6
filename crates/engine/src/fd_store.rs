//! The fd store of one proc, as systemd has one per unit: descriptors that must outlive the
//! processes that use them. These are pipes, port reservations, listeners of probes, and of a
//! parked proc sockets, namespaces and mounts. There are thousands of procs, so nothing is here
//! that lives on without it.
//!
//! Each is here and, under `PROC/KEY`, in the keeper; so daemon or keeper may die. Never interprets
//! a descriptor.

use kip_keeper::{Keeper, KeeperError};
use kip_types::ProcName;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Keys of the descriptors that every proc has.
pub mod key {
    /// Prefix of the pipes.
    pub const IO: &str = "io/";
    /// Standard output: the pipe, open at both ends by one descriptor.
    pub const OUT: &str = "io/out";
    /// Standard error, likewise.
    pub const ERR: &str = "io/err";
    /// Standard input, likewise, if it is open and no terminal.
    pub const IN: &str = "io/in";
    /// The client's side of the proc's own terminal, if it has one.
    pub const TERMINAL: &str = "io/terminal";
    /// What pid 1 reports, likewise.
    pub const STATUS: &str = "io/status";
    /// The pipes that its program has from outside, each with whether the program reads it.
    pub const PIPES: [(&str, bool); 4] = [(OUT, false), (ERR, false), (STATUS, false), (IN, true)];
    /// Prefix of port reservations.
    pub const PORT: &str = "port/";
    /// Prefix of the listeners of its probes, by port. They are there as long as the proc is.
    pub const PROBE: &str = "probe/";
    /// Prefix of the sockets of its resolver, which are in its network namespace.
    pub const DNS: &str = "dns/";
    /// That for datagrams.
    pub const DNS_UDP: &str = "dns/udp";
    /// That which listens.
    pub const DNS_TCP: &str = "dns/tcp";
    /// Prefixes of all that it has while it is not stopped.
    pub const ALL_UP: [&str; 4] = [IO, PORT, DNS, ASLEEP];
    /// Prefix of all that is held only while the proc is parked.
    pub const ASLEEP: &str = "asleep/";
    /// Network namespace of a parked proc. While it has processes these have it.
    pub const NET: &str = "asleep/ns/net";
    /// UTS namespace.
    pub const UTS: &str = "asleep/ns/uts";
    /// IPC namespace; it belongs to the proc's user namespace, which lives by it.
    pub const IPC: &str = "asleep/ns/ipc";
    /// The user namespace where the IPC namespace is not held: it is in the snapshot.
    pub const USER: &str = "asleep/ns/user";
    /// Prefix of the mounts of its files.
    pub const MOUNTS: &str = "asleep/mount/";
    /// Another mount of its `/`.
    pub const ROOT: &str = "asleep/mount/root";
    /// And of its `/usr`.
    pub const USR: &str = "asleep/mount/usr";
    /// And of its terminals, if some are open.
    pub const TERMINALS: &str = "asleep/mount/terminals";
    /// Prefix of the INET sockets of a parked proc, by inode.
    pub const SOCKET: &str = "asleep/socket/";
    /// Prefix of the inotify instances of a parked proc, by the file's id in the images.
    pub const INOTIFY: &str = "asleep/inotify/";
    /// Prefix of what else the kernel keeps of a parked proc, by the file's id in the images.
    pub const OBJECT: &str = "asleep/object/";
}

/// The descriptors of one proc, held by the daemon and the keeper.
#[derive(Debug)]
pub struct FdStore {
    prefix: String,
    keeper: Arc<Keeper>,
    held: Mutex<BTreeMap<String, Arc<OwnedFd>>>,
}

impl FdStore {
    /// The empty store of a new proc.
    pub fn new(name: &ProcName, keeper: Arc<Keeper>) -> FdStore {
        FdStore { prefix: format!("{name}/"), keeper, held: Mutex::new(BTreeMap::new()) }
    }

    /// What an earlier daemon left with the keeper.
    pub fn recover(name: &ProcName, keeper: Arc<Keeper>) -> Result<FdStore, KeeperError> {
        let fd_store = FdStore::new(name, keeper);
        let found = fd_store.keeper.get_prefix(&fd_store.prefix)?;
        let mut held = fd_store.held.lock();
        for (name, fd) in found {
            held.insert(name[fd_store.prefix.len()..].to_owned(), Arc::new(fd));
        }
        drop(held);
        Ok(fd_store)
    }

    /// Holds them, in the keeper first: after this neither's death loses them.
    pub fn hold(&self, fds: Vec<(String, OwnedFd)>) -> Result<(), KeeperError> {
        let names: Vec<String> = fds.iter().map(|(k, _)| format!("{}{k}", self.prefix)).collect();
        let pairs = names.iter().zip(&fds).map(|(n, (_, fd))| (n.as_str(), fd.as_fd()));
        self.keeper.put_many(pairs)?;
        self.held.lock().extend(fds.into_iter().map(|(k, fd)| (k, Arc::new(fd))));
        Ok(())
    }

    /// The descriptor of that key.
    pub fn get(&self, key: &str) -> Option<Arc<OwnedFd>> {
        self.held.lock().get(key).cloned()
    }

    /// Lets all with that prefix go, here and in the keeper.
    pub fn drop_prefix(&self, prefix: &str) -> Result<(), KeeperError> {
        self.held.lock().retain(|k, _| !k.starts_with(prefix));
        self.keeper.drop_prefix(&format!("{}{prefix}", self.prefix)).map(|_| ())
    }

    /// Gives everything to a keeper that was started anew.
    pub fn mirror(&self) -> Result<(), KeeperError> {
        let held = self.held.lock();
        let names: Vec<String> = held.keys().map(|k| format!("{}{k}", self.prefix)).collect();
        let pairs: Vec<(&str, BorrowedFd<'_>)> =
            names.iter().map(String::as_str).zip(held.values().map(|fd| fd.as_fd())).collect();
        if pairs.is_empty() { Ok(()) } else { self.keeper.put_many(pairs).map(|_| ()) }
    }
}
