//! Opening what is below a directory, by a path that need not be trusted.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::{Errno, Result};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// A lookup that is disturbed for this long gets the error. A leased file, whose open gives the
/// same error without waiting, is not waited for.
const WITHIN: Duration = Duration::from_millis(500);
/// After some tries at once.
const PAUSE: Duration = Duration::from_micros(200);
const AT_ONCE: u32 = 20;

/// openat2(2) with flags that keep the lookup below `root`, Linux 5.6. Where `..` or a link is in
/// the way the kernel gives up with EAGAIN if anything was renamed or mounted on the machine
/// meanwhile; it is asked again.
///
/// # Errors
/// Those of openat2(2).
pub fn open(root: impl AsFd, path: impl AsRef<Path>, flags: OFlags, resolve: ResolveFlags) -> Result<OwnedFd> {
    let (until, mut tries) = (Instant::now() + WITHIN, 0);
    loop {
        match rustix::fs::openat2(root.as_fd(), path.as_ref(), flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {}
            done => return done,
        }
        tries += 1;
        if tries > AT_ONCE {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Of a text that is changed, bytes.
const LONGEST: u64 = 1 << 20;

/// A file below `root`, to be read and written. Links on the way are not followed: what lies below
/// `root` is a program's, and may lead anywhere.
fn regular(root: &Path, path: &str) -> io::Result<File> {
    let root = File::open(root)?;
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(open(&root, path, flags, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)?);
    match file.metadata()? {
        found if !found.is_file() => Err(io::Error::other("it is no file")),
        // A hole costs its owner nothing.
        found if found.len() > LONGEST => Err(io::Error::other("it is too large")),
        _ => Ok(file),
    }
}

/// Changes the text of a file below `root`, in place, so that it stays the file that it is.
///
/// # Errors
/// Those of openat2(2), ELOOP for a link among them; it is no file, no text, or above 1 MiB.
pub fn rewrite(root: &Path, path: &str, change: impl FnOnce(&str) -> String) -> io::Result<()> {
    let mut file = regular(root, path)?;
    let mut text = String::new();
    std::io::Read::take(&mut file, LONGEST).read_to_string(&mut text)?;
    let new = change(&text);
    if new != text {
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(new.as_bytes())?;
    }
    Ok(())
}

/// Writes a file in the root of a process once more as it is, for programs that watch it,
/// inotify(7).
///
/// # Errors
/// As of [`rewrite`]; NotFound when the process has ended.
pub fn write_again(pid: u32, path: &str) -> io::Result<()> {
    let mut file = regular(Path::new(&format!("/proc/{pid}/root")), path)?;
    let mut bytes = Vec::new();
    std::io::Read::take(&mut file, LONGEST).read_to_end(&mut bytes)?;
    file.rewind()?;
    file.write_all(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::sync::atomic::{AtomicBool, Ordering};

    // promise volumes: what is renamed or mounted elsewhere on the machine disturbs no lookup
    //   within a root
    #[test]
    fn a_text_is_changed_below_the_root_and_nowhere_else() {
        let place = tempfile::tempdir().unwrap();
        let (root, outside) = (place.path().join("root"), place.path().join("outside"));
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::create_dir(&outside).unwrap();
        for directory in [root.join("etc"), outside.clone()] {
            fs::write(directory.join("hosts"), "a longer text\n").unwrap();
        }
        let id = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
        let was = id(&root.join("etc/hosts"));
        rewrite(&root, "etc/hosts", |text| text.replace("longer ", "")).unwrap();
        assert_eq!(fs::read_to_string(root.join("etc/hosts")).unwrap(), "a text\n");
        assert_eq!(id(&root.join("etc/hosts")), was);
        let never = |_: &str| unreachable!("a link was followed");
        std::os::unix::fs::symlink(outside.join("hosts"), root.join("etc/link")).unwrap();
        assert!(rewrite(&root, "etc/link", never).is_err());
        fs::rename(root.join("etc"), root.join("was")).unwrap();
        for target in [outside.as_path(), Path::new("../outside"), Path::new("was")] {
            std::os::unix::fs::symlink(target, root.join("etc")).unwrap();
            assert!(rewrite(&root, "etc/hosts", never).is_err());
            fs::remove_file(root.join("etc")).unwrap();
        }
        fs::File::create(root.join("was/hole")).unwrap().set_len(1 << 40).unwrap();
        assert!(rewrite(&root, "was/hole", never).is_err());
        assert!(rewrite(&root, "was", never).is_err() && rewrite(&root, "../outside/hosts", never).is_err());
        assert_eq!(fs::read_to_string(outside.join("hosts")).unwrap(), "a longer text\n");
    }

    #[test]
    fn what_is_renamed_elsewhere_disturbs_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, beside) = (dir.path().join("inside"), dir.path().join("beside"));
        fs::create_dir_all(inside.join("a")).unwrap();
        fs::create_dir(&beside).unwrap();
        fs::write(beside.join("0"), "").unwrap();
        let root = File::open(&inside).unwrap();
        let (flags, path) = (OFlags::PATH | OFlags::CLOEXEC, "a/..".to_owned() + &"/a/..".repeat(100));
        struct Ends<'a>(&'a AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let done = AtomicBool::new(false);
        let mut disturbed = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    fs::rename(beside.join("0"), beside.join("1")).unwrap();
                    fs::rename(beside.join("1"), beside.join("0")).unwrap();
                }
            });
            let _whatever_happens = Ends(&done);
            let until = Instant::now() + Duration::from_secs(60);
            while disturbed < 5 && Instant::now() < until {
                let once = rustix::fs::openat2(&root, &path, flags, Mode::empty(), ResolveFlags::IN_ROOT);
                disturbed += u32::from(once.is_err_and(|e| e == Errno::AGAIN));
                open(&root, &path, flags, ResolveFlags::IN_ROOT).unwrap();
            }
        });
        assert_eq!(disturbed, 5, "nothing was in the way of those who ask once");
        let none = open(&root, "none", flags, ResolveFlags::IN_ROOT).unwrap_err();
        assert_eq!(none, Errno::NOENT);
        assert_eq!(open(&root, "../..", flags, ResolveFlags::BENEATH).unwrap_err(), Errno::XDEV);
    }
}
