//! Loop devices: block devices that are a file. loop(4); they go by themselves when no process has
//! them open or mounted.

use std::ffi::{c_int, c_ulong};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;

const GET_STATUS: c_ulong = 0x4c05;
const CONFIGURE: c_ulong = 0x4c0a;
const CTL_GET_FREE: c_ulong = 0x4c82;
const AUTOCLEAR: u32 = 4;
const DIRECT_IO: u32 = 16;
/// Others may take a free device before we do.
const TRIES: usize = 100;

/// `struct loop_info64` (linux/loop.h).
#[repr(C)]
#[derive(Default)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [[u8; 32]; 2],
    crypt_name: [[u8; 32]; 2],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
#[derive(Default)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// A loop device that has a file; it stays at least as long as this.
#[derive(Debug)]
pub struct Loop {
    /// Its name in /dev.
    pub path: PathBuf,
    _open: File,
}

fn open(number: impl std::fmt::Display) -> io::Result<Loop> {
    let path = PathBuf::from(format!("/dev/loop{number}"));
    let open = File::options().read(true).write(true).open(&path);
    let open = open.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    Ok(Loop { path, _open: open })
}

/// The device that a file is on already. A file on two devices is soon of no use: look before
/// [`attach`], and let no other caller come between.
///
/// # Errors
/// fstat(2), reading /sys.
pub fn attached(file: BorrowedFd<'_>) -> io::Result<Option<Loop>> {
    let wanted = rustix::fs::fstat(file)?;
    for entry in std::fs::read_dir("/sys/block")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(number) = name.to_str().and_then(|name| name.strip_prefix("loop")) else { continue };
        if !entry.path().join("loop/backing_file").exists() {
            continue;
        }
        // Open, it does not go away any more; it may have gone before.
        let Ok(device) = open(number) else { continue };
        let mut info = Info::default();
        // SAFETY: `info` has the layout and size that this request writes, and lives through the
        // call.
        let done = unsafe { libc::ioctl(device._open.as_raw_fd(), GET_STATUS, &raw mut info) };
        if done == 0 && (info.device, info.inode) == (wanted.st_dev, wanted.st_ino) {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// Makes a block device of a file, with blocks of `block` bytes, past the page cache where the
/// file's own filesystem can: loop(4) `LOOP_CONFIGURE`, Linux 5.8. The device goes when it is
/// neither open nor mounted any more.
///
/// # Errors
/// `NotFound` where the kernel has no loop devices, EBUSY when all are taken by others, EPERM.
pub fn attach(file: BorrowedFd<'_>, block: u32) -> io::Result<Loop> {
    let control = File::options().read(true).write(true).open("/dev/loop-control");
    let control = control.map_err(|e| io::Error::new(e.kind(), format!("/dev/loop-control: {e}")))?;
    for _ in 0..TRIES {
        // SAFETY: this request takes no argument.
        let number: c_int = match unsafe { libc::ioctl(control.as_raw_fd(), CTL_GET_FREE) } {
            -1 => return Err(io::Error::last_os_error()),
            number => number,
        };
        let device = open(number)?;
        let info = Info { flags: AUTOCLEAR | DIRECT_IO, ..Info::default() };
        let config = Config { fd: file.as_raw_fd() as u32, block_size: block, info, ..Config::default() };
        // SAFETY: `config` has the layout and size that this request reads, and lives through the
        // call.
        match unsafe { libc::ioctl(device._open.as_fd().as_raw_fd(), CONFIGURE, &raw const config) } {
            0 => return Ok(device),
            _ => match io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::EBUSY) => {}
                e => return Err(e),
            },
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a process of its own: a child that another test forks has the device open until it
    /// executes its program.
    #[test]
    fn a_file_is_found_again_as_long_as_its_device_is_open() {
        const NAME: &str = "loops::tests::a_file_is_found_again_as_long_as_its_device_is_open";
        if !std::env::args().any(|a| a == "--include-ignored") {
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            assert!(again.args([NAME, "--exact", "--include-ignored"]).status().unwrap().success());
            return;
        }
        assert_eq!((size_of::<Info>(), size_of::<Config>()), (232, 304), "as linux/loop.h says");
        let dir = tempfile::tempdir().unwrap();
        let file = |name| {
            let file = File::options().read(true).write(true).create_new(true).open(dir.path().join(name)).unwrap();
            file.set_len(1 << 20).unwrap();
            file
        };
        let (one, other) = (file("one"), file("other"));
        assert!(attached(one.as_fd()).unwrap().is_none());
        let device = attach(one.as_fd(), 4096).unwrap();
        let found = attached(one.as_fd()).unwrap().unwrap();
        assert_eq!(found.path, device.path);
        assert!(attached(other.as_fd()).unwrap().is_none());
        drop((device, found));
        assert!(attached(one.as_fd()).unwrap().is_none(), "it goes with the last that had it open");
    }
}
