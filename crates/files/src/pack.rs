//! What is at a path as a tar stream: files, directories, links by either kind; modes and times.
//!
//! Sockets, pipes and devices are left out, and of what the kernel makes up there is an empty
//! directory. A file that shrinks while it is read ends with zeros.

use crate::error::FilesError;
use crate::tree::{Place, RootTree, is_directory, reopen};
use rustix::fs::{Dir, FileType, OFlags, Stat, fstat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

/// Directories that lie within each other.
const DEEPEST: usize = 256;
/// A link's target that has its place in an entry's header, bytes.
const SHORT_TARGET: usize = 100;

/// Turns an owner's id on the machine into the one of the archive.
pub type OwnerIds<'a> = &'a dyn Fn(u32) -> u32;

/// What is at a path.
#[derive(Debug)]
pub struct PackSource {
    file: OwnedFd,
    name: PathBuf,
    path: PathBuf,
}

impl PackSource {
    /// Looks for it. `follow`: where it is a link, what that leads to.
    ///
    /// # Errors
    /// Nothing is there, or nothing that can be copied.
    pub fn find(tree: &RootTree, path: &Path, follow: bool) -> Result<PackSource, FilesError> {
        let Place { name, file, .. } = tree.find(path, follow).map_err(FilesError::of(path))?;
        let Some(file) = file else { return Err(FilesError::Missing { path: path.to_owned() }) };
        let stat = fstat(&file).map_err(FilesError::of(path))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory | FileType::RegularFile | FileType::Symlink => {}
            _ => return Err(FilesError::Special { path: path.to_owned() }),
        }
        let name = PathBuf::from(name.unwrap_or_else(|| OsString::from(".")));
        Ok(PackSource { file, name, path: path.to_owned() })
    }

    /// Writes it and all that is below it.
    ///
    /// # Errors
    /// A file cannot be read, or `out` takes no more. The stream is not complete then.
    pub fn pack(&self, tree: &RootTree, ids: OwnerIds<'_>, out: &mut dyn Write) -> Result<(), FilesError> {
        let mut packing = Packing { tree, ids, out: Builder::new(out), links: HashMap::new() };
        packing.one(&self.file, &self.name, &self.path, 0)?;
        packing.out.finish().map_err(FilesError::Sent)
    }
}

struct Packing<'a> {
    tree: &'a RootTree,
    ids: OwnerIds<'a>,
    out: Builder<&'a mut dyn Write>,
    /// Files with several names, by device and inode: the first name.
    links: HashMap<(u64, u64), PathBuf>,
}

impl Packing<'_> {
    fn one(&mut self, file: &OwnedFd, name: &Path, path: &Path, depth: usize) -> Result<(), FilesError> {
        let at = FilesError::of(path);
        let stat = match fstat(file) {
            Ok(stat) => stat,
            Err(e) => return Err(at(e)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.directory(file, &stat, name, path, depth),
            FileType::RegularFile => self.regular(file, &stat, name, path),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(file, "", Vec::new()).map_err(at)?;
                let target = OsStr::from_bytes(target.as_bytes());
                self.link(&mut self.header(&stat, EntryType::Symlink), name, Path::new(target))
            }
            _ => Ok(()),
        }
    }

    fn header(&self, stat: &Stat, kind: EntryType) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(stat.st_mode & 0o7777);
        header.set_uid((self.ids)(stat.st_uid).into());
        header.set_gid((self.ids)(stat.st_gid).into());
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_size(0);
        header
    }

    fn directory(
        &mut self,
        dir: &OwnedFd,
        stat: &Stat,
        name: &Path,
        path: &Path,
        depth: usize,
    ) -> Result<(), FilesError> {
        if depth == DEEPEST {
            let source = io::Error::other(format!("it lies more than {DEEPEST} directories deep"));
            return Err(FilesError::Io { path: path.to_owned(), source });
        }
        let mut header = self.header(stat, EntryType::Directory);
        self.out.append_data(&mut header, name, io::empty()).map_err(FilesError::Sent)?;
        for child in names(dir).map_err(FilesError::of(path))? {
            let below = path.join(&child);
            match self.tree.child(dir, &child) {
                // It is gone by now.
                Err(Errno::NOENT) => {}
                Err(Errno::XDEV) => {
                    let mut empty = self.header(stat, EntryType::Directory);
                    self.out.append_data(&mut empty, name.join(&child), io::empty()).map_err(FilesError::Sent)?;
                }
                Err(e) => return Err(FilesError::of(&below)(e)),
                Ok(file) => self.one(&file, &name.join(&child), &below, depth + 1)?,
            }
        }
        Ok(())
    }

    fn regular(&mut self, file: &OwnedFd, stat: &Stat, name: &Path, path: &Path) -> Result<(), FilesError> {
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&(stat.st_dev, stat.st_ino)) {
                let first = first.clone();
                return self.link(&mut self.header(stat, EntryType::Link), name, &first);
            }
            self.links.insert((stat.st_dev, stat.st_ino), name.to_owned());
        }
        let opened = reopen(file, OFlags::RDONLY | OFlags::NONBLOCK).map_err(FilesError::of(path))?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let mut header = self.header(stat, EntryType::Regular);
        header.set_size(size);
        let mut failed = None;
        let contents = Contents { file: File::from(opened), failed: &mut failed };
        let sent = self.out.append_data(&mut header, name, contents.chain(io::repeat(0)).take(size));
        match failed {
            Some(source) => Err(FilesError::Io { path: path.to_owned(), source }),
            None => sent.map_err(FilesError::Sent),
        }
    }

    fn link(&mut self, header: &mut Header, name: &Path, target: &Path) -> Result<(), FilesError> {
        let sent = if target.as_os_str().len() > SHORT_TARGET {
            self.out.append_link(header, name, target)
        } else {
            // As it is: the builder would leave out dots.
            header
                .set_link_name_literal(target.as_os_str().as_bytes())
                .and_then(|()| self.out.append_data(header, name, io::empty()))
        };
        sent.map_err(FilesError::Sent)
    }
}

/// A file's bytes; notes why there are no more.
struct Contents<'a> {
    file: File,
    failed: &'a mut Option<io::Error>,
}

impl Read for Contents<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read(buffer).map_err(|e| {
            let kind = e.kind();
            *self.failed = Some(e);
            kind.into()
        })
    }
}

/// The names in a directory, sorted.
fn names(dir: &OwnedFd) -> rustix::io::Result<Vec<OsString>> {
    let opened = reopen(dir, OFlags::RDONLY | OFlags::DIRECTORY)?;
    debug_assert!(fstat(&opened).is_ok_and(|stat| is_directory(&stat)));
    let mut names = Vec::new();
    for entry in Dir::new(opened)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}
