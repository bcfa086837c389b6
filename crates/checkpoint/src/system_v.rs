//! System V IPC of a running proc, sysvipc(7): whether it goes into the snapshot.
//!
//! Objects live in the IPC namespace, which the proc's processes keep. Where there are any, the
//! namespace is not held through the sleep: its objects are in the snapshot, and a wake makes them
//! in a new one. So they survive the machine, segments that only processes keep come back, and the
//! kernel's memory of them is free meanwhile.

use kip_clocks::tree::Tree;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

/// Files of /proc/sysvipc, proc(5): a line for each object below a title. They show the namespace
/// of the thread that opens them.
const LISTS: [&str; 3] = ["shm", "sem", "msg"];

/// Whether the IPC namespace of a proc goes into its snapshot. `init` is the host pid of its pid 1.
///
/// # Errors
/// /proc; ENOMEM.
pub fn has_own_ipc(tree: &Tree, init: u32) -> io::Result<bool> {
    if tree.maps_system_v() {
        return Ok(true);
    }
    // CRIU takes them from no other: after a wake that made the user namespace anew they stay in
    // the one that is held.
    let user = fs::metadata(format!("/proc/{init}/ns/user"))?;
    let owner = kip_sys::ns::owner(File::open(format!("/proc/{init}/ns/ipc"))?.as_fd())?;
    Ok(File::from(owner).metadata()?.ino() == user.ino() && has_objects(init)?)
}

/// Whether there is anything in the IPC namespace of a process.
fn has_objects(pid: u32) -> io::Result<bool> {
    let namespace = File::open(format!("/proc/{pid}/ns/ipc"))?;
    let look = || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::InterProcessCommunication))?;
        for list in LISTS {
            if fs::read_to_string(format!("/proc/sysvipc/{list}"))?.lines().count() > 1 {
                return Ok(true);
            }
        }
        Ok(false)
    };
    // A thread's namespaces are its own, and this one ends in it.
    std::thread::scope(|scope| scope.spawn(look).join()).expect("looking does not panic")
}
