//! A tar stream into a directory of a tree, with the rules of `docker cp`.
//!
//! Every file is written under a name of its own and renamed when it is whole: an open file of that
//! name stays what it is, and no link is written through. What a file takes the place of is a file
//! or a link, never a directory, a pipe, a socket, a device or a mount. Files belong to the ids of
//! the calling thread; setuid and setgid bits are dropped. A directory that was there stays as it
//! is but for what is put into it.
//!
//! An entry that is refused ends it. What came before stays; a crash leaves at most one file
//! `.kip-cp-*` beside its place.

use crate::error::FilesError;
use crate::tree::{Dirs, EntryName, Id, Place, RootTree, is_directory};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, fstat};
use rustix::io::Errno;
use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tar::{Archive, Entry, EntryType};

/// How much an archive may bring.
#[derive(Debug, Clone, Copy)]
pub struct UnpackLimits {
    /// All files together, bytes.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        UnpackLimits { bytes: 100 << 30, entries: 2_000_000 }
    }
}

/// Where an archive goes.
#[derive(Debug)]
pub struct UnpackRequest<'a> {
    /// A path of the tree.
    pub to: &'a Path,
    /// The archive's first entry, with all that is below it, may get another name: if `to` is no
    /// directory, its last part is that.
    pub rename: bool,
    /// Links in the names of entries are followed, seen from the tree's root; else they are
    /// refused.
    pub follow: bool,
    /// Names that must stay what they are, see [`name_of`].
    pub busy: &'a HashSet<EntryName>,
    /// What is too much.
    pub limits: UnpackLimits,
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnpackedEntries {
    /// Contents of files, bytes.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

/// The name that a path of the tree leads to, whether or not something is there.
///
/// # Errors
/// Those of a lookup.
pub fn name_of(tree: &RootTree, path: &Path) -> rustix::io::Result<Option<EntryName>> {
    let place = tree.find(path, false)?;
    let id = Id::of(place.parent())?;
    Ok(place.name.map(|name| (id, name)))
}

/// Unpacks `archive`.
///
/// # Errors
/// See [`FilesError`]. What came before is there.
pub fn unpack(tree: &RootTree, request: &UnpackRequest<'_>, archive: impl Read) -> Result<UnpackedEntries, FilesError> {
    let (base, rename) = destination(tree, request)?;
    let since = Rc::new(Cell::new(0));
    let mut archive = Archive::new(Metered { archive, since: Rc::clone(&since) });
    let (last, made, done) = (None, Vec::new(), UnpackedEntries::default());
    let mut unpacking = Unpacking { tree, request, base, rename, last, made, done, since };
    for entry in archive.entries().map_err(FilesError::Archive)? {
        let mut entry = entry.map_err(FilesError::Archive)?;
        unpacking.since.set(0);
        unpacking.one(&mut entry)?;
    }
    if unpacking.done.entries == 0 {
        return Err(FilesError::Archive(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty")));
    }
    unpacking.finish()?;
    Ok(unpacking.done)
}

/// The directory that takes the entries, and the name that the first one gets.
fn destination(tree: &RootTree, request: &UnpackRequest<'_>) -> Result<(Dirs, Option<Rename>), FilesError> {
    let path = request.to;
    let ends_below = path.as_os_str().as_bytes().ends_with(b"/");
    let place = tree.find(path, true).map_err(FilesError::of(path))?;
    let Place { mut dirs, name, file } = place;
    let is_file = match &file {
        Some(file) => {
            if is_directory(&fstat(file).map_err(FilesError::of(path))?) {
                if name.is_some() {
                    dirs.push(Rc::new(file.try_clone().map_err(|e| FilesError::Io { path: path.into(), source: e })?));
                }
                return Ok((dirs, None));
            }
            true
        }
        None => false,
    };
    match name {
        Some(name) if request.rename => Ok((dirs, Some(Rename { to: name, is_file, ends_below, top: None }))),
        _ if is_file => Err(FilesError::NotDirectory { path: path.to_owned() }),
        _ => Err(FilesError::Missing { path: path.to_owned() }),
    }
}

/// The first entry gets another name.
struct Rename {
    to: OsString,
    /// A file has it.
    is_file: bool,
    /// It is to be a directory's.
    ends_below: bool,
    /// The first entry's own name; empty where that is `.`. None before the first entry.
    top: Option<PathBuf>,
}

/// A directory that was made, what it is to be in the end.
struct Made {
    path: PathBuf,
    mode: Mode,
    time: i64,
}

struct Unpacking<'a> {
    tree: &'a RootTree,
    request: &'a UnpackRequest<'a>,
    base: Dirs,
    rename: Option<Rename>,
    /// The directory of the last entry: the next one is mostly there too.
    last: Option<(PathBuf, Dirs)>,
    made: Vec<Made>,
    done: UnpackedEntries,
    /// Bytes of the archive since something was taken of it.
    since: Rc<Cell<u64>>,
}

/// When this process first unpacked something, and how many files have had a name of their own
/// since.
static BEGUN: LazyLock<u128> =
    LazyLock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos()));
static NAMES: AtomicU64 = AtomicU64::new(0);

/// Most that an archive may bring between two entries, or between pieces of a file, bytes: long
/// names and extended headers, which are kept in memory.
const HEADERS: u64 = 16 << 20;

/// An archive of which something is taken now and then.
struct Metered<R> {
    archive: R,
    since: Rc<Cell<u64>>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.archive.read(buffer)?;
        self.since.set(self.since.get() + read as u64);
        if self.since.get() > HEADERS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its headers are too long"));
        }
        Ok(read)
    }
}

/// What went wrong with an entry.
enum Trouble {
    Refused(String),
    Disk(Errno),
    Other(FilesError),
}

impl From<Errno> for Trouble {
    fn from(e: Errno) -> Trouble {
        let why = match e {
            Errno::XDEV => "goes to what is not on a disk",
            Errno::LOOP => "goes through a link",
            Errno::NOTDIR => "lies below something that is not a directory",
            Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ => "has a name that no file can have",
            Errno::ISDIR | Errno::NOTEMPTY => "takes the place of a directory",
            Errno::BUSY => "takes the place of a mount",
            other => return Trouble::Disk(other),
        };
        Trouble::Refused(why.to_owned())
    }
}

impl From<io::Error> for Trouble {
    fn from(e: io::Error) -> Trouble {
        match Errno::from_io_error(&e) {
            Some(errno) => Trouble::Disk(errno),
            None => Trouble::Other(FilesError::Archive(e)),
        }
    }
}

impl<'a> Unpacking<'a> {
    fn one(&mut self, entry: &mut Entry<'_, impl Read>) -> Result<(), FilesError> {
        if entry.header().entry_type() == EntryType::XGlobalHeader {
            return Ok(());
        }
        self.done.entries += 1;
        let written = PathBuf::from(OsStr::from_bytes(&entry.path_bytes()));
        self.put(entry, &written).map_err(|trouble| match trouble {
            Trouble::Refused(why) => FilesError::Entry { entry: written.display().to_string(), why },
            Trouble::Disk(errno) => FilesError::Io { path: written, source: errno.into() },
            Trouble::Other(error) => error,
        })
    }

    fn put(&mut self, entry: &mut Entry<'_, impl Read>, written: &Path) -> Result<(), Trouble> {
        if self.done.entries > self.request.limits.entries {
            let most = self.request.limits.entries;
            return Err(Trouble::Other(FilesError::TooMuch(format!("the archive has more than {most} entries"))));
        }
        let kind = entry.header().entry_type();
        let path = self.place(written, kind)?;
        let Some(name) = path.file_name().map(OsStr::to_owned) else { return Ok(()) };
        let dirs = self.directory_of(path.parent().unwrap_or(Path::new("")))?;
        let parent = dirs.last().expect("the root is always there").as_ref();
        let mode = Mode::from(entry.header().mode()? & 0o777);
        let time = i64::try_from(entry.header().mtime()?).unwrap_or(0);
        match kind {
            EntryType::Directory => {
                let sticky = Mode::from(entry.header().mode()? & 0o1777);
                if self.make_directory(parent, &name)? {
                    self.made.push(Made { path, mode: sticky, time });
                }
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.regular(parent, &name, entry, mode, time)?;
            }
            EntryType::Symlink => {
                let target = target(entry)?;
                self.under_own_name(parent, &name, |own| {
                    rustix::fs::symlinkat(&target, parent, own)?;
                    rustix::fs::utimensat(parent, own, &times(time), AtFlags::SYMLINK_NOFOLLOW)
                })?;
            }
            EntryType::Link => {
                let target = self.place(&target(entry)?, EntryType::Link)?;
                let found = self.found(&target)?;
                self.under_own_name(parent, &name, |own| {
                    rustix::fs::linkat(found.0.as_ref(), &found.1, parent, own, AtFlags::empty())
                })?;
            }
            EntryType::Char | EntryType::Block => return Err(Trouble::Refused("is a device node".into())),
            EntryType::Fifo => return Err(Trouble::Refused("is a named pipe".into())),
            other => {
                return Err(Trouble::Refused(format!("is of an unknown type {:?}", other.as_byte() as char)));
            }
        }
        Ok(())
    }

    /// Where an entry goes, seen from the base.
    fn place(&mut self, written: &Path, kind: EntryType) -> Result<PathBuf, Trouble> {
        let path = relative(written).map_err(|why| Trouble::Refused(why.into()))?;
        let Some(rename) = &mut self.rename else { return Ok(path) };
        let to = self.request.to;
        let top = match &rename.top {
            Some(top) => top,
            None => {
                let is_dir = kind == EntryType::Directory || path.iter().count() > 1;
                match (is_dir, rename.is_file, rename.ends_below) {
                    (true, true, _) => return Err(Trouble::Other(FilesError::OntoFile { path: to.to_owned() })),
                    (false, _, true) => return Err(Trouble::Other(FilesError::Missing { path: to.to_owned() })),
                    _ => rename.top.insert(path.iter().next().map(PathBuf::from).unwrap_or_default()),
                }
            }
        };
        match path.strip_prefix(top) {
            Ok(rest) if rest.as_os_str().is_empty() => Ok(PathBuf::from(&rename.to)),
            Ok(rest) => Ok(Path::new(&rename.to).join(rest)),
            Err(_) => Err(Trouble::Refused("lies beside the first entry, which alone can be renamed".into())),
        }
    }

    /// The directory at a path below the base, made where it is missing.
    fn directory_of(&mut self, path: &Path) -> Result<Dirs, Trouble> {
        if let Some((last, dirs)) = &self.last
            && last == path
        {
            return Ok(dirs.clone());
        }
        let mut dirs = self.base.clone();
        for part in path {
            dirs = match self.enter(&dirs, part) {
                Err(Errno::NOENT) => {
                    self.make_directory(dirs.last().expect("the root is always there"), part)?;
                    self.enter(&dirs, part).map_err(|e| match e {
                        Errno::NOENT => Trouble::Refused("lies below a link that leads nowhere".to_owned()),
                        other => other.into(),
                    })?
                }
                entered => entered?,
            };
        }
        self.last = Some((path.to_owned(), dirs.clone()));
        Ok(dirs)
    }

    /// The directory of that name, by way of a link if those are followed.
    fn enter(&self, dirs: &Dirs, name: &OsStr) -> rustix::io::Result<Dirs> {
        let Place { mut dirs, file, name } = self.tree.walk(dirs, Path::new(name), self.request.follow)?;
        let file = file.ok_or(Errno::NOENT)?;
        match FileType::from_raw_mode(fstat(&file)?.st_mode) {
            FileType::Directory if name.is_some() => dirs.push(Rc::new(file)),
            FileType::Directory => {}
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NOTDIR),
        }
        Ok(dirs)
    }

    /// Returns whether it was not there before.
    fn make_directory(&self, parent: &OwnedFd, name: &OsStr) -> Result<bool, Trouble> {
        if let Err(busy) = self.refuse_busy(parent, name) {
            // One that is there stays as it is.
            let there = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
            return if there.is_ok_and(|there| is_directory(&there)) { Ok(false) } else { Err(busy) };
        }
        match rustix::fs::mkdirat(parent, name, Mode::from(0o755)) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => {
                let there = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                let is_link = FileType::from_raw_mode(there.st_mode) == FileType::Symlink;
                if is_directory(&there) || is_link && self.request.follow {
                    return Ok(false);
                }
                Err(Trouble::Refused("is a directory, and something else has its name".into()))
            }
            Err(e) => Err(e.into()),
        }
    }

    fn regular(
        &mut self,
        parent: &OwnedFd,
        name: &OsStr,
        entry: &mut Entry<'_, impl Read>,
        mode: Mode,
        time: i64,
    ) -> Result<(), Trouble> {
        // Before anything is written: a sparse file's size is nothing but a number.
        let size = entry.size();
        let most = self.request.limits.bytes;
        if self.done.bytes.saturating_add(size) > most {
            return Err(Trouble::Other(FilesError::TooMuch(format!("the files are more than {most} bytes"))));
        }
        self.done.bytes += size;
        self.under_own_name(parent, name, |own| {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(rustix::fs::openat(parent, own, flags, Mode::from(0o600))?);
            copy(entry, &mut file, size, &self.since)?;
            rustix::fs::fchmod(&file, mode)?;
            rustix::fs::futimens(&file, &times(time))?;
            Ok::<(), Trouble>(())
        })
    }

    /// Makes something under a name of its own, and renames it.
    fn under_own_name<E>(
        &self,
        parent: &OwnedFd,
        name: &OsStr,
        make: impl FnOnce(&str) -> Result<(), E>,
    ) -> Result<(), Trouble>
    where
        Trouble: From<E>,
    {
        self.refuse_busy(parent, name)?;
        match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
            Ok(there) => match FileType::from_raw_mode(there.st_mode) {
                FileType::RegularFile | FileType::Symlink => {}
                FileType::Directory => return Err(Errno::ISDIR.into()),
                _ => return Err(Trouble::Refused("takes the place of a pipe, a socket or a device".into())),
            },
        }
        if self.tree.has_mount_at(parent, name)? {
            return Err(Errno::BUSY.into());
        }
        // No other copy has it, nor what a crash has left of one.
        let own = format!(".kip-cp-{:x}-{:x}", *BEGUN, NAMES.fetch_add(1, Ordering::Relaxed));
        let made = make(&own).map_err(Trouble::from);
        let named = made.and_then(|()| Ok(rustix::fs::renameat(parent, &own, parent, name)?));
        // After a rename there is nothing, but for a link to the file that has the name already.
        let _ = rustix::fs::unlinkat(parent, &own, AtFlags::empty());
        named
    }

    fn refuse_busy(&self, parent: &OwnedFd, name: &OsStr) -> Result<(), Trouble> {
        if self.request.busy.is_empty() || !self.request.busy.contains(&(Id::of(parent)?, name.to_owned())) {
            return Ok(());
        }
        let why = "is open in the program, which sleeps and would find another file when it wakes: wake it first";
        Err(Trouble::Refused(why.into()))
    }

    /// A file for a hard link, its directory and name.
    fn found(&self, path: &Path) -> Result<(Rc<OwnedFd>, OsString), Trouble> {
        let none = || Trouble::Refused(format!("is a hard link to {path:?}, which is not there"));
        let parent = path.parent().unwrap_or(Path::new(""));
        let mut dirs = self.base.clone();
        for part in parent {
            dirs = self.enter(&dirs, part).map_err(|e| if e == Errno::NOENT { none() } else { e.into() })?;
        }
        let name = path.file_name().ok_or_else(none)?;
        let dir = dirs.pop().expect("the root is always there");
        match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Err(none()),
            Err(e) => Err(e.into()),
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile | FileType::Symlink => Ok((dir, name.to_owned())),
                _ => Err(Trouble::Refused("is a hard link to something that is no file".into())),
            },
        }
    }

    /// Gives the directories that were made their modes and times, the deepest first.
    fn finish(&mut self) -> Result<(), FilesError> {
        for Made { path, mode, time } in std::mem::take(&mut self.made).into_iter().rev() {
            let done = self.tree.walk(&self.base, &path, false).and_then(|place| {
                let dir = place.file.ok_or(Errno::NOENT)?;
                let dir = crate::tree::reopen(&dir, OFlags::RDONLY | OFlags::DIRECTORY)?;
                rustix::fs::fchmod(&dir, mode)?;
                rustix::fs::futimens(dir.as_fd(), &times(time))
            });
            match done {
                // The program has taken it away.
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                done => done.map_err(|e| FilesError::Io { path, source: e.into() })?,
            }
        }
        Ok(())
    }
}

fn copy(entry: &mut impl Read, file: &mut File, size: u64, since: &Cell<u64>) -> Result<(), Trouble> {
    let mut buffer = vec![0; 1 << 16];
    let mut got = 0;
    loop {
        let n = entry.read(&mut buffer).map_err(|e| Trouble::Other(FilesError::Archive(e)))?;
        if n == 0 {
            break;
        }
        got += n as u64;
        since.set(0);
        file.write_all(&buffer[..n])?;
    }
    if got == size {
        return Ok(());
    }
    let source = io::Error::new(io::ErrorKind::UnexpectedEof, "it is cut short");
    Err(Trouble::Other(FilesError::Archive(source)))
}

fn times(seconds: i64) -> Timestamps {
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

fn target(entry: &Entry<'_, impl Read>) -> Result<PathBuf, Trouble> {
    let target = entry.link_name_bytes().map(|bytes| PathBuf::from(OsStr::from_bytes(&bytes)));
    target.ok_or_else(|| Trouble::Refused("is a link without a target".into()))
}

/// A path without its dots, or why it cannot be one of an archive's.
///
/// # Errors
/// What is wrong with it, to go on a sentence that names it.
pub fn relative(path: &Path) -> Result<PathBuf, &'static str> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => plain.push(part),
            Component::CurDir => {}
            Component::ParentDir => return Err("has .. in its path"),
            Component::RootDir | Component::Prefix(_) => return Err("has an absolute path"),
        }
    }
    Ok(plain)
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
