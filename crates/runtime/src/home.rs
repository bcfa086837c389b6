//! What the runtime socket asks of procs.

use crate::wire::RuntimeIdentity;
use kip_types::ProcName;
use kip_types::spec::TreeAccess;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// What is held of a connection: the daemon's end, and its memory.
pub(crate) const SOCKET: &str = "socket";
pub(crate) const MEMORY: &str = "memory";

/// What a proc is at, as far as its leases depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HomeLife {
    /// Its program runs, and keeps its leases alive itself.
    Awake,
    /// Its program sleeps.
    Asleep,
    /// It has none.
    Ended,
}

/// A proc, as the runtime socket has to know it. Calls may block for a moment.
pub trait RuntimeHome: Send + Sync + 'static {
    /// Its identity, the answer to `whoami`.
    fn identity(&self) -> RuntimeIdentity;

    /// Its key, which stays when it is renamed.
    fn key(&self) -> ProcName;

    /// Its name of now.
    fn name(&self) -> ProcName;

    /// Whether its programs may spawn procs, wait for spawned ones and evict them.
    fn may_spawn(&self) -> bool;

    /// What its programs may do to the name tree.
    fn tree(&self) -> TreeAccess;

    /// What it is at.
    fn life(&self) -> HomeLife;

    /// Its directory, which goes with it.
    fn directory(&self) -> PathBuf;

    /// Holds descriptors of a connection of that number under these names, so that the next daemon
    /// has them.
    ///
    /// # Errors
    /// They are not held.
    fn hold(&self, connection: u64, fds: Vec<(&'static str, OwnedFd)>) -> io::Result<()>;

    /// One that is held.
    fn held(&self, connection: u64, name: &str) -> Option<Arc<OwnedFd>>;

    /// Numbers of the connections of which something is held.
    fn connections(&self) -> Vec<u64>;

    /// Lets all of a connection go.
    fn let_go(&self, connection: u64);
}

/// All procs.
pub trait RuntimeHomes: Send + Sync + 'static {
    /// The proc that has this user id of the machine among its own.
    fn of_user(&self, uid: u32) -> Option<Arc<dyn RuntimeHome>>;

    /// Each of them.
    fn all(&self) -> Vec<Arc<dyn RuntimeHome>>;
}
