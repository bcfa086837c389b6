//! The files that say which leases a proc has: a line for each lease, of a fixed length, so that
//! one is noted by one pwrite(2) and a daemon that is killed leaves whole lines. Not synced: after
//! a power cut a lease ends by its time.

use super::HeldLease;
use kip_types::runtime::{ENDED_LEASES, LEASES, ended_leases};
use kip_types::tree::TreeLeaseId;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of a line, with its end.
const LINE: usize = 64;
/// The last word of a line for a lease that the daemon keeps all the time.
const WITH_PROC: &str = "with-proc";

/// The file of the program that runs or sleeps.
pub(super) fn open(directory: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).open(directory.join(LEASES))
}

/// Makes it.
pub(super) fn make(directory: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(directory.join(LEASES))
}

pub(super) fn is_there(directory: &Path) -> bool {
    directory.join(LEASES).exists()
}

pub(super) fn put(file: &File, id: TreeLeaseId, lease: &HeldLease) -> io::Result<()> {
    let word = if lease.with_proc { WITH_PROC } else { "" };
    write_line(file, lease.line, &format!("{id} {} {word}", lease.ttl.as_millis()))
}

pub(super) fn clear(file: &File, line: usize) -> io::Result<()> {
    write_line(file, line, "")
}

fn write_line(file: &File, line: usize, text: &str) -> io::Result<()> {
    let text = format!("{text:<width$}\n", width = LINE - 1);
    file.write_all_at(text.as_bytes(), (line * LINE) as u64)
}

/// The leases of the program that runs or sleeps.
pub(super) fn read(directory: &Path) -> BTreeMap<TreeLeaseId, HeldLease> {
    read_file(&directory.join(LEASES))
}

fn read_file(path: &Path) -> BTreeMap<TreeLeaseId, HeldLease> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let one = |at: (usize, &str)| {
        let (line, mut words) = (at.0, at.1.split_whitespace());
        let (id, ttl_ms) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let with_proc = words.next() == Some(WITH_PROC);
        Some((id, HeldLease { ttl: Duration::from_millis(ttl_ms), with_proc, kept: None, line }))
    };
    text.lines().enumerate().filter_map(one).collect()
}

/// The program has ended.
pub(super) fn end(directory: &Path) {
    let path = directory.join(LEASES);
    if let Ok(found) = fs::metadata(&path) {
        let _ = fs::rename(path, directory.join(ended_leases(found.ino())));
    }
}

fn ended_files(directory: &Path) -> Vec<PathBuf> {
    let is_one = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(ENDED_LEASES))
    };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_one).collect()
}

/// The leases of programs that have ended.
pub(super) fn ended(directory: &Path) -> BTreeSet<TreeLeaseId> {
    ended_files(directory).iter().flat_map(|path| read_file(path).into_keys()).collect()
}

/// Removes the files of ended programs none of whose leases is still looked after.
pub(super) fn sweep(directory: &Path, is_needed: impl Fn(TreeLeaseId) -> bool) {
    for path in ended_files(directory) {
        if !read_file(&path).into_keys().any(&is_needed) {
            let _ = fs::remove_file(path);
        }
    }
}
