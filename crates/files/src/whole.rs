//! All that is in a file system in memory as one file, and back: names, contents, holes, links,
//! modes, owners, times and `user.` attributes.
//!
//! A head of fixed size and, for each file, its kind, path, owner, mode and times, follow one
//! another; contents are extents, so that holes stay holes. Owners are those of the inside. What is
//! read back may have been in a store: a path is one of names alone, each is made below the
//! directory before it without following links, and no device is ever made. Never crosses into what
//! is mounted below. Nothing is synced.

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, SeekFrom, Timespec, Timestamps, Uid, XattrFlags, fgetxattr, flistxattr,
    fsetxattr, openat, statat, utimensat,
};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Begins such a file; its last byte is the version.
const MAGIC: [u8; 8] = *b"KIPMEMF1";
/// Users and groups inside.
const IDS: u32 = 65_536;
/// Longest path, link or attribute.
const LONGEST: u32 = 64 << 10;
/// Most directories above a file, and longest path. What lies deeper or longer is refused: the walk
/// has a descriptor open for each directory above, and each file is written with its path.
const DEEPEST: usize = 128;
const LONGEST_PATH: usize = 4096;
/// All but contents may take so many bytes.
const MOST_NAMES: u64 = 256 << 20;
/// Contents are copied in pieces of so many bytes.
const PIECE: usize = 1 << 20;
/// Names of the attributes that are kept: those that a program may set.
const ATTRIBUTES: &str = "user.";

/// A further name of a file that has come already.
const SAME: u8 = b'=';
const DIRECTORY: u8 = b'd';
const REGULAR: u8 = b'f';
const LINK: u8 = b'l';
const FIFO: u8 = b'p';
const SOCKET: u8 = b's';
const END: u8 = 0;

/// What is known of a file beside its contents.
#[derive(Debug, Clone, Copy)]
struct Facts {
    mode: u32,
    uid: u32,
    gid: u32,
    times: [(i64, u32); 2],
}

struct Writer<'a> {
    out: BufWriter<&'a File>,
    device: u64,
    first_id: u32,
    links: HashMap<u64, Vec<u8>>,
    /// Bytes that are written beside contents.
    names: u64,
}

/// Writes all that is in the file system below `root` into `out`; the id 0 inside is `first_id`
/// outside.
///
/// # Errors
/// Those of the file systems.
pub fn write(root: BorrowedFd<'_>, out: &File, first_id: u32) -> io::Result<()> {
    let stat = rustix::fs::fstat(root)?;
    let mut writer =
        Writer { out: BufWriter::new(out), device: stat.st_dev, first_id, links: HashMap::new(), names: 0 };
    writer.out.write_all(&MAGIC)?;
    let top = openat(root, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    writer.directory(&top, b"", 0)?;
    writer.out.write_all(&[END])?;
    writer.out.flush()
}

impl Writer<'_> {
    /// Counts what is written beside contents.
    fn count(&mut self, bytes: usize) -> io::Result<()> {
        self.names += bytes as u64;
        if self.names > MOST_NAMES {
            return Err(too_much("their names and attributes are too many"));
        }
        Ok(())
    }

    fn path(&mut self, path: &[u8]) -> io::Result<()> {
        if path.len() > LONGEST_PATH {
            return Err(too_much("a path is longer than 4096 bytes"));
        }
        self.count(path.len() + 64)?;
        self.bytes(path)
    }

    fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).map_err(|_| too_long())?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(bytes)
    }

    fn head(&mut self, kind: u8, path: &[u8], stat: &rustix::fs::Stat) -> io::Result<()> {
        let inside = |id: u32| id.checked_sub(self.first_id).filter(|id| *id < IDS).unwrap_or(0);
        let (uid, gid) = (inside(stat.st_uid), inside(stat.st_gid));
        self.out.write_all(&[kind])?;
        self.path(path)?;
        for word in [stat.st_mode & 0o7777, uid, gid] {
            self.out.write_all(&word.to_le_bytes())?;
        }
        for (seconds, ns) in [(stat.st_atime, stat.st_atime_nsec), (stat.st_mtime, stat.st_mtime_nsec)] {
            self.out.write_all(&seconds.to_le_bytes())?;
            self.out.write_all(&(ns as u32).to_le_bytes())?;
        }
        Ok(())
    }

    fn attributes(&mut self, file: &OwnedFd) -> io::Result<()> {
        let mut names = vec![0; LONGEST as usize];
        let length = match flistxattr(file, &mut names[..]) {
            Err(Errno::OPNOTSUPP) => 0,
            length => length?,
        };
        for name in names[..length].split_inclusive(|byte| *byte == 0) {
            let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
            if !name.to_bytes().starts_with(ATTRIBUTES.as_bytes()) {
                continue;
            }
            let mut value = vec![0; LONGEST as usize];
            let length = fgetxattr(file, name, &mut value[..])?;
            self.count(name.to_bytes().len() + length)?;
            self.bytes(name.to_bytes())?;
            self.bytes(&value[..length])?;
        }
        self.bytes(b"")
    }

    fn directory(&mut self, directory: &OwnedFd, path: &[u8], depth: usize) -> io::Result<()> {
        if depth > DEEPEST {
            return Err(too_much("directories lie within each other more than 128 deep"));
        }
        self.head(DIRECTORY, path, &rustix::fs::fstat(directory)?)?;
        self.attributes(directory)?;
        let mut names: Vec<CString> = Vec::new();
        for entry in Dir::read_from(directory)? {
            let name = entry?.file_name().to_owned();
            if !matches!(name.to_bytes(), b"." | b"..") {
                names.push(name);
            }
        }
        names.sort();
        for name in names {
            let path = [path, if path.is_empty() { b"" } else { b"/" }, name.to_bytes()].concat();
            self.one(directory, &name, &path, depth)?;
        }
        Ok(())
    }

    fn one(&mut self, directory: &OwnedFd, name: &CStr, path: &[u8], depth: usize) -> io::Result<()> {
        let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if stat.st_dev != self.device {
            // A mount point: what lies on it belongs to another file system.
            self.head(if kind == FileType::Directory { DIRECTORY } else { REGULAR }, path, &stat)?;
            self.bytes(b"")?;
            return if kind == FileType::Directory { Ok(()) } else { self.end_of_extents(0) };
        }
        if kind == FileType::Directory {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            return self.directory(&openat(directory, name, flags, Mode::empty())?, path, depth + 1);
        }
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&stat.st_ino).cloned() {
                self.out.write_all(&[SAME])?;
                self.path(path)?;
                return self.path(&first);
            }
            self.links.insert(stat.st_ino, path.to_vec());
        }
        match kind {
            FileType::RegularFile => self.regular(directory, name, path, &stat),
            FileType::Symlink => {
                self.head(LINK, path, &stat)?;
                let target = rustix::fs::readlinkat(directory, name, Vec::new())?;
                self.bytes(target.to_bytes())
            }
            FileType::Fifo => self.head(FIFO, path, &stat),
            FileType::Socket => self.head(SOCKET, path, &stat),
            // A sandbox makes no devices.
            _ => Ok(()),
        }
    }

    fn regular(&mut self, directory: &OwnedFd, name: &CStr, path: &[u8], stat: &rustix::fs::Stat) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOATIME | OFlags::CLOEXEC;
        let file = openat(directory, name, flags, Mode::empty())?;
        self.head(REGULAR, path, stat)?;
        self.attributes(&file)?;
        let file = File::from(file);
        let (mut at, mut buffer) = (0, vec![0; PIECE]);
        loop {
            let begin = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
                Err(Errno::NXIO) => break,
                begin => begin?,
            };
            let end = rustix::fs::seek(&file, SeekFrom::Hole(begin))?;
            at = begin;
            while at < end {
                let wanted = PIECE.min((end - at) as usize);
                let read = file.read_at(&mut buffer[..wanted], at)?;
                if read == 0 {
                    break;
                }
                self.out.write_all(&at.to_le_bytes())?;
                self.bytes(&buffer[..read])?;
                at += read as u64;
            }
            at = at.max(end);
        }
        self.end_of_extents(rustix::fs::fstat(&file)?.st_size as u64)
    }

    /// An empty extent, whose place is the length of the file.
    fn end_of_extents(&mut self, size: u64) -> io::Result<()> {
        self.out.write_all(&size.to_le_bytes())?;
        self.bytes(b"")
    }
}

fn too_much(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a name or an attribute is too long")
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the contents of a file system in memory: {what}"))
}

struct Reader<'a> {
    from: BufReader<&'a File>,
    root: BorrowedFd<'a>,
    first_id: u32,
}

/// Makes all that [`write()`] has written into `from` below `root`, the empty root of a file
/// system.
///
/// # Errors
/// Those of the file systems; what is read is damaged.
pub fn read(from: &File, root: BorrowedFd<'_>, first_id: u32) -> io::Result<()> {
    let mut reader = Reader { from: BufReader::new(from), root, first_id };
    if reader.array::<8>()? != MAGIC {
        return Err(damaged("it is of another version"));
    }
    // A directory gets its times when all that is in it is there.
    let mut directories = Vec::new();
    loop {
        let kind = reader.array::<1>()?[0];
        if kind == END {
            break;
        }
        let path = reader.path()?;
        match kind {
            SAME => {
                let first = reader.path()?;
                let ((from, old), (to, new)) = (reader.parent(&first)?, reader.parent(&path)?);
                rustix::fs::linkat(&from, &old, &to, &new, AtFlags::empty())?;
            }
            DIRECTORY => {
                let facts = reader.facts()?;
                reader.directory(&path, facts)?;
                directories.push((path, facts));
            }
            REGULAR | LINK | FIFO | SOCKET => reader.one(kind, &path)?,
            _ => return Err(damaged("a file is of no known kind")),
        }
    }
    for (path, facts) in directories.into_iter().rev() {
        rustix::fs::futimens(&reader.open_directory(&path)?, &facts.timestamps())?;
    }
    Ok(())
}

impl Facts {
    fn timestamps(&self) -> Timestamps {
        let at = |(tv_sec, ns): (i64, u32)| Timespec { tv_sec, tv_nsec: ns.into() };
        Timestamps { last_access: at(self.times[0]), last_modification: at(self.times[1]) }
    }
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn word(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn bytes(&mut self, most: u32) -> io::Result<Vec<u8>> {
        let length = self.word()?;
        if length > most {
            return Err(too_long());
        }
        let mut bytes = vec![0; length as usize];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// The names of a path; none of the root.
    fn path(&mut self) -> io::Result<Vec<CString>> {
        let path = self.bytes(LONGEST)?;
        if path.is_empty() {
            return Ok(Vec::new());
        }
        let name = |name: &[u8]| match name {
            b"" | b"." | b".." => Err(damaged("a path has a name that no file has")),
            name => CString::new(name).map_err(|_| damaged("a path has a name that no file has")),
        };
        path.split(|byte| *byte == b'/').map(name).collect()
    }

    fn facts(&mut self) -> io::Result<Facts> {
        let (mode, uid, gid) = (self.word()?, self.word()?, self.word()?);
        let mut time = || Ok::<_, io::Error>((i64::from_le_bytes(self.array()?), self.word()?));
        let times = [time()?, time()?];
        if mode > 0o7777 || uid >= IDS || gid >= IDS || times.iter().any(|(_, ns)| *ns >= 1_000_000_000) {
            return Err(damaged("a file has an owner, a mode or a time that it cannot have"));
        }
        Ok(Facts { mode, uid: self.first_id + uid, gid: self.first_id + gid, times })
    }

    /// The directory of a path, and its last name.
    fn parent(&self, path: &[CString]) -> io::Result<(OwnedFd, CString)> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (name, above) = path.split_last().ok_or_else(|| damaged("the root is no file"))?;
        let mut directory = openat(self.root, ".", flags, Mode::empty())?;
        for part in above {
            directory = openat(&directory, part, flags, Mode::empty())?;
        }
        Ok((directory, name.clone()))
    }

    fn attributes(&mut self, file: &OwnedFd) -> io::Result<()> {
        loop {
            let name = self.bytes(LONGEST)?;
            if name.is_empty() {
                return Ok(());
            }
            let value = self.bytes(LONGEST)?;
            let name = CString::new(name).map_err(|_| damaged("an attribute has no name"))?;
            if !name.to_bytes().starts_with(ATTRIBUTES.as_bytes()) {
                return Err(damaged("an attribute is not the program's"));
            }
            fsetxattr(file, &name, &value, XattrFlags::empty())?;
        }
    }

    fn open_directory(&self, path: &[CString]) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if path.is_empty() {
            return Ok(openat(self.root, ".", flags, Mode::empty())?);
        }
        let (above, name) = self.parent(path)?;
        Ok(openat(&above, &name, flags, Mode::empty())?)
    }

    fn directory(&mut self, path: &[CString], facts: Facts) -> io::Result<()> {
        if !path.is_empty() {
            let (above, name) = self.parent(path)?;
            rustix::fs::mkdirat(&above, &name, Mode::RWXU)?;
        }
        let made = self.open_directory(path)?;
        self.attributes(&made)?;
        finish(&made, facts)
    }

    fn one(&mut self, kind: u8, path: &[CString]) -> io::Result<()> {
        let facts = self.facts()?;
        let (directory, name) = self.parent(path)?;
        match kind {
            REGULAR => return self.regular(&directory, &name, facts),
            LINK => {
                let target = CString::new(self.bytes(LONGEST)?).map_err(|_| damaged("a link leads nowhere"))?;
                rustix::fs::symlinkat(&target, &directory, &name)?;
            }
            _ => {
                let kind = if kind == FIFO { FileType::Fifo } else { FileType::Socket };
                rustix::fs::mknodat(&directory, &name, kind, Mode::from(0o600), 0)?;
            }
        }
        let (uid, gid) = (Uid::from_raw(facts.uid), Gid::from_raw(facts.gid));
        rustix::fs::chownat(&directory, &name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        if kind != LINK {
            // It was made just now, and nothing else writes here.
            rustix::fs::chmodat(&directory, &name, Mode::from(facts.mode), AtFlags::empty())?;
        }
        utimensat(&directory, &name, &facts.timestamps(), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }

    fn regular(&mut self, directory: &OwnedFd, name: &CStr, facts: Facts) -> io::Result<()> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(directory, name, flags, Mode::from(0o600))?;
        self.attributes(&file)?;
        let file = File::from(file);
        loop {
            let at = u64::from_le_bytes(self.array()?);
            let piece = self.bytes(PIECE as u32)?;
            if piece.is_empty() {
                file.set_len(at)?;
                break;
            }
            file.write_all_at(&piece, at)?;
        }
        finish(&file.into(), facts)
    }
}

/// Owner first: chown(2) takes bits of the mode away.
fn finish(file: &OwnedFd, facts: Facts) -> io::Result<()> {
    rustix::fs::fchown(file.as_fd(), Some(Uid::from_raw(facts.uid)), Some(Gid::from_raw(facts.gid)))?;
    rustix::fs::fchmod(file, Mode::from(facts.mode))?;
    Ok(rustix::fs::futimens(file, &facts.timestamps())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::Path;

    fn open(path: &Path) -> OwnedFd {
        File::open(path).unwrap().into()
    }

    /// Writes `from`, shifted by 0, and makes it in `to`, shifted by 1000.
    fn copy(from: &Path, to: &Path) -> io::Result<()> {
        let file = tempfile::tempfile()?;
        write(open(from).as_fd(), &file, 0)?;
        rustix::fs::seek(&file, SeekFrom::Start(0))?;
        read(&file, open(to).as_fd(), 1000)
    }

    /// A walk that goes as deep as a program likes would end the daemon, whose stack and open files
    /// it takes.
    #[test]
    fn what_lies_too_deep_or_is_too_long_is_refused() {
        let from = tempfile::tempdir().unwrap();
        let mut deep = open(from.path());
        for _ in 0..5000 {
            rustix::fs::mkdirat(&deep, "d", Mode::RWXU).unwrap();
            deep = openat(&deep, "d", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        let refused =
            |from: &Path| write(open(from).as_fd(), &tempfile::tempfile().unwrap(), 0).unwrap_err().to_string();
        assert!(refused(from.path()).contains("128 deep"));
        let long = tempfile::tempdir().unwrap();
        let mut above = open(long.path());
        for _ in 0..20 {
            let name = "x".repeat(250);
            rustix::fs::mkdirat(&above, &name, Mode::RWXU).unwrap();
            above = openat(&above, &name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        assert!(refused(long.path()).contains("longer than 4096 bytes"));
        // By its own parts: the standard library's walk ends at PATH_MAX.
        for top in [from, long] {
            let status = std::process::Command::new("rm").arg("-rf").arg(top.path()).status().unwrap();
            assert!(status.success());
        }
    }

    #[test]
    fn thousands_of_directories_come_back_with_few_open_files() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for number in 0..3000 {
            fs::create_dir(from.path().join(number.to_string())).unwrap();
        }
        let before = fs::read_dir("/proc/self/fd").unwrap().count();
        let file = tempfile::tempfile().unwrap();
        write(open(from.path()).as_fd(), &file, 0).unwrap();
        rustix::fs::seek(&file, SeekFrom::Start(0)).unwrap();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let few = rustix::process::Rlimit { current: Some(before as u64 + 200), ..limit };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        let done = read(&file, open(to.path()).as_fd(), 1000);
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        done.unwrap();
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 3000);
    }

    #[test]
    fn all_of_it_comes_back() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = |name: &str| from.path().join(name);
        fs::create_dir_all(at("deep/er")).unwrap();
        fs::write(at("deep/er/file"), "contents").unwrap();
        fs::hard_link(at("deep/er/file"), at("again")).unwrap();
        symlink("../nowhere", at("deep/link")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), FileType::Fifo, Mode::from(0o640), 0).unwrap();
        drop(std::os::unix::net::UnixListener::bind(at("socket")).unwrap());
        let holes = File::create(at("holes")).unwrap();
        holes.write_all_at(b"middle", 3 << 20).unwrap();
        holes.set_len(9 << 20).unwrap();
        std::os::unix::fs::chown(at("deep"), Some(33), Some(34)).unwrap();
        fs::set_permissions(at("deep/er"), fs::Permissions::from_mode(0o2751)).unwrap();
        File::open(at("deep/er")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        copy(from.path(), to.path()).unwrap();
        let at = |name: &str| to.path().join(name);
        let of = |name: &str| fs::symlink_metadata(at(name)).unwrap();
        assert_eq!(fs::read(at("again")).unwrap(), b"contents");
        assert_eq!(of("again").ino(), of("deep/er/file").ino());
        assert_eq!(fs::read_link(at("deep/link")).unwrap(), Path::new("../nowhere"));
        assert_eq!((of("deep").uid(), of("deep").gid(), of("again").uid()), (1033, 1034, 1000));
        assert_eq!((of("deep/er").mode() & 0o7777, of("deep/er").mtime()), (0o2751, 0));
        assert_eq!((of("pipe").mode(), of("socket").mode() & 0o170_000), (0o010_640, 0o140_000));
        let holes = of("holes");
        assert_eq!(holes.len(), 9 << 20);
        assert!(holes.blocks() < 2048, "{} blocks", holes.blocks());
        assert_eq!(&fs::read(at("holes")).unwrap()[3 << 20..(3 << 20) + 6], b"middle");
    }

    fn hostile(entries: &[(u8, &[u8])]) -> io::Result<()> {
        let mut bytes = MAGIC.to_vec();
        for (kind, path) in entries {
            bytes.push(*kind);
            bytes.extend((path.len() as u32).to_le_bytes());
            bytes.extend(*path);
            bytes.extend([0; 12 + 24]);
            bytes.extend([0; 4]);
        }
        bytes.push(END);
        let (dir, file) = (tempfile::tempdir().unwrap(), tempfile::tempfile().unwrap());
        fs::create_dir(dir.path().join("in")).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let done = read(&file, open(&dir.path().join("in")).as_fd(), 0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is made outside");
        done
    }

    #[test]
    fn what_leads_elsewhere_is_refused() {
        hostile(&[(DIRECTORY, b""), (DIRECTORY, b"a"), (DIRECTORY, b"a/b")]).unwrap();
        for bad in [&b"../x"[..], b"/x", b"a//b", b".", b"a\0b"] {
            assert!(hostile(&[(DIRECTORY, bad)]).is_err(), "{bad:?}");
        }
        assert!(hostile(&[(b'c', b"device")]).is_err());
        assert!(hostile(&[(FIFO, b"")]).is_err(), "the root is a directory");
    }
}
