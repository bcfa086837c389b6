//! Files of the host in a sandbox: a mount of one file or directory, without what is mounted below
//! it, in which the ids that are on the disk are the proc's own. So what is root's there is root's
//! inside, and nothing on the disk speaks of blocks of ids.
//!
//! The mounts are detached, as those of the root are; a start attaches them and makes what they lie
//! on. Setuid programs, devices and, if so wanted, changes are switched off in the mount, where no
//! process in the sandbox can switch them on.

use kip_types::spec::Tmpfs;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen, open_tree,
};
use std::fs::File;
use std::io::{self, Write};
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

/// Mounts `path`, which is absolute and has no symbolic link in it, with the mapping of ids of a
/// user namespace.
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

/// A new file system in memory that is never swapped, with these files, mode 0400, of `owner`; the
/// directory belongs to `root`. Both are ids of the host. Read-only once it is made.
///
/// # Errors
/// The kernel's: no memory, no CAP_SYS_ADMIN.
pub fn in_memory<'a>(
    files: impl Iterator<Item = (&'a str, &'a [u8])>,
    target: &str,
    root: u32,
    owner: (u32, u32),
) -> io::Result<Volume> {
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    // Before Linux 6.4 a tmpfs may be swapped; a ramfs never is.
    let context = match tmpfs_without_swap() {
        Err(Errno::INVAL) => {
            let context = fsopen("ramfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&context)?;
            context
        }
        context => context?,
    };
    let fd = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let ids = (rustix::process::Uid::from_raw(root), rustix::process::Gid::from_raw(root));
    rustix::fs::chownat(&fd, ".", Some(ids.0), Some(ids.1), rustix::fs::AtFlags::empty())?;
    for (name, contents) in files {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(&fd, name, flags, Mode::from(0o400))?);
        file.write_all(contents)?;
        std::os::unix::fs::fchown(&file, Some(owner.0), Some(owner.1))?;
    }
    kip_sys::mount::restrict(fd.as_fd(), attributes | MountAttrFlags::MOUNT_ATTR_RDONLY)?;
    let inode = rustix::fs::fstat(&fd)?.st_ino;
    Ok(Volume { fd, target: target.to_owned(), is_dir: true, inode })
}

/// A new file system in memory, empty, with these attributes beside nosuid and nodev, whose root
/// belongs to `owner`, ids of the host.
///
/// # Errors
/// The kernel's: no memory, no CAP_SYS_ADMIN.
pub fn tmpfs(of: &Tmpfs, target: &str, owner: (u32, u32)) -> io::Result<Volume> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", "kip")?;
    fsconfig_set_string(&context, "mode", format!("{:o}", of.mode))?;
    if let Some(bytes) = of.size_bytes {
        fsconfig_set_string(&context, "size", bytes.to_string())?;
    }
    fsconfig_create(&context)?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, !of.exec);
    let fd = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let ids = (rustix::process::Uid::from_raw(owner.0), rustix::process::Gid::from_raw(owner.1));
    rustix::fs::chownat(&fd, ".", Some(ids.0), Some(ids.1), rustix::fs::AtFlags::empty())?;
    let inode = rustix::fs::fstat(&fd)?.st_ino;
    Ok(Volume { fd, target: target.to_owned(), is_dir: true, inode })
}

fn tmpfs_without_swap() -> rustix::io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_flag(&context, "noswap")?;
    fsconfig_set_string(&context, "mode", "0755")?;
    fsconfig_create(&context)?;
    Ok(context)
}
