//! The mounts of a proc while they are attached nowhere.

use crate::volume::Volume;
use rustix::mount::{OpenTreeFlags, open_tree};
use std::io;
use std::os::fd::OwnedFd;

/// The two overlays of a proc, as detached mounts that can be attached once, and its volumes.
#[derive(Debug)]
pub struct Mounts {
    /// `/`
    pub root: OwnedFd,
    /// `/usr`
    pub usr: OwnedFd,
    /// The file system of its terminals, of a proc that runs or is parked with some open.
    pub terminals: Option<OwnedFd>,
    /// What lies on them, in the order in which it is attached.
    pub volumes: Vec<Volume>,
}

impl Mounts {
    /// Other detached mounts of the same overlays, so that the originals can be kept and given out
    /// again and again: open_tree(2), from Linux 6.15 on. On older kernels mount again when the old
    /// mounts are gone.
    ///
    /// # Errors
    /// EINVAL where it does not work, and when the mount was attached and has been unmounted since.
    pub fn duplicate(&self) -> io::Result<Mounts> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        Ok(Mounts {
            root: open_tree(&self.root, "", flags)?,
            usr: open_tree(&self.usr, "", flags)?,
            terminals: None,
            volumes: Vec::new(),
        })
    }
}
