//! The ids by which one thread makes and opens files.

use parking_lot::Mutex;
use rustix::io::{Errno, Result};
use rustix::thread::{capabilities, set_capabilities};

/// Each change of a thread's ids takes the whole process's dumpable flag away: proc_pid(5).
static DUMPABLE: Mutex<()> = Mutex::new(());

/// Carries out a change of a thread's ids; the process is as dumpable afterwards as it was.
pub(crate) fn keeping_dumpable<T>(change: impl FnOnce() -> T) -> T {
    let _one_at_a_time = DUMPABLE.lock();
    // SAFETY: takes and gives plain numbers.
    let dumpable = unsafe { libc::prctl(libc::PR_GET_DUMPABLE) };
    let done = change();
    if dumpable == 1 {
        // SAFETY: as above.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
    }
    done
}

/// Has the calling thread make files as user and group `id`, with the capabilities that it has:
/// setfsgid(2), setfsuid(2). For a thread that ends with that.
///
/// # Errors
/// EPERM: the ids are not the caller's to take. capget(2), capset(2).
pub fn become_maker(id: u32) -> Result<()> {
    // A user other than 0 has those that have to do with files taken out of the effective set.
    let before = capabilities(None)?;
    let now = keeping_dumpable(|| {
        // SAFETY: the calls take a number and change the calling thread's credentials only. They
        // answer what was before, and -1 is no id: it changes nothing.
        unsafe {
            libc::setfsgid(id);
            libc::setfsuid(id);
            (libc::setfsuid(u32::MAX), libc::setfsgid(u32::MAX))
        }
    });
    if now != (id as i32, id as i32) {
        return Err(Errno::PERM);
    }
    set_capabilities(None, before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn files_belong_to_the_ids_of_one_thread() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        std::thread::spawn({
            let one = one.clone();
            move || {
                become_maker(0x2000_0007).expect("root");
                // Into a directory of another's, which its capabilities allow.
                fs::write(one, "").unwrap();
            }
        })
        .join()
        .unwrap();
        fs::write(&other, "").unwrap();
        let made = fs::metadata(one).unwrap();
        assert_eq!((made.uid(), made.gid()), (0x2000_0007, 0x2000_0007));
        assert_eq!(fs::metadata(other).unwrap().uid(), 0);
    }
}
