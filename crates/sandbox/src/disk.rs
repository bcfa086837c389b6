//! A file system of limited size in a file: where a proc's own files lie if it has a limit of disk
//! space.
//!
//! ext4 on a loop device, for that limits whatever file system the data directory is on, needs no
//! preparation of it, and what is over the limit gets ENOSPC at once. The file is sparse: it takes
//! what is in it, and gives back what is deleted. (Of what is deleted while it is full or just
//! before it is unmounted ext4 gives nothing back, `ext4_discard_work`; the next first mount does.)
//! The device and the kernel's part of the file system go with the last mount, so that a process
//! that dies leaves nothing.

use kip_sys::loops;
use parking_lot::Mutex;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Smaller ones are mostly journal.
pub const MIN_BYTES: u64 = 16 << 20;
const BLOCK: u32 = 4096;
const INODE_BYTES: u64 = 256;
/// One inode for so many bytes.
const BYTES_PER_INODE: u64 = 16384;
const JOURNAL_MIB: u64 = 4;
/// What ext4 keeps back to be able to delete: two percent, at most so much.
const KEPT_BACK: u64 = 16 << 20;
/// More than what is in it and what is ext4's own.
const GIVEN_BACK_FROM: u64 = 1 << 20;
/// An earlier mount may take so long to be gone.
const OLD_MOUNT_GOES: Duration = Duration::from_secs(5);

/// From the look whether a file has a device to the moment it has one.
static ATTACHING: Mutex<()> = Mutex::new(());

/// There is no such file system.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// A file or directory of ours.
    #[error("could not {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// `mkfs.ext4` cannot be run.
    #[error("mkfs.ext4 cannot be run: install e2fsprogs")]
    NoMkfs(#[source] io::Error),
    /// It failed.
    #[error("mkfs.ext4 failed: {0}")]
    Mkfs(String),
    /// No loop device.
    #[error("{} cannot be made a loop device", path.display())]
    Loop {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The kernel refuses it.
    #[error("{} cannot be mounted", path.display())]
    Mount {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DiskError {
    let path = path.to_owned();
    move |source| DiskError::Io { action, path, source }
}

/// Bytes of a file in which files may take `bytes`.
fn whole(bytes: u64) -> u64 {
    let inodes = bytes.div_ceil(BYTES_PER_INODE) * INODE_BYTES;
    let kept_back = (bytes / 49).min(KEPT_BACK);
    // Bitmaps and descriptors of its groups, and what is lost by rounding up to whole ones.
    let rest = bytes / 256 + (1 << 20);
    (bytes + inodes + kept_back + rest + (JOURNAL_MIB << 20)).next_multiple_of(u64::from(BLOCK))
}

/// Makes an empty file system in which files may take `bytes`. Gives the file its name when it is
/// complete.
///
/// # Errors
/// See [`DiskError`].
pub fn create(image: &Path, bytes: u64) -> Result<(), DiskError> {
    let fresh = growing(image);
    make(&fresh, bytes)?;
    fs::rename(&fresh, image).map_err(failed("name", image))
}

/// The name of a file that is not complete.
pub fn growing(image: &Path) -> PathBuf {
    image.with_extension("new")
}

/// As [`create`], without regard to what is there.
///
/// # Errors
/// See [`DiskError`].
pub fn make(image: &Path, bytes: u64) -> Result<(), DiskError> {
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(image);
    let file = file.map_err(failed("create", image))?;
    file.set_len(whole(bytes)).map_err(failed("lengthen", image))?;
    let mut command = Command::new("mkfs.ext4");
    command.args(["-q", "-F", "-b", &BLOCK.to_string(), "-I", &INODE_BYTES.to_string()]);
    command.args(["-i", &BYTES_PER_INODE.to_string(), "-J", &format!("size={JOURNAL_MIB}"), "-m", "0"]);
    // It is full of holes, which are zeros.
    command.args(["-O", "^resize_inode", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"]).arg(image);
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").env("LC_ALL", "C").stdin(Stdio::null());
    let done = command.output().map_err(DiskError::NoMkfs)?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr).trim().lines().last().unwrap_or("it was killed").to_owned();
        return Err(DiskError::Mkfs(said));
    }
    file.sync_all().map_err(failed("write", image))
}

/// Such a file system at a directory, in the mount namespace of this thread. Unmounted when this is
/// dropped; the file system lives as long as any mount of it, or over it.
#[derive(Debug)]
pub struct MountedDisk {
    at: PathBuf,
}

impl MountedDisk {
    /// Mounts it. `at` is made if it is not there.
    ///
    /// # Errors
    /// See [`DiskError`].
    pub fn mount(image: &Path, at: &Path) -> Result<MountedDisk, DiskError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(at);
        made.map_err(failed("create", at))?;
        let file = File::options().read(true).write(true).open(image).map_err(failed("open", image))?;
        let refused = |e: Errno| DiskError::Mount { path: image.to_owned(), source: e.into() };
        let until = Instant::now() + OLD_MOUNT_GOES;
        loop {
            let one_at_a_time = ATTACHING.lock();
            let attached = loops::attached(file.as_fd()).transpose();
            let is_first = attached.is_none();
            let device = attached.unwrap_or_else(|| loops::attach(file.as_fd(), BLOCK));
            let device = device.map_err(|source| DiskError::Loop { path: image.to_owned(), source })?;
            let mounted = (|| {
                let context = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
                fsconfig_set_string(&context, "source", device.path.as_path())?;
                fsconfig_set_string(&context, "errors", "remount-ro")?;
                fsconfig_set_flag(&context, "discard")?;
                // Holes stay holes.
                fsconfig_set_flag(&context, "noinit_itable")?;
                fsconfig_create(&context)?;
                fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
            })();
            match mounted {
                Ok(mount) => {
                    drop(one_at_a_time);
                    if is_first {
                        give_back(&file, &mount);
                    }
                    move_mount(&mount, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(refused)?;
                    return Ok(MountedDisk { at: at.to_owned() });
                }
                Err(Errno::BUSY) if Instant::now() < until => {}
                Err(e) => return Err(refused(e)),
            }
            drop((device, one_at_a_time));
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Gives back what earlier mounts have not, if that is much. No process may write meanwhile: free
/// blocks are not to be had then. Takes some ten milliseconds; where it fails the file takes more
/// room than it must.
fn give_back(image: &File, root: &OwnedFd) {
    let (Ok(file), Ok(inside)) = (image.metadata(), rustix::fs::fstatvfs(root)) else { return };
    let own = file.len().saturating_sub(inside.f_blocks * inside.f_frsize);
    let used = (inside.f_blocks - inside.f_bfree) * inside.f_frsize;
    if file.blocks() * 512 > used + own + GIVEN_BACK_FROM {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let _ = rustix::fs::openat(root, ".", flags, Mode::empty()).map(|root| kip_sys::mount::trim(root.as_fd()));
    }
}

impl Drop for MountedDisk {
    fn drop(&mut self) {
        if unmount(&self.at, UnmountFlags::empty()).is_err() {
            // A process has a file of it open.
            let _ = unmount(&self.at, UnmountFlags::DETACH);
        }
    }
}
