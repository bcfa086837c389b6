//! One daemon per data directory: `DIR/run/lock`, held by flock(2) for the daemon's life.
//!
//! The kernel drops the lock with its last descriptor, so a daemon that was killed leaves none. The
//! file itself stays: removing it would let two daemons lock two files of one name.

use rustix::fs::{FlockOperation, flock};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// For so long a lock is waited for that a dead daemon has left with others.
const LEFT_BEHIND: Duration = Duration::from_secs(2);

/// Why a data directory could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon has it.
    #[error("a daemon ({}) already runs on {}", pid_words(*.pid), .data.display())]
    Held {
        /// The data directory.
        data: PathBuf,
        /// That daemon's pid, when it had written it down yet.
        pid: Option<u32>,
    },
    /// A directory could not be made or given to the group.
    #[error("cannot prepare the directory {}", .path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The lock file could not be opened, locked or written.
    #[error("cannot lock {}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

fn pid_words(pid: Option<u32>) -> String {
    pid.map_or_else(|| "still starting".to_owned(), |pid| format!("pid {pid}"))
}

/// Proof that this process is the only daemon of a data directory. Dropping it gives the directory
/// up.
#[derive(Debug)]
pub struct DataLock {
    data: PathBuf,
    _file: File,
}

impl DataLock {
    /// Takes `data`, which is made if it is not there, closed to all but its owner. With `group`,
    /// that group may pass through `data` and `data/run` to the API's socket.
    pub fn take(data: &Path, group: Option<u32>) -> Result<DataLock, LockError> {
        let run = data.join("run");
        for dir in [data, &run] {
            prepare(dir, group).map_err(|source| LockError::Directory { path: dir.to_owned(), source })?;
        }
        let path = run.join("lock");
        let failed = |source: io::Error| LockError::File { path: path.clone(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        let until = Instant::now() + LEFT_BEHIND;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let mut text = String::new();
                    file.rewind().and_then(|()| file.read_to_string(&mut text)).map_err(failed)?;
                    let pid = text.trim().parse().ok();
                    // A child of one that was killed has the lock too until it executes its
                    // program.
                    let is_gone = pid.is_some_and(|pid: u32| !Path::new(&format!("/proc/{pid}")).exists());
                    if !is_gone || Instant::now() > until {
                        return Err(LockError::Held { data: data.to_owned(), pid });
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(errno) => return Err(failed(errno.into())),
            }
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(failed)?;
        writeln!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(DataLock { data: data.to_owned(), _file: file })
    }

    /// The data directory that is held.
    pub fn data(&self) -> &Path {
        &self.data
    }
}

/// Makes `dir` with mode 0700 if it is missing and lets `group` pass through it if it could not.
fn prepare(dir: &Path, group: Option<u32>) -> io::Result<()> {
    if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let meta = std::fs::metadata(dir)?;
    if !meta.is_dir() {
        return Err(io::Error::from(io::ErrorKind::NotADirectory));
    }
    let Some(group) = group else { return Ok(()) };
    let passable = meta.mode() & 0o001 != 0 || (meta.gid() == group && meta.mode() & 0o010 != 0);
    if !passable {
        std::os::unix::fs::chown(dir, None, Some(group))?;
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode((meta.mode() & 0o7700) | 0o010))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_is_refused_with_the_first_ones_pid_until_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let first = DataLock::take(&data, None).unwrap();
        let refused = DataLock::take(&data, None).unwrap_err();
        let line = format!("a daemon (pid {}) already runs on {}", std::process::id(), data.display());
        assert_eq!(refused.to_string(), line);
        drop(first);
        DataLock::take(&data, None).unwrap();
    }

    // promise invariants: 9 the data directory is closed
    #[test]
    fn new_directories_are_closed_and_open_to_a_group_only_to_pass() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let mode = |p: &Path| std::fs::metadata(p).unwrap().mode() & 0o7777;
        drop(DataLock::take(&data, None).unwrap());
        assert_eq!((mode(&data), mode(&data.join("run"))), (0o700, 0o700));
        drop(DataLock::take(&data, Some(12345)).unwrap());
        assert_eq!((mode(&data), mode(&data.join("run"))), (0o710, 0o710));
        assert_eq!(std::fs::metadata(&data).unwrap().gid(), 12345);
    }

    #[test]
    fn a_file_in_the_way_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("file");
        std::fs::write(&data, "x").unwrap();
        let refused = DataLock::take(&data, None).unwrap_err();
        assert!(refused.to_string().contains(&*data.to_string_lossy()), "{refused}");
    }
}
