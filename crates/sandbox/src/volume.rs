//! Files of the host in a sandbox: a mount of one file or directory, without what is mounted below it, in which the ids that
//! are on the disk are the proc's own. So what is root's there is root's inside, and nothing on the disk speaks of blocks of ids.
//!
//! The mounts are detached, as those of the root are; a start attaches them and makes what they lie on. Setuid programs, devices
//! and, if so wanted, changes are switched off in the mount, where nobody in the sandbox can switch them on.

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, OpenTreeFlags, open_tree};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A volume as a detached mount that can be attached once.
#[derive(Debug)]
pub struct Volume {
    /// The mount.
    pub fd: OwnedFd,
    /// Where inside, absolute.
    pub target: String,
    /// A directory; else a file.
    pub is_dir: bool,
    /// Of its root on the file system.
    pub inode: u64,
}

/// A volume could not be mounted.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// Nothing is there.
    #[error("there is no {}", path.display())]
    Missing {
        /// Its path on the host.
        path: PathBuf,
    },
    /// It has become a symbolic link, or one is in its path.
    #[error("a symbolic link is in the path {}, where none was when the proc was made", path.display())]
    Link {
        /// Its path on the host.
        path: PathBuf,
    },
    /// Neither file nor directory.
    #[error("{} is neither a file nor a directory", path.display())]
    Kind {
        /// Its path on the host.
        path: PathBuf,
    },
    /// The file system cannot show its files with other owners.
    #[error("the file system of {} cannot be mounted with a mapping of user ids: keep the volume on ext4, xfs or btrfs", path.display())]
    NoMapping {
        /// Its path on the host.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Something else.
    #[error("{} cannot be opened", path.display())]
    Open {
        /// Its path on the host.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// Mounts `path`, which is absolute and has no symbolic link in it, with the mapping of ids of a user namespace.
///
/// # Errors
/// See [`VolumeError`].
pub fn mount(
    path: &Path,
    target: &str,
    user_namespace: BorrowedFd<'_>,
    read_only: bool,
) -> Result<Volume, VolumeError> {
    let at = |e: Errno| match e {
        Errno::NOENT | Errno::NOTDIR => VolumeError::Missing { path: path.to_owned() },
        Errno::LOOP => VolumeError::Link { path: path.to_owned() },
        other => VolumeError::Open { path: path.to_owned(), source: other.into() },
    };
    let found = rustix::fs::openat2(
        CWD,
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS,
    );
    let found = found.map_err(at)?;
    let stat = rustix::fs::fstat(&found).map_err(at)?;
    let is_dir = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => true,
        FileType::RegularFile => false,
        FileType::Symlink => return Err(VolumeError::Link { path: path.to_owned() }),
        _ => return Err(VolumeError::Kind { path: path.to_owned() }),
    };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let fd = open_tree(&found, "", flags).map_err(at)?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, read_only);
    kip_sys::mount::idmap_private(fd.as_fd(), user_namespace, attributes)
        .map_err(|source| VolumeError::NoMapping { path: path.to_owned(), source })?;
    Ok(Volume { fd, target: target.to_owned(), is_dir, inode: stat.st_ino })
}
