//! Network namespaces of threads: unshare(2), setns(2), network_namespaces(7).
//!
//! Both calls change the calling thread only. The caller owns that thread and ends it or brings it
//! back.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// Puts the calling thread into a fresh network namespace, owned by its user namespace. Needs
/// `CAP_SYS_ADMIN`.
pub fn unshare_net() -> io::Result<()> {
    // SAFETY: unshare takes flags only; CLONE_NEWNET affects no memory, file table or other thread.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Puts the calling thread into the given network namespace. Needs `CAP_SYS_ADMIN` there.
pub fn enter_net(namespace: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: setns takes a descriptor and a flag and touches no memory of ours.
    let rc = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The calling thread's network namespace.
pub fn current_net() -> io::Result<OwnedFd> {
    Ok(std::fs::File::open("/proc/thread-self/ns/net")?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::linux::fs::MetadataExt;

    fn inode(fd: &OwnedFd) -> u64 {
        std::fs::File::from(fd.try_clone().unwrap()).metadata().unwrap().st_ino()
    }

    #[test]
    fn a_thread_leaves_and_comes_back() {
        let before = current_net().unwrap();
        let (inside, after) = std::thread::scope(|s| {
            let t = s.spawn(|| {
                unshare_net().unwrap();
                let inside = inode(&current_net().unwrap());
                enter_net(before.as_fd()).unwrap();
                (inside, inode(&current_net().unwrap()))
            });
            t.join().unwrap()
        });
        assert_ne!(inside, inode(&before));
        assert_eq!(after, inode(&before));
    }
}
