//! A sleeper's volumes: where they were mounted and which of their files it had open, noted when it
//! falls asleep, looked at when it wakes.
//!
//! While it sleeps others may write in its volumes, and for it that is as if it had run all the
//! while and done nothing. It cannot go on where a file that it has open is not that file any more,
//! and must not where another writer has changed a file that the sleeper alone was writing: a
//! database would go on with pages in memory that are not those of its files. Such a wake is
//! refused. A proc that shares the volume with another is taken to know what it does.
//!
//! Whole volumes that are not there (a disk that is not mounted) are another matter: the sleeper
//! waits for them.

use super::{in_order, is_shared, path_of};
use crate::host::Proc;
use crate::secrets::{self, SecretsLost};
use kip_checkpoint::{is_below, release_volume_files};
use kip_criu_images::{CheckpointImageError, Images};
use kip_offload::restore::RESTORED;
use kip_records::body::{Slept, SleptFile};
use kip_records::instance::IDS_PER_BLOCK;
use kip_sandbox::volume::{self, Volume, VolumeError};
use kip_types::{Generation, VolumeSource};
use rustix::fs::{AtFlags, OFlags, ResolveFlags, StatxFlags, StatxTimestamp};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// It cannot fall asleep with its volumes as they are.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum UnfitVolume {
    #[error("its processes cannot be read")]
    Processes(#[source] io::Error),
    #[error(transparent)]
    Image(#[from] CheckpointImageError),
    #[error("the volume at {target} is not there any more: a directory above it was moved; start it anew")]
    Moved { target: String },
    #[error("{} is not what is mounted at {target} any more: it was replaced since the start; start it anew", path.display())]
    Replaced { path: PathBuf, target: String },
    #[error("the volume at {target} cannot be inspected")]
    Inspect {
        target: String,
        #[source]
        source: io::Error,
    },
}

/// It cannot be woken with its volumes as they are.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum VolumeChanged {
    #[error("a volume of the proc cannot be mounted")]
    Mount(#[from] VolumeError),
    #[error("the proc's secrets cannot be read")]
    Secrets(#[from] SecretsLost),
    #[error("{} is not the volume that it fell asleep with: another is there now", path.display())]
    Other { path: PathBuf },
    #[error("the snapshot's volumes differ from the proc's spec")]
    Spec,
    #[error("the proc's user namespace for its volumes cannot be had")]
    User(#[source] io::Error),
    #[error("{}, which it had open in a volume, {what}", path.display())]
    File { path: PathBuf, what: &'static str },
}

impl VolumeChanged {
    /// A volume is not there: it may come back as it was.
    pub fn is_absence(&self) -> bool {
        matches!(self, VolumeChanged::Mount(_) | VolumeChanged::Secrets(_) | VolumeChanged::Other { .. })
    }
}

/// Whether the files in a sleeper's named volumes are restored copies of those that it fell asleep
/// with in this generation.
pub fn is_restored(proc: &Path, generation: Generation) -> bool {
    fs::read_to_string(proc.join(RESTORED)).is_ok_and(|text| text.trim() == generation.0.to_string())
}

/// Notes that none of a proc's generations was restored any more: it starts, and counts them anew.
///
/// # Errors
/// The file system's.
pub fn forget_restored(proc: &Path) -> io::Result<()> {
    match fs::remove_file(proc.join(RESTORED)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// CRIU's key of the mount of the volume with that number.
pub fn key(number: usize) -> String {
    format!("volume-{number}")
}

/// A file of a volume as it is now.
fn read_file(root: BorrowedFd<'_>, path: &str) -> rustix::io::Result<SleptFile> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let stat = match path {
        "" => rustix::fs::statx(root, "", AtFlags::EMPTY_PATH, mask),
        path => kip_sys::within::open(root, path, flags, resolve)
            .and_then(|file| rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, mask)),
    }?;
    let ns = |at: StatxTimestamp| at.tv_sec.saturating_mul(1_000_000_000).saturating_add(at.tv_nsec.into());
    Ok(SleptFile {
        path: path.to_owned(),
        inode: stat.stx_ino,
        size: stat.stx_size,
        mtime_ns: ns(stat.stx_mtime),
        born_ns: ns(stat.stx_btime),
        rewrites: false,
    })
}

/// The volumes of a running proc, in the order in which they are mounted, still without files.
pub fn read(proc: &Proc, init: u32) -> Result<Vec<Slept>, UnfitVolume> {
    let mut volumes = Vec::new();
    if proc.spec().volumes.is_empty() {
        return Ok(volumes);
    }
    let root = File::open(format!("/proc/{init}/root")).map_err(UnfitVolume::Processes)?;
    let mounts = fs::read_to_string(format!("/proc/{init}/mountinfo")).map_err(UnfitVolume::Processes)?;
    for spec in in_order(&proc.spec()) {
        let (target, path) = (spec.target.clone(), path_of(&proc.shared.data, &spec.source));
        let unread = |e: Errno| UnfitVolume::Inspect { target: target.clone(), source: e.into() };
        // Also where its last part is a link.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let there = match kip_sys::within::open(&root, &target, flags, resolve) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Err(UnfitVolume::Moved { target: target.clone() }),
            there => there.map_err(unread),
        }?;
        let mask = StatxFlags::MNT_ID | StatxFlags::INO;
        let stat = rustix::fs::statx(&there, "", AtFlags::EMPTY_PATH, mask).map_err(unread)?;
        let point = point_of(&mounts, stat.stx_mnt_id).filter(|point| point != "/" && point != "/usr");
        let Some(point) = point else { return Err(UnfitVolume::Moved { target }) };
        let owner = match spec.source {
            VolumeSource::Secrets => Some(owner_of(proc, &there).map_err(unread)?),
            _ => None,
        };
        if owner.is_none()
            && fs::symlink_metadata(&path).map(|m| std::os::unix::fs::MetadataExt::ino(&m)).ok() != Some(stat.stx_ino)
        {
            return Err(UnfitVolume::Replaced { path, target });
        }
        volumes.push(Slept { path, target, point, inode: stat.stx_ino, owner, files: Vec::new() });
    }
    Ok(volumes)
}

/// Owner and group of the secrets in a directory, as ids of the inside.
fn owner_of(proc: &Proc, directory: &OwnedFd) -> rustix::io::Result<(u32, u32)> {
    let spec = proc.spec();
    let name = spec.secrets.first().map_or("", String::as_str);
    let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let inside = |id: u32| id.saturating_sub(proc.first_id());
    Ok((inside(stat.st_uid), inside(stat.st_gid)))
}

/// Where the mount of that number is, by /proc/PID/mountinfo (proc_pid_mountinfo(5)).
fn point_of(mounts: &str, number: u64) -> Option<String> {
    let line = mounts.lines().find(|line| line.split(' ').next().and_then(|id| id.parse().ok()) == Some(number))?;
    line.split(' ').nth(4).map(str::to_owned)
}

/// Notes what the frozen tree has open in them.
pub fn note_files(volumes: &mut [Slept], images: &mut Images, init: u32) -> Result<(), UnfitVolume> {
    let points: Vec<String> = volumes.iter().map(|v| v.point.clone()).collect();
    let open = release_volume_files(images, &points.iter().map(String::as_str).collect::<Vec<_>>())?;
    if open.is_empty() {
        return Ok(());
    }
    let root = File::open(format!("/proc/{init}/root")).map_err(UnfitVolume::Processes)?;
    for file in open {
        let of = volumes.iter_mut().filter(|v| is_below(&file.path, &v.point)).max_by_key(|v| v.point.len());
        let Some(volume) = of else { continue };
        let Ok(now) = read_file(root.as_fd(), &file.path) else { continue };
        let path = file.path[volume.point.len()..].trim_start_matches('/').to_owned();
        volume.files.push(SleptFile { path, rewrites: file.rewrites, ..now });
    }
    Ok(())
}

/// Mounts for a wake, detached, where the sleeper had them.
///
/// # Errors
/// They are not as they were.
pub fn for_wake(proc: &Proc, generation: Generation, slept: &[Slept]) -> Result<Vec<Volume>, VolumeChanged> {
    if slept.len() != proc.spec().volumes.len() {
        return Err(VolumeChanged::Spec);
    }
    if slept.is_empty() {
        return Ok(Vec::new());
    }
    let user = proc.held_user().map_err(VolumeChanged::User)?;
    let of_it = proc.spec();
    let mut volumes = Vec::new();
    let restored = is_restored(&proc.dir, generation);
    for one in slept {
        // What its spec says, not the manifest: that may have been in a store.
        let spec = of_it.volumes.iter().find(|v| v.target == one.target).ok_or(VolumeChanged::Spec)?;
        if spec.source == VolumeSource::Secrets {
            // Checked like all that may have been in a store: no ids but its own.
            let owner = one.owner.filter(|(uid, gid)| *uid < IDS_PER_BLOCK && *gid < IDS_PER_BLOCK);
            let (uid, gid) = owner.ok_or(VolumeChanged::Spec)?;
            volumes.push(secrets::mount(proc, &one.point, uid, gid)?);
            continue;
        }
        let path = path_of(&proc.shared.data, &spec.source);
        let volume = volume::mount(&path, &one.point, user.as_fd(), spec.read_only)?;
        // Its files are copies of what it fell asleep with, and so are their times.
        let is_copy = restored && matches!(spec.source, VolumeSource::Named(_));
        if volume.inode != one.inode && !is_copy {
            return Err(VolumeChanged::Other { path });
        }
        let shared = is_shared(proc, &path);
        for file in &one.files {
            check_file(file, volume.fd.as_fd(), shared, is_copy)
                .map_err(|what| VolumeChanged::File { path: path.join(&file.path), what })?;
        }
        volumes.push(volume);
    }
    Ok(volumes)
}

/// What stands in the way of a file that a sleeper had open.
fn check_file(file: &SleptFile, root: BorrowedFd<'_>, shared: bool, is_copy: bool) -> Result<(), &'static str> {
    let Ok(now) = read_file(root, &file.path) else { return Err("is gone") };
    match () {
        () if (now.inode, now.born_ns) != (file.inode, file.born_ns) && !is_copy => Err("was replaced while it slept"),
        () if now.size < file.size && file.rewrites => Err("was cut while it slept"),
        () if file.rewrites && !shared && (now.size, now.mtime_ns) != (file.size, file.mtime_ns) => {
            Err("was changed from outside while the proc slept")
        }
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn what_somebody_else_did_to_a_file_counts_where_the_sleeper_alone_writes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        fs::write(&path, "1234").unwrap();
        let root = OwnedFd::from(File::open(dir.path()).unwrap());
        let before = read_file(root.as_fd(), "db").unwrap();
        let check =
            |rewrites, shared| check_file(&SleptFile { rewrites, ..before.clone() }, root.as_fd(), shared, false);
        assert_eq!(check(true, false), Ok(()));
        fs::write(&path, "5678").unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(SystemTime::now() + Duration::from_secs(9))
            .unwrap();
        assert_eq!(check(true, false), Err("was changed from outside while the proc slept"));
        assert_eq!((check(true, true), check(false, false)), (Ok(()), Ok(())));
        fs::write(&path, "56789").unwrap();
        assert_eq!((check(true, true), check(false, false)), (Ok(()), Ok(())), "it has grown");
        fs::write(&path, "5").unwrap();
        assert_eq!((check(true, true), check(false, false)), (Err("was cut while it slept"), Ok(())));
        fs::remove_file(&path).unwrap();
        assert_eq!(check(false, true), Err("is gone"));
        fs::write(&path, "1234").unwrap();
        assert_eq!(check(false, true), Err("was replaced while it slept"));
    }

    #[test]
    fn mounts_are_found_by_number() {
        let mounts = "41 30 0:1 / / rw - overlay kip rw\n77 41 8:1 /srv/x /data rw,nosuid - ext4 /dev/x rw\n";
        assert_eq!(point_of(mounts, 77).as_deref(), Some("/data"));
        assert_eq!(point_of(mounts, 7), None);
    }
}
