//! The entries of an archive, made one by one below the destination.

use super::{ArchiveLimits, Form, RATIO_COUNTS_FROM_BYTES, Trouble, Unpacked, Watched};
use crate::base::USR_LINKS;
use crate::rootfs::OPAQUE;
use kip_files::unpack::relative;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tar::EntryType;

/// Most lines of [`Unpacked::left_out`].
const LEFT_OUT: usize = 20;

pub(super) struct Unpacking<'a> {
    form: Form,
    root: OwnedFd,
    limits: &'a ArchiveLimits,
    packed: Rc<Cell<u64>>,
    pub(super) done: Unpacked,
}

impl<'a> Unpacking<'a> {
    pub(super) fn new(form: Form, root: OwnedFd, limits: &'a ArchiveLimits, packed: Rc<Cell<u64>>) -> Unpacking<'a> {
        Unpacking { form, root, limits, packed, done: Unpacked::default() }
    }

    /// Makes every entry; the name of the one that failed comes with why.
    pub(super) fn all(
        &mut self,
        stream: Box<dyn Read + '_>,
        plain: &mut dyn FnMut(&[u8]),
    ) -> Result<(), (Option<String>, Trouble)> {
        let broken = |e| (None, Trouble::Archive(e));
        let trailing_zeros = Rc::new(Cell::new(0));
        // Headers, long names and padding come on top of the contents.
        let left = self.limits.bytes.saturating_add(self.limits.entries.saturating_mul(4096)).saturating_add(1 << 20);
        let mut archive = tar::Archive::new(Watched { stream, plain, trailing_zeros: trailing_zeros.clone(), left });
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

    fn one(&mut self, entry: &mut tar::Entry<'_, Watched<'_>>) -> Result<(), Trouble> {
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
        if self.form == Form::Layer && self.deletion(&path)? {
            return Ok(());
        }
        let owner = Owner::of(entry)?;
        let (parent, name) = self.parent(&path)?;
        let attributes = if self.form == Form::Layer { attributes(entry)? } else { Vec::new() };
        match kind {
            EntryType::Directory => {
                self.done.implied.remove(&path);
                return self.directory(&parent, &name, &owner, &attributes);
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.regular(&parent, &name, &owner, &attributes, entry)?;
            }
            EntryType::Symlink => {
                let target = link_target(entry)?;
                remove_old(&parent, &name)?;
                rustix::fs::symlinkat(&target, &parent, &name)?;
                rustix::fs::chownat(&parent, &name, owner.uid, owner.gid, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            EntryType::Link => self.hard_link(&parent, &name, &link_target(entry)?)?,
            EntryType::Char | EntryType::Block if self.form == Form::Layer => {
                self.leave_out(format!("/{} is a device node", path.display()));
            }
            EntryType::Char | EntryType::Block => return Err(Trouble::Refused("is a device node".into())),
            EntryType::Fifo if self.form == Form::Layer => {
                remove_old(&parent, &name)?;
                rustix::fs::mknodat(&parent, &name, FileType::Fifo, owner.mode, 0)?;
                rustix::fs::chownat(&parent, &name, owner.uid, owner.gid, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            EntryType::Fifo => return Err(Trouble::Refused("is a named pipe".into())),
            _ => return Err(Trouble::Refused(format!("is of an unknown type {:?}", kind.as_byte() as char))),
        }
        Ok(())
    }

    /// Where an entry goes; none when it is there anyway. What the archive has in `/bin` and its
    /// like goes to where the base's links of that name lead.
    fn place(
        &self,
        written: &Path,
        kind: EntryType,
        entry: &tar::Entry<'_, Watched<'_>>,
    ) -> Result<Option<PathBuf>, Trouble> {
        let refuse = |why: &str| Err(Trouble::Refused(why.into()));
        let mut path = match relative(self.seen_from_root(written)) {
            Ok(path) => path,
            Err(why) => return refuse(why),
        };
        let Some(first) = path.iter().next().map(OsString::from) else { return Ok(None) };
        let alone = path.iter().nth(1).is_none();
        if self.form == Form::Layer {
            return match alone && first == "usr" && kind != EntryType::Directory {
                true => refuse("must be a directory"),
                false => Ok(Some(path)),
            };
        }
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
    fn parent(&mut self, path: &Path) -> Result<(OwnedFd, OsString), Trouble> {
        let name = path.file_name().expect("`relative` leaves plain names only").to_owned();
        let parent = path.parent().unwrap_or(Path::new(""));
        match self.open_dir(parent) {
            Err(Errno::NOENT) => {}
            Err(Errno::NOTDIR) if self.form == Form::Layer => {}
            other => return Ok((other?, name)),
        }
        let mut made = PathBuf::new();
        for part in parent {
            let above = self.open_dir(&made)?;
            let fresh = match rustix::fs::mkdirat(&above, part, Mode::from(0o755)) {
                Ok(()) => true,
                // What it deletes of lower layers it makes anew.
                Err(Errno::EXIST) if self.form == Form::Layer && is_deletion(&above, part)? => {
                    make_opaque_dir(&above, part)?;
                    false
                }
                Err(Errno::EXIST) => false,
                Err(e) => return Err(e.into()),
            };
            made.push(part);
            if fresh {
                self.done.implied.insert(made.clone());
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
        kip_sys::within::open(&self.root, path, flags, self.within())
    }

    fn directory(
        &mut self,
        parent: &OwnedFd,
        name: &OsStr,
        owner: &Owner,
        attributes: &[Attribute],
    ) -> Result<(), Trouble> {
        match rustix::fs::mkdirat(parent, name, Mode::from(0o755)) {
            Ok(()) => {}
            Err(Errno::EXIST) if self.form == Form::Layer && is_deletion(parent, name)? => {
                make_opaque_dir(parent, name)?;
            }
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
        owner.give(dir.as_fd())?;
        self.keep_attributes(dir.as_fd(), name, attributes);
        Ok(())
    }

    fn regular(
        &mut self,
        parent: &OwnedFd,
        name: &OsStr,
        owner: &Owner,
        attributes: &[Attribute],
        entry: &mut tar::Entry<'_, Watched<'_>>,
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
        // After the owner: a change of owner takes file capabilities away.
        self.keep_attributes(file.as_fd(), name, attributes);
        let time = Timespec { tv_sec: owner.time, tv_nsec: 0 };
        Ok(rustix::fs::futimens(&file, &Timestamps { last_access: time, last_modification: time })?)
    }

    /// How paths are resolved. Layers are made to be looked at with their root as `/`.
    fn within(&self) -> ResolveFlags {
        let within = if self.form == Form::Layer { ResolveFlags::IN_ROOT } else { ResolveFlags::BENEATH };
        within | ResolveFlags::NO_MAGICLINKS
    }

    fn seen_from_root<'p>(&self, path: &'p Path) -> &'p Path {
        if self.form == Form::Layer { path.strip_prefix("/").unwrap_or(path) } else { path }
    }

    /// Whether this entry of a layer only says what of lower layers is not there any more: done
    /// then, in overlayfs's way.
    fn deletion(&mut self, path: &Path) -> Result<bool, Trouble> {
        let name = path.file_name().expect("`relative` leaves plain names only").as_bytes();
        let Some(deleted) = name.strip_prefix(b".wh.") else { return Ok(false) };
        if deleted == b".wh..opq" {
            let dir = path.parent().unwrap_or(Path::new(""));
            let opened = if dir.as_os_str().is_empty() { self.open_dir(dir)? } else { self.made_dir(dir)? };
            return set_opaque(&opened).map(|()| true).map_err(Into::into);
        }
        // Notes of aufs about itself.
        if deleted.starts_with(b".wh.") {
            return Ok(true);
        }
        if matches!(deleted, b"" | b"." | b"..") {
            return Err(Trouble::Refused("deletes what is no name".into()));
        }
        let (parent, _) = self.parent(path)?;
        let deleted = OsStr::from_bytes(deleted);
        match rustix::fs::mknodat(&parent, deleted, FileType::CharacterDevice, Mode::empty(), 0) {
            Ok(()) => {}
            // What the layer itself brings stays; what is below it is hidden.
            Err(Errno::EXIST) => {
                let there = rustix::fs::statat(&parent, deleted, AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(there.st_mode) == FileType::Directory {
                    set_opaque(&open_made(&parent, deleted)?)?;
                }
            }
            Err(e) => return Err(e.into()),
        }
        Ok(true)
    }

    /// A directory of the layer, made if it is not there.
    fn made_dir(&mut self, path: &Path) -> Result<OwnedFd, Trouble> {
        let (parent, name) = self.parent(path)?;
        match rustix::fs::mkdirat(&parent, &name, Mode::from(0o755)) {
            Ok(()) => drop(self.done.implied.insert(path.to_owned())),
            Err(Errno::EXIST) if is_deletion(&parent, &name)? => make_opaque_dir(&parent, &name)?,
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(self.open_dir(path)?)
    }

    fn leave_out(&mut self, line: String) {
        if self.done.left_out.len() < LEFT_OUT {
            self.done.left_out.push(line);
        }
    }

    fn keep_attributes(&mut self, fd: BorrowedFd<'_>, name: &OsStr, attributes: &[Attribute]) {
        for (key, value) in attributes {
            if let Err(e) = rustix::fs::fsetxattr(fd, key.as_str(), value, XattrFlags::empty()) {
                self.leave_out(format!("attribute {key} of {}: {e}", name.to_string_lossy()));
            }
        }
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
    fn hard_link(&self, parent: &OwnedFd, name: &OsStr, target: &Path) -> Result<(), Trouble> {
        let mut target = relative(self.seen_from_root(target))
            .map_err(|_| Trouble::Refused("is a hard link to something outside".into()))?;
        if self.form == Form::Tarball && target.iter().next().is_some_and(|f| USR_LINKS.iter().any(|l| f == *l)) {
            target = Path::new("usr").join(target);
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = kip_sys::within::open(&self.root, &target, flags, self.within()).map_err(|e| match e {
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

fn link_target(entry: &tar::Entry<'_, Watched<'_>>) -> Result<PathBuf, Trouble> {
    let target = entry.link_name().map_err(Trouble::Archive)?;
    target.map(|t| t.into_owned()).ok_or_else(|| Trouble::Refused("is a link without a target".into()))
}

/// The later entry of a name wins, but no directory is thrown away for it.
fn remove_old(parent: &OwnedFd, name: &OsStr) -> Result<(), Trouble> {
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
    fn of(entry: &tar::Entry<'_, Watched<'_>>) -> Result<Owner, Trouble> {
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

/// An extended attribute that is kept.
type Attribute = (String, Vec<u8>);

/// The attributes of an entry that only the program itself believes, and file capabilities, which
/// count within the proc's user namespace only.
fn attributes(entry: &mut tar::Entry<'_, Watched<'_>>) -> Result<Vec<Attribute>, Trouble> {
    let mut kept = Vec::new();
    let Some(records) = entry.pax_extensions().map_err(Trouble::Archive)? else { return Ok(kept) };
    for record in records {
        let record = record.map_err(Trouble::Archive)?;
        let Some(key) = record.key().ok().and_then(|key| key.strip_prefix("SCHILY.xattr.")) else { continue };
        if (key.starts_with("user.") && !key.starts_with("user.overlay.")) || key == "security.capability" {
            kept.push((key.to_owned(), record.value_bytes().to_vec()));
        }
    }
    Ok(kept)
}

/// Whether overlayfs takes it for the absence of a name. Nothing else makes a device here.
fn is_deletion(parent: &OwnedFd, name: &OsStr) -> rustix::io::Result<bool> {
    let there = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(there.st_mode) == FileType::CharacterDevice)
}

/// A directory in the place of a deletion: what is below it in lower layers stays hidden.
fn make_opaque_dir(parent: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
    rustix::fs::mkdirat(parent, name, Mode::from(0o755))?;
    set_opaque(&open_made(parent, name)?)
}

fn open_made(parent: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

/// Of a directory that is open by path only.
fn set_opaque(dir: &OwnedFd) -> rustix::io::Result<()> {
    let dir = rustix::fs::openat(dir, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::fsetxattr(&dir, OPAQUE, b"y", XattrFlags::empty())
}
