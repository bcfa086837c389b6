//! Directories of procs, copied: into the directory of another proc, and what tar has to do and say
//! where they go into a file or come out of one.
//!
//! Owns a directory while it copies; knows of no record, and never decides what is copied when.
#![forbid(unsafe_code)]

mod stage;

pub use stage::{CopyError, ProcCopy, sync};

use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

/// What tar has to do alike at both ends.
pub const TAR: &[&str] = &["--numeric-owner", "--acls", "--xattrs", "--xattrs-include=*", "--warning=none"];
/// Of the overlay: true on one machine only (`kip_archive::files::rules`).
pub const BOUND: [&str; 4] = ["origin", "nlink", "uuid", "impure"];
/// Of what tar says.
const SAID_MAX: usize = 300;

/// What tar says, in memory: a disk may be what it complains of.
#[derive(Debug)]
pub struct Said(File);

impl Said {
    /// Nothing yet.
    ///
    /// # Errors
    /// Those of memfd_create(2).
    pub fn new() -> io::Result<Said> {
        Ok(Said(rustix::fs::memfd_create(c"tar", MemfdFlags::CLOEXEC)?.into()))
    }

    /// For tar.
    ///
    /// # Errors
    /// Those of dup(2).
    pub fn hand(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// The first thing that it said.
    pub fn line(&mut self) -> String {
        let mut text = String::new();
        let read = self.0.seek(SeekFrom::Start(0)).and_then(|_| self.0.read_to_string(&mut text));
        let line = text.lines().next().filter(|_| read.is_ok()).unwrap_or("it was killed");
        line.chars().take(SAID_MAX).collect()
    }
}
