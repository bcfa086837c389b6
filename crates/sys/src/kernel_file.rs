//! Files that the kernel makes when they are read: those of /proc, /sys and cgroup file systems.
//!
//! Their size is not known, so that [`std::fs::read`] asks for it in vain and begins with 32 bytes:
//! eight calls for the status of a process. Here it takes four.

use rustix::buffer::spare_capacity;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::path::Path;

/// Most of them are shorter, bytes.
const ROOM: usize = 4096;

/// All that is in such a file.
///
/// # Errors
/// open(2), read(2).
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let file = rustix::fs::open(path.as_ref(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::with_capacity(ROOM);
    loop {
        match rustix::io::read(&file, spare_capacity(&mut bytes)) {
            Ok(0) => return Ok(bytes),
            Ok(_) if bytes.len() == bytes.capacity() => bytes.reserve(ROOM),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// The same as text.
///
/// # Errors
/// open(2), read(2); `InvalidData` if it is not UTF-8.
pub fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_files_are_read_whole() {
        for path in ["/proc/version", "/proc/self/comm", "/proc/cpuinfo", "/proc/kallsyms"] {
            // Some of them change with time.
            let is_same = || read(path).unwrap() == std::fs::read(path).unwrap();
            assert!((0..20).any(|_| is_same()), "{path}");
        }
        assert!(read("/proc/kallsyms").unwrap().len() > 2 * ROOM);
        assert_eq!(read("/proc/self/none").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(read_to_string("/proc/meminfo").unwrap().starts_with("MemTotal:"));
    }
}
