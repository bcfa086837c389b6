//! One tree of files copied: contents with their holes, shared blocks where the file system has
//! such, hard links, devices, owners, modes, times and extended attributes.
//!
//! No process may change either tree meanwhile. Links are never followed.

use crate::{BOUND, CopyError, at};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, SeekFrom, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Longest list of names, and longest value, of extended attributes: what the kernel allows.
const ATTRIBUTES_MAX: usize = 64 << 10;

/// How the files of a tree come into the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// Each file is another one.
    Copied,
    /// Each file has another name, and only directories are others.
    Linked,
}

/// Copies `from` to `to`, which is not there yet, but for what is below `except` (paths from
/// `from`).
pub(crate) fn copy(from: &Path, to: &Path, how: How, except: &[&str]) -> Result<(), CopyError> {
    let except = except.iter().map(|path| from.join(path)).collect();
    let mut walk =
        Walk { how, except, linked: BTreeMap::new(), left: vec![Step::Copy(from.to_owned(), to.to_owned())] };
    // A program's directories may lie deeper in each other than a stack reaches.
    while let Some(step) = walk.left.pop() {
        match step {
            Step::Copy(from, to) => walk.one(&from, &to)?,
            Step::Close(from, to, found) => attributes(&from, &to, &found)?,
        }
    }
    Ok(())
}

enum Step {
    Copy(PathBuf, PathBuf),
    /// A directory has all that is in it.
    Close(PathBuf, PathBuf, Box<Metadata>),
}

struct Walk {
    how: How,
    except: Vec<PathBuf>,
    /// Where a file with several names is by now.
    linked: BTreeMap<(u64, u64), PathBuf>,
    /// What is still to be done, the next at the end.
    left: Vec<Step>,
}

impl Walk {
    fn one(&mut self, from: &Path, to: &Path) -> Result<(), CopyError> {
        let found = fs::symlink_metadata(from).map_err(at(from))?;
        if found.is_dir() {
            fs::create_dir(to).map_err(at(to))?;
            self.left.push(Step::Close(from.to_owned(), to.to_owned(), Box::new(found)));
            for entry in fs::read_dir(from).map_err(at(from))? {
                let entry = entry.map_err(at(from))?;
                if !self.except.contains(&entry.path()) {
                    self.left.push(Step::Copy(entry.path(), to.join(entry.file_name())));
                }
            }
            return Ok(());
        }
        if self.how == How::Linked {
            return fs::hard_link(from, to).map_err(at(to));
        }
        let identity = (found.dev(), found.ino());
        if let Some(there) = self.linked.get(&identity) {
            return fs::hard_link(there, to).map_err(at(to));
        }
        make(from, to, &found)?;
        if found.nlink() > 1 {
            self.linked.insert(identity, to.to_owned());
        }
        attributes(from, to, &found)
    }
}

/// Makes what is no directory.
fn make(from: &Path, to: &Path, found: &Metadata) -> Result<(), CopyError> {
    let kind = found.file_type();
    if kind.is_file() {
        return contents(from, to, found.len());
    }
    if kind.is_symlink() {
        let target = fs::read_link(from).map_err(at(from))?;
        return std::os::unix::fs::symlink(target, to).map_err(at(to));
    }
    let node = match () {
        () if kind.is_fifo() => FileType::Fifo,
        () if kind.is_socket() => FileType::Socket,
        () if kind.is_block_device() => FileType::BlockDevice,
        () => FileType::CharacterDevice,
    };
    rustix::fs::mknodat(CWD, to, node, Mode::RUSR, found.rdev()).map_err(|e| at(to)(e.into()))
}

fn contents(from: &Path, to: &Path, size: u64) -> Result<(), CopyError> {
    let mut source =
        OpenOptions::new().read(true).custom_flags(OFlags::NOFOLLOW.bits() as i32).open(from).map_err(at(from))?;
    let mut copy = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(at(to))?;
    if size == 0 || rustix::fs::ioctl_ficlone(&copy, &source).is_ok() {
        return Ok(());
    }
    let mut done = 0;
    while let Some((start, end)) = data(&source, done, size).map_err(at(from))? {
        piece(&mut source, &mut copy, start, end).map_err(at(to))?;
        done = end;
    }
    copy.set_len(size).map_err(at(to))
}

/// The next part that is no hole.
fn data(file: &File, after: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(after)) {
        Err(Errno::NXIO) => return Ok(None),
        // No holes are known there.
        Err(Errno::INVAL) => return Ok((after < size).then_some((after, size))),
        start => start?,
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(size);
    Ok((start < end).then_some((start, end)))
}

fn piece(source: &mut File, copy: &mut File, start: u64, end: u64) -> io::Result<()> {
    let (mut from, mut to) = (start, start);
    while from < end {
        let left = (end - from) as usize;
        match rustix::fs::copy_file_range(&*source, Some(&mut from), &*copy, Some(&mut to), left) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(Errno::INTR) => {}
            // Not between these two file systems.
            Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => break,
            Err(e) => return Err(e.into()),
        }
    }
    source.seek(io::SeekFrom::Start(from))?;
    copy.seek(io::SeekFrom::Start(from))?;
    let mut buffer = vec![0; 256 << 10];
    while from < end {
        let wanted = buffer.len().min((end - from) as usize);
        source.read_exact(&mut buffer[..wanted])?;
        copy.write_all(&buffer[..wanted])?;
        from += wanted as u64;
    }
    Ok(())
}

/// In this order: a change of owner takes set-user-id bits and capabilities away, a change of mode
/// changes an access list, and all of it changes times.
fn attributes(from: &Path, to: &Path, found: &Metadata) -> Result<(), CopyError> {
    let failed = |e: Errno| at(to)(e.into());
    let owner = (Some(Uid::from_raw(found.uid())), Some(Gid::from_raw(found.gid())));
    rustix::fs::chownat(CWD, to, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    if !found.is_symlink() {
        let mode = Mode::from_raw_mode(found.mode() & 0o7777);
        rustix::fs::chmodat(CWD, to, mode, AtFlags::empty()).map_err(failed)?;
    }
    for name in names(from)? {
        let mut value = vec![0; ATTRIBUTES_MAX];
        match rustix::fs::lgetxattr(from, OsStr::from_bytes(&name), &mut value[..]) {
            Ok(length) => {
                let flags = rustix::fs::XattrFlags::empty();
                rustix::fs::lsetxattr(to, OsStr::from_bytes(&name), &value[..length], flags).map_err(failed)?;
            }
            Err(Errno::NODATA) => {}
            Err(e) => return Err(at(from)(e.into())),
        }
    }
    let times = Timestamps {
        last_access: Timespec { tv_sec: found.atime(), tv_nsec: found.atime_nsec() as _ },
        last_modification: Timespec { tv_sec: found.mtime(), tv_nsec: found.mtime_nsec() as _ },
    };
    rustix::fs::utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)
}

/// Names of extended attributes, but for those of an overlay that are true of one tree alone.
fn names(path: &Path) -> Result<Vec<Vec<u8>>, CopyError> {
    let mut list = vec![0; ATTRIBUTES_MAX];
    let length = match rustix::fs::llistxattr(path, &mut list[..]) {
        Err(Errno::OPNOTSUPP) => 0,
        length => length.map_err(|e| at(path)(e.into()))?,
    };
    let bound = |name: &[u8]| {
        let own = BOUND.map(|own| ["trusted", "user"].map(|space| format!("{space}.overlay.{own}")));
        own.iter().flatten().any(|own| own.as_bytes() == name)
    };
    let names = list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty() && !bound(name));
    Ok(names.map(<[u8]>::to_vec).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn blocks(path: &Path) -> u64 {
        fs::metadata(path).unwrap().blocks()
    }

    #[test]
    fn a_copy_is_like_its_source_and_another_one() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        fs::create_dir_all(from.join("deep/er")).unwrap();
        fs::create_dir_all(from.join("not/this")).unwrap();
        fs::write(from.join("deep/er/file"), "contents").unwrap();
        fs::hard_link(from.join("deep/er/file"), from.join("second")).unwrap();
        std::os::unix::fs::symlink("nowhere", from.join("link")).unwrap();
        rustix::fs::mknodat(CWD, from.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let sparse = File::create(from.join("sparse")).unwrap();
        sparse.set_len(64 << 20).unwrap();
        rustix::io::pwrite(&sparse, b"in the middle", 32 << 20).unwrap();
        rustix::fs::lsetxattr(from.join("second"), "user.own", b"value", rustix::fs::XattrFlags::empty()).unwrap();
        fs::set_permissions(from.join("second"), fs::Permissions::from_mode(0o6751)).unwrap();
        fs::set_permissions(from.join("deep"), fs::Permissions::from_mode(0o1770)).unwrap();
        let old = Timespec { tv_sec: 1_000_000, tv_nsec: 7 };
        for name in ["deep", "second", "link"] {
            let times = Timestamps { last_access: old, last_modification: old };
            rustix::fs::utimensat(CWD, from.join(name), &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        }

        copy(&from, &to, How::Copied, &["not/this"]).unwrap();

        assert_eq!(fs::read(to.join("deep/er/file")).unwrap(), b"contents");
        let [one, two, source] =
            ["deep/er/file", "second", "../from/second"].map(|name| fs::metadata(to.join(name)).unwrap());
        assert!(one.ino() == two.ino() && one.ino() != source.ino() && one.nlink() == 2);
        assert_eq!((one.mode() & 0o7777, one.mtime(), one.mtime_nsec()), (0o6751, 1_000_000, 7));
        let deep = fs::metadata(to.join("deep")).unwrap();
        assert_eq!((deep.mode() & 0o7777, deep.mtime()), (0o1770, 1_000_000));
        assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("nowhere"));
        assert_eq!(fs::symlink_metadata(to.join("link")).unwrap().mtime(), 1_000_000);
        assert!(fs::symlink_metadata(to.join("fifo")).unwrap().file_type().is_fifo());
        assert!(to.join("not").is_dir() && !to.join("not/this").exists());
        let mut value = [0; 16];
        let length = rustix::fs::lgetxattr(to.join("second"), "user.own", &mut value[..]).unwrap();
        assert_eq!(&value[..length], b"value");
        let copied = fs::read(to.join("sparse")).unwrap();
        assert_eq!(copied, fs::read(from.join("sparse")).unwrap());
        assert_eq!(blocks(&to.join("sparse")), blocks(&from.join("sparse")));
    }

    #[test]
    fn what_is_linked_is_one_file_in_directories_of_its_own() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        fs::create_dir_all(from.join("usr")).unwrap();
        fs::write(from.join("usr/file"), "contents").unwrap();
        fs::set_permissions(from.join("usr"), fs::Permissions::from_mode(0o750)).unwrap();
        copy(&from, &to, How::Linked, &[]).unwrap();
        let [one, two] = [&from, &to].map(|root| fs::metadata(root.join("usr/file")).unwrap());
        assert_eq!(one.ino(), two.ino());
        assert_eq!(fs::metadata(to.join("usr")).unwrap().mode() & 0o777, 0o750);
    }
}
