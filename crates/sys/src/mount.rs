//! What rustix does not have of mounts: changing a detached one, in particular its mapping of user
//! ids, opening a file without a name by one, and giving back what is free in one.

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountAttrFlags, MountPropagationFlags};
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const TRIM: libc::c_ulong = 0xc018_5879;

/// Room for a handle, `MAX_HANDLE_SZ`.
const HANDLE_BYTES: usize = 128;

/// `struct file_handle` with room.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: c_int,
    data: [u8; HANDLE_BYTES],
}

/// Makes the files of a detached mount (open_tree(2) with OPEN_TREE_CLONE) appear with the ids that
/// the user namespace maps them to: mount_setattr(2) with MOUNT_ATTR_IDMAP, Linux 5.12; as an
/// overlay's lower layer, 5.19.
///
/// # Errors
/// EINVAL when the filesystem has no such mounts (overlayfs has not; tmpfs only from 6.3) or the
/// mount was in use or mapped already, EPERM without CAP_SYS_ADMIN or for the initial user
/// namespace.
pub fn idmap(tree: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    set(tree, Some(user_namespace), MountAttrFlags::empty(), MountPropagationFlags::empty())
}

/// The same of a mount that is given into a sandbox: beside the mapping it gets these attributes,
/// and nothing that is mounted below it on the host arrives.
///
/// # Errors
/// As [`idmap`].
pub fn idmap_private(
    tree: BorrowedFd<'_>,
    user_namespace: BorrowedFd<'_>,
    attributes: MountAttrFlags,
) -> io::Result<()> {
    set(tree, Some(user_namespace), attributes, MountPropagationFlags::PRIVATE)
}

/// Gives a detached mount (fsmount(2)) these attributes: mount_setattr(2), Linux 5.12.
///
/// # Errors
/// EBUSY when it is to be read-only and a file in it is open for writing, EPERM without
/// CAP_SYS_ADMIN.
pub fn restrict(mount: BorrowedFd<'_>, attributes: MountAttrFlags) -> io::Result<()> {
    set(mount, None, attributes, MountPropagationFlags::PRIVATE)
}

fn set(
    tree: BorrowedFd<'_>,
    user_namespace: Option<BorrowedFd<'_>>,
    attributes: MountAttrFlags,
    propagation: MountPropagationFlags,
) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: user_namespace.map_or(0, |_| libc::MOUNT_ATTR_IDMAP) | u64::from(attributes.bits()),
        attr_clr: 0,
        propagation: u64::from(propagation.bits()),
        userns_fd: user_namespace.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    // SAFETY: the path is an empty C string with static lifetime, `attributes` lives through the
    // call and its size is what is passed; the kernel only reads both.
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

/// Opens an open file once more, by a mount of its filesystem, whether it has a name or not:
/// name_to_handle_at(2) and open_by_handle_at(2), Linux 2.6.39.
///
/// # Errors
/// EOPNOTSUPP when the filesystem has no handles (an overlay needs `nfs_export=on`), ESTALE when it
/// does not find deleted files by them, EPERM without CAP_DAC_READ_SEARCH.
pub fn open_again(file: BorrowedFd<'_>, mount: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    let mut handle = Handle { bytes: HANDLE_BYTES as u32, kind: 0, data: [0; HANDLE_BYTES] };
    let mut mount_id: c_int = 0;
    let (path, empty) = (c"".as_ptr(), libc::AT_EMPTY_PATH);
    // SAFETY: the path is an empty C string with static lifetime; `handle` has as much room as it
    // says, and it and `mount_id` live through the call, which writes to them only.
    let done = unsafe {
        libc::syscall(libc::SYS_name_to_handle_at, file.as_raw_fd(), path, &mut handle, &mut mount_id, empty)
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    // A descriptor that only stands for a place will not do.
    let directory = rustix::fs::openat(mount, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: `handle` was filled by the kernel and is only read; it lives through the call.
    let fd =
        unsafe { libc::syscall(libc::SYS_open_by_handle_at, directory.as_raw_fd(), &handle, flags.bits() as c_int) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// Tells the device of a filesystem, of which `root` is a directory, what is free in it: ioctl(2)
/// FITRIM, as fstrim(8).
///
/// # Errors
/// EOPNOTSUPP where device or filesystem have nothing of the kind, EPERM without CAP_SYS_ADMIN.
pub fn trim(root: BorrowedFd<'_>) -> io::Result<()> {
    // struct fstrim_range: from where, how much, at least so much in one piece.
    let mut range = [0, u64::MAX, 0];
    // SAFETY: `range` has the layout and size that this request reads and writes, and lives through
    // the call.
    match unsafe { libc::ioctl(root.as_raw_fd(), TRIM, range.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::CWD;
    use rustix::mount::{OpenTreeFlags, open_tree};
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn a_deleted_file_is_opened_again_by_another_mount() {
        use std::io::{Read, Seek, Write};
        let path = std::env::temp_dir().join(format!("kip-sys-open-again-{}", std::process::id()));
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(CWD, std::env::temp_dir(), flags).expect("the tests run as root");
        let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(b"still here").unwrap();
        let mut again = File::from(open_again(file.as_fd(), tree.as_fd(), OFlags::RDWR).unwrap());
        let mut text = String::new();
        again.read_to_string(&mut text).unwrap();
        assert_eq!(text, "still here");
        again.write_all(b", and written").unwrap();
        file.rewind().unwrap();
        text.clear();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "still here, and written");
        let (other, _) = rustix::pipe::pipe().unwrap();
        assert!(open_again(other.as_fd(), tree.as_fd(), OFlags::RDONLY).is_err());
    }

    #[test]
    fn the_initial_user_namespace_is_refused() {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(CWD, "/usr", flags).expect("the tests run as root");
        let initial = File::open("/proc/self/ns/user").unwrap();
        assert_eq!(idmap(tree.as_fd(), initial.as_fd()).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert!(idmap(tree.as_fd(), tree.as_fd()).is_err());
    }
}
