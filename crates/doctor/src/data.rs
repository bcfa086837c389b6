//! The data directory: whether overlays work on its filesystem, whether /usr can be hard linked
//! into it, room, rights.

use crate::check::{DoctorCheck, is_root};
use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::mount::{FsOpenFlags, fsconfig_create, fsconfig_set_string, fsopen};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

const MIB: u64 = 1 << 20;

pub(super) fn checks(data: &Path) -> Vec<DoctorCheck> {
    let place = nearest(data);
    vec![rights(data), room(&place), links(&place), overlay(&place)]
}

/// The directory itself, or the nearest one above it that is there.
fn nearest(data: &Path) -> PathBuf {
    let absolute = std::path::absolute(data).unwrap_or_else(|_| data.to_owned());
    absolute.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

fn rights(data: &Path) -> DoctorCheck {
    const NAME: &str = "data directory";
    match fs::metadata(data) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            DoctorCheck::ok(NAME, format!("{} will be made", data.display()))
        }
        Err(error) => DoctorCheck::fail(
            NAME,
            format!("{}: {error}", data.display()),
            "`kip up` cannot use it",
            "give another --data DIR",
        ),
        Ok(meta) if !meta.is_dir() => DoctorCheck::fail(
            NAME,
            format!("{} is no directory", data.display()),
            "`kip up` cannot use it",
            "give another --data DIR",
        ),
        Ok(meta) if meta.permissions().mode() & 0o022 != 0 => {
            let cost = "a user who may write there can become root: snapshots are run as they are";
            DoctorCheck::fail(
                NAME,
                format!("{} may be written by others", data.display()),
                cost,
                format!("chmod go-w {}", data.display()),
            )
        }
        Ok(_) => DoctorCheck::ok(NAME, data.display().to_string()),
    }
}

fn room(place: &Path) -> DoctorCheck {
    const NAME: &str = "room";
    match statvfs(place) {
        Ok(fs) if fs.f_flag.contains(StatVfsMountFlags::RDONLY) => {
            let found = format!("{} is mounted read-only", place.display());
            DoctorCheck::fail(NAME, found, "nothing can be started or parked", "give another --data DIR")
        }
        Ok(fs) => judge_room(fs.f_bavail.saturating_mul(fs.f_frsize), (fs.f_files > 0).then_some(fs.f_favail)),
        Err(error) => DoctorCheck::warn(
            NAME,
            format!("{}: {error}", place.display()),
            "not known whether snapshots fit",
            "see df",
        ),
    }
}

/// `inodes` is none where the filesystem makes them as needed.
fn judge_room(bytes: u64, inodes: Option<u64>) -> DoctorCheck {
    const NAME: &str = "room";
    const COST: &str = "a proc whose snapshot does not fit runs on and is never parked";
    let mend = "make room, or give another --data DIR";
    let found = format!("{} MiB free", bytes / MIB);
    match inodes {
        Some(few @ ..1000) => DoctorCheck::fail(NAME, format!("{found}, {few} inodes"), COST, mend),
        _ if bytes < 64 * MIB => DoctorCheck::fail(NAME, found, COST, mend),
        _ if bytes < 1024 * MIB => DoctorCheck::warn(NAME, found, COST, mend),
        _ => DoctorCheck::ok(NAME, found),
    }
}

/// Files of the base that a sleeper maps are pinned by hard links, which stay within one
/// filesystem.
fn links(place: &Path) -> DoctorCheck {
    const NAME: &str = "pinning";
    let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev()).ok();
    if device(place) == device(Path::new("/usr")) {
        return DoctorCheck::ok(NAME, "by hard links: same filesystem as /usr");
    }
    let cost = "pinning a sleeper's files copies them: the first park takes longer and up to some 100 MB";
    DoctorCheck::warn(NAME, "by copies: not the filesystem of /usr", cost, "a --data DIR on the filesystem of /usr")
}

fn overlay(place: &Path) -> DoctorCheck {
    const NAME: &str = "overlay on data";
    if !is_root() {
        return DoctorCheck::warn(
            NAME,
            "not tried: needs root",
            "not known whether procs can have a root here",
            "run this as root",
        );
    }
    match Scratch::new(place).and_then(|scratch| try_overlay(&scratch.0)) {
        Ok(()) => DoctorCheck::ok(NAME, "works with index and nfs_export"),
        Err(error) => {
            let mend = "a --data DIR on ext4, xfs or btrfs; in a container, a volume in place of its own overlay";
            let found = format!("refused in {}: {error}", place.display());
            DoctorCheck::fail(
                NAME,
                found,
                "procs cannot have a root filesystem, or those that watch files cannot be parked",
                mend,
            )
        }
    }
}

/// Makes an overlay as a proc's root has it, but attaches it nowhere: it ends with the descriptor.
fn try_overlay(scratch: &Path) -> io::Result<()> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, folder) in [("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work")] {
        let path = scratch.join(folder);
        fs::create_dir(&path)?;
        fsconfig_set_string(&context, key, path.as_path())?;
    }
    for key in ["index", "nfs_export"] {
        fsconfig_set_string(&context, key, "on")?;
    }
    fsconfig_create(&context)?;
    Ok(())
}

/// A directory that goes with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new(place: &Path) -> io::Result<Scratch> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = place.join(format!(".kip-doctor.{}.{number}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing to tell: what stays is empty and named for what made it.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::CheckStatus;

    #[test]
    fn room_is_judged_by_bytes_and_inodes() {
        assert_eq!(judge_room(5 << 30, None).status, CheckStatus::Ok);
        assert_eq!(judge_room(5 << 30, Some(1 << 20)).status, CheckStatus::Ok);
        assert_eq!(judge_room(500 * MIB, None).status, CheckStatus::Warn);
        assert_eq!(judge_room(10 * MIB, None).status, CheckStatus::Fail);
        assert_eq!(judge_room(5 << 30, Some(3)).found, "5120 MiB free, 3 inodes");
    }

    #[test]
    fn the_nearest_directory_stands_for_one_that_is_not_there() {
        let here = std::env::temp_dir();
        assert_eq!(nearest(&here.join("kip-no/such/dir")), here);
        assert_eq!(nearest(&here), here);
    }

    #[test]
    fn a_directory_that_others_may_write_is_refused() {
        let scratch = Scratch::new(&std::env::temp_dir()).unwrap();
        let own = scratch.0.join("data");
        assert!(rights(&own).found.ends_with("will be made"));
        fs::create_dir(&own).unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(rights(&own).status, CheckStatus::Ok);
        fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(rights(&own).status, CheckStatus::Fail);
        fs::write(scratch.0.join("file"), "").unwrap();
        assert_eq!(rights(&scratch.0.join("file")).status, CheckStatus::Fail);
    }

    #[test]
    fn the_overlay_is_really_tried_and_leaves_nothing() {
        assert!(is_root(), "run the tests as root: `make test` does");
        let place = std::env::temp_dir().join(format!("kip-doctor-test-{}", std::process::id()));
        fs::create_dir(&place).unwrap();
        let check = overlay(&place);
        let left = fs::read_dir(&place).unwrap().count();
        fs::remove_dir(&place).unwrap();
        assert_eq!((check.status, left), (CheckStatus::Ok, 0), "{check:?}");
        assert_eq!(overlay(Path::new("/proc")).status, CheckStatus::Fail);
    }
}
