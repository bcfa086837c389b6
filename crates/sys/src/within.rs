//! Opening what is below a directory, by a path that need not be trusted.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::{Errno, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Whoever is disturbed for so long gets the error.
const TRIES: Duration = Duration::from_secs(2);

/// openat2(2) with flags that keep the lookup below `root`, Linux 5.6. Where `..` or a link is in the way the kernel gives up with EAGAIN if
/// anything was renamed or mounted on the machine meanwhile; it is asked again.
///
/// # Errors
/// Those of openat2(2).
pub fn open(root: impl AsFd, path: impl AsRef<Path>, flags: OFlags, resolve: ResolveFlags) -> Result<OwnedFd> {
    let until = Instant::now() + TRIES;
    loop {
        match rustix::fs::openat2(root.as_fd(), path.as_ref(), flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {}
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn what_is_renamed_elsewhere_disturbs_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, beside) = (dir.path().join("inside"), dir.path().join("beside"));
        fs::create_dir_all(inside.join("a")).unwrap();
        fs::create_dir(&beside).unwrap();
        fs::write(beside.join("0"), "").unwrap();
        let root = File::open(&inside).unwrap();
        let (flags, path) = (OFlags::PATH | OFlags::CLOEXEC, "a/..".to_owned() + &"/a/..".repeat(100));
        let done = AtomicBool::new(false);
        let mut disturbed = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    fs::rename(beside.join("0"), beside.join("1")).unwrap();
                    fs::rename(beside.join("1"), beside.join("0")).unwrap();
                }
            });
            let until = Instant::now() + Duration::from_secs(20);
            while disturbed < 20 && Instant::now() < until {
                let once = rustix::fs::openat2(&root, &path, flags, Mode::empty(), ResolveFlags::IN_ROOT);
                disturbed += u32::from(once.is_err_and(|e| e == Errno::AGAIN));
                open(&root, &path, flags, ResolveFlags::IN_ROOT).unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(disturbed, 20, "nothing was in the way of those who ask once");
        let none = open(&root, "none", flags, ResolveFlags::IN_ROOT).unwrap_err();
        assert_eq!(none, Errno::NOENT);
        assert_eq!(open(&root, "../..", flags, ResolveFlags::BENEATH).unwrap_err(), Errno::XDEV);
    }
}
