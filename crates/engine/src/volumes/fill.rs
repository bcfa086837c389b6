//! What a new volume gets from the directory that it covers: owner and mode, and with an image the
//! files, as other runtimes of images do it. So that a program which is not root can use it, and
//! what its image puts there is there.
//!
//! Only a named volume that is empty, and only at a start: from then on it is its owner's. The
//! files are copied beside the volumes first, to `.filling-NAME.new`, and moved in from
//! `.filling-NAME`, which goes on at the next start if it was cut short.

use super::{directory, path_of};
use crate::host::Proc;
use kip_archive::files::restore::IdShift;
use kip_archive::files::shift::shift;
use kip_records::instance::IDS_PER_BLOCK;
use kip_sandbox::rootfs::Mounts;
use kip_types::{Image, VolumeName, VolumeSource, VolumeSpec};
use parking_lot::Mutex;
use rustix::fs::{OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{self, Command, Stdio};

/// Of volumes that are being filled.
pub(super) const FILLING: &str = ".filling-";

/// Two procs that start with one volume.
static FILLS: Mutex<()> = Mutex::new(());

fn is_empty(path: &Path) -> io::Result<bool> {
    Ok(fs::read_dir(path)?.next().is_none())
}

/// The directory that a volume covers, if there is one.
fn covered(mounts: &Mounts, target: &str) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let (root, path) = match target.strip_prefix("/usr/") {
        Some(below) => (mounts.usr.as_fd(), below),
        None => (mounts.root.as_fd(), target),
    };
    match kip_sys::within::open(root, path, flags, resolve) {
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}

/// Gives a volume that is empty what it covers.
pub(super) fn fill(proc: &Proc, mounts: &Mounts, volume: &VolumeSpec) -> io::Result<()> {
    let VolumeSource::Named(name) = &volume.source else { return Ok(()) };
    let path = path_of(&proc.shared.data, &volume.source);
    let _one_at_a_time = FILLS.lock();
    let begun = directory(&proc.shared.data).join(format!("{FILLING}{name}"));
    if begun.exists() {
        return move_in(&begun, &path);
    }
    if !is_empty(&path)? {
        return Ok(());
    }
    let Some(from) = covered(mounts, &volume.target)? else { return Ok(()) };
    let found = rustix::fs::fstat(&from)?;
    let inside = |id: u32| id.checked_sub(proc.first_id()).filter(|id| *id < IDS_PER_BLOCK);
    let (Some(uid), Some(gid)) = (inside(found.st_uid), inside(found.st_gid)) else { return Ok(()) };
    std::os::unix::fs::chown(&path, Some(uid), Some(gid))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(found.st_mode & 0o7777))?;
    if !matches!(proc.spec().image, Image::Oci(_)) {
        return Ok(());
    }
    let growing = directory(&proc.shared.data).join(format!("{FILLING}{name}.new"));
    let copied = copy(&from, &growing, proc.first_id());
    copied.and_then(|()| fs::rename(&growing, &begun)).inspect_err(|_| drop(fs::remove_dir_all(&growing)))?;
    move_in(&begun, &path)
}

/// Copies all that is in a directory of a sandbox, with the ids that it has inside.
fn copy(from: &OwnedFd, to: &Path, first_id: u32) -> io::Result<()> {
    match fs::remove_dir_all(to) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => fs::create_dir(to)?,
    }
    // Of a mount that is nowhere attached: it has a path by our descriptor only.
    let from = format!("/proc/{}/fd/{}/.", process::id(), from.as_raw_fd());
    let mut cp = Command::new("cp");
    cp.args(["--archive", "--sparse=always", "--one-file-system", "--", &from]).arg(to);
    let done = cp.env("LC_ALL", "C").stdin(Stdio::null()).output()?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr).lines().next().unwrap_or("cp was killed").to_owned();
        return Err(io::Error::other(said));
    }
    shift(to, IdShift { from: first_id, to: 0, count: IDS_PER_BLOCK })?;
    rustix::fs::syncfs(fs::File::open(to)?)?;
    Ok(())
}

fn move_in(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        fs::rename(entry.path(), to.join(entry.file_name()))?;
    }
    fs::remove_dir(from)
}

/// Nothing is to be put any more into a volume that is removed.
pub fn forget(data: &Path, name: &VolumeName) {
    for end in ["", ".new"] {
        let _ = fs::remove_dir_all(directory(data).join(format!("{FILLING}{name}{end}")));
    }
}
