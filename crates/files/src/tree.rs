//! A tree of files below a root, whose paths are resolved part by part.
//!
//! The root of a proc that runs is one directory, and the kernel crosses its mounts. That of a
//! sleeper is a mount that is attached nowhere, and what lies on it are others: [`RootTree::cover`]
//! says where, and the walk crosses over itself.

use rustix::fs::{AtFlags, CWD, FileType, FsWord, Mode, OFlags, ResolveFlags, Stat, StatxFlags, fstat, fstatfs, statx};
use rustix::io::{Errno, Result};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

/// As many links as the kernel follows in one path: path_resolution(7).
const MOST_LINKS: usize = 40;
/// File systems that the kernel makes up, statfs(2): proc, sysfs, devpts, cgroup and cgroup2.
const MADE_UP: [FsWord; 5] = [0x9fa0, 0x6265_6572, 0x1cd1, 0x0027_e0eb, 0x6367_7270];

/// Names a file as long as its mount lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id {
    mount: u64,
    device: (u32, u32),
    inode: u64,
}

impl Id {
    /// That of an open file.
    ///
    /// # Errors
    /// statx(2).
    pub fn of(file: impl AsFd) -> Result<Id> {
        let found = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID | StatxFlags::INO)?;
        Ok(Id { mount: found.stx_mnt_id, device: (found.stx_dev_major, found.stx_dev_minor), inode: found.stx_ino })
    }
}

/// Names an entry of a directory: by the directory and its name there.
pub type EntryName = (Id, OsString);

/// What lies over an entry.
#[derive(Debug)]
enum Over {
    Mount(OwnedFd),
    /// What the kernel makes up while the proc runs.
    MadeUp,
}

/// Files below a root.
#[derive(Debug)]
pub struct RootTree {
    root: Rc<OwnedFd>,
    /// By the entry, not by what is there: that is another file when the kernel's own mount on it
    /// is gone, with the namespace of a program that has just ended.
    covers: Vec<(EntryName, Over)>,
    /// The directories of `covers`, held open: an overlay may give another number to what it has
    /// forgotten.
    pinned: Vec<Rc<OwnedFd>>,
    /// It is a proc's: what the kernel makes up is not a file of its own.
    of_proc: bool,
}

/// The directories from the root to one, the root first.
pub type Dirs = Vec<Rc<OwnedFd>>;

/// What a path leads to.
#[derive(Debug)]
pub struct Place {
    /// The directory that has it, and those above.
    pub dirs: Dirs,
    /// Its name there; none of a path that ends with `.` or `..`, or is the root: then the last of
    /// `dirs` is what it leads to.
    pub name: Option<OsString>,
    /// What is there, open by path, if anything is.
    pub file: Option<OwnedFd>,
}

impl Place {
    /// The directory that has it.
    pub fn parent(&self) -> &OwnedFd {
        self.dirs.last().expect("the root is always there")
    }
}

impl RootTree {
    /// The files of a proc, whose root directory or root mount this is.
    pub fn of_proc(root: OwnedFd) -> RootTree {
        RootTree { root: Rc::new(root), covers: Vec::new(), pinned: Vec::new(), of_proc: true }
    }

    /// The files of the host, as the caller may see them.
    ///
    /// # Errors
    /// open(2).
    pub fn of_host() -> Result<RootTree> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open("/", flags, Mode::empty())?;
        Ok(RootTree { root: Rc::new(root), covers: Vec::new(), pinned: Vec::new(), of_proc: false })
    }

    /// Lets `mount` lie over what is at `target`, if something of its kind is there.
    ///
    /// # Errors
    /// Those of a lookup, but not that there is nothing.
    pub fn cover(&mut self, target: &Path, mount: OwnedFd) -> Result<()> {
        self.put_over(target, Over::Mount(mount))
    }

    /// Notes that what is at `target` is not on a disk while the proc runs.
    ///
    /// # Errors
    /// As [`RootTree::cover`].
    pub fn made_up(&mut self, target: &Path) -> Result<()> {
        self.put_over(target, Over::MadeUp)
    }

    fn put_over(&mut self, target: &Path, over: Over) -> Result<()> {
        match self.find(target, true) {
            Ok(Place { mut dirs, name: Some(name), file: Some(_) }) => {
                let dir = dirs.pop().expect("the root is always there");
                self.covers.push(((Id::of(&dir)?, name), over));
                self.pinned.push(dir);
                Ok(())
            }
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// What `path` leads to, seen from the root. `follow`: also where its last part is a link.
    ///
    /// # Errors
    /// Those of path_resolution(7); XDEV where it leads to what the kernel makes up.
    pub fn find(&self, path: &Path, follow: bool) -> Result<Place> {
        let ends_below = path.as_os_str().as_bytes().ends_with(b"/");
        let place = self.walk(&vec![Rc::clone(&self.root)], path, follow || ends_below)?;
        match &place.file {
            Some(file) if ends_below && !is_directory(&fstat(file)?) => Err(Errno::NOTDIR),
            _ => Ok(place),
        }
    }

    /// What `path` leads to from the last of `from`.
    ///
    /// # Errors
    /// As [`RootTree::find`].
    pub fn walk(&self, from: &Dirs, path: &Path, follow: bool) -> Result<Place> {
        let mut dirs = from.clone();
        let mut left = Vec::new();
        let mut links = 0;
        push(&mut left, &mut dirs, path);
        let into = path.as_os_str().as_bytes().ends_with(b"/.");
        while let Some(part) = left.pop() {
            if part == ".." {
                dirs.truncate((dirs.len() - 1).max(1));
                continue;
            }
            let dir = dirs.last().expect("the root is always there");
            let file = match self.child(dir, &part) {
                Err(Errno::NOENT) if left.is_empty() => return Ok(Place { dirs, name: Some(part), file: None }),
                file => file?,
            };
            match FileType::from_raw_mode(fstat(&file)?.st_mode) {
                FileType::Symlink if !left.is_empty() || follow => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(Errno::LOOP);
                    }
                    let target = rustix::fs::readlinkat(&file, "", Vec::new())?;
                    push(&mut left, &mut dirs, Path::new(OsStr::from_bytes(target.as_bytes())));
                }
                _ if left.is_empty() && !into => return Ok(Place { dirs, name: Some(part), file: Some(file) }),
                FileType::Directory => dirs.push(Rc::new(file)),
                _ => return Err(Errno::NOTDIR),
            }
        }
        let file = dirs.last().expect("the root is always there").try_clone().map_err(|_| Errno::MFILE)?;
        Ok(Place { dirs, name: None, file: Some(file) })
    }

    /// What has that name in a directory, open by path, and no link followed.
    ///
    /// # Errors
    /// openat2(2); XDEV for what the kernel makes up.
    pub fn child(&self, dir: &OwnedFd, name: &OsStr) -> Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut file = kip_sys::within::open(dir, Path::new(name), flags, resolve)?;
        if !self.covers.is_empty() {
            let id = Id::of(dir)?;
            // The last one lies on top.
            match self.covers.iter().rev().find(|((of, at), _)| *of == id && at == name) {
                Some((_, Over::Mount(mount))) => file = mount.try_clone().map_err(|_| Errno::MFILE)?,
                Some((_, Over::MadeUp)) => return Err(Errno::XDEV),
                None => {}
            }
        }
        if self.of_proc && MADE_UP.contains(&fstatfs(&file)?.f_type) {
            return Err(Errno::XDEV);
        }
        Ok(file)
    }

    /// Whether something lies over what has that name.
    pub(crate) fn has_mount_at(&self, dir: &OwnedFd, name: &OsStr) -> Result<bool> {
        if self.covers.is_empty() {
            return Ok(false);
        }
        let id = Id::of(dir)?;
        Ok(self.covers.iter().any(|((of, at), _)| *of == id && at == name))
    }
}

/// Puts the parts of `path` on top of those that are left; an absolute one begins at the root.
fn push(left: &mut Vec<OsString>, dirs: &mut Dirs, path: &Path) {
    let bytes = path.as_os_str().as_bytes();
    if bytes.starts_with(b"/") {
        dirs.truncate(1);
    }
    let parts = bytes.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    left.extend(parts.rev().map(|part| OsStr::from_bytes(part).to_owned()));
}

/// Whether that is one.
pub(crate) fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// Opens once more what is open by path: a file or directory, which no other can have taken the
/// place of.
pub(crate) fn reopen(file: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::openat(CWD, path, flags | OFlags::CLOEXEC, Mode::empty())
}
