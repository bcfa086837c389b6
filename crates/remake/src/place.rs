//! Where things are made that belong to a place: a thread that is in the proc's network namespace
//! and has the proc's `/` as its root.

use crate::failure::{RemakeError, system};
use kip_checkpoint::sockets::mounts;
use kip_criu_images::Images;
use kip_sys::netns::enter_net;
use kip_sys::ns::{Unshare, unshare};
use std::io;
use std::os::fd::BorrowedFd;

/// Acts in a thread that is there and ends afterwards. What is not given is the daemon's own.
pub(crate) fn inside<T: Send>(
    network: Option<BorrowedFd<'_>>,
    root: Option<BorrowedFd<'_>>,
    act: impl FnOnce() -> Result<T, RemakeError> + Send,
) -> Result<T, RemakeError> {
    std::thread::scope(|scope| {
        let maker = std::thread::Builder::new().name("kip-remake".to_owned()).spawn_scoped(scope, || {
            move_in(network, root).map_err(system("a thread in the proc's place"))?;
            act()
        });
        maker.map_err(system("a thread"))?.join().expect("the maker does not panic")
    })
}

fn move_in(network: Option<BorrowedFd<'_>>, root: Option<BorrowedFd<'_>>) -> io::Result<()> {
    network.map_or(Ok(()), enter_net)?;
    let Some(root) = root else { return Ok(()) };
    unshare(Unshare { root: true, ..Unshare::default() })?;
    rustix::process::fchdir(root)?;
    rustix::process::chroot(".")?;
    Ok(())
}

/// Whether a path is found in the proc's `/`, by the number that the images have of its mount, a
/// signed one in zigzag: what lies over `/` is attached later. A mount that is none of the tree's
/// is one of `/` of before.
pub(crate) fn is_in_root(images: &Images, path: &[u8], mount: Option<u64>) -> Result<bool, RemakeError> {
    let Some(mount) = mount.filter(|id| id & 1 == 0).map(|id| id >> 1) else { return Ok(false) };
    let mounts = mounts(images)?;
    let is_in_usr = path == b"/usr" || path.starts_with(b"/usr/");
    Ok(path.starts_with(b"/") && !is_in_usr && mounts.get(&mount).is_none_or(|place| place == "/"))
}
