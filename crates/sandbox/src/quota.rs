//! Where a proc's own files lie, `upper` and `work` of its overlays: in its directory, or, if it
//! has a limit of disk space (`kip run --disk`), in a file system of that size, the file `disk.img`
//! there.
//!
//! That file system is mounted at `disk`, in the daemon's mount namespace, while a part of the
//! daemon uses the files; the overlays over it have it mounted for themselves, for as long as they
//! are. Files that lie in `disk` while it is not mounted are those of a restored backup: the first
//! use makes a `disk.img` of them. A crash leaves at most a `disk.new`, which the next use makes
//! anew.

use crate::disk::{self, DiskError, MountedDisk};
use kip_types::Spec;
use parking_lot::{Mutex, MutexGuard};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The file with a limited disk.
pub const IMAGE: &str = "disk.img";
/// Where it is mounted.
pub const PLACE: &str = "disk";
/// Where it is filled.
const FILLED: &str = "disk.filled";
/// A part of the daemon that uses the files may take so long to notice that the proc goes.
const UNUSED_WITHIN: Duration = Duration::from_secs(10);

/// They are not to be had.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error("restored files do not go into its limited disk: {0}")]
    Fill(String),
    #[error("{path}, the place of its own files, cannot be read or changed")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> QuotaError {
    let path = path.to_owned();
    move |source| QuotaError::Io { path, source }
}

/// A proc's own files.
#[derive(Debug)]
pub struct OwnFiles {
    dir: PathBuf,
    limit: Option<u64>,
    mounted: Mutex<Option<(usize, MountedDisk)>>,
}

/// Keeps them where they are as long as it lives.
#[derive(Debug, Clone)]
pub struct OwnFilesPlace {
    path: PathBuf,
    _user: Option<Arc<User>>,
}

#[derive(Debug)]
struct User(Arc<OwnFiles>);

impl OwnFilesPlace {
    /// The directory that has `upper` and `work`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Without a limit: the directory itself.
    pub fn unlimited(dir: &Path) -> OwnFilesPlace {
        OwnFilesPlace { path: dir.to_owned(), _user: None }
    }
}

impl OwnFiles {
    /// Those of a proc with this directory.
    pub fn of(spec: &Spec, dir: &Path) -> Arc<OwnFiles> {
        Arc::new(OwnFiles { dir: dir.to_owned(), limit: spec.limits.disk_bytes, mounted: Mutex::default() })
    }

    /// Bytes that they take on the disk, where they are limited.
    pub fn limited_bytes(&self) -> Option<u64> {
        use std::os::unix::fs::MetadataExt as _;
        self.limit?;
        Some(fs::metadata(self.dir.join(IMAGE)).map_or(0, |found| found.blocks() * 512))
    }

    /// Where they are, as long as what is returned lives.
    ///
    /// # Errors
    /// See [`QuotaError`].
    pub fn place(self: &Arc<Self>) -> Result<OwnFilesPlace, QuotaError> {
        let Some(bytes) = self.limit else { return Ok(OwnFilesPlace { path: self.dir.clone(), _user: None }) };
        let path = self.dir.join(PLACE);
        let mut mounted = self.mounted();
        match mounted.as_mut() {
            Some((users, _)) => *users += 1,
            None => *mounted = Some((1, self.mount(bytes, &path)?)),
        }
        Ok(OwnFilesPlace { path, _user: Some(Arc::new(User(Arc::clone(self)))) })
    }

    /// Waits, for some seconds, until no part of the daemon uses the files.
    pub fn wait_until_unused(&self) {
        let until = Instant::now() + UNUSED_WITHIN;
        while self.mounted().is_some() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn mounted(&self) -> MutexGuard<'_, Option<(usize, MountedDisk)>> {
        self.mounted.lock()
    }

    fn mount(&self, bytes: u64, place: &Path) -> Result<MountedDisk, QuotaError> {
        let image = self.dir.join(IMAGE);
        let has_files = match fs::read_dir(place) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            entries => entries.map_err(at(place))?.next().is_some(),
        };
        if !image.exists() {
            let growing = disk::growing(&image);
            disk::make(&growing, bytes)?;
            if has_files {
                self.fill(&growing, place)?;
            }
            fs::rename(&growing, &image).map_err(at(&image))?;
        }
        if has_files {
            fs::remove_dir_all(place).map_err(at(place))?;
        }
        Ok(MountedDisk::mount(&image, place)?)
    }

    /// Copies files as they are, with all that they have.
    fn fill(&self, image: &Path, from: &Path) -> Result<(), QuotaError> {
        let to = self.dir.join(FILLED);
        let mounted = MountedDisk::mount(image, &to)?;
        let mut copy = Command::new("cp");
        copy.args(["--archive", "--sparse=always", "--"]).args([from.join("."), to.clone()]).stdin(Stdio::null());
        let done = copy.env("LC_ALL", "C").output().map_err(at(Path::new("cp")))?;
        drop(mounted);
        fs::remove_dir(&to).map_err(at(&to))?;
        if done.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&done.stderr).lines().next().unwrap_or("cp was killed").to_owned();
        Err(QuotaError::Fill(said))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut mounted = self.0.mounted();
        match mounted.as_mut() {
            Some((users, _)) if *users > 1 => *users -= 1,
            _ => *mounted = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_sys::ns::{Unshare, unshare};
    use rustix::mount::{MountPropagationFlags, mount_change};

    #[test]
    fn they_are_mounted_as_long_as_somebody_has_to_do_with_them() {
        unshare(Unshare { mount: true, ..Unshare::default() }).expect("root");
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        let data = tempfile::tempdir().unwrap();
        let mut spec: Spec = serde_json::from_str(r#"{"name":"a","command":["x"]}"#).unwrap();
        assert_eq!(OwnFiles::of(&spec, data.path()).place().unwrap().path(), data.path(), "no limit, no file system");
        spec.limits.disk_bytes = Some(disk::MIN_BYTES);
        // As a backup leaves them.
        let restored = data.path().join("disk/upper/root");
        fs::create_dir_all(&restored).unwrap();
        fs::write(restored.join("file"), "of a backup").unwrap();
        std::os::unix::fs::chown(restored.join("file"), Some(0x2000_0001), Some(7)).unwrap();
        rustix::fs::setxattr(restored.join("file"), "trusted.overlay.opaque", b"y", rustix::fs::XattrFlags::empty())
            .unwrap();
        let files = OwnFiles::of(&spec, data.path());
        for _ in 0..2 {
            let (one, other) = (files.place().unwrap(), files.place().unwrap());
            drop(one);
            let file = other.path().join("upper/root/file");
            let found = fs::metadata(&file).unwrap();
            use std::os::unix::fs::MetadataExt as _;
            assert_eq!((found.uid(), found.gid()), (0x2000_0001, 7));
            assert_eq!(rustix::fs::getxattr(&file, "trusted.overlay.opaque", &mut [0u8; 8][..]).unwrap(), 1);
            assert_eq!(fs::read(&file).unwrap(), b"of a backup");
            drop(other);
            assert_eq!(fs::read_dir(data.path().join(PLACE)).unwrap().count(), 0, "nothing lies below");
        }
        assert!(files.limited_bytes().unwrap() > 0);
        let names: Vec<_> = fs::read_dir(data.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
    }
}
