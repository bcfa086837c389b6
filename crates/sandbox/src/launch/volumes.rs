//! Attaching volumes: in the sandbox's new mount namespace, while the tenant's root is a directory
//! of the template.
//!
//! Every path here is the tenant's to change: it is resolved with the sandbox's root as `/`,
//! whatever links it has there (openat2(2), RESOLVE_IN_ROOT), so it leads nowhere else.

use crate::protocol::{Failure, Step};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, move_mount};
use std::os::fd::{BorrowedFd, OwnedFd};

/// A volume's mount, and where it belongs inside.
#[derive(Debug)]
pub(super) struct Placed {
    mount: OwnedFd,
    target: String,
}

/// Takes the volumes off the front of the descriptors.
pub(super) fn split(targets: Vec<String>, mut fds: Vec<OwnedFd>) -> Result<(Vec<Placed>, Vec<OwnedFd>), Failure> {
    if targets.len() > fds.len() {
        return Err(super::wrong_number());
    }
    let rest = fds.split_off(targets.len());
    Ok((fds.into_iter().zip(targets).map(|(mount, target)| Placed { mount, target }).collect(), rest))
}

/// Attaches them in their order. With `may_make`, what one lies on is made by root of the sandbox,
/// the caller, if it is missing.
pub(super) fn attach(volumes: &[Placed], root: BorrowedFd<'_>, may_make: bool) -> Result<(), Failure> {
    for volume in volumes {
        let attached = is_dir(&volume.mount).and_then(|is_dir| {
            let target = match find(root, &volume.target, is_dir) {
                Err(Errno::NOENT) if may_make => {
                    make(root, &volume.target, is_dir)?;
                    find(root, &volume.target, is_dir)?
                }
                found => found?,
            };
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
            move_mount(&volume.mount, "", &target, "", flags)
        });
        attached.map_err(|e| Failure { detail: volume.target.clone(), ..Failure::new(Step::Volume, e) })?;
    }
    Ok(())
}

/// Makes those directories that are missing, as [`attach`] does.
pub(super) fn provide(directories: &[String], root: BorrowedFd<'_>) -> Result<(), Failure> {
    for path in directories {
        let provided = match find(root, path, true) {
            Err(Errno::NOENT) => make(root, path, true),
            found => found.map(drop),
        };
        provided.map_err(|e| Failure { detail: path.clone(), ..Failure::new(Step::Volume, e) })?;
    }
    Ok(())
}

fn is_dir(file: &OwnedFd) -> rustix::io::Result<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode) == FileType::Directory)
}

/// What is at a path inside, of that kind.
fn find(root: BorrowedFd<'_>, path: &str, is_dir: bool) -> rustix::io::Result<OwnedFd> {
    let mut flags = OFlags::PATH | OFlags::CLOEXEC;
    flags.set(OFlags::DIRECTORY, is_dir);
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let found = kip_sys::within::open(root, path, flags, resolve)?;
    if !is_dir && FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) == FileType::Directory {
        return Err(Errno::ISDIR);
    }
    Ok(found)
}

/// Makes an empty file or directory at a path inside, and the directories above it that are
/// missing.
fn make(root: BorrowedFd<'_>, path: &str, is_dir: bool) -> rustix::io::Result<()> {
    let mut directory = find(root, "/", true)?;
    let mut ends = path.match_indices('/').map(|(at, _)| at).skip(1).chain([path.len()]).peekable();
    let mut begin = 1;
    while let Some(end) = ends.next() {
        let name = &path[begin..end];
        let last = ends.peek().is_none();
        let wanted = is_dir || !last;
        directory = match find(root, &path[..end], wanted) {
            Err(Errno::NOENT) => {
                make_one(&directory, name, wanted)?;
                find(root, &path[..end], wanted)?
            }
            found => found?,
        };
        begin = end + 1;
    }
    Ok(())
}

fn make_one(directory: &OwnedFd, name: &str, is_dir: bool) -> rustix::io::Result<()> {
    if is_dir {
        return rustix::fs::mkdirat(directory, name, Mode::from(0o755));
    }
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::from(0o644)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_missing_is_made_below_the_root_whatever_links_say() {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join("root");
        fs::create_dir_all(inner.join("var")).unwrap();
        symlink("/run", inner.join("var/run")).unwrap();
        symlink("../../..", inner.join("up")).unwrap();
        let root = OwnedFd::from(fs::File::open(&inner).unwrap());
        make(root.as_fd(), "/up/a/b", true).unwrap();
        assert!(inner.join("a/b").is_dir() && !outer.path().join("a").exists());
        make(root.as_fd(), "/a/b/file", false).unwrap();
        assert_eq!(fs::metadata(inner.join("a/b/file")).unwrap().len(), 0);
        // A link to what is not there: nothing is made in its place.
        assert_eq!(make(root.as_fd(), "/var/run/x", true), Err(Errno::EXIST));
        fs::create_dir(inner.join("run")).unwrap();
        make(root.as_fd(), "/var/run/x", true).unwrap();
        assert!(inner.join("run/x").is_dir());
        assert_eq!(find(root.as_fd(), "/a/b", false).unwrap_err(), Errno::ISDIR);
        assert_eq!(find(root.as_fd(), "/a/b/file", true).unwrap_err(), Errno::NOTDIR);
    }
}
