//! A proc's files as a tree to copy from and to, in every tier that has them on this machine,
//! without a wake.
//!
//! Of a proc that runs or is hibernated they are seen through its mount namespace, which touches no
//! process. Of a parked one they are the mounts that are held for its wake; of a stopped one, and
//! of a parked one whose mounts are not held, new ones, which must be gone before it starts or
//! wakes.

use crate::host::Proc;
use crate::{pins, volumes};
use kip_files::tree::RootTree;
use kip_sandbox::launcher::LaunchError;
use kip_sandbox::rootfs::{Mounts, RootfsError};
use kip_sandbox::volume::VolumeError;
use kip_types::VolumeSource;
use kip_types::spec::SHM;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// The files are not to be had.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum NoFiles {
    #[error("its processes are not there any more")]
    Ended,
    #[error("its mount namespace cannot be opened")]
    Root(#[source] io::Error),
    #[error("its user namespace is not to be had")]
    User(#[source] io::Error),
    #[error("its user namespace cannot be made")]
    NewUser(#[source] LaunchError),
    #[error("its files cannot be mounted")]
    Mounts(#[source] RootfsError),
    #[error("its volume is not to be had")]
    Volume(#[from] VolumeError),
    #[error("its files cannot be put together")]
    Tree(#[source] io::Error),
}

/// Those of a proc that runs or is hibernated.
///
/// # Errors
/// It has ended.
pub fn awake(proc: &Proc) -> Result<RootTree, NoFiles> {
    let init = proc.init_pid().ok_or(NoFiles::Ended)?;
    let process = File::open(format!("/proc/{init}")).map_err(NoFiles::Root)?;
    // The number was the proc's when that was opened, and no other process's.
    if proc.init_pid() != Some(init) {
        return Err(NoFiles::Ended);
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(&process, "root", flags, Mode::empty());
    Ok(RootTree::of_proc(root.map_err(|e| NoFiles::Root(e.into()))?))
}

/// Those of a parked proc.
///
/// # Errors
/// See [`NoFiles`].
pub fn parked(proc: &Proc) -> Result<RootTree, NoFiles> {
    let user = proc.held_user().map_err(NoFiles::User)?;
    let mounts = match proc.held_mounts(true).or_else(|| proc.held_mounts(false)) {
        Some(mounts) => mounts,
        None => new_mounts(proc, &user)?,
    };
    assemble(proc, mounts.root, mounts.usr, &user)
}

/// Those of a stopped proc.
///
/// # Errors
/// See [`NoFiles`].
pub fn stopped(proc: &Proc) -> Result<RootTree, NoFiles> {
    let namespaces = proc.shared.launcher().namespaces(proc.first_id(), proc.spec().hostname());
    let user = namespaces.map_err(NoFiles::NewUser)?.user;
    let mounts = new_mounts(proc, &user)?;
    assemble(proc, mounts.root, mounts.usr, &user)
}

/// Over the same layers as the last ones, which an overlay remembers.
fn new_mounts(proc: &Proc, user: &OwnedFd) -> Result<Mounts, NoFiles> {
    let mounts = proc.mounts_of(user.as_fd(), pins::are_in_use(&proc.dir.join("pins"))).map_err(NoFiles::Mounts)?;
    proc.restrict(&mounts).map_err(NoFiles::Mounts)?;
    Ok(mounts)
}

fn assemble(proc: &Proc, root: OwnedFd, usr: OwnedFd, user: &OwnedFd) -> Result<RootTree, NoFiles> {
    let mut tree = mounted(proc, root, usr, user)?;
    let spec = proc.spec();
    let secrets = spec.volumes.iter().filter(|volume| volume.source == VolumeSource::Secrets);
    let secrets = secrets.map(|volume| volume.target.as_str());
    let in_memory = spec.tmpfs.iter().map(|one| one.target.as_str());
    for path in ["/proc", "/dev/pts", SHM].into_iter().chain(in_memory).chain(secrets) {
        tree.made_up(Path::new(path)).map_err(broken)?;
    }
    Ok(tree)
}

fn broken(e: rustix::io::Errno) -> NoFiles {
    NoFiles::Tree(e.into())
}

/// Its files by these mounts of `/` and `/usr`, attached or not, and its volumes.
pub(crate) fn mounted(proc: &Proc, root: OwnedFd, usr: OwnedFd, user: &OwnedFd) -> Result<RootTree, NoFiles> {
    let mut tree = RootTree::of_proc(root);
    tree.cover(Path::new("/usr"), usr).map_err(broken)?;
    for volume in volumes::for_files(proc, user.as_fd())? {
        tree.cover(Path::new(&volume.target), volume.fd).map_err(broken)?;
    }
    Ok(tree)
}
