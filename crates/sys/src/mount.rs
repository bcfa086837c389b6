//! The one mount system call that rustix does not have: changing a detached mount, in particular its mapping of user ids.

use rustix::mount::{MountAttrFlags, MountPropagationFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Makes the files of a detached mount (open_tree(2) with OPEN_TREE_CLONE) appear with the ids that the user namespace
/// maps them to: mount_setattr(2) with MOUNT_ATTR_IDMAP, Linux 5.12; as an overlay's lower layer, 5.19.
///
/// # Errors
/// EINVAL when the filesystem has no such mounts (overlayfs has not; tmpfs only from 6.3) or the mount was in use or
/// mapped already, EPERM without CAP_SYS_ADMIN or for the initial user namespace.
pub fn idmap(tree: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    set(tree, user_namespace, MountAttrFlags::empty(), MountPropagationFlags::empty())
}

/// The same of a mount that is given into a sandbox: beside the mapping it gets these attributes, and nothing that is mounted
/// below it on the host arrives.
///
/// # Errors
/// As [`idmap`].
pub fn idmap_private(
    tree: BorrowedFd<'_>,
    user_namespace: BorrowedFd<'_>,
    attributes: MountAttrFlags,
) -> io::Result<()> {
    set(tree, user_namespace, attributes, MountPropagationFlags::PRIVATE)
}

fn set(
    tree: BorrowedFd<'_>,
    user_namespace: BorrowedFd<'_>,
    attributes: MountAttrFlags,
    propagation: MountPropagationFlags,
) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | u64::from(attributes.bits()),
        attr_clr: 0,
        propagation: u64::from(propagation.bits()),
        userns_fd: user_namespace.as_raw_fd() as u64,
    };
    // SAFETY: the path is an empty C string with static lifetime, `attributes` lives through the call and its size is
    // what is passed; the kernel only reads both.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::CWD;
    use rustix::mount::{OpenTreeFlags, open_tree};
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn the_initial_user_namespace_is_refused() {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = match open_tree(CWD, "/usr", flags) {
            Ok(tree) => tree,
            Err(e) => return eprintln!("SKIPPED: open_tree needs root: {e}"),
        };
        let initial = File::open("/proc/self/ns/user").unwrap();
        assert_eq!(idmap(tree.as_fd(), initial.as_fd()).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert!(idmap(tree.as_fd(), tree.as_fd()).is_err());
    }
}
