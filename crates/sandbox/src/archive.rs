//! Unpacks a tenant's tarball (plain, gzip or zstd) into a directory that becomes a layer over the base.
//!
//! Takes nothing an archive says on trust: every path is resolved by the kernel below the destination (openat2(2),
//! RESOLVE_BENEATH), whatever links were unpacked before, and what could reach the host or fill its disk is refused with
//! the name of the entry. Owners are kept as the plain ids of the archive, for the layer is mounted with a mapping. Of
//! extended attributes none is kept, for overlayfs would believe some of them.
//!
//! The destination appears under its name only when it is complete. A crash leaves `DEST.new`, which the next call for
//! the same destination removes.

use crate::base::USR_LINKS;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;
use tar::EntryType;

/// How much an archive may bring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// All files together, bytes.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
    /// Unpacked bytes per packed byte, beyond the first 256 MiB.
    pub ratio: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { bytes: 20 << 30, entries: 2_000_000, ratio: 200 }
    }
}

const RATIO_COUNTS_FROM_BYTES: u64 = 256 << 20;

/// What was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Contents of files, bytes.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

/// An archive was not unpacked, and nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The archive itself cannot be opened or read, or is cut short or damaged.
    #[error("could not read the archive {}", archive.display())]
    Archive {
        /// The file.
        archive: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An entry that is not taken.
    #[error("the archive {} is refused: entry {entry:?} {why}", archive.display())]
    Entry {
        /// The file.
        archive: PathBuf,
        /// The entry's name, as the archive has it.
        entry: String,
        /// Why, for people.
        why: String,
    },
    /// All of it is too much.
    #[error("the archive {} is refused: {why}", archive.display())]
    TooMuch {
        /// The file.
        archive: PathBuf,
        /// Which limit was passed.
        why: String,
    },
    /// The destination cannot be written.
    #[error("could not unpack to {}", path.display())]
    Destination {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What went wrong with one entry, before it has a name.
enum Trouble {
    /// The entry is to blame.
    Refused(String),
    /// The archive's bytes are.
    Archive(io::Error),
    /// A limit.
    TooMuch(String),
    /// Our disk.
    Disk(io::Error),
}

impl From<Errno> for Trouble {
    fn from(e: Errno) -> Self {
        match e {
            Errno::XDEV => Trouble::Refused("leads out of the archive by way of a link".into()),
            Errno::LOOP => Trouble::Refused("goes through a loop of links".into()),
            Errno::NOTDIR => Trouble::Refused("lies below something that is not a directory".into()),
            Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ => {
                Trouble::Refused("has a name that no file can have".into())
            }
            Errno::ISDIR | Errno::NOTEMPTY => Trouble::Refused("takes the place of a directory".into()),
            other => Trouble::Disk(other.into()),
        }
    }
}

/// Unpacks `archive` as the new directory `destination`, whose parent must exist. Needs root, for the owners.
///
/// # Errors
/// See [`UnpackError`]. The destination does not exist then.
pub fn unpack(archive: &Path, destination: &Path, limits: &Limits) -> Result<Unpacked, UnpackError> {
    let bad_archive = |source| UnpackError::Archive { archive: archive.to_owned(), source };
    let bad_destination = |source| UnpackError::Destination { path: destination.to_owned(), source };
    let packed = Rc::new(Cell::new(0));
    let stream = open(archive, packed.clone()).map_err(bad_archive)?;
    let mut fresh = destination.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = Fresh(PathBuf::from(fresh));
    fresh.clear().and_then(|()| fs::create_dir(&fresh.0)).map_err(bad_destination)?;
    let root = rustix::fs::open(&fresh.0, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| bad_destination(e.into()))?;
    let mut unpacking = Unpacking { root, limits, packed, done: Unpacked::default() };
    unpacking.all(stream).map_err(|(entry, trouble)| {
        let archive = archive.to_owned();
        match (trouble, entry) {
            (Trouble::Refused(why), entry) => UnpackError::Entry { archive, entry: entry.unwrap_or_default(), why },
            (Trouble::TooMuch(why), _) => UnpackError::TooMuch { archive, why },
            (Trouble::Archive(source), _) => UnpackError::Archive { archive, source },
            (Trouble::Disk(source), _) => UnpackError::Destination { path: destination.to_owned(), source },
        }
    })?;
    rustix::fs::renameat_with(CWD, &fresh.0, CWD, destination, rustix::fs::RenameFlags::NOREPLACE)
        .map_err(|e| bad_destination(e.into()))?;
    Ok(unpacking.done)
}

/// A directory that goes away unless it has been renamed.
struct Fresh(PathBuf);

impl Fresh {
    fn clear(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.0) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let _ = self.clear();
    }
}

struct Counted {
    file: File,
    count: Rc<Cell<u64>>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buffer)?;
        self.count.set(self.count.get() + n as u64);
        Ok(n)
    }
}

/// The archive's bytes, decompressed according to the magic number.
fn open(archive: &Path, count: Rc<Cell<u64>>) -> io::Result<Box<dyn Read>> {
    let mut file = File::open(archive)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut magic = Vec::new();
    Read::by_ref(&mut file).take(4).read_to_end(&mut magic)?;
    io::Seek::rewind(&mut file)?;
    let file = BufReader::with_capacity(1 << 16, Counted { file, count });
    Ok(match magic.as_slice() {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        [0x28, 0xb5, 0x2f, 0xfd] => Box::new(zstd::stream::read::Decoder::with_buffer(file)?),
        [] => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty")),
        _ => Box::new(file),
    })
}

/// Watches the decompressed stream: an archive ends with blocks of zeros, and one that does not was cut short.
struct Watched {
    stream: Box<dyn Read>,
    trailing_zeros: Rc<Cell<u64>>,
    left: u64,
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.stream.read(buffer)?;
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| io::Error::other("it goes on for ever"))?;
        let zeros = buffer[..n].iter().rev().take_while(|b| **b == 0).count() as u64;
        let before = if zeros == n as u64 { self.trailing_zeros.get() } else { 0 };
        self.trailing_zeros.set(before + zeros);
        Ok(n)
    }
}

struct Unpacking<'a> {
    root: OwnedFd,
    limits: &'a Limits,
    packed: Rc<Cell<u64>>,
    done: Unpacked,
}

impl Unpacking<'_> {
    fn all(&mut self, stream: Box<dyn Read>) -> Result<(), (Option<String>, Trouble)> {
        let broken = |e| (None, Trouble::Archive(e));
        let trailing_zeros = Rc::new(Cell::new(0));
        // Headers, long names and padding come on top of the contents.
        let left = self.limits.bytes.saturating_add(self.limits.entries.saturating_mul(4096)).saturating_add(1 << 20);
        let mut archive = tar::Archive::new(Watched { stream, trailing_zeros: trailing_zeros.clone(), left });
        for entry in archive.entries().map_err(broken)? {
            let mut entry = entry.map_err(broken)?;
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            self.one(&mut entry).map_err(|trouble| (Some(name), trouble))?;
        }
        if trailing_zeros.get() < 512 {
            return Err(broken(io::Error::new(io::ErrorKind::UnexpectedEof, "it is cut short: its end is missing")));
        }
        // What follows carries the checksum of a compressed archive.
        io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(broken)?;
        Ok(())
    }

    fn one(&mut self, entry: &mut tar::Entry<'_, Watched>) -> Result<(), Trouble> {
        self.done.entries += 1;
        if self.done.entries > self.limits.entries {
            return Err(Trouble::TooMuch(format!("it has more than {} entries", self.limits.entries)));
        }
        let kind = entry.header().entry_type();
        if matches!(kind, EntryType::XGlobalHeader) {
            return Ok(());
        }
        let written = entry.path().map_err(Trouble::Archive)?.into_owned();
        let Some(path) = self.place(&written, kind, entry)? else { return Ok(()) };
        let owner = Owner::of(entry)?;
        let (parent, name) = self.parent(&path)?;
        match kind {
            EntryType::Directory => return self.directory(&parent, &name, &owner),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.regular(&parent, &name, &owner, entry)?;
            }
            EntryType::Symlink => {
                let target = link_target(entry)?;
                remove_old(&parent, &name)?;
                rustix::fs::symlinkat(&target, &parent, &name)?;
                rustix::fs::chownat(&parent, &name, owner.uid, owner.gid, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            EntryType::Link => self.hard_link(&parent, &name, &link_target(entry)?)?,
            EntryType::Char | EntryType::Block => return Err(Trouble::Refused("is a device node".into())),
            EntryType::Fifo => return Err(Trouble::Refused("is a named pipe".into())),
            _ => return Err(Trouble::Refused(format!("is of an unknown type {:?}", kind.as_byte() as char))),
        }
        Ok(())
    }

    /// Where an entry goes; none when it is there anyway. What the archive has in `/bin` and its like goes to where the
    /// base's links of that name lead.
    fn place(
        &self,
        written: &Path,
        kind: EntryType,
        entry: &tar::Entry<'_, Watched>,
    ) -> Result<Option<PathBuf>, Trouble> {
        let refuse = |why: &str| Err(Trouble::Refused(why.into()));
        let mut path = match relative(written) {
            Ok(path) => path,
            Err(why) => return refuse(why),
        };
        let Some(first) = path.iter().next().map(OsString::from) else { return Ok(None) };
        let alone = path.iter().nth(1).is_none();
        if first == ".kip" {
            return refuse("is in /.kip, which is Kip's own");
        }
        if alone && kind != EntryType::Directory && ["usr", "proc", "dev"].iter().any(|d| first == *d) {
            return refuse("must be a directory");
        }
        if USR_LINKS.iter().any(|l| first == *l) {
            if alone && kind == EntryType::Symlink {
                let target = link_target(entry)?;
                let usual = Path::new("usr").join(&first);
                if target.strip_prefix("/").unwrap_or(&target) == usual {
                    return Ok(None);
                }
                return refuse("takes the place of a link into /usr");
            }
            path = Path::new("usr").join(path);
        }
        Ok(Some(path))
    }

    /// The directory an entry goes into, made if it is not there, and the entry's own name.
    fn parent(&self, path: &Path) -> Result<(OwnedFd, OsString), Trouble> {
        let name = path.file_name().expect("`relative` leaves plain names only").to_owned();
        let parent = path.parent().unwrap_or(Path::new(""));
        match self.open_dir(parent) {
            Err(Errno::NOENT) => {}
            other => return Ok((other?, name)),
        }
        let mut made = PathBuf::new();
        for part in parent {
            let above = self.open_dir(&made)?;
            match rustix::fs::mkdirat(&above, part, Mode::from(0o755)) {
                Err(Errno::EXIST) | Ok(()) => made.push(part),
                Err(e) => return Err(e.into()),
            }
        }
        // A dangling link stands where a directory ought to be.
        let opened = self.open_dir(parent).map_err(|e| match e {
            Errno::NOENT => Trouble::Refused("lies below a link that leads nowhere".into()),
            other => other.into(),
        })?;
        Ok((opened, name))
    }

    fn open_dir(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        rustix::io::retry_on_intr(|| match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) {
            // Somebody renamed something on this machine just now.
            Err(Errno::AGAIN) => Err(Errno::INTR),
            other => other,
        })
    }

    fn directory(&self, parent: &OwnedFd, name: &OsString, owner: &Owner) -> Result<(), Trouble> {
        match rustix::fs::mkdirat(parent, name, Mode::from(0o755)) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let there = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(there.st_mode) != FileType::Directory {
                    rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
                    rustix::fs::mkdirat(parent, name, Mode::from(0o755))?;
                }
            }
            Err(e) => return Err(e.into()),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(parent, name, flags, Mode::empty())?;
        owner.give(dir.as_fd())
    }

    fn regular(
        &mut self,
        parent: &OwnedFd,
        name: &OsString,
        owner: &Owner,
        entry: &mut tar::Entry<'_, Watched>,
    ) -> Result<(), Trouble> {
        // Before anything is written: a sparse file's size is nothing but a number.
        self.check(self.done.bytes.saturating_add(entry.size()))?;
        remove_old(parent, name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(parent, name, flags, Mode::from(0o600))?);
        let mut buffer = vec![0; 1 << 16];
        let mut got = 0;
        loop {
            let n = entry.read(&mut buffer).map_err(Trouble::Archive)?;
            if n == 0 {
                break;
            }
            got += n as u64;
            self.done.bytes += n as u64;
            self.check(self.done.bytes)?;
            file.write_all(&buffer[..n]).map_err(Trouble::Disk)?;
        }
        if got != entry.size() {
            return Err(Trouble::Archive(io::Error::new(io::ErrorKind::UnexpectedEof, "it is cut short")));
        }
        owner.give(file.as_fd())?;
        let time = Timespec { tv_sec: owner.time, tv_nsec: 0 };
        Ok(rustix::fs::futimens(&file, &Timestamps { last_access: time, last_modification: time })?)
    }

    fn check(&self, bytes: u64) -> Result<(), Trouble> {
        if bytes > self.limits.bytes {
            return Err(Trouble::TooMuch(format!("its files are more than {} bytes", self.limits.bytes)));
        }
        let ratio = bytes / self.packed.get().max(1);
        if bytes > RATIO_COUNTS_FROM_BYTES && ratio > self.limits.ratio {
            return Err(Trouble::TooMuch(format!("it grows more than {} times when unpacked", self.limits.ratio)));
        }
        Ok(())
    }

    /// A link to what the archive has brought before, itself not through links.
    fn hard_link(&self, parent: &OwnedFd, name: &OsString, target: &Path) -> Result<(), Trouble> {
        let mut target =
            relative(target).map_err(|_| Trouble::Refused("is a hard link to something outside".into()))?;
        if target.iter().next().is_some_and(|f| USR_LINKS.iter().any(|l| f == *l)) {
            target = Path::new("usr").join(target);
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let found = rustix::fs::openat2(&self.root, &target, flags, Mode::empty(), resolve).map_err(|e| match e {
            Errno::NOENT => Trouble::Refused(format!("is a hard link to {target:?}, which is not there")),
            other => other.into(),
        })?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::Symlink) {
            return Err(Trouble::Refused("is a hard link to a directory".into()));
        }
        remove_old(parent, name)?;
        Ok(rustix::fs::linkat(&found, "", parent, name, AtFlags::EMPTY_PATH)?)
    }
}

/// A path without its dots, or why it cannot be one of the archive's.
fn relative(path: &Path) -> Result<PathBuf, &'static str> {
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

fn link_target(entry: &tar::Entry<'_, Watched>) -> Result<PathBuf, Trouble> {
    let target = entry.link_name().map_err(Trouble::Archive)?;
    target.map(|t| t.into_owned()).ok_or_else(|| Trouble::Refused("is a link without a target".into()))
}

/// The later entry of a name wins, but no directory is thrown away for it.
fn remove_old(parent: &OwnedFd, name: &OsString) -> Result<(), Trouble> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

struct Owner {
    uid: Option<Uid>,
    gid: Option<Gid>,
    mode: Mode,
    time: i64,
}

impl Owner {
    fn of(entry: &tar::Entry<'_, Watched>) -> Result<Owner, Trouble> {
        let header = entry.header();
        let id = |id: io::Result<u64>| match id.map_err(Trouble::Archive)? {
            id if id <= 65_535 => Ok(id as u32),
            id => Err(Trouble::Refused(format!("belongs to id {id}, and a proc has only 0 to 65535"))),
        };
        Ok(Owner {
            uid: Some(Uid::from_raw(id(header.uid())?)),
            gid: Some(Gid::from_raw(id(header.gid())?)),
            mode: Mode::from(header.mode().map_err(Trouble::Archive)? & 0o7777),
            time: i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0),
        })
    }

    /// First the owner, for a change of owner takes setuid bits away.
    fn give(&self, fd: std::os::fd::BorrowedFd<'_>) -> Result<(), Trouble> {
        rustix::fs::fchown(fd, self.uid, self.gid)?;
        Ok(rustix::fs::fchmod(fd, self.mode)?)
    }
}
