//! Terminals of a sandbox: a devpts of its own at `/dev/pts`, where programs make pseudoterminals
//! and Kip makes those of its clients.
//!
//! The file system lives as long as one mount of it or one open terminal. Its mount is attached as
//! volumes are, and for CRIU it is a mount from outside. A terminal itself is the kernel's: what is
//! in its queues, its settings and its size outlive every process that has it open as long as a
//! descriptor of it is held. Source: pts(4), tty_ioctl(4).

use crate::volume::Volume;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Where it is mounted inside.
pub const TARGET: &str = "/dev/pts";
/// The key by which CRIU knows the mount.
pub const KEY: &str = "terminals";
/// Most terminals of a sandbox.
const MOST: u32 = 64;
/// The group `tty` inside.
const TTY_GROUP: u32 = 5;

/// A new devpts as a detached mount, for a sandbox whose id 0 is `first_id` on the host.
///
/// # Errors
/// fsopen(2), fsconfig(2), fsmount(2).
pub fn mount(first_id: u32) -> io::Result<Volume> {
    let context = fsopen("devpts", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "ptmxmode", "0666")?;
    fsconfig_set_string(&context, "mode", "0620")?;
    // The kernel has some thousands for all of the machine.
    fsconfig_set_string(&context, "max", MOST.to_string())?;
    fsconfig_set_string(&context, "gid", (first_id + TTY_GROUP).to_string())?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let fd = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    Ok(mounted(fd))
}

/// A mount of such a file system that was held.
pub fn mounted(fd: OwnedFd) -> Volume {
    Volume { fd, target: TARGET.to_owned(), is_dir: true, inode: 1 }
}

/// A pseudoterminal.
#[derive(Debug)]
pub struct Terminal {
    /// The side of the client, nonblocking: what is written here the program reads.
    pub master: OwnedFd,
    /// The side of the program.
    pub slave: OwnedFd,
}

/// Makes a terminal in the sandbox whose root directory is `root`; `owner` is the host's user that
/// it belongs to.
///
/// # Errors
/// `NotFound`: the sandbox has no terminals, for an older Kip has started it. Else open(2),
/// ioctl(2).
pub fn open(root: BorrowedFd<'_>, owner: u32) -> io::Result<Terminal> {
    open_in(find(root)?.as_fd(), owner)
}

/// The same in such a file system, which need not be attached yet.
///
/// # Errors
/// open(2), ioctl(2).
pub fn open_in(directory: BorrowedFd<'_>, owner: u32) -> io::Result<Terminal> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let master = rustix::fs::openat(directory, "ptmx", flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    let open = rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY | rustix::pty::OpenptFlags::CLOEXEC;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, open)?;
    std::os::unix::fs::fchown(&slave, Some(owner), None)?;
    Ok(Terminal { master, slave })
}

/// The sandbox's `/dev/pts`, if that is a devpts: a tenant may have put anything else there.
fn find(root: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    /// linux/magic.h.
    const DEVPTS: i64 = 0x1cd1;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = rustix::fs::ResolveFlags::IN_ROOT | rustix::fs::ResolveFlags::NO_MAGICLINKS;
    let directory = kip_sys::within::open(root, TARGET, flags, resolve)?;
    if rustix::fs::fstatfs(&directory)?.f_type != DEVPTS {
        return Err(Errno::NOENT.into());
    }
    Ok(directory)
}

/// The device number of a sandbox's devpts, if it has one; `root` is its root directory.
pub fn device(root: BorrowedFd<'_>) -> Option<u64> {
    find(root).ok().and_then(|directory| Some(rustix::fs::fstat(directory.as_fd()).ok()?.st_dev))
}
