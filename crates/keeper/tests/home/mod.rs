//! A data directory of a test's own with its keeper.

use kip_keeper::Keeper;
use kip_sys::process::{Signal, pidfd_send_signal, wait_for_end};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const BINARY: &str = env!("CARGO_BIN_EXE_kip-keeper");
pub const SOON: Duration = Duration::from_secs(10);

/// A data directory whose keeper ends with it.
pub struct Home {
    dir: tempfile::TempDir,
}

impl Home {
    pub fn new() -> Home {
        Home { dir: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn keeper(&self) -> Keeper {
        Keeper::connect_or_spawn(Path::new(BINARY), self.path()).unwrap()
    }

    /// A program that lowers a limit, or does something else as a shell can, and becomes the
    /// keeper. Another process writes it: a file this one has open for writing, and a thread's
    /// child inherits for a moment, cannot be executed.
    pub fn wrapped(&self, shell: &str) -> PathBuf {
        let path = self.path().join("wrapper");
        let write = "printf '%s\n' \"$1\" >\"$0\" && chmod 700 \"$0\"";
        let body = format!("#!/bin/sh\n{shell}\nexec {BINARY} \"$@\"");
        let written = std::process::Command::new("sh").args(["-c", write]).arg(&path).arg(body).status();
        assert!(written.unwrap().success());
        path
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let keeper = Keeper::connect(Path::new(BINARY), self.path());
        if let Ok(Some(keeper)) = keeper
            && keeper.quit().is_err()
        {
            kill(&keeper);
        }
    }
}

pub fn kill(keeper: &Keeper) {
    let pidfd = keeper.watch_fd().unwrap();
    pidfd_send_signal(pidfd.as_fd(), Signal::KILL).unwrap();
    assert!(wait_for_end(pidfd.as_fd(), Some(SOON)).unwrap());
}
