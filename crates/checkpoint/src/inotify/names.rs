//! Names of watched directories, which the kernel must know when they are dumped.
//!
//! An overlay tells the handle of a directory of a lower layer only while it has a name of that
//! directory in its cache: the watch keeps the inode and no name. /proc leaves the handle out
//! then, and CRIU takes that for an error. A name is forgotten when memory is short, and when the
//! mount namespace ends in which it was used: at each sleep. Here the names are looked up again.
//! Nothing is opened but directories, and no symbolic link is followed.

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, open, openat, statat};
use std::fs;
use std::os::fd::OwnedFd;

/// Names that are looked up at most: about a second.
const MOST: usize = 500_000;
/// Between looks whether all are known.
const BETWEEN: usize = 64;
const DEEPEST: usize = 64;

/// Makes the kernel know the names of what the processes of a proc watch in their own files.
/// `places` is where their inotify instances are open: host pid, descriptor.
pub fn look_up(places: Vec<(u32, i32)>) {
    let lacking: Vec<_> = places.into_iter().filter(|&place| lacks(place)).collect();
    let Some(&(pid, _)) = lacking.first() else { return };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(root) = open(format!("/proc/{pid}/root"), flags, Mode::empty()) else { return };
    let usr = openat(&root, "usr", flags | OFlags::NOFOLLOW, Mode::empty());
    let mut walk = Walk { device: 0, looked_up: 0, lacking };
    // Each is a file system of its own.
    for top in [Some(root), usr.ok()].into_iter().flatten() {
        let Ok(device) = fstat(&top).map(|stat| stat.st_dev) else { continue };
        walk.device = device;
        if !walk.directory(&top, 0) {
            break;
        }
    }
    if !walk.are_known() {
        tracing::debug!(pid, looked_up = walk.looked_up, "the names of some watches are not known");
    }
}

fn lacks(place: (u32, i32)) -> bool {
    let (pid, fd) = place;
    fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).is_ok_and(|text| lacks_handle(&text))
}

/// Whether a watch in this file of /proc has no handle: inotify's lines of proc_pid_fdinfo(5).
fn lacks_handle(text: &str) -> bool {
    text.lines().any(|line| line.starts_with("inotify wd:") && !line.contains(" fhandle-bytes:"))
}

struct Walk {
    /// Of the overlay: st_dev.
    device: u64,
    looked_up: usize,
    /// Where instances are open of which a watch has no handle: host pid, descriptor.
    lacking: Vec<(u32, i32)>,
}

impl Walk {
    fn are_known(&mut self) -> bool {
        self.lacking.retain(|&place| lacks(place));
        self.lacking.is_empty()
    }

    /// Looks up what is in a directory and below; false once there is nothing more to do.
    fn directory(&mut self, directory: &OwnedFd, depth: usize) -> bool {
        let Ok(entries) = Dir::read_from(directory) else { return true };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let Ok(stat) = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            self.looked_up += 1;
            if self.looked_up == MOST || (self.looked_up.is_multiple_of(BETWEEN) && self.are_known()) {
                return false;
            }
            let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            if !is_directory || stat.st_dev != self.device || depth == DEEPEST {
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let Ok(below) = openat(directory, name, flags, Mode::empty()) else { continue };
            if !self.directory(&below, depth + 1) {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_without_a_handle_is_seen_among_others() {
        let with = "inotify wd:1 ino:2 sdev:54 mask:302 ignored_mask:0 fhandle-bytes:8 fhandle-type:1 f_handle:00\n";
        assert!(!lacks_handle(&format!("pos:\t0\nflags:\t04000\n{with}")));
        assert!(lacks_handle(&format!("pos:\t0\n{with}inotify wd:2 ino:3 sdev:54 mask:302 ignored_mask:0 \n")));
        assert!(!lacks_handle("pos:\t0\nflags:\t02\n"), "it watches nothing");
    }

    #[test]
    fn all_that_is_there_is_looked_up_and_no_link_is_followed() {
        let room = std::env::temp_dir().join(format!("kip-names-{}", std::process::id()));
        fs::create_dir_all(room.join("a/b/c")).unwrap();
        fs::write(room.join("a/file"), "").unwrap();
        std::os::unix::fs::symlink("/", room.join("a/b/link")).unwrap();
        let root = open(&room, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let mut walk = Walk { device: fstat(&root).unwrap().st_dev, looked_up: 0, lacking: Vec::new() };
        assert!(walk.directory(&root, 0));
        assert_eq!(walk.looked_up, 5, "a, a/file, a/b, a/b/link, a/b/c");
        fs::remove_dir_all(room).unwrap();
    }
}
