//! The fd store of one proc, as systemd has one per unit: descriptors that must outlive the
//! processes that use them. These are pipes, port reservations, listeners of probes, and of a
//! parked proc sockets, namespaces and mounts. There are thousands of procs, so nothing is here
//! that lives on without it.
//!
//! Each is here and, under `PROC/KEY`, in the keeper; so daemon or keeper may die. Never interprets
//! a descriptor.

use kip_keeper::Keeper;
pub use kip_keeper::KeeperError;
use kip_keeper::bundle::Bundle;
use kip_types::ProcName;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Fewer than that are not bundled: a bundle takes some 3 KB of the kernel's memory.
const WORTH_A_BUNDLE: usize = 4;

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
    /// Prefix of the daemon's ends of its connections to the runtime socket, by their numbers.
    pub const RUNTIME: &str = "runtime/";
    /// Prefixes of all that it has while it is not stopped.
    pub const ALL_UP: [&str; 5] = [IO, PORT, DNS, RUNTIME, ASLEEP];
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
    /// Prefix of those of its file systems in memory, by number, where these have little in them.
    pub const TMPFS: &str = "asleep/mount/memory/";
    /// Prefix of the INET sockets of a parked proc, and of those to Kip, by inode.
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
    held: Mutex<Held>,
}

/// What this process holds.
#[derive(Debug, Default)]
struct Held {
    open: BTreeMap<String, Arc<OwnedFd>>,
    /// What a sleeper does not need before it wakes, and their keys in order.
    bundled: Option<(Vec<String>, Bundle)>,
}

impl Held {
    /// All of them, open. If there is no room for that the bundle stays as it is.
    fn unpack(&mut self) -> io::Result<()> {
        if let Some((keys, bundle)) = &self.bundled {
            let fds = bundle.unpack()?;
            self.open.extend(keys.iter().cloned().zip(fds.into_iter().map(Arc::new)));
            self.bundled = None;
        }
        Ok(())
    }
}

impl FdStore {
    /// The empty store of a new proc.
    pub fn new(key: &ProcName, keeper: Arc<Keeper>) -> FdStore {
        FdStore { prefix: format!("{key}/"), keeper, held: Mutex::default() }
    }

    /// What an earlier daemon left with the keeper.
    pub fn recover(key: &ProcName, keeper: Arc<Keeper>) -> Result<FdStore, KeeperError> {
        let fd_store = FdStore::new(key, keeper);
        let found = fd_store.keeper.get_prefix(&fd_store.prefix)?;
        let mut held = fd_store.held.lock();
        for (name, fd) in found {
            held.open.insert(name[fd_store.prefix.len()..].to_owned(), Arc::new(fd));
        }
        drop(held);
        Ok(fd_store)
    }

    /// Holds them, in the keeper first: after this neither's death loses them.
    pub fn hold(&self, fds: Vec<(String, OwnedFd)>) -> Result<(), KeeperError> {
        if fds.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = fds.iter().map(|(k, _)| format!("{}{k}", self.prefix)).collect();
        let pairs = names.iter().zip(&fds).map(|(n, (_, fd))| (n.as_str(), fd.as_fd()));
        // A key that is bundled would be there twice. First, for it may fail.
        let mut held = self.held.lock();
        held.unpack().map_err(|source| KeeperError::Answer { source })?;
        self.keeper.put_many(pairs)?;
        held.open.extend(fds.into_iter().map(|(k, fd)| (k, Arc::new(fd))));
        Ok(())
    }

    /// The descriptor of that key. Of one that is bundled a duplicate, which is the caller's alone.
    pub fn get(&self, key: &str) -> Option<Arc<OwnedFd>> {
        let held = self.held.lock();
        if let Some(open) = held.open.get(key) {
            return Some(Arc::clone(open));
        }
        let (keys, bundle) = held.bundled.as_ref()?;
        let at = keys.iter().position(|known| known == key)?;
        match bundle.get(at) {
            Ok(fd) => Some(Arc::new(fd)),
            Err(error) => {
                tracing::error!(prefix = self.prefix, key, %error, "what is held cannot be opened");
                None
            }
        }
    }

    /// The keys with that prefix.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let held = self.held.lock();
        let bundled = held.bundled.as_ref().map(|(keys, _)| keys.as_slice()).unwrap_or_default();
        held.open.keys().chain(bundled).filter(|key| key.starts_with(prefix)).cloned().collect()
    }

    /// Holds all but its pipes, the listeners of its probes and what the daemon may send by as one
    /// descriptor, until [`FdStore::unpack`]; the wake plane has those open that it polls. A
    /// sleeper has a dozen, and a process may have only so many open files. Where that cannot be
    /// had each stays open.
    pub fn pack(&self) {
        let mut held = self.held.lock();
        if let Err(error) = held.unpack() {
            tracing::debug!(prefix = self.prefix, %error, "what is held stays bundled as it is");
            return;
        }
        let stays = |key: &str| [key::IO, key::PROBE, key::RUNTIME].iter().any(|prefix| key.starts_with(prefix));
        let keys: Vec<String> = held.open.keys().filter(|key| !stays(key)).cloned().collect();
        if keys.len() < WORTH_A_BUNDLE {
            return;
        }
        let fds: Vec<BorrowedFd<'_>> = keys.iter().map(|key| held.open[key].as_fd()).collect();
        match Bundle::pack(&fds) {
            Ok(bundle) => {
                held.open.retain(|key, _| stays(key));
                held.bundled = Some((keys, bundle));
            }
            Err(error) => tracing::debug!(prefix = self.prefix, %error, "what is held is not bundled"),
        }
    }

    /// Opens all of them again, at once: for a wake, which needs each.
    ///
    /// # Errors
    /// EMFILE, and all are bundled as before.
    pub fn unpack(&self) -> io::Result<()> {
        self.held.lock().unpack()
    }

    /// Lets all with that prefix go, here and in the keeper.
    pub fn drop_prefix(&self, prefix: &str) -> Result<(), KeeperError> {
        let mut held = self.held.lock();
        let bundled = held.bundled.as_ref().map(|(keys, _)| keys.as_slice()).unwrap_or_default();
        if bundled.iter().all(|key| key.starts_with(prefix)) {
            held.bundled = None;
        } else if bundled.iter().any(|key| key.starts_with(prefix)) {
            held.unpack().map_err(|source| KeeperError::Answer { source })?;
        }
        held.open.retain(|k, _| !k.starts_with(prefix));
        drop(held);
        self.keeper.drop_prefix(&format!("{}{prefix}", self.prefix)).map(|_| ())
    }

    /// Lets one go.
    pub fn drop_key(&self, key: &str) -> Result<(), KeeperError> {
        let mut held = self.held.lock();
        held.unpack().map_err(|source| KeeperError::Answer { source })?;
        held.open.remove(key);
        drop(held);
        self.keeper.drop_name(&format!("{}{key}", self.prefix)).map(drop)
    }

    /// Gives everything to a keeper that was started anew.
    pub fn mirror(&self) -> Result<(), KeeperError> {
        let held = self.held.lock();
        let (keys, bundle) = match &held.bundled {
            Some((keys, bundle)) => {
                (keys.as_slice(), bundle.unpack().map_err(|source| KeeperError::Answer { source })?)
            }
            None => (&[][..], Vec::new()),
        };
        let all = held.open.iter().map(|(key, fd)| (key, fd.as_fd()));
        let all = all.chain(keys.iter().zip(bundle.iter().map(AsFd::as_fd)));
        let pairs: Vec<(String, BorrowedFd<'_>)> = all.map(|(key, fd)| (format!("{}{key}", self.prefix), fd)).collect();
        if pairs.is_empty() { Ok(()) } else { self.keeper.put_many(pairs).map(|_| ()) }
    }
}
